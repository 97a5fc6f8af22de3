"""The report of a run as Markdown, short enough for an issue."""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

import sparsemla
from sparsemla_lab.bench.timing import Results, Timer
from sparsemla_lab.doctor import Gpu
from sparsemla_lab.typical import function_of, typical_call
from sparsemla_lab.verify.run import OpReport, Report, device_name

TIMED = ("sparse_decode", "sparse_prefill", "indexer_topk", "select_topk", "decode_branch")
"""Ops whose typical call is timed."""

FAILURES = 5
"""Maximum number of failures in the text; the report in JSON has all of them."""
WIDTH = 160
"""Maximum number of letters of a failure."""


def markdown(report: Report, device: str) -> str:
    """Hardware, versions, a row for each op, times of typical calls, and the first failures.

    Args:
        report: the report of a run in this process.
        device: ``cpu`` or ``cuda``, on which it ran.
    """
    cases = sum(op.cases for op in report.ops)
    failures = [f"{op.op}, {failure}" for op in report.ops for failure in op.failures]
    failures += [
        f"{each.op}, {each.case}: {each.failure}" for each in report.shared if each.failure
    ]
    passed = cases - sum(op.failed for op in report.ops)
    lines = [
        f"### sparsemla verify, {report.device}: {passed} of {cases} cases passed",
        "",
        *(f"- {name}: {value}" for name, value in _facts(report, device)),
        "",
        "| op | tier | cases | failed | failed checks | s |",
        "|---|---|---|---|---|---|",
        *map(_row, report.ops),
    ]
    if failures:
        shown = [" ".join(each.split("\n")[0].split())[:WIDTH] for each in failures[:FAILURES]]
        more = [f"and {len(failures) - FAILURES} more"] * (len(failures) > FAILURES)
        lines += ["", "```text", *shown, *more, "```"]
    return "\n".join(lines)


def _facts(report: Report, device: str) -> Iterator[tuple[str, str]]:
    yield "device", hardware() if device == "cuda" else f"{platform.machine()} CPU"
    commit = (report.commit or "unknown")[:9]
    changed = ", with changes" if report.dirty else ""
    yield "sparsemla", f"{sparsemla.__version__}, commit {commit}{changed}"
    yield "kernels", report.kernel_hash[:12]
    yield "torch", f"{report.torch}, Triton {report.triton or 'not installed'}"
    yield "Python", f"{report.python} on {platform.platform()}"
    tiers = dict.fromkeys(tier for op in report.ops for tier in op.tier.split("+") if tier)
    yield "tiers that ran", ", ".join(tiers)
    seconds = sum(op.seconds for op in report.ops)
    yield "run", f"{'quick' if report.quick else 'all'} cases, {seconds:.0f} s with compilation"
    # A time of a wrong result, or of the code of another GPU, would mislead.
    if report.passed and report.device == device_name(device):
        names = [op.op for op in report.ops if op.op in TIMED]
        yield "typical calls", ", ".join(f"{op} {_time(op, device)}" for op in names) or "none"


def hardware() -> str:
    """The first GPU: its name, target, size and driver."""
    found = torch.cuda.get_device_properties(0)
    size = f"{found.total_memory / 2**30:.0f} GiB, {found.multi_processor_count} SMs"
    return f"{found.name}, {Gpu.here().target}, {size}, driver {_driver()}"


def _driver() -> str:
    """The version of the GPU's driver, as nvidia-smi or Linux names it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.CalledProcessError):
        answer = subprocess.run(command, capture_output=True, text=True, check=True)
        return answer.stdout.split("\n")[0]
    module = Path("/sys/module/amdgpu/version")
    return module.read_text(encoding="utf-8").strip() if module.exists() else "unknown"


def _row(op: OpReport) -> str:
    checks = ", ".join(
        f"{name.replace('_', ' ')} {found.failed} of {found.checked}"
        for name, found in op.properties.items()
        if found.failed
    )
    cells = (op.op, op.tier, op.cases, op.failed, checks, f"{op.seconds:.1f}")
    return f"| {' | '.join(map(str, cells))} |"


def _time(op: str, device: str) -> str:
    arguments, function = typical_call(op, device), function_of(op)

    def call() -> Results:
        function(**arguments)
        return ()

    timer = Timer(device, budget_ms=20)
    try:
        (timing,) = timer.interleaved([timer.prepare(call)])
    except Exception as error:  # the report of a run of an hour must not get lost
        return f"fails ({type(error).__name__})"
    return f"{timing.us:.0f} us"

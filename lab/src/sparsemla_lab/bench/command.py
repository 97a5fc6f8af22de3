"""The function of ``sparsemla bench`` and ``python -m sparsemla_lab.bench``."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from sparsemla.validation import missing_gpu
from sparsemla_lab.bench import cpu, host, report, timeline
from sparsemla_lab.bench.ceilings import measure
from sparsemla_lab.bench.compiling import acting, compile_first
from sparsemla_lab.bench.peers import find_peers
from sparsemla_lab.bench.run import Choice, Outcome, Stamp, run_all, select_workloads, with_steps
from sparsemla_lab.bench.timing import Timer
from sparsemla_lab.bench.training import crossing_lines
from sparsemla_lab.bench.workloads import Workload
from sparsemla_lab.options import INSTALL_DEMO

WITH = {"table": ("plot",), "launches": ("plot", "peers"), "host_times": ("commit", "peers")}
"""Options that count beside one that measures nothing, or something else."""


def bench(
    write: Callable[[str], object],
    *,
    op: str | None = None,
    case: str | None = None,
    json: Path | None = None,
    plot: Path | None = None,
    peers: Path | None = None,
    device: str | None = None,
    commit: str | None = None,
    table: Path | None = None,
    full: bool = False,
    launches: Path | None = None,
    host_times: Path | None = None,
    acting_as: str | None = None,
    cases: str | None = None,
    jobs: int | None = None,
) -> int:
    """Measure, or with ``table`` only print the tables of a JSON file (and plot it).

    Args:
        write: takes each line of output.
        op: measure this op only.
        case: a regular expression; measure only workloads with an op and a case that contain it.
        json: file of this device to add the rows to. Its rows of other workloads stay, and of peers
            that this run does not measure, with the commit, date and versions of their own run. A
            peer with a wrong result loses its row.
        plot: folder for bar and line plots.
        peers: a directory that holds vLLM's extension modules, see
            :mod:`sparsemla_lab.bench.peers`.
        device: ``cuda`` or ``cpu``; default the GPU, if there is one.
        commit: commit to record in the rows; default the checkout's.
        table: a JSON file to print as Markdown tables; nothing is measured.
        full: measure every size of the whole decode step and of top-k, not only some.
        launches: a JSON file for begin and end of each kernel of some decode steps; nothing
            else is measured, and without a GPU the file is only read.
        host_times: a JSON file for the host's time of eager calls; nothing else is measured, and
            without a GPU the file is only read.
        acting_as: an older GPU, ``sm_80`` or ``sm_89``, whose code the GPU runs. Ratios between
            rows say which code is better, no row says how long that GPU takes. Peers are those that
            Triton compiles; rows name the others.
        cases: a set of workloads: ``portable`` has those that compare portable kernels.
        jobs: number of processes that compile the kernels first; default, they are compiled as they
            are needed. A first run spends most of its time in compilation.

    Returns:
        The exit code: 1 if a result was wrong, or one of this package is missing.

    Raises:
        ValueError: arguments that do not go together, or an op that is not measured.
    """
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"plot needs matplotlib, which is not installed; in the checkout: {INSTALL_DEMO}"
        )
    options = {
        "op": op,
        "case": case,
        "json": json,
        "plot": plot,
        "peers": peers,
        "device": device,
        "commit": commit,
        "full": full or None,
        "table": table,
        "launches": launches,
        "host_times": host_times,
        "as": acting_as,
        "set": cases,
        "jobs": jobs,
    }
    given = [name for name, value in options.items() if value is not None]
    _check_together(given, device, op)
    if table is not None:
        found = report.load(table)
        write(report.markdown(found))
        for line in crossing_lines(found.rows):
            write(line)
        _plot(write, found, plot)
        return 0
    if launches is not None:
        return _launches(write, launches, plot, peers)
    if host_times is not None:
        return _host_times(write, host_times, commit, peers)
    if device == "cpu" or (device is None and not torch.cuda.is_available()):
        return _compare_on_cpu(write)
    if jobs is not None and jobs < 1:
        raise ValueError(f"jobs must be at least 1, got {jobs}")
    chosen = op, full, case, cases
    return _measure(write, chosen, json, plot, peers, commit, acting_as, jobs)


def _check_together(given: list[str], device: str | None, op: str | None) -> None:
    """Refuse options that would not count, and an op that is not measured."""
    mode = next((name for name in ("table", "launches", "host_times") if name in given), None)
    if mode is not None:
        if others := [name for name in given if name not in (mode, *WITH[mode])]:
            raise ValueError(f"{', '.join(others)} must not be given with {mode}")
        return
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    if op is not None:
        select_workloads(op)  # refuses an op that does not exist, on any machine
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ValueError(f"device must be cpu on this machine, got 'cuda': {missing_gpu()}")
    others = [name for name in given if name != "device"]
    if others and (device == "cpu" or not has_gpu):
        reason = "" if has_gpu else f": {missing_gpu()}"
        raise ValueError(f"{', '.join(others)} must not be given with the device cpu{reason}")


def _measure(
    write: Callable[[str], object],
    chosen: Choice,
    json: Path | None,
    plot: Path | None,
    peers: Path | None,
    commit: str | None,
    acting_as: str | None,
    jobs: int | None,
) -> int:
    workloads = select_workloads(*chosen)
    device = torch.cuda.get_device_name() + (f" as {acting_as}" if acting_as else "")
    earlier = report.load(json) if json is not None and json.exists() else None
    if earlier is not None and earlier.device != device:
        raise ValueError(
            f"json must name a file of {device} or a new one; {json} has rows of {earlier.device}"
        )
    if jobs is not None:
        compile_first(chosen, len(workloads), peers, acting_as, jobs)
    timer = Timer("cuda")  # asks torch about the GPU itself
    stamp = Stamp.now(commit, peers)
    failed = False
    wrong: set[report.Timed] = set()

    def done(workload: Workload, outcome: Outcome) -> None:
        nonlocal failed
        for line in report.text_lines(outcome.rows):
            write(line)
        for name, reason in outcome.failures.items():
            failed = True
            wrong.add(((workload.op, workload.case, workload.label), name))
            write(f"FAILED {name}: {workload.op}, {workload.case} {workload.label}: {reason}")
        for name, reason in outcome.refusals.items():
            write(f"without {name}: {workload.op}, {workload.case} {workload.label}: {reason}")
        current.rows.extend(outcome.rows)
        if json is not None and outcome.rows:
            for row in report.lost(earlier, outcome.rows) if earlier else ():
                at = f"{row.peer}: {', '.join(filter(None, row.workload))}"
                if (row.workload, row.peer) in wrong:
                    write(f"dropped from {json}: {at}")
                else:
                    write(f"kept in {json}: {at}, of {row.date} at commit {row.commit}")
            report.save(json, report.merged(earlier, current, wrong) if earlier else current)

    with acting(acting_as):
        competitors, missing = with_steps(*find_peers(peers))
        for name, reason in missing.items():
            write(f"without {name}: {reason}")
        current = report.Report(device, measure(timer, acting_as=acting_as), [])
        write(report.ceiling_line(current))
        write(" | ".join(report.HEADER))
        run_all(workloads, competitors, timer, current.ceilings, stamp, done, acting_as)
    for line in crossing_lines(current.rows):
        write(line)
    _plot(write, current, plot)
    return int(failed)


def _launches(
    write: Callable[[str], object], path: Path, plot: Path | None, peers: Path | None
) -> int:
    if torch.cuda.is_available():
        competitors, missing = with_steps(*find_peers(peers))
        for name, reason in missing.items():
            write(f"without {name}: {reason}")
        timeline.save(path, timeline.record(competitors, Timer("cuda")))
    lines = timeline.load(path)
    for text in timeline.text_lines(lines):
        write(text)
    if plot is not None:
        timeline.plot(lines, plot / "decode_step_launches.png")
    return 0


def _host_times(
    write: Callable[[str], object], path: Path, commit: str | None, peers: Path | None
) -> int:
    if torch.cuda.is_available():
        stamp = Stamp.now(commit, peers)
        host.save(path, host.measure(stamp.commit, stamp.date, stamp.versions))
    for text in host.text_lines(host.load(path)):
        write(text)
    return 0


def _plot(write: Callable[[str], object], found: report.Report, plot: Path | None) -> None:
    if plot is not None:
        for path in report.plot(found, plot):
            write(str(path))


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process: Python waits for a call of torch, a minute long on one thread."""
    handler = signal.getsignal(signal.SIGINT)
    if handler is not signal.default_int_handler:  # replaced by the program, or ignored
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def _compare_on_cpu(write: Callable[[str], object]) -> int:
    write(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    write(f"{'case':<36}{'sparse ms':>12}{'dense ms':>12}{'ratio':>8}  fastest dense variant")
    with _ending_at_once():
        try:
            for row in cpu.compare():
                numbers = f"{row.sparse_ms:>12.2f}{row.dense_ms:>12.2f}{row.ratio:>8.2f}"
                write(f"{row.case:<36}{numbers}  {row.dense}")
        except RuntimeError as error:
            write(f"FAILED {error}")
            return 1
    return 0

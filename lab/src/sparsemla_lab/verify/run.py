"""The loop over the cases, and its report."""

from __future__ import annotations

import hashlib
import importlib
import itertools
import json
import multiprocessing
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import torch

import sparsemla
from sparsemla.kernels.common.device import describe
from sparsemla.validation import missing_gpu, not_one_of
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import FP8_MMA, Tolerance, kernel_of, tolerances_of
from sparsemla_lab.verify.beside import Shared, calls_of, compile_calls, rerun_beside
from sparsemla_lab.verify.matrix import MATRIX, Case
from sparsemla_lab.verify.properties import (
    PER_REQUEST,
    Measured,
    against_reference,
    check_alone,
    check_empty_rows,
    check_late_inputs,
    check_permission,
    check_replay,
    check_reruns,
    recorded_tiers,
)

PACKAGE = Path(sparsemla.__file__).parent
RERUNS, QUICK_RERUNS, INTERPRETED_RERUNS = 20, 5, 1
GROUP = 12
"""Number of cases in a unit of work of a process."""
SHOWN = 40
"""Maximum number of lines per failure in the report."""


@dataclass(frozen=True)
class Property:
    """The number of cases in which a property was checked, and in which it failed."""

    checked: int = 0
    failed: int = 0


@dataclass(frozen=True)
class OpReport:
    """The report of one op.

    Attributes:
        op: name of the op.
        tier: the tier that dispatch chose, or several joined by ``+``, as for branches.
        cases: number of cases that ran.
        failed: number of cases with a failure.
        worst: largest absolute difference from the reference, per result.
        share: largest ratio of an element's difference to its limit, per result.
        tolerance: limits of the tolerance, or ``exact``, per result.
        properties: empty_rows, repeatable, late_inputs, graph_replay, batch_invariant and
            bf16_bits, as far as they apply.
        seconds: total time of all processes, including compilation.
        failures: error messages that begin with the name of the case.
    """

    op: str
    tier: str
    cases: int
    failed: int
    worst: Mapping[str, float]
    share: Mapping[str, float]
    tolerance: Mapping[str, Mapping[str, float] | str]
    properties: Mapping[str, Property]
    seconds: float
    failures: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """The report of a run: environment and results.

    Attributes:
        commit: the given commit, or the commit of the package's checkout, or None.
        dirty: whether the checkout had changes; None if the commit was given or is unknown.
        date: UTC, ISO 8601.
        torch, triton, python: versions; triton is None if it is not installed.
        device: :func:`device_name`.
        kernel_hash: :func:`kernel_hash`.
        quick: whether only the quick cases ran.
        beside: number of processes that kept the device busy during repeated calls.
        shared: results of these repeated calls.
        ops: a report per op.
    """

    commit: str | None
    dirty: bool | None
    date: str
    torch: str
    triton: str | None
    python: str
    device: str
    kernel_hash: str
    quick: bool
    beside: int
    shared: tuple[Shared, ...]
    ops: tuple[OpReport, ...]

    @property
    def passed(self) -> bool:
        """Whether no case and no repeated call failed."""
        failed = any(op.failed for op in self.ops)
        return not failed and all(call.failure is None for call in self.shared)

    def to_json(self) -> str:
        """The attributes of the report as a JSON object."""
        return json.dumps(asdict(self), indent=2, allow_nan=False) + "\n"


def verify(
    device: str,
    *,
    quick: bool = False,
    ops: Sequence[str] = (),
    commit: str | None = None,
    jobs: int = 1,
    beside: int = 0,
    acting_as: str | None = None,
    on_case: Callable[[str, str], None] | None = None,
    on_op: Callable[[OpReport], None] | None = None,
    on_shared: Callable[[Shared], None] | None = None,
) -> Report:
    """Check ops on a device against their reference, and for repeatability and batch invariance.

    Args:
        device: ``cpu`` or ``cuda``.
        quick: run a few cases per op, with fewer reruns.
        ops: names of ops; default: those of :func:`usual_ops`.
        commit: commit to record in the report instead of the checkout's.
        jobs: number of processes; a first run spends most of its time in compilation.
        beside: number of processes that keep the device busy while long calls are repeated, see
            :mod:`sparsemla_lab.verify.beside`; 0 skips these calls.
        acting_as: name of an older GPU to emulate, see :mod:`sparsemla_lab.testing.emulate`; only
            in a process that has not used the GPU yet. On the CPU any GPU with kernels in Gluon,
            such as ``sm_90`` or ``sm_80``: run them in an interpreter, see
            :mod:`sparsemla_lab.testing.interpreter`; only in a process in which Triton interprets.
        on_case: called with the names of op and case before each case, if jobs is 1.
        on_op: called with the report of each op.
        on_shared: called with the result of each repeated call.

    Returns:
        The report.

    Raises:
        ValueError: an unknown device, op or older GPU.

    >>> report = verify("cpu", quick=True, ops=["to_slots"])
    >>> report.passed, report.ops[0].worst
    (True, {'out': 0.0})
    """
    check_choice(device, ops, beside, acting_as)
    names = ops or usual_ops(device, acting_as)
    cases_of = device_of_cases(device, acting_as)
    groups = {op: range(0, len(chosen_cases(op, cases_of, quick)), GROUP) for op in names}
    reports = []
    with ExitStack() as stack:
        if jobs == 1:
            results = (
                (op, [_run_group(op, i, device, quick, acting_as, on_case) for i in firsts])
                for op, firsts in groups.items()
            )
        else:
            # A forked process cannot use the GPU if its parent has used it.
            spawn = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(jobs, mp_context=spawn)
            stack.callback(pool.shutdown, cancel_futures=True)  # after Ctrl-C start no other group
            submitted = [
                (op, [pool.submit(_run_group, op, i, device, quick, acting_as) for i in firsts])
                for op, firsts in groups.items()
            ]
            results = ((op, [future.result() for future in futures]) for op, futures in submitted)
        for op, op_groups in results:
            report = _summarise(op, op_groups)
            reports.append(report)
            if on_op is not None:
                on_op(report)
        if beside and jobs > 1:
            list(pool.map(compile_calls, names, itertools.repeat(device)))
    shared = []
    if beside:
        calls = [call for op in names for call in calls_of(op, device)]
        for call in rerun_beside(calls, device, beside):
            shared.append(call)
            if on_shared is not None:
                on_shared(call)
    commit, dirty = (commit, None) if commit else _checkout()
    return Report(
        commit=commit,
        dirty=dirty,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        torch=torch.__version__,
        triton=_triton_version(),
        python=platform.python_version(),
        device=device_name(device, acting_as),
        kernel_hash=kernel_hash(),
        quick=quick,
        beside=beside,
        shared=tuple(shared),
        ops=tuple(reports),
    )


def _run_group(
    op: str,
    first: int,
    device: str,
    quick: bool,
    acting_as: str | None,
    on_case: Callable[[str, str], None] | None = None,
) -> _Group:
    """Run up to :data:`GROUP` cases of an op, starting with number ``first``."""
    started = time.perf_counter()
    reruns = QUICK_RERUNS if quick else RERUNS
    if device == "cpu" and acting_as is not None:
        reruns = INTERPRETED_RERUNS
    outcomes = []
    with _acting(acting_as, device):
        for case in chosen_cases(op, device_of_cases(device, acting_as), quick)[
            first : first + GROUP
        ]:
            if on_case is not None:
                on_case(op, case.name)
            outcomes.append(_run_case(op, case, device, reruns))
    return _Group(outcomes, time.perf_counter() - started)


def device_of_cases(device: str, acting_as: str | None) -> str:
    """The device whose cases run."""
    return device if acting_as is None else "cuda"


def _acting(name: str | None, device: str) -> AbstractContextManager[None]:
    if name is None:
        return nullcontext()
    if device == "cpu":
        from sparsemla_lab.testing import interpreter  # needs Triton

        return interpreter.acting_as(name)
    from sparsemla_lab.testing.emulate import acting_as  # needs Triton

    return acting_as(name)


def check_choice(
    device: str, ops: Sequence[str], beside: int = 0, acting_as: str | None = None
) -> None:
    """Check that the device is available, the ops exist, and the GPU to emulate is older.

    Raises:
        ValueError: a check fails; the message has the expected and the actual value.
    """
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device must be cpu on this machine, got 'cuda': {missing_gpu()}")
    for op in ops:
        if op not in MATRIX:
            raise not_one_of("op", MATRIX, op)
    if acting_as is None:
        return
    if beside:
        raise ValueError(f"beside must be 0 to act as {acting_as}, got {beside}")
    if device == "cpu":
        from sparsemla_lab.testing.interpreter import TIER_OF  # needs Triton

        if acting_as not in TIER_OF:
            raise ValueError(f"a CPU can act as {', '.join(TIER_OF)}; got {acting_as!r}")
    else:
        from sparsemla_lab.testing.emulate import older_target  # needs Triton

        older_target(acting_as)


def usual_ops(device: str, acting_as: str | None) -> tuple[str, ...]:
    """All ops, or those with kernels in Gluon for a GPU, which a CPU interprets."""
    if acting_as is None or device != "cpu":
        return tuple(MATRIX)
    from sparsemla_lab.testing.interpreter import interpreted_ops  # needs Triton

    return tuple(op for op in MATRIX if op in interpreted_ops(acting_as))


def chosen_cases(op: str, device: str, quick: bool) -> list[Case]:
    """The cases of an op that a run on this device includes."""
    return [
        case
        for case in MATRIX[op]
        if (case.quick or not quick) and (device == "cuda" or not case.large)
    ]


def device_name(device: str, acting_as: str | None = None) -> str:
    """Name of the GPU, or ``cpu``, and of the GPU that it emulates."""
    name = device if device == "cpu" else torch.cuda.get_device_name()
    return name + (f" as {acting_as}" if acting_as else "")


def kernel_hash() -> str:
    """SHA-256 of the names and contents of all Python files below ``sparsemla/kernels``."""
    digest = hashlib.sha256()
    for path in sorted((PACKAGE / "kernels").rglob("*.py")):
        digest.update(path.relative_to(PACKAGE).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True)
class _Outcome:
    case: str
    tiers: tuple[str, ...]
    measured: tuple[Measured, ...]
    properties: Mapping[str, bool]
    failures: tuple[str, ...]


class _Group(NamedTuple):
    """The outcomes of some cases of an op, and their time in seconds."""

    outcomes: Sequence[_Outcome]
    seconds: float


def _run_case(op: str, case: Case, device: str, reruns: int) -> _Outcome:
    measured: list[Measured] = []
    properties: dict[str, bool] = {}
    failures: list[str] = []

    def attempt(check: Callable[[], None]) -> bool:
        """Run a check and record any exception as a failure."""
        try:
            check()
            if device == "cuda":
                torch.cuda.synchronize()
        except AssertionError as error:
            failures.append(str(error))
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
        else:
            return True
        return False

    def all_checks() -> None:
        arguments = case.build(Draw(0, device))
        tolerances = case.tolerances or tolerances_of(op, arguments)
        differences, results = against_reference(op, arguments, tolerances)
        measured.extend(differences)
        failures.extend(each.failure for each in differences if each.failure is not None)
        if "lse" in results and results["lse"].isneginf().any():
            properties["empty_rows"] = attempt(lambda: check_empty_rows(results))
        properties["repeatable"] = attempt(lambda: check_reruns(op, arguments, results, reruns))
        if "allow_fp8_mma" in arguments and kernel_of(op, arguments) != FP8_MMA:
            properties["bf16_bits"] = attempt(lambda: check_permission(op, arguments, results))
        if op in PER_REQUEST and case.alone:
            properties["batch_invariant"] = attempt(lambda: check_alone(op, arguments))
        if device == "cuda" and describe(torch.device(device)).overlaps:
            properties["late_inputs"] = attempt(lambda: check_late_inputs(op, arguments, results))
        if device == "cuda" and case.replayed:
            others = case.build(Draw(1, device))
            properties["graph_replay"] = attempt(lambda: check_replay(op, arguments, others))

    with recorded_tiers() as tiers:
        attempt(all_checks)
    return _Outcome(case.name, tuple(tiers), tuple(measured), properties, tuple(failures))


def _summarise(op: str, groups: Sequence[_Group]) -> OpReport:
    outcomes = [outcome for group in groups for outcome in group.outcomes]
    worst: dict[str, float] = {}
    share: dict[str, float] = {}
    tolerance: dict[str, Mapping[str, float] | str] = {}
    properties: dict[str, Property] = {}
    failures = []
    for outcome in outcomes:
        for measured in outcome.measured:
            limits = _limits(measured.tolerance)
            # A result of a case with a different tolerance gets a separate entry.
            name = measured.result
            if tolerance.setdefault(name, limits) != limits:
                name = f"{measured.result} of {outcome.case}"
                tolerance[name] = limits
            worst[name] = max(worst.get(name, 0.0), measured.difference)
            share[name] = max(share.get(name, 0.0), measured.share)
        for name, holds in outcome.properties.items():
            counts = properties.get(name, Property())
            properties[name] = Property(counts.checked + 1, counts.failed + (not holds))
        for failure in outcome.failures:
            lines = failure.splitlines()[:SHOWN]
            failures.append(f"{outcome.case}: " + "\n".join(lines))
    return OpReport(
        op=op,
        tier="+".join(dict.fromkeys(tier for outcome in outcomes for tier in outcome.tiers)),
        cases=len(outcomes),
        failed=sum(bool(outcome.failures) for outcome in outcomes),
        worst=worst,
        share=share,
        tolerance=tolerance,
        properties=properties,
        seconds=round(sum(group.seconds for group in groups), 2),
        failures=tuple(failures),
    )


def _limits(tolerance: Tolerance | None) -> Mapping[str, float] | str:
    """The non-zero limits of a tolerance, or ``exact``."""
    if tolerance is None:
        return "exact"
    return {name: limit for name, limit in asdict(tolerance).items() if limit or name == "cos"}


def _triton_version() -> str | None:
    """Version of the imported Triton, which may differ from the installed one."""
    try:
        return str(importlib.import_module("triton").__version__)
    except ImportError:
        return None


def _checkout() -> tuple[str | None, bool | None]:
    """The commit of the checkout that tracks ``sparsemla``, and whether that has changes."""
    try:
        _git("ls-files", "--error-unmatch", sparsemla.__file__)
        return _git("rev-parse", "HEAD"), _git("status", "--porcelain") != ""
    except (OSError, subprocess.CalledProcessError):
        return None, None


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(PACKAGE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

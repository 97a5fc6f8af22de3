"""The benchmark: for each workload the gate first, then the clock, then the rows."""

from __future__ import annotations

import datetime
import re
import subprocess
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import sparsemla
from sparsemla.validation import not_one_of
from sparsemla_lab.bench.ceilings import Ceilings
from sparsemla_lab.bench.compressed_step import CompressedStepOfPeers, compressed_step_workloads
from sparsemla_lab.bench.peers import versions
from sparsemla_lab.bench.peers.base import Peer, Unavailable
from sparsemla_lab.bench.portable import portable_workloads
from sparsemla_lab.bench.report import Row
from sparsemla_lab.bench.step import StepOfPeers, step_workloads
from sparsemla_lab.bench.timing import Prepared, Results, Timer, Timing
from sparsemla_lab.bench.training import training_workloads
from sparsemla_lab.bench.workloads import Inputs, Side, Workload, all_workloads, topk_table

Choice = tuple[str | None, bool, str | None, str | None]
"""The arguments of :func:`select_workloads`."""
SETS: dict[str, Callable[[], list[Workload]]] = {"portable": portable_workloads}
"""Sets of workloads by name."""


@dataclass(frozen=True)
class Stamp:
    """The origin of a row."""

    commit: str
    date: str
    versions: dict[str, str]

    @classmethod
    def now(cls, commit: str | None = None, peers: Path | None = None) -> Stamp:
        """The stamp of a run now, with the given commit or the checkout's."""
        date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
        return cls(commit or _checkout(), date, versions(peers))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a workload.

    Args:
        rows: times.
        failures: sides with a wrong result, or this package without a result, and why.
        refusals: peers that did not run, and why.
    """

    rows: list[Row]
    failures: dict[str, str]
    refusals: dict[str, str]


def select_workloads(
    op: str | None, full: bool = False, case: str | None = None, cases: str | None = None
) -> list[Workload]:
    """The workloads of one op or of all; with ``full``, every size of the steps and of top-k.

    Args:
        op: an op's name; None for all.
        full: every size.
        case: a regular expression that ``op, case`` must contain; None for all.
        cases: a set of :data:`SETS` to choose from; None for the usual workloads.

    Raises:
        ValueError: no workload measures this op, or none of its cases matches; or there is no such
            set, or it has no further sizes.
    """
    if cases is None:
        steps = *step_workloads(full), *compressed_step_workloads(full)
        more = *training_workloads(), *(topk_table() if full else [])
        workloads = [*all_workloads(), *steps, *more]
    elif cases not in SETS:
        raise ValueError(f"set must be one of {', '.join(SETS)}; got {cases!r}")
    elif full:
        raise ValueError(f"full must not be given with the set {cases}: it has one size")
    else:
        workloads = SETS[cases]()
    if op is not None:
        chosen = [workload for workload in workloads if workload.op == op]
        if not chosen:
            raise not_one_of("op", dict.fromkeys(each.op for each in workloads), op)
        workloads = chosen
    if case is None:
        return workloads
    try:
        pattern = re.compile(case)
    except re.error as error:
        raise ValueError(f"case must be a regular expression, got {case!r}: {error}") from error
    chosen = [each for each in workloads if pattern.search(f"{each.op}, {each.case}")]
    if not chosen:
        raise ValueError(f"case must match a workload, such as {workloads[0].case!r}; got {case!r}")
    return chosen


def with_steps(found: list[Peer], missing: dict[str, str]) -> tuple[list[Peer], dict[str, str]]:
    """The results of :func:`find_peers`, with each step if all its packages are installed."""
    steps: list[Peer] = []
    reasons = {}
    for kind in (StepOfPeers, CompressedStepOfPeers):
        try:
            steps.append(kind(found))
        except Unavailable as error:
            reasons[kind.name] = str(error)
    return [*found, *steps], missing | reasons


def run_all(
    workloads: Iterable[Workload],
    peers: Sequence[Peer],
    timer: Timer,
    ceilings: Ceilings,
    stamp: Stamp,
    done: Callable[[Workload, Outcome], None],
    acting_as: str | None = None,
) -> None:
    """Measure one workload after the other; ``done`` gets each outcome as soon as it exists."""
    for workload in workloads:
        done(workload, run_one(workload, peers, timer, ceilings, stamp, acting_as))
        if timer.device.type == "cuda":
            torch.cuda.empty_cache()


def run_one(
    workload: Workload,
    peers: Sequence[Peer],
    timer: Timer,
    ceilings: Ceilings,
    stamp: Stamp,
    acting_as: str | None = None,
) -> Outcome:
    """Build, check and time one workload.

    A side with a wrong result gets no time. If this package is wrong, no side gets a time. Rows
    name the peers that refused, and why.
    """
    failures: dict[str, str] = {}
    refusals: dict[str, str] = {}
    try:
        inputs = workload.build(timer.device)
        ours = workload.ours(inputs)
        prepared = [(ours, _gate(ours, timer))]
    except Exception as error:  # the benchmark goes on, and its exit code reports the failure
        return Outcome([], {"sparsemla": _describe(error)}, {})
    for side in sides_of(workload, inputs, peers, refusals, acting_as):
        try:
            prepared.append((side, _gate(side, timer)))
        except AssertionError as error:
            failures[side.name] = _describe(error)
        except Exception as error:
            refusals[side.name] = _describe(error)
    timings = timer.interleaved([run for _, run in prepared])
    flop, num_bytes = workload.flop, workload.unique_bytes(inputs)
    work = flop, num_bytes, ceilings.floor_us(flop, num_bytes, workload.unit)
    others: list[tuple[Side, Timing] | None] = [
        (side, timing) for (side, _), timing in zip(prepared[1:], timings[1:], strict=True)
    ]
    mine = ours, timings[0]
    refused: dict[str, list[str]] = {}
    for name, reason in refusals.items():
        refused.setdefault(reason, []).append(name)
    without = [f"without {', '.join(names)}: {reason}" for reason, names in refused.items()]
    rows = [_row(workload, mine, other, work, without, stamp) for other in others or [None]]
    return Outcome(rows, failures, refusals)


def sides_of(
    workload: Workload,
    inputs: Inputs,
    peers: Sequence[Peer],
    refusals: dict[str, str],
    acting_as: str | None,
) -> list[Side]:
    """The kernels of the peers that take the workload; ``refusals`` gets those that cannot run."""
    sides: list[Side] = []
    for peer in peers:
        if peer.supports(workload) is not None:
            continue
        if acting_as is not None and not peer.portable:
            refusals[peer.name] = f"not all kernels are compiled for {acting_as}"
            continue
        try:
            sides += peer.prepare(workload, inputs)
        except Exception as error:
            refusals[peer.name] = _describe(error)
    return sides


def _gate(side: Side, timer: Timer) -> Prepared:
    """Prepare a side for timing, and check a result of the prepared run.

    Raises:
        AssertionError: the result is wrong.
    """
    prepared = timer.prepare(side.run)
    for result in prepared.run():
        _poison(result)
    side.reset()
    results: Results = prepared.run()
    if timer.device.type == "cuda":
        torch.cuda.synchronize(timer.device)
    side.check(results)
    return prepared


def _poison(tensor: Tensor) -> None:
    """Fill with NaN, or with an integer that no result contains."""
    if tensor.is_floating_point():
        tensor.fill_(torch.nan)
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).max)


def _row(
    workload: Workload,
    mine: tuple[Side, Timing],
    other: tuple[Side, Timing] | None,
    work: tuple[float, int, float],
    without: list[str],
    stamp: Stamp,
) -> Row:
    flop, num_bytes, floor_us = work
    our_side, ours = mine
    side, theirs = other or (None, None)
    return Row(
        op=workload.op,
        case=workload.case,
        selection=workload.label,
        shape=workload.shape,
        ours_us=ours.us,
        ours_spread_us=(ours.low_us, ours.high_us),
        ours_timed=ours.how,
        tflops=flop / ours.us / 1e6,
        gbps=num_bytes / ours.us / 1e3,
        floor_us=floor_us,
        percent_of_floor=100 * floor_us / ours.us,
        peer=None if side is None else side.name,
        peer_us=None if theirs is None else theirs.us,
        peer_spread_us=None if theirs is None else (theirs.low_us, theirs.high_us),
        peer_timed=None if theirs is None else theirs.how,
        ratio=None if theirs is None else theirs.us / ours.us,
        note="; ".join(filter(None, (our_side.note, side.note if side else "", *without))),
        commit=stamp.commit,
        date=stamp.date,
        versions=stamp.versions,
    )


def _describe(error: Exception) -> str:
    """The first line of an error, with its origin unless the gate or a peer itself raised it.

    An error of Triton's compiler begins with lines of the kernel; its cause, or its
    ``error_message``, says what is wrong.
    """
    while isinstance(error.__cause__, Exception):
        error = error.__cause__
    message = getattr(error, "error_message", None) or str(error)
    text = (message.strip() or type(error).__name__).splitlines()[0]
    if isinstance(error, (AssertionError, Unavailable)):
        return text
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}:{frame.lineno})"


def _checkout() -> str:
    """The commit that ``sparsemla`` is checked out from."""
    source = Path(sparsemla.__file__)
    commands = (
        ["git", "ls-files", "--error-unmatch", source.name],
        ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"],
    )
    text = ""
    for command in commands:
        try:
            text = subprocess.run(
                command, cwd=source.parent, capture_output=True, text=True, check=True
            ).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return "unknown"
    return text

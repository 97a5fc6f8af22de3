"""The launches of a decode step on a time line, this package's and the peers'.

Each side's step is captured into a CUDA graph as the benchmark does, the graph is replayed under
torch's profiler after the L2 cache has been overwritten, and the replay of median length is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.profiler

from sparsemla_lab.bench.peers.base import Peer
from sparsemla_lab.bench.report import OKABE_ITO
from sparsemla_lab.bench.step import DecodeStep
from sparsemla_lab.bench.timing import Prepared, Timer
from sparsemla_lab.bench.workloads import Side

if TYPE_CHECKING:
    from matplotlib.axes import Axes

REPLAYS = 9
STEPS = (
    DecodeStep(1, 128, 32768, 1),
    DecodeStep(16, 128, 32768, 1),
    DecodeStep(128, 128, 32768, 1),
)


@dataclass(frozen=True)
class Launch:
    """A kernel of a step: its begin after the step's begin, and its duration."""

    name: str
    start_us: float
    us: float


@dataclass(frozen=True)
class Line:
    """The launches of one side's step."""

    case: str
    side: str
    launches: tuple[Launch, ...]

    @property
    def us(self) -> float:
        """Time from the begin of the first launch to the end of the last."""
        return max(launch.start_us + launch.us for launch in self.launches)


def record(peers: Sequence[Peer], timer: Timer) -> list[Line]:
    """The lines of :data:`STEPS`, this package first, without sides that are wrong or refuse."""
    lines = []
    for step in STEPS:
        inputs = step.build(timer.device)
        sides = [step.ours(inputs)]
        for peer in peers:
            if peer.supports(step) is None:
                sides += peer.prepare(step, inputs)
        lines += [_line(step, side, timer) for side in sides]
        torch.cuda.empty_cache()
    return lines


def _line(step: DecodeStep, side: Side, timer: Timer) -> Line:
    prepared = timer.prepare(side.run)
    side.reset()
    side.check(prepared.run())
    replays = sorted((_replay(prepared, timer) for _ in range(REPLAYS)), key=_length)
    return Line(step.case, side.name, replays[REPLAYS // 2])


def _length(launches: tuple[Launch, ...]) -> float:
    return launches[-1].start_us + launches[-1].us


def _replay(prepared: Prepared, timer: Timer) -> tuple[Launch, ...]:
    """The kernels of one run, in the order of their begin."""
    timer.flush()
    torch.cuda.synchronize(timer.device)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        prepared.run()
        torch.cuda.synchronize(timer.device)
    events = profile.profiler.kineto_results.events()
    kernels = [event for event in events if event.device_type() == torch.autograd.DeviceType.CUDA]
    kernels.sort(key=lambda event: event.start_ns())
    first = kernels[0].start_ns()
    return tuple(
        Launch(_short(event.name()), (event.start_ns() - first) / 1e3, event.duration_ns() / 1e3)
        for event in kernels
    )


def _short(name: str) -> str:
    """A kernel's name without namespaces, template arguments and parameters.

    >>> _short("void at::native::gatherTopK<float, 2>(at::Tensor)")
    'gatherTopK'
    """
    name = re.sub(r"\(anonymous namespace\)::", "", name)
    name = re.split(r"[<(]", name.removeprefix("void "))[0]
    return name.split("::")[-1].strip()[:40]


def text_lines(lines: Sequence[Line]) -> list[str]:
    """A heading for each side, then a line for each launch."""
    text = []
    for line in lines:
        text.append(f"{line.case}: {line.side}, {len(line.launches)} launches, {line.us:.1f} us")
        text += [f"  {one.start_us:8.1f} {one.us:8.1f}  {one.name}" for one in line.launches]
    return text


def save(path: Path, lines: Sequence[Line]) -> None:
    """Write lines as JSON."""
    path.write_text(json.dumps([asdict(line) for line in lines], indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> list[Line]:
    """Read the file that :func:`save` writes.

    Raises:
        ValueError: the file does not hold lines.
    """
    text = path.read_bytes()
    try:
        found = json.loads(text)
        if not isinstance(found, list) or not found:
            raise TypeError("it must hold a list of lines")
        return [
            Line(one["case"], one["side"], tuple(Launch(**launch) for launch in one["launches"]))
            for one in found
        ]
    except (KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a time line: {error}") from error


def plot(lines: Sequence[Line], path: Path) -> None:
    """One row of boxes for each side, a panel for each step; boxes are numbered as in the text."""
    import matplotlib.pyplot as plt

    cases = list(dict.fromkeys(line.case for line in lines))
    figure, panels = plt.subplots(len(cases), 1, figsize=(11, 2.2 * len(cases)), squeeze=False)
    for axes, case in zip(panels[:, 0], cases, strict=True):
        _draw(axes, case, [line for line in lines if line.case == case])
    panels[-1, 0].set_xlabel("microseconds since the first launch began")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw(axes: Axes, case: str, lines: Sequence[Line]) -> None:
    for row, line in enumerate(lines):
        lanes = _lanes(line.launches)
        height = 0.8 / (max(lanes) + 1)
        for number, (launch, lane) in enumerate(zip(line.launches, lanes, strict=True)):
            top = 0.4 - row - lane * height
            axes.broken_barh(
                [(launch.start_us, launch.us)],
                (top - height, height),
                facecolor=OKABE_ITO[number % len(OKABE_ITO)],
                edgecolor="black",
                linewidth=0.4,
            )
            at = launch.start_us + launch.us / 2, top - height / 2
            axes.text(*at, str(number + 1), ha="center", va="center", fontsize=7)
    labels = [f"{line.side}\n{len(line.launches)} launches" for line in lines]
    axes.set_yticks([-row for row in range(len(lines))], labels, fontsize=8)
    axes.set_title(case, fontsize=9, loc="left")


def _lanes(launches: Sequence[Launch]) -> list[int]:
    """For each launch, the first lane without an earlier launch that still runs.

    >>> _lanes([Launch("a", 0, 4), Launch("b", 1, 2), Launch("c", 5, 1)])
    [0, 1, 0]
    """
    ends: list[float] = []
    lanes = []
    for launch in launches:
        free = [lane for lane, end in enumerate(ends) if end <= launch.start_us]
        lane = free[0] if free else len(ends)
        ends[lane : lane + 1] = [launch.start_us + launch.us]
        lanes.append(lane)
    return lanes

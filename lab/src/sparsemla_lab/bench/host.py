"""The host's time of eager calls: Python, torch and Triton, until the GPU has its work.

A CUDA graph hides this time, and so do the benchmark's tables. Times depend on the host's CPU as
much as on the code, so two functions of torch are measured beside the ops.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

from sparsemla.formats import BF16_576
from sparsemla.kernels.repeat import unrepeated
from sparsemla_lab.bench.step import DecodeStep
from sparsemla_lab.bench.workloads import (
    CacheWrite,
    DenseDecode,
    HeadProducts,
    IndexerTopk,
    IndexWrite,
    SelectTopk,
    SparseDecode,
    SparsePrefill,
    Workload,
)

CALLS = 64
"""Calls between two waits for the GPU, fewer than fill its queue."""
TURNS = 15

WORKLOADS: tuple[Workload, ...] = (
    SparseDecode(1, 1, 16, 4096, 2048),
    SparseDecode(4, 1, 128, 4096, 2048),
    SparseDecode(4, 1, 128, 4096, 2048, format=BF16_576),
    DenseDecode(4, 1, 16, 1024),
    SparsePrefill(16, 4096, 128, 576, 512),
    IndexerTopk(4, 1, 1024, 512),
    IndexerTopk(4, 1, 32768, 2048),
    SelectTopk(4, 4096, 512),
    SelectTopk(4, 65536, 2048),
    CacheWrite(4, 128),
    IndexWrite(4, 64),
    HeadProducts(4, 128, 512, 128, 1),
    DecodeStep(4, 128, 8192, 0),
)


@dataclass(frozen=True)
class Row:
    """Microseconds of the host.

    Args:
        op: the op.
        case: its sizes.
        kernels: launches of a call.
        first_us: a call with new sizes, whose kernels are compiled.
        us: a call with the sizes of earlier calls.
        launch_us: of it, the launches of the compiled kernels, in Triton's launcher and the driver.
    """

    op: str
    case: str
    kernels: int
    first_us: float
    us: float
    launch_us: float


@dataclass(frozen=True)
class HostTimes:
    """All rows, with their origin.

    Args:
        device: the GPU's name.
        commit, date, versions: as in the benchmark's rows.
        empty_us: the time of ``torch.empty``.
        add_us: the time of an addition of two small tensors.
        rows: the ops.
    """

    device: str
    commit: str
    date: str
    versions: dict[str, str]
    empty_us: float
    add_us: float
    rows: tuple[Row, ...]


def measure(commit: str, date: str, versions: dict[str, str]) -> HostTimes:
    """Measure :data:`WORKLOADS` on the current GPU."""
    x = torch.zeros(64, device="cuda")
    return HostTimes(
        torch.cuda.get_device_name(),
        commit,
        date,
        versions,
        _time(lambda: torch.empty(4, 128, 512, dtype=torch.bfloat16, device=x.device)),
        _time(lambda: x + x),
        tuple(_row(workload) for workload in WORKLOADS),
    )


def _row(workload: Workload) -> Row:
    from sparsemla.kernels.repeat.launches import current_device, current_stream, seen_launches

    inputs = workload.build(torch.device("cuda"))
    side = workload.ours(inputs)
    side.check(side.run())
    with unrepeated():
        first_us = _time(side.run)
        with seen_launches() as seen:
            side.run()
    us = _time(side.run)
    side.reset()
    side.check(side.run())
    stream = current_stream(current_device())

    def launch() -> None:
        for kernel, grid, arguments in seen:
            hooks = None, None, None
            handle = kernel.function, kernel.packed_metadata
            kernel.run(*(*grid, 1, 1)[:3], stream, *handle, *hooks, *arguments)

    return Row(workload.op, workload.case, len(seen), first_us, us, _time(launch))


def _time(call: Callable[[], object]) -> float:
    """Median microseconds of the host for a call, while the GPU works behind it."""
    for _ in range(3):
        call()
    times = []
    for _ in range(TURNS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(CALLS):
            call()
        times.append(1e6 * (time.perf_counter() - start) / CALLS)
    torch.cuda.synchronize()
    return median(times)


def text_lines(found: HostTimes) -> list[str]:
    """A line for the yardsticks, then a table."""
    lines = [
        f"{found.device}, {found.commit}: torch.empty {found.empty_us:.1f} us, "
        f"x + x {found.add_us:.1f} us",
        "op | case | kernels | first us | us | launches us",
    ]
    for row in found.rows:
        times = f"{row.first_us:.1f} | {row.us:.1f} | {row.launch_us:.1f}"
        lines.append(f"{row.op} | {row.case} | {row.kernels} | {times}")
    return lines


def save(path: Path, found: HostTimes) -> None:
    """Write the times as JSON."""
    path.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> HostTimes:
    """Read the file that :func:`save` writes.

    Raises:
        ValueError: the file does not hold such times.
    """
    text = path.read_bytes()
    try:
        found = json.loads(text)
        rows: Sequence[Row] = [Row(**row) for row in found.pop("rows")]
        return HostTimes(**found, rows=tuple(rows))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path} does not hold times of the host: {error}") from error

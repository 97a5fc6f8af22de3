"""The best measured rates of the device: floors come from these, not from a datasheet."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from sparsemla.formats import to_fp8
from sparsemla_lab.bench.timing import Results, Timer

COPY_BYTES = 2 << 30
MATMUL_SIZE = 8192


@dataclass(frozen=True)
class Ceilings:
    """Rates of a device.

    Args:
        copy_gbps: rate of a copy of 2 GiB, reads and writes both counted.
        bf16_tflops: bfloat16 matmul, 8192^3.
        fp8_tflops: e4m3 matmul, 8192^3; 0 if the device has none.
        launch_us: time of a replay of one tiny kernel; a row near it is bound by the launch.
    """

    copy_gbps: float
    bf16_tflops: float
    fp8_tflops: float
    launch_us: float

    def floor_us(self, flop: float, num_bytes: float, unit: str) -> float:
        """The longer of the times for arithmetic and for memory: no implementation is much faster.

        >>> round(Ceilings(4275, 665, 1243, 3).floor_us(665e6, 4275e3, "bf16"), 6)
        1.0
        """
        rate = self.fp8_tflops if unit == "fp8" and self.fp8_tflops else self.bf16_tflops
        return max(flop / rate / 1e6, num_bytes / self.copy_gbps / 1e3)


def measure(
    timer: Timer,
    copy_bytes: int = COPY_BYTES,
    size: int = MATMUL_SIZE,
    acting_as: str | None = None,
) -> Ceilings:
    """The ceilings of the timer's device.

    As an older GPU, the arithmetic is that of a Triton matmul with its MMAs: cuBLAS has others.
    """
    copy_us, launch_us = _copy_and_launch(timer, copy_bytes)
    if acting_as is None:
        bf16_us, fp8_us = _matmuls(timer, size)
    else:
        bf16_us, fp8_us = _matmuls_in_triton(timer, size)
    return Ceilings(
        copy_gbps=2 * copy_bytes / copy_us / 1e3,
        bf16_tflops=2 * size**3 / bf16_us / 1e6,
        fp8_tflops=0.0 if fp8_us is None else 2 * size**3 / fp8_us / 1e6,
        launch_us=launch_us,
    )


def _copy_and_launch(timer: Timer, copy_bytes: int) -> tuple[float, float]:
    source = torch.randn(copy_bytes // 2, device=timer.device, dtype=torch.bfloat16)
    target, small = torch.empty_like(source), source[:8].clone()

    def copy() -> Results:
        # A kernel that reads and writes as many bytes: in a graph, a copy runs on a slower engine.
        return (torch.neg(source, out=target),)

    def launch() -> Results:
        return (small.neg_(),)

    return _microseconds(timer, copy), _microseconds(timer, launch)


def _matmuls(timer: Timer, size: int) -> tuple[float, float | None]:
    """bfloat16, and e4m3 if the device has it; random operands, because zeros run faster."""
    device = timer.device
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))

    def bf16() -> Results:
        return (a @ b,)

    bf16_us = _microseconds(timer, bf16)
    if not _has_fp8(device):
        return bf16_us, None
    a8, b8 = to_fp8(a.float()), to_fp8(b.float()).t().contiguous().t()
    one = torch.ones((), device=device)

    def fp8() -> Results:
        return (torch._scaled_mm(a8, b8, one, one, out_dtype=torch.bfloat16),)

    return bf16_us, _microseconds(timer, fp8)


def _matmuls_in_triton(timer: Timer, size: int) -> tuple[float, float | None]:
    """As :func:`_matmuls`, each the fastest of some tiles."""
    from sparsemla_lab.bench.matmul import TILES, matmul  # needs Triton

    a, b = (torch.randn(size, size, device=timer.device) for _ in range(2))
    out = torch.empty(size, size, device=timer.device, dtype=torch.bfloat16)

    def fastest(dtype: torch.dtype) -> float:
        x, y = a.to(dtype), b.to(dtype)
        runs = [functools.partial(matmul, x, y, out, tile) for tile in TILES]
        return min(_microseconds(timer, run) for run in runs)

    fp8_us = fastest(torch.float8_e4m3fn) if _has_fp8(timer.device) else None
    return fastest(torch.bfloat16), fp8_us


def _has_fp8(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) >= (8, 9)


def _microseconds(timer: Timer, function: Callable[[], Results]) -> float:
    return timer.interleaved([timer.prepare(function)])[0].us

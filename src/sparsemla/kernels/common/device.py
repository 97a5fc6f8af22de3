"""Properties of a device for launchers, cached: torch takes microseconds per query."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

_MEANT: ContextVar[torch.device | None] = ContextVar("meant", default=None)


class Device(NamedTuple):
    """Properties of a GPU; the defaults describe Triton's interpreter on the CPU.

    Args:
        multiprocessors: number of multiprocessors.
        max_shared: most shared memory of a program on an NVIDIA GPU, in bytes.
        has_fp8: the GPU has instructions that convert e4m3 (from sm_89 on).
        is_hopper: MMAs read both operands from shared memory (sm_90).
        overlaps: the GPU has programmatic dependent launch (from sm_90 on).
    """

    multiprocessors: int = 1
    max_shared: int = 0
    has_fp8: bool = False
    is_hopper: bool = False
    overlaps: bool = False


def meant(device: torch.device) -> torch.device:
    """The GPU that torch's ``meta`` device stands for in :func:`meta_means`, or ``device``."""
    return (_MEANT.get() or device) if device.type == "meta" else device


@contextmanager
def meta_means(device: torch.device, caches: tuple[Any, ...]) -> Iterator[None]:
    """Let tensors without memory stand for tensors on a GPU; their launches must only compile.

    Args:
        device: the GPU.
        caches: functions with a cache by device, whose answers for ``meta`` are forgotten.
    """
    token = _MEANT.set(device)
    caches = describe, *caches
    for cached in caches:
        cached.cache_clear()
    try:
        yield
    finally:
        _MEANT.reset(token)
        for cached in caches:
            cached.cache_clear()


@functools.cache
def describe(device: torch.device) -> Device:
    """Query torch once for each device."""
    device = meant(device)
    if device.type == "cpu":
        return Device()
    found: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Device(found.multi_processor_count)
    return Device(
        found.multi_processor_count,
        found.shared_memory_per_block_optin,
        has_fp8=(found.major, found.minor) >= (8, 9),
        is_hopper=found.major == 9,
        overlaps=found.major >= 9,
    )


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for the interpreter."""
    return describe(device).multiprocessors


def register_limit(limit: int) -> dict[str, int]:
    """The launch option that bounds the registers of a thread, on NVIDIA's GPUs."""
    return {} if torch.version.hip else {"maxnreg": limit}

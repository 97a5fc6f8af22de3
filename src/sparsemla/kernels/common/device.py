"""Properties of a device for launchers, cached: torch takes microseconds per query."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch

_MEANT: ContextVar[torch.device | None] = ContextVar("meant", default=None)
_SIMULATED: ContextVar[Device | None] = ContextVar("simulated", default=None)


class Device(NamedTuple):
    """Properties of a device; the defaults describe a CPU, and Triton's interpreter there.

    Args:
        type: ``cpu`` or ``cuda``, which is also the type of AMD's GPUs.
        capability: CUDA compute capability, None on a CPU or an AMD GPU.
        multiprocessors: number of multiprocessors.
        max_shared: most shared memory of a program on an NVIDIA GPU, in bytes.
        has_fp8: the GPU has instructions that convert e4m3 (from sm_89 on).
        is_hopper: MMAs read both operands from shared memory (sm_90).
        overlaps: the GPU has programmatic dependent launch (from sm_90 on).
    """

    type: str = "cpu"
    capability: tuple[int, int] | None = None
    multiprocessors: int = 1
    max_shared: int = 0
    has_fp8: bool = False
    is_hopper: bool = False
    overlaps: bool = False

    def __str__(self) -> str:
        if self.capability is not None:
            return "sm_{}{}".format(*self.capability)
        return {"cpu": "a CPU", "cuda": "an AMD GPU"}.get(self.type, self.type)

    @classmethod
    def of_nvidia(
        cls, capability: tuple[int, int], multiprocessors: int, max_shared: int
    ) -> Device:
        """An NVIDIA GPU of a compute capability."""
        return cls(
            "cuda",
            capability,
            multiprocessors,
            max_shared,
            has_fp8=capability >= (8, 9),
            is_hopper=capability[0] == 9,
            overlaps=capability[0] >= 9,
        )


GPUS = {
    "sm_80": Device.of_nvidia((8, 0), 108, 163 * 1024),
    "sm_86": Device.of_nvidia((8, 6), 84, 99 * 1024),
    "sm_89": Device.of_nvidia((8, 9), 142, 99 * 1024),
    "sm_90": Device.of_nvidia((9, 0), 132, 227 * 1024),
    "sm_100": Device.of_nvidia((10, 0), 148, 227 * 1024),
    "sm_120": Device.of_nvidia((12, 0), 170, 99 * 1024),
    "gfx942": Device("cuda", None, 304),
}
"""The sizes of an A100, an A6000, an L40S, an H100, a B200, an RTX 5090 and an MI300X."""


def gpu_named(target: str) -> Device:
    """A GPU by the compiler's name; one that is not in :data:`GPUS` has the sizes of an A6000.

    Raises:
        TypeError: the name is no string.
        ValueError: this is no name of a GPU.
    """
    if not isinstance(target, str):
        raise TypeError(f"gpu must be a str, got {type(target).__name__}")
    if target in GPUS:
        return GPUS[target]
    digits = re.fullmatch(r"sm_(\d+)(\d)", target)
    if digits is None:
        raise ValueError(f"gpu must be like sm_90, or gfx942; got {target!r}")
    capability = int(digits[1]), int(digits[2])
    return Device.of_nvidia(capability, *GPUS["sm_86"][2:4])


def meant(device: torch.device) -> torch.device:
    """The GPU that torch's ``meta`` device stands for in :func:`meta_means`, or ``device``."""
    return (_MEANT.get() or device) if device.type == "meta" else device


@contextmanager
def meta_means(device: torch.device) -> Iterator[None]:
    """Let tensors without memory stand for tensors on a GPU; their launches must only compile."""
    token = _MEANT.set(device)
    query.cache_clear()
    try:
        yield
    finally:
        _MEANT.reset(token)
        query.cache_clear()


@contextmanager
def simulated(gpu: Device | None) -> Iterator[None]:
    """Let every device be described as a GPU, so that kernels are chosen as there; for None, not.

    Nothing may be launched meanwhile.
    """
    token = _SIMULATED.set(gpu)
    try:
        yield
    finally:
        _SIMULATED.reset(token)


def describe(device: torch.device) -> Device:
    """The properties of a device."""
    return _SIMULATED.get() or query(device)


def ask_torch(device: torch.device) -> Device:
    """The properties of a device. Traced code asks here: Dynamo cannot call a cached function."""
    device = meant(device)
    if device.type != "cuda":
        return Device(device.type)
    found: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return Device("cuda", None, found.multi_processor_count)
    return Device.of_nvidia(
        (found.major, found.minor),
        found.multi_processor_count,
        found.shared_memory_per_block_optin,
    )


@functools.cache
def query(device: torch.device) -> Device:
    """:func:`ask_torch`, once for each device."""
    return ask_torch(device)


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for the interpreter."""
    return describe(device).multiprocessors


def register_limit(limit: int) -> dict[str, int]:
    """The launch option that bounds the registers of a thread, on NVIDIA's GPUs."""
    return {} if torch.version.hip else {"maxnreg": limit}

"""Properties of a device for launchers, cached: torch takes microseconds per query."""

import functools
from typing import Any, NamedTuple

import torch


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


@functools.cache
def describe(device: torch.device) -> Device:
    """Query torch once for each device."""
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

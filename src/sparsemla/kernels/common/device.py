"""What launchers ask a device. The answer is kept: torch takes microseconds for each question."""

import functools
from typing import Any, NamedTuple

import torch


class Device(NamedTuple):
    """A device as launchers see it. The interpreter, which runs on the CPU, has the defaults.

    Args:
        multiprocessors: their number.
        max_shared: shared memory that a program may use on an NVIDIA GPU, bytes.
        has_fp8: the device converts e4m3 by itself.
        is_hopper: matrix products take both operands from shared memory (sm_90).
        overlaps: a kernel may begin before the one in front of it has ended (from sm_90 on).
    """

    multiprocessors: int = 1
    max_shared: int = 0
    has_fp8: bool = False
    is_hopper: bool = False
    overlaps: bool = False


@functools.cache
def describe(device: torch.device) -> Device:
    """What torch says of a device."""
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

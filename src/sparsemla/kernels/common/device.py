"""What launchers ask a device. The answers are kept: torch takes microseconds for each."""

import functools
from typing import Any

import torch


@functools.cache
def properties(device: torch.device) -> Any:
    """What torch says of a GPU."""
    return torch.cuda.get_device_properties(device)


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for the interpreter, which runs on the CPU."""
    return 1 if device.type == "cpu" else properties(device).multi_processor_count

"""What launchers ask a device."""

import torch


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 1 for the interpreter, which runs on the CPU."""
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count

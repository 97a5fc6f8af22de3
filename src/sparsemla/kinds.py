"""Checks of arguments that are no tensors: integers in a range, numbers, classes, devices.

Each raises TypeError or ValueError that names the argument, what was expected and what came.
"""

from __future__ import annotations

from numbers import Integral, Real
from typing import cast

import torch
from torch import Tensor

INTEGERS = (torch.int32, torch.int64, torch.uint32)
"""Dtypes of lengths, offsets, tables and ids."""

LIMIT = 2**31
"""Counts and sizes stay below this."""


def check_kind(name: str, value: object, kind: type) -> None:
    """Check the class of an argument."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")


def check_integer(name: str, value: object, low: int = 0, high: int = LIMIT) -> None:
    """Check an integer, ``low <= value < high``."""
    if not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if cast(int, value) < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    if cast(int, value) >= high:
        raise ValueError(f"{name} must be below {high}, got {value}")


def check_number(name: str, value: object, above: float | None = None) -> None:
    """Check a real number, and that it is greater than ``above``."""
    if not isinstance(value, Real):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    if above is not None and not float(value) > above:
        raise ValueError(f"{name} must be greater than {above}, got {value}")


def check_integers(name: str, tensor: object) -> None:
    """Check a tensor of integers."""
    check_kind(name, tensor, Tensor)
    if isinstance(tensor, Tensor) and tensor.dtype not in INTEGERS:
        raise TypeError(f"{name} must have dtype int32, int64 or uint32, got {tensor.dtype}")


def check_device(name: str, device: object) -> None:
    """Check what names a device, or None."""
    if device is None or isinstance(device, torch.device):
        return
    check_kind(name, device, str)
    try:
        torch.device(str(device))
    except RuntimeError as error:
        raise ValueError(f"{name} must name a device, got {device!r}") from error

"""Checks of scalar arguments and classes: integers, numbers, devices.

Each check raises a TypeError or ValueError with the argument's name, the expected and the actual
value.
"""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

INTEGERS = (torch.int32, torch.int64, torch.uint32)
"""Accepted dtypes of lengths, offsets, page tables and indices."""

LIMIT = 2**31
"""Upper bound, exclusive, of sizes and counts."""


def check_kind(name: str, value: object, kind: type) -> None:
    """Check that an argument is an instance of ``kind``."""
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, got {type(value).__name__}")


def not_one_of(name: str, known: Iterable[str], value: object) -> ValueError:
    """The error for a value that is none of a few, with the closest of them.

    >>> not_one_of("op", ["to_slots", "merge_topk"], "to_slot")
    ValueError("op must be one of to_slots, merge_topk; got 'to_slot', did you mean to_slots?")
    """
    names = [*known]
    close = difflib.get_close_matches(str(value), names, n=1, cutoff=0.7)
    hint = f", did you mean {close[0]}?" if close else ""
    return ValueError(f"{name} must be one of {', '.join(names)}; got {value!r}{hint}")


def check_integer(name: str, value: object, low: int = 0, high: int = LIMIT) -> None:
    """Check an integer, ``low <= value < high``."""
    number: Any = value  # for the type checker, without the call of a cast
    # int first: the abstract class alone takes 1 us
    if isinstance(value, bool) or not isinstance(value, (int, Integral)):
        raise TypeError(f"{name} must be an integer, got {type(value).__name__}")
    if number < low:
        raise ValueError(f"{name} must be at least {low}, got {value}")
    if number >= high:
        raise ValueError(f"{name} must be below {high}, got {value}")


def check_number(
    name: str,
    value: object,
    above: float | None = None,
    least: float | None = None,
) -> None:
    """Check a real number that is finite in float32, and above or at least a bound."""
    number: Any = value
    if isinstance(value, bool) or not isinstance(value, (float, int, Real)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    # The largest float32, written out: a float in a variable makes torch.compile trace twice.
    if not -3.4028234663852886e38 <= number <= 3.4028234663852886e38:
        raise ValueError(f"{name} must be finite in float32, got {value}")
    if above is not None and not number > above:
        raise ValueError(f"{name} must be greater than {above}, got {value}")
    if least is not None and not number >= least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


def check_integers(name: str, tensor: object) -> None:
    """Check that an argument is an int32, int64 or uint32 tensor."""
    check_kind(name, tensor, Tensor)
    if isinstance(tensor, Tensor) and tensor.dtype not in INTEGERS:
        raise TypeError(f"{name} must have dtype int32, int64 or uint32, got {tensor.dtype}")


def check_device(name: str, device: object) -> None:
    """Check a device, the name of a device, or None; a GPU must be there."""
    if device is None:
        return
    if not isinstance(device, torch.device):
        check_kind(name, device, str)
        try:
            device = torch.device(str(device))
        except RuntimeError as error:
            raise ValueError(f"{name} must name a device, got {device!r}") from error
    if device.type == "cuda" and not (torch.cuda.is_initialized() or torch.cuda.is_available()):
        for use in (torch.cuda.get_device_properties, _allocate):
            with contextlib.suppress(AssertionError, RuntimeError):
                use(device)
                return
        raise ValueError(
            f"{name} must be a device of this machine, got {str(device)!r}: {missing_gpu()}"
        )


def _allocate(device: torch.device) -> Tensor:
    """A tensor on a device; one that is fake needs no GPU."""
    return torch.empty(0, device=device)


def missing_gpu() -> str:
    """Why torch has not the GPU that was named."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} is built without CUDA"
    return f"torch finds {torch.cuda.device_count()} GPUs"

"""torch's global state, on which no result of the package depends.

Autocast changes the dtypes of single functions of torch; a fake mode makes tensors without memory;
inference mode makes tensors that autograd refuses. Functions of plain torch and tables that outlive
a call are shielded here, the ops in :mod:`sparsemla.ops._library`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def outside_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function compute in the dtypes that it names, inside of the caller's autocast, too.

    >>> @outside_autocast
    ... def product(x):
    ...     return x @ x
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     product(torch.ones(1, 1)).dtype
    torch.float32
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch._C._is_any_autocast_enabled():
            return function(*args, **kwargs)
        with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
            return function(*args, **kwargs)

    return call


class Table:
    """A constant tensor that is made once for each device.

    In a mode of torch's dispatcher, such as a fake mode, and in traced code each call makes a new
    tensor, which belongs to the mode or the trace.

    Args:
        make: makes the tensor on a device.
    """

    def __init__(self, make: Callable[[torch.device], Tensor]) -> None:
        self._make = make
        self._made: dict[torch.device, Tensor] = {}

    def __call__(self, device: torch.device) -> Tensor:
        if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
            return self._make(device)
        if device not in self._made:
            with torch.inference_mode(False), torch._C.DisableTorchFunction():
                self._made[device] = self._make(device)
        return self._made[device]

"""Launches of compiled kernels that were seen before, without Triton's search for them.

Triton binds a launch's arguments, derives a key from dtypes, alignments and constants, and looks
the compiled kernel up. A launch with other addresses of the same alignment, and equal integers,
finds the same kernel.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs
from triton.runtime import driver
from triton.runtime.jit import JITFunction

try:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
except ImportError:  # Triton without Gluon for NVIDIA
    TensorDescriptor = ()

Place = tuple[int, int]
"""A place in memory: the index of an address of a call, and bytes after it."""
_run = JITFunction.run
_patching = threading.Lock()


class Seen(NamedTuple):
    """A launch as it happened: a compiled kernel, a grid, and the kernel's arguments in order."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]


@contextmanager
def seen_launches() -> Iterator[list[Seen]]:
    """A list that grows with each launch of this thread."""
    seen: list[Seen] = []
    thread = threading.get_ident()

    def run(function: JITFunction[Any], *args: Any, grid: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return _run(function, *args, grid=grid, **kwargs)
        with torch._C.DisableTorchFunction():
            kernel = _run(function, *args, grid=grid, **kwargs)
        names = function.signature.parameters
        bound = function.signature.bind(*args, **{k: v for k, v in kwargs.items() if k in names})
        bound.apply_defaults()
        seen.append(Seen(kernel, grid, tuple(bound.arguments.values())))
        return kernel

    with _patching:
        JITFunction.run = run
        try:
            yield seen
        finally:
            JITFunction.run = _run


def is_watched() -> bool:
    """Whether someone sees each launch: by Triton's hooks, or in place of its method."""
    enter, leave = knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook
    hooks = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
    return bool(hooks) or JITFunction.run is not _run


class Launch:
    """A launch that was seen, for other addresses.

    Args:
        seen: the launch.
        place_of: where a tensor of the launch lies.

    Raises:
        KeyError: ``place_of`` does not know a tensor.
    """

    def __init__(self, seen: Seen, place_of: Callable[[Tensor], Place]) -> None:
        self._run = seen.kernel.run
        # After the stream come the kernel, and a hook before and after it with its argument.
        self._handle = seen.kernel.function, seen.kernel.packed_metadata, None, None, None
        self._grid = (*seen.grid, 1, 1)[:3]
        self._arguments = _Template(seen.arguments, place_of)

    def __call__(self, addresses: Sequence[int], stream: int) -> None:
        arguments = self._arguments.fill(addresses)
        self._run(*self._grid, stream, *self._handle, *arguments)


def current_device() -> int:
    """The index of the current device."""
    return driver.active.get_current_device()


def current_stream(device: int) -> int:
    """The current stream of a device, as launches take it."""
    return driver.active.get_current_stream(device)


class _Template:
    """Arguments of a launch without its addresses, and so without a tensor to keep alive."""

    def __init__(self, arguments: tuple[Any, ...], place_of: Callable[[Tensor], Place]) -> None:
        self._constants = list(arguments)
        self._pointers: list[tuple[int, int, int]] = []
        self._parts: list[tuple[int, _Template | _Descriptor]] = []
        for position, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                self._pointers.append((position, *place_of(argument)))
            elif isinstance(argument, TensorDescriptor):
                self._parts.append((position, _Descriptor(argument, place_of(argument.base))))
            elif isinstance(argument, tuple):
                part = _Template(argument, place_of)
                if not part.is_constant:
                    self._parts.append((position, part))
        for position in [pointer[0] for pointer in self._pointers] + [p for p, _ in self._parts]:
            self._constants[position] = None

    @property
    def is_constant(self) -> bool:
        return not self._pointers and not self._parts

    def fill(self, addresses: Sequence[int]) -> tuple[Any, ...]:
        """The arguments at these addresses."""
        arguments = self._constants.copy()
        for position, index, offset in self._pointers:
            arguments[position] = addresses[index] + offset
        for position, part in self._parts:
            arguments[position] = part.fill(addresses)
        return tuple(arguments)


class _Descriptor:
    """A TMA descriptor without its address."""

    def __init__(self, descriptor: Any, place: Place) -> None:
        self._descriptor = copy.copy(descriptor)
        self._descriptor.base = None
        self._index, self._offset = place

    def fill(self, addresses: Sequence[int]) -> Any:
        """The descriptor at these addresses."""
        filled = copy.copy(self._descriptor)
        filled.base = _Start(addresses[self._index] + self._offset)
        return filled


class _Start:
    """The start of a tensor: all that Triton reads of a descriptor's base."""

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address

"""Global memory: the storages of a launch's tensors, pointers into them, and who accessed what."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import numpy as np
import torch
import triton.language as tl

from sparsemla_lab.testing.interpreter.values import (
    POISON,
    ROUNDED,
    UNSIGNED,
    Array,
    Layout,
    Tensor,
    array_in,
    array_of,
    bytes_of,
    from_bits,
    layout_behind,
    to_bits,
)

TYPES = {
    torch.bool: tl.int1,
    torch.int8: tl.int8,
    torch.int16: tl.int16,
    torch.int32: tl.int32,
    torch.int64: tl.int64,
    torch.uint8: tl.uint8,
    torch.uint16: tl.uint16,
    torch.uint32: tl.uint32,
    torch.uint64: tl.uint64,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
    torch.float64: tl.float64,
} | {of_torch: dtype for dtype, of_torch in ROUNDED.items()}


def typed(raw: Array, dtype: tl.dtype) -> Array:
    """Bytes as the bits of elements; a rest that is no element is left out."""
    size = bytes_of(dtype)
    return raw[..., : raw.shape[-1] // size * size].view(UNSIGNED[size])


TIME, SHAPE = 43, 32
"""First bits of a stamp that tell the time and the shape; the others are the element."""


class Stamps:
    """Who accessed the elements of a storage last, and when.

    Args:
        num_bytes: of the storage.
        size: of an element, in bytes.
    """

    def __init__(self, num_bytes: int, size: int) -> None:
        self._size = size
        self._stamps = np.zeros(num_bytes // size + 1, np.int64)

    def at(self, places: Array, element: tl.dtype) -> Array:
        """The stamps of elements of another type."""
        return self._stamps[places * bytes_of(element) // self._size]

    def set(self, places: Array, element: tl.dtype, stamps: Array) -> None:
        self._stamps[places * bytes_of(element) // self._size] = stamps


class GlobalMemory:
    """The storages of a launch's tensors, and who has accessed them.

    Programs run one after the other here, but side by side on a GPU. So none may access what
    another one of the launch writes. Inside a program, nothing but a barrier orders accesses of
    different threads; the same element of tensors of one shape is taken to be in the same thread.
    """

    def __init__(self) -> None:
        self._storages: dict[int, Array] = {}
        """Bytes by their first address."""
        self._read: dict[int, Stamps] = {}
        self._written: dict[int, Stamps] = {}
        """The last accesses, by the same address."""
        self._time = self._began = 1
        self._is_early = False

    def begin_program(self, early: bool) -> None:
        """All that follows is of another program; ``early``: of one that begins too soon."""
        self.order()
        self._began, self._is_early = self._time, early

    def wait_for_inputs(self) -> None:
        """Earlier kernels have ended."""
        self._is_early = False

    def order(self) -> None:
        """All that follows comes after what the program did so far."""
        self._time += 1

    def read(self, at: Array, element: tl.dtype, threads: Array) -> Array:
        """The bits of elements, for threads with these numbers.

        Raises:
            IndexError: addresses outside of the storage, or odd ones.
            RuntimeError: another thread may write them at the same time.
        """
        start, elements, places = self._accessed(at, element)
        now = threads | self._time << TIME
        if start in self._written:
            self._check(self._written[start].at(places, element), now, "writes", "reads")
        self._stamps(self._read, start, element).set(places, element, now)
        return np.asarray(elements[places])

    def write(self, at: Array, element: tl.dtype, threads: Array, bits: Array) -> None:
        """Write the bits of elements, by threads with these numbers.

        Raises:
            IndexError: addresses outside of the storage, or odd ones.
            RuntimeError: another thread may read them at the same time, or another program may
                write them; or one address comes with several values.
        """
        start, elements, places = self._accessed(at, element)
        now = threads | self._time << TIME
        if start in self._read:
            self._check(self._read[start].at(places, element), now, "reads", "writes")
        written = self._stamps(self._written, start, element)
        self._check(written.at(places, element), None, "writes", "writes")
        written.set(places, element, now)
        elements[places] = bits
        if (elements[places] != bits).any():
            raise RuntimeError("a race: a store has several values for an address")

    def _stamps(self, of: dict[int, Stamps], start: int, element: tl.dtype) -> Stamps:
        if start not in of:
            of[start] = Stamps(self._storages[start].size, bytes_of(element))
        return of[start]

    def _check(self, before: Array, now: Array | None, then: str, kind: str) -> None:
        """Check accesses against earlier ones; without ``now``, against other programs alone."""
        times = before >> TIME
        if ((times > 0) & (times < self._began)).any():
            raise RuntimeError(f"a race: a program {kind} what another program {then}")
        if now is not None and ((times == self._time) & (before != now)).any():
            raise RuntimeError(
                f"a race: a thread {then} and another {kind}, with no barrier between"
            )

    def pointer_to(self, tensor: torch.Tensor) -> Pointer:
        """A pointer to the first element."""
        self._add(tensor.untyped_storage())
        return Pointer(self, np.asarray(tensor.data_ptr(), np.int64), TYPES[tensor.dtype])

    def check(self, at: Array) -> None:
        """Check that bytes lie in one storage.

        Raises:
            IndexError: they do not.
        """
        self._elements(at, tl.uint8)

    def _accessed(self, at: Array, element: tl.dtype) -> tuple[int, Array, Array]:
        if self._is_early:
            raise RuntimeError("a kernel accesses memory before it waits for the one in front")
        return self._elements(at, element)

    def _elements(self, at: Array, element: tl.dtype) -> tuple[int, Array, Array]:
        """First address of the storage of elements, all elements there, and their places."""
        size, low, high = bytes_of(element), int(at.min()), int(at.max())
        start = self._start_of(low)
        raw = self._storages[start]
        if high + size > start + raw.size:
            raise IndexError(
                f"a kernel accesses bytes {low - start} to {high + size - start} of a storage of "
                f"{raw.size}"
            )
        if ((at - start) % size).any():
            raise IndexError(f"a kernel accesses {element} at an address that it does not divide")
        return start, typed(raw, element), (at - start) // size

    def _add(self, storage: torch.UntypedStorage) -> None:
        size = storage.nbytes()
        if size:
            raw = (ctypes.c_uint8 * size).from_address(storage.data_ptr())
            self._storages[storage.data_ptr()] = np.ctypeslib.as_array(raw)

    def _start_of(self, address: int) -> int:
        """The first address of the storage with this one."""
        for start, raw in self._storages.items():
            if start <= address < start + raw.size:
                return start
        # A kernel may know a tensor by its distance from another one.
        for each in gc.get_objects():
            if type(each) is torch.Tensor and each.device.type == "cpu":
                storage = each.untyped_storage()
                if storage.data_ptr() <= address < storage.data_ptr() + storage.nbytes():
                    self._add(storage)
                    return storage.data_ptr()
        raise IndexError("a kernel accesses memory outside of all tensors")


class Pointer:
    """Addresses of elements.

    Args:
        memory: where they lie.
        at: the addresses.
        element: type of the elements.
        layout: of the addresses in registers.
    """

    def __init__(
        self, memory: GlobalMemory, at: Array, element: tl.dtype, layout: Layout = None
    ) -> None:
        self._memory = memory
        self._at = at
        self.dtype = tl.pointer_type(element)
        self.layout = layout

    @property
    def shape(self) -> list[int]:
        return list(self._at.shape)

    def to(self, dtype: Any, bitcast: bool = False) -> Pointer | Tensor:
        if not dtype.is_ptr():
            return Tensor(self._at, tl.int64, self.layout)
        return Pointer(self._memory, self._at, dtype.element_ty, self.layout)

    def in_layout(self, layout: Layout) -> Pointer:
        return Pointer(self._memory, self._at, self.dtype.element_ty, layout)

    def __getitem__(self, places: Any) -> Pointer:
        layout = layout_behind(self.layout, places)
        return Pointer(self._memory, self._at[places], self.dtype.element_ty, layout)

    def __add__(self, elements: Any) -> Pointer:
        element = self.dtype.element_ty
        at = self._at + bytes_of(element) * array_in(elements, tl.int64)
        layout = elements.layout if isinstance(elements, Tensor) else None
        return Pointer(self._memory, at, element, self.layout or layout)

    __radd__ = __add__

    def __sub__(self, elements: Any) -> Pointer:
        return self + -elements

    def load(self, mask: Any, other: Any) -> Tensor:
        """Elements in the mask; the others are ``other``, or poison."""
        element = self.dtype.element_ty
        inside = self._inside(mask)
        if other is None:
            poison = np.full((*inside.shape, bytes_of(element)), POISON, np.uint8)
            bits = typed(poison, element)[..., 0]
        else:
            given = to_bits(array_in(other, element), element)
            bits = np.array(np.broadcast_to(given, inside.shape))
        if inside.any():
            bits[inside] = self._memory.read(self._addresses(inside), element, threads_of(inside))
        return Tensor(from_bits(bits, element), element, self.layout)

    def store(self, value: Any, mask: Any) -> None:
        """Store the elements in the mask."""
        element = self.dtype.element_ty
        values = array_in(value, element)
        inside = self._inside(mask, values.shape)
        if inside.any():
            bits = np.broadcast_to(to_bits(values, element), inside.shape)[inside]
            self._memory.write(self._addresses(inside), element, threads_of(inside), bits)

    def _inside(self, mask: Any, shape: tuple[int, ...] = ()) -> Array:
        found = np.asarray(array_of(True if mask is None else mask), bool)
        return np.broadcast_to(found, np.broadcast_shapes(self._at.shape, found.shape, shape))

    def _addresses(self, inside: Array) -> Array:
        return np.broadcast_to(self._at, inside.shape)[inside]


def threads_of(inside: Array) -> Array:
    """Numbers for the threads with the elements of a tensor, as if each had one."""
    return np.flatnonzero(inside) | hash(inside.shape) % (1 << TIME - SHAPE) << SHAPE

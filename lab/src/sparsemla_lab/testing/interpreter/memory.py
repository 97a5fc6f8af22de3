"""Memory: pointers and TMA descriptors into the storage of tensors, and shared memory."""

from __future__ import annotations

import ctypes
import functools
import gc
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparsemla_lab.testing.interpreter.schedule import Barrier
from sparsemla_lab.testing.interpreter.values import (
    POISON,
    ROUNDED,
    UNSIGNED,
    Array,
    Tensor,
    array_in,
    array_of,
    bytes_of,
    from_bits,
    numbers_of,
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
    """

    def __init__(self, memory: GlobalMemory, at: Array, element: tl.dtype) -> None:
        self._memory = memory
        self._at = at
        self.dtype = tl.pointer_type(element)

    @property
    def shape(self) -> list[int]:
        return list(self._at.shape)

    def to(self, dtype: Any, bitcast: bool = False) -> Pointer | Tensor:
        if not dtype.is_ptr():
            return Tensor(self._at, tl.int64)
        return Pointer(self._memory, self._at, dtype.element_ty)

    def __getitem__(self, places: Any) -> Pointer:
        return Pointer(self._memory, self._at[places], self.dtype.element_ty)

    def __add__(self, elements: Any) -> Pointer:
        element = self.dtype.element_ty
        at = self._at + bytes_of(element) * array_in(elements, tl.int64)
        return Pointer(self._memory, at, element)

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
            bits[inside] = self._memory.read(self._addresses(inside), element, _threads(inside))
        return Tensor(from_bits(bits, element), element)

    def store(self, value: Any, mask: Any) -> None:
        """Store the elements in the mask."""
        element = self.dtype.element_ty
        values = array_in(value, element)
        inside = self._inside(mask, values.shape)
        if inside.any():
            bits = np.broadcast_to(to_bits(values, element), inside.shape)[inside]
            self._memory.write(self._addresses(inside), element, _threads(inside), bits)

    def _inside(self, mask: Any, shape: tuple[int, ...] = ()) -> Array:
        found = np.asarray(array_of(True if mask is None else mask), bool)
        return np.broadcast_to(found, np.broadcast_shapes(self._at.shape, found.shape, shape))

    def _addresses(self, inside: Array) -> Array:
        return np.broadcast_to(self._at, inside.shape)[inside]


def _threads(inside: Array) -> Array:
    """Numbers for the threads with the elements of a tensor, as if each had one."""
    return np.flatnonzero(inside) | hash(inside.shape) % (1 << TIME - SHAPE) << SHAPE


class Descriptor:
    """A TMA descriptor: boxes of a tensor, with zeros beyond its end."""

    def __init__(self, memory: GlobalMemory, descriptor: TensorDescriptor) -> None:
        self._pointer = memory.pointer_to(descriptor.base)
        self._axes = list(
            zip(descriptor.shape, descriptor.strides, descriptor.block_shape, strict=True)
        )
        self.dtype = self._pointer.dtype.element_ty

    def read(self, place: Sequence[int]) -> Array:
        """The box that begins at an element."""
        shape = [box for _, _, box in self._axes]
        at, inside = np.zeros(shape, np.int64), np.ones(shape, bool)
        for axis, (start, (size, stride, box)) in enumerate(zip(place, self._axes, strict=True)):
            index = np.expand_dims(
                start + np.arange(box), [i for i in range(len(shape)) if i != axis]
            )
            at += index * stride
            inside &= (index >= 0) & (index < size)
        return (self._pointer + Tensor(at, tl.int64)).load(Tensor(inside, tl.int1), 0).values


class _Allocation:
    """Shared memory that was allocated together.

    Args:
        size: bytes.

    Attributes:
        unfenced: by the first byte, elements that MMAs may not see, as no proxy fence came after
            their store.
        barriers: by offset.
    """

    def __init__(self, size: int) -> None:
        self.raw = np.full(size, POISON, np.uint8)
        self.unfenced = np.zeros(size, bool)
        self.barriers: dict[int, Barrier] = {}


class Shared:
    """A view of shared memory.

    Args:
        allocation: where it lies.
        at: offsets of its elements, in bytes.
        dtype: their type.
    """

    def __init__(self, allocation: _Allocation, at: Array, dtype: tl.dtype) -> None:
        self._allocation = allocation
        self._at = at
        self.dtype = dtype

    @classmethod
    def allocate(cls, dtype: tl.dtype, shape: Sequence[int], layout: object) -> Shared:
        shape = numbers_of((shape,))
        allocation = _Allocation(math.prod(shape) * bytes_of(dtype))
        return cls(allocation, offsets(layout, shape, bytes_of(dtype)), dtype)

    @property
    def shape(self) -> list[int]:
        return list(self._at.shape)

    @property
    def num_bytes(self) -> int:
        return self._at.size * bytes_of(self.dtype)

    @property
    def barrier(self) -> Barrier:
        return self._allocation.barriers.setdefault(int(self._at.flat[0]), Barrier())

    def index(self, place: Any) -> Shared:
        if not 0 <= int(place) < len(self._at):
            raise IndexError(
                f"a kernel takes part {int(place)} of {len(self._at)} of shared memory"
            )
        return Shared(self._allocation, self._at[int(place)], self.dtype)

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        places = [slice(None)] * self._at.ndim
        places[dim] = slice(int(start), int(start) + length)
        return Shared(self._allocation, self._at[tuple(places)], self.dtype)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self._allocation, self._at.transpose(order), self.dtype)

    def reinterpret(self, dtype: tl.dtype, shape: Sequence[int], layout: object) -> Shared:
        shape = numbers_of((shape,))
        start = self._at.min()
        if start + math.prod(shape) * bytes_of(dtype) > self._allocation.raw.size:
            raise IndexError(f"a kernel views {self.num_bytes} bytes as {shape} of {dtype}")
        at = start + offsets(layout, shape, bytes_of(dtype))
        return Shared(self._allocation, np.asarray(at), dtype)

    _reinterpret = reinterpret  # before Triton 3.9

    def load(self, layout: object = None) -> Tensor:
        return Tensor(self.read(), self.dtype)

    def store(self, value: Tensor) -> None:
        if value.dtype != self.dtype or value.shape != self.shape:
            raise TypeError(
                f"a kernel stores {value.shape} of {value.dtype} to {self.shape} of {self.dtype}"
            )
        self.write(value.values, fenced=False)

    def read(self) -> Array:
        bits = typed(self._allocation.raw, self.dtype)
        return from_bits(bits[self._at // bytes_of(self.dtype)], self.dtype)

    def write(self, values: Array, fenced: bool) -> None:
        """Write values; ``fenced``: by an asynchronous copy, after which MMAs need no fence."""
        bits = np.broadcast_to(to_bits(values, self.dtype), self._at.shape)
        typed(self._allocation.raw, self.dtype)[self._at // bytes_of(self.dtype)] = bits
        self._allocation.unfenced[self._at] = not fenced
        if not fenced:
            _unfenced.add(self._allocation)

    def check_fence(self) -> None:
        """Check that an MMA sees all that was stored.

        Raises:
            RuntimeError: no fence came after a store.
        """
        if self._allocation.unfenced[self._at].any():
            raise RuntimeError("an MMA reads shared memory without a proxy fence after its stores")


_unfenced: set[_Allocation] = set()


def fence() -> None:
    """Let MMAs see all that has been stored to shared memory."""
    for allocation in _unfenced:
        allocation.unfenced[:] = False
    _unfenced.clear()


def offsets(layout: Any, shape: tuple[int, ...], size: int) -> Array:
    """Offsets of the elements in an allocation, in bytes.

    Tiles of MMAs have their order on the GPU, as kernels view one tile as several. Other layouts
    are row by row.
    """
    if not isinstance(layout, gl.NVMMASharedLayout):
        return (np.arange(math.prod(shape)) * size).reshape(shape)
    if layout.transposed:
        raise NotImplementedError("tiles with columns in one piece")
    leading, tile = shape[: -layout.rank], shape[-layout.rank :]
    starts = np.arange(math.prod(leading)) * math.prod(tile) * size
    starts = starts.reshape(*leading, *[1] * len(tile))
    return np.asarray(starts + _tile_offsets(tile, size, layout.swizzle_byte_width))


@functools.cache
def _tile_offsets(shape: tuple[int, ...], size: int, swizzle: int) -> Array:
    """A tile's panels of ``swizzle`` bytes, in which rows permute their pieces of 16 bytes."""
    rows, row_bytes = math.prod(shape[:-1]), shape[-1] * size
    row, at = np.indices((rows, shape[-1]))
    width = min(swizzle, row_bytes) or row_bytes
    panel, inside = np.divmod(at * size, width)
    if swizzle:
        inside = inside ^ (row // (128 // swizzle) % (swizzle // 16) * 16)
    return np.asarray((panel * rows + row) * width + inside).reshape(shape)

"""TMA descriptors, and shared memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparsemla_lab.testing.interpreter.global_memory import GlobalMemory, typed
from sparsemla_lab.testing.interpreter.schedule import Barrier, program
from sparsemla_lab.testing.interpreter.values import (
    POISON,
    Array,
    Tensor,
    bytes_of,
    from_bits,
    known_layout,
    numbers_of,
    to_bits,
)


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
        num_copies: cp.async that are under way, as far as the kernel knows: it has not waited for
            them.
        issuers: for each byte, the number of the partition whose copy is under way to there, or 0.
        barriers: by offset.
    """

    def __init__(self, size: int) -> None:
        self.raw = np.full(size, POISON, np.uint8)
        self.unfenced = np.zeros(size, bool)
        self.num_copies = 0
        self.issuers = np.zeros(size, np.uint8)
        self.barriers: dict[int, Barrier] = {}


class Shared:
    """A view of shared memory.

    Args:
        allocation: where it lies.
        at: offsets of its elements, in bytes.
        dtype: their type.
        layout: their layout, or None behind a permutation.
    """

    def __init__(self, allocation: _Allocation, at: Array, dtype: tl.dtype, layout: object) -> None:
        self._allocation = allocation
        self._at = at
        self.dtype = dtype
        self.layout = layout

    @classmethod
    def allocate(
        cls, dtype: tl.dtype, shape: Sequence[int], layout: object, value: Tensor | None = None
    ) -> Shared:
        shape = numbers_of((shape,))
        allocation = _Allocation(math.prod(shape) * bytes_of(dtype))
        found = cls(allocation, offsets(layout, shape, bytes_of(dtype)), dtype, layout)
        if value is not None:
            found.store(value)
        return found

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
        return Shared(self._allocation, self._at[int(place)], self.dtype, self.layout)

    def slice(self, start: Any, length: int, dim: int = 0) -> Shared:
        places = [slice(None)] * self._at.ndim
        places[dim] = slice(int(start), int(start) + length)
        return Shared(self._allocation, self._at[tuple(places)], self.dtype, self.layout)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self._allocation, self._at.transpose(order), self.dtype, None)

    def reinterpret(self, dtype: tl.dtype, shape: Sequence[int], layout: object) -> Shared:
        shape = numbers_of((shape,))
        start = self._at.min()
        if start + math.prod(shape) * bytes_of(dtype) > self._allocation.raw.size:
            raise IndexError(f"a kernel views {self.num_bytes} bytes as {shape} of {dtype}")
        at = start + offsets(layout, shape, bytes_of(dtype))
        return Shared(self._allocation, np.asarray(at), dtype, layout)

    _reinterpret = reinterpret  # before Triton 3.9

    def load(self, layout: object = None) -> Tensor:
        return Tensor(self.read(), self.dtype, known_layout(layout))

    def store(self, value: Tensor) -> None:
        if value.dtype != self.dtype or value.shape != self.shape:
            raise TypeError(
                f"a kernel stores {value.shape} of {value.dtype} to {self.shape} of {self.dtype}"
            )
        self._check_copies("writes")
        self.write(value.values, fenced=False)

    def read(self) -> Array:
        self._check_copies("reads")
        return from_bits(self._elements(self._allocation.raw), self.dtype)

    def write(self, values: Array, fenced: bool) -> None:
        """Write values; ``fenced``: by an asynchronous copy, after which MMAs need no fence."""
        bits = np.broadcast_to(to_bits(values, self.dtype), self._at.shape)
        typed(self._allocation.raw, self.dtype)[self._at // bytes_of(self.dtype)] = bits
        self._allocation.unfenced[self._at] = not fenced
        if not fenced:
            _unfenced.add(self._allocation)

    def expect_copy(self) -> None:
        """Let a cp.async of the current partition be under way to here.

        Raises:
            RuntimeError: another one of it is.
        """
        self._check_copies("copies to")
        self._allocation.num_copies += 1
        self._set_issuer(program().current.number)

    def end_copy(self) -> None:
        """Let the kernel know that the cp.async to here has ended."""
        self._allocation.num_copies -= 1
        self._set_issuer(0)

    def _set_issuer(self, number: int) -> None:
        word = int.from_bytes([number] * bytes_of(self.dtype))
        typed(self._allocation.issuers, self.dtype)[self._at // bytes_of(self.dtype)] = word

    def _check_copies(self, access: str) -> None:
        """Check that the current partition has waited for its own copies; others may have arrived.

        Raises:
            RuntimeError: it has not.
        """
        if self._allocation.num_copies:
            issuers = self._elements(self._allocation.issuers).ravel().view(np.uint8)
            if (issuers == program().current.number).any():
                raise RuntimeError(f"a kernel {access} shared memory before its cp.async has ended")

    def _elements(self, of: Array) -> Array:
        """The elements of the view, in an array with the bytes of the allocation."""
        return np.asarray(typed(of, self.dtype)[self._at // bytes_of(self.dtype)])

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

    Tiles have their order on the GPU, as kernels view one tile as several.
    """
    if isinstance(layout, gl.SwizzledSharedLayout):
        rank = len(layout.order)
        swizzle = layout.vec, layout.per_phase, layout.max_phase
        inside = size * _swizzled_places(shape[-rank:], tuple(layout.order), *swizzle)
    elif isinstance(layout, gl.NVMMASharedLayout):
        if layout.transposed:
            raise NotImplementedError("tiles with columns in one piece")
        rank = layout.rank
        inside = _panel_offsets(shape[-rank:], size, layout.swizzle_byte_width)
    else:
        raise NotImplementedError(f"shared memory in {layout}")
    leading = shape[:-rank]
    starts = np.arange(math.prod(leading)) * inside.size * size
    return np.asarray(starts.reshape(*leading, *[1] * rank) + inside)


@functools.cache
def _swizzled_places(
    shape: tuple[int, ...], order: tuple[int, ...], vec: int, per_phase: int, max_phase: int
) -> Array:
    """The places of a tile's elements, of which pieces of ``vec`` are permuted in each row.

    A row is along the first axis of ``order``, the next row along the second one.
    """
    index = np.indices(shape)
    if max_phase > 1:
        columns = shape[order[0]]
        phase = index[order[1]] // per_phase % max_phase
        index[order[0]] ^= vec * phase % columns
    place, stride = np.zeros(shape, np.int64), 1
    for axis in order:
        place += stride * index[axis]
        stride *= shape[axis]
    return place


@functools.cache
def _panel_offsets(shape: tuple[int, ...], size: int, swizzle: int) -> Array:
    """A tile's panels of ``swizzle`` bytes, in which rows permute their pieces of 16 bytes."""
    rows, row_bytes = math.prod(shape[:-1]), shape[-1] * size
    row, at = np.indices((rows, shape[-1]))
    width = min(swizzle, row_bytes) or row_bytes
    panel, inside = np.divmod(at * size, width)
    if swizzle:
        inside = inside ^ (row // (128 // swizzle) % (swizzle // 16) * 16)
    return np.asarray((panel * rows + row) * width + inside).reshape(shape)

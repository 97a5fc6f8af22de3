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
from sparsemla_lab.testing.interpreter.schedule import Barrier
from sparsemla_lab.testing.interpreter.values import (
    POISON,
    Array,
    Tensor,
    bytes_of,
    from_bits,
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

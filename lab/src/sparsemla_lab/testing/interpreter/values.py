"""Tensors in registers: NumPy arrays with Triton's types and its rules of promotion."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch
import triton.language as tl
from triton.experimental.gluon import language as gl

Array = np.ndarray[Any, np.dtype[Any]]

NATIVE = {
    tl.int1: np.bool_,
    tl.int8: np.int8,
    tl.int16: np.int16,
    tl.int32: np.int32,
    tl.int64: np.int64,
    tl.uint8: np.uint8,
    tl.uint16: np.uint16,
    tl.uint32: np.uint32,
    tl.uint64: np.uint64,
    tl.float16: np.float16,
    tl.float32: np.float32,
    tl.float64: np.float64,
}
"""Triton's types that NumPy has."""
ROUNDED = {
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
"""Types whose values are kept as float32."""
UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
NUMBERS = (bool, int, float, np.generic)
POISON = 0x7F
"""Each byte of memory without a value: NaN in FP8 and bfloat16, and a large integer."""


class _AnyLayout(gl.AutoLayout):
    """Stands for every register layout."""

    @property
    def parent(self) -> _AnyLayout:
        return self


Layout: TypeAlias = Any
"""A layout in registers, or None: the interpreter does not know which."""


def known_layout(layout: Any) -> Layout:
    """A layout that a kernel names, or None if the compiler chooses it or a part of it."""
    within = layout
    while isinstance(within, (gl.SliceLayout, gl.DotOperandLayout)):
        within = within.parent
    return None if within is None or isinstance(within, gl.AutoLayout) else layout


def layout_of(*operands: Any) -> Layout:
    """The layout of a result that lies where its operands lie: they have one layout."""
    found = (each.layout for each in operands if isinstance(each, Tensor))
    return next((layout for layout in found if layout is not None), None)


def expanded(layout: Layout, axis: int) -> Layout:
    """The layout with a new axis of size 1."""
    is_slice = isinstance(layout, gl.SliceLayout) and layout.dim == axis
    return layout.parent if is_slice else None


def layout_behind(layout: Layout, places: Any) -> Layout:
    """The layout behind an index of colons, and of ``None`` for each new axis."""
    for axis, place in enumerate(places if isinstance(places, tuple) else (places,)):
        if place is None:
            layout = expanded(layout, axis)
    return layout


def bytes_of(dtype: tl.dtype) -> int:
    """Bytes of an element in memory."""
    return max(int(dtype.primitive_bitwidth) // 8, 1)


def rounded(values: Array, dtype: tl.dtype) -> Array:
    """Values in a type; FP8 saturates, as the GPU's conversions do."""
    if dtype in ROUNDED:
        x = torch.tensor(np.asarray(values, np.float32))
        if dtype != tl.bfloat16:
            limit = torch.finfo(ROUNDED[dtype]).max
            x = torch.where(x.isnan(), x, x.clamp(-limit, limit))
        return np.asarray(x.to(ROUNDED[dtype]).float().numpy())
    if dtype == tl.int1:
        return np.asarray(values != 0)
    if values.dtype.kind == "f" and dtype.is_int():
        values = np.nan_to_num(values, nan=0, posinf=2.0**62, neginf=-(2.0**62)).astype(np.int64)
    return values.astype(NATIVE[dtype], copy=False)


def to_bits(values: Array, dtype: tl.dtype) -> Array:
    """The bits of values, as unsigned integers."""
    if dtype in ROUNDED:
        x = torch.tensor(np.asarray(values)).to(ROUNDED[dtype])
        values = x.view(torch.uint8 if bytes_of(dtype) == 1 else torch.int16).numpy()
    return np.ascontiguousarray(values).reshape(values.shape).view(UNSIGNED[bytes_of(dtype)])


def from_bits(bits: Array, dtype: tl.dtype) -> Array:
    """Values of bits."""
    bits = np.ascontiguousarray(bits).reshape(bits.shape)
    if dtype == tl.bfloat16:
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype in ROUNDED:
        return np.asarray(torch.tensor(bits).view(ROUNDED[dtype]).float().numpy())
    return np.asarray(bits != 0) if dtype == tl.int1 else bits.view(NATIVE[dtype])


def common_type(a: Any, b: Any, divides: bool = False) -> tl.dtype:
    """The type in which Triton computes with two operands; Python's numbers adapt to tensors."""
    if isinstance(a, NUMBERS) or isinstance(b, NUMBERS):
        number, tensor = (a, b) if isinstance(a, NUMBERS) else (b, a)
        found = tensor.dtype
        if isinstance(number, (float, np.floating)) and not found.is_floating():
            found = tl.float32
        elif found == tl.int1 and not isinstance(number, (bool, np.bool_)):
            found = tl.int32
    elif a.dtype.is_floating() != b.dtype.is_floating():
        found = a.dtype if a.dtype.is_floating() else b.dtype
    elif a.dtype.is_floating():
        wide = [dtype for dtype in (tl.float64, tl.float32) if dtype in (a.dtype, b.dtype)]
        found = wide[0] if wide else a.dtype if a.dtype == b.dtype else tl.float32
    else:
        bits = max(a.dtype.primitive_bitwidth, b.dtype.primitive_bitwidth)
        wide = [dtype for dtype in (a.dtype, b.dtype) if dtype.primitive_bitwidth == bits]
        found = next((dtype for dtype in wide if dtype.is_int_unsigned()), wide[0])
    if divides and found.is_floating() and found.primitive_bitwidth < 32:
        found = tl.float32
    return found


def array_of(x: Any) -> Array:
    """The array of a tensor or a number."""
    return x.values if isinstance(x, Tensor) else np.asarray(x)


def array_in(x: Any, dtype: tl.dtype) -> Array:
    """The array of a tensor or a number in a type."""
    if isinstance(x, Tensor) and x.dtype == dtype:
        return x.values
    return rounded(array_of(x), dtype)


def as_tensor(x: Any) -> Any:
    """A number as the tensor that a kernel makes of it; anything else as it is."""
    if not isinstance(x, NUMBERS):
        return x
    if isinstance(x, (float, np.floating)):
        return Tensor(np.asarray(x, np.float32), tl.float32)
    dtype = tl.int32 if -(2**31) <= int(x) < 2**31 else tl.int64
    return Tensor(np.asarray(x, NATIVE[dtype]), dtype)


def numbers_of(arguments: tuple[Any, ...]) -> tuple[int, ...]:
    """Sizes that were given one by one or as a sequence."""
    if len(arguments) == 1 and not isinstance(arguments[0], NUMBERS):
        arguments = tuple(arguments[0])
    return tuple(int(number) for number in arguments)


class Tensor:
    """A tensor in registers, or a scalar.

    Args:
        values: its array.
        dtype: its type.
        layout: in registers.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, values: Array, dtype: tl.dtype, layout: Layout = None) -> None:
        self._values = values
        self.dtype = dtype
        self.layout = layout

    @property
    def values(self) -> Array:
        return self._values

    @property
    def shape(self) -> list[int]:
        return list(self.values.shape)

    @property
    def type(self) -> SimpleNamespace:
        return SimpleNamespace(scalar=self.dtype, layout=self.layout or _AnyLayout())

    def to(self, dtype: tl.dtype, bitcast: bool = False) -> Tensor:
        if bitcast:
            bits = to_bits(self.values, self.dtype)
            return Tensor(from_bits(bits, dtype), dtype, self.layout)
        return Tensor(rounded(self.values, dtype), dtype, self.layout)

    def in_layout(self, layout: Layout) -> Tensor:
        return Tensor(self.values, self.dtype, layout)

    def reshape(self, *shape: Any) -> Tensor:
        return Tensor(self.values.reshape(numbers_of(shape)), self.dtype)

    def permute(self, *order: Any) -> Tensor:
        return Tensor(self.values.transpose(numbers_of(order)), self.dtype)

    def broadcast_to(self, *shape: Any) -> Tensor:
        return Tensor(np.broadcast_to(self.values, numbers_of(shape)), self.dtype, self.layout)

    def split(self) -> tuple[Tensor, Tensor]:
        return Tensor(self.values[..., 0], self.dtype), Tensor(self.values[..., 1], self.dtype)

    def __getitem__(self, places: Any) -> Tensor:
        return Tensor(self.values[places], self.dtype, layout_behind(self.layout, places))

    def __bool__(self) -> bool:
        return bool(self.values)

    def __index__(self) -> int:
        return int(self.values)

    def __neg__(self) -> Tensor:
        return Tensor(np.asarray(-self.values), self.dtype, self.layout)

    def __invert__(self) -> Tensor:
        return Tensor(np.asarray(~self.values), self.dtype, self.layout)


def pairwise(compute: Callable[..., Array], divides: bool = False) -> Callable[..., Any]:
    """A function of two operands in their common type."""

    def call(x: Any, y: Any) -> Any:
        if isinstance(x, NUMBERS) and isinstance(y, NUMBERS):
            x = as_tensor(x)
        if not all(isinstance(each, (Tensor, *NUMBERS)) for each in (x, y)):
            return NotImplemented  # a pointer
        dtype = common_type(x, y, divides)
        if divides and not dtype.is_floating():
            dtype = tl.float32
        with np.errstate(all="ignore"):
            found = np.asarray(compute(array_in(x, dtype), array_in(y, dtype)))
        return Tensor(rounded(found, dtype), dtype, layout_of(x, y))

    return call


def compared(compare: Callable[..., Array]) -> Callable[..., Tensor]:
    """A comparison of two operands in their common type."""

    def call(x: Any, y: Any) -> Tensor:
        dtype = common_type(x, y)
        found = np.asarray(compare(array_in(x, dtype), array_in(y, dtype)))
        return Tensor(found, tl.int1, layout_of(x, y))

    return call


def _quotient(x: Array, y: Array) -> Array:
    """Integers divide towards zero."""
    if x.dtype.kind == "u":
        return x // y
    magnitude = np.abs(x) // np.abs(y)
    return np.where((x < 0) != (y < 0), -magnitude, magnitude)


divide = pairwise(np.divide, divides=True)

OPERATORS = {
    "add": pairwise(np.add),
    "sub": pairwise(np.subtract),
    "mul": pairwise(np.multiply),
    "truediv": divide,
    "floordiv": pairwise(_quotient),
    "mod": pairwise(np.fmod),
    "and": pairwise(np.bitwise_and),
    "or": pairwise(np.bitwise_or),
    "xor": pairwise(np.bitwise_xor),
    "lshift": pairwise(np.left_shift),
    "rshift": pairwise(np.right_shift),
}
COMPARISONS = {
    "eq": compared(np.equal),
    "ne": compared(np.not_equal),
    "lt": compared(np.less),
    "le": compared(np.less_equal),
    "gt": compared(np.greater),
    "ge": compared(np.greater_equal),
}


def _swapped(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: function(other, self)


for _name, _function in OPERATORS.items():
    setattr(Tensor, f"__{_name}__", _function)
    setattr(Tensor, f"__r{_name}__", _swapped(_function))
for _name, _function in COMPARISONS.items():
    setattr(Tensor, f"__{_name}__", _function)

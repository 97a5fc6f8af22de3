"""PTX's floating-point numbers in registers: formats, arithmetic and conversions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl

from sparsemla_lab.testing.interpreter.values import (
    UNSIGNED,
    Array,
    bytes_of,
    from_bits,
    rounded,
    to_bits,
)

FORMATS = {
    "f32": (tl.float32, 1),
    "f16": (tl.float16, 1),
    "bf16": (tl.bfloat16, 1),
    "f16x2": (tl.float16, 2),
    "bf16x2": (tl.bfloat16, 2),
    "e4m3x2": (tl.float8e4nv, 2),
    "e5m2x2": (tl.float8e5, 2),
}
"""Type and count of the numbers in a register."""
MODIFIERS = {"rn", "approx", "ftz", "satfinite"}
"""Those that :func:`compute` and :func:`convert` know. FP8 always saturates."""
ARITHMETIC: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "ex2": np.exp2,
    "fma": lambda a, b, c: a * b + c,
    "lg2": np.log2,
    "max": np.fmax,
    "min": np.fmin,
    "mul": np.multiply,
    "neg": np.negative,
    "rcp": np.reciprocal,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sqrt": np.sqrt,
    "sub": np.subtract,
}
"""Results of float64, which are rounded once, but for those halfway between two."""


def size_of(of: str) -> int:
    """Bytes of a register."""
    dtype, count = FORMATS[of]
    return bytes_of(dtype) * count


def decode(bits: Array, of: str) -> Array:
    """The numbers of a register, the lowest first, as ``[..., count]`` of float64."""
    dtype, _ = FORMATS[of]
    parts = np.ascontiguousarray(bits)[..., None].view(UNSIGNED[bytes_of(dtype)])
    return from_bits(parts, dtype).astype(np.float64)


def encode(numbers: Array, of: str) -> Array:
    """The register with these numbers, rounded to nearest even."""
    dtype, _ = FORMATS[of]
    if dtype not in (tl.float32, tl.float16):
        numbers = _to_odd(numbers)
    bits = np.ascontiguousarray(to_bits(rounded(numbers, dtype), dtype))
    return bits.view(UNSIGNED[size_of(of)])[..., 0]


def _to_odd(numbers: Array) -> Array:
    """float32 that rounds as the numbers do: inexact ones keep an odd last bit."""
    near = numbers.astype(np.float32)
    beyond = np.abs(near) > np.abs(numbers)
    below = np.where(beyond, np.nextafter(near, np.float32(0)), near).astype(np.float32)
    inexact = np.isfinite(numbers) & (below != numbers)
    return np.where(inexact, below.view(np.uint32) | 1, below.view(np.uint32)).view(np.float32)


def compute(kind: str, modifiers: Sequence[str], of: str, operands: Sequence[Array]) -> Array:
    """The register with the result of an instruction, of registers."""
    numbers = [_flushed(decode(each, of), modifiers, of) for each in operands]
    with np.errstate(all="ignore"):
        found = ARITHMETIC[kind](*numbers)
        return encode(_flushed(found, modifiers, of), of)


def _flushed(numbers: Array, modifiers: Sequence[str], of: str) -> Array:
    """``.ftz``: zeros instead of subnormal float32."""
    if "ftz" not in modifiers or of != "f32":
        return numbers
    return np.where(np.abs(numbers) < np.finfo(np.float32).tiny, numbers * 0, numbers)


def convert(to: str, modifiers: Sequence[str], sources: Sequence[Array]) -> Array:
    """The register of a ``cvt``, of numbers ``[..., count]``; of two sources, the second is low."""
    numbers = np.concatenate(sources[::-1], -1)
    with np.errstate(all="ignore"):
        return encode(_flushed(numbers, modifiers, to), to)

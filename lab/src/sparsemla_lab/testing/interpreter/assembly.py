"""What the inline assembly of kernels computes, by its text."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import triton.language as tl

from sparsemla_lab.testing.interpreter.values import Array, Tensor, array_of, divide


def _decoded(codes: Tensor) -> Tensor:
    """The e4m3 numbers of bytes."""
    return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)


def _encoded(x: Tensor) -> Tensor:
    """The bytes of e4m3 numbers."""
    return x.to(tl.float8e4nv).to(tl.int8, bitcast=True)


def _halves(words: Tensor) -> tuple[Array, Array]:
    """The lower and the upper 16 bits."""
    both = np.ascontiguousarray(words.values)[..., None].view(np.uint16)
    return both[..., 0], both[..., 1]


def _larger_magnitudes(x: Tensor, y: Tensor) -> Tensor:
    """Of pairs of bfloat16; NaN loses, and signs are multiplied."""
    result = np.zeros(np.broadcast_shapes(x.values.shape, y.values.shape), np.uint32)
    for half, (a, b) in enumerate(zip(_halves(x), _halves(y), strict=True)):
        sizes = [np.where(bits & 0x7FFF > 0x7F80, 0, bits & 0x7FFF) for bits in (a, b)]
        result |= (np.maximum(*sizes) | (a ^ b) & 0x8000).astype(np.uint32) << np.uint32(16 * half)
    return Tensor(result.view(np.int32), tl.int32)


def _key_pairs(codes: Tensor, factors: Tensor | None = None) -> Tensor:
    """Numbers of two keys times their factors; of four dims, the two keys of a dim come together.

    ``codes`` is ``[pairs * 2, dims]`` or ``[pairs, 2, blocks, dims]``, ``factors`` like the latter,
    a word with the float16 of both keys.
    """
    x = _decoded(codes).values
    pairs = x.reshape(-1, 2, x.size // len(x), 1) if x.ndim == 2 else x
    if factors is not None:
        both = np.stack(_halves(factors), 1)[:, :, 0].view(np.float16).astype(np.float32)
        pairs = (pairs * both).astype(np.float16)
    by_dim = pairs.reshape(len(pairs), 2, -1, 4).transpose(0, 2, 3, 1)
    by_place = by_dim.reshape(len(pairs), -1, 2, 4).transpose(0, 2, 1, 3)
    return Tensor(np.asarray(by_place.reshape(x.shape), np.float32), tl.float32)


def _codes(p: Tensor) -> Tensor:
    """e4m3 codes of 256 times float16 numbers, halves rounded up."""
    bits = p.values.astype(np.float16).view(np.uint16).astype(np.uint32)
    return Tensor((2 * bits + 0x80 >> 8).astype(np.uint8), tl.uint8)


def _larger_halves(x: Tensor, y: Tensor) -> Tensor:
    """The larger of each half of words."""
    first, second = (np.ascontiguousarray(words.values).view(np.uint16) for words in (x, y))
    return Tensor(np.maximum(first, second).view(np.int32), tl.int32)


def _taken_apart(low: Tensor, high: Tensor) -> tuple[Tensor, ...]:
    """Bytes of pairs of dims; see ``fp8_mma.deinterleave``."""
    both = np.stack([low.values, high.values], 1)  # w, 8 keys, half, g, 16 keys, quarter, key
    dims = np.ascontiguousarray(both)[..., None].view(np.uint8)
    return tuple(Tensor(dims[:, :, half, ..., d], tl.uint8) for half in range(2) for d in range(2))


def _no_result(*operands: Any) -> Tensor:
    return Tensor(np.zeros(np.shape(array_of(operands[0])), np.int32), tl.int32)


def text_of(assembly: str) -> str:
    """Assembly with single spaces."""
    return " ".join(assembly.split())


@functools.cache
def known() -> Mapping[str, Callable[..., Tensor | tuple[Tensor, ...]]]:
    """Functions of the operands; the caller rounds their results to the types that it asks for."""
    from sparsemla.kernels.attention.sm90 import bf16, chunks, fp8_few_heads, fp8_mma

    def inside(function: Any) -> str:
        """The assembly in a function of the device."""
        constants = function.fn.__code__.co_consts
        return next(text for text in constants if isinstance(text, str) and "$0" in text)

    found: dict[str, Callable[..., Tensor | tuple[Tensor, ...]]] = {
        "mov.b32 $0, 0;": _no_result,
        "cvt.rn.bf16x2.f32 $0, $2, $1;": lambda x: x,
        "cvt.rn.f16x2.f32 $0, $2, $1;": lambda x: x,
        "ex2.approx.ftz.f32 $0, $1;": lambda x: Tensor(np.exp2(x.values), tl.float32),
        "lg2.approx.ftz.f32 $0, $1;": lambda x: Tensor(np.log2(x.values), tl.float32),
        "rcp.approx.ftz.f32 $0, $1;": lambda x: divide(1.0, x),
        "rsqrt.approx.ftz.f32 $0, $1;": lambda x: Tensor(1 / np.sqrt(x.values), tl.float32),
        "max.xorsign.abs.bf16x2 $0, $1, $2;": _larger_magnitudes,
        "{.reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b};}": _encoded,
        inside(bf16.scale_pairs): lambda x, alpha: x.to(tl.float32) * alpha,
        inside(bf16.prefetch_blocks): _no_result,
        "max.u16x2 $0, $1, $2;": _larger_halves,
        inside(fp8_mma.to_e4m3): _codes,
        inside(fp8_mma.deinterleave): _taken_apart,
        chunks.DEQUANTIZE.value: lambda codes, scale: _decoded(codes) * scale,
        fp8_few_heads.DEQUANTISE.value: _decoded,
        fp8_few_heads.DEQUANTISE_KEY_PAIRS.value: _key_pairs,
        fp8_few_heads.SCALE_KEY_PAIRS.value: _key_pairs,
        fp8_few_heads.SCALE_AND_ROUND.value: lambda x, y: (x.to(tl.float32) * y).to(tl.bfloat16),
    }
    return {text_of(assembly): function for assembly, function in found.items()}

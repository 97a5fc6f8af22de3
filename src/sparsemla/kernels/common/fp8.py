"""e4m3 and power-of-two scales in Triton, with and without hardware support.

Kernels get e4m3 and e8m0 tensors as uint8 pointers, because a GPU before sm_89 has no fp8 type.
"""

import os

import torch
import triton
import triton.language as tl
from triton.language.target_info import is_cuda

from sparsemla.kernels.common.device import describe

ENCODE_FOUR = tl.constexpr("""{
    .reg .b16 low, high;
    cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
    cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
    mov.b32 $0, {low, high};
}""")
HALVES_OF_FOUR = tl.constexpr("""{
    .reg .b32 p0, p1, m0, m1, n0, n1;
    prmt.b32 p0, $2, 0, 0x1404;            prmt.b32 p1, $2, 0, 0x3424;
    shr.u32 m0, p0, 1;                     shr.u32 m1, p1, 1;
    and.b32 m0, m0, 0x3f803f80;            and.b32 m1, m1, 0x3f803f80;
    add.u32 n0, m0, 0x00800080;            add.u32 n1, m1, 0x00800080;
    lop3.b32 m0, p0, 0x80008000, m0, 0xea; lop3.b32 m1, p1, 0x80008000, m1, 0xea;
    lop3.b32 $0, n0, 0x40004000, m0, 0xea; lop3.b32 $1, n1, 0x40004000, m1, 0xea;
}""")
"""Four e4m3 codes as float16 over 256: two at a time, bits 0 to 6 move under the sign. Of all
magnitudes only 0x7f, NaN, carries into bit 14, which makes it a NaN of float16."""
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
INTERPRETED_HERE = tl.constexpr(INTERPRETED)


def has_fp8(device: torch.device) -> bool:
    """Whether the device converts e4m3 by itself."""
    return describe(device).has_fp8


@triton.jit
def e4m3_over_256(code):
    """float16 of uint8 e4m3 codes, divided by 256; exact, subnormal codes and NaN included.

    The bits of a code are those of a float16 whose exponent bias is 15 instead of 7.
    """
    if is_cuda() and not INTERPRETED_HERE and code.numel >= 4:
        # The compiler would move each code by itself, and twice as often.
        return tl.inline_asm_elementwise(
            HALVES_OF_FOUR, "=r,=r,r", [code], dtype=tl.float16, is_pure=True, pack=4
        )
    bits = ((code & 0x80).to(tl.uint16) << 8) | ((code & 0x7F).to(tl.uint16) << 7)
    value = bits.to(tl.float16, bitcast=True)
    return tl.where((code & 0x7F) == 0x7F, float("nan"), value)


@triton.jit
def decode_e4m3(code, NATIVE: tl.constexpr):
    """float32 values of uint8 e4m3 codes, exact."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    return e4m3_over_256(code).to(tl.float32) * 256.0


@triton.jit
def encode_e4m3(x, NATIVE: tl.constexpr):
    """uint8 e4m3 codes of float32 values, nearest even, saturating at +-448; NaN stays NaN."""
    if NATIVE and x.numel >= 4:
        # The instruction itself: on sm_89, Triton 3.6 to 3.8 truncates to float16 first.
        return tl.inline_asm_elementwise(
            ENCODE_FOUR, "=r,r,r,r,r", [x], dtype=tl.uint8, is_pure=True, pack=4
        )
    x = tl.where(x != x, x, tl.minimum(tl.maximum(x, -448.0), 448.0))
    bits = x.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # Normal values (at least 2^-6): keep 3 mantissa bits, rounded to nearest even; a carry runs
    # into the exponent as it should.
    normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
    # Subnormals are multiples of 2^-9; adding 2^14 leaves the multiple in the low mantissa bits.
    shifted = magnitude.to(tl.float32, bitcast=True) + 16384.0
    subnormal = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    code = tl.where(magnitude >= 0x3C800000, normal, subnormal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (sign | code).to(tl.uint8)


@triton.jit
def round_to_e4m3(x):
    """float32 values up to 448, rounded to the nearest even e4m3 value; NaN stays NaN.

    A value of the binade 2^e, at least 2^-6, loses its bits below 2^(e - 3) in a sum with
    1.5 * 2^(e + 20).
    """
    binade = (x.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    binade = tl.maximum(binade, 0.015625)
    shift = tl.full(x.shape, 1572864.0, tl.float32)
    return tl.fma(-binade, shift, tl.fma(binade, shift, x))


@triton.jit
def decode_e8m0(code):
    """float32 powers of two of uint8 e8m0 codes: ``2^(code - 127)``, 255 is NaN."""
    bits = tl.where(code == 0, 0x400000, code.to(tl.uint32) << 23)
    return tl.where(code == 255, float("nan"), bits.to(tl.float32, bitcast=True))


@triton.jit
def decode_scale(scale, E4M3: tl.constexpr, NATIVE: tl.constexpr):
    """float32 of stored scales: float32, or uint8 codes, of e4m3 or of e8m0."""
    if scale.dtype != tl.uint8:
        value = scale
    elif E4M3:
        value = decode_e4m3(scale, NATIVE)
    else:
        value = decode_e8m0(scale)
    return value


@triton.jit
def ceil_pow2(x):
    """The smallest power of two at or above a positive float32."""
    bits = x.to(tl.uint32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.uint32)
    return (exponent << 23).to(tl.float32, bitcast=True)


@triton.jit
def dot(a, b, acc, UPCAST: tl.constexpr):
    """``a @ b + acc``. The interpreter's bf16 product is wrong, so it gets float32 operands."""
    if UPCAST:
        result = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:  # after a return, the compiler would still check that the operands have one dtype
        result = tl.dot(a, b, acc)
    return result

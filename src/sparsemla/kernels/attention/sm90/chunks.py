"""Rows of a quantised cache on Hopper, converted to bfloat16: chunks of 128 bytes a key.

A chunk lies in a ring as it was stored. Whoever takes it converts it in registers, in the layout of
a product's left operand.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Copies: 8 lanes take 128 bytes of a row, a thread the same rows of each part of a row.
COPY8 = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
COPY16 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
COPY32 = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
COPY_ROWS = gl.constexpr(gl.SliceLayout(1, COPY8))
BF16_ROWS = gl.constexpr(gl.SliceLayout(1, COPY16))

# A thread has 4 dims of each 16, of two keys: as many as a step of a product takes from it. Results
# in this order are 16 bytes of float32 beside those of three other threads.
DIMS128 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32], [8, 0], [0, 64]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)
DIMS64 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)

# Swizzled so that the eight keys which a warp reads at once lie in different banks.
RAW8 = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
RAW8_HALF = gl.constexpr(gl.SwizzledSharedLayout(16, 2, 4, [1, 0]))
WORDS2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
CONVERT = gl.constexpr("""{
    .reg .b16 l, h; .reg .b32 a, b; .reg .f16 a0, a1, b0, b1; .reg .f32 f0, f1, f2, f3;
    mov.b32 {l, h}, $2;
    cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h;
    mov.b32 {a0, a1}, a; mov.b32 {b0, b1}, b;
    cvt.f32.f16 f0, a0; cvt.f32.f16 f1, a1; cvt.f32.f16 f2, b0; cvt.f32.f16 f3, b1;
    mul.f32 f0, f0, $3; mul.f32 f1, f1, $4; mul.f32 f2, f2, $5; mul.f32 f3, f3, $6;
    cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }""")


@triton.constexpr_function
def num_chunks(fp8_dim, head_dim):
    """Pieces of 128 bytes that a row is copied in; the last one of its e4m3 may have 64."""
    return -(-fp8_dim // 128) + (head_dim - fp8_dim) // 64


@triton.constexpr_function
def chunk_start(fp8_dim, chunk):
    """First dim of a chunk."""
    quantised = -(-fp8_dim // 128)
    return 128 * chunk if chunk < quantised else fp8_dim + 64 * (chunk - quantised)


@triton.constexpr_function
def chunk_width(fp8_dim, start):
    """Dims of the chunk that begins at ``start``."""
    return min(128, fp8_dim - start) if start < fp8_dim else 64


@gluon.jit
def in_order(x, WIDTH: gl.constexpr):
    """Dims of rows as a product takes them where a thread has a quarter of each ``WIDTH`` of them.

    :data:`DIMS128` and :data:`DIMS64` have quarters of 16.
    """
    BLOCKS: gl.constexpr = x.shape[1] // WIDTH
    x = x.reshape(x.shape[0], BLOCKS, 4, WIDTH // 16, 2, 2).permute(0, 1, 3, 4, 2, 5)
    return x.reshape(x.shape[0], BLOCKS * WIDTH)


@gluon.jit
def decode_e8m0(code):
    """float32 powers of two of int32 e8m0 codes: ``2^(code - 127)``, 255 is NaN."""
    bits = gl.where(code == 0, 0x400000, code << 23)
    bits = gl.where(code == 255, 0x7FC00000, bits)
    return bits.to(gl.float32, bitcast=True)

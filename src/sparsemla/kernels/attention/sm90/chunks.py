"""Chunks of quantised rows on Hopper: their copies, their layouts, their dequantisation.

A row is copied in chunks of up to 128 bytes: 128 e4m3 codes, or 64 dims that the cache keeps as
bfloat16. Shared memory holds a chunk as the cache stores it. A consumer loads the chunk into
registers, dequantises it there, and gets the register layout of an MMA's A operand for free.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# Copies from global memory, 16 bytes per thread: 8 lanes copy 128 bytes of a row, and a thread
# copies the same rows of every chunk. Scales are copied in words of 4 bytes.
COPY_CODES = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
COPY_BF16 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
COPY_SCALES = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
CODES_KEYS = gl.constexpr(gl.SliceLayout(1, COPY_CODES))
BF16_KEYS = gl.constexpr(gl.SliceLayout(1, COPY_BF16))

# Registers of a chunk, keys by dims. A thread holds 4 neighbouring dims of each 16 for two keys,
# as many as it contributes to one k-step of an MMA. When O is stored in this order, four threads
# store 16 adjacent bytes of float32 each.
CHUNK_128 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32], [8, 0], [0, 64]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)
CHUNK_64 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)

# Shared memory of a chunk's codes, 128 or 64 dims wide. The swizzle puts the eight keys that a warp
# reads at once into different banks.
RAW_128 = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
RAW_64 = gl.constexpr(gl.SwizzledSharedLayout(16, 2, 4, [1, 0]))
UNSWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

# Four e4m3 codes times four float32 scales, rounded to bfloat16 once.
DEQUANTIZE = gl.constexpr("""{
    .reg .b16 l, h; .reg .b32 a, b; .reg .f16 a0, a1, b0, b1; .reg .f32 f0, f1, f2, f3;
    mov.b32 {l, h}, $2;
    cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h;
    mov.b32 {a0, a1}, a; mov.b32 {b0, b1}, b;
    cvt.f32.f16 f0, a0; cvt.f32.f16 f1, a1; cvt.f32.f16 f2, b0; cvt.f32.f16 f3, b1;
    mul.f32 f0, f0, $3; mul.f32 f1, f1, $4; mul.f32 f2, f2, $5; mul.f32 f3, f3, $6;
    cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }""")


@triton.constexpr_function
def num_chunks(fp8_dim, head_dim):
    """Number of chunks of a row. The last chunk of e4m3 codes may have 64 dims instead of 128."""
    return -(-fp8_dim // 128) + (head_dim - fp8_dim) // 64


@triton.constexpr_function
def chunk_start(fp8_dim, chunk):
    """First dim of a chunk."""
    quantised = -(-fp8_dim // 128)
    return 128 * chunk if chunk < quantised else fp8_dim + 64 * (chunk - quantised)


@triton.constexpr_function
def chunk_width(fp8_dim, start):
    """Number of dims of the chunk that begins at ``start``."""
    return min(128, fp8_dim - start) if start < fp8_dim else 64


@gluon.jit
def permute_to_operand(x, WIDTH: gl.constexpr):
    """Permute dims to the order of an MMA's A operand.

    A thread holds a neighbouring quarter of each ``WIDTH`` dims (16 in :data:`CHUNK_128` and
    :data:`CHUNK_64`). The MMA takes pairs of dims, 8 apart within each 16. Both operands of
    an MMA are permuted alike, so that its result does not change and no register moves.
    """
    BLOCKS: gl.constexpr = x.shape[1] // WIDTH
    x = x.reshape(x.shape[0], BLOCKS, 4, WIDTH // 16, 2, 2).permute(0, 1, 3, 4, 2, 5)
    return x.reshape(x.shape[0], BLOCKS * WIDTH)


@gluon.jit
def decode_e8m0(code):
    """float32 powers of two from int32 e8m0 codes: ``2^(code - 127)``, and NaN from 255."""
    bits = gl.where(code == 0, 0x400000, code << 23)
    bits = gl.where(code == 255, 0x7FC00000, bits)
    return bits.to(gl.float32, bitcast=True)

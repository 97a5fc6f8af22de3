"""Chunks of quantised rows on Hopper: their parts and dequantisation.

A row is copied in chunks of up to 128 bytes: 128 e4m3 codes, or 64 dims that the cache keeps as
bfloat16. Shared memory holds a chunk as the cache stores it. A consumer loads the chunk into
registers, dequantises it there, and gets the register layout of an MMA's A operand for free.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsemla.kernels.attention.sm90.layouts import CHUNK_DIM, ROPE_DIM

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
    return -(-fp8_dim // CHUNK_DIM.value) + (head_dim - fp8_dim) // ROPE_DIM.value


@triton.constexpr_function
def chunk_start(fp8_dim, chunk):
    """First dim of a chunk."""
    quantised = -(-fp8_dim // CHUNK_DIM.value)
    return (
        CHUNK_DIM.value * chunk
        if chunk < quantised
        else fp8_dim + ROPE_DIM.value * (chunk - quantised)
    )


@triton.constexpr_function
def chunk_width(fp8_dim, start):
    """Number of dims of the chunk that begins at ``start``."""
    return min(CHUNK_DIM.value, fp8_dim - start) if start < fp8_dim else ROPE_DIM.value


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

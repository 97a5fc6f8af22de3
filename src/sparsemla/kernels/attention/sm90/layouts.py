"""Sizes and layouts of the Hopper attention kernels."""

from __future__ import annotations

import triton
from triton.experimental.gluon import language as gl

from sparsemla.kernels.attention.rows import VALUE_DIM
from sparsemla.kernels.common.hopper import COPY

BLOCK_M = gl.constexpr(64)
"""Query rows of a tile."""
BLOCK_N = gl.constexpr(64)
"""Keys of a KV block."""
ROPE_DIM = gl.constexpr(64)
HALF_DIM = gl.constexpr(VALUE_DIM.value // 2)
"""Value dims of half of O, which one warpgroup accumulates."""
ACC_DIM = gl.constexpr(HALF_DIM.value // 2)
"""Columns of an accumulator of O."""
WARPGROUP = gl.constexpr(128)
"""Threads of a warpgroup."""
CHUNK_DIM = gl.constexpr(128)
"""Most codes of a chunk of a quantised row."""
PIECE_DIM = gl.constexpr(128)
"""Dims of an FP8 MMA: of K, or of V^T and O^T, half of a warpgroup's value dims."""
FEW_HEADS_BLOCK_N = gl.constexpr(128)
"""Keys of a KV block of the few-heads kernel over FP8 rows."""
FEW_HEADS_MMA_K = gl.constexpr(16)
"""Keys of its PV MMA: K of one instruction. Consecutive instructions then add to different
accumulators; with the same accumulators, each would wait for the previous one."""

# Vectors in registers: an element a thread, in all warps, or in each warp; a part of a list.
THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
ROWS_IN_WARP = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
LIST = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
# The same in 8 consumer warps.
THREADS_8 = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
LIST_8 = gl.constexpr(gl.BlockedLayout([4], [32], [8], [0]))

# S and O of a tile.
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N.value, 16]))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ACC_DIM.value, 16]))
S_ROWS = gl.constexpr(gl.SliceLayout(1, S_LAYOUT))
S_KEYS = gl.constexpr(gl.SliceLayout(0, S_LAYOUT))
O_ROWS = gl.constexpr(gl.SliceLayout(1, O_LAYOUT))
Q_OPERAND = gl.constexpr(gl.DotOperandLayout(0, S_LAYOUT, 2))

# With FP8 MMAs: S ``[rows, keys]``, O^T ``[dims, rows]``, S of RoPE dims, and left operands.
S8 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N.value, 32]))
S16 = S_LAYOUT
S8_ROWS = gl.constexpr(gl.SliceLayout(1, S8))
S8_COLS = gl.constexpr(gl.SliceLayout(0, S8))
A8 = gl.constexpr(gl.DotOperandLayout(0, S8, 4))
A16 = Q_OPERAND

# Sums of P over the columns that a thread holds.
SUM_PARTS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[8, 0]],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [BLOCK_M.value, 4],
    )
)

# Factors of keys lie in shared memory such that the four threads of a row load 64 adjacent bytes.
FACTORS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1], [2], [16], [32]],
        [[4], [8], [0], [0], [0]],
        [[0], [0]],
        [],
        [BLOCK_N.value],
    )
)

# O of PIECE_DIM dims on its way out: pairs of dims of eight threads are 32 adjacent bytes of
# bfloat16.
STORE_O_T = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [8, 0], [16, 0], [32, 0], [0, 16]],
        [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]],
        [[0, 32], [0, 64]],
        [],
        [BLOCK_M.value, PIECE_DIM.value],
    )
)

# Copies from global memory, 16 bytes per thread: 8 lanes copy 128 bytes of a row, and a thread
# copies the same rows of codes and of bfloat16. Scales are copied in words of 4 bytes.
COPY_ROWS = gl.constexpr(gl.SliceLayout(1, COPY))
COPY_COLS = gl.constexpr(gl.SliceLayout(0, COPY))
COPY_CODES = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
COPY_SCALES = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
CODES_ROWS = gl.constexpr(gl.SliceLayout(1, COPY_CODES))
# A thread finds the row of one key; a warp copies 512 bytes of a row at once, so that few of its
# pieces lie in two cache lines.
COPY_LONG_ROWS = gl.constexpr(gl.BlockedLayout([4, 16], [1, 32], [4, 1], [1, 0]))
COPY_ROPE_CODES = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
# A warp loads whole rows, one of 4 or of 8 warps; RoPE dims of queries two in a word.
LOAD_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
LOAD_ROWS_8 = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))
LOAD_Q_ROPE = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))

# O^T of half of the value dims on its way out of the few-heads kernel, dims by query rows.
OUT_T = gl.constexpr(gl.BlockedLayout([4, 1], [32, 1], [1, 4], [0, 1]))
OUT_T_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [0, 1]))

# Registers of a chunk, keys by dims. A thread holds 4 neighbouring dims of each 16 for two keys,
# as many as it contributes to one k-step of an MMA. When O is stored in this order, four threads
# store 16 adjacent bytes of float32 each.
CHUNK_128 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32], [8, 0], [0, 64]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [BLOCK_N.value, CHUNK_DIM.value],
    )
)
CHUNK_64 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 16], [0, 32], [8, 0]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [BLOCK_N.value, CHUNK_DIM.value // 2],
    )
)

# Shared memory of a chunk's codes, 128 or 64 dims wide. The swizzle puts the eight keys that a warp
# reads at once into different banks.
RAW_128 = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
RAW_64 = gl.constexpr(gl.SwizzledSharedLayout(16, 2, 4, [1, 0]))
RAW_ROPE = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 4, [1, 0]))
UNSWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

# Shared memory of the operands of FP8 MMAs.
CODES_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
P_TILE = gl.constexpr(gl.NVMMASharedLayout(64, 8, 2))


@triton.constexpr_function
def k_layout(width):
    """Codes of a thread as left operand of the QK MMA: a quarter of ``width`` dims of two keys."""
    dims = [[0, 1 << i] for i in range(width.bit_length() - 3)]
    quarter = width // 4
    return gl.DistributedLinearLayout(
        [*dims, [8, 0]],
        [[0, quarter], [0, 2 * quarter], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [64, 0]],
        [],
        [FEW_HEADS_BLOCK_N.value, width],
    )


@triton.constexpr_function
def scale_layout(dim_blocks):
    """Scales of a KV block's values, each key's in the lanes that hold the key's S."""
    return gl.DistributedLinearLayout(
        [*([[0, 4]] if dim_blocks == 8 else []), [8, 0]],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [64, 0]],
        [],
        [FEW_HEADS_BLOCK_N.value, dim_blocks],
    )


@triton.constexpr_function
def v_layout():
    """Codes of a thread for the PV MMA: 8 neighbouring dims of a quarter of the keys."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [0, 4], [8, 0]],
        [[2, 0], [4, 0], [0, 8], [0, 16], [0, 32]],
        [[0, 64], [0, 128], [0, 256]],
        [],
        [FEW_HEADS_MMA_K.value, VALUE_DIM.value],
    )


@triton.constexpr_function
def out_layout(n, itemsize):
    """Results of a thread: 8 neighbouring dims of each of its rows.

    4 of float32: an instruction would write half sectors otherwise.
    """
    rows = [[0, 8 << i] for i in range((n // 8).bit_length() - 1)]
    far, *near = (32, 4, 8, 16) if itemsize == 4 else (4, 8, 16, 32)
    return gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [far, 0], [0, 1], *rows],
        [[0, 2], [0, 4], *([dim, 0] for dim in near)],
        [[64, 0], [128, 0], [256, 0]],
        [],
        [VALUE_DIM.value, n],
    )


@triton.constexpr_function
def p_layout(n):
    """Shared memory of P, ``[keys, n]``."""
    return gl.NVMMASharedLayout(2 * n, 16, 2)

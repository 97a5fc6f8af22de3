"""Sizes and layouts of the Hopper attention kernels."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

from sparsemla.kernels.common.hopper import COPY

BLOCK_M = gl.constexpr(64)
"""Query rows of a tile."""
BLOCK_N = gl.constexpr(64)
"""Keys of a KV block."""
VALUE_DIM = gl.constexpr(512)
"""Dims of a value; the dims of a key behind them are its RoPE dims."""
ROPE_DIM = gl.constexpr(64)
HALF_DIM = gl.constexpr(VALUE_DIM.value // 2)
"""Value dims of half of O, which one warpgroup accumulates."""
ACC_DIM = gl.constexpr(HALF_DIM.value // 2)
"""Columns of an accumulator of O."""
WARPGROUP = gl.constexpr(128)
"""Threads of a warpgroup."""
CHUNK_DIM = gl.constexpr(128)
"""Most codes of a chunk of a quantised row."""

# Vectors in registers: an element a thread, in all warps, or in each warp; a part of a list.
THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
ROWS_IN_WARP = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))
LIST = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))

# S and O of a tile.
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N.value, 16]))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ACC_DIM.value, 16]))
S_ROWS = gl.constexpr(gl.SliceLayout(1, S_LAYOUT))
S_KEYS = gl.constexpr(gl.SliceLayout(0, S_LAYOUT))
O_ROWS = gl.constexpr(gl.SliceLayout(1, O_LAYOUT))

# Copies from global memory, 16 bytes per thread: 8 lanes copy 128 bytes of a row, and a thread
# copies the same rows of codes and of bfloat16. Scales are copied in words of 4 bytes.
COPY_ROWS = gl.constexpr(gl.SliceLayout(1, COPY))
COPY_COLS = gl.constexpr(gl.SliceLayout(0, COPY))
COPY_CODES = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
COPY_SCALES = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
CODES_ROWS = gl.constexpr(gl.SliceLayout(1, COPY_CODES))
# A warp loads whole rows.
LOAD_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))

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
UNSWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))

# Shared memory of vectors.
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))

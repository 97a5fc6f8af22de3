"""Sparse prefill on Hopper with FP8 MMAs, for more than 32 query heads over bfloat16 rows.

Both MMAs multiply e4m3 codes. A launch before the kernel rounds all rows, each with one power of
two; the kernel rounds the queries. A persistent CTA takes one tile of 64 query heads after the
other and walks its keys in pairs of blocks of 64. Of O, 64 x 512 float32, *left* accumulates the
left 256 columns and *right* the right 256. Left computes S and P of the even block of a pair, right
of the odd one; each hands its P to the other through shared memory.

S. The first 512 dims of a query row and of a key are e4m3, RoPE dims bfloat16, divided by the row's
power of two. So one sum is S over the powers of two of its query and its key.

P. With z = S + log2(scale of the key), P = exp2(z - m) is at most 2^LAG and carries the scale of
the key's values. A float16 whose value is divided by 256 has the bits of an e4m3 code in its upper
byte, shifted by one: the conversion is an integer multiply-add. m rises only when z exceeds it by
LAG.

O. FP8 MMAs want both operands along the reduction, but values lie along their dims. So the MMA
computes the transpose, ``O^T += V^T P^T``, with V^T in registers. ``ldmatrix.trans`` loads pairs of
dims as if they were 16-bit numbers, and one byte permutation a register deinterleaves them. The
order of keys in V^T and P^T is the one in which threads hold S, and nothing is exchanged.

Time line of a pair in cycles, 128 heads; S' are the scores of a warpgroup's next block. Right runs
half a period behind left, so that one computes exponentials while the other multiplies:

    cycle     0                          1230            2720                     4360
    left      z and m of even, P_odd V   P0 to right     S' of even, P_even V_l   next pair
    right     S' of odd, P_odd V_r       z and m of odd, P_even V_r    P1 to left   S', ...
    producer  copies a block as soon as both warpgroups have loaded its values

Shared memory is busy for 1870 of the 2180 cycles of a block, the tensor cores for 1150, issue slots
for 960.

Barriers:

    barrier         number      arrivals             waits      guards
    q_full          1           2, left and right    both       the tile's queries
    key_range_full  4 by tile   1, producer          both       number of pairs of blocks
    kv_full         4 by block  128 copies' threads  both       codes, RoPE dims and factors of a
                                                                block
    kv_empty        4 by block  2, both              producer   the stage, for reuse
    m_full          2 by block  1, its QK consumer   the other  m after the block
    p_full          2 by block  1, its QK consumer   the other  P and alpha of the block
    l_full          1           2, both              both       l of both, at a tile's end

P needs no barrier for its reuse: a warpgroup announces its P only after its MMAs with the other's
have finished, and the other waits for it before it stores the next. Behind l_full, the queries of
the tile are not needed.

Shared memory in KiB: queries 32 + 8, codes 4 x 32, RoPE dims 4 x 8, P 2 x 4, factors 3: 211, and 2
of the rest.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsemla.kernels.attention.arguments import SparsePrefill
from sparsemla.kernels.attention.calls import prefill_rows
from sparsemla.kernels.attention.operands import KeyList, Queries, QueryRows, Results
from sparsemla.kernels.attention.rows import LN2, LOG2E, LOWEST, VALUE_DIM, query_dims, rows_of_tile
from sparsemla.kernels.attention.sm90.layouts import (
    A8,
    A16,
    BLOCK_M,
    BLOCK_N,
    CODES_ROWS,
    CODES_TILE,
    COPY_CODES,
    COPY_ROWS,
    FACTORS,
    HALF_DIM,
    LOAD_Q_ROPE,
    LOAD_ROWS,
    P_TILE,
    PIECE_DIM,
    ROPE_DIM,
    ROWS_IN_WARP,
    S8,
    S8_COLS,
    S8_ROWS,
    S16,
    STORE_O_T,
    SUM_PARTS,
    THREADS,
    WARPGROUP,
)
from sparsemla.kernels.attention.sm90.tiles import (
    allocate_barriers,
    end_of_valid_blocks,
    find_key_blocks,
    locate_tile,
    to_f16,
)
from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.gluon import async_load, opaque_zero, reinterpret
from sparsemla.kernels.common.hopper import COPY, PLAIN, TILE

CONSUMERS = gl.constexpr(2)
HALF_M = gl.constexpr(BLOCK_M.value // 2)
"""Query rows that a consumer rounds."""
STAGES = gl.constexpr(4)
"""Blocks in flight, and tiles of which the producer may know the range."""
LAG = gl.constexpr(4.0)
LOG_SHIFT = gl.constexpr(4.0)
"""P = 1 has the float16 2^-LOG_SHIFT and the e4m3 code 2^(8 - LOG_SHIFT). P = 2^LAG has 256, the
largest code whose float16 is the code, shifted."""
SMALLEST_EXPONENT = gl.constexpr(127 - 40)
"""Biased exponent of the smallest scale, 2^-40."""
ROUND_ROWS = gl.constexpr(16)
"""Rows that a program rounds."""
RECORD = gl.constexpr(640)
"""Bytes of a rounded row: 512 codes, 64 RoPE dims in bfloat16."""

# Factors of a key.
SCALE = gl.constexpr(0)
LOG_SCALE = gl.constexpr(1)
INVERSE = gl.constexpr(2)
NUM_FACTORS = gl.constexpr(3)


class RoundedRows(NamedTuple):
    """Rows with e4m3 codes. One more, behind the last, stands for no key."""

    records: Tensor  # uint8 [num_rows + 1, 640]: codes, then RoPE dims over the scale
    factors: Tensor  # float32 [num_rows + 1, 4]: scale, log2(scale), 1 / scale
    num_rows: int


class SharedMemory(NamedTuple):
    """Shared memory of a CTA. ``m``, ``p`` and ``alpha`` are by the parity of a block."""

    q: object  # [1, BLOCK_M, VALUE_DIM] e4m3; left and right -> both
    q_rope: object  # [BLOCK_M, ROPE_DIM] bfloat16; left and right -> both
    q_scale: object  # [2, HALF_M] float32; left and right -> both
    kv: object  # [STAGES, BLOCK_N, VALUE_DIM] e4m3 codes of blocks; producer -> both
    k_rope: object  # [STAGES, BLOCK_N, ROPE_DIM] bfloat16; producer -> its QK consumer
    factors: object  # 3 of [STAGES, BLOCK_N] float32, of keys; producer -> its QK consumer
    p: object  # [2, BLOCK_M, BLOCK_N] e4m3; its QK consumer -> both
    alpha: object  # [2, BLOCK_M] float32, factors that rescale O; the same
    m: object  # 2 of [BLOCK_M] float32, m after a block; its QK consumer -> the other
    l: object  # [2, BLOCK_M] float32, row sums of each warpgroup's blocks, at the end of a tile
    key_range: object  # [4, 1] by tile: number of pairs of blocks; producer -> both
    q_full: object  # this and the following fields are arrays of barriers
    key_range_full: object
    kv_full: object
    kv_empty: object
    m_full: object
    p_full: object
    l_full: object


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def to_e4m3(p):
    """e4m3 codes of ``256 * p``, halves rounded up; p is not negative."""
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 a, b;
            mad.lo.u32 a, $1, 2, 0x00800080; mad.lo.u32 b, $2, 2, 0x00800080;
            prmt.b32 $0, a, b, 0x7531;
        }""",
        "=r,r,r",
        [p],
        dtype=gl.uint8,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def deinterleave(low, high):
    """Codes of one dim each, from pairs of dims of the lower and the upper eight of 16 keys.

    Elements are ``[warp, half of 16 pairs, pair, 16 keys, quarter, key]``. The results are the
    first and second dim of pairs of the first half, then of the second half. In place of the half,
    a result's second axis tells the lower eight keys from the upper.
    """
    return gl.inline_asm_elementwise(
        """{
            prmt.b32 $0, $4, $6, 0x6420; prmt.b32 $1, $4, $6, 0x7531;
            prmt.b32 $2, $5, $7, 0x6420; prmt.b32 $3, $5, $7, 0x7531;
        }""",
        "=r,=r,=r,=r,r,r,r,r",
        [low, high],
        dtype=(gl.uint8, gl.uint8, gl.uint8, gl.uint8),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def load_values(smem, stage, PIECE: gl.constexpr):
    """V^T of a piece of ``PIECE_DIM`` dims, as an A operand ``[PIECE_DIM, BLOCK_N]``.

    Row ``64 h + 16 w + 8 d + g`` is dim ``32 w + 16 h + 2 g + d``.
    """
    pairs = reinterpret(smem.kv, gl.int16, [STAGES, BLOCK_N, VALUE_DIM // 2], TILE)
    x = (
        pairs.index(stage)
        .slice(PIECE * (PIECE_DIM // 2), PIECE_DIM // 2, dim=1)
        .permute((1, 0))
        .load(A16)
    )
    x = x.reshape(4, 2, 8, 4, 2, 4, 2).permute(0, 1, 2, 3, 5, 6, 4)
    low, high = gl.split(x)
    a, b, c, d = deinterleave(low, high)
    x = gl.join(gl.join(a, b), gl.join(c, d))  # w, 8 keys, g, 16 keys, quarter, key, d, h
    x = x.permute(7, 0, 6, 2, 3, 4, 1, 5).reshape(PIECE_DIM, BLOCK_N)
    return gl.convert_layout(x, A8).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def factor_order(x):
    """Keys in the order of :data:`FACTORS`."""
    return x.reshape(4, 2, 4, 2).permute(0, 2, 1, 3).reshape(BLOCK_N)


@gluon.jit
def load_factor(smem, stage, FACTOR: gl.constexpr):
    """A factor of a block's keys, as a row."""
    x = smem.factors[FACTOR].index(stage).load(FACTORS)
    x = x.reshape(4, 4, 2, 2).permute(0, 2, 1, 3).reshape(BLOCK_N)
    return gl.convert_layout(x, S8_COLS)[None, :]


@gluon.jit
def qk_mmas(s, smem, zero, stage):
    """Issue S = Q K^T of the dims that have codes."""
    for c in gl.static_range(VALUE_DIM // PIECE_DIM):
        q = smem.q.index(zero).slice(c * PIECE_DIM, PIECE_DIM, dim=1)
        k = smem.kv.index(stage).slice(c * PIECE_DIM, PIECE_DIM, dim=1).permute((1, 0))
        s = warpgroup_mma(q, k, s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def qk_rope_mma(s, smem, stage):
    """Issue S += Q K^T of the RoPE dims."""
    k = smem.k_rope.index(stage).permute((1, 0))
    return warpgroup_mma(smem.q_rope, k, gl.convert_layout(s, S16), is_async=True)


@gluon.jit
def first_qk(smem, zero, stage):
    """S of a tile's first block."""
    s = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S8)
    s = warpgroup_mma_wait(0, deps=[qk_mmas(s, smem, zero, stage)])
    s = warpgroup_mma_wait(0, deps=[qk_rope_mma(s, smem, stage)])
    return gl.convert_layout(s, S8)


@gluon.jit
def split_rows(x):
    """Rows whose number has bit 3 clear, and the others, as ``[4, 8, BLOCK_N]``."""
    return gl.split(x.reshape(4, 2, 8, BLOCK_N).permute(0, 2, 3, 1))


@gluon.jit
def store_p(smem, p, PARITY: gl.constexpr):
    """Store P, keys in the order in which threads hold them."""
    p_0, p_1 = split_rows(p)
    x = gl.join(to_e4m3(p_0), to_e4m3(p_1)).permute(0, 3, 1, 2)
    x = x.reshape(BLOCK_M, 2, 2, 2, 4, 2).permute(0, 1, 2, 4, 3, 5).reshape(BLOCK_M, BLOCK_N)
    reinterpret(smem.p.index(PARITY), gl.uint8, [BLOCK_M, BLOCK_N], P_TILE).store(x)


@gluon.jit
def rises(smem, PARITY: gl.constexpr):
    """Whether a block changes the factor of any row."""
    return gl.max((smem.alpha.index(PARITY).load(ROWS_IN_WARP) != 1.0).to(gl.int32), 0) != 0


@gluon.jit
def rescale(acc_a, acc_b, some, smem, PARITY: gl.constexpr):
    """O over m after a block instead of before it."""
    if some:
        alpha = smem.alpha.index(PARITY).load(S8_COLS)[None, :]
        acc_a *= alpha
        acc_b *= alpha
    return acc_a, acc_b


@gluon.jit
def pv_mma(acc, values, smem, zero, use_acc, PARITY: gl.constexpr):
    """Issue O^T += V^T P^T of a piece of ``PIECE_DIM`` dims."""
    p = smem.p.index(PARITY + zero).permute((1, 0))
    return warpgroup_mma(values, p, acc, use_acc=use_acc, is_async=True)


@gluon.jit
def scale_of(bits):
    """A row's power of two, and its inverse, from the bits of its largest magnitude.

    The power is the smallest by which the magnitude is at most 448, and NaN for NaN and infinity.
    """
    # The mantissa of 448 is 0x600000: larger ones need the next power of two.
    exponent = gl.maximum(((bits + 0x1FFFFF) >> 23) - 8, SMALLEST_EXPONENT)
    scale = (exponent << 23).to(gl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    return gl.where(bits < 0x7F800000, scale, float("nan")), inverse


@gluon.jit
def _round_rows(rows, row_stride, rounded):
    """Round ``ROUND_ROWS`` rows. The row behind the last gets zeros and a P of 0."""
    first = gl.program_id(0).to(gl.int64) * ROUND_ROWS
    row = first + gl.arange(0, ROUND_ROWS, gl.SliceLayout(1, LOAD_ROWS))
    real, stored = row < rounded.num_rows, row <= rounded.num_rows
    dims = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, LOAD_ROWS))[None, :]
    x = gl.load(rows + (row * row_stride)[:, None] + dims, mask=real[:, None], other=0.0)
    magnitudes = x.to(gl.int16, bitcast=True) & 0x7FFF
    scale, inverse = scale_of(gl.max(magnitudes, 1).to(gl.int32) << 16)
    codes = (x.to(gl.float32) * inverse[:, None]).to(gl.float8e4nv).to(gl.uint8, bitcast=True)
    records = rounded.records + (row * RECORD)[:, None]
    gl.store(records + dims, codes, mask=stored[:, None])
    factors = rounded.factors + row * 4
    gl.store(factors + SCALE, scale, mask=stored)
    gl.store(factors + LOG_SCALE, gl.where(real, gl.log2(scale), float("-inf")), mask=stored)
    gl.store(factors + INVERSE, inverse, mask=stored)

    row = gl.convert_layout(row, gl.SliceLayout(1, COPY))
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, COPY))[:, None]
    real, stored = (row < rounded.num_rows)[:, None], (row <= rounded.num_rows)[:, None]
    dims = gl.arange(0, ROPE_DIM, gl.SliceLayout(0, COPY))[None, :]
    x = gl.load(rows + (row * row_stride)[:, None] + VALUE_DIM + dims, mask=real, other=0.0)
    tails = rounded.records.to(gl.pointer_type(gl.bfloat16), bitcast=True)
    tails += (row * (RECORD // 2) + VALUE_DIM // 2)[:, None] + dims
    gl.store(tails, (x.to(gl.float32) * inverse).to(gl.bfloat16), mask=stored)


@gluon.jit
def load_query_words(
    tile, queries, shape,
    START: gl.constexpr, DIM: gl.constexpr, HALF: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load dims ``START .. START + DIM`` of a half of a tile's query rows, two in a register."""
    begin, _, request, token = locate_tile(tile, shape)
    row = begin + HALF_M * HALF + gl.arange(0, HALF_M, gl.SliceLayout(1, LAYOUT))
    row = gl.minimum(row, shape.num_rows - 1)  # rows behind the last are not stored
    q, request_stride, token_stride, head_stride = query_dims(queries, START)
    q += request * request_stride + token * token_stride
    words = q.to(gl.pointer_type(gl.int32), bitcast=True)
    dims = gl.arange(0, DIM // 2, gl.SliceLayout(0, LAYOUT))
    return gl.load(words + (row.to(gl.int64) * (head_stride // 2))[:, None] + dims[None, :])


@gluon.jit
def load_queries(tile, num_tiles, queries, shape, HALF: gl.constexpr):
    """Load a half of a tile's query rows: the dims to be rounded, and the RoPE dims."""
    tile = gl.minimum(tile, num_tiles - 1)
    x = load_query_words(tile, queries, shape, 0, VALUE_DIM, HALF, LOAD_ROWS)
    return x, load_query_words(tile, queries, shape, VALUE_DIM, ROPE_DIM, HALF, LOAD_Q_ROPE)


@gluon.jit
def unpack(words):
    """float32 numbers of both halves of words of two bfloat16."""
    low = (words << 16).to(gl.float32, bitcast=True)
    return low, (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def larger_halves(words, LENGTH: gl.constexpr):
    """The larger of each half of neighbouring words ``[HALF_M, LENGTH]``, without signs."""
    first, second = gl.split(words.reshape(HALF_M, LENGTH // 2, 2))
    return gl.inline_asm_elementwise(
        "max.u16x2 $0, $1, $2;", "=r,r,r", [first, second], dtype=gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def store_queries(words, rope, smem, HALF: gl.constexpr):
    """Round a half of a tile's query rows, and store them with their scales."""
    pairs = larger_halves(words & 0x7FFF7FFF, VALUE_DIM // 2)
    pairs = larger_halves(larger_halves(pairs, VALUE_DIM // 4), VALUE_DIM // 8)
    bits = gl.max(gl.maximum(pairs << 16, pairs & 0x7FFF0000), 1)
    scale, inverse = scale_of(
        gl.convert_layout(bits, gl.SliceLayout(1, LOAD_ROWS))
    )  # moves nothing
    smem.q_scale.index(HALF).store(scale)
    low, high = unpack(words)
    x = gl.join(low * inverse[:, None], high * inverse[:, None]).reshape(HALF_M, VALUE_DIM)
    smem.q.index(0).slice(HALF_M * HALF, HALF_M, dim=0).store(x.to(gl.float8e4nv))
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, LOAD_Q_ROPE))[:, None]  # moves nothing
    low, high = unpack(rope)
    x = gl.join(low * inverse, high * inverse).reshape(HALF_M, ROPE_DIM)
    smem.q_rope.slice(HALF_M * HALF, HALF_M, dim=0).store(x.to(gl.bfloat16))


@gluon.jit
def load_key_range(smem, tile_iter):
    """The number of pairs of blocks of a tile, from the producer."""
    at = tile_iter % STAGES
    mbarrier.wait(smem.key_range_full.index(at), tile_iter // STAGES & 1)
    return gl.max(smem.key_range.index(at).load(THREADS), 0)


@gluon.jit
def consumer(num_tiles, queries, shape, results, smem, scale_log2, HALF: gl.constexpr):
    """Left (HALF 0) or right: S and P of every other block, and a half of O."""
    A: gl.constexpr = 2 * HALF
    B: gl.constexpr = 2 * HALF + 1
    OTHER: gl.constexpr = 1 - HALF
    step = HALF  # of this warpgroup's block of the pair
    first = gl.program_id(0)
    q, q_rope = load_queries(first, num_tiles, queries, shape, HALF)
    for tile in range(first, num_tiles, gl.num_programs(0)):
        tile_iter = tile // gl.num_programs(0)
        store_queries(q, q_rope, smem, HALF)
        fence_async_shared()
        mbarrier.arrive(smem.q_full.index(0), count=1)
        mbarrier.wait(smem.q_full.index(0), tile_iter & 1)
        factor = reinterpret(smem.q_scale, gl.float32, [BLOCK_M], PLAIN).load(S8_ROWS) * scale_log2
        num_pairs = load_key_range(smem, tile_iter)
        zero = opaque_zero(tile)
        mbarrier.wait(smem.kv_full.index(step % STAGES), step // STAGES & 1)
        s = first_qk(smem, zero, step % STAGES)
        acc_a = gl.zeros([PIECE_DIM, BLOCK_M], gl.float32, S8)
        acc_b = gl.zeros([PIECE_DIM, BLOCK_M], gl.float32, S8)
        m = gl.full([BLOCK_M], LOWEST, gl.float32, S8_ROWS)
        l = gl.zeros([BLOCK_M, 4], gl.float32, SUM_PARTS)
        for i in range(num_pairs):
            zero = opaque_zero(i)
            phase = step // 2 & 1
            stage = step % STAGES
            z = s * (factor[:, None] * load_factor(smem, stage, SCALE))
            z = z + load_factor(smem, stage, LOG_SCALE)
            top = gl.max(z, 1)
            before = m
            if HALF == 1:
                mbarrier.wait(smem.m_full.index(0), phase)
                before = smem.m[0].load(S8_ROWS)
            elif i > 0:
                mbarrier.wait(smem.m_full.index(1), phase ^ 1)
                before = smem.m[1].load(S8_ROWS)
            m_new = gl.where(top > before + LAG, top, before)
            smem.m[HALF].store(m_new)
            mbarrier.arrive(smem.m_full.index(HALF), count=1)
            alpha = exp2(before - m_new)

            # P V of the other's block under the exponentials. Left has none before its first
            # block: what these MMAs leave is overwritten.
            last = (step + STAGES - 1) % STAGES
            values = load_values(smem, last, A)
            if HALF == 1:
                mbarrier.wait(smem.p_full.index(0), phase)
            elif i > 0:
                mbarrier.wait(smem.p_full.index(1), phase ^ 1)
            some = rises(smem, OTHER)
            acc_a, acc_b = rescale(acc_a, acc_b, some, smem, OTHER)
            more = True if HALF == 0 else i > 0
            acc_a = pv_mma(acc_a, values, smem, zero, more, OTHER)
            values = load_values(smem, last, B)
            acc_b = pv_mma(acc_b, values, smem, zero, more, OTHER)

            drop = gl.convert_layout(exp2(m - m_new), gl.SliceLayout(1, SUM_PARTS))
            m = m_new
            p = exp2(z - (m + LOG_SHIFT)[:, None])
            parts = (p * load_factor(smem, stage, INVERSE)).reshape(BLOCK_M, BLOCK_N // 8, 4, 2)
            parts = gl.convert_layout(gl.sum(gl.sum(parts, 3), 1), SUM_PARTS)  # moves nothing
            l = l * drop[:, None] + parts
            smem.alpha.index(HALF).store(alpha)
            store_p(smem, to_f16(p), HALF)
            # Once P is announced, the other's next P may overwrite the one that these MMAs read.
            acc_a, acc_b = warpgroup_mma_wait(0, deps=[acc_a, acc_b])
            fence_async_shared()
            mbarrier.arrive(smem.p_full.index(HALF), count=1)
            if HALF == 1 or i > 0:
                mbarrier.arrive(smem.kv_empty.index(last), count=1)

            # P V of this block under the next S. After the last pair, these MMAs read stale
            # keys and nothing reads S.
            ahead = (step + 2) % STAGES
            if i + 1 < num_pairs:
                mbarrier.wait(smem.kv_full.index(ahead), (step + 2) // STAGES & 1)
            s = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S8)
            more = True if HALF == 1 else i > 0
            s = qk_mmas(s, smem, zero, ahead)
            some = rises(smem, HALF)
            acc_a, acc_b = rescale(acc_a, acc_b, some, smem, HALF)
            values_a = load_values(smem, stage, A)
            values_b = load_values(smem, stage, B)
            s = warpgroup_mma_wait(0, deps=[s])
            s = qk_rope_mma(s, smem, ahead)
            acc_a = pv_mma(acc_a, values_a, smem, zero, more, HALF)
            acc_b = pv_mma(acc_b, values_b, smem, zero, more, HALF)
            mbarrier.arrive(smem.kv_empty.index(stage), count=1)
            s, acc_a, acc_b = warpgroup_mma_wait(0, deps=[s, acc_a, acc_b])
            s = gl.convert_layout(s, S8)
            step += 2
        if HALF == 0:
            # P V of the last odd block.
            last = (step + STAGES - 1) % STAGES
            mbarrier.wait(smem.p_full.index(1), (step // 2 & 1) ^ 1)
            some = rises(smem, OTHER)
            acc_a, acc_b = rescale(acc_a, acc_b, some, smem, OTHER)
            values = load_values(smem, last, A)
            acc_a = pv_mma(acc_a, values, smem, zero, True, OTHER)
            values = load_values(smem, last, B)
            acc_b = pv_mma(acc_b, values, smem, zero, True, OTHER)
            mbarrier.arrive(smem.kv_empty.index(last), count=1)
            acc_a, acc_b = warpgroup_mma_wait(0, deps=[acc_a, acc_b])
            mbarrier.wait(smem.m_full.index(1), (step // 2 & 1) ^ 1)
            after = smem.m[1].load(S8_ROWS)
            l = l * gl.convert_layout(exp2(m - after), gl.SliceLayout(1, SUM_PARTS))[:, None]
            m = after
        inv_l, out, begin = store_sums(tile, tile_iter, m, gl.sum(l, 1), results, shape, smem, HALF)
        store_columns(acc_a, inv_l, out, begin, results, shape)
        # The next queries arrive while the second part of O is stored.
        q, q_rope = load_queries(tile + gl.num_programs(0), num_tiles, queries, shape, HALF)
        store_columns(acc_b, inv_l, out + PIECE_DIM, begin, results, shape)


@gluon.jit
def store_sums(tile, tile_iter, m, l, results, shape, smem, HALF: gl.constexpr):
    """Exchange the sums of P; left stores lse. Returns what O is multiplied by, and its place."""
    smem.l.index(HALF).store(l)
    mbarrier.arrive(smem.l_full.index(0), count=1)
    mbarrier.wait(smem.l_full.index(0), tile_iter & 1)
    begin, _, request, token = locate_tile(tile, shape)
    if HALF == 0:
        l += smem.l.index(1).load(gl.SliceLayout(1, SUM_PARTS))
        l = gl.convert_layout(l, S8_ROWS)
        _, head, real = rows_of_tile(begin, shape, BLOCK_M, S8_ROWS, False)
        at = results.lse + request * results.lse_request + token * results.lse_token + head
        gl.store(at, (m + LOG_SHIFT + gl.log2(l)) * LN2, mask=real)  # log2(0) is -inf
    l = smem.l.index(0).load(S8_COLS) + smem.l.index(1).load(S8_COLS)
    empty = l == 0
    if results.attn_sink is not None:
        _, head, real = rows_of_tile(begin, shape, BLOCK_M, S8_COLS, False)
        sink = gl.load(results.attn_sink + head, mask=real, other=0.0)
        l += gl.exp2(sink * LOG2E - LOG_SHIFT - smem.m[1].load(S8_COLS))
    inv_l = gl.where(empty, 0.0, (1.0 / 256) * reciprocal(l))
    out = results.out + request * results.out_request + token * results.out_token
    return inv_l, out + HALF * HALF_DIM, begin


@gluon.jit
def store_columns(acc, inv_l, out, begin, results, shape):
    """Store columns of O, from the rows of O^T in the order of :func:`load_values`."""
    x = (acc * inv_l[None, :]).to(results.out.dtype.element_ty)
    x = x.reshape(2, 4, 2, 8, BLOCK_M).permute(4, 1, 0, 3, 2).reshape(BLOCK_M, PIECE_DIM)
    x = gl.convert_layout(x, STORE_O_T)  # moves nothing
    _, head, real = rows_of_tile(begin, shape, BLOCK_M, gl.SliceLayout(1, STORE_O_T), False)
    dims = gl.arange(0, PIECE_DIM, gl.SliceLayout(0, STORE_O_T))
    at = out + (head * results.out_head)[:, None] + dims[None, :]
    gl.store(at, x, mask=real[:, None])


@gluon.jit
def load_list(blocks, block):
    """Load the list of a block of keys; -1 past its end."""
    at = block * BLOCK_N + gl.arange(0, BLOCK_N, THREADS)
    return gl.load(blocks.main_keys + at, mask=at < blocks.main_end, other=-1)


@gluon.jit
def row_or_none(slots, main, rows):
    """The row behind the last one stands for an invalid slot."""
    slots = slots.to(gl.int64)
    return gl.where((slots >= 0) & (slots < main.num_slots), slots, rows.num_rows).to(gl.int32)


@gluon.jit
def copy_block(step, slots, main, rows, smem):
    """Copy a block of keys once its stage is empty."""
    stage = step % STAGES
    chosen = row_or_none(slots, main, rows)
    factors = rows.factors + gl.convert_layout(factor_order(chosen), THREADS).to(gl.int64) * 4
    codes = rows.records + gl.convert_layout(chosen, CODES_ROWS).to(gl.int64) * RECORD
    tail = gl.convert_layout(codes, COPY_ROWS).to(gl.pointer_type(gl.bfloat16), bitcast=True)
    dims = gl.arange(0, VALUE_DIM, gl.SliceLayout(0, COPY_CODES))
    rope = VALUE_DIM // 2 + gl.arange(0, ROPE_DIM, gl.SliceLayout(0, COPY))
    mbarrier.wait(smem.kv_empty.index(stage), step // STAGES & 1 ^ 1)
    to = reinterpret(smem.kv.index(stage), gl.uint8, [BLOCK_N, VALUE_DIM], CODES_TILE)
    async_load(to, codes[:, None] + dims[None, :])
    async_load(smem.k_rope.index(stage), tail[:, None] + rope[None, :])
    for factor in gl.static_range(NUM_FACTORS):
        async_load(smem.factors[factor].index(stage), factors + factor)
    async_copy.mbarrier_arrive(smem.kv_full.index(stage), increment_count=False)


@gluon.jit
def announce_pairs(tile, blocks, main, smem):
    """Tell the consumers how many pairs of blocks have keys. Returns the number of blocks."""
    last = end_of_valid_blocks(blocks, main, None, None, False)
    num_blocks = gl.maximum(gl.cdiv(last - blocks.first, 2), 1) * 2
    at = tile // gl.num_programs(0) % STAGES
    smem.key_range.index(at).store(gl.zeros([1], gl.int32, THREADS) + num_blocks // 2)
    mbarrier.arrive(smem.key_range_full.index(at), count=1)
    return num_blocks


@gluon.jit
def producer(num_tiles, rows, main, shape, smem):
    """The producer warpgroup: it copies keys. Lists are loaded two blocks ahead."""
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        blocks = find_key_blocks(tile, main, None, shape, None, None, False)
        block = blocks.first
        slots = load_list(blocks, block)
        next_slots = load_list(blocks, block + 1)
        # The end of the valid slots is found during the copy of the first pair.
        num_blocks = 2
        i = 0
        while i < num_blocks:
            later_slots = load_list(blocks, block + 2)
            copy_block(step, slots, main, rows, smem)
            if i == 1:
                num_blocks = announce_pairs(tile, blocks, main, smem)
            i += 1
            block += 1
            step += 1
            slots = next_slots
            next_slots = later_slots


@gluon.jit
def tensors_of(NUM: gl.constexpr, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
    """Tensors in shared memory: the compiler puts a barrier between two stores to the same one."""
    tensors = ()
    for _ in gl.static_range(NUM):
        tensors = tensors + (gl.allocate_shared_memory(DTYPE, SHAPE, LAYOUT),)
    return tensors


@gluon.jit
def allocate():
    """Shared memory and barriers of a CTA."""
    smem = SharedMemory(
        q=gl.allocate_shared_memory(gl.float8e4nv, [1, BLOCK_M, VALUE_DIM], CODES_TILE),
        q_rope=gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, ROPE_DIM], TILE),
        q_scale=gl.allocate_shared_memory(gl.float32, [CONSUMERS, HALF_M], PLAIN),
        kv=gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, VALUE_DIM], CODES_TILE),
        k_rope=gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, ROPE_DIM], TILE),
        factors=tensors_of(NUM_FACTORS, gl.float32, [STAGES, BLOCK_N], PLAIN),
        p=gl.allocate_shared_memory(gl.float8e4nv, [CONSUMERS, BLOCK_M, BLOCK_N], P_TILE),
        alpha=gl.allocate_shared_memory(gl.float32, [CONSUMERS, BLOCK_M], PLAIN),
        m=tensors_of(CONSUMERS, gl.float32, [BLOCK_M], PLAIN),
        l=gl.allocate_shared_memory(gl.float32, [CONSUMERS, BLOCK_M], PLAIN),
        key_range=gl.allocate_shared_memory(gl.int32, [STAGES, 1], PLAIN),
        kv_full=allocate_barriers(STAGES, WARPGROUP),
        kv_empty=allocate_barriers(STAGES, CONSUMERS),
        key_range_full=allocate_barriers(STAGES, 1),
        m_full=allocate_barriers(CONSUMERS, 1),
        p_full=allocate_barriers(CONSUMERS, 1),
        q_full=allocate_barriers(1, CONSUMERS),
        l_full=allocate_barriers(1, CONSUMERS),
    )
    fence_async_shared()
    return smem


@gluon.jit
def _attend_rounded(num_tiles, queries, rows, main, results, shape, scale_log2):
    """Attention of tiles of 64 heads of a token over its list of rounded rows.

    A request is a token here, as :func:`.arguments.prefill_rows` numbers them: one group of rows.
    """
    smem = allocate()
    gdc_launch_dependents()
    gdc_wait()  # the prologue above reads nothing that an earlier kernel writes
    gl.warp_specialize(
        [
            (consumer, (num_tiles, queries, shape, results, smem, scale_log2, 0)),
            (consumer, (num_tiles, queries, shape, results, smem, scale_log2, 1)),
            (producer, (num_tiles, rows, main, shape, smem)),
        ],
        [4, 4],
        [232, 40],
    )


def round_rows(rows: Tensor) -> RoundedRows:
    """Launch the rounding of ``rows [S, 576]``, bfloat16."""
    num_rows = len(rows)
    records = rows.new_empty(num_rows + 1, RECORD.value, dtype=torch.uint8)
    factors = rows.new_empty(num_rows + 1, 4, dtype=torch.float32)
    rounded = RoundedRows(records, factors, num_rows)
    _round_rows[(num_rows // ROUND_ROWS.value + 1,)](rows, rows.stride(0), rounded, num_warps=4)
    return rounded


def launch(
    queries: Queries,
    rows: RoundedRows,
    stream: KeyList,
    results: Results,
    shape: QueryRows,
    softmax_scale: float,
    *,
    num_groups: int,
) -> None:
    """Launch over the heads of ``num_groups`` tokens, each a request, and the rows they select."""
    num_tiles = num_groups * -(-shape.num_rows // BLOCK_M.value)
    _attend_rounded[(min(num_tiles, num_multiprocessors(queries.q.device)),)](
        num_tiles,
        queries,
        rows,
        stream,
        results,
        shape,
        softmax_scale * LOG2E.value,
        num_warps=4,
        launch_pdl=True,
    )


def sparse_prefill(call: SparsePrefill) -> None:
    num_tokens, num_heads = call.q.shape[:2]
    if num_tokens == 0:
        return
    queries, cache, keys, results = prefill_rows(call)
    launch(
        queries,
        round_rows(cache.data[:, 0]),
        keys,
        results,
        QueryRows(num_heads, num_heads, 1, 1),
        call.softmax_scale,
        num_groups=num_tokens,
    )

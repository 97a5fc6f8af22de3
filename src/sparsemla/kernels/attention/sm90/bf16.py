"""Attention on Hopper over bfloat16 rows, for 64 query rows that share their keys.

Sparse and dense attention, prefill and decode all use the schedule of FlashMLA's dense decode: a
persistent CTA of two consumer warpgroups and a producer warpgroup. O has 64 x 512 float32, which is
more than the registers of one warpgroup, so *left* accumulates its left 256 columns and *right* its
right 256. Keys come in pairs of blocks of 64: left computes S and P of the even block, right
computes S and P of the odd block, and each hands its P to the other through shared memory. While
one warpgroup runs its softmax, the other one's MMAs keep the tensor cores busy. m passes from left
to right within a pair and back, so each block costs one rescale per half of O.

Time line of a pair (even block 0, odd block 1; O_l, V_l and O_r, V_r are halves of O and V):

    producer   copy 0l, copy 1r, copy 0r, copy 1l, each half once it is empty
    left       m0, P0 | O_l += P0 V0_l | P0 to m1, O_l += P1 V1_l | S0 of the next pair
    right      S1 | wait m0; m1, P1 | O_r += P1 V1_r | O_r += P0 V0_r
    handed     m0 and P0 from left to right, m1 and P1 from right to left

Barriers; left and right are the halves of a block's 512 value dims:

    barrier         number      arrivals             waits        guards
    kv_left_full    2 by block  128 copies' threads  both         half of a block
    kv_right_full   2 by block  128 copies' threads  both         the other half
    kv_left_empty   2 by block  1, left              producer     the half, for reuse
    kv_right_empty  2 by block  1, right             producer     the half, for reuse
    valid_full      2 by block  1, producer          left; right  validity of a block's keys
    m_full          2 by block  1, left; right       right; left  m after the block
    p_full          2 by block  1, left; right       right; left  P, stored over the keys' RoPE dims
    l_full          1           2, both              both         l of both, at the end of a tile
    q_full          1           128 copies' threads  both         the tile's queries
    q_empty         1           2, both              producer     its reuse after the last QK MMA
    key_range_full  1           1, producer          both         number of pairs, first key

The RoPE dims of a block arrive with the half that its QK MMA reads last.

Shared memory in KiB: queries 64 + 8, two blocks of keys 2 x (64 + 8), 8 that transpose O on its
way out: 226 in all. P takes the place of the last 64 dims of its block's keys, which only the
warpgroup that computed it reads. Blocks within a page come by TMA, others row by row. Blocks of a
second stream follow those of the first; only the producer distinguishes them.

Tokens that share a list form one group, as in dense attention. With a token mask, a key's validity
is a bit for each of them, and the softmax tests the bit of the row's token. An invalid key has no
bit set, and its row is not read.
"""

from __future__ import annotations

from typing import NamedTuple

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

from sparsemla.cache import PagedCache
from sparsemla.kernels.attention import calls
from sparsemla.kernels.attention.arguments import (
    DenseDecode,
    SparseAttention,
    SparseDecode,
    SparsePrefill,
)
from sparsemla.kernels.attention.operands import KeyList, Queries, QueryRows, Results
from sparsemla.kernels.attention.rows import (
    LN2,
    LOG2E,
    LOWEST,
    VALUE_DIM,
    locate,
    query_dims,
    rows_of_tile,
)
from sparsemla.kernels.attention.sm90.layouts import (
    ACC_DIM,
    BLOCK_M,
    BLOCK_N,
    COPY_COLS,
    COPY_ROWS,
    HALF_DIM,
    O_LAYOUT,
    O_ROWS,
    ROPE_DIM,
    S_KEYS,
    S_LAYOUT,
    S_ROWS,
    THREADS,
    WARPGROUP,
)
from sparsemla.kernels.attention.sm90.tiles import (
    allocate_barriers,
    end_of_valid_blocks,
    end_of_valid_slots,
    find_key_blocks,
    load_block_slots,
    locate_tile,
    store_key_limits,
    to_bf16,
)
from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.gluon import (
    async_load,
    descriptor,
    opaque_zero,
    reinterpret,
    tma_load,
)
from sparsemla.kernels.common.hopper import PLAIN, STORE, TILE
from sparsemla.kernels.common.hopper import TOKEN_TILE as PAGE_TILE
from sparsemla.kernels.common.paged import cache_arguments

PAIR_N = gl.constexpr(2 * BLOCK_N.value)
"""Keys of a pair of blocks."""
BOX_DIM = gl.constexpr(64)
"""Dims of a TMA copy, the 128 bytes that the layout of shared memory swizzles."""
BOXES = gl.constexpr(HALF_DIM.value // BOX_DIM.value)


class SharedMemory(NamedTuple):
    """Block ``b`` of a pair, 0 or 1, is the first index of keys and of ``valid``."""

    q: object  # [2, BLOCK_M, HALF_DIM] left and right half of the queries
    q_rope: object  # [BLOCK_M, ROPE_DIM] of the queries
    kv_left: object  # [2, BLOCK_N, HALF_DIM] left half of the keys, which are the values too
    kv_right: object  # [2, BLOCK_N, HALF_DIM] right half
    k_rope: object  # [2, BLOCK_N, ROPE_DIM] of the keys, then P of the block
    m: object  # [BLOCK_M] the running maximum on its way between the warpgroups
    l: object  # [2, BLOCK_M] each warpgroup's sum of P, at the end of a tile
    valid: object  # [2, BLOCK_N] validity of the keys, or their bits
    limits: object  # [BLOCK_M] keys that a row sees under a causal mask, or its bit in the mask
    key_range: object  # [2, 1] pairs of blocks, first key
    kv_left_full: object  # this and the following fields are arrays of barriers
    kv_right_full: object
    kv_left_empty: object
    kv_right_empty: object
    valid_full: object
    m_full: object
    p_full: object
    l_full: object
    q_full: object
    q_empty: object
    key_range_full: object


@gluon.jit
def copy_queries(tile, to, queries, shape, START: gl.constexpr, DIM: gl.constexpr):
    """Start to copy dims ``START .. START + DIM`` of the rows of a tile.

    Strides count 8 elements, which tells the compiler that the copies are aligned.
    """
    begin, _, request, first = locate_tile(tile, shape)
    token, head, real = rows_of_tile(begin, shape, BLOCK_M, COPY_ROWS)
    q, request_stride, token_stride, head_stride = query_dims(queries, START)
    rows = 8 * (request * request_stride + (first + token) * token_stride + head * head_stride)
    dims = gl.arange(0, DIM, COPY_COLS)
    async_load(to, q + rows[:, None] + dims[None, :], mask=real[:, None])


@gluon.jit
def load_key_range(smem, tile_phase):
    """The number of pairs of blocks, and the position of the first key, from the producer."""
    mbarrier.wait(smem.key_range_full.index(0), tile_phase)
    num_pairs = gl.max(smem.key_range.index(0).load(THREADS), 0)
    return num_pairs, gl.max(smem.key_range.index(1).load(THREADS), 0)


@gluon.jit
def store_key_range(smem, first, last):
    """Store the range for :func:`load_key_range`; returns the number of pairs."""
    # At least one: a loop that may be skipped makes the compiler serialise the MMAs.
    num_pairs = gl.maximum(gl.cdiv(last - first, PAIR_N), 1)
    smem.key_range.index(0).store(gl.zeros([1], gl.int32, THREADS) + num_pairs)
    smem.key_range.index(1).store(gl.zeros([1], gl.int32, THREADS) + first)
    mbarrier.arrive(smem.key_range_full.index(0), count=1)
    return num_pairs


@gluon.jit
def scale_pairs(x, alpha):
    """bfloat16 times float32, rounded once, two at a time; takes half the registers of float32."""
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 l, h; .reg .f32 x, y;
            shl.b32 l, $1, 16; and.b32 h, $1, 0xffff0000; mov.b32 x, l; mov.b32 y, h;
            mul.f32 x, x, $2; mul.f32 y, y, $3; cvt.rn.bf16x2.f32 $0, y, x;
        }""",
        "=r,r,r,r",
        [x, alpha],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def rescale(x, alpha):
    """Multiply the rows of half of O by ``alpha``."""
    return x * gl.convert_layout(alpha, O_ROWS)[:, None]


@gluon.jit
def mask_scores(s, valid, limit, at, scale_log2, CAUSAL: gl.constexpr, TOKEN_MASK: gl.constexpr):
    """Base-2 scores of a block, -inf for invalid and masked keys."""
    marks = valid.load(S_KEYS)[None, :]
    if TOKEN_MASK:
        seen = (marks.to(gl.int32) & limit[:, None]) != 0
    else:
        seen = marks != 0
    if CAUSAL:
        keys = at + gl.arange(0, BLOCK_N, S_KEYS)
        seen = seen & (keys[None, :] < limit[:, None])
    return gl.where(seen, s * scale_log2, float("-inf"))


@gluon.jit
def consumer_left(
    num_tiles, smem, results, shape, scale_log2, ROPE: gl.constexpr, CAUSAL: gl.constexpr,
    TOKEN_MASK: gl.constexpr,
):  # fmt: skip
    acc0 = gl.zeros([BLOCK_M, ACC_DIM], gl.float32, O_LAYOUT)
    acc1 = gl.zeros([BLOCK_M, ACC_DIM], gl.float32, O_LAYOUT)
    m = gl.full([BLOCK_M], LOWEST, gl.float32, S_ROWS)
    l = gl.zeros([BLOCK_M], gl.float32, S_ROWS)
    tile = gl.program_id(0)
    phase = 0
    tile_phase = 0
    zero = opaque_zero(tile)
    mbarrier.wait(smem.q_full.index(0), 0)
    fence_async_shared()
    mbarrier.wait(smem.kv_left_full.index(0), 0)
    s = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT)
    keys = smem.kv_left.index(zero).permute((1, 0))
    s = warpgroup_mma(smem.q.index(zero), keys, s, use_acc=False, is_async=True)
    mbarrier.wait(smem.kv_right_full.index(0), 0)
    s = warpgroup_mma(
        smem.q.index(zero + 1), smem.kv_right.index(zero).permute((1, 0)), s, is_async=True
    )
    if ROPE > 0:
        s = warpgroup_mma(smem.q_rope, smem.k_rope.index(zero).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    num_pairs, first = load_key_range(smem, 0)
    limit = smem.limits.load(S_ROWS)
    i = 0
    while tile < num_tiles:
        if i + 1 == num_pairs:
            mbarrier.arrive(smem.q_empty.index(0), count=1)
        zero = opaque_zero(i)
        mbarrier.wait(smem.valid_full.index(0), phase)
        at = first + i * PAIR_N
        scores = mask_scores(s, smem.valid.index(0), limit, at, scale_log2, CAUSAL, TOKEN_MASK)
        m_0 = gl.maximum(m, gl.max(scores, 1))
        smem.m.store(m_0)
        mbarrier.arrive(smem.m_full.index(0), count=1)
        p = gl.exp2(scores - m_0[:, None])
        alpha = gl.exp2(m - m_0)
        l = l * alpha + gl.sum(p, 1)
        acc0 = rescale(acc0, alpha)
        acc1 = rescale(acc1, alpha)
        p_bf16 = to_bf16(p)
        p_left = gl.convert_layout(p_bf16, gl.DotOperandLayout(0, O_LAYOUT, 2))
        values = smem.kv_left.index(zero)
        acc0 = warpgroup_mma(p_left, values.slice(0, ACC_DIM, dim=1), acc0, is_async=True)
        acc1 = warpgroup_mma(p_left, values.slice(ACC_DIM, ACC_DIM, dim=1), acc1, is_async=True)
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        mbarrier.arrive(smem.kv_left_empty.index(0), count=1)

        mbarrier.wait(smem.m_full.index(1), phase)
        m = smem.m.load(S_ROWS)
        alpha = gl.exp2(m_0 - m)
        smem.k_rope.index(zero).store(scale_pairs(p_bf16, alpha[:, None]))
        fence_async_shared()
        mbarrier.arrive(smem.p_full.index(0), count=1)
        l = l * alpha
        acc0 = rescale(acc0, alpha)
        acc1 = rescale(acc1, alpha)
        mbarrier.wait(smem.p_full.index(1), phase)
        p_right = smem.k_rope.index(zero + 1)
        values = smem.kv_left.index(zero + 1)
        next0 = warpgroup_mma(p_right, values.slice(0, ACC_DIM, dim=1), acc0, is_async=True)
        next1 = warpgroup_mma(p_right, values.slice(ACC_DIM, ACC_DIM, dim=1), acc1, is_async=True)
        phase = phase ^ 1
        i += 1
        # S of the next pair, possibly of the next tile. After the very last pair, these MMAs
        # read stale keys and nothing reads S.
        done = i == num_pairs
        more = tile + gl.num_programs(0) < num_tiles
        if done:
            if more:
                mbarrier.wait(smem.q_full.index(0), tile_phase ^ 1)
                fence_async_shared()
                mbarrier.wait(smem.kv_left_full.index(0), phase)
        else:
            mbarrier.wait(smem.kv_left_full.index(0), phase)
        next_s = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT)
        keys = smem.kv_left.index(zero).permute((1, 0))
        next_s = warpgroup_mma(smem.q.index(zero), keys, next_s, use_acc=False, is_async=True)
        acc0, acc1, next_s = warpgroup_mma_wait(1, deps=[next0, next1, next_s])
        mbarrier.arrive(smem.kv_left_empty.index(1), count=1)
        if done:
            store_out(tile, tile_phase, acc0, acc1, m, l, smem, results, shape, 0)
            acc0 = gl.zeros([BLOCK_M, ACC_DIM], gl.float32, O_LAYOUT)
            acc1 = gl.zeros([BLOCK_M, ACC_DIM], gl.float32, O_LAYOUT)
            m = gl.full([BLOCK_M], LOWEST, gl.float32, S_ROWS)
            l = gl.zeros([BLOCK_M], gl.float32, S_ROWS)
            if more:
                mbarrier.wait(smem.kv_right_full.index(0), phase)
        else:
            mbarrier.wait(smem.kv_right_full.index(0), phase)
        keys = smem.kv_right.index(zero).permute((1, 0))
        next_s = warpgroup_mma(smem.q.index(zero + 1), keys, next_s, is_async=True)
        if ROPE > 0:
            k_rope = smem.k_rope.index(zero).permute((1, 0))
            next_s = warpgroup_mma(smem.q_rope, k_rope, next_s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[next_s])
        if done:
            tile += gl.num_programs(0)
            tile_phase = tile_phase ^ 1
            i = 0
            if more:
                num_pairs, first = load_key_range(smem, tile_phase)
                limit = smem.limits.load(S_ROWS)


@gluon.jit
def consumer_right(
    num_tiles, smem, results, shape, scale_log2, ROPE: gl.constexpr, CAUSAL: gl.constexpr,
    TOKEN_MASK: gl.constexpr,
):  # fmt: skip
    phase = 0
    tile_phase = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        acc0 = gl.zeros([BLOCK_M, ACC_DIM], gl.float32, O_LAYOUT)
        acc1 = gl.zeros([BLOCK_M, ACC_DIM], gl.float32, O_LAYOUT)
        m = gl.full([BLOCK_M], LOWEST, gl.float32, S_ROWS)
        l = gl.zeros([BLOCK_M], gl.float32, S_ROWS)
        mbarrier.wait(smem.q_full.index(0), tile_phase)
        fence_async_shared()
        num_pairs, first = load_key_range(smem, tile_phase)
        limit = smem.limits.load(S_ROWS)
        for i in range(num_pairs):
            zero = opaque_zero(i)
            s = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT)
            mbarrier.wait(smem.kv_right_full.index(1), phase)
            keys = smem.kv_right.index(zero + 1).permute((1, 0))
            s = warpgroup_mma(smem.q.index(zero + 1), keys, s, use_acc=False, is_async=True)
            mbarrier.wait(smem.kv_left_full.index(1), phase)
            keys = smem.kv_left.index(zero + 1).permute((1, 0))
            s = warpgroup_mma(smem.q.index(zero), keys, s, is_async=True)
            if ROPE > 0:
                s = warpgroup_mma(
                    smem.q_rope, smem.k_rope.index(zero + 1).permute((1, 0)), s, is_async=True
                )
            s = warpgroup_mma_wait(0, deps=[s])
            if i + 1 == num_pairs:
                mbarrier.arrive(smem.q_empty.index(0), count=1)
            mbarrier.wait(smem.valid_full.index(1), phase)
            at = first + i * PAIR_N + BLOCK_N
            scores = mask_scores(s, smem.valid.index(1), limit, at, scale_log2, CAUSAL, TOKEN_MASK)
            m_1 = gl.max(scores, 1)
            mbarrier.wait(smem.m_full.index(0), phase)
            m_1 = gl.maximum(m_1, smem.m.load(S_ROWS))
            smem.m.store(m_1)
            mbarrier.arrive(smem.m_full.index(1), count=1)
            p = gl.exp2(scores - m_1[:, None])
            alpha = gl.exp2(m - m_1)
            m = m_1
            l = l * alpha + gl.sum(p, 1)
            acc0 = rescale(acc0, alpha)
            acc1 = rescale(acc1, alpha)
            p_bf16 = to_bf16(p)
            p_right = gl.convert_layout(p_bf16, gl.DotOperandLayout(0, O_LAYOUT, 2))
            values = smem.kv_right.index(zero + 1)
            acc0 = warpgroup_mma(p_right, values.slice(0, ACC_DIM, dim=1), acc0, is_async=True)
            acc1 = warpgroup_mma(
                p_right, values.slice(ACC_DIM, ACC_DIM, dim=1), acc1, is_async=True
            )
            smem.k_rope.index(zero + 1).store(p_bf16)
            fence_async_shared()
            mbarrier.arrive(smem.p_full.index(1), count=1)
            mbarrier.wait(smem.p_full.index(0), phase)
            p_left = smem.k_rope.index(zero)
            values = smem.kv_right.index(zero)
            acc0 = warpgroup_mma(p_left, values.slice(0, ACC_DIM, dim=1), acc0, is_async=True)
            acc1 = warpgroup_mma(p_left, values.slice(ACC_DIM, ACC_DIM, dim=1), acc1, is_async=True)
            acc0, acc1 = warpgroup_mma_wait(2, deps=[acc0, acc1])
            mbarrier.arrive(smem.kv_right_empty.index(1), count=1)
            acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
            mbarrier.arrive(smem.kv_right_empty.index(0), count=1)
            phase = phase ^ 1
        store_out(tile, tile_phase, acc0, acc1, m, l, smem, results, shape, 1)
        tile_phase = tile_phase ^ 1


@gluon.jit
def store_out(tile, tile_phase, acc0, acc1, m, l, smem, results, shape, HALF: gl.constexpr):
    """Normalise and store half of O; the left warpgroup also stores lse and the largest logits."""
    smem.l.index(HALF).store(l)
    mbarrier.arrive(smem.l_full.index(0), count=1)
    mbarrier.wait(smem.l_full.index(0), tile_phase)
    l = l + smem.l.index(1 - HALF).load(S_ROWS)
    begin, split, request, first = locate_tile(tile, shape)
    token, head, real = rows_of_tile(begin, shape, BLOCK_M, S_ROWS)
    if HALF == 0:
        lse = results.lse + split.to(gl.int64) * results.lse_split + request * results.lse_request
        lse_rows = (first + token) * results.lse_token + head
        gl.store(lse + lse_rows, (m + gl.log2(l)) * LN2, mask=real)  # log2(0) is -inf
        if results.max_logits is not None:
            max_logits = gl.where(l == 0, float("-inf"), m * LN2)
            rows = request * results.max_logits_request + head
            if results.max_logits_token is not None:
                rows += (first + token) * results.max_logits_token
            gl.store(results.max_logits + rows, max_logits, mask=real)
    empty = l == 0
    if results.attn_sink is not None:
        sink = gl.load(results.attn_sink + head, mask=real, other=0.0)
        l += gl.exp2(sink * LOG2E - m)
    alpha = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, l))
    out = results.out + split.to(gl.int64) * results.out_split + request * results.out_request
    store_out_columns(rescale(acc0, alpha), out + HALF * HALF_DIM, begin, first, results, shape)
    store_out_columns(
        rescale(acc1, alpha), out + (HALF * HALF_DIM + ACC_DIM), begin, first, results, shape
    )


@gluon.jit
def store_out_columns(values, out, begin, first, results, shape):
    """Store ``ACC_DIM`` columns of the tile's rows."""
    if results.out.dtype.element_ty == gl.bfloat16:
        pieces = to_bf16(values).reshape([BLOCK_M, 2, ACC_DIM // 2]).permute((0, 2, 1)).split()
        store_out_rows(gl.convert_layout(pieces[0], STORE), out, begin, first, results, shape)
        store_out_rows(
            gl.convert_layout(pieces[1], STORE), out + ACC_DIM // 2, begin, first, results, shape
        )
    else:
        store_out_rows(values, out, begin, first, results, shape)


@gluon.jit
def store_out_rows(values, out, begin, first, results, shape):
    """Store columns of the tile's rows."""
    LAYOUT: gl.constexpr = values.type.layout
    token, head, real = rows_of_tile(begin, shape, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    rows = (first + token) * results.out_token + head * results.out_head
    dims = gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))
    gl.store(out + rows[:, None] + dims[None, :], values, mask=real[:, None])


@gluon.jit
def load_keys(keys, at, last, L: gl.constexpr, PAGED: gl.constexpr):
    """Load the slots of the keys ``at``, or their pages if ``keys`` is a row of a page table."""
    return gl.load(keys + (at // L.page_size if PAGED else at), mask=at < last, other=-1)


@gluon.jit
def key_rows(rows, key, at, L: gl.constexpr, PAGED: gl.constexpr):
    """Offsets of the keys' rows, in elements, and the keys' validity."""
    key = key.to(gl.int64)
    if PAGED:
        page = key
        offset = (at % L.page_size).to(gl.int64)
        valid = (key >= 0) & (key < rows.num_slots // L.page_size)
    else:
        valid = (key >= 0) & (key < rows.num_slots)
        if L.linear:
            page = gl.zeros_like(key)
            offset = key
        else:
            page = (key.to(gl.uint32) // L.page_size).to(gl.int64)
            offset = (key.to(gl.uint32) % L.page_size).to(gl.int64)
    return page * L.bf16_strides[0] + offset * L.bf16_strides[1], valid


@gluon.jit
def load_token_mask(token_mask, at, last, shape):
    """The bits among a group's tokens of the keys ``at``, a bit for each."""
    marks = gl.load(token_mask + at, mask=at < last, other=0).to(gl.int32)
    return marks & ((1 << (shape.num_rows // shape.num_heads)) - 1)


@gluon.jit
def store_token_bits(bits, shape, begin):
    """Store the bit of each row's token in the mask."""
    token, _, real = rows_of_tile(begin, shape, BLOCK_M, S_ROWS)
    bits.store(gl.full([BLOCK_M], 1, gl.int32, S_ROWS) << gl.where(real, token, 0).to(gl.int32))


@gluon.jit
def copy_blocks(
    rows, key_0, key_1, token_mask, at, last, shape, smem, phase,
    L: gl.constexpr, PAGED: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Copy a pair of blocks of one stream."""
    row_0, valid_0 = key_rows(rows, key_0, at, L, PAGED)
    row_1, valid_1 = key_rows(rows, key_1, at + BLOCK_N, L, PAGED)
    mark_0 = valid_0
    mark_1 = valid_1
    if token_mask is not None:
        mark_0 = gl.where(valid_0, load_token_mask(token_mask, at, last, shape), 0)
        mark_1 = gl.where(valid_1, load_token_mask(token_mask, at + BLOCK_N, last, shape), 0)
        valid_0 = mark_0 != 0
        valid_1 = mark_1 != 0
    row_0 = rows.bf16 + row_0
    row_1 = rows.bf16 + row_1
    copy_rows(row_0, valid_0, mark_0, row_1, valid_1, mark_1, smem, phase, ROPE)


@gluon.jit
def copy_rows(row_0, valid_0, mark_0, row_1, valid_1, mark_1, smem, phase, ROPE: gl.constexpr):
    """Copy a pair of blocks row by row, each half once it is empty, and hand over the keys' marks.

    A mark is the key's validity, or its bits.
    """
    dims = gl.arange(0, HALF_DIM, COPY_COLS)[None, :]
    rope_dims = VALUE_DIM + gl.arange(0, ROPE_DIM, COPY_COLS)[None, :]
    row_0 = row_0[:, None]
    row_1 = row_1[:, None]
    mbarrier.wait(smem.kv_left_empty.index(0), phase)
    async_load(smem.kv_left.index(0), row_0 + dims, mask=valid_0[:, None])
    async_copy.mbarrier_arrive(smem.kv_left_full.index(0), increment_count=False)
    mbarrier.wait(smem.kv_right_empty.index(1), phase)
    async_load(smem.kv_right.index(1), row_1 + (HALF_DIM + dims), mask=valid_1[:, None])
    async_copy.mbarrier_arrive(smem.kv_right_full.index(1), increment_count=False)
    mbarrier.wait(smem.kv_right_empty.index(0), phase)
    async_load(smem.kv_right.index(0), row_0 + (HALF_DIM + dims), mask=valid_0[:, None])
    if ROPE > 0:
        async_load(smem.k_rope.index(0), row_0 + rope_dims, mask=valid_0[:, None])
    async_copy.mbarrier_arrive(smem.kv_right_full.index(0), increment_count=False)
    mbarrier.wait(smem.kv_left_empty.index(1), phase)
    async_load(smem.kv_left.index(1), row_1 + dims, mask=valid_1[:, None])
    if ROPE > 0:
        async_load(smem.k_rope.index(1), row_1 + rope_dims, mask=valid_1[:, None])
    async_copy.mbarrier_arrive(smem.kv_left_full.index(1), increment_count=False)
    smem.valid.index(0).store(mark_0.to(gl.int8))
    mbarrier.arrive(smem.valid_full.index(0), count=1)
    smem.valid.index(1).store(mark_1.to(gl.int8))
    mbarrier.arrive(smem.valid_full.index(1), count=1)


@gluon.jit
def load_page(rows, keys, at, last, L: gl.constexpr):
    """The page of the keys from ``at`` on, -1 if there is none."""
    page = load_keys(keys, at, last, L, True)
    real = (page >= 0) & (page < rows.num_slots // L.page_size)
    return gl.where(real, page, -1).to(gl.int32)


@gluon.jit
def copy_half_block(
    pages, page, row, half, rope, empty, full, phase, START: gl.constexpr, ROPE: gl.constexpr
):
    """Copy half of a block once it is empty, with ROPE also the RoPE dims; zeros without a page.

    The phase needs 128 arrivals, so it cannot end before all bytes are expected.
    """
    mbarrier.wait(empty, phase)
    half = reinterpret(half, gl.bfloat16, [BOXES, BLOCK_N, BOX_DIM], TILE)
    for j in gl.static_range(BOXES):
        part = reinterpret(half.index(j), gl.bfloat16, [1, BLOCK_N, BOX_DIM], PAGE_TILE)
        tma_load(pages, [page, row, START + BOX_DIM * j], full, part)
    if ROPE > 0:
        rope = reinterpret(rope, gl.bfloat16, [1, BLOCK_N, BOX_DIM], PAGE_TILE)
        tma_load(pages, [page, row, VALUE_DIM], full, rope)
    mbarrier.expect(full, BLOCK_N * 2 * (HALF_DIM + ROPE))
    mbarrier.arrive(full, count=WARPGROUP - 1)


@gluon.jit
def prefetch_blocks(rows, page_0, page_1, at, shape, L: gl.constexpr):
    """Prefetch a pair of blocks that several tiles share into L2, one thread a block."""
    thread = gl.arange(0, WARPGROUP, THREADS)
    page = gl.where(thread == 0, page_0, page_1)
    row = (at + thread * BLOCK_N) % L.page_size
    start = page.to(gl.int64) * L.bf16_strides[0] + row.to(gl.int64) * L.bf16_strides[1]
    some = (thread < 2) & (page >= 0) & (shape.num_rows > BLOCK_M)
    gl.inline_asm_elementwise(
        """{
            .reg .pred some; setp.ne.s32 some, $2, 0; mov.b32 $0, 0;
            @some cp.async.bulk.prefetch.L2.global [$1], $2;
        }""",
        "=r,l,r",
        [(rows.bf16 + start).to(gl.int64), gl.where(some, BLOCK_N * 2 * L.head_dim, 0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def copy_paged_blocks(
    rows, pages, keys, first, last, shape, smem, phase, L: gl.constexpr, ROPE: gl.constexpr
):
    """Copy the pairs of 128 existing keys by TMA, each block from one page."""
    ones = gl.full([BLOCK_N], 1, gl.int8, COPY_ROWS)
    at = first
    page_0 = load_page(rows, keys, at, last, L)
    page_1 = load_page(rows, keys, at + BLOCK_N, last, L)
    for _ in range((last - first) // PAIR_N):
        row_0 = at % L.page_size
        row_1 = (at + BLOCK_N) % L.page_size
        copy_half_block(
            pages, page_0, row_0, smem.kv_left.index(0), smem.k_rope.index(0),
            smem.kv_left_empty.index(0), smem.kv_left_full.index(0), phase, 0, 0,
        )  # fmt: skip
        copy_half_block(
            pages, page_1, row_1, smem.kv_right.index(1), smem.k_rope.index(1),
            smem.kv_right_empty.index(1), smem.kv_right_full.index(1), phase, HALF_DIM, 0,
        )  # fmt: skip
        copy_half_block(
            pages, page_0, row_0, smem.kv_right.index(0), smem.k_rope.index(0),
            smem.kv_right_empty.index(0), smem.kv_right_full.index(0), phase, HALF_DIM, ROPE,
        )  # fmt: skip
        copy_half_block(
            pages, page_1, row_1, smem.kv_left.index(1), smem.k_rope.index(1),
            smem.kv_left_empty.index(1), smem.kv_left_full.index(1), phase, 0, ROPE,
        )  # fmt: skip
        smem.valid.index(0).store(gl.where(page_0 >= 0, ones, 0))
        mbarrier.arrive(smem.valid_full.index(0), count=1)
        smem.valid.index(1).store(gl.where(page_1 >= 0, ones, 0))
        mbarrier.arrive(smem.valid_full.index(1), count=1)
        phase = phase ^ 1
        at += PAIR_N
        page_0 = load_page(rows, keys, at, last, L)
        page_1 = load_page(rows, keys, at + BLOCK_N, last, L)
        if L.bf16_strides[1] == L.head_dim:
            prefetch_blocks(rows, page_0, page_1, at, shape, L)
    return at, phase


@gluon.jit
def stream_rows(blocks, block, slots, rows, extra_rows, L: gl.constexpr, EXTRA: gl.constexpr):
    """Pointers to the rows of a block's keys in the cache of the block's stream."""
    slots = gl.maximum(slots, 0)
    if block < blocks.num_main:
        page, row = locate(slots, L)
        start = rows.bf16 + (page * L.bf16_strides[0] + row * L.bf16_strides[1])
    else:
        page, row = locate(slots, EXTRA)
        start = extra_rows.bf16 + (page * EXTRA.bf16_strides[0] + row * EXTRA.bf16_strides[1])
    return start


@gluon.jit
def copy_streams(
    tile, rows, extra_rows, main, extra, shape, smem, phase,
    L: gl.constexpr, EXTRA: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Copy a tile's selected keys of two streams; returns the phase after them."""
    blocks = find_key_blocks(tile, main, extra, shape, smem.limits, EXTRA, False)
    block = blocks.first
    slots_0 = load_block_slots(blocks, block, main, extra, L, EXTRA, False, COPY_ROWS)
    slots_1 = load_block_slots(blocks, block + 1, main, extra, L, EXTRA, False, COPY_ROWS)
    # The end of the valid slots is found during the copy of the first pair.
    num_pairs = 1
    i = 0
    while i < num_pairs:
        row_0 = stream_rows(blocks, block, slots_0, rows, extra_rows, L, EXTRA)
        row_1 = stream_rows(blocks, block + 1, slots_1, rows, extra_rows, L, EXTRA)
        valid_0 = slots_0 >= 0
        valid_1 = slots_1 >= 0
        copy_rows(row_0, valid_0, valid_0, row_1, valid_1, valid_1, smem, phase, ROPE)
        if i == 0:
            last = end_of_valid_blocks(blocks, main, extra, EXTRA, False)
            num_pairs = store_key_range(smem, block * BLOCK_N, last * BLOCK_N)
        i += 1
        block += 2
        slots_0 = load_block_slots(blocks, block, main, extra, L, EXTRA, False, COPY_ROWS)
        slots_1 = load_block_slots(blocks, block + 1, main, extra, L, EXTRA, False, COPY_ROWS)
        phase = phase ^ 1
    return phase


@gluon.jit
def producer(
    num_tiles, queries, rows, pages, stream, extra_rows, extra, shape, smem,
    L: gl.constexpr, EXTRA: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr,
    ROPE: gl.constexpr,
):  # fmt: skip
    """Copy the queries and keys of the CTA's tiles, each half block once its stage is empty."""
    phase = 1
    tile_phase = 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        begin, split, request, token = locate_tile(tile, shape)
        keys = stream.keys + request * stream.keys_request + token * stream.keys_token
        token_mask = stream.token_mask
        if stream.token_mask is not None:
            token_mask += request * stream.token_mask_request
        mbarrier.wait(smem.q_empty.index(0), tile_phase)
        tile_phase = tile_phase ^ 1
        copy_queries(tile, smem.q.index(0), queries, shape, 0, HALF_DIM)
        copy_queries(tile, smem.q.index(1), queries, shape, HALF_DIM, HALF_DIM)
        if ROPE > 0:
            copy_queries(tile, smem.q_rope, queries, shape, VALUE_DIM, ROPE)
        async_copy.mbarrier_arrive(smem.q_full.index(0), increment_count=False)
        if EXTRA is not None:
            phase = copy_streams(
                tile, rows, extra_rows, stream, extra, shape, smem, phase, L, EXTRA, ROPE
            )  # fmt: skip
        else:
            end = store_key_limits(smem.limits, stream, shape, begin, request, token, CAUSAL)
            if stream.token_mask is not None:
                store_token_bits(smem.limits, shape, begin)
            num_blocks = gl.cdiv(gl.cdiv(end, BLOCK_N), shape.num_splits)
            first = split * num_blocks * BLOCK_N
            last = gl.minimum(first + num_blocks * BLOCK_N, end)
            if pages is not None:
                store_key_range(smem, first, last)
                at, phase = copy_paged_blocks(
                    rows, pages, keys, first, last, shape, smem, phase, L, ROPE,
                )  # fmt: skip
                if (at < last) | (at == first):
                    # Rows after the last key may hold NaN, so the last pair is copied row by row.
                    rest_at = at + gl.arange(0, BLOCK_N, COPY_ROWS)
                    key_0 = load_keys(keys, rest_at, last, L, PAGED)
                    key_1 = load_keys(keys, rest_at + BLOCK_N, last, L, PAGED)
                    copy_blocks(
                        rows, key_0, key_1, token_mask, rest_at, last, shape, smem, phase,
                        L, PAGED, ROPE,
                    )  # fmt: skip
                    phase = phase ^ 1
            else:
                at = first + gl.arange(0, BLOCK_N, COPY_ROWS)
                key_0 = load_keys(keys, at, last, L, PAGED)
                key_1 = load_keys(keys, at + BLOCK_N, last, L, PAGED)
                copy_blocks(
                    rows, key_0, key_1, token_mask, at, last, shape, smem, phase, L, PAGED, ROPE
                )  # fmt: skip
                phase = phase ^ 1
                # Find the end of the list's valid slots during the copy of the first pair.
                if not PAGED:
                    last = end_of_valid_slots(keys, first, last, rows.num_slots, 2048)
                num_pairs = store_key_range(smem, first, last)
                key_0 = load_keys(keys, at + PAIR_N, last, L, PAGED)
                key_1 = load_keys(keys, at + PAIR_N + BLOCK_N, last, L, PAGED)
                for _ in range(1, num_pairs):
                    at += PAIR_N
                    copy_blocks(
                        rows, key_0, key_1, token_mask, at, last, shape, smem, phase, L, PAGED, ROPE
                    )  # fmt: skip
                    key_0 = load_keys(keys, at + PAIR_N, last, L, PAGED)
                    key_1 = load_keys(keys, at + PAIR_N + BLOCK_N, last, L, PAGED)
                    phase = phase ^ 1


@gluon.jit(
    do_not_specialize=["num_tiles"],
    do_not_specialize_on_alignment=["group_tokens", "num_splits"],  # a 1 is worth a kernel
)
def _attend(
    num_tiles, queries, rows, pages, stream, extra_rows, extra, results, num_heads, num_rows,
    group_tokens, num_splits, scale_log2,
    L: gl.constexpr, EXTRA: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr,
    MIXED: gl.constexpr,
):  # fmt: skip
    """One CTA: tiles of 64 query rows of a group, each over one split of the group's keys.

    Args:
        queries: their strides count 8 elements.
        pages: a TMA descriptor of the cache if every block lies within a page, or None.
        L: the cache's layout.
        EXTRA: the layout of the extra stream's cache, or None without one.
        PAGED: a group attends to all keys of its request, through the page table.
        CAUSAL: a query token sees no later keys.
        MIXED: tiles hold rows of several tokens, which see different numbers of keys.
    """
    shape = QueryRows(num_heads, num_rows, group_tokens, num_splits)
    ROPE: gl.constexpr = L.head_dim - VALUE_DIM
    TOKEN_MASK: gl.constexpr = stream.token_mask is not None
    smem = SharedMemory(
        q=gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_M, HALF_DIM], TILE),
        q_rope=gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, ROPE_DIM], TILE),
        kv_left=gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, HALF_DIM], TILE),
        kv_right=gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, HALF_DIM], TILE),
        k_rope=gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, ROPE_DIM], TILE),
        m=gl.allocate_shared_memory(gl.float32, [BLOCK_M], PLAIN),
        l=gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], PLAIN),
        valid=gl.allocate_shared_memory(gl.int8, [2, BLOCK_N], PLAIN),
        limits=gl.allocate_shared_memory(gl.int32, [BLOCK_M], PLAIN),
        key_range=gl.allocate_shared_memory(gl.int32, [2, 1], PLAIN),
        kv_left_full=allocate_barriers(2, WARPGROUP),
        kv_right_full=allocate_barriers(2, WARPGROUP),
        kv_left_empty=allocate_barriers(2, 1),
        kv_right_empty=allocate_barriers(2, 1),
        valid_full=allocate_barriers(2, 1),
        m_full=allocate_barriers(2, 1),
        p_full=allocate_barriers(2, 1),
        l_full=allocate_barriers(1, 2),
        q_full=allocate_barriers(1, WARPGROUP),
        q_empty=allocate_barriers(1, 2),
        key_range_full=allocate_barriers(1, 1),
    )
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()  # the prologue above reads nothing that an earlier kernel writes
    gl.warp_specialize(
        [
            (consumer_left, (num_tiles, smem, results, shape, scale_log2, ROPE, MIXED, TOKEN_MASK)),
            (consumer_right, (num_tiles, smem, results, shape, scale_log2, ROPE, MIXED,
                              TOKEN_MASK)),
            (producer, (num_tiles, queries, rows, pages, stream, extra_rows, extra, shape, smem, L,
                        EXTRA, PAGED, CAUSAL, ROPE)),
        ],
        [4, 4],
        [208, 64],
    )  # fmt: skip


def launch(
    queries: Queries,
    cache: PagedCache,
    stream: KeyList,
    results: Results,
    shape: QueryRows,
    softmax_scale: float,
    *,
    num_groups: int,
    extra_cache: PagedCache | None = None,
    extra: KeyList | None = None,
    paged: bool = False,
    causal: bool = False,
) -> None:
    """Launch over ``num_groups`` groups of query rows.

    Args:
        queries: bfloat16 rows, with strides in elements.
        cache: bfloat16 rows.
        stream: the keys of each group.
        results: the outputs.
        shape: the numbering of the query rows.
        softmax_scale: factor of the scores.
        num_groups: groups of query rows that share keys.
        extra_cache: bfloat16 rows of a second stream.
        extra: the second stream's keys of each group.
        paged: ``stream`` is a page table.
        causal: mask later keys.
    """
    num_tiles = num_groups * -(-shape.num_rows // BLOCK_M.value) * shape.num_splits
    rows, layout = cache_arguments(cache)
    extra_rows, extra_layout = None, None
    if extra_cache is not None and extra is not None:
        extra_rows, extra_layout = cache_arguments(extra_cache)
    pages = None
    if paged and cache.page_size % BLOCK_N.value == 0:
        size, strides = list(rows.bf16.shape), list(rows.bf16.stride())
        pages = descriptor(
            rows.bf16, size, strides, [1, BLOCK_N.value, BOX_DIM.value], PAGE_TILE.value
        )
    _attend[(min(num_tiles, num_multiprocessors(queries.q.device)),)](
        num_tiles,
        queries.in_units(8),
        rows,
        pages,
        stream,
        extra_rows,
        extra,
        results,
        *shape,
        softmax_scale * LOG2E.value,
        L=layout,
        EXTRA=extra_layout,
        PAGED=paged,
        CAUSAL=causal,
        MIXED=causal and shape.num_heads % BLOCK_M.value > 0,
        num_warps=4,
        launch_pdl=True,
    )


def sparse_decode(call: SparseDecode) -> None:
    calls.sparse_decode(call, launch)


def dense_decode(call: DenseDecode) -> None:
    calls.dense_decode(call, launch)


def sparse_prefill(call: SparsePrefill) -> None:
    calls.sparse_prefill(call, launch)


def sparse_attention(call: SparseAttention) -> None:
    calls.sparse_attention(call, launch)

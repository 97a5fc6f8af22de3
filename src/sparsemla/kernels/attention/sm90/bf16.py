"""Attention on Hopper of 64 query rows that share keys, over bfloat16 rows of a cache.

A program has three warpgroups, takes one tile of query rows after the other, and works on two
blocks of 64 keys at a time. *Left* computes the scores of the even block and keeps the left half of
the weighted values, *right* those of the odd block and the right half; each hands its weights to
the other through shared memory, so that one's softmax runs under the other's matrix products. The
*producer* copies rows of the cache straight into the tiles, half a block at a time, each half as
soon as its last reader is done with it, and the queries and the first keys of the next tile while
this one is worked on. Blocks that lie within a page come by tensor copies, others row by row.

Shared memory, in KiB: queries 64 + 8, keys 2 x (64 + 8), 8 to bring results into the order of
memory; 226 with the rest. The weights of a block lie where the last 64 dims of its keys were, which
only the half that made them reads.
"""

from __future__ import annotations

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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsemla.cache import PagedCache
from sparsemla.kernels.attention.cache import cache_arguments
from sparsemla.kernels.attention.sm90.abi import (
    Results,
    Shape,
    Stream,
)
from sparsemla.kernels.attention.sm90.tiles import (
    LN2,
    LOG2E,
    LOWEST,
    PLAIN,
    SCORE_ROWS,
    SCORES,
    SUM_ROWS,
    SUMS,
    TILE,
    end_of,
    heads_of,
    place_of,
    store_limits,
    to_bf16,
)
from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.gluon import async_load, opaque_zero, reinterpret, tma_load

COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
COPY_ROWS = gl.constexpr(gl.SliceLayout(1, COPY))
COPY_COLS = gl.constexpr(gl.SliceLayout(0, COPY))
# 64 columns of SUMS, the rows of a warp each in one piece.
STORE = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]],
        lane_bases=[[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 64],
    )
)
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PAGE_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))

# Barriers. READY and FREE have one for each half of each block; the last dims of a block are
# copied with the half that the scores of the block end with.
READY_0L = gl.constexpr(0)
READY_0R = gl.constexpr(1)
READY_1L = gl.constexpr(2)
READY_1R = gl.constexpr(3)
FREE_0L = gl.constexpr(4)
FREE_0R = gl.constexpr(5)
FREE_1L = gl.constexpr(6)
FREE_1R = gl.constexpr(7)
VALID_0 = gl.constexpr(8)  # which keys of a block count
VALID_1 = gl.constexpr(9)
MAX_0 = gl.constexpr(10)  # the running maximum, with the even block; then with the odd one
MAX_1 = gl.constexpr(11)
WEIGHTS_0 = gl.constexpr(12)  # the weights of the even block, for right; of the odd one, for left
WEIGHTS_1 = gl.constexpr(13)
SUM = gl.constexpr(14)  # both sums of weights
QUERIES = gl.constexpr(15)
SCORED = gl.constexpr(16)  # the last products with the queries of a tile are done
RANGE = gl.constexpr(17)  # what the producer found out about the keys
NUM_BARRIERS = gl.constexpr(18)


@gluon.jit
def copy_queries(
    tile, to, q, q_request, q_token, q_head, shape, START: gl.constexpr, DIM: gl.constexpr
):
    """Start to copy dims ``START .. START + DIM`` of the rows of a tile.

    Strides are in pieces of 8 elements: the compiler must know that copies of them are aligned.
    """
    begin, _, request, first = place_of(tile, shape)
    token, head, real = heads_of(begin, shape, COPY_ROWS)
    rows = 8 * (request * q_request + (first + token) * q_token + head * q_head)
    dims = START + gl.arange(0, DIM, COPY_COLS)
    async_load(to, q + rows[:, None] + dims[None, :], mask=real[:, None])


@gluon.jit
def read_range(found, bar, turn):
    """Pairs of blocks and position of the first key, which a producer stored."""
    mbarrier.wait(bar.index(RANGE), turn)
    num_pairs = gl.max(found.index(0).load(ONE), 0)
    return num_pairs, gl.max(found.index(1).load(ONE), 0)


@gluon.jit
def store_range(found, bar, first, last):
    """Store what :func:`read_range` reads; returns the number of pairs."""
    # At least one: a loop that may be skipped makes the products wait for each other.
    num_pairs = gl.maximum(gl.cdiv(last - first, 128), 1)
    found.index(0).store(gl.zeros([1], gl.int32, ONE) + num_pairs)
    found.index(1).store(gl.zeros([1], gl.int32, ONE) + first)
    mbarrier.arrive(bar.index(RANGE), count=1)
    return num_pairs


@gluon.jit
def scale_pairs(x, factor):
    """bfloat16 times float32, rounded once, two at a time; takes half the registers of float32."""
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 l, h; .reg .f32 x, y;
            shl.b32 l, $1, 16; and.b32 h, $1, 0xffff0000; mov.b32 x, l; mov.b32 y, h;
            mul.f32 x, x, $2; mul.f32 y, y, $3; cvt.rn.bf16x2.f32 $0, y, x;
        }""",
        "=r,r,r,r",
        [x, factor],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def shrink(x, factor):
    """Rows of a half of the weighted values times ``factor``."""
    return x * gl.convert_layout(factor, SUM_ROWS)[:, None]


@gluon.jit
def masked_scores(s, valid, limit, at, scale_log2, CAUSAL: gl.constexpr):
    """Base-2 scores of a block, of keys that count."""
    seen = valid.load(gl.SliceLayout(0, SCORES))[None, :] != 0
    if CAUSAL:
        keys = at + gl.arange(0, 64, gl.SliceLayout(0, SCORES))
        seen = seen & (keys[None, :] < limit[:, None])
    return gl.where(seen, s * scale_log2, float("-inf"))


@gluon.jit
def left(
    num_tiles, q, q_rest, keys_l, keys_r, rest, highest, sums, valid, bar, results, shape, limits,
    found, scale_log2, REST: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    acc0 = gl.zeros([64, 128], gl.float32, SUMS)
    acc1 = gl.zeros([64, 128], gl.float32, SUMS)
    m = gl.full([64], LOWEST, gl.float32, SCORE_ROWS)
    l = gl.zeros([64], gl.float32, SCORE_ROWS)
    tile = gl.program_id(0)
    phase = 0
    turn = 0
    zero = opaque_zero(tile)
    mbarrier.wait(bar.index(QUERIES), 0)
    fence_async_shared()
    mbarrier.wait(bar.index(READY_0L), 0)
    s = gl.zeros([64, 64], gl.float32, SCORES)
    keys = keys_l.index(zero).permute((1, 0))
    s = warpgroup_mma(q.index(zero), keys, s, use_acc=False, is_async=True)
    mbarrier.wait(bar.index(READY_0R), 0)
    s = warpgroup_mma(q.index(zero + 1), keys_r.index(zero).permute((1, 0)), s, is_async=True)
    if REST > 0:
        s = warpgroup_mma(q_rest, rest.index(zero).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    num_pairs, first = read_range(found, bar, 0)
    limit = limits.load(SCORE_ROWS)
    i = 0
    while tile < num_tiles:
        if i + 1 == num_pairs:
            mbarrier.arrive(bar.index(SCORED), count=1)
        zero = opaque_zero(i)
        mbarrier.wait(bar.index(VALID_0), phase)
        scores = masked_scores(s, valid.index(0), limit, first + i * 128, scale_log2, CAUSAL)
        m_0 = gl.maximum(m, gl.max(scores, 1))
        highest.store(m_0)
        mbarrier.arrive(bar.index(MAX_0), count=1)
        p = gl.exp2(scores - m_0[:, None])
        factor = gl.exp2(m - m_0)
        l = l * factor + gl.sum(p, 1)
        acc0 = shrink(acc0, factor)
        acc1 = shrink(acc1, factor)
        weights = to_bf16(p)
        own = gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2))
        values = keys_l.index(zero)
        acc0 = warpgroup_mma(own, values.slice(0, 128, dim=1), acc0, is_async=True)
        acc1 = warpgroup_mma(own, values.slice(128, 128, dim=1), acc1, is_async=True)
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        mbarrier.arrive(bar.index(FREE_0L), count=1)

        mbarrier.wait(bar.index(MAX_1), phase)
        m = highest.load(SCORE_ROWS)
        factor = gl.exp2(m_0 - m)
        rest.index(zero).store(scale_pairs(weights, factor[:, None]))
        fence_async_shared()
        mbarrier.arrive(bar.index(WEIGHTS_0), count=1)
        l = l * factor
        acc0 = shrink(acc0, factor)
        acc1 = shrink(acc1, factor)
        mbarrier.wait(bar.index(WEIGHTS_1), phase)
        others = rest.index(zero + 1)
        values = keys_l.index(zero + 1)
        flying0 = warpgroup_mma(others, values.slice(0, 128, dim=1), acc0, is_async=True)
        flying1 = warpgroup_mma(others, values.slice(128, 128, dim=1), acc1, is_async=True)
        phase = phase ^ 1
        i += 1
        # The scores of the next pair, which may be of the next tile; after the last pair of all,
        # products of whatever is there, which nobody reads.
        done = i == num_pairs
        more = tile + gl.num_programs(0) < num_tiles
        if done:
            if more:
                mbarrier.wait(bar.index(QUERIES), turn ^ 1)
                fence_async_shared()
                mbarrier.wait(bar.index(READY_0L), phase)
        else:
            mbarrier.wait(bar.index(READY_0L), phase)
        next_s = gl.zeros([64, 64], gl.float32, SCORES)
        keys = keys_l.index(zero).permute((1, 0))
        next_s = warpgroup_mma(q.index(zero), keys, next_s, use_acc=False, is_async=True)
        acc0, acc1, next_s = warpgroup_mma_wait(1, deps=[flying0, flying1, next_s])
        mbarrier.arrive(bar.index(FREE_1L), count=1)
        if done:
            store_half(tile, turn, acc0, acc1, m, l, sums, bar, results, shape, 0)
            acc0 = gl.zeros([64, 128], gl.float32, SUMS)
            acc1 = gl.zeros([64, 128], gl.float32, SUMS)
            m = gl.full([64], LOWEST, gl.float32, SCORE_ROWS)
            l = gl.zeros([64], gl.float32, SCORE_ROWS)
            if more:
                mbarrier.wait(bar.index(READY_0R), phase)
        else:
            mbarrier.wait(bar.index(READY_0R), phase)
        keys = keys_r.index(zero).permute((1, 0))
        next_s = warpgroup_mma(q.index(zero + 1), keys, next_s, is_async=True)
        if REST > 0:
            keys_rest = rest.index(zero).permute((1, 0))
            next_s = warpgroup_mma(q_rest, keys_rest, next_s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[next_s])
        if done:
            tile += gl.num_programs(0)
            turn = turn ^ 1
            i = 0
            if more:
                num_pairs, first = read_range(found, bar, turn)
                limit = limits.load(SCORE_ROWS)


@gluon.jit
def right(
    num_tiles, q, q_rest, keys_l, keys_r, rest, highest, sums, valid, bar, results, shape, limits,
    found, scale_log2, REST: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    phase = 0
    turn = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        acc0 = gl.zeros([64, 128], gl.float32, SUMS)
        acc1 = gl.zeros([64, 128], gl.float32, SUMS)
        m = gl.full([64], LOWEST, gl.float32, SCORE_ROWS)
        l = gl.zeros([64], gl.float32, SCORE_ROWS)
        mbarrier.wait(bar.index(QUERIES), turn)
        fence_async_shared()
        num_pairs, first = read_range(found, bar, turn)
        limit = limits.load(SCORE_ROWS)
        for i in range(num_pairs):
            zero = opaque_zero(i)
            s = gl.zeros([64, 64], gl.float32, SCORES)
            mbarrier.wait(bar.index(READY_1R), phase)
            keys = keys_r.index(zero + 1).permute((1, 0))
            s = warpgroup_mma(q.index(zero + 1), keys, s, use_acc=False, is_async=True)
            mbarrier.wait(bar.index(READY_1L), phase)
            keys = keys_l.index(zero + 1).permute((1, 0))
            s = warpgroup_mma(q.index(zero), keys, s, is_async=True)
            if REST > 0:
                s = warpgroup_mma(q_rest, rest.index(zero + 1).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            if i + 1 == num_pairs:
                mbarrier.arrive(bar.index(SCORED), count=1)
            mbarrier.wait(bar.index(VALID_1), phase)
            at = first + i * 128 + 64
            scores = masked_scores(s, valid.index(1), limit, at, scale_log2, CAUSAL)
            m_1 = gl.max(scores, 1)
            mbarrier.wait(bar.index(MAX_0), phase)
            m_1 = gl.maximum(m_1, highest.load(SCORE_ROWS))
            highest.store(m_1)
            mbarrier.arrive(bar.index(MAX_1), count=1)
            p = gl.exp2(scores - m_1[:, None])
            factor = gl.exp2(m - m_1)
            m = m_1
            l = l * factor + gl.sum(p, 1)
            acc0 = shrink(acc0, factor)
            acc1 = shrink(acc1, factor)
            weights = to_bf16(p)
            own = gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2))
            values = keys_r.index(zero + 1)
            acc0 = warpgroup_mma(own, values.slice(0, 128, dim=1), acc0, is_async=True)
            acc1 = warpgroup_mma(own, values.slice(128, 128, dim=1), acc1, is_async=True)
            rest.index(zero + 1).store(weights)
            fence_async_shared()
            mbarrier.arrive(bar.index(WEIGHTS_1), count=1)
            mbarrier.wait(bar.index(WEIGHTS_0), phase)
            others = rest.index(zero)
            values = keys_r.index(zero)
            acc0 = warpgroup_mma(others, values.slice(0, 128, dim=1), acc0, is_async=True)
            acc1 = warpgroup_mma(others, values.slice(128, 128, dim=1), acc1, is_async=True)
            acc0, acc1 = warpgroup_mma_wait(2, deps=[acc0, acc1])
            mbarrier.arrive(bar.index(FREE_1R), count=1)
            acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
            mbarrier.arrive(bar.index(FREE_0R), count=1)
            phase = phase ^ 1
        store_half(tile, turn, acc0, acc1, m, l, sums, bar, results, shape, 1)
        turn = turn ^ 1


@gluon.jit
def store_half(
    tile, turn, acc0, acc1, m, l, sums, bar, results, shape, HALF: gl.constexpr
):  # fmt: skip
    """Normalise half of the weighted values and store it; the left half's warps store the rest."""
    sums.index(HALF).store(l)
    mbarrier.arrive(bar.index(SUM), count=1)
    mbarrier.wait(bar.index(SUM), turn)
    l = l + sums.index(1 - HALF).load(SCORE_ROWS)
    begin, split, request, first = place_of(tile, shape)
    token, head, real = heads_of(begin, shape, SCORE_ROWS)
    if HALF == 0:
        lse = results.lse + split.to(gl.int64) * results.lse_split + request * results.lse_request
        lse_rows = (first + token) * results.lse_token + head
        gl.store(lse + lse_rows, (m + gl.log2(l)) * LN2, mask=real)  # log2(0) is -inf
        if results.max_logits is not None:
            highest = gl.where(l == 0, float("-inf"), m * LN2)
            rows = request * results.max_logits_request + head
            gl.store(results.max_logits + rows, highest, mask=real)
    empty = l == 0
    if results.attn_sink is not None:
        sink = gl.load(results.attn_sink + head, mask=real, other=0.0)
        l += gl.exp2(sink * LOG2E - m)
    factor = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, l))
    out = results.out + split.to(gl.int64) * results.out_split + request * results.out_request
    store_columns(shrink(acc0, factor), out + HALF * 256, begin, first, results, shape)
    store_columns(shrink(acc1, factor), out + (HALF * 256 + 128), begin, first, results, shape)


@gluon.jit
def store_columns(values, out, begin, first, results, shape):
    """128 columns of the tile's rows."""
    if results.out.dtype.element_ty == gl.bfloat16:
        pieces = to_bf16(values).reshape([64, 2, 64]).permute((0, 2, 1)).split()
        store_rows(gl.convert_layout(pieces[0], STORE), out, begin, first, results, shape)
        store_rows(gl.convert_layout(pieces[1], STORE), out + 64, begin, first, results, shape)
    else:
        store_rows(values, out, begin, first, results, shape)


@gluon.jit
def store_rows(values, out, begin, first, results, shape):
    """Some columns of the tile's rows."""
    LAYOUT: gl.constexpr = values.type.layout
    token, head, real = heads_of(begin, shape, gl.SliceLayout(1, LAYOUT))
    rows = (first + token) * results.out_token + head * results.out_head
    dims = gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))
    gl.store(out + rows[:, None] + dims[None, :], values, mask=real[:, None])


@gluon.jit
def load_keys(keys, at, last, L: gl.constexpr, PAGED: gl.constexpr):
    """Slots of the keys ``at``; or, if ``keys`` are the pages of a request, their pages."""
    return gl.load(keys + (at // L.page_size if PAGED else at), mask=at < last, other=-1)


@gluon.jit
def key_rows(rows, key, at, L: gl.constexpr, PAGED: gl.constexpr):
    """Where the rows of loaded keys start, in elements, and which of them count."""
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
def copy_pair(
    rows, key_0, key_1, at, keys_l, keys_r, rest, valid, bar, phase,
    L: gl.constexpr, PAGED: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """Copy two blocks, each half once it is free."""
    dims = gl.arange(0, 256, COPY_COLS)[None, :]
    rest_dims = 512 + gl.arange(0, 64, COPY_COLS)[None, :]
    row_0, valid_0 = key_rows(rows, key_0, at, L, PAGED)
    row_1, valid_1 = key_rows(rows, key_1, at + 64, L, PAGED)
    row_0 = rows.bf16 + row_0[:, None]
    row_1 = rows.bf16 + row_1[:, None]
    mbarrier.wait(bar.index(FREE_0L), phase)
    async_load(keys_l.index(0), row_0 + dims, mask=valid_0[:, None])
    async_copy.mbarrier_arrive(bar.index(READY_0L), increment_count=False)
    mbarrier.wait(bar.index(FREE_1R), phase)
    async_load(keys_r.index(1), row_1 + (256 + dims), mask=valid_1[:, None])
    async_copy.mbarrier_arrive(bar.index(READY_1R), increment_count=False)
    mbarrier.wait(bar.index(FREE_0R), phase)
    async_load(keys_r.index(0), row_0 + (256 + dims), mask=valid_0[:, None])
    if REST > 0:
        async_load(rest.index(0), row_0 + rest_dims, mask=valid_0[:, None])
    async_copy.mbarrier_arrive(bar.index(READY_0R), increment_count=False)
    mbarrier.wait(bar.index(FREE_1L), phase)
    async_load(keys_l.index(1), row_1 + dims, mask=valid_1[:, None])
    if REST > 0:
        async_load(rest.index(1), row_1 + rest_dims, mask=valid_1[:, None])
    async_copy.mbarrier_arrive(bar.index(READY_1L), increment_count=False)
    valid.index(0).store(valid_0.to(gl.int8))
    mbarrier.arrive(bar.index(VALID_0), count=1)
    valid.index(1).store(valid_1.to(gl.int8))
    mbarrier.arrive(bar.index(VALID_1), count=1)


@gluon.jit
def load_page(rows, keys, at, last, L: gl.constexpr):
    """Page of the keys from ``at`` on, -1 if there is none."""
    page = load_keys(keys, at, last, L, True)
    real = (page >= 0) & (page < rows.num_slots // L.page_size)
    return gl.where(real, page, -1).to(gl.int32)


@gluon.jit
def copy_half(
    pages, page, row, half, rest, free, ready, phase, START: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """Copy half of a block, and the last dims with one of them, once it is free; zeros of no page.

    The phase ends when all has arrived, so that what to expect can be told behind the copies.
    """
    mbarrier.wait(free, phase)
    half = reinterpret(half, gl.bfloat16, [4, 64, 64], TILE)
    for j in gl.static_range(4):
        part = reinterpret(half.index(j), gl.bfloat16, [1, 64, 64], PAGE_TILE)
        tma_load(pages, [page, row, START + 64 * j], ready, part)
    if REST > 0:
        rest = reinterpret(rest, gl.bfloat16, [1, 64, 64], PAGE_TILE)
        tma_load(pages, [page, row, 512], ready, rest)
    mbarrier.expect(ready, 64 * 2 * (256 + REST))
    mbarrier.arrive(ready, count=127)


@gluon.jit
def fetch_pair(rows, page_0, page_1, at, shape, L: gl.constexpr):
    """Bring two blocks that several tiles share into L2, each by a thread."""
    thread = gl.arange(0, 128, THREADS)
    page = gl.where(thread == 0, page_0, page_1)
    row = (at + thread * 64) % L.page_size
    start = page.to(gl.int64) * L.bf16_strides[0] + row.to(gl.int64) * L.bf16_strides[1]
    some = (thread < 2) & (page >= 0) & (shape.num_rows > 64)
    gl.inline_asm_elementwise(
        """{
            .reg .pred some; setp.ne.s32 some, $2, 0; mov.b32 $0, 0;
            @some cp.async.bulk.prefetch.L2.global [$1], $2;
        }""",
        "=r,l,r",
        [(rows.bf16 + start).to(gl.int64), gl.where(some, 64 * 2 * L.head_dim, 0)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def copy_pages(
    rows, pages, keys, first, last, shape, keys_l, keys_r, rest, valid, bar, phase,
    L: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """Copy the pairs of blocks that are all there, a page or part of one each."""
    ones = gl.full([64], 1, gl.int8, COPY_ROWS)
    at = first
    page_0 = load_page(rows, keys, at, last, L)
    page_1 = load_page(rows, keys, at + 64, last, L)
    for _ in range((last - first) // 128):
        row_0 = at % L.page_size
        row_1 = (at + 64) % L.page_size
        copy_half(
            pages, page_0, row_0, keys_l.index(0), rest.index(0),
            bar.index(FREE_0L), bar.index(READY_0L), phase, 0, 0,
        )  # fmt: skip
        copy_half(
            pages, page_1, row_1, keys_r.index(1), rest.index(1),
            bar.index(FREE_1R), bar.index(READY_1R), phase, 256, 0,
        )  # fmt: skip
        copy_half(
            pages, page_0, row_0, keys_r.index(0), rest.index(0),
            bar.index(FREE_0R), bar.index(READY_0R), phase, 256, REST,
        )  # fmt: skip
        copy_half(
            pages, page_1, row_1, keys_l.index(1), rest.index(1),
            bar.index(FREE_1L), bar.index(READY_1L), phase, 0, REST,
        )  # fmt: skip
        valid.index(0).store(gl.where(page_0 >= 0, ones, 0))
        mbarrier.arrive(bar.index(VALID_0), count=1)
        valid.index(1).store(gl.where(page_1 >= 0, ones, 0))
        mbarrier.arrive(bar.index(VALID_1), count=1)
        phase = phase ^ 1
        at += 128
        page_0 = load_page(rows, keys, at, last, L)
        page_1 = load_page(rows, keys, at + 64, last, L)
        if L.bf16_strides[1] == L.head_dim:
            fetch_pair(rows, page_0, page_1, at, shape, L)
    return at, phase


@gluon.jit
def produce(
    num_tiles, q, q_request, q_token, q_head, rows, pages, stream, shape, q_tile, q_rest,
    keys_l, keys_r, rest, valid, bar, limits, found,
    L: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr, REST: gl.constexpr,
):  # fmt: skip
    """Copy what the tiles of a program need, each part as soon as there is room."""
    phase = 1
    turn = 1
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        begin, split, request, token = place_of(tile, shape)
        keys = stream.keys + request * stream.keys_request + token * stream.keys_token
        mbarrier.wait(bar.index(SCORED), turn)
        turn = turn ^ 1
        copy_queries(tile, q_tile.index(0), q, q_request, q_token, q_head, shape, 0, 256)
        copy_queries(tile, q_tile.index(1), q, q_request, q_token, q_head, shape, 256, 256)
        if REST > 0:
            copy_queries(tile, q_rest, q, q_request, q_token, q_head, shape, 512, REST)
        async_copy.mbarrier_arrive(bar.index(QUERIES), increment_count=False)
        end = store_limits(limits, stream, shape, begin, request, CAUSAL)
        steps = gl.cdiv(gl.cdiv(end, 64), shape.num_splits)
        first = split * steps * 64
        last = gl.minimum(first + steps * 64, end)
        if pages is not None:
            store_range(found, bar, first, last)
            at, phase = copy_pages(
                rows, pages, keys, first, last, shape, keys_l, keys_r, rest, valid, bar,
                phase, L, REST,
            )  # fmt: skip
            if (at < last) | (at == first):
                # Rows behind the last key, which may be NaN, are not read.
                rest_at = at + gl.arange(0, 64, COPY_ROWS)
                key_0 = load_keys(keys, rest_at, last, L, PAGED)
                key_1 = load_keys(keys, rest_at + 64, last, L, PAGED)
                copy_pair(
                    rows, key_0, key_1, rest_at, keys_l, keys_r, rest, valid, bar, phase,
                    L, PAGED, REST,
                )  # fmt: skip
                phase = phase ^ 1
        else:
            at = first + gl.arange(0, 64, COPY_ROWS)
            key_0 = load_keys(keys, at, last, L, PAGED)
            key_1 = load_keys(keys, at + 64, last, L, PAGED)
            copy_pair(
                rows, key_0, key_1, at, keys_l, keys_r, rest, valid, bar, phase, L, PAGED, REST
            )  # fmt: skip
            phase = phase ^ 1
            # While these are under way, how long the list really is.
            if not PAGED:
                last = end_of(keys, first, last, rows.num_slots, 2048)
            num_pairs = store_range(found, bar, first, last)
            key_0 = load_keys(keys, at + 128, last, L, PAGED)
            key_1 = load_keys(keys, at + 192, last, L, PAGED)
            for _ in range(1, num_pairs):
                at += 128
                copy_pair(
                    rows, key_0, key_1, at, keys_l, keys_r, rest, valid, bar, phase, L, PAGED, REST
                )  # fmt: skip
                key_0 = load_keys(keys, at + 128, last, L, PAGED)
                key_1 = load_keys(keys, at + 192, last, L, PAGED)
                phase = phase ^ 1


@gluon.constexpr_function
def arrivals(b):
    """Arrivals that a barrier waits for: the copies of every thread arrive by themselves."""
    if b < FREE_0L.value or b == QUERIES.value:
        return 128
    return 2 if b in (SUM.value, SCORED.value) else 1


@gluon.jit(
    do_not_specialize=["num_tiles"],
    do_not_specialize_on_alignment=["group_tokens", "num_splits"],  # a 1 is worth a kernel
)
def _attend(
    num_tiles, q, q_request, q_token, q_head, rows, pages, stream, results, num_heads,
    num_rows, group_tokens, num_splits, scale_log2,
    L: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr, MIXED: gl.constexpr,
):  # fmt: skip
    """Tiles of 64 rows of a group and a split of its keys.

    ``pages`` is a descriptor of the cache, if a block lies within a page. ``MIXED``:
    the rows of a tile may be of several tokens, of which each sees keys of its own.
    """
    shape = Shape(num_heads, num_rows, group_tokens, num_splits)
    REST: gl.constexpr = L.head_dim - 512
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    q_rest = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    keys_l = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    keys_r = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    rest = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    highest = gl.allocate_shared_memory(gl.float32, [64], PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    valid = gl.allocate_shared_memory(gl.int8, [2, 64], PLAIN)
    limits = gl.allocate_shared_memory(gl.int32, [64], PLAIN)
    found = gl.allocate_shared_memory(gl.int32, [2, 1], PLAIN)
    bar = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(NUM_BARRIERS):
        mbarrier.init(bar.index(b), count=arrivals(b))
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()  # as in kernels/common/early.py: all above needs nobody's results
    gl.warp_specialize(
        [
            (left, (num_tiles, q_tile, q_rest, keys_l, keys_r, rest, highest, sums, valid, bar,
                    results, shape, limits, found, scale_log2, REST, MIXED)),
            (right, (num_tiles, q_tile, q_rest, keys_l, keys_r, rest, highest, sums, valid, bar,
                     results, shape, limits, found, scale_log2, REST, MIXED)),
            (produce, (num_tiles, q, q_request, q_token, q_head, rows, pages, stream, shape,
                       q_tile, q_rest, keys_l, keys_r, rest, valid, bar, limits, found, L, PAGED,
                       CAUSAL, REST)),
        ],
        [4, 4],
        [208, 64],
    )  # fmt: skip


def attend(
    q: Tensor,
    q_strides: tuple[int, int, int],
    cache: PagedCache,
    stream: Stream,
    results: Results,
    shape: Shape,
    softmax_scale: float,
    *,
    num_groups: int,
    paged: bool = False,
    causal: bool = False,
) -> None:
    """Launch over ``num_groups`` groups of rows. Strides: of a request, a token and a head."""
    num_tiles = num_groups * -(-shape.num_rows // 64) * shape.num_splits
    rows, layout = cache_arguments(cache)
    pages = None
    if paged and cache.page_size % 64 == 0:
        size, strides = list(rows.bf16.shape), list(rows.bf16.stride())
        pages = TensorDescriptor(rows.bf16, size, strides, [1, 64, 64], PAGE_TILE.value)
    _attend[(min(num_tiles, num_multiprocessors(q.device)),)](
        num_tiles,
        q,
        *(stride // 8 for stride in q_strides),
        rows,
        pages,
        stream,
        results,
        *shape,
        softmax_scale * LOG2E.value,
        L=layout,
        PAGED=paged,
        CAUSAL=causal,
        MIXED=causal and shape.num_heads % 64 > 0,
        num_warps=4,
        launch_pdl=True,
    )

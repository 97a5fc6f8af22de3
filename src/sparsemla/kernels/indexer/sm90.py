"""Indexer scores on Hopper: swap-AB FP8 MMAs, keys on M and heads of some query tokens on N.

``score[t, n] = scale[n] * sum_h w[t, h] * relu(<q[t, h], k[n]>)`` for the keys that token t sees,
-inf for all others. A *group* has as many query tokens of one request as fit N with their heads,
256 at most. A *tile* has 64 keys, or 128 paged keys if a group has up to 128 heads. The grid has
one CTA per multiprocessor. Each CTA computes the number of tiles of all groups from the tokens'
ranges and takes an equal share. So a share may begin or end within a group.

In a CTA, the tiles of a share alternate between two consumer warpgroups. An element of the
accumulator costs a thread one maximum and one multiply-add with the head weight. The heads of a
token are spread over four lanes; their partial sums are added once per tile. With 256 heads on N,
the consumers use the tensor cores alternately: one sums over the heads while the other's MMA runs.
Smaller MMAs wait for memory, and this order would only delay them.

Time line of two tiles with 256 heads:

    producer    copy keys and scales up to 512 keys ahead; Q and head weights a group ahead
    consumer 0  QK MMA, tile n         | ReLU, sum over heads, store | QK MMA, tile n + 2
    consumer 1  sum of n - 1, store    | QK MMA, tile n + 1          | ReLU, sum over heads
    filler      -inf in the tiles that no token sees, and the ends of ragged requests' tokens

Barriers:

    barrier    number     arrivals                            waits       guards
    q_full     2          2, producer: TMA and head weights   consumers   Q, head weights of a group
    q_empty    2          2, both consumers                   producer    their stage, for reuse
    k_full     1 a stage  1, producer's TMA; with scales      consumer    keys, scales of a tile
                          32 more, its cp.async copies
    k_empty    1 a stage  1, the tile's consumer              producer    their stage, for reuse
    mma_order  2          1, the other consumer               consumer    the tensor cores
    warm       1          1, TMA of a page out of range       all         the descriptor of the keys

The number of stages is a multiple of the number of consumers, so each stage has one consumer.
Warps: consumers 2 x 4, producer 1, filler 2; the last two are limited to 56 registers per thread.
Shared memory for 256 heads of 128 dims, in KiB: Q 2 x 32, keys 64, head weights 2, scales 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language import PropagateNan
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsemla.cache import PagedCache
from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.gluon import async_load, descriptor, reinterpret, tma_load
from sparsemla.kernels.common.hopper import PLAIN
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.common.paged import page_and_row
from sparsemla.kernels.indexer.arguments import IndexerScores, IndexerScoresPaged, IndexerTopk
from sparsemla.kernels.indexer.groups import (
    Queries,
    locate_group,
    most_groups,
    partition_tiles,
    visible_keys,
    visible_tiles,
)
from sparsemla.kernels.indexer.triton import Scorer, Selection, select_in_chunks
from sparsemla.kernels.topk.arguments import SelectTopk
from sparsemla.kernels.topk.schedule import refuse_registers
from sparsemla.kernels.topk.sm90 import candidates, registers

COPY_KEYS = gl.constexpr(64)
"""Keys of one TMA copy; a page holds a multiple of them."""
CONSUMERS = gl.constexpr(2)
Q_STAGES = gl.constexpr(2)
WARP = gl.constexpr(32)
MAX_HEADS = 256
"""Most heads of a group, the longest N of an MMA."""
PIPELINE_KEYS = 512
"""Keys in flight, 64 KiB: fewer do not saturate memory, twice as many are slower again.

The number of their tiles is a multiple of the number of consumers, so that a consumer sees every
phase of the barriers of its stages.
"""

MINUS_INF = gl.constexpr(float("-inf"))
PROPAGATE_NAN = gl.constexpr(PropagateNan.ALL)
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
FILL = gl.constexpr(gl.BlockedLayout([1], [32], [2], [0]))
FILL_COLUMNS = gl.constexpr(256)
FILL_AT_ONCE = gl.constexpr(4096)


class Keys(NamedTuple):
    """Scales of the keys, and the page table; contiguous keys are a single page."""

    scales: Tensor | None
    scale_page: int
    scale_row: int
    page_table: Tensor | None
    table_request: int
    table_width: int
    num_pages: int


class GroupShape(NamedTuple):
    """Tokens of a group, padded heads of a token, padded dims of a head."""

    tokens: int
    block_h: int
    block_d: int


class Tiling(NamedTuple):
    """Compile-time constants.

    Args:
        tokens: query tokens of a group.
        heads: heads of a token.
        block_h: heads, padded.
        block_d: dims, padded.
        mmas: MMAs of a tile; they share its tokens equally.
        block_n: keys of a tile, one or two TMA copies.
        stages: tiles in flight.
        own_ends: whether ``row_ends`` has an entry per token, instead of per request.
        causal: the last token of a request sees all of its tokens, its predecessor one less.
        ratio: tokens for every key.
        page_size: keys of a page, 0 if they are contiguous.
    """

    tokens: int
    heads: int
    block_h: int
    block_d: int
    mmas: int
    block_n: int
    stages: int
    own_ends: bool
    causal: bool
    ratio: int
    page_size: int


class SharedMemory(NamedTuple):
    """Shared memory of a CTA. The module's docstring has the table of the barriers."""

    q: Tensor  # [Q_STAGES, BLOCK_M, BLOCK_D] e4m3; producer, by TMA -> consumers, in the QK MMA
    head_weights: Tensor  # [Q_STAGES, BLOCK_M] float32; producer -> consumers
    k: Tensor  # [STAGES, BLOCK_N, BLOCK_D] e4m3; producer, by TMA -> consumers, in the QK MMA
    scales: Tensor  # [STAGES, BLOCK_N] float32; producer, by cp.async -> consumers
    q_full: Tensor  # this and the following fields are arrays of barriers
    q_empty: Tensor
    k_full: Tensor
    k_empty: Tensor
    mma_order: Tensor


@triton.constexpr_function
def operand_layout(block_d, rank):
    return gl.NVMMASharedLayout(block_d, 8, rank)


@triton.constexpr_function
def partials_layout(tokens, keys):
    """Partial sums ``[keys, tokens, 4]``, all four of a score in one thread.

    Four lanes of an MMA's accumulator have the same keys. In this layout, each of them has its own
    tokens, or two of them have the upper eight keys.
    """
    bits = [[0, 1 << bit, 0] for bit in range(tokens.bit_length() - 1)]
    bits += [[8, 0, 0], [0, 0, 0]]
    more = [base for base in bits[2:] if any(base)] + [[64, 0, 0]] * (keys == 128)
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], *more],
        [*bits[:2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [keys, tokens, 4],
    )


@gluon.jit
def copy_queries(q, queries, group, q_tile, w_tile, full, T: gl.constexpr):
    """Start the TMA copy of a group's heads; store their head weights."""
    TOKENS: gl.constexpr = T.tokens
    BLOCK_H: gl.constexpr = T.block_h
    BLOCK_D: gl.constexpr = T.block_d
    mbarrier.expect(full, TOKENS * BLOCK_H * BLOCK_D)
    shape: gl.constexpr = [1, TOKENS, BLOCK_H, BLOCK_D]
    to = reinterpret(q_tile, gl.float8e4nv, shape, operand_layout(BLOCK_D, 4))
    request = group.request if queries.offsets is None else 0
    tma_load(q, [request, group.first, 0, 0], full, to)
    i = gl.arange(0, TOKENS * BLOCK_H, LANES)
    token = group.first + i // BLOCK_H
    head = i % BLOCK_H
    at = queries.head_weights + token.to(gl.int64) * queries.head_weights_token + head
    if queries.offsets is None:
        at += group.request.to(gl.int64) * queries.head_weights_request
    w = gl.load(at, mask=(token < group.stop) & (head < T.heads), other=0.0)
    w_tile.store(w.to(gl.float32))
    mbarrier.arrive(full, count=1)


@gluon.jit
def page_ids(keys, request, n, T: gl.constexpr):
    """Pages of keys of a request, -1 past the end of the page table."""
    column = n // T.page_size
    at = keys.page_table + request.to(gl.int64) * keys.table_request + column
    return gl.load(at, mask=column < keys.table_width, other=-1)


@gluon.jit
def copy_keys(k, keys, page, row, num_scales, key_tile, scale_tile, full, T: gl.constexpr):
    """Start to copy keys from a row of a page, and their scales. A missing page yields zeros."""
    tma_load(k, [page, row, 0], full, key_tile)
    if keys.scales is not None:
        i = gl.arange(0, COPY_KEYS, LANES)
        at = keys.scales + page.to(gl.int64) * keys.scale_page + (row + i) * keys.scale_row
        async_load(scale_tile, at, mask=i < num_scales)


@gluon.jit
def copies_of(keys, T: gl.constexpr):
    """The stages of the keys, as the tiles of single TMA copies."""
    shape: gl.constexpr = [T.stages * T.block_n // COPY_KEYS, 1, COPY_KEYS, T.block_d]
    return reinterpret(keys, gl.float8e4nv, shape, operand_layout(T.block_d, 3))


@gluon.jit
def stage_of(step, STAGES: gl.constexpr):
    """Stage and parity of a step in a pipeline; STAGES must be a power of two."""
    return step & (STAGES - 1), (step & STAGES) // STAGES


@gluon.jit
def producer(q, k, queries, keys, share, smem, T: gl.constexpr):
    """The producer warp: it copies Q, head weights, keys and scales."""
    index, skip, left = share
    COPIES: gl.constexpr = T.block_n // COPY_KEYS
    AT_ONCE: gl.constexpr = WARP // COPIES
    key_copies = copies_of(smem.k, T)
    scale_copies = reinterpret(smem.scales, gl.float32, [T.stages * COPIES, COPY_KEYS], PLAIN)
    lane = gl.arange(0, WARP, LANES)
    num_tiles = left * 0
    num_groups = left * 0
    while left > 0:
        group = locate_group(queries, index, T)
        first_tile, tiles = visible_tiles(queries, group, T)
        tiles = gl.minimum(tiles - skip, left)
        if tiles > 0:
            stage, parity = stage_of(num_groups, Q_STAGES)
            mbarrier.wait(smem.q_empty.index(stage), parity ^ 1)
            copy_queries(
                q,
                queries,
                group,
                smem.q.index(stage),
                smem.head_weights.index(stage),
                smem.q_full.index(stage),
                T,
            )
            num_groups += 1
            first_tile += skip
            last_tile = first_tile + tiles
            if T.page_size > 0:
                n = (first_tile * COPIES + lane) * COPY_KEYS
                following = page_ids(keys, group.request, n, T)
            for base in range(first_tile, last_tile, AT_ONCE):
                if T.page_size > 0:
                    # Each lane loads the page of one of the next 32 copies. With a load per tile,
                    # every iteration would wait for it.
                    real = (following >= 0) & (following < keys.num_pages)
                    pages = gl.where(real, following, -1).to(gl.int32)
                    n = ((base + AT_ONCE) * COPIES + lane) * COPY_KEYS
                    following = page_ids(keys, group.request, n, T)
                for tile in range(base, gl.minimum(base + AT_ONCE, last_tile)):
                    stage, parity = stage_of(num_tiles, T.stages)
                    mbarrier.wait(smem.k_empty.index(stage), parity ^ 1)
                    mbarrier.expect(smem.k_full.index(stage), T.block_n * T.block_d)
                    for i in gl.static_range(COPIES):
                        row = tile * T.block_n + i * COPY_KEYS
                        if T.page_size > 0:
                            mine = lane == (tile - base) * COPIES + i
                            page = gl.sum(gl.where(mine, pages, 0), 0)
                            row = row % T.page_size
                            num_scales = gl.where(page < 0, 0, COPY_KEYS)
                        else:
                            page = tile * 0
                            num_scales = queries.num_keys - row
                        copy_keys(
                            k,
                            keys,
                            page,
                            row,
                            num_scales,
                            key_copies.index(stage * COPIES + i),
                            scale_copies.index(stage * COPIES + i),
                            smem.k_full.index(stage),
                            T,
                        )
                    if keys.scales is not None:
                        async_copy.mbarrier_arrive(smem.k_full.index(stage), increment_count=False)
                    num_tiles += 1
        left -= gl.maximum(tiles, 0)
        skip = 0
        index += 1


@gluon.jit
def halves(x):
    """The two halves of the last dim."""
    HALF: gl.constexpr = x.shape[2] // 2
    return gl.split(x.reshape(x.shape[0], x.shape[1], 2, HALF).permute(0, 1, 3, 2))


@gluon.jit
def add_weighted(total, x, w):
    """``total + sum(x * w)`` over the last dim, as a chain of multiply-adds."""
    if x.shape[2] > 1:
        x0, x1 = halves(x)
        w_0, w_1 = halves(w)
        total = add_weighted(add_weighted(total, x0, w_0), x1, w_1)
    elif total is None:
        total = x * w
    else:
        total = gl.fma(x, w, total)
    return total


@gluon.jit
def split_by_lane(x, T: gl.constexpr):
    """Columns of an accumulator as ``[rows, tokens * 4, heads of a lane]``."""
    TOKENS: gl.constexpr = x.shape[1] // T.block_h
    x = x.reshape(x.shape[0], TOKENS, T.block_h // 8, 4, 2).permute(0, 1, 3, 2, 4)
    return x.reshape(x.shape[0], TOKENS * 4, T.block_h // 4)


@gluon.jit
def sum_heads_of_lanes(acc, w, T: gl.constexpr):
    """``sum_h w[t, h] * relu(acc)`` over the heads of each lane: partials ``[keys, tokens, 4]``."""
    x = split_by_lane(gl.maximum(acc, 0.0, propagate_nan=PROPAGATE_NAN), T)
    w = split_by_lane(w[None, :].broadcast_to(T.block_n, w.shape[0]), T)
    return add_weighted(None, x, w).reshape(T.block_n, acc.shape[1] // T.block_h, 4)


@gluon.jit
def load_head_weights(smem, stage, MMA: gl.constexpr, ACC: gl.constexpr):
    """The head weights of an MMA, as the columns of its accumulator."""
    WIDTH: gl.constexpr = ACC.instr_shape[1]
    weights = smem.head_weights.index(stage).slice(MMA * WIDTH, WIDTH)
    return weights.load(gl.SliceLayout(0, ACC))


@gluon.jit
def qk_mma(keys, q_tile, MMA: gl.constexpr, ACC: gl.constexpr):
    """Issue a QK MMA: a tile of keys times the heads of some tokens."""
    WIDTH: gl.constexpr = ACC.instr_shape[1]
    BLOCK_N: gl.constexpr = keys.shape[0]
    acc = gl.zeros([BLOCK_N, WIDTH], gl.float32, ACC)
    heads = q_tile.slice(MMA * WIDTH, WIDTH).permute((1, 0))
    return warpgroup_mma(keys, heads, acc, use_acc=False, is_async=True)


@gluon.jit
def join_tokens(low, high):
    """Partial sums of the tokens of two MMAs."""
    BLOCK_N: gl.constexpr = low.shape[0]
    TOKENS: gl.constexpr = 2 * low.shape[1]
    return gl.join(low, high).permute(0, 3, 1, 2).reshape(BLOCK_N, TOKENS, 4)


@triton.constexpr_function
def orders_mmas(T):
    """Whether the consumers use the tensor cores alternately: only with the longest N."""
    return T.tokens * T.block_h == MAX_HEADS


@gluon.jit
def consumer(queries, keys, share, smem, T: gl.constexpr, INDEX: gl.constexpr):
    """A consumer warpgroup: it scores every second tile of the share."""
    index, skip, left = share
    BLOCK_N: gl.constexpr = T.block_n
    MMAS: gl.constexpr = T.mmas
    ORDERED: gl.constexpr = orders_mmas(T)
    WIDTH: gl.constexpr = T.tokens * T.block_h // MMAS
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    PARTIALS: gl.constexpr = partials_layout(T.tokens, BLOCK_N)
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, PARTIALS))
    TOKENS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, PARTIALS))
    in_tile = 0
    if BLOCK_N > COPY_KEYS:
        in_tile = gl.arange(0, BLOCK_N, ROWS)  # keys of a tile may lie in different pages
    num_tiles = left * 0
    num_groups = left * 0
    while left > 0:
        group = locate_group(queries, index, T)
        first_tile, tiles = visible_tiles(queries, group, T)
        tiles = gl.minimum(tiles - skip, left)
        if tiles > 0:
            token = group.first + gl.arange(0, T.tokens, TOKENS)
            start, end = visible_keys(queries, group, token, T)
            real = token < group.stop
            out = queries.out + token.to(gl.int64) * queries.out_token
            if queries.offsets is None:
                out += group.request.to(gl.int64) * queries.out_request
            mine = (INDEX + num_tiles) & 1
            base = (first_tile + skip + mine) * BLOCK_N
            if T.page_size > 0:
                following = page_ids(keys, group.request, base + in_tile, T)
            q_stage, parity = stage_of(num_groups, Q_STAGES)
            mbarrier.wait(smem.q_full.index(q_stage), parity)
            w_0 = load_head_weights(smem, q_stage, 0, ACC)
            if MMAS == 2:
                w_1 = load_head_weights(smem, q_stage, 1, ACC)
            for i in range(mine, tiles, CONSUMERS):
                n = base + gl.arange(0, BLOCK_N, ROWS)
                inside = (n[:, None] >= start[None, :]) & (n[:, None] < end[None, :])
                base += CONSUMERS * BLOCK_N
                if T.page_size > 0:
                    real_page = (following >= 0) & (following < keys.num_pages)
                    if BLOCK_N > COPY_KEYS:
                        real_page = real_page[:, None]
                    inside = inside & real_page
                    following = page_ids(keys, group.request, base + in_tile, T)
                stage, parity = stage_of(num_tiles + i, T.stages)
                mbarrier.wait(smem.k_full.index(stage), parity)
                if ORDERED:
                    _, parity = stage_of(num_tiles + i, CONSUMERS)
                    mbarrier.wait(smem.mma_order.index(INDEX), parity ^ (1 - INDEX))
                acc_0 = qk_mma(smem.k.index(stage), smem.q.index(q_stage), 0, ACC)
                if MMAS == 2:
                    acc_1 = qk_mma(smem.k.index(stage), smem.q.index(q_stage), 1, ACC)
                scale = gl.full([BLOCK_N], 1.0, gl.float32, ROWS)
                if keys.scales is not None:
                    scale = smem.scales.index(stage).load(ROWS)
                if MMAS == 2:
                    acc_0, acc_1 = warpgroup_mma_wait(1, deps=[acc_0, acc_1])
                    if ORDERED:
                        mbarrier.arrive(smem.mma_order.index(1 - INDEX), count=1)
                    low = sum_heads_of_lanes(acc_0, w_0, T)
                    acc_1 = warpgroup_mma_wait(0, deps=[acc_1])
                    mbarrier.arrive(smem.k_empty.index(stage), count=1)
                    partials = join_tokens(low, sum_heads_of_lanes(acc_1, w_1, T))
                else:
                    acc_0 = warpgroup_mma_wait(0, deps=[acc_0])
                    if ORDERED:
                        mbarrier.arrive(smem.mma_order.index(1 - INDEX), count=1)
                    mbarrier.arrive(smem.k_empty.index(stage), count=1)
                    partials = sum_heads_of_lanes(acc_0, w_0, T)
                scores = gl.sum(gl.convert_layout(partials, PARTIALS), 2) * scale[:, None]
                gl.store(
                    out[None, :] + n[:, None],
                    gl.where(inside, scores, MINUS_INF),
                    mask=(n < queries.num_keys)[:, None] & real[None, :],
                )
            mbarrier.arrive(smem.q_empty.index(q_stage), count=1)
            num_tiles += tiles
            num_groups += 1
        left -= gl.maximum(tiles, 0)
        skip = 0
        index += 1


@gluon.jit
def fill_columns(row, begin, end):
    """Store -inf in the columns ``[begin, end)`` of a row."""
    for base in range(begin, end, FILL_COLUMNS):
        n = base + gl.arange(0, FILL_COLUMNS, FILL)
        gl.store(row + n, MINUS_INF, mask=n < end)


@gluon.jit
def filler(queries, num_groups, T: gl.constexpr):
    """The filler warps: they store -inf in tiles that no token sees, and the tensor ``rows``."""
    blocks = gl.cdiv(queries.num_keys, FILL_AT_ONCE)
    if queries.rows is not None:
        blocks = 1
    for unit in range(gl.program_id(0), num_groups * blocks, gl.num_programs(0)):
        group = locate_group(queries, unit // blocks, T)
        if queries.rows is not None:
            token = group.first + gl.arange(0, T.tokens, FILL)
            _, end = visible_keys(queries, group, token, T)
            real = token < group.stop
            gl.store(queries.rows + token, end, mask=real)
            gl.store(queries.rows + queries.rows_request + token, group.request, mask=real)
        else:
            first_tile, tiles = visible_tiles(queries, group, T)
            begin = unit % blocks * FILL_AT_ONCE
            end = gl.minimum(begin + FILL_AT_ONCE, queries.num_keys)
            low = gl.minimum(first_tile * T.block_n, end)
            high = gl.maximum((first_tile + tiles) * T.block_n, begin)
            out = queries.out + group.request.to(gl.int64) * queries.out_request
            for token in range(group.first, gl.minimum(group.first + T.tokens, group.stop)):
                row = out + token.to(gl.int64) * queries.out_token
                fill_columns(row, begin, low)
                fill_columns(row, high, end)


@gluon.jit(
    do_not_specialize=["num_groups"],
    do_not_specialize_on_alignment=["first", "rows_request", "num_requests", "query_len"],
)
def score(
    q,
    k,
    queries,
    keys,
    num_groups,
    first,
    rows_request,
    num_requests,
    query_len,
    T: gl.constexpr,
):
    """Scores of groups of query tokens, ``q [B, S, HI, DI]`` against ``k [pages, rows, DI]``."""
    queries = Queries(*queries, first, rows_request, num_requests, query_len)
    BLOCK_M: gl.constexpr = T.tokens * T.block_h
    BLOCK_D: gl.constexpr = T.block_d
    STAGES: gl.constexpr = T.stages
    BLOCK_N: gl.constexpr = T.block_n
    TILE: gl.constexpr = operand_layout(BLOCK_D, 2)
    smem = SharedMemory(
        gl.allocate_shared_memory(gl.float8e4nv, [Q_STAGES, BLOCK_M, BLOCK_D], TILE),
        gl.allocate_shared_memory(gl.float32, [Q_STAGES, BLOCK_M], PLAIN),
        gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BLOCK_N, BLOCK_D], TILE),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_N], PLAIN),
        gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [Q_STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout()),
    )
    warm = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(warm.index(0), count=1)
    for i in gl.static_range(2):
        if orders_mmas(T):  # the compiler reuses the memory of barriers without a wait
            mbarrier.init(smem.mma_order.index(i), count=1)
        mbarrier.init(smem.q_full.index(i), count=2)
        mbarrier.init(smem.q_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(STAGES):
        mbarrier.init(smem.k_full.index(i), count=1 if keys.scales is None else 1 + WARP)
        mbarrier.init(smem.k_empty.index(i), count=1)
    # A copy from a page out of range moves no keys, but fetches the descriptor of the keys.
    mbarrier.expect(warm.index(0), COPY_KEYS * BLOCK_D)
    tma_load(k, [-1, 0, 0], warm.index(0), copies_of(smem.k, T).index(0))
    gdc_launch_dependents()
    gdc_wait()  # the prologue above reads nothing that an earlier kernel writes
    share = partition_tiles(queries, num_groups, T)
    mbarrier.wait(warm.index(0), 0)
    mbarrier.invalidate(warm.index(0))  # the compiler reuses its memory from here on
    gl.warp_specialize(
        [
            (consumer, (queries, keys, share, smem, T, 0)),
            (consumer, (queries, keys, share, smem, T, 1)),
            (producer, (q, k, queries, keys, share, smem, T)),
            (filler, (queries, num_groups, T)),
        ],
        [4, 1, 2],
        [224, 56, 56],
    )


def choose_groups(query_len: int, heads: int, dim: int) -> GroupShape:
    """The shape of groups for requests of about ``query_len`` tokens."""
    block_h = max(16, next_power_of_2(heads))
    tokens = max(1, min(MAX_HEADS // block_h, next_power_of_2(query_len)))
    return GroupShape(tokens, block_h, max(32, next_power_of_2(dim)))


def choose_tiling(
    groups: GroupShape, heads: int, own_ends: bool, causal: bool, ratio: int, page_size: int
) -> Tiling:
    """The compile-time constants for groups of this shape."""
    tokens, block_h, block_d = groups
    # Long tiles amortise the fixed cost of a tile; registers have room for them below 256 heads.
    keys = (
        2 * COPY_KEYS.value
        if page_size > 0 and tokens * block_h <= MAX_HEADS // 2
        else COPY_KEYS.value
    )
    mmas, stages = min(2, tokens), PIPELINE_KEYS // keys
    return Tiling(
        tokens, heads, block_h, block_d, mmas, keys, stages, own_ends, causal, ratio, page_size
    )


def launch(
    q: Tensor,
    k: Tensor,
    queries: Queries,
    keys: Keys,
    num_groups: int,
    tiling: Tiling,
) -> None:
    """Launch :func:`score`, one CTA per multiprocessor."""
    d = tiling.block_d
    q_box, k_box = [1, tiling.tokens, tiling.block_h, d], [1, COPY_KEYS.value, d]
    score[(num_multiprocessors(q.device),)](
        descriptor(q, list(q.shape), list(q.stride()), q_box, operand_layout(d, 4)),
        descriptor(k, list(k.shape), list(k.stride()), k_box, operand_layout(d, 3)),
        queries[:-4],
        keys,
        num_groups,
        *queries[-4:],
        tiling,
        num_warps=4,
        launch_pdl=True,
    )


def indexer_scores(call: IndexerScores) -> None:
    q, keys = call.index_q, call.index_k
    num_tokens, num_keys = call.out.shape
    if num_tokens == 0 or num_keys == 0:
        return
    groups = choose_groups(num_tokens, *q.shape[1:])
    queries = Queries.of_ranges(call)
    tiling = choose_tiling(groups, q.shape[1], own_ends=True, causal=False, ratio=1, page_size=0)
    no_pages = Keys(call.index_k_scales, 0, 1, None, 0, 0, 1)
    launch(q[None], keys[None], queries, no_pages, cdiv(num_tokens, tiling.tokens), tiling)


def paged_keys(cache: PagedCache, page_table: Tensor) -> tuple[Tensor, Keys]:
    """The keys of a cache, their scales and the page table."""
    fp8, scales, _ = cache.stored()
    strides = page_and_row(scales)
    table = page_table, page_table.stride(0), page_table.shape[1]
    return fp8.view(torch.float8_e4m3fn), Keys(scales, *strides, *table, cache.num_pages)


def indexer_scores_paged(call: IndexerScoresPaged) -> None:
    q, cache = call.index_q, call.cache
    batch, query_len, heads, dim = q.shape
    if batch == 0 or query_len == 0:
        return
    groups = choose_groups(query_len, heads, dim)
    queries = Queries.of_requests(call)
    own_ends = call.seq_lens.dim() == 2
    tiling = choose_tiling(groups, heads, own_ends, not own_ends, call.ratio, cache.page_size)
    num_groups = batch * cdiv(query_len, tiling.tokens)
    k, keys = paged_keys(cache, call.page_table)
    launch(q, k, queries, keys, num_groups, tiling)


def scorer(call: IndexerTopk) -> Scorer:
    """The function that scores slices of the tokens of ragged requests."""
    q, cache = call.index_q, call.cache
    num_tokens, heads, dim = q.shape
    num_requests = call.page_table.shape[0]
    groups = choose_groups(max(1, num_tokens // max(1, num_requests)), heads, dim)
    tiling = choose_tiling(groups, heads, False, call.causal, call.ratio, cache.page_size)
    k, keys = paged_keys(cache, call.page_table)

    def score_tokens(some: slice, scores: Tensor, rows: Tensor) -> None:
        queries = Queries.of_ragged(call, some, scores, rows)
        num_groups = most_groups(scores.shape[0], tiling.tokens, num_requests)
        launch(q[None, some], k, queries, keys, num_groups, tiling)

    return score_tokens


def _select_topk(call: SelectTopk) -> None:
    """Hopper's selection: in registers where rows fit; these need no lists in the workspace."""
    (candidates if refuse_registers(call) else registers).select_topk(call)


SELECTION = Selection(_select_topk, candidates.schedule_lists)


def indexer_topk(call: IndexerTopk) -> None:
    select_in_chunks(call, scorer(call), SELECTION)

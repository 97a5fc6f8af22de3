"""The dense loss and its gradients: all rows that tokens see, in tiles of 128 tokens and 128 rows.

For a chunk of tokens, with the losses themselves by the portable kernel::

    _tiles      attention of all heads, then scores, of a tile            [n, S] twice
    _queries    dindex_q and dweights of 64 tokens and two heads: the rows pass by
    _keys       dindex_k of 128 rows and some heads: the tokens pass by, in one order for all

Each is persistent, with two consumer warpgroups and a producer warp that copies by TMA. Only tiles
with a row that a token sees are visited; what nobody sees in them has a target and a gradient of 0,
and index keys that no token sees are 0. So no step of the gradients has a mask.

Groups of heads have their own sums of dindex_k, which are added at the end. Their number depends
on the number of rows and heads, not on the chunks, and a chunk goes on where the last one stopped.
So the bits do not depend on the workspace.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import PropagateNan

from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.gluon import reinterpret, tma_load
from sparsemla.kernels.common.hopper import STORE, TILE, TOKEN_TILE, next_stage, store_128
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.losses.arguments import DenseIndexGradients, DenseIndexLoss
from sparsemla.kernels.losses.triton import LOG2E, load_ranges, losses_of_tokens

SIDE = gl.constexpr(128)
"""Tokens and rows of a tile."""
DIM = gl.constexpr(128)
"""Dims of an index head."""
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, ACC, 2))
FLOAT_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
PROPAGATE_NAN = gl.constexpr(PropagateNan.ALL)


class Grid(NamedTuple):
    """The visited tiles of a chunk.

    Args:
        first: int32 ``[n / 128]``, the first visited row tile of each token tile.
        starts: int32 ``[n / 128 + 1]``, visited tiles of earlier token tiles.
        lows, highs: int32 ``[S / 128]``, the token tiles that visit each row tile.
        num_token_tiles: token tiles.
        num_tokens: tokens.
        num_rows: rows.
    """

    first: Tensor
    starts: Tensor
    lows: Tensor
    highs: Tensor
    num_token_tiles: int
    num_tokens: int
    num_rows: int


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _visited_rows(row_starts, row_ends, first, starts, num_tokens, num_rows, BLOCK: tl.constexpr):
    """The first visited row tile of each token tile, and the visited tiles so far."""
    SIDE: tl.constexpr = 128
    num_tiles = tl.cdiv(num_tokens, SIDE)
    total = 0
    tl.store(starts, total)
    for base in range(0, num_tiles, BLOCK):
        tile = base + tl.arange(0, BLOCK)
        token = (tile[:, None] * SIDE + tl.arange(0, SIDE)[None, :]).to(tl.int64)
        start, end = load_ranges(row_starts, row_ends, token, token < num_tokens, num_rows)
        some = start < end
        low = tl.min(tl.where(some, start, num_rows), 1) // SIDE
        high = tl.max(tl.where(some, end, 0), 1)
        count = tl.maximum(tl.cdiv(high, SIDE) - low, 0)
        tl.store(first + tile, low, mask=tile < num_tiles)
        tl.store(starts + tile + 1, total + tl.cumsum(count, 0), mask=tile < num_tiles)
        total += tl.sum(count, 0)


@triton.jit(do_not_specialize=["num_token_tiles"])
def _visiting_tokens(first, starts, lows, highs, num_token_tiles, BLOCK: tl.constexpr):
    """The range of token tiles that visit a row tile; empty if none does."""
    row_tile = tl.program_id(0)
    low, high = num_token_tiles, 0
    for base in range(0, num_token_tiles, BLOCK):
        tile = base + tl.arange(0, BLOCK)
        there = tile < num_token_tiles
        begin = tl.load(first + tile, mask=there, other=0)
        count = tl.load(starts + tile + 1, mask=there, other=0)
        count -= tl.load(starts + tile, mask=there, other=0)
        seen = (row_tile >= begin) & (row_tile < begin + count)
        low = tl.minimum(low, tl.min(tl.where(seen, tile, num_token_tiles), 0))
        high = tl.maximum(high, tl.max(tl.where(seen, tile + 1, 0), 0))
    tl.store(lows + row_tile, low)
    tl.store(highs + row_tile, high)


@gluon.jit
def _load_panel(to, desc, row, head, column, bar, ROWS: gl.constexpr):
    """Start to copy 64 columns of ``ROWS`` tokens or rows of a head; zeros where there are none."""
    tma_load(
        desc, [row, head, column], bar, reinterpret(to, gl.bfloat16, [ROWS, 1, 64], TOKEN_TILE)
    )


@gluon.jit
def _load_index_head(to, desc, row, head, bar):
    """Start to copy all dims of 64 tokens or rows of an index head."""
    panels = reinterpret(to, gl.bfloat16, [2, 64, 64], TILE)
    for j in gl.static_range(2):
        _load_panel(panels.index(j), desc, row, head, j * 64, bar, 64)


@gluon.jit
def _load_given(to, desc, token, row, bar):
    """Start to copy the gradients of the scores of 64 tokens and 64 rows."""
    panels = reinterpret(to, gl.float32, [2, 64, 32], FLOAT_TILE)
    for j in gl.static_range(2):
        tma_load(desc, [token, row + j * 32], bar, panels.index(j))


@gluon.jit
def _num_rounds(num_jobs):
    """Jobs of this CTA, if all CTAs take one in each round, forth and back."""
    full = num_jobs // gl.num_programs(0)
    return full + (_place(full) < num_jobs % gl.num_programs(0)).to(gl.int32)


@gluon.jit
def _place(round):
    """The place of this CTA in a round: jobs get shorter, so the first one is the last next."""
    return gl.where(round % 2 == 0, gl.program_id(0), gl.num_programs(0) - 1 - gl.program_id(0))


@gluon.jit
def _job_of(round):
    return round * gl.num_programs(0) + _place(round)


# ---- _tiles ------------------------------------------------------------------------------------

TILE_STAGES = gl.constexpr(6)


class TilesMemory(NamedTuple):
    """Shared memory of ``_tiles``: stages of 64 dims of a head, 32 KiB each."""

    q: object  # [TILE_STAGES, 128, 64]
    k: object  # [TILE_STAGES, 128, 64]
    full: object  # [TILE_STAGES]
    empty: object  # [TILE_STAGES]


class Heads(NamedTuple):
    """What tokens have for each head: LSE of attention, or weights of the indexer."""

    table: object
    stride: object
    num_heads: object


@gluon.jit
def _tile_of(grid, job):
    """Token tile and row tile of the visited tile number ``job``."""
    low = job * 0
    high = low + grid.num_token_tiles - 1
    while low < high:
        middle = (low + high + 1) // 2
        before = gl.load(grid.starts + middle) <= job
        low = gl.where(before, middle, low)
        high = gl.where(before, high, middle - 1)
    return low, gl.load(grid.first + low) + job - gl.load(grid.starts + low)


@gluon.jit
def _load_stage(smem, stage, phase, q, k, token, row, head, k_head, column):
    """Start to copy a stage once it is empty; returns the next one and its phase."""
    mbarrier.wait(smem.empty.index(stage), phase)
    bar = smem.full.index(stage)
    mbarrier.expect(bar, 2 * SIDE * 64 * 2)
    _load_panel(smem.q.index(stage), q, token, head, column, bar, SIDE)
    _load_panel(smem.k.index(stage), k, row, k_head, column, bar, SIDE)
    return next_stage(stage, phase, TILE_STAGES)


@gluon.jit
def _tiles_producer(
    grid, smem, q, k, index_q, index_k, num_heads, num_index_heads, K_HEADS: gl.constexpr,
    PANELS: gl.constexpr,
):  # fmt: skip
    stage, phase = 0, 1
    visited = gl.load(grid.starts + grid.num_token_tiles)
    for job in range(gl.program_id(0), visited, gl.num_programs(0)):
        token_tile, row_tile = _tile_of(grid, job)
        token, row = token_tile * SIDE, row_tile * SIDE
        for head in range(num_heads):
            for p in gl.static_range(PANELS):
                stage, phase = _load_stage(
                    smem, stage, phase, q, k, token, row, head, head * K_HEADS, p * 64
                )
        for head in range(num_index_heads):
            for p in gl.static_range(2):
                stage, phase = _load_stage(
                    smem, stage, phase, index_q, index_k, token, row, head, 0, p * 64
                )


@gluon.jit
def _logits(W: gl.constexpr, smem, stage, phase, PANELS: gl.constexpr):
    """``q k^T`` of a head, 64 tokens and 128 rows; returns the next stage and its phase."""
    x = gl.zeros([64, SIDE], gl.float32, WIDE)
    last = stage
    for p in gl.static_range(PANELS):
        mbarrier.wait(smem.full.index(stage), phase)
        q, k = smem.q.index(stage).slice(W * 64, 64), smem.k.index(stage).permute((1, 0))
        x = warpgroup_mma(q, k, x, use_acc=p > 0, is_async=True)
        if p > 0:
            x = warpgroup_mma_wait(1, deps=[x])
            mbarrier.arrive(smem.empty.index(last), count=1)
        last = stage
        stage, phase = next_stage(stage, phase, TILE_STAGES)
    x = warpgroup_mma_wait(0, deps=[x])
    mbarrier.arrive(smem.empty.index(last), count=1)
    return x, stage, phase


@gluon.jit
def _tiles_consumer(
    W: gl.constexpr, grid, smem, lse, weights, row_starts, row_ends, target, scores, pitch,
    scale_log2, PANELS: gl.constexpr,
):  # fmt: skip
    """64 tokens of each tile."""
    TOKENS: gl.constexpr = gl.SliceLayout(1, WIDE)
    stage, phase = 0, 0
    visited = gl.load(grid.starts + grid.num_token_tiles)
    for job in range(gl.program_id(0), visited, gl.num_programs(0)):
        token_tile, row_tile = _tile_of(grid, job)
        token = (token_tile * SIDE + W * 64 + gl.arange(0, 64, TOKENS)).to(gl.int64)
        real = token < grid.num_tokens
        total = gl.zeros([64, SIDE], gl.float32, WIDE)
        for head in range(lse.num_heads):
            at = lse.table + token * lse.stride + head
            offset = gl.load(at, mask=real, other=0.0) * LOG2E
            s, stage, phase = _logits(W, smem, stage, phase, PANELS)
            total += gl.exp2(s * scale_log2 - offset[:, None])
        start = gl.load(row_starts + token, mask=real, other=0)
        end = gl.load(row_ends + token, mask=real, other=0)
        row = row_tile * SIDE + gl.arange(0, SIDE, gl.SliceLayout(0, WIDE))
        inside = real[:, None] & (row < grid.num_rows)[None, :]
        seen = (row[None, :] >= start[:, None]) & (row[None, :] < end[:, None])
        at = token[:, None] * pitch + row[None, :]
        gl.store(target + at, gl.where(seen, total, 0.0), mask=inside)
        total = gl.zeros([64, SIDE], gl.float32, WIDE)
        for head in range(weights.num_heads):
            at_head = weights.table + token * weights.stride + head
            w = gl.load(at_head, mask=real, other=0.0).to(gl.float32)
            x, stage, phase = _logits(W, smem, stage, phase, 2)
            total += gl.maximum(x, 0.0, propagate_nan=PROPAGATE_NAN) * w[:, None]
        gl.store(scores + at, total, mask=inside)


@gluon.jit(do_not_specialize=["pitch"])
def _tiles(
    grid, q, k, index_q, index_k, lse, weights, row_starts, row_ends, target, scores, pitch,
    scale_log2, K_HEADS: gl.constexpr, PANELS: gl.constexpr,
):  # fmt: skip
    """Attention of all heads, 0 where a token does not see a row, and index scores ``[n, S]``.

    Queries and keys of a head pass by in panels of 64 dims; heads add up in registers. While one
    consumer computes exponentials, the other's MMAs run::

        producer   panels of head 0 | panels of head 1 | ... | of the index heads | next tile
        W = 0, 1   S, add P         | S, add P         | ... | store, x, add w relu(x) | store

        barrier         arrivals  waits      guards
        full [STAGES]   1, TMA    consumers  64 dims of 128 tokens and 128 rows
        empty [STAGES]  2, both   producer   a stage may be overwritten
    """
    smem = TilesMemory(
        q=gl.allocate_shared_memory(gl.bfloat16, [TILE_STAGES, SIDE, 64], TILE),
        k=gl.allocate_shared_memory(gl.bfloat16, [TILE_STAGES, SIDE, 64], TILE),
        full=gl.allocate_shared_memory(gl.int64, [TILE_STAGES, 1], mbarrier.MBarrierLayout()),
        empty=gl.allocate_shared_memory(gl.int64, [TILE_STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for b in gl.static_range(TILE_STAGES):
        mbarrier.init(smem.full.index(b), count=1)
        mbarrier.init(smem.empty.index(b), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_tiles_consumer, (0, grid, smem, lse, weights, row_starts, row_ends, target, scores,
                               pitch, scale_log2, PANELS)),
            (_tiles_consumer, (1, grid, smem, lse, weights, row_starts, row_ends, target, scores,
                               pitch, scale_log2, PANELS)),
            (_tiles_producer, (grid, smem, q, k, index_q, index_k, lse.num_heads, weights.num_heads,
                               K_HEADS, PANELS)),
        ],
        [4, 1],
        [224, 56],
    )  # fmt: skip


# ---- _queries ----------------------------------------------------------------------------------

QUERY_STAGES = gl.constexpr(4)


class QueriesMemory(NamedTuple):
    """Shared memory of ``_queries``: two buffers of two heads, and stages of rows, 32 KiB each."""

    q: object  # [2 * 2, 64, DIM]
    k: object  # [QUERY_STAGES, 64, DIM]
    given: object  # [QUERY_STAGES, 64, 64] float32
    full: object  # [QUERY_STAGES]
    empty: object  # [QUERY_STAGES]
    heads_full: object  # [2]
    heads_empty: object  # [2]


@gluon.jit
def _query_job(grid, round, num_index_heads):
    """First token, first head, first row and number of blocks of 64 rows of a job.

    The last tokens, which see most rows of a causal sequence, come first. Tokens that see nothing
    have a block of rows that do not exist.
    """
    num_pairs = gl.cdiv(num_index_heads, 2)
    job = _job_of(round)
    half = gl.cdiv(grid.num_tokens, 64) - 1 - job // num_pairs
    tile = half // 2
    count = 2 * (gl.load(grid.starts + tile + 1) - gl.load(grid.starts + tile))
    row = gl.where(count > 0, gl.load(grid.first + tile), gl.cdiv(grid.num_rows, SIDE)) * SIDE
    return half * 64, job % num_pairs * 2, row, gl.maximum(count, 1)


@gluon.jit
def _num_query_jobs(grid, num_index_heads):
    return gl.cdiv(grid.num_tokens, 64) * gl.cdiv(num_index_heads, 2)


@gluon.jit
def _queries_producer(grid, smem, given, index_q, index_k, num_index_heads):
    stage, phase = 0, 1
    turn, turn_phase = 0, 1
    for round in range(_num_rounds(_num_query_jobs(grid, num_index_heads))):
        token, head, row, num_blocks = _query_job(grid, round, num_index_heads)
        mbarrier.wait(smem.heads_empty.index(turn), turn_phase)
        bar = smem.heads_full.index(turn)
        mbarrier.expect(bar, 2 * 64 * DIM * 2)
        for w in gl.static_range(2):
            _load_index_head(smem.q.index(turn * 2 + w), index_q, token, head + w, bar)
        turn, turn_phase = next_stage(turn, turn_phase, 2)
        for block in range(num_blocks):
            mbarrier.wait(smem.empty.index(stage), phase)
            bar = smem.full.index(stage)
            mbarrier.expect(bar, 64 * DIM * 2 + 64 * 64 * 4)
            _load_index_head(smem.k.index(stage), index_k, row + block * 64, 0, bar)
            _load_given(smem.given.index(stage), given, token, row + block * 64, bar)
            stage, phase = next_stage(stage, phase, QUERY_STAGES)


@gluon.jit
def _queries_consumer(W: gl.constexpr, grid, smem, weights, dindex_q, dweights):
    """One head of each job."""
    TOKENS: gl.constexpr = gl.SliceLayout(1, ACC)
    stage, phase = 0, 0
    turn, turn_phase = 0, 0
    for round in range(_num_rounds(_num_query_jobs(grid, weights.num_heads))):
        first, head, _, num_blocks = _query_job(grid, round, weights.num_heads)
        head += W
        token = (first + gl.arange(0, 64, TOKENS)).to(gl.int64)
        real = (token < grid.num_tokens) & (head < weights.num_heads)
        at = weights.table + token * weights.stride + head
        w = gl.load(at, mask=real, other=0.0).to(gl.float32)
        dw = gl.zeros([64], gl.float32, TOKENS)
        dq = gl.zeros([64, DIM], gl.float32, WIDE)
        mbarrier.wait(smem.heads_full.index(turn), turn_phase)
        for block in range(num_blocks):
            mbarrier.wait(smem.full.index(stage), phase)
            x = gl.zeros([64, 64], gl.float32, ACC)
            x = warpgroup_mma(
                smem.q.index(turn * 2 + W), smem.k.index(stage).permute((1, 0)), x,
                use_acc=False, is_async=True,
            )  # fmt: skip
            given = smem.given.index(stage).load(ACC)
            x = warpgroup_mma_wait(0, deps=[x])
            if block + 1 == num_blocks:
                mbarrier.arrive(smem.heads_empty.index(turn), count=1)
            dw += gl.sum(gl.where(x > 0, x * given, 0.0), 1)
            b = gl.where(x > 0, given * w[:, None], 0.0).to(gl.bfloat16)
            b = gl.convert_layout(b, OPERAND)
            dq = warpgroup_mma(b, smem.k.index(stage), dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[dq])
            mbarrier.arrive(smem.empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, QUERY_STAGES)
        turn, turn_phase = next_stage(turn, turn_phase, 2)
        at = token * weights.num_heads + head
        gl.store(dweights + at, dw.to(dweights.dtype.element_ty), mask=real)
        token = (first + gl.arange(0, 64, gl.SliceLayout(1, STORE))).to(gl.int64)
        real = (token < grid.num_tokens) & (head < weights.num_heads)
        store_128(dindex_q + head * DIM, dq, token * weights.num_heads * DIM, real)


@gluon.jit
def _queries(grid, given, index_q, index_k, weights, dindex_q, dweights):
    """Gradients of queries and weights: a job is 64 tokens and two heads, one for each consumer.

    Rows pass by in blocks of 64, with the gradients of their scores::

        W = 0, 1   x = q k^T | b = g w [x > 0] | dindex_q += b k | x of the next block

        barrier          arrivals  waits      guards
        full [STAGES]    1, TMA    consumers  rows of a block, and gradients of scores
        empty [STAGES]   2, both   producer   a stage may be overwritten
        heads_full [2]   1, TMA    consumers  the heads of a job
        heads_empty [2]  2, both   producer   they may be overwritten
    """
    smem = QueriesMemory(
        q=gl.allocate_shared_memory(gl.bfloat16, [2 * 2, 64, DIM], TILE),
        k=gl.allocate_shared_memory(gl.bfloat16, [QUERY_STAGES, 64, DIM], TILE),
        given=gl.allocate_shared_memory(gl.float32, [QUERY_STAGES, 64, 64], FLOAT_TILE),
        full=gl.allocate_shared_memory(gl.int64, [QUERY_STAGES, 1], mbarrier.MBarrierLayout()),
        empty=gl.allocate_shared_memory(gl.int64, [QUERY_STAGES, 1], mbarrier.MBarrierLayout()),
        heads_full=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
        heads_empty=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
    )
    for b in gl.static_range(QUERY_STAGES):
        mbarrier.init(smem.full.index(b), count=1)
        mbarrier.init(smem.empty.index(b), count=2)
    for b in gl.static_range(2):
        mbarrier.init(smem.heads_full.index(b), count=1)
        mbarrier.init(smem.heads_empty.index(b), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_queries_consumer, (0, grid, smem, weights, dindex_q, dweights)),
            (_queries_consumer, (1, grid, smem, weights, dindex_q, dweights)),
            (_queries_producer, (grid, smem, given, index_q, index_k, weights.num_heads)),
        ],
        [4, 1],
        [224, 56],
    )


# ---- _keys -------------------------------------------------------------------------------------

KEY_STAGES = gl.constexpr(6)


class KeysMemory(NamedTuple):
    """Shared memory of ``_keys``: stages of a head of 64 tokens, 16 KiB each."""

    k: object  # [2, 64, DIM]
    q: object  # [KEY_STAGES, 64, DIM]
    given: object  # [2 * 2, 64, 64] float32, of tokens and rows
    full: object  # [KEY_STAGES]
    empty: object  # [KEY_STAGES]
    given_full: object  # [2]
    given_empty: object  # [2]
    rows: object  # [2] the rows of a job have arrived, may be overwritten


@gluon.jit
def _key_job(grid, round, num_groups):
    """Row tile, group of heads, first token tile and number of blocks of 64 tokens of a job."""
    job = _job_of(round)
    row_tile = job // num_groups
    low, high = gl.load(grid.lows + row_tile), gl.load(grid.highs + row_tile)
    return row_tile, job % num_groups, low, 2 * gl.maximum(high - low, 1)


@gluon.jit
def _keys_producer(grid, smem, given, index_q, index_k, num_groups, HEADS: gl.constexpr):
    stage, phase = 0, 1
    turn, turn_phase = 0, 1
    rows_phase = 1
    for round in range(_num_rounds(gl.cdiv(grid.num_rows, SIDE) * num_groups)):
        row_tile, group, tile, num_blocks = _key_job(grid, round, num_groups)
        mbarrier.wait(smem.rows.index(1), rows_phase)
        rows_phase = rows_phase ^ 1
        bar = smem.rows.index(0)
        mbarrier.expect(bar, SIDE * DIM * 2)
        for w in gl.static_range(2):
            _load_index_head(smem.k.index(w), index_k, row_tile * SIDE + w * 64, 0, bar)
        for block in range(num_blocks):
            # A tile that these tokens do not visit has no gradients: read none.
            token_tile = gl.minimum(tile + block // 2, grid.num_token_tiles - 1)
            first = gl.load(grid.first + token_tile)
            count = gl.load(grid.starts + token_tile + 1) - gl.load(grid.starts + token_tile)
            visited = (row_tile >= first) & (row_tile < first + count)
            row = gl.where(visited, row_tile, gl.cdiv(grid.num_rows, SIDE)) * SIDE
            token = tile * SIDE + block * 64
            mbarrier.wait(smem.given_empty.index(turn), turn_phase)
            bar = smem.given_full.index(turn)
            mbarrier.expect(bar, 64 * SIDE * 4)
            for w in gl.static_range(2):
                _load_given(smem.given.index(turn * 2 + w), given, token, row + w * 64, bar)
            turn, turn_phase = next_stage(turn, turn_phase, 2)
            for h in range(HEADS):
                mbarrier.wait(smem.empty.index(stage), phase)
                bar = smem.full.index(stage)
                mbarrier.expect(bar, 64 * DIM * 2)
                _load_index_head(smem.q.index(stage), index_q, token, group * HEADS + h, bar)
                stage, phase = next_stage(stage, phase, KEY_STAGES)


@gluon.jit
def _keys_consumer(
    W: gl.constexpr, grid, smem, weights, sums, num_groups, HEADS: gl.constexpr
):  # fmt: skip
    """64 rows of each job."""
    TOKENS: gl.constexpr = gl.SliceLayout(0, ACC)
    stage, phase = 0, 0
    turn, turn_phase = 0, 0
    rows_phase = 0
    for round in range(_num_rounds(gl.cdiv(grid.num_rows, SIDE) * num_groups)):
        row_tile, group, tile, num_blocks = _key_job(grid, round, num_groups)
        row = row_tile * SIDE + W * 64 + gl.arange(0, 64, gl.SliceLayout(1, WIDE))
        d = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))
        at = (group.to(gl.int64) * grid.num_rows + row)[:, None] * DIM + d[None, :]
        there = (row < grid.num_rows)[:, None]
        dk = gl.load(sums + at, mask=there, other=0.0)
        mbarrier.wait(smem.rows.index(0), rows_phase)
        rows_phase = rows_phase ^ 1
        for block in range(num_blocks):
            token = tile * SIDE + block * 64 + gl.arange(0, 64, TOKENS)
            mbarrier.wait(smem.given_full.index(turn), turn_phase)
            given = smem.given.index(turn * 2 + W).permute((1, 0)).load(ACC)
            mbarrier.arrive(smem.given_empty.index(turn), count=1)
            turn, turn_phase = next_stage(turn, turn_phase, 2)
            for h in range(HEADS):
                head = group * HEADS + h
                real = (token < grid.num_tokens) & (head < weights.num_heads)
                at_head = weights.table + head.to(gl.int64) * weights.stride + token
                w = gl.load(at_head, mask=real, other=0.0)
                mbarrier.wait(smem.full.index(stage), phase)
                x = gl.zeros([64, 64], gl.float32, ACC)
                x = warpgroup_mma(
                    smem.k.index(W), smem.q.index(stage).permute((1, 0)), x, use_acc=False,
                    is_async=True,
                )  # fmt: skip
                x = warpgroup_mma_wait(0, deps=[x])
                b = gl.where(x > 0, given * w[None, :], 0.0).to(gl.bfloat16)
                b = gl.convert_layout(b, OPERAND)
                dk = warpgroup_mma(b, smem.q.index(stage), dk, is_async=True)
                dk = warpgroup_mma_wait(0, deps=[dk])
                mbarrier.arrive(smem.empty.index(stage), count=1)
                stage, phase = next_stage(stage, phase, KEY_STAGES)
        mbarrier.arrive(smem.rows.index(1), count=1)
        gl.store(sums + at, dk, mask=there)


@gluon.jit(do_not_specialize=["num_groups"])
def _keys(grid, given, index_q, index_k, weights, sums, num_groups, HEADS: gl.constexpr):
    """Add the terms of the tokens to dindex_k ``[num_groups, S, DIM]``.

    A job is 128 rows and a group.

    Blocks of 64 tokens pass by, and their heads in each block. Gradients of scores stay in
    registers for all heads::

        W = 0, 1   g of a block | x = k q^T | b = g w [x > 0] | sums += b q | x of the next head

        barrier          arrivals  waits      guards
        full [STAGES]    1, TMA    consumers  a head of 64 tokens
        empty [STAGES]   2, both   producer   a stage may be overwritten
        given_full [2]   1, TMA    consumers  the gradients of the scores of a block
        given_empty [2]  2, both   producer   they may be overwritten
        rows [0]         1, TMA    consumers  the rows of a job
        rows [1]         2, both   producer   the last MMA of the job is done
    """
    smem = KeysMemory(
        k=gl.allocate_shared_memory(gl.bfloat16, [2, 64, DIM], TILE),
        q=gl.allocate_shared_memory(gl.bfloat16, [KEY_STAGES, 64, DIM], TILE),
        given=gl.allocate_shared_memory(gl.float32, [2 * 2, 64, 64], FLOAT_TILE),
        full=gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout()),
        empty=gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout()),
        given_full=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
        given_empty=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
        rows=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
    )
    for b in gl.static_range(KEY_STAGES):
        mbarrier.init(smem.full.index(b), count=1)
        mbarrier.init(smem.empty.index(b), count=2)
    for b in gl.static_range(2):
        mbarrier.init(smem.given_full.index(b), count=1)
        mbarrier.init(smem.given_empty.index(b), count=2)
    mbarrier.init(smem.rows.index(0), count=1)
    mbarrier.init(smem.rows.index(1), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_keys_consumer, (0, grid, smem, weights, sums, num_groups, HEADS)),
            (_keys_consumer, (1, grid, smem, weights, sums, num_groups, HEADS)),
            (_keys_producer, (grid, smem, given, index_q, index_k, num_groups, HEADS)),
        ],
        [4, 1],
        [224, 56],
    )


# ---- the launchers -----------------------------------------------------------------------------

TOKENS = SIDE.value
GROUP_JOBS = 512
"""Jobs of ``_keys`` for which heads are divided into groups: four for each multiprocessor."""


def _panels(x: Tensor, rows: int) -> TensorDescriptor:
    """Panels of ``rows`` tokens or rows and 64 dims of a head of ``x [T, H, D]``."""
    layout = TOKEN_TILE.value
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, 1, 64], layout)


def _given(x: Tensor) -> TensorDescriptor:
    """Panels of 64 tokens and 32 rows of ``x [n, S]`` in float32."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [64, 32], FLOAT_TILE.value)


def _grid(row_starts: Tensor, row_ends: Tensor, num_rows: int) -> Grid:
    """The tiles that a chunk of tokens visits."""
    num_tokens = row_starts.shape[0]
    token_tiles, row_tiles = cdiv(num_tokens, TOKENS), cdiv(num_rows, TOKENS)
    sizes = token_tiles, token_tiles + 1, row_tiles, row_tiles
    first, starts, lows, highs = (
        torch.empty(size, dtype=torch.int32, device=row_starts.device) for size in sizes
    )
    _visited_rows[(1,)](
        row_starts, row_ends, first, starts, num_tokens, num_rows, BLOCK=32, num_warps=4
    )
    _visiting_tokens[(row_tiles,)](first, starts, lows, highs, token_tiles, BLOCK=128, num_warps=1)
    return Grid(first, starts, lows, highs, token_tiles, num_tokens, num_rows)


def _visible_keys(index_k: Tensor, row_starts: Tensor, row_ends: Tensor) -> Tensor:
    """Index keys ``[S, 1, DIM]``; 0 for rows that no token sees, which may be NaN."""
    num_rows = index_k.shape[0]
    starts, ends = (bounds.long().clamp(0, num_rows) for bounds in (row_starts, row_ends))
    some = (starts < ends).int()
    changes = torch.zeros(num_rows + 1, dtype=torch.int32, device=index_k.device)
    changes.index_add_(0, starts, some).index_add_(0, ends, -some)
    seen = changes.cumsum(0)[:-1, None] > 0
    return index_k.where(seen, 0)[:, None]


def dense_index_loss(call: DenseIndexLoss) -> None:
    _dense(call.counted(), None)


def dense_index_gradients(call: DenseIndexGradients) -> None:
    _dense(call.of_loss().counted(), call.grads)


def _dense(call: DenseIndexLoss, grads: tuple[Tensor, Tensor, Tensor] | None) -> None:
    """The loss, and its gradients if there is memory for them."""
    lse, weights, index_k = call.lse, call.weights, call.index_k
    k = call.k[:, None] if call.k.dim() == 2 else call.k
    # An expanded tensor has strides of 0, which no descriptor of a TMA is tested with.
    q, k, index_q = (x if all(x.stride()) else x.contiguous() for x in (call.q, k, call.index_q))
    (num_tokens, num_heads, head_dim), (num_rows, dim) = q.shape, index_k.shape
    num_index_heads = index_q.shape[1]
    keys = _visible_keys(index_k, call.row_starts, call.row_ends)
    pitch = cdiv(num_rows, 4) * 4  # rows of a TMA descriptor begin at multiples of 16 bytes
    at_once = max(1, call.max_workspace_bytes // (8 * pitch * TOKENS)) * TOKENS
    target, scores = lse.new_empty(2, min(at_once, num_tokens), pitch)
    losses = lse.new_empty(num_tokens)
    row_tiles, multiprocessors = cdiv(num_rows, TOKENS), num_multiprocessors(q.device)
    heads = max(4, next_power_of_2(cdiv(num_index_heads * row_tiles, GROUP_JOBS)))
    heads = min(heads, next_power_of_2(num_index_heads))
    groups = cdiv(num_index_heads, heads)
    sums = None if grads is None else lse.new_zeros(groups, num_rows, dim)
    for first in range(0, num_tokens, at_once):
        some = slice(first, min(first + at_once, num_tokens))
        count = some.stop - first
        seen = call.row_starts[some], call.row_ends[some]
        grid = _grid(*seen, num_rows)
        given = target[:count, :num_rows]
        _tiles[(min(grid.num_token_tiles * row_tiles, multiprocessors),)](
            grid,
            _panels(q[some], TOKENS),
            _panels(k, TOKENS),
            _panels(index_q[some], TOKENS),
            _panels(keys, TOKENS),
            Heads(lse[some], lse.stride(0), num_heads),
            Heads(weights[some], weights.stride(0), num_index_heads),
            *seen,
            target,
            scores,
            pitch,
            call.softmax_scale * LOG2E.value,
            K_HEADS=int(k.shape[1] > 1),
            PANELS=head_dim // 64,
            num_warps=4,
        )
        weights_of_rows = None if call.row_weights is None else call.row_weights[some]
        losses_of_tokens(scores, target, seen, weights_of_rows, losses[some], num_rows)
        if grads is not None:
            dindex_q, dweights, _ = grads
            operands = _given(given), _panels(index_q[some], 64), _panels(keys, 64)
            jobs = cdiv(count, 64) * cdiv(num_index_heads, 2)
            _queries[(min(jobs, multiprocessors),)](
                grid,
                *operands,
                Heads(weights[some], weights.stride(0), num_index_heads),
                dindex_q[some],
                dweights[some],
                num_warps=4,
            )
            _keys[(min(row_tiles * groups, multiprocessors),)](
                grid,
                *operands,
                Heads(weights[some].T.float().contiguous(), count, num_index_heads),
                sums,
                groups,
                HEADS=heads,
                num_warps=4,
            )
    torch.sum(losses, 0, out=call.loss)
    if grads is not None and sums is not None:
        grads[2].copy_(sums.sum(0))

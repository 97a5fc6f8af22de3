"""The gradients of attention over selected rows, on Hopper.

The steps of the portable kernels (their module draws them), with three other kernels. Each
is persistent, with two consumer warpgroups and a producer warpgroup, and takes entries of a list in
blocks of 64::

    _weights   S = q K^T, dP = dout V^T, then A = g P and dS of 64 heads    gathers rows
    _queries   dq = dS K of 64 heads, or of 128 heads and half of the dims  gathers rows again
    _terms     dS^T q + A^T dout of half of the dims, summed over heads     reads A and dS

Why three: Q, dout and a block of rows fill the shared memory of a multiprocessor, so a kernel that
also computed dq or terms would have one stage of rows and wait for each block of the gather. A and
dS are bfloat16, as operands of an MMA have to be, so storing them loses nothing.

Dims come in two symmetric halves, 256 dims of the value and 32 RoPE dims each, since a warpgroup
accumulates 64 x (256 + 32) float32.
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
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparsemla.kernels.attention.triton.tiles import LOG2E
from sparsemla.kernels.backward.arguments import SparseAttentionBackward
from sparsemla.kernels.backward.triton import softmax_state, token_mask_of
from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.gluon import opaque_zero, reinterpret, tma_load
from sparsemla.kernels.common.groups import attended, chunks, grouped
from sparsemla.kernels.common.hopper import (
    BLOCK,
    COPY,
    STORE,
    TILE,
    Lists,
    copy_dims,
    list_ends,
    load_heads,
    load_rows,
    num_pairs_of,
    store_128,
    store_tile,
    tiles_of_heads,
)
from sparsemla.kernels.common.integers import cdiv
from sparsemla.kernels.common.lists import ENTRY_BYTES, TokenLists, add_terms

S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
NARROW = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
ROPE_TILE = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))
TOKEN_ROPE_TILE = gl.constexpr(gl.NVMMASharedLayout(64, 16, 3))
COPY_ROPE = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
# As STORE, of 32 columns.
STORE_ROPE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 32],
    )
)


@gluon.jit
def _load_half(to, desc, token, part, bar, HEADS: gl.constexpr):
    """Start to copy half ``part`` of the value dims of a token's heads."""
    panels = reinterpret(to, gl.bfloat16, [4, HEADS, 64], TILE)
    for j in gl.static_range(4):
        load_heads(panels.index(j), desc, token, 0, part * 256 + j * 64, bar, HEADS)


@gluon.jit
def _store_wide(target, acc, row_offsets, real):
    """Store 64 x 256 float32 as bfloat16, 64 columns at a time."""
    halves = acc.to(gl.bfloat16).reshape([64, 2, 128]).permute((0, 2, 1)).split()
    store_128(target, halves[0], row_offsets, real)
    store_128(target + 128, halves[1], row_offsets, real)


# ---- _weights ----------------------------------------------------------------------------------

PANELS = gl.constexpr(5)
"""Panels of a block: four of 128 dims of the value, and the RoPE dims."""


class WeightsMemory(NamedTuple):
    """Shared memory of ``_weights``: 136 KiB of heads, 72 of a block of rows."""

    q: object  # [4, 64, 128]
    q_rope: object  # [64, 64]
    dout: object  # [4, 64, 128]
    kv: object  # [4, 64, 128]
    k_rope: object  # [64, 64]
    full: object  # [2 * PANELS] a panel of a block of a warpgroup has arrived
    empty: object  # [PANELS] a panel may be overwritten
    heads: object  # [2] the heads of a tile have arrived, may be overwritten


@gluon.jit
def _load_token_mask(lists, token_mask, token, block, LAYOUT: gl.constexpr):
    """Which tokens attend to the entries of a block of a list: a bit for each."""
    at = block * BLOCK + gl.arange(0, BLOCK, LAYOUT)
    end = gl.load(lists.ends + token)
    bits = gl.load(token_mask.bits + token * token_mask.stride + at, mask=at < end, other=0)
    return bits.to(gl.int32)


@gluon.jit
def _weights_consumer(
    W: gl.constexpr, num_jobs, smem, lists, token_mask, state, probs, dscores, shape, scales,
    TILES: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Blocks ``W``, ``W + 2``, ... of each tile."""
    num_heads, num_states, width = shape
    scale, scale_log2 = scales
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    STORE_ROWS: gl.constexpr = gl.SliceLayout(1, STORE)
    phase = 0
    turn = 0
    for job in range(gl.program_id(0), num_jobs, gl.num_programs(0)):
        token = (job // TILES).to(gl.int64)
        first_head = job % TILES * 64
        num_pairs = num_pairs_of(lists, token)
        head = first_head + gl.arange(0, 64, ROWS)
        at = state + token * num_heads + head
        lse2 = gl.load(at, mask=head < num_heads, other=0.0)
        share = gl.load(at + num_states, mask=head < num_heads, other=0.0)
        offset = gl.load(at + 2 * num_states, mask=head < num_heads, other=0.0)
        if token_mask is not None:
            owner = 1 << gl.minimum(head // token_mask.num_heads, 8)
        head = first_head + gl.arange(0, 64, STORE_ROWS)
        rows = (token * num_heads + head) * width
        mbarrier.wait(smem.heads.index(0), turn)
        for i in range(num_pairs):
            block = 2 * i + W
            zero = opaque_zero(i)
            _, valid = load_rows(lists, token, block, gl.SliceLayout(0, S_LAYOUT))
            if token_mask is not None:
                bits = _load_token_mask(
                    lists, token_mask, token, block, gl.SliceLayout(0, S_LAYOUT)
                )
            s = gl.zeros([64, 64], gl.float32, S_LAYOUT)
            dp = gl.zeros([64, 64], gl.float32, S_LAYOUT)
            for p in gl.static_range(4):
                mbarrier.wait(smem.full.index(W * PANELS + p), phase)
                fence_async_shared()
                keys = smem.kv.index(zero + p).permute((1, 0))
                s = warpgroup_mma(smem.q.index(zero + p), keys, s, use_acc=p > 0, is_async=True)
                dp = warpgroup_mma(
                    smem.dout.index(zero + p), keys, dp, use_acc=p > 0, is_async=True
                )
                if p > 0:
                    s, dp = warpgroup_mma_wait(2, deps=[s, dp])
                    mbarrier.arrive(smem.empty.index(p - 1), count=1)
            if ROPE > 0:
                mbarrier.wait(smem.full.index(W * PANELS + 4), phase)
                fence_async_shared()
                s = warpgroup_mma(smem.q_rope, smem.k_rope.permute((1, 0)), s, is_async=True)
            s, dp = warpgroup_mma_wait(0, deps=[s, dp])
            mbarrier.arrive(smem.empty.index(3), count=1)
            if ROPE > 0:
                mbarrier.arrive(smem.empty.index(4), count=1)
            if i + 1 == num_pairs:
                mbarrier.arrive(smem.heads.index(1), count=1)
            weight = gl.exp2(s * scale_log2 - lse2[:, None])
            ds = weight * (share[:, None] * dp - offset[:, None]) * scale
            kept = valid[None, :]
            if token_mask is not None:
                kept = kept & ((bits[None, :] & owner[:, None]) != 0)
            weight = gl.where(kept, weight * share[:, None], 0.0).to(gl.bfloat16)
            ds = gl.where(kept, ds, 0.0).to(gl.bfloat16)
            real = (head < num_heads) & (block * BLOCK < width)
            store_tile(probs + block * BLOCK, weight, rows, real, STORE)
            store_tile(dscores + block * BLOCK, ds, rows, real, STORE)
            phase = phase ^ 1
        turn = turn ^ 1


@gluon.jit
def _weights_producer(
    num_jobs, smem, q, dout, kv, kv_row, lists, TILES: gl.constexpr, ROPE: gl.constexpr
):
    ROWS: gl.constexpr = gl.SliceLayout(1, COPY)
    phase = 1
    turn = 1
    for job in range(gl.program_id(0), num_jobs, gl.num_programs(0)):
        token = job // TILES
        first_head = job % TILES * 64
        num_blocks = 2 * num_pairs_of(lists, token)
        row, valid = load_rows(lists, token, 0, ROWS)
        mbarrier.wait(smem.heads.index(1), turn)
        bar = smem.heads.index(0)
        mbarrier.expect(bar, 64 * 2 * (2 * 512 + ROPE))
        for p in gl.static_range(4):
            q_panels = reinterpret(smem.q.index(p), gl.bfloat16, [2, 64, 64], TILE)
            dout_panels = reinterpret(smem.dout.index(p), gl.bfloat16, [2, 64, 64], TILE)
            for j in gl.static_range(2):
                column = p * 128 + j * 64
                load_heads(q_panels.index(j), q, token, first_head, column, bar, 64)
                load_heads(dout_panels.index(j), dout, token, first_head, column, bar, 64)
        if ROPE > 0:
            load_heads(smem.q_rope, q, token, first_head, 512, bar, 64)
        for block in range(num_blocks):
            consumer = block % 2 * PANELS
            for p in gl.static_range(4):
                mbarrier.wait(smem.empty.index(p), phase)
                copy_dims(smem.kv.index(p), kv, kv_row, row, valid, p * 128, 128, COPY)
                async_copy.mbarrier_arrive(smem.full.index(consumer + p), increment_count=False)
            if ROPE > 0:
                mbarrier.wait(smem.empty.index(4), phase)
                copy_dims(smem.k_rope, kv, kv_row, row, valid, 512, 64, COPY)
                async_copy.mbarrier_arrive(smem.full.index(consumer + 4), increment_count=False)
            row, valid = load_rows(lists, token, block + 1, ROWS)
            phase = phase ^ 1
        turn = turn ^ 1


@gluon.jit(do_not_specialize=["num_jobs", "num_states"])
def _weights(
    num_jobs, q, dout, kv, kv_row, lists, token_mask, state, probs, dscores, num_heads, num_states,
    width, scale, scale_log2, TILES: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """``A = g P`` and ``softmax_scale * dS`` of tiles of 64 heads ``[n, H, width]``.

    A block of rows comes in panels, four of 128 dims and the RoPE dims. A panel is overwritten as
    soon as its MMAs are done. The warpgroups take blocks in turn::

        producer   panels of block 0 | panels of block 1, each once it is empty | ...
        W = 0      S, dP of block 0  | A, dS, store             | S, dP of block 2
        W = 1                        | S, dP of block 1         | A, dS, store

        barrier        arrivals             waits        guards
        full [2, 5]    128 copies' threads  consumer W   a panel of a block of W has arrived
        empty [5]      1, its consumer      producer     a panel may be overwritten
        heads [0]      1, TMA               both         the tile's q and dout
        heads [1]      2, both              producer     the last MMA of the tile is done
    """
    smem = WeightsMemory(
        q=gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], TILE),
        q_rope=gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE),
        dout=gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], TILE),
        kv=gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], TILE),
        k_rope=gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE),
        full=gl.allocate_shared_memory(gl.int64, [2 * PANELS, 1], mbarrier.MBarrierLayout()),
        empty=gl.allocate_shared_memory(gl.int64, [PANELS, 1], mbarrier.MBarrierLayout()),
        heads=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
    )
    for b in gl.static_range(2 * PANELS):
        mbarrier.init(smem.full.index(b), count=128)
    for b in gl.static_range(PANELS):
        mbarrier.init(smem.empty.index(b), count=1)
    mbarrier.init(smem.heads.index(0), count=1)
    mbarrier.init(smem.heads.index(1), count=2)
    fence_async_shared()
    shape = num_heads, num_states, width
    scales = scale, scale_log2
    gl.warp_specialize(
        [
            (_weights_consumer, (0, num_jobs, smem, lists, token_mask, state, probs, dscores, shape,
                                 scales, TILES, ROPE)),
            (_weights_consumer, (1, num_jobs, smem, lists, token_mask, state, probs, dscores, shape,
                                 scales, TILES, ROPE)),
            (_weights_producer, (num_jobs, smem, q, dout, kv, kv_row, lists, TILES, ROPE)),
        ],
        [4, 4],
        [208, 96],
    )  # fmt: skip


# ---- _queries ----------------------------------------------------------------------------------


class QueriesMemory(NamedTuple):
    """Shared memory of ``_queries``; a stage has ``HALVES`` of the dims of ``PARTS`` tiles."""

    kv: object  # [STAGES * HALVES, 64, 256]
    k_rope: object  # [STAGES * HALVES, 64, 32]
    dscores: object  # [STAGES * PARTS, 64, 64]
    full: object  # [STAGES]
    empty: object  # [STAGES]


@gluon.jit
def _queries_consumer(
    W: gl.constexpr, num_jobs, smem, lists, dq, dq_token, dq_head, num_heads,
    PARTS: gl.constexpr, STAGES: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """One half of the dims of dq, or one tile of 64 heads."""
    HALVES: gl.constexpr = 2 // PARTS
    half: gl.constexpr = W if PARTS == 1 else 0
    tile: gl.constexpr = 0 if PARTS == 1 else W
    stage = 0
    phase = 0
    for job in range(gl.program_id(0), num_jobs, gl.num_programs(0)):
        token = (job // PARTS).to(gl.int64)
        part = W if PARTS == 1 else job % 2
        acc = gl.zeros([64, 256], gl.float32, WIDE)
        rope = gl.zeros([64, 32], gl.float32, NARROW)
        for _ in range(2 * num_pairs_of(lists, token)):
            mbarrier.wait(smem.full.index(stage), phase)
            fence_async_shared()
            ds = smem.dscores.index(stage * PARTS + tile)
            acc = warpgroup_mma(ds, smem.kv.index(stage * HALVES + half), acc, is_async=True)
            if ROPE > 0:
                rope = warpgroup_mma(
                    ds, smem.k_rope.index(stage * HALVES + half), rope, is_async=True
                )
            acc, rope = warpgroup_mma_wait(0, deps=[acc, rope])
            mbarrier.arrive(smem.empty.index(stage), count=1)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1
        head = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, STORE))
        target = dq + token * dq_token
        _store_wide(target + part * 256, acc, head.to(gl.int64) * dq_head, head < num_heads)
        if ROPE > 0:
            head = tile * 64 + gl.arange(0, 64, gl.SliceLayout(1, STORE_ROPE))
            store_tile(
                target + (512 + part * 32), rope.to(gl.bfloat16), head.to(gl.int64) * dq_head,
                head < num_heads, STORE_ROPE,
            )  # fmt: skip


@gluon.jit
def _queries_producer(
    num_jobs, smem, dscores, kv, kv_row, lists, PARTS: gl.constexpr, STAGES: gl.constexpr,
    ROPE: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = 2 // PARTS
    ROWS: gl.constexpr = gl.SliceLayout(1, COPY)
    ROPE_ROWS: gl.constexpr = gl.SliceLayout(1, COPY_ROPE)
    stage = 0
    phase = 1
    for job in range(gl.program_id(0), num_jobs, gl.num_programs(0)):
        token = job // PARTS
        num_blocks = 2 * num_pairs_of(lists, token)
        row, valid = load_rows(lists, token, 0, ROWS)
        for block in range(num_blocks):
            mbarrier.wait(smem.empty.index(stage), phase)
            bar = smem.full.index(stage)
            mbarrier.expect(bar, PARTS * 64 * 64 * 2)
            for t in gl.static_range(PARTS):
                to = smem.dscores.index(stage * PARTS + t)
                load_heads(to, dscores, token, 64 * t, block * BLOCK, bar, 64)
            rope_row = gl.convert_layout(row, ROPE_ROWS)
            rope_valid = gl.convert_layout(valid, ROPE_ROWS)
            for h in gl.static_range(HALVES):
                part = h if PARTS == 1 else job % 2
                to = stage * HALVES + h
                copy_dims(smem.kv.index(to), kv, kv_row, row, valid, part * 256, 256, COPY)
                if ROPE > 0:
                    copy_dims(
                        smem.k_rope.index(to), kv, kv_row, rope_row, rope_valid, 512 + part * 32,
                        32, COPY_ROPE,
                    )  # fmt: skip
            async_copy.mbarrier_arrive(bar, increment_count=False)
            row, valid = load_rows(lists, token, block + 1, ROWS)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1


@gluon.jit(do_not_specialize=["num_jobs"])
def _queries(
    num_jobs, dscores, kv, kv_row, lists, dq, dq_token, dq_head, num_heads,
    PARTS: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """``dq = dS K``: a job is a token, or half of the dims of a token with more than 64 heads.

    ``PARTS`` 1: each warpgroup takes half of the dims. ``PARTS`` 2: each takes 64 heads, and both
    read one half of the rows' dims, so that no dims are gathered twice. Rows and weights come in
    stages::

        barrier         arrivals                  waits     guards
        full [STAGES]   128 copies' threads, TMA  both      rows and weights of a block
        empty [STAGES]  2, both                   producer  a stage may be overwritten
    """
    HALVES: gl.constexpr = 2 // PARTS
    STAGES: gl.constexpr = 2 * PARTS
    smem = QueriesMemory(
        kv=gl.allocate_shared_memory(gl.bfloat16, [STAGES * HALVES, 64, 256], TILE),
        k_rope=gl.allocate_shared_memory(gl.bfloat16, [STAGES * HALVES, 64, 32], ROPE_TILE),
        dscores=gl.allocate_shared_memory(gl.bfloat16, [STAGES * PARTS, 64, 64], TILE),
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for b in gl.static_range(STAGES):
        mbarrier.init(smem.full.index(b), count=129)
        mbarrier.init(smem.empty.index(b), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_queries_consumer, (0, num_jobs, smem, lists, dq, dq_token, dq_head, num_heads,
                                 PARTS, STAGES, ROPE)),
            (_queries_consumer, (1, num_jobs, smem, lists, dq, dq_token, dq_head, num_heads,
                                 PARTS, STAGES, ROPE)),
            (_queries_producer, (num_jobs, smem, dscores, kv, kv_row, lists, PARTS, STAGES, ROPE)),
        ],
        [4, 4],
        [208, 96],
    )  # fmt: skip


# ---- _terms ------------------------------------------------------------------------------------


class TermsMemory(NamedTuple):
    """Shared memory of ``_terms``: ``HALVES`` of a token's dims, and stages of weights."""

    q: object  # [HALVES, HEADS, 256]
    q_rope: object  # [HALVES, HEADS, 32]
    dout: object  # [HALVES, HEADS, 256]
    probs: object  # [STAGES, HEADS, 64]
    dscores: object  # [STAGES, HEADS, 64]
    full: object  # [STAGES]
    empty: object  # [STAGES]
    heads: object  # [2] the heads of a job have arrived, may be overwritten


@gluon.jit
def _terms_consumer(
    W: gl.constexpr, num_jobs, smem, lists, terms, topk, D: gl.constexpr,
    HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One half of the dims of each block, or blocks ``W``, ``W + 2``, ... of one half."""
    PARTS: gl.constexpr = 2 // HALVES
    half: gl.constexpr = W if PARTS == 1 else 0
    FIRST: gl.constexpr = 0 if PARTS == 1 else W
    stage = FIRST
    phase = 0
    turn = 0
    for job in range(gl.program_id(0), num_jobs, gl.num_programs(0)):
        token = (job // PARTS).to(gl.int64)
        part = W if PARTS == 1 else job % 2
        num_steps = num_pairs_of(lists, token) * HALVES
        mbarrier.wait(smem.heads.index(0), turn)
        for i in range(num_steps):
            mbarrier.wait(smem.full.index(stage), phase)
            ds = smem.dscores.index(stage).permute((1, 0))
            acc = gl.zeros([64, 256], gl.float32, WIDE)
            rope = gl.zeros([64, 32], gl.float32, NARROW)
            acc = warpgroup_mma(ds, smem.q.index(half), acc, use_acc=False, is_async=True)
            weights = smem.probs.index(stage).permute((1, 0))
            acc = warpgroup_mma(weights, smem.dout.index(half), acc, is_async=True)
            if D > 512:
                rope = warpgroup_mma(
                    ds, smem.q_rope.index(half), rope, use_acc=False, is_async=True
                )
            acc, rope = warpgroup_mma_wait(0, deps=[acc, rope])
            mbarrier.arrive(smem.empty.index(stage), count=1)
            if i + 1 == num_steps:
                mbarrier.arrive(smem.heads.index(1), count=1)
            stage += PARTS
            if stage >= STAGES:
                stage = FIRST
                phase = phase ^ 1
            first = (PARTS * i + FIRST) * BLOCK
            at = first + gl.arange(0, 64, gl.SliceLayout(1, STORE))
            target = terms + token * topk * D
            _store_wide(target + part * 256, acc, at * D, at < topk)
            if D > 512:
                at = first + gl.arange(0, 64, gl.SliceLayout(1, STORE_ROPE))
                store_tile(
                    target + (512 + part * 32), rope.to(gl.bfloat16), at * D, at < topk, STORE_ROPE
                )
        turn = turn ^ 1


@gluon.jit
def _terms_producer(
    num_jobs, smem, q, q_rope, dout, probs, dscores, lists, HEADS: gl.constexpr,
    D: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    PARTS: gl.constexpr = 2 // HALVES
    stage = 0
    phase = 1
    turn = 1
    for job in range(gl.program_id(0), num_jobs, gl.num_programs(0)):
        token = job // PARTS
        num_blocks = 2 * num_pairs_of(lists, token)
        mbarrier.wait(smem.heads.index(1), turn)
        turn = turn ^ 1
        bar = smem.heads.index(0)
        mbarrier.expect(bar, HEADS * (D + 512) * HALVES)
        for h in gl.static_range(HALVES):
            part = h if PARTS == 1 else job % 2
            _load_half(smem.q.index(h), q, token, part, bar, HEADS)
            _load_half(smem.dout.index(h), dout, token, part, bar, HEADS)
            if D > 512:
                to = reinterpret(smem.q_rope.index(h), gl.bfloat16, [1, HEADS, 32], TOKEN_ROPE_TILE)
                tma_load(q_rope, [token, 0, 512 + part * 32], bar, to)
        for block in range(num_blocks):
            mbarrier.wait(smem.empty.index(stage), phase)
            bar = smem.full.index(stage)
            mbarrier.expect(bar, 2 * HEADS * 64 * 2)
            load_heads(smem.dscores.index(stage), dscores, token, 0, block * BLOCK, bar, HEADS)
            load_heads(smem.probs.index(stage), probs, token, 0, block * BLOCK, bar, HEADS)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1


@gluon.jit(do_not_specialize=["num_jobs"])
def _terms(
    num_jobs, q, q_rope, dout, probs, dscores, lists, terms, topk,
    HEADS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """``dS^T q + A^T dout`` of a token's entries, summed over its heads ``[n K, D]``.

    The heads stay in shared memory, and weights stream through it. All dims of 64 heads fit: a job
    is a token, and each warpgroup takes half of the dims. Of 128 heads half of the dims fit: a job
    is one half, and the warpgroups take blocks in turn. While one stores its terms, the other's
    MMAs run::

        barrier         arrivals                 waits      guards
        full [STAGES]   1, TMA                   consumers  the weights of a block
        empty [STAGES]  1, each of its readers   producer   a stage may be overwritten
        heads [0]       1, TMA                   both       the job's q and dout
        heads [1]       2, both                  producer   the last MMA of the job is done

    Writes are the bound: 1152 bytes an entry, at 3.0 of the 3.3 TB/s at which an H200 fills memory.
    """
    HALVES: gl.constexpr = 128 // HEADS
    STAGES: gl.constexpr = 2 * HALVES
    smem = TermsMemory(
        q=gl.allocate_shared_memory(gl.bfloat16, [HALVES, HEADS, 256], TILE),
        q_rope=gl.allocate_shared_memory(gl.bfloat16, [HALVES, HEADS, 32], ROPE_TILE),
        dout=gl.allocate_shared_memory(gl.bfloat16, [HALVES, HEADS, 256], TILE),
        probs=gl.allocate_shared_memory(gl.bfloat16, [STAGES, HEADS, 64], TILE),
        dscores=gl.allocate_shared_memory(gl.bfloat16, [STAGES, HEADS, 64], TILE),
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        heads=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
    )
    for b in gl.static_range(STAGES):
        mbarrier.init(smem.full.index(b), count=1)
        mbarrier.init(smem.empty.index(b), count=HALVES)
    mbarrier.init(smem.heads.index(0), count=1)
    mbarrier.init(smem.heads.index(1), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_terms_consumer, (0, num_jobs, smem, lists, terms, topk, D, HALVES, STAGES)),
            (_terms_consumer, (1, num_jobs, smem, lists, terms, topk, D, HALVES, STAGES)),
            (_terms_producer, (num_jobs, smem, q, q_rope, dout, probs, dscores, lists, HEADS, D,
                               HALVES, STAGES)),
        ],
        [4, 4],
        [224, 48],
    )  # fmt: skip


# ---- the launcher ------------------------------------------------------------------------------


def _tiles_of_rope(x: Tensor, heads: int) -> TensorDescriptor:
    """Like :func:`tiles_of_heads`, of 32 dims."""
    layout = TOKEN_ROPE_TILE.value
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, heads, 32], layout)


def sparse_attention_backward(call: SparseAttentionBackward) -> None:
    kv, token_mask, list_tokens = call.kv, call.token_mask, call.list_tokens
    dq, dkv = call.dq, call.dkv
    (num_tokens, num_heads, head_dim), topk = call.q.shape, call.topk_indices.shape[1]
    topk_indices = attended(call.topk_indices, token_mask, num_tokens, list_tokens)
    total = dkv if dkv.dtype == torch.float32 else torch.empty_like(dkv, dtype=torch.float32)
    total.zero_()
    state, sink_terms = softmax_state(call.dout, call.out, call.lse, call.attn_sink, call.dlse)
    ends = list_ends(topk_indices, call.topk_lengths, kv.shape[0])

    # An expanded tensor has strides of 0, which no descriptor of a TMA is tested with.
    q, dout = (x if all(x.stride()) else x.contiguous() for x in (call.q, call.dout))
    list_heads, width = list_tokens * num_heads, cdiv(topk, BLOCK.value) * BLOCK.value
    heads = 64 if list_heads <= 64 else 128
    list_bytes = 4 * list_heads * width + topk * (2 * head_dim + ENTRY_BYTES)
    multiprocessors = num_multiprocessors(q.device)
    num_lists = min(max(call.max_workspace_bytes // list_bytes, 1), len(topk_indices))
    if multiprocessors < num_lists < len(topk_indices):
        num_lists -= num_lists % multiprocessors  # whole waves of the persistent kernels
    probs, dscores = q.new_empty(2, num_lists, list_heads, width)
    terms = q.new_empty(num_lists * topk, head_dim)
    rope, parts = head_dim - 512, heads // 64
    for some, tokens, size in chunks(num_tokens, list_tokens, num_lists):
        count, heads_of_list = some.stop - some.start, size * num_heads
        jobs = count * parts
        grid = (min(jobs, multiprocessors),)
        indices = topk_indices[some]
        lists = Lists(indices, indices.stride(0), ends[some], kv.shape[0])
        part_q, part_dout, part_dq = (grouped(x[tokens], size) for x in (q, dout, dq))
        weights = [x[:count, :heads_of_list] for x in (probs, dscores)]
        _weights[grid](
            jobs,
            tiles_of_heads(part_q, 64),
            tiles_of_heads(part_dout, 64),
            kv,
            kv.stride(0) // 8,
            lists,
            token_mask_of(token_mask, some, num_heads),
            state[:, tokens],
            *weights,
            heads_of_list,
            num_tokens * num_heads,
            width,
            call.softmax_scale,
            call.softmax_scale * LOG2E.value,
            TILES=parts,
            ROPE=rope,
            num_warps=4,
        )
        _queries[grid](
            jobs,
            tiles_of_heads(weights[1], 64),
            kv,
            kv.stride(0) // 8,
            lists,
            part_dq,
            *part_dq.stride()[:2],
            heads_of_list,
            PARTS=parts,
            ROPE=rope,
            num_warps=4,
        )
        _terms[grid](
            jobs,
            tiles_of_heads(part_q, heads),
            _tiles_of_rope(part_q, heads),
            tiles_of_heads(part_dout, heads),
            *(tiles_of_heads(x, heads) for x in weights),
            lists,
            terms,
            topk,
            HEADS=heads,
            D=head_dim,
            num_warps=4,
        )
        add_terms(terms, TokenLists.of(topk_indices, call.topk_lengths, some), total)
    if total is not dkv:
        dkv.copy_(total)
    if sink_terms is not None:
        torch.sum(sink_terms, 0, out=call.d_sink)

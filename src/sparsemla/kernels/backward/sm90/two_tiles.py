"""The gradients of attention over selected rows of 65 to 128 heads, on Hopper: two tiles of 64.

The steps of the portable kernels (their module draws them), with three other kernels. Each
is persistent, with two consumer warpgroups and a producer warpgroup, and takes entries of a list in
blocks of 64::

    _weights   S = q K^T, dP = dout V^T, then A = g P and dS of 64 heads    gathers rows
    _queries   dq = dS K of 128 heads and half of the dims                  gathers rows again
    _terms     dS^T q + A^T dout of half of the dims, summed over heads     reads A and dS

Why three: Q, dout and a block of rows fill the shared memory of a multiprocessor, and a term is a
sum over two tiles of heads, whose q and dout do not fit together. A and dS are bfloat16, as
operands of an MMA have to be, so storing them loses nothing.

Dims come in two symmetric halves, 256 dims of the value and 32 RoPE dims each, since a warpgroup
accumulates 64 x (256 + 32) float32.
"""

from __future__ import annotations

from typing import NamedTuple

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
from sparsemla.kernels.backward.sm90.chunks import Part, in_chunks
from sparsemla.kernels.common.gluon import opaque_zero, reinterpret, tma_load
from sparsemla.kernels.common.hopper import (
    BLOCK,
    COPY,
    STORE,
    TILE,
    copy_dims,
    load_heads,
    load_rows,
    num_pairs_of,
    store_128,
    store_tile,
    tiles_of_heads,
)
from sparsemla.kernels.common.integers import cdiv

HEADS = gl.constexpr(128)
"""Heads of the tokens of a list, padded: two tiles of 64."""
TILES = gl.constexpr(2)
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
def _load_half(to, desc, token, part, bar):
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
    ROPE: gl.constexpr,
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
def _weights_producer(num_jobs, smem, q, dout, kv, kv_row, lists, ROPE: gl.constexpr):
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
    width, scale, scale_log2, ROPE: gl.constexpr,
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
                                 scales, ROPE)),
            (_weights_consumer, (1, num_jobs, smem, lists, token_mask, state, probs, dscores, shape,
                                 scales, ROPE)),
            (_weights_producer, (num_jobs, smem, q, dout, kv, kv_row, lists, ROPE)),
        ],
        [4, 4],
        [208, 96],
    )  # fmt: skip


# ---- _queries ----------------------------------------------------------------------------------


class QueriesMemory(NamedTuple):
    """Shared memory of ``_queries``; a stage has half of the dims, and dS of both tiles."""

    kv: object  # [STAGES, 64, 256]
    k_rope: object  # [STAGES, 64, 32]
    dscores: object  # [STAGES * TILES, 64, 64]
    full: object  # [STAGES]
    empty: object  # [STAGES]


@gluon.jit
def _queries_consumer(
    W: gl.constexpr, num_jobs, smem, lists, dq, dq_token, dq_head, num_heads,
    STAGES: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Half of the dims of dq of tile ``W``."""
    stage = 0
    phase = 0
    for job in range(gl.program_id(0), num_jobs, gl.num_programs(0)):
        token = (job // 2).to(gl.int64)
        part = job % 2
        acc = gl.zeros([64, 256], gl.float32, WIDE)
        rope = gl.zeros([64, 32], gl.float32, NARROW)
        for _ in range(2 * num_pairs_of(lists, token)):
            mbarrier.wait(smem.full.index(stage), phase)
            fence_async_shared()
            ds = smem.dscores.index(stage * TILES + W)
            acc = warpgroup_mma(ds, smem.kv.index(stage), acc, is_async=True)
            if ROPE > 0:
                rope = warpgroup_mma(ds, smem.k_rope.index(stage), rope, is_async=True)
            acc, rope = warpgroup_mma_wait(0, deps=[acc, rope])
            mbarrier.arrive(smem.empty.index(stage), count=1)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1
        head = W * 64 + gl.arange(0, 64, gl.SliceLayout(1, STORE))
        target = dq + token * dq_token
        _store_wide(target + part * 256, acc, head.to(gl.int64) * dq_head, head < num_heads)
        if ROPE > 0:
            head = W * 64 + gl.arange(0, 64, gl.SliceLayout(1, STORE_ROPE))
            store_tile(
                target + (512 + part * 32), rope.to(gl.bfloat16), head.to(gl.int64) * dq_head,
                head < num_heads, STORE_ROPE,
            )  # fmt: skip


@gluon.jit
def _queries_producer(
    num_jobs, smem, dscores, kv, kv_row, lists, STAGES: gl.constexpr, ROPE: gl.constexpr
):
    ROWS: gl.constexpr = gl.SliceLayout(1, COPY)
    ROPE_ROWS: gl.constexpr = gl.SliceLayout(1, COPY_ROPE)
    stage = 0
    phase = 1
    for job in range(gl.program_id(0), num_jobs, gl.num_programs(0)):
        token = job // 2
        part = job % 2
        num_blocks = 2 * num_pairs_of(lists, token)
        row, valid = load_rows(lists, token, 0, ROWS)
        for block in range(num_blocks):
            mbarrier.wait(smem.empty.index(stage), phase)
            bar = smem.full.index(stage)
            mbarrier.expect(bar, TILES * 64 * 64 * 2)
            for t in gl.static_range(TILES):
                to = smem.dscores.index(stage * TILES + t)
                load_heads(to, dscores, token, 64 * t, block * BLOCK, bar, 64)
            rope_row = gl.convert_layout(row, ROPE_ROWS)
            rope_valid = gl.convert_layout(valid, ROPE_ROWS)
            copy_dims(smem.kv.index(stage), kv, kv_row, row, valid, part * 256, 256, COPY)
            if ROPE > 0:
                copy_dims(
                    smem.k_rope.index(stage), kv, kv_row, rope_row, rope_valid, 512 + part * 32,
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
    num_jobs, dscores, kv, kv_row, lists, dq, dq_token, dq_head, num_heads, ROPE: gl.constexpr
):
    """``dq = dS K``: a job is half of the dims of a token.

    Each warpgroup takes 64 heads, and both read the same half of the rows' dims, so that no dims
    are gathered twice. Rows and weights come in stages::

        barrier         arrivals                  waits     guards
        full [STAGES]   128 copies' threads, TMA  both      rows and weights of a block
        empty [STAGES]  2, both                   producer  a stage may be overwritten
    """
    STAGES: gl.constexpr = 4
    smem = QueriesMemory(
        kv=gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 256], TILE),
        k_rope=gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 32], ROPE_TILE),
        dscores=gl.allocate_shared_memory(gl.bfloat16, [STAGES * TILES, 64, 64], TILE),
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
                                 STAGES, ROPE)),
            (_queries_consumer, (1, num_jobs, smem, lists, dq, dq_token, dq_head, num_heads,
                                 STAGES, ROPE)),
            (_queries_producer, (num_jobs, smem, dscores, kv, kv_row, lists, STAGES, ROPE)),
        ],
        [4, 4],
        [208, 96],
    )  # fmt: skip


# ---- _terms ------------------------------------------------------------------------------------


class TermsMemory(NamedTuple):
    """Shared memory of ``_terms``: half of a token's dims, and stages of weights."""

    q: object  # [HEADS, 256]
    q_rope: object  # [HEADS, 32]
    dout: object  # [HEADS, 256]
    probs: object  # [2, HEADS, 64]
    dscores: object  # [2, HEADS, 64]
    full: object  # [2]
    empty: object  # [2]
    heads: object  # [2] the heads of a job have arrived, may be overwritten


@gluon.jit
def _terms_consumer(W: gl.constexpr, num_jobs, smem, lists, terms, topk, D: gl.constexpr):
    """Blocks ``W``, ``W + 2``, ... of half of the dims; their weights are in stage ``W``."""
    phase = 0
    turn = 0
    for job in range(gl.program_id(0), num_jobs, gl.num_programs(0)):
        token = (job // 2).to(gl.int64)
        part = job % 2
        num_steps = num_pairs_of(lists, token)
        mbarrier.wait(smem.heads.index(0), turn)
        for i in range(num_steps):
            mbarrier.wait(smem.full.index(W), phase)
            ds = smem.dscores.index(W).permute((1, 0))
            acc = gl.zeros([64, 256], gl.float32, WIDE)
            rope = gl.zeros([64, 32], gl.float32, NARROW)
            acc = warpgroup_mma(ds, smem.q, acc, use_acc=False, is_async=True)
            weights = smem.probs.index(W).permute((1, 0))
            acc = warpgroup_mma(weights, smem.dout, acc, is_async=True)
            if D > 512:
                rope = warpgroup_mma(ds, smem.q_rope, rope, use_acc=False, is_async=True)
            acc, rope = warpgroup_mma_wait(0, deps=[acc, rope])
            mbarrier.arrive(smem.empty.index(W), count=1)
            if i + 1 == num_steps:
                mbarrier.arrive(smem.heads.index(1), count=1)
            phase = phase ^ 1
            first = (2 * i + W) * BLOCK
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
def _terms_producer(num_jobs, smem, q, q_rope, dout, probs, dscores, lists, D: gl.constexpr):
    stage = 0
    phase = 1
    turn = 1
    for job in range(gl.program_id(0), num_jobs, gl.num_programs(0)):
        token = job // 2
        part = job % 2
        num_blocks = 2 * num_pairs_of(lists, token)
        mbarrier.wait(smem.heads.index(1), turn)
        turn = turn ^ 1
        bar = smem.heads.index(0)
        mbarrier.expect(bar, HEADS * (D + 512))
        _load_half(smem.q, q, token, part, bar)
        _load_half(smem.dout, dout, token, part, bar)
        if D > 512:
            to = reinterpret(smem.q_rope, gl.bfloat16, [1, HEADS, 32], TOKEN_ROPE_TILE)
            tma_load(q_rope, [token, 0, 512 + part * 32], bar, to)
        for block in range(num_blocks):
            mbarrier.wait(smem.empty.index(stage), phase)
            bar = smem.full.index(stage)
            mbarrier.expect(bar, 2 * HEADS * 64 * 2)
            load_heads(smem.dscores.index(stage), dscores, token, 0, block * BLOCK, bar, HEADS)
            load_heads(smem.probs.index(stage), probs, token, 0, block * BLOCK, bar, HEADS)
            stage += 1
            if stage == 2:
                stage = 0
                phase = phase ^ 1


@gluon.jit(do_not_specialize=["num_jobs"])
def _terms(num_jobs, q, q_rope, dout, probs, dscores, lists, terms, topk, D: gl.constexpr):
    """``dS^T q + A^T dout`` of a token's entries, summed over its heads ``[n K, D]``.

    The heads stay in shared memory, and weights stream through it. Half of the dims fit: a job is
    one half, and the warpgroups take blocks in turn. While one stores its terms, the other's MMAs
    run::

        barrier    arrivals          waits       guards
        full [2]   1, TMA            consumer W  the weights of a block of W
        empty [2]  1, its consumer   producer    a stage may be overwritten
        heads [0]  1, TMA            both        the job's q and dout
        heads [1]  2, both           producer    the last MMA of the job is done

    Writes are the bound: 1152 bytes an entry, at 3.0 of the 3.3 TB/s at which an H200 fills memory.
    """
    smem = TermsMemory(
        q=gl.allocate_shared_memory(gl.bfloat16, [HEADS, 256], TILE),
        q_rope=gl.allocate_shared_memory(gl.bfloat16, [HEADS, 32], ROPE_TILE),
        dout=gl.allocate_shared_memory(gl.bfloat16, [HEADS, 256], TILE),
        probs=gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, 64], TILE),
        dscores=gl.allocate_shared_memory(gl.bfloat16, [2, HEADS, 64], TILE),
        full=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
        empty=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
        heads=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
    )
    for b in gl.static_range(2):
        mbarrier.init(smem.full.index(b), count=1)
        mbarrier.init(smem.empty.index(b), count=1)
    mbarrier.init(smem.heads.index(0), count=1)
    mbarrier.init(smem.heads.index(1), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_terms_consumer, (0, num_jobs, smem, lists, terms, topk, D)),
            (_terms_consumer, (1, num_jobs, smem, lists, terms, topk, D)),
            (_terms_producer, (num_jobs, smem, q, q_rope, dout, probs, dscores, lists, D)),
        ],
        [4, 4],
        [224, 48],
    )  # fmt: skip


# ---- the launcher ------------------------------------------------------------------------------


def _tiles_of_rope(x: Tensor) -> TensorDescriptor:
    """Like :func:`tiles_of_heads`, of 32 dims."""
    layout = TOKEN_ROPE_TILE.value
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, HEADS.value, 32], layout)


def sparse_attention_backward(call: SparseAttentionBackward) -> None:
    list_heads, topk = call.list_tokens * call.q.shape[1], call.topk_indices.shape[1]
    width = cdiv(topk, BLOCK.value) * BLOCK.value
    in_chunks(call, 4 * list_heads * width, lambda part: _launch(call, part, width))


def _launch(call: SparseAttentionBackward, part: Part, width: int) -> None:
    kv_row, rope = call.kv.stride(0) // 8, call.q.shape[2] - 512
    jobs = part.num_lists * TILES.value
    grid = part.grid(jobs)
    weights = part.q.new_empty(2, part.num_lists, part.num_heads, width)
    probs, dscores = weights
    _weights[grid](
        jobs,
        tiles_of_heads(part.q, 64),
        tiles_of_heads(part.dout, 64),
        call.kv,
        kv_row,
        part.lists,
        part.token_mask,
        part.state,
        probs,
        dscores,
        part.num_heads,
        part.num_states,
        width,
        call.softmax_scale,
        call.softmax_scale * LOG2E.value,
        ROPE=rope,
        num_warps=4,
    )
    _queries[grid](
        jobs,
        tiles_of_heads(dscores, 64),
        call.kv,
        kv_row,
        part.lists,
        part.dq,
        *part.dq.stride()[:2],
        part.num_heads,
        ROPE=rope,
        num_warps=4,
    )
    _terms[grid](
        jobs,
        tiles_of_heads(part.q, HEADS.value),
        _tiles_of_rope(part.q),
        tiles_of_heads(part.dout, HEADS.value),
        tiles_of_heads(probs, HEADS.value),
        tiles_of_heads(dscores, HEADS.value),
        part.lists,
        part.terms,
        part.topk,
        D=part.q.shape[2],
        num_warps=4,
    )

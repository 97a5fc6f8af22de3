"""The gradients of attention over selected rows of up to 64 heads, on Hopper, in one pass.

The steps of the portable kernels (their module draws them) in one persistent kernel: a block of 64
rows is gathered once, and all five products are taken while it lies in shared memory. ``A`` and
``dS`` never leave the multiprocessor. Four warpgroups, one of them the producer::

    producer   gathers rows in panels (cp.async), loads a token's heads (TMA)
    weights    S^T = K q^T, dP^T = V dout^T, then A^T and dS^T, which stay in its registers, and dS
               in shared memory; then the terms dS^T q + A^T dout, which it stores
    dq 0       dq += dS K of dims 0-127, 256-383 and the RoPE dims, in its registers
    dq 1       dq += dS K of dims 128-255 and 384-511

Keys are the rows (M) of S, so that A^T and dS^T are in the layout in which an MMA takes its A
operand from registers: terms need nothing from shared memory but q and dout, and of the weights
only dS (8 KiB) goes there, for dq. Heads take 136 KiB, so a block of rows (72) has one buffer.

Registers decide the roles: dq of 64 heads takes 160 and 128 of a thread, S and dP 64, a chunk of
terms 32. 128 (weights) + 192 + 160 (dq) + 32 (producer) are all that four warpgroups have. With 8
less, ptxas serialises the MMAs of dq.
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

from sparsemla.kernels.attention.triton.tiles import LOG2E
from sparsemla.kernels.backward.arguments import SparseAttentionBackward
from sparsemla.kernels.backward.sm90.chunks import Part, in_chunks
from sparsemla.kernels.common.gluon import opaque, opaque_zero, reinterpret
from sparsemla.kernels.common.hopper import (
    BLOCK,
    COPY,
    PLAIN,
    STORE,
    TILE,
    copy_dims,
    load_heads,
    store_tile,
    tiles_of_heads,
)

S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
DQ = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
A_OPERAND = gl.constexpr(gl.DotOperandLayout(0, S_LAYOUT, 2))


class Memory(NamedTuple):
    """Shared memory: 136 KiB of heads, 72 of a block of rows, 8 of dS."""

    q: object  # [4, 64, 128]
    q_rope: object  # [1, 64, 64]
    dout: object  # [4, 64, 128]
    kv: object  # [4, 64, 128]
    k_rope: object  # [1, 64, 64]
    dscores: object  # [64 keys, 64 heads]
    full: object  # [5] a panel of rows has arrived
    empty: object  # [5] a panel may be overwritten
    ds: object  # [2] dS of a block is there, may be overwritten
    state: object  # [3, 64] lse, g and offset of a token's heads
    owners: object  # [64] the bit of the token of each head
    heads: object  # [2] the heads of a token have arrived, may be overwritten


@gluon.jit
def _num_blocks_of(lists, token):
    """Blocks of a list; a loop that may be skipped makes the compiler serialise MMAs."""
    return gl.maximum(gl.cdiv(gl.load(lists.ends + token), BLOCK), 1)


@gluon.jit
def _load_index(lists, token, first, LAYOUT: gl.constexpr):
    """Entries of the block of a list that begins at ``first``, -1 beyond the list's end."""
    at = first + gl.arange(0, BLOCK, LAYOUT)
    end = gl.load(lists.ends + token)
    indices = lists.indices + token.to(gl.int64) * lists.stride
    return gl.load(indices + at, mask=at < end, other=-1)


@gluon.jit
def _weights(
    num_jobs, smem, lists, token_mask, terms, topk, scales, D: gl.constexpr
):  # fmt: skip
    scale, scale_log2 = scales
    COLUMNS: gl.constexpr = gl.SliceLayout(0, S_LAYOUT)
    CHUNKS: gl.constexpr = D // 64
    phase = 0
    turn = 0
    for job in range(gl.program_id(0), num_jobs, gl.num_programs(0)):
        token = job.to(gl.int64)
        num_blocks = _num_blocks_of(lists, token)
        rows = terms + token * topk * D
        mbarrier.wait(smem.heads.index(0), turn)
        for block in range(num_blocks):
            zero = opaque_zero(block)
            first = block * BLOCK
            index = _load_index(lists, token, first, gl.SliceLayout(1, S_LAYOUT))
            valid = (index >= 0) & (index < lists.num_rows)
            s = gl.zeros([64, 64], gl.float32, S_LAYOUT)
            dp = gl.zeros([64, 64], gl.float32, S_LAYOUT)
            for p in gl.static_range(4):
                mbarrier.wait(smem.full.index(p), phase)
                fence_async_shared()
                keys = smem.kv.index(zero + p)
                q = smem.q.index(zero + p).permute((1, 0))
                s = warpgroup_mma(keys, q, s, use_acc=p > 0, is_async=True)
                dout = smem.dout.index(zero + p).permute((1, 0))
                dp = warpgroup_mma(keys, dout, dp, use_acc=p > 0, is_async=True)
            if D > 512:
                mbarrier.wait(smem.full.index(4), phase)
                fence_async_shared()
                q = smem.q_rope.index(zero).permute((1, 0))
                s = warpgroup_mma(smem.k_rope.index(zero), q, s, is_async=True)
            kept = valid[:, None]
            if token_mask is not None:
                at = first + gl.arange(0, 64, gl.SliceLayout(1, S_LAYOUT))
                end = gl.load(lists.ends + token)
                bits = token_mask.bits + token * token_mask.stride + at
                bits = gl.load(bits, mask=at < end, other=0).to(gl.int32)
                owner = smem.owners.load(COLUMNS)
                kept = kept & ((bits[:, None] & owner[None, :]) != 0)
            s, dp = warpgroup_mma_wait(0, deps=[s, dp])
            lse2 = smem.state.index(0).load(COLUMNS)
            weight = gl.exp2(s * scale_log2 - lse2[None, :])
            share = smem.state.index(1).load(COLUMNS)
            offset = smem.state.index(2).load(COLUMNS)
            ds = weight * (share[None, :] * dp - offset[None, :]) * scale
            weight = gl.where(kept, weight * share[None, :], 0.0).to(gl.bfloat16)
            ds = gl.where(kept, ds, 0.0).to(gl.bfloat16)
            mbarrier.wait(smem.ds.index(1), phase ^ 1)
            smem.dscores.store(ds)
            fence_async_shared()
            mbarrier.arrive(smem.ds.index(0), count=1)
            weight = gl.convert_layout(weight, A_OPERAND)
            ds = gl.convert_layout(ds, A_OPERAND)

            at = first + gl.arange(0, 64, gl.SliceLayout(1, STORE))
            inside = at < topk
            acc = gl.zeros([64, 64], gl.float32, S_LAYOUT)
            q = reinterpret(smem.q, gl.bfloat16, [8, 64, 64], TILE)
            dout = reinterpret(smem.dout, gl.bfloat16, [8, 64, 64], TILE)
            acc = warpgroup_mma(ds, q.index(zero), acc, use_acc=False, is_async=True)
            acc = warpgroup_mma(weight, dout.index(zero), acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            done = acc.to(gl.bfloat16)
            for c in range(1, 8):
                acc = gl.zeros([64, 64], gl.float32, S_LAYOUT)
                acc = warpgroup_mma(ds, q.index(c), acc, use_acc=False, is_async=True)
                acc = warpgroup_mma(weight, dout.index(c), acc, is_async=True)
                store_tile(rows + (c - 1) * 64, done, at * D, inside, STORE)
                acc = warpgroup_mma_wait(0, deps=[acc])
                done = acc.to(gl.bfloat16)
            if D > 512:
                acc = gl.zeros([64, 64], gl.float32, S_LAYOUT)
                acc = warpgroup_mma(ds, smem.q_rope.index(zero), acc, use_acc=False, is_async=True)
                store_tile(rows + 7 * 64, done, at * D, inside, STORE)
                acc = warpgroup_mma_wait(0, deps=[acc])
                done = acc.to(gl.bfloat16)
            if block + 1 == num_blocks:
                mbarrier.arrive(smem.heads.index(1), count=1)
            store_tile(rows + (CHUNKS - 1) * 64, done, at * D, inside, STORE)
            phase = phase ^ 1
        turn = turn ^ 1


@gluon.jit
def _store_plain(target, acc, dq_head, num_heads, LAYOUT: gl.constexpr):
    """Store rows of float32 as bfloat16 from the layout of the MMA."""
    head = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    dim = gl.arange(0, acc.shape[1], gl.SliceLayout(0, LAYOUT))
    at = head.to(gl.int64)[:, None] * dq_head + dim[None, :]
    gl.store(target + at, acc.to(gl.bfloat16), mask=(head < num_heads)[:, None])


@gluon.jit
def _queries(
    W: gl.constexpr, num_jobs, smem, lists, dq, dq_token, dq_head, num_heads, D: gl.constexpr
):  # fmt: skip
    """Panels ``W`` and ``W + 2`` of dq, and with ``W`` 0 the RoPE dims."""
    phase = 0
    for job in range(gl.program_id(0), num_jobs, gl.num_programs(0)):
        token = job.to(gl.int64)
        first = gl.zeros([64, 128], gl.float32, DQ)
        second = gl.zeros([64, 128], gl.float32, DQ)
        if D > 512 and W == 0:
            rope = gl.zeros([64, 64], gl.float32, S_LAYOUT)
        for block in range(_num_blocks_of(lists, token)):
            zero = opaque_zero(block)
            mbarrier.wait(smem.ds.index(0), phase)
            fence_async_shared()
            ds = smem.dscores.permute((1, 0))
            first = warpgroup_mma(ds, smem.kv.index(zero + W), first, is_async=True)
            second = warpgroup_mma(ds, smem.kv.index(zero + W + 2), second, is_async=True)
            if D > 512 and W == 0:
                rope = warpgroup_mma(ds, smem.k_rope.index(zero), rope, is_async=True)
                first, second, rope = warpgroup_mma_wait(2, deps=[first, second, rope])
                mbarrier.arrive(smem.empty.index(W), count=1)
                first, second, rope = warpgroup_mma_wait(1, deps=[first, second, rope])
                mbarrier.arrive(smem.empty.index(W + 2), count=1)
                first, second, rope = warpgroup_mma_wait(0, deps=[first, second, rope])
                mbarrier.arrive(smem.empty.index(4), count=1)
            else:
                first, second = warpgroup_mma_wait(1, deps=[first, second])
                mbarrier.arrive(smem.empty.index(W), count=1)
                first, second = warpgroup_mma_wait(0, deps=[first, second])
                mbarrier.arrive(smem.empty.index(W + 2), count=1)
            mbarrier.arrive(smem.ds.index(1), count=1)
            phase = phase ^ 1
        target = dq + token * dq_token
        _store_plain(target + W * 128, first, dq_head, num_heads, DQ)
        _store_plain(target + (W + 2) * 128, second, dq_head, num_heads, DQ)
        if D > 512 and W == 0:
            _store_plain(target + 512, rope, dq_head, num_heads, S_LAYOUT)


@gluon.jit
def _producer(
    num_jobs, smem, q, dout, kv, kv_row, lists, token_mask, state, num_heads, num_states,
    D: gl.constexpr
):  # fmt: skip
    ROWS: gl.constexpr = gl.SliceLayout(1, COPY)
    HEADS: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    phase = 1
    turn = 1
    for job in range(gl.program_id(0), num_jobs, gl.num_programs(0)):
        token = job
        num_blocks = _num_blocks_of(lists, token)
        mbarrier.wait(smem.heads.index(1), turn)
        bar = smem.heads.index(0)
        mbarrier.expect(bar, 64 * 2 * (D + 512))
        q_panels = reinterpret(smem.q, gl.bfloat16, [8, 64, 64], TILE)
        dout_panels = reinterpret(smem.dout, gl.bfloat16, [8, 64, 64], TILE)
        for c in range(8 + (token >> 31)):  # 8, but unrolled the loop would spill
            load_heads(q_panels.index(c), q, token, 0, c * 64, bar, 64)
            load_heads(dout_panels.index(c), dout, token, 0, c * 64, bar, 64)
        if D > 512:
            load_heads(smem.q_rope.index(0), q, token, 0, 512, bar, 64)
        head = gl.arange(0, 64, HEADS) + opaque_zero(job)
        at_head = state + token.to(gl.int64) * num_heads + head
        for i in gl.static_range(3):
            x = gl.load(at_head + i * num_states, mask=head < num_heads, other=0.0)
            smem.state.index(i).store(x)
        if token_mask is not None:
            smem.owners.store(1 << gl.minimum(head // token_mask.num_heads, 8))
        mbarrier.arrive(bar, count=1)
        index = _load_index(lists, token, 0, ROWS)
        for block in range(num_blocks):
            row = index.to(gl.int64)
            valid = (index >= 0) & (index < lists.num_rows)
            for p in gl.static_range(4):
                mbarrier.wait(smem.empty.index(p), phase)
                copy_dims(smem.kv.index(p), kv, kv_row, row, valid, p * 128, 128, COPY)
                async_copy.mbarrier_arrive(smem.full.index(p), increment_count=False)
            if D > 512:
                mbarrier.wait(smem.empty.index(4), phase)
                copy_dims(smem.k_rope.index(0), kv, kv_row, row, valid, 512, 64, COPY)
                async_copy.mbarrier_arrive(smem.full.index(4), increment_count=False)
            # Opaque, or the compiler keeps an address for each row.
            index = _load_index(lists, token, opaque((block + 1) * BLOCK), ROWS)
            phase = phase ^ 1
        turn = turn ^ 1


@gluon.jit(do_not_specialize=["num_jobs", "num_states"])
def _one_pass(
    num_jobs, q, dout, kv, kv_row, lists, token_mask, state, terms, topk, dq, dq_token, dq_head,
    num_heads, num_states, scale, scale_log2, D: gl.constexpr,
):  # fmt: skip
    """``dq`` of tokens of up to 64 heads, and the term of each of their entries.

    A block of rows comes in panels, four of 128 dims and the RoPE dims, and has one buffer. A panel
    is overwritten as soon as its last reader, the dq product, is done, while the terms of the
    block, which do not need it, are multiplied and stored::

        producer   rows of block 0 |                | rows of block 1, as panels empty    | ...
        weights           S, dP    | A, dS | terms of block 0, stores      | S, dP of 1   | A, dS
        dq 0, 1                            | dq of block 0 |                              | dq of 1

        barrier      arrivals             waits              guards
        full [5]     128 copies' threads  weights            a panel of a block has arrived
        ds [0]       1, weights           dq 0, dq 1         dS is in memory (and the panels are)
        empty [5]    1, the panel's dq    producer           a panel may be overwritten
        ds [1]       2, dq 0 and dq 1     weights            dS may be overwritten
        heads [0]    2, TMA, producer     weights            the token's q, dout and state
        heads [1]    1, weights           producer           the last MMA of the token is done
    """
    ROPE_REGS: gl.constexpr = 192 if D > 512 else 160
    smem = Memory(
        q=gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], TILE),
        q_rope=gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], TILE),
        dout=gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], TILE),
        kv=gl.allocate_shared_memory(gl.bfloat16, [4, 64, 128], TILE),
        k_rope=gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], TILE),
        dscores=gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE),
        state=gl.allocate_shared_memory(gl.float32, [3, 64], PLAIN),
        owners=gl.allocate_shared_memory(gl.int32, [64], PLAIN),
        full=gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout()),
        empty=gl.allocate_shared_memory(gl.int64, [5, 1], mbarrier.MBarrierLayout()),
        ds=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
        heads=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
    )
    for b in gl.static_range(5):
        mbarrier.init(smem.full.index(b), count=128)
        mbarrier.init(smem.empty.index(b), count=1)
    mbarrier.init(smem.ds.index(0), count=1)
    mbarrier.init(smem.ds.index(1), count=2)
    mbarrier.init(smem.heads.index(0), count=2)
    mbarrier.init(smem.heads.index(1), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_weights, (num_jobs, smem, lists, token_mask, terms, topk, (scale, scale_log2), D)),
            (_queries, (0, num_jobs, smem, lists, dq, dq_token, dq_head, num_heads, D)),
            (_queries, (1, num_jobs, smem, lists, dq, dq_token, dq_head, num_heads, D)),
            (_producer, (num_jobs, smem, q, dout, kv, kv_row, lists, token_mask, state, num_heads,
                         num_states, D)),
        ],
        [4, 4, 4],
        [ROPE_REGS, 160, 32],
    )  # fmt: skip


def sparse_attention_backward(call: SparseAttentionBackward) -> None:
    in_chunks(call, 0, lambda part: _launch(call, part))


def _launch(call: SparseAttentionBackward, part: Part) -> None:
    _one_pass[part.grid(part.num_lists)](
        part.num_lists,
        tiles_of_heads(part.q, 64),
        tiles_of_heads(part.dout, 64),
        call.kv,
        call.kv.stride(0) // 8,
        part.lists,
        part.token_mask,
        part.state,
        part.terms,
        part.topk,
        part.dq,
        *part.dq.stride()[:2],
        part.num_heads,
        part.num_states,
        call.softmax_scale,
        call.softmax_scale * LOG2E.value,
        D=part.q.shape[2],
        num_warps=4,
    )

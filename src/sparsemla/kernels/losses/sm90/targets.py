"""What all heads together attend to over listed rows: heads on N, where they add up in registers.

The keys of a block pass through the MMAs of all heads of a token at once. Keys come in panels, four
of 128 dims and the RoPE dims, and a panel is overwritten as soon as its MMAs are done. Two consumer
warpgroups take the blocks in turn::

    producer   panels of block 0 | panels of block 1, each once it is empty | ...
    W = 0      S of block 0      | P, sum, store      | S of block 2
    W = 1                        | S of block 1       | P, sum, store

    barrier           arrivals             waits        guards
    full [2, 5]       128 copies' threads  consumer W   a panel of a block of W has arrived
    empty [STAGES, 5] 1, its consumer      producer     a panel may be overwritten
    heads [0]         1, TMA               consumers    the token's heads
    heads [1]         2, both              producer     the last MMA of the token is done

Shared memory: 144 KiB of 128 heads beside one block of 72, or 72 of 64 heads beside two.
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

from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.gluon import opaque_zero, reinterpret
from sparsemla.kernels.common.hopper import (
    BLOCK,
    COPY,
    TILE,
    Lists,
    copy_dims,
    list_ends,
    load_heads,
    load_rows,
    num_pairs_of,
    tiles_of_heads,
)
from sparsemla.kernels.losses.arguments import AttentionTarget
from sparsemla.kernels.losses.triton import LOG2E, normalize_rows

PANELS = gl.constexpr(5)
"""Panels of a block: four of 128 dims, and the RoPE dims."""


class Memory(NamedTuple):
    """Shared memory of a CTA. The module's docstring has the table of the barriers."""

    q: object  # [4, HEADS, 128]
    q_rope: object  # [HEADS, 64]
    kv: object  # [STAGES * 4, 64, 128]
    k_rope: object  # [STAGES, 64, 64]
    full: object
    empty: object
    heads: object


@gluon.jit
def _load_offsets(lse, lse_token, attn_sink, token, head, num_heads):
    """What to subtract from logits in base 2: the LSE, with the sink if there is one."""
    real = head < num_heads
    row_lse = gl.load(lse + token * lse_token + head, mask=real, other=0.0)
    row_lse = gl.where(row_lse == float("-inf"), 0.0, row_lse)  # no valid entry
    offset = row_lse * LOG2E
    if attn_sink is not None:
        sink = gl.load(attn_sink + head, mask=real, other=0.0)
        offset += gl.log2(1 + gl.exp2((sink - row_lse) * LOG2E))
    return offset


@gluon.jit
def _consumer(
    W: gl.constexpr, num_tokens, smem, lists, lse, lse_token, attn_sink, out, topk, num_heads,
    scale_log2, HEADS: gl.constexpr, STAGES: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """Blocks ``W``, ``W + 2``, ... of each token."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEADS, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    stage: gl.constexpr = W % STAGES
    head = gl.arange(0, HEADS, gl.SliceLayout(0, ACC))
    phase = 0
    turn = 0
    for job in range(gl.program_id(0), num_tokens, gl.num_programs(0)):
        token = job.to(gl.int64)
        num_pairs = num_pairs_of(lists, token)
        offset = _load_offsets(lse, lse_token, attn_sink, token, head, num_heads)
        mbarrier.wait(smem.heads.index(0), turn)
        for i in range(num_pairs):
            block = 2 * i + W
            zero = opaque_zero(i)
            _, valid = load_rows(lists, token, block, ROWS)
            s = gl.zeros([64, HEADS], gl.float32, ACC)
            for p in gl.static_range(4):
                mbarrier.wait(smem.full.index(W * PANELS + p), phase)
                fence_async_shared()
                q = smem.q.index(zero + p).permute((1, 0))
                s = warpgroup_mma(
                    smem.kv.index(zero + stage * 4 + p), q, s, use_acc=p > 0, is_async=True
                )
                if p > 0:
                    s = warpgroup_mma_wait(1, deps=[s])
                    mbarrier.arrive(smem.empty.index(stage * PANELS + p - 1), count=1)
            if ROPE > 0:
                mbarrier.wait(smem.full.index(W * PANELS + 4), phase)
                fence_async_shared()
                k_rope = smem.k_rope.index(zero + stage)
                s = warpgroup_mma(k_rope, smem.q_rope.permute((1, 0)), s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            mbarrier.arrive(smem.empty.index(stage * PANELS + 3), count=1)
            if ROPE > 0:
                mbarrier.arrive(smem.empty.index(stage * PANELS + 4), count=1)
            if i + 1 == num_pairs:
                mbarrier.arrive(smem.heads.index(1), count=1)
            p = gl.exp2(s * scale_log2 - offset[None, :])
            total = gl.sum(gl.where((head < num_heads)[None, :], p, 0.0), 1)
            at = block * BLOCK + gl.arange(0, BLOCK, ROWS)
            gl.store(out + token * topk + at, gl.where(valid, total, 0.0), mask=at < topk)
            phase = phase ^ 1
        turn = turn ^ 1


@gluon.jit
def _producer(
    num_tokens, smem, q, kv, kv_row, lists, HEADS: gl.constexpr, STAGES: gl.constexpr,
    ROPE: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = gl.SliceLayout(1, COPY)
    phase = 1
    turn = 1
    for token in range(gl.program_id(0), num_tokens, gl.num_programs(0)):
        num_pairs = num_pairs_of(lists, token)
        row, valid = load_rows(lists, token, 0, ROWS)
        mbarrier.wait(smem.heads.index(1), turn)
        bar = smem.heads.index(0)
        mbarrier.expect(bar, HEADS * 2 * (512 + ROPE))
        for p in gl.static_range(4):
            panels = reinterpret(smem.q.index(p), gl.bfloat16, [2, HEADS, 64], TILE)
            for j in gl.static_range(2):
                load_heads(panels.index(j), q, token, 0, p * 128 + j * 64, bar, HEADS)
        if ROPE > 0:
            load_heads(smem.q_rope, q, token, 0, 512, bar, HEADS)
        for i in range(num_pairs):
            for w in gl.static_range(2):
                stage = w % STAGES
                for p in gl.static_range(4):
                    mbarrier.wait(smem.empty.index(stage * PANELS + p), phase)
                    to = smem.kv.index(stage * 4 + p)
                    copy_dims(to, kv, kv_row, row, valid, p * 128, 128, COPY)
                    async_copy.mbarrier_arrive(
                        smem.full.index(w * PANELS + p), increment_count=False
                    )
                if ROPE > 0:
                    mbarrier.wait(smem.empty.index(stage * PANELS + 4), phase)
                    to = smem.k_rope.index(stage)
                    copy_dims(to, kv, kv_row, row, valid, 512, 64, COPY)
                    async_copy.mbarrier_arrive(
                        smem.full.index(w * PANELS + 4), increment_count=False
                    )
                row, valid = load_rows(lists, token, 2 * i + w + 1, ROWS)
                if STAGES == 1:
                    phase = phase ^ 1
            if STAGES == 2:
                phase = phase ^ 1
        turn = turn ^ 1


@gluon.jit(do_not_specialize=["num_tokens"])
def _targets(
    num_tokens, q, kv, kv_row, lists, lse, lse_token, attn_sink, out, topk, num_heads, scale_log2,
    HEADS: gl.constexpr, ROPE: gl.constexpr,
):  # fmt: skip
    """``sum_h exp(z - lse)`` of each entry ``[T, K]``, with the heads' shares of their sinks."""
    STAGES: gl.constexpr = 128 // HEADS
    smem = Memory(
        q=gl.allocate_shared_memory(gl.bfloat16, [4, HEADS, 128], TILE),
        q_rope=gl.allocate_shared_memory(gl.bfloat16, [HEADS, 64], TILE),
        kv=gl.allocate_shared_memory(gl.bfloat16, [STAGES * 4, 64, 128], TILE),
        k_rope=gl.allocate_shared_memory(gl.bfloat16, [STAGES, 64, 64], TILE),
        full=gl.allocate_shared_memory(gl.int64, [2 * PANELS, 1], mbarrier.MBarrierLayout()),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES * PANELS, 1], mbarrier.MBarrierLayout()),
        heads=gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout()),
    )
    for b in gl.static_range(2 * PANELS):
        mbarrier.init(smem.full.index(b), count=128)
    for b in gl.static_range(STAGES * PANELS):
        mbarrier.init(smem.empty.index(b), count=1)
    mbarrier.init(smem.heads.index(0), count=1)
    mbarrier.init(smem.heads.index(1), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (0, num_tokens, smem, lists, lse, lse_token, attn_sink, out, topk,
                         num_heads, scale_log2, HEADS, STAGES, ROPE)),
            (_consumer, (1, num_tokens, smem, lists, lse, lse_token, attn_sink, out, topk,
                         num_heads, scale_log2, HEADS, STAGES, ROPE)),
            (_producer, (num_tokens, smem, q, kv, kv_row, lists, HEADS, STAGES, ROPE)),
        ],
        [4, 4],
        [208, 96],
    )  # fmt: skip


def attention_target(call: AttentionTarget) -> None:
    q, kv, lse, topk_indices, out = call.q, call.kv, call.lse, call.topk_indices, call.out
    (num_tokens, num_heads, head_dim), topk = q.shape, topk_indices.shape[1]
    out.zero_()  # what is behind the last valid entry of a list
    if num_heads * out.numel() == 0:
        return
    # An expanded tensor has strides of 0, which no descriptor of a TMA is tested with.
    q = q if all(q.stride()) else q.contiguous()
    heads = 64 if num_heads <= 64 else 128
    lists = Lists(
        topk_indices,
        topk_indices.stride(0),
        list_ends(topk_indices, call.topk_lengths, kv.shape[0]),
        kv.shape[0],
    )
    _targets[(min(num_tokens, num_multiprocessors(q.device)),)](
        num_tokens,
        tiles_of_heads(q, heads),
        kv,
        kv.stride(0) // 8,
        lists,
        lse,
        lse.stride(0),
        call.attn_sink,
        out,
        topk,
        num_heads,
        call.softmax_scale * LOG2E.value,
        HEADS=heads,
        ROPE=head_dim - 512,
        num_warps=4,
    )
    if call.normalize:
        normalize_rows(out)

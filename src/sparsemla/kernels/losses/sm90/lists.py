"""Index scores of listed rows and their gradients, for up to 64 heads of 128 dims.

A consumer warpgroup has a token: its heads stay in shared memory and blocks of 64 entries pass by.
The two consumers of a CTA have neighbouring tokens and share nothing, so nothing of a token is
summed twice. With entries on M and heads on N::

    _scores      x = k q^T, then sum_h w relu(x)
    _gradients   x = k q^T, b = g w [x > 0]; terms = b q and diq += b^T k in one step

``b`` is an operand of both products: from registers of the first, and from shared memory,
transposed, of the second. Terms are bfloat16, and each row of dik adds its own in the order of
tokens and entries.

Barriers, for each consumer; stages of rows and two buffers of heads::

    barrier         arrivals             waits     guards
    full [STAGES]   128 copies' threads  consumer  rows of a block
    empty [STAGES]  1, consumer          producer  a stage may be overwritten
    heads_full [2]  1, TMA               consumer  the heads of a token
    heads_empty [2] 1, consumer          producer  they may be overwritten
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
from triton.language import PropagateNan

from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.gluon import opaque_zero, reinterpret
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
    next_stage,
    store_128,
    store_tile,
    tiles_of_heads,
)
from sparsemla.kernels.common.integers import cdiv
from sparsemla.kernels.common.lists import ENTRY_BYTES, add_terms
from sparsemla.kernels.losses import triton as portable

DIM = gl.constexpr(128)
STAGES = gl.constexpr(4)
"""Blocks in flight of a consumer, 16 KiB each."""
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
PROPAGATE_NAN = gl.constexpr(PropagateNan.ALL)


class Memory(NamedTuple):
    """Shared memory of a CTA; the first dim of each part belongs to the consumers in turn."""

    q: object  # [2 * 2, 64, DIM]
    keys: object  # [2 * STAGES, 64, DIM]
    full: object  # [2 * STAGES]
    empty: object  # [2 * STAGES]
    heads_full: object  # [2 * 2]
    heads_empty: object  # [2 * 2]


class Indexer(NamedTuple):
    """The head weights of the tokens, and how many heads there are."""

    weights: object
    weights_token: object
    num_heads: object


@gluon.jit
def _num_blocks(lists, token):
    """Blocks of a list; a loop that may be skipped makes the compiler serialise MMAs."""
    return gl.maximum(gl.cdiv(gl.load(lists.ends + token), BLOCK), 1)


@gluon.jit
def _load_head_weights(indexer, token):
    """Weights of the heads, as the columns of an accumulator; 0 for heads that do not exist."""
    head = gl.arange(0, 64, gl.SliceLayout(0, ACC))
    at = indexer.weights + token * indexer.weights_token + head
    return gl.load(at, mask=head < indexer.num_heads, other=0.0).to(gl.float32)


@gluon.jit
def _producer(num_tokens, smem, q, keys, keys_row, lists):
    ROWS: gl.constexpr = gl.SliceLayout(1, COPY)
    stage_0, stage_1 = 0, 0
    phase_0, phase_1 = 1, 1
    turn, turn_phase = 0, 1
    for first in range(2 * gl.program_id(0), num_tokens, 2 * gl.num_programs(0)):
        second = gl.minimum(first + 1, num_tokens - 1)
        for w in gl.static_range(2):
            if first + w < num_tokens:
                mbarrier.wait(smem.heads_empty.index(w * 2 + turn), turn_phase)
                bar = smem.heads_full.index(w * 2 + turn)
                mbarrier.expect(bar, 64 * DIM * 2)
                panels = reinterpret(smem.q.index(w * 2 + turn), gl.bfloat16, [2, 64, 64], TILE)
                load_heads(panels.index(0), q, first + w, 0, 0, bar, 64)
                load_heads(panels.index(1), q, first + w, 0, 64, bar, 64)
        turn, turn_phase = next_stage(turn, turn_phase, 2)
        blocks_0 = _num_blocks(lists, first)
        blocks_1 = gl.where(second > first, _num_blocks(lists, second), 0)
        row_0, valid_0 = load_rows(lists, first, 0, ROWS)
        row_1, valid_1 = load_rows(lists, second, 0, ROWS)
        for block in range(gl.maximum(blocks_0, blocks_1)):
            if block < blocks_0:
                mbarrier.wait(smem.empty.index(stage_0), phase_0)
                copy_dims(smem.keys.index(stage_0), keys, keys_row, row_0, valid_0, 0, DIM, COPY)
                async_copy.mbarrier_arrive(smem.full.index(stage_0), increment_count=False)
                stage_0, phase_0 = next_stage(stage_0, phase_0, STAGES)
            row_0, valid_0 = load_rows(lists, first, block + 1, ROWS)
            if block < blocks_1:
                to = STAGES + stage_1
                mbarrier.wait(smem.empty.index(to), phase_1)
                copy_dims(smem.keys.index(to), keys, keys_row, row_1, valid_1, 0, DIM, COPY)
                async_copy.mbarrier_arrive(smem.full.index(to), increment_count=False)
                stage_1, phase_1 = next_stage(stage_1, phase_1, STAGES)
            row_1, valid_1 = load_rows(lists, second, block + 1, ROWS)


@gluon.jit
def _logits(smem, stage, q):
    """Start ``k q^T`` of a block, ``[entries, heads]``."""
    x = gl.zeros([64, 64], gl.float32, ACC)
    return warpgroup_mma(smem.keys.index(stage), q.permute((1, 0)), x, use_acc=False, is_async=True)


@gluon.jit
def _sum_rows_of_threads(x):
    """Add the two rows of a column that a thread has in an accumulator ``[64, N]``."""
    return gl.sum(x.reshape([4, 2, 8, x.shape[1]]), 1)


@gluon.jit
def _scores_consumer(W: gl.constexpr, num_tokens, smem, lists, indexer, out, topk):
    ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    stage, phase = 0, 0
    turn, turn_phase = 0, 0
    for job in range(2 * gl.program_id(0) + W, num_tokens, 2 * gl.num_programs(0)):
        token = job.to(gl.int64)
        num_blocks = _num_blocks(lists, token)
        w = _load_head_weights(indexer, token)
        real = gl.arange(0, 64, gl.SliceLayout(0, ACC)) < indexer.num_heads
        heads = W * 2 + turn
        mbarrier.wait(smem.heads_full.index(heads), turn_phase)
        for block in range(num_blocks):
            _, valid = load_rows(lists, token, block, ROWS)
            bar = W * STAGES + stage
            mbarrier.wait(smem.full.index(bar), phase)
            fence_async_shared()
            x = warpgroup_mma_wait(0, deps=[_logits(smem, bar, smem.q.index(heads))])
            mbarrier.arrive(smem.empty.index(bar), count=1)
            if block + 1 == num_blocks:
                mbarrier.arrive(smem.heads_empty.index(heads), count=1)
            stage, phase = next_stage(stage, phase, STAGES)
            x = gl.maximum(x, 0.0, propagate_nan=PROPAGATE_NAN) * w[None, :]
            score = gl.sum(gl.where(real[None, :], x, 0.0), 1)
            at = block * BLOCK + gl.arange(0, BLOCK, ROWS)
            gl.store(out + token * topk + at, gl.where(valid, score, float("-inf")), mask=at < topk)
        turn, turn_phase = next_stage(turn, turn_phase, 2)


@gluon.jit
def _gradients_consumer(
    W: gl.constexpr, num_tokens, smem, products, lists, indexer, dscores, dscores_token, terms,
    diq, dweights, topk,
):  # fmt: skip
    ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    stage, phase = 0, 0
    turn, turn_phase = 0, 0
    for job in range(2 * gl.program_id(0) + W, num_tokens, 2 * gl.num_programs(0)):
        token = job.to(gl.int64)
        num_blocks = _num_blocks(lists, token)
        w = _load_head_weights(indexer, token)
        heads = W * 2 + turn
        mbarrier.wait(smem.heads_full.index(heads), turn_phase)
        dw = _sum_rows_of_threads(gl.zeros([64, 64], gl.float32, ACC))
        dq = gl.zeros([64, DIM], gl.float32, WIDE)
        for block in range(num_blocks):
            zero = opaque_zero(block)
            _, valid = load_rows(lists, token, block, ROWS)
            at = block * BLOCK + gl.arange(0, BLOCK, ROWS)
            given = gl.load(dscores + token * dscores_token + at, mask=valid, other=0.0)
            bar = W * STAGES + stage
            mbarrier.wait(smem.full.index(bar), phase)
            fence_async_shared()
            heads_of_token = smem.q.index(heads + zero)
            x = warpgroup_mma_wait(0, deps=[_logits(smem, bar, heads_of_token)])
            dw += _sum_rows_of_threads(
                gl.maximum(x, 0.0, propagate_nan=PROPAGATE_NAN) * given[:, None]
            )
            b = gl.where(x > 0, given[:, None] * w[None, :], 0.0).to(gl.bfloat16)
            products.index(W + zero).store(b)
            fence_async_shared()
            operand = gl.convert_layout(b, OPERAND)
            panels = reinterpret(heads_of_token, gl.bfloat16, [2, 64, 64], TILE)
            at = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, STORE))
            target = terms + token * topk * DIM
            dq = warpgroup_mma(
                products.index(W + zero).permute((1, 0)), smem.keys.index(bar), dq, is_async=True
            )
            term = gl.zeros([64, 64], gl.float32, ACC)
            term = warpgroup_mma(operand, panels.index(0), term, use_acc=False, is_async=True)
            dq, term = warpgroup_mma_wait(0, deps=[dq, term])
            mbarrier.arrive(smem.empty.index(bar), count=1)
            other = gl.zeros([64, 64], gl.float32, ACC)
            other = warpgroup_mma(operand, panels.index(1), other, use_acc=False, is_async=True)
            store_tile(target, term.to(gl.bfloat16), at * DIM, at < topk, STORE)
            other = warpgroup_mma_wait(0, deps=[other])
            if block + 1 == num_blocks:
                mbarrier.arrive(smem.heads_empty.index(heads), count=1)
            store_tile(target + 64, other.to(gl.bfloat16), at * DIM, at < topk, STORE)
            stage, phase = next_stage(stage, phase, STAGES)
        turn, turn_phase = next_stage(turn, turn_phase, 2)
        dw = gl.convert_layout(gl.sum(gl.sum(dw, 0), 0), gl.SliceLayout(0, ACC))
        head = gl.arange(0, 64, gl.SliceLayout(0, ACC))
        at = dweights + token * indexer.num_heads + head
        gl.store(at, dw.to(dweights.dtype.element_ty), mask=head < indexer.num_heads)
        head = gl.arange(0, 64, gl.SliceLayout(1, STORE))
        target = diq + token * indexer.num_heads * DIM
        store_128(target, dq, head * DIM, head < indexer.num_heads)


@gluon.jit
def _allocate():
    """Shared memory of both kernels, with its barriers."""
    smem = Memory(
        q=gl.allocate_shared_memory(gl.bfloat16, [2 * 2, 64, DIM], TILE),
        keys=gl.allocate_shared_memory(gl.bfloat16, [2 * STAGES, 64, DIM], TILE),
        full=gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout()),
        empty=gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout()),
        heads_full=gl.allocate_shared_memory(gl.int64, [2 * 2, 1], mbarrier.MBarrierLayout()),
        heads_empty=gl.allocate_shared_memory(gl.int64, [2 * 2, 1], mbarrier.MBarrierLayout()),
    )
    for b in gl.static_range(2 * STAGES):
        mbarrier.init(smem.full.index(b), count=128)
        mbarrier.init(smem.empty.index(b), count=1)
    for b in gl.static_range(2 * 2):
        mbarrier.init(smem.heads_full.index(b), count=1)
        mbarrier.init(smem.heads_empty.index(b), count=1)
    fence_async_shared()
    return smem


@gluon.jit(do_not_specialize=["num_tokens"])
def _scores(num_tokens, q, keys, keys_row, lists, indexer, out, topk):
    """Scores of the entries ``[T, K]``, -inf where they are not valid."""
    smem = _allocate()
    gl.warp_specialize(
        [
            (_scores_consumer, (0, num_tokens, smem, lists, indexer, out, topk)),
            (_scores_consumer, (1, num_tokens, smem, lists, indexer, out, topk)),
            (_producer, (num_tokens, smem, q, keys, keys_row, lists)),
        ],
        [4, 4],
        [208, 96],
    )


@gluon.jit(do_not_specialize=["num_tokens"])
def _gradients(
    num_tokens, q, keys, keys_row, lists, indexer, dscores, dscores_token, terms, diq, dweights,
    topk,
):  # fmt: skip
    """The gradients of a token's heads and weights, and the terms of dik ``[n K, DIM]``."""
    smem = _allocate()
    products = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    gl.warp_specialize(
        [
            (_gradients_consumer, (0, num_tokens, smem, products, lists, indexer, dscores,
                                   dscores_token, terms, diq, dweights, topk)),
            (_gradients_consumer, (1, num_tokens, smem, products, lists, indexer, dscores,
                                   dscores_token, terms, diq, dweights, topk)),
            (_producer, (num_tokens, smem, q, keys, keys_row, lists)),
        ],
        [4, 4],
        [232, 48],
    )  # fmt: skip


def _grid(num_tokens: int, device: torch.device) -> tuple[int]:
    return (min(cdiv(num_tokens, 2), num_multiprocessors(device)),)


def selected_scores(
    *,
    iq: Tensor,
    weights: Tensor,
    ik: Tensor,
    topk_indices: Tensor,
    topk_lengths: Tensor | None,
    out: Tensor,
) -> None:
    (num_tokens, num_heads, _), topk = iq.shape, topk_indices.shape[1]
    out.fill_(-torch.inf)  # what is behind the last valid entry of a list
    if out.numel() == 0:
        return
    ends = list_ends(topk_indices, topk_lengths, ik.shape[0])
    _scores[_grid(num_tokens, iq.device)](
        num_tokens,
        tiles_of_heads(iq, 64),
        ik,
        ik.stride(0) // 8,
        Lists(topk_indices, topk_indices.stride(0), ends, ik.shape[0]),
        Indexer(weights, weights.stride(0), num_heads),
        out,
        topk,
        num_warps=4,
    )


def selected_scores_backward(
    *,
    dscores: Tensor,
    iq: Tensor,
    weights: Tensor,
    ik: Tensor,
    topk_indices: Tensor,
    topk_lengths: Tensor | None,
    diq: Tensor,
    dweights: Tensor,
    dik: Tensor,
) -> None:
    (num_tokens, num_heads, dim), topk = iq.shape, topk_indices.shape[1]
    if num_tokens * topk == 0:
        for result in (diq, dweights, dik):
            result.zero_()
        return
    total = torch.zeros_like(dik, dtype=torch.float32)
    ends = list_ends(topk_indices, topk_lengths, ik.shape[0])
    chunk = max(1, min(num_tokens, portable.LIST_BYTES // (topk * (2 * dim + ENTRY_BYTES))))
    terms = iq.new_empty(chunk * topk, dim)
    for first in range(0, num_tokens, chunk):
        some = slice(first, min(first + chunk, num_tokens))
        count = some.stop - first
        indices = topk_indices[some]
        _gradients[_grid(count, iq.device)](
            count,
            tiles_of_heads(iq[some], 64),
            ik,
            ik.stride(0) // 8,
            Lists(indices, indices.stride(0), ends[some], ik.shape[0]),
            Indexer(weights[some], weights.stride(0), num_heads),
            dscores[some],
            dscores.stride(0),
            terms,
            diq[some],
            dweights[some],
            topk,
            num_warps=4,
        )
        lengths = None if topk_lengths is None else topk_lengths[some]
        add_terms(terms, indices, lengths, total)
    dik.copy_(total)

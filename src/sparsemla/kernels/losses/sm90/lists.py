"""Index scores of listed rows and their gradients, for up to 64 heads of 128 dims.

A consumer warpgroup has a token: its heads stay in shared memory and blocks of 64 entries pass by.
The two consumers of a CTA have their own tokens, producers and stages and share nothing, so
nothing of a token is summed twice. With entries on M and heads on N::

    _scores      x = k q^T, then sum_h w relu(x)
    _gradients   x = k q^T, b = g w [x > 0]; terms = b q and dindex_q += b^T k in one step

``b`` is an operand of both products: from registers of the first, and from shared memory,
transposed, of the second. Terms are bfloat16, and each row of dindex_k adds its own in the order
of tokens and entries.

Blocks come in pairs. A producer loads entries a pair ahead, across the ends of lists: if each block
waited for its entries, their latency would bound both kernels::

    producer     rows of n | entries of n + 2 | rows of n + 1 | entries of n + 3 | ...
    _scores      x of n    | x of n + 1         |                       | x of n + 2
                           | sum of n, store    | sum of n + 1, store   |
    _gradients   x         | b, store b | dindex_q, half of the terms | the other half | x of n + 1
                                                                 | store a half   | store the other

Barriers, for each consumer; stages of rows and two buffers of heads::

    barrier         arrivals             waits     guards
    full [STAGES]   64, copies' threads  consumer  rows of a block, and g
    empty [STAGES]  1, consumer          producer  a stage may be overwritten
    heads_full [2]  1, TMA               consumer  the heads of a token
    heads_empty [2] 1, consumer          producer  they may be overwritten
"""

from __future__ import annotations

from typing import NamedTuple

import torch
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
from sparsemla.kernels.common.gluon import async_load, opaque_zero, reinterpret
from sparsemla.kernels.common.hopper import (
    BLOCK,
    PLAIN,
    STORE,
    TILE,
    Lists,
    copy_dims,
    list_ends,
    load_heads,
    next_stage,
    store_128,
    store_tile,
    tiles_of_heads,
)
from sparsemla.kernels.common.integers import cdiv
from sparsemla.kernels.common.lists import ENTRY_BYTES, TokenLists, add_terms
from sparsemla.kernels.losses.arguments import SelectedScores, SelectedScoresBackward
from sparsemla.kernels.losses.triton import LIST_BYTES

DIM = gl.constexpr(128)
STAGES = gl.constexpr(4)
"""Blocks in flight of a consumer, 16 KiB each; an even number."""
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
WIDE = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
PROPAGATE_NAN = gl.constexpr(PropagateNan.ALL)
# A producer has two warps.
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [2, 1], [1, 0]))
COPY_GIVEN = gl.constexpr(gl.BlockedLayout([1], [32], [2], [0]))
# Half of the terms: what a thread has of a row in an accumulator, in pieces of 16 bytes.
STORE_TERMS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)


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


class Given(NamedTuple):
    """The gradients of scores, in global memory and those of the stages."""

    dscores: object
    dscores_token: object
    stages: object  # [2 * STAGES, 64], 0 for entries that are not valid


@gluon.jit
def _num_pairs(end):
    """Pairs of blocks of a list; a loop that may be skipped makes the compiler serialise MMAs."""
    return gl.maximum(gl.cdiv(end, 2 * BLOCK), 1)


@gluon.jit
def _load_entries(lists, token, block, end, LAYOUT: gl.constexpr):
    """A block of a list as it is: whoever tests its entries later does not wait for them now."""
    at = block * BLOCK + gl.arange(0, BLOCK, LAYOUT)
    return gl.load(lists.indices + token.to(gl.int64) * lists.stride + at, mask=at < end, other=-1)


@gluon.jit
def _are_valid(entries, lists):
    return (entries >= 0) & (entries < lists.num_rows)


@gluon.jit
def _load_head_weights(indexer, token):
    """Weights of the heads, as the columns of an accumulator; 0 for heads that do not exist."""
    head = gl.arange(0, 64, gl.SliceLayout(0, ACC))
    at = indexer.weights + token * indexer.weights_token + head
    return gl.load(at, mask=head < indexer.num_heads, other=0.0).to(gl.float32)


@gluon.jit
def _copy_block(to, phase, smem, keys, keys_row, lists, given, token, block, end, entries):
    """Copy the rows of a block, and the gradients of its scores if there are any."""
    if given is not None:
        listed = _load_entries(lists, token, block, end, COPY_GIVEN)
    mbarrier.wait(smem.empty.index(to), phase)
    valid = _are_valid(entries, lists)
    copy_dims(smem.keys.index(to), keys, keys_row, entries.to(gl.int64), valid, 0, DIM, COPY)
    if given is not None:
        at = given.dscores + token.to(gl.int64) * given.dscores_token + block * BLOCK
        at += gl.arange(0, BLOCK, COPY_GIVEN)
        async_load(given.stages.index(to), at, mask=_are_valid(listed, lists))
    async_copy.mbarrier_arrive(smem.full.index(to), increment_count=False)


@gluon.jit
def _producer(W: gl.constexpr, num_tokens, smem, q, keys, keys_row, lists, given):
    ROWS: gl.constexpr = gl.SliceLayout(1, COPY)
    stage, phase = 0, 1
    turn, turn_phase = 0, 1
    step = 2 * gl.num_programs(0)
    first = gl.minimum(2 * gl.program_id(0) + W, num_tokens - 1)
    end = gl.load(lists.ends + first)
    even = _load_entries(lists, first, 0, end, ROWS)
    odd = _load_entries(lists, first, 1, end, ROWS)
    for token in range(2 * gl.program_id(0) + W, num_tokens, step):
        next_token = gl.minimum(token + step, num_tokens - 1)
        next_end = gl.load(lists.ends + next_token)
        heads = W * 2 + turn
        mbarrier.wait(smem.heads_empty.index(heads), turn_phase)
        bar = smem.heads_full.index(heads)
        mbarrier.expect(bar, 64 * DIM * 2)
        panels = reinterpret(smem.q.index(heads), gl.bfloat16, [2, 64, 64], TILE)
        load_heads(panels.index(0), q, token, 0, 0, bar, 64)
        load_heads(panels.index(1), q, token, 0, 64, bar, 64)
        turn, turn_phase = next_stage(turn, turn_phase, 2)
        num_pairs = _num_pairs(end)
        for pair in range(num_pairs):
            last = pair + 1 == num_pairs
            then = gl.where(last, next_token, token)
            then_end = gl.where(last, next_end, end)
            then_block = gl.where(last, 0, 2 * pair + 2)
            to = W * STAGES + 2 * stage
            _copy_block(to, phase, smem, keys, keys_row, lists, given, token, 2 * pair, end, even)
            even = _load_entries(lists, then, then_block, then_end, ROWS)
            _copy_block(
                to + 1, phase, smem, keys, keys_row, lists, given, token, 2 * pair + 1, end, odd
            )
            odd = _load_entries(lists, then, then_block + 1, then_end, ROWS)
            stage, phase = next_stage(stage, phase, STAGES // 2)
        end = next_end


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
def _store_scores(target, block, x, entries, lists, w, real, topk):
    """Sum over the heads, and store -inf for entries that are not valid."""
    x = gl.maximum(x, 0.0, propagate_nan=PROPAGATE_NAN) * w[None, :]
    score = gl.sum(gl.where(real[None, :], x, 0.0), 1)
    score = gl.where(_are_valid(entries, lists), score, float("-inf"))
    at = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, ACC))
    gl.store(target + at, score, mask=at < topk)


@gluon.jit
def _scores_consumer(W: gl.constexpr, num_tokens, smem, lists, indexer, out, topk):
    ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    stage, phase = 0, 0
    turn, turn_phase = 0, 0
    for job in range(2 * gl.program_id(0) + W, num_tokens, 2 * gl.num_programs(0)):
        token = job.to(gl.int64)
        end = gl.load(lists.ends + token)
        num_pairs = _num_pairs(end)
        target = out + token * topk
        w = _load_head_weights(indexer, token)
        real = gl.arange(0, 64, gl.SliceLayout(0, ACC)) < indexer.num_heads
        heads = W * 2 + turn
        mbarrier.wait(smem.heads_full.index(heads), turn_phase)
        for pair in range(num_pairs):
            even = W * STAGES + 2 * stage
            odd = even + 1
            q = smem.q.index(heads)
            mbarrier.wait(smem.full.index(even), phase)
            fence_async_shared()
            x_even = _logits(smem, even, q)
            mbarrier.wait(smem.full.index(odd), phase)
            fence_async_shared()
            x_odd = _logits(smem, odd, q)
            even_entries = _load_entries(lists, token, 2 * pair, end, ROWS)
            odd_entries = _load_entries(lists, token, 2 * pair + 1, end, ROWS)
            x_even = warpgroup_mma_wait(1, deps=[x_even])
            mbarrier.arrive(smem.empty.index(even), count=1)
            _store_scores(target, 2 * pair, x_even, even_entries, lists, w, real, topk)
            x_odd = warpgroup_mma_wait(0, deps=[x_odd])
            mbarrier.arrive(smem.empty.index(odd), count=1)
            if pair + 1 == num_pairs:
                mbarrier.arrive(smem.heads_empty.index(heads), count=1)
            _store_scores(target, 2 * pair + 1, x_odd, odd_entries, lists, w, real, topk)
            stage, phase = next_stage(stage, phase, STAGES // 2)
        for block in range(2 * num_pairs, gl.cdiv(topk, BLOCK)):
            at = block * BLOCK + gl.arange(0, BLOCK, ROWS)
            gl.store(target + at, gl.full([BLOCK], float("-inf"), gl.float32, ROWS), mask=at < topk)
        turn, turn_phase = next_stage(turn, turn_phase, 2)


@gluon.jit
def _store_terms(target, acc, at, topk):
    """Store half of the dims of the terms of a block, in the order of an accumulator's threads.

    A thread has columns ``8 j + 2 l + i`` of a row, and its neighbours other ``l``. They become
    columns ``8 l + 2 j + i`` of 32, so nothing moves between threads.
    """
    terms = acc.to(gl.bfloat16).reshape([64, 2, 4, 4, 2]).permute((0, 1, 3, 2, 4))
    store_tile(target, terms.reshape([64, 64]), at * DIM, at < topk, STORE_TERMS)


@gluon.jit
def _gradients_consumer(
    W: gl.constexpr, num_tokens, smem, products, lists, indexer, given, terms, dindex_q, dweights,
    topk,
):  # fmt: skip
    ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    stage, phase = 0, 0
    turn, turn_phase = 0, 0
    for job in range(2 * gl.program_id(0) + W, num_tokens, 2 * gl.num_programs(0)):
        token = job.to(gl.int64)
        num_blocks = 2 * _num_pairs(gl.load(lists.ends + token))
        w = _load_head_weights(indexer, token)
        heads = W * 2 + turn
        mbarrier.wait(smem.heads_full.index(heads), turn_phase)
        dw = _sum_rows_of_threads(gl.zeros([64, 64], gl.float32, ACC))
        dq = gl.zeros([64, DIM], gl.float32, WIDE)
        for block in range(num_blocks):
            zero = opaque_zero(block)
            bar = W * STAGES + stage
            mbarrier.wait(smem.full.index(bar), phase)
            fence_async_shared()
            heads_of_token = smem.q.index(heads + zero)
            x = _logits(smem, bar, heads_of_token)
            g = given.stages.index(bar).load(ROWS)[:, None]
            x = warpgroup_mma_wait(0, deps=[x])
            dw += _sum_rows_of_threads(gl.maximum(x, 0.0, propagate_nan=PROPAGATE_NAN) * g)
            b = gl.where(x > 0, g * w[None, :], 0.0).to(gl.bfloat16)
            products.index(W + zero).store(b)
            fence_async_shared()
            operand = gl.convert_layout(b, OPERAND)
            panels = reinterpret(heads_of_token, gl.bfloat16, [2, 64, 64], TILE)
            at = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, STORE_TERMS))
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
            _store_terms(target, term, at, topk)
            other = warpgroup_mma_wait(0, deps=[other])
            if block + 1 == num_blocks:
                mbarrier.arrive(smem.heads_empty.index(heads), count=1)
            _store_terms(target + 64, other, at, topk)
            stage, phase = next_stage(stage, phase, STAGES)
        turn, turn_phase = next_stage(turn, turn_phase, 2)
        dw = gl.convert_layout(gl.sum(gl.sum(dw, 0), 0), gl.SliceLayout(0, ACC))
        head = gl.arange(0, 64, gl.SliceLayout(0, ACC))
        at = dweights + token * indexer.num_heads + head
        gl.store(at, dw.to(dweights.dtype.element_ty), mask=head < indexer.num_heads)
        head = gl.arange(0, 64, gl.SliceLayout(1, STORE))
        target = dindex_q + token * indexer.num_heads * DIM
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
        mbarrier.init(smem.full.index(b), count=64)
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
            (_producer, (0, num_tokens, smem, q, keys, keys_row, lists, None)),
            (_producer, (1, num_tokens, smem, q, keys, keys_row, lists, None)),
        ],
        [4, 2, 2],
        [208, 96, 96],
    )


@gluon.jit(do_not_specialize=["num_tokens"])
def _gradients(
    num_tokens, q, keys, keys_row, lists, indexer, dscores, dscores_token, terms, dindex_q,
    dweights, topk,
):  # fmt: skip
    """The gradients of a token's heads and weights, and the terms of dindex_k ``[n K, DIM]``."""
    smem = _allocate()
    products = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    stages = gl.allocate_shared_memory(gl.float32, [2 * STAGES, 64], PLAIN)
    given = Given(dscores, dscores_token, stages)
    gl.warp_specialize(
        [
            (_gradients_consumer, (0, num_tokens, smem, products, lists, indexer, given, terms,
                                   dindex_q, dweights, topk)),
            (_gradients_consumer, (1, num_tokens, smem, products, lists, indexer, given, terms,
                                   dindex_q, dweights, topk)),
            (_producer, (0, num_tokens, smem, q, keys, keys_row, lists, given)),
            (_producer, (1, num_tokens, smem, q, keys, keys_row, lists, given)),
        ],
        [4, 2, 2],
        [224, 64, 64],
    )  # fmt: skip


def _grid(num_tokens: int, device: torch.device) -> tuple[int]:
    return (min(cdiv(num_tokens, 2), num_multiprocessors(device)),)


def _tokens_at_once(num_tokens: int, topk: int, device: torch.device) -> int:
    """Tokens with terms that fit the workspace, so many that every consumer is busy to the end."""
    limit = max(1, LIST_BYTES // (topk * (2 * DIM.value + ENTRY_BYTES)))
    wave = 2 * num_multiprocessors(device)
    return min(num_tokens, limit - limit % wave if limit > wave else limit)


def selected_scores(call: SelectedScores) -> None:
    index_q, weights, index_k, topk_indices, topk_lengths, out = call
    (num_tokens, num_heads, _), topk = index_q.shape, topk_indices.shape[1]
    if out.numel() == 0:
        return
    ends = list_ends(topk_indices, topk_lengths, index_k.shape[0])
    _scores[_grid(num_tokens, index_q.device)](
        num_tokens,
        tiles_of_heads(index_q, 64),
        index_k,
        index_k.stride(0) // 8,
        Lists(topk_indices, topk_indices.stride(0), ends, index_k.shape[0]),
        Indexer(weights, weights.stride(0), num_heads),
        out,
        topk,
        num_warps=4,
    )


def selected_scores_backward(call: SelectedScoresBackward) -> None:
    dscores, index_q, weights, index_k, topk_indices, topk_lengths, *grads = call
    dindex_q, dweights, dindex_k = grads
    (num_tokens, num_heads, dim), topk = index_q.shape, topk_indices.shape[1]
    if num_tokens * topk == 0:
        for result in grads:
            result.zero_()
        return
    total = torch.zeros_like(dindex_k, dtype=torch.float32)
    ends = list_ends(topk_indices, topk_lengths, index_k.shape[0])
    chunk = _tokens_at_once(num_tokens, topk, index_q.device)
    terms = index_q.new_empty(chunk * topk, dim)
    for first in range(0, num_tokens, chunk):
        some = slice(first, min(first + chunk, num_tokens))
        count = some.stop - first
        indices = topk_indices[some]
        _gradients[_grid(count, index_q.device)](
            count,
            tiles_of_heads(index_q[some], 64),
            index_k,
            index_k.stride(0) // 8,
            Lists(indices, indices.stride(0), ends[some], index_k.shape[0]),
            Indexer(weights[some], weights.stride(0), num_heads),
            dscores[some],
            dscores.stride(0),
            terms,
            dindex_q[some],
            dweights[some],
            topk,
            num_warps=4,
        )
        add_terms(terms, TokenLists.of(topk_indices, topk_lengths, some), total)
    # `_store_terms` has swapped two parts of the dims.
    parts = (4, 4, 4, 2)
    dindex_k.unflatten(1, parts).copy_(total.unflatten(1, parts).transpose(2, 3))

"""The indexer's losses with heads divided among tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup, all_reduce, all_to_all_single

from sparsemla.ops import (
    attention_target,
    dense_index_gradients,
    dense_index_loss,
    index_loss,
    selected_scores,
    sparse_attention,
)

MAX_LIST_BYTES = 256 << 20
"""Bound on the lists of all keys, by which the warm-up's loss finds the LSE of dense attention."""


def sparse_loss(
    q: Tensor,
    kv: Tensor,
    lse: Tensor,
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    topk_indices: Tensor,
    *,
    softmax_scale: float,
    row_weights: Tensor,
    tp: ProcessGroup,
) -> Tensor:
    """The loss towards attention over the selection; ranks sum the attention of their heads."""
    target = attention_target(
        q, kv, topk_indices, lse, softmax_scale=softmax_scale, normalize=tp.size() == 1
    )
    if tp.size() > 1:
        all_reduce(target, group=tp)
        mass = target.sum(-1, keepdim=True)
        target = target / mass.where(mass > 0, 1)
    scores = selected_scores(index_q, weights, index_k, topk_indices)
    return index_loss(scores, target, row_weights=row_weights)


def dense_loss(
    q: Tensor,
    kv: Tensor,
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    *,
    softmax_scale: float,
    row_starts: Tensor,
    row_ends: Tensor,
    row_weights: Tensor,
    tp: ProcessGroup,
) -> Tensor:
    """The loss towards attention over all visible keys.

    Nothing of size tokens times keys is stored. With several ranks each takes all heads of a share
    of the tokens, so that the loss costs no more than on one rank of as many GPUs.
    """
    indexer = index_q, weights, index_k
    if tp.size() > 1:
        bounds = row_starts, row_ends, row_weights
        loss: Tensor = _DividedDenseLoss.apply(*indexer, q, kv, bounds, softmax_scale, tp)
        return loss
    lse = _dense_lse(q, kv, row_starts, row_ends, softmax_scale)
    return dense_index_loss(
        q,
        kv,
        lse,
        *indexer,
        softmax_scale=softmax_scale,
        row_starts=row_starts,
        row_ends=row_ends,
        row_weights=row_weights,
    )


class _DividedDenseLoss(torch.autograd.Function):
    """:func:`dense_loss` of several ranks, which hold all tokens and a share of the heads."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 - torch's context
        index_q: Tensor,
        weights: Tensor,
        index_k: Tensor,
        q: Tensor,
        kv: Tensor,
        bounds: tuple[Tensor, Tensor, Tensor],
        softmax_scale: float,
        tp: ProcessGroup,
    ) -> Tensor:
        share = q.shape[0] // tp.size()
        own = slice(tp.rank() * share, (tp.rank() + 1) * share)
        row_starts, row_ends, row_weights = (each[own] for each in bounds)
        q = _all_heads(q, tp)
        lse = _dense_lse(q, kv, row_starts, row_ends, softmax_scale)
        loss, dindex_q, dweights, dindex_k = dense_index_gradients(
            q,
            kv,
            lse,
            index_q[own],
            weights[own],
            index_k,
            softmax_scale=softmax_scale,
            row_starts=row_starts,
            row_ends=row_ends,
            row_weights=row_weights,
        )
        all_reduce(loss, group=tp)
        shares = dindex_k.float()
        all_reduce(shares, group=tp)
        ctx.save_for_backward(
            gather_from_sequence_parallel_region(dindex_q, group=tp),
            gather_from_sequence_parallel_region(dweights, group=tp),
            shares.to(dindex_k.dtype),
        )
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:  # noqa: ANN401
        grads = ((grad.float() * dloss).to(grad.dtype) for grad in ctx.saved_tensors)
        return *grads, None, None, None, None, None


def _all_heads(q: Tensor, tp: ProcessGroup) -> Tensor:
    """All heads of this rank's share of the tokens, of some heads ``[T, H, D]`` of all tokens."""
    parts = q.contiguous().unflatten(0, (tp.size(), -1))
    received = torch.empty_like(parts)
    all_to_all_single(received, parts, group=tp)
    return received.transpose(0, 1).flatten(1, 2)


def _dense_lse(
    q: Tensor, kv: Tensor, row_starts: Tensor, row_ends: Tensor, softmax_scale: float
) -> Tensor:
    """The LSE float32 ``[T, H]`` of attention to all rows that a token sees."""
    columns = torch.arange(kv.shape[0], dtype=torch.int32, device=kv.device)
    at_once = max(1, MAX_LIST_BYTES // (4 * kv.shape[0]))
    parts = [
        sparse_attention(
            some,
            kv,
            first[:, None] + columns,
            softmax_scale=softmax_scale,
            topk_lengths=end - first,
        )[1]
        for some, first, end in zip(
            q.split(at_once), row_starts.split(at_once), row_ends.split(at_once), strict=True
        )
    ]
    return torch.cat(parts)

"""Reference of the indexer's training, in float64 for float64 inputs.

Shapes: T query tokens, K entries of a list, S rows, H heads of attention, HI heads of the indexer.
"""

import torch
from torch import Tensor

from sparsemla.reference.indexer import indexer_scores
from sparsemla.reference.topk import select_topk


def select_rows(
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    *,
    row_starts: Tensor,
    row_ends: Tensor,
    topk: int,
    max_workspace_bytes: int = 256 << 20,
) -> Tensor:
    """:func:`select_topk` of the scores of all rows, as rows of ``index_k``."""
    scores = indexer_scores(
        index_q, weights, index_k, None, row_starts=row_starts, row_ends=row_ends
    )  # [T, S]
    columns = select_topk(scores, topk=topk, row_starts=row_starts, row_ends=row_ends)  # [T, K]
    first = row_starts.clamp(0, index_k.shape[0])[:, None]
    return torch.where(columns < 0, -1, columns + first).int()


def selected_scores(
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    topk_indices: Tensor,
    *,
    topk_lengths: Tensor | None = None,
) -> Tensor:
    """``sum_h weights[t, h] relu(<index_q[t, h], index_k[j]>)`` of listed rows, -inf if invalid."""
    keys, valid = listed_rows(index_k, topk_indices, topk_lengths)
    logits = torch.einsum("thd,tkd->thk", _wide(index_q), keys)  # [T, HI, K]
    scores = torch.einsum("th,thk->tk", _wide(weights), logits.relu())
    return scores.masked_fill(~valid, -torch.inf)


def selected_scores_backward(
    dscores: Tensor,
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    topk_indices: Tensor,
    *,
    topk_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by the formulas; invalid entries take no part."""
    keys, valid = listed_rows(index_k, topk_indices, topk_lengths)
    index_q, weights = _wide(index_q), _wide(weights)
    logits = torch.einsum("thd,tkd->thk", index_q, keys)  # [T, HI, K]
    given = _wide(dscores).where(valid, 0)  # [T, K]
    dweights = torch.einsum("tk,thk->th", given, logits.relu())
    dlogits = given[:, None] * weights[..., None] * (logits > 0)  # [T, HI, K]
    dindex_q = torch.einsum("thk,tkd->thd", dlogits, keys)
    shares = torch.einsum("thk,thd->tkd", dlogits, index_q)
    dindex_k = torch.zeros_like(_wide(index_k)).index_add(
        0, topk_indices[valid].long(), shares[valid]
    )
    return dindex_q, dweights, dindex_k


def attention_target(
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    topk_lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    normalize: bool = True,
) -> Tensor:
    """What all heads together attend to: ``sum_h exp(z[t, h, j] - lse[t, h])``, a distribution."""
    keys, valid = listed_rows(kv, topk_indices, topk_lengths)
    logits = torch.einsum("thd,tkd->thk", _wide(q), keys) * softmax_scale  # [T, H, K]
    probs = (logits - lse[..., None]).exp()
    if attn_sink is not None:
        probs = probs * torch.sigmoid(lse - attn_sink)[..., None]
    target = probs.masked_fill(~valid[:, None], 0).sum(1)  # [T, K]
    return _normalized(target).detach() if normalize else target.detach()


def index_loss(scores: Tensor, target: Tensor, *, row_weights: Tensor | None = None) -> Tensor:
    """``sum_t row_weights[t] * KL(target[t] || softmax(scores[t]))``, row by row."""
    scores, target = _wide(scores), _wide(target).detach()
    total = scores[:0].sum()  # 0, with a gradient
    for row in range(scores.shape[0]):
        valid = ~scores[row].isneginf()
        counts = row_weights is None or bool(row_weights[row] != 0)
        if counts and bool(valid.any()):
            found, p = scores[row][valid], target[row][valid]  # [n]
            loss = torch.xlogy(p, p).sum() - (p * (found - found.logsumexp(0))).sum()
            total = total + (loss if row_weights is None else loss * row_weights[row])
    return total


def dense_index_loss(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    *,
    softmax_scale: float,
    row_starts: Tensor,
    row_ends: Tensor,
    row_weights: Tensor | None = None,
    max_workspace_bytes: int = 256 << 20,
) -> Tensor:
    """:func:`index_loss` over all rows between ``row_starts`` and ``row_ends``."""
    if row_weights is not None:  # tokens of weight 0 see no row, and may be NaN
        counts = row_weights != 0
        row_ends = row_ends.where(counts, 0)
        index_q, weights = (
            index_q.where(counts[:, None, None], 0),
            weights.where(counts[:, None], 0),
        )
    rows = row_starts, row_ends
    scores, target = dense_distributions(q, k, lse, index_q, weights, index_k, softmax_scale, *rows)
    return index_loss(scores, target, row_weights=row_weights)


def dense_distributions(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    softmax_scale: float,
    row_starts: Tensor,
    row_ends: Tensor,
) -> tuple[Tensor, Tensor]:
    """Index scores ``[T, S]``, -inf for rows that a token does not see, and their target."""
    rows = torch.arange(index_k.shape[0], device=index_k.device)
    seen = (rows >= row_starts[:, None]) & (rows < row_ends[:, None])  # [T, S]
    keys = k if k.dim() == 3 else k[:, None].expand(-1, q.shape[1], -1)  # [S, H, D]
    logits = torch.einsum("thd,shd->ths", _wide(q), _wide(keys)) * softmax_scale
    target = (logits - lse[..., None]).exp().masked_fill(~seen[:, None], 0).sum(1)  # [T, S]
    keys = _wide(index_k).where(seen.any(0)[:, None], 0)  # rows that no token sees may be NaN
    logits = torch.einsum("thd,sd->ths", _wide(index_q), keys).relu()  # [T, HI, S]
    scores = torch.einsum("th,ths->ts", _wide(weights), logits).masked_fill(~seen, -torch.inf)
    return scores, _normalized(target)


def dense_index_gradients(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    *,
    softmax_scale: float,
    row_starts: Tensor,
    row_ends: Tensor,
    row_weights: Tensor | None = None,
    max_workspace_bytes: int = 256 << 20,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """:func:`dense_index_loss` and its gradients, by autograd."""
    with torch.enable_grad():
        index_q, weights, index_k = (
            _wide(x).detach().requires_grad_() for x in (index_q, weights, index_k)
        )
        loss = dense_index_loss(
            q,
            k,
            lse,
            index_q,
            weights,
            index_k,
            softmax_scale=softmax_scale,
            row_starts=row_starts,
            row_ends=row_ends,
            row_weights=row_weights,
        )
        inputs = index_q, weights, index_k
        dindex_q, dweights, dindex_k = torch.autograd.grad(loss, inputs, materialize_grads=True)
    return loss.detach(), dindex_q, dweights, dindex_k


def _wide(x: Tensor) -> Tensor:
    """float64 stays, all else becomes float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def listed_rows(rows: Tensor, indices: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """The listed rows ``[T, K, D]``, 0 where invalid, and the valid entries ``[T, K]``."""
    valid = (indices >= 0) & (indices < rows.shape[0])
    if lengths is not None:
        valid &= torch.arange(indices.shape[1], device=indices.device) < lengths[:, None]
    if rows.shape[0] == 0:
        return _wide(rows.new_zeros(*indices.shape, rows.shape[1])), valid
    return _wide(rows[indices.where(valid, 0).long()]).where(valid[..., None], 0), valid


def _normalized(target: Tensor) -> Tensor:
    """Rows that sum to 1; a row without mass stays 0."""
    mass = target.sum(-1, keepdim=True)
    return target / mass.where(mass != 0, 1)

"""The indexer's training on the CPU: float32 GEMMs over a few tokens at a time.

Shapes: c tokens at a time, K entries of a list, n rows that these tokens may see.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsemla.kernels.common import cpu
from sparsemla.kernels.losses.arguments import (
    AttentionTarget,
    DenseIndexGradients,
    DenseIndexLoss,
    SelectedScores,
    SelectedScoresBackward,
)


def selected_scores(call: SelectedScores) -> None:
    index_q, index_k, out = call.index_q, call.index_k, call.out
    out.fill_(-torch.inf)
    for part in _parts(index_k, call.topk_indices, index_q.shape[1]):
        _, valid, keys = _listed(index_k, call.topk_indices, call.topk_lengths, part)
        logits = (keys @ index_q[part].float().mT).relu_()  # [c, K, HI]
        scores = (logits @ call.weights[part, :, None].float())[..., 0]
        out[part] = scores.masked_fill_(~valid, -torch.inf)


def selected_scores_backward(call: SelectedScoresBackward) -> None:
    index_q, index_k, dindex_q, dweights = (
        call.index_q,
        call.index_k,
        call.dindex_q,
        call.dweights,
    )
    sums = torch.zeros(index_k.shape, dtype=torch.float32)
    for grad in (dindex_q, dweights):
        grad.zero_()
    for part in _parts(index_k, call.topk_indices, 2 * index_q.shape[1]):
        rows, valid, keys = _listed(index_k, call.topk_indices, call.topk_lengths, part)
        queries, given = index_q[part].float(), call.dscores[part].where(valid, 0)[..., None]
        logits = keys @ queries.mT  # [c, K, HI]
        dweights[part] = (given.mT @ logits.relu())[:, 0]
        dlogits = (logits > 0) * call.weights[part, None].float() * given
        dindex_q[part] = dlogits.mT @ keys
        terms = (dlogits @ queries).masked_fill_(~valid[..., None], 0)
        # One after the other, in the order of the entries.
        sums.index_add_(0, rows.flatten(), terms.flatten(0, 1))
    call.dindex_k.copy_(sums)


def attention_target(call: AttentionTarget) -> None:
    q, kv, lse, attn_sink, out = call.q, call.kv, call.lse, call.attn_sink, call.out
    out.zero_()
    for part in _parts(kv, call.topk_indices, q.shape[1]):
        _, valid, keys = _listed(kv, call.topk_indices, call.topk_lengths, part)
        logits = q[part].float() @ keys.mT  # [c, H, K]
        probs = logits.mul_(call.softmax_scale).sub_(lse[part, :, None]).exp_()
        if attn_sink is not None:
            probs *= torch.sigmoid(lse[part] - attn_sink)[..., None]
        target = probs.sum(1).masked_fill_(~valid, 0)
        out[part] = _normalize(target) if call.normalize else target


def dense_index_loss(call: DenseIndexLoss) -> None:
    call, loss = call.counted(), call.loss
    loss.zero_()
    for part, rows, seen in _seen(call):
        keys = _index_keys(call.index_k, rows, seen)
        scores = _index_scores(call.index_q[part].float(), call.weights[part].float(), keys, seen)
        target = _dense_target(call, part, rows, seen)
        loss += _losses(scores.log_softmax(-1), target, seen, call.row_weights, part)


def dense_index_gradients(call: DenseIndexGradients) -> None:
    loss, (dindex_q, dweights, dindex_k) = call.loss, call.grads
    of_loss = call.of_loss().counted()
    index_q, weights, index_k, row_weights = (
        of_loss.index_q,
        of_loss.weights,
        of_loss.index_k,
        of_loss.row_weights,
    )
    sums = torch.zeros(index_k.shape, dtype=torch.float32)
    for result in (loss, dindex_q, dweights):
        result.zero_()
    for part, rows, seen in _seen(of_loss):
        queries, factors, keys = (
            index_q[part].float(),
            weights[part].float(),
            _index_keys(index_k, rows, seen),
        )
        logs = _index_scores(queries, factors, keys, seen).log_softmax(-1)
        target = _dense_target(of_loss, part, rows, seen)
        loss += _losses(logs, target, seen, row_weights, part)
        # A row without mass in its target has no loss.
        given = logs.exp_().mul_(target.sum(-1, keepdim=True) != 0).sub_(target)  # [c, n]
        given.masked_fill_(~seen, 0)
        if row_weights is not None:
            given *= row_weights[part, None]
        for head in range(index_q.shape[1]):
            logits = queries[:, head] @ keys.T  # [c, n]
            dlogits = (given * factors[:, head, None]).mul_(logits > 0)
            dweights[part, head] = logits.relu_().mul_(given).sum(-1)
            dindex_q[part, head] = dlogits @ keys
            sums[rows] += dlogits.T @ queries[:, head]
    dindex_k.copy_(sums)


def _parts(rows: Tensor, topk_indices: Tensor, num_columns: int) -> Iterator[slice]:
    """Tokens whose listed rows, with some columns for each, fit the workspace."""
    num_tokens, topk = topk_indices.shape
    if rows.shape[0] == 0 or topk == 0:
        return iter(())
    at_once = cpu.WORKSPACE_BYTES // (4 * topk * (rows.shape[1] + num_columns))
    return cpu.blocks(num_tokens, at_once)


def _listed(
    rows: Tensor, topk_indices: Tensor, topk_lengths: Tensor | None, part: slice
) -> tuple[Tensor, Tensor, Tensor]:
    """Entries and their validity ``[c, K]``, and their rows ``[c, K, D]``; 0 where invalid."""
    entries = topk_indices[part].long()
    valid = (entries >= 0) & (entries < rows.shape[0])
    if topk_lengths is not None:
        valid &= torch.arange(entries.shape[1]) < topk_lengths[part, None]
    entries = entries.where(valid, 0)
    found = rows.index_select(0, entries.flatten()).float().view(*entries.shape, rows.shape[1])
    return entries, valid, found.masked_fill_(~valid[..., None], 0)


def _normalize(target: Tensor) -> Tensor:
    """Divide rows by their sum, in place; a row without mass stays 0."""
    mass = target.sum(-1, keepdim=True)
    return target.div_(mass.where(mass != 0, 1))


def _seen(call: DenseIndexLoss) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tokens, the rows that they may see, and the mask ``[c, n]`` of what each of them sees."""
    num_tokens, num_rows = call.row_starts.shape[0], call.index_k.shape[0]
    ranges = call.row_starts, call.row_ends
    starts, ends = (bounds.long().clamp(0, num_rows) for bounds in ranges)
    # Scores, targets, and the logits of a head.
    for part in cpu.blocks(num_tokens, call.max_workspace_bytes // (16 * max(num_rows, 1))):
        rows = slice(int(starts[part].min()), int(ends[part].max()))
        if rows.start < rows.stop:
            columns = torch.arange(rows.start, rows.stop)
            yield part, rows, (columns >= starts[part, None]) & (columns < ends[part, None])


def _dense_target(call: DenseIndexLoss, part: slice, rows: slice, seen: Tensor) -> Tensor:
    """What all heads together attend to, ``[c, n]``; 0 for rows that a token does not see."""
    q, k, lse = call.q, call.k, call.lse
    target = torch.zeros(seen.shape, dtype=torch.float32)
    for head in range(q.shape[1]):
        keys = k[rows] if k.dim() == 2 else k[rows, head]
        logits = q[part, head].float() @ keys.float().T
        target += logits.mul_(call.softmax_scale).sub_(lse[part, head, None]).exp_()
    return _normalize(target.masked_fill_(~seen, 0))


def _index_keys(index_k: Tensor, rows: slice, seen: Tensor) -> Tensor:
    """Index keys; 0 for rows between the ranges, which no token sees and which may be NaN."""
    return index_k[rows].to(torch.float32, copy=True).masked_fill_(~seen.any(0)[:, None], 0)


def _index_scores(queries: Tensor, factors: Tensor, keys: Tensor, seen: Tensor) -> Tensor:
    """Index scores ``[c, n]``, -inf for rows that a token does not see."""
    scores = torch.zeros(seen.shape, dtype=torch.float32)
    for head in range(queries.shape[1]):
        scores += (queries[:, head] @ keys.T).relu_().mul_(factors[:, head, None])
    return scores.masked_fill_(~seen, -torch.inf)


def _losses(
    logs: Tensor, target: Tensor, seen: Tensor, row_weights: Tensor | None, part: slice
) -> Tensor:
    """The sum of the tokens' losses; ``logs`` are the logarithms of the indexer's softmax."""
    losses = torch.xlogy(target, target).sub_((target * logs).masked_fill_(~seen, 0)).sum(-1)
    return losses.sum() if row_weights is None else losses @ row_weights[part]

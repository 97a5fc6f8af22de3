"""The indexer's training on the CPU: float32 GEMMs over a few tokens at a time.

Shapes: c tokens at a time, K entries of a list, n rows that these tokens may see.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsemla.kernels.common import cpu


def selected_scores(
    *,
    iq: Tensor,
    weights: Tensor,
    ik: Tensor,
    topk_indices: Tensor,
    topk_lengths: Tensor | None,
    out: Tensor,
) -> None:
    out.fill_(-torch.inf)
    for part in _parts(ik, topk_indices, iq.shape[1]):
        _, valid, keys = _listed(ik, topk_indices, topk_lengths, part)
        logits = (keys @ iq[part].float().mT).relu_()  # [c, K, HI]
        scores = (logits @ weights[part, :, None].float())[..., 0]
        out[part] = scores.masked_fill_(~valid, -torch.inf)


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
    sums = torch.zeros(ik.shape, dtype=torch.float32)
    for grad in (diq, dweights):
        grad.zero_()
    for part in _parts(ik, topk_indices, 2 * iq.shape[1]):
        rows, valid, keys = _listed(ik, topk_indices, topk_lengths, part)
        queries, given = iq[part].float(), dscores[part].where(valid, 0)[..., None]
        logits = keys @ queries.mT  # [c, K, HI]
        dweights[part] = (given.mT @ logits.relu())[:, 0]
        dlogits = (logits > 0) * weights[part, None].float() * given
        diq[part] = dlogits.mT @ keys
        terms = (dlogits @ queries).masked_fill_(~valid[..., None], 0)
        # One after the other, in the order of the entries.
        sums.index_add_(0, rows.flatten(), terms.flatten(0, 1))
    dik.copy_(sums)


def attention_target(
    *,
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    lse: Tensor,
    softmax_scale: float,
    topk_lengths: Tensor | None,
    attn_sink: Tensor | None,
    normalize: bool,
    out: Tensor,
) -> None:
    out.zero_()
    for part in _parts(kv, topk_indices, q.shape[1]):
        _, valid, keys = _listed(kv, topk_indices, topk_lengths, part)
        logits = q[part].float() @ keys.mT  # [c, H, K]
        probs = logits.mul_(softmax_scale).sub_(lse[part, :, None]).exp_()
        if attn_sink is not None:
            probs *= torch.sigmoid(lse[part] - attn_sink)[..., None]
        target = probs.sum(1).masked_fill_(~valid, 0)
        out[part] = _normalize(target) if normalize else target


def dense_index_loss(
    *,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    iq: Tensor,
    weights: Tensor,
    ik: Tensor,
    softmax_scale: float,
    row_starts: Tensor,
    row_ends: Tensor,
    row_weights: Tensor | None,
    max_workspace_bytes: int,
    loss: Tensor,
) -> None:
    attention, ranges = (q, k, lse, softmax_scale), (row_starts, row_ends)
    loss.zero_()
    for part, rows, seen in _seen(ik, *ranges, max_workspace_bytes):
        keys = _index_keys(ik, rows, seen)
        scores = _index_scores(iq[part].float(), weights[part].float(), keys, seen)
        target = _dense_target(*attention, part, rows, seen)
        loss += _losses(scores.log_softmax(-1), target, seen, row_weights, part)


def dense_index_gradients(
    *,
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    iq: Tensor,
    weights: Tensor,
    ik: Tensor,
    softmax_scale: float,
    row_starts: Tensor,
    row_ends: Tensor,
    row_weights: Tensor | None,
    max_workspace_bytes: int,
    loss: Tensor,
    diq: Tensor,
    dweights: Tensor,
    dik: Tensor,
) -> None:
    attention, ranges = (q, k, lse, softmax_scale), (row_starts, row_ends)
    sums = torch.zeros(ik.shape, dtype=torch.float32)
    for result in (loss, diq, dweights):
        result.zero_()
    for part, rows, seen in _seen(ik, *ranges, max_workspace_bytes):
        queries, factors, keys = (
            iq[part].float(),
            weights[part].float(),
            _index_keys(ik, rows, seen),
        )
        logs = _index_scores(queries, factors, keys, seen).log_softmax(-1)
        target = _dense_target(*attention, part, rows, seen)
        loss += _losses(logs, target, seen, row_weights, part)
        # A row without mass in its target has no loss.
        given = logs.exp_().mul_(target.sum(-1, keepdim=True) != 0).sub_(target)  # [c, n]
        given.masked_fill_(~seen, 0)
        if row_weights is not None:
            given *= row_weights[part, None]
        for head in range(iq.shape[1]):
            logits = queries[:, head] @ keys.T  # [c, n]
            dlogits = (given * factors[:, head, None]).mul_(logits > 0)
            dweights[part, head] = logits.relu_().mul_(given).sum(-1)
            diq[part, head] = dlogits @ keys
            sums[rows] += dlogits.T @ queries[:, head]
    dik.copy_(sums)


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


def _seen(
    ik: Tensor, row_starts: Tensor, row_ends: Tensor, max_workspace_bytes: int
) -> Iterator[tuple[slice, slice, Tensor]]:
    """Tokens, the rows that they may see, and the mask ``[c, n]`` of what each of them sees."""
    num_tokens, num_rows = row_starts.shape[0], ik.shape[0]
    starts, ends = (bounds.long().clamp(0, num_rows) for bounds in (row_starts, row_ends))
    # Scores, targets, and the logits of a head.
    for part in cpu.blocks(num_tokens, max_workspace_bytes // (16 * max(num_rows, 1))):
        rows = slice(int(starts[part].min()), int(ends[part].max()))
        if rows.start < rows.stop:
            columns = torch.arange(rows.start, rows.stop)
            yield part, rows, (columns >= starts[part, None]) & (columns < ends[part, None])


def _dense_target(
    q: Tensor,
    k: Tensor,
    lse: Tensor,
    softmax_scale: float,
    part: slice,
    rows: slice,
    seen: Tensor,
) -> Tensor:
    """What all heads together attend to, ``[c, n]``; 0 for rows that a token does not see."""
    target = torch.zeros(seen.shape, dtype=torch.float32)
    for head in range(q.shape[1]):
        keys = k[rows] if k.dim() == 2 else k[rows, head]
        logits = q[part, head].float() @ keys.float().T
        target += logits.mul_(softmax_scale).sub_(lse[part, head, None]).exp_()
    return _normalize(target.masked_fill_(~seen, 0))


def _index_keys(ik: Tensor, rows: slice, seen: Tensor) -> Tensor:
    """Index keys; 0 for rows between the ranges, which no token sees and which may be NaN."""
    return ik[rows].to(torch.float32, copy=True).masked_fill_(~seen.any(0)[:, None], 0)


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

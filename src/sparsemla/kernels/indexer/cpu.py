"""The lightning indexer on the CPU: float32 products, chunked in rows and columns."""

import torch
from torch import Tensor

from sparsemla.cache import PagedCache, slots_of
from sparsemla.kernels.common import cpu
from sparsemla.kernels.topk.cpu import select_topk

KEYS_AT_ONCE = 4096
"""Keys that are converted to float32 at a time."""


def indexer_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    row_starts: Tensor,
    row_ends: Tensor,
    *,
    out: Tensor,
) -> None:
    out.fill_(-torch.inf)
    for part in cpu.blocks(keys.shape[0], KEYS_AT_ONCE):
        rows = (row_starts < part.stop) & (row_ends > part.start)
        live = rows.nonzero()
        if live.numel() == 0:
            continue
        at = slice(int(live[0]), int(live[-1]) + 1)  # rows that see none of these keys stay out
        scales = None if key_scales is None else key_scales[part]
        scores = _scores(q[at], weights[at], keys[part].float(), scales)
        columns = torch.arange(part.start, part.stop)
        outside = (columns < row_starts[at, None]) | (columns >= row_ends[at, None])
        out[at, part] = scores.masked_fill_(outside, -torch.inf)


def indexer_scores_paged(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    max_seq_len: int,
    out: Tensor,
) -> None:
    query_len = q.shape[1]
    if query_len == 0:
        return
    if seq_lens.dim() == 1:  # row j of a request sees len - S + 1 + j keys
        seq_lens = seq_lens[:, None] + torch.arange(1 - query_len, 1)
    ends = seq_lens.clamp(0, max_seq_len)
    out.fill_(-torch.inf)
    for request, longest in enumerate(ends.amax(1).tolist()):
        for part in cpu.blocks(longest, KEYS_AT_ONCE):
            scores = _paged_scores(q[request], weights[request], cache, page_table, request, part)
            outside = torch.arange(part.start, part.stop) >= ends[request, :, None]
            out[request, :, part] = scores.masked_fill_(outside, -torch.inf)


def indexer_topk(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    *,
    input_row_offsets: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    topk: int,
    causal: bool,
    as_slots: bool,
    max_workspace_bytes: int,
    out: Tensor,
) -> None:
    offsets = input_row_offsets.tolist()
    out[offsets[-1] :] = -1  # padding tokens
    for request, length in enumerate(seq_lens.tolist()):
        first, last = offsets[request], offsets[request + 1]
        visible = torch.full((last - first,), length)
        if causal:  # the token at position p sees the keys 0..p
            visible = length - (last - first) + 1 + torch.arange(last - first)
        at_once = max_workspace_bytes // (4 * max(length, 1))
        for rows in cpu.blocks(last - first, at_once):
            at = slice(first + rows.start, first + rows.stop)
            ends = visible[rows].clamp_min(0)
            pieces = q[at], weights[at], cache, page_table, request
            if at_once:
                _select(*pieces, ends, topk, out[at])
            else:
                _select_in_pieces(*pieces, ends, topk, max_workspace_bytes, out[at])
            if as_slots:
                requests = torch.full_like(out[at], request)
                out[at] = slots_of(page_table, requests, out[at], cache.page_size).int()


def _select(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    request: int,
    ends: Tensor,
    topk: int,
    out: Tensor,
) -> None:
    """Score all keys of one request for some query tokens, then select."""
    longest = int(ends.max())
    scores = torch.empty(q.shape[0], longest, dtype=torch.float32)
    if longest > topk:  # otherwise every key is chosen, whatever its score
        for part in cpu.blocks(longest, KEYS_AT_ONCE):
            scores[:, part] = _paged_scores(q, weights, cache, page_table, request, part)
    select_topk(scores, topk, row_starts=None, row_ends=ends, out=out)


def _select_in_pieces(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    request: int,
    ends: Tensor,
    topk: int,
    max_workspace_bytes: int,
    out: Tensor,
) -> None:
    """The same for one token whose scores alone exceed the bound.

    The best so far compete with the next piece. They stand before it, so that a tie still goes to
    the lower position.
    """
    end = int(ends.max())
    best = torch.empty(1, 0), torch.empty(1, 0, dtype=torch.long)
    for part in cpu.blocks(end, max(max_workspace_bytes // 8, 1)):
        scores = _paged_scores(q, weights, cache, page_table, request, part)
        values = torch.cat([best[0], scores], dim=1)
        positions = torch.cat([best[1], torch.arange(part.start, part.stop)[None]], dim=1)
        chosen = torch.empty(1, min(topk, values.shape[1]), dtype=torch.int32)
        select_topk(values, chosen.shape[1], row_starts=None, row_ends=None, out=chosen)
        best = values.gather(1, chosen.long()), positions.gather(1, chosen.long())
    out.fill_(-1)
    out[:, : best[1].shape[1]] = best[1].int()


def _paged_scores(
    q: Tensor, weights: Tensor, cache: PagedCache, page_table: Tensor, request: int, part: slice
) -> Tensor:
    """Scores ``[m, n]`` of keys at positions of a request, -inf where a page is missing."""
    positions = torch.arange(part.start, part.stop)
    slots = slots_of(page_table, torch.full_like(positions, request), positions, cache.page_size)
    valid = cpu.valid_slots(cache, slots[None], None)[0]
    stored = cache.gather(slots.where(valid, 0))
    keys = cpu.dequantize(stored._replace(scales=None), 0).float()
    scales = None if stored.scales is None else stored.scales[:, 0]
    scores = _scores(q, weights, keys, scales)
    return scores if valid.all() else scores.masked_fill_(~valid, -torch.inf)


def _scores(q: Tensor, weights: Tensor, keys: Tensor, key_scales: Tensor | None) -> Tensor:
    """``key_scales[n] * sum_h weights[m, h] * relu(<q[m, h], keys[n]>)``, float32 ``[m, n]``."""
    num_heads, num_keys = q.shape[1], keys.shape[0]
    scores = torch.empty(q.shape[0], num_keys, dtype=torch.float32)
    for rows in cpu.blocks(q.shape[0], cpu.WORKSPACE_BYTES // (4 * num_heads * num_keys)):
        queries = q[rows].float().flatten(0, 1)  # [m * HI, DI]
        dots = (queries @ keys.T).relu_().view(-1, num_heads, num_keys)
        torch.bmm(weights[rows, None].float(), dots, out=scores[rows, None])
    return scores if key_scales is None else scores.mul_(key_scales)

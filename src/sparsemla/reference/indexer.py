"""Reference of the lightning indexer. Shapes: M query rows, HI heads, DI dims, N keys."""

from typing import cast

import torch
from torch import Tensor

from sparsemla.cache import PagedCache, slots_of
from sparsemla.reference.gather import to_slots
from sparsemla.reference.topk import select_topk


def indexer_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    *,
    row_starts: Tensor,
    row_ends: Tensor,
) -> Tensor:
    """``key_scales[n] * sum_h weights[m, h] * relu(<q[m, h], keys[n]>)``, -inf outside the row."""
    logits = torch.einsum("mhd,nd->mhn", q.float(), keys.float())  # [M, HI, N]
    scores = torch.einsum("mh,mhn->mn", weights.float(), logits.relu())  # [M, N]
    if key_scales is not None:
        scores = scores * key_scales
    columns = torch.arange(keys.shape[0], device=q.device)  # [N]
    inside = (columns >= row_starts[:, None]) & (columns < row_ends[:, None])  # [M, N]
    return scores.masked_fill(~inside, -torch.inf)


def indexer_scores_paged(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    max_seq_len: int,
    ratio: int = 1,
) -> Tensor:
    """:func:`indexer_scores` over the paged keys of each request."""
    batch, query_len = q.shape[:2]
    if seq_lens.dim() == 1:  # row j of a request sees len - S + 1 + j keys
        shifts = torch.arange(query_len, device=q.device) - query_len + 1  # [S]
        seq_lens = seq_lens[:, None] + shifts  # [B, S]
    out = q.new_full((batch, query_len, max_seq_len), -torch.inf, dtype=torch.float32)
    starts = seq_lens.new_zeros(query_len)  # [S]
    for request in range(batch):
        ends = (seq_lens[request] // ratio).clamp(0, max_seq_len)  # [S]
        keys, scales, valid = _request_keys(cache, page_table, request, int(ends.max()))
        rows = q[request], weights[request]
        scores = indexer_scores(*rows, keys, scales, row_starts=starts, row_ends=ends)
        out[request, :, : keys.shape[0]] = scores.masked_fill(~valid, -torch.inf)
    return out


def indexer_topk(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    input_row_offsets: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    *,
    topk: int,
    causal: bool = True,
    ratio: int = 1,
    as_slots: bool = False,
    max_workspace_bytes: int = 256 << 20,
) -> Tensor:
    """:func:`select_topk` of the scores of each token over the keys of its request."""
    out = torch.full((q.shape[0], topk), -1, dtype=torch.int32, device=q.device)
    offsets = input_row_offsets.clamp(0, q.shape[0]).tolist()
    num_keys = page_table.shape[1] * cache.page_size  # most of a request
    for request, length in enumerate(seq_lens.clamp_min(0).tolist()):
        first, last = offsets[request], max(offsets[request : request + 2])
        length_in_keys = min(length // ratio, num_keys)
        keys, scales, valid = _request_keys(cache, page_table, request, length_in_keys)
        visible = torch.full((last - first,), length, device=q.device)  # [m]
        if causal:  # the token at position p sees the tokens 0..p
            visible = length - (last - first) + 1 + torch.arange(last - first, device=q.device)
        visible = (visible // ratio).clamp_max(num_keys)  # one key for every ratio tokens
        rows = q[first:last], weights[first:last]
        starts = torch.zeros_like(visible)
        scores = indexer_scores(*rows, keys, scales, row_starts=starts, row_ends=visible)
        scores = scores.masked_fill(~valid, -torch.inf)
        selected = select_topk(scores, topk=topk, row_ends=visible)
        if as_slots:
            requests = torch.full_like(visible, request)
            selected = to_slots(selected, page_table, requests, page_size=cache.page_size)
        out[first:last] = selected
    return out


def _request_keys(
    cache: PagedCache, page_table: Tensor, request: int, length: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Keys ``[n, DI]``, scales ``[n]`` or None, and the mask ``[n]`` of keys with a valid page.

    Keys of several scales are dequantised, to bfloat16.
    """
    positions = torch.arange(length, device=page_table.device)  # [n]
    slots = slots_of(page_table, torch.full_like(positions, request), positions, cache.page_size)
    valid = (slots >= 0) & (slots < cache.num_slots)
    slots = torch.where(valid, slots, 0)
    if cache.format.num_scales > 1 or cache.format.fp8_dim == 0:
        return cache.read(slots), None, valid
    stored = cache.gather(slots)
    return cast(Tensor, stored.fp8), None if stored.scales is None else stored.scales[:, 0], valid

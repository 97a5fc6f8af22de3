"""Reference of the lightning indexer. Shapes: M query rows, HI heads, DI dims, N keys."""

from typing import Any, cast

import torch
from torch import Tensor

from sparsemla.cache import PagedCache, slots_of
from sparsemla.formats import FLOAT32_MAX
from sparsemla.reference.gather import to_slots
from sparsemla.reference.topk import select_topk


def indexer_scores(
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    index_k_scales: Tensor | None,
    *,
    row_starts: Tensor,
    row_ends: Tensor,
) -> Tensor:
    """``index_k_scales[n] * sum_h weights[m, h] * relu(<index_q[m, h], index_k[n]>)``.

    Keys outside a row's range get -inf.
    """
    logits = torch.einsum("mhd,nd->mhn", index_q.float(), index_k.float())  # [M, HI, N]
    scores = torch.einsum("mh,mhn->mn", weights.float(), logits.relu())  # [M, N]
    if index_k_scales is not None:
        scores = scores * index_k_scales
    columns = torch.arange(index_k.shape[0], device=index_q.device)  # [N]
    inside = (columns >= row_starts[:, None]) & (columns < row_ends[:, None])  # [M, N]
    return scores.masked_fill(~inside, -torch.inf)


def indexer_scores_paged(
    index_q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    max_seq_len: int,
    ratio: int = 1,
) -> Tensor:
    """:func:`indexer_scores` over the paged keys of each request."""
    batch, query_len = index_q.shape[:2]
    if seq_lens.dim() == 1:  # row j of a request sees len - S + 1 + j keys
        shifts = torch.arange(query_len, device=index_q.device) - query_len + 1  # [S]
        seq_lens = seq_lens[:, None] + shifts  # [B, S]
    out = index_q.new_full((batch, query_len, max_seq_len), -torch.inf, dtype=torch.float32)
    starts = seq_lens.new_zeros(query_len)  # [S]
    for request in range(batch):
        ends = (seq_lens[request] // ratio).clamp(0, max_seq_len)  # [S]
        keys, scales, valid = _request_keys(cache, page_table, request, int(ends.max()))
        rows = index_q[request], weights[request]
        scores = indexer_scores(*rows, keys, scales, row_starts=starts, row_ends=ends)
        out[request, :, : keys.shape[0]] = scores.masked_fill(~valid, -torch.inf)
    return out


def indexer_topk(
    index_q: Tensor,
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
    out = torch.full((index_q.shape[0], topk), -1, dtype=torch.int32, device=index_q.device)
    offsets = input_row_offsets.clamp(0, index_q.shape[0]).tolist()
    num_keys = page_table.shape[1] * cache.page_size  # most of a request
    for request, length in enumerate(seq_lens.clamp_min(0).tolist()):
        first, last = offsets[request], max(offsets[request : request + 2])
        length_in_keys = min(length // ratio, num_keys)
        keys, scales, valid = _request_keys(cache, page_table, request, length_in_keys)
        visible = torch.full((last - first,), length, device=index_q.device)  # [m]
        if causal:  # the token at position p sees the tokens 0..p
            steps = torch.arange(last - first, device=index_q.device)
            visible = length - (last - first) + 1 + steps
        visible = (visible // ratio).clamp_max(num_keys)  # one key for every ratio tokens
        rows = index_q[first:last], weights[first:last]
        starts = torch.zeros_like(visible)
        scores = indexer_scores(*rows, keys, scales, row_starts=starts, row_ends=visible)
        scores = scores.masked_fill(~valid, -torch.inf)
        selected = select_topk(scores, topk=topk, row_ends=visible)
        if as_slots:
            requests = torch.full_like(visible, request)
            selected = to_slots(selected, page_table, requests, page_size=cache.page_size)
        out[first:last] = selected
    return out


def indexer_topk_blocks(
    index_q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    input_row_offsets: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    *,
    topk: int,
    topk_blocks: int,
    block_size: int,
    causal: bool = True,
    ratio: int = 1,
    max_workspace_bytes: int = 256 << 20,
) -> tuple[Tensor, Tensor]:
    """:func:`indexer_topk`, and :func:`select_topk` of the best scores of each block of keys."""
    request = input_row_offsets, seq_lens, page_table
    rules: dict[str, Any] = {"causal": causal, "ratio": ratio}
    out = indexer_topk(index_q, weights, cache, *request, topk=topk, **rules)
    num_tokens, num_keys = index_q.shape[0], page_table.shape[1] * cache.page_size
    num_blocks = -(-num_keys // block_size)
    best = index_q.new_full((num_tokens, num_blocks), -torch.inf, dtype=torch.float32)  # [T, n]
    counts = torch.zeros(num_tokens, dtype=torch.int64, device=index_q.device)  # [T]
    requests, ends = _visible_keys(input_row_offsets, seq_lens, num_tokens, num_keys, **rules)
    for token, (b, end) in enumerate(zip(requests, ends, strict=True)):
        positions = torch.arange(end, device=index_q.device)  # [e]
        scores = _scores_at(index_q[token], weights[token], cache, page_table, b, positions)
        # The last block is above all.
        scores = scores.nan_to_num(-torch.inf, FLOAT32_MAX, -torch.inf)
        counts[token] = -(-end // block_size)
        if end > 0:
            best[token].scatter_reduce_(0, positions // block_size, scores, "amax")
            best[token, (end - 1) // block_size] = torch.inf
    return out, select_topk(best, topk=topk_blocks, row_ends=counts)


def indexer_topk_of_blocks(
    index_q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    input_row_offsets: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    blocks: Tensor,
    *,
    topk: int,
    block_size: int,
    causal: bool = True,
    ratio: int = 1,
    max_workspace_bytes: int = 256 << 20,
) -> Tensor:
    """:func:`select_topk` of the scores of the keys in each token's blocks."""
    num_tokens, num_keys = index_q.shape[0], page_table.shape[1] * cache.page_size
    out = torch.full((num_tokens, topk), -1, dtype=torch.int32, device=index_q.device)
    requests, ends = _visible_keys(
        input_row_offsets, seq_lens, num_tokens, num_keys, causal=causal, ratio=ratio
    )
    inside = torch.arange(block_size, device=index_q.device)
    for token, (b, end) in enumerate(zip(requests, ends, strict=True)):
        listed = blocks[token].long()
        listed = listed[(listed >= 0) & (listed < -(-end // block_size))]
        positions = (listed[:, None] * block_size + inside).flatten()
        positions = positions[positions < end]  # [n], ascending
        scores = _scores_at(index_q[token], weights[token], cache, page_table, b, positions)
        selected = select_topk(scores[None], topk=topk)[0]
        selected = positions[selected[selected >= 0].long()]
        out[token, : len(selected)] = selected.int()
    return out


def _visible_keys(
    input_row_offsets: Tensor,
    seq_lens: Tensor,
    num_tokens: int,
    num_keys: int,
    *,
    causal: bool,
    ratio: int,
) -> tuple[list[int], list[int]]:
    """The request of each token, and how many keys it sees; 0 for tokens of no request."""
    requests, ends = [0] * num_tokens, [0] * num_tokens
    offsets = input_row_offsets.clamp(0, num_tokens).tolist()
    for request, length in enumerate(seq_lens.clamp_min(0).tolist()):
        first, last = offsets[request], max(offsets[request : request + 2])
        for token in range(first, last):
            seen = length - (last - 1 - token) if causal else length
            requests[token] = request
            ends[token] = min(max(seen, 0) // ratio, num_keys)
    return requests, ends


def _scores_at(
    index_q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    request: int,
    positions: Tensor,
) -> Tensor:
    """Scores ``[n]`` of one token for keys at positions ``[n]`` of a request."""
    keys, scales, valid = _keys_at(cache, page_table, request, positions)
    starts = torch.zeros(1, dtype=torch.int64, device=positions.device)
    bounds = {"row_starts": starts, "row_ends": starts + len(positions)}
    scores = indexer_scores(index_q[None], weights[None], keys, scales, **bounds)[0]
    return scores.masked_fill(~valid, -torch.inf)


def _request_keys(
    cache: PagedCache, page_table: Tensor, request: int, length: int
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The first keys of a request, as :func:`_keys_at` gives them."""
    positions = torch.arange(length, device=page_table.device)  # [n]
    return _keys_at(cache, page_table, request, positions)


def _keys_at(
    cache: PagedCache, page_table: Tensor, request: int, positions: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Keys ``[n, DI]``, scales ``[n]`` or None, and the mask ``[n]`` of keys with a valid page.

    Keys of several scales are dequantised, to bfloat16.
    """
    slots = slots_of(page_table, torch.full_like(positions, request), positions, cache.page_size)
    valid = (slots >= 0) & (slots < cache.num_slots)
    slots = torch.where(valid, slots, 0)
    if cache.format.num_scales > 1 or cache.format.fp8_dim == 0:
        return cache.read(slots), None, valid
    stored = cache.gather(slots)
    return cast(Tensor, stored.fp8), None if stored.scales is None else stored.scales[:, 0], valid

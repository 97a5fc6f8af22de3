"""The lightning indexer on the CPU: exact dot products, in blocks of rows and columns.

Equal keys must get equal scores at any position and among any other keys of the batch. The
order of a GEMM's additions depends on shapes, positions and threads, so the GEMM is in float64:
products of e4m3 values are multiples of 2^-18 below 2^18, and float64 adds up billions of them
without rounding. Heads are added in a fixed order.
"""

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor

from sparsemla.cache import PagedCache, slots_of, to_int32
from sparsemla.formats import FLOAT32_MAX
from sparsemla.kernels.common import cpu
from sparsemla.kernels.indexer.arguments import (
    IndexerScores,
    IndexerScoresPaged,
    IndexerTopk,
    IndexerTopkBlocks,
    IndexerTopkOfBlocks,
)
from sparsemla.kernels.topk.arguments import SelectTopk
from sparsemla.kernels.topk.cpu import select_topk

KEYS_AT_ONCE = 2048
"""Keys that are dequantised to float64 at a time."""

TILE = 1 << 19
"""Logits of a block: 4 MiB of float64, which stay in the cache."""

SELECTED_AT_ONCE = 1 << 20
"""Scores of a token in one selection; it takes about 25 bytes per score."""


def indexer_scores(call: IndexerScores) -> None:
    q, weights, keys, key_scales, row_starts, row_ends, out = call
    out.fill_(-torch.inf)
    for part in cpu.blocks(keys.shape[0], KEYS_AT_ONCE):
        rows = (row_starts < part.stop) & (row_ends > part.start)
        live = rows.nonzero()
        if live.numel() == 0:
            continue
        at = slice(
            int(live[0]), int(live[-1]) + 1
        )  # skip leading and trailing rows that see none of these keys
        scales = None if key_scales is None else key_scales[part]
        scores = _scores(q[at], weights[at], keys[part].double(), scales)
        columns = torch.arange(part.start, part.stop)
        outside = (columns < row_starts[at, None]) | (columns >= row_ends[at, None])
        out[at, part] = scores.masked_fill_(outside, -torch.inf)


def indexer_scores_paged(call: IndexerScoresPaged) -> None:
    q, weights, cache, page_table, seq_lens, max_seq_len, ratio, out = call
    query_len = q.shape[1]
    if query_len == 0:
        return
    if seq_lens.dim() == 1:  # row j of a request sees len - S + 1 + j keys
        seq_lens = seq_lens[:, None] + torch.arange(1 - query_len, 1)
    ends = (seq_lens // ratio).clamp(0, max_seq_len)
    out.fill_(-torch.inf)
    for request, longest in enumerate(ends.amax(1).tolist()):
        for part in cpu.blocks(longest, KEYS_AT_ONCE):
            at = torch.arange(part.start, part.stop)
            scores = _paged_scores(q[request], weights[request], cache, page_table, request, at)
            outside = at >= ends[request, :, None]
            out[request, :, part] = scores.masked_fill_(outside, -torch.inf)


def _requests(
    call: IndexerTopk | IndexerTopkBlocks | IndexerTopkOfBlocks,
) -> Iterator[tuple[int, int, Tensor]]:
    """Each request, its first token, and how many keys its tokens see (negative for none)."""
    offsets = call.input_row_offsets.clamp(0, len(call.index_q)).tolist()
    for request, length in enumerate(call.seq_lens.clamp_min(0).tolist()):
        first, last = offsets[request], max(offsets[request : request + 2])
        visible = torch.full((last - first,), length)
        if call.causal:  # the token at position p sees the tokens 0..p
            visible = length - (last - first) + 1 + torch.arange(last - first)
        if last > first:
            yield request, first, (visible // call.ratio).clamp_max(call.num_keys)


def indexer_topk(call: IndexerTopk) -> None:
    q, weights, out, max_bytes = call.index_q, call.weights, call.out, call.max_workspace_bytes
    out.fill_(-1)  # tokens of no request
    for request, first, visible in _requests(call):
        longest = max(int(visible[-1]), 1)
        for rows in cpu.blocks(len(visible), max_bytes // (4 * longest)):
            at = slice(first + rows.start, first + rows.stop)
            keys = call.cache, call.page_table, request
            _select(q[at], weights[at], *keys, visible[rows], call.topk, max_bytes, out[at])
            if call.as_slots:
                requests = torch.full_like(out[at], request)
                slots = slots_of(call.page_table, requests, out[at], call.cache.page_size)
                out[at] = to_int32(slots)


def indexer_topk_blocks(call: IndexerTopkBlocks) -> None:
    q, weights, size = call.index_q, call.weights, call.block_size
    call.out.fill_(-1)  # tokens of no request
    call.blocks_out.fill_(-1)
    for request, first, visible in _requests(call):
        longest = max(int(visible[-1]), 0)
        num_blocks = -(-longest // size)
        row_bytes = 4 * (longest + num_blocks * size + num_blocks) + 1
        for rows in cpu.blocks(len(visible), call.max_workspace_bytes // row_bytes):
            at, ends = slice(first + rows.start, first + rows.stop), visible[rows].clamp_min(0)
            scores = torch.full((len(ends), num_blocks * size), -torch.inf)
            for part in cpu.blocks(longest, KEYS_AT_ONCE):
                positions = torch.arange(part.start, part.stop)
                scores[:, part] = _paged_scores(
                    q[at], weights[at], call.cache, call.page_table, request, positions
                )
            select_topk(SelectTopk(scores, call.topk, row_ends=ends, out=call.out[at]))
            scores.masked_fill_(torch.arange(num_blocks * size) >= ends[:, None], -torch.inf)
            scores.nan_to_num_(-torch.inf, FLOAT32_MAX, -torch.inf)  # the last block is above all
            best = scores.view(len(ends), num_blocks, size).amax(2)
            best.masked_fill_(torch.arange(num_blocks) == (ends[:, None] - 1) // size, torch.inf)
            counts = -(-ends // size)
            select_topk(
                SelectTopk(best, call.topk_blocks, row_ends=counts, out=call.blocks_out[at])
            )


def indexer_topk_of_blocks(call: IndexerTopkOfBlocks) -> None:
    q, weights, out, size = call.index_q, call.weights, call.out, call.block_size
    out.fill_(-1)  # tokens of no request
    inside = torch.arange(size)
    for request, first, visible in _requests(call):
        for token, end in enumerate(visible.tolist(), first):
            listed = call.blocks[token].long()
            listed = listed[(listed >= 0) & (listed < -(-end // size))]
            positions = (listed[:, None] * size + inside).flatten()
            positions = positions[positions < end]
            scores = torch.empty(1, len(positions))
            for part in cpu.blocks(len(positions), KEYS_AT_ONCE):
                rows = q[token, None], weights[token, None]
                scores[:, part] = _paged_scores(
                    *rows, call.cache, call.page_table, request, positions[part]
                )
            places = torch.empty_like(out[token, None])
            select_topk(SelectTopk(scores, call.topk, out=places))
            chosen = places[places >= 0].long()
            out[token, : len(chosen)] = positions[chosen].int()


def _select(
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
    """Select the best keys before ``ends [m]`` for ``m`` query tokens of one request.

    Each iteration selects from the best keys so far and the next piece of keys. The best keys so
    far come first, so that ties still go to the lower position.
    """
    ends, num_tokens = ends.clamp_min(0), q.shape[0]
    longest = int(ends.max())
    if longest <= topk:  # every key is selected
        ids = torch.arange(topk, dtype=torch.int32)
        out.copy_(ids.where(ids < ends[:, None], -1))
        return
    width = min(max_workspace_bytes // (4 * num_tokens), SELECTED_AT_ONCE)
    width = min(max(width, topk, KEYS_AT_ONCE), longest)
    scores = torch.empty(num_tokens, topk + width, dtype=torch.float32)  # the best so far first
    ids = torch.empty(num_tokens, topk, dtype=torch.int32)
    for piece in cpu.blocks(longest, width):
        for part in cpu.blocks(piece.stop - piece.start, KEYS_AT_ONCE):
            positions = torch.arange(piece.start + part.start, piece.start + part.stop)
            columns = slice(topk + part.start, topk + part.stop)
            scores[:, columns] = _paged_scores(q, weights, cache, page_table, request, positions)
        kept = min(piece.start, topk)
        offered = scores[:, topk - kept : topk + piece.stop - piece.start]
        counts = ends.clamp_max(kept) + (ends - piece.start).clamp_min(0)
        chosen = torch.empty_like(ids)
        select_topk(SelectTopk(offered, topk, row_ends=counts, out=chosen))
        places = chosen.clamp_min(0).long()
        new = chosen.where(chosen < 0, chosen + (piece.start - kept))
        ids = ids.gather(1, places.clamp_max(topk - 1)).where(chosen.clamp_min(0) < kept, new)
        scores[:, :topk] = offered.gather(1, places)
    out.copy_(ids)


def _paged_scores(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    request: int,
    positions: Tensor,
) -> Tensor:
    """Scores ``[m, n]`` of keys at positions of a request, -inf where a page is missing."""
    slots = slots_of(page_table, torch.full_like(positions, request), positions, cache.page_size)
    valid = cpu.valid_slots(cache, slots[None], None)[0]
    stored, scales = cache.gather(slots.where(valid, 0)), None
    if cache.format.num_scales == 1:  # the score is multiplied, not the key
        scales, stored = cast(Tensor, stored.scales)[:, 0], stored._replace(scales=None)
    keys = cpu.dequantize(stored, cache.format.scale_block).double()
    scores = _scores(q, weights, keys, scales)
    return scores if valid.all() else scores.masked_fill_(~valid, -torch.inf)


def _scores(q: Tensor, weights: Tensor, keys: Tensor, key_scales: Tensor | None) -> Tensor:
    """``key_scales[n] * sum_h weights[m, h] * relu(<q[m, h], keys[n]>)``, float32 ``[m, n]``."""
    (num_tokens, num_heads, head_dim), num_keys = q.shape, keys.shape[0]
    scores = torch.empty(num_tokens, num_keys, dtype=torch.float32)
    for rows in cpu.blocks(num_tokens, TILE // (num_heads * max(num_keys, head_dim))):
        queries = q[rows].double().flatten(0, 1)  # [m * HI, DI]
        dots = (queries @ keys.T).float().relu_().view(-1, num_heads, num_keys)
        scores[rows] = _sum_heads(dots.mul_(weights[rows, :, None].float()))
    return scores if key_scales is None else scores.mul_(key_scales)


def _sum_heads(terms: Tensor) -> Tensor:
    """``sum_h terms[m, h, n]`` in halves, in place: one order for all of m and n."""
    while terms.shape[1] > 1:
        half, rest = divmod(terms.shape[1], 2)
        if rest:
            terms[:, 0] += terms[:, -1]
        terms = terms[:, :half].add_(terms[:, half : 2 * half])
    return terms[:, 0]

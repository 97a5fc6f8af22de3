"""Rows in fast memory, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsemla.cache import slots_of
from sparsemla.kernels.common import cpu
from sparsemla.kernels.residency.arguments import FetchRows, ForgetSeats, ResolveRows
from sparsemla.residency import EMPTY, RowTable
from sparsemla.shards import ContextShard


def resolve_rows(call: ResolveRows) -> None:
    for listed in (call.out, call.miss_slots, call.miss_rows):
        listed.fill_(-1)
    for counted in (call.counts, call.miss_counts, call.new_counts):
        counted.zero_()
    num_tokens = call.topk_indices.shape[0]
    shard = ContextShard(0, 1) if call.shard is None else call.shard
    offsets = call.input_row_offsets.clamp(0, num_tokens).tolist()
    queries = torch.tensor(offsets).diff()
    contexts = shard.lengths((call.seq_lens - queries).clamp_min(0)).tolist()
    lengths, seats = call.seq_lens.tolist(), call.seats.tolist()
    for request, (seat, context) in enumerate(zip(seats, contexts, strict=True)):
        first, end = offsets[request : request + 2]
        if 0 <= seat < call.table.num_seats and lengths[request] > 0 and first < end:
            tokens = range(first, min(end, first + call.max_query_len))
            _resolve(call, shard, request, seat, context, tokens)


def _resolve(
    call: ResolveRows, shard: ContextShard, request: int, seat: int, context: int, tokens: range
) -> None:
    """Resolve the lists of a request's tokens, one after the other."""
    table, page_table, page_size = call.table, call.page_table, call.page_size
    per_seat = table.rows_per_seat
    keys, rows, order = (part[seat].long() for part in (table.keys, table.rows, table.order))
    keys = keys.where(keys < context, EMPTY)  # still ascends: these are the largest
    empty = torch.zeros(per_seat, dtype=torch.bool)
    empty[rows[keys == EMPTY]] = True
    of_order = empty[order]
    order = torch.cat([order[of_order], order[~of_order]])
    for token in tokens:
        positions, parts = _own(call, shard, token)
        slots = slots_of(page_table, torch.full_like(positions, request), positions, page_size)
        slots = slots.where(slots < 2**31, -1)
        places = torch.searchsorted(keys, positions)
        near = places.clamp_max(per_seat - 1)
        hit = keys[near] == positions
        missed = ~hit & (slots >= 0)
        # Rows that earlier tokens of the step used are the last ones, and not reached.
        used = torch.zeros_like(empty)
        used[rows[near[hit]]] = True
        victims = order[~used[order]][: int(missed.sum())]
        found = torch.full_like(positions, -1)
        found[hit], found[missed] = rows[near[hit]], victims
        # The list's rows become the most recent ones.
        resolved = found[found >= 0]
        kept = torch.ones(per_seat, dtype=torch.bool)
        kept[resolved] = False
        order = torch.cat([order[kept[order]], resolved])
        # The positions that were missed take the places of those in their rows.
        kept = torch.ones(per_seat, dtype=torch.bool)
        kept[victims] = False
        kept = kept[rows]
        keys, by_key = torch.cat([keys[kept], positions[missed]]).sort(stable=True)
        rows = torch.cat([rows[kept], victims])[by_key]
        _write(call, seat, token, found, parts, shard)
        num_missed = len(victims)
        call.miss_slots[token, :num_missed] = slots[missed].int()
        call.miss_rows[token, :num_missed] = (seat * per_seat + victims).int()
        call.miss_counts[token] = num_missed
        call.new_counts[token] = int((positions[missed] >= context).sum())
        if call.stats is not None:
            call.stats.add_(torch.stack([hit.sum(), missed.sum()]))
    for part, now in zip((table.keys, table.rows, table.order), (keys, rows, order), strict=True):
        part[seat] = now.int()


def _own(call: ResolveRows, shard: ContextShard, token: int) -> tuple[Tensor, Tensor]:
    """The positions of a token's list on this rank, and the part of each; none of a bad list."""
    listed = call.topk_indices[token].long()
    named = (listed >= 0) & (listed < EMPTY)
    ascends = ~named[1:] | (named[:-1] & (listed[1:] > listed[:-1]))
    if not ascends.all():
        named = torch.zeros_like(named)
    listed = listed[named]
    local = shard.to_local(listed)
    inside = (local >= 0) & (local < call.page_table.shape[1] * call.page_size)
    return local[inside], shard.part(listed[inside])


def _write(
    call: ResolveRows, seat: int, token: int, found: Tensor, parts: Tensor, shard: ContextShard
) -> None:
    """Write the rows of a token's list, of each part on its own."""
    found = (seat * call.table.rows_per_seat + found).where(found >= 0, -1).int()
    if call.counts.dim() == 1:
        call.out[token, : len(found)] = found
        call.counts[token] = len(found)
        return
    for i, part in enumerate(shard.own_parts):
        of_part = found[parts == part]
        call.out[token, i, : len(of_part)] = of_part
        call.counts[token, i] = len(of_part)


def fetch_rows(call: FetchRows) -> None:
    source, target = call.source, call.target
    topk = call.miss_slots.shape[1]
    listed = torch.arange(topk) < call.miss_counts[:, None]
    rows = call.miss_rows[listed].long()
    inside = (rows >= 0) & (rows < target.num_slots)
    rows, slots = rows[inside], call.miss_slots[listed][inside].long()
    valid = (slots >= 0) & (slots < source.num_slots)
    slots = slots.where(valid, 0)
    pages = slots // source.page_size
    offsets = slots - pages * source.page_size
    for of_source, of_target in zip(source.stored_bytes(), target.stored_bytes(), strict=True):
        for part in cpu.blocks(len(rows), cpu.WORKSPACE_BYTES // (4 * of_source.shape[-1])):
            moved = of_source[pages[part], offsets[part]]
            of_target[rows[part], 0] = moved.where(valid[part, None], 0)


def forget_seats(call: ForgetSeats) -> None:
    table, seats = call.table, call.seats
    known = seats[(seats >= 0) & (seats < table.num_seats)].long()
    fresh = RowTable.allocate(1, table.rows_per_seat)
    table.keys[known], table.rows[known], table.order[known] = fresh.keys, fresh.rows, fresh.order

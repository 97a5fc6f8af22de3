"""Reference of rows in fast memory. Shapes: T tokens, K top-k, B requests, H rows of a seat."""

from collections import OrderedDict

import torch
from torch import Tensor

from sparsemla.cache import PagedCache, slots_of
from sparsemla.residency import EMPTY, RowTable
from sparsemla.shards import ContextShard


def resolve_rows(
    topk_indices: Tensor,
    input_row_offsets: Tensor,
    seq_lens: Tensor,
    seats: Tensor,
    page_table: Tensor,
    table: RowTable,
    *,
    page_size: int,
    max_query_len: int,
    shard: ContextShard | None = None,
    stats: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Find the rows of selected positions in seats, and replace the least recently used."""
    share = ContextShard(0, 1) if shard is None else shard
    parts = share.own_parts
    num_tokens, topk = topk_indices.shape
    found = topk_indices.new_full((num_tokens, len(parts), topk), -1, dtype=torch.int32)
    counts = found.new_zeros(num_tokens, len(parts))  # [T, P], beside found [T, P, K]
    miss_slots, miss_rows = found.new_full((2, num_tokens, topk), -1)
    miss_counts, new_counts = found.new_zeros(2, num_tokens)
    for request in range(len(seats)):
        seat, length = int(seats[request]), int(seq_lens[request])
        first, end = input_row_offsets[request : request + 2].clamp(0, num_tokens).tolist()
        if not 0 <= seat < table.num_seats or length <= 0 or first >= end:
            continue
        context = int(share.lengths(torch.tensor(max(length - (end - first), 0))))
        lru = _rows_of(table, seat, context)
        tail = [row for row in table.rows[seat].tolist() if lru[row] == EMPTY]
        used: set[int] = set()  # rows of tokens of this step
        for token in range(first, min(end, first + max_query_len)):
            listed = _listed(topk_indices[token])
            local = share.to_local(listed)
            inside = (local >= 0) & (local < page_table.shape[1] * page_size)
            listed, local = listed[inside], local[inside]  # [n]
            of_table = slots_of(page_table, torch.full_like(local, request), local, page_size)
            slots = torch.where(of_table < 2**31, of_table, -1).tolist()
            positions = local.tolist()
            row_of = {position: row for row, position in lru.items() if position != EMPTY}
            missed = [
                (position, slot)
                for position, slot in zip(positions, slots, strict=True)
                if position not in row_of and slot >= 0
            ]
            hits = [row_of[position] for position in positions if position in row_of]
            used |= set(hits)
            victims = [row for row in lru if row not in used][: len(missed)]
            used |= set(victims)
            for i, ((position, slot), row) in enumerate(zip(missed, victims, strict=True)):
                row_of[position], lru[row] = row, position
                miss_slots[token, i], miss_rows[token, i] = slot, seat * table.rows_per_seat + row
            for position in positions:
                if position in row_of:
                    lru.move_to_end(row_of[position])
            rows = [row_of.get(position, -1) for position in positions]
            places = share.part(listed).tolist()
            for i, part in enumerate(parts):
                of_part = [row for row, place in zip(rows, places, strict=True) if place == part]
                for j, row in enumerate(of_part):
                    found[token, i, j] = row if row < 0 else seat * table.rows_per_seat + row
                counts[token, i] = len(of_part)
            miss_counts[token] = len(missed)
            new_counts[token] = sum(position >= context for position, _ in missed)
            if stats is not None:
                stats += torch.tensor([len(hits), len(missed)]).to(stats.device)
        held = sorted((position, row) for row, position in lru.items() if position != EMPTY)
        held += [(EMPTY, row) for row in tail if lru[row] == EMPTY]
        table.keys[seat], table.rows[seat] = (
            torch.tensor(held, dtype=torch.int32).to(found.device).T
        )
        table.order[seat] = torch.tensor([*lru], dtype=torch.int32)
    if shard is None or shard.parts is None:
        found, counts = found[:, 0], counts[:, 0]
    return found, counts, miss_slots, miss_rows, miss_counts, new_counts


def _rows_of(table: RowTable, seat: int, context: int) -> OrderedDict[int, int]:
    """The position in each row of a seat, least recently used first, after those that hold none.

    Positions at or beyond the context are dropped: this step writes them anew.
    """
    positions = dict(zip(table.rows[seat].tolist(), table.keys[seat].tolist(), strict=True))
    held = [(row, positions[row]) for row in table.order[seat].tolist()]
    held = [(row, position if position < context else EMPTY) for row, position in held]
    return OrderedDict(sorted(held, key=lambda item: item[1] != EMPTY))  # a stable sort


def _listed(indices: Tensor) -> Tensor:
    """The positions of a list, none if they do not ascend up to the first -1."""
    named = (indices >= 0) & (indices < EMPTY)
    listed = indices[: int(named.sum())].long()
    ascends = bool(named[: len(listed)].all() and (listed[1:] > listed[:-1]).all())
    return listed if ascends else listed[:0]


def fetch_rows(
    source: PagedCache,
    target: PagedCache,
    miss_slots: Tensor,
    miss_rows: Tensor,
    miss_counts: Tensor,
) -> None:
    """Copy rows from slots of one cache to rows of another, bit for bit."""
    columns = torch.arange(miss_slots.shape[1], device=miss_slots.device)  # [K]
    listed = columns < miss_counts[:, None]  # [T, K]
    slots, rows = miss_slots[listed].long(), miss_rows[listed].long()  # [n]
    inside = (rows >= 0) & (rows < target.num_slots)
    slots, rows = slots[inside], rows[inside]
    valid = (slots >= 0) & (slots < source.num_slots)
    slots = torch.where(valid, slots, 0)
    pages, offsets = slots // source.page_size, slots % source.page_size
    for of_source, of_target in zip(source.stored_bytes(), target.stored_bytes(), strict=True):
        of_target[rows, 0] = torch.where(valid[:, None], of_source[pages, offsets], 0)


def forget_seats(table: RowTable, seats: Tensor) -> None:
    """Empty seats."""
    known = seats[(seats >= 0) & (seats < table.num_seats)].long()
    fresh = RowTable.allocate(1, table.rows_per_seat, device=seats.device)
    table.keys[known], table.rows[known], table.order[known] = fresh.keys, fresh.rows, fresh.order

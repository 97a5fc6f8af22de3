"""Rows in fast memory, in Triton.

**resolve_rows.** One program for each request. Lists and keys ascend, so searches and running
counts replace hashes and atomics. Of a seat of ``H`` rows and a list of ``n`` entries::

    0  keys, rows, order -> workspace; positions at or beyond the context become empty rows, and
       empty rows the least recently used
    for each token, from the seat as the token before left it:
    1  each position searches the keys: hits mark their rows, misses get a rank        n searches
    2  in the order of use, but for the rows of hits, the first rows are victims of    1 scan of H
       the misses, and the others begin the new order
    3  the list's rows go to the results and to the end of the order
    4  keys whose row is no victim move to their new places: less the victims, plus    1 scan of H,
       the misses before them                                                          H searches
    5  misses go to theirs                                                             n loads

A step of one token ends in the table. Several tokens alternate between two copies of the seat, and
the last copy is written back. Blocks of ``BLOCK`` rows pass through registers, whatever ``H`` is.
What one thread writes to the workspace another one reads after a barrier.

Rows that earlier tokens of the step used are the last ones of the order, and ``H`` has room for all
that a step lists: without a word about them, no victim is among them.

Whatever the table holds, and however lists and seats go wrong, a row is checked against ``H``
before it is an address.

**fetch_rows.** Few programs for all rows of all tokens, so that attention can run beside them. Each
counts the rows of all tokens and takes every ``PROGRAMS``-th group of ``ROWS``: tokens with few
misses leave no program idle. Rows are copied in pieces of 16 bytes where all of them are aligned.
A host's memory answers after a microsecond or two, while ``PROGRAMS * ROWS`` rows are on their way.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemla.cache import misalignment
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.common.search import smaller_entries
from sparsemla.kernels.common.shards import row_of
from sparsemla.kernels.common.slots import is_slot, slot_of
from sparsemla.kernels.residency.arguments import (
    FetchRows,
    ForgetSeats,
    ResolveRows,
    workspace_bytes,
)
from sparsemla.residency import EMPTY

BLOCK = 4096
"""Most rows or entries of a step: eight for each thread."""
FORGOTTEN = 1024
"""Rows that a program forgets."""
PROGRAMS = 64
"""Most programs that fetch rows."""
ROWS = 8
"""Rows that a program fetches at a time."""
TOKENS = 256
"""Tokens whose rows are dealt to programs at a time."""


@triton.jit
def _local(position, rank, NUM_RANKS: tl.constexpr, INTERLEAVE: tl.constexpr):
    """A position's row on this rank, -1 for those of other ranks."""
    local = position
    if NUM_RANKS > 1:
        local = row_of(position, NUM_RANKS, INTERLEAVE)
        owner = position // INTERLEAVE % NUM_RANKS
        local = tl.where((position >= 0) & (owner == rank), local, -1)
    return local


@triton.jit
def _named(position, LAST: tl.constexpr):
    """Positions as int32; -1 for numbers that name none."""
    return tl.where((position >= 0) & (position < LAST), position, -1).to(tl.int32)


@triton.jit
def _pair(first, second):
    """Two conditions as numbers to be added in one sum."""
    return first.to(tl.int64) + (second.to(tl.int64) << 32)


@triton.jit
def _parts(total):
    """Both sums of :func:`_pair`."""
    return (total & 0x7FFFFFFF).to(tl.int32), (total >> 32).to(tl.int32)


@triton.jit
def _token(offsets, request, num_tokens):
    """The first token of a request, inside of the tokens that exist."""
    token = tl.load(offsets + request)
    return tl.minimum(tl.maximum(token, 0), num_tokens).to(tl.int32)


@triton.jit
def _length_of(rank, length, NUM_RANKS: tl.constexpr, INTERLEAVE: tl.constexpr):
    """How many of the first ``length`` positions this rank keeps."""
    if NUM_RANKS > 1:
        whole = length // (INTERLEAVE * NUM_RANKS) * INTERLEAVE
        rest = length - whole * NUM_RANKS - rank * INTERLEAVE
        length = whole + tl.minimum(tl.maximum(rest, 0), INTERLEAVE)
    return length


# Without alignments every block has one layout, and none must be exchanged between threads; so one
# kernel also takes any sizes.
@triton.jit(
    do_not_specialize=[
        "indices_token",
        "table_width",
        "table_stride",
        "keys_seat",
        "rows_seat",
        "order_seat",
        "out_token",
        "out_part",
        "counts_token",
        "slots_token",
        "miss_rows_token",
        "num_tokens",
        "num_requests",
        "num_seats",
        "topk",
        "per_seat",
        "max_query_len",
        "rank",
    ],
    do_not_specialize_on_alignment=[
        "indices",
        "offsets",
        "seq_lens",
        "seats",
        "page_table",
        "table_keys",
        "table_rows",
        "table_order",
        "out",
        "counts",
        "miss_slots",
        "miss_rows",
        "miss_counts",
        "new_counts",
        "stats",
        "workspace",
    ],
)
def _resolve_kernel(
    indices,
    indices_token,
    offsets,
    seq_lens,
    seats,
    page_table,
    table_width,
    table_stride,
    table_keys,
    keys_seat,
    table_rows,
    rows_seat,
    table_order,
    order_seat,
    out,
    out_token,
    out_part,
    counts,
    counts_token,
    miss_slots,
    slots_token,
    miss_rows,
    miss_rows_token,
    miss_counts,
    new_counts,
    stats,
    workspace,
    num_tokens,
    num_requests,
    num_seats,
    topk,
    per_seat,
    max_query_len,
    rank,
    PAGE_SIZE: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    PARTS: tl.constexpr,
    COPIES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST: tl.constexpr,
):
    request = tl.program_id(0)
    listed_request = request < num_requests
    first = _token(offsets, request, num_tokens)
    end = _token(offsets, tl.minimum(request + 1, num_requests), num_tokens)
    seat = tl.load(seats + request, mask=listed_request, other=-1).to(tl.int64)
    length = tl.load(seq_lens + request, mask=listed_request, other=0).to(tl.int64)
    num_resolved = tl.maximum(tl.minimum(end - first, max_query_len), 0)
    if (seat < 0) | (seat >= num_seats) | (length <= 0):
        num_resolved = 0

    # Padding: the request's other tokens, and its share of those of no request
    before, behind = _token(offsets, 0, num_tokens), _token(offsets, num_requests, num_tokens)
    padding = tl.maximum(end - first - num_resolved, 0)
    share = tl.maximum(before + num_tokens - behind - request, 0)
    share = (share + tl.num_programs(0) - 1) // tl.num_programs(0)
    for i in range(padding + share):
        other = request + (i - padding) * tl.num_programs(0)
        other = tl.where(other < before, other, other - before + behind)
        token = tl.where(i < padding, first + num_resolved + i, other)
        number = token + tl.zeros([], tl.int64)
        for start in range(0, topk, BLOCK):
            at = start + tl.arange(0, BLOCK)
            nothing = tl.full([BLOCK], -1, tl.int32)
            for part in tl.static_range(PARTS):
                tl.store(out + number * out_token + part * out_part + at, nothing, mask=at < topk)
            tl.store(miss_slots + number * slots_token + at, nothing, mask=at < topk)
            tl.store(miss_rows + number * miss_rows_token + at, nothing, mask=at < topk)
        for part in tl.static_range(PARTS):
            tl.store(counts + number * counts_token + part, 0)
        tl.store(miss_counts + number, 0)
        tl.store(new_counts + number, 0)
    if num_resolved == 0:
        return

    context = tl.maximum(length - (end - first), 0)
    context = tl.minimum(_length_of(rank, context, NUM_RANKS, INTERLEAVE), LAST).to(tl.int32)
    capacity = tl.cast(table_width, tl.int64) * PAGE_SIZE
    table_keys += seat * keys_seat
    table_rows += seat * rows_seat
    table_order += seat * order_seat
    first_row = (seat * per_seat).to(tl.int32)
    size = (3 * COPIES + 2) * per_seat + 5 * topk
    copy = workspace + request.to(tl.int64) * size
    marks = copy + 3 * COPIES * per_seat
    """For each row 1 if it is empty, then ``2 i + 2`` if token ``i`` found it, ``2 i + 3`` if it is
    the victim of token ``i``."""
    gone = marks + per_seat
    """For each key how many victims are before it."""
    found_at = gone + per_seat
    """For each entry of a list its row, or ``-2 - rank`` of a miss."""
    victims = found_at + topk
    missed_keys = victims + topk
    missed_places = missed_keys + topk
    own = missed_places + topk

    # 0: the seat, without positions that this step writes
    held = tl.zeros([BLOCK_ROWS], tl.int32)
    for start in range(0, per_seat, BLOCK_ROWS):
        at = start + tl.arange(0, BLOCK_ROWS)
        inside = at < per_seat
        key = tl.load(table_keys + at, mask=inside, other=LAST)
        row = tl.load(table_rows + at, mask=inside, other=0)
        kept = key < context
        held += kept.to(tl.int32)
        tl.store(copy + at, tl.where(kept, key, LAST), mask=inside)
        tl.store(copy + per_seat + at, row, mask=inside)
        tl.store(marks + row, (key >= context).to(tl.int32), mask=inside & is_slot(row, per_seat))
    num_empty = per_seat - tl.sum(held)
    tl.debug_barrier()
    empty_before = 0
    for start in range(0, per_seat, BLOCK_ROWS):
        at = start + tl.arange(0, BLOCK_ROWS)
        inside = at < per_seat
        row = tl.load(table_order + at, mask=inside, other=0)
        place = at
        if num_empty > 0:  # not so in a seat that was filled once
            known = inside & is_slot(row, per_seat)
            empty = (tl.load(marks + row, mask=known, other=0) == 1).to(tl.int32)
            rank_of_empty = empty_before + tl.cumsum(empty) - empty
            place = tl.where(empty == 1, rank_of_empty, num_empty + at - rank_of_empty)
            empty_before += tl.sum(empty)
        tl.store(copy + 2 * per_seat + place, row, mask=inside & is_slot(place, per_seat))

    num_hits, num_misses = 0, 0
    for i in range(num_resolved):
        number = first + i + tl.zeros([], tl.int64)
        listed = indices + number * indices_token
        to = out + number * out_token
        to_slots = miss_slots + number * slots_token
        to_rows = miss_rows + number * miss_rows_token
        keys = copy + i % COPIES * (3 * per_seat)
        rows = keys + per_seat
        order = rows + per_seat
        if COPIES == 1:
            new_keys, new_rows, new_order = table_keys, table_rows, table_order
        else:
            new_keys = copy + (i + 1) % COPIES * (3 * per_seat)
            new_rows = new_keys + per_seat
            new_order = new_rows + per_seat

        # The rank's entries of a list that ascends
        listed_and_wrong = tl.zeros([BLOCK], tl.int64)
        for start in range(0, topk, BLOCK):
            at = start + tl.arange(0, BLOCK)
            position = _named(tl.load(listed + at, mask=at < topk, other=-1), LAST)
            after = _named(tl.load(listed + at + 1, mask=at + 1 < topk, other=-1), LAST)
            wrong = (after >= 0) & ((position < 0) | (position >= after))
            local = _local(position, rank, NUM_RANKS, INTERLEAVE)
            listed_and_wrong += _pair((local >= 0) & (local < capacity), wrong)
        num_listed, num_wrong = _parts(tl.sum(listed_and_wrong))
        if num_wrong > 0:
            num_listed = 0
        if NUM_RANKS > 1:
            owned_before = 0
            for start in range(0, topk, BLOCK):
                at = start + tl.arange(0, BLOCK)
                position = _named(tl.load(listed + at, mask=at < topk, other=-1), LAST)
                local = _local(position, rank, NUM_RANKS, INTERLEAVE)
                owns = ((local >= 0) & (local < capacity)).to(tl.int32)
                place = owned_before + tl.cumsum(owns) - owns
                tl.store(own + place, local, mask=owns == 1)
                owned_before += tl.sum(owns)
        tl.debug_barrier()

        # 1: hits and misses
        misses = 0
        hits_and_new = tl.zeros([BLOCK], tl.int64)  # hits, and misses of this step's own positions
        for start in range(0, num_listed, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < num_listed
            if NUM_RANKS > 1:
                position = tl.load(own + at, mask=inside, other=LAST)
            else:
                position = tl.load(listed + at, mask=inside, other=LAST).to(tl.int32)
            place = smaller_entries(keys, per_seat, position, LAST)
            near = inside & (place < per_seat)
            hit = near & (tl.load(keys + place, mask=near, other=LAST) == position)
            row = tl.load(rows + place, mask=hit, other=0)
            hit &= is_slot(row, per_seat)
            tl.store(marks + row, tl.zeros([BLOCK], tl.int32) + (2 * i + 2), mask=hit)
            page = tl.load(
                page_table + request.to(tl.int64) * table_stride + position // PAGE_SIZE,
                mask=inside & ~hit,
                other=-1,
            )
            slot = slot_of(page.to(tl.int64), position % PAGE_SIZE, PAGE_SIZE)
            missed = (inside & ~hit & (slot >= 0)).to(tl.int32)
            miss = misses + tl.cumsum(missed) - missed
            tl.store(to_slots + miss, slot, mask=missed == 1)
            tl.store(missed_keys + miss, position, mask=missed == 1)
            tl.store(missed_places + miss, place, mask=missed == 1)
            entry = tl.where(hit, row, tl.where(missed == 1, -2 - miss, -1))
            tl.store(found_at + at, entry, mask=inside)
            hits_and_new += _pair(hit, (missed == 1) & (position >= context))
            misses += tl.sum(missed)
        hits, new = _parts(tl.sum(hits_and_new))
        tl.debug_barrier()

        # 2: victims, and the order of the other rows
        others_before = 0
        for start in range(0, per_seat, BLOCK_ROWS):
            at = start + tl.arange(0, BLOCK_ROWS)
            inside = at < per_seat
            row = tl.load(order + at, mask=inside, other=0)
            inside &= is_slot(row, per_seat)
            mark = tl.load(marks + row, mask=inside, other=0)
            other = (inside & (mark != 2 * i + 2)).to(tl.int32)
            miss = others_before + tl.cumsum(other) - other
            victim = (other == 1) & (miss < misses)
            tl.store(victims + miss, row, mask=victim)
            tl.store(marks + row, tl.zeros([BLOCK_ROWS], tl.int32) + (2 * i + 3), mask=victim)
            tl.store(new_order + miss - misses, row, mask=(other == 1) & (miss >= misses))
            others_before += tl.sum(other)
        num_victims = tl.minimum(misses, others_before)
        tl.debug_barrier()

        # 3: results, and the list's rows as the last ones of the order
        last, without_before = others_before - num_victims, 0
        for start in range(0, topk, BLOCK):
            at = start + tl.arange(0, BLOCK)
            entry = tl.load(found_at + at, mask=at < num_listed, other=-1)
            miss = -2 - entry
            row = tl.load(victims + miss, mask=(miss >= 0) & (miss < num_victims), other=-1)
            row = tl.where(entry >= 0, entry, row)
            place = last + at
            if hits + num_victims < num_listed:  # some have no page
                without = ((row < 0) & (at < num_listed)).to(tl.int32)
                place -= without_before + tl.cumsum(without) - without
                without_before += tl.sum(without)
            tl.store(new_order + place, row, mask=(row >= 0) & is_slot(place, per_seat))
            result = tl.where(row >= 0, first_row + row, -1)
            if PARTS == 1:
                tl.store(to + at, result, mask=at < topk)
            else:
                tl.store(found_at + at, result, mask=at < num_listed)
            victim = tl.load(victims + at, mask=at < num_victims, other=-1)
            goes_to = tl.where(victim >= 0, first_row + victim, -1)
            tl.store(to_rows + at, goes_to, mask=at < topk)
            behind_misses = (at >= misses) & (at < topk)
            tl.store(to_slots + at, tl.full([BLOCK], -1, tl.int32), mask=behind_misses)
        to_counts = counts + number * counts_token
        if PARTS == 1:
            tl.store(to_counts, num_listed)
        else:
            tl.debug_barrier()
            for part in tl.static_range(PARTS):
                to_part = to + part * out_part
                part_before = 0
                for start in range(0, num_listed, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    result = tl.load(found_at + at, mask=at < num_listed, other=-1)
                    if NUM_RANKS > 1:
                        position = tl.load(own + at, mask=at < num_listed, other=0)
                    else:
                        position = tl.load(listed + at, mask=at < num_listed, other=0)
                        position = position.to(tl.int32)
                    in_part = (at < num_listed) & (position // INTERLEAVE % PARTS == part)
                    in_part = in_part.to(tl.int32)
                    place = part_before + tl.cumsum(in_part) - in_part
                    tl.store(to_part + place, result, mask=in_part == 1)
                    part_before += tl.sum(in_part)
                for start in range(0, topk, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    rest = (at >= part_before) & (at < topk)
                    tl.store(to_part + at, tl.full([BLOCK], -1, tl.int32), mask=rest)
                tl.store(to_counts + part, part_before)
        tl.store(miss_counts + number, num_victims)
        tl.store(new_counts + number, new)
        num_hits += hits
        num_misses += num_victims

        # 4: keys that stay
        gone_before = 0
        for start in range(0, per_seat, BLOCK_ROWS):
            at = start + tl.arange(0, BLOCK_ROWS)
            inside = at < per_seat
            key = tl.load(keys + at, mask=inside, other=LAST)
            row = tl.load(rows + at, mask=inside, other=0)
            mark = tl.load(marks + row, mask=inside & is_slot(row, per_seat), other=0)
            leaves = (inside & (mark == 2 * i + 3)).to(tl.int32)
            less = gone_before + tl.cumsum(leaves) - leaves
            tl.store(gone + at, less, mask=inside)
            place = at - less + smaller_entries(missed_keys, num_victims, key, LAST)
            stays = inside & (leaves == 0) & is_slot(place, per_seat)
            tl.store(new_keys + place, key, mask=stays)
            tl.store(new_rows + place, row, mask=stays)
            gone_before += tl.sum(leaves)
        tl.debug_barrier()

        # 5: keys that come
        for start in range(0, num_victims, BLOCK):
            at = start + tl.arange(0, BLOCK)
            inside = at < num_victims
            key = tl.load(missed_keys + at, mask=inside, other=0)
            place = tl.load(missed_places + at, mask=inside, other=0)
            less = tl.load(gone + place, mask=inside & (place < per_seat), other=0)
            less = tl.where(place < per_seat, less, gone_before)
            place += at - less
            inside &= is_slot(place, per_seat)
            tl.store(new_keys + place, key, mask=inside)
            tl.store(new_rows + place, tl.load(victims + at, mask=inside, other=0), mask=inside)
        tl.debug_barrier()

    if COPIES > 1:
        for start in range(0, per_seat, BLOCK_ROWS):
            at = start + tl.arange(0, BLOCK_ROWS)
            inside = at < per_seat
            seat_now = copy + num_resolved % COPIES * (3 * per_seat) + at
            tl.store(table_keys + at, tl.load(seat_now, mask=inside), mask=inside)
            tl.store(table_rows + at, tl.load(seat_now + per_seat, mask=inside), mask=inside)
            tl.store(table_order + at, tl.load(seat_now + 2 * per_seat, mask=inside), mask=inside)
    if stats is not None:
        # Sums of integers do not depend on the order of the programs.
        tl.atomic_add(stats, tl.cast(num_hits, tl.int64), sem="relaxed")
        tl.atomic_add(stats + 1, tl.cast(num_misses, tl.int64), sem="relaxed")


def resolve_rows(call: ResolveRows) -> None:
    table, shard, page_table, out = call.table, call.shard, call.page_table, call.out
    num_tokens, topk = call.topk_indices.shape
    num_requests = call.seats.shape[0]
    per_seat = table.rows_per_seat
    num_parts = out.shape[1] if out.dim() == 3 else 1
    workspace = call.workspace
    if workspace is None:
        size = workspace_bytes(num_requests, topk, per_seat, call.max_query_len)
        workspace = torch.empty(size, dtype=torch.uint8, device=out.device)
    block_rows = min(next_power_of_2(per_seat), BLOCK)
    block = min(next_power_of_2(max(topk, 1)), BLOCK)
    _resolve_kernel[(max(num_requests, 1),)](
        call.topk_indices,
        call.topk_indices.stride(0),
        call.input_row_offsets,
        call.seq_lens,
        call.seats,
        page_table,
        page_table.shape[1],
        page_table.stride(0),
        table.keys,
        table.keys.stride(0),
        table.rows,
        table.rows.stride(0),
        table.order,
        table.order.stride(0),
        out,
        out.stride(0),
        out.stride(1) if num_parts > 1 else 0,
        call.counts,
        call.counts.stride(0),
        call.miss_slots,
        call.miss_slots.stride(0),
        call.miss_rows,
        call.miss_rows.stride(0),
        call.miss_counts,
        call.new_counts,
        call.stats,
        workspace.view(torch.int32),
        num_tokens,
        num_requests,
        table.num_seats,
        topk,
        per_seat,
        call.max_query_len,
        0 if shard is None else shard.rank,
        PAGE_SIZE=call.page_size,
        NUM_RANKS=1 if shard is None else shard.num_ranks,
        INTERLEAVE=1 if shard is None else shard.interleave,
        PARTS=num_parts,
        COPIES=min(call.max_query_len, 2),
        BLOCK_ROWS=block_rows,
        BLOCK=block,
        LAST=EMPTY,
        num_warps=16 if max(block_rows, block) >= 2048 else 4,
    )


class Region(NamedTuple):
    """Bytes of rows in two caches, and the constants that the kernel is compiled for.

    ``unit`` bytes are copied at a time; strides are in bytes, the width in units.
    """

    unit: int
    width: int
    block: int
    source_page: int
    source_row: int
    target_row: int


@triton.jit
def _copy(source, target, page, offset, row, valid, inside, REGION: tl.constexpr):
    """Copy a region of rows; zeros where the source is not valid."""
    unit = tl.arange(0, REGION.block)[None, :]
    at = source + (page * REGION.source_page + offset * REGION.source_row)[:, None]
    to = target + (row * REGION.target_row)[:, None]
    if REGION.unit == 8:
        at = at.to(tl.pointer_type(tl.int64), bitcast=True)
        to = to.to(tl.pointer_type(tl.int64), bitcast=True)
    elif REGION.unit == 4:
        at = at.to(tl.pointer_type(tl.int32), bitcast=True)
        to = to.to(tl.pointer_type(tl.int32), bitcast=True)
    elif REGION.unit == 2:
        at = at.to(tl.pointer_type(tl.int16), bitcast=True)
        to = to.to(tl.pointer_type(tl.int16), bitcast=True)
    within = unit < REGION.width
    bits = tl.load(at + unit, mask=valid[:, None] & within, other=0, eviction_policy="evict_first")
    tl.store(to + unit, bits, mask=inside[:, None] & within)


@triton.jit(
    do_not_specialize=["slots_token", "rows_token", "num_tokens", "topk", "num_slots", "num_rows"],
    do_not_specialize_on_alignment=["slots", "rows", "counts"],
)
def _fetch_kernel(
    slots,
    slots_token,
    rows,
    rows_token,
    counts,
    source,
    target,
    source_scales,
    target_scales,
    num_tokens,
    topk,
    num_slots,
    num_rows,
    PAGE_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    for first in range(0, num_tokens, TOKENS):
        token = first + tl.arange(0, TOKENS)
        count = tl.load(counts + token, mask=token < num_tokens, other=0)
        count = tl.minimum(tl.maximum(count, 0), topk).to(tl.int64)
        ends = tl.cumsum(count)
        total = tl.sum(count)
        for start in range(tl.program_id(0) * ROWS, total, tl.num_programs(0) * ROWS):
            number = start + tl.arange(0, ROWS)
            ended = ends[None, :] <= number[:, None]
            of_token = tl.sum(ended.to(tl.int32), axis=1) + tl.zeros([ROWS], tl.int64) + first
            column = number - tl.sum(tl.where(ended, count[None, :], 0), axis=1)
            listed = number < total
            slot = tl.load(slots + of_token * slots_token + column, mask=listed, other=-1)
            row = tl.load(rows + of_token * rows_token + column, mask=listed, other=-1)
            inside = listed & is_slot(row, num_rows)
            valid = inside & is_slot(slot, num_slots)
            slot, row = slot.to(tl.int64), row.to(tl.int64)
            page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
            _copy(source, target, page, offset, row, valid, inside, ROW)
            if source_scales is not None:
                _copy(source_scales, target_scales, page, offset, row, valid, inside, SCALES)


def fetch_rows(call: FetchRows) -> None:
    slots, rows, source, target = call.miss_slots, call.miss_rows, call.source, call.target
    num_tokens, topk = slots.shape
    if slots.numel() == 0:
        return
    sources, targets = source.stored_bytes(), target.stored_bytes()
    regions = [_region_of(*pair) for pair in zip(sources, targets, strict=True)]
    _fetch_kernel[(min(PROGRAMS, cdiv(num_tokens * topk, ROWS)),)](
        slots,
        slots.stride(0),
        rows,
        rows.stride(0),
        call.miss_counts,
        sources[0],
        targets[0],
        sources[1] if len(sources) > 1 else None,
        targets[1] if len(sources) > 1 else None,
        num_tokens,
        topk,
        source.num_slots,
        target.num_slots,
        PAGE_SIZE=source.page_size,
        ROW=regions[0],
        SCALES=regions[-1],
        ROWS=ROWS,
        TOKENS=TOKENS,
        num_warps=4,
    )


def _region_of(source: Tensor, target: Tensor) -> Region:
    """How bytes ``[pages, page_size, n]`` are copied to ``[rows, 1, n]``."""
    return _region(
        source.shape[-1],
        *source.stride()[:2],
        target.stride(0),
        misalignment(source),
        misalignment(target),
    )


@functools.lru_cache(4096)
def _region(width: int, page: int, row: int, target_row: int, *starts: int) -> Region:
    numbers = (width, page, row, target_row, *starts)
    unit = next(unit for unit in (8, 4, 2, 1) if all(n % unit == 0 for n in numbers))
    return Region(unit, width // unit, next_power_of_2(width // unit), page, row, target_row)


@triton.jit(
    do_not_specialize=["keys_seat", "rows_seat", "order_seat", "num_seats", "per_seat"],
    do_not_specialize_on_alignment=["seats", "keys", "rows", "order"],
)
def _forget_kernel(
    seats,
    keys,
    keys_seat,
    rows,
    rows_seat,
    order,
    order_seat,
    num_seats,
    per_seat,
    LAST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    seat = tl.load(seats + tl.program_id(0)).to(tl.int64)
    if (seat >= 0) & (seat < num_seats):
        row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = row < per_seat
        tl.store(keys + seat * keys_seat + row, tl.full([BLOCK], LAST, tl.int32), mask=inside)
        tl.store(rows + seat * rows_seat + row, row, mask=inside)
        tl.store(order + seat * order_seat + row, row, mask=inside)


def forget_seats(call: ForgetSeats) -> None:
    table, seats = call.table, call.seats
    if seats.shape[0] == 0:
        return
    _forget_kernel[(seats.shape[0], cdiv(table.rows_per_seat, FORGOTTEN))](
        seats,
        table.keys,
        table.keys.stride(0),
        table.rows,
        table.rows.stride(0),
        table.order,
        table.order.stride(0),
        table.num_seats,
        table.rows_per_seat,
        LAST=EMPTY,
        BLOCK=FORGOTTEN,
        num_warps=4,
    )

"""Exact, deterministic top-k of long rows, in one pass over memory for most rows.

1. From a sample of the row, estimate a threshold that slightly more than k columns should reach.
2. One pass over the row appends the columns that reach it, with their values, to lists of
   candidates. Each warp has its own part of the row and its own list, so no warp waits for another.
3. A search in registers finds the k-th largest of the candidates, at most ``capacity`` of them.

A threshold consists of a value and a column: a score equal to the value reaches the threshold only
if it lies left of the column. This cuts plateaus of equal scores as well. If too few or too many
columns reach the threshold, counting passes over the row improve it until the candidates fit. If
they never fit, the passes end at the k-th largest value itself, and its first occurrences are read
directly from the row.

Every output position is a prefix sum in column order. So ids ascend, ties go to the lower column,
and the results of all runs are bit-equal. Scores are compared as int32 keys in the order of the
floats; -0 equals +0, and NaN lies below -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemla.kernels.common.device import num_multiprocessors, register_limit
from sparsemla.kernels.common.slots import slot_of
from sparsemla.kernels.topk.arguments import MergeTopk, SelectTopk
from sparsemla.kernels.topk.cpu import sort_and_select

DEAD_KEY = tl.constexpr(-(1 << 31))
"""Key of an element without a score."""
NAN_KEY = tl.constexpr(-(1 << 31) + 1)
MINUS_INF_KEY = tl.constexpr(-(1 << 31) + 0x7FFFFF)
END_KEY = tl.constexpr(0x7F800001)
"""One above the key of +inf."""
SIGMAS = tl.constexpr(3.0)
"""Standard deviations between a threshold's rank and both limits of a list's length."""


class Pages(NamedTuple):
    """The page table that turns positions into slots; without one, positions are the output."""

    table: Tensor | None
    request_ids: Tensor | None
    num_requests: int
    width: int
    stride: int


NO_PAGES = Pages(None, None, 0, 0, 0)


def pages_of(page_table: Tensor | None, request_ids: Tensor | None) -> Pages:
    """The page table of a selection; its row r belongs to request ``request_ids[r]``."""
    if page_table is None or request_ids is None:
        return NO_PAGES
    return Pages(page_table, request_ids, *page_table.shape, page_table.stride(0))


@triton.jit
def ordered_bits(x):
    """The bits of float32 ``x`` as int32 in the order of the floats."""
    bits = x.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def keys_of(x):
    """int32 keys in the order of float32 ``x``; -0 equals +0, and NaN lies below -inf."""
    return tl.where(x != x, NAN_KEY, ordered_bits(tl.where(x == 0.0, 0.0, x)))


@triton.jit
def value_of_key(key):
    """The float32 of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def row_range(row_starts, row_ends, row, num_cols):
    """The columns of a row; the end is never below the start."""
    start = num_cols * 0
    end = num_cols
    if row_starts is not None:
        start = tl.minimum(tl.maximum(tl.load(row_starts + row), 0), num_cols).to(tl.int32)
    if row_ends is not None:
        end = tl.minimum(tl.maximum(tl.load(row_ends + row), start), num_cols).to(tl.int32)
    return start, end


@triton.constexpr_function
def _log2(n):
    return n.bit_length() - 1


@triton.jit
def as_output(ids, mask, pages, row, PAGE_SIZE: tl.constexpr):
    """The output for positions: the positions themselves, or their slots."""
    if PAGE_SIZE > 0:
        request = tl.load(pages.request_ids + row).to(tl.int64)
        width = tl.where((request >= 0) & (request < pages.num_requests), pages.width, 0)
        column = ids // PAGE_SIZE
        at = pages.table + request * pages.stride + column
        page = tl.load(at, mask=mask & (column < width), other=-1).to(tl.int64)
        ids = slot_of(page, ids % PAGE_SIZE, PAGE_SIZE)
    return ids


@triton.jit
def _columns_to_alignment(x):
    """Number of values before the next address aligned for a load of four."""
    SIZE: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    return ((4 * SIZE - x.to(tl.int64) % (4 * SIZE)) % (4 * SIZE)).to(tl.int32) // SIZE


@triton.jit
def _load(x, size, ids):
    """float32 values of a row; NaN from ``size`` on."""
    return tl.load(x + ids, mask=ids < size, other=float("nan")).to(tl.float32)


@triton.jit
def _search_threshold(key, klo, khi, clo, low, up):
    """A key that ``low`` to ``up`` of the block's keys reach, else the largest that ``low`` reach.

    ``clo >= low`` keys reach ``klo``, and fewer than ``low`` reach ``khi``. Each iteration counts
    the keys at one and two thirds of the interval. Returns the key, the number of keys that reach
    it, and the number that reach the next larger key tried. The last number counts the keys above
    the returned key if more than ``up`` keys reach the returned key, or if ``low == up``.
    """
    chi = clo * 0
    while (klo + 1 < khi) & (clo > up):
        third = tl.maximum((khi - klo).to(tl.uint32) // 3, 1).to(tl.int32)
        a = klo + third
        b = a + third
        both = tl.sum((key >= a).to(tl.int32) + ((key >= b).to(tl.int32) << 16), 0)
        ca = both & 0xFFFF
        cb = both >> 16
        khi = tl.where(cb >= low, khi, tl.where(ca >= low, b, a))
        chi = tl.where(cb >= low, chi, tl.where(ca >= low, cb, ca))
        klo = tl.where(cb >= low, b, tl.where(ca >= low, a, klo))
        clo = tl.where(cb >= low, cb, tl.where(ca >= low, ca, clo))
    return klo, clo, chi


@triton.jit
def _estimate_threshold(x, size, k, factor, CAPACITY: tl.constexpr, SAMPLE: tl.constexpr):
    """A threshold (key, column) that most likely between k and CAPACITY columns reach.

    ``factor``: 1 at first, then the factor by which the number of candidates should change.
    """
    CHUNKS: tl.constexpr = SAMPLE // 8
    chunk = tl.arange(0, CHUNKS)
    # Eight neighbours, a memory sector, from each of CHUNKS equal parts of the row, at irregular
    # offsets: rows may be periodic.
    room = tl.minimum(tl.maximum(size // CHUNKS - 8, 0), 0x7FFF)
    jitter = (chunk * 40503 & 0xFFFF) * room >> 16
    at = (chunk.to(tl.int64) * size // CHUNKS).to(tl.int32) + jitter
    SIZE: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    shift = (x.to(tl.int64) % (8 * SIZE)).to(tl.int32) // SIZE
    ids = ((at + shift) // 8 * 8 - shift)[:, None] + tl.arange(0, 8)[None, :]
    values = tl.load(x + ids, mask=(ids >= 0) & (ids < size), other=0.0)
    ids = tl.reshape(ids, [SAMPLE])
    key = keys_of(tl.reshape(values, [SAMPLE]).to(tl.float32))
    key = tl.where((ids >= 0) & (ids < size), key, DEAD_KEY)
    ratio = SAMPLE / size.to(tl.float32)
    mean = k * ratio
    # Ranks in the sample with a margin to both k and CAPACITY; the middle if there is no room.
    low = mean + tl.sqrt(mean) * SIGMAS + 2.0
    root = (tl.sqrt(ratio * (4 * CAPACITY) + SIGMAS * SIGMAS) - SIGMAS) * 0.5
    low = tl.minimum(tl.minimum(low, 0.5 * (low + root * root)) * factor, SAMPLE * 1.0)
    up = tl.maximum(low, tl.minimum(low * 1.2 + 4.0, root * root)).to(tl.int32)
    low = tl.maximum(low, 1.0).to(tl.int32)
    key_end = tl.max(key, 0) + 1
    dead = tl.full([], DEAD_KEY, tl.int32)
    threshold, reached, above = _search_threshold(key, dead, key_end, low * 0 + SAMPLE, low, up)
    column = size
    if reached > up:  # a plateau; the sample is in column order
        equal = key == threshold
        rank = tl.cumsum(equal.to(tl.int32), 0)
        column = tl.min(tl.where(equal & (rank >= low - above), ids + 1, size), 0)
    return tl.maximum(threshold, MINUS_INF_KEY), column


@triton.jit
def _load_quads(x, at, group, end):
    """Four neighbours per thread, NaN for groups from ``end`` on; ``end`` cuts no group."""
    return tl.load(x + at, mask=group < end, other=float("nan"))


@triton.jit
def _split_quads(x):
    """The first, second, third and fourth neighbour of each thread, in float32."""
    THREADS: tl.constexpr = x.shape[0] // 4
    even, odd = tl.split(tl.reshape(x.to(tl.float32), [THREADS, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _pack(a, b, c, d):
    """Four flags in one int32, one per byte."""
    low = a.to(tl.int32) + (b.to(tl.int32) << 8)
    return low + (c.to(tl.int32) << 16) + (d.to(tl.int32) << 24)


@triton.jit
def _append(at, x, ids, mask):
    entry = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | ids
    tl.store(at, entry, mask=mask)


@triton.jit
def _append_edge(x, lists, count, limit, value, ids, mask, WARPS: tl.constexpr):
    """Append the columns ``ids`` of a few threads that reach ``value``; returns the new lengths."""
    LANES: tl.constexpr = ids.shape[0] // WARPS
    values = tl.load(x + ids, mask=mask, other=float("nan")).to(tl.float32)
    hits = tl.reshape((values >= value).to(tl.int32), [WARPS, LANES])
    before = tl.reshape(tl.cumsum(hits, 1) - hits, [WARPS * LANES])
    _append(lists + (tl.minimum(count, limit) + before), values, ids, values >= value)
    added = tl.broadcast_to(tl.sum(hits, 1)[:, None], [WARPS, LANES])
    return count + tl.reshape(added, [WARPS * LANES])


@triton.jit
def _collect_candidates(
    x,
    lists,
    limit,
    size,
    key,
    column,
    index,
    slices,
    WARPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Append (value bits, id) of the columns of a slice that reach a threshold, in column order.

    Each warp has its own part of the slice and its own list, so warps do not wait for each other.
    Returns the number of candidates of each part. A list is complete only if it has at most
    ``limit`` entries; up to a tile after the limit may be overwritten.
    """
    THREADS: tl.constexpr = WARPS * LANES
    PLANE: tl.constexpr = 4 * LANES  # columns of one load of a warp, four neighbours per lane
    TILE: tl.constexpr = 4 * PLANE
    tl.static_assert(PLANE < 256)
    key = tl.maximum(key, MINUS_INF_KEY)  # lower keys belong to NaN
    value = value_of_key(key)
    over = value_of_key(key + 1)
    # Aligned groups of four; the few columns before and after them are handled separately.
    head = tl.minimum(_columns_to_alignment(x), size)
    groups = x + head
    end = (size - head) // 4 * 4
    groups = tl.multiple_of(groups, 4 * x.dtype.element_ty.primitive_bitwidth // 8)
    share = tl.cdiv(end, slices * (WARPS * TILE)) * TILE
    i = tl.arange(0, 4 * THREADS)
    at = (index * WARPS + i // PLANE) * share + i % PLANE
    group = (index * WARPS + i // PLANE) * share + i // 4 * 4 % PLANE
    thread = tl.arange(0, THREADS)
    warp = thread // LANES
    part = index * WARPS + warp
    lane = thread % LANES
    begin = part * share + head
    ids = begin + lane * 4
    lists += warp * (limit + TILE)
    count = thread * 0
    first = (part == 0) & (lane < head)
    count = _append_edge(x, lists, count, limit, value, lane, first, WARPS)
    a = _load_quads(groups, at, group, end)
    b = _load_quads(groups, at + PLANE, group + PLANE, end)
    c = _load_quads(groups, at + 2 * PLANE, group + 2 * PLANE, end)
    d = _load_quads(groups, at + 3 * PLANE, group + 3 * PLANE, end)
    stop = end
    for base in range(TILE, share + TILE, TILE):
        # Prefetch the next tile, if there is one.
        stop = tl.where(base < share, end, 0)
        at += TILE
        group += TILE
        next_a = _load_quads(groups, at, group, stop)
        next_b = _load_quads(groups, at + PLANE, group + PLANE, stop)
        next_c = _load_quads(groups, at + 2 * PLANE, group + 2 * PLANE, stop)
        next_d = _load_quads(groups, at + 3 * PLANE, group + 3 * PLANE, stop)
        left = column - begin
        value_a = tl.where(left > 0, value, over)
        value_b = tl.where(left > PLANE, value, over)
        value_c = tl.where(left > 2 * PLANE, value, over)
        value_d = tl.where(left > 3 * PLANE, value, over)
        xa = _split_quads(a)
        xb = _split_quads(b)
        xc = _split_quads(c)
        xd = _split_quads(d)
        # One prefix sum for all four planes, one byte each.
        hits_0 = _pack(xa[0] >= value_a, xb[0] >= value_b, xc[0] >= value_c, xd[0] >= value_d)
        hits_1 = _pack(xa[1] >= value_a, xb[1] >= value_b, xc[1] >= value_c, xd[1] >= value_d)
        hits_2 = _pack(xa[2] >= value_a, xb[2] >= value_b, xc[2] >= value_c, xd[2] >= value_d)
        hits_3 = _pack(xa[3] >= value_a, xb[3] >= value_b, xc[3] >= value_c, xd[3] >= value_d)
        hits = (hits_0 + hits_1) + (hits_2 + hits_3)
        of_warp = tl.reshape(hits, [WARPS, LANES])
        total = tl.broadcast_to(tl.sum(of_warp, 1)[:, None], [WARPS, LANES])
        total = tl.reshape(total, [THREADS])
        before_0 = tl.reshape(tl.cumsum(of_warp, 1), [THREADS]) - hits
        before_1 = before_0 + hits_0
        before_2 = before_1 + hits_1
        before_3 = before_2 + hits_2
        before = (before_0, before_1, before_2, before_3)
        in_a = total & 0xFF
        in_b = in_a + (total >> 8 & 0xFF)
        in_c = in_b + (total >> 16 & 0xFF)
        added = in_c + (total >> 24 & 0xFF)
        # Once a list is full, tiles are written after its limit and never read.
        to_a = tl.where(count + added <= limit, count, limit)
        to_b = to_a + in_a
        to_c = to_a + in_b
        to_d = to_a + in_c
        # The condition is never true. It hides from the compiler that the thresholds are the same
        # as above, because a second comparison is cheaper than keeping sixteen predicates.
        value_a = tl.where(limit < 0, 0.0, value_a)
        value_b = tl.where(limit < 0, 0.0, value_b)
        value_c = tl.where(limit < 0, 0.0, value_c)
        value_d = tl.where(limit < 0, 0.0, value_d)
        for v in tl.static_range(4):
            at_a = lists + (to_a + (before[v] & 0xFF))
            at_b = lists + (to_b + (before[v] >> 8 & 0xFF))
            at_c = lists + (to_c + (before[v] >> 16 & 0xFF))
            at_d = lists + (to_d + (before[v] >> 24 & 0xFF))
            _append(at_a, xa[v], ids + v, xa[v] >= value_a)
            _append(at_b, xb[v], ids + (PLANE + v), xb[v] >= value_b)
            _append(at_c, xc[v], ids + (2 * PLANE + v), xc[v] >= value_c)
            _append(at_d, xd[v], ids + (3 * PLANE + v), xd[v] >= value_d)
        count += added
        ids += TILE
        begin += TILE
        a = next_a
        b = next_b
        c = next_c
        d = next_d
    last = (part == slices * WARPS - 1) & (head + end + lane < size)
    last_value = tl.where(column > head + end, value, over)
    count = _append_edge(x, lists, count, limit, last_value, head + end + lane, last, WARPS)
    return tl.max(tl.reshape(count, [WARPS, LANES]), 1)


@triton.jit
def _exact_threshold(x, size, k, CAPACITY: tl.constexpr):
    """A threshold for arbitrary rows, by counting passes over the row.

    Returns (key, columns that reach it, columns that reach the next key). The first count lies in
    [k, CAPACITY]; if no key has such a count, the threshold is the k-th largest key.
    """
    klo = size * 0 + NAN_KEY
    clo = size
    khi = size * 0 + END_KEY
    chi = size * 0
    # Eight rows of lanes: each thread adds up several counts before the reduction.
    LANES: tl.constexpr = CAPACITY // 16
    lane = tl.arange(0, 8)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    while (klo + 1 < khi) & (clo > CAPACITY):
        span = khi.to(tl.int64) - klo
        a = klo + 1  # one pass is enough for a plateau of equal values at the threshold
        b = (klo + tl.maximum(span // 3, 1)).to(tl.int32)
        c = (klo + tl.maximum(2 * span // 3, 1)).to(tl.int32)
        counts_a = tl.zeros([LANES], tl.int32)
        counts_b = tl.zeros([LANES], tl.int32)
        counts_c = tl.zeros([LANES], tl.int32)
        values = _load(x, size, lane)
        for base in range(0, size, 8 * LANES):
            next_values = _load(x, size, base + 8 * LANES + lane)
            keys = tl.where(base + lane < size, keys_of(values), DEAD_KEY)
            counts_a += tl.sum((keys >= a).to(tl.int32), 0)
            counts_b += tl.sum((keys >= b).to(tl.int32), 0)
            counts_c += tl.sum((keys >= c).to(tl.int32), 0)
            values = next_values
        ca = tl.sum(counts_a, 0)
        cb = tl.sum(counts_b, 0)
        cc = tl.sum(counts_c, 0)
        # In descending order of keys: c, b, a.
        khi = tl.where(cc >= k, khi, tl.where(cb >= k, c, tl.where(ca >= k, b, a)))
        chi = tl.where(cc >= k, chi, tl.where(cb >= k, cc, tl.where(ca >= k, cb, ca)))
        klo = tl.where(cc >= k, c, tl.where(cb >= k, b, tl.where(ca >= k, a, klo)))
        clo = tl.where(cc >= k, cc, tl.where(cb >= k, cb, tl.where(ca >= k, ca, clo)))
    return klo, clo, chi


@triton.jit
def _store_chosen(
    out, ids, key, threshold, above, level, ties, pages, row, PAGE_SIZE: tl.constexpr
):
    """Store the ids of keys above the threshold, and of the first ``ties`` keys equal to it.

    ``above`` and ``level`` count both kinds in earlier blocks. Returns both counts with this block.
    """
    over = key > threshold
    equal = key == threshold
    both = over.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    equal_before = level + (before >> 16)
    place = above + (before & 0xFFFF) + tl.minimum(equal_before, ties)
    chosen = over | (equal & (equal_before < ties))
    tl.store(out + place, as_output(ids, chosen, pages, row, PAGE_SIZE), mask=chosen)
    total = tl.sum(both, 0)
    return above + (total & 0xFFFF), level + (total >> 16)


@triton.jit
def _store_short_row(out, size, k, pages, row, BLOCK: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Store all ids of a row of at most k columns, then -1."""
    for base in range(0, k, BLOCK):
        ids = base + tl.arange(0, BLOCK)
        named = as_output(ids, ids < size, pages, row, PAGE_SIZE)
        tl.store(out + ids, tl.where(ids < size, named, -1), mask=ids < k)


@triton.jit
def _select_row(
    x,
    out,
    lists,
    counts,
    limit,
    size,
    k,
    pages,
    row,
    MUST_COLLECT: tl.constexpr,
    LISTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    WARPS: tl.constexpr,
    LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Store the ids of a row of more than k columns.

    A row of more than CAPACITY columns has LISTS lists of candidates, of lengths ``counts``; with
    MUST_COLLECT they are yet to be collected. Lists with too many or too few entries are collected
    once more, by this program alone.
    """
    exact = size < 0  # false, as a value
    count = size
    key = size * 0
    above = size * 0
    pitch = limit + 16 * LANES
    if size > CAPACITY:
        which = tl.arange(0, LISTS)
        tries = size * 0
        count = size * 0
        if not MUST_COLLECT:
            tries += 1
            count = tl.sum(tl.load(counts + which), 0)
        while ((count < k) | (count > CAPACITY)) & (not exact):
            column = size
            if tries < 2:
                middle = 0.5 * (k + CAPACITY)
                factor = tl.where(tries == 0, 1.0, middle / tl.maximum(count, 1).to(tl.float32))
                key, column = _estimate_threshold(x, size, k, factor, CAPACITY, SAMPLE)
            else:
                key, reached, above = _exact_threshold(x, size, k, CAPACITY)
                exact = reached > CAPACITY
            tries += 1
            if not exact:
                tl.debug_barrier()  # the lengths have been read
                pitch = (limit + 16 * LANES) * LISTS // WARPS
                room = pitch - 16 * LANES
                lengths = _collect_candidates(x, lists, room, size, key, column, 0, 1, WARPS, LANES)
                tl.store(counts + tl.arange(0, WARPS), lengths)
                tl.store(counts + which, 0, mask=which >= WARPS)
                tl.debug_barrier()
                count = tl.sum(tl.load(counts + which), 0)
        if exact:
            HALF: tl.constexpr = CAPACITY // 2
            lane = tl.arange(0, HALF)
            over = above * 0
            level = above * 0
            values = _load(x, size, lane)
            for base in range(0, size, HALF):
                next_values = _load(x, size, base + HALF + lane)
                ids = base + lane
                keys = tl.where(ids < size, keys_of(values), DEAD_KEY)
                over, level = _store_chosen(
                    out, ids, keys, key, over, level, k - above, pages, row, PAGE_SIZE
                )
                values = next_values
        else:
            # First index of each list among all entries.
            lengths = tl.load(counts + which)
            tl.store(counts + LISTS + which, tl.cumsum(lengths, 0) - lengths)
            tl.debug_barrier()
    if not exact:
        j = tl.arange(0, CAPACITY)
        if size <= CAPACITY:
            ids = j
            values = tl.load(x + j, mask=j < size, other=0.0).to(tl.float32)
        else:
            # Binary search: an entry belongs to the last list that begins at or before it.
            owner = j * 0
            for i in tl.static_range(_log2(LISTS)):
                half = LISTS >> (i + 1)
                begins = tl.load(counts + LISTS + half + owner)
                owner += tl.where(begins <= j, half, 0)
            source = owner * pitch + j - tl.load(counts + LISTS + owner)
            entry = tl.load(lists + source, mask=j < count, other=0).to(tl.int64)
            ids = entry.to(tl.int32)
            values = (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        keys = tl.where(j < count, keys_of(values), DEAD_KEY)
        lowest = tl.min(tl.where(keys == DEAD_KEY, END_KEY, keys), 0)
        threshold, _, above = _search_threshold(keys, lowest, tl.max(keys, 0) + 1, count, k, k)
        _store_chosen(
            out, ids, keys, threshold, above * 0, above * 0, k - above, pages, row, PAGE_SIZE
        )


# Arguments are not specialised: one compiled kernel serves all shapes.
RUNTIME = (
    "num_rows",
    "num_cols",
    "k",
    "limit",
    "slices",
    "stride_scores",
    "stride_out",
    *Pages._fields,
)


@triton.jit(do_not_specialize=RUNTIME)
def _collect_kernel(
    scores,
    lists,
    counts,
    row_starts,
    row_ends,
    num_cols,
    k,
    limit,
    slices,
    stride_scores,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    WARPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Collect the candidates of one slice of a row."""
    TILE: tl.constexpr = 16 * LANES
    row = tl.program_id(0).to(tl.int64) // slices
    index = tl.program_id(0) % slices
    start, end = row_range(row_starts, row_ends, row, num_cols)
    size = end - start
    if (size > k) & (size > CAPACITY):
        x = scores + row * stride_scores + start
        # All slices of a row compute the same threshold.
        key, column = _estimate_threshold(x, size, k, 1.0, CAPACITY, SAMPLE)
        lists += tl.program_id(0).to(tl.int64) * WARPS * (limit + TILE)
        lengths = _collect_candidates(
            x, lists, limit, size, key, column, index, slices, WARPS, LANES
        )
        counts += (row * (2 * slices) + index) * WARPS
        tl.store(counts + tl.arange(0, WARPS), lengths)


@triton.jit(do_not_specialize=RUNTIME)
def _finish_kernel(
    scores,
    out,
    lists,
    counts,
    row_starts,
    row_ends,
    num_cols,
    k,
    limit,
    stride_scores,
    stride_out,
    table,
    request_ids,
    num_requests,
    width,
    stride,
    LISTS: tl.constexpr,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    WARPS: tl.constexpr,
    LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Select the ids of one row from the candidates of its slices."""
    pages = Pages(table, request_ids, num_requests, width, stride)
    row = tl.program_id(0).to(tl.int64)
    out += row * stride_out
    start, end = row_range(row_starts, row_ends, row, num_cols)
    size = end - start
    if size <= k:
        _store_short_row(out, size, k, pages, row, 32 * WARPS, PAGE_SIZE)
    else:
        _select_row(
            scores + row * stride_scores + start,
            out,
            lists + row * LISTS * (limit + 16 * LANES),
            counts + row * (2 * LISTS),
            limit,
            size,
            k,
            pages,
            row,
            False,
            LISTS,
            CAPACITY,
            SAMPLE,
            WARPS,
            LANES,
            PAGE_SIZE,
        )


@triton.jit(do_not_specialize=RUNTIME)
def _select_kernel(
    scores,
    out,
    lists,
    counts,
    row_starts,
    row_ends,
    num_rows,
    num_cols,
    k,
    limit,
    stride_scores,
    stride_out,
    table,
    request_ids,
    num_requests,
    width,
    stride,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    WARPS: tl.constexpr,
    LANES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Select the ids of whole rows, one after the other; their lists share the same memory."""
    pages = Pages(table, request_ids, num_requests, width, stride)
    lists += tl.program_id(0).to(tl.int64) * WARPS * (limit + 16 * LANES)
    counts += tl.program_id(0) * (2 * WARPS)
    for index in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.full([], 0, tl.int64) + index
        start, end = row_range(row_starts, row_ends, row, num_cols)
        size = end - start
        if size <= k:
            _store_short_row(out + row * stride_out, size, k, pages, row, 32 * WARPS, PAGE_SIZE)
        else:
            _select_row(
                scores + row * stride_scores + start,
                out + row * stride_out,
                lists,
                counts,
                limit,
                size,
                k,
                pages,
                row,
                True,
                WARPS,
                CAPACITY,
                SAMPLE,
                WARPS,
                LANES,
                PAGE_SIZE,
            )
            tl.debug_barrier()  # the lists have been read


@dataclass(frozen=True)
class ListSchedule:
    """The distribution of a selection by lists of candidates over the device.

    Args:
        slices: programs that share the pass over a row, a power of two. A row of one slice is
            collected and finished by the same program.
        capacity: most candidates of a row, a power of two.
        sample: values in the sample that yields a row's threshold, a power of two.
        programs: rows in progress at a time.
        num_warps: warps of a collecting program, each with its own list.
        finish_warps: warps of the program that finishes a row of several slices.
        registers: bound on the registers of a thread; without it NVIDIA's compiler wastes some.
        lanes: threads of a warp.
    """

    slices: int
    capacity: int
    sample: int
    programs: int
    num_warps: int = 8
    finish_warps: int = 8
    registers: int = 128
    lanes: int = 32

    @property
    def constants(self) -> dict[str, int]:
        """Constants that all kernels share."""
        return {"CAPACITY": self.capacity, "SAMPLE": self.sample, "LANES": self.lanes}

    @property
    def collect_options(self) -> dict[str, Any]:
        """Launch options of the kernel that collects a slice."""
        return register_limit(self.registers)

    @property
    def finish_options(self) -> dict[str, Any]:
        """Launch options of the kernel that finishes a row of several slices."""
        return {}

    @property
    def tile(self) -> int:
        """Columns of one iteration of a warp; a list has room for a tile after its limit."""
        return 16 * self.lanes

    @property
    def num_lists(self) -> int:
        """Lists of a row."""
        return self.slices * self.num_warps

    def limit(self, num_cols: int) -> int:
        """Entries of a list: the capacity of the row, or all columns of the list's part."""
        part = triton.cdiv(num_cols, self.tile * self.num_lists) * self.tile + 8
        return min(self.capacity, part)

    def list_bytes(self, num_cols: int) -> int:
        """Bytes of all lists and lengths; none for rows of at most ``capacity`` columns."""
        if num_cols <= self.capacity:
            return 0
        entries = self.limit(num_cols) + self.tile
        return self.programs * self.num_lists * (8 * entries + 8)


LIST_BYTES = 149 << 20
"""Bound on the bytes of all lists at a time; more rows are processed in chunks. 264 rows fit, the
number that an H200 processes at a time."""


AnySchedule = TypeVar("AnySchedule", bound=ListSchedule)
Scheduler = Callable[[int, int, int, torch.device], ListSchedule]
"""Maps ``(num_rows, num_cols, topk, device)`` to the schedule of a selection."""


def schedule_lists(num_rows: int, num_cols: int, topk: int, device: torch.device) -> ListSchedule:
    """The schedule for rows of this size; it depends on shapes only."""
    # Twice k candidates leave room for the error of the sample. Registers hold 8192; for a
    # larger k, counting passes find the exact threshold of every row.
    long = num_cols > 1 << 17 and topk > 512
    capacity = min(8192, max(2048, triton.next_power_of_2(2 * topk)))
    capacity = 8192 if long else capacity
    sample = min(max(triton.next_power_of_2(num_cols) // 32, 1024), 8192 if long else 4096)
    # Sixteen warps per multiprocessor hide the latency of memory.
    processors = num_multiprocessors(device)
    slices = min(64, 4 * processors // max(num_rows, 1), num_cols // 4096)
    slices = 1 << (max(slices, 1).bit_length() - 1)
    if slices > 1:
        finish_warps = max(4, capacity // 512)
        # Lists that are collected once more reuse this memory, one for each warp.
        warps = max(4, finish_warps // slices)
        schedule = ListSchedule(slices, capacity, sample, num_rows, warps, finish_warps)
    else:
        schedule = ListSchedule(1, capacity, sample, min(num_rows, 2 * processors), 8)
    return within_list_bytes(schedule, num_cols)


def within_list_bytes(schedule: AnySchedule, num_cols: int) -> AnySchedule:
    """The schedule, with at most as many rows in progress as fit ``LIST_BYTES``."""
    bound = max(1, LIST_BYTES // max(1, schedule.list_bytes(num_cols) // schedule.programs))
    return schedule if schedule.programs <= bound else replace(schedule, programs=bound)


def select_topk(call: SelectTopk) -> None:
    launch_in_chunks(launch, schedule_lists, call)


def launch_in_chunks(launch: Callable[..., None], schedule_of: Scheduler, call: SelectTopk) -> None:
    """Launch a schedule in chunks of rows with lists that fit ``LIST_BYTES``."""
    scores, topk, request_ids = call.scores, call.topk, call.request_ids
    num_rows, num_cols = scores.shape
    if num_rows == 0:
        return
    schedule = schedule_of(num_rows, num_cols, topk, scores.device)
    at_once = schedule.programs if schedule.slices > 1 else num_rows
    ranges, size = (call.row_starts, call.row_ends), call.page_size or 0
    for first in range(0, num_rows, at_once):
        rows = slice(first, first + at_once)
        starts, ends = (None if of_rows is None else of_rows[rows] for of_rows in ranges)
        pages = pages_of(call.page_table, None if request_ids is None else request_ids[rows])
        launch(scores[rows], topk, starts, ends, call.out[rows], schedule, pages, size)


def launch(
    scores: Tensor,
    topk: int,
    row_starts: Tensor | None,
    row_ends: Tensor | None,
    out: Tensor,
    schedule: ListSchedule,
    pages: Pages = NO_PAGES,
    page_size: int = 0,
    kernels: tuple[Any, Any, Any] = (_select_kernel, _collect_kernel, _finish_kernel),
) -> None:
    """Launch a schedule for all rows at once, with the three kernels of a tier."""
    select, collect, finish = kernels
    num_rows, num_cols = scores.shape
    limit = schedule.limit(num_cols)
    lists = counts = out  # placeholders: rows of at most ``capacity`` columns need no lists
    if num_cols > schedule.capacity:
        room = schedule.programs if schedule.slices == 1 else num_rows, schedule.num_lists
        lists = torch.empty(*room, limit + schedule.tile, dtype=torch.int64, device=scores.device)
        counts = torch.empty(*room, 2, dtype=torch.int32, device=scores.device)
    rows = (row_starts, row_ends)
    layout = (num_cols, topk, limit)
    strides = (scores.stride(0), out.stride(0))
    if schedule.slices == 1:
        select[(schedule.programs,)](
            scores,
            out,
            lists,
            counts,
            *rows,
            num_rows,
            *layout,
            *strides,
            *pages,
            **schedule.constants,
            WARPS=schedule.num_warps,
            PAGE_SIZE=page_size,
            num_warps=schedule.num_warps,
            **register_limit(schedule.registers),
        )
        return
    if num_cols > schedule.capacity:
        collect[(num_rows * schedule.slices,)](
            scores,
            lists,
            counts,
            *rows,
            *layout,
            schedule.slices,
            scores.stride(0),
            **schedule.constants,
            WARPS=schedule.num_warps,
            num_warps=schedule.num_warps,
            **schedule.collect_options,
        )
    finish[(num_rows,)](
        scores,
        out,
        lists,
        counts,
        *rows,
        *layout,
        *strides,
        *pages,
        LISTS=schedule.num_lists,
        **schedule.constants,
        WARPS=schedule.finish_warps,
        PAGE_SIZE=page_size,
        num_warps=schedule.finish_warps,
        **schedule.finish_options,
    )


@triton.jit
def threshold_of_best(key, ids, live, k):
    """The key and the cut of ids that the best k live candidates reach, see :func:`is_best`.

    ``ids`` are distinct and not negative. All live candidates reach them if there are at most k.
    """
    count = tl.sum(live.to(tl.int32), 0)
    lowest = tl.full([], DEAD_KEY, tl.int32)
    threshold = lowest
    cut = lowest
    if count > k:
        highest = tl.full([], END_KEY, tl.int32)
        threshold, count, above = _search_threshold(key, lowest, highest, count, k, k)
        if count > k:  # among equal values, the lowest ids
            rank = tl.where(key == threshold, -1 - ids, DEAD_KEY).to(tl.int32)
            cut, _, _ = _search_threshold(
                rank, lowest, lowest * 0, count - above, k - above, k - above
            )
    return threshold, cut


@triton.jit
def is_best(key, ids, live, threshold, cut):
    """Whether live candidates exceed a threshold, or equal it and have an id up to the cut."""
    return live & ((key > threshold) | ((key == threshold) & (-1 - ids >= cut)))


@triton.jit(do_not_specialize=["num_candidates", "k", "stride_part", "stride_row", "stride_out"])
def _merge_kernel(
    values,
    indices,
    out,
    num_candidates,
    k,
    width,
    stride_part,
    stride_row,
    stride_part_indices,
    stride_row_indices,
    stride_out,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Select the best candidates of a row; one block holds the candidates of all parts."""
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, BLOCK)
    part = (j // width).to(tl.int64)
    within = j < num_candidates
    at = row * stride_row_indices + part * stride_part_indices + j % width
    ids = tl.load(indices + at, mask=within, other=-1)
    live = ids >= 0
    x = tl.load(values + row * stride_row + part * stride_part + j % width, mask=live, other=0.0)
    key = tl.where(live, keys_of(x.to(tl.float32)), DEAD_KEY)
    threshold, cut = threshold_of_best(key, ids, live, k)
    chosen = is_best(key, ids, live, threshold, cut).to(tl.int32)
    out += row * stride_out
    place = tl.cumsum(chosen, 0) - chosen
    tl.store(out + place, ids.to(tl.int32), mask=(chosen != 0) & (place < k))
    count = tl.minimum(tl.sum(chosen, 0), k)  # more are chosen only if ids are not distinct
    tl.debug_barrier()
    i = tl.arange(0, WIDTH)
    chosen = tl.load(out + i, mask=i < count, other=0x7FFFFFFF)
    before = tl.load(out + i - 1, mask=(i > 0) & (i < count), other=-1)
    tl.debug_barrier()
    # Ids ascend already if the parts are consecutive and in order.
    if tl.max((before > chosen).to(tl.int32), 0) > 0:
        chosen = tl.sort(chosen)
    tl.store(out + i, tl.where(i < count, chosen, -1), mask=i < k)


def merge_topk(call: MergeTopk) -> None:
    """Merge parts whose candidates one program holds."""
    values, indices, topk, out = call
    num_parts, num_rows, width = values.shape
    if num_rows == 0:
        return
    candidates = num_parts * width
    block = max(64, triton.next_power_of_2(candidates))
    _merge_kernel[(num_rows,)](
        values,
        indices,
        out,
        candidates,
        topk,
        max(width, 1),
        values.stride(0),
        values.stride(1),
        indices.stride(0),
        indices.stride(1),
        out.stride(0),
        BLOCK=block,
        WIDTH=max(2, triton.next_power_of_2(topk)),
        num_warps=min(16, max(1, block // 1024)),
    )


def merge_sorted(call: MergeTopk) -> None:
    """Merge any number of candidates: torch sorts them, :func:`select_topk` selects."""
    sort_and_select(call, select_topk)

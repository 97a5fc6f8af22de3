"""Exact, deterministic top-k of long rows, in one pass over memory where the row allows it.

1. A sample of the row gives a threshold that a few more than k values should reach.
2. One pass over the row lists the values that reach it, with their columns, in column order.
3. The k-th largest of a list of at most ``capacity`` entries is found in registers by counting.

Values are counted before they are listed, so a list never overflows: a row of which too few or too
many values reach the threshold gets a better one by counting passes, until its list fits or the
threshold is the k-th largest value itself, whose first occurrences are then read off the row.

Every position comes from a prefix sum in column order: ids ascend, ties go to the lower column, and
all runs agree to the bit. Values are compared as int32 keys in the order of the floats, where -0
equals +0 and NaN lies below -inf.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

DEAD_KEY = tl.constexpr(-(1 << 31))
"""Key of a lane that holds no value."""
NAN_KEY = tl.constexpr(-(1 << 31) + 1)
MINUS_INF_KEY = tl.constexpr(-(1 << 31) + 0x7FFFFF)
END_KEY = tl.constexpr(0x7F800001)
"""One above the key of +inf."""
SIGMAS = tl.constexpr(4.5)
"""Standard deviations that a threshold keeps away from a list too short or too long."""

# Values that the compiler knows nothing of. Strides are among them for speed: it would give each
# lane four neighbours of an aligned row, and then rearrange them for the scattered stores.
RUNTIME = ("num_cols", "k", "limit", "stride_scores", "stride_out")


@triton.jit
def _keys(x):
    """int32 in the order of float32 ``x``."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, NAN_KEY, bits ^ ((bits >> 31) & 0x7FFFFFFF))


@triton.jit
def _value(key):
    """The float32 that has this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _row_range(row_starts, row_ends, row, num_cols):
    """The columns of a row; the end is never below the start."""
    start = tl.full([], 0, tl.int32)
    end = start + num_cols
    if row_starts is not None:
        start = tl.minimum(tl.maximum(tl.load(row_starts + row), 0), num_cols).to(tl.int32)
    if row_ends is not None:
        end = tl.minimum(tl.maximum(tl.load(row_ends + row), start), num_cols).to(tl.int32)
    return start, end


@triton.jit
def _load(x_row, first, end, lane):
    """float32 of the columns ``first + lane``; NaN from ``end`` on."""
    return tl.load(x_row + first + lane, mask=lane < end - first, other=float("nan")).to(tl.float32)


@triton.jit
def _search(key, klo, khi, clo, low, up):
    """A key that ``low`` to ``up`` of the block's keys reach, or else the largest that low reach.

    ``clo >= low`` keys reach ``klo`` and fewer than ``low`` reach ``khi``. Returns the key and how
    many keys reach the smallest larger one that was counted: with ``low == up`` and ties at the
    key, the number of those above it.
    """
    chi = clo * 0
    while (klo + 1 < khi) & (clo > up):
        span = khi.to(tl.int64) - klo
        a = (klo + tl.maximum(span // 3, 1)).to(tl.int32)
        b = (klo + tl.maximum(2 * span // 3, 1)).to(tl.int32)
        both = tl.sum((key >= a).to(tl.int32) + ((key >= b).to(tl.int32) << 16), 0)
        ca = both & 0xFFFF
        cb = both >> 16
        khi = tl.where(cb >= low, khi, tl.where(ca >= low, b, a))
        chi = tl.where(cb >= low, chi, tl.where(ca >= low, cb, ca))
        klo = tl.where(cb >= low, b, tl.where(ca >= low, a, klo))
        clo = tl.where(cb >= low, cb, tl.where(ca >= low, ca, clo))
    return klo, chi


@triton.jit
def _guess(
    x_row,
    start,
    end,
    k,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
):
    """Key of a threshold that at least k and at most CAPACITY columns reach, most likely."""
    CHUNKS: tl.constexpr = SAMPLE // 8
    size = end - start
    chunk = tl.arange(0, CHUNKS)
    # Eight neighbours, a memory sector, from each of CHUNKS equal parts of the row, at uneven
    # places: rows may have a period.
    room = tl.minimum(tl.maximum(size // CHUNKS - 8, 0), 0x7FFF)
    jitter = (chunk * 40503 & 0xFFFF) * room >> 16
    at = start + (chunk.to(tl.int64) * size // CHUNKS).to(tl.int32) + jitter
    column = (at // 8 * 8)[:, None] + tl.arange(0, 8)[None, :]
    inside = (column >= start) & (column < end)
    x = tl.load(x_row + column, mask=inside, other=0.0)
    key = tl.where(inside, _keys(x.to(tl.float32)), DEAD_KEY)
    key = tl.reshape(key, [SAMPLE])
    ratio = SAMPLE / size.to(tl.float32)
    mean = k * ratio
    # Ranks in the sample that stay clear of k and of CAPACITY; in the middle if they cannot.
    low = mean + tl.sqrt(mean) * SIGMAS + 2.0
    root = (tl.sqrt(ratio * (4 * CAPACITY) + SIGMAS * SIGMAS) - SIGMAS) * 0.5
    low = tl.minimum(tl.minimum(low, 0.5 * (low + root * root)), SAMPLE * 1.0)
    up = tl.maximum(low, tl.minimum(low * 1.2 + 4.0, root * root)).to(tl.int32)
    low = low.to(tl.int32)
    key_end = tl.max(key, 0) + 1
    key, _ = _search(key, tl.full([], DEAD_KEY, tl.int32), key_end, low * 0 + SAMPLE, low, up)
    return tl.maximum(key, MINUS_INF_KEY)


@triton.jit
def _collect(x_row, found, start, end, key, limit, PLANE: tl.constexpr):
    """List (value bits, column) of the columns in [start, end) that reach ``key``, ascending.

    Returns how many there are. They are in the list only if they are at most ``limit``; nothing is
    written behind them.
    """
    tl.static_assert(PLANE < 1024)
    threshold = _value(tl.maximum(key, MINUS_INF_KEY))  # what lies below has no such value
    lane = tl.arange(0, PLANE)
    count = key * 0
    a = _load(x_row, start, end, lane)
    b = _load(x_row, start + PLANE, end, lane)
    c = _load(x_row, start + 2 * PLANE, end, lane)
    for base in range(start, end, 3 * PLANE):
        # The next tile is on its way while this one is looked at.
        next_a = _load(x_row, base + 3 * PLANE, end, lane)
        next_b = _load(x_row, base + 4 * PLANE, end, lane)
        next_c = _load(x_row, base + 5 * PLANE, end, lane)
        # One prefix sum for three planes, ten bits each: a scan costs more than all the rest.
        hits = (a >= threshold).to(tl.int32)
        hits += (b >= threshold).to(tl.int32) << 10
        hits += (c >= threshold).to(tl.int32) << 20
        total = tl.sum(hits, 0)
        in_a = total & 0x3FF
        in_b = total >> 10 & 0x3FF
        added = in_a + in_b + (total >> 20)
        if (added > 0) & (count + added <= limit):
            before = tl.cumsum(hits, 0) - hits
            at = found + count
            column = base + lane
            _append(at, before & 0x3FF, a, column, threshold)
            _append(at + in_a, before >> 10 & 0x3FF, b, column + PLANE, threshold)
            _append(at + (in_a + in_b), before >> 20, c, column + 2 * PLANE, threshold)
        count += added
        a = next_a
        b = next_b
        c = next_c
    return count


@triton.jit
def _append(at, before, x, column, threshold):
    entry = (x.to(tl.int32, bitcast=True).to(tl.int64) << 32) | column
    tl.store(at + before, entry, mask=x >= threshold)


@triton.jit
def _settle(
    x_row,
    start,
    end,
    k,
    key,
    count,
    CAPACITY: tl.constexpr,
):
    """A better threshold for a row of which ``count`` columns reach ``key``, for any content.

    Returns (threshold, columns that reach it, columns that reach the next key). The first count
    lies in [k, CAPACITY], or else the threshold is the k-th largest key.
    """
    enough = count >= k
    klo = tl.where(enough, key, NAN_KEY)
    clo = tl.where(enough, count, end - start)
    khi = tl.where(enough, END_KEY, key)
    chi = tl.where(enough, 0, count)
    # Eight rows of lanes: counts add up within a thread.
    LANES: tl.constexpr = CAPACITY // 16
    lane = tl.arange(0, 8)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    while (klo + 1 < khi) & (clo > CAPACITY):
        span = khi.to(tl.int64) - klo
        a = klo + 1  # a plateau of equal values at the threshold is known after one pass
        b = (klo + tl.maximum(span // 3, 1)).to(tl.int32)
        c = (klo + tl.maximum(2 * span // 3, 1)).to(tl.int32)
        counts_a = tl.zeros([LANES], tl.int32)
        counts_b = tl.zeros([LANES], tl.int32)
        counts_c = tl.zeros([LANES], tl.int32)
        x = _load(x_row, start, end, lane)
        for base in range(start, end, 8 * LANES):
            next_x = _load(x_row, base + 8 * LANES, end, lane)
            keys = tl.where(base + lane < end, _keys(x), DEAD_KEY)
            counts_a += tl.sum((keys >= a).to(tl.int32), 0)
            counts_b += tl.sum((keys >= b).to(tl.int32), 0)
            counts_c += tl.sum((keys >= c).to(tl.int32), 0)
            x = next_x
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
def _place(out_row, ids, key, threshold, above, level, ties):
    """Store the ids of keys above the threshold, and of the first ``ties`` that equal it.

    ``above`` and ``level``: how many of either kind earlier blocks had; returned with this block's.
    """
    over = key > threshold
    equal = key == threshold
    both = over.to(tl.int32) + (equal.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    equal_before = level + (before >> 16)
    place = above + (before & 0xFFFF) + tl.minimum(equal_before, ties)
    tl.store(out_row + place, ids, mask=over | (equal & (equal_before < ties)))
    total = tl.sum(both, 0)
    return above + (total & 0xFFFF), level + (total >> 16)


@triton.jit
def _short_row(out_row, size, k, BLOCK: tl.constexpr):
    """All ids of a row of at most k columns, then -1."""
    for base in range(0, k, BLOCK):
        ids = base + tl.arange(0, BLOCK)
        tl.store(out_row + ids, tl.where(ids < size, ids, -1), mask=ids < k)


@triton.jit
def _finish(
    x_row,
    out_row,
    found,
    counts,
    start,
    end,
    k,
    key,
    count,
    limit,
    SLICES: tl.constexpr,
    CAPACITY: tl.constexpr,
    PLANE: tl.constexpr,
):
    """Write the ids of a row of more than k columns.

    A row of more than CAPACITY columns comes with the ``count`` of columns that reach ``key`` and,
    if it is not too large, with their SLICES lists of ``counts`` entries, each ``limit`` apart.
    """
    size = end - start
    exact = size < 0  # false, as a value
    if size <= CAPACITY:
        count = size
    elif (count < k) | (count > CAPACITY):
        key, count, above = _settle(x_row, start, end, k, key, count, CAPACITY)
        exact = count > CAPACITY
        if exact:
            HALF: tl.constexpr = CAPACITY // 2
            lane = tl.arange(0, HALF)
            over = above * 0
            level = above * 0
            x = _load(x_row, start, end, lane)
            for base in range(start, end, HALF):
                next_x = _load(x_row, base + HALF, end, lane)
                keys = tl.where(base + lane < end, _keys(x), DEAD_KEY)
                ids = base - start + lane
                over, level = _place(out_row, ids, keys, key, over, level, k - above)
                x = next_x
        else:
            tl.debug_barrier()  # the counts of the slices have been read
            _collect(x_row, found, start, end, key, CAPACITY, PLANE)
            s = tl.arange(0, SLICES)
            tl.store(counts + s, tl.where(s == 0, count, 0))  # one list now
            tl.debug_barrier()
    if not exact:
        j = tl.arange(0, CAPACITY)
        if size <= CAPACITY:
            ids = j
            x = tl.load(x_row + start + j, mask=j < size, other=0.0).to(tl.float32)
            keys = tl.where(j < size, _keys(x), DEAD_KEY)
        else:
            live = j < count
            source = j
            SHARE: tl.constexpr = CAPACITY // SLICES
            most = tl.max(tl.load(counts + tl.arange(0, SLICES)), 0)
            if most <= SHARE:  # each slice's list fits its share of the lanes
                source = j // SHARE * limit + j % SHARE
                live = j % SHARE < tl.load(counts + j // SHARE)
            else:
                reached = count * 0
                for s in range(SLICES):
                    entries = tl.load(counts + s)
                    reached += entries
                    source += tl.where(j >= reached, limit - entries, 0)
            entry = tl.load(found + source, mask=live, other=0).to(tl.int64)
            ids = entry.to(tl.int32) - start
            x = (entry >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            keys = tl.where(live, _keys(x), DEAD_KEY)
        lowest = tl.min(tl.where(keys == DEAD_KEY, END_KEY, keys), 0)
        threshold, above = _search(keys, lowest, tl.max(keys, 0) + 1, count, k, k)
        _place(out_row, ids, keys, threshold, above * 0, above * 0, k - above)


@triton.jit(do_not_specialize=RUNTIME)
def _collect_kernel(
    scores,
    found,
    counts,
    row_starts,
    row_ends,
    num_cols,
    k,
    limit,
    stride_scores,
    SLICES: tl.constexpr,
    CAPACITY: tl.constexpr,
    SAMPLE: tl.constexpr,
    PLANE: tl.constexpr,
):
    """One slice of a row: its list, its count and, behind the counts of the row, the key."""
    row = tl.program_id(0).to(tl.int64) // SLICES
    index = tl.program_id(0) % SLICES
    x_row = scores + row * stride_scores
    start, end = _row_range(row_starts, row_ends, row, num_cols)
    if (end - start > k) & (end - start > CAPACITY):
        # Every slice of the row comes to the same threshold.
        key = _guess(x_row, start, end, k, CAPACITY, SAMPLE)
        share = tl.cdiv(tl.cdiv(end - start, 3 * PLANE), SLICES) * (3 * PLANE)
        first = tl.minimum(start + index * share, end)
        last = tl.minimum(first + share, end)
        found += tl.program_id(0).to(tl.int64) * limit
        count = _collect(x_row, found, first, last, key, limit, PLANE)
        counts += row * (SLICES + 1)
        tl.store(counts + index, count)
        tl.store(counts + SLICES, key, mask=index == 0)


@triton.jit(do_not_specialize=RUNTIME)
def _finish_kernel(
    scores,
    out,
    found,
    counts,
    row_starts,
    row_ends,
    num_cols,
    k,
    limit,
    stride_scores,
    stride_out,
    SLICES: tl.constexpr,
    CAPACITY: tl.constexpr,
    PLANE: tl.constexpr,
):
    """The ids of one row, from the lists of its slices."""
    row = tl.program_id(0).to(tl.int64)
    x_row = scores + row * stride_scores
    out_row = out + row * stride_out
    start, end = _row_range(row_starts, row_ends, row, num_cols)
    if end - start <= k:
        _short_row(out_row, end - start, k, PLANE)
    else:
        found += row * SLICES * limit
        counts += row * (SLICES + 1)
        key = start * 0
        count = start * 0
        if end - start > CAPACITY:
            key = tl.load(counts + SLICES)
            count = tl.sum(tl.load(counts + tl.arange(0, SLICES)), 0)
        _finish(
            x_row,
            out_row,
            found,
            counts,
            start,
            end,
            k,
            key,
            count,
            limit,
            SLICES,
            CAPACITY,
            PLANE,
        )


@dataclass(frozen=True)
class Plan:
    """How a selection is spread over the device.

    Args:
        slices: programs that share the first pass over a row, a power of two.
        capacity: entries of a row's list, a power of two.
        sample: values that a row's threshold is guessed from, a power of two.
        plane: columns of a third of a tile.
        num_warps: warps of a program of the first pass.
    """

    slices: int
    capacity: int
    sample: int
    plane: int = 512
    num_warps: int = 4

    def limit(self, num_cols: int) -> int:
        """Entries that the list of one slice has room for."""
        tile = 3 * self.plane
        share = triton.cdiv(triton.cdiv(num_cols, tile), self.slices) * tile
        return min(self.capacity, share)

    def row_bytes(self, num_cols: int) -> int:
        """Bytes of the lists and counts of one row; rows that fit a list need none."""
        if num_cols <= self.capacity:
            return 0
        return self.slices * self.limit(num_cols) * 8 + (self.slices + 1) * 4


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def plan(num_rows: int, num_cols: int, topk: int, device: torch.device) -> Plan:
    """The plan for rows of this size; it depends on shapes only."""
    # A list twice as long as k leaves room for the error of the sample. 8192 entries are what the
    # registers hold; for a k of more than that every row is settled by counting.
    long = num_cols > 1 << 17 and topk > 512
    capacity = min(8192, max(2048 if topk <= 512 else 4096, triton.next_power_of_2(2 * topk)))
    capacity = 8192 if long else capacity
    # A sixteenth of the row, up to 32 values a thread.
    sample = min(max(triton.next_power_of_2(num_cols) // 16, 1024), 8192 if long else 4096)
    # Four programs for each multiprocessor hide each other's latency.
    slices = min(32, 4 * _multiprocessors(device) // num_rows, num_cols // 4096)
    slices = 1 << (max(slices, 1).bit_length() - 1)
    return Plan(slices, capacity, sample, num_warps=8 if long else 4)


LIST_BYTES = 144 << 20
"""Bound on the lists that exist at any time; more rows are taken in turns."""


def select_topk(
    *,
    scores: Tensor,
    topk: int,
    row_starts: Tensor | None,
    row_ends: Tensor | None,
    out: Tensor,
) -> None:
    """Launcher; see :func:`sparsemla.ops.topk.select_topk`."""
    num_rows, num_cols = scores.shape
    if num_rows:
        how = plan(num_rows, num_cols, topk, scores.device)
        turns = triton.cdiv(num_rows * how.row_bytes(num_cols), LIST_BYTES)
        at_once = triton.cdiv(num_rows, max(1, turns))
        for first in range(0, num_rows, at_once):
            rows = slice(first, first + at_once)
            starts = None if row_starts is None else row_starts[rows]
            ends = None if row_ends is None else row_ends[rows]
            launch(scores[rows], topk, starts, ends, out[rows], how)


def _registers(limit: int) -> dict[str, int]:
    """The option that keeps NVIDIA's compiler from taking registers for which it has no use."""
    return {} if torch.version.hip else {"maxnreg": limit}


def launch(
    scores: Tensor,
    topk: int,
    row_starts: Tensor | None,
    row_ends: Tensor | None,
    out: Tensor,
    how: Plan,
) -> None:
    """Carry out a plan, for all rows at once."""
    num_rows, num_cols = scores.shape
    device = scores.device
    limit = how.limit(num_cols)
    sizes = {"SLICES": how.slices, "CAPACITY": how.capacity, "PLANE": how.plane}
    found = counts = out  # rows that fit a list need neither
    if num_cols > how.capacity:
        found = torch.empty(num_rows, how.slices, limit, dtype=torch.int64, device=device)
        counts = torch.empty(num_rows, how.slices + 1, dtype=torch.int32, device=device)
        _collect_kernel[(num_rows * how.slices,)](
            scores,
            found,
            counts,
            row_starts,
            row_ends,
            num_cols,
            topk,
            limit,
            scores.stride(0),
            **sizes,
            SAMPLE=how.sample,
            num_warps=how.num_warps,
            **_registers(88),
        )
    _finish_kernel[(num_rows,)](
        scores,
        out,
        found,
        counts,
        row_starts,
        row_ends,
        num_cols,
        topk,
        limit,
        scores.stride(0),
        out.stride(0),
        **sizes,
        num_warps=max(1, how.capacity // 512),
        **_registers(128 if how.capacity > 4096 else 96),
    )

"""Selections by a threshold and a list, for rows that registers do not hold.

The algorithm is that of the portable kernel (:mod:`sparsemla.kernels.topk.triton`): a sample gives
a threshold of a value and a column, one pass lists what reaches it, and the list is searched. One
program takes a row from sample to result, or slices are listed by one kernel and rows finished by
another.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.gluon import barrier
from sparsemla.kernels.topk import triton as portable
from sparsemla.kernels.topk.sm90.counts import line_of_cluster, places_of_best
from sparsemla.kernels.topk.sm90.keys import (
    DEAD_KEY,
    END_KEY,
    MINUS_INF_KEY,
    NAN_KEY,
    RUNTIME,
    bits_of,
    keys_of,
    max_all,
    name_of,
    rank_of,
    row_range,
    search,
    store_short_row,
    sum_all,
    sums_and_max,
    to_all,
)
from sparsemla.kernels.topk.sm90.lists import (
    AHEAD,
    AHEAD_OF_MANY,
    TILE,
    collect,
    fetch_first,
    halves_of,
    in_layout,
    load_entries,
    load_near,
    room_near,
)
from sparsemla.kernels.topk.triton import Pages

SIGMAS = gl.constexpr(4.5)
"""Standard deviations that a threshold keeps away from a list too short or too long."""


NEIGHBOURS = gl.constexpr(16)
"""Columns that a sample takes together: memory gives 64 bytes at once."""


@gluon.jit
def _quantile(share):
    """Standard deviations above the mean that a small ``share`` of normal values exceeds, roughly.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.22.
    """
    t = gl.sqrt(-2.0 * gl.log(gl.minimum(share, 0.5)))
    return t - gl.fdiv(2.30753 + 0.27061 * t, 1.0 + 0.99229 * t + 0.04481 * t * t)


@gluon.jit
def _sample(x, size, SAMPLE: gl.constexpr, W: gl.constexpr):
    """Columns of a row in ascending order, some of them outside it, and their values [W, N]."""
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 256 // NEIGHBOURS, NEIGHBOURS // 8], [W, 1, 1], [2, 1, 0]
    )
    CHUNKS: gl.constexpr = SAMPLE // NEIGHBOURS
    # Neighbours that memory gives at once from each of CHUNKS equal parts of the row, at uneven
    # places: rows may have a period.
    INNER: gl.constexpr = gl.SliceLayout(2, L)
    warp = gl.arange(0, W, gl.SliceLayout(1, INNER))
    place = gl.arange(0, CHUNKS // W, gl.SliceLayout(0, INNER))
    chunk = warp[:, None] * (CHUNKS // W) + place[None, :]
    room = gl.minimum(gl.maximum(size // CHUNKS - NEIGHBOURS, 0), 0x7FFF)
    jitter = (chunk * 40503 & 0xFFFF) * room >> 16
    at = (chunk.to(gl.int64) * size // CHUNKS).to(gl.int32) + jitter
    SIZE: gl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    shift = (x.to(gl.int64) % (NEIGHBOURS * SIZE)).to(gl.int32) // SIZE
    near = gl.arange(0, NEIGHBOURS, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    first = (at + shift) // NEIGHBOURS * NEIGHBOURS - shift
    ids = gl.expand_dims(first, 2) + gl.expand_dims(gl.expand_dims(near, 0), 1)
    x = gl.load(x + ids, mask=(ids >= 0) & (ids < size), other=0.0)
    return gl.reshape(ids, [W, SAMPLE // W]), gl.reshape(x, [W, SAMPLE // W])


@gluon.jit
def _guess(ids, x, size, k, factor, CAPACITY: gl.constexpr, W: gl.constexpr):
    """Threshold that at least k and at most CAPACITY columns reach, most likely: key and column.

    Args:
        ids, x: a sample of the row.
        factor: 1, or what the number of columns should change by since the first guess.
    """
    SAMPLE: gl.constexpr = W * x.shape[1]
    inside = (ids >= 0) & (ids < size)
    x = x.to(gl.float32)
    key = gl.where(inside, keys_of(x), DEAD_KEY)
    ratio = gl.fdiv(SAMPLE * 1.0, size.to(gl.float32))
    most = k * ratio
    # Ranks in the sample that stay clear of k and of CAPACITY; in the middle if they cannot.
    low = most + gl.sqrt(most) * SIGMAS + 2.0
    root = (gl.sqrt(ratio * (4 * CAPACITY) + SIGMAS * SIGMAS) - SIGMAS) * 0.5
    low = gl.minimum(gl.minimum(low, 0.5 * (low + root * root)) * factor, SAMPLE * 1.0)
    slack = gl.sqrt(low) * 0.3
    up = gl.maximum(low + slack, gl.minimum(low * 1.2 + 4.0, root * root))
    low = gl.minimum(low, up - 2 * slack)
    up = up.to(gl.int32)
    low = gl.maximum(low, 1.0).to(gl.int32)
    # Where these ranks should be if the scores are normally distributed.
    small = gl.where(inside & (gl.abs(x) < 1e15), x, 0.0)
    mean, square, top = sums_and_max(small, small * small, key, W)
    mean = mean * (1.0 / SAMPLE)
    deviation = gl.sqrt(gl.maximum(square * (1.0 / SAMPLE) - mean * mean, 0.0))
    share = (low + up).to(gl.float32) * (0.5 / SAMPLE)
    dead = size * 0 + DEAD_KEY
    a = gl.maximum(bits_of(mean + _quantile(1.1 * share) * deviation), DEAD_KEY + 1)
    a = gl.minimum(a, top)
    b = gl.minimum(gl.maximum(bits_of(mean + _quantile(0.92 * share) * deviation), a), top)
    threshold, reached, above = search(key, dead, top + 1, dead * 0 + SAMPLE, a, b, low, up, W)
    column = size
    if reached > up:  # a plateau; the sample lies in the order of the columns
        equal = key == threshold
        before, _ = rank_of(equal.to(gl.int32), W)
        cut = gl.where(equal & (before + 1 >= (low + up) // 2 - above), ids + 1, size)
        column = -max_all(-cut, W)
    return gl.maximum(threshold, MINUS_INF_KEY), column


@gluon.jit
def _settle(x, size, k, CAPACITY: gl.constexpr, W: gl.constexpr):
    """A threshold for a row of any content, by counting passes.

    Returns (key, columns that reach it, columns that reach the next key). The first count lies in
    [k, CAPACITY], or else the threshold is the k-th largest key.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    klo = size * 0 + NAN_KEY
    clo = size
    khi = size * 0 + END_KEY
    chi = size * 0
    N: gl.constexpr = 256
    warp = gl.arange(0, W, gl.SliceLayout(1, L))
    lane = warp[:, None] * N + gl.arange(0, N, gl.SliceLayout(0, L))[None, :]
    while (klo + 1 < khi) & (clo > CAPACITY):
        span = khi.to(gl.int64) - klo
        a = klo + 1  # a plateau of equal values at the threshold is known after one pass
        b = (klo + gl.maximum(span // 3, 1)).to(gl.int32)
        c = (klo + gl.maximum(2 * span // 3, 1)).to(gl.int32)
        counts_a = lane * 0
        counts_b = lane * 0
        counts_c = lane * 0
        for base in range(0, size, W * N):
            ids = base + lane
            values = gl.load(x + ids, mask=ids < size, other=0.0).to(gl.float32)
            keys = gl.where(ids < size, keys_of(values), DEAD_KEY)
            counts_a += (keys >= a).to(gl.int32)
            counts_b += (keys >= b).to(gl.int32)
            counts_c += (keys >= c).to(gl.int32)
        ca = sum_all(counts_a, W)
        cb = sum_all(counts_b, W)
        cc = sum_all(counts_c, W)
        # In descending order of keys: c, b, a.
        khi = gl.where(cc >= k, khi, gl.where(cb >= k, c, gl.where(ca >= k, b, a)))
        chi = gl.where(cc >= k, chi, gl.where(cb >= k, cc, gl.where(ca >= k, cb, ca)))
        klo = gl.where(cc >= k, c, gl.where(cb >= k, b, gl.where(ca >= k, a, klo)))
        clo = gl.where(cc >= k, cc, gl.where(cb >= k, cb, gl.where(ca >= k, ca, clo)))
    return klo, clo, chi


@gluon.jit
def _place(
    out,
    ids,
    key,
    threshold,
    above,
    level,
    ties,
    pages,
    row,
    PAGE_SIZE: gl.constexpr,
    W: gl.constexpr,
):
    """Store the ids of keys above the threshold, and of the first ``ties`` that equal it.

    ``above`` and ``level``: how many of either kind earlier blocks had; returned with this block's.
    """
    over = key > threshold
    equal = key == threshold
    before, total = rank_of(over.to(gl.int32) + (equal.to(gl.int32) << 16), W)
    equal_before = level + (before >> 16)
    place = above + (before & 0xFFFF) + gl.minimum(equal_before, ties)
    chosen = over | (equal & (equal_before < ties))
    gl.store(out + place, name_of(ids, chosen, pages, row, PAGE_SIZE), mask=chosen)
    return above + (total & 0xFFFF), level + (total >> 16)


@gluon.jit
def _sources(counts, j, pitch, LISTS: gl.constexpr):
    """Where the entries ``j`` of all lists together lie."""
    source = j
    upto = pitch * 0
    for i in range(LISTS):
        length = gl.load(counts + i)
        upto += length
        source += gl.where(j >= upto, pitch - length, 0)
    return source


@gluon.jit
def _row(
    x,
    out,
    lists,
    near,
    counts,
    limit,
    size,
    k,
    pages,
    row,
    FRESH: gl.constexpr,
    LISTS: gl.constexpr,
    CAPACITY: gl.constexpr,
    SAMPLE: gl.constexpr,
    W: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """Write the ids of a row of more than k columns.

    A row of more than CAPACITY columns comes with LISTS lists, whose lengths are ``counts``, unless
    it is FRESH. Lists with too many entries or too few are made again. If there is room for fresh
    lists ``near``, in shared memory, they are also there, each as far as its share goes.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])
    EACH: gl.constexpr = gl.BlockedLayout([LISTS], [32], [W], [0])
    N: gl.constexpr = CAPACITY // W
    warp = gl.arange(0, W, gl.SliceLayout(1, L))
    lane = gl.arange(0, N, gl.SliceLayout(0, L))
    j = warp[:, None] * N + lane[None, :]
    each = gl.arange(0, LISTS, EACH)
    exact = size < 0  # false, as a value
    count = size
    above = size * 0
    longest = size * 0
    own = warp * 0  # entries of each warp's list
    key = size * 0 + NAN_KEY
    # Mostly each list fits its share of the registers.
    pitch = limit + TILE
    SHARE: gl.constexpr = CAPACITY // LISTS
    if not FRESH:
        entry = (j * 0).to(gl.int64)
        live = j < 0
    if size > CAPACITY:
        tries = size * 0
        count = size * 0
        if not FRESH:
            tries += 1
            lengths = gl.load(counts + each)
            # Some of the entries are none: waiting for the lengths takes longer.
            of_list = gl.load(counts + j // SHARE)
            entry = gl.load(lists + (j // SHARE * pitch + j % SHARE)).to(gl.int64)
            live = j % SHARE < of_list
            key = gl.load(lists + limit).to(gl.int32)
            count = gl.sum(lengths, 0)
            longest = gl.max(lengths, 0)
        while ((count < k) | (count > CAPACITY)) & (not exact):
            column = size
            if tries < 2:
                middle = 0.5 * (k + CAPACITY)
                ratio = gl.fdiv(middle, gl.maximum(count, 1).to(gl.float32))
                factor = gl.where(tries == 0, 1.0, ratio)
                at, values = _sample(x, size, SAMPLE, W)
                if FRESH and W < 16:  # sixteen warps alone have as much on its way without
                    fetch_first(x, size, 0, 1, AHEAD_OF_MANY, W, False)
                key, column = _guess(at, values, size, k, factor, CAPACITY, W)
            else:
                key, reached, above = _settle(x, size, k, CAPACITY, W)
                exact = reached > CAPACITY
            tries += 1
            if not exact:
                barrier()  # the lengths have been read
                if not FRESH:
                    gl.store(counts + each, each * 0)
                    barrier()
                room = limit
                if not FRESH:
                    room = size * 0 + CAPACITY
                added = collect(
                    x, lists, near, counts, room, size, key, column, 0, 1, W, not FRESH, SHARE
                )
                barrier()  # the lists and their lengths have been written
                added = in_layout(added, gl.BlockedLayout([1], [32], [W], [0]))
                of_warp = gl.max(gl.reshape(added, [W, 32]), 1)
                if FRESH:
                    own = in_layout(of_warp, gl.SliceLayout(1, L))
                    every = to_all(of_warp, W)
                    count = gl.sum(every, 0)
                    longest = gl.max(every, 0)
                else:
                    count = gl.max(to_all(of_warp, W), 0)
                    longest = size
        if exact:
            over = above * 0
            level = above * 0
            for base in range(0, size, CAPACITY):
                ids = base + j
                values = gl.load(x + ids, mask=ids < size, other=0.0).to(gl.float32)
                keys = gl.where(ids < size, keys_of(values), DEAD_KEY)
                over, level = _place(
                    out, ids, keys, key, over, level, k - above, pages, row, PAGE_SIZE, W
                )
    if not exact:
        ids = j
        if size <= CAPACITY:
            values = gl.load(x + j, mask=j < size, other=0.0).to(gl.float32)
            live = j < size
        else:
            if FRESH:
                live = lane[None, :] < own[:, None]
                if longest > SHARE:
                    live = j < count
                    ids, values = load_entries(lists + _sources(counts, j, pitch, LISTS), live)
                elif near is None:
                    ids, values = load_entries(lists + (j // SHARE * pitch + j % SHARE), live)
                else:
                    ids, values = load_near(near + j * 8)
            elif longest > SHARE:
                live = j < count
                ids, values = load_entries(lists + _sources(counts, j, pitch, LISTS), live)
            else:
                ids, values = halves_of(entry)
        keys = gl.where(live, keys_of(values), DEAD_KEY)
        place = places_of_best(keys, k, key, 1)  # all that is listed reaches the threshold
        gl.store(out + place, name_of(ids, place >= 0, pages, row, PAGE_SIZE), mask=place >= 0)


@gluon.jit(do_not_specialize=RUNTIME)
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
    CAPACITY: gl.constexpr,
    SAMPLE: gl.constexpr,
    WARPS: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    """The lists of one slice of a row, and their lengths."""
    gdc_launch_dependents()
    LISTS: gl.constexpr = 1 if TOGETHER else WARPS
    row = gl.program_id(0).to(gl.int64) // slices
    index = gl.program_id(0) % slices
    start, end = row_range(row_starts, row_ends, row, num_cols)
    size = end - start
    if (size > k) & (size > CAPACITY):
        x = scores + row * stride_scores + start
        # Every slice of the row comes to the same threshold.
        ids, values = _sample(x, size, SAMPLE, WARPS)
        fetch_first(x, size, index, slices, AHEAD, WARPS, TOGETHER)
        key, column = _guess(ids, values, size, k, 1.0, CAPACITY, WARPS)
        first = gl.program_id(0).to(gl.int64) * LISTS
        lists += first * (limit + TILE)
        counts += first
        gl.store(lists + limit, key.to(gl.int64))
        collect(x, lists, None, counts, limit, size, key, column, index, slices, WARPS, TOGETHER, 0)


@gluon.jit(do_not_specialize=RUNTIME)
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
    LISTS: gl.constexpr,
    CAPACITY: gl.constexpr,
    SAMPLE: gl.constexpr,
    WARPS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """The ids of one row, from the lists of its slices."""
    pages = Pages(table, request_ids, num_requests, width, stride)
    gdc_launch_dependents()
    gdc_wait()
    row = gl.program_id(0).to(gl.int64)
    start, end = row_range(row_starts, row_ends, row, num_cols)
    size = end - start
    x = scores + row * stride_scores + start
    o = out + row * stride_out
    if size <= k:
        store_short_row(o, size, k, pages, row, PAGE_SIZE, WARPS, line_of_cluster(WARPS, 1))
    else:
        lists += row * LISTS * (limit + TILE)
        counts += row * LISTS
        _row(
            x,
            o,
            lists,
            None,
            counts,
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
            PAGE_SIZE,
        )


@gluon.jit(do_not_specialize=RUNTIME)
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
    CAPACITY: gl.constexpr,
    SAMPLE: gl.constexpr,
    WARPS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """The ids of whole rows, one after the other: their lists take the same place."""
    pages = Pages(table, request_ids, num_requests, width, stride)
    lists += gl.program_id(0).to(gl.int64) * WARPS * (limit + TILE)
    counts += gl.program_id(0) * WARPS
    near = None
    if CAPACITY <= 4096:
        near = room_near(num_rows, CAPACITY)
    for index in range(gl.program_id(0), num_rows, gl.num_programs(0)):
        row = index.to(gl.int64)
        start, end = row_range(row_starts, row_ends, row, num_cols)
        size = end - start
        x = scores + row * stride_scores + start
        o = out + row * stride_out
        if size <= k:
            store_short_row(o, size, k, pages, row, PAGE_SIZE, WARPS, line_of_cluster(WARPS, 1))
        else:
            _row(
                x,
                o,
                lists,
                near,
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
                PAGE_SIZE,
            )
            barrier()  # the lists have been read


@dataclass(frozen=True)
class Plan(portable.Plan):
    """How a selection is spread over the device.

    Args:
        together: the warps of a slice fill one list.
    """

    together: bool = False

    @property
    def constants(self) -> dict[str, int]:
        return {"CAPACITY": self.capacity, "SAMPLE": self.sample}

    @property
    def collect_options(self) -> dict[str, Any]:
        return {"TOGETHER": self.together, "maxnreg": self.registers}

    @property
    def finish_options(self) -> dict[str, Any]:
        return {"maxnreg": 2048 // self.finish_warps, "launch_pdl": True}

    @property
    def tile(self) -> int:
        return TILE.value

    @property
    def num_lists(self) -> int:
        """Lists of a row."""
        return self.slices if self.together else self.slices * self.num_warps

    def limit(self, num_cols: int) -> int:
        """Entries that a list has room for: all that a row may have, or all columns of its part."""
        step = TILE.value * (self.num_warps if self.together else 1)
        part = triton.cdiv(num_cols, step * self.num_lists) * step + 16
        return min(self.capacity, part)


MAX_SAMPLE = 4096
"""More costs more time than rows whose list is made twice."""


FEW_SIGMAS = 3.2
"""Standard deviations that will do: of a thousand rows, one or two lists are made twice."""


def plan(num_rows: int, num_cols: int, topk: int, device: torch.device) -> Plan:
    """The plan for rows of this size; it depends on shapes only."""
    capacity, sample = _list_and_sample(max(1, num_cols), topk)
    processors = num_multiprocessors(device)
    slices = max(1, min(64, processors // max(num_rows, 1), num_cols // (8 * TILE.value)))
    slices = 1 << (slices.bit_length() - 1)
    if slices > 1:
        together = slices * 8 > 32
        how = Plan(slices, capacity, sample, num_rows, 8, 16, 128, together=together)
    elif num_rows <= processors:
        warps = 16 if num_cols > 1 << 16 or capacity > 4096 else 8
        how = Plan(1, capacity, sample, num_rows, warps, registers=2048 // warps)
    # Several programs for each multiprocessor: some wait for memory, others count in registers.
    elif num_cols >= 1 << 16 or capacity > 4096:
        how = Plan(1, capacity, sample, min(num_rows, 2 * processors), registers=128)
    else:
        how = Plan(1, capacity, sample, min(num_rows, 4 * processors), 4, registers=128)
    return portable.within_bound(how, num_cols)


def _list_and_sample(num_cols: int, topk: int) -> tuple[int, int]:
    """Capacity of a row's list and size of its sample, powers of two, that cost least together.

    A sample has ``m = topk * sample / num_cols`` of the best k, give or take sqrt(m). A threshold
    halfway, in standard deviations, between k and the capacity keeps
    ``sqrt(m) * (sqrt(capacity / topk) - 1)`` of them from both.
    """
    choices = []
    for capacity in (2048, 4096, 8192):
        room = max((capacity / topk) ** 0.5 - 1, 1e-3)
        wanted = triton.next_power_of_2(int(num_cols / topk * (SIGMAS.value / room) ** 2))
        sample = min(max(wanted, 1024), MAX_SAMPLE)
        if room * (topk * sample / num_cols) ** 0.5 >= FEW_SIGMAS:
            choices.append((sample + 2 * capacity, capacity, sample))
    _, capacity, sample = min(choices, default=(0, 8192, 2 * MAX_SAMPLE))
    return capacity, sample


launch = functools.partial(
    portable.launch, kernels=(_select_kernel, _collect_kernel, _finish_kernel)
)
"""Carry out a plan, for all rows at once."""

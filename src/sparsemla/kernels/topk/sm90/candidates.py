"""Selections by lists of candidates, for rows that registers do not hold.

The algorithm is the same as in the portable kernel (:mod:`sparsemla.kernels.topk.triton`):

1. ``_load_sample``, ``_estimate_threshold``: estimate a threshold, a value and a column, from a
   sample of the row; slightly more than k columns should reach it.
2. ``collect`` (:mod:`.collect`): one pass over the row lists the candidates that reach it.
3. ``rank_best`` (:mod:`.radix`): a radix search ranks the k best candidates in registers.

With enough rows for all multiprocessors, ``_select_kernel`` takes rows from sample to result. With
fewer rows, ``_collect_kernel`` lists slices of them and ``_finish_kernel`` does the third step. The
number of columns is that of the longest row that the caller allows, as in a captured graph: rows
that fit the registers of one CTA have no lists then.
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
from sparsemla.kernels.topk.arguments import SelectTopk
from sparsemla.kernels.topk.sm90.collect import (
    PREFETCHED,
    PREFETCHED_BY_MANY,
    TILE,
    allocate_entries,
    collect,
    in_layout,
    load_entries,
    load_shared_entries,
    prefetch_tiles,
    unpack_entries,
)
from sparsemla.kernels.topk.sm90.keys import (
    exclusive_sum,
    max_all,
    search_threshold,
    store_short_row,
    sum_all,
    sums_and_max,
    to_all_threads,
)
from sparsemla.kernels.topk.sm90.radix import cluster_layout, cluster_line_layout, rank_best
from sparsemla.kernels.topk.triton import (
    DEAD_KEY,
    END_KEY,
    MINUS_INF_KEY,
    NAN_KEY,
    RUNTIME,
    Pages,
    as_output,
    keys_of,
    ordered_bits,
    row_range,
)

SIGMAS = gl.constexpr(4.5)
"""Standard deviations between a threshold's rank and both limits of a list's length."""


NEIGHBOURS = gl.constexpr(16)
"""Adjacent columns of a sample: memory transfers 64 bytes at a time."""


@gluon.jit
def _normal_quantile(share):
    """Approximate ``z`` such that a small ``share`` of standard normal values exceeds ``z``.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.22.
    """
    t = gl.sqrt(-2.0 * gl.log(gl.minimum(share, 0.5)))
    return t - gl.fdiv(2.30753 + 0.27061 * t, 1.0 + 0.99229 * t + 0.04481 * t * t)


@gluon.jit
def _load_sample(x, size, SAMPLE: gl.constexpr, W: gl.constexpr):
    """Columns in ascending order, a few of them outside the row, and their values [W, N]."""
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 256 // NEIGHBOURS, NEIGHBOURS // 8], [W, 1, 1], [2, 1, 0]
    )
    CHUNKS: gl.constexpr = SAMPLE // NEIGHBOURS
    # Aligned neighbours from each of CHUNKS equal parts of the row, at irregular offsets: rows may
    # be periodic.
    INNER: gl.constexpr = gl.SliceLayout(2, L)
    warp = gl.arange(0, W, gl.SliceLayout(1, INNER))
    place = gl.arange(0, CHUNKS // W, gl.SliceLayout(0, INNER))
    chunk = warp[:, None] * (CHUNKS // W) + place[None, :]
    room = gl.minimum(gl.maximum(size // CHUNKS - NEIGHBOURS, 0), 0x7FFF)
    jitter = (chunk * 40503 & 0xFFFF) * room >> 16
    at = (chunk.to(gl.int64) * size // CHUNKS).to(gl.int32) + jitter
    SIZE: gl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    shift = (x.to(gl.int64) % (NEIGHBOURS * SIZE)).to(gl.int32) // SIZE
    shared = gl.arange(0, NEIGHBOURS, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    first = (at + shift) // NEIGHBOURS * NEIGHBOURS - shift
    ids = gl.expand_dims(first, 2) + gl.expand_dims(gl.expand_dims(shared, 0), 1)
    x = gl.load(x + ids, mask=(ids >= 0) & (ids < size), other=0.0)
    return gl.reshape(ids, [W, SAMPLE // W]), gl.reshape(x, [W, SAMPLE // W])


@gluon.jit
def _estimate_threshold(ids, x, size, k, factor, CAPACITY: gl.constexpr, W: gl.constexpr):
    """A threshold (key, column) that most likely between k and CAPACITY columns reach.

    Args:
        ids, x: a sample of the row.
        factor: 1 at first, then the factor by which the number of candidates should change.
    """
    SAMPLE: gl.constexpr = W * x.shape[1]
    inside = (ids >= 0) & (ids < size)
    x = x.to(gl.float32)
    key = gl.where(inside, keys_of(x), DEAD_KEY)
    ratio = gl.fdiv(SAMPLE * 1.0, size.to(gl.float32))
    most = k * ratio
    # Ranks in the sample with a margin to both k and CAPACITY; the middle if there is no room.
    low = most + gl.sqrt(most) * SIGMAS + 2.0
    root = (gl.sqrt(ratio * (4 * CAPACITY) + SIGMAS * SIGMAS) - SIGMAS) * 0.5
    low = gl.minimum(gl.minimum(low, 0.5 * (low + root * root)) * factor, SAMPLE * 1.0)
    slack = gl.sqrt(low) * 0.3
    up = gl.maximum(low + slack, gl.minimum(low * 1.2 + 4.0, root * root))
    low = gl.minimum(low, up - 2 * slack)
    up = up.to(gl.int32)
    low = gl.maximum(low, 1.0).to(gl.int32)
    # The search starts at these ranks of a normal distribution with the mean and deviation of x.
    small = gl.where(inside & (gl.abs(x) < 1e15), x, 0.0)
    mean, square, top = sums_and_max(small, small * small, key, W)
    mean = mean * (1.0 / SAMPLE)
    deviation = gl.sqrt(gl.maximum(square * (1.0 / SAMPLE) - mean * mean, 0.0))
    share = (low + up).to(gl.float32) * (0.5 / SAMPLE)
    dead = size * 0 + DEAD_KEY
    a = gl.maximum(ordered_bits(mean + _normal_quantile(1.1 * share) * deviation), DEAD_KEY + 1)
    a = gl.minimum(a, top)
    b = gl.minimum(
        gl.maximum(ordered_bits(mean + _normal_quantile(0.92 * share) * deviation), a), top
    )
    threshold, reached, above = search_threshold(
        key, dead, top + 1, dead * 0 + SAMPLE, a, b, low, up, W
    )
    column = size
    if reached > up:  # a plateau; the sample is in column order
        equal = key == threshold
        before, _ = exclusive_sum(equal.to(gl.int32), W)
        cut = gl.where(equal & (before + 1 >= (low + up) // 2 - above), ids + 1, size)
        column = -max_all(-cut, W)
    return gl.maximum(threshold, MINUS_INF_KEY), column


@gluon.jit
def _exact_threshold(x, size, k, CAPACITY: gl.constexpr, W: gl.constexpr):
    """A threshold for arbitrary rows, by counting passes over the row.

    Returns (key, columns that reach it, columns that reach the next key). The first count lies in
    [k, CAPACITY]; if no key has such a count, the threshold is the k-th largest key.
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
        a = klo + 1  # one pass is enough for a plateau of equal values at the threshold
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
def _store_chosen(
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
    """Store the ids of keys above the threshold, and of the first ``ties`` keys equal to it.

    ``above`` and ``level`` count both kinds in earlier blocks. Returns both counts with this block.
    """
    over = key > threshold
    equal = key == threshold
    before, total = exclusive_sum(over.to(gl.int32) + (equal.to(gl.int32) << 16), W)
    equal_before = level + (before >> 16)
    place = above + (before & 0xFFFF) + gl.minimum(equal_before, ties)
    chosen = over | (equal & (equal_before < ties))
    gl.store(out + place, as_output(ids, chosen, pages, row, PAGE_SIZE), mask=chosen)
    return above + (total & 0xFFFF), level + (total >> 16)


@gluon.jit
def _sources(counts, j, pitch, LISTS: gl.constexpr):
    """Offsets of the entries ``j``, counted through all lists."""
    source = j
    upto = pitch * 0
    for i in range(LISTS):
        length = gl.load(counts + i)
        upto += length
        source += gl.where(j >= upto, pitch - length, 0)
    return source


@gluon.jit
def _select_row(
    x,
    out,
    lists,
    shared,
    counts,
    limit,
    size,
    k,
    pages,
    row,
    MUST_COLLECT: gl.constexpr,
    LISTS: gl.constexpr,
    CAPACITY: gl.constexpr,
    SAMPLE: gl.constexpr,
    W: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """Store the ids of a row of more than k columns.

    A row of more than CAPACITY columns has LISTS lists of candidates, of lengths ``counts``; with
    MUST_COLLECT they are yet to be collected. Lists with too many or too few entries are collected
    once more, by this CTA alone. ``shared`` is the address of a copy in shared memory, or None; it
    has the first SHARE entries of each list that this CTA collects.
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
    own = warp * 0  # length of each warp's list
    key = size * 0 + NAN_KEY
    # Most lists fit their share of the registers.
    pitch = limit + TILE
    SHARE: gl.constexpr = CAPACITY // LISTS
    if not MUST_COLLECT:
        entry = (j * 0).to(gl.int64)
        live = j < 0
    if size > CAPACITY:
        tries = size * 0
        count = size * 0
        if not MUST_COLLECT:
            tries += 1
            lengths = gl.load(counts + each)
            # Also loads entries after the ends of the lists: waiting for the lengths is slower.
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
                at, values = _load_sample(x, size, SAMPLE, W)
                if MUST_COLLECT and W < 16:  # sixteen warps have enough loads in flight anyway
                    prefetch_tiles(x, size, 0, 1, PREFETCHED_BY_MANY, W, False)
                key, column = _estimate_threshold(at, values, size, k, factor, CAPACITY, W)
            else:
                key, reached, above = _exact_threshold(x, size, k, CAPACITY, W)
                exact = reached > CAPACITY
            tries += 1
            if not exact:
                barrier()  # the lengths have been read
                if not MUST_COLLECT:
                    gl.store(counts + each, each * 0)
                    barrier()
                room = limit
                if not MUST_COLLECT:
                    room = size * 0 + CAPACITY
                added = collect(
                    x,
                    lists,
                    shared,
                    counts,
                    room,
                    size,
                    key,
                    column,
                    0,
                    1,
                    W,
                    not MUST_COLLECT,
                    SHARE,
                )
                barrier()  # the lists and their lengths have been written
                added = in_layout(added, gl.BlockedLayout([1], [32], [W], [0]))
                of_warp = gl.max(gl.reshape(added, [W, 32]), 1)
                if MUST_COLLECT:
                    own = in_layout(of_warp, gl.SliceLayout(1, L))
                    every = to_all_threads(of_warp, W)
                    count = gl.sum(every, 0)
                    longest = gl.max(every, 0)
                else:
                    count = gl.max(to_all_threads(of_warp, W), 0)
                    longest = size
        if exact:
            over = above * 0
            level = above * 0
            for base in range(0, size, CAPACITY):
                ids = base + j
                values = gl.load(x + ids, mask=ids < size, other=0.0).to(gl.float32)
                keys = gl.where(ids < size, keys_of(values), DEAD_KEY)
                over, level = _store_chosen(
                    out, ids, keys, key, over, level, k - above, pages, row, PAGE_SIZE, W
                )
    if not exact:
        ids = j
        if size <= CAPACITY:
            values = gl.load(x + j, mask=j < size, other=0.0).to(gl.float32)
            live = j < size
        else:
            if MUST_COLLECT:
                live = lane[None, :] < own[:, None]
                if longest > SHARE:
                    live = j < count
                    ids, values = load_entries(lists + _sources(counts, j, pitch, LISTS), live)
                elif shared is None:
                    ids, values = load_entries(lists + (j // SHARE * pitch + j % SHARE), live)
                else:
                    ids, values = load_shared_entries(shared + j * 8)
            elif longest > SHARE:
                live = j < count
                ids, values = load_entries(lists + _sources(counts, j, pitch, LISTS), live)
            else:
                ids, values = unpack_entries(entry)
        keys = gl.where(live, keys_of(values), DEAD_KEY)
        place = rank_best(keys, k, key, 1)  # all candidates reach the threshold
        gl.store(out + place, as_output(ids, place >= 0, pages, row, PAGE_SIZE), mask=place >= 0)


@gluon.jit
def _select_row_in_registers(
    x,
    out,
    size,
    k,
    pages,
    row,
    MAX_COLS: gl.constexpr,
    W: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """Store the ids of a row of more than k and up to MAX_COLS columns, all in registers."""
    L: gl.constexpr = cluster_layout(W, 1)
    share = gl.cdiv(size, W * 128) * 128
    warp = gl.arange(0, W, gl.SliceLayout(1, L))
    lane = gl.arange(0, MAX_COLS // W, gl.SliceLayout(0, L))
    column = warp[:, None] * share + lane[None, :]
    live = (lane < share)[None, :] & (column < size)
    values = gl.load(x + column, mask=live, other=0.0).to(gl.float32)
    place = rank_best(gl.where(live, keys_of(values), DEAD_KEY), k, None, 1)
    gl.store(out + place, as_output(column, place >= 0, pages, row, PAGE_SIZE), mask=place >= 0)


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
    MAX_COLS: gl.constexpr,
):
    """Collect the candidates of one slice of a row of more than MAX_COLS columns."""
    gdc_launch_dependents()
    LISTS: gl.constexpr = 1 if TOGETHER else WARPS
    row = gl.program_id(0).to(gl.int64) // slices
    index = gl.program_id(0) % slices
    start, end = row_range(row_starts, row_ends, row, num_cols)
    size = end - start
    if (size > k) & (size > MAX_COLS):
        x = scores + row * stride_scores + start
        # All slices of a row compute the same threshold.
        ids, values = _load_sample(x, size, SAMPLE, WARPS)
        prefetch_tiles(x, size, index, slices, PREFETCHED, WARPS, TOGETHER)
        key, column = _estimate_threshold(ids, values, size, k, 1.0, CAPACITY, WARPS)
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
    MAX_COLS: gl.constexpr,
):
    """Select the ids of one row, from its slices' candidates or from up to MAX_COLS columns."""
    pages = Pages(table, request_ids, num_requests, width, stride)
    gdc_launch_dependents()
    gdc_wait()
    row = gl.program_id(0).to(gl.int64)
    start, end = row_range(row_starts, row_ends, row, num_cols)
    size = end - start
    x = scores + row * stride_scores + start
    o = out + row * stride_out
    if size <= k:
        store_short_row(o, size, k, pages, row, PAGE_SIZE, WARPS, cluster_line_layout(WARPS, 1))
    elif size <= MAX_COLS:
        _select_row_in_registers(x, o, size, k, pages, row, MAX_COLS, WARPS, PAGE_SIZE)
    else:
        lists += row * LISTS * (limit + TILE)
        counts += row * LISTS
        _select_row(
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
    """Select the ids of whole rows, one after the other; their lists share the same memory."""
    pages = Pages(table, request_ids, num_requests, width, stride)
    lists += gl.program_id(0).to(gl.int64) * WARPS * (limit + TILE)
    counts += gl.program_id(0) * WARPS
    shared = None
    if CAPACITY <= 4096:
        shared = allocate_entries(num_rows, CAPACITY)
    for index in range(gl.program_id(0), num_rows, gl.num_programs(0)):
        row = index.to(gl.int64)
        start, end = row_range(row_starts, row_ends, row, num_cols)
        size = end - start
        x = scores + row * stride_scores + start
        o = out + row * stride_out
        if size <= k:
            store_short_row(o, size, k, pages, row, PAGE_SIZE, WARPS, cluster_line_layout(WARPS, 1))
        else:
            _select_row(
                x,
                o,
                lists,
                shared,
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
class Sm90ListSchedule(portable.ListSchedule):
    """The portable schedule, for CTAs with warps that may share a list.

    Args:
        together: the warps of a slice fill one list, so that a row has at most 32 lists.
    """

    together: bool = False

    @property
    def constants(self) -> dict[str, int]:
        return {"CAPACITY": self.capacity, "SAMPLE": self.sample}

    @property
    def collect_options(self) -> dict[str, Any]:
        return {"TOGETHER": self.together, "MAX_COLS": self.max_cols, "maxnreg": self.registers}

    @property
    def finish_options(self) -> dict[str, Any]:
        return {
            "MAX_COLS": self.max_cols,
            "maxnreg": 2048 // self.finish_warps,
            "launch_pdl": True,
        }

    @property
    def max_cols(self) -> int:
        """Columns that the registers of the program hold that finishes a row."""
        return 1024 * self.finish_warps

    @property
    def tile(self) -> int:
        return TILE.value

    @property
    def num_lists(self) -> int:
        """Lists of a row."""
        return self.slices if self.together else self.slices * self.num_warps

    def limit(self, num_cols: int) -> int:
        """Entries of a list: the capacity of the row, or all columns of the list's part."""
        step = TILE.value * (self.num_warps if self.together else 1)
        part = triton.cdiv(num_cols, step * self.num_lists) * step + 16
        return min(self.capacity, part)


MAX_SAMPLE = 4096
"""A larger sample costs more time than the rare second collection of a row."""


FEW_SIGMAS = 3.2
"""Sufficient margin in standard deviations: one or two rows in a thousand are collected twice."""


def schedule_lists(
    num_rows: int, num_cols: int, topk: int, device: torch.device
) -> Sm90ListSchedule:
    """The schedule for rows of this size; it depends on shapes only."""
    capacity, sample = _list_and_sample(max(1, num_cols), topk)
    processors = num_multiprocessors(device)
    slices = max(1, min(64, processors // max(num_rows, 1), num_cols // (8 * TILE.value)))
    slices = 1 << (slices.bit_length() - 1)
    if slices > 1:
        together = slices * 8 > 32
        schedule = Sm90ListSchedule(
            slices, capacity, sample, num_rows, 8, 16, 128, together=together
        )
    elif num_rows <= processors:
        warps = 16 if num_cols > 1 << 16 or capacity > 4096 else 8
        schedule = Sm90ListSchedule(1, capacity, sample, num_rows, warps, registers=2048 // warps)
    # Several CTAs per multiprocessor: some wait for memory while others search in registers.
    elif num_cols >= 1 << 16 or capacity > 4096:
        schedule = Sm90ListSchedule(
            1, capacity, sample, min(num_rows, 2 * processors), registers=128
        )
    else:
        schedule = Sm90ListSchedule(
            1, capacity, sample, min(num_rows, 4 * processors), 4, registers=128
        )
    return portable.within_list_bytes(schedule, num_cols)


def _list_and_sample(num_cols: int, topk: int) -> tuple[int, int]:
    """The cheapest pair of capacity and sample size, powers of two, with enough margin.

    A sample holds ``m = topk * sample / num_cols`` of the best k, with a standard deviation of
    sqrt(m). A threshold halfway between k and the capacity then has a margin of
    ``sqrt(m) * (sqrt(capacity / topk) - 1)`` standard deviations to both.
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


_launch = functools.partial(
    portable.launch, kernels=(_select_kernel, _collect_kernel, _finish_kernel)
)
"""Launch a schedule for all rows at once."""


def select_topk(call: SelectTopk) -> None:
    portable.launch_in_chunks(_launch, schedule_lists, call)

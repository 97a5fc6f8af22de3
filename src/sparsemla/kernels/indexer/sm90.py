"""Indexer scores on Hopper: keys on M of an FP8 product, the heads of a few query tokens on N.

As many programs as there are multiprocessors divide the tiles of keys, of all groups of query
tokens, evenly among them; each finds its share from the tokens' ranges. In a program two
warpgroups take turns with the tiles: the scores of one tile are summed over the heads while the
other's are multiplied. A warp copies queries and keys ahead of them, and two more write the columns
that no token sees.

An element of the product costs a thread one maximum and one multiply-add, and a token's heads lie
in four lanes, which put their sums together once for a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import PropagateNan
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsemla.cache import PagedCache
from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.gluon import async_load, reinterpret, tma_load
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.common.paged import page_and_row
from sparsemla.kernels.indexer import triton as portable
from sparsemla.kernels.topk.sm90 import SELECTION

COPY = gl.constexpr(64)
"""Keys that are copied at once: a page holds a multiple of them."""
CONSUMERS = gl.constexpr(2)
MAX_COLUMNS = 256
RING_KEYS = 512
"""Keys on their way, 64 KiB: fewer do not fill the memory, twice as many are slower again.

Their tiles are a multiple of the consumers: each waits for its own places, by parity, and sees
every lap of them.
"""

MINUS_INF = gl.constexpr(float("-inf"))
NAN_TOO = gl.constexpr(PropagateNan.ALL)
LANES = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
FILL = gl.constexpr(gl.BlockedLayout([1], [32], [2], [0]))
FILL_AT_ONCE = gl.constexpr(4096)
GROUPS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Queries(NamedTuple):
    """Query tokens: ``query_len`` of each request, or those between its offsets.

    A token sees the keys between its start and its end, or up to its end: one of its own, or what
    its request's length leaves to it. Tokens with up to ``skip`` keys are left out. ``first`` is
    what offsets are counted from. ``rows``: where the ends of ragged requests' tokens are written,
    and their requests ``rows_request`` behind.

    The last ones, which change from batch to batch, are arguments of their own in a launch.
    """

    weights: Tensor
    weights_request: int
    weights_token: int
    row_starts: Tensor | None
    row_ends: Tensor
    ends_request: int
    offsets: Tensor | None
    skip: int
    search_steps: int
    rows: Tensor | None
    out: Tensor
    out_request: int
    out_token: int
    num_keys: int
    first: int
    rows_request: int
    num_requests: int
    query_len: int


class Keys(NamedTuple):
    """Scales of the keys, and the pages that a table names; contiguous keys are one page."""

    scales: Tensor | None
    scale_page: int
    scale_row: int
    page_table: Tensor | None
    table_request: int
    table_width: int
    num_pages: int


class Layout(NamedTuple):
    """Constants of a kernel.

    Args:
        tokens: query tokens of a group.
        heads: of a token.
        block_h: heads, padded.
        block_d: dims, padded.
        parts: products of a tile, each with the heads of as many tokens.
        keys: of a tile, which is copied in one piece or two.
        ring: tiles of keys on their way.
        own_ends: each token has an end of its own, otherwise each request.
        causal: the last token of a request sees all of its keys, the one before it one less.
        page_size: keys of a page, 0 if they are contiguous.
    """

    tokens: int
    heads: int
    block_h: int
    block_d: int
    parts: int
    keys: int
    ring: int
    own_ends: bool
    causal: bool
    page_size: int


class Group(NamedTuple):
    """Request of a group of tokens, its first token, and the token that ends the request."""

    request: int
    first: int
    stop: int


@triton.constexpr_function
def tile_layout(block_d, rank):
    return gl.NVMMASharedLayout(block_d, 8, rank)


@triton.constexpr_function
def sums_layout(tokens, keys):
    """Sums ``[keys, tokens, 4]``, all four in one thread.

    The four lanes that have the same keys in a product have tokens of their own here, or the upper
    eight keys.
    """
    bits = [[0, 1 << bit, 0] for bit in range(tokens.bit_length() - 1)]
    bits += [[8, 0, 0], [0, 0, 0]]
    more = [base for base in bits[2:] if any(base)] + [[64, 0, 0]] * (keys == 128)
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], *more],
        [*bits[:2], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [keys, tokens, 4],
    )


@gluon.jit
def offset_of(queries, request):
    """First token of a request, counted from the first of all, where the first request begins."""
    offset = gl.load(queries.offsets + request) - queries.first
    offset = gl.minimum(gl.maximum(offset, 0), queries.query_len).to(gl.int32)
    return gl.where(request > 0, offset, 0)


@gluon.jit
def find_group(queries, group, L: gl.constexpr):
    """Where the tokens of groups are.

    Ragged requests: the groups of request b are numbered from ``offsets[b] // tokens + b``, which
    leaves room for all of them without a sum; tokens behind the last request form one more.
    """
    if queries.offsets is None:
        groups = gl.cdiv(queries.query_len, L.tokens)
        request = group // groups
        first = group % groups * L.tokens
        stop = gl.where(request < queries.num_requests, queries.query_len, 0)
    else:
        request = group * 0
        last = request + queries.num_requests
        for _ in range(queries.search_steps):
            middle = (request + last + 1) // 2
            before = offset_of(queries, middle) // L.tokens + middle <= group
            request = gl.where(before, middle, request)
            last = gl.where(before, last, middle - 1)
        opens = offset_of(queries, request)
        first = opens + (group - (opens // L.tokens + request)) * L.tokens
        real = request < queries.num_requests
        closes = offset_of(queries, gl.where(real, request + 1, request))
        stop = gl.where(real, closes, queries.query_len)
    return Group(request, first, stop)


@gluon.jit
def seen_by(queries, group, token, L: gl.constexpr):
    """First key that a token of a group sees, and the one behind its last."""
    real = token < group.stop
    if queries.row_starts is not None:
        start = gl.load(queries.row_starts + token, mask=real, other=0)
        start = gl.minimum(gl.maximum(start, 0), queries.num_keys).to(gl.int32)
        end = gl.load(queries.row_ends + token, mask=real, other=0)
    else:
        start = token * 0
        real = real & (group.request < queries.num_requests)
        if queries.offsets is not None:  # tokens before the first request see nothing
            opens = gl.load(queries.offsets + group.request + token * 0, mask=real)
            real = real & (token >= opens - queries.first)
        at = queries.row_ends + group.request.to(gl.int64) * queries.ends_request + token * 0
        if L.own_ends:
            at += token
        end = gl.maximum(gl.load(at, mask=real, other=0), 0)
        if L.causal:
            if queries.offsets is None:
                end -= queries.query_len - 1 - token
            else:
                closes = gl.load(queries.offsets + group.request + 1 + token * 0, mask=real)
                end -= closes - queries.first - 1 - token
    end = gl.where(real, gl.minimum(gl.maximum(end, 0), queries.num_keys), 0)
    return start, end.to(gl.int32)


@gluon.jit
def tiles_of(queries, group, L: gl.constexpr):
    """First tile, and number of tiles, of the keys that any token of a group sees."""
    TOKENS: gl.constexpr = L.tokens
    if queries.row_starts is not None or L.own_ends:
        low = group.first * 0 + queries.num_keys
        high = group.first * 0
        for t in gl.static_range(TOKENS):
            start, end = seen_by(queries, group, group.first + t, L)
            low = gl.where(start < end, gl.minimum(low, start), low)
            high = gl.where(start < end, gl.maximum(high, end), high)
    else:
        low = group.first * 0
        last = gl.minimum(group.first + TOKENS, group.stop) - 1
        _, high = seen_by(queries, group, last, L)
        high = gl.where((last >= group.first) & (high > queries.skip), high, 0)
    first_tile = low // L.keys
    return first_tile, gl.maximum((high + L.keys - 1) // L.keys - first_tile, 0)


@triton.constexpr_function
def some_groups(L):
    """Groups to look at at a time."""
    return 1024 if L.page_size == 0 else 128


@triton.constexpr_function
def groups_layout(at_once):
    """Each warp has all of 128 groups, so that their sums need no barrier."""
    return gl.BlockedLayout([4 if at_once == 128 else 1], [32], [4], [0])


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def tiles_from(queries, base, num_groups, L: gl.constexpr):
    """Numbers of tiles of the groups from ``base`` on."""
    AT_ONCE: gl.constexpr = some_groups(L)
    index = base + gl.arange(0, AT_ONCE, groups_layout(AT_ONCE))
    _, tiles = tiles_of(queries, find_group(queries, index, L), L)
    return gl.where(index < num_groups, tiles, 0)


@gluon.jit
def pass_groups(tiles, begin, passed, behind, before):
    """Count groups that end before a program begins, and the tiles up to the last of them."""
    ends = gl.associative_scan(tiles, 0, add) + before
    done = ends <= begin
    passed += gl.sum(done.to(gl.int32), 0)
    behind = gl.maximum(behind, gl.max(gl.where(done, ends, 0), 0))
    return passed, behind, before + gl.sum(tiles, 0)


@gluon.jit
def share_of_program(queries, num_groups, L: gl.constexpr):
    """Group where the program begins, its tiles that others do, and how many tiles to do."""
    AT_ONCE: gl.constexpr = some_groups(L)
    some = tiles_from(queries, 0, num_groups, L)  # mostly all there are
    total = gl.sum(some, 0)
    for base in range(AT_ONCE, num_groups, AT_ONCE):
        total += gl.sum(tiles_from(queries, base, num_groups, L), 0)
    each = gl.cdiv(total, gl.num_programs(0))
    begin = gl.minimum(gl.program_id(0) * each, total)
    passed, behind, before = pass_groups(some, begin, 0, 0, 0)
    for base in range(AT_ONCE, num_groups, AT_ONCE):
        some = tiles_from(queries, base, num_groups, L)
        passed, behind, before = pass_groups(some, begin, passed, behind, before)
    return passed, begin - behind, gl.minimum(each, total - begin)


@gluon.jit
def copy_queries(q, queries, group, q_tile, w_tile, full, L: gl.constexpr):
    """Start to copy the heads of a group's tokens; store their weights."""
    TOKENS: gl.constexpr = L.tokens
    BLOCK_H: gl.constexpr = L.block_h
    BLOCK_D: gl.constexpr = L.block_d
    mbarrier.expect(full, TOKENS * BLOCK_H * BLOCK_D)
    shape: gl.constexpr = [1, TOKENS, BLOCK_H, BLOCK_D]
    to = reinterpret(q_tile, gl.float8e4nv, shape, tile_layout(BLOCK_D, 4))
    request = group.request if queries.offsets is None else 0
    tma_load(q, [request, group.first, 0, 0], full, to)
    i = gl.arange(0, TOKENS * BLOCK_H, LANES)
    token = group.first + i // BLOCK_H
    head = i % BLOCK_H
    at = queries.weights + token.to(gl.int64) * queries.weights_token + head
    if queries.offsets is None:
        at += group.request.to(gl.int64) * queries.weights_request
    w = gl.load(at, mask=(token < group.stop) & (head < L.heads), other=0.0)
    w_tile.store(w.to(gl.float32))
    mbarrier.arrive(full, count=1)


@gluon.jit
def page_ids(keys, request, n, L: gl.constexpr):
    """What the table says of a request's keys."""
    column = n // L.page_size
    at = keys.page_table + request.to(gl.int64) * keys.table_request + column
    return gl.load(at, mask=column < keys.table_width, other=-1)


@gluon.jit
def copy_keys(k, keys, page, row, count, key_place, scale_place, full, L: gl.constexpr):
    """Start to copy keys from a row of a page, zeros without one, and their scales."""
    tma_load(k, [page, row, 0], full, key_place)
    if keys.scales is not None:
        i = gl.arange(0, COPY, LANES)
        at = keys.scales + page.to(gl.int64) * keys.scale_page + (row + i) * keys.scale_row
        async_load(scale_place, at, mask=i < count)


@gluon.jit
def places_of(key_ring, L: gl.constexpr):
    """The ring, as the pieces in which its tiles are copied."""
    shape: gl.constexpr = [L.ring * L.keys // COPY, 1, COPY, L.block_d]
    return reinterpret(key_ring, gl.float8e4nv, shape, tile_layout(L.block_d, 3))


@gluon.jit
def place_of(count, SIZE: gl.constexpr):
    """Place in a ring of a power of two, and the parity of the pass through it."""
    return count & (SIZE - 1), (count & SIZE) // SIZE


@gluon.jit
def produce(q, k, queries, keys, work, memory, L: gl.constexpr):
    """The warp that copies."""
    index, skip, left = work
    q_tiles, w_tiles, key_ring, scale_ring, q_full, q_empty, full, empty, _ = memory
    COPIES: gl.constexpr = L.keys // COPY
    AT_ONCE: gl.constexpr = 32 // COPIES
    key_places = places_of(key_ring, L)
    scale_places = reinterpret(scale_ring, gl.float32, [L.ring * COPIES, COPY], PLAIN)
    lane = gl.arange(0, 32, LANES)
    count = left * 0
    item = left * 0
    while left > 0:
        group = find_group(queries, index, L)
        first_tile, tiles = tiles_of(queries, group, L)
        tiles = gl.minimum(tiles - skip, left)
        if tiles > 0:
            slot, parity = place_of(item, 2)
            mbarrier.wait(q_empty.index(slot), parity ^ 1)
            copy_queries(
                q, queries, group, q_tiles.index(slot), w_tiles.index(slot), q_full.index(slot), L
            )
            item += 1
            first_tile += skip
            last_tile = first_tile + tiles
            if L.page_size > 0:
                n = (first_tile * COPIES + lane) * COPY
                following = page_ids(keys, group.request, n, L)
            for base in range(first_tile, last_tile, AT_ONCE):
                if L.page_size > 0:
                    # Pages of 32 copies at a time: loads that a loop carries are waited for.
                    real = (following >= 0) & (following < keys.num_pages)
                    pages = gl.where(real, following, -1).to(gl.int32)
                    n = ((base + AT_ONCE) * COPIES + lane) * COPY
                    following = page_ids(keys, group.request, n, L)
                for tile in range(base, gl.minimum(base + AT_ONCE, last_tile)):
                    slot, parity = place_of(count, L.ring)
                    mbarrier.wait(empty.index(slot), parity ^ 1)
                    mbarrier.expect(full.index(slot), L.keys * L.block_d)
                    for i in gl.static_range(COPIES):
                        row = tile * L.keys + i * COPY
                        if L.page_size > 0:
                            mine = lane == (tile - base) * COPIES + i
                            page = gl.sum(gl.where(mine, pages, 0), 0)
                            row = row % L.page_size
                            num_scales = gl.where(page < 0, 0, COPY)
                        else:
                            page = tile * 0
                            num_scales = queries.num_keys - row
                        copy_keys(
                            k,
                            keys,
                            page,
                            row,
                            num_scales,
                            key_places.index(slot * COPIES + i),
                            scale_places.index(slot * COPIES + i),
                            full.index(slot),
                            L,
                        )
                    if keys.scales is not None:
                        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
                    count += 1
        left -= gl.maximum(tiles, 0)
        skip = 0
        index += 1


@gluon.jit
def halves(x):
    """Both halves of the last dim."""
    HALF: gl.constexpr = x.shape[2] // 2
    return gl.split(x.reshape(x.shape[0], x.shape[1], 2, HALF).permute(0, 1, 3, 2))


@gluon.jit
def add_products(total, x, w):
    """``total + sum(x * w)`` over the last dim, one multiply-add after the other."""
    if x.shape[2] > 1:
        x0, x1 = halves(x)
        w0, w1 = halves(w)
        total = add_products(add_products(total, x0, w0), x1, w1)
    elif total is None:
        total = x * w
    else:
        total = gl.fma(x, w, total)
    return total


@gluon.jit
def by_lane(x, L: gl.constexpr):
    """Columns of a product as ``[rows, tokens * 4, heads of a lane]``."""
    TOKENS: gl.constexpr = x.shape[1] // L.block_h
    x = x.reshape(x.shape[0], TOKENS, L.block_h // 8, 4, 2).permute(0, 1, 3, 2, 4)
    return x.reshape(x.shape[0], TOKENS * 4, L.block_h // 4)


@gluon.jit
def weigh(dots, w, L: gl.constexpr):
    """``sum_h w[t, h] * relu(dots)`` over the heads of each lane, ``[keys, tokens, 4]``."""
    x = by_lane(gl.maximum(dots, 0.0, propagate_nan=NAN_TOO), L)
    w = by_lane(w[None, :].broadcast_to(L.keys, w.shape[0]), L)
    return add_products(None, x, w).reshape(L.keys, dots.shape[1] // L.block_h, 4)


@gluon.jit
def start_product(keys, q_tile, PART: gl.constexpr, DOTS: gl.constexpr):
    """Start to multiply a tile of keys with the heads of a part of the tokens."""
    WIDTH: gl.constexpr = DOTS.instr_shape[1]
    KEYS: gl.constexpr = keys.shape[0]
    dots = gl.zeros([KEYS, WIDTH], gl.float32, DOTS)
    heads = q_tile.slice(PART * WIDTH, WIDTH).permute((1, 0))
    return warpgroup_mma(keys, heads, dots, use_acc=False, is_async=True)


@gluon.jit
def both(low, high):
    """Sums of the tokens of two parts."""
    KEYS: gl.constexpr = low.shape[0]
    TOKENS: gl.constexpr = 2 * low.shape[1]
    return gl.join(low, high).permute(0, 3, 1, 2).reshape(KEYS, TOKENS, 4)


@triton.constexpr_function
def takes_turns(L):
    """Whether only one consumer multiplies at a time.

    Narrow products wait for memory: taking turns would only delay them.
    """
    return L.tokens * L.block_h == 256


@gluon.jit
def consume(queries, keys, work, memory, L: gl.constexpr, WHO: gl.constexpr):
    """One of the warpgroups that score: every other tile is its own."""
    index, skip, left = work
    q_tiles, w_tiles, key_ring, scale_ring, q_full, q_empty, full, empty, turn = memory
    KEYS: gl.constexpr = L.keys
    PARTS: gl.constexpr = L.parts
    TURNS: gl.constexpr = takes_turns(L)
    WIDTH: gl.constexpr = L.tokens * L.block_h // PARTS
    DOTS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    SUMS: gl.constexpr = sums_layout(L.tokens, KEYS)
    ROWS: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, SUMS))
    TOKENS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, SUMS))
    in_tile = 0
    if KEYS > COPY:
        in_tile = gl.arange(0, KEYS, ROWS)  # may have pages of their own
    count = left * 0
    item = left * 0
    while left > 0:
        group = find_group(queries, index, L)
        first_tile, tiles = tiles_of(queries, group, L)
        tiles = gl.minimum(tiles - skip, left)
        if tiles > 0:
            token = group.first + gl.arange(0, L.tokens, TOKENS)
            start, end = seen_by(queries, group, token, L)
            real = token < group.stop
            out = queries.out + token.to(gl.int64) * queries.out_token
            if queries.offsets is None:
                out += group.request.to(gl.int64) * queries.out_request
            mine = (WHO + count) & 1
            base = (first_tile + skip + mine) * KEYS
            if L.page_size > 0:
                following = page_ids(keys, group.request, base + in_tile, L)
            q_slot, parity = place_of(item, 2)
            mbarrier.wait(q_full.index(q_slot), parity)
            w0 = w_tiles.index(q_slot).slice(0, WIDTH).load(gl.SliceLayout(0, DOTS))
            if PARTS == 2:
                w1 = w_tiles.index(q_slot).slice(WIDTH, WIDTH).load(gl.SliceLayout(0, DOTS))
            for i in range(mine, tiles, CONSUMERS):
                n = base + gl.arange(0, KEYS, ROWS)
                inside = (n[:, None] >= start[None, :]) & (n[:, None] < end[None, :])
                base += CONSUMERS * KEYS
                if L.page_size > 0:
                    real_page = (following >= 0) & (following < keys.num_pages)
                    if KEYS > COPY:
                        real_page = real_page[:, None]
                    inside = inside & real_page
                    following = page_ids(keys, group.request, base + in_tile, L)
                slot, parity = place_of(count + i, L.ring)
                mbarrier.wait(full.index(slot), parity)
                if TURNS:
                    _, parity = place_of(count + i, 2)
                    mbarrier.wait(turn.index(WHO), parity ^ (1 - WHO))
                d0 = start_product(key_ring.index(slot), q_tiles.index(q_slot), 0, DOTS)
                if PARTS == 2:
                    d1 = start_product(key_ring.index(slot), q_tiles.index(q_slot), 1, DOTS)
                scale = gl.full([KEYS], 1.0, gl.float32, ROWS)
                if keys.scales is not None:
                    scale = scale_ring.index(slot).load(ROWS)
                if PARTS == 2:
                    d0, d1 = warpgroup_mma_wait(1, deps=[d0, d1])
                    if TURNS:
                        mbarrier.arrive(turn.index(1 - WHO), count=1)
                    low = weigh(d0, w0, L)
                    d1 = warpgroup_mma_wait(0, deps=[d1])
                    mbarrier.arrive(empty.index(slot), count=1)
                    sums = both(low, weigh(d1, w1, L))
                else:
                    d0 = warpgroup_mma_wait(0, deps=[d0])
                    if TURNS:
                        mbarrier.arrive(turn.index(1 - WHO), count=1)
                    mbarrier.arrive(empty.index(slot), count=1)
                    sums = weigh(d0, w0, L)
                scores = gl.sum(gl.convert_layout(sums, SUMS), 2) * scale[:, None]
                gl.store(
                    out[None, :] + n[:, None],
                    gl.where(inside, scores, MINUS_INF),
                    mask=(n < queries.num_keys)[:, None] & real[None, :],
                )
            mbarrier.arrive(q_empty.index(q_slot), count=1)
            count += tiles
            item += 1
        left -= gl.maximum(tiles, 0)
        skip = 0
        index += 1


@gluon.jit
def fill_columns(row, begin, end):
    """-inf in columns of a row."""
    for base in range(begin, end, 256):
        n = base + gl.arange(0, 256, FILL)
        gl.store(row + n, MINUS_INF, mask=n < end)


@gluon.jit
def fill(queries, num_groups, L: gl.constexpr):
    """Write the columns of tiles that no token of a group sees; of ragged requests, the ends."""
    blocks = gl.cdiv(queries.num_keys, FILL_AT_ONCE)
    if queries.rows is not None:
        blocks = 1
    for unit in range(gl.program_id(0), num_groups * blocks, gl.num_programs(0)):
        group = find_group(queries, unit // blocks, L)
        if queries.rows is not None:
            token = group.first + gl.arange(0, L.tokens, FILL)
            _, end = seen_by(queries, group, token, L)
            real = token < group.stop
            gl.store(queries.rows + token, end, mask=real)
            gl.store(queries.rows + queries.rows_request + token, group.request, mask=real)
        else:
            first_tile, tiles = tiles_of(queries, group, L)
            begin = unit % blocks * FILL_AT_ONCE
            end = gl.minimum(begin + FILL_AT_ONCE, queries.num_keys)
            low = gl.minimum(first_tile * L.keys, end)
            high = gl.maximum((first_tile + tiles) * L.keys, begin)
            out = queries.out + group.request.to(gl.int64) * queries.out_request
            for token in range(group.first, gl.minimum(group.first + L.tokens, group.stop)):
                row = out + token.to(gl.int64) * queries.out_token
                fill_columns(row, begin, low)
                fill_columns(row, high, end)


@gluon.jit(
    do_not_specialize=["num_groups"],
    do_not_specialize_on_alignment=["first", "rows_request", "num_requests", "query_len"],
)
def score(
    q,
    k,
    queries,
    keys,
    num_groups,
    first,
    rows_request,
    num_requests,
    query_len,
    L: gl.constexpr,
):
    """Scores of groups of query tokens, ``q [B, S, HI, DI]`` against ``k [pages, rows, DI]``."""
    queries = Queries(*queries, first, rows_request, num_requests, query_len)
    N: gl.constexpr = L.tokens * L.block_h
    D: gl.constexpr = L.block_d
    RING: gl.constexpr = L.ring
    KEYS: gl.constexpr = L.keys
    q_tiles = gl.allocate_shared_memory(gl.float8e4nv, [2, N, D], tile_layout(D, 2))
    w_tiles = gl.allocate_shared_memory(gl.float32, [2, N], PLAIN)
    key_ring = gl.allocate_shared_memory(gl.float8e4nv, [RING, KEYS, D], tile_layout(D, 2))
    scale_ring = gl.allocate_shared_memory(gl.float32, [RING, KEYS], PLAIN)
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    warm = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(warm.index(0), count=1)
    for i in gl.static_range(2):
        if takes_turns(L):  # memory of barriers that nobody waits for serves something else, too
            mbarrier.init(turn.index(i), count=1)
        mbarrier.init(q_full.index(i), count=2)
        mbarrier.init(q_empty.index(i), count=CONSUMERS)
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=1 if keys.scales is None else 33)
        mbarrier.init(empty.index(i), count=1)
    # Nothing is copied from a page that is not there, but the descriptor of the keys comes in.
    mbarrier.expect(warm.index(0), COPY * D)
    tma_load(k, [-1, 0, 0], warm.index(0), places_of(key_ring, L).index(0))
    gdc_launch_dependents()
    gdc_wait()  # as in kernels/common/early.py: all above needs nobody's results
    work = share_of_program(queries, num_groups, L)
    mbarrier.wait(warm.index(0), 0)
    mbarrier.invalidate(warm.index(0))  # its memory serves something else from here on
    memory = (q_tiles, w_tiles, key_ring, scale_ring, q_full, q_empty, full, empty, turn)
    gl.warp_specialize(
        [
            (consume, (queries, keys, work, memory, L, 0)),
            (consume, (queries, keys, work, memory, L, 1)),
            (produce, (q, k, queries, keys, work, memory, L)),
            (fill, (queries, num_groups, L)),
        ],
        [4, 1, 2],
        [224, 56, 56],
    )


def plan(query_len: int, heads: int, dim: int) -> tuple[int, int, int]:
    """Tokens of a group, padded heads and padded dims."""
    block_h = max(16, next_power_of_2(heads))
    tokens = max(1, min(MAX_COLUMNS // block_h, next_power_of_2(query_len)))
    return tokens, block_h, max(32, next_power_of_2(dim))


def layout_of(
    groups: tuple[int, int, int], heads: int, own_ends: bool, causal: bool, page_size: int
) -> Layout:
    """What groups of tokens, as planned, are compiled for."""
    tokens, block_h, block_d = groups
    # Registers have room for longer tiles, each of which costs as much beside its products.
    keys = 2 * COPY.value if page_size > 0 and tokens * block_h <= MAX_COLUMNS // 2 else COPY.value
    parts, ring = min(2, tokens), RING_KEYS // keys
    return Layout(tokens, heads, block_h, block_d, parts, keys, ring, own_ends, causal, page_size)


def launch(
    q: Tensor,
    k: Tensor,
    queries: Queries,
    keys: Keys,
    num_groups: int,
    layout: Layout,
) -> None:
    """Start :func:`score`."""
    d = layout.block_d
    q_box, k_box = [1, layout.tokens, layout.block_h, d], [1, COPY.value, d]
    score[(num_multiprocessors(q.device),)](
        TensorDescriptor(q, list(q.shape), list(q.stride()), q_box, tile_layout(d, 4)),
        TensorDescriptor(k, list(k.shape), list(k.stride()), k_box, tile_layout(d, 3)),
        queries[:-4],
        keys,
        num_groups,
        *queries[-4:],
        layout,
        num_warps=4,
        launch_pdl=True,
    )


def indexer_scores(
    *,
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    key_scales: Tensor | None,
    row_starts: Tensor,
    row_ends: Tensor,
    out: Tensor,
) -> None:
    """Launcher; see :func:`sparsemla.ops.indexer.indexer_scores`."""
    num_tokens, num_keys = out.shape
    if num_tokens == 0 or num_keys == 0:
        return
    groups = plan(num_tokens, *q.shape[1:])
    queries = Queries(
        weights=weights,
        weights_request=0,
        weights_token=weights.stride(0),
        row_starts=row_starts,
        row_ends=row_ends,
        ends_request=0,
        offsets=None,
        skip=0,
        search_steps=0,
        rows=None,
        out=out,
        out_request=0,
        out_token=out.stride(0),
        num_keys=num_keys,
        first=0,
        rows_request=0,
        num_requests=1,
        query_len=num_tokens,
    )
    layout = layout_of(groups, q.shape[1], own_ends=True, causal=False, page_size=0)
    no_pages = Keys(key_scales, 0, 1, None, 0, 0, 1)
    launch(q[None], keys[None], queries, no_pages, cdiv(num_tokens, layout.tokens), layout)


def pages_of(cache: PagedCache, page_table: Tensor) -> tuple[Tensor, Keys]:
    """Keys of a cache, and what goes with them."""
    fp8, scales, _ = cache.stored()
    strides = page_and_row(scales)
    table = page_table, page_table.stride(0), page_table.shape[1]
    return fp8.view(torch.float8_e4m3fn), Keys(scales, *strides, *table, cache.num_pages)


def indexer_scores_paged(
    *,
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    seq_lens: Tensor,
    max_seq_len: int,
    out: Tensor,
) -> None:
    """Launcher; see :func:`sparsemla.ops.indexer.indexer_scores_paged`."""
    batch, query_len, heads, dim = q.shape
    if batch == 0 or query_len == 0:
        return
    groups = plan(query_len, heads, dim)
    queries = Queries(
        weights=weights,
        weights_request=weights.stride(0),
        weights_token=weights.stride(1),
        row_starts=None,
        row_ends=seq_lens,
        ends_request=seq_lens.stride(0),
        offsets=None,
        skip=0,
        search_steps=0,
        rows=None,
        out=out,
        out_request=out.stride(0),
        out_token=out.stride(1),
        num_keys=max_seq_len,
        first=0,
        rows_request=0,
        num_requests=batch,
        query_len=query_len,
    )
    own_ends = seq_lens.dim() == 2
    layout = layout_of(groups, heads, own_ends, not own_ends, cache.page_size)
    num_groups = batch * cdiv(query_len, layout.tokens)
    k, keys = pages_of(cache, page_table)
    launch(q, k, queries, keys, num_groups, layout)


def scorer(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    input_row_offsets: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    topk: int,
    causal: bool,
) -> portable.Scorer:
    """What scores the tokens of ragged requests."""
    num_tokens, heads, dim = q.shape
    num_requests = page_table.shape[0]
    groups = plan(max(1, num_tokens // max(1, num_requests)), heads, dim)
    layout = layout_of(groups, heads, False, causal, cache.page_size)
    k, keys = pages_of(cache, page_table)

    def score_tokens(some: slice, scores: Tensor, rows: Tensor) -> None:
        queries = Queries(
            weights=weights[some],
            weights_request=0,
            weights_token=weights.stride(0),
            row_starts=None,
            row_ends=seq_lens,
            ends_request=seq_lens.stride(0),
            offsets=input_row_offsets,
            skip=topk,
            search_steps=num_requests.bit_length(),
            rows=rows,
            out=scores,
            out_request=0,
            out_token=scores.stride(0),
            num_keys=scores.shape[1],
            first=some.start,
            rows_request=rows.stride(0),
            num_requests=num_requests,
            query_len=scores.shape[0],
        )
        num_groups = scores.shape[0] // layout.tokens + num_requests + 1
        launch(q[None, some], k, queries, keys, num_groups, layout)

    return score_tokens


def indexer_topk(
    *,
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    input_row_offsets: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    topk: int,
    causal: bool,
    as_slots: bool,
    max_workspace_bytes: int,
    out: Tensor,
) -> None:
    """Launcher; see :func:`sparsemla.ops.indexer.indexer_topk`."""
    portable.select_in_chunks(
        scorer(q, weights, cache, input_row_offsets, seq_lens, page_table, topk, causal),
        SELECTION,
        page_table,
        cache.page_size,
        topk,
        as_slots,
        max_workspace_bytes,
        8,
        out,
    )

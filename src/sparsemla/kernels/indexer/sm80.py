"""Indexer scores with Ampere's instructions, for any NVIDIA GPU from sm_80 on.

Keys are the A operand of mma.sync, and queries, of up to :data:`COLUMNS` tokens times heads, are B.
A CTA converts its queries to float16 once and keeps them in registers. Keys stream through two
stages of 128 keys by cp.async; ldmatrix loads their codes as the MMA takes them, and they become
float16 in registers, so that a converted key never passes shared memory. e4m3 fits float16; without
an instruction for it, the bits of a code are those of a float16 over 256. A thread holds four codes
that follow each other where the MMA wants two and two, in both operands: their order does not
matter to a product. relu is ``x + abs(x)`` times half the head weights. Columns are numbered so
that a warp has all heads of its tokens, up to 64, and their sum needs two shuffles::

    cp.async     keys i+1                          | keys i+2
    MMA          16 keys of i, 16 more, ...        | 16 keys of i+1, ...
    other units  convert next 16, relu, sum, store | convert ...

Two CTAs per multiprocessor take equal shares of all tiles of keys that some token sees. Triton
places the barriers of the CTA, one after the copies of a tile and one before the next ones.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sparsemla.cache import PagedCache
from sparsemla.kernels.common.device import describe, num_multiprocessors
from sparsemla.kernels.common.fp8 import HALVES_OF_FOUR
from sparsemla.kernels.common.gluon import async_load
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.common.paged import page_and_row
from sparsemla.kernels.indexer.arguments import IndexerScores, IndexerScoresPaged, IndexerTopk
from sparsemla.kernels.indexer.groups import (
    Queries,
    locate_group,
    most_groups,
    partition_tiles,
    request_of,
    visible_keys,
    visible_tiles,
)
from sparsemla.kernels.indexer.triton import SELECTION, Scorer, select_in_chunks

NUM_WARPS = gl.constexpr(4)
PAGE_KEYS = gl.constexpr(64)
"""Keys of one copy, whose page id is a scalar; a page holds a multiple of them."""
COLUMNS = 256
"""Most columns of the MMA: query tokens times heads."""
MINUS_INF = gl.constexpr(float("-inf"))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
FILL = gl.constexpr(gl.BlockedLayout([4], [32], [NUM_WARPS], [0]))
FILL_AT_ONCE = gl.constexpr(4096)

CONVERT = gl.constexpr("""{
    .reg .b16 low, high;
    mov.b32 {low, high}, $2;
    cvt.rn.f16x2.e4m3x2 $0, low;
    cvt.rn.f16x2.e4m3x2 $1, high;
}""")


class Keys(NamedTuple):
    """Stored keys, their scales, and the page table; contiguous keys are a single page."""

    codes: Tensor
    key_page: int
    key_row: int
    scales: Tensor | None
    scale_page: int
    scale_row: int
    page_table: Tensor | None
    table_request: int
    table_width: int
    num_pages: int


class Tiling(NamedTuple):
    """Compile-time constants."""

    tokens: int
    heads: int
    dim: int
    block_h: int
    block_d: int
    warps_n: int
    block_n: int
    stages: int
    native: bool
    own_ends: bool
    causal: bool
    ratio: int
    page_size: int


@triton.constexpr_function
def tile_layout(block_d):
    """Rows of e4m3 in shared memory, for ldmatrix without bank conflicts."""
    return gl.SwizzledSharedLayout(16, 128 // block_d, block_d // 16, [1, 0])


@triton.constexpr_function
def copy_layout(block_d):
    """16 bytes a thread and copy."""
    chunks = block_d // 16
    return gl.BlockedLayout([1, 16], [32 // chunks, chunks], [NUM_WARPS.value, 1], [1, 0])


@triton.constexpr_function
def acc_layout(warps_n):
    return gl.NVMMADistributedLayout([2, 0], [NUM_WARPS.value // warps_n, warps_n], [16, 8])


@gluon.jit
def as_operand(x, T: gl.constexpr):
    """float16 of codes, over 256 where no instruction converts them."""
    if T.native:
        y = gl.inline_asm_elementwise(
            CONVERT, "=&r,=r,r", [x], dtype=gl.float16, is_pure=True, pack=4
        )
    else:
        y = gl.inline_asm_elementwise(
            HALVES_OF_FOUR, "=&r,=&r,r", [x], dtype=gl.float16, is_pure=True, pack=4
        )
    return y


@gluon.jit
def token_and_head(i, T: gl.constexpr):
    """Token and head of columns of the MMA: a warp has all heads of its tokens, if they fit."""
    WARPS_T: gl.constexpr = min(T.warps_n, T.tokens)
    WARPS_H: gl.constexpr = T.warps_n // WARPS_T
    HEAD_TILES: gl.constexpr = T.block_h // (8 * WARPS_H)
    r = i // (8 * T.warps_n)
    w = i // 8 % T.warps_n
    token = w // WARPS_H * (T.tokens // WARPS_T) + r // HEAD_TILES
    head = (r % HEAD_TILES * WARPS_H + w % WARPS_H) * 8 + i % 8
    return token, head


@gluon.jit
def sum_heads(acc, w, T: gl.constexpr):
    """``sum_h w[t, h] * relu(acc)``, ``[keys, tokens]``; ``w`` is halved."""
    WARPS_T: gl.constexpr = min(T.warps_n, T.tokens)
    WARPS_H: gl.constexpr = T.warps_n // WARPS_T
    HEAD_TILES: gl.constexpr = T.block_h // (8 * WARPS_H)
    TOKENS_W: gl.constexpr = T.tokens // WARPS_T
    K: gl.constexpr = acc.shape[0]
    x = (acc + gl.abs(acc)) * w[None, :]
    x = x.reshape(K, TOKENS_W, HEAD_TILES, WARPS_T, WARPS_H, 8).permute(0, 3, 1, 2, 4, 5)
    return gl.sum(x.reshape(K, T.tokens, T.block_h), 2)


@gluon.jit
def page_of(keys, request, n, T: gl.constexpr):
    """Page of the key n of a request, or -1."""
    column = n // T.page_size
    at = keys.page_table + request.to(gl.int64) * keys.table_request + column
    page = gl.load(at, mask=column < keys.table_width, other=-1)
    return gl.where((page >= 0) & (page < keys.num_pages), page, -1).to(gl.int32)


@gluon.jit
def copy_keys(keys, page, n, num_keys, tile, scale_tile, T: gl.constexpr):
    """Start to copy keys and their scales; zeros for keys that do not exist."""
    COPY: gl.constexpr = copy_layout(T.block_d)
    ROWS: gl.constexpr = tile.shape[0]
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, COPY))
    d = gl.arange(0, T.block_d, gl.SliceLayout(0, COPY))
    i = gl.arange(0, ROWS, LANES)
    if T.page_size > 0:
        first = n % T.page_size
        codes = keys.codes + gl.maximum(page, 0).to(gl.int64) * keys.key_page
        mask = (row >= 0) & (page >= 0)
        scale_mask = (i >= 0) & (page >= 0)
    else:
        first = n
        codes = keys.codes
        mask = n + row < num_keys
        scale_mask = n + i < num_keys
    codes += first.to(gl.int64) * keys.key_row
    mask = mask[:, None]
    if T.block_d != T.dim:
        mask = mask & (d < T.dim)[None, :]
    async_load(tile, codes + row[:, None] * keys.key_row + d[None, :], mask=mask)
    if keys.scales is not None:
        at = keys.scales + first.to(gl.int64) * keys.scale_row
        if T.page_size > 0:
            at += gl.maximum(page, 0).to(gl.int64) * keys.scale_page
        async_load(scale_tile, at + i * keys.scale_row, mask=scale_mask)


@triton.constexpr_function
def of_tokens(tiling):
    """The tiling whose groups are single tokens."""
    fields = {name: getattr(tiling, name) for name in Tiling._fields}  # Triton 3.9 has a tuple here
    return Tiling(**fields | {"tokens": 1})


@gluon.jit
def store_rows(queries, T: gl.constexpr):
    """Store the end and the request of each token of ragged requests, in one CTA.

    Tokens are not taken from groups: these overlap if offsets decrease.
    """
    TOKENS: gl.constexpr = gl.BlockedLayout([1], [32], [NUM_WARPS], [0])
    ONE: gl.constexpr = of_tokens(T)
    for base in range(gl.program_id(0) * 128, queries.query_len, gl.num_programs(0) * 128):
        token = base + gl.arange(0, 128, TOKENS)
        group = locate_group(queries, token, ONE, True)
        _, end = visible_keys(queries, group, token, ONE)
        real = token < queries.query_len
        gl.store(queries.rows + token, end, mask=real)
        gl.store(queries.rows + queries.rows_request + token, group.request, mask=real)


@gluon.jit
def fill(queries, num_groups, T: gl.constexpr):
    """Store -inf in tiles that no token sees."""
    blocks = gl.cdiv(queries.num_keys, FILL_AT_ONCE)
    for unit in range(gl.program_id(0), num_groups * blocks, gl.num_programs(0)):
        group = locate_group(queries, unit // blocks, T)
        first_tile, tiles = visible_tiles(queries, group, T)
        begin = unit % blocks * FILL_AT_ONCE
        end = gl.minimum(begin + FILL_AT_ONCE, queries.num_keys)
        low = gl.minimum(first_tile * T.block_n, end)
        high = gl.maximum((first_tile + tiles) * T.block_n, begin)
        out = queries.out + group.request.to(gl.int64) * queries.out_request
        for token in range(group.first, gl.minimum(group.first + T.tokens, group.stop)):
            row = out + token.to(gl.int64) * queries.out_token
            fill_columns(row, begin, low)
            fill_columns(row, high, end)


@gluon.jit
def fill_columns(row, begin, end):
    """Store -inf in the columns ``[begin, end)`` of a row."""
    for base in range(begin, end, 512):
        n = base + gl.arange(0, 512, FILL)
        gl.store(row + n, MINUS_INF, mask=n < end)


@gluon.jit
def copy_tile(keys, group, tile, last_tile, num_keys, key_tile, scale_tile, T: gl.constexpr):
    """Start to copy a tile of keys, if there is one, as one group of copies."""
    COPIES: gl.constexpr = T.block_n // PAGE_KEYS
    if tile < last_tile:
        if T.page_size > 0:
            for c in gl.static_range(COPIES):
                n = tile * T.block_n + c * PAGE_KEYS
                copy_keys(
                    keys,
                    page_of(keys, group.request, n, T),
                    n,
                    num_keys,
                    key_tile.slice(c * PAGE_KEYS, PAGE_KEYS),
                    scale_tile.slice(c * PAGE_KEYS, PAGE_KEYS),
                    T,
                )
        else:
            copy_keys(keys, 0, tile * T.block_n, num_keys, key_tile, scale_tile, T)
    async_copy.commit_group()


@gluon.jit(
    do_not_specialize=["num_groups"],
    do_not_specialize_on_alignment=["first", "rows_request", "num_requests", "query_len"],
)
def score(
    q,
    q_request,
    q_token,
    q_head,
    queries,
    keys,
    num_groups,
    first,
    rows_request,
    num_requests,
    query_len,
    T: gl.constexpr,
):
    """Scores of groups of query tokens."""
    queries = Queries(*queries, first, rows_request, num_requests, query_len)
    N: gl.constexpr = T.tokens * T.block_h
    D: gl.constexpr = T.block_d
    KEYS: gl.constexpr = T.block_n
    STAGES: gl.constexpr = T.stages
    ACC: gl.constexpr = acc_layout(T.warps_n)
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 4)
    COPY: gl.constexpr = copy_layout(D)
    AT_ONCE: gl.constexpr = 16 * NUM_WARPS // T.warps_n
    unused = gl.zeros([AT_ONCE, N], gl.float32, ACC)
    unused = sum_heads(unused, gl.zeros([N], gl.float32, gl.SliceLayout(0, ACC)), T)
    SUM: gl.constexpr = unused.type.layout
    ROWS: gl.constexpr = gl.SliceLayout(1, SUM)
    TOKENS: gl.constexpr = gl.SliceLayout(0, SUM)
    q_tile = gl.allocate_shared_memory(gl.uint8, [N, D], tile_layout(D))
    key_tiles = gl.allocate_shared_memory(gl.uint8, [STAGES, KEYS, D], tile_layout(D))
    scale_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], PLAIN)
    if queries.rows is None:
        fill(queries, num_groups, T)
    else:
        store_rows(queries, T)
    index, skip, left = partition_tiles(queries, num_groups, T)
    while left > 0:
        group = locate_group(queries, index, T)
        first_tile, tiles = visible_tiles(queries, group, T)
        tiles = gl.minimum(tiles - skip, left)
        if tiles > 0:
            tile = first_tile + skip
            last_tile = tile + tiles
            token, head = token_and_head(gl.arange(0, N, gl.SliceLayout(1, COPY)), T)
            token += group.first
            real = (token < group.stop) & (head < T.heads)
            at = q + token.to(gl.int64) * q_token + head * q_head
            at += group.request.to(gl.int64) * q_request
            d = gl.arange(0, D, gl.SliceLayout(0, COPY))
            async_load(q_tile, at[:, None] + d[None, :], mask=real[:, None] & (d < T.dim)[None, :])
            async_copy.commit_group()
            for i in gl.static_range(STAGES - 1):
                copy_tile(
                    keys,
                    group,
                    tile + i,
                    last_tile,
                    queries.num_keys,
                    key_tiles.index(i),
                    scale_tiles.index(i),
                    T,
                )
            token, head = token_and_head(gl.arange(0, N, gl.SliceLayout(0, ACC)), T)
            token += group.first
            at = queries.head_weights + token.to(gl.int64) * queries.head_weights_token + head
            at += group.request.to(gl.int64) * queries.head_weights_request
            real = (token < group.stop) & (head < T.heads)
            w = gl.load(at, mask=real, other=0.0).to(gl.float32) * 0.5
            if not T.native:  # both operands are over 256
                w *= 65536.0
            async_copy.wait_group(STAGES - 1)
            heads = as_operand(q_tile.permute((1, 0)).load(B), T)
            t = group.first + gl.arange(0, T.tokens, TOKENS)
            start, end = visible_keys(queries, group, t, T)
            own = t < group.stop
            if T.tokens > 1 and queries.offsets is not None:  # groups overlap if offsets decrease
                own = own & (request_of(queries, t, of_tokens(T), True) == group.request)
            out = queries.out + t.to(gl.int64) * queries.out_token
            out += group.request.to(gl.int64) * queries.out_request
            for i in range(tiles):
                async_copy.wait_group(STAGES - 2)
                stage = i % STAGES
                ahead = (i + STAGES - 1) % STAGES
                copy_tile(
                    keys,
                    group,
                    tile + i + STAGES - 1,
                    last_tile,
                    queries.num_keys,
                    key_tiles.index(ahead),
                    scale_tiles.index(ahead),
                    T,
                )
                base = (tile + i) * KEYS
                for s in gl.static_range(KEYS // AT_ONCE):
                    codes = key_tiles.index(stage).slice(s * AT_ONCE, AT_ONCE).load(A)
                    acc = gl.zeros([AT_ONCE, N], gl.float32, ACC)
                    acc = mma_v2(as_operand(codes, T), heads, acc)
                    total = sum_heads(acc, w, T)
                    if keys.scales is not None:
                        scale = scale_tiles.index(stage).slice(s * AT_ONCE, AT_ONCE).load(ROWS)
                        total *= scale[:, None]
                    n = base + s * AT_ONCE + gl.arange(0, AT_ONCE, ROWS)
                    inside = (n[:, None] >= start[None, :]) & (n[:, None] < end[None, :])
                    if T.page_size > 0:
                        in_page = base + s * AT_ONCE // PAGE_KEYS * PAGE_KEYS
                        inside = inside & (page_of(keys, group.request, in_page, T) >= 0)
                    gl.store(
                        out[None, :] + n[:, None],
                        gl.where(inside, total, MINUS_INF),
                        mask=(n < queries.num_keys)[:, None] & own[None, :],
                    )
            async_copy.wait_group(0)
        left -= gl.maximum(tiles, 0)
        skip = 0
        index += 1


def choose_tiling(
    query_len: int,
    heads: int,
    dim: int,
    device: torch.device,
    own_ends: bool,
    causal: bool,
    ratio: int,
    page_size: int,
) -> Tiling:
    """The compile-time constants for requests of about ``query_len`` tokens."""
    block_h = max(16, next_power_of_2(heads))
    tokens = max(1, min(COLUMNS // block_h, next_power_of_2(query_len)))
    block_d = max(32, next_power_of_2(dim))
    columns = tokens * block_h
    return Tiling(
        tokens,
        heads,
        dim,
        block_h,
        block_d,
        max(1, columns // 64),
        128,
        2,
        describe(device).has_fp8,
        own_ends,
        causal,
        ratio,
        page_size,
    )


def launch(
    q: Tensor,
    strides: tuple[int, int, int],
    queries: Queries,
    keys: Keys,
    num_groups: int,
    tiling: Tiling,
) -> None:
    """Launch :func:`score`, two CTAs per multiprocessor."""
    score[(2 * num_multiprocessors(q.device),)](
        q.view(torch.uint8),
        *strides,
        queries[:-4],
        keys,
        num_groups,
        *queries[-4:],
        tiling,
        num_warps=NUM_WARPS.value,
    )


def indexer_scores(call: IndexerScores) -> None:
    index_q, index_k, scales = call.index_q, call.index_k, call.index_k_scales
    num_tokens, num_keys = call.out.shape
    if num_tokens == 0 or num_keys == 0:
        return
    queries = Queries.of_ranges(call)
    tiling = choose_tiling(num_tokens, *index_q.shape[1:], index_q.device, True, False, 1, 0)
    one_page = Keys(index_k.view(torch.uint8), 0, index_k.stride(0), scales, 0, 1, None, 0, 0, 1)
    strides = 0, index_q.stride(0), index_q.stride(1)
    launch(index_q, strides, queries, one_page, cdiv(num_tokens, tiling.tokens), tiling)


def paged_keys(cache: PagedCache, page_table: Tensor) -> Keys:
    """The keys of a cache, their scales and the page table."""
    fp8, scales, _ = cache.stored()
    table = page_table, page_table.stride(0), page_table.shape[1]
    return Keys(fp8, *page_and_row(fp8), scales, *page_and_row(scales), *table, cache.num_pages)


def indexer_scores_paged(call: IndexerScoresPaged) -> None:
    index_q, cache = call.index_q, call.cache
    batch, query_len, heads, dim = index_q.shape
    if batch == 0 or query_len == 0:
        return
    queries = Queries.of_requests(call)
    own_ends = call.seq_lens.dim() == 2
    tiling = choose_tiling(
        query_len, heads, dim, index_q.device, own_ends, not own_ends, call.ratio, cache.page_size
    )
    num_groups = batch * cdiv(query_len, tiling.tokens)
    keys = paged_keys(cache, call.page_table)
    launch(index_q, index_q.stride()[:3], queries, keys, num_groups, tiling)


def scorer(call: IndexerTopk) -> Scorer:
    """The function that scores slices of the tokens of ragged requests."""
    q, cache = call.index_q, call.cache
    num_tokens, heads, dim = q.shape
    num_requests = call.page_table.shape[0]
    tiling = choose_tiling(
        max(1, num_tokens // max(1, num_requests)),
        heads,
        dim,
        q.device,
        False,
        call.causal,
        call.ratio,
        cache.page_size,
    )
    keys = paged_keys(cache, call.page_table)

    def score_tokens(some: slice, scores: Tensor, rows: Tensor) -> None:
        queries = Queries.of_ragged(call, some, scores, rows)
        num_groups = most_groups(scores.shape[0], tiling.tokens, num_requests)
        strides = 0, q.stride(0), q.stride(1)
        launch(q[some], strides, queries, keys, num_groups, tiling)

    return score_tokens


def indexer_topk(call: IndexerTopk) -> None:
    select_in_chunks(call, scorer(call), SELECTION)

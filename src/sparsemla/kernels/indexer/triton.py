"""The lightning indexer for any GPU: scores of contiguous and of paged keys, and their top-k.

A program handles a few query tokens of one request and a chunk of keys. It keeps the heads of the
tokens as one matrix ``[tokens * heads, dims]`` and streams tiles of keys: swap-AB MMAs
``keys @ queries^T``, then ReLU, head weights and the sum over heads, all in float32. With keys on
M, the sum over heads stays within a few lanes. Tensor cores without e4m3 get float16, which holds
every e4m3 value. MXFP4 keys are converted to bfloat16 when a tile is loaded, which is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import FLOAT32_MAX
from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.fp4 import unpack_e2m1
from sparsemla.kernels.common.fp8 import INTERPRETED, decode_e8m0, dot, e4m3_over_256, has_fp8
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.common.paged import page_and_row
from sparsemla.kernels.indexer.arguments import (
    IndexerScores,
    IndexerScoresPaged,
    IndexerTopk,
    IndexerTopkBlocks,
    IndexerTopkOfBlocks,
)
from sparsemla.kernels.topk.arguments import SelectTopk
from sparsemla.kernels.topk.triton import Scheduler, schedule_lists, select_topk

MINUS_INF = tl.constexpr(float("-inf"))


@triton.jit
def _load_rows(rows, valid, T: tl.constexpr):
    """MMA operand ``[R, block_d]`` from pointers ``rows [R]``; zeros for invalid rows.

    Decoded e4m3 is over 256.
    """
    d = tl.arange(0, T.block_d)
    mask = valid[:, None] & (d < T.dim)[None, :]
    x = tl.load(rows[:, None] + d[None, :], mask=mask, other=0.0)
    if T.decode:
        x = e4m3_over_256(x)
    return x


@triton.jit
def _load_fp4_rows(rows, scales, valid, BLOCK: tl.constexpr, T: tl.constexpr):
    """bfloat16 ``[R, block_d]`` from pointers to e2m1 codes and to their scales, ``[R]`` each."""
    R: tl.constexpr = rows.shape[0]
    NUM_SCALES: tl.constexpr = T.block_d // BLOCK
    pair, block = tl.arange(0, T.block_d // 2), tl.arange(0, NUM_SCALES)
    mask = valid[:, None] & (2 * pair < T.dim)[None, :]
    x = unpack_e2m1(tl.load(rows[:, None] + pair[None, :], mask=mask, other=0))
    mask = valid[:, None] & (block * BLOCK < T.dim)[None, :]
    scale = decode_e8m0(tl.load(scales[:, None] + block[None, :], mask=mask, other=0))
    x = tl.reshape(x, [R, NUM_SCALES, BLOCK]) * scale[:, :, None]
    return tl.reshape(x, [R, T.block_d]).to(tl.bfloat16)


@triton.jit
def _load_queries(
    q,
    weights,
    first,
    end,
    stride_q,
    stride_head,
    stride_weights,
    T: tl.constexpr,
):
    """Heads ``[tokens * block_h, block_d]`` of the tokens [first, end), and their head weights."""
    BLOCK_H: tl.constexpr = T.block_h
    i = tl.arange(0, T.tokens * BLOCK_H)
    token = first + i // BLOCK_H
    head = i % BLOCK_H
    valid = (token < end) & (head < T.heads)
    token = token.to(tl.int64)
    rows = q + token * stride_q + head * stride_head
    w = tl.load(weights + token * stride_weights + head, mask=valid, other=0.0)
    queries = _load_rows(rows, valid, T)
    if T.decode:
        queries *= 256.0
    return queries, w.to(tl.float32)


@triton.jit
def _score(keys, queries, w, T: tl.constexpr):
    """``sum_h w[t, h] * relu(<queries[t, h], keys[n]>)``, ``[N, tokens]`` float32."""
    N: tl.constexpr = keys.shape[0]
    COLUMNS: tl.constexpr = queries.shape[0]
    logits = dot(keys, tl.trans(queries), tl.zeros([N, COLUMNS], tl.float32), T.upcast)
    logits = tl.maximum(logits, 0.0, propagate_nan=tl.PropagateNan.ALL) * w[None, :]
    score = tl.sum(tl.reshape(logits, [N, T.tokens, COLUMNS // T.tokens]), 2)
    if T.decode:  # keys are over 256
        score *= 256.0
    return score


@triton.jit
def _score_positions(
    n,
    valid,
    table_row,
    table_width,
    keys,
    key_scales,
    num_pages,
    queries,
    w,
    PAGE_SIZE: tl.constexpr,
    KEY_PAGE: tl.constexpr,
    KEY_ROW: tl.constexpr,
    SCALE_PAGE: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    FP4_BLOCK: tl.constexpr,
    T: tl.constexpr,
):
    """Scores ``[N, tokens]`` of keys at positions ``n [N]`` of a request, and which keys exist."""
    column = n // PAGE_SIZE
    page = tl.load(table_row + column, mask=valid & (column < table_width), other=-1)
    exists = (page >= 0) & (page < num_pages)
    page = page.to(tl.int64)
    rows = keys + page * KEY_PAGE + n % PAGE_SIZE * KEY_ROW
    if FP4_BLOCK > 0:
        scales = key_scales + page * SCALE_PAGE + n % PAGE_SIZE * SCALE_ROW
        tile = _load_fp4_rows(rows, scales, exists, FP4_BLOCK, T)
        score = _score(tile, queries, w, T)
    else:
        tile = _load_rows(rows, exists, T)
        score = _score(tile, queries, w, T)
        if key_scales is not None:
            scales = key_scales + page * SCALE_PAGE + n % PAGE_SIZE * SCALE_ROW
            score *= tl.load(scales, mask=exists, other=0.0)[:, None]
    return score, exists


@triton.jit
def _count_keys(length, num_keys, RATIO: tl.constexpr):
    """The keys of so many tokens, which may be negative."""
    if RATIO > 1:
        length = tl.maximum(length, 0) // RATIO
    return tl.minimum(tl.maximum(length, 0), num_keys).to(tl.int32)


@triton.jit
def _fill_columns(out, stride_out, token, valid, begin, end, BLOCK_N: tl.constexpr):
    """Store -inf in the columns [begin, end) of some tokens."""
    for base in range(begin, end, BLOCK_N):
        n = base + tl.arange(0, BLOCK_N)
        at = out + (token * stride_out)[None, :] + n[:, None]
        tl.store(at, MINUS_INF, mask=(n < end)[:, None] & valid[None, :])


@triton.jit
def _visible_tiles(start, end, valid, chunk_begin, chunk_end, BLOCK_N: tl.constexpr):
    """The range of tiles in a chunk of columns with keys that any of the tokens sees."""
    some = valid & (start < end)
    low = tl.min(tl.where(some, start, chunk_end), 0) // BLOCK_N * BLOCK_N
    high = tl.cdiv(tl.max(tl.where(some, end, 0), 0), BLOCK_N) * BLOCK_N
    low = tl.where(high > 0, tl.minimum(tl.maximum(low, chunk_begin), chunk_end), chunk_begin)
    return low, tl.minimum(tl.maximum(high, low), chunk_end)


@triton.jit(do_not_specialize=["num_tokens", "num_chunks"])
def _ragged_kernel(
    q,
    weights,
    keys,
    key_scales,
    row_starts,
    row_ends,
    out,
    num_tokens,
    num_keys,
    num_chunks,
    chunk,
    stride_q,
    stride_head,
    stride_weights,
    stride_key,
    stride_out,
    T: tl.constexpr,
):
    """Score ``T.tokens`` tokens against ``chunk`` contiguous keys."""
    TOKENS: tl.constexpr = T.tokens
    BLOCK_N: tl.constexpr = T.block_n
    first = tl.program_id(0) // num_chunks * TOKENS
    begin = tl.program_id(0) % num_chunks * chunk
    last = tl.minimum(begin + chunk, num_keys)
    token = (first + tl.arange(0, TOKENS)).to(tl.int64)
    valid = token < num_tokens
    start = tl.load(row_starts + token, mask=valid, other=0)
    start = tl.minimum(tl.maximum(start, 0), num_keys).to(tl.int32)
    end = tl.load(row_ends + token, mask=valid, other=0)
    end = tl.minimum(tl.maximum(end, 0), num_keys).to(tl.int32)
    low, high = _visible_tiles(start, end, valid, begin, last, BLOCK_N)
    _fill_columns(out, stride_out, token, valid, begin, low, BLOCK_N)
    if low < high:
        queries, w = _load_queries(
            q,
            weights,
            first,
            num_tokens,
            stride_q,
            stride_head,
            stride_weights,
            T,
        )
        for base in tl.range(low, high, BLOCK_N, num_stages=T.stages):
            n = base + tl.arange(0, BLOCK_N)
            rows = keys + n.to(tl.int64) * stride_key
            tile = _load_rows(rows, n < num_keys, T)
            score = _score(tile, queries, w, T)
            if key_scales is not None:
                score *= tl.load(key_scales + n, mask=n < num_keys, other=0.0)[:, None]
            inside = (n[:, None] >= start[None, :]) & (n[:, None] < end[None, :])
            at = out + (token * stride_out)[None, :] + n[:, None]
            mask = (n < num_keys)[:, None] & valid[None, :]
            tl.store(at, tl.where(inside, score, MINUS_INF), mask=mask)
    _fill_columns(out, stride_out, token, valid, high, last, BLOCK_N)


@triton.jit
def _find_request(offsets, group, num_requests, first_token, num_tokens, TOKENS: tl.constexpr):
    """Request of a group of TOKENS tokens, its first token, and index of the group in the request.

    Groups of request b are numbered from ``offsets[b] // TOKENS + b``. This numbering needs no
    prefix sum over requests, but some groups have no tokens. Offsets count from ``first_token`` and
    end at ``num_tokens``. Tokens after the last request form one more request, ``num_requests``.
    Tokens before the first request belong to it.
    """
    BLOCK: tl.constexpr = 128
    before = group * 0
    for base in range(0, num_requests + 1, BLOCK):
        b = base + tl.arange(0, BLOCK)
        offset = tl.load(offsets + b, mask=b <= num_requests, other=0) - first_token
        offset = tl.minimum(tl.maximum(offset, 0), num_tokens).to(tl.int32)
        offset = tl.where(b > 0, offset, 0)
        before += tl.sum(((b <= num_requests) & (offset // TOKENS + b <= group)).to(tl.int32), 0)
    request = before - 1
    offset = tl.minimum(tl.maximum(tl.load(offsets + request) - first_token, 0), num_tokens)
    offset = tl.where(request > 0, offset, 0).to(tl.int32)
    return request, offset, group - (offset // TOKENS + request)


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_requests",
        "num_pages",
        "table_width",
        "first_token",
        "query_len",
        "num_chunks",
        "skip",
    ]
)
def _paged_kernel(
    q,
    weights,
    keys,
    key_scales,
    page_table,
    seq_lens,
    input_row_offsets,
    out,
    row_ends,
    request_ids,
    num_tokens,
    num_keys,
    num_requests,
    num_pages,
    table_width,
    first_token,
    query_len,
    num_chunks,
    chunk,
    skip,
    stride_q,
    stride_q_request,
    stride_head,
    stride_weights,
    stride_weights_request,
    stride_table,
    stride_lens,
    stride_out,
    stride_out_request,
    LENS_OF_TOKENS: tl.constexpr,
    CAUSAL: tl.constexpr,
    RATIO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_PAGE: tl.constexpr,
    KEY_ROW: tl.constexpr,
    SCALE_PAGE: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    FP4_BLOCK: tl.constexpr,
    T: tl.constexpr,
):
    """Score up to ``T.tokens`` tokens of one request against ``chunk`` paged keys.

    Requests have ``query_len`` tokens each, or the tokens between ``input_row_offsets``. In the
    second case, the kernel also stores the end and the request of each token, and it skips columns
    that a selection of the best ``skip`` keys does not read. Lengths count tokens; every RATIO of
    them have one key.
    """
    TOKENS: tl.constexpr = T.tokens
    BLOCK_N: tl.constexpr = T.block_n
    group = tl.program_id(0) // num_chunks
    begin = tl.program_id(0) % num_chunks * chunk
    last = tl.minimum(begin + chunk, num_keys)
    if input_row_offsets is None:
        groups = tl.cdiv(query_len, TOKENS)
        request = (group // groups).to(tl.int64)
        first = group % groups * TOKENS
        stop = first * 0 + query_len
        q += request * stride_q_request
        weights += request * stride_weights_request
        out += request * stride_out_request
        seq_lens += request * stride_lens
        token = first + tl.arange(0, TOKENS)
        if LENS_OF_TOKENS:
            end = tl.load(seq_lens + token, mask=token < stop, other=0)
        else:
            end = tl.load(seq_lens) - (query_len - 1 - token)
    else:
        request, first, group_in_request = _find_request(
            input_row_offsets, group, num_requests, first_token, num_tokens, TOKENS
        )
        real = request < num_requests
        begin_token = tl.load(input_row_offsets + request) - first_token
        end_token = tl.load(input_row_offsets + request + 1, mask=real, other=0) - first_token
        first += group_in_request * TOKENS
        stop = tl.where(real, tl.minimum(end_token, num_tokens), num_tokens).to(tl.int32)
        token = first + tl.arange(0, TOKENS)
        end = tl.load(seq_lens + request, mask=real, other=0)
        if CAUSAL:
            end = end - (end_token - 1 - token)
        end = tl.where(real & (token >= begin_token), end, token * 0)
    valid = token < stop
    end = _count_keys(end, num_keys, RATIO)
    if row_ends is not None:
        once = valid & (token * 0 + begin == 0)
        tl.store(row_ends + token, end, mask=once)
        tl.store(request_ids + token, token * 0 + request, mask=once)
    end = tl.where(end > skip, end, 0)
    low, high = _visible_tiles(token * 0, end, valid, begin, last, BLOCK_N)
    token = token.to(tl.int64)
    if low < high:
        queries, w = _load_queries(
            q,
            weights,
            first,
            stop,
            stride_q,
            stride_head,
            stride_weights,
            T,
        )
        table_row = page_table + request.to(tl.int64) * stride_table
        # Loads of keys depend on loads of page ids, so the pipeline needs twice the stages.
        for base in tl.range(low, high, BLOCK_N, num_stages=2 * T.stages - 1):
            n = base + tl.arange(0, BLOCK_N)
            score, exists = _score_positions(
                n,
                n < last,
                table_row,
                table_width,
                keys,
                key_scales,
                num_pages,
                queries,
                w,
                PAGE_SIZE,
                KEY_PAGE,
                KEY_ROW,
                SCALE_PAGE,
                SCALE_ROW,
                FP4_BLOCK,
                T,
            )
            inside = exists[:, None] & (n[:, None] < end[None, :])
            at = out + (token * stride_out)[None, :] + n[:, None]
            mask = (n < last)[:, None] & valid[None, :]
            tl.store(at, tl.where(inside, score, MINUS_INF), mask=mask)
    if input_row_offsets is None:
        _fill_columns(out, stride_out, token, valid, high, last, BLOCK_N)


@triton.jit(
    do_not_specialize=[
        "num_tokens",
        "num_keys",
        "num_requests",
        "num_pages",
        "table_width",
        "num_blocks",
        "first_token",
        "num_chunks",
        "skip",
    ]
)
def _listed_kernel(
    q,
    weights,
    keys,
    key_scales,
    page_table,
    seq_lens,
    input_row_offsets,
    blocks,
    out,
    row_ends,
    row_ids,
    num_tokens,
    num_keys,
    num_requests,
    num_pages,
    table_width,
    num_blocks,
    first_token,
    num_chunks,
    chunk,
    skip,
    stride_q,
    stride_head,
    stride_weights,
    stride_table,
    stride_blocks,
    stride_out,
    CAUSAL: tl.constexpr,
    RATIO: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    KEY_PAGE: tl.constexpr,
    KEY_ROW: tl.constexpr,
    SCALE_PAGE: tl.constexpr,
    SCALE_ROW: tl.constexpr,
    FP4_BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    T: tl.constexpr,
):
    """Score a token against ``chunk`` of the keys in its blocks, one column for each listed key.

    Blocks ascend, so the keys that the token sees are the first columns; the kernel stores their
    number and the number of the token. It skips rows that a selection of ``skip`` keys takes whole.
    """
    BLOCK_N: tl.constexpr = T.block_n
    LIST: tl.constexpr = 1024
    group = tl.program_id(0) // num_chunks
    begin = tl.program_id(0) % num_chunks * chunk
    request, first, in_request = _find_request(
        input_row_offsets, group, num_requests, first_token, num_tokens, 1
    )
    real = request < num_requests
    begin_token = tl.load(input_row_offsets + request) - first_token
    end_token = tl.load(input_row_offsets + request + 1, mask=real, other=0) - first_token
    token = first + in_request
    stop = tl.where(real, tl.minimum(end_token, num_tokens), num_tokens).to(tl.int32)
    end = tl.load(seq_lens + request, mask=real, other=0)
    if CAUSAL:
        end = end - (end_token - 1 - token)
    end = tl.where(real & (token >= begin_token) & (token < stop), end, 0)
    end = _count_keys(end, num_keys, RATIO)
    seen = tl.cdiv(end, BLOCK_SIZE)
    row = token.to(tl.int64)
    listed = blocks + row * stride_blocks
    count = tl.zeros([LIST], tl.int32)
    if end > 0:
        for base in range(0, num_blocks, LIST):
            at = base + tl.arange(0, LIST)
            block = tl.load(listed + at, mask=at < num_blocks, other=-1)
            known = (block >= 0) & (block < seen)
            block = tl.where(known, block, 0).to(tl.int32)
            count += tl.where(known, tl.minimum(end - block * BLOCK_SIZE, BLOCK_SIZE), 0)
    visible = tl.sum(count, 0)
    if (begin == 0) & (token < stop):
        tl.store(row_ends + row, visible)
        tl.store(row_ids + row, token)
    last = tl.minimum(begin + chunk, tl.where(visible > skip, visible, 0))
    if begin < last:
        queries, w = _load_queries(
            q, weights, token, token + 1, stride_q, stride_head, stride_weights, T
        )
        table_row = page_table + request.to(tl.int64) * stride_table
        for base in tl.range(begin, last, BLOCK_N, num_stages=STAGES):
            column = base + tl.arange(0, BLOCK_N)
            block = tl.load(listed + column // BLOCK_SIZE, mask=column < last, other=-1)
            known = (block >= 0) & (block < seen)
            n = tl.where(known, block, 0).to(tl.int32) * BLOCK_SIZE + column % BLOCK_SIZE
            score, exists = _score_positions(
                n,
                known & (n < end),
                table_row,
                table_width,
                keys,
                key_scales,
                num_pages,
                queries,
                w,
                PAGE_SIZE,
                KEY_PAGE,
                KEY_ROW,
                SCALE_PAGE,
                SCALE_ROW,
                FP4_BLOCK,
                T,
            )
            score = tl.where(exists[:, None], score, MINUS_INF)
            at = out + row * stride_out + column[:, None]
            tl.store(at, score, mask=(column < last)[:, None])


LARGEST = tl.constexpr(FLOAT32_MAX)


@triton.jit(do_not_specialize=["skip"])
def _best_of_blocks(
    scores,
    stride_scores,
    row_ends,
    best,
    stride_best,
    block_ends,
    skip,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
):
    """The best score of each block of a row, infinite for the last; NaN counts as -inf."""
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(row_ends + row)
    count = tl.cdiv(end, BLOCK_SIZE)
    if tl.program_id(1) == 0:
        tl.store(block_ends + row, count)
    if end > skip:
        for base in range(tl.program_id(1) * TILE, count, tl.num_programs(1) * TILE):
            block = base + tl.arange(0, TILE)
            column = tl.arange(0, WIDTH)
            n = block[:, None] * BLOCK_SIZE + column[None, :]
            inside = (column < BLOCK_SIZE)[None, :] & (n < end)
            x = tl.load(scores + row * stride_scores + n, mask=inside, other=MINUS_INF)
            x = tl.max(tl.where(x == x, x, MINUS_INF), 1)
            x = tl.where(block == count - 1, -MINUS_INF, tl.minimum(x, LARGEST))
            tl.store(best + row * stride_best + block, x, mask=block < count)


class ScoreTiles(NamedTuple):
    """Tiles of the score kernels.

    Args:
        heads: heads of a token.
        dim: dims of a head.
        tokens: query tokens of a program.
        block_h: heads of a token, padded.
        block_d: dims, padded.
        block_n: keys of a tile.
        stages: tiles of keys in flight.
        decode: whether e4m3 is decoded to float16.
        upcast: whether MMAs take float32, as in Triton's interpreter.
    """

    heads: int
    dim: int
    tokens: int
    block_h: int
    block_d: int
    block_n: int
    stages: int
    decode: bool
    upcast: bool = INTERPRETED


def choose_tiles(
    query_len: int, heads: int, dim: int, dtype: torch.dtype, device: torch.device
) -> ScoreTiles:
    """Tiles for requests of about ``query_len`` tokens."""
    shared = (56 if torch.version.hip else 96) << 10  # bytes of tiles of a program
    fp8 = dtype == torch.float8_e4m3fn
    decode = fp8 and not has_fp8(device)
    block_h = max(16, next_power_of_2(heads))
    block_d = max(32, next_power_of_2(dim))
    row_bytes = block_d * (1 if fp8 and not decode else 2)
    # Tokens of one request share the keys: N of up to 128, or 64 where AMD's keys are decoded.
    widest = 64 if decode and torch.version.hip else 128
    tokens = max(1, min(widest // block_h, next_power_of_2(query_len)))
    columns = tokens * block_h
    while tokens > 1 and columns * row_bytes > 32 << 10:
        tokens, columns = tokens // 2, columns // 2
    # 64 accumulators per thread, so that several programs share a multiprocessor: one sums over
    # heads while another one's MMA runs. Twice as many halve the work of decoding keys: 7.8 ms
    # for 11.2 with 4096 tokens of 64 heads and 32768 keys (an H100 as sm_80).
    accumulators = 16384 if decode and columns > 64 else 8192
    block_n = accumulators // max(64, columns)
    room = shared - columns * row_bytes
    while block_n > 16 and 2 * block_n * row_bytes > room:
        block_n //= 2
    # With the heads of one token, a tile's MMA takes less time than its load: load further ahead.
    stages = 3 if columns <= 64 and 3 * block_n * row_bytes <= room else 2
    return ScoreTiles(heads, dim, tokens, block_h, block_d, block_n, stages, decode)


def choose_chunk(tiles: ScoreTiles, num_tokens: int, num_keys: int, device: torch.device) -> int:
    """Keys of a program. It is no constant of the kernel, which all lengths share."""
    # Eight programs per multiprocessor balance the load; long chunks amortise the loads of queries.
    count = cdiv(num_tokens, tiles.tokens) * cdiv(num_keys, tiles.block_n)
    return tiles.block_n * max(1, min(32, count // (8 * num_multiprocessors(device))))


def _as_operand(x: Tensor, decode: bool) -> Tensor:
    """``x``; e4m3 as bytes if ``decode``, for GPUs without e4m3."""
    return x.view(torch.uint8) if decode else x


def indexer_scores(call: IndexerScores) -> None:
    q, weights, keys, key_scales, row_starts, row_ends, out = call
    num_tokens, heads, dim = q.shape
    num_keys = keys.shape[0]
    if num_tokens == 0 or num_keys == 0:
        return
    tiles = choose_tiles(num_tokens, heads, dim, q.dtype, q.device)
    chunk = choose_chunk(tiles, num_tokens, num_keys, q.device)
    num_chunks = cdiv(num_keys, chunk)
    _ragged_kernel[(cdiv(num_tokens, tiles.tokens) * num_chunks,)](
        _as_operand(q, tiles.decode),
        weights,
        _as_operand(keys, tiles.decode),
        key_scales,
        row_starts,
        row_ends,
        out,
        num_tokens,
        num_keys,
        num_chunks,
        chunk,
        q.stride(0),
        q.stride(1),
        weights.stride(0),
        keys.stride(0),
        out.stride(0),
        T=tiles,
        num_warps=4,
    )


def _paged_arguments(cache: PagedCache, decode: bool) -> dict[str, object]:
    """Pointers and constant strides of a cache of index keys."""
    fp8, scales, bf16 = cache.stored()
    keys = bf16
    if fp8 is not None:
        keys = fp8 if decode or cache.format.is_fp4 else fp8.view(torch.float8_e4m3fn)
    arguments = {"keys": keys, "key_scales": scales, "num_pages": cache.num_pages}
    arguments["PAGE_SIZE"] = cache.page_size
    arguments["KEY_PAGE"], arguments["KEY_ROW"] = page_and_row(keys)
    arguments["SCALE_PAGE"], arguments["SCALE_ROW"] = page_and_row(scales)
    arguments["FP4_BLOCK"] = cache.format.scale_block if cache.format.is_fp4 else 0
    return arguments


def indexer_scores_paged(call: IndexerScoresPaged) -> None:
    q, weights, cache, page_table, seq_lens, max_seq_len, ratio, out = call
    batch, query_len, heads, dim = q.shape
    if batch == 0 or query_len == 0:
        return
    tiles = choose_tiles(query_len, heads, dim, q.dtype, q.device)
    chunk = choose_chunk(tiles, batch * query_len, max_seq_len, q.device)
    num_chunks = cdiv(max_seq_len, chunk)
    _paged_kernel[(batch * cdiv(query_len, tiles.tokens) * num_chunks,)](
        _as_operand(q, tiles.decode),
        weights,
        page_table=page_table,
        seq_lens=seq_lens,
        input_row_offsets=None,
        out=out,
        row_ends=None,
        request_ids=None,
        num_tokens=query_len,
        num_keys=max_seq_len,
        num_requests=batch,
        table_width=page_table.shape[1],
        first_token=0,
        query_len=query_len,
        num_chunks=num_chunks,
        chunk=chunk,
        skip=0,
        stride_q=q.stride(1),
        stride_q_request=q.stride(0),
        stride_head=q.stride(2),
        stride_weights=weights.stride(1),
        stride_weights_request=weights.stride(0),
        stride_table=page_table.stride(0),
        stride_lens=seq_lens.stride(0),
        stride_out=out.stride(1),
        stride_out_request=out.stride(0),
        LENS_OF_TOKENS=seq_lens.dim() == 2,
        CAUSAL=True,
        RATIO=ratio,
        **_paged_arguments(cache, tiles.decode),
        T=tiles,
        num_warps=4,
    )


class Selection(NamedTuple):
    """The selection of a tier, for kernels that select from their own scores.

    Args:
        select_topk: launcher; see :func:`sparsemla.select_topk`.
        schedule_lists: the schedule of a selection, which has the size of the lists.
    """

    select_topk: Callable[[SelectTopk], None]
    schedule_lists: Scheduler


SELECTION = Selection(select_topk, schedule_lists)


def indexer_topk(call: IndexerTopk) -> None:
    select_in_chunks(call, scorer(call), SELECTION)


Scorer = Callable[[slice, Tensor, Tensor], None]
"""``(tokens, scores, rows)``: stores the scores of a slice of the tokens, and the number of keys
and the request of each token in ``rows``, int32 ``[2, tokens]``. Tokens with at most ``topk`` keys
need no scores."""


def scorer(call: IndexerTopk) -> Scorer:
    """The function that scores slices of the tokens of ragged requests."""
    q, weights, cache, page_table = call.index_q, call.weights, call.cache, call.page_table
    num_tokens, heads, dim = q.shape
    num_requests, table_width = page_table.shape
    num_keys = call.num_keys
    query_len = max(1, num_tokens // max(1, num_requests))

    def score(tokens: slice, scores: Tensor, rows: Tensor) -> None:
        count = scores.shape[0]
        tiles = choose_tiles(query_len, heads, dim, q.dtype, q.device)
        chunk = choose_chunk(tiles, count, num_keys, q.device)
        num_chunks = cdiv(num_keys, chunk)
        _paged_kernel[((count // tiles.tokens + num_requests + 1) * num_chunks,)](
            _rows_of(_as_operand(q, tiles.decode), tokens),
            _rows_of(weights, tokens),
            page_table=page_table,
            seq_lens=call.seq_lens,
            input_row_offsets=call.input_row_offsets,
            out=scores,
            row_ends=rows[0],
            request_ids=rows[1],
            num_tokens=count,
            num_keys=num_keys,
            num_requests=num_requests,
            table_width=table_width,
            first_token=tokens.start,
            query_len=0,
            num_chunks=num_chunks,
            chunk=chunk,
            skip=call.topk,
            stride_q=q.stride(0),
            stride_q_request=0,
            stride_head=q.stride(1),
            stride_weights=weights.stride(0),
            stride_weights_request=0,
            stride_table=page_table.stride(0),
            stride_lens=0,
            stride_out=scores.stride(0),
            stride_out_request=0,
            LENS_OF_TOKENS=False,
            CAUSAL=call.causal,
            RATIO=call.ratio,
            **_paged_arguments(cache, tiles.decode),
            T=tiles,
            num_warps=4,
        )

    return score


ROW_BYTES = 8
"""Workspace of a token in addition to its scores: the number of its keys, and its request."""


def select_in_chunks(call: IndexerTopk, score: Scorer, selection: Selection) -> None:
    """Score and select in chunks of tokens that fit ``max_workspace_bytes``.

    A single token is always processed, even if its scores exceed the bound: four bytes for each
    column of its page table row.
    """
    out, num_keys, topk = call.out, call.num_keys, call.topk
    num_tokens = out.shape[0]
    if num_tokens == 0 or num_keys == 0:
        out.fill_(-1)
        return
    at_once = _tokens_at_once(
        selection.schedule_lists,
        num_tokens,
        [(num_keys, topk)],
        call.max_workspace_bytes,
        out.device,
    )
    scores = torch.empty(at_once, num_keys, dtype=torch.float32, device=out.device)
    rows = torch.empty(2, at_once, dtype=torch.int32, device=out.device)
    for tokens in _slices(num_tokens, at_once):
        count = tokens.stop - tokens.start
        score(tokens, scores[:count], rows[:, :count])
        selection.select_topk(
            SelectTopk(
                scores[:count],
                topk,
                row_ends=rows[0, :count],
                page_table=call.page_table if call.as_slots else None,
                request_ids=rows[1, :count] if call.as_slots else None,
                page_size=call.cache.page_size if call.as_slots else None,
                out=_rows_of(out, tokens),
            )
        )


BLOCKS_OF_TILE = 128
"""Blocks of a step of a program that reduces scores."""


def indexer_topk_blocks(call: IndexerTopkBlocks) -> None:
    num_tokens, num_keys, num_blocks = len(call.out), call.num_keys, call.num_blocks
    if num_tokens == 0 or num_keys == 0:
        call.out.fill_(-1)
        call.blocks_out.fill_(-1)
        return
    device, scored = call.out.device, call.scored
    score = scorer(scored)
    # The number of a token's blocks takes the room of one more score.
    selections = [(num_keys, call.topk), (num_blocks + 1, call.topk_blocks)]
    at_once = _tokens_at_once(
        schedule_lists, num_tokens, selections, call.max_workspace_bytes, device
    )
    scores = torch.empty(at_once, num_keys, dtype=torch.float32, device=device)
    best = torch.empty(at_once, num_blocks, dtype=torch.float32, device=device)
    rows = torch.empty(2, at_once, dtype=torch.int32, device=device)
    block_ends = torch.empty(at_once, dtype=torch.int32, device=device)
    programs = min(32, cdiv(num_blocks, BLOCKS_OF_TILE))
    for tokens in _slices(num_tokens, at_once):
        count = tokens.stop - tokens.start
        score(tokens, scores[:count], rows[:, :count])
        _best_of_blocks[(count, programs)](
            scores,
            scores.stride(0),
            rows[0],
            best,
            best.stride(0),
            block_ends,
            scored.topk,
            BLOCK_SIZE=call.block_size,
            WIDTH=next_power_of_2(call.block_size),
            TILE=max(1, min(BLOCKS_OF_TILE, 4096 // next_power_of_2(call.block_size))),
            num_warps=4,
        )
        ends = rows[0, :count], block_ends[:count]
        for values, topk, end, out in (
            (scores, call.topk, ends[0], call.out),
            (best, call.topk_blocks, ends[1], call.blocks_out),
        ):
            select_topk(SelectTopk(values[:count], topk, row_ends=end, out=out[tokens]))


def indexer_topk_of_blocks(call: IndexerTopkOfBlocks) -> None:
    q, weights, cache, blocks = call.index_q, call.weights, call.cache, call.blocks
    num_tokens, heads, dim = q.shape
    num_listed, num_requests = call.num_listed, len(call.seq_lens)
    if num_tokens == 0 or num_listed == 0 or call.num_keys == 0:
        call.out.fill_(-1)
        return
    tiles = choose_tiles(1, heads, dim, q.dtype, q.device)
    at_once = _tokens_at_once(
        schedule_lists, num_tokens, [(num_listed, call.topk)], call.max_workspace_bytes, q.device
    )
    scores = torch.empty(at_once, num_listed, dtype=torch.float32, device=q.device)
    rows = torch.empty(2, at_once, dtype=torch.int32, device=q.device)
    for tokens in _slices(num_tokens, at_once):
        count = tokens.stop - tokens.start
        chunk = choose_chunk(tiles, count, num_listed, q.device)
        num_chunks = cdiv(num_listed, chunk)
        _listed_kernel[((count + num_requests + 1) * num_chunks,)](
            _rows_of(_as_operand(q, tiles.decode), tokens),
            _rows_of(weights, tokens),
            page_table=call.page_table,
            seq_lens=call.seq_lens,
            input_row_offsets=call.input_row_offsets,
            blocks=_rows_of(blocks, tokens),
            out=scores,
            row_ends=rows[0],
            row_ids=rows[1],
            num_tokens=count,
            num_keys=call.num_keys,
            num_requests=num_requests,
            table_width=call.page_table.shape[1],
            num_blocks=blocks.shape[1],
            first_token=tokens.start,
            num_chunks=num_chunks,
            chunk=chunk,
            skip=call.topk,
            stride_q=q.stride(0),
            stride_head=q.stride(1),
            stride_weights=weights.stride(0),
            stride_table=call.page_table.stride(0),
            stride_blocks=blocks.stride(0),
            stride_out=scores.stride(0),
            CAUSAL=call.causal,
            RATIO=call.ratio,
            BLOCK_SIZE=call.block_size,
            **_paged_arguments(cache, tiles.decode),
            # Loads of keys depend on loads of page ids, and these on loads of blocks. AMD's
            # compiler keeps a tile for each stage.
            STAGES=(2 if torch.version.hip else 3) * (tiles.stages - 1) + 1,
            T=tiles,
            num_warps=4,
        )
        # A column is a place in the list of blocks, as a position is a place in a page table.
        select_topk(
            SelectTopk(
                scores[:count],
                call.topk,
                row_ends=rows[0, :count],
                page_table=_rows_of(blocks, tokens),
                request_ids=rows[1, :count],
                page_size=call.block_size,
                out=_rows_of(call.out, tokens),
            )
        )


def _rows_of(x: Tensor, rows: slice) -> Tensor:
    """``x[rows]``, without a call of torch in the common case of all rows."""
    return x if rows.stop - rows.start == x.shape[0] else x[rows]


def _slices(total: int, size: int) -> list[slice]:
    """Slices of ``size`` that cover ``range(total)``; the last may be shorter."""
    return [slice(first, min(first + size, total)) for first in range(0, total, size)]


def _tokens_at_once(
    schedule_of: Scheduler,
    num_tokens: int,
    selections: Sequence[tuple[int, int]],
    max_workspace_bytes: int,
    device: torch.device,
) -> int:
    """Tokens per chunk, so that scores and candidate lists fit the bound; at least 1.

    Each of the selections, one after another, has so many columns, all of which stay, and a topk.
    Only the last chunk may have fewer tokens.
    """
    row_bytes = sum(4 * num_columns for num_columns, _ in selections) + ROW_BYTES
    count = num_tokens
    while count > 1:
        # Fewer rows may be spread over more programs with more lists, which take more memory. So a
        # loop checks the bound, also for the last chunk.
        last = num_tokens % count or count
        lists = max(
            schedule_of(rows, num_columns, topk, device).list_bytes(num_columns)
            for rows in (count, last)
            for num_columns, topk in selections
        )
        fitting = (max_workspace_bytes - lists) // row_bytes
        if count <= fitting:
            break
        count = max(1, min(max(fitting, count // 2), count - 1))
        # A row count that is not a multiple of the rows in progress adds a wave.
        count -= count % schedule_of(count, *selections[0], device).programs
    return count

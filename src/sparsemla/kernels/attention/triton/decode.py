"""Decode attention in portable Triton: programs take splits of the keys, a merge joins them."""

from __future__ import annotations

import triton
import triton.language as tl

from sparsemla.kernels.attention.arguments import DenseDecode, SparseDecode
from sparsemla.kernels.attention.operands import KeyList, Queries, Results
from sparsemla.kernels.attention.schedule import splits_of_dense, splits_of_sparse
from sparsemla.kernels.attention.triton.merge import merge_splits, partial_results
from sparsemla.kernels.attention.triton.tiles import (
    LOG2E,
    LOWEST,
    attend_slots,
    attend_tile,
    choose_tile,
    load_queries,
    store_state,
)
from sparsemla.kernels.common.fp8 import INTERPRETED, has_fp8
from sparsemla.kernels.common.integers import cdiv
from sparsemla.kernels.common.lists import end_of
from sparsemla.kernels.common.paged import cache_arguments
from sparsemla.kernels.common.slots import is_slot


@triton.jit
def length_of(stream, request, token):
    """Number of leading entries to use of a token's selection."""
    length = stream.num_keys
    if stream.lengths is not None:
        at = request * stream.lengths_request
        if stream.lengths_token is not None:
            at += token * stream.lengths_token
        length = tl.minimum(tl.load(stream.lengths + at), length).to(tl.int32)
    return length


@triton.jit
def load_rows_of(queries, request, token, head, real, L: tl.constexpr):
    """The queries of heads, as :func:`load_queries` gives them."""
    q_rows = request * queries.request_stride + token * queries.token_stride
    q_rows += head * queries.head_stride
    rope_rows = None
    if queries.rope is not None:
        rope_rows = request * queries.rope_request_stride + token * queries.rope_token_stride
        rope_rows += head * queries.rope_head_stride
    return load_queries(queries.q, q_rows, queries.rope, rope_rows, real, L)


@triton.jit
def store_rows_of(results, split, request, token, head, real, m, l, acc, L: tl.constexpr):
    """Normalise and store the outputs of heads."""
    sink = None
    if results.attn_sink is not None:
        sink = tl.load(results.attn_sink + head, mask=real, other=0.0)
    out_rows = split * results.out_split + request * results.out_request
    out_rows += token * results.out_token
    lse_rows = split * results.lse_split + request * results.lse_request
    lse_rows += token * results.lse_token
    out_rows += head.to(tl.int64) * results.out_head
    store_state(
        results.out, out_rows, results.lse, lse_rows + head, real, sink, m, l, acc, L.value_dim
    )


@triton.jit(do_not_specialize_on_alignment=["num_splits"])
def _sparse_decode(
    queries,
    rows,
    stream,
    extra_rows,
    extra,
    results,
    query_len,
    num_heads,
    num_splits,
    scale_log2,
    L: tl.constexpr,
    EXTRA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BRANCH: tl.constexpr,
    NATIVE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One query token, tile of heads and split of the selected slots."""
    VALUE: tl.constexpr = L.value_block
    num_tiles = tl.cdiv(num_heads, BLOCK_M)
    head = tl.program_id(0) % num_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    real = head < num_heads
    split = (tl.program_id(0) // num_tiles % num_splits).to(tl.int64)
    token = tl.program_id(0) // num_tiles // num_splits
    request = (token // query_len).to(tl.int64)
    token = (token % query_len).to(tl.int64)

    slots = stream.keys + (request * stream.keys_request + token * stream.keys_token)
    end = end_of(slots, length_of(stream, request, token), rows.num_slots, 1024)
    num_steps = tl.cdiv(end, BLOCK_N)
    if EXTRA is not None:
        extra_slots = extra.keys + (request * extra.keys_request + token * extra.keys_token)
        extra_length = length_of(extra, request, token)
        extra_end = end_of(extra_slots, extra_length, extra_rows.num_slots, 1024)
        steps = tl.cdiv(num_steps + tl.cdiv(extra_end, BLOCK_N), num_splits)
    else:
        steps = tl.cdiv(num_steps, num_splits)
    first = split.to(tl.int32) * steps
    last = first + steps

    q_value, q_rest = load_rows_of(queries, request, token, head.to(tl.int64), real, L)
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE], tl.float32)
    m, l, acc = attend_slots(
        q_value,
        q_rest,
        rows,
        slots,
        first * BLOCK_N,
        tl.minimum(last * BLOCK_N, end),
        scale_log2,
        m,
        l,
        acc,
        L,
        BLOCK_N,
        BRANCH,
        NATIVE,
        UPCAST,
    )
    if EXTRA is not None:
        m, l, acc = attend_slots(
            q_value,
            q_rest,
            extra_rows,
            extra_slots,
            tl.maximum(first - num_steps, 0) * BLOCK_N,
            tl.minimum((last - num_steps) * BLOCK_N, extra_end),
            scale_log2,
            m,
            l,
            acc,
            EXTRA,
            BLOCK_N,
            BRANCH,
            NATIVE,
            UPCAST,
        )

    store_rows_of(results, split, request, token, head, real, m, l, acc, L)


def sparse_decode(call: SparseDecode) -> None:
    q = call.q
    batch, query_len, num_heads = q.shape[:3]
    rows, layout = cache_arguments(call.cache)
    extra_rows = extra_layout = extra = None
    if call.extra_cache is not None and call.extra_topk_indices is not None:
        extra_rows, extra_layout = cache_arguments(call.extra_cache)
        extra = KeyList.of(call.extra_cache, call.extra_topk_indices, call.extra_topk_lengths)
    num_splits = splits_of_sparse(call).num_splits
    tile = choose_tile(num_heads, layout, q.dtype, q.device, extra=extra_layout)
    num_programs = batch * query_len * cdiv(num_heads, tile.block_m) * num_splits
    if num_programs == 0:
        return
    outs, lses = partial_results(
        q, layout.value_dim, num_splits, call.workspace, call.out, call.lse
    )
    _sparse_decode[(num_programs,)](
        Queries.of(q, call.q_rope),
        rows,
        KeyList.of(call.cache, call.topk_indices, call.topk_lengths),
        extra_rows,
        extra,
        Results.of_splits(outs, lses, call.attn_sink),
        query_len,
        num_heads,
        num_splits,
        call.softmax_scale * LOG2E.value,
        L=layout,
        EXTRA=extra_layout,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BRANCH=tile.branch,
        NATIVE=has_fp8(q.device),
        UPCAST=INTERPRETED,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    merge_splits(outs, lses, call.attn_sink, call.out, call.lse)


@triton.jit(do_not_specialize_on_alignment=["num_splits"])
def _dense_decode(
    queries,
    rows,
    page_table,
    table_request,
    table_width,
    seq_lens,
    results,
    query_len,
    num_heads,
    num_splits,
    scale_log2,
    L: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BRANCH: tl.constexpr,
    NATIVE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One request, tile of its (token, head) rows, which share keys, and split of its keys."""
    VALUE: tl.constexpr = L.value_block
    num_tiles = tl.cdiv(query_len * num_heads, BLOCK_M)
    query = tl.program_id(0) % num_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    real = query < query_len * num_heads
    split = (tl.program_id(0) // num_tiles % num_splits).to(tl.int64)
    request = (tl.program_id(0) // num_tiles // num_splits).to(tl.int64)
    token = query // num_heads
    head = query % num_heads

    length = tl.load(seq_lens + request)
    end = tl.minimum(length, table_width * L.page_size).to(tl.int32)
    # Keys that a row sees: all, or up to its own position.
    limit = tl.zeros([BLOCK_M], tl.int32) + end
    if CAUSAL:
        limit = tl.minimum(limit, (length - query_len + 1).to(tl.int32) + token)
        end = tl.max(tl.where(real, limit, 0))
    steps = tl.cdiv(tl.cdiv(end, BLOCK_N), num_splits)
    first = split.to(tl.int32) * steps * BLOCK_N
    last = tl.minimum(first + steps * BLOCK_N, end)

    token = token.to(tl.int64)
    head = head.to(tl.int64)
    q_value, q_rest = load_rows_of(queries, request, token, head, real, L)
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE], tl.float32)
    page_table += request * table_request
    num_pages = rows.num_slots // L.page_size
    for start in range(first, last, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        page = tl.load(page_table + tl.minimum(at, last - 1) // L.page_size)
        valid = is_slot(page, num_pages) & (at < last)
        seen = valid[None, :]
        if CAUSAL:
            seen = seen & (at[None, :] < limit[:, None])
        m, l, acc = attend_tile(
            q_value,
            q_rest,
            rows,
            page.to(tl.int64),
            (at % L.page_size).to(tl.int64),
            valid,
            seen,
            start < last,
            scale_log2,
            m,
            l,
            acc,
            L,
            BRANCH,
            NATIVE,
            UPCAST,
        )

    store_rows_of(results, split, request, token, head, real, m, l, acc, L)


def dense_decode(call: DenseDecode) -> None:
    q, page_table = call.q, call.page_table
    batch, query_len, num_heads = q.shape[:3]
    rows, layout = cache_arguments(call.cache)
    num_splits = splits_of_dense(call).num_splits
    tile = choose_tile(query_len * num_heads, layout, q.dtype, q.device)
    num_programs = batch * cdiv(query_len * num_heads, tile.block_m) * num_splits
    if num_programs == 0:
        return
    outs, lses = partial_results(
        q, layout.value_dim, num_splits, call.workspace, call.out, call.lse
    )
    _dense_decode[(num_programs,)](
        Queries.of(q),
        rows,
        page_table,
        page_table.stride(0),
        page_table.shape[1],
        call.seq_lens,
        Results.of_splits(outs, lses, call.attn_sink),
        query_len,
        num_heads,
        num_splits,
        call.softmax_scale * LOG2E.value,
        L=layout,
        CAUSAL=call.causal and query_len > 1,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BRANCH=tile.branch,
        NATIVE=has_fp8(q.device),
        UPCAST=INTERPRETED,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    merge_splits(outs, lses, call.attn_sink, call.out, call.lse)

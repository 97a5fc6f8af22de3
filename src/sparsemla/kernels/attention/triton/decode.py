"""Decode attention in portable Triton: programs take splits of the keys, a merge joins them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from sparsemla.kernels.attention.arguments import DenseDecode, SparseDecode
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


def length_strides(lengths: Tensor | None) -> tuple[int, int | None]:
    """Strides of a request and of a token in lengths ``[B]`` or ``[B, S]``, in elements.

    The second is None if the tokens of a request have one length.
    """
    if lengths is None or lengths.dim() == 1:
        return 1, None
    return lengths.stride(0), 1 if lengths.shape[1] > 1 else None


@triton.jit
def length_of(lengths, request_stride, token_stride, request, token, topk):
    """Number of leading entries to use of a token's selection."""
    length = topk
    if lengths is not None:
        at = request * request_stride
        if token_stride is not None:
            at += token * token_stride
        length = tl.minimum(tl.load(lengths + at), topk).to(tl.int32)
    return length


@triton.jit(do_not_specialize_on_alignment=["num_splits"])
def _sparse_decode(
    q,
    q_request,
    q_token,
    q_head,
    q_rope,
    rope_request,
    rope_token,
    rope_head,
    rows,
    topk_indices,
    indices_request,
    indices_token,
    topk_lengths,
    lengths_request,
    lengths_token,
    topk,
    extra_rows,
    extra_indices,
    extra_request,
    extra_token,
    extra_lengths,
    extra_lengths_request,
    extra_lengths_token,
    extra_topk,
    attn_sink,
    out,
    out_split,
    out_request,
    out_token,
    out_head,
    lse,
    lse_split,
    lse_request,
    lse_token,
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

    topk_indices += request * indices_request + token * indices_token
    length = length_of(topk_lengths, lengths_request, lengths_token, request, token, topk)
    end = end_of(topk_indices, length, rows.num_slots, 1024)
    num_steps = tl.cdiv(end, BLOCK_N)
    if EXTRA is not None:
        extra_indices += request * extra_request + token * extra_token
        extra_length = length_of(
            extra_lengths, extra_lengths_request, extra_lengths_token, request, token, extra_topk
        )
        extra_end = end_of(extra_indices, extra_length, extra_rows.num_slots, 1024)
        steps = tl.cdiv(num_steps + tl.cdiv(extra_end, BLOCK_N), num_splits)
    else:
        steps = tl.cdiv(num_steps, num_splits)
    first = split.to(tl.int32) * steps
    last = first + steps

    wide = head.to(tl.int64)
    q_rows = request * q_request + token * q_token + wide * q_head
    rope_rows = None
    if q_rope is not None:
        rope_rows = request * rope_request + token * rope_token + wide * rope_head
    q_value, q_rest = load_queries(q, q_rows, q_rope, rope_rows, real, L)
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE], tl.float32)
    m, l, acc = attend_slots(
        q_value,
        q_rest,
        rows,
        topk_indices,
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
            extra_indices,
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

    sink = None
    if attn_sink is not None:
        sink = tl.load(attn_sink + head, mask=real, other=0.0)
    out_rows = split * out_split + request * out_request + token * out_token
    lse_rows = split * lse_split + request * lse_request + token * lse_token
    out_rows += wide * out_head
    store_state(out, out_rows, lse, lse_rows + head, real, sink, m, l, acc, L.value_dim)


def sparse_decode(call: SparseDecode) -> None:
    q, q_rope, topk_indices = call.q, call.q_rope, call.topk_indices
    batch, query_len, num_heads = q.shape[:3]
    rows, layout = cache_arguments(call.cache)
    extra_rows, extra_layout, extra_strides, extra_topk = None, None, (0, 0), 0
    if call.extra_cache is not None and call.extra_topk_indices is not None:
        extra_rows, extra_layout = cache_arguments(call.extra_cache)
        extra_strides = call.extra_topk_indices.stride()[:2]
        extra_topk = call.extra_topk_indices.shape[2]
    num_splits = splits_of_sparse(call).num_splits
    tile = choose_tile(num_heads, layout, q.dtype, q.device, extra=extra_layout)
    num_programs = batch * query_len * cdiv(num_heads, tile.block_m) * num_splits
    if num_programs == 0:
        return
    outs, lses = partial_results(
        q, layout.value_dim, num_splits, call.workspace, call.out, call.lse
    )
    _sparse_decode[(num_programs,)](
        q,
        *q.stride()[:3],
        q_rope,
        *((None, None, None) if q_rope is None else q_rope.stride()[:3]),
        rows,
        topk_indices,
        *topk_indices.stride()[:2],
        call.topk_lengths,
        *length_strides(call.topk_lengths),
        topk_indices.shape[2],
        extra_rows,
        call.extra_topk_indices,
        *extra_strides,
        call.extra_topk_lengths,
        *length_strides(call.extra_topk_lengths),
        extra_topk,
        call.attn_sink if num_splits == 1 else None,
        outs,
        *outs.stride()[:4],
        lses,
        *lses.stride()[:3],
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
    q,
    q_request,
    q_token,
    q_head,
    rows,
    page_table,
    table_request,
    table_width,
    seq_lens,
    attn_sink,
    out,
    out_split,
    out_request,
    out_token,
    out_head,
    lse,
    lse_split,
    lse_request,
    lse_token,
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
    q_rows = request * q_request + token * q_token + head * q_head
    q_value, q_rest = load_queries(q, q_rows, None, None, real, L)
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

    sink = None
    if attn_sink is not None:
        sink = tl.load(attn_sink + head, mask=real, other=0.0)
    out_rows = split * out_split + request * out_request + token * out_token + head * out_head
    lse_rows = split * lse_split + request * lse_request + token * lse_token + head
    store_state(out, out_rows, lse, lse_rows, real, sink, m, l, acc, L.value_dim)


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
        q,
        *q.stride()[:3],
        rows,
        page_table,
        page_table.stride(0),
        page_table.shape[1],
        call.seq_lens,
        call.attn_sink if num_splits == 1 else None,
        outs,
        *outs.stride()[:4],
        lses,
        *lses.stride()[:3],
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

"""Decode attention in portable Triton: programs take splits of the keys, a merge joins them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.kernels.common.attention import (
    LN2,
    LOG2E,
    LOWEST,
    attend_slots,
    attend_tile,
    cache_arguments,
    choose_tile,
    end_of,
    is_slot,
    load_queries,
    store_state,
)
from sparsemla.kernels.common.fp8 import INTERPRETED, has_fp8
from sparsemla.kernels.common.integers import cdiv, next_power_of_2


@triton.jit(do_not_specialize_on_alignment=["num_splits"])
def _sparse_decode(
    q,
    q_request,
    q_token,
    q_head,
    rows,
    topk_indices,
    indices_request,
    indices_token,
    topk_lengths,
    topk,
    extra_rows,
    extra_indices,
    extra_request,
    extra_token,
    extra_lengths,
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
    length = topk
    if topk_lengths is not None:
        length = tl.minimum(tl.load(topk_lengths + request), topk).to(tl.int32)
    end = end_of(topk_indices, length, rows.num_slots, 1024)
    num_steps = tl.cdiv(end, BLOCK_N)
    if EXTRA is not None:
        extra_indices += request * extra_request + token * extra_token
        extra_length = extra_topk
        if extra_lengths is not None:
            extra_length = tl.minimum(tl.load(extra_lengths + request), extra_topk).to(tl.int32)
        extra_end = end_of(extra_indices, extra_length, extra_rows.num_slots, 1024)
        steps = tl.cdiv(num_steps + tl.cdiv(extra_end, BLOCK_N), num_splits)
    else:
        steps = tl.cdiv(num_steps, num_splits)
    first = split.to(tl.int32) * steps
    last = first + steps

    q_rows = request * q_request + token * q_token + head.to(tl.int64) * q_head
    q_value, q_rest = load_queries(q, q_rows, real, L)
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
    out_rows += head.to(tl.int64) * out_head
    store_state(out, out_rows, lse, lse_rows + head, real, sink, m, l, acc, L.value_dim)


def sparse_decode(
    q: Tensor,
    cache: PagedCache,
    topk_indices: Tensor,
    *,
    softmax_scale: float,
    topk_lengths: Tensor | None,
    attn_sink: Tensor | None,
    extra_cache: PagedCache | None,
    extra_topk_indices: Tensor | None,
    extra_topk_lengths: Tensor | None,
    num_splits: int,
    workspace: Tensor | None,
    out: Tensor,
    lse: Tensor,
    head_tile: int = 64,
) -> None:
    batch, query_len, num_heads = q.shape[:3]
    rows, layout = cache_arguments(cache)
    extra_rows, extra_layout, extra_strides, extra_topk = None, None, (0, 0), 0
    if extra_cache is not None and extra_topk_indices is not None:
        extra_rows, extra_layout = cache_arguments(extra_cache)
        extra_strides = extra_topk_indices.stride()[:2]
        extra_topk = extra_topk_indices.shape[2]
    tile = choose_tile(num_heads, layout, q.dtype, q.device)
    num_programs = batch * query_len * cdiv(num_heads, tile.block_m) * num_splits
    if num_programs == 0:
        return
    outs, lses = partials(out, lse, num_splits, workspace)
    _sparse_decode[(num_programs,)](
        q,
        *q.stride()[:3],
        rows,
        topk_indices,
        *topk_indices.stride()[:2],
        topk_lengths,
        topk_indices.shape[2],
        extra_rows,
        extra_topk_indices,
        *extra_strides,
        extra_topk_lengths,
        extra_topk,
        attn_sink if num_splits == 1 else None,
        outs,
        *outs.stride()[:4],
        lses,
        *lses.stride()[:3],
        query_len,
        num_heads,
        num_splits,
        softmax_scale * LOG2E.value,
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
    merge_splits(outs, lses, attn_sink, out, lse)


def partials(
    out: Tensor, lse: Tensor, num_splits: int, workspace: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Where splits store: ``[splits, B, S, H, V]`` and ``[splits, B, S, H]``, float32.

    A single split stores into the results themselves, and so do all if the results are of that
    shape.
    """
    if out.dim() == 5:
        return out, lse
    if num_splits == 1:
        return out[None], lse[None]
    if workspace is None:
        return lse.new_empty(num_splits, *out.shape), lse.new_empty(num_splits, *lse.shape)
    rows = num_splits * lse.numel()
    floats = workspace[: 4 * rows * (out.shape[-1] + 1)].view(torch.float32)
    outs = floats[: rows * out.shape[-1]].view(num_splits, *out.shape)
    return outs, floats[rows * out.shape[-1] :].view(num_splits, *lse.shape)


def merge_splits(
    outs: Tensor, lses: Tensor, attn_sink: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    """Merge what splits have stored, unless the results are just that."""
    if outs.shape[0] > 1 and outs is not out:
        launch_merge(outs, lses, attn_sink, out, lse)


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
    q_value, q_rest = load_queries(q, q_rows, real, L)
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


def dense_decode(
    q: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    attn_sink: Tensor | None,
    num_splits: int,
    workspace: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    batch, query_len, num_heads = q.shape[:3]
    rows, layout = cache_arguments(cache)
    tile = choose_tile(query_len * num_heads, layout, q.dtype, q.device)
    num_programs = batch * cdiv(query_len * num_heads, tile.block_m) * num_splits
    if num_programs == 0:
        return
    outs, lses = partials(out, lse, num_splits, workspace)
    _dense_decode[(num_programs,)](
        q,
        *q.stride()[:3],
        rows,
        page_table,
        page_table.stride(0),
        page_table.shape[1],
        seq_lens,
        attn_sink if num_splits == 1 else None,
        outs,
        *outs.stride()[:4],
        lses,
        *lses.stride()[:3],
        query_len,
        num_heads,
        num_splits,
        softmax_scale * LOG2E.value,
        L=layout,
        CAUSAL=causal and query_len > 1,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BRANCH=tile.branch,
        NATIVE=has_fp8(q.device),
        UPCAST=INTERPRETED,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    merge_splits(outs, lses, attn_sink, out, lse)


@triton.jit(do_not_specialize=["num_parts"])
def _merge(
    outs,
    outs_part,
    outs_request,
    outs_token,
    outs_head,
    lses,
    lses_part,
    lses_request,
    lses_token,
    attn_sink,
    out,
    out_request,
    out_token,
    out_head,
    lse,
    lse_request,
    lse_token,
    num_parts,
    num_tokens,
    num_heads,
    V: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Some dims of a (request, token, head): parts weighted by ``exp(their lse - that of all)``."""
    BLOCKS: tl.constexpr = (V + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // BLOCKS
    block = tl.program_id(0) % BLOCKS
    head = (row % num_heads).to(tl.int64)
    token = (row // num_heads % num_tokens).to(tl.int64)
    request = (row // num_heads // num_tokens).to(tl.int64)
    d = block * BLOCK + tl.arange(0, BLOCK)
    outs += request * outs_request + token * outs_token + head * outs_head
    lses += request * lses_request + token * lses_token + head
    m = LOWEST
    l = 0.0
    acc = tl.zeros([BLOCK], tl.float32)
    for start in range(0, num_parts, PARTS):
        part = start + tl.arange(0, PARTS)
        real = part < num_parts
        part = part.to(tl.int64)
        state = tl.load(lses + part * lses_part, mask=real, other=float("-inf")) * LOG2E
        at = (part * outs_part)[:, None] + d[None, :]
        x = tl.load(outs + at, mask=real[:, None] & (d < V)[None, :], other=0.0).to(tl.float32)
        m_new = tl.maximum(m, tl.max(state))
        shrink = tl.exp2(m - m_new)
        weight = tl.exp2(state - m_new)
        # What a part without keys holds does not count: it may be NaN.
        x = tl.where((state > float("-inf"))[:, None], x * weight[:, None], 0.0)
        acc = acc * shrink + tl.sum(x, 0)
        l = l * shrink + tl.sum(weight)
        m = m_new
    empty = l == 0
    lse += request * lse_request + token * lse_token + head
    if block == 0:
        tl.store(lse, (m + tl.log2(l)) * LN2)  # log2(0) is -inf
    if attn_sink is not None:
        l += tl.exp2(tl.load(attn_sink + head) * LOG2E - m)
    acc = tl.where(empty, 0.0, acc / tl.where(empty, 1.0, l))
    out += request * out_request + token * out_token + head * out_head
    tl.store(out + d, acc.to(out.dtype.element_ty), mask=d < V)


def launch_merge(
    outs: Tensor, lses: Tensor, attn_sink: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    """Merge ``[N, B, S, H, V]`` into ``[B, S, H, V]``."""
    num_parts, batch, num_tokens, num_heads, value_dim = outs.shape
    if out.numel() == 0:
        return
    # A program waits for memory most of its time: dims of few rows are dealt out to more of them.
    num_rows = batch * num_tokens * num_heads
    block = min(next_power_of_2(value_dim), 128 if num_rows <= 1024 else 256)
    _merge[(num_rows * cdiv(value_dim, block),)](
        outs,
        *outs.stride()[:4],
        lses,
        *lses.stride()[:3],
        attn_sink,
        out,
        *out.stride()[:3],
        lse,
        *lse.stride()[:2],
        num_parts,
        num_tokens,
        num_heads,
        V=value_dim,
        BLOCK=block,
        PARTS=min(next_power_of_2(max(num_parts, 1)), 16),
        num_warps=max(block // 128, 1),
    )


def merge_states(
    outs: Tensor, lses: Tensor, *, attn_sink: Tensor | None, out: Tensor, lse: Tensor
) -> None:
    launch_merge(outs[:, None], lses[:, None], attn_sink, out[None], lse[None])

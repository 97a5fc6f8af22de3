"""Prefill attention in portable Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemla.kernels.attention.arguments import DensePrefill, SparseAttention, SparsePrefill
from sparsemla.kernels.attention.triton.tiles import (
    FLOAT32_TILE,
    LN2,
    LOG2E,
    LOWEST,
    Tile,
    attend_slots,
    choose_tile,
    is_hopper,
    load_queries,
    store_state,
)
from sparsemla.kernels.common.fp8 import INTERPRETED, dot, has_fp8
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.common.lists import end_of
from sparsemla.kernels.common.paged import (
    Layout,
    Rows,
    block_of,
    cache_arguments,
    row_arguments,
)

ROW_DTYPES = {
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float32: tl.float32,
}


@triton.jit
def _sparse_prefill(
    q,
    q_token,
    q_head,
    q_rope,
    rope_token,
    rope_head,
    rows,
    topk_indices,
    indices_list,
    topk_lengths,
    token_mask,
    token_mask_list,
    extra_rows,
    extra_indices,
    extra_token,
    extra_lengths,
    extra_topk,
    attn_sink,
    out,
    out_token,
    out_head,
    lse,
    lse_token,
    max_logits,
    max_logits_token,
    num_heads,
    topk,
    scale_log2,
    L: tl.constexpr,
    EXTRA: tl.constexpr,
    LIST_TOKENS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BRANCH: tl.constexpr,
    NATIVE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One query token and tile of heads. Tiles of a token are neighbours: they share its rows."""
    VALUE: tl.constexpr = L.value_block
    num_tiles = tl.cdiv(num_heads, BLOCK_M)
    token = (tl.program_id(0) // num_tiles).to(tl.int64)
    head = tl.program_id(0) % num_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    real = head < num_heads

    number = token // LIST_TOKENS
    topk_indices += number * indices_list
    bit = 0
    if token_mask is not None:
        token_mask += number * token_mask_list
        bit = (token % LIST_TOKENS).to(tl.int32)
    length = topk
    if topk_lengths is not None:
        length = tl.minimum(tl.load(topk_lengths + number), topk).to(tl.int32)
    end = end_of(topk_indices, length, rows.num_slots, 1024)

    wide = head.to(tl.int64)
    rope_rows = None
    if q_rope is not None:
        rope_rows = token * rope_token + wide * rope_head
    q_rows = token * q_token + wide * q_head
    q_value, q_rest = load_queries(q, q_rows, q_rope, rope_rows, real, L, DTYPE)
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE], tl.float32)
    m, l, acc = attend_slots(
        q_value,
        q_rest,
        rows,
        topk_indices,
        0,
        end,
        scale_log2,
        m,
        l,
        acc,
        L,
        BLOCK_N,
        BRANCH,
        NATIVE,
        UPCAST,
        token_mask,
        bit,
    )
    if EXTRA is not None:
        extra_indices += token * extra_token
        extra_length = extra_topk
        if extra_lengths is not None:
            extra_length = tl.minimum(tl.load(extra_lengths + token), extra_topk).to(tl.int32)
        m, l, acc = attend_slots(
            q_value,
            q_rest,
            extra_rows,
            extra_indices,
            0,
            end_of(extra_indices, extra_length, extra_rows.num_slots, 1024),
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

    if max_logits is not None:
        highest = tl.where(l == 0, float("-inf"), m * LN2)
        tl.store(max_logits + token * max_logits_token + head, highest, mask=real)
    sink = None
    if attn_sink is not None:
        sink = tl.load(attn_sink + head, mask=real, other=0.0)
    out_rows = token * out_token + head.to(tl.int64) * out_head
    store_state(out, out_rows, lse, token * lse_token + head, real, sink, m, l, acc, L.value_dim)


def sparse_prefill(call: SparsePrefill) -> None:
    _launch(call, *cache_arguments(call.kv))


def sparse_attention(call: SparseAttention) -> None:
    _launch(call.over(call.kv), *row_arguments(call.kv, call.out.shape[2]))


def _launch(call: SparsePrefill, rows: Rows, layout: Layout) -> None:
    """Launch over rows of any dtype, which take the place of the call's."""
    q, q_rope, topk_indices, token_mask = call.q, call.q_rope, call.topk_indices, call.token_mask
    out, lse, max_logits = call.out, call.lse, call.max_logits
    num_tokens, num_heads = q.shape[:2]
    extra_rows, extra_layout, extra_token, extra_topk = None, None, None, None
    if call.extra_cache is not None and call.extra_topk_indices is not None:
        extra_rows, extra_layout = cache_arguments(call.extra_cache)
        extra_token, extra_topk = (
            call.extra_topk_indices.stride(0),
            call.extra_topk_indices.shape[1],
        )
    # Quantised parts are read as bfloat16.
    dtype = torch.bfloat16 if layout.fp8_dim or rows.bf16 is None else rows.bf16.dtype
    exact = dtype == torch.float32
    tile = FLOAT32_TILE
    if not exact:
        masked = token_mask is not None
        tile = choose_tile(num_heads, layout, q.dtype, q.device, masked, extra_layout)
    num_programs = num_tokens * cdiv(num_heads, tile.block_m)
    if num_programs == 0:
        return
    _sparse_prefill[(num_programs,)](
        q,
        *q.stride()[:2],
        q_rope,
        *((None, None) if q_rope is None else q_rope.stride()[:2]),
        rows,
        topk_indices,
        topk_indices.stride(0),
        call.topk_lengths,
        token_mask,
        None if token_mask is None else token_mask.stride(0),
        extra_rows,
        call.extra_topk_indices,
        extra_token,
        call.extra_topk_lengths,
        extra_topk,
        call.attn_sink,
        out,
        out.stride(0),
        out.stride(1),
        lse,
        lse.stride(0),
        max_logits,
        0 if max_logits is None else max_logits.stride(0),
        num_heads,
        topk_indices.shape[1],
        call.softmax_scale * LOG2E.value,
        L=layout,
        EXTRA=extra_layout,
        LIST_TOKENS=call.list_tokens,
        DTYPE=ROW_DTYPES[dtype],
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BRANCH=tile.branch,
        NATIVE=has_fp8(q.device),
        UPCAST=INTERPRETED or exact,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


@triton.jit(do_not_specialize=["num_requests", "num_tokens", "num_rows", "num_tiles"])
def _dense_prefill(
    q,
    q_token,
    q_head,
    k,
    k_token,
    k_head,
    v,
    v_token,
    v_head,
    input_row_offsets,
    kv_row_offsets,
    num_requests,
    num_tokens,
    num_rows,
    num_tiles,
    out,
    out_token,
    out_head,
    lse,
    lse_token,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    VALUE: tl.constexpr,
    CAUSAL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One head and tile of the query tokens of a request. Neighbours share keys.

    The tiles of request ``b`` start at ``input_row_offsets[b] // BLOCK_M + b``: always enough, and
    computed without a sum over earlier requests. Later tiles see more keys and start first.
    Padding tokens after the last request form one more request, without keys. Offsets beyond the
    tokens or keys stand for the last one.
    """
    tile = num_tiles - 1 - tl.program_id(0) % num_tiles
    head = (tl.program_id(0) // num_tiles).to(tl.int64)
    request = 0
    beyond = num_requests + 1
    while beyond - request > 1:
        middle = (request + beyond) // 2
        if tl.load(input_row_offsets + middle).to(tl.int32) // BLOCK_M + middle <= tile:
            request = middle
        else:
            beyond = middle
    is_request = request < num_requests
    first = _offset(input_row_offsets + request, True, num_tokens)
    end_query = _offset(input_row_offsets + request + 1, is_request, num_tokens)
    num_queries = end_query - first
    first_key = _offset(kv_row_offsets + request, True, num_rows)
    end_key = _offset(kv_row_offsets + request + 1, is_request, num_rows)
    num_keys = tl.where(is_request, end_key - first_key, 0)
    begin = (tile - first // BLOCK_M - request) * BLOCK_M
    if (begin < 0) | (begin >= num_queries):
        return

    query = begin + tl.arange(0, BLOCK_M)
    real = query < num_queries
    end = num_keys  # end of the keys that any query of the tile sees
    whole = num_keys  # end of the keys that all queries of the tile see
    if CAUSAL:
        end = tl.minimum(end, num_keys - num_queries + begin + BLOCK_M)
        whole = tl.maximum(num_keys - num_queries + begin + 1, 0)
    whole = tl.minimum(whole, num_keys) // BLOCK_N * BLOCK_N
    limit = tl.minimum(num_keys - num_queries + query + 1, num_keys) if CAUSAL else num_keys

    token = first.to(tl.int64) + query
    q += (token * q_token)[:, None] + head * q_head
    q_main = load_dims(q, real, 0, MAIN, HEAD_DIM)
    q_rest = q_main
    if REST > 0:
        q_rest = load_dims(q, real, MAIN, REST, HEAD_DIM)
    k += first_key.to(tl.int64) * k_token + head * k_head
    v += first_key.to(tl.int64) * v_token + head * v_head
    m = tl.full([BLOCK_M], LOWEST, tl.float32)
    l = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, VALUE], tl.float32)
    for MASKED in tl.static_range(2):
        start_at = whole if MASKED else 0
        stop_at = end if MASKED else whole
        for start in range(start_at, stop_at, BLOCK_N):
            at = start + tl.arange(0, BLOCK_N)
            there = at < num_keys
            rows = at.to(tl.int64)[:, None]
            key = load_dims(k + rows * k_token, there, 0, MAIN, HEAD_DIM)
            s = dot(q_main, tl.trans(key), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), UPCAST)
            if REST > 0:
                key = load_dims(k + rows * k_token, there, MAIN, REST, HEAD_DIM)
                s = dot(q_rest, tl.trans(key), s, UPCAST)
            s *= scale_log2
            if MASKED:
                seen = at[None, :] < (limit[:, None] if CAUSAL else limit)
                s = tl.where(seen, s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, 1))
            alpha = tl.exp2(m - m_new)
            p = tl.exp2(s - m_new[:, None])
            l = l * alpha + tl.sum(p, 1)
            m = m_new
            value = load_dims(v + rows * v_token, there, 0, VALUE, VALUE_DIM)
            acc = dot(p.to(value.dtype), value, acc * alpha[:, None], UPCAST)

    store_state(
        out,
        token * out_token + head * out_head,
        lse,
        token * lse_token + head,
        real,
        None,
        m,
        l,
        acc,
        VALUE_DIM,
    )


@triton.jit
def _offset(pointer, there, size):
    """An offset from 0 to ``size``; ``size`` where there is none."""
    offset = tl.load(pointer, mask=there, other=size)
    return tl.minimum(tl.maximum(offset, 0), size).to(tl.int32)


@triton.jit
def load_dims(pointers, real, START: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr):
    """Dims ``START .. START + BLOCK`` of rows, 0 beyond ``DIM`` and in rows that are not real."""
    d = START + tl.arange(0, BLOCK)
    mask = real[:, None]
    if START + BLOCK > DIM:
        mask = mask & (d < DIM)[None, :]
    return tl.load(pointers + d[None, :], mask=mask, other=0)


def dense_prefill(call: DensePrefill) -> None:
    q, k, v, out, lse = call.q, call.k, call.v, call.out, call.lse
    (num_tokens, num_heads, head_dim), value_dim = q.shape, v.shape[2]
    num_requests = call.input_row_offsets.shape[0] - 1
    if num_tokens == 0 or num_heads == 0:
        return
    # 192 dims are 128 and 64: the widest power of two, and the remainder.
    main = max(next_power_of_2(head_dim + 1) // 2, 16)
    rest = block_of(head_dim - main) if head_dim > main else 0
    value = block_of(value_dim)
    tile = _dense_tile(main + rest, value, q)
    num_tiles = num_tokens // tile.block_m + num_requests + 1
    _dense_prefill[(num_tiles * num_heads,)](
        q,
        q.stride(0),
        q.stride(1),
        k,
        k.stride(0),
        k.stride(1),
        v,
        v.stride(0),
        v.stride(1),
        call.input_row_offsets,
        call.kv_row_offsets,
        num_requests,
        num_tokens,
        k.shape[0],
        num_tiles,
        out,
        out.stride(0),
        out.stride(1),
        lse,
        lse.stride(0),
        call.softmax_scale * LOG2E.value,
        HEAD_DIM=head_dim,
        MAIN=main,
        REST=rest,
        VALUE_DIM=value_dim,
        VALUE=value,
        CAUSAL=call.causal,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        UPCAST=INTERPRETED or q.dtype == torch.float32,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _dense_tile(key_dims: int, value_dims: int, q: Tensor) -> Tile:
    """The tile of dense prefill for key and value tiles with these dims."""
    wide = q.dtype == torch.float32 or key_dims + value_dims > 384
    if q.device.type == "cpu" or wide:
        return FLOAT32_TILE
    if is_hopper(q.device):
        return Tile(128, 64, 8, 3)  # two warpgroups of 64 rows; 168 KiB at 192 and 128 dims
    return Tile(64, 32, 4, 2)  # fits 99 KiB, and 64 KiB on AMD

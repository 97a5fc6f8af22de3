"""The gradients of attention over selected rows, in portable Triton.

Five kernels, of which three are plain GEMMs over tiles of one token. For a chunk of tokens::

    _softmax_state    delta = <dout, out>, and what LSE and sink mean for each head
    _weights          S = q K^T, dP = dout V^T, then A = g P and dS       [n, H, K]
    _queries          dq = dS K, gathering the rows a second time
    _terms            the term of each entry, dS^T q + A^T dout           [n K, D]
    add_terms         dkv[row] += its terms, one after the other

A kernel for one architecture may do the first three in one. A token's heads share its rows, so a
term is summed over heads in registers; the terms of different tokens meet in memory. Each row adds
its own in the order of lists and entries, into float32, one at a time. So the bits of the sum do
not depend on the chunks. A stable sort of the indices lists the terms of each row. Without
determinism, ``_terms`` adds to dkv by atomics, and there are no lists and no stored terms.

The tokens that share a list are one token with all their heads. ``_weights`` alone knows that these
do not attend to the same entries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemla.kernels.attention.triton.tiles import LOG2E, is_hopper
from sparsemla.kernels.backward.arguments import SparseAttentionBackward
from sparsemla.kernels.common.fp8 import INTERPRETED, dot
from sparsemla.kernels.common.groups import Heads, attended, chunks, grouped
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.common.lists import (
    ENTRY_BYTES,
    TokenLists,
    add_terms,
    end_of,
    entries_of,
    length_of,
    load_entries,
)


class TokenMask(NamedTuple):
    """Which tokens that share a list attend to its entries: bit ``i`` of an entry for token ``i``.

    Heads ``i * num_heads`` to ``(i + 1) * num_heads - 1`` of the list are those of token ``i``.
    """

    bits: object
    stride: object
    num_heads: object


class Tiles(NamedTuple):
    """Sizes of the tiles: heads, keys and dims of a program, heads of a step of ``_terms``."""

    heads: int
    keys: int
    dims: int
    step: int
    num_warps: int


def choose_tiles(num_heads: int, dtype: torch.dtype, device: torch.device) -> Tiles:
    """The tiles for heads of this dtype. They do not depend on the number of tokens."""
    heads = min(max(next_power_of_2(num_heads), 16), 64)
    if dtype == torch.float32:
        return Tiles(16, 32, 32, 16, 4)
    if is_hopper(device) and num_heads > 32:
        return Tiles(128 if num_heads > 64 else 64, 128, 128, 32, 8)
    return Tiles(heads, 64, 128, min(heads, 32), 4)


@triton.jit
def _heads_of(x, token, head):
    """Offsets of some heads of a token."""
    return token * x.token_stride + head.to(tl.int64) * x.head_stride


@triton.jit(do_not_specialize=["num_rows", "num_heads"])
def _softmax_state(
    dout,
    out,
    lse,
    lse_token,
    dlse,
    dlse_token,
    attn_sink,
    state,
    sink_terms,
    num_rows,
    num_heads,
    V: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """For each head: LSE in base 2, g, and ``g delta - dlse``, so that dS = P (g dP - that)."""
    num_tiles = tl.cdiv(num_heads, HEADS)
    token = (tl.program_id(0) // num_tiles).to(tl.int64)
    head = tl.program_id(0) % num_tiles * HEADS + tl.arange(0, HEADS)
    real = head < num_heads
    delta = tl.zeros([HEADS], tl.float32)
    dout_row = _heads_of(dout, token, head)[:, None]
    out_row = _heads_of(out, token, head)[:, None]
    for start in range(0, V, DIMS):
        d = start + tl.arange(0, DIMS)[None, :]
        mask = real[:, None] & (d < V)
        x = tl.load(dout.rows + dout_row + d, mask=mask, other=0).to(tl.float32)
        y = tl.load(out.rows + out_row + d, mask=mask, other=0).to(tl.float32)
        delta += tl.sum(x * y, 1)
    row_lse = tl.load(lse + token * lse_token + head, mask=real, other=0)
    empty = row_lse == float("-inf")
    at = state + token * num_heads + head
    share = tl.full([HEADS], 1.0, tl.float32)
    if attn_sink is not None:
        sink = tl.load(attn_sink + head, mask=real, other=0)
        share = 1 / (1 + tl.exp2((sink - row_lse) * LOG2E))
        sink_share = 1 / (1 + tl.exp2((row_lse - sink) * LOG2E))
        tl.store(
            sink_terms + token * num_heads + head,
            tl.where(empty, 0.0, -sink_share * delta),
            mask=real,
        )
    offset = share * delta
    if dlse is not None:
        offset -= tl.load(dlse + token * dlse_token + head, mask=real, other=0)
    tl.store(at, row_lse * LOG2E, mask=real)
    tl.store(at + num_rows, share, mask=real)
    tl.store(at + 2 * num_rows, offset, mask=real)


@triton.jit
def _load_dims(x, row, real, start, D: tl.constexpr, DIMS: tl.constexpr):
    """Dims of rows, at offsets ``row``, from ``start`` on; rows that are not real are not read."""
    d = start + tl.arange(0, DIMS)
    mask = real[:, None] & (d < D)[None, :]
    return tl.load(x + row[:, None] + d[None, :], mask=mask, other=0)


@triton.jit(do_not_specialize=["num_slots", "num_rows", "num_heads"])
def _weights(
    q,
    dout,
    kv,
    kv_row,
    num_slots,
    lists,
    token_mask,
    state,
    probs,
    dscores,
    num_rows,
    num_heads,
    topk,
    scale,
    scale_log2,
    D: tl.constexpr,
    V: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """``A = g P`` and ``softmax_scale * dS`` of a tile of heads and entries; 0 where not valid."""
    num_tiles = tl.cdiv(topk, KEYS)
    num_blocks = tl.cdiv(num_heads, HEADS)
    token = (tl.program_id(0) // (num_tiles * num_blocks)).to(tl.int64)
    at = tl.program_id(0) % num_tiles * KEYS + tl.arange(0, KEYS)
    head = tl.program_id(0) // num_tiles % num_blocks * HEADS + tl.arange(0, HEADS)
    real = head < num_heads
    index, valid = entries_of(lists, token, at, topk, num_slots)

    target = (token * num_heads + head.to(tl.int64)[:, None]) * topk + at[None, :]
    inside = real[:, None] & (at < topk)[None, :]
    if tl.max(valid.to(tl.int32), 0) == 0:
        zeros = tl.zeros([HEADS, KEYS], probs.dtype.element_ty)
        tl.store(probs + target, zeros, mask=inside)
        tl.store(dscores + target, zeros, mask=inside)
        return

    s = tl.zeros([HEADS, KEYS], tl.float32)
    dp = tl.zeros([HEADS, KEYS], tl.float32)
    row = index * kv_row
    q_row, dout_row = _heads_of(q, token, head), _heads_of(dout, token, head)
    for start in range(0, V, DIMS):
        keys = tl.trans(_load_dims(kv, row, valid, start, V, DIMS))
        s = dot(_load_dims(q.rows, q_row, real, start, V, DIMS), keys, s, UPCAST)
        dp = dot(_load_dims(dout.rows, dout_row, real, start, V, DIMS), keys, dp, UPCAST)
    for start in range(V, D, DIMS):
        keys = tl.trans(_load_dims(kv, row, valid, start, D, DIMS))
        s = dot(_load_dims(q.rows, q_row, real, start, D, DIMS), keys, s, UPCAST)

    rows = state + token * num_heads + head
    lse2 = tl.load(rows, mask=real, other=0)[:, None]
    share = tl.load(rows + num_rows, mask=real, other=0)[:, None]
    offset = tl.load(rows + 2 * num_rows, mask=real, other=0)[:, None]
    p = tl.exp2(s * scale_log2 - lse2)
    kept = valid[None, :]
    if token_mask is not None:
        bits = tl.load(token_mask.bits + token * token_mask.stride + at, mask=valid, other=0)
        owner = 1 << tl.minimum(head // token_mask.num_heads, 8)
        kept = (bits.to(tl.int32)[None, :] & owner[:, None]) != 0
    ds = tl.where(kept, p * (share * dp - offset) * scale, 0.0)
    p = tl.where(kept, p * share, 0.0)
    tl.store(probs + target, p.to(probs.dtype.element_ty), mask=inside)
    tl.store(dscores + target, ds.to(dscores.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_slots", "num_heads"])
def _queries(
    dscores,
    kv,
    kv_row,
    num_slots,
    lists,
    dq,
    num_heads,
    topk,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Some dims of dq for a tile of heads: ``dS K``."""
    NUM_PARTS: tl.constexpr = (D + DIMS - 1) // DIMS
    num_blocks = tl.cdiv(num_heads, HEADS)
    token = (tl.program_id(0) // (num_blocks * NUM_PARTS)).to(tl.int64)
    head = tl.program_id(0) // NUM_PARTS % num_blocks * HEADS + tl.arange(0, HEADS)
    first = tl.program_id(0) % NUM_PARTS * DIMS
    real = head < num_heads
    topk_indices = lists.indices + token * lists.stride
    end = end_of(topk_indices, length_of(lists.lengths, token, topk), num_slots, 1024)
    acc = tl.zeros([HEADS, DIMS], tl.float32)
    dscores += (token * num_heads + head.to(tl.int64)[:, None]) * topk
    for start in range(0, end, KEYS):
        at = start + tl.arange(0, KEYS)
        index, valid = load_entries(topk_indices, at, end, num_slots)
        ds = tl.load(dscores + at[None, :], mask=real[:, None] & (at < end)[None, :], other=0)
        rows = _load_dims(kv, index * kv_row, valid, first, D, DIMS)
        acc = dot(ds, rows.to(ds.dtype), acc, UPCAST)
    d = first + tl.arange(0, DIMS)
    target = dq.rows + token * dq.token_stride
    target = target + head.to(tl.int64)[:, None] * dq.head_stride + d[None, :]
    tl.store(target, acc.to(dq.rows.dtype.element_ty), mask=real[:, None] & (d < D)[None, :])


@triton.jit(do_not_specialize=["num_slots", "num_heads"])
def _terms(
    probs,
    dscores,
    q,
    dout,
    lists,
    terms,
    total,
    num_slots,
    num_heads,
    topk,
    D: tl.constexpr,
    V: tl.constexpr,
    STEP: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Some dims of the terms of a tile of entries: ``dS^T q``, and ``A^T dout`` in value dims.

    ``terms``: where each entry's term goes, or None to add it to its row of ``total``.
    """
    NUM_PARTS: tl.constexpr = (D + DIMS - 1) // DIMS
    num_tiles = tl.cdiv(topk, KEYS)
    token = (tl.program_id(0) // (num_tiles * NUM_PARTS)).to(tl.int64)
    at = tl.program_id(0) // NUM_PARTS % num_tiles * KEYS + tl.arange(0, KEYS)
    first = tl.program_id(0) % NUM_PARTS * DIMS
    index, valid = entries_of(lists, token, at, topk, num_slots)
    if tl.max(valid.to(tl.int32), 0) == 0:
        return
    acc = tl.zeros([KEYS, DIMS], tl.float32)
    probs += token * num_heads * topk + at[None, :]
    dscores += token * num_heads * topk + at[None, :]
    inside = (at < topk)[None, :]
    q_rows = q.rows + token * q.token_stride
    dout_rows = dout.rows + token * dout.token_stride
    for start in range(0, num_heads, STEP):
        head = start + tl.arange(0, STEP)
        real = head < num_heads
        head = head.to(tl.int64)
        ds = tl.load(dscores + head[:, None] * topk, mask=real[:, None] & inside, other=0)
        part = _load_dims(q_rows, head * q.head_stride, real, first, D, DIMS)
        acc = dot(tl.trans(ds), part.to(ds.dtype), acc, UPCAST)
    if first < V:
        for start in range(0, num_heads, STEP):
            head = start + tl.arange(0, STEP)
            real = head < num_heads
            head = head.to(tl.int64)
            p = tl.load(probs + head[:, None] * topk, mask=real[:, None] & inside, other=0)
            part = _load_dims(dout_rows, head * dout.head_stride, real, first, V, DIMS)
            acc = dot(tl.trans(p), part.to(p.dtype), acc, UPCAST)
    d = first + tl.arange(0, DIMS)[None, :]
    mask = valid[:, None] & (d < D)
    if terms is not None:
        target = terms + (token * topk + at[:, None]) * D + d
        tl.store(target, acc.to(terms.dtype.element_ty), mask=mask)
    else:
        tl.atomic_add(total + index[:, None] * D + d, acc, mask=mask, sem="relaxed")


def softmax_state(
    dout: Tensor, out: Tensor, lse: Tensor, attn_sink: Tensor | None, dlse: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The state ``[3, T, H]`` of ``_softmax_state``, and the tokens' terms of d_sink."""
    num_tokens, num_heads, value_dim = out.shape
    state = lse.new_empty(3, num_tokens, num_heads)
    sink_terms = None if attn_sink is None else lse.new_empty(num_tokens, num_heads)
    _softmax_state[(num_tokens * cdiv(num_heads, 8),)](
        Heads.of(dout),
        Heads.of(out),
        lse,
        lse.stride(0),
        dlse,
        0 if dlse is None else dlse.stride(0),
        attn_sink,
        state,
        sink_terms,
        num_tokens * num_heads,
        num_heads,
        V=value_dim,
        HEADS=8,
        DIMS=128,
        num_warps=4,
    )
    return state, sink_terms


def token_mask_of(token_mask: Tensor | None, lists: slice, num_heads: int) -> TokenMask | None:
    """The masks of some lists, as an argument of ``_weights``."""
    if token_mask is None:
        return None
    return TokenMask(token_mask[lists], token_mask.stride(0), num_heads)


def sparse_attention_backward(call: SparseAttentionBackward) -> None:
    dout, q, kv, token_mask = call.dout, call.q, call.kv, call.token_mask
    dq, dkv = call.dq, call.dkv
    (num_tokens, num_heads, head_dim), topk = q.shape, call.topk_indices.shape[1]
    if num_tokens * num_heads * topk == 0:
        for result in (dq, dkv, call.d_sink):
            result.zero_()
        return
    topk_indices = attended(call.topk_indices, token_mask, num_tokens, call.list_tokens)
    total = dkv if dkv.dtype == torch.float32 else torch.empty_like(dkv, dtype=torch.float32)
    total.zero_()
    list_heads = call.list_tokens * num_heads
    tiles = choose_tiles(list_heads, q.dtype, q.device)
    state, sink_terms = softmax_state(dout, call.out, call.lse, call.attn_sink, call.dlse)
    value_dim = call.out.shape[2]
    # float16 cannot hold small gradients, so its weights are bfloat16 too.
    weight_dtype = torch.float32 if q.dtype == torch.float32 else torch.bfloat16
    term_dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    list_bytes = 2 * list_heads * topk * weight_dtype.itemsize
    if call.deterministic:
        list_bytes += topk * (head_dim * term_dtype.itemsize + ENTRY_BYTES)
    num_lists = min(max(call.max_workspace_bytes // list_bytes, 1), len(topk_indices))
    probs, dscores = q.new_empty(2, num_lists, list_heads, topk, dtype=weight_dtype)
    terms = None
    if call.deterministic:
        terms = q.new_empty(num_lists * topk, head_dim, dtype=term_dtype)
    common = {"D": head_dim, "UPCAST": INTERPRETED or q.dtype == torch.float32}
    for some, tokens, size in chunks(num_tokens, call.list_tokens, num_lists):
        count, heads_of_list = some.stop - some.start, size * num_heads
        lists = TokenLists.of(topk_indices, call.topk_lengths, some)
        *heads, part_dq = (Heads.of(grouped(x[tokens], size)) for x in (q, dout, dq))
        rows = kv, kv.stride(0), kv.shape[0]
        _weights[(count * cdiv(heads_of_list, tiles.heads) * cdiv(topk, tiles.keys),)](
            *heads,
            *rows,
            lists,
            token_mask_of(token_mask, some, num_heads),
            state[:, tokens],
            probs,
            dscores,
            num_tokens * num_heads,
            heads_of_list,
            topk,
            call.softmax_scale,
            call.softmax_scale * LOG2E.value,
            V=value_dim,
            HEADS=tiles.heads,
            KEYS=tiles.keys,
            DIMS=min(tiles.dims, 64),
            num_warps=tiles.num_warps,
            num_stages=3,
            **common,
        )
        parts = cdiv(head_dim, tiles.dims)
        _queries[(count * cdiv(heads_of_list, tiles.heads) * parts,)](
            dscores,
            *rows,
            lists,
            part_dq,
            heads_of_list,
            topk,
            HEADS=tiles.heads,
            KEYS=min(tiles.keys, 64),
            DIMS=tiles.dims,
            num_warps=tiles.num_warps,
            num_stages=5,  # an index is loaded stages before its row
            **common,
        )
        _terms[(count * cdiv(topk, tiles.keys) * parts,)](
            probs,
            dscores,
            *heads,
            lists,
            terms,
            total,
            kv.shape[0],
            heads_of_list,
            topk,
            V=value_dim,
            STEP=tiles.step,
            KEYS=tiles.keys,
            DIMS=tiles.dims,
            num_warps=tiles.num_warps,
            num_stages=3,
            **common,
        )
        if terms is not None:
            add_terms(terms, lists, total)
    if total is not dkv:
        dkv.copy_(total)
    if sink_terms is not None:
        torch.sum(sink_terms, 0, out=call.d_sink)

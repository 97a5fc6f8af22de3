"""The indexer's training in portable Triton.

Over lists, a program has one token::

    _list_scores      scores of a tile of entries
    _list_queries     dindex_q and dweights of a tile of heads: the entries pass by
    _list_terms       the terms of dindex_k of a tile of entries: the heads pass by
    add_terms         dindex_k[row] += its terms, one after the other
    _list_targets     attention of all heads to a tile of entries

Over all rows, for a chunk of tokens::

    _dense_tiles      attention of all heads, and scores, of a tile of tokens and rows  [n, S] twice
    _dense_losses     the loss of a token, and G = dloss / dscores, in place of its attention
    _dense_queries    dindex_q and dweights of a tile of tokens and a head: the rows pass by
    _dense_keys       dindex_k of a tile of rows: tokens and heads pass by, in one order for all

Heads are added up in registers. What comes to memory, some 30 bytes for each token and row, is
little against the FLOP, of which attention has the largest part and is computed once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemla.kernels.common.fp8 import INTERPRETED, dot
from sparsemla.kernels.common.groups import Heads
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.common.lists import (
    ENTRY_BYTES,
    TokenLists,
    add_terms,
    entries_of,
    length_of,
    load_entries,
)
from sparsemla.kernels.losses.arguments import (
    AttentionTarget,
    DenseIndexGradients,
    DenseIndexLoss,
    SelectedScores,
    SelectedScoresBackward,
)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
MINUS_INF = tl.constexpr(float("-inf"))

LIST_BYTES = 512 << 20
"""Workspace for the terms of some tokens at a time."""


class Tiles(NamedTuple):
    """Sizes of the tiles.

    Args:
        heads: heads of a step or a program.
        keys: entries or rows of a tile.
        tokens: tokens of a tile, where rows are not listed.
        upcast: whether MMAs take float32: in Triton's interpreter, and if bfloat16 is too coarse.
        num_warps: warps of a program with a sum of ``[tokens, dims]``.
        dim: dims of a row.
        block: dims of a tile, all of the indexer's or some of the attention's.
    """

    heads: int
    keys: int
    tokens: int
    upcast: bool
    num_warps: int
    dim: int
    block: int


def choose_tiles(num_heads: int, exact: bool, dim: int) -> Tiles:
    """The tiles for so many heads; they depend on nothing that differs between chunks."""
    heads, block = (max(16, next_power_of_2(size)) for size in (num_heads, dim))
    if exact:  # FMAs keep operands and sums in registers
        return Tiles(16, 32, 16, True, 4, dim, block)
    return Tiles(min(heads, 64), 64, 64, INTERPRETED, 8, dim, block)


class Indexer(NamedTuple):
    """The tensors of an indexer and their strides."""

    queries: Tensor
    token_stride: int
    head_stride: int
    weights: Tensor
    weights_stride: int
    keys: Tensor
    row_stride: int


def indexer_of(index_q: Tensor, weights: Tensor, index_k: Tensor) -> Indexer:
    strides = index_q.stride()[:2]
    return Indexer(index_q, *strides, weights, weights.stride(0), index_k, index_k.stride(0))


@triton.jit
def _load_rows(rows, row, real, start, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Dims of rows from ``start`` on; rows that are not real are 0 and not read."""
    d = start + tl.arange(0, BLOCK)
    mask = real[:, None] & (d < DIM)[None, :]
    return tl.load(rows + row[:, None] + d[None, :], mask=mask, other=0)


@triton.jit
def _load_keys(x, row, real, T: tl.constexpr):
    """The index keys of some rows."""
    return _load_rows(x.keys, row * x.row_stride, real, 0, T.dim, T.block)


@triton.jit
def _load_heads(x, token, head, real, T: tl.constexpr):
    """The weights and queries of some heads of a token."""
    w = tl.load(x.weights + token * x.weights_stride + head, mask=real, other=0).to(tl.float32)
    queries = x.queries + token * x.token_stride
    row = head.to(tl.int64) * x.head_stride
    return w, _load_rows(queries, row, real, 0, T.dim, T.block)


@triton.jit
def _store_heads(dindex_q, dweights, at, real, dq, dw, T: tl.constexpr):
    """Store the gradients of heads, numbered ``at``."""
    tl.store(dweights + at, dw.to(dweights.dtype.element_ty), mask=real)
    d = tl.arange(0, T.block)
    mask = real[:, None] & (d < T.dim)[None, :]
    target = dindex_q + at[:, None] * T.dim + d[None, :]
    tl.store(target, dq.to(dindex_q.dtype.element_ty), mask=mask)


@triton.jit
def _relu(x):
    return tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _as_operand(x, like, UPCAST: tl.constexpr):
    """``x`` in the dtype of the other operand, unless MMAs take float32."""
    if not UPCAST:
        x = x.to(like.dtype)
    return x


@triton.jit
def _add_queries(queries, keys, given, factors, dq, dw, UPCAST: tl.constexpr):
    """Add the part of a tile of keys to dindex_q and dweights; ``given`` is shaped as scores."""
    x = tl.zeros([queries.shape[0], keys.shape[0]], tl.float32)
    x = dot(queries, tl.trans(keys), x, UPCAST)
    dw += tl.sum(_relu(x) * given, 1)
    dx = tl.where(x > 0, given * factors[:, None], 0.0)
    return dot(_as_operand(dx, keys, UPCAST), keys, dq, UPCAST), dw


@triton.jit(do_not_specialize=["num_rows", "topk"])
def _list_scores(indexer, lists, out, num_rows, topk, num_heads, T: tl.constexpr):
    HEADS: tl.constexpr = T.heads
    KEYS: tl.constexpr = T.keys
    num_tiles = tl.cdiv(topk, KEYS)
    token = (tl.program_id(0) // num_tiles).to(tl.int64)
    at = tl.program_id(0) % num_tiles * KEYS + tl.arange(0, KEYS)
    row, valid = entries_of(lists, token, at, topk, num_rows)
    keys = _load_keys(indexer, row, valid, T)
    score = tl.zeros([KEYS], tl.float32)
    for start in range(0, num_heads, HEADS):
        head = start + tl.arange(0, HEADS)
        real = head < num_heads
        w, queries = _load_heads(indexer, token, head, real, T)
        x = dot(keys, tl.trans(queries), tl.zeros([KEYS, HEADS], tl.float32), T.upcast)
        score += tl.sum(tl.where(real[None, :], _relu(x) * w[None, :], 0.0), 1)
    tl.store(out + token * topk + at, tl.where(valid, score, MINUS_INF), mask=at < topk)


@triton.jit(do_not_specialize=["num_rows", "topk"])
def _list_queries(
    dscores,
    dscores_token,
    indexer,
    lists,
    dindex_q,
    dweights,
    num_rows,
    topk,
    num_heads,
    T: tl.constexpr,
):
    HEADS: tl.constexpr = T.heads
    KEYS: tl.constexpr = T.keys
    BLOCK_D: tl.constexpr = T.block
    num_tiles = tl.cdiv(num_heads, HEADS)
    token = (tl.program_id(0) // num_tiles).to(tl.int64)
    head = tl.program_id(0) % num_tiles * HEADS + tl.arange(0, HEADS)
    real = head < num_heads
    w, queries = _load_heads(indexer, token, head, real, T)
    topk_indices = lists.indices + token * lists.stride
    length = length_of(lists.lengths, token, topk)
    dscores += token * dscores_token
    dw = tl.zeros([HEADS], tl.float32)
    dq = tl.zeros([HEADS, BLOCK_D], tl.float32)
    for start in range(0, topk, KEYS):
        at = start + tl.arange(0, KEYS)
        row, valid = load_entries(topk_indices, at, length, num_rows)
        given = tl.load(dscores + at, mask=valid, other=0)
        keys = _load_keys(indexer, row, valid, T)
        dq, dw = _add_queries(queries, keys, given[None, :], w, dq, dw, T.upcast)
    _store_heads(dindex_q, dweights, token * num_heads + head, real, dq, dw, T)


@triton.jit(do_not_specialize=["num_rows", "topk"])
def _list_terms(
    dscores, dscores_token, indexer, lists, terms, num_rows, topk, num_heads, T: tl.constexpr
):
    HEADS: tl.constexpr = T.heads
    KEYS: tl.constexpr = T.keys
    BLOCK_D: tl.constexpr = T.block
    num_tiles = tl.cdiv(topk, KEYS)
    token = (tl.program_id(0) // num_tiles).to(tl.int64)
    at = tl.program_id(0) % num_tiles * KEYS + tl.arange(0, KEYS)
    row, valid = entries_of(lists, token, at, topk, num_rows)
    given = tl.load(dscores + token * dscores_token + at, mask=valid, other=0)
    keys = _load_keys(indexer, row, valid, T)
    term = tl.zeros([KEYS, BLOCK_D], tl.float32)
    for start in range(0, num_heads, HEADS):
        head = start + tl.arange(0, HEADS)
        w, queries = _load_heads(indexer, token, head, head < num_heads, T)
        x = dot(keys, tl.trans(queries), tl.zeros([KEYS, HEADS], tl.float32), T.upcast)
        dx = tl.where(x > 0, given[:, None] * w[None, :], 0.0)
        term = dot(_as_operand(dx, queries, T.upcast), queries, term, T.upcast)
    d = tl.arange(0, T.block)
    target = terms + (token * topk + at)[:, None] * T.dim + d[None, :]
    mask = valid[:, None] & (d < T.dim)[None, :]
    tl.store(target, term.to(terms.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "topk"])
def _list_targets(
    q,
    kv,
    kv_row,
    lists,
    lse,
    lse_token,
    attn_sink,
    out,
    num_rows,
    topk,
    num_heads,
    scale_log2,
    T: tl.constexpr,
):
    HEADS: tl.constexpr = T.heads
    KEYS: tl.constexpr = T.keys
    num_tiles = tl.cdiv(topk, KEYS)
    token = (tl.program_id(0) // num_tiles).to(tl.int64)
    at = tl.program_id(0) % num_tiles * KEYS + tl.arange(0, KEYS)
    row, valid = entries_of(lists, token, at, topk, num_rows)
    total = tl.zeros([KEYS], tl.float32)
    for start in range(0, num_heads, HEADS):
        head = start + tl.arange(0, HEADS)
        real = head < num_heads
        s = tl.zeros([HEADS, KEYS], tl.float32)
        for first in range(0, T.dim, T.block):
            keys = _load_rows(kv, row * kv_row, valid, first, T.dim, T.block)
            queries = q.rows + token * q.token_stride
            row_of_head = head.to(tl.int64) * q.head_stride
            queries = _load_rows(queries, row_of_head, real, first, T.dim, T.block)
            s = dot(queries, tl.trans(keys), s, T.upcast)
        row_lse = tl.load(lse + token * lse_token + head, mask=real, other=0)
        row_lse = tl.where(row_lse == MINUS_INF, 0.0, row_lse)  # no valid entry
        p = tl.exp2(s * scale_log2 - (row_lse * LOG2E)[:, None])
        if attn_sink is not None:
            sink = tl.load(attn_sink + head, mask=real, other=0)
            p *= (1 / (1 + tl.exp2((sink - row_lse) * LOG2E)))[:, None]
        total += tl.sum(tl.where(real[:, None], p, 0.0), 0)
    tl.store(out + token * topk + at, tl.where(valid, total, 0.0), mask=at < topk)


def selected_scores(call: SelectedScores) -> None:
    index_q, topk_indices, out = call.index_q, call.topk_indices, call.out
    (num_tokens, num_heads, dim), topk = index_q.shape, topk_indices.shape[1]
    if out.numel() == 0:
        return
    tiles = choose_tiles(num_heads, index_q.dtype == torch.float32, dim)
    _list_scores[(num_tokens * cdiv(topk, tiles.keys),)](
        indexer_of(index_q, call.weights, call.index_k),
        TokenLists.of(topk_indices, call.topk_lengths),
        out,
        call.index_k.shape[0],
        topk,
        num_heads,
        T=tiles,
    )


def selected_scores_backward(call: SelectedScoresBackward) -> None:
    dscores, index_q, weights, index_k, topk_indices, topk_lengths, *grads = call
    dindex_q, dweights, dindex_k = grads
    (num_tokens, num_heads, dim), topk = index_q.shape, topk_indices.shape[1]
    total = torch.zeros_like(dindex_k, dtype=torch.float32)
    # float16 cannot hold small gradients.
    tiles = choose_tiles(num_heads, index_q.dtype != torch.bfloat16, dim)
    token_bytes = max(1, topk) * (4 * dim + ENTRY_BYTES)
    chunk = max(1, min(num_tokens, LIST_BYTES // token_bytes))
    terms = index_q.new_empty(chunk * topk, dim, dtype=torch.float32)
    for first in range(0, num_tokens, chunk):
        some = slice(first, min(first + chunk, num_tokens))
        count = some.stop - first
        lists = TokenLists.of(topk_indices, topk_lengths, some)
        indexer = indexer_of(index_q[some], weights[some], index_k)
        sizes = index_k.shape[0], topk, num_heads
        given = dscores[some], dscores.stride(0)
        _list_queries[(count * cdiv(num_heads, tiles.heads),)](
            *given, indexer, lists, dindex_q[some], dweights[some], *sizes, T=tiles
        )
        if topk and index_k.shape[0]:
            _list_terms[(count * cdiv(topk, tiles.keys),)](
                *given, indexer, lists, terms, *sizes, T=tiles
            )
            add_terms(terms, lists, total)
    dindex_k.copy_(total)


def attention_target(call: AttentionTarget) -> None:
    q, kv, lse, topk_indices, out = call.q, call.kv, call.lse, call.topk_indices, call.out
    (num_tokens, num_heads, dim), topk = q.shape, topk_indices.shape[1]
    if out.numel() == 0:
        return
    tiles = choose_tiles(num_heads, q.dtype == torch.float32, dim)
    _list_targets[(num_tokens * cdiv(topk, tiles.keys),)](
        Heads.of(q),
        kv,
        kv.stride(0),
        TokenLists.of(topk_indices, call.topk_lengths),
        lse,
        lse.stride(0),
        call.attn_sink,
        out,
        kv.shape[0],
        topk,
        num_heads,
        call.softmax_scale * LOG2E.value,
        T=tiles._replace(block=min(tiles.block, 64)),
        num_stages=3,
    )
    if call.normalize:
        normalize_rows(out)


def normalize_rows(target: Tensor) -> None:
    """Divide rows by their sum, in place; a row without mass stays 0."""
    mass = target.sum(-1, keepdim=True)
    target.div_(mass.where(mass != 0, 1))


@triton.jit
def load_ranges(row_starts, row_ends, token, real, num_rows):
    """Start and end of what tokens see; 0 and 0 for tokens that are not real."""
    start = tl.load(row_starts + token, mask=real, other=0)
    start = tl.minimum(tl.maximum(start, 0), num_rows).to(tl.int32)
    end = tl.load(row_ends + token, mask=real, other=0)
    return start, tl.minimum(tl.maximum(end, 0), num_rows).to(tl.int32)


@triton.jit
def _union(start, end, num_rows):
    """The range of rows that some tokens see together; empty if none sees a row."""
    some = start < end
    return tl.min(tl.where(some, start, num_rows), 0), tl.max(tl.where(some, end, 0), 0)


@triton.jit
def _sees(start, end, row):
    """Which tokens see which rows, ``[tokens, rows]``."""
    return (row[None, :] >= start[:, None]) & (row[None, :] < end[:, None])


@triton.jit
def _load_tokens(x, token, head, real, T: tl.constexpr):
    """The weights and queries of a head of some tokens."""
    queries = x.queries + tl.cast(head, tl.int64) * x.head_stride
    queries = _load_rows(queries, token * x.token_stride, real, 0, T.dim, T.block)
    w = tl.load(x.weights + token * x.weights_stride + head, mask=real, other=0)
    return w.to(tl.float32), queries


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _dense_tiles(
    q,
    k,
    lse,
    lse_token,
    indexer,
    row_starts,
    row_ends,
    target,
    scores,
    num_tokens,
    num_rows,
    num_heads,
    num_index_heads,
    scale_log2,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    T: tl.constexpr,
):
    TOKENS: tl.constexpr = T.tokens
    KEYS: tl.constexpr = T.keys
    num_tiles = tl.cdiv(num_rows, KEYS)
    token = (tl.program_id(0) // num_tiles * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    begin = tl.program_id(0) % num_tiles * KEYS
    real = token < num_tokens
    start, end = load_ranges(row_starts, row_ends, token, real, num_rows)
    low, high = _union(start, end, num_rows)
    if (low >= begin + KEYS) | (high <= begin):
        return
    row = begin + tl.arange(0, KEYS)
    there = row < num_rows
    row = row.to(tl.int64)

    total = tl.zeros([TOKENS, KEYS], tl.float32)
    for head in range(num_heads):
        s = tl.zeros([TOKENS, KEYS], tl.float32)
        for first in range(0, D, BLOCK_D):
            queries = q.rows + tl.cast(head, tl.int64) * q.head_stride
            queries = _load_rows(queries, token * q.token_stride, real, first, D, BLOCK_D)
            keys = k.rows + tl.cast(head, tl.int64) * k.head_stride
            keys = _load_rows(keys, row * k.token_stride, there, first, D, BLOCK_D)
            s = dot(queries, tl.trans(keys), s, T.upcast)
        row_lse = tl.load(lse + token * lse_token + head, mask=real, other=0) * LOG2E
        total += tl.exp2(s * scale_log2 - row_lse[:, None])

    score = tl.zeros([TOKENS, KEYS], tl.float32)
    keys = _load_keys(indexer, row, there, T)
    for head in range(num_index_heads):
        w, queries = _load_tokens(indexer, token, head, real, T)
        x = dot(queries, tl.trans(keys), tl.zeros([TOKENS, KEYS], tl.float32), T.upcast)
        score += _relu(x) * w[:, None]

    at = token[:, None] * num_rows + row[None, :]
    seen = _sees(start, end, row)
    tl.store(target + at, total, mask=seen)
    tl.store(scores + at, score, mask=seen)


@triton.jit(do_not_specialize=["num_rows", "pitch"])
def _dense_losses(
    scores, target, row_starts, row_ends, row_weights, losses, num_rows, pitch, BLOCK: tl.constexpr
):
    """The loss of a token. Its target becomes the gradient of its scores."""
    token = tl.program_id(0).to(tl.int64)
    start, end = load_ranges(row_starts, row_ends, token, token >= 0, num_rows)
    if start >= end:
        tl.store(losses + token, 0.0)
        return
    scores += token * pitch
    target += token * pitch
    m = tl.full([BLOCK], MINUS_INF, tl.float32)
    l = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for base in range(start, end, BLOCK):
        row = base + tl.arange(0, BLOCK)
        score = tl.load(scores + row, mask=row < end, other=MINUS_INF)
        highest = tl.maximum(m, score, propagate_nan=tl.PropagateNan.ALL)
        finite = tl.where(highest == MINUS_INF, 0.0, highest)  # no row so far
        l = l * tl.exp2((m - finite) * LOG2E) + tl.exp2((score - finite) * LOG2E)
        m = highest
        mass += tl.load(target + row, mask=row < end, other=0)
    highest = tl.max(m, 0)
    lse = highest + tl.log2(tl.sum(l * tl.exp2((m - highest) * LOG2E), 0)) * LN2
    all_mass = tl.sum(mass, 0)
    scale = 1 / tl.where(all_mass == 0, 1.0, all_mass)
    has_mass = tl.where(all_mass == 0, 0.0, 1.0)
    weight = tl.full([], 1.0, tl.float32)
    if row_weights is not None:
        weight = tl.load(row_weights + token)
    loss = tl.zeros([BLOCK], tl.float32)
    for base in range(start, end, BLOCK):
        row = base + tl.arange(0, BLOCK)
        log = tl.load(scores + row, mask=row < end, other=0) - lse
        p = tl.load(target + row, mask=row < end, other=0) * scale
        log_p = tl.log2(tl.where(p == 0, 1.0, p)) * LN2
        loss += tl.where(row < end, p * (log_p - log), 0.0)
        tl.store(target + row, weight * (has_mass * tl.exp2(log * LOG2E) - p), mask=row < end)
    tl.store(losses + token, weight * tl.sum(loss, 0))


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _dense_queries(
    given,
    indexer,
    row_starts,
    row_ends,
    dindex_q,
    dweights,
    num_tokens,
    num_rows,
    num_heads,
    T: tl.constexpr,
):
    TOKENS: tl.constexpr = T.tokens
    KEYS: tl.constexpr = T.keys
    BLOCK_D: tl.constexpr = T.block
    head = (tl.program_id(0) % num_heads).to(tl.int64)
    token = (tl.program_id(0) // num_heads * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
    real = token < num_tokens
    start, end = load_ranges(row_starts, row_ends, token, real, num_rows)
    low, high = _union(start, end, num_rows)
    w, queries = _load_tokens(indexer, token, head, real, T)
    dw = tl.zeros([TOKENS], tl.float32)
    dq = tl.zeros([TOKENS, BLOCK_D], tl.float32)
    for begin in range(low // KEYS * KEYS, high, KEYS):
        row = begin + tl.arange(0, KEYS)
        seen = _sees(start, end, row)
        row = row.to(tl.int64)
        g = tl.load(given + token[:, None] * num_rows + row[None, :], mask=seen, other=0)
        # A row that no token of the tile sees may be NaN.
        there = tl.max(seen.to(tl.int32), 0) > 0
        keys = _load_keys(indexer, row, there, T)
        dq, dw = _add_queries(queries, keys, g, w, dq, dw, T.upcast)
    _store_heads(dindex_q, dweights, token * num_heads + head, real, dq, dw, T)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _dense_keys(
    given, indexer, row_starts, row_ends, total, num_tokens, num_rows, num_heads, T: tl.constexpr
):
    """Add the terms of some tokens to dindex_k, in float32."""
    TOKENS: tl.constexpr = T.tokens
    KEYS: tl.constexpr = T.keys
    begin = tl.program_id(0) * KEYS
    row = begin + tl.arange(0, KEYS)
    there = row < num_rows
    row = row.to(tl.int64)
    keys = _load_keys(indexer, row, there, T)
    d = tl.arange(0, T.block)
    mask = there[:, None] & (d < T.dim)[None, :]
    target = total + row[:, None] * T.dim + d[None, :]
    acc = tl.load(target, mask=mask, other=0)
    for first in range(0, num_tokens, TOKENS):
        token = (first + tl.arange(0, TOKENS)).to(tl.int64)
        real = token < num_tokens
        start, end = load_ranges(row_starts, row_ends, token, real, num_rows)
        low, high = _union(start, end, num_rows)
        if (low < begin + KEYS) & (high > begin):
            seen = _sees(start, end, row)
            g = tl.load(given + token[:, None] * num_rows + row[None, :], mask=seen, other=0)
            for head in range(num_heads):
                w, queries = _load_tokens(indexer, token, head, real, T)
                x = dot(queries, tl.trans(keys), tl.zeros([TOKENS, KEYS], tl.float32), T.upcast)
                dx = tl.where(x > 0, g * w[:, None], 0.0)
                dx = tl.trans(_as_operand(dx, queries, T.upcast))
                acc = dot(dx, queries, acc, T.upcast)
    tl.store(target, acc, mask=mask)


LOSS_BLOCK = 1024
"""Rows that a program of the losses loads at a time."""


def dense_index_loss(call: DenseIndexLoss) -> None:
    _dense(call.counted(), None)


def dense_index_gradients(call: DenseIndexGradients) -> None:
    _dense(call.of_loss().counted(), call.grads)


def losses_of_tokens(
    scores: Tensor,
    target: Tensor,
    ranges: tuple[Tensor, Tensor],
    row_weights: Tensor | None,
    losses: Tensor,
    num_rows: int,
) -> None:
    """Write the losses of tokens; their target ``[n, >= S]`` becomes the gradient of the scores."""
    _dense_losses[(losses.shape[0],)](
        scores,
        target,
        *ranges,
        row_weights,
        losses,
        num_rows,
        target.stride(0),
        BLOCK=LOSS_BLOCK,
    )


def _dense(call: DenseIndexLoss, grads: tuple[Tensor, Tensor, Tensor] | None) -> None:
    """The loss, and its gradients if there is memory for them."""
    q, k, lse, index_q, weights, index_k, *_ = call
    num_tokens, num_heads, head_dim = q.shape
    num_rows, dim = index_k.shape
    if num_tokens * num_rows == 0:
        for result in (call.loss, *(grads or ())):
            result.zero_()
        return
    # float16 cannot hold small gradients; the loss alone has the bits of the loss beside them.
    exact = index_q.dtype != torch.bfloat16 or q.dtype == torch.float32
    tiles = choose_tiles(1, exact, dim)
    at_once = max(1, call.max_workspace_bytes // (8 * num_rows * tiles.tokens)) * tiles.tokens
    target, scores = lse.new_empty(2, min(at_once, num_tokens), num_rows)
    losses = lse.new_empty(num_tokens)
    total = None if grads is None else torch.zeros_like(grads[2], dtype=torch.float32)
    for first in range(0, num_tokens, at_once):
        some = slice(first, min(first + at_once, num_tokens))
        count = some.stop - first
        seen = call.row_starts[some], call.row_ends[some]
        indexer = indexer_of(index_q[some], weights[some], index_k)
        _dense_tiles[(cdiv(count, tiles.tokens) * cdiv(num_rows, tiles.keys),)](
            Heads.of(q[some]),
            Heads.of(k) if k.dim() == 3 else Heads(k, k.stride(0), 0),
            lse[some],
            lse.stride(0),
            indexer,
            *seen,
            target,
            scores,
            count,
            num_rows,
            num_heads,
            index_q.shape[1],
            call.softmax_scale * LOG2E.value,
            D=head_dim,
            BLOCK_D=max(16, min(next_power_of_2(head_dim), 64)),
            T=tiles,
            num_warps=tiles.num_warps,
            num_stages=3,
        )
        weights_of_rows = None if call.row_weights is None else call.row_weights[some]
        losses_of_tokens(scores, target, seen, weights_of_rows, losses[some], num_rows)
        if grads is not None:
            dindex_q, dweights, _ = grads
            sizes = count, num_rows, index_q.shape[1]
            options = {"T": tiles, "num_warps": tiles.num_warps, "num_stages": 2}
            _dense_queries[(cdiv(count, tiles.tokens) * index_q.shape[1],)](
                target, indexer, *seen, dindex_q[some], dweights[some], *sizes, **options
            )
            _dense_keys[(cdiv(num_rows, tiles.keys),)](
                target, indexer, *seen, total, *sizes, **options
            )
    torch.sum(losses, 0, out=call.loss)
    if grads is not None and total is not None:
        grads[2].copy_(total)

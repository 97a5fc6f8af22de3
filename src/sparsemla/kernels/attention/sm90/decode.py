"""Decode attention on Hopper: the splits of :mod:`.triton`, and its merge."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import FP8_DS_MLA
from sparsemla.kernels.attention.schedule import FEW_HEADS, dense, given_or_chosen, sm90_sparse
from sparsemla.kernels.attention.sm90 import (
    bf16,
    bf16_few_heads,
    fp8,
    fp8_few_heads,
    fp8_products_cache,
)
from sparsemla.kernels.attention.sm90.abi import KeyList, Queries, QueryRows, Results
from sparsemla.kernels.attention.triton.decode import length_strides
from sparsemla.kernels.attention.triton.merge import merge_splits, partial_results


def sparse_decode(
    q: Tensor,
    cache: PagedCache,
    topk_indices: Tensor,
    *,
    q_rope: Tensor | None,
    softmax_scale: float,
    topk_lengths: Tensor | None,
    attn_sink: Tensor | None,
    extra_cache: PagedCache | None,
    extra_topk_indices: Tensor | None,
    extra_topk_lengths: Tensor | None,
    precision: str,
    schedule: Sequence[int] | None,
    workspace: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    if q.numel() == 0:
        return
    num_keys = topk_indices.shape[2]
    if extra_topk_indices is not None:
        num_keys += extra_topk_indices.shape[2]
    num_splits, *tiled = given_or_chosen(schedule, sm90_sparse, q, cache, num_keys)
    outs, lses = partial_results(q, cache.format.value_dim, num_splits, workspace, out, lse)
    whole = outs, lses
    sink_token = None
    if tiled and tiled[0] < 64:
        # A request has one token: its tiles of heads take the place of tokens that share a list.
        sink_token = head_tile = tiled[0]
        tiles = q.shape[2] // head_tile
        q = q.squeeze(1).unflatten(1, (tiles, head_tile))
        if q_rope is not None:
            q_rope = q_rope.squeeze(1).unflatten(1, (tiles, head_tile))
        outs = outs.squeeze(2).unflatten(2, (tiles, head_tile))
        lses = lses.squeeze(2).unflatten(2, (tiles, head_tile))
        topk_indices = topk_indices.expand(-1, tiles, -1)
        if extra_topk_indices is not None:
            extra_topk_indices = extra_topk_indices.expand(-1, tiles, -1)
    batch, query_len, num_heads = q.shape[:3]
    results = _results(outs, lses, attn_sink, num_splits, sink_token)
    shape = QueryRows(num_heads, num_heads, query_len, num_splits)
    groups = batch * query_len
    main = _selected(cache, topk_indices, topk_lengths)
    queries = Queries(q, *q.stride()[:3])
    if q_rope is not None:
        queries = Queries(*queries[:4], q_rope, *q_rope.stride()[:3])
    extra = None
    if extra_cache is not None and extra_topk_indices is not None:
        extra = _selected(extra_cache, extra_topk_indices, extra_topk_lengths)
    if precision == "fp8" and takes_fp8_products(cache, num_heads, num_splits, extra is not None):
        fp8_products_cache.launch(
            queries, cache, main, results, shape, softmax_scale, num_groups=groups
        )
        return  # one split has nothing to merge
    few = num_heads <= FEW_HEADS
    if cache.format.fp8_dim:
        launch = fp8_few_heads.launch if few else fp8.launch
    else:
        launch = bf16_few_heads.launch if few else bf16.launch
    launch(
        queries,
        cache,
        main,
        results,
        shape,
        softmax_scale,
        num_groups=groups,
        extra_cache=extra_cache,
        extra=extra,
    )
    merge_splits(*whole, attn_sink, out, lse)


def takes_fp8_products(cache: PagedCache, num_heads: int, num_splits: int, extra: bool) -> bool:
    """Whether FP8 products compute a decode that permits them: where they are faster.

    Args:
        cache: the first stream's.
        num_heads: heads of a token, or of a tile that takes the place of a token.
        num_splits: splits of the keys. Parts of a list are too short for the start of a tile.
        extra: whether there is a second stream.
    """
    return cache.format == FP8_DS_MLA and num_heads > 64 and num_splits == 1 and not extra


def _selected(cache: PagedCache, slots: Tensor, lengths: Tensor | None) -> KeyList:
    request_stride, token_stride = length_strides(lengths)
    return KeyList(
        slots,
        *slots.stride()[:2],
        slots.shape[2],
        lengths,
        cache.num_slots,
        lengths_request=request_stride,
        lengths_token=token_stride,
    )


def _results(
    outs: Tensor,
    lses: Tensor,
    attn_sink: Tensor | None,
    num_splits: int,
    sink_token: int | None = None,
) -> Results:
    """Outputs of the kernel; with several splits, the merge applies the sink."""
    sink = attn_sink if num_splits == 1 else None
    placed = outs, *outs.stride()[:4], lses, *lses.stride()[:3]
    return Results(*placed, None, 0, sink, sink_token=sink_token)


def dense_decode(
    q: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    attn_sink: Tensor | None,
    schedule: Sequence[int] | None,
    workspace: Tensor | None,
    out: Tensor | None,
    lse: Tensor | None,
) -> None:
    batch, query_len, num_heads = q.shape[:3]
    if q.numel() == 0:
        return
    num_keys = page_table.shape[1] * cache.page_size
    num_splits, *_ = given_or_chosen(schedule, dense, q, cache, num_keys)
    outs, lses = partial_results(q, cache.format.value_dim, num_splits, workspace, out, lse)
    launch = bf16.launch
    if cache.format.fp8_dim:
        launch = fp8_few_heads.launch if query_len * num_heads <= FEW_HEADS else fp8.launch
    launch(
        Queries(q, *q.stride()[:3]),
        cache,
        KeyList(
            page_table,
            page_table.stride(0),
            0,
            page_table.shape[1] * cache.page_size,
            seq_lens,
            cache.num_slots,
        ),
        _results(outs, lses, attn_sink, num_splits),
        QueryRows(num_heads, query_len * num_heads, 1, num_splits),
        softmax_scale,
        num_groups=batch,
        paged=True,
        causal=causal and query_len > 1,
    )
    merge_splits(outs, lses, attn_sink, out, lse)

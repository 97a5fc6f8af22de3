"""How calls of the ops become launches of the attention kernels in Gluon."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.kernels.attention.arguments import (
    DenseDecode,
    SparseAttention,
    SparseDecode,
    SparsePrefill,
)
from sparsemla.kernels.attention.operands import KeyList, Queries, QueryRows, Results
from sparsemla.kernels.attention.schedule import splits_of_dense, splits_of_sparse
from sparsemla.kernels.attention.triton.merge import merge_splits, partial_results


class Launch(Protocol):
    """The launch of a kernel over ``num_groups`` groups of query rows.

    Args:
        queries: the rows, with strides in elements.
        cache: the rows of the first stream.
        stream: the keys of each group.
        results: the outputs.
        shape: the numbering of the query rows.
        softmax_scale: factor of the scores.
        num_groups: groups of query rows that share keys.
        extra_cache: the rows of a second stream, of the same format.
        extra: the second stream's keys of each group.
        paged: ``stream`` is a page table.
        causal: mask later keys.
    """

    def __call__(
        self,
        queries: Queries,
        cache: PagedCache,
        stream: KeyList,
        results: Results,
        shape: QueryRows,
        softmax_scale: float,
        *,
        num_groups: int,
        extra_cache: PagedCache | None = None,
        extra: KeyList | None = None,
        paged: bool = False,
        causal: bool = False,
    ) -> None: ...


def sparse_decode(call: SparseDecode, launch: Launch) -> None:
    """Decode attention over selected rows, in splits that are merged."""
    q, q_rope, attn_sink = call.q, call.q_rope, call.attn_sink
    if q.numel() == 0:
        return
    num_splits, head_tile = splits_of_sparse(call)
    outs, lses = whole = partial_results(
        q, call.cache.format.value_dim, num_splits, call.workspace, call.out, call.lse
    )
    topk_indices, extra_topk_indices = call.topk_indices, call.extra_topk_indices
    sink_token = None
    if head_tile < 64:
        # A request has one token: its tiles of heads take the place of tokens that share a list.
        sink_token, tiles = head_tile, q.shape[2] // head_tile
        q = q.squeeze(1).unflatten(1, (tiles, head_tile))
        if q_rope is not None:
            q_rope = q_rope.squeeze(1).unflatten(1, (tiles, head_tile))
        outs = outs.squeeze(2).unflatten(2, (tiles, head_tile))
        lses = lses.squeeze(2).unflatten(2, (tiles, head_tile))
        topk_indices = topk_indices.expand(-1, tiles, -1)
        if extra_topk_indices is not None:
            extra_topk_indices = extra_topk_indices.expand(-1, tiles, -1)
    batch, query_len, num_heads = q.shape[:3]
    extra = None
    if call.extra_cache is not None and extra_topk_indices is not None:
        extra = KeyList.of(call.extra_cache, extra_topk_indices, call.extra_topk_lengths)
    launch(
        Queries.of(q, q_rope),
        call.cache,
        KeyList.of(call.cache, topk_indices, call.topk_lengths),
        Results.of_splits(outs, lses, attn_sink, sink_token),
        QueryRows(num_heads, num_heads, query_len, num_splits),
        call.softmax_scale,
        num_groups=batch * query_len,
        extra_cache=call.extra_cache,
        extra=extra,
    )
    merge_splits(*whole, attn_sink, call.out, call.lse)


def dense_decode(call: DenseDecode, launch: Launch) -> None:
    """Decode attention over the pages of each request, in splits that are merged."""
    q, cache = call.q, call.cache
    if q.numel() == 0:
        return
    batch, query_len, num_heads = q.shape[:3]
    num_splits = splits_of_dense(call).num_splits
    outs, lses = partial_results(
        q, cache.format.value_dim, num_splits, call.workspace, call.out, call.lse
    )
    launch(
        Queries.of(q),
        cache,
        KeyList(
            call.page_table,
            call.page_table.stride(0),
            0,
            call.num_keys,
            call.seq_lens,
            cache.num_slots,
        ),
        Results.of_splits(outs, lses, call.attn_sink),
        QueryRows(num_heads, query_len * num_heads, 1, num_splits),
        call.softmax_scale,
        num_groups=batch,
        paged=True,
        causal=call.causal and query_len > 1,
    )
    merge_splits(outs, lses, call.attn_sink, call.out, call.lse)


def sparse_prefill(call: SparsePrefill, launch: Launch) -> None:
    """Prefill attention over the rows that each token, or each list of tokens, selects."""
    (num_tokens, num_heads), list_tokens = call.q.shape[:2], call.list_tokens
    if num_tokens == 0 or num_heads == 0:
        return
    rest = num_tokens % list_tokens
    if rest:  # the tokens of the last list are fewer: a separate launch
        whole, last = slice(num_tokens - rest), slice(num_tokens - rest, None)
        sparse_prefill(_part(call, whole, slice(num_tokens // list_tokens), list_tokens), launch)
        sparse_prefill(_part(call, last, slice(num_tokens // list_tokens, None), rest), launch)
        return
    launch(
        *prefill_rows(call),
        QueryRows(num_heads, list_tokens * num_heads, 1, 1),
        call.softmax_scale,
        num_groups=num_tokens // list_tokens,
        extra_cache=call.extra_cache,
        extra=_extra(call),
    )


def _part(call: SparsePrefill, tokens: slice, lists: slice, list_tokens: int) -> SparsePrefill:
    """Some tokens of a call, of whole lists."""

    def of(part: slice, *fields: str) -> dict[str, Tensor | None]:
        values = {name: getattr(call, name) for name in fields}
        return {name: None if value is None else value[part] for name, value in values.items()}

    return call._replace(
        list_tokens=list_tokens,
        **of(tokens, "q", "q_rope", "out", "lse", "max_logits"),
        **of(lists, "topk_indices", "topk_lengths", "token_mask"),
    )


def prefill_rows(call: SparsePrefill) -> tuple[Queries, PagedCache, KeyList, Results]:
    """The queries, rows, keys and outputs of a prefill whose lists have equal numbers of tokens."""
    q, q_rope, size = call.q, call.q_rope, call.list_tokens
    out, lse, max_logits = call.out, call.lse, call.max_logits
    steps = 1 if call.shared else 0  # token strides are 0 in a group of one token
    queries = Queries(q, size * q.stride(0), steps * q.stride(0), q.stride(1))
    if q_rope is not None:
        token = q_rope.stride(0)
        queries = Queries(*queries[:4], q_rope, size * token, steps * token, q_rope.stride(1))
    results = Results(
        out=out,
        out_split=0,
        out_request=size * out.stride(0),
        out_token=steps * out.stride(0),
        out_head=out.stride(1),
        lse=lse,
        lse_split=0,
        lse_request=size * lse.stride(0),
        lse_token=steps * lse.stride(0),
        max_logits=max_logits,
        max_logits_request=0 if max_logits is None else size * max_logits.stride(0),
        attn_sink=call.attn_sink,
        max_logits_token=max_logits.stride(0) if call.shared and max_logits is not None else None,
    )
    keys = _selected(call.kv, call.topk_indices, call.topk_lengths, call.token_mask)
    return queries, call.kv, keys, results


def _extra(call: SparsePrefill) -> KeyList | None:
    if call.extra_cache is None or call.extra_topk_indices is None:
        return None
    return _selected(call.extra_cache, call.extra_topk_indices, call.extra_topk_lengths)


def _selected(
    cache: PagedCache, slots: Tensor, lengths: Tensor | None, token_mask: Tensor | None = None
) -> KeyList:
    return KeyList(
        slots,
        slots.stride(0),
        0,
        slots.shape[1],
        lengths,
        cache.num_slots,
        token_mask=token_mask,
        token_mask_request=None if token_mask is None else token_mask.stride(0),
    )


def sparse_attention(call: SparseAttention, launch: Launch) -> None:
    """The forward pass of training: prefill over rows."""
    sparse_prefill(call.over(PagedCache.from_rows(call.kv)), launch)

"""Arguments that all attention kernels in Gluon take, and how calls of the ops become them."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.kernels.attention.arguments import (
    DenseDecode,
    SparseAttention,
    SparseDecode,
    SparsePrefill,
)
from sparsemla.kernels.attention.schedule import splits_of_dense, splits_of_sparse
from sparsemla.kernels.attention.triton.decode import length_strides
from sparsemla.kernels.attention.triton.merge import merge_splits, partial_results


class Queries(NamedTuple):
    """Query rows, with the strides of a request, a token and a head."""

    q: Tensor
    request_stride: int
    token_stride: int
    head_stride: int
    rope: Tensor | None = None
    """The RoPE dims, unless they are the last dims of ``q``."""
    rope_request_stride: int | None = None
    rope_token_stride: int | None = None
    rope_head_stride: int | None = None

    def in_units(self, elements: int) -> Queries:
        """The same rows, with strides that count so many elements."""
        return Queries(*(x // elements if isinstance(x, int) else x for x in self))


class QueryRows(NamedTuple):
    """The numbering of query rows. The rows of a *group* share their keys.

    With selected keys, a group is the heads of one token, and a request has ``group_tokens``
    groups. In dense attention, the tokens and heads of a request are one group, and so are the
    tokens and heads of a list that several tokens share.
    """

    num_heads: int
    num_rows: int
    """Rows of a group."""
    group_tokens: int
    num_splits: int


class KeyList(NamedTuple):
    """The keys of each group: slots of a cache, or a page table. Strides are in elements."""

    keys: Tensor
    """Slots ``[request, token, key]``, or pages ``[request, page]``."""
    keys_request: int
    keys_token: int
    num_keys: int
    lengths: Tensor | None
    """Number of valid keys of each request or token, or None for all."""
    num_slots: int
    shift: int = 0
    """Distance of a second cache from the first, in words; see :mod:`.fp8`."""
    lengths_request: int = 1
    lengths_token: int | None = None
    """None if the tokens of a request have one length."""
    token_mask: Tensor | None = None
    """``[request, key]``: a bit for each token of a group, set if it attends to the key; or None if
    all do."""
    token_mask_request: int | None = None


class Results(NamedTuple):
    """Outputs, and the sinks that the kernel applies. Strides are in elements."""

    out: Tensor
    out_split: int
    out_request: int
    out_token: int
    out_head: int
    lse: Tensor
    lse_split: int
    lse_request: int
    lse_token: int
    max_logits: Tensor | None
    max_logits_request: int
    attn_sink: Tensor | None
    max_logits_token: int | None = None
    """None if a group has one token."""
    sink_token: int | None = None
    """Stride of ``attn_sink`` between tokens; None if all tokens have the same sinks."""


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
    queries = Queries(q, *q.stride()[:3])
    if q_rope is not None:
        queries = Queries(*queries[:4], q_rope, *q_rope.stride()[:3])
    extra = None
    if call.extra_cache is not None and extra_topk_indices is not None:
        extra = _decoded(call.extra_cache, extra_topk_indices, call.extra_topk_lengths)
    launch(
        queries,
        call.cache,
        _decoded(call.cache, topk_indices, call.topk_lengths),
        _partial(outs, lses, attn_sink, sink_token),
        QueryRows(num_heads, num_heads, query_len, num_splits),
        call.softmax_scale,
        num_groups=batch * query_len,
        extra_cache=call.extra_cache,
        extra=extra,
    )
    merge_splits(*whole, attn_sink, call.out, call.lse)


def _decoded(cache: PagedCache, slots: Tensor, lengths: Tensor | None) -> KeyList:
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


def _partial(
    outs: Tensor, lses: Tensor, attn_sink: Tensor | None, sink_token: int | None = None
) -> Results:
    """Outputs ``[N, B, S, H, V]`` of splits; the merge of several applies the sink."""
    sink = attn_sink if outs.shape[0] == 1 else None
    placed = outs, *outs.stride()[:4], lses, *lses.stride()[:3]
    return Results(*placed, None, 0, sink, sink_token=sink_token)


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
        Queries(q, *q.stride()[:3]),
        cache,
        KeyList(
            call.page_table,
            call.page_table.stride(0),
            0,
            call.num_keys,
            call.seq_lens,
            cache.num_slots,
        ),
        _partial(outs, lses, call.attn_sink),
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

"""Prefill attention on Hopper."""

from __future__ import annotations

from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import BF16_576
from sparsemla.kernels.attention.schedule import FEW_HEADS
from sparsemla.kernels.attention.sm90 import (
    bf16,
    bf16_few_heads,
    fp8,
    fp8_few_heads,
    fp8_products,
)
from sparsemla.kernels.attention.sm90.abi import KeyList, Queries, QueryRows, Results


def sparse_prefill(
    q: Tensor,
    kv: PagedCache,
    topk_indices: Tensor,
    *,
    q_rope: Tensor | None,
    softmax_scale: float,
    topk_lengths: Tensor | None,
    attn_sink: Tensor | None,
    extra_kv: PagedCache | None,
    extra_topk_indices: Tensor | None,
    extra_topk_lengths: Tensor | None,
    list_tokens: int,
    members: Tensor | None,
    precision: str,
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor | None,
) -> None:
    num_tokens, num_heads = q.shape[:2]
    if num_tokens == 0 or num_heads == 0:
        return
    rest = num_tokens % list_tokens
    if rest:  # the tokens of the last list are fewer: a launch of their own
        first, last = num_tokens // list_tokens, num_tokens - rest
        for lists, tokens, size in (
            (slice(first), slice(last), list_tokens),
            (slice(first, None), slice(last, None), rest),
        ):
            sparse_prefill(
                q[tokens],
                kv,
                topk_indices[lists],
                q_rope=None if q_rope is None else q_rope[tokens],
                softmax_scale=softmax_scale,
                topk_lengths=None if topk_lengths is None else topk_lengths[lists],
                attn_sink=attn_sink,
                extra_kv=None,
                extra_topk_indices=None,
                extra_topk_lengths=None,
                list_tokens=size,
                members=None if members is None else members[lists],
                precision=precision,
                out=out[tokens],
                lse=lse[tokens],
                max_logits=None if max_logits is None else max_logits[tokens],
            )
        return
    shared = list_tokens > 1 or members is not None
    apart = 1 if shared else 0  # a group of one token has no use for the distance of tokens
    results = Results(
        out=out,
        out_split=0,
        out_request=list_tokens * out.stride(0),
        out_token=apart * out.stride(0),
        out_head=out.stride(1),
        lse=lse,
        lse_split=0,
        lse_request=list_tokens * lse.stride(0),
        lse_token=apart * lse.stride(0),
        max_logits=max_logits,
        max_logits_request=0 if max_logits is None else list_tokens * max_logits.stride(0),
        attn_sink=attn_sink,
        max_logits_token=max_logits.stride(0) if shared and max_logits is not None else None,
    )
    queries = Queries(q, list_tokens * q.stride(0), apart * q.stride(0), q.stride(1))
    if q_rope is not None:
        token = q_rope.stride(0)
        rope = list_tokens * token, apart * token, q_rope.stride(1)
        queries = Queries(*queries[:4], q_rope, *rope)
    extra = None
    if extra_kv is not None and extra_topk_indices is not None:
        extra = _selected(extra_kv, extra_topk_indices, extra_topk_lengths)
    main = _selected(kv, topk_indices, topk_lengths, members)
    rows = QueryRows(num_heads, list_tokens * num_heads, 1, 1)
    groups = num_tokens // list_tokens
    permitted = precision == "fp8"
    if permitted and takes_fp8_products(kv, num_heads, shared, extra is not None, max_logits):
        rounded = fp8_products.round_rows(kv.data[:, 0])
        fp8_products.launch(queries, rounded, main, results, rows, softmax_scale, num_groups=groups)
        return
    few = num_heads <= FEW_HEADS and not shared
    if kv.format.fp8_dim:
        launch = fp8_few_heads.launch if few else fp8.launch
    else:
        launch = bf16_few_heads.launch if few else bf16.launch
    launch(
        queries,
        kv,
        main,
        results,
        rows,
        softmax_scale,
        num_groups=groups,
        extra_cache=extra_kv,
        extra=extra,
    )


def takes_fp8_products(
    kv: PagedCache, num_heads: int, shared: bool, extra: bool, max_logits: Tensor | None
) -> bool:
    """Whether FP8 products compute a prefill that permits them.

    Args:
        kv: rows, or a cache.
        num_heads: query heads of a token.
        shared: whether several tokens share a list.
        extra: whether there is a second stream.
        max_logits: where the largest logits are wanted, or None.
    """
    rows = kv.format == BF16_576 and kv.page_size == 1
    return rows and num_heads > FEW_HEADS and not shared and not extra and max_logits is None


def _selected(
    cache: PagedCache, slots: Tensor, lengths: Tensor | None, members: Tensor | None = None
) -> KeyList:
    return KeyList(
        slots,
        slots.stride(0),
        0,
        slots.shape[1],
        lengths,
        cache.num_slots,
        members=members,
        members_request=None if members is None else members.stride(0),
    )


def sparse_attention(
    *,
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    topk_lengths: Tensor | None,
    attn_sink: Tensor | None,
    list_tokens: int,
    members: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    sparse_prefill(
        q,
        PagedCache.from_rows(kv),
        topk_indices,
        q_rope=None,
        softmax_scale=softmax_scale,
        topk_lengths=topk_lengths,
        attn_sink=attn_sink,
        extra_kv=None,
        extra_topk_indices=None,
        extra_topk_lengths=None,
        list_tokens=list_tokens,
        members=members,
        precision="bf16",
        out=out,
        lse=lse,
        max_logits=None,
    )

"""Reference of decode attention. Shapes: B requests, S query tokens, H heads, V value dims."""

import torch
from torch import Tensor

from sparsemla.cache import PagedCache, slots_of
from sparsemla.reference.attention import apply_sink, attend_slots


def sparse_decode(
    q: Tensor,
    cache: PagedCache,
    topk_indices: Tensor,
    *,
    q_rope: Tensor | None = None,
    softmax_scale: float,
    topk_lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_cache: PagedCache | None = None,
    extra_topk_indices: Tensor | None = None,
    extra_topk_lengths: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query token over its selected rows of one or two caches."""
    if q_rope is not None:
        q = torch.cat([q, q_rope], dim=-1)
    selections = [_selection(cache, topk_indices, topk_lengths)]
    if extra_cache is not None and extra_topk_indices is not None:
        selections.append(_selection(extra_cache, extra_topk_indices, extra_topk_lengths))
    out, lse, _ = attend_slots(q.flatten(0, 1), selections, softmax_scale, attn_sink)
    return out.unflatten(0, q.shape[:2]), lse.unflatten(0, q.shape[:2])


def _selection(
    cache: PagedCache, topk_indices: Tensor, topk_lengths: Tensor | None
) -> tuple[PagedCache, Tensor, Tensor | None]:
    """The selections of all query tokens: cache, slots ``[B * S, K]``, lengths ``[B * S]``."""
    if topk_lengths is not None:
        if topk_lengths.dim() == 1:  # [B] instead of [B, S]
            topk_lengths = topk_lengths[:, None].expand(topk_indices.shape[:2])
        topk_lengths = topk_lengths.flatten()
    return cache, topk_indices.flatten(0, 1), topk_lengths


def dense_decode(
    q: Tensor,
    cache: PagedCache,
    page_table: Tensor,
    seq_lens: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of each query token over all keys of its request."""
    batch, query_len, num_heads = q.shape[:3]
    out = q.new_zeros(*q.shape[:3], cache.format.value_dim, dtype=torch.float32)  # [B, S, H, V]
    lse = q.new_full((batch, query_len, num_heads), -torch.inf, dtype=torch.float32)  # [B, S, H]
    for request, length in enumerate(seq_lens.tolist()):
        if length <= 0:
            continue
        positions = torch.arange(length, device=q.device)  # [n]
        slots = slots_of(
            page_table, torch.full_like(positions, request), positions, cache.page_size
        )
        slots = slots.expand(query_len, -1)  # [S, n]
        if causal:  # row j sees the keys k <= n - S + j
            last = length - query_len + torch.arange(query_len, device=q.device)  # [S]
            slots = slots.where(positions <= last[:, None], -1)
        rows = [(cache, slots, None)]
        out[request], lse[request], _ = attend_slots(q[request], rows, softmax_scale, attn_sink)
    return out, lse


def merge_states(
    outs: Tensor, lses: Tensor, *, attn_sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``lse = ln sum_i exp(lses[i])``, ``out = sum_i exp(lses[i] - lse) outs[i]``."""
    lse = lses.float().logsumexp(0)  # [..., H]
    scales = (lses - lse).exp().masked_fill(lses.isneginf(), 0)[..., None]  # [N, ..., H, 1]
    out = (outs.float().where(scales > 0, 0) * scales).sum(0)  # [..., H, V]
    return apply_sink(out, lse, attn_sink), lse

"""Reference of prefill attention. Shapes: T query tokens, H heads, D key dims, V value dims."""

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import ceil_pow2, fp8_scales, to_fp8
from sparsemla.reference.attention import attend, attend_slots
from sparsemla.reference.lists import lists_of_tokens


def sparse_prefill(
    q: Tensor,
    kv: Tensor | PagedCache,
    topk_indices: Tensor,
    *,
    q_rope: Tensor | None = None,
    softmax_scale: float,
    topk_lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    extra_cache: Tensor | PagedCache | None = None,
    extra_topk_indices: Tensor | None = None,
    extra_topk_lengths: Tensor | None = None,
    list_tokens: int = 1,
    token_mask: Tensor | None = None,
    allow_fp8_mma: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of each query token over its selected rows; also returns the maximum logits.

    ``allow_fp8_mma`` permits roundings, and the definition has none: a kernel with FP8 MMAs is
    tested with queries and rows of :func:`round_rows`.
    """
    if q_rope is not None:
        q = torch.cat([q, q_rope], dim=-1)
    lists = lists_of_tokens(topk_indices, topk_lengths, len(q), list_tokens, token_mask)
    selections = [(_cache(kv), *lists)]
    if extra_cache is not None and extra_topk_indices is not None:
        selections.append((_cache(extra_cache), extra_topk_indices, extra_topk_lengths))
    return attend_slots(q, selections, softmax_scale, attn_sink)


def round_rows(rows: Tensor, value_dim: int = 512) -> Tensor:
    """Queries or rows as FP8 MMAs have them: e4m3 codes with a power-of-two scale for each row.

    The scale is ``2^ceil(log2(amax / 448))``, at least 2^-40, of the first ``value_dim`` dims. A
    row with NaN or infinity becomes NaN. The dims behind, RoPE's, are as they were.

    >>> round_rows(torch.tensor([[500.0, 33.0, 4.0, 0.0, 33.0]]), 4)
    tensor([[512.,  32.,   4.,   0.,  33.]])
    """
    value, rope = rows.float()[..., :value_dim], rows.float()[..., value_dim:]
    amax = value.abs().amax(-1, keepdim=True)  # [..., 1]
    scale = ceil_pow2(fp8_scales(amax).clamp_min(2.0**-40))  # [..., 1]
    rounded = to_fp8(value / scale).float() * scale  # [..., V]
    return torch.cat([rounded.where(amax.isfinite(), torch.nan), rope], dim=-1)


def _cache(kv: Tensor | PagedCache) -> PagedCache:
    return kv if isinstance(kv, PagedCache) else PagedCache.from_rows(kv)


def dense_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_row_offsets: Tensor,
    kv_row_offsets: Tensor,
    *,
    softmax_scale: float,
    causal: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of each query token over the keys and values of its request, head by head."""
    out = q.new_zeros(*q.shape[:2], v.shape[-1], dtype=torch.float32)  # [T, H, V]
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)  # [T, H]
    q_offsets, kv_offsets = input_row_offsets.tolist(), kv_row_offsets.tolist()
    for request in range(len(q_offsets) - 1):
        queries = slice(q_offsets[request], q_offsets[request + 1])
        keys = slice(kv_offsets[request], kv_offsets[request + 1])
        m, n = queries.stop - queries.start, keys.stop - keys.start
        if m == 0 or n == 0:
            continue
        valid = torch.ones(m, n, dtype=torch.bool, device=q.device)  # [m, n]
        if causal:  # bottom-right aligned: the last query sees every key
            valid = valid.tril(n - m)
        k_rows = k[None, keys].expand(m, -1, -1, -1)  # [m, n, H, D]
        v_rows = v[None, keys].expand(m, -1, -1, -1)  # [m, n, H, V]
        out[queries], lse[queries], _ = attend(q[queries], k_rows, v_rows, valid, softmax_scale)
    return out, lse

"""Reference of differentiable attention. T query tokens, S rows, H heads, K entries, D, V dims."""

import torch
from torch import Tensor

from sparsemla.formats import LATENT_DIM
from sparsemla.reference.attention import attend, value_share
from sparsemla.reference.lists import lists_of_tokens


def sparse_attention(
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    *,
    softmax_scale: float,
    topk_lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    list_tokens: int = 1,
    token_mask: Tensor | None = None,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """Attention of each query token over its selected rows; float64 stays float64."""
    topk_indices, topk_lengths = lists_of_tokens(
        topk_indices, topk_lengths, len(q), list_tokens, token_mask
    )
    keys, valid = _selected(q, kv, topk_indices, topk_lengths)
    out, lse, _ = attend(q, keys, keys[..., :LATENT_DIM], valid, softmax_scale, attn_sink)
    return out, lse


def sparse_attention_backward(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    topk_lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    list_tokens: int = 1,
    token_mask: Tensor | None = None,
    dlse: Tensor | None = None,
    deterministic: bool = True,
    accumulate: Tensor | None = None,
    max_workspace_bytes: int = 2 << 30,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The gradients of q, kv and the sink, by their formulas; float64 stays float64."""
    topk_indices, topk_lengths = lists_of_tokens(
        topk_indices, topk_lengths, len(q), list_tokens, token_mask
    )
    keys, valid, probs, dlogits = weights_of_entries(
        dout, q, kv, topk_indices, out, lse, softmax_scale, topk_lengths, attn_sink, dlse
    )
    dout, q, out = (x.to(keys.dtype) for x in (dout, q, out))
    dq = torch.einsum("thk,tkd->thd", dlogits, keys)
    drows = torch.einsum("thk,thd->tkd", dlogits, q)  # the row as a key, of each entry
    drows[..., : dout.shape[-1]] += torch.einsum("thk,thv->tkv", probs, dout)
    dkv = torch.zeros(kv.shape, dtype=keys.dtype, device=kv.device)
    dkv.index_add_(0, topk_indices.long()[valid], drows[valid])
    if accumulate is not None:
        dkv = accumulate + dkv
    if attn_sink is None:
        return dq, dkv, None
    sink_share, delta = torch.sigmoid(attn_sink - lse), (dout * out).sum(-1)
    return dq, dkv, -(sink_share * delta).masked_fill(lse.isneginf(), 0).sum(0)


def weights_of_entries(
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    topk_lengths: Tensor | None = None,
    attn_sink: Tensor | None = None,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What gradients are sums of, at least float32; 0 for entries that are not valid.

    Returns:
        The rows of the entries ``[T, K, D]``, whether they are valid ``[T, K]``, and the factors
        ``g P`` of dout and ``softmax_scale * dS`` of q and of the rows, ``[T, H, K]``.
    """
    keys, valid = _selected(q, kv, topk_indices, topk_lengths)  # [T, K, D], [T, K]
    dout, q, out = (x.to(keys.dtype) for x in (dout, q, out))
    seen = valid[:, None]
    logits = torch.einsum("thd,tkd->thk", q, keys) * softmax_scale
    probs = (logits - lse[..., None]).exp().masked_fill(~seen, 0)  # [T, H, K]
    share = torch.ones_like(lse) if attn_sink is None else value_share(lse, attn_sink)  # [T, H]
    delta = (dout * out).sum(-1)  # [T, H]
    dprobs = torch.einsum("thv,tkv->thk", dout, keys[..., :LATENT_DIM])
    dlogits = probs * share[..., None] * (dprobs - delta[..., None])
    if dlse is not None:
        dlogits = dlogits + probs * dlse[..., None]
    dlogits = dlogits.masked_fill(~seen, 0) * softmax_scale  # [T, H, K]
    return keys, valid, probs * share[..., None], dlogits


def _selected(
    q: Tensor, kv: Tensor, topk_indices: Tensor, topk_lengths: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The rows ``[T, K, D]`` that each token selects, 0 where not valid, and ``valid [T, K]``."""
    ids = topk_indices.long()
    valid = (ids >= 0) & (ids < kv.shape[0])
    if topk_lengths is not None:
        valid &= torch.arange(ids.shape[1], device=ids.device) < topk_lengths[:, None]
    rows = kv.to(torch.promote_types(q.dtype, torch.float32))[ids.where(valid, 0)]
    return rows.where(valid[..., None], 0), valid

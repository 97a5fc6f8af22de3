"""Reference of attention over gathered rows, with LSE, maximum logit and sink."""

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsemla.cache import PagedCache


def attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    valid: Tensor,
    softmax_scale: float,
    attn_sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Softmax attention with separate keys for each query row.

    ``out = softmax(softmax_scale * q keys^T) values``, with the sink in the denominator only.

    Args:
        q: ``[R, H, Dk]``.
        keys: ``[R, K, Dk]``, or ``[R, K, H, Dk]`` with separate keys per head.
        values: ``[R, K, V]`` or ``[R, K, H, V]``.
        valid: bool ``[R, K]``; the other keys and values are ignored, even NaN.
        softmax_scale: factor of the logits.
        attn_sink: ``[H]``, the logit of an additional key with value 0.

    Returns:
        out ``[R, H, V]``, lse ``[R, H]`` without the sink, max_logits ``[R, H]``; all float32, or
        float64 for float64 arguments. A row without a valid key gets 0, -inf, -inf.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    per_head = "rkhd" if keys.dim() == 4 else "rkd"
    mask = valid.view(*valid.shape, *[1] * (keys.dim() - 2))  # [R, K, (1,) 1]
    keys, values = keys.to(dtype).where(mask, 0), values.to(dtype).where(mask, 0)
    logits = torch.einsum(f"rhd,{per_head}->rhk", q.to(dtype), keys) * softmax_scale  # [R, H, K]
    logits = logits.masked_fill(~valid[:, None], -torch.inf)
    guarded = torch.nn.functional.pad(logits, (0, 1), value=-torch.inf)  # K may be 0
    lse = guarded.logsumexp(-1)  # [R, H]
    probs = (logits - lse[..., None]).exp().masked_fill(~valid[:, None], 0)  # [R, H, K]
    out = torch.einsum(f"rhk,{per_head}->rhd", probs, values)  # [R, H, V]
    return apply_sink(out, lse, attn_sink), lse, guarded.amax(-1)


def apply_sink(out: Tensor, lse: Tensor, attn_sink: Tensor | None) -> Tensor:
    """``out / (1 + exp(sink - lse))``: the sink enters the denominator only."""
    if attn_sink is None:
        return out
    return out * value_share(lse, attn_sink)[..., None]


def value_share(lse: Tensor, attn_sink: Tensor) -> Tensor:
    """``1 / (1 + exp(sink - lse))``: what the sink leaves of a row's weight; 0 without a key."""
    return torch.sigmoid(lse - attn_sink).masked_fill(lse.isneginf(), 0)  # [R, H]


def attend_slots(
    q: Tensor,
    selections: Sequence[tuple[PagedCache, Tensor, Tensor | None]],
    softmax_scale: float,
    attn_sink: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`attend` over the union of selections: (cache, slots ``[R, K]``, lengths ``[R]``)."""
    keys, values, masks = [], [], []
    for cache, slots, lengths in selections:
        valid = (slots >= 0) & (slots < cache.num_slots)  # [R, K]
        if lengths is not None:
            valid &= torch.arange(slots.shape[1], device=slots.device) < lengths[:, None]
        rows = cache.read(torch.where(valid, slots, 0))  # [R, K, D]
        keys.append(rows)
        values.append(rows[..., : cache.format.value_dim])
        masks.append(valid)
    union = torch.cat(keys, 1), torch.cat(values, 1), torch.cat(masks, 1)
    return attend(q, *union, softmax_scale, attn_sink)

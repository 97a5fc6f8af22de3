"""Dense attention of packed sequences by torch's kernels, with and without the LSE.

Shapes: T tokens of all sequences, H heads, D dims of queries and keys, V dims of values.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, softmax_scale: float
) -> Tensor:
    """Causal attention of each of several sequences to itself, by torch.

    Args:
        q, k: ``[T, H, D]``.
        v: ``[T, H, V]``.
        lengths: tokens of each sequence; they sum to T.
        softmax_scale: factor of the scores.

    Returns:
        ``[T, H, V]``.
    """
    outputs = [
        F.scaled_dot_product_attention(q_part, k_part, v_part, is_causal=True, scale=softmax_scale)
        for q_part, k_part, v_part in _batches(lengths, q, k, v)
    ]
    return torch.cat([out.transpose(1, 2).flatten(0, 1) for out in outputs])


def dense_attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """:func:`dense_attention`, and the LSE float32 ``[T, H]``, which has no gradient.

    The public function of torch keeps the LSE to itself. So these are two of the kernels behind it.
    """
    outputs, lses = [], []
    for q_part, k_part, v_part in _batches(lengths, q, k, v):
        if q.is_cuda:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                q_part, k_part, v_part, None, True, is_causal=True, scale=softmax_scale
            )
            lse = lse[..., : q_part.shape[2]]  # rows are padded
        else:
            width = max(q.shape[-1], v.shape[-1])  # this kernel has one size of heads
            padded = (F.pad(x, (0, width - x.shape[-1])) for x in (q_part, k_part, v_part))
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                *padded, 0.0, True, scale=softmax_scale
            )
        outputs.append(out[..., : v.shape[-1]].transpose(1, 2).flatten(0, 1))
        lses.append(lse.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs), torch.cat(lses).float()


def _batches(lengths: Sequence[int], *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Each ``[T, H, D]`` as ``[sequences, H, tokens, D]``: one batch if all lengths are equal."""
    if len(set(lengths)) == 1:
        yield tuple(torch.unflatten(x, 0, (len(lengths), -1)).transpose(1, 2) for x in tensors)
        return
    for parts in zip(*(x.split(list(lengths)) for x in tensors), strict=True):
        yield tuple(part[None].transpose(1, 2) for part in parts)

"""Attention over selected rows, as flashinfer-bench defines it, with sparsemla."""

import math

import torch
from torch import Tensor

from sparsemla import sparse_prefill


def run(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv_cache: Tensor,
    kpe_cache: Tensor,
    sparse_indices: Tensor,
    sm_scale: float,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Write ``output`` and ``lse``, which is base 2; -inf for a token without a row."""
    latents, ropes = ckv_cache.flatten(0, 1), kpe_cache.flatten(0, 1)
    indices = sparse_indices
    # The definition has two caches where sparsemla has one: join the fewer rows.
    if indices.numel() < len(latents):
        slots = indices.flatten().clamp(min=0).long()
        latents, ropes = latents[slots], ropes[slots]
        order = torch.arange(len(slots), dtype=torch.int32, device=indices.device)
        indices = order.view_as(indices).where(indices >= 0, -1)
    rows = torch.cat([latents, ropes], -1)
    sparse_prefill(
        q_nope, rows, indices, q_rope=q_pe, softmax_scale=float(sm_scale), out=output, lse=lse
    )
    lse.mul_(1 / math.log(2))

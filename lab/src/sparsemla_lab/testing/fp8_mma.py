"""Sparse prefill with FP8 MMAs in torch, for tests and for machines without a Hopper GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparsemla.reference.attention import apply_sink
from sparsemla.reference.prefill import round_rows
from sparsemla_lab.testing.compare import selected

Rounding = Callable[[Tensor], Tensor]


def e4m3(x: Tensor) -> Tensor:
    """``x`` rounded to e4m3."""
    return x.to(torch.float8_e4m3fn).float()


def multiplied(
    arguments: Mapping[str, Any],
    *,
    largest: float = 8.0,
    queries: Rounding = round_rows,
    rows: Rounding = round_rows,
    rounded: Rounding = e4m3,
    own_lse: bool = False,
) -> tuple[Tensor, Tensor]:
    """What a kernel with FP8 MMAs computes, but for the accuracy of its sums.

    Args:
        arguments: of a ``sparse_prefill`` over bfloat16 rows ``[S, 576]``, with one stream and a
            list for each token.
        largest: the code of the largest weight of a query, or up to half of it. A kernel has 16 to
            256.
        queries: rounds queries.
        rows: rounds rows.
        rounded: rounds weights.
        own_lse: whether the LSE is that of the rounded weights.

    Returns:
        out, bfloat16, and lse, float32, of the shapes of the op.
    """
    inputs = {"q": queries(arguments["q"]), "kv": rows(arguments["kv"])}
    q, keys, valid, scales = selected({**arguments, **inputs})
    logits = torch.einsum("thd,tkd->thk", q, keys) * arguments["softmax_scale"]
    logits = logits.masked_fill(~valid[:, None], -math.inf)
    top = logits.amax(-1, keepdim=True).nan_to_num(neginf=0)
    weights = (logits - top).exp()
    # The scale of a row is a factor of its weight.
    scaled = weights * scales[:, None]
    largest_scaled = scaled.amax(-1, keepdim=True).clamp_min(2**-99)
    unit = largest_scaled.log2().ceil().exp2() / largest
    codes = rounded(scaled / unit) * unit
    total = (codes / scales[:, None] if own_lse else weights).sum(-1)
    out = torch.einsum("thk,tkd->thd", codes, keys[..., :512] / scales[..., None])
    lse = top[..., 0] + total.log()
    out = out / total.clamp_min(2**-99)[..., None]
    return apply_sink(out, lse, arguments["attn_sink"]).bfloat16(), lse

"""Reference of the per-head projection. Shapes: T tokens, H heads, K input and N output dims."""

import torch
from torch import Tensor

from sparsemla.formats import fp8_scales, to_fp8
from sparsemla.reference.decode import merge_states
from sparsemla.weights import HeadWeight


def project_heads(
    x: Tensor,
    weight: HeadWeight,
    *,
    lses: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> Tensor:
    """``out[t, h] = W[h] x[t, h]``; with ``lses``, x is merged from S splits first."""
    if lses is not None:  # x [S, T, H, K], lses [S, T, H]
        x = merge_states(x, lses, attn_sink=attn_sink)[0].bfloat16()
    x = x.float()  # [T, H, K]
    if weight.scale is not None:
        x = _fake_quantize(x, weight.scale_block[1])
    return torch.einsum("thk,hnk->thn", x, weight.dequantize())


def _fake_quantize(x: Tensor, block: int) -> Tensor:
    """Round ``x`` to e4m3 with a scale ``max(amax, 1e-4) / 448`` per block of the last dim."""
    dim = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -dim % block)).unflatten(-1, (-1, block))
    scales = fp8_scales(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4))
    return (to_fp8(blocks / scales).float() * scales).flatten(-2)[..., :dim]

"""Reference of the projections. Shapes: T tokens, H heads, G groups, K input and N output dims."""

import torch
from torch import Tensor

from sparsemla.formats import fp8_scales, to_fp8
from sparsemla.reference.decode import merge_states
from sparsemla.reference.quant import rotate_last
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


def project_groups(
    x: Tensor,
    weight: HeadWeight,
    *,
    cos_sin_cache: Tensor | None = None,
    positions: Tensor | None = None,
    lses: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> Tensor:
    """``out[t, g] = W[g] x[t, group g]``, once the rotation of x's last R dims is undone."""
    if lses is not None:  # x [S, T, H, V], lses [S, T, H]
        x = merge_states(x, lses, attn_sink=attn_sink)[0].bfloat16()
    x = x.float()  # [T, H, V]
    if cos_sin_cache is not None and positions is not None:
        cos, sin = cos_sin_cache[positions][:, None].float().chunk(2, dim=-1)  # [T, 1, R / 2]
        x = rotate_last(x, torch.cat([cos, -sin], dim=-1), interleaved=True)
    groups, _, inputs = weight.data.shape
    x = x.reshape(len(x), groups, inputs)  # [T, G, K]
    x = x.bfloat16().float() if weight.scale is None else _fake_quantize(x, weight.scale_block[1])
    return torch.einsum("tgk,gnk->tgn", x, weight.dequantize())


def _fake_quantize(x: Tensor, block: int) -> Tensor:
    """Round ``x`` to e4m3 with a scale ``max(amax, 1e-4) / 448`` per block of the last dim."""
    dim = x.shape[-1]
    blocks = torch.nn.functional.pad(x, (0, -dim % block)).unflatten(-1, (-1, block))
    scales = fp8_scales(blocks.abs().amax(-1, keepdim=True).clamp_min(1e-4))
    return (to_fp8(blocks / scales).float() * scales).flatten(-2)[..., :dim]

"""Per-head GEMMs on the CPU."""

import torch
from torch import Tensor

from sparsemla.formats import fp8_scales, to_fp8
from sparsemla.kernels.attention.cpu.decode import merge_states
from sparsemla.kernels.common import cpu
from sparsemla.weights import HeadWeight


def project_heads(
    x: Tensor,
    weight: HeadWeight,
    *,
    lses: Tensor | None,
    attn_sink: Tensor | None,
    out: Tensor,
    batch_invariant: bool = False,
    workspace: Tensor | None = None,
) -> None:
    if out.numel() == 0:
        return
    if lses is not None:
        parts, x = x, x.new_empty(x.shape[1:], dtype=torch.bfloat16)
        merge_states(parts, lses, attn_sink=attn_sink, out=x, lse=torch.empty_like(lses[0]))
    # The order of torch's additions may depend on the number of tokens.
    for tokens in cpu.blocks(len(x), 1 if batch_invariant else len(x)):
        _project(x[tokens], weight, out[tokens])


def _project(x: Tensor, weight: HeadWeight, out: Tensor) -> None:
    heads = x.transpose(0, 1)  # [H, T, K]
    if weight.scale is None:
        out.copy_(torch.bmm(heads, weight.data.transpose(1, 2)).transpose(0, 1))
        return
    # Make float32 copies of weights and activations for a few heads at a time.
    head_bytes = 4 * (weight.data[0].numel() + heads[0].numel() + out[:, 0].numel())
    for part in cpu.blocks(x.shape[1], cpu.WORKSPACE_BYTES // head_bytes):
        activations = _fake_quantize(heads[part].float(), weight.scale_block[1])
        weights = HeadWeight(weight.data[part], weight.scale[part], weight.scale_block)
        product = torch.bmm(activations, weights.dequantize().transpose(1, 2))
        out[:, part] = product.transpose(0, 1).to(out.dtype)


def _fake_quantize(x: Tensor, block: int) -> Tensor:
    """Round ``x`` to e4m3 with a scale ``max(amax, 1e-4) / 448`` for each block of the last dim."""
    dim = x.shape[-1]
    groups = torch.nn.functional.pad(x, (0, -dim % block)).unflatten(-1, (-1, block))
    scales = fp8_scales(groups.abs().amax(-1, keepdim=True).clamp_min_(1e-4))
    codes = to_fp8(groups / scales)
    return (codes.float() * scales).flatten(-2)[..., :dim]

"""GEMMs per head, and per group of heads, on the CPU."""

import torch
from torch import Tensor

from sparsemla.formats import fp8_scales, to_fp8
from sparsemla.kernels.attention.arguments import MergeStates
from sparsemla.kernels.attention.cpu.decode import merge_states
from sparsemla.kernels.common import cpu
from sparsemla.kernels.projection.arguments import ProjectGroups, ProjectHeads
from sparsemla.weights import HeadWeight


def project_heads(call: ProjectHeads) -> None:
    x, out = call.x, call.out
    if out.numel() == 0:
        return
    if call.lses is not None:
        x = _merged(x, call.lses, call.attn_sink)
    # The order of torch's additions may depend on the number of tokens.
    for tokens in cpu.blocks(len(x), 1 if call.batch_invariant else len(x)):
        _project(x[tokens], call.weight, out[tokens])


def project_groups(call: ProjectGroups) -> None:
    x, weight, out, cos_sin = call.x, call.weight, call.out, None
    if call.cos_sin_cache is not None and call.positions is not None:
        cpu.check_positions("project_groups", call.positions, call.cos_sin_cache)
        cos_sin = call.cos_sin_cache[call.positions][:, None].float()  # [T, 1, R]
    if out.numel() == 0:
        return
    if call.lses is not None:
        x = _merged(x, call.lses, call.attn_sink)
    groups, _, inputs = weight.data.shape
    heads = x.shape[1] // max(groups, 1)
    for group in range(groups):  # makes float32 copies of the inputs of one group at a time
        part = x[:, group * heads : (group + 1) * heads].float()  # [T, H / G, V]
        if cos_sin is not None:
            part = _undo_rotation(part, cos_sin)
        part = part.reshape(len(x), 1, inputs)
        one = slice(group, group + 1)
        scale = None if weight.scale is None else weight.scale[one]
        matrix = HeadWeight.unchecked(weight.data[one], scale, weight.scale_block)
        _project(part if scale is not None else part.bfloat16(), matrix, out[:, one])


def _merged(parts: Tensor, lses: Tensor, attn_sink: Tensor | None) -> Tensor:
    """The bfloat16 union ``[T, H, V]`` of partial results."""
    out = parts.new_empty(parts.shape[1:], dtype=torch.bfloat16)
    merge_states(MergeStates(parts, lses, attn_sink, out, lses.new_empty(lses.shape[1:])))
    return out


def _undo_rotation(x: Tensor, cos_sin: Tensor) -> Tensor:
    """float32 ``x [T, H, V]`` with its last R dims rotated back, in the reference's order."""
    cos, sin = cos_sin.chunk(2, dim=-1)
    nope, rope = x.tensor_split([x.shape[-1] - cos_sin.shape[-1]], dim=-1)
    a, b = rope[..., 0::2], rope[..., 1::2]
    rope = torch.stack([a * cos + b * sin, b * cos - a * sin], dim=-1).flatten(-2)
    return torch.cat([nope, rope], dim=-1)


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

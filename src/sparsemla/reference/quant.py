"""Reference of the cache writes. Shapes: T tokens, H heads, D row dims, R RoPE dims, DI index dims.

HI is the number of indexer heads, N the number of normalised dims.
"""

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import INDEX_FP8, CacheFormat, ScaleMode, as_format


def rotate(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """RoPE of float32 ``x [..., R]``; ``cos_sin [..., R]`` has all cosines, then all sines."""
    cos, sin = cos_sin.chunk(2, dim=-1)  # [..., R / 2] each
    if interleaved:
        a, b = x[..., 0::2], x[..., 1::2]
        return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def rotate_last(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """RoPE of the last R dims of float32 ``x [..., D]``."""
    nope, rope = x.tensor_split([x.shape[-1] - cos_sin.shape[-1]], dim=-1)
    return torch.cat([nope, rotate(rope, cos_sin, interleaved)], dim=-1)


def hadamard(x: Tensor) -> Tensor:
    """Orthogonal Walsh-Hadamard transform in Sylvester order; the last dim is a power of two."""
    n = x.shape[-1]
    matrix = torch.ones(1, 1, dtype=x.dtype, device=x.device)
    while matrix.shape[0] < n:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)], 0)
    return x @ matrix * n**-0.5


def _rms_norm(x: Tensor, eps: float) -> Tensor:
    """RMSNorm of float32 ``x [..., D]`` over the last dim, without a weight."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def fused_rope_rmsnorm_quant(
    q_rope: Tensor,
    kv: Tensor,
    cos_sin_cache: Tensor,
    kv_norm_weight: Tensor,
    cache: PagedCache,
    *,
    positions: Tensor,
    slot_mapping: Tensor,
    eps: float = 1e-6,
    query_norm: bool = False,
    interleaved: bool = True,
    scale_mode: ScaleMode = "pow2",
) -> tuple[Tensor, Tensor]:
    """RMSNorm of the latent, RoPE of key and queries, quantise, write rows to the cache.

    With ``query_norm`` queries are whole, ``[T, H, D]``, and normalised first.
    """
    cos_sin = cos_sin_cache[positions].float()  # [T, R]
    norm_dim = kv_norm_weight.shape[0]
    row = kv.float()  # [T, D]
    latent = row[:, :norm_dim]  # [T, N]
    latent = _rms_norm(latent, eps) * kv_norm_weight.float()
    row = torch.cat([latent, row[:, norm_dim:]], dim=-1)  # [T, D]
    row = rotate_last(row, cos_sin, interleaved)  # [T, D]
    cache.write(slot_mapping, row, scale_mode=scale_mode)
    q = _rms_norm(q_rope.float(), eps) if query_norm else q_rope.float()  # [T, H, D] or [T, H, R]
    # Unrounded: the caller rounds to the dtype of its outputs.
    return rotate_last(q, cos_sin[:, None], interleaved), row


def append_index_keys(
    index_k: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    cos_sin_cache: Tensor,
    cache: PagedCache,
    *,
    positions: Tensor,
    slot_mapping: Tensor,
    eps: float = 1e-6,
    interleaved: bool = False,
    rope_first: bool = True,
    hadamard: bool = False,
    scale_mode: ScaleMode = "pow2",
) -> None:
    """LayerNorm, RoPE, optional Hadamard transform, quantise, write indexer keys to the cache."""
    weight, bias, dims = norm_weight.float(), norm_bias.float(), index_k.shape[1:]
    rows = torch.nn.functional.layer_norm(index_k.float(), dims, weight, bias, eps)  # [T, DI]
    cos_sin = cos_sin_cache[positions].float()  # [T, R]
    rows = _rotate_index(rows, cos_sin, interleaved, rope_first, hadamard)  # [T, DI]
    cache.write(slot_mapping, rows, scale_mode=scale_mode)


def prepare_index_queries(
    index_q: Tensor,
    weights: Tensor,
    cos_sin_cache: Tensor,
    *,
    positions: Tensor,
    format: CacheFormat | str = INDEX_FP8,
    interleaved: bool = False,
    rope_first: bool = True,
    hadamard: bool = False,
    scale_mode: ScaleMode = "pow2",
) -> tuple[Tensor, Tensor]:
    """Rotated, quantised queries, and head weights times ``(HI * DI)^-0.5`` and query scale."""
    num_heads, head_dim = index_q.shape[1:]
    format = as_format("format", format)
    cos_sin = cos_sin_cache[positions][:, None].float()  # [T, 1, R]
    rows = _rotate_index(index_q.float(), cos_sin, interleaved, rope_first, hadamard)  # [T, HI, DI]
    folded = weights.float() * (num_heads * head_dim) ** -0.5  # [T, HI]
    fields = format.quantize(rows, scale_mode=scale_mode)
    if fields.fp8 is None or format.is_fp4:
        return format.dequantize(fields), folded
    return fields.fp8, folded if fields.scales is None else folded * fields.scales[..., 0]


def fused_indexer_rope_quant(
    index_q: Tensor,
    weights: Tensor,
    index_k: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    cos_sin_cache: Tensor,
    cache: PagedCache,
    *,
    positions: Tensor,
    slot_mapping: Tensor,
    eps: float = 1e-6,
    interleaved: bool = False,
    rope_first: bool = True,
    hadamard: bool = False,
    scale_mode: ScaleMode = "pow2",
) -> tuple[Tensor, Tensor]:
    """:func:`append_index_keys`, then :func:`prepare_index_queries`."""
    append_index_keys(
        index_k,
        norm_weight,
        norm_bias,
        cos_sin_cache,
        cache,
        positions=positions,
        slot_mapping=slot_mapping,
        eps=eps,
        interleaved=interleaved,
        rope_first=rope_first,
        hadamard=hadamard,
        scale_mode=scale_mode,
    )
    return prepare_index_queries(
        index_q,
        weights,
        cos_sin_cache,
        positions=positions,
        format=cache.format,
        interleaved=interleaved,
        rope_first=rope_first,
        hadamard=hadamard,
        scale_mode=scale_mode,
    )


def _rotate_index(
    x: Tensor, cos_sin: Tensor, interleaved: bool, rope_first: bool, transform: bool
) -> Tensor:
    """RoPE of the first or last dims ``R`` of ``x [..., DI]``, then an optional Hadamard."""
    rope_dim = cos_sin.shape[-1]
    if rope_first:
        rope, nope = x.tensor_split([rope_dim], dim=-1)  # [..., R], [..., DI - R]
        x = torch.cat([rotate(rope, cos_sin, interleaved), nope], dim=-1)
    else:
        x = rotate_last(x, cos_sin, interleaved)
    return hadamard(x) if transform else x

"""The cache-writing ops on the CPU."""

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import CacheFormat, ScaleMode
from sparsemla.kernels.common import cpu


def fused_rope_rmsnorm_quant(
    q_rope: Tensor,
    kv: Tensor,
    cos_sin_cache: Tensor,
    kv_norm_weight: Tensor,
    cache: PagedCache,
    *,
    positions: Tensor,
    slot_mapping: Tensor,
    eps: float,
    interleaved: bool,
    scale_mode: ScaleMode,
    out: Tensor,
    kv_out: Tensor | None,
    query_norm: bool = False,
) -> None:
    cpu.check_positions("fused_rope_rmsnorm_quant", positions, cos_sin_cache)
    cpu.check_slots("fused_rope_rmsnorm_quant", slot_mapping, cache)
    norm_dim = kv_norm_weight.shape[0]
    weight = kv_norm_weight.float()
    for tokens in _token_blocks(kv.shape[0], kv.shape[1] + q_rope.shape[1] * q_rope.shape[2]):
        cos_sin = cos_sin_cache[positions[tokens]].float()
        rows = kv[tokens].to(torch.float32, copy=True)
        rows[:, :norm_dim] = torch.nn.functional.rms_norm(
            rows[:, :norm_dim], (norm_dim,), weight, eps
        )
        _rotate_part(rows, cos_sin, interleaved, rope_first=False)
        cache.write(slot_mapping[tokens], rows, scale_mode=scale_mode)
        if kv_out is not None:
            kv_out[tokens] = rows.to(kv_out.dtype)
        q = q_rope[tokens].to(torch.float32, copy=True)
        if query_norm:
            q = torch.nn.functional.rms_norm(q, q.shape[2:], eps=eps)
        _rotate_part(q, cos_sin[:, None], interleaved, rope_first=False)
        out[tokens] = q.to(out.dtype)


def append_index_keys(
    k: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    cos_sin_cache: Tensor,
    cache: PagedCache,
    *,
    positions: Tensor,
    slot_mapping: Tensor,
    eps: float,
    interleaved: bool,
    rope_first: bool,
    hadamard: bool,
    scale_mode: ScaleMode,
) -> None:
    cpu.check_positions("append_index_keys", positions, cos_sin_cache)
    cpu.check_slots("append_index_keys", slot_mapping, cache)
    weight, bias = norm_weight.float(), norm_bias.float()
    for tokens in _token_blocks(k.shape[0], k.shape[1]):
        rows = torch.nn.functional.layer_norm(k[tokens].float(), k.shape[1:], weight, bias, eps)
        cos_sin = cos_sin_cache[positions[tokens]].float()
        _rotate_part(rows, cos_sin, interleaved, rope_first)
        rows = _hadamard(rows) if hadamard else rows
        cache.write(slot_mapping[tokens], rows, scale_mode=scale_mode)


def prepare_index_queries(
    q: Tensor,
    weights: Tensor,
    cos_sin_cache: Tensor,
    *,
    positions: Tensor,
    format: CacheFormat,
    interleaved: bool,
    rope_first: bool,
    hadamard: bool,
    scale_mode: ScaleMode,
    out: Tensor,
    weights_out: Tensor,
) -> None:
    cpu.check_positions("prepare_index_queries", positions, cos_sin_cache)
    factor = (q.shape[1] * q.shape[2]) ** -0.5
    for tokens in _token_blocks(q.shape[0], q.shape[1] * q.shape[2]):
        rows = q[tokens].to(torch.float32, copy=True)
        cos_sin = cos_sin_cache[positions[tokens]].float()[:, None]
        _rotate_part(rows, cos_sin, interleaved, rope_first)
        rows = _hadamard(rows) if hadamard else rows
        stored = format.quantize(rows, scale_mode=scale_mode)
        folded = weights[tokens].float() * factor
        if stored.fp8 is None or format.is_fp4:
            out[tokens] = format.dequantize(stored)
        else:
            out[tokens] = stored.fp8
            if stored.scales is not None:
                folded *= stored.scales[..., 0]
        weights_out[tokens] = folded


def fused_indexer_rope_quant(
    q: Tensor,
    weights: Tensor,
    k: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    cos_sin_cache: Tensor,
    cache: PagedCache,
    *,
    positions: Tensor,
    slot_mapping: Tensor,
    eps: float,
    interleaved: bool,
    rope_first: bool,
    hadamard: bool,
    scale_mode: ScaleMode,
    out: Tensor,
    weights_out: Tensor,
) -> None:
    cpu.check_positions("fused_indexer_rope_quant", positions, cos_sin_cache)
    cpu.check_slots("fused_indexer_rope_quant", slot_mapping, cache)
    append_index_keys(
        k,
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
    prepare_index_queries(
        q,
        weights,
        cos_sin_cache,
        positions=positions,
        format=cache.format,
        interleaved=interleaved,
        rope_first=rope_first,
        hadamard=hadamard,
        scale_mode=scale_mode,
        out=out,
        weights_out=weights_out,
    )


def _token_blocks(num_tokens: int, values_per_token: int) -> "list[slice]":
    """Blocks of tokens with float32 temporaries, a few per value, that fit the workspace."""
    return list(cpu.blocks(num_tokens, cpu.WORKSPACE_BYTES // (16 * values_per_token + 1)))


def _rotate(x: Tensor, cos_sin: Tensor, interleaved: bool) -> Tensor:
    """RoPE as a product of complex numbers."""
    if x.numel() == 0:
        return x
    cos, sin = cos_sin.chunk(2, dim=-1)
    pairs = x.unflatten(-1, (-1, 2) if interleaved else (2, -1))
    pairs = pairs if interleaved else pairs.transpose(-1, -2)
    pairs = pairs.contiguous()
    if pairs.storage_offset() % 2:  # a single vector counts as contiguous at any offset
        pairs = pairs.clone()
    rotated = torch.view_as_real(torch.view_as_complex(pairs) * torch.complex(cos, sin))
    return (rotated if interleaved else rotated.transpose(-1, -2)).flatten(-2)


def _rotate_part(x: Tensor, cos_sin: Tensor, interleaved: bool, rope_first: bool) -> None:
    """Rotate the first or the last dims in place."""
    rope_dim = cos_sin.shape[-1]
    part = x[..., :rope_dim] if rope_first else x[..., x.shape[-1] - rope_dim :]
    part.copy_(_rotate(part, cos_sin, interleaved))


def _hadamard(x: Tensor) -> Tensor:
    """Orthogonal Walsh-Hadamard transform of the last dim, by butterflies."""
    dim = x.shape[-1]
    span = 1
    while span < dim:
        a, b = x.unflatten(-1, (-1, 2, span)).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        span *= 2
    return x * dim**-0.5

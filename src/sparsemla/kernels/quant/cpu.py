"""The cache-writing ops on the CPU."""

from typing import cast

import torch
from torch import Tensor

from sparsemla.formats import ScaleMode
from sparsemla.kernels.common import cpu
from sparsemla.kernels.quant.arguments import (
    AppendIndexKeys,
    FusedIndexerRopeQuant,
    FusedRopeRmsnormQuant,
    PrepareIndexQueries,
)


def fused_rope_rmsnorm_quant(call: FusedRopeRmsnormQuant) -> None:
    q_rope, kv, out, kv_out = call.q_rope, call.kv, call.out, call.kv_out
    cos_sin_cache, positions, slot_mapping = call.cos_sin_cache, call.positions, call.slot_mapping
    cpu.check_positions("fused_rope_rmsnorm_quant", positions, cos_sin_cache)
    cpu.check_slots("fused_rope_rmsnorm_quant", slot_mapping, call.cache)
    scale_mode = cast("ScaleMode", call.scale_mode)
    norm_dim = call.kv_norm_weight.shape[0]
    weight = call.kv_norm_weight.float()
    for tokens in _token_blocks(kv.shape[0], kv.shape[1] + q_rope.shape[1] * q_rope.shape[2]):
        cos_sin = cos_sin_cache[positions[tokens]].float()
        rows = kv[tokens].to(torch.float32, copy=True)
        rows[:, :norm_dim] = torch.nn.functional.rms_norm(
            rows[:, :norm_dim], (norm_dim,), weight, call.eps
        )
        _rotate_part(rows, cos_sin, call.interleaved, rope_first=False)
        call.cache.write(slot_mapping[tokens], rows, scale_mode=scale_mode)
        if kv_out is not None:
            kv_out[tokens] = rows.to(kv_out.dtype)
        q = q_rope[tokens].to(torch.float32, copy=True)
        if call.query_norm:
            q = torch.nn.functional.rms_norm(q, q.shape[2:], eps=call.eps)
        _rotate_part(q, cos_sin[:, None], call.interleaved, rope_first=False)
        out[tokens] = q.to(out.dtype)


def append_index_keys(call: AppendIndexKeys) -> None:
    cpu.check_positions("append_index_keys", call.positions, call.cos_sin_cache)
    cpu.check_slots("append_index_keys", call.slot_mapping, call.cache)
    _write_keys(call)


def prepare_index_queries(call: PrepareIndexQueries) -> None:
    cpu.check_positions("prepare_index_queries", call.positions, call.cos_sin_cache)
    _quantise_queries(call)


def fused_indexer_rope_quant(call: FusedIndexerRopeQuant) -> None:
    cpu.check_positions("fused_indexer_rope_quant", call.positions, call.cos_sin_cache)
    cpu.check_slots("fused_indexer_rope_quant", call.slot_mapping, call.cache)
    _write_keys(call)
    _quantise_queries(call)


def _write_keys(call: AppendIndexKeys | FusedIndexerRopeQuant) -> None:
    k, positions, slot_mapping = call.index_k, call.positions, call.slot_mapping
    scale_mode = cast("ScaleMode", call.scale_mode)
    weight, bias = call.norm_weight.float(), call.norm_bias.float()
    for tokens in _token_blocks(k.shape[0], k.shape[1]):
        keys = k[tokens].float()
        rows = torch.nn.functional.layer_norm(keys, k.shape[1:], weight, bias, call.eps)
        cos_sin = call.cos_sin_cache[positions[tokens]].float()
        _rotate_part(rows, cos_sin, call.interleaved, call.rope_first)
        rows = _hadamard(rows) if call.hadamard else rows
        call.cache.write(slot_mapping[tokens], rows, scale_mode=scale_mode)


def _quantise_queries(call: PrepareIndexQueries | FusedIndexerRopeQuant) -> None:
    q, positions, format = call.index_q, call.positions, call.format
    scale_mode = cast("ScaleMode", call.scale_mode)
    factor = (q.shape[1] * q.shape[2]) ** -0.5
    for tokens in _token_blocks(q.shape[0], q.shape[1] * q.shape[2]):
        rows = q[tokens].to(torch.float32, copy=True)
        cos_sin = call.cos_sin_cache[positions[tokens]].float()[:, None]
        _rotate_part(rows, cos_sin, call.interleaved, call.rope_first)
        rows = _hadamard(rows) if call.hadamard else rows
        stored = format.quantize(rows, scale_mode=scale_mode)
        folded = call.weights[tokens].float() * factor
        if stored.fp8 is None or format.is_fp4:
            call.out[tokens] = format.dequantize(stored)
        else:
            call.out[tokens] = stored.fp8
            if stored.scales is not None:
                folded *= stored.scales[..., 0]
        call.weights_out[tokens] = folded


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

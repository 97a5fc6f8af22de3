"""Reference of a layer's attention: from projected q and latent to the outputs of the heads.

Shapes: T tokens, H heads, P no-RoPE dims, R RoPE dims, L latent dims, V value dims per head,
S cached keys of all requests.
"""

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import ScaleMode
from sparsemla.plan import Plan
from sparsemla.reference.decode import dense_decode, sparse_decode
from sparsemla.reference.gather import gather_dequant
from sparsemla.reference.prefill import dense_prefill, sparse_prefill
from sparsemla.reference.projection import project_heads
from sparsemla.reference.quant import fused_rope_rmsnorm_quant
from sparsemla.weights import MLALayer


def decode_branch(
    q: Tensor,
    kv: Tensor,
    cache: PagedCache,
    layer: MLALayer,
    plan: Plan,
    *,
    topk_indices: Tensor | None = None,
    topk_lengths: Tensor | None = None,
    extra_cache: PagedCache | None = None,
    extra_topk_indices: Tensor | None = None,
    extra_topk_lengths: Tensor | None = None,
    causal: bool = True,
    scale_mode: ScaleMode = "pow2",
) -> Tensor:
    """Absorbed MLA: attend in the latent space with ``concat(W_UK q_nope, rope(q_rope))``."""
    q_rope = _write(q, kv, cache, layer, plan, scale_mode)  # [T, H, R]
    q_latent = project_heads(q[..., : layer.qk_nope_head_dim], layer.w_uk)  # [T, H, L]
    query = torch.cat([q_latent, q_rope.float()], dim=-1)[:, None]  # [T, 1, H, L + R]
    scale, sink = layer.softmax_scale, layer.attn_sink
    if topk_indices is None:  # treat each token as a request that ends at this token
        table = plan.page_table[plan.request_ids]  # [T, W]
        lengths = plan.positions + 1 if causal else plan.seq_lens[plan.request_ids]  # [T]
        latent, _ = dense_decode(query, cache, table, lengths, softmax_scale=scale, attn_sink=sink)
    else:
        latent, _ = sparse_decode(
            query,
            cache,
            topk_indices[:, None],
            softmax_scale=scale,
            topk_lengths=topk_lengths,
            attn_sink=sink,
            extra_cache=extra_cache,
            extra_topk_indices=None if extra_topk_indices is None else extra_topk_indices[:, None],
            extra_topk_lengths=extra_topk_lengths,
        )
    return project_heads(latent[:, 0], layer.w_uv)  # [T, H, V]


def prefill_branch(
    q: Tensor,
    kv: Tensor,
    cache: PagedCache,
    layer: MLALayer,
    plan: Plan,
    *,
    topk_indices: Tensor | None = None,
    topk_lengths: Tensor | None = None,
    causal: bool = True,
    scale_mode: ScaleMode = "pow2",
) -> Tensor:
    """Absorbed MLA over selected rows, else attention over keys and values of each head."""
    q_rope = _write(q, kv, cache, layer, plan, scale_mode)  # [T, H, R]
    q_nope = q[..., : layer.qk_nope_head_dim]  # [T, H, P]
    scale = layer.softmax_scale
    if topk_indices is not None:
        query = torch.cat([project_heads(q_nope, layer.w_uk), q_rope.float()], dim=-1)
        latent, _, _ = sparse_prefill(
            query,
            cache,
            topk_indices,
            softmax_scale=scale,
            topk_lengths=topk_lengths,
            attn_sink=layer.attn_sink,
        )
        return project_heads(latent, layer.w_uv)
    kv_offsets = torch.nn.functional.pad(plan.seq_lens.cumsum(0), (1, 0))  # [B + 1]
    rows = kv.new_empty(int(kv_offsets[-1]), cache.format.head_dim, dtype=torch.bfloat16)
    gather_dequant(cache, plan.page_table, plan.seq_lens, kv_offsets[:-1], out=rows)  # [S, L + R]
    latent = rows[:, None, : layer.kv_lora_rank].expand(-1, layer.num_heads, -1)  # [S, H, L]
    k_rope = rows[:, None, layer.kv_lora_rank :].expand(-1, layer.num_heads, -1)  # [S, H, R]
    k_nope = project_heads(latent, layer.w_uk.transpose())  # [S, H, P]
    keys = torch.cat([k_nope, k_rope.float()], dim=-1)  # [S, H, P + R]
    query = torch.cat([q_nope.float(), q_rope.float()], dim=-1)  # [T, H, P + R]
    values = project_heads(latent, layer.w_uv)  # [S, H, V]
    offsets = plan.input_row_offsets
    out, _ = dense_prefill(
        query, keys, values, offsets, kv_offsets, softmax_scale=scale, causal=causal
    )
    return out


def _write(
    q: Tensor, kv: Tensor, cache: PagedCache, layer: MLALayer, plan: Plan, scale_mode: ScaleMode
) -> Tensor:
    """Write the new latents to the cache; returns the rotated RoPE dims of q ``[T, H, R]``."""
    q_rope, _ = fused_rope_rmsnorm_quant(
        q[..., layer.qk_nope_head_dim :],
        kv,
        layer.cos_sin_cache,
        layer.kv_norm_weight,
        cache,
        positions=plan.positions,
        slot_mapping=plan.slot_mapping,
        eps=layer.norm_eps,
        interleaved=layer.interleaved,
        scale_mode=scale_mode,
    )
    return q_rope.to(q.dtype)

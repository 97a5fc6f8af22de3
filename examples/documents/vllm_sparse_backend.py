"""The forward pass of vLLM's sparse FlashMLA backend, from vLLM's own tensors.

A mixed batch of two decodes and three prefills, over a cache of ``fp8_ds_mla`` rows. Three ways:
with the ops, decodes and prefills apart; with FlashMLA's functions, as the backend calls them; and
with the bfloat16 cache. The expected outputs are computed in float64, request by request.

Run ``python examples/documents/vllm_sparse_backend.py``, on a GPU with ``cuda`` behind it. To serve
a model with vLLM itself, install the plugin, as docs/vllm.md says.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from torch import Tensor

from sparsemla import (
    FP8_DS_MLA,
    PagedCache,
    absorb_kv_b_proj,
    gather_dequant,
    plan_batch,
    project_heads,
    sparse_decode,
    sparse_prefill,
    to_slots,
)
from sparsemla.compat.flash_mla import (
    flash_mla_sparse_prefill,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

HEADS, LORA, NOPE, ROPE, V = 12, 512, 128, 64, 128
BLOCK_SIZE, TOPK, WORKSPACE_ROWS = 64, 16, 80  # room for two of the prefills


def tensors() -> SimpleNamespace:
    """Metadata of a step, queries, selection, weights and caches, named as in vLLM."""
    torch.manual_seed(0)
    vllm = SimpleNamespace()
    vllm.query_start_loc_cpu = torch.tensor([0, 1, 2, 6, 11, 21], dtype=torch.int32)
    vllm.seq_lens_cpu = torch.tensor([70, 5, 68, 5, 75], dtype=torch.int32)
    vllm.block_table_tensor = torch.randperm(10).view(5, 2).int()
    vllm.q_nope = torch.randn(21, HEADS, NOPE).bfloat16()
    vllm.q_pe = torch.randn(21, HEADS, ROPE).bfloat16()
    vllm.kv_b_proj_weight = (torch.randn(HEADS * (NOPE + V), LORA) / 16).bfloat16()
    vllm.scale = (NOPE + ROPE) ** -0.5
    # The indexer's choice: positions in the request, then -1.
    vllm.topk_indices_buffer = torch.full((32, TOPK), -1, dtype=torch.int32)
    for t, position in enumerate(positions(vllm)):
        chosen = torch.randperm(position + 1)[:TOPK].sort().values
        vllm.topk_indices_buffer[t, : len(chosen)] = chosen
    # A row of 656 bytes: 512 e4m3, 4 float32 scales, 64 bfloat16.
    codes = torch.randn(10, BLOCK_SIZE, LORA).to(torch.float8_e4m3fn)
    scales = torch.rand(10, BLOCK_SIZE, 4)
    rope = torch.randn(10, BLOCK_SIZE, ROPE).bfloat16()
    fields = [field.view(torch.uint8) for field in (codes, scales, rope)]
    vllm.fp8_cache = torch.cat(fields, -1)
    latent = codes.float() * scales.repeat_interleave(128, -1)
    vllm.bf16_cache = torch.cat([latent.bfloat16(), rope], -1)
    return vllm


def positions(vllm: SimpleNamespace) -> list[int]:
    """The position of each token in its request."""
    starts, lens = vllm.query_start_loc_cpu.tolist(), vllm.seq_lens_cpu.tolist()
    return [
        length - end + t
        for start, end, length in zip(starts[:-1], starts[1:], lens, strict=True)
        for t in range(start, end)
    ]


def on(device: str, vllm: SimpleNamespace) -> SimpleNamespace:
    """The same tensors on a device, but for those of the host."""
    moved = SimpleNamespace(**vars(vllm))
    for name, value in vars(vllm).items():
        if isinstance(value, Tensor) and not name.endswith("_cpu"):
            setattr(moved, name, value.to(device))
    return moved


class Step:
    """What the ways share: the plan, weights, queries in the latent space, and slots."""

    def __init__(self, vllm: SimpleNamespace, workspace_rows: int | None) -> None:
        self.plan = plan_batch(
            seq_lens=vllm.seq_lens_cpu,
            page_table=vllm.block_table_tensor,
            input_row_offsets=vllm.query_start_loc_cpu,
            page_size=BLOCK_SIZE,
            workspace_rows=workspace_rows,
        )
        w_uk, self.w_uv = absorb_kv_b_proj(
            vllm.kv_b_proj_weight, num_heads=HEADS, qk_nope_head_dim=NOPE, v_head_dim=V
        )
        self.q = torch.cat([project_heads(vllm.q_nope, w_uk), vllm.q_pe], -1)  # [T, HEADS, 576]
        self.slots = to_slots(
            vllm.topk_indices_buffer[: self.plan.num_tokens],
            self.plan.page_table,
            self.plan.request_ids,
            page_size=BLOCK_SIZE,
            workspace_starts=self.plan.workspace_starts,
            prefill_request_ids=self.plan.prefill_request_ids,
        )


def with_ops(vllm: SimpleNamespace) -> Tensor:
    """``_forward_fp8_kv_separate_prefill_decode`` and ``_v_up_proj``."""
    step = Step(vllm, workspace_rows=WORKSPACE_ROWS)
    plan, cache = step.plan, PagedCache(vllm.fp8_cache, FP8_DS_MLA)
    attn_out = step.q.new_empty(plan.num_tokens, HEADS, LORA)
    n, shape = plan.num_decode_tokens, (plan.num_decodes, plan.decode_query_len)
    sparse_decode(
        step.q[:n].unflatten(0, shape),
        cache,
        step.slots[:n].unflatten(0, shape),
        softmax_scale=vllm.scale,
        out=attn_out[:n].unflatten(0, shape),
    )
    workspace = step.q.new_empty(WORKSPACE_ROWS, LORA + ROPE)
    for chunk in plan.prefill_chunks:
        rows = workspace[: chunk.num_workspace_rows]
        gather_dequant(cache, chunk.page_table, chunk.seq_lens, chunk.workspace_starts, out=rows)
        sparse_prefill(
            step.q[chunk.tokens],
            rows,
            step.slots[chunk.tokens],
            softmax_scale=vllm.scale,
            out=attn_out[chunk.tokens],
        )
    return project_heads(attn_out, step.w_uv)


def with_functions_of_flashmla(vllm: SimpleNamespace) -> Tensor:
    """``_forward_fp8_kv_mixed_batch``: one call for all tokens, and no head is padded."""
    step = Step(vllm, workspace_rows=None)
    scheduler_metadata, _ = get_mla_metadata()
    attn_out, _ = flash_mla_with_kvcache(
        q=step.q.unsqueeze(0),
        k_cache=vllm.fp8_cache.unsqueeze(-2),
        block_table=None,
        head_dim_v=512,
        cache_seqlens=None,
        tile_scheduler_metadata=scheduler_metadata,
        is_fp8_kvcache=True,
        indices=step.slots.unsqueeze(0),
        softmax_scale=vllm.scale,
    )
    return project_heads(attn_out.squeeze(0), step.w_uv)


def over_a_bfloat16_cache(vllm: SimpleNamespace) -> Tensor:
    """``_forward_bf16_kv``."""
    step = Step(vllm, workspace_rows=None)
    attn_out = flash_mla_sparse_prefill(
        step.q,
        vllm.bf16_cache.view(-1, 1, LORA + ROPE),
        step.slots.view(len(step.q), 1, -1),
        vllm.scale,
    )
    return project_heads(attn_out, step.w_uv)


def expected(vllm: SimpleNamespace) -> Tensor:
    """float64 ``[T, HEADS, V]`` by attention with keys and values of each head."""
    codes, scales, rope = vllm.fp8_cache.split([512, 16, 128], -1)
    latent = codes.contiguous().view(torch.float8_e4m3fn).double()
    latent *= scales.contiguous().view(torch.float32).repeat_interleave(128, -1)
    rope = rope.contiguous().view(torch.bfloat16).double()
    w_uk, w_uv = vllm.kv_b_proj_weight.double().view(HEADS, NOPE + V, LORA).split([NOPE, V], 1)
    requests = torch.arange(5).repeat_interleave(vllm.query_start_loc_cpu.diff())
    outs = []
    for t, request in enumerate(requests.tolist()):
        blocks = vllm.block_table_tensor[request].long()
        chosen = vllm.topk_indices_buffer[t].long()
        chosen = chosen[chosen >= 0]
        own_latent, own_rope = (x[blocks].flatten(0, 1)[chosen] for x in (latent, rope))
        keys = torch.einsum("nl,hpl->hnp", own_latent, w_uk)
        scores = torch.einsum("hp,hnp->hn", vllm.q_nope[t].double(), keys)
        scores += vllm.q_pe[t].double() @ own_rope.T
        weights = (scores * vllm.scale).softmax(-1)
        outs.append(torch.einsum("hn,nl,hvl->hv", weights, own_latent, w_uv))
    return torch.stack(outs)


def main(device: str = "cpu") -> int:
    """Run all ways; 1 if an output is farther from float64 than bfloat16 explains."""
    vllm = tensors()
    wanted, worst = expected(vllm), 0.0
    for way in (with_ops, with_functions_of_flashmla, over_a_bfloat16_cache):
        error = float((way(on(device, vllm)).cpu() - wanted).norm() / wanted.norm())
        sys.stdout.write(f"FlashMLASparseImpl, {way.__name__}: relative error {error:.4f}\n")
        worst = max(worst, error)
    return int(worst > 0.01)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

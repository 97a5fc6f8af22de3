"""MAX's ``mla_decode_branch_fp8``, dense and sparse, from MAX's own tensors.

The arguments have MAX's names, dtypes and layouts. The expected outputs are attention with keys and
values of each head in float64, without absorbed weights, pages or FP8 activations.

Run ``python examples/documents/max_decode_branch.py``, on a GPU with ``cuda`` behind it.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import torch
from torch import Tensor

from sparsemla import (
    BF16_576,
    HeadWeight,
    MLALayer,
    PagedCache,
    decode_branch,
    from_freqs_cis,
    plan_on_device,
)

H, L, P, R, V = 4, 512, 128, 64, 128
PAGE_SIZE, NUM_LAYERS, MAX_SEQ_LEN = 16, 3, 64


def arguments() -> SimpleNamespace:
    """A step of two requests: one token after 37, and two tokens after 18."""
    torch.manual_seed(0)
    given = SimpleNamespace()
    given.q = torch.randn(3, H, P + R).bfloat16()
    given.kv = torch.randn(3, 1536 + L + R).bfloat16()[:, 1536:]  # what kv_input_fn loads
    given.input_row_offsets = torch.tensor([0, 1, 3], dtype=torch.uint32)
    given.scalar_args_buf = torch.tensor([2, 2, 1])  # requests, longest query, partitions
    angles = torch.arange(MAX_SEQ_LEN)[:, None] * 1e4 ** (-torch.arange(0, R, 2) / R)
    given.freqs_cis = torch.stack([angles.cos(), angles.sin()], -1).flatten(-2)
    given.kv_norm_gamma = (1 + 0.1 * torch.randn(L)).bfloat16()
    # kv_collection: blocks with all layers, and which block holds each 16 tokens of a request.
    given.kv_blocks = torch.randn(6, 1, NUM_LAYERS, PAGE_SIZE, 1, L + R).bfloat16()
    given.cache_lengths = torch.tensor([37, 18], dtype=torch.uint32)
    given.lookup_table = torch.tensor([[5, 1, 2], [0, 4, 0]], dtype=torch.uint32)
    given.layer_idx, given.scale, given.epsilon = 1, (P + R) ** -0.5, 1e-6
    given.w_uk = (torch.randn(H, L, P) * 8).to(torch.float8_e4m3fn)
    given.w_uk_scale = 0.01 * torch.rand(H, L // 128, P // 128)
    given.w_uv = (torch.randn(H, V, L) * 8).to(torch.float8_e4m3fn)
    given.w_uv_scale = 0.01 * torch.rand(H, V // 128, L // 128)
    # The sparse call: physical rows ``block * PAGE_SIZE + offset``, lengths of each request.
    given.d_indices = torch.tensor([[80, 17, 95, 36], [0, 15, 64, -1], [0, 15, 64, 67]]).int()
    given.topk_lengths = torch.tensor([4, 3], dtype=torch.int32)
    given.attn_sink = torch.randn(H)
    given.extra_k = torch.randn(2, 1, 1, PAGE_SIZE, 1, L + R).bfloat16()
    given.extra_d_indices = torch.tensor([[3, 9], [31, 4], [8, 0]], dtype=torch.int32)
    given.extra_topk_lengths = torch.tensor([1, 2], dtype=torch.int32)
    return given


def on(device: str, given: SimpleNamespace) -> SimpleNamespace:
    """The arguments with their tensors on a device."""
    moved = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in vars(given).items()}
    return SimpleNamespace(**moved)


def run(given: SimpleNamespace, *, sparse: bool) -> Tensor:
    """The call of sparsemla, which writes the step's rows into MAX's blocks."""
    cache = PagedCache(given.kv_blocks[:, 0, :, :, 0], BF16_576).layer(given.layer_idx)  # views
    layer = MLALayer(
        HeadWeight(given.w_uk, given.w_uk_scale),
        HeadWeight(given.w_uv, given.w_uv_scale),
        given.kv_norm_gamma,
        from_freqs_cis(given.freqs_cis),
        softmax_scale=given.scale,
        norm_eps=given.epsilon,
        attn_sink=given.attn_sink if sparse else None,
    )
    plan = plan_on_device(
        page_table=given.lookup_table,
        input_row_offsets=given.input_row_offsets,
        cache_lengths=given.cache_lengths,
        page_size=PAGE_SIZE,
        num_tokens=given.q.shape[0],
        max_query_len=int(given.scalar_args_buf[1]),
    )
    if not sparse:
        return decode_branch(given.q, given.kv, cache, layer, plan)
    return decode_branch(
        given.q,
        given.kv,
        cache,
        layer,
        plan,
        topk_indices=given.d_indices,
        topk_lengths=plan.clamp_topk(given.topk_lengths),
        extra_cache=PagedCache(given.extra_k[:, 0, 0, :, 0], BF16_576),
        extra_topk_indices=given.extra_d_indices,
        extra_topk_lengths=given.extra_topk_lengths[plan.request_ids],
    )


def rotate(x: Tensor, freqs: Tensor) -> Tensor:
    """RoPE of neighbouring pairs; ``freqs`` is a row of freqs_cis."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    turns = torch.view_as_complex(freqs.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)


def expected(given: SimpleNamespace, *, sparse: bool) -> Tensor:
    """float64 ``[T, H, V]`` by the definition of attention."""
    # P and V are one block of 128.
    w_uk = given.w_uk.double() * given.w_uk_scale.repeat_interleave(128, 1)
    w_uv = given.w_uv.double() * given.w_uv_scale.repeat_interleave(128, 2)
    rows = given.kv_blocks[:, 0, given.layer_idx, :, 0].double().flatten(0, 1)
    offsets, table = given.input_row_offsets.tolist(), given.lookup_table.tolist()
    out = torch.zeros(3, H, V, dtype=torch.float64)
    for b, cached in enumerate(given.cache_lengths.tolist()):
        length = cached + offsets[b + 1] - offsets[b]
        slots = [table[b][p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE for p in range(length)]
        new = range(offsets[b], offsets[b + 1])
        for p, t in enumerate(new, start=cached):
            latent, k_rope = given.kv[t].double().split([L, R])
            latent = latent * (latent.square().mean() + given.epsilon).rsqrt()
            latent *= given.kv_norm_gamma.double()
            rows[slots[p]] = torch.cat([latent, rotate(k_rope, given.freqs_cis[p])])
        for p, t in enumerate(new, start=cached):
            seen = rows[slots[: p + 1]]  # [n, L + R]
            if sparse:
                seen = rows[given.d_indices[t, : min(int(given.topk_lengths[b]), length)].long()]
                extra = given.extra_d_indices[t, : int(given.extra_topk_lengths[b])].long()
                more = given.extra_k[:, 0, 0, :, 0].double().flatten(0, 1)[extra]
                seen = torch.cat([seen, more])
            q_nope, q_rope = given.q[t].double().split([P, R], dim=-1)
            k_nope = torch.einsum("nl,hlp->hnp", seen[:, :L], w_uk)
            scores = torch.einsum("hp,hnp->hn", q_nope, k_nope)
            scores += rotate(q_rope, given.freqs_cis[p]) @ seen[:, L:].T
            weights = (scores * given.scale).exp()
            sink = given.attn_sink.double().exp() if sparse else torch.zeros(H)
            weights /= (weights.sum(1) + sink)[:, None]
            out[t] = torch.einsum("hn,nl,hvl->hv", weights, seen[:, :L], w_uv)
    return out


def main(device: str = "cpu") -> int:
    """Run both calls; 1 if an output is farther from float64 than FP8 activations explain."""
    errors = {}
    for sparse in (False, True):
        given = arguments()
        wanted = expected(given, sparse=sparse)
        out = run(on(device, given), sparse=sparse).cpu()
        errors["sparse" if sparse else "dense"] = float((out - wanted).norm() / wanted.norm())
    for name, error in errors.items():
        sys.stdout.write(f"mla_decode_branch_fp8, {name}: relative error {error:.4f}\n")
    return int(max(errors.values()) > 0.05)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""A layer's whole attention: from projected query and latent to the output of each head."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.checks import INTEGERS, Checker
from sparsemla.ops._library import parts
from sparsemla.ops.decode import (
    _dense_decode,
    _sparse_decode,
    dense_splits,
    merge_states,
    sparse_schedule,
)
from sparsemla.ops.gather import gather_dequant
from sparsemla.ops.prefill import dense_prefill, sparse_prefill
from sparsemla.ops.projection import project_heads
from sparsemla.ops.quant import fused_rope_rmsnorm_quant
from sparsemla.plan import Plan
from sparsemla.weights import MLALayer

WORKSPACE_ROWS = 16384
"""Rows of context that a dense prefill expands to keys and values at a time, by default."""


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
    validate: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of a decode step in the absorbed form, sparse or dense.

    ::

        q_nope, q_rope = split(q)                     latent, k_rope = split(kv)
        cache[slot]    = quantise(RMSNorm(latent), RoPE(k_rope))
        query          = concat(W_UK q_nope, RoPE(q_rope))
        out            = W_UV attention(query, cache)

    The attention is :func:`sparse_decode` over ``topk_indices``, or without them
    :func:`dense_decode` over each token's request up to the token itself. Requests may bring
    different numbers of query tokens.

    Args:
        q: bfloat16 ``[T, H, P + R]``.
        kv: bfloat16, float16 or float32 ``[T, L + R]``, before norm and RoPE; may be strided.
        cache: rows of any format with ``head_dim`` L + R, in pages of the plan's size.
        layer: weights and constants; e4m3 weights give block-scaled FP8 products. The weights are
            read ahead, as :func:`project_heads` says.
        plan: positions, slots and page tables of the step (:func:`plan_batch`).
        topk_indices: int32 or int64 ``[T, K]``, slots in ``cache``; None for dense attention.
        topk_lengths: ``[T]``, entries that count.
        extra_cache, extra_topk_indices ``[T, K2]``, extra_topk_lengths ``[T]``: a second stream.
        validate: read the plan's positions and slots, and its page table and lengths for dense
            attention, and refuse values out of range.
        out: bfloat16 ``[T, H, V]``, written.

    Returns:
        bfloat16 ``[T, H, V]``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape, device or format; the
            cache is untouched then.

    Source: MAX ``mla_decode_branch_fp8``; DeepSeek-V2 (arXiv 2405.04434) section 2.1.
    """
    selection = topk_indices, topk_lengths
    check = _check("decode_branch", q, kv, cache, layer, plan, *selection, validate)
    if topk_indices is None:
        check.absent("extra_cache", extra_cache, "without topk_indices")
    if extra_cache is None:
        check.absent("extra_topk_indices", extra_topk_indices, "without extra_cache")
        check.absent("extra_topk_lengths", extra_topk_lengths, "without extra_cache")
    else:
        check.stream("extra_cache", extra_cache, cache)
        check.tensor("extra_topk_indices", extra_topk_indices, "T K2", INTEGERS)
        check.optional("extra_topk_lengths", extra_topk_lengths, "T", INTEGERS)
    out = check.output("out", out, "T H V", torch.bfloat16)
    if topk_indices is None:  # each token is a request of its own that ends with itself
        # Ahead of launches that begin early, which these would keep apart.
        table, lengths = plan.page_table[plan.request_ids], plan.positions + 1
        query = _absorbed_query(q, kv, cache, layer, plan)[:, None]  # [T, 1, H, L + R]
        attended = _Attended.empty(query, layer, dense_splits(query, cache, table))
        _dense_decode(
            query,
            *parts(cache),
            table,
            lengths,
            layer.softmax_scale,
            True,
            *attended.arguments,
        )
        return attended.project(out)
    query = _absorbed_query(q, kv, cache, layer, plan)[:, None]
    if extra_topk_indices is not None:
        extra_topk_indices = extra_topk_indices[:, None]
    topk_indices = topk_indices[:, None]
    schedule = sparse_schedule(query, cache, topk_indices, extra_topk_indices)
    attended = _Attended.empty(query, layer, schedule.num_splits)
    sink, *results = attended.arguments
    _sparse_decode(
        query,
        *parts(cache),
        topk_indices,
        layer.softmax_scale,
        topk_lengths,
        sink,
        *parts(extra_cache),
        extra_topk_indices,
        extra_topk_lengths,
        schedule.head_tile,
        *results,
    )
    return attended.project(out)


@dataclass(frozen=True)
class _Attended:
    """Where attention leaves the latents of its splits, which the product with W_UV merges.

    Args:
        latents: bfloat16 ``[T, 1, H, L]`` of a single split, or float32 ``[S, T, 1, H, L]``.
        lses: float32 ``[T, 1, H]`` or ``[S, T, 1, H]``.
        layer: the layer.
    """

    latents: Tensor
    lses: Tensor
    layer: MLALayer

    @classmethod
    def empty(cls, query: Tensor, layer: MLALayer, num_splits: int) -> "_Attended":
        rows = query.shape[:-1] if num_splits == 1 else (num_splits, *query.shape[:-1])
        dtype = query.dtype if num_splits == 1 else torch.float32
        latents = query.new_empty(*rows, layer.kv_lora_rank, dtype=dtype)
        return cls(latents, query.new_empty(rows, dtype=torch.float32), layer)

    @property
    def arguments(self) -> tuple[Tensor | None, int, None, Tensor, Tensor]:
        """Sink, splits, workspace and results of the attention."""
        if self.latents.dim() == 4:
            return self.layer.attn_sink, 1, None, self.latents, self.lses
        return None, self.latents.shape[0], None, self.latents, self.lses

    def project(self, out: Tensor) -> Tensor:
        """The heads' outputs ``[T, H, V]``."""
        latents, weight = self.latents.squeeze(-3), self.layer.w_uv
        if latents.dim() == 3:
            return project_heads(latents, weight, out=out)
        sink = self.layer.attn_sink
        return project_heads(latents, weight, lses=self.lses.squeeze(-2), attn_sink=sink, out=out)


def prefill_branch(
    q: Tensor,
    kv: Tensor,
    cache: PagedCache,
    layer: MLALayer,
    plan: Plan,
    *,
    topk_indices: Tensor | None = None,
    topk_lengths: Tensor | None = None,
    workspace_rows: int = WORKSPACE_ROWS,
    validate: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of a prefill: sparse in the absorbed form, or dense with keys and values a head.

    The sparse form is that of :func:`decode_branch` with :func:`sparse_prefill`. The dense form
    expands latents, ``k = concat(W_UK^T latent, k_rope)`` and ``v = W_UV latent``, attends to the
    step's own tokens causally and to the context before them piece by piece, and merges by LSE; no
    more than ``workspace_rows`` context rows are expanded at a time.

    Args:
        q: bfloat16 ``[T, H, P + R]``.
        kv: bfloat16, float16 or float32 ``[T, L + R]``, before norm and RoPE; may be strided.
        cache: rows of any format with ``head_dim`` L + R, in pages of the plan's size.
        layer: weights and constants; the weights are read ahead, as :func:`project_heads` says.
        plan: positions, slots and page tables of the step.
        topk_indices: int32 or int64 ``[T, K]``, slots in ``cache``; None for dense attention.
        topk_lengths: ``[T]``, entries that count.
        workspace_rows: context rows that the dense form expands at a time, at least one a request.
        validate: read the plan's positions and slots, and its page table and lengths for dense
            attention, and refuse values out of range.
        out: bfloat16 ``[T, H, V]``, written.

    Returns:
        bfloat16 ``[T, H, V]``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape, device or format; a
            dense layer with a sink; the cache is untouched then.

    Source: MAX ``mla_prefill_branch_fp8`` and ``MLAPrefillSparse``; vLLM's chunked MLA prefill.
    """
    selection = topk_indices, topk_lengths
    check = _check("prefill_branch", q, kv, cache, layer, plan, *selection, validate)
    check.positive("workspace_rows", workspace_rows)
    if topk_indices is None:
        check.absent("layer.attn_sink", layer.attn_sink, "for dense attention")
    out = check.output("out", out, "T H V", torch.bfloat16)
    if topk_indices is None:
        return _dense_prefill(q, kv, cache, layer, plan, workspace_rows, out)
    latent, _ = sparse_prefill(
        _absorbed_query(q, kv, cache, layer, plan),
        cache,
        topk_indices,
        softmax_scale=layer.softmax_scale,
        topk_lengths=topk_lengths,
        attn_sink=layer.attn_sink,
    )
    return project_heads(latent, layer.w_uv, out=out)


def _check(
    op: str,
    q: Tensor,
    kv: Tensor,
    cache: PagedCache,
    layer: MLALayer,
    plan: Plan,
    topk_indices: Tensor | None,
    topk_lengths: Tensor | None,
    validate: bool,
) -> Checker:
    """The checks that must pass before the cache is written."""
    check = Checker(op)
    check.kind("layer", layer, MLALayer)
    check.kind("plan", plan, Plan)
    check.bind("H", layer.num_heads)
    check.bind("Q", layer.qk_nope_head_dim + layer.qk_rope_head_dim)
    check.bind("D", layer.kv_lora_rank + layer.qk_rope_head_dim)
    check.bind("V", layer.v_head_dim)
    check.bind("T", plan.num_tokens)
    check.tensor("q", q, "T H Q", torch.bfloat16)
    check.tensor("kv", kv, "T D", (torch.bfloat16, torch.float16, torch.float32))
    check.cache("cache", cache)
    check.head_dim("kv", cache)
    if cache.format.value_dim != layer.kv_lora_rank:
        raise ValueError(
            f"{op}: cache must have a value of {layer.kv_lora_rank} dims, the layer's latent, "
            f"got format {cache.format.name}"
        )
    if cache.page_size != plan.page_size:
        raise ValueError(
            f"{op}: cache must have pages of {plan.page_size} tokens, as plan has, "
            f"got {cache.page_size}"
        )
    if topk_indices is None:
        check.absent("topk_lengths", topk_lengths, "without topk_indices")
    check.optional("topk_indices", topk_indices, "T K", INTEGERS)
    check.optional("topk_lengths", topk_lengths, "T", INTEGERS)
    if validate:
        check.writes(plan.positions, plan.slot_mapping, layer.cos_sin_cache, cache, validate)
        if topk_indices is None:
            check.paging(cache, plan.page_table, plan.seq_lens)
    return check


def _write(
    q: Tensor, kv: Tensor, cache: PagedCache, layer: MLALayer, plan: Plan, q_rope_out: Tensor
) -> None:
    fused_rope_rmsnorm_quant(
        q[..., layer.qk_nope_head_dim :],
        kv,
        layer.cos_sin_cache,
        layer.kv_norm_weight,
        cache,
        positions=plan.positions,
        slot_mapping=plan.slot_mapping,
        eps=layer.norm_eps,
        interleaved=layer.interleaved,
        out=q_rope_out,
    )


def _absorbed_query(
    q: Tensor, kv: Tensor, cache: PagedCache, layer: MLALayer, plan: Plan
) -> Tensor:
    """Write the step's rows; the query ``[T, H, L + R]`` in the latent space."""
    query = q.new_empty(*q.shape[:2], cache.format.head_dim)
    latent, rope = query.split([layer.kv_lora_rank, layer.qk_rope_head_dim], dim=-1)
    # The product first: its weights come in while the kernel in front still runs.
    project_heads(q[..., : layer.qk_nope_head_dim], layer.w_uk, out=latent)
    _write(q, kv, cache, layer, plan, rope)
    return query


def _dense_prefill(
    q: Tensor,
    kv: Tensor,
    cache: PagedCache,
    layer: MLALayer,
    plan: Plan,
    workspace_rows: int,
    out: Tensor,
) -> Tensor:
    query = q.clone()  # [T, H, P + R]
    _write(q, kv, cache, layer, plan, query[..., layer.qk_nope_head_dim :])
    w_uk = layer.w_uk.transpose()  # [H, P, L], latent to key

    def attend(
        starts: Tensor, lengths: Tensor, num_rows: int, causal: bool
    ) -> tuple[Tensor, Tensor]:
        """Attention over ``lengths`` tokens of each request, from position ``starts`` on."""
        kv_offsets = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))  # [B + 1]
        rows = query.new_empty(num_rows, cache.format.head_dim)
        gather_dequant(
            cache, plan.page_table, lengths, kv_offsets[:-1], seq_starts=starts, out=rows
        )
        latent = rows[:, None, : layer.kv_lora_rank].expand(-1, layer.num_heads, -1)  # [S, H, L]
        keys = query.new_empty(num_rows, *query.shape[1:])  # [S, H, P + R]
        project_heads(latent, w_uk, out=keys[..., : layer.qk_nope_head_dim])
        keys[..., layer.qk_nope_head_dim :] = rows[:, None, layer.kv_lora_rank :]
        values = project_heads(latent, layer.w_uv)  # [S, H, V]
        offsets = plan.input_row_offsets
        scale = layer.softmax_scale
        return dense_prefill(
            query, keys, values, offsets, kv_offsets, softmax_scale=scale, causal=causal
        )

    query_lens = plan.input_row_offsets.diff()  # [B]
    context_lens = plan.seq_lens - query_lens  # [B], tokens before this step
    state = attend(context_lens, query_lens, plan.num_tokens, causal=True)
    # Every request gets an equal share of the workspace; the longest sets the number of pieces.
    share = max(workspace_rows // max(plan.num_requests, 1), 1)
    for first in range(0, plan.max_context_len, share):
        longest = min(share, plan.max_context_len - first)
        lengths = (context_lens - first).clamp(0, longest)
        starts = torch.full_like(lengths, first)
        piece = attend(starts, lengths, longest * plan.num_requests, causal=False)
        state = merge_states(torch.stack([state[0], piece[0]]), torch.stack([state[1], piece[1]]))
    return out.copy_(state[0])

"""The attention of a layer: from projected query and latent to the output of each head."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.checks import INTEGERS, Checker
from sparsemla.formats import ScaleMode
from sparsemla.kernels.attention import schedule
from sparsemla.kernels.attention.arguments import DenseDecode, SparseDecode, Splits
from sparsemla.kernels.repeat import repeated
from sparsemla.ops.decode import (
    _dense_decode,
    _sparse_decode,
    merge_states,
    most_splits,
)
from sparsemla.ops.gather import gather_dequant
from sparsemla.ops.prefill import dense_prefill, sparse_prefill
from sparsemla.ops.projection import merge_workspace_size, project_heads
from sparsemla.ops.quant import fused_rope_rmsnorm_quant
from sparsemla.plan import Plan
from sparsemla.state import outside_autocast
from sparsemla.validation import check_device, check_integer
from sparsemla.weights import MLALayer

WORKSPACE_ROWS = 16384
"""Default number of context rows that a dense prefill expands at a time."""


def branch_workspace_size(
    max_tokens: int,
    num_heads: int,
    *,
    num_splits: int | None = None,
    max_pages_per_request: int = 0,
    kv_lora_rank: int = 512,
    qk_rope_head_dim: int = 64,
    device: torch.device | str | None = None,
) -> int:
    """Bytes of workspace that :func:`decode_branch` needs for steps of up to ``max_tokens`` tokens.

    Args:
        max_tokens: most tokens of a step, padding included.
        num_heads: query heads, H.
        num_splits: the op's ``num_splits``; None for the most that it may choose on ``device``.
        max_pages_per_request: columns of the plan's page table, for dense attention; a selection
            needs none.
        kv_lora_rank: L.
        qk_rope_head_dim: R.
        device: device of the op; default the current CUDA device, or the CPU without one.

    Returns:
        The size of a uint8 tensor, enough for every number of keys.

    Raises:
        TypeError, ValueError: a size that is not an integer or too small, or an unknown device.

    >>> branch_workspace_size(4, 16, num_splits=8)
    1124352
    """
    sizes = {
        "max_tokens": max_tokens,
        "num_heads": num_heads,
        "max_pages_per_request": max_pages_per_request,
        "kv_lora_rank": kv_lora_rank,
        "qk_rope_head_dim": qk_rope_head_dim,
    }
    for name, count in sizes.items():
        check_integer(f"branch_workspace_size: {name}", count)
    if num_splits is not None:
        check_integer("branch_workspace_size: num_splits", num_splits, 1)
    check_device("branch_workspace_size: device", device)

    def size(num_tokens: int) -> int:
        splits = num_splits or most_splits(num_tokens, num_heads, device)
        dims = num_heads, kv_lora_rank, qk_rope_head_dim
        return _workspace_bytes(num_tokens, *dims, splits, 4 * max_pages_per_request)

    # Steps of fewer tokens may be split more.
    return size(max_tokens) if num_splits else max(map(size, range(max_tokens + 1)))


def _workspace_bytes(
    num_tokens: int, num_heads: int, latent: int, rope: int, num_splits: int, table_bytes: int
) -> int:
    """Bytes of all intermediate results of :func:`decode_branch`.

    ``table_bytes``: bytes of a row of the page table, 0 with a selection.
    """
    pieces = (
        _query_bytes(num_tokens, num_heads, latent, rope),
        _splits_bytes(num_splits, num_tokens, num_heads, latent),
        num_tokens * table_bytes,
        8 * num_tokens if table_bytes else 0,
    )
    return sum(map(_padded, pieces))


def _splits_bytes(num_splits: int, num_tokens: int, num_heads: int, latent: int) -> int:
    """Bytes of attended latents and their lses."""
    rows = num_splits * num_tokens * num_heads
    if num_splits == 1:
        return _padded(2 * rows * latent) + 4 * rows
    return 4 * rows * (latent + 1)


def _query_bytes(num_tokens: int, num_heads: int, latent: int, rope: int) -> int:
    """Bytes of the queries in the latent space; merged splits later reuse their memory."""
    query = 2 * num_tokens * num_heads * (latent + rope)
    return max(query, merge_workspace_size(num_tokens, num_heads, latent))


def _padded(size: int) -> int:
    return -(-size // 16) * 16


class _Scratch:
    """Memory for intermediate results of a branch: pieces of a workspace, or new tensors."""

    def __init__(self, workspace: Tensor | None, device: torch.device) -> None:
        self.workspace = workspace
        self.device = device
        self.used = 0

    def take(self, *shape: int, dtype: torch.dtype) -> Tensor:
        if self.workspace is None:
            return torch.empty(shape, dtype=dtype, device=self.device)
        first, size = self.used, math.prod(shape) * dtype.itemsize
        self.used += _padded(size)
        return self.workspace[first : first + size].view(dtype).view(shape)


class _Step(NamedTuple):
    """The arguments that both branches share."""

    q: Tensor
    kv: Tensor
    cache: PagedCache
    layer: MLALayer
    plan: Plan
    scale_mode: ScaleMode

    def check(self, op: str) -> Checker:
        """The checks that must pass before the cache is written."""
        q, kv, cache, layer, plan, scale_mode = self
        check = Checker(op, instead="sparse_attention")
        check.kind("layer", layer, MLALayer)
        check.kind("plan", plan, Plan)
        check.bind("H", layer.num_heads)
        check.bind("Q", layer.qk_nope_head_dim + layer.qk_rope_head_dim)
        check.bind("D", layer.kv_lora_rank + layer.qk_rope_head_dim)
        check.bind("V", layer.v_head_dim)
        check.bind("T", plan.num_tokens)
        check.tensor("q", q, "T H Q", torch.bfloat16)
        check.tensor("kv", kv, "T D", (torch.bfloat16, torch.float16, torch.float32))
        for name, tensor in (
            ("w_uk", layer.w_uk.data),
            ("w_uk.scale", layer.w_uk.scale),
            ("w_uv", layer.w_uv.data),
            ("w_uv.scale", layer.w_uv.scale),
            ("kv_norm_weight", layer.kv_norm_weight),
            ("attn_sink", layer.attn_sink),
        ):
            if tensor is not None:
                check.gradient(f"layer.{name}", tensor)
        check.attended("cache", cache)
        check.head_dim("kv", cache)
        check.scale_mode(scale_mode, cache.format)
        if cache.format.value_dim != layer.kv_lora_rank:
            raise ValueError(
                f"{op}: cache must have a value of {layer.kv_lora_rank} dims, the layer's latent, "
                f"got format {cache.format.name}"
            )
        if plan.ratio != 1:
            raise ValueError(
                f"{op}: plan must have a row for each token, got one for every {plan.ratio}"
            )
        if plan.shard is not None:
            raise ValueError(f"{op}: plan must have no shard, got {plan.shard}")
        if cache.page_size != plan.page_size:
            raise ValueError(
                f"{op}: cache must have pages of {plan.page_size} tokens, as plan has, "
                f"got {cache.page_size}"
            )
        return check

    def check_values(self, check: Checker, *, dense: bool) -> None:
        """Check the values of the plan."""
        plan, table = self.plan, self.layer.cos_sin_cache
        check.writes(plan.positions, plan.slot_mapping, table, self.cache, True)
        if dense:
            check.paging(self.cache, plan.page_table, plan.seq_lens)

    def write(self, q_rope_out: Tensor) -> None:
        """Write the step's rows, and the rotated dims of the queries."""
        layer, plan = self.layer, self.plan
        fused_rope_rmsnorm_quant(
            self.q[..., layer.qk_nope_head_dim :],
            self.kv,
            layer.cos_sin_cache,
            layer.kv_norm_weight,
            self.cache,
            positions=plan.positions,
            slot_mapping=plan.slot_mapping,
            eps=layer.norm_eps,
            interleaved=layer.interleaved,
            scale_mode=self.scale_mode,
            out=q_rope_out,
        )

    def absorb(self, query: Tensor, batch_invariant: bool = False) -> None:
        """Write the step's rows, and the query ``[T, H, L + R]`` in the latent space."""
        layer = self.layer
        latent, rope = query[..., : layer.kv_lora_rank], query[..., layer.kv_lora_rank :]
        q_nope = self.q[..., : layer.qk_nope_head_dim]
        # The GEMM comes first: it loads its weights while the previous kernel still runs.
        project_heads(q_nope, layer.w_uk, batch_invariant=batch_invariant, out=latent)
        self.write(rope)


@repeated
@outside_autocast
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
    validate: bool = False,
    num_splits: int | None = None,
    workspace: Tensor | None = None,
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
        layer: weights and constants; e4m3 weights give block-scaled FP8 GEMMs. The weights are
            read ahead, as :func:`project_heads` says.
        plan: positions, slots and page tables of the step (:func:`plan_batch`), without a shard.
        topk_indices: int32, int64 or uint32 ``[T, K]``, slots in ``cache``; None for dense
            attention.
        topk_lengths: ``[T]``, leading entries to use of each row; default all.
        extra_cache, extra_topk_indices ``[T, K2]``, extra_topk_lengths ``[T]``: a second stream.
        causal: for dense attention; without it, a token also sees the later tokens of its request
            in this step. Must be True with a selection, which needs no mask.
        scale_mode: ``pow2`` or ``exact`` scales of the rows that are written.
        validate: read the plan's positions and slots, and its page table and lengths for dense
            attention, and refuse values out of range.
        num_splits: number of splits of a token's keys, computed in parallel; default from shapes
            and multiprocessors. With a given number, a token gets the same bits in any batch, and
            the projections are :func:`project_heads` with ``batch_invariant``.
        workspace: uint8, at least :func:`branch_workspace_size`; with it and ``out``, nothing is
            allocated on a GPU. Default new tensors.
        out: bfloat16 ``[T, H, V]``, written.

    Returns:
        bfloat16 ``[T, H, V]``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape, device or format; the
            cache is untouched then.

    Source: MAX ``mla_decode_branch_fp8``; DeepSeek-V2 (arXiv 2405.04434) section 2.1.
    """
    step = _Step(q, kv, cache, layer, plan, scale_mode)
    check = step.check("decode_branch")
    topk_indices, topk_lengths = _check_selection(check, topk_indices, topk_lengths, causal)
    if check.validates(validate):
        step.check_values(check, dense=topk_indices is None)
    if topk_indices is None:
        check.absent("extra_cache", extra_cache, "without topk_indices")
    if extra_cache is None:
        check.absent("extra_topk_indices", extra_topk_indices, "without extra_cache")
        check.absent("extra_topk_lengths", extra_topk_lengths, "without extra_cache")
    else:
        check.stream("extra_cache", check.attended("extra_cache", extra_cache), cache)
        extra_topk_indices = check.tensor(
            "extra_topk_indices", extra_topk_indices, "T K2", INTEGERS
        )
        extra_topk_lengths = check.optional("extra_topk_lengths", extra_topk_lengths, "T", INTEGERS)
    # Each token is one request.
    topk_indices = None if topk_indices is None else topk_indices[:, None]
    extra_topk_indices = None if extra_topk_indices is None else extra_topk_indices[:, None]
    batch_invariant = num_splits is not None
    if num_splits is not None:
        check.positive("num_splits", num_splits)
    dims = layer.num_heads, layer.kv_lora_rank, layer.qk_rope_head_dim
    scale, splits = layer.softmax_scale, None if num_splits is None else Splits(num_splits)
    # The lengths of a request do not matter for its splits.
    dense = DenseDecode(q[:, None], cache, plan.page_table, plan.seq_lens, scale, splits=splits)
    sparse = None
    if topk_indices is not None:
        sparse = SparseDecode(
            q[:, None],
            cache,
            topk_indices,
            scale,
            topk_lengths=topk_lengths,
            extra_cache=extra_cache,
            extra_topk_indices=extra_topk_indices,
            extra_topk_lengths=extra_topk_lengths,
            splits=splits,
        )
    if schedule.multiprocessors(q.device) == 0:
        splits = Splits(1)
    elif sparse is None:
        splits = schedule.splits_of_dense(dense)
    else:
        splits = schedule.splits_of_sparse(sparse)
    table_bytes = plan.page_table.shape[1] * plan.page_table.itemsize
    table_bytes = table_bytes if topk_indices is None else 0
    size = _workspace_bytes(plan.num_tokens, *dims, splits.num_splits, table_bytes)
    check.workspace(workspace, size)
    out = check.output("out", out, "T H V", torch.bfloat16)

    scratch = _Scratch(workspace, q.device)
    room = scratch.take(_query_bytes(plan.num_tokens, *dims), dtype=torch.uint8)
    shape = plan.num_tokens, 1, layer.num_heads, cache.format.head_dim
    query = room[: 2 * math.prod(shape)].view(torch.bfloat16).view(shape)
    attended = _Attended.empty(scratch, layer, plan.num_tokens, splits.num_splits)
    attention: dict[str, Any] = {
        "q": query,
        "attn_sink": attended.attn_sink,
        "splits": splits,
        "workspace": attended.splits,
        "out": attended.out,
        "lse": attended.lse,
    }
    if sparse is None:
        # torch's kernels come first: between dependent launches they would prevent the overlap.
        table, lengths = _requests_of_tokens(plan, causal, scratch)
        step.absorb(query[:, 0], batch_invariant)
        _dense_decode(dense._replace(page_table=table, seq_lens=lengths, **attention))
    else:
        step.absorb(query[:, 0], batch_invariant)
        _sparse_decode(sparse._replace(**attention))
    return attended.project(out, room, batch_invariant)


def _requests_of_tokens(plan: Plan, causal: bool, scratch: _Scratch) -> tuple[Tensor, Tensor]:
    """Page table ``[T, W]`` and lengths ``[T]`` for requests of one token each.

    Such a request ends with its token, or without a causal mask with the token's whole request.
    """
    ids, lens = plan.request_ids, plan.positions if causal else plan.seq_lens
    table = scratch.take(len(ids), plan.page_table.shape[1], dtype=plan.page_table.dtype)
    lengths = scratch.take(len(ids), dtype=lens.dtype)
    torch.index_select(plan.page_table, 0, ids, out=table)
    if causal:
        torch.add(lens, 1, out=lengths)
    else:
        torch.index_select(lens, 0, ids, out=lengths)
    return table, lengths


@dataclass(frozen=True)
class _Attended:
    """The latents from attention, possibly of several splits, which the GEMM with W_UV reads.

    Args:
        layer: the layer.
        out: bfloat16 ``[T, 1, H, L]``, with a single split.
        lse: float32 ``[T, 1, H]``, with a single split.
        splits: float32 partial results of N splits, as uint8: latents ``[N, T, H, L]``, then
            lses ``[N, T, H]``.
        shape: N, T, H, L.
    """

    layer: MLALayer
    out: Tensor | None
    lse: Tensor | None
    splits: Tensor | None
    shape: tuple[int, int, int, int]

    @classmethod
    def empty(
        cls, scratch: _Scratch, layer: MLALayer, num_tokens: int, num_splits: int
    ) -> "_Attended":
        shape = num_splits, num_tokens, layer.num_heads, layer.kv_lora_rank
        if num_splits > 1:
            size = _splits_bytes(*shape)
            return cls(layer, None, None, scratch.take(size, dtype=torch.uint8), shape)
        rows = num_tokens, 1, layer.num_heads
        out = scratch.take(*rows, layer.kv_lora_rank, dtype=torch.bfloat16)
        return cls(layer, out, scratch.take(*rows, dtype=torch.float32), None, shape)

    @property
    def attn_sink(self) -> Tensor | None:
        """The sink for attention; with several splits None, because the merge applies the sink."""
        return self.layer.attn_sink if self.splits is None else None

    def project(self, out: Tensor, room: Tensor, batch_invariant: bool) -> Tensor:
        """The heads' outputs ``[T, H, V]``; ``room`` is a workspace for merged latents."""
        weight = self.layer.w_uv
        if self.splits is None:
            latents = cast("Tensor", self.out).squeeze(1)
            return project_heads(latents, weight, batch_invariant=batch_invariant, out=out)
        partials = self.splits.view(torch.float32)
        num_latents = math.prod(self.shape)
        return project_heads(
            partials[:num_latents].view(self.shape),
            weight,
            lses=partials[num_latents:].view(self.shape[:3]),
            attn_sink=self.layer.attn_sink,
            batch_invariant=batch_invariant,
            workspace=room,
            out=out,
        )


@outside_autocast
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
    workspace_rows: int = WORKSPACE_ROWS,
    validate: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Attention of a prefill: sparse in the absorbed form, or dense with keys and values per head.

    Sparse attention is computed as in :func:`decode_branch`, with :func:`sparse_prefill`. Dense
    attention expands latents, ``k = concat(W_UK^T latent, k_rope)`` and ``v = W_UV latent``,
    attends to the step's own tokens causally and to the context before them piece by piece, and
    merges by LSE; it expands at most ``workspace_rows`` context rows at a time.

    Args:
        q: bfloat16 ``[T, H, P + R]``.
        kv: bfloat16, float16 or float32 ``[T, L + R]``, before norm and RoPE; may be strided.
        cache: rows of any format with ``head_dim`` L + R, in pages of the plan's size.
        layer: weights and constants; the weights are read ahead, as :func:`project_heads` says.
        plan: positions, slots and page tables of the step, without a shard.
        topk_indices: int32, int64 or uint32 ``[T, K]``, slots in ``cache``; None for dense
            attention.
        topk_lengths: ``[T]``, leading entries to use of each row; default all.
        causal: for dense attention; without it, a token also sees the later tokens of its request
            in this step. Must be True with a selection, which needs no mask.
        scale_mode: ``pow2`` or ``exact`` scales of the rows that are written.
        workspace_rows: context rows that dense attention expands at a time, at least one a request.
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
    step = _Step(q, kv, cache, layer, plan, scale_mode)
    check = step.check("prefill_branch")
    topk_indices, topk_lengths = _check_selection(check, topk_indices, topk_lengths, causal)
    if check.validates(validate):
        step.check_values(check, dense=topk_indices is None)
    check.positive("workspace_rows", workspace_rows)
    if topk_indices is None:
        check.absent("layer.attn_sink", layer.attn_sink, "for dense attention")
    out = check.output("out", out, "T H V", torch.bfloat16)
    if topk_indices is None:
        return _dense_prefill(step, causal, workspace_rows, out)
    query = q.new_empty(*q.shape[:2], cache.format.head_dim)
    step.absorb(query)
    latent, _ = sparse_prefill(
        query,
        cache,
        topk_indices,
        softmax_scale=layer.softmax_scale,
        topk_lengths=topk_lengths,
        attn_sink=layer.attn_sink,
    )
    return project_heads(latent, layer.w_uv, out=out)


def _check_selection(
    check: Checker, topk_indices: Tensor | None, topk_lengths: Tensor | None, causal: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Check the selection and return it as kernels take it; None without one."""
    check.kind("causal", causal, bool)
    if topk_indices is None:
        check.absent("topk_lengths", topk_lengths, "without topk_indices")
    elif not causal:
        raise ValueError(f"{check.op}: causal must be True with topk_indices, got False")
    topk_indices = check.optional("topk_indices", topk_indices, "T K", INTEGERS)
    return topk_indices, check.optional("topk_lengths", topk_lengths, "T", INTEGERS)


def _dense_prefill(step: _Step, causal: bool, workspace_rows: int, out: Tensor) -> Tensor:
    cache, layer, plan = step.cache, step.layer, step.plan
    query = step.q.clone()  # [T, H, P + R]
    step.write(query[..., layer.qk_nope_head_dim :])
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
    state = attend(context_lens, query_lens, plan.num_tokens, causal)
    # Every request gets an equal share of the workspace; the longest sets the number of pieces.
    share = max(workspace_rows // max(plan.num_requests, 1), 1)
    for first in range(0, plan.max_context_len, share):
        longest = min(share, plan.max_context_len - first)
        lengths = (context_lens - first).clamp(0, longest)
        starts = torch.full_like(lengths, first)
        piece = attend(starts, lengths, longest * plan.num_requests, False)
        state = merge_states(torch.stack([state[0], piece[0]]), torch.stack([state[1], piece[1]]))
    return out.copy_(state[0])

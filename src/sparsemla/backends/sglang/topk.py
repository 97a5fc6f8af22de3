"""The selection of SGLang's indexer, exact and the same in every run."""

from __future__ import annotations

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend, TopkTransformMethod
from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend, DSAMetadata
from torch import Tensor

from sparsemla import select_topk
from sparsemla.kernels.common.pools import expand_pools


def topk_transform(
    self: DSATopKBackend,
    logits: Tensor,
    lengths: Tensor,
    topk: int,
    topk_transform_method: TopkTransformMethod,
    attn_metadata: DSAMetadata,
    cu_seqlens_q_topk: Tensor | None = None,
    topk_indices_offset: Tensor | None = None,
    row_starts: Tensor | None = None,
    batch_idx_list: Tensor | None = None,
    force_unfused_topk: bool = False,
) -> Tensor:
    """``DSATopKBackend.topk_transform`` for every ``--dsa-topk-backend``.

    Args:
        logits: float32 ``[T, N]``; row t competes with ``lengths[t]`` columns from
            ``row_starts[t]`` on, other columns are never read.
        lengths: int32 ``[T]``.
        topk: k.
        topk_transform_method: PAGED for slots of the cache, RAGGED for rows of the batch's
            contexts, one after the other.
        attn_metadata: has the page table.
        topk_indices_offset: int32 ``[T]``, first row of a token's context, for RAGGED.
        row_starts: int32 ``[T]``, default 0.
        batch_idx_list: int32 ``[T]``, request of each token, for a part of a batch.
        force_unfused_topk: return positions; SGLang converts them later.

    Returns:
        int32 ``[T, topk]``: positions in the request, slots or rows in ascending order of
        positions, then -1.
    """
    row_ends = lengths if row_starts is None else row_starts + lengths
    fused = envs.SGLANG_DSA_FUSE_TOPK.get() and not force_unfused_topk
    if fused and topk_transform_method == TopkTransformMethod.PAGED:
        request_ids = batch_idx_list
        if request_ids is None:
            request_ids = attn_metadata.token_to_batch_idx
        if request_ids is None:
            # A decode has a row of the page table for each token. This tensor is an arange.
            request_ids = attn_metadata.dsa_cu_seqlens_q[: logits.shape[0]]
        return select_topk(
            logits,
            topk=topk,
            row_starts=row_starts,
            row_ends=row_ends,
            page_table=attn_metadata.real_page_table,
            request_ids=request_ids,
            page_size=attn_metadata.page_size,
        )
    positions = select_topk(logits, topk=topk, row_starts=row_starts, row_ends=row_ends)
    if not fused:
        return positions
    if topk_indices_offset is None:
        raise ValueError("sparsemla: topk_indices_offset must be given for RAGGED, got None")
    return torch.where(positions < 0, positions, positions + topk_indices_offset[:, None])


def build_topk_v2_plan(self: DeepseekSparseAttnBackend, seqlens_expanded: Tensor) -> None:
    """``_build_topk_v2_plan``: the selection needs no plan."""


def select_pools(
    logits: Tensor,
    group_lengths: Tensor,
    kpool: int,
    topk: int,
    page_table: Tensor | None = None,
    topk_offsets: Tensor | None = None,
    seq_lens: Tensor | None = None,
    row_starts: Tensor | None = None,
    out_rows: int | None = None,
    page_table_row_index: Tensor | None = None,
    topk_v2_plan: Tensor | None = None,
) -> Tensor:
    """``topk_from_pooled_history_logits``: the tokens of the best pools, then the open pool's.

    Args:
        logits: float32 ``[T, N]``; row t competes with ``group_lengths[t]`` pools from
            ``row_starts[t]`` on, other columns are never read.
        group_lengths: int32 ``[T]``, complete pools of each token.
        kpool: tokens of a pool.
        topk: tokens of the selected pools, a multiple of ``kpool``.
        page_table: int32 ``[R, W]``, a slot for each token of a request; default positions.
        topk_offsets: int32 ``[T]`` or ``[T, 1]``, first row of a token's context, instead of slots.
        seq_lens: ``[T]``, tokens that each token sees; without it the open pool is left out.
        row_starts: int32 ``[T]``, default 0.
        out_rows: rows of the result, those after T are padding.
        page_table_row_index: int32 ``[T]``, the row of the table of each token; default t.
        topk_v2_plan: ignored: the selection needs no plan.

    Returns:
        int32 ``[T, topk + kpool - 1]``: positions, slots or rows in ascending order of positions,
        then -1.
    """
    pools = select_topk(
        logits,
        topk=topk // kpool,
        row_starts=row_starts,
        row_ends=group_lengths if row_starts is None else row_starts + group_lengths,
    )
    width = topk if seq_lens is None else topk + kpool - 1
    out = pools.new_empty(len(pools) if out_rows is None else out_rows, width)
    expand_pools(
        pools,
        group_lengths,
        kpool,
        out,
        lengths=seq_lens,
        table=page_table,
        request_ids=page_table_row_index,
        offsets=None if topk_offsets is None else topk_offsets.flatten(),
    )
    return out


def build_pool_plan(pool_lens: Tensor) -> None:
    """``build_kpool_topk_v2_plan``: the selection needs no plan."""

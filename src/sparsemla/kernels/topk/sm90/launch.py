"""Exact, deterministic top-k for Hopper: rows held in registers where they fit, or lists."""

from __future__ import annotations

from torch import Tensor

from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.topk import triton as portable
from sparsemla.kernels.topk.sm90.held import held, launch_held
from sparsemla.kernels.topk.sm90.merge import MERGE_BLOCK, merge_parts
from sparsemla.kernels.topk.sm90.select import launch, plan


def select_topk(
    *,
    scores: Tensor,
    topk: int,
    row_starts: Tensor | None,
    row_ends: Tensor | None,
    page_table: Tensor | None = None,
    request_ids: Tensor | None = None,
    page_size: int | None = None,
    out: Tensor,
) -> None:
    """Launcher; see :func:`sparsemla.ops.topk.select_topk`."""
    num_rows, num_cols = scores.shape
    ranges = (row_starts, row_ends)
    if num_rows == 0:
        return
    how = held(num_rows, num_cols, topk, num_multiprocessors(scores.device))
    if how is not None:
        pages = portable.pages_of(page_table, request_ids)
        launch_held(scores, topk, ranges, out, pages, page_size or 0, *how)
    else:
        how = plan(num_rows, num_cols, topk, scores.device)
        portable.in_turns(
            launch, how, scores, topk, ranges, page_table, request_ids, page_size, out
        )


def merge_topk(*, values: Tensor, indices: Tensor, topk: int, out: Tensor) -> None:
    """Launcher; see :func:`sparsemla.ops.topk.merge_topk`."""
    _, num_rows, width = values.shape
    if topk > MERGE_BLOCK // 4 or width > MERGE_BLOCK // 2:
        portable.merge_topk(values=values, indices=indices, topk=topk, out=out)
    elif num_rows:
        merge_parts(values, indices, topk, out)

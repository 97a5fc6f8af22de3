"""Launchers of the top-k kernels for Hopper, and the choice between two algorithms.

Rows that fit are held in registers (:mod:`.registers`). All others go through lists of candidates
(:mod:`.candidates`).
"""

from __future__ import annotations

from torch import Tensor

from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.topk import triton as portable
from sparsemla.kernels.topk.sm90 import candidates, registers
from sparsemla.kernels.topk.sm90.merge import MERGE_BLOCK, merge_parts


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
    held = registers.schedule_registers(
        num_rows, num_cols, topk, num_multiprocessors(scores.device)
    )
    if held is not None:
        pages = portable.pages_of(page_table, request_ids)
        registers.launch(scores, topk, ranges, out, pages, page_size or 0, held)
        return
    portable.launch_in_chunks(
        candidates.launch,
        candidates.schedule_lists(num_rows, num_cols, topk, scores.device),
        scores,
        topk,
        ranges,
        page_table,
        request_ids,
        page_size,
        out,
    )


SELECTION = portable.Selection(select_topk, candidates.schedule_lists)
"""Selections on Hopper, as the indexer needs them; rows in registers need no workspace."""


def merge_topk(*, values: Tensor, indices: Tensor, topk: int, out: Tensor) -> None:
    """Launcher; see :func:`sparsemla.ops.topk.merge_topk`."""
    _, num_rows, width = values.shape
    if topk > MERGE_BLOCK // 4 or width > MERGE_BLOCK // 2:
        portable.merge_topk(values=values, indices=indices, topk=topk, out=out)
    elif num_rows:
        merge_parts(values, indices, topk, out)

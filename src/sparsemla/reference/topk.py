"""Reference of exact top-k. Shapes: R rows, N columns, P parts with C candidates each."""

import torch
from torch import Tensor

from sparsemla.reference.gather import to_slots


def select_topk(
    scores: Tensor,
    *,
    topk: int,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
    page_table: Tensor | None = None,
    request_ids: Tensor | None = None,
    page_size: int | None = None,
) -> Tensor:
    """Ids of the largest scores of each row in ascending order, then -1; ties go to the lower id.

    The id of a column is its distance from ``row_starts``.
    """
    num_rows, num_cols = scores.shape
    out = torch.full((num_rows, topk), -1, dtype=torch.int32, device=scores.device)
    starts = [0] * num_rows if row_starts is None else row_starts.clamp(0, num_cols).tolist()
    ends = [num_cols] * num_rows if row_ends is None else row_ends.clamp(0, num_cols).tolist()
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        values = scores[row, start:end].float()  # [n]
        # Stable sorts: the lower index wins a tie, and NaN comes after everything else.
        order = values.nan_to_num(0.0, torch.inf, -torch.inf).argsort(descending=True, stable=True)
        order = order[values.isnan()[order].int().argsort(stable=True)]
        selected = order[:topk].sort().values  # [min(topk, n)], ascending ids
        out[row, : selected.shape[0]] = selected.int()
    if page_table is None or request_ids is None or page_size is None:
        return out
    return to_slots(out, page_table, request_ids, page_size=page_size)


def merge_topk(values: Tensor, indices: Tensor, *, topk: int) -> Tensor:
    """:func:`select_topk` over the union of the candidates; negative ids are ignored."""
    num_rows = values.shape[1]
    out = torch.full((num_rows, topk), -1, dtype=torch.int32, device=values.device)
    for row in range(num_rows):
        valid = indices[:, row] >= 0  # [P, C]
        ids, order = indices[:, row][valid].sort()
        selected = select_topk(values[:, row][valid][order][None], topk=topk)[
            0
        ]  # ties: the lower id
        selected = selected[selected >= 0].long()
        out[row, : selected.shape[0]] = ids[selected].int()
    return out

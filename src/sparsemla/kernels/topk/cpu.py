"""Exact top-k on the CPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from sparsemla.cache import slots_of, to_int32
from sparsemla.kernels.common import cpu
from sparsemla.kernels.topk.arguments import MergeTopk, SelectTopk

OUTSIDE = torch.iinfo(torch.int32).min
"""Key of a column outside the row, one below the key of NaN, the lowest key in a row."""


def select_topk(call: SelectTopk) -> None:
    scores, topk, out = call.scores, call.topk, call.out
    row_starts, row_ends = call.row_starts, call.row_ends
    num_rows, num_cols = scores.shape
    starts = torch.zeros(num_rows, dtype=torch.long) if row_starts is None else row_starts.long()
    ends = torch.full((num_rows,), num_cols) if row_ends is None else row_ends.long()
    starts, ends = starts.clamp(0, num_cols), ends.clamp(0, num_cols)
    counts = (ends - starts).clamp_min(0)
    ids = torch.arange(topk, dtype=torch.int32)
    out.copy_(ids.where(ids < counts[:, None], -1))
    long_rows = (counts > topk).nonzero()[:, 0]
    # Keys, masks and indices take about 16 bytes for each column of a row.
    for part in cpu.blocks(long_rows.shape[0], cpu.WORKSPACE_BYTES // (16 * max(num_cols, 1))):
        rows = long_rows[part]
        first, last = int(starts[rows].min()), int(ends[rows].max())
        keys = order_keys(scores[rows, first:last])
        columns = torch.arange(first, last)
        inside = (columns >= starts[rows, None]) & (columns < ends[rows, None])
        chosen = _largest(keys.masked_fill_(~inside, OUTSIDE), topk)
        out[rows] = (chosen + first - starts[rows, None]).int()
    table, request_ids, page_size = call.page_table, call.request_ids, call.page_size
    if table is not None and request_ids is not None and page_size is not None:
        for part in cpu.blocks(num_rows, cpu.WORKSPACE_BYTES // (32 * topk)):
            requests = request_ids[part, None].expand_as(out[part])
            out[part] = to_int32(slots_of(table, requests, out[part], page_size))


def order_keys(scores: Tensor) -> Tensor:
    """int32 keys in the order of the scores: NaN lowest, then -inf; -0 equals +0."""
    scores = scores.float() + 0.0
    bits = scores.view(torch.int32)
    keys = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return keys.masked_fill_(scores.isnan(), OUTSIDE + 1)


def _largest(keys: Tensor, topk: int) -> Tensor:
    """Columns ``[R, topk]``, ascending, of the largest keys; ties go to the lower column."""
    least = keys.topk(topk, sorted=False).values.amin(-1, keepdim=True)
    chosen = keys >= least
    if int(chosen.sum()) > keys.shape[0] * topk:  # a row has too many ties
        above = keys > least
        equal = chosen & ~above
        chosen = above | (equal & (equal.cumsum(-1) <= topk - above.sum(-1, keepdim=True)))
    return chosen.nonzero()[:, 1].view(keys.shape[0], topk)


def merge_topk(call: MergeTopk) -> None:
    sort_and_select(call, select_topk)


def sort_and_select(call: MergeTopk, select: Callable[[SelectTopk], None]) -> None:
    """Merge candidates: sort each row by index, then let ``select`` select from the rows.

    Entries without a candidate have negative indices, so they come first: rows start behind them.
    """
    values, indices, topk, out = call
    ids, order = indices.transpose(0, 1).flatten(1).sort(dim=1)
    scores = values.transpose(0, 1).flatten(1).gather(1, order)
    starts = (ids < 0).sum(1, keepdim=True)
    select(SelectTopk(scores, topk, row_starts=starts[:, 0], out=out))
    chosen = ids.gather(1, (out + starts).where(out >= 0, 0)) if ids.shape[1] else out
    out.copy_(chosen.where(out >= 0, -1))

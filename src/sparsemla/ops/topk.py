"""Exact, deterministic top-k selection."""

import torch
from torch import Tensor

from sparsemla.checks import INTEGERS, Checker
from sparsemla.kernels import topk as selections
from sparsemla.kernels.repeat import repeated
from sparsemla.kernels.topk.arguments import MergeTopk, SelectTopk
from sparsemla.ops._library import operator

SCORES = (torch.float32, torch.bfloat16)
MAX_COLUMNS = 2**30
"""Kernels count columns, and a little beyond the last, in 32 bits."""


_select_topk = operator(selections.SELECT_TOPK)


@repeated
def select_topk(
    scores: Tensor,
    *,
    topk: int,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
    page_table: Tensor | None = None,
    request_ids: Tensor | None = None,
    page_size: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The columns of the ``topk`` largest scores of each row, exactly.

    The order is total: larger score first, then lower column; NaN comes after -inf; -0 equals +0.
    So the set is the same on every run and every device. Row ``r`` competes with the ``n`` columns
    ``row_starts[r] <= c < row_ends[r]`` (clamped to the row); other columns are never read.

    Args:
        scores: float32 or bfloat16 ``[R, N]``, N at most 2**30; rows may be strided.
        topk: k, any positive number.
        row_starts: int32, int64 or uint32 ``[R]``, first column of each row; default 0.
        row_ends: int32, int64 or uint32 ``[R]``, end of each row; default N.
        page_table: int32, int64 or uint32 ``[B, W]``; with it, columns become slots as in
            :func:`to_slots`.
        request_ids: int32, int64 or uint32 ``[R]``, the request of each row, with ``page_table``.
        page_size: tokens of a page, with ``page_table``.
        out: int32 ``[R, topk]``, written.

    Returns:
        int32 ``[R, topk]``: ``column - row_starts[r]`` in ascending order, then -1 if
        ``n < topk``; or the slot of each.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepSeek-V3.2 (arXiv 2512.02556) section 2.1.

    >>> select_topk(torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]]), topk=2)
    tensor([[1, 2]], dtype=torch.int32)
    """
    check = Checker("select_topk", gradients="all")
    check.tensor("scores", scores, "R N", SCORES)
    if scores.shape[1] > MAX_COLUMNS:
        raise ValueError(
            f"select_topk: scores must have at most {MAX_COLUMNS} columns, got {scores.shape[1]}"
        )
    check.positive("topk", topk)
    row_starts = check.optional("row_starts", row_starts, "R", INTEGERS)
    row_ends = check.optional("row_ends", row_ends, "R", INTEGERS)
    if page_table is None:
        check.absent("request_ids", request_ids, "without page_table")
        check.absent("page_size", page_size, "without page_table")
    else:
        page_table = check.tensor("page_table", page_table, "B W", INTEGERS)
        request_ids = check.tensor("request_ids", request_ids, "R", INTEGERS)
        check.positive("page_size", page_size)
    check.bind("K", topk)
    out = check.output("out", out, "R K", torch.int32)
    _select_topk(
        SelectTopk(scores, topk, row_starts, row_ends, page_table, request_ids, page_size, out)
    )
    return out


_merge_topk = operator(selections.MERGE_TOPK)


@repeated
def merge_topk(values: Tensor, indices: Tensor, *, topk: int, out: Tensor | None = None) -> Tensor:
    """The exact ``topk`` best of candidates from several parts of a row.

    If a context is split between devices, each device selects the ``topk`` best of its part, with
    their scores and their positions in the whole row. The best of all candidates are the best of
    the row. The order is the same as in :func:`select_topk`: larger value first, then lower index;
    NaN comes after -inf.

    Args:
        values: float32 or bfloat16 ``[P, R, C]``, scores of C candidates of R rows from P parts.
        indices: int32, int64 or uint32 ``[P, R, C]``, their positions, below 2**31 and distinct in
            a row; a negative index marks an entry without a candidate, and its value is ignored.
        topk: k, any positive number.
        out: int32 ``[R, topk]``, written.

    Returns:
        int32 ``[R, topk]``: indices in ascending order, then -1 if a row has fewer than
        ``topk`` candidates.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepSeek-V3.2 (arXiv 2512.02556) section 2.1, under context parallelism.

    >>> values = torch.tensor([[[5.0, 3.0]], [[3.0, 4.0]]])
    >>> indices = torch.tensor([[[0, 2]], [[1, 9]]])
    >>> merge_topk(values, indices, topk=3)
    tensor([[0, 1, 9]], dtype=torch.int32)
    """
    check = Checker("merge_topk", gradients="all")
    check.tensor("values", values, "P R C", SCORES)
    indices = check.tensor("indices", indices, "P R C", INTEGERS)
    check.positive("topk", topk)
    check.bind("K", topk)
    out = check.output("out", out, "R K", torch.int32)
    _merge_topk(MergeTopk(values, indices, topk, out))
    return out

"""Exact, deterministic top-k selection."""

import torch
from torch import Tensor

from sparsemla import dispatch
from sparsemla.checks import INTEGERS, Checker
from sparsemla.ops._library import operator

SCORES = (torch.float32, torch.bfloat16)


def select_topk(
    scores: Tensor,
    topk: int,
    *,
    row_starts: Tensor | None = None,
    row_ends: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The columns of the ``topk`` largest scores of each row, exactly.

    The order is total: larger score first, then lower column; NaN comes after -inf; -0 equals +0.
    So the set is the same on every run and every device. Row ``r`` competes with the ``n`` columns
    ``row_starts[r] <= c < row_ends[r]`` (clamped to the row); what lies outside is never looked at.

    Args:
        scores: float32 or bfloat16 ``[R, N]``; rows may be strided.
        topk: k, any positive number.
        row_starts: int32 or int64 ``[R]``, first column of each row; default 0.
        row_ends: int32 or int64 ``[R]``, end of each row; default N.
        out: int32 ``[R, topk]``, written.

    Returns:
        int32 ``[R, topk]``: ``column - row_starts[r]`` in ascending order, then -1 where
        ``n < topk``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: DeepSeek-V3.2 (arXiv 2512.02556) section 2.1.

    >>> select_topk(torch.tensor([[1.0, 3.0, 3.0, 3.0, 0.0]]), 2)
    tensor([[1, 2]], dtype=torch.int32)
    """
    check = Checker("select_topk")
    check.tensor("scores", scores, "R N", SCORES)
    check.positive("topk", topk)
    check.optional("row_starts", row_starts, "R", INTEGERS)
    check.optional("row_ends", row_ends, "R", INTEGERS)
    check.bind("K", topk)
    out = check.output("out", out, "R K", torch.int32)
    _select_topk(scores, topk, row_starts, row_ends, out)
    return out


@operator("out")
def _select_topk(
    scores: Tensor, topk: int, row_starts: Tensor | None, row_ends: Tensor | None, out: Tensor
) -> None:
    kernel = dispatch.find("select_topk", scores, topk=topk)
    kernel(scores=scores, topk=topk, row_starts=row_starts, row_ends=row_ends, out=out)

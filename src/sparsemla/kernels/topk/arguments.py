"""The records of the top-k ops: the arguments that the public ops have checked."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsemla.kernels.common.table import ALLOCATED


class SelectTopk(NamedTuple):
    """Arguments of :func:`sparsemla.select_topk`."""

    scores: Tensor
    topk: int
    row_starts: Tensor | None = None
    row_ends: Tensor | None = None
    page_table: Tensor | None = None
    request_ids: Tensor | None = None
    page_size: int | None = None
    out: Tensor = ALLOCATED


class MergeTopk(NamedTuple):
    """Arguments of :func:`sparsemla.merge_topk`."""

    values: Tensor
    indices: Tensor
    topk: int
    out: Tensor = ALLOCATED

"""The record of lists that query tokens share."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsemla.kernels.common.table import ALLOCATED


class ShareLists(NamedTuple):
    """Arguments of :func:`sparsemla.share_lists`."""

    topk_indices: Tensor
    list_tokens: int
    topk_lengths: Tensor | None = None
    out: Tensor = ALLOCATED
    lengths: Tensor = ALLOCATED
    token_mask: Tensor = ALLOCATED

"""The records of lists of selected rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsemla.kernels.common.table import ALLOCATED
from sparsemla.shards import ContextShard


class ShareLists(NamedTuple):
    """Arguments of :func:`sparsemla.share_lists`."""

    topk_indices: Tensor
    list_tokens: int
    topk_lengths: Tensor | None = None
    out: Tensor = ALLOCATED
    lengths: Tensor = ALLOCATED
    token_mask: Tensor = ALLOCATED


class OwnPositions(NamedTuple):
    """Arguments of :func:`sparsemla.own_positions`."""

    topk_indices: Tensor
    shard: ContextShard
    out: Tensor = ALLOCATED
    counts: Tensor = ALLOCATED

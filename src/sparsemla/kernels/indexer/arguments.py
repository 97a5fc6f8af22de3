"""The records of the indexer's ops: the arguments that the public ops have checked."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.kernels.common.table import ALLOCATED


class IndexerScores(NamedTuple):
    """Arguments of :func:`sparsemla.indexer_scores`."""

    index_q: Tensor
    weights: Tensor
    index_k: Tensor
    index_k_scales: Tensor | None
    row_starts: Tensor
    row_ends: Tensor
    out: Tensor = ALLOCATED


class IndexerScoresPaged(NamedTuple):
    """Arguments of :func:`sparsemla.indexer_scores_paged`."""

    index_q: Tensor
    weights: Tensor
    cache: PagedCache
    page_table: Tensor
    seq_lens: Tensor
    max_seq_len: int
    ratio: int = 1
    out: Tensor = ALLOCATED


class IndexerTopk(NamedTuple):
    """Arguments of :func:`sparsemla.indexer_topk`."""

    index_q: Tensor
    weights: Tensor
    cache: PagedCache
    input_row_offsets: Tensor
    seq_lens: Tensor
    page_table: Tensor
    topk: int
    causal: bool = True
    ratio: int = 1
    as_slots: bool = False
    max_workspace_bytes: int = 256 << 20
    out: Tensor = ALLOCATED

    @property
    def num_keys(self) -> int:
        """Most keys of a request."""
        return self.page_table.shape[1] * self.cache.page_size

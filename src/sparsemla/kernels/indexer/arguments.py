"""The records of the indexer's ops: the arguments that the public ops have checked."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.kernels.common.table import ALLOCATED


def most_keys(page_table: Tensor, cache: PagedCache) -> int:
    """Most keys of a request."""
    return page_table.shape[1] * cache.page_size


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
        return most_keys(self.page_table, self.cache)


class IndexerTopkBlocks(NamedTuple):
    """Arguments of :func:`sparsemla.indexer_topk_blocks`."""

    index_q: Tensor
    weights: Tensor
    cache: PagedCache
    input_row_offsets: Tensor
    seq_lens: Tensor
    page_table: Tensor
    topk: int
    topk_blocks: int
    block_size: int
    causal: bool = True
    ratio: int = 1
    max_workspace_bytes: int = 256 << 20
    out: Tensor = ALLOCATED
    blocks_out: Tensor = ALLOCATED

    @property
    def num_keys(self) -> int:
        return most_keys(self.page_table, self.cache)

    @property
    def num_blocks(self) -> int:
        """Most blocks of a request."""
        return -(-self.num_keys // self.block_size)

    @property
    def scored(self) -> IndexerTopk:
        """A selection that needs scores of the same tokens, those that leave out keys or blocks."""
        fewest = min(self.topk, self.topk_blocks * self.block_size)
        request = self.input_row_offsets, self.seq_lens, self.page_table
        rows = self.index_q, self.weights, self.cache
        return IndexerTopk(*rows, *request, fewest, self.causal, self.ratio, out=self.out)


class IndexerTopkOfBlocks(NamedTuple):
    """Arguments of :func:`sparsemla.indexer_topk_of_blocks`."""

    index_q: Tensor
    weights: Tensor
    cache: PagedCache
    input_row_offsets: Tensor
    seq_lens: Tensor
    page_table: Tensor
    blocks: Tensor
    topk: int
    block_size: int
    causal: bool = True
    ratio: int = 1
    max_workspace_bytes: int = 256 << 20
    out: Tensor = ALLOCATED

    @property
    def num_keys(self) -> int:
        return most_keys(self.page_table, self.cache)

    @property
    def num_listed(self) -> int:
        """Most keys that a token's blocks have."""
        return self.blocks.shape[1] * self.block_size

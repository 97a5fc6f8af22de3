"""The indexer with its top-k, as flashinfer-bench defines it, with sparsemla."""

import torch
from torch import Tensor

from sparsemla import INDEX_FP8, PagedCache, indexer_topk


def run(
    q_index_fp8: Tensor,
    k_index_cache_fp8: Tensor,
    weights: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    topk_indices: Tensor,
) -> None:
    """Write ``topk_indices``: slots of the cache, then -1."""
    # [pages, page_size, 1, 132]: sparsemla has no dimension of heads.
    cache = PagedCache(k_index_cache_fp8.view(torch.uint8).squeeze(2), INDEX_FP8)
    offsets = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=seq_lens.device)
    indexer_topk(
        q_index_fp8,
        weights,
        cache,
        offsets,
        seq_lens,
        block_table,
        topk=topk_indices.shape[1],
        as_slots=True,
        out=topk_indices,
    )

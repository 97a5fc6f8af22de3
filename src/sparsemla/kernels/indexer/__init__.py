"""Indexer scores, and selections by these scores."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsemla.cache import aligned
from sparsemla.kernels.common.device import describe
from sparsemla.kernels.common.table import Kernel, LazyModule, Op
from sparsemla.kernels.indexer.arguments import (
    IndexerScores,
    IndexerScoresPaged,
    IndexerTopk,
    IndexerTopkBlocks,
    IndexerTopkOfBlocks,
)

if TYPE_CHECKING:
    from sparsemla.kernels.indexer import cpu, sm80, sm90, triton
else:
    cpu, sm80, sm90, triton = (
        LazyModule(f"{__name__}.{name}") for name in ("cpu", "sm80", "sm90", "triton")
    )


def _refuse_queries(q: Tensor) -> str | None:
    """Why the kernels in Gluon refuse queries ``[..., HI, DI]``, or None."""
    if q.dtype != torch.float8_e4m3fn:
        return f"needs float8_e4m3fn queries, got {q.dtype}"
    heads, dim = q.shape[-2:]
    if heads > 256 or dim > 128:
        return f"needs up to 256 heads of up to 128 dims, got {heads} of {dim}"
    return None


UNALIGNED = "needs queries and keys with rows that start at multiples of 16 bytes"


def _refuse_ragged(call: IndexerScores) -> str | None:
    refused = _refuse_queries(call.index_q)
    if refused is None and not aligned(call.index_q, call.index_k):
        return UNALIGNED
    return refused


def _refuse_paged(call: IndexerScoresPaged | IndexerTopk) -> str | None:
    q, cache = call.index_q, call.cache
    if cache.format.is_fp4:
        return f"needs e4m3 keys, got {cache.format.name}"
    refused = _refuse_queries(q)
    if refused is not None:
        return refused
    if cache.page_size % 64:
        return f"needs pages of a multiple of 64 keys, got {cache.page_size}"
    return None if aligned(q, cache) else UNALIGNED


def _refuse_dims(index_q: Tensor) -> str | None:
    dims = index_q.shape[-1]
    return f"needs a multiple of 16 dims, got {dims}" if dims % 16 else None


def _refuse_ragged_by_sm80(call: IndexerScores) -> str | None:
    if not describe(call.index_q.device).has_fp8:
        return "needs instructions that convert e4m3, else portable Triton is as fast"
    return _refuse_ragged(call) or _refuse_dims(call.index_q)


def _refuse_paged_by_sm80(call: IndexerScoresPaged | IndexerTopk) -> str | None:
    return _refuse_paged(call) or _refuse_dims(call.index_q)


INDEXER_SCORES = Op(
    "indexer_scores",
    IndexerScores,
    (
        Kernel("sm90", lambda: sm90.indexer_scores, _refuse_ragged),
        Kernel("sm80", lambda: sm80.indexer_scores, _refuse_ragged_by_sm80),
        Kernel("triton", lambda: triton.indexer_scores),
        Kernel("cpu", lambda: cpu.indexer_scores),
    ),
    outputs=("out",),
)

INDEXER_SCORES_PAGED = Op(
    "indexer_scores_paged",
    IndexerScoresPaged,
    (
        Kernel("sm90", lambda: sm90.indexer_scores_paged, _refuse_paged),
        Kernel("sm80", lambda: sm80.indexer_scores_paged, _refuse_paged_by_sm80),
        Kernel("triton", lambda: triton.indexer_scores_paged),
        Kernel("cpu", lambda: cpu.indexer_scores_paged),
    ),
    outputs=("out",),
)

INDEXER_TOPK = Op(
    "indexer_topk",
    IndexerTopk,
    (
        Kernel("sm90", lambda: sm90.indexer_topk, _refuse_paged),
        Kernel("sm80", lambda: sm80.indexer_topk, _refuse_paged_by_sm80),
        Kernel("triton", lambda: triton.indexer_topk),
        Kernel("cpu", lambda: cpu.indexer_topk),
    ),
    outputs=("out",),
)

INDEXER_TOPK_BLOCKS = Op(
    "indexer_topk_blocks",
    IndexerTopkBlocks,
    (
        Kernel("triton", lambda: triton.indexer_topk_blocks),
        Kernel("cpu", lambda: cpu.indexer_topk_blocks),
    ),
    outputs=("out", "blocks_out"),
)

INDEXER_TOPK_OF_BLOCKS = Op(
    "indexer_topk_of_blocks",
    IndexerTopkOfBlocks,
    (
        Kernel("triton", lambda: triton.indexer_topk_of_blocks),
        Kernel("cpu", lambda: cpu.indexer_topk_of_blocks),
    ),
    outputs=("out",),
)

_FAMILY = (
    INDEXER_SCORES,
    INDEXER_SCORES_PAGED,
    INDEXER_TOPK,
    INDEXER_TOPK_BLOCKS,
    INDEXER_TOPK_OF_BLOCKS,
)
OPS = {op.name: op for op in _FAMILY}

"""Indexer scores, and selections by these scores."""

from types import ModuleType

import torch

from sparsemla.formats import get_format
from sparsemla.kernels.common.registry import Kernel, Op, Problem


def _sm90() -> ModuleType:
    from sparsemla.kernels.indexer import sm90

    return sm90


def _triton() -> ModuleType:
    from sparsemla.kernels.indexer import triton

    return triton


def _cpu() -> ModuleType:
    from sparsemla.kernels.indexer import cpu

    return cpu


def refused_by_sm90(problem: Problem) -> str | None:
    """Why the Hopper kernels refuse a problem, or None."""
    if problem.cache_format and get_format(problem.cache_format).is_fp4:
        return f"needs e4m3 keys, as Hopper has no FP4 MMA, got {problem.cache_format}"
    if problem.dtype != torch.float8_e4m3fn:
        return f"needs float8_e4m3fn queries, got {problem.dtype}"
    if problem.num_heads > 256 or problem.head_dim > 128:
        return (
            f"needs up to 256 heads of up to 128 dims, "
            f"got {problem.num_heads} of {problem.head_dim}"
        )
    if problem.page_size % 64:
        return f"needs pages of a multiple of 64 keys, got {problem.page_size}"
    if not problem.aligned:
        return "needs queries and keys with rows that start at multiples of 16 bytes"
    return None


OPS = {
    "indexer_scores": Op(
        ("out",),
        (
            Kernel("sm90", lambda: _sm90().indexer_scores, refused_by_sm90),
            Kernel("triton", lambda: _triton().indexer_scores),
            Kernel("cpu", lambda: _cpu().indexer_scores),
        ),
        dtype=torch.float8_e4m3fn,
    ),
    "indexer_scores_paged": Op(
        ("out",),
        (
            Kernel("sm90", lambda: _sm90().indexer_scores_paged, refused_by_sm90),
            Kernel("triton", lambda: _triton().indexer_scores_paged),
            Kernel("cpu", lambda: _cpu().indexer_scores_paged),
        ),
        dtype=torch.float8_e4m3fn,
    ),
    "indexer_topk": Op(
        ("out",),
        (
            Kernel("sm90", lambda: _sm90().indexer_topk, refused_by_sm90),
            Kernel("triton", lambda: _triton().indexer_topk),
            Kernel("cpu", lambda: _cpu().indexer_topk),
        ),
        dtype=torch.float8_e4m3fn,
    ),
}

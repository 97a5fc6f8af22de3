"""Attention over latent rows: sparse and dense, prefill and decode, and merging of states.

``sparse_attention`` is the forward pass of training: ``sparse_prefill`` over rows of any dtype.
"""

from types import ModuleType

import torch

from sparsemla.formats import get_format
from sparsemla.kernels.attention import schedule
from sparsemla.kernels.common.registry import Kernel, Op, Problem


def _sm90() -> ModuleType:
    from sparsemla.kernels.attention import sm90

    return sm90


def _triton() -> ModuleType:
    from sparsemla.kernels.attention import triton

    return triton


def _cpu() -> ModuleType:
    from sparsemla.kernels.attention import cpu

    return cpu


def refused_by_sm90(problem: Problem) -> str | None:
    """Why the Hopper kernels refuse a problem, or None."""
    if problem.dtype != torch.bfloat16:
        return f"needs bfloat16 queries, got {problem.dtype}"
    if problem.out_dtype not in (None, torch.bfloat16):
        return f"gives bfloat16 results, not {problem.out_dtype}"
    if not problem.aligned:
        return "needs queries and caches with rows that start at multiples of 16 bytes"
    if problem.cache_format is None:
        return None
    fmt = get_format(problem.cache_format)
    if fmt.value_dim != 512 or fmt.head_dim not in (512, 576):
        return f"needs 512 or 576 dims with 512 of value, got {fmt.name}"
    if fmt.fp8_dim and fmt.scale_block not in (0, 64, 128, fmt.head_dim):
        return f"needs scales of 64 or 128 dims, or of a row, got {fmt.name}"
    if problem.shared_lists and fmt.fp8_dim:
        return f"needs bfloat16 rows for lists of several query tokens, got {fmt.name}"
    if problem.extra_format not in (None, fmt.name):
        return f"needs an extra cache of format {fmt.name}, got {problem.extra_format}"
    if problem.extra_format and fmt.fp8_dim and fmt.scales_in not in ("row", "page"):
        return f"needs scales in the rows or pages of an extra cache, got {fmt.name}"
    return None


OPS = {
    "sparse_prefill": Op(
        ("out", "lse", "max_logits"),
        (
            Kernel(
                "sm90",
                lambda: _sm90().sparse_prefill,
                refused_by_sm90,
                converts_first=schedule.sm90_converts_first,
            ),
            Kernel("triton", lambda: _triton().sparse_prefill),
            Kernel("cpu", lambda: _cpu().sparse_prefill),
        ),
    ),
    "sparse_attention": Op(
        ("out", "lse"),
        (
            Kernel("sm90", lambda: _sm90().sparse_attention, refused_by_sm90),
            Kernel("triton", lambda: _triton().sparse_attention),
            Kernel("cpu", lambda: _cpu().sparse_attention),
        ),
    ),
    "dense_prefill": Op(
        ("out", "lse"),
        (
            Kernel("triton", lambda: _triton().dense_prefill),
            Kernel("cpu", lambda: _cpu().dense_prefill),
        ),
    ),
    "sparse_decode": Op(
        ("out", "lse"),
        (
            Kernel("sm90", lambda: _sm90().sparse_decode, refused_by_sm90, schedule.sm90_sparse),
            Kernel("triton", lambda: _triton().sparse_decode, schedule=schedule.sparse),
            Kernel("cpu", lambda: _cpu().sparse_decode),
        ),
        only_kernels=("schedule", "workspace"),
    ),
    "dense_decode": Op(
        ("out", "lse"),
        (
            Kernel("sm90", lambda: _sm90().dense_decode, refused_by_sm90, schedule.dense),
            Kernel("triton", lambda: _triton().dense_decode, schedule=schedule.dense),
            Kernel("cpu", lambda: _cpu().dense_decode),
        ),
        only_kernels=("schedule", "workspace"),
    ),
    "merge_states": Op(
        ("out", "lse"),
        (
            Kernel("triton", lambda: _triton().merge_states),
            Kernel("cpu", lambda: _cpu().merge_states),
        ),
    ),
}

"""What trains the indexer: scores of listed rows with gradients, targets, and the dense loss."""

from types import ModuleType

import torch

from sparsemla.kernels.attention import refused_by_sm90
from sparsemla.kernels.common.registry import Kernel, Op, Problem


def _sm90() -> ModuleType:
    from sparsemla.kernels.losses import sm90

    return sm90


def _triton() -> ModuleType:
    from sparsemla.kernels.losses import triton

    return triton


def _cpu() -> ModuleType:
    from sparsemla.kernels.losses import cpu

    return cpu


def _targets_refused_by_sm90(problem: Problem) -> str | None:
    """Why the Hopper kernel of targets refuses a problem, or None."""
    if problem.num_heads > 128:
        return f"takes at most 128 heads, got {problem.num_heads}"
    return refused_by_sm90(problem)


def _indexer_refused_by_sm90(problem: Problem) -> str | None:
    """Why the Hopper kernels over lists refuse an indexer, or None."""
    if problem.dtype != torch.bfloat16:
        return f"needs bfloat16 index queries, got {problem.dtype}"
    if problem.head_dim != 128 or not 16 < problem.num_heads <= 64:
        heads = f"{problem.num_heads} of {problem.head_dim}"
        return f"needs 17 to 64 index heads of 128 dims, got {heads}"
    if not problem.aligned:
        return "needs index queries and keys with rows that start at multiples of 16 bytes"
    return None


def _dense_refused_by_sm90(problem: Problem) -> str | None:
    """Why the Hopper kernels of the dense loss refuse a problem, or None."""
    if problem.dtype != torch.bfloat16:
        return f"needs bfloat16 queries, got {problem.dtype}"
    if problem.head_dim != 128:
        return f"needs index heads of 128 dims, got {problem.head_dim}"
    if not problem.aligned:
        return "needs queries and keys with rows that start at multiples of 16 bytes"
    return None


GRADIENTS = ("diq", "dweights", "dik")

OPS = {
    "selected_scores": Op(
        ("out",),
        (
            Kernel("sm90", lambda: _sm90().selected_scores, _indexer_refused_by_sm90),
            Kernel("triton", lambda: _triton().selected_scores),
            Kernel("cpu", lambda: _cpu().selected_scores),
        ),
    ),
    "selected_scores_backward": Op(
        GRADIENTS,
        (
            Kernel("sm90", lambda: _sm90().selected_scores_backward, _indexer_refused_by_sm90),
            Kernel("triton", lambda: _triton().selected_scores_backward),
            Kernel("cpu", lambda: _cpu().selected_scores_backward),
        ),
    ),
    "attention_target": Op(
        ("out",),
        (
            Kernel("sm90", lambda: _sm90().attention_target, _targets_refused_by_sm90),
            Kernel("triton", lambda: _triton().attention_target),
            Kernel("cpu", lambda: _cpu().attention_target),
        ),
    ),
    "dense_index_loss": Op(
        ("loss",),
        (
            Kernel("sm90", lambda: _sm90().dense_index_loss, _dense_refused_by_sm90),
            Kernel("triton", lambda: _triton().dense_index_loss),
            Kernel("cpu", lambda: _cpu().dense_index_loss),
        ),
    ),
    "dense_index_gradients": Op(
        ("loss", *GRADIENTS),
        (
            Kernel("sm90", lambda: _sm90().dense_index_gradients, _dense_refused_by_sm90),
            Kernel("triton", lambda: _triton().dense_index_gradients),
            Kernel("cpu", lambda: _cpu().dense_index_gradients),
        ),
    ),
}

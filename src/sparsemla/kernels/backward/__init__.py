"""The gradients of attention over selected rows."""

from types import ModuleType

from sparsemla.kernels.attention import refused_by_sm90
from sparsemla.kernels.common.registry import Kernel, Op, Problem


def _sm90() -> ModuleType:
    from sparsemla.kernels.backward import sm90

    return sm90


def _triton() -> ModuleType:
    from sparsemla.kernels.backward import triton

    return triton


def _cpu() -> ModuleType:
    from sparsemla.kernels.backward import cpu

    return cpu


def _refused_by_sm90(problem: Problem) -> str | None:
    """Why the Hopper kernels refuse a problem, or None."""
    if problem.num_heads > 128:
        return f"takes at most 128 heads of the tokens of a list, got {problem.num_heads}"
    return refused_by_sm90(problem)


OPS = {
    "sparse_attention_backward": Op(
        ("dq", "dkv", "d_sink"),
        (
            Kernel("sm90", lambda: _sm90().sparse_attention_backward, _refused_by_sm90),
            Kernel("triton", lambda: _triton().sparse_attention_backward),
            Kernel("cpu", lambda: _cpu().sparse_attention_backward),
        ),
    ),
}

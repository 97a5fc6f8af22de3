"""GEMMs per head, with W_UK and W_UV, and per group of heads, with DeepSeek-V4's W_O_A."""

from types import ModuleType

from sparsemla.kernels.common.registry import Kernel, Op


def _sm90() -> ModuleType:
    from sparsemla.kernels.projection import sm90

    return sm90


def _sm90_groups() -> ModuleType:
    from sparsemla.kernels.projection import sm90_groups

    return sm90_groups


def _triton() -> ModuleType:
    from sparsemla.kernels.projection import triton

    return triton


def _cpu() -> ModuleType:
    from sparsemla.kernels.projection import cpu

    return cpu


OPS = {
    "project_heads": Op(
        ("out",),
        (
            Kernel("sm90", lambda: _sm90().project_heads),
            Kernel("triton", lambda: _triton().project_heads),
            Kernel("cpu", lambda: _cpu().project_heads),
        ),
        only_kernels=("batch_invariant", "workspace"),
    ),
    "project_groups": Op(
        ("out",),
        (
            Kernel("sm90", lambda: _sm90_groups().project_groups),
            Kernel("triton", lambda: _triton().project_groups),
            Kernel("cpu", lambda: _cpu().project_groups),
        ),
        only_kernels=("workspace",),
    ),
}

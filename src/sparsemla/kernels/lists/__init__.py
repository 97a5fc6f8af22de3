"""Lists of rows that query tokens share."""

from types import ModuleType

from sparsemla.kernels.common.registry import Kernel, Op


def _triton() -> ModuleType:
    from sparsemla.kernels.lists import triton

    return triton


def _cpu() -> ModuleType:
    from sparsemla.kernels.lists import cpu

    return cpu


OPS = {
    "share_lists": Op(
        ("out", "lengths", "members"),
        (
            Kernel("triton", lambda: _triton().share_lists),
            Kernel("cpu", lambda: _cpu().share_lists),
        ),
    ),
}

"""Windows of tokens, pooled into cache rows."""

from types import ModuleType

from sparsemla.kernels.common.registry import Kernel, Op


def _triton() -> ModuleType:
    from sparsemla.kernels.pool import triton

    return triton


def _cpu() -> ModuleType:
    from sparsemla.kernels.pool import cpu

    return cpu


OPS = {
    "pool_windows": Op(
        ("kv_out",),
        (
            Kernel("triton", lambda: _triton().pool_windows),
            Kernel("cpu", lambda: _cpu().pool_windows),
        ),
    ),
}

"""Windows of tokens, pooled into cache rows."""

from typing import TYPE_CHECKING

from sparsemla.kernels.common.table import Kernel, LazyModule, Op
from sparsemla.kernels.pool.arguments import PoolWindows

if TYPE_CHECKING:
    from sparsemla.kernels.pool import cpu, triton
else:
    cpu, triton = (LazyModule(f"{__name__}.{name}") for name in ("cpu", "triton"))

POOL_WINDOWS = Op(
    "pool_windows",
    PoolWindows,
    (
        Kernel("triton", lambda: triton.pool_windows),
        Kernel("cpu", lambda: cpu.pool_windows),
    ),
    outputs=("kv_out",),
    mutates=("state", "cache"),
)

OPS = {POOL_WINDOWS.name: POOL_WINDOWS}

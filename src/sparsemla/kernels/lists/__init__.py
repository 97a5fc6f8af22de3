"""Lists of selected rows: those that query tokens share, and a rank's own."""

from typing import TYPE_CHECKING

from sparsemla.kernels.common.table import Kernel, LazyModule, Op
from sparsemla.kernels.lists.arguments import OwnPositions, ShareLists

if TYPE_CHECKING:
    from sparsemla.kernels.lists import cpu, triton
else:
    cpu, triton = (LazyModule(f"{__name__}.{name}") for name in ("cpu", "triton"))

SHARE_LISTS = Op(
    "share_lists",
    ShareLists,
    (
        Kernel("triton", lambda: triton.share_lists),
        Kernel("cpu", lambda: cpu.share_lists),
    ),
    outputs=("out", "lengths", "token_mask"),
)

OWN_POSITIONS = Op(
    "own_positions",
    OwnPositions,
    (
        Kernel("triton", lambda: triton.own_positions),
        Kernel("cpu", lambda: cpu.own_positions),
    ),
    outputs=("out", "counts"),
)

OPS = {op.name: op for op in (SHARE_LISTS, OWN_POSITIONS)}

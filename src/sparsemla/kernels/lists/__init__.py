"""Lists of rows that query tokens share."""

from typing import TYPE_CHECKING

from sparsemla.kernels.common.table import Kernel, LazyModule, Op
from sparsemla.kernels.lists.arguments import ShareLists

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

OPS = {SHARE_LISTS.name: SHARE_LISTS}

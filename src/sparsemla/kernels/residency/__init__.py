"""Rows of a large cache that are kept in fast memory."""

from typing import TYPE_CHECKING

from sparsemla.kernels.common.table import Kernel, LazyModule, Op
from sparsemla.kernels.residency.arguments import FetchRows, ForgetSeats, ResolveRows

if TYPE_CHECKING:
    from sparsemla.kernels.residency import cpu, triton
else:
    cpu, triton = (LazyModule(f"{__name__}.{name}") for name in ("cpu", "triton"))

RESOLVE_ROWS = Op(
    "resolve_rows",
    ResolveRows,
    (
        Kernel("triton", lambda: triton.resolve_rows),
        Kernel("cpu", lambda: cpu.resolve_rows),
    ),
    outputs=("out", "counts", "miss_slots", "miss_rows", "miss_counts", "new_counts"),
    mutates=("table", "workspace", "stats"),
)

FETCH_ROWS = Op(
    "fetch_rows",
    FetchRows,
    (
        Kernel("triton", lambda: triton.fetch_rows),
        Kernel("cpu", lambda: cpu.fetch_rows),
    ),
    # Other rows of the target keep their values, so the definition writes it itself.
    mutates=("target",),
)

FORGET_SEATS = Op(
    "forget_seats",
    ForgetSeats,
    (
        Kernel("triton", lambda: triton.forget_seats),
        Kernel("cpu", lambda: cpu.forget_seats),
    ),
    mutates=("table",),
)

OPS = {op.name: op for op in (RESOLVE_ROWS, FETCH_ROWS, FORGET_SEATS)}

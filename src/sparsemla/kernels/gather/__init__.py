"""Slots of keys, and workspaces of dequantised rows."""

from typing import TYPE_CHECKING

from sparsemla.kernels.common.table import Kernel, LazyModule, Op
from sparsemla.kernels.gather.arguments import EntrySlots, GatherDequant, ToSlots, VisibleSlots

if TYPE_CHECKING:
    from sparsemla.kernels.gather import cpu, triton
else:
    cpu, triton = (LazyModule(f"{__name__}.{name}") for name in ("cpu", "triton"))

TO_SLOTS = Op(
    "to_slots",
    ToSlots,
    (
        Kernel("triton", lambda: triton.to_slots),
        Kernel("cpu", lambda: cpu.to_slots),
    ),
    outputs=("out",),
)

ENTRY_SLOTS = Op(
    "entry_slots",
    EntrySlots,
    (
        Kernel("triton", lambda: triton.entry_slots),
        Kernel("cpu", lambda: cpu.entry_slots),
    ),
    outputs=("out",),
)

VISIBLE_SLOTS = Op(
    "visible_slots",
    VisibleSlots,
    (
        Kernel("triton", lambda: triton.visible_slots),
        Kernel("cpu", lambda: cpu.visible_slots),
    ),
    outputs=("out", "lengths"),
)

GATHER_DEQUANT = Op(
    "gather_dequant",
    GatherDequant,
    (
        Kernel("triton", lambda: triton.gather_dequant),
        Kernel("cpu", lambda: cpu.gather_dequant),
    ),
    # Rows that no request covers keep their values, so the definition writes it itself.
    mutates=("out",),
)

OPS = {op.name: op for op in (TO_SLOTS, ENTRY_SLOTS, VISIBLE_SLOTS, GATHER_DEQUANT)}

"""Slots of keys, and workspaces of dequantised rows."""

from types import ModuleType

from sparsemla.kernels.common.registry import Kernel, Op


def _triton() -> ModuleType:
    from sparsemla.kernels.gather import triton

    return triton


def _cpu() -> ModuleType:
    from sparsemla.kernels.gather import cpu

    return cpu


OPS = {
    "to_slots": Op(
        ("out",),
        (
            Kernel("triton", lambda: _triton().to_slots),
            Kernel("cpu", lambda: _cpu().to_slots),
        ),
    ),
    "entry_slots": Op(
        ("out",),
        (
            Kernel("triton", lambda: _triton().entry_slots),
            Kernel("cpu", lambda: _cpu().entry_slots),
        ),
    ),
    "visible_slots": Op(
        ("out", "lengths"),
        (
            Kernel("triton", lambda: _triton().visible_slots),
            Kernel("cpu", lambda: _cpu().visible_slots),
        ),
    ),
    "gather_dequant": Op(
        (),
        (
            Kernel("triton", lambda: _triton().gather_dequant),
            Kernel("cpu", lambda: _cpu().gather_dequant),
        ),
    ),
}

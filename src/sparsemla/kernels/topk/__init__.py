"""Exact, deterministic top-k."""

from typing import TYPE_CHECKING

from sparsemla.kernels.common.table import Kernel, LazyModule, Op
from sparsemla.kernels.topk.arguments import MergeTopk, SelectTopk
from sparsemla.kernels.topk.schedule import MERGE_BLOCK, refuse_registers

if TYPE_CHECKING:
    from sparsemla.kernels.topk import cpu, triton
    from sparsemla.kernels.topk.sm90 import candidates, merge, registers
else:
    cpu, triton = (LazyModule(f"{__name__}.{name}") for name in ("cpu", "triton"))
    candidates, merge, registers = (
        LazyModule(f"{__name__}.sm90.{name}") for name in ("candidates", "merge", "registers")
    )

SELECT_TOPK = Op(
    "select_topk",
    SelectTopk,
    (
        Kernel("sm90.registers", lambda: registers.select_topk, refuse_registers),
        Kernel("sm90.candidates", lambda: candidates.select_topk),
        Kernel("triton", lambda: triton.select_topk),
        Kernel("cpu", lambda: cpu.select_topk),
    ),
    outputs=("out",),
)


def _needs_small_k(call: MergeTopk) -> str | None:
    if call.topk > MERGE_BLOCK // 4:
        return f"takes topk up to {MERGE_BLOCK // 4}, got {call.topk}"
    return None


def _refuse_groups(call: MergeTopk) -> str | None:
    """Why Hopper's kernel, which merges many parts in groups, does not take a call, or None."""
    width = call.values.shape[2]
    if width > MERGE_BLOCK // 2:
        return f"takes parts of up to {MERGE_BLOCK // 2} candidates, got {width}"
    return _needs_small_k(call)


def _refuse_block(call: MergeTopk) -> str | None:
    """Why the portable kernel, which holds all parts at once, does not take a call, or None."""
    candidates_of_row = call.values.shape[0] * call.values.shape[2]
    if candidates_of_row > MERGE_BLOCK:
        return f"takes up to {MERGE_BLOCK} candidates of a row, got {candidates_of_row}"
    return _needs_small_k(call)


MERGE_TOPK = Op(
    "merge_topk",
    MergeTopk,
    (
        Kernel("sm90", lambda: merge.merge_topk, _refuse_groups),
        Kernel("triton.registers", lambda: triton.merge_topk, _refuse_block),
        Kernel("triton.sorted", lambda: triton.merge_sorted),
        Kernel("cpu", lambda: cpu.merge_topk),
    ),
    outputs=("out",),
)

OPS = {op.name: op for op in (SELECT_TOPK, MERGE_TOPK)}

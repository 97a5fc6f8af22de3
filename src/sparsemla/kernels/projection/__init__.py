"""GEMMs per head, with W_UK and W_UV, and per group of heads, with DeepSeek-V4's W_O_A."""

from typing import TYPE_CHECKING

from sparsemla.cache import aligned
from sparsemla.kernels.common.device import describe
from sparsemla.kernels.common.table import Kernel, LazyModule, Op
from sparsemla.kernels.projection.arguments import (
    FEW_MERGED_ROWS,
    FEW_ROWS,
    ProjectGroups,
    ProjectHeads,
)
from sparsemla.weights import HeadWeight

if TYPE_CHECKING:
    from sparsemla.kernels.projection import cpu, sm80, sm90, sm90_groups, triton
else:
    cpu, sm80, sm90, sm90_groups, triton = (
        LazyModule(f"{__name__}.{name}")
        for name in ("cpu", "sm80", "sm90", "sm90_groups", "triton")
    )


UNALIGNED = "needs vectors and weights with rows that start at multiples of 16 bytes"


def _refuse_weight(weight: HeadWeight) -> str | None:
    """Why the kernels in Gluon refuse an e4m3 weight: all of their tiles are whole."""
    if weight.scale is None:
        return f"needs e4m3 weights, got {weight.data.dtype}"
    rows, columns = weight.scale_block
    if rows % 128 or columns != 128:
        return f"needs scales of 128 inputs and 128 * n outputs, got blocks of {rows} x {columns}"
    _, outputs, inputs = weight.data.shape
    if outputs % 128 or inputs % 128 or outputs * inputs == 0:
        return f"needs multiples of 128 outputs and inputs, got {outputs} and {inputs}"
    return None


def _refuse_blocks(call: ProjectHeads) -> str | None:
    x, weight = call.x, call.weight
    rows, few = x.shape[-3] * x.shape[-2], FEW_ROWS if call.lses is None else FEW_MERGED_ROWS
    if rows <= few:
        return f"takes more than {few} tokens times heads, got {rows}"
    if call.batch_invariant:
        return "needs batch_invariant=False, as few tokens get another kernel"
    refused = _refuse_weight(weight)
    if refused is not None:
        return refused
    if x.shape[-1] > 512:
        return f"takes up to 512 inputs, which fit shared memory, got {x.shape[-1]}"
    # Parts are merged into the workspace first.
    if not aligned(x if call.lses is None else call.workspace, weight.data):
        return UNALIGNED
    return None


OVERLAPS = "needs a GPU before sm_90: from there on, portable Triton overlaps launches"
AMPERE_ROWS = 8192
"""Tokens times heads up to which the sm80 kernel is faster than the portable one; of up to 128
inputs without native e4m3 it always is."""
AMPERE_TOKENS = 16
"""The same for the tokens of groups, with native e4m3."""


def _refuse_heads_by_sm80(call: ProjectHeads) -> str | None:
    x, weight = call.x, call.weight
    device = describe(x.device)
    if device.overlaps:
        return OVERLAPS
    _, outputs, inputs = weight.data.shape
    if weight.scale is not None:
        refused = _refuse_weight(weight)
        if refused is not None:
            return refused
    elif outputs % 128 or inputs % 64 or outputs * inputs == 0:
        return f"needs multiples of 128 outputs and 64 inputs, got {outputs} and {inputs}"
    if inputs > 512:
        return f"takes up to 512 inputs, got {inputs}"
    rows = x.shape[-3] * x.shape[-2]
    if rows > AMPERE_ROWS and not call.batch_invariant:
        converts = weight.scale is not None and not device.has_fp8
        if inputs > 128 or not converts:
            return f"takes up to {AMPERE_ROWS} tokens times heads, got {rows}"
    # Parts are merged into the workspace first.
    if not aligned(x if call.lses is None else call.workspace, weight.data):
        return UNALIGNED
    return None


PROJECT_HEADS = Op(
    "project_heads",
    ProjectHeads,
    (
        Kernel("sm90.blocks", lambda: sm90.project_heads, _refuse_blocks),
        Kernel("sm80", lambda: sm80.project_heads, _refuse_heads_by_sm80),
        Kernel("triton", lambda: triton.project_heads),
        Kernel("cpu", lambda: cpu.project_heads),
    ),
    outputs=("out",),
    mutates=("workspace",),
)


def _refuse_groups(call: ProjectGroups) -> str | None:
    weight = call.weight
    refused = _refuse_weight(weight)
    if refused is not None:
        return refused
    group, row, _ = weight.data.stride()
    if group != weight.data.shape[1] * row:
        return "needs the matrices of all groups at the distance of a matrix, for TMA"
    if not aligned(weight.data):
        return "needs weights with rows that start at multiples of 16 bytes"
    return None


def _refuse_groups_by_sm80(call: ProjectGroups) -> str | None:
    device = describe(call.x.device)
    if device.overlaps:
        return OVERLAPS
    refused = _refuse_weight(call.weight)
    if refused is not None:
        return refused
    num_tokens = call.x.shape[-3]
    if num_tokens > AMPERE_TOKENS and device.has_fp8:
        return f"takes up to {AMPERE_TOKENS} tokens beside native e4m3, got {num_tokens}"
    return None if aligned(call.weight.data) else UNALIGNED


PROJECT_GROUPS = Op(
    "project_groups",
    ProjectGroups,
    (
        Kernel("sm90", lambda: sm90_groups.project_groups, _refuse_groups),
        Kernel("sm80", lambda: sm80.project_groups, _refuse_groups_by_sm80),
        Kernel("triton", lambda: triton.project_groups),
        Kernel("cpu", lambda: cpu.project_groups),
    ),
    outputs=("out",),
    mutates=("workspace",),
)

OPS = {op.name: op for op in (PROJECT_HEADS, PROJECT_GROUPS)}

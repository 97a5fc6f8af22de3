"""GEMMs per head or group with Ampere's instructions, for any NVIDIA GPU from sm_80 on.

Outputs are on the M side of mma.sync and tokens on N, so that few tokens fill an instruction. Rows
of a tile of weights have 128 bytes. ldmatrix loads e4m3 codes as the MMA takes them, and they
become float16 over 256 in registers, so that a converted weight never passes shared memory. A
*step* has 128 inputs, which share a scale, or 64 of bfloat16 weights. In a tile of several steps,
groups of warps take one each, and their sums are added at last.

``project_heads`` rounds its inputs to e4m3 values, which fit float16 and pass through shared
memory. If tokens are few, all tiles of a CTA are under way before its first inputs are there::

    cp.async     weights 0, 1, 2, 3
    loads        inputs 0, 1, 2, 3
    other units                     | round 0 | scale, round 1 | scale, round 2 | ...
    MMA                             |         | 0              | 1              | 2

Many tokens share a CTA's rounded inputs for all outputs, if a step holds them. Inputs of bfloat16
weights arrive by cp.async. ``project_groups`` has thousands of inputs, which an earlier kernel has
encoded; tiles of both operands pass through a pipeline.

Triton places the barriers of the CTA: one after the copies of a tile have arrived, or its rounded
inputs are stored, and one before its memory is written again.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.fp8 import HALVES_OF_FOUR
from sparsemla.kernels.common.gluon import async_load
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.projection.arguments import ProjectGroups, ProjectHeads
from sparsemla.kernels.projection.triton import (
    INVERSE,
    INVERSE_REST,
    inputs_of_groups,
    merge_parts,
)
from sparsemla.weights import HeadWeight

# Shared memory: rows of 128 bytes of codes or bfloat16 values, and of 128 rounded inputs.
CODES = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [2, 1, 0]))
VALUES = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
ROUNDED = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [2, 1, 0]))


class Tiling(NamedTuple):
    """Compile-time constants.

    Args:
        outputs: outputs of a tile of weights.
        tokens: tokens of a CTA.
        step: inputs of a row of a tile, which share a scale.
        split: steps of a tile; as many groups of warps take one each.
        tiles: tiles of a CTA's outputs.
        blocks: times ``outputs`` of a CTA; several share the inputs of a single tile.
        stages: tiles of weights in shared memory.
        ahead: tiles whose inputs are loaded ahead of the first MMA.
        warps: warps of a CTA.
        warps_n: of the warps of a step, those along tokens.
    """

    outputs: int
    tokens: int
    step: int
    split: int
    tiles: int
    blocks: int
    stages: int
    ahead: int
    warps: int
    warps_n: int


class Heads(NamedTuple):
    """Vectors ``[T, H, K]``, matrices ``[H, N, K]``, their scales and outputs ``[T, H, N]``."""

    x: object
    x_token: int
    x_head: int
    weight: object
    weight_head: int
    weight_row: int
    scale: object
    scale_head: int
    scale_row: int
    out: object
    out_token: int
    out_head: int


@triton.constexpr_function
def rows_layout(width, size, warps):
    """Rows ``[split, rows, width]``, 16 bytes a thread, of elements of ``size`` bytes."""
    lanes = width * size // 16
    return gl.BlockedLayout([1, 1, 16 // size], [1, 32 // lanes, lanes], [1, warps, 1], [2, 1, 0])


@triton.constexpr_function
def inputs_layout(split, warps):
    """128 bfloat16 inputs ``[split, tokens, 128]`` in 16 lanes."""
    return gl.BlockedLayout([1, 1, 8], [1, 2, 16], [split, warps // split, 1], [2, 1, 0])


@triton.constexpr_function
def acc_layout(tiling):
    rows = tiling.warps // tiling.split // tiling.warps_n
    return gl.NVMMADistributedLayout([2, 0], [tiling.split, rows, tiling.warps_n], [1, 16, 8])


@triton.constexpr_function
def store_layout(outputs, warps):
    """Eight neighbouring outputs of a token in a thread."""
    lanes = min(outputs // 8, 32)
    return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, warps], [0, 1])


@gluon.jit
def rows_of(
    base, first, row_stride, tile, T: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr
):
    """Pointers to the rows from ``first`` on, ``[split, COUNT, step]``, and numbers of the rows."""
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    row = first + gl.arange(0, COUNT, ROW)
    part = gl.arange(0, T.split, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    k = gl.arange(0, T.step, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    at = (row.to(gl.int64) * row_stride)[None, :, None] + k[None, None, :]
    return base + at + ((tile * T.split + part) * T.step)[:, None, None], row


@gluon.jit
def load_inputs(x, x_token, first, num_tokens, tile, T: gl.constexpr):
    """bfloat16 inputs of a tile; zeros for tokens that do not exist."""
    LAYOUT: gl.constexpr = inputs_layout(T.split, T.warps)
    at, token = rows_of(x, first, x_token, tile, T, T.tokens, LAYOUT)
    return gl.load(at, mask=(token < num_tokens)[None, :, None], other=0.0)


@gluon.jit
def round_inputs(x):
    """float16 of inputs rounded to e4m3 over their scales, and the scales ``[split, tokens]``.

    The results equal the portable kernel's, whose ``_scale_down`` and ``round_to_e4m3`` explain it.
    """
    x = x.to(gl.float32)
    amax = gl.maximum(gl.max(gl.abs(x), 2), 1e-4)
    scale = gl.fma(amax, gl.full_like(amax, INVERSE), amax * INVERSE_REST)
    inverse = 1.0 / scale
    rest = gl.fma(-scale, inverse, gl.full_like(scale, 1.0)) * inverse
    _, wide = gl.broadcast(x, inverse[:, :, None])
    x = gl.fma(x, wide, x * rest[:, :, None])
    binade = (x.to(gl.int32, bitcast=True) & 0x7F800000).to(gl.float32, bitcast=True)
    binade = gl.maximum(binade, 0.015625)
    shift = gl.full_like(x, 1572864.0)
    return gl.fma(-binade, shift, gl.fma(binade, shift, x)).to(gl.float16), scale


@gluon.jit
def copy_weights(weight, row_stride, row, tile, to, T: gl.constexpr):
    """Start to copy a tile of weights."""
    SIZE: gl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
    LAYOUT: gl.constexpr = rows_layout(T.step, SIZE, T.warps)
    at, _ = rows_of(weight, row, row_stride, tile, T, T.outputs, LAYOUT)
    async_load(to, at)


@gluon.jit
def copy_inputs(x, x_token, first, num_tokens, tile, to, T: gl.constexpr):
    """Start to copy the inputs of a tile, bfloat16 or codes."""
    SIZE: gl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    LAYOUT: gl.constexpr = rows_layout(T.step, SIZE, T.warps)
    at, token = rows_of(x, first, x_token, tile, T, T.tokens, LAYOUT)
    async_load(to, at, mask=(token < num_tokens)[None, :, None])


@gluon.jit
def as_operand(x):
    """float16 over 256 of e4m3 codes."""
    if x.dtype == gl.uint8:
        x = gl.inline_asm_elementwise(
            HALVES_OF_FOUR, "=&r,=&r,r", [x], dtype=gl.float16, is_pure=True, pack=4
        )
    return x


@gluon.jit
def multiply(weights, inputs, total, ACC: gl.constexpr):
    """Add ``weights @ inputs^T`` of a tile, ``[split, outputs, tokens]``."""
    WIDTH: gl.constexpr = 32 // weights.dtype.primitive_bitwidth
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, WIDTH)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, WIDTH)
    PARTS: gl.constexpr = weights.shape[2] // 32
    for part in gl.static_range(PARTS):
        a = weights.slice(part * 32, 32, dim=2).load(A)
        b = inputs.slice(part * 32, 32, dim=2).permute((0, 2, 1)).load(B)
        total = mma_v2(as_operand(a), as_operand(b), total)
    return total


@gluon.jit
def store(out, out_token, first, num_tokens, row, total, T: gl.constexpr):
    """Store a tile of outputs, the sum of its groups of warps."""
    STORE: gl.constexpr = store_layout(T.outputs, T.warps)
    y = gl.convert_layout(gl.sum(total, 0).to(gl.bfloat16), STORE)
    token = first + gl.arange(0, T.tokens, gl.SliceLayout(0, STORE))
    n = row + gl.arange(0, T.outputs, gl.SliceLayout(1, STORE))
    at = out + token.to(gl.int64)[None, :] * out_token
    gl.store(at + n[:, None], y, mask=(token < num_tokens)[None, :])


@gluon.jit
def scales_of_weights(scale, tile, T: gl.constexpr, ACC: gl.constexpr):
    """Scales of a tile's steps, ``[split, 1, 1]``."""
    part = gl.arange(0, T.split, gl.SliceLayout(1, gl.SliceLayout(2, ACC)))
    return gl.load(scale + tile * T.split + part)[:, None, None]


@gluon.jit(do_not_specialize=["num_tokens"])
def _project(call, num_tokens, num_heads, N: gl.constexpr, SCALE_N: gl.constexpr, T: gl.constexpr):
    """Up to ``T.tokens`` tokens of a head, and ``T.blocks`` tiles of its outputs."""
    FP8: gl.constexpr = call.scale is not None
    ACC: gl.constexpr = acc_layout(T)
    N_TILE: gl.constexpr = T.outputs
    TOKENS: gl.constexpr = T.tokens
    STEP: gl.constexpr = T.step
    SPLIT: gl.constexpr = T.split
    TILES: gl.constexpr = T.tiles
    STAGES: gl.constexpr = T.stages
    AHEAD: gl.constexpr = T.ahead
    ALL: gl.constexpr = TILES * T.blocks
    EARLY: gl.constexpr = ALL if STAGES == ALL else STAGES - 1
    BLOCKS: gl.constexpr = N // (N_TILE * T.blocks)
    program = gl.program_id(0)
    head = (program // BLOCKS % num_heads).to(gl.int64)
    first = program // BLOCKS // num_heads * TOKENS
    row = program % BLOCKS * (N_TILE * T.blocks)
    x = call.x + head * call.x_head
    weight = call.weight + head * call.weight_head
    out = call.out + head * call.out_head

    weights = ()
    inputs = ()
    for _ in gl.static_range(STAGES):
        if FP8:
            weights = weights + (gl.allocate_shared_memory(gl.uint8, [SPLIT, N_TILE, STEP], CODES),)
        else:
            tile = gl.allocate_shared_memory(gl.bfloat16, [SPLIT, N_TILE, STEP], VALUES)
            weights = weights + (tile,)
            tile = gl.allocate_shared_memory(gl.bfloat16, [SPLIT, TOKENS, STEP], VALUES)
            inputs = inputs + (tile,)
    for i in gl.static_range(EARLY):
        to = row + i // TILES * N_TILE
        copy_weights(weight, call.weight_row, to, i % TILES, weights[i], T)
        if not FP8:
            copy_inputs(x, call.x_token, first, num_tokens, i % TILES, inputs[i], T)
        async_copy.commit_group()
    loaded = ()
    if FP8:
        for _ in gl.static_range(min(TILES, 2)):
            tile = gl.allocate_shared_memory(gl.float16, [SPLIT, TOKENS, STEP], ROUNDED)
            inputs = inputs + (tile,)
        for i in gl.static_range(AHEAD):
            loaded = loaded + (load_inputs(x, call.x_token, first, num_tokens, i, T),)

    total = gl.zeros([SPLIT, N_TILE, TOKENS], gl.float32, ACC)
    b_scale = gl.zeros([SPLIT, TOKENS], gl.float32, gl.SliceLayout(1, ACC))
    for i in gl.static_range(ALL):
        block = row + i // TILES * N_TILE
        if i + EARLY < ALL:
            to = row + (i + EARLY) // TILES * N_TILE
            ahead = weights[(i + EARLY) % STAGES]
            copy_weights(weight, call.weight_row, to, (i + EARLY) % TILES, ahead, T)
            if not FP8:
                ahead = inputs[(i + EARLY) % STAGES]
                copy_inputs(x, call.x_token, first, num_tokens, (i + EARLY) % TILES, ahead, T)
            async_copy.commit_group()
        if FP8:
            if i < TILES:
                if i + AHEAD < TILES:
                    some = load_inputs(x, call.x_token, first, num_tokens, i + AHEAD, T)
                    loaded = loaded + (some,)
                some, scales = round_inputs(loaded[i])
                inputs[i % 2].store(some)
                b_scale = gl.convert_layout(scales, gl.SliceLayout(1, ACC))
            at = call.scale + head * call.scale_head + block // SCALE_N * call.scale_row
            a_scale = scales_of_weights(at, i % TILES, T, ACC) * 256.0
            async_copy.wait_group(min(EARLY, ALL - 1 - i))
            part = gl.zeros([SPLIT, N_TILE, TOKENS], gl.float32, ACC)
            part = multiply(weights[i % STAGES], inputs[i % TILES % 2], part, ACC)
            total += part * (b_scale[:, None, :] * a_scale)
        else:
            async_copy.wait_group(min(EARLY, ALL - 1 - i))
            total = multiply(weights[i % STAGES], inputs[i % STAGES], total, ACC)
        if i % TILES == TILES - 1:
            store(out, call.out_token, first, num_tokens, block, total, T)
            total = gl.zeros([SPLIT, N_TILE, TOKENS], gl.float32, ACC)


class Groups(NamedTuple):
    """Codes ``[T, G, K]``, their scales ``[G * steps, T]``, and codes ``[G, N, K]`` of matrices."""

    inputs: object
    inputs_token: int
    input_scales: object
    weight: object
    weight_group: int
    weight_row: int
    scale: object
    scale_group: int
    scale_row: int
    out: object
    out_token: int
    out_group: int


@gluon.jit(do_not_specialize=["num_tokens"])
def _project_groups(
    call, num_tokens, num_groups, N: gl.constexpr, SCALE_N: gl.constexpr, T: gl.constexpr
):
    """Up to ``T.tokens`` tokens of a group, and a tile of its outputs."""
    ACC: gl.constexpr = acc_layout(T)
    N_TILE: gl.constexpr = T.outputs
    TOKENS: gl.constexpr = T.tokens
    STEP: gl.constexpr = T.step
    SPLIT: gl.constexpr = T.split
    TILES: gl.constexpr = T.tiles
    STAGES: gl.constexpr = T.stages
    BLOCKS: gl.constexpr = N // N_TILE
    program = gl.program_id(0)
    group = (program // BLOCKS % num_groups).to(gl.int64)
    first = program // BLOCKS // num_groups * TOKENS
    row = program % BLOCKS * N_TILE
    x = call.inputs + group * (TILES * SPLIT * STEP)
    weight = call.weight + group * call.weight_group
    weights = gl.allocate_shared_memory(gl.uint8, [STAGES, SPLIT, N_TILE, STEP], CODES)
    inputs = gl.allocate_shared_memory(gl.uint8, [STAGES, SPLIT, TOKENS, STEP], CODES)
    for i in gl.static_range(STAGES - 1):
        if i < TILES:
            copy_weights(weight, call.weight_row, row, i, weights.index(i), T)
            copy_inputs(x, call.inputs_token, first, num_tokens, i, inputs.index(i), T)
        async_copy.commit_group()

    token = first + gl.arange(0, TOKENS, gl.SliceLayout(0, gl.SliceLayout(1, ACC)))[None, :]
    part = gl.arange(0, SPLIT, gl.SliceLayout(1, gl.SliceLayout(1, ACC)))[:, None]
    total = gl.zeros([SPLIT, N_TILE, TOKENS], gl.float32, ACC)
    for i in range(TILES):
        at = call.scale + group * call.scale_group + row // SCALE_N * call.scale_row
        a_scale = scales_of_weights(at, i, T, ACC) * 65536.0  # both operands are over 256
        at = call.input_scales + ((group * TILES + i) * SPLIT + part) * num_tokens
        b_scale = gl.load(at + token, mask=token < num_tokens, other=0.0)
        async_copy.wait_group(STAGES - 2)
        ahead = i + STAGES - 1
        if ahead < TILES:
            to = ahead % STAGES
            copy_weights(weight, call.weight_row, row, ahead, weights.index(to), T)
            copy_inputs(x, call.inputs_token, first, num_tokens, ahead, inputs.index(to), T)
        async_copy.commit_group()
        sums = gl.zeros([SPLIT, N_TILE, TOKENS], gl.float32, ACC)
        sums = multiply(weights.index(i % STAGES), inputs.index(i % STAGES), sums, ACC)
        total += sums * (b_scale[:, None, :] * a_scale)
    async_copy.wait_group(0)
    store(call.out + group * call.out_group, call.out_token, first, num_tokens, row, total, T)


def tiling_of_heads(
    num_tokens: int, weight: HeadWeight, batch_invariant: bool, processors: int
) -> Tiling:
    """The compile-time constants for a number of tokens; measured on an H100, as on sm_80.

    With ``batch_invariant``, they do not decide in which order products are added.
    """
    num_heads, outputs, inputs = weight.data.shape
    tokens = min(max(8, next_power_of_2(num_tokens)), 64)
    if weight.scale is None:
        tiles = inputs // 64
        return Tiling(64, tokens, 64, 1, tiles, 1, min(tiles, 4 if tokens < 64 else 3), 0, 4, 1)
    steps = inputs // 128
    if tokens == 8 and steps == 4 and not batch_invariant:
        return Tiling(16, tokens, 128, 4, 1, 1, 1, 1, 4, 1)
    if tokens <= 32:
        return Tiling(64, tokens, 128, 1, steps, 1, steps, 1 if tokens == 32 else steps, 4, 1)
    if steps > 1:
        return Tiling(128, 32, 128, 1, steps, 1, 2, 0, 4, 1)
    blocks = 4 if outputs % 512 == 0 else 1
    while blocks > 1 and cdiv(num_tokens, 32) * num_heads * outputs < 256 * blocks * processors:
        blocks //= 2
    return Tiling(128, 32, 128, 1, 1, blocks, min(blocks, 2), 1, 4, 1)


def project_heads(call: ProjectHeads) -> None:
    x, weight, lses, out = call.x, call.weight, call.lses, call.out
    num_tokens, num_heads, _ = x.shape[-3:]
    if num_tokens * num_heads == 0:
        return
    if lses is not None:
        x = merge_parts(call, lses)
    data, scale = weight.data, weight.scale
    outputs = data.shape[1]
    processors = num_multiprocessors(x.device)
    tiling = tiling_of_heads(num_tokens, weight, call.batch_invariant, processors)
    heads = Heads(
        x,
        x.stride(-3),
        x.stride(-2),
        data if scale is None else data.view(torch.uint8),
        data.stride(0),
        data.stride(1),
        scale,
        0 if scale is None else scale.stride(0),
        0 if scale is None else scale.stride(1),
        out,
        out.stride(0),
        out.stride(1),
    )
    programs = cdiv(num_tokens, tiling.tokens) * num_heads
    programs *= outputs // (tiling.outputs * tiling.blocks)
    _project[(programs,)](
        heads,
        num_tokens,
        num_heads,
        outputs,
        weight.scale_block[0],
        tiling,
        num_warps=tiling.warps,
    )


def tiling_of_groups(num_tokens: int, weight: HeadWeight) -> Tiling:
    """The compile-time constants for a number of tokens; measured on an H100, as on sm_80."""
    steps = weight.data.shape[2] // 128
    tokens = min(max(8, next_power_of_2(num_tokens)), 64)
    if tokens > 16:
        return Tiling(64, tokens, 128, 1, steps, 1, 4, 0, 4, tokens // 32)
    if steps % 4 == 0:
        return Tiling(32, tokens, 128, 4, steps // 4, 1, 3, 0, 4, 1)
    return Tiling(64, tokens, 128, 1, steps, 1, 6, 0, 4, 1)


def project_groups(call: ProjectGroups) -> None:
    weight, out = call.weight, call.out
    if out.numel() == 0:
        return
    num_tokens = out.shape[0]
    data, scale = weight.data, weight.scale
    num_groups, outputs, _ = data.shape
    rows, scales = inputs_of_groups(call)
    tiling = tiling_of_groups(num_tokens, weight)
    groups = Groups(
        rows,
        rows.stride(0),
        scales,
        data.view(torch.uint8),
        data.stride(0),
        data.stride(1),
        scale,
        scale.stride(0),
        scale.stride(1),
        out,
        out.stride(0),
        out.stride(1),
    )
    programs = outputs // tiling.outputs * num_groups * cdiv(num_tokens, tiling.tokens)
    _project_groups[(programs,)](
        groups,
        num_tokens,
        num_groups,
        outputs,
        weight.scale_block[0],
        tiling,
        num_warps=tiling.warps,
    )

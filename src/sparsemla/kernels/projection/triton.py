"""GEMMs per head or group, with bfloat16 weights, or e4m3 weights and quantised activations.

``_few_kernel``, for few tokens, streams the weights. A program loads its share of a head's matrix
before the activations, which an earlier kernel may still compute, and issues ``weight @ x^T``: the
few tokens are N of the MMA. Its activations may be partial results of attention splits, which it
merges first. ``_many_kernel`` issues ``x @ weight^T`` and keeps the activations of a block of
tokens.

The matrix of a group of heads has thousands of inputs, too many for a program to hold, so that all
programs of a group would quantise them again. ``_inputs_kernel`` prepares them once: it merges
parts, undoes the rotation and quantises. ``_groups_kernel`` issues ``weight @ x^T`` for tiles of
both that pass through a pipeline.

Shapes: T tokens, H heads, G groups, V dims of a head, K inputs, N outputs, S parts.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemla.formats import FP8_MAX
from sparsemla.kernels.attention.triton.merge import launch_merge
from sparsemla.kernels.attention.triton.tiles import LOG2E, LOWEST
from sparsemla.kernels.common.device import describe, num_multiprocessors
from sparsemla.kernels.common.early import begins_early, let_next_begin, wait_for_inputs
from sparsemla.kernels.common.fp8 import (
    INTERPRETED,
    dot,
    e4m3_over_256,
    encode_e4m3,
    has_fp8,
    round_to_e4m3,
)
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.projection.arguments import (
    FEW_MERGED_ROWS,
    ProjectGroups,
    ProjectHeads,
)
from sparsemla.kernels.quant.triton import HEAD_DIMS, LAUNCH, load_cos_sin
from sparsemla.weights import HeadWeight

MAX = tl.constexpr(FP8_MAX)
INVERSE = tl.constexpr(float(np.float32(1 / FP8_MAX)))
INVERSE_REST = tl.constexpr(1 / FP8_MAX - float(np.float32(1 / FP8_MAX)))

FEW_TOKENS = 32
"""Most tokens of ``_few_kernel`` on GPUs other than Hopper; measured as on sm_80."""

INVARIANT_TOKENS = 16
"""Number of tokens that the tiles are chosen for if results must not depend on the real number."""

MAX_PARTS = 32
"""Most parts of a vector that a program loads at a time."""


@dataclass(frozen=True)
class Tiles:
    """Outputs, tokens and inputs of a step, warps of a program, and pipeline stages."""

    outputs: int
    tokens: int
    inputs: int
    warps: int
    stages: int = 1


def _is_few(num_tokens: int, num_heads: int, device: torch.device) -> bool:
    """Whether ``_few_kernel`` is faster than ``_many_kernel``; measured on an H200."""
    if not describe(device).is_hopper:
        return num_tokens <= FEW_TOKENS
    return num_tokens * num_heads <= FEW_MERGED_ROWS


def _tiles_of_few(
    num_tokens: int, weight: HeadWeight, num_parts: int, device: torch.device
) -> Tiles:
    num_heads, outputs, inputs = weight.data.shape
    step = 128 if weight.scale is None else weight.scale_block[1]
    step = max(32, next_power_of_2(min(step, inputs)))
    rows = min(128, max(16, next_power_of_2(outputs)))
    tokens = next_power_of_2(num_tokens)
    if not describe(device).is_hopper:  # less shared memory, and fewer registers per thread
        if weight.scale is None or num_parts:
            return Tiles(min(32, rows), 16 if inputs > 128 else max(tokens, 16), step, 8)
        return Tiles(min(32 if inputs > 128 else 64, rows), max(tokens, 16), step, 4)
    processors = num_multiprocessors(device)
    codes = weight.scale is not None
    # One token per program, with all of its parts at once, if all programs run at once.
    if num_parts and num_heads * num_tokens <= (2 if codes else 1) * processors:
        return Tiles(rows, 1, step, warps=4)
    tokens = max(tokens, 16 if num_parts else 8)
    tokens = min(tokens, 32 if codes and inputs <= 128 else 64)
    blocks = num_heads * cdiv(outputs, rows)
    # Half of the multiprocessors saturate memory.
    while tokens > 16 and 2 * blocks * cdiv(num_tokens, tokens) < processors:
        tokens //= 2
    if inputs > 128:  # a program holds all inputs at once
        if tokens == 8:
            rows = min(rows, 64)
        elif codes and not num_parts and blocks * cdiv(num_tokens, 16) <= 2 * processors:
            tokens = 16
    return Tiles(rows, tokens, step, warps=4 if tokens < (16 if inputs > 128 else 32) else 8)


def _tiles_of_many(num_tokens: int, weight: HeadWeight, device: torch.device) -> Tiles:
    inputs = weight.data.shape[2]
    if weight.scale is None:
        step = min(128 if inputs <= 128 else 64, max(16, next_power_of_2(inputs)))
    else:
        step = max(32, next_power_of_2(weight.scale_block[1]))
        if not has_fp8(device):  # codes are decoded in registers, by integer instructions
            return Tiles(128, 64, step, warps=4, stages=2)
    if inputs <= step:
        # Three stages of 128 rows take 128 KiB of shared memory.
        rows = 128 if num_tokens <= 128 and describe(device).is_hopper else 64
        return Tiles(rows, 128, step, warps=8 if num_tokens <= 256 else 4, stages=3)
    # Registers hold the accumulator of a step and the total.
    tokens, warps = (128, 8) if weight.scale is None else (64, 4)
    return Tiles(128, tokens, step, warps, stages=3)


@triton.jit
def _scale_down(x, UPCAST: tl.constexpr):
    """float32 values ``x [rows, dims]`` over their ``scale [rows]``, in the range of e4m3.

    Activations often hit ties of e4m3, so both divisions have to be rounded correctly.
    Multiplications by an inverse in two parts achieve this for the scale, and for bfloat16 values
    up to 2**117 (a test tries all). The quotient of another value may differ in the last bit if it
    is within 2**-43 of the middle of two float32 numbers, so codes do not differ in practice.
    """
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), 1e-4)
    if UPCAST:  # the interpreter's fma rounds twice
        scale = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
        x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    else:
        scale = tl.fma(amax, tl.full(amax.shape, INVERSE, tl.float32), amax * INVERSE_REST)
        inverse = 1.0 / scale
        rest = tl.fma(-scale, inverse, tl.full(scale.shape, 1.0, tl.float32)) * inverse
        x = tl.fma(x, tl.broadcast_to(inverse[:, None], x.shape), x * rest[:, None])
    return x, scale


@triton.jit
def _quantise(x, NATIVE: tl.constexpr, UPCAST: tl.constexpr):
    """float32 values ``x [rows, dims]``, rounded to e4m3, as MMA operands, and ``scale [rows]``."""
    x, scale = _scale_down(x, UPCAST)
    if NATIVE:
        operand = encode_e4m3(x, NATIVE).to(tl.float8e4nv, bitcast=True)
    else:
        operand = round_to_e4m3(x).to(tl.float16)
    return operand, scale


@triton.jit
def _load_row_scales(
    scale,
    first,
    row,
    stride,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALE_N: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Scales of a block of weight rows as operands, or their single common scale."""
    if SCALE_N % BLOCK_N == 0:
        scales = tl.load(scale + first // SCALE_N * stride)
    else:
        scales = tl.load(scale + row // SCALE_N * stride, mask=row < N, other=0.0)
    if not NATIVE:
        scales *= 256.0
    return scales


@triton.jit
def _as_operand(codes, NATIVE: tl.constexpr):
    """Weights as MMA operands: e4m3 if the GPU has it, else float16 over 256."""
    if codes.dtype != tl.uint8:
        operand = codes
    elif NATIVE:
        operand = codes.to(tl.float8e4nv, bitcast=True)
    else:
        operand = e4m3_over_256(codes)
    return operand


@triton.jit
def _merge_parts(
    x,
    at,
    part_stride,
    lses,
    lse_part_stride,
    num_parts,
    sink,
    live,
    STEPS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    K: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Inputs of all steps in bfloat16: ``sum_s exp(lses[s] - lse) * x[s]`` over the parts.

    An online softmax over the parts: m and l are the running maximum and sum, and alpha rescales
    the accumulators.
    """
    in_block = tl.arange(0, BLOCK_S)
    k = tl.arange(0, BLOCK_K)
    m = tl.full([BLOCK_T], LOWEST, tl.float32)
    l = tl.zeros([BLOCK_T], tl.float32)
    acc = ()
    for _ in tl.static_range(STEPS):
        acc = acc + (tl.zeros([BLOCK_T, BLOCK_K], tl.float32),)
    UNROLL: tl.constexpr = 4 if BLOCK_S == 1 else 1
    for first in tl.range(0, num_parts, BLOCK_S, loop_unroll_factor=UNROLL):
        part = (first + in_block).to(tl.int64)[:, None]
        listed = (part < num_parts) & live[None, :]
        state = tl.load(lses[None, :] + part * lse_part_stride, mask=listed, other=float("-inf"))
        state *= LOG2E
        m_new = tl.maximum(m, tl.max(state, axis=0))
        alpha = tl.exp2(m - m_new)
        weight = tl.exp2(state - m_new[None, :])
        new_acc = ()
        for step in tl.static_range(STEPS):
            # The load does not wait for the weight; the select drops NaNs in parts without keys.
            real = listed[:, :, None] & ((k < STEP) & (step * STEP + k < K))[None, None, :]
            y = x + (part * part_stride)[:, :, None] + at[None, :, :] + step * STEP
            y = tl.load(y, mask=real, other=0.0)
            y = tl.where(weight[:, :, None] > 0, y, 0.0) * weight[:, :, None]
            new_acc = new_acc + (acc[step] * alpha[:, None] + tl.sum(y, axis=0),)
        acc = new_acc
        l = l * alpha + tl.sum(weight, axis=0)
        m = m_new
    if sink is not None:
        l += tl.exp2(sink * LOG2E - tl.where(l == 0, 0.0, m))
    inverse = 1.0 / tl.where(l == 0, 1.0, l)
    merged = ()
    for step in tl.static_range(STEPS):
        merged = merged + ((acc[step] * inverse[:, None]).to(tl.bfloat16),)
    return merged


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def _few_kernel(
    x,
    weight,
    scale,
    lses,
    attn_sink,
    out,
    num_tokens,
    num_heads,
    num_parts,
    x_part_stride,
    x_token_stride,
    x_head_stride,
    weight_head_stride,
    weight_row_stride,
    scale_head_stride,
    scale_row_stride,
    lse_part_stride,
    lse_token_stride,
    out_token_stride,
    out_head_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE_N: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    NATIVE: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Project up to BLOCK_T tokens of one head to BLOCK_N outputs, after a merge of their parts."""
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    NUM_BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    head = (program // NUM_BLOCKS % num_heads).to(tl.int64)
    token = program // NUM_BLOCKS // num_heads * BLOCK_T + tl.arange(0, BLOCK_T)
    first = program % NUM_BLOCKS * BLOCK_N
    row = first + tl.arange(0, BLOCK_N)
    live = token < num_tokens
    token = token.to(tl.int64)
    k = tl.arange(0, BLOCK_K)

    weight += (head * weight_head_stride + row.to(tl.int64) * weight_row_stride)[:, None]
    tiles = ()
    scales = ()
    for step in tl.static_range(STEPS):
        inside = ((k < STEP) & (step * STEP + k < K))[None, :] & (row < N)[:, None]
        tiles = tiles + (tl.load(weight + step * STEP + k[None, :], mask=inside, other=0),)
        if scale is not None:
            at = scale + head * scale_head_stride + step
            a_scale = _load_row_scales(
                at, first, row[:, None], scale_row_stride, N, BLOCK_N, SCALE_N, NATIVE
            )
            scales = scales + (a_scale,)
    wait_for_inputs(EARLY)  # an earlier kernel may write activations, but no weights
    let_next_begin(EARLY)  # earlier, the next kernel would compete with the loads of the weights

    at = (token * x_token_stride + head * x_head_stride)[:, None] + k[None, :]
    if lses is not None:
        sink = None
        if attn_sink is not None:
            sink = tl.load(attn_sink + head)
        inputs = _merge_parts(
            x,
            at,
            x_part_stride,
            lses + token * lse_token_stride + head,
            lse_part_stride,
            num_parts,
            sink,
            live,
            STEPS,
            STEP,
            BLOCK_T,
            BLOCK_K,
            K,
            BLOCK_S,
        )
    else:
        inputs = ()
        for step in tl.static_range(STEPS):
            real = live[:, None] & ((k < STEP) & (step * STEP + k < K))[None, :]
            inputs = inputs + (tl.load(x + at + step * STEP, mask=real, other=0.0),)

    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for step in tl.static_range(STEPS):
        a = _as_operand(tiles[step], NATIVE)
        if scale is None:
            total = dot(a, tl.trans(inputs[step]), total, UPCAST)
        else:
            b, b_scale = _quantise(inputs[step].to(tl.float32), NATIVE, UPCAST)
            part = dot(a, tl.trans(b), tl.zeros([BLOCK_N, BLOCK_T], tl.float32), UPCAST)
            total += part * (b_scale[None, :] * scales[step])
    target = out + (token * out_token_stride + head * out_head_stride)[None, :] + row[:, None]
    tl.store(target, total.to(tl.bfloat16), mask=(row < N)[:, None] & live[None, :])


@triton.jit(do_not_specialize=["num_tokens"])
def _many_kernel(
    x,
    weight,
    scale,
    out,
    num_tokens,
    num_heads,
    x_token_stride,
    x_head_stride,
    weight_head_stride,
    weight_row_stride,
    scale_head_stride,
    scale_row_stride,
    out_token_stride,
    out_head_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE_N: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Project tokens of one head: to all outputs if one step holds the inputs, else to a block."""
    let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    ONCE: tl.constexpr = K <= STEP
    NUM_BLOCKS: tl.constexpr = 1 if ONCE else (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    head = (program // NUM_BLOCKS % num_heads).to(tl.int64)
    token = program // NUM_BLOCKS // num_heads * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < num_tokens
    token = token.to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    x += (token * x_token_stride + head * x_head_stride)[:, None]
    weight += head * weight_head_stride
    out += (token * out_token_stride + head * out_head_stride)[:, None]
    if scale is not None:
        scale += head * scale_head_stride

    if ONCE:
        b = tl.load(x + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0.0)
        if scale is not None:
            b, b_scale = _quantise(b.to(tl.float32), NATIVE, UPCAST)
        for first in range(0, N, BLOCK_N):
            row = first + tl.arange(0, BLOCK_N)
            inside = (row < N)[:, None] & (k < K)[None, :]
            at = weight + row.to(tl.int64)[:, None] * weight_row_stride + k[None, :]
            a = _as_operand(tl.load(at, mask=inside, other=0), NATIVE)
            total = dot(b, tl.trans(a), tl.zeros([BLOCK_T, BLOCK_N], tl.float32), UPCAST)
            if scale is not None:
                a_scale = _load_row_scales(
                    scale, first, row[None, :], scale_row_stride, N, BLOCK_N, SCALE_N, NATIVE
                )
                total *= b_scale[:, None] * a_scale
            inside = live[:, None] & (row < N)[None, :]
            tl.store(out + row[None, :], total.to(tl.bfloat16), mask=inside)
    else:
        first = program % NUM_BLOCKS * BLOCK_N
        row = first + tl.arange(0, BLOCK_N)
        weight += row.to(tl.int64)[:, None] * weight_row_stride
        total = tl.zeros([BLOCK_T, BLOCK_N], tl.float32)
        for step in range((K + STEP - 1) // STEP):
            inside = ((k < STEP) & (step * STEP + k < K))[None, :]
            at = step * STEP + k[None, :]
            a = _as_operand(tl.load(weight + at, mask=(row < N)[:, None] & inside, other=0), NATIVE)
            b = tl.load(x + at, mask=live[:, None] & inside, other=0.0)
            if scale is None:
                total = dot(b, tl.trans(a), total, UPCAST)
            else:
                at = scale + step
                a_scale = _load_row_scales(
                    at, first, row[None, :], scale_row_stride, N, BLOCK_N, SCALE_N, NATIVE
                )
                b, b_scale = _quantise(b.to(tl.float32), NATIVE, UPCAST)
                part = dot(b, tl.trans(a), tl.zeros([BLOCK_T, BLOCK_N], tl.float32), UPCAST)
                total += part * (b_scale[:, None] * a_scale)
        inside = live[:, None] & (row < N)[None, :]
        tl.store(out + row[None, :], total.to(tl.bfloat16), mask=inside)


def merge_parts(call: ProjectHeads, lses: Tensor) -> Tensor:
    """Merge the partial results of attention splits into bfloat16."""
    parts, workspace = call.x, call.workspace
    if workspace is None:
        out = torch.empty(parts.shape[1:], dtype=torch.bfloat16, device=parts.device)
        lse = torch.empty_like(lses[0])
    else:
        rows, size = lses[0].numel(), 2 * parts[0].numel()
        first = cdiv(size, 16) * 16
        out = workspace[:size].view(torch.bfloat16).view(parts.shape[1:])
        lse = workspace[first : first + 4 * rows].view(torch.float32).view(lses.shape[1:])
    launch_merge(parts[:, None], lses[:, None], call.attn_sink, out[None], lse[None])
    return out


def project_heads(call: ProjectHeads) -> None:
    x, weight, lses, out = call.x, call.weight, call.lses, call.out
    num_tokens, num_heads, inputs = x.shape[-3:]
    if num_tokens * num_heads == 0:
        return
    few = call.batch_invariant or _is_few(num_tokens, num_heads, x.device)
    if lses is not None and not few:
        x, lses = merge_parts(call, lses), None
    num_parts = 0 if lses is None else lses.shape[0]
    if few:
        tiles = _tiles_of_few(
            INVARIANT_TOKENS if call.batch_invariant else num_tokens, weight, num_parts, x.device
        )
    else:
        tiles = _tiles_of_many(num_tokens, weight, x.device)
    data, scale = weight.data, weight.scale
    outputs = data.shape[1]
    arguments = {
        "x": x,
        "weight": data if scale is None else data.view(torch.uint8),
        "scale": scale,
        "out": out,
        "num_tokens": num_tokens,
        "num_heads": num_heads,
        "x_token_stride": x.stride(-3),
        "x_head_stride": x.stride(-2),
        "weight_head_stride": data.stride(0),
        "weight_row_stride": data.stride(1),
        "scale_head_stride": 0 if scale is None else scale.stride(0),
        "scale_row_stride": 0 if scale is None else scale.stride(1),
        "out_token_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "N": outputs,
        "K": inputs,
        "SCALE_N": weight.scale_block[0],
        "BLOCK_N": tiles.outputs,
        "BLOCK_T": tiles.tokens,
        "BLOCK_K": tiles.inputs,
        "NATIVE": has_fp8(x.device),
        "UPCAST": INTERPRETED,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        **begins_early(x.device),
    }
    programs = num_heads * cdiv(num_tokens, tiles.tokens)
    step = tiles.inputs if scale is None else weight.scale_block[1]
    if not few:
        blocks = 1 if inputs <= step else cdiv(outputs, tiles.outputs)
        _many_kernel[(programs * blocks,)](**arguments, STEP=step)
        return
    _few_kernel[(programs * cdiv(outputs, tiles.outputs),)](
        **arguments,
        STEP=step,
        lses=lses,
        attn_sink=call.attn_sink,
        num_parts=num_parts,
        x_part_stride=0 if lses is None else x.stride(0),
        lse_part_stride=0 if lses is None else lses.stride(0),
        lse_token_stride=0 if lses is None else lses.stride(1),
        BLOCK_S=min(next_power_of_2(num_parts), MAX_PARTS) if tiles.tokens == 1 else 1,
    )


@triton.jit
def _merge_heads(x, part_stride, lses, lse_part_stride, num_parts, sink, live, real):
    """``sum_s exp(lses[s] - lse) * x[s]`` over the parts, rounded to bfloat16, as float32.

    An online softmax, as in ``_merge_parts``; ``lses`` and ``live`` broadcast to ``x``.
    """
    m = tl.full(live.shape, LOWEST, tl.float32)
    l = tl.zeros(live.shape, tl.float32)
    acc = tl.zeros(real.shape, tl.float32)
    for _ in range(num_parts):
        state = tl.load(lses, mask=live, other=float("-inf")) * LOG2E
        y = tl.load(x, mask=real, other=0.0)
        m_new = tl.maximum(m, state)
        alpha = tl.exp2(m - m_new)
        weight = tl.exp2(state - m_new)
        acc = acc * alpha + tl.where(weight > 0, y, 0.0) * weight
        l = l * alpha + weight
        m = m_new
        lses += lse_part_stride
        x += part_stride
    if sink is not None:
        l += tl.exp2(sink * LOG2E - tl.where(l == 0, 0.0, m))
    return (acc * (1.0 / tl.where(l == 0, 1.0, l))).to(tl.bfloat16).to(tl.float32)


@triton.jit
def _rotate_back(y, first, position, table, num_positions, stride, R: tl.constexpr):
    """Undo the rotation of pairs of neighbours in ``y [rows, dims]``, pair ``first`` and later."""
    PAIRS: tl.constexpr = y.shape[1] // 2
    # A table row for each row of pairs, so that the loads do not set the layout of everything.
    pair = tl.broadcast_to(first + tl.arange(0, PAIRS)[None, :], [y.shape[0], PAIRS])
    rotated = (pair >= 0) & (pair < R // 2)
    cos, sin = load_cos_sin(table, position, num_positions, stride, pair, rotated, R)
    a, b = tl.split(tl.reshape(y, [y.shape[0], PAIRS, 2]))
    even = tl.where(rotated, a * cos + b * sin, a)
    odd = tl.where(rotated, b * cos - a * sin, b)
    return tl.reshape(tl.join(even, odd), y.shape)


@triton.jit(do_not_specialize=["num_tokens", "num_parts"])
def _inputs_kernel(
    x,
    lses,
    attn_sink,
    cos_sin,
    positions,
    inputs,
    scales,
    num_tokens,
    num_rows,
    num_parts,
    num_positions,
    x_part_stride,
    x_token_stride,
    x_head_stride,
    lse_part_stride,
    lse_token_stride,
    table_stride,
    HEADS: tl.constexpr,
    V: tl.constexpr,
    R: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Merge, rotate back and round ``ROWS`` rows of STEP inputs of a token.

    ``inputs`` are ``[T, G, K]``, and ``scales [G * steps, T]``, as the products read the scales of
    many tokens at a time. If heads have whole steps, a program takes the same step of several
    heads, so that only programs of rotated steps rotate. Else it takes any rows.
    """
    let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    K: tl.constexpr = HEADS * V
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    WHOLE: tl.constexpr = V % STEP == 0
    HEAD_STEPS: tl.constexpr = V // STEP if WHOLE else 1
    programs = tl.cdiv(num_rows, ROWS) * HEAD_STEPS
    token = (tl.program_id(0) // programs).to(tl.int64)
    step = tl.program_id(0) % programs % HEAD_STEPS
    row = tl.program_id(0) % programs // HEAD_STEPS * ROWS + tl.arange(0, ROWS)[:, None]
    in_step = tl.arange(0, BLOCK_K)[None, :]
    live = row < num_rows
    if WHOLE:
        head = row
        dim = step * STEP + in_step
        real = live & (in_step < STEP)
        target = inputs + (token * num_rows + row) * V + dim
    else:
        k = row % STEPS * STEP + in_step
        head = row // STEPS * HEADS + k // V
        dim = k % V
        live = live & (in_step < STEP) & (k < K)
        real = live
        target = inputs + (token * (num_rows // STEPS) + row // STEPS) * K + k
    if cos_sin is not None:
        position = tl.load(positions + token).to(tl.int64)
    source = x + token * x_token_stride + head.to(tl.int64) * x_head_stride + dim
    if lses is not None:
        lses += token * lse_token_stride + head
        sink = None
        if attn_sink is not None:
            sink = tl.load(attn_sink + head, mask=live, other=0.0)
        y = _merge_heads(source, x_part_stride, lses, lse_part_stride, num_parts, sink, live, real)
    else:
        y = tl.load(source, mask=real, other=0.0).to(tl.float32)
    if cos_sin is not None:
        if WHOLE and STEP % 2 == 0 and (V - R) % 2 == 0:  # both dims of a pair are in a row
            if (step + 1) * STEP > V - R:
                pair = step * (STEP // 2) - (V - R) // 2
                y = _rotate_back(y, pair, position, cos_sin, num_positions, table_stride, R)
        else:
            r = dim - (V - R)
            rotated = real & (r >= 0)
            is_first = r % 2 == 0
            partner = source + tl.where(is_first, 1, -1)
            if lses is not None:
                other = _merge_heads(
                    partner, x_part_stride, lses, lse_part_stride, num_parts, sink, live, rotated
                )
            else:
                other = tl.load(partner, mask=rotated, other=0.0).to(tl.float32)
            cos, sin = load_cos_sin(
                cos_sin, position, num_positions, table_stride, r // 2, rotated, R
            )
            y = tl.where(rotated, y * cos + other * tl.where(is_first, sin, -sin), y)
    if scales is None:
        tl.store(target, y.to(tl.bfloat16), mask=real)
    else:
        y, scale = _scale_down(y, UPCAST)
        codes = encode_e4m3(y, NATIVE)
        # 8 codes per thread, as of the inputs: with 16, both would change their layout.
        WIDTH: tl.constexpr = 8 if BLOCK_K >= 8 else BLOCK_K
        tl.store(tl.max_contiguous(target, [1, WIDTH]), codes, mask=real)
        at = (row * HEAD_STEPS + step).to(tl.int64) * num_tokens + token
        tl.store(scales + at, scale[:, None], mask=row < num_rows)


@triton.jit(do_not_specialize=["num_tokens"])
def _groups_kernel(
    inputs,
    input_scales,
    weight,
    scale,
    out,
    num_tokens,
    num_groups,
    token_stride,
    weight_group_stride,
    weight_row_stride,
    scale_group_stride,
    scale_row_stride,
    out_token_stride,
    out_group_stride,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALE_N: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NATIVE: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Project up to BLOCK_T tokens of one group to BLOCK_N outputs."""
    let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    STEPS: tl.constexpr = (K + STEP - 1) // STEP
    NUM_BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    group = (program // NUM_BLOCKS % num_groups).to(tl.int64)
    token = program // NUM_BLOCKS // num_groups * BLOCK_T + tl.arange(0, BLOCK_T)
    first = program % NUM_BLOCKS * BLOCK_N
    row = first + tl.arange(0, BLOCK_N)
    live = token < num_tokens
    token = token.to(tl.int64)
    k = tl.arange(0, BLOCK_K)[None, :]
    weight += (group * weight_group_stride + row.to(tl.int64) * weight_row_stride)[:, None] + k
    inputs += (token * token_stride + group * K)[:, None] + k
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for step in range(STEPS):
        inside = (k < STEP) & (step * STEP + k < K)
        a = tl.load(weight + step * STEP, mask=(row < N)[:, None] & inside, other=0.0)
        b = tl.load(inputs + step * STEP, mask=live[:, None] & inside, other=0.0)
        a, b = _as_operand(a, NATIVE), _as_operand(b, NATIVE)
        if scale is None:
            total = dot(a, tl.trans(b), total, UPCAST)
        else:
            a_scale = _load_row_scales(
                scale + group * scale_group_stride + step,
                first,
                row[:, None],
                scale_row_stride,
                N,
                BLOCK_N,
                SCALE_N,
                NATIVE,
            )
            b_scale = tl.load(
                input_scales + (group * STEPS + step) * num_tokens + token, mask=live, other=0.0
            )
            if not NATIVE:
                b_scale *= 256.0
            part = dot(a, tl.trans(b), tl.zeros([BLOCK_N, BLOCK_T], tl.float32), UPCAST)
            total += part * (b_scale[None, :] * a_scale)
    target = out + (token * out_token_stride + group * out_group_stride)[None, :] + row[:, None]
    tl.store(target, total.to(tl.bfloat16), mask=(row < N)[:, None] & live[None, :])


def _tiles_of_groups(num_tokens: int, weight: HeadWeight, device: torch.device) -> Tiles:
    num_groups, outputs, inputs = weight.data.shape
    step = 64 if weight.scale is None else weight.scale_block[1]
    step = max(32, next_power_of_2(min(step, inputs)))
    tokens = min(max(16, next_power_of_2(num_tokens)), 128)
    if not describe(device).is_hopper:  # less shared memory, and fewer registers per thread
        return Tiles(64, min(tokens, 64), step, warps=4, stages=4)
    # The bytes of the weights bound few tokens: all multiprocessors should load some.
    blocks = num_groups * cdiv(num_tokens, tokens)
    rows = 128 if blocks * outputs >= 128 * num_multiprocessors(device) else 64
    if tokens < 64:
        return Tiles(rows, tokens, step, warps=4, stages=6)
    return Tiles(rows, tokens, step, warps=rows // 16, stages=4)


def inputs_of_groups(call: ProjectGroups) -> tuple[Tensor, Tensor | None]:
    """The products' inputs ``[T, G, K]``: bfloat16, or codes with scales ``[G * steps, T]``."""
    x, weight, lses, workspace = call.x, call.weight, call.lses, call.workspace
    num_tokens, num_heads, dim = x.shape[-3:]
    num_groups, _, inputs = weight.data.shape
    size = num_tokens * num_groups * inputs
    step, scales_size, scales = 128, 0, None
    if weight.scale is None:
        size *= 2
    else:
        step = weight.scale_block[1]
        scales_size = 4 * num_tokens * num_groups * cdiv(inputs, step)
    first = cdiv(size, 16) * 16
    if workspace is None:
        workspace = torch.empty(first + scales_size, dtype=torch.uint8, device=x.device)
    rows = workspace[:size].view(num_tokens, num_groups, -1)
    if weight.scale is None:
        rows = rows.view(torch.bfloat16)
    else:
        scales = workspace[first : first + scales_size].view(torch.float32)
    table = call.cos_sin_cache
    block = next_power_of_2(step)
    if dim % step == 0:
        num_rows, steps = num_heads, dim // step
    else:
        num_rows, steps = num_groups * cdiv(inputs, step), 1
    rows_of_program = min(max(1, HEAD_DIMS // block), next_power_of_2(num_rows))
    num_programs = num_tokens * steps * cdiv(num_rows, rows_of_program)
    _inputs_kernel[(num_programs,)](
        x=x,
        lses=lses,
        attn_sink=call.attn_sink,
        cos_sin=table,
        positions=call.positions,
        inputs=rows,
        scales=scales,
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_parts=0 if lses is None else lses.shape[0],
        num_positions=0 if table is None else table.shape[0],
        x_part_stride=0 if lses is None else x.stride(0),
        x_token_stride=x.stride(-3),
        x_head_stride=x.stride(-2),
        lse_part_stride=0 if lses is None else lses.stride(0),
        lse_token_stride=0 if lses is None else lses.stride(1),
        table_stride=0 if table is None else table.stride(0),
        HEADS=num_heads // num_groups,
        V=dim,
        R=0 if table is None else table.shape[1],
        STEP=step,
        BLOCK_K=block,
        ROWS=rows_of_program,
        NATIVE=has_fp8(x.device),
        UPCAST=INTERPRETED,
        **LAUNCH,
        **begins_early(x.device, num_programs),
    )
    return rows, scales


def project_groups(call: ProjectGroups) -> None:
    x, weight, out = call.x, call.weight, call.out
    if out.numel() == 0:
        return
    num_tokens, _, dim = x.shape[-3:]
    data, scale = weight.data, weight.scale
    num_groups, outputs, inputs = data.shape
    rows, scales = x, None
    changed = call.lses is not None or call.cos_sin_cache is not None or scale is not None
    if changed or x.stride(1) != dim:
        rows, scales = inputs_of_groups(call)
    if scale is not None:  # MMAs of codes read them from shared memory if they are loaded as e4m3
        codes = torch.float8_e4m3fn if has_fp8(x.device) else torch.uint8
        rows, data = rows.view(codes), data.view(codes)
    tiles = _tiles_of_groups(num_tokens, weight, x.device)
    programs = cdiv(outputs, tiles.outputs) * num_groups * cdiv(num_tokens, tiles.tokens)
    _groups_kernel[(programs,)](
        inputs=rows,
        input_scales=scales,
        weight=data,
        scale=scale,
        out=out,
        num_tokens=num_tokens,
        num_groups=num_groups,
        token_stride=rows.stride(0),
        weight_group_stride=data.stride(0),
        weight_row_stride=data.stride(1),
        scale_group_stride=0 if scale is None else scale.stride(0),
        scale_row_stride=0 if scale is None else scale.stride(1),
        out_token_stride=out.stride(0),
        out_group_stride=out.stride(1),
        N=outputs,
        K=inputs,
        SCALE_N=weight.scale_block[0],
        STEP=tiles.inputs if scale is None else weight.scale_block[1],
        BLOCK_N=tiles.outputs,
        BLOCK_T=tiles.tokens,
        BLOCK_K=tiles.inputs,
        NATIVE=has_fp8(x.device),
        UPCAST=INTERPRETED,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
        **begins_early(x.device),
    )

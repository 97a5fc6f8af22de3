"""Per-head products in Triton: bfloat16, or e4m3 weights with activations quantised on the way.

Shapes: T tokens, H heads, K inputs, N outputs. The product is taken as ``weight @ x^T``, so that
the matrix instruction's long side lies along N and few tokens waste little of it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemla.formats import FP8_MAX
from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.fp8 import INTERPRETED, decode_e4m3, dot, encode_e4m3, has_fp8
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.weights import HeadWeight

MAX = tl.constexpr(FP8_MAX)


@dataclass(frozen=True)
class Tiles:
    """Outputs, tokens and inputs of a program's step; how many warps; how many steps in flight."""

    outputs: int
    tokens: int
    inputs: int
    warps: int
    stages: int


def _tiles(num_tokens: int, num_heads: int, weight: HeadWeight, device: torch.device) -> Tiles:
    _, outputs, inputs = weight.data.shape
    tokens = max(16, next_power_of_2(num_tokens))
    if weight.scale is None:
        # Three steps of two 128-wide tiles, or of a 64-wide one and few tokens, fit in 99 KB.
        step = min(128 if tokens <= 64 else 64, max(16, next_power_of_2(inputs)))
        if tokens > 64:
            return Tiles(128, 128, step, warps=8, stages=3)
        warps, stages = 4, 3
    else:
        step = max(32, next_power_of_2(weight.scale_block[1]))
        # A step's product and the sum are both in registers: at most 128 x 64 for eight warps.
        # So are codes that are decoded by hand, which leaves less for both.
        native = has_fp8(device)
        stages = 3 if native else 2
        if tokens > 64:
            return Tiles(128 if native else 64, 64, step, 8, stages)
        warps = 4 if tokens < 64 else 8
    # Few tokens: the weights are streamed, which takes most multiprocessors.
    rows, wanted = 64, 3 * num_multiprocessors(device) // 4
    while rows > 16 and num_heads * cdiv(outputs, rows) < wanted:
        rows //= 2
    return Tiles(rows, tokens, step, warps, stages)


@triton.jit
def _divide(x, scale, UPCAST: tl.constexpr):
    """``x [rows, dims] / scale [rows]``, correctly rounded: activations hit ties of e4m3 often."""
    if UPCAST:  # the interpreter's fma rounds twice
        return tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
    inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    quotient = x * inverse
    remainder = tl.fma(-quotient, tl.broadcast_to(scale[:, None], x.shape), x)
    return tl.fma(remainder, tl.broadcast_to(inverse, x.shape), quotient)


@triton.jit
def _project_kernel(
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
):
    # Neighbours share the activations, which come from memory; weights stay in the L2 cache.
    NUM_BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    head = (program // NUM_BLOCKS % num_heads).to(tl.int64)
    token = program // NUM_BLOCKS // num_heads * BLOCK_T + tl.arange(0, BLOCK_T)
    row = program % NUM_BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)
    live = token < num_tokens
    token = token.to(tl.int64)

    in_step = tl.arange(0, BLOCK_K)
    inputs = x + (token * x_token_stride + head * x_head_stride)[:, None]
    weights = weight + (head * weight_head_stride + row.to(tl.int64) * weight_row_stride)[:, None]
    total = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for step in range((K + STEP - 1) // STEP):
        k = step * STEP + in_step
        real = ((in_step < STEP) & (k < K))[None, :]
        a = tl.load(weights + k[None, :], mask=(row < N)[:, None] & real, other=0)
        b = tl.load(inputs + k[None, :], mask=live[:, None] & real, other=0.0)
        if scale is None:
            total = dot(a, tl.trans(b), total, UPCAST)
        else:
            a_scale = scale + head * scale_head_stride + row // SCALE_N * scale_row_stride + step
            a_scale = tl.load(a_scale, mask=row < N, other=0.0)
            b = b.to(tl.float32)
            amax = tl.maximum(tl.max(tl.abs(b), axis=1), 1e-4)
            b_scale = tl.div_rn(amax, tl.full([BLOCK_T], MAX, tl.float32))
            b = encode_e4m3(_divide(b, b_scale, UPCAST), NATIVE)
            if NATIVE:
                a = a.to(tl.float8e4nv, bitcast=True)
                b = b.to(tl.float8e4nv, bitcast=True)
            else:
                a = decode_e4m3(a, NATIVE).to(tl.bfloat16)
                b = decode_e4m3(b, NATIVE).to(tl.bfloat16)
            part = dot(a, tl.trans(b), tl.zeros([BLOCK_N, BLOCK_T], tl.float32), UPCAST)
            total += part * a_scale[:, None] * b_scale[None, :]
    target = out + (token * out_token_stride + head * out_head_stride)[None, :] + row[:, None]
    tl.store(target, total.to(tl.bfloat16), mask=(row < N)[:, None] & live[None, :])


def project_heads(*, x: Tensor, weight: HeadWeight, out: Tensor) -> None:
    num_tokens, num_heads, inputs = x.shape
    data, scale = weight.data, weight.scale
    tiles = _tiles(num_tokens, num_heads, weight, x.device)
    outputs = data.shape[1]
    blocks = cdiv(outputs, tiles.outputs) * cdiv(num_tokens, tiles.tokens)
    _project_kernel[(num_heads * blocks,)](
        x=x,
        weight=data if scale is None else data.view(torch.uint8),
        scale=scale,
        out=out,
        num_tokens=num_tokens,
        num_heads=num_heads,
        x_token_stride=x.stride(0),
        x_head_stride=x.stride(1),
        weight_head_stride=data.stride(0),
        weight_row_stride=data.stride(1),
        scale_head_stride=0 if scale is None else scale.stride(0),
        scale_row_stride=0 if scale is None else scale.stride(1),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
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
    )

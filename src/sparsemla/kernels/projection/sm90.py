"""Per-head products on Hopper: many tokens, e4m3 weights in blocks of 128.

A program keeps the weights of some outputs of a head in shared memory, and walks over blocks of the
head's tokens. Activations go through a ring there into the registers in which the matrix
instruction takes its left operand: a thread quantises what it multiplies, and a row's largest value
is four threads' affair. Two programs share a multiprocessor, so that one quantises while the other
multiplies or waits. All else is the portable kernels'.
"""

from __future__ import annotations

from math import gcd

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.early import begins_early
from sparsemla.kernels.common.gluon import async_load, barrier, reinterpret
from sparsemla.kernels.common.integers import cdiv
from sparsemla.kernels.projection import triton as portable
from sparsemla.kernels.projection.triton import INVERSE, INVERSE_REST
from sparsemla.weights import HeadWeight

TOKENS = gl.constexpr(64)
"""Tokens of a block: the rows of one matrix instruction."""
INPUTS = gl.constexpr(128)
"""Inputs of a step, which share a scale."""
OUTPUTS = gl.constexpr(128)
"""Outputs of a matrix instruction."""
RING = gl.constexpr(3)
"""Steps whose activations are on their way or in use, 16 KiB each."""
MOST_STEPS = 4
"""Of 16 KiB of weights each: two programs have room beside each other."""
AT_ONCE = 2
"""Most blocks of outputs for which inputs of one step are quantised once; more are slower."""
FEW = 4096
"""Most tokens times heads for which the portable kernel is as fast."""

# Four bytes are two inputs of a token: [64, 64], in the threads whose operands they become.
PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
COPIED = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
# Eight rows of four threads have 256 bytes in as many banks as there are.
STAGE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
LOADED = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
CODES = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
CODES_BY_FOUR = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, SUMS, 4))
# The sums' threads, once outputs are in order: eight neighbours in a thread.
STORED = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)


@gluon.jit
def _larger(a, b):
    """The larger magnitude of each half of two pairs of bfloat16, with some sign."""
    return gl.inline_asm_elementwise(
        "max.xorsign.abs.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def _halves(pairs):
    """The lower and the upper bfloat16 of each pair, as float32."""
    low = (pairs << 16).to(gl.float32, bitcast=True)
    return low, (pairs & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def _quantise(pairs):
    """e4m3 codes ``[64, 128]`` of a block's pairs of inputs, and ``scale [64]``.

    The codes and scales of the portable kernels' ``_quantise``, which says why they are exact.
    """
    low, high = _halves(gl.reduce(pairs, 1, _larger))
    amax = gl.maximum(gl.maximum(gl.abs(low), gl.abs(high)), 1e-4)
    scale = gl.fma(amax, gl.full_like(amax, INVERSE), amax * INVERSE_REST)
    inverse = gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=f,f", [scale], gl.float32, is_pure=True, pack=1
    )
    rest = gl.fma(-scale, inverse, gl.full_like(scale, 1.0)) * inverse
    low, high = _halves(pairs)
    x = gl.join(low, high).reshape([TOKENS, INPUTS])
    ROWS: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    inverse = gl.expand_dims(gl.convert_layout(inverse, ROWS), 1)
    rest = gl.expand_dims(gl.convert_layout(rest, ROWS), 1)
    _, inverse = gl.broadcast(x, inverse)
    codes = gl.inline_asm_elementwise(
        "{.reg .b16 a, b; cvt.rn.satfinite.e4m3x2.f32 a, $2, $1;"
        " cvt.rn.satfinite.e4m3x2.f32 b, $4, $3; mov.b32 $0, {a, b};}",
        "=r,f,f,f,f",
        [gl.fma(x, inverse, x * rest)],
        gl.int8,
        is_pure=True,
        pack=4,
    )
    return gl.convert_layout(codes.to(gl.float8e4nv, bitcast=True), OPERAND), scale


@gluon.jit
def _store(out, token_stride, sums, first, num_tokens):
    """Sums of a block of tokens, whose outputs have changed places as the weights' rows have."""
    sums = sums.to(gl.bfloat16).reshape([TOKENS, 4, 4, 4, 2]).permute((0, 1, 3, 2, 4))
    sums = gl.convert_layout(sums.reshape([TOKENS, OUTPUTS]), STORED)
    token = first + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, STORED))
    output = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, STORED))
    out += (token.to(gl.int64) * token_stride)[:, None] + output[None, :]
    gl.store(out, sums, mask=(token < num_tokens)[:, None])


@gluon.jit(do_not_specialize=["num_tokens"])
def _blocks_kernel(
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
    STEPS: gl.constexpr,
    BLOCKS: gl.constexpr,
    SHARES: gl.constexpr,
    SCALE_N: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Every so many blocks of tokens; ``BLOCKS`` blocks of outputs, one of ``SHARES`` of a head.

    ``x`` and ``weight`` are in words of 4 bytes, their strides in pieces of 16, so that the
    compiler knows copies to be aligned.
    """
    shares = num_heads * SHARES
    share = gl.program_id(0) % shares
    head = (share // SHARES).to(gl.int64)
    first_row = share % SHARES * (BLOCKS * OUTPUTS)
    begin = gl.program_id(0) // shares * TOKENS
    stride = gl.num_programs(0) // shares * TOKENS

    # Rows of weights change places, so that a thread's sums are of eight neighbouring outputs.
    row = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, LOADED))
    row = (row & 0x61) | ((row & 0x18) >> 2) | ((row & 0x06) << 2)
    word = gl.arange(0, INPUTS // 4, layout=gl.SliceLayout(0, LOADED))
    weight += 4 * (head * weight_head_stride + first_row * weight_row_stride)
    weights = gl.allocate_shared_memory(gl.float8e4nv, [STEPS * BLOCKS, OUTPUTS, INPUTS], CODES)
    for step in gl.static_range(STEPS):
        for block in gl.static_range(BLOCKS):
            at = 4 * (block * OUTPUTS + row) * weight_row_stride
            at = weight + at[:, None] + (step * (INPUTS // 4) + word)[None, :]
            target = weights.index(step * BLOCKS + block)
            async_load(reinterpret(target, gl.int32, [OUTPUTS, INPUTS // 4], CODES_BY_FOUR), at)
    if EARLY:  # as in kernels/common/early.py: weights are no kernel's results, activations are
        gdc_wait()
        gdc_launch_dependents()

    x += 4 * head * x_head_stride
    out += head * out_head_stride + first_row
    scale += head * scale_head_stride
    in_block = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, COPIED))
    pair = gl.arange(0, INPUTS // 2, layout=gl.SliceLayout(0, COPIED))[None, :]
    ring = gl.allocate_shared_memory(gl.int32, [RING, TOKENS, INPUTS // 2], STAGE)
    fetched = begin - stride
    for ahead in gl.static_range(RING - 1):
        if ahead % STEPS == 0:
            fetched += stride
            token = gl.minimum(fetched + in_block, num_tokens - 1).to(gl.int64)
            at = x + (4 * token * x_token_stride)[:, None] + pair
        if fetched < num_tokens:
            async_load(ring.index(ahead), at + ahead % STEPS * (INPUTS // 2))
        async_copy.commit_group()
    async_copy.wait_group(RING - 2)
    fence_async_shared()
    barrier()

    place = 0
    for first in range(begin, num_tokens, stride):
        total = gl.zeros([TOKENS, OUTPUTS], gl.float32, SUMS)
        for step in gl.static_range(STEPS):
            async_copy.wait_group(RING - 2)
            pairs = ring.index(place).load(PAIRS)
            if (step + RING - 1) % STEPS == 0:
                fetched += stride
                token = gl.minimum(fetched + in_block, num_tokens - 1).to(gl.int64)
                at = x + (4 * token * x_token_stride)[:, None] + pair
            if fetched < num_tokens:  # where the step before this one was
                free = ring.index(gl.where(place == 0, RING - 1, place - 1))
                async_load(free, at + (step + RING - 1) % STEPS * (INPUTS // 2))
            async_copy.commit_group()
            place = gl.where(place == RING - 1, 0, place + 1)
            codes, x_scale = _quantise(pairs)
            x_scale = gl.convert_layout(x_scale, gl.SliceLayout(1, SUMS))
            flying = ()
            for block in gl.static_range(BLOCKS):
                sums = gl.zeros([TOKENS, OUTPUTS], gl.float32, SUMS)
                tile = weights.index(step * BLOCKS + block).permute((1, 0))
                sums = warpgroup_mma(codes, tile, sums, use_acc=False, is_async=True)
                flying = flying + (sums,)
            for block in gl.static_range(BLOCKS):
                row_scale = (first_row + block * OUTPUTS) // SCALE_N * scale_row_stride + step
                factor = (x_scale * gl.load(scale + row_scale))[:, None]
                sums = warpgroup_mma_wait(BLOCKS - 1 - block, deps=(flying[block],)) * factor
                if STEPS > 1:
                    total += sums
                else:
                    _store(out + block * OUTPUTS, out_token_stride, sums, first, num_tokens)
        if STEPS > 1:
            _store(out, out_token_stride, total, first, num_tokens)


def _takes(x: Tensor, weight: HeadWeight) -> bool:
    """Whether there are whole blocks, and all rows start at multiples of 16 bytes."""
    _, outputs, inputs = weight.data.shape
    if weight.scale is None or weight.scale_block[0] % 128 or weight.scale_block[1] != 128:
        return False
    if outputs % OUTPUTS.value or inputs % INPUTS.value or inputs > MOST_STEPS * INPUTS.value:
        return False
    starts = x.data_ptr() | weight.data.data_ptr()
    strides = [2 * x.stride(0), 2 * x.stride(1), *weight.data.stride()[:2]]
    return starts % 16 == 0 and all(stride % 16 == 0 for stride in strides)


def project_heads(
    *,
    x: Tensor,
    weight: HeadWeight,
    lses: Tensor | None,
    attn_sink: Tensor | None,
    out: Tensor,
    batch_invariant: bool = False,
    workspace: Tensor | None = None,
) -> None:
    """Launcher; see :func:`sparsemla.ops.projection.project_heads`."""
    num_tokens, num_heads, inputs = x.shape[-3:]
    few = batch_invariant or portable.is_few(num_tokens, num_heads, x.device)
    if lses is not None and not few:
        x, lses = portable.merged(x, lses, attn_sink, workspace), None
    small = batch_invariant or num_tokens * num_heads <= FEW
    if lses is not None or small or not _takes(x, weight):
        portable.project_heads(
            x=x,
            weight=weight,
            lses=lses,
            attn_sink=attn_sink,
            batch_invariant=batch_invariant,
            out=out,
        )
        return
    steps, blocks = inputs // INPUTS.value, weight.data.shape[1] // OUTPUTS.value
    at_once = gcd(blocks, AT_ONCE) if steps == 1 else 1
    shares = blocks // at_once
    turns = max(1, 2 * num_multiprocessors(x.device) // (num_heads * shares))
    turns = min(turns, cdiv(num_tokens, TOKENS.value))
    data, scale = weight.data.view(torch.int32), weight.scale
    _blocks_kernel[(turns * num_heads * shares,)](
        x.view(torch.int32),
        data,
        scale,
        out,
        num_tokens,
        num_heads,
        x.stride(0) // 8,
        x.stride(1) // 8,
        data.stride(0) // 4,
        data.stride(1) // 4,
        scale.stride(0),
        scale.stride(1),
        out.stride(0),
        out.stride(1),
        STEPS=steps,
        BLOCKS=at_once,
        SHARES=shares,
        SCALE_N=weight.scale_block[0],
        num_warps=4,
        **begins_early(x.device),
    )

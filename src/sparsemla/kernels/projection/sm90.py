"""Per-head GEMMs on Hopper for many tokens and e4m3 weights with scale blocks of 128.

``out[t, h] = W[h] x[t, h]`` for W_UK or W_UV, with activations quantised in the kernel. A CTA keeps
the codes of 128 or 256 outputs of a head in shared memory and walks blocks of 64 tokens. For each
step of 128 inputs, which share a scale:

1. cp.async copies the activations two steps ahead, into a pipeline of three stages of 16 KiB.
2. Each thread loads bfloat16 pairs in the layout of the MMA's A operand, so the codes never leave
   registers; the amax of a row is a reduction over four threads.
3. One MMA per block of outputs multiplies the codes by the weights in shared memory, and the
   accumulator is scaled by both scales. With several steps, the results add up in registers.

Idealised time line of the two CTAs of a multiprocessor, for one block of outputs:

    CTA 0  copy step 2 | quantise 0 | MMA 0, scale  | copy step 3 | quantise 1 | MMA 1, scale
    CTA 1  MMA, scale  | copy       | quantise      | MMA, scale  | copy       | quantise

All four warps do the same, so there are no producers and no mbarriers: ``wait_group`` waits for a
step's copies, and the compiler adds the barrier between the threads that copy and load a row.
"""

from __future__ import annotations

from math import gcd

import torch
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
from sparsemla.kernels.projection.arguments import ProjectHeads
from sparsemla.kernels.projection.triton import INVERSE, INVERSE_REST, merge_parts

TOKENS = gl.constexpr(64)
"""Tokens of a block, M of an MMA."""
INPUTS = gl.constexpr(128)
"""Inputs of a step; they share a scale."""
OUTPUTS = gl.constexpr(128)
"""Outputs of a block, N of an MMA."""
STAGES = gl.constexpr(3)
"""Stages of activations, 16 KiB each."""
MAX_BLOCKS = 2
"""Most blocks of outputs per CTA; they share quantised inputs. More blocks are slower."""

# Pairs of inputs [64, 64], in the same threads as in the MMA's A operand.
PAIRS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [8, 0], [0, 8], [0, 16], [0, 32]],
        [[0, 2], [0, 4], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
COPY = gl.constexpr(gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0]))
# Free of bank conflicts: eight rows of four threads read 256 bytes from all banks.
STAGE_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
WEIGHT_COPY = gl.constexpr(gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0]))
CODES = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
CODE_WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
OPERAND = gl.constexpr(gl.DotOperandLayout(0, ACC, 4))
# The accumulator with its outputs back in order: eight neighbours per thread.
STORE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)


@gluon.jit
def _max_abs(a, b):
    """The larger magnitude in each half of two bfloat16 pairs; the sign is arbitrary."""
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

    The results equal the portable kernel's ``_quantise``; its docstring explains the rounding.
    """
    low, high = _halves(gl.reduce(pairs, 1, _max_abs))
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
def _store(out, token_stride, acc, first, num_tokens):
    """Store an accumulator and undo the permutation of its outputs."""
    acc = acc.to(gl.bfloat16).reshape([TOKENS, 4, 4, 4, 2]).permute((0, 1, 3, 2, 4))
    acc = gl.convert_layout(acc.reshape([TOKENS, OUTPUTS]), STORE)
    token = first + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, STORE))
    output = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(0, STORE))
    out += (token.to(gl.int64) * token_stride)[:, None] + output[None, :]
    gl.store(out, acc, mask=(token < num_tokens)[:, None])


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
    """Project the tokens of a head to ``BLOCKS`` blocks, one of ``SHARES`` shares of its outputs.

    The CTAs of a share take blocks of tokens in turn. ``x`` and ``weight`` point to words of 4
    bytes; their strides count 16 bytes, so that the compiler knows the alignment of copies.
    """
    shares = num_heads * SHARES
    share = gl.program_id(0) % shares
    head = (share // SHARES).to(gl.int64)
    first_row = share % SHARES * (BLOCKS * OUTPUTS)
    begin = gl.program_id(0) // shares * TOKENS
    stride = gl.num_programs(0) // shares * TOKENS

    # Permute the rows of the weights, so that a thread accumulates eight adjacent outputs.
    row = gl.arange(0, OUTPUTS, layout=gl.SliceLayout(1, WEIGHT_COPY))
    row = (row & 0x61) | ((row & 0x18) >> 2) | ((row & 0x06) << 2)
    word = gl.arange(0, INPUTS // 4, layout=gl.SliceLayout(0, WEIGHT_COPY))
    weight += 4 * (head * weight_head_stride + first_row * weight_row_stride)
    weights = gl.allocate_shared_memory(gl.float8e4nv, [STEPS * BLOCKS, OUTPUTS, INPUTS], CODES)
    for step in gl.static_range(STEPS):
        for block in gl.static_range(BLOCKS):
            at = 4 * (block * OUTPUTS + row) * weight_row_stride
            at = weight + at[:, None] + (step * (INPUTS // 4) + word)[None, :]
            target = weights.index(step * BLOCKS + block)
            async_load(reinterpret(target, gl.int32, [OUTPUTS, INPUTS // 4], CODE_WORDS), at)
    if EARLY:  # see kernels/common/early.py: an earlier kernel may write x, but not the weights
        gdc_wait()
        gdc_launch_dependents()

    x += 4 * head * x_head_stride
    out += head * out_head_stride + first_row
    scale += head * scale_head_stride
    in_block = gl.arange(0, TOKENS, layout=gl.SliceLayout(1, COPY))
    pair = gl.arange(0, INPUTS // 2, layout=gl.SliceLayout(0, COPY))[None, :]
    stages = gl.allocate_shared_memory(gl.int32, [STAGES, TOKENS, INPUTS // 2], STAGE_LAYOUT)
    copied = begin - stride
    for ahead in gl.static_range(STAGES - 1):
        if ahead % STEPS == 0:
            copied += stride
            token = gl.minimum(copied + in_block, num_tokens - 1).to(gl.int64)
            at = x + (4 * token * x_token_stride)[:, None] + pair
        if copied < num_tokens:
            async_load(stages.index(ahead), at + ahead % STEPS * (INPUTS // 2))
        async_copy.commit_group()
    async_copy.wait_group(STAGES - 2)
    fence_async_shared()
    barrier()

    stage = 0
    for first in range(begin, num_tokens, stride):
        total = gl.zeros([TOKENS, OUTPUTS], gl.float32, ACC)
        for step in gl.static_range(STEPS):
            async_copy.wait_group(STAGES - 2)
            pairs = stages.index(stage).load(PAIRS)
            if (step + STAGES - 1) % STEPS == 0:
                copied += stride
                token = gl.minimum(copied + in_block, num_tokens - 1).to(gl.int64)
                at = x + (4 * token * x_token_stride)[:, None] + pair
            if copied < num_tokens:  # into the stage of the previous step
                free = stages.index(gl.where(stage == 0, STAGES - 1, stage - 1))
                async_load(free, at + (step + STAGES - 1) % STEPS * (INPUTS // 2))
            async_copy.commit_group()
            stage = gl.where(stage == STAGES - 1, 0, stage + 1)
            codes, x_scale = _quantise(pairs)
            x_scale = gl.convert_layout(x_scale, gl.SliceLayout(1, ACC))
            in_flight = ()
            for block in gl.static_range(BLOCKS):
                acc = gl.zeros([TOKENS, OUTPUTS], gl.float32, ACC)
                tile = weights.index(step * BLOCKS + block).permute((1, 0))
                acc = warpgroup_mma(codes, tile, acc, use_acc=False, is_async=True)
                in_flight = in_flight + (acc,)
            for block in gl.static_range(BLOCKS):
                row_scale = (first_row + block * OUTPUTS) // SCALE_N * scale_row_stride + step
                factor = (x_scale * gl.load(scale + row_scale))[:, None]
                acc = warpgroup_mma_wait(BLOCKS - 1 - block, deps=(in_flight[block],)) * factor
                if STEPS > 1:
                    total += acc
                else:
                    _store(out + block * OUTPUTS, out_token_stride, acc, first, num_tokens)
        if STEPS > 1:
            _store(out, out_token_stride, total, first, num_tokens)


def project_heads(call: ProjectHeads) -> None:
    x, weight, out = call.x, call.weight, call.out
    num_tokens, num_heads, inputs = x.shape[-3:]
    if call.lses is not None:
        x = merge_parts(call, call.lses)
    steps, blocks = inputs // INPUTS.value, weight.data.shape[1] // OUTPUTS.value
    blocks_of_cta = gcd(blocks, MAX_BLOCKS) if steps == 1 else 1
    shares = blocks // blocks_of_cta
    ctas_of_share = max(1, 2 * num_multiprocessors(x.device) // (num_heads * shares))
    ctas_of_share = min(ctas_of_share, cdiv(num_tokens, TOKENS.value))
    data, scale = weight.data.view(torch.int32), weight.scale
    _blocks_kernel[(ctas_of_share * num_heads * shares,)](
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
        BLOCKS=blocks_of_cta,
        SHARES=shares,
        SCALE_N=weight.scale_block[0],
        num_warps=4,
        **begins_early(x.device),
    )

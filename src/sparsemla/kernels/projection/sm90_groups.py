"""GEMMs per group of heads on Hopper, for e4m3 weights with scale blocks of 128 inputs.

``out[t, g] = W[g] x[t, g]`` with the thousands of inputs of DeepSeek-V4's groups. The portable
launch prepares the inputs: it merges parts, undoes the rotation and quantises. Then a persistent
kernel takes tiles of outputs and tokens in turn. For each step of 128 inputs, which share a scale,
TMA copies a tile of the weights and one of the inputs into a stage of a ring, and the product of
the step is scaled and added to a total.

- ``_few_kernel`` is bound by the bytes of the weights: tiles of 64 outputs, on M of the MMA, and of
  8 to 128 tokens, on N. V4-Flash has 128 such tiles, one for a multiprocessor. If there are fewer,
  several CTAs share the steps of a tile, and ``_sum_kernel`` adds their totals in order.
- ``_many_kernel`` is bound by the L2 cache and by MMAs: tiles of 128 outputs and of 128 or 256
  tokens. Each of two consumers has half of the tokens, 64 for an MMA. While one scales a product,
  the other's MMA runs.

Above 64 tokens, the tiles are those with the fewest bytes from the L2 cache for a multiprocessor.

Time line of a CTA:

    previous kernel  the inputs, quantised              |
    producer         weights of all stages, then wait   | inputs of all stages | both, step n
    consumer         wait                               | scales | MMA 0 | scale, add | MMA 1 | ...

Barriers:

    barrier         arrivals                waits      guards
    full [STAGES]   1, the producer's TMA   consumers  weights and inputs of a step
    empty [STAGES]  1, each consumer        producer   a stage, for reuse
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.early import begins_early, let_next_begin, wait_for_inputs
from sparsemla.kernels.common.gluon import descriptor, reinterpret, tma_load
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.projection.arguments import ProjectGroups
from sparsemla.kernels.projection.triton import inputs_of_groups

INPUTS = gl.constexpr(128)
"""Inputs of a step; they share a scale."""
FEW_OUTPUTS = gl.constexpr(64)
"""Outputs of a tile of few tokens: M of an MMA."""
MANY_OUTPUTS = gl.constexpr(128)
"""Outputs of a tile of many tokens: N of an MMA."""
TOKENS = gl.constexpr(64)
"""Tokens of an MMA of ``_many_kernel``."""
RING_BYTES = 192 * 1024
"""Shared memory of all stages."""
MAX_STAGES = 16
"""Most stages, half of the steps of a tile of DeepSeek-V4."""
MIN_STEPS = 4
"""Fewest steps for which a CTA is worth its share of the sum."""
FEW_REGISTERS = 96
"""Registers of a thread at the start: a CTA fits beside the programs that prepare the inputs."""
WIDE_REGISTERS = 128
"""The same for tiles of 128 tokens: a consumer gets 200, for a total and a product of 64 each."""

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
ROW = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
ROWS = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
ACC = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))
# Eight neighbouring outputs per thread: of a token per row, or of a token per column.
STORE_ROWS = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
STORE_COLUMNS = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
SCALES = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))


class Memory(NamedTuple):
    """Shared memory of a CTA."""

    weights: object  # [STAGES, outputs, 128] e4m3
    inputs: object  # [STAGES * boxes, tokens of a box, 128] e4m3
    full: object  # [STAGES]
    empty: object  # [STAGES]


class Shape(NamedTuple):
    """Sizes of the problem. The last two change from call to call."""

    groups: int
    outputs: int
    steps: int
    tokens: int
    token_tiles: int


class Scales(NamedTuple):
    """Scales of the inputs ``[G * steps, T]`` and of the weights, and outputs of a block."""

    inputs: Tensor
    weights: Tensor
    group_stride: int
    row_stride: int
    block: int


class Out(NamedTuple):
    """The results ``[T, G, N]``, or the totals of each split."""

    start: Tensor
    split_stride: int
    token_stride: int
    group_stride: int


@triton.constexpr_function
def _accumulator(tokens):
    """Layout of 64 outputs of some tokens."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, tokens, 32])


@gluon.jit
def _tile_of(job, shape, STEPS: gl.constexpr, OUTPUTS: gl.constexpr, WIDTH: gl.constexpr):
    """Group, first output, first token and first step of a job.

    The tiles of a group follow each other: those at work at a time read few weights and few inputs,
    which the L2 cache holds.
    """
    tiles = shape.outputs // OUTPUTS
    split = job // (shape.groups * shape.token_tiles * tiles)
    tile = job % (shape.groups * shape.token_tiles * tiles)
    group = tile // tiles // shape.token_tiles
    token = tile // tiles % shape.token_tiles * WIDTH
    return group, tile % tiles * OUTPUTS, token, split * STEPS


@gluon.jit
def _place_of(job, shape, STEPS: gl.constexpr, OUTPUTS: gl.constexpr, WIDTH: gl.constexpr):
    """Row and column of a job's weights, row and column of its inputs."""
    group, output, token, step = _tile_of(job, shape, STEPS, OUTPUTS, WIDTH)
    k = step * INPUTS
    return group * shape.outputs + output, k, token, group * (shape.steps * INPUTS) + k


@gluon.jit
def _load_weights(smem, weights, stage, place, step):
    """Start to copy the weights of a step of a job."""
    row, k, _, _ = place
    at = [row, k + step * INPUTS]
    tma_load(weights, at, smem.full.index(stage), smem.weights.index(stage))


@gluon.jit
def _load_inputs(smem, inputs, stage, place, step, BOXES: gl.constexpr):
    """Start to copy the boxes of inputs of a step of a job."""
    _, _, token, column = place
    for box in gl.static_range(BOXES):
        tile = smem.inputs.index(stage * BOXES + box)
        at = [token + box * tile.shape[0], column + step * INPUTS]
        tma_load(inputs, at, smem.full.index(stage), tile)


@gluon.jit
def _producer(
    num_jobs, smem, shape, weights, inputs, STEPS: gl.constexpr, STAGES: gl.constexpr,
    BOXES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Copy the steps of all jobs of a CTA; the first weights before the inputs are there."""
    OUTPUTS: gl.constexpr = smem.weights.shape[1]
    WIDTH: gl.constexpr = smem.inputs.shape[1] * BOXES
    BYTES: gl.constexpr = (OUTPUTS + WIDTH) * INPUTS
    first_job = gl.program_id(0)
    place = _place_of(first_job, shape, STEPS, OUTPUTS, WIDTH)
    for step in range(STAGES):
        mbarrier.expect(smem.full.index(step), BYTES)
        _load_weights(smem, weights, step, place, step)
    if EARLY:  # see kernels/common/early.py: an earlier kernel may write all but the weights
        gdc_wait()
    for step in range(STAGES):
        _load_inputs(smem, inputs, step, place, step, BOXES)
    stage = 0
    phase = 0
    for job in range(first_job, num_jobs, gl.num_programs(0)):
        place = _place_of(job, shape, STEPS, OUTPUTS, WIDTH)
        for step in range(gl.where(job == first_job, STAGES, 0), STEPS):
            mbarrier.wait(smem.empty.index(stage), phase)
            mbarrier.expect(smem.full.index(stage), BYTES)
            _load_weights(smem, weights, stage, place, step)
            _load_inputs(smem, inputs, stage, place, step, BOXES)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1


@gluon.jit
def _store_factors(factors, scales, shape, group, output, first, first_step, STEPS: gl.constexpr):
    """Store the products of both scales, for each step of a job and each token."""
    BLOCK_STEPS: gl.constexpr = factors.shape[0]
    WIDTH: gl.constexpr = factors.shape[1]
    step = gl.arange(0, BLOCK_STEPS, gl.SliceLayout(1, SCALES))
    token = first + gl.arange(0, WIDTH, gl.SliceLayout(0, SCALES))
    row = (group * shape.steps + first_step + step).to(gl.int64)
    real = (step < STEPS)[:, None] & (token < shape.tokens)[None, :]
    at = (row * shape.tokens)[:, None] + token[None, :]
    factor = gl.load(scales.inputs + at, mask=real, other=0.0)
    at = _scale_row(scales, group, output) + first_step + step
    factor *= gl.load(at, mask=step < STEPS, other=0.0)[:, None]
    reinterpret(factors, gl.float32, [BLOCK_STEPS, WIDTH], ROWS).store(factor)


@gluon.jit
def _scale_row(scales, group, output):
    """Scales of a block of weights, one for each step."""
    return scales.weights + group * scales.group_stride + output // scales.block * scales.row_stride


@gluon.jit
def _few_consumer(
    num_jobs, smem, factors, shape, scales, out, STEPS: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """Tiles of 64 outputs; ``factors`` has the products of both scales."""
    OUTPUTS: gl.constexpr = smem.weights.shape[1]
    WIDTH: gl.constexpr = smem.inputs.shape[1]
    LAYOUT: gl.constexpr = _accumulator(WIDTH)
    if EARLY:
        gdc_wait()
    stage = 0
    phase = 0
    for job in range(gl.program_id(0), num_jobs, gl.num_programs(0)):
        group, output, first, first_step = _tile_of(job, shape, STEPS, OUTPUTS, WIDTH)
        _store_factors(factors, scales, shape, group, output, first, first_step, STEPS)
        total = gl.zeros([OUTPUTS, WIDTH], gl.float32, LAYOUT)
        for step in range(STEPS):
            mbarrier.wait(smem.full.index(stage), phase)
            weights = smem.weights.index(stage)
            tokens = smem.inputs.index(stage).permute((1, 0))
            acc = gl.zeros([OUTPUTS, WIDTH], gl.float32, LAYOUT)
            acc = warpgroup_mma(weights, tokens, acc, use_acc=False, is_async=True)
            factor = factors.index(step).load(gl.SliceLayout(0, LAYOUT))
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(smem.empty.index(stage), count=1)
            total += acc * factor[None, :]
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1
        result = gl.convert_layout(total.to(out.start.dtype.element_ty), STORE_COLUMNS)
        row = output + gl.arange(0, OUTPUTS, gl.SliceLayout(1, STORE_COLUMNS))
        token = first + gl.arange(0, WIDTH, gl.SliceLayout(0, STORE_COLUMNS))
        start = out.start + (first_step // STEPS).to(gl.int64) * out.split_stride
        start += group.to(gl.int64) * out.group_stride
        at = (token.to(gl.int64) * out.token_stride)[None, :] + row[:, None]
        gl.store(start + at, result, mask=(token < shape.tokens)[None, :])


@gluon.jit
def _load_scales(scales, shape, group, output, first, step, PARTS: gl.constexpr):
    """A step's scales of the weights, of 64 tokens and, of two parts, of 64 more."""
    token = first + gl.arange(0, TOKENS, gl.SliceLayout(1, ACC))
    at = scales.inputs + (group * shape.steps + step).to(gl.int64) * shape.tokens
    of_weights = gl.load(_scale_row(scales, group, output) + step)
    low = gl.load(at + token, mask=token < shape.tokens, other=0.0)
    high = low
    if PARTS == 2:
        token += TOKENS
        high = gl.load(at + token, mask=token < shape.tokens, other=0.0)
    return of_weights, low, high


@gluon.jit
def _multiply(tokens, weights):
    """Products of 64 tokens and 128 outputs."""
    acc = gl.zeros([TOKENS, MANY_OUTPUTS], gl.float32, ACC)
    acc = warpgroup_mma(tokens, weights, acc, use_acc=False, is_async=True)
    return warpgroup_mma_wait(0, deps=(acc,))


@gluon.jit
def _store_rows(start, token_stride, total, first, num_tokens):
    """Store 64 tokens of 128 outputs; ``start`` is the first output of token 0."""
    total = gl.convert_layout(total.to(gl.bfloat16), STORE_ROWS)
    token = first + gl.arange(0, TOKENS, gl.SliceLayout(1, STORE_ROWS))
    output = gl.arange(0, MANY_OUTPUTS, gl.SliceLayout(0, STORE_ROWS))
    at = (token.to(gl.int64) * token_stride)[:, None] + output[None, :]
    gl.store(start + at, total, mask=(token < num_tokens)[:, None])


@gluon.jit
def _many_consumer(
    W: gl.constexpr, num_jobs, smem, shape, scales, out, PARTS: gl.constexpr, STEPS: gl.constexpr,
    STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """``PARTS`` times 64 tokens of each tile.

    The scales of a step are loaded a step ahead, and not multiplied before: that would wait.
    """
    if EARLY:
        gdc_wait()
    stage = 0
    phase = 0
    for job in range(gl.program_id(0), num_jobs, gl.num_programs(0)):
        group, output, first, _ = _tile_of(job, shape, STEPS, MANY_OUTPUTS, 2 * PARTS * TOKENS)
        first += W * PARTS * TOKENS
        following = _load_scales(scales, shape, group, output, first, 0, PARTS)
        low = gl.zeros([TOKENS, MANY_OUTPUTS], gl.float32, ACC)
        high = gl.zeros([TOKENS, MANY_OUTPUTS], gl.float32, ACC)
        for step in range(STEPS):
            of_weights, low_scale, high_scale = following
            ahead = gl.minimum(step + 1, STEPS - 1)
            following = _load_scales(scales, shape, group, output, first, ahead, PARTS)
            mbarrier.wait(smem.full.index(stage), phase)
            weights = smem.weights.index(stage).permute((1, 0))
            tokens = (2 * stage + W) * PARTS
            acc = _multiply(smem.inputs.index(tokens), weights)
            if PARTS == 2:
                low += acc * (low_scale * of_weights)[:, None]
                acc = _multiply(smem.inputs.index(tokens + 1), weights)
            mbarrier.arrive(smem.empty.index(stage), count=1)
            if PARTS == 2:
                high += acc * (high_scale * of_weights)[:, None]
            else:
                low += acc * (low_scale * of_weights)[:, None]
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1
        start = out.start + group.to(gl.int64) * out.group_stride + output
        _store_rows(start, out.token_stride, low, first, shape.tokens)
        if PARTS == 2:
            _store_rows(start, out.token_stride, high, first + TOKENS, shape.tokens)


@gluon.jit
def _allocate(
    OUTPUTS: gl.constexpr, WIDTH: gl.constexpr, BOXES: gl.constexpr, STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
):  # fmt: skip
    """Shared memory with initialised barriers."""
    smem = Memory(
        weights=gl.allocate_shared_memory(gl.float8e4nv, [STAGES, OUTPUTS, INPUTS], TILE),
        inputs=gl.allocate_shared_memory(gl.float8e4nv, [STAGES * BOXES, WIDTH, INPUTS], TILE),
        full=gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        empty=gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    for stage in gl.static_range(STAGES):
        mbarrier.init(smem.full.index(stage), count=1)
        mbarrier.init(smem.empty.index(stage), count=CONSUMERS)
    fence_async_shared()
    return smem


@gluon.jit(do_not_specialize=["num_jobs", "num_tokens", "token_tiles"])
def _few_kernel(
    num_jobs, num_tokens, token_tiles, shape, weights, inputs, scales, out, WIDTH: gl.constexpr,
    STEPS: gl.constexpr, BLOCK_STEPS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Tiles of 64 outputs and ``WIDTH`` tokens, ``STEPS`` steps of them at a time."""
    if EARLY:
        gdc_launch_dependents()
    shape = Shape(*shape, num_tokens, token_tiles)
    smem = _allocate(FEW_OUTPUTS, WIDTH, 1, STAGES, 1)
    factors = gl.allocate_shared_memory(gl.float32, [BLOCK_STEPS, WIDTH], ROW)
    gl.warp_specialize(
        [
            (_few_consumer, (num_jobs, smem, factors, shape, scales, out, STEPS, STAGES, EARLY)),
            (_producer, (num_jobs, smem, shape, weights, inputs, STEPS, STAGES, 1, EARLY)),
        ],
        [1],
        [56],
    )


@gluon.jit(do_not_specialize=["num_jobs", "num_tokens", "token_tiles"])
def _many_kernel(
    num_jobs, num_tokens, token_tiles, shape, weights, inputs, scales, out, PARTS: gl.constexpr,
    STEPS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Tiles of 128 outputs and ``PARTS`` times 128 tokens."""
    if EARLY:
        gdc_launch_dependents()
    shape = Shape(*shape, num_tokens, token_tiles)
    smem = _allocate(MANY_OUTPUTS, TOKENS, 2 * PARTS, STAGES, 2)
    gl.warp_specialize(
        [
            (_many_consumer, (0, num_jobs, smem, shape, scales, out, PARTS, STEPS, STAGES, EARLY)),
            (_many_consumer, (1, num_jobs, smem, shape, scales, out, PARTS, STEPS, STAGES, EARLY)),
            (_producer, (num_jobs, smem, shape, weights, inputs, STEPS, STAGES, 2 * PARTS, EARLY)),
        ],
        [4, 1],
        [224, 56],
    )


@triton.jit
def _sum_kernel(
    parts, out, num_groups, split_stride, token_stride, group_stride, SPLITS: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Add the splits ``[SPLITS, T, G, N]`` of a token and group, in order."""
    let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    row = tl.program_id(0)
    output = tl.arange(0, BLOCK)
    real = output < N
    parts += row.to(tl.int64) * N + output
    total = tl.load(parts, mask=real, other=0.0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts + split * split_stride, mask=real, other=0.0)
    out += (row // num_groups).to(tl.int64) * token_stride + row % num_groups * group_stride
    tl.store(out + output, total.to(tl.bfloat16), mask=real)


class Tiles(NamedTuple):
    """Outputs and tokens of a tile; 64 outputs are for ``_few_kernel``."""

    outputs: int
    tokens: int


def _num_tiles(tiles: Tiles, num_tokens: int, num_groups: int, outputs: int) -> int:
    return num_groups * (outputs // tiles.outputs) * cdiv(num_tokens, tiles.tokens)


def _tiles_of(num_tokens: int, num_groups: int, outputs: int, processors: int) -> Tiles:
    few, many = FEW_OUTPUTS.value, MANY_OUTPUTS.value
    if num_tokens <= 64:
        return Tiles(few, max(8, next_power_of_2(num_tokens)))

    def rows_of_a_processor(tiles: Tiles) -> int:
        """Rows of weights and inputs that a multiprocessor reads in each step of all its tiles."""
        turns = cdiv(_num_tiles(tiles, num_tokens, num_groups, outputs), processors)
        return turns * (tiles.outputs + tiles.tokens)

    return min(Tiles(many, 256), Tiles(many, 128), Tiles(few, 128), key=rows_of_a_processor)


def project_groups(call: ProjectGroups) -> None:
    x, weight, out = call.x, call.weight, call.out
    if out.numel() == 0:
        return
    rows, input_scales = inputs_of_groups(call)
    num_tokens, num_groups, inputs = rows.shape
    outputs, steps = weight.data.shape[1], inputs // INPUTS.value
    processors = num_multiprocessors(x.device)
    tiles = _tiles_of(num_tokens, num_groups, outputs, processors)
    few = tiles.outputs == FEW_OUTPUTS.value
    jobs, splits = _num_tiles(tiles, num_tokens, num_groups, outputs), 1
    while few and 2 * jobs * splits <= processors and steps % (2 * splits * MIN_STEPS) == 0:
        splits *= 2
    results = out
    if splits > 1:
        results = out.new_empty((splits, *out.shape), dtype=torch.float32)
    codes = weight.data.view(torch.float8_e4m3fn).flatten(0, 1)
    rows = rows.view(torch.float8_e4m3fn).flatten(1)
    box = tiles.tokens if few else TOKENS.value
    boxes = [tiles.outputs, INPUTS.value], [box, INPUTS.value]
    arguments = (
        jobs * splits,
        num_tokens,
        cdiv(num_tokens, tiles.tokens),
        (num_groups, outputs, steps),
        *(
            descriptor(matrix, list(matrix.shape), list(matrix.stride()), box, TILE.value)
            for matrix, box in zip((codes, rows), boxes, strict=True)
        ),
        Scales(input_scales, weight.scale, *weight.scale.stride()[:2], weight.scale_block[0]),
        Out(results, results.stride(0) if splits > 1 else 0, *results.stride()[-3:-1]),
    )
    stages = RING_BYTES // ((tiles.outputs + tiles.tokens) * INPUTS.value)
    constants = {
        "STEPS": steps // splits,
        "STAGES": min(stages, MAX_STAGES, steps // splits),
        "num_warps": 4,
        **begins_early(x.device),
    }
    grid = (min(jobs * splits, processors),)
    if few:
        _few_kernel[grid](
            *arguments,
            WIDTH=tiles.tokens,
            BLOCK_STEPS=next_power_of_2(steps // splits),
            maxnreg=FEW_REGISTERS if tiles.tokens <= 64 else WIDE_REGISTERS,
            **constants,
        )
    else:
        _many_kernel[grid](*arguments, PARTS=tiles.tokens // (2 * TOKENS.value), **constants)
    if splits > 1:
        num_programs = num_tokens * num_groups
        _sum_kernel[(num_programs,)](
            results,
            out,
            num_groups,
            results.stride(0),
            *out.stride()[:2],
            SPLITS=splits,
            N=outputs,
            BLOCK=next_power_of_2(outputs),
            num_warps=4,
            **begins_early(x.device, 4 * num_programs),
        )

"""Decode on Hopper with FP8 products over an fp8_ds_mla cache, for 64 query rows that share keys.

The kernel of :mod:`.fp8_products` with four scales for each key, and no rounding of rows: both MMAs
multiply the codes as the cache stores them.

S. A key has a scale for each piece of 128 dims, so the products of the pieces are summed in
Horner's form, ``((S0 s0/s1 + S1) s1/s2 + S2) s2/s3 + S3) s3``, in the registers of one. The pieces
of the next S, which wait for each other, run between the MMAs of P V.

P. With z = S + log2(largest scale of the key), P = exp2(z - m) is at most 2^LAG. A piece of the
values takes P times its scale over the largest, multiplied in float16 and rounded to e4m3, so a
block has four P.

The producer loads scales a block ahead and lists two, and stores the factors of a block's keys
while its rows arrive. Left and right take turns as in prefill. A pair of blocks takes 7400 cycles,
3000 more than in prefill: for a block of its own, a warpgroup issues some 400 instructions more,
one every four cycles, and waits for each piece of S. It hardly waits for memory.

Barriers that differ from those of :mod:`.fp8_products`:

    barrier     number      arrivals                       waits        guards
    KV_FULL     4 by block  128 copies' threads, and 1,    both         codes, RoPE dims and
                            the producer's stores                       factors of a block
    ROPE_EMPTY  2 by block  1, the block's scorer          producer     RoPE dims, for reuse

Shared memory in KiB: queries 32 + 8, codes 4 x 32, RoPE dims 2 x 8, P 2 x 16, factors 4 x 2: 224,
and 2 of the rest.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsemla.cache import PagedCache
from sparsemla.kernels.attention.sm90.abi import KeyList, Queries, QueryRows, Results
from sparsemla.kernels.attention.sm90.fp8 import cache_rows, code_offsets, scale_offsets
from sparsemla.kernels.attention.sm90.fp8_products import (
    CODES,
    COPY_CODES,
    COPY_KEYS,
    COPY_ROPE,
    HORNER,
    INVERSE,
    KV_EMPTY,
    KV_FULL,
    LOG_SCALE,
    ROPE_EMPTY,
    ROPE_KEYS,
    STAGES,
    allocate,
    announce_pairs,
    consumer,
    factor_order,
    load_list,
    reciprocal,
    weight_order,
)
from sparsemla.kernels.attention.sm90.tiles import LOG2E, find_key_blocks, is_slot
from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.gluon import async_load, reinterpret

LOAD_SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
SCALE_KEYS = gl.constexpr(gl.SliceLayout(1, LOAD_SCALES))

SMALLEST_PART = gl.constexpr(2.0**-40)
"""Scales count as at least this part of a key's largest, so that their quotients are finite."""
SMALLEST = gl.constexpr(2.0**-80)
"""A key's largest scale counts as at least this, and has a finite inverse."""


@gluon.jit
def log2(x):
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def slot_or_none(slots, main):
    """Slots of a list, -1 for invalid ones."""
    slots = slots.to(gl.int64)
    return gl.where(is_slot(slots, main.num_slots), slots, -1).to(gl.int32)


@gluon.jit
def load_scales(slots, rows, L: gl.constexpr):
    """The four scales of each key of a block; 1 without a key."""
    slots = gl.convert_layout(slots, SCALE_KEYS)
    four = gl.arange(0, 4, gl.SliceLayout(0, LOAD_SCALES))
    scales = rows.words.to(gl.pointer_type(gl.float32), bitcast=True)
    at = scales + scale_offsets(slots, L)[:, None] + four[None, :]
    return gl.load(at, mask=(slots >= 0)[:, None], other=1.0)


@gluon.jit
def store_factors(scales, valid, stage, smem):
    """Store what a block's keys multiply: S, P and the sums of P. An invalid key's P is 0."""
    even, odd = gl.split(scales.reshape(64, 2, 2))
    s0, s2 = gl.split(even)
    s1, s3 = gl.split(odd)
    largest = gl.maximum(gl.maximum(s0, s1), gl.maximum(s2, s3))
    largest = gl.maximum(largest, SMALLEST)
    least = largest * SMALLEST_PART
    s0 = gl.where(s0 < least, least, s0)
    s1 = gl.where(s1 < least, least, s1)
    s2 = gl.where(s2 < least, least, s2)
    s3 = gl.where(s3 < least, least, s3)
    inverse = reciprocal(largest)
    valid = gl.convert_layout(valid, largest.type.layout)  # moves nothing
    log = gl.where(valid, log2(largest), float("-inf"))
    smem.factors[HORNER[0]].index(stage).store(factor_order(s0 * reciprocal(s1)))
    smem.factors[HORNER[1]].index(stage).store(factor_order(s1 * reciprocal(s2)))
    smem.factors[HORNER[2]].index(stage).store(factor_order(s2 * reciprocal(s3)))
    smem.factors[HORNER[3]].index(stage).store(factor_order(s3))
    smem.factors[LOG_SCALE].index(stage).store(factor_order(log))
    smem.factors[INVERSE].index(stage).store(factor_order(inverse))
    smem.weights[0].index(stage).store(weight_order((s0 * inverse).to(gl.float16)))
    smem.weights[1].index(stage).store(weight_order((s1 * inverse).to(gl.float16)))
    smem.weights[2].index(stage).store(weight_order((s2 * inverse).to(gl.float16)))
    smem.weights[3].index(stage).store(weight_order((s3 * inverse).to(gl.float16)))


@gluon.jit
def copy_rows(slots, rows, step, smem, L: gl.constexpr):
    """Copy codes and RoPE dims of a block of keys, each once its stage is empty."""
    stage = step % STAGES
    slots = gl.convert_layout(slots, COPY_KEYS)
    codes = rows.words.to(gl.pointer_type(gl.uint8), bitcast=True) + 4 * code_offsets(slots, L)
    tail = gl.convert_layout(codes, ROPE_KEYS).to(gl.pointer_type(gl.bfloat16), bitcast=True)
    valid = (slots >= 0)[:, None]
    rope_valid = (gl.convert_layout(slots, ROPE_KEYS) >= 0)[:, None]
    dims = gl.arange(0, 512, gl.SliceLayout(0, COPY_CODES))
    rope = L.tail_at + gl.arange(0, 64, gl.SliceLayout(0, COPY_ROPE))
    mbarrier.wait(smem.bar.index(KV_EMPTY + stage), step // STAGES & 1 ^ 1)
    to = reinterpret(smem.kv.index(stage), gl.uint8, [64, 512], CODES)
    async_load(to, codes[:, None] + dims[None, :], mask=valid)
    mbarrier.wait(smem.bar.index(ROPE_EMPTY + step % 2), step // 2 & 1 ^ 1)
    async_load(smem.k_rope.index(step % 2), tail[:, None] + rope[None, :], mask=rope_valid)
    async_copy.mbarrier_arrive(smem.bar.index(KV_FULL + stage), increment_count=False)


@gluon.jit
def producer(num_tiles, rows, main, shape, smem, L: gl.constexpr):
    """The producer warpgroup: it copies keys and computes their factors."""
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        blocks = find_key_blocks(tile, main, None, shape, None, None, False)
        block = blocks.first
        slots = slot_or_none(load_list(blocks, block), main)
        scales = load_scales(slots, rows, L)
        next_list = load_list(blocks, block + 1)
        later_list = load_list(blocks, block + 2)
        # The end of the valid slots is found during the copy of the first pair.
        num_blocks = 2
        i = 0
        while i < num_blocks:
            next_slots = slot_or_none(next_list, main)
            next_scales = load_scales(next_slots, rows, L)
            next_list = later_list
            later_list = load_list(blocks, block + 3)
            copy_rows(slots, rows, step, smem, L)
            valid = gl.convert_layout(slots, SCALE_KEYS) >= 0
            store_factors(scales, valid, step % STAGES, smem)
            mbarrier.arrive(smem.bar.index(KV_FULL + step % STAGES), count=1)
            if i == 1:
                num_blocks = announce_pairs(tile, blocks, main, smem)
            i += 1
            block += 1
            step += 1
            slots = next_slots
            scales = next_scales


@gluon.jit
def _attend_codes(num_tiles, queries, rows, main, results, shape, scale_log2, L: gl.constexpr):
    """Attention of tiles of 64 heads of a token over its list of rows of a cache."""
    smem = allocate(4)
    gdc_launch_dependents()
    gdc_wait()  # the prologue above reads nothing that an earlier kernel writes
    gl.warp_specialize(
        [
            (consumer, (num_tiles, queries, shape, results, smem, scale_log2, 0, 4)),
            (consumer, (num_tiles, queries, shape, results, smem, scale_log2, 1, 4)),
            (producer, (num_tiles, rows, main, shape, smem, L)),
        ],
        [4, 4],
        [232, 40],
    )


def launch(
    queries: Queries,
    cache: PagedCache,
    stream: KeyList,
    results: Results,
    shape: QueryRows,
    softmax_scale: float,
    *,
    num_groups: int,
) -> None:
    """Launch over the heads of ``num_groups`` tokens and the rows that they select, unsplit."""
    num_tiles = num_groups * -(-shape.num_rows // 64)
    rows, layout = cache_rows(cache)
    _attend_codes[(min(num_tiles, num_multiprocessors(queries.q.device)),)](
        num_tiles,
        queries,
        rows,
        stream,
        results,
        shape,
        softmax_scale * LOG2E.value,
        L=layout,
        num_warps=4,
        launch_pdl=True,
    )

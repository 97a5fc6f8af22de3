"""Attention on SM90 over an FP8 cache, for up to 32 query rows that share keys.

A CTA attends to one split of the keys of one group of query rows: the heads of a token, or all
rows of a request in dense decode. Both MMAs are transposed (swap-AB), ``S^T = K Q^T`` and
``O^T = V^T P^T``. Keys and value dims lie on M; the rows lie on N, which is padded to 16 or 32. As
in the other kernels, BLOCK_M is the number of query rows and BLOCK_N the keys of a KV block. Eight
consumer warps work on one KV block of 128 keys while four producer warps copy the next one, in its
stored format, to the other of two stages.

wgmma takes its left operand, here K or V, from registers. So the e4m3 codes are dequantised on the
way from shared memory to the tensor cores and never written back: as [keys, dims] for the QK MMA
and once more as [dims, keys] for the PV MMA. They become float16, which holds e4m3 exactly and
takes one instruction for two codes (bfloat16: six). float16's range needs care in three places:

- *Q*: a power of two for each row brings its largest element to 2^14..2^15.
- *S* is computed for each block of dims that shares a scale, and scaled in float32. That is exact
  if the scale is a power of two. If a KV block has any other scale, its S is computed again from
  keys that are rounded to bfloat16, as the format defines them: the operand is the code times the
  scale's mantissa, and S is scaled by the scale's power of two.
- *P and V* share the scales. Let ``bound`` be the smallest power of two that is at least every
  scale of a key. P is stored times ``bound * 2^15``, and V is the code times ``scale / bound``. If
  all values of a key have one scale, P takes that scale instead, and V is the code. m is the
  running maximum of ``S + log2(bound)``, and not of S, so that ``P * bound`` is at most 1.

Time line, with cycles of a KV block for 16 (32) rows at batch 128::

    consumers   QK MMA i            softmax i      PV MMA i         | QK MMA i+1 ...
                1850 (2240)         1100 (1650)    1670 (2050)      |
                dims b+1 are        P is stored    32 keys are      |
                dequantised under                  dequantised      |
                the MMA of dims b                  under MMAs of 32 |
    producer    copy i+1: scales, 8 x 16 keys      | wait for empty | copy i+2 ...
    stage 0     i ......................................... empty     i+2 .............
    stage 1     ................ i+1 lands ........... full ...........................

Barriers:

    barrier   number  arrivals                waits          guards
    kv_full   2       128 copies' threads     all consumers  codes, RoPE dims, scales of a stage
    kv_empty  2       1, the consumers, when  the producer   the same stage
                      the block's last codes
                      are in registers

Shared memory for the 656-byte format and 16 rows: codes 128 KiB, RoPE dims 32, Q 18, scales 4, P 4,
the rest 4; 190 KiB in all. A consumer thread has 232 registers, of which O takes 32 (64), and a
producer thread 40.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsemla.cache import PagedCache
from sparsemla.formats import CacheFormat
from sparsemla.kernels.attention import calls
from sparsemla.kernels.attention.arguments import DenseDecode, SparseDecode, SparsePrefill
from sparsemla.kernels.attention.operands import KeyList, Queries, QueryRows, Results
from sparsemla.kernels.attention.rows import (
    LN2,
    LOG2E,
    LOWEST,
    VALUE_DIM,
    decode_e8m0,
    is_slot,
    locate,
)
from sparsemla.kernels.attention.sm90.chunks import permute_to_operand
from sparsemla.kernels.attention.sm90.layouts import (
    COPY_LONG_ROWS,
    COPY_ROPE_CODES,
    HALF_DIM,
    LIST_8,
    LOAD_ROWS_8,
    RAW_128,
    RAW_ROPE,
    ROPE_DIM,
    THREADS,
    THREADS_8,
    UNSWIZZLED,
    WARPGROUP,
    k_layout,
    out_layout,
    p_layout,
    scale_layout,
    v_layout,
)
from sparsemla.kernels.attention.sm90.layouts import FEW_HEADS_BLOCK_N as BLOCK_N
from sparsemla.kernels.attention.sm90.layouts import FEW_HEADS_MMA_K as MMA_K
from sparsemla.kernels.attention.sm90.swap_ab import (
    KeyRange,
    find_keys,
    load_entries,
    load_queries,
    sum_key_pairs,
)
from sparsemla.kernels.attention.sm90.tiles import group_of_program, rows_of_group, to_bf16, to_f16
from sparsemla.kernels.common.gluon import async_load, opaque_zero, reinterpret
from sparsemla.kernels.common.hopper import COPY, PLAIN, TILE
from sparsemla.kernels.common.paged import cache_arguments

STAGES = gl.constexpr(2)
COPY_KEYS = gl.constexpr(16)
"""Keys that the producer copies at once."""
P_RANGE = gl.constexpr(32768.0)
"""Upper bound of P as it is stored in float16."""


class SharedMemory(NamedTuple):
    """Shared memory of a CTA with ``BLOCK_M`` padded query rows, and its barriers (table above)."""

    q: gl.shared_memory_descriptor
    """float16 [2, BLOCK_M, HALF_DIM]: halves of dims 0 to 511. Stored and read by the consumers."""
    q_rope: gl.shared_memory_descriptor
    """[1, BLOCK_M, ROPE_DIM]: bfloat16, or float16 if RoPE dims are e4m3. By and for the same."""
    k: gl.shared_memory_descriptor
    """uint8 [STAGES, BLOCK_N, VALUE_DIM]: e4m3 codes. Producer to consumers."""
    k_rope: gl.shared_memory_descriptor
    """[STAGES, BLOCK_N, ROPE_DIM]: bfloat16, or uint8 codes. Producer to consumers."""
    scales: gl.shared_memory_descriptor
    """int32 [STAGES, BLOCK_N, words]: scales as stored. Producer to consumers."""
    starts: gl.shared_memory_descriptor
    """int64 [2, BLOCK_N]: starts of rows' e4m3 and bfloat16 parts. By and for the producer."""
    p: gl.shared_memory_descriptor
    """float16 [1 or 2, BLOCK_N, BLOCK_M]: P times its key's factor and ``P_RANGE``; then, if there
    are bfloat16 value dims, P as bfloat16. By and for the consumers, as all below."""
    v_factors: gl.shared_memory_descriptor
    """float16 [dim blocks, BLOCK_N]: ``scale / bound`` of each block of dims."""
    m: gl.shared_memory_descriptor
    """float32 [BLOCK_M]: running maximum. It is kept here as registers are short."""
    row_factors: gl.shared_memory_descriptor
    """float32 [BLOCK_M]: the factor of each row's S; at the end, the factor of its O."""
    limits: gl.shared_memory_descriptor
    """int32 [BLOCK_M]: keys that each row may attend to, if causal."""
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor


# 4 codes to float16.
DEQUANTISE = gl.constexpr("""{
    .reg .b16 l, h;
    mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }""")

# 4 dims of two keys to float16, the two keys of a dim side by side as the PV MMA takes them.
DEQUANTISE_KEY_PAIRS = gl.constexpr("""{
    .reg .b32 x, y; .reg .b16 a, b, c, d;
    prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362;
    mov.b32 {a, b}, x; mov.b32 {c, d}, y;
    cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;
    cvt.rn.f16x2.e4m3x2 $2, c; cvt.rn.f16x2.e4m3x2 $3, d; }""")
# And times the float16 factors of the two keys, which are the same for all 4 dims.
SCALE_KEY_PAIRS = gl.constexpr("""{
    .reg .b32 x, y, p, q, r, s; .reg .b16 a, b, c, d;
    prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362;
    mov.b32 {a, b}, x; mov.b32 {c, d}, y;
    cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b;
    cvt.rn.f16x2.e4m3x2 r, c; cvt.rn.f16x2.e4m3x2 s, d;
    mul.rn.f16x2 $0, p, $6; mul.rn.f16x2 $1, q, $6;
    mul.rn.f16x2 $2, r, $6; mul.rn.f16x2 $3, s, $6; }""")

# Two float16 times float32, rounded to bfloat16 and then to float16.
SCALE_AND_ROUND = gl.constexpr("""{
    .reg .b16 l, h; .reg .f32 x, y; .reg .b32 a, b;
    mov.b32 {l, h}, $1; cvt.f32.f16 x, l; cvt.f32.f16 y, h;
    mul.rn.f32 x, x, $2; mul.rn.f32 y, y, $3; cvt.rn.bf16x2.f32 a, y, x;
    shl.b32 b, a, 16; and.b32 a, a, 0xFFFF0000; mov.b32 x, b; mov.b32 y, a;
    cvt.rn.f16x2.f32 $0, y, x; }""")


@triton.constexpr_function
def dims_of_block(scale_block):
    """Dims of a block, for one QK MMA: the dims that share a scale, at most 128."""
    return 64 if scale_block == 64 else 128


@triton.constexpr_function
def num_dim_blocks(fp8_dim, scale_block):
    """Blocks of e4m3 among the value dims."""
    return min(fp8_dim, VALUE_DIM.value) // dims_of_block(scale_block)


@triton.constexpr_function
def has_v_factors(fp8_dim, scale_block):
    """Whether the values of a key have more than one scale."""
    return scale_block not in (0, fp8_dim)


@triton.constexpr_function
def scale_words(fp8_dim, scale_block, itemsize):
    """32-bit words that hold the scales of a row."""
    num_scales = -(-fp8_dim // scale_block)
    return -(-num_scales * itemsize // 4)


@triton.constexpr_function
def alignment(page, row, itemsize):
    """Alignment of row starts, in elements; at most 16 bytes."""
    return math.gcd(16 // itemsize, page, row)


@gluon.jit
def resolve_slots(entries, at, num_slots, L: gl.constexpr, PAGED: gl.constexpr):
    """Slots of the keys at positions ``at``.

    Call this as late as possible, as it waits for the load of ``entries``.
    """
    if PAGED:
        known = is_slot(entries, num_slots // L.page_size)
        slots = gl.where(known, entries, -1).to(gl.int64) * L.page_size + at % L.page_size
        entries = gl.where(known, slots, -1)
    return entries


@gluon.jit
def store_starts(to, page, row, valid, PAGE: gl.constexpr, ROW: gl.constexpr):
    """Store the starts of rows, in the unit of the strides ``PAGE`` and ``ROW``; -1 for no slot."""
    start = page * PAGE + row * ROW
    reinterpret(to, gl.int64, [BLOCK_N], PLAIN).store(gl.where(valid, start, -1))


@gluon.jit
def copy_keys(to, group, source, starts, END: gl.constexpr, UNIT: gl.constexpr, COPY: gl.constexpr):
    """Copy dims of ``COPY_KEYS`` rows; dims from ``END`` on, and rows of no slot, are 0."""
    starts = reinterpret(starts, gl.int64, [BLOCK_N // COPY_KEYS, COPY_KEYS], PLAIN)
    start = starts.index(group).load(gl.SliceLayout(1, COPY))[:, None]
    dim = gl.arange(0, to.shape[1], gl.SliceLayout(0, COPY))[None, :]
    real = start >= 0
    if to.shape[1] > END:
        real = real & (dim < END)
    async_load(to, source + start * UNIT + dim, mask=real)


@gluon.jit
def copy_scales(to, rows, page, row, valid, L: gl.constexpr):
    """Copy a block's scales as 32-bit words, one key per thread."""
    SIZE: gl.constexpr = rows.scales.dtype.element_ty.primitive_bitwidth // 8
    WORDS: gl.constexpr = scale_words(L.fp8_dim, L.scale_block, SIZE)
    COPY: gl.constexpr = gl.BlockedLayout([1, to.shape[1]], [32, 1], [4, 1], [1, 0])
    first = page * (L.scales_strides[0] * SIZE // 4) + row * (L.scales_strides[1] * SIZE // 4)
    first = gl.convert_layout(first, gl.SliceLayout(1, COPY))[:, None]
    valid = gl.convert_layout(valid, gl.SliceLayout(1, COPY))[:, None]
    word = gl.arange(0, to.shape[1], gl.SliceLayout(0, COPY))[None, :]
    source = rows.scales.to(gl.pointer_type(gl.int32), bitcast=True)
    if to.shape[1] > WORDS:
        valid = valid & (word < WORDS)
    async_load(to, source + first + word, mask=valid)


@gluon.jit
def copy_blocks(keys, first_block, smem, L: gl.constexpr, PAGED: gl.constexpr):
    """Copy the blocks of a stream, in their stored format, to stages that are empty."""
    rows = keys.rows
    MIXED: gl.constexpr = L.fp8_dim < L.head_dim
    UNIT: gl.constexpr = alignment(L.fp8_strides[0], L.fp8_strides[1], 1)
    PAGE: gl.constexpr = L.fp8_strides[0] // UNIT
    ROW: gl.constexpr = L.fp8_strides[1] // UNIT
    if MIXED:
        BF16_UNIT: gl.constexpr = alignment(L.bf16_strides[0], L.bf16_strides[1], 2)
        BF16_PAGE: gl.constexpr = L.bf16_strides[0] // BF16_UNIT
        BF16_ROW: gl.constexpr = L.bf16_strides[1] // BF16_UNIT
    GROUPS: gl.constexpr = BLOCK_N // COPY_KEYS
    k_groups = reinterpret(smem.k, gl.uint8, [STAGES * GROUPS, COPY_KEYS, VALUE_DIM], RAW_128)
    at = keys.begin + gl.arange(0, BLOCK_N, THREADS)
    entries = load_entries(keys.entries, at, keys.end, L, PAGED)
    for i in range(keys.num_blocks):
        slots = resolve_slots(entries, at, rows.num_slots, L, PAGED)
        at += BLOCK_N
        entries = load_entries(keys.entries, at, keys.end, L, PAGED)
        valid = is_slot(slots, rows.num_slots)
        page, row = locate(gl.where(valid, slots, 0), L)
        starts = smem.starts.index(0)
        store_starts(starts, page, row, valid, PAGE, ROW)
        if MIXED:
            bf16_starts = smem.starts.index(1)
            store_starts(bf16_starts, page, row, valid, BF16_PAGE, BF16_ROW)
        stage = (first_block + i) % STAGES
        mbarrier.wait(smem.kv_empty.index(stage), (first_block + i) // STAGES & 1 ^ 1)
        if L.scale_block > 0:
            copy_scales(smem.scales.index(stage), rows, page, row, valid, L)
        for j in range(GROUPS):
            group = stage * GROUPS + j
            copy_keys(k_groups.index(group), j, rows.fp8, starts, L.fp8_dim, UNIT, COPY_LONG_ROWS)
            if MIXED:
                to = reinterpret(
                    smem.k_rope, gl.bfloat16, [STAGES * GROUPS, COPY_KEYS, ROPE_DIM], TILE
                )
                copy_keys(to.index(group), j, rows.bf16, bf16_starts, ROPE_DIM, BF16_UNIT, COPY)
            elif L.fp8_dim > VALUE_DIM:
                to = reinterpret(
                    smem.k_rope, gl.uint8, [STAGES * GROUPS, COPY_KEYS, ROPE_DIM], RAW_ROPE
                )
                rope = rows.fp8 + VALUE_DIM
                copy_keys(to.index(group), j, rope, starts, ROPE_DIM, UNIT, COPY_ROPE_CODES)
        async_copy.mbarrier_arrive(smem.kv_full.index(stage), increment_count=False)


@gluon.jit
def producer(keys, extra_keys, smem, L: gl.constexpr, EXTRA: gl.constexpr, PAGED: gl.constexpr):
    """The producer warps: copy the blocks of both streams, one after the other."""
    copy_blocks(keys, 0, smem, L, PAGED)
    if EXTRA is not None:
        copy_blocks(extra_keys, keys.num_blocks, smem, EXTRA, PAGED)


@gluon.jit
def load_scale(rows, stage, smem, START: gl.constexpr, L: gl.constexpr, LAYOUT: gl.constexpr):
    """float32 scale of dim ``START`` of each key of a block."""
    if L.scale_block == 0:
        scale = gl.full([BLOCK_N], 1.0, gl.float32, LAYOUT)
    else:
        SIZE: gl.constexpr = rows.scales.dtype.element_ty.primitive_bitwidth // 8
        INDEX: gl.constexpr = START // L.scale_block
        word = smem.scales.index(stage).slice(INDEX * SIZE // 4, 1, dim=1)
        bits = gl.convert_layout(word.load(LAYOUT.parent).reshape(BLOCK_N), LAYOUT)
        if SIZE == 1:
            scale = decode_e8m0((bits >> (INDEX % 4 * 8)) & 0xFF)
        else:
            scale = bits.to(gl.float32, bitcast=True)
    return scale


@gluon.jit
def load_k(codes, WIDTH: gl.constexpr, ACC: gl.constexpr):
    """Codes of a block of dims as the left operand of the QK MMA, not scaled."""
    x = gl.inline_asm_elementwise(
        DEQUANTISE, "=r,=r,r", [codes.load(k_layout(WIDTH))], dtype=gl.float16, is_pure=True, pack=4
    )
    return gl.convert_layout(permute_to_operand(x, WIDTH), gl.DotOperandLayout(0, ACC, 2))


@gluon.jit
def load_v(codes, v_factors, STEP: gl.constexpr, L: gl.constexpr, ACC: gl.constexpr):
    """``MMA_K`` keys of a block as the left operand of the PV MMA.

    The dequantising instructions put neighbouring keys in the place of neighbouring dims, so the
    axes are swapped.
    """
    x = codes.slice(STEP * MMA_K, MMA_K, dim=0).load(v_layout())
    if has_v_factors(L.fp8_dim, L.scale_block):
        DIM_BLOCKS: gl.constexpr = VALUE_DIM // dims_of_block(L.scale_block)
        x = x.reshape(MMA_K // 2, 2, DIM_BLOCKS, VALUE_DIM // DIM_BLOCKS)
        LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
        pairs = reinterpret(v_factors, gl.int32, [DIM_BLOCKS, BLOCK_N // 2], UNSWIZZLED)
        factor = pairs.slice(STEP * MMA_K // 2, MMA_K // 2, dim=1)
        factor = factor.permute((1, 0)).load(LAYOUT)
        x, factor = gl.broadcast(x, factor[:, None, :, None])
        x = gl.inline_asm_elementwise(
            SCALE_KEY_PAIRS,
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [x, factor],
            dtype=gl.float16,
            is_pure=True,
            pack=8,
        )
    else:
        x = gl.inline_asm_elementwise(
            DEQUANTISE_KEY_PAIRS, "=r,=r,=r,=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=8
        )
    x = x.reshape(MMA_K // 8, 4, 2, 8, 8, 2, 2, 2).permute(5, 2, 3, 6, 4, 0, 1, 7)
    return gl.convert_layout(x.reshape(VALUE_DIM, MMA_K), gl.DotOperandLayout(0, ACC, 2))


@gluon.jit
def order_dims(acc):
    """O in the order of its dims. :func:`load_v` permutes the dims on M."""
    BLOCK_M: gl.constexpr = acc.shape[1]
    acc = acc.reshape(2, 2, 8, 2, 8, BLOCK_M).permute(2, 4, 0, 1, 3, 5)
    return acc.reshape(VALUE_DIM, BLOCK_M)


@gluon.jit
def bitwise_or(a, b):
    return a | b


@gluon.jit
def needs_rounding(stage, smem):
    """Whether a float32 scale of a block is not a power of two.

    Each warp checks all scales, so that no warp waits for another.
    """
    WORDS: gl.constexpr = smem.scales.shape[2]
    ALL: gl.constexpr = gl.BlockedLayout([WORDS, 4], [1, 32], [1, 8], [1, 0])
    words = reinterpret(smem.scales, gl.int32, [STAGES, WORDS, BLOCK_N], UNSWIZZLED)
    bits = words.index(stage).load(ALL)
    return gl.reduce(gl.reduce(bits, 0, bitwise_or), 0, bitwise_or) & 0x7FFFFF != 0


@gluon.jit
def round_k(x, rows, stage, smem, START: gl.constexpr, L: gl.constexpr, ACC: gl.constexpr):
    """Codes times the mantissa of their key's scale, rounded to bfloat16; float16 holds these."""
    scale = load_scale(rows, stage, smem, START, L, gl.SliceLayout(1, ACC))
    bits = scale.to(gl.int32, bitcast=True) & 0x7FFFFF | 0x3F800000
    mantissa = gl.where(scale == scale, bits.to(gl.float32, bitcast=True), scale)
    mantissa = gl.convert_layout(mantissa, gl.SliceLayout(1, x.type.layout))
    x, mantissa = gl.broadcast(x, mantissa[:, None])
    return gl.inline_asm_elementwise(
        SCALE_AND_ROUND, "=r,r,r,r", [x, mantissa], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def load_s_factor(
    rows,
    stage,
    smem,
    START: gl.constexpr,
    ROUND: gl.constexpr,
    L: gl.constexpr,
    ACC: gl.constexpr,
):
    """The factor of S of a block of dims: the scale, or its power of two if keys are rounded."""
    scale = load_scale(rows, stage, smem, START, L, gl.SliceLayout(1, ACC))
    if ROUND:
        scale = (scale.to(gl.int32, bitcast=True) & -0x800000).to(gl.float32, bitcast=True)
    return scale[:, None]


@gluon.jit
def qk_mma(rows, stage, zero, smem, ROUND: gl.constexpr, L: gl.constexpr, ACC: gl.constexpr):
    """S of a KV block, ``[BLOCK_N, BLOCK_M]``, each block of dims scaled by itself.

    Keys are dequantised under the MMA of the dims before. ``ROUND``: see :func:`round_k`.
    """
    BLOCK_M: gl.constexpr = smem.p.shape[2]
    WIDTH: gl.constexpr = dims_of_block(L.scale_block)
    DIM_BLOCKS: gl.constexpr = num_dim_blocks(L.fp8_dim, L.scale_block)
    HAS_ROPE: gl.constexpr = L.head_dim > VALUE_DIM or L.fp8_dim < VALUE_DIM
    cleared = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    s = cleared
    if L.fp8_dim < L.head_dim:
        q = smem.q_rope.index(zero).permute((1, 0))
        k = smem.k_rope.index(stage).load(gl.DotOperandLayout(0, ACC, 2))
        in_flight = warpgroup_mma(k, q, cleared, use_acc=False, is_async=True)
    elif HAS_ROPE:
        k = load_k(smem.k_rope.index(stage), ROPE_DIM, ACC)
        if ROUND:
            k = round_k(k, rows, stage, smem, VALUE_DIM, L, ACC)
        q = smem.q_rope.index(zero).permute((1, 0))
        in_flight = warpgroup_mma(k, q, cleared, use_acc=False, is_async=True)
    q_blocks = reinterpret(smem.q, gl.float16, [VALUE_DIM // WIDTH, BLOCK_M, WIDTH], TILE)
    for b in gl.static_range(DIM_BLOCKS):
        next_k = load_k(smem.k.index(stage).slice(b * WIDTH, WIDTH, dim=1), WIDTH, ACC)
        if b > 0 or HAS_ROPE:
            # ``s`` waits too: the compiler would delay the additions and run out of registers.
            block_s, _, s = warpgroup_mma_wait(0, deps=[in_flight, k, s])
            if b > 0:
                s += block_s * load_s_factor(rows, stage, smem, (b - 1) * WIDTH, ROUND, L, ACC)
            elif L.fp8_dim > VALUE_DIM:
                s = block_s * load_s_factor(rows, stage, smem, VALUE_DIM, ROUND, L, ACC)
            else:
                s = block_s
        if ROUND:
            next_k = round_k(next_k, rows, stage, smem, b * WIDTH, L, ACC)
        q = q_blocks.index(b + zero).permute((1, 0))
        in_flight = warpgroup_mma(next_k, q, cleared, use_acc=False, is_async=True)
        k = next_k
    block_s, _, s = warpgroup_mma_wait(0, deps=[in_flight, k, s])
    return s + block_s * load_s_factor(rows, stage, smem, (DIM_BLOCKS - 1) * WIDTH, ROUND, L, ACC)


@gluon.jit
def load_v_scales(rows, stage, smem, L: gl.constexpr):
    """float32 scales of a KV block's values, ``[BLOCK_N, DIM_BLOCKS]``; 0 for dims not in e4m3."""
    SIZE: gl.constexpr = rows.scales.dtype.element_ty.primitive_bitwidth // 8
    DIM_BLOCKS: gl.constexpr = VALUE_DIM // dims_of_block(L.scale_block)
    LAYOUT: gl.constexpr = scale_layout(DIM_BLOCKS)
    if SIZE == 4:
        words = smem.scales.index(stage)
        if words.shape[1] > DIM_BLOCKS:
            words = words.slice(0, DIM_BLOCKS, dim=1)
        scales = words.load(LAYOUT).to(gl.float32, bitcast=True)
    else:
        codes = reinterpret(smem.scales, gl.uint8, [STAGES, BLOCK_N, DIM_BLOCKS], UNSWIZZLED).index(
            stage
        )
        scales = decode_e8m0(codes.load(LAYOUT).to(gl.int32))
    NUM: gl.constexpr = num_dim_blocks(L.fp8_dim, L.scale_block)
    if NUM < DIM_BLOCKS:
        block = gl.arange(0, DIM_BLOCKS, gl.SliceLayout(0, LAYOUT))
        scales = gl.where((block < NUM)[None, :], scales, 0.0)
    return scales


@gluon.jit
def bound_scales(rows, stage, smem, L: gl.constexpr, LAYOUT: gl.constexpr):
    """The factor of each key's P, and log2 of its ``bound``.

    The factor is the key's scale if its values have only one. Otherwise it is ``bound``, and each
    scale over ``bound`` is stored as a factor of V.
    """
    if has_v_factors(L.fp8_dim, L.scale_block):
        scales = load_v_scales(rows, stage, smem, L)
        p_factor = gl.max(gl.abs(scales), 1)
    else:
        p_factor = load_scale(rows, stage, smem, 0, L, LAYOUT)
    bits = gl.minimum(gl.maximum(gl.abs(p_factor), 1e-30), 1e30).to(gl.int32, bitcast=True)
    bits = (bits + 0x7FFFFF) & 0x7F800000
    if has_v_factors(L.fp8_dim, L.scale_block):
        inverse = (0x7F000000 - bits).to(gl.float32, bitcast=True)
        smem.v_factors.permute((1, 0)).store((scales * inverse[:, None]).to(gl.float16))
        bits = gl.convert_layout(bits, LAYOUT)
        p_factor = bits.to(gl.float32, bitcast=True)
    return p_factor, ((bits >> 23) - 127).to(gl.float32)


@gluon.jit
def mask_keys(entries, at, rows, smem, L: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr):
    """Mask of the keys at positions ``at`` that each query row attends to."""
    slots = resolve_slots(entries, at, rows.num_slots, L, PAGED)
    seen = is_slot(slots, rows.num_slots)[:, None]
    if CAUSAL:
        limit = smem.limits.load(gl.SliceLayout(0, at.type.layout.parent))
        seen = seen & (at[:, None] < limit[None, :])
    return seen


@gluon.jit
def softmax_step(
    s, seen, p_factor, log2_bound, l, max_logit, smem, L: gl.constexpr, LOGITS: gl.constexpr
):
    """Online softmax of a KV block: store P and m; return l, the largest S and the factor of O.

    m is the maximum of ``s + log2_bound``, so that P times ``p_factor`` is at most 1.
    """
    BLOCK_M: gl.constexpr = s.shape[1]
    m = smem.m.load(gl.SliceLayout(0, s.type.layout))
    s = gl.where(seen, s, float("-inf"))
    if LOGITS:
        max_logit = gl.maximum(max_logit, gl.max(s, 0))
    new_m = gl.maximum(m, gl.max(s + log2_bound[:, None], 0))
    smem.m.store(new_m)
    rescale = gl.exp2(m - new_m)
    p = gl.exp2(s - new_m[None, :])
    smem.p.index(0).store(to_f16(p * (p_factor * P_RANGE)[:, None]))
    if L.fp8_dim < VALUE_DIM:
        p_bf16 = reinterpret(smem.p, gl.bfloat16, [2, BLOCK_N, BLOCK_M], p_layout(BLOCK_M))
        p_bf16.index(1).store(to_bf16(p))
    fence_async_shared()
    l *= gl.convert_layout(rescale, gl.SliceLayout(0, l.type.layout))[None, :]
    return l + sum_key_pairs(p), max_logit, rescale[None, :]


@gluon.jit
def issue_pv_mmas(v0, v1, STEP: gl.constexpr, p, acc):
    """Issue the PV MMAs of two steps of ``MMA_K`` keys."""
    p0 = p.slice(STEP * MMA_K, MMA_K, dim=0)
    acc = warpgroup_mma(v0, p0, acc, is_async=True)
    p1 = p.slice((STEP + 1) * MMA_K, MMA_K, dim=0)
    return warpgroup_mma(v1, p1, acc, is_async=True)


@gluon.jit
def pv_mma(acc, rescale, stage, zero, smem, L: gl.constexpr, ACC: gl.constexpr):
    """Rescale O, add a KV block's ``V^T P^T`` and release the stage."""
    BLOCK_M: gl.constexpr = smem.p.shape[2]
    if L.fp8_dim < VALUE_DIM:
        p_bf16 = reinterpret(smem.p, gl.bfloat16, [2, BLOCK_N, BLOCK_M], p_layout(BLOCK_M))
        p_bf16 = p_bf16.index(1 + zero)
        v_bf16 = smem.k_rope.index(stage).permute((1, 0))
        acc_bf16 = warpgroup_mma(v_bf16, p_bf16, acc[1] * rescale, is_async=True)
        acc_bf16 = warpgroup_mma_wait(0, deps=[acc_bf16])
    STEPS: gl.constexpr = BLOCK_N // MMA_K
    v0 = load_v(smem.k.index(stage), smem.v_factors, 0, L, ACC)
    v1 = load_v(smem.k.index(stage), smem.v_factors, 1, L, ACC)
    in_flight = issue_pv_mmas(v0, v1, 0, smem.p.index(zero), acc[0] * rescale)
    for step in gl.static_range(2, STEPS, 2):
        next_v0 = load_v(smem.k.index(stage), smem.v_factors, step, L, ACC)
        next_v1 = load_v(smem.k.index(stage), smem.v_factors, step + 1, L, ACC)
        acc_fp8, _, _ = warpgroup_mma_wait(0, deps=[in_flight, v0, v1])
        if step == STEPS - 2:
            mbarrier.arrive(smem.kv_empty.index(stage), count=1)
        in_flight = issue_pv_mmas(next_v0, next_v1, step, smem.p.index(zero), acc_fp8)
        v0 = next_v0
        v1 = next_v1
    acc_fp8, _, _ = warpgroup_mma_wait(0, deps=[in_flight, v0, v1])
    if L.fp8_dim < VALUE_DIM:
        new = (acc_fp8, acc_bf16)
    else:
        new = (acc_fp8,)
    return new


@gluon.jit
def attend(
    keys,
    first_block,
    state,
    smem,
    L: gl.constexpr,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    LOGITS: gl.constexpr,
    ACC: gl.constexpr,
):
    """Attend to the blocks of a stream, after ``first_block`` blocks of another stream."""
    rows = keys.rows
    l, max_logit, acc = state
    at = keys.begin + gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC))
    next_entries = load_entries(keys.entries, at, keys.end, L, PAGED)
    for i in range(keys.num_blocks):
        zero = opaque_zero(i)
        entries = next_entries
        next_entries = load_entries(keys.entries, at + BLOCK_N, keys.end, L, PAGED)
        stage = (first_block + i) % STAGES
        mbarrier.wait(smem.kv_full.index(stage), (first_block + i) // STAGES & 1)
        s = qk_mma(rows, stage, zero, smem, False, L, ACC)
        if L.scale_block > 0 and rows.scales.dtype.element_ty == gl.float32:
            rounding = needs_rounding(stage, smem)
            if rounding:
                # With one zero for both QK MMAs the compiler would hoist their common parts above
                # the branch, where it does not know that they are uniform.
                other_zero = opaque_zero(i)
                s = qk_mma(rows, stage + other_zero, other_zero, smem, True, L, ACC)
        s *= smem.row_factors.load(gl.SliceLayout(0, ACC))[None, :]
        seen = mask_keys(entries, at, rows, smem, L, PAGED, CAUSAL)
        at += BLOCK_N
        p_factor, log2_bound = bound_scales(rows, stage, smem, L, gl.SliceLayout(1, ACC))
        l, max_logit, rescale = softmax_step(
            s, seen, p_factor, log2_bound, l, max_logit, smem, L, LOGITS
        )
        acc = pv_mma(acc, rescale, stage, zero, smem, L, ACC)
    return l, max_logit, acc


@gluon.jit
def exponent_of(x):
    """Biased exponent of the largest element of each row."""
    return (gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) >> 23) & 0xFF


@gluon.jit
def store_queries(queries, scale_log2, smem, shape, L: gl.constexpr, BLOCK_M: gl.constexpr):
    """Store Q as operands of the QK MMA, and the factor of each row's S."""
    WIDTH: gl.constexpr = dims_of_block(L.scale_block)
    MIXED: gl.constexpr = L.fp8_dim < L.head_dim
    low = load_queries(queries, shape, 0, HALF_DIM, BLOCK_M, LOAD_ROWS_8).to(gl.float32)
    high = load_queries(queries, shape, HALF_DIM, HALF_DIM, BLOCK_M, LOAD_ROWS_8).to(gl.float32)
    exponent = gl.maximum(exponent_of(low), exponent_of(high))
    if MIXED or L.fp8_dim > VALUE_DIM:
        ROPE: gl.constexpr = min(L.fp8_dim, VALUE_DIM)
        rope = load_queries(queries, shape, ROPE, ROPE_DIM, BLOCK_M, LOAD_ROWS_8).to(gl.float32)
        exponent = gl.maximum(exponent, exponent_of(rope))
    # Scale the largest element of a row to 2^14..2^15, if float32 has such a factor.
    up = gl.minimum(268 - exponent, 253)
    factor = (up << 23).to(gl.float32, bitcast=True)[:, None]
    smem.row_factors.store(((254 - up) << 23).to(gl.float32, bitcast=True) * scale_log2)
    smem.q.index(0).store(permute_to_operand((low * factor).to(gl.float16), WIDTH))
    smem.q.index(1).store(permute_to_operand((high * factor).to(gl.float16), WIDTH))
    if MIXED:
        smem.q_rope.index(0).store((rope * factor).to(gl.bfloat16))
    elif L.fp8_dim > VALUE_DIM:
        smem.q_rope.index(0).store(permute_to_operand((rope * factor).to(gl.float16), ROPE_DIM))
    fence_async_shared()


@gluon.jit
def store_out(x, results, shape, START: gl.constexpr, END: gl.constexpr, LAYOUT: gl.constexpr):
    """Store normalised O, ``[dims, rows]``: dims from ``START`` on and before ``END``."""
    split, request, first = group_of_program(shape)
    token, head, real = rows_of_group(shape, x.shape[1], gl.SliceLayout(0, LAYOUT))
    at = (first + token) * results.out_token + head * results.out_head
    dim = START + gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    out = results.out + split * results.out_split + request * results.out_request
    x = gl.convert_layout(x, LAYOUT)
    mask = real[None, :]
    if START + x.shape[0] > END:
        mask = mask & (dim < END)[:, None]
    gl.store(out + at[None, :] + dim[:, None], x.to(results.out.dtype.element_ty), mask=mask)


@gluon.jit
def store_results(
    l,
    max_logit,
    acc,
    smem,
    results,
    shape,
    L: gl.constexpr,
    BLOCK_M: gl.constexpr,
    ACC: gl.constexpr,
):
    """Store the LSE, the largest logit and O / l; l includes the sink."""
    ROW: gl.constexpr = gl.SliceLayout(0, ACC)
    m = smem.m.load(THREADS_8)
    l = gl.convert_layout(gl.sum(l, 0), THREADS_8)
    empty_row = l == 0
    token, head, real = rows_of_group(shape, BLOCK_M, THREADS_8)
    split, request, first = group_of_program(shape)
    lse = results.lse + split * results.lse_split + request * results.lse_request
    lse += (first + token) * results.lse_token + head
    gl.store(lse, (m + gl.log2(l)) * LN2, mask=real)  # log2(0) is -inf
    if results.max_logits is not None:
        logits = gl.where(empty_row, float("-inf"), gl.convert_layout(max_logit, THREADS_8) * LN2)
        at = request * results.max_logits_request + head
        gl.store(results.max_logits + at, logits, mask=real)
    if results.attn_sink is not None:
        sinks = results.attn_sink
        if results.sink_token is not None:
            sinks += first * results.sink_token
        sink = gl.load(sinks + head, mask=real, other=0.0)
        l += gl.exp2(sink * LOG2E - m)
    smem.row_factors.store(gl.where(empty_row, 0.0, 1 / gl.where(empty_row, 1.0, l)))
    factor = smem.row_factors.load(ROW)[None, :]
    if L.fp8_dim < VALUE_DIM:
        store_out(acc[1] * factor, results, shape, L.fp8_dim, VALUE_DIM, ACC)
    factor *= 1 / P_RANGE
    SIZE: gl.constexpr = results.out.dtype.element_ty.primitive_bitwidth // 8
    out = order_dims(acc[0] * factor)
    store_out(out, results, shape, 0, min(L.fp8_dim, VALUE_DIM), out_layout(BLOCK_M, SIZE))


@gluon.jit
def consumer(
    queries,
    keys,
    extra_keys,
    scale_log2,
    smem,
    results,
    shape,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    BLOCK_M: gl.constexpr,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """The consumer warps: attend to the blocks of both streams, one after the other."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BLOCK_M, 16])
    LOGITS: gl.constexpr = results.max_logits is not None
    store_queries(queries, scale_log2, smem, shape, L, BLOCK_M)
    max_logit = gl.full([BLOCK_M], LOWEST, gl.float32, gl.SliceLayout(0, ACC))
    smem.m.store(max_logit)
    l = sum_key_pairs(gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC))
    # O of the e4m3 dims, and O of the bfloat16 value dims if there are any.
    acc = (gl.zeros([VALUE_DIM, BLOCK_M], gl.float32, ACC),)
    if L.fp8_dim < VALUE_DIM:
        acc = (acc[0], gl.zeros([ROPE_DIM, BLOCK_M], gl.float32, ACC))
    state = attend(keys, 0, (l, max_logit, acc), smem, L, PAGED, CAUSAL, LOGITS, ACC)
    if EXTRA is not None:
        state = attend(extra_keys, keys.num_blocks, state, smem, EXTRA, PAGED, CAUSAL, LOGITS, ACC)
    l, max_logit, acc = state
    store_results(l, max_logit, acc, smem, results, shape, L, BLOCK_M, ACC)


@gluon.jit
def allocate(L: gl.constexpr, BLOCK_M: gl.constexpr, SCALE_WORDS: gl.constexpr):
    """Shared memory of a CTA, with barriers initialised."""
    q = gl.allocate_shared_memory(gl.float16, [2, BLOCK_M, HALF_DIM], TILE)
    k = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK_N, VALUE_DIM], RAW_128)
    if L.fp8_dim < L.head_dim:
        q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_M, ROPE_DIM], TILE)
        k_rope = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BLOCK_N, ROPE_DIM], TILE)
    else:
        q_rope = gl.allocate_shared_memory(gl.float16, [1, BLOCK_M, ROPE_DIM], TILE)
        k_rope = gl.allocate_shared_memory(gl.uint8, [STAGES, BLOCK_N, ROPE_DIM], RAW_ROPE)
    NUM_P: gl.constexpr = 2 if L.fp8_dim < VALUE_DIM else 1
    p = gl.allocate_shared_memory(gl.float16, [NUM_P, BLOCK_N, BLOCK_M], p_layout(BLOCK_M))
    scales = gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_N, SCALE_WORDS], UNSWIZZLED)
    DIM_BLOCKS: gl.constexpr = VALUE_DIM // dims_of_block(L.scale_block)
    v_factors = gl.allocate_shared_memory(gl.float16, [DIM_BLOCKS, BLOCK_N], UNSWIZZLED)
    starts = gl.allocate_shared_memory(gl.int64, [2, BLOCK_N], PLAIN)
    limits = gl.allocate_shared_memory(gl.int32, [BLOCK_M], PLAIN)
    m = gl.allocate_shared_memory(gl.float32, [BLOCK_M], PLAIN)
    row_factors = gl.allocate_shared_memory(gl.float32, [BLOCK_M], PLAIN)
    kv_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(kv_full.index(i), count=WARPGROUP)
        mbarrier.init(kv_empty.index(i), count=1)
    return SharedMemory(
        q=q,
        q_rope=q_rope,
        k=k,
        k_rope=k_rope,
        scales=scales,
        starts=starts,
        p=p,
        v_factors=v_factors,
        m=m,
        row_factors=row_factors,
        limits=limits,
        kv_full=kv_full,
        kv_empty=kv_empty,
    )


@gluon.jit
def _attend_few_heads_fp8(
    queries,
    rows,
    stream,
    extra_rows,
    extra,
    results,
    shape,
    scale_log2,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    SCALE_WORDS: gl.constexpr,
):
    """All rows of a group, and one split of the keys of both streams."""
    smem = allocate(L, BLOCK_M, SCALE_WORDS)
    gdc_launch_dependents()
    gdc_wait()  # the prologue above reads nothing that an earlier kernel writes

    entries, end = find_keys(stream, shape, LIST_8, PAGED)
    all_blocks = gl.cdiv(end, BLOCK_N)
    if EXTRA is not None:
        extra_entries, extra_end = find_keys(extra, shape, LIST_8, PAGED)
        all_extra = gl.cdiv(extra_end, BLOCK_N)
    else:
        extra_entries = entries
        extra_end = 0
        all_extra = 0
    # The main stream's blocks come first, then the extra stream's.
    split, request, _ = group_of_program(shape)
    blocks_per_split = gl.cdiv(all_blocks + all_extra, shape.num_splits)
    begin = split.to(gl.int32) * blocks_per_split
    behind = begin + blocks_per_split
    extra_begin = gl.minimum(gl.maximum(begin - all_blocks, 0), all_extra)
    extra_blocks = gl.minimum(gl.maximum(behind - all_blocks, 0), all_extra) - extra_begin
    begin = gl.minimum(begin, all_blocks)
    num_blocks = gl.minimum(behind, all_blocks) - begin
    if CAUSAL:
        token, _, _ = rows_of_group(shape, BLOCK_M, gl.SliceLayout(1, LOAD_ROWS_8))
        length = gl.load(stream.lengths + request).to(gl.int32)
        query_len = shape.num_rows // shape.num_heads
        smem.limits.store(length - query_len + 1 + token.to(gl.int32))

    keys = KeyRange(rows, entries, begin * BLOCK_N, end, num_blocks)
    extra_keys = KeyRange(extra_rows, extra_entries, extra_begin * BLOCK_N, extra_end, extra_blocks)
    gl.warp_specialize(
        [
            (consumer, (queries, keys, extra_keys, scale_log2, smem, results, shape, L, EXTRA,
                        BLOCK_M, PAGED, CAUSAL)),
            (producer, (keys, extra_keys, smem, L, EXTRA, PAGED)),
        ],
        [4],
        [40],
    )  # fmt: skip


@functools.lru_cache(4096)
def plan_shared(num_rows: int, fmt: CacheFormat) -> tuple[int, int]:
    """Padded rows of a CTA, and 32-bit words of a key's scales in shared memory."""
    words = 1
    if fmt.scale_block:
        words = scale_words(fmt.fp8_dim, fmt.scale_block, fmt.scale_dtype.itemsize)
    return 16 if num_rows <= 16 else 32, triton.next_power_of_2(words)


def launch(
    queries: Queries,
    cache: PagedCache,
    stream: KeyList,
    results: Results,
    shape: QueryRows,
    softmax_scale: float,
    *,
    num_groups: int,
    extra_cache: PagedCache | None = None,
    extra: KeyList | None = None,
    paged: bool = False,
    causal: bool = False,
) -> None:
    """Launch over ``num_groups`` groups of rows.

    The caches of both streams must have the same format.
    """
    rows, layout = cache_arguments(cache)
    extra_rows, extra_layout = None, None
    if extra_cache is not None and extra is not None:
        extra_rows, extra_layout = cache_arguments(extra_cache)
    padded, words = plan_shared(shape.num_rows, cache.format)
    _attend_few_heads_fp8[(num_groups * shape.num_splits,)](
        queries,
        rows,
        stream,
        extra_rows,
        extra,
        results,
        shape,
        softmax_scale * LOG2E.value,
        L=layout,
        EXTRA=extra_layout,
        PAGED=paged,
        CAUSAL=causal,
        BLOCK_M=padded,
        SCALE_WORDS=words,
        num_warps=8,
        launch_pdl=True,
    )


def sparse_decode(call: SparseDecode) -> None:
    calls.sparse_decode(call, launch)


def dense_decode(call: DenseDecode) -> None:
    calls.dense_decode(call, launch)


def sparse_prefill(call: SparsePrefill) -> None:
    calls.sparse_prefill(call, launch)

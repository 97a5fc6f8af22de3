"""Attention on Hopper of up to 32 rows that share keys of a quantised cache: keys, then dims, on M.

Eight warps attend to tiles of 128 keys: a row of the scores' product is a key, a row of the
weighted values' product a dim. Four more copy the next tile, as it is stored.

Codes become float16, which holds e4m3 exactly, in the registers that a product takes its left
operand from: keys by dims for the scores, and read again, dims by keys, for the weighted values.
Scores are computed for each block of dims that shares a scale, and scaled, which is exact for
powers of two. A tile with any other scale is scored again, by keys that are rounded as they are
defined: codes times mantissas. A weight is scaled by a
power of two that bounds the scales of its key's values, and a value by its own scale over that
one. So that scaled weights fit float16, the running maximum is that of ``score + log2(bound)``.
Queries are brought near the end of float16's range by a power of two for each row.

What bounds it: docs/performance.md.
"""

from __future__ import annotations

import functools
import math

import triton
from torch import Tensor
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
from sparsemla.kernels.attention.sm90.abi import (
    Results,
    Shape,
    Stream,
)
from sparsemla.kernels.attention.sm90.chunks import WORDS2, decode_e8m0, in_order
from sparsemla.kernels.attention.sm90.tiles import (
    LN2,
    LOG2E,
    LOWEST,
    PLAIN,
    TILE,
    group_of_program,
    is_slot,
    locate,
    rows_of_group,
    to_bf16,
)
from sparsemla.kernels.common.gluon import async_load, opaque_zero, reinterpret
from sparsemla.kernels.common.paged import cache_arguments

KEYS = gl.constexpr(128)
GROUP = gl.constexpr(16)
"""Keys whose rows are copied at once."""
TILES = gl.constexpr(2)
STEP = gl.constexpr(16)
"""Keys whose values are multiplied at once: one step of a product, so that each instruction adds to
other sums than the one before it, for which it would wait."""

# The warpgroup that copies: a thread finds the row of one key, a warp takes 512 bytes of a row at
# once, so that few of its pieces lie in two cache lines.
FIND = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
COPY_CODES = gl.constexpr(gl.BlockedLayout([4, 16], [1, 32], [4, 1], [1, 0]))
COPY_TAIL = gl.constexpr(gl.BlockedLayout([1, 16], [8, 4], [4, 1], [1, 0]))
COPY_BF16 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
LIST = gl.constexpr(gl.BlockedLayout([4], [32], [8], [0]))
QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0]))

RAW = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
RAW_TAIL = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 4, [1, 0]))
EACH = gl.constexpr(gl.BlockedLayout([1], [32], [8], [0]))
WEIGHT_RANGE = gl.constexpr(32768.0)
"""Largest scaled weight, in float16."""


@triton.constexpr_function
def key_dims(width):
    """A thread's codes for the scores: a quarter of the block's dims of two keys."""
    dims = [[0, 1 << i] for i in range(width.bit_length() - 3)]
    quarter = width // 4
    return gl.DistributedLinearLayout(
        [*dims, [8, 0]],
        [[0, quarter], [0, 2 * quarter], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [64, 0]],
        [],
        [128, width],
    )


@triton.constexpr_function
def scale_dims(blocks):
    """Scales of a tile's values: those lanes have them that have the scores of their key."""
    return gl.DistributedLinearLayout(
        [*([[0, 4]] if blocks == 8 else []), [8, 0]],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0], [64, 0]],
        [],
        [128, blocks],
    )


@triton.constexpr_function
def value_dims():
    """A thread's codes for the weighted values: 8 neighbouring dims of a quarter of the keys."""
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [0, 4], [8, 0]],
        [[2, 0], [4, 0], [0, 8], [0, 16], [0, 32]],
        [[0, 64], [0, 128], [0, 256]],
        [],
        [16, 512],
    )


@triton.constexpr_function
def result_dims(n, itemsize):
    """A thread's results: 8 neighbouring dims of each of its heads.

    4 of float32, as an instruction would write half sectors otherwise.
    """
    heads = [[0, 8 << i] for i in range((n // 8).bit_length() - 1)]
    far, *near = (32, 4, 8, 16) if itemsize == 4 else (4, 8, 16, 32)
    return gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [far, 0], [0, 1], *heads],
        [[0, 2], [0, 4], *([dim, 0] for dim in near)],
        [[64, 0], [128, 0], [256, 0]],
        [],
        [512, n],
    )


WIDEN = gl.constexpr("""{
    .reg .b16 l, h;
    mov.b32 {l, h}, $2; cvt.rn.f16x2.e4m3x2 $0, l; cvt.rn.f16x2.e4m3x2 $1, h; }""")

# The same of 4 dims of two keys, which pair up: key is what was the lowest bit of the dim.
WIDEN_PAIRS = gl.constexpr("""{
    .reg .b32 x, y; .reg .b16 a, b, c, d;
    prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362;
    mov.b32 {a, b}, x; mov.b32 {c, d}, y;
    cvt.rn.f16x2.e4m3x2 $0, a; cvt.rn.f16x2.e4m3x2 $1, b;
    cvt.rn.f16x2.e4m3x2 $2, c; cvt.rn.f16x2.e4m3x2 $3, d; }""")
# And times the float16 factors of the two keys, the same for all of the dims.
SCALE_PAIRS = gl.constexpr("""{
    .reg .b32 x, y, p, q, r, s; .reg .b16 a, b, c, d;
    prmt.b32 x, $4, $5, 0x5140; prmt.b32 y, $4, $5, 0x7362;
    mov.b32 {a, b}, x; mov.b32 {c, d}, y;
    cvt.rn.f16x2.e4m3x2 p, a; cvt.rn.f16x2.e4m3x2 q, b;
    cvt.rn.f16x2.e4m3x2 r, c; cvt.rn.f16x2.e4m3x2 s, d;
    mul.rn.f16x2 $0, p, $6; mul.rn.f16x2 $1, q, $6;
    mul.rn.f16x2 $2, r, $6; mul.rn.f16x2 $3, s, $6; }""")

# Two float16 times float32, rounded to bfloat16 and then float16 again.
ROUND = gl.constexpr("""{
    .reg .b16 l, h; .reg .f32 x, y; .reg .b32 a, b;
    mov.b32 {l, h}, $1; cvt.f32.f16 x, l; cvt.f32.f16 y, h;
    mul.rn.f32 x, x, $2; mul.rn.f32 y, y, $3; cvt.rn.bf16x2.f32 a, y, x;
    shl.b32 b, a, 16; and.b32 a, a, 0xFFFF0000; mov.b32 x, b; mov.b32 y, a;
    cvt.rn.f16x2.f32 $0, y, x; }""")


@triton.constexpr_function
def block_of(scale_block):
    """Dims that are multiplied at once: as many as 128 that share a scale."""
    return 64 if scale_block == 64 else 128


@triton.constexpr_function
def num_value_blocks(fp8_dim, scale_block):
    """Blocks of values that are e4m3."""
    return min(fp8_dim, 512) // block_of(scale_block)


@triton.constexpr_function
def has_factors(fp8_dim, scale_block):
    """Whether values of a key have different scales."""
    return scale_block not in (0, fp8_dim)


@triton.constexpr_function
def scale_words(fp8_dim, scale_block, itemsize):
    """32-bit words that hold the scales of a row."""
    num_scales = -(-fp8_dim // scale_block)
    return -(-num_scales * itemsize // 4)


@triton.constexpr_function
def alignment(page, row, itemsize):
    """Elements that each row begins at a multiple of, as many as 16 bytes hold."""
    return math.gcd(16 // itemsize, page, row)


@triton.constexpr_function
def weight_tile(n):
    """Layout of a tile of weights."""
    return gl.NVMMASharedLayout(2 * n, 16, 2)


@gluon.jit
def to_f16(x):
    """float32 to float16 two at a time."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def load_entries(keys, at, end, L: gl.constexpr, PAGED: gl.constexpr):
    """Entries of a list of slots, or pages of keys; what lies behind the end is none."""
    return gl.load(keys + (at // L.page_size if PAGED else at), mask=at < end, other=-1)


@gluon.jit
def slots_of(entries, at, num_slots, L: gl.constexpr, PAGED: gl.constexpr):
    """Slots of the keys ``at``; not done when entries are loaded, which are waited for here."""
    if PAGED:
        known = is_slot(entries, num_slots // L.page_size)
        slots = gl.where(known, entries, -1).to(gl.int64) * L.page_size + at % L.page_size
        entries = gl.where(known, slots, -1)
    return entries


@gluon.jit
def store_starts(to, page, row, valid, PAGE: gl.constexpr, ROW: gl.constexpr):
    """Where rows begin, or -1."""
    start = page * PAGE + row * ROW
    reinterpret(to, gl.int64, [KEYS], PLAIN).store(gl.where(valid, start, -1))


@gluon.jit
def copy_rows(to, group, source, starts, END: gl.constexpr, UNIT: gl.constexpr, COPY: gl.constexpr):
    """Copy dims of the rows of a group; those from ``END`` on are 0."""
    starts = reinterpret(starts, gl.int64, [KEYS // GROUP, GROUP], PLAIN)
    start = starts.index(group).load(gl.SliceLayout(1, COPY))[:, None]
    dim = gl.arange(0, to.shape[1], gl.SliceLayout(0, COPY))[None, :]
    real = start >= 0
    if to.shape[1] > END:
        real = real & (dim < END)
    async_load(to, source + start * UNIT + dim, mask=real)


@gluon.jit
def copy_tiles(stream, tile, memory, L: gl.constexpr, PAGED: gl.constexpr):
    """Copy the rows of a stream's tiles, as they are stored, to where there is room."""
    rows, keys, begin, end, tiles = stream
    _, _, codes, tail, scales, starts, _, _, full, empty, _ = memory
    UNIT: gl.constexpr = alignment(L.fp8_strides[0], L.fp8_strides[1], 1)
    MIXED: gl.constexpr = L.fp8_dim < L.head_dim
    GROUPS: gl.constexpr = KEYS // GROUP
    code_groups = reinterpret(codes, gl.uint8, [TILES * GROUPS, GROUP, 512], RAW)
    at = begin + gl.arange(0, KEYS, FIND)
    entries = load_entries(keys, at, end, L, PAGED)
    for i in range(tiles):
        slots = slots_of(entries, at, rows.num_slots, L, PAGED)
        at += KEYS
        entries = load_entries(keys, at, end, L, PAGED)
        valid = is_slot(slots, rows.num_slots)
        page, row = locate(gl.where(valid, slots, 0), L)
        store_starts(starts.index(0), page, row, valid, L.fp8_strides[0] // UNIT,
                     L.fp8_strides[1] // UNIT)  # fmt: skip
        if MIXED:
            BF16_UNIT: gl.constexpr = alignment(L.bf16_strides[0], L.bf16_strides[1], 2)
            store_starts(starts.index(1), page, row, valid, L.bf16_strides[0] // BF16_UNIT,
                         L.bf16_strides[1] // BF16_UNIT)  # fmt: skip
        where = (tile + i) % TILES
        mbarrier.wait(empty.index(where), (tile + i) // TILES & 1 ^ 1)
        if L.scale_block > 0:
            copy_scales(scales.index(where), rows, page, row, valid, L)
        for j in range(GROUPS):
            group = where * GROUPS + j
            copy_rows(code_groups.index(group), j, rows.fp8, starts.index(0), L.fp8_dim, UNIT,
                      COPY_CODES)  # fmt: skip
            if MIXED:
                to = reinterpret(tail, gl.bfloat16, [TILES * GROUPS, GROUP, 64], TILE)
                copy_rows(to.index(group), j, rows.bf16, starts.index(1), 64, BF16_UNIT, COPY_BF16)
            elif L.fp8_dim > 512:
                to = reinterpret(tail, gl.uint8, [TILES * GROUPS, GROUP, 64], RAW_TAIL)
                copy_rows(to.index(group), j, rows.fp8 + 512, starts.index(0), 64, UNIT, COPY_TAIL)
        async_copy.mbarrier_arrive(full.index(where), increment_count=False)


@gluon.jit
def copy_scales(to, rows, page, row, valid, L: gl.constexpr):
    """32-bit words of scales, those of a key by one thread."""
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
def produce(stream, extra, memory, L: gl.constexpr, EXTRA: gl.constexpr, PAGED: gl.constexpr):
    """The warpgroup that copies."""
    copy_tiles(stream, 0, memory, L, PAGED)
    if EXTRA is not None:
        copy_tiles(extra, stream[4], memory, EXTRA, PAGED)


@gluon.jit
def load_scale(rows, where, memory, START: gl.constexpr, L: gl.constexpr, LAYOUT: gl.constexpr):
    """float32 scales of a tile's keys for one dim."""
    scales = memory[4]
    if L.scale_block == 0:
        scale = gl.full([KEYS], 1.0, gl.float32, LAYOUT)
    else:
        SIZE: gl.constexpr = rows.scales.dtype.element_ty.primitive_bitwidth // 8
        INDEX: gl.constexpr = START // L.scale_block
        word = scales.index(where).slice(INDEX * SIZE // 4, 1, dim=1)
        bits = gl.convert_layout(word.load(LAYOUT.parent).reshape(KEYS), LAYOUT)
        if SIZE == 1:
            scale = decode_e8m0((bits >> (INDEX % 4 * 8)) & 0xFF)
        else:
            scale = bits.to(gl.float32, bitcast=True)
    return scale


@gluon.jit
def keys_by_dims(codes, WIDTH: gl.constexpr, SCORES: gl.constexpr):
    """Codes of a tile as the left operand of its scores."""
    x = gl.inline_asm_elementwise(
        WIDEN, "=r,=r,r", [codes.load(key_dims(WIDTH))], dtype=gl.float16, is_pure=True, pack=4
    )
    return gl.convert_layout(in_order(x, WIDTH), gl.DotOperandLayout(0, SCORES, 2))


@gluon.jit
def dims_by_keys(codes, factors, PART: gl.constexpr, L: gl.constexpr, SCORES: gl.constexpr):
    """Some keys of a tile as the left operand of the weighted values.

    The instructions pair neighbouring keys where neighbouring dims were, so axes change places.
    """
    x = codes.slice(PART * STEP, STEP, dim=0).load(value_dims())
    if has_factors(L.fp8_dim, L.scale_block):
        BLOCKS: gl.constexpr = 512 // block_of(L.scale_block)
        x = x.reshape(STEP // 2, 2, BLOCKS, 512 // BLOCKS)
        LAYOUT: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, x.type.layout))
        pairs = reinterpret(factors, gl.int32, [BLOCKS, 64], WORDS2)
        factor = pairs.slice(PART * STEP // 2, STEP // 2, dim=1).permute((1, 0)).load(LAYOUT)
        x, factor = gl.broadcast(x, factor[:, None, :, None])
        x = gl.inline_asm_elementwise(
            SCALE_PAIRS,
            "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r",
            [x, factor],
            dtype=gl.float16,
            is_pure=True,
            pack=8,
        )
    else:
        x = gl.inline_asm_elementwise(
            WIDEN_PAIRS, "=r,=r,=r,=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=8
        )
    x = x.reshape(STEP // 8, 4, 2, 8, 8, 2, 2, 2).permute(5, 2, 3, 6, 4, 0, 1, 7)
    return gl.convert_layout(x.reshape(512, STEP), gl.DotOperandLayout(0, SCORES, 2))


@gluon.jit
def value_order(x):
    """Weighted values in the order of their dims."""
    N: gl.constexpr = x.shape[1]
    return x.reshape(2, 2, 8, 2, 8, N).permute(2, 4, 0, 1, 3, 5).reshape(512, N)


@gluon.jit
def any_bit(a, b):
    return a | b


@gluon.jit
def some_odd(where, memory):
    """Whether a float32 scale of a tile is no power of two.

    Each warp looks at all of them, so that none waits for another.
    """
    scales = memory[4]
    WORDS: gl.constexpr = scales.shape[2]
    ALL: gl.constexpr = gl.BlockedLayout([WORDS, 4], [1, 32], [1, 8], [1, 0])
    bits = reinterpret(scales, gl.int32, [TILES, WORDS, KEYS], WORDS2).index(where).load(ALL)
    return gl.reduce(gl.reduce(bits, 0, any_bit), 0, any_bit) & 0x7FFFFF != 0


@gluon.jit
def round_keys(x, rows, where, memory, START: gl.constexpr, L: gl.constexpr, SCORES: gl.constexpr):
    """Codes times the mantissa of their key's scale, rounded as bfloat16: float16 holds that."""
    scale = load_scale(rows, where, memory, START, L, gl.SliceLayout(1, SCORES))
    bits = scale.to(gl.int32, bitcast=True) & 0x7FFFFF | 0x3F800000
    mantissa = gl.where(scale == scale, bits.to(gl.float32, bitcast=True), scale)
    mantissa = gl.convert_layout(mantissa, gl.SliceLayout(1, x.type.layout))
    x, mantissa = gl.broadcast(x, mantissa[:, None])
    return gl.inline_asm_elementwise(
        ROUND, "=r,r,r,r", [x, mantissa], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def load_factor(
    rows, where, memory,
    START: gl.constexpr, ODD: gl.constexpr, L: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """What products of a block are to be multiplied by; if keys are rounded, powers of two."""
    scale = load_scale(rows, where, memory, START, L, gl.SliceLayout(1, SCORES))
    if ODD:
        scale = (scale.to(gl.int32, bitcast=True) & -0x800000).to(gl.float32, bitcast=True)
    return scale[:, None]


@gluon.jit
def score(rows, where, z, memory, ODD: gl.constexpr, L: gl.constexpr, SCORES: gl.constexpr):
    """Scores of a tile, each block of dims scaled by itself."""
    q_value, q_rest, codes, tail, _, _, weights, _, _, _, _ = memory
    N: gl.constexpr = weights.shape[2]
    WIDTH: gl.constexpr = block_of(L.scale_block)
    BLOCKS: gl.constexpr = num_value_blocks(L.fp8_dim, L.scale_block)
    REST: gl.constexpr = L.head_dim > 512 or L.fp8_dim < 512
    zero = gl.zeros([KEYS, N], gl.float32, SCORES)
    s = zero
    if L.fp8_dim < L.head_dim:
        q = q_rest.index(z).permute((1, 0))
        x = tail.index(where).load(gl.DotOperandLayout(0, SCORES, 2))
        flying = warpgroup_mma(x, q, zero, use_acc=False, is_async=True)
    elif REST:
        x = keys_by_dims(tail.index(where), 64, SCORES)
        if ODD:
            x = round_keys(x, rows, where, memory, 512, L, SCORES)
        q = q_rest.index(z).permute((1, 0))
        flying = warpgroup_mma(x, q, zero, use_acc=False, is_async=True)
    q_blocks = reinterpret(q_value, gl.float16, [512 // WIDTH, N, WIDTH], TILE)
    for b in gl.static_range(BLOCKS):
        y = keys_by_dims(codes.index(where).slice(b * WIDTH, WIDTH, dim=1), WIDTH, SCORES)
        if b > 0 or REST:
            # The sum waits too: or the compiler puts additions off, and has no registers left.
            done, _, s = warpgroup_mma_wait(0, deps=[flying, x, s])
            if b > 0:
                s += done * load_factor(rows, where, memory, (b - 1) * WIDTH, ODD, L, SCORES)
            elif L.fp8_dim > 512:
                s = done * load_factor(rows, where, memory, 512, ODD, L, SCORES)
            else:
                s = done
        if ODD:
            y = round_keys(y, rows, where, memory, b * WIDTH, L, SCORES)
        q = q_blocks.index(b + z).permute((1, 0))
        flying = warpgroup_mma(y, q, zero, use_acc=False, is_async=True)
        x = y
    done, _, s = warpgroup_mma_wait(0, deps=[flying, x, s])
    return s + done * load_factor(rows, where, memory, (BLOCKS - 1) * WIDTH, ODD, L, SCORES)


@gluon.jit
def value_scales(scales, rows, where, L: gl.constexpr):
    """float32 scales of a tile's values, keys by blocks; of a block that is not there, 0."""
    SIZE: gl.constexpr = rows.scales.dtype.element_ty.primitive_bitwidth // 8
    BLOCKS: gl.constexpr = 512 // block_of(L.scale_block)
    LAYOUT: gl.constexpr = scale_dims(BLOCKS)
    if SIZE == 4:
        words = scales.index(where)
        if words.shape[1] > BLOCKS:
            words = words.slice(0, BLOCKS, dim=1)
        each = words.load(LAYOUT).to(gl.float32, bitcast=True)
    else:
        codes = reinterpret(scales, gl.uint8, [TILES, KEYS, BLOCKS], WORDS2).index(where)
        each = decode_e8m0(codes.load(LAYOUT).to(gl.int32))
    NUM: gl.constexpr = num_value_blocks(L.fp8_dim, L.scale_block)
    if NUM < BLOCKS:
        block = gl.arange(0, BLOCKS, gl.SliceLayout(0, LAYOUT))
        each = gl.where((block < NUM)[None, :], each, 0.0)
    return each


@gluon.jit
def bound_scales(rows, where, memory, L: gl.constexpr, LAYOUT: gl.constexpr):
    """What a key's weights are scaled by, and log2 of a power of two that bounds its scales.

    If its values have different scales, that power is it, and what they are of it is stored.
    """
    _, _, _, _, scales, _, _, factors, _, _, _ = memory
    if has_factors(L.fp8_dim, L.scale_block):
        each = value_scales(scales, rows, where, L)
        largest = gl.max(gl.abs(each), 1)
    else:
        largest = load_scale(rows, where, memory, 0, L, LAYOUT)
    bits = gl.minimum(gl.maximum(gl.abs(largest), 1e-30), 1e30).to(gl.int32, bitcast=True)
    bits = (bits + 0x7FFFFF) & 0x7F800000
    if has_factors(L.fp8_dim, L.scale_block):
        inverse = (0x7F000000 - bits).to(gl.float32, bitcast=True)
        factors.permute((1, 0)).store((each * inverse[:, None]).to(gl.float16))
        bits = gl.convert_layout(bits, LAYOUT)
        largest = bits.to(gl.float32, bitcast=True)
    return largest, ((bits >> 23) - 127).to(gl.float32)


@gluon.jit
def seen_by(entries, at, rows, limits, L: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr):
    """Which query rows attend to which of the keys ``at``."""
    slots = slots_of(entries, at, rows.num_slots, L, PAGED)
    seen = is_slot(slots, rows.num_slots)[:, None]
    if CAUSAL:
        limit = limits.load(gl.SliceLayout(0, at.type.layout.parent))
        seen = seen & (at[:, None] < limit[None, :])
    return seen


@gluon.jit
def add_keys(p):
    """Sums ``[64, N]`` of the two keys that a thread has for each head."""
    N: gl.constexpr = p.shape[1]
    return gl.sum(p.reshape(8, 2, 8, N), 1).reshape(64, N)


@gluon.jit
def weigh(s, seen, scale, power, l, top, memory, L: gl.constexpr, LOGITS: gl.constexpr):
    """Weights of a tile's keys, stored as operands; ``shrink`` is what earlier sums shrink by.

    ``power`` of a key is such that its weights, times ``scale``, are at most 1.
    """
    weights = memory[6]
    N: gl.constexpr = s.shape[1]
    m = memory[10].load(gl.SliceLayout(0, s.type.layout))
    s = gl.where(seen, s, float("-inf"))
    if LOGITS:
        top = gl.maximum(top, gl.max(s, 0))
    highest = gl.maximum(m, gl.max(s + power[:, None], 0))
    memory[10].store(highest)
    shrink = gl.exp2(m - highest)
    p = gl.exp2(s - highest[None, :])
    weights.index(0).store(to_f16(p * (scale * WEIGHT_RANGE)[:, None]))
    if L.fp8_dim < 512:
        plain = reinterpret(weights, gl.bfloat16, [2, KEYS, N], weight_tile(N))
        plain.index(1).store(to_bf16(p))
    fence_async_shared()
    l *= gl.convert_layout(shrink, gl.SliceLayout(0, l.type.layout))[None, :]
    return l + add_keys(p), top, shrink[None, :]


@gluon.jit
def start_values(x, y, PART: gl.constexpr, weights, values):
    """Start the products of two parts of the keys."""
    p = weights.slice(PART * STEP, STEP, dim=0)
    flying = warpgroup_mma(x, p, values, is_async=True)
    p = weights.slice((PART + 1) * STEP, STEP, dim=0)
    return warpgroup_mma(y, p, flying, is_async=True)


@gluon.jit
def add_values(sums, shrink, where, z, memory, L: gl.constexpr, SCORES: gl.constexpr):
    """Weighted values of a tile added to those before it; the tile is given back."""
    _, _, codes, tail, _, _, weights, factors, _, empty, _ = memory
    N: gl.constexpr = weights.shape[2]
    if L.fp8_dim < 512:
        plain = reinterpret(weights, gl.bfloat16, [2, KEYS, N], weight_tile(N))
        last = warpgroup_mma(
            tail.index(where).permute((1, 0)), plain.index(1 + z), sums[1] * shrink, is_async=True
        )
        last = warpgroup_mma_wait(0, deps=[last])
    x = dims_by_keys(codes.index(where), factors, 0, L, SCORES)
    y = dims_by_keys(codes.index(where), factors, 1, L, SCORES)
    flying = start_values(x, y, 0, weights.index(z), sums[0] * shrink)
    for part in gl.static_range(2, KEYS // STEP, 2):
        next_x = dims_by_keys(codes.index(where), factors, part, L, SCORES)
        next_y = dims_by_keys(codes.index(where), factors, part + 1, L, SCORES)
        values, _, _ = warpgroup_mma_wait(0, deps=[flying, x, y])
        if part == KEYS // STEP - 2:
            mbarrier.arrive(empty.index(where), count=1)
        flying = start_values(next_x, next_y, part, weights.index(z), values)
        x = next_x
        y = next_y
    values, _, _ = warpgroup_mma_wait(0, deps=[flying, x, y])
    if L.fp8_dim < 512:
        new = (values, last)
    else:
        new = (values,)
    return new


@gluon.jit
def attend_tiles(
    stream,
    tile,
    state,
    limits,
    scaled,
    memory,
    L: gl.constexpr,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    LOGITS: gl.constexpr,
    SCORES: gl.constexpr,
):
    """Online softmax over the tiles of a stream, heads on columns."""
    rows, keys, begin, end, tiles = stream
    l, top, sums = state
    full = memory[8]
    at = begin + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    entries = load_entries(keys, at, end, L, PAGED)
    for i in range(tiles):
        z = opaque_zero(i)
        now = entries
        entries = load_entries(keys, at + KEYS, end, L, PAGED)
        where = (tile + i) % TILES
        mbarrier.wait(full.index(where), (tile + i) // TILES & 1)
        s = score(rows, where, z, memory, False, L, SCORES)
        if L.scale_block > 0 and rows.scales.dtype.element_ty == gl.float32:
            odd = some_odd(where, memory)
            if odd:
                # What both scores need would be computed before, and not be known to be uniform.
                o = opaque_zero(i)
                s = score(rows, where + o, o, memory, True, L, SCORES)
        s *= scaled.load(gl.SliceLayout(0, SCORES))[None, :]
        seen = seen_by(now, at, rows, limits, L, PAGED, CAUSAL)
        at += KEYS
        scale, power = bound_scales(rows, where, memory, L, gl.SliceLayout(1, SCORES))
        l, top, shrink = weigh(s, seen, scale, power, l, top, memory, L, LOGITS)
        sums = add_values(sums, shrink, where, z, memory, L, SCORES)
    return l, top, sums


@gluon.jit
def store_values(x, results, shape, DIM: gl.constexpr, END: gl.constexpr, LAYOUT: gl.constexpr):
    """Store normalised values, dims by heads, from ``DIM`` on and before ``END``."""
    split, request, first = group_of_program(shape)
    token, head, real = rows_of_group(shape, x.shape[1], gl.SliceLayout(0, LAYOUT))
    at = (first + token) * results.out_token + head * results.out_head
    dim = DIM + gl.arange(0, x.shape[0], gl.SliceLayout(1, LAYOUT))
    out = results.out + split * results.out_split + request * results.out_request
    x = gl.convert_layout(x, LAYOUT)
    mask = real[None, :]
    if DIM + x.shape[0] > END:
        mask = mask & (dim < END)[:, None]
    gl.store(out + at[None, :] + dim[:, None], x.to(results.out.dtype.element_ty), mask=mask)


@gluon.jit
def consume(
    queries,
    main,
    extra,
    scale_log2,
    memory,
    scaled,
    results,
    shape,
    limits,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    N: gl.constexpr,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """The warps that attend: to all tiles, one after the other."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 16])
    HEADS: gl.constexpr = gl.SliceLayout(0, SCORES)
    LOGITS: gl.constexpr = results.max_logits is not None
    store_queries(queries, scale_log2, memory, scaled, shape, L, N)
    top = gl.full([N], LOWEST, gl.float32, HEADS)
    memory[10].store(top)
    l = add_keys(gl.zeros([KEYS, N], gl.float32, SCORES))
    values = (gl.zeros([512, N], gl.float32, SCORES),)
    if L.fp8_dim < 512:
        values = (values[0], gl.zeros([64, N], gl.float32, SCORES))
    state = attend_tiles(
        main, 0, (l, top, values), limits, scaled, memory, L, PAGED, CAUSAL, LOGITS, SCORES
    )
    if EXTRA is not None:
        state = attend_tiles(
            extra, main[4], state, limits, scaled, memory, EXTRA, PAGED, CAUSAL, LOGITS, SCORES
        )
    l, top, values = state

    m = memory[10].load(EACH)
    total = gl.convert_layout(gl.sum(l, 0), EACH)
    none = total == 0
    token, head, real = rows_of_group(shape, N, EACH)
    split, request, first = group_of_program(shape)
    lse = results.lse + split * results.lse_split + request * results.lse_request
    lse += (first + token) * results.lse_token + head
    gl.store(lse, (m + gl.log2(total)) * LN2, mask=real)  # log2(0) is -inf
    if LOGITS:
        logits = gl.where(none, float("-inf"), gl.convert_layout(top, EACH) * LN2)
        at = request * results.max_logits_request + head
        gl.store(results.max_logits + at, logits, mask=real)
    if results.attn_sink is not None:
        sink = gl.load(results.attn_sink + head, mask=real, other=0.0)
        total += gl.exp2(sink * LOG2E - m)
    scaled.store(gl.where(none, 0.0, 1 / gl.where(none, 1.0, total)))
    share = scaled.load(HEADS)[None, :]
    if L.fp8_dim < 512:
        store_values(values[1] * share, results, shape, L.fp8_dim, 512, SCORES)
    share *= 1 / WEIGHT_RANGE
    SIZE: gl.constexpr = results.out.dtype.element_ty.primitive_bitwidth // 8
    x = value_order(values[0] * share)
    store_values(x, results, shape, 0, min(L.fp8_dim, 512), result_dims(N, SIZE))


@gluon.jit
def load_queries(queries, shape, START: gl.constexpr, WIDTH: gl.constexpr, N: gl.constexpr):
    """float32 dims of a group's rows."""
    q, q_request, q_token, q_head = queries
    _, request, first = group_of_program(shape)
    token, head, real = rows_of_group(shape, N, gl.SliceLayout(1, QUERIES))
    at = request * q_request + (first + token) * q_token + head * q_head
    dim = START + gl.arange(0, WIDTH, gl.SliceLayout(0, QUERIES))
    x = gl.load(q + at[:, None] + dim[None, :], mask=real[:, None], other=0.0)
    return x.to(gl.float32)


@gluon.jit
def exponent_of(x):
    """Biased exponent of the largest of each row."""
    return (gl.max(gl.abs(x), 1).to(gl.int32, bitcast=True) >> 23) & 0xFF


@gluon.jit
def store_queries(queries, scale_log2, memory, scaled, shape, L: gl.constexpr, N: gl.constexpr):
    """Store queries as operands, and what their scores are to be multiplied by."""
    q_value, q_rest, _, _, _, _, _, _, _, _, _ = memory
    WIDTH: gl.constexpr = block_of(L.scale_block)
    MIXED: gl.constexpr = L.fp8_dim < L.head_dim
    low = load_queries(queries, shape, 0, 256, N)
    high = load_queries(queries, shape, 256, 256, N)
    exponent = gl.maximum(exponent_of(low), exponent_of(high))
    if MIXED or L.fp8_dim > 512:
        rest = load_queries(queries, shape, min(L.fp8_dim, 512), 64, N)
        exponent = gl.maximum(exponent, exponent_of(rest))
    # The largest of a row becomes 2^14 to 2^15, as far as float32 has such a factor.
    up = gl.minimum(268 - exponent, 253)
    factor = (up << 23).to(gl.float32, bitcast=True)[:, None]
    scaled.store(((254 - up) << 23).to(gl.float32, bitcast=True) * scale_log2)
    q_value.index(0).store(in_order((low * factor).to(gl.float16), WIDTH))
    q_value.index(1).store(in_order((high * factor).to(gl.float16), WIDTH))
    if MIXED:
        q_rest.index(0).store((rest * factor).to(gl.bfloat16))
    elif L.fp8_dim > 512:
        q_rest.index(0).store(in_order((rest * factor).to(gl.float16), 64))
    fence_async_shared()


@gluon.jit
def find_keys(stream, shape, PAGED: gl.constexpr):
    """Slots of a group, or pages of its request, and how many keys they are: to the last slot."""
    _, request, token = group_of_program(shape)
    keys = stream.keys + request * stream.keys_request + token * stream.keys_token
    end = stream.num_keys
    if stream.lengths is not None:
        end = gl.minimum(gl.load(stream.lengths + request), end).to(gl.int32)
    if not PAGED:
        used = 0
        for start in range(0, end, 2048):
            at = start + gl.arange(0, 2048, LIST)
            slots = gl.load(keys + at, mask=at < end, other=-1)
            valid = is_slot(slots, stream.num_slots)
            used = gl.maximum(used, gl.max(gl.where(valid, at + 1, 0), 0))
        end = used
    return keys, end


@gluon.jit
def _attend_columns_fp8(
    q,
    q_request,
    q_token,
    q_head,
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
    N: gl.constexpr,
    SCALE_WORDS: gl.constexpr,
):
    """All rows of a group, and one split of their keys."""
    MIXED: gl.constexpr = L.fp8_dim < L.head_dim
    WEIGHTS: gl.constexpr = 2 if L.fp8_dim < 512 else 1
    q_value = gl.allocate_shared_memory(gl.float16, [2, N, 256], TILE)
    codes = gl.allocate_shared_memory(gl.uint8, [TILES, KEYS, 512], RAW)
    if MIXED:
        q_rest = gl.allocate_shared_memory(gl.bfloat16, [1, N, 64], TILE)
        tail = gl.allocate_shared_memory(gl.bfloat16, [TILES, KEYS, 64], TILE)
    else:
        q_rest = gl.allocate_shared_memory(gl.float16, [1, N, 64], TILE)
        tail = gl.allocate_shared_memory(gl.uint8, [TILES, KEYS, 64], RAW_TAIL)
    weights = gl.allocate_shared_memory(gl.float16, [WEIGHTS, KEYS, N], weight_tile(N))
    scales = gl.allocate_shared_memory(gl.int32, [TILES, KEYS, SCALE_WORDS], WORDS2)
    factors = gl.allocate_shared_memory(gl.float16, [512 // block_of(L.scale_block), KEYS], WORDS2)
    starts = gl.allocate_shared_memory(gl.int64, [2, KEYS], PLAIN)
    limits = gl.allocate_shared_memory(gl.int32, [N], PLAIN)
    highest = gl.allocate_shared_memory(gl.float32, [N], PLAIN)
    scaled = gl.allocate_shared_memory(gl.float32, [N], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(TILES):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=1)
    gdc_launch_dependents()
    gdc_wait()  # as in kernels/common/early.py: all above needs nobody's results

    keys, end = find_keys(stream, shape, PAGED)
    all_tiles = gl.cdiv(end, KEYS)
    if EXTRA is not None:
        extra_keys, extra_end = find_keys(extra, shape, PAGED)
        all_extra = gl.cdiv(extra_end, KEYS)
    else:
        extra_keys = keys
        extra_end = 0
        all_extra = 0
    split, request, _ = group_of_program(shape)
    steps = gl.cdiv(all_tiles + all_extra, shape.num_splits)
    begin = split.to(gl.int32) * steps
    behind = begin + steps
    extra_begin = gl.minimum(gl.maximum(begin - all_tiles, 0), all_extra)
    extra_tiles = gl.minimum(gl.maximum(behind - all_tiles, 0), all_extra) - extra_begin
    begin = gl.minimum(begin, all_tiles)
    tiles = gl.minimum(behind, all_tiles) - begin
    if CAUSAL:
        token, _, _ = rows_of_group(shape, N, gl.SliceLayout(1, QUERIES))
        length = gl.load(stream.lengths + request).to(gl.int32)
        limits.store(length - shape.num_rows // shape.num_heads + 1 + token.to(gl.int32))

    memory = (q_value, q_rest, codes, tail, scales, starts, weights, factors, full, empty, highest)
    main_tiles = (rows, keys, begin * KEYS, end, tiles)
    tiles_of_extra = (extra_rows, extra_keys, extra_begin * KEYS, extra_end, extra_tiles)
    gl.warp_specialize(
        [
            (consume, ((q, q_request, q_token, q_head), main_tiles, tiles_of_extra, scale_log2,
                       memory, scaled, results, shape, limits, L, EXTRA, N, PAGED, CAUSAL)),
            (produce, (main_tiles, tiles_of_extra, memory, L, EXTRA, PAGED)),
        ],
        [4],
        [40],
    )  # fmt: skip


@functools.cache
def plan_shared(num_rows: int, fmt: CacheFormat) -> tuple[int, int]:
    """Padded rows of a program, and 32-bit words of the scales of a key."""
    words = 1
    if fmt.scale_block:
        words = scale_words(fmt.fp8_dim, fmt.scale_block, fmt.scale_dtype.itemsize)
    return 16 if num_rows <= 16 else 32, triton.next_power_of_2(words)


def attend_columns_fp8(
    q: Tensor,
    q_strides: tuple[int, int, int],
    cache: PagedCache,
    stream: Stream,
    results: Results,
    shape: Shape,
    softmax_scale: float,
    *,
    num_groups: int,
    extra_cache: PagedCache | None = None,
    extra: Stream | None = None,
    paged: bool = False,
    causal: bool = False,
) -> None:
    """Launch over ``num_groups`` groups of rows. Strides: of a request, a token and a head.

    The caches of both streams have one format.
    """
    rows, layout = cache_arguments(cache)
    extra_rows, extra_layout = None, None
    if extra_cache is not None and extra is not None:
        extra_rows, extra_layout = cache_arguments(extra_cache)
    padded, words = plan_shared(shape.num_rows, cache.format)
    _attend_columns_fp8[(num_groups * shape.num_splits,)](
        q,
        *q_strides,
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
        N=padded,
        SCALE_WORDS=words,
        num_warps=8,
        launch_pdl=True,
    )

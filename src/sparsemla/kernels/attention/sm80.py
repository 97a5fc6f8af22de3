"""Attention with Ampere's instructions, for any NVIDIA GPU from sm_80 on: mma.sync and cp.async.

A CTA attends to one split of the keys of ``BLOCK_M`` query rows that share them, so a tile of keys
serves all its rows, and FP8 rows are dequantised once. Shared memory, 128 bytes a cycle, is the
bottleneck: every warp reads the tile's dims for its rows. Therefore the dims are cut into
``SLICES``, and a warp has one slice for more rows: of eight warps and 64 rows, a warp has 32 rows
and a quarter of the dims, so each byte of a tile is read twice. QK MMAs add up the dims of a slice.
The sums are exchanged through shared memory, and one warp takes the softmax of a row. P returns
through shared memory to the PV MMAs, which add to the same slice of O.

Two tiles of ``BLOCK_N`` keys alternate; the loop is unrolled by two, since Triton orders accesses
of one allocation by barriers, whatever its index is. bfloat16 dims arrive by cp.async. e4m3 codes
arrive in registers, a tile ahead of their dequantisation, which is a tile ahead of the MMAs. Slots
of 656-byte rows' codes are one more tile ahead::

    cp.async        bfloat16 dims of i+1         | of i+2
    loads           slots of i+2, codes of i+2   | slots of i+3, codes of i+3
    registers       QK i, codes i+1 to tile      | QK i+1, codes i+2 to tile
    exchange        S i, P i                     | S i+1, P i+1
    registers       softmax i, PV i              | softmax i+1, PV i+1

Triton places the barriers of the CTA: one after the copies of a tile have arrived, one before S
is read, one before P is read.

Shared memory for 64 rows of 576 dims and 32 keys, KiB: tiles 72, Q 72, S 32, P in the place of the
tile's RoPE dims; the first ``PARTS`` quarters of Q stay in registers. GPUs with 99 KiB get tiles of
16 keys. FP8 rows have two slices, since codes that wait in registers leave no room for S of four.

The mask of 656-byte rows, and that of small decodes over bfloat16 rows, reads the slots of the
copies from shared memory. Where tiles have 16 keys, O of 656-byte rows is rescaled only if a
maximum rose by more than 2^8: scores stay exact, weights of P are at most 256.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sparsemla.cache import PagedCache
from sparsemla.formats import FP8_DS_MLA, CacheFormat
from sparsemla.kernels.attention import calls
from sparsemla.kernels.attention.arguments import DenseDecode, SparseDecode, SparsePrefill
from sparsemla.kernels.attention.calls import KeyList, Queries, QueryRows, Results
from sparsemla.kernels.attention.rows import (
    LN2,
    LOG2E,
    LOWEST,
    decode_e8m0,
    is_slot,
    load_length,
    locate,
    query_dims,
    rows_of_tile,
)
from sparsemla.kernels.attention.schedule import has_large_tiles
from sparsemla.kernels.common.fp8 import has_fp8
from sparsemla.kernels.common.gluon import async_load, reinterpret
from sparsemla.kernels.common.integers import cdiv
from sparsemla.kernels.common.paged import cache_arguments

# Four e4m3 codes times a float32 scale, rounded to bfloat16 once. Without an instruction for it,
# the bits of two codes move to their places in two float16 over 256; see HALVES_OF_FOUR.
DEQUANTIZE_BITS = gl.constexpr("""{
    .reg .b32 p0, p1, m0, m1, n0, n1, z, c; .reg .b16 h0, h1, h2, h3; .reg .f32 f0, f1, f2, f3;
    mov.b32 z, 0;                          mov.b32 c, 0x5c005c00;
    prmt.b32 p0, $2, z, 0x1404;            prmt.b32 p1, $2, z, 0x3424;
    shr.u32 m0, p0, 1;                     shr.u32 m1, p1, 1;
    and.b32 m0, m0, 0x3f803f80;            and.b32 m1, m1, 0x3f803f80;
    add.u32 n0, m0, 0x00800080;            add.u32 n1, m1, 0x00800080;
    lop3.b32 m0, p0, 0x80008000, m0, 0xea; lop3.b32 m1, p1, 0x80008000, m1, 0xea;
    lop3.b32 m0, n0, 0x40004000, m0, 0xea; lop3.b32 m1, n1, 0x40004000, m1, 0xea;
    mul.rn.f16x2 m0, m0, c;                mul.rn.f16x2 m1, m1, c;
    mov.b32 {h0, h1}, m0;                  mov.b32 {h2, h3}, m1;
    cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3;
    mul.rn.f32 f0, f0, $3; mul.rn.f32 f1, f1, $3; mul.rn.f32 f2, f2, $3; mul.rn.f32 f3, f3, $3;
    cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }""")
DEQUANTIZE_NATIVE = gl.constexpr("""{
    .reg .b16 l, h, h0, h1, h2, h3; .reg .b32 a, b; .reg .f32 f0, f1, f2, f3;
    mov.b32 {l, h}, $2;
    cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h;
    mov.b32 {h0, h1}, a; mov.b32 {h2, h3}, b;
    cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1; cvt.f32.f16 f2, h2; cvt.f32.f16 f3, h3;
    mul.rn.f32 f0, f0, $3; mul.rn.f32 f1, f1, $3; mul.rn.f32 f2, f2, $3; mul.rn.f32 f3, f3, $3;
    cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }""")

# Shared memory: a tile as [SLICES, BLOCK_N, 512 / SLICES] bfloat16, and the same bytes as words.
KV_TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
KV_WORDS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
KV_SLICE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
ALPHA = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Tile(NamedTuple):
    """Sizes that a kernel is compiled for."""

    block_m: int
    """Query rows of a CTA: a multiple of 16 for each warp of a slice."""
    block_n: int
    """Keys of a tile."""
    slices: int
    """Slices of the dims, each of other warps."""
    num_warps: int
    """Warps of a CTA, a multiple of ``slices``."""
    query_parts: int
    """Quarters of the queries that stay in registers."""


class Options(NamedTuple):
    """What a kernel does for some formats and shapes; see :func:`choose_options`."""

    early: bool
    """Slots of codes come a tile before the codes."""
    slots: bool
    """The slots that a tile is copied by stay in shared memory, and the mask reads them there."""
    lazy: bool
    """O is rescaled only if a row's maximum rose by more than 2^8, hence m may be too low."""


class Keys(NamedTuple):
    """One split's part of a stream of keys; see ``KeyRange``."""

    rows: object
    entries: object
    begin: object
    end: object
    num_tiles: object


class Half(NamedTuple):
    """The shared memory of every other tile."""

    kv: object
    """512 dims, ``[SLICES, BLOCK_N, 512 / SLICES]``."""
    rope: object
    """Dims behind them, in the same slices."""
    slots: object
    """Slots that the tile is copied by, if ``Options.slots``."""
    p: object
    """P, ``[BLOCK_M, BLOCK_N]``."""


class Layouts(NamedTuple):
    """Layouts of a kernel, from its numbers of keys and warps; see :func:`layouts`."""

    mma: object
    softmax: object
    copy: object
    rope: object
    codes: object
    last: object
    keys: object
    rose: object


@triton.constexpr_function
def layouts(block_n, warps, slices, fp8_dim):
    rows = min(block_n // warps, 4)
    lanes = 8 // slices
    copy = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [1, warps, 1], [2, 1, 0])
    rope = gl.BlockedLayout(
        [1, 1, 8], [1, 32 // lanes, lanes], [slices, warps // slices, 1], [2, 1, 0]
    )
    return Layouts(
        mma=gl.NVMMADistributedLayout([2, 0], [slices, warps // slices, 1], [1, 16, 8]),
        softmax=gl.BlockedLayout([1, 4], [128 // block_n, block_n // 4], [warps, 1], [1, 0]),
        copy=copy,
        # With 8 warps, no register is left for slots in two layouts.
        rope=copy if warps == 8 and fp8_dim == 0 else rope,
        codes=gl.BlockedLayout([1, 1, 1, 2], [1, 4, 1, 8], [1, warps, 1, 1], [3, 2, 1, 0]),
        last=gl.BlockedLayout([1, 8], [rows, 32 // rows], [warps, 1], [1, 0]),
        keys=gl.BlockedLayout([4], [32], [warps], [0]),
        rose=gl.BlockedLayout([2], [32], [warps], [0]),
    )


@triton.constexpr_function
def stride(layout, field, axis):
    """The stride of pages (axis 0) or rows of a field of a cache, in elements."""
    return getattr(layout, field)[axis]


@gluon.jit
def tile_of_program(shape, BLOCK_M: gl.constexpr):
    """The first row of this CTA, its split, its request and the first token of its group."""
    num_tiles = gl.cdiv(shape.num_rows, BLOCK_M)
    group = gl.program_id(0) // num_tiles // shape.num_splits
    split = gl.program_id(0) // num_tiles % shape.num_splits
    request = (group // shape.group_tokens).to(gl.int64)
    token = (group % shape.group_tokens).to(gl.int64)
    return gl.program_id(0) % num_tiles * BLOCK_M, split.to(gl.int64), request, token


@gluon.jit
def find_end(stream, request, token, num_splits, LIST: gl.constexpr, PAGED: gl.constexpr):
    """Entries of a group, and its number of keys: without splits, up to the last valid slot."""
    entries = stream.keys + request * stream.keys_request + token * stream.keys_token
    end = stream.num_keys
    if stream.lengths is not None:
        length = gl.maximum(load_length(stream, request, token), 0)
        end = gl.minimum(length, end).to(gl.int32)
    if not PAGED and num_splits == 1:  # the search takes longer than the few tiles of a split
        used = 0
        for start in range(0, end, 2048):
            at = start + gl.arange(0, 2048, LIST)
            slots = gl.load(entries + at, mask=at < end, other=-1)
            valid = is_slot(slots, stream.num_slots)
            used = gl.maximum(used, gl.max(gl.where(valid, at + 1, 0), 0))
        end = used
    return entries, end


@gluon.jit
def slots_of_tile(
    keys,
    extra,
    tile,
    n,
    BLOCK_N: gl.constexpr,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    PAGED: gl.constexpr,
):
    """Slots of the keys ``n`` of a tile, -1 for none. Tiles of the extra stream come last.

    Streams are selected, not branched on: with a branch, ptxas spills the accumulators.
    """
    at = keys.begin + tile * BLOCK_N + n
    end = keys.end
    num_slots = keys.rows.num_slots
    offset = at.to(gl.int64)
    if EXTRA is not None:
        is_main = tile < keys.num_tiles
        SIZE: gl.constexpr = keys.entries.dtype.element_ty.primitive_bitwidth // 8
        distance = (extra.entries.to(gl.int64) - keys.entries.to(gl.int64)) // SIZE
        at = gl.where(is_main, at, extra.begin + (tile - keys.num_tiles) * BLOCK_N + n)
        offset = at.to(gl.int64) + gl.where(is_main, 0, distance)
        end = gl.where(is_main, end, extra.end)
        num_slots = gl.where(is_main, num_slots, extra.rows.num_slots)
    if PAGED:
        pages = gl.load(keys.entries + at // L.page_size, mask=at < end, other=-1)
        valid = is_slot(pages, num_slots // L.page_size)
        slots = pages.to(gl.int64) * L.page_size + at % L.page_size
    else:
        slots = gl.load(keys.entries + offset, mask=at < end, other=-1)
        valid = is_slot(slots, num_slots)
    return gl.where(valid, slots, -1).to(gl.int32)


@gluon.jit
def row_offset(slots, L: gl.constexpr, STRIDES: gl.constexpr, UNIT: gl.constexpr):
    """Where a field of rows of one cache begins; those of no slot have the first row's."""
    PAGE: gl.constexpr = stride(L, STRIDES, 0)
    ROW: gl.constexpr = stride(L, STRIDES, 1)
    if L.linear or ROW * L.page_size == PAGE:
        at = gl.maximum(slots, 0).to(gl.int64) * (ROW // UNIT)
    else:
        page, row = locate(gl.maximum(slots, 0), L)
        at = (page * PAGE + row * ROW) // UNIT
    return at


@gluon.jit
def row_offsets(
    slots,
    is_main,
    field,
    extra_field,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    STRIDES: gl.constexpr,
    UNIT: gl.constexpr,
    ALIGNED: gl.constexpr,
):
    """Where a field of rows begins, in ``UNIT`` elements of the strides, from the main cache's.

    ``ALIGNED``: both caches' fields begin at multiples of 16 bytes.
    """
    at = row_offset(slots, L, STRIDES, UNIT)
    if EXTRA is not None:
        other = row_offset(slots, EXTRA, STRIDES, UNIT)
        SIZE: gl.constexpr = field.dtype.element_ty.primitive_bitwidth // 8
        distance = (extra_field.to(gl.int64) - field.to(gl.int64)) // SIZE
        at = gl.where(is_main, at, other + distance)
        if ALIGNED:
            at = gl.multiple_of(at, [16 // SIZE])
    return at


@gluon.jit
def slots_in(
    keys,
    extra,
    tile,
    BLOCK_N: gl.constexpr,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    PAGED: gl.constexpr,
    KEYS: gl.constexpr,
):
    """Slots of a tile's keys, for copies whose rows lie in ``KEYS``."""
    return slots_of_tile(keys, extra, tile, gl.arange(0, BLOCK_N, KEYS), BLOCK_N, L, EXTRA, PAGED)


@gluon.jit
def copy_slices(
    keys,
    extra,
    tile,
    slots,
    to,
    START: gl.constexpr,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    COPY: gl.constexpr,
):
    """Copy a tile's bfloat16 dims from START on, by slices; rows of no slot become zeros."""
    SLICES: gl.constexpr = to.shape[0]
    WIDTH: gl.constexpr = to.shape[2]
    part = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, COPY)))[:, None, None]
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, COPY)))[None, None, :]
    field = keys.rows.bf16
    is_main = tile < keys.num_tiles
    at = row_offsets(slots, is_main, field, extra.rows.bf16, L, EXTRA, "bf16_strides", 1, True)
    source = field + at[None, :, None] + START + part * WIDTH + dim
    async_load(to, source, mask=(slots != -1)[None, :, None])


@gluon.jit
def copy_last_dims(
    keys,
    extra,
    tile,
    slots,
    kv,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    COPY: gl.constexpr,
):
    """Copy the last 64 dims of values whose other dims are quantised."""
    field = keys.rows.bf16
    is_main = tile < keys.num_tiles
    at = row_offsets(slots, is_main, field, extra.rows.bf16, L, EXTRA, "bf16_strides", 1, True)
    dim = gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    SLICES: gl.constexpr = kv.shape[0]
    SHAPE: gl.constexpr = [SLICES, kv.shape[1], 512 // SLICES]
    last = reinterpret(kv, gl.bfloat16, SHAPE, KV_SLICE).index(SLICES - 1)
    to = last.slice(512 // SLICES - 64, 64, dim=1)
    async_load(to, field + at[:, None] + dim, mask=(slots != -1)[:, None])


@gluon.jit
def load_ahead(
    keys,
    extra,
    tile,
    coming,
    BLOCK_N: gl.constexpr,
    SLICES: gl.constexpr,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    PAGED: gl.constexpr,
    T: gl.constexpr,
    V: gl.constexpr,
):
    """Slots of a tile, in the layout of each copy, and its codes and their scales."""
    COPY: gl.constexpr = T.copy
    ROPE: gl.constexpr = T.rope
    LAST: gl.constexpr = T.last
    if L.fp8_dim == 0:
        KEYS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, COPY))
        ahead = (slots_in(keys, extra, tile, BLOCK_N, L, EXTRA, PAGED, KEYS),)
    else:
        ahead = load_codes(keys, extra, tile, coming, BLOCK_N, SLICES, L, EXTRA, PAGED, T, V)
        if L.fp8_dim < 512:
            KEYS: gl.constexpr = gl.SliceLayout(1, LAST)
            ahead = ahead + (slots_in(keys, extra, tile, BLOCK_N, L, EXTRA, PAGED, KEYS),)
    if L.head_dim > 512 and ROPE != COPY:
        ROPE_KEYS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, ROPE))
        ahead = ahead + (slots_in(keys, extra, tile, BLOCK_N, L, EXTRA, PAGED, ROPE_KEYS),)
    return ahead


@gluon.jit
def copy_ahead(
    ahead,
    keys,
    extra,
    tile,
    half,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    T: gl.constexpr,
    V: gl.constexpr,
):
    """Start the copies of a tile: all that does not need a dequantisation."""
    COPY: gl.constexpr = T.copy
    ROPE: gl.constexpr = T.rope
    if L.fp8_dim == 0:
        copy_slices(keys, extra, tile, ahead[0], half.kv, 0, L, EXTRA, COPY)
    if L.head_dim > 512:
        copy_slices(keys, extra, tile, ahead[-1], half.rope, 512 - L.fp8_dim, L, EXTRA, ROPE)
    async_copy.commit_group()
    if V.slots:
        half.slots.store(ahead[-1])


@gluon.jit
def load_slots(
    keys,
    extra,
    tile,
    BLOCK_N: gl.constexpr,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    PAGED: gl.constexpr,
    T: gl.constexpr,
):
    """Slots of a tile, in the layout of its codes."""
    CODES: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, T.codes)))
    return slots_in(keys, extra, tile, BLOCK_N, L, EXTRA, PAGED, CODES)


@gluon.jit
def load_codes(
    keys,
    extra,
    tile,
    coming,
    BLOCK_N: gl.constexpr,
    SLICES: gl.constexpr,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    PAGED: gl.constexpr,
    T: gl.constexpr,
    V: gl.constexpr,
):
    """Codes of a tile's rows as words, ``[SLICES, BLOCK_N, 8 / SLICES, 16]``; their scales.

    The third axis are blocks of 64 dims.
    """
    BLOCKS: gl.constexpr = 8 // SLICES
    CODES: gl.constexpr = T.codes
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, CODES)))
    SLICE: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, CODES)))
    BLOCK: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, CODES)))
    WORD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, CODES)))
    n = gl.arange(0, BLOCK_N, ROW)
    if V.early and coming is not None:
        slots = coming
    else:
        slots = slots_of_tile(keys, extra, tile, n, BLOCK_N, L, EXTRA, PAGED)
    is_main = tile < keys.num_tiles
    part = gl.arange(0, SLICES, SLICE)[:, None, None]
    block = part * BLOCKS + gl.arange(0, BLOCKS, BLOCK)[None, None, :]
    valid = (slots != -1)[None, :, None]
    if L.fp8_dim < 512:
        valid = valid & (block < L.fp8_dim // 64)
    words = keys.rows.fp8.to(gl.pointer_type(gl.int32), bitcast=True)
    other = extra.rows.fp8.to(gl.pointer_type(gl.int32), bitcast=True)
    at = row_offsets(slots, is_main, words, other, L, EXTRA, "fp8_strides", 4, True)
    at = (at[None, :, None] + block * 16)[:, :, :, None]
    at, word = gl.broadcast(at, gl.arange(0, 16, WORD)[None, None, None, :])
    codes = gl.load(words + at + word, mask=valid[:, :, :, None], other=0)
    if L.scale_block == 0:
        scales = gl.full([1, 1, 1], 1.0, gl.float32, gl.SliceLayout(3, CODES))
    else:
        field = keys.rows.scales
        at = row_offsets(
            slots, is_main, field, extra.rows.scales, L, EXTRA, "scales_strides", 1, False
        )
        at = at[None, :, None] + block * 64 // L.scale_block
        scales = gl.load(field + at, mask=valid, other=0)
    return codes, scales


@gluon.jit
def store_dequantized(codes, scales, kv, NATIVE: gl.constexpr):
    """Dequantise a tile's rows and store them, zeros for dims that are not quantised."""
    if scales.dtype == gl.float32:
        factor = scales
    else:
        factor = decode_e8m0(scales.to(gl.int32))
    codes, factor = gl.broadcast(codes, factor[:, :, :, None])
    low, high = gl.inline_asm_elementwise(
        DEQUANTIZE_NATIVE if NATIVE else DEQUANTIZE_BITS,
        "=&r,=&r,r,r",
        [codes, factor],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    SHAPE: gl.constexpr = [kv.shape[0], kv.shape[1], kv.shape[2] // 2]
    reinterpret(kv, gl.int32, SHAPE, KV_WORDS).store(gl.join(low, high).reshape(SHAPE))


@gluon.jit
def dequantize_ahead(
    ahead,
    keys,
    extra,
    tile,
    kv,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    NATIVE: gl.constexpr,
    T: gl.constexpr,
):
    """Store a tile's quantised dims, then copy the values' last dims if they are not quantised."""
    LAST: gl.constexpr = T.last
    store_dequantized(ahead[0], ahead[1], kv, NATIVE)
    if L.fp8_dim < 512:
        copy_last_dims(keys, extra, tile, ahead[2], kv, L, EXTRA, LAST)
        async_copy.commit_group()


@gluon.jit
def load_queries(
    queries,
    request,
    token,
    begin,
    shape,
    START: gl.constexpr,
    SLICES: gl.constexpr,
    STEP: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_M: gl.constexpr,
    TOKENS: gl.constexpr,
    MMA: gl.constexpr,
    WARPS: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
):
    """``[SLICES, BLOCK_M, WIDTH]`` queries, slices of dims START + i STEP: operand or shared."""
    LANES: gl.constexpr = WIDTH // 8
    LOAD: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 32 // LANES, LANES], [1, WARPS, 1], [2, 1, 0]
    )
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LOAD))
    part = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, LOAD)))[:, None, None]
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, LOAD)))[None, None, :]
    in_group, head, real = rows_of_tile(begin, shape, BLOCK_M, ROW, TOKENS)
    q, request_stride, token_stride, head_stride = query_dims(queries, START)
    at = request * request_stride + (token + in_group) * token_stride + head * head_stride
    x = gl.load(q + at[None, :, None] + part * STEP + dim, mask=real[None, :, None], other=0.0)
    if IN_REGISTERS:
        part = gl.convert_layout(x, gl.DotOperandLayout(0, MMA, 2))
    else:
        SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // WIDTH, LANES, [2, 1, 0])
        part = gl.allocate_shared_memory(gl.bfloat16, [SLICES, BLOCK_M, WIDTH], SHARED, x)
    return part


@gluon.jit
def as_operand(part, MMA: gl.constexpr, IN_REGISTERS: gl.constexpr):
    """Queries as the QK MMA reads them."""
    if IN_REGISTERS:
        q = part
    else:
        q = part.load(gl.DotOperandLayout(0, MMA, 2))
    return q


@gluon.jit
def of_rows(x, MMA: gl.constexpr):
    """A value of each row, ``[1, BLOCK_M, 1]``, for O."""
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, MMA))
    return gl.convert_layout(x, ROW)[None, :, None]


@gluon.jit
def qk_mma(
    q, q_rope, kv, rope, s_shared, L: gl.constexpr, PARTS: gl.constexpr, MMA: gl.constexpr
):  # fmt: skip
    """Store S of a tile by slices of the dims, ``[SLICES, BLOCK_M, BLOCK_N]``."""
    SLICES: gl.constexpr = s_shared.shape[0]
    BLOCK_M: gl.constexpr = s_shared.shape[1]
    BLOCK_N: gl.constexpr = s_shared.shape[2]
    K: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    s = gl.zeros([SLICES, BLOCK_M, BLOCK_N], gl.float32, MMA)
    if L.head_dim > 512:
        s = mma_v2(as_operand(q_rope, MMA, False), rope.permute((0, 2, 1)).load(K), s)
    k = kv.permute((0, 2, 1))
    for part in gl.static_range(3, -1, -1):  # those in registers last
        k_part = k.slice(part * (128 // SLICES), 128 // SLICES, dim=1).load(K)
        s = mma_v2(as_operand(q[part], MMA, part < PARTS), k_part, s)
    SUMS: gl.constexpr = gl.SwizzledSharedLayout(8, 32 // BLOCK_N, BLOCK_N // 8, [2, 1, 0])
    reinterpret(s_shared, gl.float32, [SLICES, BLOCK_M, BLOCK_N], SUMS).store(s)


@gluon.jit
def sum_slices(s_shared, LAYOUT: gl.constexpr):
    """S of a tile, ``[BLOCK_M, BLOCK_N]``."""
    s = s_shared.index(0).load(LAYOUT)
    SLICES: gl.constexpr = s_shared.shape[0]
    for part in gl.static_range(1, SLICES):
        s += s_shared.index(part).load(LAYOUT)
    return s


@gluon.jit
def multiply_rows(acc, alpha_shared, MMA: gl.constexpr):
    """O times a factor of each row."""
    O_ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, MMA))
    return acc * alpha_shared.load(O_ROW)[None, :, None]


@gluon.jit
def rescale(acc, alpha_shared, T: gl.constexpr, V: gl.constexpr):
    """O after a rise of the maximum; all warps find out by themselves whether a row's rose."""
    MMA: gl.constexpr = T.mma
    if V.lazy:
        FLAT: gl.constexpr = T.rose
        rose = gl.max((alpha_shared.load(FLAT) != 1.0).to(gl.int32), 0)
        if rose != 0:
            acc = multiply_rows(acc, alpha_shared, MMA)
    else:
        acc = multiply_rows(acc, alpha_shared, MMA)
    return acc


@gluon.jit
def step(
    tile,
    half,
    other,
    s_shared,
    alpha_shared,
    q,
    q_rope,
    state,
    ahead,
    coming,
    keys,
    extra,
    limits,
    scale_log2,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    NATIVE: gl.constexpr,
    PARTS: gl.constexpr,
    T: gl.constexpr,
    V: gl.constexpr,
):
    """Attend to the tile in ``half``, and prepare the next one in ``other``. See the time line."""
    MMA: gl.constexpr = T.mma
    S: gl.constexpr = T.softmax
    SLICES: gl.constexpr = s_shared.shape[0]
    BLOCK_M: gl.constexpr = s_shared.shape[1]
    BLOCK_N: gl.constexpr = s_shared.shape[2]
    acc, m, l = state
    async_copy.wait_group(0)
    copy_ahead(ahead, keys, extra, tile + 1, other, L, EXTRA, T, V)
    qk_mma(q, q_rope, half.kv, half.rope, s_shared, L, PARTS, MMA)
    if L.fp8_dim > 0:
        dequantize_ahead(ahead, keys, extra, tile + 1, other.kv, L, EXTRA, NATIVE, T)
    ahead = load_ahead(keys, extra, tile + 2, coming, BLOCK_N, SLICES, L, EXTRA, PAGED, T, V)
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    if V.slots:
        slots = half.slots.load(gl.SliceLayout(0, S))
    else:
        slots = slots_of_tile(keys, extra, tile, n, BLOCK_N, L, EXTRA, PAGED)
    seen = (slots != -1)[None, :]
    if CAUSAL:
        seen = seen & ((keys.begin + tile * BLOCK_N + n)[None, :] < limits[:, None])

    s = gl.where(seen, sum_slices(s_shared, S) * scale_log2, float("-inf"))
    highest = gl.max(s, 1)
    if V.lazy:
        new_m = gl.where(highest > m + 8.0, highest, m)
    else:
        new_m = gl.maximum(m, highest)
    alpha = gl.exp2(m - new_m)
    p = gl.exp2(s - new_m[:, None])
    l = l * alpha + gl.sum(p, 1)
    half.p.store(p.to(gl.bfloat16))
    alpha_shared.store(alpha)
    acc = rescale(acc, alpha_shared, T, V)
    P: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    p = half.p.load(gl.SliceLayout(0, P))[None, :, :]
    p, _ = gl.broadcast(p, gl.zeros([SLICES, BLOCK_M, BLOCK_N], gl.bfloat16, P))
    acc = mma_v2(p, half.kv.load(gl.DotOperandLayout(1, MMA, 2)), acc)
    if V.early:
        coming = load_slots(keys, extra, tile + 3, BLOCK_N, L, EXTRA, PAGED, T)
    return (acc, new_m, l), ahead, coming


@gluon.jit
def _attend(
    queries,
    rows,
    stream,
    extra_rows,
    extra_stream,
    results,
    shape,
    scale_log2,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    SLICES: gl.constexpr,
    WARPS: gl.constexpr,
    PARTS: gl.constexpr,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    TOKENS: gl.constexpr,
    NATIVE: gl.constexpr,
    V: gl.constexpr,
):
    """A tile of query rows that share keys, and one split of the keys of both streams."""
    T: gl.constexpr = layouts(BLOCK_N, WARPS, SLICES, L.fp8_dim)
    MMA: gl.constexpr = T.mma
    S: gl.constexpr = T.softmax
    S_ROW: gl.constexpr = gl.SliceLayout(1, S)
    LIST: gl.constexpr = T.keys
    begin, split, request, token = tile_of_program(shape, BLOCK_M)

    entries, end = find_end(stream, request, token, shape.num_splits, LIST, PAGED)
    limits = gl.full([BLOCK_M], 0, gl.int32, S_ROW)
    if CAUSAL:
        in_group, head, real = rows_of_tile(begin, shape, BLOCK_M, S_ROW, True)
        query_len = shape.num_rows // shape.num_heads
        first_limit = (load_length(stream, request, token) - query_len + 1).to(gl.int32)
        limits = gl.minimum(end, first_limit + in_group.to(gl.int32))
        end = gl.maximum(gl.max(gl.where(real, limits, 0), 0), 0)
    all_tiles = gl.cdiv(end, BLOCK_N)
    all_extra = 0
    if EXTRA is not None:
        extra_entries, extra_end = find_end(
            extra_stream, request, token, shape.num_splits, LIST, False
        )
        all_extra = gl.cdiv(extra_end, BLOCK_N)
    per_split = gl.cdiv(all_tiles + all_extra, shape.num_splits)
    first = split.to(gl.int32) * per_split
    first_tile = gl.minimum(first, all_tiles)
    total = gl.minimum(first + per_split, all_tiles) - first_tile
    # Tiles from the split's last on have no keys: the loop takes two at a time, and looks ahead.
    end = gl.minimum(end, (first_tile + total) * BLOCK_N)
    keys = Keys(rows, entries, first_tile * BLOCK_N, end, total)
    extra = keys
    if EXTRA is not None:
        first_tile = gl.minimum(gl.maximum(first - all_tiles, 0), all_extra)
        behind = gl.minimum(gl.maximum(first + per_split - all_tiles, 0), all_extra)
        extra_end = gl.minimum(extra_end, behind * BLOCK_N)
        num_extra = behind - first_tile
        extra = Keys(extra_rows, extra_entries, first_tile * BLOCK_N, extra_end, num_extra)
        total += num_extra

    # First: queries arrive while the copies wait for their slots.
    ahead = load_ahead(keys, extra, 0, None, BLOCK_N, SLICES, L, EXTRA, PAGED, T, V)
    q = ()
    for part in gl.static_range(4):
        q = q + (
            load_queries(
                queries,
                request,
                token,
                begin,
                shape,
                part * (128 // SLICES),
                SLICES,
                512 // SLICES,
                128 // SLICES,
                BLOCK_M,
                TOKENS,
                MMA,
                WARPS,
                part < PARTS,
            ),
        )
    kv0 = gl.allocate_shared_memory(gl.bfloat16, [SLICES, BLOCK_N, 512 // SLICES], KV_TILE)
    kv1 = gl.allocate_shared_memory(gl.bfloat16, [SLICES, BLOCK_N, 512 // SLICES], KV_TILE)
    q_rope = kv0
    rope0 = kv0
    rope1 = kv1
    if L.head_dim > 512:
        ROPE: gl.constexpr = 64 // SLICES
        q_rope = load_queries(
            queries, request, token, begin, shape, 512, SLICES, ROPE, ROPE, BLOCK_M, TOKENS, MMA,
            WARPS, False,
        )  # fmt: skip
        ROPE_TILE: gl.constexpr = gl.SwizzledSharedLayout(8, SLICES, 8 // SLICES, [2, 1, 0])
        rope0 = gl.allocate_shared_memory(gl.bfloat16, [SLICES, BLOCK_N, ROPE], ROPE_TILE)
        rope1 = gl.allocate_shared_memory(gl.bfloat16, [SLICES, BLOCK_N, ROPE], ROPE_TILE)
    S_PART: gl.constexpr = gl.SwizzledSharedLayout(8, 32 // BLOCK_N, BLOCK_N // 8, [1, 0])
    s_shared = gl.allocate_shared_memory(gl.float32, [SLICES, BLOCK_M, BLOCK_N], S_PART)
    P_TILE: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // BLOCK_N, BLOCK_N // 8, [1, 0])
    if L.head_dim > 512 and BLOCK_M == 64:  # P is stored when QK has read the tile's RoPE dims
        p0 = reinterpret(rope0, gl.bfloat16, [BLOCK_M, BLOCK_N], P_TILE)
        p1 = reinterpret(rope1, gl.bfloat16, [BLOCK_M, BLOCK_N], P_TILE)
    else:
        p0 = gl.allocate_shared_memory(gl.bfloat16, [BLOCK_M, BLOCK_N], P_TILE)
        p1 = p0
    alpha_shared = gl.allocate_shared_memory(gl.float32, [BLOCK_M], ALPHA)

    slots0 = None
    slots1 = None
    if V.slots:
        slots0 = gl.allocate_shared_memory(gl.int32, [BLOCK_N], ALPHA)
        slots1 = gl.allocate_shared_memory(gl.int32, [BLOCK_N], ALPHA)
    even = Half(kv0, rope0, slots0, p0)
    odd = Half(kv1, rope1, slots1, p1)
    copy_ahead(ahead, keys, extra, 0, even, L, EXTRA, T, V)
    if L.fp8_dim > 0:
        dequantize_ahead(ahead, keys, extra, 0, kv0, L, EXTRA, NATIVE, T)
    coming = total
    if V.early:
        coming = load_slots(keys, extra, 2, BLOCK_N, L, EXTRA, PAGED, T)
    ahead = load_ahead(keys, extra, 1, None, BLOCK_N, SLICES, L, EXTRA, PAGED, T, V)
    acc = gl.zeros([SLICES, BLOCK_M, 512 // SLICES], gl.float32, MMA)
    m = gl.full([BLOCK_M], LOWEST, gl.float32, S_ROW)
    l = gl.zeros([BLOCK_M], gl.float32, S_ROW)
    state = (acc, m, l)
    for tile in range(0, total, 2):
        state, ahead, coming = step(
            tile, even, odd, s_shared, alpha_shared, q, q_rope, state, ahead, coming, keys,
            extra, limits, scale_log2, L, EXTRA, PAGED, CAUSAL, NATIVE, PARTS, T, V,
        )  # fmt: skip
        state, ahead, coming = step(
            tile + 1, odd, even, s_shared, alpha_shared, q, q_rope, state, ahead, coming, keys,
            extra, limits, scale_log2, L, EXTRA, PAGED, CAUSAL, NATIVE, PARTS, T, V,
        )  # fmt: skip
    acc, m, l = state
    async_copy.wait_group(0)

    in_group, head, real = rows_of_tile(begin, shape, BLOCK_M, S_ROW, TOKENS)
    token += in_group
    empty = l == 0
    lse = results.lse + split * results.lse_split + request * results.lse_request
    gl.store(lse + token * results.lse_token + head, (m + gl.log2(l)) * LN2, mask=real)
    if results.max_logits is not None:
        highest = gl.where(empty, float("-inf"), m * LN2)
        to = results.max_logits + request * results.max_logits_request + head
        gl.store(to, highest, mask=real)
    if results.attn_sink is not None:
        sinks = results.attn_sink
        if results.sink_token is not None:
            sinks += token * results.sink_token
        sink = gl.load(sinks + head, mask=real, other=0.0)
        l += gl.exp2(sink * LOG2E - m)
    acc = acc / of_rows(gl.where(empty, 1.0, l), MMA)
    acc = gl.where(of_rows(empty, MMA), 0.0, acc)
    at = split * results.out_split + request * results.out_request
    at += token * results.out_token + head * results.out_head
    part = gl.arange(0, SLICES, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None, None]
    dim = gl.arange(0, 512 // SLICES, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
    to = results.out + of_rows(at, MMA) + part * (512 // SLICES) + dim
    gl.store(to, acc.to(results.out.dtype.element_ty), mask=of_rows(real, MMA))


def choose_options(
    fmt: CacheFormat, num_rows: int, large: bool, prefill: bool, paged: bool, max_logits: bool
) -> Options:
    """What pays for ``num_rows`` query rows that share keys; see :func:`choose_tile`.

    ``max_logits``: the highest scores are wanted, so m has to be one of them.
    """
    early = fmt == FP8_DS_MLA
    return Options(
        early=early,
        slots=early or (fmt.fp8_dim == 0 and num_rows <= 64 and not prefill and not paged),
        # With tiles of 32 keys, the branch spills: 726 us for 458.
        lazy=early and num_rows > 16 and not large and not max_logits,
    )


def choose_tile(num_rows: int, fp8: bool, large: bool, prefill: bool) -> Tile:
    """The tile for ``num_rows`` query rows that share keys, over FP8 or bfloat16 rows.

    ``large``: a CTA may have more than 144 KiB of shared memory. ``prefill``: many groups of rows
    hide each other's latencies, and fewer warps pass fewer barriers.
    """
    if num_rows <= 16:
        if prefill:
            return Tile(16, 16, 4, 4, 2) if fp8 else Tile(16, 16, 2, 2, 2)
        return Tile(16, 16, 4, 4, 4) if fp8 else Tile(16, 32, 4, 4, 2)
    if num_rows <= 32:
        return Tile(32, 16, 4, 4, 2)
    if fp8:
        return Tile(64, 32, 2, 8, 1) if large else Tile(64, 16, 2, 8, 2)
    return Tile(64, 32 if large else 16, 4, 8, 2)


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
    prefill: bool = False,
) -> None:
    """Launch over ``num_groups`` groups of rows; see ``Launch``."""
    rows, layout = cache_arguments(cache)
    extra_rows, extra_layout = None, None
    if extra_cache is not None and extra is not None:
        extra_rows, extra_layout = cache_arguments(extra_cache)
    device = queries.q.device
    large = has_large_tiles(device)
    max_logits = results.max_logits is not None
    options = choose_options(cache.format, shape.num_rows, large, prefill, paged, max_logits)
    tile = choose_tile(shape.num_rows, layout.fp8_dim > 0, large, prefill)
    num_tiles = cdiv(shape.num_rows, tile.block_m)
    _attend[(num_groups * shape.num_splits * num_tiles,)](
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
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        SLICES=tile.slices,
        WARPS=tile.num_warps,
        PARTS=tile.query_parts,
        PAGED=paged,
        CAUSAL=causal,
        TOKENS=shape.num_rows > shape.num_heads,
        NATIVE=has_fp8(device),
        V=options,
        num_warps=tile.num_warps,
        maxnreg=255 if options.lazy else None,  # with the branch, ptxas may take 32
    )


def sparse_decode(call: SparseDecode) -> None:
    calls.sparse_decode(call, launch)


def dense_decode(call: DenseDecode) -> None:
    calls.dense_decode(call, launch)


def sparse_prefill(call: SparsePrefill) -> None:
    calls.sparse_prefill(call, functools.partial(launch, prefill=True))

"""Attention with Ampere's instructions, for any NVIDIA GPU from sm_80 on: mma.sync and cp.async.

A CTA attends to one split of the keys of ``BLOCK_M`` query rows that share them. Warps come in
pairs: the two warps of a pair have the same 16 rows, and each has a half of the dims. In the QK
MMA, the warps add up dims 0 to 255 and 512 to 543, or 256 to 511 and 544 to 575, and exchange
their sums through shared memory. Afterwards both have S, m, l and P of their rows, P is in the
registers that the PV MMA reads, and each warp accumulates its half of O, 128 registers a thread.
So a tile of keys serves all rows of the CTA, and FP8 rows are dequantised once for all of them.

Two tiles of ``BLOCK_N`` keys alternate; the loop is unrolled by two, since Triton orders accesses
of one allocation by barriers, whatever its index is. bfloat16 dims arrive by cp.async. e4m3 codes
arrive in registers, a tile ahead of their dequantisation, which is a tile ahead of the MMAs::

    cp.async        rope of i+1                  | rope of i+2
    loads           slots of i+2, codes of i+2   | slots of i+3, codes of i+3
    registers       QK i, codes i+1 to tile      | QK i+1, codes i+2 to tile
                    exchange, softmax i, PV i    | exchange, softmax i+1, PV i+1

Triton places the barriers of the CTA: one after the copies of a tile have arrived, one between
both sides of the exchange.

Shared memory for 64 rows and FP8 rows of 576 dims, KiB: tiles 72, Q 56, S 16; the first
``QUERY_PARTS`` quarters of Q stay in registers. GPUs with 99 KiB get tiles of 16 keys.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sparsemla.cache import PagedCache
from sparsemla.kernels.attention.arguments import DenseDecode, SparseDecode, SparsePrefill
from sparsemla.kernels.attention.schedule import has_large_tiles
from sparsemla.kernels.attention.sm90 import arguments
from sparsemla.kernels.attention.sm90.arguments import KeyList, Queries, QueryRows, Results
from sparsemla.kernels.attention.sm90.chunks import decode_e8m0
from sparsemla.kernels.attention.sm90.tiles import (
    LN2,
    LOG2E,
    LOWEST,
    is_slot,
    load_length,
    locate,
    query_dims,
)
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

# Shared memory: a tile as [2, BLOCK_N, 256] bfloat16, and the same bytes as words.
KV_TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [2, 1, 0]))
KV_WORDS = gl.constexpr(gl.SwizzledSharedLayout(4, 1, 8, [2, 1, 0]))
KV_HALF = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
ROPE_TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [2, 1, 0]))


class Tile(NamedTuple):
    """Sizes that a kernel is compiled for."""

    block_m: int
    """Query rows of a CTA, 16 for each pair of warps."""
    block_n: int
    """Keys of a tile."""
    query_parts: int
    """Quarters of the queries that stay in registers."""


class Keys(NamedTuple):
    """One split's part of a stream of keys; see ``KeyRange``."""

    rows: object
    entries: object
    begin: object
    end: object
    num_tiles: object


class Layouts(NamedTuple):
    """Layouts of a kernel, from its numbers of keys and warps; see :func:`layouts`."""

    mma: object
    copy: object
    codes: object
    last: object
    keys: object


@triton.constexpr_function
def layouts(block_n, warps):
    rows = min(block_n // warps, 4)
    return Layouts(
        mma=gl.NVMMADistributedLayout([2, 0], [2, warps // 2, 1], [1, 16, 8]),
        copy=gl.BlockedLayout([1, 1, 8], [1, rows, 32 // rows], [1, warps, 1], [2, 1, 0]),
        codes=gl.BlockedLayout([1, 1, 1, 2], [1, 4, 1, 8], [1, warps, 1, 1], [3, 2, 1, 0]),
        last=gl.BlockedLayout([1, 8], [rows, 32 // rows], [warps, 1], [1, 0]),
        keys=gl.BlockedLayout([4], [32], [warps], [0]),
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
def rows_of_tile(begin, shape, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr, TOKENS: gl.constexpr):
    """Token in the group, head and validity of the CTA's rows; ``TOKENS``: of several tokens."""
    row = begin + gl.arange(0, BLOCK_M, LAYOUT)
    if TOKENS:
        token = (row // shape.num_heads).to(gl.int64)
        head = (row % shape.num_heads).to(gl.int64)
    else:
        token = gl.zeros_like(row).to(gl.int64)
        head = row.to(gl.int64)
    return token, head, row < shape.num_rows


@gluon.jit
def find_end(stream, request, token, LIST: gl.constexpr, PAGED: gl.constexpr):
    """Entries of a group, and its number of keys: slots end with the last valid one."""
    entries = stream.keys + request * stream.keys_request + token * stream.keys_token
    end = stream.num_keys
    if stream.lengths is not None:
        end = gl.minimum(load_length(stream, request, token), end).to(gl.int32)
    if not PAGED:
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
    page, row = locate(gl.maximum(slots, 0), L)
    at = (page * stride(L, STRIDES, 0) + row * stride(L, STRIDES, 1)) // UNIT
    if EXTRA is not None:
        page, row = locate(gl.maximum(slots, 0), EXTRA)
        other = (page * stride(EXTRA, STRIDES, 0) + row * stride(EXTRA, STRIDES, 1)) // UNIT
        SIZE: gl.constexpr = field.dtype.element_ty.primitive_bitwidth // 8
        distance = (extra_field.to(gl.int64) - field.to(gl.int64)) // SIZE
        at = gl.where(is_main, at, other + distance)
        if ALIGNED:
            at = gl.multiple_of(at, [16 // SIZE])
    return at


@gluon.jit
def copy_bf16(
    keys,
    extra,
    tile,
    slots,
    kv,
    rope,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    COPY: gl.constexpr,
):
    """Copy bfloat16 values and RoPE dims of a tile's rows; rows of no slot become zeros."""
    if L.fp8_dim == 0 or L.head_dim > 512:
        HALF: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, COPY))
        DIM: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, COPY))
        field = keys.rows.bf16
        is_main = tile < keys.num_tiles
        at = row_offsets(slots, is_main, field, extra.rows.bf16, L, EXTRA, "bf16_strides", 1, True)
        source = field + at[None, :, None]
        valid = (slots != -1)[None, :, None]
        half = gl.arange(0, 2, HALF)[:, None, None]
        if L.fp8_dim == 0:
            dim = half * 256 + gl.arange(0, 256, DIM)[None, None, :]
            async_load(kv, source + dim, mask=valid)
        if L.head_dim > 512:
            dim = half * 32 + gl.arange(0, 32, DIM)[None, None, :]
            async_load(rope, source + (512 - L.fp8_dim) + dim, mask=valid)


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
    slots = gl.convert_layout(slots, gl.SliceLayout(1, COPY))
    field = keys.rows.bf16
    is_main = tile < keys.num_tiles
    at = row_offsets(slots, is_main, field, extra.rows.bf16, L, EXTRA, "bf16_strides", 1, True)
    dim = gl.arange(0, 64, gl.SliceLayout(0, COPY))[None, :]
    BLOCK_N: gl.constexpr = kv.shape[1]
    to = reinterpret(kv, gl.bfloat16, [2, BLOCK_N, 256], KV_HALF).index(1).slice(192, 64, dim=1)
    async_load(to, field + at[:, None] + dim, mask=(slots != -1)[:, None])


@gluon.jit
def load_codes(
    keys,
    extra,
    tile,
    BLOCK_N: gl.constexpr,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    PAGED: gl.constexpr,
    CODES: gl.constexpr,
):
    """Codes of a tile's rows as words, ``[2, BLOCK_N, 4, 16]`` in blocks of 64 dims; scales."""
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, gl.SliceLayout(3, CODES)))
    HALF: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, gl.SliceLayout(3, CODES)))
    BLOCK: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, CODES)))
    WORD: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, CODES)))
    n = gl.arange(0, BLOCK_N, ROW)
    slots = slots_of_tile(keys, extra, tile, n, BLOCK_N, L, EXTRA, PAGED)
    is_main = tile < keys.num_tiles
    block = gl.arange(0, 2, HALF)[:, None, None] * 4 + gl.arange(0, 4, BLOCK)[None, None, :]
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
    """Dequantise a tile's rows and store them."""
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
    BLOCK_N: gl.constexpr = codes.shape[1]
    words = reinterpret(kv, gl.int32, [2, BLOCK_N, 128], KV_WORDS)
    words.store(gl.join(low, high).reshape([2, BLOCK_N, 128]))


@gluon.jit
def load_queries(
    queries,
    request,
    token,
    begin,
    shape,
    START: gl.constexpr,
    HALF: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_M: gl.constexpr,
    TOKENS: gl.constexpr,
    MMA: gl.constexpr,
    IN_REGISTERS: gl.constexpr,
):
    """Dims from START and from START + HALF on, ``[2, BLOCK_M, WIDTH]``, as operand or shared."""
    LANES: gl.constexpr = WIDTH // 8
    LOAD: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 32 // LANES, LANES], [1, BLOCK_M // 8, 1], [2, 1, 0]
    )
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LOAD))
    half = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, LOAD)))[:, None, None]
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, gl.SliceLayout(1, LOAD)))[None, None, :]
    in_group, head, real = rows_of_tile(begin, shape, BLOCK_M, ROW, TOKENS)
    q, request_stride, token_stride, head_stride = query_dims(queries, START)
    at = request * request_stride + (token + in_group) * token_stride + head * head_stride
    x = gl.load(q + at[None, :, None] + half * HALF + dim, mask=real[None, :, None], other=0.0)
    if IN_REGISTERS:
        part = gl.convert_layout(x, gl.DotOperandLayout(0, MMA, 2))
    else:
        SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 64 // WIDTH, LANES, [2, 1, 0])
        part = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_M, WIDTH], SHARED, x)
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
def qk_mma(q, q_rope, kv, rope, s_shared, L: gl.constexpr, PARTS: gl.constexpr, MMA: gl.constexpr):
    """S of a tile, ``[BLOCK_M, BLOCK_N]``: the sum of both warps of a pair."""
    BLOCK_M: gl.constexpr = s_shared.shape[1]
    BLOCK_N: gl.constexpr = s_shared.shape[2]
    K: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    S: gl.constexpr = gl.SliceLayout(0, MMA)
    s = gl.zeros([2, BLOCK_M, BLOCK_N], gl.float32, MMA)
    if L.head_dim > 512:
        s = mma_v2(as_operand(q_rope, MMA, False), rope.permute((0, 2, 1)).load(K), s)
    k = kv.permute((0, 2, 1))
    for part in gl.static_range(3, -1, -1):  # those in registers last
        k_part = k.slice(part * 64, 64, dim=1).load(K)
        s = mma_v2(as_operand(q[part], MMA, part < PARTS), k_part, s)
    HALVES: gl.constexpr = gl.SwizzledSharedLayout(4, 32 // BLOCK_N, BLOCK_N // 4, [2, 1, 0])
    reinterpret(s_shared, gl.float32, [2, BLOCK_M, BLOCK_N], HALVES).store(s)
    return s_shared.index(0).load(S) + s_shared.index(1).load(S)


@gluon.jit
def step(
    tile,
    kv,
    rope,
    next_kv,
    next_rope,
    s_shared,
    q,
    q_rope,
    state,
    slots,
    seen_slots,
    ahead,
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
):
    """Attend to a tile, and prepare the next one. See the time line above.

    ``slots``, ``ahead``: slots and codes of the next tile; ``seen_slots``: slots of this one.
    """
    MMA: gl.constexpr = T.mma
    COPY: gl.constexpr = T.copy
    CODES: gl.constexpr = T.codes
    LAST: gl.constexpr = T.last
    S: gl.constexpr = gl.SliceLayout(0, MMA)
    BLOCK_M: gl.constexpr = s_shared.shape[1]
    BLOCK_N: gl.constexpr = s_shared.shape[2]
    acc, m, l = state
    async_copy.wait_group(0)
    copy_bf16(keys, extra, tile + 1, slots, next_kv, next_rope, L, EXTRA, COPY)
    async_copy.commit_group()
    s = qk_mma(q, q_rope, kv, rope, s_shared, L, PARTS, MMA) * scale_log2
    if L.fp8_dim > 0:
        store_dequantized(ahead[0], ahead[1], next_kv, NATIVE)
        if L.fp8_dim < 512:
            copy_last_dims(keys, extra, tile + 1, slots, next_kv, L, EXTRA, LAST)
            async_copy.commit_group()
        ahead = load_codes(keys, extra, tile + 2, BLOCK_N, L, EXTRA, PAGED, CODES)
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    slots = slots_of_tile(keys, extra, tile + 2, n, BLOCK_N, L, EXTRA, PAGED)
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    seen = (seen_slots != -1)[None, :]
    if CAUSAL:
        seen = seen & ((keys.begin + tile * BLOCK_N + n)[None, :] < limits[:, None])
    seen_slots = slots_of_tile(keys, extra, tile + 1, n, BLOCK_N, L, EXTRA, PAGED)

    s = gl.where(seen, s, float("-inf"))
    new_m = gl.maximum(m, gl.max(s, 1))
    alpha = gl.exp2(m - new_m)
    p = gl.exp2(s - new_m[:, None])
    l = l * alpha + gl.sum(p, 1)
    both = gl.zeros([2, BLOCK_M, BLOCK_N], gl.bfloat16, MMA)
    p, both = gl.broadcast(p.to(gl.bfloat16)[None, :, :], both)
    acc = acc * of_rows(alpha, MMA)
    p = gl.convert_layout(p, gl.DotOperandLayout(0, MMA, 2))
    acc = mma_v2(p, kv.load(gl.DotOperandLayout(1, MMA, 2)), acc)
    return (acc, new_m, l), slots, seen_slots, ahead


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
    PARTS: gl.constexpr,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
    TOKENS: gl.constexpr,
    NATIVE: gl.constexpr,
):
    """A tile of query rows that share keys, and one split of the keys of both streams."""
    T: gl.constexpr = layouts(BLOCK_N, BLOCK_M // 8)
    MMA: gl.constexpr = T.mma
    COPY: gl.constexpr = T.copy
    CODES: gl.constexpr = T.codes
    LAST: gl.constexpr = T.last
    S: gl.constexpr = gl.SliceLayout(0, MMA)
    S_ROW: gl.constexpr = gl.SliceLayout(1, S)
    LIST: gl.constexpr = T.keys
    begin, split, request, token = tile_of_program(shape, BLOCK_M)

    entries, end = find_end(stream, request, token, LIST, PAGED)
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
        extra_entries, extra_end = find_end(extra_stream, request, token, LIST, False)
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

    q = ()
    for part in gl.static_range(4):
        q = q + (
            load_queries(
                queries,
                request,
                token,
                begin,
                shape,
                part * 64,
                256,
                64,
                BLOCK_M,
                TOKENS,
                MMA,
                part < PARTS,
            ),
        )
    kv0 = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, 256], KV_TILE)
    kv1 = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, 256], KV_TILE)
    q_rope = kv0
    rope0 = kv0
    rope1 = kv1
    if L.head_dim > 512:
        q_rope = load_queries(
            queries, request, token, begin, shape, 512, 32, 32, BLOCK_M, TOKENS, MMA, False
        )
        rope0 = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, 32], ROPE_TILE)
        rope1 = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_N, 32], ROPE_TILE)
    S_HALF: gl.constexpr = gl.SwizzledSharedLayout(4, 32 // BLOCK_N, BLOCK_N // 4, [1, 0])
    s_shared = gl.allocate_shared_memory(gl.float32, [2, BLOCK_M, BLOCK_N], S_HALF)

    n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, gl.SliceLayout(2, COPY)))
    slots = slots_of_tile(keys, extra, 0, n, BLOCK_N, L, EXTRA, PAGED)
    copy_bf16(keys, extra, 0, slots, kv0, rope0, L, EXTRA, COPY)
    if L.fp8_dim > 0:
        codes, scales = load_codes(keys, extra, 0, BLOCK_N, L, EXTRA, PAGED, CODES)
        store_dequantized(codes, scales, kv0, NATIVE)
        if L.fp8_dim < 512:
            copy_last_dims(keys, extra, 0, slots, kv0, L, EXTRA, LAST)
        ahead = load_codes(keys, extra, 1, BLOCK_N, L, EXTRA, PAGED, CODES)
    else:
        ahead = ()
    async_copy.commit_group()
    slots = slots_of_tile(keys, extra, 1, n, BLOCK_N, L, EXTRA, PAGED)
    n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))
    seen_slots = slots_of_tile(keys, extra, 0, n, BLOCK_N, L, EXTRA, PAGED)
    acc = gl.zeros([2, BLOCK_M, 256], gl.float32, MMA)
    m = gl.full([BLOCK_M], LOWEST, gl.float32, S_ROW)
    l = gl.zeros([BLOCK_M], gl.float32, S_ROW)
    state = (acc, m, l)
    for tile in range(0, total, 2):
        state, slots, seen_slots, ahead = step(
            tile, kv0, rope0, kv1, rope1, s_shared, q, q_rope, state, slots, seen_slots, ahead,
            keys, extra, limits, scale_log2, L, EXTRA, PAGED, CAUSAL, NATIVE, PARTS, T,
        )  # fmt: skip
        state, slots, seen_slots, ahead = step(
            tile + 1, kv1, rope1, kv0, rope0, s_shared, q, q_rope, state, slots, seen_slots, ahead,
            keys, extra, limits, scale_log2, L, EXTRA, PAGED, CAUSAL, NATIVE, PARTS, T,
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
        sink = gl.load(results.attn_sink + head, mask=real, other=0.0)
        l += gl.exp2(sink * LOG2E - m)
    acc = acc / of_rows(gl.where(empty, 1.0, l), MMA)
    acc = gl.where(of_rows(empty, MMA), 0.0, acc)
    at = split * results.out_split + request * results.out_request
    at += token * results.out_token + head * results.out_head
    half = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None, None]
    dim = gl.arange(0, 256, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
    to = results.out + of_rows(at, MMA) + half * 256 + dim
    gl.store(to, acc.to(results.out.dtype.element_ty), mask=of_rows(real, MMA))


def choose_tile(num_rows: int, fp8: bool, large: bool) -> Tile:
    """The tile for ``num_rows`` query rows that share keys, over FP8 or bfloat16 rows.

    ``large``: a CTA may have more than 144 KiB of shared memory.
    """
    if num_rows <= 16:
        return Tile(16, 16, 0 if fp8 else 2)
    if num_rows <= 32:
        return Tile(32, 16, 2)
    return Tile(64, 32, 1) if large else Tile(64, 16, 2)


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
    """Launch over ``num_groups`` groups of rows; see ``Launch``."""
    rows, layout = cache_arguments(cache)
    extra_rows, extra_layout = None, None
    if extra_cache is not None and extra is not None:
        extra_rows, extra_layout = cache_arguments(extra_cache)
    device = queries.q.device
    tile = choose_tile(shape.num_rows, layout.fp8_dim > 0, has_large_tiles(device))
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
        PARTS=tile.query_parts,
        PAGED=paged,
        CAUSAL=causal,
        TOKENS=shape.num_rows > shape.num_heads,
        NATIVE=has_fp8(device),
        num_warps=tile.block_m // 8,
    )


def sparse_decode(call: SparseDecode) -> None:
    arguments.sparse_decode(call, launch)


def dense_decode(call: DenseDecode) -> None:
    arguments.dense_decode(call, launch)


def sparse_prefill(call: SparsePrefill) -> None:
    arguments.sparse_prefill(call, launch)

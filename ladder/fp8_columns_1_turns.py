"""Attention on Hopper of up to 32 rows that share keys: keys on M of a product, rows on N.

Two warpgroups take turns: each attends to every other tile of 64 keys, with its own maximum, sum
and weighted values, and in the end both are put together. A third one copies rows of the cache.
e4m3 rows come as they are stored through a ring of chunks of 128 bytes a key. A consumer converts a
chunk in registers, which are the left operand of the scores at once, and stores the same registers
as values, a bfloat16 tile that is the transposed left operand of the weighted sum. bfloat16 rows
are copied straight to where products read them.

What bounds it: docs/kernels.md.

Superseded for quantised caches at a92883c. One H200, 656 bytes, 2048 keys, batch 128, us with 16 and 32 heads: 75.6 and 92.8
(now 67.2 and 76.0; copies alone 60). Each warpgroup has a maximum, sums and code of its own, and e4m3 takes six instructions
for two codes on its way to bfloat16.
Runs in place of its namesake at f3bfb5f.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

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
from sparsemla.kernels.common.attention import cache_arguments
from sparsemla.kernels.common.gluon import async_load, opaque_zero, reinterpret
from sparsemla.kernels.common.hopper_rows import (
    LN2,
    LOG2E,
    LOWEST,
    PLAIN,
    TILE,
    Results,
    Shape,
    Stream,
    end_of,
    to_bf16,
)

MAX_ROWS = 32
SHARED = 227 * 1024
KEYS = gl.constexpr(64)

# Copies: 8 lanes take 128 bytes of a row, a thread the same rows of each part of a row.
COPY8 = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
COPY16 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
COPY32 = gl.constexpr(gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0]))
COPY_ROWS = gl.constexpr(gl.SliceLayout(1, COPY8))
BF16_ROWS = gl.constexpr(gl.SliceLayout(1, COPY16))

# A thread has 16 neighbouring dims of two keys: as many as four steps of a product take from it.
DIMS128 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0], [0, 64]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)
DIMS64 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [8, 0]],
        [[0, 16], [0, 32], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)

# Swizzled so that the two keys which eight lanes read at once lie in different banks.
RAW8 = gl.constexpr(gl.SwizzledSharedLayout(64, 1, 2, [1, 0]))
RAW8_HALF = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 1, [1, 0]))
RAW16 = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
SUMS = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [0, 1]))
WORDS2 = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
RESULTS = gl.constexpr(gl.BlockedLayout([4, 1], [32, 1], [1, 4], [0, 1]))

CONVERT = gl.constexpr("""{
    .reg .b16 l, h; .reg .b32 a, b; .reg .f16 a0, a1, b0, b1; .reg .f32 f0, f1, f2, f3;
    mov.b32 {l, h}, $2;
    cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h;
    mov.b32 {a0, a1}, a; mov.b32 {b0, b1}, b;
    cvt.f32.f16 f0, a0; cvt.f32.f16 f1, a1; cvt.f32.f16 f2, b0; cvt.f32.f16 f3, b1;
    mul.f32 f0, f0, $3; mul.f32 f1, f1, $4; mul.f32 f2, f2, $5; mul.f32 f3, f3, $6;
    cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2; }""")


class Shared(NamedTuple):
    """Shared memory of a program: padded heads, chunks of the ring, words and tiles of scales."""

    heads: int
    ring: int
    scale_words: int
    scale_tiles: int


class Where(NamedTuple):
    """What a program writes of :class:`Results`, from its first token on."""

    out: Tensor
    out_token: int
    out_head: int
    lse: Tensor
    lse_token: int
    max_logits: Tensor | None
    max_logits_at: int
    attn_sink: Tensor | None


@triton.constexpr_function
def num_chunks(fp8_dim, head_dim):
    """Pieces of 128 bytes that a row is copied in; the last one of its e4m3 may have 64."""
    return -(-fp8_dim // 128) + (head_dim - fp8_dim) // 64


@triton.constexpr_function
def chunk_start(fp8_dim, chunk):
    """First dim of a chunk."""
    quantised = -(-fp8_dim // 128)
    return 128 * chunk if chunk < quantised else fp8_dim + 64 * (chunk - quantised)


@triton.constexpr_function
def chunk_width(fp8_dim, start):
    """Dims of the chunk that begins at ``start``."""
    return min(128, fp8_dim - start) if start < fp8_dim else 64


@triton.constexpr_function
def scale_words(fp8_dim, scale_block, itemsize):
    """32-bit words that hold the scales of a row."""
    num_scales = -(-fp8_dim // scale_block)
    return -(-num_scales * itemsize // 4)


@gluon.jit
def is_slot(slots, num_slots):
    """Whether entries of a list name a row."""
    return (slots >= 0) & (slots < num_slots)


@gluon.jit
def load_entries(keys, at, end, L: gl.constexpr, PAGED: gl.constexpr):
    """Entries of a list of slots, or pages of keys; what lies behind the end is none."""
    return gl.load(keys + (at // L.page_size if PAGED else at), mask=at < end, other=-1)


@gluon.jit
def slots_of(entries, at, L: gl.constexpr, PAGED: gl.constexpr):
    """Slots of the keys ``at``; not done when entries are loaded, which are waited for here."""
    return entries.to(gl.int64) * L.page_size + at % L.page_size if PAGED else entries


@gluon.jit
def locate(slots, L: gl.constexpr):
    """Page and row of slots, as int64; the page of a linear cache is 0."""
    slots = slots.to(gl.int32).to(gl.uint32)
    if L.linear:
        page = gl.zeros_like(slots)
        row = slots
    else:
        page = slots // L.page_size
        row = slots % L.page_size
    return page.to(gl.int64), row.to(gl.int64)


@gluon.jit
def fp8_chunk(raw, slot, WIDTH: gl.constexpr, RING: gl.constexpr):
    """A place of the ring as e4m3 codes ``[KEYS, WIDTH]``."""
    if WIDTH == 128:
        chunk = reinterpret(raw, gl.uint8, [RING, KEYS, 128], RAW8).index(slot)
    else:
        chunk = reinterpret(raw, gl.uint8, [2 * RING, KEYS, 64], RAW8_HALF).index(2 * slot)
    return chunk


@gluon.jit
def bf16_chunk(raw, slot, RING: gl.constexpr):
    """A place of the ring as bfloat16 ``[KEYS, 64]``."""
    return reinterpret(raw, gl.bfloat16, [RING, KEYS, 64], RAW16).index(slot)


@gluon.jit
def copy_fp8(
    raw, slot, rows, first, valid, START: gl.constexpr, L: gl.constexpr, RING: gl.constexpr
):
    WIDTH: gl.constexpr = chunk_width(L.fp8_dim, START)
    dim = START + gl.arange(0, WIDTH, gl.SliceLayout(0, COPY8))
    source = rows.fp8 + first[:, None] + dim[None, :]
    async_load(fp8_chunk(raw, slot, WIDTH, RING), source, mask=valid[:, None])


@gluon.jit
def copy_bf16(
    raw, slot, rows, first, valid, START: gl.constexpr, L: gl.constexpr, RING: gl.constexpr
):
    first = gl.convert_layout(first, BF16_ROWS)
    valid = gl.convert_layout(valid, BF16_ROWS)
    dim = START - L.fp8_dim + gl.arange(0, 64, gl.SliceLayout(0, COPY16))
    source = rows.bf16 + first[:, None] + dim[None, :]
    async_load(bf16_chunk(raw, slot, RING), source, mask=valid[:, None])


@gluon.jit
def copy_scales(to, rows, page, row, valid, L: gl.constexpr):
    """32-bit words of scales; each word has the keys side by side."""
    SIZE: gl.constexpr = rows.scales.dtype.element_ty.primitive_bitwidth // 8
    WORDS: gl.constexpr = scale_words(L.fp8_dim, L.scale_block, SIZE)
    first = page * (L.scales_strides[0] * SIZE // 4) + row * (L.scales_strides[1] * SIZE // 4)
    first = gl.convert_layout(first, gl.SliceLayout(1, COPY32))
    valid = gl.convert_layout(valid, gl.SliceLayout(1, COPY32))
    word = gl.arange(0, to.shape[0], gl.SliceLayout(0, COPY32))
    source = rows.scales.to(gl.pointer_type(gl.int32), bitcast=True)
    source = source + first[:, None] + word[None, :]
    async_load(to.permute((1, 0)), source, mask=valid[:, None] & (word < WORDS)[None, :])


@gluon.jit
def copy_tiles(
    stream,
    tile,
    chunk,
    memory,
    L: gl.constexpr,
    RING: gl.constexpr,
    PAGED: gl.constexpr,
):
    """Copy the rows of a stream's tiles, as they are stored, into the ring of chunks."""
    rows, keys, begin, end, tiles = stream
    _, _, _, _, raw, scales, full, empty = memory
    CHUNKS: gl.constexpr = num_chunks(L.fp8_dim, L.head_dim)
    at = begin + gl.arange(0, KEYS, COPY_ROWS)
    entries = load_entries(keys, at, end, L, PAGED)
    following = load_entries(keys, at + KEYS, end, L, PAGED)
    for i in range(tiles):
        slots = slots_of(entries, at, L, PAGED)
        later = load_entries(keys, at + 2 * KEYS, end, L, PAGED)
        at += KEYS
        valid = is_slot(slots, rows.num_slots)
        page, row = locate(gl.where(valid, slots, 0), L)
        fp8 = page * L.fp8_strides[0] + row * L.fp8_strides[1]
        bf16 = page * L.bf16_strides[0] + row * L.bf16_strides[1]
        for j in gl.static_range(CHUNKS):
            place = chunk + i * CHUNKS + j
            slot = place % RING
            mbarrier.wait(empty.index(slot), (place // RING) & 1 ^ 1)
            if j == 0 and L.scale_block > 0:
                copy_scales(scales.index((tile + i) % scales.shape[0]), rows, page, row, valid, L)
            if chunk_start(L.fp8_dim, j) < L.fp8_dim:
                copy_fp8(raw, slot, rows, fp8, valid, chunk_start(L.fp8_dim, j), L, RING)
            else:
                copy_bf16(raw, slot, rows, bf16, valid, chunk_start(L.fp8_dim, j), L, RING)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        entries = following
        following = later


@gluon.jit
def copy_half(source, valid, to, full, empty, phase, START: gl.constexpr, WIDTH: gl.constexpr):
    """Copy dims of bfloat16 rows once their place is free."""
    mbarrier.wait(empty, phase)
    dim = START + gl.arange(0, WIDTH, gl.SliceLayout(0, COPY16))
    async_load(to, source + dim[None, :], mask=valid)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def copy_bf16_tiles(stream, tile, memory, L: gl.constexpr, PAGED: gl.constexpr):
    """Copy the rows of a stream's bfloat16 tiles to where products read them."""
    rows, keys, begin, end, tiles = stream
    _, _, values, _, rest, _, full, empty = memory
    at = begin + gl.arange(0, KEYS, BF16_ROWS)
    entries = load_entries(keys, at, end, L, PAGED)
    for i in range(tiles):
        slots = slots_of(entries, at, L, PAGED)
        at += KEYS
        entries = load_entries(keys, at, end, L, PAGED)
        valid = is_slot(slots, rows.num_slots)
        page, row = locate(gl.where(valid, slots, 0), L)
        source = rows.bf16 + (page * L.bf16_strides[0] + row * L.bf16_strides[1])[:, None]
        valid = valid[:, None]
        who = (tile + i) % 2
        phase = (tile + i) // 2 & 1 ^ 1
        bar = 3 * who
        if L.head_dim > 512:
            copy_half(
                source, valid, rest.index(who), full.index(bar), empty.index(bar), phase, 512, 64
            )
        for half in gl.static_range(2):
            bar = 3 * who + 1 + half
            to = values.index(2 * who + half)
            copy_half(source, valid, to, full.index(bar), empty.index(bar), phase, 256 * half, 256)


@gluon.jit
def produce(
    stream,
    extra,
    memory,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    RING: gl.constexpr,
    PAGED: gl.constexpr,
):
    """The warpgroup that copies."""
    tiles = stream[4]
    if L.fp8_dim == 0:
        copy_bf16_tiles(stream, 0, memory, L, PAGED)
        if EXTRA is not None:
            copy_bf16_tiles(extra, tiles, memory, EXTRA, PAGED)
    else:
        copy_tiles(stream, 0, 0, memory, L, RING, PAGED)
        if EXTRA is not None:
            chunks = tiles * num_chunks(L.fp8_dim, L.head_dim)
            copy_tiles(extra, tiles, chunks, memory, EXTRA, RING, PAGED)


@gluon.jit
def scale_of(scales, rows, tile, dim, L: gl.constexpr, DIMS: gl.constexpr):
    """float32 scales of the tile's keys for one dim."""
    SIZE: gl.constexpr = rows.scales.dtype.element_ty.primitive_bitwidth // 8
    index = dim // L.scale_block
    NUM_WORDS: gl.constexpr = scales.shape[1]
    words = reinterpret(scales, gl.int32, [scales.shape[0] * NUM_WORDS, KEYS], PLAIN)
    word = words.index(tile % scales.shape[0] * NUM_WORDS + index * SIZE // 4)
    bits = word.load(gl.SliceLayout(1, DIMS))
    if SIZE == 1:
        code = (bits >> (index % 4 * 8)) & 0xFF
        bits = gl.where(code == 0, 0x400000, code << 23)
        bits = gl.where(code == 255, 0x7FC00000, bits)
    return bits.to(gl.float32, bitcast=True)


@gluon.jit
def decoded(
    raw,
    scales,
    rows,
    tile,
    slot,
    release,
    dim,
    WIDTH: gl.constexpr,
    L: gl.constexpr,
    RING: gl.constexpr,
):
    """bfloat16 dims from ``dim`` on of a chunk of e4m3, whose place in the ring is given back."""
    DIMS: gl.constexpr = DIMS128 if WIDTH == 128 else DIMS64
    codes = fp8_chunk(raw, slot, WIDTH, RING).load(DIMS)
    if L.scale_block == 0:
        scale = gl.full([KEYS, 1], 1.0, gl.float32, DIMS)
    elif L.scale_block >= WIDTH:
        scale = scale_of(scales, rows, tile, dim, L, DIMS)[:, None]
    else:
        low = scale_of(scales, rows, tile, dim, L, DIMS)
        high = scale_of(scales, rows, tile, dim + 64, L, DIMS)
        second = gl.arange(0, WIDTH, gl.SliceLayout(0, DIMS)) >= 64
        scale = gl.where(second[None, :], high[:, None], low[:, None])
    mbarrier.arrive(release, count=1)
    codes, scale = gl.broadcast(codes, scale)
    return gl.inline_asm_elementwise(
        CONVERT, "=r,=r,r,f,f,f,f", [codes, scale], dtype=gl.bfloat16, is_pure=True, pack=4
    )


@gluon.jit
def in_order(x):
    """Dims of rows in the order in which a product takes them from :data:`DIMS128`."""
    SEGMENTS: gl.constexpr = x.shape[1] // 64
    x = x.reshape(x.shape[0], SEGMENTS, 4, 4, 2, 2).permute(0, 1, 3, 4, 2, 5)
    return x.reshape(x.shape[0], SEGMENTS * 64)


@gluon.jit
def out_of_order(x):
    """The weighted sums of values that were stored :func:`in_order`, in their own order."""
    x = x.reshape(x.shape[0] // 64, 4, 2, 4, 2, x.shape[1]).permute(0, 3, 1, 2, 4, 5)
    return x.reshape(256, x.shape[5])


@gluon.jit
def score_chunk(
    s,
    z,
    rows,
    tile,
    place,
    block,
    memory,
    START: gl.constexpr,
    L: gl.constexpr,
    RING: gl.constexpr,
    WHO: gl.constexpr,
):
    """Scores plus those of a chunk: as wide as the one at ``START``, in the ``block``th 128 dims.

    Dims are kept if they are part of the value. The registers of the operand are what is stored:
    values have the operand's order of dims.
    """
    q_value, q_rest, values, _, raw, scales, full, empty = memory
    WIDTH: gl.constexpr = chunk_width(L.fp8_dim, START)
    N: gl.constexpr = s.shape[1]
    slot = place % RING
    mbarrier.wait(full.index(slot), (place // RING) & 1)
    if L.fp8_dim > START:
        dim = block * 128 + START % 128
        x = decoded(raw, scales, rows, tile, slot, empty.index(slot), dim, WIDTH, L, RING)
    else:
        x = bf16_chunk(raw, slot, RING).load(DIMS64)
        mbarrier.arrive(empty.index(slot), count=1)
    keys = gl.convert_layout(in_order(x), gl.DotOperandLayout(0, s.type.layout, 2))
    if START < 512:
        value = reinterpret(values, gl.bfloat16, [8, KEYS, 128], TILE).index(4 * WHO + block + z)
        value.slice(START % 128, WIDTH, dim=1).store(keys)
        q = reinterpret(q_value, gl.bfloat16, [4, N, 128], TILE).index(block + z)
        q = q.slice(START % 128, WIDTH, dim=1)
    else:
        q = q_rest.index(z)
    s = warpgroup_mma(keys, q.permute((1, 0)), s, is_async=True)
    return warpgroup_mma_wait(0, deps=[s])


@gluon.jit
def add_keys(p):
    """Sums ``[32, N]`` of the two keys that a thread has for each head."""
    N: gl.constexpr = p.shape[1]
    return gl.sum(p.reshape(4, 2, 8, N), 1).reshape(32, N)


@gluon.jit
def weigh(s, seen, m, l, to):
    """Weights of a tile's keys, stored as an operand; ``shrink`` is what earlier sums shrink by."""
    s = gl.where(seen, s, float("-inf"))
    highest = gl.maximum(m, gl.max(s, 0))
    shrink = gl.exp2(m - highest)
    p = gl.exp2(s - highest[None, :])
    to.store(to_bf16(p))
    fence_async_shared()
    l *= gl.convert_layout(shrink, gl.SliceLayout(0, l.type.layout))[None, :]
    return highest, l + add_keys(p), shrink[None, :]


@gluon.jit
def seen_by(entries, at, rows, limits, L: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr):
    """Which query rows attend to which of the keys ``at``."""
    seen = is_slot(slots_of(entries, at, L, PAGED), rows.num_slots)[:, None]
    if CAUSAL:
        limit = limits.load(gl.SliceLayout(0, at.type.layout.parent))
        seen = seen & (at[:, None] < limit[None, :])
    return seen


@gluon.jit
def add_values(left, right, z, memory, WHO: gl.constexpr):
    """Start the products of both halves of the values."""
    _, _, values, weights, _, _, _, _ = memory
    p = weights.index(WHO + z)
    left = warpgroup_mma(values.index(2 * WHO + z).permute((1, 0)), p, left, is_async=True)
    right = warpgroup_mma(values.index(2 * WHO + 1 + z).permute((1, 0)), p, right, is_async=True)
    return left, right


@gluon.jit
def attend_tiles(
    stream,
    skip,
    tile,
    chunk,
    state,
    limits,
    scale_log2,
    memory,
    L: gl.constexpr,
    RING: gl.constexpr,
    WHO: gl.constexpr,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """Every other tile of a stream, from ``skip`` on: online softmax of heads on columns."""
    rows, keys, begin, end, tiles = stream
    m, l, left, right = state
    weights = memory[3]
    SCORES: gl.constexpr = left.type.layout
    CHUNKS: gl.constexpr = num_chunks(L.fp8_dim, L.head_dim)
    FULL: gl.constexpr = L.fp8_dim // 128
    at = begin + skip * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    entries = load_entries(keys, at, end, L, PAGED)
    for i in range(skip, tiles, 2):
        z = opaque_zero(i)
        seen = seen_by(entries, at, rows, limits, L, PAGED, CAUSAL)
        at += 2 * KEYS
        entries = load_entries(keys, at, end, L, PAGED)
        s = gl.zeros([KEYS, left.shape[1]], gl.float32, SCORES)
        first = chunk + i * CHUNKS
        # One body for the chunks that are alike: less code to fetch for two warpgroups.
        for j in range(FULL):
            s = score_chunk(s, z, rows, tile + i, first + j, j, memory, 0, L, RING, WHO)
        for j in gl.static_range(FULL, CHUNKS):
            s = score_chunk(
                s,
                z,
                rows,
                tile + i,
                first + j,
                chunk_start(L.fp8_dim, j) // 128,
                memory,
                chunk_start(L.fp8_dim, j),
                L,
                RING,
                WHO,
            )
        m, l, shrink = weigh(s * scale_log2, seen, m, l, weights.index(WHO + z))
        left, right = add_values(left * shrink, right * shrink, z, memory, WHO)
        left, right = warpgroup_mma_wait(0, deps=[left, right])
    return m, l, left, right


@gluon.jit
def wait_for_copies(barrier, phase):
    """Wait, and let products see what was copied."""
    mbarrier.wait(barrier, phase)
    fence_async_shared()


@gluon.jit
def attend_bf16_tiles(
    stream,
    skip,
    tile,
    state,
    limits,
    scale_log2,
    memory,
    L: gl.constexpr,
    WHO: gl.constexpr,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """:func:`attend_tiles` of a stream whose rows are copied to where products read them."""
    rows, keys, begin, end, tiles = stream
    q_value, q_rest, values, weights, rest, _, full, empty = memory
    m, l, left, right = state
    SCORES: gl.constexpr = left.type.layout
    REST: gl.constexpr = L.head_dim > 512
    BAR: gl.constexpr = 3 * WHO
    at = begin + skip * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    entries = load_entries(keys, at, end, L, PAGED)
    for i in range(skip, tiles, 2):
        z = opaque_zero(i)
        seen = seen_by(entries, at, rows, limits, L, PAGED, CAUSAL)
        at += 2 * KEYS
        entries = load_entries(keys, at, end, L, PAGED)
        phase = (tile + i) // 2 & 1
        s = gl.zeros([KEYS, left.shape[1]], gl.float32, SCORES)
        if REST:
            wait_for_copies(full.index(BAR), phase)
            q = q_rest.index(z).permute((1, 0))
            s = warpgroup_mma(rest.index(WHO + z), q, s, use_acc=False, is_async=True)
        for half in gl.static_range(2):
            wait_for_copies(full.index(BAR + 1 + half), phase)
            q = q_value.index(z + half).permute((1, 0))
            x = values.index(2 * WHO + half + z)
            s = warpgroup_mma(x, q, s, use_acc=REST or half > 0, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        if REST:
            mbarrier.arrive(empty.index(BAR), count=1)
        m, l, shrink = weigh(s * scale_log2, seen, m, l, weights.index(WHO + z))
        left, right = add_values(left * shrink, right * shrink, z, memory, WHO)
        left, right = warpgroup_mma_wait(1, deps=[left, right])
        mbarrier.arrive(empty.index(BAR + 1), count=1)
        left, right = warpgroup_mma_wait(0, deps=[left, right])
        mbarrier.arrive(empty.index(BAR + 2), count=1)
    return m, l, left, right


@gluon.jit
def consume(
    main,
    extra,
    scale_log2,
    memory,
    sums,
    meet,
    results,
    shape,
    limits,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    RING: gl.constexpr,
    WHO: gl.constexpr,
    N: gl.constexpr,
    PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
):
    """One of two warpgroups: it attends to every other tile; then both put their sums together."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    HEADS: gl.constexpr = gl.SliceLayout(0, SCORES)
    m = gl.full([N], LOWEST, gl.float32, HEADS)
    l = add_keys(gl.zeros([KEYS, N], gl.float32, SCORES))
    left = gl.zeros([256, N], gl.float32, SCORES)
    right = gl.zeros([256, N], gl.float32, SCORES)
    tiles = main[4]
    skip = (tiles + WHO) & 1
    if L.fp8_dim == 0:
        state = attend_bf16_tiles(
            main, WHO, 0, (m, l, left, right), limits, scale_log2, memory, L, WHO, PAGED, CAUSAL
        )
        if EXTRA is not None:
            state = attend_bf16_tiles(
                extra, skip, tiles, state, limits, scale_log2, memory, EXTRA, WHO, PAGED, CAUSAL
            )
    else:
        state = attend_tiles(
            main, WHO, 0, 0, (m, l, left, right), limits, scale_log2, memory, L, RING, WHO, PAGED,
            CAUSAL,
        )  # fmt: skip
        if EXTRA is not None:
            chunks = tiles * num_chunks(L.fp8_dim, L.head_dim)
            state = attend_tiles(
                extra, skip, tiles, chunks, state, limits, scale_log2, memory, EXTRA, RING, WHO,
                PAGED, CAUSAL,
            )  # fmt: skip
    m, l, left, right = state

    sums.index(WHO).store(m)
    sums.index(2 + WHO).store(gl.sum(l, 0))
    mbarrier.arrive(meet.index(0), count=1)
    mbarrier.wait(meet.index(0), 0)
    m0 = sums.index(0).load(HEADS)
    m1 = sums.index(1).load(HEADS)
    highest = gl.maximum(m0, m1)
    total = sums.index(2).load(HEADS) * gl.exp2(m0 - highest)
    total += sums.index(3).load(HEADS) * gl.exp2(m1 - highest)
    none = total == 0
    token, head, real = heads_of(shape, N, HEADS)
    if WHO == 0:
        lse = (highest + gl.log2(total)) * LN2  # log2(0) is -inf
        gl.store(results.lse + token * results.lse_token + head, lse, mask=real)
        if results.max_logits is not None:
            logits = gl.where(none, float("-inf"), highest * LN2)
            gl.store(results.max_logits + results.max_logits_at + head, logits, mask=real)
    if results.attn_sink is not None:
        sink = gl.load(results.attn_sink + head, mask=real, other=0.0)
        total += gl.exp2(sink * LOG2E - highest)
    share = gl.where(none, 0.0, gl.exp2(m - highest) / gl.where(none, 1.0, total))[None, :]
    # Both have met: nobody reads values any more, and the sums fit where the first tile was.
    both = reinterpret(memory[2], gl.float32, [4, 256, N], SUMS)
    left *= share
    right *= share
    if L.fp8_dim > 0:
        left = out_of_order(left)
        right = out_of_order(right)
    both.index(2 * WHO).store(left)
    both.index(2 * WHO + 1).store(right)
    mbarrier.arrive(meet.index(1), count=1)
    mbarrier.wait(meet.index(1), 0)
    x = both.index(WHO).load(RESULTS) + both.index(2 + WHO).load(RESULTS)
    token, head, real = heads_of(shape, N, gl.SliceLayout(0, RESULTS))
    at = token * results.out_token + head * results.out_head
    dim = WHO * 256 + gl.arange(0, 256, gl.SliceLayout(1, RESULTS))
    out = results.out + at[None, :] + dim[:, None]
    gl.store(out, x.to(results.out.dtype.element_ty), mask=real[None, :])


@gluon.jit
def place(shape):
    """The program's split, its request and the first token of its group."""
    group = gl.program_id(0) // shape.num_splits
    split = (gl.program_id(0) % shape.num_splits).to(gl.int64)
    request = (group // shape.group_tokens).to(gl.int64)
    return split, request, (group % shape.group_tokens).to(gl.int64)


@gluon.jit
def heads_of(shape, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Token in the group, head, and whether there is one, of the rows of a group."""
    row = gl.arange(0, N, LAYOUT)
    token = (row // shape.num_heads).to(gl.int64)
    return token, (row % shape.num_heads).to(gl.int64), row < shape.num_rows


@gluon.jit
def load_queries(
    q,
    q_request,
    q_token,
    q_head,
    shape,
    START: gl.constexpr,
    WIDTH: gl.constexpr,
    N: gl.constexpr,
    L: gl.constexpr,
):
    """Dims of a group's rows, in the order of the keys that are converted."""
    _, request, first = place(shape)
    token, head, real = heads_of(shape, N, gl.SliceLayout(1, QUERIES))
    at = request * q_request + (first + token) * q_token + head * q_head
    dim = START + gl.arange(0, WIDTH, gl.SliceLayout(0, QUERIES))
    x = gl.load(q + at[:, None] + dim[None, :], mask=real[:, None], other=0.0)
    if L.fp8_dim > 0:
        x = in_order(x)
    return x


@gluon.jit
def find_keys(stream, shape, L: gl.constexpr, PAGED: gl.constexpr):
    """Slots of a group, or pages of its request, and how many keys they are."""
    _, request, token = place(shape)
    keys = stream.keys + request * stream.keys_request + token * stream.keys_token
    end = stream.num_keys
    if stream.lengths is not None:
        end = gl.minimum(gl.load(stream.lengths + request), end).to(gl.int32)
    if not PAGED:
        end = end_of(keys, 0, end, stream.num_slots, 2048)
    return keys, end


@gluon.jit
def attend_columns(
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
    RING: gl.constexpr,
    SCALE_WORDS: gl.constexpr,
    SCALE_TILES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """All rows of a group, and one split of their keys."""
    q_value = gl.allocate_shared_memory(gl.bfloat16, [2, N, 256], TILE)
    q_rest = gl.allocate_shared_memory(gl.bfloat16, [1, N, 64], TILE)
    values = gl.allocate_shared_memory(gl.bfloat16, [4, KEYS, 256], TILE)
    weights = gl.allocate_shared_memory(
        gl.bfloat16, [2, KEYS, N], gl.NVMMASharedLayout(2 * N, 16, 2)
    )
    if L.fp8_dim == 0:
        raw = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, 64], TILE)
    else:
        raw = gl.allocate_shared_memory(gl.uint8, [RING, KEYS, 128], RAW8)
    scales = gl.allocate_shared_memory(gl.int32, [SCALE_TILES, SCALE_WORDS, KEYS], WORDS2)
    sums = gl.allocate_shared_memory(gl.float32, [4, N], PLAIN)
    limits = gl.allocate_shared_memory(gl.int32, [N], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [RING, 1], mbarrier.MBarrierLayout())
    meet = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(RING):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(meet.index(0), count=2)
    mbarrier.init(meet.index(1), count=2)
    gdc_launch_dependents()
    gdc_wait()  # as in kernels/common/early.py: all above needs nobody's results

    low = load_queries(q, q_request, q_token, q_head, shape, 0, 256, N, L)
    high = load_queries(q, q_request, q_token, q_head, shape, 256, 256, N, L)
    if L.head_dim > 512:
        rest = load_queries(q, q_request, q_token, q_head, shape, 512, 64, N, L)

    keys, end = find_keys(stream, shape, L, PAGED)
    all_tiles = gl.cdiv(end, KEYS)
    if EXTRA is not None:
        extra_keys, extra_end = find_keys(extra, shape, EXTRA, PAGED)
        all_extra = gl.cdiv(extra_end, KEYS)
    else:
        extra_keys = keys
        extra_end = 0
        all_extra = 0
    split, request, first = place(shape)
    steps = gl.cdiv(all_tiles + all_extra, shape.num_splits)
    begin = split.to(gl.int32) * steps
    last = begin + steps
    extra_begin = gl.minimum(gl.maximum(begin - all_tiles, 0), all_extra)
    extra_tiles = gl.minimum(gl.maximum(last - all_tiles, 0), all_extra) - extra_begin
    begin = gl.minimum(begin, all_tiles)
    tiles = gl.minimum(last, all_tiles) - begin
    if CAUSAL:
        token, _, _ = heads_of(shape, N, gl.SliceLayout(0, RESULTS))
        length = gl.load(stream.lengths + request).to(gl.int32)
        limits.store(length - shape.num_rows // shape.num_heads + 1 + token.to(gl.int32))

    out = results.out + split * results.out_split
    lse = results.lse + split * results.lse_split
    where = Where(
        out + request * results.out_request + first * results.out_token,
        results.out_token,
        results.out_head,
        lse + request * results.lse_request + first * results.lse_token,
        results.lse_token,
        results.max_logits,
        request * results.max_logits_request,
        results.attn_sink,
    )

    q_value.index(0).store(low)
    q_value.index(1).store(high)
    if L.head_dim > 512:
        q_rest.index(0).store(rest)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, ((rows, keys, begin * KEYS, end, tiles),
                       (extra_rows, extra_keys, extra_begin * KEYS, extra_end, extra_tiles),
                       scale_log2, (q_value, q_rest, values, weights, raw, scales, full, empty),
                       sums, meet, where, shape, limits, L, EXTRA, RING, 0, N, PAGED, CAUSAL)),
            (consume, ((rows, keys, begin * KEYS, end, tiles),
                       (extra_rows, extra_keys, extra_begin * KEYS, extra_end, extra_tiles),
                       scale_log2, (q_value, q_rest, values, weights, raw, scales, full, empty),
                       sums, meet, where, shape, limits, L, EXTRA, RING, 1, N, PAGED, CAUSAL)),
            (produce, ((rows, keys, begin * KEYS, end, tiles),
                       (extra_rows, extra_keys, extra_begin * KEYS, extra_end, extra_tiles),
                       (q_value, q_rest, values, weights, raw, scales, full, empty),
                       L, EXTRA, RING, PAGED)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@functools.cache
def plan_shared(num_rows: int, fmt: CacheFormat) -> Shared | None:
    """How a program divides its shared memory; None if the rows or scales are too many.

    A consumer waits for a chunk while the other may be a tile behind. The ring must hold that tile
    and one chunk, or two passes through a place could not be told apart. Scales of a tile stay
    until all of its chunks are released.
    """
    if num_rows > MAX_ROWS:
        return None
    heads = 16 if num_rows <= 16 else 32
    if fmt.fp8_dim == 0:
        return Shared(heads, 6, 1, 1)
    chunks = num_chunks(fmt.fp8_dim, fmt.head_dim)
    words = 1
    if fmt.scale_block:
        words = scale_words(fmt.fp8_dim, fmt.scale_block, fmt.scale_dtype.itemsize)
    scale_row = triton.next_power_of_2(words)
    keys = KEYS.value
    fixed = 2 * keys * 1024 + heads * (1152 + 4 * keys + 20)
    for ring in range(8, chunks, -1):
        scale_tiles = 2 + (ring > chunks + 1)
        if fixed + ring * keys * 128 + scale_tiles * scale_row * keys * 4 + 1280 <= SHARED:
            return Shared(heads, ring, scale_row, scale_tiles)
    return None


def attend(
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

    :func:`plan_shared` has a plan for the rows of a group. The caches of both streams have one
    format.
    """
    rows, layout = cache_arguments(cache)
    extra_rows, extra_layout = None, None
    if extra_cache is not None and extra is not None:
        extra_rows, extra_layout = cache_arguments(extra_cache)
    shared = plan_shared(shape.num_rows, cache.format)
    wide = shared.heads == 32
    attend_columns[(num_groups * shape.num_splits,)](
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
        N=shared.heads,
        RING=shared.ring,
        SCALE_WORDS=shared.scale_words,
        SCALE_TILES=shared.scale_tiles,
        CONSUMER_REGISTERS=232 if wide else 208,
        PRODUCER_REGISTERS=40 if wide else 80,
        num_warps=4,
        launch_pdl=True,
    )

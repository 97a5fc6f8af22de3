"""Attention on Hopper of 64 query rows that share keys, straight from a quantised cache.

Four warpgroups. The *producer* copies rows as they are stored, 128 bytes a key at a time, for tiles
of 64 keys. Two *adders*, one for each half of the value, convert them to bfloat16 tiles, of which
there are two: both products read what was converted once. The *scorer* has half of the
queries in registers and turns scores into weights, while the adders convert the tile after next.
They add values as those weights say. A program stays on its multiprocessor: the next rows' queries
and first keys come under the last products of these.
"""

from __future__ import annotations

from itertools import zip_longest
from typing import NamedTuple

import triton
from torch import Tensor, int32
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
from sparsemla.kernels.attention.sm90.abi import (
    Results,
    Shape,
    Stream,
)
from sparsemla.kernels.attention.sm90.chunks import (
    BF16_ROWS,
    CONVERT,
    COPY8,
    COPY16,
    COPY32,
    COPY_ROWS,
    DIMS64,
    DIMS128,
    RAW8,
    RAW8_HALF,
    WORDS2,
    chunk_start,
    chunk_width,
    decode_e8m0,
    in_order,
    num_chunks,
)
from sparsemla.kernels.attention.sm90.tiles import (
    LN2,
    LOG2E,
    LOWEST,
    PLAIN,
    SCORES,
    SUM_ROWS,
    SUMS,
    TILE,
    end_of,
    heads_of,
    place_of,
    store_limits,
    to_bf16,
)
from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.gluon import async_load, barrier, opaque_zero, reinterpret
from sparsemla.kernels.common.paged import cache_arguments


class Records(NamedTuple):
    """A quantised cache as kernel arguments.

    ``words``: its codes, four to a word. ``scales``: None where they lie in the same storage.
    """

    words: Tensor
    scales: Tensor | None
    num_slots: int


class Record(NamedTuple):
    """A record as kernels are compiled for it: dims, strides, and how far parts lie from the codes.

    A producer has no registers for a pointer to each part. Strides of codes are in words, those of
    scales, and ``scales_at``, in scales; ``tail_at``, of the ``tail_dim`` dims that are kept as
    bfloat16 (64 or none), in their elements.
    """

    head_dim: int
    fp8_dim: int
    scale_block: int
    scale_bytes: int
    num_scales: int
    page_size: int
    linear: bool
    strides: tuple[int, int]
    scales_strides: tuple[int, int]
    scales_at: int
    tail_dim: int
    tail_at: int


HEADS = gl.constexpr(gl.SliceLayout(1, SCORES))
KEYS = gl.constexpr(gl.SliceLayout(0, SCORES))
QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
ALL = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # of 64 heads, in each warp

# Weights are relative to a score that the highest one exceeds by at most so many powers of two:
# what is summed up is scaled only when one passes that. 0 where the highest itself is wanted.
SLACK = gl.constexpr(8.0)

# Flags of this many tiles, and what was found out about the keys of this many tiles of rows, are
# kept: the producer is at most three of either ahead of the scorer.
TILES = gl.constexpr(4)
TURNS = gl.constexpr(4)

# Barriers beside those of the copies.
WEIGHTS = gl.constexpr(0)  # of a tile, and what earlier sums shrink by
SUM = gl.constexpr(1)  # what the sums are divided by, of two tiles of rows
RANGE = gl.constexpr(3)  # what the producer found out about the keys
VALID = gl.constexpr(7)  # which keys of a tile count
CONVERTED = gl.constexpr(11)  # both halves of a tile, in each of two places
ADDED = gl.constexpr(13)  # both adders are done with the weights of a tile, even and odd
NUM_BARRIERS = gl.constexpr(15)


@gluon.jit
def slots_of(keys, at, last, num_slots, L: gl.constexpr, PAGED: gl.constexpr):
    """Slots of the keys ``at``, -1 for those that do not count."""
    real = at < last
    if PAGED:
        page = gl.load(keys + at // L.page_size, mask=real, other=-1).to(gl.int64)
        valid = (page >= 0) & (page < num_slots // L.page_size)
        slot = page * L.page_size + at % L.page_size
    else:
        slot = gl.load(keys + at, mask=real, other=-1).to(gl.int64)
        valid = (slot >= 0) & (slot < num_slots)
    return gl.where(valid, slot, -1).to(gl.int32)


@gluon.jit
def block_slots(
    keys, ends, main, extra, block, L: gl.constexpr, EXTRA: gl.constexpr, PAGED: gl.constexpr
):
    """Slots of a block of 64 keys; those of the extra stream come after those of the first."""
    keys, extra_keys = keys
    end, extra_end, num_blocks = ends
    at = block * 64 + gl.arange(0, 64, COPY_ROWS)
    if EXTRA is None:
        slots = slots_of(keys, at, end, main.num_slots, L, PAGED)
    else:
        if block < num_blocks:
            slots = slots_of(keys, at, end, main.num_slots, L, PAGED)
        else:
            at -= num_blocks * 64
            slots = slots_of(extra_keys, at, extra_end, extra.num_slots, EXTRA, PAGED)
    return slots


@gluon.jit
def find_blocks(tile, main, extra, shape, limits, EXTRA: gl.constexpr, CAUSAL: gl.constexpr):
    """Where the keys are, where they end in each stream, and the blocks of the split.

    What cuts a list short for a split is an end too.
    """
    begin, split, request, token = place_of(tile, shape)
    keys = main.keys + request * main.keys_request + token * main.keys_token
    end = store_limits(limits, main, shape, begin, request, CAUSAL)
    num_blocks = gl.cdiv(end, 64)
    if EXTRA is None:
        total = num_blocks
        extra_end = end
        extra_keys = keys
    else:
        extra_keys = extra.keys + request * extra.keys_request + token * extra.keys_token
        extra_end = store_limits(limits, extra, shape, begin, request, False)
        # Triton 3.6 fails where the list is known to be one block, as a width of 1 is.
        num_blocks += opaque_zero(split)
        total = num_blocks + gl.cdiv(extra_end, 64)
    blocks = gl.cdiv(total, shape.num_splits)
    first = split * blocks
    last = gl.minimum(first + blocks, total)
    end = gl.minimum(last * 64, end)
    extra_end = gl.minimum((last - num_blocks) * 64, extra_end)
    return (keys, extra_keys), (end, extra_end, num_blocks), first, last


@gluon.jit
def used_blocks(keys, ends, main, extra, first, last, EXTRA: gl.constexpr, PAGED: gl.constexpr):
    """One past the last block of the split that has a valid key."""
    keys, extra_keys = keys
    end, extra_end, num_blocks = ends
    if not PAGED:
        if EXTRA is None:
            last = gl.cdiv(end_of(keys, first * 64, end, main.num_slots, 1024), 64)
        else:
            begin = gl.maximum(first - num_blocks, 0) * 64
            used = end_of(extra_keys, begin, extra_end, extra.num_slots, 1024)
            if used > begin:
                last = num_blocks + gl.cdiv(used, 64)
            else:
                last = gl.cdiv(end_of(keys, first * 64, end, main.num_slots, 1024), 64)
    return last


@gluon.jit
def row_of(slots, L: gl.constexpr):
    """Page and row of slots; what has no slot is row 0. The page of a linear cache is 0."""
    slots = gl.maximum(slots, 0).to(gl.uint32)
    if L.linear:
        page = gl.zeros_like(slots)
        row = slots
    else:
        page = slots // L.page_size
        row = slots % L.page_size
    return page.to(gl.int64), row.to(gl.int64)


@gluon.jit
def words_in(slots, L: gl.constexpr):
    page, row = row_of(slots, L)
    return page * L.strides[0] + row * L.strides[1]


@gluon.jit
def scales_in(slots, L: gl.constexpr):
    page, row = row_of(slots, L)
    return page * L.scales_strides[0] + row * L.scales_strides[1] + L.scales_at


@gluon.jit
def word_offset(slots, extra, is_extra, L: gl.constexpr, EXTRA: gl.constexpr):
    """Where the codes of rows start, in words."""
    if EXTRA is None:
        at = words_in(slots, L)
    else:
        if is_extra:
            at = words_in(slots, EXTRA) + extra.shift
        else:
            at = words_in(slots, L)
    return at


@gluon.jit
def scale_offset(slots, extra, is_extra, L: gl.constexpr, EXTRA: gl.constexpr):
    """Where the scales of rows start, in scales."""
    if EXTRA is None:
        at = scales_in(slots, L)
    else:
        if is_extra:
            at = scales_in(slots, EXTRA) + extra.shift.to(gl.int64) * (4 // L.scale_bytes)
        else:
            at = scales_in(slots, L)
    return at


@gluon.constexpr_function
def num_values(fp8_dim, head_dim):
    """Chunks of the value; what is left is one chunk."""
    return sum(chunk_start(fp8_dim, c) < 512 for c in range(num_chunks(fp8_dim, head_dim)))


@gluon.constexpr_function
def chunks_of(fp8_dim, head_dim, who):
    """Chunks of a half of the value."""
    count = num_values(fp8_dim, head_dim)
    return tuple(c for c in range(count) if chunk_start(fp8_dim, c) // 256 == who)


@gluon.constexpr_function
def chunk_order(fp8_dim, head_dim):
    """Chunks in the order in which they are copied: the halves' in turn, what is no value."""
    halves = [chunks_of(fp8_dim, head_dim, who) for who in range(2)]
    turns = [chunk for turn in zip_longest(*halves) for chunk in turn if chunk is not None]
    return tuple(turns) + tuple(range(len(turns), num_chunks(fp8_dim, head_dim)))


@gluon.jit
def place_in(tile, memory, CHUNK: gl.constexpr, L: gl.constexpr):
    """Memory, place, barrier and parity of a chunk: of values there is one place for each."""
    COUNT: gl.constexpr = num_values(L.fp8_dim, L.head_dim)
    if CHUNK < COUNT:
        raw = memory[3]
        slot = tile * 0 + CHUNK  # no constexpr: what is returned has one type
        at = slot
        use = tile
    else:
        raw = memory[4]
        slot = tile % raw.shape[0]
        at = COUNT + slot
        use = tile // raw.shape[0]
    return raw, slot, at, use & 1


@gluon.jit
def load_queries(
    tile, q, strides, shape, START: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """Dims of a tile's rows."""
    begin, _, request, first = place_of(tile, shape)
    token, head, real = heads_of(begin, shape, gl.SliceLayout(1, LAYOUT), TOKENS)
    rows = request * strides[0] + (first + token) * strides[1] + head * strides[2]
    dims = START + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    return gl.load(q + rows[:, None] + dims[None, :], mask=real[:, None], other=0.0)


@gluon.jit
def as_operand(x):
    """Dims in memory's order as the left operand of a product, in the order of the keys."""
    return gl.convert_layout(in_order(x, 16), gl.DotOperandLayout(0, SCORES, 2))


@gluon.jit
def copy_scales(to, rows, slots, is_extra, extra, L: gl.constexpr, EXTRA: gl.constexpr):
    """32-bit words of scales; each word has the keys side by side."""
    PER_WORD: gl.constexpr = 4 // L.scale_bytes
    NUM_WORDS: gl.constexpr = -(-L.num_scales // PER_WORD)
    slots = gl.convert_layout(slots, gl.SliceLayout(1, COPY32))
    first = scale_offset(slots, extra, is_extra, L, EXTRA) // PER_WORD
    word = gl.arange(0, to.shape[0], gl.SliceLayout(0, COPY32))
    words = rows.words
    if rows.scales is not None:
        words = rows.scales.to(gl.pointer_type(gl.int32), bitcast=True)
    mask = (slots >= 0)[:, None] & (word < NUM_WORDS)[None, :]
    async_load(to.permute((1, 0)), words + first[:, None] + word[None, :], mask=mask)


@gluon.jit
def bf16_chunk(raw, slot):
    """A place as bfloat16 ``[64, 64]``."""
    PLACES: gl.constexpr = raw.shape[0]
    return reinterpret(raw, gl.bfloat16, [PLACES, 64, 64], TILE).index(slot)


@gluon.jit
def codes_chunk(raw, slot, WIDTH: gl.constexpr):
    """A place as e4m3 codes ``[64, WIDTH]``."""
    COUNT: gl.constexpr = raw.shape[0] * raw.shape[2] // WIDTH
    LAYOUT: gl.constexpr = RAW8 if WIDTH == 128 else RAW8_HALF
    at = slot * (raw.shape[2] // WIDTH)
    return reinterpret(raw, gl.uint8, [COUNT, 64, WIDTH], LAYOUT).index(at)


@gluon.jit
def copy_chunk(tile, memory, rows, first, real, CHUNK: gl.constexpr, L: gl.constexpr):
    """A chunk of rows that start at the words ``first``, as it is stored."""
    START: gl.constexpr = chunk_start(L.fp8_dim, CHUNK)
    raw, slot, at, phase = place_in(tile, memory, CHUNK, L)
    mbarrier.wait(memory[10].index(at), phase ^ 1)
    if L.fp8_dim > START:
        WIDTH: gl.constexpr = chunk_width(L.fp8_dim, START)
        codes = rows.words.to(gl.pointer_type(gl.uint8), bitcast=True)
        dims = START + gl.arange(0, WIDTH, gl.SliceLayout(0, COPY8))
        source = codes + (4 * first)[:, None] + dims[None, :]
        async_load(codes_chunk(raw, slot, WIDTH), source, mask=real[:, None])
    else:
        first = gl.convert_layout(2 * first + L.tail_at, BF16_ROWS)
        real = gl.convert_layout(real, BF16_ROWS)
        dims = START - L.fp8_dim + gl.arange(0, 64, gl.SliceLayout(0, COPY16))
        tail = rows.words.to(gl.pointer_type(gl.bfloat16), bitcast=True)
        source = tail + first[:, None] + dims[None, :]
        async_load(bf16_chunk(raw, slot), source, mask=real[:, None])


@gluon.jit
def copy_tile(tile, slots, is_extra, rows, extra, memory, L: gl.constexpr, EXTRA: gl.constexpr):
    """Copy a tile's rows chunk by chunk, each as soon as there is a place in the ring."""
    _, _, _, _, _, scales, valid, _, _, full, _, bar = memory
    ORDER: gl.constexpr = chunk_order(L.fp8_dim, L.head_dim)
    real = slots >= 0
    first = word_offset(slots, extra, is_extra, L, EXTRA)
    valid.index(tile % TILES).store(real.to(gl.int8))
    mbarrier.arrive(bar.index(VALID + tile % TILES), count=1)
    if L.scale_block > 0:
        # Those of the tile before the last one: all of its chunks were given back.
        copy_scales(scales.index(tile % 2), rows, slots, is_extra, extra, L, EXTRA)
    for j in gl.static_range(len(ORDER)):
        copy_chunk(tile, memory, rows, first, real, ORDER[j], L)
        at = place_in(tile, memory, ORDER[j], L)[2]
        async_copy.mbarrier_arrive(full.index(at), increment_count=False)


@gluon.jit
def produce(
    num_tiles, rows, main, extra, shape, limits, found, memory,
    L: gl.constexpr, EXTRA: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The warpgroup that copies."""
    bar = memory[11]
    key_tile = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        turn = tile // gl.num_programs(0)
        at = turn % TURNS
        keys, ends, first, last = find_blocks(
            tile, main, extra, shape, limits.index(at), EXTRA, CAUSAL
        )  # fmt: skip
        slots = block_slots(keys, ends, main, extra, first, L, EXTRA, PAGED)
        copy_tile(key_tile, slots, first >= ends[2], rows, extra, memory, L, EXTRA)
        # While these are under way, how long the lists really are. At least one tile: a loop that
        # may be skipped makes the products wait for each other.
        last = used_blocks(keys, ends, main, extra, first, last, EXTRA, PAGED)
        last = gl.maximum(last, first + 1)
        found.index(2 * at).store(gl.zeros([1], gl.int32, ONE) + (last - first))
        found.index(2 * at + 1).store(gl.zeros([1], gl.int32, ONE) + first * 64)
        mbarrier.arrive(bar.index(RANGE + at), count=1)
        slots = block_slots(keys, ends, main, extra, first + 1, L, EXTRA, PAGED)
        key_tile += 1
        for block in range(first + 1, last):
            following = block_slots(keys, ends, main, extra, block + 1, L, EXTRA, PAGED)
            copy_tile(key_tile, slots, block >= ends[2], rows, extra, memory, L, EXTRA)
            slots = following
            key_tile += 1


@gluon.jit
def read_range(found, bar, turn):
    """Tiles of keys and position of the first key, which the producer stored."""
    at = turn % TURNS
    mbarrier.wait(bar.index(RANGE + at), turn // TURNS & 1)
    count = gl.max(found.index(2 * at).load(ONE), 0)
    return count, gl.max(found.index(2 * at + 1).load(ONE), 0)


@gluon.jit
def wait_added(tile, bar):
    """Until both adders are done with the weights of the tile two before this one."""
    mbarrier.wait(bar.index(ADDED + tile % 2), tile // 2 & 1 ^ 1)


@gluon.jit
def scale_of(scales, tile, DIM: gl.constexpr, L: gl.constexpr, DIMS: gl.constexpr):
    """float32 scales of the tile's keys for one dim."""
    if L.scale_block == 0:
        scale = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, DIMS))
    else:
        PER_WORD: gl.constexpr = 4 // L.scale_bytes
        INDEX: gl.constexpr = DIM // L.scale_block
        NUM_WORDS: gl.constexpr = scales.shape[1]
        words = reinterpret(scales, gl.int32, [scales.shape[0] * NUM_WORDS, 64], PLAIN)
        word = words.index(tile % 2 * NUM_WORDS + INDEX // PER_WORD)
        bits = word.load(gl.SliceLayout(1, DIMS))
        if L.scale_bytes == 1:
            scale = decode_e8m0((bits >> (INDEX % 4 * 8)) & 0xFF)
        else:
            scale = bits.to(gl.float32, bitcast=True)
    return scale


@gluon.jit
def load_chunk(tile, memory, CHUNK: gl.constexpr, L: gl.constexpr):
    """What a chunk holds, and scales."""
    scales = memory[5]
    START: gl.constexpr = chunk_start(L.fp8_dim, CHUNK)
    raw, slot, at, phase = place_in(tile, memory, CHUNK, L)
    mbarrier.wait(memory[9].index(at), phase)
    if L.fp8_dim <= START:
        x = bf16_chunk(raw, slot).load(DIMS64)
        scale = 0
    else:
        WIDTH: gl.constexpr = chunk_width(L.fp8_dim, START)
        DIMS: gl.constexpr = DIMS128 if WIDTH == 128 else DIMS64
        x = codes_chunk(raw, slot, WIDTH).load(DIMS)
        scale = scale_of(scales, tile, START, L, DIMS)[:, None]
        if L.scale_block == 64 and WIDTH == 128:
            second = gl.arange(0, 128, gl.SliceLayout(0, DIMS)) >= 64
            other = scale_of(scales, tile, START + 64, L, DIMS)[:, None]
            scale = gl.where(second[None, :], other, scale)
    return x, scale


@gluon.jit
def give_back(tile, memory, CHUNK: gl.constexpr, L: gl.constexpr):
    """A chunk was read."""
    mbarrier.arrive(memory[10].index(place_in(tile, memory, CHUNK, L)[2]), count=1)


@gluon.jit
def convert(x, scale):
    """What a chunk holds as bfloat16, in the order of an operand's registers."""
    if x.dtype != gl.bfloat16:
        codes, scale = gl.broadcast(x, scale)
        x = gl.inline_asm_elementwise(
            CONVERT,
            "=r,=r,r,f,f,f,f",
            [codes, scale],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return as_operand(x)


@gluon.jit
def add_keys(p):
    """Sums ``[64, 4]`` of the keys that a thread has of each head."""
    return gl.sum(gl.sum(p.reshape(64, 8, 4, 2), 3), 1)


@gluon.jit
def score(
    num_tiles, q, strides, shape, limits, found, memory, results, scale_log2,
    L: gl.constexpr, MIXED: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """The warpgroup that finds weights."""
    q_high, values, weights, _, raw_rest, _, valid, factors, totals, full, _, bar = memory
    REST: gl.constexpr = L.head_dim > 512
    COUNT: gl.constexpr = num_values(L.fp8_dim, L.head_dim)
    READY: gl.constexpr = REST and L.fp8_dim <= 512
    key_tile = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        turn = tile // gl.num_programs(0)
        # Half of the dims stay in registers. They go there by way of the others' place: Triton 3.9
        # kept them as they were loaded and moved them for each tile of keys.
        x0 = load_queries(tile, q, strides, shape, 0, 128, DIMS128, TOKENS)
        x1 = load_queries(tile, q, strides, shape, 128, 128, DIMS128, TOKENS)
        q_high.index(0).slice(0, 128, dim=1).store(as_operand(x0))
        q_high.index(0).slice(128, 128, dim=1).store(as_operand(x1))
        barrier()
        q0 = q_high.index(0).slice(0, 128, dim=1).load(gl.DotOperandLayout(0, SCORES, 2))
        q1 = q_high.index(0).slice(128, 128, dim=1).load(gl.DotOperandLayout(0, SCORES, 2))
        barrier()
        x2 = load_queries(tile, q, strides, shape, 256, 128, DIMS128, TOKENS)
        x3 = load_queries(tile, q, strides, shape, 384, 128, DIMS128, TOKENS)
        if READY:
            rest = load_queries(tile, q, strides, shape, 512, 64, QUERIES, TOKENS)
        elif REST:
            rest = load_queries(tile, q, strides, shape, 512, 64, DIMS64, TOKENS)
        q_high.index(0).slice(0, 128, dim=1).store(as_operand(x2))
        q_high.index(0).slice(128, 128, dim=1).store(as_operand(x3))
        if READY:
            # By way of a place that is free once the weights before were read.
            wait_added(key_tile + 1, bar)
            weights.index(0).store(rest)
            barrier()
            q2 = weights.index(0).load(gl.DotOperandLayout(0, SCORES, 2))
            barrier()
        elif REST:
            q2 = as_operand(rest)
        fence_async_shared()
        m = gl.full([64], LOWEST, gl.float32, HEADS)
        l = add_keys(gl.zeros([64, 64], gl.float32, SCORES))
        count, first = read_range(found, bar, turn)
        for i in range(count):
            z = opaque_zero(i)
            at = key_tile % 2
            low = values.index(2 * at + z)
            high = values.index(2 * at + 1 + z)
            s = gl.zeros([64, 64], gl.float32, SCORES)
            if READY:
                slot, rest_bar, phase = place_in(key_tile, memory, COUNT, L)[1:]
                mbarrier.wait(full.index(rest_bar), phase)
                keys = bf16_chunk(raw_rest, slot).permute((1, 0))
                s = warpgroup_mma(q2, keys, s, use_acc=False, is_async=True)
            mbarrier.wait(bar.index(CONVERTED + at), key_tile // 2 & 1)
            # What others stored, for products to read. Here it costs less than where it was stored.
            fence_async_shared()
            keys = low.slice(0, 128, dim=1).permute((1, 0))
            s = warpgroup_mma(q0, keys, s, use_acc=READY, is_async=True)
            s = warpgroup_mma(q1, low.slice(128, 128, dim=1).permute((1, 0)), s, is_async=True)
            s = warpgroup_mma(q_high.index(z), high.permute((1, 0)), s, is_async=True)
            if REST and not READY:
                keys = weights.index(at).permute((1, 0))
                s = warpgroup_mma(q2, keys, s, is_async=True)
            mbarrier.wait(bar.index(VALID + key_tile % TILES), key_tile // TILES & 1)
            # Most tiles have only keys that count.
            flags = reinterpret(valid, gl.int32, [TILES, 16], PLAIN).index(key_tile % TILES)
            all_count = gl.min(flags.load(ONE), 0) == 0x01010101
            s = warpgroup_mma_wait(0, deps=[s])
            if READY:
                give_back(key_tile, memory, COUNT, L)
            s = s * scale_log2
            if MIXED:
                keys = first + i * 64 + gl.arange(0, 64, KEYS)
                limit = limits.index(turn % TURNS).load(HEADS)
                s = gl.where(keys[None, :] < limit[:, None], s, float("-inf"))
            if not all_count:
                seen = valid.index(key_tile % TILES).load(KEYS) != 0
                s = gl.where(seen[None, :], s, float("-inf"))
            # Pairs first: a shorter chain of maxima.
            top = gl.max(gl.max(s.reshape(64, 8, 4, 2), 3), 1)
            top = gl.convert_layout(gl.max(top, 1), HEADS)
            highest = gl.where(top > m + (SLACK if results.max_logits is None else 0.0), top, m)
            factor = gl.exp2(m - highest)
            m = highest
            p = gl.exp2(s - highest[:, None])
            if REST and not READY:
                barrier()  # every warp's products are done with the keys in the weights' place
            wait_added(key_tile + 1, bar)
            weights.index(key_tile % weights.shape[0]).store(to_bf16(p))
            factors.store(factor)
            mbarrier.arrive(bar.index(WEIGHTS), count=1)
            factor = gl.convert_layout(factor, gl.SliceLayout(1, l.type.layout))
            l = l * factor[:, None] + add_keys(p)
            key_tile += 1
        total = gl.convert_layout(gl.sum(l, 1), HEADS)
        begin, split, request, token = place_of(tile, shape)
        row_token, head, real = heads_of(begin, shape, HEADS, TOKENS)
        lse = results.lse + split.to(gl.int64) * results.lse_split + request * results.lse_request
        rows = (token + row_token) * results.lse_token + head
        gl.store(lse + rows, (m + gl.log2(total)) * LN2, mask=real)  # log2(0) is -inf
        empty = total == 0
        if results.max_logits is not None:
            to = results.max_logits + request * results.max_logits_request
            gl.store(to + head, gl.where(empty, float("-inf"), m * LN2), mask=real)
        if results.attn_sink is not None:
            sink = gl.load(results.attn_sink + head, mask=real, other=0.0)
            total += gl.exp2(sink * LOG2E - m)
        totals.index(turn % 2).store(gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total)))
        mbarrier.arrive(bar.index(SUM + turn % 2), count=1)


@gluon.jit
def keep_chunk(tile, memory, CHUNK: gl.constexpr, L: gl.constexpr):
    """Convert a chunk to what both products read."""
    values = memory[1]
    START: gl.constexpr = chunk_start(L.fp8_dim, CHUNK)
    x, scale = load_chunk(tile, memory, CHUNK, L)
    x = convert(x, scale)
    if START < 512:
        to = values.index(tile % 2 * 2 + START // 256)
        to.slice(START % 256, x.shape[1], dim=1).store(x)
    else:
        # Where the weights of two tiles before were, of all heads: the other adder read them too.
        wait_added(tile, memory[11])
        memory[2].index(tile % 2).store(x)
    give_back(tile, memory, CHUNK, L)


@gluon.jit
def keep_half(tile, memory, L: gl.constexpr, WHO: gl.constexpr):
    """Convert a half of a tile; the first adder's has what is no value too."""
    MINE: gl.constexpr = chunks_of(L.fp8_dim, L.head_dim, WHO)
    for c in gl.static_range(len(MINE)):
        keep_chunk(tile, memory, MINE[c], L)
    if L.fp8_dim > 512 and WHO == 0:
        keep_chunk(tile, memory, num_values(L.fp8_dim, L.head_dim), L)
    mbarrier.arrive(memory[11].index(CONVERTED + tile % 2), count=1)


@gluon.jit
def store_columns(acc, factor, out, begin, first, results, shape, TOKENS: gl.constexpr):
    """128 dims of the tile's rows. In memory's order, whole sectors at once."""
    x = acc * factor[:, None]
    x = x.reshape(64, 8, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(64, 128)
    x = gl.convert_layout(x, DIMS128)  # moves nothing
    if results.out.dtype.element_ty == gl.bfloat16:
        x = to_bf16(x)
    token, head, real = heads_of(begin, shape, gl.SliceLayout(1, DIMS128), TOKENS)
    rows = (first + token) * results.out_token + head * results.out_head
    dims = gl.arange(0, 128, gl.SliceLayout(0, DIMS128))
    gl.store(out + rows[:, None] + dims[None, :], x, mask=real[:, None])


@gluon.jit
def add_values(
    num_tiles, shape, found, memory, results, L: gl.constexpr, TOKENS: gl.constexpr,
    WHO: gl.constexpr,
):  # fmt: skip
    """One of the two warpgroups that convert halves of keys and add weighted values.

    Tiles of keys are converted two steps before they are added, whosever they are: the next rows'
    first tiles come under the last steps of these. One place in the code converts all of them, as a
    launch waits for instructions: the first rows have two steps more, which only convert.
    """
    _, values, weights, _, _, _, _, factors, totals, _, _, bar = memory
    key_tile = -2
    # Of the rows whose keys are converted: tiles that are left, and which rows these are.
    left = 0
    ahead = -1
    turn = -1
    # Once: each tile of rows begins with a product that adds to nothing.
    acc0 = gl.zeros([64, 128], gl.float32, SUMS)
    acc1 = gl.zeros([64, 128], gl.float32, SUMS)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        turn += 1
        count = read_range(found, bar, turn)[0]
        for i in range(gl.minimum(key_tile, 0), count):
            if i >= 0:
                mbarrier.wait(bar.index(WEIGHTS), key_tile & 1)
                fence_async_shared()
                if gl.max((factors.load(ALL) != 1.0).to(gl.int32), 0) != 0:
                    factor = factors.load(SUM_ROWS)[:, None]
                    acc0 *= factor
                    acc1 *= factor
                z = opaque_zero(i)
                x = values.index(key_tile % 2 * 2 + WHO + z)
                p = weights.index(key_tile % weights.shape[0] + z)
                low = x.slice(0, 128, dim=1)
                high = x.slice(128, 128, dim=1)
                acc0 = warpgroup_mma(p, low, acc0, use_acc=i > 0, is_async=True)
                acc1 = warpgroup_mma(p, high, acc1, use_acc=i > 0, is_async=True)
                acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
                mbarrier.arrive(bar.index(ADDED + key_tile % 2), count=1)
            key_tile += 1
            if left == 0 and tile + (ahead + 1 - turn) * gl.num_programs(0) < num_tiles:
                ahead += 1
                left = read_range(found, bar, ahead)[0]
            if left > 0:
                keep_half(key_tile + 1, memory, L, WHO)
                left -= 1
        mbarrier.wait(bar.index(SUM + turn % 2), turn // 2 & 1)
        factor = totals.index(turn % 2).load(SUM_ROWS)
        begin, split, request, token = place_of(tile, shape)
        out = results.out + split.to(gl.int64) * results.out_split
        out += request * results.out_request + WHO * 256
        store_columns(acc0, factor, out, begin, token, results, shape, TOKENS)
        store_columns(acc1, factor, out + 128, begin, token, results, shape, TOKENS)


@gluon.jit
def _attend_fp8(
    num_tiles, q, q_request, q_token, q_head, rows, main, extra, results, shape, scale_log2,
    L: gl.constexpr, EXTRA: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr,
    MIXED: gl.constexpr, TOKENS: gl.constexpr, SCALE_WORDS: gl.constexpr,
):  # fmt: skip
    """Tiles of 64 rows of a group and a split of its keys.

    ``MIXED``: the rows of a tile may be of several tokens, of which each sees keys of its own.
    """
    VALUES: gl.constexpr = num_values(L.fp8_dim, L.head_dim)
    PLACES: gl.constexpr = VALUES + 2
    q_high = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 256], TILE)
    values = gl.allocate_shared_memory(gl.bfloat16, [4, 64, 256], TILE)
    # Of two tiles where they take the place of what is converted and no value.
    COUNT: gl.constexpr = 2 if L.fp8_dim > 512 else 1
    weights = gl.allocate_shared_memory(gl.bfloat16, [COUNT, 64, 64], TILE)
    raw = gl.allocate_shared_memory(gl.uint8, [VALUES, 64, 128], RAW8)
    raw_rest = raw
    if L.head_dim > 512:
        if L.fp8_dim > 512:
            raw_rest = gl.allocate_shared_memory(gl.uint8, [1, 64, 64], RAW8_HALF)
        else:
            raw_rest = gl.allocate_shared_memory(gl.uint8, [2, 64, 128], RAW8)
    scales = gl.allocate_shared_memory(gl.int32, [2, SCALE_WORDS, 64], WORDS2)
    valid = gl.allocate_shared_memory(gl.int8, [TILES, 64], PLAIN)
    factors = gl.allocate_shared_memory(gl.float32, [64], PLAIN)
    totals = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    limits = gl.allocate_shared_memory(gl.int32, [TURNS, 64], PLAIN)
    found = gl.allocate_shared_memory(gl.int32, [2 * TURNS, 1], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    bar = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
    for b in range(PLACES):
        mbarrier.init(full.index(b), count=128)
        mbarrier.init(empty.index(b), count=1)
    for b in range(CONVERTED):
        mbarrier.init(bar.index(b), count=1)
    for b in range(CONVERTED, NUM_BARRIERS):
        mbarrier.init(bar.index(b), count=2)  # both adders arrive
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()  # as in kernels/common/early.py: all above needs nobody's results
    memory = (
        q_high, values, weights, raw, raw_rest, scales, valid, factors, totals, full, empty, bar
    )  # fmt: skip
    gl.warp_specialize(
        [
            (add_values, (num_tiles, shape, found, memory, results, L, TOKENS, 0)),
            (add_values, (num_tiles, shape, found, memory, results, L, TOKENS, 1)),
            (score, (num_tiles, q, (q_request, q_token, q_head), shape, limits, found, memory,
                     results, scale_log2, L, MIXED, TOKENS)),
            (produce, (num_tiles, rows, main, extra, shape, limits, found, memory,
                       L, EXTRA, PAGED, CAUSAL)),
        ],
        [4, 4, 4],
        [168, 144, 32],
    )  # fmt: skip


def _arguments(cache: PagedCache) -> tuple[Records, Record]:
    """A quantised cache as what kernels take and what they are compiled for."""
    layout = cache_arguments(cache)[1]
    fp8, scales, bf16 = cache.stored()
    record = Record(
        head_dim=layout.head_dim,
        fp8_dim=layout.fp8_dim,
        scale_block=layout.scale_block,
        scale_bytes=0 if scales is None else scales.itemsize,
        num_scales=cache.format.num_scales,
        page_size=layout.page_size,
        linear=layout.linear,
        strides=(layout.fp8_strides[0] // 4, layout.fp8_strides[1] // 4),
        scales_strides=layout.scales_strides,
        scales_at=0,
        tail_dim=cache.format.bf16_dim,
        tail_at=0 if bf16 is None else bf16.storage_offset() - fp8.storage_offset() // 2,
    )
    if scales is not None and cache.format.scales_in != "tensor":
        start = fp8.storage_offset() // scales.itemsize  # codes are bytes
        record = record._replace(scales_at=scales.storage_offset() - start)
        scales = None
    return Records(fp8.view(int32), scales, cache.num_slots), record


def attend_fp8(
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
    num_tiles = num_groups * -(-shape.num_rows // 64) * shape.num_splits
    records, record = _arguments(cache)
    extra_record = None
    if extra_cache is not None and extra is not None:
        extra_records, extra_record = _arguments(extra_cache)
        distance = extra_records.words.data_ptr() - records.words.data_ptr()
        extra = extra._replace(shift=distance // 4)
    # What a program needs beside fits, up to 16 words of scales a row.
    scale_words = triton.next_power_of_2(max(-(-record.num_scales * record.scale_bytes // 4), 1))
    _attend_fp8[(min(num_tiles, num_multiprocessors(q.device)),)](
        num_tiles,
        q,
        *q_strides,
        records,
        stream,
        extra,
        results,
        shape,
        softmax_scale * LOG2E.value,
        L=record,
        EXTRA=extra_record,
        PAGED=paged,
        CAUSAL=causal,
        MIXED=causal and shape.num_heads % 64 > 0,
        TOKENS=shape.num_rows > shape.num_heads,
        SCALE_WORDS=scale_words,
        num_warps=4,
        launch_pdl=True,
    )

"""Attention on Hopper of 64 query rows that share keys, straight from a quantised cache.

Two warpgroups work on every tile of 64 keys together, each on half of the dims: *left* on the
first 256 of the value, *right* on the others. A third one copies rows as they are stored through a
ring of chunks of 128 bytes a key. A warpgroup converts its chunks in registers, which are the left
operand of the scores at once, and keeps them as a bfloat16 tile that only its own weighted sum
reads. Each finishes the scores of half of the heads, for which the other hands over its share;
weights go to both through shared memory. While the weighted values of a tile are under way, the
next tile's first chunk is converted.

Weights are relative to a reference, the highest score of a head some tiles before. No thread knows
the highest one of this tile: each adds up weights of its own keys, and only if some score is far
above its reference, as in the first tile, are all weights made again, from the highest scores.

Scores have keys on M and heads on N, the weighted values heads on M and dims on N.

Never released. One H200, 656 bytes, 2048 keys, batch 128, us with 128 and 64 heads: 188 and 102 with warm instructions, 190
and 104 with cold ones; batch 4 and 16 with 128 heads 24.9 and 41.4, cold 25.5 and 41.9. The form before with half the
exchange, one body for all tiles, 74 KB of code. What replaced both takes 171 and 94 warm, 180 and 101 cold, but 26.1 and 40.0,
cold 30.2 and 45.6, at batch 4 and 16: to be as small as this one is what it lacks.
Runs in place of hopper_rows_fp8.py at f3bfb5f.
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
from sparsemla.kernels.common.attention import cache_arguments
from sparsemla.kernels.common.gluon import async_load, opaque_zero, reinterpret
from sparsemla.kernels.common.hopper_columns import (
    BF16_ROWS,
    CONVERT,
    COPY8,
    COPY16,
    COPY32,
    COPY_ROWS,
    WORDS2,
    chunk_start,
    chunk_width,
    num_chunks,
)
from sparsemla.kernels.common.hopper_rows import (
    LN2,
    LOG2E,
    LOWEST,
    PLAIN,
    SCORES,
    TILE,
    Results,
    Shape,
    Stream,
    end_of,
    store_limits,
    to_bf16,
)


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


# Scores of half of the heads, keys on M.
HALF = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 32, 16]))
HALF_HEADS = gl.constexpr(gl.SliceLayout(0, HALF))
HALF_KEYS = gl.constexpr(gl.SliceLayout(1, HALF))
# The same, as they are handed over: four that a thread has lie side by side.
SHARES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
OF_THREADS = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [1, 0], [2, 0]],
        [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[0, 128], [0, 256]],
        [],
        [4, 512],
    )
)
HALF_WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))  # halves of the heads lie apart

SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
SUM_ROWS = gl.constexpr(gl.SliceLayout(1, SUMS))
# A thread has 4 neighbouring dims of each 16, of two keys: what a step of a product takes.
DIMS128 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 128],
    )
)
DIMS64 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)
# Swizzled so that the eight keys which a warp reads at once lie in different banks.
RAW8 = gl.constexpr(gl.SwizzledSharedLayout(16, 1, 8, [1, 0]))
RAW8_HALF = gl.constexpr(gl.SwizzledSharedLayout(16, 2, 4, [1, 0]))
# As SUMS, where the dims are in the order of the keys: a thread has 4 side by side, and four
# threads 16, which fill sectors of memory whether they are stored as bfloat16 or float32.
OWN = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32], [0, 64], [0, 128]],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 256],
    )
)
QUERIES = gl.constexpr(gl.BlockedLayout([1, 16], [2, 16], [4, 1], [1, 0]))
ONE = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))
ALL = gl.constexpr(gl.SliceLayout(0, gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])))

# Powers of two by which a score may exceed the reference.
SLACK = gl.constexpr(8.0)

# Flags of this many tiles are kept: copies are less than two tiles ahead of what is converted, and
# that is one ahead of the softmax.
FLAGS = gl.constexpr(4)

# Barriers beside those of the ring. SHARE: what a warpgroup's dims contribute to the scores.
SHARE = gl.constexpr(0)
WEIGHTS = gl.constexpr(2)  # of all heads, and whether they must be made again
SUM = gl.constexpr(3)  # what the sums are divided by
RANGE = gl.constexpr(4)  # where the keys of the split are
VALID = gl.constexpr(5)  # which keys of a tile count
AGAIN = gl.constexpr(9)  # weights that were made again, and what earlier sums shrink by
LENGTH = gl.constexpr(10)  # tiles up to the last valid key, of those that RANGE counts
NUM_BARRIERS = gl.constexpr(11)


@gluon.jit
def fp8_chunk(raw, turn, WIDTH: gl.constexpr, CHUNKS: gl.constexpr):
    """A place of the ring as e4m3 codes ``[64, WIDTH]``."""
    if WIDTH == 128:
        chunk = reinterpret(raw, gl.uint8, [CHUNKS, 64, 128], RAW8).index(turn)
    else:
        chunk = reinterpret(raw, gl.uint8, [2 * CHUNKS, 64, 64], RAW8_HALF).index(2 * turn)
    return chunk


@gluon.jit
def in_order(x):
    """Dims of rows in the order in which a product takes them from :data:`DIMS64`."""
    x = x.reshape(x.shape[0], x.shape[1] // 16, 4, 2, 2).permute(0, 1, 3, 2, 4)
    return x.reshape(x.shape[0], 16 * x.shape[1])


@gluon.jit
def out_of_order(x):
    """The weighted sums of values that were stored :func:`in_order`, in their own order."""
    x = x.reshape(x.shape[0] // 16, 2, 4, 2, x.shape[1]).permute(0, 2, 1, 3, 4)
    return x.reshape(256, x.shape[4])


@gluon.jit
def place(shape):
    """First row of the program's tile, its split, request and first token."""
    num_tiles = gl.cdiv(shape.num_rows, 64)
    group = gl.program_id(0) // num_tiles
    begin = gl.program_id(0) % num_tiles * 64
    request = (group // shape.group_tokens).to(gl.int64)
    return begin, gl.program_id(1), request, (group % shape.group_tokens).to(gl.int64)


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
def find_blocks(main, extra, shape, where, limits, EXTRA: gl.constexpr, CAUSAL: gl.constexpr):
    """Where the keys are, where they end in each stream, and the blocks of the split.

    What cuts a list short for a split is an end too.
    """
    begin, split, request, token = where
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
def chunks_of(fp8_dim, head_dim, who):
    """Chunks that a warpgroup converts, in its order: its half of the value, what is left."""
    starts = [chunk_start(fp8_dim, c) for c in range(num_chunks(fp8_dim, head_dim))]
    return tuple(
        chunk
        for chunk, start in enumerate(starts)
        if min(start // 256, 2) == who or (who == 0 and 512 <= start < fp8_dim)
    )


@gluon.constexpr_function
def dim_of(fp8_dim, chunk, piece):
    """First dim of a piece of a chunk."""
    return chunk_start(fp8_dim, chunk) + 64 * piece


@gluon.constexpr_function
def has_ready(fp8_dim, head_dim, who):
    """Whether a warpgroup has the last chunk as operand as it is: bfloat16, no part of values."""
    return who == 0 and fp8_dim == 512 and head_dim > 512


@gluon.constexpr_function
def chunk_order(fp8_dim, head_dim):
    """Chunks in the order in which they are copied: one that is ready, the warpgroups' in turn."""
    left = chunks_of(fp8_dim, head_dim, 0)
    right = chunks_of(fp8_dim, head_dim, 1)
    turns = [chunk for turn in zip_longest(left, right) for chunk in turn]
    ready = [num_chunks(fp8_dim, head_dim) - 1] if has_ready(fp8_dim, head_dim, 0) else []
    return tuple(ready + [chunk for chunk in turns if chunk is not None])


@gluon.constexpr_function
def turn_of(fp8_dim, head_dim, chunk):
    """How many chunks of a tile are copied before one."""
    return chunk_order(fp8_dim, head_dim).index(chunk)


@gluon.jit
def heads_of(begin, shape, TOKENS: gl.constexpr, COUNT: gl.constexpr, LAYOUT: gl.constexpr):
    """Token in the group and head of ``COUNT`` rows, and whether there is one: else the last."""
    row = begin + gl.arange(0, COUNT, LAYOUT)
    real = row < shape.num_rows
    row = gl.minimum(row, shape.num_rows - 1)
    if TOKENS:
        token = (row // shape.num_heads).to(gl.int64)
        head = (row % shape.num_heads).to(gl.int64)
    else:
        token = 0
        head = row.to(gl.int64)
    return token, head, real


@gluon.jit
def load_queries(
    to, q, strides, shape, where, START: gl.constexpr, WIDTH: gl.constexpr,
    CONVERTED: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """Dims of the tile's rows, in the order of the keys if those are converted."""
    begin, _, request, first = where
    token, head, _ = heads_of(begin, shape, TOKENS, 64, gl.SliceLayout(1, QUERIES))
    rows = request * strides[0] + (first + token) * strides[1] + head * strides[2]
    dims = START + gl.arange(0, WIDTH, gl.SliceLayout(0, QUERIES))
    x = gl.load(q + rows[:, None] + dims[None, :])
    if CONVERTED:
        x = in_order(x)
    to.store(x)


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
def bf16_chunk(raw, turn):
    """A chunk as bfloat16 ``[64, 64]``."""
    CHUNKS: gl.constexpr = raw.shape[0]
    return reinterpret(raw, gl.bfloat16, [CHUNKS, 64, 64], TILE).index(turn)


@gluon.jit
def copy_chunk(raw, rows, first, real, TURN: gl.constexpr, L: gl.constexpr):
    """A chunk of rows that start at the words ``first``, as it is stored."""
    START: gl.constexpr = chunk_start(L.fp8_dim, chunk_order(L.fp8_dim, L.head_dim)[TURN])
    if L.fp8_dim > START:
        WIDTH: gl.constexpr = chunk_width(L.fp8_dim, START)
        codes = rows.words.to(gl.pointer_type(gl.uint8), bitcast=True)
        dims = START + gl.arange(0, WIDTH, gl.SliceLayout(0, COPY8))
        source = codes + (4 * first)[:, None] + dims[None, :]
        chunk = fp8_chunk(raw, TURN, WIDTH, num_chunks(L.fp8_dim, L.head_dim))
        async_load(chunk, source, mask=real[:, None])
    else:
        first = gl.convert_layout(2 * first + L.tail_at, BF16_ROWS)
        real = gl.convert_layout(real, BF16_ROWS)
        dims = START - L.fp8_dim + gl.arange(0, 64, gl.SliceLayout(0, COPY16))
        tail = rows.words.to(gl.pointer_type(gl.bfloat16), bitcast=True)
        source = tail + first[:, None] + dims[None, :]
        async_load(bf16_chunk(raw, TURN), source, mask=real[:, None])


@gluon.jit
def copy_tile(tile, slots, is_extra, rows, extra, memory, L: gl.constexpr, EXTRA: gl.constexpr):
    """Copy a tile's rows chunk by chunk, each as soon as there is a place in the ring."""
    _, _, _, _, _, raw, scales, valid, full, empty, bar = memory
    real = slots >= 0
    first = word_offset(slots, extra, is_extra, L, EXTRA)
    for j in gl.static_range(num_chunks(L.fp8_dim, L.head_dim)):
        mbarrier.wait(empty.index(j), tile & 1 ^ 1)
        if j == 0:
            valid.index(tile % FLAGS).store(gl.where(real, 0.0, float("-inf")))
            mbarrier.arrive(bar.index(VALID + tile % FLAGS), count=1)
            if L.scale_block > 0:
                to = scales.index(tile % scales.shape[0])
                copy_scales(to, rows, slots, is_extra, extra, L, EXTRA)
        copy_chunk(raw, rows, first, real, j, L)
        async_copy.mbarrier_arrive(full.index(j), increment_count=False)


@gluon.jit
def produce(
    rows, main, extra, shape, where, limits, found, memory,
    L: gl.constexpr, EXTRA: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The warpgroup that copies."""
    bar = memory[10]
    keys, ends, first, last = find_blocks(main, extra, shape, where, limits, EXTRA, CAUSAL)
    found.index(0).store(gl.zeros([1], gl.int32, ONE) + gl.maximum(last - first, 1))
    found.index(1).store(gl.zeros([1], gl.int32, ONE) + first * 64)
    mbarrier.arrive(bar.index(RANGE), count=1)
    slots = block_slots(keys, ends, main, extra, first, L, EXTRA, PAGED)
    copy_tile(0, slots, first >= ends[2], rows, extra, memory, L, EXTRA)
    # While these are under way, how long the lists really are. At least one tile: a loop that may
    # be skipped makes the products wait for each other.
    last = used_blocks(keys, ends, main, extra, first, last, EXTRA, PAGED)
    num_tiles = gl.maximum(last - first, 1)
    found.index(2).store(gl.zeros([1], gl.int32, ONE) + num_tiles)
    mbarrier.arrive(bar.index(LENGTH), count=1)
    slots = block_slots(keys, ends, main, extra, first + 1, L, EXTRA, PAGED)
    for tile in range(1, num_tiles):
        block = first + tile
        following = block_slots(keys, ends, main, extra, block + 1, L, EXTRA, PAGED)
        copy_tile(tile, slots, block >= ends[2], rows, extra, memory, L, EXTRA)
        slots = following


@gluon.jit
def scale_of(scales, tile, DIM: gl.constexpr, L: gl.constexpr):
    """float32 scales of the tile's keys for one dim."""
    if L.scale_block == 0:
        scale = gl.full([64], 1.0, gl.float32, gl.SliceLayout(1, DIMS64))
    else:
        PER_WORD: gl.constexpr = 4 // L.scale_bytes
        INDEX: gl.constexpr = DIM // L.scale_block
        NUM_WORDS: gl.constexpr = scales.shape[1]
        words = reinterpret(scales, gl.int32, [scales.shape[0] * NUM_WORDS, 64], PLAIN)
        word = words.index(tile % scales.shape[0] * NUM_WORDS + INDEX // PER_WORD)
        bits = word.load(gl.SliceLayout(1, DIMS64))
        if L.scale_bytes == 1:
            code = (bits >> (INDEX % 4 * 8)) & 0xFF
            bits = gl.where(code == 0, 0x400000, code << 23)
            bits = gl.where(code == 255, 0x7FC00000, bits)
        scale = bits.to(gl.float32, bitcast=True)
    return scale


@gluon.jit
def load_chunk(tile, memory, CHUNK: gl.constexpr, L: gl.constexpr):
    """Pieces of 64 dims, and scales, of a chunk, whose place in the ring is given back."""
    _, _, _, _, _, raw, scales, _, full, empty, _ = memory
    START: gl.constexpr = chunk_start(L.fp8_dim, CHUNK)
    TURN: gl.constexpr = turn_of(L.fp8_dim, L.head_dim, CHUNK)
    mbarrier.wait(full.index(TURN), tile & 1)
    pieces = ()
    if L.fp8_dim <= START:
        pieces = pieces + ((bf16_chunk(raw, TURN).load(DIMS64), 0),)
    else:
        WIDTH: gl.constexpr = chunk_width(L.fp8_dim, START)
        chunk = fp8_chunk(raw, TURN, WIDTH, num_chunks(L.fp8_dim, L.head_dim))
        if WIDTH == 128:
            low, high = gl.split(chunk.load(DIMS128).reshape(64, 2, 64).permute(0, 2, 1))
            low = gl.convert_layout(low, DIMS64)
            high = gl.convert_layout(high, DIMS64)
            pieces = pieces + ((low, scale_of(scales, tile, START, L)),)
            pieces = pieces + ((high, scale_of(scales, tile, START + 64, L)),)
        else:
            pieces = pieces + ((chunk.load(DIMS64), scale_of(scales, tile, START, L)),)
    mbarrier.arrive(empty.index(TURN), count=1)
    return pieces


@gluon.jit
def convert(piece):
    """A piece as the left operand of a product."""
    x, scale = piece
    if x.dtype != gl.bfloat16:
        codes, scale = gl.broadcast(x, scale[:, None])
        x = gl.inline_asm_elementwise(
            CONVERT,
            "=r,=r,r,f,f,f,f",
            [codes, scale],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return gl.convert_layout(in_order(x), gl.DotOperandLayout(0, SCORES, 2))


@gluon.jit
def add_scores(s, x, z, memory, FIRST: gl.constexpr, START: gl.constexpr, WHO: gl.constexpr):
    """Start the product of a piece, which must live until it is done."""
    q_value, q_rest, _, _, _, _, _, _, _, _, _ = memory
    if START < 512:
        q = q_value.index(WHO + z).slice(START % 256, 64, dim=1)
    else:
        q = q_rest.index(z)
    return warpgroup_mma(x, q.permute((1, 0)), s, use_acc=not FIRST, is_async=True)


@gluon.jit
def keep_values(x, z, memory, START: gl.constexpr, WHO: gl.constexpr):
    """Store a piece for the weighted sum, if it is part of the value."""
    values = memory[2]
    if START < 512:
        values.index(WHO + z).slice(START % 256, 64, dim=1).store(x)


@gluon.jit
def begin_scores(tile, z, memory, L: gl.constexpr, WHO: gl.constexpr):
    """Start a tile's scores with the first piece, which is returned, as the next one is."""
    _, q_rest, _, _, _, raw, _, _, full, _, _ = memory
    READY: gl.constexpr = has_ready(L.fp8_dim, L.head_dim, WHO)
    CHUNK: gl.constexpr = chunks_of(L.fp8_dim, L.head_dim, WHO)[0]
    s = gl.zeros([64, 64], gl.float32, SCORES)
    if READY:
        mbarrier.wait(full.index(0), tile & 1)
        q = q_rest.index(z).permute((1, 0))
        s = warpgroup_mma(bf16_chunk(raw, z), q, s, use_acc=False, is_async=True)
    first, second = load_chunk(tile, memory, CHUNK, L)
    x = convert(first)
    s = add_scores(s, x, z, memory, not READY, chunk_start(L.fp8_dim, CHUNK), WHO)
    return s, x, second


@gluon.jit
def end_scores(s, x, second, tile, z, memory, L: gl.constexpr, WHO: gl.constexpr):
    """What :func:`begin_scores` began; values are kept."""
    empty = memory[9]
    READY: gl.constexpr = has_ready(L.fp8_dim, L.head_dim, WHO)
    MINE: gl.constexpr = chunks_of(L.fp8_dim, L.head_dim, WHO)
    keep_values(x, z, memory, chunk_start(L.fp8_dim, MINE[0]), WHO)
    pieces = (second,)
    for c in gl.static_range(len(MINE)):
        for i in gl.static_range(len(pieces)):
            y = convert(pieces[i])
            keep_values(y, z, memory, dim_of(L.fp8_dim, MINE[c], i + (c == 0)), WHO)
            s = warpgroup_mma_wait(0, deps=[s, x])[0]
            if READY and c == 0:
                mbarrier.arrive(empty.index(0), count=1)
            s = add_scores(s, y, z, memory, False, dim_of(L.fp8_dim, MINE[c], i + (c == 0)), WHO)
            x = y
        if c + 1 < len(MINE):
            pieces = load_chunk(tile, memory, MINE[c + 1], L)
    return warpgroup_mma_wait(0, deps=[s, x])[0]


@gluon.jit
def finish(
    acc, m, top, total, factors, memory, results, shape, where, TOKENS: gl.constexpr,
    WHO: gl.constexpr,
):  # fmt: skip
    """Normalise half of the weighted values and store it, and the lse of half of the heads."""
    bar = memory[10]
    begin, split, request, first = where
    token, head, real = heads_of(begin + 32 * WHO, shape, TOKENS, 32, ONE)
    lse = results.lse + split.to(gl.int64) * results.lse_split + request * results.lse_request
    rows = (first + token) * results.lse_token + head
    gl.store(lse + rows, (m + gl.log2(total)) * LN2, mask=real)  # log2(0) is -inf
    empty = total == 0
    if results.max_logits is not None:
        logits = results.max_logits + request * results.max_logits_request
        gl.store(logits + head, gl.where(empty, float("-inf"), top * LN2), mask=real)
    if results.attn_sink is not None:
        sink = gl.load(results.attn_sink + head, mask=real, other=0.0)
        total += gl.exp2(sink * LOG2E - m)
    factor = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, total))
    reinterpret(factors, gl.float32, [4, 32], PLAIN).index(2 + WHO).store(factor)
    mbarrier.arrive(bar.index(SUM), count=1)
    mbarrier.wait(bar.index(SUM), 0)
    acc = acc * factors.index(1).load(SUM_ROWS)[:, None]
    acc = gl.convert_layout(out_of_order(acc.permute((1, 0))).permute((1, 0)), OWN)
    if results.out.dtype.element_ty == gl.bfloat16:
        acc = to_bf16(acc)
    token, head, real = heads_of(begin, shape, TOKENS, 64, gl.SliceLayout(1, OWN))
    rows = (first + token) * results.out_token + head * results.out_head
    dims = WHO * 256 + gl.arange(0, 256, gl.SliceLayout(0, OWN))
    out = results.out + split.to(gl.int64) * results.out_split + request * results.out_request
    gl.store(out + rows[:, None] + dims[None, :], acc, mask=real[:, None])


@gluon.jit
def split_heads(s, WHO: gl.constexpr):
    """Scores of a warpgroup's half of the heads, and those of the other's."""
    low, high = gl.split(s.reshape(64, 2, 32).permute(0, 2, 1))
    low = gl.convert_layout(low, HALF)
    high = gl.convert_layout(high, HALF)
    if WHO == 0:
        own = low
        other = high
    else:
        own = high
        other = low
    return own, other


@gluon.jit
def hand_over(to, x):
    """Store scores of half of the heads as :data:`OF_THREADS`."""
    x = x.reshape(4, 2, 8, 4, 4, 2).permute(3, 0, 2, 4, 1, 5)
    to.store(gl.convert_layout(x.reshape(4, 512), OF_THREADS))


@gluon.jit
def take(share):
    """What :func:`hand_over` stored."""
    x = share.load(OF_THREADS).reshape(4, 4, 8, 4, 2, 2).permute(1, 4, 2, 0, 3, 5)
    return gl.convert_layout(x.reshape(64, 32), HALF)


@gluon.jit
def of_threads(x):
    """What each thread has of each head, on the last axis."""
    return x.reshape(4, 2, 8, 32).permute(0, 2, 3, 1).reshape(32, 32, 2)


@gluon.jit
def any_above(x, limit):
    """For each warp, whether it has an element above ``limit``."""
    x = gl.max(gl.max(gl.max(x.reshape(4, 2, 8, 4, 4, 2), 5), 3), 1)
    return gl.max((x > limit).to(gl.int32).reshape(4, 32), 1)


@gluon.jit
def attend_half(
    q, strides, shape, where, limits, found, factors, above, references, peaks, memory, results,
    scale_log2, L: gl.constexpr, CAUSAL: gl.constexpr, TOKENS: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """One of the two warpgroups that attend."""
    q_value, q_rest, values, weights, shares, _, _, valid, _, _, bar = memory
    READY: gl.constexpr = has_ready(L.fp8_dim, L.head_dim, WHO)
    load_queries(q_value.index(WHO), q, strides, shape, where, 256 * WHO, 256, True, TOKENS)
    if WHO == 0 and L.head_dim > 512:
        load_queries(q_rest.index(0), q, strides, shape, where, 512, 64, not READY, TOKENS)
    fence_async_shared()
    acc = gl.zeros([64, 256], gl.float32, SUMS)
    l = gl.sum(of_threads(gl.zeros([64, 32], gl.float32, HALF)), 2)
    # There are no registers left for these.
    reference = references.index(WHO)
    reference.store(gl.full([32], LOWEST, gl.float32, HALF_HEADS))
    peak = peaks.index(WHO)
    if results.max_logits is not None:
        peak.store(l + LOWEST)
    times = 0
    mbarrier.wait(bar.index(RANGE), 0)
    most = gl.maximum(gl.max(found.index(0).load(ONE), 0), 1)
    first = gl.max(found.index(1).load(ONE), 0)
    num_tiles = 1
    limits = reinterpret(limits, gl.int32, [2, 32], PLAIN)
    s = gl.zeros([64, 64], gl.float32, SCORES)
    # One body for all tiles. It begins before the first one with a product of whatever is there,
    # which the next one overwrites: the more code, the longer a launch waits for instructions.
    for i in range(-1, most):
        if i < num_tiles:
            z = opaque_zero(i)
            if i >= 0:
                if i == 0:
                    mbarrier.wait(bar.index(LENGTH), 0)
                    num_tiles = gl.max(found.index(2).load(ONE), 0)
                phase = i & 1
                mbarrier.wait(bar.index(VALID + i % FLAGS), i // FLAGS & 1)
                seen = valid.index(i % FLAGS).load(HALF_KEYS)
                own, other = split_heads(s, WHO)
                hand_over(shares.index(WHO), other)
                mbarrier.arrive(bar.index(SHARE + WHO), count=1)
                mbarrier.wait(bar.index(SHARE + 1 - WHO), phase)
                own += take(shares.index(1 - WHO))
                own = own * scale_log2 + seen[:, None]
                if CAUSAL:
                    limit = limits.index(WHO).load(HALF_HEADS)
                    keys = first + i * 64 + gl.arange(0, 64, HALF_KEYS)
                    own = gl.where(keys[:, None] < limit[None, :], own, float("-inf"))
                m = reference.load(HALF_HEADS)
                excess = own - m[None, :]
                p = gl.exp2(excess)
                weights.slice(32 * WHO, 32, dim=1).store(to_bf16(p))
                above.index(WHO).store(any_above(excess, SLACK))
                mbarrier.arrive(bar.index(WEIGHTS), count=1)
                if results.max_logits is not None:
                    peak.store(gl.maximum(peak.load(l.type.layout), gl.max(of_threads(own), 2)))
                mbarrier.wait(bar.index(WEIGHTS), phase)
                again = reinterpret(above, gl.int32, [8], PLAIN).load(ALL)
                fence_async_shared()
                if gl.max(again, 0) != 0:
                    top = gl.max(own, 0)
                    highest = gl.where(top > m, top, m)
                    factor = gl.exp2(m - highest)
                    reference.store(highest)
                    p = gl.exp2(own - highest[None, :])
                    weights.slice(32 * WHO, 32, dim=1).store(to_bf16(p))
                    reinterpret(factors, gl.float32, [4, 32], PLAIN).index(WHO).store(factor)
                    l *= gl.convert_layout(factor, gl.SliceLayout(0, l.type.layout))[None, :]
                    fence_async_shared()
                    mbarrier.arrive(bar.index(AGAIN), count=1)
                    mbarrier.wait(bar.index(AGAIN), times & 1)
                    times += 1
                    acc *= factors.index(z).load(SUM_ROWS)[:, None]
                l += gl.sum(of_threads(p), 2)
            v = values.index(WHO + z)
            flying = warpgroup_mma(weights.permute((1, 0)), v, acc, use_acc=i > 0, is_async=True)
            if i + 1 < num_tiles:
                next_s, x, second = begin_scores(i + 1, z, memory, L, WHO)
                acc, next_s = warpgroup_mma_wait(2 if READY else 1, deps=[flying, next_s])
                s = end_scores(next_s, x, second, i + 1, z, memory, L, WHO)
            else:
                acc = warpgroup_mma_wait(0, deps=[flying])
    total = gl.convert_layout(gl.sum(l, 0), ONE)
    m = reference.load(ONE)
    top = m
    if results.max_logits is not None:
        top = gl.convert_layout(gl.max(peak.load(l.type.layout), 0), ONE)
    finish(acc, m, top, total, factors, memory, results, shape, where, TOKENS, WHO)


@gluon.constexpr_function
def arrivals(b):
    """Arrivals that a barrier waits for: of both warpgroups where they need each other."""
    return 2 if b in (WEIGHTS.value, SUM.value, AGAIN.value) else 1


@gluon.jit
def _attend_fp8(
    q, q_request, q_token, q_head, rows, main, extra, results, shape, scale_log2,
    L: gl.constexpr, EXTRA: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr,
    TOKENS: gl.constexpr, SCALE_WORDS: gl.constexpr,
):  # fmt: skip
    """A tile of 64 rows of a group and a split of its keys."""
    CHUNKS: gl.constexpr = num_chunks(L.fp8_dim, L.head_dim)
    q_value = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    q_rest = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], TILE)
    values = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [64, 64], HALF_WEIGHTS)
    shares = gl.allocate_shared_memory(gl.float32, [2, 4, 512], SHARES)
    above = gl.allocate_shared_memory(gl.int32, [2, 4], PLAIN)
    references = gl.allocate_shared_memory(gl.float32, [2, 32], PLAIN)
    PEAKS: gl.constexpr = 1 if results.max_logits is None else 32
    peaks = gl.allocate_shared_memory(gl.float32, [2, PEAKS, 32], SHARES)
    raw = gl.allocate_shared_memory(gl.uint8, [CHUNKS, 64, 128], RAW8)
    scales = gl.allocate_shared_memory(gl.int32, [2, SCALE_WORDS, 64], WORDS2)
    valid = gl.allocate_shared_memory(gl.float32, [FLAGS, 64], PLAIN)
    factors = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    limits = gl.allocate_shared_memory(gl.int32, [64], PLAIN)
    found = gl.allocate_shared_memory(gl.int32, [4, 1], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [CHUNKS, 1], mbarrier.MBarrierLayout())
    bar = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
    for b in range(CHUNKS):
        mbarrier.init(full.index(b), count=128)
        mbarrier.init(empty.index(b), count=1)
    for b in gl.static_range(NUM_BARRIERS):
        mbarrier.init(bar.index(b), count=arrivals(b))
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()  # as in kernels/common/early.py: all above needs nobody's results
    where = place(shape)
    strides = (q_request, q_token, q_head)
    REGISTERS: gl.constexpr = [240, 24] if EXTRA is None else [232, 40]
    memory = (q_value, q_rest, values, weights, shares, raw, scales, valid, full, empty, bar)
    gl.warp_specialize(
        [
            (attend_half, (q, strides, shape, where, limits, found, factors, above, references,
                           peaks, memory, results, scale_log2, L, CAUSAL, TOKENS, 0)),
            (attend_half, (q, strides, shape, where, limits, found, factors, above, references,
                           peaks, memory, results, scale_log2, L, CAUSAL, TOKENS, 1)),
            (produce, (rows, main, extra, shape, where, limits, found, memory,
                       L, EXTRA, PAGED, CAUSAL)),
        ],
        [4, 4],
        REGISTERS,
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
    num_tiles = -(-shape.num_rows // 64)
    records, record = _arguments(cache)
    extra_record = None
    if extra_cache is not None and extra is not None:
        extra_records, extra_record = _arguments(extra_cache)
        distance = extra_records.words.data_ptr() - records.words.data_ptr()
        extra = extra._replace(shift=distance // 4)
    # What a program needs beside fits, up to 16 words of scales a row.
    scale_words = triton.next_power_of_2(max(-(-record.num_scales * record.scale_bytes // 4), 1))
    _attend_fp8[(num_groups * num_tiles, shape.num_splits)](
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
        TOKENS=shape.num_rows > shape.num_heads,
        SCALE_WORDS=scale_words,
        num_warps=4,
        launch_pdl=True,
    )

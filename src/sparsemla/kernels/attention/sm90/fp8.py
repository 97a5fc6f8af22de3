"""Attention on Hopper over FP8 rows, for 64 query rows that share their keys.

A persistent CTA takes one tile of 64 query rows after the other and walks the tile's keys in blocks
of 64. Every key is dequantised once, to bfloat16 in shared memory, where the QK MMA and the PV MMA
both read it. Four warpgroups share the work and 512 registers, counted for one thread of each:

    producer    32       copies rows as the cache stores them, in chunks of 128 bytes
    QK         144       computes S, m, l and P, with half of Q in 64 registers
    PV 0, PV 1 168 each  dequantise half of the value dims each, and accumulate that half of O,
                         which takes 128 registers

The PV warpgroups dequantise two blocks ahead of their MMAs, across the ends of tiles: the first
blocks of the next tile are dequantised under the last MMAs of this one. So the running number of a
block over all tiles of the CTA, its *step*, determines its stages and the phases of its barriers;
*tile_iter* is the running number of a tile. The PV loop starts two steps early, so that the code
dequantises in one place only: instructions past the first 64 KB stall a launch with cold
caches, and the kernel has 73 KB, or 84 with an extra stream.

Time line of a step in cycles, at batch 128 and 128 heads; PV 1 does the same as PV 0:

    cycle     0                       1460           2290                 3570    4000
    producer  copy the chunks of block n + 3, each as soon as its stage is empty
    QK        S = Q K^T of block n + 1               | softmax, P of n + 1   | wait
    PV 0      O += P V of block n     | dequantise half of block n + 2    | wait

Both MMAs start together and share the tensor cores, which are idle during the second half of the
step. The kernel is bound by shared memory: only two dequantised blocks fit beside Q, so a block has
two steps for 2100 cycles of dequantisation, 2150 of S, 1700 of P and 2000 of O, each stretched by
the others. The MMAs alone need 2176 cycles a step, accesses to shared memory 3200.

Barriers. A chunk of value dims has one stage; RoPE dims that are kept as bfloat16 have two:

    barrier         number      arrivals             waits         guards
    chunk_full      1 a stage   128, the producer's  PV 0, 1; QK   a chunk, and the scales of its
                    of a chunk  cp.async copies      (bf16 RoPE)   block
    chunk_empty     1 a stage   1, its reader        producer      the same stage, for reuse
                    of a chunk
    kv_full         2 by step   2, PV 0 and PV 1     QK            a dequantised block
    valid_full      4 by step   1, producer          QK            which keys of a block are valid
    key_range_full  4 by tile   1, producer          PV 0, 1; QK   number of blocks, first key,
                                                                   limits
    p_full          1           1, QK                PV 0, 1       P and alpha of a step
    p_empty         2 by step   2, PV 0 and PV 1     QK; PV 0      P and alpha, for reuse
    l_full          2 by tile   1, QK                PV 0, 1       1 / l of a tile

No other memory needs an empty barrier. A PV warpgroup overwrites its half of a block after its own
MMA, which starts once QK has computed S and P of the block. The producer is at most three steps
ahead of QK, as every chunk waits for its stage; hence four stages of validity and of key ranges.

Shared memory in KiB: right half of Q 32, two dequantised blocks 2 x 64, P 8, chunks 32 (40 for 448
e4m3 codes and 64 bfloat16 dims), bfloat16 RoPE dims 2 x 8, scales 0.5 to 8, the rest 2.6. The
656-byte format takes 220.6 of 227. Quantised RoPE dims take 4 and are dequantised into the stage
that P of the same block overwrites, of which there are two then.
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
from sparsemla.kernels.attention import calls
from sparsemla.kernels.attention.arguments import DenseDecode, SparseDecode, SparsePrefill
from sparsemla.kernels.attention.operands import KeyList, Queries, QueryRows, Results
from sparsemla.kernels.attention.rows import (
    LN2,
    LOG2E,
    LOWEST,
    VALUE_DIM,
    decode_e8m0,
    query_dims,
    rows_of_tile,
)
from sparsemla.kernels.attention.sm90.chunks import (
    DEQUANTIZE,
    chunk_start,
    chunk_width,
    num_chunks,
    permute_to_operand,
)
from sparsemla.kernels.attention.sm90.layouts import (
    ACC_DIM,
    BLOCK_M,
    BLOCK_N,
    CHUNK_64,
    CHUNK_128,
    CHUNK_DIM,
    CODES_ROWS,
    COPY_CODES,
    COPY_ROWS,
    COPY_SCALES,
    HALF_DIM,
    O_LAYOUT,
    O_ROWS,
    Q_OPERAND,
    RAW_64,
    RAW_128,
    ROPE_DIM,
    ROWS_IN_WARP,
    S_KEYS,
    S_LAYOUT,
    S_ROWS,
    THREADS,
    UNSWIZZLED,
    WARPGROUP,
)
from sparsemla.kernels.attention.sm90.tiles import (
    allocate_barriers,
    end_of_valid_blocks,
    find_key_blocks,
    load_block_slots,
    locate_tile,
    to_bf16,
)
from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.gluon import async_load, barrier, opaque_zero, reinterpret
from sparsemla.kernels.common.hopper import COPY, PLAIN, TILE
from sparsemla.kernels.common.paged import cache_arguments

# O and l are rescaled only when a score exceeds m by more than this many powers of two. Until then
# m lags behind the largest score, unless the caller wants the largest logit.
RESCALE_THRESHOLD = gl.constexpr(8.0)

PV_WARPGROUPS = gl.constexpr(2)
KV_STAGES = gl.constexpr(2)
ROPE_STAGES = gl.constexpr(2)
L_STAGES = gl.constexpr(2)
VALID_STAGES = gl.constexpr(4)
RANGE_STAGES = gl.constexpr(4)


class QuantizedRows(NamedTuple):
    """A quantised cache as a kernel argument.

    ``words``: its codes, four per word. ``scales``: None if the codes' storage holds the scales.
    """

    words: Tensor
    scales: Tensor | None


class RowLayout(NamedTuple):
    """The layout of a quantised cache, for which a kernel is compiled.

    All parts of a row are addressed from its codes, as the producer has no registers for a pointer
    to each part. ``strides`` are in words of four codes, ``scales_strides`` and ``scales_at`` in
    scales, ``tail_at``, the start of the bfloat16 dims, in bfloat16 elements. Dims past the 512 of
    the value are RoPE dims: e4m3 if ``rope_fp8``, bfloat16 if ``rope_bf16``.
    """

    head_dim: int
    fp8_dim: int
    rope_fp8: bool
    rope_bf16: bool
    scale_block: int
    scale_bytes: int
    num_scales: int
    page_size: int
    linear: bool
    strides: tuple[int, int]
    scales_strides: tuple[int, int]
    scales_at: int
    tail_at: int


class SharedMemory(NamedTuple):
    """Shared memory of a CTA. The first index is the stage; ``4 * 2`` is 2 entries a stage."""

    limits: object  # [4, BLOCK_M] by tile: number of keys that each row sees; producer -> QK
    key_range: object  # [4 * 2, 1] by tile: number of blocks, first key; producer -> all others
    q_high: object  # [1, BLOCK_M, HALF_DIM] dims 256 to 511 of Q; QK -> QK
    kv: object  # [2 * 2, BLOCK_N, HALF_DIM] halves of a dequantised block; PV -> QK, PV
    p: object  # [1 or 2, BLOCK_M, BLOCK_N] FP8 RoPE dims of K; PV 0 -> QK. Then P; QK -> PV
    raw: object  # [chunks, BLOCK_N, CHUNK_DIM] bytes of value dims; producer -> PV
    raw_rope: object  # [1 or 2, BLOCK_N, bytes] of RoPE dims; producer -> PV 0 or QK
    scales: object  # [2, words, BLOCK_N] scales of a block's keys; producer -> PV
    valid: object  # [4, BLOCK_N] validity of a block's keys; producer -> QK
    alpha: object  # [BLOCK_M] the factors that rescale O; QK -> PV
    inv_l: object  # [2, BLOCK_M] by tile: 1 / l; QK -> PV
    chunk_full: object  # this and the following fields are arrays of barriers
    chunk_empty: object
    kv_full: object
    valid_full: object
    key_range_full: object
    p_full: object
    p_empty: object
    l_full: object


@gluon.jit
def split_slots(slots, L: gl.constexpr):
    """Page and row of slots. Invalid slots give row 0, linear caches page 0."""
    slots = gl.maximum(slots, 0).to(gl.uint32)
    if L.linear:
        page = gl.zeros_like(slots)
        row = slots
    else:
        page = slots // L.page_size
        row = slots % L.page_size
    return page.to(gl.int64), row.to(gl.int64)


@gluon.jit
def code_offsets(slots, L: gl.constexpr):
    """Offsets of rows' codes, in words."""
    page, row = split_slots(slots, L)
    return page * L.strides[0] + row * L.strides[1]


@gluon.jit
def scale_offsets(slots, L: gl.constexpr):
    """Offsets of rows' scales, in scales."""
    page, row = split_slots(slots, L)
    return page * L.scales_strides[0] + row * L.scales_strides[1] + L.scales_at


@gluon.jit
def stream_code_offsets(slots, extra, is_extra, L: gl.constexpr, EXTRA: gl.constexpr):
    """Offsets of rows' codes in either stream's cache, from the start of the main one."""
    if EXTRA is None:
        at = code_offsets(slots, L)
    else:
        if is_extra:
            at = code_offsets(slots, EXTRA) + extra.shift
        else:
            at = code_offsets(slots, L)
    return at


@gluon.jit
def stream_scale_offsets(slots, extra, is_extra, L: gl.constexpr, EXTRA: gl.constexpr):
    """Offsets of rows' scales in either stream's cache, from the start of the main one."""
    if EXTRA is None:
        at = scale_offsets(slots, L)
    else:
        if is_extra:
            at = scale_offsets(slots, EXTRA) + extra.shift.to(gl.int64) * (4 // L.scale_bytes)
        else:
            at = scale_offsets(slots, L)
    return at


@gluon.constexpr_function
def num_value_chunks(fp8_dim, head_dim):
    """Number of chunks of value dims; the next chunk has the RoPE dims, if there are any."""
    return sum(
        chunk_start(fp8_dim, c) < VALUE_DIM.value for c in range(num_chunks(fp8_dim, head_dim))
    )


@gluon.constexpr_function
def value_chunks(fp8_dim, head_dim, half):
    """Chunks of a half of the value dims."""
    count = num_value_chunks(fp8_dim, head_dim)
    return tuple(c for c in range(count) if chunk_start(fp8_dim, c) // HALF_DIM.value == half)


@gluon.constexpr_function
def copy_order(fp8_dim, head_dim):
    """Chunks in the order of their copies: chunks of both halves alternate, RoPE dims last."""
    halves = [value_chunks(fp8_dim, head_dim, half) for half in range(2)]
    order = [chunk for pair in zip_longest(*halves) for chunk in pair if chunk is not None]
    return tuple(order) + tuple(range(len(order), num_chunks(fp8_dim, head_dim)))


@gluon.jit
def chunk_buffer(step, smem, CHUNK: gl.constexpr, L: gl.constexpr):
    """Stages, stage, barrier and phase of a chunk. Every chunk of value dims has one stage."""
    VALUE_CHUNKS: gl.constexpr = num_value_chunks(L.fp8_dim, L.head_dim)
    if CHUNK < VALUE_CHUNKS:
        stages = smem.raw
        stage = step * 0 + CHUNK  # a tensor, so that both branches return the same types
        index = stage
        use = step
    else:
        stages = smem.raw_rope
        stage = step % stages.shape[0]
        index = VALUE_CHUNKS + stage
        use = step // stages.shape[0]
    return stages, stage, index, use & 1


@gluon.jit
def release_chunk(step, smem, CHUNK: gl.constexpr, L: gl.constexpr):
    """Let the producer overwrite a chunk."""
    mbarrier.arrive(smem.chunk_empty.index(chunk_buffer(step, smem, CHUNK, L)[2]), count=1)


@gluon.jit
def view_bf16(stages, stage):
    """A stage as bfloat16 ``[BLOCK_N, ROPE_DIM]``."""
    NUM_STAGES: gl.constexpr = stages.shape[0]
    return reinterpret(stages, gl.bfloat16, [NUM_STAGES, BLOCK_N, ROPE_DIM], TILE).index(stage)


@gluon.jit
def view_codes(stages, stage, WIDTH: gl.constexpr):
    """A stage as e4m3 codes ``[BLOCK_N, WIDTH]``."""
    COUNT: gl.constexpr = stages.shape[0] * stages.shape[2] // WIDTH
    LAYOUT: gl.constexpr = RAW_128 if WIDTH == CHUNK_DIM else RAW_64
    at = stage * (stages.shape[2] // WIDTH)
    return reinterpret(stages, gl.uint8, [COUNT, BLOCK_N, WIDTH], LAYOUT).index(at)


@gluon.jit
def copy_scales(to, rows, slots, is_extra, extra, L: gl.constexpr, EXTRA: gl.constexpr):
    """Copy scales in 32-bit words, transposed: all keys' first word, then all keys' second."""
    PER_WORD: gl.constexpr = 4 // L.scale_bytes
    NUM_WORDS: gl.constexpr = -(-L.num_scales // PER_WORD)
    slots = gl.convert_layout(slots, gl.SliceLayout(1, COPY_SCALES))
    first = stream_scale_offsets(slots, extra, is_extra, L, EXTRA) // PER_WORD
    word = gl.arange(0, to.shape[0], gl.SliceLayout(0, COPY_SCALES))
    words = rows.words
    if rows.scales is not None:
        words = rows.scales.to(gl.pointer_type(gl.int32), bitcast=True)
    mask = (slots >= 0)[:, None] & (word < NUM_WORDS)[None, :]
    async_load(to.permute((1, 0)), words + first[:, None] + word[None, :], mask=mask)


@gluon.jit
def copy_chunk(step, smem, rows, first, valid, CHUNK: gl.constexpr, L: gl.constexpr):
    """Copy a chunk of the rows that begin at the words ``first``, once its stage is empty."""
    START: gl.constexpr = chunk_start(L.fp8_dim, CHUNK)
    stages, stage, index, phase = chunk_buffer(step, smem, CHUNK, L)
    mbarrier.wait(smem.chunk_empty.index(index), phase ^ 1)
    if L.fp8_dim > START:
        WIDTH: gl.constexpr = chunk_width(L.fp8_dim, START)
        codes = rows.words.to(gl.pointer_type(gl.uint8), bitcast=True)
        dims = START + gl.arange(0, WIDTH, gl.SliceLayout(0, COPY_CODES))
        source = codes + (4 * first)[:, None] + dims[None, :]
        async_load(view_codes(stages, stage, WIDTH), source, mask=valid[:, None])
    else:
        first = gl.convert_layout(2 * first + L.tail_at, COPY_ROWS)
        valid = gl.convert_layout(valid, COPY_ROWS)
        dims = START - L.fp8_dim + gl.arange(0, ROPE_DIM, gl.SliceLayout(0, COPY))
        tail = rows.words.to(gl.pointer_type(gl.bfloat16), bitcast=True)
        source = tail + first[:, None] + dims[None, :]
        async_load(view_bf16(stages, stage), source, mask=valid[:, None])
    async_copy.mbarrier_arrive(smem.chunk_full.index(index), increment_count=False)


@gluon.jit
def copy_block(step, slots, is_extra, rows, extra, smem, L: gl.constexpr, EXTRA: gl.constexpr):
    """Copy a block of keys chunk by chunk, and store the keys' validity."""
    ORDER: gl.constexpr = copy_order(L.fp8_dim, L.head_dim)
    valid = slots >= 0
    first = stream_code_offsets(slots, extra, is_extra, L, EXTRA)
    smem.valid.index(step % VALID_STAGES).store(valid.to(gl.int8))
    mbarrier.arrive(smem.valid_full.index(step % VALID_STAGES), count=1)
    if L.scale_block > 0:
        # Overwrites the scales of step - 2: all chunks of that step have been released.
        copy_scales(smem.scales.index(step % KV_STAGES), rows, slots, is_extra, extra, L, EXTRA)
    for j in gl.static_range(len(ORDER)):
        copy_chunk(step, smem, rows, first, valid, ORDER[j], L)


@gluon.jit
def producer(
    num_tiles, rows, main, extra, shape, smem,
    L: gl.constexpr, EXTRA: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """The producer warpgroup: it copies keys."""
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile_iter = tile // gl.num_programs(0)
        at = tile_iter % RANGE_STAGES
        blocks = find_key_blocks(tile, main, extra, shape, smem.limits.index(at), EXTRA, CAUSAL)
        first = blocks.first
        slots = load_block_slots(blocks, first, main, extra, L, EXTRA, PAGED, CODES_ROWS)
        copy_block(step, slots, first >= blocks.num_main, rows, extra, smem, L, EXTRA)
        # Find the last valid key during the copy of the first block. Each tile has a block, because
        # the compiler serialises the MMAs of a loop that may be skipped.
        last = end_of_valid_blocks(blocks, main, extra, EXTRA, PAGED)
        last = gl.maximum(last, first + 1)
        smem.key_range.index(2 * at).store(gl.zeros([1], gl.int32, THREADS) + (last - first))
        smem.key_range.index(2 * at + 1).store(gl.zeros([1], gl.int32, THREADS) + first * BLOCK_N)
        mbarrier.arrive(smem.key_range_full.index(at), count=1)
        slots = load_block_slots(blocks, first + 1, main, extra, L, EXTRA, PAGED, CODES_ROWS)
        step += 1
        for block in range(first + 1, last):
            following = load_block_slots(
                blocks, block + 1, main, extra, L, EXTRA, PAGED, CODES_ROWS
            )
            copy_block(step, slots, block >= blocks.num_main, rows, extra, smem, L, EXTRA)
            slots = following
            step += 1


@gluon.jit
def load_key_range(smem, tile_iter):
    """The number of blocks of a tile and the position of its first key, from the producer."""
    at = tile_iter % RANGE_STAGES
    mbarrier.wait(smem.key_range_full.index(at), tile_iter // RANGE_STAGES & 1)
    num_blocks = gl.max(smem.key_range.index(2 * at).load(THREADS), 0)
    return num_blocks, gl.max(smem.key_range.index(2 * at + 1).load(THREADS), 0)


@gluon.jit
def wait_p_empty(step, smem):
    """Wait until both PV warpgroups have read P of ``step - 2``."""
    mbarrier.wait(smem.p_empty.index(step % KV_STAGES), step // KV_STAGES & 1 ^ 1)


@gluon.jit
def load_q(
    tile, queries, shape, START: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr,
    TOKENS: gl.constexpr,
):  # fmt: skip
    """Load dims ``START .. START + WIDTH`` of a tile's query rows."""
    begin, _, request, first = locate_tile(tile, shape)
    token, head, real = rows_of_tile(begin, shape, BLOCK_M, gl.SliceLayout(1, LAYOUT), TOKENS)
    q, request_stride, token_stride, head_stride = query_dims(queries, START)
    rows = request * request_stride + (first + token) * token_stride + head * head_stride
    dims = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    return gl.load(q + rows[:, None] + dims[None, :], mask=real[:, None], other=0.0)


@gluon.jit
def to_operand(x):
    """Permute dims from the order in memory to the registers of an MMA's A operand."""
    return gl.convert_layout(permute_to_operand(x, 16), Q_OPERAND)


@gluon.jit
def load_q_operands(tile, step, queries, shape, smem, L: gl.constexpr, TOKENS: gl.constexpr):
    """Load Q: dims 0 to 255 and the RoPE dims into registers, dims 256 to 511 into shared memory.

    The dims that stay in registers pass through shared memory, too: Triton 3.9 kept them in the
    layout of their load and converted them for each block.
    """
    low = smem.q_high.index(0).slice(0, ACC_DIM, dim=1)
    high = smem.q_high.index(0).slice(ACC_DIM, ACC_DIM, dim=1)
    x0 = load_q(tile, queries, shape, 0, CHUNK_DIM, CHUNK_128, TOKENS)
    x1 = load_q(tile, queries, shape, CHUNK_DIM, CHUNK_DIM, CHUNK_128, TOKENS)
    low.store(to_operand(x0))
    high.store(to_operand(x1))
    barrier()
    q0 = low.load(Q_OPERAND)
    q1 = high.load(Q_OPERAND)
    barrier()
    x2 = load_q(tile, queries, shape, HALF_DIM, CHUNK_DIM, CHUNK_128, TOKENS)
    x3 = load_q(tile, queries, shape, HALF_DIM + CHUNK_DIM, CHUNK_DIM, CHUNK_128, TOKENS)
    q_rope = q0
    if L.rope_bf16:
        rope = load_q(tile, queries, shape, VALUE_DIM, ROPE_DIM, COPY, TOKENS)
    elif L.rope_fp8:
        rope = load_q(tile, queries, shape, VALUE_DIM, ROPE_DIM, CHUNK_64, TOKENS)
    low.store(to_operand(x2))
    high.store(to_operand(x3))
    if L.rope_bf16:
        # Through the memory of P, once P of the last step has been read.
        wait_p_empty(step + 1, smem)
        smem.p.index(0).store(rope)
        barrier()
        q_rope = smem.p.index(0).load(Q_OPERAND)
        barrier()
    elif L.rope_fp8:
        q_rope = to_operand(rope)
    fence_async_shared()
    return q0, q1, q_rope


@gluon.jit
def qk_mma(step, zero, q0, q1, q_rope, smem, L: gl.constexpr):
    """Issue the QK MMA of a block; S is in flight."""
    stage = step % KV_STAGES
    low = smem.kv.index(2 * stage + zero)
    high = smem.kv.index(2 * stage + 1 + zero)
    s = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT)
    if L.rope_bf16:
        ROPE_CHUNK: gl.constexpr = num_value_chunks(L.fp8_dim, L.head_dim)
        stages, rope_stage, index, phase = chunk_buffer(step, smem, ROPE_CHUNK, L)
        mbarrier.wait(smem.chunk_full.index(index), phase)
        keys = view_bf16(stages, rope_stage).permute((1, 0))
        s = warpgroup_mma(q_rope, keys, s, use_acc=False, is_async=True)
    mbarrier.wait(smem.kv_full.index(stage), step // KV_STAGES & 1)
    # Covers the stores of the PV warpgroups. A fence here costs less than in their code.
    fence_async_shared()
    keys = low.slice(0, ACC_DIM, dim=1).permute((1, 0))
    s = warpgroup_mma(q0, keys, s, use_acc=L.rope_bf16, is_async=True)
    s = warpgroup_mma(q1, low.slice(ACC_DIM, ACC_DIM, dim=1).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma(smem.q_high.index(zero), high.permute((1, 0)), s, is_async=True)
    if L.rope_fp8:
        s = warpgroup_mma(q_rope, smem.p.index(stage).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def all_keys_valid(step, smem):
    """Whether all keys of a block are valid, as in most blocks: four flags at a time."""
    flags = reinterpret(smem.valid, gl.int32, [VALID_STAGES, BLOCK_N // 4], PLAIN).index(
        step % VALID_STAGES
    )
    return gl.min(flags.load(THREADS), 0) == 0x01010101


@gluon.jit
def mask_scores(s, all_valid, step, tile_iter, first_key, smem, MIXED: gl.constexpr):
    """Set S of keys that are invalid, or that a row must not see, to -inf."""
    if MIXED:
        keys = first_key + gl.arange(0, BLOCK_N, S_KEYS)
        limit = smem.limits.index(tile_iter % RANGE_STAGES).load(S_ROWS)
        s = gl.where(keys[None, :] < limit[:, None], s, float("-inf"))
    if not all_valid:
        valid = smem.valid.index(step % VALID_STAGES).load(S_KEYS) != 0
        s = gl.where(valid[None, :], s, float("-inf"))
    return s


@gluon.jit
def update_m(m, s, max_logits):
    """The next m of each row, which may lag unless the caller wants ``max_logits``."""
    # Pairs first: a shorter chain of maxima.
    top = gl.max(gl.max(s.reshape(BLOCK_M, BLOCK_N // 8, 4, 2), 3), 1)
    top = gl.convert_layout(gl.max(top, 1), S_ROWS)
    return gl.where(top > m + (RESCALE_THRESHOLD if max_logits is None else 0.0), top, m)


@gluon.jit
def partial_row_sums(p):
    """Sums ``[BLOCK_M, 4]`` of each row over the keys that one thread holds."""
    return gl.sum(gl.sum(p.reshape(BLOCK_M, BLOCK_N // 8, 4, 2), 3), 1)


@gluon.jit
def store_p(p, alpha, step, smem, L: gl.constexpr):
    """Hand P and alpha of a step to the PV warpgroups."""
    if L.rope_fp8:
        barrier()  # all warps' MMAs have read the RoPE dims of K in the same place
    wait_p_empty(step + 1, smem)
    smem.p.index(step % smem.p.shape[0]).store(to_bf16(p))
    smem.alpha.store(alpha)
    mbarrier.arrive(smem.p_full.index(0), count=1)


@gluon.jit
def store_lse(tile, tile_iter, m, l, results, shape, smem, TOKENS: gl.constexpr):
    """Store lse and the largest logits of a tile; hand 1 / l to the PV warpgroups."""
    begin, split, request, token = locate_tile(tile, shape)
    row_token, head, real = rows_of_tile(begin, shape, BLOCK_M, S_ROWS, TOKENS)
    lse = results.lse + split.to(gl.int64) * results.lse_split + request * results.lse_request
    rows = (token + row_token) * results.lse_token + head
    gl.store(lse + rows, (m + gl.log2(l)) * LN2, mask=real)  # log2(0) is -inf
    empty = l == 0
    if results.max_logits is not None:
        to = results.max_logits + request * results.max_logits_request
        gl.store(to + head, gl.where(empty, float("-inf"), m * LN2), mask=real)
    if results.attn_sink is not None:
        sink = gl.load(results.attn_sink + head, mask=real, other=0.0)
        l += gl.exp2(sink * LOG2E - m)
    smem.inv_l.index(tile_iter % L_STAGES).store(
        gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, l))
    )
    mbarrier.arrive(smem.l_full.index(tile_iter % L_STAGES), count=1)


@gluon.jit
def qk_consumer(
    num_tiles, queries, shape, results, smem, scale_log2,
    L: gl.constexpr, MIXED: gl.constexpr, TOKENS: gl.constexpr,
):  # fmt: skip
    """The QK warpgroup: it computes S and P."""
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile_iter = tile // gl.num_programs(0)
        q0, q1, q_rope = load_q_operands(tile, step, queries, shape, smem, L, TOKENS)
        m = gl.full([BLOCK_M], LOWEST, gl.float32, S_ROWS)
        l = partial_row_sums(gl.zeros([BLOCK_M, BLOCK_N], gl.float32, S_LAYOUT))
        num_blocks, first_key = load_key_range(smem, tile_iter)
        for i in range(num_blocks):
            zero = opaque_zero(i)
            s = qk_mma(step, zero, q0, q1, q_rope, smem, L)
            mbarrier.wait(smem.valid_full.index(step % VALID_STAGES), step // VALID_STAGES & 1)
            all_valid = all_keys_valid(step, smem)
            s = warpgroup_mma_wait(0, deps=[s])
            if L.rope_bf16:
                release_chunk(step, smem, num_value_chunks(L.fp8_dim, L.head_dim), L)
            s = mask_scores(
                s * scale_log2, all_valid, step, tile_iter, first_key + i * BLOCK_N, smem, MIXED
            )
            m_new = update_m(m, s, results.max_logits)
            alpha = gl.exp2(m - m_new)
            m = m_new
            p = gl.exp2(s - m[:, None])
            store_p(p, alpha, step, smem, L)
            alpha = gl.convert_layout(alpha, gl.SliceLayout(1, l.type.layout))
            l = l * alpha[:, None] + partial_row_sums(p)
            step += 1
        l = gl.convert_layout(gl.sum(l, 1), S_ROWS)
        store_lse(tile, tile_iter, m, l, results, shape, smem, TOKENS)


@gluon.jit
def load_scales(step, smem, DIM: gl.constexpr, L: gl.constexpr, LAYOUT: gl.constexpr):
    """float32 scales of a block's keys for one dim."""
    if L.scale_block == 0:
        scale = gl.full([BLOCK_N], 1.0, gl.float32, gl.SliceLayout(1, LAYOUT))
    else:
        PER_WORD: gl.constexpr = 4 // L.scale_bytes
        INDEX: gl.constexpr = DIM // L.scale_block
        NUM_WORDS: gl.constexpr = smem.scales.shape[1]
        STAGES: gl.constexpr = smem.scales.shape[0]
        words = reinterpret(smem.scales, gl.int32, [STAGES * NUM_WORDS, BLOCK_N], PLAIN)
        word = words.index(step % KV_STAGES * NUM_WORDS + INDEX // PER_WORD)
        bits = word.load(gl.SliceLayout(1, LAYOUT))
        if L.scale_bytes == 1:
            scale = decode_e8m0((bits >> (INDEX % 4 * 8)) & 0xFF)
        else:
            scale = bits.to(gl.float32, bitcast=True)
    return scale


@gluon.jit
def load_chunk(step, smem, CHUNK: gl.constexpr, L: gl.constexpr):
    """A chunk as the cache stores it, once it has arrived, and its scales."""
    START: gl.constexpr = chunk_start(L.fp8_dim, CHUNK)
    stages, stage, index, phase = chunk_buffer(step, smem, CHUNK, L)
    mbarrier.wait(smem.chunk_full.index(index), phase)
    if L.fp8_dim <= START:
        x = view_bf16(stages, stage).load(CHUNK_64)
        scale = 0
    else:
        WIDTH: gl.constexpr = chunk_width(L.fp8_dim, START)
        LAYOUT: gl.constexpr = CHUNK_128 if WIDTH == CHUNK_DIM else CHUNK_64
        x = view_codes(stages, stage, WIDTH).load(LAYOUT)
        scale = load_scales(step, smem, START, L, LAYOUT)[:, None]
        if L.scale_block == 64 and WIDTH == CHUNK_DIM:
            second = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT)) >= L.scale_block
            other = load_scales(step, smem, START + L.scale_block, L, LAYOUT)[:, None]
            scale = gl.where(second[None, :], other, scale)
    return x, scale


@gluon.jit
def dequantize(x, scale):
    """Dequantise a chunk to bfloat16, in the registers of an A operand."""
    if x.dtype != gl.bfloat16:
        codes, scale = gl.broadcast(x, scale)
        x = gl.inline_asm_elementwise(
            DEQUANTIZE,
            "=r,=r,r,f,f,f,f",
            [codes, scale],
            dtype=gl.bfloat16,
            is_pure=True,
            pack=4,
        )
    return to_operand(x)


@gluon.jit
def dequantize_chunk(step, smem, CHUNK: gl.constexpr, L: gl.constexpr):
    """Dequantise a chunk into the memory that the MMAs read, and release it."""
    START: gl.constexpr = chunk_start(L.fp8_dim, CHUNK)
    x, scale = load_chunk(step, smem, CHUNK, L)
    x = dequantize(x, scale)
    if START < VALUE_DIM:
        to = smem.kv.index(step % KV_STAGES * 2 + START // HALF_DIM)
        to.slice(START % HALF_DIM, x.shape[1], dim=1).store(x)
    else:
        # Overwrites P of step - 2, which the other PV warpgroup reads, too.
        wait_p_empty(step, smem)
        smem.p.index(step % KV_STAGES).store(x)
    release_chunk(step, smem, CHUNK, L)


@gluon.jit
def dequantize_half(step, smem, L: gl.constexpr, HALF: gl.constexpr):
    """Dequantise a half of a block's value dims; with the left half, quantised RoPE dims too."""
    CHUNKS: gl.constexpr = value_chunks(L.fp8_dim, L.head_dim, HALF)
    for c in gl.static_range(len(CHUNKS)):
        dequantize_chunk(step, smem, CHUNKS[c], L)
    if L.rope_fp8 and HALF == 0:
        dequantize_chunk(step, smem, num_value_chunks(L.fp8_dim, L.head_dim), L)
    mbarrier.arrive(smem.kv_full.index(step % KV_STAGES), count=1)


@gluon.jit
def rescale(acc0, acc1, smem):
    """Rescale O if the running maximum of any row rose."""
    if gl.max((smem.alpha.load(ROWS_IN_WARP) != 1.0).to(gl.int32), 0) != 0:
        alpha = smem.alpha.load(O_ROWS)[:, None]
        acc0 *= alpha
        acc1 *= alpha
    return acc0, acc1


@gluon.jit
def pv_mma(step, i, acc0, acc1, smem, HALF: gl.constexpr):
    """Add P V of a block to a half of O. The first block of a tile overwrites O."""
    zero = opaque_zero(i)
    values = smem.kv.index(step % KV_STAGES * 2 + HALF + zero)
    p = smem.p.index(step % smem.p.shape[0] + zero)
    low = values.slice(0, ACC_DIM, dim=1)
    high = values.slice(ACC_DIM, ACC_DIM, dim=1)
    acc0 = warpgroup_mma(p, low, acc0, use_acc=i > 0, is_async=True)
    acc1 = warpgroup_mma(p, high, acc1, use_acc=i > 0, is_async=True)
    return warpgroup_mma_wait(0, deps=[acc0, acc1])


@gluon.jit
def store_out_columns(acc, inv_l, out, begin, first, results, shape, TOKENS: gl.constexpr):
    """Normalise and store columns of O, back in the order of memory: whole sectors at once."""
    x = acc * inv_l[:, None]
    x = x.reshape(BLOCK_M, ACC_DIM // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(BLOCK_M, ACC_DIM)
    x = gl.convert_layout(x, CHUNK_128)  # moves nothing
    if results.out.dtype.element_ty == gl.bfloat16:
        x = to_bf16(x)
    token, head, real = rows_of_tile(begin, shape, BLOCK_M, gl.SliceLayout(1, CHUNK_128), TOKENS)
    rows = (first + token) * results.out_token + head * results.out_head
    dims = gl.arange(0, ACC_DIM, gl.SliceLayout(0, CHUNK_128))
    gl.store(out + rows[:, None] + dims[None, :], x, mask=real[:, None])


@gluon.jit
def store_out(
    tile, tile_iter, acc0, acc1, results, shape, smem, TOKENS: gl.constexpr, HALF: gl.constexpr
):
    """Store half of O, once QK has stored 1 / l."""
    mbarrier.wait(smem.l_full.index(tile_iter % L_STAGES), tile_iter // L_STAGES & 1)
    inv_l = smem.inv_l.index(tile_iter % L_STAGES).load(O_ROWS)
    begin, split, request, token = locate_tile(tile, shape)
    out = results.out + split.to(gl.int64) * results.out_split
    out += request * results.out_request + HALF * HALF_DIM
    store_out_columns(acc0, inv_l, out, begin, token, results, shape, TOKENS)
    store_out_columns(acc1, inv_l, out + ACC_DIM, begin, token, results, shape, TOKENS)


@gluon.jit
def pv_consumer(
    num_tiles, shape, results, smem, L: gl.constexpr, TOKENS: gl.constexpr, HALF: gl.constexpr
):
    """A PV warpgroup: it dequantises half of the value dims and accumulates the same half of O.

    Dequantisation is two steps ahead of the MMA, across the ends of tiles. Before the first tile,
    two extra iterations only dequantise.
    """
    step = -2
    # The tile that is dequantised: its remaining blocks, and its number.
    blocks_left = 0
    ahead = -1
    tile_iter = -1
    # Never reset: the first MMA of each tile overwrites O.
    acc0 = gl.zeros([BLOCK_M, ACC_DIM], gl.float32, O_LAYOUT)
    acc1 = gl.zeros([BLOCK_M, ACC_DIM], gl.float32, O_LAYOUT)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        tile_iter += 1
        num_blocks = load_key_range(smem, tile_iter)[0]
        for i in range(gl.minimum(step, 0), num_blocks):
            if i >= 0:
                mbarrier.wait(smem.p_full.index(0), step & 1)
                fence_async_shared()
                acc0, acc1 = rescale(acc0, acc1, smem)
                acc0, acc1 = pv_mma(step, i, acc0, acc1, smem, HALF)
                mbarrier.arrive(smem.p_empty.index(step % KV_STAGES), count=1)
            step += 1
            if blocks_left == 0 and tile + (ahead + 1 - tile_iter) * gl.num_programs(0) < num_tiles:
                ahead += 1
                blocks_left = load_key_range(smem, ahead)[0]
            if blocks_left > 0:
                dequantize_half(step + 1, smem, L, HALF)
                blocks_left -= 1
        store_out(tile, tile_iter, acc0, acc1, results, shape, smem, TOKENS, HALF)


@gluon.jit
def _attend_fp8(
    num_tiles, queries, rows, main, extra, results, shape, scale_log2,
    L: gl.constexpr, EXTRA: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr,
    MIXED: gl.constexpr, TOKENS: gl.constexpr, SCALE_WORDS: gl.constexpr,
):  # fmt: skip
    """Attention of tiles of 64 query rows of a group over a split of their keys.

    ``TOKENS``: a group has rows of several tokens. ``MIXED``: a tile may have rows of several
    tokens, which see different numbers of keys under the causal mask.
    """
    VALUE_CHUNKS: gl.constexpr = num_value_chunks(L.fp8_dim, L.head_dim)
    NUM_STAGES: gl.constexpr = VALUE_CHUNKS + ROPE_STAGES
    P_STAGES: gl.constexpr = KV_STAGES if L.rope_fp8 else 1
    q_high = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_M, HALF_DIM], TILE)
    kv = gl.allocate_shared_memory(gl.bfloat16, [2 * KV_STAGES, BLOCK_N, HALF_DIM], TILE)
    p = gl.allocate_shared_memory(gl.bfloat16, [P_STAGES, BLOCK_M, BLOCK_N], TILE)
    raw = gl.allocate_shared_memory(gl.uint8, [VALUE_CHUNKS, BLOCK_N, CHUNK_DIM], RAW_128)
    raw_rope = raw
    if L.rope_fp8:
        raw_rope = gl.allocate_shared_memory(gl.uint8, [1, BLOCK_N, ROPE_DIM], RAW_64)
    elif L.rope_bf16:
        raw_rope = gl.allocate_shared_memory(
            gl.uint8, [ROPE_STAGES, BLOCK_N, 2 * ROPE_DIM], RAW_128
        )
    scales = gl.allocate_shared_memory(gl.int32, [KV_STAGES, SCALE_WORDS, BLOCK_N], UNSWIZZLED)
    valid = gl.allocate_shared_memory(gl.int8, [VALID_STAGES, BLOCK_N], PLAIN)
    alpha = gl.allocate_shared_memory(gl.float32, [BLOCK_M], PLAIN)
    inv_l = gl.allocate_shared_memory(gl.float32, [L_STAGES, BLOCK_M], PLAIN)
    limits = gl.allocate_shared_memory(gl.int32, [RANGE_STAGES, BLOCK_M], PLAIN)
    key_range = gl.allocate_shared_memory(gl.int32, [2 * RANGE_STAGES, 1], PLAIN)
    smem = SharedMemory(
        limits=limits,
        key_range=key_range,
        q_high=q_high,
        kv=kv,
        p=p,
        raw=raw,
        raw_rope=raw_rope,
        scales=scales,
        valid=valid,
        alpha=alpha,
        inv_l=inv_l,
        chunk_full=allocate_barriers(NUM_STAGES, WARPGROUP),
        chunk_empty=allocate_barriers(NUM_STAGES, 1),
        kv_full=allocate_barriers(KV_STAGES, PV_WARPGROUPS),
        valid_full=allocate_barriers(VALID_STAGES, 1),
        key_range_full=allocate_barriers(RANGE_STAGES, 1),
        p_full=allocate_barriers(1, 1),
        p_empty=allocate_barriers(KV_STAGES, PV_WARPGROUPS),
        l_full=allocate_barriers(L_STAGES, 1),
    )
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()  # the prologue above reads nothing that an earlier kernel writes
    gl.warp_specialize(
        [
            (pv_consumer, (num_tiles, shape, results, smem, L, TOKENS, 0)),
            (pv_consumer, (num_tiles, shape, results, smem, L, TOKENS, 1)),
            (qk_consumer, (num_tiles, queries, shape, results, smem, scale_log2, L, MIXED, TOKENS)),
            (producer, (num_tiles, rows, main, extra, shape, smem, L, EXTRA, PAGED, CAUSAL)),
        ],
        [4, 4, 4],
        [168, 144, 32],
    )  # fmt: skip


def cache_rows(cache: PagedCache) -> tuple[QuantizedRows, RowLayout]:
    """A quantised cache as a kernel argument, and the layout for which the kernel is compiled."""
    layout = cache_arguments(cache)[1]
    fp8, scales, bf16 = cache.stored()
    row_layout = RowLayout(
        head_dim=layout.head_dim,
        fp8_dim=layout.fp8_dim,
        rope_fp8=layout.fp8_dim > VALUE_DIM.value,
        rope_bf16=layout.fp8_dim <= VALUE_DIM.value < layout.head_dim,
        scale_block=layout.scale_block,
        scale_bytes=0 if scales is None else scales.itemsize,
        num_scales=cache.format.num_scales,
        page_size=layout.page_size,
        linear=layout.linear,
        strides=(layout.fp8_strides[0] // 4, layout.fp8_strides[1] // 4),
        scales_strides=layout.scales_strides,
        scales_at=0,
        tail_at=0 if bf16 is None else bf16.storage_offset() - fp8.storage_offset() // 2,
    )
    if scales is not None and cache.format.scales_in != "tensor":
        start = fp8.storage_offset() // scales.itemsize  # codes are bytes
        row_layout = row_layout._replace(scales_at=scales.storage_offset() - start)
        scales = None
    return QuantizedRows(fp8.view(int32), scales), row_layout


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
    """Launch over ``num_groups`` groups of rows; both streams' caches have the same format."""
    num_tiles = num_groups * -(-shape.num_rows // BLOCK_M.value) * shape.num_splits
    rows, layout = cache_rows(cache)
    extra_layout = None
    if extra_cache is not None and extra is not None:
        extra_rows, extra_layout = cache_rows(extra_cache)
        distance = extra_rows.words.data_ptr() - rows.words.data_ptr()
        extra = extra._replace(shift=distance // 4)
    # Shared memory has room for up to 16 words of scales per row.
    scale_words = triton.next_power_of_2(max(-(-layout.num_scales * layout.scale_bytes // 4), 1))
    _attend_fp8[(min(num_tiles, num_multiprocessors(queries.q.device)),)](
        num_tiles,
        queries,
        rows,
        stream,
        extra,
        results,
        shape,
        softmax_scale * LOG2E.value,
        L=layout,
        EXTRA=extra_layout,
        PAGED=paged,
        CAUSAL=causal,
        MIXED=causal and shape.num_heads % BLOCK_M.value > 0,
        TOKENS=shape.num_rows > shape.num_heads,
        SCALE_WORDS=scale_words,
        num_warps=4,
        launch_pdl=True,
    )


def sparse_decode(call: SparseDecode) -> None:
    calls.sparse_decode(call, launch)


def dense_decode(call: DenseDecode) -> None:
    calls.dense_decode(call, launch)


def sparse_prefill(call: SparsePrefill) -> None:
    calls.sparse_prefill(call, launch)

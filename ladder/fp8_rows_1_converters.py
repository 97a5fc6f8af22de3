"""Attention on Hopper of 64 query rows that share keys, straight from a quantised cache.

As :mod:`.hopper_rows`, with two producers, one for each block of a pair. A producer holds half a
row of e4m3 codes in registers while it waits for the tile to be free, and converts them on the way
into it: three instructions an element pair, exact for any float32 scale but for the last rounding.
A fourth warpgroup leaves 128 registers a thread on average; half of the weighted values is
kept as two tiles because the assembler refuses one of 256 columns there.

Superseded at 48dbd24. One H200, 656 bytes, 2048 keys, batch 128, us with 128 and 64 heads: 247 and 140 (FlashMLA 211 and 122).
Conversion stands between the products: two warpgroups wait for tiles that two others fill.
Runs in place of its namesake at the commit before 48dbd24.
"""

from __future__ import annotations

from typing import NamedTuple

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
from sparsemla.kernels.common.hopper_rows import (
    COPY_COLS,
    COPY_ROWS,
    LN2,
    LOG2E,
    LOWEST,
    ONE,
    PLAIN,
    SCORE_ROWS,
    SCORES,
    STORE,
    SUM_ROWS,
    SUMS,
    TILE,
    Results,
    Shape,
    Stream,
    end_of,
    heads_of,
    shrink,
    store_limits,
    to_bf16,
)

# Barriers. READY and FREE have one for each half of each block; the last dims of a block are
# copied with its right half.
READY_0L = gl.constexpr(0)
READY_0R = gl.constexpr(1)
READY_1L = gl.constexpr(2)
READY_1R = gl.constexpr(3)
FREE_0L = gl.constexpr(4)
FREE_0R = gl.constexpr(5)
FREE_1L = gl.constexpr(6)
FREE_1R = gl.constexpr(7)
VALID_0 = gl.constexpr(8)  # which keys of a block count
VALID_1 = gl.constexpr(9)
MAX_0 = gl.constexpr(10)  # the running maximum, with the even block; then with the odd one
MAX_1 = gl.constexpr(11)
WEIGHTS_0 = gl.constexpr(12)  # the weights of the even block, for right; of the odd one, for left
WEIGHTS_1 = gl.constexpr(13)
SUM = gl.constexpr(14)  # both sums of weights
QUERIES = gl.constexpr(15)
RANGE = gl.constexpr(16)  # what the producer found out about the keys
NUM_BARRIERS = gl.constexpr(17)


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
    page_size: int
    linear: bool
    strides: tuple[int, int]
    scales_strides: tuple[int, int]
    scales_at: int
    tail_dim: int
    tail_at: int


CODES = gl.constexpr(gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0]))
CODE_ROWS = gl.constexpr(gl.SliceLayout(1, CODES))
CODE_COLS = gl.constexpr(gl.SliceLayout(0, CODES))
TAIL = gl.constexpr(gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
WORDS = gl.constexpr(gl.NVMMASharedLayout(128, 32, 2))

# Four e4m3 codes and a scale to two words of two bfloat16.
DEQUANTISE = gl.constexpr("""{
    .reg .b16 l, h; .reg .b32 a, b; .reg .f16 a0, a1, b0, b1; .reg .f32 f0, f1, f2, f3;
    mov.b32 {l, h}, $2;
    cvt.rn.f16x2.e4m3x2 a, l; cvt.rn.f16x2.e4m3x2 b, h;
    mov.b32 {a0, a1}, a; mov.b32 {b0, b1}, b;
    cvt.f32.f16 f0, a0; cvt.f32.f16 f1, a1; cvt.f32.f16 f2, b0; cvt.f32.f16 f3, b1;
    mul.f32 f0, f0, $3; mul.f32 f1, f1, $3; mul.f32 f2, f2, $3; mul.f32 f3, f3, $3;
    cvt.rn.bf16x2.f32 $0, f1, f0; cvt.rn.bf16x2.f32 $1, f3, f2;
}""")


@gluon.jit
def place(shape):
    """First row of the program's tile, its split, request and first token."""
    num_tiles = gl.cdiv(shape.num_rows, 64)
    group = gl.program_id(0) // num_tiles // shape.num_splits
    begin = gl.program_id(0) % num_tiles * 64
    split = gl.program_id(0) // num_tiles % shape.num_splits
    request = (group // shape.group_tokens).to(gl.int64)
    return begin, split, request, (group % shape.group_tokens).to(gl.int64)


@gluon.jit
def copy_queries(
    tile, q, q_request, q_token, q_head, shape, START: gl.constexpr, DIM: gl.constexpr
):
    """Start to copy dims ``START .. START + DIM`` of the tile's rows."""
    begin, _, request, first = place(shape)
    token, head, real = heads_of(begin, shape, COPY_ROWS)
    rows = request * q_request + (first + token) * q_token + head * q_head
    dims = START + gl.arange(0, DIM, COPY_COLS)
    async_load(tile, q + rows[:, None] + dims[None, :], mask=real[:, None])


@gluon.jit
def read_range(found, bar):
    """Pairs of blocks and position of the first key, which a producer stored."""
    mbarrier.wait(bar.index(RANGE), 0)
    num_pairs = gl.max(found.index(0).load(ONE), 0)
    return num_pairs, gl.max(found.index(1).load(ONE), 0)


@gluon.jit
def store_range(found, bar, num_pairs, first):
    found.index(0).store(gl.zeros([1], gl.int32, ONE) + num_pairs)
    found.index(1).store(gl.zeros([1], gl.int32, ONE) + first)
    mbarrier.arrive(bar.index(RANGE), count=1)


@gluon.jit
def wait_for_keys(ready, phase, FENCE: gl.constexpr):
    """Wait for half a block. What ordinary stores wrote needs a fence before products read it."""
    mbarrier.wait(ready, phase)
    if FENCE:
        fence_async_shared()


@gluon.jit
def scale_pairs(x, factor):
    """bfloat16 times float32, rounded once, two at a time; takes half the registers of float32."""
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 l, h; .reg .f32 x, y;
            shl.b32 l, $1, 16; and.b32 h, $1, 0xffff0000; mov.b32 x, l; mov.b32 y, h;
            mul.f32 x, x, $2; mul.f32 y, y, $3; cvt.rn.bf16x2.f32 $0, y, x;
        }""",
        "=r,r,r,r",
        [x, factor],
        dtype=gl.bfloat16,
        is_pure=True,
        pack=2,
    )


@gluon.jit
def softmax(scores, valid, limit, at, m, scale_log2, CAUSAL: gl.constexpr):
    """Base-2 weights of a block and the new running maximum; a masked key has weight 0."""
    seen = valid.load(gl.SliceLayout(0, SCORES))[None, :] != 0
    if CAUSAL:
        keys = at + gl.arange(0, 64, gl.SliceLayout(0, SCORES))
        seen = seen & (keys[None, :] < limit[:, None])
    scores = gl.where(seen, scores * scale_log2, float("-inf"))
    highest = gl.maximum(m, gl.max(scores, 1))
    return gl.exp2(scores - highest[:, None]), highest


@gluon.jit
def left(
    q, q_rest, keys_l, keys_r, rest, weights_1, highest, sums, valid, bar, results, shape, limits,
    found, scale_log2, REST: gl.constexpr, CAUSAL: gl.constexpr, FENCE: gl.constexpr,
):  # fmt: skip
    acc0 = gl.zeros([64, 128], gl.float32, SUMS)
    acc1 = gl.zeros([64, 128], gl.float32, SUMS)
    m = gl.full([64], LOWEST, gl.float32, SCORE_ROWS)
    l = gl.zeros([64], gl.float32, SCORE_ROWS)
    mbarrier.wait(bar.index(QUERIES), 0)
    fence_async_shared()
    wait_for_keys(bar.index(READY_0L), 0, FENCE)
    s = gl.zeros([64, 64], gl.float32, SCORES)
    s = warpgroup_mma(q.index(0), keys_l.index(0).permute((1, 0)), s, use_acc=False, is_async=True)
    wait_for_keys(bar.index(READY_0R), 0, FENCE)
    s = warpgroup_mma(q.index(1), keys_r.index(0).permute((1, 0)), s, is_async=True)
    if REST > 0:
        s = warpgroup_mma(q_rest, rest.index(0).permute((1, 0)), s, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    num_pairs, first = read_range(found, bar)
    limit = limits.load(SCORE_ROWS)
    phase = 0
    for i in range(num_pairs):
        zero = opaque_zero(i)
        mbarrier.wait(bar.index(VALID_0), phase)
        p, m_0 = softmax(s, valid.index(0), limit, first + i * 128, m, scale_log2, CAUSAL)
        highest.store(m_0)
        mbarrier.arrive(bar.index(MAX_0), count=1)
        factor = gl.exp2(m - m_0)
        l = l * factor + gl.sum(p, 1)
        acc0 = shrink(acc0, factor)
        acc1 = shrink(acc1, factor)
        weights = to_bf16(p)
        own = gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2))
        values = keys_l.index(zero)
        acc0 = warpgroup_mma(own, values.slice(0, 128, dim=1), acc0, is_async=True)
        acc1 = warpgroup_mma(own, values.slice(128, 128, dim=1), acc1, is_async=True)
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        mbarrier.arrive(bar.index(FREE_0L), count=1)

        mbarrier.wait(bar.index(MAX_1), phase)
        m = highest.load(SCORE_ROWS)
        factor = gl.exp2(m_0 - m)
        rest.index(zero).store(scale_pairs(weights, factor[:, None]))
        fence_async_shared()
        mbarrier.arrive(bar.index(WEIGHTS_0), count=1)
        l = l * factor
        acc0 = shrink(acc0, factor)
        acc1 = shrink(acc1, factor)
        mbarrier.wait(bar.index(WEIGHTS_1), phase)
        values = keys_l.index(zero + 1)
        flying0 = warpgroup_mma(weights_1, values.slice(0, 128, dim=1), acc0, is_async=True)
        flying1 = warpgroup_mma(weights_1, values.slice(128, 128, dim=1), acc1, is_async=True)
        phase = phase ^ 1
        if i + 1 < num_pairs:
            wait_for_keys(bar.index(READY_0L), phase, FENCE)
            # Not the scores of this pair: they would take registers until here.
            next_s = gl.zeros([64, 64], gl.float32, SCORES)
            keys = keys_l.index(zero).permute((1, 0))
            next_s = warpgroup_mma(q.index(zero), keys, next_s, use_acc=False, is_async=True)
            acc0, acc1, next_s = warpgroup_mma_wait(1, deps=[flying0, flying1, next_s])
            mbarrier.arrive(bar.index(FREE_1L), count=1)
            wait_for_keys(bar.index(READY_0R), phase, FENCE)
            keys = keys_r.index(zero).permute((1, 0))
            next_s = warpgroup_mma(q.index(zero + 1), keys, next_s, is_async=True)
            if REST > 0:
                keys = rest.index(zero).permute((1, 0))
                next_s = warpgroup_mma(q_rest, keys, next_s, is_async=True)
            s = warpgroup_mma_wait(0, deps=[next_s])
        else:
            acc0, acc1 = warpgroup_mma_wait(0, deps=[flying0, flying1])
            mbarrier.arrive(bar.index(FREE_1L), count=1)
    store_half(acc0, acc1, m, l, sums, bar, q, results, shape, 0)


@gluon.jit
def right(
    q, q_rest, keys_l, keys_r, rest, weights_1, highest, sums, valid, bar, results, shape, limits,
    found, scale_log2, REST: gl.constexpr, CAUSAL: gl.constexpr, FENCE: gl.constexpr,
):  # fmt: skip
    acc0 = gl.zeros([64, 128], gl.float32, SUMS)
    acc1 = gl.zeros([64, 128], gl.float32, SUMS)
    m = gl.full([64], LOWEST, gl.float32, SCORE_ROWS)
    l = gl.zeros([64], gl.float32, SCORE_ROWS)
    mbarrier.wait(bar.index(QUERIES), 0)
    fence_async_shared()
    num_pairs, first = read_range(found, bar)
    limit = limits.load(SCORE_ROWS)
    phase = 0
    for i in range(num_pairs):
        zero = opaque_zero(i)
        s = gl.zeros([64, 64], gl.float32, SCORES)
        wait_for_keys(bar.index(READY_1R), phase, FENCE)
        keys = keys_r.index(zero + 1).permute((1, 0))
        s = warpgroup_mma(q.index(zero + 1), keys, s, use_acc=False, is_async=True)
        if REST > 0:
            s = warpgroup_mma(q_rest, rest.index(zero + 1).permute((1, 0)), s, is_async=True)
        wait_for_keys(bar.index(READY_1L), phase, FENCE)
        keys = keys_l.index(zero + 1).permute((1, 0))
        s = warpgroup_mma(q.index(zero), keys, s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.wait(bar.index(VALID_1), phase)
        mbarrier.wait(bar.index(MAX_0), phase)
        m_0 = highest.load(SCORE_ROWS)
        p, m_1 = softmax(s, valid.index(1), limit, first + i * 128 + 64, m_0, scale_log2, CAUSAL)
        highest.store(m_1)
        mbarrier.arrive(bar.index(MAX_1), count=1)
        factor = gl.exp2(m - m_1)
        m = m_1
        l = l * factor + gl.sum(p, 1)
        acc0 = shrink(acc0, factor)
        acc1 = shrink(acc1, factor)
        weights = to_bf16(p)
        own = gl.convert_layout(weights, gl.DotOperandLayout(0, SUMS, 2))
        values = keys_r.index(zero + 1)
        acc0 = warpgroup_mma(own, values.slice(0, 128, dim=1), acc0, is_async=True)
        acc1 = warpgroup_mma(own, values.slice(128, 128, dim=1), acc1, is_async=True)
        weights_1.store(weights)
        fence_async_shared()
        mbarrier.arrive(bar.index(WEIGHTS_1), count=1)
        mbarrier.wait(bar.index(WEIGHTS_0), phase)
        others = rest.index(zero)
        values = keys_r.index(zero)
        acc0 = warpgroup_mma(others, values.slice(0, 128, dim=1), acc0, is_async=True)
        acc1 = warpgroup_mma(others, values.slice(128, 128, dim=1), acc1, is_async=True)
        acc0, acc1 = warpgroup_mma_wait(2, deps=[acc0, acc1])
        mbarrier.arrive(bar.index(FREE_1R), count=1)
        acc0, acc1 = warpgroup_mma_wait(0, deps=[acc0, acc1])
        mbarrier.arrive(bar.index(FREE_0R), count=1)
        phase = phase ^ 1
    store_half(acc0, acc1, m, l, sums, bar, q, results, shape, 1)


@gluon.jit
def store_half(acc0, acc1, m, l, sums, bar, staging, results, shape, HALF: gl.constexpr):
    """Normalise half of the weighted values and store it; the left half's warps store the rest."""
    sums.index(HALF).store(l)
    mbarrier.arrive(bar.index(SUM), count=1)
    mbarrier.wait(bar.index(SUM), 0)
    l = l + sums.index(1 - HALF).load(SCORE_ROWS)
    begin, split, request, first = place(shape)
    token, head, real = heads_of(begin, shape, SCORE_ROWS)
    if HALF == 0:
        lse = results.lse + split.to(gl.int64) * results.lse_split + request * results.lse_request
        lse_rows = (first + token) * results.lse_token + head
        gl.store(lse + lse_rows, (m + gl.log2(l)) * LN2, mask=real)  # log2(0) is -inf
        if results.max_logits is not None:
            highest = gl.where(l == 0, float("-inf"), m * LN2)
            rows = request * results.max_logits_request + head
            gl.store(results.max_logits + rows, highest, mask=real)
    empty = l == 0
    if results.attn_sink is not None:
        sink = gl.load(results.attn_sink + head, mask=real, other=0.0)
        l += gl.exp2(sink * LOG2E - m)
    factor = gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, l))
    acc0 = shrink(acc0, factor)
    acc1 = shrink(acc1, factor)
    out = results.out + split.to(gl.int64) * results.out_split + request * results.out_request
    out += HALF * 256
    if results.out.dtype.element_ty == gl.bfloat16:
        # Through shared memory, so that a row is written in one piece.
        tile = staging.index(HALF)
        tile.slice(0, 128, dim=1).store(to_bf16(acc0))
        tile.slice(128, 128, dim=1).store(to_bf16(acc1))
        token, head, real = heads_of(begin, shape, gl.SliceLayout(1, STORE))
        rows = (first + token) * results.out_token + head * results.out_head
        dims = gl.arange(0, 256, gl.SliceLayout(0, STORE))
        gl.store(out + rows[:, None] + dims[None, :], tile.load(STORE), mask=real[:, None])
    else:
        token, head, real = heads_of(begin, shape, SUM_ROWS)
        rows = (first + token) * results.out_token + head * results.out_head
        dims = gl.arange(0, 128, gl.SliceLayout(0, SUMS))
        gl.store(out + rows[:, None] + dims[None, :], acc0, mask=real[:, None])
        gl.store(out + rows[:, None] + (128 + dims)[None, :], acc1, mask=real[:, None])


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
    at = block * 64 + gl.arange(0, 64, CODE_ROWS)
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
def find_blocks(main, extra, shape, limits, EXTRA: gl.constexpr, CAUSAL: gl.constexpr):
    """Where the keys are, where they end in each stream, and the blocks of the split.

    What cuts a list short for a split is an end too.
    """
    begin, split, request, token = place(shape)
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
def words_of_a_piece(L):
    """Codes are converted in pieces with one scale, of 128 or 64 dims: 32 or 16 words."""
    return 16 if L.scale_block == 64 or (L.fp8_dim % 128 == 64 and L.fp8_dim < 512) else 32


@gluon.jit
def load_half(
    rows, extra, slots, is_extra, L: gl.constexpr, EXTRA: gl.constexpr, HALF: gl.constexpr
):
    """Codes and scales of half a row, in pieces; of row 0 where there is no slot.

    Predicates would take registers.
    """
    PIECE: gl.constexpr = words_of_a_piece(L)
    STOP: gl.constexpr = min(L.fp8_dim, 512) // 4 if HALF == 1 else 64
    words = rows.words + word_offset(slots, extra, is_extra, L, EXTRA)[:, None]
    at = gl.zeros([64], gl.int64, CODE_ROWS)
    if L.scale_block > 0:
        at = scale_offset(slots, extra, is_extra, L, EXTRA)
    codes = ()
    scales = ()
    for word in gl.static_range(HALF * 64, STOP, PIECE):
        codes = codes + (gl.load(words + (word + gl.arange(0, PIECE, CODE_COLS))[None, :]),)
        scales = scales + (load_scale(rows, at, L, 4 * word),)
    if HALF == 1 and L.fp8_dim > 512:
        codes = codes + (gl.load(words + (128 + gl.arange(0, 16, CODE_COLS))[None, :]),)
        scales = scales + (load_scale(rows, at, L, 512),)
    return codes, scales


@gluon.jit
def load_scale(rows, at, L: gl.constexpr, DIM: gl.constexpr):
    """float32 scale of the block that the dim lies in."""
    if L.scale_block == 0:
        scale = gl.full([64], 1.0, gl.float32, CODE_ROWS)
    elif L.scale_bytes == 1:
        codes = rows.words.to(gl.pointer_type(gl.uint8), bitcast=True)
        code = gl.load(codes + at + DIM // L.scale_block).to(gl.int32)
        bits = gl.where(code == 0, 0x400000, code << 23)
        scale = gl.where(code == 255, float("nan"), bits.to(gl.float32, bitcast=True))
    elif rows.scales is None:
        scale = gl.load(rows.words + at + DIM // L.scale_block).to(gl.float32, bitcast=True)
    else:
        scale = gl.load(rows.scales + at + DIM // L.scale_block)
    return scale


@gluon.jit
def convert_piece(tile, slots, codes, scale, WORD: gl.constexpr):
    """Dequantised codes into the columns of a tile that start at the word ``WORD``."""
    # Both: NaN times 0 is NaN.
    codes = gl.where((slots >= 0)[:, None], codes, 0)
    scale = gl.where(slots >= 0, scale, 0.0)
    low, high = gl.inline_asm_elementwise(
        DEQUANTISE,
        "=&r,=&r,r,f",
        [codes, scale[:, None]],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )
    PIECE: gl.constexpr = 2 * codes.shape[1]
    words = gl.join(low, high).reshape([64, PIECE])
    tile.slice(WORD, PIECE, dim=1).store(words)


@gluon.jit
def convert_half(tile, rest, slots, codes, scales, L: gl.constexpr, HALF: gl.constexpr):
    """Dequantised codes of half a row, which :func:`load_half` loaded, into their tiles."""
    tile = reinterpret(tile, gl.int32, [64, 128], WORDS)
    PIECE: gl.constexpr = 2 * words_of_a_piece(L)
    WITH_REST: gl.constexpr = HALF == 1 and L.fp8_dim > 512
    PIECES: gl.constexpr = len(codes) - 1 if WITH_REST else len(codes)
    for i in gl.static_range(PIECES):
        convert_piece(tile, slots, codes[i], scales[i], i * PIECE)
    if WITH_REST:
        rest = reinterpret(rest, gl.int32, [64, 32], WORDS)
        convert_piece(rest, slots, codes[PIECES], scales[PIECES], 0)


@gluon.jit
def copy_tail(
    rows, extra, slots, is_extra, tile, rest, ready, L: gl.constexpr, EXTRA: gl.constexpr
):
    """The 64 dims that are kept as bfloat16, copied; the copies arrive at ``ready``."""
    slots = gl.convert_layout(slots, gl.SliceLayout(1, TAIL))
    at = 2 * word_offset(slots, extra, is_extra, L, EXTRA) + L.tail_at
    dims = gl.arange(0, 64, gl.SliceLayout(0, TAIL))
    if L.fp8_dim < 512:
        rest = tile.slice(L.fp8_dim - 256, 64, dim=1)
    tail = rows.words.to(gl.pointer_type(gl.bfloat16), bitcast=True)
    async_load(rest, tail + at[:, None] + dims[None, :], mask=(slots >= 0)[:, None])
    async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def produce(
    rows, main, extra, shape, keys_l, keys_r, rest, valid, bar, limits, found,
    BLOCK: gl.constexpr, L: gl.constexpr, EXTRA: gl.constexpr, PAGED: gl.constexpr,
    CAUSAL: gl.constexpr,
):  # fmt: skip
    """The even blocks, left half first, or the odd ones, right half first."""
    FREE_1ST: gl.constexpr = FREE_0L if BLOCK == 0 else FREE_1R
    FREE_2ND: gl.constexpr = FREE_0R if BLOCK == 0 else FREE_1L
    READY_1ST: gl.constexpr = READY_0L if BLOCK == 0 else READY_1R
    READY_2ND: gl.constexpr = READY_0R if BLOCK == 0 else READY_1L
    tile_l = keys_l.index(BLOCK)
    tile_r = keys_r.index(BLOCK)
    if BLOCK == 0:
        tile_1st = tile_l
        tile_2nd = tile_r
    else:
        tile_1st = tile_r
        tile_2nd = tile_l
    keys, ends, first, last = find_blocks(main, extra, shape, limits, EXTRA, CAUSAL)
    block = first + BLOCK
    slots = block_slots(keys, ends, main, extra, block, L, EXTRA, PAGED)
    codes, scales = load_half(rows, extra, slots, block >= ends[2], L, EXTRA, BLOCK)
    if BLOCK == 0:
        # While these are under way, how long the lists really are. At least one pair: a loop that
        # may be skipped makes the products wait for each other.
        last = used_blocks(keys, ends, main, extra, first, last, EXTRA, PAGED)
        store_range(found, bar, gl.maximum(gl.cdiv(last - first, 2), 1), first * 64)
    num_pairs, _ = read_range(found, bar)
    next_slots = block_slots(keys, ends, main, extra, block + 2, L, EXTRA, PAGED)
    phase = 1
    for _ in range(num_pairs):
        mbarrier.wait(bar.index(FREE_1ST), phase)
        valid.index(BLOCK).store((slots >= 0).to(gl.int8))
        mbarrier.arrive(bar.index(VALID_0 + BLOCK), count=1)
        is_extra = block >= ends[2]
        if BLOCK == 1 and L.tail_dim > 0:
            ready = bar.index(READY_1R)
            copy_tail(rows, extra, slots, is_extra, tile_r, rest.index(1), ready, L, EXTRA)
        convert_half(tile_1st, rest.index(BLOCK), slots, codes, scales, L, BLOCK)
        mbarrier.arrive(bar.index(READY_1ST), count=1)
        codes, scales = load_half(rows, extra, slots, is_extra, L, EXTRA, 1 - BLOCK)
        mbarrier.wait(bar.index(FREE_2ND), phase)
        if BLOCK == 0 and L.tail_dim > 0:
            ready = bar.index(READY_0R)
            copy_tail(rows, extra, slots, is_extra, tile_r, rest.index(0), ready, L, EXTRA)
        convert_half(tile_2nd, rest.index(BLOCK), slots, codes, scales, L, 1 - BLOCK)
        mbarrier.arrive(bar.index(READY_2ND), count=1)
        block += 2
        codes, scales = load_half(rows, extra, next_slots, block >= ends[2], L, EXTRA, BLOCK)
        slots = next_slots
        next_slots = block_slots(keys, ends, main, extra, block + 2, L, EXTRA, PAGED)
        phase = phase ^ 1


@gluon.constexpr_function
def arrivals(b, L):
    """Arrivals that a barrier waits for: the copies of every thread of a producer arrive alone."""
    if L.tail_dim > 0 and b in (READY_0R.value, READY_1R.value):
        return 129
    if b == QUERIES.value:
        return 128
    return 2 if b == SUM.value else 1


@gluon.jit
def _attend_fp8(
    q, q_request, q_token, q_head, rows, main, extra, results, shape, scale_log2,
    L: gl.constexpr, EXTRA: gl.constexpr, PAGED: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    """A tile of 64 rows of a group and a split of its keys."""
    REST: gl.constexpr = L.head_dim - 512
    q_tile = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    q_rest = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    keys_l = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    keys_r = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 256], TILE)
    rest = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE)
    weights_1 = gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE)
    highest = gl.allocate_shared_memory(gl.float32, [64], PLAIN)
    sums = gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN)
    valid = gl.allocate_shared_memory(gl.int8, [2, 64], PLAIN)
    limits = gl.allocate_shared_memory(gl.int32, [64], PLAIN)
    found = gl.allocate_shared_memory(gl.int32, [2, 1], PLAIN)
    bar = gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(NUM_BARRIERS):
        mbarrier.init(bar.index(b), count=arrivals(b, L))
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()  # as in kernels/common/early.py: all above needs nobody's results
    copy_queries(q_tile.index(0), q, q_request, q_token, q_head, shape, 0, 256)
    copy_queries(q_tile.index(1), q, q_request, q_token, q_head, shape, 256, 256)
    if REST > 0:
        copy_queries(q_rest, q, q_request, q_token, q_head, shape, 512, REST)
    async_copy.mbarrier_arrive(bar.index(QUERIES), increment_count=False)
    gl.warp_specialize(
        [
            (left, (q_tile, q_rest, keys_l, keys_r, rest, weights_1, highest, sums, valid, bar,
                    results, shape, limits, found, scale_log2, REST, CAUSAL, True)),
            (right, (q_tile, q_rest, keys_l, keys_r, rest, weights_1, highest, sums, valid, bar,
                     results, shape, limits, found, scale_log2, REST, CAUSAL, True)),
            (produce, (rows, main, extra, shape, keys_l, keys_r, rest, valid, bar, limits, found,
                       0, L, EXTRA, PAGED, CAUSAL)),
            (produce, (rows, main, extra, shape, keys_l, keys_r, rest, valid, bar, limits, found,
                       1, L, EXTRA, PAGED, CAUSAL)),
        ],
        [4, 4, 4],
        [192, 56, 56],
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
    _attend_fp8[(num_groups * num_tiles * shape.num_splits,)](
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
        num_warps=4,
        launch_pdl=True,
    )

"""Attention on Hopper with FP8 products, for 64 query rows that share their keys.

Both MMAs multiply the codes of an fp8_ds_mla cache as they are stored. A persistent CTA takes one
tile of 64 query rows after the other and walks its keys in pairs of blocks of 64. Of O, 64 x 512
float32, *left* accumulates the left 256 columns and *right* the right 256. Left computes S and P of
the even block of a pair, right of the odd one; each hands its P to the other through shared memory.

S. The first 512 dims of a query row are rounded to e4m3 with one power of two. A key has a scale
for each piece of 128 dims, so the products of the pieces are summed in Horner's form,
``((S0 s0/s1 + S1) s1/s2 + S2) s2/s3 + S3) s3``, in the registers of one. RoPE dims are bfloat16,
divided by the query row's power of two.

P. With z = S + log2(largest scale of the key), P = exp2(z - m) is at most 2^LAG. A piece of the
values takes P times its scale over the largest, rounded to e4m3, so P is stored once for each of
four pieces. A float16 whose value is divided by 256 has the bits of an e4m3 code in its upper byte,
shifted by one: the conversion is an integer multiply-add. m rises only when z exceeds it by LAG.

O. FP8 MMAs want both operands along the reduction, but values lie along their dims. So the MMA
computes the transpose, ``O^T += V^T P^T``, with V^T in registers. ``ldmatrix.trans`` loads pairs of
dims as if they were 16-bit numbers, and one byte permutation a register takes the pairs apart. The
order of keys in V^T and P^T is the one in which threads hold S, and nothing is exchanged.

Time line of a pair in cycles, at batch 128 and 128 heads; S' are the scores of the next pair:

    cycle     0                              2650                                        6050
    left      softmax of even S, P0 to right | O_l += P0 V0_l, O_l += P1 V1_l, each under S'
    right     wait m0; softmax, P1 to left   | O_r += P0 V0_r, O_r += P1 V1_r, each under S'
    producer  copies a block as soon as both warpgroups have loaded its values

Between the pieces of S', which wait for each other, a warpgroup loads and multiplies values: the
MMAs of both hide each other's latency. Accesses to shared memory take 2250 of the 3000 cycles of a
block, issue slots 1500, the tensor cores 1150.

Barriers:

    barrier     number      arrivals                       waits        guards
    Q_FULL      1           2, left and right              both         the tile's queries
    Q_EMPTY     1           2, both                        both         queries, for reuse
    KEY_RANGE   4 by turn   1, producer                    both         number of pairs of blocks
    KV_FULL     4 by block  128 copies' threads, and 1,    both         codes, RoPE dims and
                            the producer's stores                       factors of a block
    KV_EMPTY    4 by block  2, both                        producer     the stage, for reuse
    ROPE_EMPTY  2 by block  1, the block's scorer          producer     RoPE dims, for reuse
    M_FULL      2 by block  1, the block's scorer          the other    m after the block
    P_FULL      2 by block  1, the block's scorer          the other    P and alpha of the block
    P_EMPTY     2 by block  1, the other                   its scorer   P and alpha, for reuse
    SUMS        1           2, both                        both         l of both, at a tile's end

Shared memory in KiB: queries 32 + 8, codes 4 x 32, RoPE dims 2 x 8, P 2 x 16, factors 4 x 2: 224,
and 2 of the rest.
"""

from __future__ import annotations

from typing import NamedTuple

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
from sparsemla.kernels.attention.sm90.abi import KeyList, Queries, QueryRows, Results
from sparsemla.kernels.attention.sm90.fp8 import cache_rows, code_offsets, scale_offsets
from sparsemla.kernels.attention.sm90.tiles import (
    LN2,
    LOG2E,
    LOWEST,
    PLAIN,
    TILE,
    end_of_valid_blocks,
    find_key_blocks,
    load_block_slots,
    locate_tile,
    query_dims,
    rows_of_tile,
)
from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.gluon import async_load, opaque_zero, reinterpret

S8 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32]))
"""S ``[rows, keys]``, and O^T ``[dims, rows]``."""
S16 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
ROWS = gl.constexpr(gl.SliceLayout(1, S8))
COLUMNS = gl.constexpr(gl.SliceLayout(0, S8))
A8 = gl.constexpr(gl.DotOperandLayout(0, S8, 4))
A16 = gl.constexpr(gl.DotOperandLayout(0, S16, 2))
IN_WARP = gl.constexpr(gl.BlockedLayout([2], [32], [4], [0]))  # all 64 rows, in every warp
THREADS = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))

CODES = gl.constexpr(gl.NVMMASharedLayout(128, 8, 2))
P_TILE = gl.constexpr(gl.NVMMASharedLayout(64, 8, 2))

# Copies of 16 bytes a thread. A thread copies the same rows of codes and of RoPE dims.
COPY_CODES = gl.constexpr(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
COPY_ROPE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
COPY_KEYS = gl.constexpr(gl.SliceLayout(1, COPY_CODES))
ROPE_KEYS = gl.constexpr(gl.SliceLayout(1, COPY_ROPE))
LOAD_SCALES = gl.constexpr(gl.BlockedLayout([1, 4], [32, 1], [4, 1], [1, 0]))
SCALE_KEYS = gl.constexpr(gl.SliceLayout(1, LOAD_SCALES))

# A warp loads whole query rows.
LOAD_Q = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
LOAD_Q_ROPE = gl.constexpr(gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0]))

# Factors of keys lie in shared memory such that the four threads of a row load 64 adjacent bytes.
FACTORS_32 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1], [2], [16], [32]], [[4], [8], [0], [0], [0]], [[0], [0]], [], [64]
    )
)
FACTORS_16 = gl.constexpr(
    gl.DistributedLinearLayout(
        [[1], [2], [4], [32]], [[8], [16], [0], [0], [0]], [[0], [0]], [], [64]
    )
)

# O of 128 dims on its way out: pairs of dims of eight threads are 32 adjacent bytes of bfloat16.
STORE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [8, 0], [16, 0], [32, 0], [0, 16]],
        [[2, 0], [4, 0], [0, 2], [0, 4], [0, 8]],
        [[0, 32], [0, 64]],
        [],
        [64, 128],
    )
)

STAGES = gl.constexpr(4)
"""Blocks in flight, and tiles of which the producer may know the range."""
PREFETCH = gl.constexpr(4)
"""Blocks ahead of a copy whose rows are fetched into L2: memory takes longer than a block."""
LAG = gl.constexpr(4.0)
GAIN = gl.constexpr(16.0)
"""The e4m3 code of P = 1. 2^LAG times it is 256, the largest code that a float16 shares."""
SMALLEST = gl.constexpr(2.0**-40)
"""Scales count as at least this part of a key's largest, so that their quotients are finite."""

# Indices of the factors of a key in float32: three quotients and the last scale of Horner's form,
# the logarithm of the largest scale, and its inverse.
LAST_SCALE = gl.constexpr(3)
LOG_LARGEST = gl.constexpr(4)
INVERSE = gl.constexpr(5)

# Barriers.
KV_FULL = gl.constexpr(0)
KV_EMPTY = gl.constexpr(4)
KEY_RANGE = gl.constexpr(8)
ROPE_EMPTY = gl.constexpr(12)
M_FULL = gl.constexpr(14)
P_FULL = gl.constexpr(16)
P_EMPTY = gl.constexpr(18)
Q_FULL = gl.constexpr(20)
Q_EMPTY = gl.constexpr(21)
SUMS = gl.constexpr(22)
NUM_BARRIERS = gl.constexpr(23)


class SharedMemory(NamedTuple):
    """Shared memory of a CTA. ``m``, ``p`` and ``alpha`` are by the parity of a block."""

    q: object  # [64, 512] e4m3; left and right -> both
    q_rope: object  # [64, 64] bfloat16; left and right -> both
    q_scale: object  # [2, 32] float32; left and right -> both
    kv: object  # [4, 64, 512] e4m3 codes of blocks; producer -> both
    k_rope: object  # [2, 64, 64] bfloat16; producer -> the block's scorer
    factors: object  # 6 of [4, 64] float32, of a block's keys; producer -> its scorer
    weights: object  # 4 of [4, 64] float16, scales over the largest scale; the same
    p: object  # 4 of [2, 64, 64] e4m3, P of a piece; the block's scorer -> both
    alpha: object  # 2 of [64] float32, factors that rescale O; the same
    m: object  # 2 of [64] float32, m after a block; its scorer -> the other
    l: object  # [2, 64] float32, row sums of each warpgroup's blocks, at the end of a tile
    key_range: object  # [4, 1] by turn: number of pairs of blocks; producer -> both
    bar: object


@gluon.jit
def exp2(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def log2(x):
    return gl.inline_asm_elementwise(
        "lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def reciprocal(x):
    return gl.inline_asm_elementwise(
        "rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def to_f16(x):
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def weigh(p, weight):
    """e4m3 codes of ``256 * p * weight``, halves rounded up; p and weight are not negative."""
    return gl.inline_asm_elementwise(
        """{
            .reg .b32 a, b;
            mul.rn.f16x2 a, $1, $3; mul.rn.f16x2 b, $2, $4;
            mad.lo.u32 a, a, 2, 0x00800080; mad.lo.u32 b, b, 2, 0x00800080;
            prmt.b32 $0, a, b, 0x7531;
        }""",
        "=r,r,r,r,r",
        [p, weight],
        dtype=gl.uint8,
        is_pure=True,
        pack=4,
    )


@gluon.jit
def take_pairs_apart(low, high):
    """Codes of one dim each, from pairs of dims of the lower and the upper eight of 16 keys.

    Elements are ``[warp, half of 16 pairs, pair, 16 keys, quarter, key]``. The results are the
    first and second dim of pairs of the first half, then of the second half. In place of the half,
    a result's second axis tells the lower eight keys from the upper.
    """
    return gl.inline_asm_elementwise(
        """{
            prmt.b32 $0, $4, $6, 0x6420; prmt.b32 $1, $4, $6, 0x7531;
            prmt.b32 $2, $5, $7, 0x6420; prmt.b32 $3, $5, $7, 0x7531;
        }""",
        "=r,=r,=r,=r,r,r,r,r",
        [low, high],
        dtype=(gl.uint8, gl.uint8, gl.uint8, gl.uint8),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def load_values(smem, stage, PIECE: gl.constexpr):
    """V^T of a piece of 128 dims, as an A operand ``[128, 64]``.

    Row ``64 h + 16 w + 8 d + g`` is dim ``32 w + 16 h + 2 g + d``.
    """
    pairs = reinterpret(smem.kv, gl.int16, [STAGES, 64, 256], TILE)
    x = pairs.index(stage).slice(PIECE * 64, 64, dim=1).permute((1, 0)).load(A16)
    x = x.reshape(4, 2, 8, 4, 2, 4, 2).permute(0, 1, 2, 3, 5, 6, 4)
    low, high = gl.split(x)
    a, b, c, d = take_pairs_apart(low, high)
    x = gl.join(gl.join(a, b), gl.join(c, d))  # w, 8 keys, g, 16 keys, quarter, key, d, h
    x = x.permute(7, 0, 6, 2, 3, 4, 1, 5).reshape(128, 64)
    return gl.convert_layout(x, A8).to(gl.float8e4nv, bitcast=True)


@gluon.jit
def order_32(x):
    """A factor of 64 keys in the order of :data:`FACTORS_32`."""
    return x.reshape(4, 2, 4, 2).permute(0, 2, 1, 3).reshape(64)


@gluon.jit
def order_16(x):
    """A factor of 64 keys in the order of :data:`FACTORS_16`."""
    return x.reshape(2, 4, 4, 2).permute(0, 2, 1, 3).reshape(64)


@gluon.jit
def load_factor(smem, stage, FACTOR: gl.constexpr):
    """A factor of a block's keys, as a row."""
    x = smem.factors[FACTOR].index(stage).load(FACTORS_32)
    x = x.reshape(4, 4, 2, 2).permute(0, 2, 1, 3).reshape(64)
    return gl.convert_layout(x, COLUMNS)[None, :]


@gluon.jit
def load_weight(smem, stage, PIECE: gl.constexpr):
    """Scales of a piece of a block's keys over their largest scales, as a row."""
    x = smem.weights[PIECE].index(stage).load(FACTORS_16)
    x = x.reshape(2, 4, 4, 2).permute(0, 2, 1, 3).reshape(64)
    return gl.convert_layout(x, COLUMNS)[None, :]


@gluon.jit
def qk_mma(s, smem, zero, stage, PIECE: gl.constexpr):
    """Issue S += Q K^T of a piece of 128 dims."""
    q = smem.q.index(zero).slice(PIECE * 128, 128, dim=1)
    k = smem.kv.index(stage).slice(PIECE * 128, 128, dim=1).permute((1, 0))
    return warpgroup_mma(q, k, s, use_acc=PIECE > 0, is_async=True)


@gluon.jit
def qk_rope_mma(s, smem, parity):
    """Issue S += Q K^T of the RoPE dims."""
    k = smem.k_rope.index(parity).permute((1, 0))
    return warpgroup_mma(smem.q_rope, k, gl.convert_layout(s, S16), is_async=True)


@gluon.jit
def scores(smem, zero, step, PARITY: gl.constexpr):
    """S of a block, not multiplied by the rows' factors."""
    stage = step % STAGES
    s = gl.zeros([64, 64], gl.float32, S8)
    for c in gl.static_range(4):
        s = warpgroup_mma_wait(0, deps=[qk_mma(s, smem, zero, stage, c)])
        s = s * load_factor(smem, stage, c)
    s = warpgroup_mma_wait(0, deps=[qk_rope_mma(s, smem, PARITY)])
    return gl.convert_layout(s, S8)


@gluon.jit
def split_rows(x):
    """Rows whose number has bit 3 clear, and the others, as ``[4, 8, 64]``."""
    return gl.split(x.reshape(4, 2, 8, 64).permute(0, 2, 3, 1))


@gluon.jit
def store_p(smem, p, stage, PARITY: gl.constexpr):
    """Store P for each piece, keys in the order in which threads hold them."""
    for c in gl.static_range(4):
        p_all, weight = gl.broadcast(p, load_weight(smem, stage, c))
        p_0, p_1 = split_rows(p_all)
        w_0, w_1 = split_rows(weight)
        x = gl.join(weigh(p_0, w_0), weigh(p_1, w_1)).permute(0, 3, 1, 2)
        x = x.reshape(64, 2, 2, 2, 4, 2).permute(0, 1, 2, 4, 3, 5).reshape(64, 64)
        tile = smem.p[c]
        reinterpret(tile.index(PARITY), gl.uint8, [64, 64], P_TILE).store(x)


@gluon.jit
def rises(smem, PARITY: gl.constexpr):
    """Whether a block changes the factor of any row."""
    return gl.max((smem.alpha[PARITY].load(IN_WARP) != 1.0).to(gl.int32), 0) != 0


@gluon.jit
def rescale(acc, some, smem, PARITY: gl.constexpr):
    if some:
        acc *= smem.alpha[PARITY].load(COLUMNS)[None, :]
    return acc


@gluon.jit
def pv_mma(acc, values, smem, zero, PARITY: gl.constexpr, PIECE: gl.constexpr):
    """Issue O^T += V^T P^T of a piece of 128 dims."""
    tile = smem.p[PIECE]
    p = tile.index(PARITY + zero).permute((1, 0))
    return warpgroup_mma(values, p, acc, is_async=True)


@gluon.jit
def load_query_words(
    tile, queries, shape,
    START: gl.constexpr, DIM: gl.constexpr, HALF: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Load dims ``START .. START + DIM`` of a half of a tile's query rows, two in a register."""
    begin, _, request, token = locate_tile(tile, shape)
    row = begin + 32 * HALF + gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))
    q, request_stride, token_stride, head_stride = query_dims(queries, START)
    q += request * request_stride + token * token_stride
    words = q.to(gl.pointer_type(gl.int32), bitcast=True)
    dims = gl.arange(0, DIM // 2, gl.SliceLayout(0, LAYOUT))
    at = words + (row.to(gl.int64) * (head_stride // 2))[:, None] + dims[None, :]
    real = row < shape.num_rows
    return gl.load(at, mask=real[:, None], other=0)


@gluon.jit
def load_queries(tile, queries, shape, HALF: gl.constexpr):
    """Load a half of a tile's query rows: the dims to be rounded, and the RoPE dims."""
    x = load_query_words(tile, queries, shape, 0, 512, HALF, LOAD_Q)
    return x, load_query_words(tile, queries, shape, 512, 64, HALF, LOAD_Q_ROPE)


@gluon.jit
def unpack(words):
    """float32 numbers of both halves of words of two bfloat16."""
    low = (words << 16).to(gl.float32, bitcast=True)
    return low, (words & -65536).to(gl.float32, bitcast=True)


@gluon.jit
def store_queries(words, rope, smem, HALF: gl.constexpr):
    """Round query rows to e4m3, and store them with their scales.

    The scale of a row is the smallest power of two by which its largest number is at most 448.
    """
    low, high = unpack(words)
    largest = gl.max(gl.maximum(gl.abs(low), gl.abs(high)), 1)
    # The mantissa of 448 is 0x600000: larger ones need the next power of two.
    exponent = ((largest.to(gl.int32, bitcast=True) + 0x1FFFFF) >> 23) - 8
    exponent = gl.maximum(exponent, 127 - 40)
    scale = (exponent << 23).to(gl.float32, bitcast=True)
    inverse = ((254 - exponent) << 23).to(gl.float32, bitcast=True)
    scale = gl.where(largest < float("inf"), scale, float("nan"))
    x = gl.join(low * inverse[:, None], high * inverse[:, None]).reshape(32, 512)
    smem.q.index(0).slice(32 * HALF, 32, dim=0).store(x.to(gl.float8e4nv))
    smem.q_scale.index(HALF).store(scale)
    inverse = gl.convert_layout(inverse, gl.SliceLayout(1, LOAD_Q_ROPE))[:, None]  # moves nothing
    low, high = unpack(rope)
    x = gl.join(low * inverse, high * inverse).reshape(32, 64)
    smem.q_rope.slice(32 * HALF, 32, dim=0).store(x.to(gl.bfloat16))


@gluon.jit
def load_key_range(smem, turn):
    """The number of pairs of blocks of a tile, from the producer."""
    at = turn % STAGES
    mbarrier.wait(smem.bar.index(KEY_RANGE + at), turn // STAGES & 1)
    return gl.max(smem.key_range.index(at).load(THREADS), 0)


@gluon.jit
def consumer(num_tiles, queries, shape, results, smem, scale_log2, HALF: gl.constexpr):
    """Left (HALF 0) or right: S and P of every other block, and a half of O."""
    A: gl.constexpr = 2 * HALF
    B: gl.constexpr = 2 * HALF + 1
    OTHER: gl.constexpr = 1 - HALF
    step = HALF  # of the own block of the pair
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        turn = tile // gl.num_programs(0)
        q, q_rope = load_queries(tile, queries, shape, HALF)
        mbarrier.wait(smem.bar.index(Q_EMPTY), turn & 1 ^ 1)
        store_queries(q, q_rope, smem, HALF)
        fence_async_shared()
        mbarrier.arrive(smem.bar.index(Q_FULL), count=1)
        mbarrier.wait(smem.bar.index(Q_FULL), turn & 1)
        factor = reinterpret(smem.q_scale, gl.float32, [64], PLAIN).load(ROWS) * scale_log2
        num_pairs = load_key_range(smem, turn)
        zero = opaque_zero(tile)
        mbarrier.wait(smem.bar.index(KV_FULL + step % STAGES), step // STAGES & 1)
        s = scores(smem, zero, step, HALF)
        acc_a = gl.zeros([128, 64], gl.float32, S8)
        acc_b = gl.zeros([128, 64], gl.float32, S8)
        m = gl.full([64], LOWEST, gl.float32, ROWS)
        l = gl.zeros([64], gl.float32, ROWS)
        for i in range(num_pairs):
            zero = opaque_zero(i)
            phase = step // 2 & 1
            stage = step % STAGES
            mbarrier.arrive(smem.bar.index(ROPE_EMPTY + HALF), count=1)
            z = s * factor[:, None] + load_factor(smem, stage, LOG_LARGEST)
            top = gl.max(z, 1)
            before = m
            if HALF == 1:
                mbarrier.wait(smem.bar.index(M_FULL), phase)
                before = smem.m[0].load(ROWS)
            elif i > 0:
                mbarrier.wait(smem.bar.index(M_FULL + 1), phase ^ 1)
                before = smem.m[1].load(ROWS)
            m_new = gl.where(top > before + LAG, top, before)
            smem.m[HALF].store(m_new)
            mbarrier.arrive(smem.bar.index(M_FULL + HALF), count=1)
            alpha = exp2(before - m_new)
            l = l * exp2(m - m_new)
            m = m_new
            p = exp2(z - m[:, None])
            l += gl.sum(p * load_factor(smem, stage, INVERSE), 1)
            p = to_f16(p)
            mbarrier.wait(smem.bar.index(P_EMPTY + HALF), phase ^ 1)
            smem.alpha[HALF].store(alpha)
            store_p(smem, p, stage, HALF)
            fence_async_shared()
            mbarrier.arrive(smem.bar.index(P_FULL + HALF), count=1)

            # P V of both blocks under S of the next pair. After the last pair, these MMAs read
            # stale keys and nothing reads S.
            even = (step - HALF) % STAGES
            odd = (step + OTHER) % STAGES
            ahead = (step + 2) % STAGES
            if i + 1 < num_pairs:
                mbarrier.wait(smem.bar.index(KV_FULL + ahead), (step + 2) // STAGES & 1)
            s = qk_mma(gl.zeros([64, 64], gl.float32, S8), smem, zero, ahead, 0)
            if HALF == 1:
                mbarrier.wait(smem.bar.index(P_FULL), phase)
            some = rises(smem, 0)
            acc_a = rescale(acc_a, some, smem, 0)
            acc_b = rescale(acc_b, some, smem, 0)
            acc_a = pv_mma(acc_a, load_values(smem, even, A), smem, zero, 0, A)
            s = warpgroup_mma_wait(1, deps=[s]) * load_factor(smem, ahead, 0)
            s = qk_mma(s, smem, zero, ahead, 1)
            values = load_values(smem, even, B)
            acc_b = pv_mma(acc_b, values, smem, zero, 0, B)
            mbarrier.arrive(smem.bar.index(KV_EMPTY + even), count=1)
            if HALF == 0:
                mbarrier.wait(smem.bar.index(P_FULL + 1), phase)
            some = rises(smem, 1)
            s, acc_a = warpgroup_mma_wait(1, deps=[s, acc_a])
            s = qk_mma(s * load_factor(smem, ahead, 1), smem, zero, ahead, 2)
            acc_a = rescale(acc_a, some, smem, 1)
            acc_a = pv_mma(acc_a, load_values(smem, odd, A), smem, zero, 1, A)
            s, acc_b = warpgroup_mma_wait(1, deps=[s, acc_b])
            if HALF == 1:
                mbarrier.arrive(smem.bar.index(P_EMPTY), count=1)
            s = qk_mma(s * load_factor(smem, ahead, 2), smem, zero, ahead, 3)
            acc_b = rescale(acc_b, some, smem, 1)
            acc_b = pv_mma(acc_b, load_values(smem, odd, B), smem, zero, 1, B)
            mbarrier.arrive(smem.bar.index(KV_EMPTY + odd), count=1)
            s, acc_a = warpgroup_mma_wait(1, deps=[s, acc_a])
            s = qk_rope_mma(s * load_factor(smem, ahead, LAST_SCALE), smem, HALF)
            s, acc_b = warpgroup_mma_wait(0, deps=[s, acc_b])
            s = gl.convert_layout(s, S8)
            if HALF == 0:
                mbarrier.arrive(smem.bar.index(P_EMPTY + 1), count=1)
            step += 2
        mbarrier.arrive(smem.bar.index(Q_EMPTY), count=1)
        if HALF == 0:
            mbarrier.wait(smem.bar.index(M_FULL + 1), (step // 2 & 1) ^ 1)
            last = smem.m[1].load(ROWS)
            l = l * exp2(m - last)
            m = last
        store_out(tile, turn, acc_a, acc_b, m, l, results, shape, smem, HALF)


@gluon.jit
def store_out(tile, turn, acc_a, acc_b, m, l, results, shape, smem, HALF: gl.constexpr):
    """Normalise and store half of O; left stores lse, too."""
    smem.l.index(HALF).store(l)
    mbarrier.arrive(smem.bar.index(SUMS), count=1)
    mbarrier.wait(smem.bar.index(SUMS), turn & 1)
    begin, split, request, token = locate_tile(tile, shape)
    if HALF == 0:
        l += smem.l.index(1).load(ROWS)
        _, head, real = rows_of_tile(begin, shape, ROWS, False)
        lse = results.lse + split.to(gl.int64) * results.lse_split + request * results.lse_request
        at = lse + token * results.lse_token + head
        gl.store(at, (m + gl.log2(l)) * LN2, mask=real)  # log2(0) is -inf
    l = smem.l.index(0).load(COLUMNS) + smem.l.index(1).load(COLUMNS)
    empty = l == 0
    if results.attn_sink is not None:
        _, head, real = rows_of_tile(begin, shape, COLUMNS, False)
        sink = gl.load(results.attn_sink + head, mask=real, other=0.0)
        l += gl.exp2(sink * LOG2E - smem.m[1].load(COLUMNS))
    inv_l = gl.where(empty, 0.0, (1.0 / GAIN) / gl.where(empty, 1.0, l))
    out = results.out + split.to(gl.int64) * results.out_split
    out += request * results.out_request + token * results.out_token + HALF * 256
    store_columns(acc_a, inv_l, out, begin, results, shape)
    store_columns(acc_b, inv_l, out + 128, begin, results, shape)


@gluon.jit
def store_columns(acc, inv_l, out, begin, results, shape):
    """Store 128 columns of O, from the rows of O^T in the order of :func:`load_values`."""
    x = (acc * inv_l[None, :]).to(results.out.dtype.element_ty)
    x = x.reshape(2, 4, 2, 8, 64).permute(4, 1, 0, 3, 2).reshape(64, 128)
    x = gl.convert_layout(x, STORE)  # moves nothing
    _, head, real = rows_of_tile(begin, shape, gl.SliceLayout(1, STORE), False)
    dims = gl.arange(0, 128, gl.SliceLayout(0, STORE))
    at = out + (head * results.out_head)[:, None] + dims[None, :]
    gl.store(at, x, mask=real[:, None])


@gluon.jit
def store_factors(scales, valid, stage, smem):
    """Store what a block's keys multiply: S, P and the sums of P. An invalid key's P is 0."""
    even, odd = gl.split(scales.reshape(64, 2, 2))
    s0, s2 = gl.split(even)
    s1, s3 = gl.split(odd)
    largest = gl.maximum(gl.maximum(s0, s1), gl.maximum(s2, s3))
    least = largest * SMALLEST
    s0 = gl.where(s0 < least, least, s0)
    s1 = gl.where(s1 < least, least, s1)
    s2 = gl.where(s2 < least, least, s2)
    s3 = gl.where(s3 < least, least, s3)
    inverse = reciprocal(largest)
    valid = gl.convert_layout(valid, largest.type.layout)  # moves nothing
    log = gl.where(valid, log2(largest), float("-inf"))
    smem.factors[0].index(stage).store(order_32(s0 * reciprocal(s1)))
    smem.factors[1].index(stage).store(order_32(s1 * reciprocal(s2)))
    smem.factors[2].index(stage).store(order_32(s2 * reciprocal(s3)))
    smem.factors[LAST_SCALE].index(stage).store(order_32(s3))
    smem.factors[LOG_LARGEST].index(stage).store(order_32(log))
    smem.factors[INVERSE].index(stage).store(order_32(inverse))
    inverse *= GAIN / 256
    smem.weights[0].index(stage).store(order_16((s0 * inverse).to(gl.float16)))
    smem.weights[1].index(stage).store(order_16((s1 * inverse).to(gl.float16)))
    smem.weights[2].index(stage).store(order_16((s2 * inverse).to(gl.float16)))
    smem.weights[3].index(stage).store(order_16((s3 * inverse).to(gl.float16)))


@gluon.jit
def load_scales(slots, rows, L: gl.constexpr):
    """The four scales of each key of a block; 1 without a key."""
    four = gl.arange(0, 4, gl.SliceLayout(0, LOAD_SCALES))
    scales = rows.words.to(gl.pointer_type(gl.float32), bitcast=True)
    at = scales + scale_offsets(slots, L)[:, None] + four[None, :]
    return gl.load(at, mask=(slots >= 0)[:, None], other=1.0)


@gluon.jit
def prefetch_rows(slots, rows, L: gl.constexpr):
    """Prefetch the rows of a block into L2, one thread a row."""
    gl.inline_asm_elementwise(
        """{
            .reg .pred some; setp.ge.s32 some, $2, 0; mov.b32 $0, 0;
            @some cp.async.bulk.prefetch.L2.global [$1], 656;
        }""",
        "=r,l,r",
        [(rows.words + code_offsets(slots, L)).to(gl.int64), slots],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def copy_block(step, slots, rows, smem, L: gl.constexpr):
    """Copy a block of keys, each part once its stage is empty. Without a key, codes are zeros."""
    stage = step % STAGES
    valid = (slots >= 0)[:, None]
    codes = rows.words.to(gl.pointer_type(gl.uint8), bitcast=True) + 4 * code_offsets(slots, L)
    dims = gl.arange(0, 512, gl.SliceLayout(0, COPY_CODES))
    mbarrier.wait(smem.bar.index(KV_EMPTY + stage), step // STAGES & 1 ^ 1)
    to = reinterpret(smem.kv.index(stage), gl.uint8, [64, 512], CODES)
    async_load(to, codes[:, None] + dims[None, :], mask=valid)
    mbarrier.wait(smem.bar.index(ROPE_EMPTY + step % 2), step // 2 & 1 ^ 1)
    tail = gl.convert_layout(codes, ROPE_KEYS).to(gl.pointer_type(gl.bfloat16), bitcast=True)
    valid = (gl.convert_layout(slots, ROPE_KEYS) >= 0)[:, None]
    dims = L.tail_at + gl.arange(0, 64, gl.SliceLayout(0, COPY_ROPE))
    async_load(smem.k_rope.index(step % 2), tail[:, None] + dims[None, :], mask=valid)
    async_copy.mbarrier_arrive(smem.bar.index(KV_FULL + stage), increment_count=False)


@gluon.jit
def producer(num_tiles, rows, main, shape, smem, L: gl.constexpr):
    """The producer warpgroup: it copies keys.

    What it loads into registers is loaded a block ahead, so that no copy waits for memory: the
    slots of a block, its scales, and the slots of the block whose rows are prefetched.
    """
    step = 0
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        blocks = find_key_blocks(tile, main, None, shape, None, None, False)
        block = blocks.first
        slots = load_block_slots(blocks, block, main, None, L, None, False, COPY_KEYS)
        own = load_block_slots(blocks, block, main, None, L, None, False, SCALE_KEYS)
        later = load_block_slots(blocks, block + 1, main, None, L, None, False, SCALE_KEYS)
        early = load_block_slots(blocks, block + PREFETCH, main, None, L, None, False, SCALE_KEYS)
        scales = load_scales(own, rows, L)
        # The end of the valid slots is found during the copy of the first pair.
        num_blocks = 2
        i = 0
        while i < num_blocks:
            following = load_block_slots(blocks, block + 1, main, None, L, None, False, COPY_KEYS)
            later_scales = load_scales(later, rows, L)
            prefetch_rows(early, rows, L)
            ahead = block + PREFETCH + 1
            early = load_block_slots(blocks, ahead, main, None, L, None, False, SCALE_KEYS)
            copy_block(step, slots, rows, smem, L)
            store_factors(scales, own >= 0, step % STAGES, smem)
            mbarrier.arrive(smem.bar.index(KV_FULL + step % STAGES), count=1)
            if i == 1:
                last = end_of_valid_blocks(blocks, main, None, None, False)
                num_blocks = gl.maximum(gl.cdiv(last - blocks.first, 2), 1) * 2
                at = tile // gl.num_programs(0) % STAGES
                smem.key_range.index(at).store(gl.zeros([1], gl.int32, THREADS) + num_blocks // 2)
                mbarrier.arrive(smem.bar.index(KEY_RANGE + at), count=1)
            i += 1
            block += 1
            step += 1
            slots = following
            own = later
            scales = later_scales
            later = load_block_slots(blocks, block + 1, main, None, L, None, False, SCALE_KEYS)


@gluon.constexpr_function
def arrivals(b):
    """Number of arrivals of a barrier's phase."""
    if b < KV_EMPTY.value:
        return 129
    return 2 if b < KEY_RANGE.value or b >= Q_FULL.value else 1


@gluon.jit
def _attend_products(
    num_tiles, queries, rows, main, results, shape, scale_log2, L: gl.constexpr
):  # fmt: skip
    """Attention of tiles of 64 query rows of a group over a split of their keys."""
    smem = SharedMemory(
        q=gl.allocate_shared_memory(gl.float8e4nv, [1, 64, 512], CODES),
        q_rope=gl.allocate_shared_memory(gl.bfloat16, [64, 64], TILE),
        q_scale=gl.allocate_shared_memory(gl.float32, [2, 32], PLAIN),
        kv=gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 64, 512], CODES),
        k_rope=gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], TILE),
        # One tensor each: the compiler puts a barrier between two stores to the same one.
        factors=(
            gl.allocate_shared_memory(gl.float32, [STAGES, 64], PLAIN),
            gl.allocate_shared_memory(gl.float32, [STAGES, 64], PLAIN),
            gl.allocate_shared_memory(gl.float32, [STAGES, 64], PLAIN),
            gl.allocate_shared_memory(gl.float32, [STAGES, 64], PLAIN),
            gl.allocate_shared_memory(gl.float32, [STAGES, 64], PLAIN),
            gl.allocate_shared_memory(gl.float32, [STAGES, 64], PLAIN),
        ),
        weights=(
            gl.allocate_shared_memory(gl.float16, [STAGES, 64], PLAIN),
            gl.allocate_shared_memory(gl.float16, [STAGES, 64], PLAIN),
            gl.allocate_shared_memory(gl.float16, [STAGES, 64], PLAIN),
            gl.allocate_shared_memory(gl.float16, [STAGES, 64], PLAIN),
        ),
        p=(
            gl.allocate_shared_memory(gl.float8e4nv, [2, 64, 64], P_TILE),
            gl.allocate_shared_memory(gl.float8e4nv, [2, 64, 64], P_TILE),
            gl.allocate_shared_memory(gl.float8e4nv, [2, 64, 64], P_TILE),
            gl.allocate_shared_memory(gl.float8e4nv, [2, 64, 64], P_TILE),
        ),
        alpha=(
            gl.allocate_shared_memory(gl.float32, [64], PLAIN),
            gl.allocate_shared_memory(gl.float32, [64], PLAIN),
        ),
        m=(
            gl.allocate_shared_memory(gl.float32, [64], PLAIN),
            gl.allocate_shared_memory(gl.float32, [64], PLAIN),
        ),
        l=gl.allocate_shared_memory(gl.float32, [2, 64], PLAIN),
        key_range=gl.allocate_shared_memory(gl.int32, [STAGES, 1], PLAIN),
        bar=gl.allocate_shared_memory(gl.int64, [NUM_BARRIERS, 1], mbarrier.MBarrierLayout()),
    )
    for b in gl.static_range(NUM_BARRIERS):
        mbarrier.init(smem.bar.index(b), count=arrivals(b))
    fence_async_shared()
    gdc_launch_dependents()
    gdc_wait()  # the prologue above reads nothing that an earlier kernel writes
    gl.warp_specialize(
        [
            (consumer, (num_tiles, queries, shape, results, smem, scale_log2, 0)),
            (consumer, (num_tiles, queries, shape, results, smem, scale_log2, 1)),
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
    """Launch over the heads of ``num_groups`` tokens, with the rows that their lists select."""
    num_tiles = num_groups * -(-shape.num_rows // 64) * shape.num_splits
    rows, layout = cache_rows(cache)
    _attend_products[(min(num_tiles, num_multiprocessors(queries.q.device)),)](
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

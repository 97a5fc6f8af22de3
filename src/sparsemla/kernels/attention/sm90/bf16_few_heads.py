"""Sparse attention on SM90 over a bfloat16 cache, for up to 32 query rows that share keys.

A CTA attends to one split of the keys of one group of query rows: the heads of a token. Both MMAs
are transposed (swap-AB), ``S^T = K Q^T`` and ``O^T = V^T P^T``. Keys and value dims lie on M; the
rows lie on N, padded to 16 or 32; on M they would be padded to 64. The cache serves as K and V at
once: the QK MMA reads a tile as [keys, dims], the PV MMA reads the same bytes transposed.

Two consumer warpgroups take alternate tiles of 64 keys. Each has its own m, l and O, so nothing
orders them in the loop: the softmax of one runs under the MMAs of the other. After the last tile
they merge, as two splits would. A producer warpgroup copies rows of the cache to shared memory with
cp.async, straight into the swizzled layout that the MMAs read. Each consumer has a stage of its
own, and a tile arrives in three pieces: RoPE dims, dims 0 to 255 (left) and dims 256 to 511
(right). The QK MMA begins with the first piece, and the producer refills a piece as soon as the
last MMA that reads it is done. Tiles of a second stream follow those of the first::

    producer     rope, left, right of i+1 | rope, left, right of i+2 | rope, left, right of i+3
    consumer 0   QK i   softmax i   PV i    QK i+2   softmax i+2   PV i+2
    consumer 1          QK i+1   softmax i+1   PV i+1   QK i+3   softmax i+3   PV i+3

Barriers:

    barrier  number  arrivals                 waits         guards
    full     2 x 3   128 copies' threads      the consumer  a piece of the consumer's stage
    empty    2 x 3   1, the consumer, after   the producer  the same piece: RoPE dims after the QK
                     its last MMA of it                     MMA, others after the PV MMA
    merge    2       2, each consumer         both          [0] m and l of both, and the end of all
                                              consumers     MMAs; [1] O of both

Shared memory for 16 (32) rows, KiB: K and V 128, RoPE dims 16, Q 18 (36), P 4 (8); 167 (190) in
all. O takes 64 (128) registers of a consumer's thread.
"""

from __future__ import annotations

from typing import NamedTuple

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
from sparsemla.kernels.attention.arguments import (
    SparseAttention,
    SparseDecode,
    SparsePrefill,
)
from sparsemla.kernels.attention.sm90 import arguments
from sparsemla.kernels.attention.sm90.arguments import (
    KeyList,
    Queries,
    QueryRows,
    Results,
)
from sparsemla.kernels.attention.sm90.layouts import (
    LIST,
    LOAD_ROWS,
    PLAIN,
)
from sparsemla.kernels.attention.sm90.swap_ab import (
    KeyRange,
    find_keys,
    load_entries,
    load_queries,
    sum_key_pairs,
)
from sparsemla.kernels.attention.sm90.tiles import (
    LN2,
    LOG2E,
    LOWEST,
    group_of_program,
    is_slot,
    locate,
    rows_of_group,
    to_bf16,
)
from sparsemla.kernels.common.gluon import async_load, opaque_zero, reinterpret
from sparsemla.kernels.common.hopper import COPY, TILE
from sparsemla.kernels.common.paged import cache_arguments

KEYS = gl.constexpr(64)
"""Keys of a tile."""

# A stage's barriers: one for each piece of a tile.
PIECES = gl.constexpr(3)
ROPE = gl.constexpr(0)
LEFT = gl.constexpr(1)
RIGHT = gl.constexpr(2)

OUT = gl.constexpr(gl.BlockedLayout([4, 1], [32, 1], [1, 4], [0, 1]))
OUT_SHARED = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [0, 1]))


class SharedMemory(NamedTuple):
    """Shared memory of a CTA with ``N`` padded rows, and its barriers (table above)."""

    q: gl.shared_memory_descriptor
    """bfloat16 [2, N, 256]: halves of dims 0 to 511. Stored by all, read by QK MMAs."""
    q_rope: gl.shared_memory_descriptor
    """bfloat16 [1, N, 64]: dims 512 to 575."""
    kv: gl.shared_memory_descriptor
    """bfloat16 [2 x 2, KEYS, 256]: both halves of each stage. From the producer, to all MMAs."""
    p: gl.shared_memory_descriptor
    """bfloat16 [2, KEYS, N]: P of each consumer, for its PV MMA."""
    k_rope: gl.shared_memory_descriptor
    """bfloat16 [2, KEYS, 64]: RoPE dims of each stage. From the producer, to QK MMAs."""
    ml: gl.shared_memory_descriptor
    """float32 [2 x 2, N]: m of both consumers, then l of both, for the merge."""
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    merge: gl.shared_memory_descriptor


class GroupResults(NamedTuple):
    """:class:`Results` with pointers to the split and to the first token of the group."""

    out: Tensor
    out_token: int
    out_head: int
    lse: Tensor
    lse_token: int
    max_logits: Tensor | None
    max_logits_start: int
    attn_sink: Tensor | None


@gluon.jit
def copy_piece(source, valid, to, memory, bar, phase, START: gl.constexpr, WIDTH: gl.constexpr):
    """Copy dims ``START .. START + WIDTH`` of a tile once the piece is empty; 0 for no slot."""
    full = memory.full.index(bar)
    empty = memory.empty.index(bar)
    mbarrier.wait(empty, phase)
    dim = START + gl.arange(0, WIDTH, gl.SliceLayout(0, COPY))
    async_load(to, source + dim[None, :], mask=valid)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def copy_tiles(keys, first_tile, memory, L: gl.constexpr):
    """Copy each tile of a stream to the stage of its consumer."""
    at = keys.begin + gl.arange(0, KEYS, gl.SliceLayout(1, COPY))
    next_slots = load_entries(keys.entries, at, keys.end, L, False)
    for i in range(keys.num_tiles):
        slots = next_slots
        at += KEYS
        next_slots = load_entries(keys.entries, at, keys.end, L, False)
        valid = is_slot(slots, keys.rows.num_slots)
        page, row = locate(gl.where(valid, slots, 0), L)
        source = keys.rows.bf16 + (page * L.bf16_strides[0] + row * L.bf16_strides[1])[:, None]
        valid = valid[:, None]
        stage = (first_tile + i) % 2
        phase = (first_tile + i) // 2 & 1 ^ 1
        bar = PIECES * stage
        if L.head_dim > 512:
            to = memory.k_rope.index(stage)
            copy_piece(source, valid, to, memory, bar + ROPE, phase, 512, WIDTH=64)
        for half in gl.static_range(2):
            to = memory.kv.index(2 * stage + half)
            copy_piece(source, valid, to, memory, bar + LEFT + half, phase, 256 * half, WIDTH=256)


@gluon.jit
def producer(keys, extra_keys, memory, L: gl.constexpr, EXTRA: gl.constexpr):
    """The producer warpgroup: copy the tiles of both streams, one after the other."""
    copy_tiles(keys, 0, memory, L)
    if EXTRA is not None:
        copy_tiles(extra_keys, keys.num_tiles, memory, EXTRA)


@gluon.jit
def wait_for_copies(full, phase):
    """Wait for a piece, and make its cp.async writes visible to wgmma."""
    mbarrier.wait(full, phase)
    fence_async_shared()


@gluon.jit
def qk_mma(
    memory,
    phase,
    zero,
    N: gl.constexpr,
    CONSUMER: gl.constexpr,
    ROPE_DIMS: gl.constexpr,
    ACC: gl.constexpr,
):
    """S of a tile, ``[KEYS, N]``, piece by piece as they arrive."""
    BAR: gl.constexpr = PIECES * CONSUMER
    s = gl.zeros([KEYS, N], gl.float32, ACC)
    if ROPE_DIMS:
        wait_for_copies(memory.full.index(BAR + ROPE), phase)
        q = memory.q_rope.index(zero).permute((1, 0))
        s = warpgroup_mma(memory.k_rope.index(CONSUMER + zero), q, s, use_acc=False, is_async=True)
    for half in gl.static_range(2):
        wait_for_copies(memory.full.index(BAR + LEFT + half), phase)
        q = memory.q.index(zero + half).permute((1, 0))
        k = memory.kv.index(2 * CONSUMER + half + zero)
        s = warpgroup_mma(k, q, s, use_acc=ROPE_DIMS or half > 0, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    if ROPE_DIMS:
        mbarrier.arrive(memory.empty.index(BAR + ROPE), count=1)
    return s


@gluon.jit
def softmax_step(s, seen, m, l, p_shared):
    """Online softmax of a tile: store P; return the new m and l, and the factor that rescales O."""
    s = gl.where(seen, s, float("-inf"))
    new_m = gl.maximum(m, gl.max(s, 0))
    rescale = gl.exp2(m - new_m)
    p = gl.exp2(s - new_m[None, :])
    p_shared.store(to_bf16(p))
    fence_async_shared()
    l *= gl.convert_layout(rescale, gl.SliceLayout(0, l.type.layout))[None, :]
    return new_m, l + sum_key_pairs(p), rescale[None, :]


@gluon.jit
def pv_mma(acc_left, acc_right, memory, zero, CONSUMER: gl.constexpr):
    """Add a tile's ``V^T P^T`` to both halves of O, and release the halves of V."""
    p = memory.p.index(CONSUMER + zero)
    v_left = memory.kv.index(2 * CONSUMER + zero).permute((1, 0))
    acc_left = warpgroup_mma(v_left, p, acc_left, is_async=True)
    v_right = memory.kv.index(2 * CONSUMER + 1 + zero).permute((1, 0))
    acc_right = warpgroup_mma(v_right, p, acc_right, is_async=True)
    acc_left, acc_right = warpgroup_mma_wait(1, deps=[acc_left, acc_right])
    mbarrier.arrive(memory.empty.index(PIECES * CONSUMER + LEFT), count=1)
    acc_left, acc_right = warpgroup_mma_wait(0, deps=[acc_left, acc_right])
    mbarrier.arrive(memory.empty.index(PIECES * CONSUMER + RIGHT), count=1)
    return acc_left, acc_right


@gluon.jit
def attend(
    keys,
    first_tile,
    state,
    scale_log2,
    memory,
    L: gl.constexpr,
    N: gl.constexpr,
    CONSUMER: gl.constexpr,
    ACC: gl.constexpr,
):
    """m, l and both halves of O after every second tile of a stream.

    Tiles are counted over both streams, ``first_tile`` before this one; those of the other parity
    are the other consumer's.
    """
    m, l, acc_left, acc_right = state
    own = (first_tile + CONSUMER) % 2
    at = keys.begin + own * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, ACC))
    slots = load_entries(keys.entries, at, keys.end, L, False)
    for i in range(own, keys.num_tiles, 2):
        zero = opaque_zero(i)
        seen = is_slot(slots, keys.rows.num_slots)[:, None]
        at += 2 * KEYS
        slots = load_entries(keys.entries, at, keys.end, L, False)
        phase = (first_tile + i) // 2 & 1
        s = qk_mma(memory, phase, zero, N, CONSUMER, L.head_dim > 512, ACC)
        m, l, rescale = softmax_step(s * scale_log2, seen, m, l, memory.p.index(CONSUMER + zero))
        acc_left, acc_right = pv_mma(
            acc_left * rescale, acc_right * rescale, memory, zero, CONSUMER
        )
    return m, l, acc_left, acc_right


@gluon.jit
def meet(barrier):
    """Wait until both consumers are here."""
    mbarrier.arrive(barrier, count=1)
    mbarrier.wait(barrier, 0)


@gluon.jit
def consumer(
    keys,
    extra_keys,
    scale_log2,
    memory,
    results,
    shape,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    N: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """One of two consumer warpgroups: attend to every second tile, then merge with the other."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, ACC)
    m = gl.full([N], LOWEST, gl.float32, gl.SliceLayout(0, ACC))
    l = sum_key_pairs(gl.zeros([KEYS, N], gl.float32, ACC))
    acc_left = gl.zeros([256, N], gl.float32, ACC)
    acc_right = gl.zeros([256, N], gl.float32, ACC)
    state = (m, l, acc_left, acc_right)
    state = attend(keys, 0, state, scale_log2, memory, L, N, CONSUMER, ACC)
    if EXTRA is not None:
        state = attend(
            extra_keys, keys.num_tiles, state, scale_log2, memory, EXTRA, N, CONSUMER, ACC
        )
    m, l, acc_left, acc_right = state

    memory.ml.index(CONSUMER).store(m)
    memory.ml.index(2 + CONSUMER).store(gl.sum(l, 0))
    meet(memory.merge.index(0))
    m0 = memory.ml.index(0).load(ROW)
    m1 = memory.ml.index(1).load(ROW)
    merged_m = gl.maximum(m0, m1)
    merged_l = memory.ml.index(2).load(ROW) * gl.exp2(m0 - merged_m)
    merged_l += memory.ml.index(3).load(ROW) * gl.exp2(m1 - merged_m)
    empty_row = merged_l == 0
    token, head, real = rows_of_group(shape, N, ROW)
    if CONSUMER == 0:
        lse = (merged_m + gl.log2(merged_l)) * LN2  # log2(0) is -inf
        gl.store(results.lse + token * results.lse_token + head, lse, mask=real)
        if results.max_logits is not None:
            logits = gl.where(empty_row, float("-inf"), merged_m * LN2)
            gl.store(results.max_logits + results.max_logits_start + head, logits, mask=real)
    if results.attn_sink is not None:
        sink = gl.load(results.attn_sink + head, mask=real, other=0.0)
        merged_l += gl.exp2(sink * LOG2E - merged_m)
    rescale = gl.exp2(m - merged_m) / gl.where(empty_row, 1.0, merged_l)
    rescale = gl.where(empty_row, 0.0, rescale)[None, :]

    # All MMAs are done, so O of both consumers may overwrite K and V. Triton 3.8 wants the whole
    # tile to be reinterpreted.
    out_shared = reinterpret(memory.kv, gl.float32, [128 // N, 256, N], OUT_SHARED)
    acc_left *= rescale
    acc_right *= rescale
    out_shared.index(2 * CONSUMER).store(acc_left)
    out_shared.index(2 * CONSUMER + 1).store(acc_right)
    meet(memory.merge.index(1))
    out = out_shared.index(CONSUMER).load(OUT) + out_shared.index(2 + CONSUMER).load(OUT)
    token, head, real = rows_of_group(shape, N, gl.SliceLayout(0, OUT))
    at = token * results.out_token + head * results.out_head
    dim = CONSUMER * 256 + gl.arange(0, 256, gl.SliceLayout(1, OUT))
    to = results.out + at[None, :] + dim[:, None]
    gl.store(to, out.to(results.out.dtype.element_ty), mask=real[None, :])


@gluon.jit
def allocate(N: gl.constexpr):
    """Shared memory of a CTA, with barriers initialised."""
    q = gl.allocate_shared_memory(gl.bfloat16, [2, N, 256], TILE)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, N, 64], TILE)
    kv = gl.allocate_shared_memory(gl.bfloat16, [4, KEYS, 256], TILE)
    p = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, N], gl.NVMMASharedLayout(2 * N, 16, 2))
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, 64], TILE)
    ml = gl.allocate_shared_memory(gl.float32, [4, N], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    merge = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(6):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(merge.index(0), count=2)
    mbarrier.init(merge.index(1), count=2)
    return SharedMemory(q, q_rope, kv, p, k_rope, ml, full, empty, merge)


@gluon.jit
def _attend_few_heads(
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
    N: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """All rows of a group, and one split of the keys of both streams."""
    memory = allocate(N)
    gdc_launch_dependents()
    gdc_wait()  # the prologue above reads nothing that an earlier kernel writes

    low = load_queries(queries, shape, 0, 256, N, LOAD_ROWS)
    high = load_queries(queries, shape, 256, 256, N, LOAD_ROWS)
    if L.head_dim > 512:
        rope = load_queries(queries, shape, 512, 64, N, LOAD_ROWS)

    entries, end = find_keys(stream, shape, LIST, False)
    all_tiles = gl.cdiv(end, KEYS)
    all_extra = 0
    if EXTRA is not None:
        extra_entries, extra_end = find_keys(extra, shape, LIST, False)
        all_extra = gl.cdiv(extra_end, KEYS)
    # The main stream's tiles come first, then the extra stream's.
    split, request, first = group_of_program(shape)
    tiles_per_split = gl.cdiv(all_tiles + all_extra, shape.num_splits)
    first_tile = split.to(gl.int32) * tiles_per_split
    begin = gl.minimum(first_tile, all_tiles)
    num_tiles = gl.minimum(begin + tiles_per_split, all_tiles) - begin

    out = results.out + split * results.out_split
    lse = results.lse + split * results.lse_split
    group_results = GroupResults(
        out=out + request * results.out_request + first * results.out_token,
        out_token=results.out_token,
        out_head=results.out_head,
        lse=lse + request * results.lse_request + first * results.lse_token,
        lse_token=results.lse_token,
        max_logits=results.max_logits,
        max_logits_start=request * results.max_logits_request,
        attn_sink=results.attn_sink,
    )

    memory.q.index(0).store(low)
    memory.q.index(1).store(high)
    if L.head_dim > 512:
        memory.q_rope.index(0).store(rope)
    fence_async_shared()
    keys = KeyRange(rows, entries, begin * KEYS, end, num_tiles)
    extra_keys = keys
    if EXTRA is not None:
        behind = first_tile + tiles_per_split
        extra_begin = gl.minimum(gl.maximum(first_tile - all_tiles, 0), all_extra)
        extra_tiles = gl.minimum(gl.maximum(behind - all_tiles, 0), all_extra) - extra_begin
        extra_begin *= KEYS
        extra_keys = KeyRange(extra_rows, extra_entries, extra_begin, extra_end, extra_tiles)
    gl.warp_specialize(
        [
            (consumer, (keys, extra_keys, scale_log2, memory, group_results, shape, L, EXTRA, N,
                        0)),
            (consumer, (keys, extra_keys, scale_log2, memory, group_results, shape, L, EXTRA, N,
                        1)),
            (producer, (keys, extra_keys, memory, L, EXTRA)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


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
) -> None:
    """Launch over ``num_groups`` groups of rows."""
    rows, layout = cache_arguments(cache)
    extra_rows, extra_layout = None, None
    if extra_cache is not None and extra is not None:
        extra_rows, extra_layout = cache_arguments(extra_cache)
    wide = shape.num_rows > 16
    _attend_few_heads[(num_groups * shape.num_splits,)](
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
        N=32 if wide else 16,
        CONSUMER_REGISTERS=232 if wide else 208,
        PRODUCER_REGISTERS=40 if wide else 80,
        num_warps=4,
        launch_pdl=True,
    )


def sparse_decode(call: SparseDecode) -> None:
    arguments.sparse_decode(call, launch)


def sparse_prefill(call: SparsePrefill) -> None:
    arguments.sparse_prefill(call, launch)


def sparse_attention(call: SparseAttention) -> None:
    arguments.sparse_attention(call, launch)

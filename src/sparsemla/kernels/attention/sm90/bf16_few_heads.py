"""Sparse attention on SM90 over a bfloat16 cache, for up to 32 query rows that share keys.

A CTA attends to one split of the keys of one group of query rows: the heads of a token. Both MMAs
are transposed (swap-AB), ``S^T = K Q^T`` and ``O^T = V^T P^T``. Keys and value dims lie on M; the
rows lie on N, padded to 16 or 32; on M they would be padded to 64. As in the other kernels, BLOCK_M
is the number of query rows and BLOCK_N the keys of a KV block. The cache serves as K and V at once:
the QK MMA reads a block as [keys, dims], the PV MMA reads the same bytes transposed.

Two consumer warpgroups take alternate blocks of 64 keys. Each has its own m, l and O, so nothing
orders them in the loop: the softmax of one runs under the MMAs of the other. After the last block
they merge, as two splits would. A producer warpgroup copies rows of the cache to shared memory with
cp.async, straight into the swizzled layout that the MMAs read. Each consumer has a stage of its
own, and a block arrives in three pieces: RoPE dims, dims 0 to 255 (left) and dims 256 to 511
(right). The QK MMA begins with the first piece, and the producer refills a piece as soon as the
last MMA that reads it is done. Blocks of a second stream follow those of the first::

    producer     rope, left, right of i+1 | rope, left, right of i+2 | rope, left, right of i+3
    consumer 0   QK i   softmax i   PV i    QK i+2   softmax i+2   PV i+2
    consumer 1          QK i+1   softmax i+1   PV i+1   QK i+3   softmax i+3   PV i+3

Barriers:

    barrier   number  arrivals                waits         guards
    kv_full   2 x 3   128 copies' threads     the consumer  a piece of the consumer's stage
    kv_empty  2 x 3   1, the consumer, after  the producer  the same piece: RoPE dims after the QK
                      its last MMA of it                    MMA, others after the PV MMA
    ml_full   1       2, each consumer        both          m and l of both, and the end of all MMAs
    o_full    1       2, each consumer        both          O of both

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
from sparsemla.kernels.attention import calls
from sparsemla.kernels.attention.arguments import (
    SparseAttention,
    SparseDecode,
    SparsePrefill,
)
from sparsemla.kernels.attention.operands import KeyList, Queries, QueryRows, Results
from sparsemla.kernels.attention.rows import LN2, LOG2E, LOWEST, VALUE_DIM, is_slot, locate
from sparsemla.kernels.attention.sm90.layouts import (
    BLOCK_N,
    HALF_DIM,
    LIST,
    LOAD_ROWS,
    OUT_T,
    OUT_T_SHARED,
    ROPE_DIM,
    WARPGROUP,
    p_layout,
)
from sparsemla.kernels.attention.sm90.swap_ab import (
    KeyRange,
    find_keys,
    load_entries,
    load_queries,
    sum_key_pairs,
)
from sparsemla.kernels.attention.sm90.tiles import group_of_program, rows_of_group, to_bf16
from sparsemla.kernels.common.gluon import async_load, opaque_zero, reinterpret
from sparsemla.kernels.common.hopper import COPY, PLAIN, TILE
from sparsemla.kernels.common.paged import cache_arguments

CONSUMERS = gl.constexpr(2)
# A stage's barriers: one for each piece of a block.
PIECES = gl.constexpr(3)
ROPE = gl.constexpr(0)
LEFT = gl.constexpr(1)
RIGHT = gl.constexpr(2)
NUM_PIECES = gl.constexpr(CONSUMERS.value * PIECES.value)


class SharedMemory(NamedTuple):
    """Shared memory of a CTA with ``BLOCK_M`` padded query rows, and its barriers (table above)."""

    q: gl.shared_memory_descriptor
    """bfloat16 [2, BLOCK_M, HALF_DIM]: halves of dims 0 to 511. Stored by all, read by QK MMAs."""
    q_rope: gl.shared_memory_descriptor
    """bfloat16 [1, BLOCK_M, ROPE_DIM]: dims 512 to 575."""
    kv: gl.shared_memory_descriptor
    """bfloat16 [2 * CONSUMERS, BLOCK_N, HALF_DIM]: halves of each stage. From the producer, to all
    MMAs."""
    p: gl.shared_memory_descriptor
    """bfloat16 [CONSUMERS, BLOCK_N, BLOCK_M]: P of each consumer, for its PV MMA."""
    k_rope: gl.shared_memory_descriptor
    """bfloat16 [CONSUMERS, BLOCK_N, ROPE_DIM]: RoPE dims of each stage. From the producer, to QK
    MMAs."""
    ml: gl.shared_memory_descriptor
    """float32 [2 * CONSUMERS, BLOCK_M]: m of both consumers, then l of both, for the merge."""
    kv_full: gl.shared_memory_descriptor
    kv_empty: gl.shared_memory_descriptor
    ml_full: gl.shared_memory_descriptor
    o_full: gl.shared_memory_descriptor


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
def copy_piece(source, valid, to, smem, bar, phase, START: gl.constexpr, WIDTH: gl.constexpr):
    """Copy dims ``START .. START + WIDTH`` of a block once the piece is empty; 0 for no slot."""
    full = smem.kv_full.index(bar)
    empty = smem.kv_empty.index(bar)
    mbarrier.wait(empty, phase)
    dim = START + gl.arange(0, WIDTH, gl.SliceLayout(0, COPY))
    async_load(to, source + dim[None, :], mask=valid)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def copy_blocks(keys, first_block, smem, L: gl.constexpr):
    """Copy each block of a stream to the stage of its consumer."""
    at = keys.begin + gl.arange(0, BLOCK_N, gl.SliceLayout(1, COPY))
    next_slots = load_entries(keys.entries, at, keys.end, L, False)
    for i in range(keys.num_blocks):
        slots = next_slots
        at += BLOCK_N
        next_slots = load_entries(keys.entries, at, keys.end, L, False)
        valid = is_slot(slots, keys.rows.num_slots)
        page, row = locate(gl.where(valid, slots, 0), L)
        source = keys.rows.bf16 + (page * L.bf16_strides[0] + row * L.bf16_strides[1])[:, None]
        valid = valid[:, None]
        stage = (first_block + i) % CONSUMERS
        phase = (first_block + i) // CONSUMERS & 1 ^ 1
        bar = PIECES * stage
        if L.head_dim > VALUE_DIM:
            to = smem.k_rope.index(stage)
            copy_piece(source, valid, to, smem, bar + ROPE, phase, VALUE_DIM, ROPE_DIM)
        for half in gl.static_range(2):
            to = smem.kv.index(2 * stage + half)
            copy_piece(source, valid, to, smem, bar + LEFT + half, phase, HALF_DIM * half, HALF_DIM)


@gluon.jit
def producer(keys, extra_keys, smem, L: gl.constexpr, EXTRA: gl.constexpr):
    """The producer warpgroup: copy the blocks of both streams, one after the other."""
    copy_blocks(keys, 0, smem, L)
    if EXTRA is not None:
        copy_blocks(extra_keys, keys.num_blocks, smem, EXTRA)


@gluon.jit
def wait_for_copies(full, phase):
    """Wait for a piece, and make its cp.async writes visible to wgmma."""
    mbarrier.wait(full, phase)
    fence_async_shared()


@gluon.jit
def qk_mma(
    smem,
    phase,
    zero,
    BLOCK_M: gl.constexpr,
    CONSUMER: gl.constexpr,
    ROPE_DIMS: gl.constexpr,
    ACC: gl.constexpr,
):
    """S of a block, ``[BLOCK_N, BLOCK_M]``, piece by piece as they arrive."""
    BAR: gl.constexpr = PIECES * CONSUMER
    s = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC)
    if ROPE_DIMS:
        wait_for_copies(smem.kv_full.index(BAR + ROPE), phase)
        q = smem.q_rope.index(zero).permute((1, 0))
        s = warpgroup_mma(smem.k_rope.index(CONSUMER + zero), q, s, use_acc=False, is_async=True)
    for half in gl.static_range(2):
        wait_for_copies(smem.kv_full.index(BAR + LEFT + half), phase)
        q = smem.q.index(zero + half).permute((1, 0))
        k = smem.kv.index(2 * CONSUMER + half + zero)
        s = warpgroup_mma(k, q, s, use_acc=ROPE_DIMS or half > 0, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    if ROPE_DIMS:
        mbarrier.arrive(smem.kv_empty.index(BAR + ROPE), count=1)
    return s


@gluon.jit
def softmax_step(s, seen, m, l, p_shared):
    """Online softmax of a block: store P; return the new m and l, and the factor of O."""
    s = gl.where(seen, s, float("-inf"))
    new_m = gl.maximum(m, gl.max(s, 0))
    rescale = gl.exp2(m - new_m)
    p = gl.exp2(s - new_m[None, :])
    p_shared.store(to_bf16(p))
    fence_async_shared()
    l *= gl.convert_layout(rescale, gl.SliceLayout(0, l.type.layout))[None, :]
    return new_m, l + sum_key_pairs(p), rescale[None, :]


@gluon.jit
def pv_mma(acc_left, acc_right, smem, zero, CONSUMER: gl.constexpr):
    """Add a block's ``V^T P^T`` to both halves of O, and release the halves of V."""
    p = smem.p.index(CONSUMER + zero)
    v_left = smem.kv.index(2 * CONSUMER + zero).permute((1, 0))
    acc_left = warpgroup_mma(v_left, p, acc_left, is_async=True)
    v_right = smem.kv.index(2 * CONSUMER + 1 + zero).permute((1, 0))
    acc_right = warpgroup_mma(v_right, p, acc_right, is_async=True)
    acc_left, acc_right = warpgroup_mma_wait(1, deps=[acc_left, acc_right])
    mbarrier.arrive(smem.kv_empty.index(PIECES * CONSUMER + LEFT), count=1)
    acc_left, acc_right = warpgroup_mma_wait(0, deps=[acc_left, acc_right])
    mbarrier.arrive(smem.kv_empty.index(PIECES * CONSUMER + RIGHT), count=1)
    return acc_left, acc_right


@gluon.jit
def attend(
    keys,
    first_block,
    state,
    scale_log2,
    smem,
    L: gl.constexpr,
    BLOCK_M: gl.constexpr,
    CONSUMER: gl.constexpr,
    ACC: gl.constexpr,
):
    """m, l and both halves of O after every second block of a stream.

    Blocks are counted over both streams, ``first_block`` before this one; those of the other parity
    are the other consumer's.
    """
    m, l, acc_left, acc_right = state
    first = (first_block + CONSUMER) % CONSUMERS
    at = keys.begin + first * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(1, ACC))
    slots = load_entries(keys.entries, at, keys.end, L, False)
    for i in range(first, keys.num_blocks, CONSUMERS):
        zero = opaque_zero(i)
        seen = is_slot(slots, keys.rows.num_slots)[:, None]
        at += CONSUMERS * BLOCK_N
        slots = load_entries(keys.entries, at, keys.end, L, False)
        phase = (first_block + i) // CONSUMERS & 1
        s = qk_mma(smem, phase, zero, BLOCK_M, CONSUMER, L.head_dim > VALUE_DIM, ACC)
        m, l, rescale = softmax_step(s * scale_log2, seen, m, l, smem.p.index(CONSUMER + zero))
        acc_left, acc_right = pv_mma(acc_left * rescale, acc_right * rescale, smem, zero, CONSUMER)
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
    smem,
    results,
    shape,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    BLOCK_M: gl.constexpr,
    CONSUMER: gl.constexpr,
):
    """One of two consumer warpgroups: attend to every second block, then merge with the other."""
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    ROW: gl.constexpr = gl.SliceLayout(0, ACC)
    m = gl.full([BLOCK_M], LOWEST, gl.float32, gl.SliceLayout(0, ACC))
    l = sum_key_pairs(gl.zeros([BLOCK_N, BLOCK_M], gl.float32, ACC))
    acc_left = gl.zeros([HALF_DIM, BLOCK_M], gl.float32, ACC)
    acc_right = gl.zeros([HALF_DIM, BLOCK_M], gl.float32, ACC)
    state = (m, l, acc_left, acc_right)
    state = attend(keys, 0, state, scale_log2, smem, L, BLOCK_M, CONSUMER, ACC)
    if EXTRA is not None:
        state = attend(
            extra_keys, keys.num_blocks, state, scale_log2, smem, EXTRA, BLOCK_M, CONSUMER, ACC
        )
    m, l, acc_left, acc_right = state

    smem.ml.index(CONSUMER).store(m)
    smem.ml.index(CONSUMERS + CONSUMER).store(gl.sum(l, 0))
    meet(smem.ml_full)
    m0 = smem.ml.index(0).load(ROW)
    m1 = smem.ml.index(1).load(ROW)
    merged_m = gl.maximum(m0, m1)
    merged_l = smem.ml.index(CONSUMERS).load(ROW) * gl.exp2(m0 - merged_m)
    merged_l += smem.ml.index(CONSUMERS + 1).load(ROW) * gl.exp2(m1 - merged_m)
    empty_row = merged_l == 0
    token, head, real = rows_of_group(shape, BLOCK_M, ROW)
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
    # tensor to be reinterpreted.
    out_shared = reinterpret(
        smem.kv, gl.float32, [2 * BLOCK_N // BLOCK_M, HALF_DIM, BLOCK_M], OUT_T_SHARED
    )
    acc_left *= rescale
    acc_right *= rescale
    out_shared.index(2 * CONSUMER).store(acc_left)
    out_shared.index(2 * CONSUMER + 1).store(acc_right)
    meet(smem.o_full)
    out = out_shared.index(CONSUMER).load(OUT_T) + out_shared.index(2 + CONSUMER).load(OUT_T)
    token, head, real = rows_of_group(shape, BLOCK_M, gl.SliceLayout(0, OUT_T))
    at = token * results.out_token + head * results.out_head
    dim = CONSUMER * HALF_DIM + gl.arange(0, HALF_DIM, gl.SliceLayout(1, OUT_T))
    to = results.out + at[None, :] + dim[:, None]
    gl.store(to, out.to(results.out.dtype.element_ty), mask=real[None, :])


@gluon.jit
def allocate(BLOCK_M: gl.constexpr):
    """Shared memory of a CTA, with barriers initialised."""
    q = gl.allocate_shared_memory(gl.bfloat16, [2, BLOCK_M, HALF_DIM], TILE)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [1, BLOCK_M, ROPE_DIM], TILE)
    kv = gl.allocate_shared_memory(gl.bfloat16, [2 * CONSUMERS, BLOCK_N, HALF_DIM], TILE)
    p = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS, BLOCK_N, BLOCK_M], p_layout(BLOCK_M))
    k_rope = gl.allocate_shared_memory(gl.bfloat16, [CONSUMERS, BLOCK_N, ROPE_DIM], TILE)
    ml = gl.allocate_shared_memory(gl.float32, [2 * CONSUMERS, BLOCK_M], PLAIN)
    kv_full = gl.allocate_shared_memory(gl.int64, [NUM_PIECES, 1], mbarrier.MBarrierLayout())
    kv_empty = gl.allocate_shared_memory(gl.int64, [NUM_PIECES, 1], mbarrier.MBarrierLayout())
    merge = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_PIECES):
        mbarrier.init(kv_full.index(i), count=WARPGROUP)
        mbarrier.init(kv_empty.index(i), count=1)
    mbarrier.init(merge.index(0), count=CONSUMERS)
    mbarrier.init(merge.index(1), count=CONSUMERS)
    return SharedMemory(
        q, q_rope, kv, p, k_rope, ml, kv_full, kv_empty, merge.index(0), merge.index(1)
    )


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
    BLOCK_M: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """All rows of a group, and one split of the keys of both streams."""
    smem = allocate(BLOCK_M)
    gdc_launch_dependents()
    gdc_wait()  # the prologue above reads nothing that an earlier kernel writes

    low = load_queries(queries, shape, 0, HALF_DIM, BLOCK_M, LOAD_ROWS)
    high = load_queries(queries, shape, HALF_DIM, HALF_DIM, BLOCK_M, LOAD_ROWS)
    if L.head_dim > VALUE_DIM:
        rope = load_queries(queries, shape, VALUE_DIM, ROPE_DIM, BLOCK_M, LOAD_ROWS)

    entries, end = find_keys(stream, shape, LIST, False)
    all_blocks = gl.cdiv(end, BLOCK_N)
    all_extra = 0
    if EXTRA is not None:
        extra_entries, extra_end = find_keys(extra, shape, LIST, False)
        all_extra = gl.cdiv(extra_end, BLOCK_N)
    # The main stream's blocks come first, then the extra stream's.
    split, request, first = group_of_program(shape)
    blocks_per_split = gl.cdiv(all_blocks + all_extra, shape.num_splits)
    first_block = split.to(gl.int32) * blocks_per_split
    begin = gl.minimum(first_block, all_blocks)
    num_blocks = gl.minimum(begin + blocks_per_split, all_blocks) - begin

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

    smem.q.index(0).store(low)
    smem.q.index(1).store(high)
    if L.head_dim > VALUE_DIM:
        smem.q_rope.index(0).store(rope)
    fence_async_shared()
    keys = KeyRange(rows, entries, begin * BLOCK_N, end, num_blocks)
    extra_keys = keys
    if EXTRA is not None:
        behind = first_block + blocks_per_split
        extra_begin = gl.minimum(gl.maximum(first_block - all_blocks, 0), all_extra)
        extra_blocks = gl.minimum(gl.maximum(behind - all_blocks, 0), all_extra) - extra_begin
        extra_begin *= BLOCK_N
        extra_keys = KeyRange(extra_rows, extra_entries, extra_begin, extra_end, extra_blocks)
    gl.warp_specialize(
        [
            (consumer, (keys, extra_keys, scale_log2, smem, group_results, shape, L, EXTRA, BLOCK_M,
                        0)),
            (consumer, (keys, extra_keys, scale_log2, smem, group_results, shape, L, EXTRA, BLOCK_M,
                        1)),
            (producer, (keys, extra_keys, smem, L, EXTRA)),
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
        BLOCK_M=32 if wide else 16,
        CONSUMER_REGISTERS=232 if wide else 208,
        PRODUCER_REGISTERS=40 if wide else 80,
        num_warps=4,
        launch_pdl=True,
    )


def sparse_decode(call: SparseDecode) -> None:
    calls.sparse_decode(call, launch)


def sparse_prefill(call: SparsePrefill) -> None:
    calls.sparse_prefill(call, launch)


def sparse_attention(call: SparseAttention) -> None:
    calls.sparse_attention(call, launch)

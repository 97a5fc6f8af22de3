"""Attention on Hopper of up to 32 rows that share bfloat16 keys: keys on M of a product, rows on N.

Two warpgroups take turns: each attends to every other tile of 64 keys, with its own maximum, sum
and weighted values, and in the end both are put together. A third one copies rows of the cache
straight to where products read them.
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
from sparsemla.kernels.attention.sm90.abi import (
    Results,
    Shape,
    Stream,
)
from sparsemla.kernels.attention.sm90.tiles import (
    LN2,
    LOG2E,
    LOWEST,
    PLAIN,
    TILE,
    end_of,
    group_of_program,
    is_slot,
    locate,
    rows_of_group,
    to_bf16,
)
from sparsemla.kernels.common.gluon import async_load, opaque_zero, reinterpret
from sparsemla.kernels.common.paged import cache_arguments

KEYS = gl.constexpr(64)

# 8 lanes copy 128 bytes of a row.
COPY16 = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
BF16_ROWS = gl.constexpr(gl.SliceLayout(1, COPY16))
SUMS = gl.constexpr(gl.SwizzledSharedLayout(8, 2, 4, [0, 1]))
QUERIES = gl.constexpr(gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0]))
RESULTS = gl.constexpr(gl.BlockedLayout([4, 1], [32, 1], [1, 4], [0, 1]))


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


@gluon.jit
def load_slots(keys, at, end):
    """Entries of a list of slots; what lies behind the end is none."""
    return gl.load(keys + at, mask=at < end, other=-1)


@gluon.jit
def copy_half(source, valid, to, full, empty, phase, START: gl.constexpr, WIDTH: gl.constexpr):
    """Copy dims of rows once their place is free."""
    mbarrier.wait(empty, phase)
    dim = START + gl.arange(0, WIDTH, gl.SliceLayout(0, COPY16))
    async_load(to, source + dim[None, :], mask=valid)
    async_copy.mbarrier_arrive(full, increment_count=False)


@gluon.jit
def produce(stream, memory, L: gl.constexpr):
    """The warpgroup that copies."""
    rows, keys, begin, end, tiles = stream
    _, _, values, _, rest, full, empty = memory
    at = begin + gl.arange(0, KEYS, BF16_ROWS)
    following = load_slots(keys, at, end)
    for i in range(tiles):
        slots = following
        at += KEYS
        following = load_slots(keys, at, end)
        valid = is_slot(slots, rows.num_slots)
        page, row = locate(gl.where(valid, slots, 0), L)
        source = rows.bf16 + (page * L.bf16_strides[0] + row * L.bf16_strides[1])[:, None]
        valid = valid[:, None]
        who = i % 2
        phase = i // 2 & 1 ^ 1
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
def add_values(left, right, z, memory, WHO: gl.constexpr):
    """Start the products of both halves of the values."""
    _, _, values, weights, _, _, _ = memory
    p = weights.index(WHO + z)
    left = warpgroup_mma(values.index(2 * WHO + z).permute((1, 0)), p, left, is_async=True)
    right = warpgroup_mma(values.index(2 * WHO + 1 + z).permute((1, 0)), p, right, is_async=True)
    return left, right


@gluon.jit
def wait_for_copies(barrier, phase):
    """Wait, and let products see what was copied."""
    mbarrier.wait(barrier, phase)
    fence_async_shared()


@gluon.jit
def attend_tiles(stream, state, scale_log2, memory, L: gl.constexpr, WHO: gl.constexpr):
    """Every other tile, from ``WHO`` on: online softmax of heads on columns."""
    rows, keys, begin, end, tiles = stream
    q_value, q_rest, values, weights, rest, full, empty = memory
    m, l, left, right = state
    SCORES: gl.constexpr = left.type.layout
    REST: gl.constexpr = L.head_dim > 512
    BAR: gl.constexpr = 3 * WHO
    at = begin + WHO * KEYS + gl.arange(0, KEYS, gl.SliceLayout(1, SCORES))
    slots = load_slots(keys, at, end)
    for i in range(WHO, tiles, 2):
        z = opaque_zero(i)
        seen = is_slot(slots, rows.num_slots)[:, None]
        at += 2 * KEYS
        slots = load_slots(keys, at, end)
        phase = i // 2 & 1
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
    stream,
    scale_log2,
    memory,
    sums,
    meet,
    results,
    shape,
    L: gl.constexpr,
    WHO: gl.constexpr,
    N: gl.constexpr,
):
    """One of two warpgroups: it attends to every other tile; then both put their sums together."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    HEADS: gl.constexpr = gl.SliceLayout(0, SCORES)
    m = gl.full([N], LOWEST, gl.float32, HEADS)
    l = add_keys(gl.zeros([KEYS, N], gl.float32, SCORES))
    left = gl.zeros([256, N], gl.float32, SCORES)
    right = gl.zeros([256, N], gl.float32, SCORES)
    state = (m, l, left, right)
    m, l, left, right = attend_tiles(stream, state, scale_log2, memory, L, WHO)

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
    token, head, real = rows_of_group(shape, N, HEADS)
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
    # Both have met: nobody reads values any more, and there is room for four sums in their place,
    # which Triton 3.8 wants to be named whole.
    both = reinterpret(memory[2], gl.float32, [128 // N, 256, N], SUMS)
    left *= share
    right *= share
    both.index(2 * WHO).store(left)
    both.index(2 * WHO + 1).store(right)
    mbarrier.arrive(meet.index(1), count=1)
    mbarrier.wait(meet.index(1), 0)
    x = both.index(WHO).load(RESULTS) + both.index(2 + WHO).load(RESULTS)
    token, head, real = rows_of_group(shape, N, gl.SliceLayout(0, RESULTS))
    at = token * results.out_token + head * results.out_head
    dim = WHO * 256 + gl.arange(0, 256, gl.SliceLayout(1, RESULTS))
    out = results.out + at[None, :] + dim[:, None]
    gl.store(out, x.to(results.out.dtype.element_ty), mask=real[None, :])


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
):
    """Dims of a group's rows."""
    _, request, first = group_of_program(shape)
    token, head, real = rows_of_group(shape, N, gl.SliceLayout(1, QUERIES))
    at = request * q_request + (first + token) * q_token + head * q_head
    dim = START + gl.arange(0, WIDTH, gl.SliceLayout(0, QUERIES))
    return gl.load(q + at[:, None] + dim[None, :], mask=real[:, None], other=0.0)


@gluon.jit
def find_keys(stream, shape, PAGED: gl.constexpr):
    """Slots of a group, or pages of its request, and how many keys they are."""
    _, request, token = group_of_program(shape)
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
    results,
    shape,
    scale_log2,
    L: gl.constexpr,
    N: gl.constexpr,
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
    rest = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, 64], TILE)
    sums = gl.allocate_shared_memory(gl.float32, [4, N], PLAIN)
    full = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [6, 1], mbarrier.MBarrierLayout())
    meet = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(6):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=1)
    mbarrier.init(meet.index(0), count=2)
    mbarrier.init(meet.index(1), count=2)
    gdc_launch_dependents()
    gdc_wait()  # as in kernels/common/early.py: all above needs nobody's results

    low = load_queries(q, q_request, q_token, q_head, shape, 0, 256, N)
    high = load_queries(q, q_request, q_token, q_head, shape, 256, 256, N)
    if L.head_dim > 512:
        q_dims = load_queries(q, q_request, q_token, q_head, shape, 512, 64, N)

    keys, end = find_keys(stream, shape, False)
    all_tiles = gl.cdiv(end, KEYS)
    split, request, first = group_of_program(shape)
    steps = gl.cdiv(all_tiles, shape.num_splits)
    begin = gl.minimum(split.to(gl.int32) * steps, all_tiles)
    tiles = gl.minimum(begin + steps, all_tiles) - begin

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
        q_rest.index(0).store(q_dims)
    fence_async_shared()
    gl.warp_specialize(
        [
            (consume, ((rows, keys, begin * KEYS, end, tiles), scale_log2,
                       (q_value, q_rest, values, weights, rest, full, empty),
                       sums, meet, where, shape, L, 0, N)),
            (consume, ((rows, keys, begin * KEYS, end, tiles), scale_log2,
                       (q_value, q_rest, values, weights, rest, full, empty),
                       sums, meet, where, shape, L, 1, N)),
            (produce, ((rows, keys, begin * KEYS, end, tiles),
                       (q_value, q_rest, values, weights, rest, full, empty), L)),
        ],
        [4, 4],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


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
) -> None:
    """Launch over ``num_groups`` groups of rows. Strides: of a request, a token and a head."""
    rows, layout = cache_arguments(cache)
    wide = shape.num_rows > 16
    attend_columns[(num_groups * shape.num_splits,)](
        q,
        *q_strides,
        rows,
        stream,
        results,
        shape,
        softmax_scale * LOG2E.value,
        L=layout,
        N=32 if wide else 16,
        CONSUMER_REGISTERS=232 if wide else 208,
        PRODUCER_REGISTERS=40 if wide else 80,
        num_warps=4,
        launch_pdl=True,
    )

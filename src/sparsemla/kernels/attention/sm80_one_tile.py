"""Decode over bfloat16 rows with Ampere's instructions, one tile of keys a split: few requests.

Latencies follow each other here, and nothing hides them, so the kernel is a straight line. A CTA
has 16 query rows, and a warp a quarter of the dims. Time line:

1. Slots are loaded; queries are copied by cp.async while they come, then all rows at once.
2. Barrier: the copies of all warps have arrived. Each warp adds up QK of its dims.
3. Barrier: the four sums are in shared memory. Every warp adds them, and takes the softmax of all
   16 rows in the layout of its MMAs: P never leaves registers. Each warp has PV of its dims.

:mod:`.sm80` has the loop for more keys.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from sparsemla.cache import PagedCache
from sparsemla.kernels.attention import calls
from sparsemla.kernels.attention.arguments import SparseDecode
from sparsemla.kernels.attention.operands import KeyList, Queries, QueryRows, Results
from sparsemla.kernels.attention.rows import (
    LN2,
    LOG2E,
    LOWEST,
    is_slot,
    load_length,
    query_dims,
    rows_of_tile,
)
from sparsemla.kernels.attention.schedule import ONE_TILE_KEYS
from sparsemla.kernels.attention.sm80 import KV_TILE, of_rows, row_offset, tile_of_program
from sparsemla.kernels.common.gluon import async_load, reinterpret
from sparsemla.kernels.common.integers import cdiv
from sparsemla.kernels.common.paged import cache_arguments

ROPE_TILE = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [2, 1, 0]))
SUMS = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [2, 1, 0]))
SUMS_OF_SLICE = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 4, [1, 0]))
ROWS = 16
"""Query rows of a CTA."""


@gluon.jit
def slots_of(stream, entries, end, n):
    """Slots of keys, -1 for none. The list is loaded beside its length, not behind it."""
    slots = gl.load(entries + n, mask=n < stream.num_keys, other=-1)
    return gl.where((n < end) & is_slot(slots, stream.num_slots), slots, -1).to(gl.int32)


@gluon.jit
def copy_rows(field, slots, to, START: gl.constexpr, L: gl.constexpr, LAYOUT: gl.constexpr):
    """Copy bfloat16 dims of a tile's rows, by slices; rows of no slot become zeros."""
    part = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    dim = gl.arange(0, to.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    at = row_offset(slots, L, "bf16_strides", 1)
    source = field + at[None, :, None] + START + part * to.shape[2] + dim
    async_load(to, source, mask=(slots != -1)[None, :, None])


@gluon.jit
def copy_queries(
    queries,
    request,
    token,
    begin,
    shape,
    to,
    START: gl.constexpr,
    ROWS: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Copy dims of query rows, by slices."""
    part = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))[:, None, None]
    dim = gl.arange(0, to.shape[2], gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))[None, None, :]
    ROW: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT))
    in_group, head, real = rows_of_tile(begin, shape, ROWS, ROW, False)
    q, request_stride, token_stride, head_stride = query_dims(queries, START)
    at = request * request_stride + (token + in_group) * token_stride + head * head_stride
    source = q + at[None, :, None] + part * to.shape[2] + dim
    async_load(to, source, mask=real[None, :, None])


@gluon.jit
def _attend_tile(
    queries,
    rows,
    stream,
    results,
    shape,
    scale_log2,
    L: gl.constexpr,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """Sixteen heads of a token, and the one tile of keys of a split."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1, 1], [1, 16, 8])
    COPY: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 2, 16], [1, 4, 1], [2, 1, 0])
    ROPE: gl.constexpr = gl.BlockedLayout([1, 1, 8], [1, 16, 2], [4, 1, 1], [2, 1, 0])
    COPY_KEYS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, COPY))
    ROPE_KEYS: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, ROPE))
    S: gl.constexpr = gl.SliceLayout(0, MMA)
    begin, split, request, token = tile_of_program(shape, ROWS)
    entries = stream.keys + request * stream.keys_request + token * stream.keys_token
    first = split.to(gl.int32) * BLOCK_N
    end = stream.num_keys
    if stream.lengths is not None:
        end = gl.minimum(load_length(stream, request, token), end).to(gl.int32)
    slots = slots_of(stream, entries, end, first + gl.arange(0, BLOCK_N, COPY_KEYS))
    rope_slots = slots_of(stream, entries, end, first + gl.arange(0, BLOCK_N, ROPE_KEYS))
    seen = slots_of(stream, entries, end, first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, S))) != -1

    q = gl.allocate_shared_memory(gl.bfloat16, [4, ROWS, 128], KV_TILE)
    q_rope = gl.allocate_shared_memory(gl.bfloat16, [4, ROWS, 16], ROPE_TILE)
    kv = gl.allocate_shared_memory(gl.bfloat16, [4, BLOCK_N, 128], KV_TILE)
    rope = gl.allocate_shared_memory(gl.bfloat16, [4, BLOCK_N, 16], ROPE_TILE)
    copy_queries(queries, request, token, begin, shape, q, 0, ROWS, COPY)
    copy_queries(queries, request, token, begin, shape, q_rope, 512, ROWS, ROPE)
    copy_rows(rows.bf16, rope_slots, rope, 512, L, ROPE)
    copy_rows(rows.bf16, slots, kv, 0, L, COPY)
    async_copy.commit_group()
    async_copy.wait_group(0)

    Q: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    K: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    s = gl.zeros([4, ROWS, BLOCK_N], gl.float32, MMA)
    s = mma_v2(q_rope.load(Q), rope.permute((0, 2, 1)).load(K), s)
    k = kv.permute((0, 2, 1))
    for part in gl.static_range(4):
        k_part = k.slice(part * 32, 32, dim=1).load(K)
        s = mma_v2(q.slice(part * 32, 32, dim=2).load(Q), k_part, s)
    s_shared = gl.allocate_shared_memory(gl.float32, [4, ROWS, BLOCK_N], SUMS_OF_SLICE)
    reinterpret(s_shared, gl.float32, [4, ROWS, BLOCK_N], SUMS).store(s)
    s = s_shared.index(0).load(S)
    for part in gl.static_range(1, 4):
        s += s_shared.index(part).load(S)
    s = gl.where(seen[None, :], s * scale_log2, float("-inf"))
    m = gl.maximum(gl.max(s, 1), LOWEST)
    p = gl.exp2(s - m[:, None])
    l = gl.sum(p, 1)
    p = p.to(gl.bfloat16)[None, :, :]
    p, _ = gl.broadcast(p, gl.zeros([4, ROWS, BLOCK_N], gl.bfloat16, MMA))
    acc = gl.zeros([4, ROWS, 128], gl.float32, MMA)
    acc = mma_v2(gl.convert_layout(p, Q), kv.load(K), acc)

    _, head, real = rows_of_tile(begin, shape, ROWS, gl.SliceLayout(1, S), False)
    empty = l == 0
    lse = results.lse + split * results.lse_split + request * results.lse_request
    gl.store(lse + token * results.lse_token + head, (m + gl.log2(l)) * LN2, mask=real)
    acc = acc / of_rows(gl.where(empty, 1.0, l), MMA)
    acc = gl.where(of_rows(empty, MMA), 0.0, acc)
    at = split * results.out_split + request * results.out_request
    at += token * results.out_token + head * results.out_head
    part = gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, MMA)))[:, None, None]
    dim = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, MMA)))[None, None, :]
    gl.store(results.out + of_rows(at, MMA) + part * 128 + dim, acc, mask=of_rows(real, MMA))


def launch(
    queries: Queries,
    cache: PagedCache,
    stream: KeyList,
    results: Results,
    shape: QueryRows,
    softmax_scale: float,
    *,
    num_groups: int,
    **_: object,
) -> None:
    """Launch over ``num_groups`` groups of rows; see ``Launch``. There is no second stream."""
    rows, layout = cache_arguments(cache)
    few = stream.num_keys <= min(ONE_TILE_KEYS) * shape.num_splits
    _attend_tile[(num_groups * shape.num_splits * cdiv(shape.num_rows, ROWS),)](
        queries,
        rows,
        stream,
        results,
        shape,
        softmax_scale * LOG2E.value,
        L=layout,
        ROWS=ROWS,
        BLOCK_N=min(ONE_TILE_KEYS) if few else max(ONE_TILE_KEYS),
        num_warps=4,
    )


def sparse_decode(call: SparseDecode) -> None:
    calls.sparse_decode(call, launch)

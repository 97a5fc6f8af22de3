"""Device code that the Hopper attention kernels share: layouts, tiles of query rows, slots."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1e30)
S_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
O_LAYOUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
S_ROWS = gl.constexpr(gl.SliceLayout(1, S_LAYOUT))
O_ROWS = gl.constexpr(gl.SliceLayout(1, O_LAYOUT))
LIST = gl.constexpr(gl.BlockedLayout([4], [32], [4], [0]))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.jit
def locate_tile(tile, shape):
    """The first row of a tile, its split, its request and the first token of its group."""
    num_tiles = gl.cdiv(shape.num_rows, 64)
    group = tile // num_tiles // shape.num_splits
    begin = tile % num_tiles * 64
    split = tile // num_tiles % shape.num_splits
    request = (group // shape.group_tokens).to(gl.int64)
    return begin, split, request, (group % shape.group_tokens).to(gl.int64)


@gluon.jit
def rows_of_tile(begin, shape, LAYOUT: gl.constexpr, TOKENS: gl.constexpr = True):
    """Token in the group, head and validity of a tile's rows; ``TOKENS``: of several tokens."""
    row = begin + gl.arange(0, 64, LAYOUT)
    real = row < shape.num_rows
    if TOKENS:
        token = (row // shape.num_heads).to(gl.int64)
        head = (row % shape.num_heads).to(gl.int64)
    else:
        token = gl.zeros_like(row).to(gl.int64)
        head = row.to(gl.int64)
    return token, head, real


@gluon.jit
def query_dims(queries, START: gl.constexpr):
    """Where the dims of query rows from START on lie: pointer and strides, as in ``Queries``."""
    q = queries.q + START
    strides = queries.request_stride, queries.token_stride, queries.head_stride
    if START >= 512 and queries.rope is not None:
        q = queries.rope + (START - 512)
        strides = (
            queries.rope_request_stride,
            queries.rope_token_stride,
            queries.rope_head_stride,
        )
    return q, strides[0], strides[1], strides[2]


@gluon.jit
def to_bf16(x):
    """float32 to bfloat16 two at a time: the compiler converts values with two uses one by one."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def load_length(stream, request, token):
    """The length of a group's list of keys."""
    at = request * stream.lengths_request
    if stream.lengths_token is not None:
        at += token * stream.lengths_token
    return gl.load(stream.lengths + at)


@gluon.jit
def store_key_limits(limits, stream, shape, begin, request, first, CAUSAL: gl.constexpr):
    """Store the number of keys that each row sees, and return the largest number."""
    length = stream.num_keys
    if stream.lengths is not None:
        length = load_length(stream, request, first).to(gl.int32)
    end = gl.maximum(gl.minimum(length, stream.num_keys), 0)
    if CAUSAL:
        token, _, real = rows_of_tile(begin, shape, S_ROWS)
        query_len = shape.num_rows // shape.num_heads
        limit = gl.minimum(end, length - query_len + 1 + token.to(gl.int32))
        limits.store(limit)
        end = gl.max(gl.where(real, limit, 0), 0)
    return end


@gluon.jit
def end_of_valid_slots(keys, first, last, num_slots, CHUNK: gl.constexpr):
    """One past the last valid slot in part of a list, so that an unused tail costs no block."""
    end = first
    for start in range(first, last, CHUNK):
        at = start + gl.arange(0, CHUNK, LIST)
        slots = gl.load(keys + at, mask=at < last, other=-1).to(gl.int64)
        valid = (slots >= 0) & (slots < num_slots)
        end = gl.maximum(end, gl.max(gl.where(valid, at + 1, 0), 0))
    return end


@gluon.jit
def is_slot(slots, num_slots):
    """Whether entries of a list are slots of the cache."""
    return (slots >= 0) & (slots < num_slots)


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
def group_of_program(shape):
    """The split of this CTA, its request and the first token of its group."""
    group = gl.program_id(0) // shape.num_splits
    split = (gl.program_id(0) % shape.num_splits).to(gl.int64)
    request = (group // shape.group_tokens).to(gl.int64)
    return split, request, (group % shape.group_tokens).to(gl.int64)


@gluon.jit
def rows_of_group(shape, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Token in the group, head and validity of a group's rows."""
    row = gl.arange(0, N, LAYOUT)
    token = (row // shape.num_heads).to(gl.int64)
    return token, (row % shape.num_heads).to(gl.int64), row < shape.num_rows

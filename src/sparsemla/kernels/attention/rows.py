"""Query rows, lists of keys and slots, for all attention kernels in Gluon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)
LOWEST = gl.constexpr(-1e30)
VALUE_DIM = gl.constexpr(512)
"""Dims of a value; the dims of a key behind them are its RoPE dims."""


@gluon.jit
def rows_of_tile(
    begin, shape, BLOCK_M: gl.constexpr, LAYOUT: gl.constexpr, TOKENS: gl.constexpr = True
):
    """Token in the group, head and validity of a tile's rows; ``TOKENS``: of several tokens."""
    row = begin + gl.arange(0, BLOCK_M, LAYOUT)
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
    if START >= VALUE_DIM and queries.rope is not None:
        q = queries.rope + (START - VALUE_DIM)
        strides = (
            queries.rope_request_stride,
            queries.rope_token_stride,
            queries.rope_head_stride,
        )
    return q, strides[0], strides[1], strides[2]


@gluon.jit
def load_length(stream, request, token):
    """The length of a group's list of keys."""
    at = request * stream.lengths_request
    if stream.lengths_token is not None:
        at += token * stream.lengths_token
    return gl.load(stream.lengths + at)


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
def decode_e8m0(code):
    """float32 powers of two from int32 e8m0 codes: ``2^(code - 127)``, and NaN from 255."""
    bits = gl.where(code == 0, 0x400000, code << 23)
    bits = gl.where(code == 255, 0x7FC00000, bits)
    return bits.to(gl.float32, bitcast=True)

"""Device code of the few-heads kernels, which put keys on M and query rows on N (swap-AB)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsemla.kernels.attention.rows import is_slot, load_length, query_dims
from sparsemla.kernels.attention.sm90.tiles import group_of_program, rows_of_group
from sparsemla.kernels.common.paged import Rows

SLOTS_AT_ONCE = gl.constexpr(2048)
"""Slots that the search for the last valid one loads at once."""


class KeyRange(NamedTuple):
    """The KV blocks of a stream that one split attends to."""

    rows: Rows
    """The cache."""
    entries: Tensor
    """Slots of the keys; or, in dense attention, the page table of a request."""
    begin: int
    """Position of the split's first key."""
    end: int
    """Number of keys of the whole stream."""
    num_blocks: int
    """KV blocks of the split."""


@gluon.jit
def load_entries(entries, at, end, L: gl.constexpr, PAGED: gl.constexpr):
    """Slots of the keys at positions ``at``, or their page ids; -1 from ``end`` on."""
    return gl.load(entries + (at // L.page_size if PAGED else at), mask=at < end, other=-1)


@gluon.jit
def find_keys(stream, shape, LIST: gl.constexpr, PAGED: gl.constexpr):
    """Entries of the CTA's group, and its number of keys: slots end with the last valid one."""
    _, request, token = group_of_program(shape)
    entries = stream.keys + request * stream.keys_request + token * stream.keys_token
    end = stream.num_keys
    if stream.lengths is not None:
        end = gl.minimum(load_length(stream, request, token), end).to(gl.int32)
    if not PAGED:
        used = 0
        for start in range(0, end, SLOTS_AT_ONCE):
            at = start + gl.arange(0, SLOTS_AT_ONCE, LIST)
            slots = gl.load(entries + at, mask=at < end, other=-1)
            valid = is_slot(slots, stream.num_slots)
            used = gl.maximum(used, gl.max(gl.where(valid, at + 1, 0), 0))
        end = used
    return entries, end


@gluon.jit
def load_queries(
    queries,
    shape,
    START: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK_M: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Dims ``START .. START + WIDTH`` of the group's rows; 0 in rows of padding."""
    _, request, first = group_of_program(shape)
    token, head, real = rows_of_group(shape, BLOCK_M, gl.SliceLayout(1, LAYOUT))
    q, request_stride, token_stride, head_stride = query_dims(queries, START)
    at = request * request_stride + (first + token) * token_stride + head * head_stride
    dim = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    return gl.load(q + at[:, None] + dim[None, :], mask=real[:, None], other=0.0)


@gluon.jit
def sum_key_pairs(p):
    """Sum of a thread's two keys, 8 apart, for each row: ``[BLOCK_N / 2, BLOCK_M]``."""
    BLOCK_N: gl.constexpr = p.shape[0]
    BLOCK_M: gl.constexpr = p.shape[1]
    return gl.sum(p.reshape(BLOCK_N // 16, 2, 8, BLOCK_M), 1).reshape(BLOCK_N // 2, BLOCK_M)

"""What Hopper kernels of several families do alike: tiles of bfloat16, and blocks of a list's rows.

Rows of a list come in blocks of 64 entries by cp.async, heads and other dense tiles by TMA.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from sparsemla.kernels.common.gluon import async_load, reinterpret, tma_load
from sparsemla.kernels.common.lists import end_of, length_of

BLOCK = gl.constexpr(64)
"""Entries of a block."""
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
TOKEN_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 3))
PLAIN = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
# The rows of a warp, each in one piece: 64 columns of bfloat16.
STORE = gl.constexpr(
    gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [4, 0], [8, 0]],
        [[0, 8], [0, 16], [0, 32], [1, 0], [2, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, 64],
    )
)


@gluon.jit
def next_stage(stage, phase, COUNT: gl.constexpr):
    """The stage after a stage, and its phase."""
    last = stage == COUNT - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


class Lists(NamedTuple):
    """The tokens' lists, each up to its last valid entry."""

    indices: object
    stride: object
    ends: object
    num_rows: object


@triton.jit(do_not_specialize=["num_rows"])
def _list_ends(topk_indices, stride, topk_lengths, ends, topk, num_rows):
    """One past the last valid entry of each list."""
    token = tl.program_id(0).to(tl.int64)
    length = length_of(topk_lengths, token, topk)
    tl.store(ends + token, end_of(topk_indices + token * stride, length, num_rows, 1024))


def list_ends(topk_indices: Tensor, topk_lengths: Tensor | None, num_rows: int) -> Tensor:
    """One past the last valid entry of each list, int32 ``[T]``."""
    num_tokens, topk = topk_indices.shape
    ends = torch.empty(num_tokens, dtype=torch.int32, device=topk_indices.device)
    _list_ends[(num_tokens,)](
        topk_indices, topk_indices.stride(0), topk_lengths, ends, topk, num_rows, num_warps=4
    )
    return ends


@gluon.jit
def num_pairs_of(lists, token):
    """Pairs of blocks of a list; a loop that may be skipped makes the compiler serialise MMAs."""
    return gl.maximum(gl.cdiv(gl.load(lists.ends + token), 2 * BLOCK), 1)


@gluon.jit
def load_rows(lists, token, block, LAYOUT: gl.constexpr):
    """Rows of a block of a list, and which entries are valid."""
    at = block * BLOCK + gl.arange(0, BLOCK, LAYOUT)
    end = gl.load(lists.ends + token)
    indices = lists.indices + token.to(gl.int64) * lists.stride
    row = gl.load(indices + at, mask=at < end, other=-1).to(gl.int64)
    return row, (row >= 0) & (row < lists.num_rows)


@gluon.jit
def copy_dims(to, kv, kv_row, row, valid, first, DIMS: gl.constexpr, LAYOUT: gl.constexpr):
    """Start to copy dims of rows; zeros where not valid. Strides count 8 elements."""
    dims = first + gl.arange(0, DIMS, gl.SliceLayout(0, LAYOUT))
    at = 8 * row * kv_row
    async_load(to, kv + at[:, None] + dims[None, :], mask=valid[:, None])


def tiles_of_heads(x: Tensor, heads: int) -> TensorDescriptor:
    """Tiles of a token's ``heads`` and 64 dims of ``x [T, H, D]``; zeros beyond the heads."""
    layout = TOKEN_TILE.value
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, heads, 64], layout)


@gluon.jit
def load_heads(to, desc, token, head, column, bar, HEADS: gl.constexpr):
    """Start to copy 64 columns of a token's heads by TMA; zeros for heads that do not exist."""
    tma_load(
        desc, [token, head, column], bar, reinterpret(to, gl.bfloat16, [1, HEADS, 64], TOKEN_TILE)
    )


@gluon.jit
def store_tile(target, values, row_offsets, real, LAYOUT: gl.constexpr):
    """Store rows of bfloat16 at the offsets of ``row_offsets``; both follow ``LAYOUT``."""
    values = gl.convert_layout(values, LAYOUT)
    columns = gl.arange(0, values.shape[1], gl.SliceLayout(0, LAYOUT))
    gl.store(target + row_offsets[:, None] + columns[None, :], values, mask=real[:, None])


@gluon.jit
def store_128(target, acc, row_offsets, real):
    """Store 64 x 128 float32 as bfloat16, 64 columns at a time."""
    halves = acc.to(gl.bfloat16).reshape([64, 2, 64]).permute((0, 2, 1)).split()
    store_tile(target, halves[0], row_offsets, real, STORE)
    store_tile(target + 64, halves[1], row_offsets, real, STORE)

"""Lists of rows, one for each token: their entries, and sums over the entries that name a row.

A row that several tokens list gets a term from each. They are added without atomics: kernels write
the terms, a stable sort of the entries finds those of each row, and each row adds its own, one at a
time in the order of tokens and entries. So the bits of a sum do not depend on the run, nor on how
tokens are chunked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.common.slots import is_slot

ENTRY_BYTES = 48
"""Workspace of an entry for its place in the lists: keys and values of the sort, twice."""

UNROLL = 8
"""Terms of a row that are loaded at once; they are added one at a time."""


class TokenLists(NamedTuple):
    """Lists of rows, one for each token."""

    indices: Tensor
    stride: int
    lengths: Tensor | None

    @classmethod
    def of(cls, indices: Tensor, lengths: Tensor | None, some: slice = slice(None)) -> TokenLists:
        """The lists of some tokens."""
        indices = indices[some]
        return cls(indices, indices.stride(0), None if lengths is None else lengths[some])


@triton.jit
def length_of(topk_lengths, token, topk):
    """The entries of a token's list that count, if they are valid."""
    length = topk
    if topk_lengths is not None:
        length = tl.minimum(tl.load(topk_lengths + token), topk).to(tl.int32)
    return length


@triton.jit
def end_of(topk_indices, length, num_slots, CHUNK: tl.constexpr):
    """One past the last valid slot of a list: an unused tail costs no tile."""
    end = 0
    for start in range(0, length, CHUNK):
        at = start + tl.arange(0, CHUNK)
        slots = tl.load(topk_indices + at, mask=at < length, other=-1)
        end = tl.maximum(end, tl.max(tl.where(is_slot(slots, num_slots), at + 1, 0)))
    return end


@triton.jit
def load_entries(topk_indices, at, length, num_rows):
    """The rows that places of a list name, as int64, and whether they are valid.

    ``topk_indices`` points at the list. An invalid entry becomes row 0.
    """
    row = tl.load(topk_indices + at, mask=at < length, other=-1)
    valid = is_slot(row, num_rows) & (at < length)
    return tl.where(valid, row, 0).to(tl.int64), valid


@triton.jit
def entries_of(lists, token, at, topk, num_rows):
    """:func:`load_entries` of the list of a token."""
    length = length_of(lists.lengths, token, topk)
    return load_entries(lists.indices + token * lists.stride, at, length, num_rows)


@triton.jit(do_not_specialize=["num_rows"])
def _sort_keys(lists, keys, first, topk, num_rows, CHUNK: tl.constexpr):
    """Keys of entries: their row, or ``num_rows`` if they are not valid, counted from ``first``."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * CHUNK + tl.arange(0, CHUNK)
    row, valid = entries_of(lists, token, at, topk, num_rows)
    key = first + tl.where(valid, row, num_rows)
    tl.store(keys + token * topk + at, key.to(keys.dtype.element_ty), mask=at < topk)


def entries_of_rows(lists: TokenLists, num_rows: int) -> tuple[Tensor, Tensor]:
    """The entries that name each row, ascending: ``order [n K]``, and where each row's begin.

    ``starts [S + 1]``; entries that are not valid come last.
    """
    num_tokens, topk = lists.indices.shape
    # A radix sort of keys with 16 bits takes half the passes.
    dtype, first = (torch.int16, -(1 << 15)) if num_rows < 1 << 16 else (torch.int32, 0)
    keys = torch.empty(num_tokens * topk, dtype=dtype, device=lists.indices.device)
    _sort_keys[(num_tokens, cdiv(topk, 1024))](
        lists, keys, first, topk, num_rows, CHUNK=1024, num_warps=4
    )
    keys, order = keys.sort(stable=True)
    bounds = torch.arange(first, first + num_rows + 1, dtype=dtype, device=keys.device)
    return order, torch.searchsorted(keys, bounds)


@triton.jit
def _add_terms(
    terms, order, starts, total, D: tl.constexpr, DIMS: tl.constexpr, UNROLL: tl.constexpr
):
    """Add the terms of a row to some of its dims, in the order of the list."""
    NUM_PARTS: tl.constexpr = (D + DIMS - 1) // DIMS
    row = (tl.program_id(0) // NUM_PARTS).to(tl.int64)
    begin = tl.load(starts + row)
    end = tl.load(starts + row + 1)
    if begin == end:
        return
    d = tl.program_id(0) % NUM_PARTS * DIMS + tl.arange(0, DIMS)
    inside = d < D
    acc = tl.load(total + row * D + d, mask=inside, other=0)
    for start in range(begin, end, UNROLL):
        for i in tl.static_range(UNROLL):
            there = start + i < end
            entry = tl.load(order + start + i, mask=there, other=0)
            acc += tl.load(terms + entry * D + d, mask=inside & there, other=0).to(tl.float32)
    tl.store(total + row * D + d, acc, mask=inside)


def add_terms(terms: Tensor, lists: TokenLists, total: Tensor) -> None:
    """Add the terms ``[n K, D]`` of lists ``[n, K]`` to float32 rows ``total [S, D]``."""
    num_rows, dim = total.shape
    order, starts = entries_of_rows(lists, num_rows)
    dims = min(next_power_of_2(dim), 256)
    _add_terms[(num_rows * cdiv(dim, dims),)](
        terms, order, starts, total, D=dim, DIMS=dims, UNROLL=UNROLL, num_warps=1
    )

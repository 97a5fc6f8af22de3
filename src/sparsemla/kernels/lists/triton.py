"""Lists of rows that query tokens share, in Triton.

One program merges the lists of a group of tokens, without atomics. The rank of an entry in the
merge is its place in its own list plus the number of smaller entries in each other list, found by
binary search; among equal rows the token decides. Neighbouring threads search for neighbouring rows
and read the same few lines. The lowest token that lists a row writes it and its members at that
rank, later ones write a hole, and a second pass closes the holes in place.
"""

import triton
import triton.language as tl
from torch import Tensor

from sparsemla.kernels.common.integers import next_power_of_2

BLOCK = 1024
"""Most entries of a step: four for each thread."""


@triton.jit
def _length(topk_lengths, token, num_tokens, topk):
    """The entries of a token's list that count, 0 for a token that does not exist."""
    length = 0
    if token < num_tokens:
        length = topk
        if topk_lengths is not None:
            length = tl.minimum(tl.maximum(tl.load(topk_lengths + token), 0), topk).to(tl.int32)
    return length


@triton.jit
def _smaller(rows, length, row, wanted, steps):
    """The number of entries of an ascending list that are smaller than each ``row``."""
    low = tl.zeros_like(row).to(tl.int32)
    high = low + length
    for _ in range(steps):
        middle = (low + high) // 2
        going_on = wanted & (low < high)
        found = tl.load(rows + middle, mask=going_on, other=-1)
        less = (found >= 0) & (found < row)  # entries that name nothing come last
        low = tl.where(going_on & less, middle + 1, low)
        high = tl.where(going_on & ~less, middle, high)
    return low


@triton.jit(do_not_specialize=["num_tokens", "topk", "steps"])
def _share_lists(
    indices,
    indices_token,
    topk_lengths,
    out,
    out_list,
    lengths,
    members,
    members_list,
    num_tokens,
    topk,
    steps,
    LIST_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(0).to(tl.int64)
    begin = number * LIST_TOKENS
    out += number * out_list
    members += number * members_list

    ascends = tl.full([BLOCK], 1, tl.int32)
    listed = tl.zeros([BLOCK], tl.int32)
    for i in range(LIST_TOKENS):
        rows = indices + (begin + i) * indices_token
        length = _length(topk_lengths, begin + i, num_tokens, topk)
        for start in range(0, length, BLOCK):
            at = start + tl.arange(0, BLOCK)
            row = tl.load(rows + at, mask=at < length, other=-1)
            after = tl.load(rows + at + 1, mask=at + 1 < length, other=-1)
            ascends &= ((after < 0) | ((row >= 0) & (row < after))).to(tl.int32)
            listed += (row >= 0).to(tl.int32)

    if tl.min(ascends) == 1:
        for i in range(LIST_TOKENS):
            rows = indices + (begin + i) * indices_token
            length = _length(topk_lengths, begin + i, num_tokens, topk)
            for start in range(0, length, BLOCK):
                at = start + tl.arange(0, BLOCK)
                row = tl.load(rows + at, mask=at < length, other=-1)
                named = row >= 0
                rank = at
                bits = tl.zeros([BLOCK], tl.int32) + (1 << i)
                owned = named
                for j in range(LIST_TOKENS):
                    if j != i:
                        others = indices + (begin + j) * indices_token
                        end = _length(topk_lengths, begin + j, num_tokens, topk)
                        smaller = _smaller(others, end, row, named, steps)
                        inside = named & (smaller < end)
                        equal = inside & (tl.load(others + smaller, mask=inside, other=-1) == row)
                        rank += smaller
                        if j < i:
                            rank += equal.to(tl.int32)
                            owned = owned & ~equal
                        bits |= equal.to(tl.int32) << j
                tl.store(out + rank, tl.where(owned, row, -1), mask=named)
                byte = tl.where(owned, bits, 0).to(tl.uint8)
                tl.store(members + rank, byte, mask=named)
        tl.debug_barrier()  # all ranks are written

        total = tl.sum(listed)
        end = 0
        for start in range(0, total, BLOCK):
            at = start + tl.arange(0, BLOCK)
            row = tl.load(out + at, mask=at < total, other=-1)
            byte = tl.load(members + at, mask=at < total, other=0)
            kept = row >= 0
            place = end + tl.cumsum(kept.to(tl.int32)) - 1
            end += tl.sum(kept.to(tl.int32))
            tl.debug_barrier()  # the step has been read
            tl.store(out + place, row, mask=kept)
            tl.store(members + place, byte, mask=kept)
        tl.store(lengths + number, end)
        for start in range(end, LIST_TOKENS * topk, BLOCK):
            at = start + tl.arange(0, BLOCK)
            tl.store(out + at, tl.full([BLOCK], -1, tl.int32), mask=at < LIST_TOKENS * topk)
            tl.store(members + at, tl.zeros([BLOCK], tl.uint8), mask=at < LIST_TOKENS * topk)
    else:
        for i in range(LIST_TOKENS):
            rows = indices + (begin + i) * indices_token
            length = _length(topk_lengths, begin + i, num_tokens, topk)
            for start in range(0, topk, BLOCK):
                at = start + tl.arange(0, BLOCK)
                row = tl.load(rows + at, mask=at < length, other=-1)
                byte = tl.where(row >= 0, 1 << i, 0).to(tl.uint8)
                tl.store(out + i * topk + at, tl.maximum(row, -1), mask=at < topk)
                tl.store(members + i * topk + at, byte, mask=at < topk)
        tl.store(lengths + number, LIST_TOKENS * topk)


def share_lists(
    *,
    topk_indices: Tensor,
    list_tokens: int,
    topk_lengths: Tensor | None,
    out: Tensor,
    lengths: Tensor,
    members: Tensor,
) -> None:
    num_tokens, topk = topk_indices.shape
    if num_tokens == 0:
        return
    block = min(next_power_of_2(max(topk, 128)), BLOCK)
    _share_lists[(out.shape[0],)](
        topk_indices,
        topk_indices.stride(0),
        topk_lengths,
        out,
        out.stride(0),
        lengths,
        members,
        members.stride(0),
        num_tokens,
        topk,
        topk.bit_length(),
        LIST_TOKENS=list_tokens,
        BLOCK=block,
        num_warps=block // 128,
    )

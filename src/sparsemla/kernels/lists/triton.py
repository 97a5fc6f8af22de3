"""Lists of rows that query tokens share, and a rank's own rows of a list, in Triton.

A program of :func:`share_lists` merges the lists of a group of tokens, and then of further groups,
without atomics: one token's list after another into their union, from one buffer into another. The
rank of an entry in the new union is its place in its own list, plus the number of smaller entries
in the other one, which a binary search finds, minus the number of smaller entries that are in both,
which a running count finds. Neighbouring threads search for neighbouring rows and read the same
few lines.

For ``N`` groups of ``G`` tokens with lists of ``K`` rows and unions of ``U``, that is at most
``N * G * (K + U)`` searches of ``log2(U)`` loads, whatever the number of rows to select from.

A program of :func:`own_positions` writes one part of one token's list: a running count of the
part's entries is the place of each.
"""

import torch
import triton
import triton.language as tl

from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.integers import next_power_of_2
from sparsemla.kernels.common.search import smaller_entries
from sparsemla.kernels.common.shards import row_of
from sparsemla.kernels.lists.arguments import OwnPositions, ShareLists

BLOCK = 1024
"""Most entries of a step: four for each thread."""
PROGRAMS = 4
"""Programs for each multiprocessor."""


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
def _named(rows, length):
    """The number of leading entries of a list that name a row."""
    low = 0
    while low < length:
        middle = (low + length) // 2
        if tl.load(rows + middle) >= 0:
            low = middle + 1
        else:
            length = middle
    return low


@triton.jit
def _merge(
    union,
    union_members,
    length,
    rows,
    num_rows,
    token,
    out,
    token_mask,
    BLOCK: tl.constexpr,
    LAST: tl.constexpr,
):
    """Merge a token's list of ``num_rows`` rows with a union, and return the new union's length."""
    both = 0
    for start in range(0, length, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = tl.load(union + at, mask=at < length, other=-1)
        member = tl.load(union_members + at, mask=at < length, other=0)
        smaller = smaller_entries(rows, num_rows, row, LAST)
        same = tl.load(rows + smaller, mask=(at < length) & (smaller < num_rows), other=-1) == row
        same = (same & (at < length)).to(tl.int32)
        rank = at + smaller - (both + tl.cumsum(same) - same)
        tl.store(out + rank, row, mask=at < length)
        tl.store(token_mask + rank, member | (same << token).to(tl.uint8), mask=at < length)
        both += tl.sum(same)
    both = 0
    for start in range(0, num_rows, BLOCK):
        at = start + tl.arange(0, BLOCK)
        row = tl.load(rows + at, mask=at < num_rows, other=-1)
        smaller = smaller_entries(union, length, row, LAST)
        same = tl.load(union + smaller, mask=(at < num_rows) & (smaller < length), other=-1) == row
        same = (same & (at < num_rows)).to(tl.int32)
        rank = at + smaller - (both + tl.cumsum(same) - same)
        new = (at < num_rows) & (same == 0)
        tl.store(out + rank, row, mask=new)
        tl.store(token_mask + rank, tl.zeros([BLOCK], tl.uint8) | (1 << token), mask=new)
        both += tl.sum(same)
    return length + num_rows - both


@triton.jit(do_not_specialize=["num_lists", "num_tokens", "topk"])
def _share_lists(
    indices,
    indices_token,
    topk_lengths,
    out,
    out_list,
    lengths,
    token_mask,
    token_mask_list,
    parts,
    parts_members,
    num_lists,
    num_tokens,
    topk,
    LIST_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    LAST: tl.constexpr,
):
    size = LIST_TOKENS * topk
    part = parts + tl.program_id(0).to(tl.int64) * size
    part_members = parts_members + tl.program_id(0).to(tl.int64) * size
    for each in range(tl.program_id(0), num_lists, tl.num_programs(0)):
        number = each + tl.zeros([], tl.int64)
        begin = number * LIST_TOKENS
        to = out + number * out_list
        to_members = token_mask + number * token_mask_list

        ascends = tl.full([BLOCK], 1, tl.int32)
        for i in range(LIST_TOKENS):
            rows = indices + (begin + i) * indices_token
            length = _length(topk_lengths, begin + i, num_tokens, topk)
            for start in range(0, length, BLOCK):
                at = start + tl.arange(0, BLOCK)
                row = tl.load(rows + at, mask=at < length, other=-1)
                after = tl.load(rows + at + 1, mask=at + 1 < length, other=-1)
                ascends &= ((after < 0) | ((row >= 0) & (row < after))).to(tl.int32)

        if tl.min(ascends) == 1:
            end = 0
            # Unions alternate between the result and a buffer; the last one is in the result.
            union, union_members, merged, merged_members = to, to_members, part, part_members
            if LIST_TOKENS % 2 == 1:
                union, union_members, merged, merged_members = part, part_members, to, to_members
            for i in range(LIST_TOKENS):
                rows = indices + (begin + i) * indices_token
                length = _length(topk_lengths, begin + i, num_tokens, topk)
                length = _named(rows, length)
                end = _merge(
                    union, union_members, end, rows, length, i, merged, merged_members, BLOCK, LAST
                )
                union, merged = merged, union
                union_members, merged_members = merged_members, union_members
                tl.debug_barrier()  # the new union is written, the old one has been read
            tl.store(lengths + number, end)
            for start in range(end, size, BLOCK):
                at = start + tl.arange(0, BLOCK)
                tl.store(to + at, tl.full([BLOCK], -1, tl.int32), mask=at < size)
                tl.store(to_members + at, tl.zeros([BLOCK], tl.uint8), mask=at < size)
        else:
            for i in range(LIST_TOKENS):
                rows = indices + (begin + i) * indices_token
                length = _length(topk_lengths, begin + i, num_tokens, topk)
                for start in range(0, topk, BLOCK):
                    at = start + tl.arange(0, BLOCK)
                    row = tl.load(rows + at, mask=at < length, other=-1)
                    byte = tl.where(row >= 0, 1 << i, 0).to(tl.uint8)
                    tl.store(to + i * topk + at, tl.maximum(row, -1), mask=at < topk)
                    tl.store(to_members + i * topk + at, byte, mask=at < topk)
            tl.store(lengths + number, size)


def share_lists(call: ShareLists) -> None:
    topk_indices, list_tokens = call.topk_indices, call.list_tokens
    out, token_mask = call.out, call.token_mask
    num_tokens, topk = topk_indices.shape
    if num_tokens == 0:
        return
    programs = min(len(out), PROGRAMS * num_multiprocessors(out.device))
    _share_lists[(programs,)](
        topk_indices,
        topk_indices.stride(0),
        call.topk_lengths,
        out,
        out.stride(0),
        call.lengths,
        token_mask,
        token_mask.stride(0),
        out.new_empty(programs * list_tokens * topk),
        token_mask.new_empty(programs * list_tokens * topk),
        len(out),
        num_tokens,
        topk,
        LIST_TOKENS=list_tokens,
        BLOCK=min(next_power_of_2(max(topk, 256)), BLOCK),
        LAST=torch.iinfo(topk_indices.dtype).max,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["rank", "topk"])
def _own_positions(
    indices,
    indices_token,
    out,
    out_token,
    out_part,
    counts,
    counts_token,
    counts_part,
    rank,
    topk,
    NUM_RANKS: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    own_parts: tl.constexpr = NUM_PARTS // NUM_RANKS
    token = (tl.program_id(0) // own_parts).to(tl.int64)
    number = (tl.program_id(0) % own_parts).to(tl.int64)
    part = rank + number.to(tl.int32) * NUM_RANKS
    listed = indices + token * indices_token
    to = out + token * out_token + number * out_part
    count = 0
    for start in range(0, topk, BLOCK):
        at = start + tl.arange(0, BLOCK)
        position = tl.load(listed + at, mask=at < topk, other=-1)
        named = (position >= 0) & (position <= 0x7FFFFFFF)
        position = tl.where(named, position, 0).to(tl.int32)
        own = named & (position // INTERLEAVE % NUM_PARTS == part)
        row = row_of(position, NUM_RANKS, INTERLEAVE)
        before = tl.cumsum(own.to(tl.int32)) - 1
        tl.store(to + count + before, row, mask=own)
        count += tl.sum(own.to(tl.int32))
    tl.store(counts + token * counts_token + number * counts_part, count)
    for start in range(count, topk, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(to + at, tl.full([BLOCK], -1, tl.int32), mask=at < topk)


def own_positions(call: OwnPositions) -> None:
    topk_indices, shard, out, counts = call.topk_indices, call.shard, call.out, call.counts
    num_tokens, topk = topk_indices.shape
    _own_positions[(num_tokens * len(shard.own_parts),)](
        topk_indices,
        topk_indices.stride(0),
        out,
        out.stride(0),
        out.stride(1),
        counts,
        counts.stride(0),
        counts.stride(1),
        shard.rank,
        topk,
        NUM_RANKS=shard.num_ranks,
        INTERLEAVE=shard.interleave,
        NUM_PARTS=shard.num_parts,
        BLOCK=min(next_power_of_2(max(topk, 256)), 2 * BLOCK),
        num_warps=8,
    )

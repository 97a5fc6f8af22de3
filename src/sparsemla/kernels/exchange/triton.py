"""One launch that exchanges the candidates of ranks on one host and keeps the best, in Triton.

A program publishes the candidates of its rows, one after the other: it packs each into a word of
64 bits and writes the words into the inboxes of all ranks, its own included. Then it waits for the
words of all ranks in its own inbox and searches them for the best.

A word holds the key of a score, the complement of a position, and one bit for the *phase* of the
exchange. Words of 64 bits are written and read whole, so a word with the expected phase is a
candidate of this exchange: no flag follows the words, and no fence comes between. A word arrives
after one way over NVLink; flags of their own would cost a fence that waits for all words, and a
second way. Ranks push words instead of reading them from their peers for the same reason.

**Who waits for whom.** For row t, program p of each rank waits for the words of row t of every
rank. They were published by the program of row t there, before it waited for anything. So the
exchange ends as soon as every rank's launch has room for all its programs at once: a grid has at
most one program for each multiprocessor, and any multiprocessor has room for one. Kernels of other
streams delay the start of programs, but do not stop it, unless they wait for a peer themselves.

**Epochs.** Each row counts its exchanges in device memory. Its program reads the counter and
advances it, so a replayed CUDA graph goes on where the last launch stopped. All ranks exchange the
same rows in the same order, therefore their counters agree. Exchange e uses buffer ``e % 2`` of the
row, and the phase changes each time that a buffer is used again: ``e // 2 % 2`` tells.

**Reuse.** A rank writes the words of exchange e + 2 over those of e. It does so in a launch after
the one of e + 1, which ended when it had the words of e + 1 of all ranks. A peer sends those in a
launch after its own of e, which ended when the peer had read all words of e. So nothing is
overwritten before it is read, without any message back. With a single buffer, a fast rank's words
of e + 1 would replace those of e that a slow rank still waits for.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.fp8 import INTERPRETED_HERE
from sparsemla.kernels.common.integers import next_power_of_2
from sparsemla.kernels.common.search import smaller_entries
from sparsemla.kernels.common.slots import slots_of_keys
from sparsemla.kernels.exchange.arguments import SLOTS, ExchangeRows, Inboxes
from sparsemla.kernels.topk.triton import DEAD_KEY, is_best, keys_of, threshold_of_best

NUM_SLOTS = tl.constexpr(SLOTS)
LAST = tl.constexpr(0x7FFFFFFF)
"""The largest position."""


@triton.jit
def _put(inbox, words):
    """Write words whole, so that another GPU reads them whole."""
    if INTERPRETED_HERE:
        tl.store(inbox, words)
    else:
        tl.inline_asm_elementwise(
            "st.relaxed.sys.global.b64 [$1], $2; mov.b32 $0, 0;",
            "=r,l,l",
            [inbox, words],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def _pack(key, position, phase):
    """int64 words of keys, positions and the phase, a bit."""
    low = ((position ^ LAST) << 1) | phase
    return (key.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)


@triton.jit
def _unpack(words):
    """Keys and positions of words."""
    return (words >> 32).to(tl.int32), ((words >> 1).to(tl.int32) & LAST) ^ LAST


@triton.jit
def _phase_of(epoch):
    """1 in exchanges 0 and 1, 0 in 2 and 3: an inbox begins with zeros."""
    return 1 - (epoch >> 1)


@triton.jit
def _store_merged(out, ids, chosen, k, RANKS: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr):
    """Store the chosen ids ``[.. WIDTH]`` of all ranks in ascending order, and then -1."""
    PARTS: tl.constexpr = chosen.shape[0] // WIDTH
    chosen = chosen.to(tl.int32)
    place = tl.cumsum(chosen, 0) - chosen
    tl.store(out + place, ids, mask=(chosen != 0) & (place < k))
    lengths = tl.sum(tl.reshape(chosen, [PARTS, WIDTH]), 1)
    total = tl.minimum(tl.sum(lengths, 0), k)  # more are chosen only if ids are not distinct
    tl.debug_barrier()
    i = tl.arange(0, K)
    line = tl.load(out + i, mask=i < total, other=LAST)
    place = i * 0
    begin = total * 0
    ascends = i == 0
    for part in tl.static_range(RANKS):
        length = tl.sum(tl.where(tl.arange(0, PARTS) == part, lengths, 0), 0)
        length = tl.minimum(length, k - begin)
        ascends |= i == begin
        place += smaller_entries(out + begin, length, line, LAST)
        begin += length
    before = tl.load(out + i - 1, mask=(i < total) & (ascends == 0), other=-1)
    tl.debug_barrier()  # all have read
    if tl.max((before > line).to(tl.int32), 0) > 0:  # candidates of a rank do not ascend
        line = tl.sort(line)
        place = i
    tl.store(out + tl.where(i < total, place, i), tl.where(i < total, line, -1), mask=i < k)


UNSPECIALIZED = ("stride_values", "stride_rows", "num_requests", "table_width", "num_rows")


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "num_candidates", "k", "rank"])
def _exchange_rows(
    inboxes,
    epochs,
    values,
    stride_values,
    rows,
    stride_rows,
    selected,
    stride_selected,
    out,
    stride_out,
    stride_out_part,
    counts,
    stride_counts,
    stride_counts_part,
    page_table,
    stride_table,
    request_ids,
    num_requests,
    table_width,
    num_rows,
    num_candidates,
    k,
    rank,
    RANKS: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    K: tl.constexpr,
):
    """Publish the candidates of rows, wait for those of all ranks, and store the best.

    Without INTERLEAVE, ``rows`` are positions, and ``values`` their scores.
    """
    # Words of neighbouring threads are neighbours: over NVLink, whole sectors travel. The compiler
    # would give a thread several words in a row if it knew the strides' alignment, or if other
    # accesses, which profit from that, had blocks of this shape.
    j = tl.arange(0, WIDTH)[None, :]
    for index in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = index + tl.zeros([], tl.int64)
        epoch = tl.load(epochs + row)
        listed = tl.load(rows + row * stride_rows + j, mask=j < num_candidates, other=-1)
        live = (listed >= 0) & (listed <= LAST)
        position = tl.where(live, listed, 0).to(tl.int32)
        column = j
        if INTERLEAVE > 0:
            column = position
            position += column // INTERLEAVE * (INTERLEAVE * (RANKS - 1)) + rank * INTERLEAVE
        value = tl.load(values + row * stride_values + column, mask=live, other=0.0)
        key = tl.where(live, keys_of(value), DEAD_KEY)
        words = _pack(key, position, _phase_of(epoch))
        place = ((row * NUM_SLOTS + epoch % NUM_SLOTS) * RANKS + rank) * WIDTH + j
        for peer in tl.static_range(RANKS):
            _put(inboxes[peer] + place, words)

    j = tl.arange(0, WIDTH)
    for index in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = index + tl.zeros([], tl.int64)
        epoch = tl.load(epochs + row)
        phase = _phase_of(epoch)
        inbox = inboxes[RANKS - 1] + (row * NUM_SLOTS + epoch % NUM_SLOTS) * (RANKS * WIDTH)
        i = tl.arange(0, BLOCK)
        sent = i < RANKS * WIDTH
        # Volatile: from memory each time, and each word whole.
        words = tl.load(inbox + i, mask=sent, other=phase.to(tl.int64), volatile=True)
        while tl.max((words.to(tl.int32) & 1) ^ phase, 0) > 0:
            words = tl.load(inbox + i, mask=sent, other=phase.to(tl.int64), volatile=True)
        key, position = _unpack(words)
        live = sent & (key != DEAD_KEY)
        threshold, cut = threshold_of_best(tl.where(live, key, DEAD_KEY), position, live, k)
        if out is not None:
            own_key, own_position = _unpack(tl.load(inbox + rank * WIDTH + j, volatile=True))
            best = is_best(own_key, own_position, own_key != DEAD_KEY, threshold, cut)
            turn = own_position // INTERLEAVE
            own_row = turn // RANKS * INTERLEAVE + own_position % INTERLEAVE
            if PAGE_SIZE > 0:
                request = tl.load(request_ids + row).to(tl.int64)
                own_row = slots_of_keys(
                    page_table,
                    request,
                    own_row.to(tl.int64),
                    best,
                    num_requests,
                    table_width,
                    stride_table,
                    PAGE_SIZE,
                )
            for number in tl.static_range(NUM_PARTS // RANKS):
                own = best & (turn % NUM_PARTS == rank + number * RANKS)
                place = tl.cumsum(own.to(tl.int32), 0) - 1
                # More are chosen only if positions are not distinct.
                count = tl.minimum(tl.sum(own.to(tl.int32), 0), k)
                to = out + row * stride_out + number * stride_out_part
                tl.store(to + place, own_row, mask=own & (place < k))
                tl.store(counts + row * stride_counts + number * stride_counts_part, count)
                n = tl.arange(0, K)
                tl.store(to + n, n * 0 - 1, mask=(n >= count) & (n < k))
        if selected is not None:
            best = is_best(key, position, live, threshold, cut)
            _store_merged(selected + row * stride_selected, position, best, k, RANKS, WIDTH, K)
        tl.store(epochs + row, (epoch + 1) % 4)


def exchange_rows(inboxes: Inboxes, call: ExchangeRows) -> None:
    """Launch an exchange; all ranks must launch it with equal shapes and options."""
    values, rows, topk, shard = call.values, call.rows, call.topk, call.shard
    num_rows, num_candidates = rows.shape
    if num_rows == 0:
        return
    own = inboxes.peers[-1]
    num_ranks, width = own.shape[2:]
    block = next_power_of_2(num_ranks * width)
    selected, out, counts, table = call.selected, call.out, call.counts, call.page_table
    _exchange_rows[(min(num_rows, num_multiprocessors(values.device)),)](
        inboxes.peers,
        inboxes.epochs,
        values,
        values.stride(0),
        rows,
        rows.stride(0),
        selected,
        0 if selected is None else selected.stride(0),
        out,
        *((0, 0) if out is None else out.stride()[:2]),
        counts,
        *((0, 0) if counts is None else counts.stride()),
        table,
        0 if table is None else table.stride(0),
        call.request_ids,
        *((0, 0) if table is None else table.shape),
        num_rows,
        num_candidates,
        topk,
        inboxes.rank,
        RANKS=num_ranks,
        INTERLEAVE=0 if shard is None else shard.interleave,
        NUM_PARTS=num_ranks if shard is None else shard.num_parts,
        PAGE_SIZE=0 if table is None else call.page_size,
        WIDTH=width,
        BLOCK=block,
        K=max(32, next_power_of_2(topk)),
        num_warps=min(16, max(4, block // 256)),
    )

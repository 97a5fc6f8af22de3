"""Rows of a large cache, such as one in host memory, that are kept in fast memory while in use."""

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.checks import INTEGERS, Checker
from sparsemla.kernels import residency
from sparsemla.kernels.repeat import repeated
from sparsemla.kernels.residency.arguments import (
    FetchRows,
    ForgetSeats,
    ResolveRows,
    workspace_bytes,
)
from sparsemla.ops._library import operator
from sparsemla.residency import EMPTY, RowTable
from sparsemla.shards import ContextShard
from sparsemla.validation import check_integer


class Resolved(NamedTuple):
    """Where selected rows lie in fast memory, and the rows to fetch, from :func:`resolve_rows`."""

    rows: Tensor
    """int32 ``[T, K]``, with parts ``[T, P, K]``: the ``topk_indices`` of
    :func:`sparse_decode` over the fast memory."""
    counts: Tensor
    """int32 ``[T]``, with parts ``[T, P]``: leading entries of each list, its ``topk_lengths``."""
    miss_slots: Tensor
    """int32 ``[T, K]``, slots of rows to fetch, -1 behind."""
    miss_rows: Tensor
    """int32 ``[T, K]``, where each is to go, -1 behind."""
    miss_counts: Tensor
    """int32 ``[T]``, rows to fetch for each token."""
    new_counts: Tensor
    """int32 ``[T]``, how many of these, the last ones, belong to tokens of this step."""


_resolve_rows = operator(residency.RESOLVE_ROWS)


@repeated
def resolve_rows(
    topk_indices: Tensor,
    input_row_offsets: Tensor,
    seq_lens: Tensor,
    seats: Tensor,
    page_table: Tensor,
    table: RowTable,
    *,
    page_size: int,
    max_query_len: int,
    shard: ContextShard | None = None,
    validate: bool = False,
    out: Tensor | None = None,
    counts: Tensor | None = None,
    miss_slots: Tensor | None = None,
    miss_rows: Tensor | None = None,
    miss_counts: Tensor | None = None,
    new_counts: Tensor | None = None,
    workspace: Tensor | None = None,
    stats: Tensor | None = None,
) -> Resolved:
    """Find selected rows in fast memory, and make room for those that are missing.

    Each request has a seat: H rows of fast memory, each with the row of one position. Row ``r`` of
    seat ``s`` is slot ``s * H + r`` of a cache with pages of one row. A step of a request::

        drop the positions at or beyond the context, seq_lens[b] less the tokens of this step
        for each token, in order:
            rows of listed positions that are there: hits
            all others: misses, each in the least recently used row that no token of this step uses
            the list's rows become the most recently used ones, in ascending order of positions

    This is exact LRU. Rows that this step writes, and those of rejected drafts, are dropped by
    their positions, so a row is never stale: only a seat that another request takes, or one whose
    context was computed anew, needs :func:`forget_seats`. The missing rows must be fetched with
    :func:`fetch_rows` before attention; the rows of this step's tokens after they were written.

    ====================================================  ========================================
    case                                                  result
    ====================================================  ========================================
    ``seq_lens[b] <= 0``, or a seat outside of the table  padding: -1 and 0, the table is untouched
    tokens of no request, or beyond ``max_query_len``     padding
    a list that does not ascend up to its first -1        counts as empty
    a position outside of the page table                  not in the list
    a missing position without a page                     -1 in its place; nothing to fetch
    ====================================================  ========================================

    Args:
        topk_indices: int32, int64 or uint32 ``[T, K]``, positions below ``2**31 - 1`` in the
            token's request, ascending, then -1: from :func:`indexer_topk`.
        input_row_offsets: int32, int64 or uint32 ``[B + 1]``, the first token of each request, and
            the end of the last one.
        seq_lens: int32, int64 or uint32 ``[B]``, tokens of each request, this step's included.
        seats: int32, int64 or uint32 ``[B]``, the seat of each request, no two the same; negative
            for padding.
        page_table: int32, int64 or uint32 ``[B, W]``, pages of the large cache.
        table: the seats, written. H must be at least ``max_query_len * K``, or the positions of the
            page table, if these are fewer.
        page_size: tokens of a page of the large cache.
        max_query_len: most tokens of a request.
        shard: this rank's share of contexts. ``topk_indices`` and ``seq_lens`` are then of whole
            contexts, as for :func:`own_positions`, page_table and table of the rank's rows.
        validate: read the integers and refuse lists that do not ascend, seats that occur twice, and
            values out of range.
        out: int32 ``[T, K]``, written: the row of each listed position in the order of the list,
            then -1. With ``shard.parts`` ``[T, P, K]``, a list for each of the rank's parts.
        counts: int32 ``[T]`` or ``[T, P]``, written.
        miss_slots, miss_rows: int32 ``[T, K]``, written.
        miss_counts, new_counts: int32 ``[T]``, written.
        workspace: uint8, at least :func:`resolve_workspace_size`; default a new one.
        stats: int64 ``[2]``, written: hits and misses are added.

    Returns:
        Rows, their counts, and the rows to fetch, with slots of the large cache.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device, or too few
            rows of a seat; the table is untouched then.

    Source: this package.

    >>> table = RowTable.allocate(1, 4)
    >>> pages = torch.tensor([[7, 2]])
    >>> def step(positions, length):
    ...     return resolve_rows(
    ...         torch.tensor([positions]),
    ...         torch.tensor([0, 1]),
    ...         torch.tensor([length]),
    ...         torch.tensor([0]),
    ...         pages,
    ...         table,
    ...         page_size=4,
    ...         max_query_len=1,
    ...     )
    >>> step([0, 3, 5], 6).rows, step([0, 2, 6], 7).miss_slots
    (tensor([[0, 1, 2]], dtype=torch.int32), tensor([[30, 10, -1]], dtype=torch.int32))
    """
    check = Checker("resolve_rows", gradients="all")
    check.kind("table", table, RowTable)
    topk_indices = check.tensor("topk_indices", topk_indices, "T K", INTEGERS)
    seats = check.signed("seats", seats, "B")
    topk = topk_indices.shape[1]
    check.bind("B+1", seats.shape[0] + 1)
    input_row_offsets = check.tensor("input_row_offsets", input_row_offsets, "B+1", INTEGERS)
    seq_lens = check.tensor("seq_lens", seq_lens, "B", INTEGERS)
    page_table = check.tensor("page_table", page_table, "B W", INTEGERS)
    for name in ("keys", "rows", "order"):
        check.written(f"table.{name}", getattr(table, name), "seats H", torch.int32)
    check.positive("page_size", page_size)
    check.positive("max_query_len", max_query_len)
    capacity = page_table.shape[1] * page_size
    needed = min(max_query_len * topk, capacity)
    if table.rows_per_seat < needed:
        raise ValueError(
            f"resolve_rows: table must have rows_per_seat of at least {needed}, as {max_query_len} "
            f"tokens list up to {topk} of {capacity} positions each, got {table.rows_per_seat}"
        )
    of_parts = ""
    if shard is not None:
        check.kind("shard", shard, ContextShard)
        if shard.parts is not None:
            check.bind("P", len(shard.own_parts))
            of_parts = "P "
    out = check.output("out", out, f"T {of_parts}K", torch.int32)
    counts = check.output("counts", counts, f"T {of_parts}".rstrip(), torch.int32)
    miss_slots = check.output("miss_slots", miss_slots, "T K", torch.int32)
    miss_rows = check.output("miss_rows", miss_rows, "T K", torch.int32)
    miss_counts = check.output("miss_counts", miss_counts, "T", torch.int32)
    new_counts = check.output("new_counts", new_counts, "T", torch.int32)
    check.workspace(
        workspace, workspace_bytes(seats.shape[0], topk, table.rows_per_seat, max_query_len)
    )
    if stats is not None:
        check.written("stats", stats, "2", torch.int64)
    if check.validates(validate):
        _check_values(
            check,
            topk_indices,
            input_row_offsets,
            seq_lens,
            seats,
            table,
            max_query_len,
            capacity,
            shard,
        )
    _resolve_rows(
        ResolveRows(
            topk_indices,
            input_row_offsets,
            seq_lens,
            seats,
            page_table,
            table,
            page_size,
            max_query_len,
            shard,
            workspace,
            stats,
            out,
            counts,
            miss_slots,
            miss_rows,
            miss_counts,
            new_counts,
        )
    )
    return Resolved(out, counts, miss_slots, miss_rows, miss_counts, new_counts)


def _check_values(
    check: Checker,
    topk_indices: Tensor,
    input_row_offsets: Tensor,
    seq_lens: Tensor,
    seats: Tensor,
    table: RowTable,
    max_query_len: int,
    capacity: int,
    shard: ContextShard | None,
) -> None:
    """Check the values of lists, offsets, lengths and seats."""
    lowest = torch.iinfo(seats.dtype).min  # any negative seat is padding
    check.values("seats", seats, lowest, table.num_seats)
    taken = sorted(seats[(seats >= 0) & (seq_lens > 0)].tolist())
    for seat, other in itertools.pairwise(taken):
        if seat == other:
            raise ValueError(f"{check.op}: seats must not occur twice, got {seat} twice")
    num_tokens = topk_indices.shape[0]
    check.offsets(
        "input_row_offsets", input_row_offsets, min(int(input_row_offsets[-1]), num_tokens)
    )
    queries = input_row_offsets.diff()
    check.values("the tokens of a request", queries, 0, max_query_len + 1)
    check.values("seq_lens", seq_lens, 0, EMPTY if shard else capacity + 1)
    if shard is not None:
        check.values("seq_lens of this rank", shard.lengths(seq_lens), 0, capacity + 1)
    short = (seq_lens > 0) & (seq_lens < queries)
    if bool(short.any()):
        request = int(short.nonzero()[0])
        raise ValueError(
            f"{check.op}: seq_lens must count this step's tokens, {int(queries[request])} of "
            f"request {request}, got {int(seq_lens[request])}"
        )
    named = (topk_indices >= 0) & (topk_indices < EMPTY)
    ascends = named[:, :-1] & (topk_indices[:, 1:] > topk_indices[:, :-1])
    wrong = ~(ascends | ~named[:, 1:]).all(1)
    if bool(wrong.any()):
        token = int(wrong.nonzero()[0])
        raise ValueError(
            f"{check.op}: topk_indices must ascend, then -1 behind, "
            f"got {topk_indices[token].tolist()} at {token}"
        )


def resolve_workspace_size(
    num_requests: int, topk: int, rows_per_seat: int, *, max_query_len: int = 1
) -> int:
    """Bytes of memory that :func:`resolve_rows` uses while it runs.

    Args:
        num_requests: B.
        topk: K.
        rows_per_seat: H.
        max_query_len: most tokens of a request.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or out of range.

    >>> resolve_workspace_size(1, 2048, 4096)
    122880
    """
    for name, size, least in (
        ("num_requests", num_requests, 0),
        ("topk", topk, 0),
        ("rows_per_seat", rows_per_seat, 1),
        ("max_query_len", max_query_len, 1),
    ):
        check_integer(f"resolve_workspace_size: {name}", size, least)
    return workspace_bytes(num_requests, topk, rows_per_seat, max_query_len)


_fetch_rows = operator(residency.FETCH_ROWS)


@repeated
def fetch_rows(
    source: PagedCache,
    target: PagedCache,
    miss_slots: Tensor,
    miss_rows: Tensor,
    miss_counts: Tensor,
    *,
    validate: bool = False,
) -> None:
    """Copy rows of a cache to rows of another one, bit for bit.

    ``target[miss_rows[t, i]] = source[miss_slots[t, i]]`` for ``i < miss_counts[t]``, with the
    scales of formats that keep them apart. A slot outside of source gives a row of zeros, and a row
    outside of target is skipped. Other rows of target keep their values.

    A few programs copy all rows, so that attention can run beside them.

    Args:
        source: rows of any format and page size, such as those of a large cache in host memory.
        target: rows of the same format, on pages of one row, written.
        miss_slots: int32, int64 or uint32 ``[T, K]``, slots of source.
        miss_rows: int32, int64 or uint32 ``[T, K]``, slots of target; no row may occur twice.
        miss_counts: int32, int64 or uint32 ``[T]``, leading entries to copy of each list.
        validate: read the integers and refuse slots, rows and counts out of range.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape, device or format; target
            is untouched then.

    Source: this package.

    >>> from sparsemla import FP8_DS_MLA
    >>> large = PagedCache.allocate(FP8_DS_MLA, num_pages=8, page_size=64)
    >>> large.write(torch.tensor([300]), torch.ones(1, 576))
    >>> small = PagedCache.allocate(FP8_DS_MLA, num_pages=4, page_size=1)
    >>> fetch_rows(large, small, torch.tensor([[300]]), torch.tensor([[2]]), torch.tensor([1]))
    >>> small.read(torch.arange(4))[:, 0]
    tensor([0., 0., 1., 0.], dtype=torch.bfloat16)
    """
    check = Checker("fetch_rows")
    check.cache("source", source)
    check.cache("target", target)
    if target.format != source.format:
        raise ValueError(
            f"fetch_rows: target must have format {source.format.name} like source, "
            f"got {target.format.name}"
        )
    if target.page_size != 1:
        raise ValueError(f"fetch_rows: target must have a page_size of 1, got {target.page_size}")
    miss_slots = check.signed("miss_slots", miss_slots, "T K")
    miss_rows = check.signed("miss_rows", miss_rows, "T K")
    miss_counts = check.tensor("miss_counts", miss_counts, "T", INTEGERS)
    if check.validates(validate):
        check.values("miss_counts", miss_counts, 0, miss_slots.shape[1] + 1)
        columns = torch.arange(miss_slots.shape[1], device=miss_slots.device)
        listed = columns < miss_counts[:, None]
        check.values("miss_slots", miss_slots.where(listed, 0), 0, source.num_slots)
        check.values("miss_rows", miss_rows.where(listed, 0), 0, target.num_slots)
    _fetch_rows(FetchRows(miss_slots, miss_rows, miss_counts, source, target))


_forget_seats = operator(residency.FORGET_SEATS)


@repeated
def forget_seats(table: RowTable, seats: Tensor) -> None:
    """Empty seats, for requests that take them.

    Args:
        table: the seats, written.
        seats: int32, int64 or uint32 ``[N]``; those outside of the table are skipped.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: this package.

    >>> table = RowTable.allocate(2, 4)
    >>> forget_seats(table, torch.tensor([1, -1]))
    """
    check = Checker("forget_seats", gradients="all")
    check.kind("table", table, RowTable)
    seats = check.signed("seats", seats, "N")
    for name in ("keys", "rows", "order"):
        check.written(f"table.{name}", getattr(table, name), "seats H", torch.int32)
    _forget_seats(ForgetSeats(seats, table))

"""The records of rows in fast memory: the arguments that the public ops have checked."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.kernels.common.table import ALLOCATED
from sparsemla.residency import RowTable
from sparsemla.shards import ContextShard


class ResolveRows(NamedTuple):
    """Arguments of :func:`sparsemla.resolve_rows`."""

    topk_indices: Tensor
    input_row_offsets: Tensor
    seq_lens: Tensor
    seats: Tensor
    page_table: Tensor
    table: RowTable
    page_size: int
    max_query_len: int
    shard: ContextShard | None = None
    workspace: Tensor | None = None
    stats: Tensor | None = None
    out: Tensor = ALLOCATED
    counts: Tensor = ALLOCATED
    miss_slots: Tensor = ALLOCATED
    miss_rows: Tensor = ALLOCATED
    miss_counts: Tensor = ALLOCATED
    new_counts: Tensor = ALLOCATED


class FetchRows(NamedTuple):
    """Arguments of :func:`sparsemla.fetch_rows`."""

    miss_slots: Tensor
    miss_rows: Tensor
    miss_counts: Tensor
    source: PagedCache
    target: PagedCache


class ForgetSeats(NamedTuple):
    """Arguments of :func:`sparsemla.forget_seats`."""

    seats: Tensor
    table: RowTable


def workspace_bytes(num_requests: int, topk: int, rows_per_seat: int, max_query_len: int) -> int:
    """Bytes that :func:`sparsemla.resolve_rows` uses while it runs.

    For each request: copies of its seat, one or, with several tokens, two; for each row who uses
    it, and the victims before it; and five numbers for each entry of a list.
    """
    copies = 3 * min(max_query_len, 2)
    of_request = (copies + 2) * rows_per_seat + 5 * topk
    return 4 * num_requests * of_request

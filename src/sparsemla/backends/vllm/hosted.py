"""What rows on the host may ask of a GPU beside attention, for the warm-up.

Imports nothing of vLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from sparsemla import (
    CacheFormat,
    ContextShard,
    PagedCache,
    RowTable,
    fetch_rows,
    forget_seats,
    own_positions,
    resolve_rows,
    to_slots,
)
from sparsemla.backends.vllm.compressed import without_memory
from sparsemla.warmup import Sweep


@dataclass(frozen=True)
class HostedLayer:
    """A layer's rows on the host, its hot rows, and the limits of the engine.

    Args:
        cache_format: of a row.
        topk: keys that a token selects.
        num_pages: of the rows on the host.
        page_size: tokens of a page.
        table_width: columns of the page table.
        seats: of the hot rows of a layer.
        all_seats: of the layers that select.
        rows_per_seat: hot rows of a request.
        staged_rows: workspace rows of prefills.
        shares: whether layers share a selection.
        shard: this rank's share of contexts, or None.
        max_tokens: most tokens of a step.
        max_query_len: most tokens of a decode, 1 and its drafts.
    """

    cache_format: CacheFormat
    topk: int
    num_pages: int
    page_size: int
    table_width: int
    seats: int
    all_seats: int
    rows_per_seat: int
    staged_rows: int
    shares: bool
    shard: ContextShard | None
    max_tokens: int
    max_query_len: int

    def sweeps(self) -> Iterator[Sweep]:
        """Decodes of each query length, prefills behind a decode or not, and seats that change."""
        for query_len in {1, self.max_query_len}:
            yield Sweep(functools.partial(self._decode, query_len), self.seats)
        for start in (0, 1):
            limit = self.max_tokens - start
            if limit > 0:
                yield Sweep(functools.partial(self._select, start), limit)
        yield Sweep(self._contexts, self.seats)
        yield Sweep(self._forget, self.seats)

    def _rows(self, num_pages: int, page_size: int = 1) -> PagedCache:
        shape = num_pages, page_size, self.cache_format.row_width
        return PagedCache(
            without_memory(*shape, dtype=self.cache_format.storage_dtype), self.cache_format
        )

    def _table(self, seats: int) -> RowTable:
        shape = seats, self.rows_per_seat
        return RowTable(*(without_memory(*shape) for _ in range(3)))

    def _decode(self, query_len: int, requests: int) -> None:
        """Resolve the selections of requests of equally many tokens."""
        tokens, topk = requests * query_len, self.topk
        missing = without_memory(tokens, topk), without_memory(tokens, topk)
        resolve_rows(
            without_memory(tokens, topk),
            without_memory(requests + 1),
            without_memory(requests),
            without_memory(requests),
            without_memory(requests, self.table_width),
            self._table(self.seats),
            page_size=self.page_size,
            max_query_len=self.max_query_len,
            shard=self.shard,
            out=without_memory(tokens, topk),
            counts=without_memory(tokens),
            miss_slots=missing[0],
            miss_rows=missing[1],
            miss_counts=without_memory(tokens),
            new_counts=without_memory(tokens),
            stats=without_memory(2, dtype=torch.int64),
        )
        host = self._rows(self.num_pages, self.page_size)
        hot = self._rows(self.seats * self.rows_per_seat)
        fetch_rows(host, hot, *missing, without_memory(tokens))
        if self.shares:
            slots, rows = (without_memory(tokens, self.max_query_len) for _ in range(2))
            fetch_rows(host, hot, slots, rows, without_memory(tokens))

    def _select(self, start: int, tokens: int) -> None:
        """Fetch what tokens of prefills select, behind ``start`` decodes."""
        chosen = without_memory(start + tokens, self.topk)[start:]
        if self.shard is not None:
            chosen = own_positions(chosen, shard=self.shard)[0][:, 0]
        ids = without_memory(start + tokens)[start:]
        table = without_memory(start + 1, self.table_width)[start:]
        slots = to_slots(chosen, table, ids, page_size=self.page_size)
        host = self._rows(self.num_pages, self.page_size)
        fetch_rows(
            host,
            self._rows(self.staged_rows),
            slots,
            without_memory(tokens, self.topk),
            without_memory(tokens),
        )
        to_slots(
            chosen,
            table,
            ids,
            page_size=self.page_size,
            workspace_starts=without_memory(1),
            prefill_request_ids=ids,
        )

    def _contexts(self, requests: int) -> None:
        """Fetch whole contexts."""
        columns = self.table_width * self.page_size
        table, ids = without_memory(requests, self.table_width), without_memory(requests)
        positions = without_memory(1, columns).expand(requests, -1)
        slots = to_slots(positions, table, ids, page_size=self.page_size)
        fetch_rows(
            self._rows(self.num_pages, self.page_size),
            self._rows(self.staged_rows),
            slots,
            without_memory(requests, columns),
            without_memory(requests),
        )

    def _forget(self, requests: int) -> None:
        """Forget seats, those of all layers that select in one launch."""
        count = requests * (self.all_seats // self.seats)
        forget_seats(self._table(self.all_seats), without_memory(count))

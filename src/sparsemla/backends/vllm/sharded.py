"""What a selection from index keys that ranks share may ask of a GPU, for the warm-up.

Imports nothing of vLLM.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsemla import INDEX_FP8, ContextShard
from sparsemla.backends.vllm.compressed import Pages
from sparsemla.backends.vllm.exchange import Run, ShardedRows
from sparsemla.kernels import exchange
from sparsemla.kernels.exchange.arguments import (
    MAX_CANDIDATES,
    SLOTS,
    ExchangeRows,
    Inboxes,
    inbox_width,
)
from sparsemla.warmup import Sweep, without_memory

MOST_TOKENS = 2048
"""Of a launch: more than eight for each multiprocessor only take more waves of the same kernels."""


class _Shapes(ContextShard):
    """A share of tensors without memory, with which torch's arithmetic takes milliseconds."""

    def positions(self, rows: Tensor) -> Tensor:
        return rows


@dataclass(frozen=True)
class ShardedIndex:
    """A rank's part of the index cache, and the limits of the engine.

    Args:
        num_ranks: that share it.
        interleave: consecutive tokens of a context that a rank keeps.
        topk: keys that a token selects.
        index_heads: heads of the indexer.
        pages: of this rank's cache.
        max_tokens: most tokens of a step.
        max_requests: most requests of a step.
        max_query_len: most tokens of a decode, 1 and its drafts.
        max_workspace_bytes: of :meth:`ShardedRows.select_topk`.
    """

    num_ranks: int
    interleave: int
    topk: int
    index_heads: int
    pages: Pages
    max_tokens: int
    max_requests: int
    max_query_len: int
    max_workspace_bytes: int

    def sweeps(self) -> Iterator[Sweep]:
        """Requests of equally many tokens, behind another token or not.

        Kernels depend on the tokens and on the pages of the page table. Where one of the two is a
        power of 4 or the most, the other is searched.
        """
        columns = self.pages.columns
        for start in (0, 1):
            tokens = min(self.max_tokens - start, MOST_TOKENS)
            sweep = functools.partial(self._sweep, start=start)
            for pages in _powers(columns):
                yield sweep("query_len", tokens, requests=1, pages=pages)
                for query_len in {1, self.max_query_len}:
                    most = min(self.max_requests, tokens // query_len)
                    yield sweep("requests", most, query_len=query_len, pages=pages)
            for query_len in _powers(tokens):
                yield sweep("pages", columns, requests=1, query_len=query_len)
            # Scores depend on the number of requests, too, but only on classes of sizes.
            for query_len in (2, 3, 4, 5, 7, 8, 16, 32):
                few = min(self.max_requests, tokens // query_len, 17)
                for pages in {min(few_pages, columns) for few_pages in (1, 3, 16, columns)}:
                    yield sweep("requests", few, query_len=query_len, pages=pages)
        if self.num_ranks * inbox_width(self.topk) <= MAX_CANDIDATES:
            yield Sweep(self._exchange, 2)

    def _exchange(self, start: int) -> None:
        """Exchange a token's candidates through symmetric memory, behind ``start - 1`` others."""
        shard = ContextShard(0, self.num_ranks, self.interleave)
        inbox = without_memory(1, SLOTS, self.num_ranks, inbox_width(self.topk), dtype=torch.int64)
        columns = self.pages.columns * self.pages.rows
        exchange.triton.exchange_rows(
            Inboxes(0, (inbox,) * self.num_ranks, without_memory(1)),
            ExchangeRows(
                without_memory(1, columns, dtype=torch.float32),
                without_memory(1, min(self.topk, columns)),
                self.topk,
                shard,
                selected=without_memory(start, self.topk)[start - 1 :],
            ),
        )

    def _sweep(self, size: str, limit: int, **others: int) -> Sweep:
        return Sweep(functools.partial(self._select, size, others), limit)

    def _select(self, name: str, others: dict[str, int], size: int) -> None:
        """Select keys for requests of equally many tokens, behind ``start`` others of one token."""
        sizes = others | {name: size}
        start, requests, query_len = sizes["start"], sizes["requests"], sizes["query_len"]
        tokens = start + requests * query_len
        rows = ShardedRows(
            _Shapes(0, self.num_ranks, 1),
            [Run(slice(start, start + requests), start, query_len)],
            without_memory(tokens),
            self._all_gather,
        )
        rows.select_topk(
            without_memory(tokens, self.index_heads, INDEX_FP8.head_dim, dtype=torch.float8_e4m3fn),
            without_memory(tokens, self.index_heads, dtype=torch.float32),
            self.pages.cache(INDEX_FP8),
            without_memory(start + requests, self.pages.columns)[:, : sizes["pages"]],
            self.topk,
            max_workspace_bytes=self.max_workspace_bytes,
            out=without_memory(tokens, self.topk),
        )

    def _all_gather(self, offer: Tensor) -> Tensor:
        return without_memory(self.num_ranks * offer.shape[0], *offer.shape[1:])


def _powers(limit: int) -> list[int]:
    """Powers of 4 below a limit, and the limit."""
    return [*(4**i for i in range(16) if 4**i < limit), limit]

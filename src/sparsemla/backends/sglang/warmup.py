"""What SGLang's ``dsa`` backend may ask of a GPU, for the warm-up. Imports nothing of SGLang."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.compat import deep_gemm
from sparsemla.formats import BF16_512, BF16_576, INDEX_FP8, CacheFormat
from sparsemla.kernels.common.pools import expand_pools
from sparsemla.ops import select_topk, sparse_decode, sparse_prefill
from sparsemla.warmup import EVERY, Sweep, without_memory

ROW_COUNTS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 256)
"""Rows of a selection: its kernels see classes of them only."""
SIZES = 1, 16, 1024, 1025
"""Keys, or pages of a request, of each class that a kernel of scores sees."""
DIM = INDEX_FP8.head_dim


@dataclass(frozen=True)
class Layers:
    """The attention of a rank, its caches, and the engine's limits.

    Args:
        format: of the latent cache.
        num_heads: query heads of this rank.
        index_heads: heads of the indexer.
        topk: tokens that a token selects.
        pool: tokens of an index key.
        pitches: elements between the RoPE dims of two heads of a query, where a method gets them
            in a tensor of their own; None where it gets whole queries.
        converts: prefills may read converted rows.
        allow_fp8_mma: these prefills permit FP8 MMAs.
        sinks: attention has an ``attn_sink``.
        scores: this package computes the indexer's scores, too.
        num_slots: rows of a layer's cache.
        page_size: tokens of a page of index keys.
        max_tokens: most tokens of a prefill.
        max_requests: most requests of a step.
        drafts: tokens of a request that a step verifies.
    """

    format: CacheFormat
    num_heads: int
    index_heads: int
    topk: int
    pool: int
    pitches: tuple[int | None, ...]
    converts: bool
    allow_fp8_mma: bool
    sinks: bool
    scores: bool
    num_slots: int
    page_size: int
    max_tokens: int
    max_requests: int
    drafts: int

    def sweeps(self) -> Iterator[Sweep]:
        """All ops, at every number of tokens, rows and columns."""
        caches = [(self.format, self.num_slots, False)]
        if self.converts:  # the rows of a batch are as many as its contexts have
            converted = BF16_576 if self.format.head_dim == BF16_576.head_dim else BF16_512
            caches += [(converted, rows, self.allow_fp8_mma) for rows in (1024, 1025)]
        tokens = max(self.max_tokens, self.max_requests * self.drafts)
        for pitch in self.pitches:
            decode = functools.partial(self._decode, pitch)
            yield Sweep(decode, self.max_requests * self.drafts, EVERY)
            for kind in caches:
                yield Sweep(functools.partial(self._prefill, pitch, *kind), tokens)
        for rows in (*(count for count in ROW_COUNTS if count < tokens), tokens):
            select = self._select if self.pool == 1 else self._select_pools
            yield Sweep(functools.partial(select, rows), -(-self.num_slots // self.pool))
        if self.scores:
            for size in SIZES:
                yield Sweep(functools.partial(self._score_contexts, size), tokens)
                yield Sweep(functools.partial(self._score_pages, size), self.max_requests)

    @property
    def width(self) -> int:
        """Entries of a token's list: the tokens of an open pool come behind the selected ones."""
        return self.topk + self.pool - 1

    def _attention(self, pitch: int | None, *tokens: int) -> tuple[Tensor, dict[str, Any]]:
        """Queries, and the other arguments of both ops."""
        heads = *tokens, self.num_heads
        options: dict[str, Any] = {
            "softmax_scale": 1.0,
            "topk_lengths": without_memory(tokens[0]),
            "attn_sink": without_memory(heads[-1], dtype=torch.float32) if self.sinks else None,
        }
        if pitch is None:
            return without_memory(*heads, self.format.head_dim, dtype=torch.bfloat16), options
        rope = without_memory(*heads, pitch, dtype=torch.bfloat16)[..., -64:]
        return without_memory(*heads, 512, dtype=torch.bfloat16), options | {"q_rope": rope}

    def _decode(self, pitch: int | None, tokens: int) -> None:
        q, options = self._attention(pitch, tokens, 1)
        cache = PagedCache.allocate(self.format, self.num_slots, 1, device="meta")
        sparse_decode(q, cache, without_memory(tokens, 1, self.width), **options)

    def _prefill(
        self, pitch: int | None, format: CacheFormat, rows: int, fp8_mma: bool, tokens: int
    ) -> None:
        q, options = self._attention(pitch, tokens)
        cache = PagedCache.allocate(format, rows, 1, device="meta")
        sparse_prefill(
            q, cache, without_memory(tokens, self.width), allow_fp8_mma=fp8_mma, **options
        )

    def _select(self, rows: int, columns: int) -> None:
        """Selections of decodes and of prefills, as slots and as positions."""
        scores = without_memory(rows, columns, dtype=torch.float32)
        pages: dict[str, Any] = {
            "page_table": without_memory(rows, 2),
            "request_ids": without_memory(rows),
            "page_size": self.page_size,
        }
        for starts in (None, without_memory(rows)):
            ranges: dict[str, Any] = {"row_starts": starts, "row_ends": without_memory(rows)}
            select_topk(scores, topk=self.topk, **ranges)
            select_topk(scores, topk=self.topk, **ranges, **pages)

    def _select_pools(self, rows: int, columns: int) -> None:
        """Selections of pools, and lists of their tokens: positions, slots, and rows."""
        count = without_memory(rows)
        for starts in (None, count):
            pools = select_topk(
                without_memory(rows, columns, dtype=torch.float32),
                topk=self.topk // self.pool,
                row_starts=starts,
                row_ends=count,
            )
        table = {"table": without_memory(rows, 2)}
        places: list[dict[str, Any]] = [{}, table, table | {"request_ids": count}]
        for place in (*places, {"offsets": count}):
            for open_pool in (0, self.pool - 1):
                expand_pools(
                    pools,
                    count,
                    self.pool,
                    without_memory(rows, self.topk + open_pool),
                    lengths=count if open_pool else None,
                    **place,
                )

    def _score_contexts(self, keys: int, tokens: int) -> None:
        deep_gemm.fp8_mqa_logits(
            without_memory(tokens, self.index_heads, DIM, dtype=torch.float8_e4m3fn),
            (
                without_memory(keys, DIM, dtype=torch.float8_e4m3fn),
                without_memory(keys, dtype=torch.float32),
            ),
            without_memory(tokens, self.index_heads, dtype=torch.float32),
            without_memory(tokens),
            without_memory(tokens),
        )

    def _score_pages(self, width: int, requests: int) -> None:
        keys = without_memory(
            self.num_slots // self.page_size, self.page_size, 1, DIM + 4, dtype=torch.uint8
        )
        for tokens in {1, self.drafts}:
            deep_gemm.fp8_paged_mqa_logits(
                without_memory(requests, tokens, self.index_heads, DIM, dtype=torch.float8_e4m3fn),
                keys,
                without_memory(requests * tokens, self.index_heads, dtype=torch.float32),
                without_memory(requests, tokens),
                without_memory(requests, width),
                None,
                width * self.page_size,
            )

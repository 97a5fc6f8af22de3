"""Prefills of DeepSeek-V4 and V4.1 over rows converted to bfloat16 first. Imports nothing of vLLM.

A chunk of requests converts what its tokens see, raw rows and entries, into two parts of a
workspace that all layers share. Attention then reads both parts.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparsemla import (
    FP8_584,
    CacheFormat,
    PagedCache,
    gather_dequant,
    prefill_workspace_rows,
    sparse_prefill,
    split_prefill_chunks,
    to_slots,
)

ROW_BYTES = 2 * FP8_584.head_dim
"""Bytes of a converted row."""
MULTIPLE = 16
"""Each part of the workspace has a multiple of so many rows, for which Triton has one kernel."""


@dataclass(frozen=True)
class Rule:
    """When prefills are faster over converted rows, in the layers of one ratio.

    Args:
        ratio: tokens of an entry; 0 without entries.
        num_heads: query heads of this rank.
        window: raw rows that a token attends to.
        topk: entries that a token selects; None if it attends to all.
        max_tokens: most tokens of a step.
        max_seq_len: most tokens of a request.
        device: of the caches.
        format: of raw rows and entries.
    """

    ratio: int
    num_heads: int
    window: int
    topk: int | None
    max_tokens: int
    max_seq_len: int
    device: torch.device
    format: CacheFormat = FP8_584

    def raw_rows(self, query_len: int, seq_len: int) -> int:
        """Raw rows that the tokens of a request see."""
        return query_len + min(max(seq_len - query_len, 0), self.window - 1)

    def entries(self, seq_len: int) -> int:
        """Entries that the last token of a request sees."""
        return seq_len // self.ratio if self.ratio else 0

    @property
    def most_listed(self) -> int:
        """Most entries that a token attends to."""
        return self.entries(self.max_seq_len) if self.topk is None else self.topk

    @property
    def most_rows(self) -> int:
        """Rows of the longest request."""
        return self.max_tokens + self.window - 1 + self.entries(self.max_seq_len)

    def chunks(self, query_lens: Sequence[int], seq_lens: Sequence[int]) -> list[tuple[int, int]]:
        """The first request of each chunk of prefills and the one behind its last.

        Without chunks the caches are read in place.
        """
        rows = [
            self.raw_rows(m, n) + self.entries(n) for m, n in zip(query_lens, seq_lens, strict=True)
        ]
        listed = min(max(map(self.entries, seq_lens)), self.most_listed)
        num_rows = prefill_workspace_rows(
            query_lens,
            rows,
            cache_format=self.format,
            num_heads=self.num_heads,
            topk=self.window + listed,
            max_rows=self.most_rows,
            device=self.device,
        )
        return [] if num_rows is None else split_prefill_chunks(rows, num_rows)


@functools.cache
def reserved_rows(rule: Rule) -> int:
    """Workspace rows for every step, 0 if none gains from a conversion.

    For a given number of tokens a request gains most with as many entries as a token attends to:
    a shorter one attends to fewer, and a longer one converts some in vain.
    """
    length = min(max(rule.most_listed * rule.ratio, rule.window), rule.max_seq_len)
    steps = range(rule.max_tokens, 0, -1)
    if any(rule.chunks([tokens], [max(tokens, length)]) for tokens in steps):
        return rule.most_rows + 2 * MULTIPLE
    return 0


@dataclass(frozen=True)
class Part:
    """The rows of one cache in the workspace.

    Args:
        lengths: int32 ``[n]``, rows of each request.
        starts: int32 ``[n]``, first workspace row of each request.
        num_rows: rows of the part.
        firsts: int32 ``[n]``, position of each request's first row; default 0.
    """

    lengths: Tensor
    starts: Tensor
    num_rows: int
    firsts: Tensor | None = None

    @classmethod
    def of(cls, lengths: Tensor, most: Sequence[int], firsts: Tensor | None = None) -> Part:
        """A part with room for ``most`` rows of each request, which the host knows."""
        *starts, end = itertools.accumulate(most, initial=0)
        on_device = torch.tensor(starts, dtype=torch.int32, device="cpu").to(
            lengths.device, non_blocking=True
        )
        return cls(lengths, on_device, -(-max(end, 1) // MULTIPLE) * MULTIPLE, firsts)

    def convert(self, cache: PagedCache, page_table: Tensor, out: Tensor) -> None:
        """Write the rows of a cache to ``out [num_rows, D]``."""
        gather_dequant(
            cache, page_table, self.lengths, self.starts, seq_starts=self.firsts, out=out
        )


@dataclass(frozen=True)
class Conversion:
    """A chunk of n prefills with rows that are converted together.

    Args:
        tokens: their query tokens in the batch.
        requests: their numbers in the batch.
        request_ids: int32 ``[tokens]``, request of each token, counted from the first of the chunk.
        raw: the raw rows.
        window: int32 ``[tokens, window]``, rows of that part that each token attends to.
        window_lengths: int32 ``[tokens]``, their number.
        entries: the entries, if the layer has some.
    """

    tokens: slice
    requests: slice
    request_ids: Tensor
    raw: Part
    window: Tensor
    window_lengths: Tensor
    entries: Part | None

    @property
    def num_rows(self) -> int:
        """Rows of the workspace."""
        return self.raw.num_rows + (0 if self.entries is None else self.entries.num_rows)


class Chosen(NamedTuple):
    """Entries that the tokens of a chunk attend to.

    Args:
        cache: the entries of all requests.
        page_table: int32 ``[B, W]``, of the batch.
        indices: int32 ``[tokens, K]``, numbers of entries in the token's request, -1 for none.
        lengths: int32 ``[tokens]``, leading entries to use.
    """

    cache: PagedCache
    page_table: Tensor
    indices: Tensor
    lengths: Tensor


def attend(
    conversion: Conversion,
    q: Tensor,
    raw: PagedCache,
    page_table: Tensor,
    chosen: Chosen | None,
    workspace: Tensor,
    *,
    softmax_scale: float,
    attn_sink: Tensor,
    out: Tensor,
) -> None:
    """Convert the rows of a chunk, and compute attention over them.

    Args:
        conversion: the chunk.
        q: ``[T, H, 512]`` bfloat16, of the batch.
        raw: the raw rows of all requests.
        page_table: int32 ``[B, W]``, of the raw rows.
        chosen: the entries, if the layer has some.
        workspace: bfloat16 ``[conversion.num_rows, 512]``.
        softmax_scale, attn_sink: of :func:`sparsemla.sparse_prefill`.
        out: ``[T, H, 512]``, of the batch; the tokens of the chunk are written.
    """
    tokens, requests = conversion.tokens, conversion.requests
    rows = workspace[: conversion.raw.num_rows]
    conversion.raw.convert(raw, page_table[requests], rows)
    entries = indices = lengths = None
    if chosen is not None and conversion.entries is not None:
        part, table = conversion.entries, chosen.page_table[requests]
        entries = workspace[conversion.raw.num_rows :]
        part.convert(chosen.cache, table, entries)
        indices = to_slots(
            chosen.indices,
            table,
            conversion.request_ids,
            page_size=chosen.cache.page_size,
            workspace_starts=part.starts,
            prefill_request_ids=conversion.request_ids,
        )
        lengths = chosen.lengths
    sparse_prefill(
        q[tokens],
        rows,
        conversion.window,
        topk_lengths=conversion.window_lengths,
        extra_cache=entries,
        extra_topk_indices=indices,
        extra_topk_lengths=lengths,
        softmax_scale=softmax_scale,
        attn_sink=attn_sink,
        out=out[tokens],
    )

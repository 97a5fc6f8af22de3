"""The inboxes of ranks, and the arguments of an exchange; without an import of Triton."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsemla.kernels.common.integers import next_power_of_2
from sparsemla.shards import ContextShard

MAX_CANDIDATES = 16384
"""Most candidates of a row, of all ranks, that the registers of one program hold."""
SLOTS = 2
"""Buffers of a row in an inbox, which take turns."""


def inbox_width(max_candidates: int) -> int:
    """Words that a rank sends for a row, a power of two."""
    return next_power_of_2(max(max_candidates, 32))


class Inboxes(NamedTuple):
    """The memory into which ranks write each other's candidates.

    Args:
        rank: this rank.
        peers: the inboxes of ranks ``rank + 1``, ``rank + 2``, ..., ``rank``, modulo their number:
            int64 ``[max_tokens, SLOTS, R, width]``. The last is this rank's.
        epochs: int32 ``[max_tokens]``, exchanges of each row so far, modulo 4; this rank's.
    """

    rank: int
    peers: tuple[Tensor, ...]
    epochs: Tensor


class ExchangeRows(NamedTuple):
    """Arguments of an exchange.

    Args:
        values: float32 ``[T, C]``: with ``shard`` the scores of this rank's keys, otherwise of
            candidates.
        rows: int32 or int64 ``[T, N]``: with ``shard`` columns of ``values``, otherwise the
            positions of candidates; negative for none.
        topk: k.
        shard: the rank's share of every context.
        page_table: int32 or int64 ``[B, W]``, this rank's.
        request_ids: int32 or int64 ``[T]``.
        page_size: tokens of a page.
        selected: int32 ``[T, k]``, written: the positions of the best of all ranks, ascending.
        out: int32 ``[T, P, k]``, written: this rank's of them, as rows, or with a page table slots.
        counts: int32 ``[T, P]``, written: how many these are.
    """

    values: Tensor
    rows: Tensor
    topk: int
    shard: ContextShard | None = None
    page_table: Tensor | None = None
    request_ids: Tensor | None = None
    page_size: int | None = None
    selected: Tensor | None = None
    out: Tensor | None = None
    counts: Tensor | None = None

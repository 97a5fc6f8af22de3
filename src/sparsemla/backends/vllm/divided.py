"""Selection for rows of prefills that ranks divide: vLLM's tensor parallelism (TP).

Each rank has all index keys and all index queries. So a rank can select keys for a part of the
query tokens, the *rows*, and the ranks gather the lists. Every rank gets the selection that it
would make alone, because the scores of a row do not depend on other rows.

Later rows of a prompt see more keys. Therefore blocks of rows are dealt out in turn. Each rank then
has equally many rows, whose lists one all-gather of equal parts brings, and nearly equally many
keys: of two ranks' rows, those of the last rank are at most ``(num_ranks - 1) * BLOCK_ROWS``
positions later. A block of a request is to the indexer a request of its own, which ends earlier.

This module imports nothing of vLLM: the caller brings the collective.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from sparsemla import PagedCache, indexer_topk

BLOCK_ROWS = 64
"""Most rows of a block; a multiple of those that a kernel scores together."""
EXCHANGE_KEYS = 1 << 22
"""Keys that a rank scores in the time that an exchange takes for any number of rows."""


class Rule(NamedTuple):
    """When ranks divide the rows of a step's prefills.

    Attributes:
        row_keys: mean number of keys of a row from which it pays off, in a step of many rows: a
            rank scores so many keys in the time that the exchange of a list takes.
        min_rows: number of rows that decides alone; None to weigh scores against the exchange.
    """

    row_keys: int
    min_rows: int | None = None

    @staticmethod
    def default_row_keys(topk: int, index_heads: int) -> int:
        """1.5 keys for each entry of a list with 64 heads, and more keys with fewer heads.

        On an H200 scores and selection take 17.4 ps a key with 64 heads, of which two ranks save a
        half and eight 7/8. An entry is estimated at 10 ps with two ranks and 15 with eight: 300
        GB/s over NVLink, and a copy. So the crossings are at 1.1 and 1.0 keys.
        """
        return max(96 * topk // index_heads, 1)

    def divides(self, rows: int, keys: int) -> bool:
        """Whether ranks divide so many rows, which see so many keys in total."""
        if self.min_rows is not None:
            return rows >= self.min_rows
        return keys >= self.row_keys * rows + EXCHANGE_KEYS


class Piece(NamedTuple):
    """Consecutive rows of one request.

    Attributes:
        request: its index in the batch.
        rows: number of rows.
        behind: query tokens of the request behind them.
    """

    request: int
    rows: int
    behind: int


@dataclass(frozen=True)
class Division:
    """The rows of a batch, dealt out to ranks.

    Attributes:
        rank: this one.
        num_ranks: that divide the rows.
        offsets: first query token of each request of the batch, and the one behind the last.
        first_request: its first query token is the first row, and the batch ends with the last.
    """

    rank: int
    num_ranks: int
    offsets: Sequence[int]
    first_request: int

    @property
    def rows(self) -> slice:
        """Query tokens that are divided."""
        return slice(self.offsets[self.first_request], self.offsets[-1])

    @property
    def num_rows(self) -> int:
        """Their number."""
        return self.rows.stop - self.rows.start

    @cached_property
    def num_blocks(self) -> int:
        """Blocks of a rank; the last ones may be empty."""
        return -(-self.num_rows // (self.num_ranks * BLOCK_ROWS))

    @cached_property
    def block(self) -> int:
        """Rows of a block."""
        return -(-self.num_rows // (self.num_ranks * self.num_blocks))

    @staticmethod
    def most_pieces(rows: int, requests: int) -> int:
        """Most pieces of a rank, for at most so many rows and requests of a step."""
        return -(-rows // (2 * BLOCK_ROWS)) + requests

    def tokens(self) -> Tensor:
        """Query tokens of this rank, int32 ``[num_blocks * block]``; the last one repeats."""
        own = torch.arange(self.num_blocks * self.block, dtype=torch.int32, device="cpu")
        block = own // self.block * self.num_ranks + self.rank
        tokens = self.rows.start + block * self.block + own % self.block
        return tokens.clamp(max=self.rows.stop - 1)

    def pieces(self) -> Iterator[Piece]:
        """The pieces of requests among this rank's rows, which come first of its tokens."""
        start, stop = self.rows.start, self.rows.stop
        turn = self.num_ranks * self.block
        for begin in range(start + self.rank * self.block, stop, turn):
            end = min(begin + self.block, stop)
            request = bisect.bisect_right(self.offsets, begin) - 1
            while begin < end:
                behind = self.offsets[request + 1]
                rows = min(end, behind) - begin
                if rows:
                    yield Piece(request, rows, behind - begin - rows)
                begin, request = begin + rows, request + 1

    def restore(self, lists: Tensor, out: Tensor) -> None:
        """Write the lists of all ranks, one rank after the other, in the order of rows.

        Args:
            lists: int32 ``[num_ranks * num_blocks * block, topk]``.
            out: int32 ``[num_rows, topk]``, written.
        """
        turns = lists.unflatten(0, (self.num_ranks, self.num_blocks, self.block)).transpose(0, 1)
        whole = self.num_rows // (self.num_ranks * self.block)
        in_whole = whole * self.num_ranks * self.block
        out[:in_whole].unflatten(0, (whole, self.num_ranks, self.block)).copy_(turns[:whole])
        if in_whole < self.num_rows:
            out[in_whole:] = turns[whole:].flatten(0, 2)[: self.num_rows - in_whole]


@dataclass(frozen=True)
class DividedRows:
    """This rank's part of the rows of a batch, for all layers.

    Attributes:
        division: of the rows.
        tokens: int32 ``[N]``, query tokens of this rank.
        offsets: int32 ``[P + 1]``, prefix sums of the rows of its pieces.
        seq_lens: int32 ``[P]``, tokens of a piece's request up to the last row of the piece.
        page_table: int32 ``[P, W]``, pages of its request.
        all_gather: joins a tensor of each rank along their first dim, in the order of ranks.
    """

    division: Division
    tokens: Tensor
    offsets: Tensor
    seq_lens: Tensor
    page_table: Tensor
    all_gather: Callable[[Tensor], Tensor]

    @classmethod
    def of(
        cls,
        division: Division,
        seq_lens: Tensor,
        page_table: Tensor,
        all_gather: Callable[[Tensor], Tensor],
    ) -> DividedRows:
        """The part of a rank.

        Args:
            division: of the rows.
            seq_lens: int32 ``[B]``, tokens of each request, on the device.
            page_table: int32 ``[B, W]``.
            all_gather: see the class.
        """
        tokens, pieces = division.tokens(), list(division.pieces())
        offsets = [0, *itertools.accumulate(piece.rows for piece in pieces)]
        requests = [piece.request for piece in pieces]
        behind = [piece.behind for piece in pieces]
        # Offsets first: a kernel is compiled for their alignment.
        sizes = len(offsets), len(requests), len(behind), len(tokens)
        on_host = torch.tensor([*offsets, *requests, *behind], dtype=torch.int32, device="cpu")
        on_device = torch.cat([on_host, tokens]).to(seq_lens.device, non_blocking=True)
        starts, indices, ends, tokens = on_device.split(sizes)
        return cls(
            division,
            tokens,
            starts,
            seq_lens[indices] - ends,
            page_table[indices],
            all_gather,
        )

    def select_topk(
        self,
        q: Tensor,
        weights: Tensor,
        cache: PagedCache,
        topk: int,
        *,
        columns: int,
        ratio: int,
        max_workspace_bytes: int,
        out: Tensor,
    ) -> None:
        """:func:`sparsemla.indexer_topk` for all rows.

        All ranks must call it for the same batch: collectives of all ranks have to match.

        Args:
            q: e4m3 ``[T, HI, 128]``, of the batch.
            weights: float32 ``[T, HI]``.
            cache: the index keys.
            topk: k.
            columns: of the page table that are read.
            ratio: tokens of a key.
            max_workspace_bytes: bound on the memory of the scores.
            out: int32 ``[T, topk]``, of the batch; the rows are written.
        """
        lists = self.tokens.new_empty(len(self.tokens), topk)
        if len(self.seq_lens):
            bytes_of_tokens = q.view(torch.int64)  # few types of data can be indexed
            indexer_topk(
                bytes_of_tokens[self.tokens].view(q.dtype),
                weights[self.tokens],
                cache,
                self.offsets,
                self.seq_lens,
                self.page_table[:, :columns],
                topk=topk,
                ratio=ratio,
                max_workspace_bytes=max_workspace_bytes,
                out=lists,
            )
        self.division.restore(self.all_gather(lists), out[self.division.rows])

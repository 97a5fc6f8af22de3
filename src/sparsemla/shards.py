"""How the ranks of a context-parallel group share the positions of every context."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsemla.validation import LIMIT, check_integer, check_integers


@dataclass(frozen=True)
class ContextShard:
    """A rank's share of every context.

    Position ``p`` belongs to rank ``p // interleave % num_ranks``, which keeps its positions in
    ascending order as its rows 0, 1, ....

    With ``parts`` attention is computed over parts of a context that do not depend on the number of
    ranks: ``p`` belongs to part ``p // interleave % parts``, and rank ``r`` has the parts ``r``,
    ``r + num_ranks``, .... Where a row is stored does not depend on ``parts``.

    Args:
        rank: in the context-parallel group.
        num_ranks: of the group.
        interleave: consecutive positions that one rank keeps.
        parts: of a context, a multiple of ``num_ranks``; default one for each rank.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or out of range.

    >>> shard = ContextShard(rank=1, num_ranks=2, interleave=2, parts=4)
    >>> positions = torch.arange(12)
    >>> shard.owner(positions).tolist()
    [0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1, 1]
    >>> shard.to_local(positions).tolist()
    [-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5]
    >>> shard.positions(torch.arange(6)).tolist()
    [2, 3, 6, 7, 10, 11]
    >>> shard.own_parts, shard.part(positions).tolist()
    (range(1, 4, 2), [0, 0, 1, 1, 2, 2, 3, 3, 0, 0, 1, 1])
    """

    rank: int
    num_ranks: int
    interleave: int = 1
    parts: int | None = None

    def __post_init__(self) -> None:
        check_integer("num_ranks", self.num_ranks, 1)
        check_integer("rank", self.rank, 0, self.num_ranks)
        if self.parts is not None:
            check_integer("parts", self.parts, 1)
            if self.parts % self.num_ranks:
                raise ValueError(
                    f"parts must be a multiple of num_ranks = {self.num_ranks}, got {self.parts}"
                )
        # A turn of all parts is computed with in 32 bits.
        check_integer("interleave", self.interleave, 1, max(LIMIT // self.num_parts, 2))
        for name, value in vars(self).items():
            if value is not None:
                object.__setattr__(self, name, int(value))  # of numpy's integers, too

    @classmethod
    def unchecked(
        cls, rank: int, num_ranks: int, interleave: int, parts: int | None
    ) -> ContextShard:
        """The share of checked numbers; skips all checks."""
        shard = object.__new__(cls)
        vars(shard).update(rank=rank, num_ranks=num_ranks, interleave=interleave, parts=parts)
        return shard

    @property
    def num_parts(self) -> int:
        """Parts of a context."""
        return self.num_ranks if self.parts is None else self.parts

    @property
    def own_parts(self) -> range:
        """This rank's parts."""
        return range(self.rank, self.num_parts, self.num_ranks)

    def lengths(self, seq_lens: Tensor) -> Tensor:
        """How many of the first ``seq_lens`` positions this rank keeps.

        Args:
            seq_lens: int32, int64 or uint32, of any shape.
        """
        seq_lens = _signed("seq_lens", seq_lens)
        whole = seq_lens // (self.interleave * self.num_ranks) * self.interleave
        rest = seq_lens - whole * self.num_ranks - self.rank * self.interleave
        return whole + rest.clamp(0, self.interleave)

    def longest(self, seq_len: int) -> int:
        """How many of the first ``seq_len`` positions the rank with most of them keeps."""
        check_integer("seq_len", seq_len)
        turn = self.interleave * self.num_ranks
        return seq_len // turn * self.interleave + min(seq_len % turn, self.interleave)

    def longest_context(self, num_rows: int) -> int:
        """The longest context of which no rank keeps more than ``num_rows`` positions.

        >>> shard = ContextShard(rank=1, num_ranks=4, interleave=64)
        >>> shard.longest_context(100), shard.longest(292), shard.longest(293)
        (292, 100, 101)
        """
        check_integer("num_rows", num_rows)
        own = num_rows // self.interleave * self.interleave
        return own * self.num_ranks + num_rows % self.interleave

    def positions(self, rows: Tensor) -> Tensor:
        """Positions of rows of this rank; -1 of negative rows.

        Args:
            rows: int32, int64 or uint32, of any shape.
        """
        rows = _signed("rows", rows)
        # Few launches, as it is part of every selection: a row moves by the turns of other ranks.
        others = self.interleave * (self.num_ranks - 1)
        positions = torch.add(rows, rows // self.interleave, alpha=others)
        return positions.add_(self.rank * self.interleave).masked_fill_(rows < 0, -1)

    def owner(self, positions: Tensor) -> Tensor:
        """The ranks that keep positions; -1 for negative positions.

        Args:
            positions: int32, int64 or uint32, of any shape.
        """
        positions = _signed("positions", positions)
        return torch.where(positions < 0, -1, positions // self.interleave % self.num_ranks)

    def part(self, positions: Tensor) -> Tensor:
        """The parts of positions; -1 for negative positions.

        Args:
            positions: int32, int64 or uint32, of any shape.
        """
        positions = _signed("positions", positions)
        return torch.where(positions < 0, -1, positions // self.interleave % self.num_parts)

    def to_local(self, positions: Tensor) -> Tensor:
        """The rows of positions on this rank; -1 for those of other ranks and negative ones.

        Args:
            positions: int32, int64 or uint32, of any shape.
        """
        positions = _signed("positions", positions)
        turn = positions // self.interleave
        rows = turn // self.num_ranks * self.interleave + positions % self.interleave
        return torch.where((positions >= 0) & (turn % self.num_ranks == self.rank), rows, -1)


def _signed(name: str, tensor: Tensor) -> Tensor:
    """Integers that torch computes with; uint32 as int32, so that 2^32 - 1 is -1."""
    check_integers(name, tensor)
    return tensor.view(torch.int32) if tensor.dtype == torch.uint32 else tensor

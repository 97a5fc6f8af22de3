"""The tokens of a training forward: sequences in rows of a batch, padded or packed.

Shapes: B rows of the batch, S columns, T tokens (the real columns), HI and DI indexer heads and
dims, K entries of a list.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemla.backends.transformers.step import Tokens

Stage: TypeAlias = Literal["dense", "warmup", "sparse"]
STAGES: tuple[Stage, ...] = get_args(Stage)


class Index(NamedTuple):
    """What an indexer makes of the tokens, and what is selected by it.

    Args:
        iq: queries ``[T, HI, DI]``.
        weights: float32 ``[T, HI]``, with every factor folded in.
        ik: keys ``[T, DI]``.
        topk_indices: int32 ``[T, K]``, rows of the step; None if attention is dense.
        scores: float32 ``[T, K]``, differentiable; None without a list or without a loss.
    """

    iq: Tensor
    weights: Tensor
    ik: Tensor
    topk_indices: Tensor | None
    scores: Tensor | None


class Results:
    """What the layers of a forward leave behind.

    No dataclass: FSDP copies those that hold tensors with a graph, on their way to each layer.
    Under activation checkpointing a layer runs again: what the first run left stays.

    Attributes:
        indexes: the results of indexers that later layers share, by layer.
        losses: the indexer's loss in each layer.
        selections: the selection of each layer with an indexer, filled if recorded.
    """

    def __init__(self) -> None:
        self.indexes: dict[int, Index] = {}
        self.losses: dict[int, Tensor] = {}
        self.selections: dict[int, Tensor] = {}


@dataclass(eq=False, kw_only=True)
class TrainingStep(Tokens):
    """One forward of the model, passed to the attention modules as an extra argument.

    The tokens of all sequences are the rows 0 to T - 1, sequence after sequence.

    Args:
        tokens: see :class:`Tokens`.
        lengths: tokens of each sequence.
        row_starts, row_ends: int32 ``[T]``, the rows that a token sees.
        stage: see :class:`TrainingAttention`.
        learns: whether indexers get a loss.
        replayed: selections by layer, as recorded; empty for the indexers' own.
        results: filled by the layers.
    """

    lengths: tuple[int, ...]
    row_starts: Tensor
    row_ends: Tensor
    stage: Stage
    learns: bool
    replayed: Mapping[int, Tensor]
    results: Results

    def attends_to_all(self, topk: int) -> bool:
        """Whether attention is dense: by the stage, or because ``topk`` selects every token."""
        return self.stage != "sparse" or (not self.replayed and max(self.lengths) <= topk)

    def rows(self, positions: Tensor) -> Tensor:
        """Rows of the step for positions ``[T, K]`` in each token's sequence; others become -1."""
        starts = self.row_starts.to(positions.device)[:, None]
        own = self.row_ends.to(positions.device)[:, None]
        rows = positions + starts
        return torch.where((positions >= 0) & (rows < own), rows, -1).int()

    def positions(self, rows: Tensor) -> Tensor:
        """The inverse of :meth:`rows`."""
        return torch.where(rows < 0, -1, rows - self.row_starts.to(rows.device)[:, None])

    def everything(self, device: torch.device) -> Tensor:
        """A list of all rows that each token sees."""
        columns = torch.arange(max(self.lengths), dtype=torch.int32, device=device)
        return self.rows(columns.expand(self.row_starts.shape[0], -1))


def find_sequences(
    given: Tensor, attention_mask: object, position_ids: Tensor | None, cu_seq_lens: Tensor | None
) -> tuple[Tensor | None, tuple[int, ...]]:
    """The real columns of a batch, and the lengths of its sequences.

    A row is a sequence. Without a mask it may be several: ``cu_seq_lens`` says where they start,
    or else positions that do not continue those before, as in transformers' masks.
    """
    batch_size, num_columns = given.shape[:2]
    if attention_mask is not None:
        return _padded(given, attention_mask, position_ids)
    if cu_seq_lens is not None:
        ends = cu_seq_lens.tolist()
        lengths = [last - first for first, last in itertools.pairwise(ends)]
        if batch_size != 1 or [ends[0], ends[-1]] != [0, num_columns] or min(lengths) < 1:
            raise ValueError(
                f"cu_seq_lens_q must ascend from 0 to the {num_columns} columns of one row, "
                f"got {ends} for {batch_size} rows"
            )
        return None, tuple(lengths)
    if position_ids is None:
        return None, (num_columns,) * batch_size
    restarts = position_ids.expand(batch_size, num_columns).diff(dim=1) != 1
    firsts = F.pad(restarts, (1, 0), value=True).flatten().nonzero()[:, 0].tolist()
    bounds = itertools.pairwise([*firsts, batch_size * num_columns])
    return None, tuple(last - first for first, last in bounds)


def _padded(
    given: Tensor, attention_mask: object, position_ids: Tensor | None
) -> tuple[Tensor | None, tuple[int, ...]]:
    """The real columns of a batch with padding, and the number of them in each row."""
    shape = list(given.shape[:2])
    if not isinstance(attention_mask, Tensor) or list(attention_mask.shape) != shape:
        got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else None
        raise ValueError(
            f"attention_mask must be None or have shape [batch, columns] = {shape}, "
            f"got {type(attention_mask).__name__ if got is None else got}"
        )
    real = attention_mask.to(given.device) != 0
    lengths = tuple(length for length in real.sum(1).tolist() if length)
    if not lengths:
        raise ValueError("attention_mask must have a real token, got zeros only")
    if position_ids is not None:
        rows = position_ids.expand(*shape).to(real.device)
        if any((row[kept].diff() <= 0).any() for row, kept in zip(rows, real, strict=True)):
            raise ValueError(
                "position_ids must ascend in each row where attention_mask is given: leave the "
                "mask out for sequences that are packed into a row"
            )
    return (None if real.all() else real.flatten().nonzero()[:, 0]), lengths


def first_rows(lengths: Sequence[int], device: torch.device) -> Tensor:
    """int32 ``[T]``, the first row of each token's sequence."""
    first = [0, *itertools.accumulate(lengths)][:-1]
    counts = torch.tensor(lengths, device=device)
    starts = torch.tensor(first, dtype=torch.int32, device=device)
    return starts.repeat_interleave(counts, output_size=sum(lengths))

"""The sequences of a forward, in rows of a batch, padded or packed.

Shapes: B rows of the batch, S columns, T tokens (the real columns), HI and DI indexer heads and
dims, K entries of a list.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from sparsemla.backends.transformers.step import Tokens
from sparsemla.validation import check_integer, check_integers

Stage: TypeAlias = Literal["dense", "warmup", "sparse"]
STAGES: tuple[Stage, ...] = get_args(Stage)

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Keywords of transformers that say where the sequences of a row start."""


class Index(NamedTuple):
    """What an indexer makes of the tokens, and what is selected by it.

    Args:
        index_q: queries ``[T, HI, DI]``.
        weights: float32 ``[T, HI]``, with every factor folded in.
        index_k: keys ``[T, DI]``.
        topk_indices: int32 ``[T, K]``, rows of the step; None if attention is dense.
        scores: float32 ``[T, K]``, differentiable; None without a list or without a loss.
    """

    index_q: Tensor
    weights: Tensor
    index_k: Tensor
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
    given: Tensor,
    attention_mask: object,
    position_ids: Tensor | None,
    boundaries: Mapping[str, object],
    *,
    gaps: bool = False,
) -> tuple[Tensor | None, tuple[int, ...]]:
    """The real columns of a batch, and the lengths of its sequences.

    A row is a sequence. Without padding it may be several: ``boundaries`` say where they start, or
    else, without a mask, positions that do not continue those before, as in transformers' masks.

    Args:
        given: ``[B, S]`` or ``[B, S, hidden]``.
        attention_mask: ``[B, S]`` or None.
        position_ids: ``[B, S]`` or ``[1, S]``; None for transformers' own.
        boundaries: keywords of :data:`BOUNDARIES` that are given.
        gaps: whether positions may leave numbers out in a sequence.

    Raises:
        TypeError: a boundary of another kind.
        ValueError: a mask or a boundary of another shape, or arguments that contradict each other.
    """
    shape = given.shape[:2]
    stated = _stated_lengths(shape, boundaries)
    if not stated:
        if attention_mask is not None:
            tokens, lengths = _padded(given, attention_mask, position_ids)
        else:
            tokens, lengths = None, _continued(shape, position_ids, gaps=gaps)
    else:
        tokens = None
        name, lengths = next(iter(stated.items()))
        if position_ids is not None:
            stated["position_ids"] = _continued(shape, position_ids, gaps=gaps)
        for other, found in stated.items():
            if found != lengths:
                raise ValueError(
                    f"{other} and {name} must have the same sequences, got lengths of "
                    f"{list(found)[:64]} and {list(lengths)[:64]}"
                )
        if attention_mask is not None and _padded(given, attention_mask, None)[0] is not None:
            raise ValueError(
                f"attention_mask must be None or ones where {name} is given: sequences that are "
                "packed into a row have no padding"
            )
    for name in ("max_length_q", "max_length_k"):
        longest: Any = boundaries.get(name)
        if longest is None:
            continue
        if isinstance(longest, Tensor) and longest.numel() == 1:
            longest = longest.item()
        check_integer(name, longest)
        if longest < max(lengths):
            raise ValueError(
                f"{name} must be at least {max(lengths)}, the length of the longest sequence, "
                f"got {longest}"
            )
    return tokens, lengths


def _stated_lengths(
    shape: Sequence[int], boundaries: Mapping[str, object]
) -> dict[str, tuple[int, ...]]:
    """The lengths of all sequences of a batch by each keyword that states them."""
    batch_size, num_columns = shape
    found: dict[str, tuple[int, ...]] = {}
    for name in ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx"):
        value = boundaries.get(name)
        if value is None:
            continue
        check_integers(name, value)
        value = cast(Tensor, value).long()
        if name == "seq_idx":
            if list(value.shape) not in ([batch_size, num_columns], [1, num_columns]):
                raise ValueError(
                    f"seq_idx must have shape [batch, columns] = {list(shape)}, "
                    f"got {list(value.shape)}"
                )
            steps = value.expand(batch_size, -1).diff(dim=1)
            if (steps < 0).any():
                raise ValueError(
                    "seq_idx must not descend in a row: the tokens of a sequence are neighbours, "
                    f"got {value.flatten().tolist()[:64]}"
                )
            found[name] = _lengths(steps != 0)
            continue
        ends = value.flatten().tolist()
        lengths = tuple(last - first for first, last in itertools.pairwise(ends))
        whole = value.dim() == 1 and [*ends[:1], *ends[-1:]] == [0, num_columns]
        if batch_size != 1 or not whole or min(lengths) < 1:
            raise ValueError(
                f"{name} must ascend from 0 to the {num_columns} columns of one row, "
                f"got {ends[:64]} for {batch_size} rows"
            )
        found[name] = lengths
    return found


def _continued(shape: Sequence[int], position_ids: Tensor | None, *, gaps: bool) -> tuple[int, ...]:
    """The lengths of all sequences of a batch by their positions."""
    batch_size, num_columns = shape
    if position_ids is None:
        return (num_columns,) * batch_size
    steps = position_ids.expand(batch_size, num_columns).diff(dim=1)
    return _lengths(steps <= 0 if gaps else steps != 1)


def _lengths(restarts: Tensor) -> tuple[int, ...]:
    """The lengths of sequences; one starts with each row and at each of ``restarts [B, S - 1]``."""
    firsts = F.pad(restarts, (1, 0), value=True).flatten()
    bounds = itertools.pairwise([*firsts.nonzero()[:, 0].tolist(), firsts.numel()])
    return tuple(last - first for first, last in bounds)


def packed_lengths(
    given: Tensor,
    attention_mask: object,
    position_ids: Tensor | None,
    boundaries: Mapping[str, object],
    *,
    gaps: bool,
) -> tuple[int, ...] | None:
    """The lengths of a batch's sequences if rows hold several; None if each row is a sequence.

    See :func:`find_sequences`.
    """
    if not boundaries and (attention_mask is not None or position_ids is None):
        return None
    _, lengths = find_sequences(given, attention_mask, position_ids, boundaries, gaps=gaps)
    return None if len(lengths) == given.shape[0] else lengths


def own_positions(lengths: Sequence[int], shape: Sequence[int], device: torch.device) -> Tensor:
    """int64 ``[B, S]``, the position of each token in its sequence."""
    tokens = torch.arange(sum(lengths), device=device)
    return (tokens - first_rows(lengths, device)).view(*shape)


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

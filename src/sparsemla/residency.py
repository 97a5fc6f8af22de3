"""Which rows of a request's context lie in fast memory, and which of them were used last.

A *seat* is a request's share of the fast memory: a fixed number of rows, each of which holds the
row of one position, in any order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsemla.validation import LIMIT, check_device, check_integer, check_kind

EMPTY = 2**31 - 1
"""The key of a row that holds no position; behind all positions."""


@dataclass(frozen=True, eq=False)
class RowTable:
    """The rows of seats: the position that each holds, and how recently it was used.

    :func:`sparsemla.resolve_rows` writes it and :func:`sparsemla.forget_seats` empties seats.

    Args:
        keys: int32 ``[seats, H]``, written by both: the positions whose rows a seat has, ascending;
            ``2**31 - 1`` behind them stands for rows that hold none.
        rows: int32 ``[seats, H]``, written: the row of each key, a permutation of ``0 .. H - 1``.
        order: int32 ``[seats, H]``, written: the rows from least to most recently used.

    Raises:
        TypeError, ValueError: tensors of other kinds, dtypes, shapes, strides or devices, or more
            than ``2**31 - 1`` rows.

    >>> table = RowTable.allocate(2, 4)
    >>> table.rows.tolist()
    [[0, 1, 2, 3], [0, 1, 2, 3]]
    """

    keys: Tensor
    rows: Tensor
    order: Tensor

    def __post_init__(self) -> None:
        for name in ("keys", "rows", "order"):
            tensor = getattr(self, name)
            check_kind(name, tensor, Tensor)
            if tensor.dtype != torch.int32:
                raise TypeError(f"{name} must have dtype int32, got {tensor.dtype}")
            if tensor.dim() != 2 or tensor.shape != self.keys.shape or tensor.shape[1] < 1:
                wanted = "[seats, rows_per_seat]" if name == "keys" else list(self.keys.shape)
                raise ValueError(f"{name} must have shape {wanted}, got {list(tensor.shape)}")
            if tensor.device != self.keys.device:
                raise ValueError(f"{name} must be on {self.keys.device}, got {tensor.device}")
            if tensor.stride(1) != 1 and tensor.shape[1] > 1:
                raise ValueError(
                    f"{name} must be contiguous in the last dimension, got {tensor.stride()}"
                )
        _check_rows(self.num_seats, self.rows_per_seat)

    @classmethod
    def allocate(
        cls, seats: int, rows_per_seat: int, *, device: torch.device | str | None = None
    ) -> RowTable:
        """A table of empty seats.

        Args:
            seats: number of seats, the most requests at a time.
            rows_per_seat: H, rows of each seat.
            device: default torch's default device.

        Raises:
            TypeError, ValueError: an argument of the wrong kind or out of range, or more than
                ``2**31 - 1`` rows.
        """
        check_integer("seats", seats)
        check_integer("rows_per_seat", rows_per_seat, 1)
        check_device("device", device)
        _check_rows(seats, rows_per_seat)
        rows = torch.arange(rows_per_seat, dtype=torch.int32, device=device).repeat(seats, 1)
        return cls(torch.full_like(rows, EMPTY), rows, rows.clone())

    @classmethod
    def unchecked(cls, keys: Tensor, rows: Tensor, order: Tensor) -> RowTable:
        """The table of checked tensors; skips all checks."""
        table = object.__new__(cls)
        object.__setattr__(table, "keys", keys)
        object.__setattr__(table, "rows", rows)
        object.__setattr__(table, "order", order)
        return table

    @property
    def num_seats(self) -> int:
        """Number of seats."""
        return self.keys.shape[0]

    @property
    def rows_per_seat(self) -> int:
        """H, rows of each seat."""
        return self.keys.shape[1]


def _check_rows(seats: int, rows_per_seat: int) -> None:
    if seats * rows_per_seat >= LIMIT:
        raise ValueError(
            f"seats must be at most {(LIMIT - 1) // rows_per_seat} with {rows_per_seat} rows each, "
            f"got {seats}"
        )

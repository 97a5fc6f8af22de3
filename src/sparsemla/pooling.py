"""Windows of tokens that are pooled into one cache row, and the rows of windows still open.

DeepSeek-V4 keeps a cache row, an *entry*, for every window of ``ratio`` tokens. A window stays open
until its last token arrives; until then the projected rows of its tokens are kept in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsemla.validation import check_device, check_integer, check_integers, check_kind

NO_NORM = 2.0**40
"""An epsilon beside which a row's mean square vanishes: its RMSNorm is a constant factor, which
weights of ``NO_NORM**0.5`` undo."""


@dataclass(frozen=True)
class Pooling:
    """The tokens that make an entry.

    Args:
        ratio: tokens of a window; each window gives one entry.
        overlap: whether an entry also reads the window before its own. Each token then has two
            series of values and gates: the first feeds the entry of the next window, the second
            that of its own.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, or a ratio below 1.

    >>> CSA, HCA = Pooling(4, overlap=True), Pooling(128)
    >>> CSA.window, CSA.width(512), HCA.window, HCA.width(512)
    (8, 1024, 128, 512)
    """

    ratio: int
    overlap: bool = False

    def __post_init__(self) -> None:
        check_integer("ratio", self.ratio, 1)
        check_kind("overlap", self.overlap, bool)

    @property
    def window(self) -> int:
        """Tokens that an entry reads."""
        return self.ratio * (1 + self.overlap)

    def width(self, head_dim: int) -> int:
        """Values of a token for entries of ``head_dim`` dims."""
        return head_dim * (1 + self.overlap)


@dataclass(frozen=True, eq=False)
class WindowState:
    """The last rows of requests, each request in its own ring.

    The row of position ``p`` is ``rows[ring_id, p % ring]``. It holds the token's values and its
    gates, the bias added. An engine may keep the rows on pages instead: each page is a ring here,
    and :func:`sparsemla.pool_windows` takes a page table.

    Args:
        rows: float32 ``[num_rings, ring, 2, width]``, contiguous in the last dimension.

    Raises:
        TypeError, ValueError: rows of another kind, dtype, rank or stride.

    >>> WindowState.allocate(Pooling(4, overlap=True), 512, num_rings=3, max_drafts=2).rows.shape
    torch.Size([3, 10, 2, 1024])
    """

    rows: Tensor

    def __post_init__(self) -> None:
        check_kind("rows", self.rows, Tensor)
        if self.rows.dtype != torch.float32:
            raise TypeError(f"rows must have dtype float32, got {self.rows.dtype}")
        if self.rows.dim() != 4 or self.rows.shape[2] != 2:
            raise ValueError(
                f"rows must have shape [num_rings, ring, 2, width], got {list(self.rows.shape)}"
            )
        if self.rows.shape[3] > 1 and self.rows.stride(3) != 1:
            raise ValueError(
                f"rows must be contiguous in the last dimension, got {self.rows.stride()}"
            )

    @classmethod
    def allocate(
        cls,
        pooling: Pooling,
        head_dim: int,
        *,
        num_rings: int,
        max_drafts: int = 0,
        device: torch.device | str | None = None,
    ) -> WindowState:
        """Zeroed rings, one for each request that is served at a time.

        A step of ``n`` tokens of which some are rejected later needs the rows of
        ``window + n - 1`` positions, so a ring has ``window + max_drafts`` rows.

        Args:
            pooling: the windows.
            head_dim: dims of an entry.
            num_rings: number of rings.
            max_drafts: most draft tokens of a step.
            device: default torch's default device.

        Raises:
            TypeError, ValueError: an argument of the wrong kind or out of range.
        """
        check_kind("pooling", pooling, Pooling)
        check_integer("head_dim", head_dim, 1)
        check_integer("num_rings", num_rings)
        check_integer("max_drafts", max_drafts)
        check_device("device", device)
        shape = num_rings, pooling.window + max_drafts, 2, pooling.width(head_dim)
        return cls(torch.zeros(shape, dtype=torch.float32, device=device))

    @classmethod
    def unchecked(cls, rows: Tensor) -> WindowState:
        """The state of checked rows; skips all checks."""
        state = object.__new__(cls)
        object.__setattr__(state, "rows", rows)
        return state

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy rings, for a fork of a request or a prefix to keep.

        This call reads the rings and so synchronises with the device.

        Args:
            sources: int32, int64 or uint32 ``[N]``, rings to copy.
            targets: int32, int64 or uint32 ``[N]``, rings to overwrite.

        Raises:
            TypeError, ValueError: tensors of another kind, dtype or shape, or a ring that is not in
                the state, which is unchanged then.
        """
        for name, rings in (("sources", sources), ("targets", targets)):
            check_integers(name, rings)
            if rings.dim() != 1 or rings.shape != sources.shape:
                raise ValueError(f"{name} must have shape [N], got {list(rings.shape)}")
            numbers = rings.long()
            outside = (numbers < 0) | (numbers >= len(self.rows))
            if outside.any():
                raise ValueError(
                    f"{name} must lie in [0, {len(self.rows)}), got {int(numbers[outside][0])}"
                )
        self.rows[targets.long()] = self.rows[sources.long()]

"""The records of slots of keys, and of the workspace of dequantised rows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.kernels.common.table import ALLOCATED


class ToSlots(NamedTuple):
    """Arguments of :func:`sparsemla.to_slots`."""

    topk_indices: Tensor
    page_table: Tensor
    request_ids: Tensor
    page_size: int
    workspace_starts: Tensor | None = None
    prefill_request_ids: Tensor | None = None
    out: Tensor = ALLOCATED


class EntrySlots(NamedTuple):
    """Arguments of :func:`sparsemla.entry_slots`."""

    positions: Tensor
    page_table: Tensor
    request_ids: Tensor
    ratio: int
    page_size: int
    out: Tensor = ALLOCATED


class VisibleSlots(NamedTuple):
    """Arguments of :func:`sparsemla.visible_slots`."""

    positions: Tensor
    page_table: Tensor
    request_ids: Tensor
    width: int
    ratio: int
    page_size: int
    out: Tensor = ALLOCATED
    lengths: Tensor = ALLOCATED


class GatherDequant(NamedTuple):
    """Arguments of :func:`sparsemla.gather_dequant`, whose caller always gives ``out``."""

    out: Tensor
    cache: PagedCache
    page_table: Tensor
    seq_lens: Tensor
    workspace_starts: Tensor
    seq_starts: Tensor | None = None

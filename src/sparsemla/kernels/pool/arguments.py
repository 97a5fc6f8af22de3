"""The record of pooled windows."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.kernels.quant.arguments import FusedRopeRmsnormQuant
from sparsemla.pooling import Pooling, WindowState


class PoolWindows(NamedTuple):
    """Arguments of :func:`sparsemla.pool_windows`."""

    values: Tensor
    gates: Tensor
    norm_weight: Tensor
    cos_sin_cache: Tensor
    state: WindowState
    cache: PagedCache
    pooling: Pooling
    positions: Tensor
    request_ids: Tensor
    input_row_offsets: Tensor
    ring_ids: Tensor
    slot_mapping: Tensor
    gate_bias: Tensor | None = None
    eps: float = 1e-6
    interleaved: bool = True
    scale_mode: str = "pow2"
    kv_out: Tensor | None = None

    @property
    def paged(self) -> bool:
        """Whether the rows of open windows lie on pages, and not in a ring for each request."""
        return self.ring_ids.dim() == 2

    def write(self, pooled: Tensor, starts: Tensor, slots: Tensor) -> FusedRopeRmsnormQuant:
        """The write of pooled rows as entries, without query heads.

        Args:
            pooled: float32 ``[n, D]``.
            starts: ``[n]``, positions at which the windows begin.
            slots: ``[n]``, negative for rows that are no entries.
        """
        no_queries = pooled.new_empty(len(pooled), 0, self.cos_sin_cache.shape[1])
        return FusedRopeRmsnormQuant(
            no_queries,
            pooled,
            self.cos_sin_cache,
            self.norm_weight,
            self.cache,
            starts,
            slots,
            self.eps,
            interleaved=self.interleaved,
            scale_mode=self.scale_mode,
            out=no_queries,
            kv_out=self.kv_out,
        )

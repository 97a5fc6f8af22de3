"""The records of the ops that write caches, and of index queries."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import INDEX_FP8, CacheFormat
from sparsemla.kernels.common.table import ALLOCATED


class FusedRopeRmsnormQuant(NamedTuple):
    """Arguments of :func:`sparsemla.fused_rope_rmsnorm_quant`."""

    q_rope: Tensor
    kv: Tensor
    cos_sin_cache: Tensor
    kv_norm_weight: Tensor
    cache: PagedCache
    positions: Tensor
    slot_mapping: Tensor
    eps: float = 1e-6
    query_norm: bool = False
    interleaved: bool = True
    scale_mode: str = "pow2"
    out: Tensor = ALLOCATED
    kv_out: Tensor | None = None


class AppendIndexKeys(NamedTuple):
    """Arguments of :func:`sparsemla.append_index_keys`."""

    index_k: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    cos_sin_cache: Tensor
    cache: PagedCache
    positions: Tensor
    slot_mapping: Tensor
    eps: float = 1e-6
    interleaved: bool = False
    rope_first: bool = True
    hadamard: bool = False
    scale_mode: str = "pow2"

    @property
    def format(self) -> CacheFormat:
        """The format of the keys."""
        return self.cache.format


class PrepareIndexQueries(NamedTuple):
    """Arguments of :func:`sparsemla.prepare_index_queries`."""

    index_q: Tensor
    weights: Tensor
    cos_sin_cache: Tensor
    positions: Tensor
    format: CacheFormat = INDEX_FP8
    interleaved: bool = False
    rope_first: bool = True
    hadamard: bool = False
    scale_mode: str = "pow2"
    out: Tensor = ALLOCATED
    weights_out: Tensor = ALLOCATED


class FusedIndexerRopeQuant(NamedTuple):
    """Arguments of :func:`sparsemla.fused_indexer_rope_quant`."""

    index_q: Tensor
    weights: Tensor
    index_k: Tensor
    norm_weight: Tensor
    norm_bias: Tensor
    cos_sin_cache: Tensor
    cache: PagedCache
    positions: Tensor
    slot_mapping: Tensor
    eps: float = 1e-6
    interleaved: bool = False
    rope_first: bool = True
    hadamard: bool = False
    scale_mode: str = "pow2"
    out: Tensor = ALLOCATED
    weights_out: Tensor = ALLOCATED

    @property
    def format(self) -> CacheFormat:
        """The format of the keys and the queries."""
        return self.cache.format

"""Rotate, normalise, quantise and store: writes of the caches, and index queries."""

from typing import TYPE_CHECKING

from sparsemla.kernels.common.table import Kernel, LazyModule, Op
from sparsemla.kernels.quant.arguments import (
    AppendIndexKeys,
    FusedIndexerRopeQuant,
    FusedRopeRmsnormQuant,
    PrepareIndexQueries,
)

if TYPE_CHECKING:
    from sparsemla.kernels.quant import cpu, triton
else:
    cpu, triton = (LazyModule(f"{__name__}.{name}") for name in ("cpu", "triton"))

FUSED_ROPE_RMSNORM_QUANT = Op(
    "fused_rope_rmsnorm_quant",
    FusedRopeRmsnormQuant,
    (
        Kernel("triton", lambda: triton.fused_rope_rmsnorm_quant),
        Kernel("cpu", lambda: cpu.fused_rope_rmsnorm_quant),
    ),
    outputs=("out", "kv_out"),
    mutates=("cache",),
)

APPEND_INDEX_KEYS = Op(
    "append_index_keys",
    AppendIndexKeys,
    (
        Kernel("triton", lambda: triton.append_index_keys),
        Kernel("cpu", lambda: cpu.append_index_keys),
    ),
    mutates=("cache",),
)

PREPARE_INDEX_QUERIES = Op(
    "prepare_index_queries",
    PrepareIndexQueries,
    (
        Kernel("triton", lambda: triton.prepare_index_queries),
        Kernel("cpu", lambda: cpu.prepare_index_queries),
    ),
    outputs=("out", "weights_out"),
)

FUSED_INDEXER_ROPE_QUANT = Op(
    "fused_indexer_rope_quant",
    FusedIndexerRopeQuant,
    (
        Kernel("triton", lambda: triton.fused_indexer_rope_quant),
        Kernel("cpu", lambda: cpu.fused_indexer_rope_quant),
    ),
    outputs=("out", "weights_out"),
    mutates=("cache",),
)

OPS = {
    op.name: op
    for op in (
        FUSED_ROPE_RMSNORM_QUANT,
        APPEND_INDEX_KEYS,
        PREPARE_INDEX_QUERIES,
        FUSED_INDEXER_ROPE_QUANT,
    )
}

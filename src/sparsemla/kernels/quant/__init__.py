"""Rotate, normalise, quantise and store: writes of the caches, and index queries."""

from types import ModuleType

from sparsemla.kernels.common.registry import Kernel, Op


def _triton() -> ModuleType:
    from sparsemla.kernels.quant import triton

    return triton


def _cpu() -> ModuleType:
    from sparsemla.kernels.quant import cpu

    return cpu


OPS = {
    "fused_rope_rmsnorm_quant": Op(
        ("out", "kv_out"),
        (
            Kernel("triton", lambda: _triton().fused_rope_rmsnorm_quant),
            Kernel("cpu", lambda: _cpu().fused_rope_rmsnorm_quant),
        ),
    ),
    "append_index_keys": Op(
        (),
        (
            Kernel("triton", lambda: _triton().append_index_keys),
            Kernel("cpu", lambda: _cpu().append_index_keys),
        ),
    ),
    "prepare_index_queries": Op(
        ("out", "weights_out"),
        (
            Kernel("triton", lambda: _triton().prepare_index_queries),
            Kernel("cpu", lambda: _cpu().prepare_index_queries),
        ),
    ),
    "fused_indexer_rope_quant": Op(
        ("out", "weights_out"),
        (
            Kernel("triton", lambda: _triton().fused_indexer_rope_quant),
            Kernel("cpu", lambda: _cpu().fused_indexer_rope_quant),
        ),
    ),
}

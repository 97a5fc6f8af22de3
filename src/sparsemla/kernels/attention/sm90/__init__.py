"""Attention on Hopper: one kernel each for bfloat16 and FP8 rows, many and few heads."""

from sparsemla.kernels.attention.sm90.decode import dense_decode, sparse_decode
from sparsemla.kernels.attention.sm90.prefill import sparse_attention, sparse_prefill

__all__ = ["dense_decode", "sparse_attention", "sparse_decode", "sparse_prefill"]

"""Portable attention: Triton, any GPU from sm_80 and gfx942."""

from sparsemla.kernels.attention.triton.decode import dense_decode, sparse_decode
from sparsemla.kernels.attention.triton.merge import merge_states
from sparsemla.kernels.attention.triton.prefill import (
    dense_prefill,
    sparse_attention,
    sparse_prefill,
)

__all__ = [
    "dense_decode",
    "dense_prefill",
    "merge_states",
    "sparse_attention",
    "sparse_decode",
    "sparse_prefill",
]

"""Attention on the CPU: torch, a bounded number of keys at a time."""

from sparsemla.kernels.attention.cpu.decode import dense_decode, merge_states, sparse_decode
from sparsemla.kernels.attention.cpu.prefill import (
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

"""The records of the attention ops: the arguments that the public ops have checked."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.kernels.common.table import ALLOCATED


class Splits(NamedTuple):
    """How a decode is divided among programs."""

    num_splits: int
    """Splits of a row's keys; the partial results of several are merged."""
    head_tile: int = 64
    """Query heads of a program of the Hopper kernels."""


class SparseDecode(NamedTuple):
    """Arguments of :func:`sparsemla.sparse_decode`.

    Without ``out`` and ``lse``, the partial results of several splits stay in ``workspace``.
    """

    q: Tensor
    cache: PagedCache
    topk_indices: Tensor
    softmax_scale: float
    q_rope: Tensor | None = None
    topk_lengths: Tensor | None = None
    attn_sink: Tensor | None = None
    extra_cache: PagedCache | None = None
    extra_topk_indices: Tensor | None = None
    extra_topk_lengths: Tensor | None = None
    splits: Splits | None = None
    """None lets the cost model choose."""
    workspace: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None

    @property
    def num_keys(self) -> int:
        """Most keys of a query token."""
        extra = self.extra_topk_indices
        return self.topk_indices.shape[2] + (0 if extra is None else extra.shape[2])


class DenseDecode(NamedTuple):
    """Arguments of :func:`sparsemla.dense_decode`.

    Without ``out`` and ``lse``, the partial results of several splits stay in ``workspace``.
    """

    q: Tensor
    cache: PagedCache
    page_table: Tensor
    seq_lens: Tensor
    softmax_scale: float
    causal: bool = True
    attn_sink: Tensor | None = None
    splits: Splits | None = None
    """None lets the cost model choose."""
    workspace: Tensor | None = None
    out: Tensor | None = None
    lse: Tensor | None = None

    @property
    def num_keys(self) -> int:
        """Most keys of a query token."""
        return self.page_table.shape[1] * self.cache.page_size


class SparsePrefill(NamedTuple):
    """Arguments of :func:`sparsemla.sparse_prefill`; rows that are no cache are made one."""

    q: Tensor
    kv: PagedCache
    topk_indices: Tensor
    softmax_scale: float
    q_rope: Tensor | None = None
    topk_lengths: Tensor | None = None
    attn_sink: Tensor | None = None
    extra_cache: PagedCache | None = None
    extra_topk_indices: Tensor | None = None
    extra_topk_lengths: Tensor | None = None
    list_tokens: int = 1
    token_mask: Tensor | None = None
    allow_fp8_mma: bool = False
    out: Tensor = ALLOCATED
    lse: Tensor = ALLOCATED
    max_logits: Tensor | None = None

    @property
    def shared(self) -> bool:
        """Whether several query tokens share a list, or each attends to some of it."""
        return self.list_tokens > 1 or self.token_mask is not None


class SparseAttention(NamedTuple):
    """Arguments of the forward pass of :func:`sparsemla.sparse_attention`."""

    q: Tensor
    kv: Tensor
    topk_indices: Tensor
    softmax_scale: float
    topk_lengths: Tensor | None = None
    attn_sink: Tensor | None = None
    list_tokens: int = 1
    token_mask: Tensor | None = None
    deterministic: bool = False
    out: Tensor = ALLOCATED
    lse: Tensor = ALLOCATED

    @property
    def shared(self) -> bool:
        """Whether several query tokens share a list, or each attends to some of it."""
        return self.list_tokens > 1 or self.token_mask is not None

    def over(self, rows: PagedCache) -> SparsePrefill:
        """The same attention as a prefill over rows that stand for those of ``kv``."""
        fields = self._asdict() | {"kv": rows}
        del fields["deterministic"]
        return SparsePrefill(**fields)


class DensePrefill(NamedTuple):
    """Arguments of :func:`sparsemla.dense_prefill`."""

    q: Tensor
    k: Tensor
    v: Tensor
    input_row_offsets: Tensor
    kv_row_offsets: Tensor
    softmax_scale: float
    causal: bool = True
    out: Tensor = ALLOCATED
    lse: Tensor = ALLOCATED


class MergeStates(NamedTuple):
    """Arguments of :func:`sparsemla.merge_states`."""

    outs: Tensor
    lses: Tensor
    attn_sink: Tensor | None = None
    out: Tensor = ALLOCATED
    lse: Tensor = ALLOCATED

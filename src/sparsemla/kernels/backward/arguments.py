"""The record of the gradients of attention: the arguments that the public op has checked."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsemla.kernels.common.table import ALLOCATED


class SparseAttentionBackward(NamedTuple):
    """Arguments of :func:`sparsemla.sparse_attention_backward`.

    Without ``attn_sink``, ``d_sink`` is empty and not written.
    """

    dout: Tensor
    q: Tensor
    kv: Tensor
    topk_indices: Tensor
    out: Tensor
    lse: Tensor
    softmax_scale: float
    max_workspace_bytes: int
    topk_lengths: Tensor | None = None
    attn_sink: Tensor | None = None
    list_tokens: int = 1
    token_mask: Tensor | None = None
    dlse: Tensor | None = None
    deterministic: bool = True
    as_float32: bool = False
    """Whether ``dkv`` is float32 whatever the dtype of ``kv``, to be added to a sum."""
    dq: Tensor = ALLOCATED
    dkv: Tensor = ALLOCATED
    d_sink: Tensor = ALLOCATED

"""What trains the indexer: scores of listed rows with gradients, targets, and the dense loss."""

from typing import TYPE_CHECKING

import torch

from sparsemla.cache import aligned
from sparsemla.kernels.attention import refused_by_sm90
from sparsemla.kernels.common.table import Kernel, LazyModule, Op
from sparsemla.kernels.losses.arguments import (
    AttentionTarget,
    DenseIndexGradients,
    DenseIndexLoss,
    SelectedScores,
    SelectedScoresBackward,
)

if TYPE_CHECKING:
    from sparsemla.kernels.losses import cpu, sm90, triton
else:
    cpu, sm90, triton = (LazyModule(f"{__name__}.{name}") for name in ("cpu", "sm90", "triton"))


def _refuse_lists(call: SelectedScores | SelectedScoresBackward) -> str | None:
    _, num_heads, dim = call.index_q.shape
    if call.index_q.dtype != torch.bfloat16:
        return f"needs bfloat16 index queries, got {call.index_q.dtype}"
    if dim != 128 or not 16 < num_heads <= 64:
        return f"needs 17 to 64 index heads of 128 dims, got {num_heads} of {dim}"
    if not aligned(call.index_q, call.index_k):
        return "needs index queries and keys with rows that start at multiples of 16 bytes"
    return None


SELECTED_SCORES = Op(
    "selected_scores",
    SelectedScores,
    (
        Kernel("sm90", lambda: sm90.selected_scores, _refuse_lists),
        Kernel("triton", lambda: triton.selected_scores),
        Kernel("cpu", lambda: cpu.selected_scores),
    ),
    outputs=("out",),
)

SELECTED_SCORES_BACKWARD = Op(
    "selected_scores_backward",
    SelectedScoresBackward,
    (
        Kernel("sm90", lambda: sm90.selected_scores_backward, _refuse_lists),
        Kernel("triton", lambda: triton.selected_scores_backward),
        Kernel("cpu", lambda: cpu.selected_scores_backward),
    ),
    outputs=("dindex_q", "dweights", "dindex_k"),
)


def _refuse_target(call: AttentionTarget) -> str | None:
    if call.q.shape[1] > 128:
        return f"takes at most 128 heads, got {call.q.shape[1]}"
    return refused_by_sm90(call.q, call.kv)


ATTENTION_TARGET = Op(
    "attention_target",
    AttentionTarget,
    (
        Kernel("sm90", lambda: sm90.attention_target, _refuse_target),
        Kernel("triton", lambda: triton.attention_target),
        Kernel("cpu", lambda: cpu.attention_target),
    ),
    outputs=("out",),
)


def _refuse_dense(call: DenseIndexLoss | DenseIndexGradients) -> str | None:
    q, k, index_q, index_k = call.q, call.k, call.index_q, call.index_k
    if q.dtype != torch.bfloat16 or index_q.dtype != torch.bfloat16:
        return f"needs bfloat16 queries and index queries, got {q.dtype} and {index_q.dtype}"
    if index_q.shape[2] != 128:
        return f"needs index heads of 128 dims, got {index_q.shape[2]}"
    if q.shape[2] % 64 != 0:
        return f"needs heads of a multiple of 64 dims, got {q.shape[2]}"
    if 0 in (*q.shape, k.shape[0], index_q.shape[1]):
        return "needs query tokens, rows, heads and index heads"
    if not aligned(q, k, index_q, index_k):
        return "needs queries and keys with rows that start at multiples of 16 bytes"
    return None


DENSE_INDEX_LOSS = Op(
    "dense_index_loss",
    DenseIndexLoss,
    (
        Kernel("sm90", lambda: sm90.dense_index_loss, _refuse_dense),
        Kernel("triton", lambda: triton.dense_index_loss),
        Kernel("cpu", lambda: cpu.dense_index_loss),
    ),
    outputs=("loss",),
)

DENSE_INDEX_GRADIENTS = Op(
    "dense_index_gradients",
    DenseIndexGradients,
    (
        Kernel("sm90", lambda: sm90.dense_index_gradients, _refuse_dense),
        Kernel("triton", lambda: triton.dense_index_gradients),
        Kernel("cpu", lambda: cpu.dense_index_gradients),
    ),
    outputs=("loss", "dindex_q", "dweights", "dindex_k"),
)

OPS = {
    op.name: op
    for op in (
        SELECTED_SCORES,
        SELECTED_SCORES_BACKWARD,
        ATTENTION_TARGET,
        DENSE_INDEX_LOSS,
        DENSE_INDEX_GRADIENTS,
    )
}

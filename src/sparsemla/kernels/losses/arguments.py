"""The records of the ops that train the indexer: the arguments that the public ops have checked."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsemla.kernels.common.table import ALLOCATED


class SelectedScores(NamedTuple):
    """Arguments of :func:`sparsemla.selected_scores`."""

    index_q: Tensor
    weights: Tensor
    index_k: Tensor
    topk_indices: Tensor
    topk_lengths: Tensor | None = None
    out: Tensor = ALLOCATED


class SelectedScoresBackward(NamedTuple):
    """Arguments of :func:`sparsemla.selected_scores_backward`."""

    dscores: Tensor
    index_q: Tensor
    weights: Tensor
    index_k: Tensor
    topk_indices: Tensor
    topk_lengths: Tensor | None = None
    dindex_q: Tensor = ALLOCATED
    dweights: Tensor = ALLOCATED
    dindex_k: Tensor = ALLOCATED


class AttentionTarget(NamedTuple):
    """Arguments of :func:`sparsemla.attention_target`."""

    q: Tensor
    kv: Tensor
    topk_indices: Tensor
    lse: Tensor
    softmax_scale: float
    topk_lengths: Tensor | None = None
    attn_sink: Tensor | None = None
    normalize: bool = True
    out: Tensor = ALLOCATED


class DenseIndexLoss(NamedTuple):
    """Arguments of :func:`sparsemla.dense_index_loss`."""

    q: Tensor
    k: Tensor
    lse: Tensor
    index_q: Tensor
    weights: Tensor
    index_k: Tensor
    softmax_scale: float
    row_starts: Tensor
    row_ends: Tensor
    max_workspace_bytes: int
    row_weights: Tensor | None = None
    loss: Tensor = ALLOCATED

    def counted(self) -> DenseIndexLoss:
        """The same call, but tokens of weight 0 see no row, and their queries and weights are 0.

        Beside a token that counts, a kernel multiplies them by gradients of 0.
        """
        if self.row_weights is None:
            return self
        counts = self.row_weights != 0
        return self._replace(
            index_q=self.index_q.where(counts[:, None, None], 0),
            weights=self.weights.where(counts[:, None], 0),
            row_ends=self.row_ends.where(counts, 0),
        )


class DenseIndexGradients(NamedTuple):
    """Arguments of :func:`sparsemla.dense_index_gradients`; of float16 tensors in float32."""

    q: Tensor
    k: Tensor
    lse: Tensor
    index_q: Tensor
    weights: Tensor
    index_k: Tensor
    softmax_scale: float
    row_starts: Tensor
    row_ends: Tensor
    max_workspace_bytes: int
    row_weights: Tensor | None = None
    loss: Tensor = ALLOCATED
    dindex_q: Tensor = ALLOCATED
    dweights: Tensor = ALLOCATED
    dindex_k: Tensor = ALLOCATED

    @property
    def grads(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of the index queries, the weights and the index keys."""
        return self.dindex_q, self.dweights, self.dindex_k

    def of_loss(self) -> DenseIndexLoss:
        """The arguments of the loss alone."""
        fields = self._asdict()
        return DenseIndexLoss(**{name: fields[name] for name in DenseIndexLoss._fields})

"""The indexer's losses on Hopper."""

from sparsemla.kernels.losses.sm90.dense import dense_index_gradients, dense_index_loss
from sparsemla.kernels.losses.sm90.lists import selected_scores, selected_scores_backward
from sparsemla.kernels.losses.sm90.targets import attention_target

__all__ = [
    "attention_target",
    "dense_index_gradients",
    "dense_index_loss",
    "selected_scores",
    "selected_scores_backward",
]

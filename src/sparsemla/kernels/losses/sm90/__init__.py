"""The indexer's losses on Hopper."""

from sparsemla.kernels.losses.sm90.lists import selected_scores, selected_scores_backward
from sparsemla.kernels.losses.sm90.targets import attention_target

__all__ = ["attention_target", "selected_scores", "selected_scores_backward"]

"""What trains the indexer: scores of listed rows with gradients, targets, and the dense loss."""

from types import ModuleType

from sparsemla.kernels.common.registry import Kernel, Op


def _triton() -> ModuleType:
    from sparsemla.kernels.losses import triton

    return triton


def _cpu() -> ModuleType:
    from sparsemla.kernels.losses import cpu

    return cpu


GRADIENTS = ("diq", "dweights", "dik")

OPS = {
    "selected_scores": Op(
        ("out",),
        (
            Kernel("triton", lambda: _triton().selected_scores),
            Kernel("cpu", lambda: _cpu().selected_scores),
        ),
    ),
    "selected_scores_backward": Op(
        GRADIENTS,
        (
            Kernel("triton", lambda: _triton().selected_scores_backward),
            Kernel("cpu", lambda: _cpu().selected_scores_backward),
        ),
    ),
    "attention_target": Op(
        ("out",),
        (
            Kernel("triton", lambda: _triton().attention_target),
            Kernel("cpu", lambda: _cpu().attention_target),
        ),
    ),
    "dense_index_loss": Op(
        ("loss",),
        (
            Kernel("triton", lambda: _triton().dense_index_loss),
            Kernel("cpu", lambda: _cpu().dense_index_loss),
        ),
    ),
    "dense_index_gradients": Op(
        ("loss", *GRADIENTS),
        (
            Kernel("triton", lambda: _triton().dense_index_gradients),
            Kernel("cpu", lambda: _cpu().dense_index_gradients),
        ),
    ),
}

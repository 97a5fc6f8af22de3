"""The gradients of attention over selected rows."""

from types import ModuleType

from sparsemla.kernels.common.registry import Kernel, Op


def _triton() -> ModuleType:
    from sparsemla.kernels.backward import triton

    return triton


def _cpu() -> ModuleType:
    from sparsemla.kernels.backward import cpu

    return cpu


OPS = {
    "sparse_attention_backward": Op(
        ("dq", "dkv", "d_sink"),
        (
            Kernel("triton", lambda: _triton().sparse_attention_backward),
            Kernel("cpu", lambda: _cpu().sparse_attention_backward),
        ),
    ),
}

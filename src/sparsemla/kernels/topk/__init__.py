"""Exact, deterministic top-k."""

from types import ModuleType

import torch

from sparsemla.kernels.common.registry import Kernel, Op


def _sm90() -> ModuleType:
    from sparsemla.kernels.topk import sm90

    return sm90


def _triton() -> ModuleType:
    from sparsemla.kernels.topk import triton

    return triton


def _cpu() -> ModuleType:
    from sparsemla.kernels.topk import cpu

    return cpu


OPS = {
    "select_topk": Op(
        ("out",),
        (
            Kernel("sm90", lambda: _sm90().select_topk),
            Kernel("triton", lambda: _triton().select_topk),
            Kernel("cpu", lambda: _cpu().select_topk),
        ),
        dtype=torch.float32,
    ),
    "merge_topk": Op(
        ("out",),
        (
            Kernel("sm90", lambda: _sm90().merge_topk),
            Kernel("triton", lambda: _triton().merge_topk),
            Kernel("cpu", lambda: _cpu().merge_topk),
        ),
        dtype=torch.float32,
    ),
}

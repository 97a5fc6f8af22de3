"""FlashAttention-3, the package with gradients (``flash_attn_interface``)."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from sparsemla_lab.bench.peers.base import Peer, installed
from sparsemla_lab.bench.training import SCALE, TrainingAttention, dense_side
from sparsemla_lab.bench.workloads import Inputs, Side, Workload


class FlashAttention3(Peer):
    """Dense attention of a training step, with values of fewer dims than keys."""

    name = "FlashAttention-3"

    def __init__(self, directories: list[Path]) -> None:
        self.module = installed("flash_attn_interface")

    def supports(self, workload: Workload) -> str | None:
        return None if isinstance(workload, TrainingAttention) else "has no such op"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            batch = (x[None] for x in (q, k, v))
            out = self.module.flash_attn_func(*batch, softmax_scale=SCALE, causal=True)
            # Older releases return the LSE, too.
            first: Tensor = out[0] if isinstance(out, tuple) else out
            return first[0]

        if not isinstance(workload, TrainingAttention):
            return []
        return [dense_side(self.name, workload, inputs, attend)]

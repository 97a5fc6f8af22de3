"""cuDNN's kernels in CuTe DSL (nvidia-cudnn-frontend)."""

from __future__ import annotations

from pathlib import Path

import torch

from sparsemla_lab.bench.peers.base import Peer, installed, side
from sparsemla_lab.bench.timing import Results
from sparsemla_lab.bench.workloads import Inputs, Side, SparseBackward, Workload


class CuDNN(Peer):
    """The gradients of attention; on Hopper it adds rows' terms by atomics, in any order."""

    name = "cuDNN"

    def __init__(self, directories: list[Path]) -> None:
        self.dsa = installed("cudnn").DSA

    def supports(self, workload: Workload) -> str | None:
        return None if isinstance(workload, SparseBackward) else "has no such op"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        names = ("q", "kv", "out", "dout", "lse")
        sink = torch.full_like(inputs["lse"][0], float("-inf"))
        arguments = [inputs[name] for name in names]

        def run() -> Results:
            results = self.dsa.sparse_attention_backward_wrapper(
                *arguments, sink, inputs["topk_indices"], softmax_scale=inputs["softmax_scale"]
            )
            return results["dq"], results["dkv"]

        return [side(self.name, workload, inputs, run)]

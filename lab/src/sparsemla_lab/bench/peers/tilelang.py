"""TileLang's DeepSeek-V3.2 examples."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import torch
from torch import Tensor

from sparsemla_lab.bench.peers.base import Peer, Unavailable, installed, module_from, side
from sparsemla_lab.bench.timing import Results
from sparsemla_lab.bench.workloads import (
    Inputs,
    SelectTopk,
    Side,
    SparseBackward,
    SparsePrefill,
    Workload,
)


class TileLang(Peer):
    """TileLang's DeepSeek-V3.2 examples."""

    name = "TileLang"
    LIST = 4096
    """Capacity of its list for keys in the threshold's bucket; it does not check the number."""

    def __init__(self, directories: list[Path]) -> None:
        installed("tilelang")
        files = {
            "sparse_mla_fwd_pipelined": "attention",
            "sparse_mla_bwd": "gradient",
            "topk_selector": "selector",
        }
        # The examples import a module of their folder.
        sys.path += [str(root / "deepseek_v32") for root in directories]
        self.modules = {
            use: module_from(path)
            for root in directories
            for file, use in files.items()
            if (path := root / "deepseek_v32" / f"{file}.py").is_file()
        }
        if not self.modules:
            raise Unavailable("DIR/deepseek_v32 holds none of its examples")

    def supports(self, workload: Workload) -> str | None:
        if isinstance(workload, SparseBackward) and "gradient" in self.modules:
            return self._refusal_of_gradient(workload)
        if isinstance(workload, SparsePrefill) and "attention" in self.modules:
            return None if workload.head_dim == 576 else "its example takes a head_dim of 576"
        if isinstance(workload, SelectTopk) and "selector" in self.modules:
            return None
        return "has no such op"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        if isinstance(workload, SelectTopk):
            scores, topk = inputs["scores"], inputs["topk"]
            if (crowd := largest_bucket(scores, topk)) > self.LIST:
                raise ValueError(
                    f"it would write past its list of {self.LIST} keys: {crowd} of a row share the "
                    "threshold's bucket"
                )
            ends = torch.full((len(scores),), scores.shape[1], device=scores.device).int()
            starts, select = torch.zeros_like(ends), self.modules["selector"].tl_topk

            def selector() -> Results:
                return (select(scores, starts, ends, topk),)

            return [side(self.name, workload, inputs, selector)]
        if isinstance(workload, SparseBackward):
            return [self.gradient(workload, inputs)]
        q, kv = inputs["q"][None], inputs["kv"][None, :, None]
        indices, first = inputs["topk_indices"][None, :, None], kv.shape[1]
        # Its causal mask is by position: put the tokens after all keys, so that they see every key.
        position = torch.full((1,), first, dtype=torch.int32, device=q.device)
        interface = self.modules["attention"].sparse_mla_fwd_interface
        kernel = interface(
            q, kv, indices, first, 1, sm_scale=inputs["softmax_scale"], return_kernel=True
        )

        def attention() -> Results:
            return (kernel(q, kv, indices, position)[0][0],)

        return [side(self.name, workload, inputs, attention)]

    @staticmethod
    def _refusal_of_gradient(workload: SparseBackward) -> str | None:
        """Why its backward pass does not take a workload, or None."""
        if workload.head_dim != 576:
            return f"its example takes a head_dim of 576, got {workload.head_dim}"
        if workload.heads < 16 or workload.heads.bit_count() > 1:
            return f"its example takes 16 heads or a larger power of two, got {workload.heads}"
        if workload.topk % 32:
            return f"its example takes lists of a multiple of 32 entries, got {workload.topk}"
        return None if workload.causal else "its example masks rows behind the token of their index"

    def gradient(self, workload: Workload, inputs: Inputs) -> Side:
        ids, num_rows = inputs["topk_indices"], len(inputs["kv"])
        if not bool((ids >= 0).any(1).all()):
            raise ValueError("its gradients are NaN if a token has no row")
        # As in its own test, a missing entry names the row after the last. Such an entry is masked,
        # and TileLang guards reads and adds, so it costs neither. The LSE is a base-2 logarithm.
        indices = ids.where(ids >= 0, num_rows)[None, :, None]
        lse = inputs["lse"][None] / math.log(2)
        q, kv = inputs["q"][None], inputs["kv"][None, :, None]
        backward = self.modules["gradient"].sparse_mla_bwd

        def run() -> Results:
            dq, dkv = backward(
                q,
                kv,
                inputs["out"][None],
                inputs["dout"][None],
                indices,
                lse,
                sm_scale=inputs["softmax_scale"],
            )
            return dq[0], dkv[0, :, 0]

        return side(self.name, workload, inputs, run)


def largest_bucket(scores: Tensor, topk: int) -> int:
    """Most scores of a row that share the upper 8 bits of their float16 with its threshold."""
    upper = scores.half().view(torch.uint8)[..., 1::2]
    threshold = scores.topk(topk).values[:, -1:].half().view(torch.uint8)[..., 1::2]
    return int((upper == threshold).sum(1).max())

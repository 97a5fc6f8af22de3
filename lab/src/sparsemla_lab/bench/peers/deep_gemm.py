"""DeepGEMM: the package, or vLLM's copy of it."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from sparsemla.cache import slots_of
from sparsemla_lab.bench.peers.base import Peer, Unavailable, installed, side
from sparsemla_lab.bench.peers.vllm import VLLM
from sparsemla_lab.bench.timing import Results
from sparsemla_lab.bench.workloads import (
    INDEX_HEADS,
    PAGE_SIZE,
    IndexerScores,
    IndexerScoresPaged,
    IndexerTopk,
    Inputs,
    Side,
    Workload,
)

LEAST_HEADS = 32
"""Heads to which vLLM pads the queries of GLM-5.3-Flash, before DeepGEMM takes them."""


def load(directories: list[Path]) -> types.ModuleType:
    """The package ``deep_gemm``.

    Raises:
        Unavailable: it is not there.
    """
    for root in directories:
        third_party = str(root / "vllm/third_party")
        if (root / "vllm/third_party/deep_gemm").is_dir():
            if third_party not in sys.path:
                sys.path.insert(0, third_party)
            break
    return installed("deep_gemm")


class DeepGEMM(Peer):
    """DeepGEMM's FP8 indexer scores; it compiles at first use and needs ``CUDA_HOME``."""

    name = "DeepGEMM"

    def __init__(self, directories: list[Path]) -> None:
        load(directories)
        if not hasattr(torch.ops.deep_gemm, "fp8_fp4_mqa_logits"):
            raise Unavailable("deep_gemm registers no torch.ops.deep_gemm.fp8_fp4_mqa_logits")

    def supports(self, workload: Workload) -> str | None:
        ops = (IndexerScores, IndexerScoresPaged, IndexerTopk)
        return None if isinstance(workload, ops) else "has no such op"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        if isinstance(workload, IndexerTopk):
            return self._indexer_topk(workload, inputs)
        ops, q, weights = torch.ops.deep_gemm, inputs["index_q"], inputs["weights"]
        if isinstance(workload, IndexerScores):
            context = workload.context
            rest = inputs["index_k"], inputs["index_k_scales"], weights
            bounds = inputs["row_starts"], inputs["row_ends"]

            def ragged() -> Results:
                logits = ops.fp8_fp4_mqa_logits(q, None, *rest, *bounds, context, None)
                return (logits[:, :context],)

            return [side(self.name, workload, inputs, ragged)]
        lens, table, length = inputs["seq_lens"], inputs["page_table"], inputs["max_seq_len"]
        cache, flat = inputs["cache"].data.unsqueeze(2), weights.view(-1, INDEX_HEADS)
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        schedule = ops.get_paged_mqa_logits_metadata(lens, PAGE_SIZE, processors, None)

        def paged() -> Results:
            logits = ops.fp8_fp4_paged_mqa_logits(
                q, None, cache, flat, lens, table, schedule, length, None
            )
            return (logits.unflatten(0, lens.shape)[..., :length],)

        return [side(self.name, workload, inputs, paged)]

    def _indexer_topk(self, workload: IndexerTopk, inputs: Inputs) -> list[Side]:
        """Scores of all tokens at once, then each of vLLM's selections, or torch's."""
        missing = max(0, LEAST_HEADS - workload.heads)
        inputs = inputs | {
            "index_q": torch.nn.functional.pad(inputs["index_q"], (0, 0, 0, missing)),
            "weights": torch.nn.functional.pad(inputs["weights"], (0, missing)),
        }
        scores = self._scores_of_prefill if workload.query_len > 1 else self._scores_of_decode
        compute, starts, ends = scores(workload, inputs)
        topk, ops = workload.topk, torch.ops._C
        num_rows = len(ends)
        out = torch.empty(num_rows, topk, dtype=torch.int32, device=ends.device)
        room = torch.zeros(VLLM.WORKSPACE_BYTES, dtype=torch.uint8, device=ends.device)

        def of_prefill(logits: Tensor) -> None:
            ops.top_k_per_row_prefill(logits, starts, ends, out, num_rows, *logits.stride(), topk)

        def of_decode(logits: Tensor) -> None:
            ops.top_k_per_row_decode(logits, 1, ends, out, num_rows, *logits.stride(), topk)

        def persistent(logits: Tensor) -> None:
            ops.persistent_topk(logits, ends, out, room, topk, workload.keys)

        def cooperative(logits: Tensor) -> None:
            ops.cooperative_topk(logits, ends, out, room, topk, workload.keys)

        def of_torch(logits: Tensor) -> None:
            columns = torch.arange(logits.shape[1], device=logits.device)
            logits.masked_fill_(columns >= ends[:, None], -torch.inf)
            out.copy_(logits.topk(topk, sorted=False).indices)

        kernels = {
            "top_k_per_row_prefill": of_prefill,
            "top_k_per_row_decode": of_decode,
            "persistent_topk": persistent,
        }
        if num_rows <= VLLM.COOPERATIVE_ROWS:
            kernels["cooperative_topk"] = cooperative
        kernels = {name: kernel for name, kernel in kernels.items() if hasattr(ops, name)}

        def runner(select: Callable[[Tensor], None]) -> Callable[[], Results]:
            def run() -> Results:
                select(compute())
                return (out,)

            return run

        return [
            side(f"DeepGEMM + {name}", workload, inputs, runner(kernel))
            for name, kernel in (kernels or {"torch.topk": of_torch}).items()
        ]

    def _scores_of_prefill(
        self, workload: IndexerTopk, inputs: Inputs
    ) -> tuple[Callable[[], Tensor], Tensor, Tensor]:
        """Scores over contiguous keys; these are gathered before the clock starts."""
        num_keys, device = workload.keys, inputs["index_q"].device
        slots = slots_of(
            inputs["page_table"],
            torch.zeros(num_keys, dtype=torch.int32, device=device),
            torch.arange(num_keys, device=device),
            PAGE_SIZE,
        )
        stored = inputs["cache"].gather(slots)
        keys = stored.fp8, stored.scales[:, 0].contiguous()
        seen = [workload.seen(place) for place in range(workload.query_len)]
        ends = torch.tensor(seen, dtype=torch.int32, device=device)
        starts = torch.zeros_like(ends)
        score, q = torch.ops.deep_gemm.fp8_fp4_mqa_logits, inputs["index_q"]

        def compute() -> Tensor:
            return cast(
                Tensor, score(q, None, *keys, inputs["weights"], starts, ends, num_keys, None)
            )

        return compute, starts, ends

    def _scores_of_decode(
        self, workload: IndexerTopk, inputs: Inputs
    ) -> tuple[Callable[[], Tensor], Tensor, Tensor]:
        ops, num_keys = torch.ops.deep_gemm, workload.keys
        ends = torch.full_like(inputs["seq_lens"], num_keys)
        lens, q = ends[:, None], inputs["index_q"][:, None]
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        schedule = ops.get_paged_mqa_logits_metadata(lens, PAGE_SIZE, processors, None)
        cache, table = inputs["cache"].data.unsqueeze(2), inputs["page_table"]

        def compute() -> Tensor:
            return cast(
                Tensor,
                ops.fp8_fp4_paged_mqa_logits(
                    q, None, cache, inputs["weights"], lens, table, schedule, num_keys, None
                ),
            )

        return compute, torch.zeros_like(ends), ends

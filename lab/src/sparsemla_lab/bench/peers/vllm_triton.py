"""vLLM's indexer scores in Triton, for its decodes on AMD; loaded without vLLM."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor

from sparsemla_lab.bench.peers.base import Peer, Unavailable, module_from, side, stand_ins
from sparsemla_lab.bench.peers.vllm_python import PLATFORM, triton_utils
from sparsemla_lab.bench.timing import Results
from sparsemla_lab.bench.workloads import (
    INDEX_HEADS,
    IndexerScoresPaged,
    Inputs,
    Side,
    Workload,
)


class VLLMTriton(Peer):
    """Its scores over pages, from FP8 MMAs."""

    name = "vLLM rocm_fp8_paged_mqa_logits_triton"
    portable = True
    FILE: ClassVar[str] = "vllm/v1/attention/ops/rocm_aiter_mla_sparse.py"

    def __init__(self, directories: list[Path]) -> None:
        for root in directories:
            if (root / self.FILE).is_file():
                with stand_ins("vllm", _names()):
                    self.scores = module_from(root / self.FILE).rocm_fp8_paged_mqa_logits_triton
                return
        raise Unavailable(f"{self.FILE} is not there")

    def supports(self, workload: Workload) -> str | None:
        return None if isinstance(workload, IndexerScoresPaged) else "has no such op"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        q, lens, table = (inputs[name] for name in ("index_q", "seq_lens", "page_table"))
        cache, weights = inputs["cache"].data.unsqueeze(2), inputs["weights"].view(-1, INDEX_HEADS)

        def run() -> Results:
            scores = self.scores(q, cache, weights, lens, table, inputs["max_seq_len"])
            return (scores.unflatten(0, lens.shape),)

        return [side(self.name, workload, inputs, run)]


class _Workspaces:
    """Stands in for vLLM's manager of workspaces: a new tensor for each."""

    def get_simultaneous(self, *sizes: tuple[tuple[int, ...], torch.dtype]) -> list[Tensor]:
        device = torch.cuda.current_device()
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in sizes]


def _names() -> dict[str, dict[str, object]]:
    """The names of vLLM that the file imports; its other functions need what is None here."""
    return {
        "vllm.compilation.breakable_cudagraph": {"eager_break_during_capture": lambda call: call},
        "vllm.config": {"CUDAGraphMode": None, "get_current_vllm_config": None},
        "vllm.envs": {},
        "vllm.forward_context": {"get_forward_context": None},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {"current_platform": PLATFORM},
        "vllm.triton_utils": triton_utils(),
        "vllm.utils.torch_utils": {
            "LayerNameType": str,
            "direct_register_custom_op": lambda **_: None,
        },
        "vllm.v1.attention.backends.mla.indexer": {"DeepseekV32IndexerMetadata": SimpleNamespace},
        "vllm.v1.attention.ops.common": {"pack_seq_triton": None, "unpack_seq_triton": None},
        "vllm.v1.worker.workspace": {"current_workspace_manager": _Workspaces},
    }

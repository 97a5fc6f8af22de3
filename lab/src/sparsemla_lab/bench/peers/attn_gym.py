"""attention-gym's kernels in Triton for the attention and the indexer of DeepSeek's models."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import torch

from sparsemla.cache import slots_of
from sparsemla_lab.bench.peers.base import Peer, Unavailable, side
from sparsemla_lab.bench.timing import Results
from sparsemla_lab.bench.workloads import (
    PAGE_SIZE,
    IndexerTopk,
    Inputs,
    Side,
    SparsePrefill,
    Workload,
)


class AttentionGym(Peer):
    """``gather_attn`` without a window, and ``lightning_indexer`` on keys in bfloat16.

    Its own choice of kernels would unroll a loop over the selection on every GPU before Blackwell,
    which compiles for minutes from 64 rows on. The benchmark takes its kernel for Blackwell.
    """

    name = "attn-gym"
    portable = True

    def __init__(self, directories: list[Path]) -> None:
        for root in directories:
            if (root / "attn_gym/sparse").is_dir():
                # The package's own file imports everything.
                spec = ModuleSpec("attn_gym", None, is_package=True)
                spec.submodule_search_locations = [str(root / "attn_gym")]
                sys.modules.setdefault("attn_gym", importlib.util.module_from_spec(spec))
                break
        else:
            raise Unavailable("attn_gym/sparse is not there")
        attention = "attn_gym.sparse.gather_attn.impl.triton"
        forward = importlib.import_module(f"{attention}.forward")
        vars(forward)["can_use_shared_kv_schedule"] = lambda *_: True
        self.attend = importlib.import_module(attention).gather_attn
        self.select = importlib.import_module("attn_gym.sparse.indexer.impl.triton").launch

    def supports(self, workload: Workload) -> str | None:
        if isinstance(workload, SparsePrefill):
            fits = workload.head_dim == 512 and 16 <= workload.heads <= 128
            return None if fits else "takes 16 to 128 heads, and rows of 512 dims that are values"
        if isinstance(workload, IndexerTopk):
            whole = workload.batch == workload.ratio == 1 and workload.query_len == workload.context
            return None if whole else "selects for all tokens of a sequence"
        return "has no such op"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        if isinstance(workload, IndexerTopk):
            return [self._indexer(workload, inputs)]
        q = inputs["q"].transpose(0, 1)[None].contiguous()  # [1, H, T, D]
        rows, ids = inputs["kv"][None, None], inputs["topk_indices"][None]
        local = rows.new_empty(1, 1, q.shape[2], q.shape[3])  # no row of it is in a window of 0
        sink = torch.full(q.shape[1:2], -torch.inf, device=q.device)
        scale = inputs["softmax_scale"]

        def run() -> Results:
            out, _ = self.attend(q, local, rows, ids, sink, None, None, 0, True, scale=scale)
            return (out[0].transpose(0, 1),)

        name = f"{self.name} gather_attn"
        return [side(name, workload, inputs, run, "its kernel for Blackwell")]

    def _indexer(self, workload: IndexerTopk, inputs: Inputs) -> Side:
        device = inputs["index_q"].device
        tokens = torch.arange(workload.keys, device=device)
        slots = slots_of(
            inputs["page_table"], torch.zeros_like(tokens, dtype=torch.int32), tokens, PAGE_SIZE
        )
        keys = inputs["cache"].read(slots).bfloat16()[None]
        q, weights = (inputs[name].bfloat16()[None] for name in ("index_q", "weights"))

        def run() -> Results:
            return (self.select(q, keys, weights, workload.topk, True, 1)[0],)

        return side(f"{self.name} lightning_indexer", workload, inputs, run, "bfloat16 MMA")

"""FlashMLA: the package, or vLLM's build of it."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any, ClassVar

import torch

from sparsemla import ops
from sparsemla.formats import BF16_576, FP8_584, FP8_DS_MLA
from sparsemla_lab.bench.peers.base import Peer, first, installed, module_from, side
from sparsemla_lab.bench.peers.vllm import VLLM
from sparsemla_lab.bench.timing import Results
from sparsemla_lab.bench.workloads import (
    CachedPrefill,
    DenseDecode,
    Inputs,
    Side,
    SparseDecode,
    SparsePrefill,
    WindowedDecode,
    WindowedPrefill,
    Workload,
)


class FlashMLA(Peer):
    """FlashMLA's sparse prefill, sparse FP8 decode and dense decode."""

    name = "FlashMLA"
    HEADS: ClassVar[tuple[int, ...]] = (64, 128)
    module: Any
    """``flash_mla_with_kvcache``, ``flash_mla_sparse_fwd`` and ``get_mla_metadata``."""

    def __init__(self, directories: list[Path]) -> None:
        for root in directories:
            if library := first(root, "vllm/_flashmla_C*.so"):
                torch.ops.load_library(str(library))
                source = root / "vllm/third_party/flashmla/flash_mla_interface.py"
                with _StandIn("vllm", "_flashmla_C"):
                    self.module = module_from(source)
                return
        self.module = installed("flash_mla")

    def supports(self, workload: Workload) -> str | None:
        if isinstance(workload, (SparsePrefill, CachedPrefill, SparseDecode)):
            if isinstance(workload, SparseDecode) and workload.format not in (FP8_DS_MLA, FP8_584):
                return "decodes from caches of 656 and 584 bytes a token"
            return None if workload.topk % 128 == 0 else "takes a topk that is a multiple of 128"
        if isinstance(workload, WindowedPrefill):
            return None if workload.heads in FlashMLA.HEADS else "takes 64 or 128 heads"
        if isinstance(workload, DenseDecode):
            return None if workload.format is BF16_576 else "takes a bfloat16 cache"
        return "has no such op"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        if isinstance(workload, CachedPrefill):
            return [self._after_gather(workload, inputs)]
        if isinstance(workload, WindowedPrefill):
            return [self._after_gathers(workload, inputs)]
        if isinstance(workload, DenseDecode):
            return [self._dense(workload, inputs)]
        q, scale = inputs["q"], inputs["softmax_scale"]
        heads = q.shape[-2]
        padded = min(size for size in self.HEADS if size >= heads)
        note = "" if padded == heads else f"heads padded to {padded}"
        pad = torch.nn.functional.pad
        q = pad(q, (0, 0, 0, padded - heads)).contiguous()
        indices, more = inputs["topk_indices"], {}
        if isinstance(workload, SparsePrefill):

            def prefill() -> Results:
                kv, selected = inputs["kv"][:, None], indices[:, None]
                out = self.module.flash_mla_sparse_fwd(q, kv, selected, scale)[0]
                return (out[:, :heads],)

            return [side(self.name, workload, inputs, prefill, note)]
        cache, schedule = inputs["cache"].data.unsqueeze(2), self.module.get_mla_metadata()[0]
        if isinstance(workload, WindowedDecode):
            more = {
                "attn_sink": pad(inputs["attn_sink"], (0, padded - heads)),
                "topk_length": inputs["topk_lengths"],
                "extra_k_cache": inputs["extra_cache"].data.unsqueeze(2),
                "extra_indices_in_kvcache": inputs["extra_topk_indices"],
                "extra_topk_length": inputs["extra_topk_lengths"],
            }

        def sparse() -> Results:
            out, _ = self.module.flash_mla_with_kvcache(
                q, cache, None, None, 512, schedule, None, scale, False, True, indices, **more
            )
            return (out[:, :, :heads],)

        return [side(self.name, workload, inputs, sparse, note)]

    def _dense(self, workload: DenseDecode, inputs: Inputs) -> Side:
        cache, schedule = inputs["cache"].data.unsqueeze(2), self.module.get_mla_metadata()[0]
        q, table, lens, scale = (
            inputs[name] for name in ("q", "page_table", "seq_lens", "softmax_scale")
        )

        def run() -> Results:
            decode = self.module.flash_mla_with_kvcache
            return (decode(q, cache, table, lens, 512, schedule, None, scale, True)[0],)

        return side(self.name, workload, inputs, run)

    def _after_gather(self, workload: CachedPrefill, inputs: Inputs) -> Side:
        """Its prefill over rows converted by vLLM's kernel, or without vLLM by ours."""
        table, starts, rows = (inputs[n] for n in ("page_table", "workspace_starts", "workspace"))
        theirs = workload.format is FP8_DS_MLA and hasattr(torch.ops._C_cache_ops, VLLM.GATHER)

        def run() -> Results:
            if theirs:
                gather = getattr(torch.ops._C_cache_ops, VLLM.GATHER)
                gather(inputs["cache"].data, rows, table, starts, 1, None)
            else:
                ops.gather_dequant(inputs["cache"], table, inputs["seq_lens"], starts, out=rows)
            indices = inputs["positions"][:, None]
            attend = self.module.flash_mla_sparse_fwd
            return (attend(inputs["q"], rows[:, None], indices, inputs["softmax_scale"])[0],)

        name = f"{self.name} after {'vLLM' if theirs else 'sparsemla'}'s gather"
        return side(name, workload, inputs, run)

    def _after_gathers(self, workload: WindowedPrefill, inputs: Inputs) -> Side:
        """Its prefill over rows of both caches, converted by our kernel."""
        q, indices = inputs["q"], inputs["workspace_rows"][:, None]
        scale, sink = inputs["softmax_scale"], inputs["attn_sink"]

        def run() -> Results:
            rows = workload.convert(inputs)[:, None]
            return (self.module.flash_mla_sparse_fwd(q, rows, indices, scale, 512, sink)[0],)

        return side(f"{self.name} after sparsemla's gather", workload, inputs, run)


class _StandIn:
    """An empty package with an empty module, unless the package is imported.

    FlashMLA's interface imports its extension as a module of vLLM, only to register its ops.
    """

    def __init__(self, package: str, module: str) -> None:
        self.names = (package, f"{package}.{module}")
        self.added: list[str] = []

    def __enter__(self) -> None:
        for name in self.names:
            if name not in sys.modules:
                sys.modules[name] = types.ModuleType(name)
                self.added.append(name)
        sys.modules[self.names[0]].__dict__.setdefault("__path__", [])

    def __exit__(self, *error: object) -> None:
        for name in self.added:
            del sys.modules[name]

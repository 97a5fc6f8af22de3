"""SGLang's kernels: its FlashMLA for Hopper, and its Triton prefill for few heads."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from sparsemla.bench.peers.base import Peer, Unavailable, first, module_from, side
from sparsemla.bench.peers.flash_mla import FlashMLA
from sparsemla.bench.timing import Results
from sparsemla.bench.workloads import (
    Inputs,
    Side,
    SparseDecode,
    SparsePrefill,
    Workload,
)


class SglFlashMLA(FlashMLA):
    """The sparse decode of the package sgl_flash_mla, which keeps FlashMLA's Hopper kernels."""

    name = "sgl_flash_mla"
    LIBRARY: ClassVar[str] = "sgl_flash_mla/_C_legacy*.so"

    def __init__(self, directories: list[Path]) -> None:
        for root in directories:
            if library := first(root, self.LIBRARY):
                torch.ops.load_library(str(library))
                self.module = _Legacy()
                return
        raise Unavailable(f"{self.LIBRARY} is not there")

    def supports(self, workload: Workload) -> str | None:
        return super().supports(workload) if isinstance(workload, SparseDecode) else "not measured"


class _Legacy:
    """FlashMLA's interface over the op of the package's library."""

    def get_mla_metadata(self) -> tuple[list[Tensor | None], None]:
        """A schedule that the first call fills: tiles of each CTA, splits of each request."""
        return [None, None], None

    def flash_mla_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        table: None,
        lens: None,
        dims: int,
        schedule: list[Tensor | None],
        splits: None,
        scale: float,
        causal: bool,
        fp8: bool,
        indices: Tensor,
        *,
        topk_length: Tensor | None = None,
        attn_sink: Tensor | None = None,
        **extra: Tensor,
    ) -> tuple[Tensor, Tensor]:
        names = "extra_k_cache", "extra_indices_in_kvcache", "extra_topk_length"
        second = (extra.get(name) for name in names)
        decode = torch.ops.flash_mla_legacy.sparse_decode_fwd
        out, lse, *schedule[:] = decode(
            q, k_cache, indices, topk_length, attn_sink, *schedule, *second, dims, scale, None
        )
        return out, lse


class SGLangTriton(Peer):
    """Its Triton prefill: a program takes one token, or the union of 2 or 4 tokens' selections."""

    name = "SGLang Triton"
    FILE: ClassVar[str] = "triton_sparse_mla_prefill.py"
    ROWS: ClassVar[range] = range(16, 33)
    """Rows of a tile over a union: heads times tokens."""

    def __init__(self, directories: list[Path]) -> None:
        for root in directories:
            if path := first(root, self.FILE) or first(root, f"sglang/**/{self.FILE}"):
                self.module = module_from(path)
                return
        raise Unavailable(f"{self.FILE} is not there")

    def supports(self, workload: Workload) -> str | None:
        if not isinstance(workload, SparsePrefill):
            return "has no such op"
        return None if workload.heads <= 32 else "is for up to 32 heads"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        q, kv, indices, scale = (
            inputs[name] for name in ("q", "kv", "topk_indices", "softmax_scale")
        )
        lens = torch.full((len(q),), workload.shape["topk"], dtype=torch.int32, device=q.device)

        def one() -> Results:
            return (self.module.sparse_mla_prefill(q, kv, indices, scale, topk_length=lens),)

        def union(tokens: int) -> Side:
            def run() -> Results:
                return (self.module.sparse_mla_prefill(q, kv, indices, scale, union=tokens),)

            return side(f"{self.name}, union of {tokens}", workload, inputs, run)

        unions = [n for n in (2, 4) if q.shape[1] * n in self.ROWS]
        return [side(self.name, workload, inputs, one), *(union(n) for n in unions)]

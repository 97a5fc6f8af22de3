"""SGLang's kernels: FlashMLA for Hopper, prefills for few heads and in FP8, candidate blocks."""

from __future__ import annotations

import ctypes
import importlib
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor

from sparsemla import ops, reference
from sparsemla.formats import FP8_MAX, to_fp8
from sparsemla_lab.bench.peers.base import Peer, Unavailable, first, module_from, side, stand_ins
from sparsemla_lab.bench.peers.flash_mla import FlashMLA
from sparsemla_lab.bench.timing import Results
from sparsemla_lab.bench.workloads import (
    IndexerTopkBlocks,
    IndexerTopkOfBlocks,
    Inputs,
    PermittedPrefill,
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
    portable = True
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
        if workload.head_dim != 576:
            return "takes rows of 512 and 64 dims"
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


class SGLangQ8KV8(Peer):
    """Its prefill with FP8 MMAs, one scale for all queries and one for all rows.

    SGLang compiles it at first use. The benchmark calls a library that was compiled beforehand,
    through its C function ``q8kv8_prefill(q, kv, indices, q_scale, kv_scale, out, max_logits, lse,
    tokens, rows, heads, topk, softmax_scale, stream)``. Queries and rows are cast before the clock
    starts.
    """

    name = "SGLang Q8KV8"
    LIBRARY: ClassVar[str] = "libq8kv8.so"
    LARGEST_ERROR: ClassVar[float] = 0.06
    """Relative L2 norm of the error. Roundings to e4m3 make 0.033 of normally distributed rows."""

    def __init__(self, directories: list[Path]) -> None:
        for root in directories:
            if path := first(root, self.LIBRARY):
                self.prefill = ctypes.CDLL(str(path)).q8kv8_prefill
                pointers, sizes = [ctypes.c_void_p] * 8, [ctypes.c_long] * 4
                self.prefill.argtypes = [*pointers, *sizes, ctypes.c_double, ctypes.c_void_p]
                return
        raise Unavailable(f"{self.LIBRARY} is not there")

    def supports(self, workload: Workload) -> str | None:
        if not isinstance(workload, PermittedPrefill):
            return "has FP8 MMAs only"
        return None if workload.heads % 64 == 0 else "is for multiples of 64 heads"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        workload = cast("PermittedPrefill", workload)
        indices = inputs["topk_indices"]
        # The rows behind the last are for indices of -1.
        rows = torch.nn.functional.pad(inputs["kv"], (0, 0, 0, indices.shape[1]))
        (q, q_scale), (kv, kv_scale) = (_cast(x) for x in (inputs["q"], rows))
        out = q.new_empty(*q.shape[:2], 512, dtype=torch.bfloat16)
        max_logits, lse = out.new_empty(2, *q.shape[:2], dtype=torch.float32)
        tensors = q, kv, indices, q_scale, kv_scale, out, max_logits, lse
        sizes = len(q), len(kv), q.shape[1], indices.shape[1], inputs["softmax_scale"]

        def run() -> Results:
            stream = torch.cuda.current_stream().cuda_stream
            if code := self.prefill(*(x.data_ptr() for x in tensors), *sizes, stream):
                raise RuntimeError(f"{self.name} returned {code}")
            return out, lse

        def check(got: Results) -> None:
            some = workload.some(inputs)
            expected, _, _ = reference.sparse_prefill(**workload.of(inputs, some))
            error = ((got[0][some] - expected).norm() / expected.norm()).item()
            if not error <= self.LARGEST_ERROR:
                raise AssertionError(f"{self.name}: relative error {error:.3f}")

        return [Side(self.name, run, check, note="one scale a tensor")]


class SGLangCandidateBlocks(Peer):
    """DeepSeek-V4.1's selections in two steps: SGLang's functions of torch, over our scores.

    On Hopper SGLang scores all keys also for the second step. Scores are this package's, as SGLang
    takes them from DeepGEMM.
    """

    name = "SGLang candidate_blocks"
    portable = True
    FOLDER: ClassVar[str] = "sglang.kernels.ops.attention.dsv4"

    def __init__(self, directories: list[Path]) -> None:
        path = self.FOLDER.replace(".", "/")
        for root in directories:
            if (root / path / "candidate_blocks.py").is_file():
                with stand_ins("sglang", _names_of_blocks(root / path)):
                    self.module = importlib.import_module(f"{self.FOLDER}.candidate_blocks")
                return
        raise Unavailable(f"{path}/candidate_blocks.py is not there")

    def supports(self, workload: Workload) -> str | None:
        ops = (IndexerTopkBlocks, IndexerTopkOfBlocks)
        return None if isinstance(workload, ops) else "has no such op"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        workload = cast("IndexerTopkBlocks | IndexerTopkOfBlocks", workload)
        rows = workload.batch, workload.query_len
        lens = [workload.seen(place) for place in range(workload.query_len)]
        ends = torch.tensor([lens] * workload.batch, dtype=torch.int32, device=inputs["out"].device)
        q, weights = (inputs[name].unflatten(0, rows) for name in ("index_q", "weights"))
        request = inputs["cache"], inputs["page_table"], ends
        flat, topk, size = ends.flatten(), workload.topk, workload.block_size

        def score() -> Tensor:
            scores = ops.indexer_scores_paged(q, weights, *request, max_seq_len=workload.keys)
            return scores.flatten(0, 1)

        def choose() -> Results:
            scores = score()
            best = scores.topk(min(topk, workload.keys), sorted=False)
            keys = best.indices.int().masked_fill(best.values == -torch.inf, -1)
            count = cast("IndexerTopkBlocks", workload).topk_blocks
            select = self.module.select_candidate_block_ids
            return keys, select(scores, flat[:, None], count, size)

        def among() -> Results:
            return (self.module.topk_among_blocks(score(), flat, inputs["blocks"], topk, size),)

        run = choose if isinstance(workload, IndexerTopkBlocks) else among
        return [side(self.name, workload, inputs, run, note="scores of sparsemla")]


def _names_of_blocks(folder: Path) -> dict[str, dict[str, object]]:
    """The names of SGLang that its candidate blocks import; none of them is called."""
    names = ("cache_once", "is_arch_support_pdl", "load_jit", "make_cpp_args")
    here = SGLangCandidateBlocks.FOLDER
    return {
        here: {"__path__": [str(folder)]},
        "sglang.kernels.jit.utils": dict.fromkeys(names, _untouched),
        f"{here}.candidate_table": {"CANDIDATE_BLOCK_SIZE": 8},
        f"{here}.topk": dict.fromkeys(("plan_topk_v2", "topk_transform_paged_v2")),
        f"{here}.utils": {"make_name": None},
    }


def _untouched(function: object) -> object:
    return function


def _cast(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 codes, and one scale for all of them."""
    scale = (x.abs().amax().float() / FP8_MAX).reshape(1)
    return to_fp8(x.float() / scale), scale

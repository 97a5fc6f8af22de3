"""vLLM's kernels of top-k, cache writes and gathers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from sparsemla import reference
from sparsemla.cache import PagedCache
from sparsemla.formats import FP8_DS_MLA, INDEX_FP8, CacheFormat
from sparsemla_lab.bench.peers.base import Peer, Unavailable, first, side
from sparsemla_lab.bench.timing import Results
from sparsemla_lab.bench.workloads import (
    CacheWrite,
    Gather,
    IndexWrite,
    Inputs,
    QueryNormWrite,
    SelectTopk,
    Side,
    Workload,
)
from sparsemla_lab.testing.compare import Tolerance, assert_close

# Both sides round a value to e4m3, by up to 2^-4 of it, and to bfloat16 before or after.
CACHE_ROWS = Tolerance(rel=0.14, cos=1e-3, size=2**-3)
"""Tolerance of e4m3 rows times their scales, against other such rows or unquantised rows."""


class VLLM(Peer):
    """vLLM's own top-k, cache write and gather kernels."""

    name = "vLLM"
    GATHER: ClassVar[str] = "cp_gather_and_upconvert_fp8_kv_cache"
    WORKSPACE_BYTES: ClassVar[int] = 64 << 20
    COOPERATIVE_ROWS: ClassVar[int] = 64
    """Most rows of ``cooperative_topk``, which vLLM prefers to ``persistent_topk``."""

    def __init__(self, directories: list[Path]) -> None:
        for root in directories:
            if library := first(root, "vllm/_C_stable_libtorch*.so"):
                torch.ops.load_library(str(library))
                return
        raise Unavailable("vllm/_C_stable_libtorch*.so is not there")

    def supports(self, workload: Workload) -> str | None:
        ops = (SelectTopk, CacheWrite, IndexWrite, Gather)
        return None if isinstance(workload, ops) else "has no such op"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        if isinstance(workload, SelectTopk):
            return self._topk(workload, inputs)
        if isinstance(workload, QueryNormWrite):
            return [self._query_norm_write(inputs)]
        if isinstance(workload, CacheWrite):
            return self._cache_write(workload, inputs)
        if isinstance(workload, IndexWrite):
            return self._index_write(workload, inputs)
        gather = getattr(torch.ops._C_cache_ops, self.GATHER)
        starts, out = inputs["workspace_starts"], torch.empty_like(inputs["out"])
        cache, table = inputs["cache"].data, inputs["page_table"]

        def run() -> Results:
            gather(cache, out, table, starts, len(starts), None)
            return (out,)

        return [side("vLLM cp_gather_and_upconvert", workload, inputs, run)]

    def _topk(self, workload: SelectTopk, inputs: Inputs) -> list[Side]:
        ops, scores, topk = torch.ops._C, inputs["scores"], inputs["topk"]
        num_rows, num_cols = scores.shape
        ends = torch.full((num_rows,), num_cols, dtype=torch.int32, device=scores.device)
        starts = torch.zeros_like(ends)
        workspace = torch.zeros(self.WORKSPACE_BYTES, dtype=torch.uint8, device=scores.device)
        layout = num_rows, *scores.stride(), topk
        kernels: dict[str, Callable[[Tensor], object]] = {
            "top_k_per_row_prefill": lambda out: ops.top_k_per_row_prefill(
                scores, starts, ends, out, *layout
            ),
            "top_k_per_row_decode": lambda out: ops.top_k_per_row_decode(
                scores, 1, ends, out, *layout
            ),
            "persistent_topk": lambda out: ops.persistent_topk(
                scores, ends, out, workspace, topk, num_cols
            ),
        }
        if num_rows <= self.COOPERATIVE_ROWS:
            kernels["cooperative_topk"] = lambda out: ops.cooperative_topk(
                scores, ends, out, workspace, topk, num_cols
            )

        def runner(kernel: Callable[[Tensor], object]) -> Callable[[], Results]:
            out = torch.empty(num_rows, topk, dtype=torch.int32, device=scores.device)

            def run() -> Results:
                kernel(out)
                return (out,)

            return run

        return [
            side(f"vLLM {name}", workload, inputs, runner(kernel))
            for name, kernel in kernels.items()
            if hasattr(ops, name)
        ]

    def _cache_write(self, workload: CacheWrite, inputs: Inputs) -> list[Side]:
        write = torch.ops._C_cache_ops.concat_and_cache_mla
        kv, slots, format = inputs["kv"], inputs["slot_mapping"], workload.format
        latent, rope = kv[:, :512].contiguous(), kv[:, 512:].contiguous()
        cache = empty_like(inputs["cache"])
        one = torch.ones((), device=kv.device)

        def run() -> Results:
            write(latent, rope, cache.data, slots, self._cache_dtype(format), one, False)
            return (cache.data,)

        def check(results: Results) -> None:
            written = PagedCache(results[0], format).read(slots)
            assert_close("concat_and_cache_mla", written, kv, CACHE_ROWS)

        note = "no norm, no RoPE, no queries"
        return [
            Side("vLLM concat_and_cache_mla", run, check, note=note),
            self._whole_cache_write(inputs),
        ]

    @staticmethod
    def _cache_dtype(format: CacheFormat) -> str:
        return format.name if format is FP8_DS_MLA else "auto"

    def _whole_cache_write(self, inputs: Inputs) -> Side:
        """Its cache write and the fewest kernels that must run before it.

        The fused kernel rotates and writes with one scale for all rows: no 656-byte record.
        """
        ops, writes = torch.ops._C, torch.ops._C_cache_ops
        slots, positions = inputs["slot_mapping"], inputs["positions"]
        weight, table = inputs["kv_norm_weight"], inputs["cos_sin_cache"].bfloat16()
        kv, q = inputs["kv"].clone(), inputs["q_rope"].clone()
        latent, rope = kv[:, :512], kv[:, 512:]
        normed = torch.empty(latent.shape, dtype=kv.dtype, device=kv.device)
        cache = empty_like(inputs["cache"])
        one, dtype = torch.ones((), device=kv.device), self._cache_dtype(cache.format)

        def run_apart() -> Results:
            ops.rms_norm(normed, latent, weight, 1e-6)
            ops.rotary_embedding(positions, q, rope[:, None], 64, table, False)
            writes.concat_and_cache_mla(normed, rope, cache.data, slots, dtype, one, False)
            return q, cache.data

        def run_fused() -> Results:
            ops.rms_norm(normed, latent, weight, 1e-6)
            writes.concat_and_cache_mla_rope_fused(
                positions, q, rope, normed, table, False, slots, cache.data, dtype, one
            )
            return q, cache.data

        def reset() -> None:  # queries and keys are rotated in place
            q.copy_(inputs["q_rope"])
            kv.copy_(inputs["kv"])

        if cache.format is FP8_DS_MLA:
            name, run = "rms_norm, rotary_embedding, concat_and_cache_mla", run_apart
        else:
            name, run = "rms_norm, concat_and_cache_mla_rope_fused", run_fused
        return Side(f"vLLM {name}", run, lambda got: _check_written(inputs, got), reset)

    @staticmethod
    def _query_norm_write(inputs: Inputs) -> Side:
        """DeepSeek-V4's fused kernel, which takes rows that are normalised before."""
        fused = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
        q, kv, slots, positions, table = (
            inputs[name] for name in ("q_rope", "kv", "slot_mapping", "positions", "cos_sin_cache")
        )
        weight = inputs["kv_norm_weight"]
        normed = torch.nn.functional.rms_norm(kv.float(), kv.shape[1:], weight.float(), 1e-6)
        normed = normed.to(kv.dtype)
        cache = empty_like(inputs["cache"])
        pages, heads = cache.data.view(cache.num_pages, -1), q.shape[1]

        def run() -> Results:
            out = fused(q, normed, pages, slots, positions, table, heads, 1e-6, cache.page_size)
            return out, cache.data

        return Side(
            "vLLM fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
            run,
            lambda got: _check_written(inputs, got),
            note="rows normalised before, with the q-lora vectors",
        )

    def _index_write(self, workload: IndexWrite, inputs: Inputs) -> list[Side]:
        ops, writes = torch.ops._C, torch.ops._C_cache_ops
        slots, positions = inputs["slot_mapping"], inputs["positions"]
        table, weights = inputs["cos_sin_cache"].bfloat16(), inputs["weights"]
        norm = inputs["norm_weight"].bfloat16(), inputs["norm_bias"].bfloat16()
        q, codes = (
            inputs["index_q"].clone(),
            torch.empty_like(inputs["index_q"], dtype=torch.float8_e4m3fn),
        )
        num_tokens, num_heads, dim = q.shape
        scales = torch.empty(num_tokens * num_heads, 1, device=q.device)
        cache = empty_like(inputs["cache"])
        limits = 1e-4, -448.0, 448.0

        def run() -> Results:
            k = torch.nn.functional.layer_norm(inputs["index_k"], (dim,), *norm, 1e-6)
            ops.rotary_embedding(positions, q, k[:, None], dim, table, True)
            ops.per_token_group_fp8_quant(
                q.view(-1, dim), codes.view(-1, dim), scales, dim, *limits, True, False, False
            )
            folded = weights * (scales.view(num_tokens, num_heads) * (num_heads * dim) ** -0.5)
            writes.indexer_k_quant_and_cache(k, cache.data, slots, dim, "ue8m0")
            return codes, folded, cache.data

        def check(results: Results) -> None:
            expected = empty_like(inputs["cache"])
            queries, folded = reference.fused_indexer_rope_quant(**inputs | {"cache": expected})
            # A last bit may double a scale and halve its codes, so compare their products.
            weighted = results[0].float() * results[1].float()[..., None]
            assert_close("queries", weighted, queries.float() * folded[..., None], CACHE_ROWS)
            written = PagedCache(results[2], INDEX_FP8).read(slots)
            assert_close("keys", written, expected.read(slots), CACHE_ROWS)

        name = "vLLM rotary_embedding, per_token_group_fp8_quant, indexer_k_quant_and_cache"
        note = "with torch's layer_norm and products"

        def reset() -> None:  # queries are rotated in place
            q.copy_(inputs["index_q"])

        return [Side(name, run, check, reset, note)]


def _check_written(inputs: Inputs, results: Results) -> None:
    """Compare rotated queries and written rows with the reference."""
    cache = empty_like(inputs["cache"])
    queries, rows = reference.fused_rope_rmsnorm_quant(**inputs | {"cache": cache})
    assert_close("queries", results[0], queries.bfloat16(), CACHE_ROWS)
    written = PagedCache(results[1], cache.format).read(inputs["slot_mapping"])
    assert_close("rows", written, rows.bfloat16(), CACHE_ROWS)


def empty_like(cache: PagedCache) -> PagedCache:
    """A cache of the same format and size; its contents are not copied."""
    return PagedCache.allocate(
        cache.format, cache.num_pages, cache.page_size, device=cache.data.device
    )

"""Other people's kernels, where they are installed, on the inputs of a workload.

Looked for, first match: under a directory that holds ``vllm/`` as vLLM's wheel lays it out (its
extension modules load without vLLM's dependencies); among the files of an installed ``vllm``; as
the packages ``flash_mla`` and ``deep_gemm``. TileLang ships kernels as examples only; two files of
its ``examples/deepseek_v32``, ``sparse_mla_fwd_pipelined.py`` and ``topk_selector.py``, are taken
from ``DIR/deepseek_v32``.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import ClassVar, cast

import torch
from torch import Tensor

from sparsemla import ops, reference
from sparsemla.bench.timing import Results
from sparsemla.bench.workloads import (
    CHUNK_ROWS,
    INDEX_HEADS,
    PAGE_SIZE,
    CachedPrefill,
    CacheWrite,
    DenseDecode,
    Gather,
    HeadProducts,
    IndexerScores,
    IndexerScoresPaged,
    IndexerTopk,
    IndexWrite,
    Inputs,
    SelectTopk,
    Side,
    SparseDecode,
    SparsePrefill,
    WindowedDecode,
    Workload,
)
from sparsemla.cache import PagedCache, slots_of
from sparsemla.formats import BF16_576, FP8_584, FP8_DS_MLA, INDEX_FP8, CacheFormat
from sparsemla.testing.compare import UNQUANTIZED_PROJECTION, Tolerance, assert_close

# Both sides round a value to e4m3, by up to 2^-4 of it, and to bfloat16 before or after.
CACHE_ROWS = Tolerance(rel=0.14, cos=1e-3, size=2**-3)
"""e4m3 rows times their scales, against others or the rows they were made from."""


class Unavailable(Exception):
    """A peer is not installed; the message names the missing part."""


class Peer(ABC):
    """A competitor on one machine."""

    name: ClassVar[str]

    @abstractmethod
    def supports(self, workload: Workload) -> str | None:
        """Why it cannot take a workload, or None."""

    @abstractmethod
    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        """Its kernels for a workload that it supports; inputs are brought into its layout here."""


class Torch(Peer):
    """``torch.topk`` and ``torch.bmm`` in bfloat16, which are everywhere."""

    name = "torch"

    def supports(self, workload: Workload) -> str | None:
        ours = isinstance(workload, (SelectTopk, HeadProducts))
        return None if ours else "has no such op"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        if isinstance(workload, HeadProducts):
            return [self._products(workload, inputs)]

        def run() -> Results:
            return (inputs["scores"].topk(inputs["topk"], dim=-1, sorted=False).indices,)

        return [_side("torch.topk", workload, inputs, run)]

    @staticmethod
    def _products(workload: HeadProducts, inputs: Inputs) -> Side:
        x = inputs["x"].transpose(0, 1).contiguous()  # [H, T, K]
        weights = [w.dequantize().bfloat16().transpose(1, 2) for w in inputs["weights"]]

        def run() -> Results:
            return tuple(torch.bmm(x, weight).transpose(0, 1) for weight in weights)

        def check(got: Results) -> None:
            workload.check_within(UNQUANTIZED_PROJECTION, inputs, got)

        return Side("torch.bmm", run, check, note="bfloat16 weights")


class Sparsemla(Peer):
    """This package's other way to do the same, which a user may choose."""

    name = "sparsemla"

    def supports(self, workload: Workload) -> str | None:
        if isinstance(workload, CachedPrefill):
            return None
        quantised = isinstance(workload, DenseDecode) and workload.format is not BF16_576
        return None if quantised else "has one way only"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        if isinstance(workload, CachedPrefill):
            other, name = workload.converted, "sparsemla through a workspace"
            if workload.converts(inputs["q"].device):
                other, name = workload.in_place, "sparsemla in place"
            return [_side(name, workload, inputs, lambda: other(inputs))]
        slots = torch.arange(inputs["cache"].num_slots, device=inputs["q"].device)
        cache = PagedCache.allocate(
            BF16_576, inputs["cache"].num_pages, PAGE_SIZE, device=slots.device
        )
        for some in slots.split(CHUNK_ROWS):
            cache.write(some, inputs["cache"].read(some))

        def dense() -> Results:
            return ops.dense_decode(**inputs | {"cache": cache})

        return [_side("sparsemla bfloat16", workload, inputs, dense)]


class FlashMLA(Peer):
    """FlashMLA's sparse prefill, sparse FP8 decode and dense decode."""

    name = "FlashMLA"
    HEADS: ClassVar[tuple[int, ...]] = (64, 128)

    def __init__(self, directories: list[Path]) -> None:
        for root in directories:
            if library := _first(root, "vllm/_flashmla_C*.so"):
                torch.ops.load_library(str(library))
                source = root / "vllm/third_party/flashmla/flash_mla_interface.py"
                with _StandIn("vllm", "_flashmla_C"):
                    self.module = _module_from(source)
                return
        self.module = _installed("flash_mla")

    def supports(self, workload: Workload) -> str | None:
        if isinstance(workload, (SparsePrefill, CachedPrefill, SparseDecode)):
            if isinstance(workload, SparseDecode) and workload.format not in (FP8_DS_MLA, FP8_584):
                return "decodes from caches of 656 and 584 bytes a token"
            return None if workload.topk % 128 == 0 else "takes a topk that is a multiple of 128"
        if isinstance(workload, DenseDecode):
            return None if workload.format is BF16_576 else "takes a bfloat16 cache"
        return "has no such op"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        if isinstance(workload, CachedPrefill):
            return [self._after_gather(workload, inputs)]
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

            return [_side(self.name, workload, inputs, prefill, note)]
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

        return [_side(self.name, workload, inputs, sparse, note)]

    def _dense(self, workload: DenseDecode, inputs: Inputs) -> Side:
        cache, schedule = inputs["cache"].data.unsqueeze(2), self.module.get_mla_metadata()[0]
        q, table, lens, scale = (
            inputs[name] for name in ("q", "page_table", "seq_lens", "softmax_scale")
        )

        def run() -> Results:
            decode = self.module.flash_mla_with_kvcache
            return (decode(q, cache, table, lens, 512, schedule, None, scale, True)[0],)

        return _side(self.name, workload, inputs, run)

    def _after_gather(self, workload: CachedPrefill, inputs: Inputs) -> Side:
        """Its prefill over rows that vLLM's kernel has converted, or ours where that is absent."""
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
        return _side(name, workload, inputs, run)


class DeepGEMM(Peer):
    """DeepGEMM's FP8 indexer scores; it compiles at first use and needs ``CUDA_HOME``."""

    name = "DeepGEMM"

    def __init__(self, directories: list[Path]) -> None:
        for root in directories:
            third_party = root / "vllm/third_party"
            if (third_party / "deep_gemm").is_dir():
                sys.path.insert(0, str(third_party))
                break
        _installed("deep_gemm")
        if not hasattr(torch.ops.deep_gemm, "fp8_fp4_mqa_logits"):
            raise Unavailable("deep_gemm registers no torch.ops.deep_gemm.fp8_fp4_mqa_logits")

    def supports(self, workload: Workload) -> str | None:
        ops = (IndexerScores, IndexerScoresPaged, IndexerTopk)
        return None if isinstance(workload, ops) else "has no such op"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        if isinstance(workload, IndexerTopk):
            return self._indexer_topk(workload, inputs)
        ops, q, weights = torch.ops.deep_gemm, inputs["q"], inputs["weights"]
        if isinstance(workload, IndexerScores):
            context = workload.context
            rest = inputs["keys"], inputs["key_scales"], weights
            bounds = inputs["row_starts"], inputs["row_ends"]

            def ragged() -> Results:
                logits = ops.fp8_fp4_mqa_logits(q, None, *rest, *bounds, context, None)
                return (logits[:, :context],)

            return [_side(self.name, workload, inputs, ragged)]
        lens, table, length = inputs["seq_lens"], inputs["page_table"], inputs["max_seq_len"]
        cache, flat = inputs["cache"].data.unsqueeze(2), weights.view(-1, INDEX_HEADS)
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        schedule = ops.get_paged_mqa_logits_metadata(lens, PAGE_SIZE, processors, None)

        def paged() -> Results:
            logits = ops.fp8_fp4_paged_mqa_logits(
                q, None, cache, flat, lens, table, schedule, length, None
            )
            return (logits.unflatten(0, lens.shape)[..., :length],)

        return [_side(self.name, workload, inputs, paged)]

    def _indexer_topk(self, workload: IndexerTopk, inputs: Inputs) -> list[Side]:
        """Scores, all of them at a time, and then each of vLLM's selections, or torch's."""
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
            ops.persistent_topk(logits, ends, out, room, topk, workload.context)

        def of_torch(logits: Tensor) -> None:
            columns = torch.arange(logits.shape[1], device=logits.device)
            logits.masked_fill_(columns >= ends[:, None], -torch.inf)
            out.copy_(logits.topk(topk, sorted=False).indices)

        kernels = {
            "top_k_per_row_prefill": of_prefill,
            "top_k_per_row_decode": of_decode,
            "persistent_topk": persistent,
        }
        kernels = {name: kernel for name, kernel in kernels.items() if hasattr(ops, name)}

        def runner(select: Callable[[Tensor], None]) -> Callable[[], Results]:
            def run() -> Results:
                select(compute())
                return (out,)

            return run

        return [
            _side(f"DeepGEMM + {name}", workload, inputs, runner(kernel))
            for name, kernel in (kernels or {"torch.topk": of_torch}).items()
        ]

    def _scores_of_prefill(
        self, workload: IndexerTopk, inputs: Inputs
    ) -> tuple[Callable[[], Tensor], Tensor, Tensor]:
        """Scores over contiguous keys, which are there before the clock starts."""
        context, device = workload.context, inputs["q"].device
        slots = slots_of(
            inputs["page_table"],
            torch.zeros(context, dtype=torch.int32, device=device),
            torch.arange(context, device=device),
            PAGE_SIZE,
        )
        stored = inputs["cache"].gather(slots)
        keys = stored.fp8, stored.scales[:, 0].contiguous()
        ends = torch.arange(workload.query_len, dtype=torch.int32, device=device)
        ends += context - workload.query_len + 1
        starts = torch.zeros_like(ends)
        score, q = torch.ops.deep_gemm.fp8_fp4_mqa_logits, inputs["q"]

        def compute() -> Tensor:
            return cast(
                Tensor, score(q, None, *keys, inputs["weights"], starts, ends, context, None)
            )

        return compute, starts, ends

    def _scores_of_decode(
        self, workload: IndexerTopk, inputs: Inputs
    ) -> tuple[Callable[[], Tensor], Tensor, Tensor]:
        ops, context = torch.ops.deep_gemm, workload.context
        lens, q = inputs["seq_lens"][:, None], inputs["q"][:, None]
        processors = torch.cuda.get_device_properties(q.device).multi_processor_count
        schedule = ops.get_paged_mqa_logits_metadata(lens, PAGE_SIZE, processors, None)
        cache, table = inputs["cache"].data.unsqueeze(2), inputs["page_table"]

        def compute() -> Tensor:
            return cast(
                Tensor,
                ops.fp8_fp4_paged_mqa_logits(
                    q, None, cache, inputs["weights"], lens, table, schedule, context, None
                ),
            )

        return compute, torch.zeros_like(inputs["seq_lens"]), inputs["seq_lens"]


class VLLM(Peer):
    """vLLM's own top-k, cache write and gather kernels."""

    name = "vLLM"
    GATHER: ClassVar[str] = "cp_gather_and_upconvert_fp8_kv_cache"
    WORKSPACE_BYTES: ClassVar[int] = 64 << 20

    def __init__(self, directories: list[Path]) -> None:
        for root in directories:
            if library := _first(root, "vllm/_C_stable_libtorch*.so"):
                torch.ops.load_library(str(library))
                return
        raise Unavailable("vllm/_C_stable_libtorch*.so is not there")

    def supports(self, workload: Workload) -> str | None:
        ops = (SelectTopk, CacheWrite, IndexWrite, Gather)
        return None if isinstance(workload, ops) else "has no such op"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        if isinstance(workload, SelectTopk):
            return self._topk(workload, inputs)
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

        return [_side("vLLM cp_gather_and_upconvert", workload, inputs, run)]

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
        if num_rows <= 64:
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
            _side(f"vLLM {name}", workload, inputs, runner(kernel))
            for name, kernel in kernels.items()
            if hasattr(ops, name)
        ]

    def _cache_write(self, workload: CacheWrite, inputs: Inputs) -> list[Side]:
        write = torch.ops._C_cache_ops.concat_and_cache_mla
        kv, slots, format = inputs["kv"], inputs["slot_mapping"], workload.format
        latent, rope = kv[:, :512].contiguous(), kv[:, 512:].contiguous()
        cache = _empty_like(inputs["cache"])
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
        """Its cache write and the kernels that must run before it, as few as it has.

        The one that rotates and writes takes one scale for all rows, so no 656-byte record.
        """
        ops, writes = torch.ops._C, torch.ops._C_cache_ops
        slots, positions = inputs["slot_mapping"], inputs["positions"]
        weight, table = inputs["kv_norm_weight"], inputs["cos_sin_cache"].bfloat16()
        kv, q = inputs["kv"].clone(), inputs["q_rope"].clone()
        latent, rope = kv[:, :512], kv[:, 512:]
        normed = torch.empty(latent.shape, dtype=kv.dtype, device=kv.device)
        cache = _empty_like(inputs["cache"])
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

        def check(results: Results) -> None:
            expected = inputs | {"cache": _empty_like(inputs["cache"])}
            queries, rows = reference.fused_rope_rmsnorm_quant(**expected)
            assert_close("queries", results[0], queries.bfloat16(), CACHE_ROWS)
            written = PagedCache(results[1], cache.format).read(slots)
            assert_close("rows", written, rows.bfloat16(), CACHE_ROWS)

        if cache.format is FP8_DS_MLA:
            name, run = "rms_norm, rotary_embedding, concat_and_cache_mla", run_apart
        else:
            name, run = "rms_norm, concat_and_cache_mla_rope_fused", run_fused
        return Side(f"vLLM {name}", run, check, reset)

    def _index_write(self, workload: IndexWrite, inputs: Inputs) -> list[Side]:
        ops, writes = torch.ops._C, torch.ops._C_cache_ops
        slots, positions = inputs["slot_mapping"], inputs["positions"]
        table, weights = inputs["cos_sin_cache"].bfloat16(), inputs["weights"]
        norm = inputs["norm_weight"].bfloat16(), inputs["norm_bias"].bfloat16()
        q, codes = inputs["q"].clone(), torch.empty_like(inputs["q"], dtype=torch.float8_e4m3fn)
        num_tokens, num_heads, dim = q.shape
        scales = torch.empty(num_tokens * num_heads, 1, device=q.device)
        cache = _empty_like(inputs["cache"])
        limits = 1e-4, -448.0, 448.0

        def run() -> Results:
            k = torch.nn.functional.layer_norm(inputs["k"], (dim,), *norm, 1e-6)
            ops.rotary_embedding(positions, q, k[:, None], dim, table, True)
            ops.per_token_group_fp8_quant(
                q.view(-1, dim), codes.view(-1, dim), scales, dim, *limits, True, False, False
            )
            folded = weights * (scales.view(num_tokens, num_heads) * (num_heads * dim) ** -0.5)
            writes.indexer_k_quant_and_cache(k, cache.data, slots, dim, "ue8m0")
            return codes, folded, cache.data

        def check(results: Results) -> None:
            expected = _empty_like(inputs["cache"])
            queries, folded = reference.fused_indexer_rope_quant(**inputs | {"cache": expected})
            # A last bit doubles a scale and halves codes: only their products can be compared.
            weighted = results[0].float() * results[1].float()[..., None]
            assert_close("queries", weighted, queries.float() * folded[..., None], CACHE_ROWS)
            written = PagedCache(results[2], INDEX_FP8).read(slots)
            assert_close("keys", written, expected.read(slots), CACHE_ROWS)

        name = "vLLM rotary_embedding, per_token_group_fp8_quant, indexer_k_quant_and_cache"
        note = "with torch's layer_norm and products"

        def reset() -> None:  # queries are rotated in place
            q.copy_(inputs["q"])

        return [Side(name, run, check, reset, note)]


class TileLang(Peer):
    """TileLang's DeepSeek-V3.2 examples."""

    name = "TileLang"
    LIST = 4096
    """Keys of the threshold's bucket that its selection has room for; it does not count them."""

    def __init__(self, directories: list[Path]) -> None:
        _installed("tilelang")
        files = {"sparse_mla_fwd_pipelined": "attention", "topk_selector": "selector"}
        self.modules = {
            use: _module_from(path)
            for root in directories
            for file, use in files.items()
            if (path := root / "deepseek_v32" / f"{file}.py").is_file()
        }
        if not self.modules:
            raise Unavailable("DIR/deepseek_v32 holds none of its examples")

    def supports(self, workload: Workload) -> str | None:
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

            return [_side(self.name, workload, inputs, selector)]
        q, kv = inputs["q"][None], inputs["kv"][None, :, None]
        indices, first = inputs["topk_indices"][None, :, None], kv.shape[1]
        # Its causal mask is by position: tokens that come after every key see all of them.
        position = torch.full((1,), first, dtype=torch.int32, device=q.device)
        interface = self.modules["attention"].sparse_mla_fwd_interface
        kernel = interface(
            q, kv, indices, first, 1, sm_scale=inputs["softmax_scale"], return_kernel=True
        )

        def attention() -> Results:
            return (kernel(q, kv, indices, position)[0][0],)

        return [_side(self.name, workload, inputs, attention)]


def largest_bucket(scores: Tensor, topk: int) -> int:
    """Most scores of a row that agree with its threshold in the upper 8 bits of their float16."""
    upper = scores.half().view(torch.uint8)[..., 1::2]
    threshold = scores.topk(topk).values[:, -1:].half().view(torch.uint8)[..., 1::2]
    return int((upper == threshold).sum(1).max())


PEERS = (FlashMLA, DeepGEMM, VLLM, TileLang)


def find_peers(directory: Path | None = None) -> tuple[list[Peer], dict[str, str]]:
    """The peers that are here, and why each other one is not.

    Args:
        directory: where to look before the installed packages.
    """
    directories = [] if directory is None else [directory.resolve()]
    # vLLM's extensions load without vLLM, whose import takes long and changes global state.
    vllm = importlib.util.find_spec("vllm")
    if vllm is not None and vllm.submodule_search_locations:
        directories.append(Path(vllm.submodule_search_locations[0]).parent)
    found: list[Peer] = [Torch(), Sparsemla()]
    missing = {}
    for kind in PEERS:
        try:
            found.append(kind(directories))
        except Exception as error:  # any failure to load is reported as the reason
            missing[kind.name] = " ".join(str(error).split())
    return found, missing


def versions(directory: Path | None = None) -> dict[str, str]:
    """Versions of the packages that take part: in ``directory``, installed, or imported."""
    found = {}
    for name in ("sparsemla", "torch", "triton", "flash_mla", "deep_gemm", "vllm", "tilelang"):
        path = sys.path if directory is None else [str(directory), *sys.path]
        package = next(iter(metadata.distributions(name=name, path=path)), None)
        version = getattr(sys.modules.get(name), "__version__", None)
        if package is not None:
            found[name] = package.version
        elif isinstance(version, str):
            found[name] = version
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


class _StandIn:
    """A package of that name and a module in it, both empty, unless the package is imported.

    FlashMLA's interface imports its extension as a module of vLLM, to have its ops registered.
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


def _side(
    name: str, workload: Workload, inputs: Inputs, run: Callable[[], Results], note: str = ""
) -> Side:
    """A side that answers the workload's own question."""
    return Side(name, run, lambda got: workload.check(inputs, got), note=note)


def _empty_like(cache: PagedCache) -> PagedCache:
    return PagedCache.allocate(
        cache.format, cache.num_pages, cache.page_size, device=cache.data.device
    )


def _first(root: Path, pattern: str) -> Path | None:
    return next(iter(sorted(root.glob(pattern))), None)


def _installed(name: str) -> types.ModuleType:
    if importlib.util.find_spec(name) is None:
        raise Unavailable(f"{name} is not installed")
    return importlib.import_module(name)


def _module_from(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Unavailable(f"{path} is not a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module

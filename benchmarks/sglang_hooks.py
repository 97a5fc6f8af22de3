"""SGLang's ``dsa`` backend on a GPU: every method that the plugin replaces, beside SGLang's own.

SGLang loads the plugin itself. Its test kit makes its backend and memory pools, its backend makes
the metadata of batches, and its forward pass of a layer gives each method its arguments. Both sides
then compute the same: their results are compared with each other and with the float32 reference,
and their times are measured in turn.

Needs SGLang 0.5.23 and a GPU with FlashMLA; no engine runs. Where ``sgl_kernel`` cannot be
imported, because it belongs to another torch, its functions are absent and FA3 can be vLLM's
(``--fa3``). The results say whose kernel each row was measured with.
Run ``python benchmarks/sglang_hooks.py --json FILE``.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import importlib.util
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from sparsemla import BF16_576, FP8_DS_MLA, PagedCache, reference
from sparsemla_lab.bench.timing import Timer
from sparsemla_lab.testing.compare import SPARSE_DECODE_OUT, Tolerance, worst_share

TOPK = 2048
INDEX_HEADS = 64
SCALE = 192**-0.5
BUDGET_MS = 20.0
"""Time for the repetitions of one side."""
SHORT = 1000
"""Tokens of the second request of a decode: fewer than are selected."""
CHECKED = 4
"""Tokens of a batch that are compared with the reference."""
DIFFERENCE = Tolerance(
    2 * SPARSE_DECODE_OUT.abs, 2 * SPARSE_DECODE_OUT.rel, 1.0, 2 * SPARSE_DECODE_OUT.size
)
"""Between two sides that may each differ from the reference by their tolerance."""


@dataclass(frozen=True)
class Size:
    """A batch of one kind.

    Args:
        kind: ``decode``, ``verify`` (two tokens of each request) or ``prefill`` (a chunk).
        batch, context: requests and tokens of each, except the second one of a decode.
        tokens: of each request in this step.
    """

    kind: str
    batch: int
    context: int
    tokens: int = 1


@dataclass(frozen=True)
class Row:
    """One method of SGLang at one size.

    Args:
        method: its name; ``kernel``: of SGLang's side.
        cache: ``fp8`` or ``bf16``.
        heads, kind, batch, context, tokens: the size.
        apart: largest difference of both results; ``share``: of what is allowed, at most 1.
        ours_error, theirs_error: difference to the reference, in shares of the tolerance.
        rows, equal: selections, and how many of both sides hold the same tokens.
        ours_exact, theirs_exact: how many hold the best scores.
        ours_us, theirs_us: medians; ``how``: whether graphs were replayed.
        why: reason why something is missing.
    """

    method: str
    kernel: str
    cache: str
    heads: int
    kind: str
    batch: int
    context: int
    tokens: int
    apart: float | None = None
    share: float | None = None
    ours_error: float | None = None
    theirs_error: float | None = None
    rows: int | None = None
    equal: int | None = None
    ours_exact: int | None = None
    theirs_exact: int | None = None
    ours_us: float | None = None
    theirs_us: float | None = None
    how: str = ""
    why: str = ""


DECODES = [Size("decode", batch, context) for context in (8192, 32768) for batch in (1, 16, 64)]
PREFILLS = [Size("prefill", 1, context, 2048) for context in (8192, 32768)]
SMALL_TOPK = 64
SMALL = [Size("decode", 2, 90), Size("verify", 1, 70, 2), Size("prefill", 2, 70, 2)]
"""For a test of this file."""
PARTS = {
    "fp8": [
        ("flashmla_kv", [*DECODES, Size("verify", 16, 32768, 2), *PREFILLS]),
        ("flashmla_sparse", PREFILLS),
    ],
    "bf16": [
        ("fa3", [*DECODES, Size("verify", 16, 32768, 2), *PREFILLS]),
        ("flashmla_sparse", [*DECODES[3:], *PREFILLS]),
        ("flashmla_kv", [Size("decode", 1, 8192)]),
    ],
    "topk": [("fp8", [*DECODES, *PREFILLS]), ("bf16", PREFILLS)],
}
"""For each cache kernels and sizes; for selections caches and sizes."""

OWN_KERNELS = {
    "flashmla_kv": "FlashMLA, sgl_flash_mla 1.0.0",
    "flashmla_sparse": "FlashMLA, sgl_flash_mla 1.0.0",
    "fa3": "FA3, sgl_kernel",
}


# What cannot be imported.


class Absent(ModuleType):
    """``sgl_kernel`` or a module of it: any function can be imported and none can be called."""

    __path__ = ()

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("__"):
            raise AttributeError(name)
        place = f"{self.__name__}.{name}"

        def absent(*args: object, **kwargs: object) -> None:
            raise NotImplementedError(f"{place} is of another torch")

        return absent


class AbsentKernels(MetaPathFinder, Loader):
    """Imports of ``sgl_kernel``, as :class:`Absent`; SGLang itself can do without scalar types."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.split(".")[0] != "sgl_kernel" or name == "sgl_kernel.scalar_type":
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


FA3_ARGUMENTS = (
    "q k_cache v_cache k v qv rotary_cos rotary_sin cache_seqlens cache_batch_idx cache_leftpad "
    "page_table cu_seqlens_q cu_seqlens_k_new max_seqlen_q rotary_seqlens q_descale k_descale "
    "v_descale softmax_scale causal window_size attention_chunk softcap rotary_interleaved "
    "scheduler_metadata num_splits"
)
"""SGLang passes them by position."""


def vllms_fa3(library: Path) -> ModuleType:
    """``sgl_kernel.flash_attn`` with the kernel of vLLM's wheel."""
    torch.ops.load_library(library)

    def flash_attn_with_kvcache(*args: Any, **kwargs: Any) -> Tensor:  # noqa: ANN401 - of FA3
        a = dict(zip(FA3_ARGUMENTS.split(), args, strict=False))
        widest = a["page_table"].shape[1]
        return torch.ops._vllm_fa3_C.fwd(
            *(a["q"], a["k_cache"], a["v_cache"], None, None, a["qv"], None, a["cu_seqlens_q"]),
            *(None, None, None, a["cache_seqlens"], a["max_seqlen_q"], widest, a["page_table"]),
            *([None] * 8),
            *(a["softmax_scale"], a["causal"], -1, -1, a["softcap"], True, None, a["num_splits"]),
            *(None, 0, None, 1, 0, None),
        )[0]

    module = Absent("sgl_kernel.flash_attn")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    return module


def prepare(fa3: Path | None) -> dict[str, str]:
    """Let SGLang be imported; returns what stands in for what."""
    stand_ins = {}
    try:
        importlib.import_module("sgl_kernel")
    except ImportError as error:
        sys.modules.pop("sgl_kernel", None)
        sys.meta_path.insert(0, AbsentKernels())
        stand_ins["sgl_kernel"] = f"absent: {error}"
        if fa3 is not None:
            sys.modules["sgl_kernel.flash_attn"] = vllms_fa3(fa3)
            stand_ins["sgl_kernel.flash_attn"] = "FA3 of vLLM's wheel"
            OWN_KERNELS["fa3"] = "FA3, vLLM's build"
    if importlib.util.find_spec("deep_gemm") is not None and complete_deep_gemm():
        stand_ins["deep_gemm"] = "DeepGEMM of vLLM's wheel"
    return stand_ins


def complete_deep_gemm() -> bool:
    """Add what SGLang calls to DeepGEMM of vLLM's wheel; whether it was missing."""
    import deep_gemm

    missing = not hasattr(deep_gemm, "fp8_mqa_logits")
    if missing:
        deep_gemm.fp8_mqa_logits = fp8_mqa_logits
        deep_gemm.fp8_paged_mqa_logits = fp8_paged_mqa_logits
    return missing


def fp8_mqa_logits(
    q: Tensor,
    kv: tuple[Tensor, Tensor],
    weights: Tensor,
    ks: Tensor,
    ke: Tensor,
    clean_logits: bool = False,
) -> Tensor:
    """DeepGEMM's function of older versions, which SGLang calls.

    The wheel's kernel writes the score of a row's first key, ``ks``, into column 0. SGLang reads it
    in column ``ks``, and the next row at a multiple of 16 bytes.
    """
    import deep_gemm

    count = len(kv[0])
    logits = deep_gemm.fp8_fp4_mqa_logits((q, None), kv, weights, ks, ke, count)
    columns = torch.arange(count, device=ks.device) - ks[:, None]
    moved = logits.new_empty(len(logits), -(-count // 4) * 4)[:, :count]
    return torch.gather(logits, 1, columns.clamp(min=0), out=moved)


def fp8_paged_mqa_logits(
    q: Tensor,
    kv_cache: Tensor,
    weights: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    schedule: Tensor,
    longest: int,
    clean_logits: bool = False,
) -> Tensor:
    """Likewise."""
    import deep_gemm

    return deep_gemm.fp8_fp4_paged_mqa_logits(
        (q, None), kv_cache, weights, context_lens, block_table, schedule, longest
    )


# Both sides.


class Sides:
    """SGLang's functions before and after it has loaded the plugin."""

    def __init__(self) -> None:
        import pkgutil

        os.environ["SGLANG_PLUGINS"] = "sparsemla"
        from sglang.srt.plugins import load_plugins

        from sparsemla.backends.sglang.hooks import HOOKS, check_installed

        self.resolve = pkgutil.resolve_name
        self.targets = [hook.target for hook in HOOKS]
        self.functions = {"sglang": [self.resolve(target) for target in self.targets]}
        load_plugins()
        check_installed()
        self.functions["sparsemla"] = [self.resolve(target) for target in self.targets]
        if any(ours is theirs for ours, theirs in zip(*self.functions.values(), strict=True)):
            raise RuntimeError("the plugin was loaded before: SGLang's own functions are gone")

    def use(self, side: str) -> None:
        """Let SGLang call the functions of one side."""
        for target, function in zip(self.targets, self.functions[side], strict=True):
            owner, name = target.rsplit(".", 1)
            setattr(self.resolve(owner), name, function)


class Step:
    """A step of SGLang's backend: pools with random rows, a batch and its selections.

    Args:
        sides: with the plugin's functions in use, so that the backend has its workspace.
        kernel: SGLang's name for decodes and prefills.
        cache: ``fp8`` or ``bf16``.
        topk: number of selected tokens.
    """

    def __init__(
        self,
        sides: Sides,
        size: Size,
        kernel: str,
        cache: str,
        heads: int,
        device: str,
        topk: int = TOPK,
    ) -> None:
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
        from sglang.test.kits.attention_unittest.attention_methods.dsa_attention import (
            DSAAttentionCase,
            DSAMockModelRunner,
            TinyDSAModelConfig,
        )

        sides.use("sparsemla")
        self.sides, self.size, self.topk, self.device = sides, size, topk, device
        mode = {
            "decode": ForwardMode.DECODE,
            "verify": ForwardMode.TARGET_VERIFY,
            "prefill": ForwardMode.EXTEND,
        }[size.kind]
        contexts = [size.context] * size.batch
        if size.batch > 1 and size.kind == "decode":
            contexts[1] = min(SHORT, size.context // 2)
        prefixes = [context - size.tokens for context in contexts]
        longest = -(-size.context // 64) * 64
        self.runner = DSAMockModelRunner(
            case=DSAAttentionCase(
                name=size.kind,
                backend="dsa",
                forward_mode=mode,
                num_heads=heads,
                num_kv_heads=1,
                page_size=64,
                prefix_lens=tuple(prefixes),
                extend_lens=(size.tokens,) * size.batch,
            ),
            model_config=TinyDSAModelConfig(
                num_heads=heads,
                num_kv_heads=1,
                head_dim=576,
                hidden_size=64,
                context_len=longest,
                qk_nope_head_dim=512,
                qk_rope_head_dim=64,
                kv_lora_rank=512,
                index_topk=topk,
            ),
            dtype=torch.bfloat16,
            device=device,
            max_context_len=longest,
            head_dim=576,
            dsa_prefill_backend=kernel,
            dsa_decode_backend=kernel,
            fp8_kv_cache=cache == "fp8",
        )
        self.backend = ATTENTION_BACKENDS["dsa"](self.runner)
        self.attention = RadixAttention(
            num_heads=heads,
            head_dim=576,
            scaling=SCALE,
            num_kv_heads=1,
            layer_id=0,
            v_head_dim=512,
        )

        pages = torch.randperm(size.batch * longest // 64, device=device).view(size.batch, -1) + 1
        slots = (pages[:, :, None] * 64 + torch.arange(64, device=device)).flatten(1)
        self.table = slots
        self.runner.req_to_token_pool.req_to_token[: size.batch, :longest] = slots
        self.requests = torch.arange(size.batch, device=device).repeat_interleave(size.tokens)
        offsets = torch.arange(size.tokens, device=device).repeat(size.batch)
        self.positions = torch.tensor(prefixes, device=device)[self.requests] + offsets
        # The drafts of a verification are not counted in SGLang's lengths.
        lengths = torch.tensor(prefixes if size.kind == "verify" else contexts, dtype=torch.int32)
        self.batch = ForwardBatch(
            forward_mode=mode,
            batch_size=size.batch,
            input_ids=torch.arange(len(self.positions), device=device),
            req_pool_indices=torch.arange(size.batch, dtype=torch.int32, device=device),
            seq_lens=lengths.to(device),
            seq_lens_cpu=lengths,
            out_cache_loc=slots[self.requests, self.positions],
            seq_lens_sum=int(lengths.sum()),
            positions=self.positions,
        )
        self.runner.kv_index_translator.bind_own_plan(self.batch)
        if size.kind != "decode":
            tokens = torch.tensor(prefixes, dtype=torch.int32)
            self.batch.extend_prefix_lens = tokens.to(device)
            self.batch.extend_prefix_lens_cpu = prefixes
            self.batch.extend_seq_lens_cpu = [size.tokens] * size.batch
            self.batch.extend_seq_lens = torch.full_like(tokens, size.tokens).to(device)
            self.batch.extend_num_tokens = len(self.positions)
        self.starts = torch.tensor([0, *contexts[:-1]], device=device).cumsum(0)[self.requests]

    def fill(self) -> None:
        """Write random rows by SGLang's pool, and draw queries and selections."""
        pool, tokens = self.runner.token_to_kv_pool, len(self.positions)
        for slots in self.table.flatten().split(1 << 18):
            pool.set_mla_kv_buffer(self.attention, slots, *self.random_keys(len(slots)))
        heads = self.attention.tp_q_head_num
        self.q_nope, self.q_rope = (
            torch.randn(tokens, heads, dim, dtype=torch.bfloat16, device=self.device)
            for dim in (512, 64)
        )
        self.keys = self.random_keys(tokens)
        self.indices = torch.cat(
            [
                self.selection(*part)
                for part in zip(
                    self.positions.split(256),
                    self.requests.split(256),
                    self.starts.split(256),
                    strict=True,
                )
            ]
        )

    def random_keys(self, count: int) -> list[Tensor]:
        return [
            torch.randn(count, 1, dim, dtype=torch.bfloat16, device=self.device)
            for dim in (512, 64)
        ]

    def selection(self, positions: Tensor, requests: Tensor, starts: Tensor) -> Tensor:
        """Random tokens of each context, as SGLang's indexer names them, then -1."""
        columns = torch.arange(self.size.context, device=self.device)
        scores = torch.rand(len(positions), len(columns), device=self.device)
        scores.masked_fill_(columns > positions[:, None], -1)
        best = scores.topk(min(self.topk, len(columns)))
        chosen = best.indices
        slots = self.table[requests].gather(1, chosen)
        chosen = chosen + starts[:, None] if self.ragged else slots
        chosen = chosen.masked_fill(best.values < 0, -1)
        padding = self.topk - chosen.shape[1]
        return torch.nn.functional.pad(chosen, (0, padding), value=-1).int()

    @property
    def ragged(self) -> bool:
        """Whether selections name rows of the batch's contexts instead of slots."""
        from sglang.srt.layers.attention.dsa.dsa_topk_backend import TopkTransformMethod

        method = self.backend.get_topk_transform_method(self.batch.forward_mode)
        return bool(method == TopkTransformMethod.RAGGED)

    def forward(self) -> Tensor:
        """The output of the layer ``[T, H, 512]``."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

        with torch.no_grad(), forward_context(ForwardContext(attn_backend=self.backend)):
            out = self.attention(
                self.q_nope.flatten(1),
                self.keys[0],
                self.keys[0],
                self.batch,
                k_rope=self.keys[1],
                q_rope=self.q_rope,
                topk_indices=self.indices,
            )
        return out.reshape(len(self.positions), -1, 512)

    def call(self, side: str, name: str) -> tuple[Tensor, Callable[[], Tensor], dict[str, Any]]:
        """The layer's output, the call of a method in it, to be repeated, and its arguments."""
        self.sides.use(side)
        self.backend.init_forward_metadata(self.batch)
        metadata = self.backend.forward_metadata
        backend, kept = type(self.backend), {}
        method = getattr(backend, name)

        def keep(self: object, **arguments: Any) -> Tensor:  # noqa: ANN401 - of any method
            kept.update(arguments)
            return method(self, **arguments)

        setattr(backend, name, keep)
        try:
            out = self.forward()
        finally:
            setattr(backend, name, method)

        def again() -> Tensor:
            self.backend.forward_metadata = metadata
            return method(self.backend, **kept)

        return out, again, kept

    def expected(self, arguments: dict[str, Any], some: Tensor) -> Tensor:
        """The reference for some tokens, from the arguments of a method."""
        rows = arguments["kv_cache"]
        cache_format = BF16_576 if rows.dtype == torch.bfloat16 else FP8_DS_MLA
        cache = PagedCache(rows.view(-1, 1, cache_format.row_width), cache_format)
        q = torch.cat([self.q_nope, self.q_rope], -1)[some]
        slots = arguments["page_table" if "page_table" in arguments else "page_table_1"][some]
        out, _ = reference.sparse_decode(
            q.unsqueeze(1), cache, slots.unsqueeze(1), softmax_scale=SCALE
        )
        return out.squeeze(1).to(q.dtype)


# Measurements.

Measured = tuple[Row, list[Callable[[], Tensor]]]


def share_of(actual: Tensor, expected: Tensor, tolerance: Tolerance) -> float:
    """The largest difference as a share of its limit; 1e9 if a value is not finite."""
    if not bool(actual.isfinite().all() & expected.isfinite().all()):
        return 1e9
    return worst_share(actual, expected, tolerance)


def measure_attention(step: Step, row: Row) -> Measured:
    """Compare a layer with each side; returns the calls to time."""
    name = row.method
    step.fill()
    out, ours, arguments = step.call("sparsemla", name)
    some = torch.linspace(0, len(out) - 1, min(CHECKED, len(out)), device=out.device).long()
    if len(out) > 1:
        some[1] = 1  # the short request
    expected = step.expected(arguments, some)
    row = replace(row, ours_error=share_of(out[some], expected, SPARSE_DECODE_OUT))
    try:
        other, theirs, _ = step.call("sglang", name)
    except Exception as error:  # whatever SGLang's kernels raise
        return replace(row, why=reason(error)), [ours]
    if row.cache == "bf16" and name == "_forward_flashmla_kv":
        row = replace(row, why="SGLang rounds the whole cache to FP8 in each call")
    else:
        row = replace(
            row,
            apart=float((out.float() - other.float()).abs().max()),
            share=share_of(out, other, DIFFERENCE),
            theirs_error=share_of(other[some], expected, SPARSE_DECODE_OUT),
        )
    return row, [ours, theirs]


def measure_selection(step: Step, row: Row) -> Measured:
    """Compare the selections from the scores of DeepGEMM, which SGLang calls."""
    step.sides.use("sparsemla")
    step.backend.init_forward_metadata(step.batch)
    logits, starts = scores(step)
    ours = selection_call(step, logits, starts)
    best = chosen_scores(step, logits, starts, None)
    chosen = ours()
    exact = same_rows(chosen_scores(step, logits, starts, chosen), best)
    row = replace(row, rows=len(chosen), ours_exact=exact)
    step.sides.use("sglang")
    try:
        step.backend.init_forward_metadata(step.batch)
        theirs = selection_call(step, logits, starts)
        try:
            other = theirs()
        except NotImplementedError as error:
            if step.ragged:
                raise
            theirs = selection_call(step, logits, starts, fused=False)
            other = theirs()
            row = replace(row, kernel="torch.topk and SGLang's Triton transform", why=str(error))
    except Exception as error:  # likewise
        return replace(row, why=reason(error)), [ours]
    row = replace(
        row,
        equal=same_rows(chosen.sort().values, other.sort().values),
        theirs_exact=same_rows(chosen_scores(step, logits, starts, other), best),
    )
    return row, [ours, theirs]


def scores(step: Step) -> tuple[Tensor, Tensor | None]:
    """Scores of random index keys and queries, and each token's first column.

    SGLang's indexer computes them in this way. They are the same for both sides.
    """
    from sglang.srt.layers.attention.dsa.utils import (
        resolve_fp8_mqa_logits_fn,
        resolve_fp8_paged_mqa_logits_fn,
    )

    torch.manual_seed(0)
    tokens, device = len(step.positions), step.device
    q = torch.randn(tokens, INDEX_HEADS, 128, device=device).to(torch.float8_e4m3fn)
    weights = torch.randn(tokens, INDEX_HEADS, device=device)
    info = step.backend.get_indexer_metadata(0, step.batch)

    def keys(count: int) -> tuple[Tensor, Tensor]:
        k = torch.randn(count, 128, device=device).to(torch.float8_e4m3fn)
        return k, torch.rand(count, device=device) + 0.5

    if step.size.kind == "prefill":
        starts, ends = info.get_indexer_kvcache_range()
        count = step.size.batch * step.size.context
        return resolve_fp8_mqa_logits_fn()(q, keys(count), weights, starts, ends), starts
    pool = step.runner.token_to_kv_pool
    for slots in step.table.flatten().split(1 << 18):
        k, k_scales = keys(len(slots))
        pool.set_index_k_scale_buffer(0, slots, k, k_scales.unsqueeze(1))
    buffer = pool.get_index_k_with_scale_buffer(layer_id=0)
    table = info.get_page_table_64()
    logits = resolve_fp8_paged_mqa_logits_fn()(
        q.unsqueeze(1),
        buffer.view(len(buffer), 64, 1, 132),
        weights,
        info.get_seqlens_int32().view(-1, 1),
        table,
        info.paged_mqa_schedule_metadata,
        table.shape[1] * 64,
        clean_logits=False,
    )
    return logits, None


def selection_call(
    step: Step, logits: Tensor, starts: Tensor | None, fused: bool = True
) -> Callable[[], Tensor]:
    """The selection, as SGLang's indexer and, unless it is fused, its backend ask for it."""
    from sglang.kernels.ops.attention.dsa.transform_index import transform_index_page_table_prefill
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend

    info = step.backend.get_indexer_metadata(0, step.batch)
    if not fused:
        info = replace(info, force_unfused_topk=True, topk_backend=DSATopKBackend.TORCH)
    metadata, method = info.attn_metadata, DSATopKBackend.topk_transform

    def select() -> Tensor:
        DSATopKBackend.topk_transform = method
        chosen = info.topk_transform(logits, step.topk, ks=starts)
        if fused:
            return chosen
        return transform_index_page_table_prefill(
            page_table=metadata.page_table_1,
            topk_indices=chosen,
            extend_lens_cpu=metadata.dsa_extend_seq_lens_list,
            page_size=1,
            output_num_tokens=len(chosen),
            cu_seqlens_q=metadata.cu_seqlens_q,
        )

    return select


def chosen_scores(
    step: Step, logits: Tensor, starts: Tensor | None, chosen: Tensor | None
) -> Tensor:
    """The scores of a selection in ascending order, -inf for -1; of the best one by default."""
    first = torch.zeros_like(step.positions) if starts is None else starts.long()
    if chosen is None:
        columns = torch.arange(logits.shape[1], device=logits.device)
        ends = first + step.positions + 1
        hidden = (columns < first[:, None]) | (columns >= ends[:, None])
        best = logits.masked_fill(hidden, -torch.inf).topk(min(step.topk, logits.shape[1])).values
        missing = step.topk - best.shape[1]
        best = torch.nn.functional.pad(best, (0, missing), value=-torch.inf)
        return best.sort().values
    columns = chosen.long().clamp(0)
    if not step.ragged:
        position_of = torch.zeros(int(step.table.max()) + 1, dtype=torch.long, device=chosen.device)
        position_of[step.table.flatten()] = torch.arange(
            step.table.shape[1], device=chosen.device
        ).repeat(len(step.table))
        columns = first[:, None] + position_of[columns]
    return logits.gather(1, columns).masked_fill(chosen < 0, -torch.inf).sort().values


def same_rows(a: Tensor, b: Tensor) -> int:
    """How many rows are equal."""
    return int((a == b).all(-1).sum())


def reason(error: Exception) -> str:
    """The first line of an error, whose trace goes to the log."""
    traceback.print_exc()
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def rows_of(part: str, heads: list[int], small: bool) -> Iterator[tuple[Row, Size]]:
    """What a part measures."""
    for which, sizes in PARTS[part]:
        chosen = [s for s in SMALL if s.kind in {z.kind for z in sizes}] if small else sizes
        for count in heads if part != "topk" else heads[:1]:
            for size in chosen:
                method, kernel, cache = f"_forward_{which}", OWN_KERNELS.get(which, ""), part
                if part == "topk":
                    method, kernel, cache = "topk_transform", "top-k v2, compiled there", which
                place = (size.kind, size.batch, size.context, size.tokens)
                yield Row(method, kernel, cache, count, *place), size


@contextlib.contextmanager
def locked(path: Path, how: int) -> Iterator[None]:
    """Parts compare at the same time; times are measured alone."""
    with path.open("a") as file:
        fcntl.flock(file, how)
        yield


def build_kernels(part: str, device: str) -> dict[str, str]:
    """Compile what SGLang compiles at first use; returns what stands in for what did not."""
    from sglang.srt.layers.attention import dsa_backend

    if device == "cpu":
        return {}
    try:
        if part == "topk":
            from sglang.kernels.ops.attention.dsv4.topk import plan_topk_v2

            plan_topk_v2(torch.ones(1, dtype=torch.int32, device=device))
        else:
            q = torch.zeros(1, 16, 576, dtype=torch.bfloat16, device=device)
            dsa_backend.concat_mla_absorb_q_general(q[..., :512], q[..., 512:])
    except Exception as error:  # likewise
        if part != "topk":
            dsa_backend.concat_mla_absorb_q_general = lambda *parts: torch.cat(parts, -1)
        return {f"SGLang's compiled kernel of {part}": reason(error)}
    return {}


def run_part(part: str, options: argparse.Namespace) -> None:
    """Measure one part in this process and write its rows as they come."""
    small = options.device == "cpu"
    stand_ins = prepare(options.fa3)
    if part != "topk":
        os.environ["SGLANG_OPT_USE_TOPK_V2"] = "0"  # attention needs no plan of it
    sides = Sides()
    import sglang
    import triton

    stand_ins |= build_kernels(part, options.device)
    say(f"{part}: prepared after {time.time() - options.began:.0f} s")
    result = {
        "device": torch.cuda.get_device_name() if options.device != "cpu" else "cpu",
        "versions": {
            "sglang": sglang.__version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "python": platform.python_version(),
        },
        "stand_ins": stand_ins,
        "rows": [],
    }
    # The first pass compiles. It is left out of a test.
    for timed in (True,) if small else (False, True):
        with locked(options.json, fcntl.LOCK_EX if timed else fcntl.LOCK_SH):
            for row, size in rows_of(part, options.heads, small):
                if time.time() > options.began + options.seconds:
                    say(f"{part}: out of time")
                    break
                row = run_row(sides, row, size, timed, options.device)
                if timed:
                    result["rows"].append(asdict(row))
                    part_file(options.json, part).write_text(json.dumps(result, indent=1))
                    say(line(asdict(row)))
        done = "timed" if timed else "compared"
        say(f"{part}: {done} after {time.time() - options.began:.0f} s")


def run_row(sides: Sides, row: Row, size: Size, timed: bool, device: str) -> Row:
    """Measure one row."""
    torch.manual_seed(0)
    selects = row.method == "topk_transform"
    kernel = "flashmla_sparse" if selects else row.method.removeprefix("_forward_")
    measure = measure_selection if selects else measure_attention
    try:
        topk = TOPK if device != "cpu" else SMALL_TOPK
        step = Step(sides, size, kernel, row.cache, row.heads, device, topk)
        row, calls = measure(step, row)
        if not timed:
            return row
        timer = Timer(device, BUDGET_MS)
        ready = [timer.prepare(lambda call=call: (call(),)) for call in calls]
        times = timer.interleaved(ready)
    except Exception as error:  # a row less
        return replace(row, why=reason(error))
    how = " and ".join(sorted({each.how for each in times}))
    theirs = times[1].us if len(times) > 1 else None
    return replace(row, ours_us=times[0].us, theirs_us=theirs, how=how)


def part_file(file: Path, part: str) -> Path:
    """Where one part writes its rows."""
    return file.with_suffix(f".{part}.json")


def say(words: str) -> None:
    """Print a line at once."""
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


def line(row: dict[str, Any]) -> str:
    """A row as text."""

    def number(name: str, digits: int = 2) -> str:
        return "-" if row[name] is None else f"{row[name]:.{digits}f}"

    size = f"{row['kind']} {row['batch']}x{row['tokens']} of {row['context']}, {row['heads']} heads"
    if row["rows"] is None:
        compared = (
            f"apart {number('apart', 5)} ({number('share')} of the bound), to the reference "
            f"{number('ours_error')}, {number('theirs_error')}"
        )
    else:
        compared = f"{row['equal']} of {row['rows']} equal, exact {row['ours_exact']}, " + str(
            row["theirs_exact"]
        )
    times = f"{number('ours_us', 1)} us, {number('theirs_us', 1)} us {row['how']}"
    return f"{row['method']} {row['cache']} {size}: {compared}; {times} {row['why']}".rstrip()


def good(row: dict[str, Any]) -> bool:
    """Whether a row is within its bounds and its selection exact.

    Where SGLang's kernel is beyond the tolerance itself, as FlashMLA over FP8 rows is, the distance
    from it says nothing.
    """
    apart = row["share"] is None or row["share"] <= 1 or row["theirs_error"] > 1
    within = row["ours_error"] is None or row["ours_error"] <= 1
    return apart and within and row["ours_exact"] == row["rows"] and row["ours_us"] is not None


def main(arguments: list[str] | None = None) -> int:
    """Measure all parts, each in a process of its own; 1 if one failed or a result differs."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("sglang-hooks.json"), help="for the rows")
    parser.add_argument("--part", choices=PARTS, help="one part only, in this process")
    parser.add_argument("--fa3", type=Path, help="_vllm_fa3_C.abi3.so of vLLM's wheel")
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--device", default="cuda", help="cpu: small sizes, for a test")
    parser.add_argument("--seconds", type=float, default=600.0, help="no row starts later")
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.part:
        run_part(options.part, options)
        return 0
    given = arguments if arguments is not None else sys.argv[1:]
    for part in PARTS:
        part_file(options.json, part).unlink(missing_ok=True)
    running = {
        part: subprocess.Popen(
            [sys.executable, __file__, *given, "--part", part, "--began", str(options.began)]
        )
        for part in PARTS
    }
    failed = [part for part, process in running.items() if process.wait()]
    files = [part_file(options.json, part) for part in PARTS]
    results = [json.loads(file.read_text()) for file in files if file.exists()]
    if results:
        joined = results[0] | {
            "stand_ins": {k: v for each in results for k, v in each["stand_ins"].items()},
            "rows": [row for each in results for row in each["rows"]],
        }
        options.json.write_text(json.dumps(joined, indent=1) + "\n")
        for row in joined["rows"]:
            say(line(row))
        for name, what in joined["stand_ins"].items():
            say(f"{name}: {what}")
        bad = [row for row in joined["rows"] if not good(row)]
        say(f"{len(bad)} of {len(joined['rows'])} rows differ; failed: {failed or 'none'}")
        return int(bool(bad or failed))
    return 1


if __name__ == "__main__":
    sys.exit(main())

"""The decode step of a layer, from projected q and latent rows to the outputs of the heads.

This package's step is a sequence of its ops. The peers' step is the same sequence of their kernels:
norm, RoPE, cache writes and top-k of vLLM, scores of DeepGEMM, attention of FlashMLA, and torch's
batched GEMMs in bfloat16, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from sparsemla import ops, reference
from sparsemla.cache import PagedCache
from sparsemla.formats import BF16_576, FP8_DS_MLA, INDEX_FP8
from sparsemla.plan import Plan, plan_batch
from sparsemla.rope import cos_sin_table, rope_frequencies
from sparsemla.weights import HeadWeight, MLALayer
from sparsemla_lab.bench.peers.base import Peer, one
from sparsemla_lab.bench.peers.deep_gemm import DeepGEMM
from sparsemla_lab.bench.peers.flash_mla import FlashMLA
from sparsemla_lab.bench.peers.vllm import CACHE_ROWS, VLLM
from sparsemla_lab.bench.timing import Results
from sparsemla_lab.bench.workloads import (
    INDEX_DIM,
    INDEX_HEADS,
    LATENT,
    NOPE,
    PAGE_SIZE,
    ROPE,
    VALUE,
    Inputs,
    Side,
    Workload,
    _generator,
    _head_weight,
    _paged,
    _select,
    _some,
)
from sparsemla_lab.testing.compare import Tolerance, assert_close

TOPK = 2048
STEP_OUT = Tolerance(cos=1e-3, size=2**-2)
"""Tolerance for e4m3 activations, which may round to a neighbouring code, and bfloat16 RoPE."""
SHARED = 0.98
"""Least share of a selection that the definition selects too; rounding decides the others."""


@dataclass(frozen=True)
class DecodeStep(Workload):
    """One token per request; ``indexer`` is 1 if the step includes the selection of rows."""

    batch: int
    heads: int
    context: int
    indexer: int
    op: ClassVar[str] = "decode_step"

    @property
    def flop(self) -> float:
        """Attention and GEMMs; FP8 operations of the indexer count half."""
        attention = 2.0 * TOPK * (LATENT + ROPE + LATENT)
        products = 2.0 * LATENT * (NOPE + VALUE)
        scores = self.indexer * self.context * INDEX_HEADS * INDEX_DIM
        return self.batch * (self.heads * (attention + products) + scores)

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, device=device).bfloat16()

        cache, table = _paged(draw, FP8_DS_MLA, self.batch, self.context)
        ones, lens = [1] * self.batch, [self.context] * self.batch
        plan = plan_batch(ones, lens, table, page_size=PAGE_SIZE, workspace_rows=None)
        inputs: Inputs = {
            "q": normal(self.batch, self.heads, NOPE + ROPE),
            "kv": normal(self.batch, LATENT + ROPE),
            "cache": cache,
            "layer": _layer(draw, self.heads, self.context),
            "plan": plan,
        }
        if self.indexer:
            # Both caches have one page table; keys lie at the same slots as rows.
            index_cache, _ = _paged(draw, INDEX_FP8, self.batch, self.context)
            inputs["index"] = {
                "q": normal(self.batch, INDEX_HEADS, INDEX_DIM),
                "k": normal(self.batch, INDEX_DIM),
                "weights": normal(self.batch, INDEX_HEADS),
                "norm_weight": normal(INDEX_DIM) / 10 + 1,
                "norm_bias": normal(INDEX_DIM) / 10,
                "cache": index_cache,
            }
        else:
            positions = _select(draw, self.batch, self.context, TOPK, "random")
            inputs["topk_indices"] = ops.to_slots(
                positions, table, plan.request_ids, page_size=PAGE_SIZE
            )
        return inputs

    def unique_bytes(self, inputs: Inputs) -> int:
        layer: MLALayer = inputs["layer"]
        weights = layer.w_uk.data.nbytes + layer.w_uv.data.nbytes
        per_token = 2 * self.heads * (NOPE + ROPE + VALUE) + TOPK * FP8_DS_MLA.bytes_per_token
        keys = self.indexer * self.context * INDEX_FP8.bytes_per_token
        return weights + self.batch * (per_token + keys)

    def run(self, inputs: Inputs) -> Results:
        rest = {name: inputs[name] for name in ("q", "kv", "cache", "layer", "plan")}
        if not self.indexer:
            return (ops.decode_branch(**rest, topk_indices=inputs["topk_indices"]),)
        slots = self._slots(inputs)
        return ops.decode_branch(**rest, topk_indices=slots), slots

    def _slots(self, inputs: Inputs) -> Tensor:
        """The rows that the indexer selects."""
        index, layer, plan = inputs["index"], inputs["layer"], inputs["plan"]
        q, weights = ops.fused_indexer_rope_quant(
            index["q"],
            index["weights"],
            index["k"],
            index["norm_weight"],
            index["norm_bias"],
            layer.cos_sin_cache,
            index["cache"],
            positions=plan.positions,
            slot_mapping=plan.slot_mapping,
        )
        scores = ops.indexer_scores_paged(
            q[:, None],
            weights[:, None],
            index["cache"],
            plan.page_table,
            plan.seq_lens,
            max_seq_len=self.context,
        )
        return ops.select_topk(
            scores[:, 0],
            topk=TOPK,
            row_ends=plan.seq_lens,
            page_table=plan.page_table,
            request_ids=plan.request_ids,
            page_size=PAGE_SIZE,
        )

    def check(self, inputs: Inputs, results: Results) -> None:
        """Check a side's selection, and its outputs for the rows that it selected.

        The definition uses ``inputs["layer"]``: with e4m3 weights, its GEMMs are FP8.
        """
        out = results[0]
        slots = results[1] if self.indexer else inputs["topk_indices"]
        if not bool(out.isfinite().all()):
            raise AssertionError(f"{self.op}: an output is not finite")
        some = _some(self.batch, 2, out.device)
        plan = _part(inputs["plan"], some)
        q, kv, layer = inputs["q"][some], inputs["kv"][some], inputs["layer"]
        written = inputs["cache"].read(inputs["plan"].slot_mapping[some])
        assert_close(f"{self.op} rows", written, _latent_rows(kv, layer, plan), CACHE_ROWS)
        expected = reference.decode_branch(
            q, kv, inputs["cache"], layer, plan, topk_indices=slots[some]
        )
        assert_close(self.op, out[some], expected, STEP_OUT)
        if self.indexer:
            self._check_selection(inputs, plan, some, slots[some])

    def _check_selection(self, inputs: Inputs, plan: Plan, some: Tensor, slots: Tensor) -> None:
        index = inputs["index"]
        table = inputs["layer"].cos_sin_cache
        q, weights = reference.prepare_index_queries(
            index["q"][some], index["weights"][some], table, positions=plan.positions
        )
        scores = reference.indexer_scores_paged(
            q[:, None],
            weights[:, None],
            index["cache"],
            plan.page_table,
            plan.seq_lens,
            max_seq_len=self.context,
        )
        best = scores[:, 0].topk(TOPK).indices.int()
        requests = torch.arange(len(some), device=some.device)
        wanted = reference.to_slots(best, plan.page_table, requests, page_size=PAGE_SIZE)
        for got, right in zip(slots, wanted, strict=True):
            shared = torch.isin(got, right).sum().item()
            if len(got.unique()) != TOPK or shared < SHARED * TOPK:
                raise AssertionError(f"{self.op}: {shared} of {TOPK} selected rows are right")


def step_workloads(full: bool = False) -> list[Workload]:
    """A few steps, or with ``full`` all of the grid."""
    if full:
        return [
            DecodeStep(batch, heads, context, indexer)
            for heads in (128, 64, 16)
            for batch in (1, 16, 64, 128)
            for context in (8192, 32768, 131072)
            for indexer in (0, 1)
        ]
    shapes = [
        (1, 128, 32768, 0),
        (1, 128, 32768, 1),
        (16, 128, 32768, 1),
        (64, 128, 32768, 1),
        (128, 128, 32768, 0),
        (128, 128, 32768, 1),
        (1, 16, 131072, 1),
        (128, 16, 32768, 1),
    ]
    return [DecodeStep(*shape) for shape in shapes]


class StepOfPeers(Peer):
    """The step from kernels of vLLM, DeepGEMM and FlashMLA; needs all three packages."""

    name = "vLLM, DeepGEMM, FlashMLA"

    def __init__(self, found: list[Peer]) -> None:
        self.attention = one(found, FlashMLA).module
        one(found, DeepGEMM)
        one(found, VLLM)

    def supports(self, workload: Workload) -> str | None:
        return None if isinstance(workload, DecodeStep) else "is a whole step"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        if not isinstance(workload, DecodeStep):
            raise TypeError(f"workload must be a DecodeStep, got {type(workload).__name__}")
        layer = inputs["layer"]
        w_uk, w_uv = (HeadWeight(w.dequantize().bfloat16()) for w in (layer.w_uk, layer.w_uv))
        inputs = inputs | {"layer": replace(layer, w_uk=w_uk, w_uv=w_uv)}
        select, reset_index = _given(inputs)
        if workload.indexer:
            select, reset_index = self._indexer(workload, inputs)
        attend, reset_query = self._attention(workload, inputs)

        def run() -> Results:
            slots = select()
            out = attend(slots)
            return (out, slots) if workload.indexer else (out,)

        def reset() -> None:
            reset_query()
            reset_index()

        return [Side(self.name, run, lambda got: workload.check(inputs, got), reset)]

    def _attention(
        self, workload: DecodeStep, inputs: Inputs
    ) -> tuple[Callable[[Tensor], Tensor], Callable[[], None]]:
        layer, plan, cache = inputs["layer"], inputs["plan"], inputs["cache"]
        batch, heads = workload.batch, workload.heads
        padded = min(size for size in FlashMLA.HEADS if size >= heads)
        q_nope = inputs["q"][..., :NOPE].transpose(0, 1).contiguous()  # [H, T, P]
        q_rope = inputs["q"][..., NOPE:].contiguous()
        latent, k_rope = (part.contiguous() for part in inputs["kv"].split([LATENT, ROPE], -1))
        w_uk = layer.w_uk.data.transpose(1, 2).contiguous()  # [H, P, L]
        w_uv = layer.w_uv.data.transpose(1, 2).contiguous()  # [H, L, V]
        table = layer.cos_sin_cache.bfloat16()
        norm = layer.kv_norm_weight.bfloat16()
        one = torch.ones((), device=q_rope.device)
        rows = cache.data.unsqueeze(2)
        schedule = self.attention.get_mla_metadata()[0]
        query = q_rope.new_zeros(batch, 1, padded, LATENT + ROPE)
        turned_q, turned_k = torch.empty_like(q_rope), torch.empty_like(k_rope)

        def run(slots: Tensor) -> Tensor:
            normed = torch.empty_like(latent)
            torch.ops._C.rms_norm(normed, latent, norm, layer.norm_eps)
            torch.ops._C.rotary_embedding(
                plan.positions, turned_q, turned_k[:, None], ROPE, table, False
            )
            torch.ops._C_cache_ops.concat_and_cache_mla(
                normed, turned_k, cache.data, plan.slot_mapping, FP8_DS_MLA.name, one, False
            )
            absorbed = torch.bmm(q_nope, w_uk).transpose(0, 1)  # [T, H, L]
            torch.ops._C_cache_ops.concat_mla_q(absorbed, turned_q, query[:, 0, :heads])
            attended, _ = self.attention.flash_mla_with_kvcache(
                query,
                rows,
                None,
                None,
                LATENT,
                schedule,
                None,
                layer.softmax_scale,
                False,
                True,
                slots[:, None],
            )
            out = attended.new_empty(batch, heads, VALUE)
            torch.bmm(attended[:, 0, :heads].transpose(0, 1), w_uv, out=out.transpose(0, 1))
            return out

        def reset() -> None:
            turned_q.copy_(q_rope)
            turned_k.copy_(k_rope)

        reset()
        return run, reset

    def _indexer(
        self, workload: DecodeStep, inputs: Inputs
    ) -> tuple[Callable[[], Tensor], Callable[[], None]]:
        index, plan = inputs["index"], inputs["plan"]
        cache: PagedCache = index["cache"]
        batch, length = workload.batch, workload.context
        table = inputs["layer"].cos_sin_cache.bfloat16()
        norm = index["norm_weight"].bfloat16(), index["norm_bias"].bfloat16()
        weights = index["weights"].float() * INDEX_HEADS**-0.5 * INDEX_DIM**-0.5
        turned = torch.empty_like(index["q"])
        lens = plan.seq_lens[:, None].contiguous()
        processors = torch.cuda.get_device_properties(lens.device).multi_processor_count
        scorer, selector = torch.ops.deep_gemm, torch.ops._C
        schedule = scorer.get_paged_mqa_logits_metadata(lens, PAGE_SIZE, processors, None)
        workspace = torch.zeros(VLLM.WORKSPACE_BYTES, dtype=torch.uint8, device=lens.device)
        select = selector.persistent_topk
        if batch <= VLLM.COOPERATIVE_ROWS and hasattr(selector, "cooperative_topk"):
            select = selector.cooperative_topk

        def run() -> Tensor:
            keys = functional.layer_norm(index["k"], (INDEX_DIM,), *norm, 1e-6)
            selector.rotary_embedding(
                plan.positions, turned.view(batch, -1), keys, INDEX_DIM, table, True
            )
            torch.ops._C_cache_ops.indexer_k_quant_and_cache(
                keys, cache.data, plan.slot_mapping, INDEX_DIM, "ue8m0"
            )
            q = torch.empty_like(turned, dtype=torch.float8_e4m3fn)
            scales = torch.empty_like(weights)
            selector.per_token_group_fp8_quant(
                turned.view(-1, INDEX_DIM),
                q.view(-1, INDEX_DIM),
                scales.view(-1, 1),
                INDEX_DIM,
                1e-4,
                -448.0,
                448.0,
                True,
                False,
                False,
            )
            logits = scorer.fp8_fp4_paged_mqa_logits(
                q[:, None],
                None,
                cache.data.unsqueeze(2),
                weights * scales,
                lens,
                plan.page_table,
                schedule,
                length,
                None,
            )
            chosen = torch.empty(batch, TOPK, dtype=torch.int32, device=lens.device)
            select(logits, plan.seq_lens, chosen, workspace, TOPK, length)
            return ops.to_slots(chosen, plan.page_table, plan.request_ids, page_size=PAGE_SIZE)

        def reset() -> None:
            turned.copy_(index["q"])

        reset()
        return run, reset


def _given(inputs: Inputs) -> tuple[Callable[[], Tensor], Callable[[], None]]:
    """The selection in the inputs, instead of an indexer's."""
    return lambda: inputs["topk_indices"], lambda: None


def _layer(draw: torch.Generator, heads: int, positions: int) -> MLALayer:
    """A layer with weights in e4m3, scaled for outputs of order 1."""
    device = draw.device

    return MLALayer(
        w_uk=_head_weight(draw, heads, LATENT, NOPE),
        w_uv=_head_weight(draw, heads, VALUE, LATENT),
        kv_norm_weight=torch.rand(LATENT, generator=draw, device=device).bfloat16() + 0.5,
        cos_sin_cache=cos_sin_table(rope_frequencies(ROPE, 1e4), positions).to(device),
        softmax_scale=(NOPE + ROPE) ** -0.5,
    )


def _part(plan: Plan, some: Tensor) -> Plan:
    """The plan of some requests of one token each, without cache writes."""
    return replace(
        plan,
        positions=plan.positions[some],
        slot_mapping=torch.full_like(some, -1),
        request_ids=torch.arange(len(some), dtype=torch.int32, device=some.device),
        page_table=plan.page_table[some],
        seq_lens=plan.seq_lens[some],
    )


def _latent_rows(kv: Tensor, layer: MLALayer, plan: Plan) -> Tensor:
    """The rows that the cache stores, before quantisation."""
    rows = PagedCache.allocate(BF16_576, 1, PAGE_SIZE, device=kv.device)
    slots = torch.arange(len(kv), device=kv.device)
    reference.fused_rope_rmsnorm_quant(
        kv.new_zeros(len(kv), 1, ROPE),
        kv,
        layer.cos_sin_cache,
        layer.kv_norm_weight,
        rows,
        positions=plan.positions,
        slot_mapping=slots,
        eps=layer.norm_eps,
        interleaved=layer.interleaved,
    )
    return rows.read(slots)

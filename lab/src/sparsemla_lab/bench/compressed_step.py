"""The decode step of a layer of DeepSeek-V4, between its projections.

It begins with projected queries, raw rows, and values and gates of the pools, and ends with the
first output projection. This package's step is a sequence of its ops. The peers' step is the
sequence of kernels that vLLM launches on Hopper: its fused write, its compressors, the scores of
DeepGEMM, its top-k, attention of FlashMLA, and the output projection with DeepGEMM.

vLLM's streams are its own: the write, the compressor, the index queries and the compressor of index
keys run side by side. This package selects on one stream and writes rows and entries on another;
without a selection one stream is as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsemla import ops, reference
from sparsemla.cache import PagedCache, slots_of
from sparsemla.formats import FP8_584, INDEX_FP8
from sparsemla.pooling import Pooling
from sparsemla.rope import cos_sin_table, rope_frequencies
from sparsemla_lab.bench.peers import deep_gemm
from sparsemla_lab.bench.peers.base import Peer, one
from sparsemla_lab.bench.peers.deep_gemm import DeepGEMM
from sparsemla_lab.bench.peers.flash_mla import FlashMLA
from sparsemla_lab.bench.peers.vllm import CACHE_ROWS, VLLM
from sparsemla_lab.bench.peers.vllm_python import VLLMPython
from sparsemla_lab.bench.step import SHARED, STEP_OUT
from sparsemla_lab.bench.timing import Results
from sparsemla_lab.bench.workloads import (
    INDEX_DIM,
    INDEX_HEADS,
    PAGE_SIZE,
    Inputs,
    PoolWindows,
    Side,
    Workload,
    _generator,
    _head_weight,
    _paged,
    _some,
)
from sparsemla_lab.testing.compare import assert_close

DIM, ROPE, OUTPUTS = 512, 64, 1024
WINDOW = 128
"""Raw rows that a token attends to."""
HEADS_OF_GROUP = 8
SELECTED = 8
"""Entries that a token selects, for each head of a model: 512 in V4-Flash, 1024 in V4-Pro."""
RANKS = {16: 64}
"""Heads of a tensor-parallel rank, and of the model."""
RATIOS = (1, 4, 128)
"""Tokens of an entry; with 1 a layer has none. With 4 an indexer selects entries."""


@dataclass(frozen=True)
class CompressedStep(Workload):
    """One token per request; request ``b`` has ``context - b`` tokens, so windows close in turn."""

    batch: int
    heads: int
    context: int
    ratio: int
    op: ClassVar[str] = "compressed_decode_step"

    @property
    def shape(self) -> dict[str, int]:
        return {name: size for name, size in super().shape.items() if name != "ratio"}

    @property
    def variant(self) -> str:
        entries = {
            1: "no entries",
            4: f"{self.listed} selected entries of 4 tokens",
            128: "all entries of 128 tokens",
        }
        return entries[self.ratio]

    @property
    def listed(self) -> int:
        """Entries that a token attends to."""
        entries = self.context // self.ratio
        selected = SELECTED * RANKS.get(self.heads, self.heads)
        return {1: 0, 4: min(selected, entries), 128: entries}[self.ratio]

    @property
    def pools(self) -> dict[str, PoolWindows]:
        """The poolings of a layer, of entries and of index keys."""
        pooling = Pooling(self.ratio, overlap=self.ratio == 4)
        formats = {1: {}, 4: {"entries": FP8_584, "keys": INDEX_FP8}, 128: {"entries": FP8_584}}
        return {
            name: PoolWindows(self.batch, 1, pooling, format, "spread")
            for name, format in formats[self.ratio].items()
        }

    @property
    def flop(self) -> float:
        """Attention and output projection; FP8 operations of the indexer count half."""
        attention = 2.0 * (WINDOW + self.listed) * (DIM + DIM)
        projection = 2.0 * DIM * OUTPUTS
        keys = self.context // 4 if self.ratio == 4 else 0
        return self.batch * (self.heads * (attention + projection) + keys * INDEX_HEADS * INDEX_DIM)

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw, device=device).bfloat16()

        table = cos_sin_table(rope_frequencies(ROPE, 1.6e5).to(device), self.context)
        requests = torch.arange(self.batch, dtype=torch.int32, device=device)
        seq_lens = self.context - requests
        positions = seq_lens.long() - 1
        raw, raw_table = self._window(draw)
        window = ops.visible_slots(
            positions, raw_table, requests, width=WINDOW, page_size=PAGE_SIZE
        )
        inputs: Inputs = {
            "q": normal(self.batch, self.heads, DIM),
            "kv": normal(self.batch, DIM),
            # The rows that caches are filled with are as small.
            "norm_weight": (torch.rand(DIM, generator=draw, device=device).bfloat16() + 0.5) / 10,
            "raw": raw,
            "slot_mapping": slots_of(raw_table, requests, positions, PAGE_SIZE),
            "window": window,
            "table": table,
            "positions": positions,
            "request_ids": requests,
            "seq_lens": seq_lens,
            "input_row_offsets": torch.arange(self.batch + 1, dtype=torch.int32, device=device),
            "attn_sink": torch.randn(self.heads, generator=draw, device=device),
            "softmax_scale": 10 * DIM**-0.5,
            "weight": _head_weight(
                draw, self.heads // HEADS_OF_GROUP, OUTPUTS, HEADS_OF_GROUP * DIM
            ),
            "streams": _streams(device),
        }
        for name, pool in self.pools.items():
            cache, pages = _paged(draw, pool.format, self.batch, self.context // self.ratio)
            # Entries and index keys have one page table.
            pages = inputs.setdefault("pages", pages)
            pooled = pool.build_at(draw, positions, table)
            slots = ops.entry_slots(
                positions, pages, requests, ratio=self.ratio, page_size=PAGE_SIZE
            )
            inputs[name] = pooled | {"cache": cache, "slot_mapping": slots.long()}
        if self.ratio == 4:
            inputs["index_q"] = normal(self.batch, INDEX_HEADS, INDEX_DIM)
            inputs["index_weights"] = normal(self.batch, INDEX_HEADS)
            inputs["topk"] = self.listed
        if self.ratio == 128:
            inputs["listed"] = ops.visible_slots(
                positions,
                pages,
                requests,
                width=self.listed,
                ratio=self.ratio,
                page_size=PAGE_SIZE,
            )
        return inputs

    def _window(self, draw: torch.Generator) -> tuple[PagedCache, Tensor]:
        """A cache of raw rows with the last pages of each request, and the page table."""
        columns = -(-self.context // PAGE_SIZE)
        kept = min(columns, -(-(WINDOW + self.batch) // PAGE_SIZE) + 1)
        cache, pages = _paged(draw, FP8_584, self.batch, kept * PAGE_SIZE)
        table = torch.full((self.batch, columns), -1, dtype=torch.int32, device=draw.device)
        table[:, columns - kept :] = pages
        return cache, table

    def unique_bytes(self, inputs: Inputs) -> int:
        weight = inputs["weight"]
        per_token = 2 * self.heads * DIM + 2 * DIM + 2 * len(weight.data) * OUTPUTS
        rows = (WINDOW + self.listed) * FP8_584.bytes_per_token
        keys = self.context // 4 * INDEX_FP8.bytes_per_token if self.ratio == 4 else 0
        pooled = sum(pool.unique_bytes(inputs[name]) for name, pool in self.pools.items())
        return weight.data.nbytes + self.batch * (per_token + rows + keys) + pooled

    def run(self, inputs: Inputs) -> Results:
        selected: list[Tensor] = []
        if self.ratio == 4:
            slots, q = side_by_side(
                inputs["streams"][:1], lambda: _select(inputs), lambda: _write(inputs)
            )
            selected, lengths = [slots], None
        else:
            q = _write(inputs)
            slots, lengths = inputs.get("listed", (None, None))
        raw_slots, raw_lengths = inputs["window"]
        out, _ = ops.sparse_decode(
            q[:, None],
            inputs["raw"],
            raw_slots[:, None],
            softmax_scale=inputs["softmax_scale"],
            topk_lengths=raw_lengths,
            attn_sink=inputs["attn_sink"],
            extra_cache=inputs["entries"]["cache"] if self.ratio > 1 else None,
            extra_topk_indices=None if slots is None else slots[:, None],
            extra_topk_lengths=lengths,
        )
        places = {"cos_sin_cache": inputs["table"], "positions": inputs["positions"]}
        return ops.project_groups(out[:, 0], inputs["weight"], **places), *selected

    def ours(self, inputs: Inputs) -> Side:
        def check(results: Results) -> None:
            for name, pool in self.pools.items():
                pool.check(inputs[name], (inputs[name]["cache"].data,))
            self.check(inputs, results)

        return Side("sparsemla", lambda: self.run(inputs), check, lambda: self.reset(inputs))

    def reset(self, inputs: Inputs) -> None:
        """Overwrite the rows that a step writes."""
        inputs["raw"].write(inputs["slot_mapping"], torch.zeros_like(inputs["kv"]))
        for name in self.pools:
            cache, slots = inputs[name]["cache"], inputs[name]["slot_mapping"]
            cache.write(slots, slots.new_zeros(len(slots), cache.format.head_dim).float())

    def check(self, inputs: Inputs, results: Results) -> None:
        """Check a side's raw rows and selection, and its outputs for the rows that it selected.

        Its entries and index keys are in the caches, and are checked before.
        """
        if not bool(results[0].isfinite().all()):
            raise AssertionError(f"{self.op}: an output is not finite")
        some = _some(self.batch, 2, results[0].device)
        positions, raw = inputs["positions"][some], inputs["raw"]
        fresh = PagedCache.allocate(FP8_584, 1, PAGE_SIZE, device=some.device)
        queries, rows = reference.fused_rope_rmsnorm_quant(
            inputs["q"][some],
            inputs["kv"][some],
            inputs["table"],
            inputs["norm_weight"],
            fresh,
            positions=positions,
            slot_mapping=torch.arange(len(some), device=some.device),
            query_norm=True,
        )
        written = raw.read(inputs["slot_mapping"][some])
        assert_close(f"{self.op} rows", written, rows.bfloat16(), CACHE_ROWS)
        if self.ratio == 4:
            slots, lengths = results[1], None
            self._check_selection(inputs, some, slots[some])
        else:
            slots, lengths = inputs.get("listed", (None, None))
        raw_slots, raw_lengths = inputs["window"]
        attended, _ = reference.sparse_decode(
            queries.bfloat16()[:, None],
            raw,
            raw_slots[some][:, None],
            softmax_scale=inputs["softmax_scale"],
            topk_lengths=raw_lengths[some],
            attn_sink=inputs["attn_sink"],
            extra_cache=None if slots is None else inputs["entries"]["cache"],
            extra_topk_indices=None if slots is None else slots[some][:, None],
            extra_topk_lengths=None if lengths is None else lengths[some],
        )
        expected = reference.project_groups(
            attended[:, 0].bfloat16(),
            inputs["weight"],
            cos_sin_cache=inputs["table"],
            positions=positions,
        )
        assert_close(self.op, results[0][some], expected, STEP_OUT)

    def _check_selection(self, inputs: Inputs, some: Tensor, slots: Tensor) -> None:
        part = inputs | {
            name: inputs[name][some] for name in ("index_q", "index_weights", "positions")
        }
        q, weights = _index_queries(reference.prepare_index_queries, part)
        counts = (part["positions"] + 1) // self.ratio
        scores = reference.indexer_scores_paged(
            q[:, None],
            weights[:, None],
            inputs["keys"]["cache"],
            inputs["pages"][some],
            counts[:, None],
            max_seq_len=self.context // self.ratio,
        )
        best = scores[:, 0].topk(self.listed).indices
        requests = torch.arange(len(some), device=some.device)
        wanted = slots_of(inputs["pages"][some], requests[:, None], best, PAGE_SIZE)
        for got, right in zip(slots, wanted, strict=True):
            shared = torch.isin(got, right).sum().item()
            if len(got.unique()) != self.listed or shared < SHARED * self.listed:
                raise AssertionError(
                    f"{self.op}: {shared} of {self.listed} selected entries are right"
                )


class CompressedStepOfPeers(Peer):
    """The step from kernels of vLLM, DeepGEMM and FlashMLA; needs all of them.

    Index queries come from vLLM's Triton kernel, which it takes where CuTe DSL is not installed.
    Its write pads the heads for FlashMLA, and the projection reads those that count.
    """

    name = "vLLM's layer"

    def __init__(self, found: list[Peer]) -> None:
        self.attention = one(found, FlashMLA).module
        self.python = one(found, VLLMPython)
        one(found, DeepGEMM)
        one(found, VLLM)

    def supports(self, workload: Workload) -> str | None:
        if not isinstance(workload, CompressedStep):
            return "is a whole step"
        return None if workload.heads <= max(FlashMLA.HEADS) else "takes up to 128 heads"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        if not isinstance(workload, CompressedStep):
            raise TypeError(f"workload must be a CompressedStep, got {type(workload).__name__}")
        compress, checks, note = self._compressors(workload, inputs)
        padded = min(size for size in FlashMLA.HEADS if size >= workload.heads)
        note += "" if padded == workload.heads else f"heads padded to {padded}"
        write = self._write(inputs, padded)
        attend = self._attention(inputs, workload.heads, padded)
        names = "weight", "table", "positions"
        project = self.python.projection(*(inputs[name] for name in names), heads=workload.heads)
        streams = inputs["streams"]
        beside = [compress["entries"]] if workload.ratio > 1 else []
        if workload.ratio == 4:
            queries, select = self._indexer(workload, inputs)
            beside.insert(0, lambda: side_by_side(streams[2:], queries, compress["keys"])[0])

        def run() -> Results:
            q, *found = side_by_side(streams[:2], write, *beside)
            if workload.ratio != 4:
                return (project(attend(q, *inputs.get("listed", (None, None)))),)
            slots, lengths = select(*found[0])
            return project(attend(q, slots, lengths)), slots

        def check(results: Results) -> None:
            for check_pool in checks:
                check_pool()
            workload.check(inputs, results)

        return [Side(self.name, run, check, lambda: workload.reset(inputs), note)]

    def _compressors(
        self, workload: CompressedStep, inputs: Inputs
    ) -> tuple[dict[str, Callable[[], None]], list[Callable[[], None]], str]:
        """What writes entries and index keys, the checks of both, and a remark."""
        compress, checks, notes = {}, [], []
        for name, pool in workload.pools.items():
            kind = self.python.kinds(pool.format)[-1]
            run, check = self.python.compressor(kind, pool, inputs[name], inputs[name]["cache"])
            compress[name] = run
            checks.append(check)
            notes.append(self.python.note(kind, pool.format))
        return compress, checks, "".join(notes)

    @staticmethod
    def _write(inputs: Inputs, heads: int) -> Callable[[], Tensor]:
        """Its fused write takes rows that the norm of the q-lora vectors has normalised, too."""
        normed = torch.nn.functional.rms_norm(
            inputs["kv"].float(), (DIM,), inputs["norm_weight"].float(), 1e-6
        ).bfloat16()
        raw = inputs["raw"]
        pages = raw.data.view(raw.num_pages, -1)
        places = inputs["slot_mapping"], inputs["positions"], inputs["table"]

        def write() -> Tensor:
            fused = torch.ops._C.fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert
            q: Tensor = fused(inputs["q"], normed, pages, *places, heads, 1e-6, raw.page_size)
            return q

        return write

    def _indexer(
        self, workload: CompressedStep, inputs: Inputs
    ) -> tuple[Callable[[], tuple[Tensor, Tensor]], Callable[[Tensor, Tensor], Any]]:
        """What prepares the index queries, and what selects slots and counts them."""
        batch, topk, length = workload.batch, workload.listed, workload.context // workload.ratio
        cache, pages, requests = inputs["keys"]["cache"], inputs["pages"], inputs["request_ids"]
        lens = (inputs["seq_lens"] // workload.ratio)[:, None].contiguous()
        processors = torch.cuda.get_device_properties(lens.device).multi_processor_count
        scorer, gemm = torch.ops.deep_gemm, deep_gemm.load(self.python.directories)
        schedule = scorer.get_paged_mqa_logits_metadata(lens, PAGE_SIZE, processors, None)
        workspace = torch.zeros(VLLM.WORKSPACE_BYTES, dtype=torch.uint8, device=lens.device)
        library = torch.ops._C
        few = batch <= VLLM.COOPERATIVE_ROWS
        choose = library.cooperative_topk if few else library.persistent_topk
        valid = torch.ones_like(requests, dtype=torch.bool)
        chosen = torch.empty(batch, topk, dtype=torch.int32, device=lens.device)

        def queries() -> tuple[Tensor, Tensor]:
            names = "positions", "index_q", "table", "index_weights"
            return self.python.queries(
                *(inputs[name] for name in names), INDEX_DIM**-0.5, INDEX_HEADS**-0.5
            )

        def select(q: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
            chosen.fill_(-1)
            gemm.set_pdl(True)  # as vLLM does
            logits = scorer.fp8_fp4_paged_mqa_logits(
                q[:, None],
                None,
                cache.data.unsqueeze(2),
                weights,
                lens,
                pages,
                schedule,
                length,
                None,
            )
            choose(logits, lens, chosen, workspace, topk, length)
            return self.python.slots(chosen, requests, pages, PAGE_SIZE, valid)

        return queries, select

    def _attention(self, inputs: Inputs, heads: int, padded: int) -> Callable[..., Tensor]:
        attn_sink = torch.nn.functional.pad(inputs["attn_sink"], (0, padded - heads))
        raw_slots, raw_lengths = inputs["window"]
        raw, schedule = inputs["raw"].data.unsqueeze(2), self.attention.get_mla_metadata()[0]
        entries = inputs["entries"]["cache"].data.unsqueeze(2) if "entries" in inputs else None

        def attend(q: Tensor, slots: Tensor | None, lengths: Tensor | None) -> Tensor:
            out, _ = self.attention.flash_mla_with_kvcache(
                q[:, None],
                raw,
                None,
                None,
                DIM,
                schedule,
                None,
                inputs["softmax_scale"],
                False,
                True,
                raw_slots[:, None],
                attn_sink=attn_sink,
                topk_length=raw_lengths,
                extra_k_cache=entries,
                extra_indices_in_kvcache=None if slots is None else slots[:, None],
                extra_topk_length=lengths,
            )
            return out[:, 0, :heads]

        return attend


def compressed_step_workloads(full: bool = False) -> list[Workload]:
    """The steps of each kind of layer; with ``full`` at more numbers of requests and tokens."""
    batches = (1, 4, 16, 64, 128) if full else (1, 16, 128)
    contexts = (8192, 131072) if full else (131072,)
    shapes = [
        *(
            (batch, heads, context)
            for heads in (64, 128)
            for batch in batches
            for context in contexts
        ),
        *((batch, 16, 131072) for batch in (1, 16)),
        *((1, heads, 1 << 20) for heads in (64, 128)),
    ]
    return [CompressedStep(*shape, ratio) for ratio in RATIOS for shape in shapes]


def side_by_side(
    streams: Sequence[torch.cuda.Stream], first: Callable[[], Any], *others: Callable[[], Any]
) -> list[Any]:
    """The results of functions on their own streams; without streams, one after the other.

    The first function is on the current stream, which then waits for the others.
    """
    if not streams or not others:
        return [first(), *(other() for other in others)]
    current = torch.cuda.current_stream()
    begun = current.record_event()
    results, ends = [], []
    for stream, other in zip(streams, others, strict=False):
        with torch.cuda.stream(stream):
            stream.wait_event(begun)
            results.append(other())
            ends.append(stream.record_event())
    results.insert(0, first())
    for end in ends:
        current.wait_event(end)
    return results


def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(3)] if device.type == "cuda" else []


def _write(inputs: Inputs) -> Tensor:
    """The queries, normalised and rotated; raw rows and entries are written."""
    q: Tensor = ops.fused_rope_rmsnorm_quant(
        inputs["q"],
        inputs["kv"],
        inputs["table"],
        inputs["norm_weight"],
        inputs["raw"],
        positions=inputs["positions"],
        slot_mapping=inputs["slot_mapping"],
        query_norm=True,
    )
    if "entries" in inputs:
        ops.pool_windows(**inputs["entries"])
    return q


def _select(inputs: Inputs) -> Tensor:
    """The slots of the entries that the indexer selects; index keys are written."""
    ops.pool_windows(**inputs["keys"])
    q, weights = _index_queries(ops.prepare_index_queries, inputs)
    return ops.indexer_topk(
        q,
        weights,
        inputs["keys"]["cache"],
        input_row_offsets=inputs["input_row_offsets"],
        seq_lens=inputs["seq_lens"],
        page_table=inputs["pages"],
        topk=inputs["topk"],
        ratio=inputs["keys"]["pooling"].ratio,
        as_slots=True,
    )


def _index_queries(
    prepare: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs
) -> tuple[Tensor, Tensor]:
    """The indexer's queries and the weights of its heads, by an op or its definition."""
    return prepare(
        inputs["index_q"],
        inputs["index_weights"],
        inputs["table"],
        positions=inputs["positions"],
        format=INDEX_FP8,
        interleaved=True,
        rope_first=False,
    )

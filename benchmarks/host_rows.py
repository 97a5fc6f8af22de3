"""A stack of attention layers over rows in host memory, beside the same over rows on the GPU.

A decode step of DeepSeek-V3.2's layers, one token a request: for each layer the query's projection
and the absorbed one, and attention over 2048 selected rows. With rows on the host, each layer also
resolves its selection and fetches what is missing. The stack is one CUDA graph. Every process of
selections is first checked: both sides must have the same bits. A time is the median over steps,
each with a new selection.

Selections come from random walks, in which a row stays selected with a given probability, and from
a trace: the model in the package reads held-out text, and each position that its indexers select
stands for as many neighbouring rows as the context is longer. A walk never comes back to a row that
it has left, so that more hot rows do not help it; the trace does.

Requests share their pages, each in an order of its own, so that 61 layers of any batch fit into a
GPU. Rows of the step's own tokens are part of the context; nothing is written.

With ``--prefill`` a chunk of so many tokens at the end of the context is measured, too: the same
projections, and attention over resident rows or over those that :class:`sparsemla.HostContext`
copies a layer ahead. An indexer selects them within each layer, or they were drawn before the
clock starts. All layers share the keys of one indexer.

Run ``python benchmarks/host_rows.py --json rows.json`` on a GPU. A prefill alone, over 16 layers:
``--prefill 8192 --layers 16 --contexts 131072 1048576 --batches --fetches``. ``--device cpu`` with
small sizes shows that the program works.

Under ``torchrun --nproc-per-node 2`` ranks share each context (decode context parallelism): pages
are dealt out in turn, on the device and on the host. A rank projects the queries of its heads, all
gather those of all heads, each attends to the selected rows that it keeps, and each gets the merged
outputs of its heads. Both sides must have the same bits, and those of one list of all ranks' rows
but for the rounding of partial results. A time is the median of the slowest rank. Collectives are
also timed alone. ``NCCL_NVLS_ENABLE=0`` leaves NVLink's multicast off.

With ``NCCL_MULTI_RANK_GPU_ENABLE=1`` ranks may share a GPU (NCCL 2.30): bits are compared, and no
times are shown or written.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, distributed

from exchange_bench import all_gather
from long_contexts import FORMATS, GPU_GIB
from sparsemla import (
    FP8_DS_MLA,
    INDEX_FP8,
    ContextShard,
    HeadWeight,
    HostCache,
    HostContext,
    HotRows,
    PagedCache,
    Plan,
    exchange_states,
    fetch_rows,
    indexer_topk,
    own_positions,
    plan_batch,
    project_heads,
    sparse_decode,
    sparse_prefill,
    to_slots,
)
from sparsemla.pinned import available_bytes
from sparsemla_lab.capacity import GIB, capacity
from sparsemla_lab.testing.ranks import gpu_of, shared

PAGE_SIZE, Q_RANK, NOPE, ROPE, LATENT = 64, 1536, 128, 64, 512
INDEX_HEADS, INDEX_DIM = 64, 128
ROUNDING = 2**-7
"""Of partial results before their merge, and of kernels for fewer heads: the most of a norm."""
WARM_STEPS = 32
"""Steps before the timed ones, in which the hot rows fill."""
MODEL, FITTING = "DeepSeek-V3.2", {"128K": 1 << 17, "1M": 1 << 20}
"""Of the requests that fit, and their tokens."""


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Args:
        device: ``cuda`` or ``cpu``.
        layers, heads, topk, context, batch: of the stack.
        steps: that are timed.
    """

    device: str
    layers: int = 61
    heads: int = 128
    topk: int = 2048
    context: int = 131072
    batch: int = 1
    steps: int = 40


@dataclass(frozen=True)
class Row:
    """Times of a size, a process of selections, and a number of hot rows.

    Args:
        device: name of the GPU, or ``cpu``.
        layers, heads, topk, context, batch: the size.
        process: of the selections.
        rows_per_seat: hot rows of a request and layer.
        misses: share of the selected rows that were fetched.
        resident_us, host_us: of a layer, both with projections.
        link_us: of a layer, resolving and fetching alone.
        link_gb_s: fetched bytes over that time.
    """

    device: str
    layers: int
    heads: int
    topk: int
    context: int
    batch: int
    process: str
    rows_per_seat: int
    misses: float
    resident_us: float
    host_us: float
    link_us: float
    link_gb_s: float


@dataclass(frozen=True)
class SharedRow(Row):
    """Times of ranks that share contexts: of the slowest rank, at the same time as the others.

    ``misses`` is what the rank with most of them fetched, a share of the whole selection, and
    ``link_gb_s`` the bytes of that rank over the time of the slowest.

    Args:
        ranks: their number.
        collective_us: of a layer, collectives alone: of queries, and of outputs with their merge.
    """

    ranks: int
    collective_us: float

    @property
    def missed(self) -> float:
        """Rows of a layer that a rank fetches."""
        return self.misses * self.batch * self.topk

    def __str__(self) -> str:
        return (
            f"{self.ranks} ranks, {self.context} tokens, {self.batch} requests, {self.process}: "
            f"resident {self.resident_us:.1f} us, host {self.host_us:.1f}, ratio "
            f"{self.host_us / self.resident_us:.2f}; {self.missed:.0f} rows miss on a rank, link "
            f"{self.link_us:.1f} us, collectives {self.collective_us:.1f}"
        )


@dataclass(frozen=True)
class Fitting:
    """Requests that fit.

    Args:
        ranks: that share contexts; each is a GPU.
        gpu_gib, host_gib: free memory of each GPU, and of the host.
        requests: of so many tokens, with a share of the rows of each in the host's memory.
        resident: of one GPU with as much memory that keeps all rows.
    """

    ranks: int
    gpu_gib: float
    host_gib: float
    requests: dict[str, int]
    resident: dict[str, int]

    def __str__(self) -> str:
        counts = (
            f"{count} requests of {name} tokens ({self.resident[name]} resident on one GPU)"
            for name, count in self.requests.items()
        )
        memory = f"{self.gpu_gib:.1f} GiB of each GPU and {self.host_gib:.0f} GiB of the host"
        return f"{self.ranks} ranks, {memory}: {', '.join(counts)}"


@dataclass(frozen=True)
class Prefill:
    """Times of a chunk's layer.

    Args:
        device, layers, heads, topk, context: as of a :class:`Row`; the context has the chunk.
        tokens: of the chunk.
        selects: whether an indexer's selection is part of the layer.
        resident_ms, host_ms: of a layer; the first one's copy is hidden behind none.
        link_ms: of a layer, the copies alone.
        link_gb_s: copied bytes over that time.
    """

    device: str
    layers: int
    heads: int
    topk: int
    context: int
    tokens: int
    selects: bool
    resident_ms: float
    host_ms: float
    link_ms: float
    link_gb_s: float


Selections = Iterator[Tensor]
"""int32 ``[layers, batch, topk]`` of one step after the other, ascending."""


def walk(sizes: Sizes, overlap: float) -> Selections:
    """Each selected row stays with probability ``overlap``; others are drawn in its place."""
    generator = torch.Generator(sizes.device).manual_seed(0)
    shape = sizes.layers, sizes.batch, sizes.context
    chosen = torch.zeros(shape[0] * shape[1], shape[2], dtype=torch.bool, device=sizes.device)
    while True:
        # Rows with the largest keys: those that stay are above all others.
        keys = torch.rand(chosen.shape, generator=generator, device=sizes.device)
        stays = chosen & (keys < overlap)
        keys = torch.where(chosen & ~stays, -1.0, keys + stays)
        picked = keys.topk(sizes.topk, sorted=False).indices.sort(-1).values
        chosen = torch.zeros_like(chosen).scatter_(1, picked, True)
        yield picked.int().view(*shape[:2], sizes.topk)


def trace(sizes: Sizes, recorded: dict[int, Tensor]) -> Selections:
    """Selections of a model with fewer rows: each position stands for several rows.

    Requests begin at other steps of the trace, and layers repeat those of the model.

    Raises:
        ValueError: a trace that is longer than the context.
    """
    layers = [recorded[layer] for layer in sorted(recorded)]
    tokens, topk = layers[0].shape
    factor = sizes.topk // topk
    if not 0 < tokens * factor <= sizes.context:
        raise ValueError(
            f"trace_tokens must be at most {sizes.context * topk // sizes.topk}, of which each "
            f"stands for {factor} rows of a context of {sizes.context}, got {tokens}"
        )
    rows = torch.arange(factor, dtype=torch.int32, device=layers[0].device)
    steps = WARM_STEPS + 2 * sizes.steps
    starts = [tokens - steps - 37 * request % (tokens // 4) for request in range(sizes.batch)]
    for step in range(steps):
        picked = torch.stack([torch.stack([each[s + step] for s in starts]) for each in layers])
        lists = (picked[..., None] * factor + rows).flatten(-2)  # [model layers, batch, topk]
        yield lists[[i % len(layers) for i in range(sizes.layers)]].to(sizes.device)


def record(tokens: int, device: str) -> dict[int, Tensor]:
    """What each token of a text selects in the model in the package, by layer."""
    from sparsemla.backends.transformers import enable
    from sparsemla_lab.corpus import as_bytes, held_out_text, windows
    from sparsemla_lab.demo import shipped_model
    from sparsemla_lab.generate import load_checkpoint

    checkpoint = load_checkpoint(
        shipped_model(), cache_format="bf16", dtype="float32", device=device
    )
    checkpoint.attention.disable()
    text = windows(as_bytes(held_out_text()), 9, tokens + 1, None)[1:2, :-1].long().to(device)
    model: Any = checkpoint.model
    with enable(model, cache_format=FP8_DS_MLA, record_selections=True) as handle, torch.no_grad():
        model(text)
        return dict(handle.selections[-1])


def num_ranks() -> int:
    """Ranks that share contexts; 1 without a group."""
    return distributed.get_world_size() if distributed.is_initialized() else 1


def together(device: str) -> None:
    """Wait for the other ranks, on the device."""
    if num_ranks() > 1:
        distributed.all_reduce(torch.zeros(1, device=device))


def largest(number: float, device: str) -> float:
    """The largest of all ranks' numbers."""
    if num_ranks() == 1:
        return number
    found = torch.tensor([number], dtype=torch.float64, device=device)
    distributed.all_reduce(found, distributed.ReduceOp.MAX)
    return found.item()


def of_first_rank(sizes: Sizes, selections: Selections) -> Selections:
    """The selections of the first rank, on all ranks."""
    chosen = torch.empty(
        sizes.layers, sizes.batch, sizes.topk, dtype=torch.int32, device=sizes.device
    )
    while True:
        if distributed.get_rank() == 0:
            chosen.copy_(next(selections))
        distributed.broadcast(chosen, 0)
        yield chosen


class Projections:
    """The query's projection and the absorbed one of a batch's tokens."""

    def __init__(self, sizes: Sizes) -> None:
        self.heads, width = sizes.heads, sizes.heads * (NOPE + ROPE)
        device = sizes.device
        self.x = torch.randn(sizes.batch, Q_RANK).bfloat16().to(device)
        self.weight = (torch.randn(Q_RANK, width) * Q_RANK**-0.5).bfloat16().to(device)
        w_uk = torch.randn(sizes.heads, LATENT, NOPE, device=device) * NOPE**-0.5
        self.w_uk = HeadWeight(w_uk.bfloat16())

    def query(self) -> Tensor:
        """``[B, 1, H, L + R]``, what every layer computes."""
        q = (self.x @ self.weight).unflatten(1, (self.heads, NOPE + ROPE))
        query = q.new_empty(*q.shape[:2], LATENT + ROPE)
        project_heads(q[..., :NOPE], self.w_uk, out=query[..., :LATENT])
        query[..., LATENT:] = q[..., NOPE:]
        return query[:, None]


class Stack:
    """The layers of a decode step: rows of a context on the device, and of the same on the host.

    Args:
        sizes: of the stack.
        host: rows of every layer.
        resident: the same rows on the device.
        shard: of this rank, if ranks share contexts.
    """

    def __init__(
        self,
        sizes: Sizes,
        host: HostCache,
        resident: PagedCache,
        shard: ContextShard | None = None,
    ) -> None:
        self.shard = shard
        self.sizes, self.host, self.resident = sizes, host, resident
        device, batch = sizes.device, sizes.batch
        generator = torch.Generator().manual_seed(1)
        pages = host.num_pages
        table = torch.stack([torch.randperm(pages, generator=generator) for _ in range(batch)])
        self.plan: Plan = plan_batch(
            [1] * batch,
            [sizes.context] * batch,
            table.int().to(device),
            page_size=PAGE_SIZE,
            workspace_rows=None,
            shard=shard,
        )
        self.projections = Projections(sizes)
        self.chosen = torch.zeros(sizes.layers, batch, sizes.topk, dtype=torch.int32, device=device)
        self.seats = torch.arange(batch, dtype=torch.int32, device=device)

    def on_device(self) -> list[Tensor]:
        """Attention of every layer over resident rows."""
        outs, plan = [], self.plan
        for layer in range(self.sizes.layers):
            slots = to_slots(
                self.chosen[layer], plan.page_table, plan.request_ids, page_size=PAGE_SIZE
            )
            rows = self.resident.layer(layer)
            outs.append(
                sparse_decode(self.projections.query(), rows, slots[:, None], softmax_scale=0.1)[0]
            )
        return outs

    def on_host(self, hot: HotRows) -> list[Tensor]:
        """Attention of every layer over hot rows."""
        outs = []
        for layer in range(self.sizes.layers):
            found = hot.resolve(layer, self.chosen[layer], self.plan, self.seats)
            query = self.projections.query()  # while rows are fetched
            rows = hot.layer(layer)
            outs.append(sparse_decode(query, rows, found.rows[:, None], softmax_scale=0.1)[0])
        return outs

    def link(self, hot: HotRows) -> list[Tensor]:
        """Resolving and fetching of every layer alone."""
        for layer in range(self.sizes.layers):
            hot.resolve(layer, self.chosen[layer], self.plan, self.seats)
            hot.layer(layer)
        return []


class SharedStack(Stack):
    """A rank's part of the layers of a decode step over contexts that ranks share.

    Args:
        sizes: of the stack; heads and contexts are those of all ranks.
        host: this rank's rows of every layer.
        resident: the same rows on the device.
    """

    shard: ContextShard

    def __init__(self, sizes: Sizes, host: HostCache, resident: PagedCache) -> None:
        super().__init__(sizes, host, resident, shard_of_rank())
        self.projections = Projections(replace(sizes, heads=sizes.heads // self.shard.num_ranks))

    def query(self) -> Tensor:
        """``[B, 1, H, L + R]`` of the heads of all ranks."""
        return self.gathered(self.projections.query())

    def gathered(self, query: Tensor) -> Tensor:
        """Queries of all ranks' heads."""
        return all_gather(query).unflatten(0, (-1, len(query))).movedim(0, 2).flatten(2, 3)

    def merged(self, outs: Tensor, lses: Tensor) -> Tensor:
        """``[B, H / ranks, L]``, outputs of this rank's heads over the rows of all ranks."""
        return exchange_states(outs[:, 0][None], lses[:, 0][None])[0]

    def on_device(self) -> list[Tensor]:
        """Attention of every layer over resident rows."""
        outs, plan = [], self.plan
        for layer in range(self.sizes.layers):
            own, counts = own_positions(self.chosen[layer], shard=self.shard)
            slots = to_slots(own[:, 0], plan.page_table, plan.request_ids, page_size=PAGE_SIZE)
            query, rows = self.query(), self.resident.layer(layer)
            outs.append(self.merged(*attend(query, rows, slots, counts[:, 0])))
        return outs

    def on_host(self, hot: HotRows) -> list[Tensor]:
        """Attention of every layer over hot rows."""
        outs = []
        for layer in range(self.sizes.layers):
            found = hot.resolve(layer, self.chosen[layer], self.plan, self.seats)
            query = self.query()  # while rows are fetched
            rows = hot.layer(layer)
            outs.append(self.merged(*attend(query, rows, found.rows, found.counts)))
        return outs

    def collectives(self) -> list[Tensor]:
        """The collectives of every layer alone, with the merge of outputs."""
        query = self.projections.query()
        outs = query.new_zeros(len(query), 1, self.sizes.heads, LATENT)
        lses = torch.zeros(outs.shape[:-1], device=query.device)
        for _ in range(self.sizes.layers):
            self.gathered(query)
            found = self.merged(outs, lses)
        return [found]

    def check(self, outs: list[Tensor]) -> None:
        """Compare the last layer with attention over the rows of all ranks in one list.

        Raises:
            AssertionError: more than the rounding of partial results differs, on some rank.
        """
        shard, plan = self.shard, self.plan
        rows = PagedCache(all_gather(self.resident.layer(self.sizes.layers - 1).data), FP8_DS_MLA)
        tables = all_gather(plan.page_table)
        tables = tables.unflatten(0, (shard.num_ranks, -1))
        firsts = torch.arange(shard.num_ranks, dtype=torch.int32, device=tables.device)
        tables = tables + firsts[:, None, None] * self.host.num_pages
        table = tables.movedim(0, 2).flatten(1)  # pages in the order of positions
        slots = to_slots(self.chosen[-1], table, plan.request_ids, page_size=PAGE_SIZE)
        counts = torch.full_like(plan.request_ids, self.sizes.topk)
        whole, _ = attend(self.projections.query(), rows, slots, counts)
        expected = whole[:, 0].float()
        error = ((outs[-1].float() - expected).norm() / expected.norm()).item()
        if largest(not error < ROUNDING, self.sizes.device):
            raise AssertionError(
                f"outputs merged of {shard.num_ranks} ranks differ from those of one list, here by "
                f"{error:.4f} of their norm"
            )


def attend(
    query: Tensor, rows: PagedCache, listed: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs ``[B, 1, H, L]`` and logsumexp of a rank's rows."""
    return sparse_decode(query, rows, listed[:, None], softmax_scale=0.1, topk_lengths=counts)


def shard_of_rank() -> ContextShard:
    """This rank's share of contexts: each page in turn."""
    return ContextShard(distributed.get_rank(), num_ranks(), PAGE_SIZE)


class PrefillStack:
    """The layers of a prefill: a chunk of tokens at the end of a context.

    Args:
        sizes: of the stack; its batch is the chunk's tokens.
        host: rows of every layer.
        resident: the same rows on the device.
        selects: whether an indexer selects within a layer.
    """

    def __init__(self, sizes: Sizes, host: HostCache, resident: PagedCache, selects: bool) -> None:
        self.sizes, self.host, self.resident = sizes, host, resident
        self.selects = selects
        device, tokens, context = sizes.device, sizes.batch, sizes.context
        self.projections = Projections(sizes)
        generator = torch.Generator().manual_seed(3)
        table = torch.randperm(context // PAGE_SIZE, generator=generator)[None].int().to(device)
        self.plan: Plan = plan_batch(
            [tokens], [context], table, page_size=PAGE_SIZE, workspace_rows=context
        )
        self.context = HostContext(host, max_rows=context)
        # One of as many parts of the context as there are entries: ascending and distinct.
        part = (context - tokens) // sizes.topk
        starts = part * torch.arange(sizes.topk, device=device)
        shape = tokens, sizes.topk
        self.drawn = (starts + torch.randint(part, shape, device=device)).int()
        self.keys = PagedCache.allocate(INDEX_FP8, table.shape[1], PAGE_SIZE, device=device)
        for slots in torch.arange(context, device=device).split(8192):
            self.keys.write(slots, torch.randn(len(slots), INDEX_DIM, device=device))
        queries = torch.randn(tokens, INDEX_HEADS, INDEX_DIM, device=device)
        self.index_q = queries.to(torch.float8_e4m3fn)
        self.weights = torch.randn(tokens, INDEX_HEADS, device=device)

    def chosen(self) -> Tensor:
        """int32 ``[T, K]``, positions."""
        if not self.selects:
            return self.drawn
        plan = self.plan
        return indexer_topk(
            self.index_q,
            self.weights,
            self.keys,
            plan.input_row_offsets,
            plan.seq_lens,
            plan.page_table,
            topk=self.sizes.topk,
        )

    def on_device(self) -> Iterator[Tensor]:
        """Attention of one layer after the other over resident rows."""
        plan = self.plan
        for layer in range(self.sizes.layers):
            slots = to_slots(self.chosen(), plan.page_table, plan.request_ids, page_size=PAGE_SIZE)
            query, rows = self.projections.query()[:, 0], self.resident.layer(layer)
            yield sparse_prefill(query, rows, slots, softmax_scale=0.1)[0]

    def on_host(self) -> Iterator[Tensor]:
        """Attention of one layer after the other over rows that are copied."""
        for layer in range(self.sizes.layers):
            pieces = self.context.selected(layer, self.chosen(), self.plan)
            query = self.projections.query()[:, 0]
            found = [
                sparse_prefill(query[tokens], rows, listed, softmax_scale=0.1)[0]
                for tokens, rows, listed in pieces
            ]
            yield found[0] if len(found) == 1 else torch.cat(found)

    def link(self) -> Iterator[Tensor]:
        """The copies of one layer after the other alone."""
        for layer in range(self.sizes.layers):
            for _, _, listed in self.context.selected(layer, self.drawn, self.plan):
                yield listed


def captured(function: Callable[[], list[Tensor]], device: str) -> Callable[[], list[Tensor]]:
    """The function as a graph, or on a CPU as it is; it runs first, with selections of padding."""
    if device == "cpu":
        return function
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog is another thread, whose calls must not end the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = function()

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    return replay


def timed(run: Callable[[], list[Tensor]], device: str) -> float:
    """Seconds of one run; ranks begin together."""
    together(device)
    if device == "cpu":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e-3


Runs = tuple[Callable[[], list[Tensor]], Callable[[], list[Tensor]]]
"""A stack over hot rows, and over resident ones."""


def compared(stack: Stack, hot: HotRows, process: str, selections: Selections) -> Runs:
    """Both sides, whose bits are equal in the steps in which the hot rows fill.

    Raises:
        AssertionError: a step whose sides differ, on some rank.
    """
    device = stack.sizes.device
    resident = captured(stack.on_device, device)
    hosted = captured(lambda: stack.on_host(hot), device)
    hot.forget()
    for step in range(WARM_STEPS):
        stack.chosen.copy_(next(selections))
        ours, theirs = hosted(), resident()
        differ = [not torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)]
        if largest(any(differ), device):
            layer = f"layer {differ.index(True)}" if any(differ) else "a layer of another rank"
            raise AssertionError(f"{layer} differs with {process} selections")
        if isinstance(stack, SharedStack) and step == 0:
            stack.check(theirs)
    return hosted, resident


def hot_rows(stack: Stack, rows_per_seat: int) -> HotRows:
    """Hot rows for the requests of a stack."""
    sizes = stack.sizes
    options = {"seats": sizes.batch, "rows_per_seat": rows_per_seat, "topk": sizes.topk}
    return HotRows(stack.host, **options, shard=stack.shard)


def measure(stack: Stack, process: str, selections: Selections, rows_per_seat: int) -> Row:
    """Check the bits of both sides, then time them.

    Raises:
        AssertionError: a step whose sides differ.
    """
    sizes, device = stack.sizes, stack.sizes.device
    hot = hot_rows(stack, rows_per_seat)
    sides = compared(stack, hot, process, selections)
    before, times = hot.stats(), ([], [])
    for _ in range(sizes.steps):
        stack.chosen.copy_(next(selections))
        for run, of_side in zip(sides, times, strict=True):
            of_side.append(timed(run, device))
    found = hot.stats()
    missed = (found.misses - before.misses) / (sizes.steps * stack.chosen.numel())
    link = captured(lambda: stack.link(hot), device)
    before, alone = hot.stats(), []
    for _ in range(sizes.steps):
        stack.chosen.copy_(next(selections))
        alone.append(timed(link, device))
    fetched = (hot.stats().bytes - before.bytes) / sizes.steps
    medians = map(statistics.median, (*times, alone))
    hosted_s, resident_s, link_s = (largest(each, device) for each in medians)
    per_layer = 1e6 / sizes.layers
    row = Row(
        torch.cuda.get_device_name() if device == "cuda" else device,
        sizes.layers,
        sizes.heads,
        sizes.topk,
        sizes.context,
        sizes.batch,
        process,
        rows_per_seat,
        largest(missed, device),
        resident_s * per_layer,
        hosted_s * per_layer,
        link_s * per_layer,
        largest(fetched, device) / link_s / 1e9,
    )
    if not isinstance(stack, SharedStack):
        return row
    collectives = captured(stack.collectives, device)
    median = statistics.median(timed(collectives, device) for _ in range(sizes.steps))
    collective_us = largest(median, device) * per_layer
    return SharedRow(**asdict(row), ranks=num_ranks(), collective_us=collective_us)


def fitting(gpu_gib: float, host_gib: float, rows_per_seat: int) -> Fitting:
    """Requests of the model that fit into the memory of this group's GPUs and their host."""
    sizes: dict[str, Any] = {**FORMATS, "memory_gib": gpu_gib, "weights_gib": 0}
    sizes |= {"used_percent": 100, "share": "context"}
    requests, resident = {}, {}
    for name, context in FITTING.items():
        hosted = sizes | {"host_gib": host_gib, "rows_per_seat": rows_per_seat}
        requests[name] = capacity(MODEL, **hosted, context=context, gpus=num_ranks()).requests
        resident[name] = capacity(MODEL, **sizes, context=context, gpus=1).requests
    return Fitting(num_ranks(), gpu_gib, host_gib, requests, resident)


def fittings(device: str, rows_per_seat: int) -> list[Fitting]:
    """What fits into free memory: of the GPUs, and as much of each as docs/long-contexts.md has."""
    host = available_bytes()
    if host is None:
        return []
    sizes: list[float] = [GPU_GIB]
    if device == "cuda":
        sizes.append(-largest(-torch.cuda.mem_get_info()[0], device) / GIB)
    return [fitting(size, host / GIB, rows_per_seat) for size in sizes]


def measure_prefill(stack: PrefillStack) -> Prefill:
    """Check the bits of both sides, then time them.

    Raises:
        AssertionError: a layer whose sides differ.
    """
    sizes, device = stack.sizes, stack.sizes.device
    for layer, (a, b) in enumerate(zip(stack.on_host(), stack.on_device(), strict=True)):
        if not torch.equal(a, b):
            raise AssertionError(f"layer {layer} of a prefill differs")
    sides = stack.on_host, stack.on_device, stack.link
    times = [[timed(partial(last, run), device) for run in sides] for _ in range(3)]
    host_s, resident_s, link_s = (statistics.median(each) for each in zip(*times, strict=True))
    per_layer = 1e3 / sizes.layers
    copied = sizes.context * FP8_DS_MLA.row_width * sizes.layers
    return Prefill(
        torch.cuda.get_device_name() if device == "cuda" else device,
        sizes.layers,
        sizes.heads,
        sizes.topk,
        sizes.context,
        sizes.batch,
        stack.selects,
        resident_s * per_layer,
        host_s * per_layer,
        link_s * per_layer,
        copied / link_s / 1e9,
    )


def last(side: Callable[[], Iterator[Tensor]]) -> list[Tensor]:
    """The result of the last layer, after all others."""
    return list(collections.deque(side(), 1))


def fetch_time(host: HostCache, count: int, device: str) -> float:
    """Microseconds of a fetch of random rows, of as many in turn as there are layers."""
    generator = torch.Generator().manual_seed(2)
    target = PagedCache.allocate(FP8_DS_MLA, count, 1, device=device)
    rows = torch.arange(count, dtype=torch.int32, device=device)[None]
    counts = torch.full((1,), count, dtype=torch.int32, device=device)
    slots = torch.randint(host.num_slots, (host.num_layers, 1, count), generator=generator)
    slots = slots.int().to(device)

    def fetch_all() -> list[Tensor]:
        for layer in range(host.num_layers):
            fetch_rows(host.layer(layer), target, slots[layer], rows, counts)
        return [target.data]

    run = captured(fetch_all, device)
    (found,) = run()
    expected = host.layer(host.num_layers - 1).data.flatten(0, 1)[slots[-1, 0].long()]
    if not torch.equal(found[:, 0], expected):
        raise AssertionError(f"a fetch of {count} rows has other rows")
    return 1e6 / host.num_layers * statistics.median(timed(run, device) for _ in range(20))


def caches(sizes: Sizes) -> tuple[HostCache, PagedCache]:
    """Random rows of every layer, on the host and on the device."""
    pages = sizes.context // PAGE_SIZE
    group = distributed.group.WORLD if num_ranks() > 1 else None
    host = HostCache.allocate(
        FP8_DS_MLA, pages, PAGE_SIZE, num_layers=sizes.layers, device=sizes.device, group=group
    )
    resident = torch.empty(
        sizes.layers, pages, PAGE_SIZE, FP8_DS_MLA.row_width, dtype=torch.uint8, device=sizes.device
    )
    cache = PagedCache(resident.transpose(0, 1), FP8_DS_MLA)
    slots = torch.arange(min(8192, sizes.context), device=sizes.device)
    for layer in range(sizes.layers):
        rows = cache.layer(layer)
        for first in range(0, sizes.context, len(slots)):
            part = slots[: sizes.context - first] + first
            rows.write(part, torch.randn(len(part), LATENT + ROPE, device=sizes.device))
        host.layer(layer).data.copy_(rows.data)
    return host, cache


def table_of(*names: str) -> Table:
    """A table with these columns."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def report(rows: list[Row]) -> Table:
    """A line for each row."""
    names = "context batch process hot misses resident host ratio link GB/s"
    table = table_of(*names.split())
    for row in rows:
        ratio = row.host_us / row.resident_us
        cells = row.context, row.batch, row.process, row.rows_per_seat, f"{row.misses:.3f}"
        times = row.resident_us, row.host_us
        more = f"{ratio:.2f}", f"{row.link_us:.1f}", f"{row.link_gb_s:.1f}"
        table.add_row(*map(str, cells), *(f"{each:.1f}" for each in times), *more)
    return table


def report_prefills(prefills: list[Prefill]) -> Table:
    """A line for each chunk."""
    table = table_of(
        "context", "tokens", "selected", "resident", "host", "of resident", "link", "GB/s"
    )
    for row in prefills:
        selected = "within" if row.selects else "before"
        times = (f"{each:.2f}" for each in (row.resident_ms, row.host_ms))
        share = f"{row.resident_ms / row.host_ms:.3f}"
        link = f"{row.link_ms:.2f}", f"{row.link_gb_s:.1f}"
        table.add_row(str(row.context), str(row.tokens), selected, *times, share, *link)
    return table


def report_shared(rows: list[SharedRow]) -> Table:
    """A line for each size that ranks shared."""
    names = "ranks context batch process hot missed resident host ratio link GB/s collectives"
    table = table_of(*names.split())
    for row in rows:
        ratio = row.host_us / row.resident_us
        cells = row.ranks, row.context, row.batch, row.process, row.rows_per_seat
        more = f"{row.missed:.0f}", f"{row.resident_us:.1f}", f"{row.host_us:.1f}", f"{ratio:.2f}"
        rest = row.link_us, row.link_gb_s, row.collective_us
        table.add_row(*map(str, cells), *more, *(f"{each:.1f}" for each in rest))
    return table


def check_ranks(arguments: argparse.Namespace) -> None:
    """Check what ranks that share contexts can do.

    Raises:
        ValueError: sizes that cannot be divided, a prefill, or a file for times of a shared GPU.
    """
    ranks, turn = num_ranks(), PAGE_SIZE * num_ranks()
    for context in arguments.contexts:
        if context % turn:
            raise ValueError(
                f"--contexts must be multiples of {turn} for {ranks} ranks, got {context}"
            )
    if arguments.heads % ranks:
        raise ValueError(
            f"--heads must be a multiple of {ranks} for {ranks} ranks, got {arguments.heads}"
        )
    if arguments.prefill:
        raise ValueError(f"--prefill must be 0 for {ranks} ranks, got {arguments.prefill}")
    if arguments.json and shared(ranks):
        raise ValueError("--json must be left out where ranks share a GPU: times mean nothing")


def main(arguments: argparse.Namespace) -> tuple[list[Row], list[Prefill]]:
    """Measure every size that was asked for."""
    ranks, rank, only_bits = num_ranks(), 0, False
    if ranks > 1:
        check_ranks(arguments)
        rank, only_bits = distributed.get_rank(), shared(ranks)
        torch.manual_seed(rank)  # rows and queries of its own
    console = Console(width=110, quiet=rank > 0)
    rows: list[Row] = []
    prefills: list[Prefill] = []
    fit: list[Fitting] = []
    if ranks > 1 and not only_bits:
        fit = fittings(arguments.device, min(arguments.hot) * arguments.topk)
        for each in fit:
            console.print(f"{each}", soft_wrap=True)

    def save() -> None:
        if arguments.json and rank == 0:
            lists = {"rows": rows, "prefills": prefills}
            if ranks > 1:
                lists = {"shared": rows, "fit": fit}
            found = {name: [asdict(row) for row in each] for name, each in lists.items()}
            text = json.dumps(found, indent=1)
            arguments.json.write_text(text + "\n", encoding="utf-8")

    def decode(stack: Stack, name: str, selections: Selections, rows_per_seat: int) -> None:
        if only_bits:
            compared(stack, hot_rows(stack, rows_per_seat), name, selections)
            size = f"{stack.sizes.context} tokens, {stack.sizes.batch} requests, {name}"
            console.print(f"{ranks} ranks share a GPU, no times; bits are right: {size}")
            return
        row = measure(stack, name, selections, rows_per_seat)
        rows.append(row)
        save()
        if isinstance(row, SharedRow):
            console.print(f"{row}", soft_wrap=True)

    recorded = None
    if arguments.trace_tokens and rank == 0:
        recorded = record(arguments.trace_tokens, arguments.device)
    for context in arguments.contexts:
        options = {"context": context, "layers": arguments.layers, "heads": arguments.heads}
        options |= {"topk": arguments.topk, "steps": arguments.steps}
        own = replace(Sizes(arguments.device, **options), context=context // ranks)
        host, resident = caches(own)
        with host:
            for count in () if only_bits else arguments.fetches:
                took = largest(fetch_time(host, count, arguments.device), arguments.device)
                rate = count * FP8_DS_MLA.row_width / took / 1e3
                console.print(f"fetch of {count} rows: {took:.1f} us, {rate:.1f} GB/s")
            for batch, factor in itertools.product(arguments.batches, arguments.hot):
                sizes = Sizes(arguments.device, batch=batch, **options)
                stack = (Stack if ranks == 1 else SharedStack)(sizes, host, resident)
                processes = {f"walk {each}": walk(sizes, each) for each in arguments.overlaps}
                if arguments.trace_tokens:
                    processes["trace"] = trace(sizes, recorded or {})
                for name, selections in processes.items():
                    if ranks > 1:
                        selections = of_first_rank(sizes, selections)
                    decode(stack, name, selections, factor * sizes.topk)
            for selects in (False, True) if arguments.prefill else ():
                sizes = Sizes(arguments.device, batch=arguments.prefill, **options)
                chunk = PrefillStack(sizes, host, resident, selects)
                prefills.append(measure_prefill(chunk))
                console.print(report_prefills(prefills[-1:]))
                save()
    if rows:
        several = [row for row in rows if isinstance(row, SharedRow)]
        console.print(report_shared(several) if several else report(rows))
        console.print("Times are microseconds of a layer.")
    if prefills:
        console.print(report_prefills(prefills))
        console.print("Times are milliseconds of a layer.")
    return rows, prefills


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    numbers: dict[str, Any] = {"type": int, "nargs": "+"}
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--contexts", default=[131072], help="tokens of a request", **numbers)
    some: dict[str, Any] = {"type": int, "nargs": "*"}
    parser.add_argument("--batches", default=[1, 8, 16], help="requests; none: no decodes", **some)
    parser.add_argument("--hot", default=[2, 4], help="hot rows, times the selection", **numbers)
    parser.add_argument("--prefill", type=int, default=0, help="tokens of a chunk; 0 for none")
    parser.add_argument("--overlaps", type=float, nargs="*", default=[0.5, 0.85], help="of walks")
    parser.add_argument(
        "--fetches", default=[64, 275, 855, 2048, 17600], help="rows of fetches alone", **some
    )
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--heads", type=int, default=128)
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=40, help="timed steps")
    parser.add_argument(
        "--trace-tokens", type=int, default=16384, help="of the text of the trace; 0 for no trace"
    )
    parser.add_argument("--json", type=Path, help="a file for the rows")
    return parser.parse_args(words)


def join(device: str) -> None:
    """Join the other ranks, if ``torchrun`` started several."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        if device == "cuda":
            torch.cuda.set_device(gpu_of(int(os.environ["LOCAL_RANK"]), ranks))
        distributed.init_process_group("nccl" if device == "cuda" else "gloo")


if __name__ == "__main__":
    given = parse()
    join(given.device)
    main(given)
    if num_ranks() > 1:
        distributed.destroy_process_group()

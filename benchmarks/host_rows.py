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
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor

from sparsemla import (
    FP8_DS_MLA,
    INDEX_FP8,
    HeadWeight,
    HostCache,
    HostContext,
    HotRows,
    PagedCache,
    Plan,
    fetch_rows,
    indexer_topk,
    plan_batch,
    project_heads,
    sparse_decode,
    sparse_prefill,
    to_slots,
)

PAGE_SIZE, Q_RANK, NOPE, ROPE, LATENT = 64, 1536, 128, 64, 512
INDEX_HEADS, INDEX_DIM = 64, 128
WARM_STEPS = 32
"""Steps before the timed ones, in which the hot rows fill."""


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
    """

    def __init__(self, sizes: Sizes, host: HostCache, resident: PagedCache) -> None:
        self.sizes, self.host, self.resident = sizes, host, resident
        device, batch = sizes.device, sizes.batch
        generator = torch.Generator().manual_seed(1)
        pages = sizes.context // PAGE_SIZE
        table = torch.stack([torch.randperm(pages, generator=generator) for _ in range(batch)])
        self.plan: Plan = plan_batch(
            [1] * batch,
            [sizes.context] * batch,
            table.int().to(device),
            page_size=PAGE_SIZE,
            workspace_rows=None,
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
    with torch.cuda.graph(graph):
        results = function()

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    return replay


def timed(run: Callable[[], list[Tensor]], device: str) -> float:
    """Seconds of one run."""
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


def measure(stack: Stack, process: str, selections: Selections, rows_per_seat: int) -> Row:
    """Check the bits of both sides, then time them.

    Raises:
        AssertionError: a step whose sides differ.
    """
    sizes, device = stack.sizes, stack.sizes.device
    options = {"seats": sizes.batch, "rows_per_seat": rows_per_seat, "topk": sizes.topk}
    hot = HotRows(stack.host, **options)
    resident = captured(stack.on_device, device)
    hosted = captured(lambda: stack.on_host(hot), device)
    hot.forget()
    for _ in range(WARM_STEPS):
        stack.chosen.copy_(next(selections))
        ours, theirs = hosted(), resident()
        for layer, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if not torch.equal(a, b):
                raise AssertionError(f"layer {layer} differs with {process} selections")
    before, times = hot.stats(), ([], [])
    for _ in range(sizes.steps):
        stack.chosen.copy_(next(selections))
        for run, of_side in zip((hosted, resident), times, strict=True):
            of_side.append(timed(run, device))
    found = hot.stats()
    missed = (found.misses - before.misses) / (sizes.steps * stack.chosen.numel())
    link = captured(lambda: stack.link(hot), device)
    before, alone = hot.stats(), []
    for _ in range(sizes.steps):
        stack.chosen.copy_(next(selections))
        alone.append(timed(link, device))
    fetched = (hot.stats().bytes - before.bytes) / sizes.steps
    hosted_s, resident_s, link_s = (statistics.median(each) for each in (*times, alone))
    per_layer = 1e6 / sizes.layers
    return Row(
        torch.cuda.get_device_name() if device == "cuda" else device,
        sizes.layers,
        sizes.heads,
        sizes.topk,
        sizes.context,
        sizes.batch,
        process,
        rows_per_seat,
        missed,
        resident_s * per_layer,
        hosted_s * per_layer,
        link_s * per_layer,
        fetched / link_s / 1e9,
    )


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
    host = HostCache.allocate(
        FP8_DS_MLA, pages, PAGE_SIZE, num_layers=sizes.layers, device=sizes.device
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


def main(arguments: argparse.Namespace) -> tuple[list[Row], list[Prefill]]:
    """Measure every size that was asked for."""
    console = Console(width=110)
    rows: list[Row] = []
    prefills: list[Prefill] = []

    def save() -> None:
        if arguments.json:
            found = {
                "rows": [asdict(row) for row in rows],
                "prefills": [asdict(row) for row in prefills],
            }
            text = json.dumps(found, indent=1)
            arguments.json.write_text(text + "\n", encoding="utf-8")

    recorded = None
    if arguments.trace_tokens:
        recorded = record(arguments.trace_tokens, arguments.device)
    for context in arguments.contexts:
        options = {"context": context, "layers": arguments.layers, "heads": arguments.heads}
        options |= {"topk": arguments.topk, "steps": arguments.steps}
        host, resident = caches(Sizes(arguments.device, **options))
        with host:
            for count in arguments.fetches:
                took = fetch_time(host, count, arguments.device)
                rate = count * FP8_DS_MLA.row_width / took / 1e3
                console.print(f"fetch of {count} rows: {took:.1f} us, {rate:.1f} GB/s")
            for batch, factor in itertools.product(arguments.batches, arguments.hot):
                sizes = Sizes(arguments.device, batch=batch, **options)
                stack = Stack(sizes, host, resident)
                processes = {f"walk {each}": walk(sizes, each) for each in arguments.overlaps}
                if recorded is not None:
                    processes["trace"] = trace(sizes, recorded)
                for name, selections in processes.items():
                    rows.append(measure(stack, name, selections, factor * sizes.topk))
                    save()
            for selects in (False, True) if arguments.prefill else ():
                sizes = Sizes(arguments.device, batch=arguments.prefill, **options)
                chunk = PrefillStack(sizes, host, resident, selects)
                prefills.append(measure_prefill(chunk))
                console.print(report_prefills(prefills[-1:]))
                save()
    if rows:
        console.print(report(rows))
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


if __name__ == "__main__":
    main(parse())

"""Keys that ranks share: the time of a selection with its exchange, and of what a rank does alone.

Under vLLM's decode context parallelism each rank keeps a part of every context, here each page in
turn. It scores its part and offers its best; the ranks gather all offers and merge them, and each
attends to the selected rows that it keeps. This is the code of the plugin for vLLM, with
collectives of ``torch.distributed`` and, where the ranks' GPUs have it, through symmetric memory.
Every rank first compares its selections with that of one rank for whole contexts.

Run ``torchrun --nproc-per-node 2 benchmarks/exchange_bench.py``, on GPUs with NCCL. A time is the
median of the slowest rank. With several ranks on CPUs, it shows that the program works.

With ``NCCL_MULTI_RANK_GPU_ENABLE=1`` and ``TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES=1`` ranks may
share a GPU (NCCL 2.30): results are checked, and no times are shown or written.

``--stress 100000`` instead exchanges so many times through symmetric memory, with random delays of
each rank, by launches and in replays of a CUDA graph, and compares each result with the
collective's in bits.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, distributed
from torch.nn import functional

from sparsemla import (
    ContextShard,
    ExchangeWorkspace,
    exchange_rows,
    exchange_topk,
    indexer_scores_paged,
    indexer_topk,
    own_positions,
    select_topk,
    to_slots,
)
from sparsemla.backends.vllm.exchange import Run, ShardedRows
from sparsemla.parallel import Transport
from sparsemla_lab.bench.timing import Results, Timer
from sparsemla_lab.bench.workloads import PAGE_SIZE, IndexerScoresPaged
from sparsemla_lab.testing.compare import assert_equal
from sparsemla_lab.testing.ranks import gpu_of, shared

CONTEXTS = (32768, 131072, 1048576)
BATCHES = (1, 16, 64, 128)
MAX_WORKSPACE_BYTES = 512 << 20
"""Of scores; vLLM's default."""

ROUND = 8
"""Exchanges of a stress test in a row, in which ranks drift apart; then collectives compare."""
STRESS_TOKENS = 5
MOST_CYCLES = 200_000
"""Of a delay, about 0.1 ms."""


@dataclass(frozen=True)
class Row:
    """Microseconds of a decode step's selection, one token a request.

    Args:
        device: name of the GPU, or ``cpu``.
        num_ranks, context, batch, topk: the size.
        local: scores of a rank's part, and its best.
        selection: the same, and the exchange by a collective.
        symmetric: the same, and the exchange through symmetric memory; None without any.
        rows: the same, and one launch that exchanges and keeps the rank's slots; None likewise.
        gather: the all-gather of the exchange by itself.
        slots: slots of the selected rows that the rank keeps.
        alone: the selection of one rank for whole contexts.
        how: ``graph``, a replay of a CUDA graph, or ``launch``, for each of these.
    """

    device: str
    num_ranks: int
    context: int
    batch: int
    topk: int
    local: float
    selection: float
    symmetric: float | None
    rows: float | None
    gather: float
    slots: float
    alone: float
    how: dict[str, str]


class RankTimer(Timer):
    """Times functions that ranks run together: they begin together."""

    def flush(self) -> None:
        """Overwrite the L2 cache, and wait for the other ranks."""
        super().flush()
        distributed.all_reduce(torch.zeros(1, device=self.device))


def all_gather(tensor: Tensor) -> Tensor:
    """The tensors of all ranks, joined along their first dim."""
    joined = tensor.new_empty(distributed.get_world_size() * tensor.shape[0], *tensor.shape[1:])
    # Its name from torch 2.13 on, and before.
    gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
    gather(joined, tensor)
    return joined


def kept_slots(shard: ContextShard, positions: Tensor, page_table: Tensor) -> Tensor:
    """Slots of the positions that a rank keeps, one token of each request, and then -1."""
    rows, _ = own_positions(positions, shard=shard)
    requests = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    return to_slots(rows[:, 0], page_table, requests, page_size=PAGE_SIZE)


def functions(
    context: int, batch: int, topk: int, device: torch.device
) -> tuple[ContextShard, dict[str, Callable[[], Results]]]:
    """This rank's share, and what is timed; checks the selection.

    Raises:
        AssertionError: the selection or its slots are not those of one rank.
    """
    shard = ContextShard(distributed.get_rank(), distributed.get_world_size(), PAGE_SIZE)
    inputs = IndexerScoresPaged(batch, 1, context).build(device)  # the same on all ranks
    q, weights, cache = (
        inputs["index_q"].flatten(0, 1),
        inputs["weights"].flatten(0, 1),
        inputs["cache"],
    )
    whole = inputs["page_table"]
    whole = functional.pad(whole, (0, -whole.shape[1] % shard.num_ranks))  # parts are as wide
    part = whole[:, shard.rank :: shard.num_ranks].contiguous()
    seq_lens = inputs["seq_lens"].flatten()
    lengths = shard.lengths(seq_lens)
    columns = part.shape[1] * PAGE_SIZE
    best = min(topk, columns)
    requests = torch.arange(batch, dtype=torch.int32, device=device)
    rows = ShardedRows(shard, [Run(slice(0, batch), 0, 1)], lengths, all_gather)
    chosen = torch.empty(batch, topk, dtype=torch.int32, device=device)
    workspace = ExchangeWorkspace(max_tokens=batch, max_candidates=best, device=device)
    shared = replace(rows, workspace=workspace)
    pages = {"page_table": part, "request_ids": requests, "page_size": PAGE_SIZE}
    kept = torch.empty(batch, 1, topk, dtype=torch.int32, device=device)
    counts = torch.empty(batch, 1, dtype=torch.int32, device=device)
    offer = torch.zeros(2, batch, best, dtype=torch.int32, device=device)
    offsets = torch.arange(batch + 1, dtype=torch.int32, device=device)

    def scored() -> tuple[Tensor, Tensor]:
        scores = indexer_scores_paged(
            q[:, None], weights[:, None], cache, part, lengths[:, None], max_seq_len=columns
        )[:, 0]
        return scores, select_topk(scores, topk=best, row_ends=lengths)

    def local() -> Results:
        return (scored()[1],)

    def selected(tokens: ShardedRows) -> Results:
        limit = MAX_WORKSPACE_BYTES
        tokens.select_topk(q, weights, cache, part, topk, max_workspace_bytes=limit, out=chosen)
        return (chosen,)

    def selection() -> Results:
        return selected(rows)

    def symmetric() -> Results:
        return selected(shared)

    def kept_rows() -> Results:
        exchange_rows(
            *scored(), topk, shard=shard, workspace=workspace, out=kept, counts=counts, **pages
        )
        return kept, counts

    def gather() -> Results:
        return (all_gather(offer),)

    def slots() -> Results:
        return (kept_slots(shard, chosen, part),)

    def alone() -> Results:
        selected = indexer_topk(
            q,
            weights,
            cache,
            input_row_offsets=offsets,
            seq_lens=seq_lens,
            page_table=whole,
            topk=topk,
            max_workspace_bytes=MAX_WORKSPACE_BYTES,
        )
        return (selected,)

    (expected,) = alone()
    assert_equal("selection", *selection(), expected)
    everywhere = to_slots(expected, whole, offsets[:-1], page_size=PAGE_SIZE)
    through_memory = {}
    if workspace.inboxes is not None:
        assert_equal("selection through memory", *symmetric(), expected)
        through_memory = {"symmetric": symmetric, "rows": kept_rows}
    others = expected // PAGE_SIZE % shard.num_ranks != shard.rank
    own_first = others.int().argsort(dim=1, stable=True)
    own_slots = everywhere.where(~others, -1).gather(1, own_first)
    assert_equal("slots", *slots(), own_slots)
    if through_memory:
        assert_equal("kept slots", kept_rows()[0][:, 0], own_slots)
    timed = {each.__name__: each for each in (local, selection, gather, slots, alone)}
    return shard, timed | through_memory


def measure(context: int, batch: int, topk: int, device: torch.device, repeats: int) -> Row:
    """Check and time a size, on all ranks."""
    shard, sides = functions(context, batch, topk, device)
    timer = RankTimer(device)
    timings = timer.interleaved([timer.prepare(each) for each in sides.values()], repeats)
    slowest = torch.tensor([timing.us for timing in timings], device=device)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
    us = {"symmetric": None, "rows": None} | dict(zip(sides, slowest.tolist(), strict=True))
    how = {name: timing.how for name, timing in zip(sides, timings, strict=True)}
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Row(name, shard.num_ranks, context, batch, topk, **us, how=how)


class Stress:
    """Exchanges of random candidates with random delays, compared with the collective's results.

    Args:
        topk: keys that a token selects.
        device: of this rank.
        transport: of the exchanges that are tested; symmetric memory on GPUs.

    Attributes:
        wrong: results that differ, so far.
    """

    def __init__(self, topk: int, device: torch.device, transport: Transport) -> None:
        self.topk, self.device = topk, device
        rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
        self.shard = ContextShard(rank, num_ranks, PAGE_SIZE)
        sizes = {"max_tokens": STRESS_TOKENS, "max_candidates": topk, "device": device}
        self.tested = ExchangeWorkspace(**sizes, transport=transport)
        self.collective = ExchangeWorkspace(**sizes, transport="collective")
        self.delays = random.Random(rank)
        self.draw = torch.Generator(device).manual_seed(rank)
        rows = (ROUND, STRESS_TOKENS)
        self.scores = torch.empty(*rows, 2 * topk, device=device)
        self.best = torch.empty(*rows, topk, dtype=torch.int32, device=device)
        self.found = torch.empty(2, *rows, topk, dtype=torch.int32, device=device)
        self.counts = torch.empty(*rows, 1, dtype=torch.int32, device=device)
        self.wrong = torch.zeros((), dtype=torch.int64, device=device)

    def wait(self) -> None:
        """Delay what follows on this rank, often not at all."""
        share = max(self.delays.uniform(-1, 1), 0.0)
        if share and self.device.type == "cuda":
            torch.cuda._sleep(int(share * MOST_CYCLES))
        elif share:
            time.sleep(1e-3 * share)

    def refresh(self) -> None:
        """New candidates; few values, so that many tie."""
        self.scores.copy_(
            torch.randint(50, self.scores.shape, generator=self.draw, device=self.device)
        )
        select_topk(self.scores.flatten(0, 1), topk=self.topk, out=self.best.flatten(0, 1))

    def exchange(self, tokens: int) -> None:
        """A round: selections alone, and in turn with the rank's own rows."""
        for i, found in enumerate(self.found.transpose(0, 1)):
            self.wait()
            self.one(i, tokens, self.tested, found, self.counts[i])

    def one(
        self, i: int, tokens: int, workspace: ExchangeWorkspace, found: Tensor, counts: Tensor
    ) -> None:
        arguments = self.scores[i, :tokens], self.best[i, :tokens], self.topk
        options = {"shard": self.shard, "workspace": workspace}
        selected, own = found[:, :tokens]
        if i % 2:
            exchange_topk(*arguments, **options, out=selected)
        else:
            written = {"out": own[:, None], "counts": counts[:tokens]}
            exchange_rows(*arguments, **options, selected=selected, **written)

    def compare(self, tokens: int) -> None:
        """Count the results of a round that are not those of collectives."""
        for i, found in enumerate(self.found.transpose(0, 1)):
            expected, counts = found.clone(), self.counts[i].clone()
            self.one(i, tokens, self.collective, expected, counts)
            self.wrong += (found != expected).any() | (counts != self.counts[i]).any()

    def run(self, count: int) -> None:
        """Exchange at least ``count`` times: by launches, then in replays of graphs."""
        self.found.fill_(-1)
        self.counts.fill_(0)
        sizes = random.Random(0)  # the same on all ranks
        for _ in range(-(-count // ROUND)):
            tokens = sizes.randint(1, STRESS_TOKENS)
            self.refresh()
            self.exchange(tokens)
            self.compare(tokens)
        self.report(count, "launches")
        if self.device.type != "cuda":
            return
        graphs = []
        for tokens in range(1, STRESS_TOKENS + 1):
            torch.cuda.synchronize(self.device)
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                self.exchange(tokens)
        for _ in range(-(-count // ROUND)):
            tokens = sizes.randint(1, STRESS_TOKENS)
            self.refresh()
            self.wait()
            graphs[tokens - 1].replay()
            self.compare(tokens)
        self.report(count, "replays")

    def report(self, count: int, way: str) -> None:
        """Say how many results of this rank differ so far, as soon as they are there."""
        wrong = int(self.wrong)
        if distributed.get_rank() == 0:
            sys.stdout.write(f"{count} exchanges by {way}: {wrong} differ on this rank so far\n")
            sys.stdout.flush()


def stress(count: int, topk: int, device: torch.device) -> int:
    """Results that differ from those of collectives, of all ranks."""
    tested = Stress(topk, device, "symmetric" if device.type == "cuda" else "collective")
    tested.run(count)
    distributed.all_reduce(tested.wrong)
    return int(tested.wrong)


def table(rows: list[Row]) -> str:
    """Times as text; what the exchange adds is the difference of two of them."""
    lines = [
        "context  batch   local  selection   adds  symmetric  rows  gather   slots    alone   (us)"
    ]
    for row in rows:
        added = [
            "     -" if each is None else f"{each - row.local:6.1f}"
            for each in (row.selection, row.symmetric, row.rows)
        ]
        lines.append(
            f"{row.context:7d} {row.batch:6d} {row.local:7.1f} {row.selection:10.1f} "
            f"   {'  '.join(added)} {row.gather:7.1f} {row.slots:7.1f} {row.alone:8.1f}"
        )
    return "\n".join(lines) + "\n"


def check(context: int, batch: int, topk: int, device: torch.device) -> str:
    """Check a size on ranks that share a GPU, whose times mean nothing; says what is right."""
    shard, sides = functions(context, batch, topk, device)
    through = ", also through symmetric memory," if "symmetric" in sides else ""
    return (
        f"{context:7d} tokens, {batch} requests, {shard.num_ranks} ranks that share a GPU: "
        f"selections{through} and slots are right\n"
    )


def main() -> int:
    """Measure all sizes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    several = functools.partial(parser.add_argument, type=int, nargs="+")
    several("--contexts", default=CONTEXTS, help="tokens of a request")
    several("--batches", default=BATCHES, help="requests of a step")
    parser.add_argument("--topk", type=int, default=2048, help="keys that a token selects")
    parser.add_argument("--repeats", type=int, default=50, help="runs that are timed")
    parser.add_argument(
        "--stress", type=int, metavar="N", help="compare N exchanges, eager and in graphs"
    )
    parser.add_argument("--json", type=Path, help="where to write the rows")
    arguments = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        device = gpu_of(int(os.environ["LOCAL_RANK"]), ranks)
        if arguments.json and shared(ranks):
            parser.error(
                "--json must be left out where ranks share a GPU: their times mean nothing"
            )
        torch.cuda.set_device(device)
    distributed.init_process_group("nccl" if device.type == "cuda" else "gloo")
    if arguments.stress:
        wrong = stress(arguments.stress, arguments.topk, device)
        if distributed.get_rank() == 0:
            sys.stdout.write(f"{wrong} of {arguments.stress} exchanges a way differ\n")
        distributed.destroy_process_group()
        return int(wrong > 0)
    rows = []
    for context, batch in itertools.product(arguments.contexts, arguments.batches):
        size = context, batch, arguments.topk, device
        if device.type == "cuda" and shared(distributed.get_world_size()):
            said = check(*size)
            if distributed.get_rank() == 0:
                sys.stdout.write(said)
                sys.stdout.flush()
        else:
            rows.append(measure(*size, arguments.repeats))
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if rows and distributed.get_rank() == 0:
        sys.stdout.write(table(rows))
        if arguments.json:
            arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Exchanges through memory that ranks write: the kernel in Triton's interpreter, and its protocol.

The ranks are processes, and their inboxes lie in files that all of them map.
"""

import itertools
import random
import time
from types import SimpleNamespace

import pytest
import torch

import processes
from sparsemla import (
    ContextShard,
    ExchangeWorkspace,
    exchange_rows,
    exchange_topk,
    own_positions,
    parallel,
    select_topk,
    to_slots,
)
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import assert_equal
from test_exchange import Step
from test_parallel import scores_of

pytest.importorskip("triton")

from triton.runtime import interpreter

from sparsemla.kernels.exchange import Inboxes
from sparsemla.kernels.exchange.arguments import SLOTS, inbox_width
from sparsemla_lab.testing.interpreter import portable

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TOKENS, CANDIDATES, PAGE_SIZE = 3, 20, 4


def delay_loads(delays):
    """Let the kernels of this process pause at some of their loads, so that ranks drift apart."""
    builder = interpreter.InterpreterBuilder
    load = builder.create_masked_load

    def late(self, *arguments):
        if delays.random() < 0.03:
            time.sleep(0.03 * delays.random())
        return load(self, *arguments)

    builder.create_masked_load = late


def connected(rank, num_ranks, folder):
    """A rank's workspace whose inboxes are files."""
    portable.repair()
    delay_loads(random.Random(rank))
    options = {"max_tokens": TOKENS, "max_candidates": CANDIDATES, "device": "cpu"}
    workspace = ExchangeWorkspace(**options)
    assert (workspace.transport, workspace.inboxes) == ("collective", None)
    shape = TOKENS, SLOTS, num_ranks, inbox_width(CANDIDATES)
    files = [folder / f"{(rank + 1 + i) % num_ranks}.inbox" for i in range(num_ranks)]
    files[-1].write_bytes(bytes(8 * torch.Size(shape).numel()))
    torch.distributed.barrier()
    peers = [
        torch.from_file(str(file), shared=True, size=torch.Size(shape).numel(), dtype=torch.int64)
        for file in files
    ]
    epochs = torch.zeros(TOKENS, dtype=torch.int32)
    workspace.inboxes = Inboxes(rank, tuple(peer.view(shape) for peer in peers), epochs)
    return workspace, ExchangeWorkspace(**options)


def exchanged(rank, num_ranks, folder, steps):
    """Exchange other rows in each step, by both transports."""
    draw = Draw(80)
    symmetric, collective = connected(rank, num_ranks, folder)
    for step in range(steps):
        interleave, parts = ((1, None), (4, 2 * num_ranks), (3, None))[step % 3]
        shard = ContextShard(rank, num_ranks, interleave, parts)
        tokens, topk = 1 + step % TOKENS, (20, 9, 33)[step % 3]
        scores = scores_of(draw, tokens, 96)
        if step == 4:
            scores.fill_(2.5)
        ends = draw.integers(0, 97, tokens).int()
        columns = shard.longest(96)
        own = shard.positions(torch.arange(columns))
        part = scores[:, own.clamp(max=95)].contiguous()  # garbage behind the last of its own
        best = min(topk, columns, CANDIDATES)
        rows = select_topk(part, topk=best, row_ends=shard.lengths(ends))
        table = draw.integers(-1, 999, tokens, -(-columns // PAGE_SIZE)).int()
        pages = {
            "page_table": table,
            "request_ids": draw.permutation(tokens).int(),
            "page_size": PAGE_SIZE,
        }
        values = part.gather(1, rows.clamp(min=0).long())
        expected = exchange_topk(values, shard.positions(rows), topk, workspace=collective)
        if topk <= best:
            assert_equal("expected", expected, select_topk(scores, topk=topk, row_ends=ends))
        own_rows, own_counts = own_positions(expected, shard=shard)
        slots = to_slots(own_rows.flatten(1), **pages).view_as(own_rows)

        selected = exchange_topk(values, shard.positions(rows), topk, workspace=symmetric)
        assert_equal("selection", selected, expected)
        for workspace in (symmetric, collective):
            selected.fill_(7)
            exchange_topk(part, rows, topk, shard=shard, workspace=workspace, out=selected)
            assert_equal("selection from scores", selected, expected)
        for workspace, options in itertools.product((symmetric, collective), ({}, pages)):
            selected.fill_(7)
            out, counts = (torch.full_like(x, 7) for x in (own_rows, own_counts))
            given = {"selected": selected} if step % 2 else {}
            results = exchange_rows(
                part,
                rows,
                topk,
                shard=shard,
                workspace=workspace,
                out=out,
                counts=counts,
                **options,
                **given,
            )
            assert results == (out, counts)
            assert_equal("rows", out, slots if options else own_rows)
            assert_equal("counts", counts, own_counts)
            if given:
                assert_equal("selection", selected, expected)
    return symmetric.inboxes.epochs


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_ranks_exchange_through_memory_as_by_collectives(tmp_path, num_ranks):
    steps = 6
    epochs = processes.on_ranks(num_ranks, tmp_path, "cpu", exchanged, num_ranks, tmp_path, steps)
    calls = torch.tensor([sum(4 for s in range(steps) if s % TOKENS >= t) for t in range(TOKENS)])
    for each in epochs:
        assert_equal("epochs", each.long(), calls % 4)


def selected(rank, num_ranks, folder):
    """Steps of an engine: one exchange of all tokens, and a prefill of too many."""
    symmetric, _ = connected(rank, num_ranks, folder)
    gathered = []

    def all_gather(offer):
        offers = [torch.empty_like(offer) for _ in range(num_ranks)]
        torch.distributed.all_gather(offers, offer)
        gathered.append(offer.shape[1])
        return torch.cat(offers)

    for query_lens, seq_lens in (([1, 1, 1], [9, 40, 3]), ([2], [33]), ([1, 4], [7, 40])):
        step = Step(Draw(9), query_lens, seq_lens, num_ranks, 4, ties=True)
        found = step.select(rank, all_gather, 1 << 20, symmetric)
        assert_equal("selection", found[: step.tokens], step.expected()[: step.tokens])
    return gathered, symmetric.inboxes.epochs.tolist()


def test_ranks_select_from_shared_keys_through_memory(tmp_path):
    for found in processes.on_ranks(2, tmp_path, "cpu", selected, 2, tmp_path):
        assert found == ([4], [3, 2, 1])


@pytest.mark.parametrize(
    ("gpus", "allows", "refusal"),
    [
        ("AA", (None, None), "symmetric memory needs a GPU for each rank, and ranks share one; "),
        ("AA", ("1", "0"), "symmetric memory needs a GPU for each rank, and ranks share one; "),
        ("AA", ("1", "1"), "torch's symmetric memory: asked for a tensor"),
        ("AB", (None, None), "torch's symmetric memory: asked for a tensor"),
    ],
)
def test_ranks_may_share_a_gpu_where_torch_lets_all_of_them(gpus, allows, refusal, monkeypatch):
    def refuse_tensors(*_):
        raise RuntimeError("asked for a tensor\nwith a stack")

    monkeypatch.setattr(parallel, "_symmetric_tensors", refuse_tensors)
    monkeypatch.setattr(torch.version, "hip", None)
    device = torch.device("cuda", 0)
    workspace = SimpleNamespace(
        max_tokens=2, max_candidates=4, num_ranks=2, rank=0, device=device, group=None
    )

    def places():
        for gpu, allow in zip(gpus, allows, strict=True):
            properties = SimpleNamespace(uuid=gpu)
            monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, own=properties: own)
            if allow is None:
                monkeypatch.delenv(parallel.OVERLAPPING, raising=False)
            else:
                monkeypatch.setenv(parallel.OVERLAPPING, allow)
            asked = []
            stub = SimpleNamespace(**vars(workspace), _gather=lambda own, to=asked: to.append(own))
            with pytest.raises(TypeError):  # without the places of others
                ExchangeWorkspace._connect(stub)
            yield asked[0]

    everyones = [*places()]
    workspace._gather = lambda own: everyones if isinstance(own, tuple) else [own, None]
    inboxes, found = ExchangeWorkspace._connect(workspace)
    assert inboxes is None
    assert found.startswith(refusal)


def test_a_workspace_refuses_calls_of_other_sizes():
    def refuse(rank, group):
        with pytest.raises(
            ValueError, match="transport: symmetric memory needs NVIDIA GPUs, got c"
        ):
            ExchangeWorkspace(
                max_tokens=2, max_candidates=4, group=group, device="cpu", transport="symmetric"
            )
        workspace = ExchangeWorkspace(
            max_tokens=2, max_candidates=4, group=group, device="cpu", transport=None
        )
        assert workspace.refusal == "symmetric memory needs NVIDIA GPUs, got cpu"

        def exchange(tokens, candidates, num_ranks=2):
            shard = ContextShard(rank, num_ranks)
            scores, rows = torch.zeros(tokens, 9), torch.arange(candidates).expand(tokens, -1)
            exchange_rows(scores, rows, 3, shard=shard, workspace=workspace)

        exchange(2, 4)
        for tokens, candidates in ((3, 4), (2, 5)):
            room = f"room for {tokens} tokens with {candidates} candidates, got max_tokens 2 and"
            with pytest.raises(ValueError, match=f"exchange_rows: workspace must have {room}"):
                exchange(tokens, candidates)
        with pytest.raises(ValueError, match=rf"shard must be that of rank {rank} of 2, .* of 3"):
            exchange(2, 4, 3)
        with pytest.raises(ValueError, match=rf"exchange_topk: shard must be that of rank {rank}"):
            exchange_topk(
                torch.zeros(2, 9),
                torch.zeros(2, 4).int(),
                3,
                shard=ContextShard(rank, 3),
                workspace=workspace,
            )
        other = torch.distributed.ProcessGroup(rank, 2)
        values = torch.zeros(2, 4)
        with pytest.raises(ValueError, match="group must be the workspace's, got another one"):
            exchange_topk(values, values.int(), 3, workspace=workspace, group=other)

    processes.on_threads(2, refuse)


class Stuck(Exception):
    """All ranks wait, and nothing is on its way."""


def ranks_that_exchange(num_slots, seed, num_ranks=3, num_words=2, exchanges=30):
    """A model of the protocol: accesses to memory in a random order of ranks, some much slower.

    A word that is written arrives at a random time, but not before an older one of its address.

    Raises:
        Stuck: the exchange does not end.
        AssertionError: a rank takes a word of another exchange.
    """
    chance = random.Random(seed)
    memory = {}
    on_the_way = []

    def rank_of(rank):
        for exchange in range(exchanges):
            slot, phase = exchange % num_slots, 1 - exchange // num_slots % 2
            words = [*itertools.product(range(num_ranks), range(num_words))]
            for peer, word in chance.sample(words, len(words)):
                on_the_way.append(((peer, slot, rank, word), (phase, exchange)))
                yield True
            for source, word in chance.sample(words, len(words)):
                while (found := memory.get((rank, slot, source, word), (0, None)))[0] != phase:
                    yield False
                assert found[1] == exchange
                yield True

    running = [rank_of(rank) for rank in range(num_ranks)]
    idle = 0
    while running:
        if chance.random() < 0.05:
            weights = [chance.choice((1, 1, 30)) for _ in range(num_ranks)]
        elif not idle:
            weights = [1] * num_ranks
        if on_the_way and chance.random() < 0.5:
            address = chance.choice(on_the_way)[0]
            arriving = next(each for each in on_the_way if each[0] == address)
            on_the_way.remove(arriving)
            memory[address] = arriving[1]
            idle = 0
        rank = chance.choices(running, weights[: len(running)])[0]
        try:
            idle = 0 if next(rank) else idle + 1
        except StopIteration:
            running.remove(rank)
        if idle > 1000 * num_ranks and not on_the_way:
            raise Stuck


@pytest.mark.parametrize("seed", range(40))
def test_two_buffers_are_enough_for_ranks_of_any_speed(seed):
    ranks_that_exchange(SLOTS, seed)


@pytest.mark.parametrize("seed", range(5))
def test_a_single_buffer_is_overwritten_before_it_is_read(seed):
    with pytest.raises(Stuck):
        ranks_that_exchange(1, seed)

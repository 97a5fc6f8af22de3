"""Exchanges through memory that ranks write: the kernel in Triton's interpreter, and its protocol.

The ranks are processes, and their inboxes lie in files that all of them map.
"""

import itertools
import random
import time

import pytest
import torch

import processes
from sparsemla import (
    ContextShard,
    ExchangeWorkspace,
    exchange_rows,
    exchange_topk,
    own_positions,
    select_topk,
    to_slots,
)
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import assert_equal
from test_parallel import scores_of

pytest.importorskip("triton")

from sparsemla.kernels.exchange import Inboxes
from sparsemla.kernels.exchange.arguments import SLOTS, inbox_width
from sparsemla_lab.testing.interpreter import portable

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TOKENS, CANDIDATES, PAGE_SIZE = 6, 20, 4


def connected(rank, num_ranks, folder):
    """A rank's workspace whose inboxes are files."""
    portable.repair()
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
    """Exchange other rows in each step, after a random delay, by both transports."""
    delays, draw = random.Random(rank), Draw(80)
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

        time.sleep(0.01 * delays.random())
        selected = exchange_topk(values, shard.positions(rows), topk, workspace=symmetric)
        assert_equal("selection", selected, expected)
        for workspace, options in itertools.product((symmetric, collective), ({}, pages)):
            time.sleep(0.01 * delays.random())
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
    steps = 12
    epochs = processes.on_ranks(num_ranks, tmp_path, "cpu", exchanged, num_ranks, tmp_path, steps)
    calls = torch.tensor([sum(3 for s in range(steps) if s % TOKENS >= t) for t in range(TOKENS)])
    for each in epochs:
        assert_equal("epochs", each.long(), calls % 4)

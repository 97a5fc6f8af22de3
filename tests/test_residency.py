"""Rows in fast memory: whatever happens to requests, every row is its position's, by exact LRU."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from sparsemla import (
    ContextShard,
    PagedCache,
    RowTable,
    bf16_format,
    dispatch,
    fetch_rows,
    forget_seats,
    resolve_rows,
)
from sparsemla.kernels.repeat import unrepeated

TIERS = ["cpu", "reference"]
with contextlib.suppress(ImportError):
    import triton  # noqa: F401

    TIERS.append("triton")

ROW = bf16_format(2)  # the four bytes of an int32: which write of which position
POOL, PAGE_SIZE = 40, 3


class LRU:
    """The rows of a seat as a dictionary: positions from least to most recently used."""

    def __init__(self, size):
        self.size, self.rows = size, OrderedDict()

    def step(self, context, lists):
        """Misses of each list."""
        for position in [position for position in self.rows if position >= context]:
            del self.rows[position]
        used, missed = set(), []
        for positions in lists:
            used |= {position for position in positions if position in self.rows}
            missed.append([position for position in positions if position not in self.rows])
            for position in missed[-1]:
                if len(self.rows) == self.size:
                    del self.rows[next(other for other in self.rows if other not in used)]
                self.rows[position] = None
                used.add(position)
            for position in positions:
                self.rows.move_to_end(position)
        return missed


@dataclass(eq=False)
class Request:
    """A request: the pages of its positions, and the seat that it has, if it runs."""

    pages: list[int]
    length: int
    seat: int | None = None
    written: dict[int, int] = field(default_factory=dict)


class Rank:
    """One rank's rows in host memory, and its fast memory."""

    def __init__(self, shard, seats, rows_per_seat):
        self.shard = shard
        self.table = RowTable.allocate(seats, rows_per_seat)
        self.host = PagedCache.allocate(ROW, POOL, PAGE_SIZE)
        self.fast = PagedCache.allocate(ROW, seats * rows_per_seat, 1)
        self.models = [LRU(rows_per_seat) for _ in range(seats)]
        self.stats = torch.zeros(2, dtype=torch.int64)
        self.expected = [0, 0]

    def slot(self, request, local):
        return request.pages[local // PAGE_SIZE] * PAGE_SIZE + local % PAGE_SIZE


class Engine:
    """Requests that come, share prefixes, roll back, lose their seats, and leave."""

    def __init__(self, seed, seats, topk, query_len, spare, shards):
        self.random = np.random.default_rng(seed)
        self.topk, self.query_len = topk, query_len
        self.ranks = [Rank(shard, seats, query_len * topk + spare) for shard in shards]
        self.num_ranks = max(len(shards), 1)
        self.width = 6
        self.capacity = self.width * PAGE_SIZE * self.num_ranks - 2 * query_len
        self.free_pages, self.free_seats = [*range(POOL)], [*range(seats)]
        self.running, self.waiting = [], []
        self.count = 0

    def chance(self, share):
        return self.random.random() < share

    def pages(self, length):
        """Pages of a rank for that many positions of a context."""
        return -(-self.ranks[0].shard.longest(length) // PAGE_SIZE)

    def write(self, request, position):
        """Store the position's row, as the engine does for the tokens that it computes."""
        self.count += 1
        request.written[position] = self.count
        for rank in self.ranks:
            local = int(rank.shard.to_local(torch.tensor(position)))
            if local >= 0:
                slot = rank.slot(request, local)
                rank.host.data.view(torch.int32)[slot // PAGE_SIZE, slot % PAGE_SIZE] = self.count

    def seat(self, request):
        request.seat = self.free_seats.pop(self.random.integers(len(self.free_seats)))
        for rank in self.ranks:
            forget_seats(rank.table, torch.tensor([request.seat, -1, 99]))
            rank.models[request.seat].rows.clear()
        self.running.append(request)

    def unseat(self, request):
        self.running.remove(request)
        self.free_seats.append(request.seat)
        request.seat = None

    def start(self):
        """A new request; it may begin with pages of another one, as after a prefix hit."""
        length = int(self.random.integers(1, self.capacity // 2 + 2))
        request = Request([], length)
        others = [one for one in self.running + self.waiting if one.pages]
        shared = 0
        if others and self.chance(0.5):
            other = others[self.random.integers(len(others))]
            turn = PAGE_SIZE * self.num_ranks * self.ranks[0].shard.interleave
            shared = min(other.length, length) // turn * turn
            request.pages += other.pages[: shared // (PAGE_SIZE * self.num_ranks)]
            request.written |= {p: other.written[p] for p in range(shared)}
        if self.grow(request, length):
            for position in range(shared, length):
                self.write(request, position)
            self.seat(request)

    def grow(self, request, length):
        """Give a request the pages that it needs, if there are enough."""
        needed = self.pages(length) - len(request.pages)
        if needed > len(self.free_pages):
            return False
        for _ in range(needed):
            request.pages.append(self.free_pages.pop(self.random.integers(len(self.free_pages))))
        return True

    def leave(self, request):
        """Free the pages that no other request has."""
        shared = {
            page for one in self.running + self.waiting if one is not request for page in one.pages
        }
        self.free_pages += [page for page in request.pages if page not in shared]
        request.pages = []

    def preempt(self, request):
        """Take pages and seat; the context is computed again at other pages, later."""
        self.unseat(request)
        self.leave(request)
        self.waiting.append(request)

    def resume(self, request):
        if self.grow(request, request.length):
            self.waiting.remove(request)
            for position in range(request.length):
                self.write(request, position)
            self.seat(request)

    def select(self, visible):
        """A selection: mostly recent and repeated positions, up to the token's own."""
        size = int(self.random.integers(0, min(self.topk, visible) + 1))
        chosen = self.random.choice(visible, size, replace=False)
        if self.chance(0.5):
            chosen = np.unique(np.minimum(chosen, self.random.integers(1, visible + 1)))
        return sorted({int(position) for position in chosen})

    def turn(self):
        """Something happens to requests, then some of them compute a step."""
        if self.free_seats and self.chance(0.5):
            if self.waiting and self.chance(0.5):
                self.resume(self.waiting[0])
            else:
                self.start()
        if self.running and self.chance(0.15):
            self.preempt(self.running[self.random.integers(len(self.running))])
        if self.running and self.chance(0.1):
            request = self.running[self.random.integers(len(self.running))]
            self.unseat(request)
            self.leave(request)
        batch = [request for request in self.running if self.chance(0.8)]
        self.random.shuffle(batch)
        self.step(batch)

    def step(self, batch):
        queries = []
        for request in list(batch):
            tokens = int(self.random.integers(1, self.query_len + 1))
            if request.length + tokens > self.capacity or not self.grow(
                request, request.length + tokens
            ):
                batch.remove(request)
                continue
            queries.append(tokens)
        padded = int(self.random.integers(0, 3))  # as in a CUDA graph
        lists = [
            [self.select(request.length + i + 1) for i in range(tokens)]
            for request, tokens in zip(batch, queries, strict=True)
        ]
        for request, tokens in zip(batch, queries, strict=True):
            for i in range(tokens):
                self.write(request, request.length + i)
        flat = [positions for of_request in lists for positions in of_request]
        indices = np.full((len(flat) + padded, self.topk), -1, np.int32)
        for row, positions in zip(indices, flat, strict=False):
            row[: len(positions)] = positions
        lengths = [request.length + tokens for request, tokens in zip(batch, queries, strict=True)]
        seats = [request.seat for request in batch]
        table = np.full((len(batch) + padded, self.width), -1)
        for row, request in zip(table, batch, strict=False):
            row[: len(request.pages)] = request.pages
        offsets = np.concatenate([[0], np.cumsum(queries + [0] * padded)]).astype(np.int64)
        for rank in self.ranks:
            self.check(
                rank,
                lists,
                torch.from_numpy(indices),
                torch.from_numpy(offsets),
                torch.tensor(lengths + [0] * padded, dtype=torch.int32),
                torch.tensor(seats + [-1] * padded, dtype=torch.int32),
                torch.from_numpy(table),
                batch,
            )
        for request, tokens in zip(batch, queries, strict=True):
            request.length += int(self.random.integers(1, tokens + 1))  # the others are rejected

    def check(self, rank, lists, indices, offsets, lengths, seats, table, batch):
        """One rank's step: the model's misses, rows that hold what was written last."""
        found = resolve_rows(
            indices,
            offsets,
            lengths,
            seats,
            table,
            rank.table,
            page_size=PAGE_SIZE,
            max_query_len=self.query_len,
            shard=None if self.num_ranks == 1 else rank.shard,
            stats=rank.stats,
            validate=True,
        )
        missing = found.miss_slots, found.miss_rows, found.miss_counts
        fetch_rows(rank.host, rank.fast, *missing, validate=True)
        token = 0
        for request, of_request in zip(batch, lists, strict=True):
            own = [
                [
                    (p, local)
                    for p, local in zip(positions, self.local(rank, positions), strict=True)
                    if local >= 0
                ]
                for positions in of_request
            ]
            context = int(rank.shard.lengths(torch.tensor(request.length)))
            model = rank.models[request.seat]
            missed = model.step(context, [[local for _, local in each] for each in own])
            for positions, misses in zip(own, missed, strict=True):
                count, miss_count = int(found.counts[token]), int(found.miss_counts[token])
                assert count == len(positions)
                assert (found.rows[token, count:] == -1).all()
                rows = found.rows[token, :count].long()
                held = rank.fast.data.view(torch.int32)[rows, 0, 0].tolist()
                assert held == [request.written[p] for p, _ in positions], "a stale row"
                assert found.miss_slots[token, :miss_count].tolist() == [
                    rank.slot(request, local) for local in misses
                ]
                assert (found.miss_slots[token, miss_count:] == -1).all()
                assert (found.miss_rows[token, miss_count:] == -1).all()
                new = sum(local >= context for local in misses)
                assert found.new_counts[token] == new
                rank.expected[0] += count - miss_count
                rank.expected[1] += miss_count
                token += 1
            keys = rank.table.keys[request.seat].tolist()
            assert keys[: len(model.rows)] == sorted(model.rows)
            assert set(keys[len(model.rows) :]) <= {2**31 - 1}
        assert (found.counts[token:] == 0).all()
        assert (found.rows[token:] == -1).all()
        assert rank.stats.tolist() == rank.expected
        each = torch.arange(rank.table.rows_per_seat, dtype=torch.int32)
        for part in (rank.table.rows, rank.table.order):
            assert (part.sort(1).values == each).all()

    @staticmethod
    def local(rank, positions):
        return rank.shard.to_local(torch.tensor(positions, dtype=torch.int64)).tolist()


PHASES = [p for p in Phase if p is not Phase.shrink or not settings.default.derandomize]
EXAMPLES = {"cpu": 120, "reference": 40, "triton": 4}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("tier", TIERS)
def test_lives_of_requests(tier):
    @settings(phases=PHASES, max_examples=EXAMPLES[tier])
    @given(
        seed=st.integers(0, 2**32 - 1),
        seats=st.integers(1, 3),
        topk=st.integers(1, 7),
        query_len=st.integers(1, 3),
        spare=st.integers(0, 9),
        num_ranks=st.integers(1, 3),
        interleave=st.integers(1, 3),
    )
    def live(seed, seats, topk, query_len, spare, num_ranks, interleave):
        shards = [ContextShard(rank, num_ranks, interleave) for rank in range(num_ranks)]
        engine = Engine(seed, seats, topk, query_len, spare, shards)
        for _ in range(8):
            engine.turn()

    with unrepeated(), dispatch.only(tier):
        live()

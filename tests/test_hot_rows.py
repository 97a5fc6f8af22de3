"""Hot rows give the bits of a cache on the device, whatever happens to requests."""

from __future__ import annotations

import gc
import weakref
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from sparsemla import (
    BF16_576,
    FP8_DS_MLA,
    ContextShard,
    DecodeRunner,
    HostCache,
    HostContext,
    HotRows,
    PagedCache,
    e4m3_format,
    fused_rope_rmsnorm_quant,
    plan_batch,
    sparse_decode,
    to_slots,
)
from sparsemla.side_stream import SideStream
from streams import Streams

PAGE_SIZE, NUM_PAGES, MAX_PAGES = 4, 64, 16
HEADS, TOPK, SEATS = 2, 6, 4


@dataclass(eq=False)
class Request:
    """A request that decodes: its pages, its context, and the seat that it has."""

    pages: list[int]
    context: int
    seat: int
    recent: list[int] = field(default_factory=list)


class Lives:
    """Requests that come, go, lose their seat, and roll back, over a resident cache and the host's.

    Args:
        leaders: for each layer the layer whose selection it shares.
    """

    def __init__(self, device, format, query_len, leaders, stream=None):
        self.device, self.query_len, self.leaders = device, query_len, leaders
        self.random = np.random.default_rng(0)
        sizes = {"num_layers": len(leaders), "device": device}
        self.resident = PagedCache.allocate(format, NUM_PAGES, PAGE_SIZE, **sizes)
        self.host = HostCache.allocate(format, NUM_PAGES, PAGE_SIZE, **sizes)
        self.hot = HotRows(
            self.host,
            seats=SEATS,
            rows_per_seat=query_len * TOPK + 3,
            topk=TOPK,
            query_len=query_len,
            leaders=leaders,
            stream=stream,
        )
        self.table = torch.ones(MAX_PAGES * PAGE_SIZE, 64, device=device)
        self.norm = torch.ones(512, device=device)
        inputs = self.inputs([Request([0], 0, 0)])
        self.runner = DecodeRunner(
            self.step,
            inputs,
            batch_sizes=(2, SEATS),
            max_pages_per_request=MAX_PAGES,
            page_size=PAGE_SIZE,
            query_len=query_len,
        )
        self.free_pages = list(range(NUM_PAGES))
        self.free_seats = list(range(SEATS))
        self.requests = []
        self.events = dict.fromkeys(("came", "left", "rolled back", "prefills", "steps"), 0)

    def step(self, plan, rows, chosen, q, seats):
        """Each layer's attention over both caches."""
        rows, chosen = rows.flatten(0, 1), chosen.flatten(0, 1)
        batch = len(seats)
        both = []
        for layer, leader in enumerate(self.leaders):
            for cache in (self.resident.layer(layer), self.host.layer(layer)):
                fused_rope_rmsnorm_quant(
                    rows[:, layer, None, :64],
                    rows[:, layer],
                    self.table,
                    self.norm,
                    cache,
                    positions=plan.positions,
                    slot_mapping=plan.slot_mapping,
                )
            indices = chosen[:, leader].contiguous()
            found = self.hot.resolve(layer, indices, plan, seats)
            slots = to_slots(indices, plan.page_table, plan.request_ids, page_size=PAGE_SIZE)
            lengths = (indices >= 0).sum(1).int()
            for cache, each, counts in (
                (self.resident.layer(layer), slots, lengths),
                (self.hot.layer(layer), *found),
            ):
                shape = batch, self.query_len
                out, lse = sparse_decode(
                    q,
                    cache,
                    each.view(*shape, -1),
                    softmax_scale=0.1,
                    topk_lengths=counts.view(shape),
                )
                both.append(torch.cat([out.flatten(1).float(), lse.flatten(1)], 1))
        return torch.stack(both[::2], 1), torch.stack(both[1::2], 1)

    def inputs(self, requests):
        count, tokens = len(requests), self.query_len
        chosen = np.full((count, tokens, len(self.leaders), TOPK), -1)
        for b, request in enumerate(requests):
            for token in range(tokens):
                visible = request.context + token + 1
                for layer in set(self.leaders):
                    keep = [p for p in request.recent if p < visible and self.random.random() < 0.7]
                    picked = dict.fromkeys([*keep, *self.random.permutation(visible).tolist()])
                    kept = min(TOPK, self.random.integers(1, TOPK + 3))
                    request.recent = sorted([*picked][:kept])
                    chosen[b, token, layer, : len(request.recent)] = request.recent
        device = self.device
        return {
            "rows": torch.randn(count, tokens, len(self.leaders), 576).to(device),
            "chosen": torch.from_numpy(chosen).int().to(device),
            "q": torch.randn(count, tokens, HEADS, 576).bfloat16().to(device),
            "seats": torch.tensor([r.seat for r in requests], dtype=torch.int32, device=device),
        }

    def come(self):
        """A request takes a seat that another may have had, with a context of new rows."""
        context = int(self.random.integers(1, 30))
        needed = -(-(context + 1) // PAGE_SIZE)
        if not self.free_seats or needed > len(self.free_pages):
            return
        self.random.shuffle(self.free_pages)
        pages = [self.free_pages.pop() for _ in range(needed)]
        request = Request(pages, context, self.free_seats.pop())
        positions = np.arange(context)
        slots = torch.from_numpy(np.array(pages)[positions // PAGE_SIZE] * PAGE_SIZE)
        slots = (slots + torch.from_numpy(positions % PAGE_SIZE)).to(self.device)
        for layer in range(len(self.leaders)):
            rows = torch.randn(context, 576).to(self.device)
            for cache in (self.resident.layer(layer), self.host.layer(layer)):
                cache.write(slots, rows)
        self.hot.forget([request.seat])
        self.requests.append(request)
        self.events["came"] += 1

    def leave(self):
        """A request is finished or preempted: its pages and its seat are free."""
        request = self.requests.pop(int(self.random.integers(len(self.requests))))
        self.free_pages += request.pages
        self.free_seats.insert(0, request.seat)
        self.events["left"] += 1

    def prefill(self):
        """A request goes back some tokens and writes them anew, without its hot rows."""
        request = self.random.choice(self.requests)
        new = int(self.random.integers(1, 5))
        before = max(request.context - new, 1)
        positions = np.arange(before, request.context)
        slots = torch.from_numpy(np.array(request.pages)[positions // PAGE_SIZE] * PAGE_SIZE)
        slots = (slots + torch.from_numpy(positions % PAGE_SIZE)).to(self.device)
        for layer in range(len(self.leaders)):
            rows = torch.randn(len(positions), 576).to(self.device)
            for cache in (self.resident.layer(layer), self.host.layer(layer)):
                cache.write(slots, rows)
        if self.random.random() < 0.5:
            self.hot.truncate([request.seat], [before])
        else:
            values = (torch.tensor(v, device=self.device) for v in ([request.seat], [before]))
            self.hot.truncate(*values)
        self.events["prefills"] += 1

    def live(self):
        """One step; returns what attention over both caches gave."""
        if not self.requests or self.random.random() < 0.15:
            self.come()
        elif self.random.random() < 0.08:
            self.leave()
        if self.requests and self.random.random() < 0.1:
            self.prefill()
        batch = [r for r in self.requests if self.random.random() < 0.8] or self.requests[:1]
        for request in [*batch]:
            needed = -(-(request.context + self.query_len) // PAGE_SIZE) - len(request.pages)
            if needed > 0:
                if needed + len(request.pages) > MAX_PAGES or needed > len(self.free_pages):
                    batch.remove(request)
                    request.context = 1 + request.context // 2
                    self.events["rolled back"] += 1
                    continue
                request.pages += [self.free_pages.pop() for _ in range(needed)]
        if not batch:
            return None
        table = torch.full((len(batch), MAX_PAGES), -1, dtype=torch.int32)
        for row, request in zip(table, batch, strict=True):
            row[: len(request.pages)] = torch.tensor(request.pages)
        lens = [request.context + self.query_len for request in batch]
        outputs = self.runner.run(lens, table.to(self.device), **self.inputs(batch))
        for request in batch:
            accepted = int(self.random.integers(1, self.query_len + 1))
            self.events["rolled back"] += accepted < self.query_len
            request.context += accepted
        self.events["steps"] += 1
        return outputs


@pytest.mark.parametrize(
    ("format", "query_len", "leaders", "steps"),
    [
        (FP8_DS_MLA, 1, (0, 1), 300),
        (FP8_DS_MLA, 3, (0, 0, 0, 3), 120),
        (BF16_576, 2, (0, 0), 100),
        (e4m3_format(), 1, (0, 0), 100),
    ],
)
def test_every_step_has_the_bits_of_a_resident_cache(device, format, query_len, leaders, steps):
    """On a GPU the steps are CUDA graphs, with fetches on a stream beside them."""
    lives = Lives(device, format, query_len, leaders)
    check_steps(lives, steps)
    events, stats = lives.events, lives.hot.stats()
    assert events["came"] > SEATS
    assert events["left"] > 0
    assert events["prefills"] > 5
    assert query_len == 1 or events["rolled back"] > 10
    assert 0.2 < stats.hits / (stats.hits + stats.misses) < 0.95
    assert stats.bytes % format.bytes_per_token == 0
    if len(set(leaders)) == 1:
        assert stats.bytes == stats.misses * len(leaders) * format.bytes_per_token
    lives.host.close()


def check_steps(lives, count):
    while lives.events["steps"] < count:
        outputs = lives.live()
        if outputs is not None:
            resident, hot = outputs
            assert torch.equal(resident, hot), lives.events
            assert resident.abs().amax() > 0


def test_fetches_may_run_as_late_as_attention(monkeypatch):
    streams = Streams(monkeypatch)
    lives = Lives("cpu", FP8_DS_MLA, 2, (0, 0, 2), stream=streams.side)
    check_steps(lives, 60)
    assert streams.num_late >= 60 * 4
    assert not streams.queue


def test_memory_that_streams_write_waits_for_them(monkeypatch):
    """The caching allocator would give it to others when hot rows are dropped."""
    owned = []
    monkeypatch.setattr(SideStream, "owns", lambda self, *tensors: owned.extend(tensors))
    host = host_cache(format=e4m3_format())
    both = HotRows(host, seats=2, rows_per_seat=TOPK, topk=TOPK), HostContext(host, max_rows=5)
    assert sum(tensor.nbytes for tensor in owned) == sum(each.memory_bytes for each in both)


def test_a_search_keeps_its_inputs_until_it_is_joined(monkeypatch):
    """Also if attention never asks for the layer, and its next search or forget comes first."""
    streams = Streams(monkeypatch)
    hot = HotRows(
        host_cache(), seats=2, rows_per_seat=TOPK, topk=TOPK, stream=streams.side
    )  # fmt: skip
    monkeypatch.setattr(HotRows, "_lead", lambda *arguments: None)

    def search():
        chosen = lists([0, 1])
        hot.resolve(0, chosen, plan_of(9), seats_of(1))
        return weakref.ref(chosen)

    def stops():
        monkeypatch.setattr(HotRows, "_lead", lambda *arguments: 1 // 0)
        chosen = lists([0, 1])
        with pytest.raises(ZeroDivisionError):
            hot.resolve(0, chosen, plan_of(9), seats_of(1))
        return weakref.ref(chosen)

    for begin in (search, stops):
        for join in (search, hot.forget, lambda: hot.truncate([0], [3]), lambda: hot.layer(0)):
            read, joined = begin(), streams.joined
            gc.collect()
            assert read() is not None
            assert len(streams.queue) == 1  # what the join waits for
            if join is not search or begin is search:
                join()
                assert streams.joined == joined + 1
                assert read() is None
            hot.layer(0)


def host_cache(num_layers=2, format=FP8_DS_MLA, device="cpu"):
    host = HostCache.allocate(format, 16, PAGE_SIZE, num_layers=num_layers, device=device)
    for layer in range(num_layers):
        slots = torch.arange(host.num_slots, device=device)
        host.layer(layer).write(slots, torch.randn(host.num_slots, 576).to(device))
    return host


def plan_of(*lens, query_len=1):
    pages = torch.arange(16 // len(lens) * len(lens), dtype=torch.int32).view(len(lens), -1)
    return plan_batch(
        [query_len] * len(lens),
        lens,
        pages,
        page_size=PAGE_SIZE,
        workspace_rows=None,
        decode_threshold=query_len,
    )


def lists(*rows):
    return torch.tensor([[*row, *[-1] * (TOPK - len(row))] for row in rows], dtype=torch.int32)


def seats_of(*seats):
    return torch.tensor(seats, dtype=torch.int32)


def test_hits_misses_and_bytes():
    hot = HotRows(host_cache(), seats=2, rows_per_seat=TOPK, topk=TOPK, leaders=(0, 0))
    for chosen in ([0, 1, 2], [1, 2, 9], [3, 4, 5, 6, 7, 8], [9]):
        found = hot.resolve(0, lists(chosen, []), plan_of(10, 1), seats_of(1, 0))
        assert found.counts.tolist() == [len(chosen), 0]
        hot.resolve(1, lists(chosen, []), plan_of(10, 1), seats_of(1, 0))
    # 9 was a token of the second step, so it is not one of a context of 9, and fetched again.
    assert hot.stats() == (2, 11, 11 * 2 * 656)
    hot.forget([1])
    hot.resolve(0, lists([9], []), plan_of(11, 1), seats_of(1, 0))
    assert hot.stats()[:2] == (2, 12)


def test_rows_are_those_of_the_selection():
    host = host_cache()
    hot = HotRows(host, seats=3, rows_per_seat=8, topk=TOPK)
    plan = plan_of(20, 30)
    for chosen in (lists([0, 5, 19], [7]), lists([5, 6, 19], [7, 29])):
        for layer in range(2):
            rows, counts = hot.resolve(layer, chosen, plan, seats_of(2, 0))
            data = hot.layer(layer).data.flatten(0, 1)
            slots = to_slots(chosen, plan.page_table, plan.request_ids, page_size=PAGE_SIZE)
            source = host.layer(layer).data.flatten(0, 1)
            assert counts.tolist() == (chosen >= 0).sum(1).tolist()
            assert torch.equal(rows >= 0, chosen >= 0)
            assert torch.equal(data[rows[rows >= 0]], source[slots[slots >= 0]])
            assert (rows[0] // 8)[chosen[0] >= 0].eq(2).all()


@pytest.mark.parametrize("format", [FP8_DS_MLA, BF16_576, e4m3_format()])
@pytest.mark.parametrize("leaders", [None, (0, 0, 0), (0, 1, 1)])
def test_the_size_is_known_before(format, leaders):
    sizes = {"seats": 3, "rows_per_seat": 20, "topk": TOPK, "query_len": 2, "leaders": leaders}
    if leaders is None:
        sizes["shard"] = ContextShard(1, 2, parts=8)
    hot = HotRows(host_cache(3, format), **sizes)
    assert HotRows.size(format, num_layers=3, **sizes) == hot.memory_bytes
    tensors = {id(each): each for each in found_tensors(hot)}
    held = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in tensors.values()
    }
    assert sum(held.values()) == hot.memory_bytes


def found_tensors(value):
    """All tensors of an object."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, HostCache):
        return
    elif isinstance(value, dict):
        yield from found_tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from found_tensors(each)
    elif hasattr(value, "__dict__"):
        yield from found_tensors(vars(value))


def test_hot_rows_may_come_before_the_host():
    host = host_cache()
    sizes = {"seats": 2, "rows_per_seat": 8, "topk": TOPK}
    hot = HotRows(None, **sizes, format="fp8_ds_mla", num_layers=2, device="cpu")
    arguments = 0, lists([3]), plan_of(9), seats_of(0)
    with pytest.raises(ValueError, match="host must be attached before the first step, got None"):
        hot.resolve(*arguments)
    for other in (host_cache(3), host_cache(format=BF16_576)):
        with pytest.raises(ValueError, match="host must have format fp8_ds_mla, 2 layers and dev"):
            hot.attach(other)
    hot.attach(host)
    hot.resolve(*arguments)
    assert hot.stats().misses == 1
    with pytest.raises(ValueError, match="host must be attached once"):
        hot.attach(host)
    with pytest.raises(ValueError, match="format and num_layers must be given without host"):
        HotRows(None, **sizes)
    with pytest.raises(ValueError, match="num_layers must be None beside host, got 2"):
        HotRows(host, **sizes, num_layers=2)


def test_errors_of_the_constructor():
    host, sizes = host_cache(), {"seats": 2, "topk": TOPK}
    with pytest.raises(
        ValueError,
        match="rows_per_seat must be at least 18, as 3 query tokens may select 6 rows each, got 17",
    ):
        HotRows(host, **sizes, query_len=3, rows_per_seat=17)
    with pytest.raises(ValueError, match="seats must be at most 1023 for 1048576 rows each"):
        HotRows(host, topk=TOPK, seats=1024, rows_per_seat=1 << 20)
    for leaders, got in (((1, 1), "1 for layer 0"), ((0, 2), "2 for layer 1")):
        with pytest.raises(ValueError, match=f"leaders must name .*, got {got}"):
            HotRows(host, **sizes, leaders=leaders)
    with pytest.raises(ValueError, match="got 0 for layer 2"):
        HotRows(host_cache(3), **sizes, leaders=(0, 1, 0))
    with pytest.raises(ValueError, match="leaders must have 2 layers, got 3"):
        HotRows(host, **sizes, leaders=(0, 0, 0))
    host.close()
    with pytest.raises(ValueError, match="host must be open"):
        HotRows(host, **sizes)


def test_errors_of_a_step():
    host = host_cache()
    hot = HotRows(host, seats=2, rows_per_seat=12, topk=TOPK)
    chosen, seats = lists([3]), seats_of(0)
    with pytest.raises(ValueError, match="plan must have decodes of at most 1 query tokens for 2"):
        hot.resolve(0, lists([3], [3]), plan_of(9, query_len=2), seats)
    with pytest.raises(ValueError, match="plan must have decodes"):
        hot.resolve(0, chosen.repeat(4, 1), plan_of(9, 9, 9, 9), seats_of(0, 1, 2, 3))
    table = torch.zeros(1, 2, dtype=torch.int32)
    other = plan_batch([1], [9], table, page_size=8, workspace_rows=None)
    with pytest.raises(ValueError, match="plan must have pages of 4 tokens, as host has, got 8"):
        hot.resolve(0, chosen, other, seats)
    shard, options = ContextShard(1, 2), {"page_size": PAGE_SIZE, "workspace_rows": None}
    of_rank = plan_batch([1], [9], table, shard=shard, **options)
    with pytest.raises(ValueError, match=r"plan must have shard None, got ContextShard\(rank=1"):
        hot.resolve(0, chosen, of_rank, seats)
    with pytest.raises(ValueError, match="layer_idx must be below 2"):
        hot.resolve(2, chosen, plan_of(9), seats)
    with pytest.raises(ValueError, match="seats must be below 2, got 2"):
        hot.forget([0, 2])
    with pytest.raises(TypeError, match="seats must hold integers"):
        hot.forget([0.5])
    host.close()
    with pytest.raises(ValueError, match="host must be open"):
        hot.resolve(0, chosen, plan_of(9), seats)


def test_steps_compile_as_one_graph():
    host = host_cache()
    hot = HotRows(host, seats=2, rows_per_seat=8, topk=TOPK, leaders=(0, 0))
    plan, q = plan_of(20, 30), torch.randn(2, 1, HEADS, 576).bfloat16()

    def step(chosen, seats):
        outs = []
        for layer in range(2):
            rows, counts = hot.resolve(layer, chosen, plan, seats)
            cache = hot.layer(layer)
            outs.append(
                sparse_decode(q, cache, rows[:, None], topk_lengths=counts, softmax_scale=0.1)[0]
            )
        return torch.stack(outs)

    compiled = torch.compile(step, backend="eager", fullgraph=True)
    for chosen in (lists([0, 5, 19], [7]), lists([5, 6, 19], [7, 29])):
        ours = compiled(chosen, seats_of(1, 0))
        hot.forget()
        assert torch.equal(ours, step(chosen, seats_of(1, 0)))
    torch.compiler.reset()


def test_values_are_checked_on_request():
    hot = HotRows(host_cache(), seats=2, rows_per_seat=12, topk=TOPK)
    plan = plan_of(9, 9)
    wrong = [
        (lists([3, 3], [5]), (0, 1), "topk_indices must ascend, then -1 behind"),
        (lists([3, 4], [5]), (1, 1), "seats must not occur twice, got 1 twice"),
        (lists([3, 4], [5]), (0, 2), "seats must lie in"),
    ]
    for chosen, seats, said in wrong:
        with pytest.raises(ValueError, match=said):
            hot.resolve(0, chosen, plan, seats_of(*seats), validate=True)
    assert hot.stats()[:2] == (0, 0)
    hot.resolve(0, lists([3, 4], [5]), plan, seats_of(0, 1), validate=True)
    assert hot.stats()[:2] == (0, 3)


def test_layers_that_share_a_selection_come_in_order():
    hot = HotRows(host_cache(4), seats=2, rows_per_seat=12, topk=TOPK, leaders=(0, 0, 0, 3))
    step = lists([3]), plan_of(9), seats_of(0)
    with pytest.raises(ValueError, match="layer_idx must be resolved once in a step, after its le"):
        hot.resolve(1, *step)
    hot.resolve(0, *step)
    hot.resolve(2, *step)
    with pytest.raises(ValueError, match="layer_idx must be resolved once in a step"):
        hot.resolve(2, *step)
    with pytest.raises(ValueError, match=r"layer_idx must be one of 1 first, .* call forget\(\)"):
        hot.resolve(3, *step)
    hot.forget()
    hot.resolve(3, *step)
    hot.resolve(0, *step)
    assert hot.stats().misses == 3


def test_a_seat_on_the_device_is_forgotten_in_all_layers():
    hot = HotRows(host_cache(3), seats=2, rows_per_seat=12, topk=TOPK)
    step = lists([3, 4], [5]), plan_of(9, 9), seats_of(0, 1)
    for layer in range(3):
        hot.resolve(layer, *step)
    hot.forget(torch.tensor([1, -1, 2, 5]))  # 2 is a seat of the second leader in the table
    for layer in range(3):
        hot.resolve(layer, *step)
    assert hot.stats()[:2] == (6, 12)


def test_seats_are_truncated_one_by_one():
    hot = HotRows(host_cache(3), seats=3, rows_per_seat=12, topk=TOPK)
    chosen = lists([3, 6, 9], [3, 6, 9], [3, 6, 9])
    step = chosen, plan_of(10, 10, 10), seats_of(0, 1, 2)
    for layer in range(3):
        hot.resolve(layer, *step)
    hot.truncate(torch.tensor([1, 3, -1, 0]), torch.tensor([6, 0, 0, 7]))
    for layer in range(3):
        hot.resolve(layer, *step)
    # 9 is a token of the step each time; seat 1 lost 6 too.
    assert hot.stats()[:2] == (3 * (2 + 1 + 2), 3 * 9 + 3 * (1 + 2 + 1))
    with pytest.raises(ValueError, match=r"lengths must have shape \[2\] like seats, got \[1\]"):
        hot.truncate([0, 1], [4])
    with pytest.raises(ValueError, match="seats must be below 3, got 3"):
        hot.truncate([3], [4])


def test_a_shard_truncates_to_its_own_length():
    plan = plan_of(40)
    hot = HotRows(host_cache(), seats=1, rows_per_seat=8, topk=TOPK, shard=ContextShard(1, 2))
    for expected in ((0, 3), (2, 4)):  # of 1, 21 and 31, the last is dropped
        hot.resolve(0, lists([1, 21, 31]), plan, seats_of(0))
        assert hot.stats()[:2] == expected
        hot.truncate([0], [31])


def test_a_shard_resolves_its_own_part():
    """Ranks keep every second position; each fetches only rows that it owns."""
    host = host_cache()
    chosen, table = [0, 3, 8, 13, 20, 39], torch.arange(5, dtype=torch.int32)[None]
    options = {"page_size": PAGE_SIZE, "workspace_rows": None}
    for rank in range(2):
        shard = ContextShard(rank, 2)
        plan = plan_batch([1], [40], table, shard=shard, **options)
        hot = HotRows(host, seats=1, rows_per_seat=8, topk=TOPK, shard=shard)
        rows, counts = hot.resolve(0, lists(chosen), plan, seats_of(0))
        own = [p // 2 for p in chosen if p % 2 == rank]
        assert counts.tolist() == [len(own)]
        source = host.layer(0).data.flatten(0, 1)
        assert torch.equal(hot.layer(0).data[rows[0, : len(own)], 0], source[own])
        assert hot.stats()[:2] == (0, len(own))


def test_a_shard_of_parts_has_a_list_for_each():
    host, shard = host_cache(), ContextShard(1, 2, parts=4)
    pages, options = torch.arange(5)[None], {"page_size": PAGE_SIZE, "workspace_rows": None}
    plan = plan_batch([1], [40], pages, shard=shard, **options)
    hot = HotRows(host, seats=1, rows_per_seat=8, topk=TOPK, shard=shard)
    rows, counts = hot.resolve(0, lists([1, 3, 5, 8, 11, 39]), plan, seats_of(0))
    assert counts.tolist() == [[2, 3]]  # 1 and 5; 3, 11 and 39
    assert rows.shape == (1, 2, TOPK)
    source, data = host.layer(0).data.flatten(0, 1), hot.layer(0).data.flatten(0, 1)
    assert torch.equal(data[rows[0, 0, :2]], source[[0, 2]])
    assert torch.equal(data[rows[0, 1, :3]], source[[1, 5, 19]])

"""Contexts of prefills from rows in host memory have the bits of a cache on the device."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from sparsemla import (
    BF16_576,
    FP8_DS_MLA,
    ContextShard,
    HostContext,
    PagedCache,
    e4m3_format,
    gather_dequant,
    host_context,
    own_positions,
    plan_batch,
    sparse_prefill,
    to_slots,
)
from sparsemla.host_context import _rows_in
from streams import Streams
from test_hot_rows import HEADS, PAGE_SIZE, host_cache, plan_of


def prefill_plan(workspace_rows=40, device="cpu", shard=None):
    table = torch.arange(16, dtype=torch.int32, device=device).view(4, 4)[:, [3, 1, 2, 0]]
    lens = [1, 5, 7, 2], [9, 16, 7, 12]
    options = {"page_size": PAGE_SIZE, "workspace_rows": workspace_rows, "shard": shard}
    return plan_batch(*lens, table, **options)


@pytest.mark.parametrize("workspace_rows", [40, 23])
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_contexts_are_gathered_ahead(monkeypatch, workspace_rows, ahead, late):
    """With the bits of a gather from a resident cache, though layers write their rows later."""
    plan, stream = prefill_plan(workspace_rows), Streams(monkeypatch).side if late else None
    host = host_cache(3)
    resident = PagedCache.allocate(FP8_DS_MLA, 16, PAGE_SIZE, num_layers=3)
    for layer in range(3):
        resident.layer(layer).data.copy_(host.layer(layer).data)
    context = HostContext(host, max_rows=workspace_rows, ahead=ahead, stream=stream)
    assert context.memory_bytes == (ahead + 1) * workspace_rows * 576 * 2
    q = torch.randn(plan.num_tokens, HEADS, 576).bfloat16()
    for _ in range(2):
        context.start(plan)
        for layer in range(3):
            new = torch.randn(plan.num_tokens, 576)
            for cache in (resident.layer(layer), host.layer(layer)):
                cache.write(plan.slot_mapping, new)
            for number, chunk in enumerate(plan.prefill_chunks):
                rows = context.rows(layer, number)
                expected = torch.empty_like(rows)
                gather_dequant(
                    resident.layer(layer),
                    chunk.page_table,
                    chunk.seq_lens,
                    chunk.workspace_starts,
                    out=expected,
                )
                assert torch.equal(rows, expected)
                slots = torch.arange(len(rows), dtype=torch.int32)[None].repeat(plan.num_tokens, 1)
                out = sparse_prefill(q, rows, slots, softmax_scale=0.1)[0]
                assert torch.equal(out, sparse_prefill(q, expected, slots, softmax_scale=0.1)[0])


@pytest.mark.parametrize("format", [FP8_DS_MLA, BF16_576, e4m3_format()])
@pytest.mark.parametrize("max_rows", [40, 13])
@pytest.mark.parametrize("late", [False, True])
def test_few_tokens_fetch_what_they_select(monkeypatch, format, max_rows, late):
    """With the bits of attention over a resident cache, in pieces of several tokens or of one."""
    streams = Streams(monkeypatch) if late else None
    host, plan = host_cache(2, format), prefill_plan(None)
    context = HostContext(host, max_rows=max_rows, stream=streams.side if late else None)
    q = torch.randn(plan.num_tokens, HEADS, 576).bfloat16()
    chosen = torch.full((plan.num_tokens, 8), -1)
    for token, position in enumerate(plan.positions.tolist()):
        picked = torch.randperm(position + 1)[:8].sort().values
        chosen[token, : len(picked)] = picked
    slots = to_slots(chosen, plan.page_table, plan.request_ids, page_size=PAGE_SIZE)
    for layer in (1, 0):
        pieces = 0
        for tokens, rows, indices in context.selected(layer, chosen, plan):
            assert rows.page_size == 1
            ours = sparse_prefill(q[tokens], rows, indices, softmax_scale=0.1)
            cache = PagedCache(host.layer(layer).data, format, host.layer(layer).scales)
            theirs = sparse_prefill(q[tokens], cache, slots[tokens], softmax_scale=0.1)
            assert all(map(torch.equal, ours, theirs))
            pieces += 1
        most = max_rows * 1152 // format.page_bytes(1) // 8
        if format.scales_in == "tensor":
            most = max_rows * 1152 // (576 + 20) // 16 * 16 // 8
        assert pieces == -(-plan.num_tokens // most)
    assert not late or not streams.queue


def selection(plan, topk=8):
    chosen = torch.full((plan.num_tokens, topk), -1, dtype=torch.int32)
    for token, position in enumerate(plan.positions.tolist()):
        picked = torch.randperm(position + 1)[:topk].sort().values
        chosen[token, : len(picked)] = picked
    return chosen


@pytest.mark.parametrize("format", [FP8_DS_MLA, BF16_576, e4m3_format()])
@pytest.mark.parametrize("workspace_rows", [40, 23])
@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("late", [False, True])
def test_many_tokens_copy_whole_contexts(monkeypatch, format, workspace_rows, ahead, late):
    """A layer ahead, though layers write their rows later; in any order, too."""
    streams = Streams(monkeypatch) if late else None
    host, plan = host_cache(3, format), prefill_plan(workspace_rows).prefills
    options = {"ahead": ahead, "stream": streams.side if late else None}
    context = HostContext(host, max_rows=workspace_rows, **options)
    q, copies = torch.randn(plan.num_tokens, HEADS, 576).bfloat16(), []
    monkeypatch.setattr(
        HostContext, "_copy", lambda self, item, copy=HostContext._copy: (
            copies.append(item // len(plan.prefill_chunks)), copy(self, item)
        )
    )  # fmt: skip
    for layer in (0, 1, 2, 1, 2, 2, 0):
        host.layer(layer).write(plan.slot_mapping, torch.randn(plan.num_tokens, 576))
        chosen = selection(plan)
        slots = to_slots(chosen, plan.page_table, plan.request_ids, page_size=PAGE_SIZE)
        seen = []
        for tokens, rows, indices in context.selected(layer, chosen, plan):
            assert rows.page_size == 1
            ours = sparse_prefill(q[tokens], rows, indices, softmax_scale=0.1)
            cache = PagedCache(host.layer(layer).data, format, host.layer(layer).scales)
            theirs = sparse_prefill(q[tokens], cache, slots[tokens], softmax_scale=0.1)
            assert all(map(torch.equal, ours, theirs))
            seen.append(tokens)
        assert seen == [chunk.tokens for chunk in plan.prefill_chunks]
    if ahead == len(plan.prefill_chunks) == 1:
        assert copies == [0, 1, 2, 1, 2, 2, 0, 1]


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("chunked", [False, True], ids=["selected", "whole contexts"])
def test_a_shard_brings_its_own_rows(interleave, chunked):
    """Attention over them is that over the rank's part of the selection in a resident cache."""
    for rank in range(3):
        shard = ContextShard(rank, 3, interleave)
        plan = prefill_plan(40, shard=shard).prefills
        plan = plan if chunked else replace(plan, prefill_chunks=())
        host, chosen = host_cache(2), selection(plan)
        context = HostContext(host, max_rows=40, shard=shard)
        own, _ = own_positions(chosen, shard=shard)
        slots = to_slots(own[:, 0], plan.page_table, plan.request_ids, page_size=PAGE_SIZE)
        q = torch.randn(plan.num_tokens, HEADS, 576).bfloat16()
        for layer in range(2):
            cache = PagedCache(host.layer(layer).data, host.format)
            for tokens, rows, indices in context.selected(layer, chosen, plan):
                ours = sparse_prefill(q[tokens], rows, indices, softmax_scale=0.1)
                theirs = sparse_prefill(q[tokens], cache, slots[tokens], softmax_scale=0.1)
                assert all(map(torch.equal, ours, theirs))
        assert (context._plan is plan) == chunked


@pytest.mark.parametrize("workspace_rows", [40, 9])
def test_a_shard_gathers_its_own_contexts(workspace_rows):
    """With the bits of a gather from the rank's rows, those of this step's tokens included."""
    for rank in range(3):
        shard = ContextShard(rank, 3, 2)
        plan, host = prefill_plan(workspace_rows, shard=shard), host_cache(2)
        context = HostContext(host, max_rows=workspace_rows, shard=shard)
        context.start(plan)
        own = plan.slot_mapping >= 0
        for layer in range(2):
            new = torch.randn(plan.num_tokens, 576)
            host.layer(layer).write(plan.slot_mapping[own], new[own])
            for number, chunk in enumerate(plan.prefill_chunks):
                rows = context.rows(layer, number)
                expected = torch.full_like(rows, torch.nan)
                lens, starts = chunk.seq_lens, chunk.workspace_starts
                gather_dequant(host.layer(layer), chunk.page_table, lens, starts, out=expected)
                gathered = ~expected.isnan().any(1)
                assert gathered.sum() == lens.sum()
                assert torch.equal(rows[gathered], expected[gathered])


def test_plans_of_other_ranks_are_refused():
    shard = ContextShard(1, 3)
    plan, other = prefill_plan(shard=shard), prefill_plan(shard=ContextShard(0, 3))
    with pytest.raises(ValueError, match=r"plan must have shard ContextShard\(rank=1.*rank=0"):
        HostContext(host_cache(), max_rows=40, shard=shard).start(other)
    with pytest.raises(ValueError, match=r"plan must have shard None, got ContextShard\(rank=1"):
        HostContext(host_cache(), max_rows=40).start(plan)


def test_a_fetch_keeps_its_lists_until_it_is_joined(monkeypatch):
    """Its stream may still read them when the caller leaves, as it does after an error."""
    streams = Streams(monkeypatch)
    host, plan = host_cache(), prefill_plan(None)
    context = HostContext(host, max_rows=13, stream=streams.side)
    lists = []
    monkeypatch.setattr(
        host_context,
        "fetch_rows",
        lambda source, target, *tensors: lists.append(weakref.ref(tensors[0]._base)),
    )
    chosen = torch.zeros(plan.num_tokens, 8, dtype=torch.int32)
    pieces = context.selected(0, chosen, plan)
    next(pieces)
    pieces.close()
    assert len(lists) == 2  # the second piece was on its way
    assert lists[1]() is not None
    joined = streams.joined
    for _ in context.selected(0, chosen, plan):
        pass
    assert lists[1]() is None
    assert streams.joined > joined


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_selection_that_is_left_fetches_the_rows_that_it_listed(monkeypatch):
    """On a GPU memory of the lists would be taken by the next tensors of their size."""
    host, plan = host_cache(device="cuda"), prefill_plan(None, "cuda")
    context = HostContext(host, max_rows=13)
    fetch = host_context.fetch_rows

    def late(*arguments):
        torch.cuda._sleep(100_000_000)
        fetch(*arguments)

    chosen = torch.zeros(plan.num_tokens, 8, dtype=torch.int32, device="cuda")
    chosen += plan.positions[:, None].int()
    pieces = context.selected(0, chosen, plan)
    monkeypatch.setattr(host_context, "fetch_rows", late)
    tokens, _, _ = next(pieces)
    pieces.close()
    for _ in range(8):
        torch.full((plan.num_tokens, 8), -1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    second = slice(tokens.stop, 2 * tokens.stop)
    slots = to_slots(chosen, plan.page_table, plan.request_ids, page_size=PAGE_SIZE)[second]
    fetched = _rows_in(context._buffers[1], FP8_DS_MLA).data.flatten(0, 1)
    expected = host.layer(0).data.flatten(0, 1)[slots.flatten().long()]
    assert torch.equal(fetched[: slots.numel()], expected)


def test_a_selection_begins_when_it_is_asked_for(monkeypatch):
    fetched = []
    monkeypatch.setattr(host_context, "fetch_rows", lambda *tensors: fetched.append(tensors))
    for plan in (prefill_plan(None).prefills, prefill_plan().prefills):
        context = HostContext(host_cache(), max_rows=40)
        pieces = context.selected(0, selection(plan), plan)
        assert len(fetched) == 1
        next(pieces)
        fetched.clear()


def test_selections_of_nothing():
    plan = prefill_plan(None)
    context, none = HostContext(host_cache(), max_rows=40), torch.zeros(15, 0, dtype=torch.int32)
    ((tokens, _, indices),) = context.selected(0, none, plan)
    assert (tokens, indices.shape) == (slice(0, 15), (15, 0))


def test_bytes_before_the_host_exists():
    context = HostContext(host_cache(), max_rows=40, ahead=2)
    assert HostContext.size(FP8_DS_MLA, max_rows=40, ahead=2) == context.memory_bytes


def test_when_few_tokens_select_few_rows():
    context = HostContext(host_cache(), max_rows=40)
    plan = prefill_plan().prefills  # 14 tokens over contexts of 35
    assert context.selects(plan, 1)
    assert not context.selects(plan, 2)
    assert HostContext(host_cache(), max_rows=40, shard=ContextShard(0, 2)).selects(plan, 2)


def test_errors_of_selected_rows():
    context, plan = HostContext(host_cache(), max_rows=40), prefill_plan(None)
    chosen = torch.zeros(plan.num_tokens, 8, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"topk_indices must have shape \[15, K\], got \[14, 8\]"):
        context.selected(0, chosen[1:], plan)
    with pytest.raises(ValueError, match="layer_idx must be below 2, got 2"):
        context.selected(2, chosen, plan)
    with pytest.raises(ValueError, match="max_rows must have room for the 90 rows of a token"):
        context.selected(0, torch.zeros(15, 90, dtype=torch.int32), plan)
    with pytest.raises(ValueError, match="plan must have chunks of at most 33 rows, got 35"):
        HostContext(host_cache(), max_rows=19).selected(0, chosen, prefill_plan())
    with pytest.raises(ValueError, match=r"shard must have no parts, got ContextShard\(rank=1"):
        HostContext(host_cache(), max_rows=40, shard=ContextShard(1, 2, parts=4))
    context.start(prefill_plan())
    context.selected(0, chosen, plan)
    with pytest.raises(ValueError, match=r"start\(plan\) must begin a step first, got layer 0"):
        context.rows(0)


def test_errors_of_contexts():
    host = host_cache()
    context = HostContext(host, max_rows=30)
    with pytest.raises(ValueError, match=r"start\(plan\) must begin a step first, got layer 0"):
        context.rows(0)
    with pytest.raises(ValueError, match="plan must have chunks of at most 30 rows, got 35"):
        context.start(prefill_plan())
    with pytest.raises(ValueError, match="plan must have prefill chunks, made with workspace_rows"):
        context.start(plan_of(9))
    context.start(prefill_plan(23))
    context.rows(0)
    with pytest.raises(
        ValueError, match="must come in order, layer 0, chunk 1 is next, got layer 1, chunk 0"
    ):
        context.rows(1)
    for layer, chunk in ((0, 1), (1, 0), (1, 1)):
        context.rows(layer, chunk)
    with pytest.raises(ValueError, match="must begin a step first, got layer 2, chunk 0"):
        context.rows(2)
    host.close()
    with pytest.raises(ValueError, match="host must be open"):
        context.start(prefill_plan(23))

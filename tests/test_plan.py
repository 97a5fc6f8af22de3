import dataclasses
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from sparsemla import (
    FP8_DS_MLA,
    ContextShard,
    PagedCache,
    gather_dequant,
    merge_states,
    own_positions,
    sparse_prefill,
    to_slots,
)
from sparsemla.plan import (
    Plan,
    PlanBuffers,
    plan_batch,
    plan_on_device,
    split_decodes_and_prefills,
    split_prefill_chunks,
)

PAGE_SIZE = 8


def shuffled_pages(num_requests, num_pages, seed=0):
    """A page table in which every page occurs once."""
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(num_requests * num_pages, generator=generator)
    return pages.to(torch.int32).view(num_requests, num_pages)


def plan_of(query_lens, seq_lens=None, *, workspace_rows=None, **kwargs):
    seq_lens = query_lens if seq_lens is None else seq_lens
    num_pages = max(1, -(-max(seq_lens, default=0) // PAGE_SIZE))
    page_table = shuffled_pages(len(query_lens), num_pages)
    return plan_batch(
        query_lens,
        seq_lens,
        page_table,
        page_size=PAGE_SIZE,
        workspace_rows=workspace_rows,
        **kwargs,
    )


def check_invariants(plan: Plan, query_lens, seq_lens):
    """Check the properties of every plan, computed token by token."""
    seq_lens = [s if q else 0 for q, s in zip(query_lens, seq_lens, strict=True)]
    request_ids = [b for b, q in enumerate(query_lens) for _ in range(q)]
    positions = [s - q + i for q, s in zip(query_lens, seq_lens, strict=True) for i in range(q)]
    padding = plan.num_tokens - len(request_ids)
    assert plan.num_requests == len(query_lens)
    assert plan.num_decodes + plan.num_prefills == plan.num_requests
    assert plan.num_decode_tokens + plan.num_prefill_tokens == plan.num_tokens
    assert plan.max_query_len == max(query_lens, default=0)
    assert plan.max_seq_len == max(seq_lens, default=0)
    assert plan.input_row_offsets.tolist() == [0, *itertools.accumulate(query_lens)]
    assert plan.seq_lens.tolist() == seq_lens
    assert plan.request_ids.tolist() == request_ids + [0] * padding
    assert plan.positions.tolist() == positions + [0] * padding
    slots = [
        int(plan.page_table[b, p // PAGE_SIZE]) * PAGE_SIZE + p % PAGE_SIZE
        for b, p in zip(request_ids, positions, strict=True)
    ]
    assert plan.slot_mapping.tolist() == slots + [-1] * padding


def check_chunks(plan: Plan, query_lens, workspace_rows):
    assert plan.prefill_request_ids is not None
    assert plan.workspace_starts is not None
    expected_ids = [
        max(b - plan.num_decodes, -1) for b, q in enumerate(query_lens) for _ in range(q)
    ]
    padding = plan.num_tokens - len(expected_ids)
    assert plan.prefill_request_ids.tolist() == expected_ids + [-1] * padding

    chunks = plan.prefill_chunks
    covered = [b for chunk in chunks for b in range(chunk.requests.start, chunk.requests.stop)]
    assert covered == list(range(plan.num_decodes, plan.num_requests))
    tokens = [t for chunk in chunks for t in range(chunk.tokens.start, chunk.tokens.stop)]
    assert tokens == list(range(plan.num_decode_tokens, sum(query_lens)))
    for chunk in chunks:
        lens = chunk.seq_lens.tolist()
        assert lens == plan.seq_lens[chunk.requests].tolist()
        assert chunk.num_workspace_rows == sum(lens) <= workspace_rows
        assert chunk.workspace_starts.tolist() == [0, *itertools.accumulate(lens)][:-1]
        assert torch.equal(chunk.page_table, plan.page_table[chunk.requests])
    for chunk, following in itertools.pairwise(chunks):
        first_of_next = int(following.seq_lens[0])
        assert chunk.num_workspace_rows + first_of_next > workspace_rows
    starts = [start for chunk in chunks for start in chunk.workspace_starts.tolist()]
    assert plan.workspace_starts.tolist() == starts


SPLIT_CASES = {
    "empty": ([], 1, True, (0, 0, 0, 0)),
    "empty-threshold-above-1": ([], 4, True, (0, 0, 0, 0)),
    "rule1-all-ones": ([1, 1, 1], 1, True, (3, 0, 3, 0)),
    "rule1-padding-inside": ([1, 0, 1, 0], 1, True, (4, 0, 2, 0)),
    "rule1-non-uniform-below-threshold": ([3, 1, 2], 4, False, (3, 0, 6, 0)),
    "rule1-needs-threshold-1-if-uniform": ([3, 1, 2], 4, True, (1, 2, 3, 3)),
    "rule2-all-prefill": ([7, 1, 9], 1, True, (0, 3, 0, 17)),
    "rule2-non-uniform": ([7, 1, 9], 4, False, (0, 3, 0, 17)),
    "rule2-equal-lengths-above-threshold": ([5, 5], 4, True, (0, 2, 0, 10)),
    "rule3-uniform-equal": ([3, 3, 3], 4, True, (3, 0, 9, 0)),
    "rule3-uniform-equal-or-padding": ([3, 3, 0, 0], 4, True, (4, 0, 6, 0)),
    "rule3-only-padding": ([0, 0], 4, True, (2, 0, 0, 0)),
    "rule3-uniform-shorter-is-prefill": ([3, 3, 2], 4, True, (2, 1, 6, 2)),
    "rule3-uniform-padding-is-no-prefill": ([2, 0, 3], 2, True, (2, 1, 2, 3)),
    "rule3-padding-first": ([0, 2, 2], 4, True, (1, 2, 0, 4)),
    "rule3-non-uniform-above-threshold": ([2, 4, 5, 9], 4, False, (2, 2, 6, 14)),
    "rule4-decode-behind-prefill": ([1, 6, 1, 1], 1, True, (1, 3, 1, 8)),
    "rule4-padding-behind-prefill": ([1, 6, 0], 1, True, (1, 2, 1, 6)),
}


@pytest.mark.parametrize(
    ("query_lens", "threshold", "uniform", "expected"), SPLIT_CASES.values(), ids=SPLIT_CASES
)
def test_split_decodes_and_prefills(query_lens, threshold, uniform, expected):
    split = split_decodes_and_prefills(
        query_lens, decode_threshold=threshold, require_uniform=uniform
    )
    assert split == expected
    assert all(type(number) is int for number in split)


CHUNK_CASES = {
    "none": ([], 30, []),
    "worked-example": ([10, 15, 20, 5], 30, [(0, 2), (2, 4)]),
    "exact-fit": ([10, 20, 30], 30, [(0, 2), (2, 3)]),
    "one-each": ([30, 30, 30], 30, [(0, 1), (1, 2), (2, 3)]),
    "all-in-one": ([1, 2, 3], 30, [(0, 3)]),
    "length-0-joins-a-full-chunk": ([30, 0, 0, 30], 30, [(0, 3), (3, 4)]),
    "length-0-first": ([0, 30, 1], 30, [(0, 2), (2, 3)]),
    "only-length-0": ([0, 0], 30, [(0, 2)]),
}


@pytest.mark.parametrize(("lens", "rows", "expected"), CHUNK_CASES.values(), ids=CHUNK_CASES)
def test_split_prefill_chunks(lens, rows, expected):
    assert split_prefill_chunks(lens, rows) == expected


def test_split_prefill_chunks_refuses_a_request_beyond_the_workspace():
    with pytest.raises(ValueError, match=r"got 30 rows and length 31 for prefill request 2"):
        split_prefill_chunks([10, 30, 31, 99], 30)


@pytest.mark.parametrize(
    "convert",
    [list, np.array, torch.tensor, lambda x: torch.tensor(x, dtype=torch.int32)],
    ids=["list", "numpy", "tensor-int64", "tensor-int32"],
)
def test_mixed_batch(convert):
    query_lens, seq_lens = [1, 1, 10, 4, 20, 5], [30, 9, 10, 15, 20, 5]
    page_table = shuffled_pages(6, 4)
    plan = plan_batch(
        convert(query_lens), convert(seq_lens), page_table, page_size=PAGE_SIZE, workspace_rows=30
    )
    assert (plan.num_decodes, plan.num_prefills, plan.decode_query_len) == (2, 4, 1)
    assert (plan.num_decode_tokens, plan.num_prefill_tokens) == (2, 39)
    assert [chunk.requests for chunk in plan.prefill_chunks] == [slice(2, 4), slice(4, 6)]
    assert [chunk.tokens for chunk in plan.prefill_chunks] == [slice(2, 16), slice(16, 41)]
    assert plan.workspace_starts is not None
    assert plan.workspace_starts.tolist() == [0, 10, 0, 20]
    assert plan.page_table is page_table
    check_invariants(plan, query_lens, seq_lens)
    check_chunks(plan, query_lens, 30)


def test_plan_tensors_have_their_dtypes_and_chunks_are_views():
    plan = plan_of([1, 5, 6], [9, 5, 12], workspace_rows=12)
    assert plan.prefill_request_ids is not None
    assert plan.workspace_starts is not None
    for tensor in (
        plan.input_row_offsets,
        plan.seq_lens,
        plan.page_table,
        plan.request_ids,
        plan.prefill_request_ids,
        plan.workspace_starts,
    ):
        assert tensor.dtype == torch.int32
    assert plan.positions.dtype == plan.slot_mapping.dtype == torch.int64
    second = plan.prefill_chunks[1]
    assert second.seq_lens.data_ptr() == plan.seq_lens[2:].data_ptr()
    assert second.page_table.data_ptr() == plan.page_table[2:].data_ptr()
    assert second.workspace_starts.data_ptr() == plan.workspace_starts[1:].data_ptr()


def test_page_table_may_be_a_slice():
    table = shuffled_pages(8, 16)
    plan = plan_batch([1, 9], [12, 30], table[2:4, :5], page_size=PAGE_SIZE, workspace_rows=None)
    check_invariants(plan, [1, 9], [12, 30])


def test_negative_page_gives_no_slot():
    table = torch.tensor([[4, -1]], dtype=torch.int32)
    plan = plan_batch([3], [10], table, page_size=PAGE_SIZE, workspace_rows=None)
    assert plan.slot_mapping.tolist() == [4 * PAGE_SIZE + 7, -1, -1]


def test_slots_beyond_int32_are_int64():
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    plan = plan_batch([1], [64], table, page_size=64, workspace_rows=None)
    assert plan.slot_mapping.tolist() == [2**37 - 1]


def test_no_workspace_plans_no_chunks():
    plan = plan_of([1, 5], [9, 5])
    assert plan.num_prefills == 1
    assert plan.prefill_chunks == ()
    assert plan.prefill_request_ids is None
    assert plan.workspace_starts is None


def test_no_prefill_plans_no_chunks():
    plan = plan_of([1, 1], [9, 5], workspace_rows=1)
    assert plan.prefill_chunks == ()
    assert plan.prefill_request_ids is None
    assert plan.workspace_starts is None


def test_decodes_may_be_longer_than_the_workspace():
    plan = plan_of([1, 5], [99, 5], workspace_rows=5)
    check_chunks(plan, [1, 5], 5)


def test_empty_batch():
    plan = plan_of([])
    assert (plan.num_requests, plan.num_tokens, plan.decode_query_len) == (0, 0, 0)
    assert plan.input_row_offsets.tolist() == [0]
    assert plan.slot_mapping.shape == (0,)


def test_non_uniform_decodes():
    plan = plan_of(
        [1, 3, 2, 9], [9, 9, 9, 9], decode_threshold=4, require_uniform=False, workspace_rows=9
    )
    assert (plan.num_decodes, plan.num_decode_tokens, plan.decode_query_len) == (3, 6, 3)
    check_invariants(plan, [1, 3, 2, 9], [9, 9, 9, 9])
    check_chunks(plan, [1, 3, 2, 9], 9)


@pytest.mark.parametrize("num_padded_tokens", [None, 8], ids=["implied", "given"])
def test_padding_requests_of_a_decode_batch_add_padding_tokens(num_padded_tokens):
    query_lens, seq_lens = [2, 2, 0, 0], [9, 2, 0, 7]
    plan = plan_of(query_lens, seq_lens, decode_threshold=2, num_padded_tokens=num_padded_tokens)
    assert (plan.num_decodes, plan.decode_query_len, plan.num_decode_tokens) == (4, 2, 8)
    assert plan.input_row_offsets.tolist() == [0, 2, 4, 4, 4]
    assert plan.seq_lens.tolist() == [9, 2, 0, 0]
    check_invariants(plan, query_lens, seq_lens)


def test_padding_requests_and_tokens_of_a_mixed_batch():
    query_lens, seq_lens = [1, 1, 6, 0], [9, 2, 6, 0]
    plan = plan_of(query_lens, seq_lens, workspace_rows=6, num_padded_tokens=16)
    assert (plan.num_decodes, plan.num_prefills) == (2, 2)
    assert (plan.num_decode_tokens, plan.num_prefill_tokens) == (2, 14)
    (chunk,) = plan.prefill_chunks
    assert (chunk.requests, chunk.tokens) == (slice(2, 4), slice(2, 8))
    check_invariants(plan, query_lens, seq_lens)
    check_chunks(plan, query_lens, 6)


def test_padding_request_may_have_a_length_beyond_the_table():
    table = shuffled_pages(2, 1)
    plan = plan_batch([1, 0], [3, 999], table, page_size=PAGE_SIZE, workspace_rows=None)
    assert plan.seq_lens.tolist() == [3, 0]
    assert plan.max_seq_len == 3


def test_batch_of_padding_requests_only():
    plan = plan_of([0, 0], [0, 0])
    assert (plan.num_decodes, plan.num_tokens, plan.decode_query_len) == (2, 0, 0)


@st.composite
def batches(draw):
    """Decodes, then prefills, then padding, as an engine orders them."""
    decode_threshold = draw(st.integers(1, 4))
    decode_len = draw(st.integers(1, decode_threshold))
    decodes = [decode_len] * draw(st.integers(0, 5))
    prefills = draw(st.lists(st.integers(1, 20), max_size=6))
    query_lens = decodes + prefills + [0] * draw(st.integers(0, 3))
    seq_lens = [q + draw(st.integers(0, 30)) if q else 0 for q in query_lens]
    workspace_rows = max(seq_lens, default=0) + draw(st.integers(0, 40))
    return query_lens, seq_lens, workspace_rows, decode_threshold


@given(batch=batches(), uniform=st.booleans(), extra=st.integers(0, 3), persistent=st.booleans())
def test_plans_of_random_batches_keep_the_invariants(batch, uniform, extra, persistent):
    query_lens, seq_lens, workspace_rows, decode_threshold = batch
    split = split_decodes_and_prefills(
        query_lens, decode_threshold=decode_threshold, require_uniform=uniform
    )
    # A uniform decode batch fixes its own number of tokens.
    padded = sum(query_lens) + extra if split[1] or not uniform else None
    plan = plan_of(
        query_lens,
        seq_lens,
        workspace_rows=workspace_rows,
        decode_threshold=decode_threshold,
        require_uniform=uniform,
        num_padded_tokens=padded,
        buffers=PlanBuffers(16, 400, 8, "cpu") if persistent else None,
    )
    assert (plan.num_decodes, plan.num_prefills) == split[:2]
    if split[1]:
        assert plan.num_decode_tokens == split[2]
    if uniform:
        assert plan.num_decode_tokens == plan.num_decodes * plan.decode_query_len
    check_invariants(plan, query_lens, seq_lens)
    if plan.num_prefills:
        check_chunks(plan, query_lens, workspace_rows)


@given(
    lens=st.lists(st.integers(0, 6), max_size=8),
    decode_threshold=st.integers(1, 5),
    uniform=st.booleans(),
)
def test_split_of_random_lengths_keeps_the_invariants(lens, decode_threshold, uniform):
    num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens = split_decodes_and_prefills(
        lens, decode_threshold=decode_threshold, require_uniform=uniform
    )
    assert num_decodes + num_prefills == len(lens)
    assert num_decode_tokens == sum(lens[:num_decodes])
    assert num_prefill_tokens == sum(lens[num_decodes:])
    decode_lens = set(lens[:num_decodes])
    assert all(length <= decode_threshold for length in decode_lens)
    if uniform:
        assert len(decode_lens - {0}) <= 1
    if num_prefills:
        assert lens[num_decodes] > 0


@given(lens=st.lists(st.integers(0, 9), max_size=12), workspace_rows=st.integers(9, 30))
def test_chunks_of_random_lengths_are_greedy(lens, workspace_rows):
    bounds = split_prefill_chunks(lens, workspace_rows)
    assert [i for start, stop in bounds for i in range(start, stop)] == list(range(len(lens)))
    assert all(start < stop for start, stop in bounds)
    assert all(sum(lens[start:stop]) <= workspace_rows for start, stop in bounds)
    assert all(sum(lens[start:stop]) + lens[stop] > workspace_rows for start, stop in bounds[:-1])


def device_tensors(plan):
    return {
        field.name: getattr(plan, field.name)
        for field in dataclasses.fields(plan)
        if isinstance(getattr(plan, field.name), torch.Tensor)
    }


def test_buffers_keep_their_addresses():
    buffers = PlanBuffers(8, 64, 8, "cpu")
    large = plan_of([1, 1, 9, 20], [60, 9, 9, 30], workspace_rows=30, buffers=buffers)
    small = plan_of([1, 2], [3, 4], workspace_rows=4, buffers=buffers)
    assert device_tensors(large).keys() == device_tensors(small).keys()
    for name, tensor in device_tensors(small).items():
        assert tensor.data_ptr() == getattr(buffers, name).data_ptr(), name
        assert tensor.data_ptr() == getattr(large, name).data_ptr(), name
        assert tensor.stride() == getattr(large, name).stride(), name


def test_buffers_clear_stale_tails():
    buffers = PlanBuffers(8, 64, 8, "cpu")
    plan_of([1, 1, 9, 20], [60, 9, 9, 30], workspace_rows=30, buffers=buffers)
    plan = plan_of([1, 2], [3, 4], workspace_rows=4, buffers=buffers)
    check_invariants(plan, [1, 2], [3, 4])
    check_chunks(plan, [1, 2], 4)
    assert buffers.input_row_offsets.tolist() == [0, 1] + [3] * 7
    assert buffers.seq_lens.tolist() == [3, 4] + [0] * 6
    assert not buffers.request_ids[3:].any()
    assert not buffers.positions[3:].any()
    assert (buffers.slot_mapping[3:] == -1).all()
    assert (buffers.prefill_request_ids[3:] == -1).all()
    assert (buffers.workspace_starts[1:] == 0).all()
    assert (buffers.page_table[:2, 1:] == -1).all()


def test_new_buffers_hold_padding():
    buffers = PlanBuffers(2, 4, 3, "cpu")
    assert not buffers.request_ids.any()
    assert not buffers.seq_lens.any()
    assert (buffers.slot_mapping == -1).all()
    assert (buffers.prefill_request_ids == -1).all()


def test_page_table_may_be_a_view_of_the_buffers():
    buffers = PlanBuffers(4, 8, 3, "cpu")
    buffers.page_table.copy_(shuffled_pages(4, 3))
    expected = buffers.page_table[:2].clone()
    plan = plan_batch(
        [1, 1],
        [20, 9],
        buffers.page_table[:2],
        page_size=PAGE_SIZE,
        workspace_rows=None,
        buffers=buffers,
    )
    assert torch.equal(plan.page_table, expected)
    check_invariants(plan, [1, 1], [20, 9])


def test_refused_batch_does_not_change_the_buffers():
    buffers = PlanBuffers(4, 64, 8, "cpu")
    plan = plan_of([1, 9], [12, 9], workspace_rows=9, buffers=buffers)
    with pytest.raises(ValueError, match="workspace_rows"):
        plan_of([1, 9], [3, 10], workspace_rows=9, buffers=buffers)
    check_invariants(plan, [1, 9], [12, 9])


def test_plan_is_immutable():
    plan = plan_of([1, 5], [9, 5], workspace_rows=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.num_decodes = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.prefill_chunks[0].num_workspace_rows = 2


ERROR_CASES = {
    "float-lengths": (
        {"query_lens": [1.0, 1.0]},
        TypeError,
        "query_lens must hold integers, got float64",
    ),
    "bool-lengths": ({"query_lens": [True, True]}, TypeError, "query_lens must hold integers"),
    "two-dimensional-lengths": (
        {"seq_lens": [[9, 9]]},
        ValueError,
        r"seq_lens must have one dimension, got shape \[1, 2\]",
    ),
    "lengths-on-a-device": (
        {"seq_lens": torch.zeros(2, dtype=torch.int32, device="meta")},
        ValueError,
        "seq_lens must be on the host, got a tensor on meta",
    ),
    "negative-query": (
        {"query_lens": [1, -2]},
        ValueError,
        "query_lens must not be negative, got -2 for request 1",
    ),
    "negative-length": (
        {"seq_lens": [-1, 9]},
        ValueError,
        "seq_lens must not be negative, got -1 for request 0",
    ),
    "lengths-that-disagree": (
        {"seq_lens": [9]},
        ValueError,
        "seq_lens must have one length for each of 2 requests, got 1",
    ),
    "length-below-query": (
        {"query_lens": [1, 10]},
        ValueError,
        "got length 9 and 10 query tokens for request 1",
    ),
    "length-beyond-table": (
        {"seq_lens": [16, 17]},
        ValueError,
        "seq_lens must be at most 16, 2 pages of 8 tokens, got 17 for request 1",
    ),
    "table-dtype": (
        {"page_table": torch.zeros(2, 2)},
        TypeError,
        "page_table must have dtype int32, int64 or uint32, got torch.float32",
    ),
    "table-rows": (
        {"page_table": torch.zeros(3, 2, dtype=torch.int32)},
        ValueError,
        r"page_table must have shape \[2, pages per request\], got \[3, 2\]",
    ),
    "table-rank": (
        {"page_table": torch.zeros(2, dtype=torch.int32)},
        ValueError,
        r"page_table must have shape \[2, pages per request\], got \[2\]",
    ),
    "no-table": ({"page_table": None}, TypeError, "page_table must be a tensor, got NoneType"),
    "no-query-lengths": (
        {"query_lens": None},
        ValueError,
        "either query_lens or input_row_offsets must be given, got neither",
    ),
    "lengths-and-offsets": (
        {"input_row_offsets": [0, 1, 2]},
        ValueError,
        "either query_lens or input_row_offsets must be given, got both",
    ),
    "lengths-and-cache-lengths": (
        {"cache_lengths": [8, 8]},
        ValueError,
        "either seq_lens or cache_lengths must be given, got both",
    ),
    "offsets-not-from-0": (
        {"query_lens": None, "input_row_offsets": [1, 2, 3]},
        ValueError,
        r"input_row_offsets must ascend from 0, got \[1, 2, 3\]",
    ),
    "descending-offsets": (
        {"query_lens": None, "input_row_offsets": [0, 2, 1]},
        ValueError,
        r"input_row_offsets must ascend from 0, got \[0, 2, 1\]",
    ),
    "no-offsets": (
        {"query_lens": None, "input_row_offsets": []},
        ValueError,
        r"input_row_offsets must ascend from 0, got \[\]",
    ),
    "cache-lengths-that-disagree": (
        {"seq_lens": None, "cache_lengths": [8]},
        ValueError,
        "cache_lengths must have one length for each of 2 requests, got 1",
    ),
    "cache-length-beyond-table": (
        {"seq_lens": None, "cache_lengths": torch.tensor([9, 2**32 - 1]).to(torch.uint32)},
        ValueError,
        "got 4294967296 for request 1",
    ),
    "table-list": ({"page_table": [[0, 1], [2, 3]]}, TypeError, "page_table must be a tensor"),
    "page-size-float": ({"page_size": 8.0}, TypeError, "page_size must be an integer, got float"),
    "page-size": ({"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
    "too-few-padded-tokens": (
        {"query_lens": [1, 5], "num_padded_tokens": 5},
        ValueError,
        "num_padded_tokens must be at least 6, the sum of query_lens, got 5",
    ),
    "padded-tokens-of-a-decode-batch": (
        {"num_padded_tokens": 3},
        ValueError,
        "num_padded_tokens must be 2 for 2 decode requests of 1 query tokens, got 3",
    ),
    "padding-before-a-decode": (
        {"query_lens": [0, 1]},
        ValueError,
        "query_lens must list padding requests after all others, got length 0 for request 0",
    ),
    "padding-before-a-prefill": (
        {"query_lens": [0, 5]},
        ValueError,
        "query_lens must list padding requests after all others, got length 0 for request 0",
    ),
    "prefill-beyond-workspace": (
        {"query_lens": [1, 5], "workspace_rows": 8},
        ValueError,
        "got 8 rows and length 9 for prefill request 0",
    ),
    "shard-kind": (
        {"shard": 2},
        TypeError,
        "shard must be a ContextShard, got int",
    ),
    "length-beyond-the-pages-of-ranks": (
        {"seq_lens": [32, 33], "shard": ContextShard(1, 2)},
        ValueError,
        "seq_lens must be at most 32, 2 pages of 8 tokens on each of 2 ranks, got 33 for request 1",
    ),
    "prefill-beyond-the-workspaces-of-ranks": (
        {"query_lens": [1, 5], "workspace_rows": 4, "shard": ContextShard(1, 2)},
        ValueError,
        "got 4 rows and length 5 for prefill request 0",
    ),
    "buffers-requests": (
        {"buffers": PlanBuffers(1, 8, 8, "cpu")},
        ValueError,
        "buffers must have max_requests of at least 2, got 1",
    ),
    "buffers-tokens": (
        {"buffers": PlanBuffers(8, 1, 8, "cpu")},
        ValueError,
        "buffers must have max_tokens of at least 2, got 1",
    ),
    "buffers-pages": (
        {"buffers": PlanBuffers(8, 8, 1, "cpu")},
        ValueError,
        "buffers must have max_pages_per_request of at least 2, got 1",
    ),
    "buffers-device": (
        {"buffers": PlanBuffers(8, 8, 8, "meta")},
        ValueError,
        "buffers must be on page_table's device cpu, got meta",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), ERROR_CASES.values(), ids=ERROR_CASES)
def test_plan_batch_refuses_wrong_arguments(change, error, message):
    arguments = {
        "query_lens": [1, 1],
        "seq_lens": [9, 9],
        "page_table": torch.zeros(2, 2, dtype=torch.int32),
        "page_size": 8,
        "workspace_rows": None,
    } | change
    with pytest.raises(error, match=message):
        plan_batch(**arguments)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_plan_batch_does_not_synchronise():
    page_table = shuffled_pages(4, 4).cuda()
    buffers = PlanBuffers(8, 64, 8, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plans = [
            plan_batch(
                [1, 1, 9, 20],
                [30, 9, 9, 30],
                page_table,
                page_size=PAGE_SIZE,
                workspace_rows=30,
                num_padded_tokens=32,
                buffers=chosen,
            )
            for chosen in (None, buffers)
        ]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for plan in plans:
        assert all(tensor.is_cuda for tensor in device_tensors(plan).values())
        check_invariants(plan, [1, 1, 9, 20], [30, 9, 9, 30])
        check_chunks(plan, [1, 1, 9, 20], 30)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_captured_graph_replays_with_the_next_plan():
    num_slots = 4 * 4 * PAGE_SIZE
    cache = torch.zeros(num_slots + 1, dtype=torch.int64, device="cuda")
    page_table = shuffled_pages(4, 4).cuda()
    buffers = PlanBuffers(4, 8, 4, "cuda")

    def plan_decodes(query_lens, seq_lens):
        return plan_batch(
            query_lens,
            seq_lens,
            page_table,
            page_size=PAGE_SIZE,
            workspace_rows=None,
            decode_threshold=2,
            buffers=buffers,
        )

    plan = plan_decodes([2, 2, 2, 2], [32, 32, 32, 32])

    def write_positions():
        # Padding tokens write to the row behind the cache.
        slots = torch.where(plan.slot_mapping >= 0, plan.slot_mapping, num_slots)
        cache.index_copy_(0, slots, plan.positions + 1)

    write_positions()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        write_positions()

    for query_lens, seq_lens in (([2, 2, 2, 2], [9, 17, 2, 31]), ([2, 2, 0, 0], [5, 20, 0, 0])):
        cache.zero_()
        following = plan_decodes(query_lens, seq_lens)
        graph.replay()
        check_invariants(following, query_lens, seq_lens)
        num_tokens = sum(query_lens)
        written = cache[following.slot_mapping[:num_tokens]]
        assert torch.equal(written, following.positions[:num_tokens] + 1)
        assert cache[:num_slots].count_nonzero() == num_tokens


MIXED_BATCHES = {
    "mixed": ([1, 1, 9, 20], [30, 9, 9, 30], {}),
    "padded tokens": ([1, 1, 9, 20], [30, 9, 9, 30], {"num_padded_tokens": 40}),
    "only decodes": ([2, 2, 0], [9, 2, 0], {"decode_threshold": 2}),
    "only prefills": ([5, 4], [5, 9], {}),
    "decodes of any length": (
        [3, 1, 2, 9],
        [9, 5, 2, 30],
        {"decode_threshold": 4, "require_uniform": False},
    ),
    "padding requests": ([1, 4, 0, 0], [3, 9, 0, 0], {}),
}


@pytest.mark.parametrize("workspace_rows", [None, 30])
@pytest.mark.parametrize("batch", MIXED_BATCHES.values(), ids=MIXED_BATCHES.keys())
def test_mixed_plan_splits_into_decodes_and_prefills(batch, workspace_rows):
    query_lens, seq_lens, options = batch
    plan = plan_of(query_lens, seq_lens, workspace_rows=workspace_rows, **options)
    split, first = plan.num_decodes, plan.num_decode_tokens
    decodes, prefills = plan.decodes, plan.prefills
    assert decodes.num_tokens + prefills.num_tokens == plan.num_tokens
    for part, own, lens in (
        (decodes, query_lens[:split], seq_lens[:split]),
        (prefills, query_lens[split:], seq_lens[split:]),
    ):
        bounds = {"max_seq_len": max(lens, default=0)} if part is decodes else {}
        check_invariants(dataclasses.replace(part, **bounds), own, lens)
    context = max(
        (s - q for q, s in zip(query_lens[split:], seq_lens[split:], strict=True)), default=0
    )
    assert prefills.max_context_len == context
    assert (decodes.num_prefills, prefills.num_decodes) == (0, 0)
    assert decodes.decode_query_len == plan.decode_query_len
    if prefills.prefill_chunks:
        check_chunks(prefills, query_lens[split:], workspace_rows)
        tokens = [chunk.tokens for chunk in plan.prefill_chunks]
        assert [
            slice(chunk.tokens.start + first, chunk.tokens.stop + first)
            for chunk in prefills.prefill_chunks
        ] == tokens
    assert plan.prefills is prefills  # made once, for all layers


def test_clamp_topk():
    plan = plan_of([1, 3, 2], [20, 5, 2], decode_threshold=3, require_uniform=False)
    assert plan.clamp_topk(8).tolist() == [8, 5, 5, 5, 2, 2]
    for dtype in (torch.int32, torch.int64, torch.uint32):
        own = torch.tensor([3, 9, 1]).to(dtype)
        lengths = plan.clamp_topk(own)
        assert lengths.tolist() == [3, 5, 5, 5, 1, 1]
        assert lengths.dtype == torch.int32
    most = torch.tensor([-1] * 3, dtype=torch.int32).view(torch.uint32)
    assert plan.clamp_topk(most).tolist() == [20, 5, 5, 5, 2, 2]
    for wrong in (None, 2.5, torch.ones(3)):
        with pytest.raises((TypeError, ValueError), match="topk must"):
            plan.clamp_topk(wrong)
    with pytest.raises(ValueError, match=r"topk must have shape \[B\] = \[3\], got \[2\]"):
        plan.clamp_topk(torch.ones(2, dtype=torch.int32))


def check_entries(entries: Plan, plan: Plan, ratio, page_size):
    """Check the plan of entries token by token against the plan of tokens."""
    real = int(plan.input_row_offsets[-1])
    expected = []
    for token, (position, request) in enumerate(
        zip(plan.positions.tolist(), plan.request_ids.tolist(), strict=True)
    ):
        entry, rest = divmod(position + 1, ratio)
        page = int(entries.page_table[request, (entry - 1) // page_size]) if entry else -1
        written = token < real and rest == 0 and page >= 0
        expected.append(page * page_size + (entry - 1) % page_size if written else -1)
    assert entries.slot_mapping.tolist() == expected
    assert entries.slot_mapping.dtype == torch.int64
    assert (entries.ratio, entries.page_size) == (ratio, page_size)
    assert entries.prefill_chunks == ()
    assert entries.workspace_starts is entries.prefill_request_ids is None
    for name in ("positions", "request_ids", "input_row_offsets", "seq_lens"):
        assert getattr(entries, name) is getattr(plan, name)
    return expected


def entry_pages(plan, ratio, page_size):
    """A page table with just enough pages for the entries of a batch."""
    return shuffled_pages(plan.num_requests, max(1, -(-(plan.max_seq_len // ratio) // page_size)))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize(("ratio", "page_size"), [(1, 4), (3, 2), (4, 1), (4, 64)])
@pytest.mark.parametrize("batch", MIXED_BATCHES.values(), ids=MIXED_BATCHES.keys())
def test_plans_of_entries(batch, ratio, page_size, persistent):
    query_lens, seq_lens, options = batch
    plan = plan_of(query_lens, seq_lens, workspace_rows=30, **options)
    table = entry_pages(plan, ratio, page_size)
    buffers = PlanBuffers(8, 64, 32, "cpu") if persistent else None
    if persistent:
        buffers.slot_mapping.fill_(7)
    entries = plan.entries(table, ratio=ratio, page_size=page_size, buffers=buffers)
    expected = check_entries(entries, plan, ratio, page_size)
    assert torch.equal(entries.page_table[:, : table.shape[1]], table)
    if persistent:
        assert entries.slot_mapping.data_ptr() == buffers.slot_mapping.data_ptr()
        assert entries.page_table.data_ptr() == buffers.page_table.data_ptr()
        assert (buffers.slot_mapping[plan.num_tokens :] == -1).all()
    # The two parts of the plan, and plans of entries of the two parts.
    first = plan.num_decode_tokens
    assert entries.decodes.slot_mapping.tolist() == expected[:first]
    assert entries.prefills.slot_mapping.tolist() == expected[first:]
    for part, requests, tokens in (
        (plan.decodes, slice(plan.num_decodes), slice(first)),
        (plan.prefills, slice(plan.num_decodes, None), slice(first, None)),
    ):
        own = part.entries(table[requests], ratio=ratio, page_size=page_size)
        assert own.slot_mapping.tolist() == expected[tokens]


def test_plans_of_entries_at_the_ends_of_windows():
    lens = [3, 4, 5, 8, 127, 128, 129, 256, 257]
    plan = plan_of([1] * len(lens), lens)
    for ratio, complete in ((4, [4, 8, 128, 256]), (128, [128, 256])):
        table = torch.arange(len(lens), dtype=torch.int32)[:, None]
        entries = plan.entries(table, ratio=ratio, page_size=64)
        check_entries(entries, plan, ratio, 64)
        written = zip(lens, (entries.slot_mapping >= 0).tolist(), strict=True)
        assert [n for n, wrote in written if wrote] == complete
        assert entries.clamp_topk(2).tolist() == [min(n // ratio, 2) for n in lens]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ratio": 0}, ValueError, "ratio must be at least 1, got 0"),
        ({"page_size": 2.0}, TypeError, "page_size must be an integer"),
        ({"page_table": [[0]]}, TypeError, "page_table must be a tensor, got list"),
        (
            {"page_table": torch.zeros(2, 9, dtype=torch.int32)},
            ValueError,
            r"page_table must have shape \[3, pages per request\], got \[2, 9\]",
        ),
        (
            {"page_table": torch.zeros(3, 9, dtype=torch.int32, device="meta")},
            ValueError,
            "page_table must be on the plan's device cpu, got meta",
        ),
        (
            {"page_table": torch.zeros(3, 2, dtype=torch.int32)},
            ValueError,
            "room for 5 entries, one for every 4 of 20 tokens, got 2 pages of 2",
        ),
        ({"buffers": 3}, TypeError, "buffers must be a PlanBuffers, got int"),
        (
            {"buffers": PlanBuffers(3, 5, 9, "cpu")},
            ValueError,
            "buffers must have max_tokens of at least 6, got 5",
        ),
    ],
)
def test_plans_of_entries_refuse_wrong_arguments(change, error, message):
    plan = plan_of([1, 3, 2], [20, 5, 2])
    table = torch.zeros(3, 3, dtype=torch.int32)
    with pytest.raises(error, match=message):
        plan.entries(**{"page_table": table, "ratio": 4, "page_size": 2} | change)


DEVICE_BATCHES = {
    "decodes": ([1, 1, 1], [9, 3, 12], {"num_tokens": 3, "max_query_len": 1}),
    "drafts": ([3, 3], [9, 3], {"num_tokens": 6, "max_query_len": 3}),
    "any decodes": ([3, 1, 2], [9, 3, 12], {"num_tokens": 9, "max_query_len": 3}),
    "padding requests": ([1, 1, 0, 0], [9, 3, 7, 0], {"num_tokens": 4, "max_query_len": 1}),
    "mixed": ([1, 1, 9], [9, 3, 12], {"num_tokens": 12, "max_query_len": 9, "num_decodes": 2}),
    "mixed drafts": (
        [2, 2, 9, 1],
        [9, 3, 12, 8],
        {"num_tokens": 14, "max_query_len": 9, "num_decodes": 2, "decode_query_len": 2},
    ),
    "prefills": ([4, 9], [4, 12], {"num_tokens": 13, "max_query_len": 9, "num_decodes": 0}),
    "empty": ([], [], {"num_tokens": 0, "max_query_len": 0}),
    "padding tokens alone": ([], [], {"num_tokens": 3, "max_query_len": 0}),
    "empty requests": ([0, 2, 0, 1], [0, 5, 0, 2], {"num_tokens": 3, "max_query_len": 2}),
}
by_device_batch = pytest.mark.parametrize(
    "batch", DEVICE_BATCHES.values(), ids=DEVICE_BATCHES.keys()
)


def lengths_and_table(query_lens, seq_lens, dtype=torch.int32):
    table = shuffled_pages(len(query_lens), 2)
    return torch.tensor(query_lens).to(dtype), torch.tensor(seq_lens).to(dtype), table


@by_device_batch
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32])
@pytest.mark.parametrize("persistent", [False, True])
def test_plan_on_device_keeps_the_invariants(batch, dtype, persistent):
    query_lens, seq_lens, bounds = batch
    buffers = PlanBuffers(6, 20, 3, "cpu") if persistent else None
    if persistent:
        plan_on_device(
            *lengths_and_table([1] * 6, [5] * 6),
            page_size=PAGE_SIZE,
            num_tokens=20,
            max_query_len=1,
            buffers=buffers,
        )
    plan = plan_on_device(
        *lengths_and_table(query_lens, seq_lens, dtype),
        page_size=PAGE_SIZE,
        validate=True,
        buffers=buffers,
        **bounds,
    )
    lens = [s if q else 0 for q, s in zip(query_lens, seq_lens, strict=True)]
    assert plan.max_query_len == bounds["max_query_len"]
    assert plan.max_seq_len == 2 * PAGE_SIZE
    assert plan.max_context_len == 2 * PAGE_SIZE - 1
    if persistent:
        plan = dataclasses.replace(plan, page_table=plan.page_table[:, :2])
    check_invariants(
        dataclasses.replace(plan, max_seq_len=max(lens, default=0)), query_lens, seq_lens
    )
    if query_lens and not persistent:
        decodes = sum(query_lens[: plan.num_decodes])
        prefills = plan.prefills
        assert prefills.positions.tolist() == plan.positions[plan.num_decode_tokens :].tolist()
        assert plan.num_prefills == 0 or decodes == plan.num_decode_tokens


def test_plan_on_device_of_no_requests_has_no_decodes():
    lengths = torch.zeros(0, dtype=torch.int32)
    bounds = {"num_tokens": 3, "max_query_len": 5}
    plan = plan_on_device(lengths, lengths, torch.zeros(0, 2).int(), page_size=2, **bounds)
    assert (plan.num_requests, plan.num_decodes, plan.decode_query_len) == (0, 0, 0)


@by_device_batch
def test_plan_on_device_does_not_read_lengths(batch):
    query_lens, seq_lens, bounds = batch
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = [mode.from_tensor(tensor) for tensor in lengths_and_table(query_lens, seq_lens)]
        plan = plan_on_device(*fake, page_size=PAGE_SIZE, **bounds)
        assert plan.slot_mapping.shape == (bounds["num_tokens"],)
        assert plan.decodes.num_tokens + plan.prefills.num_tokens == plan.num_tokens
        starts = torch.zeros(len(query_lens) + 1, dtype=torch.uint32)
        offsets = {"input_row_offsets": mode.from_tensor(starts), "cache_lengths": fake[1]}
        plan_on_device(page_table=fake[2], page_size=PAGE_SIZE, **offsets, **bounds)
        plan.clamp_topk(4)
        assert plan.entries(fake[2], ratio=4, page_size=8).slot_mapping.shape == (plan.num_tokens,)
        if query_lens:
            with pytest.raises(DataDependentOutputException):  # this check can fail
                fake[0].sum().item()


def test_lengths_beyond_their_bounds_are_clamped():
    lens = lengths_and_table([5, 7], [16, 16])
    plan = plan_on_device(*lens, page_size=PAGE_SIZE, num_tokens=8, max_query_len=4)
    assert plan.input_row_offsets.tolist() == [0, 5, 8]
    assert plan.request_ids.tolist() == [0] * 5 + [1] * 3
    lens = lengths_and_table([-1, 2], [3, 99])
    plan = plan_on_device(*lens, page_size=PAGE_SIZE, num_tokens=2, max_query_len=2)
    assert plan.slot_mapping.tolist() == [-1, -1]  # beyond the page table


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query_lens": [1, 1]}, TypeError, "query_lens must be a tensor"),
        ({"query_lens": torch.ones(2)}, TypeError, "query_lens must have dtype"),
        ({"seq_lens": torch.ones(3, dtype=torch.int32)}, ValueError, "seq_lens must have shape"),
        ({"page_table": torch.zeros(2, 2)}, TypeError, "page_table must have dtype"),
        ({"page_table": None}, TypeError, "page_table must be a tensor, got NoneType"),
        ({"query_lens": None}, ValueError, "either query_lens or input_row_offsets"),
        ({"cache_lengths": torch.ones(2).int()}, ValueError, "either seq_lens or cache_lengths"),
        (
            {"query_lens": None, "input_row_offsets": torch.ones(2).int()},
            ValueError,
            "input_row_offsets must have shape",
        ),
        (
            {"query_lens": None, "input_row_offsets": torch.ones(3).int(), "validate": True},
            ValueError,
            "input_row_offsets must ascend from 0",
        ),
        ({"num_tokens": 1.5}, TypeError, "num_tokens must be an integer"),
        ({"max_query_len": -1}, ValueError, "max_query_len must be at least 0, got -1"),
        ({"num_decodes": 3}, ValueError, "num_decodes must be at most 2, got 3"),
        ({"num_decodes": 1, "decode_query_len": 9}, ValueError, "num_tokens must be at least 9"),
        ({"page_size": 0}, ValueError, "page_size must be at least 1"),
        ({"num_tokens": 1, "validate": True}, ValueError, "num_tokens must be at least 2, got 1"),
        ({"max_query_len": 0, "validate": True}, ValueError, "max_query_len must be at least 1"),
        ({"max_seq_len": 8, "validate": True}, ValueError, "max_seq_len must be at least 9"),
        (
            {"num_decodes": 1, "decode_query_len": 2, "validate": True},
            ValueError,
            "decode_query_len must be the query length of every decode, got 2",
        ),
    ],
)
def test_plan_on_device_refuses_wrong_arguments(change, error, message):
    query_lens, seq_lens, table = lengths_and_table([1, 1], [9, 3])
    arguments = {"query_lens": query_lens, "seq_lens": seq_lens, "page_table": table}
    bounds = {"page_size": PAGE_SIZE, "num_tokens": 2, "max_query_len": 1}
    with pytest.raises(error, match=message):
        plan_on_device(**arguments | bounds | change)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("name", ["decodes", "mixed", "padding requests"])
def test_plan_on_device_does_not_synchronise(name):
    query_lens, seq_lens, bounds = DEVICE_BATCHES[name]
    lens = [tensor.cuda() for tensor in lengths_and_table(query_lens, seq_lens)]
    buffers = PlanBuffers(6, 20, 3, "cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        plans = [
            plan_on_device(*lens, page_size=PAGE_SIZE, buffers=chosen, **bounds)
            for chosen in (None, buffers)
        ]
        parts = plans[0].decodes, plans[0].prefills
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert sum(part.num_tokens for part in parts) == bounds["num_tokens"]
    for plan in plans:
        lens = [s if q else 0 for q, s in zip(query_lens, seq_lens, strict=True)]
        check_invariants(dataclasses.replace(plan, max_seq_len=max(lens)), query_lens, seq_lens)


INTEGERS = (torch.int32, torch.int64, torch.uint32)
PLANNERS = {
    "plan_batch": lambda *lens, **options: plan_batch(*lens, workspace_rows=None, **options),
    "plan_on_device": lambda *lens, **options: plan_on_device(
        *lens, num_tokens=2, max_query_len=2, validate=True, **options
    ),
    "entries": lambda lens, seq_lens, table, **options: plan_batch(
        lens, seq_lens, table.to(torch.int32), workspace_rows=None, page_size=PAGE_SIZE
    ).entries(table, ratio=1, **options),
}
by_planner = pytest.mark.parametrize("plan", PLANNERS.values(), ids=PLANNERS)


@by_planner
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("persistent", [False, True])
def test_page_tables_of_every_dtype(plan, dtype, persistent):
    table = torch.tensor([[3, -1]], dtype=torch.int32)
    table = table.view(dtype) if dtype == torch.uint32 else table.to(dtype)
    buffers = PlanBuffers(1, 2, 2, "cpu") if persistent else None
    lens = torch.tensor([2]), torch.tensor([9])
    made = plan(*lens, table, page_size=PAGE_SIZE, buffers=buffers)
    assert made.slot_mapping.tolist() == [31, -1]
    assert made.page_table.tolist() == [[3, -1]]
    assert made.page_table.dtype == torch.int32


@by_planner
def test_int64_pages_beyond_int32_are_missing(plan):
    table = torch.tensor([[2**32 + 3, 1]])  # as int32, page 3
    made = plan(torch.tensor([2]), torch.tensor([9]), table, page_size=PAGE_SIZE)
    assert made.page_table.tolist() == [[-1, 1]]
    assert made.slot_mapping.tolist() == [-1, 8]


@by_device_batch
@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize(("by_offsets", "by_context"), [(True, False), (False, True), (True, True)])
def test_offsets_and_cache_lengths_give_the_same_plan(batch, dtype, by_offsets, by_context):
    query_lens, seq_lens, bounds = batch
    queries, lens, table = lengths_and_table(query_lens, seq_lens)
    offsets = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).to(dtype)
    context = (lens - queries).to(dtype)
    arguments = {"input_row_offsets": offsets} if by_offsets else {"query_lens": queries}
    arguments |= {"cache_lengths": context} if by_context else {"seq_lens": lens}
    options = {"page_size": PAGE_SIZE, "page_table": table}
    host = {"workspace_rows": None, "require_uniform": False, "decode_threshold": 3}
    for plan, more in ((plan_on_device, bounds | {"validate": True}), (plan_batch, host)):
        made = plan(**arguments, **options, **more)
        expected = plan(queries, lens, **options, **more)
        for field in dataclasses.fields(Plan):
            value, right = getattr(made, field.name), getattr(expected, field.name)
            same = torch.equal(value, right) if torch.is_tensor(right) else value == right
            assert same, field.name


SHARED_BATCHES = {
    "decodes": ([1, 1, 1, 1], [9, 3, 40, 1]),
    "drafts": ([3, 3, 0], [40, 3, 7]),
    "mixed": ([1, 1, 5, 33, 2], [41, 1, 21, 33, 19]),
    "prefills shorter than a page": ([2, 1, 7], [5, 1, 7]),
    "empty": ([], []),
}
by_shared_batch = pytest.mark.parametrize(
    "batch", SHARED_BATCHES.values(), ids=SHARED_BATCHES.keys()
)
by_ranks = pytest.mark.parametrize("num_ranks", [1, 2, 4])
by_interleave = pytest.mark.parametrize("interleave", [1, 3, PAGE_SIZE])


def plan_of_rank(query_lens, seq_lens, shard, **options):
    """The plan of a rank with a page table of its own, as wide as that of every rank."""
    longest = shard.longest(max(seq_lens, default=0))
    table = shuffled_pages(len(seq_lens), -(-longest // PAGE_SIZE), seed=shard.rank)
    options = {"workspace_rows": 40, "decode_threshold": 3} | options
    return plan_batch(query_lens, seq_lens, table, page_size=PAGE_SIZE, shard=shard, **options)


@by_shared_batch
@by_ranks
@by_interleave
@pytest.mark.parametrize("persistent", [False, True])
def test_plans_of_ranks_add_up_to_that_of_one(batch, num_ranks, interleave, persistent):
    """Each token has a slot on one rank, and all ranks have the same chunks."""
    buffers = PlanBuffers(6, 60, 8, "cpu") if persistent else None
    whole = plan_of(*batch, workspace_rows=40, decode_threshold=3)
    kept, rows, chunks = torch.zeros_like(whole.positions), 0, []
    of_whole = {field.name for field in dataclasses.fields(Plan)} - {
        "page_table", "slot_mapping", "workspace_starts", "prefill_chunks", "shard",
    }  # fmt: skip
    for rank in range(num_ranks):
        shard = ContextShard(rank, num_ranks, interleave)
        plan = plan_of_rank(*batch, shard, buffers=buffers)
        assert plan.shard is plan.decodes.shard is plan.prefills.shard is shard
        for name in of_whole:
            value, expected = getattr(plan, name), getattr(whole, name)
            same = torch.equal(value, expected) if torch.is_tensor(value) else value == expected
            assert same, name
        local = shard.to_local(plan.positions).tolist()
        real = int(plan.input_row_offsets[-1])
        for token, (row, request) in enumerate(zip(local, plan.request_ids.tolist(), strict=True)):
            if row < 0 or token >= real:
                assert plan.slot_mapping[token] == -1
            else:
                page = int(plan.page_table[request, row // PAGE_SIZE])
                assert plan.slot_mapping[token] == page * PAGE_SIZE + row % PAGE_SIZE
        kept += plan.slot_mapping >= 0
        chunks.append([
            (c.requests, c.tokens, c.num_workspace_rows, c.workspace_starts.tolist())
            for c in plan.prefill_chunks
        ])  # fmt: skip
        if persistent and plan.prefill_chunks:
            first = plan.prefill_chunks[0].seq_lens
            assert first.data_ptr() == buffers.prefill_rows.data_ptr()
        for chunk in plan.prefill_chunks:
            lens = chunk.seq_lens.tolist()
            assert lens == shard.lengths(whole.seq_lens[chunk.requests]).tolist()
            ends = [*chunk.workspace_starts.tolist()[1:], chunk.num_workspace_rows]
            starts = chunk.workspace_starts.tolist()
            assert all(s + n <= e for s, n, e in zip(starts, lens, ends, strict=True))
            assert chunk.num_workspace_rows <= 40
            rows += sum(lens)
    assert torch.equal(kept, (whole.slot_mapping >= 0).long())
    assert all(each == chunks[0] for each in chunks)
    assert rows == int(whole.seq_lens[whole.num_decodes :].sum())


@pytest.mark.parametrize("batch", ["mixed", "prefills shorter than a page"])
@by_ranks
@by_interleave
def test_ranks_attend_to_what_one_rank_does(batch, num_ranks, interleave):
    """Caches written by plans, workspaces of their chunks, and attention to both."""
    query_lens, seq_lens = SHARED_BATCHES[batch]
    torch.manual_seed(0)
    rows, topk = torch.randn(sum(seq_lens), 576), 8
    q = torch.randn(sum(query_lens), 4, 576).bfloat16()
    whole = plan_of(query_lens, seq_lens, workspace_rows=40)
    keys = torch.rand(whole.num_tokens, max(seq_lens))
    unseen = torch.arange(max(seq_lens)) > whole.positions[:, None]
    best = keys.masked_fill(unseen, -1).topk(min(topk, max(seq_lens)))
    chosen = best.indices.masked_fill(best.values < 0, 2**31 - 1).sort(1).values.int()
    chosen[chosen == 2**31 - 1] = -1

    def attend(shard):
        """Rows of each chunk by position, and attention to the rank's part of the selection."""
        new = plan_of_rank(seq_lens, seq_lens, shard, workspace_rows=None, decode_threshold=0)
        cache = PagedCache.allocate(FP8_DS_MLA, max(new.page_table.numel(), 1), PAGE_SIZE)
        cache.data.view(torch.uint8).fill_(0xFF)
        own = new.slot_mapping >= 0
        cache.write(new.slot_mapping[own], rows[own])
        plan = plan_of_rank(query_lens, seq_lens, shard, decode_threshold=1)
        assert torch.equal(plan.page_table, new.page_table)
        contexts = {}
        for chunk in plan.prefill_chunks:
            workspace = torch.full((chunk.num_workspace_rows, 576), torch.nan).bfloat16()
            gather_dequant(
                cache, chunk.page_table, chunk.seq_lens, chunk.workspace_starts, out=workspace
            )
            places = zip(chunk.workspace_starts.tolist(), chunk.seq_lens.tolist(), strict=True)
            for request, (start, count) in enumerate(places, chunk.requests.start):
                positions = shard.positions(torch.arange(count)).tolist()
                for position, row in zip(positions, workspace[start : start + count], strict=True):
                    contexts[request, position] = row
        listed, counts = own_positions(chosen, shard=shard)
        slots = to_slots(listed[:, 0], plan.page_table, plan.request_ids, page_size=PAGE_SIZE)
        state = sparse_prefill(q, cache, slots, softmax_scale=0.1, topk_lengths=counts[:, 0])
        return contexts, state

    expected, (out, lse) = attend(ContextShard(0, 1))
    shards = [ContextShard(rank, num_ranks, interleave) for rank in range(num_ranks)]
    parts = [attend(shard) for shard in shards]
    contexts = {place: row for part, _ in parts for place, row in part.items()}
    assert contexts.keys() == expected.keys()
    assert sum(len(part) for part, _ in parts) == len(expected)  # no row on two ranks
    assert all(torch.equal(row, expected[place]) for place, row in contexts.items())
    outs, lses = (torch.stack(states) for states in zip(*(s for _, s in parts), strict=True))
    merged, merged_lse = merge_states(outs, lses)
    # Each part is rounded to bfloat16 before the merge, and the merge once more.
    torch.testing.assert_close(merged, out, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(merged_lse, lse)


def test_a_rank_may_keep_nothing():
    """Contexts of two tokens on the last of four ranks that keep pages in turn."""
    shard = ContextShard(3, 4, PAGE_SIZE)
    plan = plan_of_rank([1, 2], [2, 2], shard, decode_threshold=1)
    assert plan.slot_mapping.tolist() == [-1, -1, -1]
    assert plan.seq_lens.tolist() == [2, 2]
    (chunk,) = plan.prefill_chunks
    assert chunk.seq_lens.tolist() == [0]
    assert chunk.num_workspace_rows == 2  # as on the first rank


def test_a_rank_without_pages_plans_empty_contexts():
    table = torch.zeros(2, 0, dtype=torch.int32)
    shard = ContextShard(1, 2)
    with pytest.raises(ValueError, match="seq_lens must be at most 0, 0 pages of 8 tokens on each"):
        plan_batch([1, 1], [1, 1], table, page_size=8, workspace_rows=None, shard=shard)
    plan = plan_batch([0, 0], [1, 1], table, page_size=8, workspace_rows=None, shard=shard)
    assert plan.num_tokens == 0


@by_device_batch
@pytest.mark.parametrize("rank", range(3))
def test_plan_on_device_of_a_rank(batch, rank):
    """The plan of `plan_batch`, where bounds do not matter."""
    query_lens, seq_lens, bounds = batch
    shard, options = ContextShard(rank, 3, 2), {"page_size": PAGE_SIZE}
    *lens, table = lengths_and_table(query_lens, seq_lens)
    plan = plan_on_device(*lens, table, shard=shard, validate=True, **options, **bounds)
    host = {"workspace_rows": None, "require_uniform": False, "decode_threshold": 3}
    expected = plan_batch(*lens, table, shard=shard, **options, **host)
    real = int(expected.input_row_offsets[-1])
    assert torch.equal(plan.slot_mapping[:real], expected.slot_mapping[:real])
    assert (plan.slot_mapping[real:] == -1).all()
    assert torch.equal(plan.positions[:real], expected.positions[:real])
    assert torch.equal(plan.seq_lens, expected.seq_lens)
    assert plan.max_seq_len == 2 * PAGE_SIZE * 3
    assert plan.shard is shard


def test_plan_on_device_checks_the_pages_of_ranks():
    lens = torch.tensor([1]), torch.tensor([33]), torch.zeros(1, 2, dtype=torch.int32)
    options = {"page_size": PAGE_SIZE, "num_tokens": 1, "max_query_len": 1}
    with pytest.raises(TypeError, match="shard must be a ContextShard, got int"):
        plan_on_device(*lens, shard=2, **options)
    options |= {"shard": ContextShard(1, 2), "max_seq_len": 33, "validate": True}
    with pytest.raises(ValueError, match="at most 32, 2 pages of 8 tokens on each of 2 ranks"):
        plan_on_device(*lens, **options)


def test_entries_are_not_shared_by_ranks():
    plan = plan_of_rank([9], [9], ContextShard(1, 2))
    with pytest.raises(ValueError, match=r"shard of the plan must be None for entries, got Cont"):
        plan.entries(plan.page_table, ratio=4, page_size=2)

"""Static buffers, padding and replay of decode steps; on a GPU the same through CUDA graphs."""

import copy
import functools
import subprocess
import sys

import pytest
import torch

from sparsemla import (
    FP8_DS_MLA,
    INDEX_FP8,
    ContextShard,
    DecodeRunner,
    PagedCache,
    append_index_keys,
    cos_sin_table,
    dense_decode,
    fused_rope_rmsnorm_quant,
    indexer_topk,
    plan_batch,
    prepare_index_queries,
    rope_frequencies,
    slots_of,
    sparse_decode,
    to_slots,
)
from sparsemla_lab.testing.compare import assert_equal

PAGE_SIZE = 5
MAX_PAGES = 4
NUM_PAGES = 24
SETTINGS = {"batch_sizes": (4, 1, 2), "max_pages_per_request": MAX_PAGES, "page_size": PAGE_SIZE}


def table_of(rows):
    return torch.tensor(rows, dtype=torch.int32)


class Recorder:
    """A step that records copies of its arguments."""

    def __init__(self):
        self.calls, self.addresses = [], set()

    def __call__(self, plan, tokens):
        self.addresses.add((tokens.data_ptr(), plan.page_table.data_ptr()))
        self.calls.append((copy.deepcopy(plan), tokens.clone()))
        return tokens.flatten(1).sum(1) + plan.seq_lens


def recording_runner(query_len=1, **options):
    step = Recorder()
    tokens = torch.empty(1, query_len, dtype=torch.int64)
    options |= {"query_len": query_len}
    return step, DecodeRunner(step, {"tokens": tokens}, **SETTINGS, **options)


@pytest.mark.parametrize(("count", "size"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_smallest_fitting_batch_size_runs(count, size):
    step, runner = recording_runner()
    lens, tokens = torch.arange(1, count + 1), torch.arange(10, 10 + count)
    result = runner.run(lens, table_of([[1, 2]] * count), tokens=tokens[:, None])
    plan, seen = step.calls[-1]
    assert plan.num_requests == plan.num_tokens == len(seen) == size
    assert torch.equal(result, tokens + lens)


def test_unused_rows_are_padding():
    step, runner = recording_runner()
    runner.run([20, 19, 18, 17], table_of([[9, 8, 7, 6]] * 4), tokens=torch.full((4, 1), 99))
    pages = table_of([[1, 2, 0], [3, 0, 0], [4, 5, 6]])
    runner.run([7, 3, 11], pages, tokens=torch.tensor([[1], [2], [3]]))
    plan, tokens = step.calls[-1]
    assert tokens.flatten().tolist() == [1, 2, 3, 0]
    assert plan.seq_lens.tolist() == [7, 3, 11, 0]
    assert plan.positions.tolist() == [6, 2, 10, 0]
    assert plan.slot_mapping.tolist() == [11, 17, 30, -1]
    assert plan.request_ids.tolist() == [0, 1, 2, 0]
    assert plan.input_row_offsets.tolist() == [0, 1, 2, 3, 3]
    assert plan.page_table.tolist() == [[1, 2, 0, -1], [3, 0, 0, -1], [4, 5, 6, -1], [0] * 4]


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint32])
def test_page_tables_of_other_dtypes(dtype):
    step, runner = recording_runner()
    runner.run([7, 3], table_of([[1, 2], [3, 0]]).to(dtype), tokens=torch.ones(2, 1).long())
    plan, _ = step.calls[-1]
    assert plan.slot_mapping.tolist() == [11, 17]


def test_int64_pages_beyond_int32_are_missing():
    step, runner = recording_runner()
    runner.run([7], torch.tensor([[1, 2**32 + 2]]), tokens=torch.ones(1, 1).long())
    plan, _ = step.calls[-1]
    assert plan.page_table.tolist() == [[1, -1, -1, -1]]
    assert plan.slot_mapping.tolist() == [-1]


def test_several_query_tokens_a_request():
    step, runner = recording_runner(query_len=3)
    result = runner.run([8, 3, 12], table_of([[1, 2, 3]] * 3), tokens=torch.ones(3, 3).long())
    plan, tokens = step.calls[-1]
    assert result.tolist() == [11, 6, 15]
    assert tokens.tolist() == [[1] * 3] * 3 + [[0] * 3]
    assert plan.positions.tolist() == [5, 6, 7, 0, 1, 2, 9, 10, 11, 0, 0, 0]
    assert plan.slot_mapping.tolist() == [10, 11, 12, 5, 6, 7, 14, 15, 16, -1, -1, -1]
    assert plan.request_ids.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [0] * 3


def test_a_rank_has_slots_for_the_tokens_that_it_keeps():
    """Ranks keep two positions in turn; lengths are of whole contexts, up to those of all ranks."""
    pages, tokens = table_of([[1, 2, 3], [4, 5, 6]]), torch.ones(2, 3).long()
    slots = []
    for rank in range(2):
        shard = ContextShard(rank, 2, 2)
        step, runner = recording_runner(query_len=3, shard=shard)
        for plan, _ in step.calls:
            # 20 rows on each rank
            assert (plan.max_seq_len, plan.shard) == (40, shard)
        assert runner.run([29, 5], pages, tokens=tokens).tolist() == [32, 8]
        plan, _ = step.calls[-1]
        assert plan.positions.tolist() == [26, 27, 28, 2, 3, 4]
        slots.append(plan.slot_mapping.tolist())
        with pytest.raises(ValueError, match="at most 29, 3 pages of 5 tokens on each of 2 ranks"):
            runner.run([30, 5], pages, tokens=tokens)
    assert slots == [[-1, -1, 19, -1, -1, 22], [17, 18, -1, 20, 21, -1]]


def test_constructor_calls_the_step_with_padding_and_upper_bounds():
    step, runner = recording_runner()
    plan, tokens = step.calls[0]
    assert not tokens.any()
    assert not plan.seq_lens.any()
    assert not plan.positions.any()
    assert (plan.slot_mapping == -1).all()
    runner.run([1], table_of([[1]]), tokens=torch.ones(1, 1).long())
    for plan, _ in step.calls:
        assert plan.max_seq_len == MAX_PAGES * PAGE_SIZE
        assert (plan.num_prefills, plan.decode_query_len, plan.max_query_len) == (0, 1, 1)


def test_buffers_keep_their_addresses():
    step, runner = recording_runner()
    for count in (1, 4, 2, 3):
        runner.run([5] * count, table_of([[1]] * count), tokens=torch.ones(count, 1).long())
    assert len(step.addresses) == 1


def test_results_are_views_that_the_next_run_overwrites():
    _, runner = recording_runner()
    first = runner.run([5, 6], table_of([[1, 2]] * 2), tokens=torch.zeros(2, 1).long())
    runner.run([9], table_of([[1, 2]]), tokens=torch.zeros(1, 1).long())
    assert first.tolist() == [9, 6]


def test_a_step_may_return_several_tensors():
    def step(plan, x, y):
        return x + y, plan.seq_lens.clone()

    runner = DecodeRunner(step, {"x": torch.empty(1, 2), "y": torch.empty(1, 2)}, **SETTINGS)
    total, lens = runner.run([3], table_of([[1]]), y=torch.ones(1, 2), x=torch.ones(1, 2))
    assert total.tolist() == [[2, 2]]
    assert lens.tolist() == [3]


def test_strided_inputs_and_columns():
    step, runner = recording_runner()
    tokens = torch.arange(8).view(2, 4)[:, 1:2]
    runner.run([5, 9], table_of([[1, 2], [3, 4]]).T, tokens=tokens)
    plan, seen = step.calls[-1]
    assert seen.flatten().tolist() == [1, 5]
    assert plan.page_table[:, :2].tolist() == [[1, 3], [2, 4]]


RUN_ERRORS = {
    "too-many": (
        {"page_table": table_of([[1]] * 5)},
        ValueError,
        r"page_table must have 1 to 4 rows, the largest of batch_sizes, .* got shape \[5, 1\]",
    ),
    "none": ({"page_table": table_of([[1]])[:0]}, ValueError, "page_table must have 1 to 4 rows"),
    "too-wide": (
        {"page_table": table_of([[1] * 5] * 2)},
        ValueError,
        r"at most 4 columns, got shape \[2, 5\]",
    ),
    "table-dtype": (
        {"page_table": torch.ones(2, 1)},
        TypeError,
        "page_table must have dtype int32, int64 or uint32, got torch.float32",
    ),
    "lens-count": (
        {"seq_lens": [1, 2, 3]},
        ValueError,
        r"seq_lens must have one length for each of 2 rows of page_table, got shape \[3\]",
    ),
    "lens-dtype": ({"seq_lens": [1.0, 2.0]}, TypeError, "seq_lens must hold integers"),
    "lens-device": (
        {"seq_lens": torch.ones(2, device="meta")},
        ValueError,
        "seq_lens must be on the host",
    ),
    "too-long": (
        {"seq_lens": [21, 1], "page_table": table_of([[1, 2, 3, 4]] * 2)},
        ValueError,
        "seq_lens must be at most 20",
    ),
    "beyond-the-given-table": (
        {"seq_lens": [3, 6]},
        ValueError,
        "seq_lens must be at most 5, 1 pages of 5 tokens, got 6 for request 1",
    ),
    "too-short": ({"seq_lens": [3, 0]}, ValueError, "seq_lens must include the query tokens"),
    "missing": ({"tokens": None}, TypeError, "inputs must be tokens; got none"),
    "unknown": ({"mask": torch.ones(2)}, TypeError, "inputs must be tokens; got mask, tokens"),
    "no-tensor": ({"tokens": [[1], [2]]}, TypeError, "tokens must be a tensor, got list"),
    "dtype": (
        {"tokens": torch.ones(2, 1)},
        TypeError,
        "tokens must have dtype torch.int64, got torch.float32",
    ),
    "shape": (
        {"tokens": torch.ones(2, 3).long()},
        ValueError,
        r"tokens must have shape \[2, 1\], got \[2, 3\]",
    ),
    "rows": (
        {"tokens": torch.ones(1, 1).long()},
        ValueError,
        r"tokens must have shape \[2, 1\], got \[1, 1\]",
    ),
    "device": (
        {"tokens": torch.ones(2, 1, dtype=torch.int64, device="meta")},
        ValueError,
        "tokens must be on cpu, got meta",
    ),
}


@pytest.mark.parametrize(("change", "error", "message"), RUN_ERRORS.values(), ids=RUN_ERRORS)
def test_run_refuses_wrong_arguments(change, error, message):
    step, runner = recording_runner()
    calls = len(step.calls)
    batch = {
        "seq_lens": [3, 4],
        "page_table": table_of([[1], [2]]),
        "tokens": torch.ones(2, 1).long(),
    } | change
    with pytest.raises(error, match=message):
        runner.run(**{name: value for name, value in batch.items() if value is not None})
    assert len(step.calls) == calls
    result = runner.run([3], table_of([[1]]), tokens=torch.ones(1, 1).long())
    assert result.tolist() == [4]  # a refused batch leaves nothing behind


def fail(plan, x):
    raise ArithmeticError("the step's own")


BUILD_ERRORS = {
    "no-sizes": ({"batch_sizes": ()}, ValueError, "batch_sizes must be at least 1, got 0"),
    "size": ({"batch_sizes": (4, -1)}, ValueError, "batch_sizes must be at least 1, got -1"),
    "pages": ({"max_pages_per_request": 0}, ValueError, "max_pages_per_request must be at least 1"),
    "page-size": ({"page_size": 0}, ValueError, "page_size must be at least 1, got 0"),
    "shard": ({"shard": 2}, TypeError, "shard must be a ContextShard, got int"),
    "query-len": ({"query_len": 0}, ValueError, "query_len must be at least 1, got 0"),
    "no-inputs": ({"inputs": {}}, ValueError, "inputs must be on one device, got no inputs"),
    "devices": (
        {"inputs": {"x": torch.ones(1), "y": torch.ones(1, device="meta")}},
        ValueError,
        "inputs must be on one device, got cpu, meta",
    ),
    "no-tensor": ({"inputs": {"x": 3}}, TypeError, "inputs must hold tensors, got int for x"),
    "no-rows": (
        {"inputs": {"x": torch.tensor(3)}},
        ValueError,
        r"inputs must have a row for each request, got shape \[\] for x",
    ),
    "result": (
        {"step": lambda plan, x: None},
        TypeError,
        "step must return a tensor or a tuple of tensors, got NoneType",
    ),
    "result-rows": (
        {"step": lambda plan, x: x[:1]},
        ValueError,
        r"step must return a row for each of 4 requests, got shape \[1\]",
    ),
    "step": ({"step": fail}, ArithmeticError, "the step's own"),
}


@pytest.mark.parametrize(("change", "error", "message"), BUILD_ERRORS.values(), ids=BUILD_ERRORS)
def test_constructor_refuses_wrong_arguments(change, error, message):
    arguments = {"step": lambda plan, x: x, "inputs": {"x": torch.ones(1)}} | SETTINGS | change
    with pytest.raises(error, match=message):
        DecodeRunner(**arguments)


HEADS, INDEX_HEADS, TOPK = 3, 4, 8


def layer_inputs(count, query_len, device):
    """Random outputs of a layer's projections for each request."""
    shapes = {
        "q": (HEADS, 576),
        "kv": (576,),
        "index_q": (INDEX_HEADS, 128),
        "index_weights": (INDEX_HEADS,),
        "index_k": (128,),
    }
    return {
        name: torch.randn(count, query_len, *shape).bfloat16().to(device)
        for name, shape in shapes.items()
    }


def layer_step(
    plan, q, kv, index_q, index_weights, index_k, *, latents, index_keys, weights, sparse
):
    """Write the step's rows, select, attend: an attention layer made of the ops."""
    table, ones, zeros = weights
    places = {"positions": plan.positions, "slot_mapping": plan.slot_mapping}
    query = q.flatten(0, 1).clone()
    rope = query[..., 512:]
    fused_rope_rmsnorm_quant(rope, kv.flatten(0, 1), table, ones, latents, **places, out=rope)
    query = query.view(q.shape)
    # A fixed number of splits: a request has the same bits in any batch.
    fixed = {"softmax_scale": 192**-0.5, "num_splits": 2}
    if not sparse:
        return dense_decode(query, latents, plan.page_table, plan.seq_lens, **fixed)
    append_index_keys(index_k.flatten(0, 1), ones[:128], zeros[:128], table, index_keys, **places)
    chosen = indexer_topk(
        *prepare_index_queries(
            index_q.flatten(0, 1), index_weights.flatten(0, 1), table, positions=plan.positions
        ),
        index_keys,
        input_row_offsets=plan.input_row_offsets,
        seq_lens=plan.seq_lens,
        page_table=plan.page_table,
        topk=TOPK,
    )
    slots = to_slots(chosen, plan.page_table, plan.request_ids, page_size=PAGE_SIZE)
    return sparse_decode(query, latents, slots.view(*q.shape[:2], TOPK), **fixed)


def poisoned_caches(device):
    caches = (PagedCache.allocate(fmt, NUM_PAGES, PAGE_SIZE, device=device) for fmt in FORMATS)
    caches = dict(zip(("latents", "index_keys"), caches, strict=True))
    for cache in caches.values():
        cache.data.view(torch.uint8).fill_(0xFF)  # NaN in e4m3, bfloat16 and float32
    return caches


FORMATS = (FP8_DS_MLA, INDEX_FP8)


def write_contexts(caches, page_table, context_lens):
    """Random rows for the tokens that each request has before the step."""
    for request, length in enumerate(context_lens):
        positions = torch.arange(length, device=page_table.device)
        slots = slots_of(page_table, torch.full_like(positions, request), positions, PAGE_SIZE)
        for cache in caches.values():
            rows = torch.randn(length, cache.format.head_dim).to(page_table.device)
            cache.write(slots, rows)


def shuffled_table(count, device):
    pages = torch.randperm(NUM_PAGES)[: count * MAX_PAGES].view(count, MAX_PAGES)
    return pages.to(device, torch.int32)


@pytest.mark.parametrize("query_len", [1, 2])
@pytest.mark.parametrize("sparse", [True, False], ids=["sparse", "dense"])
def test_layer_gives_the_same_bits_without_the_runner(device, sparse, query_len):
    caches = poisoned_caches(device)
    weights = (
        cos_sin_table(rope_frequencies(64, 1e4), MAX_PAGES * PAGE_SIZE).to(device),
        torch.ones(512, device=device),
        torch.zeros(512, device=device),
    )
    step = functools.partial(layer_step, weights=weights, sparse=sparse)
    runner = DecodeRunner(
        functools.partial(step, **caches),
        layer_inputs(1, query_len, device),
        **SETTINGS,
        query_len=query_len,
    )
    for cache in caches.values():
        assert (cache.data.view(torch.uint8) == 0xFF).all()  # building it wrote nothing
    for context_lens in ([9, 0, 17], [3], [0, 18, 1, 4], [11, 5], [18, 2, 0, 9]):
        count = len(context_lens)
        page_table = shuffled_table(count, device)
        write_contexts(caches, page_table, context_lens)
        seq_lens = [length + query_len for length in context_lens]
        inputs = layer_inputs(count, query_len, device)
        eager_caches = copy.deepcopy(caches)
        plan = plan_batch(
            [query_len] * count,
            seq_lens,
            page_table,
            page_size=PAGE_SIZE,
            workspace_rows=None,
            decode_threshold=query_len,
        )
        expected = step(plan, **inputs, **eager_caches)
        results = runner.run(seq_lens, page_table, **inputs)
        for name, result, wanted in zip(("out", "lse"), results, expected, strict=True):
            assert result.isfinite().all()
            assert_equal(name, result, wanted)
            result.fill_(torch.nan)  # nothing of it may reach the next batch
        for name, cache in caches.items():
            assert_equal(name, cache.data, eager_caches[name].data)


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
def test_replay_does_not_allocate_or_synchronise():
    page_table = torch.zeros(3, MAX_PAGES, dtype=torch.int32, device="cuda")
    weight = torch.randn(64, 64, device="cuda")
    x = torch.randn(3, 64, device="cuda")
    runner = DecodeRunner(lambda plan, x: (x @ weight).relu() @ weight, {"x": x}, **SETTINGS)
    runner.run([1, 2, 3], page_table, x=x)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.memory_reserved()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for count in (3, 1, 2, 3):
            runner.run([5] * count, page_table[:count], x=x[:count])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    after = torch.cuda.memory_stats()["num_device_alloc"], torch.cuda.memory_reserved()
    assert after == before


@pytest.mark.gpu
@needs_gpu
def test_smaller_sizes_share_the_memory_of_the_largest():
    def step(plan, x):
        return x.repeat(1, 1024).sum(1)  # 4 MiB a request

    def reserved(batch_sizes):
        x = torch.ones(1, 1024, device="cuda")
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        runner = DecodeRunner(step, {"x": x}, **SETTINGS | {"batch_sizes": batch_sizes})
        torch.cuda.empty_cache()
        return runner, torch.cuda.memory_reserved() - before

    alone, alone_bytes = reserved((16,))
    del alone
    _, all_bytes = reserved(range(1, 17))
    assert all_bytes < alone_bytes + (16 << 20)


# A broken capture may leave PyTorch's random state unusable, so it runs in a subprocess.
BROKEN_STEP = """
import torch
from sparsemla import DecodeRunner

def step(plan, x):
    return x * x.sum().item()

try:
    DecodeRunner(
        step,
        {"x": torch.ones(1, device="cuda")},
        batch_sizes=(2, 1),
        max_pages_per_request=1,
        page_size=8,
    )
except ValueError as error:
    print(error)
    print("caused by", type(error.__cause__).__name__)
    print(torch.cuda.current_stream() == torch.cuda.default_stream())
"""


@pytest.mark.gpu
@needs_gpu
def test_failed_capture_names_the_step():
    result = subprocess.run(
        [sys.executable, "-c", BROKEN_STEP], capture_output=True, text=True, check=True
    )
    assert "the capture for batch size 2 raised" in result.stdout
    assert "stream is capturing" in result.stdout
    assert "caused by" in result.stdout
    assert result.stdout.endswith("True\n")

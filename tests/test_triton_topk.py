"""The portable top-k against the reference: adversarial rows, every path, every run the same."""

import math

import hypothesis
import hypothesis.extra.numpy as arrays
import numpy as np
import pytest
import torch
from hypothesis import strategies

import sparsemla
from sparsemla import dispatch, reference

pytest.importorskip("triton")

from sparsemla.kernels import topk as rows
from sparsemla.kernels.topk import triton as kernels
from sparsemla.kernels.topk.arguments import MergeTopk
from sparsemla.kernels.topk.triton import ListSchedule, launch, schedule_lists
from sparsemla_lab.testing.cases import Draw, merge_topk_case, select_topk_case
from test_topk import merges_with_the_largest_index

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def on_device():
    with torch.device(DEVICE):
        torch.manual_seed(0)
        yield


def adversarial_rows(n):
    x = torch.randn(n)
    some = torch.rand(n)
    late = x.clone()
    late[-n // 5 :] += 100
    periodic = x.clone()
    periodic[::32] += 50
    tiny = torch.randint(0, 50, (n,), dtype=torch.int32)
    return {
        "normal": x,
        "all equal": torch.full((n,), 1.25),
        "zeros of both signs": torch.where(some < 0.5, 0.0, -0.0),
        "ReLU, few positive": torch.relu(x - 2.2),
        "ReLU, half positive": torch.relu(x),
        "negative plateau": torch.where(some < 0.9, -3.0, x),
        "five values": torch.randint(0, 5, (n,)).float(),
        "heavy tails": x**31,
        "denormal": x * 1e-42,
        "ascending": torch.linspace(-3, 9, n),
        "descending": torch.linspace(9, -3, n),
        "best at the end": late,
        "periodic": periodic,
        "many +inf": torch.where(some < 0.2, INF, x),
        "few +inf": torch.where(some < 0.02, INF, x),
        "mostly -inf": torch.where(some < 0.98, -INF, x),
        "mostly NaN": torch.where(some < 0.98, NAN, x),
        "NaN and -inf": torch.where(some < 0.5, NAN, -INF),
        "largest floats": torch.where(some < 0.5, 3.4e38, -3.4e38),
        "neighbouring floats": (tiny + 0x3F800000).view(torch.float32),
    }


def check(scores, topk, schedule=None, starts=None, ends=None):
    out = torch.full((scores.shape[0], topk + 3), -7, dtype=torch.int32)
    view = out[:, 1:-2]  # strided rows; the columns beside them stay as they are
    if schedule is None:
        run = dispatch.load("select_topk", "triton")
        run(scores=scores, topk=topk, row_starts=starts, row_ends=ends, out=view)
    else:
        launch(scores, topk, starts, ends, view, schedule)
    expected = reference.select_topk(scores, topk=topk, row_starts=starts, row_ends=ends)
    assert torch.equal(view, expected)
    assert (out[:, [0, -2, -1]] == -7).all()


def small_schedule(slices, capacity=128):
    """Lists so short that small rows take every path."""
    return ListSchedule(slices, capacity, 64, programs=3, num_warps=2, finish_warps=2, lanes=4)


@pytest.mark.parametrize("slices", [1, 4])
@pytest.mark.parametrize("ragged", [False, True])
def test_adversarial_rows(ragged, slices):
    scores = torch.stack(list(adversarial_rows(500).values()))
    starts = ends = None
    if ragged:
        starts = torch.randint(0, 150, (len(scores),), dtype=torch.int32)
        ends = starts + torch.randint(129, 450, (len(scores),), dtype=torch.int32)
        lengths = [0, 1, 39, 40, 41, 127, 128, 129, -9]
        ends[: len(lengths)] = starts[: len(lengths)] + torch.tensor(lengths, dtype=torch.int32)
        starts[-1], ends[-1] = INT_MIN, INT_MAX
        starts[-2], ends[-2] = 499, INT_MAX
    check(scores, 40, small_schedule(slices), starts, ends)


@pytest.mark.parametrize("topk", [1, 100, 129, 400, 700])
def test_any_k(topk):
    """Including a k beyond the capacity of a list, and rows with fewer columns than k."""
    check(torch.randn(2, 400).round(decimals=1), topk, small_schedule(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strided_rows_and_poison(dtype):
    """Rows at any address; the kernel reads nothing outside of them."""
    storage = torch.full((4, 700), NAN, dtype=dtype)
    storage[:, 600:] = INF
    scores = storage[:, 3:604]
    scores[:, :590] = torch.randn(4, 590)
    starts = torch.tensor([0, 5, 11, 100])  # int64
    ends = torch.tensor([590, 400, 590, 101])
    check(scores, 30, small_schedule(2), starts, ends)


def test_no_rows():
    check(torch.empty(0, 5000), 64)


@pytest.mark.parametrize("slices", [1, 4])
def test_slots(slices):
    case = select_topk_case(
        Draw(0, torch.device(DEVICE)), num_rows=7, num_cols=400, topk=40, page_size=16, ragged=True
    )
    expected = reference.select_topk(**case)
    table, requests, size = case["page_table"], case["request_ids"], case["page_size"]
    pages = kernels.Pages(table, requests, *table.shape, table.stride(0))
    schedule, out = small_schedule(slices), torch.empty_like(expected)
    launch(case["scores"], 40, case["row_starts"], case["row_ends"], out, schedule, pages, size)
    assert torch.equal(out, expected)
    dispatch.load("select_topk", "triton")(**case, out=out.zero_())
    assert torch.equal(out, expected)


def test_more_rows_than_programs(monkeypatch):
    monkeypatch.setattr(kernels, "LIST_BYTES", 1)
    check(torch.randn(3, 2100), 9, starts=torch.tensor([0, 7, 9]), ends=torch.tensor([9, 2100, 30]))


def test_every_run_gives_the_same_bits():
    scores = torch.randint(0, 9, (3, 400)).float()
    outs = [torch.empty(3, 40, dtype=torch.int32) for _ in range(3)]
    for out in outs:
        launch(scores, 40, None, None, out, small_schedule(4))
    assert all(torch.equal(out, outs[0]) for out in outs)


VALUES = strategies.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, INF, -INF, NAN, 3.4e38])


@hypothesis.settings(max_examples=10, deadline=None, derandomize=True)
@hypothesis.given(
    row=arrays.arrays(np.float32, strategies.integers(1, 300), elements=VALUES, fill=VALUES),
    topk=strategies.integers(1, 90),
    slices=strategies.sampled_from([1, 2]),
)
def test_any_row(row, topk, slices):
    check(torch.from_numpy(row)[None].to(DEVICE), topk, small_schedule(slices, 32))


@pytest.mark.parametrize("num_rows", [1, 64, 200, 5000])
@pytest.mark.parametrize("num_cols", [1, 5000, 131072, 1 << 20])
@pytest.mark.parametrize("topk", [1, 512, 2048, 3000, 70000])
def test_list_limit_is_the_capacity_or_the_whole_part(num_rows, num_cols, topk, monkeypatch):
    monkeypatch.setattr(kernels, "num_multiprocessors", lambda device: 132)
    schedule = schedule_lists(num_rows, num_cols, topk, torch.device("cpu"))
    limit = schedule.limit(num_cols)
    tiles = math.ceil(num_cols / (16 * schedule.lanes))
    longest_part = math.ceil(tiles / schedule.num_lists) * 16 * schedule.lanes + 6
    assert limit >= min(longest_part, schedule.capacity)
    assert schedule.finish_warps <= schedule.num_lists or schedule.slices == 1


def check_merge(values, indices, topk):
    out = torch.full((values.shape[1], topk + 3), -7, dtype=torch.int32)
    dispatch.load("merge_topk", "triton")(
        values=values, indices=indices, topk=topk, out=out[:, 1:-2]
    )
    assert torch.equal(out[:, 1:-2], reference.merge_topk(values, indices, topk=topk))
    assert (out[:, [0, -2, -1]] == -7).all()


def test_merge_of_strided_values():
    case = merge_topk_case(Draw(0, torch.device(DEVICE)), num_parts=3, width=33, topk=30)
    values = torch.full((3, 5, 40), NAN)[..., 3:36]
    check_merge(values.copy_(case["values"]), case["indices"], 30)


@pytest.mark.parametrize("name", adversarial_rows(8))
def test_merge_of_adversarial_candidates(name):
    row = adversarial_rows(96)[name]
    check_merge(row.view(4, 1, 24), torch.randperm(96).view(4, 1, 24), 40)


def test_merge_of_more_than_a_program_holds(monkeypatch):
    monkeypatch.setattr(rows, "MERGE_BLOCK", 64)
    check_merge(**merge_topk_case(Draw(1, torch.device(DEVICE)), topk=30))


@pytest.mark.parametrize(
    ("shape", "topk", "kernel", "reason"),
    [
        ((8, 3, 2048), 4096, "triton.registers", None),
        ((8, 3, 2049), 1, "triton.sorted", "takes up to 16384 candidates of a row, got 16392"),
        ((1, 3, 1), 4097, "triton.sorted", "takes topk up to 4096, got 4097"),
    ],
)
def test_merges_that_one_program_takes(shape, topk, kernel, reason):
    values, indices = torch.empty(shape), torch.empty(shape, dtype=torch.int32)
    (choice,) = sparsemla.explain(
        sparsemla.merge_topk, values, indices, topk=topk, gpu="sm_80"
    ).choices
    assert choice.kernel == kernel
    assert dict(choice.refusals)["triton.registers"] == reason


@pytest.mark.parametrize("block", [rows.MERGE_BLOCK, 64], ids=["one program", "sorted"])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_the_largest_index_is_a_candidate(index_dtype, block, monkeypatch):
    monkeypatch.setattr(rows, "MERGE_BLOCK", block)
    for case in merges_with_the_largest_index(torch.device(DEVICE), index_dtype):
        check_merge(**case | {"topk": min(case["topk"], block // 4)})


def test_merge_of_duplicate_indices():
    """The selection is arbitrary, but the kernel ends and writes nothing else."""
    out = torch.full((1, 6), -7, dtype=torch.int32)
    values, indices = torch.ones(2, 1, 9), torch.zeros(2, 1, 9).int()
    kernels.merge_topk(MergeTopk(values, indices, 4, out[:, 1:5]))
    assert out.tolist() == [[-7, 0, 0, 0, 0, -7]]

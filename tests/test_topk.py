import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsemla
from sparsemla_lab.testing.cases import (
    Draw,
    adversarial_scores,
    embed,
    merge_topk_case,
    select_topk_case,
)
from sparsemla_lab.testing.compare import assert_equal, check_op

ADVERSARIES = list(adversarial_scores(Draw(0), 8, 4))


def select_by_hand(row, topk):
    """The definition in plain Python: larger first, then the lower column, NaN last."""
    keys = [(math.isnan(value), -value if not math.isnan(value) else 0.0) for value in row]
    order = sorted(range(len(row)), key=lambda column: (keys[column], column))
    chosen = sorted(order[:topk])
    return chosen + [-1] * (topk - len(chosen))


@pytest.mark.parametrize("name", ADVERSARIES)
@pytest.mark.parametrize(("num_cols", "topk"), [(700, 64), (5000, 2048), (300, 1)])
def test_adversarial_rows(device, name, num_cols, topk):
    rows = [adversarial_scores(Draw(seed, device), num_cols, topk)[name] for seed in range(2)]
    (ids,) = check_op("select_topk", {"scores": torch.stack(rows), "topk": topk})
    assert ids[0].tolist() == select_by_hand(rows[0].tolist(), topk)


def test_more_ties_than_a_list_holds(device):
    scores = torch.zeros(2, 40000, device=device)
    scores[0, -100:] = 1
    scores[1, ::2] = -0.0
    (ids,) = check_op("select_topk", {"scores": scores, "topk": 2048})
    assert ids[0].tolist() == [*range(1948), *range(39900, 40000)]
    assert ids[1].tolist() == list(range(2048))


@pytest.mark.parametrize("topk", [64, 2048])
@pytest.mark.parametrize("excess", [-1, 0, 1])
def test_rows_of_about_k_columns(device, topk, excess):
    (ids,) = check_op(
        "select_topk", {"scores": Draw(1, device).normal(3, topk + excess), "topk": topk}
    )
    if excess <= 0:
        assert (ids == torch.arange(topk, device=device).where(ids >= 0, -1)).all()
        assert ((ids >= 0).sum(1) == topk + excess).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ragged_rows(device, dtype):
    case = select_topk_case(Draw(2, device), num_rows=40, topk=50, ragged=True, index_dtype=dtype)
    check_op("select_topk", case)
    check_op("select_topk", case | {"row_starts": None})
    check_op("select_topk", case | {"row_ends": None})


def test_columns_outside_of_a_row_are_never_read(device):
    scores = Draw(3, device).normal(6, 200)
    starts = torch.full((6,), 20, device=device)
    ends = torch.tensor([20, 21, 60, 100, 19, 0], device=device)
    expected = sparsemla.select_topk(scores, topk=40, row_starts=starts, row_ends=ends)
    for garbage in (math.inf, math.nan, -math.inf, 3e38):
        column = torch.arange(200, device=device)
        outside = (column < starts[:, None]) | (column >= ends[:, None])
        dirty = scores.masked_fill(outside, garbage)
        got = sparsemla.select_topk(dirty, topk=40, row_starts=starts, row_ends=ends)
        assert_equal("ids", got, expected)
    assert expected[:, 0].tolist() == [-1, 0, 0, expected[3, 0].item(), -1, -1]


def test_ends_beyond_the_row_are_clamped(device):
    scores = Draw(4, device).normal(3, 50)
    ends = torch.tensor([50, 51, 2**31 - 1], dtype=torch.int32, device=device)
    check_op("select_topk", {"scores": scores, "topk": 60, "row_ends": ends})


def test_bfloat16_scores_tie_often(device):
    scores = Draw(5, device).normal(4, 3000).bfloat16()
    (ids,) = check_op("select_topk", {"scores": scores, "topk": 512})
    assert ids[1].tolist() == select_by_hand(scores[1].tolist(), 512)


def test_strided_rows(device):
    scores = Draw(6, device).normal(5, 300)
    (expected,) = check_op("select_topk", {"scores": scores, "topk": 64})
    (ids,) = check_op("select_topk", {"scores": embed(scores), "topk": 64})
    assert_equal("ids", ids, expected)
    out = torch.empty(5, 100, dtype=torch.int32, device=device)[:, :64]
    assert sparsemla.select_topk(scores, topk=64, out=out) is out
    assert_equal("out", out.contiguous(), expected)


@pytest.mark.parametrize("shape", [(0, 10), (3, 0), (0, 0)], ids=str)
def test_no_rows_or_columns(device, shape):
    (ids,) = check_op("select_topk", {"scores": torch.zeros(shape, device=device), "topk": 4})
    assert (ids == -1).all()


@pytest.mark.parametrize("page_size", [1, 61, 64])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_slots(device, page_size, dtype):
    case = select_topk_case(
        Draw(7, device), num_rows=40, ragged=True, index_dtype=dtype, page_size=page_size
    )
    (slots,) = check_op("select_topk", case)
    pages = {name: case.pop(name) for name in ("page_table", "request_ids", "page_size")}
    ids = sparsemla.select_topk(**case)
    assert_equal("slots", slots, sparsemla.to_slots(ids, **pages))


def test_reruns_are_equal(device):
    scores = Draw(7, device).integers(0, 9, 4, 4000).float()
    first = sparsemla.select_topk(scores, topk=1024)
    for _ in range(20):
        assert_equal("ids", sparsemla.select_topk(scores, topk=1024), first)


VALUES = st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 3e38])
ROWS = st.lists(VALUES | st.floats(width=32), min_size=1, max_size=40)


@given(row=ROWS, topk=st.integers(1, 45))
def test_any_row(row, topk):
    scores = torch.tensor([row])
    assert sparsemla.select_topk(scores, topk=topk)[0].tolist() == select_by_hand(row, topk)


@given(row=ROWS, topk=st.integers(1, 20), start=st.integers(0, 45), end=st.integers(0, 45))
def test_any_part_of_a_row(row, topk, start, end):
    ids = sparsemla.select_topk(
        torch.tensor([row]),
        topk=topk,
        row_starts=torch.tensor([start]),
        row_ends=torch.tensor([end]),
    )
    assert ids[0].tolist() == select_by_hand(row[start:end], topk)


def merge_by_hand(values, indices, topk):
    """The definition in plain Python, for one row: parts of candidates."""
    pairs = zip(itertools.chain(*values), itertools.chain(*indices), strict=True)
    best = sorted((math.isnan(v), -v if not math.isnan(v) else 0.0, i) for v, i in pairs if i >= 0)
    chosen = sorted(i for _, _, i in best[:topk])
    return chosen + [-1] * (topk - len(chosen))


@pytest.mark.parametrize("topk", [1, 7, 64, 200])
@pytest.mark.parametrize(("num_parts", "width"), [(1, 1), (3, 5), (8, 17)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_merge(device, num_parts, width, topk, dtype):
    case = merge_topk_case(
        Draw(8, device), num_parts=num_parts, width=width, topk=topk, index_dtype=dtype
    )
    (ids,) = check_op("merge_topk", case)
    row = [[part[2].tolist() for part in case[name]] for name in ("values", "indices")]
    assert ids[2].tolist() == merge_by_hand(*row, topk)


def test_merged_parts_select_the_same_as_the_whole_row(device):
    scores = Draw(9, device).integers(0, 50, 3, 900).float()
    starts = (0, 1, 300, 780, 900)
    parts = [
        (first, sparsemla.select_topk(scores[:, first:end], topk=60))
        for first, end in itertools.pairwise(starts)
    ]
    ids = torch.stack([part.where(part < 0, part + first) for first, part in parts])
    values = scores.expand(len(parts), -1, -1).gather(2, ids.clamp_min(0).long())
    (merged,) = check_op("merge_topk", {"values": values, "indices": ids, "topk": 60})
    assert_equal("ids", merged, sparsemla.select_topk(scores, topk=60))


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_merge_of_nothing(device, shape):
    values = torch.zeros(shape, device=device)
    (ids,) = check_op("merge_topk", {"values": values, "indices": values.int(), "topk": 4})
    assert (ids == -1).all()


def merges_with_the_largest_index(device, dtype=torch.int32):
    """Merges whose largest index is 2^31 - 1: by value, among ties, and beside entries of -2^31."""
    for seed in range(4):
        case = merge_topk_case(Draw(seed, device), width=20, topk=30, index_dtype=dtype)
        ids = case["indices"]
        largest = ids.amax((0, 2), keepdim=True)
        case["indices"] = (2**31 - 1 - (largest - ids)).where(ids >= 0, (-1, -(2**31))[seed % 2])
        if seed > 1:
            case["values"] = case["values"].masked_fill(ids == largest, 10)
        yield case


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_largest_index_is_a_candidate(device, dtype):
    for case in merges_with_the_largest_index(device, dtype):
        (ids,) = check_op("merge_topk", case)
        columns = [[part[2].tolist() for part in case[name]] for name in ("values", "indices")]
        assert ids[2].tolist() == merge_by_hand(*columns, case["topk"])


@given(
    values=st.lists(st.lists(VALUES, min_size=5, max_size=5), min_size=1, max_size=6),
    ids=st.permutations(range(40)),
    empty=st.sets(st.integers(0, 29)),
    topk=st.integers(1, 35),
)
def test_any_merge(values, ids, empty, topk):
    ids = [-1 - i if place in empty else i for place, i in enumerate(ids[: 5 * len(values)])]
    parts = [ids[first : first + 5] for first in range(0, len(ids), 5)]
    merged = sparsemla.merge_topk(
        torch.tensor(values)[:, None], torch.tensor(parts)[:, None], topk=topk
    )
    assert merged[0].tolist() == merge_by_hand(values, parts, topk)

"""The portable kernels of lists at their limits; test_tiers.py has their cases."""

import pytest
import torch

from sparsemla import ContextShard, dispatch, reference
from sparsemla_lab.testing.cases import Draw, embed, own_positions_case, share_lists_case
from sparsemla_lab.testing.compare import assert_equal

pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check_lists(case):
    """Run the kernel on slices of poison, then the reference."""
    case = dict(case)
    expected = reference.share_lists(**case)
    results = [embed(torch.full_like(tensor, 77)) for tensor in expected]
    lengths = torch.full_like(expected[1], 77)
    dispatch.load("share_lists", "triton")(
        **case, out=results[0], lengths=lengths, token_mask=results[2]
    )
    for name, got, wanted in zip(
        ("out", "lengths", "token_mask"), (results[0], lengths, results[2]), expected, strict=True
    ):
        assert_equal(name, got.contiguous(), wanted)
    return expected


def test_lists_longer_than_a_step():
    draw = Draw(61, DEVICE)
    case = share_lists_case(draw, num_tokens=5, list_tokens=3, topk=2100, num_rows=3000)
    _, lengths, _ = check_lists(case)
    assert (lengths > 1024).all()
    check_lists(case | {"topk_lengths": draw.tensor([2100, 0, 1025, 1024, -1])})


def test_lists_with_a_repeated_row_are_not_merged():
    case = share_lists_case(Draw(64, DEVICE), num_tokens=4, topk=9, list_tokens=2)
    case["topk_indices"][1, 1] = case["topk_indices"][1, 0]
    _, lengths, _ = check_lists(case)
    assert lengths[0] == 18 > lengths[1]


def test_lists_without_entries_or_tokens():
    for shape in ((5, 0), (0, 9)):
        case = {"topk_indices": torch.empty(shape, dtype=torch.int32, device=DEVICE)}
        check_lists(case | {"list_tokens": 4})


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_largest_rows(dtype):
    last = torch.iinfo(dtype).max
    rows = [[0, last - 1, last], [last, -1, -1], [1, 2, last]]
    case = {"topk_indices": torch.tensor(rows, dtype=dtype, device=DEVICE)}
    expected, *_ = check_lists(case | {"list_tokens": 3})
    assert expected[0, :5].tolist() == [0, 1, 2, last - 1, last]


def test_lengths_beyond_int32():
    draw = Draw(62, DEVICE)
    case = share_lists_case(draw, num_tokens=4, list_tokens=2)
    lengths = draw.tensor([2**40, -(2**40) + 3, 2**32 + 1, 2**63 - 1], torch.int64)
    check_lists(case | {"topk_lengths": lengths})


def check_own(case):
    """Run the kernel on slices of poison, then the reference."""
    expected = reference.own_positions(**case)
    results = [embed(torch.full_like(tensor, 77)) for tensor in expected]
    dispatch.load("own_positions", "triton")(**case, out=results[0], counts=results[1])
    for name, got, wanted in zip(("out", "counts"), results, expected, strict=True):
        assert_equal(name, got.contiguous(), wanted)
    return expected


@pytest.mark.parametrize("shard", [ContextShard(1, 2), ContextShard(0, 1, 64, parts=8)], ids=str)
def test_own_positions_of_lists_longer_than_a_step(shard):
    draw = Draw(65, DEVICE)
    case = own_positions_case(draw, num_tokens=4, topk=4200, num_positions=9000, shard=shard)
    _, counts = check_own(case)
    assert (counts[2:] > 300).all()


def test_own_positions_of_no_entries_and_no_tokens():
    for shape in ((5, 0), (0, 9)):
        empty = torch.empty(shape, dtype=torch.int32, device=DEVICE)
        check_own({"topk_indices": empty, "shard": ContextShard(1, 2, parts=4)})


@pytest.mark.parametrize("shard", [ContextShard(0, 8, 2**28 - 1), ContextShard(0, 1, 2**31 - 1)])
def test_own_positions_at_the_ends_of_the_range(shard):
    ends = [-(2**63), -1, 0, 2**31 - 1, 2**31, 2**32 + 4, 2**63 - 1, 2**31 - 2]
    case = {"topk_indices": torch.tensor([ends], device=DEVICE), "shard": shard}
    out, counts = check_own(case)
    last = shard.to_local(torch.tensor([2**31 - 1, 2**31 - 2])).tolist()
    assert out[0, 0, : counts[0, 0]].tolist()[-2:] == last

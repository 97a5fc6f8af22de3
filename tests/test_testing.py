"""The testing tools detect the errors that they exist for."""

import math

import pytest
import torch

import sparsemla
from sparsemla import FP8_DS_MLA, PagedCache
from sparsemla_lab.testing import compare
from sparsemla_lab.testing.cases import (
    GARBAGE_PAGE,
    Draw,
    adversarial_scores,
    embed,
    invalid_ids,
    page_tables,
    poisoned_cache,
    selections,
    sparse_decode_case,
    sparse_prefill_case,
)
from sparsemla_lab.testing.compare import (
    Tolerance,
    assert_close,
    assert_equal,
    assert_few_differ,
    assert_rows_close,
    assert_selection,
    check_op,
    cosine_difference,
)
from sparsemla_lab.testing.poison import poisoned_empty

TIGHT = Tolerance(1e-6, 1e-6)


def changed(at, value):
    tensor = torch.arange(12.0).view(3, 4)
    tensor[at] = value
    return tensor


@pytest.mark.parametrize(
    ("actual", "message"),
    [
        (changed((1, 2), 6.5), r"at \[1, 2\]: got 6.5, expected 6"),
        (changed((1, 2), math.nan), r"NaN at other positions\n  at \[1, 2\]: got nan, expected 6"),
        (changed((0, 0), math.inf), r"\+inf at other positions"),
        (changed((0, 0), -math.inf), "-inf at other positions"),
        (torch.zeros(3, 5), r"shape \[3, 5\], expected \[3, 4\]"),
    ],
)
def test_differences_are_found_and_shown(actual, message):
    with pytest.raises(AssertionError, match=message):
        assert_close("x", actual, torch.arange(12.0).view(3, 4), TIGHT)


def test_infinities_and_nan_at_the_same_places_are_equal():
    x = torch.tensor([math.nan, math.inf, -math.inf, 1.0])
    assert_close("x", x, x.clone(), TIGHT)
    with pytest.raises(AssertionError, match="inf at other positions"):
        assert_close("x", x, torch.tensor([math.nan, -math.inf, math.inf, 1.0]), TIGHT)


def test_one_limit_is_enough_for_an_element():
    ones = torch.ones(100)
    assert_close("abs", ones + 1e-3, ones, Tolerance(2e-3, 0, 1))
    assert_close("rel", 1000 * ones + 1, 1000 * ones, Tolerance(0, 2e-3, 1))
    with pytest.raises(AssertionError, match="100 of 100 elements"):
        assert_close("x", ones + 1e-3, ones, Tolerance(1e-4, 1e-4, 1))


def test_cosine_of_the_whole_tensor_is_checked():
    expected = torch.full((1000,), 1e-4)
    with pytest.raises(AssertionError, match="cosine difference"):
        assert_close("x", expected * 0, expected, Tolerance(1e-3, 1e-3, 1e-3))
    assert cosine_difference(expected, expected) == pytest.approx(0, abs=1e-12)
    assert cosine_difference(expected * 0, expected * 0) == 0


def test_assert_equal_compares_bits():
    with pytest.raises(AssertionError, match="1 of 2 elements differ"):
        assert_equal("x", torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    with pytest.raises(AssertionError, match="dtype"):
        assert_equal("x", torch.zeros(2), torch.zeros(2).double())
    nan = torch.tensor([math.nan])
    assert_equal("x", nan, nan.clone())
    codes = torch.tensor([1, 2], dtype=torch.uint8).view(torch.float8_e4m3fn)
    with pytest.raises(AssertionError, match=r"at \[1\]"):
        assert_equal("x", codes, codes[[0, 0]])


def test_assert_few_differ_limits_the_share():
    x = torch.zeros(1000)
    y = x.index_fill(0, torch.arange(10), 1)
    assert_few_differ("x", y, x)
    with pytest.raises(AssertionError, match="11 of 1000"):
        assert_few_differ("x", y.index_fill(0, torch.arange(11), 1), x)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([0, 2, 3], "left out id 4"),
        ([3, 2, 4], "does not ascend"),
        ([2, 2, 4], "does not ascend"),
        ([2, -1, 4], "does not ascend"),
        ([2, 3, -1], "has 2 ids, expected 3"),
    ],
)
def test_wrong_selections_are_found(ids, message):
    scores = torch.tensor([[0.0, 1.0, 3.0, 3.0, 9.0]])
    assert_selection("ids", torch.tensor([[2, 3, 4]]), scores, 3)
    with pytest.raises(AssertionError, match=message):
        assert_selection("ids", torch.tensor([ids]), scores, 3)


def test_selection_of_near_ties_may_differ():
    scores = torch.tensor([[1.0, 1.0 + 1e-7, -torch.inf]])
    for chosen in (0, 1):
        assert_selection("ids", torch.tensor([[chosen]]), scores, 1)


def test_rows_in_wrong_slots_are_found():
    caches = [PagedCache.allocate(FP8_DS_MLA, 2, 4) for _ in range(2)]
    rows = Draw(0).normal(3, 576)
    caches[0].write(torch.tensor([0, 1, 2]), rows)
    caches[1].write(torch.tensor([0, 1, 3]), rows)
    with pytest.raises(AssertionError, match="cache"):
        assert_rows_close("cache", *caches)


def test_check_op_finds_wrong_results(monkeypatch):
    case = sparse_prefill_case(Draw(1), with_sink=True, with_lengths=True)
    right = sparsemla.sparse_prefill

    def without(*names):
        return lambda **arguments: right(**arguments | dict.fromkeys(names))

    check_op("sparse_prefill", case)
    for names in (("attn_sink",), ("topk_lengths",)):
        monkeypatch.setattr(compare.ops, "sparse_prefill", without(*names))
        with pytest.raises(AssertionError, match="sparse_prefill"):
            check_op("sparse_prefill", case)


def test_new_memory_is_poisoned_only_inside_the_block():
    with poisoned_empty():
        fresh = [
            torch.empty(3),
            torch.ones(2).new_empty(3),
            torch.empty_like(torch.ones(3, dtype=torch.bfloat16)),
            torch.empty_strided((2, 2), (1, 2)),
            torch.empty(3, dtype=torch.float8_e4m3fn).float(),
        ]
        assert torch.empty(2, dtype=torch.int32).tolist() == [2**31 - 1] * 2
    assert all(tensor.isnan().all() for tensor in fresh)
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(RuntimeError), poisoned_empty():
        raise RuntimeError
    assert not torch.are_deterministic_algorithms_enabled()


def test_equal_seeds_give_equal_inputs():
    first, second, other = (sparse_decode_case(Draw(seed), format=FP8_DS_MLA) for seed in (3, 3, 4))
    for name in ("q", "topk_indices"):
        assert_equal(name, first[name], second[name])
        assert not torch.equal(first[name], other[name])
    assert_equal("cache", first["cache"].data, second["cache"].data)


def test_selections_mix_valid_and_invalid_ids():
    rows = torch.arange(0, 100, 2)
    ids = selections(Draw(5), 20, 64, rows, 100, share=0.5)
    valid = (ids >= 0) & (ids < 100)
    assert (valid.sum(1) == 32).all()
    assert (ids[valid] % 2 == 0).all()
    assert {-(2**31), 2**31 - 1, -1, 100, GARBAGE_PAGE} <= set(ids[~valid].tolist())
    for row in ids:
        chosen = row[(row >= 0) & (row < 100)]
        assert len(chosen.unique()) == 32
    assert all(i < 0 or i >= 2000000 for i in invalid_ids(2000000))


def test_unused_cache_rows_are_nan():
    cache = poisoned_cache(Draw(6), FP8_DS_MLA, 3, 4, torch.tensor([1, 5]))
    rows = cache.read(torch.arange(12))
    assert rows[[1, 5]].isfinite().all()
    assert rows[[0, 2, 3, 4, 6, 7, 8, 9, 10, 11]].isnan().all()


def test_page_tables_are_shuffled_and_end_in_garbage():
    table, num_pages = page_tables(Draw(7), [0, 1, 64, 65, 200], 64)
    used = [table[b, : -(-n // 64)].tolist() for b, n in enumerate([0, 1, 64, 65, 200])]
    pages = [page for row in used for page in row]
    assert len(set(pages)) == len(pages) == 8
    assert max(pages) < num_pages
    assert pages != sorted(pages)
    assert (table[:, -2:] == GARBAGE_PAGE).all()
    assert (table[0] == GARBAGE_PAGE).all()


def test_embedded_tensors_keep_values_but_not_strides():
    x = Draw(8).normal(2, 3, 4)
    inner = embed(x)
    assert_equal("x", inner.contiguous(), x)
    assert not inner.is_contiguous()
    assert inner.stride(-1) == 1


def test_adversarial_rows_match_their_names():
    rows = adversarial_scores(Draw(9), 1000, 64)
    shared = rows["shared top 22 bits"].view(torch.int32) >> 10
    assert len(shared.unique()) == 1
    assert len(rows["shared top 22 bits"].unique()) > 500
    assert (rows["plateau of zeros"] == 0).sum() > 1000 - 64
    signs = rows["signed zeros"].view(torch.int32).unique()
    assert len(signs) == 2
    assert (rows["ascending"].diff() >= 0).all()
    assert (rows["descending"].diff() <= 0).all()
    assert (rows["subnormal"].abs() < 1e-37).all()

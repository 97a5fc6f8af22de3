"""No page id, position or offset, however large, wraps around to a row that exists."""

import pytest
import torch

import sparsemla
from sparsemla import BF16_576, FP8_DS_MLA, INDEX_FP8, dispatch, reference, slots_of
from sparsemla_lab.testing.cases import (
    Draw,
    dense_decode_case,
    gather_dequant_case,
    indexer_scores_paged_case,
    indexer_topk_blocks_case,
    indexer_topk_case,
    indexer_topk_of_blocks_case,
)
from sparsemla_lab.testing.compare import assert_equal, check_op, run_op

WRAPPING = [2**58, -(2**58), 2**63 - 1, -(2**63), 2**57 + 1, 2**32, 2**31, 2**26]
"""Ids of pages of 64 tokens that overflow: their slots wrap to small numbers in 32 or 64 bits."""


def with_page(case, page):
    table = case["page_table"].to(torch.int64, copy=True)
    table[0, 1] = page
    table[1, 0] = page
    return case | {"page_table": table}


PAGED = {
    "dense_decode": lambda draw: dense_decode_case(draw, format=FP8_DS_MLA, seq_lens=[140, 30]),
    "dense_decode, bfloat16, few heads": lambda draw: dense_decode_case(
        draw, format=BF16_576, seq_lens=[140, 30], num_heads=3
    ),
    "dense_decode, 64 heads": lambda draw: dense_decode_case(
        draw, format=FP8_DS_MLA, seq_lens=[140, 30], num_heads=64
    ),
    "gather_dequant": lambda draw: gather_dequant_case(draw, FP8_DS_MLA, seq_lens=[140, 30]),
    "indexer_scores_paged": lambda draw: indexer_scores_paged_case(
        draw, seq_lens=[140, 30], format=INDEX_FP8
    ),
    "indexer_topk": lambda draw: indexer_topk_case(
        draw, query_lens=[1, 1], seq_lens=[140, 30], topk=100
    ),
    "indexer_topk, slots": lambda draw: indexer_topk_case(
        draw, query_lens=[1, 1], seq_lens=[140, 30], topk=100, as_slots=True
    ),
    "indexer_topk_blocks": lambda draw: indexer_topk_blocks_case(
        draw, query_lens=[1, 1], seq_lens=[140, 30], topk=100, topk_blocks=20
    ),
    "indexer_topk_of_blocks": lambda draw: indexer_topk_of_blocks_case(
        draw, query_lens=[1, 1], seq_lens=[140, 30], topk=20, num_blocks=16
    ),
}


@pytest.mark.parametrize("page", WRAPPING)
@pytest.mark.parametrize("name", PAGED)
def test_pages_with_wrapping_slots_are_missing(device, name, page):
    op = name.split(",")[0]
    case = with_page(PAGED[name](Draw(0, device)), page)
    missing = with_page(case, -1)
    if name == "indexer_topk, slots" and 0 < page < 2**25:
        missing = case  # slots of pages that this cache lacks, but another may have
    for result, expected in zip(run_op(op, case), run_op(op, missing), strict=True):
        assert_equal(name, result.clone(), expected)
    check_op(op, case)


@pytest.mark.parametrize("page", WRAPPING)
def test_pages_with_slots_beyond_the_dtype_count_as_missing(device, page):
    table = torch.tensor([[3, page]], device=device)
    ids = torch.tensor([[0, 64, 69, 127, 128]], device=device)
    request = torch.zeros(1, dtype=torch.long, device=device)
    expected = torch.tensor([[192, -1, -1, -1, -1]], device=device, dtype=torch.int32)
    for op in (sparsemla.to_slots, reference.to_slots):
        assert_equal("slots", op(ids, table, request, page_size=64), expected)
    tokens = ids[0], table, torch.zeros_like(ids[0])
    for op in (sparsemla.entry_slots, reference.entry_slots):
        assert_equal("entries", op(*tokens, ratio=1, page_size=64), expected[0])
    for op in (sparsemla.visible_slots, reference.visible_slots):
        slots, _ = op(*tokens, width=2, page_size=64)
        assert slots.tolist() == [[192, -1], [255, -1], [-1, -1], [-1, -1], [-1, -1]]
    scores = torch.ones(1, 70, device=device)
    arguments = {"page_table": table, "request_ids": request, "page_size": 64}
    for op in (sparsemla.select_topk, reference.select_topk):
        slots = op(scores, topk=70, **arguments)
        assert (slots[0, 64:] == -1).all()
        assert slots[0, :64].tolist() == list(range(192, 256))


def test_slots_up_to_int32_max_are_valid(device):
    table = torch.tensor([[2**31 // 61, 2**31 // 61 - 1, 2**31 // 61 + 1]], device=device)
    ids = torch.arange(3 * 61, device=device)[None]
    request = torch.zeros(1, dtype=torch.long, device=device)
    wanted = table[0].repeat_interleave(61) * 61 + ids[0] % 61
    wanted = torch.where(wanted < 2**31, wanted, -1).int()[None]
    for op in (sparsemla.to_slots, reference.to_slots):
        assert_equal("slots", op(ids, table, request, page_size=61), wanted)


def test_slots_of_64_bits_do_not_wrap():
    table = torch.tensor([[2**58, 2**57 - 1, 2**40, -(2**63)]])
    slots = slots_of(table, torch.zeros(4, dtype=int), torch.arange(0, 256, 64), 64)
    assert slots.tolist() == [-1, (2**57 - 1) * 64, 2**46, -1]
    assert slots_of(table, torch.zeros(1, dtype=int), torch.zeros(1, dtype=int), 1).tolist() == [
        2**58
    ]


def test_workspace_rows_beyond_int32_are_minus_one(device):
    starts = torch.tensor([2**31 - 3, 2**32 + 5, -(2**40)], device=device)
    zeros = torch.zeros(3, dtype=torch.long, device=device)
    arguments = {
        "topk_indices": torch.arange(5, device=device).expand(3, 5).contiguous(),
        "page_table": torch.zeros(1, 1, dtype=torch.int32, device=device),
        "request_ids": zeros,
        "page_size": 8,
        "workspace_starts": starts,
        "prefill_request_ids": torch.arange(3, device=device),
    }
    for op in (sparsemla.to_slots, reference.to_slots):
        rows = op(**arguments).tolist()
        assert rows[0] == [2**31 - 3, 2**31 - 2, 2**31 - 1, -1, -1]
        assert rows[1] == rows[2] == [-1] * 5


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("limit", [1, 1 << 20])
@pytest.mark.parametrize("before", [1, 3, 40])
def test_tokens_before_the_first_request_select_nothing(device, before, limit, causal):
    case = indexer_topk_case(Draw(19, device), query_lens=[7, 4], seq_lens=[50, 60], causal=causal)
    for name in ("index_q", "weights"):
        rows = case[name]
        case[name] = torch.cat([rows[:1].expand(before, *rows.shape[1:]), rows, rows[:2]])
    case["input_row_offsets"] = case["input_row_offsets"] + before
    out = torch.full((before + 13, 16), 77, dtype=torch.int32, device=device)
    sparsemla.indexer_topk(**case, max_workspace_bytes=limit, out=out)
    assert_equal("ids", out, reference.indexer_topk(**case))
    assert (out[:before] == -1).all()
    assert (out[-2:] == -1).all()
    assert (out[before:-2, 0] >= 0).all()


def triton(op, arguments, outputs):
    """Run a portable kernel, in the interpreter without a GPU."""
    pytest.importorskip("triton")
    dispatch.load(op, "triton")(**arguments, **outputs)
    return next(iter(outputs.values()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests above run these kernels")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("page", WRAPPING)
def test_portable_kernels(page):
    table = torch.tensor([[3, page]])
    ids = torch.tensor([[0, 64, 69, 127, 128]])
    arguments = {"topk_indices": ids, "page_table": table, "request_ids": torch.zeros(1).long()}
    out = torch.full((1, 5), 77, dtype=torch.int32)
    slots = triton("to_slots", arguments | {"page_size": 64}, {"out": out})
    assert slots.tolist() == [[192, -1, -1, -1, -1]]

    scores, out = torch.ones(1, 70), torch.full((1, 70), 77, dtype=torch.int32)
    arguments = {"scores": scores, "topk": 70, "row_starts": None, "row_ends": None}
    arguments |= {"page_table": table, "request_ids": torch.zeros(1).long(), "page_size": 64}
    slots = triton("select_topk", arguments, {"out": out})
    assert slots.tolist() == [[*range(192, 256), *[-1] * 6]]

    case = with_page(PAGED["dense_decode"](Draw(0)), page)
    out, lse = torch.empty(2, 1, 8, 512).bfloat16(), torch.empty(2, 1, 8)
    triton("dense_decode", case, {"out": out, "lse": lse})
    assert (lse[1] == -torch.inf).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the tests above run these kernels")
@pytest.mark.parametrize(("before", "causal"), [(1, False), (9, True)])
def test_portable_kernels_and_tokens_before_the_first_request(before, causal):
    case = indexer_topk_case(
        Draw(19), query_lens=[7, 4], seq_lens=[50, 60], causal=causal, num_heads=2
    )
    for name in ("index_q", "weights"):
        rows = case[name]
        case[name] = torch.cat([rows[:1].expand(before, *rows.shape[1:]), rows, rows[:2]])
    case["input_row_offsets"] = case["input_row_offsets"] + before
    for limit in (1, 1 << 20):
        out = torch.full((before + 13, 16), 77, dtype=torch.int32)
        triton("indexer_topk", case | {"max_workspace_bytes": limit}, {"out": out})
        assert_equal("ids", out, reference.indexer_topk(**case))

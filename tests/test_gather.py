import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsemla
from sparsemla import BF16_576, FP8_584, FP8_DS_MLA, PagedCache, reference
from sparsemla_lab.testing.cases import (
    GARBAGE_PAGE,
    Draw,
    embed,
    entry_slots_case,
    gather_dequant_case,
    paged_requests,
    to_slots_case,
    visible_slots_case,
)
from sparsemla_lab.testing.compare import assert_equal, check_op
from sparsemla_lab.testing.poison import poisoned_empty


@given(
    page_size=st.integers(1, 9),
    index=st.one_of(st.integers(-3, 40), st.sampled_from([-(2**31), 2**31 - 1])),
    prefill=st.integers(-1, 1),
    request_id=st.integers(0, 1),
)
def test_slots_follow_the_table_of_cases(page_size, index, prefill, request_id):
    table = torch.tensor([[5, -1, 9], [0, 3, -(2**31)]], dtype=torch.int32)
    page, offset = divmod(index, page_size)
    if index < 0 or page >= 3:
        expected = -1
    elif prefill >= 0:
        expected = [50, 1000][prefill] + index
    elif table[request_id, page] < 0:
        expected = -1
    else:
        expected = int(table[request_id, page]) * page_size + offset
    got = sparsemla.to_slots(
        torch.tensor([[index]], dtype=torch.int32),
        table,
        torch.tensor([request_id]),
        page_size=page_size,
        workspace_starts=torch.tensor([50, 1000]),
        prefill_request_ids=torch.tensor([prefill]),
    )
    assert got.item() == expected


@pytest.mark.parametrize("sizes", [(0, 20), (3, 0)], ids=["no tokens", "no columns"])
def test_empty_selections(device, sizes):
    case = to_slots_case(Draw(1, device))
    case["topk_indices"] = case["topk_indices"][: sizes[0], : sizes[1]]
    case["request_ids"] = case["request_ids"][: sizes[0]]
    (out,) = check_op("to_slots", case)
    assert out.shape == sizes


def test_a_table_without_pages_gives_no_slots(device):
    case = to_slots_case(Draw(1, device))
    case["page_table"] = case["page_table"][:, :0]
    (out,) = check_op("to_slots", case)
    assert (out == -1).all()


def test_slots_of_strided_selections(device):
    case = to_slots_case(Draw(2, device))
    (expected,) = check_op("to_slots", case)
    case["topk_indices"] = embed(case["topk_indices"])
    case["page_table"] = embed(case["page_table"])
    out = torch.empty(9, 64, dtype=torch.int32, device=device)[:, :20]
    assert sparsemla.to_slots(**case, out=out) is out
    assert_equal("out", out.contiguous(), expected)


def page_slot(case, request, key):
    """The slot of a key by the page table, in integers."""
    table, size = case["page_table"].tolist(), case["page_size"]
    if not (0 <= request < len(table) and 0 <= key < len(table[0]) * size):
        return -1
    page = table[request][key // size]
    return page * size + key % size if page >= 0 else -1


# Ends of windows of 4 and of 128 tokens; drafts around them; a prefill.
TOKENS = [(0, 10), (126, 4), (255, 3), (3, 1), (127, 1), (128, 1), (257, 1)]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32])
@pytest.mark.parametrize(("ratio", "page_size"), [(1, 64), (3, 1), (4, 1), (4, 64), (128, 2)])
def test_tokens_complete_entries(device, ratio, page_size, dtype):
    signed = torch.int32 if dtype == torch.uint32 else dtype
    case = entry_slots_case(
        Draw(41, device), requests=TOKENS, ratio=ratio, page_size=page_size, dtype=signed
    )
    (slots,) = check_op("entry_slots", case)
    tokens = zip(case["positions"].tolist(), case["request_ids"].tolist(), strict=True)
    expected = [
        page_slot(case, request, position // ratio) if (position + 1) % ratio == 0 else -1
        for position, request in tokens
    ]
    assert slots.tolist() == expected
    assert ratio > 4 or any(slot >= 0 for slot in expected)
    if dtype == torch.uint32:
        case["positions"] = case["positions"].view(torch.uint32)
        assert_equal("uint32", sparsemla.entry_slots(**case), slots)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("width", [1, 128, 300])
@pytest.mark.parametrize(("ratio", "page_size"), [(1, 64), (3, 1), (4, 64), (128, 2)])
def test_tokens_see_the_last_keys(device, ratio, page_size, width, dtype):
    case = visible_slots_case(
        Draw(42, device),
        requests=TOKENS,
        ratio=ratio,
        page_size=page_size,
        width=width,
        dtype=dtype,
    )
    slots, lengths = check_op("visible_slots", case)
    tokens = zip(case["positions"].tolist(), case["request_ids"].tolist(), strict=True)
    for token, (position, request) in enumerate(tokens):
        known = 0 <= request < len(TOKENS) and 0 <= position < 2**63 - 1
        seen = range((position + 1) // ratio if known else 0)[-width:]
        expected = [page_slot(case, request, key) for key in seen]
        assert lengths[token] == len(seen)
        assert slots[token].tolist() == expected + [-1] * (width - len(seen))


def test_the_raw_window_and_the_entries_of_a_token(device):
    """The rule of DeepSeek-V4: positions p - 127 .. p, and the entries complete with p."""
    positions = torch.tensor([3, 4, 7, 126, 127, 128, 255, 256, 257], device=device)
    table = torch.arange(5, device=device)[None]
    tokens = positions, table, torch.zeros_like(positions)
    window, lengths = sparsemla.visible_slots(*tokens, width=128, page_size=64)
    assert lengths.tolist() == [4, 5, 8, 127, 128, 128, 128, 128, 128]
    assert window[:, 0].tolist() == [0, 0, 0, 0, 0, 1, 128, 129, 130]
    last = window.gather(1, lengths.long()[:, None] - 1)[:, 0]
    assert last.tolist() == positions.tolist()
    _, lengths = sparsemla.visible_slots(*tokens, width=80, ratio=4, page_size=64)
    assert lengths.tolist() == [1, 1, 2, 31, 32, 32, 64, 64, 64]
    entries, lengths = sparsemla.visible_slots(*tokens, width=2, ratio=128, page_size=2)
    assert lengths.tolist() == [0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert entries[-1].tolist() == [0, 1]


def test_slots_of_no_tokens_and_of_no_pages(device):
    case = visible_slots_case(Draw(43, device), width=5)
    for name in ("positions", "request_ids"):
        case[name] = case[name][:0]
    slots, lengths = check_op("visible_slots", case)
    assert slots.shape == (0, 5)
    assert lengths.shape == (0,)
    del case["width"]
    assert check_op("entry_slots", case)[0].shape == (0,)
    case = visible_slots_case(Draw(43, device), width=5)
    case["page_table"] = case["page_table"][:, :0]
    slots, lengths = check_op("visible_slots", case)
    assert (slots == -1).all()
    assert lengths.max() == 5
    case["page_table"] = case["page_table"][:0]
    assert (check_op("visible_slots", case)[1] == 0).all()


def test_slots_of_keys_in_strided_outputs(device):
    case = visible_slots_case(Draw(44, device))
    expected = check_op("visible_slots", case)
    case["page_table"] = embed(case["page_table"])
    out = torch.empty(len(expected[0]), 64, dtype=torch.int32, device=device)[:, :20]
    lengths = torch.empty(len(out), dtype=torch.int32, device=device)
    results = sparsemla.visible_slots(**case, out=out, lengths=lengths)
    assert results[0] is out
    assert results[1] is lengths
    assert_equal("out", out.contiguous(), expected[0])
    assert_equal("lengths", lengths, expected[1])


def check_gather(case):
    """Gather into a workspace; rows without a request must not change."""
    out = case["out"]
    expected = out.clone()
    with poisoned_empty():
        assert sparsemla.gather_dequant(**case) is out
    reference.gather_dequant(**case | {"out": expected})
    assert_equal("out", out, expected)
    return out


@pytest.mark.parametrize("page", [-1, -(2**31), 4, GARBAGE_PAGE])
def test_pages_out_of_range_give_zero_rows(device, page):
    case = gather_dequant_case(Draw(6, device), FP8_DS_MLA, seq_lens=[10], page_size=4)
    case["page_table"][0, 1] = max(page, case["cache"].num_pages) if page > 0 else page
    out = check_gather(case)
    assert (out[5:9] == 0).all()
    assert (out[1:5] != 0).any()


def test_odd_scales_are_dequantised_in_float32(device):
    case = gather_dequant_case(Draw(7, device), FP8_DS_MLA, seq_lens=[50])
    scales = case["cache"].fields().scales
    scales.copy_(Draw(8, device).normal(*scales.shape) * 3)
    check_gather(case)


def test_bfloat16_parts_are_copied_bit_for_bit(device):
    for fmt in (BF16_576, FP8_DS_MLA):
        case = gather_dequant_case(Draw(9, device), fmt, seq_lens=[64])
        stored = case["cache"].fields().bf16
        bits = Draw(10, device).integers(-(2**15), 2**15, *stored.shape, dtype=torch.int16)
        stored.copy_(bits.view(torch.bfloat16))
        out = sparsemla.gather_dequant(**case)
        page = int(case["page_table"][0, 0])
        assert_equal(fmt.name, out[1:65, fmt.head_dim - fmt.bf16_dim :], stored[page])


def test_a_workspace_may_be_strided(device):
    case = gather_dequant_case(Draw(11, device), FP8_584, seq_lens=[3, 9], page_size=2)
    expected = check_gather(case)
    wide = torch.full((len(expected), 700), -7.0, dtype=torch.bfloat16, device=device)
    sparsemla.gather_dequant(**case | {"out": wide[:, :512]})
    assert_equal("out", wide[:, :512].contiguous(), expected)
    assert (wide[:, 512:] == -7).all()


def test_a_batch_without_prefills_has_no_workspace(device):
    draw = Draw(40, device)
    case = to_slots_case(draw)
    decodes = torch.full_like(case["request_ids"], -1)
    starts = draw.tensor([])
    got = sparsemla.to_slots(**case, workspace_starts=starts, prefill_request_ids=decodes)
    assert_equal("slots", got, sparsemla.to_slots(**case))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.uint32])
def test_requests_that_end_behind_the_workspace_are_refused_if_validated(dtype):
    cache, table = paged_requests(Draw(0), FP8_DS_MLA, [9, 20], 8)
    lengths = torch.tensor([9, 20]).to(dtype)
    out = torch.full((29, 576), 7.0).bfloat16()
    gather = functools.partial(sparsemla.gather_dequant, cache, table, lengths, validate=True)
    for starts in (torch.tensor([0, 9]), torch.tensor([20, 0])):  # one ends in the last row
        gather(starts.to(dtype), out=out)
        before = out.clone()
        ends = r"workspace_starts \+ seq_lens must lie in \[0, 30\), got 30"
        with pytest.raises(ValueError, match=f"^gather_dequant: {ends}"):
            gather((starts + 1).to(dtype), out=out)
        assert_equal("out", out, before)


def test_requests_that_end_behind_their_pages_are_refused_if_validated():
    cache = PagedCache.allocate(FP8_DS_MLA, 6, 8)
    table, lengths, starts = torch.arange(6).view(2, 3), torch.tensor([9, 4]), torch.tensor([0, 9])
    out = torch.full((13, 576), 7.0).bfloat16()
    gather = functools.partial(
        sparsemla.gather_dequant, cache, table, lengths, starts, validate=True, out=out
    )
    gather(seq_starts=torch.tensor([15, 20]))
    before = out.clone()
    ends = r"seq_starts \+ seq_lens must lie in \[0, 25\), got 25 at \[0\]"
    with pytest.raises(ValueError, match=f"^gather_dequant: {ends}"):
        gather(seq_starts=torch.tensor([16, 20]))
    assert_equal("out", out, before)

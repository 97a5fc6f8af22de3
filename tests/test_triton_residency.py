"""The portable kernels of rows in fast memory at their limits; test_tiers.py has their cases."""

import copy

import pytest
import torch

from sparsemla import (
    FP8_584,
    FP8_DS_MLA,
    ContextShard,
    PagedCache,
    RowTable,
    dispatch,
    e4m3_format,
    reference,
    resolve_workspace_size,
)
from sparsemla_lab.testing.cases import (
    Draw,
    distant_pages,
    embed,
    fetch_rows_case,
    resolve_rows_case,
)
from sparsemla_lab.testing.compare import assert_equal

pytest.importorskip("triton")

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("out", "counts", "miss_slots", "miss_rows", "miss_counts", "new_counts")


def poison(shape, dtype=torch.int32):
    return torch.full(shape, 77, dtype=dtype, device=DEVICE)


def resolve(case):
    """Run the kernel on poisoned slices and a poisoned workspace; the results by name."""
    num_tokens, topk = case["topk_indices"].shape
    shard, per_seat = case["shard"], case["table"].rows_per_seat
    parts = () if shard is None or shard.parts is None else (len(shard.own_parts),)
    size = resolve_workspace_size(
        len(case["seats"]), topk, per_seat, max_query_len=case["max_query_len"]
    )
    results = {
        "out": embed(poison((num_tokens, *parts, topk))),
        "counts": poison((num_tokens, *parts)),
        **{name: embed(poison((num_tokens, topk))) for name in ("miss_slots", "miss_rows")},
        **{name: poison((num_tokens,)) for name in ("miss_counts", "new_counts")},
    }
    workspace = poison((size,), torch.uint8)
    dispatch.load("resolve_rows", "triton")(**case, **results, workspace=workspace)
    found = {name: result.contiguous() for name, result in results.items()}
    return found | vars(case["table"]) | {"stats": case["stats"]}


def check_resolve(case):
    """Run the kernel, then the reference, and compare everything; then the same bits once more."""
    again, expected = copy.deepcopy(case), copy.deepcopy(case)
    found = resolve(case)
    wanted = dict(zip(NAMES, reference.resolve_rows(**expected), strict=True))
    wanted |= vars(expected["table"]) | {"stats": expected["stats"]}
    for name, result in found.items():
        assert_equal(name, result, wanted[name])
    for name, result in resolve(again).items():
        assert_equal(f"{name}, again", result, found[name])
    return found


def test_a_step_of_the_largest_sizes():
    case = resolve_rows_case(
        Draw(71, DEVICE),
        contexts=(40000, 90000),
        query_lens=(2, 1),
        topk=2048,
        spare=16384 - 2 * 2048,
        page_size=64,
        held=0.97,
    )
    assert case["table"].rows_per_seat == 16384
    found = check_resolve(case)
    assert (found["miss_counts"][1:3] > 900).all()


def test_a_list_is_found_where_the_step_before_left_it():
    case = resolve_rows_case(Draw(72, DEVICE), contexts=(300, 200), query_lens=(1, 1), topk=40)
    case["topk_indices"][0] = torch.arange(40)
    check_resolve(case)
    found = check_resolve(case)
    assert found["miss_counts"][:2].tolist() == [0, 0]
    assert (found["out"][0, :8] == -1).sum() > 4  # no page, and not held before
    again = dict(case)
    again["seq_lens"] = case["seq_lens"] - 190  # a rollback below most positions
    found = check_resolve(again)
    assert found["miss_counts"][1] > 10


def test_without_requests_every_token_is_padding():
    case = resolve_rows_case(Draw(73, DEVICE), query_lens=(1, 1, 1, 1, 1))
    for name in ("seq_lens", "seats"):
        case[name] = case[name][:0]
    case |= {
        "input_row_offsets": case["input_row_offsets"][-1:],
        "page_table": case["page_table"][:0],
    }
    found = check_resolve(case)
    assert (found["out"] == -1).all()
    assert (found["counts"] == 0).all()


@pytest.mark.parametrize("offsets", [[0, 1, 1, 9], [5, 5, 6, 40], [-3, 1, 0, 2], [2, 3, 4, 5]])
def test_tokens_around_the_requests(offsets):
    """No program touches memory outside of tensors; tokens of no request are padding."""
    case = resolve_rows_case(Draw(74, DEVICE), contexts=(30,), query_lens=(2,), topk=9)
    case["input_row_offsets"] = torch.tensor(offsets, device=DEVICE)
    found = resolve(copy.deepcopy(case))
    num_tokens = len(case["topk_indices"])
    first, end = (min(max(offset, 0), num_tokens) for offset in (offsets[0], offsets[-1]))
    outside = [token for token in range(num_tokens) if not first <= token < end]
    assert (found["out"][outside] == -1).all()
    if offsets == sorted(offsets):
        check_resolve(case)


def test_tokens_beyond_the_longest_query_are_padding():
    case = resolve_rows_case(Draw(75, DEVICE), query_lens=(1, 2, 3, 1, 2))
    found = check_resolve(case | {"max_query_len": 2})
    assert found["counts"][5] == 0 < found["counts"][4]


@pytest.mark.parametrize("wrong", ["rows", "order", "keys"])
def test_a_table_that_is_wrong_names_rows_of_its_seat(wrong):
    """Such a table is no result of the ops; still no row of another seat is named or written."""
    case = resolve_rows_case(Draw(76, DEVICE), query_lens=(2, 2, 2, 2, 2))
    table, draw = case["table"], Draw(77, DEVICE)
    getattr(table, wrong).copy_(draw.integers(-(2**31), 2**31 - 1, *table.rows.shape))
    getattr(table, wrong)[:, ::3] = 5
    before = copy.deepcopy(table)
    found = resolve(case)
    per_seat = table.rows_per_seat
    rows = found["out"][:10].view(5, -1).long()
    seats = case["seats"][:5, None].long().expand_as(rows)
    assert ((rows == -1) | (rows // per_seat == seats)).all()
    assert ((found["miss_rows"] >= -1) & (found["miss_rows"] < table.num_seats * per_seat)).all()
    others = [seat for seat in range(table.num_seats) if seat not in case["seats"][:5].tolist()]
    for name, part in vars(before).items():
        assert_equal(name, getattr(table, name)[others], part[others])


def fetch(case):
    """Run the kernel and the reference; compare all bytes of the target."""
    expected = copy.copy(case)
    target = case["target"]
    scales = None if target.scales is None else target.scales.clone()
    expected["target"] = PagedCache(target.data.clone(), target.format, scales)
    dispatch.load("fetch_rows", "triton")(**case)
    reference.fetch_rows(**expected)
    for got, wanted in zip(target.stored_bytes(), expected["target"].stored_bytes(), strict=True):
        assert_equal("target", got, wanted)


def test_rows_beyond_two_gigabytes():
    case = fetch_rows_case(Draw(78, DEVICE), FP8_DS_MLA)
    case["source"] = distant_pages(Draw(78, DEVICE), FP8_DS_MLA)
    case["miss_slots"] = case["miss_slots"] % 128
    fetch(case)


@pytest.mark.parametrize("topk", [1, 9])
def test_rows_of_more_tokens_than_a_program_counts_at_a_time(topk):
    fetch(fetch_rows_case(Draw(79, DEVICE), FP8_DS_MLA, num_tokens=600, topk=topk))


@pytest.mark.parametrize("format", [FP8_DS_MLA, FP8_584, e4m3_format()])
def test_rows_at_odd_addresses(format):
    """Rows of a page that begins at no multiple of 16 bytes, or of 8."""
    for pad in (8, 4):
        case = fetch_rows_case(Draw(80, DEVICE), format, page_size=4)
        source = case["source"]
        stride = format.page_bytes(4) + pad
        memory = torch.zeros(source.num_pages * stride + 16, dtype=torch.uint8, device=DEVICE)
        data = (
            memory[pad:]
            .view(format.storage_dtype)
            .as_strided(source.data.shape, (stride, source.format.row_width, 1))
        )
        case["source"] = PagedCache(data, format, source.scales)
        slots = torch.arange(source.num_slots, device=DEVICE)
        case["source"].write(slots, Draw(81, DEVICE).normal(len(slots), format.head_dim))
        fetch(case)


def test_ranks_find_the_rows_that_one_rank_finds():
    """With room for all positions, each rank's misses are its share of the misses of one rank."""
    case = resolve_rows_case(
        Draw(82, DEVICE), contexts=(90, 60), query_lens=(1, 2), held=0, topk=30
    )
    case["page_table"] = torch.arange(4 * 40, device=DEVICE).view(4, 40)
    alone = resolve(copy.deepcopy(case))
    misses = []
    for rank in range(3):
        shard = ContextShard(rank, 3, 2)
        table = RowTable.allocate(6, 67, device=DEVICE)
        found = resolve(copy.deepcopy(case) | {"shard": shard, "table": table})
        for token in range(3):
            slots = found["miss_slots"][token, : found["miss_counts"][token]]
            request = min(token, 1)
            misses.append((token, shard.positions(slots - request * 160)))
    for token in range(3):
        slots = alone["miss_slots"][token, : alone["miss_counts"][token]]
        wanted = slots - min(token, 1) * 160
        got = torch.cat([positions for each, positions in misses if each == token])
        assert_equal("positions", got.sort().values.long(), wanted.long())

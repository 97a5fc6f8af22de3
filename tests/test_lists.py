"""Lists that neighbouring query tokens share, attention over them, and a rank's own entries."""

import math

import pytest
import torch

import sparsemla
from sparsemla import (
    FP8_DS_MLA,
    ContextShard,
    PagedCache,
    explain,
    own_positions,
    reference,
    share_lists,
)
from sparsemla_lab.testing.cases import (
    Draw,
    embed,
    own_positions_case,
    poisoned_cache,
    prefill_rows,
    share_lists_case,
    shared_prefill_case,
)
from sparsemla_lab.testing.compare import TOLERANCES, assert_close, assert_equal, check_op

KINDS = ["ascending", "shuffled", "mixed"]


def listed(shared, num_tokens, list_tokens):
    """The entries of each token, read from shared lists."""
    return [
        [
            row
            for row, member in zip(
                shared.topk_indices[t // list_tokens].tolist(),
                shared.token_mask[t // list_tokens].tolist(),
                strict=True,
            )
            if member >> t % list_tokens & 1
        ]
        for t in range(num_tokens)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("list_tokens", "num_tokens", "topk"),
    [(1, 5, 20), (2, 9, 33), (3, 9, 1), (4, 4, 20), (4, 21, 64), (8, 19, 20), (8, 3, 7), (5, 0, 9)],
)
def test_each_token_keeps_its_list(device, list_tokens, num_tokens, topk, dtype, kind):
    if num_tokens == 0:
        indices = torch.empty(0, topk, dtype=dtype, device=device)
        case = {"topk_indices": indices, "list_tokens": list_tokens, "topk_lengths": None}
    else:
        case = share_lists_case(
            Draw(50, device),
            num_tokens=num_tokens,
            topk=topk,
            list_tokens=list_tokens,
            kind=kind,
            dtype=dtype,
            with_lengths=True,
        )
    check_op("share_lists", case)
    shared = share_lists(**case)
    num_lists = -(-num_tokens // list_tokens)
    assert shared.topk_indices.shape == shared.token_mask.shape == (num_lists, list_tokens * topk)
    assert shared.topk_indices.dtype == dtype
    for own, row, length in zip(
        listed(shared, num_tokens, list_tokens),
        case["topk_indices"].tolist(),
        [] if num_tokens == 0 else case["topk_lengths"].tolist(),
        strict=True,
    ):
        assert own == [row_id for row_id in row[: max(length, 0)] if row_id >= 0]
    column = torch.arange(list_tokens * topk, device=device)
    beyond = column >= shared.topk_lengths[:, None]
    assert (shared.token_mask[beyond] == 0).all()
    assert torch.equal(shared.topk_indices < 0, shared.token_mask == 0)


def test_neighbours_are_merged(device):
    rows = torch.tensor([[1, 4, 9, -1], [4, 5, 9, 11], [0, 4, -1, -1], [9, -1, -1, -1], [3] * 4])
    rows = rows.to(device)
    shared = share_lists(rows[:4], list_tokens=4)
    assert shared.topk_indices[0].tolist() == [0, 1, 4, 5, 9, 11] + [-1] * 10
    assert shared.token_mask[0].tolist() == [4, 1, 7, 2, 11, 2] + [0] * 10
    assert shared.topk_lengths.tolist() == [6]
    assert isinstance(shared, sparsemla.SharedLists)
    # The last token repeats a row, so its list, the only one of its group, stays as it is.
    shared = share_lists(rows, list_tokens=4)
    assert shared.topk_indices[1].tolist() == [3] * 4 + [-1] * 12
    assert shared.token_mask[1].tolist() == [1] * 4 + [0] * 12
    assert shared.topk_lengths.tolist() == [6, 16]


@pytest.mark.parametrize(
    "row", [[5, 3], [3, 3], [-1, 3], [3, -1, 5], [5, 3, -1, -1]], ids=lambda row: str(row)
)
def test_lists_that_do_not_ascend_stand_one_after_another(device, row):
    rows = torch.full((2, 4), -1, device=device)
    rows[0, :2] = torch.tensor([1, 3])
    rows[1, : len(row)] = torch.tensor(row)
    for order in (rows, rows.flip(0)):
        shared, _, token_mask = share_lists(order, list_tokens=2)
        assert shared.tolist() == [order.clamp_min(-1).flatten().tolist()]
        assert token_mask.tolist() == [
            [(row_id >= 0) << i // 4 for i, row_id in enumerate(shared[0])]
        ]
    # Up to its length, it ascends.
    lengths = torch.tensor([4, 1], device=device)
    assert share_lists(rows, list_tokens=2, topk_lengths=lengths).topk_lengths[0] <= 3


def test_no_entries_and_no_tokens(device):
    for shape in ((5, 0), (0, 7), (0, 0)):
        indices = torch.empty(shape, dtype=torch.int32, device=device)
        shared = share_lists(indices, list_tokens=4)
        assert shared.topk_lengths.tolist() == [0] * -(-shape[0] // 4)
        assert shared.token_mask.shape == (-(-shape[0] // 4), 4 * shape[1])


def test_unsigned_ids_become_int64(device):
    ids = torch.tensor([[1, 2**31 + 5], [1, 2**32 - 1]], device=device)
    shared = share_lists(ids.int().view(torch.uint32), list_tokens=2)
    assert shared.topk_indices.dtype == torch.int64
    assert shared.topk_indices.tolist() == [[1, 2**31 + 5, 2**32 - 1, -1]]


def test_largest_ids_are_rows_too(device):
    for dtype in (torch.int32, torch.int64):
        most = torch.iinfo(dtype).max
        rows = torch.tensor([[most - 1, most], [0, most]], dtype=dtype, device=device)
        shared = share_lists(rows, list_tokens=2)
        assert shared.topk_indices.tolist() == [[0, most - 1, most, -1]]
        assert shared.token_mask.tolist() == [[2, 1, 3, 0]]


def test_results_are_written_into_slices(device):
    case = share_lists_case(Draw(51, device), with_lengths=True, strided=True)
    expected = share_lists(**case)
    out = embed(torch.zeros_like(expected.topk_indices))
    token_mask = embed(torch.zeros_like(expected.token_mask))
    lengths = torch.full((7,), -1, dtype=torch.int32, device=device)[1:4]
    shared = share_lists(**case, out=out, lengths=lengths, token_mask=token_mask)
    assert shared.topk_indices is out
    assert shared.topk_lengths is lengths
    assert shared.token_mask is token_mask
    for name, got, wanted in zip(shared._fields, shared, expected, strict=True):
        assert_equal(name, got.contiguous(), wanted)


def test_more_lists_than_the_cpu_takes_at_a_time(monkeypatch):
    case = share_lists_case(Draw(52), num_tokens=70, kind="mixed", with_lengths=True)
    expected = share_lists(**case)
    monkeypatch.setattr("sparsemla.kernels.common.cpu.WORKSPACE_BYTES", 64 * 80 * 2)
    for got, wanted in zip(share_lists(**case), expected, strict=True):
        assert torch.equal(got, wanted)


# --- attention ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_attention_over_shared_lists_of_other_dtypes(device, dtype):
    check_op("sparse_prefill", shared_prefill_case(Draw(54, device), dtype=dtype))
    case = shared_prefill_case(Draw(54, device), index_dtype=torch.int64, topk=70)
    check_op("sparse_prefill", case)


@pytest.mark.parametrize("kind", ["ascending", "shuffled"])
@pytest.mark.parametrize("list_tokens", [1, 2, 4, 8])
def test_shared_lists_give_what_each_token_selected(device, list_tokens, kind):
    """As a caller chains both ops: the results of the tokens' own lists."""
    draw = Draw(55, device)
    case = share_lists_case(
        draw, num_tokens=21, list_tokens=list_tokens, kind=kind, with_lengths=True
    )
    own = {name: case[name] for name in ("topk_indices", "topk_lengths")}
    q, kv = prefill_rows(draw, 21, 16, 576), prefill_rows(draw, 40, 576)
    shared = share_lists(**case)
    results = sparsemla.sparse_prefill(
        q, kv, softmax_scale=0.5, list_tokens=list_tokens, **shared._asdict()
    )
    expected = reference.sparse_prefill(q, kv, **own, softmax_scale=0.5)
    for name, got, wanted, tolerance in zip(
        ("out", "lse"), results, expected, TOLERANCES["sparse_prefill"], strict=False
    ):
        assert_close(name, got, wanted, tolerance)


def test_all_tokens_without_members_attend_to_all(device):
    draw = Draw(56, device)
    q, kv = prefill_rows(draw, 7, 8, 576), prefill_rows(draw, 60, 576)
    lists = draw.integers(-1, 60, 3, 20)
    lengths = draw.tensor([20, 3, 0])
    out, lse = sparsemla.sparse_prefill(
        q, kv, lists, softmax_scale=0.5, topk_lengths=lengths, list_tokens=3
    )
    tokens = torch.arange(7, device=device) // 3
    same, same_lse = sparsemla.sparse_prefill(
        q, kv, lists[tokens], softmax_scale=0.5, topk_lengths=lengths[tokens]
    )
    assert_close("out", out, same, TOLERANCES["sparse_prefill"][0])
    assert_close("lse", lse, same_lse, TOLERANCES["sparse_prefill"][1])
    assert (out[6] == 0).all()
    assert (lse[6] == -math.inf).all()


def test_shared_lists_from_a_quantised_cache(device):
    draw = Draw(57, device)
    used = draw.permutation(60)[:40]
    cache = poisoned_cache(draw, FP8_DS_MLA, 10, 7, used)
    rows = torch.stack([used[draw.permutation(40)[:20]].sort().values for _ in range(6)]).int()
    shared = share_lists(rows, list_tokens=4)
    case = {"q": prefill_rows(draw, 6, 8, 576), "kv": cache, "softmax_scale": 0.05}
    check_op("sparse_prefill", case | shared._asdict() | {"list_tokens": 4})


def test_a_row_without_a_member_is_not_read(device):
    """Neither NaN of a row that nobody selects, nor bits of tokens that a list does not have."""
    draw = Draw(58, device)
    kv = prefill_rows(draw, 30, 576)
    kv[::3] = math.nan
    lists = torch.arange(30, dtype=torch.int32, device=device).repeat(2, 1)
    token_mask = torch.tensor([0, 3, 2], dtype=torch.uint8, device=device).repeat(2, 10)
    token_mask[0, ::3] = 4 + 128
    token_mask[1, ::3] = 2  # the last list has one token
    token_mask[1, 1::3] = 1
    out, lse = sparsemla.sparse_prefill(
        prefill_rows(draw, 3, 8, 576),
        kv,
        lists,
        softmax_scale=0.5,
        list_tokens=2,
        token_mask=token_mask,
    )
    assert out.isfinite().all()
    assert lse.isfinite().all()


def test_fp8_rows_of_shared_lists_take_the_portable_kernel():
    def chosen(rows, dtype=torch.bfloat16):
        q = torch.empty(8, 16, 576, dtype=dtype, device="meta")
        lists = torch.empty(2, 80, dtype=torch.int32, device="meta")
        options = {"softmax_scale": 0.1, "list_tokens": 4, "gpu": "sm_90"}
        return explain(sparsemla.sparse_prefill, q, rows, lists, **options).choices[0]

    latents = torch.empty(30, 576, dtype=torch.bfloat16, device="meta")
    found = chosen(PagedCache.allocate(FP8_DS_MLA, 1, 64, device="meta"))
    assert found.kernel == "triton"
    assert "bfloat16 rows for lists of several query tokens" in str(found)
    assert chosen(latents).kernel == "sm90.bf16"
    assert chosen(latents, torch.float32).kernel == "triton"


def test_rows_may_be_a_cache(device):
    case = shared_prefill_case(Draw(59, device), num_heads=4)
    expected = sparsemla.sparse_prefill(**case)
    cache = PagedCache.from_rows(case["kv"])
    for got, wanted in zip(sparsemla.sparse_prefill(**case | {"kv": cache}), expected, strict=True):
        assert_equal("results", got, wanted)


@pytest.mark.parametrize("kind", ["ascending", "shuffled"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize(("interleave", "parts"), [(1, None), (2, 4), (3, 8), (64, 4)])
def test_ranks_share_every_entry(device, interleave, parts, num_ranks, kind):
    draw = Draw(66, device)
    case = own_positions_case(draw, num_positions=300, topk=40, kind=kind)
    lists = {}
    for rank in range(num_ranks):
        case["shard"] = shard = ContextShard(rank, num_ranks, interleave, parts)
        check_op("own_positions", case)
        rows, counts = own_positions(**case)
        assert rows.shape == (9, len(shard.own_parts), 40)
        for i, part in enumerate(shard.own_parts):
            own = torch.arange(40, device=device) < counts[:, i, None]
            assert torch.equal(rows[:, i] >= 0, own)
            positions = shard.positions(rows[:, i])
            lists[part] = [row[:n].tolist() for row, n in zip(positions, counts[:, i], strict=True)]
    assert sorted(lists) == list(range(num_ranks if parts is None else parts))
    for t, row in enumerate(case["topk_indices"].tolist()):
        for part, own in lists.items():
            turn = len(lists) * interleave
            assert own[t] == [p for p in row if p >= 0 and p % turn // interleave == part]


def test_own_positions_are_written_into_given_outputs(device):
    case = own_positions_case(Draw(67, device), shard=ContextShard(0, 2, parts=4), strided=True)
    rows, counts = own_positions(**case)
    out, given = embed(torch.full_like(rows, 7)), embed(torch.full_like(counts, 7))
    assert own_positions(**case, out=out, counts=given) == (out, given)
    assert_equal("out", out, rows)
    assert_equal("counts", given, counts)


def test_own_positions_do_not_depend_on_the_block(monkeypatch):
    case = own_positions_case(Draw(68), num_tokens=70, shard=ContextShard(1, 2, parts=4))
    expected = own_positions(**case)
    monkeypatch.setattr("sparsemla.kernels.common.cpu.WORKSPACE_BYTES", 64 * 20 * 3)
    for got, wanted in zip(own_positions(**case), expected, strict=True):
        assert_equal("result", got, wanted)

"""Triton decode kernels against the reference, in the interpreter where there is no GPU."""

import copy
import math

import pytest
import torch

from sparsemla import (
    BF16_512,
    BF16_576,
    FP4_288,
    FP8_528,
    FP8_584,
    FP8_DS_MLA,
    bf16_format,
    branch_workspace_size,
    decode_branch,
    decode_workspace_size,
    dispatch,
    e4m3_format,
    reference,
)
from sparsemla_lab.testing.cases import (
    Draw,
    branch_case,
    dense_decode_case,
    embed,
    mla_layer,
    sinks,
    sparse_decode_case,
    split_queries,
)
from sparsemla_lab.testing.compare import TOLERANCES, assert_close, assert_equal
from sparsemla_lab.testing.poison import poisoned_empty

pytest.importorskip("triton")
from sparsemla.kernels.attention import schedule
from sparsemla.kernels.attention.arguments import Splits
from sparsemla.kernels.attention.triton import decode
from sparsemla.kernels.attention.triton.tiles import Tile

# In the interpreter numpy warns of log2(0) and of exp2 overflowing, which mean -inf and inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = [
    BF16_576,
    BF16_512,
    FP8_DS_MLA,
    FP8_584,
    FP4_288,
    FP8_528,
    bf16_format(320, 256),
    e4m3_format(),
    e4m3_format(576, 512, 0),
    e4m3_format(576, 512, 32),
    e4m3_format(576, 512, 576),
    e4m3_format(160, 96, 48),
]
by_format = pytest.mark.parametrize("fmt", FORMATS)


def run(op, case, num_splits):
    """The kernel's results on poisoned outputs and workspace."""
    q, value_dim = case["q"], case["cache"].format.value_dim
    out = q.new_full((*q.shape[:3], value_dim), math.nan)
    lse = q.new_full(q.shape[:3], math.nan, dtype=torch.float32)
    size = decode_workspace_size(*q.shape[:3], num_splits=num_splits, value_dim=value_dim)
    workspace = torch.full((size,), 255, dtype=torch.uint8, device=q.device)
    launch = dispatch.load(op, "triton")
    launch(**case, splits=Splits(num_splits), workspace=workspace, out=out, lse=lse)
    return out, lse


def check(op, case, num_splits=1):
    results = run(op, case, num_splits)
    expected = getattr(reference, op)(**case)
    for name, got, wanted, tolerance in zip(
        ("out", "lse"), results, expected, TOLERANCES[op], strict=True
    ):
        assert_close(name, got, wanted, tolerance)
    return results


# Several splits: on a CPU, verify's cases have one.
@by_format
def test_sparse_decode_of_every_format(fmt):
    case = sparse_decode_case(
        Draw(0, DEVICE),
        format=fmt,
        batch=2,
        query_len=2,
        num_heads=2,
        topk=70,
        page_size=13,
        with_sink=True,
        with_lengths=True,
        strided=True,
    )
    check("sparse_decode", case, num_splits=3)


@pytest.mark.parametrize("fmt", [FP8_DS_MLA, e4m3_format()])
def test_exact_scales(fmt):
    options = {"format": fmt, "num_heads": 2, "scale_mode": "exact"}
    check("sparse_decode", sparse_decode_case(Draw(9, DEVICE), batch=2, topk=1, **options))
    check("dense_decode", dense_decode_case(Draw(9, DEVICE), seq_lens=(1, 20), **options))


@pytest.mark.parametrize("num_heads", [1, 16, 17, 40])
def test_sparse_decode_of_any_head_count(num_heads):
    case = sparse_decode_case(
        Draw(1, DEVICE), format=FP8_DS_MLA, batch=1, num_heads=num_heads, with_sink=True
    )
    check("sparse_decode", case, num_splits=2)


@pytest.mark.parametrize("extra_format", [FP8_584, BF16_512])
@pytest.mark.parametrize("lengths", [(False, False), (True, False), (False, True), (True, True)])
def test_sparse_decode_of_two_streams(extra_format, lengths):
    case = sparse_decode_case(
        Draw(2, DEVICE),
        format=FP8_584,
        batch=2,
        num_heads=2,
        topk=70,
        with_sink=True,
        with_lengths=lengths[0],
        extra=(extra_format, 90, 50, 2),
        with_extra_lengths=lengths[1],
    )
    check("sparse_decode", case, num_splits=5)


def test_sparse_decode_of_the_records_of_deepseek_v41():
    case = sparse_decode_case(
        Draw(2, DEVICE), format=FP8_528, batch=2, num_heads=2, topk=40, extra=(FP4_288, 90, 50, 2)
    )
    check("sparse_decode", case, num_splits=2)


@pytest.mark.parametrize("extra", [None, (FP8_584, 90, 50, 2)])
def test_sparse_decode_of_tokens_with_lengths_of_their_own(extra):
    lengths = {"with_lengths": True, "with_extra_lengths": True, "own_lengths": True}
    case = sparse_decode_case(
        Draw(11, DEVICE), format=FP8_584, batch=2, query_len=2, num_heads=2, extra=extra, **lengths
    )
    names = [name for name in ("topk_lengths", "extra_topk_lengths") if name in case]
    check("sparse_decode", case | {name: embed(case[name]) for name in names}, num_splits=2)
    one = {
        name: case[name][:, :1]
        for name in ("q", "topk_indices", "extra_topk_indices", *names)
        if name in case
    }
    check("sparse_decode", case | one)


@pytest.mark.parametrize("fmt", [FP8_DS_MLA, e4m3_format()], ids=lambda fmt: fmt.name)
def test_sparse_decode_of_queries_in_two_tensors(fmt):
    case = sparse_decode_case(Draw(10, DEVICE), format=fmt, batch=2, query_len=2, num_heads=3)
    check("sparse_decode", split_queries(case), num_splits=2)


def test_sparse_decode_of_layers_in_a_page_and_other_dtypes():
    for dtype in (torch.float16, torch.float32):
        case = sparse_decode_case(
            Draw(3, DEVICE), format=FP8_DS_MLA, num_heads=2, dtype=dtype, num_layers=3
        )
        assert check("sparse_decode", case, num_splits=2)[0].dtype == dtype


@pytest.mark.parametrize("num_splits", [1, 4])
def test_sparse_decode_of_empty_rows(num_splits):
    case = sparse_decode_case(
        Draw(4, DEVICE), format=BF16_576, batch=3, num_heads=2, with_sink=True, share=1.0
    )
    case["topk_indices"][0] = -1
    case["topk_indices"][1, 0, 1:] = torch.iinfo(torch.int32).min
    case["topk_lengths"] = torch.tensor([64, 64, 0], device=DEVICE)
    out, lse = check("sparse_decode", case, num_splits)
    for request in (0, 2):
        assert (out[request] == 0).all()
        assert (lse[request] == -math.inf).all()
    case["topk_indices"] = case["topk_indices"][..., :0]
    check("sparse_decode", case, num_splits)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_negative_lengths_select_no_keys(num_splits):
    case = sparse_decode_case(
        Draw(12, DEVICE), format=FP8_584, num_heads=2, topk=200, extra=(FP8_584, 90, 200, 4)
    )
    case["topk_lengths"] = torch.tensor([-1, -127, -1000], dtype=torch.int32, device=DEVICE)
    extra_lengths = torch.tensor([200, 130, -(2**31)], dtype=torch.int32, device=DEVICE)
    _, lse = check("sparse_decode", case | {"extra_topk_lengths": extra_lengths}, num_splits)
    assert (lse[2] == -math.inf).all()


@pytest.mark.parametrize("op", ["sparse_decode", "dense_decode"])
def test_request_gets_the_same_bits_alone_and_in_a_batch(op):
    draw = Draw(5, DEVICE)
    if op == "sparse_decode":
        case = sparse_decode_case(draw, format=FP8_DS_MLA, num_heads=3, topk=200, with_lengths=True)
        per_request = ("q", "topk_indices", "topk_lengths")
    else:
        case = dense_decode_case(draw, format=FP8_DS_MLA, seq_lens=(70, 140, 9), num_heads=3)
        per_request = ("q", "page_table", "seq_lens")
    together = run(op, case, num_splits=3)
    for i in range(3):
        alone = dict(case, **{name: case[name][i : i + 1] for name in per_request})
        for name, got, wanted in zip(
            ("out", "lse"), run(op, alone, num_splits=3), together, strict=True
        ):
            assert_equal(name, got, wanted[i : i + 1])


@pytest.mark.parametrize("op", ["sparse_decode", "dense_decode"])
def test_tile_of_warpgroup_products(op, monkeypatch):
    monkeypatch.setattr(decode, "choose_tile", lambda *_: Tile(64, 32, 8, 3, branch=True))
    draw = Draw(10, DEVICE)
    if op == "sparse_decode":
        sizes = {"topk": 100, "with_lengths": True, "extra": (BF16_576, 90, 40, 2)}
        case = sparse_decode_case(draw, format=FP8_DS_MLA, num_heads=2, **sizes)
    else:
        lens = {"seq_lens": (70, 0, 3), "query_len": 2}
        case = dense_decode_case(draw, format=FP8_DS_MLA, num_heads=3, **lens)
    check(op, case, num_splits=3)


# The mask does not depend on the format.
@pytest.mark.parametrize(
    ("causal", "fmt"), [*((True, fmt) for fmt in FORMATS), (False, BF16_576), (False, FP8_584)]
)
def test_dense_decode_of_every_format(fmt, causal):
    case = dense_decode_case(
        Draw(6, DEVICE),
        format=fmt,
        seq_lens=(40, 0, 2),
        query_len=3,
        num_heads=6,
        page_size=5,
        causal=causal,
        with_sink=True,
        num_layers=2,
    )
    check("dense_decode", case, num_splits=3)


@pytest.mark.parametrize(("query_len", "num_heads"), [(1, 1), (1, 40), (2, 9), (4, 16), (5, 3)])
@pytest.mark.parametrize("num_splits", [1, 2])
def test_dense_decode_of_many_rows(query_len, num_heads, num_splits):
    case = dense_decode_case(
        Draw(7, DEVICE),
        format=BF16_576,
        seq_lens=(64, 3),
        query_len=query_len,
        num_heads=num_heads,
        dtype=torch.float16 if num_heads == 9 else torch.bfloat16,
    )
    check("dense_decode", case, num_splits)


def test_dense_decode_skips_pages_out_of_range():
    case = dense_decode_case(
        Draw(8, DEVICE), format=FP8_DS_MLA, seq_lens=(40, 33), num_heads=2, page_size=8
    )
    case["page_table"] = case["page_table"].long()
    case["page_table"][0, 1] = -5
    case["page_table"][0, 3] = 2**33
    case["page_table"][1, :] = torch.iinfo(torch.int32).max
    _, lse = check("dense_decode", case, num_splits=2)
    assert (lse[1] == -math.inf).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(("num_parts", "value_dim"), [(1, 512), (2, 80), (7, 3), (40, 48)])
def test_merge_states(dtype, num_parts, value_dim):
    draw = Draw(9, DEVICE)
    outs = draw.normal(num_parts, 4, 3, value_dim, dtype=dtype)
    lses = 3 * draw.normal(num_parts, 4, 3)
    lses[0, 1], lses[:, 2, 1] = -math.inf, -math.inf
    outs[0, 1], outs[:, 2, 1] = math.nan, math.nan
    case = {"outs": embed(outs), "lses": embed(lses), "attn_sink": sinks(draw, 3)}
    out = outs.new_full((4, 3, value_dim), math.nan)
    lse = lses.new_full((4, 3), math.nan)
    dispatch.load("merge_states", "triton")(**case, out=out, lse=lse)
    expected = reference.merge_states(**case)
    for name, got, wanted, tolerance in zip(
        ("out", "lse"), (out, lse), expected, TOLERANCES["merge_states"], strict=True
    ):
        assert_close(name, got, wanted, tolerance)


def test_merge_of_no_parts_is_empty():
    outs, lses = torch.ones(0, 2, 3, 8, device=DEVICE), torch.ones(0, 2, 3, device=DEVICE)
    out = torch.full((2, 3, 8), math.nan, device=DEVICE)
    lse = torch.full((2, 3), math.nan, device=DEVICE)
    merge = dispatch.load("merge_states", "triton")
    merge(outs=outs, lses=lses, attn_sink=None, out=out, lse=lse)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("topk", [None, 20], ids=["dense", "sparse"])
@pytest.mark.parametrize("own_workspace", [False, True])
def test_branch_merges_splits_in_the_projection(monkeypatch, topk, own_workspace):
    draw = Draw(24, DEVICE)
    layer = mla_layer(draw, num_heads=3, with_sink=True)
    case = branch_case(draw, layer, query_lens=[1, 2], seq_lens=[90, 70], topk=topk)
    expected = reference.decode_branch(**copy.deepcopy(case))
    monkeypatch.setattr(schedule, "multiprocessors", lambda device: 1)
    workspace = None
    if own_workspace:
        columns = case["plan"].page_table.shape[1]
        size = branch_workspace_size(3, 3, num_splits=3, max_pages_per_request=columns)
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    with poisoned_empty(), dispatch.only("triton"):
        out = decode_branch(**case, num_splits=3, workspace=workspace)
    assert_close("out", out, expected, TOLERANCES["decode_branch"][0])


def test_a_workspace_too_small_for_the_chosen_splits_is_refused():
    case = sparse_decode_case(Draw(25, DEVICE), format=FP8_DS_MLA, num_heads=3)
    q = case["q"]
    size = decode_workspace_size(*q.shape[:3], num_splits=3)
    workspace = torch.empty(size - 16, dtype=torch.uint8, device=DEVICE)
    out, lse = q.new_empty(*q.shape[:3], 512), q.new_empty(q.shape[:3], dtype=torch.float32)
    launch = dispatch.load("sparse_decode", "triton")
    with pytest.raises(ValueError, match=f"workspace must have at least {size} bytes for 3 splits"):
        launch(**case, splits=Splits(3), workspace=workspace, out=out, lse=lse)

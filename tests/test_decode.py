"""Properties, schedules and workspaces of decode; test_tiers.py has the values."""

import itertools
import math

import pytest
import torch

import sparsemla
from sparsemla import BF16_576, FP8_584, FP8_DS_MLA, PagedCache, e4m3_format
from sparsemla.kernels.attention import schedule
from sparsemla.kernels.attention.arguments import SparseDecode, Splits
from sparsemla.kernels.attention.schedule import DecodeWork, dense, sparse
from sparsemla.kernels.common.device import GPUS, simulated
from sparsemla.ops import decode
from sparsemla_lab.testing.cases import (
    Draw,
    dense_decode_case,
    distant_pages,
    sinks,
    sparse_decode_case,
    split_queries,
)
from sparsemla_lab.testing.compare import (
    DECODE_LSE,
    SPARSE_DECODE_OUT,
    assert_close,
    assert_equal,
    check_op,
)


def check(op, case):
    out, lse = check_op(op, case)
    assert out.isfinite().all()
    assert (out[lse == -math.inf] == 0).all()
    return out, lse


def test_an_extra_stream_is_more_keys(device):
    case = sparse_decode_case(Draw(6, device), format=FP8_584, topk=64)
    whole = check("sparse_decode", case)
    indices = case["topk_indices"]
    split = case | {
        "topk_indices": indices[..., :20].contiguous(),
        "extra_cache": case["cache"],
        "extra_topk_indices": indices[..., 20:].contiguous(),
    }
    parts = check("sparse_decode", split)
    assert_close("out", parts[0], whole[0].float(), SPARSE_DECODE_OUT)
    assert_close("lse", parts[1], whole[1], DECODE_LSE)


@pytest.mark.parametrize("num_heads", [3, 16, 64])
@pytest.mark.parametrize("fmt", [BF16_576, FP8_DS_MLA, e4m3_format()], ids=lambda fmt: fmt.name)
def test_queries_in_two_tensors(device, fmt, num_heads):
    case = sparse_decode_case(Draw(4, device), format=fmt, num_heads=num_heads, query_len=2)
    results = check_op("sparse_decode", split_queries(case))
    for apart, whole in zip(results, check_op("sparse_decode", case), strict=True):
        assert_equal("results", apart, whole)


@pytest.mark.parametrize("fmt", [BF16_576, FP8_DS_MLA, FP8_584])
def test_caches_beyond_2_gib(device, fmt):
    draw = Draw(17, device)
    cache = distant_pages(draw, fmt)
    case = sparse_decode_case(draw, format=fmt, batch=1, seq_len=64, page_size=64)
    check("sparse_decode", case | {"cache": cache})
    dense = {
        "q": case["q"],
        "cache": cache,
        "page_table": torch.tensor([[1, 0]], device=device),
        "seq_lens": torch.tensor([100], device=device),
        "softmax_scale": 0.05,
    }
    check("dense_decode", dense)


@pytest.mark.parametrize(
    ("batch", "topk", "splits"),
    [(1, 2048, (16, 16)), (2, 2048, (8, 16)), (4, 2048, (4, 16)), (8, 2048, (8, 64)),
     (16, 2048, (4, 64)), (64, 2048, (1, 64)), (128, 2048, (1, 64)), (4, 512, (4, 16)),
     (16, 512, (1, 16)), (16, 1024, (4, 64)), (1, 64, (1, 16))],
    ids=str,
)  # fmt: skip
def test_splits_of_128_heads_on_132_multiprocessors(batch, topk, splits):
    assert sparse(DecodeWork(batch, 1, 128, topk, FP8_DS_MLA, 132), "sm90") == splits


@pytest.mark.parametrize(
    ("fmt", "heads", "splits"),
    [(BF16_576, 16, [(64, 64), (32, 64), (8, 64), (4, 64), (2, 64)]),
     (FP8_DS_MLA, 16, [(32, 64), (32, 64), (16, 64), (4, 64), (2, 64)]),
     (BF16_576, 128, [(32, 16), (16, 64), (4, 64), (1, 64), (1, 64)]),
     (FP8_DS_MLA, 128, [(32, 16), (16, 64), (4, 64), (1, 64), (1, 64)])],
    ids=str,
)  # fmt: skip
def test_splits_with_amperes_instructions(fmt, heads, splits):
    found = [sparse(DecodeWork(b, 1, heads, 2048, fmt, 132), "sm80") for b in (1, 4, 16, 64, 128)]
    assert found == splits


def test_given_splits_are_those_of_a_call():
    call = SparseDecode(
        q=torch.empty(1, 1, 128, 576, dtype=torch.bfloat16),
        cache=PagedCache.allocate(FP8_DS_MLA, 2, 64),
        topk_indices=torch.zeros(1, 1, 2048, dtype=torch.int32),
        softmax_scale=1.0,
    )
    with simulated(GPUS["sm_90"]):
        assert schedule.splits_of_sparse(call) == (16, 16)
        assert schedule.splits_of_sparse(call._replace(splits=Splits(3))) == (3, 64)
    with simulated(GPUS["gfx942"]):
        assert schedule.splits_of_sparse(call).head_tile == 64
    assert schedule.splits_of_sparse(call) == (1, 64)


def test_a_workspace_serves_smaller_batches_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with simulated(GPUS["sm_90"]):
        sizes = [
            sparsemla.decode_workspace_size(batch, 1, 128, device="cuda") for batch in range(257)
        ]
    assert sizes[1] > 0
    assert sizes == sorted(sizes)


def test_schedules_fit_the_workspace(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tiers = "sm90", "sm80", "triton"
    for batch, num_heads, topk in itertools.product((1, 3, 17, 200), (1, 48, 128), (1, 700, 9000)):
        with simulated(GPUS["sm_90"]):
            size = sparsemla.decode_workspace_size(batch, 1, num_heads, device="cuda")
        for fmt, choose, tier in itertools.product((BF16_576, FP8_DS_MLA), (sparse, dense), tiers):
            for compiling in (False, True):
                with monkeypatch.context() as patch:
                    patch.setattr(torch.compiler, "is_compiling", lambda said=compiling: said)
                    splits, _ = choose(DecodeWork(batch, 1, num_heads, topk, fmt, 132), tier)
                assert decode._workspace_bytes(batch * num_heads, splits, 512) <= size


def test_one_query_ignores_the_causal_flag(device):
    case = dense_decode_case(Draw(23, device), format=FP8_DS_MLA)
    causal = check("dense_decode", case)
    full = check("dense_decode", case | {"causal": False})
    assert_close("out", causal[0], full[0].float(), SPARSE_DECODE_OUT)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("query_len", [1, 3])
def test_dense_decode_of_queries_that_are_not_finite(query_len, value):
    case = dense_decode_case(Draw(32), format=FP8_DS_MLA, query_len=query_len)
    case["q"][1, 0, 3, 5] = value
    out, _ = check_op("dense_decode", case)
    assert out.isnan().all(3).nonzero().tolist() == [[1, 0, 3]]


def test_dense_is_sparse_over_every_key(device):
    case = dense_decode_case(Draw(28, device), format=FP8_DS_MLA, seq_lens=[140])
    positions = torch.arange(140, device=device)
    slots = sparsemla.slots_of(case["page_table"], positions * 0, positions, 64)
    dense = check("dense_decode", case)
    sparse = sparsemla.sparse_decode(
        case["q"], case["cache"], slots[None, None], softmax_scale=case["softmax_scale"]
    )
    assert_close("out", sparse[0], dense[0].float(), SPARSE_DECODE_OUT)
    assert_close("lse", sparse[1], dense[1], DECODE_LSE)


def test_merged_parts_equal_attention_over_all_keys(device):
    case = sparse_decode_case(Draw(32, device), format=FP8_DS_MLA, dtype=torch.float32)
    sink = sinks(Draw(33, device), 8)
    expected = sparsemla.sparse_decode(**case | {"attn_sink": sink})
    indices = case["topk_indices"]
    parts = [
        sparsemla.sparse_decode(**case | {"topk_indices": indices[..., columns].contiguous()})
        for columns in (slice(0, 1), slice(1, 40), slice(40, 64))
    ]
    outs, lses = (torch.stack(tensors)[:, :, 0] for tensors in zip(*parts, strict=True))
    out, lse = sparsemla.merge_states(outs, lses, attn_sink=sink)
    assert_close("out", out, expected[0][:, 0], SPARSE_DECODE_OUT)
    assert_close("lse", lse, expected[1][:, 0], DECODE_LSE)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode_in_a_given_workspace(device, num_splits):
    sparse = sparse_decode_case(Draw(20, device), format=FP8_DS_MLA)
    dense = dense_decode_case(Draw(21, device), format=FP8_DS_MLA)
    for op, case in (("sparse_decode", sparse), ("dense_decode", dense)):
        size = sparsemla.decode_workspace_size(*case["q"].shape[:3], num_splits=num_splits)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        plain = check(op, case)
        split = getattr(sparsemla, op)(**case, num_splits=num_splits, workspace=workspace)
        for name, got, wanted, tolerance in zip(
            ("out", "lse"), split, plain, (SPARSE_DECODE_OUT, DECODE_LSE), strict=True
        ):
            assert_close(name, got, wanted, tolerance)


def test_decode_refuses_a_small_workspace_and_no_splits(device):
    case = sparse_decode_case(Draw(22, device), format=FP8_DS_MLA)
    workspace = torch.empty(100, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="workspace must hold 98496 bytes"):
        sparsemla.sparse_decode(**case, num_splits=2, workspace=workspace)
    with pytest.raises(ValueError, match="num_splits must be at least 1, got 0"):
        sparsemla.sparse_decode(**case, num_splits=0)


def test_lengths_beyond_the_page_table_end_with_it(device):
    """The CPU tier took a second for every million keys that do not exist."""
    case = dense_decode_case(Draw(34, device), format=FP8_DS_MLA)
    capacity = case["page_table"].shape[1] * case["cache"].page_size
    states = [
        sparsemla.dense_decode(**case | {"seq_lens": torch.full_like(case["seq_lens"], length)})
        for length in (capacity, 2**31 - 1)
    ]
    for name, got, wanted in zip(("out", "lse"), *states[::-1], strict=True):
        assert_equal(name, got, wanted)

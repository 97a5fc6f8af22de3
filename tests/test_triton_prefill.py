"""Triton prefill kernels against the reference, in the interpreter where there is no GPU."""

import math

import pytest
import torch

from sparsemla import (
    BF16_512,
    FP8_584,
    FP8_DS_MLA,
    PagedCache,
    bf16_format,
    dispatch,
    e4m3_format,
    reference,
)
from sparsemla_lab.testing.cases import (
    Draw,
    dense_prefill_case,
    paged_prefill_case,
    poisoned_cache,
    prefill_rows,
    selections,
    sparse_prefill_case,
    split_queries,
)
from sparsemla_lab.testing.compare import TOLERANCES, assert_close, assert_equal

pytest.importorskip("triton")
from sparsemla.kernels.attention.triton import prefill
from sparsemla.kernels.attention.triton.tiles import Tile

# In the interpreter numpy warns of log2(0) and of exp2 overflowing, which mean -inf and inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def check(op, case, **options):
    """Run the kernel on poisoned outputs, then the reference."""
    arguments = dict(case, **options)
    q = arguments["q"]
    if op == "sparse_prefill":
        for name in ("kv", "extra_cache"):
            if isinstance(arguments.get(name), torch.Tensor):
                arguments[name] = PagedCache.from_rows(arguments[name])
        value_dim = arguments["kv"].format.value_dim
        outputs = {"max_logits": q.new_full(q.shape[:2], math.nan, dtype=torch.float32)}
    else:
        value_dim, outputs = arguments["v"].shape[2], {}
    out_dtype = arguments.pop("out_dtype", q.dtype)
    out = q.new_full((*q.shape[:2], value_dim), math.nan, dtype=out_dtype)
    lse = q.new_full(q.shape[:2], math.nan, dtype=torch.float32)
    dispatch.load(op, "triton")(**arguments, out=out, lse=lse, **outputs)
    results = (out, lse, *outputs.values())
    expected = getattr(reference, op)(**arguments)
    for name, got, wanted, tolerance in zip(
        ("out", "lse", "max_logits"), results, expected, TOLERANCES[op], strict=False
    ):
        assert_close(name, got, wanted, tolerance)
    return results


@pytest.mark.parametrize("features", ["plain", "sink", "lengths", "sink lengths strided"])
@pytest.mark.parametrize("head_dim", [576, 512])
def test_sparse_prefill_over_rows(head_dim, features):
    check(
        "sparse_prefill",
        sparse_prefill_case(
            Draw(0, DEVICE),
            head_dim=head_dim,
            num_tokens=3,
            num_heads=5,
            topk=100,
            with_sink="sink" in features,
            with_lengths="lengths" in features,
            strided="strided" in features,
            share=0.7,
        ),
    )


@pytest.mark.parametrize("num_heads", [1, 16, 33, 128])
def test_sparse_prefill_of_any_head_count(num_heads):
    case = sparse_prefill_case(
        Draw(1, DEVICE), num_tokens=2, num_heads=num_heads, topk=33, with_sink=True
    )
    check("sparse_prefill", case)


def test_sparse_prefill_of_queries_in_two_tensors():
    case = sparse_prefill_case(Draw(8, DEVICE), num_tokens=3, num_heads=5, topk=33)
    check("sparse_prefill", split_queries(case))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sparse_prefill_keeps_more_than_bfloat16_of_queries(dtype):
    out, *_ = check(
        "sparse_prefill", sparse_prefill_case(Draw(2, DEVICE), num_tokens=2, topk=64, dtype=dtype)
    )
    assert out.dtype == dtype


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sparse_prefill_with_results_of_another_dtype(dtype, out_dtype):
    case = sparse_prefill_case(
        Draw(2, DEVICE), num_tokens=2, topk=64, dtype=dtype, with_sink=True, with_lengths=True
    )
    out, *_ = check("sparse_prefill", case | {"out_dtype": out_dtype})
    assert out.dtype == out_dtype


@pytest.mark.parametrize(
    "fmt",
    [
        FP8_DS_MLA,
        FP8_584,
        BF16_512,
        bf16_format(320, 256),
        bf16_format(100, 60),
        e4m3_format(),
        e4m3_format(576, 512, 0),
        e4m3_format(576, 512, 32),
        e4m3_format(576, 512, 576),
        e4m3_format(160, 96, 48),
    ],
)
@pytest.mark.parametrize("page_size", [1, 7])
def test_sparse_prefill_reads_every_format(fmt, page_size):
    draw = Draw(3, DEVICE)
    used = draw.permutation(70)[:50]
    case = {
        "q": prefill_rows(draw, 2, 3, fmt.head_dim),
        "kv": poisoned_cache(draw, fmt, 70 // page_size, page_size, used, num_layers=2),
        "topk_indices": selections(draw, 2, 40, used, 70, 0.8),
        "softmax_scale": fmt.head_dim**-0.5,
        "topk_lengths": None,
        "attn_sink": None,
    }
    check("sparse_prefill", case)


@pytest.mark.parametrize("extra_format", [FP8_584, BF16_512])
@pytest.mark.parametrize("lengths", [(False, True), (True, False)])
def test_sparse_prefill_of_two_streams(extra_format, lengths):
    case = paged_prefill_case(
        Draw(8, DEVICE),
        format=FP8_584,
        batch=2,
        num_heads=2,
        topk=70,
        with_sink=True,
        with_lengths=lengths[0],
        extra=(extra_format, 90, 50, 2),
        with_extra_lengths=lengths[1],
    )
    check("sparse_prefill", case)


@pytest.mark.parametrize("branch", [False, True])
@pytest.mark.parametrize("topk", [0, 33])
def test_sparse_prefill_of_streams_that_may_be_empty(topk, branch, monkeypatch):
    if branch:  # the tile of warpgroup products, which takes a step in each stream
        monkeypatch.setattr(prefill, "choose_tile", lambda *_: Tile(64, 32, 8, 3, branch=True))
    draw = Draw(9, DEVICE)
    case = sparse_prefill_case(draw, num_tokens=2, num_heads=2, topk=topk, with_sink=True)
    extra = prefill_rows(draw, 40, 576)
    more = {"extra_cache": extra, "extra_topk_lengths": torch.tensor([0, 17], device=DEVICE)}
    slots = draw.integers(-2, 42, 2, 20)
    _, lse, _ = check("sparse_prefill", case, extra_topk_indices=slots, **more)
    assert (lse[0] == -math.inf).all() == (topk == 0)
    check("sparse_prefill", case, extra_topk_indices=slots[:, :0], extra_cache=extra)


def test_sparse_prefill_of_empty_rows():
    case = sparse_prefill_case(Draw(4, DEVICE), num_tokens=3, topk=20, with_sink=True)
    case["topk_indices"][0] = -1
    case["topk_indices"][1, :-1] = torch.iinfo(torch.int32).max
    lengths = torch.tensor([20, 20, 0], device=DEVICE)
    out, lse, highest = check("sparse_prefill", case, topk_lengths=lengths)
    for row in (0, 2):
        assert (out[row] == 0).all()
        assert (lse[row] == -math.inf).all()
        assert (highest[row] == -math.inf).all()


def test_sparse_prefill_of_no_entries_and_of_wide_ids():
    case = sparse_prefill_case(Draw(5, DEVICE), num_tokens=2, topk=40, with_lengths=True)
    wide = case["topk_indices"].long()
    wide[0, 3] = 2**40
    check("sparse_prefill", dict(case, topk_indices=wide))
    check("sparse_prefill", dict(case, topk_indices=wide[:, :0]))
    check("sparse_prefill", dict(case, q=case["q"][:0], topk_indices=wide[:0], topk_lengths=None))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("query_lens", "kv_lens"),
    [((5, 0, 9), (5, 3, 20)), ((1,), (70,)), ((70, 3), (70, 1)), ((4, 4, 40), (0, 2, 33))],
)
def test_dense_prefill(query_lens, kv_lens, causal):
    case = dense_prefill_case(
        Draw(6, DEVICE), query_lens=query_lens, kv_lens=kv_lens, causal=causal, num_heads=2
    )
    check("dense_prefill", case)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(("head_dim", "value_dim"), [(192, 128), (80, 72), (16, 8), (256, 256)])
def test_dense_prefill_of_other_dims(head_dim, value_dim, dtype):
    case = dense_prefill_case(
        Draw(7, DEVICE), head_dim=head_dim, value_dim=value_dim, dtype=dtype, strided=True
    )
    check("dense_prefill", case)


def test_portable_kernels_have_bfloat16_mma_only():
    case = sparse_prefill_case(Draw(12, DEVICE), num_heads=40)
    expected = check("sparse_prefill", case)
    got = check("sparse_prefill", case, allow_fp8_mma=True)
    for name, one, other in zip(("out", "lse", "max_logits"), got, expected, strict=True):
        assert_equal(name, one, other)

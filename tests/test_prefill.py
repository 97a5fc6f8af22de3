"""Properties of prefill, and its rounded rows; test_tiers.py has the values."""

import math

import pytest
import torch

import sparsemla
from sparsemla import FP8_DS_MLA, PagedCache, dispatch, explain, reference
from sparsemla.kernels.repeat import unrepeated
from sparsemla.reference.prefill import round_rows
from sparsemla_lab.testing.cases import (
    Draw,
    dense_prefill_case,
    prefill_rows,
    sparse_prefill_case,
    split_queries,
)
from sparsemla_lab.testing.compare import (
    DENSE_PREFILL_LSE,
    DENSE_PREFILL_OUT,
    SPARSE_PREFILL_LSE,
    SPARSE_PREFILL_MAX_LOGITS,
    SPARSE_PREFILL_OUT,
    assert_close,
    assert_equal,
    check_op,
    run_op,
)
from sparsemla_lab.testing.shapes import FLOATS


def check(case):
    out, lse, max_logits = check_op("sparse_prefill", case)
    empty = lse == -math.inf
    assert (out[empty] == 0).all()
    assert (max_logits[empty] == -math.inf).all()
    assert out.isfinite().all()
    return out, lse, max_logits


@pytest.mark.parametrize("out_dtype", FLOATS)
def test_results_of_another_dtype_are_rounded_once_more(device, out_dtype):
    case = sparse_prefill_case(Draw(30, device), dtype=torch.float32, with_lengths=True)
    out, *_ = run_op("sparse_prefill", case | {"out_dtype": out_dtype})
    same, *_ = run_op("sparse_prefill", case)
    assert_equal("out", out, same.to(out_dtype))


def test_tiers_refuse_output_dtypes_that_they_cannot_write():
    case = sparse_prefill_case(Draw(30), num_heads=64)
    chosen = explain(sparsemla.sparse_prefill, **case, gpu="sm_90")
    assert chosen.kernels == {"sparse_prefill": "sm90.bf16"}
    wide = explain(sparsemla.sparse_prefill, **case, out=torch.empty(5, 64, 512), gpu="sm_90")
    assert wide.kernels == {"sparse_prefill": "triton"}
    assert "sm90.bf16: gives bfloat16 results, not torch.float32" in str(wide)


def test_unsigned_indices_and_lengths(device):
    case = sparse_prefill_case(Draw(31, device), with_lengths=True)
    names = ("topk_indices", "topk_lengths")
    unsigned = {name: case[name].int().view(torch.uint32) for name in names}
    results = run_op("sparse_prefill", case), run_op("sparse_prefill", case | unsigned)
    for name, got, wanted in zip(("out", "lse", "max_logits"), *results, strict=True):
        assert_equal(name, got, wanted)


@pytest.mark.parametrize("num_heads", [3, 16, 64])
def test_queries_in_two_tensors(device, num_heads):
    case = sparse_prefill_case(Draw(4, device), num_heads=num_heads, with_sink=True)
    results = check(split_queries(case))
    for apart, whole in zip(results, check(case), strict=True):
        assert_equal("results", apart, whole)


def test_attention_matches_the_formula(device):
    draw = Draw(7, device)
    kv, q = prefill_rows(draw, 20, 576), draw.normal(1, 2, 576, dtype=torch.bfloat16)
    indices = torch.tensor([[4, 11, -1, 4, 19, 20]], device=device)
    sink = torch.tensor([0.3, -math.inf], device=device)
    max_logits = torch.empty(1, 2, device=device)
    out, lse = sparsemla.sparse_prefill(
        q, kv, indices, softmax_scale=0.5, attn_sink=sink, max_logits=max_logits
    )
    keys = kv[[4, 11, 4, 19]].double()
    logits = q[0].double() @ keys.T * 0.5
    expected_lse = logits.exp().sum(1).log()
    probs = logits.exp() / (logits.exp().sum(1) + sink.double().exp())[:, None]
    assert_close("lse", lse[0], expected_lse, SPARSE_PREFILL_LSE)
    assert_close("max_logits", max_logits[0], logits.amax(1), SPARSE_PREFILL_MAX_LOGITS)
    assert_close("out", out[0], probs @ keys[:, :512], SPARSE_PREFILL_OUT)


@pytest.mark.parametrize("sink", [-math.inf, math.inf, -1e38, 1e38, 0.0, 80.0, -80.0])
def test_every_sink(device, sink):
    case = sparse_prefill_case(Draw(8, device), num_tokens=4)
    case["topk_indices"][1] = -1
    plain = check(case)
    with_sink = check(case | {"attn_sink": torch.full((8,), sink, device=device)})
    assert_equal("lse", with_sink[1], plain[1])
    assert_equal("max_logits", with_sink[2], plain[2])
    if sink < -1e30:
        assert_equal("out", with_sink[0], plain[0])
    if sink > 1e30:
        assert (with_sink[0] == 0).all()


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("topk", [1, 20, 600])
@pytest.mark.parametrize("dtype", FLOATS)
def test_non_finite_values(dtype, topk, value):
    case = sparse_prefill_case(Draw(23), topk=topk, num_rows=800, with_sink=True, dtype=dtype)
    case["q"][1, 3, 5] = value
    case["kv"][case["topk_indices"][2, topk // 2].item(), 7] = value
    case["q"][3, 2, 7], case["kv"][case["topk_indices"][3].long(), 7] = 1, value
    out, _, _ = check_op("sparse_prefill", case)
    assert out[1, 3].isnan().all()
    assert out[3, 2].isnan().all()
    assert out[2, :, 7].isnan().all()


def with_extra_rows(case, extra):
    """A case whose second stream is the first stream of another."""
    names = {"kv": "extra_cache", "topk_indices": "extra_topk_indices"}
    names["topk_lengths"] = "extra_topk_lengths"
    return case | {to: extra[name] for name, to in names.items()}


@pytest.mark.parametrize("empty", ["first", "second", "both"])
@pytest.mark.parametrize("kind", ["rows", "pages"])
def test_streams_without_rows(device, empty, kind):
    """A token without a row gets 0 and -inf; a stream without rows changes nothing."""
    case = with_extra_rows(
        sparse_prefill_case(Draw(37, device), head_dim=512, with_sink=True, with_lengths=True),
        sparse_prefill_case(Draw(38, device), head_dim=512, topk=70, with_lengths=True),
    )
    alone = dict(case)
    if empty == "first":
        alone |= {"kv": case["extra_cache"], "topk_indices": case["extra_topk_indices"]}
        alone |= {"topk_lengths": case["extra_topk_lengths"]}
    alone |= dict.fromkeys(["extra_cache", "extra_topk_indices", "extra_topk_lengths"])
    for name in {"first": ["kv"], "second": ["extra_cache"], "both": ["kv", "extra_cache"]}[empty]:
        case[name] = case[name][:0]
        if kind == "pages":
            case[name] = PagedCache.from_rows(case[name])
    results = run_op("sparse_prefill", case)
    if empty == "both":
        for result, value in zip(results, (0, -math.inf, -math.inf), strict=True):
            assert (result == value).all()
    else:
        for got, wanted in zip(results, run_op("sparse_prefill", alone), strict=True):
            assert_equal("result", got, wanted)


def test_an_extra_stream_is_more_keys(device):
    """One list of keys, with duplicates, in two streams; and the streams merged by their LSE."""
    case = sparse_prefill_case(Draw(36, device), topk=64, head_dim=512, with_sink=True)
    case["topk_indices"][:, 40:50] = case["topk_indices"][:, :10]
    whole = check(case)
    parts = [case["topk_indices"][:, :20].contiguous(), case["topk_indices"][:, 20:].contiguous()]
    extra = {"extra_cache": case["kv"].clone(), "extra_topk_indices": parts[1]}
    together = check(case | {"topk_indices": parts[0]} | extra)
    swapped = check(case | {"topk_indices": parts[1]} | extra | {"extra_topk_indices": parts[0]})
    without_sink = case | {"attn_sink": None}
    apart = [sparsemla.sparse_prefill(**without_sink | {"topk_indices": part}) for part in parts]
    outs, lses = (torch.stack(tensors) for tensors in zip(*apart, strict=True))
    merged = sparsemla.merge_states(outs, lses, attn_sink=case["attn_sink"])
    for results in (together, swapped, merged):
        assert_close("out", results[0], whole[0].float(), SPARSE_PREFILL_OUT)
        assert_close("lse", results[1], whole[1], SPARSE_PREFILL_LSE)


def test_quantised_rows_are_close_to_unquantised_rows(device):
    draw = Draw(17, device)
    rows = draw.normal(200, 576) / 10
    q = draw.normal(6, 8, 576, dtype=torch.bfloat16)
    cache = PagedCache.allocate(FP8_DS_MLA, 4, 64, device=device)
    cache.write(torch.arange(200, device=device), rows)
    indices = torch.stack([draw.permutation(200)[:128] for _ in range(6)])
    out, lse = sparsemla.sparse_prefill(q, cache, indices, softmax_scale=0.1)
    expected = reference.sparse_prefill(q, rows.bfloat16(), indices, softmax_scale=0.1)
    torch.testing.assert_close(out.float(), expected[0], atol=2e-2, rtol=0)
    torch.testing.assert_close(lse, expected[1], atol=2e-2, rtol=0)


@pytest.mark.parametrize("nan_in", ["k", "v"])
def test_dense_prefill_keeps_nan_from_earlier_tokens(nan_in):
    case = dense_prefill_case(Draw(23), query_lens=(40, 3), kv_lens=(70, 20), nan_in=nan_in)
    out, _ = check_op("dense_prefill", case)
    assert out.isnan().any(2).any(1).tolist() == [False] * 19 + [True] * 21 + [False] * 2 + [True]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_dense_prefill_of_queries_that_are_not_finite(value):
    case = dense_prefill_case(Draw(24), query_lens=(40, 3), kv_lens=(70, 20))
    case["q"][[7, 41], 1, 5] = value
    out, _ = check_op("dense_prefill", case)
    assert out.isnan().all(2).nonzero().tolist() == [[7, 1], [41, 1]]


def test_dense_prefill_equals_torch(device):
    case = dense_prefill_case(
        Draw(23, device), query_lens=[7], kv_lens=[7], dtype=torch.float32, value_dim=192
    )
    q, k, v = (case[name].double().transpose(0, 1) for name in "qkv")
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    out, lse = sparsemla.dense_prefill(**case)
    assert_close("out", out, expected.transpose(0, 1), DENSE_PREFILL_OUT)
    logits = (q @ k.transpose(1, 2)) * 192**-0.5
    hidden = torch.ones(7, 7, dtype=torch.bool, device=device).triu(1)
    expected_lse = logits.masked_fill(hidden, -math.inf).logsumexp(-1).T
    assert_close("lse", lse, expected_lse, DENSE_PREFILL_LSE)


def test_kernels_without_fp8_mma_ignore_the_permission(device):
    case = sparse_prefill_case(Draw(23, device), num_heads=32, with_sink=True)
    expected = sparsemla.sparse_prefill(**case, allow_fp8_mma=False)
    default = sparsemla.sparse_prefill(**case)
    got = sparsemla.sparse_prefill(**case, allow_fp8_mma=True)
    for name, *results in zip(("out", "lse"), default, got, expected, strict=True):
        for result in results[:2]:
            assert_equal(name, result, results[2])


@pytest.mark.parametrize("allow_fp8_mma", [False, True])
def test_kernels_get_the_permission(device, allow_fp8_mma, monkeypatch):
    seen = []
    monkeypatch.setattr(dispatch, "launch", lambda op, call: seen.append(call))
    case = sparse_prefill_case(Draw(24, device))
    with unrepeated():
        sparsemla.sparse_prefill(**case, allow_fp8_mma=allow_fp8_mma)
        sparsemla.sparse_prefill(**case)
    assert [call.allow_fp8_mma for call in seen] == [allow_fp8_mma, False]


def nearest_e4m3(x):
    """The nearest of all e4m3 values, the one with the even code if there are two."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    differences = [abs(abs(x) - value) for value in codes.tolist()]
    nearest = min(range(127), key=lambda code: (differences[code], code % 2))
    return math.copysign(codes[nearest].item(), x)


@pytest.mark.parametrize("amax", [448.0, 450.0, 1.0, 0.875, 0.8789, 2.0**-60, 3e38, 1e-20])
def test_rounded_rows_by_their_definition(amax):
    q = torch.randn(2, 3, 576).clamp(-0.99, 0.99) * amax
    q /= 2.0 ** (torch.arange(576) % 20)  # small codes have fewer bits
    q[..., 77] = -amax
    q[..., 512:] *= 7  # RoPE dims have no part in the scale
    got = round_rows(q.bfloat16())
    q = q.bfloat16().float()
    assert got.dtype == torch.float32
    assert torch.equal(got[..., 512:], q[..., 512:])
    assert torch.equal(round_rows(q.bfloat16()[..., :512]), got[..., :512])
    scale = max(2.0 ** math.ceil(math.log2(abs(q[0, 0, 77].item()) / 448)), 2.0**-40)
    for at in ((0, 0), (1, 2)):
        expected = [nearest_e4m3(x / scale) * scale for x in q[at][:512].tolist()]
        assert got[at][:512].tolist() == expected


def test_rounded_rows_of_zeros_nan_and_infinity():
    q = torch.randn(5, 2, 576).bfloat16()
    q[0] = 0
    q[1, 0, 3], q[2, 0, 511], q[3, 0, 0], q[4, 0, 575] = math.nan, math.inf, -math.inf, math.nan
    got = round_rows(q)
    assert (got[0] == 0).all()
    assert got[1:4, 0, :512].isnan().all()
    assert torch.equal(got[..., 512:].nan_to_num(9), q[..., 512:].float().nan_to_num(9))
    assert got[:, 1].isfinite().all()
    assert got[4, 0, :512].isfinite().all()
    assert round_rows(torch.zeros(0, 4, 576)).shape == (0, 4, 576)

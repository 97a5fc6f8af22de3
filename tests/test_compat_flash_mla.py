"""FlashMLA's interface: its arguments, layouts and conventions over the ops."""

import inspect
import math

import pytest
import torch

import sparsemla.compat.flash_mla as flash_mla
from sparsemla import BF16_512, BF16_576, FP8_584, FP8_DS_MLA, PagedCache, bf16_format, reference
from sparsemla_lab.testing.cases import (
    Draw,
    dense_decode_case,
    sinks,
    sparse_decode_case,
    sparse_prefill_case,
)
from sparsemla_lab.testing.compare import (
    DECODE_LSE,
    DENSE_DECODE_OUT,
    SPARSE_DECODE_OUT,
    SPARSE_PREFILL_LSE,
    SPARSE_PREFILL_MAX_LOGITS,
    SPARSE_PREFILL_OUT,
    assert_close,
    assert_equal,
    run_reference,
)
from sparsemla_lab.testing.poison import poisoned_empty

SCHEDULE, NUM_SPLITS = flash_mla.get_mla_metadata()


def plus_inf(lse):
    """A row without a key as FlashMLA marks it."""
    return lse.where(lse != -math.inf, math.inf)


def their_cache(cache):
    return cache.data.unsqueeze(2)


def check_decode(arguments, expected, out_tolerance):
    """Call FlashMLA's decode with ``arguments`` and compare with our ``out`` and ``lse``."""
    with poisoned_empty():
        out, lse = flash_mla.flash_mla_with_kvcache(**arguments)
    assert_close("out", out, expected[0], out_tolerance)
    assert_close("lse", lse, plus_inf(expected[1]).transpose(1, 2), DECODE_LSE)
    assert (out.transpose(1, 2)[lse == math.inf] == 0).all()
    return out, lse


def sparse_arguments(case):
    """Arguments of ``sparse_decode`` in FlashMLA's names."""
    fmt, extra = case["cache"].format, case.get("extra_cache")
    return {
        "q": case["q"],
        "k_cache": their_cache(case["cache"]),
        "block_table": None,
        "cache_seqlens": None,
        "head_dim_v": fmt.value_dim,
        "tile_scheduler_metadata": SCHEDULE,
        "num_splits": NUM_SPLITS,
        "softmax_scale": case["softmax_scale"],
        "is_fp8_kvcache": fmt.fp8_dim > 0,
        "indices": case["topk_indices"],
        "attn_sink": case["attn_sink"],
        "extra_k_cache": None if extra is None else their_cache(extra),
        "extra_indices_in_kvcache": case.get("extra_topk_indices"),
        "topk_length": case["topk_lengths"],
        "extra_topk_length": case.get("extra_topk_lengths"),
    }


def check_sparse(case):
    expected = run_reference("sparse_decode", case)
    return check_decode(sparse_arguments(case), expected, SPARSE_DECODE_OUT)


@pytest.mark.parametrize(
    "fmt", [FP8_DS_MLA, FP8_584, BF16_576, BF16_512, bf16_format(320, 256)], ids=lambda f: f.name
)
@pytest.mark.parametrize("features", ["plain", "sink lengths"])
def test_sparse_decode(device, fmt, features):
    case = sparse_decode_case(
        Draw(0, device),
        format=fmt,
        query_len=3,
        num_heads=5,
        topk=33,
        page_size=61,
        with_sink="sink" in features,
        with_lengths="lengths" in features,
        strided=True,
    )
    check_sparse(case)


def test_sparse_decode_over_two_caches(device):
    case = sparse_decode_case(
        Draw(1, device),
        format=FP8_584,
        query_len=2,
        with_sink=True,
        with_lengths=True,
        extra=(FP8_584, 90, 17, 2),
        with_extra_lengths=True,
    )
    check_sparse(case)


def test_pages_of_584_bytes_a_row_need_no_padding(device):
    case = sparse_decode_case(Draw(1, device), format=FP8_584, page_size=60)
    arguments = sparse_arguments(case)
    expected = flash_mla.flash_mla_with_kvcache(**arguments)
    pages = case["cache"].data
    arguments["k_cache"] = pages.contiguous().unsqueeze(2)
    assert arguments["k_cache"].stride(0) < pages.stride(0)
    for got, wanted in zip(flash_mla.flash_mla_with_kvcache(**arguments), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("fmt", [BF16_576, FP8_DS_MLA, FP8_584], ids=lambda f: f.name)
def test_sparse_decode_is_compiled_whole(device, fmt):
    torch._dynamo.reset()
    decode = torch.compile(flash_mla.flash_mla_with_kvcache, fullgraph=True, backend="aot_eager")
    for batch in (2, 3, 5):  # the second call already makes a graph for any
        extra = (fmt, 90, 17, 2) if fmt is FP8_584 else None
        case = sparse_decode_case(
            Draw(1, device), batch=batch, format=fmt, with_lengths=True, extra=extra
        )
        arguments = sparse_arguments(case)
        expected = flash_mla.flash_mla_with_kvcache(**arguments)
        for got, wanted in zip(decode(**arguments), expected, strict=True):
            assert torch.equal(got, wanted)


def test_rows_without_a_key(device):
    case = sparse_decode_case(Draw(2, device), format=FP8_DS_MLA, with_sink=True)
    case["topk_indices"][1] = torch.iinfo(torch.int32).min
    _, lse = check_sparse(case)
    assert (lse[1] == math.inf).all()
    assert lse[0].isfinite().all()


@pytest.mark.parametrize("dtype", flash_mla.ONE_BYTE)
def test_bytes_of_a_quantised_cache_have_any_dtype(device, dtype):
    arguments = sparse_arguments(sparse_decode_case(Draw(3, device), format=FP8_DS_MLA))
    expected = flash_mla.flash_mla_with_kvcache(**arguments)
    arguments["k_cache"] = arguments["k_cache"].view(dtype)
    for got, wanted in zip(flash_mla.flash_mla_with_kvcache(**arguments), expected, strict=True):
        assert torch.equal(got, wanted)


def dense_arguments(case, k_cache):
    return {
        "q": case["q"],
        "k_cache": k_cache,
        "block_table": case["page_table"],
        "cache_seqlens": case["seq_lens"],
        "head_dim_v": case["cache"].format.value_dim,
        "tile_scheduler_metadata": SCHEDULE,
        "softmax_scale": case["softmax_scale"],
        "causal": case["causal"],
        "is_fp8_kvcache": case["cache"].format.fp8_dim > 0,
    }


@pytest.mark.parametrize("fmt", [BF16_576, BF16_512, FP8_DS_MLA, FP8_584], ids=lambda f: f.name)
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
def test_dense_decode(device, fmt, causal):
    case = dense_decode_case(
        Draw(4, device), format=fmt, query_len=3, num_heads=5, page_size=13, causal=causal
    )
    arguments = dense_arguments(case, their_cache(case["cache"]))
    expected = run_reference("dense_decode", case)
    _, lse = check_decode(arguments, expected, DENSE_DECODE_OUT)
    assert (lse[2] == math.inf).all()  # a request without a key


def test_dense_decode_with_a_sink(device):
    case = dense_decode_case(Draw(5, device), format=BF16_576, with_sink=True)
    arguments = dense_arguments(case, their_cache(case["cache"]))
    arguments["attn_sink"] = case["attn_sink"]
    check_decode(arguments, run_reference("dense_decode", case), DENSE_DECODE_OUT)


@pytest.mark.parametrize("key_heads", [2, 3])
def test_key_heads_have_their_own_query_heads(device, key_heads):
    draw = Draw(6, device)
    case = dense_decode_case(draw, format=BF16_576, query_len=2, num_heads=6)
    first = case["cache"]
    caches = [first, *(PagedCache(first.data * -i, BF16_576) for i in range(1, key_heads))]
    sink, parts = sinks(draw, 6), []
    for queries, sink_part, cache in zip(
        case["q"].chunk(key_heads, 2), sink.chunk(key_heads), caches, strict=True
    ):
        part = {**case, "q": queries, "cache": cache, "attn_sink": sink_part}
        parts.append(run_reference("dense_decode", part))
    expected = [torch.cat(tensors, 2) for tensors in zip(*parts, strict=True)]

    arguments = dense_arguments(case, torch.stack([cache.data for cache in caches], 2))
    check_decode({**arguments, "attn_sink": sink}, expected, DENSE_DECODE_OUT)


def test_default_scale_is_from_the_query_dims(device):
    case = dense_decode_case(Draw(7, device), format=BF16_576)
    arguments = {**dense_arguments(case, their_cache(case["cache"])), "softmax_scale": None}
    check_decode(arguments, run_reference("dense_decode", case), DENSE_DECODE_OUT)


@pytest.mark.parametrize("mode", ["sparse", "dense"])
def test_decode_writes_into_out(device, mode):
    if mode == "sparse":
        arguments = sparse_arguments(sparse_decode_case(Draw(8, device), format=FP8_DS_MLA))
    else:
        case = dense_decode_case(Draw(8, device), format=BF16_576)
        arguments = dense_arguments(case, their_cache(case["cache"]))
    out = torch.full_like(arguments["q"][..., :512], math.nan)
    got, _ = flash_mla.flash_mla_with_kvcache(**arguments, out=out)
    assert got.data_ptr() == out.data_ptr()
    assert out.isfinite().all()


def test_batch_invariance(device):
    """A request has the same bits alone and in a batch."""
    case = sparse_decode_case(Draw(9, device), format=FP8_DS_MLA, batch=4, topk=130)
    arguments = {**sparse_arguments(case), "enable_batch_invariant": True}
    out, lse = flash_mla.flash_mla_with_kvcache(**arguments)
    for name in ("q", "indices"):
        arguments[name] = arguments[name][2:3]
    alone, lse_alone = flash_mla.flash_mla_with_kvcache(**arguments)
    assert torch.equal(alone[0], out[2])
    assert torch.equal(lse_alone[0], lse[2])


@pytest.mark.parametrize(("head_dim", "value_dim"), [(576, 512), (512, 512), (96, 64)])
def test_sparse_prefill(device, head_dim, value_dim):
    case = sparse_prefill_case(
        Draw(10, device),
        num_heads=5,
        topk=33,
        head_dim=head_dim,
        with_sink=True,
        with_lengths=True,
        strided=True,
    )
    case["topk_indices"][1] = -1
    cache = PagedCache.from_rows(case["kv"], value_dim)
    expected = reference.sparse_prefill(**{**case, "kv": cache})
    with poisoned_empty():
        out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(
            case["q"],
            case["kv"].unsqueeze(1),
            case["topk_indices"].unsqueeze(1),
            sm_scale=case["softmax_scale"],
            d_v=value_dim,
            attn_sink=case["attn_sink"],
            topk_length=case["topk_lengths"],
        )
    assert_close("out", out, expected[0], SPARSE_PREFILL_OUT)
    assert_close("lse", lse, plus_inf(expected[1]), SPARSE_PREFILL_LSE)
    assert_close("max_logits", max_logits, expected[2], SPARSE_PREFILL_MAX_LOGITS)
    assert (lse[1] == math.inf).all()
    assert (max_logits[1] == -math.inf).all()


def test_sparse_prefill_writes_into_out(device):
    case = sparse_prefill_case(Draw(11, device), num_heads=2, topk=8)
    q, kv, indices = case["q"], case["kv"].unsqueeze(1), case["topk_indices"].unsqueeze(1)
    out = torch.full_like(q[..., :512], math.nan)
    got, _, _ = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.5, out=out)
    assert got.data_ptr() == out.data_ptr()
    assert out.isfinite().all()


def test_sparse_prefill_over_no_rows(device):
    q = Draw(11, device).normal(3, 2, 96).bfloat16()
    kv, indices = q.new_empty(0, 1, 96), torch.zeros(3, 1, 4, dtype=torch.int32, device=device)
    out, max_logits, lse = flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.5, d_v=64)
    assert out.shape == (3, 2, 64)
    assert (out == 0).all()
    assert (lse == math.inf).all()
    assert (max_logits == -math.inf).all()


def test_the_output_of_sparse_prefill_alone(device):
    case = sparse_prefill_case(Draw(11, device), num_heads=2, topk=8)
    arguments = case["q"], case["kv"].unsqueeze(1), case["topk_indices"].unsqueeze(1), 0.5
    out = flash_mla.flash_mla_sparse_prefill(*arguments)
    assert_equal("out", out, flash_mla.flash_mla_sparse_fwd(*arguments)[0])
    narrow = flash_mla.flash_mla_sparse_prefill(*arguments, d_v=64)
    assert_equal("out", narrow, flash_mla.flash_mla_sparse_fwd(*arguments, d_v=64)[0])


def test_schedule_ignores_its_arguments():
    """Callers of older versions describe the batch."""
    lens = torch.tensor([5, 7], dtype=torch.int32)
    schedule, num_splits = flash_mla.get_mla_metadata(lens, 16, num_heads_k=1)
    assert isinstance(schedule, flash_mla.FlashMLASchedMeta)
    assert num_splits is None


EMPTY = inspect.Parameter.empty
ARGUMENTS = {
    "flash_mla_with_kvcache": {
        "q": EMPTY,
        "k_cache": EMPTY,
        "block_table": EMPTY,
        "cache_seqlens": EMPTY,
        "head_dim_v": EMPTY,
        "tile_scheduler_metadata": EMPTY,
        "num_splits": None,
        "softmax_scale": None,
        "causal": False,
        "is_fp8_kvcache": False,
        "indices": None,
        "attn_sink": None,
        "extra_k_cache": None,
        "extra_indices_in_kvcache": None,
        "topk_length": None,
        "extra_topk_length": None,
        "out": None,
        "enable_batch_invariant": False,
    },
    "flash_mla_sparse_fwd": {
        "q": EMPTY,
        "kv": EMPTY,
        "indices": EMPTY,
        "sm_scale": EMPTY,
        "d_v": 512,
        "attn_sink": None,
        "topk_length": None,
        "out": None,
    },
    "flash_mla_sparse_prefill": {  # of vLLM
        "q": EMPTY,
        "kv": EMPTY,
        "indices": EMPTY,
        "sm_scale": EMPTY,
        "d_v": 512,
    },
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_signatures_match_flashmla(name):
    parameters = inspect.signature(getattr(flash_mla, name)).parameters
    got = [(p.name, p.default) for p in parameters.values()]
    assert got == list(ARGUMENTS[name].items())
    assert {p.kind for p in parameters.values()} == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def a_sparse_call():
    case = sparse_decode_case(
        Draw(12), format=FP8_584, num_heads=2, topk=8, extra=(FP8_584, 20, 4, 2)
    )
    return sparse_arguments(case)


def a_dense_call():
    case = dense_decode_case(Draw(12), format=BF16_576, num_heads=3)
    return dense_arguments(case, their_cache(case["cache"]))


LENGTHS = torch.ones(3, dtype=torch.int32)
# A change that makes a good call wrong, and the argument that the message names.
REFUSED_SPARSE = {
    "causal": ({"causal": True}, "causal"),
    "a schedule of older versions": ({"num_splits": LENGTHS}, "num_splits"),
    "q of integers": ({"q": torch.ones(3, 1, 2, 512, dtype=torch.int32)}, "q must"),
    "indices of floats": ({"indices": torch.ones(3, 1, 8)}, "indices must"),
    "lengths of another batch": ({"topk_length": LENGTHS[:2]}, "topk_length must"),
    "a sink of another head count": ({"attn_sink": torch.ones(3)}, "attn_sink must"),
    "no indices of the second cache": (
        {"extra_indices_in_kvcache": None},
        "extra_indices_in_kvcache must",
    ),
    "no second cache": ({"extra_k_cache": None}, "extra_indices_in_kvcache must be None"),
    "values of other dims": ({"head_dim_v": 448}, "head_dim_v must be 512"),
    "bfloat16 said to be FP8": (
        {"k_cache": torch.ones(4, 64, 1, 512).bfloat16()},
        "k_cache must have dtype",
    ),
    "FP8 said to be bfloat16": ({"is_fp8_kvcache": False}, "k_cache must have dtype bfloat16"),
    "rows of DeepSeek-V3.2": (
        {"k_cache": torch.zeros(4, 64, 1, 656, dtype=torch.uint8)},
        "k_cache must have a last dimension of 656 for a head_dim of 576 or 584",
    ),
    "rows of another quantisation": (
        {"extra_k_cache": torch.zeros(4, 64, 1, 288, dtype=torch.uint8)},
        "extra_k_cache must have a last dimension",
    ),
    "two key heads": (
        {"k_cache": torch.zeros(4, 64, 2, 584, dtype=torch.uint8)},
        "k_cache must have shape",
    ),
    "every other row of a page": (
        {"k_cache": torch.zeros(4, 128, 1, 584, dtype=torch.uint8)[:, ::2]},
        "k_cache: data must have a row stride of 584 bytes",
    ),
    "pages that overlap": (
        {
            "k_cache": torch.zeros(40000, dtype=torch.uint8).as_strided(
                (2, 64, 1, 584), (64, 584, 584, 1)
            )
        },
        "k_cache: data must have a page stride",
    ),
    "out of another shape": ({"out": torch.zeros(3, 1, 2, 448).bfloat16()}, "out must"),
}
REFUSED_DENSE = {
    "no page table": ({"block_table": None}, "block_table must"),
    "no lengths": ({"cache_seqlens": None}, "cache_seqlens must"),
    "a second cache": ({"extra_k_cache": torch.zeros(1)}, "extra_k_cache must be None"),
    "lengths of a selection": ({"topk_length": LENGTHS}, "topk_length must be None"),
    "key heads that do not divide": (
        {"k_cache": torch.zeros(4, 64, 2, 576).bfloat16()},
        "k_cache must have a head count that divides q's 3, got 2",
    ),
    "no key heads": (
        {"k_cache": torch.zeros(4, 64, 0, 576).bfloat16()},
        "k_cache must have a head count that divides q's 3, got 0",
    ),
    "a float16 cache": ({"k_cache": torch.zeros(4, 64, 1, 576).half()}, "k_cache must have dtype"),
    "no count of values": ({"head_dim_v": None}, "head_dim_v must be a int"),
    "values longer than keys": ({"head_dim_v": 577}, "head_dim_v must lie in"),
}


def refuse(function, arguments, change, named):
    with pytest.raises((TypeError, ValueError), match=named) as caught:
        function(**{**arguments, **change})
    assert str(caught.value).startswith(f"{function.__name__}: ")


@pytest.mark.parametrize("name", REFUSED_SPARSE)
def test_sparse_decode_refuses(name):
    refuse(flash_mla.flash_mla_with_kvcache, a_sparse_call(), *REFUSED_SPARSE[name])


@pytest.mark.parametrize("name", REFUSED_DENSE)
def test_dense_decode_refuses(name):
    refuse(flash_mla.flash_mla_with_kvcache, a_dense_call(), *REFUSED_DENSE[name])


REFUSED_PREFILL = {
    "two key heads": ({"kv": torch.zeros(9, 2, 576).bfloat16()}, "kv must have shape"),
    "float32 rows": ({"kv": torch.zeros(9, 1, 576)}, "kv must have dtype"),
    "indices without a head": ({"indices": torch.ones(3, 4).int()}, "indices must have shape"),
    "values longer than keys": ({"d_v": 577}, "d_v must lie in"),
    "lengths of another batch": ({"topk_length": LENGTHS[:2]}, "topk_length must"),
    "out of another dtype": ({"out": torch.zeros(3, 2, 512)}, "out must have dtype"),
}


@pytest.mark.parametrize("name", REFUSED_PREFILL)
def test_sparse_prefill_refuses(name):
    arguments = {
        "q": torch.zeros(3, 2, 576).bfloat16(),
        "kv": torch.zeros(9, 1, 576).bfloat16(),
        "indices": torch.zeros(3, 1, 4).int(),
        "sm_scale": 1.0,
    }
    refuse(flash_mla.flash_mla_sparse_fwd, arguments, *REFUSED_PREFILL[name])

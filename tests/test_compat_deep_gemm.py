"""DeepGEMM's indexer interface: its arguments and layouts over the ops."""

import inspect
import math

import pytest
import torch

import sparsemla.compat.deep_gemm as deep_gemm
from sparsemla import INDEX_FP8
from sparsemla.formats import fp8_scales, to_fp8
from sparsemla_lab.testing.cases import Draw, indexer_scores_case, indexer_scores_paged_case
from sparsemla_lab.testing.compare import (
    INDEXER_SCORES,
    Tolerance,
    assert_close,
    run_reference,
    score_sizes,
)
from sparsemla_lab.testing.poison import poisoned_empty

# As for float32 scores, and a rounding of the result by up to 2^-8 of itself.
BFLOAT16_SCORES = Tolerance(rel=1.51 / 256, cos=3e-6, size=2**-9)


def ragged_arguments(case):
    """Arguments of ``indexer_scores`` in DeepGEMM's names."""
    return {
        "q": case["index_q"],
        "kv": (case["index_k"], case["index_k_scales"]),
        "weights": case["weights"],
        "cu_seq_len_k_start": case["row_starts"],
        "cu_seq_len_k_end": case["row_ends"],
    }


@pytest.mark.parametrize("ranges", ["causal", "segments", "ragged"])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(64, 128), (5, 32)])
def test_ragged(device, ranges, num_heads, head_dim):
    case = indexer_scores_case(
        Draw(0, device), num_heads=num_heads, head_dim=head_dim, ranges=ranges
    )
    (expected,) = run_reference("indexer_scores", case)
    sizes = score_sizes("indexer_scores", case)
    for clean in (False, True):
        with poisoned_empty():
            logits = deep_gemm.fp8_mqa_logits(**ragged_arguments(case), clean_logits=clean)
        assert_close("logits", logits, expected, INDEXER_SCORES, sizes)


def moved(full, starts, width):
    """Rows of ``full`` from their first keys on, -inf behind."""
    out = torch.full((len(full), width), -math.inf, device=full.device)
    for row, start in enumerate(starts.clamp_min(0).tolist()):
        part = full[row, start : start + width]
        out[row, : len(part)] = part
    return out


@pytest.mark.parametrize("width", [1, 40, 100, 300])
@pytest.mark.parametrize("workspace", [1, 3000, 1 << 20])
def test_ragged_and_compressed(device, monkeypatch, width, workspace):
    case = indexer_scores_case(Draw(1, device), num_heads=3, ranges="ragged")
    monkeypatch.setattr(deep_gemm, "MAX_WORKSPACE_BYTES", workspace)
    (full,) = run_reference("indexer_scores", case)
    with poisoned_empty():
        logits = deep_gemm.fp8_mqa_logits(
            **ragged_arguments(case), clean_logits=False, max_seqlen_k=width
        )
    expected, sizes = (
        moved(rows, case["row_starts"], width)
        for rows in (full, score_sizes("indexer_scores", case))
    )
    assert_close("logits", logits, expected, INDEXER_SCORES, sizes)


def test_compressed_without_rows(device):
    case = indexer_scores_case(Draw(2, device), num_tokens=0)
    logits = deep_gemm.fp8_mqa_logits(**ragged_arguments(case), max_seqlen_k=7)
    assert logits.shape == (0, 7)


@pytest.mark.parametrize("max_seqlen_k", [0, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ragged_with_a_dtype_of_the_result(device, dtype, max_seqlen_k):
    case = indexer_scores_case(Draw(3, device), num_heads=3)
    (expected,) = run_reference("indexer_scores", case)
    arguments = ragged_arguments(case)
    arguments["q"] = arguments["q"], None
    logits = deep_gemm.fp8_fp4_mqa_logits(
        **arguments, max_seqlen_k=max_seqlen_k, logits_dtype=dtype
    )
    assert logits.dtype == dtype
    sizes = score_sizes("indexer_scores", case)
    assert_close("logits", logits, expected, BFLOAT16_SCORES, sizes)


def paged_arguments(case):
    """Arguments of ``indexer_scores_paged`` in DeepGEMM's names."""
    lens = case["seq_lens"]
    return {
        "q": case["index_q"],
        "kv_cache": case["cache"].data.unsqueeze(2),
        "weights": case["weights"].flatten(0, 1),
        "context_lens": lens,
        "block_table": case["page_table"],
        "schedule_meta": deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 132),
        "max_context_len": case["max_seq_len"],
    }


@pytest.mark.parametrize("own_lengths", [False, True], ids=["of requests", "of rows"])
@pytest.mark.parametrize(
    ("query_len", "num_heads", "page_size"), [(1, 64, 64), (3, 5, 61), (6, 32, 2)]
)
def test_paged(device, own_lengths, query_len, num_heads, page_size):
    case = indexer_scores_paged_case(
        Draw(4, device),
        query_len=query_len,
        num_heads=num_heads,
        page_size=page_size,
        own_lengths=own_lengths,
    )
    expected = run_reference("indexer_scores_paged", case)[0].flatten(0, 1)
    sizes = score_sizes("indexer_scores_paged", case).flatten(0, 1)
    for clean in (False, True):
        with poisoned_empty():
            logits = deep_gemm.fp8_paged_mqa_logits(**paged_arguments(case), clean_logits=clean)
        assert_close("logits", logits, expected, INDEXER_SCORES, sizes)


def test_paged_is_compiled_whole(device):
    torch._dynamo.reset()
    arguments = paged_arguments(indexer_scores_paged_case(Draw(0, device), query_len=2))
    score = torch.compile(deep_gemm.fp8_paged_mqa_logits, fullgraph=True, backend="aot_eager")
    assert torch.equal(score(**arguments), deep_gemm.fp8_paged_mqa_logits(**arguments))


def test_indices_of_rows_of_one_request_are_ignored(device):
    case = indexer_scores_paged_case(Draw(5, device), own_lengths=True)
    arguments = paged_arguments(case)
    expected = deep_gemm.fp8_paged_mqa_logits(**arguments)
    indices = torch.tensor([0, 0, 1, 1], dtype=torch.int32, device=device)
    got = deep_gemm.fp8_paged_mqa_logits(**arguments, indices=indices)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_with_a_dtype_of_the_result(device, dtype):
    case = indexer_scores_paged_case(Draw(6, device), query_len=2)
    expected = run_reference("indexer_scores_paged", case)[0].flatten(0, 1)
    sizes = score_sizes("indexer_scores_paged", case).flatten(0, 1)
    arguments = paged_arguments(case)
    arguments["q"] = arguments["q"], None
    logits = deep_gemm.fp8_fp4_paged_mqa_logits(**arguments, logits_dtype=dtype)
    assert logits.dtype == dtype
    assert_close("logits", logits, expected, BFLOAT16_SCORES, sizes)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_pages_hold_values_then_scales(device, head_dim):
    """The bytes as DeepGEMM's test lays them out, any dims."""
    draw, page_size = Draw(7, device), 16
    keys = draw.normal(5, page_size, head_dim)
    scales = fp8_scales(keys.abs().amax(-1))
    values = to_fp8(keys / scales[..., None])
    pages = [values.flatten(1).view(torch.uint8), scales.view(torch.uint8)]
    kv_cache = torch.cat(pages, 1).view(5, page_size, 1, head_dim + 4)

    q = to_fp8(draw.normal(2, 1, 3, head_dim))
    weights = draw.normal(2, 3)
    table = draw.tensor([[4, 0], [2, 3]]).int()
    lens = draw.tensor([[20], [32]]).int()
    logits = deep_gemm.fp8_paged_mqa_logits(q, kv_cache, weights, lens, table, None, 32)
    for row, length in enumerate((20, 32)):
        rows = values.float()[table[row]].flatten(0, 1) * scales[table[row]].flatten()[:, None]
        scores = weights[row] @ (q[row, 0].float() @ rows.T).relu()
        scores[length:] = -math.inf
        assert_close("logits", logits[row], scores, INDEXER_SCORES)


def test_schedule_has_deepgemms_shape_and_is_zero(device):
    lens = torch.tensor([[3, 4]], dtype=torch.int32, device=device)
    schedule = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, deep_gemm.get_num_sms())
    assert schedule.shape == (deep_gemm.get_num_sms() + 1, 2)
    assert schedule.dtype == torch.int32
    assert schedule.device == lens.device


EMPTY = inspect.Parameter.empty
RAGGED = dict.fromkeys(("q", "kv", "weights", "cu_seq_len_k_start", "cu_seq_len_k_end"), EMPTY) | {
    "clean_logits": True,
    "max_seqlen_k": 0,
}
PAGED = dict.fromkeys(
    (
        "q",
        "kv_cache",
        "weights",
        "context_lens",
        "block_table",
        "schedule_meta",
        "max_context_len",
    ),
    EMPTY,
) | {"clean_logits": False}
ARGUMENTS = {
    "fp8_mqa_logits": RAGGED,
    "fp8_fp4_mqa_logits": RAGGED | {"logits_dtype": torch.float32},
    "fp8_paged_mqa_logits": PAGED | {"indices": None},
    "fp8_fp4_paged_mqa_logits": PAGED | {"logits_dtype": torch.float32, "indices": None},
    "get_paged_mqa_logits_metadata": {
        "context_lens": EMPTY,
        "block_kv": EMPTY,
        "num_sms": EMPTY,
        "indices": None,
    },
    "get_num_sms": {},
}


@pytest.mark.parametrize("name", deep_gemm.__all__)
def test_signatures_match_deepgemm(name):
    parameters = inspect.signature(getattr(deep_gemm, name)).parameters
    assert [(p.name, p.default) for p in parameters.values()] == list(ARGUMENTS[name].items())
    assert {p.kind for p in parameters.values()} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}


KEYS = torch.zeros(100, 128).to(torch.float8_e4m3fn)
# A change that makes a good call wrong, and the argument that the message names.
REFUSED_RAGGED = {
    "bfloat16 queries": ({"q": torch.zeros(6, 32, 128).bfloat16()}, "q must have dtype"),
    "keys without scales": ({"kv": KEYS}, "kv must be a pair"),
    "scales of other keys": ({"kv": (KEYS, torch.ones(99))}, r"kv\[1\] must have shape"),
    "weights of other heads": ({"weights": torch.ones(6, 31)}, "weights must have shape"),
    "starts of other rows": (
        {"cu_seq_len_k_start": torch.zeros(5).int()},
        "cu_seq_len_k_start must have shape",
    ),
    "ends of floats": ({"cu_seq_len_k_end": torch.zeros(6)}, "cu_seq_len_k_end must have dtype"),
    "a negative width": ({"max_seqlen_k": -1}, "max_seqlen_k must be at least 1"),
}
REFUSED_PAGED = {
    "bfloat16 queries": ({"q": torch.zeros(4, 1, 32, 128).bfloat16()}, "q must have dtype"),
    "FP4 pages": (
        {"kv_cache": torch.zeros(9, 64, 1, 68, dtype=torch.uint8)},
        r"kv_cache must have shape \[num_blocks, block_kv, 1, head_dim\+4\]",
    ),
    "every other row of a page": (
        {"kv_cache": torch.zeros(9, 128, 1, 132, dtype=torch.uint8)[:, ::2]},
        "kv_cache: data must have a row stride of 132 bytes",
    ),
    "weights of a batch": ({"weights": torch.ones(4, 1, 32)}, "weights must have shape"),
    "lengths of other rows": ({"context_lens": torch.ones(4, 2).int()}, "context_lens must have"),
    "a table of another batch": ({"block_table": torch.ones(3, 2).int()}, "block_table must have"),
    "no columns": ({"max_context_len": 0}, "max_context_len must be at least 1"),
}


def refuse(function, arguments, change, named):
    with pytest.raises((TypeError, ValueError), match=named) as caught:
        function(**{**arguments, **change})
    assert str(caught.value).startswith(f"{function.__name__}: ")


@pytest.mark.parametrize("name", REFUSED_RAGGED)
def test_ragged_refuses(name):
    arguments = ragged_arguments(indexer_scores_case(Draw(8)))
    refuse(deep_gemm.fp8_mqa_logits, arguments, *REFUSED_RAGGED[name])


@pytest.mark.parametrize("name", REFUSED_PAGED)
def test_paged_refuses(name):
    arguments = paged_arguments(indexer_scores_paged_case(Draw(8)))
    assert arguments["kv_cache"].shape[3] == INDEX_FP8.bytes_per_token
    refuse(deep_gemm.fp8_paged_mqa_logits, arguments, *REFUSED_PAGED[name])


@pytest.mark.parametrize(
    "function", [deep_gemm.fp8_fp4_mqa_logits, deep_gemm.fp8_fp4_paged_mqa_logits]
)
@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"q": (torch.zeros(1), torch.zeros(1))}, "q must be .* and None.*FP4 is unsupported"),
        ({"q": torch.zeros(1)}, "q must be a pair"),
        ({"logits_dtype": torch.float16}, "logits_dtype must be"),
    ],
    ids=["FP4", "no pair", "a dtype"],
)
def test_pairs_refuse(function, change, named):
    if function is deep_gemm.fp8_fp4_mqa_logits:
        arguments = ragged_arguments(indexer_scores_case(Draw(8)))
    else:
        arguments = paged_arguments(indexer_scores_paged_case(Draw(8)))
    refuse(function, {**arguments, "q": (arguments["q"], None)}, change, named)

"""FP8 products of attention: their limits pass what rounding does, and refuse everything else."""

import copy
from dataclasses import replace

import pytest
import torch

from sparsemla import BF16_512, BF16_576, FP8_584, FP8_DS_MLA, PagedCache, dispatch
from sparsemla.reference.prefill import round_rows
from sparsemla_lab.testing import compare
from sparsemla_lab.testing.cases import Draw, sparse_decode_case, sparse_prefill_case
from sparsemla_lab.testing.compare import (
    SPARSE_PREFILL_LSE,
    SPARSE_PREFILL_OUT,
    assert_result,
    has_fp8_products,
    run_reference,
    sizes_of,
    tolerances_of,
)
from sparsemla_lab.testing.fp8_products import e4m3, multiplied
from sparsemla_lab.verify.matrix import MATRIX

CASES = {
    op: {
        case.name.removeprefix("FP8 products, "): case
        for case in MATRIX[op]
        if case.name.startswith("FP8 products, ") and not case.large
    }
    for op in ("sparse_prefill", "sparse_decode")
}
ALIKE = {"cache", "512 dims", "float16", "extra stream"}
"""Cases that :func:`multiplied` does not emulate; no kernel has FP8 products for them."""
TELLING = {"few valid indices", "rows of many sizes", "one key", "few valid slots"}
"""Cases that refuse most wrong roundings."""
EMULATED = [(op, name) for op, cases in CASES.items() for name in sorted({*cases} - ALIKE)]


def e5m2(x):
    return x.to(torch.float8_e5m2).float()


@pytest.fixture
def hopper(monkeypatch):
    """The limits of a kernel with FP8 products for every call that permits them."""
    monkeypatch.setattr(
        compare, "has_fp8_products", lambda arguments: arguments["precision"] == "fp8"
    )


def check(results, arguments):
    op = "sparse_decode" if "cache" in arguments else "sparse_prefill"
    expected = run_reference(op, arguments)
    sizes, limits = sizes_of(op, arguments), tolerances_of(op, arguments)
    for index, (name, result) in enumerate(zip(("out", "lse"), results, strict=True)):
        assert_result(name, result, expected[index], limits[index], sizes[index])


@pytest.mark.parametrize(("op", "name"), EMULATED)
@pytest.mark.parametrize("largest", [8.0, 256.0])
def test_roundings_are_within_the_limits(op, name, largest, hopper):
    arguments = CASES[op][name].build(Draw(2))
    check(multiplied(arguments, largest=largest), arguments)


def without_sink(arguments):
    return arguments | {"attn_sink": None}


def one_key_more(arguments):
    return arguments | {"topk_lengths": arguments["topk_lengths"] + 1}


def larger_scale(arguments):
    return arguments | {"softmax_scale": arguments["softmax_scale"] * 1.01}


def doubled_rows(arguments):
    """Every fifth row counts twice, or one scale of each."""
    if "cache" in arguments:
        cache = copy.deepcopy(arguments["cache"])
        cache.fields().scales[..., 2].mul_(2)
        return arguments | {"cache": cache}
    kv = arguments["kv"].clone()
    kv[::5, :512] *= 2
    return arguments | {"kv": kv}


def another_head(arguments):
    return arguments | {"q": arguments["q"].roll(1, -2)}


@pytest.mark.parametrize(
    "change", [without_sink, one_key_more, larger_scale, doubled_rows, another_head]
)
@pytest.mark.parametrize("op", CASES)
def test_other_arguments_are_beyond_the_limits(change, op, hopper):
    arguments = CASES[op]["128 heads"].build(Draw(2))
    with pytest.raises(AssertionError):
        check(multiplied(change(arguments)), arguments)


def saturated(x):
    """Scales half as large as need be."""
    scale = (x[..., :512].float().abs().amax(-1, keepdim=True) / 896).log2().ceil().exp2()
    codes = e4m3((x[..., :512] / scale).clamp(-448, 448))
    return torch.cat([codes * scale, x[..., 512:].float()], -1)


def rounded_rope(x):
    return round_rows(round_rows(x).flip(-1), 64).flip(-1)


ROUNDINGS = {
    "queries": {"queries": lambda q: q.float()},
    "saturated queries": {"queries": saturated},
    "RoPE of queries": {"queries": rounded_rope},
    "rows": {"rows": lambda rows: rows.float()},
    "saturated rows": {"rows": saturated},
    "RoPE of rows": {"rows": rounded_rope},
    "lse": {"own_lse": True},
    "e5m2": {"rounded": e5m2},
    "larger": {"rounded": lambda weights: e4m3(weights) * 1.04},
}
"""Wrong ones. A decode rounds no rows."""


@pytest.mark.parametrize(
    ("op", "rounding"),
    [
        (op, name)
        for op in CASES
        for name, options in ROUNDINGS.items()
        if op == "sparse_prefill" or "rows" not in options
    ],
)
@pytest.mark.parametrize("seed", range(2))
def test_other_roundings_are_beyond_the_limits(op, rounding, seed, hopper):
    """Some case refuses them, in every draw: with few keys, or rows of many sizes, as a rule."""

    def refuses(name):
        arguments = CASES[op][name].build(Draw(seed))
        try:
            check(multiplied(arguments, **ROUNDINGS[rounding]), arguments)
        except AssertionError:
            return True
        return False

    assert any(map(refuses, sorted({*CASES[op]} - ALIKE, key=lambda name: name not in TELLING)))


@pytest.fixture
def on_hopper(monkeypatch):
    """Dispatch as on a Hopper GPU."""
    pytest.importorskip("triton")
    original = dispatch._problem

    def problem(*given, **options):
        return replace(original(*given, **options), device="cuda", capability=(9, 0))

    monkeypatch.setattr(dispatch, "problem_of", problem)


def permitting(**options):
    options = {"num_heads": 64, **options}
    return sparse_prefill_case(Draw(0), **options) | {"precision": "fp8"}


def test_other_devices_have_no_fp8_products():
    case = permitting()
    assert not has_fp8_products(case)
    assert tolerances_of("sparse_prefill", case) == (
        SPARSE_PREFILL_OUT,
        SPARSE_PREFILL_LSE,
        compare.TOLERANCES["sparse_prefill"][2],
    )


def pages(fmt, page_size):
    return PagedCache.allocate(fmt, 4, page_size)


@pytest.mark.parametrize(
    ("case", "taken"),
    [
        (permitting(), True),
        (permitting() | {"precision": "bf16"}, False),
        (permitting(num_heads=33), True),
        (permitting(num_heads=32), False),
        (permitting(head_dim=512), False),
        (permitting(dtype=torch.float16), False),
        (permitting() | {"kv": pages(BF16_576, 1)}, True),
        (permitting() | {"kv": pages(BF16_576, 64)}, False),
        (permitting() | {"kv": pages(BF16_512, 1)}, False),
        (permitting() | {"kv": pages(FP8_DS_MLA, 1)}, False),
        (permitting() | {"extra_kv": pages(BF16_576, 1)}, False),
        (permitting() | {"list_tokens": 2}, False),
        (permitting() | {"members": torch.zeros(5, 128, dtype=torch.uint8)}, False),
        (permitting() | {"max_logits": torch.empty(5, 64)}, False),
    ],
    ids=[
        "rows",
        "bf16",
        "33 heads",
        "32 heads",
        "512 dims",
        "float16",
        "cache of rows",
        "pages",
        "rows of 512",
        "FP8 rows",
        "two streams",
        "lists",
        "members",
        "max_logits",
    ],
)
def test_calls_that_have_fp8_products(case, taken, on_hopper):
    assert has_fp8_products(case) == taken


def permitting_decode(**options):
    options = {"format": FP8_DS_MLA, "num_heads": 80, **options}
    return sparse_decode_case(Draw(0), **options) | {"precision": "fp8", "num_splits": 1}


@pytest.mark.parametrize(
    ("case", "taken"),
    [
        (permitting_decode(), True),
        (permitting_decode() | {"precision": "bf16"}, False),
        (permitting_decode() | {"num_splits": 2}, False),
        (permitting_decode() | {"num_splits": None}, False),
        (permitting_decode(batch=40, query_len=2, num_heads=128) | {"num_splits": None}, True),
        (permitting_decode(num_heads=65), True),
        (permitting_decode(num_heads=64), False),
        (permitting_decode(format=FP8_584), False),
        (permitting_decode(format=BF16_576), False),
        (permitting_decode(dtype=torch.float16), False),
        (permitting_decode(extra=(FP8_DS_MLA, 50, 16, 2)), False),
    ],
    ids=[
        "cache",
        "bf16",
        "two splits",
        "few requests",
        "many requests",
        "65 heads",
        "64 heads",
        "584 bytes",
        "bfloat16 rows",
        "float16",
        "two streams",
    ],
)
def test_decodes_that_have_fp8_products(case, taken, on_hopper, monkeypatch):
    from sparsemla.kernels.attention import schedule

    monkeypatch.setattr(schedule, "num_multiprocessors", lambda device: 132)
    assert has_fp8_products(case) == taken

"""FP8 MMAs of attention: their limits pass what rounding does, and refuse everything else."""

import pytest
import torch

from sparsemla import BF16_512, BF16_576, FP8_DS_MLA, PagedCache, explain, sparse_prefill
from sparsemla.reference.prefill import round_rows
from sparsemla_lab.testing import compare
from sparsemla_lab.testing.cases import Draw, sparse_prefill_case
from sparsemla_lab.testing.compare import (
    FP8_MMA,
    SPARSE_PREFILL_LSE,
    SPARSE_PREFILL_OUT,
    assert_result,
    kernel_of,
    run_reference,
    sizes_of,
    tolerances_of,
)
from sparsemla_lab.testing.fp8_mma import e4m3, multiplied
from sparsemla_lab.verify.matrix import MATRIX

CASES = {
    case.name.removeprefix("FP8 MMA, "): case
    for case in MATRIX["sparse_prefill"]
    if case.name.startswith("FP8 MMA, ") and not case.large
}
ALIKE = {"cache", "512 dims", "float16"}
"""Cases that :func:`multiplied` does not emulate; no kernel has FP8 MMAs for them."""
TELLING = {"few valid indices", "rows of many sizes", "one key"}
"""Cases that refuse most wrong roundings."""
EMULATED = sorted({*CASES} - ALIKE)


def e5m2(x):
    return x.to(torch.float8_e5m2).float()


@pytest.fixture
def hopper(monkeypatch):
    """The limits of the kernel with FP8 MMAs for every call."""
    monkeypatch.setattr(compare, "kernel_of", lambda op, arguments: FP8_MMA)


def check(results, arguments):
    op = "sparse_prefill"
    expected = run_reference(op, arguments)
    sizes, limits = sizes_of(op, arguments), tolerances_of(op, arguments)
    for index, (name, result) in enumerate(zip(("out", "lse"), results, strict=True)):
        assert_result(name, result, expected[index], limits[index], sizes[index])


@pytest.mark.parametrize("name", EMULATED)
@pytest.mark.parametrize("largest", [8.0, 256.0])
def test_roundings_are_within_the_limits(name, largest, hopper):
    arguments = CASES[name].build(Draw(2))
    check(multiplied(arguments, largest=largest), arguments)


def without_sink(arguments):
    return arguments | {"attn_sink": None}


def one_key_more(arguments):
    return arguments | {"topk_lengths": arguments["topk_lengths"] + 1}


def larger_scale(arguments):
    return arguments | {"softmax_scale": arguments["softmax_scale"] * 1.01}


def doubled_rows(arguments):
    """Every fifth row counts twice."""
    kv = arguments["kv"].clone()
    kv[::5, :512] *= 2
    return arguments | {"kv": kv}


def another_head(arguments):
    return arguments | {"q": arguments["q"].roll(1, -2)}


@pytest.mark.parametrize(
    "change", [without_sink, one_key_more, larger_scale, doubled_rows, another_head]
)
def test_other_arguments_are_beyond_the_limits(change, hopper):
    arguments = CASES["128 heads"].build(Draw(2))
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
"""Wrong ones."""


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("seed", range(2))
def test_other_roundings_are_beyond_the_limits(rounding, seed, hopper):
    """Some case refuses them, in every draw: with few keys, or rows of many sizes, as a rule."""

    def refuses(name):
        arguments = CASES[name].build(Draw(seed))
        try:
            check(multiplied(arguments, **ROUNDINGS[rounding]), arguments)
        except AssertionError:
            return True
        return False

    assert any(map(refuses, sorted(EMULATED, key=lambda name: name not in TELLING)))


def permitting(**options):
    options = {"num_heads": 64, **options}
    return sparse_prefill_case(Draw(0), **options) | {"allow_fp8_mma": True}


def test_other_kernels_have_the_tolerances_of_the_op():
    case = permitting()
    assert kernel_of("sparse_prefill", case) != FP8_MMA
    assert tolerances_of("sparse_prefill", case) == (
        SPARSE_PREFILL_OUT,
        SPARSE_PREFILL_LSE,
        compare.TOLERANCES["sparse_prefill"][2],
    )


def pages(fmt, page_size):
    return PagedCache.allocate(fmt, 4, page_size)


def extra_stream():
    return {
        "extra_cache": pages(BF16_576, 1),
        "extra_topk_indices": torch.zeros(5, 2, dtype=torch.int32),
    }


@pytest.mark.parametrize(
    ("case", "taken"),
    [
        (permitting(), True),
        (permitting() | {"allow_fp8_mma": False}, False),
        (permitting(num_heads=33), True),
        (permitting(num_heads=32), False),
        (permitting(head_dim=512), False),
        (permitting(dtype=torch.float16), False),
        (permitting() | {"kv": pages(BF16_576, 1)}, True),
        (permitting() | {"kv": pages(BF16_576, 64)}, False),
        (permitting(head_dim=512) | {"kv": pages(BF16_512, 1)}, False),
        (permitting() | {"kv": pages(FP8_DS_MLA, 1)}, False),
        (permitting() | extra_stream(), False),
        (permitting(num_tokens=1) | {"list_tokens": 2}, False),
        (permitting() | {"token_mask": torch.zeros(5, 128, dtype=torch.uint8)}, False),
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
        "token_mask",
        "max_logits",
    ],
)
def test_calls_that_get_fp8_mma(case, taken):
    chosen = explain(sparse_prefill, **case, gpu="sm_90").kernels["sparse_prefill"]
    assert (chosen == FP8_MMA) == taken

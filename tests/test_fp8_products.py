"""Decode with FP8 products: its limits pass what rounding does, and refuse everything else."""

import copy
import math
from dataclasses import replace

import pytest
import torch

from sparsemla import BF16_576, FP8_584, FP8_DS_MLA, dispatch
from sparsemla.reference.attention import apply_sink
from sparsemla.reference.decode import round_queries
from sparsemla.testing import compare
from sparsemla.testing.cases import Draw, sparse_decode_case
from sparsemla.testing.compare import (
    DECODE_LSE,
    SPARSE_DECODE_OUT,
    assert_result,
    has_fp8_products,
    run_reference,
    sizes_of,
    tolerances_of,
)
from sparsemla.verify.matrix import MATRIX

CASES = {
    case.name.removeprefix("FP8 products, "): case
    for case in MATRIX["sparse_decode"]
    if case.name.startswith("FP8 products, ") and not case.large
}


def e4m3(x):
    return x.to(torch.float8_e4m3fn).float()


def e5m2(x):
    return x.to(torch.float8_e5m2).float()


def multiplied(arguments, *, largest=1.0, queries=round_queries, rounded=e4m3, own_lse=False):
    """What a kernel with FP8 products computes, but for the accuracy of its sums.

    Args:
        arguments: a call's.
        largest: the code of the largest weight of a row, or up to half of it.
        queries: rounds queries.
        rounded: rounds weights.
        own_lse: whether the LSE is that of the rounded weights.
    """
    q, cache = queries(arguments["q"]), arguments["cache"]
    if "q_rope" in arguments:
        q = torch.cat([q, arguments["q_rope"].float()], dim=-1)
    shape = q.shape[:2]
    q, slots = q.flatten(0, 1), arguments["topk_indices"].flatten(0, 1)
    valid = (slots >= 0) & (slots < cache.num_slots)
    if (lengths := arguments["topk_lengths"]) is not None:
        lengths = lengths if lengths.dim() > 1 else lengths[:, None].expand(shape)
        valid &= torch.arange(slots.shape[1]) < lengths.flatten()[:, None]
    keys = cache.read(slots.where(valid, 0)).float().where(valid[..., None], 0)
    logits = torch.einsum("rhd,rkd->rhk", q, keys) * arguments["softmax_scale"]
    logits = logits.masked_fill(~valid[:, None], -math.inf)
    top = logits.amax(-1, keepdim=True).nan_to_num(neginf=0)
    weights = (logits - top).exp()
    total, parts = weights.sum(-1), []
    for block in range(4):  # the scale of a key's block is a factor of its weight
        values = keys[..., 128 * block : 128 * (block + 1)]
        scales = (values.abs().amax(-1) / 448).clamp_min(2**-99).log2().ceil().exp2()
        scaled = weights * scales[:, None]
        unit = (scaled.amax(-1, keepdim=True).clamp_min(2**-99)).log2().ceil().exp2() / largest
        codes = rounded(scaled / unit) * unit
        if own_lse:
            total = (codes / scales[:, None]).sum(-1)
        parts.append(torch.einsum("rhk,rkd->rhd", codes, values / scales[..., None]))
    lse = top[..., 0] + total.log()
    out = torch.cat(parts, -1) / total.clamp_min(2**-99)[..., None]
    out = apply_sink(out, lse, arguments["attn_sink"]).bfloat16()
    return out.unflatten(0, shape), lse.unflatten(0, shape)


@pytest.fixture
def hopper(monkeypatch):
    """The limits of a kernel with FP8 products for every call that permits them."""
    monkeypatch.setattr(
        compare, "has_fp8_products", lambda arguments: arguments["precision"] == "fp8"
    )


def check(results, arguments):
    expected = run_reference("sparse_decode", arguments)
    sizes = sizes_of("sparse_decode", arguments)
    limits = tolerances_of("sparse_decode", arguments)
    for index, (name, result) in enumerate(zip(("out", "lse"), results, strict=True)):
        assert_result(name, result, expected[index], limits[index], sizes[index])


@pytest.mark.parametrize("name", sorted({*CASES} - {"extra stream", "64 heads", "128 heads"}))
def test_roundings_are_within_the_limits(name, hopper):
    arguments = CASES[name].build(Draw(2))
    largest = 256.0 if name == "lengths of each token" else 8.0
    check(multiplied(arguments, largest=largest), arguments)


def without_sink(arguments):
    return arguments | {"attn_sink": None}


def one_key_more(arguments):
    return arguments | {"topk_lengths": arguments["topk_lengths"] + 1}


def larger_scale(arguments):
    return arguments | {"softmax_scale": arguments["softmax_scale"] * 1.01}


def doubled_keys(arguments):
    """One scale of each row is doubled."""
    cache = copy.deepcopy(arguments["cache"])
    cache.fields().scales[..., 2] *= 2
    return arguments | {"cache": cache}


def another_head(arguments):
    return arguments | {"q": arguments["q"].roll(1, 2)}


def rounded_rope(q):
    return round_queries(round_queries(q).flip(-1), 64).flip(-1)


def saturated(q):
    """Scales half as large as need be."""
    scale = (q[..., :512].float().abs().amax(-1, keepdim=True) / 896).log2().ceil().exp2()
    codes = e4m3((q[..., :512] / scale).clamp(-448, 448))
    return torch.cat([codes * scale, q[..., 512:].float()], -1)


@pytest.mark.parametrize(
    "change", [without_sink, one_key_more, larger_scale, doubled_keys, another_head]
)
def test_other_arguments_are_beyond_the_limits(change, hopper):
    arguments = CASES["lengths of each token"].build(Draw(2))
    with pytest.raises(AssertionError):
        check(multiplied(change(arguments)), arguments)


@pytest.mark.parametrize(
    "options",
    [
        {"queries": lambda q: q.float()},
        {"queries": saturated},
        {"own_lse": True},
        {"rounded": e5m2},
        {"rounded": lambda weights: e4m3(weights) * 1.04},
        {"rounded": lambda weights: e4m3(weights * 0.9) * 1.04},
    ],
    ids=["queries", "saturated", "lse", "e5m2", "larger", "both"],
)
def test_other_roundings_are_beyond_the_limits(options, hopper):
    arguments = CASES["lengths of each token"].build(Draw(2))
    with pytest.raises(AssertionError):
        check(multiplied(arguments, **options), arguments)


def test_rounded_rope_dims_are_beyond_the_limits(hopper):
    arguments = CASES["one key"].build(Draw(2))
    with pytest.raises(AssertionError, match="lse"):
        check(multiplied(arguments, queries=rounded_rope), arguments)


@pytest.fixture
def launchers(monkeypatch):
    """Dispatch as on a Hopper GPU, and a kernel with FP8 products for 64 rows of a group."""
    pytest.importorskip("triton")
    from sparsemla.kernels.attention.sm90 import decode

    original = dispatch._problem

    def problem(*given, **options):
        return replace(original(*given, **options), device="cuda", capability=(9, 0))

    def launcher(cache, num_heads, extra, precision):
        asked.append((cache.format, num_heads, extra is not None))
        return precision if num_heads > 32 else None

    asked = []
    monkeypatch.setattr(dispatch, "problem_of", problem)
    monkeypatch.setattr(decode, "launcher", launcher)
    return asked


def test_only_hopper_has_fp8_products():
    case = sparse_decode_case(Draw(0), format=FP8_DS_MLA, num_heads=64)
    assert not has_fp8_products(case)
    assert not has_fp8_products(case | {"precision": "fp8"})
    tolerances = tolerances_of("sparse_decode", case | {"precision": "fp8"})
    assert tolerances == (SPARSE_DECODE_OUT, DECODE_LSE)


def test_the_kernel_that_is_launched_decides(launchers, monkeypatch):
    from sparsemla.kernels.attention import schedule

    permit = {"precision": "fp8"}
    case = sparse_decode_case(Draw(0), format=FP8_DS_MLA, num_heads=64)
    assert not has_fp8_products(case)
    assert not launchers
    assert has_fp8_products(case | permit)
    assert launchers == [(FP8_DS_MLA, 64, False)] * 2
    few = sparse_decode_case(Draw(0), format=FP8_584, num_heads=32, extra=(FP8_584, 50, 16, 2))
    assert not has_fp8_products(few | permit)
    assert launchers[2:] == [(FP8_584, 32, True)] * 2
    # A few requests go to tiles of 16 heads, unless the caller chooses their splits.
    monkeypatch.setattr(schedule, "num_multiprocessors", lambda device: 132)
    wide = sparse_decode_case(Draw(0), format=FP8_DS_MLA, num_heads=128, batch=1, topk=600)
    assert not has_fp8_products(wide | permit)
    assert has_fp8_products(wide | permit | {"num_splits": 2})
    assert [heads for _, heads, _ in launchers[4:]] == [16, 16, 128, 128]
    # Portable kernels take float32.
    floats = sparse_decode_case(Draw(0), format=BF16_576, num_heads=64, dtype=torch.float32)
    assert not has_fp8_products(floats | permit)

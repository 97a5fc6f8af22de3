"""The problems that the Hopper kernels accept, and their reasons to refuse others."""

import dataclasses

import pytest
import torch

from sparsemla import (
    BF16_512,
    BF16_576,
    FP4_288,
    FP8_584,
    FP8_DS_MLA,
    PagedCache,
    dispatch,
    e4m3_format,
    prefill_workspace_rows,
)
from sparsemla.dispatch import Problem, explain
from sparsemla.formats import bf16_format
from sparsemla.kernels.common.registry import DecodeWork
from sparsemla.ops._library import aligned

HOPPER = Problem("sparse_decode", "cuda", (9, 0), cache_format=FP8_DS_MLA.name, num_heads=20)


@pytest.mark.parametrize("op", ["sparse_prefill", "sparse_decode", "dense_decode"])
@pytest.mark.parametrize(
    "fmt", [BF16_576, FP8_DS_MLA, FP8_584, e4m3_format(scale_block=64)], ids=lambda f: f.name
)
def test_hopper_takes(op, fmt):
    assert explain(dataclasses.replace(HOPPER, op=op, cache_format=fmt.name)).chosen == "sm90"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capability": (10, 0)}, "needs a Hopper GPU (sm_90), got (10, 0)"),
        ({"dtype": torch.float16}, "needs bfloat16 queries, got torch.float16"),
        ({"aligned": False}, "multiples of 16 bytes"),
        ({"cache_format": bf16_format(192, 128).name}, "512 of value, got bf16_192v128"),
        ({"cache_format": e4m3_format(scale_block=32).name}, "scales of 64 or 128 dims"),
        ({"cache_format": FP4_288.name}, "scales of 64 or 128 dims, or of a row, got fp4_288"),
        ({"extra_format": BF16_576.name}, "an extra cache of format fp8_ds_mla, got bf16_576v512"),
        (
            {"cache_format": e4m3_format().name, "extra_format": e4m3_format().name},
            "scales in the rows or pages of an extra cache",
        ),
    ],
    ids=["GPU", "dtype", "alignment", "dims", "scales", "fp4", "other format", "separate scales"],
)
def test_hopper_refuses(change, reason):
    explained = explain(dataclasses.replace(HOPPER, **change))
    assert explained.chosen == "triton"
    assert reason in dict(explained.refusals)["sm90"]


@pytest.mark.parametrize("op", dispatch.OPS)
def test_gpus_before_sm_80_get_the_definition(op):
    explained = explain(Problem(op, "cuda", (7, 5)))
    assert explained.chosen == "reference"
    assert dict(explained.refusals)["triton"] == "needs a GPU from sm_80 on, got (7, 5)"
    assert explain(Problem(op, "cuda", (8, 0))).chosen == "triton"


@pytest.mark.parametrize("op", ["sparse_decode", "dense_decode"])
def test_tiers_without_splits_have_one_split(op):
    cache = PagedCache.allocate(FP8_DS_MLA, num_pages=1, page_size=64)
    q = torch.empty(2, 1, 3, 576, dtype=torch.bfloat16)
    assert dispatch.schedule(op, q, cache, 2048, 4, None) == (1,)
    reference = dispatch.OPS[op].kernel("reference")
    assert reference.schedule(DecodeWork.of(q, cache.format, 2048, 132), 4) == (1,)


def test_load_refuses_a_tier_without_the_op():
    with pytest.raises(ValueError, match="tier must be one of triton, cpu, reference for to_slots"):
        dispatch.load("to_slots", "sm90")


def workspace_rows(monkeypatch, query_lens, seq_lens, num_heads=128, fmt=FP8_DS_MLA, **options):
    problem = dataclasses.replace(
        HOPPER, op="sparse_prefill", cache_format=fmt.name, num_heads=num_heads
    )
    monkeypatch.setattr(dispatch, "problem_of", lambda *args, **kwargs: problem)
    return prefill_workspace_rows(
        query_lens, seq_lens, cache_format=fmt, num_heads=num_heads, topk=2048, **options
    )


def test_long_chunks_are_converted_first(monkeypatch):
    assert workspace_rows(monkeypatch, [4096], [32768]) == 32768
    assert workspace_rows(monkeypatch, [64], [131072]) is None
    assert workspace_rows(monkeypatch, [64, 448], [1000, 130000]) == 131000
    # Fewer heads do less with a row; short requests select fewer keys than topk.
    assert workspace_rows(monkeypatch, [256], [131072], num_heads=16) is None
    assert workspace_rows(monkeypatch, [8], [8000]) == 8000
    assert workspace_rows(monkeypatch, [8], [400]) is None


def test_conversion_counts_whole_waves_of_tiles(monkeypatch):
    # H200, in place or converted: 90 or 93 us with 64 tokens, 168 or 153 with 80.
    assert workspace_rows(monkeypatch, [64], [32768]) is None
    assert workspace_rows(monkeypatch, [80], [32768]) == 32768
    # 64 heads: 92 or 97 us with 128 tokens, 170 or 155 with 144.
    assert workspace_rows(monkeypatch, [128], [32768], num_heads=64) is None
    assert workspace_rows(monkeypatch, [144], [32768], num_heads=64) == 32768


def test_bfloat16_caches_are_not_converted(monkeypatch):
    assert workspace_rows(monkeypatch, [4096], [32768], fmt=BF16_576) is None
    assert workspace_rows(monkeypatch, [], []) is None
    assert workspace_rows(monkeypatch, [0], [500]) is None


def test_a_workspace_holds_at_least_one_request(monkeypatch):
    lens = [4096] * 4, [32768] * 4
    assert workspace_rows(monkeypatch, *lens) == 131072
    assert workspace_rows(monkeypatch, *lens, max_rows=70000) == 70000
    assert workspace_rows(monkeypatch, *lens, max_rows=1000) == 32768
    with pytest.raises(ValueError, match="one length for each of 1 requests, got 2"):
        workspace_rows(monkeypatch, [1], [1, 2])


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_unmeasured_gpus_read_in_place(capability):
    problem = dataclasses.replace(HOPPER, op="sparse_prefill", capability=capability)
    assert not dispatch.converts_first(problem, 1, 1 << 30, 1)


def test_format_names_are_refused():
    with pytest.raises(TypeError, match="cache_format must be a CacheFormat, got str"):
        prefill_workspace_rows([1], [1], cache_format="fp8_ds_mla", num_heads=8, topk=64)


@pytest.mark.parametrize("op", ["sparse_prefill", "sparse_decode"])
@pytest.mark.parametrize("fmt", [FP8_DS_MLA, FP8_584, BF16_512], ids=lambda f: f.name)
def test_hopper_takes_an_extra_cache(op, fmt):
    problem = dataclasses.replace(HOPPER, op=op, cache_format=fmt.name, extra_format=fmt.name)
    assert explain(problem).chosen == "sm90"


def cache_of(fmt):
    return PagedCache.allocate(fmt, 2, 5)


@pytest.mark.parametrize("fmt", [BF16_576, FP8_DS_MLA, FP8_584], ids=lambda f: f.name)
def test_allocated_caches_are_aligned(fmt):
    assert cache_of(fmt).aligned


def test_misaligned_tensors_are_detected():
    q = torch.empty(2, 8, 576, dtype=torch.bfloat16)
    assert aligned(q, cache_of(FP8_DS_MLA), None)
    assert aligned(torch.empty(2, 8, 584, dtype=torch.bfloat16)[..., :576])
    assert not aligned(torch.empty(2, 8, 577, dtype=torch.bfloat16)[..., :576])
    shifted = PagedCache(torch.empty(2, 5, 660, dtype=torch.uint8)[..., 4:], FP8_DS_MLA)
    assert not aligned(q, cache_of(FP8_DS_MLA), shifted)
    apart = PagedCache(torch.empty(2, 5, 660, dtype=torch.uint8)[..., :656], FP8_DS_MLA)
    assert not apart.aligned


def test_empty_caches_are_not_aligned():
    assert not PagedCache.allocate(FP8_DS_MLA, 0, 5).aligned


def test_the_choice_of_a_kernel_is_logged_once(caplog):
    problem = dataclasses.replace(HOPPER, device="cpu", capability=None, num_heads=12345)
    with caplog.at_level("INFO", logger="sparsemla"):
        dispatch.select(problem)
        dispatch.select(problem)
    assert caplog.messages == [str(explain(problem))]

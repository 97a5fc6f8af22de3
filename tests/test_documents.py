"""docs/documents.md: the names in its tables exist, and its sentences hold.

tests/test_docs.py runs the page's code, and tests/test_examples.py its programs.
"""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path

import pytest
import torch

import sparsemla
from sparsemla import (
    BF16_576,
    FP8_DS_MLA,
    HeadWeight,
    MLALayer,
    PagedCache,
    Plan,
    PlanBuffers,
    PrefillChunk,
    e4m3_format,
    fused_rope_rmsnorm_quant,
    indexer_topk,
    plan_batch,
    sparse_decode,
    sparse_prefill,
    to_slots,
)
from sparsemla.compat import flash_mla
from sparsemla_lab.testing.cases import Draw, branch_case, indexer_topk_case, mla_layer
from sparsemla_lab.testing.compare import SPARSE_PREFILL_OUT, assert_close, assert_equal

PAGE = (Path(__file__).resolve().parent.parent / "docs" / "documents.md").read_text(
    encoding="utf-8"
)
OWNERS = {
    "plan": Plan,
    "Plan": Plan,
    "PrefillChunk": PrefillChunk,
    "layer": MLALayer,
    "cache": PagedCache,
    "PagedCache": PagedCache,
    "HeadWeight": HeadWeight,
    "format": type(BF16_576),
    "compat": sparsemla.compat,
    "indices": torch.Tensor,
}
OURS = re.compile(r"`([A-Za-z_][\w.]*)(?:[(`\[=])")


def names_of_tables() -> set[str]:
    """The names in the last column of each table."""
    rows = [line for line in PAGE.splitlines() if re.match(r"\|.*\|.*\|$", line)]
    return {name for row in rows for name in OURS.findall(row.split(" | ")[-1])} - {"None"}


def known_names() -> set[str]:
    """Public names, and arguments of public functions."""
    known = set(sparsemla.__all__)
    for name in sparsemla.__all__:
        if inspect.isroutine(target := getattr(sparsemla, name)):
            known |= set(inspect.signature(target).parameters)
    for owner in (Plan, PlanBuffers, PrefillChunk, PagedCache, MLALayer):
        known |= {each for each in dir(owner) if not each.startswith("_")}
        known |= set(getattr(owner, "__dataclass_fields__", ()))
    return known


@pytest.mark.parametrize("name", sorted(names_of_tables()))
def test_names_of_the_tables_exist(name):
    first, *rest = name.split(".")
    target = OWNERS.get(first)
    if not rest or target is None:
        assert name in known_names()
        return
    for part in rest:
        fields = getattr(target, "__dataclass_fields__", {})
        assert part in fields or hasattr(target, part)
        # The parts of a plan are plans.
        target = Plan if part in ("decodes", "prefills") else getattr(target, part, None)


def test_names_are_found():
    assert {"plan.clamp_topk", "topk_indices", "HeadWeight.quantize"} <= names_of_tables()


def test_facade_has_what_the_backend_imports():
    for name in ("FlashMLASchedMeta", "flash_mla_with_kvcache", "get_mla_metadata"):
        assert hasattr(flash_mla, name)


@pytest.mark.parametrize("branch", ["decode_branch", "prefill_branch"])
@pytest.mark.parametrize("topk", [None, 16], ids=["dense", "sparse"])
def test_branches_do_not_change_their_queries(branch, topk):
    draw = Draw(0)
    case = branch_case(draw, mla_layer(draw), query_lens=[1, 3], seq_lens=[9, 20], topk=topk)
    before = case["q"].clone()
    getattr(sparsemla, branch)(**case)
    assert_equal("q", case["q"], before)


def rows_of_zeros() -> PagedCache:
    cache = PagedCache.allocate(BF16_576, 1, 8)
    cache.data[0, 1:] = 1
    return cache


def test_an_index_of_minus_one_is_masked_and_not_a_row_of_zeros():
    q = torch.ones(1, 1, 2, 576, dtype=torch.bfloat16)
    masked, lse = sparse_decode(q, rows_of_zeros(), torch.tensor([[[3, -1]]]), softmax_scale=0.0)
    zeros, _ = sparse_decode(q, rows_of_zeros(), torch.tensor([[[3, 0]]]), softmax_scale=0.0)
    assert (masked == 1).all()
    assert (lse == 0).all()
    assert (zeros == 0.5).all()


def test_a_selection_without_a_valid_index_gives_0():
    q = torch.ones(1, 2, 576, dtype=torch.bfloat16)
    out, lse = sparse_prefill(q, rows_of_zeros(), torch.tensor([[-1, 99]]), softmax_scale=1.0)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


def written(format, scale_mode="pow2", size=1000.0):
    """A cache of one row with a large value, which is neither normalised nor rotated."""
    kv = torch.ones(1, 576)
    kv[0, -1] = size
    cache, still = (
        PagedCache.allocate(format, 1, 8),
        torch.cat([torch.ones(1, 32), torch.zeros(1, 32)], 1),
    )
    fused_rope_rmsnorm_quant(
        torch.zeros(1, 1, 64),
        kv,
        still,
        torch.ones(512),
        cache,
        positions=torch.tensor([0]),
        slot_mapping=torch.tensor([0]),
        scale_mode=scale_mode,
    )
    return cache


def test_rows_without_scales_saturate():
    assert written(e4m3_format(576, 512, scale_block=0)).data[0, 0, -1].float() == 448


@pytest.mark.parametrize(("mode", "scale"), [("pow2", 4.0), ("exact", 1000 / 448)])
def test_scales_are_powers_of_two_by_default(mode, scale):
    cache = written(e4m3_format(576, 512, scale_block=64), mode)
    assert cache.scales[0, 0, -1].item() == pytest.approx(scale, rel=1e-6)


def test_selections_of_the_indexer_ascend_and_ties_go_to_the_lower_position():
    case = indexer_topk_case(Draw(1))
    selected = indexer_topk(**case)
    for row in selected.tolist():
        count = len(row) - row.count(-1)
        assert row[:count] == sorted(set(row[:count]))
        assert row[count:] == [-1] * (len(row) - count)
    case["weights"] = torch.zeros_like(case["weights"])  # all scores are equal
    tied = indexer_topk(**case)
    counts = (tied >= 0).sum(1).tolist()
    assert [row[:n] for row, n in zip(tied.tolist(), counts, strict=True)] == [
        list(range(n)) for n in counts
    ]


def test_the_order_of_a_selection_does_not_matter():
    draw = Draw(2)
    q, kv = draw.normal(2, 4, 576).bfloat16(), draw.normal(60, 576).bfloat16()
    indices = torch.stack([draw.permutation(60)[:20] for _ in range(2)])
    out, _ = sparse_prefill(q, kv, indices, softmax_scale=0.1)
    ascending, _ = sparse_prefill(q, kv, indices.sort().values, softmax_scale=0.1)
    assert_close("out", ascending, out.float(), SPARSE_PREFILL_OUT)


def test_a_page_with_a_negative_id_has_no_slots():
    table = torch.tensor([[3, -2]])
    slots = to_slots(torch.tensor([[1, 9]]), table, torch.tensor([0]), page_size=8)
    assert slots.tolist() == [[25, -1]]


def test_chunks_count_requests_from_the_first_of_the_batch():
    table = torch.arange(3)[:, None]
    plan = plan_batch([1, 5, 7], [4, 5, 7], table, page_size=8, workspace_rows=8)
    assert [chunk.requests for chunk in plan.prefill_chunks] == [slice(1, 2), slice(2, 3)]
    assert [chunk.requests.start for chunk in plan.prefills.prefill_chunks] == [0, 1]
    assert plan.prefills.seq_lens.tolist() == [5, 7]


def test_queries_in_two_tensors():
    draw = Draw(3)
    ql_nope, q_pe = draw.normal(2, 4, 512).bfloat16(), draw.normal(2, 4, 64).bfloat16()
    kv, indices = draw.normal(60, 576).bfloat16(), draw.integers(0, 60, 2, 20)
    apart, _ = sparse_prefill(ql_nope, kv, indices, q_rope=q_pe, softmax_scale=0.1)
    joined, _ = sparse_prefill(torch.cat([ql_nope, q_pe], -1), kv, indices, softmax_scale=0.1)
    assert_close("out", apart, joined.float(), SPARSE_PREFILL_OUT)


def test_a_length_of_all_ones_is_refused_by_a_plan():
    length = torch.tensor([2**32 - 1]).to(torch.uint32)
    with pytest.raises(ValueError, match="seq_lens must be at most 8, 1 pages of 8"):
        plan_batch([1], length, torch.tensor([[0]]), page_size=8, workspace_rows=None)


def test_rows_of_656_bytes_may_have_any_scales():
    cache = PagedCache.allocate(FP8_DS_MLA, 1, 8)
    fields = cache.fields()
    fields.fp8.copy_(torch.ones(1).to(torch.float8_e4m3fn))
    fields.scales.fill_(0.3)
    q = torch.zeros(1, 2, 576, dtype=torch.bfloat16)
    out, _ = sparse_prefill(q, cache, torch.tensor([[0, 3]]), softmax_scale=1.0)
    assert_equal("out", out, torch.full_like(out, 0.3))

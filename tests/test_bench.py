"""The benchmark without a GPU: its arithmetic, its gate, its files."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sparsemla import (
    BF16_512,
    BF16_576,
    FP8_584,
    FP8_DS_MLA,
    FP8_NOPE,
    INDEX_FP8,
    PagedCache,
    Pooling,
    e4m3_format,
    ops,
    reference,
)
from sparsemla_lab.bench import command, cpu, peers, report, run, timing, training, workloads
from sparsemla_lab.bench.__main__ import main
from sparsemla_lab.bench.ceilings import Ceilings, measure
from sparsemla_lab.bench.peers import sglang, vllm_python
from sparsemla_lab.bench.peers.base import Unavailable
from sparsemla_lab.bench.peers.sglang import SGLangQ8KV8
from sparsemla_lab.bench.peers.tilelang import largest_bucket
from sparsemla_lab.testing.compare import FP8_MMA, assert_close, rounded

CPU = torch.device("cpu")
CEILINGS = Ceilings(copy_gbps=4000, bf16_tflops=600, fp8_tflops=1200, launch_us=3)
STAMP = run.Stamp("0123456789ab", "2026-01-02", {"torch": "2.11.0"})
CSA, HCA = Pooling(4, overlap=True), Pooling(128)

SMALL = [
    workloads.SparsePrefill(5, 300, 4, 576, 128),
    workloads.SparsePrefill(70, 300, 2, 512, 128, "overlapping"),
    workloads.SparseDecode(3, 2, 4, 200, 128),
    workloads.SparseDecode(3, 2, 4, 200, 128, "overlapping"),
    workloads.CachedPrefill(5, 300, 4, 128),
    workloads.CachedPrefill(5, 300, 4, 128, e4m3_format()),
    workloads.SparseDecode(3, 2, 4, 200, 128, format=BF16_576),
    workloads.SparseDecode(3, 2, 4, 200, 128, format=e4m3_format()),
    workloads.WindowedDecode(3, 1, 4, 128, 128, extra_context=200, extra_topk=64),
    workloads.WindowedPrefill(3, 64, 200, 128),
    workloads.SparseBackward(40, 40, 16, 576, 32),
    training.TrainingAttention(40, 2, 16),
    training.TrainingAttention(70, 2, 16, indexer=1),
    workloads.PermittedPrefill(5, 300, 4, 576, 128),
    workloads.SharedPrefill(5, 300, 16, 576, 128, "overlapping"),
    workloads.SharedPrefill(9, 300, 8, 512, 128, list_tokens=8),
    workloads.AttentionTarget(5, 300, 4, 576, 128),
    workloads.SelectedScores(5, 300, 128),
    workloads.SelectedScoresBackward(5, 300, 128, "overlapping"),
    workloads.DenseIndexLoss(20, 2),
    workloads.DenseIndexGradients(20, 2),
    workloads.DenseDecode(3, 2, 4, 130),
    workloads.DenseDecode(3, 2, 4, 130, FP8_DS_MLA),
    workloads.IndexerScores(9, 40),
    workloads.IndexerScoresPaged(3, 2, 70),
    workloads.IndexerTopk(2, 3, 70, 16),
    workloads.IndexerTopk(2, 3, 70, 8, ratio=4),
    workloads.SparseDecode(3, 1, 4, 200, 128, format=FP8_NOPE),
    workloads.IndexerTopk(2, 1, 300, 8, ratio=16, heads=16),
    workloads.IndexerTopkBlocks(2, 3, 70, 16, heads=32, topk_blocks=4),
    workloads.IndexerTopkOfBlocks(2, 3, 130, 16, heads=32, num_blocks=4),
    workloads.IndexerTopkOfBlocks(1, 1, 20, 16, num_blocks=4),
    workloads.HeadProducts(3, 2, 200, 130, 2),
    workloads.ProjectGroups(3, 2, 2),
    workloads.PoolWindows(5, 1, CSA, FP8_584, "spread"),
    workloads.PoolWindows(1, 12, CSA, INDEX_FP8),
    workloads.PoolWindows(2, 1, HCA, FP8_584, "aligned"),
    workloads.SelectTopk(5, 300, 32),
    workloads.CacheWrite(20, 2),
    workloads.CacheWrite(20, 2, BF16_576),
    workloads.QueryNormWrite(20, 2),
    workloads.IndexWrite(20, 3),
    workloads.Gather(3, 70),
]


@pytest.fixture(scope="module")
def timer():
    return timing.Timer(CPU, budget_ms=0.001)


def row(**changes):
    first = report.Row(
        op="select_topk",
        case="batch 8, context 1024, topk 64",
        selection="",
        shape={"batch": 8, "context": 1024, "topk": 64},
        ours_us=10.0,
        ours_spread_us=(9.5, 11.0),
        ours_timed="graph",
        tflops=0.0,
        gbps=3.3,
        floor_us=2.5,
        percent_of_floor=25.0,
        peer="torch.topk",
        peer_us=20.0,
        peer_spread_us=(19.0, 21.0),
        peer_timed="launch",
        ratio=2.0,
        note="",
        commit=STAMP.commit,
        date=STAMP.date,
        versions=STAMP.versions,
    )
    return replace(first, **changes)


class Wrong(peers.Torch):
    """A peer with one wrong key."""

    def prepare(self, workload, inputs):
        def select():
            ids = inputs["scores"].topk(inputs["topk"] + 1).indices
            return (ids[:, 1:].contiguous(),)

        side = workload.ours(inputs)
        return [workloads.Side("wrong", select, side.check)]


class Broken(peers.Torch):
    """A peer that does not run."""

    def prepare(self, workload, inputs):
        raise RuntimeError("no kernel image\nand more")


def test_work_of_a_sparse_prefill():
    workload = workloads.SparsePrefill(4096, 32768, 128, 576, 2048)
    assert workload.flop == 2 * 4096 * 128 * 2048 * 1088 == 2336462209024
    small = workloads.SparsePrefill(2, 64, 4, 576, 64)
    # All 64 rows of 1152 bytes once; per token 4 heads of (576 + 512) bfloat16 and an lse, 64 ids.
    expected = 64 * 1152 + 2 * (4 * 1088 * 2 + 4 * 4 + 64 * 4)
    assert small.unique_bytes(small.build(CPU)) == expected == 91680


def test_work_of_a_sparse_backward():
    workload = workloads.SparseBackward(4096, 8192, 128, 576, 2048)
    assert workload.flop == 2 * 4096 * 128 * 2048 * (3 * 576 + 2 * 512)
    causal = workloads.SparseBackward(20, 20, 2, 576, 8)
    assert causal.flop == 2 * (1 + 2 + 3 + 4 + 5 + 6 + 7 + 13 * 8) * 2 * (3 * 576 + 2 * 512)
    inputs = causal.build(CPU)
    dq, dkv = causal.run(inputs)
    causal.check(inputs, (dq, dkv))
    with pytest.raises(AssertionError, match="dkv"):
        causal.check(inputs, (dq, dkv.roll(1, 0)))


def test_gradients_of_shared_lists_are_those_of_own_lists():
    workload = workloads.SharedBackward(18, 90, 3, 576, 24, "overlapping", 4)
    assert workload.flop == workload.by_token.flop
    inputs = workload.build(CPU)
    results = workload.run(inputs)
    workload.check(inputs, results)
    workload.check(inputs, workload.by_token.run(inputs))
    with pytest.raises(AssertionError, match="dkv"):
        workload.check(inputs, (results[0], results[1].roll(1, 0)))


def test_work_of_the_indexers_losses():
    workload = workloads.AttentionTarget(4096, 8192, 128, 576, 2048)
    assert workload.flop == 2 * 4096 * 128 * 2048 * 576
    small = workloads.AttentionTarget(2, 64, 4, 576, 64)
    # All 64 rows once; per token 4 heads and their lse, 64 ids and as many results.
    assert small.unique_bytes(small.build(CPU)) == 64 * 1152 + 2 * (4 * 1152 + 4 * 4 + 2 * 64 * 4)
    scores = workloads.SelectedScores(4096, 8192, 2048)
    assert scores.flop == 2 * 4096 * 64 * 2048 * 128
    assert workloads.SelectedScoresBackward(4096, 8192, 2048).flop == 3 * scores.flop
    small = workloads.SelectedScores(2, 64, 64)
    read = 64 * 256 + 2 * (64 * 256 + 64 * 4 + 64 * 4)
    assert small.unique_bytes(small.build(CPU)) == read + 2 * 64 * 4
    small = workloads.SelectedScoresBackward(2, 64, 64)
    # dscores come in; gradients of queries, weights and all rows go out.
    written = 64 * 256 + 2 * (64 * 256 + 64 * 4)
    assert small.unique_bytes(small.build(CPU)) == read + 2 * 64 * 4 + written
    pairs = 4096 * 4097 // 2
    loss, gradients = (
        kind(4096, 128) for kind in (workloads.DenseIndexLoss, workloads.DenseIndexGradients)
    )
    assert loss.flop == 2 * pairs * (128 * 192 + 64 * 128)
    assert gradients.flop == loss.flop + 2 * pairs * 2 * 64 * 128
    small = workloads.DenseIndexLoss(3, 2), workloads.DenseIndexGradients(3, 2)
    inputs = small[0].build(CPU)
    assert inputs["row_ends"].tolist() == [1, 2, 3]
    read = 3 * (2 * 2 * 2 * 192 + 2 * 4 + 64 * 256 + 64 * 4 + 256 + 2 * 4)
    assert small[0].unique_bytes(inputs) == read
    assert small[1].unique_bytes(inputs) == read + 3 * (64 * 256 + 64 * 4 + 256)


@pytest.mark.parametrize("index", range(3))
@pytest.mark.parametrize(
    "workload", [workloads.SelectedScoresBackward(40, 64, 16), workloads.DenseIndexGradients(40, 2)]
)
def test_gradients_of_every_token_are_checked(workload, index, monkeypatch):
    """With the definition applied to a few tokens at a time; one row in the place of another."""
    monkeypatch.setattr(type(workload), "at_once", 16, raising=False)
    inputs = workload.build(CPU)
    *rest, dindex_q, dweights, dindex_k = workload.run(inputs)
    gradients = [dindex_q, dweights, dindex_k]
    workload.check(inputs, (*rest, *gradients))
    gradients[index][-1] = gradients[index][-2]
    name = ("dindex_q", "dweights", "dindex_k")[index]
    with pytest.raises(AssertionError, match=name):
        workload.check(inputs, (*rest, *gradients))


def test_work_of_a_sparse_decode():
    workload = workloads.SparseDecode(128, 2, 64, 32768, 2048)
    assert workload.flop == 2 * 128 * 2 * 64 * 2048 * 1088 == 73014444032
    small = workloads.SparseDecode(3, 2, 4, 64, 64)
    # Both tokens of a request select the same 64 rows of 656 bytes.
    expected = 3 * 64 * 656 + 6 * (4 * 1088 * 2 + 4 * 4 + 64 * 4)
    assert small.unique_bytes(small.build(CPU)) == expected == 179808


def test_fp8_mma_has_a_gate_of_its_own(monkeypatch):
    workload = workloads.PermittedPrefill(3, 300, 40, 576, 128)
    inputs = workload.build(CPU)
    inputs["softmax_scale"] *= 256  # logits for which roundings matter
    assert (workload.ours(inputs).note, workload.unit) == ("bfloat16 MMA", "fp8")
    expected = workload.with_bf16(inputs)
    workload.ours(inputs).check(expected)
    for got, wanted in zip(workload.run(inputs), expected, strict=True):
        assert torch.equal(got, wanted)
    asked = []
    monkeypatch.setattr(workloads, "kernel_of", lambda *call: asked.append(call) or FP8_MMA)
    ours = workload.ours(inputs)
    assert [(op, case["allow_fp8_mma"]) for op, case in asked] == [("sparse_prefill", True)]
    out, lse = reference.sparse_prefill(**rounded(inputs))[:2]
    ours.check((out, lse))
    with pytest.raises(AssertionError, match="lse"):
        ours.check((out, expected[1]))
    with pytest.raises(AssertionError, match="out"):
        workload.check(inputs, (out, lse))
    with pytest.raises(AssertionError, match="out"):
        ours.check((out.roll(1, 0), lse))
    given = []
    monkeypatch.setattr(
        ops, "sparse_prefill", lambda **case: given.append(case.get("allow_fp8_mma"))
    )
    ours.run()
    workload.with_bf16(inputs)
    assert given == [True, None]


def test_q8kv8_takes_prefills_that_permit_fp8_mma(monkeypatch):
    with pytest.raises(Unavailable, match=r"libq8kv8\.so"):
        SGLangQ8KV8([])
    peer = object.__new__(SGLangQ8KV8)
    assert peer.supports(workloads.SparsePrefill(3, 300, 64, 576, 128)) == "has FP8 MMAs only"
    assert "64 heads" in peer.supports(workloads.PermittedPrefill(3, 300, 96, 576, 128))
    workload = workloads.PermittedPrefill(3, 300, 64, 576, 128)
    assert peer.supports(workload) is None
    calls = []
    peer.prefill = lambda *given: calls.append(given) or len(calls) - 1
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=7))
    inputs = workload.build(CPU)
    (side,) = peer.prepare(workload, inputs)
    out, lse = side.run()
    assert calls[0][8:] == (3, 300 + 128, 64, 128, inputs["softmax_scale"], 7)
    assert (out.shape, lse.shape) == ((3, 64, 512), (3, 64))
    with pytest.raises(RuntimeError, match="returned 1"):
        side.run()
    expected, _, _ = reference.sparse_prefill(**inputs)
    side.check((expected * 1.05,))
    with pytest.raises(AssertionError, match=r"relative error 0\.07"):
        side.check((expected * 1.07,))
    with pytest.raises(AssertionError, match="relative error nan"):
        side.check((expected * math.nan,))


def test_work_of_causal_indexer_scores():
    workload = workloads.IndexerScores(4096, 8192)
    pairs = sum(range(8192 - 4096 + 1, 8192 + 1))
    assert workload.flop == 2 * pairs * 64 * 128
    inputs = workloads.IndexerScores(3, 10).build(CPU)
    assert inputs["row_ends"].tolist() == [8, 9, 10]


def test_work_of_products():
    workload = workloads.HeadProducts(3, 2, 200, 130, 4)
    assert workload.flop == 4 * 2 * 3 * 2 * 200 * 130
    assert workload.unique_bytes(workload.build(CPU)) == 2 * (
        4 * 200 * 130 + 2 * 3 * (200 + 4 * 130)
    )


def test_work_of_pooled_keys():
    workload = workloads.IndexerTopk(2, 5, 70, 16, ratio=4)
    # Of 70 tokens, positions 65 to 69 see 16, 16, 17, 17 and 17 keys.
    assert workload.flop == 2 * 2 * (2 * 16 + 3 * 17) * 64 * 128
    assert workload.build(CPU)["cache"].num_slots == 2 * 64
    assert workloads.IndexerTopk(1, 3, 10, 2).flop == 2 * (8 + 9 + 10) * 64 * 128


def test_work_of_listed_blocks():
    workload = workloads.IndexerTopkOfBlocks(2, 1, 1000, 16, heads=32, num_blocks=4)
    assert workload.flop == 2 * 2 * 4 * 8 * 32 * 128
    inputs = workload.build(CPU)
    assert (inputs["blocks"][:, -1] == 124).all()
    # Two tokens with 4 blocks of 8 keys of 132 bytes, 32 heads, 16 ids and 4 blocks each.
    per_token = 4 * 8 * 132 + 32 * 132 + 4 * 16 + 4 * 4
    assert workload.unique_bytes(inputs) == 2 * per_token
    whole = workloads.IndexerTopkOfBlocks(1, 1, 20, 16, heads=32, num_blocks=4)
    assert whole.build(CPU)["blocks"].tolist() == [[0, 1, 2, -1]]
    assert whole.flop == 2 * 20 * 32 * 128


def test_work_of_pooled_windows():
    decode = workloads.PoolWindows(5, 1, CSA, FP8_584, "spread")
    # Values and gates of 1024 float32 come in and are kept, 4 rows of biases; at the position 8195
    # a window closes with 512 dims of 7 earlier rows, a row of the table and an entry.
    rows, earlier = 2 * 5 * 8192 + 4 * 4096, 7 * 4096
    assert decode.unique_bytes(decode.build(CPU)) == rows + earlier + 256 + 584 + 5 * 20
    prefill = workloads.PoolWindows(1, 300, HCA, FP8_584)
    rows = (300 + 128) * 4096 + 128 * 2048
    assert prefill.unique_bytes(prefill.build(CPU)) == rows + 2 * (256 + 584) + 300 * 20


def test_every_case_is_named_once_and_measures_an_op():
    cases = [(each.op, each.case, each.label) for each in workloads.all_workloads()]
    assert len(set(cases)) == len(cases)
    assert {"random", "overlapping"} < {label for _, _, label in cases}
    for op in {op for op, _, _ in cases}:
        assert all(each.op == op for each in run.select_workloads(op))
    with pytest.raises(ValueError, match="op must be one of sparse_prefill"):
        run.select_workloads("attention")
    found = run.select_workloads(None, case="^sparse.*batch 1,.*fp8_584")
    assert {(each.op, each.batch) for each in found} == {("sparse_decode", 1)}
    with pytest.raises(ValueError, match="case must match a workload, such as 'batch 1"):
        run.select_workloads("select_topk", case="fp8_584")
    with pytest.raises(ValueError, match=r"case must be a regular expression, got '\(': missing"):
        run.select_workloads(None, case="(")


def test_overlapping_selections_are_distinct_ascending_and_shared():
    draw = torch.Generator().manual_seed(0)
    ids = workloads._select(draw, 70, 300, 128, "overlapping")
    assert ids.dtype == torch.int32
    assert bool((ids.diff() > 0).all())
    shared = len(set(ids[0].tolist()) & set(ids[63].tolist()))
    assert shared >= 128 - 128 // 8
    apart = len(set(ids[0].tolist()) & set(ids[64].tolist()))
    assert apart < shared


@pytest.mark.parametrize("selection", ["random", "overlapping"])
def test_causal_selections_are_distinct_and_complete(selection):
    ids = workloads._select_causal(torch.Generator().manual_seed(0), 140, 32, selection)
    assert ids.dtype == torch.int32
    for token, row in enumerate(ids.tolist()):
        chosen = [entry for entry in row if entry >= 0]
        count = min(token + 1, 32)
        assert len(set(chosen)) == count
        assert max(chosen) <= token
        assert row[count:] == [-1] * (32 - count)
        assert selection == "random" or chosen == sorted(chosen)
    assert int((ids >= 0).sum()) == workloads._causal_entries(140, 32)
    shared = len(set(ids[64].tolist()) & set(ids[127].tolist()))
    assert (shared >= 28) == (selection == "overlapping")


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: f"{w.op}-{w.label}")
def test_each_op_passes_its_gate_and_gets_a_row_without_peers(workload, timer):
    outcome = run.run_one(workload, [], timer, CEILINGS, STAMP)
    assert outcome.failures == outcome.refusals == {}
    (found,) = outcome.rows
    assert (found.peer, found.peer_us, found.ratio) == (None, None, None)
    assert found.ours_us > 0
    assert found.ours_timed == "launch"
    assert found.ours_spread_us[0] <= found.ours_us <= found.ours_spread_us[1]
    assert found.percent_of_floor == pytest.approx(100 * found.floor_us / found.ours_us)
    assert (found.commit, found.date) == (STAMP.commit, STAMP.date)


def test_work_of_a_decode_over_a_window_and_a_second_cache():
    workload = workloads.WindowedDecode(128, 1, 64, 128, 128, extra_context=32768, extra_topk=512)
    assert workload.flop == 2 * 128 * 64 * (128 + 512) * 1024 == 10737418240
    small = workloads.WindowedDecode(3, 1, 4, 64, 64, extra_context=128, extra_topk=128)
    # All rows of 584 bytes of both caches; per token 4 heads of 512 + 512 and an lse, 192 ids.
    expected = 3 * (64 + 128) * 584 + 3 * (4 * 1024 * 2 + 4 * 4 + 192 * 4)
    assert small.unique_bytes(small.build(CPU)) == expected


@pytest.mark.parametrize(
    ("workload", "name"),
    [
        (workloads.CachedPrefill(5, 300, 4, 128), "sparsemla through a workspace"),
        (workloads.PermittedPrefill(5, 300, 4, 576, 128), "sparsemla bf16 products"),
        (workloads.SharedPrefill(5, 300, 4, 576, 128), "sparsemla by token"),
        (workloads.SharedBackward(5, 300, 4, 576, 128), "sparsemla by token"),
        (workloads.CachedPrefill(5, 300, 4, 128, e4m3_format()), "sparsemla through a workspace"),
        (workloads.WindowedPrefill(3, 4, 200, 128), "sparsemla through a workspace"),
        (workloads.DenseDecode(3, 2, 4, 130, FP8_DS_MLA), "sparsemla bfloat16"),
    ],
)
def test_quantised_prefill_has_a_row_for_the_other_variant(workload, name, timer):
    outcome = run.run_one(workload, [peers.Sparsemla()], timer, CEILINGS, STAMP)
    assert outcome.failures == outcome.refusals == {}
    (found,) = outcome.rows
    assert found.peer == name


def test_a_row_for_each_peer_with_the_ratio(timer):
    outcome = run.run_one(workloads.SelectTopk(5, 300, 32), [peers.Torch()], timer, CEILINGS, STAMP)
    (found,) = outcome.rows
    assert found.peer == "torch.topk"
    assert found.ratio == pytest.approx(found.peer_us / found.ours_us)


def test_wrong_peer_is_not_timed(timer):
    workload = workloads.SelectTopk(5, 300, 32)
    outcome = run.run_one(workload, [Wrong(), Broken(), peers.Torch()], timer, CEILINGS, STAMP)
    assert [found.peer for found in outcome.rows] == ["torch.topk"]
    assert set(outcome.failures) == {"wrong"}
    assert "elements differ" in outcome.failures["wrong"]
    assert set(outcome.refusals) == {"torch"}
    assert "no kernel image" in outcome.refusals["torch"]
    assert "and more" not in outcome.refusals["torch"]


@pytest.mark.parametrize("workload", SMALL, ids=lambda w: f"{w.op}-{w.label}")
def test_no_side_is_timed_if_our_result_is_wrong(workload, timer, monkeypatch):
    right = type(workload).run

    def run_wrongly(self, inputs):
        results = right(self, inputs)
        for result in results:
            run._poison(result[..., :1])
        return results

    monkeypatch.setattr(type(workload), "run", run_wrongly)
    outcome = run.run_one(workload, [peers.Torch()], timer, CEILINGS, STAMP)
    assert outcome.rows == []
    assert set(outcome.failures) == {"sparsemla"}


def test_unwritten_outputs_fail_the_gate(timer):
    kept = torch.zeros(4)
    side = workloads.Side(
        "idle", lambda: (kept,), lambda got: assert_close("x", got[0], torch.zeros(4), LOOSE)
    )
    with pytest.raises(AssertionError, match="NaN"):
        run._gate(side, timer)


LOOSE = workloads.Tolerance(1, 1, 1)


def test_sides_take_turns():
    order = []
    sides = [
        timing.Prepared(lambda name=name: order.append(name) or (), "launch") for name in "abc"
    ]
    timings = timing.Timer(CPU, budget_ms=0.001).interleaved(sides)
    assert [t.how for t in timings] == ["launch"] * 3
    timed = "".join(order[9:])  # the first runs only determine the number of repeats
    assert timed.startswith("abcbcacab")
    assert {timed.count(name) for name in "abc"} == {10}


def test_floors_come_from_measured_ceilings():
    found = measure(timing.Timer(CPU, budget_ms=1), copy_bytes=1 << 16, size=16)
    assert found.copy_gbps > 0
    assert found.bf16_tflops > 0
    assert found.fp8_tflops == 0
    assert CEILINGS.floor_us(6e9, 0, "bf16") == pytest.approx(10)
    assert CEILINGS.floor_us(6e9, 0, "fp8") == pytest.approx(5)
    assert CEILINGS.floor_us(6e9, 8e7, "fp8") == pytest.approx(20)
    # A device without FP8 units computes in bfloat16.
    assert replace(CEILINGS, fp8_tflops=0).floor_us(6e9, 0, "fp8") == pytest.approx(10)


def test_absent_peers_have_a_reason(tmp_path, monkeypatch):
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda name: None)
    found, missing = peers.find_peers(tmp_path)
    assert [peer.name for peer in found] == ["torch", "sparsemla"]
    assert set(missing) == {each.name for each in peers.PEERS}
    assert missing["FlashMLA"] == "flash_mla is not installed"
    (tmp_path / "vllm-1.2.3.dist-info").mkdir()
    (tmp_path / "vllm-1.2.3.dist-info" / "METADATA").write_text("Name: vllm\nVersion: 1.2.3\n")
    assert {"sparsemla", "torch"} <= set(peers.versions())
    assert peers.versions(tmp_path)["vllm"] == "1.2.3"


def test_peer_with_a_broken_library_is_absent(tmp_path):
    library = tmp_path / "vllm" / "_flashmla_C.abi3.so"
    library.parent.mkdir()
    library.write_text("not a library")
    _, missing = peers.find_peers(tmp_path)
    assert "_flashmla_C.abi3.so" in missing["FlashMLA"]


class FlashMLALike:
    """FlashMLA's signatures and layouts over this package's ops."""

    def get_mla_metadata(self):
        return object(), None

    def flash_mla_sparse_fwd(self, q, kv, indices, sm_scale, d_v=512, attn_sink=None):
        assert kv.dim() == indices.dim() == 3
        assert d_v == 512
        out, lse = ops.sparse_prefill(
            q, kv[:, 0], indices[:, 0], softmax_scale=sm_scale, attn_sink=attn_sink
        )
        return out, torch.zeros_like(lse), lse

    def flash_mla_with_kvcache(
        self,
        q,
        k_cache,
        table,
        lens,
        dims,
        schedule,
        splits,
        scale,
        causal,
        fp8=False,
        ids=None,
        **more,
    ):
        assert (k_cache.shape[1:3], dims, splits) == ((64, 1), 512, None)
        if fp8:
            assert q.shape[2] in peers.FlashMLA.HEADS
            names = {
                "topk_length": "topk_lengths",
                "extra_k_cache": "extra_cache",
                "extra_indices_in_kvcache": "extra_topk_indices",
                "extra_topk_length": "extra_topk_lengths",
            }
            more = {names.get(name, name): value for name, value in more.items()}
            if more:
                assert len(more["attn_sink"]) == q.shape[2]
                extra = more["extra_cache"]
                more["extra_cache"] = None if extra is None else PagedCache(extra[:, :, 0], FP8_584)
            cache = PagedCache(k_cache[:, :, 0], FP8_584 if more else FP8_DS_MLA)
            return ops.sparse_decode(q, cache, ids, softmax_scale=scale, **more)
        cache = PagedCache(k_cache[:, :, 0], BF16_576)
        return ops.dense_decode(q, cache, table, lens, softmax_scale=scale, causal=causal)


@pytest.mark.parametrize(
    "workload",
    [each for each in SMALL if peers.FlashMLA.supports(None, each) is None],
    ids=lambda w: f"{w.op}-{w.label}",
)
def test_flashmla_gets_the_inputs_in_its_layout(workload, timer):
    peer = object.__new__(peers.FlashMLA)
    peer.module = FlashMLALike()
    outcome = run.run_one(workload, [peer], timer, CEILINGS, STAMP)
    assert outcome.failures == outcome.refusals == {}
    gathered = isinstance(workload, (workloads.CachedPrefill, workloads.WindowedPrefill))
    name = "FlashMLA after sparsemla's gather" if gathered else "FlashMLA"
    assert [found.peer for found in outcome.rows] == [name]
    padded = isinstance(workload, (workloads.SparsePrefill, workloads.SparseDecode))
    note = outcome.rows[0].note.removeprefix("bfloat16 MMA; ")
    assert note == ("heads padded to 64" if padded else "")
    assert peer.supports(workloads.SparseDecode(1, 1, 4, 200, 100)) is not None
    assert peer.supports(workloads.Gather(1, 1)) is not None


@pytest.mark.parametrize("workload", [SMALL[2], SMALL[8]], ids=lambda w: f"{w.op}-{w.variant}")
def test_sgl_flash_mla_gets_the_inputs_in_its_layout(workload, timer, monkeypatch):
    schedules = []

    def decode(q, cache, ids, lens, sink, tiles, splits, extra, extra_ids, extra_lens, dims, *rest):
        schedules.append((tiles, splits))
        more = {} if sink is None else {"attn_sink": sink, "topk_length": lens}
        if extra is not None:
            more |= {"extra_k_cache": extra, "extra_indices_in_kvcache": extra_ids}
            more["extra_topk_length"] = extra_lens
        scale, given = rest
        assert given is None
        out = FlashMLALike().flash_mla_with_kvcache(
            q, cache, None, None, dims, None, None, scale, False, True, ids, **more
        )
        return *out, "tiles", "splits"

    library = SimpleNamespace(sparse_decode_fwd=decode)
    monkeypatch.setattr(torch.ops, "flash_mla_legacy", library, raising=False)
    peer = object.__new__(peers.SglFlashMLA)
    peer.module = sglang._Legacy()
    outcome = run.run_one(workload, [peer], timer, CEILINGS, STAMP)
    assert outcome.failures == outcome.refusals == {}
    assert [found.peer for found in outcome.rows] == ["sgl_flash_mla"]
    assert schedules[0] == (None, None)
    assert set(schedules[1:]) == {("tiles", "splits")}
    assert peer.supports(SMALL[0]) is not None


def test_fa3_gets_the_inputs_in_its_layout(timer, monkeypatch):
    def schedule(batch, num_queries, topk, heads, kv_heads, dim, value_dim, dtype, counts, *rest):
        assert (num_queries, kv_heads, dim, value_dim) == (1, 1, 64, 512)
        return (batch, topk, heads)

    def forward(rope, k, v, _k_new, _v_new, nope, _out, starts, *rest):
        *_, counts, one, topk, slots = rest[:7]
        scale, causal = rest[15:17]
        assert (one, causal) == (1, True)
        assert rest[21] == (len(rope), topk, rope.shape[1])
        assert starts.tolist() == list(range(len(rope) + 1))
        assert counts.tolist() == [topk] * len(rope)
        if rope.any():
            v, nope = torch.cat([v, k], -1), torch.cat([nope, rope], -1)
        else:  # without RoPE the queries of the first 64 dims are zeros, and keys any rows
            assert k.shape == (*v.shape[:3], 64)
        rows, q = v[:, 0, 0], nope
        return ops.sparse_prefill(q, rows, slots, softmax_scale=scale)

    library = SimpleNamespace(get_scheduler_metadata=schedule, fwd=forward)
    monkeypatch.setattr(torch.ops, "_vllm_fa3_C", library, raising=False)
    peer = object.__new__(peers.FA3)
    for fmt in (BF16_576, BF16_512, FP8_NOPE):
        workload = workloads.SparseDecode(3, 1, 4, 200, 128, format=fmt)
        outcome = run.run_one(workload, [peer], timer, CEILINGS, STAMP)
        assert outcome.failures == outcome.refusals == {}
        assert [found.peer for found in outcome.rows] == ["FA3"]
        assert ("over bfloat16 rows" in outcome.rows[0].note) == (fmt is FP8_NOPE)
    for other in (SMALL[2], SMALL[6], SMALL[8]):  # FP8, two tokens a request, a second cache
        assert peer.supports(other) is not None


def test_sglang_triton_gets_the_inputs_in_its_layout(timer):
    def prefill(q, kv, ids, scale, union=0, topk_length=None):
        assert (union == 0) == (topk_length is not None)
        return ops.sparse_prefill(q, kv, ids, softmax_scale=scale, topk_lengths=topk_length)[0]

    peer = object.__new__(peers.SGLangTriton)
    peer.module = SimpleNamespace(sparse_mla_prefill=prefill)
    names = "SGLang Triton", "SGLang Triton, union of 2", "SGLang Triton, union of 4"
    for heads, sides in ((4, (0, 2)), (8, (0, 1, 2)), (32, (0,))):
        workload = workloads.SparsePrefill(5, 300, heads, 576, 128)
        outcome = run.run_one(workload, [peer], timer, CEILINGS, STAMP)
        assert outcome.failures == outcome.refusals == {}
        assert {found.peer for found in outcome.rows} == {names[i] for i in sides}
    assert peer.supports(workloads.SparsePrefill(5, 300, 64, 576, 128)) is not None
    assert peer.supports(workloads.SparsePrefill(5, 300, 16, 512, 128)) is not None


def tilelang_like(q, kv, o, do, indices, lse, sm_scale=None):
    """The signature, layouts and mask of TileLang's backward pass over this package's op."""
    assert all(x.is_contiguous() for x in (q, kv, o, do, indices, lse))
    (batch, tokens, heads, dim), rows = q.shape, kv.shape[1]
    assert kv.shape == (batch, rows, 1, dim)
    assert indices.shape[:3] == (batch, tokens, 1)
    assert lse.shape == (batch, tokens, heads)
    ids = indices[0, :, 0]
    seen = (ids >= 0) & (ids <= torch.arange(tokens)[:, None])
    assert bool((ids[~seen] == rows).all())  # what its own test gives for a missing entry
    dq, dkv, _ = ops.sparse_attention_backward(
        do[0],
        q[0],
        kv[0, :, 0],
        ids.where(seen, -1),
        o[0],
        lse[0] * torch.tensor(2.0).log(),
        softmax_scale=sm_scale,
    )
    return dq[None], dkv[None, :, None]


def test_tilelang_gets_the_inputs_of_gradients_in_its_layout(timer):
    peer = object.__new__(peers.TileLang)
    peer.modules = {"gradient": SimpleNamespace(sparse_mla_bwd=tilelang_like)}
    workload = workloads.SparseBackward(40, 40, 16, 576, 32)
    outcome = run.run_one(workload, [peer], timer, CEILINGS, STAMP)
    assert outcome.failures == outcome.refusals == {}
    assert [found.peer for found in outcome.rows] == ["TileLang"]
    for shape, reason in (
        ((40, 64, 16, 576, 32), "behind the token"),
        ((40, 40, 16, 512, 32), "head_dim of 576, got 512"),
        ((40, 40, 8, 576, 32), "power of two, got 8"),
        ((40, 40, 48, 576, 32), "power of two, got 48"),
        ((40, 40, 16, 576, 24), "multiple of 32 entries, got 24"),
    ):
        assert reason in peer.supports(workloads.SparseBackward(*shape))
    inputs = workload.build(CPU)
    inputs["topk_indices"][7] = -1
    with pytest.raises(ValueError, match="NaN if a token has no row"):
        peer.prepare(workload, inputs)


def test_tilelang_with_wrong_gradients_is_not_timed(timer):
    def wrong(*arguments, **options):
        dq, dkv = tilelang_like(*arguments, **options)
        return dq, dkv.roll(1, 1)

    peer = object.__new__(peers.TileLang)
    peer.modules = {"gradient": SimpleNamespace(sparse_mla_bwd=wrong)}
    workload = workloads.SparseBackward(40, 40, 16, 576, 32)
    outcome = run.run_one(workload, [peer], timer, CEILINGS, STAMP)
    assert set(outcome.failures) == {"TileLang"}
    assert [found.peer for found in outcome.rows] == [None]


def test_deepgemm_gets_the_inputs_in_its_layout(timer, monkeypatch):
    def ragged(q, q_sf, kv, kv_sf, weights, starts, ends, max_seqlen_k, schedule):
        assert (q_sf, schedule) == (None, None)
        scores = ops.indexer_scores(q, weights, kv, kv_sf, row_starts=starts, row_ends=ends)
        # Columns that no row sees are not written, and the result has additional columns.
        scores = torch.nn.functional.pad(scores, (0, 7), value=torch.nan)
        return scores.masked_fill(scores == -torch.inf, torch.nan)

    def paged(q, q_sf, kv_cache, weights, lens, table, schedule, max_context_len, indices):
        assert (kv_cache.shape[1:], schedule, weights.dim()) == ((64, 1, 132), "schedule", 2)
        assert q.shape[2] in (32, 64)  # 16 heads are padded
        assert int(lens.max()) <= max_context_len
        scores = ops.indexer_scores_paged(
            q,
            weights.view(q.shape[:3]),
            PagedCache(kv_cache[:, :, 0], INDEX_FP8),
            table,
            lens,
            max_seq_len=max_context_len,
        )
        return scores.flatten(0, 1)

    library = SimpleNamespace(
        fp8_fp4_mqa_logits=ragged,
        fp8_fp4_paged_mqa_logits=paged,
        get_paged_mqa_logits_metadata=lambda lens, block_kv, num_sms, indices: "schedule",
    )
    monkeypatch.setattr(torch.ops, "deep_gemm", library, raising=False)
    card = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    for workload, name in (
        (workloads.IndexerScores(9, 40), "DeepGEMM"),
        (workloads.IndexerScoresPaged(3, 2, 70), "DeepGEMM"),
        (workloads.IndexerTopk(1, 9, 70, 16), "DeepGEMM + torch.topk"),
        (workloads.IndexerTopk(3, 1, 70, 16), "DeepGEMM + torch.topk"),
        (workloads.IndexerTopk(1, 9, 70, 8, ratio=4), "DeepGEMM + torch.topk"),
        (workloads.IndexerTopk(3, 1, 70, 8, ratio=4), "DeepGEMM + torch.topk"),
        (workloads.IndexerTopk(3, 1, 70, 8, ratio=4, heads=16), "DeepGEMM + torch.topk"),
    ):
        peer = object.__new__(peers.DeepGEMM)
        outcome = run.run_one(workload, [peer], timer, CEILINGS, STAMP)
        assert outcome.failures == outcome.refusals == {}
        assert [found.peer for found in outcome.rows] == [name]


def test_vllm_gets_the_inputs_in_its_layout(timer, monkeypatch):
    def prefill(scores, starts, ends, out, num_rows, stride0, stride1, topk):
        assert (num_rows, (stride0, stride1)) == (len(scores), scores.stride())
        out.copy_(scores.topk(topk).indices)

    def decode(scores, next_n, lens, out, num_rows, stride0, stride1, topk):
        assert next_n == 1
        prefill(scores, None, lens, out, num_rows, stride0, stride1, topk)

    def persistent(scores, lens, out, workspace, topk, max_seq_len):
        assert lens.tolist() == [max_seq_len] * len(scores)
        out.copy_(scores.topk(topk).indices)

    def write(latent, rope, data, slots, dtype, scale, skip_scale):
        fmt = {"fp8_ds_mla": FP8_DS_MLA, "auto": BF16_576}[dtype]
        PagedCache(data, fmt).write(slots, torch.cat([latent, rope], 1), scale_mode="exact")

    def rms_norm(out, x, weight, eps):
        out.copy_(torch.nn.functional.rms_norm(x, x.shape[1:], weight, eps))

    def rotary(positions, q, k, head_size, table, is_neox):
        assert q.shape[2] == k.shape[2] == head_size
        for x in (q, k):
            part = x[..., : table.shape[1]]
            cos_sin = table[positions].float()[:, None]
            part.copy_(reference.quant.rotate(part.float(), cos_sin, not is_neox))

    def write_rotated(positions, q, rope, latent, table, is_neox, slots, data, dtype, scale):
        assert dtype == "auto"
        assert rope.dtype == latent.dtype == table.dtype == q.dtype
        rotary(positions, q, rope[:, None], 64, table, is_neox)
        write(latent, rope, data, slots, dtype, scale, False)

    def quantise(x, out, scales, group, eps, low, high, pow2, transposed, aligned):
        assert (group, eps, low, high, transposed, aligned) == (128, 1e-4, -448, 448, False, False)
        stored = INDEX_FP8.quantize(x, scale_mode="pow2" if pow2 else "exact")
        out.copy_(stored.fp8)
        scales.copy_(stored.scales)

    def write_keys(k, data, slots, group, scale_format):
        assert (group, scale_format) == (128, "ue8m0")
        PagedCache(data, INDEX_FP8).write(slots, k)

    def write_normed(q, kv, pages, slots, positions, table, heads, eps, page_size):
        assert (pages.shape[1], heads, eps) == (page_size * 584, q.shape[1], 1e-6)
        # Its rows are normalised already: a norm with their root mean square changes nothing.
        size = kv.float().square().mean(1, keepdim=True).sqrt()
        ones = torch.ones(512)
        cache = PagedCache(pages.view(-1, page_size, 584), FP8_584)
        places = {"positions": positions, "slot_mapping": slots, "query_norm": True, "eps": eps}
        return ops.fused_rope_rmsnorm_quant(q, kv / size, table, ones, cache, **places)

    def gather(data, out, table, starts, batch, seq_starts):
        lens = torch.full_like(starts, len(out) // batch)
        ops.gather_dequant(PagedCache(data, FP8_DS_MLA), table, lens, starts, out=out)

    library = SimpleNamespace(
        top_k_per_row_prefill=prefill,
        top_k_per_row_decode=decode,
        persistent_topk=persistent,
        rms_norm=rms_norm,
        rotary_embedding=rotary,
        per_token_group_fp8_quant=quantise,
        fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert=write_normed,
    )
    caches = SimpleNamespace(
        concat_and_cache_mla=write,
        concat_and_cache_mla_rope_fused=write_rotated,
        indexer_k_quant_and_cache=write_keys,
        cp_gather_and_upconvert_fp8_kv_cache=gather,
    )
    monkeypatch.setattr(torch.ops, "_C", library)
    monkeypatch.setattr(torch.ops, "_C_cache_ops", caches, raising=False)
    names = []
    for workload in SMALL[-6:]:
        peer = object.__new__(peers.VLLM)
        outcome = run.run_one(workload, [peer], timer, CEILINGS, STAMP)
        assert outcome.failures == outcome.refusals == {}
        names += [found.peer for found in outcome.rows]
    assert names == [
        "vLLM top_k_per_row_prefill",
        "vLLM top_k_per_row_decode",
        "vLLM persistent_topk",
        "vLLM concat_and_cache_mla",
        "vLLM rms_norm, rotary_embedding, concat_and_cache_mla",
        "vLLM concat_and_cache_mla",
        "vLLM rms_norm, concat_and_cache_mla_rope_fused",
        "vLLM fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert",
        "vLLM rotary_embedding, per_token_group_fp8_quant, indexer_k_quant_and_cache",
        "vLLM cp_gather_and_upconvert",
    ]


class VLLMKernels:
    """Signatures and layouts of vLLM's Python kernels and of DeepGEMM's products, in torch."""

    def save(self, kv, score, ape, positions, state_cache, slot_mapping, block_size, **sizes):
        ratio, width = sizes["compress_ratio"], sizes["state_width"]
        assert state_cache.shape[1:] == (block_size, 2 * width)
        rows = torch.cat([kv, score + ape[positions % ratio]], 1)
        state_cache.view(-1, 2 * width)[slot_mapping] = rows

    def compress(self, state_cache, positions, block_table, kv_cache, k_cache_metadata, **given):
        dim, ratio, page = given["head_dim"], given["compress_ratio"], given["block_size"]
        format = {512: FP8_584, 128: INDEX_FP8}[dim]
        layout = given["quant_block"], given["token_stride"], given["scale_dim"]
        assert layout == {512: (64, 576, 8), 128: (128, 128, 4)}[dim]
        closing = (positions + 1) % ratio == 0
        pooled = torch.zeros(len(positions), dim)
        for token in closing.nonzero()[:, 0].tolist():
            end = int(positions[token]) + 1
            seen = torch.arange(max(end - ratio * (1 + given["overlap"]), 0), end)
            pages = block_table[given["token_to_req_indices"][token], seen // page].long()
            series = (seen >= end - ratio).long() * given["overlap"]
            found = state_cache[pages, seen % page].view(len(seen), 2, -1, dim)
            values, gates = found[torch.arange(len(seen)), :, series].unbind(1)
            pooled[token] = (gates.softmax(0) * values).sum(0)
        reference.fused_rope_rmsnorm_quant(
            pooled.new_empty(len(positions), 0, given["rope_head_dim"]),
            pooled,
            given["cos_sin_cache"],
            given["rms_norm_weight"],
            PagedCache(kv_cache, format),
            positions=positions // ratio * ratio,
            slot_mapping=k_cache_metadata.slot_mapping.where(closing, -1),
            eps=given["rms_norm_eps"],
        )

    def quantise(self, x, positions, table, per_group, block, chunks, nope, half, packed, *sizes):
        limit, aligned, num_tokens, groups, width, columns, quantise = sizes
        assert (per_group * 512, block * chunks, nope + 2 * half) == (width, 512, 512)
        assert (packed, limit, quantise, columns) == (False, 448, True, width // block)
        assert aligned % 4 == 0 <= aligned - num_tokens < 4
        cos, sin = table[positions][:, None].chunk(2, -1)
        last = reference.quant.rotate(x[..., nope:].float(), torch.cat([cos, -sin], -1), True)
        x = torch.cat([x[..., :nope].float(), last], -1).view(num_tokens, groups, columns, block)
        scales = (x.abs().amax(-1) / limit).log2().ceil().exp2()
        codes = (x / scales[..., None]).to(torch.float8_e4m3fn).flatten(2)
        room = torch.empty(groups, columns, aligned)[..., :num_tokens]
        room.copy_(scales.permute(1, 2, 0))
        return codes.transpose(0, 1).contiguous(), room.transpose(1, 2)

    def fp8_einsum(self, terms, x, weight, out, recipe):
        (codes, scales), (matrices, blocks) = x, weight
        assert (terms, recipe, scales.stride(0)) == ("bhr,hdr->bhd", (1, 128, 128), 1)
        x = codes.float() * scales.repeat_interleave(128, 2)
        blocks = blocks.repeat_interleave(128, 1).repeat_interleave(128, 2)
        out.copy_(torch.einsum(terms, x, matrices.float() * blocks))

    def set_pdl(self, enabled):
        self.pdl = enabled


def test_vllm_python_gets_the_inputs_in_its_layout(timer, monkeypatch):
    kernels = VLLMKernels()
    peer = object.__new__(peers.VLLMPython)
    peer.directories, peer.save, peer.compress = [], kernels.save, kernels.compress
    peer.rotate = SimpleNamespace(_fused_inv_rope_fp8_quant_kernel_impl=kernels.quantise)
    monkeypatch.setattr(vllm_python.deep_gemm, "load", lambda directories: kernels)
    monkeypatch.setattr(vllm_python.importlib.util, "find_spec", lambda name: name)
    peer.cute_dsl = kernels.compress
    names = []
    for workload in [each for each in SMALL if peer.supports(each) is None]:
        outcome = run.run_one(workload, [peer], timer, CEILINGS, STAMP)
        assert outcome.failures == outcome.refusals == {}
        names += [found.peer for found in outcome.rows]
    compressors = ["vLLM Triton compressor", "vLLM CuTe DSL compressor"]
    projection = "vLLM fused_inv_rope_fp8_quant, DeepGEMM fp8_einsum"
    assert names == [projection, *compressors, compressors[0], *compressors]
    assert kernels.pdl is False


def test_vllm_python_is_loaded_without_vllm(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    contents = {
        "__init__": "raise RuntimeError",
        "models/deepseek_v4/common/ops/__init__": "raise RuntimeError",
        "models/deepseek_v4/common/ops/fused_compress_quant_cache": """
from vllm.model_executor.warmup.jit_warmup import launcher
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.deep_gemm import mqa_logits_use_mx_scales
compress_norm_rope_store_triton = launcher, triton.jit, tl.load, current_platform.is_rocm()
""",
        "models/deepseek_v4/common/ops/save_partial_states": """
from .fused_compress_quant_cache import launcher as _SAVE_PARTIAL_STATES_KERNEL
""",
        "models/deepseek_v4/common/ops/fused_inv_rope_fp8_quant": """
from vllm.utils.torch_utils import direct_register_custom_op
direct_register_custom_op(op_name="op", op_func=print, fake_impl=print)
""",
        "models/deepseek_v4/common/ops/fused_indexer_q": "fused_indexer_q_rope_quant = 1",
        "models/deepseek_v4/common/ops/cache_utils": """
from vllm.model_executor.layers.quantization.utils.quant_utils import get_fp8_min_max
from vllm.transformers_utils.deepseek_v4_utils import get_compress_ratios
compute_global_topk_indices_and_lens = 2
""",
        "model_executor/warmup/jit_warmup": "launcher = 'launcher'",
    }
    for name, text in contents.items():
        path = tmp_path / "vllm" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    imported = SimpleNamespace()
    monkeypatch.setitem(peers.sys.modules, "vllm", imported)
    before = set(peers.sys.modules)
    peer = peers.VLLMPython([tmp_path])
    assert peers.sys.modules["vllm"] is imported
    assert peer.save == peer.compress[0] == "launcher"
    assert (peer.queries, peer.slots) == (1, 2)
    assert {name for name in set(peers.sys.modules) - before if "vllm" in name} == set()
    with pytest.raises(peers.base.Unavailable, match="vllm/models/deepseek_v4/common/ops is not"):
        peers.VLLMPython([tmp_path / "vllm"])


def test_flashmla_is_loaded_without_vllm(tmp_path, monkeypatch):
    source = tmp_path / "vllm/third_party/flashmla/flash_mla_interface.py"
    source.parent.mkdir(parents=True)
    source.write_text("import vllm._flashmla_C\nloaded = True\n")
    (tmp_path / "vllm/_flashmla_C.abi3.so").touch()
    monkeypatch.setattr(torch.ops, "load_library", lambda path: None)
    before = set(peers.sys.modules)
    assert peers.FlashMLA([tmp_path]).module.loaded
    assert set(peers.sys.modules) - before == {"flash_mla_interface"}
    del peers.sys.modules["flash_mla_interface"]


def test_report_round_trip(tmp_path):
    path = tmp_path / "folder" / "h200.json"
    saved = report.Report("H200", CEILINGS, [row(), row(peer=None, peer_us=None, ratio=None)])
    saved.rows[1] = replace(saved.rows[1], peer_spread_us=None, peer_timed=None)
    report.save(path, saved)
    assert report.load(path) == saved
    first = json.loads(path.read_text())["rows"][0]
    assert {"op", "case", "ours_us", "peer", "peer_us", "ratio", "floor_us", "run"} <= set(first)
    for text in ("{}", "[]", "# a page"):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"h200\.json is not a benchmark report"):
            report.load(path)


def test_a_file_has_a_line_for_each_row_and_each_run_once(tmp_path):
    path = tmp_path / "h200.json"
    later = {"commit": "cafe", "date": "2026-02-03", "versions": {"torch": "2.12.0"}}
    rows = [row(case="a"), row(case="b", **later), row(case="c")]
    report.save(path, report.Report("H200", CEILINGS, rows))
    assert report.load(path).rows == rows
    text = path.read_text()
    assert [json.loads(text)["rows"][i]["run"] for i in range(3)] == [0, 1, 0]
    assert json.loads(text)["runs"][1] == later
    assert len([line for line in text.splitlines() if '"case"' in line]) == 3
    assert text.count("2.11.0") == text.count("2.12.0") == 1


def test_merge_replaces_remeasured_workloads():
    before, after = ([row(case=case, ours_us=us) for case in "abc"] for us in (1.0, 2.0))
    old = report.Report("H200", CEILINGS, [*before[:2], replace(before[1], peer="x"), before[2]])
    new = report.Report("H200", CEILINGS, [row(case="d", ours_us=2.0), after[1]])
    assert report.lost(old, new.rows) == [old.rows[2]]
    rows = report.merged(old, new).rows
    kept = ["a1.0", "b2.0", "b1.0", "c1.0", "d2.0"]
    assert [each.case + str(each.ours_us) for each in rows] == kept
    assert rows[2] == old.rows[2]
    wrong = {(old.rows[2].workload, "x")}
    rows = report.merged(old, new, wrong).rows
    assert [each.case + str(each.ours_us) for each in rows] == [*kept[:2], *kept[3:]]
    with pytest.raises(ValueError, match="reports are of H100 and of H200"):
        report.merged(replace(old, device="H100"), new)


def test_rows_of_an_earlier_run_say_so_and_leave_the_plots_to_the_newest(tmp_path):
    older = row(peer="TileLang", ours_us=11.0, commit="abcdef012345", date="2025-12-31")
    found = report.Report("H200", CEILINGS, [row(), older])
    lines = [line for line in report.markdown(found).splitlines() if line.startswith("| batch")]
    assert "2025" not in lines[0]
    assert "TileLang (timed with its launch: TileLang; both measured 2025-12-31 at" in lines[1]
    assert "commit abcdef012345)" in lines[1]
    drawn = []

    def draw(axes, op, bars):
        drawn.append(bars)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_draw_bars", draw)
        report.plot(found, tmp_path)
    times = {"floor": 2.5, "sparsemla": 10.0, "torch.topk": 20.0, "TileLang": 20.0}
    assert drawn == [{older.workload: times}]
    three = [replace(each, shape={"context": n}) for n in (1, 2, 3) for each in found.rows]
    (series,) = report._groups(three, "context").values()
    assert series["sparsemla"] == {1: 10.0, 2: 10.0, 3: 10.0}


def test_an_interrupted_write_leaves_the_file(tmp_path, monkeypatch):
    path = tmp_path / "h200.json"
    saved = report.Report("H200", CEILINGS, [row()])
    report.save(path, saved)
    write = Path.write_text

    def half(self, text, **options):
        write(self, text[: len(text) // 2], **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        report.save(path, report.Report("H200", CEILINGS, [row(), row(case="b")]))
    assert report.load(path) == saved


def test_markdown_tables():
    rows = [row(note="unsorted"), row(op="indexer_topk", peer=None, peer_us=None, ratio=None)]
    text = report.markdown(report.Report("H200", CEILINGS, rows))
    assert text.startswith("H200: copy 4000 GB/s")
    assert (
        "| batch 8, context 1024, topk 64 | 10.0 ±10% | 3 GB/s | 25 "
        "| torch.topk (unsorted; timed with its launch: torch.topk) | 20.0 ±5% | 2.00 |"
    ) in text
    assert "2026-01-02 at commit 0123456789ab with torch 2.11.0" in text
    assert re.findall("^### .*", text, re.MULTILINE) == ["### select_topk", "### indexer_topk"]


def test_table_command(tmp_path, monkeypatch, capsys):
    found = report.Report("H200", CEILINGS, [row()])
    report.save(tmp_path / "x.json", found)
    monkeypatch.setattr("sys.argv", ["bench", "--table", str(tmp_path / "x.json")])
    assert main() == 0
    assert capsys.readouterr().out == report.markdown(found) + "\n"


def test_lines_join_cases_that_differ_only_in_the_axis():
    rows = [
        row(
            case=f"batch 8, context {n}, topk 64{words}",
            shape={"batch": 8, "context": n, "topk": 64},
        )
        for words in ("", ", another cache")
        for n in (1024, 2048, 4096)
    ]
    assert set(report._groups(rows, "context")) == {
        "batch 8, topk 64",
        "batch 8, topk 64, another cache",
    }


def test_plots(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [
        row(case=f"context {n}", shape={"batch": 8, "context": n, "topk": 64}, ours_us=float(n))
        for n in (1024, 2048, 4096)
    ]
    written = report.plot(report.Report("H200", CEILINGS, rows), tmp_path / "plots")
    assert [path.name for path in written] == ["select_topk_bars.png", "select_topk_context.png"]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_plot_colors_are_distinct():
    names = [
        "floor",
        "sparsemla",
        "FlashMLA",
        "vLLM",
        "TileLang",
        "DeepGEMM",
        "torch.topk",
        "cuBLAS",
    ]
    colors = [report._color(name, names) for name in names]
    assert len(set(colors)) == len(names)
    assert set(colors[1:]) == set(report.OKABE_ITO)


def test_conflicting_arguments_are_refused(monkeypatch, capsys, tmp_path):
    for arguments, message in (
        (["--device", "cpu", "--op", "select_topk"], "op must not be given with the device cpu"),
        (["--device", "cpu", "--full", "--commit", "a"], "commit, full must not be given with"),
        (["--device", "tpu"], "device must be cpu or cuda, got 'tpu'"),
        (["--table", str(tmp_path / "none.json")], "none.json"),
        (["--table", "a.json", "--op", "b"], "op must not be given with table"),
        (["--launches", "a.json", "--table", "b.json"], "launches must not be given with table"),
        (["--launches", "a.json", "--commit", "b"], "commit must not be given with launches"),
        (["--host-times", "a.json", "--device", "cpu"], "device must not be given with host_times"),
    ):
        monkeypatch.setattr("sys.argv", ["bench", *arguments])
        assert main() == 2
        assert message in capsys.readouterr().err
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="plot needs matplotlib"):
        command.bench(print, plot=tmp_path)


def test_comparison_on_the_cpu_prints_rows_as_they_finish(monkeypatch):
    lines = []

    def compare():
        yield cpu.Comparison("decode", 2.0, 5.0, "SDPA, float32")
        assert lines[-1].split() == ["decode", "2.00", "5.00", "2.50", "SDPA,", "float32"]
        raise RuntimeError("prefill: GEMMs, float32 differs by 7.0% of a head's norm")

    monkeypatch.setattr(command.cpu, "compare", compare)
    assert command.bench(lines.append, device="cpu") == 1
    assert lines[1].split()[:5] == ["case", "sparse", "ms", "dense", "ms"]
    assert lines[-1].startswith("FAILED prefill: GEMMs, float32")


@pytest.fixture
def small_comparison(monkeypatch):
    cases = (("decode", 1, 1024), ("prefill", 80, 1024))
    for name, value in (("CASES", cases), ("SECONDS", 0.0), ("NEARLY", 1e9)):
        monkeypatch.setattr(cpu, name, value)


def test_comparison_uses_the_fastest_dense_variant(small_comparison, monkeypatch):
    clock = iter(range(10**9))
    speeds = {"GEMMs, bfloat16": 40.0, "SDPA, bfloat16": 9.0, "GEMMs, float32": 3.0}

    def seconds(side):
        side()
        return speeds.get(names.get(id(side)), 5.0) + 1e-6 * next(clock)

    names = {}
    build = cpu._dense_sides

    def named(*tensors):
        sides = build(*tensors)
        names.update({id(side): name for name, side in sides.items()})
        kept.append(sides)
        return sides

    kept = []
    monkeypatch.setattr(cpu, "_dense_sides", named)
    monkeypatch.setattr(cpu, "_seconds", seconds)
    rows = list(cpu.compare())
    assert [row.dense for row in rows] == ["GEMMs, float32"] * 2
    assert [round(row.ratio, 3) for row in rows] == [0.6, 0.6]
    # A variant that is slow on a few tokens does not run on all.
    monkeypatch.setattr(cpu, "NEARLY", 1.5)
    assert [row.dense for row in cpu.compare()] == ["GEMMs, float32"] * 2


@pytest.mark.parametrize("op", ["sparse_decode", "sparse_prefill"])
def test_a_comparison_refuses_attention_that_misses_a_key(op, small_comparison, monkeypatch):
    right = getattr(cpu, op)

    def wrong(q, cache, ids, **options):
        return right(q, cache, ids[..., 1:].contiguous(), **options)

    monkeypatch.setattr(cpu, op, wrong)
    with pytest.raises(RuntimeError, match=r"differs by .*% of a head's norm"):
        list(cpu.compare())


@pytest.fixture
def measuring(monkeypatch, timer):
    """The measuring command, on a CPU instead of a GPU; returns the workloads that it measures."""
    chosen = []
    monkeypatch.setattr(command, "select_workloads", lambda *given: chosen)
    monkeypatch.setattr(command, "Timer", lambda device: timer)
    monkeypatch.setattr(command, "measure", lambda timer, acting_as=None: CEILINGS)
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command.torch.cuda, "get_device_name", lambda: "stand-in")
    return chosen


def test_exit_code_reports_failures(measuring, monkeypatch, tmp_path, capsys):
    measuring += [workloads.SelectTopk(5, 300, 32), workloads.SelectTopk(6, 300, 32)]
    monkeypatch.setattr(
        command, "find_peers", lambda path: ([Wrong(), Broken()], {"vLLM": "not there"})
    )
    path = tmp_path / "x.json"
    assert command.bench(print, json=path) == 1
    output = capsys.readouterr().out
    assert "without vLLM: not there" in output
    assert output.count("FAILED wrong: select_topk") == 2
    assert output.count("without torch: select_topk") == 2
    assert [each.peer for each in report.load(path).rows] == [None, None]
    monkeypatch.setattr(command, "find_peers", lambda path: ([Broken()], {}))
    measuring.pop()
    assert command.bench(print, json=path, commit="abc") == 0
    commits = {each.case: each.commit for each in report.load(path).rows}
    assert [commit == "abc" for commit in commits.values()] == [True, False]


def test_a_run_of_one_op_keeps_the_other_rows_of_a_file(measuring, monkeypatch, tmp_path, capsys):
    measuring.append(workloads.SelectTopk(5, 300, 32))
    ours = {"case": measuring[0].case, "shape": measuring[0].shape}
    old = [row(op="gather_dequant"), row(**ours), row(**ours, peer="TileLang"), row(case="other")]
    path = tmp_path / "h200.json"
    report.save(path, report.Report("stand-in", CEILINGS, old))
    monkeypatch.setattr(command, "find_peers", lambda path: ([peers.Torch()], {}))
    assert command.bench(print, json=path, commit="abc") == 0
    rows = report.load(path).rows
    assert [rows[0], rows[2], rows[3]] == [old[0], old[2], old[3]]
    assert (rows[1].case, rows[1].peer, rows[1].commit) == (ours["case"], "torch.topk", "abc")
    kept = f"kept in {path}: TileLang: select_topk, {ours['case']}, of {STAMP.date} at commit"
    assert f"{kept} {STAMP.commit}\n" in capsys.readouterr().out


def test_a_peer_with_a_wrong_result_loses_its_row(measuring, monkeypatch, tmp_path, capsys):
    measuring.append(workloads.SelectTopk(5, 300, 32))
    ours = {"case": measuring[0].case, "shape": measuring[0].shape}
    path = tmp_path / "h200.json"
    report.save(path, report.Report("stand-in", CEILINGS, [row(**ours, peer="wrong")]))
    monkeypatch.setattr(command, "find_peers", lambda path: ([Wrong()], {}))
    assert command.bench(print, json=path) == 1
    assert [each.peer for each in report.load(path).rows] == [None]
    dropped = f"dropped from {path}: wrong: select_topk, {ours['case']}\n"
    assert dropped in capsys.readouterr().out


def test_a_file_of_another_device_is_refused_before_the_work(measuring, monkeypatch, tmp_path):
    monkeypatch.setattr(command, "find_peers", lambda path: pytest.fail("work was done"))
    path = tmp_path / "h200.json"
    report.save(path, report.Report("NVIDIA H200", CEILINGS, [row()]))
    before = path.read_text()
    message = r"json must name a file of stand-in or a new one; .*h200.json has rows of NVIDIA H200"
    with pytest.raises(ValueError, match=message):
        command.bench(print, json=path)
    assert path.read_text() == before


def test_scores_in_the_bucket_of_the_threshold_are_counted():
    # Eight float16 of [2, 2.5), which agree in their upper 8 bits, below two of [3, 3.5).
    row = torch.tensor([2.0, 2.4, 2.1, 2.3, 2.2, 2.49, 2.05, 2.15, 3.0, 3.1, -2.0, 1.9])
    assert largest_bucket(row[None], 5) == 8
    assert largest_bucket(torch.stack([row, row - 2]), 2) == 2

"""The benchmark of dense and sparse training attention, without a GPU."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

from sparsemla_lab.bench import command, peers, report, run, training
from sparsemla_lab.bench.ceilings import Ceilings
from sparsemla_lab.bench.timing import Timer

CPU = torch.device("cpu")
CEILINGS = Ceilings(copy_gbps=4000, bf16_tflops=600, fp8_tflops=1200, launch_us=3)
STAMP = run.Stamp("0123456789ab", "2026-01-02", {"torch": "2.11.0"})
SPARSE, INDEXED = (training.TrainingAttention(70, 2, 16, indexer) for indexer in (0, 1))


@pytest.fixture(autouse=True)
def backends_of_a_cpu(monkeypatch):
    backends = {"FlashAttention-2": SDPBackend.FLASH_ATTENTION, "math": SDPBackend.MATH}
    monkeypatch.setattr(peers.Torch, "BACKENDS", backends)


@pytest.fixture(scope="module")
def timer():
    return Timer("cpu", budget_ms=0.001)


@pytest.fixture(scope="module")
def inputs():
    return INDEXED.build(CPU)


@pytest.fixture(scope="module")
def right(inputs):
    """Results of the sparse side that pass the check."""
    results = INDEXED.run(inputs)
    INDEXED.check(inputs, results)
    return results


def test_work_of_training_attention():
    workload = training.TrainingAttention(4096, 128, 2048)
    entries, pairs = 2048 * 2049 // 2 + 2048 * 2048, 4096 * 4097 // 2
    assert workload.flop == entries * 128 * (2176 + 5504)
    assert workload.dense_flop == pairs * 128 * 2 * (2 * (192 + 128) + 2 * 192 + 128)
    indexed = replace(workload, indexer=1)
    products = 2 * 64 * 128
    more = entries * (2 * 128 * 576 + 4 * products) + pairs * products
    assert indexed.flop == workload.flop + more
    assert indexed.dense_flop == workload.dense_flop
    small = training.TrainingAttention(3, 2, 2)
    # q, kv and dout come in, out and lse, dq and dkv go out, beside two ids of each token.
    read = 3 * (2 * 576 * 2 + 576 * 2 + 2 * 512 * 2)
    written = read + 3 * 2 * 4
    assert small.unique_bytes(small.build(CPU)) == read + written + 3 * 2 * 4
    learnt = 2 * 3 * (64 * 256 + 64 * 4 + 256)  # queries, weights, keys, and their gradients
    small = replace(small, indexer=1)
    assert small.unique_bytes(small.build(CPU)) == read + written + 3 * 2 * 4 + learnt


@pytest.mark.parametrize("indexer", [0, 1])
def test_sparse_attention_over_all_rows_is_dense_attention(indexer):
    """Outputs of the heads, and gradients of what keys and values are projected from."""
    workload = training.TrainingAttention(50, 3, 50, indexer)
    inputs = workload.build(CPU)
    out, _, dq, dkv = workload.run(inputs)[:4]
    side = peers.Torch()._dense("math", workload, inputs)
    dense_out, dense_dq, dk, dv = (x.float() for x in side.run())
    w_uk, w_uv = inputs["w_uk"].float(), inputs["w_uv"].float()
    dlatent = torch.einsum("shn,hnl->sl", dk[..., :128], w_uk)
    dlatent += torch.einsum("shv,hvl->sl", dv, w_uv)
    pairs = {
        "out": (torch.einsum("thl,hvl->thv", out.float(), w_uv), dense_out),
        "dq": (torch.einsum("thl,hnl->thn", dq[..., :512].float(), w_uk), dense_dq[..., :128]),
        "dq of RoPE": (dq[..., 512:], dense_dq[..., 128:]),
        "dkv": (dkv[:, :512], dlatent),
        "dkv of RoPE": (dkv[:, 512:], dk[..., 128:].sum(1)),
    }
    for name, (got, expected) in pairs.items():
        error = (got.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-3)
        assert error.max() < 0.03, name


@pytest.mark.parametrize("workload", [SPARSE, INDEXED])
def test_dense_attention_stands_beside_the_sparse_one(workload, timer):
    found = SimpleNamespace(flash_attn_func=dense)
    other = object.__new__(peers.FlashAttention3)
    other.module = found
    outcome = run.run_one(workload, [peers.Torch(), other], timer, CEILINGS, STAMP)
    assert outcome.failures == outcome.refusals == {}
    names = "torch SDPA, FlashAttention-2", "torch SDPA, math", "FlashAttention-3"
    assert tuple(each.peer for each in outcome.rows) == names
    assert [bool(each.note) for each in outcome.rows] == [True, False, False]
    assert outcome.rows[0].shape == {
        "tokens": 70,
        "heads": 2,
        "topk": 16,
        "indexer": workload.indexer,
    }


def dense(q, k, v, softmax_scale, causal):
    """FlashAttention-3's signature and layout over torch's attention; with an LSE, as it had."""
    assert causal
    assert q.shape[:3] == k.shape[:3] == v.shape[:3]
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True, scale=softmax_scale
    )
    return out.transpose(1, 2), None


@pytest.mark.parametrize("index", range(4))
def test_wrong_dense_results_are_found(index, inputs):
    """The results of one token in the place of another's."""
    side = peers.Torch()._dense("math", INDEXED, inputs)
    results = side.run()
    side.check(results)
    results[index][40] = results[index][41].clone()
    with pytest.raises(AssertionError, match=("out", "dq", "dk", "dv")[index]):
        side.check(results)


def test_a_dense_mask_that_is_off_by_one_is_found(inputs):
    def attend(q, k, v):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        mask = torch.ones(70, 70, dtype=torch.bool).tril(1)
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=training.SCALE
        )
        return out[0].transpose(0, 1)

    side = training.dense_side("wrong", INDEXED, inputs, attend)
    with pytest.raises(AssertionError, match="out"):
        side.check(side.run())


NAMES = "out", "lse", "dq", "dkv", "dindex_q", "dweights", "dindex_k", "lists", "loss"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "lists"])
def test_wrong_sparse_results_are_found(name, inputs, right):
    """The results of one token or row in the place of another's."""
    results = [result.clone() for result in right]
    wrong = results[NAMES.index(name)]
    if name == "loss":
        wrong *= 1.01
    else:
        wrong[-1] = wrong[-2].clone()
    with pytest.raises(AssertionError, match=name):
        INDEXED.check(inputs, tuple(results))


@pytest.mark.parametrize("wrong", ["worse", "twice"])
def test_a_selection_of_other_rows_is_found(wrong, inputs, monkeypatch):
    """Although all that follows fits to it."""
    right = training.ops.select_rows

    def select(*arguments, **options):
        lists = right(*arguments, **options)
        others = set(range(70)) - set(lists[-1].tolist())
        lists[-1, 0] = max(others) if wrong == "worse" else lists[-1, 1]
        return lists

    monkeypatch.setattr(training.ops, "select_rows", select)
    with pytest.raises(AssertionError, match="training_attention: "):
        INDEXED.check(inputs, INDEXED.run(inputs))


def test_only_the_fastest_dense_attention_counts():
    rows = [
        measured(tokens, indexer, ours=ours, peer=peer, peer_us=us)
        for tokens, *times in (
            (4096, 2000, 3000, 1500, 1000),
            (8192, 4000, 6000, 4500, 3000),
            (16384, 8000, 12000, 13000, 12000),
        )
        for indexer, ours in enumerate(times[:2])
        for peer, us in zip(("cuDNN", "efficient"), (times[3], times[2]), strict=True)
    ]
    lines = training.crossing_lines(rows)
    assert lines[0] == "training attention, 128 heads, top-k 2048: forward and backward"
    flop = training.TrainingAttention(4096, 128, 2048).dense_flop
    first = f"4096 1.00 ms, {flop / 1e9:.0f} TFLOP/s (cuDNN) 2.00 ms, 7 TFLOP/s 0.50"
    assert " ".join(lines[2].split()) == first + " 3.00 ms, 7 TFLOP/s 0.33"
    # 0.75 at 8192 and 1.5 at 16384: 1 is at log(4 / 3) / log(2) of the way.
    assert lines[-2] == f"sparse is faster from {8192 * 4 / 3:.0f} tokens on"
    assert lines[-1] == "sparse with its indexer is faster from 16384 tokens on"
    assert training.crossing_lines(rows[:4])[-1].endswith(
        "is faster at no length up to 4096 tokens"
    )
    assert training.crossing_lines(rows[-4:])[-1].endswith("is faster at 16384 tokens already")
    assert training.crossing_lines([replace(rows[0], op="select_topk")]) == []
    assert training.crossing_lines([replace(rows[0], peer=None, peer_us=None)]) == []


def measured(tokens, indexer, ours, peer, peer_us):
    workload = training.TrainingAttention(tokens, 128, 2048, indexer)
    return report.Row(
        op=workload.op,
        case=workload.case,
        selection=workload.label,
        shape=workload.shape,
        ours_us=ours,
        ours_spread_us=(ours, ours),
        ours_timed="graph",
        tflops=7.0,
        gbps=1.0,
        floor_us=1.0,
        percent_of_floor=1.0,
        peer=peer,
        peer_us=peer_us,
        peer_spread_us=(peer_us, peer_us),
        peer_timed="graph",
        ratio=peer_us / ours,
        note="",
        commit="abc",
        date="2026-01-02",
        versions={},
    )


def test_the_table_is_printed_again_from_a_file(tmp_path):
    rows = [measured(4096, 0, 2000.0, "cuDNN", 1000.0)]
    report.save(tmp_path / "x.json", report.Report("H200", CEILINGS, rows))
    lines = []
    assert command.bench(lines.append, table=tmp_path / "x.json") == 0
    assert lines[-1] == "sparse is faster at no length up to 4096 tokens"
    assert "| tokens 4096, heads 128, topk 2048, indexer 0, overlapping |" in lines[0]


def test_every_length_is_measured_with_and_without_the_indexer():
    found = run.select_workloads("training_attention")
    assert len(found) == len(set(found)) == 20
    assert {each.tokens for each in found} == {2048, 4096, 8192, 16384, 32768}
    assert len(run.select_workloads("training_attention", case="heads 64, .* indexer 0")) == 5

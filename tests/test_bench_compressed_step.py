"""The benchmark of DeepSeek-V4's decode step, without a GPU."""

from types import SimpleNamespace

import pytest
import torch

from sparsemla import FP8_584, PagedCache, ops, reference
from sparsemla_lab.bench import compressed_step, peers, run
from sparsemla_lab.bench.compressed_step import RATIOS, CompressedStep, CompressedStepOfPeers
from sparsemla_lab.bench.timing import Timer
from test_bench import CEILINGS, STAMP, FlashMLALike, VLLMKernels
from test_bench_step import Fakes


@pytest.fixture(autouse=True)
def few_outputs(monkeypatch):
    monkeypatch.setattr(compressed_step, "OUTPUTS", 128)


@pytest.fixture(scope="module")
def timer():
    return Timer("cpu", budget_ms=0.001)


@pytest.mark.parametrize("ratio", RATIOS)
def test_wrong_step_is_not_timed(ratio, timer, monkeypatch):
    workload = CompressedStep(3, 8, 512, ratio)
    right = run.run_one(workload, [], timer, CEILINGS, STAMP)
    assert right.failures == right.refusals == {}
    assert right.rows[0].op == "compressed_decode_step"
    places = {1: ["out", "raw"], 4: ["slots", "entries", "keys"], 128: ["entries"]}
    for place in places[ratio]:
        with monkeypatch.context() as patch:
            break_at(place, patch)
            outcome = run.run_one(workload, [], timer, CEILINGS, STAMP)
        assert outcome.rows == [], place
        assert set(outcome.failures) == {"sparsemla"}


def break_at(place, patch):
    right = CompressedStep.run

    def run_wrongly(self, inputs):
        results = right(self, inputs)
        if place == "out":
            results[0][0, 0] = 0
        elif place == "slots":
            results[1][0, :4] = results[1][0, 4]
        else:
            part = inputs if place == "raw" else inputs[place] | {"raw": inputs[place]["cache"]}
            slots, cache = part["slot_mapping"], part["raw"]
            cache.write(slots, torch.ones(len(slots), cache.format.head_dim))
        return results

    patch.setattr(CompressedStep, "run", run_wrongly)


def test_work_of_a_step():
    none, some, every = (CompressedStep(2, 64, 8192, ratio) for ratio in RATIOS)
    assert [step.listed for step in (none, some, every)] == [0, 512, 64]
    assert CompressedStep(2, 16, 8192, 4).listed == 512  # of a rank
    projection = 64 * 2 * 512 * 128
    assert none.flop == 2 * (64 * 128 * 2048 + projection)
    assert some.flop == 2 * (64 * 640 * 2048 + projection + 2048 * 64 * 128)
    small = CompressedStep(2, 8, 512, 1)
    rows = 2 * (2 * 8 * 512 + 2 * 512 + 2 * 128 + 128 * 584)
    assert small.unique_bytes(small.build(torch.device("cpu"))) == 128 * 4096 + rows


class Library(Fakes):
    """vLLM's and DeepGEMM's kernels of DeepSeek-V4, by this package's ops."""

    @staticmethod
    def fused_deepseek_v4_qnorm_rope_kv_rope_quant_insert(
        q, kv, pages, slots, positions, table, heads, eps, page_size
    ):
        cache = PagedCache(pages.view(-1, page_size, 584), FP8_584)
        # Its rows are normalised already: a norm with their root mean square changes nothing.
        size = kv.float().square().mean(1, keepdim=True).sqrt()
        places = {"positions": positions, "slot_mapping": slots, "query_norm": True, "eps": eps}
        for token in range(len(kv)):
            one = {name: places[name][token : token + 1] for name in ("positions", "slot_mapping")}
            weight = size[token].expand(512).contiguous()
            row = kv[token : token + 1]
            ops.fused_rope_rmsnorm_quant(q[:1], row, table, weight, cache, **places | one)
        none = places | {"slot_mapping": torch.full_like(slots, -1)}
        rotated = ops.fused_rope_rmsnorm_quant(q, kv, table, torch.ones(512), cache, **none)
        return torch.nn.functional.pad(rotated, (0, 0, 0, heads - q.shape[1]))

    @staticmethod
    def cooperative_topk(scores, lens, out, workspace, topk, length):
        out.copy_(scores.topk(topk).indices)


def queries(positions, q, table, weights, *factors):
    assert factors == (128**-0.5, 64**-0.5)
    return reference.prepare_index_queries(
        q, weights, table, positions=positions, interleaved=True, rope_first=False
    )


def slots(chosen, requests, pages, page_size, valid):
    found = ops.to_slots(chosen, pages, requests, page_size=page_size)
    return found, (found >= 0).sum(1).where(valid, 0).int()


@pytest.mark.parametrize(("ratio", "padded"), [*((ratio, 8) for ratio in RATIOS), (4, 16)])
def test_the_step_of_the_peers_passes_the_same_gate(ratio, padded, timer, monkeypatch):
    for namespace in ("_C", "deep_gemm"):
        monkeypatch.setattr(torch.ops, namespace, Library, raising=False)
    processors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    monkeypatch.setattr(peers.FlashMLA, "HEADS", (padded,))
    monkeypatch.setattr(compressed_step, "SHARED", 0.9)  # of few entries
    kernels = VLLMKernels()
    python = object.__new__(peers.VLLMPython)
    python.directories, python.save, python.compress = [], kernels.save, kernels.compress
    python.rotate = SimpleNamespace(_fused_inv_rope_fp8_quant_kernel_impl=kernels.quantise)
    python.queries, python.slots = queries, slots
    monkeypatch.setattr(peers.vllm_python.deep_gemm, "load", lambda directories: kernels)
    peer = object.__new__(CompressedStepOfPeers)
    peer.attention, peer.python = FlashMLALike(), python
    assert "up to 128" in peer.supports(CompressedStep(1, 256, 512, 4))
    outcome = run.run_one(CompressedStep(2, 8, 512, ratio), [peer], timer, CEILINGS, STAMP)
    assert outcome.failures == outcome.refusals == {}
    assert outcome.rows[0].peer == CompressedStepOfPeers.name
    assert ("padded to 16" in outcome.rows[0].note) == (padded == 16)

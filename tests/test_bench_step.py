"""The benchmark of a whole decode step and its time line, without a GPU."""

import json
from types import SimpleNamespace

import pytest
import torch

from sparsemla import FP8_DS_MLA, INDEX_FP8, PagedCache, ops
from sparsemla_lab.bench import host, run, step, timeline
from sparsemla_lab.bench.__main__ import main
from sparsemla_lab.bench.ceilings import Ceilings
from sparsemla_lab.bench.compressed_step import CompressedStepOfPeers
from sparsemla_lab.bench.peers import Torch
from sparsemla_lab.bench.peers.base import Unavailable
from sparsemla_lab.bench.timing import Timer

CEILINGS = Ceilings(copy_gbps=4000, bf16_tflops=600, fp8_tflops=1200, launch_us=3)
STAMP = run.Stamp("0123456789ab", "2026-01-02", {"torch": "2.11.0"})
LINES = [
    timeline.Line(
        "batch 1", side, (timeline.Launch("first", 0.0, 2.0), timeline.Launch("second", 1.0, 4.5))
    )
    for side in ("sparsemla", "others")
]


@pytest.fixture(autouse=True)
def few_rows(monkeypatch):
    monkeypatch.setattr(step, "TOPK", 32)


@pytest.fixture(scope="module")
def timer():
    return Timer("cpu", budget_ms=0.001)


@pytest.mark.parametrize("indexer", [0, 1])
def test_step_passes_its_gate(indexer, timer):
    outcome = run.run_one(step.DecodeStep(3, 4, 200, indexer), [], timer, CEILINGS, STAMP)
    assert outcome.failures == outcome.refusals == {}
    assert outcome.rows[0].case == f"batch 3, heads 4, context 200, indexer {indexer}"


@pytest.mark.parametrize("place", ["out", "slots", "twice"])
def test_wrong_step_is_not_timed(place, timer, monkeypatch):
    right = step.DecodeStep.run

    def run_wrongly(self, inputs):
        out, slots = right(self, inputs)
        if place == "out":
            out[0, 0] = 0
        elif place == "slots":
            slots[:, :4] = (slots[:, :4] + 1) % inputs["cache"].num_slots
        else:
            slots[:, 1] = slots[:, 0]
        return out, slots

    monkeypatch.setattr(step.DecodeStep, "run", run_wrongly)
    outcome = run.run_one(step.DecodeStep(1, 2, 200, 1), [], timer, CEILINGS, STAMP)
    assert outcome.rows == []
    assert set(outcome.failures) == {"sparsemla"}


def test_work_of_a_step():
    whole, given = (step.DecodeStep(2, 128, 1000, indexer) for indexer in (1, 0))
    attention = 2 * 128 * 32 * (576 + 512) + 2 * 128 * 512 * 256
    assert given.flop == 2 * attention
    assert whole.flop - given.flop == 2 * 1000 * 64 * 128  # FP8, at half
    small = step.DecodeStep(2, 4, 200, 1)
    weights = 4 * 512 * 256
    expected = weights + 2 * (2 * 4 * 320 + 32 * 656 + 200 * 132)
    assert small.unique_bytes(small.build(torch.device("cpu"))) == expected


def test_full_grid_only_on_request():
    few, all_of_them = (
        run.select_workloads("decode_step"),
        run.select_workloads("decode_step", True),
    )
    assert len(few) == 8
    assert len(all_of_them) == len(set(all_of_them)) == 72
    assert set(few) <= set(all_of_them)


def test_the_step_of_the_peers_needs_all_of_them():
    with pytest.raises(Unavailable, match="FlashMLA is not here"):
        step.StepOfPeers([Torch()])
    found, missing = run.with_steps([Torch()], {"TileLang": "is not installed"})
    assert len(found) == 1
    assert list(missing) == ["TileLang", step.StepOfPeers.name, CompressedStepOfPeers.name]


class Fakes:
    """The peers' kernels, implemented by this package's ops."""

    @staticmethod
    def rms_norm(out, x, weight, eps):
        out.copy_(torch.nn.functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps))

    @staticmethod
    def rotary_embedding(positions, q, k, head_size, table, neox):
        cos, sin = table[positions].float()[:, None].chunk(2, -1)
        for x in (q.view(len(q), -1, head_size), k.view(len(k), -1, head_size)):
            x = x[..., : table.shape[1]]
            a, b = x.float().chunk(2, -1) if neox else (x.float()[..., ::2], x.float()[..., 1::2])
            turned = a * cos - b * sin, a * sin + b * cos
            x.copy_(torch.cat(turned, -1) if neox else torch.stack(turned, -1).flatten(-2))

    @staticmethod
    def concat_and_cache_mla(latent, rope, data, slots, name, scale, skip_scale):
        rows = torch.cat([latent, rope], 1)
        PagedCache(data, FP8_DS_MLA).write(slots, rows, scale_mode="exact")

    @staticmethod
    def concat_mla_q(latent, rope, out):
        out.copy_(torch.cat([latent, rope], -1))

    @staticmethod
    def indexer_k_quant_and_cache(k, data, slots, block, scale_format):
        PagedCache(data, INDEX_FP8).write(slots, k)

    @staticmethod
    def per_token_group_fp8_quant(x, codes, scales, block, eps, low, high, pow2, *layout):
        stored = INDEX_FP8.quantize(x.float())
        codes.copy_(stored.fp8)
        scales.copy_(stored.scales)

    @staticmethod
    def get_paged_mqa_logits_metadata(lens, page_size, processors, indices):
        return None

    @staticmethod
    def fp8_fp4_paged_mqa_logits(q, q_scale, data, weights, lens, table, schedule, length, indices):
        cache = PagedCache(data.squeeze(2), INDEX_FP8)
        scores = ops.indexer_scores_paged(
            q, weights[:, None], cache, table, lens, max_seq_len=length
        )
        return scores[:, 0]

    @staticmethod
    def persistent_topk(scores, lens, out, workspace, topk, length):
        out.copy_(scores.topk(topk).indices)

    @staticmethod
    def get_mla_metadata():
        return None, None

    @staticmethod
    def flash_mla_with_kvcache(q, data, table, lens, value_dim, schedule, splits, scale, *rest):
        cache = PagedCache(data.squeeze(2), FP8_DS_MLA)
        return ops.sparse_decode(q, cache, rest[-1], softmax_scale=scale)


@pytest.mark.parametrize("indexer", [0, 1])
def test_the_step_of_the_peers_passes_the_same_gate(indexer, timer, monkeypatch):
    for namespace in ("_C", "_C_cache_ops", "deep_gemm"):
        monkeypatch.setattr(torch.ops, namespace, Fakes, raising=False)
    processors = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: processors)
    peer = object.__new__(step.StepOfPeers)
    peer.attention = Fakes
    monkeypatch.setattr(step, "SHARED", 0.9)  # of only 32 rows
    workload = step.DecodeStep(2, 4, 200, indexer)
    outcome = run.run_one(workload, [peer], timer, CEILINGS, STAMP)
    assert outcome.failures == outcome.refusals == {}
    assert outcome.rows[0].peer == step.StepOfPeers.name


@pytest.mark.parametrize("text", ['{"rows": []}', "[1]", "# a page"])
def test_files_without_lines_are_refused(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is not a time line"):
        timeline.load(path)


def test_host_times_are_saved_and_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    row = host.Row("sparse_decode", "batch 1", 2, 60.0, 12.5, 6.0)
    times = host.HostTimes("H200", "abc", "2026-01-01", {"torch": "2.11"}, 1.0, 3.0, (row,))
    path = tmp_path / "host.json"
    host.save(path, times)
    assert host.load(path) == times
    monkeypatch.setattr("sys.argv", ["bench", "--host-times", str(path)])
    assert main() == 0
    assert "sparse_decode | batch 1 | 2 | 60.0 | 12.5 | 6.0" in capsys.readouterr().out
    path.write_text("[]")
    with pytest.raises(ValueError, match=r"host\.json does not hold times of the host"):
        host.load(path)


def test_lines_are_saved_and_plotted(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    path = tmp_path / "launches.json"
    timeline.save(path, LINES)
    assert timeline.load(path) == LINES
    assert json.loads(path.read_text())[0]["launches"][1]["start_us"] == 1.0
    arguments = ["bench", "--launches", str(path), "--plot", str(tmp_path)]
    monkeypatch.setattr("sys.argv", arguments)
    assert main() == 0
    assert "batch 1: sparsemla, 2 launches, 5.5 us" in capsys.readouterr().out
    assert (tmp_path / "decode_step_launches.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("_few_kernel", "_few_kernel"),
        ("void at::native::gatherTopK<float, 2>(at::Tensor)", "gatherTopK"),
        ("void (anonymous namespace)::write<int>(int*)", "write"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "nvjet_tst_64x8_64x16_4x1_v_bz_TNT"),
    ],
)
def test_kernel_names_are_shortened(name, short):
    assert timeline._short(name) == short

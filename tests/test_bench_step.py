"""The benchmark of a whole decode step and its time line, without a GPU."""

import json

import pytest
import torch

from sparsemla.bench import run, step, timeline
from sparsemla.bench.__main__ import main
from sparsemla.bench.ceilings import Ceilings
from sparsemla.bench.peers import Torch, Unavailable
from sparsemla.bench.timing import Timer

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
def test_a_step_passes_its_gate(indexer, timer):
    outcome = run.run_one(step.DecodeStep(3, 4, 200, indexer), [], timer, CEILINGS, STAMP)
    assert outcome.failures == outcome.refusals == {}
    assert outcome.rows[0].case == f"batch 3, heads 4, context 200, indexer {indexer}"


@pytest.mark.parametrize("place", ["out", "slots", "twice"])
def test_a_wrong_step_gets_no_time(place, timer, monkeypatch):
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


def test_all_sizes_on_request_only():
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
    found, missing = step.with_step([Torch()], {"TileLang": "is not installed"})
    assert len(found) == 1
    assert list(missing) == ["TileLang", step.StepOfPeers.name]


def test_lines_go_to_a_file_and_into_a_picture(tmp_path, capsys, monkeypatch):
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
def test_names_of_kernels(name, short):
    assert timeline._short(name) == short

"""The benchmark of portable kernels beside others, on older GPUs too, without a GPU."""

import contextlib
import json

import pytest
import torch

from sparsemla_lab.bench import command, peers, report, run, timing, workloads
from sparsemla_lab.bench.ceilings import Ceilings
from sparsemla_lab.bench.peers.base import Peer, side

CPU = torch.device("cpu")
CEILINGS = Ceilings(copy_gbps=3000, bf16_tflops=400, fp8_tflops=0, launch_us=5)
STAMP = run.Stamp("0123456789ab", "2026-01-02", {"torch": "2.11.0"})
TOPK = workloads.SelectTopk(5, 300, 32)


@pytest.fixture(scope="module")
def timer():
    return timing.Timer(CPU, budget_ms=0.001)


class Portable(Peer):
    """A peer that Triton compiles."""

    name = "portable"
    portable = True

    def supports(self, workload):
        return None

    def prepare(self, workload, inputs):
        return [side(self.name, workload, inputs, lambda: workload.run(inputs))]


class Library(Portable):
    """A peer in CUDA C++."""

    name = "library"
    portable = False


class Uncompiled(Portable):
    """A peer whose types the target does not have, with the error of Triton's compiler."""

    name = "uncompiled"

    def prepare(self, workload, inputs):
        def fail():
            try:
                raise ValueError("type fp8e4nv not supported in this architecture\nand more")
            except ValueError as error:
                raise RuntimeError("at 25:9:\n    kv = tl.load(...)") from error

        def fail_alone():
            error = RuntimeError("at 1:0:\ndef kernel(...):\n^\nno such type")
            error.error_message = "no such type"
            raise error

        return [
            side(self.name, workload, inputs, fail),
            side("alone", workload, inputs, fail_alone),
        ]


def test_as_an_older_gpu_peers_run_that_triton_compiles(timer):
    found = [Library(), Portable(), peers.Torch()]
    outcome = run.run_one(TOPK, found, timer, CEILINGS, STAMP)
    assert [row.peer for row in outcome.rows] == ["library", "portable", "torch.topk"]
    outcome = run.run_one(TOPK, found, timer, CEILINGS, STAMP, "sm_80")
    (row,) = outcome.rows
    reason = "not all kernels are compiled for sm_80"
    assert outcome.refusals == {"library": reason, "torch": reason}
    assert (row.peer, row.note) == ("portable", f"without library, torch: {reason}")


def test_a_row_names_the_peers_that_refused_and_the_cause(timer):
    outcome = run.run_one(TOPK, [Uncompiled()], timer, CEILINGS, STAMP, "sm_80")
    (row,) = outcome.rows
    assert row.peer is None
    cause = "ValueError: type fp8e4nv not supported in this architecture (test_bench_portable.py:"
    assert row.note.startswith(f"without uncompiled: {cause}")
    assert "and more" not in row.note
    assert "; without alone: RuntimeError: no such type (test_bench_portable.py:" in row.note
    assert "none here (without uncompiled: ValueError" in report.cells(row)[5]


def test_which_peers_run_as_an_older_gpu():
    assert {kind.name for kind in (peers.Sparsemla, *peers.PEERS) if kind.portable} == {
        "sparsemla",
        "SGLang Triton",
        "SGLang triton_sparse_mla",
        "SGLang flash_mla_sm120_triton",
        "vLLM rocm_fp8_paged_mqa_logits_triton",
        "attn-gym",
    }
    assert not peers.Torch.portable


@pytest.fixture
def measuring(monkeypatch, timer):
    """The measuring command, on a CPU instead of a GPU; returns the order of its steps."""
    steps = []

    @contextlib.contextmanager
    def acting(name):
        steps.append(f"act as {name}")
        yield
        steps.append("end")

    def find(directory):
        steps.append(f"peers of {directory}")
        return [Library(), Portable()], {"FA3": "is not there"}

    monkeypatch.setattr(command, "Timer", lambda device: steps.append("timer") or timer)
    monkeypatch.setattr(command, "acting", acting)
    monkeypatch.setattr(command, "find_peers", find)
    monkeypatch.setattr(command, "measure", lambda timer, acting_as=None: CEILINGS)
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command.torch.cuda, "get_device_name", lambda: "stand-in")
    monkeypatch.setattr(command, "select_workloads", lambda *chosen: [TOPK])
    return steps


def test_peers_are_loaded_and_run_inside_the_stand_in(measuring, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(
        Portable,
        "prepare",
        lambda self, workload, inputs: measuring.append("first call") or [],
    )
    path = tmp_path / "as.json"
    assert command.bench(print, json=path, peers=tmp_path, acting_as="sm_80") == 0
    assert measuring == ["timer", "act as sm_80", f"peers of {tmp_path}", "first call", "end"]
    found = report.load(path)
    assert (found.device, [row.peer for row in found.rows]) == ("stand-in as sm_80", [None])
    assert "without library: not all kernels" in found.rows[0].note
    assert "without FA3: is not there" in capsys.readouterr().out


def test_rows_are_written_as_they_come(measuring, monkeypatch, tmp_path):
    """A run that is ended loses the workload that it was in, and no other."""
    path = tmp_path / "as.json"
    second = workloads.SelectTopk(6, 300, 32)

    def interrupt(self, device):
        rows = json.loads(path.read_text())["rows"]
        assert [(each["case"], each["peer"]) for each in rows] == [(TOPK.case, "portable")]
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "select_workloads", lambda *chosen: [TOPK, second])
    build = workloads.SelectTopk.build
    monkeypatch.setattr(
        workloads.SelectTopk,
        "build",
        lambda self, device: (interrupt if self is second else build)(self, CPU),
    )
    with pytest.raises(KeyboardInterrupt):
        command.bench(print, json=path, acting_as="sm_80")
    assert [each.case for each in report.load(path).rows] == [TOPK.case]

"""The benchmark of portable kernels beside others, on older GPUs too, without a GPU."""

import contextlib
import json
import runpy
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import test_bench
from sparsemla import BF16_576
from sparsemla_lab.bench import command, compiling, peers, portable, report, run, timing, workloads
from sparsemla_lab.bench.__main__ import main
from sparsemla_lab.bench.ceilings import Ceilings
from sparsemla_lab.bench.peers.base import Peer, side

CPU = torch.device("cpu")
CEILINGS = Ceilings(copy_gbps=3000, bf16_tflops=400, fp8_tflops=0, launch_us=5)
STAMP = run.Stamp("0123456789ab", "2026-01-02", {"torch": "2.11.0"})
TOPK = workloads.SelectTopk(5, 300, 32)
TABLES = runpy.run_path(str(Path(__file__).parent.parent / "docs" / "tables.py"))


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
        "SGLang candidate_blocks",
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


def test_all_kernels_are_compiled_first_if_asked(measuring, monkeypatch, tmp_path):
    monkeypatch.setattr(
        command, "compile_first", lambda *given: measuring.append(("compile", *given))
    )
    given = {"op": "select_topk", "case": "32", "cases": "portable", "acting_as": "sm_89"}
    assert command.bench(print, jobs=3, **given) == 0
    chosen = "select_topk", False, "32", "portable"
    assert measuring[0] == ("compile", chosen, 1, None, "sm_89", 3)
    assert measuring[1] == "timer"
    with pytest.raises(ValueError, match="jobs must be at least 1, got 0"):
        command.bench(print, jobs=0)
    path = tmp_path / "other.json"
    report.save(path, report.Report("another GPU", CEILINGS, []))
    measuring.clear()
    with pytest.raises(ValueError, match="json must name a file of stand-in or a new one"):
        command.bench(print, jobs=3, json=path)
    assert measuring == []


def test_processes_compile_every_side_of_every_workload_once(monkeypatch):
    ran, started = [], []

    class Threads(ThreadPoolExecutor):
        def __init__(self, jobs, mp_context):
            assert mp_context.get_start_method() == "spawn"
            started.append(jobs)
            super().__init__(jobs)

    def count(name):
        return workloads.Side(name, lambda: ran.append(name) or (), lambda got: None)

    class Counted(workloads.SelectTopk):
        def build(self, device):
            if self.batch == 3:
                raise torch.OutOfMemoryError("no memory")
            return {}

        def ours(self, inputs):
            return count(f"ours {self.batch}")

    class Others(Portable):
        def prepare(self, workload, inputs):
            def fail():
                raise RuntimeError("does not compile")

            failing = workloads.Side("failing", fail, lambda got: None)
            return [failing, count(f"theirs {workload.batch}")]

    chosen = None, False, None, "portable"
    asked = []
    monkeypatch.setattr(compiling, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(
        compiling,
        "select_workloads",
        lambda *given: asked.append(given) or [Counted(n, 64, 8) for n in range(7)],
    )
    monkeypatch.setattr(compiling, "find_peers", lambda directory: ([Library(), Others()], {}))
    # Both patch a process's modules.
    monkeypatch.setattr(compiling, "acting", lambda name: contextlib.nullcontext())
    monkeypatch.setattr(compiling, "tuning_in_threads", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def fail():
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", fail)
    compiling.compile_first(chosen, 7, None, "sm_80", 3)
    assert started == [3]
    assert asked == [chosen] * 3
    numbers = [0, 1, 2, 4, 5, 6]  # number 3 does not fit, and the run reports it
    assert sorted(ran) == sorted(f"{who} {n}" for n in numbers for who in ("ours", "theirs"))


def test_a_tuner_compiles_all_candidates_at_the_same_time(monkeypatch):
    pytest.importorskip("triton")
    from triton.runtime.autotuner import Autotuner

    at_once = threading.Barrier(3, timeout=10)  # one after the other would wait for ever
    compiled = []

    def warmup(*arguments, grid, **options):
        at_once.wait()
        if options["BLOCK"] == 2:
            raise RuntimeError("does not compile")
        compiled.append((arguments, grid, options))

    kept = [SimpleNamespace(all_kwargs=lambda n=n: {"BLOCK": n}) for n in (1, 2, 3)]
    monkeypatch.setattr(Autotuner, "prune_configs", lambda self, options: kept)
    tuner = object.__new__(Autotuner)
    tuner.nargs, tuner.fn = {"x": "tensor"}, SimpleNamespace(warmup=warmup)
    with compiling.tuning_in_threads():
        assert tuner.prune_configs({"grid": (7,), "warmup": False, "H": 16}) == kept
    options = [{"H": 16, "BLOCK": 1}, {"H": 16, "BLOCK": 3}]
    assert sorted(compiled, key=str) == [(("tensor",), (1,), each) for each in options]
    assert tuner.prune_configs({"H": 16}) == kept
    assert len(compiled) == 2


def test_the_portable_set_has_each_case_once():
    found = run.select_workloads(None, cases="portable")
    names = [(each.op, each.case, each.label) for each in found]
    assert len(set(names)) == len(names)
    bf16 = [
        each
        for each in found
        if isinstance(each, workloads.SparseDecode) and each.format is BF16_576
    ]
    assert {(each.batch, each.heads) for each in bf16} == {
        (batch, heads) for batch in (1, 16, 128) for heads in (8, 16, 64, 128)
    }
    for op, count in {
        "sparse_prefill": 12,
        "sparse_decode": 30,
        "dense_decode": 4,
        "indexer_scores": 1,
        "indexer_scores_paged": 2,
        "indexer_topk": 3,
        "project_heads": 6,
        "decode_step": 6,
    }.items():
        assert len(run.select_workloads(op, cases="portable")) == count, op
    some = run.select_workloads(None, case="^decode_step.*heads 16", cases="portable")
    assert [each.batch for each in some] == [1, 16, 128]


def test_sets_that_do_not_exist_or_have_one_size_are_refused(capsys, monkeypatch):
    with pytest.raises(ValueError, match="set must be one of portable; got 'all'"):
        run.select_workloads(None, cases="all")
    with pytest.raises(ValueError, match="full must not be given with the set portable"):
        run.select_workloads(None, full=True, cases="portable")
    with pytest.raises(ValueError, match=r"op must be one of sparse_decode, .*gather_dequant"):
        run.select_workloads("gather_dequant", cases="portable")
    for arguments, name in (
        (["--set", "portable", "--table", "x.json"], "set"),
        (["--as", "sm_80", "--table", "x.json"], "as"),
        (["--jobs", "2", "--table", "x.json"], "jobs"),
    ):
        monkeypatch.setattr("sys.argv", ["bench", *arguments])
        assert main() == 2
        assert f"{name} must not be given with table" in capsys.readouterr().err


def row(workload, **changes):
    """A row of a workload, whose peer takes twice the time."""
    named = {"op": workload.op, "case": workload.case, "selection": workload.label}
    named |= {"shape": workload.shape, "peer": "theirs", "peer_timed": "graph"}
    return test_bench.row(**named | changes)


def test_the_table_of_the_set_has_the_fastest_peer_of_the_newest_run(tmp_path, monkeypatch):
    _, second, third, *_ = portable.portable_workloads()
    found = report.Report(
        "H100 as sm_80",
        CEILINGS,
        [
            row(TOPK),
            row(third, peer="sparsemla in place", peer_us=5.0, ratio=0.5, note="without FA3: no"),
            row(second, peer="slow", peer_us=30.0, ratio=3.0),
            row(second, peer="fast", peer_us=8.0, ratio=0.8),
            row(second, peer="older", peer_us=1.0, ratio=0.1, date="2025-01-01"),
        ],
    )
    path = tmp_path / "as.json"
    report.save(path, found)
    monkeypatch.setitem(TABLES["with_tables"].__globals__, "ROOT", tmp_path)
    text = TABLES["with_tables"]("# Page\n\n<!-- portable set of as.json -->\n")
    lines = text.splitlines()
    assert lines[2].startswith("H100 as sm_80: copy 3000 GB/s, bf16 matmul 400 TFLOP/s")
    assert lines[2].endswith(f"Measured {STAMP.date} at commit {STAMP.commit}.")
    assert lines[4].startswith("| op | case | us | % of floor | fastest peer |")
    assert lines[6:] == [
        f"| `sparse_decode` | {second.case}, random | 10.0 ±10% | 25 | fast | 8.0 ±162% | 0.80 |",
        f"| `sparse_decode` | {third.case}, random | 10.0 ±10% | 25 "
        "| none here (without FA3: no) |  |  |",
    ]


def test_pages_with_the_set_show_the_committed_files():
    page = Path(__file__).parent.parent / "docs" / "results-older-gpus.md"
    text = TABLES["with_tables"](page.read_text(encoding="utf-8"))
    for target in ("sm_80", "sm_89"):
        found = report.load(page.parent.parent / "benchmarks" / f"h200-as-{target}.json")
        measured = {each.workload for each in found.rows}
        shown = [
            each
            for each in portable.portable_workloads()
            if (each.op, each.case, each.label) in measured
        ]
        assert shown
        assert portable.portable_table(found) in text
        for each in shown:
            assert f"| `{each.op}` | {each.case}" in text


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

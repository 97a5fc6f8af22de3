"""``sparsemla verify`` passes correct ops; it fails, names and records wrong ops."""

import json
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
from typer.testing import CliRunner

import sparsemla
import sparsemla_lab
from sparsemla import FP8_584, dispatch
from sparsemla.ops import branch
from sparsemla_lab.testing.cases import Draw, dense_decode_case, sparse_decode_case
from sparsemla_lab.testing.compare import assert_equal
from sparsemla_lab.verify import beside, run
from sparsemla_lab.verify.command import verify
from sparsemla_lab.verify.issue import hardware, markdown
from sparsemla_lab.verify.matrix import MATRIX
from sparsemla_lab.verify.properties import OVERWRITING, check_alone, overwrite

FIELDS = {
    "commit",
    "dirty",
    "date",
    "torch",
    "triton",
    "python",
    "device",
    "kernel_hash",
    "quick",
    "beside",
    "shared",
    "ops",
}


@pytest.fixture
def command(tmp_path, monkeypatch):
    """Run the command in an empty directory; gives its result and its report, or None."""
    monkeypatch.chdir(tmp_path)
    app = typer.Typer()
    app.command()(verify)

    def invoke(*arguments):
        result = CliRunner().invoke(app, [*arguments, "--json", "deep/report.json"])
        report = Path("deep/report.json")
        return result, json.loads(report.read_text()) if report.exists() else None

    return invoke


@pytest.fixture
def wrap_kernels(monkeypatch):
    """Wrap every implementation in a function of the launcher and the arguments."""

    def put(around):
        choose = dispatch.choose

        def choosing(op, call):
            kernel = choose(op, call)

            def launch(**fields):
                kernel.load()(op.arguments(**fields))

            return replace(kernel, load=lambda: lambda call: around(launch, call._asdict()))

        monkeypatch.setattr(dispatch, "choose", choosing)

    return put


def test_every_op_has_cases():
    assert set(MATRIX) == set(sparsemla.ops.__all__)
    for cases in MATRIX.values():
        names = [case.name for case in cases]
        assert len(set(names)) == len(names)
        assert any(case.quick and not case.large for case in cases)


@pytest.mark.parametrize("op", MATRIX)
def test_two_draws_of_a_case_have_the_same_shapes_and_other_values(op):
    for case in run.chosen_cases(op, "cpu", quick=True):
        if case.replayed:
            first, second = case.build(Draw(0)), case.build(Draw(1))
            lead = next(value for value in first.values() if isinstance(value, torch.Tensor))
            before = lead.clone()
            overwrite(first, second)
            assert not torch.equal(before.float(), lead.float()) or lead.numel() < 2, case.name


def test_replayed_batches_have_requests_of_length_zero():
    for op, name in (
        ("gather_dequant", "seq_lens"),
        ("indexer_scores_paged", "seq_lens"),
        ("indexer_topk", "seq_lens"),
        ("dense_decode", "seq_lens"),
        ("sparse_decode", "topk_lengths"),
    ):
        lengths = [case.build(Draw(1)).get(name) for case in MATRIX[op] if case.quick]
        assert any(some is not None and (some == 0).any() for some in lengths), op


def test_correct_ops_pass(device):
    seen = []
    report = run.verify(
        device,
        quick=True,
        ops=["fused_rope_rmsnorm_quant", "dense_decode"],
        on_case=lambda op, case: seen.append(op),
    )
    assert report.passed
    for op in report.ops:
        assert op.cases == seen.count(op.op) > 0
        assert set(op.worst) == set(op.share) == set(op.tolerance)
        assert all(share <= 1 for share in op.share.values())
        assert op.properties["repeatable"] == run.Property(op.cases, 0)
        assert ("graph_replay" in op.properties) == (device == "cuda")
    assert report.ops[0].tolerance["cache, other rows"] == "exact"
    assert report.ops[1].properties["batch_invariant"].checked > 0


def test_the_report_lists_the_tested_ops(command):
    result, report = command(
        "--quick", "--op", "to_slots", "--op", "select_topk", "--device", "cpu"
    )
    assert result.exit_code == 0
    assert set(report) == FIELDS
    assert [op["op"] for op in report["ops"]] == ["to_slots", "select_topk"]
    assert report["quick"] is True
    assert report["device"] == "cpu"
    assert report["torch"] == torch.__version__
    assert len(report["kernel_hash"]) == 64
    assert (report["commit"] is None) == (report["dirty"] is None)
    lines = [line.split()[:3] for line in result.stdout.splitlines() if " cases " in line]
    assert ["to_slots", "cpu", "3"] in lines
    assert report["ops"][0]["tier"] == "cpu"


def test_no_report_is_written_by_default(tmp_path):
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "sparsemla_lab.verify",
            "--quick",
            "--op",
            "to_slots",
            "--device",
            "cpu",
        ],
        cwd=tmp_path,
        # It may name the place of bytecode, without which torch is compiled again.
        env=os.environ
        | {
            "PYTHONPATH": os.pathsep.join(
                str(Path(package.__file__).parents[1]) for package in (sparsemla, sparsemla_lab)
            ),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert "cases, all passed" in result.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("checkout", [False, True])
def test_full_run_in_a_checkout_writes_its_report(monkeypatch, tmp_path, checkout):
    """A quick run would replace a full report there."""
    from sparsemla_lab.verify import command as module
    from sparsemla_lab.verify import run

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "_in_checkout", lambda: checkout)
    monkeypatch.setattr(run, "chosen_cases", lambda op, device, quick: MATRIX[op][:1])
    app = typer.Typer()
    app.command()(verify)
    for arguments, written in ((["--quick"], []), ([], ["benchmarks"] * checkout)):
        result = CliRunner().invoke(app, ["--op", "to_slots", "--device", "cpu", *arguments])
        assert result.exit_code == 0
        assert [path.name for path in tmp_path.iterdir()] == written


def test_checkout_is_detected(monkeypatch, tmp_path):
    from sparsemla_lab.verify import command as module

    monkeypatch.chdir(Path(sparsemla_lab.__file__).parents[3])
    assert module._in_checkout()
    monkeypatch.chdir(tmp_path)
    assert not module._in_checkout()


def test_a_wrong_kernel_fails(command, wrap_kernels):
    def wrong(launch, arguments):
        launch(**arguments)
        arguments["out"].view(-1)[0] += 0.5

    wrap_kernels(wrong)
    result, report = command("--quick", "--op", "merge_states", "--device", "cpu")
    (op,) = report["ops"]
    assert result.exit_code == 1
    assert "FAILED" in result.stdout
    assert op["failed"] == op["cases"] == len(op["failures"])
    assert op["worst"]["out"] >= 0.49
    assert op["share"]["out"] > 1
    assert "at [0, 0, 0]" in op["failures"][0]
    assert op["failures"][0].startswith(MATRIX["merge_states"][1].name)


def test_a_kernel_that_raises_fails(command, wrap_kernels):
    def raising(launch, arguments):
        raise RuntimeError("out of everything")

    wrap_kernels(raising)
    result, report = command("--quick", "--op", "to_slots", "--device", "cpu")
    assert result.exit_code == 1
    assert report["ops"][0]["failed"] == 3
    assert "RuntimeError: out of everything" in report["ops"][0]["failures"][0]


def test_kernel_with_varying_bits_fails(wrap_kernels):
    calls = []

    def varying(launch, arguments):
        launch(**arguments)
        calls.append(None)
        arguments["out"] += 1e-7 * (len(calls) % 2)

    wrap_kernels(varying)
    (op,) = run.verify("cpu", quick=True, ops=["indexer_scores"]).ops
    assert op.properties["repeatable"].failed > 0
    assert any("rerun" in failure for failure in op.failures)


def test_a_kernel_that_depends_on_the_batch_fails(wrap_kernels):
    def depending(launch, arguments):
        launch(**arguments)
        arguments["lse"] += 1e-6 * len(arguments["q"])

    wrap_kernels(depending)
    (op,) = run.verify("cpu", quick=True, ops=["dense_decode"]).ops
    assert op.properties["batch_invariant"].failed == op.properties["batch_invariant"].checked > 0
    assert any("alone" in failure for failure in op.failures)


def test_a_row_without_keys_that_is_almost_zero_fails(wrap_kernels):
    def almost(launch, arguments):
        launch(**arguments)
        arguments["out"][arguments["lse"].isneginf()] = 1e-30

    wrap_kernels(almost)
    (op,) = run.verify("cpu", quick=True, ops=["dense_decode"]).ops
    assert (
        op.properties["empty_rows"].failed == op.properties["empty_rows"].checked == op.failed > 0
    )
    assert all("rows without a key" in failure for failure in op.failures)


@pytest.mark.parametrize("difference", [0, 1e-6])
def test_a_kernel_that_takes_a_permission_unseen_fails(difference, wrap_kernels, monkeypatch):
    op = "sparse_prefill"

    def permitted(launch, arguments):
        launch(**arguments)
        arguments["lse"] += difference * (arguments["allow_fp8_mma"])

    wrap_kernels(permitted)
    some = [case for case in MATRIX[op] if case.name == "FP8 MMA, 40 heads"]
    monkeypatch.setitem(MATRIX, op, some)
    (report,) = run.verify("cpu", ops=[op]).ops
    assert report.properties["bf16_bits"] == run.Property(1, int(difference > 0))
    differs = any("without FP8 MMA, lse" in failure for failure in report.failures)
    assert differs == (difference > 0)
    assert report.properties["repeatable"].failed == 0


def test_a_branch_that_depends_on_the_batch_fails(monkeypatch):
    products = branch.project_heads

    def depending(*args, batch_invariant, **kwargs):
        out = products(*args, batch_invariant=batch_invariant, **kwargs)
        out += len(out) / 8
        return out

    monkeypatch.setattr(branch, "project_heads", depending)
    case = next(case for case in MATRIX["decode_branch"] if case.alone)
    with pytest.raises(AssertionError, match="request 0 alone, 1 threads, out"):
        check_alone("decode_branch", case.build(Draw(0)))


def test_kernel_that_writes_other_rows_fails(wrap_kernels):
    def straying(launch, arguments):
        launch(**arguments)
        cache = arguments["cache"]
        free = set(range(cache.num_slots)) - set(arguments["slot_mapping"].tolist())
        cache.write(torch.tensor([min(free)]), torch.ones(1, cache.format.head_dim))

    wrap_kernels(straying)
    (op,) = run.verify("cpu", quick=True, ops=["append_index_keys"]).ops
    assert op.failed == op.cases
    assert any("other rows" in failure for failure in op.failures)


def test_a_missing_gpu_is_refused(command, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result, report = command("--quick", "--device", "cuda")
    assert result.exit_code == 2
    assert "device must be cpu on this machine, got 'cuda': torch" in result.stderr
    assert report is None


def test_unknown_ops_and_devices_are_refused(command):
    for arguments in (["--op", "sparse"], ["--device", "tpu"]):
        result, report = command("--quick", *arguments)
        assert result.exit_code == 2
        assert "must be" in result.stderr
        assert report is None


def test_large_cases_need_a_gpu():
    names = [case.name for case in run.chosen_cases("select_topk", "cpu", quick=False)]
    assert "300000 columns" not in names
    assert "300000 columns" in [
        case.name for case in run.chosen_cases("select_topk", "cuda", False)
    ]


def test_overwrite_copies_every_byte():
    first = sparse_decode_case(Draw(0), format=FP8_584, num_layers=2, strided=True)
    second = sparse_decode_case(Draw(1), format=FP8_584, num_layers=2, strided=True)
    overwrite(first, second)
    for got, wanted in zip(first["cache"].fields(), second["cache"].fields(), strict=True):
        assert_equal("cache", got, wanted)
    assert_equal("q", first["q"], second["q"])
    assert first["q"].data_ptr() != second["q"].data_ptr()


def test_overwrite_refuses_other_shapes():
    first, second = (
        dense_decode_case(Draw(0), format=FP8_584, seq_lens=lens) for lens in ([9], [9, 70])
    )
    with pytest.raises(ValueError, match="two draws of a case differ"):
        overwrite(first, second)
    with pytest.raises(ValueError, match="two draws of a case differ"):
        overwrite({"topk": 3}, {"topk": 4})


def test_ops_that_write_their_arguments_are_known():
    for op in set(MATRIX) - set(OVERWRITING):
        case = next(case for case in MATRIX[op] if case.quick)
        arguments, untouched = case.build(Draw(0)), case.build(Draw(0))
        getattr(sparsemla, op)(**arguments)
        for name, value in arguments.items():
            if isinstance(value, torch.Tensor):
                assert_equal(f"{op}: {name}", value, untouched[name])


def test_processes_share_the_cases(monkeypatch):
    names = ["to_slots", "merge_states"]
    monkeypatch.setattr(run, "GROUP", 2)
    alone = run.verify("cpu", quick=True, ops=names)
    shared = run.verify("cpu", quick=True, ops=names, jobs=2)
    assert [one.op for one in shared.ops] == names
    assert [one.worst for one in shared.ops] == [one.worst for one in alone.ops]
    assert shared.passed


def test_no_op_begins_after_an_interrupt(monkeypatch):
    begun = []

    class Threads(ThreadPoolExecutor):
        def __init__(self, jobs, mp_context):
            super().__init__(jobs)

    def note(op, *_):
        begun.append(op)
        time.sleep(0.1)
        return run._Group([], 0.1)

    def interrupt(report):
        raise KeyboardInterrupt

    monkeypatch.setattr(run, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(run, "_run_group", note)
    with pytest.raises(KeyboardInterrupt):
        run.verify("cpu", jobs=2, on_op=interrupt)
    assert len(begun) < len(MATRIX)


def test_torchs_default_dtype_does_not_matter(monkeypatch):
    # Without what takes most of the time and has no dtype of its own: reruns, and two cases of
    # sizes that only matter to kernels of GPUs.
    chosen, large = run.chosen_cases, ("maxima that climb, 64 heads", "140 requests of 64 heads")
    monkeypatch.setattr(run, "QUICK_RERUNS", 0)
    monkeypatch.setattr(
        run,
        "chosen_cases",
        lambda *arguments: [case for case in chosen(*arguments) if not case.name.startswith(large)],
    )
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as vLLM does
    try:
        report = run.verify("cpu", quick=True)
    finally:
        torch.set_default_dtype(default)
    assert report.passed, [op.failures for op in report.ops]


def test_calls_are_repeated_beside_other_processes(monkeypatch):
    monkeypatch.setattr(beside, "SECONDS", 0.05)
    runs = iter(range(100))

    def build():
        return lambda: {"out": torch.tensor([0.0, next(runs) // 3])}  # another from run 4 on

    same = beside.Call("same", "a case", lambda: lambda: {"out": torch.zeros(2)})
    found = list(beside.rerun_beside([same, beside.Call("differs", "a case", build)], "cpu", 1))
    assert [one.op for one in found] == ["same", "differs"]
    assert found[0].failure is None
    assert found[0].runs > 3
    assert found[1].runs == 3
    assert "differs, run 3, out" in found[1].failure


def test_memory_that_a_repeated_call_does_not_write_is_poisoned(monkeypatch):
    monkeypatch.setattr(beside, "SECONDS", 0.0)
    first = iter([True])

    def run():
        out = torch.empty(3)
        return {"out": out.zero_() if next(first, False) else out}

    (found,) = beside.rerun_beside([beside.Call("lazy", "a case", lambda: run)], "cpu", 1)
    assert "got nan" in found.failure


def test_rerun_beside_fails_if_a_busy_process_ends_early():
    calls = [beside.Call("same", "a case", lambda: lambda: {"out": torch.zeros(2)})]
    with pytest.raises(RuntimeError, match="ended early"):
        list(beside.rerun_beside(calls, "nowhere", 1))


def test_every_op_has_calls_to_repeat():
    for op in MATRIX:
        for device in ("cpu", "cuda"):
            calls = beside.calls_of(op, device)
            assert calls, op
            assert {call.op for call in calls} == {op}
    assert {one.op for one in beside.LONG} < set(MATRIX)


def test_repeated_calls_are_in_the_report(command):
    result, report = command("--quick", "--op", "to_slots", "--device", "cpu", "--beside", "1")
    assert result.exit_code == 0
    assert report["beside"] == 1
    assert [call["op"] for call in report["shared"]] == ["to_slots"] * 3
    assert all(call["runs"] > 0 and call["failure"] is None for call in report["shared"])
    assert "beside 1 processes 3 calls, 0 differed" in result.stdout


@pytest.mark.parametrize("name", ["sm_75", "gfx942", "H100"])
def test_a_cpu_acts_as_a_gpu_with_kernels_in_gluon(command, name):
    result, report = command("--quick", "--op", "to_slots", "--device", "cpu", "--as", name)
    assert result.exit_code == 2
    assert report is None
    names = "sm_80, sm_86, sm_89, sm_90, sm_100, sm_120"
    assert f"a CPU can act as {names}; got '{name}'" in result.stderr


def printed_report(command, *arguments):
    """The exit code, and the Markdown as a title, its facts, its rows and the lines after them."""
    result, _ = command("--quick", "--report", "--device", "cpu", *arguments)
    title, facts, table, *rest = result.stdout.strip().split("\n\n")
    pairs = (line.removeprefix("- ").split(": ", 1) for line in facts.splitlines())
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]
    return result.exit_code, title, dict(pairs), rows, rest


def test_the_report_for_an_issue(command):
    ops = ("to_slots", "select_topk")
    code, title, facts, rows, rest = printed_report(command, *(f"--op={op}" for op in ops))
    assert code == 0
    assert title == "### sparsemla verify, cpu: 10 of 10 cases passed"
    assert facts["sparsemla"].startswith(f"{sparsemla.__version__}, commit ")
    assert facts["torch"].startswith(f"{torch.__version__}, Triton ")
    assert facts["tiers that ran"] == "cpu"
    assert facts["run"].startswith("quick cases, ")
    assert re.fullmatch(r"select_topk \d+ us", facts["typical calls"])
    assert [row[:5] for row in rows] == [
        ["to_slots", "cpu", "3", "0", ""],
        ["select_topk", "cpu", "7", "0", ""],
    ]
    assert rest == []


def test_the_report_names_failures(command, wrap_kernels):
    """Of a wrong kernel there is no time."""

    def wrong(launch, arguments):
        launch(**arguments)
        arguments["out"].view(-1)[0] += 0.5 + torch.rand(())

    wrap_kernels(wrong)
    code, title, facts, rows, (failures,) = printed_report(command, "--op=merge_states")
    assert code == 1
    assert title.endswith("cpu: 0 of 3 cases passed")
    assert "typical calls" not in facts
    assert rows[0][:4] == ["merge_states", "cpu", "3", "3"]
    assert rows[0][4].startswith("repeatable 3 of 3")
    fence, *lines, end = failures.splitlines()
    assert (fence, end) == ("```text", "```")
    assert len(lines) == 6
    assert all(line.startswith("merge_states, ") for line in lines[:5])
    assert re.fullmatch(r"and \d+ more", lines[5])


def test_the_report_of_all_ops_is_short(monkeypatch):
    failing = run.OpReport("", "cpu", 9, 3, {}, {}, {}, {}, 1.0, (999 * "long " + 999 * "x\n",) * 3)
    ops = tuple(replace(failing, op=op) for op in MATRIX)
    found = replace(run.verify("cpu", quick=True, ops=["to_slots"]), ops=ops, beside=2)
    ops = ops[0], replace(ops[1], tier="sm80+triton"), replace(ops[2], tier=""), *ops[3:]
    text = markdown(replace(found, ops=ops), "cpu")
    assert "- tiers that ran: cpu, sm80, triton\n" in text
    assert all(f"| {op} | " in text for op in MATRIX)
    assert len(text.splitlines()) < len(MATRIX) + 22  # a line for each op
    assert max(map(len, text.splitlines())) < 200


def test_the_report_names_the_gpu_and_its_driver(monkeypatch, tmp_path):
    gpu = {"name": "NVIDIA A100", "major": 8, "minor": 0, "multi_processor_count": 108}
    found = SimpleNamespace(**gpu, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    monkeypatch.setenv("PATH", str(tmp_path))
    for output, driver in ((None, "unknown"), ("570.1\n570.1", "570.1")):
        if output is not None:
            (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{output}'")
            (tmp_path / "nvidia-smi").chmod(0o755)
        assert hardware() == f"NVIDIA A100, sm_80, 80 GiB, 108 SMs, driver {driver}"


def test_a_time_that_fails_leaves_the_report(monkeypatch):
    def fail(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr("sparsemla_lab.bench.timing.Timer.interleaved", fail)
    found = run.verify("cpu", quick=True, ops=["select_topk"])
    assert "- typical calls: select_topk fails (OutOfMemoryError)\n" in markdown(found, "cpu")

"""The scripts that measure run, and refuse to time wrong results."""

from __future__ import annotations

import json
import re
import sys
from contextlib import redirect_stdout
from dataclasses import asdict, replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

import processes
from sparsemla import BF16_576, FP8_DS_MLA, INDEX_FP8, PagedCache
from sparsemla_lab.bench import report
from sparsemla_lab.testing.compare import assert_equal
from sparsemla_lab.testing.ranks import shared

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("vllm_engine.py", "--serve"),
        ("vllm_invariance.py", "--share-gpu"),
        ("vllm_first_request.py", "--serve"),
        ("vllm_bench.py", "--experts"),
        ("vllm_places.py", "--places"),
        ("vllm_connectors.py", "--ranks"),
        ("sglang_hooks.py", "--fa3"),
        ("sglang_engine.py", "--at-once"),
    ],
)
def test_the_scripts_for_engines_say_what_they_take(run_python, name, option):
    """They need a GPU and the engine."""
    code = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    done = run_python(code, str(BENCHMARKS / name), "--help")
    assert done.returncode == 0, done.stderr
    assert option in done.stdout


def test_sglang_reads_vllms_scores_in_the_columns_of_their_keys(monkeypatch):
    """The wheel's kernel writes the score of a row's first key into column 0, and no others."""
    import sglang_hooks
    from sparsemla.compat import deep_gemm

    def of_the_wheel(q, kv, weights, ks, ke, max_seqlen_k):
        logits = deep_gemm.fp8_fp4_mqa_logits(q, kv, weights, ks, ke, False, max_seqlen_k)
        written = torch.arange(max_seqlen_k) < (ke - ks)[:, None]
        return logits.masked_fill(~written, torch.nan)

    wheel = SimpleNamespace(fp8_fp4_mqa_logits=of_the_wheel, fp8_fp4_paged_mqa_logits=None)
    monkeypatch.setitem(sys.modules, "deep_gemm", wheel)
    assert sglang_hooks.complete_deep_gemm()
    generator = torch.Generator().manual_seed(0)
    lengths, new = (37, 5, 21), (3, 5, 4)  # tokens of three requests, and those of this step
    firsts = [sum(lengths[:i]) for i in range(3)]
    rows = [
        (k, k + n - m + j + 1)
        for k, n, m in zip(firsts, lengths, new, strict=True)
        for j in range(m)
    ]
    ks, ke = torch.tensor(rows, dtype=torch.int32).T.contiguous()
    q = torch.randn(12, 4, 32, generator=generator).to(torch.float8_e4m3fn)
    keys = torch.randn(63, 32, generator=generator).to(torch.float8_e4m3fn)
    kv = keys, torch.rand(63, generator=generator) + 0.1
    weights = torch.randn(12, 4, generator=generator)
    found = wheel.fp8_mqa_logits(q, kv, weights, ks, ke, clean_logits=False)
    expected = deep_gemm.fp8_mqa_logits(q, kv, weights, ks, ke)
    seen = expected > -torch.inf
    assert found.shape == (12, 63)
    assert found.stride() == (64, 1)
    assert torch.equal(found[seen], expected[seen])


@pytest.mark.parametrize("name", ["glm5_next", "hy_v4"])
def test_transformers_serves_the_weights_of_the_engine(name):
    """A process writes the model, another one makes it again for transformers' class."""
    import vllm_engine

    both = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        both.append(vllm_engine.TRANSFORMERS[name]().state_dict())
    assert both[0].keys() == both[1].keys()
    assert [name for name in both[0] if not torch.equal(both[0][name], both[1][name])] == []


@pytest.mark.parametrize(
    ("second", "cached", "wrong"),
    [
        ([5, 6], 64, None),
        ([7, 6], 64, "answers [1] are not the same again"),
        ([5, 6], 0, "no prefix of prompts [1] was found in the cache"),
    ],
    ids=["good", "other tokens", "no prefix"],
)
def test_answers_that_differ_from_cached_prefixes_fail(
    second, cached, wrong, capsys, monkeypatch, tmp_path
):
    import sglang_engine

    # A prompt of less than a page, and one of a page and a token.
    answers = [{"prompt": [-1.0] * 62, "tokens": [3, 4], "again": [3, 4], "cached": 0}]
    answers += [{"prompt": [-1.0] * 64, "tokens": [5, 6], "again": second, "cached": cached}]
    report = {"seconds": [1.0, 2.0], "calls": {}, "compiled": [], "loaded": [], "classes": []}
    report |= {"answers": answers, "accepted": [1.0]}
    (tmp_path / "sglang.json").write_text(json.dumps(report))
    nothing = {"deepseek_v32": sglang_engine.Model(lambda folder: None)}
    monkeypatch.setattr(sglang_engine, "MODELS", nothing)
    monkeypatch.setattr(sglang_engine, "serve_apart", lambda *args, **_: {"sglang"})
    monkeypatch.setattr(sys, "argv", ["", "--folder", str(tmp_path), "--only", "sglang"])
    assert sglang_engine.main() == (wrong is not None)
    said = [line for line in capsys.readouterr().out.splitlines() if "FAILED" in line]
    assert said == ([] if wrong is None else [f"sglang: FAILED, {wrong}"])


def test_enable_is_timed_beside_transformers_where_tokens_agree(capsys, monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    import transformers_bench as bench

    monkeypatch.setattr(bench, "CHUNK", 32)
    monkeypatch.setattr(bench, "TIMED", 2)
    small = {"hidden_size": 256, "intermediate_size": 64, "q_lora_rank": 64, "vocab_size": 512}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 4, "index_n_heads": 4}
    options = {"layers": 1, "graphs": False, "index_topk": 48, **small}
    path = tmp_path / "rows.json"
    assert bench.run("cpu", [80], path=path, **options) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["side"] for row in rows] == ["transformers", "bf16_576v512", "fp8_ds_mla"]
    assert [row["cache_bytes"] for row in rows][1:] == [1408, 788]
    assert all(min(row["whole_s"], row["chunked_s"], row["step_ms"]) > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 5

    measure = bench.measure

    def wrong(model, ids, name, **options):
        row, tokens = measure(model, ids, name, **options)
        return row, tokens if name != "fp8_ds_mla" else [0, *tokens[1:]]

    monkeypatch.setattr(bench, "measure", wrong)
    assert bench.run("cpu", [80], path=path, **options) == 1
    assert "fp8_ds_mla: OTHER tokens" in capsys.readouterr().out
    assert len(json.loads(path.read_text())["rows"]) == 2


def test_the_loss_of_rows_is_measured(capsys):
    """More so in fewer bytes, even over a few of them."""
    pytest.importorskip("transformers")
    import row_loss

    found = row_loss.measure(2, 256, pairs=2)
    assert [row["bytes"] for row in found] == [1152, 656, 368]
    assert [row["values"] for row in found] == [4, 4, 4]
    changes = [row["change_of_a_byte"] for row in found]
    assert 0 == changes[0] < changes[1] < changes[2]
    assert found[0]["more"] == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


def test_modes_that_need_more_than_there_is_are_left_out_with_a_line(capsys):
    from vllm_engine import MODES, NCCL, PAIRS, select_modes

    one = [
        name
        for name, mode in MODES.items()
        if (mode.model, mode.gpus, mode.acting_as) == ("deepseek_v32", 1, None)
    ]
    assert select_modes("deepseek_v32", None, 1, ()) == one
    lines = capsys.readouterr().out.splitlines()
    assert "both, dcp2: left out, needs 2 GPUs and finds 1" in lines
    assert "both, tp8 dcp4: left out, needs 8 GPUs and finds 1" in lines
    assert len(lines) == 33
    old = select_modes("deepseek_v32", 2, 2, (2, 28, 9))
    line = "both, dcp2: left out, needs NCCL 2.29.7 and finds 2.28.9"
    assert line in capsys.readouterr().out.splitlines()
    assert {MODES[name].dcp for name in old} == {1}
    two = select_modes("deepseek_v32", 2, 2, NCCL)
    assert {MODES[name].gpus for name in two} == {1, 2}
    pairs = [(name, base) for name, base in PAIRS if {name, base} <= set(two)]
    assert {name for name in two if MODES[name].gpus == 2} <= {name for name, _ in pairs}
    assert set(two) == {name for pair in pairs for name in pair}
    pairs_of_v4 = ["v4", "v4, graphs", "v4, tp2", "v4, graphs, tp2", "v4, graphs, tp2 rows"]
    assert select_modes("deepseek_v4", 2, 2, ()) == pairs_of_v4
    only = ["both, hisparse", "both, ngram"]
    assert select_modes("deepseek_v32", None, 1, (), only) == ["both, graphs", *only]
    only.reverse()
    first = ["both, graphs", "both, ngram", "both, hisparse"]
    assert select_modes("deepseek_v32", None, 1, (), only) == first
    older = select_modes("deepseek_v32", None, 1, (), acting_as="sm_80")
    weights = ["weights fp8", "weights int4"]
    assert older == [
        "both, portable",
        *(f"both, {name}" for name in weights),
        "as sm_80",
        "as sm_80, graphs",
        *(f"as sm_80, {name}" for name in weights),
    ]
    older = select_modes("deepseek_v4", None, 1, (), acting_as="sm_89")
    assert older == ["v4", "v4, as sm_89", "v4, as sm_89, graphs"]
    drafting = select_modes("deepseek_v4", None, 1, (), ["v4, dspark", "v4, vllm, dspark"])
    assert drafting == ["v4, no drafts", "v4, dspark", "v4, vllm, dspark"]
    stock = ["hy, transformers", "hy, vllm", "hy, vllm, bf16"]
    ours = ["hy, attention", "hy", "hy, graphs", "hy, bf16"]
    assert select_modes("hy_v4", None, 1, ()) == [*stock, *ours]
    assert select_modes("dots3_note", None, 1, ()) == ["dots, vllm", "dots", "dots, graphs"]
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("vllms", "torchs", "refused"),
    [
        (23007, 23007, None),
        (23000, 23100, None),
        (22907, 23007, "got 2.29.7 of /vllms/libnccl.so.2; VLLM_NCCL_SO_PATH can name a newer"),
        (23007, 22809, "got 2.28.9 of libnccl.so.2; LD_PRELOAD can name a newer"),
        (None, 22809, "got 2.28.9 of libnccl.so.2; VLLM_NCCL_SO_PATH can name a newer"),
    ],
)
def test_ranks_share_a_gpu_where_both_nccls_let_them(vllms, torchs, refused, monkeypatch):
    import vllm_engine

    class Library:
        def __init__(self, path):
            self.version = {"/vllms/libnccl.so.2": vllms, "libnccl.so.2": torchs}[path]

        def ncclGetVersion(self, code):
            code._obj.value = self.version

    monkeypatch.setattr(vllm_engine.ctypes, "CDLL", Library)
    if vllms is None:
        monkeypatch.delenv("VLLM_NCCL_SO_PATH", raising=False)
    else:
        monkeypatch.setenv("VLLM_NCCL_SO_PATH", "/vllms/libnccl.so.2")
    if refused is None:
        vllm_engine.check_sharing()
        return
    with pytest.raises(RuntimeError, match=f"share a GPU with NCCL 2.30 or newer only, {refused}"):
        vllm_engine.check_sharing()


def test_modes_that_share_a_gpu_are_all_served_with_their_settings(monkeypatch, tmp_path):
    import vllm_engine

    asked = {}

    def serve_apart(command, names, folder, at_once, limit, total, present):
        asked.update(command=command[2:], names=names, present=present)
        return {*names}

    monkeypatch.setattr(vllm_engine, "serve_apart", serve_apart)
    monkeypatch.setattr(vllm_engine, "compare", lambda *_: True)
    model = replace(vllm_engine.SERVED["deepseek_v32"], make=lambda folder: None)
    monkeypatch.setitem(vllm_engine.SERVED, "deepseek_v32", model)
    monkeypatch.setattr(vllm_engine, "check_sharing", lambda: asked.update(checked=True))
    monkeypatch.setattr(vllm_engine, "nccl_version", lambda: (2, 30, 7))
    options = ["--share-gpu", "--prompts", "4", "--new-tokens", "16", "--portable"]
    monkeypatch.setattr(
        sys, "argv", ["", "--folder", str(tmp_path), *options, "--only", "both, tp8 dcp4"]
    )
    assert vllm_engine.main() == 0
    assert asked["checked"]
    assert asked["names"] == ["both", "both, tp8 dcp4"]
    assert asked["present"] == 1  # GPUs over which modes are spread
    served = {}
    monkeypatch.setattr(vllm_engine, "serve", lambda mode, model, result: served.update(mode=mode))
    serving = ["--folder", str(tmp_path), "--limit", "9", "--serve", "both, tp8 dcp4"]
    monkeypatch.setattr(sys, "argv", ["", *asked["command"], *serving])
    assert vllm_engine.main() == 0
    mode = served["mode"]
    assert (mode.gpus, mode.dcp, mode.shares_gpu, mode.portable) == (8, 4, True, True)
    assert (mode.prompts, mode.new_tokens) == (4, 16)
    arguments = vllm_engine.engine_arguments(vllm_engine.MODES["both, tp8"], tmp_path)
    assert "distributed_executor_backend" not in arguments


@pytest.mark.parametrize("counts", [(3, 3, 3), (3, 3), (3, 3, 2), (3, 3, 0)])
def test_a_mode_with_missing_answers_fails(counts, monkeypatch, tmp_path):
    import vllm_engine

    answers = [{"tokens": [0] * count} for count in counts]
    monkeypatch.setattr(vllm_engine, "_serve", lambda *_: {"answers": answers})
    monkeypatch.setattr(vllm_engine.os, "environ", dict(vllm_engine.os.environ))
    mode = replace(vllm_engine.MODES["both"], prompts=3, new_tokens=3)
    result = tmp_path / "both.json"
    if counts == (3, 3, 3):
        vllm_engine.serve(mode, tmp_path, result)
        assert result.exists()
        return
    with pytest.raises(RuntimeError, match=r"3 answers must have 3 tokens each, got \[3, 3"):
        vllm_engine.serve(mode, tmp_path, result)
    assert not result.exists()


@pytest.mark.parametrize("token", [5, 9])
def test_shorter_answers_are_compared_with_beginnings(token, capsys, tmp_path):
    from vllm_engine import compare

    def answer(*tokens):
        return {"prompt": [-1.0, -2.0], "tokens": tokens, "margin": 1.0}

    reports = {"long": [answer(3, 4, 5), answer(6, 7, 8)], "short": [answer(3, token)]}
    reports["same"] = [answer(3, 4)]
    for name, answers in reports.items():
        (tmp_path / f"{name}.json").write_text(json.dumps({"answers": answers}))
    assert compare("same", "long", tmp_path)
    assert "1 of 1 answers of 2 tokens are equal" in capsys.readouterr().out
    assert not compare("short", "long", tmp_path)
    assert "0 of 1 answers of 2 tokens are equal" in capsys.readouterr().out


def test_modes_are_spread_over_gpus_in_their_order_while_time_is_left(
    tmp_path, capsys, monkeypatch
):
    from vllm_engine import serve_apart

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    program = tmp_path / "program.py"
    program.write_text(
        "import faulthandler, json, os, pathlib, sys, time\n"
        "folder, _, limit, _, name = sys.argv[2:]\n"
        "gpus = os.environ.get('CUDA_VISIBLE_DEVICES', 'all')\n"
        "if name == 'both, async':\n"
        "    sys.exit('broken')\n"
        "if name == 'both, reload':\n"
        "    faulthandler.enable()\n"
        "    if os.fork() == 0:\n"
        "        time.sleep(60)\n"
        "    os.wait()\n"
        "report = {'seconds': [0, 0], 'classes': [gpus], 'compiled': [], 'loaded': []}\n"
        "report |= {'drafts': {}, 'shared': [], 'exchanges': []}\n"
        "pathlib.Path(folder, name + '.json').write_text(json.dumps(report))\n"
    )
    names = ["both", "both, tp2", "both, graphs", "both, ngram", "both, async", "both, reload"]
    names.append("vllm")
    served = serve_apart([sys.executable, str(program)], names, tmp_path, 1, 6, 6, 2)
    assert served == {*names[:4]}
    out = capsys.readouterr().out
    places = dict(re.findall(r"(?m)^(.*): ready after .* classes: (.*)$", out))
    assert places == {"both": "0", "both, tp2": "all", "both, graphs": "1", "both, ngram": "0"}
    assert "both, async: failed with code 1" in out
    assert "broken" in out
    assert re.search("both, reload: did not end in [3-6] s", out)
    stacks = (tmp_path / "both, reload.log").read_text()  # of the program and of its fork
    assert stacks.count("Fatal Python error: ") == 2
    assert "vllm: left out, 0 s are left" in out


def measured(rank, device):
    """A row of ``benchmarks/exchange_bench.py`` in one of two ranks."""
    import exchange_bench

    place = torch.device(device, torch.cuda.current_device() if device == "cuda" else 0)
    return [asdict(exchange_bench.measure(context, 3, 128, place, 2)) for context in (300, 1000)]


def checked(rank, device):
    """What ``benchmarks/exchange_bench.py`` says of a size on ranks that share a GPU."""
    import exchange_bench

    place = torch.device(device, torch.cuda.current_device() if device == "cuda" else 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(exchange_bench, "RankTimer")
        return exchange_bench.check(1000, 3, 128, place)


def with_positions_of_one_rank(rank):
    """The error of ranks that offer their rows as positions."""
    import exchange_bench

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange_bench.ContextShard, "positions", lambda shard, rows: rows)
        with pytest.raises(AssertionError) as error:
            exchange_bench.functions(300, 3, 128, torch.device("cpu"))
    return str(error.value)


def stressed(rank, device):
    """Exchanges that differ in ``exchange_bench.py --stress``, and with one wrong selection."""
    import exchange_bench

    place = torch.device(device, torch.cuda.current_device() if device == "cuda" else 0)
    many = 20_000 if not shared(2) else 800  # ranks that share a GPU may wait for their turns
    differ = exchange_bench.stress(many if device == "cuda" else 40, 32, place)
    with pytest.MonkeyPatch.context() as patch:
        right, calls = exchange_bench.exchange_topk, []

        def once_wrong(*arguments, out, **options):
            calls.append(right(*arguments, out=out, **options))
            if len(calls) == 2 and rank == 1:
                out[-1, -1] += 1

        patch.setattr(exchange_bench, "exchange_topk", once_wrong)
        return differ, exchange_bench.stress(16, 32, place)


@pytest.mark.parametrize("device", processes.RANK_DEVICES)
def test_many_exchanges_with_delays_are_those_of_collectives(tmp_path, device):
    assert processes.on_ranks(2, tmp_path, device, stressed, device) == [(0, 1)] * 2


@pytest.mark.parametrize("device", processes.RANK_DEVICES)
def test_ranks_that_share_a_gpu_are_checked_without_times(tmp_path, device):
    one, other = processes.on_two_ranks(tmp_path, device, checked, device)
    assert one == other
    assert one.startswith("   1000 tokens, 3 requests, 2 ranks that share a GPU: selections")
    assert one.endswith("slots are right\n")


@pytest.mark.parametrize("device", processes.RANK_DEVICES)
def test_the_exchange_of_two_ranks_is_checked_and_timed(tmp_path, device):
    import exchange_bench

    one, other = processes.on_two_ranks(tmp_path, device, measured, device)
    assert one == other
    rows = [exchange_bench.Row(**row) for row in one]
    assert [(row.context, row.batch, row.num_ranks) for row in rows] == [(300, 3, 2), (1000, 3, 2)]
    for row in rows:
        assert min(row.local, row.selection, row.gather, row.slots, row.alone) > 0
        assert set(row.how.values()) == {"launch" if device == "cpu" else "graph"}
    header, *lines = exchange_bench.table(rows).splitlines()
    assert [line.split()[:2] for line in lines] == [["300", "3"], ["1000", "3"]]
    assert len(header.split()) == len(lines[0].split()) + 1


def test_a_wrong_exchange_is_not_timed(tmp_path):
    for error in processes.on_two_ranks(tmp_path, "cpu", with_positions_of_one_rank):
        assert error.startswith("selection: ")


def kernels_of_layers(count, selection, attention):
    """Launches of vLLM's NVIDIA class: one a millisecond, and each runs for half of the next."""
    import vllm_bench

    names = ["nvjet_sm90", "_fused_norm_rope_kernel", "nvjet_sm90", "_fused_q_kernel"]
    names += [*selection, *attention, "nvjet_sm90", "moe"]
    return [vllm_bench.Launch(name, float(at), at + 1.5) for at, name in enumerate(count * names)]


@pytest.mark.parametrize(
    ("selection", "attention"),
    [
        (["score", "_held_kernel"], ["_convert_req_index_to_global_index_kernel", "_attend_fp8"]),
        (
            ["sm90_fp8_paged_mqa_logits", "cooperative_topk_cs4"],
            ["_convert_req_index_to_global_index_kernel", "flash_fwd_mla", "device_kernel"],
        ),
        ([], ["device_kernel"]),  # a layer with the selection of another
    ],
)
def test_the_benchmark_of_the_engine_finds_indexer_and_attention(selection, attention):
    import vllm_bench

    launches = kernels_of_layers(3, selection, attention)
    assert vllm_bench.split(launches) == (3.0 * len(selection), 3.0 * len(attention))
    assert vllm_bench.busy(launches) == len(launches) + 0.5
    assert vllm_bench.busy([launches[0], launches[0], launches[4]]) == 3.0


@pytest.mark.parametrize(
    ("cache_format", "dtype"),
    [(INDEX_FP8, torch.uint8), (FP8_DS_MLA, torch.uint8), (BF16_576, torch.bfloat16)],
    ids=lambda value: getattr(value, "name", ""),
)
def test_the_caches_of_the_benchmark_hold_numbers(monkeypatch, cache_format, dtype):
    import vllm_bench

    monkeypatch.setattr(vllm_bench, "CONTEXTS", (128,))  # rows repeat after 256
    width = cache_format.bytes_per_token // dtype.itemsize
    data = torch.zeros(11, 64, width, dtype=dtype)
    vllm_bench.fill(data)
    rows = PagedCache(data, cache_format).read(torch.arange(11 * 64)).float()
    assert rows.isfinite().all()
    assert 0.1 < rows[:256].std() < rows.abs().max() < 32
    assert_equal("rows", rows[256:512], rows[:256])
    assert_equal("last rows", rows[512:], rows[:192])


class Prompts:
    """An engine of vLLM that answers each prompt in a step, and takes ever longer."""

    def __init__(self, clock):
        self.clock, self.open, self.lengths = clock, 0, []

    def add_request(self, name, prompt, params):
        self.open += 1
        self.lengths.append(len(prompt["prompt_token_ids"]))

    def has_unfinished_requests(self):
        return self.open > 0

    def step(self):
        self.open -= 1
        self.clock.append(sum(self.clock) + 1)


def test_the_models_of_engines_are_those_of_transformers(tmp_path):
    """One of few layers, that of a GPU of eight, and one of dense layers."""
    import transformers

    import vllm_bench
    import vllm_places

    made = {
        (3, 8, 4096): vllm_bench.model_config(16, 8, 4096),
        (61, 32, 16160): vllm_bench.model_config(16, 8, 4096, rank=True),
        (5, 8, 4096): vllm_places.model_config(16, 4096),
    }
    for sizes, config in made.items():
        (tmp_path / "config.json").write_text(json.dumps(config))
        read = transformers.AutoConfig.from_pretrained(tmp_path)
        assert (read.num_hidden_layers, read.n_routed_experts, read.vocab_size) == sizes
        assert read.first_k_dense_replace == {3: 1, 61: 3, 5: 5}[sizes[0]]


def test_the_time_to_the_first_token_leaves_out_the_first_prompt(monkeypatch, tmp_path):
    import vllm_bench

    clock = [0.0]
    monkeypatch.setattr(vllm_bench.time, "perf_counter", lambda: clock[-1])
    engine = vllm_bench.Engine.__new__(vllm_bench.Engine)
    engine.side, engine.gpus, engine.heads, engine.min_rows = "sparsemla, fp8", 4, 32, 1024
    engine.layers = vllm_bench.LAYERS
    engine.engine = Prompts(clock)

    def add(kind, length, new):
        engine.engine.add_request(kind, {"prompt_token_ids": [0] * length}, None)

    engine.add = add
    row = engine.first_token(300)
    assert engine.engine.lengths == [300] * 4
    assert row.times_ms == [1e3, 2e3, 4e3]
    assert (row.wall_ms, row.context, row.min_rows) == (2e3, 300, 1024)
    vllm_bench.write_report(tmp_path / "rows.json", [asdict(row)])
    assert len(json.loads((tmp_path / "rows.json").read_text())["rows"]) == 1


def engine_row(side, heads, kind, batch, context, gpu_ms):
    """A row of ``benchmarks/vllm_bench.py``: a third is the indexer, a sixth attention."""
    import vllm_bench

    parts = gpu_ms / 3, gpu_ms / 6
    return asdict(
        vllm_bench.Row(side, kind, heads, batch, context, 3, gpu_ms + 1, gpu_ms, *parts, {"k": 0.1})
    )


def test_the_rows_of_the_engine_become_a_table_and_a_figure(tmp_path):
    import engine
    import vllm_bench

    sizes = [(16, "decode", 64, 8192), (128, "decode", 1, 131072), (16, "prefill", 1, 8192)]
    rows = [engine_row("sparsemla, fp8", *size, 2.0) for size in sizes]
    rows += [engine_row("FLASHMLA_SPARSE, fp8", *size, 3.0) for size in sizes[:2]]
    start = {"side": "sparsemla, fp8", "heads": 16, "start_s": 20.0}
    refused = {"side": "sparsemla, fp8", "heads": 128, "refused": "the cache has 9 tokens"}
    path = tmp_path / "folder" / "rows.json"
    vllm_bench.write_report(path, [start, refused, *rows])
    document = json.loads(path.read_text())
    assert (document["starts"], document["refused"]) == ([start], [refused])
    assert len(document["rows"]) == 5

    found = engine.load(path)
    text = engine.with_table(f"before\n{report.BEGIN}\nold\n{report.END}\nafter", found)
    assert text.startswith(f"before\n{report.BEGIN}\n![")
    assert text.endswith(f"\n{report.END}\nafter")
    lines = text.splitlines()[6:-2]
    assert lines == [
        "| decode | 16 | fp8 | 8K | 64 | 3.00, 4.00 | 0.667, 1.00 | 0.333, 0.500 | 1.50 "
        "| 40.7, 61.0 | 1.50 |",
        "| decode | 128 | fp8 | 128K | 1 | 3.00, 4.00 | 0.667, 1.00 | 0.333, 0.500 | 1.50 "
        "| 40.7, 61.0 | 1.50 |",
    ]
    drawn = ElementTree.fromstring(engine.figure(found))
    circles = drawn.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == 4
    assert len({circle.get("cx") for circle in circles}) == 2  # a place in each panel


HOST_ROWS = (
    "--device cpu --layers 2 --heads 4 --topk 256 --contexts 1024 --batches 1 3 --hot 2 --steps 2 "
    "--fetches 5 --overlaps 0.85 --trace-tokens 256"
)


def test_rows_on_the_host_are_timed_where_bits_agree(capsys, monkeypatch, tmp_path):
    import host_rows

    words = [*HOST_ROWS.split(), "--json", f"{tmp_path}/rows.json"]
    arguments = host_rows.parse(words)
    monkeypatch.setattr(host_rows, "WARM_STEPS", 10)
    monkeypatch.setattr(host_rows, "record", lambda tokens, device: selections(tokens))
    found, prefills = host_rows.main(arguments)
    rows = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert rows == [asdict(row) for row in found]
    assert prefills == []
    assert [(row.batch, row.process) for row in found] == [
        (batch, process) for batch in (1, 3) for process in ("walk 0.85", "trace")
    ]
    for row in found:
        assert 0 < row.misses < 1
        assert min(row.resident_us, row.host_us, row.link_us, row.link_gb_s) > 0
    walks = [row.misses for row in found if row.process == "walk 0.85"]
    assert walks == pytest.approx([0.1, 0.1], abs=0.05)  # some of those that leave are still hot
    traced = [row.misses for row in found if row.process == "trace"]
    assert traced == [1 / 64] * 2  # a token a step, and the three rows beside it
    assert "fetch of 5 rows" in capsys.readouterr().out

    right = host_rows.to_slots
    monkeypatch.setattr(host_rows, "to_slots", lambda *args, **options: right(*args, **options) ^ 1)
    with pytest.raises(AssertionError, match="layer 0 differs with walk"):
        host_rows.main(arguments)
    arguments.overlaps, arguments.trace_tokens = [], 512
    with pytest.raises(ValueError, match="trace_tokens must be at most 256, of which each stands"):
        host_rows.main(arguments)


def with_shared_rows(rank, folder):
    """What two ranks measure, say, and find wrong."""
    import host_rows

    def run(*words):
        with redirect_stdout(StringIO()) as said:
            rows, _ = host_rows.main(host_rows.parse([*HOST_ROWS.split(), *words]))
        return [asdict(row) for row in rows], said.getvalue()

    def wrong(name, replacement):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(host_rows, name, replacement)
            with pytest.raises(AssertionError) as error:
                run("--trace-tokens", "0", "--batches", "3")
        return str(error.value)

    states, own = host_rows.exchange_states, host_rows.own_positions

    def without_lse(outs, lses):
        return states(outs, torch.zeros_like(lses))

    def without_a_rank(outs, lses):
        return states(outs, lses if rank == 0 else torch.full_like(lses, -torch.inf))

    def of_one_rank(chosen, *, shard):
        lists, counts = own(chosen, shard=shard)
        return lists, counts if rank == 0 else counts.clamp(max=9)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_rows, "WARM_STEPS", 10)
        patch.setattr(host_rows, "record", lambda tokens, device: selections(tokens))
        rows, said = run("--json", f"{folder}/rows.json")
        errors = [
            wrong("exchange_states", without_lse),
            wrong("exchange_states", without_a_rank),
            wrong("own_positions", of_one_rank),
        ]
        refused = []
        for words in ("--contexts 1088", "--heads 3", "--prefill 8"):
            with pytest.raises(ValueError, match="for 2 ranks, got") as error:
                run(*words.split())
            refused.append(str(error.value))
        patch.setattr(host_rows, "shared", lambda ranks: ranks == 2)
        with pytest.raises(ValueError, match="--json must be left out where ranks share a GPU"):
            run("--json", f"{folder}/none.json")
        return {
            "rows": rows,
            "said": said,
            "errors": errors,
            "refused": refused,
            "fit": asdict(host_rows.fitting(40, 500, 4096)),
            "only bits": run(),
        }


def test_rows_on_the_host_of_contexts_that_ranks_share_are_checked_and_timed(tmp_path):
    one, other = processes.on_two_ranks(tmp_path, "cpu", with_shared_rows, tmp_path)
    assert one["rows"] == other["rows"]
    document = json.loads((tmp_path / "rows.json").read_text())
    assert document["shared"] == one["rows"]
    assert [(row["ranks"], row["batch"], row["process"]) for row in one["rows"]] == [
        (2, batch, process) for batch in (1, 3) for process in ("walk 0.85", "trace")
    ]
    for row in one["rows"]:
        assert 0 < row["misses"] < 0.1
        times = (row[f"{name}_us"] for name in ("resident", "host", "link", "collective"))
        assert min(times) > 0
        if row["process"] == "trace":  # a token a step, and the three rows beside it
            assert row["misses"] <= 1 / 64
    assert "2 ranks, 1024 tokens, 3 requests, trace: resident" in one["said"]
    assert other["said"] == ""

    for found in (one, other):
        assert found["errors"][0].startswith("outputs merged of 2 ranks differ from those of one")
        assert found["errors"][1].startswith("outputs merged of 2 ranks differ from those of one")
        assert found["fit"]["requests"] == {"128K": 61, "1M": 9}  # as in docs/long-contexts.md
        assert found["fit"]["resident"] == {"128K": 6, "1M": 0}
        assert [line.split()[0] for line in found["refused"]] == [
            "--contexts",
            "--heads",
            "--prefill",
        ]
        assert found["only bits"][0] == []
    assert "differs with walk 0.85" in one["errors"][2]
    assert [each["gpu_gib"] for each in document["fit"]] == [40]
    assert one["only bits"][1].count("2 ranks share a GPU, no times; bits are right") == 4
    assert not (tmp_path / "none.json").exists()


def test_prefills_over_rows_on_the_host_are_timed_where_bits_agree(capsys, monkeypatch, tmp_path):
    import host_rows

    words = "--device cpu --layers 2 --heads 4 --topk 32 --contexts 512 --batches --fetches"
    words += f" --trace-tokens 0 --prefill 96 --json {tmp_path}/rows.json"
    rows, found = host_rows.main(host_rows.parse(words.split()))
    assert rows == []
    saved = json.loads((tmp_path / "rows.json").read_text())
    assert saved == {"rows": [], "prefills": [asdict(row) for row in found]}
    assert [(row.tokens, row.context, row.selects) for row in found] == [
        (96, 512, False),
        (96, 512, True),
    ]
    for row in found:
        assert min(row.resident_ms, row.host_ms, row.link_ms, row.link_gb_s) > 0
    assert "of resident" in capsys.readouterr().out

    right = host_rows.HostContext.selected

    def others(context, layer, chosen, plan):
        """The rows of another selection."""
        return right(context, layer, chosen.flip(0), plan)

    monkeypatch.setattr(host_rows.HostContext, "selected", others)
    with pytest.raises(AssertionError, match="layer 0 of a prefill differs"):
        host_rows.main(host_rows.parse(words.split()))


def selections(tokens):
    """A model of two layers whose tokens select 64 rows around them."""
    rows = torch.arange(tokens)[:, None] - torch.arange(63, -1, -1)
    return {layer: rows.clamp(min=0).int() for layer in range(2)}


def test_engines_of_a_job_end_together_and_failures_are_told(tmp_path, capsys):
    """One waits for the other, one fails, one would never end."""
    from vllm_connectors import Job, run_job

    code = """
import json, pathlib, sys, time
role, folder = sys.argv[-1], pathlib.Path(sys.argv[1])
if role == "fails":
    raise SystemExit("Error: no memory")
while role == "waits" and not (folder / "writes.json").exists():
    time.sleep(0.05)
if role == "hangs":
    time.sleep(600)
print("== read 3 files")
(folder / f"{role}.json").write_text("[]")
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    nothing = dict.fromkeys(("writes", "waits"), print)
    assert run_job("pair", Job(nothing), command, tmp_path, 60)
    assert "waits: read 3 files" in capsys.readouterr().out
    assert not run_job("pair", Job({"waits": print, "fails": print}), command, tmp_path, 60)
    told = capsys.readouterr().out
    assert "pair: fails ended with code 1" in told
    assert "no memory" in told
    assert not run_job("pair", Job({"hangs": print}), command, tmp_path, 1)
    assert "hangs did not end in 1 s" in capsys.readouterr().out


def test_answers_of_ranks_are_compared_in_the_order_of_prompts(tmp_path, capsys):
    from vllm_connectors import Job, compare

    def write(name, tokens, cached=64):
        rows = [{"tokens": [t], "margin": 1.0, "prompt": 100, "cached": cached} for t in tokens]
        (tmp_path / f"{name}.json").write_text(json.dumps(rows))

    write("one", [3, 1, 4, 1, 5])
    write("dp 0", [3, 4, 5])
    write("dp 1", [1, 1])
    job = Job({}, "one", ["dp 0", "dp 1"])
    assert compare("dp", job, tmp_path)
    write("dp 1", [1, 2])
    assert not compare("dp", job, tmp_path)
    assert "4 of 5 answers" in capsys.readouterr().out
    write("files", [3, 1, 4, 1, 5], cached=0)
    assert not compare("files", Job({}, "one", ["files"], reads=True), tmp_path)
    assert "5 of 5 long prompts computed" in capsys.readouterr().out


def test_places_take_turns_once_all_are_ready(tmp_path, capsys):
    """One fails at its start; the others never run at the same time."""
    from vllm_places import take_turns

    code = """
import json, pathlib, sys, time
place, folder = sys.argv[-1], pathlib.Path(sys.argv[1])
if place == "host":
    raise SystemExit("Error: no pinned memory")
(folder / f"{place}.ready").touch()
while not (folder / f"{place}.turn").exists():
    time.sleep(0.05)
row = {"place": place, "batch": 1, "context": 2, "wall_ms": 1, "gpu_ms": 1, "prefill_s": 1}
row |= {"tokens_per_s": 9, "missed_rows": 0, "at": time.time()}
with (folder / "rows").open("a") as out:
    out.write(json.dumps(row) + "\\n")
time.sleep(0.5)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    assert not take_turns(command, ["gpu", "host", "stock"], tmp_path, tmp_path / "rows", 60)
    told = capsys.readouterr().out
    assert "host: ended with code 1" in told
    assert "no pinned memory" in told
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()]
    assert [row["place"] for row in rows] == ["gpu", "stock"]
    assert rows[1]["at"] - rows[0]["at"] > 0.5
    (tmp_path / "rows").unlink()
    assert take_turns(command, ["stock"], tmp_path, tmp_path / "rows", 60)

"""The command line: its output, and for errors one clear line and exit code 2."""

from __future__ import annotations

import functools
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import sparsemla
from sparsemla_lab.cli import app
from sparsemla_lab.options import INSTALL_DEMO
from sparsemla_lab.typical import TYPICAL, function_of, typical_call

CHECKPOINT_BLOCK = 128


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def assert_fails(result: Any, *parts: str) -> None:
    """Exit code 2, no traceback, and a single line that names the problem."""
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("sparsemla: ")
    for part in parts:
        assert part in line


@pytest.fixture(scope="module")
def fp8_checkpoint(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint with e4m3 weights and block scales, in two files."""
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("fp8_checkpoint")
    weights: dict[str, torch.Tensor] = {}
    scales: dict[str, torch.Tensor] = {}
    size = CHECKPOINT_BLOCK
    for name, weight in load_file(checkpoint / "model.safetensors").items():
        kept = ("embed_tokens", "lm_head", "weights_proj", "mlp.gate.")
        if weight.dim() != 2 or any(part in name for part in kept):
            weights[name] = weight.bfloat16()
            continue
        rows, cols = weight.shape
        padded = torch.nn.functional.pad(weight, (0, -cols % size, 0, -rows % size))
        blocks = padded.unflatten(1, (-1, size)).unflatten(0, (-1, size))
        scale = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:rows, :cols]
        weights[name] = codes.to(torch.float8_e4m3fn).contiguous()
        scales[f"{name}_scale_inv"] = scale
    save_file(weights, path / "model-00001-of-00002.safetensors")
    save_file(scales, path / "model-00002-of-00002.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [size, size],
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text("The lamp at Skerrow, déjà vu")
    return path


def test_help_lists_the_commands():
    result = run("--help")
    assert result.exit_code == 0
    for command in ("demo", "generate", "doctor", "explain"):
        assert command in result.output


def test_version():
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"sparsemla {sparsemla.__version__}\n"


def test_completion_is_offered():
    assert "--install-completion" in run("--help").output


LOADED = """
import sys
from sparsemla_lab.cli import main
try:
    main()
finally:
    loaded = {"torch", "numpy", "triton", "transformers", "matplotlib"} & set(sys.modules)
    print("loaded:", *loaded, file=sys.stderr)
"""


@pytest.mark.parametrize(("chosen", "policy"), [(None, "PASSIVE"), ("ACTIVE", "ACTIVE")])
@pytest.mark.parametrize(
    "arguments",
    [("demo", "--topk", "-1"), ("generate", "--model", "demo", "--prompt", "a", "--top-p", "2")],
    ids=lambda arguments: arguments[0],
)
def test_threads_that_wait_leave_their_cores(arguments, chosen, policy, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_WAIT_POLICY", chosen or "")
    if chosen is None:
        monkeypatch.delenv("OMP_WAIT_POLICY")
    run(*arguments)
    assert os.environ["OMP_WAIT_POLICY"] == policy


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["verify", "--help"]], ids=str)
def test_help_does_not_wait_for_torch(arguments):
    done = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout
    assert done.stderr == "loaded:\n"


@pytest.mark.parametrize(
    "command", ["demo", "generate", "doctor", "explain", "verify", "bench", "warm-up"]
)
def test_help_of_a_command(command, monkeypatch):
    """A purpose that the list of commands shows whole, nothing cut off, and examples that parse."""
    monkeypatch.setenv("COLUMNS", "80")
    result = run(command, "--help")
    assert result.exit_code == 0
    listed = next(
        line for line in run("--help").output.splitlines() if line.startswith(f"  {command} ")
    )
    purpose = listed.split(maxsplit=1)[1]
    assert purpose.endswith(".")
    assert not purpose.endswith("...")
    assert purpose.split()[0] in {"Show", "Continue", "Check", "Name", "Time", "Compile"}
    for mark in ("\N{HORIZONTAL ELLIPSIS}", "<list", "range>"):
        assert mark not in result.output
    examples = result.output.partition("Examples:")[2].split("\n  ")[1:]
    assert examples
    parsed = typer.main.get_command(app).commands[command]
    for example in examples:
        words = shlex.split(example.rpartition("|")[2])
        assert words[:2] == ["sparsemla", command]
        assert parsed.make_context(command, words[2:]).params is not None


def test_a_tier_that_fails_is_the_verdict():
    from sparsemla_lab.doctor import TierRow, next_lines

    works = TierRow("cpu", "cpu", 29, None, "works: it is near")
    refused = TierRow("cpu", "sm90", 0, "needs a GPU", "needs a GPU")
    fails = TierRow("cuda", "triton", 29, None, "fails: RuntimeError: no")
    on_gpu = TierRow("cuda", "triton", 29, None, "works: it is near")
    assert next_lines([works, refused])[0].startswith("All is well on the CPU")
    assert "GPU" in next_lines([works, on_gpu])[0]
    assert "check every op on this GPU: sparsemla verify --quick" in str(next_lines([on_gpu]))
    (line,) = next_lines([works, fails])
    assert line.startswith("Not well: triton on cuda.")


@pytest.mark.parametrize("node", [None, 1])
def test_doctor_names_the_node_of_a_gpu(monkeypatch, node):
    from sparsemla_lab import doctor

    gpu = doctor.Gpu("sm_90", (9, 0), "an H100")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(total_memory=80 << 30)
    )
    monkeypatch.setattr(doctor.Gpu, "here", lambda index: gpu)
    monkeypatch.setattr(doctor, "proofs", lambda gpu: [])
    monkeypatch.setattr(doctor, "node_of_gpu", lambda index: node)
    line = "cuda:0        an H100, sm_90, 80 GiB" + (", NUMA node 1" if node else "")
    assert doctor.device_lines()[1:] == [line]


def test_doctor_names_the_install_command(monkeypatch):
    from sparsemla_lab import doctor

    assert "sparsemla demo" in doctor.next_lines([])[2]
    monkeypatch.setattr(
        doctor.importlib.util, "find_spec", lambda name: name != "matplotlib" or None
    )
    assert (
        f"add transformers, for sparsemla demo and generate: {INSTALL_DEMO}"
        in doctor.next_lines([])[2]
    )


def test_doctor():
    result = run("doctor")
    assert result.exit_code == 0
    for part in ("torch", torch.__version__, "vllm", "sglang", "reference", "works", "proof"):
        assert part in result.output
    assert "fails" not in result.output
    assert "All is well" in result.output
    assert "\nNext:\n" in result.output


def explained(result: Any) -> str:
    """The lines of ``explain`` about tiers, without the following lines about proofs."""
    assert result.exit_code == 0, result.output
    lines, proofs = [], []
    for line in result.output.splitlines():
        (proofs if line.startswith("proof: ") else lines).append(line)
    assert proofs
    return "\n".join(lines)


@pytest.mark.parametrize("op", TYPICAL)
def test_explain(op):
    lines = explained(run("explain", op))
    assert lines.startswith("the call:\n  ")
    expected = sparsemla.explain(function_of(op), **typical_call(op, "cpu"))
    assert lines.endswith(f"\n{expected}")
    assert set(expected.kernels.values()) == {"cpu"}


def test_every_op_and_branch_has_a_typical_call():
    composed = {"select_rows", "index_loss"}
    assert set(TYPICAL) == set(sparsemla.ops.__all__) - composed


def test_explain_another_machine():
    result = run(
        *("explain", "sparse_decode", "--device", "cuda", "--capability", "9.0"),
        *("--cache-format", "fp8_ds_mla", "--heads", 64, "--topk", 70, "--tokens", 130),
    )
    lines = explained(result).splitlines()
    assert "  q: bfloat16 [130, 1, 64, 576]" in lines
    assert "  topk_indices: int32 [130, 1, 70]" in lines
    assert "sparse_decode: sm90.fp8" in lines
    assert "  cpu: needs CPU tensors, got sm_90" in lines


def test_explain_refuses_a_size_that_the_op_has_not():
    assert_fails(run("explain", "to_slots", "--heads", 4), "to_slots has no num_heads", "topk")


def test_explain_sets_the_dtype():
    result = run(
        *("explain", "sparse_decode", "--device", "cuda", "--capability", "9.0", "--dtype", "fp16")
    )
    assert "sparse_decode: triton" in result.output
    assert "sm90.fp8: needs bfloat16 queries, got torch.float16" in result.output


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("8.0", "sm_80"),
        ("sm_89", "sm_89"),
        ("sm_90", "sm_90"),
        ("sm_90a", "sm_90"),
        ("10.0", "sm_100"),
        ("sm_100", "sm_100"),
        ("sm_120", "sm_120"),
        ("gfx942", "gfx942"),
    ],
)
def test_explain_knows_gpus_by_capability_and_by_target(name, target):
    result = run("explain", "merge_topk", "--device", "cuda", "--capability", name)
    call = typical_call("merge_topk", "cpu")
    expected = sparsemla.explain(sparsemla.merge_topk, gpu=target, **call)
    assert explained(result).endswith(str(expected))
    chosen = "sm90" if target == "sm_90" else "triton.registers"
    assert expected.kernels == {"merge_topk": chosen}
    assert f"proof: {target} (" in result.output


def test_explain_shows_untested_gpus():
    result = run("explain", "sparse_decode", "--device", "cuda", "--capability", "8.6")
    assert "sparse_decode: sm80" in result.output
    assert "proof: sm_86, Triton" in result.output
    assert "untested. Nothing was compiled for it or run on it." in result.output


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["nothing"], ["op must be one of", "sparse_decode", "decode_branch", "'nothing'"]),
        (["sparse_decod"], ["op must be one of", "did you mean sparse_decode?"]),
        (["sparse_decode", "--cache-format", "fp7"], ["format name", "'fp7'"]),
        (["sparse_decode", "--cache-format", "fp8_ds_mal"], ["did you mean fp8_ds_mla?"]),
        (["sparse_decode", "--dtype", "int3"], ["dtype must be one of", "'int3'"]),
        (["sparse_decode", "--dtype", "pf16"], ["'pf16', did you mean fp16?"]),
        (["sparse_decode", "--device", "tpu"], ["--device must be one of cpu, cuda", "'tpu'"]),
        (["sparse_decode", "--device", "cuda", "--capability", "new"], ["capability", "'new'"]),
        (["sparse_decode", "--device", "cuda", "--capability", "gfx1"], ["gfx942", "'gfx1'"]),
        (["sparse_decode", "--capability", "9.0"], ["capability", "cpu"]),
    ],
)
def test_explain_refuses(arguments, parts):
    assert_fails(run("explain", *arguments), *parts)


def test_demo(checkpoint, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from sparsemla_lab import demo

    monkeypatch.setattr(demo, "shipped_model", lambda: checkpoint)
    quick = functools.partial(demo.run_demo, timed=(64,), new_bytes=2)
    monkeypatch.setattr(demo, "run_demo", quick)
    result = run("demo", "--out", tmp_path / "out", "--tokens", 128)
    assert result.exit_code == 0, result.output
    for part in ("|", "16 selected, FP8 cache", "last 16 rows", "With 16 of up to 128 rows"):
        assert part in result.output
    assert f"for the last question: {tmp_path / 'out' / 'question.png'}" in result.stdout
    assert (tmp_path / "out" / "question.png").read_bytes().startswith(b"\x89PNG")


def test_demo_with_numbers_of_rows(checkpoint, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from sparsemla_lab import demo

    monkeypatch.setattr(demo, "shipped_model", lambda: checkpoint)
    out = tmp_path / "out"
    result = run("demo", "--out", out, "--tokens", 128, "--topk", "8,2")
    assert result.exit_code == 0, result.output
    assert result.stdout.index("\n2  ") < result.stdout.index("\n8  ")
    assert (out / "topk.png").read_bytes().startswith(b"\x89PNG")
    assert not (out / "question.png").exists()
    assert_fails(run("demo", "--out", out, "--topk", "few"), "--topk must be numbers of rows")
    result = run("demo", "--out", out, "--topk", "8", "--model", "v4")
    assert_fails(result, "--topk is for trained models")


def test_an_interrupted_demo_keeps_what_is_there(checkpoint, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from sparsemla_lab import demo

    monkeypatch.setattr(demo, "shipped_model", lambda: checkpoint)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "_show_loss", interrupted)
    result = run("demo", "--out", tmp_path, "--tokens", 128)
    assert result.exit_code == 130
    assert "\n128  " in result.stdout
    assert result.stderr.splitlines()[-1].startswith("sparsemla: interrupted; the lines above")
    assert (tmp_path / "question.png").read_bytes().endswith(b"IEND\xaeB`\x82")


def test_demo_of_v4(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    from sparsemla_lab import demo_v4

    quick = functools.partial(demo_v4.run_demo, timed=(256,), new_tokens=1)
    monkeypatch.setattr(demo_v4, "run_demo", quick)
    result = run("demo", "--model", "v4", "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    for part in ("entries of 4, selected", "scores index keys", "built, not trained"):
        assert part in result.output
    assert (tmp_path / "out" / "contexts.png").read_bytes().startswith(b"\x89PNG")
    result = run("demo", "--model", "v4", "--tokens", 256, "--out", tmp_path / "out")
    assert_fails(result, "--tokens is for trained models")
    assert_fails(run("demo", "--model", "v4", "--device", "tpu"), "--device must be one of cpu, c")
    assert_fails(run("demo", "--device", "cuda"), "--device must be cpu for a trained model")
    misspelt = run("demo", "--model", "v5", "--out", tmp_path / "out")
    assert_fails(misspelt, "is not a model directory", "did you mean --model v4?")


def test_demo_without_a_model(tmp_path):
    pytest.importorskip("matplotlib")
    result = run("demo", "--model", tmp_path / "no", "--out", tmp_path / "out")
    assert_fails(result, "is not a model directory", "cannot read config.json")


class TestTextFiles:
    def test_missing(self, tmp_path):
        assert_fails(prompted(tmp_path / "no.txt"), "cannot read", "No such file")

    def test_directory(self, tmp_path):
        assert_fails(prompted(tmp_path), "cannot read", "Is a directory")

    def test_empty(self, tmp_path):
        (tmp_path / "empty.txt").touch()
        assert_fails(prompted(tmp_path / "empty.txt"), "is empty")

    def test_binary(self, tmp_path):
        (tmp_path / "binary").write_bytes(b"ab\0cd")
        assert_fails(prompted(tmp_path / "binary"), "NUL bytes")


def prompted(path: Path) -> Any:
    return run("generate", "--model", "none", "--prompt-file", path)


class TestPictures:
    def test_output_that_cannot_be_written(self, tmp_path):
        (tmp_path / "file").touch()
        assert_fails(run("demo", "--out", tmp_path / "file"), "cannot write")

    def test_a_picture_that_cannot_be_written(self, tmp_path):
        (tmp_path / "question.png").mkdir()
        result = run("demo", "--out", tmp_path)
        assert_fails(result, f"cannot write {tmp_path / 'question.png'}", "directory")


@pytest.mark.parametrize("place", ["folder", "file/report.json"])
def test_reports_that_cannot_be_written(tmp_path, monkeypatch, place):
    """The command refuses them before the verification, which would take minutes."""
    from sparsemla_lab.verify import run as work

    monkeypatch.setattr(work, "verify", lambda *args, **kwargs: pytest.fail("it has begun"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    result = run("verify", "--op", "merge_states", "--device", "cpu", "--json", tmp_path / place)
    assert_fails(result, f"cannot write {tmp_path / place}")


class TestGenerate:
    @pytest.mark.parametrize("cache_format", ["bf16", "bf16_576v512", "fp8_ds_mla"])
    def test_streams_text_and_reports(self, checkpoint, prompt, cache_format):
        result = run(
            *("generate", "--model", checkpoint, "--prompt-file", prompt),
            *("--max-new-tokens", 6, "--cache-format", cache_format),
        )
        assert result.exit_code == 0, result.output
        assert result.stdout.strip()
        stats = " ".join(result.stderr.split())
        assert "decode: 6 tokens" in stats
        bytes_per_token = 2 * (788 if cache_format == "fp8_ds_mla" else 1408)
        assert f"cache: {bytes_per_token} bytes/token, {64 * bytes_per_token} bytes" in stats

    def test_same_text_as_transformers(self, checkpoint, prompt):
        transformers = pytest.importorskip("transformers")
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint).float()
        ids = torch.tensor([list(prompt.read_bytes())])
        expected = model.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
        result = run(
            *("generate", "--model", checkpoint, "--prompt-file", prompt),
            *("--max-new-tokens", 4, "--dtype", "float32"),
        )
        assert result.stdout == bytes(expected.tolist()).decode(errors="replace") + "\n"

    def test_fp8_weights(self, checkpoint, fp8_checkpoint, prompt):
        from sparsemla_lab.generate import load_checkpoint

        options = {"cache_format": "bf16", "dtype": "float32"}
        exact = load_checkpoint(checkpoint, **options).model.state_dict()
        loaded = load_checkpoint(fp8_checkpoint, **options).model.state_dict()
        assert exact.keys() == loaded.keys()
        for name, weight in exact.items():
            error = (loaded[name].float() - weight).norm() / weight.norm().clamp_min(1e-6)
            assert error < 0.04, name
        result = run("generate", "--model", fp8_checkpoint, "--prompt-file", prompt)
        assert result.exit_code == 0, result.output

    def test_other_quantisation(self, fp8_checkpoint, prompt, tmp_path):
        config = json.loads((fp8_checkpoint / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "awq"}
        (tmp_path / "config.json").write_text(json.dumps(config))
        result = run("generate", "--model", tmp_path, "--prompt-file", prompt)
        assert_fails(result, "quant_method of fp8 or compressed-tensors or quark", "got 'awq'")

    def test_not_a_model_directory(self, prompt, tmp_path):
        for path in (tmp_path, tmp_path / "missing", prompt):
            result = run("generate", "--model", path, "--prompt-file", prompt)
            assert_fails(result, "is not a model directory", "config.json")

    def test_broken_config(self, prompt, tmp_path):
        (tmp_path / "config.json").write_text("{")
        result = run("generate", "--model", tmp_path, "--prompt-file", prompt)
        assert_fails(result, "is not valid JSON")

    @pytest.mark.parametrize(
        ("changes", "parts"),
        [
            ({"hidden_size": "sixty-four"}, ["'hidden_size' expected int, got str"]),
            ({"hidden_size": None}, ["'hidden_size' expected int, got NoneType"]),
            ({"hidden_size": -64}, []),
            ({"num_hidden_layers": 1.5}, ["'num_hidden_layers' expected int, got float"]),
            ({"vocab_size": "256"}, ["'vocab_size' expected int, got str"]),
            ({"eos_token_id": "end"}, ["'eos_token_id'"]),
            ({"rope_parameters": {"rope_type": "linear"}}, ["'factor'"]),
            ({"model_type": 7}, ["model_type of", "got 7"]),
            ({"model_type": ["deepseek_v32"]}, ["model_type of", "got ['deepseek_v32']"]),
            ({"model_type": None}, ["model_type of", "got None"]),
            ({"quantization_config": "fp8"}, ["quantization_config must be an object, got str"]),
            ({"quantization_config": [8]}, ["quantization_config must be an object, got list"]),
            ({"quantization_config": {}}, ["quantization_config must have", "got None"]),
            *(
                (
                    {"quantization_config": {"quant_method": "fp8", "weight_block_size": block}},
                    ["quantization_config must have", f"sizes as weight_block_size, got {block}"],
                )
                for block in (128, [128], ["128", "128"], [0, 0], {"0": 128})
            ),
        ],
        ids=str,
    )
    def test_fields_of_the_config(self, checkpoint, prompt, tmp_path, changes, parts):
        config = json.loads((checkpoint / "config.json").read_text()) | changes
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
        result = run("generate", "--model", tmp_path, "--prompt-file", prompt)
        assert_fails(result, str(tmp_path), *parts)

    @pytest.mark.parametrize("text", ["[]", "7", '"deepseek_v32"', "null"])
    def test_a_config_of_another_kind(self, prompt, tmp_path, text):
        (tmp_path / "config.json").write_text(text)
        result = run("generate", "--model", tmp_path, "--prompt-file", prompt)
        assert_fails(result, "config.json must hold an object, got")

    def test_weights_of_another_shape(self, checkpoint, fp8_checkpoint, prompt, tmp_path):
        for source in (checkpoint, fp8_checkpoint):
            path = tmp_path / source.name
            path.mkdir()
            for file in source.glob("*.safetensors"):
                (path / file.name).symlink_to(file)
            config = json.loads((source / "config.json").read_text()) | {"intermediate_size": 128}
            (path / "config.json").write_text(json.dumps(config))
            result = run("generate", "--model", path, "--prompt-file", prompt)
            assert_fails(
                result,
                f"{path / 'config.json'} does not fit the weights",
                "model.layers.0.mlp.down_proj.weight must have shape [64, 128], got [64, 96]",
            )

    def test_scales_of_another_shape(self, fp8_checkpoint, prompt, tmp_path):
        from safetensors.torch import load_file, save_file

        (tmp_path / "config.json").write_text((fp8_checkpoint / "config.json").read_text())
        weights, scales = sorted(fp8_checkpoint.glob("*.safetensors"))
        (tmp_path / weights.name).symlink_to(weights)
        changed = load_file(scales)
        name = min(changed)
        changed[name] = changed[name].new_ones(3, 3)
        save_file(changed, tmp_path / scales.name)
        result = run("generate", "--model", tmp_path, "--prompt-file", prompt)
        assert_fails(result, str(tmp_path), name)
        changed["model.nothing_scale_inv"] = changed.pop(name)
        save_file(changed, tmp_path / scales.name)
        result = run("generate", "--model", tmp_path, "--prompt-file", prompt)
        assert_fails(result, str(tmp_path), name.removesuffix("_scale_inv"), "got none")

    @pytest.mark.parametrize(
        ("text", "parts"),
        [
            ('{"num_beams": 4}', ["num_beams must be 1", "got 4"]),
            ('{"num_beams": "four"}', ["num_beams must be 1", "got 'four'"]),
            ('{"num_return_sequences": 2}', ["num_return_sequences must be 1", "got 2"]),
            ('{"cache_implementation": "none such"}', ["cache_implementation", "none such"]),
            ("{", ["is not valid JSON"]),
            ("[]", ["must hold an object, got list"]),
        ],
    )
    def test_generation_config(self, checkpoint, prompt, tmp_path, text, parts):
        for name in ("config.json", "model.safetensors"):
            (tmp_path / name).symlink_to(checkpoint / name)
        (tmp_path / "generation_config.json").write_text(text)
        result = run("generate", "--model", tmp_path, "--prompt-file", prompt)
        assert_fails(result, "generation_config.json", *parts)

    def test_another_architecture(self, prompt, tmp_path):
        (tmp_path / "config.json").write_text('{"model_type": "llama"}')
        result = run("generate", "--model", tmp_path, "--prompt-file", prompt)
        assert_fails(result, "deepseek_v4 or glm5_next_text, got 'llama'")

    def test_no_tokenizer(self, checkpoint, prompt, tmp_path):
        config = json.loads((checkpoint / "config.json").read_text()) | {"vocab_size": 1000}
        (tmp_path / "config.json").write_text(json.dumps(config))
        result = run("generate", "--model", tmp_path, "--prompt-file", prompt)
        assert_fails(result, "has no tokenizer", "vocab_size must be 256, got 1000")

    def test_no_weights(self, checkpoint, prompt, tmp_path):
        (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
        result = run("generate", "--model", tmp_path, "--prompt-file", prompt)
        assert_fails(result, str(tmp_path), "safetensors")

    def test_incomplete_weights(self, checkpoint, prompt, tmp_path):
        from safetensors.torch import load_file, save_file

        weights = load_file(checkpoint / "model.safetensors")
        del weights["model.norm.weight"]
        save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
        result = run("generate", "--model", tmp_path, "--prompt-file", prompt)
        assert_fails(result, "lacks 1 weights", "model.norm.weight")

    @pytest.mark.parametrize(
        ("arguments", "parts"),
        [
            (["--cache-format", "fp7"], ["format name must be one of", "'fp7'"]),
            (["--cache-format", "fp8_584"], ["cache_format must have head_dim 576", "fp8_584"]),
            (["--dtype", "int3"], ["dtype must be one of", "'int3'"]),
        ],
    )
    def test_options(self, checkpoint, prompt, arguments, parts):
        result = run("generate", "--model", checkpoint, "--prompt-file", prompt, *arguments)
        assert_fails(result, *parts)


def test_tokenizer_of_the_checkpoint(checkpoint, prompt, tmp_path):
    """Bytes of one character that arrive in several tokens are shown together."""
    tokenizers = pytest.importorskip("tokenizers")
    from sparsemla_lab.generate import ByteTokenizer, CheckpointTokenizer

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    text = "aé\N{SNOWMAN}z"
    for each in (CheckpointTokenizer(tmp_path), ByteTokenizer()):
        ids = each.encode(text.encode())
        pieces = list(map(each.decoder(), ids))
        assert len(ids) == 7
        assert "".join(pieces) == text
        assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    encode = CheckpointTokenizer(tmp_path).encode
    assert encode(b"a\xff") == encode("a\N{REPLACEMENT CHARACTER}".encode())


def test_tokens_beyond_the_vocabulary(checkpoint, monkeypatch):
    pytest.importorskip("transformers")
    from sparsemla_lab.generate import (
        ByteTokenizer,
        CheckpointError,
        generate_text,
        load_checkpoint,
    )

    loaded = load_checkpoint(checkpoint, cache_format="bf16", dtype="float32")
    monkeypatch.setattr(ByteTokenizer, "encode", lambda self, text: [7, 256])
    with pytest.raises(CheckpointError, match=r"vocab_size must be above 256, .* got 256"):
        generate_text(loaded, b"text", 1, write=lambda text: None)


def test_missing_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    for module in ("_lab.demo", "_lab.generate", ".backends.transformers"):
        monkeypatch.delitem(sys.modules, f"sparsemla{module}", raising=False)
    install = "in the checkout: python -m pip install -c constraints.txt -e '.[demo]' -e ./lab"
    assert_fails(run("demo"), "transformers is not installed", install)
    result = run("generate", "--model", ".", "--prompt-file", __file__)
    assert_fails(result, install)


ONE_LONG_CALL = """
import torch
from sparsemla_lab.bench import command, cpu
def compare():
    torch.set_num_threads(1)
    numbers = torch.ones(1 << 13, 1 << 13, dtype=torch.float64)
    print("computing", flush=True)
    return numbers @ numbers
cpu.compare = compare
command.bench(lambda line: None, device="cpu")
"""


def test_bench_ends_at_once_when_it_is_interrupted():
    """Also during a call of torch that takes a minute on one thread."""
    process = subprocess.Popen(
        [sys.executable, "-c", ONE_LONG_CALL],
        stdout=subprocess.PIPE,
        text=True,
        # Background jobs of a shell ignore the signal, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "computing\n"
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=5) == -signal.SIGINT
        finally:
            process.kill()


def test_exit_code_of_the_process(tmp_path):
    """The installed command calls ``main``."""
    command = [sys.executable, "-c", "from sparsemla_lab.cli import main; main()"]
    missing = tmp_path / "no.txt"
    failed = subprocess.run(
        [*command, "generate", "--model", "none", "--prompt-file", missing],
        capture_output=True,
        text=True,
        check=False,
    )
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert failed.stderr == f"sparsemla: cannot read {missing}: No such file or directory\n"


def as_module(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sparsemla", *arguments]
    return subprocess.run(command, text=True, stderr=subprocess.PIPE, check=False, **options)


def test_python_runs_the_package():
    done = as_module("--version", stdout=subprocess.PIPE)
    assert done.stdout == f"sparsemla {sparsemla.__version__}\n"
    assert "Usage: sparsemla " in as_module("--help", stdout=subprocess.PIPE).stdout


def test_without_its_package_the_command_line_says_how_to_install_it():
    code = (
        "import runpy, sys; sys.modules['sparsemla_lab'] = None; "
        "runpy.run_module('sparsemla', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "sparsemla: the command line is not installed; in a checkout of sparsemla: "
        "python -m pip install -c constraints.txt -e . -e ./lab\n"
    )


def test_output_that_nobody_reads(tmp_path):
    """A closed pipe ends the command without a word, a full disk with a line."""
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as pipe:
        done = as_module("--version", stdout=pipe)
    assert (done.returncode, done.stderr) == (1, "")
    if Path("/dev/full").exists():
        with open("/dev/full", "w") as full:
            done = as_module("--version", stdout=full)
        assert done.stderr == "sparsemla: cannot write the output: No space left on device\n"
        assert done.returncode == 1


def test_letters_that_a_terminal_lacks():
    code = (
        "from sparsemla_lab import cli; cli.app = lambda **_: cli._write('déjà\\ufffd'); cli.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("déjà?".encode("latin-1"), b"")


NESTED = b"[" * 100000
BAD_FILES = {
    "empty": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "an object": b"{}",
    "another encoding": '{"a": "é"}'.encode("latin-1"),
    "UTF-16": '{"a": 1}'.encode("utf-16"),
    "nested too deeply": NESTED,
    "a folder": None,
    "missing": None,
}
READERS = [
    ("warm-up", "--config"),
    ("bench", "--table"),
    ("bench", "--launches"),
    ("bench", "--host-times"),
    ("generate", "--model", ".", "--prompt-file"),
    ("demo", "--model"),
]


@pytest.mark.parametrize("content", BAD_FILES)
@pytest.mark.parametrize("reader", READERS, ids=" ".join)
def test_files_that_cannot_be_read(tmp_path, monkeypatch, reader, content):
    """One line that names the file, whatever it holds."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "file.json"
    if content == "a folder":
        path.mkdir()
    elif content != "missing":
        path.write_bytes(BAD_FILES[content] or b"")
    result = run(*reader, path)
    if reader[-1] != "--prompt-file":
        part = "config must have" if content == "an object" else "file.json"
        assert_fails(result, part if reader[0] == "warm-up" else "file.json")
    elif content in ("empty", "UTF-16", "a folder", "missing"):
        assert_fails(result, "file.json")
    else:
        assert_fails(result, ". is not a model directory")


@pytest.mark.parametrize("name", ["a" * 5000, "file/config.json"], ids=["long", "in a file"])
@pytest.mark.parametrize("reader", READERS, ids=" ".join)
def test_names_that_no_file_can_have(tmp_path, monkeypatch, reader, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert_fails(run(*reader, name), name)


NO_GPU = f"torch {torch.__version__} is built without CUDA"


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch is built with CUDA")
@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--model", "v4", "--device", "cuda"),
        ("generate", "--model", ".", "--prompt", "a", "--device", "cuda"),
        ("generate", "--model", ".", "--prompt", "a", "--device", "cuda:1"),
        ("explain", "sparse_decode", "--device", "cuda"),
        ("verify", "--device", "cuda"),
        ("bench", "--device", "cuda"),
        ("bench", "--op", "sparse_decode"),
        ("warm-up", "--config", "config.json"),
    ],
    ids=" ".join,
)
def test_commands_say_that_torch_has_no_cuda(tmp_path, monkeypatch, arguments):
    (tmp_path / "config.json").write_text(json.dumps(V32))
    monkeypatch.chdir(tmp_path)
    assert_fails(run(*arguments), NO_GPU)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="torch is built with CUDA")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", torch.device("cuda")], ids=str)
def test_functions_say_that_torch_has_no_cuda(device):

    spec = sparsemla.FP8_DS_MLA
    pooling = sparsemla.Pooling(128)
    prefill = {"cache_format": spec, "num_heads": 16, "topk": 2048}
    for call in (
        lambda: sparsemla.PagedCache.allocate(spec, 1, 64, device=device),
        lambda: sparsemla.PlanBuffers(1, 1, 1, device),
        lambda: sparsemla.WindowState.allocate(pooling, 64, num_rings=1, device=device),
        lambda: sparsemla.branch_workspace_size(1, 16, device=device),
        lambda: sparsemla.decode_workspace_size(1, 1, 16, device=device),
        lambda: sparsemla.prefill_workspace_rows([1], [1], **prefill, device=device),
        lambda: sparsemla.projection_weight(lambda x: x, 4, device=device),
        lambda: sparsemla.warm_up(device=device),
    ):
        with pytest.raises(ValueError, match=rf"device must be .* got '{device}': torch .*CUDA"):
            call()


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("demo", "--seed", 10**30), "--seed"),
        (("demo", "--seed", -1), "--seed"),
        (("demo", "--tokens", 127), "--tokens"),
        (("demo", "--model", ""), "is not a model directory"),
        (("generate", "--model", "", "--prompt", "a"), "is not a model directory"),
        (("generate", "--model", ".", "--prompt", "a", "--max-new-tokens", 0), "--max-new-tokens"),
        (("generate", "--model", ".", "--prompt", "a", "--device", ""), "device must be"),
        (("explain", "sparse_decode", "--heads", -1), "--heads"),
        (("explain", "sparse_decode", "--topk", -1), "--topk"),
        (("explain", ""), "op must be one of"),
        (("verify", "--jobs", 0), "--jobs"),
        (("verify", "--beside", -1), "--beside"),
        (("verify", "--device", ""), "--device must be one of cpu, cuda; got ''"),
        (("bench", "--device", ""), "--device must be one of cpu, cuda; got ''"),
        (("bench", "--op", "sparse_decod"), "did you mean sparse_decode?"),
        (("verify", "--op", "index_topk"), "did you mean indexer_topk?"),
        (("doctr",), "Did you mean 'doctor'?"),
        (("warm-up", "--config", ".", "--max-num-seqs", 0), "--max-num-seqs"),
        (("warm-up", "--config", ".", "--num-speculative-tokens", -1), "--num-speculative-tokens"),
        (("warm-up",), "--config"),
        (("nothing",), "nothing"),
    ],
    ids=str,
)
def test_odd_options_are_refused(tmp_path, monkeypatch, arguments, part):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert part in result.stderr
    assert "Traceback" not in result.stderr


V32 = {"num_attention_heads": 128, "index_topk": 2048, "index_n_heads": 64}
V4 = V32 | {"head_dim": 512, "o_groups": 16}
RATES = {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}
LISTED = V4 | {"compress_ratios": [0, 4, 128, 4]}
BY_TYPE = V4 | {"layer_types": ["sliding_attention", *RATES], "compress_rates": RATES}


@pytest.mark.parametrize(
    ("content", "arguments", "part"),
    [
        ("{", (), "is not JSON"),
        ("[]", (), "must hold an object, got list"),
        ('{"num_attention_heads": 128}', (), "lacks index_topk, index_n_heads"),
        (json.dumps(V32), ("--tensor-parallel-size", 3), "must divide 128 heads, got 3"),
        (json.dumps(V32), ("--cache", "fp9"), "format name must be one of"),
        (
            json.dumps(LISTED),
            ("--cache", "fp8_ds_mla"),
            "head_dim and value_dim 512 for this model",
        ),
        (json.dumps(BY_TYPE), ("--cache", "bf16_576v512"), "dim 512 for this model, got bf16_576"),
        (json.dumps(LISTED | {"model_type": "deepseek_v41"}), (), "layers share entries"),
        *(
            (json.dumps(fields), (), f"config: {name} must be")
            for name, fields in (
                ("num_attention_heads", V32 | {"num_attention_heads": "128"}),
                ("num_attention_heads", V32 | {"num_attention_heads": None}),
                ("num_attention_heads", V32 | {"num_attention_heads": 1.5}),
                ("index_topk", V32 | {"index_topk": 0}),
                ("index_n_heads", V32 | {"index_n_heads": -1}),
                ("max_position_embeddings", V32 | {"max_position_embeddings": "1K"}),
                ("qk_rope_head_dim", V32 | {"qk_rope_head_dim": "64"}),
                ("compress_ratios", V4 | {"compress_ratios": "4"}),
                ("compress_ratios", V4 | {"compress_ratios": [4, None]}),
                ("compress_rates", V4 | {"layer_types": ["a"], "compress_rates": 4}),
                ("layer_types", V4 | {"layer_types": "a", "compress_rates": RATES}),
                ("o_groups", LISTED | {"o_groups": "16"}),
                ("sliding_window", LISTED | {"sliding_window": [128]}),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 60 else "",
)
def test_warm_up_refuses(tmp_path: Path, content: str, arguments: Any, part: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    assert_fails(run("warm-up", "--config", path, *arguments), part)


def test_warm_up_needs_a_config(tmp_path: Path) -> None:
    assert_fails(run("warm-up", "--config", tmp_path), "cannot read", "config.json")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_warm_up_needs_a_gpu(tmp_path: Path) -> None:
    for config in (V32, LISTED, BY_TYPE):
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert_fails(run("warm-up", "--config", tmp_path), "needs a GPU")

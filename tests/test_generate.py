"""``sparsemla generate``: prompts, devices and hub ids. Broken checkpoints are in test_cli.py."""

from __future__ import annotations

import io
import json
import shutil
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

pytest.importorskip("transformers")

from sparsemla_lab import cli, generate
from sparsemla_lab.cli import app
from sparsemla_lab.options import FLOATS
from sparsemla_lab.testing.models import copying_model
from sparsemla_lab.testing.models_v4 import compressed_copying_model

PROMPT = "The lamp at Skerrow burns from dusk to dawn"
OPTIONS: dict[str, Any] = {"cache_format": "bf16", "dtype": "float32"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of bytes, without a tokenizer."""
    path = tmp_path_factory.mktemp("checkpoint")
    copying_model("deepseek_v32", vocab_size=256, lag=5).save_pretrained(path)
    return path


def run(*arguments: object, stdin: Any = None) -> Any:
    arguments = ("generate", "--max-new-tokens", 4, "--dtype", "float32", *arguments)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin)


def assert_fails(result: Any, *parts: str) -> None:
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.strip().splitlines()
    for part in parts:
        assert part in line


def test_a_prompt_on_the_command_line(checkpoint, tmp_path):
    (tmp_path / "prompt.txt").write_text(PROMPT)
    of_file = run("--model", checkpoint, "--prompt-file", tmp_path / "prompt.txt")
    of_option = run("--model", checkpoint, "--prompt", PROMPT)
    assert of_option.exit_code == 0, of_option.output
    assert of_option.stdout == of_file.stdout
    assert of_option.stdout.strip()


def test_a_prompt_from_a_pipe(checkpoint):
    """As it is, with bytes that are no UTF-8 and the last newline."""
    result = run("--model", checkpoint, stdin=PROMPT.encode())
    assert result.stdout == run("--model", checkpoint, "--prompt", PROMPT).stdout
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate.ByteTokenizer, "encode", lambda self, text: seen.append(text) or [7])
        assert run("--model", checkpoint, stdin=b"d\xe9j\xe0\n").exit_code == 0
    assert seen == [b"d\xe9j\xe0\n"]


def test_the_model_in_the_package():
    result = run("--model", "demo", "--prompt", "import numpy as ")
    assert result.exit_code == 0, result.output
    assert "decode: 4 tokens" in result.stderr
    misspelt = run("--model", "dmeo", "--prompt", "a")
    assert_fails(misspelt, "dmeo is not a model directory", "did you mean --model demo?")


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16"])
def test_names_of_dtypes(checkpoint, dtype):
    result = run("--model", checkpoint, "--prompt", PROMPT, "--dtype", dtype)
    assert result.exit_code == 0, result.output
    assert set(FLOATS) == set(generate.DTYPES)
    wrong = run("--model", checkpoint, "--prompt", PROMPT, "--dtype", "bf61")
    assert_fails(wrong, "--dtype must be one of bf16, ", "got 'bf61', did you mean bf16?")


def sampled(checkpoint: Path, *arguments: object) -> str:
    result = run("--model", checkpoint, "--prompt", PROMPT, "--max-new-tokens", 24, *arguments)
    assert result.exit_code == 0, result.output
    assert "; seed " in result.stderr
    return result.stdout


def test_sampled_text(checkpoint, monkeypatch):
    hot = "--temperature", 40
    state = torch.random.get_rng_state()
    text = sampled(checkpoint, *hot, "--seed", 5)
    assert sampled(checkpoint, *hot, "--seed", 5) == text
    assert torch.equal(torch.random.get_rng_state(), state)
    assert sampled(checkpoint, *hot, "--seed", 6) != text
    monkeypatch.setattr(cli.secrets, "randbelow", lambda high: 5)
    assert sampled(checkpoint, *hot) == text


def test_sampling_draws_as_transformers_does(checkpoint):
    loaded = generate.load_checkpoint(checkpoint, **OPTIONS)
    ids = torch.tensor([list(PROMPT.encode())])
    torch.manual_seed(5)
    options = {"do_sample": True, "temperature": 40.0, "top_p": 0.9, "top_k": 9}
    expected = loaded.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, **options
    )[0, ids.shape[1] :]
    text = sampled(checkpoint, "--temperature", 40, "--top-p", 0.9, "--top-k", 9, "--seed", 5)
    assert text == bytes(expected.tolist()).decode(errors="replace") + "\n"


def test_sampling_without_a_choice_is_greedy(checkpoint):
    greedy = run("--model", checkpoint, "--prompt", PROMPT, "--max-new-tokens", 24)
    assert "seed" not in greedy.stderr
    assert sampled(checkpoint, "--top-k", 1) == greedy.stdout
    assert sampled(checkpoint, "--top-p", 1e-6) == greedy.stdout
    zero = run("--model", checkpoint, "--prompt", PROMPT, "--temperature", 0)
    assert zero.stdout == run("--model", checkpoint, "--prompt", PROMPT).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--temperature", -1), "temperature must be greater than 0, got -1"),
        (("--temperature", "nan"), "temperature must be finite"),
        (("--top-p", 0), "top_p must be greater than 0, got 0"),
        (("--top-p", 1.5), "top_p must be at most 1, got 1.5"),
        (("--seed", 3), "--seed must be given with a --temperature above 0"),
        (("--temperature", 0, "--top-p", 1, "--top-k", 1), "--top-p and --top-k must be given"),
        (("--system", "Be brief."), "--system needs --chat"),
        (("--chat",), "has no chat template: leave out --chat"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together(checkpoint, arguments, message):
    assert_fails(run("--model", checkpoint, "--prompt", PROMPT, *arguments), message)


TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def chatting(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of bytes with a tokenizer and a chat template."""
    tokenizers = pytest.importorskip("tokenizers")
    path = tmp_path_factory.mktemp("chatting")
    for file in checkpoint.iterdir():
        (path / file.name).symlink_to(file)
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model = tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def type_in(monkeypatch: pytest.MonkeyPatch, text: bytes) -> None:
    stdin = io.TextIOWrapper(Terminal(text))
    monkeypatch.setattr(cli, "sys", types.SimpleNamespace(stdin=stdin))


def test_a_chat(chatting, monkeypatch):
    """The prompt stands in the template, and a terminal's chat goes on with its answers."""
    text = "[system]Be brief.[user]Who lights it?[assistant]"
    one = run("--model", chatting, "--prompt", text)
    options = "--model", chatting, "--chat", "--system", "Be brief."
    assert run(*options, "--prompt", "Who lights it?").stdout == one.stdout
    assert run(*options, stdin=b"Who lights it?\n").stdout == one.stdout
    seen = []
    encode = generate.CheckpointTokenizer.encode_chat

    def record(self, messages):
        seen.append([(each["role"], each["content"]) for each in messages])
        return encode(self, messages)

    monkeypatch.setattr(generate.CheckpointTokenizer, "encode_chat", record)
    type_in(monkeypatch, b"Who lights it?\n\nWhen?\n")
    talk = run(*options)
    assert talk.exit_code == 0, talk.output
    answer = one.stdout[:-1]
    first = [("system", "Be brief."), ("user", "Who lights it?")]
    assert seen == [first, [*first, ("assistant", answer), ("user", "When?")]]
    assert talk.stdout.startswith(one.stdout)
    assert talk.stderr.count("> ") == 4
    assert talk.stderr.count("tokens/s") == 2


def test_an_interrupted_text_ends_its_line(checkpoint, monkeypatch):
    decoder = generate.ByteTokenizer().decoder()

    def decode(token: int) -> str:
        if len(seen) == 2:
            raise KeyboardInterrupt
        seen.append(token)
        return decoder(token)

    seen: list[int] = []
    monkeypatch.setattr(generate.ByteTokenizer, "decoder", lambda self: decode)
    result = run("--model", checkpoint, "--prompt", PROMPT)
    assert result.exit_code == 130
    assert result.stdout == bytes(seen).decode(errors="replace") + "\n"


def test_a_terminal_without_a_prompt(checkpoint, monkeypatch):
    type_in(monkeypatch, b"text")
    assert_fails(run("--model", checkpoint), "or a text on stdin, got neither")


def test_a_deepseek_v4_checkpoint(tmp_path):
    model = compressed_copying_model()
    model.save_pretrained(tmp_path)
    result = run("--model", tmp_path, "--prompt", PROMPT * 5)
    assert result.exit_code == 0, result.output
    assert "cache: 65 bytes/token" in result.stderr.replace("\n", "")
    prompt = torch.tensor([list((PROMPT * 5).encode())])
    mask = torch.ones_like(prompt)
    answer = model.generate(prompt, attention_mask=mask, max_new_tokens=4, do_sample=False)
    text = bytes(answer[0, prompt.shape[1] :].tolist()).decode(errors="replace")
    assert result.stdout.strip() == text.strip()


def test_exactly_one_prompt_is_required(checkpoint):
    expected = "--prompt or --prompt-file must be given, or a text on stdin, got neither"
    assert_fails(run("--model", checkpoint), expected)
    both = run("--model", checkpoint, "--prompt", "a", "--prompt-file", __file__)
    assert_fails(both, "--prompt and --prompt-file exclude each other, got both")
    assert_fails(run("--model", checkpoint, "--prompt", ""), "the prompt has no tokens")


def test_a_hub_id(checkpoint, monkeypatch, tmp_path):
    """The configuration is read before weights are downloaded."""
    downloads = []

    def download(repo_id: str, *, allow_patterns: str | list[str]) -> str:
        patterns = [allow_patterns] if isinstance(allow_patterns, str) else allow_patterns
        downloads.append((repo_id, patterns))
        for pattern in patterns:
            for file in checkpoint.glob(pattern):
                shutil.copy(file, tmp_path / file.name)
        return str(tmp_path)

    monkeypatch.setattr(generate, "snapshot_download", download)
    result = run("--model", "lamp/skerrow-1.5", "--prompt", PROMPT)
    assert result.exit_code == 0, result.output
    assert result.stdout == run("--model", checkpoint, "--prompt", PROMPT).stdout
    assert [patterns for _, patterns in downloads] == [["*.json"], list(generate.HUB_FILES)]

    downloads.clear()
    (tmp_path / "config.json").unlink()
    (tmp_path / "model.safetensors").unlink()
    checkpoint = tmp_path / "other"
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text('{"model_type": "llama"}')
    assert_fails(run("--model", "lamp/other", "--prompt", PROMPT), "got 'llama'")
    assert downloads == [("lamp/other", ["*.json"])]


def test_a_hub_id_that_cannot_be_read(monkeypatch):
    def download(repo_id: str, **_: object) -> str:
        raise OSError("404 Client Error")

    monkeypatch.setattr(generate, "snapshot_download", download)
    result = run("--model", "lamp/none", "--prompt", PROMPT)
    assert_fails(result, "lamp/none is neither a folder nor a readable model", "404 Client Error")


def test_a_name_that_no_file_can_have():
    for name in ("a" * 5000, "a\0b"):
        result = run("--model", name, "--prompt", PROMPT)
        assert result.exit_code == 2, result.output
        assert result.stderr.startswith("sparsemla: ")


def test_a_prompt_of_another_encoding(checkpoint):
    """Python hands over a byte that is no UTF-8 as a surrogate."""
    seen = []

    def encode(self, text):
        seen.append(text)
        return list(text)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generate.ByteTokenizer, "encode", encode)
        result = run("--model", checkpoint, "--prompt", "d\udce9j\udce0")
    assert result.exit_code == 0, result.output
    assert seen == ["déjà".encode("latin-1")]


@pytest.mark.parametrize("path", ["./lamp/none", "/lamp/none", "lamp", "./lamp"])
def test_paths_are_not_hub_ids(monkeypatch, path):
    monkeypatch.setattr(generate, "snapshot_download", lambda *args: pytest.fail("downloads"))
    assert_fails(run("--model", path, "--prompt", PROMPT), "is not a model directory")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("tpu", "device must be auto, cpu, cuda or cuda:<index>, got 'tpu'"),
        ("meta", "device must be auto, cpu, cuda or cuda:<index>, got 'meta'"),
        ("cuda:1", "device must be on this machine, got 'cuda:1': torch "),
    ],
)
def test_missing_devices_are_refused(checkpoint, monkeypatch, device, message):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert_fails(run("--model", checkpoint, "--prompt", PROMPT, "--device", device), message)


def test_the_same_text_on_every_device(checkpoint, device):
    expected = run("--model", checkpoint, "--prompt", PROMPT, "--cache-format", "bf16")
    result = run("--model", checkpoint, "--prompt", PROMPT, "--device", device)
    assert result.exit_code == 0, result.output
    assert result.stdout == expected.stdout
    loaded = generate.load_checkpoint(checkpoint, device=device, **OPTIONS)
    assert loaded.model.device.type == device
    assert loaded.attention.new_cache(1).page_table.device.type == device


def test_layers_on_all_gpus(checkpoint):
    """``auto`` needs accelerate, and takes the CPU where there is no GPU."""
    pytest.importorskip("accelerate")
    result = run("--model", checkpoint, "--prompt", PROMPT, "--device", "auto")
    assert result.exit_code == 0, result.output
    assert result.stdout == run("--model", checkpoint, "--prompt", PROMPT).stdout


def test_auto_without_accelerate(checkpoint, monkeypatch):
    from transformers.integrations import accelerate

    monkeypatch.setattr(accelerate, "is_accelerate_available", lambda: False)
    result = run("--model", checkpoint, "--prompt", PROMPT, "--device", "auto")
    assert_fails(result, "requires `accelerate`")


OPTIONS_OF_GENERATION = [
    ({"use_cache": False}, None),
    ({"cache_implementation": "static"}, None),
    ({"eos_token_id": []}, "generation_config.json or config.json: IndexError"),
    ({"eos_token_id": "end"}, "by an option of generation_config.json or config.json"),
    ({"prefill_chunk_size": 0}, "by an option of generation_config.json or config.json"),
    ({"exponential_decay_length_penalty": [1, 2.0]}, "by an option of generation_config.json"),
    ({"max_new_tokens": "ten"}, "generation_config.json: "),
    ({"forced_eos_token_id": 999}, "the generation failed after 3 tokens: IndexError"),
    ({"stop_strings": ["."]}, "by an option of generation_config.json"),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS_OF_GENERATION, ids=str)
def test_options_of_the_checkpoint(checkpoint, tmp_path, options, message):
    """They count, or are refused in one line, however transformers fails."""
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).symlink_to(checkpoint / name)
    (tmp_path / "generation_config.json").write_text(json.dumps(options))
    result = run("--model", tmp_path, "--prompt", PROMPT)
    if message is None:
        assert result.stdout == run("--model", checkpoint, "--prompt", PROMPT).stdout
    else:
        assert_fails(result, message)


FIELDS = [
    ({"use_cache": False}, None),
    ({"return_dict": False}, "by an option of generation_config.json or config.json"),
    ({"output_attentions": True}, "output_attentions must be False"),
    ({"model_type": "deepseek_v3"}, "model.safetensors: model.layers.0.self_attn.indexer."),
    ({"model_type": "hy_v4"}, "lacks"),
    ({"hidden_act": "none such"}, "config.json: KeyError: 'none such'"),
    ({"pad_token_id": 999}, "config.json: AssertionError: Padding_idx"),
    ({"attn_implementation": "none such"}, "config.json: "),
    ({"num_nextn_predict_layers": "one"}, None),
    ({"attention_bias": True}, "lacks 6 weights"),
]


@pytest.mark.parametrize(("fields", "message"), FIELDS, ids=str)
def test_fields_of_the_config(checkpoint, tmp_path, fields, message):
    """Each error names the file that it comes from."""
    config = json.loads((checkpoint / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    result = run("--model", tmp_path, "--prompt", PROMPT)
    if message is None:
        assert result.stdout == run("--model", checkpoint, "--prompt", PROMPT).stdout
    else:
        assert_fails(result, message)


def test_whatever_enable_raises_names_the_checkpoint(checkpoint, monkeypatch):
    def enable(model, **_):
        raise AttributeError("no indexer")

    monkeypatch.setattr(generate, "enable", enable)
    result = run("--model", checkpoint, "--prompt", PROMPT)
    assert_fails(result, f"{checkpoint}: AttributeError: no indexer")


def test_a_config_that_is_nested_too_deeply(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100000)
    assert_fails(run("--model", tmp_path, "--prompt", PROMPT), "config.json is not valid JSON")


@pytest.mark.parametrize("name", generate.TOKENIZER_FILES)
def test_a_broken_tokenizer_is_blamed_itself(checkpoint, tmp_path, name):
    for file in checkpoint.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / name).write_text("{")
    assert_fails(run("--model", tmp_path, "--prompt", PROMPT), f"{name}: ")


def test_errors_of_the_writer_are_passed_on(checkpoint):
    def write(text: str) -> None:
        raise RuntimeError("the caller's")

    loaded = generate.load_checkpoint(checkpoint, **OPTIONS)
    with pytest.raises(RuntimeError, match=r"^the caller's$"):
        generate.generate_text(loaded, PROMPT.encode(), 4, write=write)
    with pytest.raises(ValueError, match="max_new_tokens must be at least 1, got 0"):
        generate.generate_text(loaded, PROMPT.encode(), 0, write=write)

"""The example that trains a model with sparse attention, with a few steps of each stage."""

from __future__ import annotations

import json
import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import processes
import train_dsa
from dsa_model import learning, over, selection
from sparsemla_lab import corpus

STEPS = {"dense": 12, "warm-up": 8, "sparse": 3, "control": 3}
TINY = replace(
    train_dsa.SIZES["toy"],
    config=replace(train_dsa.SIZES["toy"].config, index_topk=8),
    phases=(train_dsa.Phase(0.5, 256, 32, 0.5), train_dsa.Phase(1.0, 256, 64, 0.5)),
    widths=(8, 16),
    eval_rows=4,
)


@contextmanager
def tiny_size() -> Iterator[None]:
    """The tiny size in the place of the toy, on a short text."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(train_dsa.SIZES, "toy", TINY)
        patch.setattr(train_dsa, "training_text", lambda torch_too: corpus.held_out_text()[:50_000])
        yield


@pytest.fixture(scope="module")
def tiny():
    with tiny_size():
        yield


def train(folder: Path, *arguments: str) -> int:
    steps = [str(STEPS[stage]) for stage in ("dense", "warm-up", "sparse")]
    return train_dsa.main(["--out", str(folder), "--device", "cpu", "--steps", *steps, *arguments])


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    assert train(folder, "--export", str(folder / "model")) == 0
    return folder


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]


def run_in(folder: Path) -> train_dsa.Run:
    return train_dsa.Run(TINY, STEPS, folder, torch.device("cpu"), math.inf)


def test_stages_train_their_own_part(folder):
    trained = {stage: load_file(folder / f"{stage}.safetensors") for stage in STEPS}
    everything = {name for name, _ in train_dsa.Model(TINY.config, TINY.dtype).named_parameters()}
    indexer = {name for name in everything if ".indexer." in name}
    assert {stage: set(weights) for stage, weights in trained.items()} == {
        "dense": everything - indexer,
        "warm-up": indexer,
        "sparse": everything,
        "control": everything - indexer,
    }


def test_each_loss_reaches_its_own_part():
    model = train_dsa.Model(TINY.config, TINY.dtype)
    language, indexer = model.parts()
    losses = []
    batch = corpus.stream(2, 32, 1, torch.Generator().manual_seed(0))
    logits = model(batch.tokens, learning(losses, TINY.config.index_topk))
    torch.stack(losses).sum().backward(retain_graph=True)
    assert [p.grad for p in language if p.grad is not None] == []
    assert all(p.grad.abs().max() > 0 for p in indexer)
    model.zero_grad()
    sum(train_dsa.losses_of(logits, batch)).backward()
    assert [p.grad for p in indexer if p.grad is not None] == []


def test_the_end_is_a_table_in_columns(folder, capsys):
    """Everything is there, so nothing is trained again."""
    assert train(folder) == 0
    *_, rows, verdicts = capsys.readouterr().out.split("\n\n")
    head, *rows = rows.splitlines()
    assert " ".join(head.split()) == "loss recall at 16 recall at 32 recall at 64"
    results = json.loads((folder / "results.json").read_text())
    assert [row[:32].rstrip() for row in rows] == list(results)
    assert [float(row[32:40]) for row in rows] == [
        round(each["loss"], 4) for each in results.values()
    ]
    words = [line[44:].split()[0] for line in verdicts.splitlines()]
    assert words.count("passed") == len(train_dsa.EXACT)
    assert set(words) == {"passed", "not"}


def test_losses_fall(folder):
    log = lines(folder)
    dense = [line["loss"] for line in log if line.get("stage") == "dense"]
    warm = [sum(line["kl"]) for line in log if line.get("stage") == "warm-up"]
    assert dense[-1] < dense[0] - 1
    assert warm[-1] < 0.8 * warm[0]
    assert [len(line["kl"]) for line in log if line.get("stage") == "sparse"] == [2, 2]


def test_the_table_and_its_checks(folder):
    results = json.loads((folder / "results.json").read_text())
    assert list(results)[:4] == [
        "dense control",
        "sparse",
        "sparse, FP8 cache",
        "exported weights, FP8 cache",
    ]
    assert {"random rows", "last rows", "untrained indexer", "sparse, 16 rows"} < set(results)
    for row in results.values():
        assert row["loss"] == pytest.approx(sum(row["by_quarter"]) / 4, abs=1e-5)
        assert set(row["recall"]) == {"16", "32", "64"}
    passed = {line["check"]: line["passed"] for line in lines(folder) if "check" in line}
    assert len(passed) == 11
    assert not passed["the control recalls"]  # after so few steps, and not judged
    judged = {line["check"] for line in lines(folder) if line.get("judged")}
    assert judged == set(train_dsa.EXACT)
    for name in (
        "lists of all rows equal dense attention",
        "inference picks the same bytes",
        "two runs have the same bits",
    ):
        assert passed[name], name


def test_a_run_that_stops_after_every_step_has_the_same_bits(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(train_dsa, "checks", lambda run, text: {})
    monkeypatch.setattr(train_dsa, "table", lambda run: {"nothing": {"loss": 0.0, "recall": {}}})
    status = [train(tmp_path, "--minutes", "0") for _ in range(sum(STEPS.values()))]
    assert set(status) == {2}
    assert train(tmp_path, "--minutes", "0") == 0
    for stage in STEPS:
        whole, parts = (load_file(path / f"{stage}.safetensors") for path in (folder, tmp_path))
        assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_the_checkpoint_is_one_of_transformers(folder):
    pytest.importorskip("transformers")
    from sparsemla_lab.generate import load_checkpoint

    stored = load_file(folder / "model" / "model.safetensors")
    kinds = {str(weight.dtype) for weight in stored.values()}
    assert kinds == {"torch.float8_e4m3fn", "torch.float32", "torch.bfloat16"}
    checkpoint = load_checkpoint(folder / "model", cache_format="bf16", dtype="float32")
    run = run_in(folder)
    tokens = train_dsa.held_out(run)[0][0].tokens[:2]
    checkpoint.attention.disable()
    with torch.no_grad():
        theirs = checkpoint.model(tokens).logits
        ours = train_dsa.exported(run)(tokens, over(selection, TINY.config.index_topk))
    away = (ours - theirs).abs().amax(-1)
    # The others picked other rows: theirs by float32 scores, ours by bfloat16 ones.
    assert (away < 1e-2).float().mean() > 0.9
    assert away.median() < 1e-5


def test_the_learning_rate_rises_and_falls():
    rates = [train_dsa.rate(step, 100, 10) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == rates[10] == 1
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert 0.1 <= rates[-1] < 0.11


def train_as_rank(rank: int, folder: Path) -> tuple[int, list[tuple[int, int]]]:
    """The status, and of each step the rows of this rank and of all."""
    rows = []
    losses_of = train_dsa.losses_of

    def seen(logits, batch, whole, num_ranks):
        rows.append((len(batch.tokens), len(whole.tokens)))
        return losses_of(logits, batch, whole, num_ranks)

    with tiny_size(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_dsa, "losses_of", seen)
        return train(folder), rows


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_train_as_one_process(folder, tmp_path, num_ranks):
    """The same losses, gradient norms and weights to rounding: the same batches, equal parts."""
    ranks = processes.on_ranks(num_ranks, tmp_path, "cpu", train_as_rank, tmp_path)
    assert [status for status, _ in ranks] == [0] * num_ranks
    alone, together = (
        [line for line in lines(path) if "stage" in line] for path in (folder, tmp_path)
    )
    assert len(alone) == len(together)  # rank 0 alone writes
    for one, line in zip(alone, together, strict=True):
        assert (line["stage"], line["step"]) == (one["stage"], one["step"])
        for name in ("loss", "recall_loss", "kl", "norm"):
            assert line[name] == pytest.approx(one[name], rel=1e-4, abs=2e-5), (line, name)
        assert line["tokens_per_second"] > 0
    first, *_ = lines(tmp_path)
    assert (first["ranks"], first["share_a_gpu"]) == (num_ranks, False)
    # The last checks are rank 0's alone: two runs of two steps, over whole batches.
    steps = sum(STEPS.values())
    (_, own), *others = ranks
    assert all(part * num_ranks == whole for part, whole in own[:steps])
    assert [part == whole for part, whole in own[steps:]] == [True] * 4
    assert [len(rows) for _, rows in others] == [steps] * (num_ranks - 1)
    one, several = (json.loads((path / "results.json").read_text()) for path in (folder, tmp_path))
    assert several.keys() == one.keys()
    for name, row in several.items():
        assert row["loss"] == pytest.approx(one[name]["loss"], rel=1e-3), name
    found = [
        {x["check"]: x["passed"] for x in lines(p) if "check" in x} for p in (folder, tmp_path)
    ]
    assert [found[1][name] for name in train_dsa.EXACT] == [True] * 2
    assert found[1].keys() == found[0].keys()


def refused(rank: int, folder: Path) -> str:
    with pytest.raises(ValueError, match="ranks") as error:
        train_as_rank(rank, folder)
    return str(error.value)


def test_ranks_that_do_not_divide_a_batch_are_refused(tmp_path):
    expected = "ranks must divide the rows of each step, [4, 8], got 3 ranks"
    assert processes.on_ranks(3, tmp_path, "cpu", refused, tmp_path) == [expected] * 3


def test_torchrun_says_who_takes_part(tiny, tmp_path, monkeypatch):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": 0, "WORLD_SIZE": 1}
    for name, value in (place | {"TORCHELASTIC_RUN_ID": "run", "LOCAL_RANK": 0}).items():
        monkeypatch.setenv(name, str(value))
    assert train(tmp_path, "--minutes", "0") == 2
    assert not torch.distributed.is_initialized()
    assert lines(tmp_path)[0]["ranks"] == 1

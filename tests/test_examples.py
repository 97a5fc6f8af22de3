"""The examples run; tests/test_batching.py tests examples/batching.py."""

from __future__ import annotations

import importlib
import itertools
import json
import re
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_transformers_generate(capsys, device):
    pytest.importorskip("transformers")
    import transformers_generate

    assert transformers_generate.main(device) == 0
    theirs, *ours = capsys.readouterr().out.splitlines()
    assert theirs.startswith("transformers' attention: [")
    assert ours == [
        "sparsemla, bf16_576v512: the same tokens, 2816 bytes of cache a token",
        "sparsemla, fp8_ds_mla: the same tokens, 1576 bytes of cache a token",
    ]


def test_transformers_generate_tells_of_other_tokens(capsys, monkeypatch):
    pytest.importorskip("transformers")
    import transformers_generate

    right = transformers_generate.generate
    changes = iter([0, 0, 1])
    monkeypatch.setattr(
        transformers_generate,
        "generate",
        lambda model, prompt: [next(changes), *right(model, prompt)],
    )
    assert transformers_generate.main() == 1
    assert "fp8_ds_mla: OTHER tokens" in capsys.readouterr().out


def without(op, name):
    """An op that ignores an argument."""
    return lambda *args, **options: op(*args, **options | {name: None})


def with_padding(op):
    """Slots of all entries, those of padding too."""
    return lambda indices, *args, **options: op(indices.clamp(min=0), *args, **options)


def of_magnitudes(op):
    """A selection by weights without signs."""
    return lambda q, weights, *args, **options: op(q, weights.abs(), *args, **options)


DOCUMENTS = {
    "max_decode_branch": ("decode_branch", lambda op: without(op, "topk_lengths"), 2),
    "max_prefill_sparse": ("sparse_prefill", lambda op: without(op, "topk_lengths"), 3),
    "max_rope_norm_quant": ("from_freqs_cis", lambda op: torch.Tensor.float, 2),
    "max_indexer": ("indexer_topk", of_magnitudes, 2),
    "vllm_sparse_backend": ("to_slots", with_padding, 3),
}


@pytest.mark.parametrize("name", DOCUMENTS)
def test_the_programs_of_the_documents(capsys, monkeypatch, name, device):
    program = importlib.import_module(f"documents.{name}")
    op, wrong, calls = DOCUMENTS[name]
    assert program.main(device) == 0
    assert len(capsys.readouterr().out.splitlines()) == calls
    monkeypatch.setattr(program, op, wrong(getattr(program, op)))
    assert program.main(device) == 1


def test_every_document_has_a_program():
    page = (EXAMPLES.parent / "docs" / "documents.md").read_text(encoding="utf-8")
    programs = {path.stem for path in (EXAMPLES / "documents").glob("*.py")}
    assert programs == set(DOCUMENTS)
    assert all(f"`examples/documents/{name}.py`" in page for name in programs)


def test_the_indexer_learns_to_recall(capsys):
    import train_recall

    assert (
        train_recall.main((("dense", 60, 1e-2), ("warm-up", 40, 1e-2), ("sparse", 10, 1e-3))) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    before, after, sparse = (
        float(line.split("mass ")[1].split(" of")[0]) for line in lines if "selected" in line
    )
    assert before < 0.5 < 0.95 < min(after, sparse)
    divergences = [line.split("indexer ")[1].split(" to ") for line in lines[4::4]]
    assert all(float(last) < float(first) for first, last in divergences)


def test_an_indexer_without_its_loss_does_not_recall(capsys):
    import train_recall

    assert train_recall.main((("dense", 60, 1e-2),)) == 1
    lines = capsys.readouterr().out.splitlines()
    accuracies = [float(line.split("accuracy ")[1].split(",")[0]) for line in lines[1:]]
    dense, *others = accuracies
    assert max(others) < 0.5 < dense


def test_the_trainer_learns_a_text(capsys, tmp_path):
    pytest.importorskip("accelerate")
    import finetune_trainer

    text = tmp_path / "text"
    text.write_bytes(b"The lamp at Skerrow burns until the morning. " * 80)
    sizes = {"length": 272, "warmup_steps": 1, "steps": 2, "cpu": True}
    assert finetune_trainer.main(None, text, tmp_path / "out", **sizes) == 0
    *lines, saved = capsys.readouterr().out.splitlines()
    assert [line[:34].rstrip() for line in lines] == [
        "loss, dense attention",
        "the indexers' loss, warmed up",
        "loss, selected tokens",
        "loss, 2 steps later",
    ]
    dense, _, before, after = (float(line[34:]) for line in lines)
    assert abs(dense - before) < 0.1 * dense  # the indexers fit already
    assert after < before
    assert saved == f"saved to {tmp_path / 'out'}"
    model, tokens = finetune_trainer.load(None, text)
    model.eval()
    loaded = type(model).from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    ids = tokens[None, :272]
    with torch.no_grad():
        assert loaded(ids, labels=ids).loss < model(ids, labels=ids).loss


def cells(name):
    """The code cells of a notebook: their text, and what they printed when it was written."""
    notebook = json.loads((EXAMPLES / name).read_text(encoding="utf-8"))
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            printed = [each["text"] for each in cell["outputs"] if each.get("name") == "stdout"]
            yield "".join(cell["source"]), "".join(itertools.chain(*printed))


def lasting(printed):
    """Without numbers that another CPU rounds otherwise, and selections that follow from them."""
    lines = [line for line in printed.splitlines() if not line.startswith("layer ")]
    return [re.sub(r"loss \d+\.\d+", "loss", line) for line in lines]


def test_the_notebook_runs_and_prints_what_it_shows(capsys):
    pytest.importorskip("transformers")
    matplotlib = pytest.importorskip("matplotlib")
    namespace = {"__name__": "notebook"}
    with matplotlib.rc_context({"backend": "agg"}):
        for number, (code, printed) in enumerate(cells("dsa_in_ten_minutes.ipynb"), 1):
            exec(compile(code, f"cell {number}", "exec"), namespace)
            assert lasting(capsys.readouterr().out) == lasting(printed), number
    namespace["plt"].close("all")
    namespace["attention"].disable()


def test_every_example_is_linked():
    """From the README, and from a page of the documentation."""
    root = EXAMPLES.parent
    readme = (root / "README.md").read_text(encoding="utf-8")
    pages = "".join(page.read_text(encoding="utf-8") for page in (root / "docs").rglob("*.md"))
    for example in EXAMPLES.glob("*.*"):
        assert f"/examples/{example.name})" in readme, example.name
        assert f"/examples/{example.name})" in pages, example.name


def test_replay_rollout(capsys):
    """Recorded selections leave less than half of the difference of log-probabilities."""
    pytest.importorskip("transformers")
    import replay_rollout

    assert replay_rollout.main() == 0
    records, *lines = capsys.readouterr().out.splitlines()
    assert float(re.search(r"[\d.]+", records)[0]) < 16 + 4
    pattern = r"by ([\d.]+) on average and ([\d.]+) at most; (\d+) of 96 ratios"
    own, recorded = ([float(x) for x in re.search(pattern, line).groups()] for line in lines)
    assert all(after < before / 2 for before, after in zip(own, recorded, strict=True))


def test_replay_rollout_tells_of_other_selections(capsys, monkeypatch):
    pytest.importorskip("transformers")
    import replay_rollout

    read = replay_rollout.read
    monkeypatch.setattr(
        replay_rollout,
        "read",
        lambda *args: {idx: lists.clamp(max=0) for idx, lists in read(*args).items()},
    )
    assert replay_rollout.main() == 1

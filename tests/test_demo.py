"""The demos, one with a tiny model that nobody trained: numbers, tables and pictures."""

from __future__ import annotations

import io
import re

import pytest
import torch
from torch.nn import functional

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from rich.console import Console
from rich.progress import Progress

from sparsemla_lab import corpus, demo, demo_v4
from sparsemla_lab.generate import load_checkpoint
from sparsemla_lab.picture import draw_contexts, draw_question

CONTEXT, TOPK = 256, 16


@pytest.fixture(scope="module")
def report(checkpoint) -> demo.Report:
    return demo.run_demo(
        checkpoint, context=CONTEXT, timed=(64, 128), new_bytes=3, progress=Progress(disable=True)
    )


@pytest.fixture(scope="module")
def model(checkpoint):
    loaded = load_checkpoint(checkpoint, cache_format="bf16", dtype="float32")
    loaded.attention.disable()
    return loaded.model


def test_the_report(report):
    assert (report.topk, set(report.loss)) == (TOPK, set(demo.MODES))
    assert all(list(shares) == [64, 128, 256] for shares in report.recall.values())
    assert list(report.milliseconds) == [64, 128]
    assert min(ms for pair in report.milliseconds.values() for ms in pair) > 0
    assert report.cache_bytes == {
        demo.DENSE: 2 * 2 * (192 + 128),
        demo.OURS: 1152 + 256,
        demo.OURS_FP8: 656 + 132,
    }
    assert len(report.prompt) == CONTEXT // 2
    assert report.continuation


def test_each_kind_of_attention_sees_its_rows(report, model, monkeypatch):
    text = corpus.as_bytes(corpus.held_out_text())
    rows = corpus.windows(text, demo.PIECES, CONTEXT // 2 + 1, None)[1:2].long()
    tokens, labels = rows[:, :-1], rows[0, 1:]

    def read(mode):
        with demo._attention(model, mode, torch.Generator().manual_seed(0)):
            return demo._read(model, tokens)

    dense, random = read(demo.DENSE), read(demo.RANDOM)
    assert functional.cross_entropy(dense, labels).item() == report.loss[demo.DENSE]
    # The first rows see no more than a selection has.
    torch.testing.assert_close(random[:TOPK], dense[:TOPK])
    assert (random - dense).abs().max() > 0.02
    assert report.loss[demo.OURS] == pytest.approx(report.loss[demo.OURS_FP8], abs=0.01)
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn.indexer, "index_topk", CONTEXT)
    torch.testing.assert_close(read(demo.OURS), dense, atol=5e-3, rtol=0)
    torch.testing.assert_close(model(tokens).logits[0], dense)  # and the model is as it was


def test_the_question_and_what_is_selected(report):
    asked = report.question
    key = asked.text[-1 - demo.LETTERS :]
    item = asked.text[asked.item :][: corpus.item_length(demo.LETTERS)]
    assert item == key + asked.answer.encode() + b">"
    assert len(asked.found) == demo.LETTERS
    for rows, scores in zip(asked.selected, asked.scores, strict=True):
        assert len(scores) == len(asked.text)
        assert len(rows) == TOPK
        best = scores.topk(TOPK).indices
        # The selection was made by scores of an FP8 cache.
        assert len(set(best.tolist()) & set(rows.tolist())) >= TOPK - 4


def test_tables_fit_a_terminal(report):
    console = Console(file=io.StringIO(), width=80)
    for table in demo.report_tables(report):
        console.print(table)
    text = console.file.getvalue()
    assert all(mode in text for mode in demo.MODES)
    assert "…" not in text


def test_the_summary_is_one_sentence(report):
    text = demo.summary(report)
    assert text.count(". ") == 0
    assert re.search(r"in [\d.]+ ms a layer instead of [\d.]+\.$", text)
    assert f"{report.loss[demo.OURS_FP8]:.3f} against {report.loss[demo.DENSE]:.3f}" in text


def test_the_end_of_a_text_is_shown():
    assert demo.shown("a\nb\x1b[31m\n" + 90 * "c", width=10, lines=2) == "b?[31m\ncccccccccc"


def test_picture_is_a_png(report, tmp_path):
    path = tmp_path / "new" / "picture.png"
    draw_question(path, report.question)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    assert len(data) > 10_000


def test_the_model_in_the_package_recalls():
    loaded = load_checkpoint(demo.shipped_model(), cache_format="fp8_ds_mla", dtype="float32")
    batch = demo._recall(corpus.as_bytes(corpus.held_out_text()), 512, seed=0)
    assert (batch.kinds == corpus.ANSWER).sum() == 6 * demo.LETTERS
    assert demo._recalled(demo._read(loaded.model, batch.tokens), batch) > 0.8
    files = list(demo.shipped_model().iterdir())
    assert sum(path.stat().st_size for path in files) < 12 << 20


@pytest.fixture(scope="module")
def report_v4() -> demo_v4.Report:
    return demo_v4.run_demo(timed=(96, 4096), new_tokens=3, progress=Progress(disable=True))


def test_tokens_of_v4_equal_eager_attention(report_v4):
    assert report_v4.num_equal == report_v4.num_new == 3
    assert report_v4.margin > 17
    for mode in (demo_v4.EAGER, demo_v4.OURS, demo_v4.OURS_FP8):
        assert report_v4.right[mode] == [1.0] * 4
        assert report_v4.apart[mode] < report_v4.margin / 2
    raw, *entries = report_v4.right[demo_v4.RAW_ONLY]
    assert raw == 1
    assert sum(entries) < 2.5


def test_what_layers_of_v4_keep_and_read(report_v4):
    kept, ring = report_v4.kept, 584 * (128 + 8)
    assert kept == {
        demo_v4.WINDOW: (0, ring),
        demo_v4.CSA: ((584 + 132) / 4, ring + 4 * 2 * 16 * (1024 + 256)),
        demo_v4.HCA: (584 / 128, ring + 4 * 2 * 136 * 512),
        demo_v4.DENSE: (656, 0),
    }
    assert report_v4.scored == {96: 24, 4096: 1024}
    assert [list(found.values()) for found in report_v4.rows.values()] == [
        [96, 96 + 24, 96, 96],
        [128, 128 + 512, 128 + 32, 4096],
    ]
    assert min(ms for found in report_v4.milliseconds.values() for ms in found.values()) > 0


def test_the_pages_of_v4(report_v4, tmp_path):
    console = Console(file=io.StringIO(), width=80)
    for table in demo_v4.report_tables(report_v4):
        console.print(table)
    text = console.file.getvalue()
    assert all(name in text for name in (*demo_v4.MODES, *demo_v4.KINDS.values()))
    assert "…" not in text
    assert "3 of 3 greedy tokens" in demo_v4.summary(report_v4)
    draw_contexts(tmp_path / "contexts.png", report_v4)
    assert (tmp_path / "contexts.png").read_bytes().startswith(b"\x89PNG")

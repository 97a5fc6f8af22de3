"""The demos, one with a tiny model that nobody trained: numbers, tables and pictures."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.nn import functional

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from sparsemla_lab import corpus, demo, demo_v4, picture
from sparsemla_lab.generate import load_checkpoint
from sparsemla_lab.picture import draw_contexts, draw_curve, draw_question
from sparsemla_lab.screen import Screen, Table

CONTEXT, TOPK = 256, 16


@pytest.fixture(scope="module")
def shown(checkpoint) -> tuple[demo.Report, str, list[int]]:
    """The report, what a screen without a terminal shows, and lengths of the texts drawn."""
    drawn = []

    def draw(path: Path, question: demo.Question) -> None:
        assert path == Path("question.png")
        drawn.append(len(question.text))

    with captured() as lines, Screen() as screen:
        report = demo.run_demo(
            checkpoint,
            context=CONTEXT,
            timed=(64, 128),
            new_bytes=3,
            screen=screen,
            picture=Path("question.png"),
            draw=draw,
        )
    return report, lines.getvalue(), drawn


@pytest.fixture(scope="module")
def report(shown) -> demo.Report:
    return shown[0]


@contextlib.contextmanager
def captured() -> Iterator[io.StringIO]:
    """Both streams, as one."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
        yield text


@pytest.fixture(scope="module")
def model(checkpoint):
    loaded = load_checkpoint(checkpoint, cache_format="bf16", dtype="float32")
    loaded.attention.disable()
    return loaded.model


def test_the_report(report):
    assert (report.topk, set(report.loss)) == (TOPK, set(demo.MODES))
    assert all(list(shares) == list(demo.RECALLING) for shares in report.recall.values())
    assert list(report.recall) == list(report.asked) == [64, 128, 256]
    assert list(report.milliseconds) == [64, 128]
    assert min(ms for pair in report.milliseconds.values() for ms in pair) > 0
    assert report.row_bytes == {
        demo.DENSE: (1152, 0),
        demo.OURS: (1152, 256),
        demo.OURS_FP8: (656, 132),
    }
    assert report.head_bytes == 2 * 2 * (192 + 128)
    assert report.loss_bytes == len(report.prompt) == CONTEXT // 2
    assert report.continuation


def test_results_come_as_they_are_ready(shown):
    """Each line follows the steps that it needs and stands before the next one."""
    _, text, drawn = shown
    steps = re.findall(r"^\[(\d+)/(\d+)\]", text, re.MULTILINE)
    total = 3 * (len(demo.RECALLING) + 1) + len(demo.MODES) + 1 + 2
    assert steps == [(str(number), str(total)) for number in range(1, total + 1)]
    order = [
        f"recall, 64 bytes: {demo.RANDOM}",
        "\n64  ",
        f"recall, 128 bytes: {demo.DENSE}",
        "\n128  ",
        "recall, 256 bytes",
        "\n256  ",
        f"loss, 128 bytes: {demo.DENSE}",
        "\nall rows, MLA bf16  ",
        f"loss, 128 bytes: {demo.OURS}",
        "\n16 selected, bf16 cache  ",
        "\n16 random rows  ",
        "] writing",
        "] timing after 64 bytes",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    assert re.search(r"^\[2/.*, about \d+ (s|min) left$", text, re.MULTILINE)
    assert drawn[-1] == max(drawn)
    assert len(drawn) == 3


def test_the_columns_say_what_they_count(shown):
    report, text, _ = shown
    assert re.search(rf"^256 +{report.asked[256]} +\d+% +\d+% +\d+% +\d+%$", text, re.MULTILINE)
    assert "loss of 128" in text
    assert re.search(r"^all rows, MLA bf16 +[\d.]+ +1152 +0$", text, re.MULTILINE)
    assert re.search(r"^16 selected, bf16 cache +[\d.]+ +1408 +256$", text, re.MULTILINE)
    assert re.search(r"^16 selected, FP8 cache +[\d.]+ +788 +132$", text, re.MULTILINE)
    assert re.search(r"^last 16 rows +[\d.]+$", text, re.MULTILINE)
    assert "1280 bytes with all heads" in text
    assert max(map(len, text.splitlines())) <= 80


def test_each_kind_of_attention_sees_its_rows(report, model, monkeypatch):
    text = corpus.as_bytes(corpus.held_out_text())
    rows = corpus.windows(text, demo.PIECES, CONTEXT // 2 + 1, None)[1:2].long()
    tokens, labels = rows[:, :-1], rows[0, 1:]

    def read(mode):
        with demo._attention(model, mode, torch.Generator().manual_seed(0)):
            return demo._read(model, tokens)

    dense, last, random = read(demo.DENSE), read(demo.LAST), read(demo.RANDOM)
    assert functional.cross_entropy(dense, labels).item() == report.loss[demo.DENSE]
    # The first rows see no more than a selection has.
    for some in (last, random):
        torch.testing.assert_close(some[:TOPK], dense[:TOPK])
        assert (some - dense).abs().max() > 0.02
    # Two layers of the last 16 rows reach 30 bytes back, and no farther.
    other = tokens.clone()
    other[:, : CONTEXT // 2 - 2 * (TOPK - 1) - 1] = 7
    with demo._attention(model, demo.LAST, torch.Generator()):
        torch.testing.assert_close(demo._read(model, other)[-1], last[-1])
        other[:, CONTEXT // 2 - 2 * (TOPK - 1) - 1] = 7
        assert (demo._read(model, other)[-1] - last[-1]).abs().max() > 0
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


def test_the_summary_has_both_contexts(report):
    """The longest text and the longest context that is timed, faster or slower."""
    some = dataclasses.replace(report, milliseconds={64: (9, 9), 256: (3, 2), 512: (4, 5)})
    text = demo.summary(some)
    assert f"of {report.asked[256]} values" in text
    assert f"{report.loss[demo.OURS_FP8]:.3f} over 128 bytes" in text
    assert "3.0 ms a layer after 256 bytes, slower than all rows (2.0 ms)" in text
    assert "4.0 ms a layer after 512 bytes, faster than all rows (5.0 ms)" in text
    assert "after 64" not in text


def test_numbers_of_rows(checkpoint, tmp_path):
    drawn = []

    def draw(path: Path, curve: demo.Curve) -> None:
        draw_curve(path, curve)
        drawn.append(list(curve.points))

    path = tmp_path / "new" / "topk.png"
    with captured() as lines, Screen() as screen:
        curve = demo.run_topk(
            checkpoint, [4, CONTEXT], context=CONTEXT, screen=screen, picture=path, draw=draw
        )
    assert drawn == [[4], [4, CONTEXT]]
    assert path.read_bytes().startswith(b"\x89PNG")
    few, all_rows = (points[demo.OURS_FP8][1] for points in curve.points.values())
    assert all_rows == pytest.approx(curve.points[CONTEXT][demo.LAST][1], abs=1e-3)
    assert abs(few - all_rows) > 1e-3
    assert re.search(r"^256 +\d+% +\d+% +[\d.]+ +[\d.]+$", lines.getvalue(), re.MULTILINE)


@pytest.mark.parametrize("text", ["", "0", "16,", "-1", "1.5", "ten", "9" * 7])
def test_numbers_of_rows_that_are_refused(text):
    with pytest.raises(ValueError, match="--topk must be numbers of rows such as 16,64,256, got"):
        demo.parse_topk(text)


def test_a_table_is_as_wide_as_its_heads():
    lines: list[str] = []
    Table(lines.append, ["of\ntext", "values"], first=6).row("a", 12)
    assert lines == ["of", "text    values", "--------------", "a           12"]


def test_a_dumb_terminal_has_lines(monkeypatch):
    """It cannot move the cursor, so a bar would be seen at the end only."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    with captured() as lines, Screen() as screen:
        screen.begin({"reading": 1.0, "writing": 2.0})
        with screen.step("reading"):
            pass
    assert "[1/2] reading\n" in lines.getvalue()


def test_a_terminal_has_a_bar(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with captured() as lines, Screen() as screen:
        screen._progress.refresh()
        assert "loading the model" in lines.getvalue()
        screen.begin({"reading": 1.0, "writing": 2.0})
        with screen.step("reading"):
            assert screen.time_left() == ""
        assert re.fullmatch(r"about \d+ s left", screen.time_left())
        with screen.step("writing") as advance:
            advance(0.5)
            screen._progress.refresh()
    assert "[1/2]" not in lines.getvalue()
    assert "writing" in lines.getvalue()
    assert "\N{BOX DRAWINGS HEAVY HORIZONTAL}" in lines.getvalue()


def test_the_end_of_a_text_is_shown():
    assert demo.shown("a\nb\x1b[31m\n" + 90 * "c", width=10, lines=2) == "b?[31m\ncccccccccc"


def test_picture_is_a_png(report, tmp_path):
    path = tmp_path / "new" / "picture.png"
    draw_question(path, report.question)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    assert len(data) > 10_000


@pytest.mark.parametrize(
    ("selected", "verdict"),
    [
        ([[0, 9], [1, 2]], "No layer selects the item <abCD>"),
        ([[0, 6], [1, 2]], "Layer 0 finds the item <abCD>: rank 3 of 12 bytes"),
        ([[0, 6], [1, 4]], "Layer 1 finds the item <abCD>: rank 2 of 12 bytes; .* in layer 0, too"),
    ],
)
def test_the_title_names_the_layer_that_found_the_item(selected, verdict):
    """The layer that ranks a byte of the item best, among those that selected one."""
    first, second = torch.zeros(12), torch.zeros(12)
    first[[0, 9, 6]] = torch.tensor([3.0, 2.0, 1.0])
    second[[1, 4, 2]] = torch.tensor([3.0, 2.0, 1.0])
    question = demo.Question(
        text=b"..\n<abCD><ab",
        item=3,
        selected=list(map(torch.tensor, selected)),
        scores=[first, second],
        answer="CD",
        found="CD",
    )
    assert re.fullmatch(verdict, picture._verdict(question, range(3, 9)))


def test_the_model_in_the_package_recalls():
    loaded = load_checkpoint(demo.shipped_model(), cache_format="fp8_ds_mla", dtype="float32")
    batch = demo._recall(corpus.as_bytes(corpus.held_out_text()), 512, seed=0)
    assert (batch.kinds == corpus.ANSWER).sum() == 6 * demo.LETTERS
    assert demo._recalled(demo._read(loaded.model, batch.tokens), batch) > 0.8
    files = list(demo.shipped_model().iterdir())
    assert sum(path.stat().st_size for path in files) < 12 << 20


@pytest.fixture(scope="module")
def shown_v4() -> tuple[demo_v4.Report, str]:
    with captured() as lines, Screen() as screen:
        report = demo_v4.run_demo(timed=(96, 4096), new_tokens=3, screen=screen)
    return report, lines.getvalue()


@pytest.fixture(scope="module")
def report_v4(shown_v4) -> demo_v4.Report:
    return shown_v4[0]


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


def test_the_pages_of_v4(shown_v4, tmp_path):
    report, text = shown_v4
    assert all(f"\n{name}  " in text for name in (*demo_v4.MODES, *demo_v4.KINDS.values()))
    assert re.search(r"^96 +96 +120 +24 +96 +96( +[\d.]+){4}$", text, re.MULTILINE)
    assert re.search(r"^4096 +128 +640 +1024 +160 +4096( +[\d.]+){4}$", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 80
    for heads, widest in ((demo_v4.HEADS_OF_ROWS, "65536"), (demo_v4.HEADS_OF_TIMES, "999.99")):
        assert all(max(map(len, head.split("\n"))) >= len(widest) for head in heads)
    assert "3 of 3 greedy tokens" in text.replace("\n", " ")
    draw_contexts(tmp_path / "contexts.png", report)
    assert (tmp_path / "contexts.png").read_bytes().startswith(b"\x89PNG")

"""The demo on a short text: agreement, its table and its picture."""

from __future__ import annotations

import io
import math
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

import transformers
from packaging.version import Version
from rich.console import Console
from rich.progress import Progress

from sparsemla import demo
from sparsemla.picture import draw_selections

NUM_TOKENS = demo.TOPK + 100


@pytest.fixture(scope="module")
def report() -> demo.Report:
    text = demo.shipped_text()[:NUM_TOKENS]
    return demo.run_demo(text, seed=0, progress=Progress(disable=True))


def test_agreement(report):
    assert (report.num_prompt, report.num_tokens) == (NUM_TOKENS - demo.DECODE_TOKENS, NUM_TOKENS)
    ours, fp8 = report.comparisons[demo.OURS], report.comparisons[demo.OURS_FP8]
    assert ours.top1 == 1
    assert ours.max_difference < report.smallest_margin / 8
    assert max(ours.attention_errors) < 0.02
    assert max(fp8.attention_errors) < 0.08
    assert min(ours.prefill_overlap + ours.decode_overlap) > 0.98
    assert min(fp8.prefill_overlap + fp8.decode_overlap) > 0.94
    # Without attention nothing agrees: the numbers above measure something.
    none = report.comparisons[demo.NO_ATTENTION]
    assert none.mean_difference > 30 * ours.mean_difference
    assert min(none.attention_errors) > 0.99


def test_cache_bytes_are_measured(report):
    measured = {name: trace.cache_bytes for name, trace in report.traces.items()}
    # Before 5.18 transformers kept 8 heads' keys and values; since then it keeps latents.
    is_expanded = Version(transformers.__version__) < Version("5.18")
    theirs = (8 * (192 + 128) if is_expanded else 512 + 64) + 128  # and an indexer key
    assert measured == {
        demo.THEIRS: 4 * theirs,
        demo.THEIRS_BF16: 2 * theirs,
        demo.OURS: 1152 + 256,
        demo.OURS_FP8: 656 + 132,
    }


def test_table_fits_a_terminal(report):
    console = Console(file=io.StringIO(), width=80)
    console.print(demo.report_table(report))
    text = console.file.getvalue()
    assert "100.00%" in text
    assert "…" not in text


def test_selections_are_causal_and_complete(report):
    for masks in demo.selection_masks(report):
        assert len(masks) == demo.NUM_LAYERS
        for mask in masks:
            assert not mask.triu(1).any()
            expected = torch.arange(1, NUM_TOKENS + 1).clamp(max=demo.TOPK)
            assert torch.equal(mask.sum(1), expected)


def test_picture_is_a_png(report, tmp_path):
    path = tmp_path / "new" / "picture.png"
    text = demo.shipped_text()[:NUM_TOKENS]
    draw_selections(path, text, *demo.selection_masks(report))
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    assert data.endswith(b"IEND\xaeB`\x82")
    assert len(data) > 10_000


def test_text_that_is_shorter_than_a_selection():
    report = demo.run_demo(b"ab", seed=0, progress=Progress(disable=True))
    ours = report.comparisons[demo.OURS]
    assert ours.top1 == 1
    assert all(math.isnan(overlap) for overlap in ours.prefill_overlap + ours.decode_overlap)


def test_decode_time_is_a_median(monkeypatch):
    clock = iter([0, 5, 10, 11, 20, 21, 30, 130])  # before and after the prefill and three steps
    monkeypatch.setattr(demo, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    ids = torch.tensor([[1, 2, 3, 4]])
    trace, _ = demo._trace(demo.build_model(), ids, num_prompt=1, advance=lambda: None)
    assert (trace.prefill_seconds, trace.decode_seconds) == (5, 1)


def test_same_seed_same_model():
    first, second, other = demo.build_model(1), demo.build_model(1), demo.build_model(2)
    weights = [model.model.embed_tokens.weight for model in (first, second, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])

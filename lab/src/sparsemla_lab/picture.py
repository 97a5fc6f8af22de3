"""The demos' pictures: what each layer selects to answer a question, and what layers read."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sparsemla_lab.corpus import item_length
from sparsemla_lab.demo import LETTERS, Question
from sparsemla_lab.demo_v4 import CSA, DENSE, HCA, KINDS, WINDOW, Report

COLUMNS = 128
AROUND, LAST = 2, 4
"""Rows of text around the item with the answer, and at the end."""

NOT_SELECTED, SELECTED, ITEM = "#c9ced6", "#2f6db3", "#e08214"
COLOURS = {WINDOW: "#7a8591", CSA: SELECTED, HCA: "#3a9a6b", DENSE: ITEM}


def draw_question(path: Path, question: Question) -> None:
    """Draw a question as a PNG.

    The upper panels, one per layer, show the indexer's score of each byte; those above the line are
    selected. The lower panels show the text around the item with the answer, and the question at
    the end; the shade of a byte counts the layers that selected it.

    Args:
        path: file of the picture.
        question: the question.
    """
    num_layers = len(question.scores)
    heights = [1.0] * num_layers + [0.22 * (2 * AROUND + 1), 0.22 * LAST]
    figure = Figure(figsize=(14, 1.6 + 1.3 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, height_ratios=heights)
    for layer_idx in range(num_layers):
        _draw_scores(axes[layer_idx], question, layer_idx)
    key = question.text[-LETTERS:].decode(errors="replace")
    axes[0].set_title(
        f"The question <{key} at byte {len(question.text)}: the model answers {question.found!r}, "
        f"the item <{key}{question.answer}> is at byte {question.item}",
        loc="left",
    )
    axes[num_layers - 1].set_xlabel("position in the text, byte")
    counts = torch.zeros(len(question.text))
    for selected in question.selected:
        counts[selected] += 1
    first = max(question.item // COLUMNS - AROUND, 0) * COLUMNS
    last = max(-(-len(question.text) // COLUMNS) - LAST, 0) * COLUMNS
    for axis, start, rows, name in (
        (axes[-2], first, 2 * AROUND + 1, "around the item"),
        (axes[-1], last, LAST, "at the end"),
    ):
        part = slice(start, start + rows * COLUMNS)
        _draw_text(axis, question.text[part], counts[part], num_layers)
        axis.set_title(
            f"the text {name}, from byte {start}; shade: layers that selected the byte", loc="left"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_scores(axes: Axes, question: Question, layer_idx: int) -> None:
    """The scores of a layer; selected bytes in colour, the item's marked."""
    scores, rows = question.scores[layer_idx], question.selected[layer_idx]
    positions = torch.arange(len(scores))
    axes.scatter(positions, scores, s=3, c=NOT_SELECTED, linewidths=0, label="not selected")
    axes.scatter(rows, scores[rows], s=5, c=SELECTED, linewidths=0, label="selected")
    item = torch.arange(question.item, question.item + item_length(LETTERS))
    axes.scatter(item, scores[item], s=28, facecolors="none", edgecolors=ITEM, label="the item")
    axes.set_xlim(0, len(scores))
    axes.set_ylabel(f"layer {layer_idx}\nscore")
    if layer_idx == 0:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)


def _draw_text(axes: Axes, text: bytes, counts: torch.Tensor, most: int) -> None:
    """Bytes in rows of :data:`COLUMNS`, shaded by ``counts [n]``."""
    num_rows = -(-len(text) // COLUMNS)
    shades = torch.full((num_rows * COLUMNS,), torch.nan)
    shades[: len(text)] = counts
    axes.imshow(
        shades.view(num_rows, COLUMNS).numpy(),
        cmap="Blues",
        vmin=0,
        vmax=1.4 * most,  # leaves every letter readable
        aspect="auto",
    )
    for index, byte in enumerate(text):
        letter = chr(byte) if 32 < byte < 127 else ""
        axes.text(
            index % COLUMNS,
            index // COLUMNS,
            letter,
            ha="center",
            va="center",
            family="monospace",
            fontsize=6.5,
            parse_math=False,
        )
    axes.set_xticks([])
    axes.set_yticks([])


def draw_contexts(path: Path, report: Report) -> None:
    """Draw, as a PNG, what layers of DeepSeek-V4 read for a new token, and their time.

    Args:
        path: file of the picture.
        report: the demo's results.
    """
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    rows, times = figure.subplots(1, 2)
    for kind, name in KINDS.items():
        style = {"color": COLOURS[kind], "marker": "o", "markersize": 4, "label": name}
        lengths = list(report.rows)
        rows.loglog(lengths, [found[kind] for found in report.rows.values()], **style)
        times.loglog(lengths, [ms[kind] for ms in report.milliseconds.values()], **style)
    rows.set_title("rows that a new token attends to", loc="left")
    times.set_title(f"milliseconds of its attention in a layer, on {report.device}", loc="left")
    for axes in (rows, times):
        axes.set_xticks(lengths, [str(length) for length in lengths], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("tokens before")
        axes.grid(color=NOT_SELECTED, linewidth=0.5)
    rows.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)

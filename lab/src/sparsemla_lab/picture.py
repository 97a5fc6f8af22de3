"""The demos' pictures: what each layer selects to answer a question, and what layers read."""

from __future__ import annotations

import io
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patches import Patch, Rectangle

from sparsemla_lab.corpus import item_length
from sparsemla_lab.demo import LAST, LETTERS, OURS_FP8, Curve, Question
from sparsemla_lab.demo_v4 import CSA, DENSE, HCA, KINDS, WINDOW, Report

COLUMNS = 128
AROUND, LINES_AT_END = 1, 3
"""Rows of text around the item with the answer, and at the end."""

NOT_SELECTED, SELECTED, ITEM = "#c9ced6", "#2f6db3", "#e08214"
SHADES = ("#ffffff", "#d6e5f4", "#a3c6e5", "#6aa3d5")
"""Of a byte by the number of layers that selected it; the last one for more."""

COLOURS = {WINDOW: "#7a8591", CSA: SELECTED, HCA: "#3a9a6b", DENSE: ITEM}


def draw_question(path: Path, question: Question) -> None:
    """Draw a question as a PNG.

    The upper panels, one per layer, show the indexer's score of each byte and at their right which
    letters of the item with the answer the layer selected. The lower panels show the text around
    the item, and the question at the end; the shade of a byte counts the layers that selected it.

    Args:
        path: file of the picture.
        question: the question.
    """
    num_layers, topk = len(question.scores), len(question.selected[0])
    key = question.text[-LETTERS:].decode(errors="replace")
    item = range(question.item, question.item + item_length(LETTERS))
    heights = [1.0] * num_layers + [0.24 * (2 * AROUND + 1), 0.24 * LINES_AT_END]
    caption_below = ConstrainedLayoutEngine(rect=(0, 0.08, 1, 0.92), hspace=0.04)
    figure = Figure(figsize=(14, 2.6 + 1.35 * sum(heights)), layout=caption_below)
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, height_ratios=heights)
    figure.suptitle(
        _verdict(question, item), x=0.01, ha="left", fontsize=15, weight="bold", parse_math=False
    )
    axes[0].set_title(
        f"index score of each of {len(question.text)} bytes for the last one; "
        f"the {topk} highest are selected",
        loc="left",
    )
    for layer_idx, axis in enumerate(axes[:num_layers]):
        _draw_scores(axis, question, layer_idx, item)
        if layer_idx < num_layers - 1:
            axis.set_xticklabels([])
    axes[num_layers - 1].set_xlabel("position in the text, bytes")
    counts = torch.zeros(len(question.text), dtype=torch.int64)
    for selected in question.selected:
        counts[selected] += 1
    first = max(question.item // COLUMNS - AROUND, 0) * COLUMNS
    last = max(-(-len(question.text) // COLUMNS) - LINES_AT_END, 0) * COLUMNS
    for axis, start, rows, name in (
        (axes[-2], first, 2 * AROUND + 1, "around the item"),
        (axes[-1], last, LINES_AT_END, "at the end, up to the question"),
    ):
        part = slice(start, start + rows * COLUMNS)
        _draw_text(axis, question.text[part], counts[part])
        _frame(axis, [place - start for place in item])
        axis.set_title(f"the text {name}, from byte {start}", loc="left")
    names = ["no layer", "1 layer", "2 layers", "3 or more"]
    axes[-2].legend(
        [Patch(facecolor=shade, edgecolor=NOT_SELECTED) for shade in SHADES],
        names,
        title="byte selected by",
        loc="center left",
        bbox_to_anchor=(1.005, 0.2),
        frameon=False,
        fontsize=9,
    )
    chance = 1 - (1 - min(topk / len(question.text), 1)) ** len(item)
    figure.text(
        0.01,
        0.012,
        f"The text hides items <abCD> in Python sources and asks for them at its end. The model "
        f"reads <{key} and says {question.found!r}; the item at byte {question.item} says "
        f"{question.answer!r}.\nFor the last byte, each layer's indexer gives every byte a score "
        f"(no unit, only the order counts), and attention reads the {topk} bytes with the highest "
        f"ones, no others.\nA random selection has a byte of the item in {chance:.0%} of cases, so "
        f"a low rank is the better sign.",
        fontsize=10.5,
        va="bottom",
        parse_math=False,
    )
    _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Write a figure in one go: an interrupted command leaves the last whole picture."""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=110)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data.getvalue())


def _in(item: range, rows: torch.Tensor) -> list[int]:
    """The bytes of an item that are among the selected rows."""
    return sorted(set(item) & set(rows.tolist()))


def _best_rank(question: Question, layer_idx: int, item: range) -> int:
    """The rank of the item's best byte among all scores of a layer."""
    scores = question.scores[layer_idx]
    return min(int((scores > scores[place]).sum()) + 1 for place in item)


def _verdict(question: Question, item: range) -> str:
    """Which layers selected the item, in a line."""
    text = question.text[item.start : item.stop].decode(errors="replace")
    found = [idx for idx, rows in enumerate(question.selected) if _in(item, rows)]
    if not found:
        return f"No layer selects the item {text}"
    best = min(found, key=lambda idx: _best_rank(question, idx, item))
    others = [str(idx) for idx in found if idx != best]
    too = f"; a byte of it is selected in layer {' and '.join(others)}, too" if others else ""
    rank = _best_rank(question, best, item)
    return f"Layer {best} finds the item {text}: rank {rank} of {len(question.text)} bytes{too}"


def _draw_scores(axes: Axes, question: Question, layer_idx: int, item: range) -> None:
    """The scores of a layer; selected bytes in colour, the item's marked and spelled."""
    scores, rows = question.scores[layer_idx], question.selected[layer_idx]
    chosen = _in(item, rows)
    positions = torch.arange(len(scores))
    axes.axvline(question.item, color=ITEM, alpha=0.35, linewidth=4, zorder=0)
    axes.scatter(positions, scores, s=3, c=NOT_SELECTED, linewidths=0)
    axes.scatter(rows, scores[rows], s=6, c=SELECTED, linewidths=0)
    axes.scatter(chosen, scores[chosen], s=110, c=ITEM, edgecolors="black", zorder=3)
    axes.set_xlim(0, len(scores))
    axes.set_ylabel(f"layer {layer_idx}\nscore")
    verdict = f"selected {len(chosen)} of {len(item)}" if chosen else "not selected"
    colour = ITEM if chosen else "#7a8591"
    axes.text(
        1.01, 0.72, verdict, transform=axes.transAxes, color=colour, weight="bold", va="center"
    )
    rank = f"best rank {_best_rank(question, layer_idx, item)}"
    axes.text(1.01, 0.12, rank, transform=axes.transAxes, color="#5a646f", va="center")
    for index, place in enumerate(item):
        axes.text(
            1.018 + 0.017 * index,
            0.43,
            chr(question.text[place]),
            transform=axes.transAxes,
            family="monospace",
            ha="center",
            va="center",
            parse_math=False,
            bbox={
                "facecolor": ITEM if place in chosen else "white",
                "edgecolor": NOT_SELECTED,
                "boxstyle": "square,pad=0.25",
            },
        )


def _frame(axes: Axes, places: list[int]) -> None:
    """Frame the item in a panel of text, on as many lines as it has."""
    width, height = axes.get_xlim()[1] + 0.5, axes.get_ylim()[0] + 0.5
    for row in {place // COLUMNS for place in places if 0 <= place < width * height}:
        columns = [place % COLUMNS for place in places if place // COLUMNS == row]
        axes.add_patch(
            Rectangle(
                (columns[0] - 0.5, row - 0.5), len(columns), 1, fill=False, edgecolor=ITEM, lw=2.5
            )
        )


def _draw_text(axes: Axes, text: bytes, counts: torch.Tensor) -> None:
    """Bytes in rows of :data:`COLUMNS`, shaded by ``counts [n]``."""
    num_rows = -(-len(text) // COLUMNS)
    shades = torch.zeros(num_rows * COLUMNS, dtype=torch.int64)
    shades[: len(text)] = counts
    axes.imshow(
        shades.view(num_rows, COLUMNS).numpy(),
        cmap=ListedColormap(SHADES),
        vmin=-0.5,
        vmax=len(SHADES) - 0.5,
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


def draw_curve(path: Path, curve: Curve) -> None:
    """Draw, as a PNG, recall and loss by the number of rows that a byte attends to.

    Args:
        path: file of the picture.
        curve: the numbers.
    """
    figure = Figure(figsize=(11, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    recall, loss = figure.subplots(1, 2)
    topks = list(curve.points)
    for mode, name, colour in (
        (OURS_FP8, "selected by the indexer", SELECTED),
        (LAST, "the last rows (control)", ITEM),
    ):
        shares, nats = zip(*(found[mode] for found in curve.points.values()), strict=True)
        style = {"color": colour, "marker": "o", "markersize": 5, "label": name}
        recall.plot(topks, [100 * share for share in shares], **style)
        loss.plot(topks, nats, **style)
    recall.set_title("recall (higher is better)", loc="left")
    recall.set_ylabel(f"% of {curve.num_values} values after {curve.context} bytes")
    recall.set_ylim(-4, 104)
    loss.set_title("loss (lower is better)", loc="left")
    loss.set_ylabel(f"nats per byte, over {curve.loss_bytes} bytes")
    for axes in (recall, loss):
        axes.set_xscale("log", base=2)
        axes.set_xticks(topks, list(map(str, topks)), minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("rows that a byte attends to")
        axes.grid(color=NOT_SELECTED, linewidth=0.5)
    recall.legend(frameon=False)
    _save(figure, path)


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
    rows.set_title("rows that a new token attends to (lower is better)", loc="left")
    rows.set_ylabel("rows of a cache, per layer")
    times.set_title(f"time of its attention on {report.device} (lower is better)", loc="left")
    times.set_ylabel("milliseconds per layer")
    for axes in (rows, times):
        axes.set_xticks(lengths, [str(length) for length in lengths], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_xlabel("tokens before it")
        axes.grid(color=NOT_SELECTED, linewidth=0.5)
    rows.legend(frameon=False)
    _save(figure, path)

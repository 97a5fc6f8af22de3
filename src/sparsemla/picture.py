"""The demo's picture: the tokens that the last queries of a text selected."""

from __future__ import annotations

from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch import Tensor

LAST_QUERIES = 48
COLUMNS = 128
MAX_ROWS = 24

NEITHER, BOTH, THEIRS_ONLY, OURS_ONLY, UNSEEN = (
    "#eef0f3",
    "#7fa3cc",
    "#e08214",
    "#b2182b",
    "#ffffff",
)


def draw_selections(path: Path, text: bytes, theirs: list[Tensor], ours: list[Tensor]) -> None:
    """Draw the two selection masks of each layer as a PNG.

    The upper panels, one per layer, show the last queries (rows) and their selected tokens
    (columns). The lowest panel shows the end of the text; the shade of a byte counts the queries
    that selected it in the last layer.

    Args:
        path: file of the picture.
        text: n bytes.
        theirs: transformers' selections, bool ``[n, n]`` per layer.
        ours: this package's selections, bool ``[n, n]`` per layer.
    """
    num_queries = min(LAST_QUERIES, len(text))
    num_rows = min(-(-len(text) // COLUMNS), MAX_ROWS)
    heights = [1.0] * len(ours) + [0.22 * num_rows]
    figure = Figure(figsize=(14, 1.2 + 1.1 * sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(heights), 1, height_ratios=heights)
    for layer_idx, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        _draw_layer(axes[layer_idx], mine[-num_queries:], other[-num_queries:])
        axes[layer_idx].set_ylabel(f"layer {layer_idx}\nquery")
    axes[0].set_title(f"Selections of the last {num_queries} of {len(text)} tokens", loc="left")
    legend = {
        "both": BOTH,
        "transformers only (enlarged)": THEIRS_ONLY,
        "sparsemla only (enlarged)": OURS_ONLY,
        "neither": NEITHER,
    }
    axes[0].legend(
        handles=[Patch(facecolor=c, edgecolor="#999999", label=n) for n, c in legend.items()],
        loc="lower right",
        bbox_to_anchor=(1, 1),
        ncols=len(legend),
        frameon=False,
    )
    axes[len(ours) - 1].set_xlabel("position in the text, byte")
    first = max(len(text) - num_rows * COLUMNS, 0)
    counts = ours[-1][-num_queries:, first:].sum(0)
    _draw_text(axes[-1], text[first:], counts)
    axes[-1].set_title(
        f"the text from byte {first}; shade: number of these queries that selected the byte in "
        f"layer {len(ours) - 1}",
        loc="left",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _draw_layer(axes: Axes, ours: Tensor, theirs: Tensor) -> None:
    """One layer's masks ``[queries, n]``."""
    num_queries, num_tokens = ours.shape
    first = num_tokens - num_queries
    image = (ours | theirs).long()
    later = torch.ones_like(ours).triu(first + 1)
    image[later] = 2
    axes.imshow(
        image.numpy(),
        cmap=ListedColormap([NEITHER, BOTH, UNSEEN]),
        vmin=0,
        vmax=2,
        aspect="auto",
        interpolation="nearest",
        extent=(0, num_tokens, num_tokens, first),
    )
    # Tokens that only one side selected matter most, and are less than a pixel wide.
    for mask, color in ((theirs & ~ours, THEIRS_ONLY), (ours & ~theirs, OURS_ONLY)):
        queries, positions = mask.nonzero().T + 0.5
        axes.scatter(positions, queries + first, s=12, c=color, marker="o", linewidths=0)


def _draw_text(axes: Axes, text: bytes, counts: Tensor) -> None:
    """Bytes in rows of :data:`COLUMNS`, shaded by ``counts [n]``."""
    num_rows = -(-len(text) // COLUMNS)
    shades = torch.full((num_rows * COLUMNS,), torch.nan)
    shades[: len(text)] = counts
    darkest = 1.4 * float(counts.max())  # leaves every letter readable
    axes.imshow(
        shades.view(num_rows, COLUMNS).numpy(), cmap="Blues", vmin=0, vmax=darkest, aspect="auto"
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

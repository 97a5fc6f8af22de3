"""The table and figure of docs/vllm-evidence.md, from what ``vllm_bench.py`` has measured.

Run it after a new measurement: ``python benchmarks/engine.py``. ``tests/test_docs.py`` fails if the
committed table or figure differs from those that the measurements give.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from figures import FAINT, INK, OURS, PEER, ROOT, box, text
from sparsemla_lab.bench.report import BEGIN, END

DATA = ROOT / "benchmarks" / "engine-h200.json"
DOCUMENT = ROOT / "docs" / "vllm-evidence.md"
FIGURE = ROOT / "docs" / "images" / "engine-h200.svg"

MODEL_LAYERS = 61
COLOURS = {"fp8": OURS, "bf16": PEER}
LINE, LEFT, PANEL, TOP = 26, 160, 470, 62


@dataclass(frozen=True)
class Pair:
    """Both sides at one size.

    Args:
        cache: ``fp8`` or ``bf16``.
        ours, theirs: rows of this package and of vLLM's own backend.
    """

    cache: str
    ours: dict[str, Any]
    theirs: dict[str, Any]

    @property
    def size(self) -> tuple[str, int, int, int]:
        """Kind, heads, batch and context."""
        row = self.ours
        return row["kind"], row["heads"], row["batch"], row["context"]

    @property
    def part_ratio(self) -> float:
        """How much faster indexer and attention together are."""
        return part_ms(self.theirs) / part_ms(self.ours)

    @property
    def model_ratio(self) -> float:
        """How much faster all kernels of a step are, with 61 layers or with one."""
        return float(self.theirs["gpu_ms"] / self.ours["gpu_ms"])


def part_ms(row: dict[str, Any]) -> float:
    """Time of indexer and attention."""
    return float(row["indexer_ms"] + row["attention_ms"])


def model_ms(row: dict[str, Any]) -> float:
    """Time of a model of 61 layers like the measured ones, where the GPU never waits."""
    return float(row["gpu_ms"] * MODEL_LAYERS / row["layers"])


def pairs(rows: list[dict[str, Any]]) -> list[Pair]:
    """The sizes that both sides of a cache were measured at, decodes first."""
    found: dict[tuple[object, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        side, _, cache = row["side"].partition(", ")
        key = (row["kind"], row["heads"], cache, row["context"], row["batch"])
        found.setdefault(key, {})["ours" if side == "sparsemla" else "theirs"] = row
    complete = sorted((key, both) for key, both in found.items() if len(both) == 2)
    return [Pair(str(key[2]), both["ours"], both["theirs"]) for key, both in complete]


def table(found: list[Pair]) -> str:
    """Markdown, a line for each pair; times in milliseconds, sparsemla's first."""
    lines = [
        "| | heads | cache | context | batch | step | indexer | attention | both, ratio "
        "| 61 layers | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for pair in found:
        kind, heads, batch, context = pair.size
        times = [
            f"{number(value(pair.ours))}, {number(value(pair.theirs))}"
            for value in (
                lambda row: row["wall_ms"],
                lambda row: row["indexer_ms"],
                lambda row: row["attention_ms"],
                model_ms,
            )
        ]
        cells = [kind, heads, pair.cache, f"{context // 1024}K", batch, *times[:3]]
        cells += [f"{pair.part_ratio:.2f}", times[3], f"{pair.model_ratio:.2f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def number(value: float) -> str:
    """Three digits.

    >>> number(0.01234), number(12.34), number(1234.5)
    ('0.0123', '12.3', '1234')
    """
    return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"


def with_table(document: str, found: list[Pair]) -> str:
    """The document with the figure and another table between its marks."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    image = f"![Speed beside vLLM's own backends](images/{FIGURE.name})"
    return f"{before}{BEGIN}\n{image}\n\n{table(found)}\n{END}{after}"


def figure(found: list[Pair]) -> str:
    """As SVG: at every size the ratio of indexer and attention, and that of the whole step."""
    sizes = sorted({(kind, context, batch) for kind, _, batch, context in (p.size for p in found)})
    heads = sorted({pair.size[1] for pair in found})
    height, width = TOP + LINE * len(sizes) + 40, LEFT + PANEL * len(heads)
    top = max(1.5, *(max(p.part_ratio, p.model_ratio) for p in found))
    low = min(1.0, *(min(p.part_ratio, p.model_ratio) for p in found))
    scale = (PANEL - 60) / (top - low)
    drawn = []
    for panel, count in enumerate(heads):
        left = LEFT + panel * PANEL
        drawn.append(text(left, 22, f"{count} heads: vLLM's time / sparsemla's", size=15))
        for tick in range(math.ceil(low * 4), math.floor(top * 4) + 1):
            x = left + (tick / 4 - low) * scale
            drawn += [
                f'<line x1="{x:g}" y1="{TOP - 12}" x2="{x:g}" y2="{height - 34}" '
                f'stroke="{INK if tick == 4 else FAINT}"/>',
                text(x, TOP - 18, f"{tick / 4:g}x", "middle", 11),
            ]
        for pair in found:
            kind, of, batch, context = pair.size
            if of != count:
                continue
            y = TOP + LINE * sizes.index((kind, context, batch)) + 7 * (pair.cache == "bf16")
            for ratio, filled in ((pair.part_ratio, True), (pair.model_ratio, False)):
                x, colour = left + (ratio - low) * scale, COLOURS[pair.cache]
                drawn.append(
                    f'<circle cx="{x:.1f}" cy="{y}" r="4.5" stroke="{colour}" stroke-width="1.5" '
                    f'fill="{colour if filled else "none"}"/>'
                )
    for place, (kind, context, batch) in enumerate(sizes):
        label = f"{kind} {context // 1024}K" + (f", batch {batch}" if kind == "decode" else "")
        drawn.append(text(LEFT - 12, TOP + LINE * place + 8, label, "end", 12))
    legend = "filled: indexer and attention; hollow: all kernels of a step"
    drawn.append(text(12, height - 10, legend, size=12))
    for place, (cache, colour) in enumerate(COLOURS.items()):
        x = width - 170 + 80 * place
        drawn += [box(x, height - 20, 11, 11, colour), text(x + 16, height - 10, cache, size=12)]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="Helvetica, Arial, sans-serif" fill="{INK}">'
    )
    return "\n".join([head, box(0, 0, width, height, "#ffffff"), *drawn, "</svg>", ""])


def load(path: Path = DATA) -> list[Pair]:
    """The pairs of a file that ``benchmarks/vllm_bench.py`` wrote."""
    return pairs(json.loads(path.read_text(encoding="utf-8"))["rows"])


if __name__ == "__main__":
    measured = load()
    FIGURE.write_text(figure(measured), encoding="utf-8")
    old = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(with_table(old, measured), encoding="utf-8")

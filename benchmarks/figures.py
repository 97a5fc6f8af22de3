"""The figure of README and docs, drawn from ``benchmarks/h200.json`` without a plotting library.

Run it after a new measurement: ``python benchmarks/figures.py``. ``tests/test_docs.py`` fails if
the committed figure differs from the one that the measurements give.
"""

from __future__ import annotations

from pathlib import Path
from xml.sax.saxutils import escape

from sparsemla_lab.bench import report

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "h200.json"
FIGURE = ROOT / "docs" / "images" / "h200.svg"

OURS, PEER, INK, FAINT = "#0072b2", "#e69f00", "#222222", "#cccccc"  # safe for the color-blind
WIDTH, HEIGHT, TOP, LINE = 980, 350, 62, 32

STEPS = [(heads, batch) for heads in (128, 16) for batch in (1, 16, 64, 128)]
OPS = {
    "decode step of a layer": ("decode_step",),
    "sparse decode": ("sparse_decode",),
    "dense decode": ("dense_decode",),
    "sparse prefill": ("sparse_prefill",),
    "top-k selection": ("select_topk",),
    "indexer scores": ("indexer_scores", "indexer_scores_paged"),
    "scores and top-k": ("indexer_topk",),
}


def text(
    x: float, y: float, words: str, anchor: str = "start", size: int = 13, **style: str
) -> str:
    """One line of text; ``style`` holds further SVG attributes."""
    more = "".join(f' {name}="{value}"' for name, value in style.items())
    place = f'x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}"'
    return f"<text {place}{more}>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, color: str) -> str:
    """A filled rectangle."""
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{color}"/>'


def step_bars(rows: list[report.Row]) -> list[str]:
    """Times of a layer's decode step with indexer at a context of 32768, ours over the peers'."""
    left, scale = 150, 0.5
    drawn = [
        text(12, 26, "One layer's decode step, 32K context, µs", size=15, **{"font-weight": "bold"})
    ]
    drawn += [
        box(12, 38, 11, 11, OURS),
        text(28, 48, "sparsemla"),
        box(112, 38, 11, 11, PEER),
        text(128, 48, "vLLM 0.33 + DeepGEMM + FlashMLA"),
    ]
    for place, (heads, batch) in enumerate(STEPS):
        case = f"batch {batch}, heads {heads}, context 32768, indexer 1"
        (row,) = (row for row in rows if row.op == "decode_step" and row.case == case)
        y = TOP + place * LINE
        end = left + row.peer_us * scale
        drawn += [
            text(left - 8, y + 17, f"{heads} heads, batch {batch}", "end", 12),
            box(left, y, row.ours_us * scale, 11, OURS),
            box(left, y + 12, row.peer_us * scale, 11, PEER),
            text(end + 6, y + 17, f"{row.ratio:.1f}x", **{"font-weight": "bold"}),
            text(end + 42, y + 17, f"{row.ours_us:.0f} vs {row.peer_us:.0f}", size=12),
        ]
    return drawn


def op_ranges(rows: list[report.Row]) -> list[str]:
    """For each op the range, over all sizes, of the fastest peer's time over ours."""
    left, scale = 672, 125.0
    drawn = [
        text(
            524,
            26,
            "Speed relative to the fastest peer, all sizes",
            size=15,
            **{"font-weight": "bold"},
        )
    ]
    for tick in (1.0, 1.5, 2.0, 2.5):
        x = left + (tick - 0.95) * scale
        color = INK if tick == 1 else FAINT
        drawn += [
            f'<line x1="{x:g}" y1="{TOP - 4}" x2="{x:g}" y2="{HEIGHT - 40}" stroke="{color}"/>',
            text(x, TOP - 10, f"{tick:g}x", "middle", 12),
        ]
    for place, (label, ops) in enumerate(OPS.items()):
        ratios = sorted(fastest_ratios([row for row in rows if row.op in ops]))
        low, middle, high = ratios[0], ratios[len(ratios) // 2], ratios[-1]
        y = TOP + 12 + place * LINE
        at = [left + (ratio - 0.95) * scale for ratio in (low, middle, high)]
        drawn += [
            text(left - 12, y + 5, label, "end", 12),
            box(at[0], y - 3, at[2] - at[0], 6, OURS),
            f'<circle cx="{at[1]:g}" cy="{y}" r="7" fill="{OURS}"/>',
            text(WIDTH - 12, y + 5, f"{low:.2f} to {high:.2f}", "end", 12),
        ]
    return drawn


def fastest_ratios(rows: list[report.Row]) -> list[float]:
    """The smallest ratio of each workload to another package; our own variants are no peers."""
    ratios: dict[tuple[str, str, str], float] = {}
    for row in rows:
        if row.ratio is not None and row.peer is not None and not row.peer.startswith("sparsemla"):
            ratios[row.workload] = min(row.ratio, ratios.get(row.workload, row.ratio))
    return list(ratios.values())


def figure(measured: report.Report) -> str:
    """The whole figure as SVG."""
    commits = sorted({row.commit[:7] for row in measured.rows if row.op == "decode_step"})
    stamp = (
        f"{measured.device}, cold L2, CUDA graphs; decode step at commit {', '.join(commits)}. "
        "Right: lowest, median and highest ratio of each op."
    )
    body = [
        *step_bars(measured.rows),
        *op_ranges(measured.rows),
        text(12, HEIGHT - 8, stamp, size=12),
    ]
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'font-family="Helvetica, Arial, sans-serif" fill="{INK}">'
    )
    return "\n".join([head, box(0, 0, WIDTH, HEIGHT, "#ffffff"), *body, "</svg>", ""])


if __name__ == "__main__":
    FIGURE.write_text(figure(report.load(DATA)), encoding="utf-8")

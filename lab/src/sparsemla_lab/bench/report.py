"""Rows of a benchmark as JSON, as text, as Markdown tables, and as plots."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparsemla_lab.bench.ceilings import Ceilings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BEGIN = "<!-- table: begin -->"
END = "<!-- table: end -->"
"""Marks of a table that ``benchmarks/engine.py`` or ``hooks.py`` writes into a page."""
AXES = ("context", "batch", "heads")
RUN = ("commit", "date", "versions")
"""Attributes that all rows of a run share; a file has them once."""
OKABE_ITO = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#cc79a7", "#f0e442")
"""Colours that remain distinct for readers with any kind of colour vision."""
Timed = tuple[tuple[str, str, str], str | None]
"""A workload, and the peer that was timed on it."""
HEADER = ("op", "case", "us", "rate", "% of floor", "peer", "peer us", "ratio")


@dataclass(frozen=True)
class Row:
    """One workload, this package, and one peer or none.

    Args:
        op, case, selection, shape: the workload; selection is empty if there is none.
        ours_us: median of this package, in microseconds.
        ours_spread_us: 10th and 90th percentile.
        ours_timed: ``graph`` or ``launch``, the timed unit.
        tflops, gbps: this package's rates; bytes that are read repeatedly count once.
        floor_us: the shortest time that the measured ceilings allow.
        percent_of_floor: ``100 * floor_us / ours_us``.
        peer, peer_us, peer_spread_us, peer_timed: the peer, timed in turn with this package.
        ratio: ``peer_us / ours_us``; above 1 this package is faster.
        note: differences in the peer's work, and the peers that refused the workload, each with its
            reason.
        commit, date, versions: properties of the run.
    """

    op: str
    case: str
    selection: str
    shape: dict[str, int]
    ours_us: float
    ours_spread_us: tuple[float, float]
    ours_timed: str
    tflops: float
    gbps: float
    floor_us: float
    percent_of_floor: float
    peer: str | None
    peer_us: float | None
    peer_spread_us: tuple[float, float] | None
    peer_timed: str | None
    ratio: float | None
    note: str
    commit: str
    date: str
    versions: dict[str, str]

    @property
    def workload(self) -> tuple[str, str, str]:
        return self.op, self.case, self.selection


@dataclass(frozen=True)
class Report:
    """A run: the device, its ceilings, and the rows."""

    device: str
    ceilings: Ceilings
    rows: list[Row]


def save(path: Path, report: Report) -> None:
    """Write a report as JSON: numbers with five digits, a line for each row and for each run."""
    runs: list[dict[str, object]] = []
    rows = []
    for row in report.rows:
        values = asdict(row)
        run = {name: values.pop(name) for name in RUN}
        if run not in runs:
            runs.append(run)
        rows.append(values | {"run": runs.index(run)})
    head = (
        f'"{name}": {json.dumps(_rounded(value))}'
        for name, value in (("device", report.device), ("ceilings", asdict(report.ceilings)))
    )
    document = ",\n ".join((*head, f'"runs": {_one_a_line(runs)}', f'"rows": {_one_a_line(rows)}'))
    path.parent.mkdir(parents=True, exist_ok=True)
    # A run that is ended while it writes leaves the rows of before.
    written = path.with_name(f"{path.name}.part")
    written.write_text(f"{{\n {document}\n}}\n", encoding="utf-8")
    written.replace(path)


def _one_a_line(values: Sequence[object]) -> str:
    lines = ",\n".join(f"  {json.dumps(_rounded(value))}" for value in values)
    return f"[\n{lines}\n ]"


def load(path: Path) -> Report:
    """Read a report.

    Raises:
        ValueError: the file is not a report.
    """
    text = path.read_bytes()
    try:
        document = json.loads(text)
        rows = [_row(values, document["runs"]) for values in document["rows"]]
        return Report(document["device"], Ceilings(**document["ceilings"]), rows)
    except (LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a benchmark report: {error}") from error


def _row(values: dict[str, Any], runs: Sequence[dict[str, Any]]) -> Row:
    """A row from JSON, with lists converted to tuples."""
    pairs = ("ours_spread_us", "peer_spread_us")
    run = runs[values.pop("run")]
    return Row(**values | run | {name: values[name] and tuple(values[name]) for name in pairs})


def merged(old: Report, new: Report, wrong: Collection[Timed] = ()) -> Report:
    """``new`` and the rows of ``old`` that it has not measured, with the run that measured them.

    A workload's new rows take the place of its old ones. Old rows with other peers follow them,
    except rows of ``wrong``.

    Raises:
        ValueError: the reports come from different devices.
    """
    if old.device != new.device:
        raise ValueError(f"reports are of {old.device} and of {new.device}")
    kept = [row for row in lost(old, new.rows) if (row.workload, row.peer) not in wrong]
    measured: dict[tuple[str, str, str], list[Row]] = {}
    for row in [*new.rows, *kept]:
        measured.setdefault(row.workload, []).append(row)
    replaced = measured.keys() & {row.workload for row in old.rows}
    rows = []
    for row in old.rows:
        rows += measured.pop(row.workload, []) if row.workload in replaced else [row]
    return Report(
        new.device, new.ceilings, rows + [row for added in measured.values() for row in added]
    )


def lost(old: Report, rows: Sequence[Row]) -> list[Row]:
    """The rows of ``old`` with peers of which ``rows``, of the same workloads, have no time."""
    workloads = {row.workload for row in rows}
    timed = {(row.workload, row.peer) for row in rows}
    return [
        row
        for row in old.rows
        if row.peer and row.workload in workloads and (row.workload, row.peer) not in timed
    ]


def _rounded(value: object) -> object:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {name: _rounded(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(item) for item in value]
    return value


def ceiling_line(report: Report) -> str:
    """The device and its measured rates."""
    ceilings = report.ceilings
    fp8 = f", FP8 matmul {ceilings.fp8_tflops:.0f} TFLOP/s" if ceilings.fp8_tflops else ""
    return (
        f"{report.device}: copy {ceilings.copy_gbps:.0f} GB/s, bf16 matmul "
        f"{ceilings.bf16_tflops:.0f} TFLOP/s{fp8}; one tiny kernel takes "
        f"{ceilings.launch_us:.1f} us."
    )


def cells(row: Row, kept: bool = False) -> tuple[str, ...]:
    """A row as text, in the order of :data:`HEADER`, with its run if it is ``kept``."""
    rate = f"{row.tflops:.0f} TFLOP/s, " if row.tflops else ""
    case = row.case + (f", {row.selection}" if row.selection else "")
    launched = [
        name
        for name, how in (("ours", row.ours_timed), (row.peer, row.peer_timed))
        if how == "launch"
    ]
    notes = [row.note] if row.note else []
    notes += [f"timed with its launch: {', '.join(str(name) for name in launched)}"] * bool(
        launched
    )
    notes += [f"both measured {row.date} at commit {row.commit}"] * kept
    peer = row.peer or "none here"
    return (
        row.op,
        case,
        _spread(row.ours_us, row.ours_spread_us),
        f"{rate}{row.gbps:.0f} GB/s",
        f"{row.percent_of_floor:.0f}",
        peer + (f" ({'; '.join(notes)})" if notes else ""),
        "" if row.peer_us is None else _spread(row.peer_us, row.peer_spread_us),
        "" if row.ratio is None else f"{row.ratio:.2f}",
    )


def _spread(median: float, tails: tuple[float, float] | None) -> str:
    """``median ±`` the larger distance of a tail, in per cent."""
    if tails is None:
        return f"{median:.1f}"
    widest = max(median - tails[0], tails[1] - median)
    return f"{median:.1f} ±{100 * widest / median:.0f}%"


def text_lines(rows: Iterable[Row]) -> list[str]:
    """A line for each row, for a terminal."""
    widths = (24, 72, 15, 23, 4, 28, 15, 5)
    return [
        "  ".join(
            cell.ljust(width) for cell, width in zip(cells(row), widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def markdown(report: Report) -> str:
    """The run, then a table for each op."""
    stamps = dict.fromkeys((row.commit, row.date) for row in report.rows)
    versions: dict[str, str] = {}
    newest_rows: dict[tuple[str, str, str], Row] = {}  # a workload's first; those kept follow
    for row in report.rows:
        versions |= row.versions
    lines = [
        ceiling_line(report),
        "Measured "
        + ", ".join(f"{date} at commit {commit}" for commit, date in stamps)
        + " with "
        + ", ".join(f"{name} {version}" for name, version in versions.items())
        + ".",
    ]
    for op in dict.fromkeys(row.op for row in report.rows):
        lines += ["", f"### {op}", "", _line(HEADER[1:]), _line(["---"] * (len(HEADER) - 1))]
        for row in report.rows:
            newest = newest_rows.setdefault(row.workload, row)
            if row.op == op:
                kept = (row.commit, row.date) != (newest.commit, newest.date)
                lines.append(_line(cells(row, kept)[1:]))
    return "\n".join(lines)


def _line(words: Sequence[str]) -> str:
    return "| " + " | ".join(words) + " |"


def plot(report: Report, directory: Path) -> list[Path]:
    """Plot bars of each op, and lines of time against a varying context, batch or head count.

    Returns:
        The PNG files written.

    Raises:
        ModuleNotFoundError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    directory.mkdir(parents=True, exist_ok=True)
    written = []
    for op in dict.fromkeys(row.op for row in report.rows):
        rows = [row for row in report.rows if row.op == op]
        bars: dict[tuple[str, str, str], dict[str, float]] = {}
        for row in rows:  # a workload's first row is its newest
            bars.setdefault(row.workload, {"floor": row.floor_us, "sparsemla": row.ours_us})
            if row.peer is not None and row.peer_us is not None:
                bars[row.workload][row.peer] = row.peer_us
        figure = Figure(figsize=(11, 1.2 + 0.9 * len(bars)), layout="constrained")
        FigureCanvasAgg(figure)
        _draw_bars(figure.subplots(), op, bars)
        written.append(directory / f"{op}_bars.png")
        figure.savefig(written[-1], dpi=110)
        for axis in AXES:
            groups = _groups(rows, axis)
            if not groups:
                continue
            columns = min(3, len(groups))
            lines = -(-len(groups) // columns)
            figure = Figure(figsize=(7.5 * columns, 4.5 * lines), layout="constrained")
            FigureCanvasAgg(figure)
            for place, (title, series) in enumerate(groups.items(), 1):
                panel = figure.add_subplot(lines, columns, place)
                _draw_lines(panel, f"{op}: {title}", axis, series)
            written.append(directory / f"{op}_{axis}.png")
            figure.savefig(written[-1], dpi=110)
    return written


Series = dict[str, dict[int, float]]
"""Times by side and by value of the axis."""


def _groups(rows: Sequence[Row], axis: str) -> dict[str, Series]:
    """Groups of three or more rows that differ only in ``axis``."""
    groups: dict[str, Series] = {}
    for row in rows:
        if axis not in row.shape:
            continue
        # A case is the shape, and words for its other properties.
        rest = [word for word in row.case.split(", ") if not word.startswith(f"{axis} ")]
        title = ", ".join(rest + ([row.selection] if row.selection else []))
        series = groups.setdefault(title, {})
        at = row.shape[axis]
        series.setdefault("floor", {}).setdefault(at, row.floor_us)
        series.setdefault("sparsemla", {}).setdefault(at, row.ours_us)
        if row.peer is not None and row.peer_us is not None:
            series.setdefault(row.peer, {})[at] = row.peer_us
    return {title: series for title, series in groups.items() if len(series["sparsemla"]) >= 3}


def _draw_bars(axes: Axes, op: str, bars: dict[tuple[str, str, str], dict[str, float]]) -> None:
    names = list(dict.fromkeys(name for times in bars.values() for name in times))
    height = 0.85 / len(names)
    for place, name in enumerate(names):
        at = [i + place * height for i, times in enumerate(bars.values()) if name in times]
        lengths = [times[name] for times in bars.values() if name in times]
        drawn = axes.barh(at, lengths, height, label=name, color=_color(name, names))
        axes.bar_label(drawn, fmt="%.4g", fontsize=7, padding=2)
    labels = [", ".join(filter(None, key[1:])) for key in bars]
    axes.set_yticks([i + 0.4 for i in range(len(bars))], labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.1, y=0.01)
    axes.set_xlabel("microseconds")
    axes.set_title(op, loc="left")
    axes.legend(fontsize=7)


def _draw_lines(axes: Axes, title: str, axis: str, series: Series) -> None:
    for name, times in series.items():
        xs = sorted(times)
        style = "--" if name == "floor" else "-"
        color = _color(name, list(series))
        axes.plot(xs, [times[x] for x in xs], style, marker="o", label=name, color=color)
    ticks = sorted(series["sparsemla"])
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.set_xlabel(axis)
    axes.set_ylabel("microseconds")
    axes.set_title(title, loc="left", fontsize=9)
    axes.legend(fontsize=7)


def _color(name: str, names: Sequence[str]) -> str:
    """The colour of a line; the floor and this package have the same colour in every plot."""
    fixed = {"floor": "#999999", "sparsemla": OKABE_ITO[0]}
    if name in fixed:
        return fixed[name]
    others = [other for other in names if other not in fixed]
    return OKABE_ITO[1 + others.index(name) % (len(OKABE_ITO) - 1)]

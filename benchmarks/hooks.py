"""The table of docs/sglang-evidence.md, from what ``sglang_hooks.py`` has measured.

Run it after a new measurement: ``python benchmarks/hooks.py``. ``tests/test_docs.py`` fails if the
committed table differs from the one that the measurements give.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsemla_lab.bench.report import BEGIN, END

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks" / "sglang-h200.json"
DOCUMENT = ROOT / "docs" / "sglang-evidence.md"


def load(path: Path = DATA) -> dict[str, Any]:
    """What ``benchmarks/sglang_hooks.py`` wrote."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def table(measured: dict[str, Any]) -> str:
    """Markdown, a line for each row; times in microseconds, sparsemla's first."""
    versions = ", ".join(f"{name} {version}" for name, version in measured["versions"].items())
    lines = [
        f"On one {measured['device']}, with {versions}:",
        "",
        "| method | cache | heads | step | compared | time | ratio | SGLang's kernel |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in measured["rows"]:
        step = f"{row['kind']}, {row['batch']} x {row['tokens']} of {row['context'] // 1024}K"
        cells = [f"`{row['method']}`", row["cache"], heads(row), step, compared(row)]
        cells += [times(row), ratio(row), notes(row)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def heads(row: dict[str, Any]) -> str:
    """Heads of attention."""
    return "" if row["method"] == "topk_transform" else str(row["heads"])


def compared(row: dict[str, Any]) -> str:
    """The largest difference and its share of the bound, or equal selections.

    >>> row = {"rows": None, "apart": 0.0078, "share": 0.25}
    >>> compared(row), compared({"rows": 16, "equal": 16})
    ('0.0078, 0.25 of the bound', '16 of 16 equal')
    """
    if row["rows"] is not None:
        return "-" if row["equal"] is None else f"{row['equal']} of {row['rows']} equal"
    return "-" if row["share"] is None else f"{row['apart']:.4f}, {row['share']:.2f} of the bound"


def times(row: dict[str, Any]) -> str:
    """Both times."""
    return ", ".join(
        "-" if row[name] is None else f"{row[name]:.1f}" for name in ("ours_us", "theirs_us")
    )


def ratio(row: dict[str, Any]) -> str:
    """SGLang's time over sparsemla's."""
    if row["ours_us"] is None or row["theirs_us"] is None:
        return "-"
    return f"{row['theirs_us'] / row['ours_us']:.2f}"


def notes(row: dict[str, Any]) -> str:
    """Whose kernel was measured, or why none was."""
    return "; ".join(filter(None, (row["kernel"], row["why"].replace("|", "/"))))


def with_table(document: str, measured: dict[str, Any]) -> str:
    """The document with another table between its marks."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(measured)}\n{END}{after}"


if __name__ == "__main__":
    old = DOCUMENT.read_text(encoding="utf-8")
    DOCUMENT.write_text(with_table(old, load()), encoding="utf-8")

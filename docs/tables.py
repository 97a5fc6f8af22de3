"""Hook of mkdocs: fills the marks on pages with what files and the command line's parser say.

``<!-- table of FILE -->`` becomes the tables of a committed file of measurements,
``<!-- portable set of FILE -->`` one table of its portable workloads, ``<!-- commands -->`` a
section for each subcommand of ``sparsemla``, and ``<!-- capacity -->`` the sizes of formats and
models, for the calculator's script.
"""

from __future__ import annotations

import html
import json
import re
from pathlib import Path

import typer

from sparsemla_lab import capacity
from sparsemla_lab.bench import report
from sparsemla_lab.bench.portable import portable_table
from sparsemla_lab.cli import app

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"^<!-- (table|portable set) of (\S+) -->$", re.MULTILINE)
WRITE = {"table": report.markdown, "portable set": portable_table}
COMMANDS = "<!-- commands -->"
CAPACITY = "<!-- capacity -->"


def commands() -> str:
    """A section for each subcommand: its purpose, options, their defaults, and examples."""
    sections = []
    for name, command in typer.main.get_command(app).commands.items():
        lines = [f"## sparsemla {name}", "", " ".join((command.help or "").split())]
        rows = []
        for parameter in command.params:
            names = ", ".join(f"`{each}`" for each in parameter.opts)
            if parameter.metavar:
                names += f" `{parameter.metavar}`".replace("|", "\\|")
            default = "" if parameter.default in (None, False, 0) else f"`{parameter.default}`"
            default = "required" if parameter.required else default
            meaning = html.escape(" ".join((parameter.help or "").split()), quote=False)
            rows.append(f"| {names} | {default} | {meaning} |")
        if rows:
            lines += ["", "| option | default | meaning |", "|---|---|---|", *rows]
        calls = (command.epilog or "").splitlines()[2:]
        lines += ["", "```bash", *(call.strip() for call in calls), "```"]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def sizes() -> str:
    """The calculator's tables, which its script parses."""
    tables = json.dumps(capacity.tables())
    return f'<script type="application/json" id="capacity-tables">{tables}</script>'


def with_tables(text: str) -> str:
    """A page with each mark replaced by what it names."""
    text = MARK.sub(lambda mark: WRITE[mark[1]](report.load(ROOT / mark[2])), text)
    for placed, content in ((COMMANDS, commands), (CAPACITY, sizes)):
        if placed in text:
            text = text.replace(placed, content())
    return text


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs for each page."""
    return with_tables(markdown)

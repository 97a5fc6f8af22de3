"""Hook of mkdocs: fills the marks on pages with what files and the command line's parser say.

``<!-- table of FILE -->`` becomes the tables of a committed file of measurements,
``<!-- portable set of FILE -->`` one table of its portable workloads, and ``<!-- commands -->`` a
section for each subcommand of ``sparsemla``.
"""

from __future__ import annotations

import html
import re
from pathlib import Path

import typer

from sparsemla_lab.bench import report
from sparsemla_lab.bench.portable import portable_table
from sparsemla_lab.cli import app

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"^<!-- (table|portable set) of (\S+) -->$", re.MULTILINE)
WRITE = {"table": report.markdown, "portable set": portable_table}
COMMANDS = "<!-- commands -->"


def commands() -> str:
    """A section for each subcommand: its purpose, arguments, options and their defaults."""
    sections = []
    for name, command in typer.main.get_command(app).commands.items():
        lines = [f"## sparsemla {name}", "", " ".join((command.help or "").split())]
        rows = []
        for parameter in command.params:
            names = ", ".join(f"`{each}`" for each in parameter.opts)
            default = "" if parameter.default in (None, False, 0) else f"`{parameter.default}`"
            default = "required" if parameter.required else default
            meaning = html.escape(" ".join((parameter.help or "").split()), quote=False)
            rows.append(f"| {names} | {default} | {meaning} |")
        if rows:
            lines += ["", "| option | default | meaning |", "|---|---|---|", *rows]
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def with_tables(text: str) -> str:
    """A page with each mark replaced by what it names."""
    text = MARK.sub(lambda mark: WRITE[mark[1]](report.load(ROOT / mark[2])), text)
    return text.replace(COMMANDS, commands()) if COMMANDS in text else text


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs for each page."""
    return with_tables(markdown)

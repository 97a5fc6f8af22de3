"""Hook of mkdocs: fills the marks on the pages of results with tables of the committed files."""

from __future__ import annotations

import re
from pathlib import Path

from sparsemla_lab.bench import report

ROOT = Path(__file__).resolve().parent.parent
MARK = re.compile(r"^<!-- table of (\S+) -->$", re.MULTILINE)


def with_tables(text: str) -> str:
    """A page with each mark replaced by the tables of the file that it names."""
    return MARK.sub(lambda mark: report.markdown(report.load(ROOT / mark[1])), text)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Called by mkdocs for each page."""
    return with_tables(markdown)

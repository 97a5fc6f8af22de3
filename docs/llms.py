"""Hook of mkdocs: writes ``llms.txt``, the list of pages for language models (llmstxt.org)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
SOURCES = "https://raw.githubusercontent.com/sparsemla/sparsemla/main/docs/"
BLOCK = re.compile(r"^(```.*?^```|::: \S+\n(?: .*\n)*)", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")


def summary(text: str) -> str:
    """The first sentence of a page, without its links."""
    paragraphs = BLOCK.sub("", text).split("\n\n")
    for paragraph in paragraphs:
        words = " ".join(LINK.sub(r"\1", paragraph).split())
        if words and words[0] not in "#|!<":
            return re.split(r"(?<=[.:])\s", words)[0].rstrip(":")
    return ""


def lines(nav: list[Any]) -> Iterator[str]:
    """A heading for each section of the navigation, a line for each page."""
    for entry in nav:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            yield from ("", f"## {title}", "", *lines(target))
            continue
        said = summary((DOCS / target).read_text(encoding="utf-8"))
        yield f"- [{title}]({SOURCES}{target})" + (f": {said}" if said else "")


def llms(name: str, description: str, nav: list[Any]) -> str:
    """The file's text."""
    return "\n".join([f"# {name}", "", f"> {description}", "", *lines(nav), ""])


def on_post_build(config: Any) -> None:  # noqa: ANN401
    """Called by mkdocs when the site is complete."""
    text = llms(config["site_name"], config["site_description"], config["nav"])
    (Path(config["site_dir"]) / "llms.txt").write_text(text, encoding="utf-8")

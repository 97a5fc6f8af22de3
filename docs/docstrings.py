"""Extension of griffe, for the site: docstrings as Markdown.

The docstrings are written for ``help``: they name objects by Sphinx roles, announce literal blocks
by two colons, and end with examples that doctest runs.
"""

from __future__ import annotations

import re

import griffe

ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=`)")
LITERAL_BLOCK = re.compile(r"::$", re.MULTILINE)
DOUBLE_QUOTES = re.compile(r"``([^`\n]+)``")
EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).+)*", re.MULTILINE)


def markdown(text: str) -> str:
    """A docstring's text with roles as code, one colon for two, and fenced examples."""
    text = LITERAL_BLOCK.sub(":", ROLE.sub("", text))
    text = DOUBLE_QUOTES.sub(r"`\1`", text)
    return EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", text)


class Docstrings(griffe.Extension):
    """Translate each docstring once it is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Translate the docstring of ``obj``."""
        if obj.docstring is not None:
            obj.docstring.value = markdown(obj.docstring.value)

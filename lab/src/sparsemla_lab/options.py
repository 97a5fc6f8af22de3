"""Options of the command line: their choices, and refusals in one line."""

from __future__ import annotations

from typing import Any, NoReturn

import typer

FLOATS = ("bf16", "bfloat16", "fp16", "float16", "fp32", "float32")
"""Names of dtypes, without an import of torch."""


INSTALL_DEMO = "python -m pip install -c constraints.txt -e '.[demo]' -e ./lab"
"""Installs :data:`DEMO_PACKAGES` from a checkout; there is no release on PyPI."""

DEMO_PACKAGES = ("huggingface_hub", "matplotlib", "safetensors", "transformers")


def fail(message: object) -> NoReturn:
    """One line on stderr, exit code 2."""
    typer.echo(f"sparsemla: {' '.join(str(message).split())}", err=True)
    raise typer.Exit(2)


def choice(name: str, *values: str) -> dict[str, Any]:
    """Keywords of an option that takes one of a few values, which its help shows."""

    def parse(value: str) -> str:
        if value in values:
            return value
        from sparsemla.validation import not_one_of  # imports torch

        fail(not_one_of(name, values, value))

    return {"parser": parse, "metavar": "|".join(values)}


def examples(*lines: str) -> str:
    """The end of a command's help; the first letter keeps its lines as they are."""
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])

"""Writes conda-forge's recipe of a source distribution, from ``pyproject.toml``.

    python packaging/conda/build.py dist/sparsemla-0.1.0.tar.gz recipes/sparsemla --maintainer NAME

The distribution is the one on PyPI, the folder that of a feedstock, or of a new recipe in
conda-forge/staged-recipes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
METADATA = PROJECT["project"]

NAMES = {"torch": "pytorch"}
"""Packages with other names on conda-forge."""

RECIPE = """\
schema_version: 1

context:
  version: {version}
  python_min: {python_min}

package:
  name: {name}
  version: ${{{{ version }}}}

source:
  url: https://pypi.org/packages/source/{name[0]}/{name}/{name}-${{{{ version }}}}.tar.gz
  sha256: {sha256}

build:
  number: 0
  noarch: python
  script: ${{{{ PYTHON }}}} -m pip install . -vv --no-deps --no-build-isolation

requirements:
  host:
    - python ${{{{ python_min }}}}.*
    - pip
{host}
  run:
    - python >=${{{{ python_min }}}}
    - __linux
{run}

tests:
  - python:
      imports: [{name}, {name}.ops]
      python_version: ${{{{ python_min }}}}.*
      pip_check: true
  - script:
      - python -c "from {name} import *"

about:
  summary: {summary}
  homepage: {homepage}
  repository: {source}
  documentation: {documentation}
  license: {license}
  license_file: {license_file}

extra:
  recipe-maintainers: [{maintainers}]
"""


def requirement(text: str) -> str:
    """A requirement of Python as one of conda-forge, on Linux."""
    parsed = Requirement(text)
    if parsed.marker is not None and not parsed.marker.evaluate({"sys_platform": "linux"}):
        raise ValueError(f"requirement must be one of Linux, got {text}")
    # The bounds in the order of pyproject.toml, which packaging does not keep.
    bounds = sorted(map(str, parsed.specifier), key=text.index)
    return f"{NAMES.get(parsed.name, parsed.name)} {','.join(bounds)}"


def recipe(distribution: Path, maintainers: list[str]) -> str:
    """The recipe of a source distribution, and of the GitHub users who maintain it.

    Raises:
        ValueError: the distribution has another name or version than ``pyproject.toml``.
    """
    expected = f"{METADATA['name']}-{METADATA['version']}.tar.gz"
    if distribution.name != expected:
        raise ValueError(f"distribution must be {expected}, got {distribution.name}")

    def listed(requirements: list[str]) -> str:
        return "\n".join(f"    - {requirement(each)}" for each in requirements)

    return RECIPE.format(
        name=METADATA["name"],
        version=json.dumps(METADATA["version"]),
        python_min=json.dumps(METADATA["requires-python"].removeprefix(">=")),
        sha256=hashlib.sha256(distribution.read_bytes()).hexdigest(),
        host=listed(PROJECT["build-system"]["requires"]),
        run=listed(METADATA["dependencies"]),
        summary=json.dumps(METADATA["description"]),
        homepage=METADATA["urls"]["Homepage"],
        source=METADATA["urls"]["Source"],
        documentation=METADATA["urls"]["Documentation"],
        license=METADATA["license"],
        license_file=METADATA["license-files"][0],
        maintainers=", ".join(maintainers),
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("distribution", type=Path, help="The source distribution of a release.")
    parser.add_argument("out", type=Path, help="The folder for recipe.yaml.")
    parser.add_argument(
        "--maintainer", action="append", required=True, help="A GitHub user; repeatable."
    )
    given = parser.parse_args()
    text = recipe(given.distribution, given.maintainer)
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "recipe.yaml").write_text(text, encoding="utf-8")

"""The project's own files agree with each other: versions, ranges, pins and metadata."""

from __future__ import annotations

import importlib.util
import io
import re
import tomllib
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import sparsemla
from turns import is_late

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
METADATA = PROJECT["project"]
LAB = tomllib.loads((ROOT / "lab/pyproject.toml").read_text(encoding="utf-8"))["project"]
PYTHONS = ("3.11", "3.12", "3.13")


def pins() -> dict[str, str]:
    """The exact versions of ``constraints.txt``, by normalised name."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pairs = (line.split("==") for line in lines if not line.startswith("#"))
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in pairs}


def test_python_versions_agree():
    supported = SpecifierSet(METADATA["requires-python"])
    assert [f"3.{minor}" for minor in range(9, 14) if f"3.{minor}" in supported] == [*PYTHONS]
    for python in PYTHONS:
        assert f"Programming Language :: Python :: {python}" in METADATA["classifiers"]
    assert LAB["requires-python"] == METADATA["requires-python"]
    assert LAB["classifiers"] == METADATA["classifiers"]
    tools = PROJECT["tool"]
    assert tools["mypy"]["python_version"] == PYTHONS[0]
    assert tools["ruff"]["target-version"] == "py" + PYTHONS[0].replace(".", "")


REQUIREMENTS = [
    Requirement(text)
    for project in (METADATA, LAB)
    for group in (project["dependencies"], *project["optional-dependencies"].values())
    for text in group
]


@pytest.mark.parametrize("requirement", REQUIREMENTS, ids=str)
def test_pins_satisfy_the_ranges(requirement):
    of_this_repository = {"sparsemla": METADATA["version"], "sparsemla-lab": LAB["version"]}
    assert (pins() | of_this_repository)[requirement.name] in requirement.specifier


def test_the_package_and_its_lab_need_each_others_version():
    names = {"sparsemla", "sparsemla-lab"}
    between = [each for each in REQUIREMENTS if each.name in names]
    assert {each.name for each in between} == names
    own_extra = Requirement("sparsemla[demo]")
    for requirement in between:
        assert requirement == own_extra or str(requirement.specifier) == f"=={LAB['version']}"


def test_the_package_needs_neither_its_lab_nor_packages_of_a_command_line():
    needed = {Requirement(text).name for text in METADATA["dependencies"]}
    assert needed == {"torch", "triton", "numpy"}


def test_the_wheel_is_below_a_megabyte():
    """Its files, packed as a wheel packs them."""
    (folder,) = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in (ROOT / folder).rglob("*"):
            if path.is_file() and path.suffix != ".pyc":
                assert path.suffix == ".py" or path.name == "py.typed", path
                archive.write(path)
    assert packed.tell() < 1e6


def test_triton_has_an_upper_bound():
    (triton,) = (each for each in REQUIREMENTS if each.name == "triton")
    assert [version in triton.specifier for version in ("3.5.1", "3.6.0", "3.9.1", "3.10.0")] == [
        False,
        True,
        True,
        False,
    ]


def test_project_metadata_has_urls():
    wanted = {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert set(METADATA["urls"]) == set(LAB["urls"]) == wanted


def test_the_version_is_the_same_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert METADATA["version"] == sparsemla.__version__ == citation["version"] == LAB["version"]
    assert METADATA["license"] == citation["license"] == LAB["license"]
    assert (ROOT / "lab/LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert METADATA["urls"]["Source"] == citation["repository-code"]


def test_pre_commit_runs_the_pinned_ruff():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (ruff,) = hooks["repos"]
    assert ruff["rev"] == f"v{pins()['ruff']}"
    assert [hook["id"] for hook in ruff["hooks"]] == ["ruff-check", "ruff-format"]


def test_sglangs_plugin_without_sglang(monkeypatch):
    from sparsemla.backends.sglang import register

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"^SGLang is not installed$"):
        register()


def test_every_test_that_takes_turns_has_one():
    marks = (pytest.mark.turns(number, of).mark for of in (2, 3, 4, 6) for number in range(5))
    for mark in marks:
        item = SimpleNamespace(get_closest_marker=lambda name, mark=mark: mark)
        for first in (0, 1767225600):
            turns = range(first, first + mark.args[1])
            assert [is_late(item, turn) for turn in turns].count(False) == 1
    assert not is_late(SimpleNamespace(get_closest_marker=lambda name: None), 5)

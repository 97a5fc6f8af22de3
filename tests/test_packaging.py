"""Packages for other registries, made from the sources by scripts in ``packaging/``."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import typer
import yaml

import sparsemla
from sparsemla_lab.cli import app

ROOT = Path(__file__).resolve().parent.parent
PACKAGING = ROOT / "packaging"
HUB = runpy.run_path(str(PACKAGING / "hub/build.py"))


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """The repository for the hub of kernels."""
    out = tmp_path_factory.mktemp("hub") / "sparsemla"
    HUB["build"](out)
    return out


@pytest.fixture(scope="module")
def kernel(hub):
    """The kernel, imported by the hub's own loader if that is installed."""
    if importlib.util.find_spec("kernels") is None:
        load_kernel = runpy.run_path(str(PACKAGING / "hub/verify.py"))["load_kernel"]
        return load_kernel(hub / "build/torch-cpu")
    return importlib.import_module("kernels").get_local_kernel(hub)


def example(package):
    """The results of a decode."""
    torch.manual_seed(0)
    cache = package.PagedCache.allocate(package.FP8_DS_MLA, num_pages=4, page_size=64)
    cache.write(torch.arange(200), torch.randn(200, 576))
    q = torch.randn(2, 1, 16, 576).bfloat16()
    topk_indices = torch.randperm(200)[:64].int().expand(2, 1, 64)
    return package.sparse_decode(q, cache, topk_indices, softmax_scale=192**-0.5)


def test_the_hubs_layout(hub):
    assert sorted(path.name for path in hub.iterdir()) == ["LICENSE", "README.md", "build"]
    variants = sorted((hub / "build").iterdir())
    assert [path.name for path in variants] == ["torch-cpu", "torch-cuda", "torch-rocm"]
    for variant in variants:
        metadata = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))
        assert metadata["backend"]["type"] == variant.name.removeprefix("torch-")
        assert metadata["id"].isidentifier()
        present = {path.relative_to(variant).as_posix() for path in variant.rglob("*.py")}
        assert present == set(metadata["digest"]["files"])
        assert "backends/transformers/attention.py" in present
        assert not any(name.startswith(("backends/vllm", "backends/sglang")) for name in present)


def test_the_kernel_imports_its_own_modules_only(hub):
    """An absolute import would find another version of the package, or none."""
    for path in (hub / "build/torch-cuda").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            assert not any(name.partition(".")[0] == "sparsemla" for name in names), path


def test_the_kernel_runs_beside_the_package(kernel):
    """Its operators have a namespace of their own."""
    assert set(kernel.__all__) == set(sparsemla.__all__)
    assert kernel.sparse_decode is not sparsemla.sparse_decode
    assert hasattr(getattr(torch.ops, kernel.__name__), "sparse_decode")
    torch.testing.assert_close(example(kernel), example(sparsemla), rtol=0, atol=0)


def test_older_releases_import_the_folder_of_the_kernels_name(hub):
    code = "import sparsemla; print(sparsemla.__version__, sparsemla.FP8_DS_MLA.bytes_per_token)"
    ran = subprocess.run(
        [sys.executable, "-S", "-c", f"import sys; sys.path += {sys.path!r}; {code}"],
        env=os.environ | {"PYTHONPATH": str(hub / "build/torch-cpu")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.split() == [sparsemla.__version__, "656"]


def test_the_kernel_passes_verify(hub):
    ops = ("to_slots", "indexer_topk", "dense_decode", "sparse_attention", "decode_branch")
    ran = subprocess.run(
        [sys.executable, PACKAGING / "hub/verify.py", hub, *(f"--op={op}" for op in ops)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    *lines, verdict = ran.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*ops]
    assert re.fullmatch(r"_sparsemla_cpu_[0-9a-f]{7}: all passed", verdict)


def test_the_hub_reads_the_metadata_and_finds_the_digests(hub):
    rust = pytest.importorskip("kernels._rust")
    for variant in (hub / "build").iterdir():
        metadata = rust.Metadata.read_from_file(variant / "metadata.json")
        found = rust.Digest.hash_variant(rust.DigestAlgorithm.SHA256, variant)
        metadata.digest.validate(found)
        assert metadata.id.startswith(f"_{metadata.name.python_name}_")


def test_a_folder_that_is_not_empty(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"out must be an empty folder, got "):
        HUB["build"](tmp_path)


def test_imports_become_relative():
    source = "from sparsemla.ops import fake\nfrom sparsemla import ops\nimport torch\n"
    for path, dots in (
        ("a.py", "."),
        ("kernels/__init__.py", ".."),
        ("kernels/topk/cpu.py", "..."),
    ):
        written = f"from {dots}ops import fake\nfrom {dots} import ops\nimport torch\n"
        assert HUB["relative"](source, Path(path)) == written


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import sparsemla.ops\n", r"a.py:1 must import from sparsemla, got import"),
        ("from \\\n    sparsemla.ops import fake\n", r"a.py:1 must be one line up to import"),
    ],
    ids=["import", "lines"],
)
def test_an_import_that_cannot_be_relative(source, message):
    with pytest.raises(ValueError, match=message):
        HUB["relative"](source, Path("a.py"))


FORMS = [path for path in ROOT.glob(".github/ISSUE_TEMPLATE/*.yml") if path.stem != "config"]


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_forms_of_issues(path):
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert {*form} == {"name", "description", "labels", "body"}
    for field in form["body"]:
        assert field["type"] == "textarea"
        assert field["id"].isidentifier()
        for line in re.findall(r"`sparsemla ([^`]+)`", str(field["attributes"])):
            command, *words = line.split()
            known = typer.main.get_command(app).commands[command].params
            options = {name for parameter in known for name in parameter.opts}
            assert {word for word in words if word.startswith("--")} <= options

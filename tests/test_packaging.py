"""Packages for other registries, made from the sources by scripts in ``packaging/``."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import math
import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import typer
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

import sparsemla
from sparsemla_lab.cli import app

ROOT = Path(__file__).resolve().parent.parent
PACKAGING = ROOT / "packaging"
HUB = runpy.run_path(str(PACKAGING / "hub/build.py"))
CONDA = runpy.run_path(str(PACKAGING / "conda/build.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
BENCH = runpy.run_path(str(PACKAGING / "flashinfer_bench/build.py"))


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
        engines = ("backends/megatron", "backends/sglang", "backends/vllm")
        assert not any(name.startswith(engines) for name in present)


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
    path = hub / "build/torch-rocm/sparsemla/__init__.py"
    spec = importlib.util.spec_from_file_location("name_of_the_path", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.__version__ == sparsemla.__version__
    assert module.FP8_DS_MLA.bytes_per_token == 656
    assert module.sparse_decode is not sparsemla.sparse_decode


def test_the_kernel_passes_verify(tmp_path, monkeypatch):
    HUB["build"](tmp_path / "hub")
    for name in ("PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"):
        monkeypatch.delenv(name, raising=False)
    ops = ("to_slots", "indexer_topk", "dense_decode", "sparse_attention", "decode_branch")
    ran = subprocess.run(
        [
            sys.executable,
            PACKAGING / "hub/verify.py",
            tmp_path / "hub",
            *(f"--op={op}" for op in ops),
        ],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert not [*tmp_path.rglob("*.pyc")]
    *lines, verdict = ran.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [*ops]
    assert re.fullmatch(r"_sparsemla_cpu_[0-9a-f]{7}: all passed", verdict)


def test_the_card_runs(kernel, monkeypatch):
    """Its calls, and a model of transformers with the kernel's attention."""
    pytest.importorskip("transformers")
    from sparsemla_lab.testing.models import copying_model

    get_kernel = SimpleNamespace(get_kernel=lambda *_, **__: kernel)
    monkeypatch.setitem(sys.modules, "kernels", get_kernel)
    text = (PACKAGING / "hub/CARD.md").read_text(encoding="utf-8")
    names = {"model": copying_model("deepseek_v32")}
    tokens = torch.arange(24).view(2, 12)
    expected = names["model"](tokens).logits.argmax(-1)
    for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        exec(block, names)
    assert names["out"].shape == (2, 1, 16, 512)
    assert type(names["handle"]).__module__.startswith(f"{kernel.__name__}.backends.transformers")
    assert torch.equal(names["model"](tokens).logits.argmax(-1), expected)


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


def selected(page_size, num_tokens):
    """Inputs of sparse attention, and its outputs in float64; a second token selects no row."""
    num_pages = 3072 // page_size
    q = torch.randn(num_tokens, 16, 576).bfloat16()
    ckv = torch.randn(num_pages, page_size, 512).bfloat16()
    kpe = torch.randn(num_pages, page_size, 64).bfloat16()
    indices = torch.full((num_tokens, 2048), -1, dtype=torch.int32)
    indices[0, 3:703] = torch.randperm(3072)[:700]
    rows = torch.cat([ckv.flatten(0, 1), kpe.flatten(0, 1)], -1)[indices[0, 3:703].long()].double()
    logits = q[0].double() @ rows.T * 192**-0.5
    output = torch.zeros(num_tokens, 16, 512).double()
    lse = torch.full((num_tokens, 16), -torch.inf).double()
    output[0], lse[0] = logits.softmax(-1) @ rows[:, :512], logits.logsumexp(-1) / math.log(2)
    return (*q.split([512, 64], -1), ckv, kpe, indices, 192**-0.5), (output, lse)


def scored():
    """Inputs of the indexer, and the slots of each request in the order of their scores."""
    lengths, num_pages = (2300, 100, 0), 40
    q = torch.randn(3, 64, 128).to(torch.float8_e4m3fn)
    cache = sparsemla.PagedCache.allocate(sparsemla.INDEX_FP8, num_pages, 64)
    cache.write(torch.arange(64 * num_pages), torch.randn(64 * num_pages, 128))
    weights = torch.randn(3, 64)
    table = torch.stack([torch.randperm(num_pages) for _ in lengths]).int()
    best = []
    for request, length in enumerate(lengths):
        slots = (64 * table[request][:, None] + torch.arange(64)).flatten()[:length]
        keys = cache.read(slots.long()).double()
        scores = weights[request].double() @ (q[request].double() @ keys.T).relu()
        best.append(slots[scores.argsort(descending=True)])
    pages = cache.data.view(num_pages, 64, 1, 132).view(torch.int8)
    return (q, pages, weights, torch.tensor(lengths, dtype=torch.int32), table), best


def run_of(definition, inputs, outputs):
    """The solution's function, built by flashinfer-bench's own tools if they are installed."""
    solution = BENCH["solution"](definition)
    (source,) = solution["sources"]
    names = {}
    exec(source["content"], names)
    assert [*inspect.signature(names["run"]).parameters] == [*inputs, *outputs]
    if importlib.util.find_spec("flashinfer_bench") is None:
        return names["run"]
    data = importlib.import_module("flashinfer_bench.data")
    compile = importlib.import_module("flashinfer_bench.compile")
    dtypes = {torch.int8: "int8", torch.int32: "int32", torch.float32: "float32"}
    dtypes |= {torch.bfloat16: "bfloat16", torch.float8_e4m3fn: "float8_e4m3fn"}

    def spec(value):
        shape = [f"n{size}" for size in value.shape] if isinstance(value, torch.Tensor) else None
        return {"shape": shape, "dtype": dtypes[value.dtype] if shape else "float32"}

    specs = [{name: spec(value) for name, value in each.items()} for each in (inputs, outputs)]
    axes = {axis for each in specs for one in each.values() for axis in one["shape"] or []}
    defined = data.Definition(
        name=definition,
        op_type="dsa_paged",
        axes={axis: {"type": "const", "value": int(axis[1:])} for axis in axes},
        inputs=specs[0],
        outputs=specs[1],
        reference=f"def run({', '.join(inputs)}): pass",
    )
    registry = compile.BuilderRegistry.get_instance()
    return registry.build(defined, data.Solution(**solution))


ATTENTION = ("q_nope", "q_pe", "ckv_cache", "kpe_cache", "sparse_indices", "sm_scale")
INDEXER = ("q_index_fp8", "k_index_cache_fp8", "weights", "seq_lens", "block_table")


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("num_tokens", [1, 2], ids=["fewer rows selected", "fewer rows kept"])
def test_flashinfer_bench_attention(monkeypatch, tmp_path, page_size, num_tokens):
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path))
    inputs, expected = selected(page_size, num_tokens)
    outputs = torch.empty(num_tokens, 16, 512).bfloat16(), torch.empty(num_tokens, 16)
    given = dict(zip(ATTENTION, inputs, strict=True))
    definition = f"dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps{page_size}"
    run = run_of(definition, given, dict(zip(("output", "lse"), outputs, strict=True)))
    run(*inputs, *outputs)
    torch.testing.assert_close(outputs[0].double(), expected[0], atol=0.02, rtol=0.02)
    torch.testing.assert_close(outputs[1].double(), expected[1], atol=1e-3, rtol=1e-4)


def test_flashinfer_bench_indexer(monkeypatch, tmp_path):
    monkeypatch.setenv("FIB_CACHE_PATH", str(tmp_path))
    inputs, best = scored()
    out = torch.empty(3, 2048, dtype=torch.int32)
    given = dict(zip(INDEXER, inputs, strict=True))
    definition = "dsa_topk_indexer_fp8_h64_d128_topk2048_ps64"
    run_of(definition, given, {"topk_indices": out})(*inputs, out)
    for slots, wanted in zip(out.tolist(), best, strict=True):
        found = {slot for slot in slots if slot >= 0}
        assert found == set(wanted[:2048].tolist())
        assert slots.count(-1) == 2048 - len(found)


def test_flashinfer_bench_files(tmp_path):
    BENCH["build"](tmp_path)
    files = sorted(tmp_path.rglob("*.json"))
    assert [path.parent.name for path in files] == sorted(BENCH["DEFINITIONS"])
    for path in files:
        solution = json.loads(path.read_text(encoding="utf-8"))
        assert solution == BENCH["solution"](path.parent.name)
        assert solution["name"] == path.stem
        assert solution["spec"]["dependencies"] == [f"sparsemla >= {sparsemla.__version__}"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    """The text of the recipe for conda-forge."""
    distribution = tmp_path_factory.mktemp("dist") / f"sparsemla-{sparsemla.__version__}.tar.gz"
    distribution.write_bytes(b"the release")
    return CONDA["recipe"](distribution, ["someone", "another"])


def test_the_recipe_has_the_projects_metadata(recipe):
    found = yaml.safe_load(recipe)
    project = PROJECT["project"]
    assert found["context"]["version"] == project["version"] == sparsemla.__version__
    assert f">={found['context']['python_min']}" == project["requires-python"]
    assert found["source"]["sha256"] == hashlib.sha256(b"the release").hexdigest()
    names = {"torch": "pytorch"}
    for section, wanted in (
        ("run", project["dependencies"]),
        ("host", PROJECT["build-system"]["requires"]),
    ):
        python, *lines = found["requirements"][section]
        assert python.startswith("python ")
        pairs = [line.split() for line in lines]
        bounds = {name: SpecifierSet(*rest) for name, *rest in pairs}
        for each in map(Requirement, wanted):
            assert bounds.pop(names.get(each.name, each.name)) == each.specifier
        assert set(bounds) == {"run": {"__linux"}, "host": {"pip"}}[section]
    about = found["about"]
    assert (about["summary"], about["license"]) == (project["description"], project["license"])
    assert (ROOT / about["license_file"]).exists()
    assert found["build"]["noarch"] == "python"
    assert found["extra"] == {"recipe-maintainers": ["someone", "another"]}


def test_conda_renders_the_recipe(recipe):
    rattler_build = pytest.importorskip("rattler_build")
    (variant,) = rattler_build.Stage0Recipe.from_yaml(recipe).render(rattler_build.VariantConfig())
    rendered = variant.recipe.to_dict()
    assert rendered["package"] == {"name": "sparsemla", "version": sparsemla.__version__}
    assert "triton >=3.6,<3.10" in rendered["requirements"]["run"]
    (source,) = rendered["source"]
    assert source["url"].endswith(f"/s/sparsemla/sparsemla-{sparsemla.__version__}.tar.gz")


def test_a_requirement_of_another_system():
    assert CONDA["requirement"]("torch>=2.11,<3; sys_platform == 'linux'") == "pytorch >=2.11,<3"
    with pytest.raises(ValueError, match=r"^requirement must be one of Linux, got pywin32"):
        CONDA["requirement"]("pywin32>=1; sys_platform == 'win32'")


def test_a_distribution_of_another_version(tmp_path):
    expected = re.escape(f"distribution must be sparsemla-{sparsemla.__version__}.tar.gz, got ")
    with pytest.raises(ValueError, match=f"^{expected}sparsemla-9.tar.gz$"):
        CONDA["recipe"](tmp_path / "sparsemla-9.tar.gz", ["someone"])


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

"""The layers of the package, by the imports in its source."""

import ast
import inspect
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch import Tensor

import sparsemla
import sparsemla_lab
from sparsemla import (
    HeadWeight,
    MLALayer,
    PagedCache,
    Plan,
    RowTable,
    WindowState,
    dispatch,
    ops,
    reference,
)

PACKAGE = Path(sparsemla.__file__).parent
LAB = Path(sparsemla_lab.__file__).parent


def modules(package):
    return {
        ".".join(path.relative_to(package.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in sorted(package.rglob("*.py"))
    }


MODULES = modules(PACKAGE)
LAB_MODULES = modules(LAB)
ALL_MODULES = MODULES | LAB_MODULES

# Imports from the package that are allowed below a prefix of modules; longest prefix first.
LAYERS = {
    "sparsemla.validation": (),
    "sparsemla.state": (),
    "sparsemla.formats": ("validation", "state"),
    "sparsemla.cache": ("validation", "formats"),
    "sparsemla.rope": ("validation", "formats", "cache"),
    "sparsemla.pooling": ("validation",),
    "sparsemla.residency": ("validation",),
    "sparsemla.shards": ("validation",),
    "sparsemla.weights": ("validation", "state", "formats", "checks"),
    "sparsemla.plan": ("validation", "formats", "cache", "shards", "checks"),
    "sparsemla.runner": ("validation", "plan", "shards"),
    "sparsemla.numa": (),
    "sparsemla.pinned": (),
    "sparsemla.side_stream": (),
    "sparsemla.host_cache": ("validation", "formats", "cache", "numa", "pinned"),
    "sparsemla.hot_rows": (
        "validation",
        "formats",
        "cache",
        "plan",
        "residency",
        "shards",
        "host_cache",
        "side_stream",
        "ops.residency",
    ),
    "sparsemla.host_context": (
        "validation",
        "formats",
        "cache",
        "plan",
        "host_cache",
        "shards",
        "side_stream",
        "ops.gather",
        "ops.lists",
        "ops.residency",
    ),
    "sparsemla.checks": ("validation", "formats", "cache"),
    "sparsemla.reference": (
        "formats",
        "cache",
        "plan",
        "pooling",
        "residency",
        "shards",
        "rope",
        "weights",
        "reference",
    ),
    "sparsemla.kernels.common": ("state", "formats", "cache", "weights", "kernels.common"),
    "sparsemla.kernels.repeat": ("formats", "pooling", "shards", "kernels.repeat"),
    "sparsemla.kernels": (
        "formats",
        "cache",
        "pooling",
        "residency",
        "shards",
        "weights",
        "kernels.common",
    ),
    "sparsemla.dispatch": ("kernels",),
    "sparsemla.ops": (
        "validation",
        "state",
        "formats",
        "cache",
        "weights",
        "plan",
        "pooling",
        "residency",
        "shards",
        "checks",
        "kernels",
        "dispatch",
        "ops",
    ),
    "sparsemla.parallel": ("validation", "shards", "checks", "kernels.exchange", "ops"),
    "sparsemla.explanation": ("dispatch", "kernels.repeat", "ops"),
    "sparsemla.warmup": (
        "validation",
        "formats",
        "cache",
        "pooling",
        "residency",
        "shards",
        "weights",
        "kernels.attention.schedule",
        "kernels.common",
        "host_cache",
        "host_context",
        "ops",
        "plan",
        "residency",
    ),
    "sparsemla._api": (
        "cache",
        "explanation",
        "formats",
        "host_cache",
        "host_context",
        "hot_rows",
        "ops",
        "parallel",
        "plan",
        "pooling",
        "residency",
        "rope",
        "runner",
        "shards",
        "warmup",
        "weights",
    ),
    "sparsemla.compat": ("validation", "formats", "cache", "checks", "ops", "compat"),
}
# Families of kernels that call another family's.
FAMILIES_BUILT_ON = {
    ("sparsemla.kernels.indexer", "sparsemla.kernels.topk"),
    ("sparsemla.kernels.projection", "sparsemla.kernels.attention"),
    ("sparsemla.kernels.projection", "sparsemla.kernels.quant"),
    ("sparsemla.kernels.pool", "sparsemla.kernels.quant"),
    ("sparsemla.kernels.backward", "sparsemla.kernels.attention"),
    ("sparsemla.kernels.losses", "sparsemla.kernels.attention"),
    ("sparsemla.kernels.exchange", "sparsemla.kernels.topk"),
}
ON_TOP = ("backends", "compat", "__main__")
BELOW = (
    "validation",
    "state",
    "formats",
    "cache",
    "pooling",
    "residency",
    "shards",
    "rope",
    "weights",
    "plan",
    "checks",
    "reference",
    "kernels",
)


def imports(module):
    """Modules that a module imports anywhere, functions included."""
    found = set()
    for node in ast.walk(ast.parse(ALL_MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} has a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                found.add(name if name in ALL_MODULES else node.module)
    return found


def below(module, prefixes):
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


def layer_of(module):
    prefix = max((name for name in LAYERS if below(module, [name])), key=len, default=None)
    return None if prefix is None else tuple(f"sparsemla.{name}" for name in LAYERS[prefix])


@pytest.mark.parametrize("module", [name for name in MODULES if layer_of(name) is not None])
def test_imports_point_one_way(module):
    allowed = layer_of(module)
    for name in imports(module):
        if not below(name, ["sparsemla"]):
            continue
        if below(module, ["sparsemla.kernels"]):
            family, other = (".".join(path.split(".")[:3]) for path in (module, name))
            if family == other or (family, other) in FAMILIES_BUILT_ON:
                continue
        assert below(name, allowed), f"{module} imports {name}"


def test_imports_have_no_circle():
    """Also none of imports for the type checker; a package's own file may import its modules."""
    known = {module: imports(module) & ALL_MODULES.keys() for module in ALL_MODULES}
    while ready := [module for module, needed in known.items() if not needed & known.keys()]:
        for module in ready:
            del known[module]
    assert not known


@pytest.mark.parametrize("module", MODULES)
def test_only_the_top_imports_the_top(module):
    top = [f"sparsemla.{name}" for name in ON_TOP]
    if not below(module, top):
        assert not [name for name in imports(module) if below(name, top)]


@pytest.mark.parametrize("module", MODULES)
def test_the_package_does_not_know_the_lab(module):
    """Not even by a name that is imported later; ``python -m sparsemla`` hands over to it."""
    if module != "sparsemla.__main__":
        assert "sparsemla_lab" not in MODULES[module].read_text(encoding="utf-8")


def test_every_module_belongs_to_a_layer():
    placed = [f"sparsemla.{name}" for name in ON_TOP] + list(LAYERS)
    assert [name for name in MODULES if name != "sparsemla" and not below(name, placed)] == []


def test_the_reference_uses_no_kernel():
    for module in MODULES:
        if below(module, ["sparsemla.reference"]):
            names = imports(module)
            assert not [name for name in names if below(name, ["sparsemla.kernels", "triton"])]


def test_triton_is_imported_by_kernels_only():
    for module in MODULES:
        if not below(module, ["sparsemla.kernels", *(f"sparsemla.{name}" for name in ON_TOP)]):
            assert not [name for name in imports(module) if below(name, ["triton"])], module


def test_library_code_has_no_asserts():
    for module, path in ALL_MODULES.items():
        if not below(module, ["sparsemla.kernels"]):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            asserts = [node.lineno for node in ast.walk(tree) if isinstance(node, ast.Assert)]
            assert asserts == [], f"{module} asserts in lines {asserts}"


# Arguments of public ops that references lack, buffers, limits and checks, with their defaults.
ONLY_PUBLIC = {
    "out": None,
    "kv_out": None,
    "lse": None,
    "lengths": None,
    "counts": None,
    "miss_slots": None,
    "miss_rows": None,
    "miss_counts": None,
    "new_counts": None,
    "max_logits": None,
    "token_mask": None,
    "weights_out": None,
    "blocks_out": None,
    "validate": False,
    "workspace": None,
    "num_splits": None,
    "batch_invariant": False,
    "workspace_rows": 16384,
}


def signature(function, without):
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default, p.annotation) for p in parameters if p.name not in without]


@pytest.mark.parametrize("op", ops.__all__)
def test_definitions_take_the_arguments_of_the_ops(op):
    definition = getattr(reference, op)
    extra = ONLY_PUBLIC.keys() - inspect.signature(definition).parameters
    assert signature(definition, set()) == signature(getattr(ops, op), extra)
    for name, parameter in inspect.signature(getattr(ops, op)).parameters.items():
        if name in extra:
            assert parameter.default == ONLY_PUBLIC[name]


OPERANDS = {Tensor, Tensor | None, Tensor | PagedCache, PagedCache, HeadWeight, MLALayer, Plan}
OPERANDS |= {RowTable, WindowState}
"""Types of tensors, and of records of tensors."""

METADATA = {"positions", "request_ids", "ring_ids", "row_ends", "row_starts", "slot_mapping"}
"""Where tokens are, and what they see."""

CONVERTERS = {"entry_slots", "to_slots", "visible_slots"}
"""The ops whose operands are such metadata."""

REQUIRED_OUTPUTS = {"gather_dequant": {"out"}}


@pytest.mark.parametrize("op", ops.__all__)
def test_operands_are_positional_and_all_else_is_by_keyword(op):
    by_keyword = REQUIRED_OUTPUTS.get(op, set()) | (set() if op in CONVERTERS else METADATA)
    for name, parameter in inspect.signature(getattr(ops, op), eval_str=True).parameters.items():
        operand = parameter.annotation in OPERANDS and parameter.default is parameter.empty
        if operand and name not in by_keyword:
            assert parameter.kind == parameter.POSITIONAL_OR_KEYWORD, name
        else:
            assert parameter.kind == parameter.KEYWORD_ONLY, name


def test_every_op_has_a_definition_and_a_public_name():
    assert set(ops.__all__) == set(reference.__all__)
    assert set(ops.__all__) <= set(sparsemla.__all__)
    composed = {"decode_branch", "prefill_branch", "select_rows", "index_loss"}
    assert set(dispatch.OPS) == set(ops.__all__) - composed


def test_public_names_exist_and_are_sorted():
    for name in sparsemla.__all__:
        assert hasattr(sparsemla, name)
    for names in (sparsemla.__all__, ops.__all__, reference.__all__):
        assert len(set(names)) == len(names)


@pytest.mark.parametrize("op", dispatch.OPS)
def test_records_have_the_arguments_of_their_op(op):
    table = dispatch.OPS[op]
    public = set(inspect.signature(getattr(ops, op)).parameters)
    public = {"splits" if name == "num_splits" else name for name in public}
    fields = set(table.arguments._fields)
    assert public - fields <= {"validate", "accumulate"}  # those that the op sees to
    assert fields - public - set(table.outputs) <= {"as_float32"}
    assert {*table.outputs, *table.mutates} <= fields


@pytest.mark.parametrize("op", dispatch.OPS)
def test_every_kernel_takes_the_record_of_its_op(op):
    table = dispatch.OPS[op]
    names = [kernel.name for kernel in table.kernels]
    assert names[-1] == "reference"
    assert len(set(names)) == len(names)
    for kernel in table.kernels:
        (parameter,) = inspect.signature(kernel.load()).parameters.values()
        assert parameter.name == "call", kernel.name
        if kernel.tier != "reference":
            annotation = parameter.annotation
            name = annotation if isinstance(annotation, str) else annotation.__name__
            assert name == table.arguments.__name__, kernel.name


def test_every_public_function_and_class_is_documented():
    for name in sparsemla.__all__:
        value = getattr(sparsemla, name)
        if inspect.isfunction(value) or inspect.isclass(value):
            assert (value.__doc__ or "").strip(), name


IMPORT = """
import sys
import sparsemla
if "torch" in sys.modules:
    print("torch before it is needed")
import torch
before = set(sys.modules)
from sparsemla import *
assert sparse_decode is sparsemla.sparse_decode
new = {name.split(".")[0] for name in set(sys.modules) - before}
for name in ("transformers", "matplotlib", "triton", "rich", "typer", "safetensors", "hypothesis"):
    if name in new:
        print(name)
if torch.cuda.is_initialized():
    print("cuda")
for name in sys.modules:
    tier = {"sm90", "sm80", "triton", "cpu"} & set(name.split("."))
    if name.startswith("sparsemla.kernels.") and tier:
        print(name)
"""


def test_importing_the_package_loads_nothing_heavy():
    result = subprocess.run(
        [sys.executable, "-c", IMPORT],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent), "PYTHONDONTWRITEBYTECODE": "1"},
    )
    assert result.stdout.split() == []


def test_log_is_silent_unless_the_program_configures_logging(capfd):
    logger = logging.getLogger("sparsemla")
    assert [type(handler) for handler in logger.handlers] == [logging.NullHandler]
    logger.warning("not for a program that has not configured logging")
    assert capfd.readouterr() == ("", "")


IMPORT_EACH = """
import importlib, os, sys
import torch
for name in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        try:
            importlib.import_module(name)
        except BaseException as error:
            print(f"{name}: {error}", flush=True)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_every_module_can_be_imported_first():
    """No module relies on an earlier import of another module."""
    needs_packages = [
        *(f"sparsemla.{name}" for name in ("backends", "kernels")),
        *(f"sparsemla_lab.{name}" for name in ("demo", "generate", "picture", "testing", "bench")),
    ]
    names = [name for name in ALL_MODULES if not below(name, needs_packages)]
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_EACH, *names], capture_output=True, text=True, check=True
    )
    assert done.stdout == ""


UNBOUNDED = {
    ("sparsemla.backends.vllm.attention", "_conversion_pays_off"),  # an engine's configuration
    ("sparsemla.backends.vllm.attention", "decode_workspace_bytes"),
    ("sparsemla.backends.vllm.conversions", "reserved_rows"),
}
"""Functions with a cache without a bound: they see one configuration, however many calls come."""


@pytest.mark.parametrize(
    "module", [name for name in ALL_MODULES if not below(name, ["sparsemla_lab.testing"])]
)
def test_caches_of_callers_sizes_are_bounded(module):
    """A cache with a key for each shape of a call would grow for as long as a server runs."""
    tree = ast.parse(ALL_MODULES[module].read_text(encoding="utf-8"))
    for node in tree.body:  # a cache inside of a function ends with it
        places = node.decorator_list if isinstance(node, ast.FunctionDef) else [node]
        cached = [
            each
            for place in places
            for each in ast.walk(place)
            if isinstance(each, ast.Attribute) and ast.unparse(each) == "functools.cache"
        ]
        if isinstance(node, ast.FunctionDef):
            of_devices = {argument.arg for argument in node.args.args} <= {"device"}
            if of_devices or (module, node.name) in UNBOUNDED:
                continue
        assert not cached, f"line {node.lineno}: functools.lru_cache takes a bound"

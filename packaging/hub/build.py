"""Writes a repository of Hugging Face's kernels hub from ``src/sparsemla``.

    python packaging/hub/build.py OUT

The hub's loader imports ``OUT/build/<variant>/__init__.py`` under the ``id`` of its
``metadata.json``, so that several versions fit into one process. Imports within the package are
therefore rewritten to relative ones.
"""

from __future__ import annotations

import argparse
import ast
import base64
import hashlib
import json
import re
import shutil
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
PACKAGE = "sparsemla"
VERSION = 0
"""The hub's number of the API; 0 stands for alpha."""

BACKENDS: dict[str, list[str] | None] = {
    "cpu": None,
    "cuda": ["8.0+PTX"],  # Triton compiles for the GPU that is present
    "rocm": ["gfx942"],
}
"""The architectures of each build variant."""

LEFT_OUT = ("__main__.py", "backends/megatron", "backends/sglang", "backends/vllm")
"""The command, and plugins that engines find by an installed package."""

COMPATIBLE = '''"""For releases of ``kernels`` that import this folder."""

import importlib.util
import sys
from pathlib import Path

if "{id}" not in sys.modules:
    spec = importlib.util.spec_from_file_location(
        "{id}", Path(__file__).resolve().parent.parent / "__init__.py"
    )
    sys.modules["{id}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["{id}"])
globals().update(vars(sys.modules["{id}"]))
'''


def relative(source: str, path: Path) -> str:
    """A module's source with relative imports from the package; the path is within the package.

    Raises:
        ValueError: a module of the package is imported otherwise.
    """
    lines = source.splitlines(keepends=True)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import) and any(
            alias.name.partition(".")[0] == PACKAGE for alias in node.names
        ):
            raise ValueError(f"{path}:{node.lineno} must import from {PACKAGE}, got import")
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE:
            line = lines[node.lineno - 1]
            written, count = re.subn(
                rf"\bfrom {PACKAGE}\b\.?", f"from {'.' * len(path.parts)}", line, count=1
            )
            if count != 1:
                raise ValueError(f"{path}:{node.lineno} must be one line up to import, got {line}")
            lines[node.lineno - 1] = written
    return "".join(lines)


def package_files() -> dict[str, str]:
    """The content of each file of a variant but the metadata, by its path."""
    source = ROOT / "src" / PACKAGE
    files = {}
    for path in sorted(source.rglob("*.py")):
        within = path.relative_to(source)
        if not within.as_posix().startswith(LEFT_OUT):
            files[within.as_posix()] = relative(path.read_text(encoding="utf-8"), within)
    return files


def write_variant(folder: Path, backend: str, files: dict[str, str]) -> None:
    """A build variant: the package and its metadata, with a digest of each file."""
    content = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    identifier = f"_{PACKAGE}_{backend}_{content[:7]}"
    files = {**files, f"{PACKAGE}/__init__.py": COMPATIBLE.format(id=identifier)}
    digests = {}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        digest = hashlib.sha256(text.encode()).digest()
        digests[name] = base64.b64encode(digest).decode()
    archs = BACKENDS[backend]
    metadata = {
        "name": PACKAGE,
        "id": identifier,
        "version": VERSION,
        "license": "Apache-2.0",
        "upstream": "https://github.com/sparsemla/sparsemla",
        "python-depends": [],
        "backend": {"type": backend} | ({"archs": archs} if archs else {}),
        "digest": {"algorithm": "sha256", "files": digests},
    }
    text = json.dumps(metadata, indent=2) + "\n"
    (folder / "metadata.json").write_text(text, encoding="utf-8")


def build(out: Path) -> None:
    """Write the repository.

    Raises:
        ValueError: the folder is not empty.
    """
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"out must be an empty folder, got {out}")
    out.mkdir(parents=True, exist_ok=True)
    files = package_files()
    for backend in BACKENDS:
        write_variant(out / "build" / f"torch-{backend}", backend, files)
    shutil.copy(ROOT / "LICENSE", out / "LICENSE")
    shutil.copy(HERE / "CARD.md", out / "README.md")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="An empty folder.")
    build(parser.parse_args().out)

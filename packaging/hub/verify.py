"""Runs the checks of ``sparsemla verify`` on a repository that ``build.py`` wrote.

    python packaging/hub/verify.py OUT [--op sparse_decode]

Needs ``sparsemla-lab``, whose imports of ``sparsemla`` get the kernel's modules.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsemla_lab.verify.run import OpReport

PACKAGE = "sparsemla"


def load_kernel(variant: Path) -> ModuleType:
    """Import a build variant as the hub's loader does: from its folder, under its id."""
    name = json.loads((variant / "metadata.json").read_text(encoding="utf-8"))["id"]
    spec = importlib.util.spec_from_file_location(name, variant / "__init__.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"variant must have a package, got {variant}")
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rename(kernel: ModuleType, variant: Path) -> None:
    """Let imports of ``sparsemla`` find the kernel's modules."""
    for path in sorted(variant.rglob("*.py")):
        within = path.relative_to(variant)
        if within.parts[0] not in ("backends", PACKAGE):
            names = (
                within.parent.parts if path.name == "__init__.py" else within.with_suffix("").parts
            )
            module = importlib.import_module(".".join((kernel.__name__, *names)))
            sys.modules[".".join((PACKAGE, *names))] = module


def main() -> int:
    """Run the quick cases of each op; 1 if one fails."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="The folder that build.py wrote.")
    parser.add_argument("--op", action="append", default=[], help="Only this op; repeatable.")
    parser.add_argument("--device", default="cpu", help="cpu or cuda.")
    given = parser.parse_args()

    sys.dont_write_bytecode = True  # the folder may be published next
    variant = given.out / "build" / f"torch-{given.device}"
    kernel = load_kernel(variant)
    rename(kernel, variant)
    from sparsemla_lab.verify import run
    from sparsemla_lab.verify.command import op_line

    def on_op(op: OpReport) -> None:
        sys.stdout.write("\n  ".join([op_line(op), *op.failures]) + "\n")

    report = run.verify(given.device, quick=True, ops=given.op, on_op=on_op)
    sys.stdout.write(f"{kernel.__name__}: {'all passed' if report.passed else 'FAILED'}\n")
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())

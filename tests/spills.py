"""Bytes of registers that kernels are known to spill, by launch, kernel and target.

``launches/spills.json`` has the maximum over all versions of Triton that were tried; kernels
without a record spill nothing. To update it, for each version (PYTHONPATH may name its package):

    python -m sparsemla_lab.testing.compile tests/launches/topk.py | python tests/spills.py topk
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

RECORDS = Path(__file__).parent / "launches/spills.json"
LINE = re.compile(r"(.+?) +(\w+) +((?:sm_|gfx)\w+) +\(.*spills +(\d+)")


def of(table: str, lines: Iterable[str]) -> dict[str, int]:
    """Most bytes of each launch and kernel, by reports of :mod:`sparsemla_lab.testing.compile`."""
    found: dict[str, int] = {}
    for line in lines:
        match = LINE.match(line)
        if match is None:
            raise ValueError(f"not a line about a kernel: {line!r}")
        launch, kernel, target, spilled = match.groups()
        key = f"{table} / {launch} / {kernel} / {target}"
        found[key] = max(found.get(key, 0), int(spilled))
    return found


def read() -> dict[str, int]:
    """The recorded bytes."""
    return json.loads(RECORDS.read_text(encoding="utf-8"))


def record(spilled: Mapping[str, int]) -> None:
    """Raise the records below these numbers of bytes."""
    known = read() if RECORDS.exists() else {}
    for kernel, count in spilled.items():
        if count > known.get(kernel, 0):
            known[kernel] = count
    text = json.dumps(dict(sorted(known.items())), indent=2)
    RECORDS.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(of(sys.argv[1], sys.stdin))

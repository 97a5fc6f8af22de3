"""The table of GPUs and versions of Triton that were tried, for the docs, explain and doctor.

The table lists proofs, not permissions: dispatch offers the portable kernels to every
GPU from sm_80 on and to gfx942.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

TRITON_VERSIONS = ("3.6", "3.7", "3.8", "3.9")
"""Minor versions that the package accepts."""

BEGIN, END = "<!-- support: begin -->", "<!-- support: end -->"
"""Markers of the table in a document."""


class Proof(Enum):
    """The proof for a GPU with a version of Triton; each proof includes all below it."""

    RUN = "run"
    """``sparsemla verify`` passed on the GPU."""
    RUN_ON_H200 = "code run on an H200"
    """An H200 passed ``sparsemla verify --as``: its driver translated the GPU's code."""
    COMPILED = "compiled"
    """Every launch compiled; registers and shared memory were checked."""
    UNTESTED = "untested"


@dataclass(frozen=True)
class Support:
    """A row of the table.

    Args:
        target: the compiler's name, such as ``sm_90``, or ``cpu``.
        devices: names of devices; on a GPU as the driver spells them.
        proofs: one for each of :data:`TRITON_VERSIONS`; empty for a CPU.
        evidence: a sentence.
    """

    target: str
    devices: tuple[str, ...]
    proofs: tuple[Proof, ...]
    evidence: str

    def on(self, triton: str) -> Proof:
        """The proof for a version of Triton, such as ``3.7.1``.

        >>> gpu_support("sm_80")[0].on("3.6.0")
        <Proof.RUN_ON_H200: 'code run on an H200'>
        """
        minor = ".".join(triton.split(".")[:2])
        return dict(zip(TRITON_VERSIONS, self.proofs, strict=False)).get(minor, Proof.UNTESTED)

    def line(self, triton: str | None) -> str:
        """The row as one line, for one version of Triton; None if no Triton is installed.

        >>> print(gpu_support("gfx942")[0].line("3.6.0"))
        gfx942 (MI300X), Triton 3.6.0: compiled. Every launch compiles; none was run.
        """
        name = f"{self.target} ({', '.join(self.devices)})" if self.devices else self.target
        if not self.proofs:
            return f"{name}: {self.evidence}"
        if triton is None:
            known = zip(self.proofs, TRITON_VERSIONS, strict=True)
            states = ", ".join(f"{proof.value} on {version}" for proof, version in known)
            return f"{name}, no Triton here: {states}. {self.evidence}"
        return f"{name}, Triton {triton}: {self.on(triton).value}. {self.evidence}"


def _from_3_6(proof: Proof) -> tuple[Proof, ...]:
    """``proof`` on Triton 3.6; on 3.7, the version of constraints.txt, the tests compile all."""
    return proof, Proof.COMPILED, Proof.UNTESTED, Proof.UNTESTED


_NONE = (Proof.UNTESTED,) * len(TRITON_VERSIONS)
_AS = "`sparsemla verify --as {}` on an H200: {} cases on Triton 3.6."
_COMPILES = "Every launch compiles; none was run."

TABLE = (
    Support(
        "sm_90",
        ("H200",),
        (Proof.RUN,) * len(TRITON_VERSIONS),
        "`sparsemla verify`: 983 of 983 cases on Triton 3.6, 435 of 435 older ones on 3.7 to 3.9.",
    ),
    Support(
        "sm_90",
        ("H100",),
        _from_3_6(Proof.RUN),
        "`sparsemla verify`: 871 of 871 cases on Triton 3.6. It gets the H200's code.",
    ),
    Support("sm_80", ("A100",), _from_3_6(Proof.RUN_ON_H200), _AS.format("sm_80", "985 of 985")),
    Support(
        "sm_89",
        ("L40S", "RTX 4090"),
        _from_3_6(Proof.RUN_ON_H200),
        _AS.format("sm_89", "985 of 985"),
    ),
    Support("sm_100", ("B200",), _from_3_6(Proof.COMPILED), _COMPILES),
    Support(
        "sm_120",
        ("RTX 5090",),
        _from_3_6(Proof.COMPILED),
        "Every launch compiles, or its PTX is that of `sm_100` or `sm_80`; none was run.",
    ),
    Support("gfx942", ("MI300X",), _from_3_6(Proof.COMPILED), _COMPILES),
    Support("cpu", ("x86-64",), (), "The tests pass on Python 3.11, 3.12 and 3.13."),
)


def gpu_support(target: str, device: str | None = None) -> tuple[Support, ...]:
    """The rows of a GPU, or a row without evidence.

    Args:
        target: the compiler's name, such as ``sm_90``.
        device: the driver's name of the GPU; None for every row of the target.

    >>> [row.devices for row in gpu_support("sm_90")]
    [('H200',), ('H100',)]
    >>> [row.devices for row in gpu_support("sm_90", "NVIDIA H200")]
    [('H200',)]
    >>> gpu_support("sm_86")[0].evidence
    'Nothing was compiled for it or run on it.'
    """
    rows = [row for row in TABLE if row.target == target]
    if device is not None:
        named = [
            row
            for row in rows
            if any(re.search(rf"\b{re.escape(name)}\b", device) for name in row.devices)
        ]
        # A run on one GPU proves nothing about another one; compiled code is the same for both.
        rows = named or [row for row in rows if Proof.RUN not in row.proofs]
    return tuple(rows) or (Support(target, (), _NONE, "Nothing was compiled for it or run on it."),)


def cpu_support(machine: str) -> Support:
    """The row of a CPU, by ``platform.machine()``.

    >>> cpu_support("aarch64").line(None)
    'cpu (aarch64): Nothing was run on it.'
    """
    if machine.lower() in ("x86_64", "amd64"):
        return TABLE[-1]
    return Support("cpu", (machine,), (), "Nothing was run on it.")


def markdown() -> str:
    """The table that a document shows between :data:`BEGIN` and :data:`END`."""
    head = ("target", "device", *(f"Triton {version}" for version in TRITON_VERSIONS), "evidence")
    lines = [head, ["---"] * len(head)]
    for row in TABLE:
        cells = [proof.value for proof in row.proofs] or ["not used"] * len(TRITON_VERSIONS)
        lines.append((f"`{row.target}`", ", ".join(row.devices), *cells, row.evidence))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)

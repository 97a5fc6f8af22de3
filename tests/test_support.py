"""The table of supported GPUs: its facts, its look-ups, and the document that shows it."""

from __future__ import annotations

from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from sparsemla_lab import doctor, support
from sparsemla_lab.support import Proof, gpu_support

ROOT = Path(__file__).resolve().parent.parent


def test_every_gpu_has_a_proof_for_each_triton():
    for row in support.TABLE[:-1]:
        assert len(row.proofs) == len(support.TRITON_VERSIONS)
    assert support.TABLE[-1].target == "cpu"


def test_triton_versions_match_the_requirement():
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (line,) = (line for line in pyproject.splitlines() if line.strip().startswith('"triton'))
    accepted = SpecifierSet(line.split('"')[1].split(";")[0].removeprefix("triton"))
    minors = [f"3.{minor}" for minor in range(20) if f"3.{minor}.1" in accepted]
    assert minors == list(support.TRITON_VERSIONS)


def test_targets_match_the_compile_check():
    compile = pytest.importorskip("sparsemla_lab.testing.compile")
    targets = {row.target for row in support.TABLE} - {"cpu"}
    assert targets == {target.name for target in compile.TARGETS}


@pytest.mark.parametrize(
    ("target", "device", "triton", "proof"),
    [
        ("sm_90", "NVIDIA H200", "3.6.0", Proof.RUN),
        ("sm_90", "NVIDIA H200", "3.9.1", Proof.RUN),
        ("sm_90", "NVIDIA H200", "3.10.0", Proof.UNTESTED),
        ("sm_90", "NVIDIA H100 80GB HBM3", "3.6.0", Proof.RUN),
        ("sm_90", "NVIDIA H100 80GB HBM3", "3.7.1", Proof.COMPILED),
        ("sm_90", "NVIDIA GH200 480GB", "3.6.0", Proof.UNTESTED),
        ("sm_80", "NVIDIA A100-SXM4-80GB", "3.6.0", Proof.RUN_ON_H200),
        ("sm_80", "NVIDIA A30", "3.6.0", Proof.RUN_ON_H200),
        ("sm_80", "NVIDIA A30", "3.7.1", Proof.COMPILED),
        ("sm_89", "NVIDIA GeForce RTX 4090", "3.6.0", Proof.RUN_ON_H200),
        ("gfx942", "AMD Instinct MI300X", "3.6.0", Proof.COMPILED),
        ("sm_86", "NVIDIA A10", "3.6.0", Proof.UNTESTED),
    ],
)
def test_a_gpu_is_looked_up_by_target_and_name(target, device, triton, proof):
    (row,) = gpu_support(target, device)
    assert row.target == target
    assert row.on(triton) == proof
    assert row.line(triton).startswith(f"{target}")
    assert f"Triton {triton}: {proof.value}. " in row.line(triton)


def test_without_triton_every_version_is_named():
    (row,) = gpu_support("sm_80")
    assert "code run on an H200 on 3.6, compiled on 3.7" in row.line(None)


def test_doctor_shows_the_proofs_for_this_cpu(monkeypatch):
    monkeypatch.setattr(doctor.platform, "machine", lambda: "x86_64")
    assert doctor.proofs(None) == ["cpu (x86-64): The tests pass on Python 3.11, 3.12 and 3.13."]
    monkeypatch.setattr(doctor.platform, "machine", lambda: "aarch64")
    assert doctor.proofs(None) == ["cpu (aarch64): Nothing was run on it."]


def test_the_document_shows_the_table():
    page = (ROOT / "docs" / "gpus.md").read_text(encoding="utf-8")
    shown = page.partition(support.BEGIN)[2].partition(support.END)[0]
    assert shown.strip() == support.markdown()

"""Tests find every mutant of the portable kernels.

mutants.py runs those of the other tiers, and test_vllm_mutants.py those of layers in vLLM.
"""

import ast

import pytest

import mutants


@pytest.mark.parametrize(
    "mutant",
    [
        *mutants.CPU_MUTANTS,
        *mutants.GPU_MUTANTS,
        *mutants.AMPERE_MUTANTS,
        *mutants.VLLM_MUTANTS,
    ],
    ids=lambda m: f"{m.file}: {m.name}",
)
def test_mutants_match_the_text(mutant):
    ast.parse(mutants.text_of(mutant))
    assert mutant.old != mutant.new
    assert mutant.check


def one_quick_mutant_per_file(all_mutants):
    """The others are slow, and take turns."""
    quick = {mutant.file: mutant for mutant in reversed(all_mutants)}.values()
    for number, mutant in enumerate(all_mutants):
        marks = () if mutant in quick else (pytest.mark.slow, pytest.mark.turns(number, 6))
        yield pytest.param(mutant, marks=marks, id=f"{mutant.file}: {mutant.name}")


@pytest.mark.parametrize("mutant", list(one_quick_mutant_per_file(mutants.CPU_MUTANTS)))
def test_mutants_are_found(mutant):
    outcome = mutants.run(mutant, timeout=300)
    assert outcome.verdict == "found", outcome.output


def test_a_copy_without_a_mutant_passes():
    # The other checks are tests of this suite, which must pass as well.
    assert mutants.right_passes(mutants.CPU_MUTANTS[:1], jobs=1, timeout=300) == []

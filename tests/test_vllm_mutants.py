"""Tests find every mutant of the layers in vLLM."""

import pytest
import torch

from vllm_here import require_vllm

require_vllm()

import mutants
from turns import in_turns

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the layers are built for the CPU"),
]


@pytest.mark.parametrize(
    "mutant", in_turns(mutants.VLLM_MUTANTS, 14), ids=lambda m: f"{m.file}: {m.name}"
)
def test_mutants_are_found(mutant):
    outcome = mutants.run(mutant, timeout=300)
    assert outcome.verdict == "found", outcome.output

"""The examples of the backends run; tests/test_batching.py tests examples/batching.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def test_transformers_generate(capsys, device):
    pytest.importorskip("transformers")
    import transformers_generate

    assert transformers_generate.main(device) == 0
    theirs, *ours = capsys.readouterr().out.splitlines()
    assert theirs.startswith("transformers' attention: [")
    assert ours == [
        "sparsemla, bf16_576v512: the same tokens, 2816 bytes of cache a token",
        "sparsemla, fp8_ds_mla: the same tokens, 1576 bytes of cache a token",
    ]


def test_transformers_generate_tells_of_other_tokens(capsys, monkeypatch):
    pytest.importorskip("transformers")
    import transformers_generate

    right = transformers_generate.generate
    changes = iter([0, 0, 1])
    monkeypatch.setattr(
        transformers_generate,
        "generate",
        lambda model, prompt: [next(changes), *right(model, prompt)],
    )
    assert transformers_generate.main() == 1
    assert "fp8_ds_mla: OTHER tokens" in capsys.readouterr().out


def test_the_example_for_vllm_says_what_it_takes():
    """The engine itself needs a GPU and vLLM."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "vllm_engine.py", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "--serve" in done.stdout

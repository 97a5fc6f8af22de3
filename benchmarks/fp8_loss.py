"""What FP8 MMAs do to the loss of a trained model: ``benchmarks/fp8-loss.json``.

The demo's model reads held-out text three times on the CPU: over bfloat16 rows, over the same with
FP8 MMAs, and over the 656-byte cache with bfloat16 ones. It has 8 heads, for which no kernel has
FP8 MMAs, so they are computed in torch with the kernel's roundings. Run it in a
checkout: ``python benchmarks/fp8_loss.py``. The texts are sources of the Python that runs it.
"""

from __future__ import annotations

import json
import platform
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from sparsemla import BF16_576, FP8_DS_MLA, CacheFormat, PagedCache
from sparsemla.backends.transformers import enable
from sparsemla.ops import branch
from sparsemla_lab.corpus import as_bytes, held_out_text, windows
from sparsemla_lab.demo import PIECES, shipped_model
from sparsemla_lab.generate import load_checkpoint
from sparsemla_lab.testing.fp8_mma import multiplied

MODEL = shipped_model()
FILE = Path(__file__).parent / "fp8-loss.json"
TEXTS = 3
LENGTH = 4096
CHUNK = 256
"""Tokens whose selected rows are in memory at once."""

exact = branch.sparse_prefill


class Rounded:
    """A ``sparse_prefill`` with FP8 MMAs."""

    def __init__(self) -> None:
        self.errors: list[float] = []

    def __call__(
        self, q: Tensor, kv: PagedCache, topk_indices: Tensor, **options: object
    ) -> tuple[Tensor, Tensor]:
        right = exact(q, kv, topk_indices, **options)
        rows = kv.data.flatten(0, 1)
        chunks = [
            multiplied(options | {"q": some, "kv": rows, "topk_indices": slots}, largest=16.0)
            for some, slots in zip(q.split(CHUNK), topk_indices.split(CHUNK), strict=True)
        ]
        out, lse = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        difference = out.float() - right[0].float()
        self.errors.append((difference.norm() / right[0].float().norm()).item())
        return out, lse


def losses(model: torch.nn.Module, texts: Tensor, cache_format: CacheFormat) -> list[float]:
    """Nats a byte of each text."""
    with torch.no_grad(), enable(model, cache_format=cache_format):
        return [
            functional.cross_entropy(model(text[None, :-1]).logits[0].float(), text[1:]).item()
            for text in texts
        ]


def main() -> None:
    """Read the texts and write :data:`FILE`."""
    checkpoint = load_checkpoint(MODEL, cache_format="bf16", dtype="float32")
    checkpoint.attention.disable()
    texts = windows(as_bytes(held_out_text()), PIECES, LENGTH + 1, None)[:TEXTS].long()
    rounded = Rounded()
    found = {"bfloat16": losses(checkpoint.model, texts, BF16_576)}
    with mock.patch.object(branch, "sparse_prefill", rounded):
        found["FP8 MMA"] = losses(checkpoint.model, texts, BF16_576)
    found["656-byte cache"] = losses(checkpoint.model, texts, FP8_DS_MLA)
    report = {
        "python": platform.python_version(),
        "bytes": LENGTH,
        "nats_per_byte": found,
        "error_of_out": sum(rounded.errors) / len(rounded.errors),
    }
    FILE.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

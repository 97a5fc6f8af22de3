"""What FP8 MMAs do to the loss of a trained model: ``benchmarks/fp8-loss.json``.

The demo's model reads held-out text on the CPU: over bfloat16 rows and over the 656-byte cache, its
scales powers of two, as vLLM writes them, or exact, as SGLang does. Each is read with bfloat16 MMAs
and with FP8 MMAs, before which rows of a cache are converted to bfloat16. The model has 8 heads,
for which no kernel has FP8 MMAs, so they are computed in torch with the kernel's roundings. Run it
in a checkout: ``python benchmarks/fp8_loss.py``. The texts are sources of the Python that runs it.
"""

from __future__ import annotations

import functools
import json
import platform
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from sparsemla import BF16_576, FP8_DS_MLA, CacheFormat, PagedCache
from sparsemla.backends.transformers import enable, latent
from sparsemla.formats import ScaleMode
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
CACHES: dict[str, tuple[CacheFormat, ScaleMode]] = {
    "bfloat16": (BF16_576, "pow2"),
    "656-byte cache": (FP8_DS_MLA, "pow2"),
    "656-byte cache, exact scales": (FP8_DS_MLA, "exact"),
}

exact = branch.sparse_prefill


class Rounded:
    """A ``sparse_prefill`` with FP8 MMAs."""

    def __init__(self) -> None:
        self.errors: list[float] = []

    def __call__(
        self, q: Tensor, kv: PagedCache, topk_indices: Tensor, **options: object
    ) -> tuple[Tensor, Tensor]:
        right = exact(q, kv, topk_indices, **options)
        rows = kv.read(torch.arange(kv.num_slots)).bfloat16()
        chunks = [
            multiplied(options | {"q": some, "kv": rows, "topk_indices": slots}, largest=16.0)
            for some, slots in zip(q.split(CHUNK), topk_indices.split(CHUNK), strict=True)
        ]
        out, lse = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        difference = out.float() - right[0].float()
        self.errors.append((difference.norm() / right[0].float().norm()).item())
        return out, lse


def losses(
    model: torch.nn.Module, texts: Tensor, cache_format: CacheFormat, scale_mode: ScaleMode
) -> list[float]:
    """Nats a byte of each text."""
    write = functools.partial(branch.prefill_branch, scale_mode=scale_mode)
    with (
        torch.no_grad(),
        mock.patch.object(latent, "prefill_branch", write),
        enable(model, cache_format=cache_format),
    ):
        return [
            functional.cross_entropy(model(text[None, :-1]).logits[0].float(), text[1:]).item()
            for text in texts
        ]


def main() -> None:
    """Read the texts and write :data:`FILE`."""
    checkpoint = load_checkpoint(MODEL, cache_format="bf16", dtype="float32")
    checkpoint.attention.disable()
    texts = windows(as_bytes(held_out_text()), PIECES, LENGTH + 1, None)[:TEXTS].long()
    found, errors = {}, {}
    for name, cache in CACHES.items():
        found[name] = losses(checkpoint.model, texts, *cache)
        rounded = Rounded()
        with mock.patch.object(branch, "sparse_prefill", rounded):
            found[f"{name}, FP8 MMA"] = losses(checkpoint.model, texts, *cache)
        errors[f"{name}, FP8 MMA"] = sum(rounded.errors) / len(rounded.errors)
    report = {
        "python": platform.python_version(),
        "bytes": LENGTH,
        "nats_per_byte": found,
        "error_of_out": errors,
    }
    FILE.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""What rows of fewer bytes cost: loss and recall of the trained model in ``sparsemla_lab``.

The model of ``sparsemla demo`` reads texts that it has never seen, with selected rows: in bfloat16,
in 656 bytes, and with the latent in NVFP4 and RoPE in e4m3, which take 368. No format of this
package has the last ones. They are rounded as such a cache would give them back, and kept in a
bfloat16 cache. Losses are compared with those of bfloat16 rows, text by text.

    python benchmarks/row_loss.py --json benchmarks/row-loss.json     # 15 minutes of a core
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional

from sparsemla import BF16_576, FP4_288, FP8_DS_MLA, INDEX_FP8, CacheFormat, e4m3_format
from sparsemla.backends.transformers import enable
from sparsemla_lab.corpus import ANSWER, Bytes, as_bytes, held_out_text, needles, windows
from sparsemla_lab.demo import LETTERS, shipped_model
from sparsemla_lab.generate import load_checkpoint

LATENT, ROPE = 512, 64
ROWS = {"bfloat16": 1152, "FP8 latent, bfloat16 RoPE": 656, "FP4 latent, e4m3 RoPE": 368}
"""Bytes a token."""

quantize = CacheFormat.quantize


def rounded(format: CacheFormat, rows: Tensor, scale_mode: str = "pow2") -> Tensor:
    """Rows as a cache of the format gives them back."""
    return format.dequantize(quantize(format, rows, scale_mode=scale_mode))


def quantize_to_fp4(format: CacheFormat, rows: Tensor, *, scale_mode: str = "pow2") -> Any:  # noqa: ANN401
    """:meth:`CacheFormat.quantize` with rows of 368 bytes in the place of bfloat16 ones.

    Of the latent 16 dims share an e4m3 scale, and all RoPE dims a float32 one.
    """
    if format == BF16_576:
        latent, rope = rows.split([LATENT, ROPE], dim=-1)
        latent = rounded(FP4_288, latent)
        rope = rounded(e4m3_format(ROPE, ROPE, ROPE), rope, "exact")
        rows = torch.cat([latent, rope], dim=-1)
    return quantize(format, rows, scale_mode=scale_mode)


@torch.no_grad()
def read(
    model: Any,  # noqa: ANN401 - of transformers
    texts: Tensor,
    items: list[Bytes],
    format: CacheFormat,
) -> tuple[Tensor, Tensor]:
    """Nats of each byte of the texts, and which values of the items are recalled."""
    losses, found = [], []
    with enable(model, cache_format=format, index_format=INDEX_FP8):
        for text in texts:
            logits = model(text[None, :-1]).logits[0].float()
            losses.append(functional.cross_entropy(logits, text[1:], reduction="none"))
        for batch in items:
            logits = model(batch.tokens).logits[0]
            right = (logits.argmax(-1) == batch.labels[0])[batch.kinds[0] == ANSWER]
            found.append(right.view(-1, LETTERS).all(1))
    return torch.stack(losses), torch.cat(found).float()


def measure(num_texts: int, length: int, *, pairs: int = 48) -> list[dict[str, Any]]:
    """A row for each kind of rows.

    Args:
        num_texts: pieces of sources, and as many with items to recall.
        length: bytes of a text.
        pairs: items of a text.
    """
    checkpoint = load_checkpoint(shipped_model(), cache_format="bf16", dtype="float32")
    checkpoint.attention.disable()
    text = as_bytes(held_out_text())
    texts = windows(text, num_texts, length + 1, None).long()
    items = []
    for seed in range(num_texts):
        draw = torch.Generator().manual_seed(1000 + seed)
        items.append(needles(windows(text, 1, length + 1, draw), pairs, LETTERS, draw))
    rows: list[dict[str, Any]] = []
    base = None
    for name, size in ROWS.items():
        change = quantize_to_fp4 if "FP4" in name else quantize
        with mock.patch.object(CacheFormat, "quantize", change):
            format = FP8_DS_MLA if "FP8" in name else BF16_576
            losses, found = read(checkpoint.model, texts, items, format)
        base = losses if base is None else base
        more = (losses - base).mean(dim=1)
        rows.append(
            {
                "rows": name,
                "bytes": size,
                "loss": losses.mean().item(),
                "more": more.mean().item(),
                "standard_error": (more.std() / num_texts**0.5).item(),
                "change_of_a_byte": (losses - base).abs().mean().item(),
                "recall": found.mean().item(),
                "values": len(found),
            }
        )
        print(rows[-1], flush=True)  # noqa: T201 - what the script is for
    return rows


def main() -> None:
    """Measure, and write a file."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--texts", type=int, default=12, metavar="N", help="texts of each kind")
    parser.add_argument("--length", type=int, default=4096, metavar="N", help="bytes of a text")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    arguments = parser.parse_args()
    rows = measure(arguments.texts, arguments.length)
    if arguments.json:
        sizes = {"texts": arguments.texts, "length": arguments.length}
        arguments.json.write_text(json.dumps(sizes | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

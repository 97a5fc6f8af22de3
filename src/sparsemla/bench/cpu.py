"""Sparse attention on the CPU beside the same attention done by masking a dense one.

All sides compute the same: 8 heads over a bfloat16 latent cache, each query token with its own
random selection of 512 keys. The dense sides score every key and mask: once as products and a
softmax written out, as models do it, and once through ``scaled_dot_product_attention``, whose
bfloat16 kernel never writes the scores. Their masks exist before the clock starts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import BF16_576
from sparsemla.ops import sparse_decode, sparse_prefill

NUM_HEADS = 8
TOPK = 512
SOFTMAX_SCALE = 192**-0.5
TOLERANCE = 2e-2
"""Largest difference between two sides, which round differently; values are about 0.05."""


@dataclass(frozen=True)
class Comparison:
    """One row of the table; times are medians in milliseconds."""

    case: str
    sparse_ms: float
    masked_ms: float
    masked_sdpa_ms: float

    @property
    def ratio(self) -> float:
        """How many times faster than masked products."""
        return self.masked_ms / self.sparse_ms

    @property
    def ratio_sdpa(self) -> float:
        """How many times faster than masked scaled_dot_product_attention."""
        return self.masked_sdpa_ms / self.sparse_ms


def compare() -> list[Comparison]:
    """Check and time a prefill (1024 tokens, context 8192) and a decode (context 32768).

    Raises:
        RuntimeError: two sides disagree.
    """
    return [
        _compare("prefill of 1024 tokens, context 8192", 1024, 8192, repeats=5),
        _compare("decode of 1 token, context 32768", 1, 32768, repeats=30),
    ]


def _compare(case: str, num_tokens: int, context: int, repeats: int) -> Comparison:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(num_tokens, NUM_HEADS, 576, generator=generator).bfloat16()
    rows = (torch.randn(context, 576, generator=generator) / 10).bfloat16()
    scores = torch.rand(num_tokens, context, generator=generator)
    chosen = scores.topk(TOPK).indices.sort().values.int()
    cache = PagedCache(rows.view(-1, 64, 576), BF16_576)
    keys = rows.expand(1, NUM_HEADS, -1, -1)
    mask = torch.full((num_tokens, context), -torch.inf, dtype=torch.bfloat16)
    mask.scatter_(1, chosen.long(), 0.0)

    def sparse() -> Tensor:
        if num_tokens == 1:
            slots = chosen[None]
            return sparse_decode(q[None], cache, slots, softmax_scale=SOFTMAX_SCALE)[0][0]
        return sparse_prefill(q, cache, chosen, softmax_scale=SOFTMAX_SCALE)[0]

    def masked() -> Tensor:
        logits = (q.flatten(0, 1) @ rows.T).view(num_tokens, NUM_HEADS, context)
        probs = (logits.float() * SOFTMAX_SCALE + mask[:, None]).softmax(-1).bfloat16()
        return (probs.flatten(0, 1) @ rows[:, :512]).view(num_tokens, NUM_HEADS, 512)

    def masked_sdpa() -> Tensor:
        out = torch.nn.functional.scaled_dot_product_attention(
            q.transpose(0, 1)[None], keys, keys, attn_mask=mask, scale=SOFTMAX_SCALE
        )
        return out[0].transpose(0, 1)[..., :512]

    for dense in (masked, masked_sdpa):
        difference = (sparse().float() - dense().float()).abs().max().item()
        if not difference <= TOLERANCE:
            raise RuntimeError(f"{case}: {dense.__name__} differs by {difference}")
    return Comparison(case, *_interleaved([sparse, masked, masked_sdpa], repeats))


def _interleaved(sides: list[Callable[[], Tensor]], repeats: int) -> list[float]:
    """Median milliseconds of each side, run in turn."""
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(repeats):
        for side, record in zip(sides, times, strict=True):
            start = time.perf_counter()
            side()
            record.append(1e3 * (time.perf_counter() - start))
    return [median(record) for record in times]

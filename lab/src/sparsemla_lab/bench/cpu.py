"""Sparse attention on the CPU beside torch's fastest dense attention under a mask.

Both compute the same: 8 heads over a bfloat16 latent cache, each query token with its own random
selection of 512 keys. Dense attention scores every key and masks. It comes in four variants: as
GEMMs with a softmax between them and as ``scaled_dot_product_attention``, each in bfloat16 and in
float32. The fastest variant depends on the CPU: without bfloat16 instructions, float32 wins. Masks
and float32 copies exist before the clock starts.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import BF16_576
from sparsemla.ops import sparse_decode, sparse_prefill

NUM_HEADS = 8
TOPK = 512
VALUE_DIM = 512
SOFTMAX_SCALE = 192**-0.5

CASES = (
    ("decode of 1 token, context 32768", 1, 32768),
    ("prefill of 1024 tokens, context 8192", 1024, 8192),
)
"""Name, query tokens and context."""

TOLERANCE = 0.02
"""Largest error of a token's head, relative to its norm. Rounding on both sides causes 0.004; a
single missing key of 512 causes 0.04."""
PROBED_TOKENS = 64
"""Query tokens that every dense variant computes; on all tokens the slowest takes a minute."""
NEARLY = 1.5
"""Variants within this multiple of the fastest one's time are measured on all tokens."""
SECONDS = 20.0
"""Time to repeat a case, after :data:`MIN_REPEATS`."""
MIN_REPEATS, MAX_REPEATS = 3, 30

Side = Callable[[], Tensor]


@dataclass(frozen=True)
class Comparison:
    """One row of the table; times are medians in milliseconds."""

    case: str
    sparse_ms: float
    dense_ms: float
    dense: str

    @property
    def ratio(self) -> float:
        """How many times faster than dense attention."""
        return self.dense_ms / self.sparse_ms


def compare() -> Iterator[Comparison]:
    """Check and time each of :data:`CASES`.

    Raises:
        RuntimeError: dense attention gives another result.
    """
    for case, num_tokens, context in CASES:
        yield _compare(case, num_tokens, context)


def _compare(case: str, num_tokens: int, context: int) -> Comparison:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(num_tokens, NUM_HEADS, 576, generator=generator).bfloat16()
    rows = (torch.randn(context, 576, generator=generator) / 10).bfloat16()
    scores = torch.rand(num_tokens, context, generator=generator)
    chosen = scores.topk(TOPK).indices.sort().values.int()

    few = slice(PROBED_TOKENS)
    probed = _dense_sides(q[few], rows, chosen[few])
    expected = _sparse_side(q[few], rows, chosen[few])()
    seconds = {name: _checked(case, name, side, expected) for name, side in probed.items()}
    finalists = [name for name, took in seconds.items() if took <= NEARLY * min(seconds.values())]

    sparse, sides = _sparse_side(q, rows, chosen), _dense_sides(q, rows, chosen)
    expected = sparse()
    for name in finalists:
        _check(case, name, sides[name](), expected)
    sparse_ms, *dense_ms = _interleaved([sparse, *(sides[name] for name in finalists)])
    fastest = min(dense_ms)
    return Comparison(case, sparse_ms, fastest, finalists[dense_ms.index(fastest)])


def _sparse_side(q: Tensor, rows: Tensor, chosen: Tensor) -> Side:
    cache = PagedCache(rows.view(-1, 64, 576), BF16_576)

    def decode() -> Tensor:
        return sparse_decode(q[None], cache, chosen[None], softmax_scale=SOFTMAX_SCALE)[0][0]

    def prefill() -> Tensor:
        return sparse_prefill(q, cache, chosen, softmax_scale=SOFTMAX_SCALE)[0]

    return decode if len(q) == 1 else prefill


def _dense_sides(q: Tensor, rows: Tensor, chosen: Tensor) -> dict[str, Side]:
    """The variants of dense attention under the mask that selects ``chosen``."""
    mask = torch.full((len(q), len(rows)), -torch.inf).scatter_(1, chosen.long(), 0.0)
    sides: dict[str, Side] = {}
    for name, dtype in (("bfloat16", torch.bfloat16), ("float32", torch.float32)):
        tensors = q.to(dtype), rows.to(dtype), mask.to(dtype)
        sides[f"GEMMs, {name}"] = functools.partial(_gemms, *tensors)
        sides[f"SDPA, {name}"] = functools.partial(_sdpa, *tensors)
    return sides


def _gemms(q: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    shape = *q.shape[:2], len(rows)
    logits = (q.flatten(0, 1) @ rows.T).view(shape).float()  # T, H, context
    probs = (logits * SOFTMAX_SCALE + mask[:, None]).softmax(-1).to(q.dtype)
    return (probs.flatten(0, 1) @ rows[:, :VALUE_DIM]).view(*q.shape[:2], VALUE_DIM)


def _sdpa(q: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    keys = rows.expand(1, NUM_HEADS, -1, -1)
    out = torch.nn.functional.scaled_dot_product_attention(
        q.transpose(0, 1)[None], keys, keys, attn_mask=mask, scale=SOFTMAX_SCALE
    )
    return out[0].transpose(0, 1)[..., :VALUE_DIM]


def _check(case: str, name: str, got: Tensor, expected: Tensor) -> None:
    error = (got.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    if not (worst := error.max().item()) <= TOLERANCE:
        raise RuntimeError(f"{case}: {name} differs by {worst:.1%} of a head's norm")


def _checked(case: str, name: str, side: Side, expected: Tensor) -> float:
    """Seconds of a side's second run, after a check of its first run."""
    _check(case, name, side(), expected)
    return _seconds(side)


def _seconds(side: Side) -> float:
    start = time.perf_counter()
    side()
    return time.perf_counter() - start


def _interleaved(sides: list[Side]) -> list[float]:
    """Median milliseconds of each side, run in turn."""
    start = time.perf_counter()
    turns: list[list[float]] = []
    while len(turns) < MIN_REPEATS or (
        len(turns) < MAX_REPEATS and time.perf_counter() - start < SECONDS
    ):
        turns.append([_seconds(side) for side in sides])
    return [1e3 * median(times) for times in zip(*turns, strict=True)]

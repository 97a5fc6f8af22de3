"""Tokens and requests that fit into the memory of GPUs, and the bytes that a decode step reads.

The documentation's calculator computes the same in a browser, from :func:`tables`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sparsemla.formats import (
    BF16_512,
    BF16_576,
    FP8_584,
    FP8_DS_MLA,
    INDEX_FP8,
    INDEX_MXFP4,
    CacheFormat,
    bf16_format,
    get_format,
)
from sparsemla.pooling import Pooling

GIB = 2**30
REWIND = 8
"""Tokens by which the transformers backend can wind a request of DeepSeek-V4 back."""

GPUS = {
    "A100 80 GB": (80, 2.0),
    "H100": (80, 3.35),
    "H200": (140, 4.8),
    "B200": (179, 8.0),
    "RTX PRO 6000": (96, 1.79),
    "MI300X": (192, 5.3),
}
"""GiB of memory, and TB/s as their makers give them."""

SHARES = {
    "tensor": "all rows (tensor parallel)",
    "data": "the rows of its own requests (data parallel)",
    "context": "a share of the rows of each request (context parallel)",
}
"""The rows that a GPU keeps."""


@dataclass(frozen=True)
class Rows:
    """Rows of one kind.

    Args:
        name: what they are.
        layers: number of layers that keep them.
        of: ``cache`` or ``index`` for rows of that format, or the bytes of a row.
        ratio: tokens of a row; 0 for rows that a request keeps whatever its length.
        kept: with ratio 0 the number of these rows.
        read: the most rows that a step reads for a token; None for all.
    """

    name: str
    layers: int
    of: str | int
    ratio: int = 1
    kept: int = 0
    read: int | None = None

    def bytes_per_row(self, sizes: dict[str, int]) -> int:
        """Bytes of a row in all layers."""
        return self.layers * (self.of if isinstance(self.of, int) else sizes[self.of])

    def rows_read(self, context: int) -> int:
        """Rows that a layer reads for a token after ``context`` tokens."""
        rows = context // self.ratio if self.ratio else self.kept
        return min(rows, context, rows if self.read is None else self.read)


@dataclass(frozen=True)
class Model:
    """A model.

    Args:
        weights_gib: an estimate: a byte for each parameter, half a byte for those of V4's experts.
        context: most tokens of a request.
        rows: the rows of its layers.
        cache: formats of latent rows, the usual one first.
        index: formats of index keys, the usual one first.
    """

    weights_gib: int
    context: int
    rows: tuple[Rows, ...]
    cache: tuple[CacheFormat, ...]
    index: tuple[CacheFormat, ...] = (INDEX_FP8, INDEX_MXFP4, bf16_format(128))


def _latent_model(weights_gib: int, context: int, layers: int, indexers: int) -> Model:
    rows = Rows("latent rows", layers, "cache", read=2048), Rows("index keys", indexers, "index")
    return Model(weights_gib, context, rows, (FP8_DS_MLA, BF16_576))


def _open_windows(name: str, layers: int, pooling: Pooling, dim: int, drafts: int) -> Rows:
    """The rows of windows that are not complete: values and gates in float32."""
    row = 2 * pooling.width(dim) * 4
    return Rows(name, layers, row, ratio=0, kept=pooling.window + drafts, read=0)


def _compressed_model(weights_gib: int, layers: int, csa: int, hca: int, topk: int) -> Model:
    four, many = Pooling(4, overlap=True), Pooling(128)
    rows = (
        Rows("raw rows", layers, "cache", ratio=0, kept=128 + REWIND, read=128),
        Rows("entries of 4 tokens", csa, "cache", ratio=4, read=topk),
        Rows("index keys", csa, "index", ratio=4),
        Rows("entries of 128 tokens", hca, "cache", ratio=128),
        _open_windows("open windows of 4 tokens", csa, four, 512, REWIND),
        _open_windows("open windows of index keys", csa, four, 128, REWIND),
        _open_windows("open windows of 128 tokens", hca, many, 512, REWIND),
    )
    return Model(weights_gib, 1 << 20, rows, (FP8_584, BF16_512))


MODELS = {
    "DeepSeek-V3.2": _latent_model(640, 163840, 61, 61),
    "GLM-5.2": _latent_model(710, 1 << 20, 78, 21),
    "DeepSeek-V4-Flash": _compressed_model(150, 43, 21, 20, 512),
    "DeepSeek-V4-Pro": _compressed_model(810, 61, 30, 31, 1024),
    "GLM-5.3-Flash": Model(
        300,
        1 << 20,
        (
            Rows("latent rows", 11, "cache", read=2048),
            Rows("index keys", 11, "index", ratio=16),
            _open_windows("open windows of index keys", 11, Pooling(16), 128, 1),
            Rows("states of linear attention", 34, 64 * 128 * 128 * 4, ratio=0, kept=1),
        ),
        (FP8_584, BF16_512),
    ),
}
"""Models by name. GLM-5.2's layers share selections; three of four of GLM-5.3-Flash are linear."""


@dataclass(frozen=True)
class Capacity:
    """What fits.

    Attributes:
        free_bytes: memory of a GPU for the cache.
        bytes_per_token: of all layers, for each token.
        bytes_per_request: of all layers, for a request of any length.
        tokens: most tokens of a single request.
        requests: requests of the given context that fit at a time.
        step_bytes: bytes that attention and the indexers read for one token of a request.
        gpu_step_bytes: bytes that a GPU reads in a decode step of all these requests.
    """

    free_bytes: int
    bytes_per_token: float
    bytes_per_request: int
    tokens: int
    requests: int
    step_bytes: int
    gpu_step_bytes: float


def capacity(
    model: str,
    *,
    cache_format: str,
    index_format: str,
    context: int,
    gpus: int,
    memory_gib: float,
    weights_gib: float,
    used_percent: int = 90,
    share: str = "tensor",
) -> Capacity:
    """The tokens and requests that fit.

    Args:
        model: a key of :data:`MODELS`.
        cache_format, index_format: names of formats of latent rows and index keys.
        context: tokens of each request.
        gpus: number of GPUs, each with an equal part of the weights.
        memory_gib: memory of a GPU.
        weights_gib: all weights.
        used_percent: the part of the memory for weights and caches.
        share: the rows that a GPU keeps, a key of :data:`SHARES`.

    >>> of = {"cache_format": "fp8_ds_mla", "index_format": "index_fp8", "context": 131072}
    >>> found = capacity("DeepSeek-V3.2", **of, gpus=8, memory_gib=140, weights_gib=640)
    >>> found.bytes_per_token, found.requests, found.tokens
    (48068.0, 7, 1027546)
    """
    rows = MODELS[model].rows
    sizes = {
        "cache": get_format(cache_format).bytes_per_token,
        "index": get_format(index_format).bytes_per_token,
    }
    free = max(math.floor((memory_gib * used_percent / 100 - weights_gib / gpus) * GIB), 0)
    per_token = sum(each.bytes_per_row(sizes) / each.ratio for each in rows if each.ratio)
    per_request = sum(each.bytes_per_row(sizes) * each.kept for each in rows if not each.ratio)
    step = sum(each.bytes_per_row(sizes) * each.rows_read(context) for each in rows)
    pool = free * (gpus if share == "context" else 1)
    requests = math.floor(pool / (context * per_token + per_request))
    return Capacity(
        free_bytes=free,
        bytes_per_token=per_token,
        bytes_per_request=per_request,
        tokens=max(math.floor((pool - per_request) / per_token), 0),
        requests=requests * (gpus if share == "data" else 1),
        step_bytes=step,
        gpu_step_bytes=requests * step / (gpus if share == "context" else 1),
    )


def tables() -> dict[str, Any]:
    """Models, formats and GPUs for the calculator of the documentation, as JSON takes them."""
    formats = {fmt.name: fmt for model in MODELS.values() for fmt in (*model.cache, *model.index)}
    return {
        "formats": {name: fmt.bytes_per_token for name, fmt in formats.items()},
        "gpus": GPUS,
        "shares": SHARES,
        "models": {
            name: {
                "weights_gib": model.weights_gib,
                "context": model.context,
                "cache": [fmt.name for fmt in model.cache],
                "index": [fmt.name for fmt in model.index],
                "rows": [vars(each) for each in model.rows],
            }
            for name, model in MODELS.items()
        },
    }

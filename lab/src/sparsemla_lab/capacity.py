"""Tokens and requests that fit into GPUs and host memory, and the bytes that a decode step reads.

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

    @property
    def on_host(self) -> bool:
        """Whether host memory may hold them: rows of single tokens, of which a step selects."""
        return self.ratio == 1 and self.read is not None

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
        bytes_per_token: of all layers, for each token, on GPUs.
        bytes_per_request: of all layers, for a request of any length.
        hot_bytes: of all layers, for a request's hot rows on each GPU that has a part of it.
        host_bytes_per_token: of all layers, for each token, in host memory.
        tokens: most tokens of a single request.
        requests: requests of the given context that fit at a time.
        step_bytes: bytes that attention and the indexers read for one token of a request.
        gpu_step_bytes: bytes that a GPU reads in a decode step of all these requests.
    """

    free_bytes: int
    bytes_per_token: float
    bytes_per_request: int
    hot_bytes: int
    host_bytes_per_token: int
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
    host_gib: float = 0,
    rows_per_seat: int = 4096,
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
        share: the rows that a GPU keeps, a key of :data:`SHARES`. A GPU's rows in host memory are
            its own: tensor parallel GPUs keep all rows once each there, too.
        host_gib: host memory for the latent rows of all GPUs; 0 to keep them on the GPUs.
        rows_per_seat: with host memory, latent rows of a request and layer on a GPU.

    Raises:
        ValueError: host memory for a model that does not select rows of single tokens.

    >>> of = {"cache_format": "fp8_ds_mla", "index_format": "index_fp8", "context": 131072}
    >>> found = capacity("DeepSeek-V3.2", **of, gpus=8, memory_gib=140, weights_gib=640)
    >>> found.bytes_per_token, found.requests, found.tokens
    (48068.0, 7, 1027546)
    >>> of |= {"share": "context", "host_gib": 1000}
    >>> found = capacity("DeepSeek-V3.2", **of, gpus=8, memory_gib=140, weights_gib=640)
    >>> found.bytes_per_token, found.host_bytes_per_token, found.requests
    (8052.0, 40016, 165)
    """
    rows = MODELS[model].rows
    sizes = {
        "cache": get_format(cache_format).bytes_per_token,
        "index": get_format(index_format).bytes_per_token,
    }
    hosted = [each for each in rows if each.on_host] if host_gib else []
    if host_gib and not hosted:
        raise ValueError(f"host_gib must be 0 for {model}, which selects no rows of single tokens")
    host_per_token = sum(each.bytes_per_row(sizes) for each in hosted)
    free = max(math.floor((memory_gib * used_percent / 100 - weights_gib / gpus) * GIB), 0)
    grown = [each for each in rows if each.ratio and each not in hosted]
    per_token = sum(each.bytes_per_row(sizes) / each.ratio for each in grown)
    per_request = sum(each.bytes_per_row(sizes) * each.kept for each in rows if not each.ratio)
    hot = (
        sum(each.layers for each in hosted) * rows_per_seat * get_format(cache_format).page_bytes(1)
    )
    if hosted:  # a key, a row and an order of each hot row, for each selection
        hot += 12 * rows_per_seat * sum(each.layers for each in grown)
    step = sum(each.bytes_per_row(sizes) * each.rows_read(context) for each in rows)
    sharing = gpus if share == "context" else 1
    pool = free * sharing
    # Any selection may lie on one GPU, so that each keeps all hot rows of its requests.
    fixed = per_request + hot * sharing
    requests = math.floor(pool / (context * per_token + fixed))
    tokens = math.floor((pool - fixed) / per_token)
    if hosted:
        host = math.floor(host_gib * GIB) / (gpus // sharing)  # of GPUs that share rows
        requests = min(requests, math.floor(host / (context * host_per_token)))
        tokens = min(tokens, math.floor(host / host_per_token))
    return Capacity(
        free_bytes=free,
        bytes_per_token=per_token,
        bytes_per_request=per_request,
        hot_bytes=hot,
        host_bytes_per_token=host_per_token,
        tokens=max(tokens, 0),
        requests=requests * (gpus if share == "data" else 1),
        step_bytes=step,
        gpu_step_bytes=requests * step / sharing,
    )


def tables() -> dict[str, Any]:
    """Models, formats and GPUs for the calculator of the documentation, as JSON takes them."""
    formats = {fmt.name: fmt for model in MODELS.values() for fmt in (*model.cache, *model.index)}
    return {
        "formats": {name: fmt.bytes_per_token for name, fmt in formats.items()},
        "hot_row_bytes": {name: fmt.page_bytes(1) for name, fmt in formats.items()},
        "gpus": GPUS,
        "shares": SHARES,
        "models": {
            name: {
                "weights_gib": model.weights_gib,
                "context": model.context,
                "cache": [fmt.name for fmt in model.cache],
                "index": [fmt.name for fmt in model.index],
                "rows": [vars(each) | {"on_host": each.on_host} for each in model.rows],
            }
            for name, model in MODELS.items()
        },
    }

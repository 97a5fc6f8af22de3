"""Formats, shapes and options that the tests and ``sparsemla verify`` go through.

Each is listed here once: tests combine them with each other, verify varies one at a time.
"""

from __future__ import annotations

from typing import Any

import torch

from sparsemla.formats import (
    BF16_512,
    BF16_576,
    FP4_288,
    FP8_528,
    FP8_584,
    FP8_DS_MLA,
    FP8_NOPE,
    INDEX_FP8,
    INDEX_MXFP4,
    CacheFormat,
    bf16_format,
    e4m3_format,
)

LATENT_FORMATS = (
    BF16_576,
    BF16_512,
    FP8_DS_MLA,
    FP8_NOPE,
    FP8_584,
    FP8_528,
    FP4_288,
    e4m3_format(),
    e4m3_format(576, 512, 0),
    e4m3_format(576, 512, 32),
    e4m3_format(576, 512, 576),
)

ODD_FORMATS = (bf16_format(320, 256), e4m3_format(160, 96, 48))
"""Latent formats of no model: dims that are no powers of two, and blocks that end within them."""

INDEX_FORMATS = (
    INDEX_FP8,
    bf16_format(128),
    INDEX_MXFP4,
    e4m3_format(128, 128, 128),
    e4m3_format(128, 128, 0),
)

ODD_INDEX_FORMATS = (bf16_format(40), e4m3_format(64, 64, 64), e4m3_format(96, 96, 0))
"""Index formats of no model."""

FLOATS = (torch.bfloat16, torch.float16, torch.float32)

HEAD_COUNTS = (1, 3, 8, 16, 32, 63, 64, 128)
"""Query heads of attention: one, powers of two, and counts that fill no tile."""

PAGE_SIZES = (1, 2, 61, 64)

CONVENTIONS: dict[str, dict[str, Any]] = {
    "DeepSeek-V3.2": {},
    "GLM-5": {"interleaved": True},
    "DeepSeek-V4": {"interleaved": True, "rope_first": False},
    "half-split behind": {"rope_first": False},
    "hadamard": {"hadamard": True},
}
"""RoPE options of indexers."""

DECODE_SIZES = (
    (512, 64, 2),
    (512, 64, 64),
    (512, 64, 69),
    (1024, 576, 2),
    (1024, 576, 61),
    (2046, 2048, 64),
    (300, 63, 1),
    (300, 65, 53),
    (100, 1, 256),
)
"""Keys of a request, top-k and page size of sparse decode."""

EXTRA_STREAMS: dict[str, tuple[CacheFormat, int, int, int]] = {
    "of the same format": (FP8_584, 300, 64, 64),
    "of pages of 2": (FP8_584, 50, 16, 2),
    "in bfloat16": (BF16_512, 100, 33, 7),
}
"""Format, keys of a request, top-k and page size of the second cache of sparse decode."""

PREFILL_SIZES = (
    (128, 128),
    (256, 256),
    (592, 128),
    (1840, 256),
    (1592, 384),
    (1521, 512),
    (95, 128),
    (153, 256),
    (114, 384),
)
"""Rows of the cache and top-k of sparse prefill."""

DENSE_PREFILL_DIMS = ((192, 128), (256, 256), (64, 80), (576, 512))
"""Dims of keys and of values of dense prefill."""

PROJECTION_SHAPES = {
    "W_UK of DeepSeek-V3": (512, 128),
    "W_UV of DeepSeek-V3": (128, 512),
    "W_UK of GLM-5": (512, 192),
    "W_UV of GLM-5": (256, 512),
    "uneven": (100, 72),
}
"""Rows and columns of a head's weight."""

SCALE_BLOCKS = {"bf16": None, "128x128": (128, 128), "128x64": (128, 64), "64x128": (64, 128)}
"""Rows and columns that share a scale; bfloat16 weights have none."""

"""A paged cache as arguments of the attention kernels.

A key is cut in two tiles of power-of-two width: its *value* dims, which are loaded once and serve
both MMAs, and the *rest*, which only the scores read.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import CacheFormat
from sparsemla.kernels.common.integers import next_power_of_2
from sparsemla.kernels.common.paged import page_and_row


class Rows(NamedTuple):
    """A cache as kernel arguments: its stored parts. e4m3 and e8m0 travel as bytes."""

    fp8: Tensor | None
    scales: Tensor | None
    bf16: Tensor | None
    num_slots: int


class Layout(NamedTuple):
    """What a kernel is compiled for: a format's numbers, tile widths, page size and strides.

    Strides are in elements. ``linear``: pages follow each other as rows do, so a slot is a row.
    """

    head_dim: int
    value_dim: int
    value_block: int
    rest_block: int
    fp8_dim: int
    scale_block: int
    page_size: int
    linear: bool
    fp8_strides: tuple[int, int]
    scales_strides: tuple[int, int]
    bf16_strides: tuple[int, int]


def cache_arguments(cache: PagedCache) -> tuple[Rows, Layout]:
    """A cache as what kernels take and what they are compiled for."""
    fp8, scales, bf16 = cache.stored()
    strides = page_and_row(fp8), page_and_row(scales), page_and_row(bf16)
    return Rows(fp8, scales, bf16, cache.num_slots), _layout(
        cache.format, cache.page_size, *strides
    )


@functools.cache
def _layout(fmt: CacheFormat, page_size: int, *strides: tuple[int, int]) -> Layout:
    rest = fmt.head_dim - fmt.value_dim
    return Layout(
        fmt.head_dim,
        fmt.value_dim,
        block_of(fmt.value_dim),
        block_of(rest) if rest else 0,
        fmt.fp8_dim,
        fmt.scale_block,
        page_size,
        all(page == page_size * row for page, row in strides),
        *strides,
    )


def block_of(dim: int) -> int:
    """Width of the tile that holds ``dim`` dims: a power of two that a matrix product takes."""
    return max(next_power_of_2(dim), 16)

"""A paged cache as arguments of the GPU kernels.

A key is cut in two tiles of power-of-two width: its *value* dims, which attention loads once for
both MMAs, and the *rest*, which only the scores read.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import CacheFormat, bf16_format
from sparsemla.kernels.common.integers import next_power_of_2


class Rows(NamedTuple):
    """The stored parts of a cache; codes and scales of one byte are passed as uint8.

    ``bf16`` has the part that is not quantised, which for training may be float16 or float32.
    """

    fp8: Tensor | None
    scales: Tensor | None
    bf16: Tensor | None
    num_slots: int


class Layout(NamedTuple):
    """Constants that a kernel is compiled for: the format's, tile widths, page size and strides.

    Strides are in elements. They are constants so that the compiler can prove that rows of 656
    bytes, or 328 bfloat16, start at multiples of 16 bytes. ``linear``: pages follow each other as
    rows do, so a slot is a row.
    """

    head_dim: int
    value_dim: int
    value_block: int
    rest_block: int
    fp8_dim: int
    is_fp4: bool
    scale_block: int
    e4m3_scales: bool
    page_size: int
    linear: bool
    fp8_strides: tuple[int, int]
    scales_strides: tuple[int, int]
    bf16_strides: tuple[int, int]


def cache_arguments(cache: PagedCache) -> tuple[Rows, Layout]:
    """A cache as kernels take it."""
    fp8, scales, bf16 = cache.stored()
    strides = page_and_row(fp8), page_and_row(scales), page_and_row(bf16)
    return Rows(fp8, scales, bf16, cache.num_slots), _layout(
        cache.format, cache.page_size, *strides
    )


def row_arguments(rows: Tensor, value_dim: int) -> tuple[Rows, Layout]:
    """Rows ``[S, D]`` of any float dtype as kernels take a cache of page size 1."""
    fmt = bf16_format(rows.shape[1], value_dim)
    pages = rows.unsqueeze(1)
    return Rows(None, None, pages, len(rows)), _layout(fmt, 1, (0, 0), (0, 0), page_and_row(pages))


@functools.lru_cache(4096)
def _layout(fmt: CacheFormat, page_size: int, *strides: tuple[int, int]) -> Layout:
    rest = fmt.head_dim - fmt.value_dim
    return Layout(
        fmt.head_dim,
        fmt.value_dim,
        block_of(fmt.value_dim),
        block_of(rest) if rest else 0,
        fmt.fp8_dim,
        fmt.is_fp4,
        fmt.scale_block,
        fmt.scale_dtype == torch.float8_e4m3fn,
        page_size,
        all(page == page_size * row for page, row in strides),
        *strides,
    )


def block_of(dim: int) -> int:
    """Width of a tile for ``dim`` dims: a power of two that an MMA takes."""
    return max(next_power_of_2(dim), 16)


def page_and_row(view: Tensor | None) -> tuple[int, ...]:
    """Strides of pages and rows in a field of a cache, in elements; 0 if there is no field."""
    return (0, 0) if view is None else view.stride()[:2]

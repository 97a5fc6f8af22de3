"""Caches as other libraries hand them over."""

from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.checks import Checker
from sparsemla.formats import CacheFormat


def cache_of(check: Checker, name: str, pages: Tensor, format: CacheFormat) -> PagedCache:
    """``pages [num_pages, page_size, row_width]`` as a cache; errors name the argument.

    Raises:
        ValueError: strides that the format does not have, another device, or no page.
    """
    # With the scales behind a page's rows, the tensor says where pages start and no more.
    if format.scales_in == "page" and pages.shape[1] > 1 and pages.stride(1) != format.row_width:
        raise ValueError(
            f"{check.op}: {name} must have rows that stand {format.row_width} bytes apart for "
            f"format {format.name}, got {pages.stride(1)}"
        )
    try:
        cache = PagedCache(pages, format)
    except ValueError as error:
        raise ValueError(f"{check.op}: {name}: {error}") from None
    return check.cache(name, cache)

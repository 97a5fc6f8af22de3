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
    cache = PagedCache.unchecked(pages, format, None)  # the format need not have a name
    try:
        cache.check_layout()
    except ValueError as error:
        raise ValueError(f"{check.op}: {name}: {error}") from None
    return check.cache(name, cache)

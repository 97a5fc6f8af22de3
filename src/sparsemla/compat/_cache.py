"""Caches from the page tensors of other libraries."""

from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.checks import Checker
from sparsemla.formats import CacheFormat


def cache_of(
    check: Checker, name: str, pages: Tensor, format: CacheFormat, *, may_be_empty: bool = False
) -> PagedCache:
    """``pages [num_pages, page_size, row_width]`` as a cache; errors name the argument.

    Raises:
        ValueError: strides that do not match the format, another device, or no page, unless
            ``may_be_empty``.
    """
    cache = PagedCache.unchecked(pages, format, None)  # get_format need not know the format
    try:
        cache.check_layout()
    except ValueError as error:
        raise ValueError(f"{check.op}: {name}: {error}") from None
    return check.cache(name, cache, may_be_empty=may_be_empty)

"""How a Triton kernel sees a paged cache."""

from torch import Tensor

from sparsemla.cache import PagedCache


def page_and_row(view: Tensor | None) -> tuple[int, ...]:
    """Strides between pages and between rows of a part of a cache, in elements; 0 without it."""
    return (0, 0) if view is None else view.stride()[:2]


def paged_arguments(cache: PagedCache) -> dict[str, object]:
    """Keyword arguments for the pointers, strides and shape of ``cache``.

    e4m3 and e8m0 go as uint8. Strides are constants, because the compiler can then prove that
    rows of 656 bytes, or 328 bfloat16, start at multiples of 16 bytes.
    """
    fp8, scales, bf16 = cache.stored()
    arguments: dict[str, object] = {"fp8": fp8, "scales": scales, "bf16": bf16}
    arguments["PAGE_SIZE"] = cache.page_size
    arguments["FP8_PAGE"], arguments["FP8_ROW"] = page_and_row(fp8)
    arguments["SCALES_PAGE"], arguments["SCALES_ROW"] = page_and_row(scales)
    arguments["BF16_PAGE"], arguments["BF16_ROW"] = page_and_row(bf16)
    return arguments

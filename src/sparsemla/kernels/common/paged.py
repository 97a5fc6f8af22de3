"""How a Triton kernel sees a paged cache."""

import torch

from sparsemla.cache import PagedCache


def paged_arguments(cache: PagedCache) -> dict[str, object]:
    """Keyword arguments for the pointers, strides and shape of ``cache``.

    e4m3 and e8m0 go as uint8. Strides are constants, because the compiler can then prove that
    rows of 656 bytes, or 328 bfloat16, start at multiples of 16 bytes.
    """
    fields = cache.fields()
    arguments: dict[str, object] = {"PAGE_SIZE": cache.page_size}
    for name, view in zip(("fp8", "scales", "bf16"), fields, strict=True):
        if view is not None and view.dtype.itemsize == 1:
            view = view.view(torch.uint8)
        arguments[name] = view
        arguments[f"{name.upper()}_PAGE"] = 0 if view is None else view.stride(0)
        arguments[f"{name.upper()}_ROW"] = 0 if view is None else view.stride(1)
    return arguments

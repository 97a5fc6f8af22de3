"""Registration of the ops with torch.

Each op is one ``torch.ops.sparsemla`` operator that writes its results into arguments, so that its
fake implementation, which ``torch.compile`` needs, has nothing to do.
"""

from collections.abc import Callable
from typing import overload

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import get_format

_LIBRARY = torch.library.Library("sparsemla", "DEF")


def operator(*mutates: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make ``torch.ops.sparsemla.<name>`` of a function ``_<name>`` that writes ``mutates``."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        name = function.__name__.removeprefix("_")
        schema = torch.library.infer_schema(function, mutates_args=mutates)

        def on_device(lead: Tensor, *arguments: object) -> None:
            # Forward only: a graph of what torch's own functions do on the way would be in part.
            if torch.is_grad_enabled():
                with torch.no_grad():
                    return on_device(lead, *arguments)
            # Triton launches on the current GPU, which need not be the tensors'.
            if lead.is_cuda and lead.device.index != torch.cuda.current_device():
                with torch.cuda.device(lead.device):
                    return function(lead, *arguments)
            return function(lead, *arguments)

        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, on_device, "CompositeExplicitAutograd")
        torch.library.register_fake(f"sparsemla::{name}", _writes_nothing, lib=_LIBRARY)
        return getattr(torch.ops.sparsemla, name)

    return register


def _writes_nothing(*args: object, **kwargs: object) -> None:
    return None


def parts(cache: PagedCache | None) -> tuple[Tensor | None, Tensor | None, str | None]:
    """A cache as what an operator can take: data, scales, name of the format."""
    return (None, None, None) if cache is None else (cache.data, cache.scales, cache.format.name)


@overload
def join(data: Tensor, scales: Tensor | None, format: str) -> PagedCache: ...
@overload
def join(data: Tensor | None, scales: Tensor | None, format: str | None) -> PagedCache | None: ...
def join(data: Tensor | None, scales: Tensor | None, format: str | None) -> PagedCache | None:
    """The cache of :func:`parts`."""
    if data is None or format is None:
        return None
    return PagedCache.unchecked(data, get_format(format), scales)


def aligned(q: Tensor, *caches: PagedCache | None) -> bool:
    """Whether rows of queries and caches start at multiples of 16 bytes."""
    return (
        q.data_ptr() % 16 == 0
        and all(stride * q.itemsize % 16 == 0 for stride in q.stride()[:-1])
        and all(cache is None or cache.aligned for cache in caches)
    )

"""The exchange of candidates between ranks whose memory kernels can write."""

from typing import TYPE_CHECKING

from sparsemla.kernels.common.table import LazyModule
from sparsemla.kernels.exchange.arguments import ExchangeRows, Inboxes

if TYPE_CHECKING:
    from sparsemla.kernels.exchange import triton
else:
    triton = LazyModule(f"{__name__}.triton")

__all__ = ["ExchangeRows", "Inboxes", "triton"]

"""Sparse multi-head latent attention (MLA) for PyTorch.

Paged caches, batch plans, the lightning indexer with exact top-k, and attention for prefill and
decode. Importing the package neither touches a GPU nor compiles anything. The first use of a public
name imports torch, so that ``sparsemla --help`` does not wait for it.
"""

import importlib
import importlib.util
import logging
from typing import TYPE_CHECKING

__version__ = "0.1.0"

logging.getLogger(__name__).addHandler(logging.NullHandler())

if TYPE_CHECKING:
    from sparsemla._api import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        missing = AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if name.startswith("__") and name != "__all__":
            raise missing
        if importlib.util.find_spec(f"{__name__}.{name}") is not None:
            return importlib.import_module(f"{__name__}.{name}")
        api = importlib.import_module(f"{__name__}._api")
        globals().update({each: getattr(api, each) for each in ("__all__", *api.__all__)})
        if name not in globals():
            raise missing
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *importlib.import_module(f"{__name__}._api").__all__})

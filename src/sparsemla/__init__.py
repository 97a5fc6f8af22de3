"""Sparse multi-head latent attention for PyTorch: caches, indexer, top-k, attention, planner.

Importing the package touches no GPU and compiles nothing. torch is imported with the first public
name that is used, so that ``sparsemla --help`` need not wait for it.
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
        api = importlib.import_module("sparsemla._api")
        globals().update({each: getattr(api, each) for each in ("__all__", *api.__all__)})
        if name not in globals():
            raise missing
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *importlib.import_module("sparsemla._api").__all__})

"""Sparse multi-head latent attention for PyTorch: caches, indexer, top-k, attention, planner.

Importing the package touches no GPU and compiles nothing. torch is imported with the first public
name that is used, so that ``sparsemla --help`` need not wait for it.
"""

import importlib
from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from sparsemla._api import *  # noqa: F403
else:

    def __getattr__(name: str) -> object:
        if name == "__all__" or not name.startswith("__"):
            api = importlib.import_module("sparsemla._api")
            if hasattr(api, "__all__"):  # it has none while it is being imported
                public = {each: getattr(api, each) for each in api.__all__}
                globals().update(public, __all__=api.__all__)
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *importlib.import_module("sparsemla._api").__all__})

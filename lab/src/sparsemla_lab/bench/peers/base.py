"""The interface of a peer, and functions that find and load its files."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar, TypeVar

from sparsemla_lab.bench.timing import Results
from sparsemla_lab.bench.workloads import Inputs, Side, Workload


class Unavailable(Exception):
    """A peer is not installed; the message names the missing part."""


class Peer(ABC):
    """Another implementation on one machine."""

    name: ClassVar[str]
    portable: ClassVar[bool] = False
    """Whether Triton compiles its kernels for the GPU at hand, or the one that this acts as."""

    @abstractmethod
    def supports(self, workload: Workload) -> str | None:
        """Why it cannot take a workload, or None."""

    @abstractmethod
    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        """The peer's kernels for a supported workload, with inputs converted to its layout."""


PeerT = TypeVar("PeerT", bound=Peer)


def one(found: list[Peer], kind: type[PeerT]) -> PeerT:
    """The peer of a kind.

    Raises:
        Unavailable: it is not among those found.
    """
    for peer in found:
        if isinstance(peer, kind):
            return peer
    raise Unavailable(f"{kind.name} is not here")


def side(
    name: str, workload: Workload, inputs: Inputs, run: Callable[[], Results], note: str = ""
) -> Side:
    """A side with the workload's own check."""
    return Side(name, run, lambda got: workload.check(inputs, got), note=note)


def first(root: Path, pattern: str) -> Path | None:
    """The first file below ``root`` that matches, or None."""
    return next(iter(sorted(root.glob(pattern))), None)


def installed(name: str) -> types.ModuleType:
    """An installed package, imported.

    Raises:
        Unavailable: it is not installed.
    """
    if importlib.util.find_spec(name) is None:
        raise Unavailable(f"{name} is not installed")
    return importlib.import_module(name)


def module_from(path: Path) -> types.ModuleType:
    """A module made from one file.

    Raises:
        Unavailable: the file is not a module.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise Unavailable(f"{path} is not a module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module

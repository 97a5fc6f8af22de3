"""The interface of a peer, and functions that find and load its files."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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


@contextmanager
def stand_ins(package: str, contents: Mapping[str, Mapping[str, object]]) -> Iterator[None]:
    """Let files be imported as modules of a package that never runs.

    Args:
        package: name of the package; if it is imported, it comes back afterwards.
        contents: attributes of the modules that stand in, by name. A ``__path__`` lets the files of
            a folder be imported.
    """

    def is_part(name: str) -> bool:
        return name.split(".")[0] == package

    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if is_part(name)}
    parts = dict(contents)
    for name in contents:
        for parent in itertools.accumulate(name.split(".")[:-1], "{}.{}".format):
            parts.setdefault(parent, {})
    for name, attributes in sorted(parts.items()):  # packages before their parts
        module = types.ModuleType(name)
        module.__dict__.update(attributes)
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if is_part(name)]:
            del sys.modules[name]
        sys.modules.update(hidden)

"""The choice of a kernel for a call, and why each other kernel refuses it.

A family of kernels has a table for each of its ops in its package; :data:`OPS` is all of them. The
first kernel of the table that takes a call runs it. The last one is always the op's definition in
:mod:`sparsemla.reference`, which is slow and does not bound its memory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from sparsemla.kernels import (
    attention,
    backward,
    gather,
    indexer,
    lists,
    losses,
    pool,
    projection,
    quant,
    residency,
    topk,
)
from sparsemla.kernels.common.device import Device, describe, gpu_named, meant, simulated
from sparsemla.kernels.common.table import TIERS, C, Kernel, Op

LOGGER = logging.getLogger(__name__)

OPS: dict[str, Op[Any]] = {
    name: op
    for family in (
        quant,
        pool,
        gather,
        indexer,
        topk,
        lists,
        attention,
        backward,
        losses,
        projection,
        residency,
    )
    for name, op in family.OPS.items()
}


KERNELS = dict.fromkeys((*TIERS, *(kernel.name for op in OPS.values() for kernel in op.kernels)))
"""Names that :func:`only` takes."""


@dataclass(frozen=True)
class Choice:
    """The kernels of an op in order of preference, each with its refusal of a call or None."""

    op: str
    refusals: tuple[tuple[str, str | None], ...]

    @property
    def kernel(self) -> str:
        """The first kernel that does not refuse; the definition never does."""
        return next(name for name, reason in self.refusals if reason is None)

    def __str__(self) -> str:
        lines = [f"{self.op}: {self.kernel}"]
        for name, reason in self.refusals:
            state = "chosen" if name == self.kernel else reason or "would do, slower"
            lines.append(f"  {name}: {state}")
        return "\n".join(lines)


_ONLY: ContextVar[str | None] = ContextVar("only", default=None)
_EXPLAINED: ContextVar[list[Choice] | None] = ContextVar("explained", default=None)
_logged: set[tuple[str, str]] = set()


@contextmanager
def only(name: str) -> Iterator[None]:
    """Launch the kernels of one tier, or those of one name, and nothing where all of them refuse.

    Args:
        name: a tier such as ``sm90``, or a kernel such as ``sm90.fp8``.

    Raises:
        ValueError: there is no such tier, and no such kernel.
    """
    if name not in KERNELS:
        raise ValueError(f"name must be one of {', '.join(KERNELS)}; got {name!r}")
    token = _ONLY.set(name)
    try:
        yield
    finally:
        _ONLY.reset(token)


def choose(op: Op[C], call: C) -> Kernel[C]:
    """The kernel that runs a call.

    Raises:
        ValueError: within :func:`only`, none of its kernels takes the call.
    """
    device, only = describe(call[0].device), _ONLY.get()
    for kernel in op.kernels:
        if _refused(kernel, call, device, only) is None:
            return kernel
    refusals = "; ".join(
        f"{kernel.name} {kernel.refuse(call)}"
        for kernel in op.kernels
        if only in (kernel.tier, kernel.name)
    )
    raise ValueError(f"{op.name}: no kernel of {only} takes the call: {refusals or 'it has none'}")


def _refused(kernel: Kernel[C], call: C, device: Device, only: str | None) -> str | None:
    """Why a kernel does not take a call, or None. Within :func:`only`, the device is not asked."""
    if only is None:
        return TIERS[kernel.tier](device) or kernel.refuse(call)
    if only not in (kernel.tier, kernel.name):
        return f"is none of {only}"
    return kernel.refuse(call)


def launch(op: Op[C], call: C) -> None:
    """Run the kernel that takes a call; its first choice is logged at INFO."""
    kernel = choose(op, call)
    explained = _EXPLAINED.get()
    if explained is not None:
        explained.append(explain_call(op, call))
        return
    if (op.name, kernel.name) not in _logged:
        _logged.add((op.name, kernel.name))
        LOGGER.info("%s", explain_call(op, call))
    kernel.load()(call)


def explain_call(op: Op[C], call: C) -> Choice:
    """The kernel that runs a call, and why the others do not."""
    device, only = describe(call[0].device), _ONLY.get()
    refusals = [(kernel.name, _refused(kernel, call, device, only)) for kernel in op.kernels]
    return Choice(op.name, tuple(refusals))


@contextmanager
def explaining(gpu: str | None = None) -> Iterator[list[Choice]]:
    """Launch nothing, and list the kernels that would be launched; see :func:`sparsemla.explain`.

    Raises:
        ValueError: an unknown GPU.
    """
    device = None if gpu is None else gpu_named(gpu)
    choices: list[Choice] = []
    token = _EXPLAINED.set(choices)
    try:
        with simulated(device):
            yield choices
    finally:
        _EXPLAINED.reset(token)


def launches_on(device: torch.device) -> bool:
    """Whether ops on tensors without memory call launchers: to compile kernels, or to explain."""
    return meant(device) != device or _EXPLAINED.get() is not None


def load(op: str, name: str) -> Callable[..., None]:
    """A function that launches ``op`` with the fields of its record, :func:`only` by ``name``.

    Raises:
        ValueError: there is no such op.
    """
    if op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}; got {op!r}")
    table = OPS[op]

    def run(**arguments: object) -> None:
        with only(name):
            launch(table, table.arguments(**arguments))

    return run

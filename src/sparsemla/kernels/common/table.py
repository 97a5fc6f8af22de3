"""The table of an op: its arguments, its kernels in order of preference, and their refusals.

A family of kernels defines one :class:`Op` for each of its ops. Each kernel is a row; the first row
that does not refuse a call runs it, so a launcher never hands a call on to another kernel.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, TypeVar

from sparsemla.kernels.common.device import Device

C = TypeVar("C", bound=tuple[Any, ...])
"""The record of an op's arguments, a NamedTuple. Its first field is a tensor on the op's device."""

ALLOCATED: Any = None
"""The default of a record's outputs: an operator allocates them before a kernel sees the record."""

Launcher = Callable[[C], object]
Refusal = Callable[[C], str | None]


def _refuse_off_hopper(device: Device) -> str | None:
    if device.capability != (9, 0):
        return f"needs a Hopper GPU (sm_90), got {device}"
    return None


def _refuse_off_nvidia(device: Device) -> str | None:
    if device.capability is None or device.capability < (8, 0):
        return f"needs an NVIDIA GPU from sm_80 on, got {device}"
    return None


def _refuse_off_gpu(device: Device) -> str | None:
    if device.type != "cuda":
        return f"needs CUDA or ROCm tensors, got {device}"
    if device.capability is not None and device.capability < (8, 0):
        return f"needs a GPU from sm_80 on, got {device}"
    return None


def _refuse_off_cpu(device: Device) -> str | None:
    return None if device.type == "cpu" else f"needs CPU tensors, got {device}"


TIERS: dict[str, Callable[[Device], str | None]] = {
    "sm90": _refuse_off_hopper,  # Gluon, for Hopper GPUs
    "sm80": _refuse_off_nvidia,  # Gluon with Ampere's instructions, any NVIDIA GPU from sm_80
    "triton": _refuse_off_gpu,  # Triton, any GPU from sm_80 and gfx942
    "cpu": _refuse_off_cpu,  # torch on the CPU, chunked, bounded memory
    "reference": lambda device: None,  # the definition: float32 torch, any device, slow
}
"""The kinds of implementations, fastest first, and why each does not run on a device, or None."""


def no_refusal(call: Any) -> str | None:
    """No refusal: for kernels that take every call on the devices of their tier."""
    return None


@dataclass(frozen=True)
class Kernel(Generic[C]):
    """One implementation of an op.

    Args:
        name: the tier, and after a dot the kernel, where the tier has several: ``sm90.fp8``.
        load: returns the launcher, which takes the op's record and writes its outputs. Loading
            imports Triton, so it happens at the first call.
        refuse: why the kernel does not take a call on a device of its tier, or None. It looks at
            dtypes, shapes, strides, addresses modulo 16 and options, never at a tensor's values.

    Raises:
        ValueError: the name does not begin with a tier.
    """

    name: str
    load: Callable[[], Launcher[C]]
    refuse: Refusal[C] = no_refusal

    def __post_init__(self) -> None:
        if self.tier not in TIERS:
            raise ValueError(
                f"the name of a kernel must begin with one of {', '.join(TIERS)}; got {self.name!r}"
            )

    @property
    def tier(self) -> str:
        return self.name.partition(".")[0]


@dataclass(frozen=True, eq=False)
class Op(Generic[C]):
    """An op: the record of its arguments, and its kernels.

    Args:
        name: the name of the public function, of its reference, and of the torch operator.
        arguments: the record.
        kernels: the rows, best first; the op's definition becomes the last.
        outputs: the fields for results, in the order in which the reference returns them.
        mutates: other fields that the kernels write, such as a cache or a workspace.
    """

    name: str
    arguments: type[C]
    kernels: tuple[Kernel[C], ...]
    outputs: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        definition = Kernel("reference", self._definition)
        object.__setattr__(self, "kernels", (*self.kernels, definition))

    def _definition(self) -> Launcher[C]:
        """The op's reference as a launcher, which writes its results into the outputs."""
        definition = getattr(reference, self.name)
        parameters = inspect.signature(definition).parameters

        def launch(call: C) -> None:
            fields: dict[str, Any] = call._asdict()  # type: ignore[attr-defined]
            results = definition(**{name: fields[name] for name in fields if name in parameters})
            if self.outputs:
                results = results if isinstance(results, tuple) else (results,)
                for name, result in zip(self.outputs, results, strict=True):
                    if fields[name] is not None and result is not None:
                        fields[name].copy_(result)

        return launch


class LazyModule:
    """A module that is imported when one of its names is used: Triton's import takes a second.

    Args:
        name: the module's full name.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._module: ModuleType | None = None

    def __getattr__(self, name: str) -> Any:
        if self._module is None:
            self._module = importlib.import_module(self._name)
        return getattr(self._module, name)


reference = LazyModule(f"{__name__.partition('.')[0]}.reference")

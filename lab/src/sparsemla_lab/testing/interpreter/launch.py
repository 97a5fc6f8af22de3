"""Launches of Gluon kernels on the CPU."""

from __future__ import annotations

import builtins
import functools
import inspect
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any
from unittest import mock

import torch
from triton import knobs
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.jit import ConstexprFunction, JITCallable

from sparsemla import dispatch
from sparsemla.kernels import indexer, projection
from sparsemla.kernels.attention import schedule
from sparsemla.kernels.common.device import GPUS
from sparsemla.kernels.common.table import TIERS
from sparsemla.kernels.topk import schedule as topk_schedule
from sparsemla.kernels.topk.sm90 import candidates, registers
from sparsemla_lab.testing.interpreter.global_memory import GlobalMemory
from sparsemla_lab.testing.interpreter.language import FUNCTIONS, tensor_range, tma_load
from sparsemla_lab.testing.interpreter.memory import Descriptor
from sparsemla_lab.testing.interpreter.portable import repair
from sparsemla_lab.testing.interpreter.schedule import Program, running
from sparsemla_lab.testing.interpreter.values import as_tensor

TMA_LOADS = [
    getattr(tma, name)
    for name in ("async_load", "async_copy_global_to_shared")
    if hasattr(tma, name)
]
"""Both names of one function, before and after Triton 3.8."""
GLUON = "sm90", "sm80"
"""Tiers in Gluon."""
TIER_OF = {
    name: tier
    for name, gpu in GPUS.items()
    if (tier := next(tier for tier, refuse in TIERS.items() if refuse(gpu) is None)) in GLUON
}
"""The tier of each GPU that :func:`acting_as` takes, by the compiler's name."""
MULTIPROCESSORS = 4
"""Of the GPU that dispatch sees."""
OF_H200 = 132
"""Those that the selection sees: they decide which of its kernels run."""


@contextmanager
def interpreting(seed: int = 0) -> Iterator[None]:
    """Let launches of Gluon kernels run here, on tensors of the CPU.

    Args:
        seed: decides in which order things happen that may happen in several.

    Raises:
        RuntimeError: in a launch: see :mod:`sparsemla_lab.testing.interpreter`.
        IndexError: in a launch: an address outside of a tensor's storage.
        NotImplementedError: in a launch: the interpreter does not know a part of Gluon.
    """
    rng = random.Random(seed)

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        _launch(self, grid, args, kwargs, rng)

    with mock.patch.object(type(gluon.jit(_no_kernel)), "run", run, create=True):
        yield


@contextmanager
def acting_as(gpu: str, seed: int = 0, multiprocessors: int = OF_H200) -> Iterator[None]:
    """Let ops on tensors of the CPU choose and run the kernels that a GPU gets.

    Triton's interpreter must have been chosen, by the environment variable ``TRITON_INTERPRET``,
    before the package's portable kernels were imported: they run beside those in Gluon.

    Args:
        gpu: one of :data:`TIER_OF`, such as ``sm_80``.
        seed: see :func:`interpreting`.
        multiprocessors: of the GPU that the selection sees, and shares its rows among.

    Raises:
        KeyError: an unknown GPU, or one that gets no kernels in Gluon.
        RuntimeError: Triton does not interpret.
    """
    if not knobs.runtime.interpret:
        raise RuntimeError("the environment variable TRITON_INTERPRET must be 1 before the start")
    repair()
    seen = GPUS[gpu]._replace(multiprocessors=MULTIPROCESSORS)
    with ExitStack() as stack:
        stack.enter_context(interpreting(seed))
        # Launchers themselves see the interpreter.
        for module in (dispatch, schedule, indexer, projection):
            stack.enter_context(mock.patch.object(module, "describe", return_value=seen))
        for module in (candidates, registers, topk_schedule):
            stack.enter_context(
                mock.patch.object(module, "num_multiprocessors", return_value=multiprocessors)
            )
        yield


def interpreted_ops(gpu: str) -> tuple[str, ...]:
    """Ops with kernels in the tier of a GPU, which :func:`acting_as` runs."""
    return tuple(
        name
        for name, op in dispatch.OPS.items()
        if any(kernel.tier == TIER_OF[gpu] for kernel in op.kernels)
    )


def _no_kernel() -> None:
    pass


def _launch(
    kernel: Any, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any], rng: random.Random
) -> None:
    """Run all programs of a grid one after the other, in any order."""
    parameters = inspect.signature(kernel.fn).parameters
    own = {name: value for name, value in kwargs.items() if name in parameters}
    bound = inspect.signature(kernel.fn).bind(*args, **own)
    bound.apply_defaults()
    constants = {kernel.arg_names[i] for i in kernel.constexprs}
    memory = GlobalMemory()
    given = {
        name: _constant(value) if name in constants else _argument(value, memory)
        for name, value in bound.arguments.items()
    }
    sizes = (*grid, 1, 1)[:3]
    places = list(itertools.product(*map(range, sizes)))
    rng.shuffle(places)
    for place in places:
        memory.begin_program(early=kwargs.get("launch_pdl", False))
        program = Program(
            place, sizes, kwargs.get("num_warps", 4), kwargs.get("num_ctas", 1), memory, rng
        )
        with running(program):
            _translated(kernel.fn)(**given)
        program.end()


def _constant(value: Any) -> Any:
    return value.value if isinstance(value, gl.constexpr) else value


def _argument(value: Any, memory: GlobalMemory) -> Any:
    """An argument of a launch as the kernel sees it."""
    if isinstance(value, torch.Tensor):
        return memory.pointer_to(value)
    if isinstance(value, TensorDescriptor):
        return Descriptor(memory, value)
    if isinstance(value, tuple):
        parts = [_argument(part, memory) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    value = _constant(value)
    return value if isinstance(value, bool) else as_tensor(value)


@functools.cache
def _translated(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the device whose names mean the interpreter's functions."""
    known = function.__globals__
    names = {name: _translate(known[name]) for name in _names(function.__code__) if name in known}
    names |= {"range": tensor_range, "__builtins__": builtins}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _translate(value: Any) -> Any:
    """What a name of a kernel's module stands for."""
    if isinstance(value, gl.constexpr):
        return value.value
    if isinstance(value, ConstexprFunction):
        return value.fn
    if isinstance(value, JITCallable) or hasattr(value, "fn"):  # the latter if Triton interprets
        return _of_language(value.fn) or _Lazily(value.fn)
    if isinstance(value, ModuleType):
        return _Module(value) if value.__name__.startswith("triton.") else value
    if any(value is load for load in TMA_LOADS):
        return tma_load
    if callable(value) and not isinstance(value, type):
        return _of_language(value) or value
    return value


def _of_language(function: Any) -> Callable[..., Any] | None:
    """Our function for one of Triton's; None if it is not Triton's.

    Raises:
        NotImplementedError: we have none.
    """
    if not function.__module__.startswith("triton."):
        return None
    if function.__name__ not in FUNCTIONS:
        raise NotImplementedError(f"{function.__module__}.{function.__name__}")
    return FUNCTIONS[function.__name__]


class _Module:
    """A module of the language: our functions, and its types and layouts."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return FUNCTIONS.get(name) or _translate(getattr(self._module, name))


class _Lazily:
    """A function of the device, translated when it is first called."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _translated(self._function)(*args, **kwargs)

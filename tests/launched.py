"""The kernels that calls launch on a GPU that is not here, beside those that ``explain`` names."""

import dataclasses
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
from triton.runtime.jit import JITFunction

import sparsemla
from sparsemla import dispatch
from sparsemla.kernels.common.device import meta_means
from sparsemla.kernels.common.table import Kernel, Op
from sparsemla.kernels.repeat import unrepeated
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import run_op
from sparsemla_lab.testing.compile import TARGETS, Target, _CompileOnlyDriver, believe
from sparsemla_lab.verify.matrix import MATRIX

COMPOSED = ("index_loss",)
"""Ops that are torch functions."""


def on_meta(value: Any) -> Any:
    """A value whose tensors have no memory, but their shapes, strides and alignments."""
    if isinstance(value, torch.Tensor):
        storage = torch.empty(1 << 40, dtype=value.dtype, device="meta")
        return storage.as_strided(value.shape, value.stride(), value.storage_offset())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        copied = object.__new__(type(value))
        for name, part in vars(value).items():
            object.__setattr__(copied, name, on_meta(part))
        return copied
    if isinstance(value, Mapping):
        return {name: on_meta(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(on_meta, value))
    return value


def is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what it lies in is no package
        return False


def agree(op: str, kernel: str, modules: set[str]) -> bool:
    """Whether launches of device functions of these modules are those of a kernel's name."""
    family = dispatch.OPS[op].arguments.__module__.removesuffix(".arguments")
    tier, _, own = kernel.partition(".")
    hopper = {module for module in modules if ".sm90" in module}
    if not modules:  # a call without elements
        return True
    if tier != "sm90":
        return not hopper
    if own and is_module(f"{family}.{kernel}"):
        return f"{family}.{kernel}" in modules
    return any(module.startswith(f"{family}.sm90") for module in hopper)


def mismatches(target_names: Sequence[str]) -> Iterator[str | None]:
    """For each case of the table and each target, None; or how launches differ from ``explain``.

    A case is drawn once, which takes most of the time.
    """
    targets = [target for target in TARGETS if target.name in target_names]
    for op, cases in MATRIX.items():
        for case in cases:
            if case.large or op in COMPOSED:
                continue
            drawn = case.build(Draw(0, "cpu"))
            for target in targets:
                wrong = mismatch(op, on_meta(drawn), target)
                yield wrong and f"{op}, {case.name}, {target.name}: {wrong}"


def mismatch(op: str, arguments: Mapping[str, Any], target: Target) -> str | None:
    """None, or how the launches of a call differ from what ``explain`` names."""
    launched: list[tuple[str, set[str]]] = []
    """The ops that ran, in order, with the modules of the device functions that they launched."""
    choose = dispatch.choose

    def choosing(op: Op[Any], call: Any) -> Kernel[Any]:
        kernel = choose(op, call)

        def launch(call: Any) -> object:
            launched.append((op.name, set()))
            return kernel.load()(call)

        return dataclasses.replace(kernel, load=lambda: launch)

    def run(self: JITFunction[Any], *args: Any, **kwargs: Any) -> None:
        launched[-1][1].add(self.fn.__module__)

    with ExitStack() as stack:
        stack.enter_context(believe(target, _CompileOnlyDriver(target)))
        stack.enter_context(meta_means(torch.device("cuda")))
        stack.enter_context(unrepeated())
        stack.enter_context(torch.no_grad())
        named = sparsemla.explain(run_op, op, arguments).choices
        launched.clear()
        stack.enter_context(mock.patch.object(dispatch, "choose", choosing))
        stack.enter_context(mock.patch.object(JITFunction, "run", run))
        run_op(op, arguments)
    right = [name for name, _ in launched] == [choice.op for choice in named] and all(
        agree(choice.op, choice.kernel, modules)
        for choice, (_, modules) in zip(named, launched, strict=True)
    )
    if right:
        return None
    return f"named {[(choice.op, choice.kernel) for choice in named]}, ran {launched}"


def main(*target_names: str) -> None:
    """Print each mismatch, and at last the number of calls."""
    count = 0
    for wrong in mismatches(target_names):
        if wrong is None:
            count += 1
        else:
            sys.stdout.write(f"{wrong}\n")
    sys.stdout.write(f"{count} calls\n")

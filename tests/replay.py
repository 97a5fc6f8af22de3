"""Which kernels the calls of ops need that a warm-up did not compile, without a GPU.

The calls that steps on the CPU make are kept as tensors without memory and repeated after the
warm-up, in a process of its own, in which Triton does not interpret.
"""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from types import ModuleType
from typing import Any

import torch

import sparsemla
from sparsemla import ExchangeWorkspace, HeadWeight, PagedCache, RowTable, WindowState
from sparsemla.kernels.common import pools
from sparsemla.kernels.exchange import Inboxes


def spy(monkeypatch: Any, ops: Mapping[ModuleType, Sequence[str]]) -> list[Any]:
    """A list of the calls of ops that modules will make: name, arguments and options."""
    calls: list[Any] = []

    def spied(op: Any) -> Any:
        def call(*arguments: Any, **options: Any) -> Any:
            kept = {name: without_memory(option) for name, option in options.items()}
            calls.append((op.__name__, [*map(without_memory, arguments)], kept))
            return op(*arguments, **options)

        return call

    for module, names in ops.items():
        for name in names:
            monkeypatch.setattr(module, name, spied(getattr(module, name)))
    return calls


def without_memory(argument: Any) -> Any:
    """A tensor as its shape, strides, place in 16 bytes, and dtype; likewise what is made of it."""
    match argument:
        case PagedCache():
            return "cache", without_memory(argument.data), argument.format.name
        case WindowState():
            return "state", without_memory(argument.rows)
        case HeadWeight():
            scale = argument.scale
            return "weight", without_memory(argument.data), without_memory(scale)
        case RowTable():
            return "table", *map(without_memory, (argument.keys, argument.rows, argument.order))
        case ExchangeWorkspace():
            inbox = without_memory(argument.inboxes.peers[-1])
            limits = argument.max_tokens, argument.max_candidates
            return "workspace", argument.rank, argument.num_ranks, limits, inbox
        case torch.Tensor():
            offset = argument.data_ptr() % 16 // argument.element_size()
            return "tensor", tuple(argument.shape), argument.stride(), offset, argument.dtype
    return argument


def on_meta(kept: Any) -> Any:
    """What :func:`without_memory` kept."""
    match kept:
        case "tensor", shape, strides, offset, dtype:
            data = torch.empty(1 << 40, dtype=dtype, device="meta")
            return data.as_strided(shape, strides, offset)
        case "cache", data, name:
            return PagedCache(on_meta(data), sparsemla.get_format(name))
        case "state", rows:
            return WindowState(on_meta(rows))
        case "table", *parts:
            return RowTable(*map(on_meta, parts))
        case "workspace", rank, num_ranks, (max_tokens, max_candidates), inbox:
            made = ExchangeWorkspace.__new__(ExchangeWorkspace)  # without the other ranks
            made.rank, made.num_ranks, made.device = rank, num_ranks, torch.device("meta")
            made.max_tokens, made.max_candidates = max_tokens, max_candidates
            epochs = torch.empty(max_tokens, dtype=torch.int32, device="meta")
            made.inboxes = Inboxes(rank, tuple(on_meta(inbox) for _ in range(num_ranks)), epochs)
            return made
        case "weight", data, scale:
            return HeadWeight(on_meta(data), on_meta(scale))
    return kept


def missing_kernels(
    run_python: Callable[..., CompletedProcess[str]],
    calls: Sequence[Any],
    *configurations: sparsemla.Serving,
    steps: Sequence[Any] = (),
    target: str = "sm_90",
) -> list[str]:
    """The kernels that calls need on a GPU beside those of a warm-up, which has some."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(pickle.dumps((calls, configurations, steps)))
        file.flush()
        done = run_python(MAIN, str(Path(__file__).parent), file.name, target)
    assert done.returncode == 0, done.stderr[-4000:]
    known, *missing = done.stdout.splitlines()
    assert int(known) > 0
    return missing


MAIN = """
import sys
sys.path.insert(0, sys.argv[1])
import replay
replay.main(*sys.argv[2:])
"""


def main(path: str, target: str) -> None:
    """Read calls and what a warm-up compiles; print its number of kernels, and those missing."""
    from sparsemla.kernels.common.compiling import compile_only
    from sparsemla.kernels.common.device import meta_means
    from test_warmup import recorded

    with open(path, "rb") as file:
        calls, configurations, steps = pickle.load(file)
    gpu = torch.device("cuda:0")
    with recorded(target) as kernels:
        sparsemla.warm_up(*configurations, steps=steps, device=gpu, workers=1)
        known = len(kernels)
        with meta_means(gpu), compile_only(1):
            for op, arguments, options in calls:
                options = {name: on_meta(option) for name, option in options.items()}
                call = getattr(sparsemla, op, None) or getattr(pools, op)
                call(*map(on_meta, arguments), **options)
    sys.stdout.write("\n".join([str(known), *kernels[known:]]))

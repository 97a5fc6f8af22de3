"""Compilation of all kernels of a run in several processes, which share Triton's cache with it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from sparsemla_lab.bench.peers import find_peers
from sparsemla_lab.bench.peers.base import Peer
from sparsemla_lab.bench.run import Choice, select_workloads, sides_of, with_steps
from sparsemla_lab.bench.workloads import Workload

THREADS = 8
"""Threads that compile candidates of one tuner."""


def acting(name: str | None) -> AbstractContextManager[None]:
    """The GPU as an older one, or as it is."""
    if name is None:
        return nullcontext()
    from sparsemla_lab.testing.emulate import acting_as  # needs Triton

    return acting_as(name)


def compile_first(
    chosen: Choice, count: int, peers: Path | None, acting_as: str | None, jobs: int
) -> None:
    """Run every side of some workloads once, so that the run finds its kernels in the cache.

    Errors are left to the run, which reports them.

    Args:
        chosen: the arguments of :func:`select_workloads`. Formats are compared by identity, so
            workloads themselves cannot be sent to a process.
        count: number of these workloads.
        peers: folder of the peers.
        acting_as: an older GPU to act as.
        jobs: number of processes.
    """
    # A forked process cannot use the GPU if its parent has used it.
    spawn = multiprocessing.get_context("spawn")
    parts = [range(first, count, jobs) for first in range(jobs)]
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        list(pool.map(run_once, [(chosen, part, peers, acting_as) for part in parts]))


def run_once(task: tuple[Choice, Iterable[int], Path | None, str | None]) -> None:
    """Run every side of the workloads with these numbers once."""
    chosen, numbers, directory, acting_as = task
    workloads = select_workloads(*chosen)
    with acting(acting_as), tuning_in_threads():
        peers, _ = with_steps(*find_peers(directory))
        for number in numbers:
            with suppress(Exception):
                _run_sides(workloads[number], peers, acting_as)
            with suppress(Exception):  # after an error of the GPU, every later call raises
                torch.cuda.empty_cache()  # for the other processes


def _run_sides(workload: Workload, peers: list[Peer], acting_as: str | None) -> None:
    inputs = workload.build(torch.device("cuda"))
    others = sides_of(workload, inputs, peers, {}, acting_as)
    for side in (workload.ours(inputs), *others):
        with suppress(Exception):
            side.run()
    torch.cuda.synchronize()


@contextmanager
def tuning_in_threads() -> Iterator[None]:
    """Let a tuner of Triton compile all its candidates at the same time, before it times them."""
    from triton.runtime.autotuner import Autotuner  # needs Triton

    prune = Autotuner.prune_configs

    def compile_all(self: Any, options: dict[str, Any]) -> list[Any]:  # noqa: ANN401
        configs: list[Any] = prune(self, options)
        rest = {name: value for name, value in options.items() if name not in ("grid", "warmup")}

        def compile_one(config: Any) -> None:  # noqa: ANN401
            with suppress(Exception):  # the tuner meets the error again
                arguments = self.nargs.values()
                self.fn.warmup(*arguments, grid=(1,), **rest, **config.all_kwargs())

        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(compile_one, configs))
        return configs

    with mock.patch.object(Autotuner, "prune_configs", compile_all):
        yield

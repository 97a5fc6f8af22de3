"""Python code in processes of its own, for Triton or as ranks of a group, and ranks as threads.

New ones begin with torch and Triton imported, which takes seconds. Triton may interpret in the
process of the tests.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection, get_context
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

from sparsemla_lab.testing.ranks import enough_gpus, gpu_of

RANK_DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not enough_gpus(2), reason="needs two CUDA GPUs"),
        ],
    ),
]
"""Where :func:`on_two_ranks` can run; also on one GPU, with NCCL's switch for ranks that share."""

RANKS = [
    (2, "cpu"),
    (4, "cpu"),
    *(
        pytest.param(
            num_ranks,
            "cuda",
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(
                    not enough_gpus(num_ranks), reason=f"needs {num_ranks} CUDA GPUs"
                ),
            ],
        )
        for num_ranks in (2, 4)
    ),
]
"""How many ranks :func:`on_ranks` can run, and where."""


def on_two_ranks(
    folder: Path, device: str, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """:func:`on_ranks` of two ranks."""
    return on_ranks(2, folder, device, function, *arguments)


def on_ranks(
    num_ranks: int, folder: Path, device: str, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """``function(rank, *arguments)`` of ranks, each a process, with gloo, or NCCL and a GPU.

    Processes on the CPU are forked, because the import of transformers takes seconds. They are
    forked from a server: backward passes may have left threads in this process. The server, which
    all tests of a process share, must not import the package: mutants take its place.
    """
    context = get_context("forkserver" if device == "cpu" else "spawn")
    if device == "cpu":
        context.set_forkserver_preload(["torch.distributed", "transformers.modeling_utils"])
    ranks = [
        context.Process(
            target=_rank, args=(rank, num_ranks, folder, device, function, arguments), daemon=True
        )
        for rank in range(num_ranks)
    ]
    for rank in ranks:
        rank.start()
    running = {rank.sentinel: rank for rank in ranks}
    try:
        while running:
            ended = connection.wait(list(running), 300)  # kernels may have to be compiled first
            assert ended, f"{len(running)} ranks did not end in 300 s"
            for each in ended:
                rank = running.pop(each)
                rank.join()
                assert rank.exitcode == 0
    finally:
        for rank in ranks:
            rank.kill()  # one that waits for a rank that failed
    return [torch.load(folder / f"{rank}.pt") for rank in range(num_ranks)]


def on_threads(num_ranks: int, function: Callable[..., Any]) -> list[Any]:
    """``function(rank, group)`` of ranks, each a thread of this process with a group of gloo."""
    store = torch.distributed.HashStore()

    def rank_of(rank: int) -> Any:
        return function(rank, _group(store, rank, num_ranks))

    with ThreadPoolExecutor(num_ranks) as pool:
        return list(pool.map(rank_of, range(num_ranks)))


def _group(store: torch.distributed.Store, rank: int, num_ranks: int) -> Any:
    """A group of torch.distributed beside the default one, of which a process has only one."""
    kind = torch.distributed.ProcessGroup
    group = kind(store, rank, num_ranks)
    gloo = torch.distributed.ProcessGroupGloo(store, rank, num_ranks, timedelta(seconds=60))
    group._set_default_backend(kind.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), kind.BackendType.GLOO, gloo)
    return group


def _rank(
    rank: int,
    num_ranks: int,
    folder: Path,
    device: str,
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(1)  # the threads of OpenMP are not forked
    backend, place = "gloo", None
    if device == "cuda":
        backend, place = "nccl", gpu_of(rank, num_ranks)
        torch.cuda.set_device(place)
    meeting = f"file://{folder}/meeting"
    torch.distributed.init_process_group(
        backend, init_method=meeting, rank=rank, world_size=num_ranks, device_id=place
    )
    torch.save(function(rank, *arguments), folder / f"{rank}.pt")
    torch.distributed.destroy_process_group()


@contextmanager
def compiler(*modules: str) -> Iterator[ProcessPoolExecutor]:
    """A process in which Triton compiles, and which has imported these modules, too."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        with pytest.MonkeyPatch.context() as patch:
            patch.delenv("TRITON_INTERPRET", raising=False)
            process.submit(_import, *modules).result()  # starts the process
        yield process


def run(process: ProcessPoolExecutor, code: str, *arguments: str) -> CompletedProcess[str]:
    """``python -c code *arguments`` in a copy of that process."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    return process.submit(_fork, code, arguments, environment).result()


def _import(*modules: str) -> None:
    for module in ("sparsemla_lab.testing.compile", *modules):
        importlib.import_module(module)
    importlib.import_module("triton.runtime.cache").triton_key()  # hashes all of Triton, once


def _fork(
    code: str, arguments: tuple[str, ...], environment: dict[str, str]
) -> CompletedProcess[str]:
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        child = os.fork()
        if child == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            os.environ.clear()
            os.environ.update(environment)
            os._exit(_execute(code, arguments))
        _, status = os.waitpid(child, 0)
        for file in (out, err):
            file.seek(0)
        return CompletedProcess(
            arguments, os.waitstatus_to_exitcode(status), out.read(), err.read()
        )


def _execute(code: str, arguments: tuple[str, ...]) -> int:
    sys.argv = ["-c", *arguments]
    try:
        exec(code, {"__name__": "__main__"})
    except SystemExit as end:
        return int(end.code or 0)
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0

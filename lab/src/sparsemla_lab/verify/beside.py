"""Repeated calls while other processes keep the device busy.

A GPU shared by several processes switches between them in the middle of kernels. A switch may
change state that a kernel leaves undefined, although it never changes while one process has the GPU
for itself. Only calls of several milliseconds are interrupted often.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

import torch
from torch import Tensor

from sparsemla.formats import BF16_576, FP8_DS_MLA, e4m3_format
from sparsemla_lab.bench import workloads
from sparsemla_lab.bench.workloads import Workload
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import assert_equal
from sparsemla_lab.testing.poison import poisoned_empty
from sparsemla_lab.verify.matrix import MATRIX
from sparsemla_lab.verify.properties import fresh, run_named

SECONDS, RUNS = 1.0, 20
"""Each call is repeated for at least this many seconds and this many times."""

LONG: tuple[Workload, ...] = (
    *(workloads.SparsePrefill(4096, 32768, heads, 576, 2048) for heads in (128, 64, 32, 16)),
    workloads.SparsePrefill(4096, 32768, 64, 512, 512),
    *(workloads.CachedPrefill(256, 131072, heads, 2048) for heads in (128, 16)),
    *(
        workloads.SparseDecode(256, 2, heads, 8192, 2048, format=fmt)
        for fmt in (FP8_DS_MLA, BF16_576, e4m3_format())
        for heads in (128, 32, 16)
    ),
    *(
        workloads.WindowedDecode(256, 2, heads, 128, 128, extra_context=8192, extra_topk=1024)
        for heads in (128, 32)
    ),
    *(
        workloads.DenseDecode(128, 1, heads, 8192, fmt)
        for fmt in (BF16_576, FP8_DS_MLA)
        for heads in (128, 16)
    ),
    workloads.IndexerScores(8192, 65536),
    workloads.IndexerScoresPaged(256, 1, 32768),
    workloads.IndexerScoresPaged(128, 2, 32768),
    workloads.IndexerTopk(1, 4096, 65536, 2048),
    workloads.IndexerTopk(128, 1, 32768, 2048),
    *(
        workloads.SelectTopk(*shape, 2048)
        for shape in ((4096, 65536), (1024, 262144), (64, 1048576), (8, 131072), (64, 16384))
    ),
    workloads.CacheWrite(65536, 128),
    workloads.CacheWrite(65536, 128, BF16_576),
    workloads.IndexWrite(65536, 64),
    workloads.Gather(4, 65536),
    *(
        workloads.HeadProducts(tokens, 128, *shape, layers=8)
        for shape in ((128, 512), (512, 128))
        for tokens in (64, 4096)
    ),
)
"""Calls that take several milliseconds on a GPU, as far as the op allows."""

SIZES = {"cpu": 256, "cuda": 4096}
"""Rows and columns of the matrices multiplied by the busy processes."""
QUEUED = 8
"""Matrix multiplications that a busy process queues before it synchronises."""
LULL = 0.1
"""Seconds after which a busy process has surely finished its queue."""

Run = Callable[[], dict[str, Tensor]]


@dataclass(frozen=True)
class Call:
    """A repeatable call of an op.

    Args:
        op: name of the op.
        case: name of the case or workload.
        build: draws the arguments and returns a function that runs the op on them.
    """

    op: str
    case: str
    build: Callable[[], Run]


@dataclass(frozen=True)
class Shared:
    """The result of a repeated call on a busy device.

    Attributes:
        op, case: names of the op and of the case.
        runs: number of runs on the busy device.
        failure: the first difference from a run on the idle device, or None.
    """

    op: str
    case: str
    runs: int
    failure: str | None


def calls_of(op: str, device: str) -> list[Call]:
    """The long calls of an op on a GPU; its quick cases on a CPU, or if it has no long calls."""
    long = [] if device == "cpu" else [one for one in LONG if one.op == op]
    if long:
        return [Call(op, one.case, partial(_build_workload, one, device)) for one in long]
    cases = [case for case in MATRIX[op] if case.quick]
    return [Call(op, case.name, partial(_build_case, op, case.build, device)) for case in cases]


def compile_calls(op: str, device: str) -> None:
    """Compile the kernels of an op's calls into Triton's cache."""
    for call in calls_of(op, device):
        call.build()()
    if device == "cuda":
        torch.cuda.empty_cache()


def rerun_beside(calls: Sequence[Call], device: str, count: int) -> Iterator[Shared]:
    """Run each call on the idle device, then repeatedly while ``count`` processes keep it busy.

    Raises:
        RuntimeError: one of these processes ended early.
    """
    with _busy_processes(count, device) as busy:
        for call in calls:
            run = call.build()
            expected = {name: result.clone() for name, result in run().items()}
            busy.set()
            runs, failure = 0, None
            end = time.perf_counter() + SECONDS
            while failure is None and (runs < RUNS or time.perf_counter() < end):
                runs += 1
                failure = _differs(run, expected, f"{call.op}, run {runs}")
            busy.clear()
            time.sleep(LULL)
            yield Shared(call.op, call.case, runs, failure)


def _differs(run: Run, expected: dict[str, Tensor], name: str) -> str | None:
    """Run a call; returns a message if a result differs from ``expected`` in any bit."""
    with poisoned_empty():
        results = run()
    try:
        for part, result in results.items():
            assert_equal(f"{name}, {part}", result, expected[part])
    except AssertionError as error:
        return str(error)
    return None


def _build_workload(workload: Workload, device: str) -> Run:
    inputs = workload.build(torch.device(device))

    def run() -> dict[str, Tensor]:
        return {str(i): result for i, result in enumerate(workload.run(inputs))}

    return run


def _build_case(op: str, build: Callable[[Draw], dict[str, object]], device: str) -> Run:
    arguments = build(Draw(0, device))
    return lambda: run_named(op, fresh(op, arguments))


@contextmanager
def _busy_processes(count: int, device: str) -> Iterator[Event]:
    """Processes that keep the device busy while the yielded event is set.

    Raises:
        RuntimeError: one of them ended before the block did.
    """
    spawn = multiprocessing.get_context("spawn")
    busy = spawn.Event()
    pipes = [spawn.Pipe(duplex=False) for _ in range(count)]
    processes = [
        spawn.Process(target=_multiply, args=(device, busy, sender), daemon=True)
        for _, sender in pipes
    ]
    try:
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        for receiver, _ in pipes:
            receiver.recv()  # the process is ready
        yield busy
        if any(not process.is_alive() for process in processes):
            raise EOFError
    except EOFError:
        raise RuntimeError(f"one of the {count} busy processes ended early") from None
    finally:
        for process in processes:
            process.kill()
            process.join()


def _multiply(device: str, busy: Event, ready: Connection) -> None:
    """Multiply matrices while ``busy`` is set, until the process is killed."""
    torch.set_num_threads(1)
    size = SIZES[device]
    x = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    torch.mm(x, x, out=out)
    ready.send(None)
    while True:
        busy.wait()
        for _ in range(QUEUED):
            torch.mm(x, x, out=out)
        if device == "cuda":
            torch.cuda.synchronize()

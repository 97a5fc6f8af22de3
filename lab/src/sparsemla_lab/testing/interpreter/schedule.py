"""Time: barriers, asynchronous copies and MMAs, and the partitions of a CTA.

One partition runs at a time. At every point where a GPU could do something else first, a random
number decides whether a copy lands or another partition goes on.
"""

from __future__ import annotations

import functools
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import triton.language as tl

from sparsemla_lab.testing.interpreter.global_memory import GlobalMemory
from sparsemla_lab.testing.interpreter.races import Clocks, Variable
from sparsemla_lab.testing.interpreter.values import Array, Tensor

Call = tuple[Callable[..., object], tuple[Any, ...]]
"""A function and its arguments."""
HAPPENS, SWITCHES = 0.3, 0.5
"""Chances that a copy or an MMA happens now, and that another partition goes on."""


class Barrier:
    """An mbarrier: its phase ends when all arrivals and all bytes that it expects are there."""

    def __init__(self) -> None:
        self._count = 0
        self._missing = 0
        self._bytes = 0
        self._phase = 0

    def init(self, count: int) -> None:
        self._count = self._missing = count

    def arrive(self, count: int = 1, expect: int = 0) -> None:
        if not self._count:
            raise RuntimeError("a kernel arrives at a barrier that was not initialised")
        if count > self._missing:
            raise RuntimeError(f"more than {self._count} arrivals in a phase of a barrier")
        self._missing -= count
        self._bytes += expect
        self._end()

    def receive(self, num_bytes: int) -> None:
        self._bytes -= num_bytes
        self._end()

    def _end(self) -> None:
        if self._missing == 0 and self._bytes == 0:
            self._phase += 1
            self._missing = self._count

    def has_ended(self, parity: int) -> bool:
        """Whether the phase of this parity has ended, as far as one bit tells."""
        return self._phase % 2 != parity


class WarpBarrier:
    """A barrier of all warps of a CTA or a cluster.

    Args:
        clocks: of the cluster.
        num_warps: how many arrive.
    """

    def __init__(self, clocks: Clocks, num_warps: int) -> None:
        self._clocks, self._num_warps = clocks, num_warps
        self._released: list[Array] = []
        """For each phase, what its warps had seen."""
        self._missing = 0
        self._phases: dict[int, int] = {}
        """In which phase a warp has arrived last."""
        self._ended = 0

    def arrive(self, warp: int, releases: bool = True) -> None:
        """Arrive; ``releases``: those that wait see what the warp did before."""
        if self._missing == 0:
            self._missing = self._num_warps
            self._released.append(np.zeros(len(self._clocks.seen), np.int32))
        if releases:
            np.maximum(
                self._released[-1],
                self._clocks.release(slice(warp, warp + 1)),
                out=self._released[-1],
            )
        self._phases[warp] = len(self._released) - 1
        self._missing -= 1
        if self._missing == 0:
            self._ended += 1

    def has_ended(self, warp: int) -> bool:
        """Whether the phase has ended in which the warp has arrived."""
        return self._phases[warp] < self._ended

    def acquire(self, warp: int) -> None:
        """See what all warps did before they arrived."""
        self._clocks.acquire(slice(warp, warp + 1), self._released[self._phases[warp]])


class Copy:
    """An asynchronous copy, which happens once.

    Args:
        copy: what happens.
        end: what the kernel knows once it has waited for it.

    Attributes:
        has_ended: whether it knows.
    """

    def __init__(self, copy: Callable[[], None], end: Callable[[], None]) -> None:
        self._copy: Callable[[], None] | None = copy
        self._end = end
        self.has_ended = False

    def happen(self) -> None:
        if self._copy is not None:
            copy, self._copy = self._copy, None
            copy()

    def end(self) -> None:
        """Let it happen, if it has not, and let the kernel know."""
        self.happen()
        if not self.has_ended:
            self.has_ended = True
            self._end()


class Accumulator(Tensor):
    """The result of an asynchronous MMA.

    Args:
        compute: reads the operands.
        shape: of the result.

    Attributes:
        is_ready: whether somebody has waited for it.
    """

    def __init__(self, compute: Callable[[], Array], shape: Sequence[int]) -> None:
        super().__init__(np.empty(shape, np.float32), tl.float32)
        self._compute: Callable[[], Array] | None = compute
        self.is_ready = False

    @property
    def shape(self) -> list[int]:
        return list(self._values.shape)

    @property
    def values(self) -> Array:
        if not self.is_ready:
            raise RuntimeError("a kernel reads an accumulator without a wait for its MMA")
        return self._values

    def happen(self) -> Array:
        """Multiply now, unless it has happened, and return the result."""
        if self._compute is not None:
            self._values, self._compute = self._compute(), None
        return self._values


class Partition:
    """The warps that run one function of ``gl.warp_specialize``, or the whole CTA.

    Args:
        num_warps: how many.
        number: counts from 1; the whole CTA has that of the first partition.

    Attributes:
        issued: cp.async that have not ended, as far as the kernel knows.
        group: cp.async since the last group.
        groups: groups that were not waited for.
        mmas: MMAs that were not waited for.
        turn: released when the partition may go on.
        ended: whether the function has returned.
        awaits: tells whether the phase has ended that the partition waits for.
    """

    def __init__(self, num_warps: int, number: int = 1) -> None:
        self.number = number
        self.num_threads = 32 * num_warps
        self.issued: list[Copy] = []
        self.group: list[Copy] = []
        self.groups: list[list[Copy]] = []
        self.mmas: list[Accumulator] = []
        self.turn = threading.Semaphore(0)
        self.ended = False
        self.awaits: Callable[[], bool] | None = None

    @property
    def can_run(self) -> bool:
        return not self.ended and (self.awaits is None or self.awaits())


class _StoppedError(Exception):
    """Another partition failed."""


class Program:
    """A CTA, or a cluster of CTAs, which has one number in the grid and shares all tensors.

    Args:
        place: its numbers in the grid.
        grid: the grid.
        num_warps: warps of each CTA.
        num_ctas: CTAs of the cluster.
        memory: of the launch.
        rng: decides who goes on, and when copies land.

    Attributes:
        clocks: what the warps have seen of each other.
        barriers: of each CTA.
        cluster_barrier: of all CTAs.
        variables: those that PTX declares in shared memory.
    """

    def __init__(
        self,
        place: tuple[int, ...],
        grid: tuple[int, ...],
        num_warps: int,
        num_ctas: int,
        memory: GlobalMemory,
        rng: random.Random,
    ) -> None:
        self.place, self.grid, self.memory, self.rng = place, grid, memory, rng
        self.num_warps, self.num_ctas = num_warps, num_ctas
        self.total_warps = num_warps * num_ctas
        self.clocks = Clocks(self.total_warps)
        self.barriers = [WarpBarrier(self.clocks, num_warps) for _ in range(num_ctas)]
        self.cluster_barrier = WarpBarrier(self.clocks, self.total_warps)
        self.variables: list[Variable] = []
        self.current = Partition(num_warps)
        self._partitions = [self.current]
        self._events: list[Callable[[], None]] = []
        self._error: BaseException | None = None

    def barrier(self) -> None:
        """Let the threads of each CTA, or of the current partition, wait for each other."""
        self.memory.order()
        if len(self._partitions) == 1:
            for cta in range(self.num_ctas):
                warps = self.warps_of(cta)
                self.clocks.acquire(warps, self.clocks.release(warps))

    def end(self) -> None:
        """Check that no CTA needs the memory of one that has ended before."""
        for variable in self.variables:
            variable.check_end()

    def warps_of(self, cta: int) -> slice:
        """The warps of a CTA, among those of the cluster."""
        return slice(cta * self.num_warps, (cta + 1) * self.num_warps)

    def later(self, event: Callable[[], None]) -> None:
        """Let something happen from now on, at the latest when nobody can go on without it."""
        self._events.append(event)
        self.pause()

    def pause(self) -> None:
        """A point where copies may land, MMAs multiply, and another partition may go on."""
        while self._events and self.rng.random() < HAPPENS:
            self._let_one_happen()
        for mma in self.current.mmas:  # in order
            if self.rng.random() >= HAPPENS:
                break
            mma.happen()
        if len(self._partitions) > 1 and self.rng.random() < SWITCHES:
            self._switch()

    def wait(self, barrier: Barrier, parity: int) -> None:
        """Wait until the phase of this parity has ended.

        Raises:
            RuntimeError: it never ends.
        """
        self.current.awaits = functools.partial(barrier.has_ended, parity)
        self.pause()
        if not self.current.can_run:
            self._switch()
        self.current.awaits = None

    def specialize(self, calls: Sequence[Call], num_warps: Sequence[int]) -> None:
        """Run functions side by side until all have returned."""
        whole = self.current
        self._partitions = [
            Partition(count, number) for number, count in enumerate((self.num_warps, *num_warps), 1)
        ]
        threads = [
            threading.Thread(target=self._run, args=(partition, call), daemon=True)
            for partition, call in zip(self._partitions, calls, strict=True)
        ]
        for thread in threads:
            thread.start()
        self.current = self.rng.choice(self._partitions)
        self.current.turn.release()
        for thread in threads:
            thread.join()
        self.current, self._partitions = whole, [whole]
        if self._error is not None:
            raise self._error

    def _run(self, partition: Partition, call: Call) -> None:
        function, arguments = call
        partition.turn.acquire()
        try:
            if self._error is None:
                with running(self):
                    function(*arguments)
        except _StoppedError:
            pass
        except BaseException as error:  # raised again by the launch
            self._stop(error)
        partition.ended = True
        self._switch()

    def _stop(self, error: BaseException) -> None:
        self._error = self._error or error
        for partition in self._partitions:
            partition.awaits = None

    def _switch(self) -> None:
        """Let a partition go on that can, and return when it is this one's turn again."""
        mine, following = self.current, self._next()
        if following is not None and following is not mine:
            self.current = following
            following.turn.release()
            if not mine.ended:
                mine.turn.acquire()
        if self._error is not None and not mine.ended:
            raise _StoppedError

    def _next(self) -> Partition | None:
        while not all(partition.ended for partition in self._partitions):
            able = [partition for partition in self._partitions if partition.can_run]
            if able:
                return self.rng.choice(able)
            if self._events:
                self._let_one_happen()
            else:
                waiting = sum(not partition.ended for partition in self._partitions)
                self._stop(RuntimeError(f"deadlock: {waiting} partitions wait for barriers"))
        return None

    def _let_one_happen(self) -> None:
        self._events.pop(self.rng.randrange(len(self._events)))()


_local = threading.local()


def program() -> Program:
    """The CTA that this thread runs."""
    found: Program = _local.program
    return found


@contextmanager
def running(cta: Program) -> Iterator[None]:
    """Let this thread run a CTA."""
    _local.program = cta
    try:
        yield
    finally:
        del _local.program

"""Times of several implementations on one machine, measured in turn.

On a GPU each side is captured into its own CUDA graph and the graph's replays are timed, so
that launches from Python cost no side anything. Work that cannot be captured is launched,
and the result says so. Before each run the L2 cache is overwritten.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Literal

import torch
from torch import Tensor

How = Literal["graph", "launch"]
Results = tuple[Tensor, ...]

WARMUPS = 3
FLUSH_BYTES = 256 << 20
"""At least; and four times the L2 cache."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of one side: median, 10th and 90th percentile."""

    us: float
    low_us: float
    high_us: float
    how: How


@dataclass(frozen=True)
class Prepared:
    """A function that is ready for repeated runs.

    Args:
        run: runs the function and returns its results; they may share memory between runs.
        how: ``graph`` if a run is the replay of a graph.
    """

    run: Callable[[], Results]
    how: How


class Timer:
    """Prepares and times functions on one device.

    Args:
        device: ``cpu`` or ``cuda``.
        budget_ms: time to spend on each side, flushes not counted.
    """

    def __init__(self, device: torch.device | str, budget_ms: float = 100.0) -> None:
        self.device = torch.device(device)
        self.budget_ms = budget_ms
        self._flush = torch.empty(0, dtype=torch.uint8)
        if self.device.type == "cuda":
            cache_bytes = torch.cuda.get_device_properties(self.device).L2_cache_size
            size = max(FLUSH_BYTES, 4 * cache_bytes)
            self._flush = torch.empty(size, dtype=torch.uint8, device=self.device)

    def prepare(self, function: Callable[[], Results]) -> Prepared:
        """``function`` after its warm-up, captured if it can be."""
        if self.device.type != "cuda":
            function()
            return Prepared(function, "launch")
        stream, current = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            for _ in range(WARMUPS):
                function()
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=stream):
                results = function()
        except RuntimeError:
            # Host work that depends on values cannot be captured. A failed capture leaves its
            # stream current. An error of the GPU itself is raised again here.
            torch.cuda.set_stream(current)
            torch.cuda.synchronize(self.device)
            return Prepared(function, "launch")

        def replay() -> Results:
            graph.replay()
            return results

        return Prepared(replay, "graph")

    def interleaved(self, sides: list[Prepared], repeats: int | None = None) -> list[Timing]:
        """The sides' times; the sides run in turn, in a new order each time.

        Args:
            sides: functions that were prepared.
            repeats: runs of each side; default what the budget allows, 10 to 200.
        """
        if repeats is None:
            longest = max(median(self._samples([side], 3)[0]) for side in sides)
            repeats = min(max(int(1e3 * self.budget_ms / max(longest, 1.0)), 10), 200)
        return [
            Timing(median(times), *_tails(times), side.how)
            for side, times in zip(sides, self._samples(sides, repeats), strict=True)
        ]

    def _samples(self, sides: list[Prepared], repeats: int) -> list[list[float]]:
        """Microseconds of each run of each side."""
        readers: list[list[Callable[[], float]]] = [[] for _ in sides]
        for turn in range(repeats):
            for place in range(len(sides)):
                index = (place + turn) % len(sides)
                readers[index].append(self._once(sides[index]))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [[read() for read in reader] for reader in readers]

    def flush(self) -> None:
        """Overwrite the L2 cache."""
        self._flush.zero_()

    def _once(self, side: Prepared) -> Callable[[], float]:
        """Run ``side``; returns a function that gives its time once the device is done."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            side.run()
            took = 1e6 * (time.perf_counter() - start)
            return lambda: took
        self.flush()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The flush keeps the GPU busy while the host queues the run.
        begin.record()
        side.run()
        end.record()
        return lambda: 1e3 * begin.elapsed_time(end)


def _tails(times: list[float]) -> tuple[float, float]:
    """10th and 90th percentile."""
    cuts = quantiles(times, n=10, method="inclusive")
    return cuts[0], cuts[-1]

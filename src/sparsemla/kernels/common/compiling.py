"""Compilation without launches, in parallel, and a count of compilations."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from triton import AsyncCompileMode, FutureKernel, knobs
from triton.runtime.jit import JITFunction


@dataclass
class Compilations:
    """Names of kernels in the order in which they became ready.

    Attributes:
        compiled: kernels that Triton compiled.
        loaded: kernels that Triton found in its persistent cache.
    """

    compiled: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)


@contextmanager
def count_compilations() -> Iterator[Compilations]:
    """Count the kernels that any thread compiles, or loads from Triton's persistent cache.

    >>> with count_compilations() as found:
    ...     pass
    >>> found
    Compilations(compiled=[], loaded=[])
    """
    found = Compilations()
    outer = knobs.compilation.listener

    def listen(*, src: Any, cache_hit: bool, **rest: Any) -> None:
        (found.loaded if cache_hit else found.compiled).append(src.name)
        if outer is not None:
            outer(src=src, cache_hit=cache_hit, **rest)

    knobs.compilation.listener = listen
    try:
        yield found
    finally:
        knobs.compilation.listener = outer


class Compiler(ThreadPoolExecutor):
    """Threads that compile, and the kernels that have been launched so far.

    Args:
        workers: number of threads.
    """

    def __init__(self, workers: int) -> None:
        super().__init__(workers)
        self._launched: dict[int, Any] = {}
        self._latest: set[int] = set()
        self._futures: list[Future[Any]] = []

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Compile a kernel."""
        future = super().submit(function, *args, **kwargs)
        self._futures.append(future)
        return future

    def launch(self, kernel: Any) -> None:
        """Note a launch."""
        self._launched[id(kernel)] = kernel
        self._latest.add(id(kernel))

    def kernels_of(self, step: Callable[[], object]) -> frozenset[int]:
        """Numbers of the kernels that a function launches."""
        self._latest = set()
        step()
        return frozenset(self._latest)

    def finish(self, progress: Callable[[int, int], None] | None) -> None:
        """Wait for all kernels, and load each of them as a launch would.

        Args:
            progress: called after each kernel with the numbers of ready kernels and of all.

        Raises:
            Exception: of the first kernel that did not compile or load.
        """
        for ready, future in enumerate(self._futures, 1):
            future.result()
            if progress is not None:
                progress(ready, len(self._futures))
        for kernel in self._launched.values():
            # The property loads the kernel's code and its launcher.
            (kernel.result() if isinstance(kernel, FutureKernel) else kernel).run  # noqa: B018


@contextmanager
def compile_only(workers: int) -> Iterator[Compiler]:
    """Let launches of this thread compile their kernels in the background, and run nothing.

    Raises:
        RuntimeError: Triton interprets its kernels.
    """
    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET must be unset: the interpreter compiles nothing")
    run, thread = JITFunction.run, threading.get_ident()

    def only_compile(self: JITFunction[Any], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread:
            return run(self, *args, **kwargs)
        kernel = run(self, *args, **kwargs | {"warmup": True})
        compiler.launch(kernel)
        return kernel

    with Compiler(workers) as compiler, AsyncCompileMode(compiler, ignore_errors=True):
        JITFunction.run = only_compile
        try:
            yield compiler
        finally:
            JITFunction.run = run

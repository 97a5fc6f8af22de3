"""Decode steps over static buffers: replayed as CUDA graphs on a GPU, run eagerly on a CPU."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from sparsemla.plan import (
    HostInts,
    Plan,
    PlanBuffers,
    check_longest,
    host_ints,
    int32_pages,
    longest_context,
    plan_batch,
)
from sparsemla.shards import ContextShard
from sparsemla.validation import check_integer, check_integers, check_kind

Outputs = TypeVar("Outputs", bound=Tensor | tuple[Tensor, ...])


class DecodeRunner(Generic[Outputs]):
    """Capture a model's decode step as CUDA graphs, one per batch size, and replay them.

    ``step(plan, **inputs)`` runs the model for a batch of decodes and returns a tensor, or a tuple
    of tensors, with one row per request. :meth:`run` picks the smallest captured size that fits the
    batch, copies the batch into the static buffers of the graph and replays the graph. On a CPU it
    calls the step with the same buffers.

    Unused rows are padding: length 0, no query tokens, slot -1, page ids 0, position 0, request 0
    and zero inputs. The ops of this package read and write nothing for them. Integers of the plan,
    such as ``max_seq_len``, are upper bounds over all batches.

    The constructor calls the step with padding only: once for the largest size, and on a GPU twice
    more per size, to compile its kernels and to capture them. The step must not synchronise with
    the device, branch on values of tensors, or keep references to tensors that it makes.

    All graphs share one memory pool, and all batch sizes share the runner's output buffers.

    Args:
        step: the decode step.
        inputs: the step's arguments other than the plan, by name: tensors ``[n, ...]`` with the
            shape, dtype and device of every later batch; n is arbitrary. With ``query_len`` above 1
            a row holds all query tokens of a request.
        batch_sizes: sizes to capture; the largest limits the batches that can run.
        max_pages_per_request: columns of the page table; times ``page_size`` this is the longest
            possible sequence, in tokens, or with a shard what a rank keeps of it.
        page_size: tokens per page.
        query_len: query tokens of each request; above 1 with speculative decoding.
        shard: this rank's share of every context, as for :func:`plan_batch`.

    Raises:
        TypeError: an input that is not a tensor, or a step that does not return tensors.
        ValueError: no inputs, or inputs on several devices; sizes below 1; a step that returns the
            wrong number of rows or cannot be captured, with the step's own error as the cause.
            After a failed capture PyTorch may refuse to generate random numbers on the device until
            the process ends.

    Source: the graph runners of vLLM and SGLang (``CUDAGraphWrapper``, ``CudaGraphRunner``).

    >>> def step(plan, x):
    ...     return x.sum(1) * plan.seq_lens
    >>> runner = DecodeRunner(
    ...     step,
    ...     {"x": torch.empty(1, 3)},
    ...     batch_sizes=(1, 2, 4),
    ...     max_pages_per_request=2,
    ...     page_size=8,
    ... )
    >>> page_table = torch.tensor([[5, 6], [3, 0], [4, 0]], dtype=torch.int32)
    >>> runner.run([9, 3, 8], page_table, x=torch.ones(3, 3))
    tensor([27.,  9., 24.])
    """

    def __init__(
        self,
        step: Callable[..., Outputs],
        inputs: Mapping[str, Tensor],
        *,
        batch_sizes: Iterable[int],
        max_pages_per_request: int,
        page_size: int,
        query_len: int = 1,
        shard: ContextShard | None = None,
    ) -> None:
        if not callable(step):
            raise TypeError(f"step must be callable, got {type(step).__name__}")
        check_kind("inputs", inputs, Mapping)
        try:
            sizes = list(batch_sizes)
        except TypeError:
            raise TypeError(f"batch_sizes must hold integers, got {batch_sizes!r}") from None
        for size in sizes or [0]:
            check_integer("batch_sizes", size, 1)
        self._sizes = sorted(set(sizes))
        for name, value in (
            ("max_pages_per_request", max_pages_per_request),
            ("page_size", page_size),
            ("query_len", query_len),
        ):
            check_integer(name, value, 1)
        if shard is not None:
            check_kind("shard", shard, ContextShard)
        self._step = step
        self._shard = shard
        self._page_size = page_size
        self._query_len = query_len
        self._device = _common_device(inputs)
        largest = self._sizes[-1]
        self._buffers = PlanBuffers(
            largest, largest * query_len, max_pages_per_request, self._device
        )
        self._inputs = {
            name: tensor.new_zeros(largest, *tensor.shape[1:]) for name, tensor in inputs.items()
        }
        longest = longest_context(max_pages_per_request, page_size, shard)
        self._plans = {size: self._plan(size, [longest] * size) for size in self._sizes}
        # The plans above differ only in their integers. Refill the buffers with padding.
        self._plan(largest, [])
        with torch.no_grad():
            results = self._call(largest)
            self._returns_tuple = isinstance(results, tuple)
            self._outputs = tuple(torch.empty_like(result) for result in _as_tuple(results))
            self._graphs = self._capture() if self._device.type == "cuda" else {}

    @torch.no_grad()
    def run(self, seq_lens: HostInts, page_table: Tensor, **inputs: Tensor) -> Outputs:
        """Run the step for one batch, without synchronising with the device.

        Replay allocates no memory; planning takes a few small tensors from PyTorch's caching
        allocators.

        Args:
            seq_lens: ``[B]`` host integers, context plus new tokens of each request.
            page_table: ``[B, W]`` int32, int64 or uint32 on the step's device, with at most
                ``max_pages_per_request`` columns.
            **inputs: ``[B, ...]``, every input by its name.

        Returns:
            The step's results without padding rows. They are views of the runner's buffers, which
            the next run overwrites.

        Raises:
            TypeError: an input is missing, unknown, or has another dtype than at construction;
                or lengths are not integers.
            ValueError: more requests than the largest size; another shape or device than at
                construction; or a length shorter than the query or beyond the page table.
        """
        count = self._check(page_table, inputs)
        size = self._sizes[bisect_left(self._sizes, count)]
        lens = host_ints("seq_lens", seq_lens)
        if lens.shape != (count,):
            raise ValueError(
                f"seq_lens must have one length for each of {count} rows of page_table, "
                f"got shape {list(lens.shape)}"
            )
        table, width = self._buffers.page_table, page_table.shape[1]
        # The buffers may have more columns.
        check_longest(lens, width, self._page_size, self._shard)
        table[:count, :width].copy_(int32_pages(page_table))
        table[:count, width:].fill_(-1)
        table[count:size].zero_()
        self._plan(size, lens)
        for name, buffer in self._inputs.items():
            buffer[:count].copy_(inputs[name])
            buffer[count:size].zero_()
        if self._graphs:
            self._graphs[size].replay()
        else:
            self._write(size)
        views = tuple(output[:count] for output in self._outputs)
        return cast(Outputs, views if self._returns_tuple else views[0])

    def _check(self, page_table: Tensor, inputs: Mapping[str, Tensor]) -> int:
        """Check a batch against the buffers; returns its number of requests."""
        if set(inputs) != set(self._inputs):
            names = (", ".join(sorted(given)) or "none" for given in (self._inputs, inputs))
            raise TypeError("inputs must be {}; got {}".format(*names))
        expected = {"page_table": self._buffers.page_table, **self._inputs}
        for name, tensor in {"page_table": page_table, **inputs}.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
            if name == "page_table":
                check_integers(name, tensor)
            elif tensor.dtype != expected[name].dtype:
                raise TypeError(
                    f"{name} must have dtype {expected[name].dtype}, got {tensor.dtype}"
                )
            if tensor.device != expected[name].device:
                raise ValueError(f"{name} must be on {expected[name].device}, got {tensor.device}")
        limit, columns = self._buffers.page_table.shape
        shape = page_table.shape
        if len(shape) != 2 or not 1 <= shape[0] <= limit or shape[1] > columns:
            raise ValueError(
                f"page_table must have 1 to {limit} rows, the largest of batch_sizes, and at most "
                f"{columns} columns, got shape {list(shape)}"
            )
        for name, tensor in inputs.items():
            rows = [shape[0], *self._inputs[name].shape[1:]]
            if list(tensor.shape) != rows:
                raise ValueError(f"{name} must have shape {rows}, got {list(tensor.shape)}")
        return shape[0]

    def _plan(self, size: int, seq_lens: Sequence[int] | np.ndarray) -> Plan:
        """Write the plan of these decodes, padded to ``size`` requests, to the buffers."""
        padding = size - len(seq_lens)
        padded = np.zeros(size, np.int64)
        padded[: len(seq_lens)] = seq_lens
        return plan_batch(
            [self._query_len] * len(seq_lens) + [0] * padding,
            padded,
            self._buffers.page_table[:size],
            page_size=self._page_size,
            workspace_rows=None,
            decode_threshold=self._query_len,
            shard=self._shard,
            buffers=self._buffers,
        )

    def _call(self, size: int) -> Outputs:
        """Run the step over the first ``size`` rows of the buffers."""
        inputs = {name: buffer[:size] for name, buffer in self._inputs.items()}
        results = self._step(self._plans[size], **inputs)
        for result in _as_tuple(results):
            if not isinstance(result, Tensor):
                raise TypeError(
                    f"step must return a tensor or a tuple of tensors, got {type(result).__name__}"
                )
            if result.dim() == 0 or result.shape[0] != size:
                raise ValueError(
                    f"step must return a row for each of {size} requests, "
                    f"got shape {list(result.shape)}"
                )
        return results

    def _write(self, size: int) -> None:
        """Run the step and copy its results to the output buffers."""
        for output, result in zip(self._outputs, _as_tuple(self._call(size)), strict=True):
            output[:size].copy_(result)

    def _capture(self) -> dict[int, torch.cuda.CUDAGraph]:
        """Capture a graph per size, largest first, so that the others fit into its memory pool."""
        graphs = {}
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        # A failed capture leaves its stream current; leaving this block restores the caller's.
        with torch.cuda.device(self._device), torch.cuda.stream(stream):
            for size in reversed(self._sizes):
                self._write(size)  # compiles and loads kernels, which a capture cannot do
                graphs[size] = torch.cuda.CUDAGraph()
                failure: Exception | None = None
                try:
                    with torch.cuda.graph(graphs[size], pool=pool, stream=stream):
                        try:
                            self._write(size)
                        except Exception as error:
                            failure = error  # ending the capture raises another, vaguer error
                            raise
                except Exception as error:
                    cause = failure or error
                    raise ValueError(
                        "step must not synchronise with the device or branch on values, so that a "
                        f"CUDA graph can hold it; the capture for batch size {size} raised "
                        f"{type(cause).__name__}: {cause}"
                    ) from cause
        torch.cuda.current_stream(self._device).wait_stream(stream)
        return graphs


def _as_tuple(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def _common_device(inputs: Mapping[str, Tensor]) -> torch.device:
    """Check the inputs; returns their device."""
    for name, tensor in inputs.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"inputs must hold tensors, got {type(tensor).__name__} for {name}")
        if tensor.dim() == 0:
            raise ValueError(f"inputs must have a row for each request, got shape [] for {name}")
    devices = sorted({str(tensor.device) for tensor in inputs.values()})
    if len(devices) != 1:
        raise ValueError(f"inputs must be on one device, got {', '.join(devices) or 'no inputs'}")
    return next(iter(inputs.values())).device

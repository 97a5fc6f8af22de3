"""Writes the selections of an engine's requests to files while it serves. Imports no engine.

The engine's thread reserves memory and hands over copies of its steps. A thread of the recorder
sorts them by request; two more encode and write the records of requests that have finished.

A token among the first ``index_topk`` of a sequence selects all that it sees. Nothing is copied or
held for it.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from urllib.parse import quote

import numpy as np
import torch
from torch import Tensor

from sparsemla.backends.records import encode_lists, part_path, record_bytes

BLOCK = 16
"""Tokens whose lists are allocated together."""
WRITERS = 2


def dtype_for(max_length: int) -> torch.dtype:
    """The dtype of lists in contexts of so many tokens; -1 becomes the largest uint16."""
    return torch.uint16 if max_length <= 65535 else torch.int32


@dataclass(frozen=True)
class Span:
    """The tokens of a request in a step.

    Args:
        request: its id.
        num_tokens: of the step.
        row: the first of their rows among those copied, or None if none is.
    """

    request: str
    num_tokens: int
    row: int | None


@dataclass
class _Held:
    """Memory of a request, by the engine's count; under the recorder's lock.

    Attributes:
        first: an upper bound of its first position with a list that is held.
        num_bytes: reserved for it.
        reason: why it is not recorded, or None.
    """

    first: int
    num_bytes: int = 0
    reason: str | None = None


@dataclass
class _Lists:
    """The lists of a request; of the recorder's thread, then of a writer.

    Attributes:
        first: position of the first token with a list.
        until: position behind the last one.
        kept: lists before this position stay when their tokens are computed again.
        blocks: arrays ``[BLOCK, layers, topk]`` by their place behind position ``topk``.
    """

    first: int
    until: int
    kept: int = 0
    blocks: dict[int, np.ndarray] = field(default_factory=dict)


class Recorder:
    """Records of the requests of an engine, in files of a folder.

    All methods are for the engine's thread.

    Args:
        folder: of the files.
        model: name of the model, by which the training knows it.
        topk: ``index_topk`` of the model.
        layers: those with an indexer on this pipeline stage.
        dtype: of the lists that are handed over: int32, or uint16 with 65535 for none.
        limit: most bytes that lists of all requests may take before they are written.
        stage: number of the pipeline stage, and how many there are.
        warn: called with the reason for which a request is not recorded.
    """

    def __init__(
        self,
        folder: Path,
        *,
        model: str,
        topk: int,
        layers: Sequence[int],
        dtype: torch.dtype,
        limit: int,
        stage: tuple[int, int],
        warn: Callable[[str], None],
    ) -> None:
        self.folder, self.model, self.topk, self.layers = folder, model, topk, tuple(layers)
        self.limit, self.stage, self.warn = limit, stage, warn
        self.dtype = np.dtype(np.uint16 if dtype == torch.uint16 else np.int32)
        self.block_bytes = BLOCK * len(layers) * topk * self.dtype.itemsize
        self.used = 0
        self._held: dict[str, _Held] = {}
        self._lists: dict[str, _Lists] = {}
        self._lock = threading.Lock()
        self._failure: BaseException | None = None
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._writers = ThreadPoolExecutor(WRITERS, "sparsemla-records")
        self._thread = threading.Thread(target=self._run, name="sparsemla-recorder", daemon=True)
        self._thread.start()

    def reserve(self, step: Sequence[tuple[str, int, int]]) -> list[bool]:
        """Reserve memory for the lists of a step.

        Args:
            step: id, first position and position behind the last token of each request; upper
                bounds, except in the first step of a request.

        Returns:
            For each of them whether the lists of its tokens are to be copied.

        Raises:
            RuntimeError: a record could not be written.
        """
        if self._failure is not None:
            raise RuntimeError("sparsemla: the recorder of selections failed") from self._failure
        with self._lock:
            return [self._reserve(*each) for each in step]

    def _reserve(self, request: str, start: int, end: int) -> bool:
        held = self._held.get(request)
        if held is None:
            held = self._held[request] = _Held(max(start, self.topk))
        if held.reason is not None or end <= self.topk:
            return False
        blocks = (end - 1 - self.topk) // BLOCK - (held.first - self.topk) // BLOCK + 1
        num_bytes = max(blocks * self.block_bytes, held.num_bytes)
        if self.used - held.num_bytes + num_bytes > self.limit:
            self._refuse(
                request,
                f"host_gib must be larger than {self.limit / 2**30:g} to hold the selections of "
                f"all running requests, of which {request} reached position {end} in "
                f"{len(self.layers)} layers",
            )
            return False
        self.used += num_bytes - held.num_bytes
        held.num_bytes = num_bytes
        return True

    def _refuse(self, request: str, reason: str) -> None:
        """Give up a request; the caller has the lock."""
        held = self._held[request]
        self.used -= held.num_bytes
        held.num_bytes, held.reason = 0, reason
        self.warn(f"no selections of request {request} are recorded: {reason}")

    def add(
        self,
        spans: Sequence[Span],
        rows: Tensor,
        seq_lens: Tensor,
        ready: Callable[[], None],
    ) -> None:
        """Hand over a step.

        Args:
            spans: of all requests of the step, in the order of ``seq_lens``.
            rows: ``[n, layers, topk]`` on the host, the lists that are copied.
            seq_lens: on the host, context and query of each request.
            ready: waits for the copies.
        """
        self._queue.put(partial(self._add, spans, rows, seq_lens, ready))

    def resume(self, request: str, num_tokens: int) -> None:
        """Tell that a preempted request is computed again; of another one nothing is known yet.

        Args:
            request: its id.
            num_tokens: prompt and answer as the engine knows them; the last one has no list.
        """
        self._queue.put(partial(self._resume, request, num_tokens))

    def finish(self, request: str, num_tokens: int) -> None:
        """Write the record of a request; nothing if it never ran, or is written already.

        Args:
            request: its id.
            num_tokens: prompt and answer; the last one has no list.
        """
        self._queue.put(partial(self._finish, request, num_tokens))

    def wait(self) -> None:
        """Wait for all records of finished requests.

        Raises:
            RuntimeError: one could not be written.
        """
        done = threading.Event()
        self._queue.put(done.set)
        done.wait()
        self._writers.shutdown()
        self._writers = ThreadPoolExecutor(WRITERS, "sparsemla-records")
        self.reserve([])

    def close(self) -> None:
        """Write what has finished, and end all threads."""
        self._queue.put(None)
        self._thread.join()
        self._writers.shutdown()

    def path(self, request: str) -> Path:
        """The record of a request, without a suffix."""
        return record_path(self.folder, request)

    # The recorder's thread.

    def _run(self) -> None:
        while (task := self._queue.get()) is not None:
            try:
                task()
            except BaseException as error:  # the engine's thread raises it
                self._failure = error

    def _add(
        self, spans: Sequence[Span], rows: Tensor, seq_lens: Tensor, ready: Callable[[], None]
    ) -> None:
        ready()
        copied = rows.numpy()
        for span, end in zip(spans, seq_lens.tolist(), strict=True):
            self._extend(span, end, copied)

    def _extend(self, span: Span, end: int, copied: np.ndarray) -> None:
        start = end - span.num_tokens
        lists = self._lists.get(span.request)
        if lists is None:
            lists = self._lists[span.request] = _Lists(start, start)
        held = self._held[span.request]
        if held.reason is None and start > lists.until:
            with self._lock:
                self._refuse(
                    span.request,
                    f"positions {lists.until} to {start - 1} were taken from the prefix cache when "
                    "it was computed again",
                )
        if held.reason is not None:
            lists.blocks.clear()
            return
        begin = max(start, lists.kept, self.topk)
        lists.until = max(end, lists.kept)
        if span.row is None:
            return
        while begin < end:
            place, first = divmod(begin - self.topk, BLOCK)
            count = min(BLOCK - first, end - begin)
            block = lists.blocks.get(place)
            if block is None:
                shape = BLOCK, len(self.layers), self.topk
                block = lists.blocks[place] = np.empty(shape, self.dtype)
            row = span.row + begin - start
            block[first : first + count] = copied[row : row + count]
            begin += count

    def _resume(self, request: str, num_tokens: int) -> None:
        lists = self._lists.get(request)
        if lists is not None:
            lists.until = lists.kept = min(lists.until, num_tokens - 1)

    def _finish(self, request: str, num_tokens: int) -> None:
        lists = self._lists.pop(request, None)
        if lists is not None:
            self._writers.submit(self._write, request, lists, num_tokens - 1)

    # Writers.

    def _write(self, request: str, lists: _Lists, until: int) -> None:
        try:
            with self._lock:
                reason = self._held[request].reason
            if reason is None and lists.until < until:
                reason = f"its tokens before position {lists.until} have lists, of {until} tokens"
            data = b""
            if reason is None:
                try:
                    data = self._bytes(lists, until)
                except ValueError as error:
                    reason = str(error)
            self._replace(request, data, reason)
            with self._lock:
                self.used -= self._held.pop(request).num_bytes
        except BaseException as error:  # the engine's thread raises it
            self._failure = error

    def _bytes(self, lists: _Lists, until: int) -> bytes:
        begin = max(lists.first, min(until, self.topk))
        width = min(self.topk, until)
        layers = {}
        for place, layer_idx in enumerate(self.layers):
            parts = self._parts(lists, place, begin, until)
            data = encode_lists(parts, whole=range(lists.first, begin))
            layers[layer_idx] = width, data
        return record_bytes(
            model=self.model,
            topk=self.topk,
            score_dtype="float8_e4m3fn",
            first_position=lists.first,
            num_tokens=until - lists.first,
            layers=layers,
        )

    def _parts(
        self, lists: _Lists, place: int, begin: int, until: int
    ) -> Iterator[tuple[np.ndarray, int]]:
        """The lists of a layer."""
        while begin < until:
            block, first = divmod(begin - self.topk, BLOCK)
            last = min(BLOCK, first + until - begin)
            part = lists.blocks[block][first:last, place].astype(np.int32)
            ends = np.arange(begin, begin + last - first)
            if (part[:, 1:] <= part[:, :-1]).any() or (part[:, 0] < 0).any() or (
                part[:, -1] > ends
            ).any():  # fmt: skip
                raise ValueError(
                    f"the lists of layer {self.layers[place]} must ascend strictly from position "
                    f"{begin} on, and have {self.topk} entries that their tokens see"
                )
            yield part, begin
            begin += last - first

    def _replace(self, request: str, data: bytes, reason: str | None) -> None:
        """Write the file at once, so that a reader never finds a part of it."""
        path = self.path(request)
        written = part_path(path, *self.stage, "written")
        if reason is None:
            written.write_bytes(data)
        else:
            written.write_text(reason)
        os.replace(written, part_path(path, *self.stage, "refused" if reason else "selections"))


def record_path(folder: Path, request: str) -> Path:
    """The record of a request, without a suffix; letters that a file cannot have are quoted."""
    return folder / quote(request, safe=" ")

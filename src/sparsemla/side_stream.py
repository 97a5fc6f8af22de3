"""A stream beside the current one, for pieces of work that are joined one by one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor


class SideStream:
    """Pieces of work beside the current stream.

    A piece begins behind all that the current stream has, :meth:`fork`, and the current stream
    waits for its end, :meth:`join`. The caching allocator would give memory of a dropped tensor
    to the current stream at once. So a piece keeps the tensors that it reads until it is joined,
    even if an error comes between. On a CPU pieces run when they begin.

    Args:
        device: of the work.
        stream: of the pieces; default a new one on a GPU.
        pieces: how many may be on their way.
    """

    def __init__(self, device: torch.device, stream: torch.cuda.Stream | None, pieces: int) -> None:
        if stream is None and device.type == "cuda":
            stream = torch.cuda.Stream(device)
        self._device, self._stream = device, stream
        self._forked = None if stream is None else torch.cuda.Event()
        self._ends = [] if stream is None else [torch.cuda.Event() for _ in range(pieces)]
        self._read: dict[int, tuple[object, ...]] = {}
        """What each piece that was not joined reads."""

    def owns(self, *tensors: Tensor) -> None:
        """Let the memory of tensors that pieces use wait for the stream when it is given back."""
        for tensor in tensors:
            if self._stream is not None and tensor.is_cuda:
                tensor.record_stream(self._stream)

    @contextlib.contextmanager
    def fork(self, piece: int, *read: object) -> Iterator[None]:
        """Run the block on the stream, after all that the current stream has.

        Args:
            piece: its number; one that is on its way is joined first.
            read: tensors that the block reads, or what holds them.
        """
        self.join(piece)
        self._read[piece] = read
        if self._stream is None or self._forked is None:
            yield
            return
        self._forked.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._forked)
        with torch.cuda.stream(self._stream):
            try:
                yield
            except BaseException:
                self.end(piece)  # what was launched may still read
                raise

    def end(self, piece: int) -> None:
        """Let :meth:`join` wait for what a piece has launched up to here."""
        if self._stream is not None:
            self._ends[piece].record(self._stream)

    def join(self, piece: int) -> None:
        """Let the current stream wait for a piece, if it is on its way."""
        if self._read.pop(piece, None) is not None and self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._ends[piece])

    def join_all(self) -> None:
        """Let the current stream wait for all pieces."""
        for piece in tuple(self._read):
            self.join(piece)

"""Contexts of prefills on the GPU for a while, from rows in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import CacheFormat
from sparsemla.host_cache import HostCache
from sparsemla.ops.gather import gather_dequant, to_slots
from sparsemla.ops.residency import fetch_rows
from sparsemla.plan import Plan, PrefillChunk
from sparsemla.side_stream import SideStream
from sparsemla.validation import check_integer, check_integers, check_kind


class HostContext:
    """Contexts of prefills in a workspace on the GPU, copied a layer ahead of attention.

    A chunk of a long prompt attends to most of its context, so each layer's rows cross the link
    once, in order, while the layer before computes: :meth:`rows`. Rows of this step's own tokens
    are read when their layer has written them. The rows have the bits of
    :func:`sparsemla.gather_dequant` over a cache on the GPU. A few new tokens of a long context,
    such as the next turn of a conversation, attend to less than they would copy: :meth:`selected`
    fetches what they select, if :meth:`selects` says so.

    Args:
        host: all rows.
        max_rows: rows of a workspace, the ``workspace_rows`` of the plans.
        ahead: workspaces that are filled before their turn; each takes ``max_rows * head_dim * 2``
            bytes, as does the one in use.
        stream: for the copies; default a new one.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, below 1, or a closed host.

    >>> from sparsemla import FP8_DS_MLA, HostCache, plan_batch
    >>> host = HostCache.allocate(FP8_DS_MLA, 8, 64, num_layers=2, device="cpu")
    >>> table = torch.tensor([[5, 2]], dtype=torch.int32)
    >>> plan = plan_batch([20], [100], table, page_size=64, workspace_rows=128)
    >>> context = HostContext(host, max_rows=128)
    >>> context.start(plan)
    >>> [context.rows(layer).shape for layer in range(2)]
    [torch.Size([100, 576]), torch.Size([100, 576])]
    """

    def __init__(
        self,
        host: HostCache,
        *,
        max_rows: int,
        ahead: int = 1,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        check_kind("host", host, HostCache)
        host.check_open()
        check_integer("max_rows", max_rows, 1)
        check_integer("ahead", ahead, 1)
        if stream is not None:
            check_kind("stream", stream, torch.cuda.Stream)
        self._host, self.max_rows, self._ahead = host, int(max_rows), int(ahead)
        self._side = SideStream(host.device, stream, ahead + 1)
        self._buffers = [
            torch.zeros(max_rows, host.format.head_dim, dtype=torch.bfloat16, device=host.device)
            for _ in range(ahead + 1)
        ]
        self._side.owns(*self._buffers)
        self._chunks: list[_ChunkLengths] = []
        self._next = 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of the workspaces."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def start(self, plan: Plan) -> None:
        """Begin a step: copy the contexts of the first layer.

        Args:
            plan: with prefill chunks, made by :func:`sparsemla.plan_batch` with
                ``workspace_rows``. Its contexts, without the tokens of this step, must be in the
                host cache of every layer.

        Raises:
            TypeError, ValueError: not a plan, one of another page size, without chunks, or with a
                chunk beyond max_rows; a host that is closed.
        """
        self._check_plan(plan)
        if not plan.prefill_chunks:
            raise ValueError("plan must have prefill chunks, made with workspace_rows, got none")
        most = max(chunk.num_workspace_rows for chunk in plan.prefill_chunks)
        if most > self.max_rows:
            raise ValueError(f"plan must have chunks of at most {self.max_rows} rows, got {most}")
        queries = plan.input_row_offsets.diff()
        self._chunks = [_ChunkLengths.of(chunk, queries) for chunk in plan.prefill_chunks]
        self._next = 0
        for item in range(min(self._ahead, self._num_items)):
            self._copy(item)

    def rows(self, layer_idx: int, chunk: int = 0) -> Tensor:
        """The rows of a chunk's contexts and of its tokens, and begin to copy what comes next.

        The layer's own rows of this step must have been written to ``host.layer(layer_idx)``.

        Args:
            layer_idx: layers come in order, and within a layer the chunks.
            chunk: number of the chunk in ``plan.prefill_chunks``.

        Returns:
            bfloat16 ``[num_workspace_rows, head_dim]``, the ``kv`` of
            :func:`sparsemla.sparse_prefill`; overwritten after ``ahead`` more calls.

        Raises:
            TypeError, ValueError: an argument that is not an integer or out of its order; a host
                that is closed.
        """
        check_integer("layer_idx", layer_idx)
        check_integer("chunk", chunk)
        self._host.check_open()
        expected = divmod(self._next, len(self._chunks)) if self._chunks else (0, 0)
        if self._next >= self._num_items or (layer_idx, chunk) != expected:
            got = f"got layer {layer_idx}, chunk {chunk}"
            if self._next >= self._num_items:
                raise ValueError(f"layer_idx: start(plan) must begin a step first, {got}")
            raise ValueError(
                f"layer_idx and chunk must come in order, layer {expected[0]}, chunk {expected[1]} "
                f"is next, {got}"
            )
        item, self._next = self._next, self._next + 1
        lengths = self._chunks[chunk]
        place = item % len(self._buffers)
        self._side.join(place)
        rows = self._buffers[place][: lengths.num_rows]
        gather_dequant(
            self._host.layer(layer_idx),
            lengths.page_table,
            lengths.new,
            lengths.new_starts,
            seq_starts=lengths.contexts,
            out=rows,
        )
        # The workspace of the next copy was read last before this call.
        if item + self._ahead < self._num_items:
            self._copy(item + self._ahead)
        return rows

    def selects(self, plan: Plan, topk: int) -> bool:
        """Whether the prefills of a plan select fewer rows than half of their contexts have.

        Raises:
            TypeError, ValueError: not a plan, or topk that is not a positive integer.
        """
        check_kind("plan", plan, Plan)
        check_integer("topk", topk, 1)
        rows = sum(chunk.num_workspace_rows for chunk in plan.prefill_chunks)
        return 2 * plan.num_prefill_tokens * topk < rows

    def selected(
        self, layer_idx: int, topk_indices: Tensor, plan: Plan
    ) -> Iterator[tuple[slice, PagedCache, Tensor]]:
        """Fetch the rows that tokens select, for as many tokens at a time as a workspace holds.

        The layer's own rows of this step must have been written to ``host.layer(layer_idx)``. The
        next piece is fetched while the one that was yielded is in use. Attention has the bits of
        attention over a cache on the GPU. A caller may leave early, as after an error: the piece
        that is on its way keeps its lists.

        Args:
            layer_idx: the layer, in any order.
            topk_indices: int32, int64 or uint32 ``[T, K]``, positions in the request, -1 for none.
            plan: of these tokens; chunks are not needed.

        Yields:
            The tokens, a cache, and int32 ``[tokens, K]``, its rows of the tokens' selections, -1
            for none: the ``kv`` and ``topk_indices`` of :func:`sparsemla.sparse_prefill`.

        Raises:
            TypeError, ValueError: an argument of the wrong kind, shape or device; a workspace that
                is too small for a token; a step of :meth:`rows` that is not over; a closed host.
        """
        check_integer("layer_idx", layer_idx, 0, self._host.num_layers)
        self._check_plan(plan)
        check_integers("topk_indices", topk_indices)
        shape = plan.num_tokens, topk_indices.shape[-1]
        if tuple(topk_indices.shape) != shape:
            raise ValueError(
                f"topk_indices must have shape [{plan.num_tokens}, K], got "
                f"{list(topk_indices.shape)}"
            )
        if self._next < self._num_items:
            raise ValueError(
                "layer_idx: the step of rows() must be over, "
                f"got {self._next} of {self._num_items} workspaces"
            )
        places = [_rows_in(buffer, self._host.format) for buffer in self._buffers[:2]]
        most = places[0].num_slots // max(shape[1], 1)
        if most < 1:
            raise ValueError(
                f"max_rows must have room for the {shape[1]} rows of a token, got {self.max_rows}"
            )
        return self._pieces(layer_idx, topk_indices, plan, places, most)

    def _pieces(
        self,
        layer_idx: int,
        topk_indices: Tensor,
        plan: Plan,
        places: list[PagedCache],
        most: int,
    ) -> Iterator[tuple[slice, PagedCache, Tensor]]:
        source, width = self._host.layer(layer_idx), topk_indices.shape[1]
        rows = torch.arange(most * width, dtype=torch.int32, device=topk_indices.device)
        rows, counts = rows.view(most, width), rows.new_full((most,), width)
        slots = to_slots(
            topk_indices, plan.page_table, plan.request_ids, page_size=self._host.page_size
        )
        pieces = [
            slice(first, min(first + most, len(slots))) for first in range(0, len(slots), most)
        ]

        def fetch(number: int) -> None:
            tokens = pieces[number]
            count = tokens.stop - tokens.start
            with self._side.fork(number % 2, slots, rows, counts):
                target = places[number % 2]
                fetch_rows(source, target, slots[tokens], rows[:count], counts[:count])
                self._side.end(number % 2)

        for number, tokens in enumerate(pieces):
            if number == 0:
                fetch(0)
            self._side.join(number % 2)
            if number + 1 < len(pieces):
                fetch(number + 1)
            listed = rows[: tokens.stop - tokens.start].where(slots[tokens] >= 0, -1)
            yield tokens, places[number % 2], listed

    def _check_plan(self, plan: Plan) -> None:
        check_kind("plan", plan, Plan)
        self._host.check_open()
        if plan.page_size != self._host.page_size:
            raise ValueError(
                f"plan must have pages of {self._host.page_size} tokens, as host has, "
                f"got {plan.page_size}"
            )

    @property
    def _num_items(self) -> int:
        return self._host.num_layers * len(self._chunks)

    def _copy(self, item: int) -> None:
        """Copy the contexts of a layer's chunk, after all that the current stream has."""
        layer_idx, chunk = divmod(item, len(self._chunks))
        lengths, place = self._chunks[chunk], item % len(self._buffers)
        with self._side.fork(place, lengths):
            gather_dequant(
                self._host.layer(layer_idx),
                lengths.page_table,
                lengths.contexts,
                lengths.starts,
                out=self._buffers[place][: lengths.num_rows],
            )
            self._side.end(place)


def _rows_in(workspace: Tensor, format: CacheFormat) -> PagedCache:
    """As many rows of a format as the bytes of a workspace hold, on pages of one row."""
    memory = workspace.view(torch.uint8).flatten()
    row_bytes, scale_bytes = format.page_bytes(1), 0
    if format.scales_in == "tensor":
        scale_bytes = format.num_scales * format.scale_dtype.itemsize
    count = memory.numel() // (row_bytes + scale_bytes)
    if scale_bytes:
        count = count // 16 * 16  # so that they begin at a multiple of 16 bytes
    data = memory[: count * row_bytes].view(count, 1, row_bytes).view(format.storage_dtype)
    scales = None
    if scale_bytes:
        scales = memory[count * row_bytes : count * (row_bytes + scale_bytes)]
        scales = scales.view(format.scale_dtype).view(count, 1, format.num_scales)
    return PagedCache(data[..., : format.row_width], format, scales)


class _ChunkLengths(NamedTuple):
    """Where a chunk's rows go, contexts and new tokens apart."""

    num_rows: int
    page_table: Tensor
    starts: Tensor
    contexts: Tensor
    new_starts: Tensor
    new: Tensor

    @classmethod
    def of(cls, chunk: PrefillChunk, queries: Tensor) -> _ChunkLengths:
        # Copies, which begin aligned, so that all chunks have the same kernels.
        new, starts = queries[chunk.requests].clone(), chunk.workspace_starts.clone()
        contexts = chunk.seq_lens - new
        return cls(
            chunk.num_workspace_rows, chunk.page_table, starts, contexts, starts + contexts, new
        )

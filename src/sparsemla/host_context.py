"""Contexts of prefills on the GPU for a while, from rows in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sparsemla.cache import PagedCache, slots_of
from sparsemla.formats import CacheFormat, as_format
from sparsemla.host_cache import HostCache
from sparsemla.ops.gather import gather_dequant, to_slots
from sparsemla.ops.lists import own_positions
from sparsemla.ops.residency import fetch_rows
from sparsemla.plan import Plan, PrefillChunk, check_host_plan
from sparsemla.shards import ContextShard
from sparsemla.side_stream import SideStream
from sparsemla.validation import check_integer, check_integers, check_kind


class HostContext:
    """Contexts of prefills in a workspace on the GPU, copied a layer ahead of attention.

    A chunk of a long prompt attends to most of its context, so each layer's rows cross the link
    once, in order, while the layer before computes. A few new tokens of a long context, such as the
    next turn of a conversation, attend to less than they would copy: then the rows that they select
    are fetched, some tokens at a time. Rows of this step's own tokens are read when their layer has
    written them. There are two ways to attend:

    - :meth:`selected` takes a selection and gives rows in the host's format, by either way,
      whichever reads less. Attention has the bits of attention over a cache on the GPU.
    - :meth:`start` and :meth:`rows` give whole contexts in bfloat16, with the bits of
      :func:`sparsemla.gather_dequant` over a cache on the GPU, for prefills that convert first.

    Args:
        host: all rows.
        max_rows: bfloat16 rows of a workspace, the ``workspace_rows`` of the plans.
        ahead: workspaces that are filled before their turn; each takes ``max_rows * head_dim * 2``
            bytes, as does the one in use.
        shard: of this rank in a context-parallel group, without parts. Selections are global, plans
            those of :func:`plan_batch` with this shard.
        stream: for the copies; default a new one.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, below 1, a shard with parts, or a
            closed host.

    >>> from sparsemla import FP8_DS_MLA, HostCache, plan_batch
    >>> host = HostCache.allocate(FP8_DS_MLA, 8, 64, num_layers=2, device="cpu")
    >>> table = torch.tensor([[5, 2]], dtype=torch.int32)
    >>> plan = plan_batch([20], [100], table, page_size=64, workspace_rows=128)
    >>> context = HostContext(host, max_rows=128)
    >>> context.start(plan)
    >>> [context.rows(layer).shape for layer in range(2)]
    [torch.Size([100, 576]), torch.Size([100, 576])]
    >>> chosen = torch.zeros(20, 4, dtype=torch.int32)
    >>> [(tokens, rows.page_size) for tokens, rows, _ in context.selected(0, chosen, plan)]
    [(slice(0, 20, None), 1)]
    """

    def __init__(
        self,
        host: HostCache,
        *,
        max_rows: int,
        ahead: int = 1,
        shard: ContextShard | None = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        check_kind("host", host, HostCache)
        host.check_open()
        check_integer("max_rows", max_rows, 1)
        check_integer("ahead", ahead, 1)
        if shard is not None:
            check_kind("shard", shard, ContextShard)
            if shard.parts is not None:
                raise ValueError(f"shard must have no parts, got {shard}")
        if stream is not None:
            check_kind("stream", stream, torch.cuda.Stream)
        self._host, self.max_rows, self._ahead = host, int(max_rows), int(ahead)
        self.shard = shard
        self._side = SideStream(host.device, stream, ahead + 1)
        self._buffers = [
            torch.zeros(max_rows, host.format.head_dim, dtype=torch.bfloat16, device=host.device)
            for _ in range(ahead + 1)
        ]
        self._caches = [_rows_in(buffer, host.format) for buffer in self._buffers]
        self._side.owns(*self._buffers)
        self._plan: Plan | None = None
        """Whose contexts are copied."""
        self._chunks: list[_Converted] | list[_Copied] = []
        self._next = 0

    @classmethod
    def size(cls, format: CacheFormat | str, *, max_rows: int, ahead: int = 1) -> int:
        """Bytes of the device that contexts of this size take: :attr:`memory_bytes`.

        >>> HostContext.size("fp8_ds_mla", max_rows=131072) / 1e6
        301.989888
        """
        check_integer("max_rows", max_rows, 1)
        check_integer("ahead", ahead, 1)
        return (ahead + 1) * max_rows * as_format("format", format).head_dim * 2

    @property
    def memory_bytes(self) -> int:
        """Bytes of the workspaces."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def start(self, plan: Plan, layer_idx: int = 0) -> None:
        """Begin a step of :meth:`rows`: copy the contexts of a layer.

        Args:
            plan: with prefill chunks, made by :func:`sparsemla.plan_batch` with
                ``workspace_rows``. Its contexts, without the tokens of this step, must be in the
                host cache of every layer.
            layer_idx: the first layer of the step; a draft model's layers follow others.

        Raises:
            TypeError, ValueError: not a plan, one of another page size or shard, without chunks, or
                with a chunk beyond max_rows; a layer out of range; a host that is closed.
        """
        check_integer("layer_idx", layer_idx, 0, self._host.num_layers)
        self._check_plan(plan)
        if not plan.prefill_chunks:
            raise ValueError("plan must have prefill chunks, made with workspace_rows, got none")
        chunks = [_Converted.of(plan, chunk, self.shard) for chunk in plan.prefill_chunks]
        self._begin(plan, chunks, layer_idx)

    def continues(self, plan: Plan, layer_idx: int) -> bool:
        """Whether the layer comes next in the plan's step of :meth:`rows`, so its copy has begun.

        Raises:
            TypeError: not a plan, or layer_idx that is not an integer.
        """
        check_kind("plan", plan, Plan)
        check_integer("layer_idx", layer_idx)
        return self._continues(_Converted, plan, layer_idx)

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
        converts = isinstance(next(iter(self._chunks), None), _Converted)
        expected = divmod(self._next, len(self._chunks)) if converts else (0, 0)
        if not converts or self._next >= self._num_items or (layer_idx, chunk) != expected:
            got = f"got layer {layer_idx}, chunk {chunk}"
            if not converts or self._next >= self._num_items:
                raise ValueError(f"layer_idx: start(plan) must begin a step first, {got}")
            raise ValueError(
                f"layer_idx and chunk must come in order, layer {expected[0]}, chunk {expected[1]} "
                f"is next, {got}"
            )
        place = self._take(layer_idx, chunk)
        return self._buffers[place][: self._chunks[chunk].num_rows]

    def selects(self, plan: Plan, topk: int) -> bool:
        """Whether the prefills of a plan select fewer rows than half of their contexts have.

        Raises:
            TypeError, ValueError: not a plan, or topk that is not a positive integer.
        """
        check_kind("plan", plan, Plan)
        check_integer("topk", topk, 1)
        rows = sum(chunk.num_workspace_rows for chunk in plan.prefill_chunks)
        ranks = 1 if self.shard is None else self.shard.num_ranks
        return 2 * plan.num_prefill_tokens * topk < rows * ranks

    def selected(
        self, layer_idx: int, topk_indices: Tensor, plan: Plan
    ) -> Iterator[tuple[slice, PagedCache, Tensor]]:
        """Bring the rows that prefills select to the device, for some tokens at a time.

        If the plan has chunks and :meth:`selects` does not hold, a piece is a chunk: its contexts
        were copied while the layer before computed, where layers come in order. Otherwise a piece
        has the tokens whose selected rows fit into a workspace. The first piece is begun by this
        call, each other one while the one before is in use. A caller may leave early, as after an
        error: pieces on their way keep their lists. A step of :meth:`rows` ends.

        The layer's own rows of this step must have been written to ``host.layer(layer_idx)``.

        Args:
            layer_idx: the layer.
            topk_indices: int32, int64 or uint32 ``[T, K]``, positions in the request, -1 for none;
                for a shard ascending, then -1.
            plan: of these tokens, the prefills of a step, the same one for all layers.

        Yields:
            The tokens, a cache, and int32 ``[tokens, K]``, its rows of the tokens' selections, -1
            for none: the ``kv`` and ``topk_indices`` of :func:`sparsemla.sparse_prefill`.

        Raises:
            TypeError, ValueError: an argument of the wrong kind, shape or device; a workspace that
                is too small for a token or a chunk; a closed host.
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
        if self.shard is not None:
            topk_indices = own_positions(topk_indices, shard=self.shard)[0][:, 0]
        if plan.prefill_chunks and not self.selects(plan, max(shape[1], 1)):
            if not self._continues(_Copied, plan, layer_idx):
                chunks = [
                    _Copied.of(plan, chunk, self.shard, self._host.page_size)
                    for chunk in plan.prefill_chunks
                ]
                self._begin(plan, chunks, layer_idx)
            return self._whole(layer_idx, topk_indices, plan)
        self._plan, self._chunks = None, []
        most = self._caches[0].num_slots // max(shape[1], 1)
        if most < 1:
            raise ValueError(
                f"max_rows must have room for the {shape[1]} rows of a token, got {self.max_rows}"
            )
        return self._pieces(layer_idx, topk_indices, plan, most)

    def _whole(
        self, layer_idx: int, topk_indices: Tensor, plan: Plan
    ) -> Iterator[tuple[slice, PagedCache, Tensor]]:
        """Pieces of whole contexts."""
        rows = to_slots(
            topk_indices,
            plan.page_table,
            plan.request_ids,
            page_size=self._host.page_size,
            workspace_starts=plan.workspace_starts,
            prefill_request_ids=plan.prefill_request_ids,
        )
        for number, chunk in enumerate(plan.prefill_chunks):
            cache = self._caches[self._take(layer_idx, number)]
            yield chunk.tokens, cache, rows[chunk.tokens]

    def _pieces(
        self, layer_idx: int, topk_indices: Tensor, plan: Plan, most: int
    ) -> Iterator[tuple[slice, PagedCache, Tensor]]:
        """Pieces of selected rows; the first one is begun now."""
        source, width = self._host.layer(layer_idx), topk_indices.shape[1]
        slots = to_slots(
            topk_indices, plan.page_table, plan.request_ids, page_size=self._host.page_size
        )
        columns = torch.arange(width, dtype=torch.int32, device=slots.device)
        ends = torch.where(slots >= 0, columns + 1, 0)
        counts = ends.amax(1) if width else ends.new_zeros(len(ends))  # up to the last one
        rows = torch.arange(most * width, dtype=torch.int32, device=slots.device).view(most, width)
        pieces = [
            slice(first, min(first + most, len(slots))) for first in range(0, len(slots), most)
        ]

        def fetch(number: int) -> None:
            tokens, place = pieces[number], number % 2
            with self._side.fork(place, slots, rows, counts):
                fetch_rows(
                    source,
                    self._caches[place],
                    slots[tokens],
                    rows[: tokens.stop - tokens.start],
                    counts[tokens],
                )
                self._side.end(place)

        def joined() -> Iterator[tuple[slice, PagedCache, Tensor]]:
            for number, tokens in enumerate(pieces):
                self._side.join(number % 2)
                if number + 1 < len(pieces):
                    fetch(number + 1)
                listed = rows[: tokens.stop - tokens.start].where(slots[tokens] >= 0, -1)
                yield tokens, self._caches[number % 2], listed

        if pieces:
            fetch(0)
        return joined()

    def _check_plan(self, plan: Plan) -> None:
        self._host.check_open()
        check_host_plan(plan, self._host.page_size, self.shard)

    @property
    def _num_items(self) -> int:
        return self._host.num_layers * len(self._chunks)

    def _continues(self, kind: type, plan: Plan, layer_idx: int) -> bool:
        return (
            self._plan is plan
            and isinstance(self._chunks[0], kind)
            and self._next == layer_idx * len(self._chunks)
        )

    def _begin(self, plan: Plan, chunks: list[_Converted] | list[_Copied], layer_idx: int) -> None:
        """Copy the first contexts of a step that begins at a layer."""
        most = max(chunk.num_rows for chunk in chunks)
        limit = self.max_rows
        if isinstance(chunks[0], _Copied):
            limit = self._caches[0].num_slots
        if most > limit:
            raise ValueError(f"plan must have chunks of at most {limit} rows, got {most}")
        self._plan, self._chunks, self._next = plan, chunks, layer_idx * len(chunks)
        for item in range(self._next, min(self._next + self._ahead, self._num_items)):
            self._copy(item)

    def _take(self, layer_idx: int, chunk: int) -> int:
        """Add the step's own rows to a workspace, and begin to copy what comes next."""
        item, self._next = self._next, self._next + 1
        place = item % len(self._buffers)
        self._side.join(place)
        self._chunks[chunk].add(
            self._host.layer(layer_idx), self._buffers[place], self._caches[place]
        )
        # The workspace of the next copy was read last before this call.
        if item + self._ahead < self._num_items:
            self._copy(item + self._ahead)
        return place

    def _copy(self, item: int) -> None:
        """Copy the contexts of a layer's chunk, after all that the current stream has."""
        layer_idx, number = divmod(item, len(self._chunks))
        chunk, place = self._chunks[number], item % len(self._buffers)
        with self._side.fork(place, chunk):
            chunk.copy(self._host.layer(layer_idx), self._buffers[place], self._caches[place])
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


class _Converted(NamedTuple):
    """Where a chunk's rows go in bfloat16, contexts and new tokens apart."""

    num_rows: int
    page_table: Tensor
    starts: Tensor
    contexts: Tensor
    new_starts: Tensor
    new: Tensor

    @classmethod
    def of(cls, plan: Plan, chunk: PrefillChunk, shard: ContextShard | None) -> _Converted:
        # Copies, which begin aligned, so that all chunks have the same kernels.
        starts, contexts = chunk.workspace_starts.clone(), _contexts(plan, shard)[chunk.requests]
        new = _own_lengths(plan.seq_lens[chunk.requests], shard) - contexts
        contexts = contexts.clone()
        return cls(
            chunk.num_workspace_rows, chunk.page_table, starts, contexts, starts + contexts, new
        )

    def copy(self, source: PagedCache, workspace: Tensor, cache: PagedCache) -> None:
        """Copy the contexts."""
        rows = workspace[: self.num_rows]
        gather_dequant(source, self.page_table, self.contexts, self.starts, out=rows)

    def add(self, source: PagedCache, workspace: Tensor, cache: PagedCache) -> None:
        """Copy the rows of the step's tokens."""
        gather_dequant(
            source,
            self.page_table,
            self.new,
            self.new_starts,
            seq_starts=self.contexts,
            out=workspace[: self.num_rows],
        )


class _Copied(NamedTuple):
    """The slots of a chunk's rows and where these go, contexts and new tokens apart."""

    num_rows: int
    slots: Tensor
    rows: Tensor
    counts: Tensor
    new_slots: Tensor
    new_rows: Tensor
    new_counts: Tensor

    @classmethod
    def of(
        cls, plan: Plan, chunk: PrefillChunk, shard: ContextShard | None, page_size: int
    ) -> _Copied:
        starts, table, num_rows = chunk.workspace_starts, chunk.page_table, chunk.num_workspace_rows
        contexts = _contexts(plan, shard)[chunk.requests]
        rows = torch.arange(num_rows, dtype=torch.int32, device=starts.device)
        # A list for all workspace rows: those of new tokens come as zeros, until they are added.
        request = torch.searchsorted(starts, rows, right=True, out_int32=True) - 1
        position = rows - starts[request]
        position = position.where(position < contexts[request], -1)
        slots = slots_of(table, request, position, page_size).int()
        # A list of one row for each token
        ids = plan.request_ids[chunk.tokens] - chunk.requests.start
        first = plan.input_row_offsets[chunk.requests][ids]
        tokens = torch.arange(chunk.tokens.start, chunk.tokens.stop, device=starts.device)
        queries = plan.input_row_offsets.diff()[chunk.requests]
        new = (plan.seq_lens[chunk.requests] - queries)[ids] + tokens - first
        new = new if shard is None else shard.to_local(new)
        return cls(
            num_rows,
            slots[None],
            rows[None],
            rows.new_full((1,), num_rows),
            slots_of(table, ids, new, page_size).int()[:, None],
            (starts[ids] + new).int()[:, None],
            (new >= 0).int(),
        )

    def copy(self, source: PagedCache, workspace: Tensor, cache: PagedCache) -> None:
        """Copy the contexts."""
        fetch_rows(source, cache, self.slots, self.rows, self.counts)

    def add(self, source: PagedCache, workspace: Tensor, cache: PagedCache) -> None:
        """Copy the rows of the step's tokens."""
        fetch_rows(source, cache, self.new_slots, self.new_rows, self.new_counts)


def _contexts(plan: Plan, shard: ContextShard | None) -> Tensor:
    """int32 ``[B]``, tokens before the step of which this rank has rows."""
    return _own_lengths(plan.seq_lens - plan.input_row_offsets.diff(), shard)


def _own_lengths(lengths: Tensor, shard: ContextShard | None) -> Tensor:
    return lengths if shard is None else shard.lengths(lengths)

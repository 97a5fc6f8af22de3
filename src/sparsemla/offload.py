"""Latent rows in host memory, and a hot set of them on the GPU.

A page id names index keys on the GPU and latent rows on the host, so page tables, prefix sharing
and preemption of an engine stay as they are. :class:`HostCache` holds all rows. The GPU reads and
writes them over its link, as a tensor.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import NamedTuple, cast

import torch
from torch import Tensor, distributed

from sparsemla.cache import HostLayer, PagedCache
from sparsemla.formats import CacheFormat, as_format
from sparsemla.ops.gather import gather_dequant, to_slots
from sparsemla.ops.residency import (
    fetch_rows,
    forget_seats,
    resolve_rows,
    resolve_workspace_size,
)
from sparsemla.pinned import OS_PAGE, HostMemory, alias, available_bytes
from sparsemla.plan import HostInts, Plan, PrefillChunk, host_ints
from sparsemla.residency import EMPTY, RowTable
from sparsemla.shards import ContextShard
from sparsemla.validation import LIMIT, check_device, check_integer, check_integers, check_kind


class HostCache:
    """Latent rows of all layers in host memory, which the GPU reads and writes as tensors.

    :meth:`allocate` makes one. Ops that write caches write through to the host, and
    :func:`sparsemla.gather_dequant` and :func:`sparsemla.fetch_rows` read from it. Attention reads
    rows on the GPU and refuses these.

    The memory is registered with the GPU and so locked. :meth:`close`, or the end of a ``with``
    block, waits for the device and releases it; nothing else does. Layers must not be used after
    that. A forked process must not use a cache of its parent.

    Attributes:
        format: the format of a row.
        num_layers: number of layers.
        num_pages: pages of each layer.
        page_size: tokens of a page.
        device: the device that reads and writes the rows.
        memory_bytes: of host memory.

    >>> from sparsemla import FP8_DS_MLA
    >>> with HostCache.allocate(FP8_DS_MLA, 8, 64, num_layers=2, device="cpu") as host:
    ...     host.layer(1).write(torch.tensor([3, 64]), torch.randn(2, 576))
    ...     host
    HostCache(fp8_ds_mla, 8 pages of 64 rows in each of 2 layers, 671744 bytes for cpu)
    """

    def __init__(
        self,
        format: CacheFormat | str,
        num_pages: int,
        page_size: int,
        *,
        num_layers: int,
        device: torch.device | str | None = None,
    ) -> None:
        fmt = as_format("format", format)
        for name, size in (
            ("num_pages", num_pages),
            ("page_size", page_size),
            ("num_layers", num_layers),
        ):
            check_integer(name, size, 1)
        check_device("device", device)
        self.format, self.num_pages, self.page_size = fmt, int(num_pages), int(page_size)
        self.num_layers = int(num_layers)
        self.device = _indexed(torch.get_default_device() if device is None else device)
        self._pid = os.getpid()
        # [num_layers, num_pages] pages of rows, and of scales for formats with a tensor of them
        lead = self.num_layers, self.num_pages
        row_bytes, scale_bytes = fmt.page_bytes(self.page_size), 0
        if fmt.scales_in == "tensor":
            scale_bytes = self.page_size * fmt.num_scales * fmt.scale_dtype.itemsize
        self.memory_bytes = math.prod(lead) * (row_bytes + scale_bytes)
        if self.device.type != "meta":
            self._check_room()
        self._memories: list[HostMemory] = []
        self._layers: list[HostLayer] = []
        try:
            rows = self._take(*lead, row_bytes).view(fmt.storage_dtype)
            rows = rows[..., : self.page_size * fmt.row_width]
            rows = rows.unflatten(-1, (self.page_size, fmt.row_width))
            scales: Sequence[Tensor | None] = [None] * self.num_layers
            if scale_bytes:
                pages = self._take(*lead, scale_bytes).view(fmt.scale_dtype)
                scales = [*pages.unflatten(-1, (self.page_size, fmt.num_scales))]
            self._layers += map(HostLayer, rows, itertools.repeat(fmt), scales)
        except BaseException:
            self.close()
            raise

    @classmethod
    def allocate(
        cls,
        format: CacheFormat | str,
        num_pages: int,
        page_size: int,
        *,
        num_layers: int,
        device: torch.device | str | None = None,
        group: distributed.ProcessGroup | None = None,
    ) -> HostCache:
        """Allocate zeroed rows in memory of exactly their size, and register it with the GPU.

        This process touches the memory first, so that its NUMA policy decides where it lies
        (``numactl --membind``). Registration takes about 0.1 s for each GB. The layout is
        ``[num_layers, num_pages, page_size, row]``.

        Args:
            format: the format of a row, or its name.
            num_pages: pages of each layer.
            page_size: tokens of a page.
            num_layers: number of layers.
            device: a GPU; ``cpu`` for plain tensors by the same code, ``meta`` for tensors without
                memory; default torch's default device.
            group: ranks that allocate together, each its own cache. They take turns, because
                registrations of several processes at once stall a host, and all have a cache or
                none. A group of gloo waits without a GPU. Its timeout must cover all turns.

        Raises:
            TypeError, ValueError: an argument of the wrong kind, a size out of range, more bytes
                than the host has, memory that cannot be registered, or a rank of the group that
                failed. Nothing stays allocated or registered.
        """
        make = functools.partial(
            cls, format, num_pages, page_size, num_layers=num_layers, device=device
        )
        if group is None:
            return make()
        check_kind("group", group, distributed.ProcessGroup)
        return _in_turn(make, group)

    def __repr__(self) -> str:
        of_layers = f"{self.num_pages} pages of {self.page_size} rows in each of {self.num_layers}"
        size = "closed" if self.closed else f"{self.memory_bytes} bytes for {self.device}"
        return f"HostCache({self.format.name}, {of_layers} layers, {size})"

    def __enter__(self) -> HostCache:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def num_slots(self) -> int:
        """Rows of one layer, ``num_pages * page_size``."""
        return self.num_pages * self.page_size

    @property
    def closed(self) -> bool:
        """Whether the memory was released."""
        return not self._layers

    def layer(self, layer_idx: int) -> HostLayer:
        """The rows of a layer: on a GPU, a CUDA tensor over host memory.

        Raises:
            TypeError: layer_idx is not an integer.
            ValueError: layer_idx is out of range; the cache is closed, or belongs to the process
                that this one was forked from.
        """
        check_integer("layer_idx", layer_idx, 0, self.num_layers)
        self.check_open()
        return self._layers[layer_idx]

    def check_open(self) -> None:
        """Check that this process may use the rows.

        Raises:
            ValueError: the cache is closed, or belongs to the process that this one was forked
                from.
        """
        if self.closed:
            raise ValueError("host must be open, got a HostCache that was closed")
        # torch.compile does not trace getpid.
        if not torch.compiler.is_compiling() and os.getpid() != self._pid:
            raise ValueError(
                f"host must be of this process, {os.getpid()}, got a HostCache that process "
                f"{self._pid} allocated before it forked; allocate it in the process that uses it"
            )

    def close(self) -> None:
        """Wait for the device and release the memory; the second call does nothing.

        In a forked process, whose parent has the memory, it only forgets the rows.

        Raises:
            ValueError: the driver refused to take a registration back.
        """
        memories, self._memories = self._memories, []
        self._layers.clear()
        if self.device.type == "cuda" and memories and os.getpid() == self._pid:
            torch.cuda.synchronize(self.device)
            errors = [error for memory in memories for error in memory.release()]
            if errors:
                raise ValueError(f"host memory could not be unregistered: {'; '.join(errors)}")

    def _take(self, num_layers: int, num_pages: int, page_bytes: int) -> Tensor:
        """Memory ``[num_layers, num_pages, page_bytes]``, uint8, as the device sees it."""
        if self.device.type == "meta":
            return torch.empty(num_layers, num_pages, page_bytes, dtype=torch.uint8, device="meta")
        memory = HostMemory(num_layers * num_pages * page_bytes)
        self._memories.append(memory)
        seen = memory.bytes
        if self.device.type == "cuda":
            # A copy of a page then lies in one piece.
            memory.register(self.device, math.lcm(page_bytes, OS_PAGE))
            seen = alias(memory.bytes, self.device)
        return seen.view(num_layers, num_pages, page_bytes)

    def _check_room(self) -> None:
        """Check that the host has the bytes."""
        free = available_bytes()
        if free is not None and self.memory_bytes > free:
            fitting = free // (self.memory_bytes // self.num_pages)
            raise ValueError(
                f"num_pages must be at most {fitting}, for which {free} free bytes of the host "
                f"suffice, got {self.num_pages}, which take {self.memory_bytes}"
            )


class HotSelection(NamedTuple):
    """Where the selected rows of a layer are in :meth:`HotRows.layer`.

    Attributes:
        rows: int32 ``[T, K]``, in ascending order of the positions, -1 behind: ``topk_indices`` of
            :func:`sparsemla.sparse_decode`. ``[T, P, K]`` for a shard of P parts.
        counts: int32 ``[T]``, or ``[T, P]``, entries of each list: its ``topk_lengths``.
    """

    rows: Tensor
    counts: Tensor


class HotStats(NamedTuple):
    """What was found since the hot rows were made.

    Attributes:
        hits: selected rows that were on the GPU.
        misses: selected rows that were fetched.
        bytes: fetched over the link, of all layers.
    """

    hits: int
    misses: int
    bytes: int


class _Results(NamedTuple):
    """What :func:`sparsemla.resolve_rows` finds for the tokens of a step, and what follows.

    ``new_slots`` and ``new_rows`` are the misses of the step's own tokens, the last of each list;
    ``old_counts`` is the number of all others.
    """

    rows: Tensor
    counts: Tensor
    miss_slots: Tensor
    miss_rows: Tensor
    miss_counts: Tensor
    new_counts: Tensor
    old_counts: Tensor
    new_columns: Tensor
    new_slots: Tensor
    new_rows: Tensor


class HotRows:
    """The rows of each request that were selected last, on the GPU: exact LRU, exact results.

    A running request has a *seat*, and in each layer ``rows_per_seat`` rows. A decode step asks for
    its selection with :meth:`resolve`: rows that are missing are fetched from the host in place of
    the least recently used. Attention over :meth:`layer` has the bits of attention over a cache on
    the GPU: the same rows in the same order. Rows at or beyond a request's context are dropped
    first, so rejected drafts and rollbacks need no call. :meth:`forget` a seat when another request
    takes it. A step that writes rows of a request without ``resolve``, such as a prefill, must
    :meth:`truncate` its seat to the context before the step.

    The order of a layer in a step is: write the tokens' rows to ``host.layer(l)``, select, call
    ``resolve``, compute the queries, and attend to ``layer(l)``. From ``resolve`` on, the search
    and the fetch run on a stream beside the step's, and ``layer`` waits for it: the projections of
    the queries hide the latency of the link. Attention to the rows at hand while others come would
    hide more, but it would merge two partial results, which does not have the bits of attention
    over one list.

    Where layers share the selection of a *leader*, its ``resolve`` also fetches the rows of its
    followers, behind its own, so that the leader's layer hides them. It leaves out the rows of this
    step's tokens, which the followers have not written yet; the ``resolve`` of each adds them.

    No call but :meth:`stats` waits for the device, and steps can be captured in CUDA graphs. All
    layers use the same static tensors for their selections.

    Args:
        host: all rows; None to :meth:`attach` them later. Then format, num_layers and device are
            needed.
        seats: requests that decode at a time. They are numbered from 0.
        rows_per_seat: rows that a request has in each layer, H, at least ``query_len * topk``.
        topk: columns of a selection, K.
        query_len: most query tokens of a request in a step, 1 and its drafts.
        leaders: for each layer, the layer whose selection it shares; itself if it has an indexer.
            Default all have one.
        shard: of this rank in a context-parallel group. Selections and lengths are global, the page
            table is the rank's, and the selection that comes back is the rank's own part.
        stream: for the fetches; default a new one.
        format, num_layers, device: of ``host``.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or out of range; rows_per_seat below
            what one step may select; leaders that do not lead.

    >>> import torch
    >>> from sparsemla import FP8_DS_MLA, HostCache, plan_batch
    >>> host = HostCache.allocate(FP8_DS_MLA, 8, 64, num_layers=2, device="cpu")
    >>> hot = HotRows(host, seats=4, rows_per_seat=16, topk=8)
    >>> table = torch.tensor([[5, 2]], dtype=torch.int32)
    >>> plan = plan_batch([1], [100], table, page_size=64, workspace_rows=None)
    >>> chosen = torch.tensor([[3, 64, 99, -1, -1, -1, -1, -1]], dtype=torch.int32)
    >>> hot.resolve(0, chosen, plan, torch.tensor([2], dtype=torch.int32)).counts
    tensor([3], dtype=torch.int32)
    >>> hot.layer(0), hot.stats().misses
    (PagedCache(fp8_ds_mla, 64 pages of 1 rows on cpu), 3)
    """

    def __init__(
        self,
        host: HostCache | None,
        *,
        seats: int,
        rows_per_seat: int = 4096,
        topk: int,
        query_len: int = 1,
        leaders: Sequence[int] | None = None,
        shard: ContextShard | None = None,
        stream: torch.cuda.Stream | None = None,
        format: CacheFormat | str | None = None,
        num_layers: int | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        if host is not None:
            check_kind("host", host, HostCache)
            host.check_open()
            for name, value in (("format", format), ("num_layers", num_layers), ("device", device)):
                if value is not None:
                    raise ValueError(f"{name} must be None beside host, got {value!r}")
            format, num_layers, device = host.format, host.num_layers, host.device
        if format is None or num_layers is None:
            raise ValueError("format and num_layers must be given without host")
        self.format = as_format("format", format)
        check_device("device", device)
        self.device = _indexed(torch.get_default_device() if device is None else device)
        self._leaders = _checked_hot(
            num_layers, seats, rows_per_seat, topk, query_len, leaders, shard
        )
        if stream is not None:
            check_kind("stream", stream, torch.cuda.Stream)
        self.num_layers, self.seats, self.rows_per_seat = int(num_layers), int(seats), rows_per_seat
        self.topk, self.query_len, self._shard = topk, query_len, shard
        self._stream = stream
        if stream is None and self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)

        def integers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=self.device)

        led = sorted(set(self._leaders))
        num_rows, tokens = self.seats * rows_per_seat, self.seats * query_len
        self._rows = [
            PagedCache.allocate(self.format, num_rows, 1, device=self.device)
            for _ in range(self.num_layers)
        ]
        # The seats of all leaders in one table, so that one launch forgets a request.
        self._table = RowTable.allocate(len(led) * self.seats, rows_per_seat, device=self.device)
        self._first_seats = self.seats * torch.arange(len(led), device=self.device)[:, None]
        parts = (slice(i * self.seats, (i + 1) * self.seats) for i in range(len(led)))
        self._tables = {
            leader: RowTable(self._table.keys[s], self._table.rows[s], self._table.order[s])
            for leader, s in zip(led, parts, strict=True)
        }
        self._followers: dict[int, list[int]] = {leader: [] for leader in led}
        for layer, leader in enumerate(self._leaders):
            if layer != leader:
                self._followers[leader].append(layer)
        self._found = integers(len(led), 2, dtype=torch.int64)
        self._stats = dict(zip(led, self._found, strict=True))
        parted = () if shard is None or shard.parts is None else (len(shard.own_parts),)
        self._results = _Results(
            rows=integers(tokens, *parted, topk),
            counts=integers(tokens, *parted),
            miss_slots=integers(tokens, topk),
            miss_rows=integers(tokens, topk),
            miss_counts=integers(tokens),
            new_counts=integers(tokens),
            old_counts=integers(tokens),
            new_columns=integers(tokens, query_len, dtype=torch.int64),
            new_slots=integers(tokens, query_len),
            new_rows=integers(tokens, query_len),
        )
        self._results_of: dict[int, _Results] = {}
        """Views of the first tokens, by their number: making them takes longer than a check."""
        self._workspace = integers(
            resolve_workspace_size(self.seats, topk, rows_per_seat, max_query_len=query_len),
            dtype=torch.uint8,
        )
        self._columns = torch.arange(query_len, device=self.device)
        self._forked = None if self._stream is None else torch.cuda.Event()
        self._fetched = [None if self._stream is None else torch.cuda.Event() for _ in self._rows]
        self._waited: dict[int, tuple[object, ...]] = {}
        """Layers whose fetch runs, and the tensors that it reads."""
        self._unresolved: set[int] = set()
        """Followers that lack the rows of this step's tokens."""
        self._host: HostCache | None = None
        if host is not None:
            self.attach(host)

    @classmethod
    def size(
        cls,
        format: CacheFormat | str,
        *,
        num_layers: int,
        seats: int,
        rows_per_seat: int = 4096,
        topk: int,
        query_len: int = 1,
        leaders: Sequence[int] | None = None,
        shard: ContextShard | None = None,
    ) -> int:
        """Bytes of the device that hot rows of this size take: :attr:`memory_bytes`.

        >>> from sparsemla import FP8_DS_MLA
        >>> HotRows.size(FP8_DS_MLA, num_layers=61, seats=1, topk=2048) >> 20  # MiB
        159
        """
        fmt = as_format("format", format)
        leaders = _checked_hot(num_layers, seats, rows_per_seat, topk, query_len, leaders, shard)
        led, rows, tokens = len(set(leaders)), seats * rows_per_seat, seats * query_len
        scales = fmt.num_scales * fmt.scale_dtype.itemsize if fmt.scales_in == "tensor" else 0
        parts = 1 if shard is None or shard.parts is None else len(shard.own_parts)
        return (
            num_layers * rows * (fmt.page_bytes(1) + scales)
            + led * (rows * 12 + 16 + 8)  # a key, a row and an order; stats; first seats
            + tokens * (parts * (topk + 1) * 4 + topk * 8 + 12 + query_len * 16)
            + query_len * 8
            + resolve_workspace_size(seats, topk, rows_per_seat, max_query_len=query_len)
        )

    @property
    def memory_bytes(self) -> int:
        """Bytes of the device."""
        caches = [each for rows in self._rows for each in (rows.data, rows.scales)]
        table = self._table.keys, self._table.rows, self._table.order
        tensors = (
            *caches,
            *table,
            self._first_seats,
            self._found,
            self._workspace,
            self._columns,
            *self._results,
        )
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def attach(self, host: HostCache) -> None:
        """Take the rows of this cache, where hot rows had to be allocated before it.

        Raises:
            TypeError, ValueError: not a cache of the same format, layers and device, or hot rows
                that have one.
        """
        check_kind("host", host, HostCache)
        host.check_open()
        if self._host is not None:
            raise ValueError("host must be attached once, got a second HostCache")
        given = host.format, host.num_layers, host.device
        wanted = self.format, self.num_layers, self.device
        if given != wanted:
            raise ValueError(
                f"host must have format {wanted[0].name}, {wanted[1]} layers and device "
                f"{wanted[2]}, got {given[0].name}, {given[1]} and {given[2]}"
            )
        self._host = host

    def resolve(
        self,
        layer_idx: int,
        topk_indices: Tensor,
        plan: Plan,
        seats: Tensor,
        *,
        validate: bool = False,
    ) -> HotSelection:
        """Find the selected rows of a layer, and begin to fetch those that are missing.

        The tokens' own rows must be in ``host.layer(layer_idx)`` before. The result is ready on the
        current stream after :meth:`layer`. A follower returns its leader's selection.

        Args:
            layer_idx: the layer; in a step, each leader is followed by all of its followers.
            topk_indices: int32, int64 or uint32 ``[T, K]``, ascending positions in the request, -1
                behind, as :func:`sparsemla.indexer_topk` returns them. Not read for followers.
            plan: of decodes only, with the page size of the host.
            seats: int32, int64 or uint32 ``[B]``, the seat of each request, no two the same;
                requests of length 0 and those with a seat out of range select nothing.
            validate: read the integers, which waits for the device, and refuse lists that do not
                ascend, seats that occur twice, and values out of range.

        Returns:
            Views of static tensors, which the next leader overwrites.

        Raises:
            TypeError, ValueError: an argument of the wrong kind, dtype, shape or device; a plan
                with prefills, with more tokens than the seats have, or with another page size; a
                host that is missing or closed; a layer out of its order.
        """
        host = self._open_host()
        check_integer("layer_idx", layer_idx, 0, self.num_layers)
        check_kind("plan", plan, Plan)
        self._check_plan(plan, host)
        leader, found = self._leaders[layer_idx], self._first(plan.num_tokens)
        if leader == layer_idx:
            if self._unresolved:
                missing = ", ".join(map(str, sorted(self._unresolved)))
                raise ValueError(
                    f"layer_idx must be one of {missing} first, which share the selection that was "
                    f"resolved last, got {layer_idx}; after an interrupted step call forget()"
                )
            with self._beside(layer_idx, topk_indices, plan, seats):
                self._lead(host, layer_idx, topk_indices, plan, seats, found, validate)
                self._mark(layer_idx)
                if followers := self._followers[leader]:
                    self._fetch_ahead(host, followers, found)
            self._unresolved.update(followers)
        else:
            if layer_idx not in self._unresolved:
                raise ValueError(
                    f"layer_idx must be resolved once in a step, after its leader {leader}, "
                    f"got {layer_idx}"
                )
            with self._beside(layer_idx, plan):
                new = found.new_slots, found.new_rows, found.new_counts
                fetch_rows(host.layer(layer_idx), self._rows[layer_idx], *new)
                self._mark(layer_idx)
            self._unresolved.discard(layer_idx)
        return HotSelection(found.rows, found.counts)

    def layer(self, layer_idx: int) -> PagedCache:
        """The hot rows ``[seats * H, 1, row]`` of a layer; its fetch is over on the current stream.

        Raises:
            TypeError, ValueError: layer_idx is not an integer, or out of range.
        """
        check_integer("layer_idx", layer_idx, 0, self.num_layers)
        if self._waited.pop(layer_idx, None) is not None:
            fetched = self._fetched[layer_idx]
            if fetched is not None:
                torch.cuda.current_stream(self.device).wait_event(fetched)
        return self._rows[layer_idx]

    def forget(self, seats: HostInts | None = None) -> None:
        """Forget the rows of seats that other requests take, without waiting for the device.

        Args:
            seats: numbers on the host, or a tensor ``[n]`` of integers on the device, in which
                numbers out of range are ignored. Default all seats, as is needed after a step that
                an error interrupted.

        Raises:
            TypeError, ValueError: seats that are not integers, or out of range on the host.
        """
        if seats is None:
            self._unresolved.clear()
            self._waited.clear()
            seats = range(self.seats)
        inside, seats = self._checked_seats(seats)
        of_leaders = torch.where(inside, seats + self._first_seats, -1)
        forget_seats(self._table, of_leaders.flatten().int())

    def truncate(self, seats: HostInts, lengths: HostInts) -> None:
        """Drop the rows of seats at or beyond a length, without waiting for the device.

        ``resolve`` does so itself. Where rows are written in a step without it, those of an earlier
        life of their positions would stay: of a rejected draft, or from before a rollback.

        Args:
            seats: as for :meth:`forget`, no two the same.
            lengths: ``[n]``, tokens of each request before the step, on the host or the device.

        Raises:
            TypeError, ValueError: seats or lengths that are not integers, seats out of range on the
                host, or another number of lengths.
        """
        inside, seats = self._checked_seats(seats)
        lengths = self._on_device("lengths", lengths)
        if lengths.shape != seats.shape:
            raise ValueError(
                f"lengths must have shape {list(seats.shape)} like seats, got {list(lengths.shape)}"
            )
        if self._shard is not None:
            lengths = self._shard.lengths(lengths)
        # Those out of range have a place of their own, behind all seats.
        limits = torch.full((self.seats + 1,), EMPTY, dtype=torch.int64, device=self.device)
        limits.scatter_(0, torch.where(inside, seats, self.seats).long(), lengths.long())
        keys = self._table.keys.view(-1, self.seats, self.rows_per_seat)
        keys.masked_fill_(keys >= limits[:-1, None], EMPTY)

    def _checked_seats(self, seats: HostInts) -> tuple[Tensor, Tensor]:
        """Which seats exist, and the seats, on the device."""
        on_device = self._on_device("seats", seats, self.seats)
        return (on_device >= 0) & (on_device < self.seats), on_device

    def _on_device(self, name: str, values: HostInts, below: int = LIMIT) -> Tensor:
        """Integers on the device; those of the host are checked."""
        if not isinstance(values, Tensor) or values.device != self.device:
            numbers = host_ints(name, values)
            if numbers.size and numbers.max() >= below:
                raise ValueError(f"{name} must be below {below}, got {numbers.max()}")
            staging = torch.from_numpy(numbers)
            staging = staging.pin_memory() if self.device.type == "cuda" else staging
            values = staging.to(self.device, non_blocking=True)
        check_integers(name, values)
        if values.dim() != 1:
            raise ValueError(f"{name} must have shape [n], got {list(values.shape)}")
        return values.long() if values.dtype == torch.uint32 else values

    def stats(self) -> HotStats:
        """Hits, misses and fetched bytes so far; waits for the device."""
        found = dict(zip(self._stats, self._found.tolist(), strict=True))
        hits = sum(hit for hit, _ in found.values())
        misses = sum(missed for _, missed in found.values())
        rows = sum(
            missed * (1 + len(self._followers[leader])) for leader, (_, missed) in found.items()
        )
        return HotStats(hits, misses, rows * self.format.bytes_per_token)

    def _open_host(self) -> HostCache:
        if self._host is None:
            raise ValueError("host must be attached before the first step, got None")
        self._host.check_open()
        return self._host

    def _check_plan(self, plan: Plan, host: HostCache) -> None:
        limits = self.seats, self.seats * self.query_len, self.query_len
        sizes = plan.num_requests, plan.num_tokens, plan.max_query_len
        if plan.num_prefills or any(map(operator.gt, sizes, limits)):
            raise ValueError(
                f"plan must have decodes of at most {self.query_len} query tokens for {self.seats} "
                f"seats, got {plan}"
            )
        if plan.page_size != host.page_size:
            raise ValueError(
                f"plan must have pages of {host.page_size} tokens, as host has, "
                f"got {plan.page_size}"
            )

    def _first(self, tokens: int) -> _Results:
        """The results of the first tokens."""
        found = self._results_of.get(tokens)
        if found is None:
            found = _Results(*(result[:tokens] for result in self._results))
            if not torch.compiler.is_compiling():
                self._results_of[tokens] = found
        return found

    def _lead(
        self,
        host: HostCache,
        layer_idx: int,
        topk_indices: Tensor,
        plan: Plan,
        seats: Tensor,
        found: _Results,
        validate: bool,
    ) -> None:
        """Resolve a leader's selection and fetch its misses."""
        resolve_rows(
            topk_indices,
            plan.input_row_offsets,
            plan.seq_lens,
            seats,
            plan.page_table,
            self._tables[layer_idx],
            page_size=host.page_size,
            max_query_len=self.query_len,
            shard=self._shard,
            validate=validate,
            out=found.rows,
            counts=found.counts,
            miss_slots=found.miss_slots,
            miss_rows=found.miss_rows,
            miss_counts=found.miss_counts,
            new_counts=found.new_counts,
            workspace=self._workspace,
            stats=self._stats[layer_idx],
        )
        missing = found.miss_slots, found.miss_rows, found.miss_counts
        fetch_rows(host.layer(layer_idx), self._rows[layer_idx], *missing)

    def _fetch_ahead(self, host: HostCache, followers: Sequence[int], found: _Results) -> None:
        """Fetch a leader's misses for its followers, but for rows that they have yet to write."""
        torch.sub(found.miss_counts, found.new_counts, out=found.old_counts)
        torch.add(found.old_counts[:, None], self._columns, out=found.new_columns)
        found.new_columns.clamp_(max=self.topk - 1)
        torch.gather(found.miss_slots, 1, found.new_columns, out=found.new_slots)
        torch.gather(found.miss_rows, 1, found.new_columns, out=found.new_rows)
        missing = found.miss_slots, found.miss_rows, found.old_counts
        for follower in followers:
            fetch_rows(host.layer(follower), self._rows[follower], *missing)

    @contextlib.contextmanager
    def _beside(self, layer_idx: int, *read: object) -> Iterator[None]:
        """Run the block on the stream of the fetches, after all that the current stream has."""
        # Memory of a tensor that is dropped is given to the current stream at once: keep it.
        self._waited[layer_idx] = read
        if self._stream is None or self._forked is None:
            yield
            return
        self._forked.record(torch.cuda.current_stream(self.device))
        self._stream.wait_event(self._forked)
        with torch.cuda.stream(self._stream):
            yield

    def _mark(self, layer_idx: int) -> None:
        """Let :meth:`layer` wait for the fetches up to here."""
        fetched = self._fetched[layer_idx]
        if fetched is not None:
            fetched.record(self._stream)


def _checked_hot(
    num_layers: int,
    seats: int,
    rows_per_seat: int,
    topk: int,
    query_len: int,
    leaders: Sequence[int] | None,
    shard: ContextShard | None,
) -> list[int]:
    """Check the sizes of hot rows; the leader of each layer."""
    if shard is not None:
        check_kind("shard", shard, ContextShard)
    for name, size in (
        ("num_layers", num_layers),
        ("seats", seats),
        ("rows_per_seat", rows_per_seat),
        ("topk", topk),
        ("query_len", query_len),
    ):
        check_integer(name, size, 1)
    if rows_per_seat < query_len * topk:
        raise ValueError(
            f"rows_per_seat must be at least {query_len * topk}, as {query_len} query tokens may "
            f"select {topk} rows each, got {rows_per_seat}"
        )
    if leaders is None:
        leaders = range(num_layers)
    check_kind("leaders", leaders, Sequence)
    for leader in leaders:
        check_integer("leaders", leader)
    if len(leaders) != num_layers:
        raise ValueError(f"leaders must have {num_layers} layers, got {len(leaders)}")
    for layer, leader in enumerate(leaders):
        if leader != layer and (layer == 0 or leader != leaders[layer - 1]):
            raise ValueError(
                "leaders must name for each layer itself or the leader of the layer before, "
                f"got {leader} for layer {layer}"
            )
    most = (LIMIT - 1) // (len(set(leaders)) * rows_per_seat)
    if seats > most:
        raise ValueError(f"seats must be at most {most} for {rows_per_seat} rows each, got {seats}")
    return list(leaders)


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
        self._stream = stream
        if stream is None and host.device.type == "cuda":
            self._stream = torch.cuda.Stream(host.device)
        self._buffers = [
            torch.zeros(max_rows, host.format.head_dim, dtype=torch.bfloat16, device=host.device)
            for _ in range(ahead + 1)
        ]
        self._copied: list[torch.cuda.Event | None] = [
            None if self._stream is None else torch.cuda.Event() for _ in self._buffers
        ]
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
        if self._stream is not None:  # copies of a step that was left may read its lengths
            torch.cuda.current_stream(self._host.device).wait_stream(self._stream)
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
        self._wait(place)
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
        attention over a cache on the GPU.

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
            with self._beside(number % 2):
                target = places[number % 2]
                fetch_rows(source, target, slots[tokens], rows[:count], counts[:count])

        for number, tokens in enumerate(pieces):
            if number == 0:
                fetch(0)
            self._wait(number % 2)
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

    def _wait(self, place: int) -> None:
        """Let the current stream wait for what was put into a workspace."""
        copied = self._copied[place]
        if copied is not None:
            torch.cuda.current_stream(self._host.device).wait_event(copied)

    @contextlib.contextmanager
    def _beside(self, place: int) -> Iterator[None]:
        """Fill a workspace on the stream of the copies, after all that the current stream has."""
        copied = self._copied[place]
        if self._stream is None or copied is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._host.device))
        with torch.cuda.stream(self._stream):
            yield
        copied.record(self._stream)

    def _copy(self, item: int) -> None:
        """Copy the contexts of a layer's chunk, after all that the current stream has."""
        layer_idx, chunk = divmod(item, len(self._chunks))
        lengths, place = self._chunks[chunk], item % len(self._buffers)
        with self._beside(place):
            gather_dequant(
                self._host.layer(layer_idx),
                lengths.page_table,
                lengths.contexts,
                lengths.starts,
                out=self._buffers[place][: lengths.num_rows],
            )


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


def _indexed(device: torch.device | str) -> torch.device:
    """The device with its number.

    Raises:
        ValueError: neither a GPU, a CPU, nor torch's device without memory.
    """
    device = torch.device(device)
    if device.type not in ("cpu", "cuda", "meta"):
        raise ValueError(f"device must be a GPU or cpu, got {str(device)!r}")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _in_turn(make: Callable[[], HostCache], group: distributed.ProcessGroup) -> HostCache:
    """What ``make`` returns, called by one rank after the other; by all or, at last, by none."""
    made: HostCache | None = None
    try:
        for rank in range(group.size()):
            failure: Exception | None = None
            if rank == group.rank():
                try:
                    made = make()
                except Exception as error:
                    failure = error
            report = [None if failure is None else f"{type(failure).__name__}: {failure}"]
            # The next rank begins when it has this one's report.
            source = distributed.get_global_rank(group, rank)
            distributed.broadcast_object_list(report, source, group)
            if report[0] is not None:
                raise ValueError(
                    f"group: rank {rank} of {group.size()} could not allocate, so no rank did: "
                    f"{report[0]}"
                ) from failure
    except BaseException:
        if made is not None:
            made.close()
        raise
    return cast(HostCache, made)

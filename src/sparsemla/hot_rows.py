"""The rows of running requests that were selected last, on the GPU, over rows in host memory."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import CacheFormat, as_format
from sparsemla.host_cache import HostCache, indexed
from sparsemla.ops.residency import (
    fetch_rows,
    forget_seats,
    resolve_rows,
    resolve_workspace_size,
)
from sparsemla.plan import HostInts, Plan, check_host_plan, host_ints
from sparsemla.residency import EMPTY, RowTable
from sparsemla.shards import ContextShard
from sparsemla.side_stream import SideStream
from sparsemla.validation import LIMIT, check_device, check_integer, check_integers, check_kind


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
        shard: of this rank in a context-parallel group. Selections are global, plans those of
            :func:`plan_batch` with this shard, and the selection that comes back is the rank's own
            part.
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
        self.device = indexed(torch.get_default_device() if device is None else device)
        self._leaders = _checked_hot(
            num_layers, seats, rows_per_seat, topk, query_len, leaders, shard
        )
        if stream is not None:
            check_kind("stream", stream, torch.cuda.Stream)
        self.num_layers, self.seats, self.rows_per_seat = int(num_layers), int(seats), rows_per_seat
        self.topk, self.query_len, self._shard = topk, query_len, shard
        self._side = SideStream(self.device, stream, self.num_layers)

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
        self._unresolved: set[int] = set()
        """Followers that lack the rows of this step's tokens."""
        self._side.owns(*self._tensors())
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
        return sum(tensor.nbytes for tensor in self._tensors())

    def _tensors(self) -> list[Tensor]:
        """All tensors, which live as long as the hot rows."""
        scales = [rows.scales for rows in self._rows if rows.scales is not None]
        table = self._table.keys, self._table.rows, self._table.order
        others = self._first_seats, self._found, self._workspace, self._columns
        return [*(rows.data for rows in self._rows), *scales, *table, *others, *self._results]

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
                with prefills, with more tokens than the seats have, with another page size or with
                another shard; a host that is missing or closed; a layer out of its order.
        """
        host = self._open_host()
        check_integer("layer_idx", layer_idx, 0, self.num_layers)
        check_host_plan(plan, host.page_size, self._shard)
        self._check_sizes(plan)
        leader, found = self._leaders[layer_idx], self._first(plan.num_tokens)
        if leader == layer_idx:
            if self._unresolved:
                missing = ", ".join(map(str, sorted(self._unresolved)))
                raise ValueError(
                    f"layer_idx must be one of {missing} first, which share the selection that was "
                    f"resolved last, got {layer_idx}; after an interrupted step call forget()"
                )
            with self._side.fork(layer_idx, topk_indices, plan, seats):
                self._lead(host, layer_idx, topk_indices, plan, seats, found, validate)
                self._side.end(layer_idx)
                if followers := self._followers[leader]:
                    self._fetch_ahead(host, followers, found)
            self._unresolved.update(followers)
        else:
            if layer_idx not in self._unresolved:
                raise ValueError(
                    f"layer_idx must be resolved once in a step, after its leader {leader}, "
                    f"got {layer_idx}"
                )
            with self._side.fork(layer_idx):
                new = found.new_slots, found.new_rows, found.new_counts
                fetch_rows(host.layer(layer_idx), self._rows[layer_idx], *new)
                self._side.end(layer_idx)
            self._unresolved.discard(layer_idx)
        return HotSelection(found.rows, found.counts)

    def layer(self, layer_idx: int) -> PagedCache:
        """The hot rows ``[seats * H, 1, row]`` of a layer; its fetch is over on the current stream.

        Raises:
            TypeError, ValueError: layer_idx is not an integer, or out of range.
        """
        check_integer("layer_idx", layer_idx, 0, self.num_layers)
        self._side.join(layer_idx)
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
        self._side.join_all()  # a search of a step that was left may write the table
        if seats is None:
            self._unresolved.clear()
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
        self._side.join_all()
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

    def _check_sizes(self, plan: Plan) -> None:
        limits = self.seats, self.seats * self.query_len, self.query_len
        sizes = plan.num_requests, plan.num_tokens, plan.max_query_len
        if plan.num_prefills or any(map(operator.gt, sizes, limits)):
            raise ValueError(
                f"plan must have decodes of at most {self.query_len} query tokens for {self.seats} "
                f"seats, got {plan}"
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

"""Batch plans: all metadata of a batch that is the same for every layer, computed once per step.

A plan separates decode requests from prefill requests, gives each token its position and its cache
slot, and groups prefills into chunks that fit the workspace. :func:`plan_batch` takes lengths from
the host, :func:`plan_on_device` takes lengths on the device. The plan's tensors are on the page
table's device; planning never synchronises with it.

Shapes: B requests, T tokens including padding, P prefill requests, W pages per request.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from sparsemla.cache import slots_of, to_int32
from sparsemla.checks import INTEGERS, Checker
from sparsemla.shards import ContextShard
from sparsemla.validation import check_device, check_integer, check_integers, check_kind

HostInts: TypeAlias = Sequence[int] | np.ndarray | Tensor
"""Integers on the host: a list, a NumPy array or a CPU tensor."""


@dataclass(frozen=True, eq=False)
class PrefillChunk:
    """Consecutive prefill requests with contexts that fit the workspace together.

    Attributes:
        requests: indices of the chunk's n requests in the batch.
        tokens: indices of the chunk's query tokens in the batch.
        num_workspace_rows: workspace rows taken by the chunk's contexts, query tokens included.
        seq_lens: ``[n]`` int32, a view of :attr:`Plan.seq_lens`; with a shard, how much of each the
            rank keeps.
        page_table: ``[n, W]`` int32, a view of :attr:`Plan.page_table`.
        workspace_starts: ``[n]`` int32, a view of :attr:`Plan.workspace_starts`.

    >>> table = torch.arange(4, dtype=torch.int32).view(4, 1)
    >>> plan = plan_batch([1, 5, 7, 6], [4, 5, 7, 8], table, page_size=8, workspace_rows=12)
    >>> [(chunk.requests, chunk.num_workspace_rows) for chunk in plan.prefill_chunks]
    [(slice(1, 3, None), 12), (slice(3, 4, None), 8)]
    """

    requests: slice
    tokens: slice
    num_workspace_rows: int
    seq_lens: Tensor
    page_table: Tensor
    workspace_starts: Tensor

    def moved(self, num_requests: int, num_tokens: int) -> PrefillChunk:
        """The same chunk after the batch has dropped its first requests and tokens."""
        return replace(
            self,
            requests=slice(self.requests.start - num_requests, self.requests.stop - num_requests),
            tokens=slice(self.tokens.start - num_tokens, self.tokens.stop - num_tokens),
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """Metadata of one batch, decode requests first.

    :func:`plan_batch` and :func:`plan_on_device` make plans. Token ``i`` of request ``b`` is row
    ``input_row_offsets[b] + i`` of every tensor ``[T]``. Rows from ``input_row_offsets[B]`` on are
    padding. Lengths and positions count tokens, those of other ranks included.

    Attributes:
        num_requests: B, including padding requests.
        num_tokens: T, rows of the batch's queries and outputs, including padding.
        num_decodes: number of decode requests; they come first.
        num_prefills: P, number of prefill requests; they follow the decodes.
        num_decode_tokens: number of decode tokens; they come first.
        num_prefill_tokens: ``T - num_decode_tokens``.
        decode_query_len: query tokens of the longest decode, 0 without decodes. If all decodes have
            the same query length, ``num_decode_tokens == num_decodes * decode_query_len`` and the
            decode tokens can be viewed as ``[num_decodes, decode_query_len, ...]``.
        max_query_len: query tokens of the request that has the most.
        max_seq_len: longest sequence, context plus query.
        max_context_len: longest context before this step.
        page_size: tokens per page; every cache used with the plan must have this page size.
        input_row_offsets: ``[B + 1]`` int32, prefix sums of the query lengths.
        seq_lens: ``[B]`` int32, context plus query; 0 for padding requests.
        page_table: ``[B, W]`` int32, page ids.
        positions: ``[T]`` int64, position of each token in its request; 0 for padding.
        slot_mapping: ``[T]`` int64, cache slot of each token; -1 (write nothing) for padding.
        request_ids: ``[T]`` int32, request of each token; 0 for padding.
        prefill_request_ids: ``[T]`` int32, request of each prefill token counted from the first
            prefill; -1 for decode tokens and padding. None if no chunks are planned.
        workspace_starts: ``[P]`` int32, first workspace row of each prefill's context, relative to
            its chunk. None if no chunks are planned.
        prefill_chunks: the prefills in order, grouped to fit the workspace.
        max_prefill_seq_len: longest sequence of a prefill, context plus query.
        max_prefill_context_len: longest context of a prefill before this step.
        ratio: tokens of a cache row; above 1 in plans that :meth:`entries` makes.
        shard: the rank's share of every context; the page table, the slots and the prefill chunks
            are those of the rows that the rank keeps.

    :attr:`decodes` and :attr:`prefills` split the plan of a mixed batch for the two branches:

    >>> table = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)
    >>> plan = plan_batch([1, 1, 5], [9, 3, 12], table, page_size=8, workspace_rows=None)
    >>> plan.decodes.num_tokens, plan.prefills.num_tokens
    (2, 5)
    >>> plan.prefills.input_row_offsets, plan.prefills.positions
    (tensor([0, 5], dtype=torch.int32), tensor([ 7,  8,  9, 10, 11]))
    >>> plan
    Plan(2 decodes with 2 tokens, 1 prefills with 5, up to 12 long, pages of 8 rows on cpu)
    """

    num_requests: int
    num_tokens: int
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    decode_query_len: int
    max_query_len: int
    max_seq_len: int
    max_context_len: int
    page_size: int
    input_row_offsets: Tensor
    seq_lens: Tensor
    page_table: Tensor
    positions: Tensor
    slot_mapping: Tensor
    request_ids: Tensor
    prefill_request_ids: Tensor | None
    workspace_starts: Tensor | None
    prefill_chunks: tuple[PrefillChunk, ...]
    max_prefill_seq_len: int = 0
    max_prefill_context_len: int = 0
    ratio: int = 1
    shard: ContextShard | None = None

    def __repr__(self) -> str:
        """Sizes; no values, for which a GPU would be waited for."""
        return (
            f"Plan({self.num_decodes} decodes with {self.num_decode_tokens} tokens, "
            f"{self.num_prefills} prefills with {self.num_prefill_tokens}, up to "
            f"{self.max_seq_len} long, pages of {self.page_size} rows on {self.page_table.device})"
        )

    @property
    def decodes(self) -> Plan:
        """The plan of the decode requests alone; its tensors are views.

        ``max_seq_len`` and ``max_context_len`` still bound the whole batch.
        """
        requests, tokens = slice(self.num_decodes), slice(self.num_decode_tokens)
        return replace(
            self,
            num_requests=self.num_decodes,
            num_tokens=self.num_decode_tokens,
            num_prefills=0,
            num_prefill_tokens=0,
            max_query_len=self.decode_query_len,
            input_row_offsets=self.input_row_offsets[: self.num_decodes + 1],
            seq_lens=self.seq_lens[requests],
            page_table=self.page_table[requests],
            positions=self.positions[tokens],
            slot_mapping=self.slot_mapping[tokens],
            request_ids=self.request_ids[tokens],
            prefill_request_ids=None,
            workspace_starts=None,
            prefill_chunks=(),
            max_prefill_seq_len=0,
            max_prefill_context_len=0,
        )

    @functools.cached_property
    def prefills(self) -> Plan:
        """The plan of the prefill requests alone, including padding tokens.

        Requests and tokens are counted from the first prefill. ``input_row_offsets`` and
        ``request_ids`` are new tensors, computed on the device at the first access; the other
        tensors are views.
        """
        requests = slice(self.num_decodes, None)
        tokens = slice(self.num_decode_tokens, None)
        offsets, ids = self.input_row_offsets[requests], self.prefill_request_ids
        return replace(
            self,
            num_requests=self.num_prefills,
            num_tokens=self.num_prefill_tokens,
            num_decodes=0,
            num_decode_tokens=0,
            decode_query_len=0,
            max_query_len=self.max_query_len if self.num_prefills else 0,
            max_seq_len=self.max_prefill_seq_len,
            max_context_len=self.max_prefill_context_len,
            input_row_offsets=offsets - offsets[:1],
            seq_lens=self.seq_lens[requests],
            page_table=self.page_table[requests],
            positions=self.positions[tokens],
            slot_mapping=self.slot_mapping[tokens],
            # Padding belongs to the batch's first request, and here to the first prefill.
            request_ids=(self.request_ids[tokens] - self.num_decodes).clamp_(min=0),
            prefill_request_ids=None if ids is None else ids[tokens],
            prefill_chunks=tuple(
                chunk.moved(self.num_decodes, self.num_decode_tokens)
                for chunk in self.prefill_chunks
            ),
        )

    def clamp_topk(self, topk: int | Tensor) -> Tensor:
        """``topk_lengths`` for selections with their valid entries first.

        ``min(topk, seq_lens[request_ids] // ratio)``. A request with fewer than ``topk`` keys
        leaves the end of its selection unused, and some selectors (MAX's, for example) leave
        garbage there. With these lengths the ops ignore it.

        Args:
            topk: entries per selection, at least 1; or ``[B]`` int32, int64 or uint32 on the plan's
                device, one number per request.

        Returns:
            ``[T]`` int32.

        Raises:
            TypeError: topk is neither an integer nor a tensor of integers.
            ValueError: topk is below 1, or a tensor of another shape or device.

        >>> table = torch.tensor([[0], [1]], dtype=torch.int32)
        >>> plan = plan_batch([1, 1], [5, 2], table, page_size=8, workspace_rows=None)
        >>> plan.clamp_topk(4)
        tensor([4, 2], dtype=torch.int32)
        """
        check = Checker("clamp_topk")
        counts = self.seq_lens if self.ratio == 1 else self.seq_lens // self.ratio
        if isinstance(topk, Tensor):
            check.tensor("seq_lens", self.seq_lens, "B", INTEGERS)
            topk = check.tensor("topk", topk, "B", INTEGERS)
            lengths = torch.minimum(counts, topk).int()
        else:
            check.positive("topk", topk)
            lengths = counts.clamp(max=topk)
        return lengths[self.request_ids]

    def entries(
        self,
        page_table: Tensor,
        *,
        ratio: int,
        page_size: int,
        buffers: PlanBuffers | None = None,
    ) -> Plan:
        """The plan of the same batch for caches with a row, an *entry*, for every ``ratio`` tokens.

        Layers of several kinds keep caches with their own page tables. Lengths, positions and
        requests are those of this plan and count tokens. The page table and the slot mapping are
        those of the entries: the slot of entry ``p // ratio`` for the token at position ``p`` that
        completes it, as of :func:`entry_slots`, and -1 for other tokens and padding. No prefill
        chunks are planned. The call does not wait for the device and can be captured in a graph.

        Args:
            page_table: ``[B, W]`` int32, int64 or uint32, page ids of the entries.
            ratio: tokens of an entry; with 1, caches of tokens on other pages.
            page_size: entries of a page.
            buffers: static tensors for the page table and the slot mapping; new ones if None.

        Raises:
            TypeError: an argument of the wrong kind or dtype.
            ValueError: a page table of another shape or device, or without room for the entries of
                the longest sequence; buffers that are too small; a plan with a shard, as ranks do
                not share entries.

        >>> tokens, pages = torch.tensor([[5, 2, 7]]), torch.tensor([[3]])
        >>> plan = plan_batch([9], [9], tokens.int(), page_size=4, workspace_rows=None)
        >>> plan.entries(pages.int(), ratio=4, page_size=2).slot_mapping
        tensor([-1, -1, -1,  6, -1, -1, -1,  7, -1])
        """
        if buffers is not None:
            check_kind("buffers", buffers, PlanBuffers)
        if self.shard is not None:
            raise ValueError(f"shard of the plan must be None for entries, got {self.shard}")
        page_table = _checked_table(page_table, self.num_requests, page_size)
        check_integer("ratio", ratio, 1)
        if page_table.device != self.positions.device:
            raise ValueError(
                f"page_table must be on the plan's device {self.positions.device}, "
                f"got {page_table.device}"
            )
        needed, capacity = self.max_seq_len // ratio, page_table.shape[1] * page_size
        if needed > capacity:
            raise ValueError(
                f"page_table must have room for {needed} entries, one for every {ratio} of "
                f"{self.max_seq_len} tokens, got {page_table.shape[1]} pages of {page_size}"
            )
        target, page_table = _buffers_for(page_table, self.num_tokens, buffers)
        tokens = torch.arange(self.num_tokens, device=page_table.device)
        completes = (tokens < self.input_row_offsets[-1]) & ((self.positions + 1) % ratio == 0)
        entries = torch.div(self.positions, ratio, rounding_mode="floor").where(completes, -1)
        slots = slots_of(page_table, self.request_ids, entries, page_size)
        _write(slots, target.slot_mapping, padding=-1)
        return replace(
            self,
            page_size=int(page_size),
            page_table=page_table,
            slot_mapping=target.slot_mapping[: self.num_tokens],
            prefill_request_ids=None,
            workspace_starts=None,
            prefill_chunks=(),
            ratio=int(ratio),
        )


class PlanBuffers:
    """Static tensors for plans that a CUDA graph reads.

    Every plan made with ``buffers=`` consists of views of these tensors and overwrites the previous
    plan, so a graph captured with one plan serves the next batch when it is replayed. Unused tokens
    and requests become padding: request 0, position 0, slot -1, length 0. Unused page table rows
    keep their old values, as do the tensors of prefill chunks if the new batch has none; no op
    reads them.

    A graph also bakes in the Python integers of the plan used for its capture. Capture it with the
    largest number of requests, ``decode_query_len`` and ``seq_lens`` to be served, and pad smaller
    batches with requests of query length 0.

    Args:
        max_requests: the largest number of requests in a batch.
        max_tokens: the largest number of tokens in a batch, including padding.
        max_pages_per_request: columns of the page table; narrower tables are padded with -1.
        device: device of the tensors.

    Raises:
        TypeError: a size that is not an integer, or a device that is not a device.
        ValueError: a size that is negative or at least 2^31, or an unknown device.

    >>> buffers = PlanBuffers(max_requests=4, max_tokens=8, max_pages_per_request=2, device="cpu")
    >>> page_table = torch.tensor([[5, 6], [3, 4], [0, 0]], dtype=torch.int32)
    >>> plan = plan_batch(
    ...     [1, 1, 0], [9, 3, 0], page_table, page_size=8, workspace_rows=None, buffers=buffers
    ... )
    >>> plan.slot_mapping, plan.slot_mapping.data_ptr() == buffers.slot_mapping.data_ptr()
    (tensor([48, 26, -1]), True)
    """

    def __init__(
        self,
        max_requests: int,
        max_tokens: int,
        max_pages_per_request: int,
        device: torch.device | str,
    ) -> None:
        for name, size in (
            ("max_requests", max_requests),
            ("max_tokens", max_tokens),
            ("max_pages_per_request", max_pages_per_request),
        ):
            check_integer(name, size)
        check_device("device", device)

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.input_row_offsets = zeros(max_requests + 1)
        self.seq_lens = zeros(max_requests)
        self.page_table = zeros(max_requests, max_pages_per_request)
        self.positions = zeros(max_tokens, dtype=torch.int64)
        self.slot_mapping = zeros(max_tokens, dtype=torch.int64).fill_(-1)
        self.request_ids = zeros(max_tokens)
        self.prefill_request_ids = zeros(max_tokens).fill_(-1)
        self.workspace_starts = zeros(max_requests)
        self.prefill_rows = zeros(max_requests)

    def check_fits(self, num_tokens: int, page_table: Tensor) -> None:
        """Check that these buffers can hold a batch.

        Raises:
            ValueError: the batch is on another device, or has too many requests, tokens or pages.
        """
        if page_table.device != self.page_table.device:
            raise ValueError(
                f"buffers must be on page_table's device {page_table.device}, "
                f"got {self.page_table.device}"
            )
        for name, needed, limit in (
            ("max_requests", page_table.shape[0], self.page_table.shape[0]),
            ("max_tokens", num_tokens, self.request_ids.shape[0]),
            ("max_pages_per_request", page_table.shape[1], self.page_table.shape[1]),
        ):
            if needed > limit:
                raise ValueError(f"buffers must have {name} of at least {needed}, got {limit}")


def host_ints(name: str, values: HostInts) -> np.ndarray:
    """``values`` as a one-dimensional int64 array, checked to be non-negative."""
    if isinstance(values, Tensor):
        if values.device.type != "cpu":
            raise ValueError(
                f"{name} must be on the host, got a tensor on {values.device}; plan_on_device "
                "takes lengths on a device"
            )
        values = values.numpy()
    try:
        array = np.asarray(values)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must hold integers, got {values!r}") from error
    if array.ndim != 1:
        raise ValueError(f"{name} must have one dimension, got shape {list(array.shape)}")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got {array.dtype}")
    if array.size and array.min() < 0:
        request = int(array.argmin())
        raise ValueError(f"{name} must not be negative, got {array[request]} for request {request}")
    return array.astype(np.int64)


def int32_pages(page_table: Tensor) -> Tensor:
    """Page ids as int32. Ids from 2^31 on turn negative: no cache has that many pages."""
    if page_table.dtype == torch.uint32:
        return page_table.view(torch.int32)
    return page_table if page_table.dtype == torch.int32 else to_int32(page_table)


def _checked_table(page_table: Tensor | None, num_requests: int, page_size: int) -> Tensor:
    """Check the page table and return it as int32."""
    if not isinstance(page_table, Tensor):
        raise TypeError(f"page_table must be a tensor, got {type(page_table).__name__}")
    check_integers("page_table", page_table)
    if page_table.dim() != 2 or page_table.shape[0] != num_requests:
        raise ValueError(
            f"page_table must have shape [{num_requests}, pages per request], "
            f"got {list(page_table.shape)}"
        )
    check_integer("page_size", page_size, 1)
    return int32_pages(page_table)


def _check_either(**arguments: object) -> None:
    """Check that exactly one of two arguments is given."""
    first, second = arguments
    given = sum(value is not None for value in arguments.values())
    if given != 1:
        raise ValueError(
            f"either {first} or {second} must be given, got {'both' if given else 'neither'}"
        )


def _host_lengths(
    query_lens: HostInts | None,
    seq_lens: HostInts | None,
    input_row_offsets: HostInts | None,
    cache_lengths: HostInts | None,
) -> tuple[np.ndarray, np.ndarray]:
    """New tokens and tokens of each request."""
    if query_lens is not None:
        queries = host_ints("query_lens", query_lens)
    else:
        offsets = host_ints("input_row_offsets", cast(HostInts, input_row_offsets))
        queries = np.diff(offsets)
        if not offsets.size or offsets[0] != 0 or (queries < 0).any():
            raise ValueError(f"input_row_offsets must ascend from 0, got {offsets.tolist()}")
    name = "seq_lens" if cache_lengths is None else "cache_lengths"
    lens = host_ints(name, cast(HostInts, seq_lens if cache_lengths is None else cache_lengths))
    if lens.size != queries.size:
        raise ValueError(
            f"{name} must have one length for each of {queries.size} requests, got {lens.size}"
        )
    return queries, lens if cache_lengths is None else lens + queries


def _check_batch(
    queries: np.ndarray,
    lens: np.ndarray,
    page_table: Tensor,
    page_size: int,
    shard: ContextShard | None,
) -> None:
    """Check the lengths against each other and against the page table."""
    too_short = lens < queries
    if too_short.any():
        request = int(too_short.argmax())
        raise ValueError(
            f"seq_lens must include the query tokens, got length {lens[request]} "
            f"and {queries[request]} query tokens for request {request}"
        )
    check_longest(np.where(queries > 0, lens, 0), page_table.shape[1], page_size, shard)


def longest_context(num_pages: int, page_size: int, shard: ContextShard | None) -> int:
    """Tokens of the longest context with these pages, on each rank of a shard's group."""
    num_rows = num_pages * int(page_size)
    return num_rows if shard is None else shard.longest_context(num_rows)


def check_longest(
    lens: np.ndarray, num_pages: int, page_size: int, shard: ContextShard | None
) -> None:
    """Check that the longest of ``lens`` has as many pages as it needs, on every rank."""
    limit = longest_context(num_pages, page_size, shard)
    if lens.max(initial=0) > limit:
        request = int((lens > limit).argmax())
        ranks = "" if shard is None else f" on each of {shard.num_ranks} ranks"
        raise ValueError(
            f"seq_lens must be at most {limit}, {num_pages} pages of {page_size} tokens{ranks}, "
            f"got {lens[request]} for request {request}"
        )


def check_host_plan(plan: Plan, page_size: int, shard: ContextShard | None) -> None:
    """Check a plan over the pages of a host cache, of which the ranks of ``shard`` have parts."""
    check_kind("plan", plan, Plan)
    if plan.page_size != page_size:
        raise ValueError(
            f"plan must have pages of {page_size} tokens, as host has, got {plan.page_size}"
        )
    if plan.shard not in (None, shard):
        raise ValueError(f"plan must have shard {shard}, got {plan.shard}")


def _check_shard(shard: ContextShard | None) -> None:
    if shard is not None:
        check_kind("shard", shard, ContextShard)


def _own_slots(
    page_table: Tensor,
    request_ids: Tensor,
    positions: Tensor,
    page_size: int,
    shard: ContextShard | None,
) -> Tensor:
    """Slots of positions of whole contexts; -1 for those that other ranks keep."""
    rows = positions if shard is None else shard.to_local(positions)
    return slots_of(page_table, request_ids, rows, page_size)


def _rows_of(lens: np.ndarray, shard: ContextShard) -> np.ndarray:
    """How many positions of contexts a rank keeps."""
    return shard.lengths(torch.from_numpy(lens)).numpy()


def _buffers_for(
    page_table: Tensor, num_tokens: int, buffers: PlanBuffers | None
) -> tuple[PlanBuffers, Tensor]:
    """The buffers for a plan's tensors, and its page table, copied if the caller gave buffers."""
    if buffers is None:
        return PlanBuffers(page_table.shape[0], num_tokens, 0, page_table.device), page_table
    buffers.check_fits(num_tokens, page_table)
    num_requests, num_pages = page_table.shape
    buffers.page_table[:num_requests, :num_pages].copy_(page_table)
    buffers.page_table[:num_requests, num_pages:].fill_(-1)
    return buffers, buffers.page_table[:num_requests]


def _write(values: Tensor, buffer: Tensor, *, padding: int | Tensor) -> None:
    """Overwrite all of ``buffer`` with ``values``, then ``padding``."""
    buffer[: len(values)] = values
    buffer[len(values) :] = padding


def _send(values: np.ndarray, buffer: Tensor, *, padding: int) -> Tensor:
    """:func:`_write` for values on the host; returns the view that holds them.

    Each call takes new staging memory. The next step could overwrite a persistent staging buffer
    before the device has copied from it; PyTorch reuses pinned memory only after its copies finish.
    """
    staging = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu", pin_memory=buffer.is_cuda)
    host = staging.numpy()
    host[: values.size] = values
    host[values.size :] = padding
    buffer.copy_(staging, non_blocking=True)
    return buffer[: values.size]


def split_decodes_and_prefills(
    query_lens: HostInts, *, decode_threshold: int = 1, require_uniform: bool = True
) -> tuple[int, int, int, int]:
    """Count the decode requests of a batch, which come first, and its prefill requests.

    The first rule that applies decides:

    1. No query is longer than ``decode_threshold``, and ``require_uniform`` is False or the
       threshold is at most 1: all requests are decodes.
    2. The first query is longer than the threshold: all requests are prefills.
    3. The prefills begin at the first query that is longer than the threshold or, with
       ``require_uniform``, neither 0 (padding) nor as long as the first query. Without such a query
       all requests are decodes.

    Args:
        query_lens: ``[B]`` host integers; 0 for padding requests.
        decode_threshold: the largest number of query tokens of a decode; above 1 with speculative
            decoding.
        require_uniform: whether all decodes must have the same query length.

    Returns:
        ``(num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens)``.

    Raises:
        TypeError: query_lens does not hold integers.
        ValueError: query_lens is not one-dimensional, not on the host, or negative somewhere.

    Source: ``split_decodes_and_prefills`` of vLLM (``vllm/v1/attention/backends/utils.py``).

    >>> split_decodes_and_prefills([1, 1, 7, 1])
    (2, 2, 2, 8)
    >>> split_decodes_and_prefills([3, 3, 2, 0], decode_threshold=4)
    (2, 2, 6, 2)
    >>> split_decodes_and_prefills([3, 3, 2, 0], decode_threshold=4, require_uniform=False)
    (4, 0, 8, 0)
    """
    lens = host_ints("query_lens", query_lens)
    check_integer("decode_threshold", decode_threshold)
    check_kind("require_uniform", require_uniform, bool)
    num_requests, num_tokens = lens.size, int(lens.sum())
    all_decode = (num_requests, 0, num_tokens, 0)
    first_len = lens[0] if num_requests else 0

    if lens.max(initial=0) <= decode_threshold and (not require_uniform or decode_threshold <= 1):
        return all_decode
    if first_len > decode_threshold:
        return 0, num_requests, 0, num_tokens

    is_prefill = (lens != first_len) & (lens != 0) if require_uniform else lens > decode_threshold
    if not is_prefill.any():
        return all_decode
    num_decodes = int(is_prefill.argmax())
    num_decode_tokens = int(lens[:num_decodes].sum())
    return (
        num_decodes,
        num_requests - num_decodes,
        num_decode_tokens,
        num_tokens - num_decode_tokens,
    )


def split_prefill_chunks(seq_lens: HostInts, workspace_rows: int) -> list[tuple[int, int]]:
    """Group consecutive requests greedily into chunks of at most ``workspace_rows`` tokens.

    Args:
        seq_lens: ``[P]`` host integers, context plus query of each prefill. A request of length 0
            joins the previous chunk.
        workspace_rows: rows of the workspace, one per token.

    Returns:
        ``(start, stop)`` of each chunk: its requests are ``start .. stop - 1``.

    Raises:
        TypeError: seq_lens does not hold integers.
        ValueError: one request alone exceeds the workspace; or seq_lens is not one-dimensional, not
            on the host, or negative somewhere.

    Source: ``split_prefill_chunks`` of vLLM (``vllm/v1/attention/backends/utils.py``).

    >>> split_prefill_chunks([10, 15, 20, 5], workspace_rows=30)
    [(0, 2), (2, 4)]
    """
    lens = host_ints("seq_lens", seq_lens)
    check_integer("workspace_rows", workspace_rows)
    if lens.size and lens.max() > workspace_rows:
        request = int((lens > workspace_rows).argmax())
        raise ValueError(
            f"workspace_rows must hold every prefill request, got {workspace_rows} rows and "
            f"length {lens[request]} for prefill request {request}"
        )
    ends = lens.cumsum().tolist()
    chunks = []
    start = rows_before = 0
    while start < len(ends):
        stop = bisect_right(ends, rows_before + workspace_rows, lo=start)
        chunks.append((start, stop))
        start, rows_before = stop, ends[stop - 1]
    return chunks


def plan_batch(
    query_lens: HostInts | None = None,
    seq_lens: HostInts | None = None,
    page_table: Tensor | None = None,
    *,
    input_row_offsets: HostInts | None = None,
    cache_lengths: HostInts | None = None,
    page_size: int,
    workspace_rows: int | None,
    decode_threshold: int = 1,
    require_uniform: bool = True,
    num_padded_tokens: int | None = None,
    shard: ContextShard | None = None,
    buffers: PlanBuffers | None = None,
) -> Plan:
    """Plan one batch from lengths on the host.

    Token ``i`` of request ``b`` has the position ``p = seq_lens[b] - query_lens[b] + i`` and the
    slot ``page_table[b, p // page_size] * page_size + p % page_size``. Within a prefill chunk the
    contexts are packed into the workspace from row 0.

    With a ``shard``, lengths are of whole contexts and equal on all ranks. The page table has the
    pages of the rows that this rank keeps, and room for :meth:`ContextShard.longest` of a context,
    which also takes as many workspace rows: all ranks have the same chunks. The slot of a token
    that another rank keeps is -1.

    A request of query length 0 is padding; its sequence length is ignored. With
    ``require_uniform``, padding must come after all other decodes, and in a batch without prefills
    each padding request adds ``decode_query_len`` padding tokens: T is ``B * decode_query_len``.

    Args:
        query_lens: ``[B]`` host integers, new tokens of each request; decodes first.
        seq_lens: ``[B]`` host integers, context plus new tokens.
        page_table: ``[B, W]`` int32, int64 or uint32, page ids; the plan is made on its device.
        input_row_offsets: ``[B + 1]`` host integers, in place of query_lens: their prefix sums.
        cache_lengths: ``[B]`` host integers, in place of seq_lens: context without new tokens.
        page_size: tokens per page.
        workspace_rows: rows of the workspace for gathered prefill contexts; None plans no chunks,
            for prefills that read the cache in place.
        decode_threshold: the largest number of query tokens of a decode, see
            :func:`split_decodes_and_prefills`.
        require_uniform: whether all decodes must have the same query length.
        num_padded_tokens: T, if the batch's tensors have more rows than tokens.
        shard: this rank's share of every context, for ranks that share contexts.
        buffers: static tensors to write the plan into; new tensors if None.

    Raises:
        TypeError: lengths that are not integers, a page table that is not a tensor of integers, a
            page size that is not an integer, or a shard that is not a ContextShard.
        ValueError: shapes that disagree; a length that is negative, shorter than its query or
            beyond the page table; offsets that do not ascend from 0; two arguments for one length,
            or none; a prefill longer than the workspace; padding before another decode;
            num_padded_tokens or buffers that are too small.

    Source: the metadata builder of vLLM's sparse FlashMLA backend
    (``vllm/v1/attention/backends/mla/flashmla_sparse.py``).

    >>> plan = plan_batch(
    ...     [1, 10, 4, 20, 5],
    ...     [9, 10, 15, 20, 5],
    ...     torch.arange(10, dtype=torch.int32).view(5, 2),
    ...     page_size=16,
    ...     workspace_rows=30,
    ... )
    >>> plan.num_decodes, plan.num_prefills, plan.num_decode_tokens, plan.num_prefill_tokens
    (1, 4, 1, 39)
    >>> [(chunk.requests, chunk.num_workspace_rows) for chunk in plan.prefill_chunks]
    [(slice(1, 3, None), 25), (slice(3, 5, None), 25)]
    >>> plan.workspace_starts
    tensor([ 0, 10,  0, 20], dtype=torch.int32)

    The same batch as MAX describes it, with tensors of uint32:

    >>> plan = plan_batch(
    ...     page_table=torch.arange(10).view(5, 2).to(torch.uint32),
    ...     input_row_offsets=torch.tensor([0, 1, 11, 15, 35, 40], dtype=torch.uint32),
    ...     cache_lengths=torch.tensor([8, 0, 11, 0, 0], dtype=torch.uint32),
    ...     page_size=16,
    ...     workspace_rows=30,
    ... )
    >>> plan.seq_lens
    tensor([ 9, 10, 15, 20,  5], dtype=torch.int32)

    A rank of two that keep four tokens in turn; a page is enough for each context:

    >>> plan = plan_batch(
    ...     [1, 6],
    ...     [8, 6],
    ...     torch.tensor([[3], [5]], dtype=torch.int32),
    ...     page_size=4,
    ...     workspace_rows=30,
    ...     shard=ContextShard(rank=1, num_ranks=2, interleave=4),
    ... )
    >>> plan.positions, plan.slot_mapping
    (tensor([7, 0, 1, 2, 3, 4, 5]), tensor([15, -1, -1, -1, -1, 20, 21]))
    >>> plan.seq_lens, plan.prefill_chunks[0].seq_lens
    (tensor([8, 6], dtype=torch.int32), tensor([2], dtype=torch.int32))
    """
    _check_shard(shard)
    _check_either(query_lens=query_lens, input_row_offsets=input_row_offsets)
    _check_either(seq_lens=seq_lens, cache_lengths=cache_lengths)
    queries, lens = _host_lengths(query_lens, seq_lens, input_row_offsets, cache_lengths)
    page_table = _checked_table(page_table, queries.size, page_size)
    _check_batch(queries, lens, page_table, page_size, shard)
    if num_padded_tokens is not None:
        check_integer("num_padded_tokens", num_padded_tokens)
    if buffers is not None:
        check_kind("buffers", buffers, PlanBuffers)
    lens = np.where(queries > 0, lens, 0)
    num_requests, num_real_tokens = queries.size, int(queries.sum())

    num_decodes, num_prefills, num_decode_tokens, _ = split_decodes_and_prefills(
        queries, decode_threshold=decode_threshold, require_uniform=require_uniform
    )
    decode_query_len = int(queries[:num_decodes].max(initial=0))
    num_tokens = num_real_tokens if num_padded_tokens is None else num_padded_tokens
    if num_tokens < num_real_tokens:
        raise ValueError(
            f"num_padded_tokens must be at least {num_real_tokens}, the sum of query_lens, "
            f"got {num_tokens}"
        )
    if require_uniform:
        padding = np.flatnonzero(queries[:num_decodes] == 0)
        if padding.size and queries[padding[0] :].any():
            raise ValueError(
                "query_lens must list padding requests after all others, "
                f"got length 0 for request {padding[0]}"
            )
        if num_prefills == 0:
            num_tokens = num_decodes * decode_query_len
            if num_padded_tokens not in (None, num_tokens):
                raise ValueError(
                    f"num_padded_tokens must be {num_tokens} for {num_decodes} decode requests of "
                    f"{decode_query_len} query tokens, got {num_padded_tokens}"
                )
    if num_prefills == 0:
        num_decode_tokens = num_tokens
    prefill_lens = lens[num_decodes:]
    # Rank 0 keeps the most: workspaces of this size give all ranks the same chunks.
    most_rows = prefill_lens if shard is None else _rows_of(prefill_lens, replace(shard, rank=0))
    chunk_bounds = []
    if workspace_rows is not None:
        chunk_bounds = split_prefill_chunks(most_rows, workspace_rows)

    # All checks precede the first write: an invalid batch leaves the buffers unchanged.
    target, page_table = _buffers_for(page_table, num_tokens, buffers)

    offsets = np.zeros(num_requests + 1, np.int64)
    queries.cumsum(out=offsets[1:])
    token_requests = np.repeat(np.arange(num_requests), queries)
    token_positions = np.arange(num_real_tokens) + np.repeat(lens - offsets[1:], queries)
    # Unused offsets repeat the last one, which makes their requests empty.
    _send(offsets, target.input_row_offsets, padding=num_real_tokens)
    _send(lens, target.seq_lens, padding=0)
    request_ids = _send(token_requests, target.request_ids, padding=0)
    positions = _send(token_positions, target.positions, padding=0)
    slots = _own_slots(page_table, request_ids, positions, page_size, shard)
    target.slot_mapping[:num_real_tokens].copy_(slots)
    target.slot_mapping[num_real_tokens:].fill_(-1)

    plan = _plan_in(
        target,
        page_table,
        page_size,
        shard,
        num_tokens=num_tokens,
        num_decodes=num_decodes,
        num_decode_tokens=num_decode_tokens,
        decode_query_len=decode_query_len,
        max_query_len=int(queries.max(initial=0)),
        max_seq_len=int(lens.max(initial=0)),
        max_context_len=int((lens - queries).max(initial=0)),
        max_prefill_seq_len=int(prefill_lens.max(initial=0)),
        max_prefill_context_len=int((prefill_lens - queries[num_decodes:]).max(initial=0)),
    )
    if not chunk_bounds:
        return plan
    token_prefills = np.maximum(token_requests - num_decodes, -1)
    _send(token_prefills, target.prefill_request_ids, padding=-1)
    own_rows = plan.seq_lens[num_decodes:]
    if shard is not None:
        own_rows = _send(_rows_of(prefill_lens, shard), target.prefill_rows, padding=0)
    return _with_chunks(plan, target, chunk_bounds, most_rows, own_rows, offsets)


def _plan_in(
    buffers: PlanBuffers,
    page_table: Tensor,
    page_size: int,
    shard: ContextShard | None,
    *,
    num_tokens: int,
    num_decodes: int,
    num_decode_tokens: int,
    **lengths: int,
) -> Plan:
    """The plan, without prefill chunks, of the batch that ``buffers`` hold."""
    num_requests = page_table.shape[0]
    return Plan(
        num_requests=num_requests,
        num_tokens=num_tokens,
        num_decodes=num_decodes,
        num_prefills=num_requests - num_decodes,
        num_decode_tokens=num_decode_tokens,
        num_prefill_tokens=num_tokens - num_decode_tokens,
        page_size=int(page_size),
        input_row_offsets=buffers.input_row_offsets[: num_requests + 1],
        seq_lens=buffers.seq_lens[:num_requests],
        page_table=page_table,
        positions=buffers.positions[:num_tokens],
        slot_mapping=buffers.slot_mapping[:num_tokens],
        request_ids=buffers.request_ids[:num_tokens],
        prefill_request_ids=None,
        workspace_starts=None,
        prefill_chunks=(),
        shard=shard,
        **lengths,
    )


def _with_chunks(
    plan: Plan,
    buffers: PlanBuffers,
    chunk_bounds: list[tuple[int, int]],
    most_rows: np.ndarray,
    own_rows: Tensor,
    offsets: np.ndarray,
) -> Plan:
    """The plan with its prefills grouped into chunks."""
    ends = most_rows.cumsum()
    starts = ends - most_rows
    chunk_starts = [starts[start] for start, _ in chunk_bounds]
    chunk_sizes = [stop - start for start, stop in chunk_bounds]
    local_starts = starts - np.repeat(chunk_starts, chunk_sizes)
    workspace_starts = _send(local_starts, buffers.workspace_starts, padding=0)

    chunks = []
    for start, stop in chunk_bounds:
        requests = slice(plan.num_decodes + start, plan.num_decodes + stop)
        chunks.append(
            PrefillChunk(
                requests=requests,
                tokens=slice(int(offsets[requests.start]), int(offsets[requests.stop])),
                num_workspace_rows=int(ends[stop - 1] - starts[start]),
                seq_lens=own_rows[start:stop],
                page_table=plan.page_table[requests],
                workspace_starts=workspace_starts[start:stop],
            )
        )
    return replace(
        plan,
        prefill_request_ids=buffers.prefill_request_ids[: plan.num_tokens],
        workspace_starts=workspace_starts,
        prefill_chunks=tuple(chunks),
    )


def plan_on_device(
    query_lens: Tensor | None = None,
    seq_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    *,
    input_row_offsets: Tensor | None = None,
    cache_lengths: Tensor | None = None,
    page_size: int,
    num_tokens: int,
    max_query_len: int,
    max_seq_len: int | None = None,
    num_decodes: int | None = None,
    decode_query_len: int = 1,
    shard: ContextShard | None = None,
    validate: bool = False,
    buffers: PlanBuffers | None = None,
) -> Plan:
    """Plan one batch from lengths on the device, without reading them back.

    Positions and slots follow the formulas of :func:`plan_batch`. The caller bounds the lengths,
    and ``max_query_len``, ``max_seq_len`` and ``max_context_len`` of the plan are these bounds. No
    prefill chunks are planned; prefills read the cache in place. The call can be captured in a CUDA
    graph.

    Args:
        query_lens: ``[B]`` int32, int64 or uint32, new tokens of each request; decodes first. A
            request of query length 0 is padding; its sequence length is ignored.
        seq_lens: ``[B]`` int32, int64 or uint32, context plus new tokens.
        page_table: ``[B, W]`` int32, int64 or uint32 on the lengths' device, page ids.
        input_row_offsets: ``[B + 1]`` int32, int64 or uint32, in place of query_lens: their prefix
            sums from 0 on.
        cache_lengths: ``[B]`` int32, int64 or uint32, in place of seq_lens: context without new
            tokens.
        page_size: tokens per page.
        num_tokens: T, rows of the batch's tensors, at least the sum of query_lens; the rest is
            padding.
        max_query_len: upper bound of query_lens.
        max_seq_len: upper bound of seq_lens; default all that the page table has room for.
        num_decodes: number of decode requests; by default all requests decode, with up to
            ``max_query_len`` query tokens.
        decode_query_len: query tokens of every decode; read only if num_decodes is given.
        shard: this rank's share of every context, as for :func:`plan_batch`.
        validate: read the lengths back and check them against these bounds.
        buffers: static tensors to write the plan into; new tensors if None.

    Raises:
        TypeError: an argument of the wrong kind or dtype.
        ValueError: an argument of the wrong shape or device; two arguments for one length, or none;
            bounds that contradict each other; or, with validate, offsets that do not ascend from 0,
            or lengths that exceed the bounds.

    >>> lens = torch.tensor([9, 3, 12])  # on a GPU, for example lengths computed by the last step
    >>> table = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)
    >>> plan = plan_on_device(
    ...     torch.ones_like(lens), lens, table, page_size=8, num_tokens=3, max_query_len=1
    ... )
    >>> plan.positions, plan.slot_mapping, plan.max_seq_len
    (tensor([ 8,  2, 11]), tensor([ 8, 18, 43]), 16)
    """
    check = Checker("plan_on_device")
    _check_shard(shard)
    if buffers is not None:
        check_kind("buffers", buffers, PlanBuffers)
    _check_either(query_lens=query_lens, input_row_offsets=input_row_offsets)
    _check_either(seq_lens=seq_lens, cache_lengths=cache_lengths)
    page_table = check.signed("page_table", page_table, "B W")
    num_requests = page_table.shape[0]
    page_table = _checked_table(page_table, num_requests, page_size)
    if input_row_offsets is None:
        queries = check.tensor("query_lens", query_lens, "B", INTEGERS).long()
    else:
        check.bind("B+1", num_requests + 1)
        rows = check.tensor("input_row_offsets", input_row_offsets, "B+1", INTEGERS)
        queries = rows.long().diff()
    if cache_lengths is None:
        lens = check.tensor("seq_lens", seq_lens, "B", INTEGERS).long()
    else:
        lens = check.tensor("cache_lengths", cache_lengths, "B", INTEGERS).long() + queries
    if max_seq_len is None:
        max_seq_len = longest_context(page_table.shape[1], page_size, shard)
    bounds = {
        "num_tokens": num_tokens,
        "max_query_len": max_query_len,
        "max_seq_len": max_seq_len,
        "decode_query_len": decode_query_len,
        "num_decodes": num_requests if num_decodes is None else num_decodes,
    }
    for name, bound in bounds.items():
        check_integer(name, bound)
    if num_decodes is None or num_decodes == num_requests:
        num_decodes, num_decode_tokens = num_requests, num_tokens
        decode_query_len = max_query_len if num_requests else 0
    else:
        decode_query_len = decode_query_len if num_decodes else 0
        num_decode_tokens = num_decodes * decode_query_len
    num_prefills = num_requests - num_decodes
    if num_prefills < 0:
        raise ValueError(f"num_decodes must be at most {num_requests}, got {num_decodes}")
    if num_decode_tokens > num_tokens:
        raise ValueError(
            f"num_tokens must be at least {num_decode_tokens} for {num_decodes} decodes of "
            f"{decode_query_len} query tokens, got {num_tokens}"
        )
    if check.validates(validate):
        read = (
            None if tensor is None else tensor.cpu()
            for tensor in (query_lens, seq_lens, input_row_offsets, cache_lengths)
        )
        host_queries, host_lens = _host_lengths(*read)
        _check_batch(host_queries, host_lens, page_table, page_size, shard)
        _check_bounds(host_queries, np.where(host_queries > 0, host_lens, 0), bounds, num_prefills)

    target, page_table = _buffers_for(page_table, num_tokens, buffers)
    queries = queries.clamp(min=0)
    lens = lens.where(queries > 0, 0)
    # Lengths that exceed num_tokens must not make an op write outside the batch's tensors.
    offsets = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).clamp(max=num_tokens)
    tokens = torch.arange(num_tokens, device=page_table.device)
    real = tokens < offsets[-1]
    request_ids = torch.searchsorted(offsets[1:], tokens, right=True).where(real, 0)
    positions = torch.zeros_like(tokens)
    slots = positions - 1
    if num_requests:
        firsts = lens - queries - offsets[:-1]
        positions = (tokens + firsts[request_ids]).where(real, 0)
        slots = _own_slots(page_table, request_ids, positions, int(page_size), shard)
        slots = slots.where(real, -1)
    _write(offsets, target.input_row_offsets, padding=offsets[-1])
    _write(lens, target.seq_lens, padding=0)
    _write(positions, target.positions, padding=0)
    _write(slots, target.slot_mapping, padding=-1)
    _write(request_ids, target.request_ids, padding=0)
    max_context_len = max(max_seq_len - 1, 0)
    return _plan_in(
        target,
        page_table,
        page_size,
        shard,
        num_tokens=num_tokens,
        num_decodes=num_decodes,
        num_decode_tokens=num_decode_tokens,
        decode_query_len=decode_query_len,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        max_context_len=max_context_len,
        max_prefill_seq_len=max_seq_len if num_prefills else 0,
        max_prefill_context_len=max_context_len if num_prefills else 0,
    )


def _check_bounds(
    queries: np.ndarray, lens: np.ndarray, bounds: dict[str, int], num_prefills: int
) -> None:
    """Check lengths against the bounds given to :func:`plan_on_device`."""
    for name, needed in (
        ("num_tokens", queries.sum()),
        ("max_query_len", queries.max(initial=0)),
        ("max_seq_len", lens.max(initial=0)),
    ):
        if needed > bounds[name]:
            raise ValueError(f"{name} must be at least {needed}, got {bounds[name]}")
    decodes = queries[: bounds["num_decodes"]]
    if num_prefills and (decodes != bounds["decode_query_len"]).any():
        request = int((decodes != bounds["decode_query_len"]).argmax())
        raise ValueError(
            "decode_query_len must be the query length of every decode, got "
            f"{bounds['decode_query_len']}, but request {request} has {decodes[request]}"
        )

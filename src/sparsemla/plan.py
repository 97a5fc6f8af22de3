"""Batch plans: everything about a batch that does not depend on the layer, computed once a step.

A plan says which requests decode and which prefill, where each token stands in its request and in
the cache, and how the prefills are cut into chunks whose contexts fit the workspace. Lengths come
from the host (:func:`plan_batch`), or stay on the device (:func:`plan_on_device`); tensors go to
the page table's device, and nothing waits for that device.

Shapes: B requests, T tokens (padding included), P prefill requests, W pages per request.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from sparsemla.cache import slots_of
from sparsemla.checks import INTEGERS, Checker
from sparsemla.kinds import check_device, check_integer, check_kind

HostInts: TypeAlias = Sequence[int] | np.ndarray | Tensor
"""Integers the host can read without waiting for a device: a list, an array or a CPU tensor."""


@dataclass(frozen=True, eq=False)
class PrefillChunk:
    """Consecutive prefill requests whose contexts fit the workspace together.

    Attributes:
        requests: the chunk's requests, numbered in the batch.
        tokens: the chunk's query tokens, numbered in the batch.
        num_workspace_rows: rows of the workspace that the chunk's contexts take.
        seq_lens: ``[n]`` int32, view of :attr:`Plan.seq_lens`.
        page_table: ``[n, W]`` int32, view of :attr:`Plan.page_table`.
        workspace_starts: ``[n]`` int32, view of :attr:`Plan.workspace_starts`.
    """

    requests: slice
    tokens: slice
    num_workspace_rows: int
    seq_lens: Tensor
    page_table: Tensor
    workspace_starts: Tensor

    def moved(self, num_requests: int, num_tokens: int) -> PrefillChunk:
        """The chunk, numbered in a batch that begins so many requests and tokens later."""
        return replace(
            self,
            requests=slice(self.requests.start - num_requests, self.requests.stop - num_requests),
            tokens=slice(self.tokens.start - num_tokens, self.tokens.stop - num_tokens),
        )


@dataclass(frozen=True, eq=False)
class Plan:
    """One batch, decode requests first; made by :func:`plan_batch` or :func:`plan_on_device`.

    Token ``i`` of request ``b`` is row ``input_row_offsets[b] + i`` of every tensor ``[T]``. Rows
    past ``input_row_offsets[B]`` are padding.

    Attributes:
        num_requests: B, padding requests included.
        num_tokens: T, the rows that queries and outputs have; padding included.
        num_decodes: leading requests that decode.
        num_prefills: P, the requests behind them.
        num_decode_tokens: leading tokens that belong to decodes.
        num_prefill_tokens: the tokens behind them; the two add up to T.
        decode_query_len: query tokens of each decode, 0 without decodes. In a plan with uniform
            decodes ``num_decode_tokens == num_decodes * decode_query_len`` holds, so that the
            first tokens can be viewed as ``[num_decodes, decode_query_len, ...]``; in any other
            plan it is the longest decode.
        max_query_len: most query tokens of a request.
        max_seq_len: longest context plus query.
        max_context_len: longest context before this step.
        page_size: tokens of a page, which caches that the plan is used with must have.
        input_row_offsets: ``[B + 1]`` int32, prefix sums of the query lengths.
        seq_lens: ``[B]`` int32, context plus query; 0 for padding requests.
        page_table: ``[B, W]`` int32.
        positions: ``[T]`` int64, of each token in its request; 0 for padding.
        slot_mapping: ``[T]`` int64, cache slot of each token; -1 (write nothing) for padding.
        request_ids: ``[T]`` int32, request of each token; 0 for padding.
        prefill_request_ids: ``[T]`` int32, request of each prefill token counted from the first
            prefill; -1 for decode tokens and padding. None if no chunks are planned.
        workspace_starts: ``[P]`` int32, workspace row where a prefill's context begins, counted
            within its chunk. None if no chunks are planned.
        prefill_chunks: the prefills in order, cut to fit the workspace.
        max_prefill_seq_len: longest context plus query of a prefill.
        max_prefill_context_len: longest context of a prefill.

    The plan of a mixed batch is also two plans, :attr:`decodes` and :attr:`prefills`, one for each
    branch:

    >>> table = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)
    >>> plan = plan_batch([1, 1, 5], [9, 3, 12], table, page_size=8, workspace_rows=None)
    >>> plan.decodes.num_tokens, plan.prefills.num_tokens
    (2, 5)
    >>> plan.prefills.input_row_offsets, plan.prefills.positions
    (tensor([0, 5], dtype=torch.int32), tensor([ 7,  8,  9, 10, 11]))
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

    @property
    def decodes(self) -> Plan:
        """The decodes alone, views of this plan: its first ``num_decode_tokens`` tokens.

        ``max_seq_len`` and ``max_context_len`` remain those of the whole batch.
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
        """The prefills alone: the tokens from ``num_decode_tokens`` on, padding among them.

        Requests and tokens are counted from the first prefill: ``input_row_offsets`` and
        ``request_ids`` are new tensors, made on the device at the first use, the others are views.
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
        """Entries of each token's selection that can name a key of its request.

        Selections whose valid entries come first, as those of MAX do, may hold anything behind as
        many entries as their request has keys; given these ``topk_lengths``, the ops read none of
        that.

        Args:
            topk: entries of a selection, or ``[B]`` integers on the plan's device, those of each
                request.

        Returns:
            int32 ``[T]``: the smaller of ``topk`` and ``seq_lens`` of the token's request.

        Raises:
            TypeError, ValueError: topk is no integer or no tensor of B integers.

        >>> table = torch.tensor([[0], [1]], dtype=torch.int32)
        >>> plan = plan_batch([1, 1], [5, 2], table, page_size=8, workspace_rows=None)
        >>> plan.clamp_topk(4)
        tensor([4, 2], dtype=torch.int32)
        """
        check = Checker("clamp_topk")
        if isinstance(topk, Tensor):
            check.tensor("seq_lens", self.seq_lens, "B", INTEGERS)
            topk = check.tensor("topk", topk, "B", INTEGERS)
            lengths = torch.minimum(self.seq_lens, topk).int()
        else:
            check.positive("topk", topk)
            lengths = self.seq_lens.clamp(max=topk)
        return lengths[self.request_ids]


class PlanBuffers:
    """Tensors at fixed addresses for the plans of a CUDA graph.

    Every plan made with ``buffers=`` consists of views of these tensors and overwrites the plan
    before it, so that replaying a graph that was captured over an earlier plan serves the new
    batch. Tokens and requests behind the new batch become padding (request 0, position 0, slot -1,
    length 0). Their page table rows keep what they held, and so do the tensors of prefill chunks
    when the new batch has none: nothing refers to them.

    A graph also bakes in the Python integers of the plan it was captured with. Capture with the
    number of requests, ``decode_query_len`` and largest ``seq_lens`` that the graph shall serve,
    and fill smaller batches with requests of query length 0.

    Args:
        max_requests: most requests of a batch.
        max_tokens: most tokens of a batch, padding included.
        max_pages_per_request: columns of the page table; narrower tables are filled up with -1.
        device: where the tensors live.

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

    def check_fits(self, num_tokens: int, page_table: Tensor) -> None:
        """Refuse a batch that these buffers cannot hold.

        Raises:
            ValueError: another device, or more requests, tokens or pages than the buffers have.
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
    """``values`` as a one-dimensional int64 array."""
    if isinstance(values, Tensor):
        if values.device.type != "cpu":
            raise ValueError(
                f"{name} must be on the host, got a tensor on {values.device}; plan_on_device "
                "takes lengths of a device"
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


def _checked_table(page_table: Tensor, num_requests: int, page_size: int) -> Tensor:
    """The page table, checked, as int32."""
    if not isinstance(page_table, Tensor):
        raise TypeError(f"page_table must be a tensor, got {type(page_table).__name__}")
    if page_table.dtype not in (torch.int32, torch.uint32):
        raise TypeError(f"page_table must have dtype torch.int32 or uint32, got {page_table.dtype}")
    if page_table.dim() != 2 or page_table.shape[0] != num_requests:
        raise ValueError(
            f"page_table must have shape [{num_requests}, pages per request], "
            f"got {list(page_table.shape)}"
        )
    check_integer("page_size", page_size, 1)
    # No cache has a page from 2^31 on: such an id is no page, as a negative one.
    return page_table.view(torch.int32) if page_table.dtype == torch.uint32 else page_table


def _check_batch(queries: np.ndarray, lens: np.ndarray, page_table: Tensor, page_size: int) -> None:
    """Check that lengths and page table describe the same, possible batch."""
    if lens.size != queries.size:
        raise ValueError(
            f"seq_lens must have one length for each of {queries.size} requests, got {lens.size}"
        )
    too_short = lens < queries
    if too_short.any():
        request = int(too_short.argmax())
        raise ValueError(
            f"seq_lens must include the query tokens, got length {lens[request]} "
            f"and {queries[request]} query tokens for request {request}"
        )
    capacity = page_table.shape[1] * page_size
    too_long = (queries > 0) & (lens > capacity)
    if too_long.any():
        request = int(too_long.argmax())
        raise ValueError(
            f"seq_lens must be at most {capacity}, {page_table.shape[1]} pages of {page_size} "
            f"tokens, got {lens[request]} for request {request}"
        )


def _placed(
    page_table: Tensor, num_tokens: int, buffers: PlanBuffers | None
) -> tuple[PlanBuffers, Tensor]:
    """Where a plan's tensors go, and its page table, written there if that was asked for."""
    if buffers is None:
        return PlanBuffers(page_table.shape[0], num_tokens, 0, page_table.device), page_table
    buffers.check_fits(num_tokens, page_table)
    num_requests, num_pages = page_table.shape
    buffers.page_table[:num_requests, :num_pages].copy_(page_table)
    buffers.page_table[:num_requests, num_pages:].fill_(-1)
    return buffers, buffers.page_table[:num_requests]


def _write(values: Tensor, buffer: Tensor, *, padding: int | Tensor) -> Tensor:
    """Overwrite all of ``buffer`` with ``values`` and then ``padding``; a view of the values."""
    buffer[: len(values)] = values
    buffer[len(values) :] = padding
    return buffer[: len(values)]


def _send(values: np.ndarray, buffer: Tensor, *, padding: int) -> Tensor:
    """Overwrite all of ``buffer`` with ``values`` and then ``padding``; a view of the values.

    The staging memory is new each time: with a persistent one, the next step could overwrite what
    the device has not fetched yet. PyTorch keeps pinned memory back until its copies are done.
    """
    staging = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=buffer.is_cuda)
    host = staging.numpy()
    host[: values.size] = values
    host[values.size :] = padding
    buffer.copy_(staging, non_blocking=True)
    return buffer[: values.size]


def split_decodes_and_prefills(
    query_lens: HostInts, *, decode_threshold: int = 1, require_uniform: bool = True
) -> tuple[int, int, int, int]:
    """Find where the decodes of a batch end and its prefills begin.

    The batch lists its decodes first. The first rule that applies decides:

    1. No query is longer than the threshold, and decodes need not be uniform or the threshold is
       at most 1: everything is decode.
    2. The first query is longer than the threshold: everything is prefill.
    3. A request prefills if its query is longer than the threshold or, for uniform decodes, if its
       length is neither that of the first query nor 0 (padding).
    4. The first request that prefills, and all behind it, are prefills; without one, everything is
       decode.

    Args:
        query_lens: ``[B]`` host integers; 0 for padding requests.
        decode_threshold: most query tokens of a decode; above 1 with speculative decoding.
        require_uniform: whether all decodes must have the same query length.

    Returns:
        ``(num_decodes, num_prefills, num_decode_tokens, num_prefill_tokens)``.

    Raises:
        TypeError: query_lens holds no integers.
        ValueError: query_lens is not one-dimensional, on a device, or negative somewhere.

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
    """Cut requests, in order, into the longest chunks whose lengths add up to the workspace.

    Args:
        seq_lens: ``[P]`` host integers, context plus query of each prefill; a request of length 0
            joins the chunk before it.
        workspace_rows: rows of the workspace.

    Returns:
        ``(first request, behind the last request)`` of each chunk.

    Raises:
        TypeError: seq_lens holds no integers.
        ValueError: a request alone does not fit the workspace; seq_lens is not one-dimensional,
            on a device, or negative somewhere.

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
    query_lens: HostInts,
    seq_lens: HostInts,
    page_table: Tensor,
    *,
    page_size: int,
    workspace_rows: int | None,
    decode_threshold: int = 1,
    require_uniform: bool = True,
    num_padded_tokens: int | None = None,
    buffers: PlanBuffers | None = None,
) -> Plan:
    """Plan one batch.

    Token ``i`` of request ``b`` is at position ``seq_lens[b] - query_lens[b] + i`` of its request,
    in slot ``page_table[b, position // page_size] * page_size + position % page_size``. Contexts
    of the prefills of a chunk lie one behind the other in the workspace, from row 0.

    Requests of query length 0 are padding; their length counts as 0. Where decodes must be uniform
    no other request may follow padding among the decodes, and in a batch without prefills a padding
    request brings as many padding tokens as a decode has: T is ``B * decode_query_len``.

    Args:
        query_lens: ``[B]`` host integers, new tokens of each request; decodes first.
        seq_lens: ``[B]`` host integers, context plus new tokens.
        page_table: ``[B, W]`` int32 or uint32; its device is the plan's.
        page_size: tokens of a page.
        workspace_rows: rows of the workspace that chunks of prefill contexts are gathered into, or
            None to plan no chunks, as for caches that are read in place.
        decode_threshold: most query tokens of a decode, see :func:`split_decodes_and_prefills`.
        require_uniform: whether all decodes must have the same query length.
        num_padded_tokens: T, if the batch's tensors have more rows than tokens.
        buffers: where the plan's tensors shall live; new tensors if None.

    Raises:
        TypeError: lengths that are no integers, a page table that is no int32 or uint32 tensor, or
            a page size that is no integer.
        ValueError: shapes that disagree; a length that is negative, shorter than its query or
            beyond the page table; a prefill beyond the workspace; misplaced padding; too small a
            num_padded_tokens or buffer.

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
    """
    queries = host_ints("query_lens", query_lens)
    lens = host_ints("seq_lens", seq_lens)
    page_table = _checked_table(page_table, queries.size, page_size)
    _check_batch(queries, lens, page_table, page_size)
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
                "query_lens must list padding requests behind all others, "
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
    chunk_bounds = []
    if workspace_rows is not None:
        chunk_bounds = split_prefill_chunks(prefill_lens, workspace_rows)

    # Nothing is written before every check has passed: a refused batch leaves the buffers alone.
    target, page_table = _placed(page_table, num_tokens, buffers)

    offsets = np.zeros(num_requests + 1, np.int64)
    queries.cumsum(out=offsets[1:])
    token_requests = np.repeat(np.arange(num_requests), queries)
    token_positions = np.arange(num_real_tokens) + np.repeat(lens - offsets[1:], queries)
    # Offsets behind the batch repeat the last one: requests without tokens.
    input_row_offsets = _send(offsets, target.input_row_offsets, padding=num_real_tokens)
    device_seq_lens = _send(lens, target.seq_lens, padding=0)
    request_ids = _send(token_requests, target.request_ids, padding=0)
    positions = _send(token_positions, target.positions, padding=0)
    slots = slots_of(page_table, request_ids, positions, page_size)
    target.slot_mapping[:num_real_tokens].copy_(slots)
    target.slot_mapping[num_real_tokens:].fill_(-1)

    prefill_request_ids = workspace_starts = None
    prefill_chunks: list[PrefillChunk] = []
    if chunk_bounds:
        token_prefills = np.maximum(token_requests - num_decodes, -1)
        _send(token_prefills, target.prefill_request_ids, padding=-1)
        prefill_request_ids = target.prefill_request_ids[:num_tokens]

        ends = prefill_lens.cumsum()
        starts = ends - prefill_lens
        chunk_starts = [starts[start] for start, _ in chunk_bounds]
        chunk_sizes = [stop - start for start, stop in chunk_bounds]
        local_starts = starts - np.repeat(chunk_starts, chunk_sizes)
        workspace_starts = _send(local_starts, target.workspace_starts, padding=0)

        for start, stop in chunk_bounds:
            requests = slice(num_decodes + start, num_decodes + stop)
            prefill_chunks.append(
                PrefillChunk(
                    requests=requests,
                    tokens=slice(int(offsets[requests.start]), int(offsets[requests.stop])),
                    num_workspace_rows=int(ends[stop - 1] - starts[start]),
                    seq_lens=device_seq_lens[requests],
                    page_table=page_table[requests],
                    workspace_starts=workspace_starts[start:stop],
                )
            )

    return Plan(
        num_requests=num_requests,
        num_tokens=num_tokens,
        num_decodes=num_decodes,
        num_prefills=num_prefills,
        num_decode_tokens=num_decode_tokens,
        num_prefill_tokens=num_tokens - num_decode_tokens,
        decode_query_len=decode_query_len,
        max_query_len=int(queries.max(initial=0)),
        max_seq_len=int(lens.max(initial=0)),
        max_context_len=int((lens - queries).max(initial=0)),
        page_size=int(page_size),
        input_row_offsets=input_row_offsets,
        seq_lens=device_seq_lens,
        page_table=page_table,
        positions=target.positions[:num_tokens],
        slot_mapping=target.slot_mapping[:num_tokens],
        request_ids=target.request_ids[:num_tokens],
        prefill_request_ids=prefill_request_ids,
        workspace_starts=workspace_starts,
        prefill_chunks=tuple(prefill_chunks),
        max_prefill_seq_len=int(prefill_lens.max(initial=0)),
        max_prefill_context_len=int((prefill_lens - queries[num_decodes:]).max(initial=0)),
    )


def plan_on_device(
    query_lens: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    *,
    page_size: int,
    num_tokens: int,
    max_query_len: int,
    max_seq_len: int | None = None,
    num_decodes: int | None = None,
    decode_query_len: int = 1,
    validate: bool = False,
    buffers: PlanBuffers | None = None,
) -> Plan:
    """:func:`plan_batch` for lengths that only the device knows; nothing is read back.

    What :func:`plan_batch` reads off the lengths is given as bounds, and so are the plan's
    ``max_query_len``, ``max_seq_len`` and ``max_context_len``: bounds. No prefill chunks are
    planned; caches are read in place. It can be captured in a CUDA graph.

    Args:
        query_lens: ``[B]`` int32, int64 or uint32, new tokens of each request, decodes first; 0 is
            a padding request, whose length counts as 0.
        seq_lens: ``[B]``, context plus new tokens.
        page_table: ``[B, W]`` int32 or uint32, on the lengths' device.
        page_size: tokens of a page.
        num_tokens: T, rows of the batch's tensors, at least the sum of query_lens; rows behind that
            are padding.
        max_query_len: no request has more query tokens.
        max_seq_len: no request is longer; default what the page table holds.
        num_decodes: leading requests that decode; default all, and ``max_query_len`` bounds them.
        decode_query_len: with num_decodes, the query tokens of each decode, all alike.
        validate: read the lengths and refuse those that break these promises.
        buffers: where the plan's tensors shall live; new tensors if None.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device, bounds that
            contradict each other, or, with validate, lengths that contradict them.

    >>> lens = torch.tensor([9, 3, 12])  # on a GPU, what the step before has left there
    >>> table = torch.tensor([[0, 1], [2, 3], [4, 5]], dtype=torch.int32)
    >>> plan = plan_on_device(
    ...     torch.ones_like(lens), lens, table, page_size=8, num_tokens=3, max_query_len=1
    ... )
    >>> plan.positions, plan.slot_mapping, plan.max_seq_len
    (tensor([ 8,  2, 11]), tensor([ 8, 18, 43]), 16)
    """
    check = Checker("plan_on_device")
    if buffers is not None:
        check_kind("buffers", buffers, PlanBuffers)
    queries = check.tensor("query_lens", query_lens, "B", INTEGERS)
    lens = check.tensor("seq_lens", seq_lens, "B", INTEGERS)
    check.tensor("page_table", page_table, "B W", (torch.int32, torch.uint32))
    num_requests = len(query_lens)
    page_table = _checked_table(page_table, num_requests, page_size)
    capacity = page_table.shape[1] * int(page_size)
    max_seq_len = capacity if max_seq_len is None else max_seq_len
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
        host_queries = host_ints("query_lens", queries.cpu())
        host_lens = host_ints("seq_lens", lens.cpu())
        _check_batch(host_queries, host_lens, page_table, page_size)
        _check_bounds(host_queries, np.where(host_queries > 0, host_lens, 0), bounds, num_prefills)

    target, page_table = _placed(page_table, num_tokens, buffers)
    queries = queries.long().clamp(min=0)
    lens = lens.long().where(queries > 0, 0)
    # Whatever the lengths say, offsets stay inside the batch's tensors.
    offsets = torch.nn.functional.pad(queries.cumsum(0), (1, 0)).clamp(max=num_tokens)
    tokens = torch.arange(num_tokens, device=page_table.device)
    real = tokens < offsets[-1]
    request_ids = torch.searchsorted(offsets[1:], tokens, right=True).where(real, 0)
    positions = torch.zeros_like(tokens)
    slots = positions - 1
    if num_requests:
        firsts = lens - queries - offsets[:-1]
        positions = (tokens + firsts[request_ids]).where(real, 0)
        slots = slots_of(page_table, request_ids, positions, int(page_size)).where(real, -1)
    max_context_len = max(max_seq_len - 1, 0)
    return Plan(
        num_requests=num_requests,
        num_tokens=num_tokens,
        num_decodes=num_decodes,
        num_prefills=num_prefills,
        num_decode_tokens=num_decode_tokens,
        num_prefill_tokens=num_tokens - num_decode_tokens,
        decode_query_len=decode_query_len,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
        max_context_len=max_context_len,
        page_size=int(page_size),
        input_row_offsets=_write(offsets, target.input_row_offsets, padding=offsets[-1]),
        seq_lens=_write(lens, target.seq_lens, padding=0),
        page_table=page_table,
        positions=_write(positions, target.positions, padding=0),
        slot_mapping=_write(slots, target.slot_mapping, padding=-1),
        request_ids=_write(request_ids, target.request_ids, padding=0),
        prefill_request_ids=None,
        workspace_starts=None,
        prefill_chunks=(),
        max_prefill_seq_len=max_seq_len if num_prefills else 0,
        max_prefill_context_len=max_context_len if num_prefills else 0,
    )


def _check_bounds(
    queries: np.ndarray, lens: np.ndarray, bounds: dict[str, int], num_prefills: int
) -> None:
    """Check that lengths keep what :func:`plan_on_device` was promised."""
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
            f"decode_query_len must be the query length of each of {decodes.size} decodes, "
            f"got {bounds['decode_query_len']}, and {decodes[request]} tokens of request {request}"
        )

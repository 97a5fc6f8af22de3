"""Groups of query tokens, and equal shares of their tiles of keys, for the kernels in Gluon.

A *group* has some query tokens of one request, a *tile* some keys. ``T`` has a kernel's constants:
``tokens`` of a group, ``block_n`` keys of a tile, and ``own_ends``, ``causal``, ``ratio`` and
``page_size``, which ``Tiling`` of the kernel for Hopper explains.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsemla.kernels.indexer.arguments import IndexerScores, IndexerScoresPaged, IndexerTopk


class Queries(NamedTuple):
    """Query tokens, their ranges of keys, and their scores. Strides are in elements.

    Args:
        head_weights: ``[T, HI]`` or ``[B, S, HI]``, with the strides of a request and a token.
        row_starts: first key of each token; None for 0.
        row_ends: end of each token's keys, or number of keys of each request.
        ends_request: stride of ``row_ends``.
        offsets: first tokens of ragged requests; None if each request has ``query_len`` tokens.
        skip: tokens with at most this many keys get no scores.
        search_steps: iterations of the binary search for the request of a group.
        rows: int32 ``[2, T]``, output for ragged requests: end and request of each token.
        out: ``[T, num_keys]`` or ``[B, S, num_keys]``, with the strides of a request and a token.
        num_keys: columns of ``out``.
        first: the token from which ``offsets`` count.
        rows_request: stride of ``rows``.
        num_requests: B.
        query_len: tokens of a request; for ragged requests, tokens of all requests.

    The last four change from batch to batch. They are separate arguments of the kernel, so that it
    is not compiled again for every alignment.
    """

    head_weights: Tensor
    head_weights_request: int
    head_weights_token: int
    row_starts: Tensor | None
    row_ends: Tensor
    ends_request: int
    offsets: Tensor | None
    skip: int
    search_steps: int
    rows: Tensor | None
    out: Tensor
    out_request: int
    out_token: int
    num_keys: int
    first: int
    rows_request: int
    num_requests: int
    query_len: int

    @classmethod
    def of_ranges(cls, call: IndexerScores) -> Queries:
        """Tokens with ranges of contiguous keys, as one request."""
        num_tokens, num_keys = call.out.shape
        return cls(
            head_weights=call.weights,
            head_weights_request=0,
            head_weights_token=call.weights.stride(0),
            row_starts=call.row_starts,
            row_ends=call.row_ends,
            ends_request=0,
            offsets=None,
            skip=0,
            search_steps=0,
            rows=None,
            out=call.out,
            out_request=0,
            out_token=call.out.stride(0),
            num_keys=num_keys,
            first=0,
            rows_request=0,
            num_requests=1,
            query_len=num_tokens,
        )

    @classmethod
    def of_requests(cls, call: IndexerScoresPaged) -> Queries:
        """Tokens of requests of equal length over pages."""
        batch, query_len = call.index_q.shape[:2]
        return cls(
            head_weights=call.weights,
            head_weights_request=call.weights.stride(0),
            head_weights_token=call.weights.stride(1),
            row_starts=None,
            row_ends=call.seq_lens,
            ends_request=call.seq_lens.stride(0),
            offsets=None,
            skip=0,
            search_steps=0,
            rows=None,
            out=call.out,
            out_request=call.out.stride(0),
            out_token=call.out.stride(1),
            num_keys=call.max_seq_len,
            first=0,
            rows_request=0,
            num_requests=batch,
            query_len=query_len,
        )

    @classmethod
    def of_ragged(cls, call: IndexerTopk, some: slice, scores: Tensor, rows: Tensor) -> Queries:
        """Some tokens of ragged requests over pages, with their scores, ends and requests."""
        num_requests = call.page_table.shape[0]
        return cls(
            head_weights=call.weights[some],
            head_weights_request=0,
            head_weights_token=call.weights.stride(0),
            row_starts=None,
            row_ends=call.seq_lens,
            ends_request=call.seq_lens.stride(0),
            offsets=call.input_row_offsets,
            skip=call.topk,
            search_steps=num_requests.bit_length(),
            rows=rows,
            out=scores,
            out_request=0,
            out_token=scores.stride(0),
            num_keys=scores.shape[1],
            first=some.start,
            rows_request=rows.stride(0),
            num_requests=num_requests,
            query_len=scores.shape[0],
        )


def most_groups(num_tokens: int, tokens: int, num_requests: int) -> int:
    """Most groups of ``tokens`` tokens, none of two requests, among tokens of ragged requests."""
    return num_tokens if tokens == 1 else num_tokens // tokens + num_requests + 1


class Group(NamedTuple):
    """Request of a group, its first token, and the end of the request's tokens."""

    request: int
    first: int
    stop: int


class Share(NamedTuple):
    """Share of a CTA: its first group, the group's tiles in earlier shares, its number of tiles."""

    group: int
    skipped: int
    tiles: int


@gluon.jit
def first_token_of(queries, request):
    """First token of a request, counted from ``queries.first``; 0 for the first request."""
    offset = gl.load(queries.offsets + request) - queries.first
    offset = gl.minimum(gl.maximum(offset, 0), queries.query_len).to(gl.int32)
    return gl.where(request > 0, offset, 0)


@gluon.jit
def first_group_of(queries, request, T: gl.constexpr):
    """Number of the first group of a ragged request: its first token, if a group has one token.

    Else ``offsets[b] // tokens + b``: this numbering needs no prefix sum over requests, but some
    groups have no tokens.
    """
    group = first_token_of(queries, request)
    if T.tokens > 1:
        group = group // T.tokens + request
    return group


@gluon.jit
def request_of(queries, group, T: gl.constexpr, MANY: gl.constexpr):
    """The ragged request of a group, or of a tensor of groups; the last that begins before it."""
    # Guess that all have equally many tokens, as in most decodes: a search waits for each load.
    pitch = gl.fdiv(queries.query_len * 1.0, gl.maximum(queries.num_requests, 1) * 1.0)
    if T.tokens > 1:
        pitch = pitch / T.tokens + 1.0
    request = gl.fdiv(group.to(gl.float32), pitch).to(gl.int32)
    request = gl.minimum(request, gl.maximum(queries.num_requests - 1, 0))
    following = gl.minimum(request + 1, queries.num_requests)
    wrong = first_group_of(queries, request, T) > group
    wrong = wrong | (first_group_of(queries, following, T) <= group)
    steps = gl.where(wrong, queries.search_steps, 0)
    if MANY:
        steps = gl.max(steps, 0)
    if steps > 0:
        request = group * 0
        last = request + queries.num_requests
        for _ in range(steps):
            middle = (request + last + 1) // 2
            before = first_group_of(queries, middle, T) <= group
            request = gl.where(before, middle, request)
            last = gl.where(before, last, middle - 1)
    return request


@gluon.jit
def locate_group(queries, group, T: gl.constexpr, MANY: gl.constexpr = False):
    """The request and the tokens of a group, or with MANY of a tensor of groups.

    Tokens after the last ragged request form one more request.
    """
    if queries.offsets is None:
        groups = gl.cdiv(queries.query_len, T.tokens)
        request = group // groups
        first = group % groups * T.tokens
        stop = gl.where(request < queries.num_requests, queries.query_len, 0)
    else:
        request = request_of(queries, group, T, MANY)
        begin_token = first_token_of(queries, request)
        first = begin_token + (group - first_group_of(queries, request, T)) * T.tokens
        real = request < queries.num_requests
        end_token = first_token_of(queries, gl.where(real, request + 1, request))
        stop = gl.where(real, end_token, queries.query_len)
    return Group(request, first, stop)


@gluon.jit
def visible_keys(queries, group, token, T: gl.constexpr):
    """Range of the keys that a token of a group sees: the first one, and the end."""
    real = token < group.stop
    if queries.row_starts is not None:
        start = gl.load(queries.row_starts + token, mask=real, other=0)
        start = gl.minimum(gl.maximum(start, 0), queries.num_keys).to(gl.int32)
        end = gl.load(queries.row_ends + token, mask=real, other=0)
    else:
        start = token * 0
        real = real & (group.request < queries.num_requests)
        if queries.offsets is not None:  # tokens before the first request see no keys
            begin_token = gl.load(queries.offsets + group.request + token * 0, mask=real)
            real = real & (token >= begin_token - queries.first)
        at = queries.row_ends + group.request.to(gl.int64) * queries.ends_request + token * 0
        if T.own_ends:
            at += token
        end = gl.maximum(gl.load(at, mask=real, other=0), 0)
        if T.causal:
            if queries.offsets is None:
                end -= queries.query_len - 1 - token
            else:
                end_token = gl.load(queries.offsets + group.request + 1 + token * 0, mask=real)
                end -= end_token - queries.first - 1 - token
        if T.ratio > 1:
            end = gl.maximum(end, 0) // T.ratio
    end = gl.where(real, gl.minimum(gl.maximum(end, 0), queries.num_keys), 0)
    return start, end.to(gl.int32)


@gluon.jit
def visible_tiles(queries, group, T: gl.constexpr):
    """First tile and number of tiles with keys that any token of a group sees."""
    TOKENS: gl.constexpr = T.tokens
    if queries.row_starts is not None or T.own_ends:
        low = group.first * 0 + queries.num_keys
        high = group.first * 0
        for t in gl.static_range(TOKENS):
            start, end = visible_keys(queries, group, group.first + t, T)
            low = gl.where(start < end, gl.minimum(low, start), low)
            high = gl.where(start < end, gl.maximum(high, end), high)
    else:
        low = group.first * 0
        last = gl.minimum(group.first + TOKENS, group.stop) - 1
        _, high = visible_keys(queries, group, last, T)
        high = gl.where((last >= group.first) & (high > queries.skip), high, 0)
    first_tile = low // T.block_n
    return first_tile, gl.maximum((high + T.block_n - 1) // T.block_n - first_tile, 0)


@triton.constexpr_function
def groups_at_once(T):
    """Number of groups in one step of the counting of tiles."""
    return 1024 if T.page_size == 0 else 128


@triton.constexpr_function
def counts_layout(at_once):
    """Layout of the counts; each warp has all of 128 groups, so that sums need no barrier."""
    return gl.BlockedLayout([4 if at_once == 128 else 1], [32], [4], [0])


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def count_tiles(queries, base, num_groups, T: gl.constexpr):
    """Numbers of tiles of some groups from ``base`` on."""
    AT_ONCE: gl.constexpr = groups_at_once(T)
    index = base + gl.arange(0, AT_ONCE, counts_layout(AT_ONCE))
    _, tiles = visible_tiles(queries, locate_group(queries, index, T, True), T)
    return gl.where(index < num_groups, tiles, 0)


@gluon.jit
def count_finished_groups(tiles, begin, passed, behind, before):
    """Count the groups that end at or before tile ``begin``, and their tiles."""
    ends = gl.associative_scan(tiles, 0, add) + before
    done = ends <= begin
    passed += gl.sum(done.to(gl.int32), 0)
    behind = gl.maximum(behind, gl.max(gl.where(done, ends, 0), 0))
    return passed, behind, before + gl.sum(tiles, 0)


@gluon.jit
def partition_tiles(queries, num_groups, T: gl.constexpr):
    """The share of this CTA."""
    AT_ONCE: gl.constexpr = groups_at_once(T)
    some = count_tiles(queries, 0, num_groups, T)  # in most launches, of all groups
    total = gl.sum(some, 0)
    for base in range(AT_ONCE, num_groups, AT_ONCE):
        total += gl.sum(count_tiles(queries, base, num_groups, T), 0)
    each = gl.cdiv(total, gl.num_programs(0))
    begin = gl.minimum(gl.program_id(0) * each, total)
    passed, behind, before = count_finished_groups(some, begin, 0, 0, 0)
    for base in range(AT_ONCE, num_groups, AT_ONCE):
        some = count_tiles(queries, base, num_groups, T)
        passed, behind, before = count_finished_groups(some, begin, passed, behind, before)
    return Share(passed, begin - behind, gl.minimum(each, total - begin))

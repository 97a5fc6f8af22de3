"""Random inputs, as dirty as in serving.

The distributions come from the tests of FlashMLA and DeepGEMM. Unselected rows are NaN, selections
contain ids from both ends of the integer range, page tables end in garbage, and pages are shuffled.
Each ``<op>_case`` returns the arguments of this op, for the public function and the reference.

All numbers are drawn on the CPU, so a seed gives the same inputs on every device.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from sparsemla import reference
from sparsemla.cache import PagedCache, slots_of
from sparsemla.formats import BF16_576, INDEX_FP8, CacheFormat, ScaleMode, to_fp8
from sparsemla.plan import Plan, plan_batch
from sparsemla.pooling import Pooling, WindowState
from sparsemla.residency import EMPTY, RowTable
from sparsemla.rope import cos_sin_table, rope_frequencies
from sparsemla.shards import ContextShard
from sparsemla.weights import HeadWeight, MLALayer

Arguments = dict[str, object]
Item = TypeVar("Item")

GARBAGE_PAGE = 2147480000
"""The page id in unused entries of page tables."""


def invalid_ids(num_rows: int) -> list[int]:
    """Ids outside ``[0, num_rows)``, including both ends of int32."""
    fixed = [-(2**31), -123456, -1, num_rows, 114514, 1919810, GARBAGE_PAGE, 2**31 - 1]
    return [i for i in fixed if i < 0 or i >= num_rows]


@dataclass
class Draw:
    """A source of random tensors.

    Args:
        seed: equal seeds give equal tensors.
        device: device of the tensors.

    >>> torch.equal(Draw(7).normal(2, 3), Draw(7).normal(2, 3))
    True
    """

    seed: int = 0
    device: torch.device | str = "cpu"
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Standard normal values of this shape."""
        return torch.randn(shape, generator=self.generator).to(dtype).to(self.device)

    def uniform(self) -> float:
        """A number in [0, 1)."""
        return torch.rand((), generator=self.generator).item()

    def integers(
        self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int32
    ) -> Tensor:
        """Integers in [low, high) of this shape."""
        drawn = torch.randint(low, high, shape, generator=self.generator)
        return drawn.to(dtype).to(self.device)

    def permutation(self, size: int) -> Tensor:
        """A random permutation of 0 .. size - 1."""
        return torch.randperm(size, generator=self.generator).to(self.device)

    def shuffled(self, values: Sequence[Item]) -> list[Item]:
        """The values in random order."""
        return [values[i] for i in torch.randperm(len(values), generator=self.generator).tolist()]

    def tensor(
        self, values: Sequence[int] | Sequence[Sequence[int]], dtype: torch.dtype = torch.int32
    ) -> Tensor:
        """The given integers as a tensor on the device."""
        return torch.tensor(values, dtype=dtype, device=self.device)


def embed(tensor: Tensor) -> Tensor:
    """The same values as a view into a larger tensor of NaN or -1, with non-contiguous strides.

    >>> embed(torch.zeros(2, 3)).stride()
    (131, 1)
    """
    shape = [*(n + 1 for n in tensor.shape[:-1]), tensor.shape[-1] + 128]
    filler = math.nan if tensor.is_floating_point() else -1
    larger = torch.full(shape, filler, dtype=torch.float32, device=tensor.device).to(tensor.dtype)
    inner = larger[tuple(slice(n) for n in tensor.shape)]
    return inner.copy_(tensor)


def prefill_rows(draw: Draw, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Queries and keys of prefill: standard deviation 0.1, mean between -0.05 and 0.05."""
    return (draw.normal(*shape) / 10 + (draw.uniform() - 0.5) / 10).clamp(-10, 10).to(dtype)


def decode_queries(draw: Draw, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Queries of decode: standard normal, clamped to [-1, 1]."""
    return draw.normal(*shape).clamp(-1, 1).to(dtype)


def sinks(draw: Draw, num_heads: int) -> Tensor:
    """Sink logits: about a third each of +inf, -inf and standard normal."""
    kind = draw.integers(0, 16, num_heads)
    values = draw.normal(num_heads)
    return values.masked_fill(kind < 5, math.inf).masked_fill(kind > 10, -math.inf)


def selections(
    draw: Draw, num_tokens: int, topk: int, rows: Tensor, num_rows: int, share: float = 1.0
) -> Tensor:
    """Selections ``[num_tokens, topk]`` of distinct valid ids, mixed with invalid ids.

    Args:
        draw: the source of random tensors.
        num_tokens: rows of the result.
        topk: columns of the result.
        rows: valid ids to select from.
        num_rows: ids from this one on are invalid.
        share: fraction of valid entries, if ``rows`` has as many.
    """
    invalid = draw.tensor(invalid_ids(num_rows), torch.int64)
    size = min(len(rows), int(share * topk))
    out = []
    for _ in range(num_tokens):
        valid = rows[draw.permutation(len(rows))[:size]].long()
        surplus = invalid[draw.integers(0, len(invalid), topk - size).long()]
        out.append(torch.cat([valid, surplus])[draw.permutation(topk)])
    return torch.stack(out).int()


def poisoned_cache(
    draw: Draw,
    format: CacheFormat,
    num_pages: int,
    page_size: int,
    used: Tensor,
    num_layers: int | None = None,
    scale_mode: ScaleMode = "pow2",
) -> PagedCache:
    """A cache with random rows in the slots ``used`` and NaN in all others.

    With ``num_layers`` the result is the last layer of a cache; its other layers are NaN.
    """
    whole = PagedCache.allocate(
        format, num_pages, page_size, num_layers=num_layers, device=draw.device
    )
    layers = [whole] if num_layers is None else [whole.layer(i) for i in range(num_layers)]
    everywhere = torch.arange(num_pages * page_size, device=draw.device)
    for layer in layers:
        nan = torch.full((len(everywhere), format.head_dim), math.nan, device=draw.device)
        layer.write(everywhere, nan)
    rows = (draw.normal(len(used), format.head_dim) / 10).clamp(-1, 1)
    layers[-1].write(used.long(), rows, scale_mode=scale_mode)
    return layers[-1]


def page_tables(draw: Draw, seq_lens: Sequence[int], page_size: int) -> tuple[Tensor, int]:
    """A page table with shuffled pages for requests of these lengths, and the number of pages.

    Each row of the table ends in at least two garbage entries.
    """
    counts = [-(-n // page_size) for n in seq_lens]
    num_pages = sum(counts) + 2
    pages = iter(draw.permutation(num_pages).tolist())
    width = max(counts, default=0) + 2
    table = [[next(pages) for _ in range(n)] + [GARBAGE_PAGE] * (width - n) for n in counts]
    return draw.tensor(table).view(len(counts), width), num_pages


def paged_requests(
    draw: Draw,
    format: CacheFormat,
    seq_lens: Sequence[int],
    page_size: int,
    num_layers: int | None = None,
    scale_mode: ScaleMode = "pow2",
) -> tuple[PagedCache, Tensor]:
    """A cache with requests of these lengths, NaN in all other slots, and the page table."""
    table, num_pages = page_tables(draw, seq_lens, page_size)
    slots = slots_of_requests(table, seq_lens, page_size)
    cache = poisoned_cache(draw, format, num_pages, page_size, slots, num_layers, scale_mode)
    return cache, table


def slots_of_requests(table: Tensor, seq_lens: Sequence[int], page_size: int) -> Tensor:
    """Slots of all positions of all requests, request by request."""
    lengths = torch.tensor(seq_lens, device=table.device)
    requests = torch.arange(len(seq_lens), device=table.device).repeat_interleave(lengths)
    starts = (lengths.cumsum(0) - lengths).repeat_interleave(lengths)
    positions = torch.arange(len(starts), device=table.device) - starts
    return slots_of(table, requests, positions, page_size)


def varied_lengths(draw: Draw, batch: int, mean: int, at_least: int = 0) -> list[int]:
    """Lengths from a normal distribution with a standard deviation of half the mean."""
    lengths = mean + mean / 2 * draw.normal(batch).cpu()
    return [max(int(n), at_least) for n in lengths]


def written_cache(
    draw: Draw, format: CacheFormat, num_pages: int, page_size: int, num_layers: int | None = None
) -> PagedCache:
    """A cache with random rows in every slot; with ``num_layers`` the second layer of a cache."""
    cache = PagedCache.allocate(
        format, num_pages, page_size, num_layers=num_layers, device=draw.device
    )
    cache = cache if num_layers is None else cache.layer(1)
    everywhere = torch.arange(cache.num_slots, device=draw.device)
    cache.write(everywhere, draw.normal(cache.num_slots, format.head_dim))
    return cache


def distant_pages(draw: Draw, format: CacheFormat) -> PagedCache:
    """Two pages of 64 rows with more than 2 GiB between them.

    The memory between the pages is allocated but, on a CPU, never touched.
    """
    apart = 1152 * (2**31 // 1152 + 1)
    size = apart + format.page_bytes(64)
    memory = torch.empty(size, dtype=torch.uint8, device=draw.device)
    stride = apart // format.storage_dtype.itemsize
    data = memory.view(format.storage_dtype).as_strided(
        (2, 64, format.row_width), (stride, format.row_width, 1)
    )
    cache = PagedCache(data, format)
    cache.write(torch.arange(128, device=draw.device), draw.normal(128, format.head_dim) / 10)
    return cache


MAX_POSITIONS = 300
"""Rows of the RoPE tables."""


def _places(
    draw: Draw, num_tokens: int, num_slots: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Random positions and slots; the last slot is -1."""
    slots = draw.permutation(num_slots)[:num_tokens]
    slots[-1:] = -1
    return draw.integers(0, MAX_POSITIONS, num_tokens, dtype=dtype), slots.to(dtype)


def _table(draw: Draw, rope_dim: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return cos_sin_table(rope_frequencies(rope_dim, 1e4), MAX_POSITIONS).to(dtype).to(draw.device)


def fused_rope_rmsnorm_quant_case(
    draw: Draw,
    format: CacheFormat,
    *,
    num_tokens: int = 6,
    num_heads: int = 3,
    rope_dim: int = 64,
    norm_dim: int | None = None,
    page_size: int = 4,
    num_layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype = torch.int64,
    table_dtype: torch.dtype = torch.float32,
    strided: bool = False,
    with_rows: bool = False,
    query_norm: bool = False,
    **options: object,
) -> Arguments:
    """Arguments of ``fused_rope_rmsnorm_quant``, to which ``options`` are added.

    By default ``norm_dim`` follows the models of the format: all dims but the RoPE dims, or the
    whole row if key and value are the same.
    """
    wrap = embed if strided else _as_it_is
    if norm_dim is None:
        whole = format.head_dim == format.value_dim
        norm_dim = format.head_dim if whole else format.head_dim - rope_dim
    num_pages = -(-num_tokens // page_size) + 2
    cache = written_cache(draw, format, num_pages, page_size, num_layers)
    positions, slots = _places(draw, num_tokens, cache.num_slots, index_dtype)
    if with_rows:
        shape = (num_tokens, format.head_dim)
        options["kv_out"] = torch.zeros(shape, dtype=torch.bfloat16, device=draw.device)
    query_dim = format.head_dim if query_norm else rope_dim
    return {
        "q_rope": wrap(draw.normal(num_tokens, num_heads, query_dim, dtype=dtype)),
        "kv": wrap(draw.normal(num_tokens, format.head_dim, dtype=dtype) * 3),
        "cos_sin_cache": _table(draw, rope_dim, table_dtype),
        "kv_norm_weight": 1 + draw.normal(norm_dim) / 5,
        "cache": cache,
        "positions": positions,
        "slot_mapping": slots,
        "query_norm": query_norm,
        **options,
    }


def append_index_keys_case(
    draw: Draw,
    format: CacheFormat,
    *,
    num_tokens: int = 6,
    rope_dim: int = 64,
    page_size: int = 4,
    dtype: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype = torch.int64,
    table_dtype: torch.dtype = torch.float32,
    strided: bool = False,
    **options: object,
) -> Arguments:
    """Arguments of ``append_index_keys``, to which ``options`` are added."""
    cache = written_cache(draw, format, -(-num_tokens // page_size) + 2, page_size)
    positions, slots = _places(draw, num_tokens, cache.num_slots, index_dtype)
    k = draw.normal(num_tokens, format.head_dim, dtype=dtype)
    return {
        "index_k": embed(k) if strided else k,
        "norm_weight": 1 + draw.normal(format.head_dim) / 5,
        "norm_bias": draw.normal(format.head_dim) / 5,
        "cos_sin_cache": _table(draw, rope_dim, table_dtype),
        "cache": cache,
        "positions": positions,
        "slot_mapping": slots,
        **options,
    }


def prepare_index_queries_case(
    draw: Draw,
    format: CacheFormat,
    *,
    num_tokens: int = 4,
    num_heads: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    **options: object,
) -> Arguments:
    """Arguments of ``prepare_index_queries``, to which ``options`` are added."""
    return {
        "index_q": draw.normal(num_tokens, num_heads, format.head_dim, dtype=dtype) * 3,
        "weights": draw.normal(num_tokens, num_heads, dtype=dtype),
        "cos_sin_cache": _table(draw, 64),
        "positions": draw.integers(0, MAX_POSITIONS, num_tokens),
        "format": format,
        **options,
    }


def fused_indexer_rope_quant_case(
    draw: Draw,
    format: CacheFormat,
    *,
    num_tokens: int = 6,
    num_heads: int = 5,
    dtype: torch.dtype = torch.bfloat16,
    **options: object,
) -> Arguments:
    """Arguments of ``fused_indexer_rope_quant``, to which ``options`` are added."""
    keys = append_index_keys_case(draw, format, num_tokens=num_tokens, dtype=dtype) | options
    return {
        "index_q": draw.normal(num_tokens, num_heads, format.head_dim, dtype=dtype) * 3,
        "weights": draw.normal(num_tokens, num_heads, dtype=dtype),
        **keys,
    }


def pool_windows_case(
    draw: Draw,
    format: CacheFormat,
    pooling: Pooling,
    *,
    steps: Sequence[tuple[int, int]] = ((0, 9), (5, 1), (2, 6), (0, 3), (127, 2), (250, 7)),
    rope_dim: int = 64,
    max_drafts: int = 0,
    bias: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    index_dtype: torch.dtype = torch.int32,
    table_dtype: torch.dtype = torch.float32,
    page_size: int = 4,
    strided: bool = False,
    interleaved: bool = True,
    with_rows: bool = False,
    state_page: int | None = None,
) -> Arguments:
    """Arguments of ``pool_windows``.

    Rings hold NaN where no earlier token of their request left a row. The second request has no
    ring. Of three tokens behind the requests, two have no request and one names the first.

    Args:
        draw: the source of random tensors.
        format: of the cache.
        pooling: the windows.
        steps: each request's first position and number of tokens.
        rope_dim: rotated dims.
        max_drafts: rows of a ring beyond the window.
        bias: whether gates have one.
        dtype: of values and gates.
        index_dtype: of positions, request ids and offsets.
        table_dtype: of the RoPE table.
        page_size: of the cache.
        strided: make values and gates slices of one projection.
        interleaved: pairs of RoPE.
        with_rows: pass ``kv_out``.
        state_page: keep rows on pages of so many, which begin with the first window that a step
            reads; None for rings.
    """
    dim = format.head_dim
    width = pooling.width(dim)
    counts = [count for _, count in steps]
    num_tokens, batch = sum(counts) + 3, len(steps)
    both = draw.normal(num_tokens, 2 * width, dtype=dtype)
    values, gates = both.chunk(2, dim=1)
    if not strided:
        values, gates = values.contiguous(), gates.contiguous()
    kept = pooling.window + max_drafts
    ring = state_page or kept
    columns = 1 + (max(first + count for first, count in steps) // ring if state_page else 0)
    num_rings = batch * columns + 1
    rows = torch.full(
        (num_rings, ring, 2, width), math.nan, dtype=torch.float32, device=draw.device
    )
    state = WindowState(rows)
    rings = draw.permutation(num_rings)[: batch * columns].view(batch, columns)
    for number, (first, _) in enumerate(steps):
        for position in range(max(0, first - kept), first):
            ring_id = rings[number, position // ring if state_page else 0]
            rows[ring_id, position % ring] = draw.normal(2, width)
        if state_page:
            rings[number, : max(0, first - kept) // ring] = -1
    if batch > 1:
        rings[1] = -1
    positions = [first + i for first, count in steps for i in range(count)]
    positions += [3, 4, pooling.ratio - 1]
    requests = [b for b, count in enumerate(counts) for _ in range(count)] + [-1, batch, 0]
    offsets = [sum(counts[:b]) for b in range(batch)] + [num_tokens]
    offsets[-1] = sum(counts)
    cache = written_cache(draw, format, -(-num_tokens // page_size) + 1, page_size)
    slots = draw.permutation(cache.num_slots)[:num_tokens]
    slots[:1] = -1
    arguments: Arguments = {
        "values": values,
        "gates": gates,
        "norm_weight": draw.normal(dim, dtype=dtype),
        "cos_sin_cache": _table(draw, rope_dim, table_dtype),
        "state": state,
        "cache": cache,
        "pooling": pooling,
        "gate_bias": draw.normal(pooling.ratio, width) if bias else None,
        "positions": draw.tensor(positions, index_dtype),
        "request_ids": draw.tensor(requests, index_dtype),
        "input_row_offsets": draw.tensor(offsets, index_dtype),
        "ring_ids": (rings if state_page else rings[:, 0]).int(),
        "slot_mapping": slots.to(torch.int32),
        "interleaved": interleaved,
    }
    if with_rows:
        arguments["kv_out"] = torch.full(
            (num_tokens, dim), -7, dtype=torch.bfloat16, device=draw.device
        )
    return arguments


def to_slots_case(
    draw: Draw,
    *,
    num_tokens: int = 9,
    topk: int = 20,
    page_size: int = 4,
    dtype: torch.dtype = torch.int32,
    with_workspace: bool = False,
) -> Arguments:
    """Arguments of ``to_slots`` for 3 requests, with ids out of range and a missing page."""
    num_requests, width = 3, 4
    table = draw.permutation(num_requests * width).view(num_requests, width)
    table[0, 1] = -1
    indices = draw.integers(-2, width * page_size + 3, num_tokens, topk, dtype=torch.int64)
    extremes = draw.tensor([-(2**31), 2**31 - 1, GARBAGE_PAGE, width * page_size], torch.int64)
    indices[0, :4] = extremes
    arguments: Arguments = {
        "topk_indices": indices.to(dtype),
        "page_table": table.to(dtype),
        "request_ids": draw.integers(0, num_requests, num_tokens, dtype=dtype),
        "page_size": page_size,
    }
    if with_workspace:
        arguments["workspace_starts"] = draw.tensor([100, 7000], dtype)
        arguments["prefill_request_ids"] = draw.integers(-1, 2, num_tokens, dtype=dtype)
    return arguments


def entry_slots_case(
    draw: Draw,
    *,
    requests: Sequence[tuple[int, int]] = ((0, 9), (127, 3), (253, 5)),
    ratio: int = 4,
    page_size: int = 4,
    dtype: torch.dtype = torch.int32,
) -> Arguments:
    """Arguments of ``entry_slots``.

    A page is missing, and the last tokens have no request, or a position at an end of the range.

    Args:
        draw: the source of random tensors.
        requests: each request's first position and number of tokens.
        ratio: tokens of an entry.
        page_size: entries of a page.
        dtype: of all integers.
    """
    positions = [first + i for first, count in requests for i in range(count)]
    request_ids = [b for b, (_, count) in enumerate(requests) for _ in range(count)]
    longest = max(first + count for first, count in requests)
    batch, width = len(requests), -(-longest // (ratio * page_size)) + 1
    table = draw.permutation(batch * width).view(batch, width)
    table[-1, width // 2] = -1
    limits = torch.iinfo(dtype)
    return {
        "positions": draw.tensor([*positions, 7, 7, limits.min, limits.max, -1], dtype),
        "page_table": table.to(dtype),
        "request_ids": draw.tensor([*request_ids, -1, batch, 0, 0, 0], dtype),
        "ratio": ratio,
        "page_size": page_size,
    }


def visible_slots_case(
    draw: Draw,
    *,
    width: int = 20,
    requests: Sequence[tuple[int, int]] = ((0, 9), (127, 3), (253, 5)),
    ratio: int = 4,
    page_size: int = 4,
    dtype: torch.dtype = torch.int32,
) -> Arguments:
    """Arguments of ``visible_slots``: those of :func:`entry_slots_case` and the width."""
    tokens = entry_slots_case(
        draw, requests=requests, ratio=ratio, page_size=page_size, dtype=dtype
    )
    return tokens | {"width": width}


def gather_dequant_case(
    draw: Draw,
    format: CacheFormat,
    *,
    seq_lens: Sequence[int],
    page_size: int = 64,
    num_layers: int | None = None,
    seq_starts: Sequence[int] | None = None,
) -> Arguments:
    """Arguments of ``gather_dequant``: a workspace of -7 with an unused row around each request."""
    starts = [0] * len(seq_lens) if seq_starts is None else seq_starts
    totals = [n + first for n, first in zip(seq_lens, starts, strict=True)]
    cache, table = paged_requests(draw, format, totals, page_size, num_layers)
    workspace_starts, row = [], 1
    for length in seq_lens:
        workspace_starts.append(row)
        row += length + 1
    rows = torch.full((row, format.head_dim), -7.0, dtype=torch.bfloat16, device=draw.device)
    arguments: Arguments = {
        "cache": cache,
        "page_table": table,
        "seq_lens": draw.tensor(seq_lens),
        "workspace_starts": draw.tensor(workspace_starts),
        "out": rows,
    }
    if seq_starts is not None:
        arguments["seq_starts"] = draw.tensor(seq_starts)
    return arguments


def sparse_prefill_case(
    draw: Draw,
    *,
    num_tokens: int = 5,
    num_rows: int = 128,
    topk: int = 128,
    num_heads: int = 8,
    head_dim: int = 576,
    dtype: torch.dtype = torch.bfloat16,
    row_dtype: torch.dtype = torch.bfloat16,
    with_sink: bool = False,
    with_lengths: bool = False,
    share: float = 1.0,
    strided: bool = False,
) -> Arguments:
    """Arguments of ``sparse_prefill``; unselected rows are NaN."""
    wrap = embed if strided else _as_it_is
    rows = prefill_rows(draw, num_rows, head_dim, dtype=row_dtype)
    used = draw.permutation(num_rows)[: max(num_rows * 3 // 4, 1)]
    clean = torch.zeros(num_rows, dtype=torch.bool, device=draw.device)
    clean[used] = True
    rows[~clean] = math.nan
    lengths = None
    topk_indices = selections(draw, num_tokens, topk, used, num_rows, share)
    if with_lengths:
        lengths = draw.integers(0, max(topk + 1, 64), num_tokens).clamp_max(topk)
        topk_indices = _valid_nan_beyond(topk_indices, lengths, ~clean)
    return {
        "q": wrap(prefill_rows(draw, num_tokens, num_heads, head_dim, dtype=dtype)),
        "kv": wrap(rows),
        "topk_indices": wrap(topk_indices),
        "softmax_scale": 0.5,
        "topk_lengths": lengths,
        "attn_sink": sinks(draw, num_heads) if with_sink else None,
    }


def share_lists_case(
    draw: Draw,
    *,
    num_tokens: int = 9,
    topk: int = 20,
    list_tokens: int = 4,
    num_rows: int = 40,
    kind: str = "ascending",
    dtype: torch.dtype = torch.int32,
    with_lengths: bool = False,
    strided: bool = False,
) -> Arguments:
    """Arguments of ``share_lists``.

    Args:
        draw: the source of random tensors.
        kind: ``ascending`` lists, ``shuffled`` ones with ids from both ends of the range, or
            ``mixed``: ascending but for one list of every third group.
        num_rows: ids of ``ascending`` lists are smaller, but for the largest, 2^31 - 1.
    """
    wrap = embed if strided else _as_it_is
    rows = draw.permutation(num_rows)
    indices = selections(draw, num_tokens, topk, rows, num_rows, 0.9)
    if kind != "shuffled":
        sorted_rows = ascending(indices)
        changed = torch.arange(num_tokens, device=draw.device) % (3 * list_tokens) == 1
        indices = indices.where(changed[:, None] & (kind == "mixed"), sorted_rows)
    if dtype == torch.int64:  # beyond int32
        indices = indices.long()
        indices[indices == 2**31 - 1] = 2**40
    lengths = draw.integers(-3, topk + 3, num_tokens, dtype=dtype) if with_lengths else None
    return {
        "topk_indices": wrap(indices),
        "list_tokens": list_tokens,
        "topk_lengths": lengths,
    }


def ascending(indices: Tensor) -> Tensor:
    """The distinct entries of each row that are not negative, ascending, then -1."""
    out = torch.full_like(indices, -1)
    for row, to in zip(indices, out, strict=True):
        listed = row[row >= 0].unique()
        to[: len(listed)] = listed
    return out


def own_positions_case(
    draw: Draw,
    *,
    num_tokens: int = 9,
    topk: int = 20,
    shard: ContextShard = ContextShard(1, 3, 2),  # noqa: B008 (frozen)
    num_positions: int = 60,
    kind: str = "ascending",
    dtype: torch.dtype = torch.int32,
    strided: bool = False,
) -> Arguments:
    """Arguments of ``own_positions``.

    Args:
        draw: the source of random tensors.
        shard: the rank's share.
        num_positions: of the contexts; lists also name the last position, 2^31 - 1.
        kind: ``ascending`` lists as those of ``indexer_topk``, of which one is empty and one whole,
            or ``shuffled`` ones with ids from both ends of the range.
    """
    wrap = embed if strided else _as_it_is
    positions = draw.permutation(num_positions)
    indices = selections(draw, num_tokens, topk, positions, num_positions, 0.8)
    if kind == "ascending":
        indices = ascending(indices)
        indices[:1] = torch.arange(topk, device=draw.device)
        indices[1:2] = -1
    if dtype == torch.int64:  # beyond int32
        indices = indices.long()
        indices[indices == 2**31 - 1] = 2**32 + 2
    return {"topk_indices": wrap(indices), "shard": shard}


def resolve_rows_case(
    draw: Draw,
    *,
    contexts: Sequence[int] = (50, 3, 200, 0, 31),
    query_lens: Sequence[int] = (1, 2, 3, 1, 2),
    topk: int = 20,
    spare: int = 7,
    held: float = 0.8,
    page_size: int = 4,
    shard: ContextShard | None = None,
    dtype: torch.dtype = torch.int32,
    strided: bool = False,
) -> Arguments:
    """Arguments of ``resolve_rows``: seats in the middle of their requests' lives.

    Behind the requests come one of length 0 and one without a seat, a token each, and two tokens of
    no request. A list of the first request does not ascend, and some positions have no page.

    Args:
        draw: the source of random tensors.
        contexts: tokens of each request before this step.
        query_lens: its tokens in this step.
        topk: most entries of a list.
        spare: rows of a seat beyond what a step may need.
        held: how many of a seat's rows hold a position; some of these are dropped.
        page_size: of the large cache.
        shard: the rank's share.
        dtype: of all integers but the table.
        strided: whether tensors are slices of larger ones.
    """
    wrap = embed if strided else _as_it_is
    share = ContextShard(0, 1) if shard is None else shard
    batch, max_query_len = len(contexts), max(query_lens)
    totals = [context + tokens for context, tokens in zip(contexts, query_lens, strict=True)]
    longest = share.longest(max(totals))
    width = -(-longest // page_size) + 1
    pages = draw.permutation(batch * width).view(batch, width)
    pages = torch.cat([pages, pages[:2]])
    pages[[0, min(2, batch - 1)], :2] = -1
    pages[:, -1] = GARBAGE_PAGE
    per_seat, num_seats = max_query_len * topk + spare, batch + 2
    keys = torch.full((num_seats, per_seat), EMPTY, dtype=torch.int32)
    rows, order = (
        torch.stack([draw.permutation(per_seat).cpu() for _ in range(num_seats)]).int()
        for _ in range(2)
    )
    seats = draw.permutation(num_seats)[:batch].tolist()
    for seat, total in zip(seats, totals, strict=True):
        local = share.longest(total) + 1
        chosen = draw.permutation(local)[: int(held * per_seat)].cpu().sort().values
        keys[seat, : len(chosen)] = chosen.int()
    lists: list[list[int]] = []
    for context, tokens in zip(contexts, query_lens, strict=True):
        for token in range(tokens):
            visible = context + token + 1
            count = int(min(topk, visible) * (1 - 0.3 * draw.uniform()))
            positions = draw.permutation(visible)[:count].sort().values.tolist()
            lists.append(positions + [-1] * (topk - count))
    lists[0] = lists[0][::-1]  # does not ascend
    lists += [[0] + [-1] * (topk - 1)] * 4
    offsets = [0, *itertools.accumulate([*query_lens, 1, 1])]
    return {
        "topk_indices": wrap(draw.tensor(lists, dtype)),
        "input_row_offsets": draw.tensor(offsets, dtype),
        "seq_lens": draw.tensor([*totals, 0, 5], dtype),
        "seats": draw.tensor([*seats, seats[0], -1], dtype),
        "page_table": wrap(pages.to(dtype)),
        "table": RowTable(*(wrap(part.to(draw.device)) for part in (keys, rows, order))),
        "page_size": page_size,
        "max_query_len": max_query_len,
        "shard": shard,
        "stats": draw.tensor([5, 6], torch.int64),
    }


def fetch_rows_case(
    draw: Draw,
    format: CacheFormat,
    *,
    num_tokens: int = 5,
    topk: int = 9,
    page_size: int = 64,
    num_layers: int | None = None,
    dtype: torch.dtype = torch.int32,
    strided: bool = False,
) -> Arguments:
    """Arguments of ``fetch_rows``; some slots, rows and counts are out of range.

    Args:
        draw: the source of random tensors.
        format: of both caches.
        num_tokens: lists.
        topk: most rows of a list.
        page_size: of the source.
        num_layers: layers of the source's pages; one of them is read.
        dtype: of the integers.
        strided: whether lists are slices of larger tensors.
    """
    wrap = embed if strided else _as_it_is
    source = written_cache(draw, format, -(-300 // page_size), page_size, num_layers)
    num_rows = num_tokens * topk + 3
    target = written_cache(draw, format, num_rows, 1)
    slots = draw.integers(0, source.num_slots, num_tokens, topk).cpu()
    rows = draw.permutation(num_rows)[: num_tokens * topk].cpu().view(num_tokens, topk)
    counts = [int(draw.uniform() * (topk + 1)) for _ in range(num_tokens)]
    if num_tokens and topk:
        slots.view(-1)[::7] = draw.tensor(draw.shuffled(invalid_ids(source.num_slots))).cpu()[0]
        rows.view(-1)[::11] = invalid_ids(num_rows)[-1]
        counts[-1], counts[0] = topk + 3, topk
    return {
        "source": source,
        "target": target,
        "miss_slots": wrap(slots.to(dtype).to(draw.device)),
        "miss_rows": wrap(rows.to(dtype).to(draw.device)),
        "miss_counts": draw.tensor(counts, dtype),
    }


def forget_seats_case(
    draw: Draw, *, rows_per_seat: int = 50, dtype: torch.dtype = torch.int32
) -> Arguments:
    """Arguments of ``forget_seats``; some seats are out of range."""
    table = resolve_rows_case(draw, spare=rows_per_seat)["table"]
    seats = [*draw.shuffled(range(7))[:3], -1, 7, 2**31 - 1]
    return {"table": table, "seats": draw.tensor(seats, dtype)}


def shared_prefill_case(
    draw: Draw,
    *,
    list_tokens: int = 4,
    kind: str = "ascending",
    num_tokens: int = 10,
    strided: bool = False,
    index_dtype: torch.dtype = torch.int32,
    **options: object,
) -> Arguments:
    """Arguments of ``sparse_prefill`` with lists for several tokens; unselected rows are NaN.

    Entries without a member, and behind the end of a list, name such rows. Bits of tokens that a
    list does not have are set.

    Args:
        draw: the source of random tensors.
        kind: the tokens' own lists are ``ascending`` or ``shuffled``; or all tokens of a list
            attend to all of it, ``whole``.
    """
    wrap = embed if strided else _as_it_is
    arguments = sparse_prefill_case(
        draw, num_tokens=num_tokens, strided=strided, **cast("dict[str, Any]", options)
    )
    indices = cast("Tensor", arguments["topk_indices"]).to(index_dtype)
    lengths = cast("Tensor | None", arguments["topk_lengths"])
    arguments["list_tokens"] = list_tokens
    if kind == "whole":
        num_lists = -(-num_tokens // list_tokens)
        arguments["topk_indices"] = wrap(indices[:num_lists])
        arguments["topk_lengths"] = None if lengths is None else lengths[:num_lists]
        return arguments
    if kind == "ascending":
        if lengths is not None:
            column = torch.arange(indices.shape[1], device=draw.device)
            indices = indices.where(column < lengths[:, None], -1)
        indices = ascending(indices)
    lists, ends, token_mask = reference.share_lists(
        indices, list_tokens=list_tokens, topk_lengths=lengths
    )
    ends = (ends + 3).clamp_max(lists.shape[1])  # with entries of nobody
    column = torch.arange(lists.shape[1], device=draw.device)
    beyond = column >= ends[:, None]
    is_nan = cast("Tensor", arguments["kv"]).isnan().any(1)
    if bool(is_nan.any()):
        lists = lists.where((token_mask > 0) & ~beyond, int(is_nan.nonzero()[0]))
    counts = (num_tokens - list_tokens * torch.arange(len(ends))).clamp_max(list_tokens)
    others = (255 << counts) & 255
    token_mask = token_mask | others[:, None].to(draw.device, torch.uint8)
    arguments["topk_indices"] = wrap(lists)
    arguments["topk_lengths"] = ends
    arguments["token_mask"] = wrap(token_mask.masked_fill(beyond, 255))
    return arguments


def split_queries(arguments: Arguments, value_dim: int = 512) -> Arguments:
    """The same queries, with the dims behind the value in a separate tensor.

    That tensor is a slice of wider rows, whose other dims are NaN.
    """
    q = cast("Tensor", arguments["q"])
    wide = torch.nn.functional.pad(q[..., value_dim:], (128, 0), value=math.nan)
    return arguments | {"q": q[..., :value_dim].contiguous(), "q_rope": wide[..., 128:]}


def sparse_attention_case(
    draw: Draw, *, dtype: torch.dtype = torch.bfloat16, **options: object
) -> Arguments:
    """Arguments of ``sparse_attention``: :func:`sparse_prefill_case` with duplicate entries.

    With ``list_tokens`` among the options, :func:`shared_prefill_case`. The sink of the first head
    is finite.
    """
    make = shared_prefill_case if "list_tokens" in options else sparse_prefill_case
    arguments = make(draw, dtype=dtype, row_dtype=dtype, **cast("dict[str, Any]", options))
    for name in ("topk_indices", "token_mask"):
        if arguments.get(name) is not None:
            entries = cast("Tensor", arguments[name])
            entries[:, 1::7] = entries[:, :1].clone()
    if arguments["attn_sink"] is not None:
        cast("Tensor", arguments["attn_sink"])[:1] = draw.uniform()
    return arguments


def sparse_attention_backward_case(
    draw: Draw,
    *,
    with_dlse: bool = False,
    strided: bool = False,
    max_workspace_bytes: int = 2 << 30,
    **options: object,
) -> Arguments:
    """Arguments of ``sparse_attention_backward``; out and lse are those of the definition."""
    forward = sparse_attention_case(draw, strided=strided, **cast("dict[str, Any]", options))
    q = cast("Tensor", forward["q"])
    out, lse = reference.sparse_attention(**cast("dict[str, Any]", forward))
    wrap = embed if strided else _as_it_is
    return {
        "dout": wrap(draw.normal(*out.shape, dtype=q.dtype)),
        **forward,
        "out": wrap(out.to(q.dtype)),
        "lse": wrap(lse),
        "dlse": wrap(draw.normal(*lse.shape)) if with_dlse else None,
        "max_workspace_bytes": max_workspace_bytes,
    }


def sparse_decode_case(
    draw: Draw,
    *,
    format: CacheFormat,
    batch: int = 3,
    query_len: int = 1,
    num_heads: int = 8,
    seq_len: int = 200,
    topk: int = 64,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    with_sink: bool = False,
    with_lengths: bool = False,
    extra: tuple[CacheFormat, int, int, int] | None = None,
    with_extra_lengths: bool = False,
    own_lengths: bool = False,
    num_layers: int | None = None,
    share: float = 0.9,
    strided: bool = False,
    scale_mode: ScaleMode = "pow2",
    num_splits: int | None = None,
) -> Arguments:
    """Arguments of ``sparse_decode``.

    Args:
        draw: the source of random tensors.
        format: format of the cache; other keywords set the problem's sizes and features.
        extra: format, sequence length, top-k and page size of a second cache.
        own_lengths: lengths are ``[batch, query_len]``, and not ``[batch]``.
        num_splits: default the op's choice, which on a CPU is one.
    """
    wrap = embed if strided else _as_it_is
    shape = (batch, query_len, num_heads, format.head_dim)
    stream = _stream(
        draw,
        format,
        batch,
        query_len,
        seq_len,
        topk,
        page_size,
        with_lengths,
        own_lengths,
        num_layers,
        share,
        scale_mode,
    )
    arguments: Arguments = {
        "q": wrap(decode_queries(draw, *shape, dtype=dtype)),
        "cache": stream[0],
        "topk_indices": wrap(stream[1]),
        "softmax_scale": format.head_dim**-0.55,
        "topk_lengths": stream[2],
        "attn_sink": sinks(draw, num_heads) if with_sink else None,
    }
    if extra is not None:
        extra_format, extra_len, extra_topk, extra_page_size = extra
        stream = _stream(
            draw,
            extra_format,
            batch,
            query_len,
            extra_len,
            extra_topk,
            extra_page_size,
            with_extra_lengths,
            own_lengths,
            None,
            share,
            scale_mode,
        )
        arguments["extra_cache"] = stream[0]
        arguments["extra_topk_indices"] = stream[1]
        arguments["extra_topk_lengths"] = stream[2]
    if num_splits is not None:
        arguments["num_splits"] = num_splits
    return arguments


def paged_prefill_case(draw: Draw, **options: object) -> Arguments:
    """Arguments of ``sparse_prefill`` over caches: each token is a request of a decode."""
    return as_prefill(sparse_decode_case(draw, **cast("dict[str, Any]", options)))


def as_prefill(decode: Arguments) -> Arguments:
    """Arguments of ``sparse_prefill`` from those of ``sparse_decode`` with single queries."""
    names = {"cache": "kv"}
    return {
        names.get(name, name): cast("Tensor", value)[:, 0]
        if name in ("q", "topk_indices", "extra_topk_indices")
        else value
        for name, value in decode.items()
    }


def _stream(
    draw: Draw,
    format: CacheFormat,
    batch: int,
    query_len: int,
    seq_len: int,
    topk: int,
    page_size: int,
    with_lengths: bool,
    own_lengths: bool,
    num_layers: int | None,
    share: float,
    scale_mode: ScaleMode,
) -> tuple[PagedCache, Tensor, Tensor | None]:
    """A cache, selections ``[batch, query_len, topk]``, and their lengths or None."""
    num_pages = batch * -(-seq_len // page_size) + 1
    num_slots = num_pages * page_size
    used = draw.permutation(num_slots)[: num_slots * 3 // 4]
    cache = poisoned_cache(draw, format, num_pages, page_size, used, num_layers, scale_mode)
    indices = selections(draw, batch * query_len, topk, used, num_slots, share)
    lengths = None
    if with_lengths:
        lengths = draw.integers(0, topk + 1, batch, *([query_len] if own_lengths else []))
        unused = torch.ones(num_slots, dtype=torch.bool, device=draw.device)
        unused[used] = False
        each = lengths.flatten() if own_lengths else lengths.repeat_interleave(query_len)
        indices = _valid_nan_beyond(indices, each, unused)
    return cache, indices.view(batch, query_len, topk), lengths


def _valid_nan_beyond(indices: Tensor, lengths: Tensor, is_nan: Tensor) -> Tensor:
    """Selections with the id of a NaN row as the first entry after the length."""
    column = torch.arange(indices.shape[1], device=indices.device)
    nan_row = int(is_nan.nonzero()[0]) if bool(is_nan.any()) else -1
    return indices.where(column != lengths[:, None], nan_row)


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def eighths(x: Tensor) -> Tensor:
    """Multiples of 1/8: their products have exact sums in float32, in any order.

    A score of an indexer's head that is rounded to another side of 0 has another gradient.
    """
    return (8 * x).round() / 8


def select_rows_case(
    draw: Draw, *, topk: int = 16, max_workspace_bytes: int = 8000, **options: object
) -> Arguments:
    """Arguments of ``select_rows``: those of :func:`indexer_scores_case`, exact, in bfloat16."""
    scores = indexer_scores_case(draw, fp8=False, exact=True, **cast("dict[str, Any]", options))
    return {
        "index_q": scores["index_q"],
        "weights": scores["weights"],
        "index_k": scores["index_k"],
        "topk": topk,
        "row_starts": scores["row_starts"],
        "row_ends": scores["row_ends"],
        "max_workspace_bytes": max_workspace_bytes,
    }


def selected_scores_case(
    draw: Draw,
    *,
    num_tokens: int = 5,
    num_rows: int = 128,
    topk: int = 70,
    num_heads: int = 8,
    head_dim: int = 128,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    with_lengths: bool = False,
    share: float = 0.9,
    strided: bool = False,
) -> Arguments:
    """Arguments of ``selected_scores``; unlisted rows are NaN, and lists have duplicates."""
    wrap = embed if strided else _as_it_is
    rows, indices, lengths = _listed(
        draw, num_tokens, num_rows, topk, head_dim, share, with_lengths
    )
    return {
        "index_q": wrap(eighths(draw.normal(num_tokens, num_heads, head_dim)).to(dtype)),
        "weights": wrap(draw.normal(num_tokens, num_heads, dtype=weight_dtype)),
        "index_k": wrap(eighths(rows).to(dtype)),
        "topk_indices": wrap(indices.to(index_dtype)),
        "topk_lengths": lengths,
    }


def selected_scores_backward_case(draw: Draw, **options: object) -> Arguments:
    """Arguments of ``selected_scores_backward``; gradients of invalid entries are NaN.

    The others are positive: those of a row that a list names several times must not cancel out,
    because each term is rounded to bfloat16.
    """
    forward = cast("dict[str, Any]", selected_scores_case(draw, **cast("dict[str, Any]", options)))
    valid = _valid(forward["topk_indices"], forward["topk_lengths"], forward["index_k"])
    return {"dscores": draw.normal(*valid.shape).abs().masked_fill(~valid, math.nan), **forward}


def attention_target_case(
    draw: Draw,
    *,
    num_tokens: int = 5,
    num_rows: int = 128,
    topk: int = 70,
    num_heads: int = 8,
    head_dim: int = 576,
    dtype: torch.dtype = torch.bfloat16,
    with_lengths: bool = False,
    with_sink: bool = False,
    normalize: bool = True,
    share: float = 0.9,
    strided: bool = False,
) -> Arguments:
    """Arguments of ``attention_target``, with the LSE of the same lists."""
    wrap = embed if strided else _as_it_is
    rows, indices, lengths = _listed(
        draw, num_tokens, num_rows, topk, head_dim, share, with_lengths
    )
    q, kv, scale = draw.normal(num_tokens, num_heads, head_dim, dtype=dtype), rows.to(dtype), 0.1
    valid = _valid(indices, lengths, kv)
    logits = torch.einsum("thd,tkd->thk", q.float(), kv[indices.where(valid, 0).long()].float())
    logits = (logits * scale).masked_fill(~valid[:, None], -math.inf)
    return {
        "q": wrap(q),
        "kv": wrap(kv),
        "topk_indices": wrap(indices),
        "lse": wrap(logits.logsumexp(-1)),
        "softmax_scale": scale,
        "topk_lengths": lengths,
        "attn_sink": sinks(draw, num_heads) if with_sink else None,
        "normalize": normalize,
    }


def _listed(
    draw: Draw,
    num_tokens: int,
    num_rows: int,
    topk: int,
    dim: int,
    share: float,
    with_lengths: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows, NaN where unlisted; lists with invalid entries and duplicates; lengths or None."""
    rows = draw.normal(num_rows, dim)
    used = draw.permutation(num_rows)[: max(num_rows * 3 // 4, 1)]
    unused = torch.ones(num_rows, dtype=torch.bool, device=draw.device)
    unused[used] = False
    rows[unused] = math.nan
    indices = selections(draw, max(num_tokens, 1), topk, used, num_rows, share)[:num_tokens]
    indices[:, 1::7] = indices[:, :1].clone()
    if not with_lengths:
        return rows, indices, None
    lengths = draw.integers(0, topk + 1, num_tokens)
    return rows, _valid_nan_beyond(indices, lengths, unused), lengths


def _valid(indices: Tensor, lengths: Tensor | None, rows: Tensor) -> Tensor:
    """The entries of lists that count."""
    valid = (indices >= 0) & (indices < rows.shape[0])
    if lengths is not None:
        valid &= torch.arange(indices.shape[1], device=indices.device) < lengths[:, None]
    return valid


def index_loss_case(
    draw: Draw, *, num_tokens: int = 7, topk: int = 70, with_row_weights: bool = False
) -> Arguments:
    """Arguments of ``index_loss``: invalid entries, a row without entries, one without mass."""
    scores = 3 * draw.normal(num_tokens, topk)
    target = (2 * draw.normal(num_tokens, topk)).softmax(-1)
    masked = draw.integers(0, 5, num_tokens, topk) == 0
    target[masked] = 0
    target /= target.sum(-1, keepdim=True)
    scores[masked] = -math.inf
    scores[:1], target[:1], target[1:2] = -math.inf, 0, 0
    return {
        "scores": scores,
        "target": target,
        "row_weights": draw.normal(num_tokens).clamp_min(0) if with_row_weights else None,
    }


def dense_index_loss_case(
    draw: Draw,
    *,
    num_tokens: int = 9,
    num_rows: int = 100,
    num_heads: int = 4,
    head_dim: int = 192,
    num_index_heads: int = 3,
    index_dim: int = 32,
    dtype: torch.dtype = torch.bfloat16,
    weight_dtype: torch.dtype = torch.float32,
    shared_keys: bool = False,
    with_row_weights: bool = False,
    ranges: str = "ragged",
    max_workspace_bytes: int = 256 << 20,
    strided: bool = False,
) -> Arguments:
    """Arguments of ``dense_index_loss``; rows that no token sees are NaN.

    ``ranges`` is ``causal``, all tokens at the end of one sequence, or ``ragged``.
    """
    wrap = embed if strided else _as_it_is
    starts = torch.zeros(num_tokens, dtype=torch.int32, device=draw.device)
    ends = starts + num_rows - num_tokens + 1 + torch.arange(num_tokens, device=draw.device)
    if ranges == "ragged":
        starts = draw.integers(-3, num_rows, num_tokens).clamp_min(5)
        ends = draw.integers(0, num_rows + 4, num_tokens)
    rows = torch.arange(num_rows, device=draw.device)
    seen = (rows >= starts[:, None]) & (rows < ends[:, None])
    q = draw.normal(num_tokens, num_heads, head_dim, dtype=dtype)
    k = draw.normal(num_rows, *(() if shared_keys else (num_heads,)), head_dim, dtype=dtype)
    index_k = draw.normal(num_rows, index_dim, dtype=dtype)
    per_head = "sd" if shared_keys else "shd"
    logits = torch.einsum(f"thd,{per_head}->ths", q.float(), k.float()) * 2 * head_dim**-0.5
    lse = logits.masked_fill(~seen[:, None], -math.inf).logsumexp(-1)
    k[~seen.any(0)], index_k[~seen.any(0)] = math.nan, math.nan
    weights = draw.normal(num_tokens, num_index_heads) * index_dim**-0.5
    return {
        "q": wrap(q),
        "k": wrap(k),
        "lse": wrap(lse),
        "index_q": wrap(draw.normal(num_tokens, num_index_heads, index_dim, dtype=dtype)),
        "weights": wrap(weights.to(weight_dtype)),
        "index_k": wrap(index_k),
        "softmax_scale": 2 * head_dim**-0.5,
        "row_starts": starts.int(),
        "row_ends": ends.int(),
        "row_weights": draw.normal(num_tokens).clamp_min(0) if with_row_weights else None,
        "max_workspace_bytes": max_workspace_bytes,
    }


def dense_decode_case(
    draw: Draw,
    *,
    format: CacheFormat,
    seq_lens: Sequence[int] = (20, 140, 0),
    query_len: int = 1,
    num_heads: int = 8,
    page_size: int = 64,
    causal: bool = True,
    with_sink: bool = False,
    num_layers: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    later_nan: bool = False,
    scale_mode: ScaleMode = "pow2",
    num_splits: int | None = None,
) -> Arguments:
    """Arguments of ``dense_decode``, with NaN after each sequence and garbage after each table row.

    With ``later_nan`` the last or the last but one token of each request is also NaN. Without
    ``num_splits`` the op chooses, on a CPU one.
    """
    cache, table = paged_requests(draw, format, seq_lens, page_size, num_layers, scale_mode)
    if later_nan:
        requests = draw.tensor(range(len(seq_lens)))
        slots = slots_of(table, requests, draw.tensor(seq_lens) - 1 - requests % 2, page_size)
        cache.write(slots, torch.full((len(slots), format.head_dim), math.nan, device=draw.device))
    shape = (len(seq_lens), query_len, num_heads, format.head_dim)
    arguments: Arguments = {
        "q": decode_queries(draw, *shape, dtype=dtype),
        "cache": cache,
        "page_table": table,
        "seq_lens": draw.tensor(seq_lens),
        "softmax_scale": format.head_dim**-0.5,
        "causal": causal,
        "attn_sink": sinks(draw, num_heads) if with_sink else None,
    }
    if num_splits is not None:
        arguments["num_splits"] = num_splits
    return arguments


def merge_states_case(
    draw: Draw,
    num_parts: int,
    *,
    value_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    with_sink: bool = False,
) -> Arguments:
    """Arguments of ``merge_states``, with a row that is empty in one part and one in all parts."""
    lses = draw.normal(num_parts, 5, 8) * 3
    lses[0, 0] = -math.inf
    lses[:, 1] = -math.inf
    outs = draw.normal(num_parts, 5, 8, value_dim).to(dtype)
    return {
        "outs": outs.masked_fill(lses.isneginf()[..., None], math.nan),
        "lses": lses,
        "attn_sink": sinks(draw, 8) if with_sink else None,
    }


def dense_prefill_case(
    draw: Draw,
    *,
    query_lens: Sequence[int] = (5, 0, 9),
    kv_lens: Sequence[int] = (5, 3, 20),
    num_heads: int = 4,
    head_dim: int = 192,
    value_dim: int = 128,
    causal: bool = True,
    strided: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    nan_in: str = "",
) -> Arguments:
    """Arguments of ``dense_prefill``.

    With ``nan_in``, ``k`` or ``v``, this argument is NaN for the last token of each request and for
    the middle one of the first request's query tokens.
    """
    wrap = embed if strided else _as_it_is
    num_tokens, num_keys = sum(query_lens), sum(kv_lens)
    arguments: Arguments = {
        "q": wrap(decode_queries(draw, num_tokens, num_heads, head_dim, dtype=dtype)),
        "k": wrap(decode_queries(draw, num_keys, num_heads, head_dim, dtype=dtype)),
        "v": wrap(prefill_rows(draw, num_keys, num_heads, value_dim, dtype=dtype)),
        "input_row_offsets": offsets(draw, query_lens),
        "kv_row_offsets": offsets(draw, kv_lens),
        "softmax_scale": head_dim**-0.5,
        "causal": causal,
    }
    if nan_in:
        ends = cast("Tensor", arguments["kv_row_offsets"])[1:].long()
        cast("Tensor", arguments[nan_in])[ends - 1] = math.nan
        cast("Tensor", arguments[nan_in])[ends[0] - 1 - query_lens[0] // 2] = math.nan
    return arguments


def offsets(draw: Draw, lengths: Sequence[int]) -> Tensor:
    """Prefix sums of lengths, int32, from 0."""
    sums = [0]
    for length in lengths:
        sums.append(sums[-1] + length)
    return draw.tensor(sums)


def index_values(draw: Draw, *shape: int, exact: bool) -> Tensor:
    """Indexer queries or keys: normal, or small integers with exact sums in any order."""
    return draw.integers(-2, 3, *shape).float() if exact else draw.normal(*shape)


def index_weights(draw: Draw, *shape: int, exact: bool) -> Tensor:
    """Head weights of both signs: normal, or multiples of 1/8."""
    return draw.integers(-8, 9, *shape).float() / 8 if exact else draw.normal(*shape)


def indexer_scores_case(
    draw: Draw,
    *,
    num_tokens: int = 6,
    num_keys: int = 100,
    num_heads: int = 32,
    head_dim: int = 128,
    ranges: str = "causal",
    fp8: bool = True,
    exact: bool = False,
) -> Arguments:
    """Arguments of ``indexer_scores``.

    Args:
        draw: the source of random tensors.
        num_tokens: M; the following keywords are other sizes of the problem.
        ranges: ``causal`` (as in DeepGEMM, without the token itself), ``segments`` (two halves of a
            context-parallel rank) or ``ragged`` (arbitrary, including empty and inverted ranges).
        fp8: e4m3 queries and keys with key scales; otherwise bfloat16 without scales.
        exact: integers and powers of two, so any order of summation gives the same bits.
    """
    q = index_values(draw, num_tokens, num_heads, head_dim, exact=exact)
    keys = index_values(draw, num_keys, head_dim, exact=exact)
    key_scales = None
    if fp8:
        key_scales = 2.0 ** draw.integers(-3, 4, num_keys).float()
        if not exact:
            key_scales = key_scales * (1 + draw.normal(num_keys).abs())
    row = draw.tensor(range(num_tokens))
    starts, ends = torch.zeros_like(row), row + num_keys - num_tokens
    if ranges == "segments":
        half, middle = num_tokens // 2, num_keys // 2
        starts = torch.where(row < half, 0, middle)
        ends = torch.where(row < half, 1 + row, middle + 1 + row)
    elif ranges == "ragged":
        starts = draw.integers(-3, num_keys, num_tokens)
        ends = draw.integers(0, num_keys + 4, num_tokens)
    return {
        "index_q": to_fp8(q) if fp8 else q.bfloat16(),
        "weights": index_weights(draw, num_tokens, num_heads, exact=exact),
        "index_k": to_fp8(keys) if fp8 else keys.bfloat16(),
        "index_k_scales": key_scales,
        "row_starts": starts.int(),
        "row_ends": ends.int(),
    }


def index_cache(
    draw: Draw,
    seq_lens: Sequence[int],
    *,
    format: CacheFormat = INDEX_FP8,
    page_size: int = 64,
    exact: bool = False,
    num_layers: int | None = None,
) -> tuple[PagedCache, Tensor]:
    """A cache with indexer keys of these requests, NaN in all other slots, and the page table."""
    cache, table = paged_requests(draw, format, seq_lens, page_size, num_layers)
    slots = slots_of_requests(table, seq_lens, page_size)
    cache.write(slots, index_values(draw, len(slots), format.head_dim, exact=exact))
    return cache, table


def indexer_scores_paged_case(
    draw: Draw,
    *,
    seq_lens: Sequence[int] = (130, 64, 1, 0),
    query_len: int = 1,
    num_heads: int = 32,
    format: CacheFormat = INDEX_FP8,
    page_size: int = 64,
    own_lengths: bool = False,
    ratio: int = 1,
    exact: bool = False,
) -> Arguments:
    """Arguments of ``indexer_scores_paged``; with ``own_lengths`` one length per query token."""
    counts = [length // ratio for length in seq_lens]
    cache, table = index_cache(draw, counts, format=format, page_size=page_size, exact=exact)
    batch = len(seq_lens)
    q = index_values(draw, batch, query_len, num_heads, format.head_dim, exact=exact)
    lengths = draw.tensor(seq_lens)
    if own_lengths:
        lengths = (lengths[:, None] - draw.integers(0, 40, batch, query_len)).clamp_min(0)
    return {
        "index_q": q.to(format.query_dtype),
        "weights": index_weights(draw, batch, query_len, num_heads, exact=exact),
        "cache": cache,
        "page_table": table,
        "seq_lens": lengths,
        "max_seq_len": max(counts) + 3,
        "ratio": ratio,
    }


def indexer_topk_case(
    draw: Draw,
    *,
    query_lens: Sequence[int] = (1, 7, 0, 3),
    seq_lens: Sequence[int] = (130, 64, 0, 3),
    num_heads: int = 32,
    topk: int = 16,
    format: CacheFormat = INDEX_FP8,
    page_size: int = 64,
    causal: bool = True,
    ratio: int = 1,
    as_slots: bool = False,
    exact: bool = True,
    num_layers: int | None = None,
) -> Arguments:
    """Arguments of ``indexer_topk``; exact values make selections comparable id by id."""
    counts = [length // ratio for length in seq_lens]
    cache, table = index_cache(
        draw, counts, format=format, page_size=page_size, exact=exact, num_layers=num_layers
    )
    num_tokens = sum(query_lens)
    q = index_values(draw, num_tokens, num_heads, format.head_dim, exact=exact)
    return {
        "index_q": q.to(format.query_dtype),
        "weights": index_weights(draw, num_tokens, num_heads, exact=exact),
        "cache": cache,
        "input_row_offsets": offsets(draw, query_lens),
        "seq_lens": draw.tensor(seq_lens),
        "page_table": table,
        "topk": topk,
        "causal": causal,
        "ratio": ratio,
        "as_slots": as_slots,
    }


def indexer_topk_blocks_case(
    draw: Draw, *, topk_blocks: int = 3, block_size: int = 8, **options: object
) -> Arguments:
    """Arguments of ``indexer_topk_blocks``; others are those of :func:`indexer_topk_case`."""
    arguments = indexer_topk_case(draw, **cast("dict[str, Any]", options))
    del arguments["as_slots"]
    return arguments | {"topk_blocks": topk_blocks, "block_size": block_size}


def indexer_topk_of_blocks_case(
    draw: Draw, *, num_blocks: int = 5, block_size: int = 8, **options: object
) -> Arguments:
    """Arguments of ``indexer_topk_of_blocks``; others are those of :func:`indexer_topk_case`.

    A token lists up to ``num_blocks`` different blocks, some of them behind the last key it sees.
    """
    arguments = indexer_topk_case(draw, **cast("dict[str, Any]", options))
    del arguments["as_slots"]
    cache, table = cast("PagedCache", arguments["cache"]), cast("Tensor", arguments["page_table"])
    most = table.shape[1] * cache.page_size // block_size + 2
    num_tokens = len(cast("Tensor", arguments["index_q"]))
    ranks = draw.normal(num_tokens, max(most, num_blocks))
    chosen = ranks.argsort(1)[:, :num_blocks]
    missing = torch.arange(num_blocks, device=draw.device) >= draw.integers(
        0, num_blocks + 1, num_tokens, 1
    )
    chosen = chosen.masked_fill(missing, most).sort(1).values
    blocks = chosen.masked_fill(chosen >= most, -1).int()
    return arguments | {"blocks": blocks, "block_size": block_size}


def adversarial_scores(draw: Draw, num_cols: int, topk: int) -> dict[str, Tensor]:
    """Rows ``[num_cols]`` that break naive selection by radix, threshold or sampling."""
    normal = draw.normal(num_cols)
    column = torch.arange(num_cols, device=draw.device)
    low_bits = draw.integers(0, 1024, num_cols)
    shared = torch.full_like(low_bits, 0x3F800000)  # the bits of 1.0
    plateau = normal.abs().masked_fill(column >= min(topk // 2, num_cols), 0)
    rows = {
        "all equal": torch.ones_like(normal),
        "all zero": torch.zeros_like(normal),
        "all -inf": torch.full_like(normal, -math.inf),
        "all NaN": torch.full_like(normal, math.nan),
        "two values": torch.where(column % 3 == 0, 1.0, -1.0),
        "shared top 22 bits": (shared + low_bits).view(torch.float32),
        "shared top 22 bits, negative": -(shared + low_bits).view(torch.float32),
        "plateau of zeros": plateau,
        "signed zeros": torch.where(column % 2 == 0, -0.0, 0.0),
        "signed zeros and normal": torch.where(column % 3 == 0, normal, normal * 0),
        "one huge": normal.index_fill(0, column[-1:], 3e38),
        "one tiny": (normal * 0).index_fill(0, column[-1:], 1e-45),
        "infinities": normal.masked_fill(column % 5 == 0, math.inf).masked_fill(
            column % 5 == 1, -math.inf
        ),
        "NaN between": normal.masked_fill(column % 4 == 1, math.nan),
        "NaN, infinities, zeros": (normal * 0)
        .masked_fill(column % 4 == 1, math.nan)
        .masked_fill(column % 4 == 2, math.inf)
        .masked_fill(column % 4 == 3, -math.inf),
        "negative": -normal.abs(),
        "subnormal": normal * 1e-40,
        "normal": normal,
    }
    alike = draw.normal(num_cols // 16 + 1)
    in_order = {
        "ascending": normal.sort().values,
        "descending": normal.sort(descending=True).values,
        "best at the end": normal + 100 * (column >= num_cols - num_cols // 5),
        "every 32nd": normal + 50 * (column % 32 == 0),
        "neighbours alike": alike.repeat_interleave(16)[:num_cols],
    }
    return {name: row[draw.permutation(num_cols)] for name, row in rows.items()} | in_order


def select_topk_case(
    draw: Draw,
    *,
    num_rows: int = 5,
    num_cols: int = 300,
    topk: int = 64,
    ragged: bool = False,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
    strided: bool = False,
    page_size: int | None = None,
) -> Arguments:
    """Arguments of ``select_topk``; ragged rows start and end anywhere, with NaN after the end.

    With ``page_size`` the results are slots, from short page tables with missing pages.
    """
    wrap = embed if strided else _as_it_is
    scores = draw.normal(num_rows, num_cols)
    arguments: Arguments = {"topk": topk}
    if ragged:
        ends = draw.integers(0, num_cols + 1, num_rows, dtype=index_dtype)
        arguments["row_starts"] = draw.integers(0, num_cols, num_rows, dtype=index_dtype)
        arguments["row_ends"] = ends
        column = torch.arange(num_cols, device=draw.device)
        scores = scores.masked_fill(column >= ends[:, None], math.nan)
    if page_size is not None:
        width = num_cols // page_size
        table = draw.permutation(3 * width).view(3, width).to(index_dtype)
        arguments |= {
            "page_table": table.masked_fill(table % 7 == 0, -1),
            "request_ids": draw.integers(0, 3, num_rows, dtype=index_dtype),
            "page_size": page_size,
        }
    return {"scores": wrap(scores.to(dtype)), **arguments}


def merge_topk_case(
    draw: Draw,
    *,
    num_parts: int = 4,
    num_rows: int = 5,
    width: int = 40,
    topk: int = 64,
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int32,
) -> Arguments:
    """Arguments of ``merge_topk``: few distinct values, shuffled ids, NaN in empty entries."""
    count = num_parts * width
    values = draw.integers(-9, 9, num_parts, num_rows, width).to(dtype)
    ids = torch.stack([draw.permutation(3 * count)[:count] for _ in range(num_rows)])
    ids = ids.view(num_rows, num_parts, width).transpose(0, 1).to(index_dtype)
    empty = draw.integers(0, 4, num_parts, num_rows, width) == 0
    return {
        "values": values.masked_fill(empty, math.nan),
        "indices": ids.masked_fill(empty, -1).contiguous(),
        "topk": topk,
    }


def head_weight(
    draw: Draw, num_heads: int, rows: int, cols: int, block: tuple[int, int] | None = None
) -> HeadWeight:
    """A weight with standard deviation ``cols^-0.5``: bfloat16, or with a block e4m3 and scales."""
    data = draw.normal(num_heads, rows, cols) * cols**-0.5
    if block is None:
        return HeadWeight(data.bfloat16())
    shape = (num_heads, -(-rows // block[0]), -(-cols // block[1]))
    scale = data.abs().amax() / 448 * (1 + draw.normal(*shape).abs())
    spread = scale.repeat_interleave(block[0], 1).repeat_interleave(block[1], 2)
    return HeadWeight(to_fp8(data / spread[:, :rows, :cols]), scale, block)


def project_heads_case(
    draw: Draw,
    *,
    num_tokens: int = 7,
    num_heads: int = 3,
    rows: int = 512,
    cols: int = 128,
    block: tuple[int, int] | None = None,
    num_parts: int | None = None,
    with_sink: bool = False,
) -> Arguments:
    """Arguments of ``project_heads``; empty parts are NaN, and row 0 is empty in all parts."""
    weight = head_weight(draw, num_heads, rows, cols, block)
    if num_parts is None:
        return {"x": draw.normal(num_tokens, num_heads, cols).bfloat16(), "weight": weight}
    lses = draw.normal(num_parts, num_tokens, num_heads) * 3
    lses[0, ::2] = -math.inf
    lses[:, 0] = -math.inf
    parts = draw.normal(num_parts, num_tokens, num_heads, cols) * num_parts**0.5
    return {
        "x": parts.masked_fill(lses.isneginf()[..., None], math.nan),
        "weight": weight,
        "lses": lses,
        "attn_sink": sinks(draw, num_heads) if with_sink else None,
    }


def project_groups_case(
    draw: Draw,
    *,
    num_tokens: int = 7,
    num_heads: int = 6,
    num_groups: int = 2,
    dim: int = 128,
    rows: int = 64,
    rope_dim: int | None = 64,
    block: tuple[int, int] | None = None,
    index_dtype: torch.dtype = torch.int32,
    table_dtype: torch.dtype = torch.float32,
    strided: bool = False,
    num_parts: int | None = None,
    with_sink: bool = False,
) -> Arguments:
    """Arguments of ``project_groups``; parts are those of :func:`project_heads_case`.

    Args:
        draw: the source of random tensors.
        num_tokens: T.
        num_heads: H.
        num_groups: G.
        dim: V.
        rows: N.
        rope_dim: R; None for no rotation.
        block: block of a scale of e4m3 weights; None for bfloat16.
        index_dtype: of positions.
        table_dtype: of the RoPE table.
        strided: lay heads and tokens apart.
        num_parts: S; None for attention without splits.
        with_sink: pass a sink.
    """
    made = project_heads_case(
        draw,
        num_tokens=num_tokens,
        num_heads=num_heads,
        rows=1,
        cols=dim,
        num_parts=num_parts,
        with_sink=with_sink,
    )
    made["weight"] = head_weight(draw, num_groups, rows, num_heads // num_groups * dim, block)
    if strided:
        made["x"] = embed(cast("Tensor", made["x"]))
    if rope_dim is not None:
        made["cos_sin_cache"] = _table(draw, rope_dim, table_dtype)
        made["positions"] = draw.integers(0, MAX_POSITIONS, num_tokens, dtype=index_dtype)
    return made


def mla_layer(
    draw: Draw,
    *,
    num_heads: int = 4,
    latent: int = 512,
    nope: int = 128,
    rope: int = 64,
    value: int = 128,
    max_positions: int = 512,
    block: tuple[int, int] | None = None,
    with_sink: bool = False,
    interleaved: bool = True,
    norm_eps: float = 1e-6,
) -> MLALayer:
    """A layer with random weights."""
    return MLALayer(
        w_uk=head_weight(draw, num_heads, latent, nope, block),
        w_uv=head_weight(draw, num_heads, value, latent, block),
        kv_norm_weight=1 + draw.normal(latent) / 10,
        cos_sin_cache=cos_sin_table(rope_frequencies(rope, 1e4), max_positions).to(draw.device),
        softmax_scale=(nope + rope) ** -0.5,
        attn_sink=sinks(draw, num_heads) if with_sink else None,
        interleaved=interleaved,
        norm_eps=norm_eps,
    )


def branch_case(
    draw: Draw,
    layer: MLALayer,
    *,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    format: CacheFormat = BF16_576,
    page_size: int = 64,
    topk: int | None = None,
    num_padded_tokens: int | None = None,
    require_uniform: bool = False,
) -> Arguments:
    """Arguments of ``decode_branch`` and ``prefill_branch``, sparse if ``topk`` is given.

    The cache has the context of each request, and NaN in the slots written by this step.
    """
    context_lens = [s - q for q, s in zip(query_lens, seq_lens, strict=True)]
    table, num_pages = page_tables(draw, seq_lens, page_size)
    slots = slots_of_requests(table, context_lens, page_size)
    plan = plan_batch(
        query_lens,
        seq_lens,
        table,
        page_size=page_size,
        workspace_rows=None,
        num_padded_tokens=num_padded_tokens,
        require_uniform=require_uniform,
    )
    nope_rope = layer.qk_nope_head_dim + layer.qk_rope_head_dim
    arguments: Arguments = {
        "q": draw.normal(plan.num_tokens, layer.num_heads, nope_rope).bfloat16(),
        "kv": draw.normal(plan.num_tokens, format.head_dim).bfloat16(),
        "cache": poisoned_cache(draw, format, num_pages, page_size, slots),
        "layer": layer,
        "plan": plan,
    }
    if topk is not None:
        arguments["topk_indices"] = causal_selections(draw, plan, topk, page_size)
    return arguments


def causal_selections(draw: Draw, plan: Plan, topk: int, page_size: int) -> Tensor:
    """Slots ``[T, topk]`` of distinct random positions up to the token's, then -1."""
    out = torch.full((plan.num_tokens, topk), -1, dtype=torch.int32, device=draw.device)
    num_tokens = int(plan.input_row_offsets[-1])
    for token, position in enumerate(plan.positions[:num_tokens].tolist()):
        chosen = draw.permutation(position + 1)[:topk]
        request = plan.request_ids[token].expand_as(chosen)
        out[token, : len(chosen)] = slots_of(plan.page_table, request, chosen, page_size).int()
    return out

"""What layers may ask of a GPU besides attention, for the warm-up. Imports nothing of vLLM.

The layers of DeepSeek-V4 and V4.1, and of GLM-5.3-Flash the indexer and the writes of rows.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from sparsemla import (
    FP8_584,
    FP8_NOPE,
    INDEX_FP8,
    CacheFormat,
    HeadWeight,
    PagedCache,
    Pooling,
    Serving,
    WindowState,
    fused_rope_rmsnorm_quant,
    pool_windows,
    prepare_index_queries,
    project_groups,
    sparse_decode,
    sparse_prefill,
    to_slots,
)
from sparsemla.backends.vllm.conversions import MULTIPLE, Chosen, Conversion, Part, attend
from sparsemla.kernels.common.pools import expand_pools
from sparsemla.pooling import NO_NORM
from sparsemla.warmup import EVERY, Sweep, without_memory

ROPE_DIM = 64


@dataclass(frozen=True)
class Pages:
    """Pages of a cache: their number, the rows of each, the elements between two, and columns.

    Args:
        count: pages of the cache.
        rows: rows of a page.
        stride: elements from a page to the next.
        columns: columns of the page table.
    """

    count: int
    rows: int
    stride: int
    columns: int

    def cache(self, format: CacheFormat) -> PagedCache:
        data = without_memory(self.count * self.stride, dtype=torch.uint8)
        shape = self.count, self.rows, format.row_width
        return PagedCache(data.as_strided(shape, (self.stride, format.row_width, 1)), format)

    def state(self, width: int) -> WindowState:
        data = without_memory(self.count * self.stride, dtype=torch.float32)
        strides = self.stride, 2 * width, width, 1
        return WindowState(data.as_strided((self.count, self.rows, 2, width), strides))


@dataclass(frozen=True)
class CompressedLayer:
    """A layer's dims and caches, and the engine's limits.

    Args:
        ratio: tokens of an entry; 1 without entries.
        num_heads: query heads of this rank.
        q_lora_rank: values in front of the raw row in the fused projection.
        window: raw rows that a token attends to.
        decode_rows: columns of their lists in decodes; more than the window for DSpark's drafts.
        topk: entries that a token selects.
        index_heads: heads of the indexer.
        num_groups, o_lora_rank: of the first output projection.
        scale_block: of its e4m3 weight; None for a bfloat16 one.
        raw, entries, keys, state, key_state: pages of the caches, None where there is none.
        max_positions: rows of the table of cosines and sines.
        max_tokens: most tokens of a step.
        max_requests: most requests of a step.
        max_pieces: most pieces of prefills that the selection takes for requests, too.
        max_query_len: most tokens of a decode.
        max_seq_len: most tokens of a request.
        max_workspace_bytes: of :func:`sparsemla.indexer_topk`.
        converts: prefills may read converted rows.
        format: of raw rows and entries.
    """

    ratio: int
    num_heads: int
    q_lora_rank: int
    window: int
    decode_rows: int
    topk: int
    index_heads: int
    num_groups: int
    o_lora_rank: int
    scale_block: tuple[int, int] | None
    raw: Pages
    entries: Pages | None
    keys: Pages | None
    state: Pages | None
    key_state: Pages | None
    max_positions: int
    max_tokens: int
    max_requests: int
    max_pieces: int
    max_query_len: int
    max_seq_len: int
    max_workspace_bytes: int
    converts: bool
    format: CacheFormat = FP8_584

    @property
    def pools(self) -> bool:
        """Whether the layer makes entries."""
        return self.entries is not None

    def selections(self) -> list[Serving]:
        """The selection from index keys."""
        return [] if self.keys is None else [_selection(self, self.keys)]

    def sweeps(self) -> Iterator[Sweep]:
        """All other ops, at every number of tokens."""
        yield Sweep(self._write, self.max_tokens)
        if self.decode_rows > self.window:
            yield Sweep(self._write_context, self.max_tokens)
        yield Sweep(self._project, self.max_tokens)
        decodes = min(self.max_tokens, self.max_requests * self.max_query_len)
        for width in self._widths():
            yield Sweep(functools.partial(self._decode, width), decodes, every=EVERY)
            for start in (0, 1):
                prefill = functools.partial(self._prefill, width, start)
                yield Sweep(prefill, self.max_tokens - start)
                if self.converts:
                    convert = functools.partial(self._convert, width, start)
                    yield Sweep(convert, self.max_tokens - start)
        if self.pools:
            yield Sweep(self._pool, self.max_tokens)
        if self.keys is not None:
            yield Sweep(self._prepare, self.max_tokens)

    def _widths(self) -> list[int]:
        """Columns of the lists of entries: powers of two, up to that of the longest request."""
        if self.ratio != 128:
            return [self.topk]
        widths, width = [], 128
        while width < self._most_entries():
            widths.append(width)
            width *= 2
        return [*widths, self._most_entries()]

    def _most_entries(self) -> int:
        """Columns of vLLM's list of all entries: a multiple of 128."""
        return -(-self.max_seq_len // (128 * 128)) * 128

    def _table(self) -> Tensor:
        return without_memory(self.max_positions, ROPE_DIM, dtype=torch.float32)

    def _q(self, *tokens: int) -> Tensor:
        return without_memory(*tokens, self.num_heads, FP8_584.head_dim, dtype=torch.bfloat16)

    def _write(self, tokens: int) -> None:
        width = self.q_lora_rank + FP8_584.head_dim
        projected = without_memory(tokens, width, dtype=torch.bfloat16)
        self._write_rows(self._q(tokens), projected[:, self.q_lora_rank :])

    def _write_context(self, tokens: int) -> None:
        """Raw rows of tokens without queries, projected for all layers of drafts at once."""
        dim = FP8_584.head_dim
        nobody = without_memory(tokens, 1, dim, dtype=torch.bfloat16)
        self._write_rows(nobody, without_memory(tokens, 2, dim, dtype=torch.bfloat16)[:, 0])

    def _write_rows(self, q: Tensor, kv: Tensor) -> None:
        fused_rope_rmsnorm_quant(
            q,
            kv,
            self._table(),
            without_memory(kv.shape[1], dtype=torch.bfloat16),
            self.raw.cache(self.format),
            positions=without_memory(len(kv), dtype=torch.int64),
            slot_mapping=without_memory(len(kv), dtype=torch.int64),
            query_norm=True,
            out=q,
        )

    def _project(self, tokens: int) -> None:
        inputs = self.num_heads * FP8_584.head_dim // self.num_groups
        shape = self.num_groups, self.o_lora_rank, inputs
        if self.scale_block is None:
            weight = HeadWeight(without_memory(*shape, dtype=torch.bfloat16))
        else:
            blocks = [-(-n // block) for n, block in zip(shape[1:], self.scale_block, strict=True)]
            weight = HeadWeight(
                without_memory(*shape, dtype=torch.float8_e4m3fn),
                without_memory(shape[0], *blocks, dtype=torch.float32),
                self.scale_block,
            )
        positions = without_memory(tokens, dtype=torch.int64)
        project_groups(self._q(tokens), weight, cos_sin_cache=self._table(), positions=positions)

    def _chosen(self, width: int, start: int, tokens: int) -> Tensor:
        """Numbers of entries for tokens behind ``start`` others."""
        listed = self._most_entries() if self.ratio == 128 else self.topk
        return without_memory(start + tokens, listed)[start:, :width]

    def _slots(self, width: int, start: int, tokens: int) -> Tensor | None:
        """Slots of entries for tokens behind ``start`` others."""
        if self.entries is None:
            return None
        requests = min(tokens, self.max_requests)
        return to_slots(
            self._chosen(width, start, tokens),
            without_memory(requests, self.entries.columns),
            without_memory(start + tokens)[start:],
            page_size=self.entries.rows,
        )

    def _shared(self) -> dict[str, Any]:
        sink = without_memory(self.num_heads, dtype=torch.float32)
        return {"softmax_scale": FP8_584.head_dim**-0.5, "attn_sink": sink}

    def _decode(self, width: int, tokens: int) -> None:
        slots = lengths = None
        if self.ratio == 128:
            slots = without_memory(tokens, self._most_entries())[:, :width].view(tokens, 1, -1)
            lengths = without_memory(tokens)
        elif (found := self._slots(width, 0, tokens)) is not None:
            slots = found[:, None]
        sparse_decode(
            self._q(tokens, 1),
            self.raw.cache(self.format),
            without_memory(tokens, 1, self.decode_rows),
            topk_lengths=without_memory(tokens),
            extra_cache=None if self.entries is None else self.entries.cache(self.format),
            extra_topk_indices=slots,
            extra_topk_lengths=lengths,
            **self._shared(),
        )

    def _prefill(self, width: int, start: int, tokens: int) -> None:
        slots = self._slots(width, start, tokens)
        sparse_prefill(
            self._q(start + tokens)[start:],
            self.raw.cache(self.format),
            without_memory(tokens, 1, self.window)[:, 0],
            topk_lengths=without_memory(tokens),
            extra_cache=None if self.entries is None else self.entries.cache(self.format),
            extra_topk_indices=slots,
            extra_topk_lengths=None if slots is None else without_memory(tokens),
            out=self._q(start + tokens)[start:],
            **self._shared(),
        )

    def _convert(self, width: int, start: int, tokens: int) -> None:
        """Prefill over converted rows, behind ``start`` decodes of one token."""
        end = start + tokens
        requests = min(tokens, self.max_requests)
        behind = slice(start, start + requests)
        lengths, starts = without_memory(requests), without_memory(requests)
        num_rows = MULTIPLE * tokens
        chosen = entries = None
        if self.entries is not None:
            table = without_memory(behind.stop, self.entries.columns)
            indices = self._chosen(width, start, tokens)
            cache = self.entries.cache(self.format)
            chosen = Chosen(cache, table, indices, without_memory(tokens))
            entries = Part(lengths, starts, num_rows)
        conversion = Conversion(
            slice(start, end),
            behind,
            request_ids=without_memory(tokens),
            raw=Part(lengths, starts, num_rows, without_memory(requests)),
            window=without_memory(tokens, self.window),
            window_lengths=without_memory(tokens),
            entries=entries,
        )
        attend(
            conversion,
            self._q(end),
            self.raw.cache(self.format),
            without_memory(behind.stop, self.raw.columns),
            chosen,
            without_memory(conversion.num_rows, FP8_584.head_dim, dtype=torch.bfloat16),
            out=self._q(end),
            **self._shared(),
        )

    def _pool(self, tokens: int) -> None:
        parts = (self.state, self.entries, FP8_584), (self.key_state, self.keys, INDEX_FP8)
        pooling = Pooling(self.ratio, overlap=self.ratio == 4)
        requests = min(tokens, self.max_requests)
        for state, pages, format in parts:
            if state is None or pages is None:
                continue
            width = pooling.width(format.head_dim)
            projected = without_memory(tokens, 2 * width, dtype=torch.float32)
            pool_windows(
                projected[:, :width],
                projected[:, width:],
                without_memory(format.head_dim, dtype=torch.bfloat16),
                self._table(),
                state.state(width),
                pages.cache(format),
                pooling=pooling,
                gate_bias=without_memory(self.ratio, width, dtype=torch.float32),
                positions=without_memory(tokens, dtype=torch.int64),
                request_ids=without_memory(tokens),
                input_row_offsets=without_memory(requests + 1),
                ring_ids=without_memory(requests, state.columns),
                slot_mapping=without_memory(tokens, dtype=torch.int64),
            )

    def _prepare(self, tokens: int) -> None:
        prepare_index_queries(
            without_memory(tokens, self.index_heads, INDEX_FP8.head_dim, dtype=torch.bfloat16),
            without_memory(tokens, self.index_heads, dtype=torch.bfloat16),
            self._table(),
            positions=without_memory(tokens, dtype=torch.int64),
            format=INDEX_FP8,
            interleaved=True,
            rope_first=False,
        )


@dataclass(frozen=True)
class SharedEntriesLayer(CompressedLayer):
    """A layer of DeepSeek-V4.1, whose entries and selections may be another layer's.

    Args:
        owns_entries: it makes the entries, and the index keys if it has an indexer.
        topk_blocks: blocks of index keys that it chooses or selects among; None for neither.
        block_size: keys of a block.
    """

    owns_entries: bool = False
    topk_blocks: int | None = None
    block_size: int = 1

    @property
    def pools(self) -> bool:
        """Whether the layer makes entries."""
        return self.owns_entries

    def selections(self) -> list[Serving]:
        """The selection from index keys, and that of blocks and among blocks."""
        chosen = super().selections()
        if self.topk_blocks is None:
            return chosen
        blocks: dict[str, Any] = {
            "topk_blocks": self.topk_blocks,
            "block_size": self.block_size,
        }
        return [replace(each, **blocks) for each in chosen]

    def _write_rows(self, q: Tensor, kv: Tensor) -> None:
        turning = q[..., -ROPE_DIM:]
        fused_rope_rmsnorm_quant(
            turning,
            kv,
            self._table(),
            without_memory(kv.shape[1], dtype=torch.bfloat16),
            self.raw.cache(self.format),
            positions=without_memory(len(kv), dtype=torch.int64),
            slot_mapping=without_memory(len(kv), dtype=torch.int64),
            out=turning,
        )

    def _pool(self, tokens: int) -> None:
        dim, pages = self.format.head_dim, cast("Pages", self.entries)
        entries, requests = pages.cache(self.format), min(tokens, self.max_requests)
        latent = without_memory(tokens, dim, dtype=torch.bfloat16)
        if self.state is not None:
            projected = without_memory(tokens, 2 * dim, dtype=torch.float32)
            row = without_memory(1, ROPE_DIM, dtype=torch.float32)
            pool_windows(
                projected[:, :dim],
                projected[:, dim:],
                without_memory(dim, dtype=torch.bfloat16),
                row.expand(self.max_seq_len + 1, -1),
                self.state.state(dim),
                entries,
                pooling=Pooling(self.ratio),
                positions=without_memory(tokens, dtype=torch.int64),
                request_ids=without_memory(tokens),
                input_row_offsets=without_memory(requests + 1),
                ring_ids=without_memory(requests),
                slot_mapping=without_memory(tokens, dtype=torch.int64),
                kv_out=latent,
            )
        self._write_windows(latent, without_memory(dim, dtype=torch.float32), entries)
        if self.keys is not None:
            projected = without_memory(tokens, INDEX_FP8.head_dim, dtype=torch.bfloat16)
            weight = without_memory(INDEX_FP8.head_dim, dtype=torch.bfloat16)
            self._write_windows(projected, weight, self.keys.cache(INDEX_FP8))

    def _write_windows(self, rows: Tensor, weight: Tensor, cache: PagedCache) -> None:
        fused_rope_rmsnorm_quant(
            rows.new_empty(len(rows), 0, ROPE_DIM),
            rows,
            self._table(),
            weight,
            cache,
            positions=without_memory(len(rows), dtype=torch.int64),
            slot_mapping=without_memory(len(rows), dtype=torch.int64),
        )


@dataclass(frozen=True)
class WrittenRows:
    """Rows that are stored as they are, without a norm and without RoPE.

    Args:
        pages: of the cache.
        format: of the rows.
        max_tokens: most tokens of a step.
    """

    pages: Pages
    format: CacheFormat
    max_tokens: int

    @classmethod
    def of(cls, serving: Serving, format: CacheFormat) -> WrittenRows:
        """The rows of an attention layer, whose cache is there."""
        sizes = cast("tuple[int, int]", (serving.num_pages, serving.page_stride))
        pages = Pages(sizes[0], serving.page_size, sizes[1], serving.columns)
        return cls(pages, format, serving.max_tokens)

    def sweeps(self) -> Iterator[Sweep]:
        """The writes, at every number of tokens."""
        yield Sweep(self._write, self.max_tokens)

    def _write(self, tokens: int) -> None:
        dim = self.format.head_dim
        fused_rope_rmsnorm_quant(
            without_memory(tokens, 0, ROPE_DIM, dtype=torch.bfloat16),
            without_memory(tokens, dim, dtype=torch.bfloat16),
            without_memory(1, ROPE_DIM, dtype=torch.float32),
            without_memory(dim, dtype=torch.float32),
            self.pages.cache(self.format),
            positions=without_memory(tokens),
            slot_mapping=without_memory(tokens, dtype=torch.int64),
        )


@functools.lru_cache(16)
def unrotated(max_tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A row of cosines 1 and sines 0, positions of it, and weights that undo :data:`NO_NORM`."""
    made: dict[str, Any] = {"dtype": torch.float32, "device": device}
    row = torch.tensor([1.0, 0.0], **made).repeat_interleave(ROPE_DIM // 2)
    positions = torch.zeros(max_tokens, dtype=torch.int32, device=device)
    return row[None], positions, torch.full((FP8_NOPE.head_dim,), NO_NORM**0.5, **made)


@dataclass(frozen=True)
class PooledKeys:
    """The indexer of a layer of GLM-5.3-Flash, its caches, and the engine's limits.

    Args:
        ratio: tokens of a pool.
        topk: pools that a token selects.
        list_width: columns of the lists of their tokens.
        index_heads: heads of the indexer.
        keys, tails: pages of the index keys and of open pools.
        max_positions: rows of the table of cosines and sines.
        max_tokens: most tokens of a step.
        max_requests: most requests of a step.
        max_pieces: most pieces of prefills that the selection takes for requests, too.
        max_workspace_bytes: of :func:`sparsemla.indexer_topk`.
    """

    ratio: int
    topk: int
    list_width: int
    index_heads: int
    keys: Pages
    tails: Pages
    max_positions: int
    max_tokens: int
    max_requests: int
    max_pieces: int
    max_workspace_bytes: int

    def selections(self) -> list[Serving]:
        """The selection of pools."""
        return [_selection(self, self.keys)]

    def sweeps(self) -> Iterator[Sweep]:
        """All other ops, at every number of tokens."""
        yield Sweep(self._pool, self.max_tokens)
        yield Sweep(self._prepare, self.max_tokens)
        yield Sweep(self._list, self.max_tokens)

    def _table(self) -> Tensor:
        return without_memory(1, ROPE_DIM, dtype=torch.float32).expand(self.max_positions, -1)

    def _pool(self, tokens: int) -> None:
        dim = INDEX_FP8.head_dim
        rows = without_memory(self.tails.count * self.tails.stride, dtype=torch.float32)
        strides = self.tails.stride, dim, self.tails.rows * dim, 1
        requests = min(tokens, self.max_requests)
        pool_windows(
            without_memory(tokens, dim, dtype=torch.float32),
            without_memory(tokens, dim, dtype=torch.bfloat16),
            without_memory(dim, dtype=torch.float32),
            self._table(),
            WindowState(rows.as_strided((self.tails.count, self.tails.rows, 2, dim), strides)),
            self.keys.cache(INDEX_FP8),
            pooling=Pooling(self.ratio),
            gate_bias=without_memory(self.ratio, dim, dtype=torch.float32),
            positions=without_memory(tokens, dtype=torch.int64),
            request_ids=without_memory(tokens),
            input_row_offsets=without_memory(requests + 1),
            ring_ids=without_memory(requests),
            slot_mapping=without_memory(tokens, dtype=torch.int64),
        )

    def _prepare(self, tokens: int) -> None:
        prepare_index_queries(
            without_memory(tokens, self.index_heads, INDEX_FP8.head_dim, dtype=torch.bfloat16),
            without_memory(tokens, self.index_heads, dtype=torch.float32),
            self._table(),
            positions=without_memory(tokens, dtype=torch.int64),
            format=INDEX_FP8,
        )

    def _list(self, tokens: int) -> None:
        lengths = without_memory(tokens, dtype=torch.int64)
        pools = without_memory(tokens, self.topk)
        lists = without_memory(tokens, self.list_width)
        expand_pools(pools, lengths, self.ratio, lists, lengths=lengths)


def _selection(layer: CompressedLayer | PooledKeys, keys: Pages) -> Serving:
    """What :func:`sparsemla.indexer_topk` is asked for over these pages of index keys."""
    return Serving(
        None,
        topk=layer.topk,
        index_heads=layer.index_heads,
        ratio=layer.ratio,
        max_tokens=layer.max_tokens,
        max_requests=layer.max_requests + layer.max_pieces,
        page_size=keys.rows,
        table_width=keys.columns,
        num_pages=keys.count,
        index_page_stride=keys.stride,
        max_workspace_bytes=layer.max_workspace_bytes,
    )

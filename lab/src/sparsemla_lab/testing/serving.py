"""Steps of an engine: the ops that the vLLM plugin calls for a batch, and DeepSeek-V4's ops."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsemla import (
    INDEX_FP8,
    HeadWeight,
    HostCache,
    HostContext,
    HotRows,
    PagedCache,
    Plan,
    Pooling,
    WindowState,
    decode_workspace_size,
    entry_slots,
    fused_indexer_rope_quant,
    fused_rope_rmsnorm_quant,
    gather_dequant,
    indexer_topk,
    indexer_topk_blocks,
    indexer_topk_of_blocks,
    plan_batch,
    pool_windows,
    prefill_workspace_rows,
    prepare_index_queries,
    project_groups,
    sparse_decode,
    sparse_prefill,
    split_prefill_chunks,
    to_slots,
    visible_slots,
)
from sparsemla.formats import CacheFormat, as_format
from sparsemla.warmup import Serving


@dataclass(frozen=True)
class Step:
    """A batch, decodes first.

    Args:
        query_lens: new tokens of each request.
        seq_lens: context and new tokens of each request.
        padding: tokens that belong to no request, as in a captured graph.
        whole_table: the indexer gets all columns of the page table, as in a captured graph.
    """

    query_lens: tuple[int, ...]
    seq_lens: tuple[int, ...]
    padding: int = 0
    whole_table: bool = False


def random_step(serving: Serving, rng: random.Random) -> Step:
    """A valid batch within the limits of a configuration."""

    def up_to(limit: int) -> int:  # small numbers as often as large ones
        return min(limit, int(2 ** rng.uniform(0, limit.bit_length())))

    decodes = rng.choice((0, up_to(serving.max_requests)))
    prefills = rng.choice((0, 1, up_to(8))) if decodes else rng.choice((1, up_to(8)))
    room = serving.max_tokens
    query_lens: list[int] = []
    for i in range(min(decodes + prefills, serving.max_requests)):
        longest = serving.max_query_len if i < decodes else serving.max_seq_len
        new = min(up_to(min(longest, serving.max_tokens)), room)
        if new > 0:
            query_lens.append(new)
            room -= new
    seq_lens = tuple(n + up_to(serving.max_seq_len - n + 1) - 1 for n in query_lens)
    captured = prefills == 0 and rng.random() < 0.5
    padding = -sum(query_lens) % 8 if captured else 0
    return Step(tuple(query_lens), seq_lens, min(padding, room), captured)


class Engine:
    """Caches and buffers of an engine with one layer.

    Args:
        serving: the configuration, with a number of pages.
        device: where the tensors lie.
        cache_device: of the formula that decides about conversion, if tensors have no memory.
    """

    def __init__(
        self, serving: Serving, device: torch.device, cache_device: torch.device | None = None
    ) -> None:
        if serving.cache_format is None:
            raise ValueError("serving must have a cache_format, got None")
        self.format = as_format("cache_format", serving.cache_format)
        self.serving, self.device = serving, device
        self.cache_device = cache_device or device
        pages = serving.num_pages or 1
        self.cache = PagedCache.allocate(self.format, pages, 64, device=device)
        self.index_cache = PagedCache.allocate(INDEX_FP8, pages, 64, device=device)
        self.topk_indices = self._ints(serving.max_tokens, serving.topk)
        self.page_table = self._ints(serving.max_requests, serving.columns)
        size = decode_workspace_size(
            serving.max_decodes, 1, serving.num_heads, device=self.cache_device
        )
        self.workspace = torch.empty(size, dtype=torch.uint8, device=device) if size else None
        dim, heads = INDEX_FP8.head_dim, serving.index_heads
        self.norm = torch.ones(2, dim, device=device)
        self.table = torch.ones(serving.max_seq_len, 64, dtype=serving.table_dtype, device=device)
        self.hidden = self._random(serving.max_tokens, dim + heads)
        self.index_q = self._random(serving.max_tokens, heads, dim)
        rows = serving.max_tokens, serving.num_heads
        self.q = self._random(*rows, self.format.head_dim)
        self.q_rope: Tensor | None = None
        rope_dim = self.format.head_dim - self.format.value_dim
        if serving.query_pitch is not None and rope_dim:
            self.q = self._random(*rows, self.format.value_dim)
            self.q_rope = self._random(*rows, serving.query_pitch)[..., -rope_dim:]

    def _ints(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=self.device)

    def _of(self, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def run(self, step: Step) -> Tensor:
        """Attention of a batch, ``[T, H, V]``."""
        serving = self.serving
        tokens = sum(step.query_lens)
        rows = tokens + step.padding
        offsets = [0]
        for count in step.query_lens:
            offsets.append(offsets[-1] + count)
        request_ids = self._of([i for i, n in enumerate(step.query_lens) for _ in range(n)])
        seq_lens = self._of(list(step.seq_lens))
        page_table = self.page_table[: len(step.query_lens)]
        self._select(step, rows, tokens, self._of(offsets), seq_lens, page_table)
        decodes = sum(n <= serving.max_query_len for n in step.query_lens)
        decodes = (
            decodes if all(n <= serving.max_query_len for n in step.query_lens[:decodes]) else 0
        )
        q = self.q[:rows]
        out = torch.empty(
            *q.shape[:2], self.format.value_dim, dtype=torch.bfloat16, device=self.device
        )
        ids = torch.nn.functional.pad(request_ids, (0, step.padding))
        if decodes == len(step.query_lens):
            return self._attend(rows, ids, page_table, is_decode=True)
        query_lens, lens = step.query_lens[decodes:], step.seq_lens[decodes:]
        num_rows = prefill_workspace_rows(
            query_lens,
            lens,
            cache_format=self.format,
            num_heads=serving.num_heads,
            topk=serving.topk,
            max_rows=serving.max_seq_len,
            device=self.cache_device,
        )
        if num_rows is None:
            return self._attend(rows, ids, page_table, is_decode=False)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=self.device)
        if first := offsets[decodes]:
            out[:first] = self._attend(first, ids[:first], page_table, is_decode=True)
        for begin, end in split_prefill_chunks(lens, num_rows):
            chunk = slice(decodes + begin, decodes + end)
            of_tokens = slice(offsets[chunk.start], offsets[chunk.stop])
            starts, total = [], 0
            for length in lens[begin:end]:
                starts.append(total)
                total += length
            workspace = torch.empty(
                total, self.format.head_dim, dtype=torch.bfloat16, device=self.device
            )
            converted = gather_dequant(
                self.cache, page_table[chunk], seq_lens[chunk], self._of(starts), out=workspace
            )
            of_chunk = request_ids[of_tokens] - chunk.start
            indices = to_slots(
                self.topk_indices[of_tokens],
                page_table[chunk],
                of_chunk,
                page_size=64,
                workspace_starts=self._of(starts),
                prefill_request_ids=of_chunk,
            )
            sparse_prefill(
                q[of_tokens],
                converted,
                indices,
                q_rope=self._rope(of_tokens),
                softmax_scale=0.1,
                out=out[of_tokens],
                lse=lse[of_tokens],
            )
        return out

    def _select(
        self,
        step: Step,
        rows: int,
        tokens: int,
        offsets: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
    ) -> None:
        serving, dim = self.serving, INDEX_FP8.head_dim
        q, keys_and_weights = self.index_q[:rows], self.hidden[:rows]
        q_fp8 = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=self.device)
        weights = torch.empty(q.shape[:2], dtype=torch.float32, device=self.device)
        fused_indexer_rope_quant(
            q[:tokens],
            keys_and_weights[:tokens, dim:],
            keys_and_weights[:tokens, :dim],
            self.norm[0],
            self.norm[1],
            self.table,
            self.index_cache,
            positions=self._of([0] * tokens, torch.int64),
            slot_mapping=self._of([-1] * tokens, torch.int64),
            interleaved=serving.interleaved,
            out=q_fp8[:tokens],
            weights_out=weights[:tokens],
        )
        if not step.whole_table:
            page_table = page_table[:, : -(-max(step.seq_lens) // 64)]
        request = q_fp8, weights, self.index_cache, offsets, seq_lens, page_table
        options: dict[str, Any] = {
            "topk": serving.topk,
            "max_workspace_bytes": serving.max_workspace_bytes,
            "out": self.topk_indices[:rows],
        }
        indexer_topk(*request, **options)
        if serving.topk_blocks is not None:  # layers that choose blocks, and those behind them
            options["block_size"] = serving.block_size
            _, blocks = indexer_topk_blocks(*request, **options, topk_blocks=serving.topk_blocks)
            indexer_topk_of_blocks(*request, blocks, **options)

    def _rope(self, tokens: slice) -> Tensor | None:
        return None if self.q_rope is None else self.q_rope[tokens]

    def _attend(
        self, num_rows: int, request_ids: Tensor, page_table: Tensor, *, is_decode: bool
    ) -> Tensor:
        topk = self.topk_indices[:num_rows]
        slots = to_slots(topk, page_table, request_ids, page_size=64)
        counts = (topk >= 0).sum(1).int()
        fmt = self.format
        rows = self.cache.data.view(-1, 1, fmt.row_width)
        cache = PagedCache(rows, fmt)
        q, q_rope = self.q[:num_rows], self._rope(slice(num_rows))
        if not is_decode:
            out, _ = sparse_prefill(
                q, cache, slots, q_rope=q_rope, softmax_scale=0.1, topk_lengths=counts
            )
            return out
        out, _ = sparse_decode(
            q.unsqueeze(1),
            cache,
            slots.unsqueeze(1),
            q_rope=None if q_rope is None else q_rope.unsqueeze(1),
            softmax_scale=0.1,
            topk_lengths=counts,
            workspace=self.workspace,
        )
        return out.squeeze(1)


class HostEngine(Engine):
    """An engine with latent rows in host memory, and two layers that share selections.

    Args:
        serving: the configuration, with rows_per_seat and a number of pages.
        device: where the tensors lie.
    """

    def __init__(self, serving: Serving, device: torch.device) -> None:
        super().__init__(replace(serving, num_pages=1), device, device)
        if serving.rows_per_seat is None:
            raise ValueError("serving must have rows_per_seat, got None")
        self.host = HostCache.allocate(
            self.format, serving.num_pages or 1, 64, num_layers=2, device=device
        )
        self.hot = HotRows(
            self.host,
            seats=serving.max_requests,
            rows_per_seat=serving.rows_per_seat,
            topk=serving.topk,
            query_len=serving.max_query_len,
            leaders=(0, 0),
            shard=serving.shard,
        )
        max_rows = serving.context_rows or serving.max_seq_len
        self.context = HostContext(self.host, max_rows=max_rows, shard=serving.shard)
        self.seats = self._ints(serving.max_requests)

    def run(self, step: Step) -> Tensor:
        """Attention of a batch, ``[T, H, V]``: decodes over hot rows, prefills over contexts."""
        serving = self.serving
        plan = plan_batch(
            step.query_lens,
            step.seq_lens,
            self.page_table[: len(step.query_lens)],
            page_size=64,
            num_padded_tokens=sum(step.query_lens) + step.padding,
            workspace_rows=self.context.max_rows,
            decode_threshold=serving.max_query_len,
            require_uniform=False,
            shard=serving.shard,
        )
        out = torch.empty(
            plan.num_tokens,
            serving.num_heads,
            self.format.value_dim,
            dtype=torch.bfloat16,
            device=self.device,
        )
        num = plan.num_decode_tokens
        prefills = plan.prefills
        converts = serving.converts and not self.context.selects(prefills, serving.topk)
        if plan.num_prefills and converts:
            self.context.start(prefills)
        self.hot.forget([0])
        for layer in range(2):
            chosen = self.topk_indices[: plan.num_tokens]
            if num:
                seats = self.seats[: plan.num_decodes]
                found = self.hot.resolve(layer, chosen[:num], plan.decodes, seats)
                q_rope = self._rope(slice(num))
                attended, _ = sparse_decode(
                    self.q[:num, None],
                    self.hot.layer(layer),
                    found.rows[:, None],
                    q_rope=None if q_rope is None else q_rope[:, None],
                    softmax_scale=0.1,
                    topk_lengths=found.counts,
                    workspace=self.workspace,
                )
                out[:num] = attended[:, 0]
            if plan.num_prefills:
                attend = self._attend_to_contexts if converts else self._attend_to_selected
                attend(layer, prefills, slice(num, plan.num_tokens), out)
        return out

    def _attend_to_selected(self, layer: int, plan: Plan, tokens: slice, out: Tensor) -> None:
        chosen = self.topk_indices[tokens]
        for piece, rows, indices in self.context.selected(layer, chosen, plan):
            of_piece = slice(tokens.start + piece.start, tokens.start + piece.stop)
            counts = (indices >= 0).sum(1).int()
            out[of_piece], _ = sparse_prefill(
                self.q[of_piece],
                rows,
                indices,
                q_rope=self._rope(of_piece),
                softmax_scale=0.1,
                topk_lengths=counts,
            )

    def _attend_to_contexts(self, layer: int, plan: Plan, tokens: slice, out: Tensor) -> None:
        slots = to_slots(
            self.topk_indices[tokens],
            plan.page_table,
            plan.request_ids,
            page_size=64,
            workspace_starts=plan.workspace_starts,
            prefill_request_ids=plan.prefill_request_ids,
        )
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device=self.device)
        for number, chunk in enumerate(plan.prefill_chunks):
            of_chunk = slice(tokens.start + chunk.tokens.start, tokens.start + chunk.tokens.stop)
            sparse_prefill(
                self.q[of_chunk],
                self.context.rows(layer, number),
                slots[chunk.tokens],
                q_rope=self._rope(of_chunk),
                softmax_scale=0.1,
                out=out[of_chunk],
                lse=lse[of_chunk],
            )


class CompressedEngine:
    """An engine with a layer of each kind of DeepSeek-V4, as the transformers backend calls ops.

    Args:
        serving: the configuration, with ratios and a number of pages.
        device: where the tensors lie.
    """

    def __init__(self, serving: Serving, device: torch.device) -> None:
        if serving.cache_format is None:
            raise ValueError("serving must have a cache_format, got None")
        fmt = as_format("cache_format", serving.cache_format)
        self.serving, self.device, self.dim = serving, device, fmt.head_dim
        self.raw = self._cache(fmt)
        self.entries = self._cache(fmt)
        self.keys = self._cache(INDEX_FP8)
        shape = serving.groups, serving.group_width, serving.num_heads // serving.groups * self.dim
        blocks = shape[0], -(-shape[1] // 128), -(-shape[2] // 128)
        self.weights = (
            HeadWeight(self._ones(*shape)),
            HeadWeight(
                self._ones(*shape, dtype=torch.float8_e4m3fn),
                self._ones(*blocks, dtype=torch.float32),
            ),
        )
        self.table = self._ones(serving.max_positions, 64, dtype=torch.float32)

    def _cache(self, fmt: CacheFormat) -> PagedCache:
        pages, page_size = self.serving.num_pages or 1, self.serving.page_size
        return PagedCache.allocate(fmt, pages, page_size, device=self.device)

    def _ones(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.ones(shape, dtype=dtype, device=self.device)

    def _of(self, values: list[int], dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def run(self, step: Step) -> None:
        """One layer of each kind."""
        serving, size = self.serving, sum(step.query_lens)
        requests = range(len(step.query_lens))
        positions: list[int] = []
        ids: list[int] = []
        offsets = [0]
        for i in requests:
            new, length = step.query_lens[i], step.seq_lens[i]
            positions += range(length - new, length)
            ids += [i] * new
            offsets.append(offsets[-1] + new)
        tokens: dict[str, Any] = {
            "positions": self._of(positions, torch.int64),
            "request_ids": self._of(ids),
        }
        requests_of: dict[str, Any] = {
            "input_row_offsets": self._of(offsets),
            "seq_lens": self._of([*step.seq_lens]),
        }
        decodes = max(step.query_lens) <= serving.max_query_len
        window = visible_slots(
            **tokens,
            page_table=self._page_table(step, 1),
            width=serving.sliding_window,
            page_size=serving.page_size,
        )
        q = fused_rope_rmsnorm_quant(
            self._ones(size, serving.num_heads, self.dim),
            self._ones(size, self.dim),
            self.table,
            self._ones(self.dim),
            self.raw,
            positions=tokens["positions"],
            slot_mapping=self._of([-1] * size, torch.int64),
            query_norm=True,
            out=self._ones(size, serving.num_heads, self.dim),
        )
        for ratio in serving.ratios:
            extra: tuple[Tensor, Tensor | None] | None = None
            if ratio:
                extra = self._second_stream(step, ratio, tokens, requests_of)
            out = self._attend(q, window, extra, decodes)
            for weight in self.weights:
                project_groups(out, weight, cos_sin_cache=self.table, positions=tokens["positions"])

    def _page_table(self, step: Step, ratio: int) -> Tensor:
        columns = self.serving.columns_of(ratio)
        shape = len(step.query_lens), columns
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _second_stream(
        self, step: Step, ratio: int, tokens: dict[str, Any], requests: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Slots of the entries to attend to, and their numbers unless all are valid or -1."""
        serving, page_table = self.serving, self._page_table(step, ratio)
        page_size = serving.page_size
        closed = entry_slots(**tokens, page_table=page_table, ratio=ratio, page_size=page_size)
        pooling = Pooling(ratio, overlap=ratio == 4)
        self._pool(self.entries, pooling, tokens, requests, closed)
        if ratio != 4:
            longest = max(step.seq_lens)
            width = min(w for w in serving.entry_widths(ratio) if w * ratio >= longest)
            return visible_slots(
                **tokens, page_table=page_table, width=width, ratio=ratio, page_size=page_size
            )
        self._pool(self.keys, pooling, tokens, requests, closed)
        size, heads = len(tokens["positions"]), serving.index_heads
        q, weights = prepare_index_queries(
            self._ones(size, heads, INDEX_FP8.head_dim),
            self._ones(size, heads),
            self.table,
            positions=tokens["positions"],
            interleaved=True,
            rope_first=False,
        )
        topk_indices = indexer_topk(
            q,
            weights,
            self.keys,
            **requests,
            page_table=page_table,
            topk=serving.topk,
            ratio=ratio,
            max_workspace_bytes=serving.max_workspace_bytes,
        )
        ids = tokens["request_ids"]
        return to_slots(topk_indices, page_table, ids, page_size=page_size), None

    def _pool(
        self,
        cache: PagedCache,
        pooling: Pooling,
        tokens: dict[str, Any],
        requests: dict[str, Any],
        closed: Tensor,
    ) -> None:
        dim, size = cache.format.head_dim, len(closed)
        width = pooling.width(dim)
        pool_windows(
            self._ones(size, width),
            self._ones(size, width),
            self._ones(dim),
            self.table,
            WindowState.allocate(
                pooling,
                dim,
                num_rings=self.serving.max_requests,
                max_drafts=self.serving.max_query_len - 1,
                device=self.device,
            ),
            cache,
            pooling=pooling,
            gate_bias=self._ones(pooling.ratio, width, dtype=torch.float32),
            **tokens,
            input_row_offsets=requests["input_row_offsets"],
            ring_ids=torch.zeros_like(requests["seq_lens"]),
            slot_mapping=closed,
        )

    def _attend(
        self,
        q: Tensor,
        window: tuple[Tensor, Tensor],
        extra: tuple[Tensor, Tensor | None] | None,
        decodes: bool,
    ) -> Tensor:
        slots, lengths = window
        cache = None if extra is None else self.entries
        extra_slots, extra_lengths = (None, None) if extra is None else extra
        sink = self._ones(q.shape[1], dtype=torch.float32)
        if not decodes:
            out, _ = sparse_prefill(
                q,
                self.raw,
                slots,
                softmax_scale=0.1,
                topk_lengths=lengths,
                attn_sink=sink,
                extra_cache=cache,
                extra_topk_indices=extra_slots,
                extra_topk_lengths=extra_lengths,
            )
            return out
        out, _ = sparse_decode(
            q[:, None],
            self.raw,
            slots[:, None],
            softmax_scale=0.1,
            topk_lengths=lengths,
            attn_sink=sink,
            extra_cache=cache,
            extra_topk_indices=None if extra_slots is None else extra_slots[:, None],
            extra_topk_lengths=extra_lengths,
        )
        return out[:, 0]

"""The attention of DeepSeek-V4: a sliding window of raw rows, and entries of 4 or 128 tokens.

Every layer attends to the rows of the last 128 tokens. Most layers also attend to entries, rows
pooled from all earlier windows of ``ratio`` tokens: a CSA layer (ratio 4) to those that its indexer
selects, an HCA layer (ratio 128) to every one. Keys are values, so attention's output is rotated
back to position 0 before the output projection.

transformers rotates by the positions that it is given. Here a token's position is its number among
the real tokens of its row, because the windows of the pools are counted so.

Shapes: B rows of the batch, S columns of a step, T tokens of a step (the real ones, or B in a
decode step), H heads, D dims of a head, R RoPE dims, HI and DI indexer heads and dims, N rows of a
ring.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import Tensor, nn

from sparsemla.backends.transformers.cache import CACHE, BatchCache, Pages, ordinary_tensors
from sparsemla.backends.transformers.layers import (
    Example,
    Layers,
    attend_to,
    check_format,
    index_format_of,
    path_of,
    plan_column,
    plan_columns,
)
from sparsemla.backends.transformers.projections import (
    Absorbed,
    Projection,
    State,
    check_skipped,
    state_of,
)
from sparsemla.backends.transformers.step import Step
from sparsemla.cache import PagedCache
from sparsemla.formats import CacheFormat, bf16_format
from sparsemla.ops import (
    entry_slots,
    fused_rope_rmsnorm_quant,
    indexer_topk,
    pool_windows,
    prepare_index_queries,
    project_groups,
    to_slots,
    visible_slots,
)
from sparsemla.plan import Plan
from sparsemla.pooling import Pooling, WindowState
from sparsemla.rope import cos_sin_table
from sparsemla.weights import HeadWeight, group_o_a_proj

WINDOW = "sliding_attention"
CSA, HCA = "compressed_sparse_attention", "heavily_compressed_attention"

REWIND = 8
"""Tokens by which a row can be wound back: rings hold as many rows more than attention reads.

A decode step writes a row for padding, too, which takes the place that is left.
"""

ROPES = "main", "compress"
"""Types of RoPE tables."""

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Types of RoPE with other frequencies for longer texts: entries are rotated only once."""


class _Rings(Pages):
    """Pages that do not grow: page ``b`` holds the last ``page_size`` rows of row ``b``."""

    def reserve(self, num_tokens: int) -> None:
        super().reserve(1)

    def fit(self, lengths: Sequence[int]) -> None:
        super().fit([1] * len(lengths))


class States:
    """The rows of open windows of several layers; row ``b`` of a batch owns ring ``b``.

    Args:
        sizes: for each layer, by its index, its pooling, the dims of an entry and its device.
        max_drafts: tokens by which a row can be wound back.

    Attributes:
        states: keyed by the layer's index.
    """

    def __init__(
        self, sizes: Mapping[int, tuple[Pooling, int, torch.device]], *, max_drafts: int
    ) -> None:
        self._sizes = dict(sizes)
        self._max_drafts = max_drafts
        self.clear(0)

    def clear(self, batch_size: int) -> None:
        self.states = {
            layer_idx: WindowState.allocate(
                pooling, dim, num_rings=batch_size, max_drafts=self._max_drafts, device=device
            )
            for layer_idx, (pooling, dim, device) in self._sizes.items()
        }

    @property
    def formats(self) -> tuple[str, ...]:
        return tuple(f"float32_{state.rows.shape[-1]}" for state in self.states.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of the batch in all layers."""
        return sum(4 * state.rows[:1].shape[1:].numel() for state in self.states.values())

    @property
    def nbytes(self) -> int:
        return sum(state.rows.nbytes for state in self.states.values())

    def tensors(self) -> Iterator[Tensor]:
        yield from (state.rows for state in self.states.values())

    def reserve(self, num_tokens: int) -> None:
        """Do nothing: a ring does not grow."""

    def fit(self, lengths: Sequence[int]) -> None:
        """Do nothing: a ring does not grow."""

    def select(self, rows: Tensor) -> None:
        for layer_idx, state in self.states.items():
            chosen = state.rows[rows.to(state.rows.device)]
            if chosen.shape == state.rows.shape:
                state.rows.copy_(chosen)
            else:
                self.states[layer_idx] = WindowState(chosen)


class CompressedCache(BatchCache):
    """Rings of raw rows, pages of entries and index keys, and the rows of windows still open.

    Args:
        layers: type and device of each layer.
        poolings: keyed by the types of layers with entries.
        cache_format: format of raw rows and entries.
        index_format: format of index keys.
        sliding_window: raw rows that a token attends to.
        page_size: entries of a page.
        batch_size: B.
        max_length: capacity in columns; None for pages that grow.

    Attributes:
        rings: a ring for each layer: page ``b`` holds the last N rows of row ``b``.
        entries: keyed by type, the entries of its layers.
        index_keys: the index keys of CSA layers.
        states: the rows of windows still open, for entries.
        index_states: the same for index keys.
        reached: int32 ``[B]``, the most tokens that a row has had: its rings hold the last of them.
    """

    _per_row: ClassVar[tuple[str, ...]] = (*BatchCache._per_row, "reached")

    def __init__(
        self,
        layers: Sequence[tuple[str, torch.device]],
        poolings: Mapping[str, Pooling],
        cache_format: CacheFormat,
        index_format: CacheFormat,
        *,
        sliding_window: int,
        page_size: int,
        batch_size: int,
        max_length: int | None,
    ) -> None:
        first = layers[0][1]

        def empty(
            kinds: Sequence[str], format: CacheFormat, page_size: int
        ) -> dict[int, PagedCache]:
            return {
                layer_idx: PagedCache.allocate(format, 0, page_size, device=device)
                for layer_idx, (kind, device) in enumerate(layers)
                if kind in kinds
            }

        def states(kinds: Sequence[str], dim: int) -> States:
            return States(
                {
                    layer_idx: (poolings[kind], dim, device)
                    for layer_idx, (kind, device) in enumerate(layers)
                    if kind in kinds
                },
                max_drafts=REWIND,
            )

        ring = sliding_window + REWIND
        self.rings = _Rings(empty([*poolings, WINDOW], cache_format, ring), first, page_size=ring)
        self.entries = {
            kind: Pages(
                empty([kind], cache_format, page_size),
                first,
                page_size=page_size,
                ratio=pooling.ratio,
            )
            for kind, pooling in poolings.items()
        }
        self.index_keys = Pages(
            empty([CSA], index_format, page_size),
            first,
            page_size=page_size,
            ratio=poolings[CSA].ratio,
        )
        self.states = states(list(poolings), cache_format.head_dim)
        self.index_states = states([CSA], index_format.head_dim)
        super().__init__(
            [
                self.rings,
                *self.entries.values(),
                self.index_keys,
                self.states,
                self.index_states,
            ],
            first,
            page_size=page_size,
            batch_size=batch_size,
            max_length=max_length,
        )

    def _clear(self, batch_size: int) -> None:
        super()._clear(batch_size)
        self.reached = torch.zeros_like(self.lengths)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that all layers keep for one token more: entries and index keys."""
        return sum(
            pages.row_bytes / pages.ratio for pages in (*self.entries.values(), self.index_keys)
        )

    @property
    def bytes_per_row(self) -> int:
        """Bytes that all layers keep for a row of any length: its rings."""
        raw = self.rings.row_bytes * self.rings.page_size
        return raw + self.states.row_bytes + self.index_states.row_bytes

    def reset(self) -> None:
        """Forget all columns but keep the pages."""
        super().reset()
        self.reached.zero_()

    def advance(self, new: Tensor) -> None:
        """Count the columns ``new [B, S]`` of a step, True where they are not padding."""
        super().advance(new)
        self.reached.copy_(torch.maximum(self.reached, self.lengths))

    def _shorten(self, lengths: Tensor) -> None:
        lost = (self.reached - lengths).where(lengths > 0, 0)
        if (lost > REWIND).any():
            raise ValueError(
                f"{CACHE} must forget all tokens of a row or at most the last {REWIND}, "
                f"got {int(lost.max())}: rows of the tokens before are no longer kept"
            )
        super()._shorten(lengths)
        self.reached.masked_fill_(lengths == 0, 0)


@dataclass(eq=False, kw_only=True)
class _Workspace:
    """A cache for the raw rows of a step with several columns, which do not fit into the rings.

    It has a page of N rows for every N positions; a layer copies its rings into the pages before
    the step and keeps the last N rows of each row after it.

    Args:
        num_pages: number of pages.
        page_table: int32 ``[B, W]``; -1 where a page holds none of the last rows.
        before: int64 ``[2, n]``, rings with rows from before the step, and their pages.
        after: int64 ``[3, m]``, rings of rows with tokens in this step, their last page, and the
            page before it.
        in_last: bool ``[m, N, 1]``, whether a row of the ring is in the last page.
    """

    num_pages: int
    page_table: Tensor
    before: Tensor
    after: Tensor
    in_last: Tensor
    _cache: PagedCache | None = field(default=None, init=False)

    def load(self, rings: PagedCache) -> PagedCache:
        """The workspace with the rows of a layer's rings; all layers of a device share it."""
        if self._cache is None:
            self._cache = PagedCache.allocate(
                rings.format, max(self.num_pages, 1), rings.page_size, device=rings.data.device
            )
        own, pages = self.before
        for part, kept in ((self._cache.data, rings.data), (self._cache.scales, rings.scales)):
            if part is not None and kept is not None:
                part[pages] = kept[own]
        return self._cache

    def save(self, rings: PagedCache) -> None:
        """Copy the last N rows of each row into its ring."""
        own, last, before_last = self.after
        for part, kept in zip(cast(PagedCache, self._cache).stored(), rings.stored(), strict=True):
            if part is not None and kept is not None:
                kept[own] = torch.where(self.in_last, part[last], part[before_last])


@dataclass(eq=False, kw_only=True)
class _Entries:
    """The entries of a step, for all layers of a type.

    Args:
        page_table: int32 ``[B, W]``.
        slot_mapping: int32 ``[T]``, slot of the entry that a token completes, else -1.
    """

    page_table: Tensor
    slot_mapping: Tensor


@dataclass(eq=False, kw_only=True)
class CompressedStep(Step):
    """A step with slots in every kind of cache.

    Args:
        plan: of raw rows; its positions are those of each token among the real tokens of its row.
        ring_ids: int32 ``[B]``, ring of each row.
        sliding_window: int32 ``[T, window]`` and ``[T]``: slots of the raw rows that a token
            attends to, and their number.
        csa, hca: the entries of CSA and HCA layers.
        visible: int32 ``[T, K]`` and ``[T]``: slots of all entries that a token sees in an HCA
            layer, and their number.
        workspace: None in a decode step, whose raw slots are those of the rings.
    """

    cache: CompressedCache
    plan: Plan
    ring_ids: Tensor
    sliding_window: tuple[Tensor, Tensor]
    csa: _Entries
    hca: _Entries
    visible: tuple[Tensor, Tensor]
    workspace: _Workspace | None


class _Rope(NamedTuple):
    """A rotation: frequencies ``[R / 2]`` and the factor of cosines and sines."""

    frequencies: tuple[float, ...]
    factor: float


class CompressedLayers(Layers):
    """Attention over the sliding window and over entries, in one softmax with a sink."""

    _formats: tuple[CacheFormat, CacheFormat]
    gaps = False  # the windows of the pools would differ

    def _prepare(
        self, cache_format: CacheFormat | None, index_format: CacheFormat | None
    ) -> tuple[CacheFormat, CacheFormat]:
        config: Any = self._base.config
        self._ropes = _ropes(self._base.rotary_emb)
        self._rope_state: State | None = None
        self._entry_states: dict[str, State] = {}
        self._rope_dim = 2 * len(self._ropes["main"].frequencies)
        self._sliding_window = config.sliding_window
        rates = config.compress_rates
        self._poolings = {CSA: Pooling(rates[CSA], overlap=True), HCA: Pooling(rates[HCA])}
        dim = config.head_dim
        if cache_format is None:
            cache_format = bf16_format(dim)
        check_format("cache_format", cache_format, dim, dim)
        self._tables: dict[tuple[str, torch.device], Tensor] = {}
        return cache_format, index_format_of(
            index_format, config.index_head_dim, self._rope_dim, cache_format
        )

    def example(self) -> Example:
        module, config = next(iter(self.modules.values())), self._base.config
        heads, width = module.num_heads, self._sliding_window
        if not any(each.layer_type == CSA for each in self.modules.values()):
            return Example(heads=heads, width=width, has_sink=True)
        return Example(
            heads=heads,
            width=width,
            extra_width=config.index_topk,
            has_sink=True,
            index_heads=config.index_n_heads,
            topk=config.index_topk,
            ratio=self._poolings[CSA].ratio,
        )

    def absorb(self, path: str, module: nn.Module) -> Absorbed:
        attention = cast(Any, module)
        groups = attention.config.o_groups
        projection = Projection(
            path,
            module,
            "o_a_proj",
            in_features=attention.num_heads * attention.head_dim // groups,
            out_features=attention.config.o_lora_rank,
            num_groups=groups,
        )

        def split(**stored: Any) -> list[HeadWeight]:  # noqa: ANN401 - a weight and its scales
            return [group_o_a_proj(**stored, num_groups=groups)]

        return Absorbed(projection, split, model=self._base)

    def skipped(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        attention = cast(Any, module)
        yield "q_b_norm", attention.q_b_norm
        yield "kv_norm", attention.kv_norm
        for name, part in _compressors(attention):
            yield name, part
            yield f"{name}.kv_norm", part.kv_norm
            yield f"{name}.rotary_emb", part.rotary_emb
            if name.endswith("indexer"):
                yield f"{name}.scorer", part.scorer

    def _update(self, *, anew: bool) -> None:
        super()._update(anew=anew)
        check_skipped("", "rotary_emb", self._base.rotary_emb)
        self._update_tables(anew=anew)
        for layer_idx, module in self.modules.items() if anew else ():
            self._check_ropes(layer_idx, module)
            eps = module.q_b_norm.eps, module.kv_norm.variance_epsilon
            if eps[0] != eps[1]:
                raise ValueError(
                    f"model must have one epsilon in {path_of(layer_idx)}.q_b_norm and kv_norm, "
                    f"which are one op here, got {eps[0]} and {eps[1]}"
                )

    def _update_tables(self, *, anew: bool) -> None:
        """Write the tables of changed frequencies again, where compiled steps read them."""
        rotary = self._base.rotary_emb
        state = tuple(state_of(getattr(rotary, f"{kind}_inv_freq")) for kind in ROPES)
        if anew or state != self._rope_state:
            self._rope_state = state
            before, self._ropes = self._ropes, _ropes(rotary)
            for (kind, device), table in self._tables.items():
                if self._ropes[kind] != before[kind]:
                    table.copy_(self._new_table(kind, device, len(table)))

    def _check_ropes(self, layer_idx: int, module: Any) -> None:  # noqa: ANN401
        """Refuse a layer that rotates its entries, or their queries, by other angles."""
        for name, part in _compressors(module):
            path = f"{path_of(layer_idx)}.{name}.rotary_emb"
            state = state_of(part.rotary_emb.compress_inv_freq), self._ropes["compress"]
            if state != self._entry_states.get(path):
                if _rope(part.rotary_emb, "compress") != self._ropes["compress"]:
                    raise ValueError(
                        f"model must have the same compress_inv_freq in {path} as in rotary_emb, "
                        "got other frequencies"
                    )
                self._entry_states[path] = state

    def new_cache(self, batch_size: int, max_length: int | None = None) -> CompressedCache:
        cache = CompressedCache(
            [(module.layer_type, module.sinks.device) for module in self.modules.values()],
            self._poolings,
            *self._formats,
            sliding_window=self._sliding_window,
            page_size=self.page_size,
            batch_size=batch_size,
            max_length=max_length,
        )
        for module in self.modules.values():  # compiled steps find tables of the full length
            self._table(module.rope_layer_type, module.sinks.device, cache.capacity)
        return cache

    def packed_step(self, cache: BatchCache, new: Tensor) -> CompressedStep:
        cache = cast(CompressedCache, cache)
        query_lens, ring = new.sum(1).cpu(), cache.rings.page_size
        workspace = _workspace(cache.lengths.cpu(), query_lens, ring, cache.device)
        plan, tokens = plan_columns(cache, new, workspace.page_table, ring)
        return self._step(cache, plan, tokens, workspace)

    def decode_step(self, cache: BatchCache, new: Tensor) -> CompressedStep:
        cache = cast(CompressedCache, cache)
        ring = cache.rings.page_size
        table = cache.rings.table.repeat(1, -(-cache.capacity // ring))
        return self._step(cache, plan_column(cache, new, table, ring), None, None)

    def _step(
        self,
        cache: CompressedCache,
        plan: Plan,
        tokens: Tensor | None,
        workspace: _Workspace | None,
    ) -> CompressedStep:
        """The step of a plan, in which page ``p // N`` of the raw rows holds position p."""
        positions, request_ids = plan.positions, plan.request_ids

        def entries(kind: str) -> _Entries:
            pages = cache.entries[kind]
            slot_mapping = entry_slots(
                positions,
                pages.table,
                request_ids,
                ratio=pages.ratio,
                page_size=pages.page_size,
            )
            return _Entries(page_table=pages.table, slot_mapping=slot_mapping)

        hca, ratio = entries(HCA), cache.entries[HCA].ratio
        return CompressedStep(
            cache=cache,
            decodes=workspace is None,
            tokens=tokens,
            plan=plan,
            ring_ids=cache.rows[:-1],
            sliding_window=visible_slots(
                positions,
                plan.page_table,
                request_ids,
                width=self._sliding_window,
                page_size=plan.page_size,
            ),
            csa=entries(CSA),
            hca=hca,
            visible=visible_slots(
                positions,
                hca.page_table,
                request_ids,
                width=max(plan.max_seq_len // ratio, 1),
                ratio=ratio,
                page_size=cache.page_size,
            ),
            workspace=workspace,
        )

    def attend(
        self, layer_idx: int, hidden_states: Tensor, step: Step, given: Mapping[str, Any]
    ) -> tuple[Tensor | None, ...]:
        module, cache = self.modules[layer_idx], cast(CompressedStep, step).cache
        rings = cache.rings.caches[layer_idx]
        step = cast(CompressedStep, step).on(rings.data.device)
        table = self._table(module.rope_layer_type, rings.data.device, cache.capacity)
        x = step.pick(hidden_states)  # [T, hidden]
        q_resid = module.q_a_norm(module.q_a_proj(x))
        q = torch.unflatten(module.q_b_proj(q_resid), -1, (module.num_heads, -1))  # [T, H, D]
        raw = rings if step.workspace is None else step.workspace.load(rings)
        q = fused_rope_rmsnorm_quant(
            q,
            module.kv_proj(x),
            table,
            module.kv_norm.weight,
            raw,
            positions=step.plan.positions,
            slot_mapping=step.plan.slot_mapping,
            eps=module.kv_norm.variance_epsilon,
            query_norm=True,
            out=torch.empty_like(q, dtype=torch.bfloat16),
        )
        if step.workspace is not None:
            step.workspace.save(rings)
        slots, lengths = step.sliding_window
        extra: tuple[PagedCache | None, Tensor | None, Tensor | None] = None, None, None
        if module.compressor is not None:
            extra = self._entries(layer_idx, x, q_resid, table, step)
        extra_cache, extra_slots, extra_lengths = extra
        out = attend_to(
            step,
            q,
            raw,
            slots,
            softmax_scale=module.scaling,
            topk_lengths=lengths,
            attn_sink=module.sinks.detach().float(),
            extra_cache=extra_cache,
            extra_topk_indices=extra_slots,
            extra_topk_lengths=extra_lengths,
        )
        (w_o_a,) = self.absorbed[layer_idx].weights
        groups = project_groups(out, w_o_a, cos_sin_cache=table, positions=step.plan.positions)
        out = module.o_b_proj(groups.flatten(1).to(hidden_states.dtype))
        return step.place(out, hidden_states.shape), None

    def _entries(
        self, layer_idx: int, x: Tensor, q_resid: Tensor, table: Tensor, step: CompressedStep
    ) -> tuple[PagedCache, Tensor, Tensor | None]:
        """Store the step's entries; their cache, slots ``[T, K]`` to attend to, and numbers."""
        module, cache = self.modules[layer_idx], step.cache
        kind = module.layer_type
        stored = cache.entries[kind].caches[layer_idx]
        pool = functools.partial(self._pool, x, table, kind, step)
        pool(module.compressor, cache.states.states[layer_idx], stored)
        if kind == HCA:
            return stored, *step.visible
        indexer, keys = module.compressor.indexer, cache.index_keys.caches[layer_idx]
        pool(indexer, cache.index_states.states[layer_idx], keys)
        q, weights = prepare_index_queries(
            torch.unflatten(indexer.q_b_proj(q_resid), -1, (indexer.num_heads, -1)),
            indexer.scorer.weights_proj(x),
            table,
            positions=step.plan.positions,
            format=keys.format,
            interleaved=True,
            rope_first=False,
        )
        ratio = cache.index_keys.ratio
        topk_indices = indexer_topk(
            q,
            weights,
            keys,
            input_row_offsets=step.plan.input_row_offsets,
            seq_lens=step.plan.seq_lens,
            page_table=step.csa.page_table,
            topk=min(indexer.index_topk, max(cache.capacity // ratio, 1)),
            ratio=ratio,
        )
        if self.records:
            step.selections[layer_idx] = topk_indices
        slots = to_slots(
            topk_indices, step.csa.page_table, step.plan.request_ids, page_size=self.page_size
        )
        return stored, slots, None

    def _pool(
        self,
        x: Tensor,
        table: Tensor,
        kind: str,
        step: CompressedStep,
        compressor: Any,  # noqa: ANN401 - a module of transformers
        state: WindowState,
        cache: PagedCache,
    ) -> None:
        """Store the entries of the windows that the step closes."""
        pool_windows(
            compressor.kv_proj(x),
            compressor.gate_proj(x),
            compressor.kv_norm.weight,
            table,
            state,
            cache,
            pooling=self._poolings[kind],
            gate_bias=compressor.position_bias.detach().float(),
            positions=step.plan.positions,
            request_ids=step.plan.request_ids,
            input_row_offsets=step.plan.input_row_offsets,
            ring_ids=step.ring_ids,
            slot_mapping=(step.csa if kind == CSA else step.hca).slot_mapping,
            eps=compressor.kv_norm.variance_epsilon,
        )

    def _table(self, kind: str, device: torch.device, capacity: int) -> Tensor:
        """Cosines and sines for at least ``capacity`` positions, and for the one behind them."""
        table = self._tables.get((kind, device))
        if table is None or len(table) <= capacity:
            table = self._tables[kind, device] = self._new_table(kind, device, capacity + 1)
        return table

    @ordinary_tensors
    def _new_table(self, kind: str, device: torch.device, num_positions: int) -> Tensor:
        rope = self._ropes[kind]
        frequencies = torch.tensor(rope.frequencies, dtype=torch.float64, device=device)
        table = cos_sin_table(frequencies, num_positions, factor=rope.factor)
        torch._dynamo.mark_static_address(table, guard=False)
        return table


def _ropes(rotary: Any) -> dict[str, _Rope]:  # noqa: ANN401 - a module of transformers
    """The model's rotations, keyed by the type of table.

    Raises:
        ValueError: frequencies that depend on the length, or of different numbers.
    """
    for kind in ROPES:
        if rotary.rope_type[kind] in LENGTH_DEPENDENT:
            raise ValueError(
                f"model must have a rope_type other than {' and '.join(LENGTH_DEPENDENT)} in "
                f"rope_parameters[{kind!r}], got {rotary.rope_type[kind]!r}"
            )
    ropes = {kind: _rope(rotary, kind) for kind in ROPES}
    dims = {kind: 2 * len(rope.frequencies) for kind, rope in ropes.items()}
    if dims["main"] != dims["compress"]:
        raise ValueError(f"model must have equal RoPE dims in rope_parameters, got {dims}")
    return ropes


def _rope(rotary: Any, kind: str) -> _Rope:  # noqa: ANN401 - a module of transformers
    frequencies = getattr(rotary, f"{kind}_inv_freq").tolist()
    return _Rope(tuple(frequencies), getattr(rotary, f"{kind}_attention_scaling"))


def _compressors(attention: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """The modules of a layer that pool windows, with their names."""
    if attention.compressor is not None:
        yield "compressor", attention.compressor
        if attention.layer_type == CSA:
            yield "compressor.indexer", attention.compressor.indexer


def _workspace(context: Tensor, query_lens: Tensor, ring: int, device: torch.device) -> _Workspace:
    """Pages for rows of ``context [B]`` and ``query_lens [B]`` tokens, both on the host."""
    starts = ((context - ring).clamp(min=0) // ring).tolist()
    ends = (-(-(context + query_lens) // ring)).tolist()
    host: Any = {"dtype": torch.int32, "device": "cpu"}
    page_table = torch.full((len(starts), max(ends)), -1, **host)
    num_pages = 0
    before, after, ends_at = [], [], []
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        pages = torch.arange(num_pages, num_pages + end - start, **host)
        page_table[row, start:end] = pages
        num_pages += end - start
        length = int(context[row])
        before += [(row, page) for page in pages[: -(-length // ring) - start].tolist()]
        if query_lens[row]:
            last = int(pages[-1])
            after.append((row, last, max(last - 1, int(pages[0]))))
            ends_at.append((length + int(query_lens[row]) - 1) % ring)
    in_last = torch.arange(ring, **host) <= torch.tensor(ends_at, **host)[:, None]
    return _Workspace(
        num_pages=num_pages,
        page_table=page_table.to(device),
        before=torch.tensor(before, dtype=torch.int64, device="cpu").view(-1, 2).T.to(device),
        after=torch.tensor(after, dtype=torch.int64, device="cpu").view(-1, 3).T.to(device),
        in_last=in_last[..., None].to(device),
    )

"""The attention of GLM-5.3-Flash: latent rows without RoPE, and an index key for every 16 tokens.

A layer selects complete pools of ``index_kpool`` tokens by keys that are pooled from them. A token
attends to the raw rows of its pools and of the pool that is still open. Other layers have linear
attention: it stays that of transformers, and so do its states.

Shapes: B rows of the batch, S columns of a step, T tokens of a step (the real ones, or B in a
decode step), H heads, P query dims, L latent dims, HI and DI indexer heads and dims, K pools.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparsemla.backends.transformers.cache import BatchCache, Pages, ordinary_tensors
from sparsemla.backends.transformers.deepseek_v4 import States
from sparsemla.backends.transformers.latent import absorbed_kv_b_proj
from sparsemla.backends.transformers.layers import (
    Example,
    Layers,
    attend_to,
    check_format,
    index_format_of,
    plan_column,
    plan_columns,
)
from sparsemla.backends.transformers.linear import HybridCache
from sparsemla.backends.transformers.projections import Absorbed
from sparsemla.backends.transformers.step import Step
from sparsemla.cache import PagedCache
from sparsemla.formats import CacheFormat, bf16_format
from sparsemla.ops import (
    entry_slots,
    fused_rope_rmsnorm_quant,
    indexer_topk,
    pool_windows,
    prepare_index_queries,
    project_heads,
    to_slots,
)
from sparsemla.plan import Plan
from sparsemla.pooling import NO_NORM, Pooling
from sparsemla.rope import cos_sin_table


class PooledCache(HybridCache):
    """Pages of latent rows and of pooled index keys, and the states of linear attention.

    Args:
        devices: of layers with keys, by the layer's index.
        indexed: layers with an indexer.
        linear: for each layer, whether its attention is linear.
        pooling: of index keys.
        cache_format: format of latent rows.
        index_format: format of index keys.
        page_size: rows of a page.
        batch_size: B.
        max_length: capacity in columns; None for pages that grow.

    Attributes:
        latents: a row for each token.
        index_keys: a row for each complete pool.
        states: the rows of pools that are still open.
    """

    def __init__(
        self,
        devices: Mapping[int, torch.device],
        indexed: Sequence[int],
        linear: Sequence[bool],
        pooling: Pooling,
        cache_format: CacheFormat,
        index_format: CacheFormat,
        *,
        page_size: int,
        batch_size: int,
        max_length: int | None,
    ) -> None:
        first = next(iter(devices.values()))

        def pages(layers: Sequence[int], format: CacheFormat, ratio: int) -> Pages:
            caches = {
                layer_idx: PagedCache.allocate(format, 0, page_size, device=devices[layer_idx])
                for layer_idx in layers
            }
            return Pages(caches, first, page_size=page_size, ratio=ratio)

        self.latents = pages(list(devices), cache_format, 1)
        self.index_keys = pages(indexed, index_format, pooling.ratio)
        self.states = States(
            {
                layer_idx: (pooling, index_format.head_dim, devices[layer_idx])
                for layer_idx in indexed
            },
            max_drafts=1,  # a decode step writes a row for padding, too
        )
        super().__init__(
            [self.latents, self.index_keys, self.states],
            first,
            linear=linear,
            page_size=page_size,
            batch_size=batch_size,
            max_length=max_length,
        )

    @property
    def bytes_per_token(self) -> float:
        """Bytes that all layers keep for one token more: latent rows and index keys."""
        return self.latents.row_bytes + self.index_keys.row_bytes / self.index_keys.ratio


@dataclass(eq=False, kw_only=True)
class PooledStep(Step):
    """A step with the slots of its tokens.

    Args:
        plan: its positions are those of each token among the real tokens of its row.
        key_table: int32, pages of index keys.
        ring_ids: int32 ``[B]``, ring of each row.
        key_slots: int32 ``[T]``, slot of the index key that a token completes, else -1.
    """

    cache: PooledCache
    plan: Plan
    key_table: Tensor
    ring_ids: Tensor
    key_slots: Tensor


class PooledLayers(Layers):
    """Attention in the absorbed form of MLA over the tokens of selected pools, without RoPE."""

    _formats: tuple[CacheFormat, CacheFormat]

    def _prepare(
        self, cache_format: CacheFormat | None, index_format: CacheFormat | None
    ) -> tuple[CacheFormat, CacheFormat]:
        config: Any = self._base.config
        if not config.index_kpool_always_select_tail:
            raise ValueError("model must have index_kpool_always_select_tail, got False")
        self._pooling = Pooling(config.index_kpool)
        latent_dim, index_dim = config.kv_lora_rank, config.index_head_dim
        if cache_format is None:
            cache_format = bf16_format(latent_dim)
        check_format("cache_format", cache_format, latent_dim, latent_dim)
        self._rope_dim = min(64, latent_dim, index_dim) // 2 * 2
        self._tables: dict[torch.device, Tensor] = {}
        return cache_format, index_format_of(index_format, index_dim, 0, cache_format)

    def example(self) -> Example:
        config, ratio = self._base.config, self._pooling.ratio
        topk = config.index_topk // ratio
        return Example(
            heads=next(iter(self.modules.values())).num_heads,
            width=topk * ratio + ratio - 1,  # and the tokens of the open pool
            index_heads=config.index_n_heads,
            topk=topk,
            ratio=ratio,
        )

    def absorb(self, path: str, module: nn.Module) -> Absorbed:
        return absorbed_kv_b_proj(path, module, self._base)

    def skipped(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        attention = cast(Any, module)
        yield "kv_a_layernorm", attention.kv_a_layernorm
        if attention.indexer is not None:
            yield "indexer", attention.indexer

    def new_cache(self, batch_size: int, max_length: int | None = None) -> PooledCache:
        devices = {
            layer_idx: absorbed.weights[0].data.device
            for layer_idx, absorbed in self.absorbed.items()
        }
        cache = PooledCache(
            devices,
            [layer for layer, module in self.modules.items() if module.indexer is not None],
            self.linear,
            self._pooling,
            *self._formats,
            page_size=self.page_size,
            batch_size=batch_size,
            max_length=max_length,
        )
        for device in set(devices.values()):  # compiled steps find tables of the full length
            self._table(device, cache.capacity)
        return cache

    def packed_step(self, cache: BatchCache, new: Tensor) -> PooledStep:
        cache = cast(PooledCache, cache)
        plan, tokens = plan_columns(cache, new, cache.latents.table, cache.page_size)
        return self._step(cache, plan, decodes=False, tokens=tokens)

    def decode_step(self, cache: BatchCache, new: Tensor) -> PooledStep:
        cache = cast(PooledCache, cache)
        plan = plan_column(cache, new, cache.latents.table, cache.page_size)
        return self._step(cache, plan, decodes=True, tokens=None)

    def _step(
        self, cache: PooledCache, plan: Plan, *, decodes: bool, tokens: Tensor | None
    ) -> PooledStep:
        return PooledStep(
            cache=cache,
            decodes=decodes,
            tokens=tokens,
            plan=plan,
            key_table=cache.index_keys.table,
            ring_ids=cache.rows[:-1],
            key_slots=entry_slots(
                plan.positions,
                cache.index_keys.table,
                plan.request_ids,
                ratio=self._pooling.ratio,
                page_size=cache.page_size,
            ),
        )

    def attend(
        self, layer_idx: int, hidden_states: Tensor, step: Step, given: Mapping[str, Any]
    ) -> tuple[Tensor | None, ...]:
        module = self.modules[layer_idx]
        rows = cast(PooledStep, step).cache.latents.caches[layer_idx]
        step = cast(PooledStep, step).on(rows.data.device)
        w_uk, w_uv = self.absorbed[layer_idx].weights
        x = step.pick(hidden_states)  # [T, hidden]
        q_resid = module.q_a_layernorm(module.q_a_proj(x))
        q = torch.unflatten(module.q_b_proj(q_resid), -1, (module.num_heads, -1))  # [T, H, P]
        norm = module.kv_a_layernorm
        fused_rope_rmsnorm_quant(
            x.new_empty(len(x), 0, self._rope_dim),  # nothing to rotate
            module.kv_a_proj_with_mqa(x),
            self._table(x.device, step.cache.capacity),
            norm.weight,
            rows,
            positions=step.plan.positions,
            slot_mapping=step.plan.slot_mapping,
            eps=norm.variance_epsilon,
        )
        slots = given["prev_topk_indices"]
        if module.indexer is not None:
            slots = self._select(layer_idx, x, q_resid, step)
        elif slots is None:
            raise ValueError("prev_topk_indices must be given to a layer without an indexer")
        q = project_heads(q.bfloat16(), w_uk)  # [T, H, L]
        out = attend_to(step, q, rows, slots, softmax_scale=module.scaling)
        heads = project_heads(out, w_uv).flatten(1)
        out = module.o_proj(heads.to(hidden_states.dtype))
        return step.place(out, hidden_states.shape), None, slots

    def _select(self, layer_idx: int, x: Tensor, q_resid: Tensor, step: PooledStep) -> Tensor:
        """Store the index keys of pools that the step completes; slots ``[T, topk]`` of tokens."""
        indexer, cache = self.modules[layer_idx].indexer, step.cache
        keys, ratio = cache.index_keys.caches[layer_idx], self._pooling.ratio
        table = self._table(x.device, cache.capacity)
        dim = keys.format.head_dim
        # Keys are normalised before they are pooled, and not again.
        pool_windows(
            indexer.k_norm(indexer.wk(x)),
            functional.linear(x, indexer.index_kpool_compress_gate),
            x.new_full((dim,), NO_NORM**0.5, dtype=torch.float32),
            table,
            cache.states.states[layer_idx],
            keys,
            pooling=self._pooling,
            gate_bias=indexer.index_kpool_compress_ape.detach().float(),
            positions=step.plan.positions,
            request_ids=step.plan.request_ids,
            input_row_offsets=step.plan.input_row_offsets,
            ring_ids=step.ring_ids,
            slot_mapping=step.key_slots,
            eps=NO_NORM,
        )
        q, weights = prepare_index_queries(
            torch.unflatten(indexer.wq_b(q_resid), -1, (indexer.n_heads, -1)),
            indexer.weights_proj(x.to(indexer.weights_proj.weight.dtype)),
            table,
            positions=step.plan.positions,
            format=keys.format,
        )
        pools = indexer_topk(
            q,
            weights,
            keys,
            input_row_offsets=step.plan.input_row_offsets,
            seq_lens=step.plan.seq_lens,
            page_table=step.key_table,
            topk=min(indexer.index_topk // ratio, max(cache.capacity // ratio, 1)),
            ratio=ratio,
        )
        if self.records:
            step.selections[layer_idx] = pools
        return to_slots(
            _tokens_of(pools, step.plan.positions, ratio),
            step.plan.page_table,
            step.plan.request_ids,
            page_size=cache.page_size,
        )

    def _table(self, device: torch.device, capacity: int) -> Tensor:
        """Cosines 1 and sines 0 for at least ``capacity`` positions, and for the one behind."""
        table = self._tables.get(device)
        if table is None or len(table) <= capacity:
            table = self._tables[device] = self._new_table(device, capacity + 1)
        return table

    @ordinary_tensors
    def _new_table(self, device: torch.device, num_positions: int) -> Tensor:
        table = cos_sin_table(
            torch.zeros(self._rope_dim // 2, dtype=torch.float32, device=device), num_positions
        )
        torch._dynamo.mark_static_address(table, guard=False)
        return table


def _tokens_of(pools: Tensor, positions: Tensor, ratio: int) -> Tensor:
    """Positions of the tokens of ``pools [T, K]`` and of a token's open pool, the others -1."""
    places = torch.arange(ratio, device=pools.device)
    chosen = torch.where(pools[..., None] >= 0, pools[..., None] * ratio + places, -1)
    own = ((positions + 1) // ratio * ratio)[:, None] + places[:-1]
    own = torch.where(own <= positions[:, None], own, -1)
    return torch.cat([chosen.flatten(1), own], dim=1).int()

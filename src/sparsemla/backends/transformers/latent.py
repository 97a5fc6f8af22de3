"""Attention with a latent row and an index key per token.

It is that of DeepSeek-V3, DeepSeek-V3.2, GLM-5, A.X-K2 and Hunyuan V4.

Shapes: B rows of the batch, S columns of a step, T tokens of a step (the real ones, or B in a
decode step), H heads, P and R query dims without and with RoPE, L latent dims, V value dims, HI and
DI indexer heads and dims.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from sparsemla.backends.transformers.cache import BatchCache, Pages
from sparsemla.backends.transformers.layers import (
    Example,
    Layers,
    check_format,
    index_format_of,
    plan_column,
    plan_columns,
)
from sparsemla.backends.transformers.projections import Absorbed, Projection
from sparsemla.backends.transformers.step import Step
from sparsemla.cache import PagedCache
from sparsemla.formats import CacheFormat, bf16_format
from sparsemla.ops import (
    decode_branch,
    fused_indexer_rope_quant,
    indexer_topk,
    prefill_branch,
    to_slots,
)
from sparsemla.plan import Plan
from sparsemla.weights import MLALayer, absorb_kv_b_proj


class Architecture(NamedTuple):
    """Differences between the attention modules of the model types.

    Args:
        interleaved: RoPE pairs are (2i, 2i+1), not (i, i + R/2); None if the configuration's
            ``rope_interleave`` decides. The other types ignore that field.
        interleaved_indexer: the same of the indexer.
        indexer_rope_first: RoPE rotates the first dims of the indexer's heads, not the last.
        shares_selection: attention returns its selection for the next layers without an indexer.
    """

    interleaved: bool | None = True
    interleaved_indexer: bool = False
    indexer_rope_first: bool = True
    shares_selection: bool = False


ARCHITECTURES = {
    "deepseek_v3": Architecture(interleaved=None),
    "deepseek_v32": Architecture(),
    "axk2": Architecture(),
    "glm_moe_dsa": Architecture(interleaved_indexer=True, shares_selection=True),
    "hy_v4": Architecture(interleaved=False, indexer_rope_first=False, shares_selection=True),
}
"""Keyed by the configuration's ``model_type``. Models without an indexer attend to every token."""


INDEX_FIELDS = ("index_topk", "index_n_heads", "index_head_dim")
"""Fields of configurations with an indexer."""


class LatentCache(BatchCache):
    """Pages of latent rows and of indexer keys: row ``b`` owns ``page_table[b]`` of every layer.

    Args:
        latents: one cache per layer, on the layer's device.
        index_keys: one cache per layer with an indexer, keyed by the layer's index.
        batch_size: B.
        max_length: capacity in columns; None for pages that grow.
    """

    def __init__(
        self,
        latents: Sequence[PagedCache],
        index_keys: Mapping[int, PagedCache],
        batch_size: int,
        max_length: int | None = None,
    ) -> None:
        device = latents[0].data.device
        page_size = latents[0].page_size
        self._latents = Pages(dict(enumerate(latents)), device, page_size=page_size)
        self._index_keys = Pages(index_keys, device, page_size=page_size)
        super().__init__(
            [self._latents, self._index_keys],
            device,
            page_size=page_size,
            batch_size=batch_size,
            max_length=max_length,
        )

    @property
    def latents(self) -> list[PagedCache]:
        """One cache per layer."""
        return list(self._latents.caches.values())

    @property
    def index_keys(self) -> dict[int, PagedCache]:
        """One cache per layer with an indexer, keyed by the layer's index."""
        return self._index_keys.caches

    @property
    def page_table(self) -> Tensor:
        """int32 ``[B, W]`` on the first layer's device; W doubles when the pages are full."""
        return self._latents.table

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        return self._latents.row_bytes + self._index_keys.row_bytes


@dataclass(eq=False, kw_only=True)
class LatentStep(Step):
    """A step with the slots and requests of its tokens.

    Args:
        plan: its positions are rows of the step's RoPE table.
    """

    cache: LatentCache
    plan: Plan
    _rotation: tuple[Tensor, Tensor, Tensor] | None = field(default=None, init=False)

    def rotation(self, embeddings: tuple[Tensor, Tensor], batch_size: int) -> tuple[Tensor, ...]:
        """The model's cos and sin ``[T, R]``, and float32 ``[T, R]``, cos half then sin half."""
        if self._rotation is None:  # all layers of a device share the first layer's
            cos, sin = (self.pick(part.expand(batch_size, -1, -1)) for part in embeddings)
            half = cos.shape[-1] // 2  # transformers' cos and sin hold each angle twice
            table = torch.cat([cos[:, :half], sin[:, :half]], dim=-1).float()
            self._rotation = cos, sin, table
        return self._rotation


class LatentLayers(Layers):
    """Attention in the absorbed form of MLA, over the rows that the indexer selects or over all."""

    def _prepare(
        self, cache_format: CacheFormat | None, index_format: CacheFormat | None
    ) -> tuple[CacheFormat, CacheFormat | None]:
        config: Any = self._base.config
        latent_dim, rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
        index_dim = getattr(config, "index_head_dim", None)  # None without an indexer
        indexers = [getattr(module, "indexer", None) for module in self.modules.values()]
        fields = [name for name in INDEX_FIELDS if getattr(config, name, None) is not None]
        if fields and not any(indexer is not None for indexer in indexers):
            raise ValueError(
                f"model must have an indexer where its configuration has {', '.join(fields)}: "
                f"layers of model_type {config.model_type!r} have none"
            )
        if rope_dim % 2:
            raise ValueError(f"model must have an even qk_rope_head_dim, got {rope_dim}")
        if cache_format is None:
            cache_format = bf16_format(latent_dim + rope_dim, latent_dim)
        check_format("cache_format", cache_format, latent_dim + rope_dim, latent_dim)
        if index_dim is None:
            if index_format is not None:
                raise ValueError("index_format must be None: the model has no indexer")
        else:
            index_format = index_format_of(index_format, index_dim, rope_dim, cache_format)
        self._architecture = ARCHITECTURES[config.model_type]
        interleaved = self._architecture.interleaved
        self._interleaved = bool(config.rope_interleave) if interleaved is None else interleaved
        return cache_format, index_format

    def example(self) -> Example:
        module, config = self.modules[0], self._base.config
        has_sink = getattr(module, "sinks", None) is not None
        if self._formats[1] is None:
            return Example(heads=module.num_heads, width=None, has_sink=has_sink)
        return Example(
            heads=module.num_heads,
            width=config.index_topk,
            has_sink=has_sink,
            index_heads=config.index_n_heads,
            topk=config.index_topk,
        )

    def absorb(self, path: str, module: nn.Module) -> Absorbed:
        return absorbed_kv_b_proj(path, module, self._base)

    def skipped(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        attention = cast(Any, module)
        yield "kv_a_layernorm", attention.kv_a_layernorm
        index_format = self._formats[1]
        if index_format is not None and attention.indexer is not None:
            yield "indexer", attention.indexer
            if index_format.fp8_dim:
                yield "indexer.k_norm", attention.indexer.k_norm

    def new_cache(self, batch_size: int, max_length: int | None = None) -> LatentCache:
        latent_format, index_format = self._formats

        def empty(format: CacheFormat, layer_idx: int) -> PagedCache:
            device = self.absorbed[layer_idx].weights[0].data.device
            return PagedCache.allocate(format, 0, self.page_size, device=device)

        return LatentCache(
            [empty(latent_format, layer_idx) for layer_idx in range(len(self.modules))],
            {
                layer_idx: empty(index_format, layer_idx)
                for layer_idx, attention in self.modules.items()
                if index_format is not None and attention.indexer is not None
            },
            batch_size,
            max_length,
        )

    def packed_step(self, cache: BatchCache, new: Tensor) -> LatentStep:
        cache = cast(LatentCache, cache)
        plan, tokens = plan_columns(cache, new, cache.page_table, cache.page_size)
        # The model's positions may count padding; the step's RoPE table has one row per token.
        positions = torch.arange(plan.num_tokens, device=cache.page_table.device)
        plan = replace(plan, positions=positions)
        return LatentStep(cache=cache, plan=plan, decodes=False, tokens=tokens)

    def decode_step(self, cache: BatchCache, new: Tensor) -> LatentStep:
        cache = cast(LatentCache, cache)
        plan = plan_column(cache, new, cache.page_table, cache.page_size)
        plan = replace(plan, positions=plan.request_ids)  # rows of the step's RoPE table
        return LatentStep(cache=cache, plan=plan, decodes=True, tokens=None)

    def attend(
        self,
        layer_idx: int,
        hidden_states: Tensor,
        step: Step,
        given: Mapping[str, Any],
    ) -> tuple[Tensor | None, ...]:
        out, slots = self._attend_tokens(
            layer_idx,
            hidden_states,
            cast(LatentStep, step),
            given["position_embeddings"],
            given.get("prev_topk_indices"),
        )
        return (out, None, slots) if self._architecture.shares_selection else (out, None)

    def _attend_tokens(
        self,
        layer_idx: int,
        hidden_states: Tensor,
        step: LatentStep,
        position_embeddings: tuple[Tensor, Tensor],
        slots: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Output ``[B, S, hidden]`` of a layer's attention, and the selected slots."""
        attention, cache = self.modules[layer_idx], step.cache.latents[layer_idx]
        step = step.on(cache.data.device)
        x = step.pick(hidden_states)  # [T, hidden]
        *cos_sin, table = step.rotation(position_embeddings, hidden_states.shape[0])  # [T, R]
        q, q_resid, gate = _queries(attention, x)
        if layer_idx in step.cache.index_keys:
            slots = self._select(layer_idx, x, cast(Tensor, q_resid), cos_sin, table, step)
        elif slots is None and step.cache.index_keys:
            raise ValueError("prev_topk_indices must be given to a layer without an indexer")
        kv = attention.kv_a_proj_with_mqa(x)  # [T, L + R]
        norm, sinks = attention.kv_a_layernorm, getattr(attention, "sinks", None)
        w_uk, w_uv = self.absorbed[layer_idx].weights
        layer = MLALayer(
            w_uk,
            w_uv,
            norm.weight,
            table,
            attention.scaling,
            norm_eps=norm.variance_epsilon,
            interleaved=self._interleaved,
            attn_sink=None if sinks is None else sinks.detach().float(),
        )
        if not step.decodes:
            out = prefill_branch(q, kv, cache, layer, step.plan, topk_indices=slots)
        else:  # positions are rows of the RoPE table: a causal mask must not compare them
            causal = slots is not None
            out = decode_branch(q, kv, cache, layer, step.plan, topk_indices=slots, causal=causal)
        if gate is not None:
            out = out * gate.float().sigmoid()
        out = attention.o_proj(out.flatten(1).to(hidden_states.dtype))  # of [T, H, V]
        return step.place(out, hidden_states.shape), slots

    def _select(
        self,
        layer_idx: int,
        x: Tensor,
        q_resid: Tensor,
        cos_sin: Sequence[Tensor],
        table: Tensor,
        step: LatentStep,
    ) -> Tensor:
        """Store the step's indexer keys; the slots int32 ``[T, topk]`` to attend to."""
        indexer, plan = self.modules[layer_idx].indexer, step.plan
        cache = step.cache.index_keys[layer_idx]
        interleaved = self._architecture.interleaved_indexer
        rope_first = self._architecture.indexer_rope_first
        if cache.format.fp8_dim:
            q, weights, k = _project_index(indexer, x, q_resid)
            q, weights = fused_indexer_rope_quant(
                q,
                weights,
                k,
                indexer.k_norm.weight,
                indexer.k_norm.bias,
                table,
                cache,
                positions=plan.positions,
                slot_mapping=plan.slot_mapping,
                eps=indexer.k_norm.eps,
                interleaved=interleaved,
                rope_first=rope_first,
            )
        else:
            # Round where transformers rounds: a bfloat16 model then selects the same tokens.
            q, weights, k = indexed(
                indexer,
                x,
                q_resid,
                cos_sin,
                interleaved=interleaved,
                rope_first=rope_first,
            )
            slots = plan.slot_mapping
            at = slots // cache.page_size, slots % cache.page_size
            cache.data.index_put_(at, k.bfloat16())
            q = q.bfloat16()
        topk_indices = indexer_topk(
            q,
            weights,
            cache,
            input_row_offsets=plan.input_row_offsets,
            seq_lens=plan.seq_lens,
            page_table=plan.page_table,
            topk=min(indexer.index_topk, step.cache.capacity),
        )
        if self.records:
            step.selections[layer_idx] = topk_indices
        return to_slots(topk_indices, plan.page_table, plan.request_ids, page_size=cache.page_size)


def absorbed_kv_b_proj(path: str, attention: nn.Module, model: PreTrainedModel) -> Absorbed:
    """W_UK and W_UV of a layer; FP8 weights keep their codes and scales."""
    module = cast(Any, attention)  # its attributes depend on the architecture
    split = functools.partial(
        absorb_kv_b_proj,
        num_heads=module.num_heads,
        qk_nope_head_dim=module.qk_nope_head_dim,
        v_head_dim=module.v_head_dim,
    )
    return Absorbed(kv_b_proj(path, module), split, model=model)


def kv_b_proj(path: str, attention: nn.Module) -> Projection:
    """The up-projection of keys and values in a layer."""
    module = cast(Any, attention)
    return Projection(
        path,
        module,
        "kv_b_proj",
        in_features=module.kv_lora_rank,
        out_features=module.num_heads * (module.qk_nope_head_dim + module.v_head_dim),
    )


def _project_index(
    indexer: Any,  # noqa: ANN401 - its class depends on the architecture
    x: Tensor,
    q_resid: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[T, HI, DI]``, head weights ``[T, HI]`` and keys ``[T, DI]``, as projected."""
    q = torch.unflatten(indexer.wq_b(q_resid), -1, (indexer.n_heads, -1))
    weights = indexer.weights_proj(x.to(indexer.weights_proj.weight.dtype))
    return q, weights, indexer.wk(x)


def indexed(
    indexer: Any,  # noqa: ANN401 - its class depends on the architecture
    x: Tensor,
    q_resid: Tensor,
    cos_sin: Sequence[Tensor],
    *,
    interleaved: bool,
    rope_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What scores are made of: queries, float32 head weights with every factor, and keys.

    Args:
        indexer: of a layer.
        x, q_resid: ``[T, hidden]`` and the latent queries ``[T, n]``.
        cos_sin: ``[T, R]`` each.
        interleaved, rope_first: see :class:`Architecture`.
    """
    q, weights, k = _project_index(indexer, x, q_resid)
    k = indexer.k_norm(k.to(indexer.k_norm.weight.dtype)).to(x.dtype)
    rotate = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
    q, k = _rotated(rotate, q, k[:, None], *cos_sin, rope_first=rope_first)
    return q, weights.float() * (indexer.n_heads**-0.5 * indexer.softmax_scale), k[:, 0]


def _queries(attention: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Queries ``[T, H, P + R]``, their low-rank input, and gates of the output ``[T, H, V]``."""
    module = cast(Any, attention)
    heads = module.num_heads, -1
    if module.q_lora_rank is None:
        return torch.unflatten(module.q_proj(x), -1, heads).bfloat16(), None, None
    q_a = module.q_a_proj(x)
    q_resid = module.q_a_layernorm(q_a)
    if hasattr(module, "q_gate_proj"):  # A.X-K2
        both = torch.unflatten(module.q_gate_proj(torch.cat([q_resid, q_a], dim=-1)), -1, heads)
        q, gate = both.split([module.qk_head_dim, module.v_head_dim], dim=-1)
    else:
        q = torch.unflatten(module.q_b_proj(q_resid), -1, heads)
        has_gate = hasattr(module, "gate_proj")  # Hunyuan V4
        gate = torch.unflatten(module.gate_proj(x), -1, heads) if has_gate else None
    return q.bfloat16(), q_resid, gate


def _rotated(
    rotate: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    rope_first: bool,
) -> tuple[Tensor, Tensor]:
    """Queries ``[T, HI, DI]`` and keys ``[T, 1, DI]`` with their first or last R dims rotated."""
    rope_dim, rest_dim = cos.shape[-1], q.shape[-1] - cos.shape[-1]
    rope = 0 if rope_first else 1
    dims = [rope_dim, rest_dim] if rope_first else [rest_dim, rope_dim]
    q_parts, k_parts = list(q.split(dims, dim=-1)), list(k.split(dims, dim=-1))
    q_parts[rope], k_parts[rope] = rotate(q_parts[rope], k_parts[rope], cos, sin)
    return torch.cat(q_parts, dim=-1), torch.cat(k_parts, dim=-1)

"""Attention with a latent row per token, and an index key per token where there is an indexer.

One class serves every model whose attention modules have these parts; :data:`ARCHITECTURES` names
them, and :data:`PARTS` the parts.

Shapes: B rows of the batch, S columns of a step, T tokens of a step (the real ones, or B in a
decode step), H heads, P and R query dims without and with RoPE, L latent dims, V value dims, HI and
DI indexer heads and dims, W tokens of a window.
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
    attend_to,
    check_format,
    index_format_of,
    plan_column,
    plan_columns,
)
from sparsemla.backends.transformers.linear import HybridCache
from sparsemla.backends.transformers.projections import Absorbed, Projection
from sparsemla.backends.transformers.step import Step
from sparsemla.cache import PagedCache
from sparsemla.formats import CacheFormat, bf16_format, e4m3_format
from sparsemla.ops import (
    decode_branch,
    fused_indexer_rope_quant,
    fused_rope_rmsnorm_quant,
    indexer_topk,
    prefill_branch,
    project_heads,
    to_slots,
)
from sparsemla.plan import Plan
from sparsemla.weights import MLALayer, absorb_kv_b_proj


class Architecture(NamedTuple):
    """Differences between attention modules that their parts do not tell.

    Args:
        interleaved: RoPE pairs are (2i, 2i+1), not (i, i + R/2); None if the configuration's
            ``rope_interleave`` decides. The other types ignore that field.
        rotates: RoPE rotates R dims of queries and rows; without it they are as projected.
        scales_queries: queries grow with the logarithm of their position, as in Llama 4.
        interleaved_indexer: the same as ``interleaved``, of the indexer.
        indexer_rope_first: RoPE rotates the first dims of the indexer's heads, not the last.
        shares_selection: attention returns its selection for the next layers without an indexer.
    """

    interleaved: bool | None = True
    rotates: bool = True
    scales_queries: bool = False
    interleaved_indexer: bool = False
    indexer_rope_first: bool = True
    shares_selection: bool = False


ARCHITECTURES = {
    "deepseek_v2": Architecture(),
    "deepseek_v3": Architecture(interleaved=None),
    "sarvam_mla": Architecture(interleaved=None),
    "axk1": Architecture(interleaved=None),
    "youtu": Architecture(interleaved=None),
    "glm4_moe_lite": Architecture(interleaved=None),
    "mistral4": Architecture(interleaved=None, scales_queries=True),
    "minicpm3": Architecture(interleaved=False),
    "longcat_flash": Architecture(),
    "kimi_linear": Architecture(rotates=False),
    "bailing_hybrid": Architecture(),
    "deepseek_v32": Architecture(),
    "axk2": Architecture(),
    "glm_moe_dsa": Architecture(interleaved_indexer=True, shares_selection=True),
    "hy_v4": Architecture(interleaved=False, indexer_rope_first=False, shares_selection=True),
    "mistral_large4_text": Architecture(interleaved_indexer=True, shares_selection=True),
    "dots3_note_text": Architecture(interleaved_indexer=True),
}
"""Keyed by the configuration's ``model_type``. Models without an indexer attend to every token."""

PARTS = frozenset(
    {
        "q_proj",
        "q_a_proj",
        "q_a_layernorm",
        "q_b_proj",
        "q_gate_proj",  # A.X-K2: queries and gates of the output
        "softmax_scaling",  # Mistral Large 4: a factor of queries by position
        "kv_a_proj_with_mqa",
        "kv_a_layernorm",
        "k_rope_only_layernorm",  # Dots3Note
        "kv_b_proj",
        "indexer",
        "gate_proj",  # Hunyuan V4: a gate of each value of the output
        "g_proj",  # Ling 3, Dots3Note: a gate of each head
        "sinks",  # Hunyuan V4
        "o_proj",
    }
)
"""Modules and parameters of attention modules that are served; others would be lost."""

INDEX_FIELDS = ("index_topk", "index_n_heads", "index_head_dim")
"""Fields of configurations with an indexer."""


class LatentCache(HybridCache):
    """Pages of latent rows and of indexer keys: row ``b`` owns ``page_table[b]`` of every layer.

    Args:
        latents: one cache per layer with rows of its own, on the layer's device.
        index_keys: one cache per layer with an indexer, keyed by the layer's index.
        batch_size: B.
        max_length: capacity in columns; None for pages that grow.
        linear: see :class:`HybridCache`.
    """

    def __init__(
        self,
        latents: Sequence[PagedCache],
        index_keys: Mapping[int, PagedCache],
        batch_size: int,
        max_length: int | None = None,
        *,
        linear: Sequence[bool] = (),
    ) -> None:
        device = latents[0].data.device
        page_size = latents[0].page_size
        self._latents = Pages(dict(enumerate(latents)), device, page_size=page_size)
        self._index_keys = Pages(index_keys, device, page_size=page_size)
        super().__init__(
            [self._latents, self._index_keys],
            device,
            linear=linear,
            page_size=page_size,
            batch_size=batch_size,
            max_length=max_length,
        )

    @property
    def latents(self) -> list[PagedCache]:
        """One cache per layer with rows of its own, in their order."""
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
        places: int64 ``[T]``, position of each token among the real tokens of its row.
    """

    cache: LatentCache
    plan: Plan
    places: Tensor
    _rotations: dict[bool, tuple[Tensor, ...]] = field(default_factory=dict, init=False)
    _tables: dict[int, Tensor] = field(default_factory=dict, init=False)
    _reading: Plan | None = field(default=None, init=False)
    _windows: dict[int, Tensor] = field(default_factory=dict, init=False)

    def rotation(
        self, embeddings: Tensor | tuple[Tensor, Tensor], batch_size: int, *, slides: bool
    ) -> tuple[Tensor, ...]:
        """The model's cos and sin ``[T, R]``, and float32 ``[T, R]``, cos half then sin half.

        Layers of a device share the first one's, but those with a window have another RoPE.
        """
        if slides not in self._rotations:
            if isinstance(embeddings, Tensor):  # DeepSeek-V2's complex numbers, one for each pair
                parts = torch.view_as_real(embeddings).unbind(-1)
            else:  # each angle twice
                parts = tuple(part[..., : part.shape[-1] // 2] for part in embeddings)
            cos, sin = (self.pick(part.expand(batch_size, -1, -1)) for part in parts)
            table = torch.cat([cos, sin], dim=-1).float()
            self._rotations[slides] = cos.repeat(1, 2), sin.repeat(1, 2), table
        return self._rotations[slides]

    def unrotated(self, rope_dim: int) -> Tensor:
        """A table of R dims that rotates nothing."""
        if rope_dim not in self._tables:
            table = torch.zeros(len(self.places), rope_dim, device=self.places.device)
            table[:, : rope_dim // 2] = 1
            self._tables[rope_dim] = table
        return self._tables[rope_dim]

    def reading(self) -> Plan:
        """The plan of a layer that reads the rows of another one and writes none."""
        if self._reading is None:
            nowhere = torch.full_like(self.plan.slot_mapping, -1)
            self._reading = replace(self.plan, slot_mapping=nowhere)
        return self._reading

    def window(self, width: int) -> Tensor:
        """int32 ``[T, W]``, slots of the latest ``width`` tokens of a row, then -1."""
        if width not in self._windows:
            back = torch.arange(min(width, self.cache.capacity), device=self.places.device)
            seen = self.places[:, None] - back
            self._windows[width] = to_slots(
                seen.clamp_min(-1).int(),
                self.plan.page_table,
                self.plan.request_ids,
                page_size=self.plan.page_size,
            )
        return self._windows[width]


@dataclass(frozen=True, kw_only=True)
class _Rows:
    """The latent rows that a layer attends to.

    Args:
        owner: the layer that writes them: itself, or an earlier one that shares them.
        place: of the owner in :attr:`LatentCache.latents`.
        latent_dim, rope_dim: L and R of a row.
        rotates: RoPE rotates the R dims.
        window: the latest tokens that a layer attends to; None for all, or a selection.
        query_factor, latent_factor: of normalised latents of queries and rows.
    """

    owner: int
    place: int
    latent_dim: int
    rope_dim: int
    rotates: bool
    window: int | None
    query_factor: float
    latent_factor: float


class LatentLayers(Layers):
    """Attention in the absorbed form of MLA, over the rows that the indexer selects or over all."""

    def _prepare(
        self, cache_format: CacheFormat | None, index_format: CacheFormat | None
    ) -> tuple[CacheFormat, CacheFormat | None]:
        config: Any = self._base.config
        latent_dim, rope_dim = self._dims()
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
        for layer_idx, module in self.modules.items():
            _check_parts(self.paths[layer_idx], module)
        self._architecture = ARCHITECTURES[config.model_type]
        if self._architecture.scales_queries:
            _llama4_scaling(config)
        interleaved = self._architecture.interleaved
        self._interleaved = bool(config.rope_interleave) if interleaved is None else interleaved
        if cache_format is None:
            cache_format = bf16_format(latent_dim + rope_dim, latent_dim)
        check_format("cache_format", cache_format, latent_dim + rope_dim, latent_dim)
        if index_dim is None:
            if index_format is not None:
                raise ValueError("index_format must be None: the model has no indexer")
        else:
            index_format = index_format_of(index_format, index_dim, rope_dim, cache_format)
        owners = {layer_idx: self._owner(layer_idx) for layer_idx in self.modules}
        places = {owner: place for place, owner in enumerate(sorted(set(owners.values())))}
        self._rows = {
            layer_idx: _Rows(
                owner=owner,
                place=places[owner],
                latent_dim=self.modules[layer_idx].kv_lora_rank,
                rope_dim=self.modules[layer_idx].qk_rope_head_dim,
                rotates=self._architecture.rotates
                and bool(getattr(self.modules[layer_idx], "use_rope", True)),
                window=getattr(self.modules[layer_idx], "sliding_window", None),
                query_factor=_factor(self.modules[layer_idx], "q_lora_scale", "mla_scale_q_lora"),
                latent_factor=_factor(
                    self.modules[layer_idx], "kv_lora_scale", "mla_scale_kv_lora"
                ),
            )
            for layer_idx, owner in owners.items()
        }
        self._row_formats = {
            owner: _row_format(cache_format, self._rows[owner]) for owner in places
        }
        return cache_format, index_format

    def _dims(self) -> tuple[int, int]:
        """L and R of the rows that ``cache_format`` is for: those that are not of a window."""
        windows = [getattr(module, "sliding_window", None) for module in self.modules.values()]
        dims: Any = self._base.config
        if any(windows):  # the configuration has other dims for layers with a window
            dims = list(self.modules.values())[windows.index(None) if None in windows else 0]
        return dims.kv_lora_rank, dims.qk_rope_head_dim

    def _owner(self, layer_idx: int) -> int:
        """The layer whose rows a layer attends to."""
        module = self.modules[layer_idx]
        if not getattr(module, "is_kv_shared_layer", False):
            return layer_idx
        kind = "with RoPE" if module.use_rope else "without RoPE"
        stores = [
            earlier
            for earlier, other in self.modules.items()
            if earlier < layer_idx
            and other.store_full_length_kv
            and bool(other.use_rope) == bool(module.use_rope)
        ]
        # transformers passes on the latest rows of either kind, whatever the configuration names.
        owner, latest = self._base.config.kv_source_layers[layer_idx], stores[-1:]
        if latest != [owner]:
            raise ValueError(
                f"model must have the latest earlier layer {kind} that shares its rows in "
                f"kv_source_layers[{layer_idx}], {latest[0] if latest else 'and has none'}, "
                f"got {owner}"
            )
        device = next(module.parameters()).device
        others = next(self.modules[owner].parameters()).device
        if device != others:
            raise ValueError(
                f"model must have layers that share rows on one device, got layer {layer_idx} on "
                f"{device} and layer {owner} on {others}"
            )
        return cast(int, owner)

    @property
    def row_names(self) -> list[str]:
        return list(dict.fromkeys(format.name for format in self._row_formats.values()))

    def example(self) -> Example:
        module, config = next(iter(self.modules.values())), self._base.config
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
        if attention.kv_a_layernorm is not None:
            yield "kv_a_layernorm", attention.kv_a_layernorm
        index_format = self._formats[1]
        if index_format is not None and attention.indexer is not None:
            yield "indexer", attention.indexer
            if index_format.fp8_dim:
                yield "indexer.k_norm", attention.indexer.k_norm

    def new_cache(self, batch_size: int, max_length: int | None = None) -> LatentCache:
        index_format = self._formats[1]

        def empty(format: CacheFormat, layer_idx: int) -> PagedCache:
            device = self.absorbed[layer_idx].weights[0].data.device
            return PagedCache.allocate(format, 0, self.page_size, device=device)

        return LatentCache(
            [empty(format, owner) for owner, format in self._row_formats.items()],
            {
                layer_idx: empty(index_format, layer_idx)
                for layer_idx, attention in self.modules.items()
                if index_format is not None and attention.indexer is not None
            },
            batch_size,
            max_length,
            linear=self.linear,
        )

    def packed_step(self, cache: BatchCache, new: Tensor) -> LatentStep:
        cache = cast(LatentCache, cache)
        plan, tokens = plan_columns(cache, new, cache.page_table, cache.page_size)
        # The model's positions may count padding; the step's RoPE table has one row per token.
        positions = torch.arange(plan.num_tokens, device=cache.page_table.device)
        return LatentStep(
            cache=cache,
            plan=replace(plan, positions=positions),
            places=plan.positions.long(),
            decodes=False,
            tokens=tokens,
        )

    def decode_step(self, cache: BatchCache, new: Tensor) -> LatentStep:
        cache = cast(LatentCache, cache)
        plan = plan_column(cache, new, cache.page_table, cache.page_size)
        return LatentStep(
            cache=cache,
            plan=replace(plan, positions=plan.request_ids),  # rows of the step's RoPE table
            places=plan.positions,
            decodes=True,
            tokens=None,
        )

    def attend(
        self,
        layer_idx: int,
        hidden_states: Tensor,
        step: Step,
        given: Mapping[str, Any],
    ) -> tuple[Tensor | None, ...]:
        out, slots = self._attend_tokens(layer_idx, hidden_states, cast(LatentStep, step), given)
        return (out, None, slots) if self._architecture.shares_selection else (out, None)

    def _attend_tokens(
        self, layer_idx: int, hidden_states: Tensor, step: LatentStep, given: Mapping[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """Output ``[B, S, hidden]`` of a layer's attention, and the selected slots."""
        attention, own = self.modules[layer_idx], self._rows[layer_idx]
        cache = step.cache.latents[own.place]
        step = step.on(cache.data.device)
        x = step.pick(hidden_states)  # [T, hidden]
        position_ids = None
        if self._architecture.scales_queries or "softmax_scaling" in attention._modules:
            columns = given["position_ids"].expand(hidden_states.shape[:2])
            position_ids = step.pick(columns[..., None])[:, 0]
        rotation = None
        if own.rotates:
            rotation = step.rotation(
                given["position_embeddings"],
                hidden_states.shape[0],
                slides=own.window is not None,
            )  # [T, R] each
        q, q_resid, gate = self._queries(attention, x, position_ids, own.query_factor)
        slots = None
        if layer_idx in step.cache.index_keys:
            slots = self._select(layer_idx, x, q_resid, rotation, position_ids, step)
        elif own.window is not None:
            slots = step.window(own.window)
        elif step.cache.index_keys:
            slots = given.get("prev_topk_indices")
            if slots is None:
                raise ValueError("prev_topk_indices must be given to a layer without an indexer")
        writes = own.owner == layer_idx
        plan = step.plan if writes else step.reading()
        kv = self._kv(attention, x) if writes else x.new_zeros(len(x), cache.format.head_dim)
        norm = self.modules[own.owner].kv_a_layernorm
        weight = norm.weight if own.latent_factor == 1 else norm.weight * own.latent_factor
        w_uk, w_uv = self.absorbed[layer_idx].weights
        if not own.rope_dim:  # a branch would rotate dims
            rope_dim = self._base.config.qk_rope_head_dim  # of a table that rotates nothing
            if writes:
                fused_rope_rmsnorm_quant(
                    x.new_empty(len(x), 0, rope_dim),
                    kv,
                    step.unrotated(rope_dim),
                    weight,
                    cache,
                    positions=plan.positions,
                    slot_mapping=plan.slot_mapping,
                    eps=norm.variance_epsilon,
                )
            q = project_heads(q, w_uk)  # [T, H, L]
            out = attend_to(step, q, cache, cast(Tensor, slots), softmax_scale=attention.scaling)
            out = project_heads(out, w_uv)
        else:
            sinks = attention._parameters.get("sinks")
            layer = MLALayer(
                w_uk,
                w_uv,
                weight,
                step.unrotated(own.rope_dim) if rotation is None else rotation[-1],
                attention.scaling,
                norm_eps=norm.variance_epsilon,
                interleaved=self._interleaved,
                attn_sink=None if sinks is None else sinks.detach().float(),
            )
            if not step.decodes:
                out = prefill_branch(q, kv, cache, layer, plan, topk_indices=slots)
            else:  # positions are rows of the RoPE table: a causal mask must not compare them
                causal = slots is not None
                out = decode_branch(q, kv, cache, layer, plan, topk_indices=slots, causal=causal)
        if gate is not None:
            out = out * gate.float().sigmoid()
        out = attention.o_proj(out.flatten(1).to(hidden_states.dtype))  # of [T, H, V]
        return step.place(out, hidden_states.shape), slots

    def _queries(
        self,
        attention: Any,  # noqa: ANN401 - its class depends on the architecture
        x: Tensor,
        position_ids: Tensor | None,
        factor: float,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Queries ``[T, H, P + R]``, their low-rank input, and gates ``[T, H, V]``, ``[T, H, 1]``.

        Args:
            attention: the module.
            x: ``[T, hidden]``.
            position_ids: ``[T]``, the model's, for queries that are scaled by position.
            factor: of the low-rank input.
        """
        # A look for an attribute that a module does not have costs microseconds.
        heads, parts = (attention.num_heads, -1), attention._modules
        q_resid = gate = None
        if parts.get("q_proj") is not None:
            q = torch.unflatten(attention.q_proj(x), -1, heads)
        else:
            q_a = attention.q_a_proj(x)
            q_resid = attention.q_a_layernorm(q_a)
            if factor != 1:
                q_resid = q_resid * factor
            if "q_gate_proj" in parts:
                both = attention.q_gate_proj(torch.cat([q_resid, q_a], dim=-1))
                dims = [attention.qk_head_dim, attention.v_head_dim]
                q, gate = torch.unflatten(both, -1, heads).split(dims, dim=-1)
            else:
                q = torch.unflatten(attention.q_b_proj(q_resid), -1, heads)
        if "gate_proj" in parts:
            gate = torch.unflatten(attention.gate_proj(x), -1, heads)
        elif "g_proj" in parts:
            gate = attention.g_proj(x)[..., None]
        if "softmax_scaling" in parts:
            q = _scaled(attention, q, position_ids)
        elif self._architecture.scales_queries:
            beta, context = _llama4_scaling(self._base.config)
            scale = 1 + beta * torch.log(1 + torch.floor(cast(Tensor, position_ids) / context))
            q = q * scale[:, None, None].to(q.dtype)
        return q.bfloat16(), q_resid, gate

    def _kv(self, attention: Any, x: Tensor) -> Tensor:  # noqa: ANN401 - see _queries
        """Rows ``[T, L + R]`` before norm and RoPE."""
        kv = attention.kv_a_proj_with_mqa(x)
        if "k_rope_only_layernorm" not in attention._modules:
            return cast(Tensor, kv)
        latent, rope = kv.split([attention.kv_lora_rank, attention.qk_rope_head_dim], dim=-1)
        return torch.cat([latent, attention.k_rope_only_layernorm(rope)], dim=-1)

    def _select(
        self,
        layer_idx: int,
        x: Tensor,
        q_resid: Tensor | None,
        rotation: Sequence[Tensor] | None,
        position_ids: Tensor | None,
        step: LatentStep,
    ) -> Tensor:
        """Store the step's indexer keys; the slots int32 ``[T, topk]`` to attend to."""
        indexer, plan = self.modules[layer_idx].indexer, step.plan
        cache = step.cache.index_keys[layer_idx]
        interleaved = self._architecture.interleaved_indexer
        rope_first = self._architecture.indexer_rope_first
        if cache.format.fp8_dim:
            q, weights, k = _project_index(indexer, x, q_resid, position_ids)
            q, weights = fused_indexer_rope_quant(
                q,
                weights,
                k,
                indexer.k_norm.weight,
                indexer.k_norm.bias,
                step.unrotated(self._base.config.qk_rope_head_dim)
                if rotation is None
                else rotation[-1],
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
                None if rotation is None else rotation[:2],
                position_ids=position_ids,
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


def _check_parts(path: str, attention: nn.Module) -> None:
    """Refuse an attention module with a part that nothing here reads."""
    own = [name for name, part in attention._parameters.items() if part is not None]
    names = [*own, *(name for name, _ in attention.named_children())]
    unknown = [name for name in names if name not in PARTS]
    if unknown:
        raise ValueError(
            f"model must have attention of the parts {', '.join(sorted(PARTS))}, got "
            f"{', '.join(unknown)} in {path}, which attention here would leave out"
        )


def _factor(attention: nn.Module, *names: str) -> float:
    """The first of a module's numbers that it has; 1 without one."""
    return next((getattr(attention, name) for name in names if hasattr(attention, name)), 1.0)


def _llama4_scaling(config: Any) -> tuple[float, float]:  # noqa: ANN401 - of any model
    """The factor of the logarithm, and the tokens at which it begins to grow."""
    names = "llama_4_scaling_beta", "original_max_position_embeddings"
    beta, context = ((config.rope_parameters or {}).get(name) for name in names)
    if beta is None or context is None:
        raise ValueError(
            f"model must have {' and '.join(names)} in rope_parameters, got {beta} and {context}"
        )
    return beta, context


def _row_format(format: CacheFormat, rows: _Rows) -> CacheFormat:
    """The format of a layer's rows, whose dims may differ from those of the configuration."""
    dims = rows.latent_dim + rows.rope_dim, rows.latent_dim
    if dims == (format.head_dim, format.value_dim):
        return format
    if format.fp8_dim and not rows.rope_dim:
        return e4m3_format(*dims, min(128, rows.latent_dim))
    return bf16_format(*dims)


def _scaled(
    module: Any,  # noqa: ANN401 - attention or an indexer
    q: Tensor,
    position_ids: Tensor | None,
) -> Tensor:
    """Queries ``[T, H, n]`` times Mistral Large 4's factor of each head and position."""
    positions = cast(Tensor, position_ids)[None]
    return cast(Tensor, module.softmax_scaling(q[None], positions, head_dim_first=False))[0]


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
    q_resid: Tensor | None,
    position_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries ``[T, HI, DI]``, head weights ``[T, HI]`` and keys ``[T, DI]``, as projected."""
    # Mistral Large 4 has no low-rank queries.
    source = indexer.q_input_norm(x) if "q_input_norm" in indexer._modules else q_resid
    q = torch.unflatten(indexer.wq_b(source), -1, (indexer.n_heads, -1))
    if "softmax_scaling" in indexer._modules:
        q = _scaled(indexer, q, position_ids)
    weights = indexer.weights_proj(x.to(indexer.weights_proj.weight.dtype))
    return q, weights, indexer.wk(x)


def indexed(
    indexer: Any,  # noqa: ANN401 - its class depends on the architecture
    x: Tensor,
    q_resid: Tensor | None,
    cos_sin: Sequence[Tensor] | None,
    *,
    position_ids: Tensor | None = None,
    interleaved: bool,
    rope_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """What scores are made of: queries, float32 head weights with every factor, and keys.

    Args:
        indexer: of a layer.
        x, q_resid: ``[T, hidden]`` and the latent queries ``[T, n]``.
        cos_sin: ``[T, R]`` each; None without RoPE.
        position_ids: ``[T]``, for queries that are scaled by position.
        interleaved, rope_first: see :class:`Architecture`.
    """
    q, weights, k = _project_index(indexer, x, q_resid, position_ids)
    k = indexer.k_norm(k.to(indexer.k_norm.weight.dtype)).to(x.dtype)[:, None]
    if cos_sin is not None:
        rotate = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
        q, k = _rotated(rotate, q, k, *cos_sin, rope_first=rope_first)
    return q, weights.float() * (indexer.n_heads**-0.5 * indexer.softmax_scale), k[:, 0]


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

"""The attention of DeepSeek-V3, DeepSeek-V3.2 and GLM-5 models, and the handle of a model.

Shapes: B rows of the batch, S columns of a step, T tokens of a step (the real ones, or B in a
decode step), H heads, P and R query dims without and with RoPE, L latent dims, HI and DI indexer
heads and dims.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
)

from sparsemla.backends.transformers.cache import LatentCache
from sparsemla.backends.transformers.step import (
    Step,
    check_input,
    check_positions,
    decode_step,
    mask_for_generate,
    packed_step,
    prepare_step,
    split_mask,
)
from sparsemla.cache import PagedCache
from sparsemla.formats import INDEX_FP8, CacheFormat, bf16_format, e4m3_format
from sparsemla.kinds import check_integer
from sparsemla.ops import (
    decode_branch,
    fused_indexer_rope_quant,
    indexer_topk,
    prefill_branch,
    to_slots,
)
from sparsemla.weights import HeadWeight, MLALayer, absorb_kv_b_proj


class Architecture(NamedTuple):
    """Differences between the attention modules of the model types.

    Args:
        interleaved_indexer: the indexer's RoPE pairs are (2i, 2i+1), not (i, i + R/2).
        shares_selection: attention returns its selection for the next layers without an indexer.
    """

    interleaved_indexer: bool = False
    shares_selection: bool = False


ARCHITECTURES = {
    "deepseek_v3": Architecture(),
    "deepseek_v32": Architecture(),
    "glm_moe_dsa": Architecture(interleaved_indexer=True, shares_selection=True),
}
"""Keyed by the configuration's ``model_type``. Models without an indexer attend to every token."""

NOT_SERVED = {
    "deepseek_v4": "most of its keys are pools of 4 or 128 tokens, and no op here makes a pool or "
    "keeps tokens until the next pool is full",
}
"""Related model types that are refused, with the reason."""


def refuse(model_type: object) -> str | None:
    """Why models of this type are refused; None if they are supported."""
    if isinstance(model_type, str) and model_type in ARCHITECTURES:
        return None
    reason = NOT_SERVED.get(str(model_type))
    expected = f"model must have a model_type of {' or '.join(ARCHITECTURES)}, got {model_type!r}"
    return f"{expected}: {reason}" if reason else expected


class _ForwardOnly(torch.autograd.Function):
    """Ties attention's output to the graph of its input, so that backward raises an error."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden_states: Tensor, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> NoReturn:
        raise NotImplementedError("sparsemla's attention has no backward pass")


class PagedAttention:
    """The handle of an enabled model: it disables the attention and exposes cache and selections.

    A context manager that disables on exit.

    Attributes:
        cache: the cache of the latest forward that kept one.
        selections: if recorded, one dict per forward: for each layer with an indexer int32
            ``[T, topk]``, ascending positions among the row's real tokens, then -1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache_format: CacheFormat,
        index_format: CacheFormat | None,
        page_size: int,
        record_selections: bool,
    ) -> None:
        self.cache: LatentCache | None = None
        self.selections: list[dict[int, Tensor]] = []
        base = cast(PreTrainedModel, model.base_model)
        self._base = base
        self._architecture = ARCHITECTURES[base.config.model_type]
        # The other types always interleave, even if a checkpoint's configuration says otherwise.
        is_v3 = base.config.model_type == "deepseek_v3"
        self._interleaved = bool(cast(Any, base).config.rope_interleave) if is_v3 else True
        self._formats = cache_format, index_format
        self._page_size = page_size
        self._records = record_selections
        self._attentions = [layer.self_attn for layer in cast(Any, base).layers]
        self._weights = [_absorb(attention) for attention in self._attentions]
        self._layer_formats = self.new_cache(0).formats
        self._replaced_caches: weakref.WeakSet[Cache] = weakref.WeakSet()
        # Instance attributes hide the class's methods; disable() restores earlier ones.
        places = [(module, "forward") for module in (base, *self._attentions)]
        generates: Any = model if isinstance(model, GenerationMixin) else None
        if generates is not None:
            places.append((generates, "prepare_inputs_for_generation"))
            places.append((generates, "create_masks_for_generate"))
        self._before = [(module, name, vars(module).get(name)) for module, name in places]
        self._base_forward = base.forward
        base.forward = self._forward
        if generates is not None:
            prepare = generates.prepare_inputs_for_generation
            step = functools.partial(prepare_step, prepare)
            # Keep the wrapped signature, which generate() reads.
            generates.prepare_inputs_for_generation = functools.update_wrapper(step, prepare)
            generates.create_masks_for_generate = mask_for_generate
        for layer_idx, attention in enumerate(self._attentions):
            attention.forward = functools.partial(self._attend, layer_idx)

    def __enter__(self) -> PagedAttention:
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()

    def disable(self) -> None:
        """Restore transformers' own attention; a second call does nothing."""
        for module, name, value in self._before:
            delattr(module, name)
            if value is not None:
                setattr(module, name, value)
        self._before = []

    def new_cache(self, batch_size: int, max_length: int | None = None) -> LatentCache:
        """An empty cache for the model, for ``past_key_values``.

        Args:
            batch_size: rows of the batch.
            max_length: fixed capacity in columns, which compiled decode steps need; a step that
                finds the pages full raises an index error. None for pages that grow.

        Raises:
            TypeError: batch_size or max_length is not an integer.
            ValueError: batch_size is negative, or max_length below 1.
        """
        check_integer("batch_size", batch_size)
        if max_length is not None:
            check_integer("max_length", max_length, 1)
        latent_format, index_format = self._formats

        def empty(format: CacheFormat, layer_idx: int) -> PagedCache:
            device = self._weights[layer_idx][0].data.device
            return PagedCache.allocate(format, 0, self._page_size, device=device)

        return LatentCache(
            [empty(latent_format, layer_idx) for layer_idx in range(len(self._attentions))],
            {
                layer_idx: empty(index_format, layer_idx)
                for layer_idx, attention in enumerate(self._attentions)
                if index_format is not None and attention.indexer is not None
            },
            batch_size,
            max_length,
        )

    def _forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: object,
    ) -> object:
        """The model's forward; attention modules receive a :class:`Step`."""
        config: Any = self._base.config
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ValueError("input_ids or inputs_embeds must be given, got neither")
        if input_ids is not None and inputs_embeds is not None:
            raise ValueError("input_ids or inputs_embeds must be given, got both")
        check_input("inputs_embeds" if input_ids is None else "input_ids", given)
        if kwargs.get("output_attentions", config.output_attentions):
            raise ValueError("output_attentions must be False: no attention matrix exists here")
        if self._base.training and torch.is_grad_enabled():
            raise ValueError("model must be in eval mode or under torch.no_grad(), got training")
        cache = self._resolve(past_key_values, given.shape[0])
        past, new = split_mask(attention_mask, cache, given.shape[1])
        decodes = given.shape[1] == 1
        if not decodes:
            seen = cache.lengths if past is None else past.sum(1)
            check_positions(position_ids, seen, new)
        if isinstance(cache.columns, int) or not decodes:
            cache.reserve(int(cache.columns) + given.shape[1])
        if past is not None:
            cache.hide(past)
        step = decode_step(cache, new) if decodes else packed_step(cache, new)
        use_cache = config.use_cache if use_cache is None else use_cache
        keeps = use_cache or past_key_values is not None
        output = self._base_forward(
            input_ids=input_ids,
            # transformers passes on a mask with four dimensions and builds none.
            attention_mask=torch.empty(0, 0, 0, 0),
            position_ids=position_ids,
            past_key_values=cache if keeps else None,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            sparsemla_step=step,
            **kwargs,
        )
        cache.advance(new)
        if keeps:
            self.cache = cache
        if self._records:
            self.selections.append(step.selections)
        return output

    def _resolve(self, past: Cache | None, batch_size: int) -> LatentCache:
        """The caller's LatentCache; a new one instead of None or of an empty cache."""
        if past is None:
            return self.new_cache(batch_size)
        if not isinstance(past, Cache):
            raise TypeError(f"past_key_values must be None or a Cache, got {type(past).__name__}")
        if not isinstance(past, LatentCache):
            # generate() passes an empty cache and continues with the one in the model's output.
            if past.get_seq_length() or past in self._replaced_caches:
                raise ValueError(
                    "past_key_values must be None or the cache in the output of the step before, "
                    f"got a {type(past).__name__}"
                )
            self._replaced_caches.add(past)
            length = past.get_max_length() if past.is_compileable else None
            return self.new_cache(batch_size, length)
        if past.formats != self._layer_formats:
            raise ValueError(
                f"past_key_values must hold layers of the formats {self._layer_formats}, "
                f"got {past.formats}"
            )
        if past.batch_size != batch_size:
            raise ValueError(
                f"past_key_values must hold {batch_size} rows, as the batch, got {past.batch_size}"
            )
        return past

    @torch.no_grad()
    def _attend_tokens(
        self,
        layer_idx: int,
        hidden_states: Tensor,
        step: Step,
        position_embeddings: tuple[Tensor, Tensor],
        slots: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Output ``[B, S, hidden]`` of a layer's attention, and the selected slots."""
        attention, cache = self._attentions[layer_idx], step.cache.latents[layer_idx]
        step = step.on(cache.data.device)
        x = step.pick(hidden_states)  # [T, hidden]
        *cos_sin, table = step.rotation(position_embeddings, hidden_states.shape[0])  # [T, R]
        if attention.q_lora_rank is None:
            q = attention.q_proj(x)
        else:
            q_resid = attention.q_a_layernorm(attention.q_a_proj(x))
            q = attention.q_b_proj(q_resid)
        q = q.unflatten(-1, (attention.num_heads, -1)).bfloat16()  # [T, H, P + R]
        if layer_idx in step.cache.index_keys:
            slots = self._select(layer_idx, x, q_resid, cos_sin, table, step)
        elif slots is None and step.cache.index_keys:
            raise ValueError("prev_topk_indices must be given to a layer without an indexer")
        kv = attention.kv_a_proj_with_mqa(x)  # [T, L + R]
        norm = attention.kv_a_layernorm
        layer = MLALayer(
            *self._weights[layer_idx],
            norm.weight,
            table,
            attention.scaling,
            norm_eps=norm.variance_epsilon,
            interleaved=self._interleaved,
        )
        if not step.decodes:
            out = prefill_branch(q, kv, cache, layer, step.plan, topk_indices=slots)
        else:  # positions are rows of the RoPE table: a causal mask must not compare them
            causal = slots is not None
            out = decode_branch(q, kv, cache, layer, step.plan, topk_indices=slots, causal=causal)
        out = attention.o_proj(out.flatten(1).to(hidden_states.dtype))  # of [T, H, V]
        return step.place(out, hidden_states.shape), slots

    def _select(
        self,
        layer_idx: int,
        x: Tensor,
        q_resid: Tensor,
        cos_sin: Sequence[Tensor],
        table: Tensor,
        step: Step,
    ) -> Tensor:
        """Store the step's indexer keys; the slots int32 ``[T, topk]`` to attend to."""
        indexer, plan = self._attentions[layer_idx].indexer, step.plan
        cache = step.cache.index_keys[layer_idx]
        interleaved = self._architecture.interleaved_indexer
        k = indexer.wk(x)  # [T, DI]
        q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, -1))  # [T, HI, DI]
        weights = indexer.weights_proj(x.to(indexer.weights_proj.weight.dtype))  # [T, HI]
        if cache.format.fp8_dim:
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
            )
        else:
            # Round where transformers rounds: a bfloat16 model then selects the same tokens.
            rotate = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
            q, k = _rotated(rotate, q, indexer.k_norm(k)[:, None], *cos_sin)
            slots = plan.slot_mapping
            at = slots // cache.page_size, slots % cache.page_size
            cache.data.index_put_(at, k[:, 0].bfloat16())
            q = q.bfloat16()
            weights = weights.float() * (indexer.n_heads**-0.5 * indexer.softmax_scale)
        topk_indices = indexer_topk(
            q,
            weights,
            cache,
            input_row_offsets=plan.input_row_offsets,
            seq_lens=plan.seq_lens,
            page_table=plan.page_table,
            topk=min(indexer.index_topk, step.cache.capacity),
        )
        if self._records:
            step.selections[layer_idx] = topk_indices
        return to_slots(topk_indices, plan.page_table, plan.request_ids, page_size=cache.page_size)

    def _attend(
        self,
        layer_idx: int,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        sparsemla_step: Step,
        prev_topk_indices: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor | None, ...]:
        """The forward of an attention module; the step holds the cache and the positions."""
        out, slots = self._attend_tokens(
            layer_idx, hidden_states, sparsemla_step, position_embeddings, prev_topk_indices
        )
        if torch.is_grad_enabled():
            out = _ForwardOnly.apply(hidden_states, out)
        return (out, None, slots) if self._architecture.shares_selection else (out, None)


def enable(
    model: PreTrainedModel,
    *,
    cache_format: CacheFormat | None = None,
    index_format: CacheFormat | None = None,
    page_size: int = 64,
    record_selections: bool = False,
) -> PagedAttention:
    """Plug this package's attention into a DeepSeek-V3, DeepSeek-V3.2 or GLM-5 model.

    The model is changed in place until :meth:`PagedAttention.disable`. Every use of its forward
    works as before: ``generate`` (greedy, sampling, beams, a static cache), batches with padding on
    either side, ``use_cache=False``, a second call that continues on ``past_key_values``. The
    attention output of padding is finite and meaningless.

    The up-projections of keys and values are copied, as bfloat16 or as FP8 codes with their scales:
    call ``enable`` again after a change to those weights. Attention always runs in bfloat16.

    The layers may be on several devices, as ``from_pretrained(device_map=...)`` puts them: each
    layer's pages are on the device of its weights, and a step's plan is copied once per device.

    Args:
        model: with or without its language model head; ``generate`` over a static cache needs
            the model with the head.
        cache_format: format of the latent rows; ``head_dim`` is L + R, ``value_dim`` is L. Default
            bfloat16.
        index_format: format of the indexer keys; default e4m3 with a scale per row with an FP8
            ``cache_format``, else bfloat16.
        page_size: tokens of a page.
        record_selections: record each step's selection in :attr:`PagedAttention.selections`.

    Returns:
        The handle; its method ``disable`` restores the model.

    Raises:
        TypeError: a model or format of another kind.
        ValueError: another architecture, a model that is enabled already, a layer with its
            attention offloaded or on several devices, or a format or head size that does not fit.
            The model's forward raises ValueError for 4D masks, packed sequences, caches of another
            kind, ``output_attentions`` and training.

    Source: transformers 5.17 and 5.23, ``models/deepseek_v3``, ``deepseek_v32`` and
    ``glm_moe_dsa``.
    """
    if not isinstance(model, PreTrainedModel):
        raise TypeError(f"model must be a PreTrainedModel, got {type(model).__name__}")
    base = cast(PreTrainedModel, model.base_model)
    config: Any = base.config
    if reason := refuse(config.model_type):
        raise ValueError(reason)
    if isinstance(getattr(vars(base).get("forward"), "__self__", None), PagedAttention):
        raise ValueError("model must not be enabled already: disable its handle first")
    for layer_idx, layer in enumerate(cast(Any, base).layers):
        _check_device(layer_idx, layer.self_attn)
    latent_dim, rope_dim = config.kv_lora_rank, config.qk_rope_head_dim
    index_dim = getattr(config, "index_head_dim", None)  # None without an indexer
    if rope_dim % 2:
        raise ValueError(f"model must have an even qk_rope_head_dim, got {rope_dim}")
    if cache_format is None:
        cache_format = bf16_format(latent_dim + rope_dim, latent_dim)
    _check_format("cache_format", cache_format, latent_dim + rope_dim, latent_dim)
    if index_dim is None:
        if index_format is not None:
            raise ValueError("index_format must be None: the model has no indexer")
    else:
        if index_dim < rope_dim:
            raise ValueError(
                f"model must have an index_head_dim of at least {rope_dim}, its "
                f"qk_rope_head_dim, got {index_dim}"
            )
        if index_format is None:
            index_format = _default_index_format(index_dim, fp8=cache_format.fp8_dim > 0)
        _check_format("index_format", index_format, index_dim, index_dim)
        if index_format.num_scales > 1 or 0 < index_format.fp8_dim < index_dim:
            raise ValueError(
                "index_format must have one dtype and at most one scale a row, "
                f"got {index_format.name}"
            )
    check_integer("page_size", page_size, 1)
    return PagedAttention(model, cache_format, index_format, page_size, record_selections)


def _check_device(layer_idx: int, attention: nn.Module) -> None:
    """Refuse a layer if its attention is offloaded or on several devices."""
    devices = sorted({str(parameter.device) for parameter in attention.parameters()})
    if len(devices) > 1:
        raise ValueError(
            "model must have the attention of each layer on one device, got "
            f"{', '.join(devices)} in layer {layer_idx}"
        )
    if devices == ["meta"]:
        raise ValueError(
            "model must have its attention weights in memory, got layer "
            f"{layer_idx} on meta: device_map must not offload layers to the CPU or to disk"
        )


def _check_format(name: str, format: object, head_dim: int, value_dim: int) -> None:
    if not isinstance(format, CacheFormat):
        raise TypeError(f"{name} must be a CacheFormat, got {type(format).__name__}")
    if (format.head_dim, format.value_dim) != (head_dim, value_dim):
        raise ValueError(
            f"{name} must have head_dim {head_dim} and value_dim {value_dim} for this model, "
            f"got {format.name}"
        )


def _default_index_format(dim: int, *, fp8: bool) -> CacheFormat:
    if not fp8:
        return bf16_format(dim)
    return INDEX_FP8 if dim == INDEX_FP8.head_dim else e4m3_format(dim, dim, dim)


def _absorb(attention: nn.Module) -> tuple[HeadWeight, HeadWeight]:
    """W_UK and W_UV of a layer; FP8 weights keep their codes and scales."""
    module = cast(Any, attention)  # its attributes depend on the architecture
    projection = module.kv_b_proj
    scale = getattr(projection, "weight_scale_inv", None)
    block = getattr(projection, "block_size", None) or (128, 128)
    return absorb_kv_b_proj(
        projection.weight.detach(),
        None if scale is None else scale.detach(),
        num_heads=module.num_heads,
        qk_nope_head_dim=module.qk_nope_head_dim,
        v_head_dim=module.v_head_dim,
        block=block[0],
    )


def _rotated(
    rotate: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries ``[T, HI, DI]`` and keys ``[T, 1, DI]`` with their first R dims rotated."""
    dims = [cos.shape[-1], q.shape[-1] - cos.shape[-1]]
    (q_rope, q_rest), (k_rope, k_rest) = q.split(dims, dim=-1), k.split(dims, dim=-1)
    q_rope, k_rope = rotate(q_rope, k_rope, cos, sin)
    return torch.cat([q_rope, q_rest], dim=-1), torch.cat([k_rope, k_rest], dim=-1)

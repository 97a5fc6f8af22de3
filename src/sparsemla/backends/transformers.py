"""This package's attention inside models of Hugging Face transformers, 5.17 to 5.23.

:func:`enable` replaces the attention of a DeepSeek-V3, DeepSeek-V3.2 or GLM-5 model and the cache
that the model keeps between steps: paged latent caches and the ops of this package take their
place. Weights, ``generate`` and all other layers stay as they are in transformers.
transformers expands keys and values for each head and masks a ``[tokens, context]`` score matrix;
this backend stores one latent row per token and attends to the selected rows only.

A forward with several new columns is planned on the host and packs the real tokens of the batch. A
forward with a single new column is a decode step: it reads no value on the host, and its shapes
depend on the cache's capacity only, so ``torch.compile`` and CUDA graphs can capture it.

Shapes: B rows of the batch, S columns of a step, T tokens of a step (the real ones, or B in a
decode step), H heads, P and R query dims without and with RoPE, L latent dims, HI and DI indexer
heads and dims.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers import Cache, GenerationMixin, PreTrainedModel
from transformers.models.deepseek_v32.modeling_deepseek_v32 import (
    apply_rotary_pos_emb,
    apply_rotary_pos_emb_interleave,
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
from sparsemla.plan import Plan, plan_batch
from sparsemla.weights import HeadWeight, MLALayer, absorb_kv_b_proj

Result = TypeVar("Result")


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


def _ordinary_tensors(method: Callable[..., Result]) -> Callable[..., Result]:
    """Run a method outside of inference mode: later calls write the tensors that it allocates."""

    @functools.wraps(method)
    def run(*args: object, **kwargs: object) -> Result:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run


class LatentCache(Cache):
    """The model's cache between steps: pages of latent rows and of indexer keys.

    Row ``b`` of the batch owns the pages ``page_table[b]`` of every layer. Padding takes no slot:
    the n-th real token of a row is at position n of the row's slots, independent of its column.

    Args:
        latents: one cache per layer, on the layer's device.
        index_keys: one cache per layer with an indexer, keyed by the layer's index.
        batch_size: B.
        max_length: capacity in columns. All pages are allocated now, and their addresses never
            change. None for pages that grow.

    Attributes:
        page_table: int32 ``[B, W]`` on the first layer's device, as the other attributes; W doubles
            when the pages are full.
        real: bool ``[B, W * page_size]``, True for columns that are not padding.
        lengths: int32 ``[B]``, real columns of each row.
        rows: int32 ``[B + 1]``, 0 to B.
        columns: number of columns so far, padding included: an int, or with ``max_length`` an int64
            tensor, so that compiled code does not depend on its value.
    """

    @_ordinary_tensors
    def __init__(
        self,
        latents: Sequence[PagedCache],
        index_keys: Mapping[int, PagedCache],
        batch_size: int,
        max_length: int | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.latents = list(latents)
        self.index_keys = dict(index_keys)
        self.max_length = max_length
        self._clear(batch_size)
        self.columns: int | Tensor = 0
        if max_length is not None:
            self.reserve(max_length)
            self.columns = self.lengths.new_zeros((), dtype=torch.int64)
            for tensor in self._tensors():
                # Otherwise the CUDA graphs of compiled code copy the cache in and out.
                torch._dynamo.mark_static_address(tensor, guard=False)

    def _clear(self, batch_size: int) -> None:
        """Reset the tables to ``batch_size`` rows without pages."""
        device = self.latents[0].data.device
        self.page_table = torch.empty(batch_size, 0, dtype=torch.int32, device=device)
        self.real = torch.zeros(batch_size, 0, dtype=torch.bool, device=device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.rows = torch.arange(batch_size + 1, dtype=torch.int32, device=device)

    def _tensors(self) -> Iterator[Tensor]:
        yield from (self.page_table, self.real, self.lengths, self.rows)
        if isinstance(self.columns, Tensor):
            yield self.columns
        for cache in (*self.latents, *self.index_keys.values()):
            yield from (part for part in (cache.data, cache.scales) if part is not None)

    @property
    def batch_size(self) -> int:
        return self.page_table.shape[0]

    @property
    def page_size(self) -> int:
        return self.latents[0].page_size

    @property
    def capacity(self) -> int:
        """Tokens that fit into the pages of a row."""
        return self.page_table.shape[1] * self.page_size

    @property
    def formats(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the formats of latents and of indexer keys, layer by layer."""
        keys = self.index_keys.values()
        return tuple(c.format.name for c in self.latents), tuple(c.format.name for c in keys)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        caches = (*self.latents, *self.index_keys.values())
        return sum(cache.format.bytes_per_token for cache in caches)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, free slots included."""
        return self.page_table.numel() * self.page_size * self.bytes_per_token

    @property
    def is_compileable(self) -> bool:
        """Whether shapes and addresses are fixed, so that ``generate`` may compile decode steps."""
        return self.max_length is not None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, padding included."""
        return cast(int, self.columns)  # or a tensor, as in transformers' StaticCache

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Capacity in columns; -1 if pages grow."""
        return -1 if self.max_length is None else self.max_length

    def reset(self) -> None:
        """Forget all columns but keep the pages."""
        self.real.zero_()
        self.lengths.zero_()
        self.columns *= 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` columns."""
        # generate() passes a tensor, and the columns of a static cache are a tensor, too.
        columns, tokens_to_remove = int(self.columns), int(tokens_to_remove)
        if not -columns <= tokens_to_remove <= 0:
            raise ValueError(
                f"tokens_to_remove must lie in [-{columns}, 0], got {tokens_to_remove}"
            )
        removed = self.real[:, columns + tokens_to_remove : columns]
        self.lengths -= removed.sum(1)
        removed.zero_()
        self.columns += tokens_to_remove

    def advance(self, new: Tensor) -> None:
        """Count the columns ``new [B, S]`` of a step, True where they are not padding."""
        at = torch.arange(new.shape[1], device=new.device) + self.columns
        self.real.index_copy_(1, at, new)
        self.lengths += new.sum(1, dtype=torch.int32)
        self.columns += new.shape[1]

    def hide(self, past: Tensor) -> None:
        """Forget the last columns of rows where ``past [B, columns]`` is False.

        Raises:
            ValueError: past marks padding as real, or hides a column that real columns follow.
        """
        seen = self.real[:, : past.shape[1]]
        if torch.equal(seen, past):
            return
        hidden = seen & ~past
        if (past & (~seen | (hidden.cumsum(1) > 0))).any():
            raise ValueError(
                "attention_mask must mark past columns as in the steps before, or hide the latest "
                "of a row"
            )
        seen.copy_(past)
        self.lengths.copy_(past.sum(1))

    @_ordinary_tensors
    def __deepcopy__(self, memo: dict[int, object]) -> LatentCache:
        copied = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            setattr(copied, name, copy.deepcopy(value, memo))
        return copied

    @_ordinary_tensors
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row ``b`` a copy of row ``beam_idx[b]``."""
        rows = beam_idx.to(self.page_table.device)
        real, lengths, pages = self.real[rows], self.lengths[rows], self.page_table[rows].flatten()
        if rows.shape[0] == self.batch_size:  # in place: the addresses are kept
            self.real.copy_(real)
            self.lengths.copy_(lengths)
            own = self.page_table.flatten().long()
            for cache in (*self.latents, *self.index_keys.values()):
                for part in (cache.data, cache.scales):
                    if part is not None:
                        part[own.to(part.device)] = part[pages.long().to(part.device)]
        else:
            width = self.page_table.shape[1]
            self._clear(rows.shape[0])
            self._copy_pages(pages.long(), pages.numel())
            self.page_table = torch.arange(
                pages.numel(), dtype=torch.int32, device=pages.device
            ).view(rows.shape[0], width)
            self.real, self.lengths = real, lengths

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def update(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: transformers' own attention cannot read latent rows."""
        raise ValueError(
            "past_key_values must be a cache of transformers for a model without sparsemla's "
            "attention, got a LatentCache"
        )

    def update_indexer(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse, as :meth:`update` does."""
        self.update()

    @_ordinary_tensors
    def reserve(self, num_columns: int) -> None:
        """Allocate pages until each row has room for ``num_columns``.

        Raises:
            ValueError: the cache does not grow.
        """
        batch_size, width = self.page_table.shape
        needed = -(-num_columns // self.page_size)
        if needed <= width:
            return
        if self.max_length is not None and width:
            raise ValueError(
                f"past_key_values must have room for {num_columns} columns, "
                f"got max_length {self.max_length}"
            )
        added = max(needed, 2 * width) - width
        first, last = batch_size * width, batch_size * (width + added)
        device = self.page_table.device
        pages = torch.arange(first, last, dtype=torch.int32, device=device)
        self._copy_pages(slice(None), last)
        self.page_table = torch.cat([self.page_table, pages.view(batch_size, added)], dim=1)
        self.real = nn.functional.pad(self.real, (0, added * self.page_size))

    def _copy_pages(self, pages: Tensor | slice, num_pages: int) -> None:
        """Move every layer to ``num_pages`` new pages; the first ones are copies of ``pages``."""
        self.latents = [_with_pages(cache, pages, num_pages) for cache in self.latents]
        self.index_keys = {
            layer_idx: _with_pages(cache, pages, num_pages)
            for layer_idx, cache in self.index_keys.items()
        }


def _with_pages(cache: PagedCache, pages: Tensor | slice, num_pages: int) -> PagedCache:
    device = cache.data.device
    moved = PagedCache.allocate(cache.format, num_pages, cache.page_size, device=device)
    if isinstance(pages, Tensor):
        pages = pages.to(device)
    for new, old in ((moved.data, cache.data), (moved.scales, cache.scales)):
        if new is not None and old is not None:
            kept = old[pages]
            new[: kept.shape[0]] = kept
    return moved


@dataclass(eq=False)
class _Step:
    """One forward of the model, passed to the attention modules as an extra argument.

    Args:
        cache: every layer writes and reads it.
        plan: slots and requests of the tokens; its positions are rows of the step's RoPE table.
        decodes: the step has a single column: one token per row of the batch.
        tokens: int64 ``[T]``, indices of the real columns among B * S; None for all of them.
        selections: the selection of each layer with an indexer, filled if recorded.
    """

    cache: LatentCache
    plan: Plan
    decodes: bool
    tokens: Tensor | None
    selections: dict[int, Tensor] = field(default_factory=dict)
    _rotation: tuple[Tensor, Tensor, Tensor] | None = None
    _copies: dict[torch.device, _Step] = field(default_factory=dict)

    def on(self, device: torch.device) -> _Step:
        """The step with its tensors on ``device``, copied once per device."""
        if device == self.plan.page_table.device:
            return self
        if device not in self._copies:
            tokens = None if self.tokens is None else self.tokens.to(device)
            self._copies[device] = _Step(
                self.cache, _plan_on(self.plan, device), self.decodes, tokens, self.selections
            )
        return self._copies[device]

    def pick(self, x: Tensor) -> Tensor:
        """The tokens ``[T, n]`` of ``x [B, S, n]``."""
        x = x.flatten(0, 1)
        return x if self.tokens is None else x[self.tokens]

    def place(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """Scatter ``x [T, n]`` to the real columns of ``shape`` ``[B, S, n]``; padding gets 0."""
        if self.tokens is None:
            return x.view(*shape)
        return x.new_zeros(*shape).flatten(0, 1).index_copy_(0, self.tokens, x).view(*shape)

    def rotation(self, embeddings: tuple[Tensor, Tensor], batch_size: int) -> tuple[Tensor, ...]:
        """The model's cos and sin ``[T, R]``, and float32 ``[T, R]``, cos half then sin half."""
        if self._rotation is None:  # all layers of a device share the first layer's
            cos, sin = (self.pick(part.expand(batch_size, -1, -1)) for part in embeddings)
            half = cos.shape[-1] // 2  # transformers' cos and sin hold each angle twice
            table = torch.cat([cos[:, :half], sin[:, :half]], dim=-1).float()
            self._rotation = cos, sin, table
        return self._rotation


def _plan_on(plan: Plan, device: torch.device) -> Plan:
    """A copy of a plan without prefill chunks, with its tensors on ``device``."""
    moved: dict[str, Any] = {}
    for item in fields(plan):
        value = getattr(plan, item.name)
        if isinstance(value, Tensor):
            moved[item.name] = value.to(device)
    return replace(plan, **moved)


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
            step = functools.partial(_prepare_step, prepare)
            # Keep the wrapped signature, which generate() reads.
            generates.prepare_inputs_for_generation = functools.update_wrapper(step, prepare)
            generates.create_masks_for_generate = _mask_for_generate
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
        """The model's forward; attention modules receive a :class:`_Step`."""
        config: Any = self._base.config
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ValueError("input_ids or inputs_embeds must be given, got neither")
        if input_ids is not None and inputs_embeds is not None:
            raise ValueError("input_ids or inputs_embeds must be given, got both")
        _check_input("inputs_embeds" if input_ids is None else "input_ids", given)
        if kwargs.get("output_attentions", config.output_attentions):
            raise ValueError("output_attentions must be False: no attention matrix exists here")
        if self._base.training and torch.is_grad_enabled():
            raise ValueError("model must be in eval mode or under torch.no_grad(), got training")
        cache = self._resolve(past_key_values, given.shape[0])
        past, new = _split_mask(attention_mask, cache, given.shape[1])
        decodes = given.shape[1] == 1
        if not decodes:
            seen = cache.lengths if past is None else past.sum(1)
            _check_positions(position_ids, seen, new)
        if isinstance(cache.columns, int) or not decodes:
            cache.reserve(int(cache.columns) + given.shape[1])
        if past is not None:
            cache.hide(past)
        step = _decode_step(cache, new) if decodes else _packed_step(cache, new)
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
        step: _Step,
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
        step: _Step,
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
        sparsemla_step: _Step,
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


def _check_input(name: str, given: Tensor) -> None:
    """Refuse an empty input, or another shape than ``[B, S]`` or ``[B, S, hidden]``."""
    if given.dim() != (2 if name == "input_ids" else 3) or 0 in given.shape:
        shape = "[batch, columns]" if name == "input_ids" else "[batch, columns, hidden_size]"
        raise ValueError(
            f"{name} must have shape {shape} with a row and a column, got {list(given.shape)}"
        )


def _prepare_step(
    prepare: Callable[..., dict[str, Any]],
    input_ids: Tensor,
    next_sequence_length: int | None = None,
    past_key_values: Cache | None = None,
    attention_mask: Tensor | None = None,
    is_first_iteration: bool = False,
    **kwargs: object,
) -> dict[str, Any]:
    """The inputs of one of ``generate``'s forwards, as ``prepare`` of transformers makes them.

    After the first iteration ``generate`` only appends ones to the mask. A decode step therefore
    gets the mask of its own column: the past needs no second look, and a mask that does not grow
    compiles once. Since transformers 5.18 a mask without a zero is None from the start.
    """
    if next_sequence_length is not None and next_sequence_length < 1:
        # transformers would slice with [:, -0:] and append the whole chat to the cache again.
        held = 0 if past_key_values is None else int(past_key_values.get_seq_length())
        raise ValueError(
            f"input_ids must have more columns than the {held} that past_key_values holds, got "
            f"{held + next_sequence_length}; past_key_values.crop(-1) forgets the last one"
        )
    decodes = next_sequence_length == 1 and not is_first_iteration
    if decodes and attention_mask is not None and isinstance(past_key_values, LatentCache):
        attention_mask = attention_mask[:, -1:]
    return prepare(
        input_ids,
        next_sequence_length=next_sequence_length,
        past_key_values=past_key_values,
        attention_mask=attention_mask,
        is_first_iteration=is_first_iteration,
        **kwargs,
    )


def _mask_for_generate(*, attention_mask: Tensor | None, **_: object) -> Tensor | None:
    """``generate``'s two-dimensional mask in place of a dense causal one, at the same strides."""
    if attention_mask is None:
        return None
    return attention_mask.clone(memory_format=torch.contiguous_format)


def _split_mask(
    attention_mask: object, cache: LatentCache, num_new: int
) -> tuple[Tensor | None, Tensor]:
    """Bool masks of the past columns, None if not given, and of the new columns."""
    device = cache.page_table.device
    if attention_mask is None:
        return None, torch.ones(cache.batch_size, num_new, dtype=torch.bool, device=device)
    got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else None
    new, shapes = [cache.batch_size, num_new], ""
    if got != new and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        shapes = f"[batch, new columns] = {new} in a CUDA graph, whose host reads no mask"
    elif got != new:
        whole = [cache.batch_size, int(cache.columns) + num_new]
        if got != whole:
            shapes = f"[batch, columns so far] = {whole} or [batch, new columns] = {new}"
    if shapes or not isinstance(attention_mask, Tensor):
        raise ValueError(
            f"attention_mask must be None or have shape {shapes}, "
            f"got {type(attention_mask).__name__ if got is None else got}"
        )
    mask = attention_mask.to(device) != 0
    return (None if got == new else mask[:, :-num_new]), mask[:, -num_new:]


def _check_positions(position_ids: Tensor | None, seen: Tensor, new: Tensor) -> None:
    """Refuse positions that restart, within a row (packed sequences) or after its ``seen`` tokens.

    Args:
        position_ids: ``[B, S]`` or ``[1, S]``; None for transformers' own.
        seen: ``[B]``, cached tokens of each row.
        new: bool ``[B, S]``, which columns are not padding.
    """
    if position_ids is None:
        return
    rows = position_ids.expand(new.shape).cpu()
    for row, length, real in zip(rows, seen.tolist(), new.cpu(), strict=True):
        positions = row[real]
        if (positions.diff() <= 0).any() or (positions[:1] < length).any():
            raise ValueError(
                "position_ids must ascend in each row of the batch, from the number of its cached "
                f"tokens on, got {positions.tolist()[:64]} after {length} tokens"
            )


def _packed_step(cache: LatentCache, new: Tensor) -> _Step:
    """A step over the real columns of ``new [B, S]``, planned on the host."""
    new = new.cpu()
    query_lens = new.sum(1)
    plan = plan_batch(
        query_lens,
        cache.lengths.cpu() + query_lens,
        cache.page_table,
        page_size=cache.page_size,
        workspace_rows=None,
        require_uniform=False,
    )
    # The model's positions may count padding; the step's RoPE table has one row per token.
    device = cache.page_table.device
    plan = replace(plan, positions=torch.arange(plan.num_tokens, device=device))
    tokens = None if new.all() else new.flatten().nonzero()[:, 0].to(device)
    return _Step(cache, plan, decodes=False, tokens=tokens)


def _decode_step(cache: LatentCache, new: Tensor) -> _Step:
    """A step over one column ``new [B, 1]``; the next real token overwrites padding's slot."""
    pages = cache.page_table.gather(1, (cache.lengths // cache.page_size).long()[:, None])[:, 0]
    requests = cache.rows[:-1]
    plan = Plan(
        num_requests=cache.batch_size,
        num_tokens=cache.batch_size,
        num_decodes=cache.batch_size,
        num_prefills=0,
        num_decode_tokens=cache.batch_size,
        num_prefill_tokens=0,
        decode_query_len=1,
        max_query_len=1,
        max_seq_len=cache.capacity,
        max_context_len=cache.capacity - 1,
        page_size=cache.page_size,
        input_row_offsets=cache.rows,
        seq_lens=cache.lengths + new[:, 0],
        page_table=cache.page_table,
        positions=requests,  # rows of the step's RoPE table
        slot_mapping=(pages * cache.page_size + cache.lengths % cache.page_size).long(),
        request_ids=requests,
        prefill_request_ids=None,
        workspace_starts=None,
        prefill_chunks=(),
    )
    return _Step(cache, plan, decodes=True, tokens=None)


def _rotated(
    rotate: Callable[..., tuple[Tensor, Tensor]], q: Tensor, k: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Queries ``[T, HI, DI]`` and keys ``[T, 1, DI]`` with their first R dims rotated."""
    dims = [cos.shape[-1], q.shape[-1] - cos.shape[-1]]
    (q_rope, q_rest), (k_rope, k_rest) = q.split(dims, dim=-1), k.split(dims, dim=-1)
    q_rope, k_rope = rotate(q_rope, k_rope, cos, sin)
    return torch.cat([q_rope, q_rest], dim=-1), torch.cat([k_rope, k_rest], dim=-1)

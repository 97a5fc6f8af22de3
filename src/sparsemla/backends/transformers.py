"""This package's attention inside models of Hugging Face transformers.

:func:`enable` replaces the attention of a DeepSeek-V3.2 or GLM-5 model, and the cache that the
model keeps between steps, by paged latent caches and the ops of this package. Weights, everything
outside of attention and ``generate`` stay those of transformers. Where transformers expands keys
and values for each head and masks a ``[tokens, context]`` score matrix, this stores one latent row
a token and attends to the selected rows only.

Shapes: B rows of the batch, S columns of a step, T real (unpadded) tokens of a step, H heads,
P and R query dims without and with RoPE, L latent dims, HI and DI indexer heads and dims.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers import Cache, PreTrainedModel

from sparsemla.cache import PagedCache
from sparsemla.formats import BF16_576, INDEX_FP8, CacheFormat, bf16_format
from sparsemla.ops import (
    append_index_keys,
    decode_branch,
    indexer_topk,
    prefill_branch,
    prepare_index_queries,
    to_slots,
)
from sparsemla.plan import Plan, plan_batch
from sparsemla.weights import HeadWeight, MLALayer, absorb_kv_b_proj


class Architecture(NamedTuple):
    """How the attention modules of a model type differ from each other.

    Args:
        interleaved_indexer: the indexer's RoPE pairs are (2i, 2i+1), not (i, i + R/2).
        shares_selection: attention returns its selection, which layers without an indexer reuse.
    """

    interleaved_indexer: bool
    shares_selection: bool


ARCHITECTURES = {
    "deepseek_v32": Architecture(interleaved_indexer=False, shares_selection=False),
    "glm_moe_dsa": Architecture(interleaved_indexer=True, shares_selection=True),
}
"""By the ``model_type`` of the configuration."""


class LatentCache(Cache):
    """What a model remembers between steps: pages of latent rows and of indexer keys.

    Row ``b`` of the batch owns the pages ``page_table[b]`` of every layer. Padding takes no slot:
    the n-th real token of a row has slot position n, whatever column of the batch it stands in.

    Args:
        latents: a cache for each layer.
        index_keys: a cache for each layer that has an indexer, by its number.
        batch_size: B.

    Attributes:
        page_table: int32 ``[B, W]``; W doubles when the pages are full.
        real: bool ``[B, columns]`` on the host, which columns so far are not padding.
    """

    def __init__(
        self,
        latents: Sequence[PagedCache],
        index_keys: Mapping[int, PagedCache],
        batch_size: int,
    ) -> None:
        super().__init__(layers=[])
        self.latents = list(latents)
        self.index_keys = dict(index_keys)
        device = self.latents[0].data.device
        self.page_table = torch.empty(batch_size, 0, dtype=torch.int32, device=device)
        self.real = torch.empty(batch_size, 0, dtype=torch.bool)

    @property
    def batch_size(self) -> int:
        return self.page_table.shape[0]

    @property
    def formats(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the formats of latents and of indexer keys, layer by layer."""
        keys = self.index_keys.values()
        return tuple(c.format.name for c in self.latents), tuple(c.format.name for c in keys)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes in all layers."""
        caches = (*self.latents, *self.index_keys.values())
        return sum(cache.format.bytes_per_token for cache in caches)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, free slots included."""
        return self.page_table.numel() * self.latents[0].page_size * self.bytes_per_token

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, padding included."""
        return self.real.shape[1]

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """There is none: -1."""
        return -1

    def reset(self) -> None:
        """Forget everything, keep the pages."""
        self.real = self.real[:, :0]

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` columns."""
        if not -self.real.shape[1] <= tokens_to_remove <= 0:
            raise ValueError(
                f"tokens_to_remove must lie in [-{self.real.shape[1]}, 0], got {tokens_to_remove}"
            )
        self.real = self.real[:, : self.real.shape[1] + tokens_to_remove]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row ``b`` a copy of row ``beam_idx[b]``."""
        rows = beam_idx.to(self.page_table.device)
        pages = self.page_table[rows]  # [B, W]
        self._copy_pages(pages.flatten().long(), pages.numel())
        self.page_table = torch.arange(pages.numel(), dtype=torch.int32, device=pages.device)
        self.page_table = self.page_table.view(pages.shape)
        self.real = self.real[rows.cpu()]

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

    def reserve(self, num_tokens: int) -> None:
        """Make room for ``num_tokens`` real tokens in each row."""
        batch_size, width = self.page_table.shape
        needed = -(-num_tokens // self.latents[0].page_size)
        if needed <= width:
            return
        added = max(needed, 2 * width) - width
        first, last = batch_size * width, batch_size * (width + added)
        device = self.page_table.device
        pages = torch.arange(first, last, dtype=torch.int32, device=device)
        self._copy_pages(slice(None), last)
        self.page_table = torch.cat([self.page_table, pages.view(batch_size, added)], dim=1)

    def _copy_pages(self, pages: Tensor | slice, num_pages: int) -> None:
        """Move every layer to ``num_pages`` new pages, the first of them copies of ``pages``."""
        self.latents = [_with_pages(cache, pages, num_pages) for cache in self.latents]
        self.index_keys = {
            layer_idx: _with_pages(cache, pages, num_pages)
            for layer_idx, cache in self.index_keys.items()
        }


def _with_pages(cache: PagedCache, pages: Tensor | slice, num_pages: int) -> PagedCache:
    moved = PagedCache.allocate(cache.format, num_pages, cache.page_size, device=cache.data.device)
    for new, old in ((moved.data, cache.data), (moved.scales, cache.scales)):
        if new is not None and old is not None:
            kept = old[pages]
            new[: kept.shape[0]] = kept
    return moved


@dataclass(frozen=True, eq=False)
class _Step:
    """One forward of the model; it reaches the attention modules in place of their mask.

    Args:
        cache: written and read by every layer.
        plan: where each real token stands; its positions are rows of the step's own RoPE table.
        tokens: int64 ``[T]``, which of the B * S columns are real; None if all are.
        selections: what each layer with an indexer selected, filled if they are recorded.
    """

    cache: LatentCache
    plan: Plan
    tokens: Tensor | None
    selections: dict[int, Tensor] = field(default_factory=dict)

    def pick(self, x: Tensor) -> Tensor:
        """The real tokens ``[T, n]`` of ``x [B, S, n]``."""
        x = x.flatten(0, 1)
        return x if self.tokens is None else x[self.tokens]

    def place(self, x: Tensor, shape: Sequence[int]) -> Tensor:
        """``x [T, n]`` where the real tokens of ``shape`` ``[B, S, n]`` are, 0 at padding."""
        if self.tokens is None:
            return x.view(*shape)
        return x.new_zeros(*shape).flatten(0, 1).index_copy_(0, self.tokens, x).view(*shape)


class _ForwardOnly(torch.autograd.Function):
    """Attention's output as part of the graph of its input, so that backward fails loudly."""

    @staticmethod
    def forward(ctx: FunctionCtx, hidden_states: Tensor, out: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> NoReturn:
        raise NotImplementedError("sparsemla's attention has no backward pass")


class PagedAttention:
    """What :func:`enable` returns: undoes it, and shows what the model keeps and selects.

    A context manager that disables on exit.

    Attributes:
        cache: the cache of the latest forward that kept one.
        selections: if recorded, for each forward the selection of each layer that has an indexer:
            int32 ``[T, topk]``, positions among the row's real tokens, ascending, then -1.
    """

    def __init__(
        self,
        base: PreTrainedModel,
        cache_format: CacheFormat,
        index_format: CacheFormat,
        page_size: int,
        record_selections: bool,
    ) -> None:
        self.cache: LatentCache | None = None
        self.selections: list[dict[int, Tensor]] = []
        self._base = base
        self._architecture = ARCHITECTURES[base.config.model_type]
        self._formats = cache_format, index_format
        self._page_size = page_size
        self._records = record_selections
        self._attentions = [layer.self_attn for layer in cast(Any, base).layers]
        self._weights = [_absorb(attention) for attention in self._attentions]
        self._replaced_caches: weakref.WeakSet[Cache] = weakref.WeakSet()
        # An instance attribute hides the class's method; what other wrappers put there comes back.
        modules = [base, *self._attentions]
        self._before = [(module, vars(module).get("forward")) for module in modules]
        self._base_forward = base.forward
        base.forward = self._forward
        for layer_idx, attention in enumerate(self._attentions):
            attention.forward = functools.partial(self._attend, layer_idx)

    def __enter__(self) -> PagedAttention:
        return self

    def __exit__(self, *exception: object) -> None:
        self.disable()

    def disable(self) -> None:
        """Give the model transformers' own attention back; a second call does nothing."""
        for module, forward in self._before:
            del module.forward
            if forward is not None:
                module.forward = forward
        self._before = []

    def new_cache(self, batch_size: int) -> LatentCache:
        """An empty cache for the model, for ``past_key_values``."""
        latent_format, index_format = self._formats
        device = next(self._base.parameters()).device

        def empty(format: CacheFormat) -> PagedCache:
            return PagedCache.allocate(format, 0, self._page_size, device=device)

        return LatentCache(
            [empty(latent_format) for _ in self._attentions],
            {
                layer_idx: empty(index_format)
                for layer_idx, attention in enumerate(self._attentions)
                if attention.indexer is not None
            },
            batch_size,
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
        """The model's forward, with a step of ours where its causal mask goes."""
        config: Any = self._base.config
        given = input_ids if input_ids is not None else inputs_embeds
        if given is None:
            raise ValueError("input_ids or inputs_embeds must be given, got neither")
        if kwargs.get("output_attentions", config.output_attentions):
            raise ValueError("output_attentions must be False: no attention matrix exists here")
        if self._base.training and torch.is_grad_enabled():
            raise ValueError("model must be in eval mode or under torch.no_grad(), got training")
        cache = self._resolve(past_key_values, given.shape[0])
        real = _real_columns(attention_mask, cache, given.shape[1])
        new = real[:, cache.get_seq_length() :]  # [B, S]
        _check_positions(position_ids, new)
        step = _make_step(cache, new)
        use_cache = config.use_cache if use_cache is None else use_cache
        keeps = use_cache or past_key_values is not None
        output = self._base_forward(
            input_ids=input_ids,
            attention_mask=dict.fromkeys(config.layer_types, step),
            position_ids=position_ids,
            past_key_values=cache if keeps else None,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        cache.real = real
        if keeps:
            self.cache = cache
        if self._records:
            self.selections.append(step.selections)
        return output

    def _resolve(self, past: Cache | None, batch_size: int) -> LatentCache:
        """The caller's cache if it is ours; in place of none, or of an empty one, a new one."""
        if past is None:
            return self.new_cache(batch_size)
        if not isinstance(past, LatentCache):
            # generate() brings an empty cache and goes on with the one in the model's output.
            if past.get_seq_length() or past in self._replaced_caches:
                raise ValueError(
                    "past_key_values must be None or the cache in the output of the step before, "
                    f"got a {type(past).__name__}"
                )
            self._replaced_caches.add(past)
            return self.new_cache(batch_size)
        ours = self.new_cache(0)
        if past.formats != ours.formats:
            raise ValueError(
                f"past_key_values must hold layers of the formats {ours.formats}, "
                f"got {past.formats}"
            )
        if past.batch_size != batch_size:
            raise ValueError(
                f"past_key_values must hold {batch_size} rows, those of the batch, "
                f"got {past.batch_size}"
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
    ) -> tuple[Tensor, Tensor]:
        """Output ``[B, S, hidden]`` of a layer's attention, and the slots that it selected."""
        attention, plan = self._attentions[layer_idx], step.plan
        x = step.pick(hidden_states)  # [T, hidden]
        table = _rope_table(position_embeddings, hidden_states.shape[0], step)  # [T, R]
        q_resid = attention.q_a_layernorm(attention.q_a_proj(x))
        if attention.indexer is not None:
            slots = self._select(layer_idx, x, q_resid, table, step)
        if slots is None:
            raise ValueError("prev_topk_indices must be given to a layer without an indexer")
        q = attention.q_b_proj(q_resid).unflatten(-1, (attention.num_heads, -1))  # [T, H, P + R]
        w_uk, w_uv = self._weights[layer_idx]
        norm = attention.kv_a_layernorm
        layer = MLALayer(
            w_uk, w_uv, norm.weight, table, attention.scaling, norm_eps=norm.variance_epsilon
        )
        branch = decode_branch if plan.max_query_len == 1 else prefill_branch
        out = branch(
            q.bfloat16(),
            attention.kv_a_proj_with_mqa(x),
            step.cache.latents[layer_idx],
            layer,
            plan,
            topk_indices=slots,
        )  # [T, H, V]
        out = attention.o_proj(out.flatten(1).to(hidden_states.dtype))
        return step.place(out, hidden_states.shape), slots

    def _select(
        self, layer_idx: int, x: Tensor, q_resid: Tensor, table: Tensor, step: _Step
    ) -> Tensor:
        """Store the step's indexer keys; int32 ``[T, topk]``, the slots that tokens attend to."""
        indexer, plan = self._attentions[layer_idx].indexer, step.plan
        cache = step.cache.index_keys[layer_idx]
        interleaved = self._architecture.interleaved_indexer
        append_index_keys(
            indexer.wk(x),
            indexer.k_norm.weight,
            indexer.k_norm.bias,
            table,
            cache,
            positions=plan.positions,
            slot_mapping=plan.slot_mapping,
            eps=indexer.k_norm.eps,
            interleaved=interleaved,
        )
        q, weights = prepare_index_queries(
            indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, -1)),  # [T, HI, DI]
            indexer.weights_proj(x.to(indexer.weights_proj.weight.dtype)),
            table,
            positions=plan.positions,
            format=cache.format,
            interleaved=interleaved,
        )
        topk_indices = indexer_topk(
            q,
            weights,
            cache,
            input_row_offsets=plan.input_row_offsets,
            seq_lens=plan.seq_lens,
            page_table=plan.page_table,
            topk=min(indexer.index_topk, max(plan.max_seq_len, 1)),
        )
        if self._records:
            step.selections[layer_idx] = topk_indices
        return to_slots(topk_indices, plan.page_table, plan.request_ids, page_size=self._page_size)

    def _attend(
        self,
        layer_idx: int,
        hidden_states: Tensor,
        attention_mask: _Step,
        position_embeddings: tuple[Tensor, Tensor],
        prev_topk_indices: Tensor | None = None,
        **_: object,
    ) -> tuple[Tensor | None, ...]:
        """The forward of an attention module; past keys and positions come with the step."""
        out, slots = self._attend_tokens(
            layer_idx, hidden_states, attention_mask, position_embeddings, prev_topk_indices
        )
        out = _ForwardOnly.apply(hidden_states, out)
        return (out, None, slots) if self._architecture.shares_selection else (out, None)


def enable(
    model: PreTrainedModel,
    *,
    cache_format: CacheFormat = BF16_576,
    index_format: CacheFormat | None = None,
    page_size: int = 64,
    record_selections: bool = False,
) -> PagedAttention:
    """Plug this package's attention into a DeepSeek-V3.2 or GLM-5 model of transformers.

    The model is changed in place until :meth:`PagedAttention.disable`. Everything that goes through
    its forward works as before: ``generate`` (greedy, sampling, beams), batches with padding on
    either side, ``use_cache=False``. Padding gets output 0 from attention.

    The up-projections of keys and values are copied, in bfloat16 or as the FP8 they are: changes
    to those weights are not seen until the next ``enable``. Attention itself runs in bfloat16
    whatever the model's dtype.

    Args:
        model: with or without its language model head.
        cache_format: of the latent rows; ``head_dim`` is L + R, ``value_dim`` is L.
        index_format: of the indexer keys; default INDEX_FP8 with an FP8 ``cache_format``, else
            bfloat16.
        page_size: tokens of a page.
        record_selections: keep what each step selected, in :attr:`PagedAttention.selections`.

    Returns:
        The handle that undoes it.

    Raises:
        ValueError: another architecture, a model that is enabled already or spread over devices,
            or a format that does not fit it. The model's forward raises ValueError for what cannot
            be served: 4D masks, packed sequences, foreign caches, ``output_attentions``, training.

    Source: transformers 5.17, ``models/deepseek_v32`` and ``models/glm_moe_dsa``.
    """
    base = cast(PreTrainedModel, model.base_model)
    config: Any = base.config
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"model must have a model_type of {' or '.join(ARCHITECTURES)}, "
            f"got {config.model_type!r}"
        )
    if isinstance(getattr(vars(base).get("forward"), "__self__", None), PagedAttention):
        raise ValueError("model must not be enabled already: disable its handle first")
    devices = {str(parameter.device) for parameter in base.parameters()}
    if len(devices) > 1:
        raise ValueError(f"model must be on one device, got {', '.join(sorted(devices))}")
    if index_format is None:
        index_format = INDEX_FP8 if cache_format.fp8_dim else bf16_format(config.index_head_dim)
    latent_dims = config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank
    for name, fmt, dims in (
        ("cache_format", cache_format, latent_dims),
        ("index_format", index_format, (config.index_head_dim,) * 2),
    ):
        if (fmt.head_dim, fmt.value_dim) != dims:
            raise ValueError(
                f"{name} must have head_dim {dims[0]} and value_dim {dims[1]} for this model, "
                f"got {fmt.name}"
            )
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size}")
    return PagedAttention(base, cache_format, index_format, page_size, record_selections)


def _absorb(attention: nn.Module) -> tuple[HeadWeight, HeadWeight]:
    """W_UK and W_UV of a layer; FP8 codes and block scales are kept."""
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


def _real_columns(attention_mask: object, cache: LatentCache, num_new: int) -> Tensor:
    """Bool ``[B, columns]`` on the host: which columns, this step's included, are not padding."""
    seen = cache.real
    shape = (cache.batch_size, seen.shape[1] + num_new)
    if attention_mask is None:
        real = torch.ones(shape, dtype=torch.bool)
    elif isinstance(attention_mask, Tensor) and tuple(attention_mask.shape) == shape:
        real = (attention_mask != 0).cpu()
    else:
        got = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else attention_mask
        raise ValueError(
            f"attention_mask must be None or have shape [batch, columns so far] = {list(shape)}, "
            f"got {got if isinstance(got, list) else type(got).__name__}"
        )
    if not torch.equal(real[:, : seen.shape[1]], seen):
        raise ValueError("attention_mask must mark past columns as in the steps before")
    return real


def _check_positions(position_ids: Tensor | None, new: Tensor) -> None:
    """Refuse positions that restart: several sequences packed into one row."""
    if position_ids is None or new.shape[1] == 1:
        return
    for row, real in zip(position_ids.cpu().expand(new.shape), new, strict=True):
        if (row[real].diff() <= 0).any():
            raise ValueError(
                f"position_ids must ascend in each row of the batch, got {row[real].tolist()[:64]}"
            )


def _make_step(cache: LatentCache, new: Tensor) -> _Step:
    """Reserve slots for the real ones of the columns ``new [B, S]``, and plan them."""
    query_lens = new.sum(1)
    seq_lens = cache.real.sum(1) + query_lens
    cache.reserve(max(int(seq_lens.max()), 1))  # a cache without pages is no cache to the ops
    plan = plan_batch(
        query_lens,
        seq_lens,
        cache.page_table,
        page_size=cache.latents[0].page_size,
        workspace_rows=None,
        require_uniform=False,
    )
    # The model's positions may count padding; its table of this step has a row for each token.
    plan = replace(plan, positions=torch.arange(plan.num_tokens, device=cache.page_table.device))
    tokens = None if new.all() else new.flatten().nonzero()[:, 0].to(cache.page_table.device)
    return _Step(cache, plan, tokens)


def _rope_table(embeddings: tuple[Tensor, Tensor], batch_size: int, step: _Step) -> Tensor:
    """Float32 ``[T, R]``, cos half then sin half; transformers' cos and sin hold each twice."""
    halves = [part[..., : part.shape[-1] // 2] for part in embeddings]
    return step.pick(torch.cat(halves, dim=-1).float().expand(batch_size, -1, -1))

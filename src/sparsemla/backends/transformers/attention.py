"""The handle of an enabled model, and :func:`enable`."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NoReturn, overload

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from transformers import Cache, DynamicCache, GenerationMixin, PreTrainedModel, StaticCache

from sparsemla.backends.transformers.cache import CACHE, BatchCache, one_cache
from sparsemla.backends.transformers.deepseek_v4 import CompressedLayers
from sparsemla.backends.transformers.glm5_next import PooledLayers
from sparsemla.backends.transformers.handle import Handle, handle_of, renew
from sparsemla.backends.transformers.keywords import split_keywords
from sparsemla.backends.transformers.latent import ARCHITECTURES, LatentLayers
from sparsemla.backends.transformers.layers import Layers
from sparsemla.backends.transformers.sequences import (
    STAGES,
    Stage,
    own_positions,
    packed_lengths,
)
from sparsemla.backends.transformers.step import (
    Step,
    check_dropout,
    check_input,
    check_position_ids,
    check_positions,
    mask_for_generate,
    prepare_step,
    split_mask,
)
from sparsemla.backends.transformers.training import TrainingAttention
from sparsemla.formats import CacheFormat, as_format
from sparsemla.validation import check_integer, check_number

LAYERS: dict[str, Callable[..., Layers]] = {
    **dict.fromkeys(ARCHITECTURES, LatentLayers),
    "deepseek_v4": CompressedLayers,
    "glm5_next_text": PooledLayers,
}
"""Keyed by the configuration's ``model_type``."""

PAGE_SIZE = 64

NOT_SERVED = {
    "deepseek_v41": "its layers share entries, and transformers has no class of it to compare with",
    "hy_v4_vl_text": "its positions have three axes, and rows here have one",
}
"""Related model types that are refused, with the reason."""


def refuse(model_type: object) -> str | None:
    """Why models of this type are refused; None if they are supported."""
    if isinstance(model_type, str) and model_type in LAYERS:
        return None
    reason = NOT_SERVED.get(str(model_type))
    expected = f"model must have a model_type of {' or '.join(LAYERS)}, got {model_type!r}"
    return f"{expected}: {reason}" if reason else expected


class _ForwardOnly(torch.autograd.Function):
    """Ties attention's output to the graph of its inputs, so that backward raises an error."""

    @staticmethod
    def forward(ctx: FunctionCtx, out: Tensor, *inputs: Tensor | None) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor) -> NoReturn:
        raise NotImplementedError(
            "sparsemla's attention has no backward pass here; enable(model, training=True) has one"
        )


class PagedAttention(Handle):
    """The handle of an enabled model: it disables the attention and exposes cache and selections.

    A context manager that disables on exit.

    Attributes:
        cache: the cache of the latest forward that kept one.
        selections: if recorded, one dict per forward: for each layer with an indexer int32
            ``[T, topk]``, ascending positions among the row's real tokens, for DeepSeek-V4 among
            its entries and for GLM-5.3 among its pools; then -1.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        base: PreTrainedModel,
        layers: Layers,
        options: Mapping[str, object],
    ) -> None:
        super().__init__(model, base)
        self.cache: BatchCache | None = None
        self.selections: list[dict[int, Tensor]] = []
        self._layers = layers
        self._options = options
        self._layer_formats = self.new_cache(0).formats
        self._replaced_caches: weakref.WeakSet[Cache] = weakref.WeakSet()

    @property
    def options(self) -> Mapping[str, object]:
        return self._options

    def _install(self) -> None:
        self._base_forward = self._base.forward
        self._replace(self._base, "forward", self._forward)
        if isinstance(self._model, GenerationMixin):
            generates: Any = self._model
            prepare = generates.prepare_inputs_for_generation
            # Keep the wrapped signature, which generate() reads.
            step = functools.update_wrapper(functools.partial(prepare_step, prepare), prepare)
            self._replace(generates, "prepare_inputs_for_generation", step)
            self._replace(generates, "create_masks_for_generate", mask_for_generate)
        for layer_idx, module in self._layers.modules.items():
            self._replace(module, "forward", functools.partial(self._attend, layer_idx))

    def __repr__(self) -> str:
        """Layers, formats, bytes, and the kernels of a decode step of one token."""
        layers, empty = self._layers, self._layers.new_cache(0)
        _, keys = layers.formats
        held = "" if self.cache is None else f", {self.cache.nbytes} in use"
        lines = [
            f"{self._title()}: {len(layers.modules)} layers on {', '.join(layers.devices)}",
            f"rows: {', '.join(layers.row_names)}" + (f"; index keys: {keys.name}" if keys else ""),
            f"cache: {empty.bytes_per_token:g} bytes a token{held}",
            "decode kernels: " + ", ".join(f"{op} {name}" for op, name in layers.kernels().items()),
        ]
        return "\n  ".join(lines)

    def new_cache(self, batch_size: int, max_length: int | None = None) -> BatchCache:
        """An empty cache for the model, for ``cache`` or, before 5.24, ``past_key_values``.

        Args:
            batch_size: rows of the batch.
            max_length: fixed capacity in columns, which compiled decode steps need. A step beyond
                it raises a ValueError, or torch's index error in compiled code and CUDA graphs,
                whose columns the host does not count. None for pages that grow.

        Raises:
            TypeError: batch_size or max_length is not an integer.
            ValueError: batch_size is negative, or max_length below 1.
        """
        check_integer("batch_size", batch_size)
        if max_length is not None:
            check_integer("max_length", max_length, 1)
        self._layers.update(anew=True)
        return self._layers.new_cache(batch_size, max_length)

    def _forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        *,
        cache: Cache | None = None,
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
        check_position_ids(position_ids, given.shape)
        passed, boundaries = split_keywords(self._base, kwargs)
        check_dropout(self._layers.modules)
        if self._base.training and torch.is_grad_enabled():
            raise ValueError(
                "model must be in eval mode or under torch.no_grad(), got training mode; "
                "enable(model, training=True) trains"
            )
        given_cache = one_cache(past_key_values, cache)
        decodes = given.shape[1] == 1
        lengths = None
        if boundaries or (given_cache is None and not decodes):
            if given_cache is not None:
                raise ValueError(
                    f"{', '.join(boundaries)} must be left out where {CACHE} is given: the cache "
                    "has a row for each row of the batch"
                )
            # Only without a cache do transformers' masks end a sequence where numbers are left out.
            lengths = packed_lengths(
                given, attention_mask, position_ids, boundaries, gaps=use_cache is not False
            )
        self._layers.update(anew=not (decodes and isinstance(given_cache, BatchCache)))
        if lengths is None:
            cache = self._resolve(given_cache, given.shape[0])
            new = self._admit(cache, attention_mask, position_ids, given.shape[1])
            step = (self._layers.decode_step if decodes else self._layers.packed_step)(cache, new)
            use_cache = config.use_cache if use_cache is None else use_cache
        else:
            if position_ids is None:
                position_ids = own_positions(lengths, given.shape[:2], given.device)
            position_ids = position_ids.expand(given.shape[:2])
            cache, new = self._admit_sequences(lengths, position_ids, use_cache)
            step = self._layers.packed_step(cache, new)
            step.tokens = None  # the sequences fill all columns of the batch
            use_cache = False
        keeps = use_cache or given_cache is not None
        output = self._base_forward(
            input_ids=input_ids,
            attention_mask=self._layers.mask(new),
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            sparsemla_step=step,
            **{CACHE: cache if keeps else None},
            **passed,
        )
        cache.advance(new)
        if given_cache is not None and given_cache is not cache:
            self._replaced_caches.add(given_cache)
        if keeps:
            self.cache = cache
        if self._layers.records:
            self.selections.append(step.selections)
        return output

    def _admit(
        self,
        cache: BatchCache,
        attention_mask: object,
        position_ids: Tensor | None,
        num_new: int,
    ) -> Tensor:
        """Check the new columns against the cache and make room; bool ``[B, S]``, the real ones."""
        past, new = split_mask(attention_mask, cache, num_new)
        if num_new > 1 and position_ids is not None:
            seen = cache.lengths if past is None else past.sum(1)
            positions = position_ids.expand(new.shape).cpu()
            rows = [row[real] for row, real in zip(positions, new.cpu(), strict=True)]
            check_positions(rows, seen.tolist(), gaps=self._layers.gaps)
        if num_new > 1 or isinstance(cache.columns, int):
            cache.reserve(cache.count() + num_new)
        elif not torch.compiler.is_compiling():
            cache.reserve(cache.counted + num_new)
        if past is not None:
            cache.hide(past)
        return new

    def _admit_sequences(
        self, lengths: Sequence[int], position_ids: Tensor, use_cache: bool | None
    ) -> tuple[BatchCache, Tensor]:
        """A cache with a row for each sequence of the batch, for one forward, and its columns."""
        if not self._layers.packs:
            raise ValueError(
                "position_ids, cu_seq_lens_q and seq_idx must have one sequence in each row: the "
                f"states of linear attention know no other, got lengths of {list(lengths)[:64]}"
            )
        if use_cache:
            raise ValueError(
                "use_cache must be False or None where a row has several sequences, got True: the "
                "cache has a row for each row of the batch"
            )
        rows = position_ids.flatten().cpu().split(list(lengths))
        check_positions(rows, [0] * len(rows), gaps=self._layers.gaps)
        cache = self._layers.new_cache(len(lengths))
        cache.fit(lengths)
        columns = torch.arange(max(lengths), device="cpu")
        return cache, (columns < torch.tensor(lengths, device="cpu")[:, None]).to(cache.device)

    def _resolve(self, past: Cache | None, batch_size: int) -> BatchCache:
        """The caller's BatchCache; a new one instead of None or of an empty cache."""
        if past is None:
            return self._layers.new_cache(batch_size)
        if not isinstance(past, Cache):
            raise TypeError(f"{CACHE} must be None or a Cache, got {type(past).__name__}")
        if not isinstance(past, BatchCache):
            # generate() passes an empty cache and continues with the one in the model's output.
            if type(past) not in (DynamicCache, StaticCache) or past.offloading:
                offloads = " that offloads layers" if getattr(past, "offloading", False) else ""
                raise ValueError(
                    f"{CACHE} must be None, an empty DynamicCache or StaticCache, or the cache in "
                    f"the output of the step before, got a {type(past).__name__}{offloads}: its "
                    "place is taken by pages on the layers' devices"
                )
            if past.get_seq_length() or past in self._replaced_caches:
                raise ValueError(
                    f"{CACHE} must be None or the cache in the output of the step before, "
                    f"got a {type(past).__name__}"
                )
            length = past.get_max_length() if past.is_compileable else None
            return self._layers.new_cache(batch_size, length)
        if past.formats != self._layer_formats:
            raise ValueError(
                f"{CACHE} must hold layers of the formats {self._layer_formats}, got {past.formats}"
            )
        if past.batch_size != batch_size:
            raise ValueError(
                f"{CACHE} must hold {batch_size} rows, as the batch, got {past.batch_size}"
            )
        return past

    def _attend(
        self, layer_idx: int, hidden_states: Tensor, *, sparsemla_step: Step, **given: object
    ) -> tuple[Tensor | None, ...]:
        """The forward of an attention module; the step holds the cache and the positions."""
        with torch.no_grad():
            out, *rest = self._layers.attend(layer_idx, hidden_states, sparsemla_step, given)
        if torch.is_grad_enabled():
            parameters = self._layers.modules[layer_idx].parameters()
            trained = next((each for each in parameters if each.requires_grad), None)
            out = _ForwardOnly.apply(out, hidden_states, trained)
        return out, *rest


@overload
def enable(
    model: PreTrainedModel,
    *,
    cache_format: CacheFormat | str | None = None,
    index_format: CacheFormat | str | None = None,
    page_size: int = PAGE_SIZE,
    record_selections: bool = False,
    training: Literal[False] = False,
) -> PagedAttention: ...


@overload
def enable(
    model: PreTrainedModel,
    *,
    training: Literal[True] | Stage,
    index_loss_coefficient: float = 1.0,
    record_selections: bool = False,
) -> TrainingAttention: ...


def enable(
    model: PreTrainedModel,
    *,
    cache_format: CacheFormat | str | None = None,
    index_format: CacheFormat | str | None = None,
    page_size: int = PAGE_SIZE,
    record_selections: bool = False,
    training: bool | Stage = False,
    index_loss_coefficient: float = 1.0,
) -> PagedAttention | TrainingAttention:
    """Plug this package's attention into a model with latent rows, such as DeepSeek's or GLM-5.

    The documentation lists the models. Attention modules must have the parts that are read here:
    a configuration or a version of transformers that adds another one is refused by its name.

    The model is changed in place until :meth:`PagedAttention.disable` or :func:`disable`. A second
    call with the same arguments returns the same handle; with others it disables that handle and
    returns a new one. Every use of the model's forward
    works as before: ``generate`` (greedy, sampling, beams, a static cache), batches with padding on
    either side, ``use_cache=False``, a second call that continues on ``past_key_values``. Several
    sequences in a row attend to themselves, and keep no cache. The attention output of padding is
    finite and meaningless.

    The up-projections of keys and values, and DeepSeek-V4's first output projections, are copied as
    bfloat16 or as FP8 codes with their scales. They are what the layer's forward multiplies with,
    adapters included. Every forward with several new columns, and every new cache, copies them
    again; a decode step does where autograd counted a write, and a compiled step or a CUDA graph
    keeps the latest copies. Attention always runs in bfloat16.

    The layers may be on several devices, as ``from_pretrained(device_map=...)`` puts them: each
    layer's pages are on the device of its weights, and a step's plan is copied once per device.

    Args:
        model: with or without its language model head; ``generate`` over a static cache needs
            the model with the head.
        cache_format: format of the latent rows, or its name; ``head_dim`` is L + R, ``value_dim``
            is L. For DeepSeek-V4 the format of raw rows and entries, both dims D; for GLM-5.3 both
            dims L. Default bfloat16. Mistral Large 4's rows without RoPE are e4m3 beside an FP8
            format, with a scale for up to 128 dims; Dots3Note's rows of windows stay bfloat16.
        index_format: format of the indexer keys; default e4m3 with a scale per row with an FP8
            ``cache_format``, else bfloat16.
        page_size: rows of a page.
        record_selections: record each step's selection in :attr:`PagedAttention.selections`.
        training: ``"dense"``, ``"warmup"`` or ``"sparse"``, a stage of training DeepSeek-V3.2 or
            GLM-5, see :attr:`TrainingAttention.stage`; True for ``"sparse"``. Weights are read in
            each forward, nothing is copied, and no cache is kept.
        index_loss_coefficient: with ``training``, the factor of the indexers' loss in the ``loss``
            of the model's output. 0 gives their parameters gradients of 0.

    Returns:
        The handle; its method ``disable`` restores the model. With ``training`` a
        :class:`TrainingAttention`.

    Raises:
        TypeError: a model or format of another kind.
        ValueError: another architecture, other arguments than those of the ``with`` block around
            the call, another part of a model that is enabled, a layer with its attention offloaded
            or on several devices, a part of attention modules that is not read here, layers that
            share rows in another way than transformers, a format or head size that does not fit, a
            copied projection
            with a bias, a hook or another output than a matrix, or a hook or a forward of another
            package on a module whose parameters are read: the norm of the latent, indexers,
            compressors. The model's forward raises the same for later changes.
            The model's forward raises ValueError for 4D masks, caches of another kind,
            ``output_attentions``, dropout, training and boundaries of sequences that contradict
            each other, and TypeError for keywords that attention does not read. With ``training``:
            another stage, arguments of caches, a quantised model, dropout, or weights of
            ``kv_b_proj`` that are no floats.

    Source: transformers 5.17 and 5.24, the folders of :data:`LAYERS` in ``models``.
    """
    base = _base_of(model)
    if reason := refuse(base.config.model_type):
        if base.config.model_type not in NOT_SERVED:
            has_latents = getattr(base.config, "kv_lora_rank", None) is not None
            reason += (
                ": no test compares its attention with this one"
                if has_latents
                else ": it has no kv_lora_rank, and rows here are latents that all heads share"
            )
        raise ValueError(reason)
    if training is False and index_loss_coefficient != 1.0:
        raise ValueError(
            "index_loss_coefficient must be left out without training, got "
            f"{index_loss_coefficient}"
        )
    if training is not False:
        if cache_format is not None or index_format is not None or page_size != PAGE_SIZE:
            raise ValueError(
                "cache_format, index_format and page_size must be left out with training: "
                "a model that trains keeps no cache"
            )
        if training is not True and training not in STAGES:
            raise ValueError(
                f"training must be True, False or one of {', '.join(STAGES)}, got {training!r}"
            )
        check_number("index_loss_coefficient", index_loss_coefficient)
        trains: dict[str, Any] = {
            "training": "sparse" if training is True else training,
            "index_loss_coefficient": index_loss_coefficient,
            "record_selections": record_selections,
        }
        return renew(model, base, trains, lambda: TrainingAttention(model, **trains))
    options: dict[str, Any] = {
        "cache_format": cache_format
        if cache_format is None
        else as_format("cache_format", cache_format),
        "index_format": index_format
        if index_format is None
        else as_format("index_format", index_format),
        "page_size": page_size,
        "record_selections": record_selections,
    }

    def make() -> PagedAttention:
        layers = LAYERS[base.config.model_type](base, **options)
        return PagedAttention(model, base, layers, options)

    return renew(model, base, options, make)


def disable(model: PreTrainedModel) -> None:
    """Restore transformers' own attention; a model that is not enabled stays as it is.

    Args:
        model: as it was given to :func:`enable`.

    Raises:
        TypeError: a model of another kind.
    """
    handle = handle_of(_base_of(model))
    if handle is not None:
        handle.disable()


def _base_of(model: PreTrainedModel) -> Any:  # noqa: ANN401 - its attributes depend on its class
    """The part of a model with the layers."""
    if not isinstance(model, PreTrainedModel):
        inner = ", which get_base_model() returns" if hasattr(model, "get_base_model") else ""
        raise TypeError(f"model must be a PreTrainedModel{inner}, got {type(model).__name__}")
    base: Any = model.base_model
    return getattr(base, "language_model", base)  # of a model that reads images, too

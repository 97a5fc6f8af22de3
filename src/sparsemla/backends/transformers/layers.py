"""What an architecture defines about the attention of its models."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparsemla.backends.transformers.cache import BatchCache, ordinary_tensors
from sparsemla.backends.transformers.linear import LINEAR
from sparsemla.backends.transformers.projections import Absorbed, check_skipped
from sparsemla.backends.transformers.step import Step
from sparsemla.cache import PagedCache, slots_of
from sparsemla.explanation import explain
from sparsemla.formats import INDEX_FP8, CacheFormat, bf16_format, e4m3_format
from sparsemla.ops import dense_decode, indexer_topk, sparse_decode, sparse_prefill
from sparsemla.plan import Plan, plan_batch
from sparsemla.validation import check_integer

EXAMPLE_CONTEXT = 32768
"""Tokens before the one of :class:`Example`."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """Sizes of a decode step of one token, to name the kernels that it takes.

    Args:
        heads: of attention.
        width: number of rows to attend to; None for all rows.
        extra_width: of a second selection, from rows of the same format.
        has_sink: whether heads have sinks.
        index_heads: heads of the indexer; 0 without one.
        topk: what the indexer selects.
        ratio: tokens for which there is an index key.
    """

    heads: int
    width: int | None
    extra_width: int = 0
    has_sink: bool = False
    index_heads: int = 0
    topk: int = 0
    ratio: int = 1

    def run(
        self, rows: CacheFormat, keys: CacheFormat | None, page_size: int, device: torch.device
    ) -> None:
        """Select and attend; nothing is read, and all pages are the same one."""
        ids = functools.partial(torch.zeros, dtype=torch.int32, device=device)
        new = functools.partial(torch.empty, device=device)
        page_table, lens = ids(1, -(-EXAMPLE_CONTEXT // page_size)), ids(1)
        if keys is not None and self.index_heads:
            indexer_topk(
                new(1, self.index_heads, keys.head_dim, dtype=keys.query_dtype),
                new(1, self.index_heads, dtype=torch.float32),
                PagedCache.allocate(keys, 1, page_size, device=device),
                ids(2),
                lens,
                page_table,
                topk=self.topk,
                ratio=self.ratio,
            )
        q = new(1, 1, self.heads, rows.head_dim, dtype=torch.bfloat16)
        cache = PagedCache.allocate(rows, 1, page_size, device=device)
        options: dict[str, Any] = {"softmax_scale": 1.0}
        if self.has_sink:
            options["attn_sink"] = new(self.heads, dtype=torch.float32)
        if self.extra_width:
            options |= {"extra_cache": cache, "extra_topk_indices": ids(1, 1, self.extra_width)}
        if self.width is None:
            dense_decode(q, cache, page_table, lens, **options)
        else:
            sparse_decode(q, cache, ids(1, 1, self.width), **options)


class Layers(ABC):
    """The attention modules of a model, with their own cache, steps and forward.

    Args:
        base: the model without a head.
        cache_format, index_format: formats of rows and of index keys; None for the defaults.
        page_size: rows of a page.
        record_selections: whether :attr:`Step.selections` is filled.

    Attributes:
        modules: the attention modules, keyed by the layer's index; of a layer with several, each
            counts as a layer.
        paths: the names of these modules in the model.
        linear: for each layer, whether its attention is linear and stays that of transformers;
            empty if none is.
        absorbed: by the layer's index, the matrices that attention multiplies with.
        gaps: whether ``position_ids`` may leave numbers out between the tokens of a row.
        records: whether :attr:`Step.selections` is filled.

    Raises:
        TypeError, ValueError: the model or an argument is not served.
    """

    gaps = True

    def __init__(
        self,
        base: PreTrainedModel,
        *,
        cache_format: CacheFormat | None,
        index_format: CacheFormat | None,
        page_size: int,
        record_selections: bool,
    ) -> None:
        kinds = getattr(base.config, "layer_types", None) or []
        self.linear = [kind == LINEAR for kind in kinds] if LINEAR in kinds else []
        self.modules: dict[int, Any] = {}
        self.paths: dict[int, str] = {}
        for place, layer in enumerate(cast(Any, base).layers):
            if place < len(self.linear) and self.linear[place]:
                continue
            attention = layer.self_attn
            several = isinstance(attention, nn.ModuleList)
            for part, module in enumerate(attention if several else [attention]):
                layer_idx = place * len(attention) + part if several else place
                self.modules[layer_idx] = module
                self.paths[layer_idx] = path_of(place) + (f".{part}" if several else "")
        if not self.modules:
            got = "linear ones only" if len(cast(Any, base).layers) else "none"
            raise ValueError(f"model must have a layer with sparse attention, got {got}")
        for layer_idx, module in self.modules.items():
            check_device(layer_idx, module)
        check_integer("page_size", page_size, 1)
        self.page_size = page_size
        self.records = record_selections
        self._base: Any = base
        self.absorbed = {
            layer_idx: self.absorb(self.paths[layer_idx], module)
            for layer_idx, module in self.modules.items()
        }
        self._formats = self._prepare(cache_format, index_format)

    @property
    def formats(self) -> tuple[CacheFormat, CacheFormat | None]:
        """Of rows, and of index keys; None without an indexer."""
        return self._formats

    @property
    def row_names(self) -> list[str]:
        """The formats of rows, the first one's before others that some layers have."""
        return [self._formats[0].name]

    @property
    def packs(self) -> bool:
        """Whether a row may be several sequences: states of linear attention would pass on."""
        return not self.linear

    @property
    def devices(self) -> list[str]:
        """The devices of the layers, sorted."""
        return sorted({str(each.weights[0].data.device) for each in self.absorbed.values()})

    @abstractmethod
    def example(self) -> Example:
        """A decode step of one token in a layer with an indexer, if the model has one."""

    def kernels(self) -> dict[str, str]:
        """By op, the kernels of attention and selection in :meth:`example`."""
        device = torch.device(self.devices[0])
        return explain(self.example().run, *self._formats, self.page_size, device).kernels

    @abstractmethod
    def _prepare(
        self, cache_format: CacheFormat | None, index_format: CacheFormat | None
    ) -> tuple[CacheFormat, CacheFormat | None]:
        """Read and check the model's configuration; the formats of rows and of index keys."""

    @abstractmethod
    def absorb(self, path: str, module: nn.Module) -> Absorbed:
        """The matrices of a layer's attention module; ``path`` is its name in the model."""

    @abstractmethod
    def skipped(self, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """Parts of a layer's attention module whose forward is not called, with their names."""

    def update(self, *, anew: bool) -> None:
        """Take over the model's weights, and refuse modules that do more than their weights tell.

        Compiled code skips this without ``anew``: a compiled step multiplies with the matrices of
        the latest call.

        Args:
            anew: look at all values, not only where autograd counted a write.

        Raises:
            ValueError: hooks, biases or other forwards of modules whose parameters are read.
        """
        if anew:
            self._update_all()
        elif not torch.compiler.is_compiling():
            self._update(anew=False)

    @torch.compiler.disable
    def _update_all(self) -> None:
        self._update(anew=True)

    @ordinary_tensors
    def _update(self, *, anew: bool) -> None:
        for layer_idx, module in self.modules.items():
            for name, part in self.skipped(module):
                check_skipped(self.paths[layer_idx], name, part)
            self.absorbed[layer_idx].update(anew=anew)

    @abstractmethod
    def new_cache(self, batch_size: int, max_length: int | None = None) -> BatchCache:
        """An empty cache, see :meth:`PagedAttention.new_cache`."""

    def mask(self, new: Tensor) -> Tensor | dict[str, Tensor]:
        """The mask that transformers gives to attention modules, for new columns ``[B, S]``."""
        if self.linear:
            return dict.fromkeys(self._base.config.layer_types, new)
        # transformers passes on a mask with four dimensions and builds none.
        return torch.empty(0, 0, 0, 0, device="cpu")

    @abstractmethod
    def packed_step(self, cache: BatchCache, new: Tensor) -> Step:
        """A step over the real columns of ``new [B, S]``, planned on the host."""

    @abstractmethod
    def decode_step(self, cache: BatchCache, new: Tensor) -> Step:
        """A step over one column ``new [B, 1]``; the next real token overwrites padding's slot."""

    @abstractmethod
    def attend(
        self,
        layer_idx: int,
        hidden_states: Tensor,
        step: Step,
        given: Mapping[str, Any],
    ) -> tuple[Tensor | None, ...]:
        """What the forward of a layer's module returns, the output ``[B, S, hidden]`` first.

        ``given`` are the keyword arguments of the forward.
        """


def plan_columns(
    cache: BatchCache, new: Tensor, page_table: Tensor, page_size: int
) -> tuple[Plan, Tensor | None]:
    """The plan of the real columns of ``new [B, S]``, and their indices; None for all columns."""
    new = new.cpu()
    query_lens = new.sum(1)
    plan = plan_batch(
        query_lens,
        cache.lengths.cpu() + query_lens,
        page_table,
        page_size=page_size,
        workspace_rows=None,
        require_uniform=False,
    )
    return plan, None if new.all() else new.flatten().nonzero()[:, 0].to(page_table.device)


def plan_column(cache: BatchCache, new: Tensor, page_table: Tensor, page_size: int) -> Plan:
    """The plan of a decode step over one column ``new [B, 1]``, without a look at the lengths."""
    positions, request_ids = cache.lengths.long(), cache.rows[:-1]
    return Plan(
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
        page_size=page_size,
        input_row_offsets=cache.rows,
        seq_lens=cache.lengths + new[:, 0],
        page_table=page_table,
        positions=positions,
        slot_mapping=slots_of(page_table, request_ids, positions, page_size),
        request_ids=request_ids,
        prefill_request_ids=None,
        workspace_starts=None,
        prefill_chunks=(),
    )


def attend_to(
    step: Step,
    q: Tensor,
    rows: PagedCache,
    slots: Tensor,
    *,
    extra_topk_indices: Tensor | None = None,
    **options: Any,  # noqa: ANN401 - passed on
) -> Tensor:
    """Attention ``[T, H, L]`` of a step's queries to the rows in slots ``[T, K]``."""
    if not step.decodes:
        options["extra_topk_indices"] = extra_topk_indices
        return sparse_prefill(q, rows, slots, **options)[0]
    if extra_topk_indices is not None:  # each token is a request of its own
        extra_topk_indices = extra_topk_indices[:, None]
    options["extra_topk_indices"] = extra_topk_indices
    return sparse_decode(q[:, None], rows, slots[:, None], **options)[0][:, 0]


def path_of(layer_idx: int) -> str:
    """The name of a layer's attention module in the base model."""
    return f"layers.{layer_idx}.self_attn"


def check_device(layer_idx: int, attention: nn.Module) -> None:
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


def check_format(name: str, format: object, head_dim: int, value_dim: int) -> None:
    """Refuse a format of other sizes than the model's."""
    if not isinstance(format, CacheFormat):
        raise TypeError(f"{name} must be a CacheFormat, got {type(format).__name__}")
    if (format.head_dim, format.value_dim) != (head_dim, value_dim):
        raise ValueError(
            f"{name} must have head_dim {head_dim} and value_dim {value_dim} for this model, "
            f"got {format.name}"
        )


def index_format_of(
    format: CacheFormat | None, dim: int, rope_dim: int, cache_format: CacheFormat
) -> CacheFormat:
    """The checked format of index keys; the default is quantised if ``cache_format`` is."""
    if dim < rope_dim:
        raise ValueError(
            f"model must have an index_head_dim of at least {rope_dim}, its qk_rope_head_dim, "
            f"got {dim}"
        )
    if format is None and cache_format.fp8_dim == 0:
        format = bf16_format(dim)
    elif format is None:
        format = INDEX_FP8 if dim == INDEX_FP8.head_dim else e4m3_format(dim, dim, dim)
    check_format("index_format", format, dim, dim)
    if not format.holds_index_keys:
        raise ValueError(
            f"index_format must have one dtype, and at most one scale a row or MXFP4, "
            f"got {format.name}"
        )
    return format

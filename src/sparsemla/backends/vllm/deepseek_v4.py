"""DeepSeek-V4 in vLLM with the attention, the pooling and the indexer of this package.

vLLM's models of DeepSeek-V4 choose their class of attention themselves and ask no backend. The
models below exchange this choice, and the class of the compressors, if the attention backend is
``CUSTOM``. Projections, caches and their groups, the metadata of a step, streams and graphs stay
vLLM's. Exchanged are four things that a layer does between its projections:

- the write of raw rows, with the norm of query heads (:func:`fused_rope_rmsnorm_quant`),
- the compressors, which pool entries and index keys (:func:`pool_windows`, on vLLM's state pages),
- the indexer (:func:`prepare_index_queries`, :func:`indexer_topk`),
- attention (:func:`sparse_decode`, :func:`sparse_prefill`) and the first output projection
  (:func:`project_groups`).

The tokens that DSpark drafts together see each other: vLLM's metadata lists the rows before their
block and all rows of the block for each of them, which is a list like any other here.

Prefills read the FP8 caches in place, or first convert the rows that they see to bfloat16 if that
is faster. Heads are not padded, and DeepGEMM, FlashMLA and CuTe DSL are not called.

On GPUs without DeepGEMM the hyper-connections of the first layer stay vLLM's, too, but by the
kernels of the other layers (:func:`first_streams`).
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
from vllm.models import deepseek_v4
from vllm.models.deepseek_v4 import attention
from vllm.models.deepseek_v4.compressor import (
    CompressorBackend,
    CompressorMetadata,
    CompressorMetadataBuilder,
    DeepseekCompressor,
)
from vllm.models.deepseek_v4.nvidia import dspark, model
from vllm.models.deepseek_v4.nvidia.flashmla import (
    DeepseekSparseSWAFlashMLABackend,
    DeepseekSparseSWAFlashMLAMetadataBuilder,
)
from vllm.models.deepseek_v4.sparse_mla import (
    DeepseekV4FlashMLABackend,
    DeepseekV4FlashMLAMetadata,
)
from vllm.platforms.interface import DeviceCapability
from vllm.utils.deep_gemm import is_deep_gemm_supported
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.compressor_utils import get_dspark_swa_index_width
from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend, dsa_indexer_uses_fp4
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from sparsemla import (
    FP8_584,
    INDEX_FP8,
    PagedCache,
    Pooling,
    WindowState,
    fused_rope_rmsnorm_quant,
    pool_windows,
    prepare_index_queries,
    sparse_decode,
)
from sparsemla.backends.vllm import settings, surface, windows
from sparsemla.backends.vllm.attention import decode_workspace
from sparsemla.backends.vllm.indexer import (
    EntryMetadataBuilder,
    IndexerBackend,
    reserve_memory,
    select_keys,
)
from sparsemla.backends.vllm.projection import GroupProjection, update_projections
from sparsemla.backends.vllm.warmup import register_layers
from sparsemla.backends.vllm.windows import WindowBuilder, WindowedAttention, WindowMetadata

REPLACED = ("vllm.models.deepseek_v4.common.ops.", "vllm.models.deepseek_v4.nvidia.ops.")
"""Modules of vLLM's kernels that no exchanged layer calls, and that some GPUs cannot compile."""


@dataclass
class StateMetadata(CompressorMetadata):
    """Where a compressor keeps the rows of a step.

    Attributes:
        request_ids: int32 ``[T]``, the request of each token; -1 where nothing may be written.
        query_start_loc: int32 ``[B + 1]``, prefix sums of the query lengths.
    """

    request_ids: Tensor | None = None
    query_start_loc: Tensor | None = None


class StateMetadataBuilder(CompressorMetadataBuilder):
    """vLLM's metadata of a compressor's state, with the requests whose rows may be written."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on to vLLM
        super().__init__(*args, **kwargs)
        self.request_ids = torch.empty_like(self.token_to_req_indices)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> StateMetadata:
        """The metadata of one step."""
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        slots = found.slot_mapping
        request_ids = self.request_ids[: len(slots)]
        self.request_ids[len(slots) :].fill_(-1)  # a captured graph may have more tokens
        # Of a dummy batch the pages may be those of real requests; only its slots are -1.
        request_ids.copy_(found.token_to_req_indices[: len(slots)].masked_fill(slots < 0, -1))
        return StateMetadata(
            **vars(found),
            request_ids=request_ids,
            query_start_loc=common_attn_metadata.query_start_loc,
        )


class StateBackend(CompressorBackend):
    """vLLM's backend of a compressor's state, with :class:`StateMetadataBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[StateMetadataBuilder]:
        """The class that builds the metadata of each step."""
        return StateMetadataBuilder


class Compressor(DeepseekCompressor):
    """vLLM's compressor of entries or index keys, with :func:`sparsemla.pool_windows`.

    Projected rows are kept on the pages of vLLM's state cache, in its layout.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        compress_ratio: int,
        hidden_size: int,
        head_dim: int,
        rotate: bool = False,
        prefix: str = "",
        k_cache_prefix: str = "",
        use_fp4_cache: bool = False,
    ) -> None:
        super().__init__(
            vllm_config,
            compress_ratio,
            hidden_size,
            head_dim,
            rotate,
            prefix,
            k_cache_prefix,
            use_fp4_cache,
        )
        self.state_cache.get_attn_backend = lambda: StateBackend
        self.pooling = Pooling(compress_ratio, overlap=self.overlap)
        self.format = FP8_584 if head_dim == FP8_584.head_dim else INDEX_FP8

    def forward(self, kv_score: Tensor, positions: Tensor, rotary_emb: RotaryEmbeddingBase) -> None:
        """Keep the rows of a step, and write what its tokens complete.

        Args:
            kv_score: float32 ``[T, 2 W]``, values and gates of each token, without the bias.
            positions: int64 ``[T]``.
            rotary_emb: vLLM's rotary embedding of entries.
        """
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # vLLM profiles a step without a batch
            return
        state = metadata[self.state_cache.prefix]
        slots = metadata[self.k_cache_prefix].slot_mapping
        tokens = min(len(slots), len(state.request_ids))  # later rows are padding
        values, gates = kv_score[:tokens].chunk(2, dim=-1)
        pool_windows(
            values,
            gates,
            self.norm.weight,
            rotary_emb.cos_sin_cache,
            WindowState(self.state_cache.kv_cache.unflatten(-1, (2, -1))),
            PagedCache(self._static_forward_context[self.k_cache_prefix].kv_cache, self.format),
            pooling=self.pooling,
            gate_bias=self.ape,
            positions=positions[:tokens],
            request_ids=state.request_ids[:tokens],
            input_row_offsets=state.query_start_loc,
            ring_ids=state.block_table,
            slot_mapping=slots[:tokens],
            eps=self.rms_norm_eps,
        )


class IndexBackend(IndexerBackend, DeepseekV4IndexerBackend):
    """vLLM's backend of DeepSeek-V4's index keys, with :class:`EntryMetadataBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[EntryMetadataBuilder]:
        """The class that builds the metadata of each step."""
        return EntryMetadataBuilder


class IndexCache(attention.DeepseekV4IndexerCache):
    """vLLM's cache of index keys, with the metadata of this package's indexer."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend that builds the metadata of each step."""
        return IndexBackend


class Selection(nn.Module):
    """Scores and exact top-k of index keys, in the place of vLLM's ``SparseAttnIndexer``.

    It takes the arguments of that class, whose constructor requires DeepGEMM.

    Args:
        k_cache: the index keys.
        quant_block_size, scale_fmt, head_dim, max_model_len, max_total_seq_len: ignored.
        topk_tokens: number of entries that a token selects.
        topk_indices_buffer: int32 ``[max tokens, topk_tokens]``, written.
        skip_k_cache_insert, use_fp4_cache: ignored; the compressor writes the keys.
        compress_ratio: tokens of an entry.
    """

    def __init__(
        self,
        k_cache: IndexCache,
        quant_block_size: int,
        scale_fmt: str,
        topk_tokens: int,
        head_dim: int,
        max_model_len: int,
        max_total_seq_len: int,
        topk_indices_buffer: Tensor,
        skip_k_cache_insert: bool,
        use_fp4_cache: bool,
        compress_ratio: int,
    ) -> None:
        super().__init__()
        self.k_cache, self.topk_tokens, self.ratio = k_cache, topk_tokens, compress_ratio
        self.topk_indices_buffer = topk_indices_buffer

    def forward(self, hidden_states: Tensor, q: Tensor, k: None, weights: Tensor) -> Tensor:
        """Select entries for the tokens of a step.

        Args:
            hidden_states: ignored.
            q: e4m3 ``[T, H, 128]``, index queries.
            k: ignored.
            weights: float32 ``[T, H]``, with the scales of the queries.

        Returns:
            The buffer of selections; its first T rows are new.
        """
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            reserve_memory(q, self.topk_tokens)
        else:
            select_keys(
                q,
                weights,
                PagedCache(self.k_cache.kv_cache, INDEX_FP8),
                metadata[self.k_cache.prefix],
                self.topk_tokens,
                self.topk_indices_buffer,
                ratio=self.ratio,
            )
        return self.topk_indices_buffer


class Indexer(attention.DeepseekV4Indexer):
    """vLLM's indexer of DeepSeek-V4 with this package's queries, keys and selection.

    While all entries of a step fit into a selection, vLLM's class fills in all of them.
    """

    def _get_cache_cls(self) -> type[IndexCache]:
        return IndexCache

    def _get_compressor_cls(self) -> type[Compressor]:
        return Compressor

    def _get_attn_cls(self) -> type[Selection]:
        return Selection

    def _q_rope_quant(
        self,
        positions: Tensor,
        q: Tensor,
        rotary_emb: RotaryEmbeddingBase,
        indexer_weights: Tensor,
    ) -> tuple[Tensor, Tensor]:
        return prepare_index_queries(
            q,
            indexer_weights,
            rotary_emb.cos_sin_cache,
            positions=positions,
            format=INDEX_FP8,
            interleaved=True,
            rope_first=False,
        )


class CompressedBackend(DeepseekV4FlashMLABackend):
    """vLLM's backend of entries: their metadata, and the capabilities of this package."""

    @staticmethod
    def get_name() -> str:
        """The name of the backend in vLLM's registry."""
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Whether the GPU is sm_80 or newer, as the ``triton`` tier needs."""
        return capability.major >= 8


class WindowMetadataBuilder(WindowBuilder, DeepseekSparseSWAFlashMLAMetadataBuilder):
    """vLLM's metadata of raw rows, with conversions, and without a schedule of FlashMLA."""


class WindowBackend(DeepseekSparseSWAFlashMLABackend):
    """vLLM's backend of raw rows, with :class:`WindowMetadataBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[WindowMetadataBuilder]:
        """The class that builds the metadata of each step."""
        return WindowMetadataBuilder


class SparseMLAV4Attention(WindowedAttention, attention.DeepseekV4Attention):
    """A layer of DeepSeek-V4: vLLM's projections and caches, this package's kernels."""

    backend_cls = CompressedBackend
    swa_backend_cls = WindowBackend

    def __init__(
        self,
        vllm_config: VllmConfig,
        prefix: str,
        topk_indices_buffer: Tensor | None = None,
        aux_stream_list: list[torch.cuda.Stream] | None = None,
    ) -> None:
        registry = JitWarmupRegistry(vllm_config)
        with registry.activate():
            super().__init__(vllm_config, prefix, topk_indices_buffer, aux_stream_list)
        for kernel, registrations in registry._registrations.items():
            if not type(kernel).__module__.startswith(REPLACED):
                for arguments, options in registrations:
                    JitWarmupRegistry.register(kernel, *arguments, **options)
        self.group_projection = GroupProjection.of(self, prefix)
        self.decode_rows = self.window_size
        selects = self.compress_ratio == 4
        self.reserve(
            vllm_config,
            ratio=self.compress_ratio if self.compress_ratio > 1 else 0,
            topk=vllm_config.model_config.hf_text_config.index_topk if selects else None,
            format=FP8_584,
        )
        register_layers(type(self))

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """The number of heads: none are added."""
        return num_heads

    def _get_indexer_cls(self, vllm_config: VllmConfig) -> type[Indexer]:
        return Indexer

    def _split_qkv_and_norm(self, qr_kv: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """The row is not normalised: that is part of its write."""
        qr, scale, _ = super()._split_qkv_and_norm(qr_kv)
        return qr, scale, qr_kv[:, self.q_lora_rank :]

    def _fused_qnorm_rope_kv_insert(
        self,
        q: Tensor,
        kv: Tensor,
        positions: Tensor,
        attn_metadata: Any,  # noqa: ANN401 - of vLLM's forward context
    ) -> Tensor:
        """Normalise and rotate the queries in place, and write the raw rows of a step."""
        if isinstance(attn_metadata, dict):
            slots = attn_metadata[self.swa_cache_layer.prefix].slot_mapping
            tokens = slice(len(slots))  # later rows are padding
            self._write(q[tokens], kv[tokens], positions[tokens], slots)
        return q

    def write_context(self, kv: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Normalise, rotate and write raw rows of tokens that have no queries here.

        Args:
            kv: ``[T, 512]``, projected.
            positions: integers ``[T]``.
            slots: integers ``[T]``, negative for none.
        """
        self._write(kv.new_empty(len(kv), 1, self.head_dim), kv, positions, slots)

    def _write(self, q: Tensor, kv: Tensor, positions: Tensor, slots: Tensor) -> None:
        """Normalise and rotate queries ``[T, H, 512]`` in place; write raw rows ``[T, 512]``."""
        fused_rope_rmsnorm_quant(
            q,
            kv,
            self.rotary_emb.cos_sin_cache,
            self.kv_norm.weight,
            PagedCache(self.swa_cache_layer.kv_cache, FP8_584),
            positions=positions,
            slot_mapping=slots,
            eps=self.eps,
            query_norm=True,
            out=q,
        )

    def forward_mqa(self, q: Tensor, kv: Tensor, positions: Tensor, output: Tensor) -> None:
        """Attention of a step over the window and over entries.

        Args:
            q: ``[T, H, 512]`` bfloat16, decodes first.
            kv: ignored, in the cache already.
            positions: int64 ``[T]``.
            output: ``[T, H, 512]``, written up to the padding.
        """
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            decode_workspace(self.workspace_bytes)
            output.zero_()
            return
        window = metadata[self.swa_cache_layer.prefix]
        entries = metadata.get(self.prefix)
        raw = PagedCache(self.swa_cache_layer.kv_cache, FP8_584)
        cache = None if entries is None else PagedCache(self.kv_cache, FP8_584)
        shared = {"softmax_scale": self.scale, "attn_sink": self.attn_sink}
        self.attend_prefills(q, positions, raw, window, cache, entries, output, **shared)
        decodes = slice(window.num_decode_tokens)
        if decodes.stop:
            slots = lengths = None
            if entries is not None and self.compress_ratio == 128:
                slots = entries.c128a_global_decode_topk_indices
                lengths = entries.c128a_decode_topk_lens
            elif cache is not None:
                slots = self.entry_slots(decodes, cache, entries, window)[:, None]
            # Each token of a speculative decode has its own rows: pass it as a separate request.
            sparse_decode(
                q[decodes, None],
                raw,
                window.decode_swa_indices,
                topk_lengths=window.decode_swa_lens,
                extra_cache=cache,
                extra_topk_indices=slots,
                extra_topk_lengths=lengths,
                workspace=decode_workspace(self.workspace_bytes),
                out=output[decodes, None],
                **shared,
            )

    def chosen_entries(
        self, tokens: slice, entries: DeepseekV4FlashMLAMetadata, window: WindowMetadata
    ) -> Tensor:
        """Entries ``[T, K]`` of their requests that tokens attend to; -1 behind the last."""
        if self.compress_ratio == 128:
            first = window.num_decode_tokens
            return entries.c128a_prefill_topk_indices[tokens.start - first : tokens.stop - first]
        return super().chosen_entries(tokens, entries, window)

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Read the first output projection again: vLLM calls this after each load of weights."""
        self.group_projection.refresh()

    def _o_proj(self, o: Tensor, positions: Tensor) -> Tensor:
        groups = self.group_projection(o, positions, self.rotary_emb.cos_sin_cache)
        return self.wo_b(groups)


class WithAttention(nn.Module):
    """A model of vLLM, built with this package's layers if the attention backend is ``CUSTOM``.

    Raises:
        ValueError: the configuration is not supported.
        RuntimeError: something of vLLM does not fit, or one of its classes was not exchanged.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if vllm_config.attention_config.backend != AttentionBackendEnum.CUSTOM:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            return
        surface.check(surface.DEEPSEEK_V4, sys.modules[__name__], windows)
        refuse(vllm_config, drafts_blocks=isinstance(self, DSparkDraft))
        if not is_deep_gemm_supported():
            model.mhc_pre_broadcast_tilelang = first_streams
        with exchanged():
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        check_layers(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load weights of a checkpoint, as vLLM's class does."""
        loaded: set[str] = super().load_weights(weights)  # type: ignore[misc]
        update_projections(self)
        return loaded


class DeepseekV4ForCausalLM(WithAttention, deepseek_v4.DeepseekV4ForCausalLM):
    """vLLM's class of DeepSeek-V4."""


class DeepSeekV4MTP(WithAttention, deepseek_v4.DeepSeekV4MTP):
    """Its layer for multi-token prediction."""


class DSparkDraft(WithAttention, dspark.DSparkDeepseekV4ForCausalLM):
    """Its layers for DSpark's drafts, whose raw rows come from the target's hidden states."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.is_ours = vllm_config.attention_config.backend == AttentionBackendEnum.CUSTOM
        if self.is_ours:
            model: Any = self.model
            count = vllm_config.speculative_config.num_speculative_tokens
            for layer in model.layers:
                rows = get_dspark_swa_index_width(layer.attn.window_size, count)
                layer.attn.decode_rows = rows

    def precompute_and_store_context_kv(
        self,
        context_states: Tensor,
        context_positions: Tensor,
        context_slot_mappings: list[Tensor | None] | None = None,
    ) -> None:
        """Write the raw rows of tokens that the target has computed, in every layer.

        Args:
            context_states: ``[T, hidden_size]``, combined from the target's layers.
            context_positions: integers ``[T]``.
            context_slot_mappings: slots of each layer; None while vLLM profiles.
        """
        if not self.is_ours:
            super().precompute_and_store_context_kv(
                context_states, context_positions, context_slot_mappings
            )
            return
        model: Any = self.model
        layers = model.layers
        rows = model.context_wkv_proj(context_states).unflatten(-1, (len(layers), -1))
        if context_slot_mappings is None:
            return
        for layer, kv, slots in zip(layers, rows.unbind(1), context_slot_mappings, strict=True):
            if slots is not None:
                layer.attn.write_context(kv, context_positions, slots)


def first_streams(
    residual: Tensor,
    fn: Tensor,
    *coefficients: Any,  # noqa: ANN401 - passed on to vLLM
    fn_broadcast: Tensor,
    **options: Any,  # noqa: ANN401 - passed on to vLLM
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What ``mhc_pre_broadcast_tilelang`` does for the first layer's hyper-connections.

    vLLM's function multiplies embeddings by sums over the streams, in a kernel of DeepGEMM that
    runs on sm_90, sm_100 and sm_120 only. Multiplied by each stream's weights, as in every other
    layer, they take the kernel of TileLang that vLLM has for other GPUs.
    """
    del fn_broadcast
    streams = residual[:, None].repeat(1, fn.shape[1] // residual.shape[1], 1)
    return streams, *model.mhc_pre_tilelang(streams, fn, *coefficients, **options)


@contextlib.contextmanager
def exchanged() -> Iterator[None]:
    """Exchange what vLLM's models build their layers from, as long as a model is built."""
    kept = model._select_dsv4_attn_cls, attention.DeepseekCompressor
    model._select_dsv4_attn_cls = lambda vllm_config: SparseMLAV4Attention
    attention.DeepseekCompressor = Compressor
    try:
        yield
    finally:
        model._select_dsv4_attn_cls, attention.DeepseekCompressor = kept


def check_layers(built: nn.Module) -> list[SparseMLAV4Attention]:
    """The layers of a model.

    Raises:
        RuntimeError: there is none, or a part of one is vLLM's.
    """
    return surface.check_layers(built, attention.DeepseekV4Attention, _parts)


def _parts(layer: attention.DeepseekV4Attention) -> Iterator[tuple[nn.Module, type]]:
    """What is exchanged in a layer, with the class that it must have."""
    yield layer, SparseMLAV4Attention
    if layer.compressor is not None:
        yield layer.compressor, Compressor
    if (indexer := layer.indexer) is not None:
        yield indexer, Indexer
        yield indexer.compressor, Compressor
        yield indexer.k_cache, IndexCache
        yield indexer.indexer_op, Selection


def refuse(config: VllmConfig, *, drafts_blocks: bool = False) -> None:
    """Raise ValueError for settings and models that these layers do not support.

    Args:
        config: vLLM's.
        drafts_blocks: the model is DSpark's, for which vLLM sets ``use_non_causal``.
    """
    text, speculative = config.model_config.hf_text_config, config.speculative_config
    ratios = set(getattr(text, "compress_rates", {}).values())
    settings.refuse_windowed(
        config,
        text,
        "DeepSeek-V4",
        {
            "indexer_kv_dtype must be fp8": dsa_indexer_uses_fp4(config),
            f"the model's compress_rates must be 4 and 128, got {sorted(ratios)}": not ratios
            <= {0, 1, 4, 128},
            "images are not supported": getattr(text, "vision_n_layers", 0) > 0,
            "DSpark's drafts need the attention backend CUSTOM, which they take from the model; "
            f"got {getattr(speculative, 'attention_backend', None)}": speculative is not None
            and speculative.use_dspark()
            and speculative.attention_backend not in (None, AttentionBackendEnum.CUSTOM),
            "use_non_causal must be off": config.attention_config.use_non_causal
            and not drafts_blocks,
        },
    )

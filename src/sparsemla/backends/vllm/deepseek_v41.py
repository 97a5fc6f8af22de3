"""DeepSeek-V4.1 in vLLM with the attention, the pooling and the indexer of this package.

Some layers own entries of one or two tokens, and layers behind them read these. Some layers select
entries, and layers behind them attend to the same ones. One selection also chooses blocks of index
keys, and later ones score no other keys: vLLM has kernels for that on sm_100 alone.

As in :mod:`sparsemla.backends.vllm.deepseek_v4`, projections, caches and their groups, the owners
of entries, the metadata of a step, streams and graphs stay vLLM's. Exchanged are

- the write of raw rows (:func:`fused_rope_rmsnorm_quant`, whose queries get no norm here),
- the compressors (:func:`pool_windows`) and the writes of entries and of the index keys that are
  projected from them (:func:`fused_rope_rmsnorm_quant`),
- the indexer (:func:`prepare_index_queries`, :func:`indexer_topk`, :func:`indexer_topk_blocks`,
  :func:`indexer_topk_of_blocks`),
- attention (:func:`sparse_decode`, :func:`sparse_prefill`) and the first output projection
  (:func:`project_groups`).

Prefills read the FP8 caches in place, or convert them first, as DeepSeek-V4's do. Window rows take
part in prefix caching: vLLM's replay of windows, which would compute them again, is off.
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
from vllm.models import deepseek_v41
from vllm.models.deepseek_v41 import attention
from vllm.models.deepseek_v41.compressor import (
    CompressorBackend,
    CompressorMetadata,
    CompressorMetadataBuilder,
    DeepseekCompressor,
)
from vllm.models.deepseek_v41.nvidia import model
from vllm.models.deepseek_v41.nvidia.flashmla import (
    DeepseekSparseSWAFlashMLABackend,
    DeepseekSparseSWAFlashMLAMetadataBuilder,
)
from vllm.models.deepseek_v41.sparse_mla import DeepseekV4FlashMLABackend
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.mla.indexer import DeepseekV41IndexerBackend, dsa_indexer_uses_fp4
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from sparsemla import (
    FP8_528,
    FP8_584,
    INDEX_FP8,
    PagedCache,
    Pooling,
    WindowState,
    fused_rope_rmsnorm_quant,
    indexer_topk,
    indexer_topk_blocks,
    indexer_topk_of_blocks,
    pool_windows,
    prepare_index_queries,
    sparse_decode,
)
from sparsemla.backends.vllm import settings, surface, windows
from sparsemla.backends.vllm.attention import decode_workspace
from sparsemla.backends.vllm.indexer import (
    EntryMetadataBuilder,
    IndexerBackend,
    IndexerMetadata,
    max_score_bytes,
    reserve_memory,
)
from sparsemla.backends.vllm.projection import GroupProjection, update_projections
from sparsemla.backends.vllm.warmup import register_shared_layers
from sparsemla.backends.vllm.windows import WindowBuilder, WindowedAttention
from sparsemla.pooling import NO_NORM


@dataclass
class RingMetadata(CompressorMetadata):
    """Where a compressor keeps the rows of open windows.

    Attributes:
        rings: int32 ``[B]``, the block of each request.
        request_ids: int32 ``[T]``, the request of each token; -1 where nothing may be written.
    """

    rings: Tensor | None = None
    request_ids: Tensor | None = None


class RingMetadataBuilder(CompressorMetadataBuilder):
    """vLLM's metadata of open windows, with the rings of requests whose rows may be written."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on to vLLM
        super().__init__(*args, **kwargs)
        self.rings = torch.empty_like(self.token_to_req_indices)
        self.request_ids = torch.empty_like(self.token_to_req_indices)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RingMetadata:
        """The metadata of one step."""
        found = super().build(common_prefix_len, common_attn_metadata, fast_build)
        blocks, slots = common_attn_metadata.block_table_tensor[:, 0], found.slot_mapping
        self.request_ids[len(slots) :].fill_(-1)  # a captured graph may have more tokens
        request_ids = self.request_ids[: len(slots)]
        # Slots are negative for padding, and for requests of a dummy batch, which have no ring.
        request_ids.copy_(found.token_to_req_indices[: len(slots)].masked_fill(slots < 0, -1))
        return RingMetadata(
            **vars(found),
            rings=self.rings[: len(blocks)].copy_(blocks),
            request_ids=request_ids,
        )


class RingBackend(CompressorBackend):
    """vLLM's backend of open windows, with :class:`RingMetadataBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[RingMetadataBuilder]:
        """The class that builds the metadata of each step."""
        return RingMetadataBuilder


class Compressor(DeepseekCompressor):
    """vLLM's compressor: latents of one or two tokens, from which entries and keys are made."""

    unrotated: Tensor
    no_norm: Tensor
    nowhere: Tensor

    def __init__(
        self,
        vllm_config: VllmConfig,
        compress_ratio: int,
        hidden_size: int,
        head_dim: int,
        rotate: bool = False,
        prefix: str = "",
        k_cache_prefix: str = "",
    ) -> None:
        super().__init__(
            vllm_config, compress_ratio, hidden_size, head_dim, rotate, prefix, k_cache_prefix
        )
        if self.state_cache is not None:
            self.state_cache.get_attn_backend = lambda: RingBackend
        self.pooling, weight = Pooling(compress_ratio), self.norm.weight
        self.max_positions = vllm_config.model_config.max_model_len + 1
        tokens, device = vllm_config.scheduler_config.max_num_batched_tokens, weight.device
        # Buffers, because sleep mode keeps those while it discards other memory. vLLM builds
        # models with another default dtype.
        made: dict[str, Any] = {"dtype": torch.float32, "device": device}
        row = torch.tensor([[1.0, 0.0]], **made).repeat_interleave(self.rope_head_dim // 2, 1)
        nowhere = torch.full((tokens,), -1, dtype=torch.int64, device=device)
        self.register_buffer("unrotated", row, persistent=False)
        self.register_buffer("no_norm", torch.full(weight.shape, NO_NORM**0.5, **made), False)
        self.register_buffer("nowhere", nowhere, persistent=False)

    def forward(self, kv_score: Tensor, positions: Tensor) -> Tensor | None:
        """The latents of windows that a step closes, and the rows of those that stay open.

        Args:
            kv_score: float32 ``[T, 512]``, or with gates behind the values ``[T, 1024]``.
            positions: int64 ``[T]``.

        Returns:
            bfloat16 ``[T, 512]``, normalised and not rotated: that of a window at its last token.
            None where vLLM profiles a step without a batch.
        """
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):
            return None
        weight, eps = self.norm.weight, self.rms_norm_eps
        if self.state_cache is None:
            return torch.rms_norm(kv_score, weight.shape, weight.float(), eps).bfloat16()
        ring = metadata[self.state_cache.prefix]
        tokens = len(ring.request_ids)  # later rows are padding
        latent = kv_score.new_empty(len(kv_score), self.head_dim, dtype=torch.bfloat16)
        values, gates = kv_score[:tokens].chunk(2, dim=-1)
        pool_windows(
            values,
            gates,
            weight,
            self.unrotated.expand(self.max_positions, -1),  # keys are projected first
            WindowState(self.state_cache.kv_cache.unflatten(-1, (2, -1))),
            self._entries(),
            pooling=self.pooling,
            positions=positions[:tokens],
            request_ids=ring.request_ids,
            input_row_offsets=ring.query_start_loc,
            ring_ids=ring.rings,
            slot_mapping=self.nowhere[:tokens],  # entries are written once they are rotated
            eps=eps,
            kv_out=latent[:tokens],
        )
        return latent

    def insert_cache(
        self, latent: Tensor | None, positions: Tensor, rotary_emb: RotaryEmbeddingBase
    ) -> None:
        """Rotate and write the entries of a step.

        Args:
            latent: ``[T, 512]`` of :meth:`forward`.
            positions: int64 ``[T]``.
            rotary_emb: vLLM's rotary embedding of entries.
        """
        if latent is None:
            return
        slots = get_forward_context().attn_metadata[self.k_cache_prefix].slot_mapping
        write_rows(
            latent,
            self.no_norm,
            self._entries(),
            rotary_emb,
            positions,
            slots,
            ratio=self.compress_ratio,
            eps=NO_NORM,
        )

    def _entries(self) -> PagedCache:
        layer: Any = self._static_forward_context[self.k_cache_prefix]
        return PagedCache(layer.kv_cache, layer.row_format)


def write_rows(
    rows: Tensor,
    weight: Tensor,
    cache: PagedCache,
    rotary: RotaryEmbeddingBase,
    positions: Tensor,
    slots: Tensor,
    *,
    ratio: int,
    eps: float,
) -> None:
    """Normalise rows of windows, rotate them like their first token, and write them.

    Args:
        rows: ``[T, D]`` bfloat16, that of a window at its last token.
        weight: ``[D]`` of the norm.
        cache: where they go.
        rotary: vLLM's rotary embedding.
        positions: int64 ``[T]``.
        slots: integers ``[<= T]``; negative for none, as for all but the last token of a window.
        ratio: tokens of a window.
        eps: of the norm.
    """
    tokens = slice(len(slots))  # later rows are padding
    positions = positions[tokens]
    fused_rope_rmsnorm_quant(
        rows.new_empty(len(positions), 0, rotary.rotary_dim),
        rows[tokens],
        rotary.cos_sin_cache,
        weight,
        cache,
        positions=positions if ratio == 1 else positions - positions % ratio,
        slot_mapping=slots,
        eps=eps,
    )


class UndividedMetadataBuilder(EntryMetadataBuilder):
    """Builds metadata of index keys, where each rank selects for all rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on to vLLM
        super().__init__(*args, **kwargs)
        self.rule = None


class IndexBackend(IndexerBackend, DeepseekV41IndexerBackend):
    """vLLM's backend of DeepSeek-V4.1's index keys, with :class:`UndividedMetadataBuilder`."""

    @classmethod
    def supports_pcp(cls) -> bool:
        """No: the keys of other ranks are not gathered."""
        return False

    @staticmethod
    def get_builder_cls() -> type[UndividedMetadataBuilder]:
        """The class that builds the metadata of each step."""
        return UndividedMetadataBuilder


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
        skip_k_cache_insert, use_fp4_cache: ignored; the indexer writes the keys.
        compress_ratio: tokens of an entry.
        candidate_blocks: int32 ``[max tokens, blocks]``, if this layer chooses blocks of keys or
            selects among them.
        candidate_block_size: keys of a block.
        candidate_write: this layer chooses them.
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
        candidate_blocks: Tensor | None,
        candidate_block_size: int,
        candidate_write: bool,
    ) -> None:
        super().__init__()
        self.k_cache, self.topk_tokens, self.ratio = k_cache, topk_tokens, compress_ratio
        self.topk_indices_buffer = topk_indices_buffer
        self.blocks, self.block_size = candidate_blocks, candidate_block_size
        self.chooses = candidate_write

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
            self._select(q, weights, metadata[self.k_cache.prefix])
        return self.topk_indices_buffer

    def _select(self, q: Tensor, weights: Tensor, metadata: IndexerMetadata) -> None:
        cache = PagedCache(self.k_cache.kv_cache, INDEX_FP8)
        page_table = metadata.block_table
        if not q.is_cuda or not torch.cuda.is_current_stream_capturing():
            # Not in a capture: the graph will be replayed with longer requests.
            columns = -(-metadata.max_seq_len // (self.ratio * cache.page_size))
            page_table = page_table[:, :columns]
        request = metadata.query_start_loc, metadata.seq_lens, page_table
        shared: dict[str, Any] = {
            "topk": self.topk_tokens,
            "ratio": self.ratio,
            "max_workspace_bytes": max_score_bytes(),
            "out": self.topk_indices_buffer[: len(q)],
        }
        if self.blocks is None:
            indexer_topk(q, weights, cache, *request, **shared)
            return
        blocks = self.blocks[: len(q)]
        if self.chooses:
            indexer_topk_blocks(
                q,
                weights,
                cache,
                *request,
                topk_blocks=blocks.shape[1],
                block_size=self.block_size,
                blocks_out=blocks,
                **shared,
            )
        else:
            indexer_topk_of_blocks(
                q, weights, cache, *request, blocks, block_size=self.block_size, **shared
            )


class Indexer(attention.DeepseekV4Indexer):
    """vLLM's indexer of DeepSeek-V4.1 with this package's queries, keys and selection.

    While all entries of a step fit into a selection, vLLM's class fills in all of them.
    """

    attn_cls = Selection

    def _produce_k(
        self, latent: Tensor | None, positions: Tensor, rotary_emb: RotaryEmbeddingBase
    ) -> None:
        """Project, normalise, rotate and write index keys of the latents of a step."""
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict) or latent is None:
            return
        write_rows(
            self.wk(latent)[0],
            self.k_norm.weight,
            PagedCache(self.k_cache.kv_cache, INDEX_FP8),
            rotary_emb,
            positions,
            metadata[self.k_cache.prefix].slot_mapping,
            ratio=self.compress_ratio,
            eps=self.k_norm.variance_epsilon,
        )

    def forward_q(
        self,
        qr: Any,  # noqa: ANN401 - a tensor, or codes with scales
        qr_scale: Tensor | None,
        indexer_weights: Tensor,
        positions: Tensor,
        rotary_emb: RotaryEmbeddingBase,
    ) -> tuple[Tensor, None, Tensor]:
        """Index queries e4m3 ``[T, H, 128]``, and the weights of their heads with the scales."""
        q, weights = prepare_index_queries(
            self._wq_b_proj(qr, qr_scale).view(-1, self.n_head, self.head_dim),
            indexer_weights,
            rotary_emb.cos_sin_cache,
            positions=positions,
            format=INDEX_FP8,
            interleaved=True,
            rope_first=False,
        )
        return q, None, weights


class SharedEntriesBackend(DeepseekV4FlashMLABackend):
    """vLLM's backend of entries: their metadata, and the capabilities of this package."""

    @classmethod
    def supports_pcp(cls) -> bool:
        """No: the rows of other ranks are not gathered."""
        return False

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

    @classmethod
    def supports_pcp(cls) -> bool:
        """No: the rows of other ranks are not gathered."""
        return False

    @staticmethod
    def get_builder_cls() -> type[WindowMetadataBuilder]:
        """The class that builds the metadata of each step."""
        return WindowMetadataBuilder


class SparseMLAV41Attention(WindowedAttention, attention.DeepseekV4Attention):
    """A layer of DeepSeek-V4.1: vLLM's projections and caches, this package's kernels."""

    backend_cls = SharedEntriesBackend
    swa_backend_cls = WindowBackend

    def __init__(
        self,
        vllm_config: VllmConfig,
        prefix: str,
        topk_indices_buffer: Tensor | None = None,
        aux_stream_list: list[torch.cuda.Stream] | None = None,
        candidate_block_buffer: Tensor | None = None,
    ) -> None:
        super().__init__(
            vllm_config, prefix, topk_indices_buffer, aux_stream_list, candidate_block_buffer
        )
        # vLLM chooses by the GPU, for raw rows and for entries.
        self.row_format = FP8_528 if self.kv_mxfp8 else FP8_584
        if self._o_proj_block_size == 32:  # MXFP8
            self.wo_a.is_bmm = False  # or DeepGEMM's kernel on sm_100 takes the weight apart
        self.group_projection = GroupProjection.of(self, prefix)
        self.reserve(
            vllm_config,
            ratio=self.compress_ratio,
            topk=vllm_config.model_config.hf_config.index_topk if self.compress_ratio else None,
            format=self.row_format,
        )
        register_shared_layers(type(self))

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        """The number of heads: none are added."""
        return num_heads

    def _indexer_cls(self, k_cache: IndexCache | None) -> type[Indexer]:
        return Indexer

    def _split_qkv_and_norm(self, qr_kv: Tensor) -> tuple[Any, Tensor | None, Tensor]:
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
        """Rotate the queries in place, and normalise, rotate and write the raw rows of a step."""
        if isinstance(attn_metadata, dict):
            slots = attn_metadata[self.swa_cache_layer.prefix].slot_mapping
            tokens = slice(len(slots))  # later rows are padding
            turning = q[tokens, :, -self.rope_head_dim :]
            fused_rope_rmsnorm_quant(
                turning,
                kv[tokens],
                self.rotary_emb.cos_sin_cache,
                self.kv_norm.weight,
                PagedCache(self.swa_cache_layer.kv_cache, self.row_format),
                positions=positions[tokens],
                slot_mapping=slots,
                eps=self.eps,
                out=turning,
            )
        return q

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
        entries = metadata.get(self.compressed_cache_prefix)
        cache = None
        if entries is not None:
            cache = PagedCache(self._compressed_kv_cache(), self.row_format)
        raw = PagedCache(self.swa_cache_layer.kv_cache, self.row_format)
        shared = {"softmax_scale": self.scale, "attn_sink": self.attn_sink}
        self.attend_prefills(q, positions, raw, window, cache, entries, output, **shared)
        decodes = slice(window.num_decode_tokens)
        if decodes.stop:
            slots = None
            if cache is not None:
                slots = self.entry_slots(decodes, cache, entries, window)[:, None]
            # Each token of a speculative decode has its own rows: pass it as a separate request.
            sparse_decode(
                q[decodes, None],
                raw,
                window.decode_swa_indices,
                topk_lengths=window.decode_swa_lens,
                extra_cache=cache,
                extra_topk_indices=slots,
                workspace=decode_workspace(self.workspace_bytes),
                out=output[decodes, None],
                **shared,
            )

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Read the first output projection again: vLLM calls this after each load of weights."""
        self.group_projection.refresh()

    def _o_proj(self, attn_out: Tensor, positions: Tensor) -> Tensor:
        groups = self.group_projection(attn_out, positions, self.rotary_emb.cos_sin_cache)
        return self._wo_b_proj(groups)


class DeepseekV41ForCausalLM(deepseek_v41.DeepseekV41ForCausalLM):
    """vLLM's class, built with this package's layers if the attention backend is ``CUSTOM``.

    Raises:
        ValueError: the configuration is not supported.
        RuntimeError: something of vLLM does not fit, or one of its classes was not exchanged.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        if vllm_config.attention_config.backend != AttentionBackendEnum.CUSTOM:
            super().__init__(vllm_config=vllm_config, prefix=prefix)
            return
        surface.check(surface.DEEPSEEK_V41, sys.modules[__name__], windows)
        refuse(vllm_config)
        with exchanged():
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        check_layers(self)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Load weights of a checkpoint, as vLLM's class does."""
        loaded: set[str] = super().load_weights(weights)
        update_projections(self)
        return loaded


@contextlib.contextmanager
def exchanged() -> Iterator[None]:
    """Exchange what vLLM's model builds its layers from, as long as it is built."""
    kept = model._select_dsv4_attn_cls
    compressor, keys = attention.DeepseekCompressor, attention.DeepseekV4IndexerCache
    model._select_dsv4_attn_cls = lambda vllm_config: SparseMLAV41Attention
    attention.DeepseekCompressor, attention.DeepseekV4IndexerCache = Compressor, IndexCache
    try:
        yield
    finally:
        model._select_dsv4_attn_cls = kept
        attention.DeepseekCompressor, attention.DeepseekV4IndexerCache = compressor, keys


def check_layers(built: nn.Module) -> list[SparseMLAV41Attention]:
    """The layers of a model.

    Raises:
        RuntimeError: there is none, or a part of one is vLLM's.
    """
    return surface.check_layers(built, attention.DeepseekV4Attention, _parts)


def _parts(layer: attention.DeepseekV4Attention) -> Iterator[tuple[nn.Module, type]]:
    """What is exchanged in a layer, with the class that it must have."""
    yield layer, SparseMLAV41Attention
    if layer.compressor is not None:
        yield layer.compressor, Compressor
    if (indexer := layer.indexer) is not None:
        yield indexer, Indexer
        yield indexer.k_cache, IndexCache
        yield indexer.indexer_op, Selection


def refuse(config: VllmConfig) -> None:
    """Raise ValueError for settings and models that these layers do not support.

    Args:
        config: vLLM's.
    """
    found, speculative = config.model_config.hf_config, config.speculative_config
    settings.refuse_windowed(
        config,
        found,
        "DeepSeek-V4.1",
        {
            "indexer_kv_dtype must be fp8": dsa_indexer_uses_fp4(config),
            "indexer_tp_shard_min_rows must not be set, as each rank selects for all rows": (
                settings.shard_min_rows(config) is not None
            ),
            "the model's layers that select from candidate blocks must have entries of as many "
            f"tokens as candidate_source_layer_id, got {_candidate_ratios(found)}": (
                len(set(_candidate_ratios(found))) > 1
            ),
            "DSpark's drafts must be off, as they choose among vLLM's own classes of attention": (
                speculative is not None and speculative.use_dspark()
            ),
            "use_non_causal must be off": config.attention_config.use_non_causal,
            "swa_bounded_replay must be off, as these layers do not compute windows again": (
                config.cache_config.swa_bounded_replay
            ),
        },
    )


def _candidate_ratios(config: Any) -> list[int]:  # noqa: ANN401 - of transformers
    """Tokens of an entry in the layers that choose blocks of index keys or select among them."""
    source = getattr(config, "candidate_source_layer_id", -1)
    layers = getattr(config, "index_source_layer_ids", None) or ()
    return [config.compress_ratios[layer] for layer in layers if 0 <= source <= layer]

"""The indexer of GLM-5.3-Flash in vLLM: index keys of pools of tokens, without DeepGEMM.

A layer selects complete pools of 4 or 16 tokens by keys that are pooled from them, and attends to
their tokens and to those of the pool that is still open. vLLM's class keeps the projections, the
cache of index keys and the cache of open pools. Exchanged are the pooling
(:func:`sparsemla.pool_windows`), the queries and the selection.

vLLM keeps the rows of an open pool in bfloat16; here they are float32, as the op reads them. Keys
and queries are not rotated by a Hadamard transform, which changes both alike and no score.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.models.glm5next.common.attention import Indexer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV32IndexerMetadata,
    Glm5NextIndexerBackend,
    KpoolTailBackend,
)
from vllm.v1.attention.ops.metadata import compute_token_to_req_indices
from vllm.v1.kv_cache_interface import AttentionSpec, CircularBufferSpec, KVCacheSpec

from sparsemla import (
    INDEX_FP8,
    PagedCache,
    Pooling,
    WindowState,
    pool_windows,
    prepare_index_queries,
)
from sparsemla.backends.vllm.indexer import (
    EntryMetadataBuilder,
    IndexerBackend,
    refuse,
    reserve_memory,
    select_keys,
)
from sparsemla.backends.vllm.warmup import register_pools
from sparsemla.kernels.common.pools import expand_pools
from sparsemla.pooling import NO_NORM

ROPE_DIM = 64
"""Dims that the ops would rotate."""


class PoolBackend(IndexerBackend, Glm5NextIndexerBackend):
    """vLLM's backend of pooled index keys, with slots and lists of this package's indexer."""

    @classmethod
    def supports_pcp(cls) -> bool:
        """No: the keys of other ranks are not gathered."""
        return False

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        """Tokens per page: those of 64 keys, as Hopper's kernels need."""
        return [max(Glm5NextIndexerBackend.get_supported_kernel_block_sizes(kv_cache_spec))]

    @staticmethod
    def get_builder_cls() -> type[EntryMetadataBuilder]:
        """The class that builds the metadata of each step."""
        return EntryMetadataBuilder


@dataclass(kw_only=True)
class TailMetadata(DeepseekV32IndexerMetadata):
    """Where a step finds and keeps the rows of open pools.

    Attributes:
        rings: int32 ``[B]``, the block of each request, -1 for dummy ones.
        request_ids: int32 ``[T]``, the request of each token.
        query_start_loc: int32 ``[B + 1]``, prefix sums of the query lengths.
    """

    rings: Tensor
    request_ids: Tensor
    query_start_loc: Tensor


class TailMetadataBuilder(AttentionMetadataBuilder[TailMetadata]):
    """Builds metadata in static tensors, which a captured CUDA graph can read again."""

    _cudagraph_support = AttentionCGSupport.ALWAYS

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.rings, self.request_ids = torch.empty(2, tokens, dtype=torch.int32, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TailMetadata:
        """The metadata of one step."""
        common = common_attn_metadata
        blocks, tokens = common.block_table_tensor[:, 0], common.num_actual_tokens
        # A dummy request has vLLM's null block, which other groups of layers may read as theirs.
        rings = self.rings[: len(blocks)].copy_(blocks.masked_fill(blocks == 0, -1))
        return TailMetadata(
            seq_lens=common.seq_lens,
            max_seq_len=common.max_seq_len,
            slot_mapping=common.slot_mapping,
            num_decodes=common.num_reqs,
            num_decode_tokens=tokens,
            num_prefills=0,
            num_prefill_tokens=0,
            rings=rings,
            request_ids=compute_token_to_req_indices(
                common.query_start_loc, self.request_ids, tokens, tokens
            ),
            query_start_loc=common.query_start_loc,
        )


class TailBackend(KpoolTailBackend):
    """vLLM's backend of open pools, with :class:`TailMetadataBuilder`."""

    @staticmethod
    def get_builder_cls() -> type[TailMetadataBuilder]:
        """The class that builds the metadata of each step."""
        return TailMetadataBuilder


class PooledIndexer(nn.Module):
    """The indexer of one layer, with the weights and the caches of vLLM's indexer.

    Args:
        indexer: vLLM's indexer.

    Raises:
        ValueError: its dims or a setting are not supported.
    """

    def __init__(self, indexer: Indexer) -> None:
        super().__init__()
        config = indexer.vllm_config
        refuse(config, indexer.head_dim, portable=True)
        ranks, topk = config.parallel_config.decode_context_parallel_size, indexer.topk_tokens
        problems = {
            f"qk_rope_head_dim must be 0, got {indexer.rope_dim}": indexer.rope_dim != 0,
            f"index_topk must be a multiple of index_kpool {indexer.index_kpool}, got {topk}": (
                topk % indexer.index_kpool != 0
            ),
            "decode_context_parallel_size must be 1, as this package's indexer divides no pools "
            f"between ranks; got {ranks}": ranks > 1,
        }
        for problem, present in problems.items():
            if present:
                raise ValueError(
                    f"sparsemla_indexer: {problem}; otherwise remove sparsemla_indexer from "
                    "VLLM_PLUGINS"
                )
        self.inner = indexer
        self.pooling = Pooling(indexer.index_kpool)
        self.num_pools = topk // indexer.index_kpool
        indexer.k_cache.get_attn_backend = _pool_backend
        indexer.tail_cache.get_attn_backend = _tail_backend
        indexer.tail_cache.get_kv_cache_spec = functools.partial(
            _float32_spec, indexer.tail_cache.get_kv_cache_spec
        )
        # vLLM builds models with another default dtype.
        made = {"dtype": torch.float32, "device": indexer.topk_indices_buffer.device}
        # Nothing is rotated: one row of cosines 1 and sines 0 stands for every position.
        row = torch.tensor([1.0, 0.0], **made).repeat_interleave(ROPE_DIM // 2)
        positions = config.model_config.max_model_len + 1
        self.table = row.expand(positions, ROPE_DIM)
        # Keys are normalised before they are pooled, and not again.
        self.weight = torch.full((indexer.head_dim,), NO_NORM**0.5, **made)
        register_pools(self)

    def forward(
        self,
        hidden_states: Tensor,
        qr: Tensor,
        positions: Tensor,
        rotary_emb: RotaryEmbeddingBase | None,
    ) -> Tensor:
        """Write the keys of pools that this step completes, and select tokens of pools.

        Args:
            hidden_states: ``[T, hidden_size]``.
            qr: ``[T, q_lora_rank]``, the compressed queries.
            positions: ``[T]``, position of each token in its request.
            rotary_emb: ignored.

        Returns:
            The buffer of selected positions, int32; its first T rows are new.
        """
        inner, norm = self.inner, self.inner.k_norm
        q = inner.wq_b(qr)[0].view(-1, inner.n_head, inner.head_dim)
        k = inner.wk_weights_proj(hidden_states)[0][:, : inner.head_dim]
        # Near ties between pools need head weights of more than bfloat16.
        weights = functional.linear(
            hidden_states.float(), inner.wk_weights_proj.weight[inner.head_dim :].float()
        )
        self.select(
            positions,
            q,
            weights,
            functional.layer_norm(k.float(), k.shape[1:], norm.weight, norm.bias, norm.eps),
            functional.linear(hidden_states, inner.index_kpool_compress_gate),
        )
        return inner.topk_indices_buffer

    @eager_break_during_capture
    def select(
        self, positions: Tensor, q: Tensor, weights: Tensor, values: Tensor, gates: Tensor
    ) -> None:
        """Pool keys and select tokens, with batch and caches of the forward context.

        Args:
            positions: int64 ``[T]``.
            q: bfloat16 ``[T, H, 128]``.
            weights: float32 ``[T, H]``.
            values, gates: ``[T, 128]``, normalised keys and what weighs them.
        """
        inner, ratio = self.inner, self.pooling.ratio
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # vLLM profiles a step without a batch
            reserve_memory(q, inner.topk_tokens)
            return
        keys, tail = metadata[inner.k_cache.prefix], metadata[inner.tail_cache.prefix]
        cache = PagedCache(inner.k_cache.kv_cache, INDEX_FP8)
        tokens = min(len(keys.slot_mapping), len(tail.request_ids))  # later rows are padding
        pool_windows(
            values[:tokens],
            gates[:tokens],
            self.weight,
            self.table,
            WindowState(inner.tail_cache.kv_cache.transpose(1, 2)),
            cache,
            pooling=self.pooling,
            gate_bias=inner.index_kpool_compress_ape,
            positions=positions[:tokens],
            request_ids=tail.request_ids[:tokens],
            input_row_offsets=tail.query_start_loc,
            ring_ids=tail.rings,
            slot_mapping=keys.slot_mapping[:tokens],
            eps=NO_NORM,
        )
        q, weights = prepare_index_queries(
            q, weights, self.table, positions=positions, format=INDEX_FP8
        )
        pools = positions.new_empty(len(q), self.num_pools, dtype=torch.int32)
        select_keys(q, weights, cache, keys, self.num_pools, pools, ratio=ratio)
        lengths, lists = positions + 1, inner.topk_indices_buffer[: len(q)]
        expand_pools(pools, lengths // ratio, ratio, lists, lengths=lengths)


def _pool_backend() -> type[AttentionBackend]:
    return PoolBackend


def _tail_backend() -> type[AttentionBackend]:
    return TailBackend


def _float32_spec(spec_of: Any, config: VllmConfig) -> CircularBufferSpec:  # noqa: ANN401 - vLLM's
    """The cache of open pools, with rows of float32."""
    return replace(spec_of(config), dtype=torch.float32)

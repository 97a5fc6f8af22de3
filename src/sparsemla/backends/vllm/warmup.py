"""The kernels of the plugins in vLLM's own warm-up, which ends before the engine is ready.

A layer registers its kernels when vLLM builds the model. vLLM's ``kernel_warmup`` asks for them in
each worker once the caches are allocated, and before it captures graphs. Its option
``enable_jit_warmup``, which ``--enforce-eager`` turns off, is ours too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeAlias

import torch
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.logger import init_logger
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry, VllmJitKernel
from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backend import max_decode_query_len
from vllm.v1.worker.block_table import get_block_table_width

from sparsemla import Serving, warm_up
from sparsemla.backends.vllm.compressed import (
    CompressedLayer,
    Pages,
    PooledKeys,
    SharedEntriesLayer,
    WrittenRows,
)
from sparsemla.backends.vllm.divided import Division
from sparsemla.backends.vllm.sharded import ShardedIndex
from sparsemla.warmup import Sweep

LOGGER = init_logger("vllm.sparsemla")  # vLLM configures the loggers below its own name only
PAGE_SIZE = 64


Key: TypeAlias = Serving | CompressedLayer | PooledKeys | ShardedIndex | WrittenRows
"""What the layers of one kind may ask of the GPU."""


class Kernels(VllmJitKernel[Key]):
    """All kernels of the plugins, as a kernel that vLLM warms up."""

    def get_warmup_keys(
        self, config: VllmConfig, layers: Callable[..., Iterator[Key]], facts: tuple[Any, ...]
    ) -> list[Key]:
        """What the layers of one kind may ask of the GPU; equal layers are one."""
        return list(dict.fromkeys(layers(config, *facts)))

    def compile(self, compile_key: Key) -> None:
        """Compile the kernels of a kind of layers."""
        self.compile_many([compile_key])

    def compile_many(self, compile_keys: Iterable[Key]) -> None:
        """Compile the kernels of all kinds of layers together, in parallel."""
        servings: list[Serving] = []
        sweeps: list[Sweep] = []
        for key in compile_keys:
            if isinstance(key, Serving):
                servings.append(key)
                continue
            sweeps += key.sweeps()
            if isinstance(key, CompressedLayer | PooledKeys):
                servings += key.selections()
        done = warm_up(*servings, steps=sweeps)
        LOGGER.info("sparsemla: %s before the engine is ready", done)


KERNELS = Kernels()


def register_attention(impl: type) -> None:
    """Register the kernels of the attention layers whose implementation is of a class."""
    config = get_current_vllm_config_or_none()
    if config is not None:
        JitWarmupRegistry.register(KERNELS, config, attention_layers, (impl,))


def register_indexer(
    config: VllmConfig,
    index_heads: int,
    topk: int,
    rotary: RotaryEmbeddingBase,
    *,
    rope_first: bool = True,
) -> None:
    """Register the kernels of an indexer with this rotary embedding of its first or last dims."""
    table = rotary.cos_sin_cache
    rotates = not rotary.is_neox_style, rope_first
    facts = index_heads, topk, *rotates, table.shape[0], table.dtype
    JitWarmupRegistry.register(KERNELS, config, index_layers, facts)


def register_layers(cls: type) -> None:
    """Register the kernels of DeepSeek-V4's layers of a class."""
    config = get_current_vllm_config_or_none()
    if config is not None:
        JitWarmupRegistry.register(KERNELS, config, compressed_layers, (cls,))


def register_shared_layers(cls: type) -> None:
    """Register the kernels of DeepSeek-V4.1's layers of a class."""
    config = get_current_vllm_config_or_none()
    if config is not None:
        JitWarmupRegistry.register(KERNELS, config, shared_layers, (cls,))


def register_pools(indexer: Any) -> None:  # noqa: ANN401 - a PooledIndexer
    """Register the kernels of an indexer of pools."""
    config = indexer.inner.vllm_config
    JitWarmupRegistry.register(KERNELS, config, pooled_layers, (indexer,))


def attention_layers(config: VllmConfig, impl: type) -> Iterator[Key]:
    """The configuration of each attention layer."""
    for layer in config.compilation_config.static_forward_context.values():
        if type(getattr(layer, "impl", None)) is impl:
            cache = layer.impl.rows_on_gpu(layer.kv_cache)
            limits = _limits(config)
            if layer.impl.qk_rope_head_dim == 0:  # pages of GLM-5.3-Flash
                limits |= _pages_of(config, cache.shape[1])
            serving = Serving(
                layer.impl.format,
                num_heads=layer.impl.num_heads * layer.impl.dcp_world_size,
                query_pitch=_query_pitch(layer.impl),
                topk=layer.impl.topk_indices_buffer.shape[1],
                index_heads=0,
                converts=layer.impl.conversion_rows > 0,
                allow_fp8_mma=layer.impl.allow_fp8_mma,
                sinks=layer.impl.sinks is not None,
                num_pages=cache.shape[0],
                page_stride=cache.stride(0),
                **limits,
            )
            yield from layer.impl.warm_up_keys(serving)


def _query_pitch(impl: Any) -> int | None:  # noqa: ANN401 - of the class above
    """Dims of a projected head of which attention reads the last ones; None for one tensor.

    vLLM joins both parts before it gathers queries from the ranks. Without RoPE there is one part.
    """
    return impl.qk_head_dim if impl.dcp_world_size == 1 and impl.qk_rope_head_dim else None


def index_layers(
    config: VllmConfig,
    index_heads: int,
    topk: int,
    interleaved: bool,
    rope_first: bool,
    max_positions: int,
    table_dtype: torch.dtype,
) -> Iterator[Serving | ShardedIndex]:
    """The configuration of each layer with an index cache."""
    limits, num_ranks = _limits(config), config.parallel_config.decode_context_parallel_size
    most_requests = limits["max_requests"] + _most_pieces(config)
    for layer in config.compilation_config.static_forward_context.values():
        if isinstance(layer, DeepseekV32IndexerCache):
            count, stride = layer.kv_cache.shape[0], layer.kv_cache.stride(0)
            yield Serving(
                None,
                topk=topk,
                index_heads=index_heads,
                num_pages=count,
                index_page_stride=stride,
                max_workspace_bytes=envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20,
                interleaved=interleaved,
                rope_first=rope_first,
                max_positions=max_positions,
                table_dtype=table_dtype,
                **limits | {"max_requests": most_requests},
            )
            if num_ranks > 1:
                yield ShardedIndex(
                    num_ranks,
                    config.parallel_config.cp_kv_cache_interleave_size,
                    topk,
                    index_heads,
                    Pages(count, PAGE_SIZE, stride, limits["table_width"]),
                    max_tokens=limits["max_tokens"],
                    max_requests=limits["max_requests"],
                    max_query_len=limits["max_query_len"],
                    max_workspace_bytes=envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20,
                )


def pooled_layers(config: VllmConfig, indexer: Any) -> Iterator[PooledKeys]:  # noqa: ANN401 - above
    """An indexer of pools."""
    inner = indexer.inner
    keys, tails = inner.k_cache.kv_cache, inner.tail_cache.kv_cache
    limits, ratio = _limits(config), indexer.pooling.ratio
    columns = _pages_of(config, keys.shape[1] * ratio)["table_width"]
    yield PooledKeys(
        ratio=ratio,
        topk=indexer.num_pools,
        list_width=inner.topk_indices_buffer.shape[1],
        index_heads=inner.n_head,
        keys=Pages(len(keys), keys.shape[1], keys.stride(0), columns),
        tails=Pages(len(tails), tails.shape[2], tails.stride(0), 1),
        max_positions=len(indexer.table),
        max_tokens=limits["max_tokens"],
        max_requests=limits["max_requests"],
        max_pieces=_most_pieces(config),
        max_workspace_bytes=envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20,
    )


def _most_pieces(config: VllmConfig) -> int:
    """Pieces of prefills that the indexer takes for requests, where ranks divide rows."""
    parallel = config.parallel_config
    if parallel.tensor_parallel_size == 1 or parallel.decode_context_parallel_size > 1:
        return 0
    return Division.most_pieces(
        config.scheduler_config.max_num_batched_tokens, _most_requests(config)
    )


def _most_requests(config: VllmConfig) -> int:
    """Requests of a step; with prefill context parallelism a rank has two parts of each prefill."""
    parts = 2 if config.parallel_config.prefill_context_parallel_size > 1 else 1
    return config.scheduler_config.max_num_seqs * parts


def _limits(config: VllmConfig) -> dict[str, Any]:
    """The engine's limits; a captured graph may have more tokens than decodes."""
    captured = config.compilation_config.cudagraph_capture_sizes or [0]
    block_size = config.cache_config.block_size
    ranks = config.parallel_config.decode_context_parallel_size
    blocks = cdiv(config.model_config.max_model_len, block_size * ranks)
    return {
        "max_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_requests": max(_most_requests(config), *captured),
        "max_query_len": max_decode_query_len(config),
        "max_seq_len": config.model_config.max_model_len,
        "page_size": PAGE_SIZE,
        "table_width": get_block_table_width(blocks, block_size) * (block_size // PAGE_SIZE),
    }


def _pages_of(config: VllmConfig, page_size: int) -> dict[str, int]:
    """Pages of a cache that does not have vLLM's block size, and columns of their table."""
    columns = cdiv(config.model_config.max_model_len, page_size)
    return {"page_size": page_size, "table_width": get_block_table_width(columns, page_size)}


def compressed_layers(config: VllmConfig, cls: type) -> Iterator[CompressedLayer]:
    """Each layer of DeepSeek-V4 of a class."""
    for layer in _layers_of(config, cls):
        entries = state = key_state = None
        if layer.compressor is not None:
            entries = _cache_pages(config, layer, layer.compress_ratio)
            state = _cache_pages(config, layer.compressor.state_cache)
        if layer.indexer is not None:
            key_state = _cache_pages(config, layer.indexer.compressor.state_cache)
        yield CompressedLayer(
            decode_rows=layer.decode_rows,
            entries=entries,
            state=state,
            key_state=key_state,
            converts=layer.conversion_rows > 0,
            **_layer_facts(config, layer),
        )


def shared_layers(config: VllmConfig, cls: type) -> Iterator[SharedEntriesLayer]:
    """Each layer of DeepSeek-V4.1 of a class."""
    context = config.compilation_config.static_forward_context
    for layer in _layers_of(config, cls):
        entries = state = blocks = None
        if layer.compress_ratio > 0:
            owner = context[layer.compressed_cache_prefix]
            entries = _cache_pages(config, owner, layer.compress_ratio)
        if layer.compressor is not None and layer.compressor.state_cache is not None:
            state = _cache_pages(config, layer.compressor.state_cache)
        if layer.indexer is not None:
            blocks = layer.indexer.indexer_op.blocks
        yield SharedEntriesLayer(
            decode_rows=layer.window_size,
            entries=entries,
            state=state,
            key_state=None,
            converts=layer.conversion_rows > 0,
            format=layer.row_format,
            owns_entries=layer.compressor is not None,
            topk_blocks=None if blocks is None else blocks.shape[1],
            block_size=layer.candidate_block_size or 1,
            **_layer_facts(config, layer),
        )


def _layers_of(config: VllmConfig, cls: type) -> list[Any]:
    context = config.compilation_config.static_forward_context
    return [each for each in context.values() if type(each) is cls]


def _cache_pages(config: VllmConfig, part: Any, ratio: int = 1) -> Pages:  # noqa: ANN401
    """Pages of rows of ``ratio`` tokens; each cache has its own block size."""
    count, rows = part.kv_cache.shape[:2]
    columns = cdiv(config.model_config.max_model_len, rows * ratio)
    width = get_block_table_width(columns, rows * ratio)
    return Pages(count, rows, part.kv_cache.stride(0), width)


def _layer_facts(config: VllmConfig, layer: Any) -> dict[str, Any]:  # noqa: ANN401 - of a model
    """What layers of DeepSeek-V4 and V4.1 have alike."""
    limits, weight, keys = _limits(config), layer.group_projection.weight(), None
    if layer.indexer is not None:
        keys = _cache_pages(config, layer.indexer.k_cache, layer.compress_ratio)
    return {
        "ratio": layer.compress_ratio,
        "num_heads": layer.n_local_heads,
        "q_lora_rank": layer.q_lora_rank,
        "window": layer.window_size,
        "topk": config.model_config.hf_text_config.index_topk,
        "index_heads": 0 if layer.indexer is None else layer.indexer.n_head,
        "num_groups": layer.n_local_groups,
        "o_lora_rank": layer.o_lora_rank,
        "scale_block": None if weight.scale is None else weight.scale_block,
        "raw": _cache_pages(config, layer.swa_cache_layer),
        "keys": keys,
        "max_positions": layer.rotary_emb.cos_sin_cache.shape[0],
        "max_tokens": limits["max_tokens"],
        "max_requests": limits["max_requests"],
        "max_pieces": _most_pieces(config),
        "max_query_len": limits["max_query_len"],
        "max_seq_len": limits["max_seq_len"],
        "max_workspace_bytes": envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20,
    }

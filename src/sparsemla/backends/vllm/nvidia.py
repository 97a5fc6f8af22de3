"""The selection of this package inside vLLM's NVIDIA classes of DeepSeek-V3.2 and GLM-5.

These classes prepare a step in two fused kernels, which write both caches and quantise the index
queries. Then they call the function ``sparse_attn_indexer`` of their module for scores and top-k.
The models below exchange this function and the class of the index cache; all else is vLLM's.

With prefill context parallelism (PCP) each rank has a part of the tokens and all pages. The fused
kernels then write no rows: ranks gather the new ones in vLLM's functions, and write all of them.
"""

import inspect
import sys

from torch import Tensor, nn
from vllm import _custom_ops
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.forward_context import ForwardContext, get_forward_context
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.models.deepseek_v32 import attention
from vllm.models.deepseek_v32.nvidia import model, mtp
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.ops.pcp import maybe_gather_indexer_k

from sparsemla import INDEX_FP8, PagedCache
from sparsemla.backends.vllm.indexer import (
    index_cache_backend,
    refuse,
    reserve_memory,
    select_keys,
)
from sparsemla.backends.vllm.recorded import keep_selection, reserve_selections
from sparsemla.backends.vllm.surface import NVIDIA, check
from sparsemla.backends.vllm.warmup import register_indexer


class IndexCache(DeepseekV32IndexerCache):
    """vLLM's index cache, with the metadata of this package's indexer."""

    def get_attn_backend(self) -> type[AttentionBackend]:
        """The backend that builds the metadata of each step."""
        return index_cache_backend()


def sparse_attn_indexer(
    hidden_states: Tensor,
    k_cache_prefix: str,
    kv_cache: Tensor,
    q_quant: Tensor,
    q_scale: Tensor | None,
    k: Tensor | None,
    weights: Tensor,
    quant_block_size: int,
    scale_fmt: str | None,
    topk_tokens: int,
    head_dim: int,
    max_model_len: int,
    total_seq_lens: int,
    topk_indices_buffer: Tensor,
    skip_k_cache_insert: bool,
    use_pcp: bool,
    pcp_shard_decode_requests: bool,
    dense_mha_metadata_layer_name: str,
    use_fp4_cache: bool = False,
    dcp_rank: int = 0,
    dcp_world_size: int = 1,
    cp_kv_cache_interleave_size: int = 1,
    skip_topk_buffer_clear: bool = False,
    candidate_blocks: Tensor | None = None,
    candidate_block_size: int = 0,
    candidate_write: bool = False,
    topk_backend: str = "auto",
) -> Tensor:
    """Scores and exact top-k of a step, with the signature of vLLM's function.

    Only the following arguments matter here.

    Args:
        k_cache_prefix: name of the index cache in the metadata of a step.
        kv_cache: uint8 ``[num_blocks, 64, 132]``, the index cache.
        q_quant: e4m3 ``[T, H, 128]``, index queries.
        k: bfloat16 ``[T, 128]``, index keys, if they are not in the cache already.
        weights: float32 ``[T, H]``, with the scales of the queries.
        quant_block_size, scale_fmt: of vLLM's op that writes the keys.
        topk_tokens: number of keys that a token selects.
        topk_indices_buffer: int32, its first T rows are overwritten.
        skip_k_cache_insert: the keys are in the cache.
        use_pcp: the keys of other ranks are written, too.
        pcp_shard_decode_requests: each decode has one rank.
        dense_mha_metadata_layer_name: name of the attention layer, if it can be dense.

    Returns:
        ``topk_indices_buffer``.
    """
    context = get_forward_context()
    if not isinstance(context.attn_metadata, dict):
        reserve_memory(q_quant, topk_tokens)
        return topk_indices_buffer
    metadata = context.attn_metadata[k_cache_prefix]
    if k is not None and not skip_k_cache_insert:
        # Slots are those of all ranks' tokens, except in decodes of a draft model, which all ranks
        # repeat: there they are fewer than the padded keys.
        keys, slots = maybe_gather_indexer_k(
            k,
            metadata.slot_mapping,
            metadata.num_decode_tokens,
            use_pcp,
            pcp_shard_decode_requests=pcp_shard_decode_requests,
        )
        _custom_ops.indexer_k_quant_and_cache(keys, kv_cache, slots, quant_block_size, scale_fmt)
    if not _attention_is_dense(context, dense_mha_metadata_layer_name):
        cache = PagedCache(kv_cache, INDEX_FP8)
        select_keys(q_quant, weights, cache, metadata, topk_tokens, topk_indices_buffer)
        layer = context.no_compile_layers[k_cache_prefix]
        keep_selection(layer, topk_indices_buffer[: len(q_quant)])
    return topk_indices_buffer


def _attention_is_dense(context: ForwardContext, layer_name: str) -> bool:
    """Whether vLLM runs all of a step's tokens as dense attention, which reads no selection."""
    metadata = context.attn_metadata.get(layer_name)
    return (
        getattr(getattr(metadata, "prefill", None), "use_dense_mha", False)
        and metadata.num_decode_tokens == 0
        and context.cudagraph_runtime_mode != CUDAGraphMode.FULL
    )


class WithSelection(nn.Module):
    """A model of vLLM, built with this package's selection.

    Raises:
        ValueError: the configuration is not supported.
        RuntimeError: something of vLLM does not fit, or its class would run another selection.
    """

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        check(NVIDIA, sys.modules[__name__])
        refuse(vllm_config, vllm_config.model_config.hf_text_config.index_head_dim)
        attention.sparse_attn_indexer = sparse_attn_indexer
        attention.DeepseekV32Indexer.indexer_cache_cls = IndexCache
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for layer in check_selection(self):
            register_indexer(
                vllm_config,
                layer.indexer.n_head,
                layer.indexer.topk_tokens,
                layer.indexer_rope_emb,
            )
            cache, buffer = layer.indexer.k_cache, layer.topk_indices_buffer
            reserve_selections(vllm_config, cache, buffer)


class DeepseekV32ForCausalLM(WithSelection, model.DeepseekV32ForCausalLM):
    """vLLM's NVIDIA class of DeepSeek-V3.2 and GLM-5."""


class DeepseekV32MTP(WithSelection, mtp.DeepseekV32MTP):
    """Their layer for multi-token prediction."""


def check_selection(built: nn.Module) -> list[attention.DeepseekV32Attention]:
    """The layers with an indexer.

    Raises:
        RuntimeError: there is none, or one will not call this package's function.
    """
    layers = [
        layer
        for layer in built.modules()
        if isinstance(layer, attention.DeepseekV32Attention) and layer.indexer is not None
    ]
    for layer in layers:
        step = inspect.unwrap(type(layer)._sparse_indexer_and_attn)
        called = step.__globals__.get("sparse_attn_indexer")
        if (
            "sparse_attn_indexer" not in step.__code__.co_names
            or called is not sparse_attn_indexer
            or not isinstance(layer.indexer.k_cache, IndexCache)
        ):
            raise RuntimeError(
                f"sparsemla_indexer: the selection of {layer.layer_name} must be this package's, "
                f"but vLLM's class calls {called}; remove sparsemla_indexer from VLLM_PLUGINS"
            )
    if not layers:
        raise RuntimeError(
            f"sparsemla_indexer: {type(built).__name__} must have layers of "
            "vllm.models.deepseek_v32 with an indexer, got none; remove sparsemla_indexer from "
            "VLLM_PLUGINS"
        )
    return layers

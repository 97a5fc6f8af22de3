"""Attention of SGLang's ``dsa`` backend over the rows that its indexer selected.

Each function replaces a method of ``DeepseekSparseAttnBackend`` and has its signature. SGLang pads
queries to 64 or 128 heads inside these methods, so that nothing is padded here.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.configs.model_config import get_dsa_index_n_heads
from sglang.srt.layers.attention.dsa_backend import (
    DeepseekSparseAttnBackend,
    DSAFlashMLAMetadata,
    DSAMetadata,
)
from sglang.srt.runtime_context import get_schedule
from torch import Tensor

from sparsemla import (
    BF16_512,
    BF16_576,
    FP8_DS_MLA,
    FP8_NOPE,
    CacheFormat,
    PagedCache,
    decode_workspace_size,
    sparse_decode,
    sparse_prefill,
    warm_up,
)
from sparsemla.backends.environment import FP8_MMA, permits_fp8_mma
from sparsemla.backends.sglang.scores import deep_gemm_runs
from sparsemla.backends.sglang.warmup import Layers

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner

logger = logging.getLogger(__name__)

MOST_SPLIT_TOKENS = 512
"""No decode of more tokens is split on a GPU of up to 256 multiprocessors."""
LEAST_INDEX_HEADS = 32
"""SGLang pads the indexer's queries to so many heads."""


def prepare(
    result: None,
    self: DeepseekSparseAttnBackend,
    model_runner: ModelRunner,
    *args: Any,  # noqa: ANN401 - of SGLang's constructor
    **kwargs: Any,  # noqa: ANN401 - likewise
) -> None:
    """After ``__init__``: read the environment, allocate the workspace, compile all kernels.

    Captured CUDA graphs hold the address of the workspace of :func:`sparse_decode`. Each backend
    has its own, since SGLang may run several on different streams.
    """
    size = decode_workspace_size(MOST_SPLIT_TOKENS, 1, self.num_q_heads, device=self.device)
    self.sparsemla_workspace = torch.empty(size, dtype=torch.uint8, device=self.device)
    logger.info(
        "sparsemla computes attention of %d heads in SGLang's dsa backend", self.num_q_heads
    )
    self.sparsemla_fp8_mma = permits_fp8_mma()
    if self.sparsemla_fp8_mma:
        logger.info("sparsemla: prefills over converted rows permit FP8 MMAs (%s=1)", FP8_MMA)
    if torch.device(self.device).type == "cuda":
        compile_kernels(layers_of(self, model_runner))


@functools.lru_cache(maxsize=4)  # of a model and its drafts
def compile_kernels(layers: Layers) -> None:
    """Compile what layers may ask of the GPU, once for all backends of a process."""
    done = warm_up(steps=[*layers.sweeps()])
    logger.info("sparsemla: %s before the engine is ready", done)


def layers_of(backend: DeepseekSparseAttnBackend, model_runner: ModelRunner) -> Layers:
    """What the layers of a backend may ask of the GPU."""
    config, schedule = model_runner.model_config.hf_config, get_schedule()
    methods = {backend.dsa_prefill_impl, backend.dsa_decode_impl}
    # For fa3 the RoPE dims of queries are in their own tensor, or in one with other dims.
    rope = backend.qk_rope_head_dim
    apart = (rope, backend.qk_nope_head_dim + rope) if rope and "fa3" in methods else ()
    whole = () if apart and methods == {"fa3"} else (None,)
    fp8 = backend.dsa_kv_cache_store_fp8
    return Layers(
        format=_format(backend, fp8),
        num_heads=backend.num_q_heads,
        index_heads=max(get_dsa_index_n_heads(config), LEAST_INDEX_HEADS),
        topk=backend.dsa_index_topk,
        pool=backend.dsa_index_kpool,
        pitches=(*apart, *whole),
        converts=fp8 and bool(methods & {"flashmla_sparse", "flashmla_auto"}),
        allow_fp8_mma=backend.sparsemla_fp8_mma,
        sinks=getattr(config, "learnable_sink", False),
        scores=not deep_gemm_runs(),
        num_slots=backend.token_to_kv_pool.size + model_runner.page_size,
        page_size=model_runner.page_size,
        max_tokens=max(schedule.chunked_prefill_size or 0, schedule.max_prefill_tokens or 0, 1),
        max_requests=backend.req_to_token_pool.size,
        drafts=backend.speculative_num_draft_tokens or 1,
    )


def forward_flashmla_kv(
    self: DeepseekSparseAttnBackend,
    q_all: Tensor,
    kv_cache: Tensor,
    v_head_dim: int,
    sm_scale: float,
    layer: Any,  # noqa: ANN401 - SGLang's RadixAttention
    metadata: DSAMetadata,
    page_table_1: Tensor,
) -> Tensor:
    """``_forward_flashmla_kv``, which reads a bfloat16 cache in place, too.

    Args:
        q_all: ``[T, H * 576]`` or ``[T, H, 576]`` bfloat16; without RoPE 512 dims.
        kv_cache: ``[slots, 1, row]``, the cache of the layer.
        page_table_1: int32 ``[T, K]``, selected slots, then -1.

    Returns:
        ``[T, 1, H, 512]``.
    """
    q = q_all.view(-1, layer.tp_q_head_num, layer.head_dim)
    lengths = metadata.dsa_cache_seqlens_int32
    return _attend(self, q, kv_cache, page_table_1, lengths, sm_scale).unsqueeze(1)


def forward_flashmla_sparse(
    self: DeepseekSparseAttnBackend,
    q_all: Tensor,
    kv_cache: Tensor,
    v_head_dim: int,
    page_table_1: Tensor,
    sm_scale: float,
    topk_length: Tensor | None = None,
    attn_sink: Tensor | None = None,
) -> Tensor:
    """``_forward_flashmla_sparse``.

    Args:
        q_all: ``[T, H, 576]`` bfloat16; without RoPE 512 dims.
        kv_cache: ``[slots, 1, 576]`` bfloat16: the cache, or the rows of this batch's requests;
            without RoPE 512 dims.
        page_table_1: int32 ``[T, K]``, selected rows of ``kv_cache``, then -1.
        topk_length: int32 ``[T]``, number of selected rows.
        attn_sink: float32 ``[H]``.

    Returns:
        ``[T, H, 512]``.
    """
    return _attend(
        self,
        q_all,
        kv_cache,
        page_table_1,
        topk_length,
        sm_scale,
        attn_sink,
        # Beside an FP8 cache, which the setting needs, bfloat16 rows are those of this batch.
        allow_fp8_mma=self.sparsemla_fp8_mma and kv_cache.dtype == torch.bfloat16,
    )


def forward_fa3(
    self: DeepseekSparseAttnBackend,
    q_rope: Tensor,
    kv_cache: Tensor,
    v_head_dim: int,
    q_nope: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    sm_scale: float,
    logit_cap: float,
    page_size: int,
) -> Tensor:
    """``_forward_fa3``.

    Args:
        q_rope: ``[T, H, 64]`` bfloat16; without RoPE it has no dims.
        kv_cache: ``[slots, 1, row]``, the cache of the layer.
        q_nope: ``[T, H, 512]`` bfloat16.
        page_table: int32 ``[T, K]``, selected slots, then -1.
        cache_seqlens: int32 ``[T]``, number of selected slots.
        logit_cap: must be 0.

    Returns:
        ``[T, H, 512]``.
    """
    if logit_cap:
        raise ValueError(f"sparsemla: logit_cap must be 0, got {logit_cap}")
    rope = q_rope if self.qk_rope_head_dim else None
    return _attend(self, q_nope, kv_cache, page_table, cache_seqlens, sm_scale, q_rope=rope)


def compute_flashmla_metadata(
    self: DeepseekSparseAttnBackend, cache_seqlens: Tensor, seq_len_q: int
) -> DSAFlashMLAMetadata:
    """``_compute_flashmla_metadata``: tensors that SGLang may slice and copy, and nobody reads."""
    return DSAFlashMLAMetadata(
        flashmla_metadata=cache_seqlens.new_empty(1, 8),
        num_splits=cache_seqlens.new_empty(cache_seqlens.shape[0] + 1),
    )


def check_tail(
    self: DeepseekSparseAttnBackend, topk_indices: Tensor | None, dsa_impl: str, phase: str
) -> None:
    """``_check_kpool_tail_backend``: every method reads the open pools behind the selected ones."""


def resolve_tail(
    self: DeepseekSparseAttnBackend, topk_indices: Tensor | None, dsa_impl: str
) -> str:
    """``_resolve_kpool_tail_backend``: the method that was chosen, for the same reason."""
    return dsa_impl


def _format(backend: DeepseekSparseAttnBackend, fp8: bool) -> CacheFormat:
    """Rows of a layer, or of a batch: in FP8 or in bfloat16, with RoPE dims or without."""
    if backend.qk_rope_head_dim:
        return FP8_DS_MLA if fp8 else BF16_576
    return FP8_NOPE if fp8 else BF16_512


def _attend(
    backend: DeepseekSparseAttnBackend,
    q: Tensor,
    kv_cache: Tensor,
    indices: Tensor,
    lengths: Tensor | None,
    softmax_scale: float,
    attn_sink: Tensor | None = None,
    q_rope: Tensor | None = None,
    *,
    allow_fp8_mma: bool = False,
) -> Tensor:
    """Attention of the queries ``[T, H, 576 or 512]`` over the rows of their ``indices``.

    With ``q_rope``, it has the last 64 dims.
    """
    num_tokens = q.shape[0]
    # SGLang pads batches of data-parallel ranks at the end: the lengths, or queries without keys.
    if lengths is not None:
        lengths = lengths[:num_tokens] if lengths.shape[0] >= num_tokens else None
    cache_format = _format(backend, kv_cache.dtype != torch.bfloat16)
    cache = PagedCache(kv_cache.view(-1, 1, cache_format.row_width), cache_format)
    if backend.forward_metadata.max_seq_len_q > 1:
        out, _ = sparse_prefill(
            q,
            cache,
            indices,
            q_rope=q_rope,
            softmax_scale=softmax_scale,
            topk_lengths=lengths,
            attn_sink=attn_sink,
            allow_fp8_mma=allow_fp8_mma,
        )
        return out
    # Each token of a speculative decode selects its own keys: pass it as a separate request.
    out, _ = sparse_decode(
        q.unsqueeze(1),
        cache,
        indices.unsqueeze(1),
        q_rope=None if q_rope is None else q_rope.unsqueeze(1),
        softmax_scale=softmax_scale,
        topk_lengths=lengths,
        attn_sink=attn_sink,
        workspace=backend.sparsemla_workspace,
    )
    return out.squeeze(1)

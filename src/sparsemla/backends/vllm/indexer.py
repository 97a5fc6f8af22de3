"""The indexer of DeepSeek-V3.2 and GLM-5 in vLLM, without DeepGEMM and on any GPU from sm_80.

It replaces three parts of vLLM: the preparation of indexer queries and keys from projected hidden
states, the op for scores and top-k, and the metadata of the index cache, for which vLLM calls
DeepGEMM on every NVIDIA GPU.

The plugin overrides the layer ``MultiHeadLatentAttentionWrapper``, for which vLLM has a hook: see
:mod:`sparsemla.backends.vllm.wrapper`. The hook ``SparseAttnIndexer`` is too late: it receives e4m3
queries, quantised by a kernel that Triton does not compile below sm_89.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from vllm import envs
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.distributed import get_dcp_group, get_tp_group
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbeddingBase
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models.deepseek_v2 import Indexer
from vllm.platforms import current_platform
from vllm.utils.torch_utils import (
    LayerNameType,
    _encode_layer_name,
    _resolve_layer_name,
    direct_register_custom_op,
)
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionMetadataBuilder,
    CommonAttentionMetadata,
    max_decode_query_len,
)
from vllm.v1.attention.backends.mla.compressor_utils import get_compressed_slot_mapping
from vllm.v1.attention.backends.mla.indexer import (
    DeepseekV32IndexerBackend,
    DeepseekV32IndexerMetadata,
    dsa_indexer_uses_fp4,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from sparsemla import (
    INDEX_FP8,
    ContextShard,
    PagedCache,
    fused_indexer_rope_quant,
    indexer_topk,
)
from sparsemla.backends.environment import DIVIDE_ROWS_FROM, divide_rows_from
from sparsemla.backends.vllm.divided import DividedRows, Division, Rule
from sparsemla.backends.vllm.exchange import Run, ShardedRows, exchange_workspace
from sparsemla.backends.vllm.recorded import keep_selection, reserve_selections
from sparsemla.backends.vllm.settings import OPERATOR, shard_min_rows, unread_by_indexer
from sparsemla.backends.vllm.warmup import LOGGER


@dataclass(kw_only=True)
class IndexerMetadata(DeepseekV32IndexerMetadata):
    """Metadata of a batch for the indexer, which treats decodes and prefills alike.

    Attributes:
        query_start_loc: int32 ``[B + 1]``, prefix sums of the query lengths.
        sharded: what ranks need that share the keys, or None. ``max_seq_len`` then counts the keys
            of the rank with most of them.
        divided: this rank's part of the rows of prefills, or None if it selects for all rows.
    """

    query_start_loc: Tensor
    sharded: ShardedRows | None = None
    divided: DividedRows | None = None


class IndexerMetadataBuilder(AttentionMetadataBuilder[IndexerMetadata]):
    """Builds metadata from the model runner's static tensors.

    The metadata of decodes does not depend on the order or the lengths of the requests. So any
    batch can be captured in a CUDA graph, unless ranks divide the rows of its prefills.
    """

    _cudagraph_support = AttentionCGSupport.ALWAYS
    supports_draft_decode_metadata_update = True

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.ratio = kv_cache_spec.tokens_per_state
        self.max_decode_len = max_decode_query_len(vllm_config)
        self.rule = None if num_row_ranks() == 1 else division_rule(vllm_config)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> IndexerMetadata:
        """The metadata of one step."""
        common = common_attn_metadata
        return IndexerMetadata(
            seq_lens=common.seq_lens,
            max_seq_len=common.max_seq_len,
            slot_mapping=common.slot_mapping,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
            num_prefills=0,
            num_prefill_tokens=0,
            block_table=common.block_table_tensor,
            query_start_loc=common.query_start_loc,
            divided=self._divided(common),
        )

    def _divided(self, common: CommonAttentionMetadata) -> DividedRows | None:
        """This rank's part of the rows, which begin with the first request that is no decode.

        Only lengths on the host decide, which all ranks have alike.
        """
        lens = common.seq_lens_cpu_upper_bound
        if self.rule is None or common.max_query_len <= self.max_decode_len or lens is None:
            return None
        mode = self.vllm_config.compilation_config.cudagraph_mode
        if mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL:
            return None  # the graph would be replayed with other prefills
        offsets = common.query_start_loc_cpu.tolist()
        query_lens = [end - begin for begin, end in itertools.pairwise(offsets)]
        first = next(i for i, n in enumerate(query_lens) if n > self.max_decode_len)
        rows = zip(query_lens[first:], lens.tolist()[first:], strict=True)
        keys = sum(n * (2 * seq_len - n + 1) // 2 for n, seq_len in rows) // self.ratio
        if not self.rule.divides(offsets[-1] - offsets[first], keys):
            return None
        group = get_tp_group()
        return DividedRows.of(
            Division(group.rank_in_group, group.world_size, offsets, first),
            common.seq_lens,
            common.block_table_tensor,
            functools.partial(group.all_gather, dim=0),
        )

    def update_draft_decode_metadata(self, metadata: IndexerMetadata) -> None:
        """Do nothing: all tensors belong to the model runner."""


class EntryMetadataBuilder(IndexerMetadataBuilder):
    """Builds metadata of index keys that several tokens share, with slots of these keys."""

    supports_draft_decode_metadata_update = False  # the slots are this builder's

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.slots = torch.empty(tokens, dtype=torch.int64, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> IndexerMetadata:
        """The metadata of one step."""
        common = common_attn_metadata
        common.block_table_tensor.clamp_(min=0)
        metadata = super().build(common_prefix_len, common, fast_build)
        metadata.slot_mapping = get_compressed_slot_mapping(
            common.num_actual_tokens,
            common.slot_mapping,
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            self.kv_cache_spec.num_states,
            self.kv_cache_spec.tokens_per_state,
            out=self.slots,
        )
        return metadata


class ShardedIndexerMetadataBuilder(IndexerMetadataBuilder):
    """Builds metadata where ranks of decode context parallelism share the keys.

    Lengths of decodes are static tensors. Which tokens are scored together follows from query
    lengths on the host, so only batches of equal query lengths can be captured in a CUDA graph.
    """

    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH
    supports_draft_decode_metadata_update = False

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        group = get_dcp_group()
        interleave = vllm_config.parallel_config.cp_kv_cache_interleave_size
        self.shard = ContextShard(group.rank_in_group, group.world_size, interleave)
        self.all_gather = functools.partial(group.all_gather, dim=0)
        scheduler = vllm_config.scheduler_config
        max_tokens = scheduler.max_num_batched_tokens
        self.workspace = exchange_workspace(
            group.device_group,
            min(max_tokens, scheduler.max_num_seqs * self.max_decode_len),
            vllm_config.model_config.hf_text_config.index_topk,
            device,
        )
        self.tokens = torch.arange(max_tokens, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(max_tokens, dtype=torch.int32, device=device)

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> IndexerMetadata:
        """The metadata of one step."""
        common = common_attn_metadata
        metadata = super().build(common_prefix_len, common, fast_build)
        metadata.max_seq_len = self.shard.longest(common.max_seq_len)
        ends = common.query_start_loc[1:]
        request = torch.searchsorted(ends, self.tokens, right=True).clamp(max=common.num_reqs - 1)
        seq_lens = common.seq_lens[request] - (ends[request] - 1 - self.tokens)
        seq_lens = seq_lens.where(self.tokens < ends[-1], 0)  # later rows are padding
        self.lengths.copy_(self.shard.lengths(seq_lens))
        runs = Run.all_of(common.query_start_loc_cpu)
        metadata.sharded = ShardedRows(
            self.shard, runs, self.lengths, self.all_gather, self.workspace
        )
        return metadata


def num_row_ranks() -> int:
    """Ranks that may divide the rows of prefills: those of tensor parallelism.

    Not those that share contexts, which divide the keys of every row already.
    """
    return get_tp_group().world_size if get_dcp_group().world_size == 1 else 1


def division_rule(config: VllmConfig) -> Rule:
    """When ranks divide the rows of prefills, named in the log.

    The first rank decides for all: processes on other nodes may lack its environment.
    """
    text = config.model_config.hf_text_config
    usual = Rule.default_row_keys(text.index_topk, text.index_n_heads)
    own = Rule(divide_rows_from() or usual, shard_min_rows(config))
    rule: Rule = get_tp_group().broadcast_object(own)
    if rule.min_rows is None:
        LOGGER.info_once(
            "sparsemla: TP ranks divide the indexer's rows in prefills that see %d keys a row on "
            "average, and more in short ones (%s)",
            rule.row_keys,
            DIVIDE_ROWS_FROM,
        )
    else:
        LOGGER.info_once(
            "sparsemla: TP ranks divide the indexer's rows in prefills of %d rows or more "
            "(indexer_tp_shard_min_rows)",
            rule.min_rows,
        )
    return rule


class IndexerBackend(DeepseekV32IndexerBackend):
    """vLLM's backend of the index cache, with :class:`IndexerMetadataBuilder`."""

    @classmethod
    def supports_pcp(cls) -> bool:
        """Yes, in vLLM's NVIDIA classes; see :func:`refuse`."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Yes: scores have the same bits in any batch, and the selection from them is exact."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Yes: lengths are read on the device."""
        return True

    @staticmethod
    def get_builder_cls() -> type[IndexerMetadataBuilder]:
        """The class that builds the metadata of each step."""
        return IndexerMetadataBuilder


class ShardedIndexerBackend(IndexerBackend):
    """:class:`IndexerBackend` for ranks of decode context parallelism."""

    @classmethod
    def supports_pcp(cls) -> bool:
        """No: ranks that share keys select for the same tokens."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """No: tokens are scored together by lengths on the host."""
        return False

    @staticmethod
    def get_builder_cls() -> type[ShardedIndexerMetadataBuilder]:
        """The class that builds the metadata of each step."""
        return ShardedIndexerMetadataBuilder


class IdleIndexerOp(SparseAttnIndexer):
    """The op that vLLM's indexer constructs, but :class:`SparseMLAIndexer` never calls.

    From sm_89 on it is vLLM's op, because other models may use it. On older GPUs the constructor
    does nothing: vLLM's would require DeepGEMM and compile kernels that do not compile there.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:  # noqa: ANN401 - passed on to vLLM
        if current_platform.has_device_capability(89):
            super().__init__(*args, **kwargs)
        else:
            nn.Module.__init__(self)


class SparseMLAIndexer(nn.Module):
    """The indexer of one layer, with the weights and the cache of vLLM's indexer.

    Args:
        indexer: vLLM's indexer.

    Raises:
        ValueError: the index cache is not e4m3, or prefill context parallelism is on.
    """

    def __init__(self, indexer: Indexer) -> None:
        super().__init__()
        refuse(indexer.vllm_config, indexer.head_dim, portable=True)
        self.inner = indexer
        indexer.k_cache.get_attn_backend = index_cache_backend
        reserve_selections(indexer.vllm_config, indexer.k_cache, indexer.topk_indices_buffer)

    @property
    def topk_indices_buffer(self) -> Tensor:
        """The buffer of selected positions, which attention of Dots3Note asks its indexer for."""
        buffer: Tensor = self.inner.topk_indices_buffer
        return buffer

    @topk_indices_buffer.setter
    def topk_indices_buffer(self, buffer: Tensor) -> None:
        """Take the target's buffer, as vLLM asks the layers of a draft model to."""
        self.inner.topk_indices_buffer = buffer

    def forward(
        self, hidden_states: Tensor, qr: Tensor, positions: Tensor, rotary_emb: RotaryEmbeddingBase
    ) -> Tensor:
        """Write this step's keys to the cache, and select keys for its tokens.

        Args:
            hidden_states: ``[T, hidden_size]``.
            qr: ``[T, q_lora_rank]``, the compressed queries.
            positions: ``[T]``, position of each token in its request.
            rotary_emb: vLLM's rotary embedding of the indexer.

        Returns:
            The buffer of selected positions, int32; its first T rows are new.
        """
        return run_indexer(self.inner, hidden_states, qr, positions, rotary_emb)


def run_indexer(
    indexer: Any,  # noqa: ANN401 - of one of vLLM's classes
    hidden_states: Tensor,
    qr: Tensor,
    positions: Tensor,
    rotary_emb: RotaryEmbeddingBase,
    *,
    rope_first: bool = True,
) -> Tensor:
    """Project the inputs of a layer by vLLM's weights, and select keys for its tokens.

    Args:
        indexer: vLLM's, with its weights, its cache and the buffer of selected positions.
        hidden_states, qr, positions, rotary_emb: as in :meth:`SparseMLAIndexer.forward`.
        rope_first: RoPE rotates the first dims of heads and keys, not the last.

    Returns:
        The buffer, int32; its first T rows are new.
    """
    q = indexer.wq_b(qr)[0].view(-1, indexer.n_head, indexer.head_dim)
    k, weights = indexer.wk_weights_proj(hidden_states)[0].split(
        [indexer.head_dim, indexer.n_head], dim=-1
    )
    buffer: Tensor = indexer.topk_indices_buffer
    torch.ops.vllm.sparsemla_indexer(
        positions,
        q,
        k,
        weights,
        indexer.k_norm.weight,
        indexer.k_norm.bias,
        indexer.k_norm.eps,
        rotary_emb.cos_sin_cache,
        not rotary_emb.is_neox_style,
        rope_first,
        buffer,
        indexer.topk_tokens,
        _encode_layer_name(indexer.k_cache.prefix),
    )
    return buffer


def index_cache_backend() -> type[IndexerBackend]:
    """The backend of the index cache."""
    return ShardedIndexerBackend if get_dcp_group().world_size > 1 else IndexerBackend


def refuse(config: VllmConfig, head_dim: int, *, portable: bool = False) -> None:
    """Raise ValueError for settings that this indexer does not support.

    Args:
        config: of the engine.
        head_dim: of index keys.
        portable: in vLLM's portable class, where one op prepares and writes the keys.
    """
    parallel = config.parallel_config
    divides_prefills = parallel.prefill_context_parallel_size > 1
    problems = {
        f"index_head_dim must be {INDEX_FP8.head_dim}, got {head_dim}": head_dim
        != INDEX_FP8.head_dim,
        "indexer_kv_dtype must be fp8": dsa_indexer_uses_fp4(config),
        "prefill_context_parallel_size must be 1 in vLLM's portable class, as this package's op "
        "writes index keys there, and gathers none of other ranks": divides_prefills and portable,
        "prefill_context_parallel_size must be 1 beside decode context parallelism, as ranks that "
        "share keys select for the same tokens": (
            divides_prefills and parallel.decode_context_parallel_size > 1
        ),
        **unread_by_indexer(config),
    }
    for problem, present in problems.items():
        if present:
            raise ValueError(
                f"sparsemla_indexer: {problem}; otherwise remove sparsemla_indexer from "
                "VLLM_PLUGINS"
            )


@eager_break_during_capture
def _indexer(
    positions: Tensor,
    q: Tensor,
    k: Tensor,
    weights: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    norm_eps: float,
    cos_sin_cache: Tensor,
    interleaved: bool,
    rope_first: bool,
    topk_indices_buffer: Tensor,
    topk: int,
    layer_name: LayerNameType,
) -> None:
    """Write keys, quantise queries and select keys, with batch and cache of the forward context.

    The cache is not an argument, because torch.compile copies arguments that an op changes.
    """
    context = get_forward_context()
    layer_name = _resolve_layer_name(layer_name)
    q_fp8 = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    head_weights = torch.empty(weights.shape, dtype=torch.float32, device=q.device)
    if not isinstance(context.attn_metadata, dict):
        reserve_memory(q_fp8, topk)
        return
    metadata = context.attn_metadata[layer_name]
    layer = context.no_compile_layers[layer_name]
    cache = PagedCache(layer.kv_cache, INDEX_FP8)
    tokens = metadata.slot_mapping.shape[0]  # later rows are padding
    fused_indexer_rope_quant(
        q[:tokens],
        weights[:tokens],
        k[:tokens],
        norm_weight,
        norm_bias,
        cos_sin_cache,
        cache,
        positions=positions[:tokens],
        slot_mapping=metadata.slot_mapping,
        eps=norm_eps,
        interleaved=interleaved,
        rope_first=rope_first,
        out=q_fp8[:tokens],
        weights_out=head_weights[:tokens],
    )
    select_keys(q_fp8, head_weights, cache, metadata, topk, topk_indices_buffer)
    keep_selection(layer, topk_indices_buffer[: len(q)])


def select_keys(
    q: Tensor,
    weights: Tensor,
    cache: PagedCache,
    metadata: IndexerMetadata,
    topk: int,
    topk_indices_buffer: Tensor,
    *,
    ratio: int = 1,
) -> None:
    """Select keys for the tokens of a batch, and nothing for the padding behind them.

    Args:
        q: e4m3 ``[T, H, 128]``.
        weights: float32 ``[T, H]``, with the scales of the queries.
        cache: the index cache, with this step's keys.
        metadata: of the batch.
        topk: number of keys that a token selects.
        topk_indices_buffer: int32, its first T rows and ``topk`` columns are overwritten.
        ratio: tokens of a key.
    """
    page_table = metadata.block_table
    if not q.is_cuda or not torch.cuda.is_current_stream_capturing():
        # Not in a capture: the graph will be replayed with longer requests.
        page_table = page_table[:, : -(-metadata.max_seq_len // (ratio * cache.page_size))]
    chosen = topk_indices_buffer[: q.shape[0], :topk]
    if metadata.sharded is not None:
        metadata.sharded.select_topk(
            q,
            weights,
            cache,
            page_table,
            topk,
            max_workspace_bytes=max_score_bytes(),
            out=chosen,
        )
        return
    offsets, seq_lens = metadata.query_start_loc, metadata.seq_lens
    if metadata.divided is not None:
        metadata.divided.select_topk(
            q,
            weights,
            cache,
            topk,
            columns=page_table.shape[1],
            ratio=ratio,
            max_workspace_bytes=max_score_bytes(),
            out=chosen,
        )
        division = metadata.divided.division
        chosen[division.rows.stop :] = -1  # padding
        requests, tokens = division.first_request, division.rows.start
        if requests == 0:
            return
        offsets, seq_lens, page_table = (
            offsets[: requests + 1],
            seq_lens[:requests],
            page_table[:requests],
        )
        q, weights, chosen = q[:tokens], weights[:tokens], chosen[:tokens]
    indexer_topk(
        q,
        weights,
        cache,
        input_row_offsets=offsets,
        seq_lens=seq_lens,
        page_table=page_table,
        topk=topk,
        ratio=ratio,
        max_workspace_bytes=max_score_bytes(),
        out=chosen,
    )


def max_score_bytes() -> int:
    """The bound on the memory of the scores, by vLLM's variable."""
    return envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB << 20


def reserve_memory(q: Tensor, topk: int) -> None:
    """Allocate as much as a step would, where vLLM profiles one without a batch.

    Args:
        q: e4m3 ``[T, H, 128]``, index queries of the longest step.
        topk: number of keys that a token selects.
    """
    most, ranks = max_score_bytes(), num_row_ranks()
    if ranks > 1:
        lists = 4 * topk * len(q)
        most = max(most + (q.nbytes + lists) // ranks, lists + lists // ranks)
    torch.empty(most, dtype=torch.uint8, device=q.device)


def _fake_indexer(*args: object, **kwargs: object) -> None:
    return None


direct_register_custom_op(
    op_name=OPERATOR.removeprefix("vllm::"),
    op_func=_indexer,
    mutates_args=["topk_indices_buffer"],
    fake_impl=_fake_indexer,
)

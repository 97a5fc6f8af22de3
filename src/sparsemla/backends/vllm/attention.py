"""The attention backend: vLLM's sparse MLA with the kernels of sparsemla.

vLLM's common classes build the metadata, convert selected positions to rows of the cache, and run
short prompts as dense attention. This backend computes attention over the selected rows for decodes
and prefills. It reads bfloat16 and ``fp8_ds_mla`` caches in place, except that it first converts
the contexts of long prefills from ``fp8_ds_mla`` to bfloat16 if that is faster. Rows without RoPE
have 528 bytes in ``fp8_ds_mla``, without the zeros that vLLM would keep, and are written here.

With ``SPARSEMLA_FP8_MMA=1`` prefills over converted rows permit FP8 MMAs. All other attention reads
the cache in place, for which no kernel has them.

With HiSparse the rows of a step are on the GPU, in a buffer that vLLM fills: the attention of both
kinds reads them there, and nothing is converted.

With ``VLLM_BATCH_INVARIANT`` every token takes one path, whatever else its step computes: the
kernel of prefills, which never splits keys, over the cache in place.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm import envs
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.distributed import get_dcp_group
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayer,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.index_group import HiSparseMLAIndexGroup
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view
from vllm.v1.attention.ops.metadata import compute_token_to_req_indices
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.worker.workspace import current_workspace_manager

from sparsemla import (
    BF16_576,
    FP8_DS_MLA,
    FP8_NOPE,
    CacheFormat,
    PagedCache,
    Plan,
    PrefillChunk,
    Serving,
    decode_workspace_size,
    fused_rope_rmsnorm_quant,
    gather_dequant,
    prefill_workspace_rows,
    sparse_decode,
    sparse_prefill,
    split_prefill_chunks,
    to_slots,
)
from sparsemla.backends.environment import FP8_MMA, permits_fp8_mma
from sparsemla.backends.vllm.compressed import WrittenRows, unrotated
from sparsemla.backends.vllm.settings import NO_FNUZ, adapted
from sparsemla.backends.vllm.warmup import LOGGER, PAGE_SIZE, Key, register_attention
from sparsemla.formats import BF16_512
from sparsemla.kernels.attention.schedule import FEW_HEADS
from sparsemla.kernels.common.device import describe
from sparsemla.pooling import NO_NORM

FORMATS = {"auto": BF16_576, "bfloat16": BF16_576, "fp8_ds_mla": FP8_DS_MLA}
"""Cache formats by vLLM's ``kv_cache_dtype``."""
NOPE_DIM = BF16_512.head_dim
"""Dims of a row without RoPE, as GLM-5.3-Flash has them."""
ROUNDED_BYTES = 656
"""Temporary bytes of a row that a kernel with FP8 MMAs rounds."""


def format_of(kv_cache_dtype: str, head_size: int) -> CacheFormat:
    """The format of a layer's rows.

    Args:
        kv_cache_dtype: vLLM's.
        head_size: dims of a row before it is stored.
    """
    format = FORMATS[kv_cache_dtype]
    if head_size != NOPE_DIM:
        return format
    return FP8_NOPE if format == FP8_DS_MLA else BF16_512


class SparseMLABackend(AttentionBackend):
    """The capabilities of the backend, which vLLM checks before it builds a model."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(FORMATS)

    @staticmethod
    def get_name() -> str:
        """The name of the backend in vLLM's registry."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SparseMLAImpl]:
        """The class that computes attention in each layer."""
        return SinkImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMLAMetadataBuilder]:
        """The class that builds the metadata of each step."""
        return SparseMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        """Tokens per page: 64, like vLLM's index cache, which shares the block table.

        GLM-5.3-Flash, whose rows have no RoPE, has pages of pools.
        """
        pooled = kv_cache_spec is not None and kv_cache_spec.head_size == NOPE_DIM
        return [MultipleOf(64) if pooled else 64]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Dims of a latent row."""
        return [BF16_576.head_dim, NOPE_DIM]

    @classmethod
    def is_mla(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        """Yes: layers of Hunyuan V4 have them."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Yes, but see :func:`_refuse_batch_invariance`."""
        return True

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Make the block stride a multiple of a row, so that a single index addresses a row.

        vLLM's rows of ``fp8_ds_mla`` have place for RoPE, also where there is none.
        """
        packed = spec.state_content_bytes == FP8_DS_MLA.bytes_per_token
        if packed and spec.head_size == NOPE_DIM:
            spec = replace(spec, state_content_bytes=FP8_NOPE.bytes_per_token)
        return align_blocks_to_rows(spec)

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """Whether the GPU is sm_80 or newer, as the ``triton`` tier needs."""
        return capability.major >= 8

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """The reason why this cache or this model is not supported, or None."""
        if kv_cache_dtype is not None and kv_cache_dtype not in FORMATS:
            return f"--kv-cache-dtype must be one of {', '.join(FORMATS)}; got {kv_cache_dtype}"
        if kv_cache_dtype == FP8_DS_MLA.name and current_platform.is_fp8_fnuz():
            return NO_FNUZ
        config = get_current_vllm_config_or_none()
        if config is None or config.model_config is None:
            return None
        reason = _refuse_model(config) or _refuse_both_cp(config) or adapted(config, "kv_b_proj")
        if head_size == NOPE_DIM:
            reason = reason or _refuse_without_rope(config, kv_cache_dtype)
        if reason is None and envs.VLLM_BATCH_INVARIANT:
            reason = _refuse_batch_invariance(config, device_capability)
        return reason


def _refuse_model(config: VllmConfig) -> str | None:
    """The reason why a model is not supported, or None."""
    text = config.model_config.hf_text_config
    topk = getattr(text, "index_topk", None)
    if topk is None or topk % 128:
        return f"the model's index_topk must be a multiple of 128, got {topk}"
    dims = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    if dims not in ((512, 64), (NOPE_DIM, 0)):
        return (
            "the model's kv_lora_rank and qk_rope_head_dim must be (512, 64) or "
            f"({NOPE_DIM}, 0), got {dims}"
        )
    return None


def _refuse_both_cp(config: VllmConfig) -> str | None:
    """The reason why ranks cannot divide both tokens and contexts, or None."""
    parallel = config.parallel_config
    pcp, dcp = parallel.prefill_context_parallel_size, parallel.decode_context_parallel_size
    if pcp == 1 or dcp == 1:
        return None
    return (
        "prefill context parallelism needs --decode-context-parallel-size 1: ranks that share "
        f"contexts attend for the same tokens; got {pcp} and {dcp}"
    )


def _refuse_without_rope(config: VllmConfig, kv_cache_dtype: str | None) -> str | None:
    """The reason why rows without RoPE are not supported, or None."""
    ranks = config.parallel_config.prefill_context_parallel_size
    if ranks > 1:
        return (
            "rows without RoPE need --prefill-context-parallel-size 1: no indexer of pools gathers "
            f"the keys of other ranks; got {ranks}"
        )
    if envs.VLLM_BATCH_INVARIANT:
        return "batch invariance needs rows with RoPE: nothing has shown it for linear attention"
    if config.attention_config.hisparse_config is not None and kv_cache_dtype == FP8_DS_MLA.name:
        return (
            "rows without RoPE need HiSparse off or --kv-cache-dtype auto: it moves rows of "
            f"{FP8_DS_MLA.bytes_per_token} bytes, and these have {FP8_NOPE.bytes_per_token}"
        )
    return None


def _refuse_batch_invariance(config: VllmConfig, capability: DeviceCapability) -> str | None:
    """The reason why results could depend on the batch, or None."""
    topk = config.model_config.hf_text_config.index_topk
    if "sparsemla_indexer" not in (envs.VLLM_PLUGINS or ()):
        return (
            "batch invariance needs sparsemla_indexer in VLLM_PLUGINS: the selections of vLLM's "
            "indexer depend on the batch"
        )
    if capability != DeviceCapability(9, 0):
        return (
            "batch invariance needs sm_90: the indexer's portable kernels do not fix the order of "
            f"their sums over heads for every tile; got sm_{capability.to_int()}"
        )
    if config.attention_config.hisparse_config is not None:
        return "batch invariance needs HiSparse off: its kernel may list rows in another order"
    if topk > 4096 and topk & (topk - 1):
        return (
            "batch invariance needs an index_topk of at most 4096 or a power of two: vLLM compacts "
            f"others in an order that changes from run to run; got {topk}"
        )
    return None


@dataclass(kw_only=True)
class SparseMLAMetadata(SparseMLACommonMetadata):
    """vLLM's common metadata plus the prefills to convert.

    Attributes:
        converted: the plan of all prefills of the batch, whose contexts are converted to bfloat16
            chunk by chunk; None to read the cache in place.
    """

    converted: Plan | None = None


class SparseMLAMetadataBuilder(SparseMLACommonMetadataBuilder[SparseMLAMetadata]):
    """Builds the metadata of a step; decodes may have several tokens, as in speculative decoding.

    Each query token selects its own keys, so decodes may have different query lengths. The metadata
    of decodes consists of static tensors, which a captured CUDA graph can read again.
    """

    metadata_cls = SparseMLAMetadata
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(
            1, supports_spec_as_decode=True, supports_dcp_with_varlen=True
        )
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1
        quantised = kv_cache_spec.cache_dtype_str == FP8_DS_MLA.name
        dtype = FP8_DS_MLA.name if quantised else "auto"
        self.format = format_of(dtype, kv_cache_spec.head_size)
        self.batch_invariant = envs.VLLM_BATCH_INVARIANT
        # A conversion reads the cache of a layer, which HiSparse keeps on the host.
        hisparse = vllm_config.attention_config.hisparse_config
        self.may_convert = self.dcp_world_size == 1 and hisparse is None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SparseMLAMetadata:
        """The metadata of one step."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        if self.batch_invariant:
            # The longest prefill of a step decides about dense attention for all of its prefills,
            # and all of their lengths decide about conversions.
            if metadata.prefill is not None:
                metadata.prefill.use_dense_mha = False
            return metadata
        lens = common_attn_metadata.seq_lens_cpu_upper_bound
        if metadata.num_prefills and lens is not None and self.may_convert:
            metadata.converted = self._conversions(metadata, common_attn_metadata, lens)
        return metadata

    def _conversions(
        self, metadata: SparseMLAMetadata, common: CommonAttentionMetadata, seq_lens: Tensor
    ) -> Plan | None:
        """The prefills to convert; ``seq_lens`` are upper bounds on the host."""
        prefills = slice(metadata.num_decodes, metadata.num_decodes + metadata.num_prefills)
        offsets = common.query_start_loc_cpu[prefills.start : prefills.stop + 1]
        config = self.vllm_config
        num_rows = prefill_workspace_rows(
            offsets.diff().tolist(),
            seq_lens[prefills].tolist(),
            cache_format=self.format,
            num_heads=config.model_config.get_num_attention_heads(config.parallel_config),
            topk=self.topk_tokens,
            max_rows=config.model_config.max_model_len,
            device=self.device,
        )
        return None if num_rows is None else prefill_plan(metadata, common, seq_lens, num_rows)

    def update_draft_decode_metadata(self, metadata: SparseMLAMetadata) -> None:
        """Update the one tensor that the model runner does not own; captured in its graphs."""
        tokens = metadata.num_decode_tokens
        if tokens:
            compute_token_to_req_indices(
                metadata.query_start_loc, metadata.req_id_per_token, tokens, tokens
            )


def prefill_plan(
    metadata: SparseMLAMetadata, common: CommonAttentionMetadata, seq_lens: Tensor, max_rows: int
) -> Plan:
    """The plan of all prefills of a batch, counted from the first one.

    Args:
        metadata: of the step.
        common: likewise, before vLLM's common classes.
        seq_lens: on the host, upper bounds of the rows that requests have on this rank.
        max_rows: workspace rows of a chunk.
    """
    first, last = metadata.num_decodes, metadata.num_decodes + metadata.num_prefills
    offsets = common.query_start_loc_cpu[first : last + 1]
    tokens = slice(int(offsets[0]), int(offsets[-1]))
    offsets, lens = (offsets - offsets[0]).tolist(), seq_lens[first:last]
    starts, parts = [], split_prefill_chunks(lens, max_rows)
    for begin, end in parts:
        starts.append((lens[begin:end].cumsum(0) - lens[begin:end]).int())
    # Parts begin aligned, as their kernels were warmed up.
    on_device = [part.to(metadata.seq_lens.device, non_blocking=True) for part in starts]
    table, device_lens = metadata.block_table[first:last], metadata.seq_lens[first:last]
    chunks = (
        PrefillChunk(
            slice(begin, end),
            slice(offsets[begin], offsets[end]),
            int(lens[begin:end].sum()),
            device_lens[begin:end],
            table[begin:end],
            part,
        )
        for (begin, end), part in zip(parts, on_device, strict=True)
    )
    queries = metadata.query_start_loc
    return part_plan(
        metadata,
        input_row_offsets=queries[first : last + 1] - queries[first],
        num_tokens=offsets[-1],
        seq_lens=device_lens,
        page_table=table,
        request_ids=metadata.req_id_per_token[tokens] - first,
        workspace_starts=torch.cat(on_device),
        prefill_chunks=tuple(chunks),
    )


def part_plan(
    metadata: SparseMLAMetadata,
    *,
    num_tokens: int,
    input_row_offsets: Tensor,
    seq_lens: Tensor,
    page_table: Tensor,
    request_ids: Tensor,
    decode_query_len: int = 0,
    workspace_starts: Tensor | None = None,
    prefill_chunks: tuple[PrefillChunk, ...] = (),
) -> Plan:
    """The plan of all decodes of a batch, or of all prefills."""
    count, unread = len(seq_lens), metadata.slot_mapping[:0]
    decodes, decode_tokens = (0, 0) if prefill_chunks else (count, num_tokens)
    return Plan(
        num_requests=count,
        num_tokens=num_tokens,
        num_decodes=decodes,
        num_prefills=count - decodes,
        num_decode_tokens=decode_tokens,
        num_prefill_tokens=num_tokens - decode_tokens,
        decode_query_len=decode_query_len,
        max_query_len=decode_query_len or num_tokens,
        max_seq_len=metadata.max_seq_len,
        max_context_len=metadata.max_seq_len,
        page_size=PAGE_SIZE,
        positions=unread,
        slot_mapping=unread,
        input_row_offsets=input_row_offsets,
        seq_lens=seq_lens,
        page_table=page_table,
        request_ids=request_ids,
        prefill_request_ids=request_ids if prefill_chunks else None,
        workspace_starts=workspace_starts,
        prefill_chunks=prefill_chunks,
    )


class SparseMLAImpl(SparseMLACommonImpl[SparseMLAMetadata]):
    """Attention of one layer over the rows selected by the indexer, for any number of heads.

    The lse, by which context parallelism merges results, is a natural logarithm. A token without a
    key on this rank has output 0 and lse -inf.
    """

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = True
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    converts_in_workspace: ClassVar[bool] = True
    sinks: Tensor | None = None
    # Converting indices on a side stream does not pay off for layers with their own indexer.
    group_conversion_decode_only: ClassVar[bool] = True

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        q_lora_rank: int | None,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        qk_head_dim: int,
        v_head_dim: int,
        kv_b_proj: Any,  # noqa: ANN401 - a linear layer, passed on to vLLM's class
        indexer: object | None = None,
        topk_indices_buffer: Tensor | None = None,
        index_group_builder: Any | None = None,  # noqa: ANN401 - likewise
        q_pad_num_heads: int | None = None,
    ) -> None:
        unsupported = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        }
        for name, value in unsupported.items():
            if value is not None:
                raise ValueError(f"sparsemla: {name} must be None, got {value!r}")
        if kv_cache_dtype not in FORMATS:
            raise ValueError(
                f"sparsemla: kv_cache_dtype must be one of {', '.join(FORMATS)}, "
                f"got {kv_cache_dtype!r}"
            )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
            q_lora_rank,
            kv_lora_rank,
            qk_nope_head_dim,
            qk_rope_head_dim,
            qk_head_dim,
            v_head_dim,
            kv_b_proj,
            indexer,
            topk_indices_buffer,
            index_group_builder,
            q_pad_num_heads,
        )
        if self.dcp_world_size > 1:
            check_reduce_scatter(get_dcp_group())
        indices = self.topk_indices_buffer
        if indices is None:
            raise ValueError("sparsemla: an indexer or topk_indices_buffer must be given, got none")
        self.format = format_of(kv_cache_dtype, head_size)
        if self.format == FP8_NOPE:
            # Dense prefills would gather rows of 656 bytes.
            self.supports_dense_mha_prefill = False
            self.unrotated = unrotated(indices.shape[0], indices.device)
        self.batch_invariant = envs.VLLM_BATCH_INVARIANT
        self.hisparse = isinstance(self.index_group, HiSparseMLAIndexGroup)
        self.conversion_rows = self.workspace_bytes = 0
        if not self.batch_invariant:
            self.conversion_rows = self._conversion_rows()
            self.workspace_bytes = max(
                decode_workspace_bytes(
                    indices.shape[0], num_heads * self.dcp_world_size, indices.device
                ),
                self.conversion_rows * BF16_576.bytes_per_token * self.converts_in_workspace,
            )
        self.allow_fp8_mma = permits_fp8_mma()
        if self.allow_fp8_mma:
            self._check_fp8_mma()
            LOGGER.info_once(
                "sparsemla: prefills over converted rows permit FP8 MMAs (%s=1)", FP8_MMA
            )
        # Grow vLLM's workspace now: captured graphs hold its address.
        self._workspace()
        register_attention(type(self))

    def _conversion_rows(self) -> int:
        """Workspace rows for the longest context, 0 if no step gains from conversion."""
        config = get_current_vllm_config_or_none()
        if config is None or self.dcp_world_size > 1 or self.hisparse:
            return 0
        longest = config.model_config.max_model_len
        pays_off = _conversion_pays_off(
            config.scheduler_config.max_num_batched_tokens,
            longest,
            self.format,
            self.num_heads,
            config.model_config.hf_text_config.index_topk,
            self.topk_indices_buffer.device,
        )
        return longest if pays_off else 0

    def _check_fp8_mma(self) -> None:
        """Raise ValueError if no step would use the FP8 MMAs that the user asked for."""
        device = describe(self.topk_indices_buffer.device)
        dtype, ranks, heads = self.kv_cache_dtype, self.dcp_world_size, self.num_heads
        problems = {
            "VLLM_BATCH_INVARIANT must be unset, as it keeps prefills from converting rows": (
                self.batch_invariant
            ),
            f"--kv-cache-dtype must be fp8_ds_mla, as only its rows are converted; got {dtype}": (
                not self.format.fp8_dim
            ),
            "rows must have RoPE dims, as no kernel has FP8 MMAs for rows of 512 dims": (
                self.format == FP8_NOPE
            ),
            "--decode-context-parallel-size must be 1, as shared contexts are not converted; got "
            f"{ranks}": ranks > 1,
            "HiSparse must be off, as rows on the host are not converted": self.hisparse,
            f"the GPU must be sm_90, as no other has a kernel with FP8 MMAs; got {device}": (
                device.capability != (9, 0)
            ),
            f"a rank must have more than {FEW_HEADS} heads: lower --tensor-parallel-size; got "
            f"{heads}": heads <= FEW_HEADS,
            "no step gains from a conversion: raise --max-num-batched-tokens or --max-model-len": (
                self.conversion_rows == 0
            ),
        }
        for problem, present in problems.items():
            if present:
                raise ValueError(f"sparsemla: {problem}; otherwise unset {FP8_MMA}")

    def rows_on_gpu(self, kv_cache: Tensor) -> Tensor:
        """The cache that kernels read: the layer's, or the buffer of HiSparse, which has no other.

        Args:
            kv_cache: the layer's.
        """
        if not self.hisparse:
            return kv_cache
        return self.index_group.physical_kv_cache(self.index_group_index)

    def warm_up_keys(self, serving: Serving) -> Iterable[Key]:
        """What the layer may ask of the GPU, if its rows are there."""
        yield serving
        if self.format == FP8_NOPE:  # rows without RoPE are written here
            yield WrittenRows.of(serving, FP8_NOPE)

    def converted_rows(self, kv_cache: Tensor, plan: Plan, number: int) -> Tensor:
        """The bfloat16 rows of a chunk, in the workspace shared by all layers."""
        chunk = plan.prefill_chunks[number]
        spec = ((chunk.num_workspace_rows, self.format.head_dim), torch.bfloat16)
        return gather_dequant(
            PagedCache(kv_cache, self.format),
            chunk.page_table,
            chunk.seq_lens,
            chunk.workspace_starts,
            out=current_workspace_manager().get_simultaneous(spec)[0],
        )

    def reserve_workspace(self) -> None:
        """Reserve the workspace in vLLM's profiling run of a microbatch."""
        self._workspace()
        if self.allow_fp8_mma:
            # A kernel allocates its rounded rows in each call: vLLM leaves as much free as the
            # profiling run takes.
            self.topk_indices_buffer.new_empty(
                self.conversion_rows * ROUNDED_BYTES, dtype=torch.uint8
            )

    def _workspace(self) -> Tensor | None:
        return decode_workspace(self.workspace_bytes)

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: SparseMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of a batch; prefills read converted rows if the metadata has a plan of them."""
        plan, first = attn_metadata.converted, attn_metadata.num_decode_tokens
        num_tokens = (q[0] if isinstance(q, tuple) else q).shape[0]
        # vLLM may run prefills as dense attention elsewhere; q then has the tokens of decodes only.
        if plan is None or not self._fits(plan) or num_tokens <= first:
            return self.attend_in_place(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        q, q_rope = self._parts(q)
        out = q.new_empty(*q.shape[:2], self.format.value_dim)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        end = first + plan.num_tokens
        out[end:] = 0  # padding
        lse[end:] = -torch.inf
        if first:
            some = q[:first] if q_rope is None else (q[:first], q_rope[:first])
            out[:first], lse[:first] = self.attend_in_place(
                some, kv_c_and_k_pe_cache, attn_metadata, layer
            )
        indices = to_slots(
            self.topk_indices_buffer[first:end],
            plan.page_table,
            plan.request_ids,
            page_size=PAGE_SIZE,
            workspace_starts=plan.workspace_starts,
            prefill_request_ids=plan.prefill_request_ids,
        )
        for number, chunk in enumerate(plan.prefill_chunks):
            tokens = slice(first + chunk.tokens.start, first + chunk.tokens.stop)
            sparse_prefill(
                q[tokens],
                self.converted_rows(kv_c_and_k_pe_cache, plan, number),
                indices[chunk.tokens],
                q_rope=None if q_rope is None else q_rope[tokens],
                softmax_scale=self.scale,
                attn_sink=self.sinks,
                allow_fp8_mma=self.allow_fp8_mma,
                out=out[tokens],
                lse=lse[tokens],
            )
        return out, lse

    def _fits(self, plan: Plan) -> bool:
        """Whether all chunks fit the workspace."""
        return all(c.num_workspace_rows <= self.conversion_rows for c in plan.prefill_chunks)

    def _parts(self, q: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Queries as wide as the rows: in one tensor, or without their RoPE dims and these."""
        q, q_rope = q if isinstance(q, tuple) else (q, None)
        return q, None if q_rope is None or q_rope.shape[-1] == 0 else q_rope

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
        skip_scale: bool = False,
    ) -> None:
        """Write this step's rows, by vLLM's op unless they have 528 bytes."""
        if self.format != FP8_NOPE:
            super().do_kv_cache_update(
                kv_c_normed, k_pe, kv_cache, slot_mapping, kv_cache_dtype, k_scale, skip_scale
            )
            return
        slots = slot_mapping.flatten()
        if kv_cache.numel() == 0:  # vLLM profiles a step without caches
            return
        table, positions, weight = self.unrotated
        fused_rope_rmsnorm_quant(
            kv_c_normed.new_empty(len(slots), 0, table.shape[1]),  # nothing to rotate
            kv_c_normed[: len(slots)],
            table,
            weight,
            PagedCache(kv_cache, FP8_NOPE),
            positions=positions[: len(slots)],
            slot_mapping=slots,
            eps=NO_NORM,
        )

    def attend_in_place(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        metadata: SparseMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[Tensor, Tensor]:
        """Attention of the first tokens of a batch, or of all, without a conversion."""
        found: tuple[Tensor, Tensor] = super().forward_mqa(q, kv_cache, metadata, layer)
        return found

    def _forward_mqa_kernel(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_cache: Tensor,
        topk_indices: Tensor,
        valid_counts: Tensor,
        *,
        layer: AttentionLayer,
        block_size: int,
        is_decode: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of each query token over its selected rows.

        Args:
            q: ``[T, H, 576]`` bfloat16, or a pair of ``[T, H, 512]`` and ``[T, H, 64]``; without
                RoPE ``[T, H, 512]``, or a pair with ``[T, H, 0]``.
            kv_cache: ``[num_blocks, block_size, row]`` with any block stride.
            topk_indices: int32 ``[T, K]``, indices into the flat view of all rows, including rows
                in the gaps between blocks; -1 after the last.
            valid_counts: int32 ``[T]``, number of selected rows.
            layer: ignored.
            block_size: tokens per block.
            is_decode: all tokens are decodes. They are few, so their keys are split, unless results
                must not depend on the batch.

        Returns:
            ``[T, H, 512]`` bfloat16 and lse ``[T, H]`` float32.
        """
        rows, _ = flat_kv_row_view(kv_cache, block_size)
        cache = PagedCache(rows.unsqueeze(1), self.format)
        return self.attend(q, cache, topk_indices, valid_counts, is_decode=is_decode)

    def attend(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        cache: PagedCache,
        topk_indices: Tensor,
        counts: Tensor,
        *,
        is_decode: bool,
    ) -> tuple[Tensor, Tensor]:
        """Attention over rows of the GPU; see :meth:`_forward_mqa_kernel`."""
        q, q_rope = self._parts(q)
        if self.batch_invariant or not is_decode:
            return sparse_prefill(
                q,
                cache,
                topk_indices,
                q_rope=q_rope,
                softmax_scale=self.scale,
                topk_lengths=counts,
                attn_sink=self.sinks,
            )
        # Each token of a speculative decode selects its own keys: pass it as a separate request.
        out, lse = sparse_decode(
            q.unsqueeze(1),
            cache,
            topk_indices.unsqueeze(1),
            q_rope=None if q_rope is None else q_rope.unsqueeze(1),
            softmax_scale=self.scale,
            topk_lengths=counts,
            attn_sink=self.sinks,
            workspace=self._workspace(),
        )
        return out.squeeze(1), lse.squeeze(1)


class SinkImpl(SparseMLAImpl):
    """:class:`SparseMLAImpl` for heads that may have attention sinks.

    Args:
        args, kwargs: of that class.
        sinks: float32 ``[H]``, the logit of each head's sink; a parameter that is loaded later.

    Raises:
        ValueError: ranks share contexts, so each of them would count the sinks.
    """

    def __init__(
        self,
        *args: Any,  # noqa: ANN401 - passed on
        sinks: Tensor | None = None,
        **kwargs: Any,  # noqa: ANN401 - passed on
    ) -> None:
        super().__init__(*args, **kwargs)
        if sinks is not None and self.dcp_world_size > 1:
            raise ValueError(
                "sparsemla: attention sinks need --decode-context-parallel-size 1, as each rank "
                f"would count them; got {self.dcp_world_size}"
            )
        self.sinks = sinks


def check_reduce_scatter(group: GroupCoordinator) -> None:
    """Refuse a group of GPUs whose ``reduce_scatter`` would return memory that nobody wrote.

    vLLM's communicator for GPUs reduces with its own binding of NCCL. It switches the binding off
    without a word if NCCL lacks a function of the binding's list. The output is then never written.

    Raises:
        RuntimeError: the binding is off.
    """
    binding = getattr(group.device_communicator, "pynccl_comm", None)
    if binding is not None and binding.disabled:
        raise RuntimeError(
            "sparsemla: decode context parallelism needs vLLM's binding of NCCL, but vLLM switched "
            "it off and would merge uninitialised memory. NCCL must be 2.29.7 or newer (install "
            "the torch that vLLM asks for, or set VLLM_NCCL_SO_PATH) and VLLM_DISABLE_PYNCCL unset"
        )


@functools.cache
def _conversion_pays_off(
    max_tokens: int,
    max_length: int,
    cache_format: CacheFormat,
    num_heads: int,
    topk: int,
    device: torch.device,
) -> bool:
    """Whether conversion makes any step of at most ``max_tokens`` tokens faster.

    For a given number of tokens, a request with a context of exactly ``topk`` tokens gains most: a
    shorter one selects less, and a longer one converts rows that are not selected. All numbers of
    tokens are tried, because fewer tokens may gain where more do not.
    """
    return any(
        prefill_workspace_rows(
            [tokens],
            [max(tokens, min(topk, max_length))],
            cache_format=cache_format,
            num_heads=num_heads,
            topk=topk,
            device=device,
        )
        for tokens in range(max_tokens, 0, -1)
    )


@functools.cache
def decode_workspace_bytes(max_tokens: int, num_heads: int, device: torch.device) -> int:
    """:func:`decode_workspace_size`, computed once for all layers."""
    return decode_workspace_size(max_tokens, 1, num_heads, device=device)


def decode_workspace(num_bytes: int) -> Tensor | None:
    """Workspace of :func:`sparsemla.sparse_decode`, shared by all layers; None for no bytes.

    Every call of a layer asks for the largest size that it ever needs: each of vLLM's microbatches
    has a separate workspace, and vLLM forbids its growth after decodes have been captured.
    """
    if num_bytes == 0:
        return None
    return current_workspace_manager().get_simultaneous(((num_bytes,), torch.uint8))[0]

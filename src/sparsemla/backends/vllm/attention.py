"""The attention backend: vLLM's sparse MLA with its kernels exchanged.

vLLM's common classes build the metadata, convert the indexer's choice into rows of the cache and
run short prompts as dense attention. What is left is attention over the chosen rows, for decodes
and prefills, from a bfloat16 or an ``fp8_ds_mla`` cache where it lies. Long prefills over the
latter are the exception: where that is faster, their contexts are converted to bfloat16 first.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config_or_none
from vllm.model_executor.layers.attention.sparse_mla_attention import (
    SparseMLACommonImpl,
    SparseMLACommonMetadata,
    SparseMLACommonMetadataBuilder,
)
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionLayer,
    CommonAttentionMetadata,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view
from vllm.v1.attention.ops.metadata import compute_token_to_req_indices
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec
from vllm.v1.worker.workspace import current_workspace_manager

from sparsemla import (
    BF16_576,
    FP8_DS_MLA,
    CacheFormat,
    PagedCache,
    decode_workspace_size,
    gather_dequant,
    prefill_workspace_rows,
    sparse_decode,
    sparse_prefill,
    split_prefill_chunks,
    to_slots,
)

FORMATS = {"auto": BF16_576, "bfloat16": BF16_576, "fp8_ds_mla": FP8_DS_MLA}
"""Cache formats by the names that vLLM gives them."""


class SparseMLABackend(AttentionBackend):
    """What vLLM asks before it builds a model."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(FORMATS)

    @staticmethod
    def get_name() -> str:
        """The name that it is registered under."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[SparseMLAImpl]:
        """What runs in each layer."""
        return SparseMLAImpl

    @staticmethod
    def get_builder_cls() -> type[SparseMLAMetadataBuilder]:
        """What runs once a step."""
        return SparseMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,
    ) -> list[int | MultipleOf]:
        """Tokens of a page: those of vLLM's index cache, which shares the block table."""
        return [64]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Dims of a latent row."""
        return [BF16_576.head_dim]

    @classmethod
    def is_mla(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """Yes."""
        return True

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        """Lay blocks whole rows apart, so that one number names a row."""
        return align_blocks_to_rows(spec)

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """From sm_80 on, as Triton's tier."""
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
        """Why this cache or this model cannot be served, or None."""
        if kv_cache_dtype is not None and kv_cache_dtype not in FORMATS:
            return f"--kv-cache-dtype must be one of {', '.join(FORMATS)}; got {kv_cache_dtype}"
        config = get_current_vllm_config_or_none()
        return None if config is None or config.model_config is None else _refuse_model(config)


def _refuse_model(config: VllmConfig) -> str | None:
    """Why a model cannot be served, or None."""
    text = config.model_config.hf_text_config
    topk = getattr(text, "index_topk", None)
    if topk is None or topk % 128:
        return f"the model's index_topk must be a multiple of 128, got {topk}"
    dims = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    if dims != (512, 64):
        return f"the model's kv_lora_rank and qk_rope_head_dim must be (512, 64), got {dims}"
    if config.attention_config.hisparse_config is not None:
        return "HiSparse must be off: rows on the host are not read"
    return None


@dataclass
class Conversion:
    """Prefills whose contexts are converted to bfloat16 rows together.

    Attributes:
        tokens: the query tokens, numbered in the batch.
        request_ids: int32, request of each token, counted from the first of these.
        block_table: int32 ``[n, W]``.
        seq_lens: int32 ``[n]``.
        starts: int32 ``[n]``, the first row of each request in the workspace.
        num_rows: of the workspace.
    """

    tokens: slice
    request_ids: Tensor
    block_table: Tensor
    seq_lens: Tensor
    starts: Tensor
    num_rows: int


@dataclass(kw_only=True)
class SparseMLAMetadata(SparseMLACommonMetadata):
    """vLLM's common metadata, and what is converted.

    Attributes:
        conversions: all prefills of the batch, or none if the cache is better read in place.
    """

    conversions: tuple[Conversion, ...] = ()


class SparseMLAMetadataBuilder(SparseMLACommonMetadataBuilder[SparseMLAMetadata]):
    """vLLM's common metadata; decodes may have several tokens, as in speculative decoding.

    Each query token selects its own keys, so decodes need not be of one length, and the metadata
    of decodes holds nothing that a captured graph could not read again.
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
        self.format = FP8_DS_MLA if quantised else BF16_576

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> SparseMLAMetadata:
        """The metadata of one step."""
        metadata = super().build(common_prefix_len, common_attn_metadata, fast_build)
        lens = common_attn_metadata.seq_lens_cpu_upper_bound
        if metadata.num_prefills and lens is not None and self.dcp_world_size == 1:
            metadata.conversions = self._conversions(metadata, common_attn_metadata, lens)
        return metadata

    def _conversions(
        self, metadata: SparseMLAMetadata, common: CommonAttentionMetadata, seq_lens: Tensor
    ) -> tuple[Conversion, ...]:
        """What is converted of a batch whose requests have ``seq_lens`` on the host, or fewer."""
        prefills = slice(metadata.num_decodes, metadata.num_decodes + metadata.num_prefills)
        offsets = common.query_start_loc_cpu[prefills.start : prefills.stop + 1]
        lens = seq_lens[prefills]
        config = self.vllm_config
        num_rows = prefill_workspace_rows(
            offsets.diff().tolist(),
            lens.tolist(),
            cache_format=self.format,
            num_heads=config.model_config.get_num_attention_heads(config.parallel_config),
            topk=self.topk_tokens,
            max_rows=config.model_config.max_model_len,
            device=self.device,
        )
        if num_rows is None:
            return ()
        found = []
        for begin, end in split_prefill_chunks(lens, num_rows):
            requests = slice(prefills.start + begin, prefills.start + end)
            tokens = slice(int(offsets[begin]), int(offsets[end]))
            ends = lens[begin:end].cumsum(0)
            found.append(
                Conversion(
                    tokens,
                    metadata.req_id_per_token[tokens] - requests.start,
                    common.block_table_tensor[requests],
                    common.seq_lens[requests],
                    (ends - lens[begin:end]).int().to(self.device, non_blocking=True),
                    int(ends[-1]),
                )
            )
        return tuple(found)

    def update_draft_decode_metadata(self, metadata: SparseMLAMetadata) -> None:
        """Renew the one tensor that is not the model runner's own; runs inside its graphs."""
        tokens = metadata.num_decode_tokens
        if tokens:
            compute_token_to_req_indices(
                metadata.query_start_loc, metadata.req_id_per_token, tokens, tokens
            )


class SparseMLAImpl(SparseMLACommonImpl[SparseMLAMetadata]):
    """Attention of one layer over the rows that the indexer chose, for any number of heads.

    The lse, which context parallelism joins results by, is a natural logarithm; a token without a
    key on this rank has output 0 and lse -inf.
    """

    can_return_lse_for_decode: bool = True
    lse_base_on_e: bool = True
    supports_dcp: bool = True
    supports_pcp: bool = False
    supports_mtp_with_cp_non_trivial_interleave_size: bool = True
    # Layers with an indexer of their own gain nothing from the detour over a side stream.
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
        kv_b_proj: Any,  # noqa: ANN401 - a linear layer that is only handed on
        indexer: object | None = None,
        topk_indices_buffer: Tensor | None = None,
        index_group_builder: Any | None = None,  # noqa: ANN401 - likewise
        q_pad_num_heads: int | None = None,
    ) -> None:
        refused = {
            "alibi_slopes": alibi_slopes,
            "sliding_window": sliding_window,
            "logits_soft_cap": logits_soft_cap,
            "kv_sharing_target_layer_name": kv_sharing_target_layer_name,
        }
        for name, value in refused.items():
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
        chosen = self.topk_indices_buffer
        if chosen is None:
            raise ValueError("sparsemla: an indexer or topk_indices_buffer must be given, got none")
        self.format = FORMATS[kv_cache_dtype]
        self.conversion_rows = self._conversion_rows()
        self.workspace_bytes = max(
            _workspace_bytes(chosen.shape[0], num_heads * self.dcp_world_size, chosen.device),
            self.conversion_rows * BF16_576.bytes_per_token,
        )
        # vLLM's workspace grows now, before graphs remember where it is.
        self._workspace()

    def _conversion_rows(self) -> int:
        """Rows for the longest context, if any step would have prefills converted."""
        config = get_current_vllm_config_or_none()
        if config is None or self.dcp_world_size > 1:
            return 0
        longest = config.model_config.max_model_len
        converts = _converts(
            config.scheduler_config.max_num_batched_tokens,
            longest,
            self.format,
            self.num_heads,
            config.model_config.hf_text_config.index_topk,
            self.topk_indices_buffer.device,
        )
        return longest if converts else 0

    def _converted(self, num_rows: int) -> Tensor:
        """bfloat16 rows in the workspace that all layers share."""
        spec = ((num_rows, self.format.head_dim), torch.bfloat16)
        return current_workspace_manager().get_simultaneous(spec)[0]

    def reserve_workspace(self) -> None:
        """Claim it for a microbatch of vLLM's profiling run."""
        self._workspace()

    def _workspace(self) -> Tensor | None:
        """Scratch of :func:`sparsemla.sparse_decode` in the workspace that all layers share.

        Its size is the most that this layer ever asks for: each of vLLM's microbatches has a
        workspace of its own, which vLLM locks once decodes have been captured.
        """
        if self.workspace_bytes == 0:
            return None
        spec = ((self.workspace_bytes,), torch.uint8)
        return current_workspace_manager().get_simultaneous(spec)[0]

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: SparseMLAMetadata,
        layer: AttentionLayer,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of a batch; prefills over converted rows if the step says so and they fit."""
        conversions = attn_metadata.conversions
        num_tokens = (q[0] if isinstance(q, tuple) else q).shape[0]
        fits = all(each.num_rows <= self.conversion_rows for each in conversions)
        # Without the prefills, vLLM runs them as dense attention, and decodes are all that is left.
        if not conversions or not fits or num_tokens <= conversions[0].tokens.start:
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        out = q.new_empty(*q.shape[:2], self.format.value_dim)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        out[conversions[-1].tokens.stop :] = 0  # padding
        lse[conversions[-1].tokens.stop :] = -torch.inf
        decodes = slice(conversions[0].tokens.start)
        if decodes.stop:
            out[decodes], lse[decodes] = super().forward_mqa(
                q[decodes], kv_c_and_k_pe_cache, attn_metadata, layer
            )
        cache = PagedCache(kv_c_and_k_pe_cache, self.format)
        for each in conversions:
            rows = gather_dequant(
                cache,
                each.block_table,
                each.seq_lens,
                each.starts,
                out=self._converted(each.num_rows),
            )
            indices = to_slots(
                self.topk_indices_buffer[each.tokens],
                each.block_table,
                each.request_ids,
                page_size=cache.page_size,
                workspace_starts=each.starts,
                prefill_request_ids=each.request_ids,
            )
            sparse_prefill(
                q[each.tokens],
                rows,
                indices,
                softmax_scale=self.scale,
                out=out[each.tokens],
                lse=lse[each.tokens],
            )
        return out, lse

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
        """Attention of each query token over its rows.

        Args:
            q: ``[T, H, 576]``, or its parts ``[T, H, 512]`` and ``[T, H, 64]``; bfloat16.
            kv_cache: ``[num_blocks, block_size, row]``; blocks may lie apart.
            topk_indices: int32 ``[T, K]``, rows counted across what lies between blocks, -1 behind
                the last.
            valid_counts: int32 ``[T]``.
            layer: not used.
            block_size: tokens of a block.
            is_decode: all tokens decode, so there are few and their keys are split.

        Returns:
            ``[T, H, 512]`` bfloat16 and lse ``[T, H]`` float32.
        """
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        rows, _ = flat_kv_row_view(kv_cache, block_size)
        cache = PagedCache(rows.unsqueeze(1), self.format)
        if not is_decode:
            return sparse_prefill(
                q, cache, topk_indices, softmax_scale=self.scale, topk_lengths=valid_counts
            )
        # A token of a speculative decode has keys of its own: to the kernel it is a request.
        out, lse = sparse_decode(
            q.unsqueeze(1),
            cache,
            topk_indices.unsqueeze(1),
            softmax_scale=self.scale,
            topk_lengths=valid_counts,
            workspace=self._workspace(),
        )
        return out.squeeze(1), lse.squeeze(1)


@functools.cache
def _converts(
    max_tokens: int,
    max_length: int,
    cache_format: CacheFormat,
    num_heads: int,
    topk: int,
    device: torch.device,
) -> bool:
    """Whether any step of at most ``max_tokens`` is faster with contexts converted.

    Of all steps with as many tokens, the one that gains most is a request whose context is just as
    long as the selection: shorter ones select less, and of longer ones more is converted in vain.
    Fewer tokens may gain where more do not.
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
def _workspace_bytes(max_tokens: int, num_heads: int, device: torch.device) -> int:
    """Bytes that decode may need for any count of tokens.

    Fewer tokens are split more, so that the most bytes are not those of the most tokens.
    """
    sizes = (
        decode_workspace_size(tokens, 1, num_heads, device=device)
        for tokens in range(1, max_tokens + 1)
    )
    return max(sizes)

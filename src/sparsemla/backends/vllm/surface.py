"""The parts of vLLM that the plugins touch, and checks that they still fit.

Everything that the modules of this package import from vLLM, override, call or read has a row in
:data:`SURFACE`, and ``tests/test_vllm.py`` fails for an import without one. To move to a new
version of vLLM, change :data:`SUPPORTED` and run these tests: they name each row that no longer
fits, and its purpose.
"""

import dataclasses
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any

Function = Callable[..., Any]

SUPPORTED = (0, 33)
"""The version of vLLM, without its last part."""


@dataclasses.dataclass(frozen=True)
class Dependency:
    """Something of vLLM.

    Args:
        path: ``module:name``, where the name may have dots.
        purpose: what for.
        needs: parameters of a function, members of anything else, that must exist.
    """

    path: str
    purpose: str
    needs: tuple[str, ...] = ()

    def problem(self) -> str | None:
        """Why it no longer fits, or None."""
        module, _, name = self.path.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in filter(None, name.split(".")):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            return f"{self.path} ({self.purpose}): {error}"
        missing = [need for need in self.needs if need not in _members(found)]
        return f"{self.path} ({self.purpose}): no {', '.join(missing)}" if missing else None


def _members(found: Any) -> set[str]:  # noqa: ANN401 - anything of vLLM
    """Parameters of a function, or members of anything else; of a class, its instances' too."""
    if inspect.isroutine(found):
        return set(inspect.signature(found).parameters)
    members = set(dir(found))
    for cls in inspect.getmro(found) if inspect.isclass(found) else ():
        members |= vars(cls).get("__annotations__", {}).keys()
        constructor = inspect.unwrap(vars(cls).get("__init__", object.__init__))
        if inspect.isfunction(constructor):  # its attributes, and names of buffers
            code = constructor.__code__
            members |= {*code.co_names, *(name for name in code.co_consts if isinstance(name, str))}
    return members


def _rows(table: str) -> tuple[Dependency, ...]:
    """Rows of a table: modules, under them names with their purposes, under these the needs."""
    rows: list[Dependency] = []
    module = ""
    for line in inspect.cleandoc(table).splitlines():
        if not line.startswith(" "):
            module = line
        elif not line.startswith(" " * 8):
            name, purpose = line.strip().split(": ", 1)
            rows.append(Dependency(module + name, purpose))
        else:
            needs = (*rows[-1].needs, *line.split())
            rows[-1] = dataclasses.replace(rows[-1], needs=needs)
    return tuple(rows)


CONFIG = _rows(
    """
    vllm.config:
        VllmConfig: settings of the engine
            model_config cache_config parallel_config scheduler_config attention_config
            compilation_config kernel_config kv_transfer_config lora_config num_speculative_tokens
            offload_config speculative_config use_v2_model_runner __post_init__
        get_current_vllm_config_or_none: settings while layers are built
        CompilationConfig: graphs of prefills, whether the indexer is active, the model's layers
            _attention_ops cudagraph_mode static_forward_context
        CUDAGraphMode: graphs of prefills
            FULL
        CUDAGraphMode.mixed_mode: graphs of prefills
    vllm.config.model:
        ModelConfig: dims of the model
            architectures get_num_attention_heads hf_text_config is_submodel_config max_model_len
            use_mla
    vllm.config.attention:
        AttentionConfig: refused settings
            backend backend_per_kind hisparse_config indexer_sparse_logits
            indexer_tp_shard_min_rows use_non_causal
    vllm.config.cache:
        CacheConfig: refused settings, and the format of FP8 caches
            cache_dtype kv_cache_dtype_skip_layers
    vllm.config.kernel:
        KernelConfig: refused settings
            sparse_indexer_topk_backend
    vllm.config.offload:
        OffloadConfig: refused settings
            prefetch uva
        PrefetchOffloadConfig: refused settings
            offload_group_size
        UVAOffloadConfig: refused settings
            cpu_offload_gb
    vllm.config.lora:
        LoRAConfig: refused settings
            target_modules
    vllm.config.kv_transfer:
        KVTransferConfig: rows on the host, refused settings
            has_connector kv_connector kv_connector_extra_config kv_connector_module_path
    vllm.lora.utils:
        is_in_target_modules: refused settings
            module_name target_modules packed_modules_mapping
    vllm.config.speculative:
        SpeculativeConfig: refused settings, and the backend and the caches of drafts
            attention_backend draft_model_config kv_cache_dtype use_dspark
    vllm.platforms:
        current_platform: refused platforms, and GPUs that vLLM does not serve
            get_device_capability is_cpu is_cuda is_fp8_fnuz is_rocm is_xpu
    vllm.v1.attention.backends.registry:
        AttentionBackendEnum: name of it
            CUSTOM
        AttentionBackendEnum.get_path: whose name it is
        AttentionBackendEnum.is_overridden: whose name it is
    vllm.config.scheduler:
        SchedulerConfig: largest step
            max_num_batched_tokens
    vllm.config.parallel:
        ParallelConfig: refused settings, and shares of ranks
            cp_kv_cache_interleave_size decode_context_parallel_size pipeline_parallel_size
            prefill_context_parallel_size tensor_parallel_size use_ubatching
    vllm:
        envs: plugins named, memory, and the batch-invariant mode
            VLLM_PLUGINS VLLM_SPARSE_INDEXER_MAX_LOGITS_MB VLLM_BATCH_INVARIANT
    """
)

WARMUP = CONFIG + _rows(
    """
    vllm.model_executor.warmup.jit_warmup:
        JitWarmupRegistry: kernels that vLLM compiles before it serves
            register activate warmup
        VllmJitKernel: base class
            get_warmup_keys compile compile_many
    vllm.model_executor.layers.rotary_embedding.base:
        RotaryEmbeddingBase: rotation
            cos_sin_cache is_neox_style
    vllm.model_executor.models.deepseek_v2:
        DeepseekV32IndexerCache: strides of the index cache
            kv_cache
    vllm.utils.math_utils:
        cdiv: width of a block table
    vllm.v1.attention.backend:
        max_decode_query_len: longest decode
    vllm.v1.worker.block_table:
        get_block_table_width: width of a block table
    """
)

ATTENTION = WARMUP + _rows(
    """
    vllm.v1.attention.backends.registry:
        register_backend: registration
            backend class_path
    vllm.v1.attention.backend:
        AttentionBackend: base class
            validate_configuration supports_batch_invariance supported_dtypes
            supported_kv_cache_dtypes
        AttentionCGSupport: CUDA graphs
            UNIFORM_BATCH
        AttentionLayer: type of an argument
        CommonAttentionMetadata: batch of a step
            query_start_loc query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound num_reqs
            num_actual_tokens max_seq_len block_table_tensor slot_mapping
        MultipleOf: type of a result
    vllm.distributed:
        get_dcp_group: ranks that merge results
    vllm.distributed.parallel_state:
        GroupCoordinator: ranks that merge results
            device_communicator
    vllm.distributed.device_communicators.cuda_communicator:
        CudaCommunicator: whether they can
            pynccl_comm
    vllm.distributed.device_communicators.pynccl:
        PyNcclCommunicator: whether they can
            disabled
    vllm.platforms.interface:
        DeviceCapability: GPUs
            major
    vllm.model_executor.layers.attention.sparse_mla_attention:
        SparseMLACommonImpl: base class: slots of positions, dense short prompts
            do_kv_cache_update forward_mqa _forward_mqa_kernel topk_indices_buffer dcp_world_size
            index_group index_group_index
        SparseMLACommonMetadata: base class
            num_decodes num_prefills num_decode_tokens req_id_per_token prefill
        SparseMLAPrefillMetadata: no dense short prompts in the batch-invariant mode
            use_dense_mha
        SparseMLACommonMetadataBuilder: base class
            metadata_cls build topk_tokens dcp_world_size
    vllm.v1.attention.backends.mla.index_group:
        HiSparseMLAIndexGroup: whether rows are on the host
            physical_kv_cache
    vllm.v1.attention.backends.mla.sparse_utils:
        align_blocks_to_rows: strides of blocks
        flat_kv_row_view: rows of the cache
    vllm.v1.attention.ops.metadata:
        compute_token_to_req_indices: metadata of draft decodes
    vllm.v1.kv_cache_interface:
        AttentionSpec: layout of the cache
            block_size head_size state_content_bytes
        KVCacheSpec: type of an argument
    vllm.v1.worker.workspace:
        current_workspace_manager: memory shared by layers
        WorkspaceManager: memory shared by layers
            get_simultaneous
    """
)

HOST = ATTENTION + _rows(
    """
    vllm.config:
        get_current_vllm_config: settings while layers are built
    vllm.config.scheduler:
        SchedulerConfig: seats
            max_num_seqs
    vllm.distributed:
        get_dcp_group: ranks that share contexts
        get_tp_group: ranks that allocate in turn
    vllm.distributed.parallel_state:
        GroupCoordinator: these ranks
            cpu_group rank_in_group world_size
    vllm.distributed.kv_transfer.kv_connector.v1.base:
        KVConnectorBase_V1: base class
            _get_connector_metadata _vllm_config build_connector_meta get_num_new_matched_tokens
            register_kv_caches requires_kv_delivery save_kv_layer shutdown start_load_kv
            supports_sleep_mode update_state_after_alloc wait_for_layer_load wait_for_save
        KVConnectorMetadata: base class
        KVConnectorRole: type of an argument
        SupportsHMA: base class
            request_finished_all_groups
    vllm.config.kv_transfer:
        KVTransferConfig: type of an argument
    vllm.forward_context:
        ForwardContext: type of an argument
        in_piecewise_cudagraph: whether fetches begin before attention
    vllm.model_executor.layers.attention.attention:
        get_attention_context: metadata of a step
            layer_name
    vllm.models.deepseek_v32.attention:
        DeepseekV32Attention: rows that are written before the selection
            _sparse_indexer_and_attn
    vllm.utils.math_utils:
        cdiv: sizes of workspaces
    vllm.utils.torch_utils:
        async_tensor_h2d: seats of new requests
            data device dtype
    vllm.v1.attention.backend:
        AttentionMetadata: type of an argument
    vllm.v1.core.kv_cache_manager:
        KVCacheBlocks: type of an argument
    vllm.v1.core.sched.output:
        SchedulerOutput: requests of a step
            has_sync_kv_loads kv_cache_block_copies scheduled_cached_reqs scheduled_new_reqs
        NewRequestData: requests that take a seat
            req_id
        CachedRequestData: requests that take a seat
            resumed_req_ids
    vllm.v1.kv_cache_interface:
        KVCacheConfig: blocks that vLLM planned
            kv_cache_groups num_blocks
        KVCacheGroupSpec: layers
            kv_cache_spec layer_names
        MLAAttentionSpec: placeholders of rows
            block_size cache_dtype_str dtype head_size state_content_bytes
        UniformTypeKVCacheSpecs: layers
            kv_cache_specs
    vllm.v1.request:
        Request: type of an argument
    vllm.v1.worker.gpu.kv_connector:
        ActiveKVConnector: calls of the connector
            _build_load_kwargs finalize_step post_forward pre_forward set_disabled
    vllm.v1.worker.gpu.input_batch:
        InputBatch: seats of a batch
            idx_mapping req_ids
    vllm.model_executor.layers.attention.sparse_mla_attention:
        SharedTopkIndicesBuffer: whether a layer selects
            _indexer
        SparseMLACommonMetadata: decodes of a step
            block_table decode_max_query_len max_seq_len query_start_loc seq_lens slot_mapping
    """
)

INDEXER = WARMUP + _rows(
    """
    vllm.config:
        CompilationConfig: ops that split a compiled model
            _attention_ops
    vllm.model_executor.models.registry:
        ModelRegistry: classes of models
            register_model
    vllm.model_executor.custom_op:
        CustomOp: exchange of the op
            register_oot
        PluggableLayer: exchange of the layer
            register_oot
        op_registry_oot: layers exchanged so far
    vllm.model_executor.layers.mla:
        MultiHeadLatentAttentionWrapper: exchanged layer of the portable class
            indexer
    vllm.model_executor.layers.sparse_attn_indexer:
        SparseAttnIndexer: exchanged op of the portable class
    vllm.model_executor.models.utils:
        extract_layer_index: numbers of layers whose selections are recorded
            layer_name
    vllm.model_executor.models.deepseek_v2:
        DeepseekV32IndexerCache: layers whose selections are recorded
            prefix
        Indexer: weights of the indexer
            wq_b wk_weights_proj k_norm k_cache n_head head_dim topk_tokens topk_indices_buffer
            vllm_config
    vllm.model_executor.layers.rotary_embedding.base:
        RotaryEmbeddingBase: rotation
            cos_sin_cache is_neox_style
    vllm.compilation.breakable_cudagraph:
        eager_break_during_capture: CUDA graphs in pieces
    vllm.distributed:
        get_dcp_group: ranks that share contexts
        get_tp_group: ranks that divide the rows of prefills
    vllm.distributed.parallel_state:
        GroupCoordinator: these ranks
            rank_in_group world_size all_gather broadcast_object
    vllm.forward_context:
        get_forward_context: metadata of a step
        ForwardContext: metadata of a step
            attn_metadata no_compile_layers cudagraph_runtime_mode
    vllm.platforms:
        current_platform: GPUs
            is_cuda has_device_capability
    vllm.utils.deep_gemm:
        mqa_logits_use_mx_scales: format of index keys
    vllm.utils.torch_utils:
        LayerNameType: names of layers in ops
        _encode_layer_name: names of layers in ops
        _resolve_layer_name: names of layers in ops
        direct_register_custom_op: our op
            op_name op_func mutates_args fake_impl
    vllm.v1.attention.backend:
        AttentionBackend: type of a result
        AttentionCGSupport: CUDA graphs
            ALWAYS UNIFORM_BATCH
        AttentionMetadataBuilder: base class
            build
        CommonAttentionMetadata: batch of a step
            max_query_len query_start_loc_cpu seq_lens_cpu_upper_bound
    vllm.v1.attention.backends.mla.compressor_utils:
        get_compressed_slot_mapping: slots of index keys
            num_tokens slot_mapping query_start_loc seq_lens block_table block_size compress_ratio
            out
    vllm.v1.attention.backends.mla.indexer:
        DeepseekV32IndexerBackend: base class
        DeepseekV32IndexerMetadata: base class
            seq_lens max_seq_len slot_mapping block_table
        dsa_indexer_uses_fp4: refused settings
    vllm.v1.kv_cache_interface:
        AttentionSpec: layout of the index cache
            num_states tokens_per_state
    """
)

RECORDING = INDEXER + _rows(
    """
    vllm.config.speculative:
        SpeculativeConfig: refused settings
            enable_adaptive_verification
    vllm.distributed:
        get_pp_group: layers of a stage
    vllm.distributed.kv_transfer:
        get_kv_transfer_group: records that are written at once
    vllm.distributed.kv_transfer.kv_connector.v1.base:
        KVConnectorBase_V1: base class
            _get_connector_metadata _vllm_config build_connector_meta finish_forward
            get_num_new_matched_tokens register_kv_caches requires_kv_delivery save_kv_layer
            shutdown start_load_kv unregister_kv_caches update_state_after_alloc
            wait_for_layer_load wait_for_save
        KVConnectorMetadata: base class
        KVConnectorRole: type of an argument
        SupportsHMA: base class
            request_finished_all_groups
    vllm.forward_context:
        ForwardContext: type of an argument
    vllm.v1.attention.backend:
        AttentionMetadata: type of an argument
    vllm.v1.core.kv_cache_manager:
        KVCacheBlocks: type of an argument
    vllm.v1.core.sched.output:
        SchedulerOutput: tokens of a step
            has_sync_kv_loads num_scheduled_tokens scheduled_cached_reqs scheduled_new_reqs
        NewRequestData: requests that come, or come again
            num_computed_tokens prefill_token_ids req_id
        CachedRequestData: tokens of a step
            num_computed_tokens req_ids
    vllm.v1.kv_cache_interface:
        KVCacheConfig: type of an argument
    vllm.v1.request:
        Request: what has finished
            num_tokens request_id
    vllm.v1.worker.gpu.kv_connector:
        ActiveKVConnector: calls of the connector
            _build_load_kwargs finalize_step finish_forward post_forward pre_forward set_disabled
    vllm.v1.worker.gpu.input_batch:
        InputBatch: order of a batch
            req_ids
    """
)

NVIDIA = _rows(
    """
    vllm:
        _custom_ops: index keys of other ranks
            indexer_k_quant_and_cache
    vllm.config:
        CUDAGraphMode: when attention can be dense
            FULL
    vllm.v1.attention.ops.pcp:
        maybe_gather_indexer_k: index keys of other ranks
            k slot_mapping num_decode_tokens use_pcp pcp_shard_decode_requests
    vllm.models.deepseek_v32:
        attention: exchanged function
            sparse_attn_indexer DeepseekV32Attention
    vllm.models.deepseek_v32.attention:
        DeepseekV32Attention: whether the exchange took, and the buffer of selections
            _sparse_indexer_and_attn indexer layer_name topk_indices_buffer
        DeepseekV32Indexer: exchanged class of the index cache
            indexer_cache_cls k_cache
    vllm.model_executor.models.deepseek_v2:
        DeepseekV32IndexerCache: base class
            kv_cache get_attn_backend
    vllm.models.deepseek_v32.nvidia:
        model: base class
            DeepseekV32ForCausalLM
        mtp: base class
            DeepseekV32MTP
    """
)

GLM5_NEXT = INDEXER + _rows(
    """
    vllm.models.glm5next.common.attention:
        Indexer: weights and caches of the indexer
            head_dim index_kpool index_kpool_compress_ape index_kpool_compress_gate k_cache k_norm
            n_head rope_dim tail_cache topk_indices_buffer topk_tokens vllm_config wk_weights_proj
            wq_b
        Glm5NextIndexerCache: cache of index keys
            kv_cache get_attn_backend get_kv_cache_spec prefix
        Glm5NextTailCache: cache of open pools
            kv_cache get_attn_backend get_kv_cache_spec prefix
    vllm.v1.attention.backend:
        MultipleOf: type of a result
    vllm.v1.attention.backends.mla.indexer:
        Glm5NextIndexerBackend: base class
            get_supported_kernel_block_sizes
        KpoolTailBackend: base class
            get_builder_cls
    vllm.v1.attention.ops.metadata:
        compute_token_to_req_indices: requests of tokens
            query_start_loc out num_mapped_tokens num_tokens
    vllm.v1.kv_cache_interface:
        CircularBufferSpec: cache of open pools
            block_size dtype
        KVCacheSpec: type of an argument
    """
)

HY_V4 = INDEXER + _rows(
    """
    vllm.models.hy_v4.nvidia:
        attention: exchanged class of indexers
            HYV4MLAAttention Indexer
        model: base class
            HYV4ForCausalLM
        mtp: base class of drafts
            HYV4MTP
    vllm.models.hy_v4.nvidia.attention:
        HYV4MLAAttention: layers with an indexer
            indexer indexer_rope_emb
        Indexer: base class: weights and cache of the indexer
            forward head_dim k_cache k_norm n_head topk_indices_buffer topk_tokens vllm_config
            wk_weights_proj wq_b
    """
)

DEEPSEEK_V4 = INDEXER + _rows(
    """
    vllm.model_executor.warmup.jit_warmup:
        JitWarmupRegistry: vLLM's kernels that still run
            register activate _registrations
    vllm.models:
        deepseek_v4: base classes
            DeepseekV4ForCausalLM DeepSeekV4MTP
    vllm.models.deepseek_v4.nvidia:
        dspark: base class of drafts
            DSparkDeepseekV4ForCausalLM
        model: exchanged choice of attention, and of the first layer's hyper-connections
            _select_dsv4_attn_cls DeepseekV4DecoderLayer mhc_pre_broadcast_tilelang
            mhc_pre_tilelang
    vllm.models.deepseek_v4:
        attention: exchanged class of compressors
            DeepseekCompressor DeepseekV4Attention DeepseekV4Indexer
    vllm.models.deepseek_v4.attention:
        DeepseekV4Attention: base class: projections, caches, streams
            _fused_qnorm_rope_kv_insert _get_indexer_cls _o_proj _split_qkv_and_norm attn_sink
            backend_cls compress_ratio compressor forward_mqa get_padded_num_q_heads head_dim
            indexer kv_cache kv_norm max_num_batched_tokens n_groups n_heads n_local_groups
            n_local_heads o_lora_rank q_lora_rank rotary_emb scale swa_backend_cls swa_cache_layer
            topk_indices_buffer window_size wo_a wo_b
        DeepseekV4Indexer: base class
            _get_attn_cls _get_cache_cls _get_compressor_cls _q_rope_quant compressor indexer_op
            k_cache
        DeepseekV4IndexerCache: base class
            kv_cache get_attn_backend
    vllm.models.deepseek_v4.compressor:
        DeepseekCompressor: base class: weights and state
            _static_forward_context ape forward k_cache_prefix norm overlap rms_norm_eps
            state_cache
        CompressorBackend: base class
            get_builder_cls
        CompressorMetadata: base class
            block_table slot_mapping token_to_req_indices
        CompressorMetadataBuilder: base class
            build token_to_req_indices
    vllm.models.deepseek_v4.nvidia.flashmla:
        DeepseekSparseSWAFlashMLABackend: base class
            get_builder_cls
        DeepseekSparseSWAFlashMLAMetadataBuilder: base class
    vllm.models.deepseek_v4.sparse_mla:
        DeepseekV4FlashMLABackend: base class
            get_name supports_compute_capability
        DeepseekV4FlashMLAMetadata: entries of a step
            block_table c128a_decode_topk_lens c128a_global_decode_topk_indices
            c128a_prefill_topk_indices slot_mapping
    vllm.v1.attention.backends.mla.sparse_swa:
        DeepseekSparseSWAMetadata: raw rows of a step
            decode_swa_indices decode_swa_lens block_table num_decode_tokens num_decodes
            num_prefill_tokens num_prefills prefill_gather_lens prefill_query_lens_cpu
            prefill_seq_lens prefill_seq_lens_cpu prefill_swa_indices prefill_swa_lens
            query_start_loc query_start_loc_cpu slot_mapping token_to_req_indices
        DeepseekSparseSWAMetadataBuilder: base class
            build build_for_cudagraph_capture build_tile_scheduler device vllm_config
    vllm.v1.attention.backends.mla.compressor_utils:
        get_dspark_swa_index_width: rows that a drafted token sees
            window_size num_speculative_tokens
    vllm.v1.attention.backends.mla.indexer:
        DeepseekV4IndexerBackend: base class
            get_builder_cls get_supported_kernel_block_sizes
    vllm.platforms.interface:
        DeviceCapability: GPUs
            major
    vllm.utils.deep_gemm:
        is_deep_gemm_supported: GPUs with DeepGEMM's kernels
    vllm.v1.worker.workspace:
        current_workspace_manager: memory shared by layers
    vllm.model_executor.layers.linear:
        UnquantizedLinearMethod: weights of the first output projection
    vllm.model_executor.layers.attention:
        is_deferred_attention_layer: layers that prepare loaded weights
            layer
    vllm.model_executor.model_loader.reload.inplace:
        get_parameter_for_reload: refusal of updates without preparation
            model name
    """
)

DEEPSEEK_V41 = DEEPSEEK_V4 + _rows(
    """
    vllm.config:
        CacheConfig: refused settings
            swa_bounded_replay
    vllm.models:
        deepseek_v41: base class
            DeepseekV41ForCausalLM
    vllm.models.deepseek_v41.nvidia:
        model: exchanged choice of attention
            _select_dsv4_attn_cls
    vllm.models.deepseek_v41:
        attention: exchanged classes of compressors and index keys
            DeepseekCompressor DeepseekV4Attention DeepseekV4Indexer DeepseekV4IndexerCache
    vllm.models.deepseek_v41.attention:
        DeepseekV4Attention: base class: projections, caches, owners of entries, streams
            _compressed_kv_cache _fused_qnorm_rope_kv_insert _indexer_cls _o_proj
            _o_proj_block_size _split_qkv_and_norm _wo_b_proj attn_sink backend_cls
            candidate_block_size compress_ratio compressed_cache_prefix compressor eps forward_mqa
            get_padded_num_q_heads head_dim indexer kv_cache kv_mxfp8 kv_norm
            max_num_batched_tokens n_groups n_heads n_local_groups n_local_heads o_lora_rank
            q_lora_rank rope_head_dim rotary_emb scale swa_backend_cls swa_cache_layer
            topk_indices_buffer window_size wo_a
        DeepseekV4Indexer: base class
            _produce_k _wq_b_proj attn_cls compress_ratio forward_q head_dim indexer_op k_cache
            k_norm n_head wk
        DeepseekV4IndexerCache: base class
            kv_cache get_attn_backend
    vllm.models.deepseek_v41.compressor:
        DeepseekCompressor: base class: weights and state
            _static_forward_context compress_ratio forward head_dim insert_cache k_cache_prefix
            norm rms_norm_eps rope_head_dim state_cache
        CompressorBackend: base class
            get_builder_cls
        CompressorMetadata: base class
            query_start_loc slot_mapping token_to_req_indices
        CompressorMetadataBuilder: base class
            build token_to_req_indices
    vllm.models.deepseek_v41.nvidia.flashmla:
        DeepseekSparseSWAFlashMLABackend: base class
            get_builder_cls supports_pcp
        DeepseekSparseSWAFlashMLAMetadataBuilder: base class
    vllm.models.deepseek_v41.sparse_mla:
        DeepseekV4FlashMLABackend: base class
            get_name supports_compute_capability supports_pcp
        DeepseekV4FlashMLAMetadata: entries of a step
            block_table slot_mapping
    vllm.v1.attention.backends.mla.indexer:
        DeepseekV41IndexerBackend: base class
            get_supported_kernel_block_sizes supports_pcp
    """
)

SURFACE = {
    "attention": ATTENTION,
    "deepseek_v4": DEEPSEEK_V4,
    "deepseek_v41": DEEPSEEK_V41,
    "host": HOST,
    "host_attention": HOST,
    "hy_v4": HY_V4,
    "indexer": INDEXER,
    "nvidia": NVIDIA,
    "pooled": GLM5_NEXT,
    "projection": DEEPSEEK_V4,
    "recorded": INDEXER,
    "recording": RECORDING,
    "settings": CONFIG,
    "warmup": WARMUP,
    "windows": DEEPSEEK_V4,
    "wrapper": INDEXER,
}
"""The rows of each module of this package; ``nvidia`` also needs the rows of ``indexer``."""


def require_vllm() -> None:
    """Raise ModuleNotFoundError with one line if vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise ModuleNotFoundError(
            f"sparsemla.backends.vllm needs vLLM {'.'.join(map(str, SUPPORTED))}, but vLLM is not "
            "installed",
            name="vllm",
        )


def unsupported_version() -> str | None:
    """Why this version of vLLM is not supported, in one line, or None."""
    require_vllm()
    from vllm import __version__, __version_tuple__

    if __version_tuple__[:2] == SUPPORTED:
        return None
    return f"sparsemla supports vLLM {'.'.join(map(str, SUPPORTED))}, found {__version__}"


def overridden(module: ModuleType) -> dict[str, tuple[Function, Function]]:
    """The functions that the module's classes override: ours and vLLM's by name.

    Constructors that are generated or pass all arguments on are left out, and functions of vLLM
    that take any arguments.
    """
    pairs: dict[str, tuple[Function, Function]] = {}
    for cls in vars(module).values():
        if not inspect.isclass(cls) or cls.__module__ != module.__name__:
            continue
        for name in vars(cls):
            ours: Any = getattr(cls, name)
            theirs: Any = next((getattr(b, name) for b in cls.__mro__[1:] if name in vars(b)), None)
            vllms = (getattr(theirs, "__module__", None) or "").startswith("vllm.")
            if vllms and inspect.isroutine(ours) and not _takes_any(cls, name, theirs):
                pairs[f"{cls.__name__}.{name}"] = ours, theirs
    return pairs


def _takes_any(cls: type, name: str, theirs: Function) -> bool:
    if name == "__init__" and dataclasses.is_dataclass(cls):
        return True
    function = getattr(cls, name) if name == "__init__" else theirs
    return inspect.Parameter.VAR_POSITIONAL in {kind for _, kind, _ in parameters(function)}


def check_layers(
    built: Any,  # noqa: ANN401 - a model of vLLM
    kind: type,
    parts_of: Callable[[Any], Iterable[tuple[Any, type]]],
) -> list[Any]:
    """The layers of a model that was built with this package's classes in the place of vLLM's.

    Args:
        built: the model.
        kind: vLLM's class of its layers.
        parts_of: parts of a layer, itself included, each with the class that it must have.

    Raises:
        RuntimeError: there is no layer, or a part of one is vLLM's.
    """
    instead = "serve without --attention-backend CUSTOM"
    layers: list[Any] = [each for each in built.modules() if isinstance(each, kind)]
    for layer in layers:
        for part, expected in parts_of(layer):
            if type(part) is not expected:
                raise RuntimeError(
                    f"sparsemla: {layer.prefix} must have a {expected.__name__} of this package, "
                    f"got {type(part).__module__}.{type(part).__name__}; {instead}"
                )
    if not layers:
        package, _, _ = kind.__module__.rpartition(".")
        raise RuntimeError(
            f"sparsemla: {type(built).__name__} must have layers of {package}, got none; {instead}"
        )
    return layers


def parameters(function: Function) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each parameter."""
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


def problems(rows: Sequence[Dependency], *modules: ModuleType) -> list[str]:
    """The rows that vLLM does not fit, and the functions of the modules that lost their match."""
    found = [problem for row in rows if (problem := row.problem())]
    return found + [
        f"{theirs.__module__}:{theirs.__qualname__} (overridden by {name}): other parameters"
        for module in modules
        for name, (ours, theirs) in overridden(module).items()
        if parameters(ours) != parameters(theirs)
    ]


def check(rows: Sequence[Dependency], *modules: ModuleType) -> None:
    """Raise RuntimeError with one line if something of vLLM does not fit."""
    if found := problems(rows, *modules):
        raise RuntimeError(f"sparsemla does not fit this vLLM: {'; '.join(found)}")

"""Every setting of vLLM that may concern attention counts, is refused, or is listed with a reason.

It also finds the models that would ignore the backend, and functions of vLLM that have changed.
"""

import ast
import dataclasses
import functools
import hashlib
import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vllm_here import require_vllm

require_vllm()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm
    from vllm import envs
    from vllm.config import (
        AttentionConfig,
        CacheConfig,
        CUDAGraphMode,
        DeviceConfig,
        KernelConfig,
        LoRAConfig,
        ModelConfig,
        OffloadConfig,
        ParallelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.backends import registry as attention_registry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    import glm5_next_alone  # noqa: F401 - before ``pooled``
    from sparsemla.backends import environment
    from sparsemla.backends import vllm as plugins
    from sparsemla.backends.vllm import (
        attention,
        deepseek_v4,
        deepseek_v41,
        host,
        host_attention,
        hy_v4,
        indexer,
        nvidia,
        pooled,
        settings,
        surface,
        warmup,
        windows,
        wrapper,
    )

from vllm_layers import SIZES

pytestmark = pytest.mark.filterwarnings("default")

CUSTOM = AttentionBackendEnum.CUSTOM

V32 = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_topk": 128,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "torch_dtype": "bfloat16",
}
V4 = SIZES | {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128],
    "torch_dtype": "bfloat16",
}
V41 = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "torch_dtype": "bfloat16",
    "text_config": V4
    | {
        "compress_ratios": [0, 2, 1],
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2],
        "candidate_source_layer_id": 2,
    },
}


@pytest.fixture(scope="module", autouse=True)
def registered():
    plugins.register()


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """The configuration of a model of each family."""
    made = {}
    for name, text in {"v32": V32, "v4": V4, "v41": V41}.items():
        folder = tmp_path_factory.mktemp(name)
        (folder / "config.json").write_text(json.dumps(text))
        made[name] = ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=1024
        )
    return made


@pytest.fixture
def configure(models, monkeypatch):
    """Makes an engine's configuration, with other values of ``config.field`` set at the end."""

    def make(name="v32", plugin_names=("sparsemla", "sparsemla_indexer"), **changes):
        monkeypatch.setattr(envs, "VLLM_PLUGINS", list(plugin_names), raising=False)
        config = VllmConfig(
            model_config=models[name],
            device_config=DeviceConfig(device="cpu"),
            cache_config=CacheConfig(block_size=256),
            scheduler_config=SchedulerConfig(
                max_num_batched_tokens=64,
                max_num_seqs=8,
                max_model_len=1024,
                is_encoder_decoder=False,
            ),
            attention_config=AttentionConfig(backend="CUSTOM"),
        )
        for where, value in changes.items():
            if where == "envs":
                for variable, each in value.items():
                    monkeypatch.setattr(envs, variable, each, raising=False)
                continue
            part, _, field = where.partition("__")
            owner = getattr(config, part) if field else config
            monkeypatch.setattr(owner, field or part, value)
        return config

    return make


def attention_refuses(config, **changes):
    """As vLLM asks the attention backend before it builds DeepSeek-V3.2."""
    arguments = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": config.cache_config.cache_dtype,
        "block_size": config.cache_config.block_size,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": True,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": AttentionType.DECODER,
        "use_non_causal": config.attention_config.use_non_causal,
        "use_pcp": config.parallel_config.prefill_context_parallel_size > 1,
    }
    with set_current_vllm_config(config):
        found = attention.SparseMLABackend.validate_configuration(**arguments | changes)
    return "; ".join(found)


def message(check, *arguments):
    """The message of a ValueError, or nothing."""
    try:
        check(*arguments)
    except ValueError as error:
        return str(error)
    return ""


REFUSED = {
    "attention": attention_refuses,
    "indexer": lambda config: message(indexer.refuse, config, 128),
    "v4": lambda config: message(deepseek_v4.refuse, config),
    "v41": lambda config: message(deepseek_v41.refuse, config),
    "start": lambda config: message(settings.refuse, config),
}


def test_a_usual_configuration_is_served(configure):
    for where in ("attention", "indexer", "start"):
        assert REFUSED[where](configure()) == ""
    for family in ("v4", "v41"):
        for where in (family, "start"):
            assert REFUSED[where](configure(family)) == ""


@dataclasses.dataclass(frozen=True)
class Refused:
    """A value of a setting that stops the start.

    Args:
        value: of the setting.
        reason: part of the message.
        where: the checks that refuse it: ``attention``, ``indexer``, ``v4``, or ``start``.
        others: other settings that it needs to have an effect.
    """

    value: object
    reason: str
    where: tuple[str, ...]
    others: tuple[tuple[str, object], ...] = ()


OTHER = "of another attention backend, which vLLM does not select beside CUSTOM"
MODEL = "of other models, which have no multi-head latent attention"
VLLMS = "read by vLLM's own code, which runs as with other backends"
SCHEDULER = "of the scheduler and the block pool, which hand out pages"
RANKS = "of processes, weights, or collectives outside attention"
DRAFTS = "of vLLM's proposer or sampler: attention gets a batch with drafts either way"
FOUND = "set by vLLM, not by a user"

SETTINGS = {
    AttentionConfig: {
        "backend": "the switch",
        "minimax_m3_msa_decode_backend": MODEL,
        "backend_per_kind": Refused({"mla_attention": CUSTOM}, "--attention-backend", ("start",)),
        "flash_attn_version": VLLMS,  # of dense short prompts
        "flash_attn_max_num_splits_for_cuda_graph": OTHER,
        "tokenspeed_mla_min_split_kv": OTHER,
        "tq_max_kv_splits_for_cuda_graph": OTHER,
        "use_trtllm_attention": OTHER,
        "disable_flashinfer_q_quantization": OTHER,
        "mla_prefill_backend": VLLMS,  # of dense short prompts
        "use_prefill_query_quantization": VLLMS,  # of dense short prompts
        "trtllm_ragged_backend": VLLMS,  # of dense short prompts
        "indexer_kv_dtype": Refused("mxfp4", "indexer_kv_dtype", ("indexer", "v4")),
        "indexer_sparse_logits": Refused(
            True, "indexer_sparse_logits must be off", ("indexer", "v4")
        ),
        "indexer_tp_shard_min_rows": "rows of a step from which ranks divide them",
        "minimax_m3_indexer_cp": MODEL,
        "hisparse_config": Refused(object(), "HiSparse must be off", ("v4",)),
        "use_non_causal": Refused(True, "non", ("attention", "v4")),
        "sparse_mla_force_mqa": VLLMS,
        "sparse_mla_prefill_workspace_factor": (
            "a bound on memory that only other backends and vLLM's indexer take"
        ),
        "flex_attn_block_m": OTHER,
        "flex_attn_block_n": OTHER,
        "flex_attn_q_block_size": OTHER,
        "flex_attn_kv_block_size": OTHER,
    },
    CacheConfig: {
        "block_size": Refused(96, "block_size not supported", ("attention",)),
        "user_specified_block_size": FOUND,
        "kv_cache_layout": FOUND,
        "prefix_match_unit": SCHEDULER,
        "gpu_memory_utilization": SCHEDULER,
        "cache_dtype": Refused("nvfp4_ds_mla", "--kv-cache-dtype must be", ("attention", "v4")),
        "is_attention_free": FOUND,
        "num_gpu_blocks_override": SCHEDULER,
        "sliding_window": FOUND,
        "enable_prefix_caching": SCHEDULER,
        "prefix_caching_hash_algo": SCHEDULER,
        "prefix_cache_retention_interval": SCHEDULER,
        # In DeepSeek-V3.2 vLLM gives each layer its own dtype.
        "kv_cache_dtype_skip_layers": Refused(["0"], "must be empty", ("v4",)),
        "mamba_page_size_padded": MODEL,
        "skip_page_size_padded": MODEL,
        "mamba_block_size": MODEL,
        "mamba_cache_dtype": MODEL,
        "mamba_ssm_cache_dtype": MODEL,
        "mamba_cache_mode": MODEL,
        "enable_mamba_shared_prefix_checkpoint": MODEL,
        "replayssm_buffer_len": MODEL,
        "use_replayssm": MODEL,
        "use_kda_recoverssm": MODEL,
        "num_gpu_blocks": FOUND,
        "num_cpu_blocks": FOUND,
        "simple_cpu_offload_num_blocks": FOUND,
        "effective_attention_block_size": FOUND,
        "kv_cache_size_tokens": FOUND,
        "kv_cache_max_concurrency": FOUND,
        "hash_block_size": FOUND,
        "cache_hit_alignment_tokens": FOUND,
        "kv_sharing_fast_prefill": MODEL,
        "swa_bounded_replay": "off in DeepSeek-V4.1 with CUSTOM, and has no effect elsewhere",
        "kv_cache_memory_bytes": SCHEDULER,
        "kv_offloading_size": VLLMS,  # connectors copy whole pages
        "kv_offloading_backend": VLLMS,
        "_block_size_resolved": FOUND,
    },
    ParallelConfig: {
        "pipeline_parallel_size": "each stage builds its own layers",
        "tensor_parallel_size": "the heads of a rank; indexers are replicated",
        "prefill_context_parallel_size": Refused(
            2, "refill", ("v4",), (("parallel_config__decode_context_parallel_size", 1),)
        ),
        "decode_context_parallel_size": Refused(
            2, "decode_context_parallel_size must be 1", ("v4",)
        ),
        "dcp_kv_cache_interleave_size": "an older name of cp_kv_cache_interleave_size",
        "dcp_comm_backend": VLLMS,  # the merge of the ranks' results
        "dcp_q_replicate": VLLMS,  # attention gets the heads of all ranks either way
        "cp_kv_cache_interleave_size": "read by the indexer that ranks share",
        "_allow_auto_resolve_cp_interleave_size": FOUND,
        "enable_dbo": "each microbatch reserves a workspace",
        "ubatch_size": "each microbatch reserves a workspace",
        "dbo_decode_token_threshold": VLLMS,
        "dbo_prefill_token_threshold": VLLMS,
        "enable_hc_sp": RANKS,
    }
    | dict.fromkeys(
        [
            "data_parallel_size",
            "data_parallel_size_local",
            "data_parallel_rank",
            "data_parallel_rank_local",
            "data_parallel_master_ip",
            "data_parallel_rpc_port",
            "dp_sync_interval",
            "data_parallel_master_port",
            "data_parallel_backend",
            "data_parallel_external_lb",
            "data_parallel_hybrid_lb",
            "data_parallel_index",
            "is_moe_model",
            "enable_expert_parallel",
            "enable_batch_sharded_sampling",
            "enable_ep_weight_filter",
            "enable_eplb",
            "eplb_config",
            "expert_placement_strategy",
            "all2all_backend",
            "max_parallel_loading_workers",
            "disable_custom_all_reduce",
            "enable_shm_tensor_arena",
            "enable_elastic_ep",
            "elastic_ep_max_dp_size",
            "disable_nccl_for_dp_synchronization",
            "ray_workers_use_nsight",
            "ray_runtime_env",
            "placement_group",
            "distributed_executor_backend",
            "worker_cls",
            "worker_extension_cls",
            "master_addr",
            "master_port",
            "node_rank",
            "nnodes",
            "numa_bind",
            "numa_bind_nodes",
            "numa_bind_cpus",
            "assigned_physical_gpu_ids",
            "distributed_timeout_seconds",
            "cpu_distributed_timeout_seconds",
            "world_size",
            "rank",
            "_data_parallel_master_port_list",
            "_coord_store_port",
            "_api_process_count",
            "_api_process_rank",
            "enable_fault_tolerance",
            "fault_tolerance_config",
        ],
        RANKS,
    ),
    SpeculativeConfig: {
        "num_speculative_tokens": "the longest decode, for which vLLM sorts batches",
        "method": "DSpark's drafts of DeepSeek-V4 are served; others are refused by architecture",
        "attention_backend": Refused(
            "FLASHMLA_SPARSE", "DSpark's drafts need the attention backend CUSTOM", ("v4",)
        ),
        "kv_cache_dtype": "checked for the draft model's layers as for others",
        "index_share_for_mtp_iteration": VLLMS,  # it does not call the indexer
        "enable_adaptive_verification": VLLMS,  # asks both backends for device_cpu_query_lens
        "parallel_drafting": DRAFTS,
        "target_model_config": FOUND,
        "target_parallel_config": FOUND,
        "draft_model_config": FOUND,
        "draft_parallel_config": FOUND,
    }
    | dict.fromkeys(
        [
            "enforce_eager",
            "model",
            "draft_tensor_parallel_size",
            "tensor_parallel_size",
            "quantization",
            "moe_backend",
            "max_model_len",
            "revision",
            "code_revision",
            "disable_padded_drafter_batch",
            "disable_eagle_block_drop",
            "disable_lookahead_block_hashes",
            "draft_lm_head_quantization",
            "use_local_argmax_reduction",
            "use_heterogeneous_vocab",
            "prompt_lookup_max",
            "prompt_lookup_min",
            "num_speculative_tokens_per_batch_size",
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
            "draft_load_config",
            "rejection_sample_method",
            "synthetic_acceptance_rates",
            "synthetic_acceptance_length",
            "draft_sample_method",
            "dspark_draft_topk",
            "xpress_topc",
            "fly_window_size",
            "fly_entropy_threshold",
            "fly_entropy_top_k",
        ],
        DRAFTS,
    ),
    OffloadConfig: {
        "offload_backend": "refused by the fields of the backends",
        "uva": Refused(
            SimpleNamespace(cpu_offload_gb=1),
            "cpu_offload_gb needs",
            ("v4",),
            (("envs", {"VLLM_WEIGHT_OFFLOADING_DISABLE_UVA": True}),),
        ),
        "prefetch": Refused(
            SimpleNamespace(offload_group_size=1), "offload_group_size must be 0", ("v4",)
        ),
    },
    KernelConfig: {
        "sparse_indexer_topk_backend": Refused(
            "torch", "sparse_indexer_topk_backend must be auto, got torch", ("indexer", "v4")
        ),
        "enable_jit_warmup": "the switch of our warm-up, too",
    }
    | dict.fromkeys(
        [
            "ir_op_priority",
            "enable_flashinfer_autotune",
            "enable_rocm_segmented_attn_autotune",
            "enable_cutedsl_warmup",
            "monokernel",
            "moe_backend",
            "linear_backend",
            "linear_backend_per_quant",
        ],
        VLLMS,
    ),
}
PARTS = {
    AttentionConfig: "attention_config",
    CacheConfig: "cache_config",
    ParallelConfig: "parallel_config",
    SpeculativeConfig: "speculative_config",
    KernelConfig: "kernel_config",
    OffloadConfig: "offload_config",
}


@pytest.mark.parametrize("cls", SETTINGS, ids=lambda cls: cls.__name__)
def test_every_setting_counts_or_is_refused(cls):
    fields = {field.name for field in dataclasses.fields(cls)}
    assert fields == SETTINGS[cls].keys(), "does the attention of this package read it?"


REFUSALS = [
    (PARTS[cls], name, each, where)
    for cls, table in SETTINGS.items()
    for name, each in table.items()
    if isinstance(each, Refused)
    for where in each.where
]


@pytest.mark.parametrize(
    ("part", "name", "each", "where"),
    REFUSALS,
    ids=[f"{name} {where}" for _, name, _, where in REFUSALS],
)
def test_a_setting_that_would_not_count_is_refused(configure, part, name, each, where):
    value, changes = each.value, dict(each.others)
    if name == "backend_per_kind":
        changes["attention_config__backend"] = None
    if part == "speculative_config":
        value = SimpleNamespace(
            use_dspark=lambda: True, draft_model_config=None, attention_backend=value
        )
        changes["speculative_config"] = value
    else:
        changes[f"{part}__{name}"] = value
    family = "v4" if where == "v4" or name == "backend_per_kind" else "v32"
    assert REFUSED[where](configure(family, **dict(each.others))) == ""
    assert each.reason in REFUSED[where](configure(family, **changes))


DIVIDING = {"parallel_config__tensor_parallel_size": 2}


def test_the_length_from_which_rows_are_divided_is_served_where_it_counts(configure, monkeypatch):
    assert REFUSED["start"](configure(attention_config__indexer_tp_shard_min_rows=1)) == ""
    made = [configure(family, **DIVIDING) for family in ("v32", "v4")]
    assert environment.divide_rows_from() is None
    monkeypatch.setenv("SPARSEMLA_DIVIDE_ROWS_FROM", "4096")
    assert environment.divide_rows_from() == 4096
    assert [REFUSED["start"](each) for each in made] == ["", ""]


def test_rows_of_deepseek_v41_are_not_divided(configure, monkeypatch):
    made = configure("v41", **DIVIDING)
    assert REFUSED["start"](made) == ""
    monkeypatch.setenv("SPARSEMLA_DIVIDE_ROWS_FROM", "4096")
    assert "has no effect on DeepSeek-V4.1, of which each rank" in REFUSED["start"](made)


@pytest.mark.parametrize("value", ["", "0", "-1", "4k", "1.5", "\u0664"])
def test_a_length_that_is_no_positive_integer_is_refused(configure, monkeypatch, value):
    made = configure(**DIVIDING)
    monkeypatch.setenv("SPARSEMLA_DIVIDE_ROWS_FROM", value)
    reason = f"sparsemla: SPARSEMLA_DIVIDE_ROWS_FROM must be a positive integer, got {value!r}"
    assert REFUSED["start"](made) == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"parallel_config__tensor_parallel_size": 1}, "needs --tensor-parallel-size above 1"),
        ({"parallel_config__decode_context_parallel_size": 2}, "has no effect with --decode-con"),
        ({"attention_config__indexer_tp_shard_min_rows": 64}, "rows, got 64"),
        ({"compilation_config__cudagraph_mode": CUDAGraphMode.FULL}, "captured in whole graphs"),
        ({"plugin_names": ["sparsemla"]}, "needs sparsemla_indexer in VLLM_PLUGINS"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_length_that_no_step_would_use_is_refused(configure, monkeypatch, changes, reason):
    made = configure(**DIVIDING | changes)
    assert REFUSED["start"](made) == ""
    monkeypatch.setenv("SPARSEMLA_DIVIDE_ROWS_FROM", "4096")
    assert reason in REFUSED["start"](made)
    assert REFUSED["start"](made).endswith("; otherwise unset it")


def test_codes_of_another_e4m3_are_refused(configure, monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_fp8_fnuz", classmethod(lambda cls: True))
    reason = "must be float8_e4m3fn, got float8_e4m3fnuz"
    assert reason in attention_refuses(configure(), kv_cache_dtype="fp8_ds_mla")
    assert attention_refuses(configure()) == ""  # of bfloat16
    assert reason in REFUSED["indexer"](configure())


@pytest.mark.parametrize(
    ("where", "family", "names"),
    [
        ("attention", "v32", ["kv_b_proj"]),
        ("v4", "v4", ["wo_a", "fused_wkv_wgate", "wkv", "wgate"]),
        ("v41", "v41", ["wo_a", "fused_wkv_wgate", "wkv", "wgate"]),
    ],
)
def test_adapters_of_weights_that_are_read_directly_are_refused(configure, where, family, names):
    for targets in (None, *([name, "q_proj"] for name in names)):
        lora = LoRAConfig(target_modules=targets)
        reason = REFUSED[where](configure(family, lora_config=lora))
        assert "LoRA must leave out" in reason
        assert f"by --lora-target-modules; got {targets}" in reason
    lora = LoRAConfig(target_modules=["o_proj", "wq_b", "wo_b", "weights_proj"])
    assert REFUSED[where](configure(family, lora_config=lora)) == ""


def named(config, *architectures, use_mla=True):
    """The configuration of a model of these architectures."""
    config.model_config = SimpleNamespace(
        architectures=architectures, is_submodel_config=False, use_mla=use_mla
    )
    return config


def plain(backend=None, draft=None, drafts=()):
    """What :func:`settings.refuse` reads of a configuration."""
    speculative = None
    if drafts:
        speculative = SimpleNamespace(
            attention_backend=draft, draft_model_config=SimpleNamespace(architectures=drafts)
        )
    return SimpleNamespace(
        attention_config=AttentionConfig(backend=backend),
        kv_transfer_config=None,
        speculative_config=speculative,
    )


def test_drafts_of_blocks_take_the_backend_of_their_model(monkeypatch):
    """vLLM gives them that of DeepSeek-V4 unless they have one of their own."""
    monkeypatch.setattr(envs, "VLLM_PLUGINS", None, raising=False)
    target = settings.DEEPSEEK_V4[0]
    for draft in (None, CUSTOM):
        made = named(plain("CUSTOM", draft, [settings.DSPARK]), target)
        assert message(settings.refuse, made) == ""
    alone = named(plain(None, CUSTOM, [settings.DSPARK]), target)
    assert "DSparkDraftModel takes the attention backend CUSTOM from its model" in message(
        settings.refuse, alone
    )


@pytest.mark.parametrize("architecture", settings.OWN_ATTENTION)
def test_models_that_ignore_the_backend_are_refused(monkeypatch, architecture):
    monkeypatch.setattr(envs, "VLLM_PLUGINS", None, raising=False)
    reason = f"sparsemla: {architecture} {settings.OWN_ATTENTION[architecture]}; serve it without"
    assert message(settings.refuse, named(plain("CUSTOM"), architecture)).startswith(reason)
    per_kind = named(plain(), architecture)
    per_kind.attention_config.backend_per_kind = {"mla_attention": CUSTOM}
    assert message(settings.refuse, per_kind).startswith(reason)
    draft = named(plain(None, CUSTOM, [architecture]), "DeepseekV32ForCausalLM")
    assert message(settings.refuse, draft).startswith(reason)
    assert message(settings.refuse, named(plain(), architecture)) == ""
    assert message(settings.refuse, named(plain("FLASHMLA_SPARSE"), architecture)) == ""
    draft = named(plain("CUSTOM", None, [architecture]), "DeepseekV32ForCausalLM")
    assert message(settings.refuse, draft) == ""


def test_models_need_this_packages_indexer_where_vllms_has_no_kernels(monkeypatch):
    monkeypatch.setattr(envs, "VLLM_PLUGINS", None, raising=False)
    for architecture in settings.GLM5_NEXT + settings.HY_V4:
        custom = named(plain("CUSTOM"), architecture)
        with monkeypatch.context() as change:
            change.setattr(settings, "unserved_gpu", lambda: "sm_89")
            reason = f"indexer of {architecture} has no kernels for sm_89; unset VLLM_PLUGINS, or"
            assert reason in message(settings.refuse, custom)
            change.setattr(settings, "indexer_is_active", lambda: True)
            assert message(settings.refuse, custom) == ""
        assert message(settings.refuse, custom) == ""
        assert message(settings.refuse, named(plain(), architecture)) == ""
        with monkeypatch.context() as change:
            change.setattr(envs, "VLLM_PLUGINS", ["sparsemla", "sparsemla_indexer"], raising=False)
            assert message(settings.refuse, named(plain(), architecture)) == ""
            change.setattr(type(current_platform), "is_rocm", lambda self: True)
            assert "on ROCm" in message(settings.refuse, named(plain(), architecture))


def test_platforms_that_ignore_the_backend_are_refused(monkeypatch):
    monkeypatch.setattr(envs, "VLLM_PLUGINS", ["sparsemla_indexer"], raising=False)
    custom = named(plain("CUSTOM"), "DeepseekV32ForCausalLM")
    monkeypatch.setattr(type(current_platform), "is_xpu", lambda self: True)
    assert "own attention backend on XPU" in message(settings.refuse, custom)
    indexer_only = named(plain(), "DeepseekV32ForCausalLM")
    assert "XPU has no kernels of this package" in message(settings.refuse, indexer_only)
    monkeypatch.setattr(envs, "VLLM_PLUGINS", None, raising=False)
    assert message(settings.refuse, indexer_only) == ""


def test_rocm_has_other_codes_and_is_refused(monkeypatch):
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda self: True)
    reason = (
        "sparsemla: on ROCm vLLM has sparse attention of its own, and on gfx942 it writes "
        "float8_e4m3fnuz codes, which mean other numbers to the kernels of this package; serve "
        "without the attention backend CUSTOM and without sparsemla_indexer in VLLM_PLUGINS"
    )
    draft = named(plain(None, CUSTOM, ["DeepseekV32MTPModel"]), "DeepseekV32ForCausalLM")
    for names in (None, ["sparsemla", "sparsemla_indexer"]):
        monkeypatch.setattr(envs, "VLLM_PLUGINS", names, raising=False)
        for architecture in (*settings.DEEPSEEK_V32, *settings.DEEPSEEK_V4):
            assert message(settings.refuse, named(plain("CUSTOM"), architecture)) == reason
        assert message(settings.refuse, draft) == reason
        indexer_only = named(plain(), "GlmMoeDsaForCausalLM")
        assert message(settings.refuse, indexer_only) == (reason if names else "")
        assert message(settings.refuse, named(plain(), "LlamaForCausalLM", use_mla=False)) == ""


@pytest.mark.parametrize("platform", ["is_rocm", "is_xpu", "is_cpu"])
def test_deepseek_v4_stays_vllms_on_other_platforms(monkeypatch, platform):
    for architecture in plugins.V4_MODELS:
        theirs = registry._LazyRegisteredModel("vllm.models.deepseek_v4", architecture)
        monkeypatch.setitem(registry.ModelRegistry.models, architecture, theirs)
    with monkeypatch.context() as change:
        change.setattr(type(current_platform), platform, lambda self: True)
        plugins.register()
    made = {registry.ModelRegistry.models[each].module_name for each in plugins.V4_MODELS}
    assert made == {"vllm.models.deepseek_v4"}
    plugins.register()
    made = {registry.ModelRegistry.models[each].module_name for each in plugins.V4_MODELS}
    ours = {"deepseek_v4", "deepseek_v41"}
    assert made == {f"sparsemla.backends.vllm.{each}" for each in ours}


def test_models_without_latent_attention_are_refused(monkeypatch):
    monkeypatch.setattr(envs, "VLLM_PLUGINS", None, raising=False)
    made = named(plain("CUSTOM"), "Qwen3ForCausalLM", use_mla=False)
    for path in ("other.Backend", None):  # the name is another plugin's, or nobody's
        with monkeypatch.context() as change:
            change.setattr(attention_registry, "_ATTN_OVERRIDES", {CUSTOM: path} if path else {})
            assert message(settings.refuse, made) == ""
    assert "must have multi-head latent attention, got ['Qwen3" in message(settings.refuse, made)
    assert message(settings.refuse, named(plain(), "Qwen3ForCausalLM", use_mla=False)) == ""


@pytest.mark.parametrize(("family", "name"), [("v4", "DeepSeek-V4"), ("v41", "DeepSeek-V4.1")])
def test_deepseek_v4_gets_this_packages_indexer_or_stops(configure, family, name):
    reason = REFUSED["start"](configure(family, attention_config__backend=None))
    assert f"{name} gets this package's indexer with --attention-backend CUSTOM" in reason
    assert REFUSED["start"](configure(family, ["sparsemla"], attention_config__backend=None)) == ""


def test_fp8_mma_are_refused_where_this_packages_attention_does_not_convert_rows(
    configure, monkeypatch
):
    monkeypatch.setenv("SPARSEMLA_FP8_MMA", "1")
    assert REFUSED["start"](configure()) == ""  # layers ask for the rest
    reason = "SPARSEMLA_FP8_MMA must be unset, as no kernel has FP8 MMAs for rows of 512 dims"
    assert reason in REFUSED["v4"](configure("v4"))
    usual = configure()
    others = {"attention_config__backend": None}
    assert REFUSED["start"](configure(**others)) == (
        "sparsemla: SPARSEMLA_FP8_MMA needs the attention backend CUSTOM; otherwise unset it"
    )
    assert REFUSED["start"](configure(plugin_names=["sparsemla"], **others)) == ""
    monkeypatch.setenv("SPARSEMLA_FP8_MMA", "fp8")
    reason = "sparsemla: SPARSEMLA_FP8_MMA must be 0 or 1, got 'fp8'"
    assert REFUSED["start"](usual) == reason


def test_deepseek_v41_keeps_window_rows_in_the_prefix_cache_with_custom_only(models, monkeypatch):
    monkeypatch.setattr(envs, "VLLM_PLUGINS", ["sparsemla"], raising=False)
    for backend in ("CUSTOM", None):
        made = VllmConfig(
            model_config=models["v41"],
            device_config=DeviceConfig(device="cpu"),
            attention_config=AttentionConfig(backend=backend),
        )
        assert made.cache_config.swa_bounded_replay is (backend is None)


def test_the_start_is_checked_when_vllm_makes_its_configuration(models, monkeypatch):
    monkeypatch.setattr(envs, "VLLM_PLUGINS", ["sparsemla"], raising=False)

    def configured(**changes):
        return VllmConfig(
            model_config=models["v4"],
            device_config=DeviceConfig(device="cpu"),
            attention_config=AttentionConfig(**changes),
        )

    once = VllmConfig.__post_init__
    plugins.register()
    assert VllmConfig.__post_init__ is once
    configured(backend="CUSTOM")
    with pytest.raises(ValueError, match="sparsemla: DeepSeek-V4 must get CUSTOM by --attention-b"):
        configured(backend_per_kind={"sliding_window_mla": "CUSTOM"})


ASKING = {
    "AXK1ForCausalLM": "dense",
    "BailingMoeV2_5ForCausalLM": "dense",
    "BailingMoeV3ForCausalLM": "dense",
    "DeepSeekMTPModel": "as DeepseekV3ForCausalLM",
    "DeepseekForCausalLM": "not MLA",
    "DeepseekV2ForCausalLM": "dense",
    "DeepseekV3BidirectionalModel": "not MLA",
    "DeepseekV3ForCausalLM": "dense, or the portable class of DeepSeek-V3.2",
    "Glm4MoeLiteForCausalLM": "dense",
    "Glm4MoeLiteMTPModel": "dense",
    "KimiK3ForConditionalGeneration": "dense",
    "KimiK3MTPModel": "dense",
    "KimiLinearForCausalLM": "dense",
    "MiniMaxM3MTP": "not MLA",
    "MiniMaxM3SparseForCausalLM": "not MLA",
    "MiniMaxM3SparseForConditionalGeneration": "not MLA",
    "PanguEmbeddedForCausalLM": "not MLA",
    "PanguProMoEV2ForCausalLM": "not MLA",
    "PanguUltraMoEForCausalLM": "dense",
    "Qwen4ExpForCausalLM": "not MLA",
    "Qwen4ExpForConditionalGeneration": "not MLA",
    "Qwen4ExpMTP": "not MLA",
    "SarvamMLAForCausalLM": "dense",
    "SarvamMoEForCausalLM": "not MLA",
}
"""Models with lists of selected positions that refuse ``CUSTOM`` themselves: they ask for the
backend, which serves sparse MLA of 576 dims, or 512 without RoPE, or have no MLA."""


def test_every_model_with_selected_positions_is_served_or_refused():
    root, found = Path(vllm.__file__).parent, set()
    for architecture, (module, _) in registry._VLLM_MODELS.items():
        path = root / "model_executor" / "models" / module
        if module.startswith("vllm."):
            path = root.joinpath(*module.split(".")[1:])
        files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        if any("topk_indices_buffer" in file.read_text() for file in files):
            found.add(architecture)
    others = settings.DEEPSEEK_V4 + settings.DEEPSEEK_V41 + settings.GLM5_NEXT + settings.HY_V4
    served = plugins.GENERIC_MODELS.keys() | {*others, settings.DSPARK}
    assert found == served | settings.OWN_ATTENTION.keys() | ASKING.keys()
    assert not ASKING.keys() & (served | settings.OWN_ATTENTION.keys())
    assert {*settings.DEEPSEEK_V32} == plugins.GENERIC_MODELS.keys()


# Functions of vLLM whose work the plugins repeat, replace, or rely on without calling them.
READ = [
    "vllm.lora.utils:is_in_target_modules",
    "vllm.model_executor.kernels.mhc.tilelang:mhc_pre_broadcast_tilelang",
    "vllm.model_executor.kernels.mhc.tilelang:mhc_pre_tilelang",
    "vllm.model_executor.layers.attention.mla_attention:MLAAttention.process_weights_after_loading",
    "vllm.model_executor.layers.attention.sparse_mla_attention:SparseMLACommonImpl.forward_mqa",
    "vllm.model_executor.layers.attention:is_deferred_attention_layer",
    "vllm.model_executor.layers.quantization.utils.fp8_utils:deepgemm_post_process_fp8_weight_block",
    "vllm.model_executor.layers.sparse_attn_indexer:sparse_attn_indexer",
    "vllm.model_executor.model_loader.reload.inplace:get_parameter_for_reload",
    "vllm.model_executor.model_loader.reload.inplace:reload_weights",
    "vllm.model_executor.model_loader.reload.layerwise:_copy_and_restore_kernel_tensors",
    "vllm.model_executor.model_loader.reload.layerwise:_finalize_attention_layer",
    "vllm.model_executor.model_loader.reload.layerwise:finalize_layerwise_processing",
    "vllm.model_executor.model_loader.reload.meta:restore_layer_on_meta",
    "vllm.model_executor.model_loader.utils:process_weights_after_loading",
    "vllm.model_executor.models.deepseek_v2:DeepseekV32IndexerCache.get_kv_cache_spec",
    "vllm.model_executor.models.deepseek_v2:Indexer.__init__",
    "vllm.model_executor.models.deepseek_v2:Indexer.forward",
    "vllm.models.deepseek_v32.amd.rocm:DeepseekV32MLAAttention.__init__",
    "vllm.models.deepseek_v32.attention:DeepseekV32Attention._sparse_indexer_and_attn",
    "vllm.models.deepseek_v4.attention:DeepseekV4Attention.__init__",
    "vllm.models.deepseek_v4.attention:DeepseekV4Attention._prepare_and_attn",
    "vllm.models.deepseek_v4.attention:DeepseekV4Attention._run_parallel_input_projections",
    "vllm.models.deepseek_v4.attention:DeepseekV4Attention._sparse_indexer_and_attn",
    "vllm.models.deepseek_v4.attention:DeepseekV4Attention.forward",
    "vllm.models.deepseek_v4.attention:DeepseekV4Indexer.forward",
    "vllm.models.deepseek_v4.compressor:DeepseekCompressor.__init__",
    "vllm.models.deepseek_v4.nvidia.dspark:DSparkDeepseekV4Model.precompute_and_store_context_kv",
    "vllm.models.deepseek_v4.nvidia.dspark:_insert_context_kv",
    "vllm.models.deepseek_v4.nvidia.flashmla:DeepseekV4FlashMLAAttention._o_proj",
    "vllm.models.deepseek_v4.nvidia.flashmla:DeepseekV4FlashMLAAttention.forward_mqa",
    "vllm.models.deepseek_v4.nvidia.model:_select_dsv4_attn_cls",
    "vllm.models.deepseek_v4.nvidia.ops.o_proj:deep_gemm_fp8_o_proj",
    "vllm.models.deepseek_v41.attention:DeepseekV4Attention.__init__",
    "vllm.models.deepseek_v41.attention:DeepseekV4Attention._prepare_and_attn",
    "vllm.models.deepseek_v41.attention:DeepseekV4Attention._run_parallel_input_projections",
    "vllm.models.deepseek_v41.attention:DeepseekV4Attention._sparse_indexer_and_attn",
    "vllm.models.deepseek_v41.attention:DeepseekV4Attention.forward",
    "vllm.models.deepseek_v41.attention:DeepseekV4Indexer.__init__",
    "vllm.models.deepseek_v41.attention:DeepseekV4Indexer.forward",
    "vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache:fused_save_compress_norm",
    "vllm.models.deepseek_v41.common.ops.fused_compress_quant_cache:rope_quant_insert",
    "vllm.models.deepseek_v41.common.ops.indexer_k_store:indexer_k_norm_rope_store",
    "vllm.models.deepseek_v41.compressor:DeepseekCompressor.__init__",
    "vllm.models.deepseek_v41.compressor:_ring_slot_mapping_kernel",
    "vllm.models.deepseek_v41.nvidia.flashmla:DeepseekV4FlashMLAAttention._o_proj",
    "vllm.models.deepseek_v41.nvidia.flashmla:DeepseekV4FlashMLAAttention.forward_mqa",
    "vllm.models.deepseek_v41.nvidia.model:_select_dsv4_attn_cls",
    "vllm.models.deepseek_v41.sparse_mla:DeepseekV41SparseSWAMetadataBuilder.build",
    "vllm.models.dots3_note.nvidia.model:Dots3NoteFullAttention.__init__",
    "vllm.models.dots3_note.nvidia.model:_forward_note_mla",
    "vllm.models.glm5next.common.attention:Glm5NextIndexerCache.get_kv_cache_spec",
    "vllm.models.glm5next.common.attention:Glm5NextTailCache.get_kv_cache_spec",
    "vllm.models.glm5next.common.attention:Indexer.__init__",
    "vllm.models.glm5next.common.attention:Indexer.forward",
    "vllm.models.glm5next.nvidia.ops.kpool_compress:_expand_pools_and_append_tail_kernel",
    "vllm.models.glm5next.nvidia.sparse_indexer:sparse_attn_indexer_kpool",
    "vllm.models.hy_v4.nvidia.attention:HYV4MLAAttention.__init__",
    "vllm.models.hy_v4.nvidia.attention:HYV4MLAAttention._indexer_and_attn",
    "vllm.models.hy_v4.nvidia.attention:HYV4MLAAttention._force_sparse_mqa",
    "vllm.models.hy_v4.nvidia.attention:HYV4MLAAttention._resolve_sink_backend",
    "vllm.models.hy_v4.nvidia.attention:Indexer.__init__",
    "vllm.models.hy_v4.nvidia.attention:Indexer.prepare_inputs",
    "vllm.platforms.xpu:XPUPlatform.get_attn_backend_cls",
    "vllm.v1.attention.backends.mla.indexer:DeepseekV32IndexerMetadataBuilder.build",
    "vllm.v1.attention.backends.mla.indexer:balanced_prefill_row_shard",
    "vllm.v1.attention.backends.mla.indexer:tp_prefill_row_sharding_supported",
    "vllm.v1.attention.backends.mla.sparse_swa:ComputeDSparkNoncausalSWAIndicesKernel.kernel",
    "vllm.v1.attention.ops.pcp:_gather_prefill_cache_inputs",
    "vllm.v1.attention.selector:get_attn_backend",
    "vllm.v1.worker.gpu.attn_utils:get_kv_cache_spec",
    "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector._build_load_kwargs",
    "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.finalize_step",
    "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.post_forward",
    "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.pre_forward",
    "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector.set_disabled",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.add_requests",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.finish_requests",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache",
    "vllm.v1.worker.gpu.spec_decode.dspark.utils:_resolve_dspark_attention_backend",
    "vllm.v1.worker.gpu.states:RequestState.add_request",
]
BODIES = Path(__file__).parent / "vllm_bodies.json"
MODULES = (
    attention,
    deepseek_v4,
    deepseek_v41,
    host,
    host_attention,
    hy_v4,
    indexer,
    nvidia,
    pooled,
    warmup,
    windows,
    wrapper,
)


@functools.cache
def source_of(module):
    """The source of a module of vLLM, which is not imported, and its syntax."""
    file = Path(vllm.__file__).parents[1].joinpath(*module.split("."))
    source = (file / "__init__.py" if file.is_dir() else file.with_suffix(".py")).read_text()
    return source, ast.parse(source)


def body_hash(path):
    """A hash of the source of a function of vLLM."""
    module, _, name = path.partition(":")
    source, node = source_of(module)
    for part in name.split("."):
        node = next((each for each in node.body if getattr(each, "name", None) == part), None)
        if node is None:
            return "gone"
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    lines = source.splitlines()[first - 1 : node.end_lineno]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def bodies():
    """Functions of vLLM whose bodies matter here, with hashes of them."""
    overridden = {
        f"{theirs.__module__}:{theirs.__qualname__}"
        for module in MODULES
        for _, theirs in surface.overridden(module).values()
        if theirs.__name__ not in ("__eq__", "__repr__")  # generated
    }
    return {path: body_hash(path) for path in sorted({*READ} | overridden)}


def test_the_bodies_that_the_plugins_were_written_for_are_vllms():
    """After reading: ``PYTHONPATH=/tmp/vllm:tests python -m test_vllm_settings``."""
    known, found = json.loads(BODIES.read_text()), bodies()
    assert "gone" not in found.values()
    changed = {path for path in known.keys() | found.keys() if known.get(path) != found.get(path)}
    assert not changed, "read this again"


if __name__ == "__main__":
    BODIES.write_text(json.dumps(bodies(), indent=1) + "\n")

"""The contract with SGLang, checked against the real package, without a GPU.

SGLang's own test kit builds its backend, memory pools, metadata and batches here; SGLang's Triton
kernels run in the interpreter. CI installs SGLang for this file alone: see `.ci/run`.
"""

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import unittest
import warnings
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch._subclasses.fake_tensor import FakeTensorMode

import replay
import sparsemla
from sparsemla import (
    BF16_512,
    BF16_576,
    FP8_DS_MLA,
    FP8_NOPE,
    INDEX_FP8,
    PagedCache,
    reference,
)
from sparsemla.kernels.common.device import GPUS, simulated
from sparsemla_lab.bench.report import BEGIN, END
from sparsemla_lab.bench.timing import Prepared, Timing
from sparsemla_lab.testing.cases import Draw, indexer_topk_blocks_case
from sparsemla_lab.testing.compare import SPARSE_DECODE_OUT, assert_close, assert_equal

if importlib.util.find_spec("sglang") is None:
    pytest.skip("SGLang is not installed; .ci/run installs it", allow_module_level=True)

# SGLang needs torchvision, which imports without its CUDA library if this operator exists.
TORCHVISION = (
    "torchvision::nms",
    "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
if not torch.cuda.is_available():
    torch.library.define(*TORCHVISION)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang
    from sglang.srt import plugins
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.distributed.parallel_state import (
        destroy_distributed_environment,
        destroy_model_parallel,
        init_distributed_environment,
        initialize_model_parallel,
    )
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention import dsa_backend
    from sglang.srt.layers.attention.dsa import dsa_indexer, kpool_fp8_index
    from sglang.srt.layers.attention.dsa import utils as dsa_utils
    from sglang.srt.layers.attention.dsa.dsa_indexer_kpool import IndexerKPool
    from sglang.srt.layers.attention.dsa.dsa_topk_backend import DSATopKBackend, TopkTransformMethod
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
    from sglang.srt.layers.rotary_embedding import base as rotary
    from sglang.srt.managers.hisparse_coordinator import HiSparseCoordinator
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.model_loader import loader
    from sglang.srt.model_loader.utils import set_default_torch_dtype
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType
    from sglang.srt.runtime_context import (
        SpawnRanks,
        create_context,
        override_platform,
        use_context,
    )
    from sglang.srt.server_args import ServerArgs
    from sglang.test.kits.attention_unittest.attention_methods import dsa_attention
    from sglang.test.kits.attention_unittest.attention_methods.dsa_attention import (
        DSA_SPARSE_ATOL,
        DSA_SPARSE_FP8_ATOL,
        DSAAttentionCase,
        build_dsa_sparse_attention_fixture,
        expected_dsa_sparse_fixture_output,
        run_dsa_sparse_fixture_eager,
    )

    from sparsemla.backends.sglang import attention, register, scores, settings, topk
    from sparsemla.backends.sglang.hooks import CALLERS, HOOKS, install, is_installed, signature
    from sparsemla.compat import deep_gemm

pytestmark = pytest.mark.filterwarnings("default")

TOPK = 128


def replace(monkeypatch, functions):
    """Set the functions that the plugin touches, until the end of a test."""
    for hook, function in zip(HOOKS, functions, strict=True):
        owner, name = hook.target.rsplit(".", 1)
        monkeypatch.setattr(pkgutil.resolve_name(owner), name, function)


@pytest.fixture(autouse=True)
def plain_sglang(monkeypatch):
    """SGLang's functions and its registry of hooks, put back afterwards."""
    replace(monkeypatch, [pkgutil.resolve_name(hook.target) for hook in HOOKS])
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setenv("SGLANG_PLUGINS", "sparsemla")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (9, 0))
    scores.deep_gemm_runs.cache_clear()
    yield
    HookRegistry.reset()


@pytest.fixture(scope="session")
def hooked_functions():
    """The functions after installation, which takes SGLang a second."""
    with pytest.MonkeyPatch.context() as patch:
        replace(patch, [pkgutil.resolve_name(hook.target) for hook in HOOKS])
        install()
        return [pkgutil.resolve_name(hook.target) for hook in HOOKS]


@pytest.fixture
def hooked(hooked_functions, monkeypatch):
    """SGLang with the plugin."""
    replace(monkeypatch, hooked_functions)


def short(hook):
    return hook.target.rsplit(".", 1)[1]


# Registration.

CHILD = f"""
import logging, torch
logging.basicConfig(level="INFO", format="%(name)s %(message)s")
torch.library.define(*{TORCHVISION})
{{}}
from sglang.srt.plugins import load_plugins
load_plugins()
from sparsemla.backends.sglang.hooks import HOOKS, is_installed
print(all(map(is_installed, HOOKS)))
"""


BREAK = """
from sglang.srt.plugins.hook_registry import HookRegistry
apply = HookRegistry._apply_target
def broken(target, hooks):
    if target.endswith("_forward_fa3"):
        raise AttributeError(target)
    apply(target, hooks)
HookRegistry._apply_target = broken
"""


@pytest.fixture(scope="session", autouse=True)
def processes():
    """Processes that load SGLang's plugins as SGLang does, while the other tests run."""
    with contextlib.ExitStack() as stack:
        started = {
            name: stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-c", CHILD.format(prepare)],
                    env={**os.environ, "SGLANG_PLUGINS": "sparsemla"},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for name, prepare in (("sound", ""), ("broken", BREAK))
        }
        yield started
        for process in started.values():
            process.kill()


def test_the_plugin_can_be_registered_twice():
    register()
    functions = [pkgutil.resolve_name(hook.target) for hook in HOOKS]
    register()
    assert functions == [pkgutil.resolve_name(hook.target) for hook in HOOKS]
    assert all(map(is_installed, HOOKS))


@pytest.mark.parametrize("named", ["", "another", "sparsemla_other"])
def test_nothing_is_replaced_unless_the_plugin_is_named(monkeypatch, named):
    monkeypatch.setenv("SGLANG_PLUGINS", named)
    register()
    assert not any(map(is_installed, HOOKS))


@pytest.mark.parametrize("hook", HOOKS, ids=short)
def test_signatures_are_those_of_sglang(hook):
    assert signature(pkgutil.resolve_name(hook.target)) == hook.signature
    if hook.kind == HookType.REPLACE:
        assert signature(hook.function) == hook.signature


@pytest.mark.parametrize("hook", HOOKS, ids=short)
def test_another_signature_stops_the_start(monkeypatch, hook):
    def other(self, another_argument):
        """Of another version."""

    owner, name = hook.target.rsplit(".", 1)
    monkeypatch.setattr(pkgutil.resolve_name(owner), name, other)
    with pytest.raises(SystemExit, match=rf"{name} must have signature .*another_argument"):
        register()


@pytest.mark.parametrize("target", [*(hook.target for hook in HOOKS), *CALLERS])
def test_another_body_stops_the_start(monkeypatch, target):
    """As if a new version had changed a function and kept its signature."""
    changed = pkgutil.resolve_name(target)
    getsource = inspect.getsource

    def source(function):
        text = getsource(function)
        return text + "# changed" if function is changed else text

    monkeypatch.setattr(inspect, "getsource", source)
    with pytest.raises(SystemExit, match=rf"{re.escape(target)} has changed: read it again"):
        register()
    assert not any(map(is_installed, HOOKS))


def test_another_version_is_refused(monkeypatch):
    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    with pytest.raises(SystemExit) as caught:
        register()
    assert str(caught.value) == (
        "sparsemla: SGLang does not start: this plugin replaces methods of SGLang 0.5.23, got "
        "0.5.24; otherwise remove sparsemla from SGLANG_PLUGINS"
    )


def test_sglang_does_not_swallow_the_refusal(monkeypatch):
    """``load_plugins`` is the first thing that every process of SGLang does."""
    monkeypatch.setattr(sglang, "__version__", "0.5.24")
    with pytest.raises(SystemExit):
        plugins.load_plugins()


# Settings.

CONFIG = {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 2,
    "max_position_embeddings": 2048,
    "rope_theta": 10000,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "index_topk": TOPK,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "torch_dtype": "bfloat16",
}


HY_V4 = {"architectures": ["HYV4ForCausalLM"], "model_type": "hy_v4", "learnable_sink": True}
GLM53_FLASH = {
    "architectures": ["Glm5NextForConditionalGeneration"],
    "model_type": "glm5_next",
    "qk_rope_head_dim": 0,
    "num_hidden_layers": 4,
    "linear_num_heads": 8,
    "linear_head_dim": 128,
    "index_kpool": 16,
    "index_kpool_compress": True,
    "index_kpool_always_select_tail": True,
    "index_topk": 2048,
}


@pytest.fixture
def arguments(tmp_path):
    """Makes SGLang's arguments and resolves and checks them, as its engine does."""

    def start(config=None, is_cuda=True, **changes):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG | (config or {})))
        defaults = {"kv_cache_dtype": "fp8_e4m3", "device": "cuda", "skip_tokenizer_init": True}
        with override_platform(is_cuda=True):
            args = ServerArgs(model_path=str(tmp_path), **(defaults | changes))
            args.resolve_once()
        with override_platform(is_cuda=is_cuda):
            args.check_server_args()

    return start


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "auto"},
        {"dsa_prefill_backend": "flashmla_sparse"},
        {"dsa_prefill_backend": "flashmla_auto"},
        {"kv_cache_dtype": "bfloat16", "dsa_prefill_backend": "fa3"},
        {"dsa_topk_backend": "flashinfer"},
        {"config": {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"}},
        {"config": HY_V4, "kv_cache_dtype": "auto"},
        {"config": GLM53_FLASH, "mamba_track_interval": 1024},
        {"config": GLM53_FLASH, "mamba_track_interval": 1024, "kv_cache_dtype": "bfloat16"},
        {"config": GLM53_FLASH | {"index_kpool": 4}, "dsa_prefill_backend": "flashmla_sparse"},
        {"enable_hisparse": True, "disable_radix_cache": True},
        {"enable_hisparse": True, "disable_radix_cache": True, "kv_cache_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_supported_settings_are_accepted(hooked, arguments, changes):
    arguments(**changes)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"is_cuda": False}, "the GPU must be one of NVIDIA"),
        ({"dsa_decode_backend": "trtllm"}, "--dsa-decode-backend must be one of .*, got trtllm"),
        ({"dsa_prefill_backend": "triton_sparse_mla"}, "--dsa-prefill-backend must be one of"),
        ({"dsa_prefill_backend": "flashmla_sparse_q8"}, "--dsa-prefill-backend must be one of"),
        (
            {
                "enable_prefill_cp": True,
                "cp_strategy": "interleave",
                "tp_size": 2,
                "attn_cp_size": 2,
            },
            "--enable-prefill-cp must be off",
        ),
        ({"dcp_size": 2, "tp_size": 2}, "--dcp-size must be 1, got 2"),
        ({"attention_backend": "flashinfer"}, "--attention-backend must be dsa"),
        ({"decode_attention_backend": "triton"}, "--attention-backend must be dsa"),
        (
            {"config": {"index_kpool": 4}},
            r"must be \(512, 0\) with index_kpool 4, got \(512, 64\)",
        ),
        (
            {"config": {"kv_lora_rank": 256}},
            r"must be \(512, 64\) with index_kpool 1, got \(256, 64\)",
        ),
        (
            {"config": {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}},
            "the model must have an indexer that SGLang's dsa backend serves, got DeepseekV2",
        ),
        ({"model_impl": "transformers"}, "--model-impl must be one of auto, sglang"),
        ({"dtype": "float16"}, "--dtype must be bfloat16, got torch.float16"),
    ],
    ids=str,
)
def test_unsupported_settings_are_refused(hooked, arguments, changes, reason):
    with pytest.raises(ValueError, match=f"sparsemla: .*{reason}"):
        arguments(**changes)


class Settings(SimpleNamespace):
    """Resolved arguments, of which every one that is not given is off."""

    def __getattr__(self, name):
        return None


GOOD = {
    "attention_backend": "dsa",
    "model_impl": "auto",
    "kv_cache_dtype": "fp8_e4m3",
    "dcp_size": 1,
    "attn_cp_size": 1,
    "dsa_prefill_backend": "flashmla_kv",
    "dsa_decode_backend": "flashmla_kv",
}


@pytest.fixture
def refusal(monkeypatch):
    """The reason for settings that SGLang itself may refuse, too, or that need a machine."""

    def reason(config=None, dtype=torch.bfloat16, qk_rope_head_dim=64, **changes):
        hf_config = SimpleNamespace(**(CONFIG | (config or {})), get_text_config=lambda: None)
        model = SimpleNamespace(
            hf_config=hf_config,
            kv_lora_rank=512,
            qk_rope_head_dim=qk_rope_head_dim,
            dtype=dtype,
            num_attention_heads=128,
        )
        with override_platform(is_cuda=True):
            return settings.refuse(Settings(**(GOOD | changes)), model)

    return reason


def test_good_settings_have_no_reason(refusal):
    assert refusal() is None


@pytest.mark.parametrize("option", settings.OFF)
def test_options_that_must_be_off(refusal, option):
    flag = "--" + option.replace("_", "-")
    assert refusal(**{option: True}) == f"{flag} must be off: {settings.OFF[option]}"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attn_cp_size": 2}, "--attn-cp-size must be 1, got 2"),
        ({"dcp_size": 2}, "--dcp-size must be 1, got 2"),
        ({"kv_cache_dtype": "nvfp4"}, "--kv-cache-dtype must be one of .*, got nvfp4"),
        ({"model_impl": "transformers"}, "--model-impl must be one of .*, got transformers"),
        ({"dtype": torch.float16}, "--dtype must be bfloat16, got torch.float16"),
        (
            {"config": {"architectures": ["Dots3NoteForCausalLM"]}},
            "^Dots3NoteForCausalLM has layers of another backend, whose windows dsa does not read$",
        ),
        (
            {"config": {"architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4"}},
            "^SGLang's backend dsv4 of DeepseekV4ForCausalLM is not replaced, only dsa$",
        ),
    ],
    ids=str,
)
def test_other_refusals(refusal, changes, reason):
    assert re.search(reason, refusal(**changes))


POOLED = {"config": {"index_kpool": 4}, "qk_rope_head_dim": 0}


@pytest.mark.parametrize(
    ("capability", "changes", "reason"),
    [
        ((9, 0), {}, None),
        ((12, 0), {}, None),
        ((8, 9), {}, "the GPU must have compute capability 9.0 or more, .* DeepGEMM, got 8.9$"),
        ((9, 0), {"enable_hisparse": True}, "--enable-hisparse must be off: .* open pools$"),
    ],
    ids=str,
)
def test_what_pools_need(refusal, monkeypatch, capability, changes, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    found = refusal(**POOLED, **changes)
    assert found is None if reason is None else re.search(f"index_kpool 4 {reason}", found)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_gpus(refusal, monkeypatch, capability):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    assert refusal() is None


def test_gpus_without_kernels_are_refused(refusal, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (7, 5))
    assert refusal() == "the GPU must have compute capability 8.0 or more, got 7.5"


@pytest.mark.parametrize("capability", [(8, 0), (8, 6)], ids=str)
def test_gpus_for_which_sglangs_kernels_do_not_compile_are_refused(
    refusal, monkeypatch, capability
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    fused = {"config": {"indexer_rope_interleave": True}, "kv_cache_dtype": "bfloat16"}
    end = " in Triton, which does not compile there; got {}.{}".format(*capability)
    start = "below compute capability 8.9 "
    queries = (
        "the model must have indexer_rope_interleave, and SGLANG_DISABLE_DSA_INDEXER_FUSION must "
        "be unset: otherwise SGLang quantises index queries"
    )
    assert refusal(**fused) is None
    rows = "--kv-cache-dtype must be bfloat16: SGLang writes FP8 rows"
    assert refusal(**fused | {"kv_cache_dtype": "fp8_e4m3"}) == start + rows + end
    assert refusal(**fused | {"config": {}}) == start + queries + end
    with envs.SGLANG_DISABLE_DSA_INDEXER_FUSION.override(True):
        assert refusal(**fused) == start + queries + end


def test_other_bits_of_fp8_are_refused(refusal, monkeypatch):
    monkeypatch.setattr(settings, "fp8_dtype", torch.float8_e4m3fnuz)
    assert refusal() == "SGLang's FP8 dtype must be float8_e4m3fn, got torch.float8_e4m3fnuz"


PERMITTED = {"dsa_prefill_backend": "flashmla_sparse", "tp_size": 2, "attn_dp_size": 1}
"""Settings of an engine of 128 heads whose prefills may have FP8 MMAs."""


@pytest.mark.parametrize(
    ("capability", "changes", "reason"),
    [
        ((9, 0), {}, None),
        ((9, 0), {"tp_size": 8, "attn_dp_size": 8}, None),
        ((10, 0), {}, "the GPU must have compute capability 9.0, .* got 10.0$"),
        ((9, 0), {"kv_cache_dtype": "bfloat16"}, "--kv-cache-dtype must be fp8_e4m3.* got bfloat1"),
        (
            (9, 0),
            {"dsa_prefill_backend": "fa3"},
            "--dsa-prefill-backend must be flashmla_sparse.*fa3$",
        ),
        ((9, 0), {"dsa_prefill_backend": "flashmla_kv"}, "--dsa-prefill-backend .*mla_kv$"),
        ((9, 0), {"dsa_prefill_backend": "flashmla_auto"}, "--dsa-prefill-backend .*mla_auto$"),
        ((9, 0), {"tp_size": 4}, "a rank must have more than 32 heads: lower .*, got 32$"),
        ((9, 0), POOLED, "the model's rows must have RoPE dims, got qk_rope_head_dim 0$"),
    ],
    ids=str,
)
def test_fp8_mma_that_no_prefill_would_use_are_refused(
    refusal, monkeypatch, capability, changes, reason
):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: capability)
    changes = PERMITTED | changes
    assert refusal(**changes) is None
    monkeypatch.setenv("SPARSEMLA_FP8_MMA", "1")
    if reason is None:
        assert refusal(**changes) is None
    else:
        assert re.search(f"^with SPARSEMLA_FP8_MMA=1 {reason}", refusal(**changes))


def test_values_of_the_permission(refusal, monkeypatch):
    monkeypatch.setenv("SPARSEMLA_FP8_MMA", "yes")
    with pytest.raises(ValueError, match="SPARSEMLA_FP8_MMA must be 0 or 1, got 'yes'"):
        refusal()


def test_sglangs_own_arguments_have_what_the_permission_needs(hooked, arguments, monkeypatch):
    monkeypatch.setenv("SPARSEMLA_FP8_MMA", "1")
    config = {"num_attention_heads": 64, "num_key_value_heads": 64}
    arguments(config=config, dsa_prefill_backend="flashmla_sparse")
    with pytest.raises(ValueError, match=r"a rank must have more than 32 heads.* got 16; other"):
        arguments(config=config, dsa_prefill_backend="flashmla_sparse", tp_size=4)


HANDLED = (
    *settings.CHOICES,
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "dtype",
    "dcp_size",
    "attn_cp_size",
    "attn_dp_size",
    "tp_size",
)
"""Arguments that ``refuse`` reads, besides those that must be off."""

IRRELEVANT = {
    "the selection is exact and the same for every choice": "dsa_topk_backend "
    "speculative_dsa_topk_backend enable_return_indexer_topk",
    "the scores stay SGLang's": "dsa_paged_mqa_logits_backend enable_dsa_fused_indexer "
    "qsa_indexer_dtype",
    "of a choice of --dsa-prefill-backend that is refused": "dsa_triton_union",
    "of a cache dtype that is refused": "prefill_kv_cache_dequant_dtype",
    "of DeepSeek-V4, which is refused": "dsv4_prefill_backend dsv4_attn_backend "
    "enable_deepseek_v4_fp4_indexer c128_page_size enable_encoder_swa_bounded_replay "
    "enable_decoder_swa_bounded_replay",
    "of other attention backends, which are refused": "enable_lean_attention "
    "triton_attention_reduce_in_fp32 triton_attention_num_kv_splits "
    "triton_attention_split_tile_size flashinfer_mla_disable_ragged mm_attention_backend",
    "of sliding windows and linear attention, which stay SGLang's": "swa_full_tokens_ratio "
    "_swa_full_tokens_ratio_explicitly_set swa_prefix_tails disable_hybrid_swa_memory "
    "max_mamba_cache_size mamba_full_memory_ratio",
    "of kernels beside attention": "sampling_backend grammar_backend fp8_gemm_runner_backend "
    "fp4_gemm_runner_backend bf16_gemm_backend disable_flashinfer_autotune "
    "flashinfer_autotune_skip_ops enable_fused_qk_norm_rope enable_precise_embedding_interpolation",
    "SGLang refuses it for these models": "enable_deterministic_inference",
    "of context parallelism, which is refused": "dcp_comm_backend dcp_replicate_q_proj "
    "cp_strategy enable_cp_tp_group_sharing",
    "each backend has a workspace of its own": "enable_two_batch_overlap "
    "enable_single_batch_overlap tbo_token_distribution_threshold",
    "the heads of a rank and its rows are counted from tensors": "pp_size "
    "pp_max_micro_batch_size pp_async_batch_depth dp_size moe_dp_size dwdp_size "
    "ep_size moe_dense_tp_size enable_dp_attention nnodes node_rank "
    "enable_attn_tp_input_scattered disable_attn_tp_gather",
    "of processes, layers and collectives beside attention": "nccl_port dist_timeout "
    "dist_init_addr gated_launch_port load_balance_method "
    "enable_dp_attention_local_control_broadcast enable_dp_lm_head enable_tp_lm_head_all_to_all "
    "enable_shared_experts_attn_tp "
    "shared_experts_tp_size enable_dense_mlp_attn_tp enable_layernorm_sp "
    "enable_megamoe_for_layernorm_sp enable_p2p_check ep_join_rank_offset elastic_ep_initial_size "
    "max_ep_size",
    "slots are read where SGLang says; it moves pages": "page_size radix_eviction_policy "
    "_radix_eviction_policy_explicitly_set radix_eviction_policy_config disable_radix_cache "
    "enable_session_radix_cache radix_cache_backend enable_hierarchical_cache "
    "hicache_host_memory_mode hicache_ratio hicache_size hicache_host_memory_fraction "
    "hicache_write_policy hicache_io_backend hicache_mem_layout hicache_storage_backend "
    "hicache_storage_prefetch_policy hicache_storage_backend_extra_config "
    "hicache_storage_prefetch_retry_poll_interval hicache_storage_prefetch_retry_max_attempts "
    "enable_unified_cache_external_linker unified_cache_external_linker_backend "
    "unified_cache_external_linker_config enable_linker_mla_dedup enable_lmcache "
    "lmcache_config_file enable_flexkv flexkv_config_file",
    "HiSparse brings selected rows to the GPU before a replaced method reads them": ""
    "enable_hisparse hisparse_config",
    "the sizes of a step are those of its tensors": "mem_fraction_static max_running_requests "
    "max_queued_requests max_total_tokens chunked_prefill_size prefill_decode_interval "
    "prefill_decode_interval_min_bs enable_dynamic_chunking max_prefill_tokens "
    "prefill_max_requests disable_chunked_prefix_cache disable_overlap_schedule "
    "num_continuous_decode_steps scheduler_recv_interval enable_mixed_chunk",
    "which requests run when": "schedule_policy enable_priority_scheduling "
    "disable_priority_preemption default_priority_value abort_on_priority_when_disabled "
    "schedule_low_priority_values_first priority_scheduling_preemption_threshold retraction_policy "
    "schedule_conservativeness enable_prefill_delayer prefill_delayer_max_delay_passes "
    "prefill_delayer_token_usage_low_watermark prefill_delayer_forward_passes_buckets "
    "prefill_delayer_wait_seconds_buckets prefill_delayer_queue_min_ratio "
    "prefill_delayer_max_delay_ms min_free_slots_delay",
    "each draft token selects its own keys; a draft model is built like any other": ""
    "speculative_algorithm uno_lora_path speculative_draft_model_path "
    "speculative_boundary_reduction speculative_draft_model_revision "
    "speculative_draft_load_format speculative_num_steps speculative_eagle_topk "
    "speculative_num_draft_tokens speculative_attention_mode speculative_draft_kv_cache_dtype "
    "speculative_draft_model_quantization _speculative_draft_quantization_explicitly_set "
    "enable_multi_layer_eagle speculative_adaptive speculative_adaptive_config spec_trace_dir",
    "a backend that is named for the draft model alone": "speculative_draft_attention_backend",
    "of draft models with other attention": "speculative_dflash_block_size "
    "speculative_domino_candidate_pool_size speculative_dspark_block_size "
    "speculative_dspark_sps_table_path speculative_dspark_confidence_sts_path "
    "speculative_dspark_align_verify_tokens_to_graph_tier speculative_draft_window_size "
    "speculative_draft_sink_size",
    "which drafts are accepted, and where they come from": "speculative_accept_threshold_single "
    "speculative_accept_threshold_acc speculative_use_rejection_sampling "
    "speculative_use_block_verification speculative_token_map speculative_ngram_min_bfs_breadth "
    "speculative_ngram_max_bfs_breadth speculative_ngram_match_type "
    "speculative_ngram_max_trie_depth speculative_ngram_capacity "
    "speculative_ngram_external_corpus_path speculative_ngram_external_sam_budget "
    "speculative_ngram_external_corpus_max_tokens",
    "of experts": "speculative_moe_runner_backend speculative_moe_a2a_backend "
    "speculative_enable_w4a4_mxfp4_megamoe",
}
"""Why an argument cannot change what the replaced functions compute."""

ENUMERATED = (
    "ExecKernel",
    "ExecOverlap",
    "ExecDeterministic",
    "Memory",
    "Parallel",
    "Schedule",
    "Spec",
)
OTHERS = {
    "ExecComm ExecMoe ExecOffload": "collectives, experts and weights",
    "ExecMamba ExecDllm": "models that the dsa backend does not serve",
    "ExecGraph": "graphs capture the replaced methods, which neither allocate workspaces nor sync",
    "ExecFeatures": "what requests return; the selection of an indexer among it",
    "Model": "weights and their formats; dtypes and the implementation are read by refuse",
    "Lora": "SGLang applies adapters before it calls attention",
    "Mm Disagg": "images, and transfers of pages between servers",
    "Device Observability Serving": "processes, logs and requests",
}
"""Groups of arguments that do not concern attention, cache, parallelism or speculation."""


def test_every_argument_of_sglang_is_accounted_for():
    """A new one fails here: handle it, refuse it, or say why it does not matter."""
    from sglang.srt.arg_groups import fields

    groups = {}
    for module in pkgutil.iter_modules(fields.__path__):
        found = vars(importlib.import_module(f"{fields.__name__}.{module.name}"))
        for name, group in found.items():
            if inspect.isclass(group) and group.__module__.startswith(fields.__name__):
                groups[name] = set(vars(group).get("__annotations__", ()))
    groups = {name: names for name, names in groups.items() if names}
    assert {*groups} == {*ENUMERATED, *" ".join(OTHERS).split()}
    listed = [*HANDLED, *settings.OFF, *" ".join(IRRELEVANT.values()).split()]
    assert len(listed) == len({*listed}), "each once"
    arguments = set().union(*groups.values())
    assert {*listed} <= arguments, "no longer an argument"
    assert set().union(*(groups[name] for name in ENUMERATED)) <= {*listed}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"enable_deterministic_inference": True}, "supported for deterministic inference"),
        ({"config": HY_V4}, "attention sinks require a bfloat16 KV cache; got .*=fp8_e4m3"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "only supports bf16/bfloat16 or fp8_e4m3"),
    ],
    ids=str,
)
def test_sglang_refuses_the_rest(hooked, arguments, changes, reason):
    with pytest.raises((ValueError, AssertionError), match=reason):
        arguments(**changes)


def test_the_start_stops_if_another_plugin_replaces_the_backend(hooked, arguments, monkeypatch):

    class Another(DeepseekSparseAttnBackend):
        """Has a method of its own."""

        def _forward_fa3(self):
            """Ours is not called."""

    monkeypatch.setattr(dsa_backend, "DeepseekSparseAttnBackend", Another)
    with pytest.raises(RuntimeError, match="_forward_fa3 did not take"):
        arguments()


# Attention.

CASES = {
    "decode": {"forward_mode": ForwardMode.DECODE, "prefix_lens": (3, 150)},
    "prefill": {
        "forward_mode": ForwardMode.EXTEND,
        "prefix_lens": (140, 0),
        "extend_lens": (3, 9),
    },
    "first prefill": {
        "forward_mode": ForwardMode.EXTEND,
        "prefix_lens": (0, 0),
        "extend_lens": (2, 20),
    },
    "speculative": {
        "forward_mode": ForwardMode.TARGET_VERIFY,
        "prefix_lens": (0, 130),
        "extend_lens": (3, 3),
    },
}
# SGLang's choices of kernels for prefill and decode, which are its methods, by cache; and heads.
METHODS = [
    ("fp8", "flashmla_kv", "flashmla_kv", 8),
    ("fp8", "flashmla_sparse", "flashmla_kv", 16),
    ("bf16", "flashmla_sparse", "fa3", 8),
    ("bf16", "fa3", "flashmla_sparse", 16),
    ("bf16", "flashmla_auto", "flashmla_kv", 8),
]


@pytest.fixture
def torch_instead(monkeypatch):
    """Torch instead of two of SGLang's functions: one that compiles, one that wants a GPU."""

    def expand(extend_seq_lens, seq_lens, total_len, max_q_len):
        pairs = zip(extend_seq_lens.tolist(), seq_lens.tolist(), strict=True)
        return torch.cat([torch.arange(n - count, n) + 1 for count, n in pairs]).int()

    monkeypatch.setattr(dsa_backend, "seqlens_expand_triton", expand)
    monkeypatch.setattr(dsa_backend, "_cat", torch.cat)


@pytest.fixture
def on_cpu(hooked, torch_instead):
    """SGLang with the plugin, on the CPU."""


def fixture(name, cache="fp8", prefill="flashmla_kv", decode="flashmla_kv", num_heads=8):
    """SGLang's backend, memory pool and batch, and queries and keys of a layer."""
    return build_dsa_sparse_attention_fixture(
        unittest.TestCase(),
        DSAAttentionCase(
            name=name,
            backend="dsa",
            num_heads=num_heads,
            num_kv_heads=1,
            page_size=64,
            **CASES[name],
        ),
        device="cpu",
        fp8_kv_cache=cache == "fp8",
        dsa_prefill_backend=prefill,
        dsa_decode_backend=decode,
        index_pattern="strided",
    )


def selections(made):
    """Selected positions as SGLang's indexer returns them: slots, or rows of the contexts."""
    backend, batch = made.backend, made.forward_batch
    method = backend.get_topk_transform_method(batch.forward_mode)
    rows, starts, first = [], [], 0
    lens = [p + n for p, n in zip(made.case.prefix_lens, made.case.input_lens, strict=True)]
    for request, (count, length) in enumerate(zip(made.case.input_lens, lens, strict=True)):
        rows += [request] * count
        starts += [first] * count
        first += length
    positions, rows = made.topk_indices, torch.tensor(rows)
    if method == TopkTransformMethod.RAGGED:
        return torch.where(positions < 0, -1, positions + torch.tensor(starts)[:, None].int())
    table = backend.req_to_token[batch.req_pool_indices][rows]
    return torch.where(positions < 0, -1, table.gather(1, positions.clamp(0).long())).int()


@pytest.mark.parametrize(("cache", "prefill", "decode", "num_heads"), METHODS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_layer_agrees_with_sglangs_reference(
    on_cpu, monkeypatch, name, cache, prefill, decode, num_heads
):
    calls = []
    for op in ("sparse_decode", "sparse_prefill"):
        call = getattr(attention, op)

        def seen(q, *args, op=op, call=call, **kwargs):
            calls.append((op, q.shape[-2], kwargs.get("workspace")))
            return call(q, *args, **kwargs)

        monkeypatch.setattr(attention, op, seen)
    made = fixture(name, cache, prefill, decode, num_heads)
    made.backend.init_forward_metadata(made.forward_batch)
    expected = expected_dsa_sparse_fixture_output(made)
    made.topk_indices = selections(made)
    found = run_dsa_sparse_fixture_eager(made, unittest.TestCase())
    bound = DSA_SPARSE_FP8_ATOL if cache == "fp8" else DSA_SPARSE_ATOL
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)
    ((op, heads, workspace),) = calls
    assert heads == num_heads, "heads were padded"
    if "prefill" in name:
        assert op == "sparse_prefill"
    else:
        assert op == "sparse_decode"
        assert workspace is made.backend.sparsemla_workspace


def filled(made):
    """The cache of the layer, with a random row in every slot."""
    data = made.runner.token_to_kv_pool.get_key_buffer(0)
    cache_format = BF16_576 if data.dtype == torch.bfloat16 else FP8_DS_MLA
    cache = PagedCache(data, cache_format)
    cache.write(torch.arange(data.shape[0]), torch.randn(data.shape[0], 576))
    return cache


class HotRows:
    """SGLang's coordinator of HiSparse, with its loop that brings rows from the host.

    The cache of the layer then has only the hot rows of a batch; all others are overwritten.
    """

    def __init__(self, made, num_hot):
        backend, pool = made.backend, made.runner.token_to_kv_pool
        requests = len(backend.req_to_token)
        order = torch.randperm(len(pool.get_key_buffer(0)))
        self.batch, self.req_to_token, self.pool = made.forward_batch, backend.req_to_token, pool
        self.rows = pool.get_key_buffer(0)
        self.is_dsv4_hisparse, self.device, self.top_k = False, "cpu", TOPK
        self.device_buffer_size, self.mem_pool_device, self.mem_pool_host = num_hot, pool, self
        # A slot for each hot row of each request of the batch, and one for its newest row.
        self.req_to_device_buffer = torch.zeros(requests, num_hot + 1, dtype=torch.int64)
        count = len(self.batch.req_pool_indices)
        slots = order[: count * (num_hot + 1)].view(count, -1)
        self.req_to_device_buffer[self.batch.req_pool_indices] = slots
        self.req_to_host_pool = backend.req_to_token  # the host has the rows as the cache had them

    def swap_in_selected_pages(self, requests, lens, positions, layer):
        self.host = self.rows.clone()
        self.rows.view(torch.uint8).fill_(0x55)
        for request, length in zip(requests.tolist(), lens.tolist(), strict=True):
            slots, rows = self.req_to_device_buffer[request], self.req_to_token[request].long()
            if length <= self.device_buffer_size:
                self.rows[slots[:length]] = self.host[rows[:length]]
            else:
                self.rows[slots[-1]] = self.host[rows[length - 1]]
        return HiSparseCoordinator.naive_load_topk(self, requests, lens, positions, layer)

    def load_to_device_per_layer(self, pool, host_slots, slots, layer, io_backend):
        self.rows[slots] = self.host[host_slots.long()]

    def translate(self, slots):
        """Where the rows of a prefill are: all are on the GPU, in other slots."""
        order = torch.randperm(len(self.rows))
        self.rows[order] = self.rows.clone()
        return torch.nn.functional.pad(order, (0, 1), value=-1)[slots]


@pytest.mark.parametrize(
    ("cache", "method"), [("fp8", "flashmla_kv"), ("bf16", "flashmla_sparse")], ids=str
)
@pytest.mark.parametrize("name", ["decode", "prefill", "first prefill"])
def test_a_layer_reads_the_hot_rows_of_hisparse(on_cpu, monkeypatch, name, cache, method):
    made = fixture(name, cache, method, method)
    backend = made.backend
    backend.init_forward_metadata(made.forward_batch)
    expected = expected_dsa_sparse_fixture_output(made)
    hot = HotRows(made, num_hot=TOPK)
    backend.hisparse_coordinator = hot
    monkeypatch.setattr(
        made.runner.token_to_kv_pool, "translate_loc_to_hisparse_device", hot.translate, False
    )
    if name != "decode":  # positions otherwise
        made.topk_indices = selections(made)
    found = run_dsa_sparse_fixture_eager(made, unittest.TestCase())
    bound = DSA_SPARSE_FP8_ATOL if cache == "fp8" else DSA_SPARSE_ATOL
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("name", ["decode", "speculative"])
def test_selections_for_hisparse_are_positions(step, name):
    """Its coordinator looks for the rows of positions, not of slots."""
    made, backend, *_ = step(name)
    backend.hisparse_coordinator = HotRows(made, num_hot=TOPK)
    info = backend.get_indexer_metadata(0, made.forward_batch)
    lengths = info.attn_metadata.dsa_seqlens_expanded
    if lengths is None:
        lengths = info.attn_metadata.cache_seqlens_int32
    logits = torch.randn(len(lengths), 256)
    found = info.topk_transform(logits, TOPK)
    for row, length in enumerate(lengths.tolist()):
        best = logits[row, :length].topk(min(TOPK, length)).indices.sort().values
        assert_equal("positions", found[row, : len(best)], best.int())
        assert (found[row, len(best) :] == -1).all()


@pytest.fixture
def unwritten(monkeypatch):
    """SGLang's kit does not write keys, which takes the interpreter seconds."""
    monkeypatch.setattr(dsa_attention, "_populate_dsa_sparse_prefix_kv", lambda *args, **kwargs: 0)


@pytest.fixture
def step(on_cpu, unwritten):
    """A step of SGLang's backend: the metadata of a batch, a cache, queries and slots."""

    def make(name, *choices):
        made = fixture(name, *choices)
        made.backend.init_forward_metadata(made.forward_batch)
        slots = selections(made)
        q = torch.randn(len(slots), made.case.num_heads, 576, dtype=torch.bfloat16)
        return made, made.backend, filled(made), q, slots

    return make


def expected_attention(q, cache, slots, **arguments):
    out, _ = reference.sparse_decode(
        q.unsqueeze(1), cache, slots.unsqueeze(1), softmax_scale=0.07, **arguments
    )
    return out.squeeze(1).to(q.dtype)


@pytest.mark.parametrize(
    ("name", "num_heads"), [*((name, 8) for name in CASES), ("decode", 16), ("decode", 128)]
)
@pytest.mark.parametrize("cache_dtype", ["fp8", "bf16"])
def test_flashmla_kv_agrees_with_the_reference(step, name, cache_dtype, num_heads):
    made, backend, cache, q, slots = step(
        name, cache_dtype, "flashmla_kv", "flashmla_kv", num_heads
    )
    slots[0] = -1  # a padded token
    out = backend._forward_flashmla_kv(
        q_all=q.flatten(1),
        kv_cache=cache.data,
        v_head_dim=512,
        sm_scale=0.07,
        layer=made.actual_module.attn,
        metadata=backend.forward_metadata,
        page_table_1=slots,
    )
    assert out.shape == (len(q), 1, num_heads, 512)
    assert_close("out", out.squeeze(1), expected_attention(q, cache, slots), SPARSE_DECODE_OUT)
    assert (out[0] == 0).all()


@pytest.mark.parametrize("sink", [False, True], ids=["no sink", "sink"])
@pytest.mark.parametrize("name", CASES)
def test_flashmla_sparse_agrees_with_the_reference(step, name, sink):
    _, backend, cache, q, slots = step(name, "bf16", "flashmla_sparse", "flashmla_sparse")
    sink = torch.randn(8) if sink else None
    out = backend._forward_flashmla_sparse(
        q_all=q,
        kv_cache=cache.data,
        v_head_dim=512,
        page_table_1=slots,
        sm_scale=0.07,
        topk_length=backend.forward_metadata.dsa_cache_seqlens_int32,
        attn_sink=sink,
    )
    expected = expected_attention(q, cache, slots, attn_sink=sink)
    assert_close("out", out, expected, SPARSE_DECODE_OUT)


@pytest.mark.parametrize("value", [None, "0", "1"])
@pytest.mark.parametrize(
    ("cache", "prefill", "name", "converted"),
    [
        ("fp8", "flashmla_sparse", "prefill", True),
        ("fp8", "flashmla_sparse", "first prefill", True),
        ("fp8", "flashmla_kv", "prefill", False),
        ("bf16", "fa3", "prefill", False),
    ],
)
def test_prefills_over_converted_rows_alone_may_permit_fp8_mma(
    on_cpu, monkeypatch, caplog, value, cache, prefill, name, converted
):
    caplog.set_level("INFO")
    monkeypatch.delenv("SPARSEMLA_FP8_MMA", raising=False)
    if value is not None:
        monkeypatch.setenv("SPARSEMLA_FP8_MMA", value)
    given, call = [], attention.sparse_prefill

    def seen(q, kv, *args, allow_fp8_mma, **kwargs):
        given.append((kv.format.name, allow_fp8_mma))
        return call(q, kv, *args, allow_fp8_mma=allow_fp8_mma, **kwargs)

    monkeypatch.setattr(attention, "sparse_prefill", seen)
    made = fixture(name, cache, prefill, "flashmla_kv")
    made.backend.init_forward_metadata(made.forward_batch)
    made.topk_indices = selections(made)
    run_dsa_sparse_fixture_eager(made, unittest.TestCase())
    fmt = FP8_DS_MLA if cache == "fp8" and not converted else BF16_576
    assert given == [(fmt.name, converted and value == "1")]
    text = "sparsemla: prefills over converted rows permit FP8 MMAs (SPARSEMLA_FP8_MMA=1)"
    assert caplog.messages.count(text) == (value == "1")


@pytest.mark.parametrize("padding", [0, 2], ids=["exact", "padded lengths"])
@pytest.mark.parametrize("name", CASES)
def test_fa3_agrees_with_the_reference(step, name, padding):
    _, backend, cache, q, slots = step(name, "bf16", "fa3", "fa3")
    metadata = backend.forward_metadata
    arguments = {
        "q_rope": q[..., 512:],
        "kv_cache": cache.data,
        "v_head_dim": 512,
        "q_nope": q[..., :512],
        "page_table": slots,
        "cache_seqlens": torch.nn.functional.pad(metadata.dsa_cache_seqlens_int32, (0, padding)),
        "cu_seqlens_q": metadata.dsa_cu_seqlens_q,
        "cu_seqlens_k": metadata.dsa_cu_seqlens_k,
        "max_seqlen_q": metadata.dsa_max_seqlen_q,
        "sm_scale": 0.07,
        "page_size": 1,
    }
    out = backend._forward_fa3(**arguments, logit_cap=0.0)
    assert_close("out", out, expected_attention(q, cache, slots), SPARSE_DECODE_OUT)
    with pytest.raises(ValueError, match="logit_cap must be 0, got 30"):
        backend._forward_fa3(**arguments, logit_cap=30.0)


@pytest.mark.parametrize("name", ["decode", "speculative"])
def test_lengths_bound_the_selected_slots(step, name):
    """Entries after a token's length are ignored, whatever they are."""
    made, backend, cache, q, slots = step(name)
    lengths = backend.forward_metadata.dsa_cache_seqlens_int32
    behind = torch.arange(TOPK) >= lengths[:, None]
    expected = expected_attention(q, cache, slots.masked_fill(behind, -1))
    out = backend._forward_flashmla_kv(
        q,
        cache.data,
        512,
        0.07,
        made.actual_module.attn,
        backend.forward_metadata,
        slots.masked_fill(behind, 5),
    )
    assert_close("out", out.squeeze(1), expected, SPARSE_DECODE_OUT)


def test_a_backend_has_a_workspace_for_any_decode(step, monkeypatch, caplog):
    caplog.set_level("INFO")
    asked = []
    monkeypatch.setattr(
        attention, "decode_workspace_size", lambda *args, **kwargs: asked.append(args) or 4096
    )
    _, backend, *_ = step("decode", "fp8", "flashmla_kv", "flashmla_kv", 16)
    assert asked == [(attention.MOST_SPLIT_TOKENS, 1, 16)]
    assert "sparsemla computes attention of 16 heads" in caplog.text
    assert (backend.sparsemla_workspace.dtype, backend.sparsemla_workspace.shape) == (
        torch.uint8,
        (4096,),
    )


@pytest.mark.parametrize("num_heads", [8, 16, 128])
def test_the_workspace_is_enough_for_every_batch(num_heads):
    device, size = torch.device("cpu"), attention.decode_workspace_size
    with simulated(GPUS["sm_90"]._replace(multiprocessors=256)):
        enough = size(attention.MOST_SPLIT_TOKENS, 1, num_heads, device=device)
        assert enough == size(4096, 1, num_heads, device=device) > 0


def test_a_captured_decode_sees_the_next_batch(step):
    """SGLang fills the metadata of a graph anew before each replay."""
    made, backend, cache, q, _ = step("decode")
    batch, layer = made.forward_batch, made.actual_module.attn

    def decode(logits):
        info = backend.get_indexer_metadata(0, batch)
        slots = info.topk_transform(logits, TOPK)
        return slots, backend._forward_flashmla_kv(
            q, cache.data, 512, 0.07, layer, info.attn_metadata, slots
        )

    logits = torch.randn(len(q), 256)
    expected = decode(logits)
    backend.init_cuda_graph_state(max_bs=4, max_num_tokens=4)
    lens, batch.seq_lens = batch.seq_lens, torch.ones_like(batch.seq_lens)
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    captured = backend.forward_metadata
    batch.seq_lens = lens
    backend.init_forward_metadata_out_graph(batch)
    assert backend.forward_metadata is captured
    slots, out = decode(logits)
    assert_equal("slots", slots, expected[0])
    assert_equal("out", out, expected[1])


@pytest.mark.parametrize("method", ["flashmla_kv", "fa3"])
def test_a_decode_reads_nothing_back(step, method):
    """Fake tensors have no values: reading one, which would synchronise a GPU, raises."""
    made, backend, cache, q, slots = step("decode", "fp8" if method == "flashmla_kv" else "bf16")
    metadata = backend.forward_metadata
    logits = torch.randn(len(q), 256)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:
        lengths, q, slots, rows, logits = map(
            fake.from_tensor,
            (metadata.dsa_cache_seqlens_int32, q, slots, cache.data, logits),
        )
        object.__setattr__(metadata, "dsa_cache_seqlens_int32", lengths)
        if method == "flashmla_kv":
            layer = made.actual_module.attn
            out = backend._forward_flashmla_kv(q, rows, 512, 0.07, layer, metadata, slots)
        else:
            out = backend._forward_fa3(
                q[..., 512:], rows, 512, q[..., :512], slots, lengths, None, None, 1, 0.07, 0.0, 1
            )
        assert out.shape[-2:] == (8, 512)
        chosen = backend.get_indexer_metadata(0, made.forward_batch).topk_transform(logits, TOPK)
        assert chosen.shape == (len(q), TOPK)


# Selection.


class Scores:
    """Random scores of each token of a batch, with NaN in all columns that do not count.

    Args:
        made: SGLang's batch.
        packed: the contexts of all requests are side by side, as in a prefill.
    """

    def __init__(self, made, packed):
        case = made.case
        counts, prefixes = case.input_lens, case.prefix_lens
        pairs = [(r, i) for r, count in enumerate(counts) for i in range(count)]
        contexts = torch.tensor([p + n for p, n in zip(prefixes, counts, strict=True)])
        firsts = contexts.cumsum(0) - contexts
        self.requests = torch.tensor([r for r, _ in pairs])
        self.lengths = torch.tensor([prefixes[r] + i + 1 for r, i in pairs]).int()
        self.starts = firsts[self.requests].int() if packed else None
        starts = firsts[self.requests] if packed else torch.zeros(len(pairs), dtype=torch.long)
        width = int(contexts.sum()) if packed else 256
        columns = torch.arange(width)
        within = (columns >= starts[:, None]) & (columns < (starts + self.lengths)[:, None])
        self.logits = torch.randn(len(pairs), width).masked_fill(~within, torch.nan)
        self.firsts = firsts[self.requests]
        rows = [row[keep] for row, keep in zip(self.logits, within, strict=True)]
        best = [row.topk(min(TOPK, len(row))).indices.sort().values for row in rows]
        self.positions = torch.full((len(pairs), TOPK), -1)
        for row, chosen in zip(self.positions, best, strict=True):
            row[: len(chosen)] = chosen


def slots_of(made, scores):
    table = made.backend.req_to_token[made.forward_batch.req_pool_indices][scores.requests]
    slots = table.gather(1, scores.positions.clamp(0))
    return torch.where(scores.positions < 0, -1, slots)


@pytest.mark.parametrize("backend", DSATopKBackend, ids=lambda backend: backend.value)
@pytest.mark.parametrize("name", ["decode", "speculative"])
def test_decodes_select_slots(step, name, backend):
    made, *_ = step(name)
    made.backend.dsa_topk_backend = backend
    metadata = made.backend.get_indexer_metadata(0, made.forward_batch)
    scores = Scores(made, packed=False)
    lengths = made.backend.forward_metadata.dsa_seqlens_expanded
    lengths.copy_(scores.lengths)  # the kit counts the tokens of a verification twice
    chosen = metadata.topk_transform(scores.logits, TOPK)
    assert_equal("slots", chosen, slots_of(made, scores).int())


@pytest.mark.parametrize("name", ["prefill", "first prefill"])
def test_prefills_select_slots(step, name):
    made, *_ = step(name, "bf16", "flashmla_sparse")
    metadata = made.backend.get_indexer_metadata(0, made.forward_batch)
    scores = Scores(made, packed=True)
    ks, _ = metadata.get_indexer_kvcache_range()
    assert_equal("starts", ks, scores.starts)
    expected = slots_of(made, scores).int()
    chosen = metadata.topk_transform(scores.logits, TOPK, ks=ks)
    assert_equal("slots", chosen, expected)

    part = slice(1, len(expected) - 1)  # as SGLang does where all scores would take too much memory
    chosen = metadata.topk_transform(
        scores.logits[part],
        TOPK,
        ks=ks[part],
        cu_seqlens_q=torch.ones_like(ks[part]),
        ke_offset=metadata.get_seqlens_expanded()[part],
        batch_idx_list=metadata.get_token_to_batch_idx()[part],
    )
    assert_equal("slots of a part", chosen, expected[part])


def test_prefills_of_a_quantised_cache_select_rows(step):
    made, *_ = step("prefill", "fp8", "flashmla_sparse")
    metadata = made.backend.get_indexer_metadata(0, made.forward_batch)
    assert metadata.topk_transform_method == TopkTransformMethod.RAGGED
    scores = Scores(made, packed=True)
    positions = scores.positions
    expected = torch.where(positions < 0, -1, positions + scores.firsts[:, None]).int()
    ks, _ = metadata.get_indexer_kvcache_range()
    chosen = metadata.topk_transform(scores.logits, TOPK, ks=ks)
    assert_equal("rows", chosen, expected)

    part = slice(2, 7)
    chosen = metadata.topk_transform(
        scores.logits[part],
        TOPK,
        ks=ks[part],
        ke_offset=metadata.get_seqlens_expanded()[part],
        topk_indices_offset_override=metadata.attn_metadata.topk_indices_offset[part],
    )
    assert_equal("rows of a part", chosen, expected[part])


@pytest.mark.parametrize("name", ["decode", "prefill"])
def test_positions_are_selected_for_a_later_conversion(step, name):
    made, *_ = step(name, "bf16", "flashmla_sparse")
    metadata = made.backend.get_indexer_metadata(0, made.forward_batch)
    scores = Scores(made, packed=name == "prefill")
    with envs.SGLANG_DSA_FUSE_TOPK.override(False):
        chosen = metadata.topk_transform(scores.logits, TOPK, ks=scores.starts)
    assert_equal("positions", chosen, scores.positions.int())
    forced = dataclasses.replace(metadata, force_unfused_topk=True)
    chosen = forced.topk_transform(scores.logits, TOPK, ks=scores.starts)
    assert_equal("positions", chosen, scores.positions.int())


@pytest.mark.parametrize(
    ("cache", "prefill", "decode", "num_heads"),
    [pytest.param(*one, marks=pytest.mark.turns(i, 3)) for i, one in enumerate(METHODS)],
    ids=str,
)
def test_no_kernel_is_compiled_while_the_engine_serves(
    run_python, step, monkeypatch, cache, prefill, decode, num_heads
):
    """The calls of steps need no kernel beside those that are compiled at the start."""
    ops = {attention: ("sparse_decode", "sparse_prefill"), topk: ("select_topk",)}
    calls, asked = replay.spy(monkeypatch, ops), set()
    for name in CASES:
        made, *_ = step(name, cache, prefill, decode, num_heads)
        made.topk_indices = selections(made)
        run_dsa_sparse_fixture_eager(made, unittest.TestCase())
        metadata = made.backend.get_indexer_metadata(0, made.forward_batch)
        packed = "prefill" in name
        scores = Scores(made, packed)
        ks, _ = metadata.get_indexer_kvcache_range() if packed else (None, None)
        metadata.topk_transform(scores.logits, TOPK, ks=ks)
        asked.add(attention.layers_of(made.backend, made.runner))
    assert {op for op, *_ in calls} == {"sparse_decode", "sparse_prefill", "select_topk"}
    sweeps = [sweep for layers in asked for sweep in layers.sweeps()]
    assert replay.missing_kernels(run_python, calls, steps=sweeps) == []


def test_short_prefills_select_all_without_scores(step):
    """SGLang passes zeros, as many as are selected, where no context is longer."""
    made, *_ = step("first prefill", "bf16", "flashmla_sparse")
    metadata = made.backend.get_indexer_metadata(0, made.forward_batch)
    scores = Scores(made, packed=True)
    chosen = metadata.topk_transform(torch.zeros(len(scores.lengths), TOPK), TOPK)
    assert_equal("slots", chosen, slots_of(made, scores).int())


# GLM-5.3-Flash: rows without RoPE, and tokens of selected pools.


@pytest.fixture
def pooled(on_cpu, unwritten, monkeypatch):
    """A step of SGLang's backend over rows of 512 dims, with an indexer of pools."""

    def make(name, kpool, *choices):
        monkeypatch.setattr(dsa_attention, "DSA_SPARSE_QK_ROPE_HEAD_DIM", 0)
        made = fixture(name, *choices)
        backend = made.backend
        backend.dsa_index_kpool = kpool
        # The plan of the indexer's writes wants pinned memory.
        monkeypatch.setattr(backend, "_init_kpool_metadata", lambda metadata, *_, **__: metadata)
        backend.init_forward_metadata(made.forward_batch)
        return made, backend

    return make


def pools_of(scores, kpool):
    """Positions of the tokens of each token's best pools, then of its open pool, then -1."""
    rows = []
    for row, length, start in zip(
        scores.logits,
        (scores.lengths // kpool).tolist(),
        [0] * len(scores.logits) if scores.starts is None else scores.starts.tolist(),
        strict=True,
    ):
        best = row[start : start + length].topk(min(TOPK // kpool, length)).indices.sort().values
        rows.append([pool * kpool + i for pool in best.tolist() for i in range(kpool)])
    for row, length in zip(rows, scores.lengths.tolist(), strict=True):
        row += range(length // kpool * kpool, length)
        row += [-1] * (TOPK + kpool - 1 - len(row))
    return torch.tensor(rows)


@pytest.mark.parametrize("kpool", [4, 16])
@pytest.mark.parametrize(
    ("cache", "prefill", "decode"),
    [
        ("fp8", "flashmla_kv", "flashmla_kv"),
        ("fp8", "flashmla_sparse", "fa3"),
        ("bf16", "flashmla_sparse", "fa3"),
        ("bf16", "fa3", "flashmla_sparse"),
        ("bf16", "flashmla_auto", "flashmla_kv"),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["decode", "prefill", "speculative"])
def test_a_layer_of_pools_agrees_with_the_reference(pooled, name, cache, prefill, decode, kpool):
    made, backend = pooled(name, kpool, cache, prefill, decode)
    batch, pool, layer = made.forward_batch, made.runner.token_to_kv_pool, made.actual_module.attn
    data = pool.get_key_buffer(0)
    assert data.shape[1:] == (1, 528 if cache == "fp8" else 512)
    rows = torch.randn(len(data), 1, 512, dtype=torch.bfloat16)
    pool.set_mla_kv_buffer(layer, torch.arange(len(data)), rows, rows[..., :0])
    kept = PagedCache(data, FP8_NOPE if cache == "fp8" else BF16_512)
    bound = 2**-4 if cache == "fp8" else 0
    read = kept.read(torch.arange(len(data))).float()
    torch.testing.assert_close(read, rows[:, 0].float(), atol=0.01, rtol=bound)
    scores = Scores(made, packed=False)
    # The kit counts the tokens of a verification twice.
    lengths = dsa_utils.compute_dsa_seqlens(scores.lengths, TOPK, kpool)
    backend.forward_metadata.dsa_cache_seqlens_int32.copy_(lengths)
    made.topk_indices = positions = pools_of(scores, kpool)
    q = torch.randn(len(positions), 8, 512, dtype=torch.bfloat16)
    call = backend.forward_decode if name == "decode" else backend.forward_extend
    found = call(
        q, None, None, layer, batch, q_rope=q[..., :0], topk_indices=selections(made)
    ).view(q.shape)
    table = backend.req_to_token[batch.req_pool_indices][scores.requests]
    slots = torch.where(positions < 0, -1, table.gather(1, positions.clamp(0))).int()
    expected, _ = reference.sparse_decode(
        q.unsqueeze(1), kept, slots.unsqueeze(1), softmax_scale=layer.scaling
    )
    assert_close("out", found, expected.squeeze(1).to(q.dtype), SPARSE_DECODE_OUT)


@pytest.mark.parametrize(
    ("kpool", "cache", "prefill", "decode"),
    [
        pytest.param(4, "fp8", "flashmla_kv", "flashmla_kv", marks=pytest.mark.turns(0, 3)),
        pytest.param(16, "fp8", "flashmla_sparse", "fa3", marks=pytest.mark.turns(1, 3)),
        pytest.param(4, "bf16", "fa3", "fa3", marks=pytest.mark.turns(2, 3)),
    ],
    ids=str,
)
def test_no_kernel_of_pools_is_compiled_while_the_engine_serves(
    run_python, pooled, monkeypatch, kpool, cache, prefill, decode
):
    ops = {attention: ("sparse_decode", "sparse_prefill"), topk: ("select_topk", "expand_pools")}
    calls, asked = replay.spy(monkeypatch, ops), set()
    for name in ("decode", "prefill", "speculative"):
        made, backend = pooled(name, kpool, cache, prefill, decode)
        layer, scores = made.actual_module.attn, Scores(made, packed=False)
        made.topk_indices = pools_of(scores, kpool).int()
        q = torch.randn(len(scores.logits), 8, 512, dtype=torch.bfloat16)
        call = backend.forward_decode if name == "decode" else backend.forward_extend
        call(
            q, None, None, layer, made.forward_batch, q_rope=q[..., :0],
            topk_indices=selections(made),
        )  # fmt: skip
        asked.add(attention.layers_of(backend, made.runner))
    indexer = SimpleNamespace(index_kpool=kpool, index_topk=TOPK)
    tables = torch.zeros(len(LENGTHS), 3000, dtype=torch.int32)
    for packed in (False, True):
        pools = Pools(LENGTHS, kpool, packed)
        pools.choose(indexer)
        pools.choose(indexer, page_table=tables)
        pools.choose(indexer, page_table=tables[:, :1001], seq_lens=None)
        rows = torch.arange(len(LENGTHS), dtype=torch.int32)
        pools.choose(indexer, page_table=tables, page_table_row_index=rows)
        pools.choose(indexer, topk_offsets=rows[:, None], out_rows=len(LENGTHS) + 2)
    assert {op for op, *_ in calls} == {*ops[attention], *ops[topk]}
    for *_, options in calls:
        options.pop("workspace", None)  # of a CPU
    sweeps = [sweep for layers in asked for sweep in layers.sweeps()]
    assert replay.missing_kernels(run_python, calls, steps=sweeps) == []


class Pools:
    """Scores of the pools of a batch, whose columns that do not count are NaN.

    Args:
        lengths: tokens that each token sees.
        kpool: tokens of a pool.
        packed: the pools of all contexts are side by side, as in a prefill.
    """

    def __init__(self, lengths, kpool, packed):
        self.lengths = torch.tensor(lengths).int()
        self.counts = self.lengths // kpool
        self.starts = self.counts.cumsum(0).int() - self.counts if packed else None
        width = int(self.counts.sum()) if packed else int(self.counts.max())
        starts = self.starts if packed else torch.zeros_like(self.counts)
        columns = torch.arange(width)
        within = (columns >= starts[:, None]) & (columns < (starts + self.counts)[:, None])
        self.logits = torch.randn(len(lengths), width).masked_fill(~within, torch.nan)

    def choose(self, indexer, **changes):
        return IndexerKPool._topk_from_kpool_logits(
            indexer,
            logits=self.logits,
            pool_lens=self.counts,
            **{"seq_lens": self.lengths, "row_starts": self.starts} | changes,
        )

    def expected(self, kpool, offsets=None, table=None):
        """SGLang's own lists of the pools with the best scores."""
        groups = torch.zeros(len(self.logits), TOPK // kpool, dtype=torch.long)
        starts = self.starts if self.starts is not None else torch.zeros_like(self.counts)
        for row, found, start, count in zip(
            groups, self.logits, starts.tolist(), self.counts.tolist(), strict=True
        ):
            best = found[start : start + count].topk(min(len(row), count)).indices
            row[: len(best)] = best.sort().values
        valid = torch.arange(TOPK // kpool) < self.counts[:, None]
        own = {"page_table": table, "topk_offsets": offsets}
        expanded = kpool_fp8_index.expand_pooled_groups_to_topk(groups, valid, TOPK, kpool, **own)
        return kpool_fp8_index.append_kpool_tail_to_topk(
            expanded, self.lengths, self.counts, kpool, **own
        )


LENGTHS = [1, 3, 4, 21, 128, 131, 143, 700, 1024]


@pytest.mark.parametrize("packed", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("kpool", [4, 16])
def test_selected_pools_are_those_of_sglang(hooked, kpool, packed):
    pools = Pools(LENGTHS, kpool, packed)
    indexer = SimpleNamespace(index_kpool=kpool, index_topk=TOPK)
    assert_equal("positions", pools.choose(indexer), pools.expected(kpool))
    table = torch.randperm(len(LENGTHS) * 1024).view(len(LENGTHS), 1024).int()
    expected = pools.expected(kpool, table=table)
    assert_equal("slots", pools.choose(indexer, page_table=table), expected)
    order = torch.randperm(len(table))
    chosen = pools.choose(
        indexer, page_table=table[order], page_table_row_index=order.argsort().int()
    )
    assert_equal("slots of other rows of the table", chosen, expected)
    first = torch.tensor(LENGTHS).cumsum(0).int()
    chosen = pools.choose(indexer, topk_offsets=first[:, None], out_rows=len(LENGTHS) + 2)
    assert_equal("rows", chosen[:-2], pools.expected(kpool, offsets=first))
    assert (chosen[-2:] == -1).all()
    without = pools.choose(indexer, seq_lens=None)
    assert without.shape == (len(LENGTHS), TOPK)
    for row, count in zip(without, pools.counts.tolist(), strict=True):
        assert (row >= 0).sum() == min(count * kpool, TOPK)


def test_the_first_tokens_have_no_pool(hooked):
    """SGLang passes no columns where no request has a complete pool."""
    pools = Pools([1, 2, 3], 4, packed=True)
    chosen = pools.choose(SimpleNamespace(index_kpool=4, index_topk=TOPK))
    assert [row[row >= 0].tolist() for row in chosen] == [[0], [0, 1], [0, 1, 2]]


def test_short_prefills_select_all_pools_without_scores(pooled):
    made, backend = pooled("first prefill", 4, "bf16", "fa3")
    metadata = backend.get_indexer_metadata(0, made.forward_batch)
    indexer = SimpleNamespace(index_kpool=4, index_topk=TOPK)
    chosen = IndexerKPool._full_topk_for_short_sequence(indexer, metadata, "cpu")
    expected = torch.nn.functional.pad(slots_of(made, Scores(made, packed=True)), (0, 3), value=-1)
    assert_equal("slots", chosen, expected.int())


def test_pools_need_no_plan(hooked):
    assert kpool_fp8_index.build_kpool_topk_v2_plan(torch.ones(3, dtype=torch.int32)) is None


# Scores where DeepGEMM has no kernels, beside SGLang's loops in PyTorch, which round the products
# of a head to bfloat16.
BF16 = 2**-8


@pytest.fixture
def before_hopper(hooked, monkeypatch):
    """SGLang's modules with the plugin on an sm_89, where DeepGEMM cannot be imported."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *device: (8, 9))
    monkeypatch.setitem(sys.modules, "deep_gemm", None)
    scores.deep_gemm_runs.cache_clear()
    names = [hook.target.rsplit(".", 1)[1] for hook in HOOKS if hook.kind == HookType.AROUND]
    for module in (dsa_indexer, dsa_backend):
        for name in names:
            if hasattr(module, name):  # as HookRegistry sets it
                monkeypatch.setattr(module, name, getattr(dsa_utils, name))


def index_queries(tokens, heads, *rest):
    torch.manual_seed(0)
    q = torch.randn(tokens, *rest, heads, 128).to(torch.float8_e4m3fn)
    return q, torch.rand(tokens, heads) * 2 - 1


@pytest.mark.parametrize("heads", [32, 64])
def test_scores_of_contexts_agree_with_sglang(before_hopper, heads):
    q, weights = index_queries(37, heads)
    keys, scales = torch.randn(203, 128).to(torch.float8_e4m3fn), torch.rand(203)
    ks = torch.arange(37, dtype=torch.int32)
    ke = ks + torch.arange(5, 42, dtype=torch.int32)
    score = dsa_indexer.resolve_fp8_mqa_logits_fn()
    found = score(q, (keys, scales), weights, ks, ke, clean_logits=False)
    expected = dsa_utils._fp8_mqa_logits_torch(q, (keys, scales), weights, ks, ke)
    columns = torch.arange(203)
    seen = (columns >= ks[:, None]) & (columns < ke[:, None])
    sizes = dsa_utils._fp8_mqa_logits_torch(q, (keys, scales), weights.abs(), ks, ke)
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    assert ((found - expected).abs() <= BF16 * sizes)[seen].all()


@pytest.mark.parametrize("next_n", [1, 2])
def test_scores_of_pages_agree_with_sglang(before_hopper, next_n):
    num_sms = dsa_backend.resolve_num_sms()
    q, weights = index_queries(3, 64, next_n)
    weights = weights.repeat_interleave(next_n, 0)
    cache = PagedCache.allocate(INDEX_FP8, 7, 64)
    cache.write(torch.arange(7 * 64), torch.randn(7 * 64, 128).bfloat16())
    pages = cache.data.view(7, 64, 1, 132)
    table = torch.tensor([[4, 1, 6], [0, 2, 0], [3, 5, 0]], dtype=torch.int32)
    last = torch.tensor([[150], [100], [65]], dtype=torch.int32)
    lengths = last - torch.arange(next_n - 1, -1, -1, dtype=torch.int32)
    schedule = dsa_backend.resolve_paged_mqa_logits_metadata_fn()(lengths, 64, num_sms)
    assert schedule.shape == (num_sms + 1, 2)
    score = dsa_indexer.resolve_fp8_paged_mqa_logits_fn()
    found = score(q, pages, weights, lengths, table, schedule, 192, clean_logits=False)
    for token in range(next_n):
        rows = slice(token, None, next_n)
        expected, sizes = (
            dsa_utils._fp8_paged_mqa_logits_torch(
                q[:, token, None], pages, each[rows], lengths[:, token, None], table, None, 192
            )
            for each in (weights, weights.abs())
        )
        seen = torch.arange(192) < lengths[:, token, None]
        assert ((found[rows] - expected).abs() <= BF16 * sizes)[seen].all()


def test_no_kernel_of_scores_is_compiled_while_the_engine_serves(
    run_python, step, before_hopper, monkeypatch
):
    names = "indexer_scores", "indexer_scores_paged"
    calls = replay.spy(monkeypatch, {deep_gemm: names})
    test_scores_of_contexts_agree_with_sglang(None, 64)
    for next_n in (1, 2):
        test_scores_of_pages_agree_with_sglang(None, next_n)
    assert {op for op, *_ in calls} == {*names}
    made, *_ = step("decode", "bf16", "fa3", "fa3")
    layers = attention.layers_of(made.backend, made.runner)
    assert layers.scores
    layers = dataclasses.replace(layers, index_heads=64, drafts=2)
    steps = [*layers.sweeps()]
    assert replay.missing_kernels(run_python, calls, steps=steps, target="sm_89") == []


def test_deep_gemm_scores_where_it_runs(hooked, monkeypatch):
    theirs = SimpleNamespace(
        fp8_mqa_logits=object(),
        fp8_paged_mqa_logits=object(),
        get_paged_mqa_logits_metadata=object(),
        get_num_sms=lambda: 17,
    )
    monkeypatch.setitem(sys.modules, "deep_gemm", theirs)
    hooks = [hook.target for hook in HOOKS if hook.kind == HookType.AROUND]
    cached = [inspect.unwrap(pkgutil.resolve_name(each), stop=has_cache) for each in hooks]
    for each in cached:
        each.cache_clear()
    assert dsa_utils.resolve_fp8_mqa_logits_fn() is theirs.fp8_mqa_logits
    assert dsa_utils.resolve_fp8_paged_mqa_logits_fn() is theirs.fp8_paged_mqa_logits
    found = dsa_utils.resolve_paged_mqa_logits_metadata_fn()
    assert found is theirs.get_paged_mqa_logits_metadata
    assert dsa_utils.resolve_num_sms() == 17
    for each in cached:
        each.cache_clear()


def has_cache(function):
    return hasattr(function, "cache_clear")


# benchmarks/sglang_hooks.py at small sizes, with a stand-in for each kernel that needs a GPU.


def rows_in(data):
    """A tensor of SGLang's as a cache of single rows."""
    cache_format = BF16_576 if data.dtype == torch.bfloat16 else FP8_DS_MLA
    return PagedCache(data.view(-1, 1, cache_format.row_width), cache_format)


def attend(q, rows, slots, softmax_scale):
    """What each kernel of SGLang's computes, for ``[T, H, 576]``."""
    out, _ = reference.sparse_decode(
        q.unsqueeze(1), rows_in(rows), slots.unsqueeze(1), softmax_scale=softmax_scale
    )
    return out.squeeze(1).to(q.dtype)


KERNELS = SimpleNamespace(
    get_mla_metadata=lambda cache_seqlens, **kwargs: (cache_seqlens, cache_seqlens),
    flash_mla_with_kvcache=lambda q, k_cache, indices, softmax_scale, **kwargs: (
        attend(q.squeeze(1), k_cache, indices.squeeze(1), softmax_scale).unsqueeze(1),
        None,
    ),
    flash_mla_sparse_fwd=lambda q, kv, indices, sm_scale, **kwargs: (
        attend(q, kv, indices.squeeze(1), sm_scale),
        None,
        None,
    ),
)


def fa3(q, k_cache, v_cache, qv, page_table, softmax_scale, **kwargs):
    rows = torch.cat([v_cache, k_cache], -1).flatten(1, 2)
    return attend(torch.cat([qv, q], -1), rows, page_table, softmax_scale)


def write_rows(pool, layer, slots, *keys):
    rows_in(pool.get_key_buffer(0)).write(slots, torch.cat(keys, -1).squeeze(1))


def read_rows(cache, slots):
    return rows_in(cache).read(slots).bfloat16().unsqueeze(1)


def quantise(rows):
    cache = PagedCache.allocate(FP8_DS_MLA, len(rows), 64)
    cache.write(torch.arange(cache.num_slots), rows.view(-1, 576))
    return cache.data


class OneRun:
    """A timer that runs each side once."""

    def __init__(self, *args):
        pass

    def prepare(self, function):
        return Prepared(function, "launch")

    def interleaved(self, sides):
        for side in sides:
            side.run()
        return [Timing(2.0, 1.0, 3.0, "launch") for _ in sides]


@pytest.fixture
def example(monkeypatch, torch_instead):
    """The example, which loads the plugin itself, in this process."""
    import sglang_hooks

    name = "sglang.kernels.ops.attention.flash_mla_interface"
    monkeypatch.setitem(sys.modules, name, KERNELS)
    monkeypatch.setattr(dsa_backend, "flash_attn_with_kvcache", fa3)
    monkeypatch.setattr(dsa_backend, "quantize_k_cache", quantise)
    monkeypatch.setattr(dsa_backend, "dequantize_k_cache_paged_dsa", read_rows)
    monkeypatch.setattr(DSATokenToKVPool, "set_mla_kv_buffer", write_rows)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sglang_hooks, "Timer", OneRun)
    monkeypatch.setenv("SGLANG_FP8_PAGED_MQA_LOGITS_TORCH", "1")
    monkeypatch.setenv("SGLANG_OPT_USE_TOPK_V2", "0")
    sides = sglang_hooks.Sides()
    monkeypatch.setattr(sglang_hooks, "Sides", lambda: sides)

    def popen(command):
        sglang_hooks.main(command[2:])
        return SimpleNamespace(wait=lambda: 0)

    monkeypatch.setattr(sglang_hooks.subprocess, "Popen", popen)
    return sglang_hooks


def test_the_example_measures_every_method_of_deepseek_v32(example, monkeypatch, tmp_path, capsys):
    file = tmp_path / "rows.json"
    assert example.main(["--device", "cpu", "--heads", "8", "--json", str(file)]) == 0
    rows = json.loads(file.read_text())["rows"]
    hooks = {short(hook) for hook in HOOKS if hook.kind == HookType.REPLACE}
    without_results = {"_compute_flashmla_metadata", "_build_topk_v2_plan"}
    of_pools = {
        "_check_kpool_tail_backend",
        "_resolve_kpool_tail_backend",
        "build_kpool_topk_v2_plan",
        "topk_from_pooled_history_logits",
    }
    assert {row["method"] for row in rows} == hooks - without_results - of_pools
    for row in rows:
        absent = "ragged_fused is of another torch" in row["why"]
        assert (row["theirs_us"] is None) == absent
        if row["rows"] is not None:
            assert row["ours_exact"] == row["rows"]
            assert row["equal"] == row["theirs_exact"] == (None if absent else row["rows"])
        elif "rounds the whole cache" not in row["why"]:
            assert 0 < row["share"] <= 1
            assert 0 < row["ours_error"] <= 1
            assert 0 <= row["theirs_error"] <= 1  # another batch, which some CPUs round otherwise
    assert "0 of 13 rows differ; failed: none" in capsys.readouterr().out

    import hooks

    document = hooks.with_table(f"a\n{BEGIN}\n{END}\nz\n", hooks.load(file))
    assert document.count("\n| `_forward_flashmla_kv` |") == 4
    assert " | 2 of 2 equal | 2.0, 2.0 | 1.00 | torch.topk" in document
    assert hooks.with_table(document, hooks.load(file)) == document


# Models of the engine.


@pytest.fixture
def engine(hooked, monkeypatch):
    """``benchmarks/sglang_engine.py``, and SGLang's classes as a GPU would have them."""
    import sglang_engine

    monkeypatch.setattr(rotary, "_is_cuda", True)
    monkeypatch.setattr(dsa_indexer, "_is_cuda", True)
    monkeypatch.setattr(dsa_indexer, "resolve_num_sms", lambda: 132)
    return sglang_engine


@pytest.mark.parametrize(
    ("model", "keys"), [("glm5_next", "wk.weight"), ("hy_v4", "wk_weights_proj.weight")]
)
def test_sglangs_classes_load_the_models_of_the_engine(engine, tmp_path, model, keys):
    """Its modes are accepted, and no parameter of SGLang's class is left as it was."""
    folder, asked = tmp_path / "model", []
    engine.MODELS[model].make(folder)
    for mode in engine.MODES.values():
        if mode.model == model and mode.ours:
            with override_platform(is_cuda=True):
                asked.append(ServerArgs(device="cuda", **engine.engine_arguments(mode, folder)))
                asked[-1].resolve_once()
                asked[-1].check_server_args()
    weights = load_file(folder / "model.safetensors")
    assert unloaded(asked[-1], weights, tmp_path / "ranks") == set()
    indexer = "model.layers.1.self_attn.indexer."
    end = indexer.removeprefix("model.") + "wk.weight"
    del weights[next(name for name in weights if name.endswith(end))]
    assert unloaded(asked[-1], weights, tmp_path / "again") == {indexer + keys}


def unloaded(asked, weights, ranks):
    """Parameters of SGLang's class of a model of which a part is in none of the weights."""
    place = SpawnRanks(world_rank=0)
    with (
        override_platform(is_cuda=True),
        use_context(create_context(asked, role="scheduler", ranks=place)),
    ):
        one = {"world_size": 1, "rank": 0, "local_rank": 0, "backend": "gloo"}
        init_distributed_environment(**one, distributed_init_method=f"file://{ranks}")
        initialize_model_parallel(backend="gloo")
        try:
            config = ModelConfig.from_server_args(asked)
            with set_default_torch_dtype(torch.bfloat16):
                model = loader._initialize_model(config, LoadConfig())
            for parameter in model.parameters():
                parameter.data.fill_(float("nan"))
            model.load_weights(iter(weights.items()))
        finally:
            destroy_model_parallel()
            destroy_distributed_environment()
    return {name for name, parameter in model.named_parameters() if parameter.isnan().any()}


# The processes that were started first.


def test_the_plugin_is_active_in_a_new_process(processes):
    output, log = processes["sound"].communicate()
    assert output.split() == ["True"], log
    (line,) = (line for line in log.splitlines() if " sparsemla replaces " in line)
    for hook in HOOKS:
        assert hook.target in line


def test_a_hook_that_does_not_take_ends_the_process(processes):
    """SGLang's registry logs the exception of this hook and goes on; the plugin must not."""
    output, log = processes["broken"].communicate()
    assert processes["broken"].returncode == 1
    assert output == ""
    assert "Failed to apply hooks to" in log
    last = log.splitlines()[-1]
    assert last.startswith("sparsemla: SGLang does not start: the hooks of sglang.")
    assert "_forward_fa3 did not take" in last


@pytest.mark.parametrize(("topk_blocks", "topk"), [(3, 16), (6, 40), (40, 20)])
def test_candidate_blocks_are_those_of_deepseek_v41(topk_blocks, topk):
    """SGLang's functions of DeepSeek-V4.1 make the same blocks, and the same keys of them."""
    from sglang.kernels.ops.attention.dsv4 import candidate_blocks

    lens = torch.tensor([150, 97, 64, 8, 3])
    sizes = {"query_lens": [1] * 5, "seq_lens": (2 * lens + 1).tolist(), "ratio": 2}
    case = indexer_topk_blocks_case(Draw(5), **sizes, topk=topk, topk_blocks=topk_blocks)
    # Whole numbers tie, and torch.topk gives ties to any column.
    case["weights"] = torch.rand_like(case["weights"]) + 0.5
    scores = reference.indexer_scores_paged(
        case["index_q"][:, None],
        case["weights"][:, None],
        case["cache"],
        case["page_table"],
        case["seq_lens"],
        max_seq_len=150,
        ratio=2,
    )[:, 0]
    assert all(len(row[:n].unique()) == n for row, n in zip(scores, lens, strict=True))
    theirs = candidate_blocks.select_candidate_block_ids(scores, lens[:, None], topk_blocks, 8)
    _, blocks = sparsemla.indexer_topk_blocks(**case)
    request = {name: value for name, value in case.items() if name != "topk_blocks"}
    chosen = sparsemla.indexer_topk_of_blocks(**request, blocks=blocks)
    keys = candidate_blocks.topk_among_blocks(scores, lens, theirs, topk, 8)
    for ours, others in ((blocks, theirs), (chosen, keys)):
        for got, wanted in zip(ours.tolist(), others.tolist(), strict=True):
            assert [i for i in got if i >= 0] == sorted(i for i in wanted if i >= 0)

"""The settings of SGLang that the plugin supports."""

from __future__ import annotations

from typing import Any

import torch
from sglang.kernels.ops.quantization.fp8_kernel import fp8_dtype
from sglang.srt.arg_groups.model_override_base import attention_backends_of
from sglang.srt.configs.model_config import (
    get_dsa_index_kpool,
    is_deepseek_dsa,
    is_deepseek_v4,
)
from sglang.srt.environ import envs
from sglang.srt.runtime_context import derive_attn_tp_size, get_platform

from sparsemla.backends.environment import FP8_MMA, permits_fp8_mma
from sparsemla.backends.sglang.scores import DEEP_GEMM
from sparsemla.kernels.attention.schedule import FEW_HEADS

CHOICES = {
    "model_impl": ("auto", "sglang"),
    "kv_cache_dtype": ("auto", "bfloat16", "bf16", "fp8_e4m3"),
    "dsa_prefill_backend": ("flashmla_sparse", "flashmla_kv", "flashmla_auto", "fa3"),
    "dsa_decode_backend": ("flashmla_sparse", "flashmla_kv", "fa3"),
}
"""Values of options that are supported."""
CAPABILITY = 8, 0
"""Least compute capability of this package's kernels."""
E4M3 = 8, 9
"""Least compute capability for which Triton compiles conversions to e4m3."""

WINDOWED = ("Dots3NoteForCausalLM", "Dots3NoteForCausalLMNextN")
"""Models whose other layers SGLang gives to a second backend, beside one of dsa."""

OFF = {
    "enable_prefill_cp": "prefill context parallelism splits selections between ranks",
    "enable_cp_decode_attn_tp": "it belongs to context parallelism",
    "enable_dsa_cache_layer_split": "other ranks hold the rows of some layers",
    "enable_kv_cache_sharding": "other ranks hold some pages",
    "enable_page_major_kv_layout": "rows of a layer must follow each other",
    "enable_unified_memory": "rows of a layer must follow each other",
    "enable_nvidia_megakernel": "its kernels compute attention instead of the plugin",
    "enable_amd_monokernel": "its kernels compute attention instead of the plugin",
    "prefill_only_disable_kv_cache": "attention reads the cache",
    "rl_on_policy_target": "it asks for the attention of a trainer",
}
"""Options that must be left out, with the reason."""


def refuse(settings: Any, model: Any) -> str | None:  # noqa: ANN401 - SGLang's own classes
    """The reason why an engine is not supported, or None.

    Args:
        settings: SGLang's resolved arguments.
        model: SGLang's ``ModelConfig``.
    """
    if not get_platform().is_cuda:
        return "the GPU must be one of NVIDIA: SGLang's ROCm, NPU and XPU paths call other methods"
    capability = torch.cuda.get_device_capability()
    if capability < CAPABILITY:
        return (
            f"the GPU must have compute capability 8.0 or more, got {capability[0]}.{capability[1]}"
        )
    if fp8_dtype != torch.float8_e4m3fn:
        return f"SGLang's FP8 dtype must be float8_e4m3fn, got {fp8_dtype}"
    architecture = model.hf_config.architectures[0]
    if is_deepseek_v4(model.hf_config):
        return f"SGLang's backend dsv4 of {architecture} is not replaced, only dsa"
    if not is_deepseek_dsa(model.hf_config):
        return (
            f"the model must have an indexer that SGLang's dsa backend serves, got {architecture}"
        )
    if architecture in WINDOWED:
        return f"{architecture} has layers of another backend, whose windows dsa does not read"
    if {*attention_backends_of(settings)} - {"dsa", "nsa"}:
        return f"--attention-backend must be dsa, got {attention_backends_of(settings)}"
    if model.dtype != torch.bfloat16:
        return f"--dtype must be bfloat16, got {model.dtype}"
    kpool = get_dsa_index_kpool(model.hf_config)
    dims, served = (model.kv_lora_rank, model.qk_rope_head_dim), (512, 64 if kpool == 1 else 0)
    if dims != served:
        return (
            f"the model's kv_lora_rank and qk_rope_head_dim must be {served} with index_kpool "
            f"{kpool}, got {dims}"
        )
    if kpool != 1 and (problem := _refuse_pools(settings, capability)):
        return f"with the model's index_kpool {kpool} {problem}"
    for option, reason in OFF.items():
        if getattr(settings, option):
            return f"{_flag(option)} must be off: {reason}"
    for option in ("dcp_size", "attn_cp_size"):
        if (found := getattr(settings, option)) > 1:
            return f"{_flag(option)} must be 1, got {found}"
    for option, choices in CHOICES.items():
        if (value := getattr(settings, option)) not in choices:
            return f"{_flag(option)} must be one of {', '.join(choices)}, got {value}"
    if capability < E4M3 and (problem := _refuse_triton(settings, model)):
        return (
            f"below compute capability 8.9 {problem} in Triton, which does not compile there; got "
            f"{capability[0]}.{capability[1]}"
        )
    if permits_fp8_mma():
        return _refuse_fp8_mma(settings, model, capability)
    return None


def _refuse_pools(settings: Any, capability: tuple[int, int]) -> str | None:  # noqa: ANN401
    """The reason why the pools of GLM-5.3-Flash are not served, or None."""
    if capability < DEEP_GEMM:
        return (
            "the GPU must have compute capability 9.0 or more, as SGLang's indexer of pools calls "
            f"DeepGEMM, got {capability[0]}.{capability[1]}"
        )
    if settings.enable_hisparse:
        return "--enable-hisparse must be off: its lists have no room for the tokens of open pools"
    return None


def _refuse_triton(settings: Any, model: Any) -> str | None:  # noqa: ANN401 - as above
    """Which kernels of SGLang convert to e4m3 in Triton, or None."""
    if settings.kv_cache_dtype == "fp8_e4m3":
        return "--kv-cache-dtype must be bfloat16: SGLang writes FP8 rows"
    interleaved = getattr(model.hf_config, "indexer_rope_interleave", False)
    if not interleaved or envs.SGLANG_DISABLE_DSA_INDEXER_FUSION.get():
        return (
            "the model must have indexer_rope_interleave, and SGLANG_DISABLE_DSA_INDEXER_FUSION "
            "must be unset: otherwise SGLang quantises index queries"
        )
    return None


def _refuse_fp8_mma(
    settings: Any,  # noqa: ANN401 - SGLang's own classes
    model: Any,  # noqa: ANN401 - likewise
    capability: tuple[int, int],
) -> str | None:
    """The reason why no prefill would use the FP8 MMAs that the user asked for, or None."""
    num_ranks = derive_attn_tp_size(
        tp_size=settings.tp_size,
        attn_cp_size=settings.attn_cp_size,
        attn_dp_size=settings.attn_dp_size,
    )
    cache, method = settings.kv_cache_dtype, settings.dsa_prefill_backend
    heads = model.num_attention_heads // num_ranks
    problems = {
        f"the GPU must have compute capability 9.0, as no other has a kernel with FP8 MMAs, got "
        f"{capability[0]}.{capability[1]}": capability != (9, 0),
        f"--kv-cache-dtype must be fp8_e4m3, as SGLang converts only its rows, got {cache}": (
            cache != "fp8_e4m3"
        ),
        "--dsa-prefill-backend must be flashmla_sparse, as SGLang converts rows only for it, got "
        f"{method}": method != "flashmla_sparse",
        f"a rank must have more than {FEW_HEADS} heads: lower --tp-size, got {heads}": (
            heads <= FEW_HEADS
        ),
        "the model's rows must have RoPE dims, got qk_rope_head_dim 0": model.qk_rope_head_dim == 0,
    }
    reason = next((problem for problem, present in problems.items() if present), None)
    return None if reason is None else f"with {FP8_MMA}=1 {reason}"


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")

"""The settings of SGLang that the plugin supports."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.model_override_base import attention_backends_of
from sglang.srt.configs.model_config import get_dsa_index_kpool, is_deepseek_dsa
from sglang.srt.runtime_context import get_platform

PREFILL_BACKENDS = "flashmla_sparse", "flashmla_kv", "flashmla_auto", "fa3"
DECODE_BACKENDS = "flashmla_sparse", "flashmla_kv", "fa3"


def refuse(settings: Any, model: Any) -> str | None:  # noqa: ANN401 - SGLang's own classes
    """The reason why an engine is not supported, or None.

    Args:
        settings: SGLang's resolved arguments.
        model: SGLang's ``ModelConfig``.
    """
    if not get_platform().is_cuda:
        return "the GPU must be one of NVIDIA: SGLang's ROCm, NPU and XPU paths call other methods"
    if not is_deepseek_dsa(model.hf_config):
        return f"the model must have an indexer, got {model.hf_config.architectures[0]}"
    if {*attention_backends_of(settings)} - {"dsa", "nsa"}:
        return f"--attention-backend must be dsa, got {attention_backends_of(settings)}"
    dims = model.kv_lora_rank, model.qk_rope_head_dim
    if dims != (512, 64):
        return f"the model's kv_lora_rank and qk_rope_head_dim must be (512, 64), got {dims}"
    kpool = get_dsa_index_kpool(model.hf_config)
    if kpool != 1:
        return f"the model's index_kpool must be 1, got {kpool}: pooled selections are not replaced"
    for option, refused in (
        ("enable_hisparse", "HiSparse keeps rows on the host"),
        ("enable_prefill_cp", "prefill context parallelism splits selections between ranks"),
    ):
        if getattr(settings, option):
            return f"--{option.replace('_', '-')} must be off: {refused}"
    if settings.dcp_size > 1:
        return f"--dcp-size must be 1, got {settings.dcp_size}"
    for option, choices in (
        ("dsa_prefill_backend", PREFILL_BACKENDS),
        ("dsa_decode_backend", DECODE_BACKENDS),
    ):
        value = getattr(settings, option)
        if value not in choices:
            flag = "--" + option.replace("_", "-")
            return f"{flag} must be one of {', '.join(choices)}, got {value}"
    return None

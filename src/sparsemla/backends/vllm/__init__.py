"""Plugins for vLLM 0.33: an attention backend and, on request, an indexer.

vLLM calls :func:`register` and :func:`register_indexer` through its plugin group
``vllm.general_plugins``, in each of its processes and possibly several times. This module imports
vLLM only inside these functions.
"""

BACKEND = "sparsemla.backends.vllm.attention.SparseMLABackend"

NVIDIA_MODELS = {
    "DeepseekV32ForCausalLM": "sparsemla.backends.vllm.nvidia:DeepseekV32ForCausalLM",
    "GlmMoeDsaForCausalLM": "sparsemla.backends.vllm.nvidia:DeepseekV32ForCausalLM",
    "DeepseekV32MTPModel": "sparsemla.backends.vllm.nvidia:DeepseekV32MTP",
}
"""vLLM's NVIDIA classes with another selection."""

GENERIC_MODELS = {
    "DeepseekV32ForCausalLM": "vllm.model_executor.models.deepseek_v2:DeepseekV3ForCausalLM",
    "GlmMoeDsaForCausalLM": "vllm.model_executor.models.deepseek_v2:GlmMoeDsaForCausalLM",
    "DeepseekV32MTPModel": "vllm.model_executor.models.deepseek_mtp:DeepSeekMTP",
}
"""vLLM's portable classes, for GPUs that cannot run the NVIDIA classes with another selection."""


def register() -> None:
    """The plugin ``sparsemla``: register the attention backend under the name ``CUSTOM``.

    vLLM imports the backend only when a user selects it.
    """
    # CUSTOM and not a new name: vLLM pickles a backend as an enum value, and a spawned process does
    # not know new members.
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)


def register_indexer() -> None:
    """The plugin ``sparsemla_indexer``: replace the indexer of DeepSeek-V3.2 and GLM-5.

    Without ``VLLM_PLUGINS`` vLLM loads every installed plugin. This one changes models, so it does
    nothing unless ``VLLM_PLUGINS`` contains its name.
    """
    from vllm import envs

    if "sparsemla_indexer" not in (envs.VLLM_PLUGINS or ()):
        return
    from vllm.config import CompilationConfig
    from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot
    from vllm.model_executor.models.registry import ModelRegistry

    from sparsemla.backends.vllm.indexer import OPERATOR, IdleIndexerOp, SparseMLAWrapper

    models = NVIDIA_MODELS if _nvidia_class_runs() else GENERIC_MODELS
    for architecture, model in models.items():
        ModelRegistry.register_model(architecture, model)
    if op_registry_oot.get("MultiHeadLatentAttentionWrapper") is not SparseMLAWrapper:
        PluggableLayer.register_oot(name="MultiHeadLatentAttentionWrapper")(SparseMLAWrapper)
        CustomOp.register_oot(name="SparseAttnIndexer")(IdleIndexerOp)
    if OPERATOR not in CompilationConfig._attention_ops:
        # vLLM splits a compiled model at these ops. This one reads the step's metadata, so it
        # cannot be part of a piece that is captured.
        CompilationConfig._attention_ops.append(OPERATOR)


def _nvidia_class_runs() -> bool:
    """Whether the fused kernels of vLLM's NVIDIA classes write index keys that can be read here.

    They convert to e4m3, which Triton compiles from sm_89 on. On sm_100 they write scales of
    another format.
    """
    from vllm.platforms import current_platform
    from vllm.utils.deep_gemm import mqa_logits_use_mx_scales

    return (
        current_platform.is_cuda()
        and current_platform.has_device_capability(89)
        and not mqa_logits_use_mx_scales()
    )

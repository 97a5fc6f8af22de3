"""Plugins for vLLM 0.33: an attention backend and, on request, an indexer.

vLLM calls :func:`register` and :func:`register_indexer` through its plugin group
``vllm.general_plugins``, in each of its processes and possibly several times. This module imports
vLLM only inside these functions.
"""

BACKEND = "sparsemla.backends.vllm.attention.SparseMLABackend"

GENERIC_MODELS = {
    "DeepseekV32ForCausalLM": "vllm.model_executor.models.deepseek_v2:DeepseekV3ForCausalLM",
    "GlmMoeDsaForCausalLM": "vllm.model_executor.models.deepseek_v2:GlmMoeDsaForCausalLM",
    "DeepseekV32MTPModel": "vllm.model_executor.models.deepseek_mtp:DeepSeekMTP",
}
"""vLLM's portable model classes; the NVIDIA classes of these models cannot replace the indexer."""


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

    for architecture, model in GENERIC_MODELS.items():
        ModelRegistry.register_model(architecture, model)
    if op_registry_oot.get("MultiHeadLatentAttentionWrapper") is not SparseMLAWrapper:
        PluggableLayer.register_oot(name="MultiHeadLatentAttentionWrapper")(SparseMLAWrapper)
        CustomOp.register_oot(name="SparseAttnIndexer")(IdleIndexerOp)
    if OPERATOR not in CompilationConfig._attention_ops:
        # vLLM splits a compiled model at these ops. This one reads the step's metadata, so it
        # cannot be part of a piece that is captured.
        CompilationConfig._attention_ops.append(OPERATOR)

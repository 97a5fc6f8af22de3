"""sparsemla inside vLLM 0.33: an attention backend, and an indexer for those who ask for it.

vLLM calls the two functions of this module through its plugin group ``vllm.general_plugins``, in
every process it starts and possibly more than once. Nothing of vLLM is imported before that.
"""

BACKEND = "sparsemla.backends.vllm.attention.SparseMLABackend"

GENERIC_MODELS = {
    "DeepseekV32ForCausalLM": "vllm.model_executor.models.deepseek_v2:DeepseekV3ForCausalLM",
    "GlmMoeDsaForCausalLM": "vllm.model_executor.models.deepseek_v2:GlmMoeDsaForCausalLM",
    "DeepseekV32MTPModel": "vllm.model_executor.models.deepseek_mtp:DeepSeekMTP",
}
"""vLLM's portable classes of the models whose NVIDIA classes leave no place for an indexer."""


def register() -> None:
    """Offer the attention backend as ``CUSTOM``: the plugin ``sparsemla``.

    vLLM imports the backend only when a user selects it.
    """
    # No name of our own: vLLM pickles a backend by its value, and a spawned process knows no new
    # ones.
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)


def register_indexer() -> None:
    """Replace the indexer too: the plugin ``sparsemla_indexer``.

    vLLM loads every installed plugin as long as ``VLLM_PLUGINS`` is not set. This one changes
    models, so it does nothing unless that list names it.
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
        # Where vLLM cuts a compiled model into CUDA graphs: the op reads the step's metadata.
        CompilationConfig._attention_ops.append(OPERATOR)

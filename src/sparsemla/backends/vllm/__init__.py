"""Plugins for vLLM 0.33: an attention backend and an indexer.

Both serve on request, and by default on GPUs for which vLLM has no sparse attention.

vLLM calls :func:`register` and :func:`register_indexer` through its plugin group
``vllm.general_plugins``, in each of its processes and possibly several times. This module imports
vLLM only inside these functions.
"""

from typing import TYPE_CHECKING, Any

from sparsemla.backends.vllm.settings import (
    BACKEND,
    OPERATOR,
    HostRowsConfig,
    check_when_configured,
    indexer_is_named,
    unserved_gpu,
)
from sparsemla.backends.vllm.surface import (
    ATTENTION,
    HOST,
    INDEXER,
    check,
    require_vllm,
    unsupported_version,
)

if TYPE_CHECKING:
    from sparsemla.backends.vllm.attention import SparseMLABackend

__all__ = [
    "GENERIC_MODELS",
    "HY_V4_MODELS",
    "NVIDIA_MODELS",
    "V4_MODELS",
    "SparseMLABackend",
    "register",
    "register_indexer",
]

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


V4_MODELS = {
    "DeepseekV4ForCausalLM": "sparsemla.backends.vllm.deepseek_v4:DeepseekV4ForCausalLM",
    "DeepSeekV4MTPModel": "sparsemla.backends.vllm.deepseek_v4:DeepSeekV4MTP",
    "DSparkDraftModel": "sparsemla.backends.vllm.deepseek_v4:DSparkDraft",
    "DeepseekV41ForCausalLM": "sparsemla.backends.vllm.deepseek_v41:DeepseekV41ForCausalLM",
}
"""vLLM's classes of DeepSeek-V4 and V4.1, which ask for the attention backend."""

HY_V4_MODELS = {
    "HYV4ForCausalLM": "sparsemla.backends.vllm.hy_v4:HYV4ForCausalLM",
    "HYV4MTPModel": "sparsemla.backends.vllm.hy_v4:HYV4MTP",
}
"""vLLM's classes of Hunyuan V4 with another indexer."""


def __getattr__(name: str) -> Any:  # noqa: ANN401 - of a module
    """Import the backend when vLLM resolves its name: a user has selected it.

    Layers of a configuration with rows on the host get the backend that reads them.

    Raises:
        ModuleNotFoundError: vLLM is not installed.
        RuntimeError: its version is not supported, or something that it touches does not fit.
    """
    if name != "SparseMLABackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if problem := unsupported_version():
        raise RuntimeError(problem)
    check(ATTENTION)
    from vllm.config import get_current_vllm_config_or_none

    from sparsemla.backends.vllm import attention, warmup

    check((), attention)
    check((), warmup)
    config = get_current_vllm_config_or_none()
    if config is None or HostRowsConfig.of(config) is None:
        return attention.SparseMLABackend
    check(HOST)
    from sparsemla.backends.vllm import host, host_attention

    check((), host)
    check((), host_attention)
    return host_attention.HostRowsBackend


def register() -> None:
    """The plugin ``sparsemla``: register the attention backend under the name ``CUSTOM``.

    DeepSeek-V4 and V4.1 ask for no backend, so their classes for NVIDIA are registered, too: with
    another backend they build vLLM's model as it is.

    For another version of vLLM it only logs why not, since the engine may serve without it; a
    selection of ``CUSTOM`` then stops the engine.
    """
    if problem := unsupported_version():
        from vllm.logger import init_logger

        init_logger("vllm.sparsemla").warning("%s: there is no backend CUSTOM", problem)
        return
    # CUSTOM and not a new name: vLLM pickles a backend as an enum value, and a spawned process does
    # not know new members.
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
    platform = current_platform
    if not (platform.is_rocm() or platform.is_xpu() or platform.is_cpu()):
        for architecture, model in V4_MODELS.items():
            ModelRegistry.register_model(architecture, model)
    check_when_configured()


def register_indexer() -> None:
    """The plugin ``sparsemla_indexer``: replace the indexers of models that select tokens.

    Without ``VLLM_PLUGINS`` vLLM loads every installed plugin. This one changes models, so it does
    nothing unless ``VLLM_PLUGINS`` contains its name, or vLLM has no sparse attention for the GPU.
    In the latter case nobody asked for it: where it does not fit, it only logs why.

    Raises:
        SystemExit: it is named, and the version of vLLM is not supported; a line without a
            traceback.
        RuntimeError: it is named, and something of vLLM that it touches does not fit.
    """
    require_vllm()
    from vllm import envs
    from vllm.logger import init_logger

    problem = unsupported_version()
    if indexer_is_named():
        if problem:
            raise SystemExit(f"{problem}: remove sparsemla_indexer from VLLM_PLUGINS")
        _activate_indexer()
    elif envs.VLLM_PLUGINS is None and not problem and unserved_gpu():
        try:
            _activate_indexer()
        except RuntimeError as error:
            init_logger("vllm.sparsemla").warning("%s: there is no indexer", error)


def _activate_indexer() -> None:
    """Register this package's models, layer and op.

    Raises:
        RuntimeError: something of vLLM that they touch does not fit.
    """
    check(INDEXER)
    from vllm.config import CompilationConfig
    from vllm.model_executor.custom_op import CustomOp, PluggableLayer, op_registry_oot
    from vllm.model_executor.models.registry import ModelRegistry

    from sparsemla.backends.vllm import indexer, warmup, wrapper

    for module in (indexer, warmup, wrapper):
        check((), module)
    check_when_configured()
    models = NVIDIA_MODELS if _nvidia_class_runs() else GENERIC_MODELS
    for architecture, model in (models | HY_V4_MODELS).items():
        ModelRegistry.register_model(architecture, model)
    if op_registry_oot.get("MultiHeadLatentAttentionWrapper") is not wrapper.SparseMLAWrapper:
        PluggableLayer.register_oot(name="MultiHeadLatentAttentionWrapper")(
            wrapper.SparseMLAWrapper
        )
        CustomOp.register_oot(name="SparseAttnIndexer")(indexer.IdleIndexerOp)
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

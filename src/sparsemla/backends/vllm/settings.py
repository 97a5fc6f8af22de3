"""Settings of vLLM that the plugins would pass over without a word, refused at start.

vLLM asks a selected backend about some settings. Nobody asks where a model chooses its attention
itself, where a platform ignores the selection, and where a setting belongs to a part that a plugin
replaces. Imports vLLM only inside functions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparsemla.backends.environment import (
    DIVIDE_ROWS_FROM,
    FP8_MMA,
    divide_rows_from,
    permits_fp8_mma,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BACKEND = "sparsemla.backends.vllm.SparseMLABackend"
INDEXER_PLUGIN = "sparsemla_indexer"

OWN_ATTENTION = {
    "DeepseekV41ForCausalLM": "chooses among vLLM's own classes of attention",
    "DSparkDraftModel": "chooses among vLLM's own classes of attention",
    "DSparkV41DraftModel": "chooses among vLLM's own classes of attention",
    "Dots3NoteForCausalLM": "pads the rows of its caches for a backend of vLLM",
    "Dots3NoteMTPModel": "pads the rows of its caches for a backend of vLLM",
    "HYV4ForCausalLM": "has attention sinks, for which it takes a backend of vLLM",
    "HYV4MTPModel": "has attention sinks, for which it takes a backend of vLLM",
}
"""Models that ignore ``CUSTOM``, by architecture."""

OWN_INDEXER = {
    "DeepseekV41ForCausalLM": "selects from candidate blocks",
    "Dots3NoteForCausalLM": "reads the indexer in its attention",
    "Dots3NoteMTPModel": "reads the indexer in its attention",
    "Glm5NextForCausalLM": "pools its index keys",
    "Glm5NextForConditionalGeneration": "pools its index keys",
    "Glm5NextMTPModel": "pools its index keys",
    "HYV4ForCausalLM": "has an indexer class of its own",
    "HYV4MTPModel": "has an indexer class of its own",
}
"""Models whose indexer is not that of DeepSeek-V3.2 and GLM-5, by architecture."""

DEEPSEEK_V32 = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "DeepseekV32MTPModel")
DEEPSEEK_V4 = ("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration", "DeepSeekV4MTPModel")


def check_when_configured() -> None:
    """Let vLLM check each configuration that it makes from now on by :func:`refuse`."""
    from vllm.config import VllmConfig

    finish = VllmConfig.__post_init__
    if finish.__module__ == __name__:
        return

    def checked(config: VllmConfig, *args: Any) -> None:  # noqa: ANN401 - passed on to vLLM
        finish(config, *args)
        refuse(config)

    VllmConfig.__post_init__ = checked


def refuse(config: VllmConfig) -> None:
    """Stop a start in which a part of this package was named, but would not run.

    Raises:
        ValueError: with the reason.
    """
    from vllm import envs
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom, attention = AttentionBackendEnum.CUSTOM, config.attention_config
    speculative = config.speculative_config
    ours = custom.is_overridden() and custom.get_path() == BACKEND  # the last plugin has the name
    per_kind = ours and custom in attention.backend_per_kind.values()
    in_target = per_kind or (ours and attention.backend == custom)
    in_draft = ours and speculative is not None and speculative.attention_backend == custom
    has_indexer = INDEXER_PLUGIN in (envs.VLLM_PLUGINS or ())
    model = config.model_config
    if not (in_target or in_draft or has_indexer) or model is None or model.is_submodel_config:
        return
    models, drafts = set(model.architectures), set()
    if speculative is not None and speculative.draft_model_config is not None:
        drafts = set(speculative.draft_model_config.architectures)
    served = (models if in_target else set()) | (drafts if in_draft else set())
    for architecture in sorted(served & OWN_ATTENTION.keys()):
        raise ValueError(
            f"sparsemla: {architecture} {OWN_ATTENTION[architecture]}; serve it without the "
            "attention backend CUSTOM"
        )
    if served and current_platform.is_xpu():
        raise ValueError(
            "sparsemla: vLLM takes its own attention backend on XPU; serve without the attention "
            "backend CUSTOM"
        )
    if served & set(DEEPSEEK_V32) and current_platform.is_rocm() and not has_indexer:
        raise ValueError(
            "sparsemla: vLLM's class of DeepSeek-V3.2 for ROCm takes its own attention backend; "
            f"name {INDEXER_PLUGIN} in VLLM_PLUGINS, which brings vLLM's portable class, or serve "
            "without the attention backend CUSTOM"
        )
    if permits_fp8_mma() and not served:
        raise ValueError(
            f"sparsemla: {FP8_MMA} needs the attention backend CUSTOM; otherwise unset it"
        )
    is_v4 = not models.isdisjoint(DEEPSEEK_V4)
    if divide_rows_from() is not None:
        reason = _never_divided(config)
        if not (has_indexer or (is_v4 and in_target)):
            reason = f"needs {INDEXER_PLUGIN} in VLLM_PLUGINS"
        if reason is not None:
            raise ValueError(f"sparsemla: {DIVIDE_ROWS_FROM} {reason}; otherwise unset it")
    if in_target and not is_v4 and not model.use_mla:
        raise ValueError(
            f"sparsemla: the model must have multi-head latent attention, got {sorted(models)}; "
            "serve it without the attention backend CUSTOM"
        )
    if is_v4 and per_kind and attention.backend != custom:
        raise ValueError(
            "sparsemla: DeepSeek-V4 must get CUSTOM by --attention-backend: its layers have caches "
            f"of several kinds, got backend_per_kind {attention.backend_per_kind}"
        )
    if not has_indexer:
        return
    reasons = {name: OWN_INDEXER[name] for name in sorted(models | drafts) if name in OWN_INDEXER}
    if is_v4 and attention.backend != custom:
        reasons["DeepSeek-V4"] = "gets this package's indexer with --attention-backend CUSTOM only"
    if current_platform.is_xpu():
        reasons["XPU"] = "has no kernels of this package"
    for name, reason in reasons.items():
        raise ValueError(
            f"{INDEXER_PLUGIN}: {name} {reason}; remove {INDEXER_PLUGIN} from VLLM_PLUGINS"
        )


def shard_min_rows(config: VllmConfig) -> int | None:
    """Rows from which ranks divide them by vLLM's setting, or None if it is not set."""
    attention = config.attention_config
    rows = attention.indexer_tp_shard_min_rows
    return None if rows == type(attention)().indexer_tp_shard_min_rows else rows


def _never_divided(config: VllmConfig) -> str | None:
    """Why ranks never divide the rows of prefills by :data:`DIVIDE_ROWS_FROM`, or None."""
    from vllm.config import CUDAGraphMode

    parallel, mode = config.parallel_config, config.compilation_config.cudagraph_mode
    if parallel.tensor_parallel_size == 1:
        return "needs --tensor-parallel-size above 1"
    if parallel.decode_context_parallel_size > 1:
        return "has no effect with --decode-context-parallel-size, which divides the keys"
    if (rows := shard_min_rows(config)) is not None:
        return f"has no effect beside vLLM's indexer_tp_shard_min_rows, got {rows}"
    if mode is not None and mode.mixed_mode() == CUDAGraphMode.FULL:
        return f"has no effect while prefills are captured in whole graphs, got {mode}"
    return None


def unread_by_indexer(config: VllmConfig) -> dict[str, bool]:
    """Settings of vLLM's indexer that this package's does not read: whether each must be refused.

    Values that have no effect in vLLM either are accepted.
    """
    from vllm.platforms import current_platform

    topk = config.kernel_config.sparse_indexer_topk_backend
    return {
        f"sparse_indexer_topk_backend must be auto, got {topk}: the selection is exact": (
            topk != "auto"
        ),
        "indexer_sparse_logits must be off": config.attention_config.indexer_sparse_logits,
        NO_FNUZ: current_platform.is_fp8_fnuz(),
    }


NO_FNUZ = "the platform's FP8 dtype must be float8_e4m3fn, got float8_e4m3fnuz"
"""vLLM's kernels then write codes that mean other numbers to the kernels of this package."""


def adapted(config: VllmConfig, *modules: str) -> str | None:
    """Why LoRA must be refused where the weights of these modules are read, or None.

    An adapter changes what a module computes, but not its weight.
    """
    if config.lora_config is None:
        return None
    from vllm.lora.utils import is_in_target_modules

    targets = config.lora_config.target_modules
    parts = {"fused_wkv_wgate": ["wkv", "wgate"]}
    found = [name for name in modules if is_in_target_modules(name, targets, parts)]
    if not found:
        return None
    return (
        f"LoRA must leave out {', '.join(found)}, whose weight is read without its adapter: name "
        f"the other modules by --lora-target-modules; got {targets}"
    )

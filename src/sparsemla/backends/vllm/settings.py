"""Settings of vLLM: defaults where vLLM has no sparse attention, and refusals at start.

vLLM asks a selected backend about some settings. Nobody asks where a model chooses its attention
itself, where a platform ignores the selection, and where a setting belongs to a part that a plugin
replaces. Imports vLLM only inside functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsemla.backends.environment import (
    DIVIDE_ROWS_FROM,
    FP8_MMA,
    divide_rows_from,
    permits_fp8_mma,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.kv_transfer import KVTransferConfig

BACKEND = "sparsemla.backends.vllm.SparseMLABackend"
INDEXER_PLUGIN = "sparsemla_indexer"
OPERATOR = f"vllm::{INDEXER_PLUGIN}"
"""The indexer's op, at which vLLM splits a compiled model once the plugin is active."""

OWN_ATTENTION = {
    "DSparkV41DraftModel": "chooses among vLLM's own classes of attention",
    "Dots3NoteForCausalLM": "pads the rows of its caches for a backend of vLLM",
    "Dots3NoteMTPModel": "pads the rows of its caches for a backend of vLLM",
}
"""Models that ignore ``CUSTOM``, by architecture."""

DEEPSEEK_V32 = ("DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM", "DeepseekV32MTPModel")
GLM5_NEXT = ("Glm5NextForCausalLM", "Glm5NextForConditionalGeneration", "Glm5NextMTPModel")
"""GLM-5.3-Flash."""
HY_V4 = ("HYV4ForCausalLM", "HYV4MTPModel")
"""Hunyuan V4."""
DOTS3_NOTE = ("Dots3NoteForCausalLM", "Dots3NoteMTPModel")
"""Dots3Note, whose attention stays vLLM's."""
DEEPSEEK_V4 = ("DeepseekV4ForCausalLM", "DeepseekV4ForConditionalGeneration", "DeepSeekV4MTPModel")
DEEPSEEK_V41 = ("DeepseekV41ForCausalLM",)
DSPARK = "DSparkDraftModel"
"""DSpark's drafts of DeepSeek-V4, which share the layout of its caches."""

HOST_CONNECTOR = "HostRowsConnector"
HOST_MODULE = "sparsemla.backends.vllm.host"
RECORDS_CONNECTOR = "RecordsConnector"
RECORDS_MODULE = "sparsemla.backends.vllm.recording"

EXAMPLE_CONNECTOR = "ExampleConnector"
"""vLLM's connector that writes files. It writes what layers hand to it after attention, so no index
keys, and of a prompt in chunks the rows of the first chunk only. Then it reads a file for each
cache, index caches included."""

FP8_CACHES = dict.fromkeys(("fp8", "fp8_e4m3"), "fp8_ds_mla")
"""The format that ``kv_cache_dtype`` means for sparse MLA, as in vLLM's ``FLASHMLA_SPARSE``."""


def check_when_configured() -> None:
    """Let vLLM pass each configuration that it makes from now on to the functions below."""
    from vllm.config import VllmConfig

    finish = VllmConfig.__post_init__
    if finish.__module__ == __name__:
        return

    def checked(config: VllmConfig, *args: Any) -> None:  # noqa: ANN401 - passed on to vLLM
        finish(config, *args)
        choose(config)
        refuse(config)

    VllmConfig.__post_init__ = checked


def indexer_is_named() -> bool:
    """Whether ``VLLM_PLUGINS`` has the indexer's plugin."""
    from vllm import envs

    return INDEXER_PLUGIN in (envs.VLLM_PLUGINS or ())


def indexer_is_active() -> bool:
    """Whether models get this package's indexer."""
    from vllm.config import CompilationConfig

    return OPERATOR in CompilationConfig._attention_ops


def custom_is_ours() -> bool:
    """Whether ``CUSTOM`` is this package's backend: the last plugin to register it has the name."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom = AttentionBackendEnum.CUSTOM
    return bool(custom.is_overridden() and custom.get_path() == BACKEND)


def unserved_gpu() -> str | None:
    """The GPU, if this package has sparse attention for it and vLLM has none: sm_80 to sm_89.

    vLLM's backends of sparse MLA support compute capabilities 9, 10 and 12, and its indexer calls
    DeepGEMM, which needs the same.
    """
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    if capability is None or capability.major != 8:
        return None
    return f"sm_{capability.to_int()}"


def choose(config: VllmConfig) -> None:
    """Choose ``CUSTOM`` where vLLM has no backend, and the format of FP8 caches for ``CUSTOM``.

    A backend that the user chose stays. DeepSeek-V4.1 with ``CUSTOM`` does not replay windows.
    """
    from vllm.logger import init_logger
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom, attention = AttentionBackendEnum.CUSTOM, config.attention_config
    speculative, model = config.speculative_config, config.model_config
    if not custom_is_ours() or model is None or model.is_submodel_config:
        return
    models, drafts = set(model.architectures), set()
    if speculative is not None and speculative.draft_model_config is not None:
        drafts = set(speculative.draft_model_config.architectures)
    served, chosen = {*DEEPSEEK_V4, *(DEEPSEEK_V32 if indexer_is_active() else ())}, set()
    # Once the model has layers, vLLM makes the configuration of its drafts from this one. They have
    # a backend of their own.
    gpu = None if config.compilation_config.static_forward_context else unserved_gpu()
    if gpu and attention.backend is None and models & served:
        attention.backend = custom
        chosen |= models & served
    if gpu and drafts & served and speculative.attention_backend is None:
        speculative.attention_backend = custom
        chosen |= drafts & served
    if chosen:
        init_logger("vllm.sparsemla").info_once(
            "sparsemla: vLLM has no sparse attention for %s: the attention backend CUSTOM and this "
            "package's indexer serve %s",
            gpu,
            " and ".join(sorted(chosen)),
        )
    cache, kinds = config.cache_config, attention.backend_per_kind
    if models & {*DEEPSEEK_V41} and attention.backend == custom and cache.swa_bounded_replay:
        cache.swa_bounded_replay = False
        init_logger("vllm.sparsemla").info_once(
            "sparsemla: swa_bounded_replay is off with the attention backend CUSTOM: window rows "
            "take part in prefix caching instead"
        )
    sparse = {*DEEPSEEK_V32, *GLM5_NEXT, *HY_V4}
    if models & sparse and custom in (attention.backend, kinds.get("mla_attention")):
        cache.cache_dtype = FP8_CACHES.get(cache.cache_dtype, cache.cache_dtype)
    if drafts & sparse and speculative.attention_backend == custom:
        drafted = speculative.kv_cache_dtype
        speculative.kv_cache_dtype = FP8_CACHES.get(drafted, drafted)


@dataclass(frozen=True)
class HostRowsConfig:
    """What ``kv_connector_extra_config`` says of :data:`HOST_CONNECTOR`.

    Args:
        host_gib: most GiB of host memory for the rows of a GPU.
        rows_per_seat: hot rows of a request in each layer.
    """

    host_gib: float
    rows_per_seat: int = 4096

    @classmethod
    def of(cls, config: VllmConfig) -> HostRowsConfig | None:
        """The settings if the rows of a configuration are kept on the host, else None.

        Raises:
            ValueError: with the key of ``kv_connector_extra_config`` that does not fit.
        """
        transfer = config.kv_transfer_config
        if transfer is None or not _is_connector(transfer, HOST_CONNECTOR, HOST_MODULE):
            return None
        given = transfer.kv_connector_extra_config
        keys = {"host_gib", "rows_per_seat"}
        if unknown := sorted(given.keys() - keys):
            raise ValueError(
                f"sparsemla: kv_connector_extra_config of {HOST_CONNECTOR} must have "
                f"{' and '.join(sorted(keys))} only, got {', '.join(unknown)}"
            )
        gib, rows = given.get("host_gib"), given.get("rows_per_seat", cls.rows_per_seat)
        if isinstance(gib, bool) or not isinstance(gib, int | float) or not gib > 0:
            raise ValueError(
                f"sparsemla: host_gib in kv_connector_extra_config of {HOST_CONNECTOR} must be a "
                f"positive number, the GiB of host memory for each GPU, got {gib!r}"
            )
        if isinstance(rows, bool) or not isinstance(rows, int) or rows < 1:
            raise ValueError(
                f"sparsemla: rows_per_seat in kv_connector_extra_config of {HOST_CONNECTOR} must "
                f"be a positive integer, the hot rows of a request in each layer, got {rows!r}"
            )
        return cls(float(gib), rows)


@dataclass(frozen=True)
class RecordsConfig:
    """What ``kv_connector_extra_config`` says of :data:`RECORDS_CONNECTOR`.

    Args:
        folder: of the records.
        model: name of the model, by which the training knows it.
        host_gib: most GiB of host memory for selections that are not written yet.
    """

    folder: str
    model: str
    host_gib: float

    @classmethod
    def of(cls, config: VllmConfig) -> RecordsConfig | None:
        """The settings if the selections of a configuration are recorded, else None.

        Raises:
            ValueError: with the key of ``kv_connector_extra_config`` that does not fit.
        """
        transfer = config.kv_transfer_config
        if transfer is None or not _is_connector(transfer, RECORDS_CONNECTOR, RECORDS_MODULE):
            return None
        given, keys = transfer.kv_connector_extra_config, ("folder", "model", "host_gib")
        if set(given) != set(keys):
            raise ValueError(
                f"sparsemla: kv_connector_extra_config of {RECORDS_CONNECTOR} must have "
                f"{', '.join(keys)}, got {', '.join(sorted(given)) or 'none'}"
            )
        folder, model, gib = (given[key] for key in keys)
        for name, value in (("folder", folder), ("model", model)):
            if not isinstance(value, str) or not value:
                raise ValueError(
                    f"sparsemla: {name} in kv_connector_extra_config of {RECORDS_CONNECTOR} must "
                    f"be a string that is not empty, got {value!r}"
                )
        if isinstance(gib, bool) or not isinstance(gib, int | float) or not gib > 0:
            raise ValueError(
                f"sparsemla: host_gib in kv_connector_extra_config of {RECORDS_CONNECTOR} must be "
                "a positive number, the GiB of host memory of each pipeline stage for selections "
                f"that are not written yet, got {gib!r}"
            )
        return cls(folder, model, float(gib))


def _is_connector(transfer: KVTransferConfig, name: str, module: str) -> bool:
    return bool(transfer.kv_connector == name and transfer.kv_connector_module_path == module)


def refuse(config: VllmConfig) -> None:
    """Stop a start in which a part of this package was named, but would not run.

    Raises:
        ValueError: with the reason.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    custom, attention = AttentionBackendEnum.CUSTOM, config.attention_config
    speculative = config.speculative_config
    ours = custom_is_ours()
    per_kind = ours and custom in attention.backend_per_kind.values()
    in_target = per_kind or (ours and attention.backend == custom)
    _refuse_beside_others(config)
    _refuse_example_connector(config, in_target)
    _refuse_host_rows(config, in_target)
    _refuse_records(config)
    in_draft = ours and speculative is not None and speculative.attention_backend == custom
    has_indexer = indexer_is_named()
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
    if DSPARK in drafts and in_draft and not in_target:
        raise ValueError(
            f"sparsemla: {DSPARK} takes the attention backend CUSTOM from its model: set "
            "--attention-backend CUSTOM, and not that of the drafts alone"
        )
    if served and current_platform.is_xpu():
        raise ValueError(
            "sparsemla: vLLM takes its own attention backend on XPU; serve without the attention "
            "backend CUSTOM"
        )
    replaced = {*DEEPSEEK_V32, *GLM5_NEXT, *HY_V4, *DOTS3_NOTE}
    indexed = has_indexer and (models | drafts) & replaced
    if (served or indexed) and current_platform.is_rocm():
        raise ValueError(
            "sparsemla: on ROCm vLLM has sparse attention of its own, and on gfx942 it writes "
            "float8_e4m3fnuz codes, which mean other numbers to the kernels of this package; serve "
            f"without the attention backend CUSTOM and without {INDEXER_PLUGIN} in VLLM_PLUGINS"
        )
    gpu = unserved_gpu()
    indexed_models = served & {*DEEPSEEK_V32, *GLM5_NEXT, *HY_V4}
    if gpu and indexed_models and not indexer_is_active():
        raise ValueError(
            f"sparsemla: vLLM's indexer of {' and '.join(sorted(indexed_models))} has no kernels "
            f"for {gpu}; unset VLLM_PLUGINS, or name {INDEXER_PLUGIN} in it"
        )
    if permits_fp8_mma() and not served:
        raise ValueError(
            f"sparsemla: {FP8_MMA} needs the attention backend CUSTOM; otherwise unset it"
        )
    is_v41 = not models.isdisjoint(DEEPSEEK_V41)
    is_v4 = is_v41 or not models.isdisjoint(DEEPSEEK_V4)
    family = "DeepSeek-V4.1" if is_v41 else "DeepSeek-V4"
    if divide_rows_from() is not None:
        reason = _never_divided(config)
        if not (has_indexer or (is_v4 and in_target)):
            reason = f"needs {INDEXER_PLUGIN} in VLLM_PLUGINS"
        if is_v41:
            reason = f"has no effect on {family}, of which each rank selects for all rows"
        if reason is not None:
            raise ValueError(f"sparsemla: {DIVIDE_ROWS_FROM} {reason}; otherwise unset it")
    if in_target and not is_v4 and not model.use_mla:
        raise ValueError(
            f"sparsemla: the model must have multi-head latent attention, got {sorted(models)}; "
            "serve it without the attention backend CUSTOM"
        )
    if is_v4 and per_kind and attention.backend != custom:
        raise ValueError(
            f"sparsemla: {family} must get CUSTOM by --attention-backend: its layers have caches "
            f"of several kinds, got backend_per_kind {attention.backend_per_kind}"
        )
    if not has_indexer:
        return
    reasons = {}
    if is_v4 and attention.backend != custom:
        reasons[family] = "gets this package's indexer with --attention-backend CUSTOM only"
    if current_platform.is_xpu():
        reasons["XPU"] = "has no kernels of this package"
    for name, reason in reasons.items():
        raise ValueError(
            f"{INDEXER_PLUGIN}: {name} {reason}; remove {INDEXER_PLUGIN} from VLLM_PLUGINS"
        )


def _refuse_beside_others(config: VllmConfig) -> None:
    """Stop a start in which a connector of this package is one of several.

    Raises:
        ValueError: with its name.
    """
    transfer = config.kv_transfer_config
    parts = [] if transfer is None else transfer.kv_connector_extra_config.get("connectors", [])
    names = {each.get("kv_connector") for each in parts}
    for name, reason in (
        (HOST_CONNECTOR, "other connectors copy pages of the GPU, which have no rows"),
        (RECORDS_CONNECTOR, "tokens that other connectors bring have no selections here"),
    ):
        if name in names:
            raise ValueError(
                f"sparsemla: {name} must be the only KV connector, as {reason}; "
                f"got {transfer.kv_connector}"
            )


def _refuse_example_connector(config: VllmConfig, in_target: bool) -> None:
    """Stop a start with vLLM's example of a connector, which leaves out the index keys.

    Args:
        config: of the engine.
        in_target: the attention backend of the model is this package's.

    Raises:
        ValueError: with what moves both caches.
    """
    transfer, model = config.kv_transfer_config, config.model_config
    if transfer is None or model is None or model.is_submodel_config:
        return
    readers = {*DEEPSEEK_V32, *GLM5_NEXT, *HY_V4, *DOTS3_NOTE, *DEEPSEEK_V4, *DEEPSEEK_V41}
    indexed = readers.intersection(model.architectures)
    ours = in_target or indexer_is_named()
    if indexed and ours and transfer.has_connector(EXAMPLE_CONNECTOR):
        raise ValueError(
            f"sparsemla: {EXAMPLE_CONNECTOR} of vLLM writes no index keys, which "
            f"{' and '.join(sorted(indexed))} read; use OffloadingConnector with files, or "
            "NixlConnector"
        )


def _refuse_host_rows(config: VllmConfig, in_target: bool) -> None:
    """Stop a start in which rows on the host were named, but another setting does not go with them.

    Args:
        config: of the engine.
        in_target: the attention backend of the model is this package's.

    Raises:
        ValueError: with the reason.
    """
    settings, model = HostRowsConfig.of(config), config.model_config
    if settings is None or model is None or model.is_submodel_config:
        return
    most = 1 + config.num_speculative_tokens
    needed = most * model.hf_text_config.index_topk if model.architectures[0] in DEEPSEEK_V32 else 0
    parallel = config.parallel_config
    pcp, pp = parallel.prefill_context_parallel_size, parallel.pipeline_parallel_size
    problems = {
        f"the model must be one of {', '.join(DEEPSEEK_V32)}, got {model.architectures}": (
            not needed
        ),
        "--attention-backend must be CUSTOM, as no other backend reads hot rows": not in_target,
        f"VLLM_PLUGINS must name {INDEXER_PLUGIN}, as the lists of vLLM's indexer do not ascend": (
            not indexer_is_active()
        ),
        f"rows_per_seat must be at least {needed}, index_topk for each of {most} query tokens, "
        f"got {settings.rows_per_seat}": settings.rows_per_seat < needed,
        "VLLM_USE_V2_MODEL_RUNNER must not be 0, and settings that need the model runner V1 must "
        "be off, as only V2 gives a request a place that it keeps": not config.use_v2_model_runner,
        f"--prefill-context-parallel-size must be 1, as decodes change their rank in every step; "
        f"got {pcp}": pcp > 1,
        f"--pipeline-parallel-size must be 1, got {pp}": pp > 1,
        "--enable-dbo and --ubatch-size must be off, as seats are those of whole batches": (
            parallel.use_ubatching
        ),
        "HiSparse must be off, as it keeps the rows itself": (
            config.attention_config.hisparse_config is not None
        ),
    }
    for problem, present in problems.items():
        if present:
            raise ValueError(
                f"sparsemla: {problem}; otherwise remove {HOST_CONNECTOR} from --kv-transfer-config"
            )


def _refuse_records(config: VllmConfig) -> None:
    """Stop a start in which records were named, but another setting does not go with them.

    Raises:
        ValueError: with the reason.
    """
    settings, model = RecordsConfig.of(config), config.model_config
    if settings is None or model is None or model.is_submodel_config:
        return
    parallel, speculative = config.parallel_config, config.speculative_config
    pcp = parallel.prefill_context_parallel_size
    problems = {
        f"the model must be one of {', '.join(DEEPSEEK_V32)}, got {model.architectures}": (
            model.architectures[0] not in DEEPSEEK_V32
        ),
        f"VLLM_PLUGINS must name {INDEXER_PLUGIN}, as the lists of vLLM's indexer do not ascend": (
            not indexer_is_active()
        ),
        "VLLM_USE_V2_MODEL_RUNNER must not be 0, and settings that need the model runner V1 must "
        "be off, as only V2 tells a connector which tokens a step has": (
            not config.use_v2_model_runner
        ),
        f"--prefill-context-parallel-size must be 1, as each rank selects for some tokens only; "
        f"got {pcp}": pcp > 1,
        "--enable-dbo and --ubatch-size must be off, as a step must be one batch": (
            parallel.use_ubatching
        ),
        "enable_adaptive_verification must be off, as the number of drafts is then known on the "
        "GPU only": getattr(speculative, "enable_adaptive_verification", False),
    }
    for problem, present in problems.items():
        if present:
            raise ValueError(
                f"sparsemla: {problem}; otherwise remove {RECORDS_CONNECTOR} from "
                "--kv-transfer-config"
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


WINDOWED_CACHES = ("auto", "fp8", "fp8_ds_mla")
"""Values of ``kv_cache_dtype`` that vLLM turns into records of 584 bytes, for DeepSeek-V4.1 on
sm_100 of 528."""


def refuse_windowed(
    config: VllmConfig,
    model: Any,  # noqa: ANN401 - of transformers
    name: str,
    more: dict[str, bool],
) -> None:
    """Raise ValueError for what layers over windows and entries do not support.

    Args:
        config: vLLM's.
        model: the configuration with the dims of the layers.
        name: the family: DeepSeek-V4 or DeepSeek-V4.1.
        more: its other problems, and whether each is present.
    """
    import torch
    from vllm import envs
    from vllm.platforms import current_platform

    parallel, cache_dtype = config.parallel_config, config.cache_config.cache_dtype
    capability = current_platform.get_device_capability()
    dims = {key: getattr(model, key, None) for key in ("head_dim", "qk_rope_head_dim")}
    index_dim = getattr(model, "index_head_dim", None)
    adapters, offload = adapted(config, "wo_a", "fused_wkv_wgate"), config.offload_config
    problems = {
        f"{name} is served on NVIDIA GPUs only": current_platform.is_rocm()
        or current_platform.is_xpu()
        or current_platform.is_cpu(),
        f"the GPU must be sm_80 or newer, got {capability}": capability is not None
        and capability.major < 8,
        f"--kv-cache-dtype must be one of {', '.join(WINDOWED_CACHES)}; got {cache_dtype}": (
            cache_dtype not in WINDOWED_CACHES
        ),
        f"the model's head_dim and qk_rope_head_dim must be 512 and 64, got {dims}": tuple(
            dims.values()
        )
        != (512, 64),
        f"the model's index_head_dim must be 128, got {index_dim}": index_dim != 128,
        "decode_context_parallel_size must be 1": parallel.decode_context_parallel_size > 1,
        "prefill_context_parallel_size must be 1": parallel.prefill_context_parallel_size > 1,
        "HiSparse must be off": config.attention_config.hisparse_config is not None,
        "batch invariance is not supported": envs.VLLM_BATCH_INVARIANT,
        f"{FP8_MMA} must be unset, as no kernel has FP8 MMAs for rows of 512 dims": (
            permits_fp8_mma()
        ),
        f"the model's dtype must be bfloat16, got {config.model_config.dtype}": (
            config.model_config.dtype != torch.bfloat16
        ),
        "kv_cache_dtype_skip_layers must be empty, as all layers have the same caches": bool(
            config.cache_config.kv_cache_dtype_skip_layers
        ),
        adapters or "": adapters is not None,
        # The output projection's matrices are views of parameters that must stay where they are.
        "offload_group_size must be 0": offload.prefetch.offload_group_size > 0,
        "cpu_offload_gb needs VLLM_WEIGHT_OFFLOADING_DISABLE_UVA unset": offload.uva.cpu_offload_gb
        > 0
        and envs.VLLM_WEIGHT_OFFLOADING_DISABLE_UVA,
        **more,
        **unread_by_indexer(config),
    }
    for problem, present in problems.items():
        if present:
            raise ValueError(
                f"sparsemla: {problem}; otherwise serve without --attention-backend CUSTOM"
            )


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

"""What the plugins do unasked on GPUs for which vLLM has no sparse attention, and nowhere else.

vLLM's own code builds the configurations and chooses the backend; only the GPU's compute capability
is made up.
"""

import ast
import json
import logging
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from vllm_here import require_vllm

require_vllm()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm
    import vllm.plugins
    from vllm import envs
    from vllm.config import (
        CompilationConfig,
        ParallelConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.engine.arg_utils import EngineArgs
    from vllm.logger import _print_info_once
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.models import deepseek_mtp, llama, registry  # noqa: F401
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform, interface
    from vllm.platforms.interface import DeviceCapability
    from vllm.utils import deep_gemm
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import _cached_get_attn_backend, get_attn_backend
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    from sparsemla.backends import vllm as plugins
    from sparsemla.backends.vllm import (  # noqa: F401 - imported before the platform is made up
        attention,
        deepseek_v4,
        indexer,
        nvidia,
        settings,
        wrapper,
    )

import vllm_engine
from sparsemla import ExchangeWorkspace
from test_vllm_settings import V4, V32
from vllm_engine import MODES, engine_arguments, sharing_a_gpu

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the platform is made up"),
]

CUSTOM = AttentionBackendEnum.CUSTOM
PLATFORM = type(current_platform)
UNSERVED = [(8, 0), (8, 6), (8, 9)]
SERVED = [(9, 0), (10, 0), (12, 0)]
V4_BACKENDS = ["sparse_mla.py", "nvidia/flashinfer_sparse.py"]

DRAFTS = {"num_nextn_predict_layers": 1, "max_position_embeddings": 4096}
CONFIGS = {
    "v32": V32 | DRAFTS,
    "glm5": V32 | DRAFTS | {"architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa"},
    "v4": V4 | DRAFTS,
    "v4 with 64 heads": V4 | DRAFTS | {"num_attention_heads": 64, "o_groups": 16},
    "hy": V32
    | {
        "architectures": ["HYV4ForCausalLM"],
        "model_type": "hy_v4",
        "indexer_types": ["full"],
        "layer_types": ["deepseek_sparse_attention"],
        "mlp_layer_types": ["dense"],
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "torch_dtype": "bfloat16",
    },
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with the configuration of each model."""
    made = {name: tmp_path_factory.mktemp(name) for name in CONFIGS}
    for name, folder in made.items():
        (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return made


@pytest.fixture
def command(folders, monkeypatch):
    """What vLLM configures for a command on a GPU, in a process without plugins so far."""
    for entries in (op_registry_oot, ModelRegistry.models):
        for name in {*plugins.GENERIC_MODELS, *plugins.V4_MODELS, *entries} & set(entries):
            monkeypatch.setitem(entries, name, entries[name])
    # vLLM looks at a class of a model in a new process, which takes seconds.
    monkeypatch.setattr(registry, "_run_in_subprocess", lambda look: look())
    monkeypatch.setattr(CompilationConfig, "_attention_ops", [*CompilationConfig._attention_ops])
    monkeypatch.setattr(VllmConfig, "__post_init__", VllmConfig.__post_init__)
    monkeypatch.setattr(PLATFORM, "device_type", "cpu")
    for change in (monkeypatch.setenv, lambda name, _: monkeypatch.delenv(name)):
        change("VLLM_USE_BREAKABLE_CUDAGRAPH", "1")  # which vLLM sets, to be put back
    uncached = deep_gemm.mqa_logits_use_mx_scales.__wrapped__
    monkeypatch.setattr(deep_gemm, "mqa_logits_use_mx_scales", uncached)

    def make(name, capability, names=None, **arguments):
        found = DeviceCapability(*capability)
        monkeypatch.setattr(PLATFORM, "is_cuda", lambda self: True)
        monkeypatch.setattr(
            PLATFORM, "get_device_capability", classmethod(lambda cls, device_id=0: found)
        )
        monkeypatch.setattr(envs, "VLLM_PLUGINS", names, raising=False)
        monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
        arguments = {"model": str(folders[name]), "skip_tokenizer_init": True} | arguments
        return EngineArgs(**arguments).create_engine_config()

    yield make
    op_registry_oot.clear()


@pytest.fixture
def said(monkeypatch):
    """Messages of this package's logger."""
    found = []
    logger = logging.getLogger("vllm.sparsemla")
    monkeypatch.setattr(logger, "handle", lambda record: found.append(record.getMessage()))
    monkeypatch.setattr(logger, "isEnabledFor", lambda level: level >= logging.INFO)
    _print_info_once.cache_clear()
    return found


def sparse_backends(capability):
    """Which of vLLM's backends of sparse MLA for CUDA support a compute capability.

    Their modules need extensions and GPUs, so only the methods that tell it are executed.
    """
    root, found = Path(vllm.__file__).parent, []
    files = sorted(root.glob("v1/attention/backends/mla/*_sparse*.py"))
    files += [root / "models/deepseek_v4" / name for name in V4_BACKENDS]
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if getattr(node, "name", None) != "supports_compute_capability":
                continue
            node.decorator_list, node.returns, scope = [], None, {}
            for each in node.args.args:
                each.annotation = None
            exec(compile(ast.Module([node], []), file.name, "exec"), scope)
            found.append(scope[node.name](None, DeviceCapability(*capability)))
    assert len(found) >= 6
    return found


@pytest.fixture
def cuda(monkeypatch):
    """vLLM's platform for CUDA, whose compiled extension needs a driver."""
    for name in ("vllm._C_stable_libtorch", "vllm._C"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sdp = torch.backends.cuda.cudnn_sdp_enabled()
    from vllm.platforms import cuda

    torch.backends.cuda.enable_cudnn_sdp(sdp)
    return cuda


@pytest.mark.parametrize(
    "capability",
    [*UNSERVED, (8, 7), *SERVED, (10, 3), (12, 1)],
    ids=lambda capability: "sm_{}{}".format(*capability),
)
def test_vllm_has_backends_and_deep_gemm_where_the_plugins_wait_to_be_asked(
    monkeypatch, cuda, capability
):
    found = DeviceCapability(*capability)
    monkeypatch.setattr(
        cuda.CudaPlatformBase, "get_device_capability", classmethod(lambda cls, device_id=0: found)
    )
    monkeypatch.setattr(PLATFORM, "is_cuda", lambda self: True)
    monkeypatch.setattr(
        PLATFORM, "get_device_capability", classmethod(lambda cls, device_id=0: found)
    )
    serves_itself = any(sparse_backends(capability))
    assert serves_itself == (settings.unserved_gpu() is None)
    assert serves_itself == cuda.CudaPlatformBase.support_deep_gemm()


def test_gpus_of_neither_are_left_to_vllm(monkeypatch):
    assert settings.unserved_gpu() is None  # no GPU
    monkeypatch.setattr(PLATFORM, "is_cuda", lambda self: True)
    for capability in ((7, 5), (11, 0)):
        found = DeviceCapability(*capability)
        monkeypatch.setattr(
            PLATFORM, "get_device_capability", classmethod(lambda cls, device_id=0, c=found: c)
        )
        assert settings.unserved_gpu() is None


@pytest.mark.parametrize("capability", UNSERVED, ids=str)
@pytest.mark.parametrize("name", ["v32", "glm5", "v4"])
def test_the_usual_command_serves_where_vllm_has_no_backend(command, said, name, capability):
    config = command(name, capability)
    assert config.attention_config.backend == CUSTOM
    assert config.cache_config.cache_dtype == "auto"
    architecture = CONFIGS[name]["architectures"][0]
    assert said == [
        "sparsemla: vLLM has no sparse attention for sm_{}{}: the attention backend CUSTOM and "
        "this package's indexer serve {}".format(*capability, architecture)
    ]
    paths = plugins.GENERIC_MODELS if capability < (8, 9) else plugins.NVIDIA_MODELS
    for each, path in (plugins.V4_MODELS | paths).items():
        model = ModelRegistry.models[each]
        assert f"{model.module_name}:{model.class_name}" == path
    assert op_registry_oot["MultiHeadLatentAttentionWrapper"] is wrapper.SparseMLAWrapper
    assert op_registry_oot["SparseAttnIndexer"] is indexer.IdleIndexerOp
    assert settings.indexer_is_active()


@pytest.mark.parametrize("capability", SERVED, ids=str)
@pytest.mark.parametrize("name", ["v32", "glm5", "v4"])
def test_nothing_changes_unasked_elsewhere(command, said, name, capability):
    config = command(name, capability, kv_cache_dtype="fp8")
    assert config.attention_config.backend is None
    assert config.cache_config.cache_dtype == "fp8"
    assert not said
    assert not op_registry_oot
    assert not settings.indexer_is_active()


def test_other_models_keep_their_backend(command, said):
    assert command("llama", (8, 0)).attention_config.backend is None
    assert not said


def test_a_backend_that_the_user_chose_stays(command, said):
    config = command("v32", (8, 0), attention_backend="FLASHMLA_SPARSE", kv_cache_dtype="fp8")
    assert config.attention_config.backend == AttentionBackendEnum.FLASHMLA_SPARSE
    assert config.cache_config.cache_dtype == "fp8"
    assert not said


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e4m3", "fp8_ds_mla", "bfloat16"])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
@pytest.mark.parametrize("kinds", [None, {"mla_attention": "CUSTOM"}], ids=["backend", "kind"])
def test_fp8_is_the_cache_of_656_bytes(command, capability, dtype, kinds):
    backend = {"attention_backend": "CUSTOM"}
    if kinds:
        backend = {"attention_config": {"backend_per_kind": kinds}}
    config = command("v32", capability, kv_cache_dtype=dtype, **backend)
    expected = {"bfloat16": "auto"}.get(dtype, "fp8_ds_mla")
    assert config.cache_config.cache_dtype == expected
    assert expected in attention.FORMATS


def test_vllm_turns_fp8_into_deepseek_v4s_records_itself(command):
    assert command("v4", (8, 0), kv_cache_dtype="fp8").cache_config.cache_dtype == "fp8"


@pytest.mark.parametrize("capability", [*UNSERVED, *SERVED], ids=str)
def test_vllm_selects_the_backend(command, cuda, monkeypatch, capability):
    """By the function of its platform for CUDA, from the configuration of the usual command."""
    select = cuda.CudaPlatformBase.__dict__["get_attn_backend_cls"].__func__
    valid = cuda.CudaPlatformBase.__dict__["get_valid_backends"].__func__
    monkeypatch.setattr(PLATFORM, "get_attn_backend_cls", classmethod(select))
    monkeypatch.setattr(PLATFORM, "get_valid_backends", classmethod(valid), raising=False)
    monkeypatch.setattr(PLATFORM, "device_name", "made up", raising=False)
    _cached_get_attn_backend.cache_clear()
    config = command("v32", capability, kv_cache_dtype="fp8")
    with set_current_vllm_config(config):

        def select_backend():
            dtype = config.cache_config.cache_dtype
            found = get_attn_backend(576, torch.bfloat16, dtype, use_mla=True, use_sparse=True)
            _cached_get_attn_backend.cache_clear()
            return found

        if capability in UNSERVED:
            assert select_backend() is attention.SparseMLABackend
            config.attention_config.backend = None  # as without this package
            with pytest.raises(ValueError, match="No valid attention backend found"):
                select_backend()
        elif capability == (9, 0):
            assert select_backend().get_name() == "FLASHMLA_SPARSE"


def test_without_its_plugin_there_is_no_indexer(command, said):
    reason = "has no kernels for sm_80; unset VLLM_PLUGINS, or name sparsemla_indexer in it"
    with pytest.raises(ValueError, match=f"indexer of DeepseekV32ForCausalLM {reason}"):
        command("v32", (8, 0), ["sparsemla"], attention_backend="CUSTOM")
    assert command("v32", (8, 0), ["sparsemla"]).attention_config.backend is None
    assert not said
    assert command("v32", (9, 0), ["sparsemla"], attention_backend="CUSTOM")
    assert command("v4", (8, 0), ["sparsemla"]).attention_config.backend == CUSTOM  # has its own


MTP = {"method": "mtp", "num_speculative_tokens": 1}


@pytest.mark.parametrize("name", ["v32", "v4"])
def test_drafts_get_the_backend(command, said, name):
    config = command(name, (8, 9), speculative_config=MTP)
    assert config.attention_config.backend == CUSTOM
    assert config.speculative_config.attention_backend == CUSTOM
    names = [*CONFIGS[name]["architectures"]]
    names += config.speculative_config.draft_model_config.architectures
    assert said[0].endswith(f" serve {' and '.join(sorted(names))}")
    config = command(name, (9, 0), speculative_config=MTP)
    assert config.speculative_config.attention_backend is None


def test_drafts_of_deepseek_v32_have_the_cache_of_656_bytes(command):
    speculative = MTP | {"kv_cache_dtype": "fp8"}
    config = command("v32", (8, 0), speculative_config=speculative)
    assert config.speculative_config.kv_cache_dtype == "fp8_ds_mla"
    assert config.cache_config.cache_dtype == "auto"


@pytest.mark.parametrize("chosen", [None, CUSTOM])
def test_drafts_of_other_models_keep_their_backend(command, said, chosen):
    """vLLM makes their configuration of that of the model, once that has its layers."""
    config = command("v32", (8, 0), speculative_config=MTP)
    assert len(said) == 1
    config.speculative_config.attention_backend = chosen
    config.compilation_config.static_forward_context["model.layers.0"] = object()
    made = SimpleNamespace(vllm_config=config, speculative_config=config.speculative_config)
    draft = SpecDecodeBaseProposer._create_draft_vllm_config(made)
    assert draft.attention_config.backend == chosen
    assert config.attention_config.backend == CUSTOM
    assert len(said) == 1


@pytest.mark.parametrize("name", [name for name, mode in MODES.items() if mode.acting_as])
def test_the_example_serves_as_an_older_gpu_by_the_usual_command(command, folders, name):
    mode = MODES[name]
    family = {"deepseek_v32": "v32", "deepseek_v4": "v4", "hy_v4": "hy"}[mode.model]
    capability = {"sm_80": (8, 0), "sm_89": (8, 9)}[mode.acting_as]
    config = command(family, capability, mode.plugins, **engine_arguments(mode, folders[family]))
    assert config.attention_config.backend == CUSTOM
    assert config.cache_config.cache_dtype == ("fp8" if family == "v4" else "fp8_ds_mla")
    assert config.model_config.enforce_eager == (not mode.graphs)


@pytest.mark.parametrize(
    "name", [name for name, mode in MODES.items() if mode.gpus > 1 and mode.model == "deepseek_v4"]
)
def test_vllm_maps_all_ranks_of_deepseek_v4_to_one_gpu(command, folders, name, monkeypatch):
    monkeypatch.setattr(PLATFORM, "device_count", lambda self: 1, raising=False)
    mode = replace(MODES[name], shares_gpu=True)
    arguments = engine_arguments(mode, folders["v4 with 64 heads"])
    with sharing_a_gpu(mode.gpus):
        config = command("v4 with 64 heads", (9, 0), ["sparsemla"], **arguments)
        del arguments["distributed_executor_backend"]
        with pytest.raises(ValueError, match=r"World size .* larger than the number of available"):
            command("v4 with 64 heads", (9, 0), ["sparsemla"], **arguments)
    parallel = config.parallel_config
    assert parallel.assigned_physical_gpu_ids == [0] * mode.gpus
    assert (parallel.tensor_parallel_size, parallel.world_size) == (mode.gpus, mode.gpus)
    assert parallel.distributed_executor_backend == "mp"


@pytest.mark.parametrize(("visible", "first"), [(None, 0), ("5", 5), ("6,5", 6)])
def test_every_worker_takes_the_first_visible_gpu(visible, first, monkeypatch):
    """vLLM's worker, up to where it has its device."""
    from vllm.v1.worker.gpu_worker import Worker

    variable, chosen = "CUDA_VISIBLE_DEVICES", []
    monkeypatch.setattr(PLATFORM, "device_control_env_var", variable)
    monkeypatch.delenv(variable, raising=False)
    if visible is not None:
        monkeypatch.setenv(variable, visible)
    monkeypatch.setattr(interface, "_assigned_physical_gpu_ids", None)
    monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)

    class Reached(Exception):
        pass

    def reached(platform, dtype):
        raise Reached

    monkeypatch.setattr(PLATFORM, "check_if_supports_dtype", reached, raising=False)
    with sharing_a_gpu(4):
        gpus = EngineArgs()._resolve_device_ids()
    assert gpus == [first] * 4
    parallel = ParallelConfig(
        tensor_parallel_size=4, distributed_executor_backend="mp", assigned_physical_gpu_ids=gpus
    )
    for rank in range(4):
        worker = object.__new__(Worker)
        worker.device_config = SimpleNamespace(device_type="cuda")
        worker.parallel_config, worker.local_rank = parallel, rank
        worker.model_config = SimpleNamespace(dtype=torch.bfloat16)
        with pytest.raises(Reached):
            worker.init_device()
        assert worker.device == torch.device("cuda:0")
    assert chosen == 4 * [torch.device("cuda:0")]


@pytest.mark.parametrize("name", ["both", "both, dcp4", "both, graphs, dcp2 gathers"])
def test_modes_that_share_a_gpu_are_served_with_what_lets_them(name, monkeypatch, tmp_path):
    given = {"PATH": "/bin", "NCCL_MAX_CTAS": "2"}
    monkeypatch.setattr(vllm_engine.os, "environ", given)
    connect, found = ExchangeWorkspace._connect, {}

    def serve(mode, model):
        found["gpus"] = EngineArgs(device_ids=[0])._resolve_device_ids()
        found["refusal"] = ExchangeWorkspace._connect
        return {"answers": [{"tokens": [5, 6]}]}

    monkeypatch.setattr(vllm_engine, "_serve", serve)
    mode = replace(MODES[name], shares_gpu=True, prompts=1, new_tokens=2)
    vllm_engine.serve(mode, tmp_path, tmp_path / "result.json")
    set_to = {each: vllm_engine.os.environ.get(each) for each in vllm_engine.SHARED_GPU}
    several = mode.gpus > 1
    assert set_to == {
        "NCCL_MULTI_RANK_GPU_ENABLE": "1" if several else None,
        "NCCL_MAX_CTAS": "2",
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1" if several else None,
    }
    assert found["gpus"] == [0] * mode.gpus
    assert (found["refusal"] is connect) == (not mode.gathers)
    if mode.gathers:
        assert found["refusal"]() == (None, "the mode gathers selections")
    assert ExchangeWorkspace._connect is connect


def test_an_indexer_that_nobody_named_stops_no_start(command, said, monkeypatch):
    row = plugins.surface.Dependency("vllm:gone", "a purpose")
    monkeypatch.setattr(plugins, "INDEXER", (row,))
    assert command("v32", (8, 0)).attention_config.backend is None
    (line,) = said
    assert line.startswith("sparsemla does not fit this vLLM: vllm:gone (a purpose): ")
    assert not op_registry_oot
    assert command("llama", (8, 0)).attention_config.backend is None
    with pytest.raises(RuntimeError, match="vllm:gone"):
        command("v32", (8, 0), ["sparsemla", "sparsemla_indexer"])


def test_another_version_of_vllm_serves_without_the_plugins(command, said, monkeypatch):
    monkeypatch.setattr(vllm, "__version__", "0.34.1")
    monkeypatch.setattr(vllm, "__version_tuple__", (0, 34, 1))
    assert command("v32", (8, 0)).attention_config.backend is None
    assert said == ["sparsemla supports vLLM 0.33, found 0.34.1: there is no backend CUSTOM"]

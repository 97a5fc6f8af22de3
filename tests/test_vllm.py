"""The contract with vLLM, checked against the real package, without a GPU.

vLLM's own Triton kernels run in the interpreter here, so that the metadata and the conversion of
indices are vLLM's and not an imitation. CI installs vLLM for this file alone: see `.ci/run`.
"""

import contextlib
import dataclasses
import inspect
import itertools
import json
import pickle
import re
import warnings
from multiprocessing import forkserver
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import normalize, pad

from vllm_here import require_vllm

require_vllm()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import (
        DeepseekV32Config,
        DeepseekV32ForCausalLM,
        GlmMoeDsaConfig,
        GlmMoeDsaForCausalLM,
    )
    from vllm import _custom_ops, envs
    from vllm.config import (
        AttentionConfig,
        CacheConfig,
        CompilationConfig,
        CUDAGraphMode,
        DeviceConfig,
        LoRAConfig,
        ModelConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
        set_current_vllm_config,
    )
    from vllm.config.attention import HiSparseConfig
    from vllm.distributed import (
        destroy_model_parallel,
        get_dcp_group,
        get_tp_group,
        init_distributed_environment,
        initialize_model_parallel,
        parallel_state,
    )
    from vllm.distributed.device_communicators import pynccl
    from vllm.forward_context import set_forward_context
    from vllm.logger import _print_info_once
    from vllm.lora import model_manager
    from vllm.lora.layers import LoRAMapping
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers import mla, rotary_embedding, sparse_attn_indexer
    from vllm.model_executor.layers.attention import mla_attention, sparse_mla_attention
    from vllm.model_executor.layers.rotary_embedding import get_rope
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.reload.inplace import reload_weights
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.models.deepseek_v2 import Indexer
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
    from vllm.models.deepseek_v32 import attention as deepseek_v32
    from vllm.models.deepseek_v32.common import kernels
    from vllm.models.deepseek_v41.common.ops import fused_compress_quant_cache as v41_rows
    from vllm.models.deepseek_v41.common.ops import indexer_k_store as v41_keys
    from vllm.models.deepseek_v41.common.ops.cache_utils import dequantize_and_gather_k_cache_triton
    from vllm.platforms import current_platform
    from vllm.platforms.interface import DeviceCapability
    from vllm.utils import deep_gemm, torch_utils
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backend import (
        AttentionCGSupport,
        AttentionType,
        CommonAttentionMetadata,
    )
    from vllm.v1.attention.backends.mla import index_group
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.backends.utils import get_dcp_local_seq_lens
    from vllm.v1.attention.ops import dcp
    from vllm.v1.hisparse import runtime
    from vllm.v1.kv_cache_interface import MLAAttentionSpec
    from vllm.v1.worker import workspace
    from vllm.v1.worker.block_table import get_block_table_width
    from vllm.v1.worker.workspace import current_workspace_manager, init_workspace_manager

    import glm5_next_alone  # noqa: F401 - before ``pooled``
    from sparsemla.backends import vllm as plugins
    from sparsemla.backends.vllm import (
        GENERIC_MODELS,
        attention,
        deepseek_v4,
        divided,
        exchange,
        host,
        host_attention,
        hy_v4,
        indexer,
        nvidia,
        pooled,
        recording,
        register,
        surface,
        warmup,
        wrapper,
    )
    from sparsemla.backends.vllm import register_indexer as register_the_indexer

import replay
from sparsemla import (
    FP4_288,
    FP8_528,
    FP8_NOPE,
    INDEX_FP8,
    INDEX_MXFP4,
    ContextShard,
    ExchangeWorkspace,
    PagedCache,
    bf16_format,
    fused_indexer_rope_quant,
    parallel,
    reference,
    sparse_decode,
)
from sparsemla.kernels.attention import schedule
from sparsemla.kernels.attention.schedule import DecodeWork
from sparsemla.kernels.attention.sm90 import fp8_mma
from sparsemla.kernels.common.device import GPUS, simulated
from sparsemla.kernels.common.fp4 import encode_e2m1
from sparsemla.kernels.exchange import Inboxes
from sparsemla.kernels.exchange.arguments import SLOTS, inbox_width
from sparsemla_lab.testing import checkpoints
from sparsemla_lab.testing.cases import Draw, decode_queries, prefill_rows
from sparsemla_lab.testing.compare import (
    DECODE_LSE,
    SPARSE_DECODE_OUT,
    SPARSE_PREFILL_LSE,
    SPARSE_PREFILL_OUT,
    Tolerance,
    assert_close,
    assert_equal,
)
from vllm_layers import imported_from_vllm, one_rank  # noqa: F401 - a fixture

pytestmark = pytest.mark.filterwarnings("default")

PAGE_SIZE = 64
TOPK = 128
MAX_TOKENS = 64
LAYER = "model.layers.0.self_attn.attn"

# A DeepSeek-V3.2 of two layers; only its attention and its indexer have their true dims.
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


@pytest.fixture(scope="session")
def model_config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16")


def engine_config(model_config, dtype="auto", max_tokens=MAX_TOKENS, **changes):
    """vLLM's configuration of an engine with that model."""
    return VllmConfig(
        model_config=model_config,
        device_config=DeviceConfig(device="cpu"),
        cache_config=CacheConfig(block_size=PAGE_SIZE, cache_dtype=dtype),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=max_tokens,
            max_num_seqs=8,
            max_model_len=model_config.max_model_len,
            is_encoder_decoder=False,
        ),
        **changes,
    )


@pytest.fixture
def config(model_config, monkeypatch):
    """That configuration, current while the test runs, with an attention layer in it."""
    config = engine_config(model_config)
    layer = SimpleNamespace(prefill_backend=None)
    config.compilation_config.static_forward_context[LAYER] = layer
    for module in (sparse_mla_attention, mla_attention, torch_utils):
        monkeypatch.setattr(module, "PIN_MEMORY", torch.cuda.is_available())
    if not torch.cuda.is_available():  # where a growing workspace has nothing to give back
        monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    with set_current_vllm_config(config):
        yield config


@pytest.fixture(scope="session")
def fork():
    """Makes processes that begin with vLLM imported, which takes longer than what they do."""
    # Imported by the server, not by this process: here, vLLM has state already.
    torch.multiprocessing.set_forkserver_preload(["vllm.models.deepseek_v32.attention"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
        forkserver.ensure_running()
    return torch.multiprocessing.get_context("forkserver")


CHILD = """
import os, sys
out, err, plugins, code = {!r}
for stream, path in ((sys.stdout, out), (sys.stderr, err)):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream.fileno())
os.environ["VLLM_PLUGINS"] = plugins
exec(code)
"""


@pytest.fixture
def run_code(fork, tmp_path):
    """Runs code in a new process with these plugins; its exit code, output and errors."""
    out, err = tmp_path / "out", tmp_path / "err"

    def run(code, plugins):
        child = CHILD.format((str(out), str(err), plugins, code))
        process = fork.Process(target=exec, args=(child, {}))  # which imports nothing of this file
        process.start()
        process.join()
        return process.exitcode, out.read_text(), err.read_text()

    return run


FIND_PLUGINS = """
import pickle
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.model_executor.custom_op import op_registry_oot
print(pickle.loads({!r}).get_class().__qualname__, len(op_registry_oot))
"""


def test_plugins_are_found_in_a_new_process(run_code):
    code = FIND_PLUGINS.format(pickle.dumps(AttentionBackendEnum.CUSTOM))
    status, out, _ = run_code(code, "sparsemla,sparsemla_indexer")
    assert (status, out.split()) == (0, ["SparseMLABackend", "2"])


@pytest.fixture
def plain_vllm(monkeypatch):
    """vLLM's registries, put back afterwards, and no embedding of a test with other settings."""
    monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
    for registry in (op_registry_oot, ModelRegistry.models):
        for name in {*GENERIC_MODELS, *registry} & set(registry):
            monkeypatch.setitem(registry, name, registry[name])
    monkeypatch.setattr(CompilationConfig, "_attention_ops", [*CompilationConfig._attention_ops])
    yield
    op_registry_oot.clear()


def test_the_backend_can_be_registered_twice():
    register()
    register()
    assert AttentionBackendEnum.CUSTOM.get_class() is attention.SparseMLABackend
    assert AttentionBackendEnum[attention.SparseMLABackend.get_name()].name == "CUSTOM"


def test_the_indexer_can_be_registered_twice(plain_vllm, monkeypatch):
    monkeypatch.setattr(envs, "VLLM_PLUGINS", ["sparsemla", "sparsemla_indexer"], raising=False)
    register_the_indexer()
    register_the_indexer()
    assert op_registry_oot["MultiHeadLatentAttentionWrapper"] is wrapper.SparseMLAWrapper
    assert op_registry_oot["SparseAttnIndexer"] is indexer.IdleIndexerOp
    assert CompilationConfig._attention_ops.count(indexer.OPERATOR) == 1
    for architecture, path in GENERIC_MODELS.items():
        model = ModelRegistry.models[architecture].load_model_cls()
        assert f"{model.__module__}:{model.__name__}" == path


@pytest.mark.parametrize("plugins", [None, [], ["sparsemla"]], ids=["unset", "empty", "attention"])
def test_the_indexer_is_not_registered_unless_named(plain_vllm, monkeypatch, plugins):
    monkeypatch.setattr(envs, "VLLM_PLUGINS", plugins, raising=False)
    register_the_indexer()
    assert not op_registry_oot
    assert indexer.OPERATOR not in CompilationConfig._attention_ops


OVERRIDDEN = {
    "SparseMLAIndexer.forward": (indexer.SparseMLAIndexer.forward, Indexer.forward),
    "PooledIndexer.forward": (pooled.PooledIndexer.forward, pooled.Indexer.forward),
    "sparse_attn_indexer": (nvidia.sparse_attn_indexer, sparse_attn_indexer.sparse_attn_indexer),
}
for module in (
    attention,
    host,
    host_attention,
    hy_v4,
    indexer,
    nvidia,
    pooled,
    recording,
    warmup,
    wrapper,
):
    OVERRIDDEN |= surface.overridden(module)
ROWS = {(name, row.path): row for name, rows in surface.SURFACE.items() for row in rows}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_signatures_match_vllm(name):
    ours, theirs = OVERRIDDEN[name]
    assert surface.parameters(ours) == surface.parameters(theirs)


@pytest.mark.parametrize("key", ROWS, ids=" ".join)
def test_what_is_touched_fits_vllm(key):
    assert ROWS[key].problem() is None


@pytest.mark.parametrize(
    "name",
    [
        "__init__",
        "attention",
        "host",
        "host_attention",
        "hy_v4",
        "indexer",
        "exchange",
        "nvidia",
        "pooled",
        "recorded",
        "recording",
        "settings",
        "warmup",
        "wrapper",
    ],
)
def test_every_import_from_vllm_has_a_row(name):
    imported = imported_from_vllm(Path(plugins.__file__).parent / f"{name}.py")
    rows = surface.SURFACE.get(name, surface.ATTENTION + surface.INDEXER)
    rows += surface.INDEXER if name == "nvidia" else ()
    assert imported - {"vllm.logger:init_logger"} <= {row.path for row in rows}


@pytest.mark.parametrize(
    ("path", "needs", "reason"),
    [
        ("vllm.gone:name", (), "No module named 'vllm.gone'"),
        ("vllm.envs:gone", (), "no attribute 'gone'"),
        ("vllm.config:VllmConfig", ("model_config", "gone"), "no gone"),
        ("vllm.v1.attention.backends.registry:register_backend", ("gone", "lost"), "no gone, lost"),
    ],
)
def test_what_no_longer_fits_is_named(path, needs, reason):
    row = surface.Dependency(path, "a purpose", needs)
    assert row.problem().startswith(f"{path} (a purpose): ")
    assert reason in row.problem()
    with pytest.raises(RuntimeError, match=f"does not fit this vLLM: {path}"):
        surface.check([row])


def test_a_function_with_other_parameters_is_named(monkeypatch):
    monkeypatch.setattr(attention.SparseMLABackend, "get_name", lambda name: name)
    (problem,) = surface.problems((), attention)
    assert problem == (
        "vllm.v1.attention.backend:AttentionBackend.get_name "
        "(overridden by SparseMLABackend.get_name): other parameters"
    )


@pytest.mark.parametrize("rows", ["ATTENTION", "INDEXER"])
def test_a_vllm_that_does_not_fit_stops_the_start(plain_vllm, monkeypatch, rows):
    row = surface.Dependency("vllm:gone", "a purpose")
    monkeypatch.setattr(plugins, rows, (row,))
    monkeypatch.setattr(envs, "VLLM_PLUGINS", ["sparsemla_indexer"], raising=False)
    register()
    start = AttentionBackendEnum.CUSTOM.get_class if rows == "ATTENTION" else register_the_indexer
    with pytest.raises(RuntimeError, match="vllm:gone"):
        start()


OTHER_VERSION = """
import vllm
vllm.__version__, vllm.__version_tuple__ = "0.34.1", (0, 34, 1)
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.v1.attention.backends.registry import AttentionBackendEnum
try:
    AttentionBackendEnum.CUSTOM.get_class()
except ValueError:
    print("no backend")
"""


@pytest.mark.parametrize("names", ["sparsemla", "sparsemla,sparsemla_indexer"])
def test_another_version_of_vllm_gets_one_line(run_code, names):
    status, out, err = run_code(OTHER_VERSION, names)
    said = [line for line in (out + err).splitlines() if "sparsemla supports" in line]
    assert all("supports vLLM 0.33, found 0.34.1: " in line for line in said)
    assert "Traceback" not in err
    if names == "sparsemla":  # a server of other models goes on
        assert (len(said), status, out.endswith("no backend\n")) == (1, 0, True)
    else:
        assert err.endswith("remove sparsemla_indexer from VLLM_PLUGINS\n")
        assert (status, "no backend" in out) == (1, False)


def test_nothing_abstract_is_left():
    for cls in (
        attention.SparseMLABackend,
        attention.SparseMLAMetadataBuilder,
        attention.SparseMLAImpl,
        host.HostRowsConnector,
        host_attention.HostRowsImpl,
        host_attention.HostRowsMetadataBuilder,
        indexer.IndexerMetadataBuilder,
        warmup.Kernels,
    ):
        assert not inspect.isabstract(cls), cls.__abstractmethods__


def refusals(**changes):
    arguments = {
        "head_size": 576,
        "dtype": torch.bfloat16,
        "kv_cache_dtype": "fp8_ds_mla",
        "block_size": None,
        "use_mla": True,
        "has_sink": False,
        "use_sparse": True,
        "use_mm_prefix": False,
        "use_per_head_quant_scales": False,
        "device_capability": DeviceCapability(9, 0),
        "attn_type": AttentionType.DECODER,
    }
    return attention.SparseMLABackend.validate_configuration(**arguments | changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"kv_cache_dtype": None},
        {"kv_cache_dtype": "auto"},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "fp8_ds_mla"},
        {"block_size": 64},
        {"block_size": 128},
        {"device_capability": DeviceCapability(8, 0)},
        {"device_capability": DeviceCapability(8, 6)},
        {"device_capability": DeviceCapability(12, 0)},
        {"use_dcp": True},
        {"use_pcp": True},
        {"use_adaptive_verification": True},
        {"use_kv_connector": True},
        {"has_sink": True},
    ],
    ids=str,
)
def test_served(config, changes):
    assert refusals(**changes) == []


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype must be one of auto, bfloat16, fp8_ds_mla"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "got nvfp4_ds_mla"),
        ({"kv_cache_dtype": "float16"}, "got float16"),
        ({"head_size": 320}, "head_size not supported"),
        ({"dtype": torch.float16}, "dtype not supported"),
        ({"block_size": 32}, "block_size not supported"),
        ({"device_capability": DeviceCapability(7, 5)}, "compute capability not supported"),
        ({"use_sparse": False}, "non-sparse not supported"),
        ({"use_mla": False}, "non-MLA not supported"),
        ({"use_non_causal": True}, "non-causal attention not supported"),
        ({"has_sliding_window": True}, "sliding window not supported"),
    ],
    ids=str,
)
def test_refused(config, changes, reason):
    assert any(reason in got for got in refusals(**changes))


@pytest.fixture
def batch_invariant(monkeypatch):
    """vLLM's mode in which results do not depend on the batch."""
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    monkeypatch.setattr(envs, "VLLM_PLUGINS", ["sparsemla", "sparsemla_indexer"], raising=False)


def test_batch_invariance_is_served(config, batch_invariant):
    assert refusals(use_batch_invariant=True) == []
    assert indexer.IndexerBackend.supports_batch_invariance()


@pytest.mark.parametrize(
    ("where", "value", "reason"),
    [
        ("plugins", ["sparsemla"], "needs sparsemla_indexer in VLLM_PLUGINS"),
        ("plugins", None, "needs sparsemla_indexer in VLLM_PLUGINS"),
        ("device_capability", DeviceCapability(8, 9), "needs sm_90: .* got sm_89"),
        ("index_topk", 4224, "needs an index_topk of at most 4096 or .* got 4224"),
        ("hisparse_config", HiSparseConfig(), "needs HiSparse off"),
    ],
    ids=str,
)
def test_batch_invariance_is_refused_where_results_could_change(
    config, batch_invariant, monkeypatch, where, value, reason
):
    changes = {"use_batch_invariant": True}
    if where == "plugins":
        monkeypatch.setattr(envs, "VLLM_PLUGINS", value, raising=False)
    elif where == "index_topk":
        monkeypatch.setattr(config.model_config.hf_text_config, where, value)
    elif where == "hisparse_config":
        monkeypatch.setattr(config.attention_config, where, value)
    else:
        changes[where] = value
    (got,) = refusals(**changes)
    assert re.search(reason, got)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"index_topk": 100}, "index_topk must be a multiple of 128, got 100"),
        ({"index_topk": None}, "index_topk must be a multiple of 128, got None"),
        ({"kv_lora_rank": 256}, "must be (512, 64) or (512, 0), got (256, 64)"),
        ({"qk_rope_head_dim": 32}, "must be (512, 64) or (512, 0), got (512, 32)"),
    ],
    ids=str,
)
def test_models_with_other_dims_are_refused(config, monkeypatch, changes, reason):
    for name, value in changes.items():
        monkeypatch.setattr(config.model_config.hf_text_config, name, value)
    (got,) = refusals()
    assert reason in got


class Batch:
    """Requests with pages, in vLLM's own words, and a cache with NaN in every row but theirs.

    Args:
        draw: randomness.
        query_lens: of the requests, decodes first; 0 for padding.
        seq_lens: of the requests, this step's tokens included.
        padded_tokens: rows behind the last request.
        topk: tokens that a token selects.
        block_table: pages of the requests; random ones if None.
        columns: least width of the block table.
        spare: tokens by which lengths on the host may exceed those on the device.
    """

    def __init__(
        self,
        draw,
        query_lens,
        seq_lens,
        padded_tokens=0,
        topk=TOPK,
        block_table=None,
        columns=0,
        spare=0,
    ):
        self.draw, self.query_lens, self.seq_lens = draw, query_lens, seq_lens
        self.topk, self.spare = topk, spare
        self.tokens = sum(query_lens)
        self.rows = self.tokens + padded_tokens
        width = max(1, *(-(-length // PAGE_SIZE) for length in seq_lens))
        self.num_blocks = 2 * len(seq_lens) * width
        pages = draw.permutation(self.num_blocks)[: len(seq_lens) * width]
        self.block_table = pages.view(len(seq_lens), width).int()
        if block_table is not None:
            self.block_table = block_table
        if columns > width:
            self.block_table = pad(self.block_table, (0, columns - width))
        requests = [torch.full((n,), i) for i, n in enumerate(query_lens)]
        self.request_ids = torch.cat(requests).int()
        positions = [torch.arange(s - q, s) for q, s in zip(query_lens, seq_lens, strict=True)]
        self.positions = torch.cat(positions)
        page = self.block_table[self.request_ids, self.positions // PAGE_SIZE].long()
        self.slot_mapping = page * PAGE_SIZE + self.positions % PAGE_SIZE

    def common(self):
        query_start_loc = torch.tensor([0, *self.query_lens]).cumsum(0).int()
        seq_lens = torch.tensor(self.seq_lens).int()
        return CommonAttentionMetadata(
            query_start_loc=query_start_loc,
            query_start_loc_cpu=query_start_loc,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens + self.spare,
            num_reqs=len(self.seq_lens),
            num_actual_tokens=self.rows,
            max_query_len=max(self.query_lens),
            max_seq_len=max(self.seq_lens) + self.spare,
            block_table_tensor=self.block_table,
            slot_mapping=torch.cat([self.slot_mapping, self.slot_mapping.new_full((9,), -1)])[
                : self.rows
            ],
        )

    def cache(self, fmt, layers=3):
        """Pages of one of several layers that share blocks, so that blocks lie apart."""
        blocks = torch.full(
            (self.num_blocks, layers, PAGE_SIZE * fmt.bytes_per_token), 255, dtype=torch.uint8
        )
        pages = blocks[:, 1].view(fmt.storage_dtype).unflatten(-1, (PAGE_SIZE, fmt.row_width))
        cache = PagedCache(pages, fmt)
        for request, length in enumerate(self.seq_lens):
            position = torch.arange(length)
            page = self.block_table[request, position // PAGE_SIZE].long()
            rows = prefill_rows(self.draw, length, fmt.head_dim)
            cache.write(page * PAGE_SIZE + position % PAGE_SIZE, rows)
        return cache

    def selections(self):
        """What the indexer leaves in its buffer ``[max_tokens, topk]``; garbage behind the batch.

        Tokens select of all that they may see, in no order and with gaps; the first sees nothing.
        """
        buffer = torch.full((max(self.rows, MAX_TOKENS), self.topk), 2**31 - 1, dtype=torch.int32)
        for token, position in enumerate(self.positions.tolist()):
            chosen = self.draw.permutation(position + 1)[: self.topk].int()
            row = torch.full((self.topk,), -1, dtype=torch.int32)
            row[self.draw.permutation(self.topk)[: len(chosen)]] = chosen
            buffer[token] = row
        buffer[0] = -1
        return buffer


def builder(config, dtype="auto", head_size=576):
    fmt = attention.format_of(dtype, head_size)
    spec = MLAAttentionSpec(
        block_size=PAGE_SIZE,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=head_size,
        dtype=fmt.storage_dtype,
        cache_dtype_str=dtype,
        state_content_bytes=fmt.bytes_per_token if dtype == "fp8_ds_mla" else None,
    )
    spec = attention.SparseMLABackend.customize_spec(spec)
    return attention.SparseMLAMetadataBuilder(spec, [LAYER], config, torch.device("cpu"))


def layer(buffer, num_heads, dtype="auto", **changes):
    arguments = {
        "num_heads": num_heads,
        "head_size": 576,
        "scale": 192**-0.5,
        "num_kv_heads": 1,
        "alibi_slopes": None,
        "sliding_window": None,
        "kv_cache_dtype": dtype,
        "logits_soft_cap": None,
        "attn_type": AttentionType.DECODER,
        "kv_sharing_target_layer_name": None,
        "q_lora_rank": 128,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 192,
        "v_head_dim": 128,
        "kv_b_proj": None,
        "indexer": None,
        "topk_indices_buffer": buffer,
    }
    return attention.SparseMLAImpl(**arguments | changes)


@contextlib.contextmanager
def locked_workspace():
    """The workspace as vLLM locks it once graphs are captured; asking for more ends the engine."""
    manager = current_workspace_manager()
    manager.lock()
    try:
        yield
    finally:
        manager.unlock()


NOPE = {"head_size": 512, "qk_rope_head_dim": 0, "qk_head_dim": 128}
"""A layer of GLM-5.3-Flash, whose rows have no RoPE."""


def check_layer(config, batch, num_heads, dtype="auto", one_piece=False, **changes):
    """A layer's attention against the reference; its results."""
    head_size = changes.get("head_size", 576)
    cache = batch.cache(attention.format_of(dtype, head_size))
    buffer = batch.selections()
    q = decode_queries(batch.draw, batch.rows, num_heads, head_size)
    metadata = builder(config, dtype, head_size).build(0, batch.common())
    parts = q if one_piece else (q[..., :512].contiguous(), q[..., 512:].contiguous())
    made = layer(buffer, num_heads, dtype, **changes)
    with locked_workspace():
        out, lse = made.forward_mqa(parts, cache.data, metadata, None)

    tokens = batch.tokens
    slots = reference.to_slots(
        buffer[:tokens], batch.block_table, batch.request_ids, page_size=PAGE_SIZE
    )
    expected = reference.sparse_prefill(q[:tokens], cache, slots, softmax_scale=192**-0.5)
    decodes = metadata.num_decode_tokens == batch.rows
    assert_close(
        "out", out[:tokens], expected[0], SPARSE_DECODE_OUT if decodes else SPARSE_PREFILL_OUT
    )
    assert_close("lse", lse[:tokens], expected[1], DECODE_LSE if decodes else SPARSE_PREFILL_LSE)
    assert (out[0] == 0).all()
    assert (lse[0] == -torch.inf).all()
    return out, lse


DTYPES = ["auto", "bfloat16", "fp8_ds_mla"]
MIXED = {"query_lens": [1, 1, 9, 5], "seq_lens": [200, 64, 137, 5]}


@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("num_heads", [1, 8, 16, 24, 128])
def test_decodes_and_prefills_in_one_batch(config, num_heads, dtype):
    check_layer(config, Batch(Draw(0), **MIXED), num_heads, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_heads", [1, 8, 16, 24, 128])
def test_decodes(config, num_heads, dtype):
    check_layer(config, Batch(Draw(0), [1, 1, 1], [1, 65, 300]), num_heads, dtype)


@pytest.mark.parametrize("one_piece", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lens", [MIXED, {"query_lens": [1, 1, 1], "seq_lens": [1, 65, 300]}])
def test_rows_without_rope(config, lens, dtype, one_piece):
    """vLLM's lists of pooled tokens are wider than the model's selection, by their open pool."""
    batch = Batch(Draw(0), **lens, topk=TOPK + 128)
    check_layer(config, batch, 8, dtype, one_piece, **NOPE)


def test_contexts_of_rows_without_rope_may_be_converted_first(engine):
    made = engine(8, MAX_TOKENS, 4096)
    batch = Batch(Draw(0), **CONVERTED, topk=SELECTED)
    assert builder(made, "fp8_ds_mla", 512).build(0, batch.common()).converted
    check_layer(made, batch, 8, "fp8_ds_mla", **NOPE)


def test_rows_without_rope_have_no_zeros(config):
    buffer = Batch(Draw(0), [1], [1]).selections()
    assert layer(buffer, 8, "auto", **NOPE).format == bf16_format(512)
    assert builder(config, "bfloat16", 512).format == bf16_format(512)
    assert layer(buffer, 8, "fp8_ds_mla", **NOPE).format == FP8_NOPE
    assert builder(config, "fp8_ds_mla", 512).format == FP8_NOPE
    assert not layer(buffer, 8, "fp8_ds_mla", **NOPE).supports_dense_mha_prefill
    assert layer(buffer, 8, "auto", **NOPE).supports_dense_mha_prefill
    assert layer(buffer, 8, "fp8_ds_mla").supports_dense_mha_prefill


def test_what_moves_rows_of_656_bytes_is_refused_for_rows_without_rope(config, monkeypatch):
    monkeypatch.setattr(config.model_config.hf_text_config, "qk_rope_head_dim", 0)
    monkeypatch.setattr(config.attention_config, "hisparse_config", object())
    (reason,) = refusals(head_size=512, kv_cache_dtype="fp8_ds_mla")
    assert reason.startswith("rows without RoPE need HiSparse off or --kv-cache-dtype auto")
    assert refusals(head_size=512, kv_cache_dtype="auto") == []


def test_other_settings_that_are_refused_for_rows_without_rope(config, monkeypatch):
    monkeypatch.setattr(config.model_config.hf_text_config, "qk_rope_head_dim", 0)
    with monkeypatch.context() as change:
        change.setattr(envs, "VLLM_PLUGINS", ["sparsemla_indexer"], raising=False)
        change.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
        (reason,) = refusals(head_size=512)
        assert reason.startswith("batch invariance needs rows with RoPE")
    monkeypatch.setattr(config.parallel_config, "prefill_context_parallel_size", 2)
    (reason,) = refusals(head_size=512)
    assert reason.startswith("rows without RoPE need --prefill-context-parallel-size 1")


def test_glm_5_3_is_served(config, monkeypatch):
    monkeypatch.setattr(config.model_config.hf_text_config, "qk_rope_head_dim", 0)
    for dtype in DTYPES:
        assert refusals(head_size=512, kv_cache_dtype=dtype) == []


SELECTED = 2048
"""Tokens that DeepSeek-V3.2 selects, which the measurements are for."""
CONVERTED = {"query_lens": [1, 1, 9, 5], "seq_lens": [200, 64, 1900, 1300]}


@pytest.fixture
def like_hopper(monkeypatch):
    """The CPU's tier with the measurements of Hopper's."""
    converts_first = schedule.converts_first

    def on_hopper(*work, **sizes):
        with simulated(GPUS["sm_90"]):
            return converts_first(*work, **sizes)

    monkeypatch.setattr(schedule, "converts_first", on_hopper)


@pytest.fixture
def engine(config, like_hopper, tmp_path, monkeypatch):
    """Makes the current configuration one of a model that selects as many as DeepSeek-V3.2."""
    monkeypatch.setattr(workspace, "_manager", None)
    init_workspace_manager(torch.device("cpu"))
    with contextlib.ExitStack() as stack:

        def make(num_heads, max_tokens, max_length):
            heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_heads}
            sizes = {"index_topk": SELECTED, "max_position_embeddings": max_length}
            (tmp_path / "config.json").write_text(json.dumps(CONFIG | heads | sizes))
            model = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16")
            made = engine_config(model, max_tokens=max_tokens)
            forward = config.compilation_config.static_forward_context
            made.compilation_config.static_forward_context.update(forward)
            stack.enter_context(set_current_vllm_config(made))
            return made

        yield make


@pytest.mark.parametrize(
    "batch", [CONVERTED, {"query_lens": [7, 5], "seq_lens": [1200, 1900]}], ids=str
)
@pytest.mark.parametrize("pieces", [1, 2])
def test_contexts_of_prefills_may_be_converted_first(engine, batch, pieces):
    made = engine(8, MAX_TOKENS, 4096 if pieces == 1 else 1900)
    common = Batch(Draw(0), **batch).common()
    assert len(builder(made, "fp8_ds_mla").build(0, common).converted.prefill_chunks) == pieces
    check_layer(made, Batch(Draw(0), **batch, topk=SELECTED), 8, "fp8_ds_mla")
    padded = Batch(Draw(0), **batch, padded_tokens=3, topk=SELECTED)
    out, _ = check_layer(made, padded, 8, "fp8_ds_mla")
    assert (out[-3:] == 0).all()


@pytest.mark.parametrize("spare", [1, 7])
def test_lengths_on_the_host_may_be_upper_bounds(engine, spare):
    """As in async scheduling, where the host does not know yet which drafts were accepted."""
    made = engine(8, MAX_TOKENS, 4096)
    for lens in (CONVERTED, {"query_lens": [2, 1, 1], "seq_lens": [200, 64, 131]}):
        check_layer(made, Batch(Draw(0), **lens, topk=SELECTED, spare=spare), 8, "fp8_ds_mla")


def test_decodes_beside_prefills_that_run_as_dense_attention(engine):
    """vLLM computes short prompts itself, and hands on the queries of the decodes alone."""
    made = engine(8, MAX_TOKENS, 4096)
    batch = Batch(Draw(0), **CONVERTED, topk=SELECTED)
    cache, buffer = batch.cache(attention.FORMATS["fp8_ds_mla"]), batch.selections()
    q = decode_queries(batch.draw, batch.rows, 8, 576)
    metadata = builder(made, "fp8_ds_mla").build(0, batch.common())
    assert metadata.converted
    attend = layer(buffer, 8, "fp8_ds_mla").forward_mqa
    expected = attend(q, cache.data, metadata, None)
    decodes = metadata.num_decode_tokens
    parts = q[:decodes, :, :512].contiguous(), q[:decodes, :, 512:].contiguous()
    results = attend(parts, cache.data, metadata, None)
    for result, wanted in zip(results, expected, strict=True):
        assert_equal("decodes", result, wanted[:decodes])


LONGEST = 1 << 17
"""Of the sweep's requests."""


def sweep(max_tokens):
    """Steps of one request and of several, around everything that the decision depends on."""
    contexts = [0, 2000, 9000, 12000, 24000, 36000, 60000, 89000, LONGEST]
    for tokens in {min(n, max_tokens) for n in (2, 66, 132, 133, max_tokens - 1, max_tokens)}:
        for context in contexts:
            length = min(context + tokens, LONGEST)
            yield [tokens], [length]
            yield [1, tokens - 1], [length, length]
            yield [tokens - tokens // 2, tokens // 2], [length, tokens]


@pytest.mark.parametrize("max_tokens", [8, 64, 198, 256, 354])
@pytest.mark.parametrize("num_heads", [8, 64, 128])
def test_no_step_outgrows_the_locked_workspace(engine, monkeypatch, num_heads, max_tokens):
    converted = []  # rows; nothing is computed

    def note(*args, out):
        converted.append(out.shape[0])

    monkeypatch.setattr(attention, "gather_dequant", note)
    nothing = torch.full((max_tokens, SELECTED), -1, dtype=torch.int32)
    for name in ("sparse_prefill", "to_slots"):
        monkeypatch.setattr(attention, name, lambda *args, **kwargs: nothing)
    made = engine(num_heads, max_tokens, LONGEST)
    attend, step = layer(nothing, num_heads, "fp8_ds_mla").forward_mqa, builder(made, "fp8_ds_mla")
    pages = torch.zeros(1, PAGE_SIZE, 656, dtype=torch.uint8)
    steps = 0
    for query_lens, seq_lens in sweep(max_tokens):
        metadata = step.build(0, Batch(Draw(0), query_lens, seq_lens).common())
        if metadata.converted:
            q = torch.empty(sum(query_lens), num_heads, 576, dtype=torch.bfloat16)
            with locked_workspace():
                attend(q, pages, metadata, None)
            assert converted == [
                each.num_workspace_rows for each in metadata.converted.prefill_chunks
            ]
            converted.clear()
            steps += 1
    assert steps


def test_contexts_beyond_the_longest_are_read_in_place(engine):
    """As vLLM's bounds of lengths may be, which count drafts that were not accepted."""
    made = engine(8, MAX_TOKENS, max(CONVERTED["seq_lens"]) - 1)
    batch = Batch(Draw(0), **CONVERTED, topk=SELECTED)
    assert builder(made, "fp8_ds_mla").build(0, batch.common()).converted
    check_layer(made, batch, 8, "fp8_ds_mla")


def test_nothing_is_converted_where_nothing_was_measured(config):
    metadata = builder(config, "fp8_ds_mla").build(0, Batch(Draw(0), **MIXED).common())
    assert metadata.converted is None


class HostRows:
    """What vLLM's CUDA ops do for HiSparse: they bring rows of a host cache to the GPU.

    Args:
        source: the rows of a layer on the host.
        hot_pages: of the buffer on the GPU.
    """

    is_group_leader, eager_host_mirror = True, True

    def __init__(self, source, hot_pages=40):
        self.source = source.contiguous()
        raw = torch.full((hot_pages * self.source[0].nbytes,), -1, dtype=torch.int8)  # NaN
        self.hot = runtime.PagedCacheView.bind(
            raw,
            dtype=self.source.dtype,
            row_width=self.source.shape[-1],
            byte_offset=0,
            block_stride=self.source[0].nbytes,
            num_blocks=hot_pages,
            block_size=PAGE_SIZE,
        )
        self.max_swap_rows = MAX_TOKENS
        self.staged = 0

    def begin_forward(self):
        pass

    def swap_in(self, *, req_id_per_token, block_table, logical_topk_indices, **arguments):
        """Rows of the hot buffer in the place of positions, in another order."""
        requests = req_id_per_token[: len(logical_topk_indices), None].long()
        positions = logical_topk_indices.clamp(min=0).long()
        slots = block_table[requests, positions // PAGE_SIZE].long() * PAGE_SIZE
        slots = (slots + positions % PAGE_SIZE).masked_fill(logical_topk_indices < 0, -1)
        needed = slots[slots >= 0].unique()
        hot = self.hot.attention_cache.flatten(0, 1)
        places = torch.arange(len(needed)).flip(0) + 3
        hot.view(torch.uint8).fill_(255)
        hot[places] = self.source.flatten(0, 1)[needed]
        counts = (slots >= 0).sum(1).int()
        found = places[torch.searchsorted(needed, slots.clamp(min=0)).clamp(max=len(needed) - 1)]
        found = found.masked_fill(slots < 0, -1).int()
        return found.gather(1, (found < 0).int().argsort(dim=1, stable=True)), counts

    def gather_prefill_cache(self, kv_cache, plan, resident_cache=None):
        assert kv_cache.shape[1] == plan.block_size == PAGE_SIZE
        rows = self.source.flatten(0, 1)[plan.row_ids[0].clamp(min=0).long()]
        self.staged += 1
        return rows.unflatten(0, (-1, PAGE_SIZE)).contiguous()


@pytest.fixture
def on_host(config, monkeypatch):
    """Makes a layer whose rows are on the host; vLLM's classes bring them by :class:`HostRows`."""
    monkeypatch.setattr(config.attention_config, "hisparse_config", HiSparseConfig())
    backend = SimpleNamespace(prepare_metadata=lambda prefill: None)
    backend.clone = lambda: backend
    config.compilation_config.static_forward_context[LAYER].prefill_backend = backend

    def make(cache, batch, num_heads, dtype):
        rows = HostRows(cache.data)
        handle = runtime.HiSparseCacheHandle(rows)
        handle.all_context_pages_resident = False
        handle.source_block_table = batch.block_table
        monkeypatch.setattr(index_group, "create_hisparse_cache_handle", lambda *a, **k: handle)
        return layer(batch.selections(), num_heads, dtype), rows

    return make


ON_HOST = {
    "decodes": {"query_lens": [1, 1, 1], "seq_lens": [200, 64, 131]},
    "speculative": {"query_lens": [3, 1, 2], "seq_lens": [200, 3, 131]},
    "prefills": {"query_lens": [5, 33], "seq_lens": [5, 300]},
    "both": MIXED,
}


@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("name", ON_HOST)
def test_rows_on_the_host_are_read_where_vllm_brings_them(
    config, on_host, monkeypatch, name, dtype
):
    if name == "speculative":
        drafts = SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False)
        monkeypatch.setattr(config, "speculative_config", drafts)
    batch = Batch(Draw(0), **ON_HOST[name])
    cache = batch.cache(attention.FORMATS[dtype])
    made, rows = on_host(cache, batch, 16, dtype)
    assert made.rows_on_gpu(cache.data) is rows.hot.attention_cache
    metadata = builder(config, dtype).build(0, batch.common())
    assert metadata.num_prefills == {"prefills": 2, "both": 2}.get(name, 0)
    if metadata.num_prefills:
        assert metadata.prefill.host_staging_plan is not None
    made.prepare_for_batch(metadata)
    q = decode_queries(batch.draw, batch.rows, 16, 576)
    elsewhere = torch.empty_like(rows.source).fill_(torch.nan if dtype == "auto" else 255)
    out, lse = made.forward_mqa(q, elsewhere, metadata, None)
    slots = reference.to_slots(
        made.topk_indices_buffer[: batch.tokens], batch.block_table, batch.request_ids,
        page_size=PAGE_SIZE,
    )  # fmt: skip
    expected = reference.sparse_prefill(q, cache, slots, softmax_scale=192**-0.5)
    assert_close("out", out, expected[0], SPARSE_DECODE_OUT)
    assert_close("lse", lse, expected[1], DECODE_LSE)
    assert rows.staged == bool(metadata.num_prefills)


def test_rows_on_the_host_are_not_converted(engine, monkeypatch):
    made = engine(16, MAX_TOKENS, 4096)
    batch = Batch(Draw(0), **CONVERTED, topk=SELECTED)
    assert builder(made, "fp8_ds_mla").build(0, batch.common()).converted
    monkeypatch.setattr(made.attention_config, "hisparse_config", HiSparseConfig())
    assert builder(made, "fp8_ds_mla").build(0, batch.common()).converted is None
    monkeypatch.setattr(
        index_group, "create_hisparse_cache_handle", lambda *a, **k: SimpleNamespace()
    )
    selections = batch.selections()
    assert layer(selections, 16, "fp8_ds_mla").conversion_rows == 0
    monkeypatch.setenv("SPARSEMLA_FP8_MMA", "1")
    with pytest.raises(ValueError, match="HiSparse must be off, as rows on the host are not conv"):
        layer(selections, 64, "fp8_ds_mla")


def test_the_buffer_of_rows_on_the_host_is_warmed_up(
    run_python, config, on_host, calls, monkeypatch
):
    with warmed_up(config, monkeypatch) as configurations:
        for lens in ON_HOST.values():
            batch = in_engine(config, **lens)
            cache = batch.cache(attention.FORMATS["fp8_ds_mla"])
            made, rows = on_host(cache, batch, 16, "fp8_ds_mla")
            metadata = builder(config, "fp8_ds_mla").build(0, batch.common())
            made.prepare_for_batch(metadata)
            q = decode_queries(batch.draw, batch.rows, 16, 576)
            parts = q[..., :512].contiguous(), q[..., 512:].contiguous()
            made.forward_mqa(parts, rows.source, metadata, None)
        config.compilation_config.static_forward_context[LAYER] = SimpleNamespace(
            impl=made, kv_cache=cache.data
        )
    (serving,) = configurations
    assert (serving.num_pages, serving.page_stride) == (40, 656 * PAGE_SIZE)
    assert replay.missing_kernels(run_python, calls, *configurations) == []


@pytest.fixture
def permitting(monkeypatch):
    """``SPARSEMLA_FP8_MMA=1`` on the CPU, which layers believe to be Hopper."""
    monkeypatch.setenv("SPARSEMLA_FP8_MMA", "1")
    monkeypatch.setattr(attention, "describe", lambda device: GPUS["sm_90"])


@pytest.mark.parametrize("permitted", [False, True])
def test_prefills_over_converted_rows_alone_may_permit_fp8_mma(engine, calls, request, permitted):
    if permitted:
        request.getfixturevalue("permitting")
    made = engine(40, MAX_TOKENS, 4096)
    for lens, converts in ((CONVERTED, True), (MIXED, False)):
        calls.clear()
        check_layer(made, Batch(Draw(0), **lens, topk=SELECTED), 40, "fp8_ds_mla")
        assert ("gather_dequant" in [op for op, *_ in calls]) == converts
        given = [options.get("allow_fp8_mma") for op, _, options in calls if op == "sparse_prefill"]
        assert given == [permitted if converts else None]


@pytest.mark.parametrize("value", [None, "0", "1"])
def test_vllms_log_names_the_permission_once(engine, monkeypatch, caplog, value):
    monkeypatch.setattr(attention, "describe", lambda device: GPUS["sm_90"])
    monkeypatch.delenv("SPARSEMLA_FP8_MMA", raising=False)
    if value is not None:
        monkeypatch.setenv("SPARSEMLA_FP8_MMA", value)
    caplog.set_level("INFO", attention.LOGGER.name)
    _print_info_once.cache_clear()
    engine(64, MAX_TOKENS, 4096)
    made = [layer(torch.zeros(4, SELECTED, dtype=torch.int32), 64, "fp8_ds_mla") for _ in range(2)]
    permitted = value == "1"
    assert [each.allow_fp8_mma for each in made] == [permitted] * 2
    text = "sparsemla: prefills over converted rows permit FP8 MMAs (SPARSEMLA_FP8_MMA=1)"
    assert [record.getMessage() for record in caplog.records] == [text] * permitted


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"invariant": True}, "VLLM_BATCH_INVARIANT must be unset"),
        ({"dtype": "auto"}, "--kv-cache-dtype must be fp8_ds_mla, .* got auto"),
        ({"ranks": 2}, "--decode-context-parallel-size must be 1, .* got 2"),
        ({"gpu": "sm_100"}, r"the GPU must be sm_90, .* got .*sm_100"),
        ({"num_heads": 32}, "more than 32 heads: lower --tensor-parallel-size; got 32"),
        ({"max_length": 512}, "no step gains from a conversion: raise --max-num-batched-tokens or"),
    ],
    ids=str,
)
def test_fp8_mma_that_no_step_would_use_are_refused(
    engine, permitting, monkeypatch, changes, reason
):
    usual = {"invariant": False, "dtype": "fp8_ds_mla", "ranks": 1, "gpu": "sm_90"}
    case = SimpleNamespace(**usual | {"num_heads": 64, "max_length": 4096} | changes)
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", case.invariant, raising=False)
    monkeypatch.setattr(attention, "describe", lambda device: GPUS[case.gpu])
    group = SimpleNamespace(device_communicator=None)
    monkeypatch.setattr(attention, "get_dcp_group", lambda: group)
    monkeypatch.setattr(
        parallel_state, "get_dcp_world_size_and_rank", lambda shared: (case.ranks, 0)
    )
    engine(case.num_heads, MAX_TOKENS, case.max_length)
    buffer = torch.zeros(4, SELECTED, dtype=torch.int32)
    with pytest.raises(ValueError, match=f"^sparsemla: .*{reason}.*; otherwise unset SPARSEMLA_FP"):
        layer(buffer, case.num_heads, case.dtype)
    monkeypatch.setenv("SPARSEMLA_FP8_MMA", "0")
    layer(buffer, case.num_heads, case.dtype)


def test_vllms_profiling_run_takes_the_memory_of_rounded_rows(engine, permitting):
    engine(64, MAX_TOKENS, 4096)
    impl = layer(torch.zeros(4, SELECTED, dtype=torch.int32), 64, "fp8_ds_mla")
    taken = []
    impl.topk_indices_buffer = SimpleNamespace(
        new_empty=lambda size, dtype: taken.append(size * dtype.itemsize)
    )
    for permitted in (True, False):
        impl.allow_fp8_mma = permitted
        impl.reserve_workspace()
    assert taken == [4096 * (fp8_mma.RECORD.value + 4 * 4)]


@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("query_lens", [[3, 3], [3, 1], [1, 3, 2]], ids=str)
def test_speculative_decodes(config, monkeypatch, query_lens, dtype):
    speculative = SimpleNamespace(num_speculative_tokens=2, parallel_drafting=False)
    monkeypatch.setattr(config, "speculative_config", speculative)
    batch = Batch(Draw(0), query_lens, [130, 7, 66][: len(query_lens)])
    assert builder(config).reorder_batch_threshold == 3
    metadata = builder(config).build(0, batch.common())
    assert (metadata.num_decodes, metadata.num_prefills) == (len(query_lens), 0)
    check_layer(config, batch, 8, dtype)


@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
def test_padding_of_graphs(config, dtype):
    batch = Batch(Draw(0), [1, 1, 0, 0], [70, 3, 0, 0], padded_tokens=2)
    out, _ = check_layer(config, batch, 8, dtype)
    assert out.shape[0] == 4


def test_the_query_may_come_in_one_piece(config):
    check_layer(config, Batch(Draw(0), **MIXED), 24, "fp8_ds_mla", one_piece=True)


@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
def test_ranks_that_share_a_context_add_up(config, dtype, interleave):
    ranks = 2
    batch = Batch(Draw(0), [1, 1, 4], [300, 2, 71])
    fmt = attention.FORMATS[dtype]
    whole, buffer = batch.cache(fmt), batch.selections()
    q = decode_queries(batch.draw, batch.rows, 6, 576)
    metadata = builder(config, dtype).build(0, batch.common())
    metadata.cp_kv_cache_interleave_size = interleave
    outs, lses = [], []
    for rank in range(ranks):
        pages = torch.full((whole.num_slots * fmt.bytes_per_token,), 255, dtype=torch.uint8)
        cache = PagedCache(pages.view(fmt.storage_dtype).view(whole.data.shape), fmt)
        for request, length in enumerate(batch.seq_lens):
            position = torch.arange(length)
            position = position[position // interleave % ranks == rank]
            local = position // (interleave * ranks) * interleave + position % interleave
            page, local_page = (
                batch.block_table[request, p // PAGE_SIZE].long() for p in (position, local)
            )
            rows = whole.data[page, position % PAGE_SIZE]
            cache.data[local_page, local % PAGE_SIZE] = rows
        impl = layer(buffer, 6, dtype)
        impl.dcp_world_size, impl.dcp_rank = ranks, rank
        out, lse = impl.forward_mqa(q, cache.data, metadata, None)
        outs.append(out)
        lses.append(lse)
    empty = torch.stack(lses) == -torch.inf
    assert empty[:, 0].all()
    assert interleave == 1 or empty[1, 1].all()  # two tokens, both with the first rank
    assert (torch.stack(outs)[empty] == 0).all()
    slots = reference.to_slots(
        buffer[: batch.tokens], batch.block_table, batch.request_ids, page_size=PAGE_SIZE
    )
    expected, expected_lse, _ = reference.sparse_prefill(q, whole, slots, softmax_scale=192**-0.5)
    out, lse = reference.merge_states(torch.stack(outs), torch.stack(lses))
    assert_close("out", out, expected, SPARSE_PREFILL_OUT)
    assert_close("lse", lse, expected_lse, DECODE_LSE)


def test_contexts_are_not_shared_without_nccl(monkeypatch, config):
    """vLLM leaves the result of a reduce-scatter unwritten if its binding of NCCL is off."""
    monkeypatch.setenv("VLLM_DISABLE_PYNCCL", "1")
    gloo = SimpleNamespace(rank=0, world_size=2)
    monkeypatch.setattr(pynccl.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(pynccl.dist, "get_backend", lambda group: "gloo")
    monkeypatch.setattr(pynccl.dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(pynccl.dist, "get_world_size", lambda group: 2)
    binding = pynccl.PyNcclCommunicator(gloo, torch.device("cpu"))
    unwritten = torch.full((1,), 7.0)
    binding.reduce_scatter(unwritten, torch.ones(2))
    assert unwritten == 7

    communicator = SimpleNamespace(pynccl_comm=binding)
    group = SimpleNamespace(device_communicator=communicator)
    monkeypatch.setattr(attention, "get_dcp_group", lambda: group)
    monkeypatch.setattr(parallel_state, "get_dcp_world_size_and_rank", lambda shared: (2, 0))
    buffer = torch.zeros(MAX_TOKENS, TOPK, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"binding of NCCL.*2\.29\.7 or newer"):
        layer(buffer, 6)
    communicator.pynccl_comm = None  # as in a communicator for CPUs
    layer(buffer, 6)


def test_a_step_is_described_once_for_all_layers(config):
    made = builder(config)
    batch = Batch(Draw(0), **MIXED)
    metadata = made.build(0, batch.common())
    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_decode_tokens) == (2, 2, 2)
    assert (metadata.block_size, metadata.topk_tokens) == (PAGE_SIZE, TOPK)
    assert_equal("request ids", metadata.req_id_per_token, batch.request_ids)
    assert made.get_cudagraph_support(config, made.kv_cache_spec) == (
        AttentionCGSupport.UNIFORM_BATCH
    )


def test_a_graph_sees_the_next_batch(config):
    made = builder(config)
    first = made.build_for_cudagraph_capture(Batch(Draw(0), [1, 1], [9, 8]).common())
    second = made.build(0, Batch(Draw(1), [1, 1], [90, 80]).common())
    assert first.req_id_per_token.data_ptr() == second.req_id_per_token.data_ptr()
    second.req_id_per_token.fill_(-1)
    made.update_draft_decode_metadata(second)
    assert second.req_id_per_token.tolist() == [0, 1]


@pytest.mark.parametrize(
    "changes",
    [
        {"alibi_slopes": [1.0]},
        {"sliding_window": 128},
        {"logits_soft_cap": 30.0},
        {"kv_sharing_target_layer_name": "another"},
        {"kv_cache_dtype": "fp8"},
        {"topk_indices_buffer": None},
    ],
    ids=str,
)
def test_layers_that_need_more_are_refused(config, changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"sparsemla: .*{name}"):
        layer(torch.zeros(4, TOPK, dtype=torch.int32), 8, **changes)


def test_the_workspace_of_a_layer_stays_where_it_is(config, monkeypatch):
    monkeypatch.setattr(attention, "decode_workspace_bytes", lambda *args: 4096)
    first, second = (layer(torch.zeros(4, TOPK, dtype=torch.int32), 8) for _ in range(2))
    with locked_workspace():
        assert first._workspace().data_ptr() == second._workspace().data_ptr()


def test_each_microbatch_has_room_for_conversions(engine, monkeypatch):
    """Microbatches have workspaces of their own, which vLLM's profiling run claims."""
    made = engine(8, MAX_TOKENS, 4096)
    monkeypatch.setattr(workspace, "_manager", None)
    init_workspace_manager(torch.device("cpu"), num_ubatches=2)
    batch = Batch(Draw(0), **CONVERTED, topk=SELECTED)
    impl = layer(batch.selections(), 8, "fp8_ds_mla")
    metadata = builder(made, "fp8_ds_mla").build(0, batch.common())
    assert metadata.converted

    def run_as(microbatch):
        monkeypatch.setattr(workspace, "dbo_current_ubatch_id", lambda: microbatch)

    for microbatch in (0, 1):
        run_as(microbatch)
        impl.reserve_workspace()
    cache = batch.cache(attention.FORMATS["fp8_ds_mla"])
    q = decode_queries(batch.draw, batch.rows, 8, 576)
    for microbatch in (0, 1):
        run_as(microbatch)
        with locked_workspace():
            impl.forward_mqa(q, cache.data, metadata, None)


@pytest.mark.parametrize("num_heads", [1, 16, 128])
def test_the_workspace_is_enough_for_every_batch(num_heads):
    device = torch.device("cpu")
    with simulated(GPUS["sm_90"]):
        most = attention.decode_workspace_bytes(512, num_heads, device)
        assert most > 0
        for tokens in range(1, 513):
            assert attention.decode_workspace_size(tokens, 1, num_heads, device=device) <= most


@pytest.fixture
def mla_layer(config, plain_vllm, monkeypatch):
    """vLLM's MLA layer as it makes it with the indexer's plugin; its attention is left out."""

    class NoAttention(torch.nn.Module):
        def __init__(self, **arguments):
            super().__init__()
            self.layer_name = arguments["prefix"]

    monkeypatch.setattr(envs, "VLLM_PLUGINS", ["sparsemla_indexer"], raising=False)
    monkeypatch.setattr(mla, "MLAAttention", NoAttention)
    register_the_indexer()
    buffer = torch.full((MAX_TOKENS, TOPK), 2**31 - 1, dtype=torch.int32)
    with set_default_torch_dtype(torch.bfloat16):
        own = Indexer(
            config, config.model_config.hf_config, 256, 128, None, config.cache_config, buffer, "i"
        )
    modules = {field.name: None for field in dataclasses.fields(mla.MLAModules)}
    modules |= {"indexer": own, "is_sparse": True, "topk_indices_buffer": buffer}
    modules |= {"indexer_rotary_emb": rotation(neox=True)}
    return mla.MultiHeadLatentAttentionWrapper(
        256, 8, 192**-0.5, 128, 64, 128, 128, 512, mla.MLAModules(**modules), prefix="layer"
    )


def rotation(neox):
    parameters = {"rope_type": "default", "rope_theta": 10000}
    with set_default_torch_dtype(torch.bfloat16):
        return get_rope(64, 2048, is_neox_style=neox, rope_parameters=parameters)


def index_step(config, made, batch, neox, run=None):
    """One step of the indexer of ``made``; its cache, queries and weights are random.

    Returns:
        The cache, what was selected, and the inputs.
    """
    draw, inner = batch.draw, made.indexer.inner
    with torch.no_grad():
        for weight in inner.parameters():
            weight.copy_(draw.normal(*weight.shape) * 256**-0.5)
        inner.k_norm.weight.add_(1)
    rope = rotation(neox)
    hidden, qr = (draw.normal(MAX_TOKENS, n, dtype=torch.bfloat16) for n in (256, 128))
    hidden, qr = hidden[: batch.rows], qr[: batch.rows]
    positions = torch.zeros(batch.rows, dtype=torch.int64)
    positions[: batch.tokens] = batch.positions
    cache = batch.cache(INDEX_FP8)
    inner.k_cache.kv_cache = cache.data
    spec = inner.k_cache.get_kv_cache_spec(config)
    make = inner.k_cache.get_attn_backend().get_builder_cls()
    metadata = make(spec, [inner.k_cache.prefix], config, torch.device("cpu"))
    metadata = metadata.build(0, batch.common())
    with set_forward_context({inner.k_cache.prefix: metadata}, config), torch.no_grad():
        run = made.indexer if run is None else run
        chosen = run(hidden, qr, positions, rope)
    return cache, chosen, (hidden, qr, positions, rope)


INDEXED = {
    "prefills": {"query_lens": [5, 300 - 260], "seq_lens": [5, 300]},
    "decodes": {"query_lens": [1, 1, 1], "seq_lens": [129, 64, 400]},
    "both": {"query_lens": [1, 9], "seq_lens": [300, 137]},
    "speculative": {"query_lens": [3, 1, 2], "seq_lens": [200, 3, 131]},
    "padded": {"query_lens": [1, 2, 0], "seq_lens": [200, 3, 0], "padded_tokens": 3},
}


@pytest.mark.parametrize("neox", [True, False], ids=["halves", "pairs"])
@pytest.mark.parametrize("name", INDEXED)
def test_the_indexer_selects_the_same_as_the_reference(config, mla_layer, name, neox):
    assert type(mla_layer.indexer) is indexer.SparseMLAIndexer
    batch = Batch(Draw(0), **INDEXED[name])
    cache, chosen, (hidden, qr, positions, rope) = index_step(config, mla_layer, batch, neox)
    inner, tokens = mla_layer.indexer.inner, batch.tokens

    # vLLM's own modules, step by step and without quantisation.
    with torch.no_grad():
        q = inner.wq_b(qr)[0].view(-1, 32, 128)
        k, weights = inner.wk_weights_proj(hidden)[0].split([128, 32], dim=-1)
        k = inner.k_norm(k)
        q_rope, k_rope = rope.forward_native(positions, q[..., :64], k[:, None, :64])
    q = torch.cat([q_rope, q[..., 64:]], dim=-1)
    k = torch.cat([k_rope[:, 0], k[:, 64:]], dim=-1)
    assert_close("keys", cache.read(batch.slot_mapping).float(), k[:tokens].float(), KEYS)

    queries, weights = reference.prepare_index_queries(
        inner.wq_b(qr)[0].view(-1, 32, 128).detach(),
        weights,
        rope.cos_sin_cache,
        positions=positions,
        interleaved=not neox,
    )
    # Queries apart from their scales, which a last bit may double.
    directions = (normalize(x[:tokens].float(), dim=-1) for x in (queries, q))
    assert_close("queries", *directions, KEYS)
    expected = reference.indexer_topk(
        queries,
        weights,
        cache,
        input_row_offsets=torch.tensor([0, *batch.query_lens]).cumsum(0),
        seq_lens=torch.tensor(batch.seq_lens),
        page_table=batch.block_table,
        topk=TOPK,
    )
    assert_equal("selection", chosen[: batch.rows], expected)
    assert (chosen[batch.rows :] == 2**31 - 1).all()


# Rounding to e4m3, by up to 2^-4 of an element, and some to bfloat16 before.
KEYS = Tolerance(rel=2**-4 + 2**-6, cos=2e-3, size=2**-6)


@dataclasses.dataclass
class Prompt:
    """What a layer computes of a request's tokens before indexer and attention."""

    latents: torch.Tensor
    q: torch.Tensor
    index_q: torch.Tensor
    index_k: torch.Tensor
    index_weights: torch.Tensor

    @classmethod
    def of(cls, draw, length, num_heads):
        half = {"dtype": torch.bfloat16}
        return cls(
            prefill_rows(draw, length, 576),
            decode_queries(draw, length, num_heads, 576),
            draw.normal(length, 32, 128, **half),
            draw.normal(length, 128, **half),
            draw.normal(length, 32, **half),
        )


def split_like_hopper(q, cache, topk_indices, *, topk_lengths, workspace, **arguments):
    """A decode that splits keys as an H200 would, and merges."""
    num_keys = topk_indices.shape[2]
    work = DecodeWork(*q.shape[:3], num_keys, cache.format, 132)
    num_splits, _ = schedule.sparse(work, "sm90")
    states, size = [], -(-num_keys // num_splits)
    for first in range(0, num_keys, size):
        part = topk_indices[..., first : first + size].contiguous()
        lengths = (topk_lengths - first).clamp(min=0)
        out, lse = sparse_decode(q, cache, part, topk_lengths=lengths, **arguments)
        states.append((out[:, 0].float(), lse[:, 0]))
    outs, lses = (torch.stack(parts) for parts in zip(*states, strict=True))
    out, lse = reference.merge_states(outs, lses)
    return out.to(q.dtype).unsqueeze(1), lse.unsqueeze(1)


def converted(
    request_ids,
    block_table,
    indices,
    *,
    BLOCK_SIZE,
    BLOCK_STRIDE_ROWS,
    NUM_TOPK_TOKENS,
    return_valid_counts,
):
    """vLLM's conversion of selections in torch: its kernel is slow in Triton's interpreter."""
    slots = reference.to_slots(indices, block_table, request_ids, page_size=BLOCK_SIZE)
    rows = slots // BLOCK_SIZE * BLOCK_STRIDE_ROWS + slots % BLOCK_SIZE
    valid_first = (slots < 0).int().argsort(dim=1, stable=True)
    rows = rows.where(slots >= 0, -1).gather(1, valid_first)
    return rows, (slots >= 0).sum(1, dtype=torch.int32)


def test_selections_are_converted_as_by_vllm():
    batch = Batch(Draw(0), [1, 1, 4], [3, 300, 77])
    indices = batch.selections()[: batch.tokens]
    arguments = {
        "BLOCK_SIZE": PAGE_SIZE,
        "BLOCK_STRIDE_ROWS": 3 * PAGE_SIZE,
        "NUM_TOPK_TOKENS": TOPK,
        "return_valid_counts": True,
    }
    parts = batch.request_ids, batch.block_table, indices
    expected = sparse_mla_attention.triton_convert_req_index_to_global_index(*parts, **arguments)
    for name, got, wanted in zip(
        ("rows", "counts"), converted(*parts, **arguments), expected, strict=True
    ):
        assert_equal(name, got, wanted)


def serve(config, made, prompts, steps, dtype):
    """Run steps of ``(prompt, tokens)`` pairs, decodes first, on random pages.

    Returns:
        Selections, outputs and LSEs of all tokens of the first prompt.
    """
    config.scheduler_config.max_num_batched_tokens = LARGEST_STEP
    width = -(-max(LENGTHS) // PAGE_SIZE)
    tables = Draw(len(steps)).permutation(len(prompts) * width).view(-1, width).int()
    cache = PagedCache.allocate(attention.FORMATS[dtype], tables.numel(), PAGE_SIZE)
    keys = PagedCache.allocate(INDEX_FP8, tables.numel(), PAGE_SIZE)
    inner = made.indexer.inner
    inner.k_cache.kv_cache, name = keys.data, inner.k_cache.prefix
    spec = inner.k_cache.get_kv_cache_spec(config)
    make = inner.k_cache.get_attn_backend().get_builder_cls()
    build_index = make(spec, [name], config, torch.device("cpu")).build
    build = builder(config, dtype).build
    buffer = torch.full((LARGEST_STEP, MANY), 2**31 - 1, dtype=torch.int32)
    attend = layer(buffer, prompts[0].q.shape[1], dtype).forward_mqa

    results, done = [], [0] * len(prompts)
    for step in steps:
        ids, query_lens = ([*column] for column in zip(*step, strict=True))
        spans = [slice(done[i], done[i] + n) for i, n in step]
        for i, n in step:
            done[i] += n
        batch = Batch(Draw(0), query_lens, [done[i] for i in ids], block_table=tables[ids])

        def rows(field, ids=ids, spans=spans):
            parts = zip(ids, spans, strict=True)
            return torch.cat([getattr(prompts[i], field)[span] for i, span in parts])

        cache.write(batch.slot_mapping, rows("latents"))
        with set_forward_context({name: build_index(0, batch.common())}, config), torch.no_grad():
            torch.ops.vllm.sparsemla_indexer(
                batch.positions,
                rows("index_q"),
                rows("index_k"),
                rows("index_weights"),
                torch.ones(128),
                torch.zeros(128),
                1e-6,
                rotation(True).cos_sin_cache,
                False,
                True,
                buffer,
                MANY,
                name,
            )
        out, lse = attend(rows("q"), cache.data, build(0, batch.common()), None)
        mine = batch.request_ids == ids.index(0) if 0 in ids else slice(0)
        results.append((buffer[: batch.tokens][mine].clone(), out[mine], lse[mine]))
    return [torch.cat(parts) for parts in zip(*results, strict=True)]


LARGEST_STEP = 512
MANY = 256
"""Selected tokens, enough for an H200 to split them."""
LENGTHS = 290, 90, 20
STEPS = {
    "chunks of 64": [*[[(0, 64)]] * 4, [(0, 34)]],
    "chunks of 13": [[(0, 225)], *[[(0, 13)]] * 5],
    "decodes": [[(0, 280)], *[[(0, 1)]] * 10],
    "among others": [
        [(1, 50), (0, 200)],
        [(1, 1), (0, 80), (2, 13)],
        [(1, 1), (2, 1), (0, 9)],
        [(2, 1), (0, 1), (1, 1)],
    ],
    "in another order": [
        [(2, 19), (0, 1), (1, 89)],
        [(2, 1), (0, 277)],
        [(0, 1), (1, 1)],
        *[[(0, 1)]] * 2,
        [(0, 9)],
    ],
}


@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
def test_results_do_not_depend_on_the_batch(config, mla_layer, batch_invariant, monkeypatch, dtype):
    monkeypatch.setattr(attention, "sparse_decode", split_like_hopper)
    monkeypatch.setattr(sparse_mla_attention, "triton_convert_req_index_to_global_index", converted)
    monkeypatch.setattr(config.model_config.hf_text_config, "index_topk", MANY)
    prompts = [Prompt.of(Draw(seed), length, 8) for seed, length in enumerate(LENGTHS)]
    alone = serve(config, mla_layer, prompts, [[(0, LENGTHS[0])]], dtype)
    for name, steps in STEPS.items():
        results = serve(config, mla_layer, prompts, steps, dtype)
        for what, result, expected in zip(("selection", "out", "lse"), results, alone, strict=True):
            assert_equal(f"{what}, {name}", result, expected)


class DensePrefill:
    """As much of vLLM's backends of dense prefill as describing a step takes."""

    def clone(self):
        return self

    def prepare_metadata(self, metadata):
        pass


@pytest.mark.parametrize("invariant", [True, False])
def test_lengths_decide_about_the_kernel_unless_results_must_not_depend_on_them(
    request, engine, config, invariant
):
    if invariant:
        request.getfixturevalue("batch_invariant")
    config.compilation_config.static_forward_context[LAYER].prefill_backend = DensePrefill()
    made = engine(8, MAX_TOKENS, 4096)
    metadata = builder(made, "fp8_ds_mla").build(0, Batch(Draw(0), **CONVERTED).common())
    assert (metadata.converted is None) is invariant
    assert metadata.prefill.use_dense_mha is not invariant
    impl = layer(torch.zeros(MAX_TOKENS, SELECTED, dtype=torch.int32), 8, "fp8_ds_mla")
    assert (impl._workspace() is None) is invariant


def test_the_indexer_can_be_compiled(config, mla_layer):
    batch = Batch(Draw(0), **INDEXED["both"])
    _, expected, _ = index_step(config, mla_layer, batch, True)
    expected = expected.clone()
    run = torch.compile(mla_layer.indexer, backend="eager", fullgraph=True)
    _, chosen, _ = index_step(config, mla_layer, Batch(Draw(0), **INDEXED["both"]), True, run)
    assert_equal("selection", chosen, expected)


def test_a_step_without_a_batch_selects_nothing(config, mla_layer):
    inner = mla_layer.indexer.inner
    before = inner.topk_indices_buffer.clone()
    with set_forward_context(None, config):
        mla_layer.indexer(
            torch.zeros(2, 256).bfloat16(),
            torch.zeros(2, 128).bfloat16(),
            torch.zeros(2).long(),
            rotation(True),
        )
    assert_equal("selection", inner.topk_indices_buffer, before)


def test_a_draft_model_uses_the_selection_of_its_target(config, mla_layer):
    target = torch.zeros(MAX_TOKENS, TOPK, dtype=torch.int32)
    for module in mla_layer.modules():  # as vLLM's proposer does
        if hasattr(module, "topk_indices_buffer"):
            module.topk_indices_buffer = target
    batch = Batch(Draw(0), [2], [2])
    _, chosen, _ = index_step(config, mla_layer, batch, True)
    assert chosen is target
    assert target[1, :3].tolist() == [0, 1, -1]


def test_a_layer_with_another_indexer_stops_the_start(config, mla_layer):
    class Other(Indexer):
        """Of another model, and computes something else."""

    modules = {field.name: None for field in dataclasses.fields(mla.MLAModules)}
    arguments = 256, 8, 192**-0.5, 128, 64, 128, 128, 512
    made = mla.MultiHeadLatentAttentionWrapper(
        *arguments, mla.MLAModules(**modules), prefix="without an indexer"
    )
    assert made.indexer is None
    modules["indexer"] = other = mla_layer.indexer.inner
    modules["is_sparse"] = True
    other.__class__ = Other
    with pytest.raises(
        ValueError, match=r"DeepSeek-V3\.2 or GLM-5\.3-Flash, got .*Other; remove spa"
    ):
        mla.MultiHeadLatentAttentionWrapper(
            *arguments, mla.MLAModules(**modules), prefix="another indexer"
        )


def test_the_indexer_keeps_the_names_of_weights(mla_layer):
    parent = torch.nn.Module()
    parent.indexer = mla_layer.indexer.inner
    parent.mla_attn = mla_layer
    assert {name.split(".")[0] for name, _ in parent.named_parameters()} == {"indexer"}


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("parallel_config", "prefill_context_parallel_size", 2),  # in the portable class
        ("attention_config", "indexer_kv_dtype", "mxfp4"),
    ],
    ids=str,
)
def test_unsupported_indexer_features_are_refused(
    config, mla_layer, monkeypatch, where, name, value
):
    monkeypatch.setattr(getattr(config, where), name, value)
    with pytest.raises(ValueError, match=name if where == "parallel_config" else "mxfp4"):
        indexer.SparseMLAIndexer(mla_layer.indexer.inner)


def selecting(config, batch, dense=False, decodes=0, common=None, **given):
    """One step of the selection as vLLM's NVIDIA class calls it.

    Args:
        config: of the engine.
        batch: the step.
        dense, decodes: of attention.
        common: vLLM's words for the batch; its own if None.
        given: arguments of the selection.

    Returns:
        The cache, queries, weights, and what was selected.
    """
    draw = batch.draw
    cache = batch.cache(INDEX_FP8)
    q = draw.normal(batch.rows, 32, 128).to(torch.float8_e4m3fn)
    weights = draw.normal(batch.rows, 32)
    with set_current_vllm_config(config):
        name = f"index {len(config.compilation_config.static_forward_context)}"
        layer = nvidia.IndexCache(132, torch.uint8, name, config.cache_config)
    make = layer.get_attn_backend().get_builder_cls()
    spec = layer.get_kv_cache_spec(config)
    metadata = make(spec, [layer.prefix], config, torch.device("cpu")).build(
        0, common or batch.common()
    )
    prefill = SimpleNamespace(use_dense_mha=dense)
    attends = SimpleNamespace(prefill=prefill, num_decode_tokens=decodes)
    chosen = torch.full((MAX_TOKENS, TOPK), 2**31 - 1, dtype=torch.int32)
    parameters = inspect.signature(nvidia.sparse_attn_indexer).parameters
    arguments = {name: None for name, each in parameters.items() if each.default is each.empty}
    arguments |= {
        "k_cache_prefix": layer.prefix,
        "kv_cache": cache.data,
        "q_quant": q,
        "weights": weights,
        "topk_tokens": TOPK,
        "topk_indices_buffer": chosen,
        "dense_mha_metadata_layer_name": LAYER,
        **given,
    }
    with set_forward_context({layer.prefix: metadata, LAYER: attends}, config):
        assert nvidia.sparse_attn_indexer(**arguments) is chosen
    return cache, q, weights, chosen


@pytest.mark.parametrize("spare", [0, 5])
@pytest.mark.parametrize("name", INDEXED)
def test_the_nvidia_class_selects_the_same_as_the_reference(config, name, spare):
    batch = Batch(Draw(0), **INDEXED[name], spare=spare)  # as in async scheduling
    cache, q, weights, chosen = selecting(config, batch)
    expected = reference.indexer_topk(
        q,
        weights,
        cache,
        input_row_offsets=torch.tensor([0, *batch.query_lens]).cumsum(0),
        seq_lens=torch.tensor(batch.seq_lens),
        page_table=batch.block_table,
        topk=TOPK,
    )
    assert_equal("selection", chosen[: batch.rows], expected)
    assert (chosen[batch.rows :] == 2**31 - 1).all()


def test_the_nvidia_class_selects_nothing_where_attention_is_dense(config):
    *_, chosen = selecting(config, Batch(Draw(0), [5], [5]), dense=True)
    assert (chosen == 2**31 - 1).all()
    *_, chosen = selecting(config, Batch(Draw(0), [1, 5], [9, 5]), dense=True, decodes=1)
    assert chosen[5, :6].tolist() == [0, 1, 2, 3, 4, -1]


@pytest.mark.parametrize(
    ("capability", "models"),
    [
        ((8, 0), plugins.GENERIC_MODELS),
        ((8, 9), plugins.NVIDIA_MODELS),
        ((9, 0), plugins.NVIDIA_MODELS),
        ((10, 0), plugins.GENERIC_MODELS),
        ((12, 0), plugins.NVIDIA_MODELS),
    ],
    ids=["sm_80", "sm_89", "sm_90", "sm_100", "sm_120"],
)
def test_the_class_of_the_model_depends_on_the_gpu(plain_vllm, monkeypatch, capability, models):
    platform = type(current_platform)
    found = DeviceCapability(*capability)
    monkeypatch.setattr(platform, "is_cuda", lambda self: True)
    uncached = deep_gemm.mqa_logits_use_mx_scales.__wrapped__
    monkeypatch.setattr(deep_gemm, "mqa_logits_use_mx_scales", uncached)
    monkeypatch.setattr(platform, "get_device_capability", classmethod(lambda cls, **_: found))
    monkeypatch.setattr(envs, "VLLM_PLUGINS", ["sparsemla_indexer"], raising=False)
    register_the_indexer()
    for architecture, path in models.items():
        model = ModelRegistry.models[architecture]
        assert f"{model.module_name}:{model.class_name}" == path


def test_the_528_bytes_of_a_row_are_those_of_vllms_kernel():
    draw, slots = Draw(0), torch.tensor([3, 70, 1, 0, -1, 64, 127])
    rows = (draw.normal(7, 512) * draw.normal(7, 1).mul(3).exp()).bfloat16()
    rows[0] = 0
    rows[1, :32], rows[1, 32:64] = 14, 1e-6  # 448 / 32, and below the smallest scale's range
    ours, theirs = (PagedCache.allocate(FP8_528, 2, PAGE_SIZE) for _ in range(2))
    ours.write(slots[slots >= 0], rows[slots >= 0])
    unrotated = torch.tensor([[1.0, 0.0]]).repeat_interleave(32, 1)
    v41_rows.rope_quant_insert(rows, 0 * slots, unrotated, theirs.data, slots, 1)
    assert_equal("bytes", ours.data, theirs.data)


def e2m1_pairs(low, high):
    """vLLM rounds by an instruction of Blackwell; test_formats.py checks this rounding."""
    return encode_e2m1(low) | (encode_e2m1(high) << 4)


def test_the_288_bytes_of_a_row_are_those_of_vllms_kernel(monkeypatch):
    monkeypatch.setattr(v41_rows, "_fp32x2_to_fp4x2", e2m1_pairs)
    draw, slots = Draw(0), torch.tensor([3, 70, 1, 0, -1, 64, 127])
    rows = (draw.normal(7, 512) * draw.normal(7, 1).mul(3).exp()).bfloat16()
    rows[0] = 0
    rows[1] = draw.integers(-24, 25, 512) / 4  # ties
    rows[1, ::16] = 6
    rows[2, :16], rows[2, 16:32], rows[2, 32:40] = 1e4, 1e-6, torch.nan
    ours, theirs = (PagedCache.allocate(FP4_288, 2, PAGE_SIZE) for _ in range(2))
    ours.write(slots[slots >= 0], rows[slots >= 0])
    unrotated = torch.tensor([[1.0, 0.0]]).repeat_interleave(32, 1)
    v41_rows.rope_quant_insert(rows, 0 * slots, unrotated, theirs.data, slots, 1)
    assert_equal("bytes", ours.data, theirs.data)
    read, table = torch.zeros(1, 4, 512, dtype=torch.bfloat16), torch.tensor([[0]])
    dequantize_and_gather_k_cache_triton(
        read, theirs.data, torch.tensor([4]), None, table, PAGE_SIZE, 0
    )
    assert torch.equal(ours.read(torch.arange(4)), read[0])  # but for the sign of zeros


def test_the_68_bytes_of_an_index_key_are_those_of_vllms_kernel(monkeypatch):
    monkeypatch.setattr(v41_keys, "_fp32x2_to_fp4x2", e2m1_pairs)
    draw, slots = Draw(0), torch.tensor([3, 70, 1, -1, 64, 127])
    # Rows of 1 and -1 have a norm without rounding: the weight makes the values.
    signs = draw.integers(0, 2, 6, 128).mul(2).sub(1).bfloat16()
    weight = torch.cat(
        [
            draw.integers(1, 25, 32) / 4,  # ties
            draw.normal(32) * 1e-30,
            (1 + draw.normal(32).abs()) * 1.2e-38,  # below the smallest amax
            draw.normal(32) * 1e6,
        ]
    ).bfloat16()
    weight[0] = 6
    ours, theirs = (PagedCache.allocate(INDEX_MXFP4, 2, PAGE_SIZE) for _ in range(2))
    ours.write(slots[slots >= 0], (signs * weight)[slots >= 0])
    unrotated = torch.tensor([[1.0, 0.0]]).repeat_interleave(32, 1)
    v41_keys.indexer_k_norm_rope_store(
        signs, 0 * slots, unrotated, weight, 0.0, theirs.data, slots, 1, True
    )
    assert_equal("bytes", ours.data, theirs.data)


@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
def test_the_rows_of_vllms_fused_kernel_are_read(config, dtype):
    draw, tokens, fmt = Draw(0), 7, attention.FORMATS[dtype]
    q, kv, k_pe, k = (draw.normal(tokens, n, dtype=torch.bfloat16) for n in (128, 512, 64, 128))
    ones = torch.ones(512, dtype=torch.bfloat16)
    cache = torch.zeros(2, PAGE_SIZE, fmt.bytes_per_token, dtype=torch.uint8)
    if dtype == "auto":
        cache = cache.view(torch.bfloat16)
    index_cache = torch.zeros(2, PAGE_SIZE, 132, dtype=torch.uint8)
    slots, rotated = torch.arange(tokens) + 60, torch.empty_like(k_pe)
    kernels.fused_norm_rope(
        torch.arange(tokens),
        q,
        ones[:128],
        1e-6,
        kv,
        ones,
        1e-6,
        k_pe,
        rotation(False).cos_sin_cache,
        k,
        ones[:128].float(),
        0 * ones[:128].float(),
        1e-6,
        rotation(True).cos_sin_cache,
        torch.zeros(tokens, TOPK, dtype=torch.int32),
        slot_mapping=slots,
        indexer_slot_mapping=slots,
        indexer_k_cache=index_cache,
        mla_kv_cache=cache,
        mla_kv_cache_dtype=dtype,
        k_pe_out=rotated,
    )
    rows = PagedCache(cache, fmt).read(slots).float()
    kv = torch.nn.functional.rms_norm(kv.float(), (512,))
    assert_close("latent rows", rows[:, :512], kv, KEYS)
    assert_equal("rotated dims", rows[:, 512:], rotated.float())
    k = torch.nn.functional.layer_norm(k.float(), (128,))
    k[:, :64] = rotation(True).forward_native(torch.arange(tokens), k[:, None, :64])[0][:, 0]
    assert_close("index keys", PagedCache(index_cache, INDEX_FP8).read(slots).float(), k, KEYS)


def test_a_selection_that_was_not_exchanged_stops_the_start(build_model, monkeypatch):
    _, model = build_model(True, "auto")
    nvidia.check_selection(model)
    with monkeypatch.context() as change:
        change.setattr(deepseek_v32, "sparse_attn_indexer", sparse_attn_indexer.sparse_attn_indexer)
        with pytest.raises(RuntimeError, match=r"layers\.0\..*vLLM's class calls <function"):
            nvidia.check_selection(model)
    with monkeypatch.context() as change:
        change.setattr(deepseek_v32.DeepseekV32Attention, "_sparse_indexer_and_attn", register)
        with pytest.raises(RuntimeError, match="must be this package's"):
            nvidia.check_selection(model)
    layer = model.model.layers[1].self_attn
    with monkeypatch.context() as change:
        change.setattr(layer.indexer, "k_cache", torch.nn.Module())
        with pytest.raises(RuntimeError, match=r"layers\.1"):
            nvidia.check_selection(model)
    with pytest.raises(RuntimeError, match="with an indexer, got none"):
        nvidia.check_selection(torch.nn.Linear(1, 1))


RANKS = 4
SHARED = {
    "decodes": {"query_lens": [1, 1, 1], "seq_lens": [700, 3, 129]},
    "padded": {"query_lens": [1, 1, 0], "seq_lens": [700, 1, 0], "padded_tokens": 2},
    "speculative": {"query_lens": [3, 3, 1], "seq_lens": [130, 400, 2]},
    "both": {"query_lens": [1, 12, 9], "seq_lens": [300, 500, 9]},
}


def local_slots(batch, requests, positions, shard):
    """Slots of this rank's pages for positions of requests; -1 for those of other ranks."""
    turn, at = positions // shard.interleave, positions % shard.interleave
    row = turn // shard.num_ranks * shard.interleave + at
    slot = batch.block_table[requests, row // PAGE_SIZE].long() * PAGE_SIZE + row % PAGE_SIZE
    return slot.where(turn % shard.num_ranks == shard.rank, -1)


def check_ranks(config, batch, ties, dtype):
    """Selection and attention of a batch with shared contexts, against one cache for all."""
    draw, group = batch.draw, get_dcp_group()
    interleave = config.parallel_config.cp_kv_cache_interleave_size
    shard = ContextShard(group.rank_in_group, group.world_size, interleave)
    requests = torch.cat([torch.full((n,), i) for i, n in enumerate(batch.seq_lens)])
    positions = torch.cat([torch.arange(n) for n in batch.seq_lens])
    own = local_slots(batch, requests, positions, shard)
    whole = batch.block_table[requests, positions // PAGE_SIZE].long() * PAGE_SIZE
    whole += positions % PAGE_SIZE

    def written(fmt, rows):
        caches = []
        for slots in (whole, own):
            caches.append(PagedCache.allocate(fmt, batch.num_blocks, PAGE_SIZE))
            caches[-1].data.view(torch.uint8).fill_(255)  # NaN
            caches[-1].write(slots, rows)
        return caches

    # Scores of small integers are exact: a CPU may add in another order for another width.
    index_keys = draw.integers(-3, 4, len(positions), 128).float()
    if ties:
        index_keys = index_keys[:5][draw.integers(0, 5, len(positions)).long()]
    keys, own_keys = written(INDEX_FP8, index_keys)
    latents, own_latents = written(
        attention.FORMATS[dtype], prefill_rows(draw, len(positions), 576)
    )

    # The step writes the keys of its tokens again: those of equal rows, where there are ties.
    half = {"dtype": torch.bfloat16}
    index_q = draw.integers(-2, 3, batch.rows, 32, 128).to(**half)
    index_weights = draw.integers(-3, 4, batch.rows, 32).float()
    signs = 2 * draw.integers(0, 2, batch.rows, 64) - 1
    index_k = torch.cat([signs, -signs], 1).to(**half)  # their own layer norm
    if ties:
        index_k = index_k[:1].expand_as(index_k)
    token_positions = torch.zeros(batch.rows, dtype=torch.int64)
    token_positions[: batch.tokens] = batch.positions
    common = batch.common()
    common.slot_mapping = common.slot_mapping.clone()
    tokens = slice(batch.tokens)
    parts = index_q, index_weights, index_k, torch.ones(128), torch.zeros(128)
    table = rotation(True).cos_sin_cache
    table = torch.cat([torch.ones_like(table[:, :32]), torch.zeros_like(table[:, 32:])], 1)
    where = {"positions": token_positions, "slot_mapping": common.slot_mapping}
    queries, head_weights = fused_indexer_rope_quant(*parts, table, keys, **where)
    expected = reference.indexer_topk(
        queries,
        head_weights,
        keys,
        input_row_offsets=common.query_start_loc,
        seq_lens=common.seq_lens,
        page_table=batch.block_table,
        topk=TOPK,
    )
    common.slot_mapping[tokens] = local_slots(batch, batch.request_ids, batch.positions, shard)

    buffer = torch.full((MAX_TOKENS, TOPK), 2**31 - 1, dtype=torch.int32)
    model = config.model_config.hf_config
    name = "indexer"
    with set_default_torch_dtype(torch.bfloat16):
        inner = Indexer(config, model, 256, 128, None, config.cache_config, buffer, name)
    indexer.SparseMLAIndexer(inner)
    inner.k_cache.kv_cache, name = own_keys.data, inner.k_cache.prefix
    make = inner.k_cache.get_attn_backend().get_builder_cls()
    made = make(inner.k_cache.get_kv_cache_spec(config), [name], config, torch.device("cpu"))
    with set_forward_context({name: made.build(0, common)}, config):
        torch.ops.vllm.sparsemla_indexer(
            token_positions, *parts[:1], index_k, index_weights, *parts[3:], 1e-6, table, False,
            True, buffer, TOPK, name,
        )  # fmt: skip
    assert_equal("selection", buffer[: batch.rows], expected)

    q = decode_queries(draw, batch.rows, 2 * shard.num_ranks, 576)
    metadata = builder(config, dtype).build(0, common)
    states = layer(buffer, 2, dtype).forward_mqa(q, own_latents.data, metadata, None)
    # vLLM's definition of its kernels, which Triton's interpreter does not take.
    states = [group.all_gather(x, dim=0).unflatten(0, (shard.num_ranks, -1)) for x in states]
    out = dcp._lse_weighted_combine(states[0].float(), states[1]).bfloat16()
    slots = reference.to_slots(
        buffer[tokens], batch.block_table, batch.request_ids, page_size=PAGE_SIZE
    )
    wanted = reference.sparse_prefill(q[tokens], latents, slots, softmax_scale=192**-0.5)
    assert_close("out", out[tokens], wanted[0], SPARSE_PREFILL_OUT)


def run_rank(rank, folder):
    """One of several processes, each with a share of all contexts."""
    import conftest  # noqa: F401 - repairs Triton's interpreter

    torch.set_num_threads(1)
    init_workspace_manager(torch.device("cpu"))
    sparse_mla_attention.PIN_MEMORY = mla_attention.PIN_MEMORY = torch_utils.PIN_MEMORY = False
    torch.accelerator.empty_cache = lambda: None
    for num_ranks, interleave in itertools.product((2, 4), (1, PAGE_SIZE)):
        # Once with room for all tokens of a step, and once for a single one.
        envs.VLLM_SPARSE_INDEXER_MAX_LOGITS_MB = 512 if interleave == 1 else 0
        parallel = ParallelConfig(
            tensor_parallel_size=RANKS,
            decode_context_parallel_size=num_ranks,
            cp_kv_cache_interleave_size=interleave,
        )
        model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16")
        for number, case in enumerate(SHARED):
            ties = number % 2 == (interleave == 1)
            dtype = ["auto", "fp8_ds_mla"][number // 2]
            config = engine_config(model, dtype, parallel_config=parallel)
            with set_current_vllm_config(config):
                init_distributed_environment(RANKS, rank, f"file://{folder}/ranks", rank, "gloo")
                initialize_model_parallel(RANKS, 1, 1, num_ranks)
                manager = dcp.MLADCPManager(
                    config, torch.device("cpu"), 2, 576, 512, torch.bfloat16, torch.bfloat16,
                    None, True, False,
                )  # fmt: skip
                config.compilation_config.static_forward_context[LAYER] = SimpleNamespace(
                    prefill_backend=None, dcp_manager=manager
                )
                check_ranks(config, Batch(Draw(number), **SHARED[case]), ties, dtype)
                destroy_model_parallel()


DIVIDED = {
    "a prompt": {"query_lens": [40], "seq_lens": [300]},
    "ragged": {"query_lens": [9, 1, 30, 3], "seq_lens": [137, 300, 30, 500]},
    "beside decodes": {"query_lens": [1, 1, 12, 9], "seq_lens": [500, 3, 400, 9]},
    "padded": {"query_lens": [1, 25, 0], "seq_lens": [200, 60, 0], "padded_tokens": 3},
    "fewer rows than ranks": {"query_lens": [1, 2], "seq_lens": [129, 200]},
}


def divided_step(config, batch, ratio):
    """A step of V3.2's indexer, or of V4's, which has a key for 4 tokens, and what it must select.

    Scores of small integers are exact: a CPU may add in another order for another width.
    """
    draw, cache = batch.draw, batch.cache(INDEX_FP8)
    rows = cache.data.flatten(0, 1).shape[0]
    cache.write(torch.arange(rows), draw.integers(-3, 4, rows, 128).float())
    q = draw.integers(-2, 3, batch.rows, 32, 128).to(torch.float8_e4m3fn)
    weights = draw.integers(-3, 4, batch.rows, 32).float()
    spec = MLAAttentionSpec(
        block_size=ratio * PAGE_SIZE,
        num_kv_heads=1,
        max_tp_shards=1,
        head_size=132,
        dtype=torch.uint8,
        tokens_per_state=ratio,
    )
    backend = indexer.index_cache_backend() if ratio == 1 else deepseek_v4.IndexBackend
    made = backend.get_builder_cls()(spec, ["keys"], config, torch.device("cpu"))
    metadata = made.build(0, batch.common())
    buffer = torch.full((MAX_TOKENS, TOPK), 2**31 - 1, dtype=torch.int32)
    indexer.select_keys(q, weights, cache, metadata, TOPK, buffer, ratio=ratio)
    expected = reference.indexer_topk(
        q,
        weights,
        cache,
        input_row_offsets=torch.tensor([0, *batch.query_lens]).cumsum(0),
        seq_lens=torch.tensor(batch.seq_lens),
        page_table=batch.block_table,
        topk=TOPK,
        ratio=ratio,
    )
    assert_equal("selection", buffer[: batch.rows], expected)
    assert (buffer[batch.rows :] == 2**31 - 1).all()
    return metadata


def run_dividing_rank(rank, folder):
    """One of several processes of tensor parallelism, which divide the rows of prefills."""
    import conftest  # noqa: F401 - repairs Triton's interpreter

    torch.set_num_threads(1)
    model = ModelConfig(model=folder, skip_tokenizer_init=True, dtype="bfloat16")
    for num_ranks in (2, RANKS):
        parallel = ParallelConfig(
            tensor_parallel_size=num_ranks, pipeline_parallel_size=RANKS // num_ranks
        )
        config = engine_config(
            model,
            parallel_config=parallel,
            attention_config=AttentionConfig(indexer_tp_shard_min_rows=2),
        )
        with set_current_vllm_config(config):
            init_distributed_environment(RANKS, rank, f"file://{folder}/ranks", rank, "gloo")
            initialize_model_parallel(num_ranks, RANKS // num_ranks)
            for number, (case, ratio) in enumerate(itertools.product(DIVIDED, (1, 4))):
                divided.BLOCK_ROWS = (2, 64)[number % 3 == 0]
                # In async scheduling lengths on the host may be upper bounds.
                batch = Batch(Draw(number), **DIVIDED[case], spare=number % 4)
                metadata = divided_step(config, batch, ratio)
                assert metadata.divided.division.num_ranks == num_ranks
                assert metadata.divided.division.rank == rank % num_ranks
            destroy_model_parallel()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks are processes on the CPU")
def test_ranks_that_divide_rows_select_as_one(fork, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.multiprocessing.start_processes(
        run_dividing_rank, (str(tmp_path),), RANKS, start_method="forkserver"
    )


@pytest.fixture
def two_tp_ranks(monkeypatch):
    """The first of two ranks of tensor parallelism, as both do the same."""
    group = SimpleNamespace(
        rank_in_group=0,
        world_size=2,
        all_gather=lambda lists, dim: torch.cat([lists, lists], dim),
        broadcast_object=lambda rule: rule,
    )
    monkeypatch.setattr(indexer, "get_tp_group", lambda: group)


def index_metadata(config, batch):
    spec = MLAAttentionSpec(
        block_size=PAGE_SIZE, num_kv_heads=1, max_tp_shards=1, head_size=132, dtype=torch.uint8
    )
    made = indexer.IndexerMetadataBuilder(spec, ["keys"], config, torch.device("cpu"))
    return made.build(0, batch.common())


def test_rows_are_divided_by_vllms_number_if_it_is_set(config, two_tp_ranks, monkeypatch):
    batch = Batch(Draw(0), [1, 3, 30], [200, 60, 300])  # a decode and 33 rows
    assert index_metadata(config, batch).divided is None
    for rows, divides in ((34, False), (33, True)):
        monkeypatch.setattr(config.attention_config, "indexer_tp_shard_min_rows", rows)
        found = index_metadata(config, batch).divided
        assert (found is not None) == divides
    assert found.division.rows == slice(1, 34)


def test_rows_are_divided_where_scores_take_longer_than_the_exchange(
    config, two_tp_ranks, monkeypatch
):
    batch = Batch(Draw(0), [2, 30], [200, 300])
    keys = 199 + 200 + sum(range(271, 301))
    exchange_keys = keys - 250 * batch.tokens
    for least, divides in ((exchange_keys, True), (exchange_keys + 1, False)):
        monkeypatch.setattr(divided, "EXCHANGE_KEYS", least)
        monkeypatch.setenv("SPARSEMLA_DIVIDE_ROWS_FROM", "250")
        assert (index_metadata(config, batch).divided is not None) == divides
    monkeypatch.setattr(divided, "EXCHANGE_KEYS", 0)
    monkeypatch.delenv("SPARSEMLA_DIVIDE_ROWS_FROM")
    assert index_metadata(config, batch).divided is None  # 128 entries of 32 heads: 384 keys a row


@pytest.mark.parametrize(
    ("topk", "expected"), [(TOPK, (1 << 20) + 24 * (32 * 128 + 4 * TOPK)), (1 << 16, 3 * 24 << 18)]
)
def test_vllms_profiling_run_takes_the_memory_of_an_exchange(
    two_tp_ranks, monkeypatch, topk, expected
):
    """With scores of 1 MiB: own queries and lists beside them, or own and all lists."""
    monkeypatch.setattr(envs, "VLLM_SPARSE_INDEXER_MAX_LOGITS_MB", 1, raising=False)
    queries, sizes = torch.zeros(48, 32, 128, dtype=torch.float8_e4m3fn), []
    with monkeypatch.context() as change:
        change.setattr(torch, "empty", lambda size, **options: sizes.append(size))
        indexer.reserve_memory(queries, topk)
    assert sizes == [expected]


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        (None, "that see 384 keys a row on average, and more in short ones (SPARSEMLA_DIVIDE_"),
        (64, "of 64 rows or more (indexer_tp_shard_min_rows)"),
    ],
    ids=["default", "vLLM's setting"],
)
def test_vllms_log_names_the_rule_once(config, two_tp_ranks, monkeypatch, caplog, rows, text):
    if rows is not None:
        monkeypatch.setattr(config.attention_config, "indexer_tp_shard_min_rows", rows)
    caplog.set_level("INFO", attention.LOGGER.name)
    _print_info_once.cache_clear()
    for _ in range(2):
        index_metadata(config, Batch(Draw(0), [3], [9]))
    (record,) = caplog.records
    start = "sparsemla: TP ranks divide the indexer's rows in prefills "
    assert record.getMessage().startswith(start + text)


def test_rows_of_decodes_and_of_whole_graphs_are_not_divided(config, two_tp_ranks, monkeypatch):
    monkeypatch.setattr(config.attention_config, "indexer_tp_shard_min_rows", 1)
    prefill = Batch(Draw(0), [3, 1], [200, 60])
    assert index_metadata(config, prefill).divided is not None
    with monkeypatch.context() as change:
        change.setattr(indexer, "max_decode_query_len", lambda config: 3)
        assert index_metadata(config, prefill).divided is None
    graphs = config.compilation_config
    for mode, divides in (("FULL", False), ("FULL_AND_PIECEWISE", True), ("NONE", True)):
        with monkeypatch.context() as change:
            change.setattr(graphs, "cudagraph_mode", CUDAGraphMode[mode])
            assert (index_metadata(config, prefill).divided is not None) == divides
    shares = SimpleNamespace(world_size=2)
    monkeypatch.setattr(indexer, "get_dcp_group", lambda: shares)
    assert index_metadata(config, prefill).divided is None


ENGINES = """
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.platforms.interface import DeviceCapability
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm_engine import MODES, engine_arguments, sharing_a_gpu

type(current_platform).device_type = "cuda"  # a configuration needs one
for name, mode in MODES.items():
    if mode.model == "deepseek_v32" and (
        mode.gpus > 1 or mode.records or mode.more
    ) and not any(each in name for each in ("hisparse", "sleep")):
        shares = mode.gpus > 1
        mode = replace(mode, shares_gpu=shares)
        with sharing_a_gpu(mode.gpus) if shares else nullcontext():
            config = EngineArgs(**engine_arguments(mode, Path({!r}))).create_engine_config()
        refused = []
        if mode.plugins:
            with set_current_vllm_config(config):
                refused = AttentionBackendEnum[mode.backend].get_class().validate_configuration(
                    576, config.model_config.dtype, mode.cache, config.cache_config.block_size,
                    True, False, True, False, False, DeviceCapability(9, 0), "decoder",
                    use_dcp=mode.dcp > 1, use_pcp=mode.pcp > 1,
                )
        parallel = config.parallel_config
        print(json.dumps([
            name,
            parallel.distributed_executor_backend,
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.decode_context_parallel_size,
            parallel.cp_kv_cache_interleave_size,
            parallel.assigned_physical_gpu_ids,
            refused,
        ]))
"""


def test_vllm_accepts_the_modes_of_the_example(run_code, tmp_path):
    """All of them but the GPUs: configurations, and the backend with shared contexts.

    Those of several GPUs here share the first one.

    HiSparse and sleeping are left out: vLLM asks for its class of platforms with CUDA.
    """
    sizes = {"max_position_embeddings": 4096, "index_topk": 512, "num_nextn_predict_layers": 1}
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
    checkpoints.write_eagle_config(folder, tmp_path / "eagle")
    status, out, err = run_code(ENGINES.format(str(folder)), "sparsemla,sparsemla_indexer")
    assert status == 0, err
    lines = [json.loads(line) for line in out.splitlines() if line.startswith("[")]
    assert len(lines) == 55
    for name, *rest in lines:
        interleave = 64 if "in pages" in name else 1
        sizes = {kind: int(size) for kind, size in re.findall(r"\b(tp|dcp|pcp|pp)(\d)", name)}
        tp, dcp = sizes.get("tp", sizes.get("dcp", 1)), sizes.get("dcp", 1)
        pp, all_ranks = sizes.get("pp", 1), max(sizes.values(), default=1)
        gpus = [0] * all_ranks if sizes else None
        ranks = ["mp" if sizes else "uni", tp, pp]
        assert rest == [*ranks, dcp, interleave, gpus, []], name


@pytest.mark.parametrize(("interleave", "num_ranks"), [(1, 2), (3, 2), (64, 3)])
def test_shares_are_those_of_vllm(interleave, num_ranks):
    seq_lens = torch.arange(400, dtype=torch.int32)
    shards = [ContextShard(rank, num_ranks, interleave) for rank in range(num_ranks)]
    theirs = get_dcp_local_seq_lens(seq_lens, num_ranks, None, interleave)
    ours = torch.stack([shard.lengths(seq_lens) for shard in shards], -1)
    assert_equal("lengths", ours, theirs)


def test_a_graph_of_ranks_that_share_keys_sees_the_next_batch(config, mla_layer):
    """A captured step scores all of its tokens again, also those that are padding by now."""
    cache = mla_layer.indexer.inner.k_cache
    spec = cache.get_kv_cache_spec(config)
    made = indexer.ShardedIndexerMetadataBuilder(spec, [cache.prefix], config, torch.device("cpu"))
    captured = made.build(0, Batch(Draw(0), [1] * 4, [9, 8, 7, 6]).common()).sharded
    batch = Batch(Draw(1), [1, 1, 0, 0], [300, 3, 0, 0], padded_tokens=2)
    made.build(0, batch.common())
    chosen = torch.empty(4, TOPK, dtype=torch.int32)
    captured.select_topk(
        batch.draw.normal(4, 32, 128).to(torch.float8_e4m3fn),
        batch.draw.normal(4, 32),
        batch.cache(INDEX_FP8),
        batch.block_table,
        TOPK,
        max_workspace_bytes=1 << 20,
        out=chosen,
    )
    assert (chosen >= 0).sum(1).tolist() == [TOPK, 3, 0, 0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks are processes on the CPU")
def test_ranks_that_share_index_keys_select_as_one(fork, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    torch.multiprocessing.start_processes(
        run_rank, (str(tmp_path),), RANKS, start_method="forkserver"
    )


@pytest.fixture
def build_model(model_config, plain_vllm, monkeypatch):
    """Makes vLLM's model with both plugins, on a platform without implementations.

    Instead of vLLM's compiled op, torch writes the latent rows. vLLM has no dense prefill here.
    """

    def selected(cls, backend, *args, **kwargs):
        backend = backend.get_class()
        return f"{backend.__module__}.{backend.__qualname__}"

    def no_prefill(cls, *args):
        raise ValueError("no dense prefill")

    def write(kv_c, k_pe, cache, slots, *, kv_cache_dtype, scale, skip_scale):
        rows = torch.cat([kv_c, k_pe], dim=-1)
        fmt = attention.format_of(kv_cache_dtype, rows.shape[-1])
        rows = pad(rows, (0, fmt.head_dim - rows.shape[-1]))
        PagedCache(cache, fmt).write(slots, rows)

    platform = type(current_platform)
    monkeypatch.setattr(platform, "device_type", "cpu")
    monkeypatch.setattr(platform, "get_attn_backend_cls", classmethod(selected))
    monkeypatch.setattr(platform, "get_mla_prefill_backend_cls", classmethod(no_prefill))
    monkeypatch.setattr(_custom_ops, "concat_and_cache_mla", write)
    monkeypatch.setattr(sparse_mla_attention, "PIN_MEMORY", False)
    monkeypatch.setattr(attention.SparseMLAImpl, "record_logical_topk_ready", lambda self: None)
    monkeypatch.setattr(envs, "VLLM_PLUGINS", ["sparsemla", "sparsemla_indexer"], raising=False)
    register()

    def build(
        nvidia_class_runs,
        dtype,
        index_heads=CONFIG["index_n_heads"],
        model_config=model_config,
        speculative=None,
        **changes,
    ):
        monkeypatch.setattr(model_config.hf_config, "index_n_heads", index_heads)
        monkeypatch.setattr(plugins, "_nvidia_class_runs", lambda: nvidia_class_runs)
        monkeypatch.setattr(
            platform, "has_device_capability", classmethod(lambda cls, *args: nvidia_class_runs)
        )
        register_the_indexer()
        config = engine_config(
            model_config,
            dtype,
            attention_config=AttentionConfig(backend="CUSTOM"),
            compilation_config=CompilationConfig(custom_ops=["none"]),
            **changes,
        )
        if speculative is not None:
            monkeypatch.setattr(config, "speculative_config", speculative)
        (architecture,) = model_config.architectures
        model_class = ModelRegistry.models[architecture].load_model_cls()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            return config, model_class(vllm_config=config)

    return build


def absorb(config):
    """Let vLLM prepare the layers' weights, as it does once they are loaded."""
    for part in config.compilation_config.static_forward_context.values():
        if hasattr(part, "process_weights_after_loading"):
            part.process_weights_after_loading(torch.bfloat16)


class Server:
    """A model with its caches, which serves one request after the other through vLLM's metadata."""

    def __init__(self, config, model):
        self.config, self.model, self.builders = config, model, {}
        for name, part in config.compilation_config.static_forward_context.items():
            backend, spec = part.get_attn_backend(), part.get_kv_cache_spec(config)
            width = spec.state_content_bytes or spec.head_size
            part.kv_cache = torch.zeros(8, PAGE_SIZE, width, dtype=spec.dtype)
            arguments = backend.customize_spec(spec), [name], config, torch.device("cpu")
            self.builders[name] = backend.get_builder_cls()(*arguments)

    def common(self, first, count, table):
        """A step of the tokens of a request behind the first ones."""
        positions, last = torch.arange(first, first + count), first + count
        offsets, length = torch.tensor([0, count]).int(), torch.tensor([last]).int()
        return CommonAttentionMetadata(
            query_start_loc=offsets,
            query_start_loc_cpu=offsets,
            seq_lens=length,
            seq_lens_cpu_upper_bound=length,
            num_reqs=1,
            num_actual_tokens=count,
            max_query_len=count,
            max_seq_len=last,
            block_table_tensor=table,
            slot_mapping=table[0, positions // PAGE_SIZE].long() * PAGE_SIZE
            + positions % PAGE_SIZE,
        )

    def run(self, metadata, common, *inputs):
        """The model's output."""
        slots = dict.fromkeys(metadata, common.slot_mapping)
        with set_forward_context(metadata, self.config, slot_mapping=slots), torch.no_grad():
            return self.model(*inputs)

    def step(self, tokens, first, table=(5, 2, 7)):
        """Log-probabilities behind each of the tokens of a request, from position ``first`` on."""
        common = self.common(first, len(tokens), torch.tensor([table]).int())
        metadata = {name: made.build(0, common) for name, made in self.builders.items()}
        hidden = self.run(metadata, common, tokens, torch.arange(first, first + len(tokens)))
        return (hidden.float() @ self.model.lm_head.weight.float().T).log_softmax(-1)


CHUNKS = [(0, 50), (50, 100), (100, 137), (137, 138), (138, 139), (139, 140)]


def log_probabilities(config, model, ids, chunks=CHUNKS):
    """Of tokens that come in chunks and then one by one."""
    server = Server(config, model)
    return torch.cat([server.step(ids[0, first:last], first) for first, last in chunks])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is built for the CPU")
@pytest.mark.parametrize(
    ("nvidia_class_runs", "dtype"),
    [(False, "auto"), (False, "fp8_ds_mla"), (True, "auto")],
    ids=["portable class, bf16", "portable class, fp8", "NVIDIA class, bf16"],
)
def test_a_whole_model_agrees_with_transformers(build_model, nvidia_class_runs, dtype):
    index_heads = 8 if nvidia_class_runs else CONFIG["index_n_heads"]
    config, model = build_model(nvidia_class_runs, dtype, index_heads)
    fields = CONFIG | {"index_n_heads": index_heads}
    del fields["architectures"], fields["torch_dtype"]
    other = (
        DeepseekV32ForCausalLM(DeepseekV32Config(**fields, initializer_range=0.1)).float().eval()
    )
    weights = {name: tensor.bfloat16() for name, tensor in other.state_dict().items()}
    other.load_state_dict(weights)
    model.load_weights(weights.items())

    absorb(config)
    ids = torch.randint(256, (1, 140))
    found = log_probabilities(config, model, ids)
    with torch.no_grad():
        expected = other(ids).logits[0].log_softmax(-1)
    away = (found - expected).abs().mean(dim=-1)
    # Until there are more keys than are selected, only roundings differ; then FP8 selects others.
    assert type(model).__module__.startswith("sparsemla.") == nvidia_class_runs
    rounding = 0.04 if dtype == "auto" else 0.2
    assert away[:TOPK].mean() < rounding
    assert away[TOPK:].mean() < 0.3


class InOrder(contextlib.nullcontext):
    """A stream or an event of vLLM's index groups where all runs in order."""

    def wait_event(self, event):
        pass

    def wait_stream(self, stream):
        pass

    def record(self, stream):
        pass


SHARED_SELECTIONS = {
    "every second layer": ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, "FSF"),
    "a pattern": ({"index_topk_pattern": "FSS"}, "FSS"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is built for the CPU")
@pytest.mark.parametrize(
    ("name", "nvidia_class_runs"),
    [("every second layer", False), ("a pattern", False), ("a pattern", True)],
    ids=["every second layer", "a pattern", "a pattern, NVIDIA class"],
)
def test_layers_that_share_a_selection_agree_with_transformers(
    build_model, tmp_path, monkeypatch, name, nvidia_class_runs
):
    changes, kinds = SHARED_SELECTIONS[name]
    fields = CONFIG | {
        "model_type": "glm_moe_dsa",
        "architectures": ["GlmMoeDsaForCausalLM"],
        "num_hidden_layers": 3,
        "first_k_dense_replace": 3,
        "mlp_layer_types": ["dense"] * 3,
        "index_n_heads": heads_of(nvidia_class_runs),
        "indexer_rope_interleave": True,
        "initializer_range": 0.1,
        **changes,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    made = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16")
    for function in ("current_stream", "_create_side_stream", "_create_event"):
        monkeypatch.setattr(index_group, function, lambda *arguments: InOrder())
    config, model = build_model(nvidia_class_runs, "auto", fields["index_n_heads"], made)
    del fields["architectures"], fields["torch_dtype"], fields["model_type"]
    other = GlmMoeDsaForCausalLM(GlmMoeDsaConfig(**fields)).float().eval()
    assert [kind[0].upper() for kind in other.config.indexer_types] == [*kinds]
    weights = {name: tensor.bfloat16() for name, tensor in other.state_dict().items()}
    other.load_state_dict(weights)
    model.load_weights(weights.items())
    absorb(config)
    layers = [layer.self_attn for layer in model.model.layers]
    if not nvidia_class_runs:
        layers = [layer.mla_attn for layer in layers]
    assert ["S" if layer.indexer is None else "F" for layer in layers] == [*kinds]
    ids = torch.randint(256, (1, 140))
    found = log_probabilities(config, model, ids)
    with torch.no_grad():
        expected = other(ids).logits[0].log_softmax(-1)
    away = (found - expected).abs().mean(dim=-1)
    assert away[:TOPK].mean() < 0.04
    assert away[TOPK:].mean() < 0.2


def published(config, seed=0):
    """Weights of DeepSeek-V3.2 for a configuration of vLLM's."""
    fields = CONFIG | {"index_n_heads": config.model_config.hf_config.index_n_heads}
    del fields["architectures"], fields["torch_dtype"]
    torch.manual_seed(seed)
    made = DeepseekV32ForCausalLM(DeepseekV32Config(**fields, initializer_range=0.1))
    return {name: tensor.bfloat16() for name, tensor in made.state_dict().items()}


CLASSES = pytest.mark.parametrize(
    ("nvidia_class_runs", "dtype"),
    [(False, "fp8_ds_mla"), (True, "auto")],
    ids=["portable class, fp8", "NVIDIA class, bf16"],
)
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="the model is built for the CPU")


def heads_of(nvidia_class_runs):
    return 8 if nvidia_class_runs else CONFIG["index_n_heads"]


@ON_CPU
@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize("drafts", [1, 2, 3])
def test_verified_drafts_get_the_tokens_of_single_steps(build_model, monkeypatch, drafts, dtype):
    """Of any proposer; rows of rejected drafts are overwritten."""
    config, model = build_model(False, dtype)
    model.load_weights(published(config).items())
    absorb(config)
    ids = torch.randint(256, (1, 150))
    steps = [(0, 64), (64, 128), *((at, at + 1) for at in range(128, 144))]
    expected = log_probabilities(config, model, ids, steps)[128:]
    speculative = SimpleNamespace(num_speculative_tokens=drafts, parallel_drafting=False)
    monkeypatch.setattr(config, "speculative_config", speculative)
    server = Server(config, model)
    for first, last in steps[:2]:
        server.step(ids[0, first:last], first)
    found, at, accepted = [], 128, 0
    while at < 144:
        step = ids[0, at : at + 1 + drafts].clone()
        step[1 + accepted :] += 1 - 256 * (step[1 + accepted :] == 255)  # another token
        assert server.builders[LAYER].reorder_batch_threshold == 1 + drafts
        logits = server.step(step, at)
        found.append(logits[: 1 + accepted])
        at, accepted = at + 1 + accepted, (accepted + 1) % (1 + drafts)
    found = torch.cat(found)[:16]
    assert (found - expected).abs().mean() < (0.01 if dtype == "auto" else 0.05)
    assert_equal("tokens", found.argmax(-1), expected.argmax(-1))


@ON_CPU
@CLASSES
def test_steps_of_a_draft_model_may_keep_their_metadata(
    build_model, tmp_path, monkeypatch, nvidia_class_runs, dtype
):
    """As vLLM's runner does it for multi-token prediction: static tensors change between drafts."""
    fields = CONFIG | {
        "architectures": ["DeepseekV32MTPModel"],
        "num_nextn_predict_layers": 1,
        "first_k_dense_replace": 3,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    draft = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16")
    speculative = SimpleNamespace(
        num_speculative_tokens=3,
        parallel_drafting=False,
        enable_adaptive_verification=False,
        draft_model_config=draft,
        method="mtp",
    )
    config, model = build_model(
        nvidia_class_runs, dtype, heads_of(nvidia_class_runs), draft, speculative
    )
    draw = Draw(7)
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(draw.normal(*weight.shape) * weight.shape[-1] ** -0.5)
    absorb(config)
    context, end = 62, 65  # on another page
    ids, hidden = torch.randint(256, (end,)), draw.normal(end, 256).bfloat16()
    table = torch.tensor([[5, 2, 7]]).int()

    def fresh(server, first, last):
        common = server.common(first, last - first, table)
        metadata = {name: made.build(0, common) for name, made in server.builders.items()}
        part = slice(first, last)
        return server.run(metadata, common, ids[part], torch.arange(first, last), hidden[part])

    parts = config.compilation_config.static_forward_context.values()
    fresh(Server(config, model), 0, context)
    caches = [part.kv_cache for part in parts]

    def drafted(keeps):
        server = Server(config, model)
        for part, cache in zip(parts, caches, strict=True):
            part.kv_cache.copy_(cache)
        if not keeps:
            return [fresh(server, at, at + 1) for at in range(context, end)]
        common, results = server.common(context, 1, table), []
        common.max_seq_len = end
        metadata = {name: made.build(0, common) for name, made in server.builders.items()}
        for at in range(context, end):
            common.seq_lens.fill_(at + 1)
            slot = table[0, at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE
            common.slot_mapping.fill_(int(slot))
            for name, made in server.builders.items():
                assert made.supports_draft_decode_metadata_update
                made.update_draft_decode_metadata(metadata[name])
            positions = torch.tensor([at])
            results.append(
                server.run(metadata, common, ids[at : at + 1], positions, hidden[at : at + 1])
            )
        return results

    for (found, _), (expected, _) in zip(drafted(True), drafted(False), strict=True):
        assert found.isfinite().all()
        assert_equal("hidden states", found, expected)


@ON_CPU
@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
def test_a_request_reads_the_prefix_that_another_has_left(build_model, dtype):
    """As with prefix caching: the first pages of two requests are the same."""
    config, model = build_model(False, dtype)
    model.load_weights(published(config).items())
    absorb(config)
    first, second = torch.randint(256, (2, 150))
    second[:128] = first[:128]

    def served(server, tokens, table):
        steps = [(128, 140), *((at, at + 1) for at in range(140, 146))]
        return torch.cat([server.step(tokens[a:b], a, table) for a, b in steps])

    alone = []
    for tokens in (first, second):
        server = Server(config, model)
        server.step(tokens[:64], 0)
        server.step(tokens[64:128], 64)
        alone.append(served(server, tokens, (5, 2, 7)))
    server = Server(config, model)
    server.step(first[:64], 0)
    server.step(first[64:128], 64)
    for tokens, table, expected in zip((first, second), ((5, 2, 7), (5, 2, 3)), alone, strict=True):
        assert_equal("log-probabilities", served(server, tokens, table), expected)


@ON_CPU
@CLASSES
def test_a_model_follows_weights_that_are_loaded_again(build_model, nvidia_class_runs, dtype):
    """By vLLM's function, after sleep of level 2 has discarded all of them."""
    config, model = build_model(nvidia_class_runs, dtype, heads_of(nvidia_class_runs))
    record_metadata_for_reloading(model)
    old, new = published(config), published(config, seed=1)
    ids = torch.randint(256, (1, 140))
    chunks = [(0, 30), (30, 31)] if nvidia_class_runs else CHUNKS  # one is interpreted, and slow
    model.load_weights(old.items())
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    before = log_probabilities(config, model, ids, chunks)
    runner = SimpleNamespace(load_config=None, lora_config=None, model_config=config.model_config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.fill_(torch.nan)
        for part in config.compilation_config.static_forward_context.values():
            for tensor in vars(part).values():  # absorbed weights
                if isinstance(tensor, torch.Tensor) and tensor is not part.kv_cache:
                    tensor.fill_(torch.nan) if tensor.is_floating_point() else None
    reload_weights(runner, model, iter(new.items()), None, is_checkpoint_format=True)
    after = log_probabilities(config, model, ids, chunks)
    reload_weights(runner, model, iter(old.items()), None, is_checkpoint_format=True)
    again = log_probabilities(config, model, ids, chunks)
    assert_equal("the old weights", again, before)
    assert (after - before).abs().mean() > 0.1
    other_config, other = build_model(nvidia_class_runs, dtype, heads_of(nvidia_class_runs))
    other.load_weights(new.items())
    absorb(other_config)
    assert_equal("the new weights", after, log_probabilities(other_config, other, ids, chunks))


@ON_CPU
def test_adapters_of_modules_that_are_not_absorbed_count(build_model, monkeypatch):
    """Through vLLM's manager of LoRA: as if the adapter were part of the weights."""
    config, model = build_model(False, "auto")
    weights = published(config)
    model.load_weights(weights.items())
    absorb(config)
    draw, adapters, targets = Draw(3), {}, ["o_proj", "q_b_proj", "wq_b", "down_proj"]
    for name in [name for name in weights if name.split(".")[-2] in targets]:
        module, (rows, columns) = name.removesuffix(".weight"), weights[name].shape
        down = (draw.normal(8, columns) * columns**-0.5).bfloat16()
        up = (draw.normal(rows, 8) * 0.3).bfloat16()
        adapters[module] = LoRALayerWeights(module, 8, 8, down, up)
        weights[name] = (weights[name].float() + up.float() @ down.float()).bfloat16()
    assert len(adapters) == 2 * len(targets)
    ids = torch.randint(256, (1, 140))
    before = log_probabilities(config, model, ids)
    punica = "vllm.lora.punica_wrapper.punica_cpu.PunicaWrapperCPU"
    platform = type(current_platform)
    monkeypatch.setattr(platform, "get_punica_wrapper", classmethod(lambda cls: punica))
    for module in (model_manager, torch_utils):
        monkeypatch.setattr(module, "PIN_MEMORY", False)
    lora = LoRAConfig(8, max_loras=1, lora_dtype=torch.bfloat16, target_modules=targets)
    monkeypatch.setattr(config, "lora_config", lora)
    manager = model_manager.LoRAModelManager(
        model, 8, MAX_TOKENS, 256, lora, torch.device("cpu"), config
    )
    manager.add_adapter(LoRAModel(1, 8, adapters))
    manager.activate_adapter(1)
    server, found = Server(config, model), []
    for first, last in CHUNKS:
        manager.set_adapter_mapping(LoRAMapping((1,) * (last - first), (1,), is_prefill=True))
        found.append(server.step(ids[0, first:last], first))
    other_config, other = build_model(False, "auto")
    other.load_weights(weights.items())
    absorb(other_config)
    expected = log_probabilities(other_config, other, ids)
    assert (expected - before).abs().mean() > 0.2
    away = (torch.cat(found) - expected).abs().mean(dim=-1)
    assert away[:TOPK].mean() < 0.04
    assert away[TOPK:].mean() < 0.3


@pytest.fixture
def calls(monkeypatch):
    """The calls of ops that the plugins make."""
    ops = {
        attention: ("gather_dequant", "sparse_decode", "sparse_prefill", "to_slots"),
        indexer: ("fused_indexer_rope_quant", "indexer_topk"),
    }
    return replay.spy(monkeypatch, ops)


@contextlib.contextmanager
def warmed_up(config, monkeypatch):
    """vLLM's start around the construction of layers; what is compiled for them.

    Sweeps are those of other ops than attention: rows without RoPE are written.
    """
    configurations, sweeps = [], []

    def collect(*found, steps):
        configurations.extend(found)
        sweeps.extend(steps)

    monkeypatch.setattr(warmup, "warm_up", collect)
    registry = JitWarmupRegistry(config)
    with registry.activate():
        yield configurations
    registry.warmup()
    assert [sweep.step.__name__ for sweep in sweeps] in ([], ["_write"])


def in_engine(config, **batch):
    """A batch with as wide a block table as vLLM's runner has."""
    max_model_len = config.model_config.max_model_len
    blocks = builder(config).kv_cache_spec.max_num_blocks_per_req(config, max_model_len)
    return Batch(Draw(0), **batch, columns=get_block_table_width(blocks, PAGE_SIZE))


@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
@pytest.mark.parametrize(
    ("num_heads", "changes"),
    [(16, {}), (128, {}), (16, NOPE)],
    ids=["16", "128", "16 without RoPE"],
)
def test_a_batch_reaches_no_kernel_that_was_not_warmed_up(
    run_python, config, calls, monkeypatch, num_heads, changes, dtype
):
    topk = TOPK + 128 if changes else TOPK
    with warmed_up(config, monkeypatch) as configurations:
        for lens in (MIXED, {"query_lens": [1, 1, 1], "seq_lens": [1, 65, 300]}):
            batch = in_engine(config, **lens, topk=topk)
            check_layer(config, batch, num_heads, dtype, **changes)
        context = config.compilation_config.static_forward_context
        made = layer(batch.selections(), num_heads, dtype, **changes)
        cache = Batch(Draw(0), **MIXED).cache(made.format)
        context[LAYER] = SimpleNamespace(impl=made, kv_cache=cache.data)
    (serving,) = configurations
    assert (serving.num_heads, serving.page_size) == (num_heads, PAGE_SIZE)
    assert {op for op, *_ in calls} == {"sparse_decode", "sparse_prefill"}
    assert replay.missing_kernels(run_python, calls, *configurations) == []


def test_converted_prefills_reach_no_kernel_that_was_not_warmed_up(
    run_python, engine, calls, monkeypatch
):
    made = engine(16, MAX_TOKENS, 4096)
    batches = [in_engine(made, **CONVERTED, topk=SELECTED, padded_tokens=n) for n in (0, 3)]
    with warmed_up(made, monkeypatch) as configurations:
        for batch in batches:
            check_layer(made, batch, 16, "fp8_ds_mla")
        last = layer(batches[0].selections(), 16, "fp8_ds_mla")
        cache = batches[0].cache(attention.FORMATS["fp8_ds_mla"])
        made.compilation_config.static_forward_context[LAYER] = SimpleNamespace(
            impl=last, kv_cache=cache.data
        )
    assert configurations[0].converts
    assert {op for op, *_ in calls} >= {"gather_dequant", "to_slots", "sparse_prefill"}
    assert replay.missing_kernels(run_python, calls, *configurations) == []


def test_prefills_with_fp8_mma_reach_no_kernel_that_was_not_warmed_up(
    run_python, engine, calls, permitting, monkeypatch
):
    made = engine(64, MAX_TOKENS, 4096)
    lens = [CONVERTED, {"query_lens": [7, 5], "seq_lens": [1201, 1900]}]
    batches = [in_engine(made, **each, topk=SELECTED) for each in lens]
    with warmed_up(made, monkeypatch) as configurations:
        for batch in batches:
            check_layer(made, batch, 64, "fp8_ds_mla")
        last = layer(batches[0].selections(), 64, "fp8_ds_mla")
        cache = batches[0].cache(attention.FORMATS["fp8_ds_mla"])
        made.compilation_config.static_forward_context[LAYER] = SimpleNamespace(
            impl=last, kv_cache=cache.data
        )
    assert replay.missing_kernels(run_python, calls, *configurations) == []
    without = [dataclasses.replace(each, allow_fp8_mma=False) for each in configurations]
    missing = replay.missing_kernels(run_python, calls, *without)
    assert {name.split()[0] for name in missing} == {"_round_rows", "_attend_rounded"}


def test_the_indexer_reaches_no_kernel_that_was_not_warmed_up(
    run_python, config, calls, monkeypatch, request
):
    with warmed_up(config, monkeypatch) as configurations:
        made = request.getfixturevalue("mla_layer")
        for lens in INDEXED.values():
            index_step(config, made, in_engine(config, **lens), neox=True)
    (serving,) = configurations
    assert (serving.index_heads, serving.topk) == (32, TOPK)
    assert {op for op, *_ in calls} == {"fused_indexer_rope_quant", "indexer_topk"}
    assert replay.missing_kernels(run_python, calls, *configurations) == []


def test_divided_rows_reach_no_kernel_that_was_not_warmed_up(
    run_python, config, calls, monkeypatch, two_tp_ranks, request
):
    monkeypatch.setattr(divided, "BLOCK_ROWS", 8)
    monkeypatch.setattr(config.attention_config, "indexer_tp_shard_min_rows", 1)
    monkeypatch.setattr(config.parallel_config, "tensor_parallel_size", 2)
    monkeypatch.setattr(config.scheduler_config, "max_num_seqs", 1)
    found = replay.spy(monkeypatch, {divided: ("indexer_topk",)})
    with warmed_up(config, monkeypatch) as configurations:
        made = request.getfixturevalue("mla_layer")
        for lens in DIVIDED.values():
            batch = in_engine(config, **lens)
            batch.num_blocks = 70  # of one cache
            index_step(config, made, batch, neox=True)
    (serving,) = configurations
    assert serving.max_requests == 1 + 1 + MAX_TOKENS // 16
    assert len(found) >= len(DIVIDED)
    assert replay.missing_kernels(run_python, [*calls, *found], *configurations) == []


def test_shared_keys_reach_no_kernel_that_was_not_warmed_up(
    run_python, config, mla_layer, monkeypatch
):
    """One rank of two, as both do the same: the other offers the same keys."""
    two = {"world_size": 2, "all_gather": lambda offer, dim: torch.cat([offer, offer], dim)}
    group = SimpleNamespace(rank_in_group=0, device_group=None, **two)
    monkeypatch.setattr(indexer, "get_dcp_group", lambda: group)
    workspace = ExchangeWorkspace(
        max_tokens=4, max_candidates=TOPK, group=get_tp_group().device_group, device="cpu"
    )
    inbox = torch.zeros(4, SLOTS, 2, inbox_width(TOPK), dtype=torch.int64)
    workspace.inboxes = Inboxes(0, (inbox, inbox), torch.zeros(4, dtype=torch.int32))
    workspace.num_ranks = 2
    monkeypatch.setattr(indexer, "exchange_workspace", lambda *_: workspace)
    monkeypatch.setattr(parallel, "_launch", lambda inboxes, call: call.selected.fill_(0))
    monkeypatch.setattr(config.parallel_config, "decode_context_parallel_size", 2)
    ops = {
        exchange: ("indexer_scores_paged", "select_topk", "exchange_topk"),
        parallel: ("merge_topk",),
    }
    calls = replay.spy(monkeypatch, ops)
    cache, keys = mla_layer.indexer.inner.k_cache, PagedCache.allocate(INDEX_FP8, 70, PAGE_SIZE)
    cache.kv_cache = keys.data
    alike = ({"query_lens": [n] * 2, "seq_lens": [700, 129]} for n in (2, 4, 5, 7, 8))
    for lens in (*SHARED.values(), *alike):
        batch = in_engine(config, **lens)
        made = indexer.ShardedIndexerMetadataBuilder(
            cache.get_kv_cache_spec(config), [cache.prefix], config, torch.device("cpu")
        )
        made.build(0, batch.common()).sharded.select_topk(
            batch.draw.normal(batch.rows, 32, 128).to(torch.float8_e4m3fn),
            batch.draw.normal(batch.rows, 32),
            keys,
            batch.block_table[:, : 1 + max(lens["seq_lens"]) // (2 * PAGE_SIZE)],
            TOPK,
            max_workspace_bytes=indexer.max_score_bytes(),
            out=torch.empty(MAX_TOKENS, TOPK, dtype=torch.int32)[: batch.rows],
        )
    serving, shared = warmup.index_layers(config, 32, TOPK, False, True, 2048, torch.bfloat16)
    assert (shared.num_ranks, shared.pages.columns) == (2, serving.table_width)
    assert {op for op, *_ in calls} == {name for names in ops.values() for name in names}
    assert replay.missing_kernels(run_python, calls, steps=[*shared.sweeps()]) == []

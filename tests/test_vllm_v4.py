"""DeepSeek-V4 in vLLM, checked against the real package, without a GPU.

Groups of caches, their tensors, and the metadata of each step come from vLLM's own functions. Its
Triton kernels run in the interpreter. CI installs vLLM for these files alone: see `.ci/run`.
"""

import contextlib
import copy
import inspect
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from vllm_here import require_vllm

require_vllm()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import DeepseekV4ForCausalLM
    from vllm.config import SpeculativeConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.kernels import mhc
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.reload.inplace import (
        get_parameter_for_reload,
        reload_weights,
    )
    from vllm.model_executor.model_loader.utils import process_weights_after_loading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.model_executor.utils import replace_parameter
    from vllm.model_executor.warmup.jit_warmup import JitWarmupRegistry
    from vllm.models.deepseek_v4 import attention as theirs
    from vllm.models.deepseek_v4.nvidia import dspark as nvidia_dspark
    from vllm.models.deepseek_v4.nvidia import model as nvidia_model
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker import workspace
    from vllm.v1.worker.workspace import init_workspace_manager

    from sparsemla.backends import vllm as plugins
    from sparsemla.backends.vllm import (
        conversions,
        deepseek_v4,
        indexer,
        projection,
        settings,
        surface,
        warmup,
        windows,
    )

import replay
from sparsemla import (
    FP8_528,
    FP8_584,
    INDEX_FP8,
    PagedCache,
    Pooling,
    WindowState,
    group_o_a_proj,
    reference,
)
from sparsemla.kernels.attention import schedule
from sparsemla.kernels.common.device import GPUS, simulated
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import Tolerance, assert_close, assert_equal
from sparsemla_lab.testing.models_v4 import DSPARK, published_drafts, published_weights
from vllm_layers import (
    HIDDEN,
    MAX_TOKENS,
    REFUSED,
    SIZES,
    TOPK,
    YARN,
    CompressedLayers,
    Experts,
    attended,
    configured,
    convert_from,  # noqa: F401 - a fixture
    engine_config,
    imported_from_vllm,
    index_queries,
    like_a_gpu,
    no_grad,  # noqa: F401 - a fixture
    one_rank,  # noqa: F401 - a fixture
    put_back,
    randomise,
    set_value,
)

pytestmark = [
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the layers are built for the CPU"),
]

CONFIG = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    **SIZES,
    "num_hidden_layers": 3,
    "compress_ratios": [0, 4, 128],
    "num_hash_layers": 0,
    "rope_parameters": YARN,
    "eos_token_id": None,
    "bos_token_id": None,
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="session")
def model_config(tmp_path_factory):
    return configured(tmp_path_factory.mktemp("model"), CONFIG)


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    with like_a_gpu(theirs):
        yield


@pytest.fixture
def config(model_config):
    config = engine_config(model_config, block_size=256)
    with set_current_vllm_config(config):
        yield config


class Engine(CompressedLayers):
    """Layers of each kind, with the caches and the metadata that vLLM's runner makes for them.

    Args:
        config: vLLM's.
        draw: randomness, of weights and pages.
    """

    def __init__(self, config, draw):
        buffer = torch.full((MAX_TOKENS, TOPK), 2**31 - 1, dtype=torch.int32)
        with set_default_torch_dtype(torch.bfloat16), deepseek_v4.exchanged():
            attention = nvidia_model._select_dsv4_attn_cls(config)
            layers = nn.ModuleList(
                attention(config, f"model.layers.{i}.attn", buffer) for i in range(3)
            )
        deepseek_v4.check_layers(layers)
        randomise(layers, draw)
        super().__init__(config, draw, layers)


def whole_request(layer, x, block=0):
    """The layer's outputs ``[T, hidden]`` for a whole request, by the reference in one piece.

    The last ``block`` tokens are drafted together, by a layer without entries.
    """
    tokens = len(x)
    positions, request = torch.arange(tokens), torch.zeros(tokens, dtype=torch.int32)
    offsets, length = torch.tensor([0, tokens]).int(), torch.tensor([tokens]).int()
    table = layer.rotary_emb.cos_sin_cache
    projected = layer.fused_wqa_wkv(x)[0]
    qr, kv = layer._split_qkv_and_norm(projected)[0], projected[:, CONFIG["q_lora_rank"] :]
    raw = PagedCache.allocate(FP8_584, 1, tokens)
    q, _ = reference.fused_rope_rmsnorm_quant(
        layer.wq_b(qr).view(tokens, 4, 512),
        kv,
        table,
        layer.kv_norm.weight,
        raw,
        positions=positions,
        slot_mapping=positions,
        eps=1e-6,
        query_norm=True,
    )
    window = positions[:, None] - torch.arange(127, -1, -1)
    if block:
        rows = torch.arange(tokens)
        window = rows.where(rows >= tokens - block - 128, -1).expand(tokens, -1)
    extra = {}

    def pooled(compressor, format, ratio):
        cache = PagedCache.allocate(format, 1, tokens)
        width = compressor.ape.shape[1]
        rows = x.float() @ compressor.fused_wkv_wgate.weight.float().T
        pooling = Pooling(ratio, overlap=ratio == 4)
        reference.pool_windows(
            rows[:, :width],
            rows[:, width:],
            compressor.norm.weight,
            table,
            WindowState(torch.zeros(1, pooling.window, 2, width)),
            cache,
            pooling=pooling,
            gate_bias=compressor.ape,
            positions=positions,
            request_ids=request,
            input_row_offsets=offsets,
            ring_ids=torch.tensor([-1]),
            slot_mapping=positions // ratio,
        )
        return cache

    if layer.compressor is not None:
        ratio = layer.compress_ratio
        slots = torch.arange(tokens)[None].where(
            torch.arange(tokens)[None] < (positions[:, None] + 1) // ratio, -1
        )
        if layer.indexer is not None:
            keys = pooled(layer.indexer.compressor, INDEX_FP8, ratio)
            slots = reference.indexer_topk(
                *index_queries(layer, x),
                keys,
                input_row_offsets=offsets,
                seq_lens=length,
                page_table=torch.zeros(1, 1, dtype=torch.int32),
                topk=TOPK,
                ratio=ratio,
            )
        entries = pooled(layer.compressor, FP8_584, ratio)
        extra = {"extra_cache": entries, "extra_topk_indices": slots}
    return attended(layer, q, raw, window, **extra)


LENGTHS = 150, 21, 6
STEPS = [
    [(0, 121)],
    [(0, 1), (1, 13)],
    [(0, 5), (2, 3)],
    [(0, 1), (1, 1), (2, 1)],
    [(1, 1), (2, 1), (0, 9)],
    [(2, 1), (1, 6), (0, 13)],
]
OUT = Tolerance(2**-8, cos=1e-4, size=2**-4)


@pytest.mark.parametrize(
    ("min_tokens", "most_rows", "num_conversions"),
    [(1000, None, 0), (5, None, 21), (5, 170, 23)],
    ids=["in place", "converted", "in chunks"],
)
def test_steps_of_an_engine_agree_with_whole_requests(
    config, convert_from, monkeypatch, min_tokens, most_rows, num_conversions
):
    """Chunks, decodes and prefills in one batch, drafts that are served again, and padding."""
    if most_rows is not None:
        monkeypatch.setattr(conversions.Rule, "most_rows", most_rows)
    converted = convert_from(min_tokens)
    engine = Engine(config, Draw(0))
    assert engine.support == "ALWAYS"  # any batch can be captured in a graph
    x = [engine.draw.normal(length, HIDDEN).bfloat16() for length in LENGTHS]
    found = engine.serve(x, STEPS)
    for layer, results in zip(engine.layers, found, strict=True):
        for request, result in enumerate(results):
            expected = whole_request(layer, x[request])
            assert_close(f"{layer.prefix}, {request}", result, expected, OUT)
    assert len(converted) == num_conversions


@pytest.mark.parametrize("min_tokens", [1000, 5], ids=["in place", "converted"])
def test_a_request_reads_the_prefix_that_another_has_left(config, convert_from, min_tokens):
    """As with prefix caching: the pages of two requests are the same up to a whole block."""
    convert_from(min_tokens)
    engine, prefix = Engine(config, Draw(0)), 256
    x, found = engine.serve_after(prefix)
    for layer, results in zip(engine.layers, found, strict=True):
        for request, result in enumerate(results):
            expected = whole_request(layer, x[request])[prefix:]
            assert_close(f"{layer.prefix}, {request}", result, expected, OUT)


def test_a_prefill_behind_decodes_may_have_padding(config, convert_from, monkeypatch):
    converted, outputs = convert_from(5), []
    engine = Engine(config, Draw(1))
    x = engine.draw.normal(9, HIDDEN).bfloat16()
    engine.step([(0, 0, x[:3])])

    def kept(layer, o, positions):
        outputs.append(o)
        return theirs_of(layer, o, positions)

    theirs_of = deepseek_v4.SparseMLAV4Attention._o_proj
    monkeypatch.setattr(deepseek_v4.SparseMLAV4Attention, "_o_proj", kept)
    engine.step([(0, 3, x[3:4]), (1, 0, x[:6])], padding=3)
    assert [each.tokens for each in converted] == [slice(1, 7)] * 3
    assert all((o[-3:] == 0).all() and o[:-3].any(-1).all() for o in outputs)


def test_prefills_of_captured_graphs_and_beyond_the_workspace_are_read_in_place(
    config, convert_from
):
    """Graphs keep addresses; vLLM's bounds of lengths count drafts that were not accepted."""
    converted = convert_from(5)
    engine = Engine(config, Draw(1))
    x = engine.draw.normal(9, HIDDEN).bfloat16()
    expected = engine.step([(0, 0, x)])
    assert len(converted) == 3
    found = [engine.step([(0, 0, x)], for_cudagraph_capture=True)]
    for layer in engine.layers:
        layer.conversion_rows = 1
    found.append(engine.step([(0, 0, x)]))
    assert len(converted) == 3
    for results in found:
        for (result,), (wanted,) in zip(results, expected, strict=True):
            assert_close("in place", result, wanted, OUT)


def test_a_microbatch_reserves_room_for_conversions(config, convert_from, monkeypatch):
    """Microbatches have workspaces of their own, which vLLM's profiling run claims."""
    converted = convert_from(5)
    engine = Engine(config, Draw(1))
    monkeypatch.setattr(workspace, "_manager", None)
    init_workspace_manager(torch.device("cpu"))
    with set_forward_context(None, config):
        engine.layers[1](torch.arange(2), torch.ones(2, HIDDEN).bfloat16())
    engine.step([(0, 0, engine.draw.normal(120, HIDDEN).bfloat16())])
    assert len(converted) == 3


@pytest.fixture
def like_hopper(monkeypatch):
    """The CPU's tier with the measurements of Hopper's."""
    converts_first = schedule.converts_first

    def on_hopper(*work, **sizes):
        with simulated(GPUS["sm_90"]):
            return converts_first(*work, **sizes)

    monkeypatch.setattr(schedule, "converts_first", on_hopper)
    yield
    conversions.reserved_rows.cache_clear()


def rule(ratio=4, num_heads=64, topk=512, max_tokens=8192, max_seq_len=1 << 20, format=FP8_584):
    limits = max_tokens, max_seq_len, torch.device("cpu")
    selected = topk if ratio in (1, 2, 4) else None
    return conversions.Rule(ratio, num_heads, 128, selected, *limits, format)


def test_the_measured_prefills_are_converted_where_it_was_faster(like_hopper):
    assert rule().chunks([4096], [32768]) == [(0, 1)]
    assert rule().chunks([4096], [1 << 20]) == []  # 262144 entries
    assert rule(num_heads=128, topk=1024).chunks([4096], [32768]) == [(0, 1)]
    assert rule().chunks([64], [32768]) == []
    assert rule(1).chunks([4096], [32768]) == [(0, 1)]  # 32768 entries
    assert rule(1).chunks([4096], [1 << 20]) == []
    assert rule(1, format=FP8_528).chunks([4096], [32768]) == []  # sm_100's, not measured


@pytest.mark.parametrize(("ratio", "listed"), [(0, 0), (1, 512), (2, 512), (4, 512), (128, 8192)])
def test_most_listed_entries_of_a_token(ratio, listed):
    assert rule(ratio).most_listed == listed


def test_first_rows_are_on_the_device_of_the_lengths():
    part = conversions.Part.of(torch.empty(2, dtype=torch.int32, device="meta"), [3, 4])
    assert part.starts.device == part.lengths.device


@pytest.mark.parametrize("max_tokens", [64, 264, 2048])
@pytest.mark.parametrize("num_heads", [8, 128])
@pytest.mark.parametrize("ratio", [0, 1, 2, 4, 128])
def test_every_step_that_gains_has_its_rows(like_hopper, ratio, num_heads, max_tokens):
    longest = 1 << 17
    made = rule(ratio, num_heads, max_tokens=max_tokens, max_seq_len=longest)
    reserved, gains = conversions.reserved_rows(made), 0
    for tokens in {2, 132, 133, 200, max_tokens - 1, max_tokens}:
        for context in (0, 100, 2000, 9000, 60000, longest):
            length = min(context + tokens, longest)
            for query_lens, seq_lens in (
                ([tokens], [length]),
                ([1, tokens - 1], [length, length]),
                ([tokens // 2] * 2, [length, tokens // 2]),
            ):
                if tokens > max_tokens:
                    continue
                for begin, end in made.chunks(query_lens, seq_lens):
                    pairs = list(zip(query_lens[begin:end], seq_lens[begin:end], strict=True))
                    parts = (
                        [made.raw_rows(m, n) for m, n in pairs],
                        [made.entries(n) for _, n in pairs],
                    )
                    nothing = torch.empty(0)
                    rows = sum(conversions.Part.of(nothing, part).num_rows for part in parts)
                    assert rows <= reserved
                    gains += 1
    assert bool(gains) is bool(reserved)


def test_a_dummy_step_writes_nothing(config):
    """vLLM runs such steps while other requests wait, with their pages in the block tables."""
    engine = Engine(config, Draw(1))
    x = engine.draw.normal(9, HIDDEN).bfloat16()
    engine.step([(0, 0, x)])
    before = {name: part.kv_cache.clone() for name, part in engine.parts.items()}
    engine.step([(0, 3, x[3:8] + 1)], dummy=True)
    for name, part in engine.parts.items():
        assert_equal(name, part.kv_cache.view(torch.uint8), before[name].view(torch.uint8))
        if "state_cache" in name:  # of all tokens that a captured graph may have
            builder = engine.builders[name]
            assert (builder.request_ids == -1).all()


def test_a_step_without_a_batch_computes_nothing(config):
    engine = Engine(config, Draw(1))
    for layer in engine.layers:
        with set_forward_context(None, config):
            out = layer(torch.arange(2), torch.ones(2, HIDDEN).bfloat16())
        assert (out == 0).all()


# DSpark's drafts: the tokens of a block see the window before it, and the whole block.

DRAFTS = 5


def dspark(**others):
    """vLLM's configuration of DSpark, without a checkpoint of its layers."""
    speculative = object.__new__(SpeculativeConfig)
    chosen = {"method": "dspark", "num_speculative_tokens": DRAFTS, "parallel_drafting": True}
    for name, value in (chosen | others).items():
        object.__setattr__(speculative, name, value)
    return speculative


@pytest.fixture
def drafting(config, monkeypatch):
    """A configuration with DSpark."""
    monkeypatch.setattr(config, "speculative_config", dspark())
    return config


class Context(nn.Module):
    """The model of DSpark's drafts, as far as it writes the rows of a context."""

    def __init__(self, layers):
        super().__init__()
        self.layers = [SimpleNamespace(attn=layer) for layer in layers]
        rank = CONFIG["q_lora_rank"]
        self.weight = torch.cat([layer.fused_wqa_wkv.weight[rank:] for layer in layers])

    def context_wkv_proj(self, x):
        return x @ self.weight.T


def test_drafted_blocks_agree_with_the_reference(drafting):
    """Contexts shorter and longer than the window, and two blocks at once."""
    engine = Engine(drafting, Draw(5))
    layers = [layer for layer in engine.layers if layer.compress_ratio == 1]
    assert layers
    draft = SimpleNamespace(is_ours=True, model=Context(layers))
    lengths = 7, 300
    x = [engine.draw.normal(length + DRAFTS, HIDDEN).bfloat16() for length in lengths]
    contexts = []
    for request, length in enumerate(lengths):
        for first in range(0, length, 100):  # what a prefill writes
            engine.step([(request, first, x[request][first : min(first + 100, length)])])
        for layer in layers:
            spec, table = spec_and_table(engine, layer, request)
            positions = torch.arange(length)
            slots = table[positions // spec.block_size].long() * spec.block_size
            slots += positions % spec.block_size
            cache = PagedCache(layer.swa_cache_layer.kv_cache, FP8_584)
            kept = slots >= spec.block_size  # those in front of the window are given up
            contexts.append((layer, cache, slots, kept, cache.read(slots[kept])))
            cache.write(slots[kept], torch.full((int(kept.sum()), 512), 9.0))
            assert (cache.read(slots[kept]) == 9).all()
        deepseek_v4.DSparkDraft.precompute_and_store_context_kv(
            draft, x[request][:length], positions, [slots.where(kept, -1)] * len(layers)
        )
    for layer, cache, slots, kept, expected in contexts:
        assert_close(layer.prefix, cache.read(slots[kept]), expected, OUT)
    blocks = [(i, length, x[i][length:]) for i, length in enumerate(lengths)]
    found = engine.step(blocks, causal=False)
    for layer in layers:
        for request, length in enumerate(lengths):
            result = found[list(engine.layers).index(layer)][request]
            expected = whole_request(layer, x[request], block=DRAFTS)
            assert_close(f"{layer.prefix}, {request}", result, expected[length:], OUT)


def spec_and_table(engine, layer, request):
    """What the raw rows of a layer take, and the pages of a request."""
    name = layer.swa_cache_layer.prefix
    for number, group in enumerate(engine.caches.kv_cache_groups):
        if name in group.layer_names:
            spec, _, row = engine.row(number, request, engine.config.model_config.max_model_len)
            return spec, row
    raise AssertionError(name)


OVERRIDDEN = surface.overridden(deepseek_v4) | surface.overridden(windows)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_signatures_match_vllm(name):
    ours, vllms = OVERRIDDEN[name]
    assert surface.parameters(ours) == surface.parameters(vllms)


def test_everything_that_a_layer_calls_is_overridden():
    assert {
        "Compressor.forward",
        "IndexCache.get_attn_backend",
        "Indexer._get_attn_cls",
        "Indexer._get_cache_cls",
        "Indexer._get_compressor_cls",
        "Indexer._q_rope_quant",
        "SparseMLAV4Attention._fused_qnorm_rope_kv_insert",
        "SparseMLAV4Attention._get_indexer_cls",
        "SparseMLAV4Attention._o_proj",
        "SparseMLAV4Attention._split_qkv_and_norm",
        "SparseMLAV4Attention.forward_mqa",
        "SparseMLAV4Attention.get_padded_num_q_heads",
        "WindowBuilder.build_tile_scheduler",
    } <= set(OVERRIDDEN)
    assert not inspect.isabstract(deepseek_v4.SparseMLAV4Attention)


@pytest.mark.parametrize("row", surface.DEEPSEEK_V4, ids=lambda row: row.path)
def test_what_is_touched_fits_vllm(row):
    assert row.problem() is None


@pytest.mark.parametrize("name", ["deepseek_v4", "projection", "windows"])
def test_every_import_from_vllm_has_a_row(name):
    imported = imported_from_vllm(Path(plugins.__file__).parent / f"{name}.py")
    assert imported <= {row.path for row in surface.DEEPSEEK_V4}


@pytest.fixture
def build_model(model_config, monkeypatch):
    """Makes vLLM's model as its registry has it after the plugin was loaded."""
    for architecture in plugins.V4_MODELS:
        monkeypatch.setitem(ModelRegistry.models, architecture, None)
    plugins.register()
    monkeypatch.setattr(nvidia_model, "DeepseekV4MoE", Experts)
    monkeypatch.setattr(nvidia_model.DeepseekV4ForCausalLM, "set_moe_parameters", lambda self: None)
    # vLLM's own attention asks for a GPU.
    cls = nvidia_model.DeepseekV4FlashMLAAttention
    monkeypatch.setattr(cls, "__init__", theirs.DeepseekV4Attention.__init__)

    def build(backend, architecture=CONFIG["architectures"][0], speculative=None):
        config = engine_config(model_config, backend, block_size=256)
        config.kernel_config.enable_jit_warmup = False  # which needs TileLang
        config.speculative_config = speculative
        # As vLLM sets it for drafts of blocks.
        config.attention_config.use_non_causal = speculative is not None
        model = ModelRegistry.models[architecture].load_model_cls()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            return model(vllm_config=config)

    return build


def test_the_model_reads_published_weights(build_model, model_config):
    """As `benchmarks/vllm_engine.py` writes them for a model of transformers."""
    other = DeepseekV4ForCausalLM(model_config.hf_config)
    weights = published_weights(other)
    assert {"layers.2.ffn.experts.1.w3.weight", "layers.0.ffn.gate.bias"} <= set(weights)
    weights = {name: weight for name, weight in weights.items() if ".ffn." not in name}
    model = build_model("CUSTOM")
    loaded = model.load_weights(weights.items())
    assert loaded == {name for name, _ in model.named_parameters()}
    compressor, theirs = model.model.layers[1].attn.compressor, other.model.layers[1].self_attn
    assert_equal("bias", compressor.ape, theirs.compressor.position_bias)
    norm = theirs.compressor.indexer.kv_norm.weight.bfloat16()
    assert_equal("norm", model.model.layers[1].attn.indexer.compressor.norm.weight, norm)


def test_drafts_read_published_weights(build_model, model_config):
    """As `benchmarks/vllm_engine.py` writes them for DSpark."""
    found = copy.deepcopy(model_config.hf_config)
    for name, value in DSPARK.items():
        setattr(found, name, value)
    speculative = dspark(draft_model_config=SimpleNamespace(hf_config=found))
    model = build_model("CUSTOM", settings.DSPARK, speculative)
    weights = published_drafts(DeepseekV4ForCausalLM(model_config.hf_config), far=100)
    assert all(name.startswith("mtp.0.") for name in weights)
    loaded = model.load_weights((name, x) for name, x in weights.items() if ".ffn." not in name)
    shared = {"lm_head.weight", "model.embed_tokens.weight"}
    assert loaded | shared == {name for name, _ in model.named_parameters()}


def test_the_model_has_our_layers_exactly_if_the_backend_is_custom(build_model, monkeypatch):
    kept = nvidia_model._select_dsv4_attn_cls, theirs.DeepseekCompressor
    model = build_model("CUSTOM")
    assert len(deepseek_v4.check_layers(model)) == 3
    assert (nvidia_model._select_dsv4_attn_cls, theirs.DeepseekCompressor) == kept
    with pytest.raises(RuntimeError, match=r"layers\.0\.attn must have a SparseMLAV4Attention"):
        deepseek_v4.check_layers(build_model(None))
    with monkeypatch.context() as change:
        change.setattr(deepseek_v4, "exchanged", contextlib.nullcontext)
        with pytest.raises(RuntimeError, match="serve without --attention-backend CUSTOM"):
            build_model("CUSTOM")


@pytest.mark.parametrize("backend", ["CUSTOM", None])
def test_drafts_of_blocks_have_our_layers_exactly_if_the_backend_is_custom(
    build_model, model_config, monkeypatch, backend
):
    found = copy.deepcopy(model_config.hf_config)
    chosen = {"n_mtp_layers": 2, "dspark_target_layer_ids": [0, 2], "dspark_markov_rank": 16}
    for name, value in chosen.items():
        setattr(found, name, value)
    speculative = dspark(draft_model_config=SimpleNamespace(hf_config=found))
    model = build_model(backend, settings.DSPARK, speculative)
    layers = [layer.attn for layer in model.model.layers]
    assert [layer.compress_ratio for layer in layers] == [1, 1]
    written = []
    for layer in layers:
        assert isinstance(layer, deepseek_v4.SparseMLAV4Attention) is (backend is not None)
        monkeypatch.setattr(layer, "write_context", lambda *given: written.append(given), False)
    vllms = []
    monkeypatch.setattr(nvidia_dspark, "_insert_context_kv", lambda *given: vllms.append(given))
    states, positions = torch.ones(3, HIDDEN).bfloat16(), torch.arange(3)
    weight = model.model.context_wkv_proj.weight
    weight[:512], weight[512:] = 1, 2  # of each layer
    for slots in (None, [positions, None]):
        model.precompute_and_store_context_kv(states, positions, slots)
    if backend is None:
        assert not written
        assert len(vllms) == 1
        return
    assert not vllms
    ((rows, *places),) = written
    assert_equal("rows of the first layer", rows, torch.full((3, 512), HIDDEN).bfloat16())
    assert [each.tolist() for each in places] == [[0, 1, 2], [0, 1, 2]]
    assert {layer.decode_rows for layer in layers} == {192}


def test_the_first_hyper_connections_need_no_deepgemm_where_it_has_no_kernels(
    build_model, monkeypatch
):
    """vLLM calls DeepGEMM for the first layer, whatever the GPU."""
    vllms = nvidia_model.mhc_pre_broadcast_tilelang
    monkeypatch.setattr(nvidia_model, "mhc_pre_broadcast_tilelang", vllms)  # to be put back
    for supported, expected in ((True, vllms), (False, deepseek_v4.first_streams)):
        monkeypatch.setattr(deepseek_v4, "is_deep_gemm_supported", lambda found=supported: found)
        build_model("CUSTOM")
        assert nvidia_model.mhc_pre_broadcast_tilelang is expected
    draw, streams, hidden = Draw(1), 4, 256
    x = draw.normal(5, hidden).bfloat16()
    fn = draw.normal(streams * (streams + 2), streams * hidden) * hidden**-0.5
    scale, base = draw.normal(3), draw.normal(streams * (streams + 2))
    numbers = 1e-6, 1e-6, 1e-6, 2.0, 20
    norm = {"norm_weight": draw.normal(hidden).bfloat16(), "norm_eps": 1e-6}

    def normed(residual, fn, *rest, norm_weight, norm_eps):
        *mixes, x = mhc.mhc_pre_torch(residual, fn, *rest)
        return *mixes, torch.rms_norm(x, (hidden,), norm_weight, norm_eps)

    monkeypatch.setattr(nvidia_model, "mhc_pre_tilelang", normed)
    sums = fn.view(-1, streams, hidden).sum(1)  # what DeepGEMM multiplies by
    mixes = x.float() @ sums.T * (x.float().square().mean(1, keepdim=True) + 1e-6).rsqrt()
    found, post, comb, layer_input = nvidia_model.mhc_pre_broadcast_tilelang(
        x, fn, scale, base, *numbers, fn_broadcast=sums, **norm
    )
    assert_equal("streams", found, x[:, None].expand(-1, streams, -1))
    pre = (mixes[:, :streams] * scale[0] + base[:streams]).sigmoid() + 1e-6
    wanted = pre.sum(1, keepdim=True) * x.float()
    expected = torch.rms_norm(wanted, (hidden,), norm["norm_weight"].float(), 1e-6)
    torch.testing.assert_close(layer_input.float(), expected, rtol=0.02, atol=0.02)
    second = mixes[:, streams : 2 * streams] * scale[1] + base[streams : 2 * streams]
    torch.testing.assert_close(post[..., 0], 2 * second.sigmoid(), rtol=1e-3, atol=1e-3)
    assert comb.shape == (5, streams, streams)


@pytest.mark.parametrize("part", ["compressor", "indexer", "indexer.compressor", "indexer.k_cache"])
def test_a_part_that_was_not_exchanged_stops_the_start(config, part):
    engine = Engine(config, Draw(1))
    vllms = put_back(engine.layers[1], part)
    with pytest.raises(RuntimeError, match=rf"layers\.1\.attn must have a .* got {vllms}"):
        deepseek_v4.check_layers(engine.layers)
    with pytest.raises(RuntimeError, match=r"of vllm\.models\.deepseek_v4, got none"):
        deepseek_v4.check_layers(nn.Linear(1, 1))


def test_a_vllm_that_does_not_fit_stops_the_start(build_model, monkeypatch):
    row = surface.Dependency("vllm:gone", "a purpose")
    monkeypatch.setattr(surface, "DEEPSEEK_V4", (row,))
    with pytest.raises(RuntimeError, match="vllm:gone"):
        build_model("CUSTOM")
    build_model(None)  # other backends are not concerned


@pytest.mark.parametrize(
    ("where", "name", "value", "reason"),
    [
        *REFUSED,
        ("model", "compress_rates", {"any": 2}, r"compress_rates must be 4 and 128, got \[2\]"),
        ("model", "vision_n_layers", 1, "images are not supported"),
        (
            "engine",
            "speculative_config",
            SimpleNamespace(use_dspark=lambda: True, attention_backend="FLASHMLA_SPARSE"),
            "DSpark's drafts need the attention backend CUSTOM.* got FLASHMLA_SPARSE",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused(config, monkeypatch, where, name, value, reason):
    deepseek_v4.refuse(config)
    set_value(monkeypatch, config, deepseek_v4, where, name, value)
    with pytest.raises(ValueError, match=rf"sparsemla: .*{reason}.*without --attention-backend"):
        deepseek_v4.refuse(config)


def codes_of(draw, dtype, rows, cols=1024):
    """e4m3 codes and scales of a linear layer with two groups of ``rows`` outputs."""
    codes = draw.normal(2 * rows, cols).to(torch.float8_e4m3fn)
    blocks = draw.normal(-(-2 * rows // 128), cols // 128).exp()
    return codes, blocks.to(dtype)


class Packed(QuantizeMethodBase):
    """Weights in the format of a kernel, as for GPUs without e4m3, which returns its sums."""

    def create_weights(self, layer, *arguments, **options):
        raise NotImplementedError

    def process_weights_after_loading(self, layer):
        replace_parameter(layer, "weight", layer.weight.view(torch.int32).T.contiguous())

    def apply(self, layer, x, bias=None):
        return x.float() @ layer.weight.T.contiguous().view(torch.bfloat16).T.float()


def linear_of(weight, **others):
    """A layer of vLLM without its constructor, which asks for a platform."""
    linear = nn.Module()
    linear.weight = nn.Parameter(weight, requires_grad=False)
    for name, value in others.items():
        setattr(linear, name, nn.Parameter(value, requires_grad=False))
    linear.bias, linear.quant_method = None, UnquantizedLinearMethod()
    return linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu], ids=str)
@pytest.mark.parametrize(
    ("rows", "grouped"),
    # DeepGEMM's blocks end with their group.
    [(32, False), (128, False), (192, False), (256, False), (128, True), (256, True)],
)
def test_codes_and_scales_are_read_and_followed(rows, grouped, dtype):
    codes, scales = codes_of(Draw(3), dtype, rows)
    parameters = {"weight": codes, "weight_scale_inv": scales}
    if grouped:
        parameters = {name: each.unflatten(0, (2, -1)) for name, each in parameters.items()}
    linear = linear_of(**{name: each.clone() for name, each in parameters.items()})
    made = projection.GroupProjection(linear, 2, rows, 1024, "wo_a")
    first = made.weight()
    for factor in (1, 4):
        linear.weight_scale_inv.copy_(parameters["weight_scale_inv"].float() * factor)
        linear.weight.copy_(parameters["weight"].float() / factor)
        if factor == 4 and made.scale is not None:
            made.refresh()
        weight = made.weight()
        expected = group_o_a_proj(
            linear.weight.flatten(0, -2), linear.weight_scale_inv.flatten(0, -2), num_groups=2
        )
        assert_equal("codes", weight.data, expected.data)
        assert_equal("scales", weight.scale, expected.scale)
        assert weight.data.data_ptr() == linear.weight.data_ptr()
        assert weight.scale.data_ptr() == first.scale.data_ptr()  # which captured graphs read
    is_view = dtype == torch.float32 and rows % 128 == 0
    assert (made.scale is None) is is_view
    assert (weight.scale.data_ptr() == linear.weight_scale_inv.data_ptr()) is is_view
    if not is_view:
        with pytest.raises(ValueError, match=r"wo_a\.weight must be updated in the format of a ch"):
            get_parameter_for_reload(nn.ModuleDict({"wo_a": linear}), "wo_a.weight")


def test_what_wo_a_computes_beside_its_matrices_is_refused():
    codes, scales = codes_of(Draw(3), torch.float32, 128)

    def refused(linear):
        with pytest.raises(ValueError, match=r"sparsemla: .*layers\.7\.wo_a must ") as caught:
            projection.GroupProjection(linear, 2, 128, 1024, "layers.7.wo_a").refresh()
        return str(caught.value)

    linear = linear_of(codes, weight_scale_inv=scales)
    linear.bias = nn.Parameter(torch.zeros(256))
    assert refused(linear).endswith("must not have a bias")
    one = torch.ones(1)
    linear = linear_of(codes.T.contiguous().T, weight_scale=one, input_scale=one)
    assert "without a static scale of its inputs" in refused(linear)
    linear = linear_of(codes.unflatten(0, (2, -1)), weight_scale_inv=scales.int())
    linear.weight_scale_inv = nn.Parameter(scales.int().unflatten(0, (2, -1)), requires_grad=False)
    assert "must be float32, bfloat16 or float8_e8m0fnu, got torch.int32" in refused(linear)
    linear = linear_of(codes.unflatten(0, (2, -1)), weight_scale=torch.ones(2, 128, 32))
    assert "a scale for each 128 x 128; got [2, 128, 1024] in torch.float8_e4m3fn" in refused(
        linear
    )


@pytest.mark.parametrize("kind", ["bfloat16", "codes", "packed"])
def test_the_output_follows_weights_that_are_loaded_again(build_model, model_config, kind):
    """By vLLM's own functions, in the format of a checkpoint and in that of kernels."""
    model = build_model("CUSTOM")
    layers = deepseek_v4.check_layers(model)
    draw = Draw(5)
    for layer in layers:
        if kind == "packed":
            layer.wo_a.quant_method = Packed()
        elif kind == "codes":
            layer.wo_a.weight = nn.Parameter(
                torch.empty(64, 1024, dtype=torch.float8_e4m3fn), requires_grad=False
            )
            layer.wo_a.weight_scale_inv = nn.Parameter(torch.empty(1, 8), requires_grad=False)
            layer.wo_a.weight.weight_loader = default_weight_loader
            layer.wo_a.weight_scale_inv.weight_loader = default_weight_loader
    others = published_weights(DeepseekV4ForCausalLM(model_config.hf_config))
    others = {
        name: each
        for name, each in others.items()
        if not {"ffn", "wo_a", "attn_sink"} & {*name.split(".")}
    }
    record_metadata_for_reloading(model)
    config = SimpleNamespace(load_config=None, lora_config=None, model_config=model_config)
    x, positions = draw.normal(3, 4, 512).bfloat16(), torch.tensor([5, 900, 0])

    def weights():
        yield from others.items()
        for i in range(3):
            sinks[i] = draw.normal(4)
            yield f"layers.{i}.attn.attn_sink", sinks[i]
            name = f"layers.{i}.attn.wo_a."
            if kind == "codes":
                codes, scales = codes_of(draw, torch.float32, 32)
                yield name + "weight", codes
                yield name + "weight_scale_inv", scales
                made = group_o_a_proj(codes, scales, num_groups=2)
            else:
                weight = draw.normal(64, 1024).bfloat16()
                yield name + "weight", weight
                made = group_o_a_proj(weight, num_groups=2)
            expected[i] = made

    def check():
        for i, layer in enumerate(layers):
            assert_equal("sink", layer.attn_sink, sinks[i])
            found = layer._o_proj(x, positions)
            table = layer.rotary_emb.cos_sin_cache
            groups = reference.project_groups(
                x, expected[i], cos_sin_cache=table, positions=positions
            )
            assert_close(f"layer {i}", found, layer.wo_b(groups.flatten(1).bfloat16()), OUT)
        used = [layer.group_projection.weight() for layer in layers]
        assert not [name for name in model.state_dict() if "group_projection" in name]
        return [
            (each.data.data_ptr(), each.scale is not None and each.scale.data_ptr())
            for each in used
        ]

    expected, sinks = {}, {}
    model.load_weights(weights())
    process_weights_after_loading(model, model_config, torch.device("cpu"))
    addresses = check()
    reload_weights(config, model, weights(), None, is_checkpoint_format=True)
    assert check() == addresses
    if kind != "packed":  # weights as loaders of other engines write them
        model.load_weights(weights())
        assert check() == addresses
    kernels = [
        (f"model.layers.{i}.attn.wo_a.weight", layer.wo_a.weight.clone())
        for i, layer in enumerate(layers)
    ]
    if kind == "bfloat16":
        expected = {
            i: group_o_a_proj(weight.flip(0), num_groups=2) for i, (_, weight) in enumerate(kernels)
        }
        kernels = [(name, weight.flip(0)) for name, weight in kernels]
        reload_weights(config, model, iter(kernels), None, is_checkpoint_format=False)
        assert check() == addresses
    else:
        with pytest.raises(
            ValueError, match=r"layers\.0\.attn\.wo_a\.weight must be updated in the"
        ):
            reload_weights(config, model, iter(kernels), None, is_checkpoint_format=False)


def test_kernels_that_no_layer_calls_are_not_compiled_at_the_start(config):
    registry = JitWarmupRegistry(config)
    with registry.activate():
        Engine(config, Draw(1))
    names = {type(kernel).__module__ for kernel in registry._registrations}
    assert "sparsemla.backends.vllm.warmup" in names
    assert "vllm.v1.attention.backends.mla.sparse_swa" in names
    assert not any(name.startswith(deepseek_v4.REPLACED) for name in names)


def test_drafted_blocks_reach_no_kernel_that_was_not_warmed_up(run_python, drafting, monkeypatch):
    engine = Engine(drafting, Draw(6))
    drafting.cache_config.block_size = 4
    layers = [layer for layer in engine.layers if layer.compress_ratio == 1]
    for layer in engine.layers:  # a step serves all of them
        layer.decode_rows = 192
    found = list(warmup.compressed_layers(drafting, deepseek_v4.SparseMLAV4Attention))
    calls = replay.spy(monkeypatch, {deepseek_v4: ("fused_rope_rmsnorm_quant", "sparse_decode")})
    draft = SimpleNamespace(is_ours=True, model=Context(layers))
    x = engine.draw.normal(60, HIDDEN).bfloat16()
    engine.step([(0, 0, x[:40])])
    slots = torch.arange(40) - 40  # nothing is written again
    deepseek_v4.DSparkDraft.precompute_and_store_context_kv(
        draft, x[:40], torch.arange(40), [slots] * len(layers)
    )
    engine.step([(0, 40, x[40 : 40 + DRAFTS])], causal=False)
    decodes = [given for op, *given in calls if op == "sparse_decode"]
    assert decodes
    servings = [serving for layer in found for serving in layer.selections()]
    sweeps = [sweep for layer in found for sweep in layer.sweeps()]
    assert replay.missing_kernels(run_python, calls, *servings, steps=sweeps) == []


@pytest.mark.parametrize("min_tokens", [1000, 1], ids=["in place", "converted"])
def test_steps_reach_no_kernel_that_was_not_warmed_up(
    run_python, config, convert_from, monkeypatch, min_tokens
):
    monkeypatch.setattr(conversions.Rule, "most_rows", 60)  # the last step has two chunks
    converted = convert_from(min_tokens)
    engine = Engine(config, Draw(4))
    # As vLLM sets it once caches are there: to the least of all groups, that of open windows.
    config.cache_config.block_size = 4
    layers = list(warmup.compressed_layers(config, deepseek_v4.SparseMLAV4Attention))
    assert [layer.ratio for layer in layers] == [1, 4, 128]
    calls = replay.spy(
        monkeypatch,
        {
            deepseek_v4: (
                "fused_rope_rmsnorm_quant",
                "pool_windows",
                "prepare_index_queries",
                "sparse_decode",
            ),
            windows: ("sparse_prefill", "to_slots"),
            conversions: ("gather_dequant", "sparse_prefill", "to_slots"),
            indexer: ("indexer_topk",),
            projection: ("project_groups",),
        },
    )
    x = engine.draw.normal(48, HIDDEN).bfloat16()
    engine.step([(0, 0, x[:40])])
    engine.step([(0, 40, x[40:41]), (1, 0, x[:5])])
    engine.step([(0, 41, x[41:42]), (1, 5, x[5:6])], padding=3)
    engine.step([(0, 42, x[42:43]), (1, 6, x[6:9]), (2, 0, x[:40])])
    chunks = [len(each.raw.starts) for each in converted[-4:]]
    assert chunks == ([2, 1, 1, 2] if min_tokens == 1 else [])
    assert all(layer.converts is bool(converted) for layer in layers)
    assert {op for op, *_ in calls} >= {"pool_windows", "indexer_topk", "sparse_decode"}
    servings = [serving for layer in layers for serving in layer.selections()]
    sweeps = [sweep for layer in layers for sweep in layer.sweeps()]
    assert replay.missing_kernels(run_python, calls, *servings, steps=sweeps) == []

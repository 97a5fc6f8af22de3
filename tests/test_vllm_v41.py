"""DeepSeek-V4.1 in vLLM, checked against the real package, without a GPU.

Groups of caches, their tensors, and the metadata of each step come from vLLM's own functions. Its
Triton kernels run in the interpreter. No library has a class of the model to compare with, so
layers are compared with the reference, and the rows of their caches with those of vLLM's kernels.
"""

import contextlib
import inspect
import sys
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
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.kernels.linear.mxfp8.emulation import EmulationMxfp8LinearKernel
    from vllm.model_executor.kernels.linear.mxfp8.Mxfp8LinearKernel import Mxfp8LinearLayerConfig
    from vllm.model_executor.layers.quantization import modelopt
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.models.deepseek_v41 import DeepseekV4FP8Config
    from vllm.models.deepseek_v41 import attention as theirs
    from vllm.models.deepseek_v41.common.ops import fused_compress_quant_cache as their_rows
    from vllm.models.deepseek_v41.common.ops import indexer_k_store as their_keys
    from vllm.models.deepseek_v41.nvidia import model as nvidia_model
    from vllm.platforms import current_platform
    from vllm.transformers_utils.configs.deepseek_v41 import DeepseekV41Config
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.worker import workspace
    from vllm.v1.worker.workspace import init_workspace_manager

    from sparsemla.backends import vllm as plugins
    from sparsemla.backends.vllm import (
        conversions,
        deepseek_v41,
        projection,
        surface,
        warmup,
        windows,
    )

import replay
from sparsemla import FP8_528, FP8_584, INDEX_FP8, PagedCache, reference
from sparsemla_lab.testing import models_v41
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import Tolerance, assert_close, assert_equal
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

BLOCK = 4
RATIOS = [0, 2, 2, 1, 1, 1]
TEXT = {
    **SIZES,
    "num_hidden_layers": len(RATIOS),
    "compress_ratios": RATIOS,
    "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 4],
    "candidate_source_layer_id": 3,
    "candidate_topk_blocks": 3,
    "candidate_block_size": BLOCK,
    "rms_norm_eps": 1e-6,
    "hc_mult": 4,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rope_theta": 10000.0,
    "compress_rope_theta": 160000.0,
    "rope_scaling": YARN,
}
CONFIG = {
    "architectures": ["DeepseekV41ForCausalLM"],
    "model_type": "deepseek_v41",
    "text_config": TEXT,
    "vision_config": {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 1},
    "torch_dtype": "bfloat16",
}


@pytest.fixture(scope="session")
def model_config(tmp_path_factory):
    return configured(tmp_path_factory.mktemp("model"), CONFIG)


@pytest.fixture(scope="module", autouse=True)
def on_the_cpu():
    with like_a_gpu(theirs):
        yield


def pretend(monkeypatch, family):
    """Let vLLM choose records and pages as for a GPU of this family."""
    monkeypatch.setattr(
        type(current_platform),
        "is_device_capability_family",
        classmethod(lambda cls, capability, device_id=0: capability == family),
    )


@pytest.fixture
def config(model_config, monkeypatch):
    pretend(monkeypatch, 90)
    config = engine_config(model_config, swa_bounded_replay=False, block_size=64)
    with set_current_vllm_config(config):
        yield config


class Engine(CompressedLayers):
    """Layers of each kind, with the caches and the metadata that vLLM's runner makes for them.

    Args:
        config: vLLM's.
        draw: randomness, of weights and pages.
    """

    def __init__(self, config, draw):
        with set_default_torch_dtype(torch.bfloat16), deepseek_v41.exchanged():
            attention = nvidia_model._select_dsv4_attn_cls(config)
            chosen, blocks = (
                torch.full((MAX_TOKENS, count), 2**31 - 1, dtype=torch.int32)
                for count in (TOPK, TEXT["candidate_topk_blocks"])
            )
            layers = nn.ModuleList(
                attention(config, f"model.layers.{i}.attn", chosen, None, blocks)
                for i in range(len(RATIOS))
            )
        deepseek_v41.check_layers(layers)
        randomise(layers, draw)
        super().__init__(config, draw, layers)


def rotated(rows, table, positions):
    """Rows ``[T, ..., D]`` with their last 64 dims rotated in pairs, in float32."""
    cos, sin = table[positions].float().view(len(rows), *[1] * (rows.dim() - 2), 64).chunk(2, -1)
    still, turning = rows.float().split([rows.shape[-1] - 64, 64], -1)
    even, odd = turning[..., ::2], turning[..., 1::2]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
    return torch.cat([still, turned], -1)


def normed(rows, norm):
    return torch.rms_norm(rows.float(), rows.shape[-1:], norm.weight.float(), 1e-6)


def made_rows(layer, x, fmt):
    """What a layer that owns entries makes of whole windows: entries and index keys."""
    ratio, table = layer.compress_ratio, layer.rotary_emb.cos_sin_cache
    rows = x.float() @ layer.compressor.fused_wkv_wgate.weight.float().T
    count = len(x) // ratio
    values = rows[: count * ratio].view(count, ratio, -1)
    if ratio > 1:
        values, gates = values.chunk(2, -1)
        values = (values * gates.softmax(1)).sum(1, keepdim=True)
    latent = normed(values[:, 0], layer.compressor.norm).bfloat16()
    made, first = [], torch.arange(count) * ratio
    keys = normed(layer.indexer.wk(latent)[0], layer.indexer.k_norm)
    for vectors, format in ((latent, fmt), (keys, INDEX_FP8)):
        cache = PagedCache.allocate(format, 1, max(count, 1))
        cache.write(torch.arange(count), rotated(vectors, table, first))
        made.append(cache)
    return made


def whole_request(layers, number, x, fmt=FP8_584):
    """A layer's outputs ``[T, hidden]`` for a whole request, by the reference in one piece."""
    layer, tokens = layers[number], len(x)
    positions, table = torch.arange(tokens), layer.rotary_emb.cos_sin_cache
    projected = layer.fused_wqa_wkv(x)[0]
    qr, kv = layer._split_qkv_and_norm(projected)[0], projected[:, TEXT["q_lora_rank"] :]
    q = rotated(layer.wq_b(qr).view(tokens, 4, 512), table, positions).bfloat16()
    raw = PagedCache.allocate(fmt, 1, tokens)
    reference.fused_rope_rmsnorm_quant(
        kv.new_empty(tokens, 0, 64),
        kv,
        table,
        layer.kv_norm.weight,
        raw,
        positions=positions,
        slot_mapping=positions,
        eps=1e-6,
    )
    window = positions[:, None] - torch.arange(127, -1, -1)
    extra = {}
    if layer.compress_ratio:
        entries, keys = made_rows(layers[layer.kv_source_layer_id], x, fmt)
        source = layers[layer.index_source_layer_id]
        chosen = selected(layers, source.layer_id, x, keys)
        extra = {"extra_cache": entries, "extra_topk_indices": chosen}
    return attended(layer, q, raw, window, **extra)


def selected(layers, number, x, keys, *, blocks=False):
    """What the indexer of a layer selects, or which blocks it chooses."""
    layer, tokens = layers[number], len(x)
    given = (*index_queries(layer, x), keys)
    options = {
        "input_row_offsets": torch.tensor([0, tokens]).int(),
        "seq_lens": torch.tensor([tokens]).int(),
        "page_table": torch.zeros(1, 1, dtype=torch.int32),
        "topk": TOPK,
        "ratio": layer.compress_ratio,
    }
    sizes = {"topk_blocks": TEXT["candidate_topk_blocks"], "block_size": BLOCK}
    if number == TEXT["candidate_source_layer_id"]:
        return reference.indexer_topk_blocks(*given, **options, **sizes)[int(blocks)]
    if number > TEXT["candidate_source_layer_id"]:
        among = selected(layers, TEXT["candidate_source_layer_id"], x, keys, blocks=True)
        return reference.indexer_topk_of_blocks(*given, blocks=among, block_size=BLOCK, **options)
    return reference.indexer_topk(*given, **options)


LENGTHS = 143, 21, 6
STEPS = [
    [(0, 121)],
    [(0, 1), (1, 13)],
    [(0, 5), (2, 3)],
    [(0, 1), (1, 1), (2, 1)],
    [(1, 1), (2, 1), (0, 9)],
    [(2, 1), (1, 6), (0, 6)],  # no more drafts than a ring of open windows keeps
]
OUT = Tolerance(2**-8, cos=1e-4, size=2**-4)
COARSE = Tolerance(2**-4, cos=1e-4)
"""Where RoPE dims are e4m3, too: projections of fewer tokens round to other codes."""


def compare(engine, x, fmt=FP8_584, tolerance=OUT):
    found = engine.serve(x, STEPS)
    for number, (layer, results) in enumerate(zip(engine.layers, found, strict=True)):
        for request, result in enumerate(results):
            expected = whole_request(engine.layers, number, x[request], fmt)
            assert_close(f"{layer.prefix}, {request}", result, expected, tolerance)


@pytest.mark.parametrize(
    ("min_tokens", "most_rows", "num_conversions"),
    [(1000, None, 0), (5, None, 42), (5, 280, 48)],
    ids=["in place", "converted", "in chunks"],
)
def test_steps_of_an_engine_agree_with_whole_requests(
    config, convert_from, monkeypatch, min_tokens, most_rows, num_conversions
):
    """Entries of other layers, decodes and several prefills in one batch, and padding."""
    if most_rows is not None:  # of layers with an entry a token, two requests are too many
        monkeypatch.setattr(conversions.Rule, "most_rows", most_rows)
    converted = convert_from(min_tokens)
    engine = Engine(config, Draw(0))
    assert engine.support == "ALWAYS"  # any batch can be captured in a graph
    assert [layer.compress_ratio for layer in engine.layers] == RATIOS
    owners = [i for i, layer in enumerate(engine.layers) if layer.compressor is not None]
    assert owners == TEXT["kv_source_layer_ids"]
    compare(engine, [engine.draw.normal(length, HIDDEN).bfloat16() for length in LENGTHS])
    assert len(converted) == num_conversions


def test_the_records_of_blackwell_are_served(config, monkeypatch):
    """On sm_100 vLLM's rows have 528 bytes, and its pages 128 tokens."""
    pretend(monkeypatch, 100)
    config.cache_config.block_size = 128
    engine = Engine(config, Draw(2))
    assert {layer.row_format for layer in engine.layers} == {FP8_528}
    assert {layer.rule.format for layer in engine.layers} == {FP8_528}
    assert {layer.kv_cache.shape[1:] for layer in engine.layers if layer.is_kv_source} == {
        (64, 528),
        (128, 528),
    }
    x = [engine.draw.normal(length, HIDDEN).bfloat16() for length in LENGTHS]
    compare(engine, x, FP8_528, COARSE)


def test_mxfp8_weights_of_the_first_output_projection_are_read(config, monkeypatch):
    """As vLLM keeps them for a linear layer, on any GPU."""
    kernel = EmulationMxfp8LinearKernel(Mxfp8LinearLayerConfig(weight_shape=(64, 1024)))
    monkeypatch.setattr(modelopt, "select_linear_kernel", lambda *args, **options: kernel)
    config.quant_config = DeepseekV4FP8Config(True, "dynamic", weight_block_size=[32, 32])
    with set_default_torch_dtype(torch.bfloat16), deepseek_v41.exchanged():
        layer = nvidia_model._select_dsv4_attn_cls(config)(config, "model.layers.0.attn")
    draw, linear = Draw(5), layer.wo_a
    codes = draw.normal(64, 1024).to(torch.float8_e4m3fn)
    scales = draw.integers(120, 132, 64, 32).to(torch.uint8)
    linear.weight.data.copy_(codes)
    linear.weight_scale.data.copy_(scales)
    linear.quant_method.process_weights_after_loading(linear)
    layer.process_weights_after_loading(torch.bfloat16)
    expected = codes.float() * (2.0 ** (scales.float() - 127)).repeat_interleave(32, 1)
    found = layer.group_projection.weight()
    assert found.scale is None
    assert torch.equal(found.data, expected.view(2, 32, 1024).bfloat16())  # but for signs of zeros


def slots_of(engine, part, request, count):
    """Slots of the first rows of a request in a part's cache."""
    for group, table in zip(engine.caches.kv_cache_groups, engine.tables, strict=True):
        if part.prefix in group.layer_names:
            rows, pages = torch.arange(count), part.kv_cache.shape[1]
            return table[request][rows // pages].long() * pages + rows % pages
    raise AssertionError(part.prefix)


@pytest.mark.parametrize("number", [1, 3])
def test_rows_of_entries_and_keys_are_those_of_vllms_kernels(config, number):
    """Windows that begin in an earlier step, and the same number of bytes in another order."""
    engine, tokens = Engine(config, Draw(3)), 21
    layer, x = engine.layers[number], engine.draw.normal(tokens, HIDDEN).bfloat16()
    for first, last in ((0, 13), (13, 14), (14, tokens)):
        engine.step([(0, first, x[first:last])])
    ratio, positions = layer.compress_ratio, torch.arange(tokens)
    kv_score = torch.mm(x, layer.compressor.fused_wkv_wgate.weight.T, out_dtype=torch.float32)
    latent = torch.empty(tokens, 512, dtype=torch.bfloat16)
    ring = torch.zeros(1, 32, 1024)
    their_rows.fused_save_compress_norm(
        kv_score,
        positions,
        ring if ratio == 2 else None,
        positions,
        torch.tensor([0, tokens]).int(),
        torch.zeros(tokens, dtype=torch.int32),
        layer.compressor.norm.weight,
        1e-6,
        ratio,
        latent,
    )
    table, slots = layer.rotary_emb.cos_sin_cache, positions // ratio
    rows, keys = (PagedCache.allocate(fmt, 1, 32) for fmt in (FP8_584, INDEX_FP8))
    their_rows.rope_quant_insert(latent, positions, table, rows.data, slots, ratio)
    indexer, count = layer.indexer, tokens // ratio
    their_keys.indexer_k_norm_rope_store(
        indexer.wk(latent)[0],
        positions,
        table,
        indexer.k_norm.weight,
        1e-6,
        keys.data,
        slots,
        ratio,
        False,
    )
    for part, expected in ((layer, rows), (indexer.k_cache, keys)):
        found = PagedCache(part.kv_cache, expected.format).read(slots_of(engine, part, 0, count))
        wanted = expected.read(torch.arange(count))
        # Codes of values between two of them may differ, as keys are not rounded to bfloat16 first.
        assert_close(part.prefix, found, wanted, Tolerance(2**-8, rel=2**-3, cos=1e-3))
        assert (found == wanted).float().mean() > 0.95


@pytest.mark.parametrize("min_tokens", [1000, 5], ids=["in place", "converted"])
def test_a_request_reads_the_prefix_that_another_has_left(config, convert_from, min_tokens):
    """As with prefix caching: the pages of two requests are the same up to a whole block."""
    convert_from(min_tokens)
    engine, prefix = Engine(config, Draw(0)), 192
    x, found = engine.serve_after(prefix, own_state=True)
    for number, (layer, results) in enumerate(zip(engine.layers, found, strict=True)):
        for request, result in enumerate(results):
            expected = whole_request(engine.layers, number, x[request])[prefix:]
            assert_close(f"{layer.prefix}, {request}", result, expected, OUT)


def test_a_layer_converts_for_the_entries_that_it_reads(config, convert_from):
    """An entry of one token is an entry, and rows of another layer are converted like its own."""
    converted = convert_from(5)
    engine = Engine(config, Draw(1))
    engine.step([(0, 0, engine.draw.normal(9, HIDDEN).bfloat16())])
    assert [layer.rule.topk for layer in engine.layers] == [None, *[TOPK] * 5]
    found = [None if each.entries is None else each.entries.lengths.tolist() for each in converted]
    assert found == [None, [4], [4], [9], [9], [9]]


@pytest.mark.parametrize("family", [90, 100])
def test_prefills_that_are_read_in_place_agree_with_converted_ones(
    config, convert_from, monkeypatch, family
):
    """Those behind decodes, of captured graphs, and beyond the workspace, with either rows."""
    pretend(monkeypatch, family)
    config.cache_config.block_size = 64 if family == 90 else 128
    converted = convert_from(5)
    engine = Engine(config, Draw(1))
    x = engine.draw.normal(150, HIDDEN).bfloat16()
    engine.step([(0, 0, x[:140])])
    engine.step([(1, 0, x[:20])])
    converted.clear()
    last = [(1, 20, x[20:21]), (2, 0, x[100:106]), (0, 140, x[140:147])]
    expected = engine.step(last, padding=3)
    assert [each.tokens for each in converted] == [slice(1, 14)] * len(RATIOS)
    found = [engine.step(last, padding=3, for_cudagraph_capture=True)]
    for layer in engine.layers:
        layer.conversion_rows = 1
    found.append(engine.step(last, padding=3))
    assert len(converted) == len(RATIOS)
    for results in found:
        for result, wanted in zip(results, expected, strict=True):
            for ours, theirs in zip(result, wanted, strict=True):
                assert_close("in place", ours, theirs, OUT)


def test_a_microbatch_reserves_room_for_conversions(config, convert_from, monkeypatch):
    """Microbatches have workspaces of their own, which vLLM's profiling run claims."""
    converted = convert_from(5)
    engine = Engine(config, Draw(1))
    monkeypatch.setattr(workspace, "_manager", None)
    init_workspace_manager(torch.device("cpu"))
    with set_forward_context(None, config):
        engine.layers[3](torch.arange(2), torch.ones(2, HIDDEN).bfloat16())
    engine.step([(0, 0, engine.draw.normal(120, HIDDEN).bfloat16())])
    assert len(converted) == len(RATIOS)


def test_a_dummy_step_writes_nothing(config):
    """Its requests have no slots, and vLLM's null block as their ring."""
    engine = Engine(config, Draw(1))
    x = engine.draw.normal(9, HIDDEN).bfloat16()
    engine.step([(0, 0, x)])
    before = {name: part.kv_cache.clone() for name, part in engine.parts.items()}
    for group, table in zip(engine.caches.kv_cache_groups, engine.tables, strict=True):
        if "state_cache" in group.layer_names[0]:
            table[1] = torch.zeros_like(table[0])
        else:
            table[1] = table[0]
    engine.allocate = lambda *given: None
    engine.step([(1, 3, x[3:8] + 1)], dummy=True)
    for name, part in engine.parts.items():
        assert_equal(name, part.kv_cache.view(torch.uint8), before[name].view(torch.uint8))
        if "state_cache" in name:  # of all tokens that a captured graph may have
            assert (engine.builders[name].request_ids == -1).all()


def test_a_step_without_a_batch_computes_nothing(config):
    engine = Engine(config, Draw(1))
    for layer in engine.layers:
        with set_forward_context(None, config):
            out = layer(torch.arange(2), torch.ones(2, HIDDEN).bfloat16())
        assert (out == 0).all()


def test_each_layer_scores_what_it_selects_from(config, monkeypatch):
    """Blocks are chosen once; the layer behind scores no other key."""
    engine, calls = Engine(config, Draw(1)), []
    for name in ("indexer_topk", "indexer_topk_blocks", "indexer_topk_of_blocks"):
        op = getattr(deepseek_v41, name)

        def spied(*given, op=op, **options):
            calls.append(op.__name__)
            return op(*given, **options)

        monkeypatch.setattr(deepseek_v41, name, spied)
    x = engine.draw.normal(40, HIDDEN).bfloat16()
    engine.step([(0, 0, x)])
    assert calls == ["indexer_topk", "indexer_topk_blocks", "indexer_topk_of_blocks"]
    blocks, chosen = (
        getattr(engine.layers[5], name)[39].tolist()
        for name in ("candidate_block_buffer", "topk_indices_buffer")
    )
    assert len(set(blocks)) == TEXT["candidate_topk_blocks"]
    assert len(set(chosen)) == TOPK
    assert {number // BLOCK for number in chosen} <= set(blocks)


OVERRIDDEN = surface.overridden(deepseek_v41)


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_signatures_match_vllm(name):
    ours, vllms = OVERRIDDEN[name]
    assert surface.parameters(ours) == surface.parameters(vllms)


def test_everything_that_a_layer_calls_is_overridden():
    assert {
        "Compressor.forward",
        "Compressor.insert_cache",
        "IndexCache.get_attn_backend",
        "Indexer._produce_k",
        "Indexer.forward_q",
        "SparseMLAV41Attention._fused_qnorm_rope_kv_insert",
        "SparseMLAV41Attention._indexer_cls",
        "SparseMLAV41Attention._o_proj",
        "SparseMLAV41Attention._split_qkv_and_norm",
        "SparseMLAV41Attention.forward_mqa",
        "SparseMLAV41Attention.get_padded_num_q_heads",
    } <= set(OVERRIDDEN)
    assert not inspect.isabstract(deepseek_v41.SparseMLAV41Attention)


@pytest.mark.parametrize("row", surface.DEEPSEEK_V41, ids=lambda row: row.path)
def test_what_is_touched_fits_vllm(row):
    assert row.problem() is None


def test_every_import_from_vllm_has_a_row():
    imported = imported_from_vllm(Path(deepseek_v41.__file__))
    assert imported <= {row.path for row in surface.DEEPSEEK_V41}


@pytest.fixture
def build_model(model_config, monkeypatch):
    """Makes vLLM's model as its registry has it after the plugin was loaded."""
    for architecture in plugins.V4_MODELS:
        monkeypatch.setitem(ModelRegistry.models, architecture, None)
    plugins.register()
    monkeypatch.setattr(nvidia_model, "DeepseekV4MoE", Experts)
    monkeypatch.setattr(
        nvidia_model.DeepseekV41LLMForCausalLM, "set_moe_parameters", lambda self: None
    )
    # vLLM's own attention asks for a GPU.
    cls = nvidia_model.DeepseekV4FlashMLAAttention
    monkeypatch.setattr(cls, "__init__", theirs.DeepseekV4Attention.__init__)

    def build(backend):
        config = engine_config(model_config, backend, swa_bounded_replay=False, block_size=64)
        config.kernel_config.enable_jit_warmup = False  # which needs TileLang
        model = ModelRegistry.models[CONFIG["architectures"][0]].load_model_cls()
        with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
            return model(vllm_config=config)

    return build


def test_the_model_has_our_layers_exactly_if_the_backend_is_custom(build_model, monkeypatch):
    def choices():
        return (
            nvidia_model._select_dsv4_attn_cls,
            theirs.DeepseekCompressor,
            theirs.DeepseekV4IndexerCache,
        )

    kept, model = choices(), build_model("CUSTOM")
    assert len(deepseek_v41.check_layers(model)) == len(RATIOS)
    assert choices() == kept
    assert model.language_model.model.decoder_replay_layers is None
    with pytest.raises(RuntimeError, match=r"layers\.0\.attn must have a SparseMLAV41Attention"):
        deepseek_v41.check_layers(build_model(None))
    with monkeypatch.context() as change:
        change.setattr(deepseek_v41, "exchanged", contextlib.nullcontext)
        with pytest.raises(RuntimeError, match="serve without --attention-backend CUSTOM"):
            build_model("CUSTOM")


class Whole(nn.Module):
    """A language model of vLLM, in the place of a layer."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, positions, ids):
        ids = ids[:, 0].nan_to_num().long()  # padding's are NaN
        return self.model.compute_logits(self.model(ids, positions))


class NoExperts(Experts):
    """A mixture of experts that adds nothing."""

    def forward(self, x, *rest):
        return torch.zeros_like(x)


def test_a_model_copies_by_every_path_of_attention(model_config, build_model, monkeypatch):
    """The weights of ``benchmarks/vllm_engine.py``, loaded and served by vLLM's own class."""
    import vllm_engine

    pretend(monkeypatch, 90)
    made, weights = models_v41.copying_model()
    found = DeepseekV41Config(**made)
    monkeypatch.setattr(model_config, "hf_config", found)
    monkeypatch.setattr(model_config, "hf_text_config", found)
    for name in ("mhc_pre_delayed_tilelang", "mhc_shifted_post_pre", "mhc_post_tilelang"):
        monkeypatch.setattr(nvidia_model, name, getattr(nvidia_model, name))  # to be put back
    for name in ("tilelang_kernels", "warmup"):
        monkeypatch.setitem(sys.modules, f"vllm.model_executor.kernels.mhc.{name}", None)
    vllm_engine.exchange_shifted_hyper_connections()
    monkeypatch.setattr(
        nvidia_model,
        "hc_collapse_triton",
        lambda streams, mix: (mix[..., None] * streams.float()).sum(1).bfloat16(),
    )
    monkeypatch.setattr(nvidia_model, "DeepseekV4MoE", NoExperts)
    weights = {name: weight for name, weight in weights.items() if ".ffn." not in name}
    model = build_model("CUSTOM")
    parameters = {
        name for name, _ in model.named_parameters() if not name.startswith(("vision.", "aligner."))
    }  # the engine builds no encoder of images
    assert model.load_weights(weights.items()) == parameters
    for layer in deepseek_v41.check_layers(model):
        layer.aux_stream_list = None
    config = model.language_model.model.vllm_config
    with set_current_vllm_config(config):
        engine = CompressedLayers(config, Draw(0), nn.ModuleList([Whole(model.language_model)]))
        ids = engine.draw.integers(0, 256, 460).long()
        steps = [(first, min(first + MAX_TOKENS, 457)) for first in range(0, 457, MAX_TOKENS)]
        logits = [
            engine.step([(0, first, ids[first:last, None].float())])[0][0]
            for first, last in (*steps, (457, 458), (458, 459), (459, 460))
        ]
    logits = torch.cat(logits)[models_v41.FIRST_COPIED :]
    best, second = logits.topk(2).values.unbind(1)
    assert_equal("tokens", logits.argmax(1), models_v41.copied_tokens(ids))
    assert (best - second).min() > 2


@pytest.mark.parametrize("part", ["compressor", "indexer", "indexer.k_cache"])
def test_a_part_that_was_not_exchanged_stops_the_start(config, part):
    engine = Engine(config, Draw(1))
    vllms = put_back(engine.layers[1], part)
    with pytest.raises(RuntimeError, match=rf"layers\.1\.attn must have a .* got {vllms}"):
        deepseek_v41.check_layers(engine.layers)
    with pytest.raises(RuntimeError, match=r"of vllm\.models\.deepseek_v41, got none"):
        deepseek_v41.check_layers(nn.Linear(1, 1))


def test_a_vllm_that_does_not_fit_stops_the_start(build_model, monkeypatch):
    row = surface.Dependency("vllm:gone", "a purpose")
    monkeypatch.setattr(surface, "DEEPSEEK_V41", (row,))
    with pytest.raises(RuntimeError, match="vllm:gone"):
        build_model("CUSTOM")
    build_model(None)  # other backends are not concerned


@pytest.mark.parametrize(
    ("where", "name", "value", "reason"),
    [
        *REFUSED,
        ("cache_config", "cache_dtype", "nvfp4_ds_mla", "must be one of auto.* got nvfp4_ds_mla"),
        ("cache_config", "swa_bounded_replay", True, "swa_bounded_replay must be off"),
        ("attention_config", "indexer_tp_shard_min_rows", 1, "indexer_tp_shard_min_rows must not"),
        ("attention_config", "indexer_sparse_logits", True, "indexer_sparse_logits must be off"),
        ("model", "candidate_source_layer_id", 1, r"of as many tokens as .* got \[2, 1, 1\]"),
        (
            "engine",
            "speculative_config",
            SimpleNamespace(use_dspark=lambda: True, attention_backend=None),
            "DSpark's drafts must be off, as they choose among vLLM's own classes",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused(config, monkeypatch, where, name, value, reason):
    deepseek_v41.refuse(config)
    set_value(monkeypatch, config, deepseek_v41, where, name, value)
    with pytest.raises(ValueError, match=rf"sparsemla: .*{reason}.*without --attention-backend"):
        deepseek_v41.refuse(config)


@pytest.mark.parametrize("min_tokens", [1000, 1], ids=["in place", "converted"])
def test_steps_reach_no_kernel_that_was_not_warmed_up(
    run_python, config, convert_from, monkeypatch, min_tokens
):
    monkeypatch.setattr(conversions.Rule, "most_rows", 90)  # the last step has two chunks
    converted = convert_from(min_tokens)
    engine = Engine(config, Draw(4))
    # As vLLM sets it once caches are there: to the least of all groups, that of open windows.
    config.cache_config.block_size = 8
    layers = list(warmup.shared_layers(config, deepseek_v41.SparseMLAV41Attention))
    assert [layer.ratio for layer in layers] == RATIOS
    ops = (
        "fused_rope_rmsnorm_quant",
        "indexer_topk",
        "indexer_topk_blocks",
        "indexer_topk_of_blocks",
        "pool_windows",
        "prepare_index_queries",
        "sparse_decode",
    )
    calls = replay.spy(
        monkeypatch,
        {
            deepseek_v41: ops,
            windows: ("sparse_prefill", "to_slots"),
            conversions: ("gather_dequant", "sparse_prefill", "to_slots"),
            projection: ("project_groups",),
        },
    )
    x = engine.draw.normal(48, HIDDEN).bfloat16()
    engine.step([(0, 0, x[:40])])
    engine.step([(0, 40, x[40:41]), (1, 0, x[:5])])
    engine.step([(0, 41, x[41:42]), (1, 5, x[5:6])], padding=3)
    engine.step([(0, 42, x[42:43]), (1, 6, x[6:9]), (2, 0, x[:40])])
    chunks = [len(each.raw.starts) for each in converted[-9:]]
    assert chunks == ([2, 2, 2, *[1] * 6] if min_tokens == 1 else [])
    assert all(layer.converts is bool(converted) for layer in layers)
    made = {"gather_dequant"} if converted else set()
    shared = {"sparse_prefill", "to_slots", "project_groups"}
    assert {op for op, *_ in calls} == {*ops, *shared, *made}
    servings = [serving for layer in layers for serving in layer.selections()]
    sweeps = [sweep for layer in layers for sweep in layer.sweeps()]
    assert replay.missing_kernels(run_python, calls, *servings, steps=sweeps) == []

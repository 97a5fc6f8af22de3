"""Hunyuan V4 in vLLM: its attention with sinks, and its indexer.

The layers are those of vLLM's ``HYV4ForCausalLM``, with this package's attention and indexer.
"""

import json
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import normalize, rms_norm

from vllm_here import require_vllm

require_vllm()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import HYV4Config, HYV4ForCausalLM
    from vllm import envs
    from vllm.config import (
        AttentionConfig,
        CompilationConfig,
        ModelConfig,
        set_current_vllm_config,
    )
    from vllm.models.hy_v4.nvidia import attention as theirs
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from sparsemla.backends.vllm import attention, hy_v4, register_indexer, warmup

import replay
from sparsemla import reference
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import assert_close, assert_equal
from sparsemla_lab.testing.models import published_hy_v4
from test_vllm import (
    CHUNKS,
    INDEXED,
    KEYS,
    MAX_TOKENS,
    TOPK,
    Batch,
    Server,
    absorb,
    build_model,  # noqa: F401 - a fixture
    calls,  # noqa: F401 - a fixture
    config,  # noqa: F401 - a fixture
    engine_config,
    in_engine,
    index_step,
    layer,
    log_probabilities,
    model_config,  # noqa: F401 - a fixture
    one_rank,  # noqa: F401 - a fixture
    plain_vllm,  # noqa: F401 - a fixture
    rotation,
    warmed_up,
)

HIDDEN, HEADS, LENGTH = 256, 8, 140
TEXT = SimpleNamespace(
    rms_norm_eps=1e-5,
    index_topk=TOPK + 128,
    num_hidden_layers=1,
    layer_types=["sparse_attention"],
    indexer_types=["full"],
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    gated_mla=False,
    learnable_sink=True,
)


class Selecting(torch.nn.Module):
    """In the place of vLLM's indexer, whose kernels are CUDA's: it selects all tokens."""

    def __init__(self, vllm_config, config, *sizes):
        super().__init__()
        self.topk_tokens = config.index_topk
        self.topk_indices_buffer = sizes[-2]

    def forward(self, hidden_states, q_c, positions, rotary):
        tokens = torch.arange(self.topk_indices_buffer.shape[1], dtype=torch.int32)
        chosen = torch.where(tokens <= positions[:, None], tokens, -1)
        self.topk_indices_buffer[: len(positions)] = chosen
        return self.topk_indices_buffer


def expected_of(made, x):
    """The layer's outputs in float32, over all tokens and a sink."""

    def normed(x, norm):
        return rms_norm(x, x.shape[-1:], norm.weight.float(), 1e-5)

    table = made.rotary_emb.cos_sin_cache[: len(x)].float()
    cos, sin = table.repeat_interleave(2, dim=-1).chunk(2, dim=-1)

    def rotated(x):
        turned = torch.stack([-x[..., 1::2], x[..., 0::2]], dim=-1).flatten(-2)
        shape = len(x), *[1] * (x.dim() - 2), x.shape[-1]
        return x * cos.view(shape) + turned * sin.view(shape)

    both = x.float() @ made.fused_qkv_a_proj.weight.float().T
    q_a, latent, k_pe = both.split([128, 512, 64], dim=-1)
    q = normed(q_a, made.q_a_layernorm) @ made.q_b_proj.weight.float().T
    q, q_pe = q.unflatten(-1, (HEADS, -1)).split([128, 64], dim=-1)
    kv = normed(latent, made.kv_a_layernorm) @ made.kv_b_proj.weight.float().T
    k, v = kv.unflatten(-1, (HEADS, -1)).split([128, 64], dim=-1)
    scores = torch.einsum("qhd,khd->hqk", q, k)
    scores += torch.einsum("qhd,kd->hqk", rotated(q_pe), rotated(k_pe))
    scores = scores * 192**-0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf)
    sinks = made.learnable_sink_param.float()[:, None, None].expand(-1, len(x), 1)
    weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    out = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
    return out @ made.o_proj.weight.float().T


@pytest.mark.skipif(torch.cuda.is_available(), reason="the layer is built for the CPU")
@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
def test_a_layer_with_sinks(build_model, model_config, monkeypatch, run_python, dtype):
    """It reaches no kernel that was not warmed up, either."""

    def selected(**sizes):
        assert sizes["head_size"] == 576
        return AttentionBackendEnum.CUSTOM.get_class()

    monkeypatch.setattr(theirs, "Indexer", Selecting)
    monkeypatch.setattr(theirs, "get_attn_backend", selected)
    config = engine_config(
        model_config,
        dtype,
        attention_config=AttentionConfig(backend="CUSTOM"),
        compilation_config=CompilationConfig(custom_ops=["none"]),
    )
    buffer = torch.empty(MAX_TOKENS, TEXT.index_topk, dtype=torch.int32)
    sizes = {"hidden_size": HIDDEN, "num_heads": HEADS, "q_lora_rank": 128, "kv_lora_rank": 512}
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        made = theirs.HYV4MLAAttention(
            config,
            TEXT,
            **sizes,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=64,
            cache_config=config.cache_config,
            prefix="model.layers.0.self_attn",
            topk_indices_buffer=buffer,
        )
    impl = made.mla_attn.impl
    assert type(impl) is attention.SinkImpl
    assert config.attention_config.sparse_mla_force_mqa
    draw = Draw(0)
    for name, weight in made.named_parameters():
        deviation = weight.shape[-1] ** -0.5 if weight.dim() > 1 else 0.2
        values = draw.normal(*weight.shape) * deviation + (weight.dim() == 1)
        weight.data = values.to(weight.dtype) * (2 if name.endswith("sink_param") else 1)
    absorb(config)
    x, server = draw.normal(LENGTH, HIDDEN).bfloat16(), Server(config, made)
    (serving,) = warmup.attention_layers(config, attention.SinkImpl)
    calls = replay.spy(monkeypatch, {attention: ("sparse_decode", "sparse_prefill")})
    table, found = torch.tensor([[5, 2, 7]]).int(), []
    for first, last in CHUNKS:
        common = server.common(first, last - first, table)
        metadata = {name: each.build(0, common) for name, each in server.builders.items()}
        positions = torch.arange(first, last)
        found.append(server.run(metadata, common, positions, x[first:last]))
    expected = expected_of(made, x)
    for (first, last), out in zip(CHUNKS, found, strict=True):
        part = expected[first:last]
        error = (out.float() - part).norm() / part.norm()
        assert error < (0.06 if dtype == "fp8_ds_mla" else 0.02), (first, last)
    assert {op for op, *_ in calls} == {"sparse_decode", "sparse_prefill"}
    assert replay.missing_kernels(run_python, calls, serving) == []


def test_the_backend_tells_vllm_that_it_has_sinks():
    assert attention.SparseMLABackend.supports_sink()


def test_sinks_are_refused_where_ranks_share_contexts(config, monkeypatch):
    initialise = attention.SparseMLAImpl.__init__

    def shared(self, *arguments, **options):
        initialise(self, *arguments, **options)
        self.dcp_world_size = 2

    monkeypatch.setattr(attention.SparseMLAImpl, "__init__", shared)
    monkeypatch.setattr(attention, "SparseMLAImpl", attention.SinkImpl)  # which ``layer`` makes
    buffer = torch.empty(MAX_TOKENS, TOPK, dtype=torch.int32)
    assert layer(buffer, 8).sinks is None
    with pytest.raises(ValueError, match="attention sinks need --decode-context-parallel-size 1"):
        layer(buffer, 8, sinks=torch.zeros(8))


# The indexer: that of DeepSeek-V3.2, but RoPE rotates the last dims.
FIELDS = {
    "vocab_size": 256,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "q_lora_rank": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 64,
    "index_topk": TOPK,
    "index_n_heads": 16,
    "index_head_dim": 128,
    "indexer_types": ["full", "shared"],
    "layer_types": ["deepseek_sparse_attention"] * 2,
    "mlp_layer_types": ["dense"] * 2,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}


def configured(folder, architecture="HYV4ForCausalLM"):
    """vLLM's configuration of a Hunyuan V4 of two layers."""
    fields = {"architectures": [architecture], "model_type": "hy_v4"}
    (folder / "config.json").write_text(json.dumps(FIELDS | fields))
    return ModelConfig(model=str(folder), skip_tokenizer_init=True, dtype="bfloat16")


@pytest.fixture
def tiny(tmp_path):
    """That configuration."""
    return configured(tmp_path)


@pytest.fixture
def registered(monkeypatch):
    """Heads, top-k and options of the indexers whose kernels are registered."""
    found = []

    def register(config, heads, topk, rotary, **options):
        assert not rotary.is_neox_style
        found.append((heads, topk, options))

    monkeypatch.setattr(hy_v4, "register_indexer", register)
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is built for the CPU")
def test_drafts_have_the_indexer_too(build_model, tmp_path, registered):
    drafts = configured(tmp_path, "HYV4MTPModel")
    speculative = SimpleNamespace(draft_model_config=drafts, enable_adaptive_verification=False)
    _, model = build_model(False, "auto", 16, drafts, speculative)
    assert type(model) is hy_v4.HYV4MTP
    (layer,) = model.model.layers.values()
    attention = layer.mtp_block.self_attn
    assert type(attention.indexer) is hy_v4.Indexer
    assert registered == [(16, TOPK, {"rope_first": False})]
    target = torch.zeros(MAX_TOKENS, TOPK, dtype=torch.int32)
    for module in model.modules():  # as vLLM's proposer does
        if hasattr(module, "topk_indices_buffer"):
            module.topk_indices_buffer = target
    assert attention.indexer.topk_indices_buffer is attention.mla_attn.impl.topk_indices_buffer


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is built for the CPU")
@pytest.mark.parametrize("dtype", ["auto", "fp8_ds_mla"])
def test_a_whole_model_agrees_with_transformers(build_model, tiny, registered, dtype):
    config, model = build_model(False, dtype, 16, tiny)
    assert registered == [(16, TOPK, {"rope_first": False})]
    assert type(model) is hy_v4.HYV4ForCausalLM
    first, second = (layer.self_attn.indexer for layer in model.model.layers)
    assert (type(first), second) == (hy_v4.Indexer, None)
    other = HYV4ForCausalLM(HYV4Config(**FIELDS, initializer_range=0.1)).float().eval()
    for block in other.model.layers:
        torch.nn.init.normal_(block.self_attn.sinks)
    weights = {name: tensor.bfloat16() for name, tensor in other.state_dict().items()}
    other.load_state_dict(weights)
    published = {name: each.bfloat16() for name, each in published_hy_v4(other).items()}
    loaded = model.load_weights(published.items())
    assert loaded == {name for name, _ in model.named_parameters()}
    absorb(config)
    ids = torch.randint(256, (1, 140))
    found = log_probabilities(config, model, ids)
    with torch.no_grad():
        expected = other(ids).logits[0].log_softmax(-1)
    away = (found - expected).abs().mean(dim=-1)
    assert away[:TOPK].mean() < (0.04 if dtype == "auto" else 0.2)
    assert away[TOPK:].mean() < 0.3


@pytest.fixture
def make_own(config, tiny, plain_vllm, monkeypatch):
    """Makes an indexer as vLLM's model gets it with the plugin."""
    monkeypatch.setattr(envs, "VLLM_PLUGINS", ["sparsemla_indexer"], raising=False)
    register_indexer()

    def make():
        buffer = torch.full((MAX_TOKENS, TOPK), 2**31 - 1, dtype=torch.int32)
        with set_default_torch_dtype(torch.bfloat16):
            return hy_v4.Indexer(
                config, tiny.hf_config, HIDDEN, 128, None, config.cache_config, buffer, "i"
            )

    return make


@pytest.fixture
def own(make_own):
    """That indexer."""
    return make_own()


def test_settings_that_the_indexer_does_not_read_are_refused(config, make_own, monkeypatch):
    monkeypatch.setattr(config.attention_config, "indexer_sparse_logits", True)
    with pytest.raises(ValueError, match="sparsemla_indexer: indexer_sparse_logits must be off"):
        make_own()


def stepped(config, own, batch):
    """One step of an indexer: its cache, what was selected, and the inputs."""
    made = SimpleNamespace(indexer=SimpleNamespace(inner=own))
    return index_step(config, made, batch, neox=False, run=own)


@pytest.mark.parametrize("name", INDEXED)
def test_the_indexer_selects_the_same_as_the_reference(config, own, name):
    batch = Batch(Draw(0), **INDEXED[name])
    cache, chosen, (hidden, qr, positions, rope) = stepped(config, own, batch)
    tokens = batch.tokens
    with torch.no_grad():  # vLLM's own modules, without quantisation
        q = own.wq_b(qr)[0].view(-1, 16, 128)
        k, weights = own.wk_weights_proj(hidden)[0].split([128, 16], dim=-1)
        k = own.k_norm(k)
        q_rope, k_rope = rope.forward_native(positions, q[..., 64:], k[:, None, 64:])
    turned = torch.cat([q[..., :64], q_rope], dim=-1)
    k = torch.cat([k[:, :64], k_rope[:, 0]], dim=-1)
    assert_close("keys", cache.read(batch.slot_mapping).float(), k[:tokens].float(), KEYS)
    queries, weights = reference.prepare_index_queries(
        q, weights, rope.cos_sin_cache, positions=positions, interleaved=True, rope_first=False
    )
    directions = (normalize(x[:tokens].float(), dim=-1) for x in (queries, turned))
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


def test_the_indexer_reaches_no_kernel_that_was_not_warmed_up(
    run_python, config, own, calls, monkeypatch
):
    with warmed_up(config, monkeypatch) as configurations:
        warmup.register_indexer(config, 16, TOPK, rotation(neox=False), rope_first=False)
        for lens in INDEXED.values():
            stepped(config, own, in_engine(config, **lens))
    (serving,) = configurations
    assert not serving.rope_first
    assert {op for op, *_ in calls} == {"fused_indexer_rope_quant", "indexer_topk"}
    assert replay.missing_kernels(run_python, calls, *configurations) == []

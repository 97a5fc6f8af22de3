"""Hunyuan V4 in vLLM: its layer of attention over the tokens that vLLM's indexer selects.

The layer is that of vLLM's ``HYV4ForCausalLM``, with this package's attention and its sinks.
"""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import rms_norm

from vllm_here import require_vllm

require_vllm()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from vllm.config import AttentionConfig, CompilationConfig, set_current_vllm_config
    from vllm.models.hy_v4.nvidia import attention as theirs
    from vllm.utils.torch_utils import set_default_torch_dtype
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from sparsemla.backends.vllm import attention, warmup

import replay
from sparsemla_lab.testing.cases import Draw
from test_vllm import (
    CHUNKS,
    MAX_TOKENS,
    TOPK,
    Server,
    absorb,
    build_model,  # noqa: F401 - a fixture
    config,  # noqa: F401 - a fixture
    engine_config,
    layer,
    model_config,  # noqa: F401 - a fixture
    one_rank,  # noqa: F401 - a fixture
    plain_vllm,  # noqa: F401 - a fixture
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

"""Dots3Note in vLLM: its layer over selected tokens, with this package's indexer.

The layer is that of vLLM's ``Dots3NoteForCausalLM``, whose attention stays vLLM's.
"""

import importlib
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from vllm_here import require_vllm

require_vllm()

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm
    from vllm import envs
    from vllm.config import CompilationConfig, ModelConfig, set_current_vllm_config
    from vllm.forward_context import set_forward_context
    from vllm.model_executor.layers import mla
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.platforms import current_platform
    from vllm.utils.torch_utils import set_default_torch_dtype

    from sparsemla.backends.vllm import indexer, register_indexer

from sparsemla import INDEX_FP8
from sparsemla_lab.testing.cases import Draw
from test_vllm import (
    CONFIG,
    MAX_TOKENS,
    TOPK,
    Batch,
    engine_config,
    model_config,  # noqa: F401 - a fixture
    one_rank,  # noqa: F401 - a fixture
    plain_vllm,  # noqa: F401 - a fixture
)


def import_layers():
    """vLLM's module of the layers, without the model's encoders and the kernels of CUDA."""
    package = ModuleType("vllm.models.dots3_note")
    package.__path__ = [str(Path(vllm.__file__).parent / "models" / "dots3_note")]
    kernels = ModuleType("vllm.models.dots3_note.nvidia.attention")
    for name in ("FlashAttnPrefill", "PaddedSparse", "TritonMLA"):
        setattr(kernels, f"Dots3Note{name}Backend", None)
    for each in (package, kernels):
        sys.modules.setdefault(each.__name__, each)
    return importlib.import_module("vllm.models.dots3_note.nvidia.model")


TEXT = SimpleNamespace(
    **{name: CONFIG[name] for name in CONFIG if name not in ("architectures", "model_type")},
    rms_norm_eps=1e-6,
    rope_parameters={"rope_type": "default", "rope_theta": 10000},
    indexer_rope_interleave=True,
    swa_kv_lora_rank=1024,
    swa_qk_rope_head_dim=64,
    attention_gate_type="headwise",
    apply_mla_qkv_lora_rescale=True,
)


class Attention(torch.nn.Module):
    """In the place of vLLM's attention, whose kernels are CUDA's."""

    def __init__(self, **arguments):
        super().__init__()
        self.__dict__ |= dict.fromkeys(("prefill_backend", "impl")) | arguments
        self.layer_name = arguments["prefix"]
        layers = vllm.config.get_current_vllm_config().compilation_config.static_forward_context
        layers[self.layer_name] = self

    def forward(self, q, latents, k_pe, output_shape, q_dcp_replicated):
        # As vLLM's attention does: from the indexer, not the buffer that the layer gives, too.
        self.read = self.indexer.topk_indices_buffer[: len(q)].clone()
        return q.new_zeros(output_shape)


@pytest.fixture
def theirs(plain_vllm, monkeypatch):
    """vLLM's module of the layers, with the plugin and without attention."""
    module = import_layers()
    monkeypatch.setattr(envs, "VLLM_PLUGINS", ["sparsemla_indexer"], raising=False)
    register_indexer()
    monkeypatch.setattr(mla, "MLAAttention", Attention)
    monkeypatch.setattr(module, "Dots3NotePaddedMLAAttention", Attention)
    return module


@pytest.mark.skipif(torch.cuda.is_available(), reason="the layer is built for the CPU")
def test_attention_reads_what_the_indexer_selects(theirs, model_config):
    config = engine_config(model_config, compilation_config=CompilationConfig(custom_ops=["none"]))
    buffer, target = torch.full((2, MAX_TOKENS, TOPK), 2**31 - 1, dtype=torch.int32)
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        layer = theirs.Dots3NoteFullAttention(
            config, TEXT, "model.layers.0.self_attn", topk_indices_buffer=buffer
        )
    inner, reading = layer.indexer, layer.mla_attn.mla_attn
    assert type(layer.mla_attn.indexer) is indexer.SparseMLAIndexer
    assert reading.indexer.topk_indices_buffer is buffer
    for weight in layer.parameters():
        torch.nn.init.normal_(weight, std=0.05)
    batch = Batch(Draw(0), [5, 2], [5, 200])
    inner.k_cache.kv_cache = batch.cache(INDEX_FP8).data
    spec = inner.k_cache.get_kv_cache_spec(config)
    make = inner.k_cache.get_attn_backend().get_builder_cls()
    made = make(spec, [inner.k_cache.prefix], config, torch.device("cpu"))
    metadata = {inner.k_cache.prefix: made.build(0, batch.common())}
    x = torch.randn(7, CONFIG["hidden_size"]).bfloat16()
    with set_forward_context(metadata, config), torch.no_grad():
        layer(batch.positions, x)
        first = reading.read
        for module in layer.modules():  # as vLLM's proposer does
            if hasattr(module, "topk_indices_buffer"):
                module.topk_indices_buffer = target
        layer(batch.positions, x)
    for row, length in enumerate([1, 2, 3, 4, 5, 199, 200]):
        kept = first[row][first[row] >= 0]
        assert len(kept) == min(length, TOPK)
        assert bool((kept.diff() > 0).all())
        assert kept[-1] < length
    assert torch.equal(target[:7], first)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is built for the CPU")
def test_the_model_reads_the_weights_that_the_benchmark_writes(theirs, tmp_path, monkeypatch):
    import vllm_engine

    vllm_engine.make_dots_model(tmp_path)
    vllm_engine.serve_dots_layers()
    monkeypatch.setattr(type(current_platform), "device_type", "cpu")
    found = ModelConfig(model=str(tmp_path), skip_tokenizer_init=True, dtype="bfloat16")
    config = engine_config(found, compilation_config=CompilationConfig(custom_ops=["none"]))
    made = ModelRegistry.models[found.architectures[0]].load_model_cls()
    assert made is theirs.Dots3NoteLanguageModelForCausalLM
    with set_current_vllm_config(config), set_default_torch_dtype(torch.bfloat16):
        model = made(vllm_config=config)
    loaded = model.load_weights(load_file(tmp_path / "model.safetensors").items())
    assert loaded == {name for name, _ in model.named_parameters()}

"""Checkpoints that are made of another one say the same in other formats."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("transformers")

from sparsemla_lab.testing import checkpoints
from sparsemla_lab.testing.compare import assert_equal
from sparsemla_lab.testing.models import copying_model


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A model of which no dim is a multiple of another's block."""
    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 256, "intermediate_size": 384, "q_lora_rank": 128}
    model = copying_model("deepseek_v32", dtype=torch.bfloat16, v_head_dim=96, **sizes)
    model.save_pretrained(folder)
    return folder


def written(make, source, folder):
    make(source, folder)
    config = json.loads((folder / "config.json").read_text())
    return config, load_file(folder / "model.safetensors"), load_file(source / "model.safetensors")


def test_blocks_of_fp8_weights_have_a_scale_each(source, tmp_path):
    config, found, weights = written(checkpoints.quantise_fp8, source, tmp_path)
    block = config["quantization_config"]["weight_block_size"]
    quantised = [name for name in found if f"{name}_scale_inv" in found]
    assert len(quantised) == 2 * len(checkpoints.FP8)
    for name, weight in weights.items():
        if name not in quantised:
            assert_equal(name, found[name], weight)
            continue
        rows, columns = weight.shape
        scales = found[f"{name}_scale_inv"]
        assert scales.shape == (-(-rows // block[0]), -(-columns // block[1]))
        scales = scales.repeat_interleave(block[0], 0)[:rows]
        scales = scales.repeat_interleave(block[1], 1)[:, :columns]
        away = (found[name].float() * scales - weight.float()).abs()
        assert (away <= weight.float().abs() / 16 + scales / 512).all()  # half a unit of e4m3


def test_words_of_int4_weights_hold_eight_columns(source, tmp_path):
    config, found, weights = written(checkpoints.quantise_int4, source, tmp_path)
    (scheme,) = config["quantization_config"]["config_groups"].values()
    size = scheme["weights"]["group_size"]
    packed = [name.removesuffix("_packed") for name in found if name.endswith("_packed")]
    assert len(packed) == 2 * len(checkpoints.PACKED)
    for name, weight in weights.items():
        if name not in packed:
            assert_equal(name, found[name], weight)
            continue
        assert found[f"{name}_shape"].tolist() == [*weight.shape]
        words = found[f"{name}_packed"][..., None] >> (4 * torch.arange(8))
        codes = (words & 15).float().flatten(1) - 8
        scales = found[f"{name}_scale"].float().repeat_interleave(size, 1)
        assert ((codes * scales - weight.float()).abs() <= 0.52 * scales).all()


def test_the_mtp_layer_is_the_first_one(source, tmp_path):
    config, found, weights = written(checkpoints.add_mtp_layer, source, tmp_path)
    assert config["num_nextn_predict_layers"] == 1
    for name, weight in weights.items():
        assert_equal(name, found[name], weight)
        if name.startswith("model.layers.0."):
            assert_equal(name, found[name.replace("layers.0", "layers.2")], weight)
    hidden = config["hidden_size"]
    both = torch.cat([torch.full((hidden,), 3.0), torch.full((hidden,), 5.0)])
    projected = found["model.layers.2.eh_proj.weight"].float() @ both
    assert_equal("the embedding", projected, torch.full((hidden,), 3.0))


def test_the_drafting_model_has_dense_attention(source, tmp_path):
    config, found, _ = written(checkpoints.write_eagle, source, tmp_path)
    assert config["num_hidden_layers"] == 1
    assert not [name for name in (*config, *found) if "index" in name]
    assert {"fc.weight", "enorm.weight", "norm.weight", "layers.0.self_attn.o_proj.weight"} <= {
        *found
    }


def test_an_adapter_adds_a_tenth(source, tmp_path):
    checkpoints.write_adapter(source, tmp_path)
    found = load_file(tmp_path / "adapter_model.safetensors")
    weights = load_file(source / "model.safetensors")
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    modules = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in found}
    assert len(modules) == 2 * len(config["target_modules"])
    for module in modules:
        down, up = (found[f"base_model.model.{module}.lora_{part}.weight"].float() for part in "AB")
        added = up @ down
        assert added.shape == weights[f"{module}.weight"].shape
        size = added.square().mean().sqrt() * added.shape[1] ** 0.5
        assert 0.06 < size < 0.15, module

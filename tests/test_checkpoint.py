"""Checkpoints of every quantisation that is read, and of many that are broken.

The factors of codes are applied here by definitions of their own. Fields of config.json are in
test_cli.py.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from sparsemla_lab.checkpoint import CheckpointError
from sparsemla_lab.generate import load_checkpoint
from sparsemla_lab.testing.models import copying_model
from sparsemla_lab.testing.models_v4 import compressed_copying_model, published_weights

E4M3 = torch.float8_e4m3fn
E8M0 = torch.float8_e8m0fnu
KEPT = "embed_tokens", "lm_head", "weights_proj", "mlp.gate.", "norm"
Q_A = "model.layers.0.self_attn.q_a_proj.weight"  # [64, 64]
KV_B = "model.layers.0.self_attn.kv_b_proj.weight"  # [512, 512], two heads
EXPERT = "model.layers.1.mlp.experts.2.down_proj.weight"  # [64, 32]


def spread(factors: torch.Tensor, block: tuple[int, int], shape: torch.Size) -> torch.Tensor:
    """The factor of each element."""
    rows = torch.arange(shape[0]) // block[0]
    cols = torch.arange(shape[1]) // block[1]
    return factors[rows][:, cols]


def quantised(weight: torch.Tensor, block: tuple[int, int], most: float, power: bool = False):
    """The weight divided by the factors of its blocks, and the factors."""
    block = block[0] or weight.shape[0], block[1] or weight.shape[1]
    rest = -weight.shape[1] % block[1], -weight.shape[0] % block[0]
    padded = torch.nn.functional.pad(weight, (0, rest[0], 0, rest[1])).abs()
    blocks = padded.unflatten(1, (-1, block[1])).unflatten(0, (-1, block[0]))
    factors = blocks.amax((1, 3)).clamp_min(1e-6) / most
    if power:
        factors = factors.log2().ceil().exp2()
    wide = spread(factors, block, weight.shape)
    return weight / wide, factors, wide


def e4m3(block=(128, 128), name="weight_scale_inv", shape=None, power=False):
    """A function from a weight to its tensors in the file, and to their product."""

    def make(prefix, weight):
        scaled, factors, wide = quantised(weight, block, 448, power)
        codes = scaled.to(E4M3)
        stored = factors.to(E8M0) if power else factors
        if shape is not None:
            stored = stored.reshape(shape).contiguous()
        return {f"{prefix}.weight": codes, f"{prefix}.{name}": stored}, codes.float() * wide

    return make


def int8(prefix, weight):
    scaled, factors, _ = quantised(weight, (1, 0), 127)
    codes = scaled.round().to(torch.int8)
    tensors = {f"{prefix}.weight": codes, f"{prefix}.weight_scale": factors.bfloat16()}
    return tensors, codes.float() * factors.bfloat16().float()


def packed(bits, block):
    def make(prefix, weight):
        scaled, factors, wide = quantised(weight, block, 2 ** (bits - 1) - 1)
        values = scaled.round()
        padded = torch.nn.functional.pad(values, (0, -values.shape[1] % (32 // bits)))
        words = torch.zeros(weight.shape[0], padded.shape[1] * bits // 32, dtype=torch.int64)
        for i in range(padded.shape[1]):
            place = i * bits // 32, i * bits % 32
            words[:, place[0]] += (padded[:, i].long() + 2 ** (bits - 1)) << place[1]
        words = torch.where(words < 2**31, words, words - 2**32).int()
        tensors = {
            f"{prefix}.weight_packed": words,
            f"{prefix}.weight_scale": factors,
            f"{prefix}.weight_shape": torch.tensor(weight.shape),
        }
        return tensors, values * wide

    return make


def e2m1(dtype, name):
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([magnitudes, -magnitudes])

    def make(prefix, weight):
        scaled, factors, wide = quantised(weight, (1, 32), 6, power=True)
        codes = (scaled[..., None] - values).abs().argmin(-1)
        pairs = (codes[:, 0::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        stored = factors.to(E8M0)
        if dtype == torch.uint8:  # no name for E8M0, either
            stored = stored.view(torch.uint8)
        return {f"{prefix}.weight": pairs.view(dtype), f"{prefix}.{name}": stored}, values[
            codes
        ] * wide

    return make


def fp8(block=(128, 128), **fields):
    found = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
    return found | ({"weight_block_size": list(block)} if block else {}) | fields


def compressed(fmt, bits, strategy, kind="float", **fields):
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True} | fields
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": None}}
    return {"quant_method": "compressed-tensors", "format": fmt, "config_groups": groups}


def quark(dtype, scheme, **fields):
    weight = {"dtype": dtype, "qscheme": scheme, "symmetric": True} | fields
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight, "input_tensors": None},
        "layer_quant_config": {"*lm_head": {"weight": None}},
        "export": {"pack_method": "reorder"},
    }


FORMATS = {
    "DeepSeek": (fp8(), e4m3()),
    "DeepSeek, 64 x 32": (fp8((64, 32)), e4m3((64, 32))),
    "DeepSeek, powers of two": (fp8(scale_fmt="ue8m0"), e4m3(name="scale", power=True)),
    "FP8 per tensor": (
        fp8(None, activation_scheme="static"),
        e4m3((0, 0), "weight_scale", shape=()),
    ),
    "FP8 per row": (fp8(None), e4m3((1, 0), "weight_scale")),
    "compressed-tensors, per tensor": (
        compressed("float-quantized", 8, "tensor"),
        e4m3((0, 0), "weight_scale", shape=(1,)),
    ),
    "compressed-tensors, per channel": (
        compressed("float-quantized", 8, "channel"),
        e4m3((1, 0), "weight_scale"),
    ),
    "compressed-tensors, blocks": (
        compressed("float-quantized", 8, "block", block_structure=[128, 128]),
        e4m3((128, 128), "weight_scale"),
    ),
    "compressed-tensors, blocks of one row": (
        compressed("float-quantized", 8, "block", block_structure=[1, 32]),
        e4m3((1, 32), "weight_scale"),
    ),
    "compressed-tensors, groups": (
        compressed("naive-quantized", 8, "group", group_size=16),
        e4m3((1, 16), "weight_scale"),
    ),
    "compressed-tensors, int8": (compressed("int-quantized", 8, "channel", "int"), int8),
    "compressed-tensors, packed int4": (
        compressed("pack-quantized", 4, "group", "int", group_size=32),
        packed(4, (1, 32)),
    ),
    "compressed-tensors, packed int8": (
        compressed("pack-quantized", 8, "channel", "int"),
        packed(8, (1, 0)),
    ),
    "Quark, per tensor": (
        quark("fp8_e4m3", "per_tensor"),
        e4m3((0, 0), "weight_scale", shape=()),
    ),
    "Quark, per channel": (
        quark("fp8_e4m3", "per_channel"),
        e4m3((1, 0), "weight_scale", shape=-1),
    ),
    "Quark, MXFP4": (
        quark("fp4", "per_group", group_size=32, scale_format="e8m0"),
        e2m1(torch.uint8, "weight_scale"),
    ),
}
"""``quantization_config``, and how a weight is stored."""


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Weights of a tiny DeepSeek-V3.2, and its config.json."""
    config = json.loads((checkpoint / "config.json").read_text())
    return load_file(checkpoint / "model.safetensors"), config


def stored(weights, make):
    """The tensors of a quantised checkpoint, and the weights that they stand for."""
    tensors, expected = {}, {}
    for name, weight in weights.items():
        if weight.dim() != 2 or any(part in name for part in KEPT):
            tensors[name] = expected[name] = weight
            continue
        parts, expected[name] = make(name.removesuffix(".weight"), weight)
        tensors |= parts
    return tensors, expected


def save(folder, tensors, config):
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load(folder):
    return load_checkpoint(folder, cache_format="bf16", dtype="float32").model.state_dict()


@pytest.mark.parametrize("name", FORMATS)
def test_codes_become_the_weights_that_they_stand_for(model, tmp_path, name):
    weights, config = model
    quantization, make = FORMATS[name]
    tensors, expected = stored(weights, make)
    tensors["model.layers.0.self_attn.o_proj.input_scale"] = torch.ones(1)
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(())
    found = load(save(tmp_path, tensors, config | {"quantization_config": quantization}))
    fused = DeepseekV32ForCausalLM(DeepseekV32Config(**config))
    assert found.keys() == fused.state_dict().keys()
    for name, weight in expected.items():
        if ".experts." not in name:
            assert torch.equal(found[name], weight), name
    experts = "model.layers.1.mlp.experts"
    parts = [
        torch.cat([expected[f"{experts}.{i}.{part}_proj.weight"] for part in ("gate", "up")])
        for i in range(4)
    ]
    assert torch.equal(found[f"{experts}.gate_up_proj"], torch.stack(parts))
    parts = [expected[f"{experts}.{i}.down_proj.weight"] for i in range(4)]
    assert torch.equal(found[f"{experts}.down_proj"], torch.stack(parts))


def test_fused_experts_have_factors_of_three_dimensions(model, tmp_path):
    """Under the names that transformers gives them."""
    config = model[1] | {"moe_intermediate_size": 128}
    weights = DeepseekV32ForCausalLM(DeepseekV32Config(**config)).state_dict()
    name = "model.layers.1.mlp.experts.gate_up_proj"
    codes, factors = weights[name].to(E4M3), torch.rand(4, 2, 1)
    tensors = weights | {name: codes, f"{name}_scale_inv": factors}
    found = load(save(tmp_path, tensors, config | {"quantization_config": fp8()}))[name]
    assert found.shape == (4, 256, 64)
    assert torch.equal(found, codes.float() * factors.repeat_interleave(128, 1))


def test_published_weights_of_a_deepseek_v4(tmp_path):
    """E8M0 factors called ``scale``, experts of FP4, and a layer that drafts tokens."""
    model = compressed_copying_model()
    tensors, expected = {}, {}
    for name, weight in published_weights(model).items():
        kept = any(part in name for part in ("norm", "gate.", "ape", "weights_proj", "hc_"))
        if weight.dim() != 2 or kept or name in ("embed.weight", "head.weight"):
            tensors[name] = expected[name] = weight
            continue
        make = e2m1(torch.int8, "scale") if ".experts." in name else e4m3(name="scale", power=True)
        parts, expected[name] = make(name.removesuffix(".weight"), weight)
        tensors |= parts
    tensors["mtp.0.e_proj.weight"] = torch.zeros(64, 64, dtype=E4M3)  # without factors
    config = json.loads(model.config.to_json_string())
    (tmp_path / "floats").mkdir()
    found = load(save(tmp_path, tensors, config | {"quantization_config": fp8(scale_fmt="ue8m0")}))
    floats = load(save(tmp_path / "floats", expected, config))
    assert found.keys() == floats.keys() == model.state_dict().keys()
    for name, weight in floats.items():
        assert torch.equal(found[name], weight), name


def without(name):
    return lambda tensors: tensors.pop(name)


def put(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


def change(name, function):
    return lambda tensors: tensors.update({name: function(tensors[name])})


def rename(name, other):
    return lambda tensors: tensors.update({other: tensors.pop(name)})


def rename_all(end, other):
    def apply(tensors):
        for name in [name for name in tensors if name.endswith(end)]:
            rename(name, name.removesuffix(end) + other)(tensors)

    return apply


NO_CONFIG = "config.json has no quantization_config"
CORRUPTED = {
    "a factor is missing": (
        without(f"{Q_A}_scale_inv"),
        [f"{Q_A} is F8_E4M3 and must have one tensor of factors", "got none"],
    ),
    "an expert's factor is missing": (without(f"{EXPERT}_scale_inv"), [EXPERT, "got none"]),
    "all factors are missing": (
        lambda tensors: [tensors.pop(name) for name in [*tensors] if "_scale_inv" in name],
        ["is F8_E4M3 and must have one tensor of factors", "got none"],
    ),
    "factors have another name": (
        rename_all("_scale_inv", "_scales"),
        ["must have one tensor of factors", "weight_scale", "got none"],
    ),
    "two tensors of factors": (
        lambda tensors: tensors.update({f"{Q_A}_scale": tensors[f"{Q_A}_scale_inv"].clone()}),
        [f"got {Q_A}_scale_inv and {Q_A}_scale"],
    ),
    "factors without a weight": (
        rename(f"{Q_A}_scale_inv", "model.nothing_scale_inv"),
        [Q_A, "got none"],
    ),
    "superfluous factors": (
        put("model.norm.weight_scale_inv", torch.ones(1)),
        ["model.norm.weight_scale_inv must be a weight of the model"],
    ),
    "factors of integers": (
        change(f"{Q_A}_scale_inv", lambda scale: scale.int()),
        [f"{Q_A}_scale_inv must be one of F32, F16, BF16, F8_E8M0, got I32"],
    ),
    "factors of E8M0 as bytes": (
        change(f"{Q_A}_scale_inv", lambda scale: scale.to(E8M0).view(torch.uint8)),
        [f"{Q_A}_scale_inv must be one of", "got U8"],
    ),
    "factors of another shape": (
        change(f"{KV_B}_scale_inv", lambda scale: scale[:, :3].clone()),
        [f"{KV_B}_scale_inv of shape [4, 3]", "codes [512, 512]", "128 rows and 128 columns"],
    ),
    "one factor where blocks have one each": (
        change(f"{KV_B}_scale_inv", lambda scale: scale[:1, :1].clone()),
        [f"{KV_B}_scale_inv of shape [1, 1]"],
    ),
    "factors per row": (
        change(f"{KV_B}_scale_inv", lambda scale: torch.ones(512, 1)),
        [f"{KV_B}_scale_inv of shape [512, 1]"],
    ),
    "codes of int8": (
        change(Q_A, lambda codes: codes.view(torch.int8)),
        ["must fit the I8 codes [64, 64]", Q_A],
    ),
    "codes of uint8": (
        change(Q_A, lambda codes: codes.view(torch.uint8)),
        ["must fit the U8 codes [64, 64]", Q_A],
    ),
    "codes of e5m2": (
        change(Q_A, lambda codes: codes.to(torch.float8_e5m2)),
        ["must fit the F8_E5M2 codes", Q_A],
    ),
    "codes of a vector": (
        put("model.norm.weight", torch.ones(64).to(E4M3)),
        ["model.norm.weight is F8_E4M3", "got none"],
    ),
    "an expert is missing": (
        lambda tensors: (tensors.pop(EXPERT), tensors.pop(f"{EXPERT}_scale_inv")),
        ["model.layers.1.mlp.experts.2.down_proj.weight is missing"],
    ),
    "activations in another order": (
        put(f"{Q_A}_g_idx", torch.zeros(64, dtype=torch.int32)),
        [f"{Q_A}_g_idx orders columns"],
    ),
    "a zero point": (
        put(f"{Q_A}_zero_point", torch.ones(1, 1, dtype=torch.int8)),
        [f"{Q_A}_zero_point must be 0"],
    ),
}
"""Changes of a DeepSeek checkpoint, and what the error says."""

FLOATS = {
    "codes": (change(Q_A, lambda weight: weight.to(E4M3)), [f"{Q_A} must be floats, got F8_E4M3"]),
    "e5m2": (
        change(Q_A, lambda weight: weight.to(torch.float8_e5m2)),
        [f"{Q_A} must be floats, got F8_E5M2", NO_CONFIG],
    ),
    "int8": (
        change(Q_A, lambda weight: (weight * 100).to(torch.int8)),
        [f"{Q_A} must be floats, got I8", NO_CONFIG],
    ),
    "int64": (change("model.norm.weight", lambda weight: weight.long()), ["got I64", NO_CONFIG]),
    "bool": (
        change("lm_head.weight", lambda weight: weight > 0),
        ["lm_head.weight must be floats, got BOOL", NO_CONFIG],
    ),
    "int16": (change(EXPERT, lambda weight: weight.short()), [EXPERT, "got I16", NO_CONFIG]),
    "an unexpected tensor": (
        put("model.layers.0.self_attn.q_c_proj.weight", torch.ones(4, 4)),
        ["q_c_proj.weight must be a weight of the model", "1 tensors are not"],
    ),
    "a layer too many": (
        lambda tensors: (
            rename_all("none", "none")(tensors)
            or tensors.update(
                {
                    name.replace("layers.1.", "layers.2."): each.clone()
                    for name, each in [*tensors.items()]
                    if "layers.1." in name
                }
            )
        ),
        ["model.layers.2.", "must be a weight of the model"],
    ),
    "a missing tensor": (without("model.norm.weight"), ["lacks 1 weights", "model.norm.weight"]),
    "a missing expert": (without(EXPERT), [f"{EXPERT} is missing"]),
    "a missing last expert": (
        lambda tensors: [
            tensors.pop(EXPERT.replace("2.down", f"3.{part}")) for part in ("down", "gate", "up")
        ],
        ["does not fit the weights", "experts", "[4, "],
    ),
    "an expert of another shape": (
        change(EXPERT, lambda weight: weight[:, :16].clone()),
        ["experts must have one shape", "[64, 16]", EXPERT],
    ),
    "another shape": (
        change(Q_A, lambda weight: weight[:32].clone()),
        [f"{Q_A} must have shape [64, 64], got [32, 64]"],
    ),
}
"""Changes of a checkpoint of floats."""


@pytest.mark.parametrize("name", CORRUPTED)
def test_broken_checkpoints_of_codes_are_refused(model, tmp_path, name):
    weights, config = model
    apply, parts = CORRUPTED[name]
    tensors, _ = stored(weights, e4m3())
    apply(tensors)
    assert_refused(save(tmp_path, tensors, config | {"quantization_config": fp8()}), parts)


@pytest.mark.parametrize("name", FLOATS)
def test_broken_checkpoints_of_floats_are_refused(model, tmp_path, name):
    weights, config = model
    apply, parts = FLOATS[name]
    tensors = dict(weights)
    apply(tensors)
    assert_refused(save(tmp_path, tensors, config), parts)


def assert_refused(folder, parts):
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_codes_are_refused_without_a_quantization_config(model, tmp_path):
    weights, config = model
    tensors, _ = stored(weights, e4m3())
    assert_refused(save(tmp_path, tensors, config), ["must be floats, got F8_E4M3", NO_CONFIG])


def test_layers_that_draft_tokens_are_not_read(model, tmp_path):
    weights, config = model
    tensors, expected = stored(weights, e4m3())
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(64, 128, dtype=E4M3)
    config = config | {"quantization_config": fp8()}
    assert_refused(save(tmp_path, tensors, config), ["layers.2.eh_proj.weight", "got none"])
    found = load(save(tmp_path, tensors, config | {"num_nextn_predict_layers": 1}))
    assert torch.equal(found[Q_A], expected[Q_A])


def test_indexers_of_layers_that_share_a_selection_are_not_read(tmp_path):
    """Files may have one for every layer; only a layer of its own kind needs it."""
    model = copying_model("glm_moe_dsa", vocab_size=256, indexer_types=["full", "shared"])
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    extra = {
        name.replace("layers.0.", "layers.1."): each.clone()
        for name, each in weights.items()
        if "layers.0.self_attn.indexer." in name
    }
    assert extra
    assert not extra.keys() & weights.keys()
    config = json.loads(model.config.to_json_string())
    found = load(save(tmp_path, weights | extra, config))
    assert found.keys() == weights.keys()
    other = {"model.layers.1.self_attn.other.weight": torch.ones(1)}
    assert_refused(save(tmp_path, weights | other, config), ["self_attn.other.weight must be"])


def test_wide_floats_are_rounded(model, tmp_path):
    weights, config = model
    doubles = {name: weight.double() for name, weight in weights.items()}
    found = load(save(tmp_path, doubles, config))
    assert torch.equal(found[Q_A], weights[Q_A])


def test_integers_of_the_model_must_be_integers(tmp_path):
    """DeepSeek-V4's table of experts for tokens."""
    model = compressed_copying_model(num_hash_layers=1)
    weights = {name: each.clone() for name, each in model.state_dict().items()}
    config = json.loads(model.config.to_json_string())
    name = next(name for name in weights if name.endswith("tid2eid"))
    assert weights[name].dtype == torch.int64
    found = load(save(tmp_path, weights, config))
    assert torch.equal(found[name], weights[name])
    weights[name] = weights[name].float()
    assert_refused(save(tmp_path, weights, config), [f"{name} must be integers, got F32"])


QUANTIZATIONS = [
    ({"quant_method": "gptq", "bits": 4}, "quant_method of fp8 or compressed-tensors or quark"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "got 'modelopt'"),
    (fp8(fmt="e5m2"), "fmt 'e4m3', got 'e5m2'"),
    (compressed("nvfp4-pack-quantized", 4, "tensor_group"), "got format, type and num_bits"),
    (compressed("pack-quantized", 3, "channel", "int"), "('pack-quantized', 'int', 3)"),
    (compressed("int-quantized", 8, "channel", "int", symmetric=False), "symmetric weights"),
    (compressed("float-quantized", 8, "token"), "strategy tensor, channel, group or block"),
    (compressed("float-quantized", 8, "group"), "a positive group_size, got None"),
    (compressed("float-quantized", 8, "block", block_structure=[0, 1]), "block_structure, got"),
    (compressed("float-quantized", 8, "block", block_structure="128x128"), "block_structure, got"),
    ({"quant_method": "compressed-tensors", "config_groups": {}}, "must quantise weights"),
    ({"quant_method": "compressed-tensors", "config_groups": [1]}, "an object config_groups"),
    (
        compressed("float-quantized", 8, "tensor")
        | {"sparsity_config": {"format": "sparse-24-bitmask"}},
        "format 'dense', got 'sparse-24-bitmask'",
    ),
    (quark("int4", "per_group"), "got 'int4' and 'per_group'"),
    (quark("fp8_e4m3", "per_tensor", symmetric=False), "symmetric weights"),
    (quark("fp4", "per_group", group_size=32, scale_format="e4m3"), "scale_format e8m0"),
]


@pytest.mark.parametrize(("quantization", "part"), QUANTIZATIONS, ids=str)
def test_other_quantisations_are_refused_by_name(model, tmp_path, quantization, part):
    """Before any file of weights is opened: there is none."""
    (tmp_path / "config.json").write_text(
        json.dumps(model[1] | {"quantization_config": quantization})
    )
    assert_refused(tmp_path, ["config.json: quantization_config must", part])


def test_words_must_hold_the_integers_of_their_shape(model, tmp_path):
    weights, config = model
    quantization, make = FORMATS["compressed-tensors, packed int4"]
    tensors, _ = stored(weights, make)
    tensors[f"{Q_A}_shape"] = torch.tensor([64, 128])
    config = config | {"quantization_config": quantization}
    assert_refused(save(tmp_path, tensors, config), [f"{Q_A}_packed must hold", "[64, 128]"])


# Files.


def split(folder, weights, config):
    """The weights in two files with an index."""
    names = sorted(weights)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    places = {}
    for file, part in parts.items():
        save_file({name: weights[name] for name in part}, folder / file, {"format": "pt"})
        places |= dict.fromkeys(part, file)
    (folder / "config.json").write_text(json.dumps(config))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return index


def test_files_of_an_index(model, tmp_path):
    weights, config = model
    index = split(tmp_path, weights, config)
    (tmp_path / "other.safetensors").write_bytes(b"of another model")
    assert torch.equal(load(tmp_path)[Q_A], weights[Q_A])

    content = json.loads(index.read_text())
    for changed, part in (
        ({}, "must have a weight_map"),
        ({"weight_map": {}}, "must have a weight_map"),
        ({"weight_map": {"a": "../a.safetensors"}}, "must name files of its folder"),
        ({"weight_map": {"a": 7}}, "must name files of its folder, got 7"),
        ({"weight_map": content["weight_map"] | {"x": "none.safetensors"}}, "none.safetensors"),
    ):
        index.write_text(json.dumps(changed))
        assert_refused(tmp_path, [part])
    index.write_text("{")
    assert_refused(tmp_path, ["index.json is not valid JSON"])
    index.unlink()
    assert_refused(tmp_path, ["other.safetensors: cannot read the weights"])
    (tmp_path / "other.safetensors").unlink()
    assert torch.equal(load(tmp_path)[Q_A], weights[Q_A])


def test_a_tensor_in_two_files(model, tmp_path):
    weights, config = model
    split(tmp_path, weights, config)
    save_file(weights, tmp_path / "b.safetensors", {"format": "pt"})
    assert_refused(tmp_path, ["b.safetensors: ", "a.safetensors, too"])


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 7\n"


@pytest.mark.parametrize("content", [b"", b"{", LFS, b"\xff" * 64, None], ids=str)
def test_files_that_are_no_weights(model, tmp_path, content):
    path = tmp_path / "model.safetensors"
    path.mkdir() if content is None else path.write_bytes(content)
    (tmp_path / "config.json").write_text(json.dumps(model[1]))
    assert_refused(tmp_path, ["model.safetensors: cannot read the weights"])


def test_a_file_that_ends_early(model, tmp_path):
    weights, config = model
    path = save(tmp_path, weights, config) / "model.safetensors"
    os.truncate(path, path.stat().st_size - 100)
    assert_refused(tmp_path, ["model.safetensors: cannot read the weights"])

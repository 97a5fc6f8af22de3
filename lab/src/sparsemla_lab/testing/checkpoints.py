"""Checkpoints made of that of a small DeepSeek-V3.2: drafts, quantised weights, an adapter.

The folder is that of a model of :mod:`sparsemla_lab.testing.models`. Each function writes another
folder, with the names of published checkpoints.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

BLOCK = 128
"""Rows and columns of an FP8 block with a scale of its own."""

GROUP = 128
"""Columns of a row of int4 weights with a scale of their own."""

PACKED = ("q_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Modules with int4 weights; the others of attention are read by other means than a product."""

FP8 = (*PACKED, "q_a_proj", "kv_a_proj_with_mqa", "kv_b_proj", "wq_b", "wk")
"""Modules with FP8 weights."""

ADAPTED = ("q_b_proj", "o_proj", "wq_b", "down_proj")
"""Modules with an adapter: of those that are not absorbed."""


def _copy(source: Path, folder: Path, **fields: object) -> dict[str, Any]:
    """Write the configuration with other fields; what it then is."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads((source / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return config


def _load(source: Path) -> dict[str, Tensor]:
    return load_file(source / "model.safetensors")


def _save(weights: dict[str, Tensor], folder: Path) -> None:
    made = {name: weight.contiguous() for name, weight in weights.items()}
    save_file(made, folder / "model.safetensors", {"format": "pt"})


def add_mtp_layer(source: Path, folder: Path) -> None:
    """Write the model and an MTP layer, which is layer 0 on embeddings.

    Position t of the MTP layer sees the embedding of token t + 1, so its head copies the token that
    the model's own copies one position later.
    """
    config = _copy(source, folder, num_nextn_predict_layers=1)
    weights = _load(source)
    layer = f"model.layers.{config['num_hidden_layers']}"
    for name, weight in list(weights.items()):
        if name.startswith("model.layers.0."):
            weights[name.replace("model.layers.0", layer)] = weight.clone()
    ones = torch.ones(config["hidden_size"], dtype=torch.bfloat16)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{layer}.{norm}.weight"] = ones.clone()
    eye = torch.diag(ones)
    weights[f"{layer}.eh_proj.weight"] = torch.cat([eye, torch.zeros_like(eye)], dim=1)
    weights[f"{layer}.embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{layer}.shared_head.head.weight"] = weights["lm_head.weight"].clone()
    _save(weights, folder)


def write_eagle_config(source: Path, folder: Path) -> dict[str, Any]:
    """Write the configuration of :func:`write_eagle`; what it is."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        name: value
        for name, value in json.loads((source / "config.json").read_text()).items()
        if not name.startswith(("index", "layer_types", "mlp_layer_types"))
    }
    changes = {
        "architectures": ["DeepSeekMTPModel"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 1,
    }
    (folder / "config.json").write_text(json.dumps(config | changes, indent=2))
    return config | changes


def write_eagle(source: Path, folder: Path) -> None:
    """Write a drafting model of one layer with dense attention, layer 0 on embeddings."""
    config = write_eagle_config(source, folder)
    weights = _load(source)
    drafting = {
        name.removeprefix("model."): weight
        for name, weight in weights.items()
        if name.startswith("model.layers.0.") and ".indexer." not in name
    }
    ones = torch.ones(config["hidden_size"], dtype=torch.bfloat16)
    for norm in ("enorm", "hnorm", "norm"):
        drafting[f"{norm}.weight"] = ones.clone()
    eye = torch.diag(ones)
    drafting["fc.weight"] = torch.cat([eye, torch.zeros_like(eye)], dim=1)
    drafting["embed_tokens.weight"] = weights["model.embed_tokens.weight"]
    drafting["lm_head.weight"] = weights["lm_head.weight"]
    _save(drafting, folder)


def quantise_fp8(source: Path, folder: Path) -> None:
    """Write the linear layers in e4m3 with a float32 scale for 128 x 128 weights."""
    quantisation = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [BLOCK, BLOCK],
    }
    _copy(source, folder, quantization_config=quantisation)
    found: dict[str, Tensor] = {}
    for name, weight in _load(source).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in FP8:
            found[name] = weight
            continue
        rows, columns = weight.shape
        padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
        padded[:rows, :columns] = weight.float()
        blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, -1, BLOCK)
        scales = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        codes = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(padded.shape)
        found[name] = codes[:rows, :columns]
        found[f"{name}_scale_inv"] = scales
    _save(found, folder)


def quantise_int4(source: Path, folder: Path) -> None:
    """Write :data:`PACKED` as symmetric int4 with a bfloat16 scale for 128 weights of a row.

    The format is compressed-tensors' ``pack-quantized``.
    """
    weights = _load(source)
    modules = [name.removesuffix(".weight") for name in weights]
    scheme = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": GROUP,
        "dynamic": False,
    }
    quantisation = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {"targets": [f"re:.*{name}$" for name in PACKED], "weights": scheme}
        },
        "ignore": ["lm_head"],
    }
    _copy(source, folder, quantization_config=quantisation)
    found: dict[str, Tensor] = {}
    for name, module in zip(weights, modules, strict=True):
        weight = weights[name]
        if module.rpartition(".")[2] not in PACKED:
            found[name] = weight
            continue
        groups = weight.float().view(weight.shape[0], -1, GROUP)
        scales = (groups.abs().amax(-1) / 7).bfloat16()
        codes = (groups / scales.float()[..., None]).round().clamp(-8, 7).int().view(weight.shape)
        nibbles = (codes + 8).view(weight.shape[0], -1, 8).long()
        words = (nibbles << (4 * torch.arange(8))).sum(-1)
        found[f"{module}.weight_packed"] = (words - (words >> 31 << 32)).int()
        found[f"{module}.weight_scale"] = scales
        found[f"{module}.weight_shape"] = torch.tensor(weight.shape)
    _save(found, folder)


def write_adapter(source: Path, folder: Path, rank: int = 8, size: float = 0.1) -> None:
    """Write a LoRA adapter of :data:`ADAPTED`, by the names of PEFT.

    Args:
        source: folder of the model.
        folder: of the adapter.
        rank: of its products.
        size: of what it adds, beside the output of weights that keep the size of their input.
    """
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(2)
    found = {}
    for name, weight in _load(source).items():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in ADAPTED:
            continue
        rows, columns = weight.shape
        for part, shape, scale in (
            ("lora_A", (rank, columns), columns**-0.5),
            ("lora_B", (rows, rank), size * rank**-0.5),
        ):
            drawn = torch.randn(shape, generator=generator) * scale
            found[f"base_model.model.{module}.{part}.weight"] = drawn.bfloat16()
    save_file(found, folder / "adapter_model.safetensors", {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(source),
        "r": rank,
        "lora_alpha": rank,
        "target_modules": [*ADAPTED],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))


def with_fields(source: Path, folder: Path, **fields: object) -> None:
    """Write the same weights with other fields of the configuration."""
    _copy(source, folder, **fields)
    shutil.copy(source / "model.safetensors", folder)

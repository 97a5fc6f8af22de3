"""A small transformers model with next tokens that depend on attention, by a clear margin.

With random weights the two best logits often differ by less than the rounding error, so two correct
implementations of attention disagree after some dozen tokens. A trained model has wide margins,
because its heads attend to the tokens that matter. One head of this model is built to do so.
"""

from __future__ import annotations

from typing import Any, cast

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

CLASSES = {
    "deepseek_v3": "DeepseekV3",
    "deepseek_v32": "DeepseekV32",
    "glm_moe_dsa": "GlmMoeDsa",
    "axk2": "AXK2",
    "hy_v4": "HYV4",
}

CONSTANT = 4.0
"""Dim 0 of every embedding: a projection that reads this dim alone is constant."""


def copying_model(
    model_type: str,
    *,
    lag: int = 37,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **sizes: object,
) -> PreTrainedModel:
    """A model that predicts the successor of the token ``lag`` positions back.

    The successors are a random permutation of the vocabulary, so the text does not repeat with the
    lag. Head 0 of layer 0 has constant queries and keys before RoPE, rotated against each other by
    ``lag`` positions, and its value path copies the token there. The layer's indexer selects the
    same token. All other weights are random: the other heads, layer 1 with its indexer, the MLPs.

    Args:
        model_type: a key of :data:`CLASSES`.
        lag: distance between a token and its prediction; the prompt must be longer.
        seed: seed of the weights.
        dtype: dtype of the finished model.
        device: where the weights are drawn; other devices draw other ones.
        sizes: fields of the configuration that replace the defaults.
    """
    settings: dict[str, Any] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
        "first_k_dense_replace": 8,  # no experts: rounding flips their choice, too
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10.0},
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": "eager",
    }
    if model_type != "deepseek_v3":
        settings |= {"index_topk": 32, "index_n_heads": 4, "index_head_dim": 64}
    if model_type == "hy_v4":
        settings["mlp_layer_types"] = ["dense"] * 2
        settings["hc_mult"] = 1
    config = getattr(transformers, f"{CLASSES[model_type]}Config")(**(settings | sizes))
    with torch.device(device):
        model = getattr(transformers, f"{CLASSES[model_type]}ForCausalLM")(config).eval()
    generator = torch.Generator(device).manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                modest = "o_proj" in name or "down_proj" in name
                deviation = (0.3 if modest else 1.0) * parameter.shape[-1] ** -0.5
                deviation *= 0.1 if "norm.mlp" in name else 1.0  # gates of a norm
                parameter.normal_(0, deviation, generator=generator)
        embeddings = model.model.embed_tokens.weight
        embeddings.normal_(0, 1, generator=generator)
        embeddings[:, 0] = 0
        embeddings.mul_(config.hidden_size**0.5 / embeddings.norm(dim=1, keepdim=True))
        embeddings[:, 0] = CONSTANT
        successors = torch.randperm(config.vocab_size, generator=generator, device=generator.device)
        model.lm_head.weight[successors] = embeddings
        model.lm_head.weight[:, 0] = 0
        _look_back(model.model, lag, generator)
    return model.to(dtype)


def _look_back(base: PreTrainedModel, lag: int, generator: torch.Generator) -> None:
    """Make head 0 of layer 0 copy the token ``lag`` positions back, and its indexer select it."""
    model = cast(Any, base)  # its attributes depend on the architecture
    config, attention = model.config, model.layers[0].self_attn
    heads, hidden = config.num_attention_heads, config.hidden_size
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    latent, value = config.kv_lora_rank, config.v_head_dim
    angles = model.rotary_emb.inv_freq * lag
    behind = torch.stack([angles.cos(), -angles.sin()], dim=-1)  # [R / 2, 2]
    ahead = torch.stack([torch.ones_like(angles), torch.zeros_like(angles)], dim=-1)

    def pairs(interleaved: bool) -> list[Tensor]:
        return [(x if interleaved else x.T).flatten() for x in (behind, ahead)]

    query, key = pairs(config.model_type != "hy_v4")
    attention.q_a_proj.weight[0] = 0
    attention.q_a_proj.weight[0, 0] = 2.0
    has_gate = config.model_type in ("axk2", "hy_v4")
    fused = config.model_type == "axk2"
    projection = attention.q_gate_proj if fused else attention.q_b_proj
    q = projection.weight.view(heads, -1, projection.in_features)[0]
    q[:nope] *= 0.2
    q[nope : nope + rope] *= 0.1
    q[nope : nope + rope, 0] = query * 0.25 * (nope + rope) ** 0.5
    if has_gate:  # wide open
        gate = q[nope + rope :] if fused else attention.gate_proj.weight[:value]
        gate *= 0.2
        gate[:, 0] = 2.0
    kv = attention.kv_a_proj_with_mqa.weight
    kv[latent:] *= 0.1
    kv[latent:, 0] = key
    kv[:latent] = _orthonormal(latent, hidden, generator)
    read = _orthonormal(value, latent, generator)
    attention.kv_b_proj.weight.view(heads, nope + value, latent)[0, nope:] = read
    write = attention.o_proj.weight.view(hidden, heads, value)
    # The latent has only the rank of the hidden state, so RMSNorm scales it up.
    write[:, 0] = 4 * (hidden / latent) ** 0.5 * torch.linalg.pinv(read @ kv[:latent])

    indexer = getattr(attention, "indexer", None)
    if indexer is not None:
        query, key = pairs(config.model_type == "glm_moe_dsa")
        first = indexer.head_dim - rope if config.model_type == "hy_v4" else 0
        dims = slice(first, first + rope)
        wq = indexer.wq_b.weight.view(indexer.n_heads, indexer.head_dim, -1)
        wq[:, dims, 0] = query
        indexer.k_norm.weight[dims] = 0.2
        indexer.k_norm.bias[dims] = 3 * key
        indexer.weights_proj.weight *= 0.2
        indexer.weights_proj.weight[:, 0] = 0.3


def _orthonormal(rows: int, cols: int, generator: torch.Generator) -> Tensor:
    """``[rows, cols]`` with orthonormal columns if it is tall, else orthonormal rows."""
    shape = max(rows, cols), min(rows, cols)
    tall = torch.randn(shape, generator=generator, device=generator.device)
    q = torch.linalg.qr(tall)[0]
    return q if rows >= cols else q.T


HY_V4_NAMES = (
    (".self_attn.sinks", ".self_attn.learnable_sink_param"),
    (".self_attn.gate_proj.", ".self_attn.linear_gate."),
    (".attn_hc.", ".hc_attn_layer.hc_pre.hc_"),
    (".ffn_hc.", ".hc_mlp_layer.hc_pre.hc_"),
    ("model.hc_head.hc_", "model.hc_head.hc_head_"),
)
"""What a Hunyuan V4 names so in transformers, and in published checkpoints."""


def published_hy_v4(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of a Hunyuan V4 as published, with the pairs that RoPE rotates side by side.

    transformers' class rotates dims that are half of RoPE's dims apart, vLLM's class neighbours.
    """
    config = cast(Any, model.config)
    rope = config.qk_rope_head_dim
    order = torch.arange(rope).view(2, -1).T.flatten()
    rotated = {  # the rows of a head
        "q_b_proj.weight": config.qk_nope_head_dim + rope,
        "kv_a_proj_with_mqa.weight": config.kv_lora_rank + rope,
        "indexer.wq_b.weight": config.index_head_dim,
        "indexer.wk.weight": config.index_head_dim,
        "indexer.k_norm.weight": config.index_head_dim,
        "indexer.k_norm.bias": config.index_head_dim,
    }
    found = {}
    for name, weight in model.state_dict().items():
        for part, rows in rotated.items():
            if name.endswith(part):
                heads = weight.clone().unflatten(0, (-1, rows))
                heads[:, -rope:] = heads[:, -rope:][:, order]
                weight = heads.flatten(0, 1)
        for ours, theirs in HY_V4_NAMES:
            name = name.replace(ours, theirs)
        found[name] = weight.contiguous()
    return found

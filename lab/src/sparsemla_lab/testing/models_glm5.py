"""A small GLM-5.3-Flash with next tokens that depend on attention and pooled keys, clearly.

A token has two parts, ``(a, b)``. The next token after it is the token of the context whose first
part is ``b``: without RoPE, attention finds tokens by their content.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn.functional import one_hot

PARTS = 16
"""Values of each part; the token ``(a, b)`` has the id ``16 a + b``."""
POOL, SLOT = 4, 2
"""Tokens of a pool, and the one of them that its key is made of."""


def pooled_model(dtype: torch.dtype = torch.float32, **sizes: object) -> Any:  # noqa: ANN401
    """A random model with a layer of linear attention and two of sparse attention.

    Args:
        dtype: dtype of the model.
        sizes: fields of the text's configuration that replace the defaults.
    """
    text: dict[str, Any] = {
        "vocab_size": PARTS**2,
        "hidden_size": 80,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "n_routed_experts": 2,
        "num_experts_per_tok": 2,
        "mlp_layer_types": ["dense"] * 3,
        "layer_types": ["linear_attention"] + ["deepseek_sparse_attention"] * 2,
        "indexer_types": ["full", "full", "shared"],
        "linear_head_dim": 16,
        "linear_num_heads": 2,
        "index_kpool": POOL,
        "index_topk": 8,
        "index_n_heads": 8,
        "index_head_dim": 32,
        "hc_mult": 1,
        "hc_sinkhorn_iters": 1,
        "max_position_embeddings": 2048,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    vision = {
        "depth": 1,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 80,
        "projection_intermediate_size": 32,
    }
    config = transformers.Glm5NextConfig(
        text_config=text | sizes, vision_config=vision, attn_implementation="eager"
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # of the convolutions and of the time steps, which are not drawn below
        model: Any = transformers.Glm5NextForConditionalGeneration(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "ape" in name or "embed_tokens" in name:
                parameter.normal_(0, 1, generator=generator)
            elif parameter.dim() > 1 and "conv" not in name:
                deviation = 0.02 if name.endswith("fn") else parameter.shape[-1] ** -0.5
                parameter.normal_(0, deviation, generator=generator)
            elif "norm" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def finding_model(dtype: torch.dtype = torch.float32, **sizes: Any) -> Any:  # noqa: ANN401
    """The model whose next token after ``(a, b)`` is the context's token ``(b, c)``.

    Head 0 of the first sparse layer finds it. The indexer looks for pools whose token in slot
    :data:`SLOT` begins with ``b``, and selects two of them. Other weights are random and small.

    Args:
        dtype: dtype of the model.
        sizes: as in :func:`pooled_model`.
    """
    model = pooled_model(**sizes)
    base = model.model.language_model
    given, found = 1 + torch.arange(2 * PARTS), 1 + 2 * PARTS + torch.arange(2 * PARTS)
    first, second, places = given[:PARTS], given[PARTS:], torch.arange(PARTS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and ("o_proj" in name or "down_proj" in name):
                parameter.mul_(0.05)
            elif "layernorm" in name or "k_norm" in name or name.endswith("norm.weight"):
                parameter.fill_(0 if name.endswith("bias") else 1)
        parts = torch.cartesian_prod(places, places)
        hot = one_hot(parts, PARTS).flatten(1).float()
        base.embed_tokens.weight.zero_()[:, given] = 2 * hot
        base.embed_tokens.weight[:, 0] = 2
        model.lm_head.weight.zero_()[:, found] = 3 * hot
        attention = base.layers[1].self_attn
        attention.q_a_proj.weight.zero_()[places, second] = 1
        heads = attention.q_b_proj.weight.view(
            attention.num_heads, -1, attention.q_b_proj.in_features
        )
        heads[0].zero_()[places, places] = 4
        latent = attention.kv_a_proj_with_mqa.weight.zero_()
        latent[torch.arange(2 * PARTS), given] = 1
        expand = attention.kv_b_proj.weight.view(attention.num_heads, -1, latent.shape[0])[0]
        expand.zero_()[places, places] = 1
        expand[attention.qk_nope_head_dim + torch.arange(2 * PARTS), torch.arange(2 * PARTS)] = 1
        attention.o_proj.weight[found, torch.arange(2 * PARTS)] = 1
        indexer = attention.indexer
        queries = indexer.wq_b.weight.zero_().view(indexer.n_heads, indexer.head_dim, -1)
        queries[:, places, places] = 1
        indexer.wk.weight.zero_()[places, first] = 1
        indexer.weights_proj.weight.zero_()[:, 0] = 1
        indexer.index_kpool_compress_gate.zero_()
        indexer.index_kpool_compress_ape.zero_()[SLOT] = 20
    return model.to(dtype)


def prompt() -> tuple[Tensor, Tensor]:
    """A text ``[1, 64]`` with a token for each first part but 0, in its own slot.

    Returns:
        The text, and the second part that belongs to each first part.
    """
    generator = torch.Generator().manual_seed(1)
    order = 1 + torch.randperm(PARTS - 1, generator=generator)
    after = torch.zeros(PARTS, dtype=torch.long)
    after[order] = order.roll(-1)  # a single cycle
    text = torch.zeros(1, PARTS * POOL, dtype=torch.long)  # fillers begin with 0
    shuffled = 1 + torch.randperm(PARTS - 1, generator=generator)
    text[0, SLOT : SLOT + POOL * (PARTS - 1) : POOL] = PARTS * shuffled + after[shuffled]
    text[0, -1] = int(shuffled[0])  # (0, b)
    return text, after

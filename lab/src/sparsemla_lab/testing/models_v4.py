"""A small DeepSeek-V4 model whose next token depends on every path of attention, by a clear margin.

As in :mod:`sparsemla_lab.testing.models`, weights are built and not trained. The keys that a head
looks for have a constant in some RoPE pairs, and the head's query the same constant, rotated by the
distance: the score of a key then depends on its distance alone.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch
import transformers
from torch import Tensor
from torch.nn.functional import one_hot
from transformers import PreTrainedModel

from sparsemla_lab.testing.models import CONSTANT

Module: TypeAlias = Any
"""A module of transformers; its attributes depend on its kind."""

PART = 4
"""Values of one of the four parts of a token of :func:`compressed_copying_model`."""

GIVEN, FOUND = 1, 17
"""First dims of the hidden state for a token's parts, one-hot, and for those that are found."""

GAP = 24.0
"""Least distance between the score of the key that is sought and any other."""


def compressed_copying_model(
    *,
    head_dim: int = 64,
    rope_dim: int = 32,
    far: int = 150,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **sizes: object,
) -> PreTrainedModel:
    """A DeepSeek-V4 model: each of a token's four parts comes from the past by a path of its own.

    Token ``((a * 4 + b) * 4 + c) * 4 + d`` has the parts a, b, c and d. The token after position
    ``p`` has, modulo 4::

        a = 1 + part a at p - 37     layer 0: a raw row, whose RoPE dims are the value
        b = 1 + part b at p - far    layer 1, heads 0 to 3: an entry of 4 tokens
        c = 1 + part c at slot 77 of the latest complete window    layer 2: an entry of 128 tokens
        d = 1 + part d at p - 5      layer 1, heads 4 to 7: an entry of 4 tokens

    An entry of layer 1 keeps four tokens, each in other dims, as its position bias decides: two of
    its own window and two of the window before. At each position one head of four finds an entry at
    its distance, and the sink silences the others. The indexer selects 8 entries, at both
    distances.

    Args:
        head_dim: D, at least 32 more than rope_dim.
        rope_dim: R.
        far: distance of part b; at most 127 if a window of raw rows must have it.
        seed: seed of the random weights: MLPs, gates, hyper-connections.
        dtype: dtype of the finished model.
        sizes: fields of the configuration that replace the defaults.
    """
    settings: dict[str, Any] = {
        "vocab_size": PART**4,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "head_dim": head_dim,
        "qk_rope_head_dim": rope_dim,
        "q_lora_rank": 16,
        "o_groups": 2,
        "o_lora_rank": PART,
        "index_n_heads": 16,
        "index_head_dim": 64,
        "index_topk": 8,
        "compress_ratios": [0, 4, 128],
        "rope_theta": 10.0,
        "compress_rope_theta": 1000.0,
        "n_routed_experts": 2,
        "num_experts_per_tok": 2,  # all: rounding would flip their choice, too
        "num_hash_layers": 0,
        "hc_mult": 1,
        "hc_sinkhorn_iters": 1,
        "max_position_embeddings": 2048,
        "pad_token_id": None,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = transformers.DeepseekV4Config(**(settings | sizes))
    model: Any = transformers.DeepseekV4ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    parts = torch.cartesian_prod(*[torch.arange(PART)] * 4)  # [vocab, 4]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and "position_bias" not in name:
                # Of many inputs, too, the sums stay small beside what is copied.
                spread = min(0.02, 0.16 * parameter.shape[-1] ** -0.5)
                parameter.normal_(0, spread, generator=generator)
        embeddings = model.model.embed_tokens.weight
        embeddings[:, 0] = 2 * CONSTANT
        embeddings[:, GIVEN:FOUND] = 2 * one_hot(parts, PART).flatten(1).float()
        before = one_hot((parts - 1) % PART, PART).flatten(1).float()
        model.lm_head.weight[:, FOUND : FOUND + 16] = 10 * before
        model.to(dtype)
        rotary = model.model.rotary_emb
        for layer in model.model.layers:
            layer.self_attn.q_a_proj.weight[0, 0] = (
                1  # the first dim of every query's latent is constant
            )
        window, csa, hca = (layer.self_attn for layer in model.model.layers)
        _read_raw_row(window, rotary.main_inv_freq.float())
        _read_short_entries(csa, rotary.compress_inv_freq.float(), far)
        _read_latest_entry(hca, rotary.compress_inv_freq.float())
    return model


FIRST_COPIED = 152
"""From this position on the tokens that :func:`compressed_copying_model` copies are there."""


def parts_of(tokens: Tensor) -> Tensor:
    """The four parts ``[..., 4]`` of tokens of :func:`compressed_copying_model`."""
    return torch.stack([tokens // PART**power % PART for power in (3, 2, 1, 0)], -1)


def copied_tokens(ids: Tensor, far: int = 150) -> Tensor:
    """The token after each position of ``ids [..., n]`` from :data:`FIRST_COPIED` on."""
    at = torch.arange(FIRST_COPIED, ids.shape[-1], device=ids.device)
    latest = ((at + 1) // 128 - 1) * 128 + 77
    sources = torch.stack([at - 37, at - far, latest, at - 5])
    a, b, c, d = ((parts_of(ids[..., row])[..., i] + 1) % PART for i, row in enumerate(sources))
    return ((a * PART + b) * PART + c) * PART + d


PUBLISHED = (
    (r"^model\.embed_tokens\.", "embed."),
    (r"^lm_head\.", "head."),
    (r"^model\.norm\.", "norm."),
    (r"^model\.hc_head\.hc_", "hc_head_"),
    (r"^model\.layers\.", "layers."),
    (r"\.(attn|ffn)_hc\.", r".hc_\1_"),
    (r"\.input_layernorm\.", ".attn_norm."),
    (r"\.post_attention_layernorm\.", ".ffn_norm."),
    (r"\.compressor\.indexer\.scorer\.", ".indexer."),
    (r"\.compressor\.indexer\.q_b_proj\.", ".indexer.wq_b."),
    (r"\.compressor\.indexer\.", ".indexer.compressor."),
    (r"compressor\.kv_norm\.", "compressor.norm."),
    (r"\.self_attn\.", ".attn."),
    (r"\.mlp\.", ".ffn."),
    (r"\.q_a_norm\.", ".q_norm."),
    (r"\.([qo])_([ab])_proj\.", r".w\1_\2."),
    (r"\.kv_proj\.", ".wkv."),
    (r"compressor\.gate_proj\.", "compressor.wgate."),
    (r"\.position_bias$", ".ape"),
    (r"\.sinks$", ".attn_sink"),
    (r"\.gate\.e_score_correction_bias$", ".gate.bias"),
    (r"shared_experts\.gate_proj\.", "shared_experts.w1."),
    (r"shared_experts\.down_proj\.", "shared_experts.w2."),
    (r"shared_experts\.up_proj\.", "shared_experts.w3."),
)
"""Names of transformers' weights, and of the published ones."""


def published_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of a DeepSeek-V4 by the names of published checkpoints, which vLLM reads."""
    return _published(model.state_dict())


def draft_layer(model: PreTrainedModel, far: int) -> Module:
    """A layer for DSpark's drafts: parts a, b and d of the next token, from raw rows of the window.

    Args:
        model: a :func:`compressed_copying_model` of this ``far``; its layer 0 is copied.
        far: at most 127.
    """
    base: Any = model.model
    with torch.no_grad():
        layer = copy.deepcopy(base.layers[0])
        frequencies = base.rotary_emb.main_inv_freq.float()
        _read_window(layer.self_attn, frequencies, {0: 37, 1: far, 3: 5})
    return layer


def markov_weights(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Of DSpark's head: it gives a token the part c of the one before, ``[vocab_size, rank]`` each.

    That part changes with the latest complete window only.
    """
    part = one_hot(parts_of(torch.arange(vocab_size))[:, 2], MARKOV_RANK).float()
    return part, 60 * part  # more than noise, less than a part that is found


MARKOV_RANK = 16
DSPARK = {
    "n_mtp_layers": 1,
    "dspark_target_layer_ids": [0],
    "dspark_markov_rank": MARKOV_RANK,
    "dspark_noise_token_id": 0,
    "enable_confidence_head": False,
}
"""Fields of a configuration with the weights of :func:`published_drafts`."""


def published_drafts(model: PreTrainedModel, far: int) -> dict[str, Tensor]:
    """The weights of DSpark's drafts of a :func:`compressed_copying_model`, by published names.

    They see the hidden states behind layer 0 of the model, which still have a token's parts.
    """
    layer, weights = draft_layer(model, far), published_weights(model)
    own = _published({f"model.layers.0.{name}": x for name, x in layer.state_dict().items()})
    found = {name.removeprefix("layers.0."): weight for name, weight in own.items()}
    found |= {name: x for name, x in weights.items() if name.startswith(("norm.", "hc_head_"))}
    embeddings = weights["embed.weight"]
    hidden = torch.ones(embeddings.shape[1], dtype=embeddings.dtype)
    found |= {"main_proj.weight": hidden.diag(), "main_norm.weight": hidden}
    for number, weight in enumerate(markov_weights(len(embeddings)), 1):
        found[f"markov_head.markov_w{number}.weight"] = weight.to(embeddings.dtype)
    return {f"mtp.0.{name}": weight.clone() for name, weight in found.items()}


def _published(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of transformers by published names."""
    found: dict[str, Tensor] = {}
    for name, weight in state.items():
        for pattern, replacement in PUBLISHED:
            name = re.sub(pattern, replacement, name)
        if ".experts." not in name:
            found[name] = weight
            continue
        layer, _, kind = name.rpartition(".")
        for expert, matrix in enumerate(weight):
            parts = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}[kind]
            for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                found[f"{layer}.{expert}.{part}.weight"] = rows.contiguous()
    return found


def _read_raw_row(attention: Module, frequencies: Tensor, lag: int = 37) -> None:
    """Head 0 reads part 0 of the token ``lag`` back, from the RoPE dims of its raw row."""
    rope = attention.head_dim - 2 * len(frequencies)
    pairs = torch.arange(2, len(frequencies))  # the first two hold the value
    sought = GAP / (1 - nearest(frequencies[pairs]))
    look_for(attention.q_b_proj, [lag], frequencies, pairs, head_dim=attention.head_dim)
    row = attention.kv_proj.weight.zero_()
    row[rope + torch.arange(PART), GIVEN + torch.arange(PART)] = 1
    size = mark(attention, rope, pairs, sought, ones=1)
    back = _only_read(attention)
    for pair, angle in enumerate((frequencies[:2] * lag).tolist()):
        turn = torch.tensor(
            [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
        )
        dims = 2 * pair + torch.arange(2)
        back[0, dims[:, None], 0, rope + dims] = turn.to(back.dtype)
    attention.o_b_proj.weight[FOUND + torch.arange(PART), torch.arange(PART)] = 3 / size


def _read_window(attention: Module, frequencies: Tensor, lags: Mapping[int, int]) -> None:
    """One head each reads a part of the token as far back as ``lags`` says, from its raw row."""
    rope = attention.head_dim - 2 * len(frequencies)
    pairs = torch.arange(2, len(frequencies))  # as in layer 0
    sought = GAP / (1 - nearest(frequencies[pairs]))
    look_for(attention.q_b_proj, [*lags.values()], frequencies, pairs, head_dim=attention.head_dim)
    row = attention.kv_proj.weight.zero_()
    row[torch.arange(4 * PART), GIVEN + torch.arange(4 * PART)] = 1
    attention.kv_norm.weight.fill_(1)
    size = mark(attention, rope, pairs, sought, ones=4)
    back, dims = _only_read(attention), torch.arange(PART)
    rank, width = back.shape[1:3]
    for head, part in enumerate(lags):
        group, place = divmod(head, width)
        back[group, PART * place + dims, place, PART * part + dims] = 1
        read = rank * group + PART * place + dims
        attention.o_b_proj.weight[FOUND + PART * part + dims, read] = 3 / size


def _read_short_entries(attention: Module, frequencies: Tensor, far: int) -> None:
    """Four heads each read part 1 of the token ``far`` back, or part 3 of the token 5 back."""
    compressor, indexer = attention.compressor, attention.compressor.indexer
    dim = attention.head_dim
    rope = dim - 2 * len(frequencies)
    pairs = (frequencies > 0.04).nonzero()[:, 0]
    best = nearest(frequencies[pairs])
    sought = GAP / (1 - best)
    lags = [lag + shift for lag in (far, 5) for shift in (0, 1, -2, -1)]
    look_for(attention.q_b_proj, lags, frequencies, pairs, head_dim=dim)
    attention.kv_proj.weight[rope:] = 0  # no head looks for raw rows
    attention.sinks.fill_(sought * (1 + best) / 2)
    rows = compressor.kv_proj.weight.zero_().view(2, dim, -1)
    bias = compressor.position_bias.view(-1, 2, dim)
    for slot, series in enumerate((1, 1, 0, 0)):
        for part, first in ((1, 8 * slot), (3, 8 * slot + PART)):
            dims = torch.arange(PART)
            rows[series, first + dims, GIVEN + PART * part + dims] = 1
            bias[slot, series, first + dims] = 20
    size = mark(compressor, rope, pairs, sought, ones=8)
    back = _only_read(attention)
    rank = back.shape[1]
    for group, part in enumerate((1, 3)):
        for slot in range(4):
            dims = torch.arange(PART)
            back[group, dims, slot, 8 * slot + PART * group + dims] = 1
        attention.o_b_proj.weight[
            FOUND + PART * part + torch.arange(PART), rank * group + torch.arange(PART)
        ] = 3 / size
    heads = indexer.num_heads // len(lags) * lags
    look_for(indexer.q_b_proj, heads, frequencies, pairs, head_dim=indexer.head_dim)
    indexer.kv_proj.weight.zero_()
    mark(indexer, indexer.head_dim - 2 * len(frequencies), pairs, 1, ones=0)
    indexer.scorer.weights_proj.weight[:, 0] = 1


def _read_latest_entry(attention: Module, frequencies: Tensor) -> None:
    """Head 0 reads part 2 of the token at slot 77 of the latest complete window of 128."""
    compressor = attention.compressor
    rope = attention.head_dim - 2 * len(frequencies)
    pairs = (frequencies - 0.0037).abs().argmin()[None]  # falls over some 800 positions
    angle = 128 * float(frequencies[pairs])
    sought = GAP / (1 - math.cos(angle))
    look_for(attention.q_b_proj, [127], frequencies, pairs, head_dim=attention.head_dim)
    attention.kv_proj.weight[rope:] = 0
    attention.sinks.fill_(sought / 2)
    rows = compressor.kv_proj.weight.zero_()
    dims = torch.arange(PART)
    rows[dims, GIVEN + 2 * PART + dims] = 1
    compressor.position_bias[77, dims] = 20
    size = mark(compressor, rope, pairs, sought, ones=1)
    back = _only_read(attention)
    back[0, dims, 0, dims] = 1
    attention.o_b_proj.weight[FOUND + 2 * PART + dims, dims] = 3 / size


def nearest(frequencies: Tensor) -> float:
    """The best score of a key at another distance than the sought one, which scores 1."""
    shifts = torch.arange(1, 1024)[:, None]
    return float((shifts * frequencies).cos().mean(1).max())


def look_for(
    projection: Module,
    lags: list[int],
    frequencies: Tensor,
    pairs: Tensor,
    *,
    head_dim: int,
) -> None:
    """Give each of the first heads a constant query for keys ``lags`` back, by some RoPE pairs."""
    angles = frequencies[pairs] * torch.tensor(lags)[:, None]
    rope = torch.zeros(len(lags), len(frequencies), 2)
    rope[:, pairs] = torch.stack([angles.cos(), -angles.sin()], dim=-1)
    heads = projection.weight.view(-1, head_dim, projection.in_features)
    heads[: len(lags), -2 * len(frequencies) :, 0] = rope.flatten(1).to(heads.dtype)


def mark(module: Module, rope: int, pairs: Tensor, sought: float, *, ones: int) -> float:
    """Give rows a constant in some RoPE pairs, with which the key that is sought scores ``sought``.

    Args:
        module: it projects and normalises the rows; every series gets the constant.
        rope: first RoPE dim.
        pairs: the RoPE pairs.
        sought: the score.
        ones: values of a row that are as large as the constant, beside it.

    Returns:
        The size of these values after the norm.
    """
    dim = module.kv_norm.weight.shape[0]
    module.kv_proj.weight.view(-1, dim, module.kv_proj.in_features)[:, rope + 2 * pairs, 0] = 0.25
    size = math.sqrt(dim / (ones + len(pairs)))
    module.kv_norm.weight[rope + 2 * pairs] = sought / math.sqrt(len(pairs)) / size
    module.kv_norm.weight[rope + 2 * pairs + 1] = sought / math.sqrt(len(pairs)) / size
    return size


def _only_read(attention: Module) -> Tensor:
    """The first output projection ``[groups, outputs, heads, D]``; both projections become 0."""
    attention.o_b_proj.weight.zero_()
    projection = attention.o_a_proj
    return projection.weight.zero_().view(
        projection.n_groups, -1, attention.num_heads // projection.n_groups, attention.head_dim
    )

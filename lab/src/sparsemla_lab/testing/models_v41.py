"""A small DeepSeek-V4.1 whose next token depends on every path of attention, by a clear margin.

No library but vLLM has a class of the model, so its weights are made by their published names. As
in :mod:`sparsemla_lab.testing.models_v4`, they are built and not trained.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from sparsemla_lab.testing.models import CONSTANT
from sparsemla_lab.testing.models_v4 import (
    FOUND,
    GAP,
    GIVEN,
    PART,
    look_for,
    mark,
    nearest,
    parts_of,
)

HEAD_DIM, INDEX_DIM, ROPE_DIM = 512, 128, 64
RATIOS = 0, 2, 1, 1, 1
LAGS = 37, 150, 300, 310
"""How far back each part of the next token is."""
FIRST_COPIED = LAGS[-1]
"""From this position on the tokens that are copied are there."""


def copying_model(seed: int = 0, **sizes: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """``config.json`` and weights of a model that copies each part of a token by a path of its own.

    Tokens have the four parts of :func:`sparsemla_lab.testing.models_v4.parts_of`. The token after
    position ``p`` has, modulo 4::

        a = 1 + part a at p - 37     layer 0: a raw row
        b = 1 + the larger part b of the two tokens of the entry with p - 150
                                     layer 1: an entry of 2 tokens
        c = 1 + part c at p - 300    layer 2: an entry of one token; it chooses blocks of keys
        d = 1 + part d at p - 310    layer 4: an entry of layer 2, which layer 3 has selected
                                     among these blocks

    Hyper-connections keep their streams equal: each adds what a layer computes.

    Args:
        seed: of the random weights: MLPs and what no head reads.
        sizes: fields of the configuration that replace the defaults.

    Returns:
        The configuration, and bfloat16 weights by the names of published checkpoints.
    """
    text: dict[str, Any] = {
        "vocab_size": PART**4,
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": len(RATIOS),
        "compress_ratios": list(RATIOS),
        "kv_source_layer_ids": [1, 2],
        "index_source_layer_ids": [1, 2, 3],
        "candidate_source_layer_id": 2,
        "candidate_topk_blocks": 4,
        "candidate_block_size": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": HEAD_DIM,
        "qk_rope_head_dim": ROPE_DIM,
        "q_lora_rank": 64,
        "o_groups": 2,
        "o_lora_rank": 32,
        "index_n_heads": 16,
        "index_head_dim": INDEX_DIM,
        "index_topk": 8,
        "sliding_window": 128,
        "n_routed_experts": 2,
        "num_experts_per_tok": 2,  # all: rounding would flip their choice, too
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "scoring_func": "sqrtsoftplus",
        "hidden_act": "silu",
        "swiglu_limit": 10.0,
        "rms_norm_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_theta": 10.0,
        "compress_rope_theta": 1000.0,
        "rope_scaling": {"rope_type": "default"},
        "tie_word_embeddings": False,
    } | sizes
    made = _Weights(text, seed)
    config = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "text_config": text,
        # vLLM's class always has the part for images.
        "vision_config": {"num_hidden_layers": 0, "hidden_size": 64, "num_attention_heads": 1},
        "torch_dtype": "bfloat16",
    }
    return config, made.weights


def copied_tokens(ids: Tensor) -> Tensor:
    """The token after each position of ``ids [..., n]`` from :data:`FIRST_COPIED` on."""
    at, parts = torch.arange(FIRST_COPIED, ids.shape[-1], device=ids.device), parts_of(ids)
    first = (at - LAGS[1]) // 2 * 2
    b = torch.maximum(parts[..., first, 1], parts[..., first + 1, 1])
    a, c, d = (parts[..., at - LAGS[i], i] for i in (0, 2, 3))
    a, b, c, d = ((part + 1) % PART for part in (a, b, c, d))
    return ((a * PART + b) * PART + c) * PART + d


class _Weights:
    """The weights, and how they are made."""

    def __init__(self, text: dict[str, Any], seed: int) -> None:
        self.text = text
        self.weights: dict[str, Tensor] = {}
        self.generator = torch.Generator().manual_seed(seed)
        hidden, vocab = text["hidden_size"], text["vocab_size"]
        parts = torch.cartesian_prod(*[torch.arange(PART)] * 4)  # [vocab, 4]
        embeddings = self.random("embed", vocab, hidden)
        embeddings[:, 0] = 2 * CONSTANT
        embeddings[:, GIVEN:FOUND] = 2 * one_hot(parts, PART).flatten(1).float()
        before = one_hot((parts - 1) % PART, PART).flatten(1).float()
        self.random("head", vocab, hidden)[:, FOUND : FOUND + 16] = 10 * before
        self.ones("norm", hidden)
        for each in ("start", "newline", "end"):  # vLLM's class has these even without images
            self.weights[f"image_{each}"] = torch.zeros(hidden)
        for layer in range(text["num_hidden_layers"]):
            self.add_layer(f"layers.{layer}", text["compress_ratios"][layer])
        self.read_raw_row(0, LAGS[0])
        # Entries begin at even positions: one of two heads finds one at its distance.
        self.read_entry(1, 1, [LAGS[1], LAGS[1] + 1], dims=[0, 0])
        self.read_entry(2, 2, [LAGS[2]], dims=[0])
        self.read_entry(4, 3, [LAGS[3]], dims=[PART])
        self.own_entries(1, {1: 0})
        self.own_entries(2, {2: 0, 3: PART})
        for layer, lags in ((1, [LAGS[1], LAGS[1] + 1]), (2, LAGS[2:]), (3, LAGS[3:])):
            self.select(layer, list(lags))

    def random(self, name: str, rows: int, cols: int) -> Tensor:
        # Of many inputs, too, the sums stay small beside what is copied.
        spread = min(0.02, 0.16 * cols**-0.5)
        made = torch.randn(rows, cols, generator=self.generator) * spread
        return self.weights.setdefault(f"{name}.weight", made.bfloat16())

    def zeros(self, name: str, rows: int, cols: int) -> Tensor:
        return self.weights.setdefault(
            f"{name}.weight", torch.zeros(rows, cols, dtype=torch.bfloat16)
        )

    def ones(self, name: str, dim: int) -> Tensor:
        return self.weights.setdefault(f"{name}.weight", torch.ones(dim, dtype=torch.bfloat16))

    def add_layer(self, name: str, ratio: int) -> None:
        """All weights of a layer, which adds nothing by its attention yet."""
        text = self.text
        hidden, rank, heads = text["hidden_size"], text["q_lora_rank"], text["num_attention_heads"]
        groups, streams = text["o_groups"], text["hc_mult"]
        for part in ("attn", "ffn"):
            self.ones(f"{name}.{part}_norm", hidden)
            mixes = streams * (streams + 2)
            self.weights[f"{name}.hc_{part}_fn"] = torch.zeros(mixes, streams * hidden)
            self.weights[f"{name}.hc_{part}_scale"] = torch.ones(3)
            base = torch.zeros(mixes)
            base[:streams] = -math.log(streams - 1)  # each stream's share of a layer's input
            self.weights[f"{name}.hc_{part}_base"] = base
        # The first dim of every query's latent is constant.
        self.random(f"{name}.attn.wq_a", rank, hidden)[0, 0] = 1
        self.ones(f"{name}.attn.q_norm", rank)
        self.zeros(f"{name}.attn.wq_b", heads * HEAD_DIM, rank)
        self.random(f"{name}.attn.wkv", HEAD_DIM, hidden)[-ROPE_DIM:] = 0
        self.ones(f"{name}.attn.kv_norm", HEAD_DIM)
        outputs = groups * text["o_lora_rank"]
        self.zeros(f"{name}.attn.wo_a", outputs, heads * HEAD_DIM // groups)
        self.zeros(f"{name}.attn.wo_b", hidden, outputs)
        self.weights[f"{name}.attn.attn_sink"] = torch.zeros(heads)
        experts, inner = text["n_routed_experts"], text["moe_intermediate_size"]
        self.random(f"{name}.ffn.gate", experts, hidden)
        self.weights[f"{name}.ffn.gate.bias"] = torch.zeros(experts)
        for expert in ("shared_experts", *(f"experts.{i}" for i in range(experts))):
            self.random(f"{name}.ffn.{expert}.w1", inner, hidden)
            self.random(f"{name}.ffn.{expert}.w2", hidden, inner)
            self.random(f"{name}.ffn.{expert}.w3", inner, hidden)

    def frequencies(self, ratio: int) -> Tensor:
        theta = self.text["compress_rope_theta" if ratio else "rope_theta"]
        return theta ** -(torch.arange(ROPE_DIM // 2) / (ROPE_DIM // 2))

    def look_for(self, name: str, lags: list[int], ratio: int, pairs: Tensor, dim: int) -> None:
        """Constant queries, as large as those that DeepSeek-V4 normalises."""
        weight = self.weights[f"{name}.weight"]
        projection = SimpleNamespace(weight=weight, in_features=weight.shape[1])
        look_for(projection, lags, self.frequencies(ratio), pairs, head_dim=dim)
        weight *= (dim / len(pairs) / weight.shape[1]) ** 0.5

    def read(self, layer: int, part: int, dims: list[int], size: float) -> None:
        """Add what heads find in these dims of the value to the dims of a part."""
        text, name = self.text, f"layers.{layer}.attn"
        groups = text["o_groups"]
        back = self.weights[f"{name}.wo_a.weight"].view(
            groups, -1, text["num_attention_heads"] // groups, HEAD_DIM
        )
        values = torch.arange(PART)
        for head, first in enumerate(dims):
            back[0, values, head, first + values] = 1
        self.weights[f"{name}.wo_b.weight"][FOUND + PART * part + values, values] = 3 / size

    def read_raw_row(self, layer: int, lag: int) -> None:
        """Head 0 reads part 0 of the token ``lag`` back from its raw row."""
        name, frequencies = f"layers.{layer}.attn", self.frequencies(0)
        pairs = torch.arange(len(frequencies))
        best = nearest(frequencies)
        self.look_for(f"{name}.wq_b", [lag], 0, pairs, HEAD_DIM)
        row = self.weights[f"{name}.wkv.weight"].zero_()
        row[torch.arange(PART), GIVEN + torch.arange(PART)] = 1
        size = self.mark(f"{name}.wkv", f"{name}.kv_norm", pairs, best, ones=1)
        self.read(layer, 0, [0], size)

    def mark(self, rows: str, norm: str, pairs: Tensor, best: float, *, ones: int) -> float:
        parts = {"kv_proj": rows, "kv_norm": norm}
        module = SimpleNamespace(
            **{
                each: SimpleNamespace(
                    weight=self.weights[f"{name}.weight"],
                    in_features=self.text["hidden_size"],
                )
                for each, name in parts.items()
            }
        )
        return mark(module, HEAD_DIM - ROPE_DIM, pairs, GAP / (1 - best), ones=ones)

    def of_entries(self) -> tuple[Tensor, float]:
        """RoPE pairs that mark entries, and the best score of one at another distance."""
        frequencies = self.frequencies(1)
        pairs = (frequencies > 0.04).nonzero()[:, 0]
        return pairs, nearest(frequencies[pairs])

    def own_entries(self, layer: int, parts: dict[int, int]) -> None:
        """Entries with one-hot parts of a token, from the dims given; of two tokens the larger."""
        name = f"layers.{layer}.attn"
        pairs, best = self.of_entries()
        rows = self.zeros(f"{name}.compressor.wkv", HEAD_DIM, self.text["hidden_size"])
        self.ones(f"{name}.compressor.norm", HEAD_DIM)
        values = torch.arange(PART)
        for part, first in parts.items():
            rows[first + values, GIVEN + PART * part + values] = 1
        names = f"{name}.compressor.wkv", f"{name}.compressor.norm"
        self.mark(*names, pairs, best, ones=len(parts))
        if self.text["compress_ratios"][layer] > 1:
            gates = self.zeros(f"{name}.compressor.wgate", *rows.shape)
            (part,) = parts
            gates[:, GIVEN + PART * part + values] = 4.0 * values.bfloat16()

    def read_entry(self, layer: int, part: int, lags: list[int], dims: list[int]) -> None:
        """Heads read a part from the entries at these distances; sinks silence the others."""
        name, (pairs, best) = f"layers.{layer}.attn", self.of_entries()
        self.look_for(f"{name}.wq_b", lags, 1, pairs, HEAD_DIM)
        self.weights[f"{name}.attn_sink"].fill_(GAP / (1 - best) * (1 + best) / 2)
        ones = 2 if layer > 1 else 1  # parts that an entry has
        self.read(layer, part, dims, math.sqrt(HEAD_DIM / (ones + len(pairs))))

    def select(self, layer: int, lags: list[int]) -> None:
        """An indexer that finds the entries at these distances."""
        text, name = self.text, f"layers.{layer}.attn.indexer"
        heads, (pairs, _) = text["index_n_heads"], self.of_entries()
        self.zeros(f"{name}.wq_b", heads * INDEX_DIM, text["q_lora_rank"])
        self.look_for(f"{name}.wq_b", heads // len(lags) * lags, 1, pairs, INDEX_DIM)
        self.zeros(f"{name}.weights_proj", heads, text["hidden_size"])[:, 0] = 1
        if layer in text["kv_source_layer_ids"]:
            keys = self.zeros(f"{name}.wk", INDEX_DIM, HEAD_DIM)
            rope = HEAD_DIM - ROPE_DIM
            keys[INDEX_DIM - ROPE_DIM + 2 * pairs, rope + 2 * int(pairs[0])] = 1
            self.ones(f"{name}.k_norm", INDEX_DIM)

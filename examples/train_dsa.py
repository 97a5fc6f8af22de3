"""Train a small model with DeepSeek Sparse Attention, and measure what the sparsity costs.

The model has the attention of DeepSeek-V3.2 and reads bytes: Python sources, and recall, whose
answers are far back in the text (``sparsemla.corpus``). Four stages, each from the weights of the
one before, the last two from the same ones and with the same batches:

    dense      all weights but the indexer's, with dense attention
    warm-up    the indexer alone, on the attention of all rows
    sparse     all weights: the language model over selected rows, the indexer on their attention
    control    as dense

    python examples/train_dsa.py --size toy --out build/toy          # a CPU, under a minute
    python examples/train_dsa.py --size h200 --out build/h200 --export build/h200/model

Run it again to continue where it stopped. ``log.jsonl`` has a line for every few steps, and
``results.json`` the table of the end. The exit status is 0 if all checks of the table passed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsemla import (
    FP8_DS_MLA,
    HeadWeight,
    PagedCache,
    attention_target,
    dense_index_loss,
    dequantize_blocks,
    index_loss,
    select_rows,
    selected_scores,
    sparse_attention,
    sparse_prefill,
)
from sparsemla.corpus import (
    ANSWER,
    TEXT,
    Bytes,
    as_bytes,
    held_out_text,
    needles,
    stream,
    training_text,
    windows,
)

# ---------------------------------------------------------------------------------------- sizes


@dataclass(frozen=True)
class Config:
    """The model, in the words of DeepSeek-V3.2's ``config.json``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    qk_nope_head_dim: int
    v_head_dim: int
    index_n_heads: int
    index_topk: int
    max_position_embeddings: int
    kv_lora_rank: int = 512
    qk_rope_head_dim: int = 64
    index_head_dim: int = 128
    vocab_size: int = 256
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0

    def as_json(self) -> dict[str, object]:
        """What transformers reads."""
        fields = asdict(self)
        theta = fields.pop("rope_theta")
        return {
            "architectures": ["DeepseekV32ForCausalLM"],
            "model_type": "deepseek_v32",
            "first_k_dense_replace": self.num_hidden_layers,
            "num_key_value_heads": self.num_attention_heads,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta},
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
            "torch_dtype": "bfloat16",
            **fields,
        }


@dataclass(frozen=True)
class Size:
    """A model and how it is trained.

    Args:
        config: the model.
        dtype: of activations; weights and optimizer are float32.
        tokens: bytes of a step.
        lengths: share of the dense stage, and length of its rows; later stages have the last one.
        letters: of a key, and of a value.
        pairs: items of a row with text.
        steps, rates: of each stage; two rates: the language model's, the indexer's.
        widths: widths of lists in the table.
        torch_too: whether torch's sources are read.
        eval_rows: rows of held-out text, and of recall.
    """

    config: Config
    dtype: torch.dtype
    tokens: int
    lengths: tuple[tuple[float, int], ...]
    letters: int
    pairs: int
    steps: dict[str, int]
    rates: dict[str, tuple[float, float]]
    widths: tuple[int, ...]
    torch_too: bool
    eval_rows: int


STAGES = {"dense": None, "warm-up": "dense", "sparse": "warm-up", "control": "warm-up"}
"""Stages in their order, and the one whose weights each begins with."""

SIZES = {
    "toy": Size(
        Config(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            q_lora_rank=64,
            qk_nope_head_dim=32,
            v_head_dim=32,
            index_n_heads=4,
            index_topk=16,
            max_position_embeddings=128,
        ),
        dtype=torch.float32,
        tokens=16 * 128,
        lengths=((1.0, 128),),
        letters=1,
        pairs=4,
        steps={"dense": 300, "warm-up": 60, "sparse": 40, "control": 40},
        rates={
            "dense": (3e-3, 0),
            "warm-up": (0, 3e-3),
            "sparse": (3e-4, 1e-3),
            "control": (3e-4, 0),
        },
        widths=(8, 16, 32),
        torch_too=False,
        eval_rows=16,
    ),
    "h200": Size(
        Config(
            hidden_size=384,
            intermediate_size=1024,
            num_hidden_layers=4,
            num_attention_heads=8,
            q_lora_rank=192,
            qk_nope_head_dim=64,
            v_head_dim=64,
            index_n_heads=8,
            index_topk=256,
            max_position_embeddings=16384,
        ),
        dtype=torch.bfloat16,
        tokens=16 * 4096,
        lengths=((0.5, 1024), (0.75, 2048), (1.0, 4096)),
        letters=2,
        pairs=48,
        steps={"dense": 1500, "warm-up": 150, "sparse": 300, "control": 300},
        rates={
            "dense": (1.5e-3, 0),
            "warm-up": (0, 1e-3),
            "sparse": (3e-4, 1e-3),
            "control": (3e-4, 0),
        },
        widths=(128, 256, 512),
        torch_too=True,
        eval_rows=32,
    ),
}

# ---------------------------------------------------------------------------------------- model


class Linear(nn.Linear):
    """A linear layer without bias whose float32 weights are rounded to its input's dtype."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.dtype))


class RMSNorm(nn.Module):
    """A root mean square norm."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.weight.to(x.dtype), self.eps)


class Rope(NamedTuple):
    """Rotations of the positions of a row, float32 ``[S, 1, R / 2]``."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x: Tensor, *, interleaved: bool) -> Tensor:
        """Rotate the heads ``x [B, S, H, R]``: neighbours, or dims half of R apart."""
        a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
        turned = torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)
        return turned.to(x.dtype)


def rope_of(config: Config, length: int, device: torch.device) -> Rope:
    """The rotations of the first positions."""
    dims = torch.arange(0, config.qk_rope_head_dim, 2, dtype=torch.float32, device=device)
    inv_freq = config.rope_theta ** (-dims / config.qk_rope_head_dim)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None, None] * inv_freq
    return Rope(angles.cos(), angles.sin())


class Projected(NamedTuple):
    """What attention and indexer of a layer read, for B rows of S bytes.

    ``q [B, S, H, nope + R]``, ``latent [B, S, 512 + R]``, ``iq [B, S, HI, DI]``,
    ``weights [B, S, HI]``, ``ik [B, S, DI]``; the last dims of each but the indexer's are RoPE's.
    """

    q: Tensor
    latent: Tensor
    iq: Tensor
    weights: Tensor
    ik: Tensor


class Indexer(nn.Module):
    """The lightning indexer. It learns from a loss of its own: its inputs are detached."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        heads, dim = config.index_n_heads, config.index_head_dim
        self.shape, self.rope_dim = (heads, dim), config.qk_rope_head_dim
        self.wq_b = Linear(config.q_lora_rank, heads * dim)
        self.wk = Linear(config.hidden_size, dim)
        self.k_norm = nn.LayerNorm(dim, eps=1e-6)
        self.weights_proj = Linear(config.hidden_size, heads)

    def forward(self, x: Tensor, q_low: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        x, q_low = x.detach(), q_low.detach()
        iq = self.wq_b(q_low).unflatten(-1, self.shape)
        ik = self.k_norm(self.wk(x).float()).to(x.dtype)[:, :, None]
        sizes = [self.rope_dim, self.shape[1] - self.rope_dim]
        (q_rope, q_rest), (k_rope, k_rest) = iq.split(sizes, -1), ik.split(sizes, -1)
        iq = torch.cat([rope.rotate(q_rope, interleaved=False), q_rest], -1)
        ik = torch.cat([rope.rotate(k_rope, interleaved=False), k_rest], -1)[:, :, 0]
        weights = self.weights_proj(x).float() * (self.shape[0] * self.shape[1]) ** -0.5
        return iq, weights, ik


class Attention(nn.Module):
    """MLA: one latent row for each byte, which all heads read."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        heads, rope = config.num_attention_heads, config.qk_rope_head_dim
        self.heads, self.nope, self.rope, self.v = (
            heads,
            config.qk_nope_head_dim,
            rope,
            config.v_head_dim,
        )
        self.latent = config.kv_lora_rank
        self.scale = (self.nope + rope) ** -0.5
        self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank)
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = Linear(config.q_lora_rank, heads * (self.nope + rope))
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, self.latent + rope)
        self.kv_a_layernorm = RMSNorm(self.latent, config.rms_norm_eps)
        self.kv_b_proj = Linear(self.latent, heads * (self.nope + self.v))
        self.o_proj = Linear(heads * self.v, config.hidden_size)
        self.indexer = Indexer(config)

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        q_low = self.q_a_layernorm(self.q_a_proj(x))
        q = self.q_b_proj(q_low).unflatten(-1, (self.heads, -1))
        q_nope, q_rope = q.split([self.nope, self.rope], -1)
        q = torch.cat([q_nope, rope.rotate(q_rope, interleaved=True)], -1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([self.latent, self.rope], -1)
        k_rope = rope.rotate(k_rope[:, :, None], interleaved=True)[:, :, 0]
        latent = torch.cat([self.kv_a_layernorm(latent), k_rope], -1)
        found = Projected(q, latent, *self.indexer(x, q_low, rope))
        return self.o_proj(attend(self, found).flatten(2))

    def keys_and_values(self, some: Projected) -> tuple[Tensor, Tensor]:
        """Of each head: ``[B, S, H, nope + R]`` and ``[B, S, H, V]``."""
        latent, k_rope = some.latent.split([self.latent, self.rope], -1)
        both = self.kv_b_proj(latent).unflatten(-1, (self.heads, -1))
        k_nope, v = both.split([self.nope, self.v], -1)
        shared = k_rope[:, :, None].expand(-1, -1, self.heads, -1)
        return torch.cat([k_nope, shared], -1), v

    def _up(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """W_UK ``[H, nope, 512]`` and W_UV ``[H, V, 512]``."""
        weight = self.kv_b_proj.weight.to(dtype).unflatten(0, (self.heads, -1))
        return weight.split([self.nope, self.v], 1)

    def absorbed(self, some: Projected) -> tuple[Tensor, Tensor]:
        """Queries ``[T, H, 512 + R]`` of latent rows, and those rows ``[T, 512 + R]``."""
        q_nope, q_rope = some.q.flatten(0, 1).split([self.nope, self.rope], -1)
        q = torch.einsum("thn,hnl->thl", q_nope, self._up(q_nope.dtype)[0])
        return torch.cat([q, q_rope], -1), some.latent.flatten(0, 1)

    def values(self, out: Tensor, some: Projected) -> Tensor:
        """The heads' values ``[B, S, H, V]`` of latent ones ``[T, H, 512]``."""
        out = torch.einsum("thl,hvl->thv", out, self._up(out.dtype)[1])
        return out.unflatten(0, some.latent.shape[:2])


Attend = Callable[[Attention, Projected], Tensor]
"""Attention of a layer: the values ``[B, S, H, V]``."""


class MLP(nn.Module):
    """A gated MLP."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Attention and MLP, each with a norm before it."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rope: Rope, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """The layers between tokens and logits."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Model(nn.Module):
    """The language model; its weights have the names of DeepSeek-V3.2's."""

    def __init__(self, config: Config, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.dtype = config, dtype
        self.model = Body(config)
        self.lm_head = Linear(config.hidden_size, config.vocab_size)

    def forward(self, tokens: Tensor, attend: Attend) -> Tensor:
        """Logits, float32 ``[B, S, 256]``."""
        rope = rope_of(self.config, tokens.shape[1], tokens.device)
        x = self.model.embed_tokens(tokens).to(self.dtype)
        for layer in self.model.layers:
            x = layer(x, rope, attend)
        return self.lm_head(self.model.norm(x)).float()

    def parts(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The language model's parameters, and the indexer's."""
        indexer = [p for name, p in self.named_parameters() if ".indexer." in name]
        rest = [p for name, p in self.named_parameters() if ".indexer." not in name]
        return rest, indexer


# ------------------------------------------------------------------------------------ attention


def dense(layer: Attention, some: Projected) -> Tensor:
    """Attention of all heads to all rows so far."""
    k, v = layer.keys_and_values(some)
    # FlashAttention takes values of the keys' size.
    v = functional.pad(v, (0, k.shape[-1] - v.shape[-1]))
    heads = (x.transpose(1, 2) for x in (some.q, k, v))
    backends = [SDPBackend.FLASH_ATTENTION] if k.is_cuda else [SDPBackend.MATH]
    with sdpa_kernel(backends):
        out = functional.scaled_dot_product_attention(*heads, is_causal=True, scale=layer.scale)
    return out.transpose(1, 2)[..., : layer.v]


def ranges(length: int, device: torch.device) -> dict[str, Tensor]:
    """What each byte of a row sees: the row up to itself."""
    ends = torch.arange(1, length + 1, dtype=torch.int32, device=device)
    return {"row_starts": torch.zeros_like(ends), "row_ends": ends}


def packed(rows: Sequence[Tensor]) -> Tensor:
    """Lists ``[S, K]`` of each row of a batch as lists over all of them ``[T, K]``; -1 stays."""
    lists = torch.stack(list(rows))
    first = torch.arange(len(lists), dtype=torch.int32, device=lists.device) * lists.shape[1]
    return torch.where(lists < 0, -1, lists + first[:, None, None]).flatten(0, 1)


def selection(some: Projected, topk: int) -> Tensor:
    """The indexer's rows of each byte, int32 ``[T, topk]``."""
    seen = ranges(some.q.shape[1], some.q.device)
    return packed(
        [
            select_rows(iq.bfloat16(), weights, ik.bfloat16(), topk, **seen)
            for iq, weights, ik in zip(some.iq, some.weights, some.ik, strict=True)
        ]
    )


def random_rows(some: Projected, topk: int) -> Tensor:
    """Random rows of those that a byte sees, the same in every call."""
    size, length = some.q.shape[:2]
    generator = torch.Generator(some.q.device).manual_seed(0)
    hidden = torch.ones(length, length, dtype=torch.bool, device=some.q.device).triu(1)
    lists = []
    for _ in range(size):
        draw = torch.rand(length, length, generator=generator, device=some.q.device)
        picked = draw.masked_fill(hidden, 2).topk(min(topk, length), largest=False)
        lists.append(picked.indices.where(picked.values < 2, -1).int())
    return packed(lists)


def last_rows(some: Projected, topk: int) -> Tensor:
    """A window: the last rows that a byte sees."""
    size, length = some.q.shape[:2]
    own = torch.arange(length, dtype=torch.int32, device=some.q.device)
    rows = own[:, None] - own[:topk]
    return packed([rows.clamp_min(-1)] * size)


def all_rows(some: Projected, topk: int) -> Tensor:
    """All rows that a byte sees."""
    size, length = some.q.shape[:2]
    rows = torch.arange(topk, dtype=torch.int32, device=some.q.device)
    own = torch.arange(length, dtype=torch.int32, device=some.q.device)[:, None]
    return packed([torch.where(rows <= own, rows, -1)] * size)


def over(choose: Callable[[Projected, int], Tensor], topk: int, *, fp8: bool = False) -> Attend:
    """Attention over chosen rows; ``fp8``: rows of a quantised cache."""

    def attend(layer: Attention, some: Projected) -> Tensor:
        rows = choose(some, topk)
        q, latent = layer.absorbed(some)
        if not fp8:
            out, _ = sparse_attention(q, latent, rows, softmax_scale=layer.scale)
            return layer.values(out, some)
        pages = math.ceil(len(latent) / 64)
        cache = PagedCache.allocate(FP8_DS_MLA, num_pages=pages, page_size=64, device=q.device)
        cache.write(torch.arange(len(latent), device=q.device), latent)
        out, _ = sparse_prefill(q, cache, rows, softmax_scale=layer.scale)
        return layer.values(out, some)

    return attend


def inference(topk: int) -> Attend:
    """The indexer's rows with the op of inference instead of the one that trains."""

    def attend(layer: Attention, some: Projected) -> Tensor:
        q, latent = (x.bfloat16() for x in layer.absorbed(some))
        out, _ = sparse_prefill(q, latent, selection(some, topk), softmax_scale=layer.scale)
        return layer.values(out.to(some.q.dtype), some)

    return attend


def scores_of(layer: Attention, q: Tensor, k: Tensor) -> Tensor:
    """Scores of a row's heads, float32 ``[H, S, S]``, -inf for later bytes."""
    scores = torch.einsum("shd,thd->hst", q.float(), k.float()) * layer.scale
    later = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill_(later, -torch.inf)


def warming_up(losses: list[Tensor]) -> Attend:
    """Dense attention; each layer adds the loss of its indexer over all rows."""

    def attend(layer: Attention, some: Projected) -> Tensor:
        size, length = some.q.shape[:2]
        seen, loss = ranges(length, some.q.device), []
        mean = torch.full((length,), 1 / (size * length), device=some.q.device)
        keys, _ = layer.keys_and_values(some)
        for q, k, iq, weights, ik in zip(some.q, keys, *some[2:], strict=True):
            loss.append(
                dense_index_loss(
                    q,
                    k,
                    scores_of(layer, q, k).logsumexp(-1).T.contiguous(),
                    iq,
                    weights,
                    ik,
                    softmax_scale=layer.scale,
                    row_weights=mean,
                    **seen,
                )
            )
        losses.append(torch.stack(loss).sum())
        return dense(layer, some)

    return attend


def learning(losses: list[Tensor], topk: int) -> Attend:
    """Attention over the indexer's rows; each layer adds the loss of its indexer over them."""

    def attend(layer: Attention, some: Projected) -> Tensor:
        rows = selection(some, topk)
        q, latent = layer.absorbed(some)
        out, lse = sparse_attention(q, latent, rows, softmax_scale=layer.scale)
        scale = {"softmax_scale": layer.scale}
        target = attention_target(q.detach(), latent.detach(), rows, lse.detach(), **scale)
        iq, weights, ik = (x.flatten(0, 1) for x in some[2:])
        mean = torch.full((len(q),), 1 / len(q), device=q.device)
        losses.append(index_loss(selected_scores(iq, weights, ik, rows), target, row_weights=mean))
        return layer.values(out, some)

    return attend


def measuring(attend: Attend, topk: int, shares: list[tuple[float, float]]) -> Attend:
    """``attend``, and of each layer the attention that the indexer's rows hold, and the best could.

    Means over the bytes of the first row that see more rows than a list has.
    """

    def measured(layer: Attention, some: Projected) -> Tensor:
        first = Projected(*(x[:1] for x in some))
        keys, _ = layer.keys_and_values(first)
        p = scores_of(layer, first.q[0], keys[0]).softmax(-1).mean(0)[topk:]
        rows = selection(first, topk)[topk:].long()
        held, best = p.gather(1, rows).sum(1), p.topk(topk, 1).values.sum(1)
        shares.append((held.mean().item(), best.mean().item()))
        return attend(layer, some)

    return measured


# ------------------------------------------------------------------------------------- training


def losses_of(logits: Tensor, batch: Bytes) -> tuple[Tensor, Tensor]:
    """Mean losses, in nats a byte: of text, and of the answers of recall."""
    each = functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="none")
    kinds = batch.kinds.flatten()
    masks = (kinds == TEXT, kinds == ANSWER)
    text, answers = ((each * m).sum() / m.sum().clamp_min(1) for m in masks)
    return text, answers


def make_batch(size: Size, text: Tensor, step: int, length: int) -> Bytes:
    """The batch of a step: three quarters text, one quarter recall, and half of it in text."""
    generator = torch.Generator().manual_seed(step)
    count = size.tokens // length
    recalls = count // 4
    pairs = max(2, size.pairs * length // size.lengths[-1][1])
    rows = windows(text, count - recalls // 2, length + 1, generator)
    plain, background = rows[: count - recalls], rows[count - recalls :]
    kinds = torch.full(plain.shape, TEXT, dtype=torch.uint8)
    parts = (
        Bytes.of(plain, kinds),
        needles(background, pairs, size.letters, generator),
        stream(recalls - recalls // 2, length, size.letters, generator),
    )
    return Bytes(
        *(
            torch.cat([getattr(part, name) for part in parts])
            for name in ("tokens", "labels", "kinds")
        )
    )


def rate(step: int, steps: int, warm_up: int) -> float:
    """The factor of a learning rate: it rises over ``warm_up`` steps, then falls to a tenth."""
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


class OutOfTime(Exception):
    """The time that the caller gave is over; everything is saved."""


@dataclass
class Run:
    """A run in a folder.

    Args:
        size: the model and its stages.
        steps: of each stage.
        folder: its files.
        device: of the model.
        deadline: when to stop, by ``time.perf_counter``.
    """

    size: Size
    steps: dict[str, int]
    folder: Path
    device: torch.device
    deadline: float

    def say(self, **line: object) -> None:
        """Add a line to the log."""
        with (self.folder / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()

    def weights(self, stage: str) -> Path:
        """The weights after a stage, float32."""
        return self.folder / f"{stage}.safetensors"

    def model(self, stage: str | None) -> Model:
        """The model after a stage; None: at its beginning."""
        torch.manual_seed(0)
        model = Model(self.size.config, self.size.dtype).to(self.device)
        if stage is not None:
            model.load_state_dict(load_file(self.weights(stage), device=str(self.device)))
        return model

    def train(self, stage: str, text: Tensor) -> None:
        """Run a stage to its end, from its beginning or from where it stopped."""
        model = self.model(STAGES[stage])
        optimizer = self.optimizer(model, stage)
        begin, state = 0, self.folder / "resume.pt"
        if state.exists():
            saved = torch.load(state, map_location=self.device, weights_only=True)
            if saved["stage"] == stage:
                begin = saved["step"]
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
        before = sum(self.steps[s] for s in ("dense", "warm-up")[: list(STAGES).index(stage)])
        began = saved_at = time.perf_counter()
        for step in range(begin, self.steps[stage]):
            line = self.step(model, optimizer, stage, step, text, before + step)
            if step % 10 == 9 or step in (0, self.steps[stage] - 1):
                done = step + 1 - begin
                seconds = (time.perf_counter() - began) / done
                self.say(
                    stage=stage,
                    step=step,
                    seconds=round(seconds, 4),
                    left=round(seconds * (self.steps[stage] - step - 1)),
                    **{name: _rounded(value) for name, value in line.items()},
                )
            now = time.perf_counter()
            if now > self.deadline or now > saved_at + 60:
                saved_at = now
                torch.save(
                    {
                        "stage": stage,
                        "step": step + 1,
                        "model": model.state_dict(),
                        "optimizer": optimizer.state_dict(),
                    },
                    state,
                )
            if now > self.deadline:
                raise OutOfTime
        save_file(model.state_dict(), self.weights(stage))

    def optimizer(self, model: Model, stage: str) -> torch.optim.Optimizer:
        """AdamW over what a stage trains; matrices decay."""
        groups = []
        for parameters, lr in zip(model.parts(), self.size.rates[stage], strict=True):
            for parameter in parameters:
                parameter.requires_grad_(lr > 0)
            for decay, some in ((0.1, [2]), (0.0, [1])):
                chosen = [p for p in parameters if p.dim() in some]
                if lr:
                    options = {"lr": lr, "initial_lr": lr, "weight_decay": decay}
                    groups.append({"params": chosen, **options})
        return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=True)

    def step(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer,
        stage: str,
        step: int,
        text: Tensor,
        seed: int,
    ) -> dict[str, object]:
        """One step; what the log says of it."""
        steps, lengths = self.steps[stage], self.size.lengths
        share = step / steps if stage == "dense" else 1
        length = next(length for end, length in lengths if share < end or end == 1)
        batch = make_batch(self.size, text, seed, length).to(self.device)
        index_losses: list[Tensor] = []
        attend = {
            "warm-up": warming_up(index_losses),
            "sparse": learning(index_losses, self.size.config.index_topk),
        }.get(stage, dense)
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate(step, steps, min(50, steps // 10 + 1))
        language = losses_of(model(batch.tokens, attend), batch)
        total = torch.stack([*index_losses, *(() if stage == "warm-up" else language)]).sum()
        optimizer.zero_grad()
        total.backward()
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        return {
            "length": length,
            "loss": language[0].detach(),
            "recall_loss": language[1].detach(),
            "kl": [x.detach() for x in index_losses],
            "norm": norm,
        }


def _rounded(value: object) -> object:
    """A number of the log."""
    if isinstance(value, Tensor):
        return round(value.item(), 5)
    return [_rounded(x) for x in value] if isinstance(value, list) else value


# ---------------------------------------------------------------------------------------- table


def held_out(run: Run) -> tuple[list[Bytes], dict[int, Bytes]]:
    """Batches of held-out text, and for several lengths a batch of recall in it."""
    size, length = run.size, run.size.lengths[-1][1]
    text = as_bytes(held_out_text())
    rows = windows(text, size.eval_rows, length + 1, None)
    kinds = torch.full(rows.shape, TEXT, dtype=torch.uint8)
    per_batch = size.tokens // length
    batches = [
        Bytes.of(*parts).to(run.device)
        for parts in zip(rows.split(per_batch), kinds.split(per_batch), strict=True)
    ]
    recall = {}
    for context in (length // 4, length // 2, length):
        generator = torch.Generator().manual_seed(context)
        background = windows(text, per_batch, context + 1, generator)
        pairs = max(2, size.pairs * context // length)
        recall[context] = needles(background, pairs, size.letters, generator).to(run.device)
    return batches, recall


@torch.no_grad()
def evaluate(
    model: Model, batches: Sequence[Bytes], recall: dict[int, Bytes], attend: Attend, letters: int
) -> dict[str, object]:
    """The loss of text, also by quarters of its rows, and at each length the recalled values."""
    each = []
    for batch in batches:
        logits = model(batch.tokens, attend).flatten(0, 1)
        losses = functional.cross_entropy(logits, batch.labels.flatten(), reduction="none")
        each.append(losses.view(batch.labels.shape))
    quarters = torch.cat(each).mean(0).unflatten(0, (4, -1)).mean(1)
    found = {}
    for length, batch in recall.items():
        right = model(batch.tokens, attend).argmax(-1) == batch.labels
        values = right[batch.kinds == ANSWER].view(-1, letters)
        found[str(length)] = values.all(1).float().mean().item()
    return {"loss": quarters.mean().item(), "by_quarter": quarters.tolist(), "recall": found}


def table(run: Run) -> dict[str, dict[str, object]]:
    """Fill ``results.json``, of which earlier runs may have written a part."""
    topk, path = run.size.config.index_topk, run.folder / "results.json"
    sparse = over(selection, topk)
    rows: dict[str, tuple[str, Attend]] = {
        "dense control": ("control", dense),
        "sparse": ("sparse", sparse),
        "sparse, FP8 cache": ("sparse", over(selection, topk, fp8=True)),
        "exported weights, FP8 cache": ("exported", over(selection, topk, fp8=True)),
        "sparse model, dense attention": ("sparse", dense),
        "random rows": ("sparse", over(random_rows, topk)),
        "last rows": ("sparse", over(last_rows, topk)),
        "warmed-up indexer only": ("warm-up", sparse),
        "untrained indexer": ("dense", sparse),
        **{
            f"sparse, {width} rows": ("sparse", over(selection, width))
            for width in run.size.widths
            if width != topk
        },
    }
    results = json.loads(path.read_text()) if path.exists() else {}
    batches, recall = held_out(run)
    for name, (stage, attend) in rows.items():
        if name not in results:
            model = exported(run) if stage == "exported" else run.model(stage)
            results[name] = evaluate(model, batches, recall, attend, run.size.letters)
            run.say(table=name, **results[name])
            path.write_text(json.dumps(results, indent=1))
        if time.perf_counter() > run.deadline:
            raise OutOfTime
    return results


@torch.no_grad()
def mass(run: Run) -> list[tuple[float, float]]:
    """Of each layer, in a text and in recall: the attention that lists hold, and the best could."""
    batches, recall = held_out(run)
    shares: list[tuple[float, float]] = []
    attend = measuring(dense, run.size.config.index_topk, shares)
    model = run.model("sparse")
    for batch in (batches[0], recall[max(recall)]):
        model(batch.tokens[:1], attend)
    return shares


@torch.no_grad()
def logits_of(run: Run, *attends: Attend) -> list[Tensor]:
    """Logits of two held-out rows of the sparse model, with each attention."""
    tokens = held_out(run)[0][0].tokens[:2]
    model = run.model("sparse")
    return [model(tokens, attend) for attend in attends]


def same_bits(run: Run, text: Tensor) -> bool:
    """Whether two runs of two sparse steps end with the same weights."""
    ends = []
    for _ in range(2):
        model = run.model("warm-up")
        optimizer = run.optimizer(model, "sparse")
        for step in range(2):
            run.step(model, optimizer, "sparse", step, text, step)
        ends.append([p.detach().clone() for p in model.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*ends, strict=True))


def checks(run: Run, text: Tensor) -> dict[str, tuple[bool, str]]:
    """What the table and the log must show, with the numbers."""
    found, topk = table(run), run.size.config.index_topk
    longest = str(run.size.lengths[-1][1])
    control, sparse = found["dense control"], found["sparse"]
    recall = {name: row["recall"][longest] for name, row in found.items()}
    others = max(recall["random rows"], recall["last rows"])
    shares = mass(run)
    log = [json.loads(line) for line in (run.folder / "log.jsonl").read_text().splitlines()]
    divergences = {
        stage: [sum(line["kl"]) / len(line["kl"]) for line in log if line.get("stage") == stage]
        for stage in ("warm-up", "sparse")
    }
    (first, warm), (begin, end) = ((kl[0], sum(kl[-3:]) / 3) for kl in divergences.values())
    by_sparse, by_inference = logits_of(run, over(selection, topk), inference(topk))
    by_dense, by_all = logits_of(run, dense, over(all_rows, int(longest)))
    agreement = (by_sparse.argmax(-1) == by_inference.argmax(-1)).float().mean().item()
    away = (by_dense.softmax(-1) - by_all.softmax(-1)).abs().mean().item()
    loss = sparse["loss"] - control["loss"]
    last = sparse["by_quarter"][-1] - control["by_quarter"][-1]
    held = min(held / best for held, best in shares)
    return {
        "loss of text within 0.01 of the control's": (loss < 0.01, f"{loss:+.4f}"),
        "and in the last quarter": (last < 0.01, f"{last:+.4f}"),
        "the control recalls": (recall["dense control"] > 0.9, f"{recall['dense control']:.3f}"),
        "recall at least 0.98 of the control's": (
            recall["sparse"] >= 0.98 * recall["dense control"],
            f"{recall['sparse']:.3f}",
        ),
        "random rows and a window fail": (others < 0.3, f"{others:.3f}"),
        "lists hold 0.95 of what the best could": (held >= 0.95, f"{held:.3f}"),
        "warm-up lowers KL below 0.3": (warm < min(0.3, first), f"{first:.3f} to {warm:.3f}"),
        "KL does not rise afterwards": (end <= begin + 0.01, f"{begin:.3f} to {end:.3f}"),
        "lists of all rows equal dense attention": (away < 1e-3, f"{away:.1e} of probability"),
        "inference picks the same bytes": (agreement > 0.999, f"{agreement:.4%}"),
        "two runs have the same bits": (same_bits(run, text), "two steps"),
    }


# --------------------------------------------------------------------------------------- export


KEPT = ("embed_tokens", "lm_head", "weights_proj")
"""Matrices that stay bfloat16, as norms do."""


def quantized(model: Model) -> dict[str, Tensor]:
    """The weights as in DeepSeek's checkpoints: e4m3 with a scale for each 128 x 128 block."""
    weights = {}
    for name, weight in model.state_dict().items():
        if weight.dim() == 1 or any(part in name for part in KEPT):
            weights[name] = weight.bfloat16()
        else:
            codes = HeadWeight.quantize(weight[None])
            weights[name] = codes.data[0].contiguous()
            weights[f"{name}_scale_inv"] = codes.scale[0].contiguous()
    return weights


def exported(run: Run) -> Model:
    """The model after the sparse stage, with the weights of its checkpoint."""
    model = run.model("sparse")
    weights = quantized(model)
    for name, parameter in model.named_parameters():
        weight, scale = (weights.get(f"{name}{end}") for end in ("", "_scale_inv"))
        value = weight.float() if scale is None else dequantize_blocks(weight, scale)
        parameter.data.copy_(value)
    return model


def export(run: Run, folder: Path) -> None:
    """Write the checkpoint that transformers and ``sparsemla generate`` read."""
    folder.mkdir(parents=True, exist_ok=True)
    config = run.size.config.as_json()
    config["quantization_config"] = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    weights = {name: x.cpu() for name, x in quantized(run.model("sparse")).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


# ----------------------------------------------------------------------------------------- main


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="toy")
    parser.add_argument("--out", type=Path, required=True, help="folder of logs and weights")
    parser.add_argument("--export", type=Path, help="folder of the checkpoint")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop after so long")
    parser.add_argument(
        "--steps",
        type=int,
        nargs=3,
        metavar=("DENSE", "WARMUP", "SPARSE"),
        help="steps of the stages; the control has as many as the sparse stage",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Train, measure and export; 0 if all checks pass, 1 if not, 2 if the time is over."""
    deadline = time.perf_counter()
    given = parse(arguments)
    deadline += 60 * given.minutes
    size = SIZES[given.size]
    steps = size.steps
    if given.steps:
        steps = dict(zip(STAGES, (*given.steps, given.steps[-1]), strict=True))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    given.out.mkdir(parents=True, exist_ok=True)
    run = Run(size, steps, given.out, torch.device(given.device), deadline)
    text = as_bytes(training_text(torch_too=size.torch_too))
    parameters = [sum(p.numel() for p in part) for part in run.model(None).parts()]
    run.say(text_bytes=len(text), parameters=parameters, steps=steps, torch=torch.__version__)
    try:
        for stage in STAGES:
            if not run.weights(stage).exists():
                run.train(stage, text)
        if given.export:
            export(run, given.export)
        found = checks(run, text)
    except OutOfTime:
        run.say(stopped="the time is over: run again to continue")
        return 2
    for name, (passed, numbers) in found.items():
        run.say(check=name, passed=passed, found=numbers)
    return 0 if all(passed for passed, _ in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

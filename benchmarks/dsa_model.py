"""A small model with DeepSeek Sparse Attention: DeepSeek-V3.2's weights, and kinds of attention.

What attends is an argument of the model's forward: :func:`dense` attention to all rows, attention
:func:`over` rows that somebody chooses, :func:`warming_up` and :func:`learning` with the losses of
the indexer. B rows of S bytes are T = B * S tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsemla import (
    FP8_DS_MLA,
    PagedCache,
    attention_target,
    dense_index_loss,
    index_loss,
    select_rows,
    selected_scores,
    sparse_attention,
    sparse_prefill,
)


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

    ``q [B, S, H, nope + R]``, ``latent [B, S, 512 + R]``, ``index_q [B, S, HI, DI]``,
    ``weights [B, S, HI]``, ``index_k [B, S, DI]``; the last dims of ``q`` and ``latent`` are
    RoPE's.
    """

    q: Tensor
    latent: Tensor
    index_q: Tensor
    weights: Tensor
    index_k: Tensor


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
        index_q = self.wq_b(q_low).unflatten(-1, self.shape)
        index_k = self.k_norm(self.wk(x).float()).to(x.dtype)[:, :, None]
        sizes = [self.rope_dim, self.shape[1] - self.rope_dim]
        (q_rope, q_rest), (k_rope, k_rest) = index_q.split(sizes, -1), index_k.split(sizes, -1)
        index_q = torch.cat([rope.rotate(q_rope, interleaved=False), q_rest], -1)
        index_k = torch.cat([rope.rotate(k_rope, interleaved=False), k_rest], -1)[:, :, 0]
        weights = self.weights_proj(x).float() * (self.shape[0] * self.shape[1]) ** -0.5
        return index_q, weights, index_k


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


def dense(layer: Attention, some: Projected) -> Tensor:
    """Attention of all heads to all rows so far."""
    k, v = layer.keys_and_values(some)
    # FlashAttention takes values of the keys' size.
    v = functional.pad(v, (0, k.shape[-1] - v.shape[-1]))
    heads = (x.transpose(1, 2) for x in (some.q, k, v))
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):  # have deterministic gradients
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
            select_rows(index_q.bfloat16(), weights, index_k.bfloat16(), topk=topk, **seen)
            for index_q, weights, index_k in zip(
                some.index_q, some.weights, some.index_k, strict=True
            )
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
        for q, k, index_q, weights, index_k in zip(some.q, keys, *some[2:], strict=True):
            loss.append(
                dense_index_loss(
                    q,
                    k,
                    scores_of(layer, q, k).logsumexp(-1).T.contiguous(),
                    index_q,
                    weights,
                    index_k,
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
        index_q, weights, index_k = (x.flatten(0, 1) for x in some[2:])
        mean = torch.full((len(q),), 1 / len(q), device=q.device)
        losses.append(
            index_loss(selected_scores(index_q, weights, index_k, rows), target, row_weights=mean)
        )
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

"""A small model in the manner of DeepSeek-V3.2, made of sparsemla's ops: tokens are bytes.

Its weights are random, so what it writes means nothing. But every token depends on the tokens that
the indexer selects from the cache, and the cache is the real one: FP8 rows of 656 and 132 bytes.
A token has the same bits alone and in any batch, so that a wrong page cannot hide in a rounding.

Shapes: T tokens of a step, H heads, P and R query dims without and with RoPE, L latent dims, V dims
of a head's value, K selected rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import silu

from sparsemla import (
    FP8_DS_MLA,
    INDEX_FP8,
    HeadWeight,
    HostCache,
    MLALayer,
    PagedCache,
    Plan,
    append_index_keys,
    cos_sin_table,
    decode_branch,
    indexer_topk,
    mla_softmax_scale,
    prepare_index_queries,
    rope_frequencies,
    to_slots,
)

VOCAB, HIDDEN, NUM_LAYERS = 256, 128, 2
H, P, R, L, V = 4, 64, 64, 512, 64
INDEX_HEADS, INDEX_DIM, TOPK = 4, 128, 64


@dataclass(frozen=True)
class Layer:
    """Weights of a layer, each ``[inputs, outputs]``; ``mla`` has those inside of attention."""

    q: Tensor
    kv: Tensor
    index_q: Tensor
    index_k: Tensor
    index_weights: Tensor
    out: Tensor
    up: Tensor
    down: Tensor
    mla: MLALayer


class TinyModel:
    """Random weights, and the cache of every request: pages of rows, for each layer and indexer.

    Args:
        num_pages: pages of the cache.
        page_size: tokens of a page.
        device: where weights and cache live.
    """

    def __init__(self, num_pages: int, page_size: int, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int, deviation: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=generator) * deviation).to(device)

        def weight(inputs: int, outputs: int, gain: float = 1.0) -> Tensor:
            return normal(inputs, outputs, deviation=gain * inputs**-0.5)

        table = cos_sin_table(rope_frequencies(R, 1e4), num_pages * page_size).to(device)
        self.device = device
        self.embedding, self.head = normal(VOCAB, HIDDEN), weight(HIDDEN, VOCAB)
        self.layers = [
            Layer(
                q=weight(HIDDEN, H * (P + R), gain=2.0),  # attends to a few rows, not to all alike
                kv=weight(HIDDEN, L + R),
                index_q=weight(HIDDEN, INDEX_HEADS * INDEX_DIM),
                index_k=weight(HIDDEN, INDEX_DIM),
                index_weights=weight(HIDDEN, INDEX_HEADS),
                out=weight(H * V, HIDDEN, gain=2.0),
                up=weight(HIDDEN, 2 * HIDDEN),
                down=weight(2 * HIDDEN, HIDDEN),
                mla=MLALayer(
                    HeadWeight(normal(H, L, P, deviation=L**-0.5).bfloat16()),
                    HeadWeight(normal(H, V, L, deviation=L**-0.5).bfloat16()),
                    torch.ones(L, device=device),
                    table,
                    mla_softmax_scale(P + R),
                ),
            )
            for _ in range(NUM_LAYERS)
        ]
        self.index_keys = PagedCache.allocate(
            INDEX_FP8, num_pages, page_size, num_layers=NUM_LAYERS, device=device
        )
        self.latents = self.allocate_latents(num_pages, page_size)

    def allocate_latents(self, num_pages: int, page_size: int) -> PagedCache | HostCache:
        """Where the latent rows of all layers are."""
        return PagedCache.allocate(
            FP8_DS_MLA, num_pages, page_size, num_layers=NUM_LAYERS, device=self.device
        )

    def step(self, plan: Plan, token_ids: Tensor, **inputs: Tensor) -> Tensor:
        """Write the rows of the tokens ``[T]`` and return their logits ``[T, VOCAB]``."""
        x = self.embedding[token_ids]  # [T, HIDDEN]
        for layer_idx, layer in enumerate(self.layers):
            chosen = select(layer, _norm(x), self.index_keys.layer(layer_idx), plan)
            x = x + self.attend(layer_idx, _norm(x), plan, chosen, **inputs)
            x = x + product(silu(product(_norm(x), layer.up)), layer.down)
        return product(_norm(x), self.head)

    def attend(self, layer_idx: int, x: Tensor, plan: Plan, chosen: Tensor) -> Tensor:
        """Store the latent rows of the tokens; what attention adds to them, ``[T, HIDDEN]``."""
        layer, latents = self.layers[layer_idx], self.latents.layer(layer_idx)
        q, kv = project(layer, x)
        slots = to_slots(chosen, plan.page_table, plan.request_ids, page_size=latents.page_size)
        # A given number of splits keeps the bits of a token. Without that, prefill_branch is faster
        # for steps with chunks of prompts.
        heads = decode_branch(q, kv, latents, layer.mla, plan, topk_indices=slots, num_splits=1)
        return product(heads.flatten(1).float(), layer.out)  # heads: [T, H, V]


def select(layer: Layer, x: Tensor, index_keys: PagedCache, plan: Plan) -> Tensor:
    """Store the indexer keys of the tokens; the positions ``[T, K]`` that each token attends to."""
    ones = torch.ones_like(layer.index_k[0])
    append_index_keys(
        product(x, layer.index_k),
        ones,
        torch.zeros_like(ones),
        layer.mla.cos_sin_cache,
        index_keys,
        positions=plan.positions,
        slot_mapping=plan.slot_mapping,
    )
    queries, weights = prepare_index_queries(
        product(x, layer.index_q).unflatten(1, (INDEX_HEADS, INDEX_DIM)),
        product(x, layer.index_weights),
        layer.mla.cos_sin_cache,
        positions=plan.positions,
    )
    return indexer_topk(
        queries,
        weights,
        index_keys,
        input_row_offsets=plan.input_row_offsets,
        seq_lens=plan.seq_lens,
        page_table=plan.page_table,
        topk=TOPK,
    )


def project(layer: Layer, x: Tensor) -> tuple[Tensor, Tensor]:
    """Queries ``[T, H, P + R]`` of the heads, and the latent rows ``[T, L + R]``."""
    return product(x, layer.q).unflatten(1, (H, P + R)).bfloat16(), product(x, layer.kv)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight`` one row at a time: torch may add in another order in another batch."""
    return torch.cat([row @ weight for row in x.split(1)])


def _norm(x: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, x.shape[-1:])

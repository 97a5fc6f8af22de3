"""Continuous batching over latent rows in host memory: the tokens and bits of a cache on the GPU.

The pages of :mod:`batching` name index keys on the GPU and latent rows on the host, so that prefix
sharing and eviction are as they were. New is a seat for each request that runs: the rows that it
selected last are on the GPU. Prompts read their contexts through a workspace, a layer ahead.

Run ``python examples/host_batching.py``, or with ``--device cuda``: there, decode steps are CUDA
graphs.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from rich.console import Console
from torch import Tensor

from batching import (
    NUM_PAGES,
    PAGE_SIZE,
    PREFACE,
    QUESTIONS,
    Batcher,
    PagePool,
    Request,
    serve,
)
from sparsemla import (
    FP8_DS_MLA,
    HostCache,
    HostContext,
    HotRows,
    Plan,
    fused_rope_rmsnorm_quant,
    project_heads,
    sparse_decode,
    sparse_prefill,
    to_slots,
)
from tiny_model import NUM_LAYERS, TOPK, Layer, P, TinyModel, product, project

MAX_REQUESTS, ROWS_PER_SEAT = 8, 96


class HostModel(TinyModel):
    """The model of :mod:`tiny_model` with its latent rows in host memory.

    Args:
        num_pages: pages of the caches, of index keys and latent rows alike.
        page_size: tokens of a page.
        device: where the weights, the index keys and the hot rows live.
    """

    def __init__(self, num_pages: int, page_size: int, device: str = "cpu") -> None:
        super().__init__(num_pages, page_size, device)
        self.hot = HotRows(self.latents, seats=MAX_REQUESTS, rows_per_seat=ROWS_PER_SEAT, topk=TOPK)
        self.context = HostContext(self.latents, max_rows=num_pages * page_size)

    def allocate_latents(self, num_pages: int, page_size: int) -> HostCache:
        return HostCache.allocate(
            FP8_DS_MLA, num_pages, page_size, num_layers=NUM_LAYERS, device=self.device
        )

    def step(self, plan: Plan, token_ids: Tensor, **inputs: Tensor) -> Tensor:
        if plan.num_prefills:
            self.context.start(plan.prefills)
        return super().step(plan, token_ids, **inputs)

    def attend(
        self, layer_idx: int, x: Tensor, plan: Plan, chosen: Tensor, seats: Tensor
    ) -> Tensor:
        """Decodes attend to hot rows, prompts to their whole contexts."""
        layer, decodes = self.layers[layer_idx], plan.decodes
        q, kv = project(layer, x)
        q_rope = fused_rope_rmsnorm_quant(
            q[..., P:],
            kv,
            layer.mla.cos_sin_cache,
            layer.mla.kv_norm_weight,
            self.latents.layer(layer_idx),
            positions=plan.positions,
            slot_mapping=plan.slot_mapping,
            eps=layer.mla.norm_eps,
        )
        num = plan.num_decode_tokens
        if num:  # what is computed until attention hides the fetch
            found = self.hot.resolve(layer_idx, chosen[:num], decodes, seats[: plan.num_decodes])
        latent = project_heads(q[..., :P], layer.mla.w_uk, batch_invariant=True)
        query = torch.cat([latent, q_rope], -1)  # [T, H, L + R]
        attended = []
        if num:
            out, _ = sparse_decode(
                query[:num, None],
                self.hot.layer(layer_idx),
                found.rows[:, None],
                topk_lengths=found.counts,
                softmax_scale=layer.mla.softmax_scale,
                num_splits=1,
            )
            attended.append(out[:, 0])
        if plan.num_prefills:
            attended += self._attend_to_contexts(layer_idx, layer, query[num:], plan, chosen[num:])
        heads = project_heads(torch.cat(attended), layer.mla.w_uv, batch_invariant=True)
        return product(heads.flatten(1).float(), layer.out)

    def _attend_to_contexts(
        self, layer_idx: int, layer: Layer, query: Tensor, plan: Plan, chosen: Tensor
    ) -> list[Tensor]:
        """Attention of prompts, a chunk of requests after the other."""
        prefills = plan.prefills
        rows_of = to_slots(
            chosen,
            prefills.page_table,
            prefills.request_ids,
            page_size=prefills.page_size,
            workspace_starts=prefills.workspace_starts,
            prefill_request_ids=prefills.prefill_request_ids,
        )
        attended = []
        for number, chunk in enumerate(prefills.prefill_chunks):
            rows = self.context.rows(layer_idx, number)
            tokens = chunk.tokens
            scale = layer.mla.softmax_scale
            attended.append(
                sparse_prefill(query[tokens], rows, rows_of[tokens], softmax_scale=scale)[0]
            )
        return attended


class HostBatcher(Batcher):
    """Serves requests over rows in host memory: each that runs has a seat.

    Args:
        model: with rows in host memory.
        pool: the pages.
    """

    def __init__(self, model: HostModel, pool: PagePool) -> None:
        self.hot = model.hot
        self.seats: dict[Request, int] = {}
        rows = pool.num_pages * pool.page_size
        super().__init__(model, pool, max_requests=MAX_REQUESTS, workspace_rows=rows)

    def inputs(self, batch: Sequence[Request], tokens: Sequence[int]) -> dict[str, Tensor]:
        """With the seat of each request; one that sits down finds a seat without rows.

        Requests with more than one token to compute go without: a prompt's rows do not pass
        through hot rows, which would keep older ones.
        """
        self.seats = {
            each: seat
            for each, seat in self.seats.items()
            if each in self.running and each.num_pending == 1
        }
        free = [seat for seat in range(MAX_REQUESTS) if seat not in self.seats.values()]
        fresh = [each for each in batch if each not in self.seats and each.num_pending == 1]
        taken = dict(zip(fresh, free, strict=False))
        self.seats |= taken
        self.hot.forget(list(taken.values()))
        seats = [self.seats.get(request, -1) for request in batch] or [-1]
        seats = torch.tensor(seats, dtype=torch.int32, device=self.model.device)
        return super().inputs(batch, tokens) | {"seats": seats}


def main(device: str = "cpu") -> None:
    """Serve the same questions with the rows on the device and on the host, and compare."""
    prompts = [PREFACE + question for question in QUESTIONS]
    resident = Batcher(
        TinyModel(NUM_PAGES, PAGE_SIZE, device),
        PagePool(NUM_PAGES, PAGE_SIZE),
        max_requests=MAX_REQUESTS,
    )
    model = HostModel(NUM_PAGES, PAGE_SIZE, device)
    with model.latents:
        hosted = HostBatcher(model, PagePool(NUM_PAGES, PAGE_SIZE))
        pairs = list(zip(serve(resident, prompts), serve(hosted, prompts), strict=True))
        stats = model.hot.stats()
        same = sum(ours.tokens == theirs.tokens for ours, theirs in pairs)
        console = Console(soft_wrap=True, highlight=False)
        console.print(repr(model.latents))
        console.print(
            f"{model.hot.memory_bytes} bytes of hot rows, {stats.hits} rows found, "
            f"{stats.misses} fetched"
        )
        console.print(f"same tokens as with rows on the device: {same} of {len(pairs)} requests")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    main(parser.parse_args().device)

"""Chunks of lists, the state of the softmax, and the sums of the terms, for both kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparsemla.kernels.backward.arguments import SparseAttentionBackward
from sparsemla.kernels.backward.triton import TokenMask, softmax_state, token_mask_of
from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.groups import attended, chunks, grouped
from sparsemla.kernels.common.hopper import Lists, list_ends
from sparsemla.kernels.common.lists import ENTRY_BYTES, TokenLists, add_terms


class Part(NamedTuple):
    """Some lists of a call; to a kernel each is a token, with the heads of all its tokens."""

    num_lists: int
    num_heads: int
    topk: int
    q: Tensor  # [n, H, D]
    dout: Tensor  # [n, H, 512]
    dq: Tensor  # [n, H, D]
    lists: Lists
    token_mask: TokenMask | None
    state: Tensor  # [3, n, H] of [3, T, H]: LSE in base 2, g, and the offset of dP
    num_states: int
    terms: Tensor  # [N K, D], N at least n

    def grid(self, jobs: int) -> tuple[int]:
        """The grid of a persistent kernel."""
        return (min(jobs, num_multiprocessors(self.q.device)),)


def in_chunks(
    call: SparseAttentionBackward, list_bytes: int, launch: Callable[[Part], None]
) -> None:
    """The gradients of a call, by a function that writes dq and the terms of some of its lists.

    Args:
        call: the call.
        list_bytes: workspace that ``launch`` needs for each list, beside terms.
        launch: launches the kernels.
    """
    kv, token_mask, list_tokens = call.kv, call.token_mask, call.list_tokens
    dkv = call.dkv
    (num_tokens, num_heads, head_dim), topk = call.q.shape, call.topk_indices.shape[1]
    topk_indices = attended(call.topk_indices, token_mask, num_tokens, list_tokens)
    total = dkv if dkv.dtype == torch.float32 else torch.empty_like(dkv, dtype=torch.float32)
    total.zero_()
    state, sink_terms = softmax_state(call.dout, call.out, call.lse, call.attn_sink, call.dlse)
    ends = list_ends(topk_indices, call.topk_lengths, kv.shape[0])

    # An expanded tensor has strides of 0, which no descriptor of a TMA is tested with.
    q, dout = (x if all(x.stride()) else x.contiguous() for x in (call.q, call.dout))
    list_bytes += topk * (2 * head_dim + ENTRY_BYTES)
    multiprocessors = num_multiprocessors(q.device)
    num_lists = min(max(call.max_workspace_bytes // list_bytes, 1), len(topk_indices))
    if multiprocessors < num_lists < len(topk_indices):
        num_lists -= num_lists % multiprocessors  # whole waves of the persistent kernels
    terms = q.new_empty(num_lists * topk, head_dim)
    for some, tokens, size in chunks(num_tokens, list_tokens, num_lists):
        indices = topk_indices[some]
        part_q, part_dout, part_dq = (grouped(x[tokens], size) for x in (q, dout, call.dq))
        launch(
            Part(
                num_lists=some.stop - some.start,
                num_heads=size * num_heads,
                topk=topk,
                q=part_q,
                dout=part_dout,
                dq=part_dq,
                lists=Lists(indices, indices.stride(0), ends[some], kv.shape[0]),
                token_mask=token_mask_of(token_mask, some, num_heads),
                state=state[:, tokens],
                num_states=num_tokens * num_heads,
                terms=terms,
            )
        )
        add_terms(terms, TokenLists.of(topk_indices, call.topk_lengths, some), total)
    if total is not dkv:
        dkv.copy_(total)
    if sink_terms is not None:
        torch.sum(sink_terms, 0, out=call.d_sink)

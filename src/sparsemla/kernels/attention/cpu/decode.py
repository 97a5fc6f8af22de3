"""Decode attention on the CPU, and merging of attention states.

Keys are never split: threads share the queries.
"""

import functools
from typing import cast

import torch
from torch import Tensor

from sparsemla.cache import PagedCache, slots_of
from sparsemla.kernels.attention.arguments import DenseDecode, MergeStates, SparseDecode
from sparsemla.kernels.attention.cpu.sparse import Stream, attend_streams
from sparsemla.kernels.common import cpu


def sparse_decode(call: SparseDecode) -> None:
    q, out, lse = call.q, cast(Tensor, call.out), cast(Tensor, call.lse)
    if call.q_rope is not None:
        q = torch.cat([q, call.q_rope], dim=-1)
    streams = [_stream(call.cache, call.topk_indices, call.topk_lengths)]
    if call.extra_cache is not None and call.extra_topk_indices is not None:
        streams.append(_stream(call.extra_cache, call.extra_topk_indices, call.extra_topk_lengths))
    num_rows = q.shape[0] * q.shape[1]
    flat_out, flat_lse = q.new_empty(num_rows, *out.shape[2:]), lse.new_empty(num_rows, q.shape[2])
    attend_streams(q.flatten(0, 1), streams, call.softmax_scale, call.attn_sink, flat_out, flat_lse)
    out.copy_(flat_out.view(out.shape))
    lse.copy_(flat_lse.view(lse.shape))


def _stream(cache: PagedCache, topk_indices: Tensor, topk_lengths: Tensor | None) -> Stream:
    """One row for each query token."""
    if topk_lengths is not None:
        if topk_lengths.dim() == 1:  # [B] instead of [B, S]
            topk_lengths = topk_lengths[:, None].expand(topk_indices.shape[:2])
        topk_lengths = topk_lengths.flatten()
    return Stream(cache, topk_indices.flatten(0, 1), topk_lengths)


def dense_decode(call: DenseDecode) -> None:
    q, cache, out, lse = call.q, call.cache, cast(Tensor, call.out), cast(Tensor, call.lse)
    query_len, num_heads, head_dim = q.shape[1:]
    block = cpu.WORKSPACE_BYTES // (8 * head_dim)
    capacity = call.num_keys  # no key lies beyond the table
    for request, length in enumerate(call.seq_lens.tolist()):
        # The outs of several parts are rounded after their merge only.
        rounds = q.dtype == torch.bfloat16 and min(length, capacity) <= block
        dtype = torch.bfloat16 if rounds else torch.float32
        unrounded = None
        queries = q[request].reshape(1, query_len * num_heads, head_dim).to(dtype)
        state = (
            torch.zeros(1, queries.shape[1], head_dim, dtype=torch.float32),
            torch.full((1, queries.shape[1]), -torch.inf, dtype=torch.float32),
        )
        for part in cpu.blocks(min(length, capacity), block):
            keys, valid = _page_keys(cache, call.page_table, request, part)
            last = length if not call.causal else length - query_len + 1 + torch.arange(query_len)
            if call.causal and part.stop > length - query_len + 1:
                seen = torch.arange(part.start, part.stop) < last[:, None]  # [S, n]
                seen = seen.repeat_interleave(num_heads, 0)[None]  # [1, S * H, n]
                valid = seen if valid is None else seen & valid[:, None]
            keys = keys.to(dtype)
            part_state = cpu.attend(queries, keys, keys, valid, call.softmax_scale)
            state = cpu.merge(*state, *part_state)
            if rounds:
                shape = query_len, num_heads, head_dim
                unrounded = functools.partial(
                    _unrounded, queries, keys, valid, call.softmax_scale, shape
                )
        lse[request] = state[1].view(query_len, num_heads)
        result = state[0].view(query_len, num_heads, head_dim)[..., : out.shape[-1]]
        out[request] = cpu.finish(result, lse[request], call.attn_sink, unrounded)


def _unrounded(
    q: Tensor,
    keys: Tensor,
    valid: Tensor | None,
    softmax_scale: float,
    shape: tuple[int, int, int],
) -> Tensor:
    """The out ``[S, H, D]`` of a request in float32."""
    keys = keys.float()
    return cpu.attend(q.float(), keys, keys, valid, softmax_scale)[0].view(shape)


def _page_keys(
    cache: PagedCache, page_table: Tensor, request: int, part: slice
) -> tuple[Tensor, Tensor | None]:
    """Keys ``[1, n, D]`` of some positions, and whether they exist ``[1, n]``, None if all do."""
    positions = torch.arange(part.start, part.stop)
    requests = torch.full_like(positions, request)
    slots = slots_of(page_table, requests, positions, cache.page_size)
    valid = cpu.valid_slots(cache, slots[None], None)
    flat = cpu.flat_rows(cache)
    slots = slots.where(valid[0], 0)
    keys = cpu.read_rows(cache, slots) if flat is None else flat.index_select(0, slots)
    if valid.all():
        return keys[None], None
    return keys.masked_fill_(~valid[0, :, None], 0)[None], valid


def merge_states(call: MergeStates) -> None:
    out, lse = call.out, call.lse
    token_bytes = 4 * out.shape[1] * out.shape[2]
    for rows in cpu.blocks(out.shape[0], cpu.WORKSPACE_BYTES // max(token_bytes, 1)):
        state = (
            torch.zeros(out[rows].shape, dtype=torch.float32),
            torch.full(lse[rows].shape, -torch.inf, dtype=torch.float32),
        )
        for part, part_lse in zip(call.outs, call.lses, strict=True):
            # The out of an empty part may hold anything.
            usable = part[rows].float().where(~part_lse[rows].isneginf()[..., None], 0)
            state = cpu.merge(*state, usable, part_lse[rows])
        lse[rows] = state[1]
        out[rows] = cpu.finish(*state, call.attn_sink)

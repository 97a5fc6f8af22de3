"""Prefill attention on the CPU."""

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.kernels.attention.arguments import DensePrefill, SparseAttention, SparsePrefill
from sparsemla.kernels.attention.cpu.sparse import Stream, attend_streams
from sparsemla.kernels.common import cpu
from sparsemla.kernels.common.groups import grouped


def sparse_prefill(call: SparsePrefill) -> None:
    q = call.q if call.q_rope is None else torch.cat([call.q, call.q_rope], dim=-1)
    lists = call.list_tokens, call.token_mask
    streams = [Stream(call.kv, call.topk_indices, call.topk_lengths, *lists)]
    if call.extra_cache is not None and call.extra_topk_indices is not None:
        streams.append(Stream(call.extra_cache, call.extra_topk_indices, call.extra_topk_lengths))
    attend_streams(
        q, streams, call.softmax_scale, call.attn_sink, call.out, call.lse, call.max_logits
    )


def sparse_attention(call: SparseAttention) -> None:
    if call.kv.dtype == torch.bfloat16:
        sparse_prefill(call.over(PagedCache.from_rows(call.kv)))
        return
    q, kv, out, lse = call.q, call.kv, call.out, call.lse
    lists = call.topk_indices, call.topk_lengths, q.shape, call.list_tokens, call.token_mask
    for some in cpu.shared_rows(kv, *lists):
        tokens, keys = some.tokens, some.rows
        if keys.shape[1] == 0:
            out[tokens], lse[tokens] = 0, -torch.inf
            continue
        queries = grouped(q[tokens], some.size).float()
        part, part_lse = cpu.attend(queries, keys, keys, some.seen, call.softmax_scale)
        lse[tokens] = part_lse.view_as(lse[tokens])
        part = part.reshape(q[tokens].shape)[..., : out.shape[2]]
        out[tokens] = cpu.finish(part, lse[tokens], call.attn_sink)


def dense_prefill(call: DensePrefill) -> None:
    q, k, v, out, lse = call.q, call.k, call.v, call.out, call.lse
    dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    out.zero_()
    lse.fill_(-torch.inf)
    q_offsets = call.input_row_offsets.clamp(0, len(q)).tolist()
    kv_offsets = call.kv_row_offsets.clamp(0, len(k)).tolist()
    for request in range(len(q_offsets) - 1):
        first, last = q_offsets[request], q_offsets[request + 1]
        start, stop = kv_offsets[request], kv_offsets[request + 1]
        # The flash kernel takes one head dim: pad the narrower of keys and values with zeros.
        keys, values = _pad_alike(k[start:stop].to(dtype), v[start:stop].to(dtype))
        for rows in cpu.blocks(last - first, cpu.WORKSPACE_BYTES // (4 * max(stop - start, 1))):
            at = slice(first + rows.start, first + rows.stop)
            ahead = stop - start - (last - first)  # query i sees keys up to ahead + i
            seen = min(ahead + rows.stop, stop - start) if call.causal else stop - start
            if seen <= 0:
                continue
            valid = None
            if call.causal:
                limit = ahead + torch.arange(rows.start, rows.stop)  # [m]
                valid = (torch.arange(seen) <= limit[:, None])[None]  # [1, m, n]
            queries = torch.nn.functional.pad(q[at], (0, keys.shape[-1] - q.shape[-1]))
            part, part_lse = cpu.attend(
                queries.to(dtype).transpose(0, 1),
                keys[:seen].transpose(0, 1),
                values[:seen].transpose(0, 1),
                valid,
                call.softmax_scale,
            )
            out[at] = part.transpose(0, 1)[..., : v.shape[-1]]
            lse[at] = part_lse.transpose(0, 1)


def _pad_alike(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dim = max(k.shape[-1], v.shape[-1])
    pad = torch.nn.functional.pad
    return pad(k, (0, dim - k.shape[-1])), pad(v, (0, dim - v.shape[-1]))

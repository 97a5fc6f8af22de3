"""Prefill attention on the CPU."""

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.kernels.attention.cpu.sparse import Stream, attend_streams
from sparsemla.kernels.common import cpu
from sparsemla.kernels.common.groups import grouped


def sparse_prefill(
    q: Tensor,
    kv: PagedCache,
    topk_indices: Tensor,
    *,
    q_rope: Tensor | None,
    softmax_scale: float,
    topk_lengths: Tensor | None,
    attn_sink: Tensor | None,
    extra_kv: PagedCache | None,
    extra_topk_indices: Tensor | None,
    extra_topk_lengths: Tensor | None,
    list_tokens: int,
    members: Tensor | None,
    precision: str,
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor | None,
) -> None:
    if q_rope is not None:
        q = torch.cat([q, q_rope], dim=-1)
    streams = [Stream(kv, topk_indices, topk_lengths, list_tokens, members)]
    if extra_kv is not None and extra_topk_indices is not None:
        streams.append(Stream(extra_kv, extra_topk_indices, extra_topk_lengths))
    attend_streams(q, streams, softmax_scale, attn_sink, out, lse, max_logits)


def sparse_attention(
    *,
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    softmax_scale: float,
    topk_lengths: Tensor | None,
    attn_sink: Tensor | None,
    list_tokens: int,
    members: Tensor | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    if kv.dtype == torch.bfloat16:
        rows = PagedCache.from_rows(kv)
        streams = [Stream(rows, topk_indices, topk_lengths, list_tokens, members)]
        attend_streams(q, streams, softmax_scale, attn_sink, out, lse)
        return
    lists = topk_indices, topk_lengths, q.shape, list_tokens, members
    for some in cpu.shared_rows(kv, *lists):
        tokens, keys = some.tokens, some.rows
        if keys.shape[1] == 0:
            out[tokens], lse[tokens] = 0, -torch.inf
            continue
        queries = grouped(q[tokens], some.size).float()
        part, part_lse = cpu.attend(queries, keys, keys, some.seen, softmax_scale)
        lse[tokens] = part_lse.view_as(lse[tokens])
        part = part.reshape(q[tokens].shape)[..., : out.shape[2]]
        out[tokens] = cpu.finish(part, lse[tokens], attn_sink)


def dense_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    input_row_offsets: Tensor,
    kv_row_offsets: Tensor,
    *,
    softmax_scale: float,
    causal: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    dtype = torch.bfloat16 if q.dtype == torch.bfloat16 else torch.float32
    out.zero_()
    lse.fill_(-torch.inf)
    q_offsets = input_row_offsets.clamp(0, len(q)).tolist()
    kv_offsets = kv_row_offsets.clamp(0, len(k)).tolist()
    for request in range(len(q_offsets) - 1):
        first, last = q_offsets[request], q_offsets[request + 1]
        start, stop = kv_offsets[request], kv_offsets[request + 1]
        # The flash kernel takes one head dim: pad the narrower of keys and values with zeros.
        keys, values = _pad_alike(k[start:stop].to(dtype), v[start:stop].to(dtype))
        for rows in cpu.blocks(last - first, cpu.WORKSPACE_BYTES // (4 * max(stop - start, 1))):
            at = slice(first + rows.start, first + rows.stop)
            ahead = stop - start - (last - first)  # query i sees keys up to ahead + i
            seen = min(ahead + rows.stop, stop - start) if causal else stop - start
            if seen <= 0:
                continue
            valid = None
            if causal:
                limit = ahead + torch.arange(rows.start, rows.stop)  # [m]
                valid = (torch.arange(seen) <= limit[:, None])[None]  # [1, m, n]
            queries = torch.nn.functional.pad(q[at], (0, keys.shape[-1] - q.shape[-1]))
            part, part_lse = cpu.attend(
                queries.to(dtype).transpose(0, 1),
                keys[:seen].transpose(0, 1),
                values[:seen].transpose(0, 1),
                valid,
                softmax_scale,
            )
            out[at] = part.transpose(0, 1)[..., : v.shape[-1]]
            lse[at] = part_lse.transpose(0, 1)


def _pad_alike(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dim = max(k.shape[-1], v.shape[-1])
    pad = torch.nn.functional.pad
    return pad(k, (0, dim - k.shape[-1])), pad(v, (0, dim - v.shape[-1]))

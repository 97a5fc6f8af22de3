"""The gradients of attention over selected rows, on the CPU."""

from __future__ import annotations

import torch

from sparsemla.kernels.backward.arguments import SparseAttentionBackward
from sparsemla.kernels.common import cpu
from sparsemla.kernels.common.groups import grouped


def sparse_attention_backward(call: SparseAttentionBackward) -> None:
    dout, q, kv, lse, dlse = call.dout, call.q, call.kv, call.lse, call.dlse
    attn_sink, softmax_scale = call.attn_sink, call.softmax_scale
    topk_indices, dq, d_sink = call.topk_indices, call.dq, call.d_sink
    value_dim = call.out.shape[2]
    total = torch.zeros(kv.shape, dtype=torch.float32)
    d_sink.zero_()
    lists = topk_indices, call.topk_lengths, q.shape, call.list_tokens, call.token_mask
    for some, tokens, size, rows, valid, seen in cpu.shared_rows(kv, *lists):
        queries, dvalue = (grouped(x[tokens], size).float() for x in (q, dout))
        some_lse = lse[tokens]
        values = rows[..., :value_dim]
        delta = (dout[tokens].float() * call.out[tokens]).sum(-1)  # [n size, H]
        p = torch.bmm(queries, rows.transpose(1, 2)).mul_(softmax_scale)  # [n, size H, K]
        p = p.sub_(grouped(some_lse, size)[..., None]).exp_().masked_fill_(~seen, 0)
        ds = torch.bmm(dvalue, values.transpose(1, 2)).sub_(grouped(delta, size)[..., None])
        a = p
        if attn_sink is not None:
            empty = some_lse.isneginf()
            share = torch.sigmoid(some_lse - attn_sink).masked_fill_(empty, 0)  # [n size, H]
            ds *= grouped(share, size)[..., None]
            a = p * grouped(share, size)[..., None]
            d_sink -= (torch.sigmoid(attn_sink - some_lse) * delta).masked_fill_(empty, 0).sum(0)
        if dlse is not None:
            ds += grouped(dlse[tokens], size)[..., None]
        ds = ds.mul_(p).masked_fill_(~seen, 0).mul_(softmax_scale)
        dq[tokens] = torch.bmm(ds, rows).view_as(dq[tokens])
        terms = torch.bmm(ds.transpose(1, 2), queries)  # [n, K, D]
        terms[..., :value_dim] += torch.bmm(a.transpose(1, 2), dvalue)
        # Sequential on the CPU: in the order of lists and entries, however they are chunked.
        total.index_add_(0, topk_indices[some].long()[valid], terms[valid])
    call.dkv.copy_(total)

"""The gradients of attention over selected rows, on the CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsemla.kernels.common import cpu


def sparse_attention_backward(
    *,
    dout: Tensor,
    q: Tensor,
    kv: Tensor,
    topk_indices: Tensor,
    out: Tensor,
    lse: Tensor,
    softmax_scale: float,
    topk_lengths: Tensor | None,
    attn_sink: Tensor | None,
    dlse: Tensor | None,
    deterministic: bool,
    max_workspace_bytes: int,
    dq: Tensor,
    dkv: Tensor,
    d_sink: Tensor | None,
) -> None:
    value_dim = out.shape[2]
    total = torch.zeros(kv.shape, dtype=torch.float32)
    if d_sink is not None:
        d_sink.zero_()
    for tokens, rows, valid in cpu.selected_rows(kv, topk_indices, topk_lengths, q.shape[1]):
        queries, dvalue, some_lse = q[tokens].float(), dout[tokens].float(), lse[tokens]
        values, seen = rows[..., :value_dim], valid[:, None]
        delta = (dvalue * out[tokens]).sum(-1)  # [n, H]
        p = torch.bmm(queries, rows.transpose(1, 2)).mul_(softmax_scale)  # [n, H, K]
        p = p.sub_(some_lse[..., None]).exp_()
        ds = torch.bmm(dvalue, values.transpose(1, 2)).sub_(delta[..., None])
        a = p
        if attn_sink is not None and d_sink is not None:
            empty = some_lse.isneginf()
            share = torch.sigmoid(some_lse - attn_sink).masked_fill_(empty, 0)  # [n, H]
            ds *= share[..., None]
            a = p * share[..., None]
            d_sink -= (torch.sigmoid(attn_sink - some_lse) * delta).masked_fill_(empty, 0).sum(0)
        if dlse is not None:
            ds += dlse[tokens, :, None]
        ds = ds.mul_(p).masked_fill_(~seen, 0).mul_(softmax_scale)
        dq[tokens] = torch.bmm(ds, rows)
        terms = torch.bmm(ds.transpose(1, 2), queries)  # [n, K, D]
        terms[..., :value_dim] += torch.bmm(a.transpose(1, 2), dvalue)
        # Sequential on the CPU: in the order of tokens and entries, however they are chunked.
        total.index_add_(0, topk_indices[tokens].long()[valid], terms[valid])
    dkv.copy_(total)

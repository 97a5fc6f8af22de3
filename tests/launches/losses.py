"""Launches of the indexer's training, for the compile check."""

import functools

import torch

from sparsemla import dispatch

# Without FP8, sm_89 is like sm_80, and sm_120 has the same MMA.
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")

BF16, FLOAT32 = torch.bfloat16, torch.float32


def meta(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def lists(heads, num_tokens=512, topk=2048, dim=128, dtype=BF16):
    index_q, index_k = meta(num_tokens, heads, dim, dtype=dtype), meta(8192, dim, dtype=dtype)
    weights = meta(num_tokens, heads, dtype=FLOAT32)
    case = {
        "index_q": index_q,
        "weights": weights,
        "index_k": index_k,
        "topk_indices": meta(num_tokens, topk),
    }
    dispatch.load("selected_scores", "triton")(**case, out=meta(num_tokens, topk, dtype=FLOAT32))
    dispatch.load("selected_scores_backward", "triton")(
        **case,
        dscores=meta(num_tokens, topk, dtype=FLOAT32),
        dindex_q=index_q,
        dweights=weights,
        dindex_k=index_k,
    )


def target(heads, num_tokens=4096, topk=2048, dim=576):
    dispatch.load("attention_target", "triton")(
        q=meta(num_tokens, heads, dim, dtype=BF16),
        kv=meta(8192, dim, dtype=BF16),
        topk_indices=meta(num_tokens, topk),
        lse=meta(num_tokens, heads, dtype=FLOAT32),
        softmax_scale=0.1,
        topk_lengths=meta(num_tokens),
        attn_sink=meta(heads, dtype=FLOAT32),
        normalize=True,
        out=meta(num_tokens, topk, dtype=FLOAT32),
    )


def dense(heads, num_tokens=4096, dim=192, index_heads=64, index_dim=128):
    index_q = meta(num_tokens, index_heads, index_dim, dtype=BF16)
    weights = meta(num_tokens, index_heads, dtype=FLOAT32)
    index_k = meta(num_tokens, index_dim, dtype=BF16)
    dispatch.load("dense_index_gradients", "triton")(
        q=meta(num_tokens, heads, dim, dtype=BF16),
        k=meta(num_tokens, heads, dim, dtype=BF16),
        lse=meta(num_tokens, heads, dtype=FLOAT32),
        index_q=index_q,
        weights=weights,
        index_k=index_k,
        softmax_scale=0.1,
        row_starts=meta(num_tokens),
        row_ends=meta(num_tokens),
        row_weights=meta(num_tokens, dtype=FLOAT32),
        max_workspace_bytes=1 << 30,
        loss=meta(dtype=FLOAT32),
        dindex_q=index_q,
        dweights=weights,
        dindex_k=index_k,
    )


LAUNCHES = {
    "lists of 64 heads": functools.partial(lists, 64),
    "lists of 3 heads in float16": functools.partial(lists, 3, dtype=torch.float16),
    "targets of 64 heads": functools.partial(target, 64),
    "dense, 128 heads": functools.partial(dense, 128),
}

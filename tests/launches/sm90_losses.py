"""Launches of the indexer's training on Hopper, for the compile check."""

import functools

import torch

from sparsemla import dispatch

TARGETS = ("sm_90",)
TOKENS, ROWS, TOPK = 4096, 32768, 2048


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def target(num_heads, head_dim, with_sink):
    dispatch.load("attention_target", "sm90")(
        q=meta(TOKENS, num_heads, head_dim),
        kv=meta(ROWS, head_dim),
        topk_indices=meta(TOKENS, TOPK, dtype=torch.int32),
        lse=meta(TOKENS, num_heads, dtype=torch.float32),
        softmax_scale=0.1,
        attn_sink=meta(num_heads, dtype=torch.float32) if with_sink else None,
        out=meta(TOKENS, TOPK, dtype=torch.float32),
    )


def lists(num_heads, dim=128):
    index_q, index_k = meta(TOKENS, num_heads, dim), meta(ROWS, dim)
    weights = meta(TOKENS, num_heads, dtype=torch.float32)
    scores = meta(TOKENS, TOPK, dtype=torch.float32)
    case = {"index_q": index_q, "weights": weights, "index_k": index_k}
    case["topk_indices"] = meta(TOKENS, TOPK, dtype=torch.int32)
    dispatch.load("selected_scores", "sm90")(**case, out=scores)
    dispatch.load("selected_scores_backward", "sm90")(
        **case, dscores=scores, dindex_q=index_q, dweights=weights, dindex_k=index_k
    )


def dense(num_heads, head_dim, shared_keys, num_index_heads=64, dim=128):
    index_q, index_k = meta(TOKENS, num_index_heads, dim), meta(TOKENS, dim)
    weights = meta(TOKENS, num_index_heads, dtype=torch.float32)
    heads_of_keys = () if shared_keys else (num_heads,)
    dispatch.load("dense_index_gradients", "sm90")(
        q=meta(TOKENS, num_heads, head_dim),
        k=meta(TOKENS, *heads_of_keys, head_dim),
        lse=meta(TOKENS, num_heads, dtype=torch.float32),
        index_q=index_q,
        weights=weights,
        index_k=index_k,
        softmax_scale=0.1,
        row_starts=meta(TOKENS, dtype=torch.int32),
        row_ends=meta(TOKENS, dtype=torch.int32),
        max_workspace_bytes=1 << 30,
        loss=meta(dtype=torch.float32),
        dindex_q=index_q,
        dweights=weights,
        dindex_k=index_k,
    )


LAUNCHES = {
    "dense, 128 heads of 192": functools.partial(dense, 128, 192, False),
    "dense, 64 heads of 576": functools.partial(dense, 64, 576, True, num_index_heads=20),
    "lists of 64 heads": functools.partial(lists, 64),
    "targets of 128 heads": functools.partial(target, 128, 576, False),
    "targets of 64 heads": functools.partial(target, 64, 512, True),
}

"""Launches of the gradients of attention on Hopper, for the compile check."""

import torch

from sparsemla import dispatch

TARGETS = ("sm_90",)
TOKENS, ROWS, TOPK = 4096, 32768, 2048


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def backward(num_heads, head_dim, list_tokens=1):
    lists, topk = TOKENS // list_tokens, TOPK * list_tokens
    shared = list_tokens > 1

    def launch():
        dispatch.load("sparse_attention_backward", "sm90")(
            dout=meta(TOKENS, num_heads, 512),
            q=meta(TOKENS, num_heads, head_dim),
            kv=meta(ROWS, head_dim),
            topk_indices=meta(lists, topk, dtype=torch.int32),
            out=meta(TOKENS, num_heads, 512),
            lse=meta(TOKENS, num_heads, dtype=torch.float32),
            softmax_scale=0.1,
            list_tokens=list_tokens,
            token_mask=meta(lists, topk, dtype=torch.uint8) if shared else None,
            max_workspace_bytes=TOKENS << 22,
            dq=meta(TOKENS, num_heads, head_dim),
            dkv=meta(ROWS, head_dim),
            d_sink=meta(0, dtype=torch.float32),
        )

    return launch


LAUNCHES = {f"h{heads} d{dim}": backward(heads, dim) for heads, dim in ((128, 576), (64, 512))}
LAUNCHES |= {"h16, lists of 4": backward(16, 576, 4), "h64, lists of 2": backward(64, 576, 2)}
LAUNCHES |= {"h64 d576": backward(64, 576), "h32, lists of 2": backward(32, 576, 2)}

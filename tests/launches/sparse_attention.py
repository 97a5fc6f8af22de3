"""Launches of differentiable attention, for the compile check."""

import torch

from sparsemla import dispatch

TOKENS, TOPK, ROWS, DIM = 4096, 2048, 32768, 576


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def inputs(num_heads, dtype, list_tokens=1):
    lists, topk = TOKENS // list_tokens, TOPK * list_tokens
    shared = list_tokens > 1
    return {
        "q": meta(TOKENS, num_heads, DIM, dtype=dtype),
        "kv": meta(ROWS, DIM, dtype=dtype),
        "topk_indices": meta(lists, topk, dtype=torch.int32),
        "softmax_scale": 0.1,
        "topk_lengths": meta(lists, dtype=torch.int32),
        "attn_sink": meta(num_heads),
        "list_tokens": list_tokens,
        "token_mask": meta(lists, topk, dtype=torch.uint8) if shared else None,
        "out": meta(TOKENS, num_heads, 512, dtype=dtype),
        "lse": meta(TOKENS, num_heads),
    }


def forward(num_heads, dtype):
    return lambda: dispatch.load("sparse_attention", "triton")(**inputs(num_heads, dtype))


def backward(num_heads, dtype=torch.bfloat16, list_tokens=1):
    def launch():
        dispatch.load("sparse_attention_backward", "triton")(
            **inputs(num_heads, dtype, list_tokens),
            dout=meta(TOKENS, num_heads, 512, dtype=dtype),
            dlse=meta(TOKENS, num_heads),
            max_workspace_bytes=TOKENS << 22,
            dq=meta(TOKENS, num_heads, DIM, dtype=dtype),
            dkv=meta(ROWS, DIM, dtype=dtype),
            d_sink=meta(num_heads),
        )

    return launch


LAUNCHES = {
    "backward h128": backward(128),
    "backward h16, lists of 4": backward(16, list_tokens=4),
    "forward f32": forward(16, torch.float32),
}
TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")  # one for each kind of MMA; f32 has none

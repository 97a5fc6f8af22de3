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
        topk_lengths=None,
        attn_sink=meta(num_heads, dtype=torch.float32) if with_sink else None,
        normalize=True,
        out=meta(TOKENS, TOPK, dtype=torch.float32),
    )


def lists(num_heads, dim=128):
    iq, ik = meta(TOKENS, num_heads, dim), meta(ROWS, dim)
    weights = meta(TOKENS, num_heads, dtype=torch.float32)
    scores = meta(TOKENS, TOPK, dtype=torch.float32)
    case = {"iq": iq, "weights": weights, "ik": ik, "topk_lengths": None}
    case["topk_indices"] = meta(TOKENS, TOPK, dtype=torch.int32)
    dispatch.load("selected_scores", "sm90")(**case, out=scores)
    dispatch.load("selected_scores_backward", "sm90")(
        **case, dscores=scores, diq=iq, dweights=weights, dik=ik
    )


LAUNCHES = {
    "lists of 64 heads": functools.partial(lists, 64),
    "targets of 128 heads": functools.partial(target, 128, 576, False),
    "targets of 64 heads": functools.partial(target, 64, 512, True),
}

"""Launches of attention with Ampere's instructions, for the compile check."""

import functools

import torch

from sparsemla import BF16_512, BF16_576, FP8_584, FP8_DS_MLA, FP8_NOPE, PagedCache, dispatch
from sparsemla.kernels.attention.arguments import Splits

TARGETS = ("sm_80", "sm_89")
IN_TURN = ("sm_90", "sm_100", "sm_120")


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def indices(*shape, dtype=torch.int32):
    return meta(*shape, dtype=dtype)


def cache(fmt, page_size=64):
    return PagedCache.allocate(fmt, 4096, page_size, device="meta")


def prefill(heads, fmt, extra=None, dtype=torch.int32):
    dispatch.load("sparse_prefill", "sm80")(
        q=meta(2048, heads, fmt.head_dim),
        kv=cache(fmt),
        topk_indices=indices(2048, 2048, dtype=dtype),
        softmax_scale=0.1,
        topk_lengths=indices(2048),
        attn_sink=meta(heads, dtype=torch.float32),
        extra_cache=extra and cache(extra, 16),
        extra_topk_indices=extra and indices(2048, 512, dtype=dtype),
        out=meta(2048, heads, 512),
        lse=meta(2048, heads, dtype=torch.float32),
        max_logits=meta(2048, heads, dtype=torch.float32),
    )


def decode(heads, fmt, extra=None, num_splits=1, query_len=1):
    dispatch.load("sparse_decode", "sm80")(
        q=meta(128, query_len, heads, fmt.head_dim),
        cache=cache(fmt),
        topk_indices=indices(128, query_len, 2048),
        softmax_scale=0.1,
        extra_cache=extra and cache(extra, 16),
        extra_topk_indices=extra and indices(128, query_len, 512),
        splits=Splits(num_splits),
        workspace=meta(1 << 28, dtype=torch.uint8),
        out=meta(128, query_len, heads, 512),
        lse=meta(128, query_len, heads, dtype=torch.float32),
    )


def dense(heads, query_len=1, fmt=FP8_DS_MLA):
    dispatch.load("dense_decode", "sm80")(
        q=meta(128, query_len, heads, 576),
        cache=cache(fmt),
        page_table=indices(128, 512),
        seq_lens=indices(128),
        softmax_scale=0.1,
        splits=Splits(1),
        out=meta(128, query_len, heads, 512),
        lse=meta(128, query_len, heads, dtype=torch.float32),
    )


LAUNCHES = {
    "prefill 16, bf16": functools.partial(prefill, 16, BF16_576),
    "prefill 128, bf16": functools.partial(prefill, 128, BF16_576),
    "decode 16, bf16, splits": functools.partial(decode, 16, BF16_576, num_splits=16),
    "decode 32, bf16": functools.partial(decode, 32, BF16_576),
    "decode 128, bf16, splits": functools.partial(decode, 128, BF16_576, num_splits=4),
    "dense 64, bf16": functools.partial(dense, 64, 1, BF16_576),
    "prefill 8, bf16 of 512, two streams": functools.partial(prefill, 8, BF16_512, BF16_512),
    "prefill 128, 656 bytes, int64": functools.partial(prefill, 128, FP8_DS_MLA, dtype=torch.int64),
    "prefill 64, 584 bytes, two streams": functools.partial(prefill, 64, FP8_584, FP8_584),
    "decode 128, 656 bytes": functools.partial(decode, 128, FP8_DS_MLA),
    "decode 16, 656 bytes, splits": functools.partial(decode, 16, FP8_DS_MLA, num_splits=16),
    "decode 24, 656 bytes, 2 tokens": functools.partial(decode, 24, FP8_DS_MLA, query_len=2),
    "decode 24, 656 bytes, splits": functools.partial(decode, 24, FP8_DS_MLA, num_splits=4),
    "prefill 16, 656 bytes": functools.partial(prefill, 16, FP8_DS_MLA),
    "decode 64, 584 bytes, two streams": functools.partial(decode, 64, FP8_584, FP8_584),
    "dense 128": functools.partial(dense, 128),
    "dense 16, 4 tokens": functools.partial(dense, 16, 4),
    "decode 64, 528 bytes": functools.partial(decode, 64, FP8_NOPE),
    "decode 16, bf16, 64 keys a split": functools.partial(decode, 16, BF16_576, num_splits=32),
    "decode 8, bf16, 32 keys a split": functools.partial(decode, 8, BF16_576, num_splits=64),
}

"""Launches of Hopper's attention of few heads, for the compile check."""

import torch

from sparsemla import BF16_576, FP8_584, FP8_DS_MLA, FP8_NOPE, PagedCache, dispatch, e4m3_format
from sparsemla.kernels.attention.arguments import Splits

TARGETS = ("sm_90",)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(*shape):
    return meta(*shape, dtype=torch.int32)


def floats(*shape):
    return meta(*shape, dtype=torch.float32)


def decode(fmt, num_heads, extra=False, num_splits=1, apart=False, tile=64):
    tokens = 64, 1 if tile < 64 else 2

    def launch():
        cache = PagedCache.allocate(fmt, 512, 64, device="meta")
        dispatch.load("sparse_decode", "sm90")(
            q=meta(*tokens, num_heads, 512 if apart else fmt.head_dim),
            q_rope=meta(*tokens, num_heads, 192)[..., 128:] if apart else None,
            cache=cache,
            topk_indices=ints(*tokens, 2048),
            softmax_scale=0.1,
            topk_lengths=ints(*tokens) if extra else ints(64),
            attn_sink=floats(num_heads),
            extra_cache=cache if extra else None,
            extra_topk_indices=ints(*tokens, 128) if extra else None,
            extra_topk_lengths=ints(*tokens) if extra else None,
            splits=Splits(num_splits, tile),
            workspace=meta(1 << 28, dtype=torch.uint8),
            out=meta(*tokens, num_heads, 512),
            lse=floats(*tokens, num_heads),
        )

    return launch


def prefill(num_heads, fmt=None, extra=False):
    def launch():
        paged = fmt and PagedCache.allocate(fmt, 512, 64, device="meta")
        dispatch.load("sparse_prefill", "sm90")(
            q=meta(4096, num_heads, fmt.head_dim if fmt else 576),
            kv=paged or PagedCache.from_rows(meta(32768, 576)),
            topk_indices=ints(4096, 2048),
            softmax_scale=0.1,
            attn_sink=floats(num_heads),
            extra_cache=paged if extra else None,
            extra_topk_indices=ints(4096, 128) if extra else None,
            extra_topk_lengths=ints(4096) if extra else None,
            out=meta(4096, num_heads, 512),
            lse=floats(4096, num_heads),
            max_logits=floats(4096, num_heads),
        )

    return launch


def dense(fmt, num_heads, query_len=1):
    def launch():
        dispatch.load("dense_decode", "sm90")(
            q=meta(64, query_len, num_heads, fmt.head_dim),
            cache=PagedCache.allocate(fmt, 512, 64, device="meta"),
            page_table=ints(64, 128),
            seq_lens=ints(64),
            softmax_scale=0.1,
            splits=Splits(2),
            workspace=meta(1 << 28, dtype=torch.uint8),
            out=meta(64, query_len, num_heads, 512),
            lse=floats(64, query_len, num_heads),
        )

    return launch


LAUNCHES = {
    "prefill bf16_576 h16": prefill(16),
    "prefill bf16_576 h32": prefill(32),
    "prefill fp8_ds_mla h16": prefill(16, FP8_DS_MLA),
    "decode bf16_576 h8": decode(BF16_576, 8, apart=True),
    "decode bf16_576 h32 extra": decode(BF16_576, 32, extra=True),
    "decode fp8_ds_mla h16": decode(FP8_DS_MLA, 16),
    "decode fp8_ds_mla h16 split": decode(FP8_DS_MLA, 16, num_splits=4, apart=True),
    "decode fp8_ds_mla h32": decode(FP8_DS_MLA, 32),
    "decode fp8_nope h16": decode(FP8_NOPE, 16),
    "decode fp8_584 h16 extra": decode(FP8_584, 16, extra=True),
    "decode fp8_584 h128 extra tiles": decode(FP8_584, 128, extra=True, tile=16),
    "decode fp8_584 h32": decode(FP8_584, 32),
    "decode fp8_584 h32 extra": decode(FP8_584, 32, extra=True),
    "decode e4m3 b128 h16": decode(e4m3_format(), 16),
    "decode e4m3 b64 h32": decode(e4m3_format(scale_block=64), 32),
    "decode e4m3 b0 h16": decode(e4m3_format(scale_block=0), 16),
    "decode e4m3 512 h16": decode(e4m3_format(512, 512, 512), 16),
    "dense fp8_ds_mla h16": dense(FP8_DS_MLA, 16),
    "dense fp8_ds_mla h16 causal": dense(FP8_DS_MLA, 16, query_len=2),
}

"""Launches of the Hopper kernel of few heads, for the compile check."""

import torch

from sparsemla import BF16_512, BF16_576, FP8_584, FP8_DS_MLA, PagedCache, e4m3_format
from sparsemla.kernels.common import hopper_columns

TARGETS = ("sm_90",)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def decode(fmt, num_heads, extra=None, num_splits=1):
    def launch():
        whole = num_splits == 1
        hopper_columns.attend(
            meta(64, 2, num_heads, fmt.head_dim),
            PagedCache.allocate(fmt, 512, 64, device="meta"),
            meta(64, 2, 2048, dtype=torch.int32),
            softmax_scale=0.1,
            topk_lengths=meta(64, dtype=torch.int32),
            attn_sink=meta(num_heads, dtype=torch.float32) if whole else None,
            extra_cache=extra and PagedCache.allocate(extra, 512, 64, device="meta"),
            extra_topk_indices=extra and meta(64, 2, 128, dtype=torch.int32),
            extra_topk_lengths=None,
            outs=meta(
                num_splits, 64, 2, num_heads, 512, dtype=torch.bfloat16 if whole else torch.float32
            ),
            lses=meta(num_splits, 64, 2, num_heads, dtype=torch.float32),
            max_logits=None,
        )

    return launch


def prefill(num_heads):
    def launch():
        hopper_columns.attend(
            meta(4096, 1, num_heads, 576),
            PagedCache.from_rows(meta(32768, 576)),
            meta(4096, 1, 2048, dtype=torch.int32),
            softmax_scale=0.1,
            topk_lengths=None,
            attn_sink=meta(num_heads, dtype=torch.float32),
            extra_cache=None,
            extra_topk_indices=None,
            extra_topk_lengths=None,
            outs=meta(1, 4096, 1, num_heads, 512),
            lses=meta(1, 4096, 1, num_heads, dtype=torch.float32),
            max_logits=meta(4096, num_heads, dtype=torch.float32),
        )

    return launch


LAUNCHES = {
    "prefill bf16_576 h16": prefill(16),
    "prefill bf16_576 h32": prefill(32),
    "decode fp8_ds_mla h16": decode(FP8_DS_MLA, 16),
    "decode fp8_ds_mla h16 split": decode(FP8_DS_MLA, 16, num_splits=4),
    "decode fp8_ds_mla h32": decode(FP8_DS_MLA, 32),
    "decode fp8_584 h16 extra": decode(FP8_584, 16, FP8_584),
    "decode bf16_512 h16 extra": decode(BF16_512, 16, BF16_512),
    "decode e4m3 b128 h16": decode(e4m3_format(), 16),
    "decode bf16_576 h8": decode(BF16_576, 8),
}

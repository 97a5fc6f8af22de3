"""Launches of the Hopper kernel of few heads, for the compile check."""

import torch

from sparsemla import BF16_512, BF16_576, FP8_584, FP8_DS_MLA, PagedCache, e4m3_format
from sparsemla.kernels.common import hopper_columns
from sparsemla.kernels.common.hopper_rows import Results, Shape, Stream

TARGETS = ("sm_90",)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def results(shape, num_splits=1, max_logits=False):
    """Results of ``shape [..., H, 512]``, or their splits."""
    whole = num_splits == 1
    outs = meta(num_splits, *shape, dtype=torch.bfloat16 if whole else torch.float32)
    lses = meta(num_splits, *shape[:-1], dtype=torch.float32)
    logits = meta(shape[0], shape[2], dtype=torch.float32) if max_logits else None
    sink = meta(shape[2], dtype=torch.float32) if whole else None
    return Results(
        outs,
        *outs.stride()[:4],
        lses,
        *lses.stride()[:3],
        logits,
        0 if logits is None else logits.stride(0),
        sink,
    )


def selected(batch, query_len, topk, lengths=True):
    slots = meta(batch, query_len, topk, dtype=torch.int32)
    lengths = meta(batch, dtype=torch.int32) if lengths else None
    return Stream(slots, *slots.stride()[:2], topk, lengths, 32768)


def decode(fmt, num_heads, extra=False, num_splits=1):
    def launch():
        q = meta(64, 2, num_heads, fmt.head_dim)
        cache = PagedCache.allocate(fmt, 512, 64, device="meta")
        hopper_columns.attend(
            q,
            q.stride()[:3],
            cache,
            selected(64, 2, 2048),
            results((64, 2, num_heads, 512), num_splits),
            Shape(num_heads, num_heads, 2, num_splits),
            0.1,
            num_groups=128,
            extra_cache=cache if extra else None,
            extra=selected(64, 2, 128, lengths=False) if extra else None,
        )

    return launch


def prefill(num_heads):
    def launch():
        q = meta(4096, 1, num_heads, 576)
        hopper_columns.attend(
            q,
            q.stride()[:3],
            PagedCache.from_rows(meta(32768, 576)),
            selected(4096, 1, 2048, lengths=False),
            results((4096, 1, num_heads, 512), max_logits=True),
            Shape(num_heads, num_heads, 1, 1),
            0.1,
            num_groups=4096,
        )

    return launch


def dense(fmt, num_heads, query_len=1):
    def launch():
        q = meta(64, query_len, num_heads, fmt.head_dim)
        table = meta(64, 128, dtype=torch.int32)
        hopper_columns.attend(
            q,
            q.stride()[:3],
            PagedCache.allocate(fmt, 512, 64, device="meta"),
            Stream(table, table.stride(0), 0, 8192, meta(64, dtype=torch.int32), 32768),
            results((64, query_len, num_heads, 512), 2),
            Shape(num_heads, query_len * num_heads, 1, 2),
            0.1,
            num_groups=64,
            paged=True,
            causal=query_len > 1,
        )

    return launch


LAUNCHES = {
    "prefill bf16_576 h16": prefill(16),
    "prefill bf16_576 h32": prefill(32),
    "decode fp8_ds_mla h16": decode(FP8_DS_MLA, 16),
    "decode fp8_ds_mla h16 split": decode(FP8_DS_MLA, 16, num_splits=4),
    "decode fp8_ds_mla h32": decode(FP8_DS_MLA, 32),
    "decode fp8_584 h16 extra": decode(FP8_584, 16, extra=True),
    "decode bf16_512 h16 extra": decode(BF16_512, 16, extra=True),
    "decode e4m3 b128 h16": decode(e4m3_format(), 16),
    "decode bf16_576 h8": decode(BF16_576, 8),
    "dense fp8_ds_mla h16": dense(FP8_DS_MLA, 16),
    "dense fp8_ds_mla h16 causal": dense(FP8_DS_MLA, 16, query_len=2),
}

"""Launches of the attention kernels, for the compile check."""

import torch

from sparsemla import (
    BF16_576,
    FP4_288,
    FP8_528,
    FP8_584,
    FP8_DS_MLA,
    PagedCache,
    bf16_format,
    dispatch,
    e4m3_format,
)
from sparsemla.kernels.attention.arguments import Splits

# One for each kind of MMA. The other three have the same, and sm_80 no FP8.
TARGETS = ("sm_90", "sm_100", "gfx942")
IN_TURN = ("sm_80", "sm_89", "sm_80", "sm_120")


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def state(*shape, value_dim=512, dtype=torch.bfloat16):
    return {"out": meta(*shape, value_dim, dtype=dtype), "lse": meta(*shape, dtype=torch.float32)}


def pages(fmt):
    return PagedCache.allocate(fmt, 512, 64, device="meta")


def sparse_prefill(
    cache, num_heads=128, dtype=torch.bfloat16, out_dtype=None, extra=None, list_tokens=None
):
    """With ``list_tokens``, these tokens share a list and have a mask."""
    size = list_tokens or 1
    lists = 4096 // size, 2048 * size

    def launch():
        dispatch.load("sparse_prefill", "triton")(
            q=meta(4096, num_heads, cache.format.head_dim, dtype=dtype),
            kv=cache,
            topk_indices=meta(*lists, dtype=torch.int32),
            softmax_scale=0.1,
            topk_lengths=meta(lists[0], dtype=torch.int32),
            attn_sink=meta(num_heads, dtype=torch.float32),
            extra_cache=extra,
            extra_topk_indices=None if extra is None else meta(4096, 128, dtype=torch.int32),
            extra_topk_lengths=None if extra is None else meta(4096, dtype=torch.int32),
            list_tokens=size,
            token_mask=list_tokens and meta(*lists, dtype=torch.uint8),
            **state(4096, num_heads, value_dim=cache.format.value_dim, dtype=out_dtype or dtype),
        )

    return launch


def dense_prefill(head_dim=192, value_dim=128, dtype=torch.bfloat16):
    def launch():
        dispatch.load("dense_prefill", "triton")(
            q=meta(4096, 128, head_dim, dtype=dtype),
            k=meta(8192, 128, head_dim, dtype=dtype),
            v=meta(8192, 128, value_dim, dtype=dtype),
            input_row_offsets=meta(5, dtype=torch.int32),
            kv_row_offsets=meta(5, dtype=torch.int32),
            softmax_scale=0.1,
            **state(4096, 128, value_dim=value_dim, dtype=dtype),
        )

    return launch


def sparse_decode(fmt, num_heads, extra=None, num_splits=1, apart=False, dtype=torch.bfloat16):
    def launch():
        dispatch.load("sparse_decode", "triton")(
            q=meta(64, 2, num_heads, 512 if apart else fmt.head_dim, dtype=dtype),
            q_rope=meta(64, 2, num_heads, 192)[..., 128:] if apart else None,
            cache=pages(fmt),
            topk_indices=meta(64, 2, 2048, dtype=torch.int32),
            softmax_scale=0.1,
            attn_sink=meta(num_heads, dtype=torch.float32),
            extra_cache=None if extra is None else pages(extra),
            extra_topk_indices=None if extra is None else meta(64, 2, 128, dtype=torch.int32),
            extra_topk_lengths=None if extra is None else meta(64, 2, dtype=torch.int32),
            splits=Splits(num_splits),
            workspace=meta(1 << 28, dtype=torch.uint8),
            **state(64, 2, num_heads, dtype=dtype),
        )

    return launch


def dense_decode(fmt, num_heads, query_len):
    def launch():
        dispatch.load("dense_decode", "triton")(
            q=meta(64, query_len, num_heads, fmt.head_dim),
            cache=pages(fmt),
            page_table=meta(64, 128, dtype=torch.int32),
            seq_lens=meta(64, dtype=torch.int32),
            softmax_scale=0.1,
            splits=Splits(1),
            **state(64, query_len, num_heads),
        )

    return launch


ROWS = PagedCache.from_rows(meta(32768, 576))

LAUNCHES = {
    "prefill bf16 h128": sparse_prefill(ROWS),
    "prefill bf16 h128 f32": sparse_prefill(ROWS, dtype=torch.float32),
    "prefill bf16 h128 to f32 extra": sparse_prefill(ROWS, out_dtype=torch.float32, extra=ROWS),
    "prefill fp8_ds_mla h128": sparse_prefill(pages(FP8_DS_MLA)),
    "prefill bf16 h16 lists": sparse_prefill(ROWS, 16, list_tokens=4),
    "prefill bf16 h128 lists": sparse_prefill(ROWS, list_tokens=8),
    "dense prefill": dense_prefill(),
    "decode e4m3 b32 h16 split": sparse_decode(
        e4m3_format(scale_block=32), 16, num_splits=4, apart=True
    ),
    "decode fp8_584 h64 extra": sparse_decode(FP8_584, 64, FP8_584),
    "decode fp8_528 h64": sparse_decode(FP8_528, 64),
    "decode fp4_288 h64": sparse_decode(FP4_288, 64),
    "dense decode bf16 h128 s2": dense_decode(BF16_576, 128, 2),
    # Rows of two kinds, and queries that are converted, take the most shared memory.
    "decode bf16_512 h64 extra fp8_584": sparse_decode(bf16_format(512), 64, FP8_584),
    "decode fp8_ds_mla h2 f32": sparse_decode(FP8_DS_MLA, 2, dtype=torch.float32),
}

"""Launches of Hopper's attention, for the compile check."""

import torch

from sparsemla import (
    BF16_512,
    BF16_576,
    FP8_584,
    FP8_DS_MLA,
    FP8_NOPE,
    PagedCache,
    dispatch,
    e4m3_format,
)
from sparsemla.kernels.attention.arguments import Splits

TARGETS = ("sm_90",)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def queries(*shape, apart=False):
    """Queries, with their RoPE dims in a tensor of their own if ``apart``."""
    if not apart:
        return {"q": meta(*shape)}
    return {"q": meta(*shape[:-1], 512), "q_rope": meta(*shape[:-1], 192)[..., 128:]}


def sparse_prefill(
    head_dim,
    num_heads=128,
    index_dtype=torch.int32,
    num_tokens=4096,
    topk=2048,
    context=32768,
    fmt=None,
    extra=None,
    apart=False,
    list_tokens=1,
    token_mask=False,
    allow_fp8_mma=False,
):
    lists = -(-num_tokens // list_tokens)
    width = topk * list_tokens

    def launch():
        paged = fmt and PagedCache.allocate(fmt, 512, 64, device="meta")
        dispatch.load("sparse_prefill", "sm90")(
            **queries(num_tokens, num_heads, head_dim, apart=apart),
            kv=paged or PagedCache.from_rows(meta(context, head_dim)),
            topk_indices=meta(lists, width, dtype=index_dtype),
            softmax_scale=0.1,
            topk_lengths=meta(lists, dtype=torch.int32) if topk > 1 else None,
            attn_sink=meta(num_heads, dtype=torch.float32),
            extra_cache=extra and PagedCache.allocate(extra, 512, 48, device="meta"),
            extra_topk_indices=extra and meta(num_tokens, 512, dtype=index_dtype),
            extra_topk_lengths=extra and meta(num_tokens, dtype=torch.int32),
            list_tokens=list_tokens,
            token_mask=meta(lists, width, dtype=torch.uint8) if token_mask else None,
            allow_fp8_mma=allow_fp8_mma,
            out=meta(num_tokens, num_heads, 512),
            lse=meta(num_tokens, num_heads, dtype=torch.float32),
            max_logits=None if allow_fp8_mma else meta(num_tokens, num_heads, dtype=torch.float32),
        )

    return launch


def sparse_decode(fmt, num_splits=1, extra=None, topk=2048, apart=False):
    def launch():
        dispatch.load("sparse_decode", "sm90")(
            **queries(64, 2, 64, fmt.head_dim, apart=apart),
            cache=PagedCache.allocate(fmt, 512, 64, device="meta"),
            topk_indices=meta(64, 2, topk, dtype=torch.int32),
            softmax_scale=0.1,
            topk_lengths=None if extra is None else meta(64, 2, dtype=torch.int32),
            extra_cache=None
            if extra is None
            else PagedCache.allocate(extra, 512, 48, device="meta"),
            extra_topk_indices=None if extra is None else meta(64, 2, 512, dtype=torch.int32),
            extra_topk_lengths=None if extra is None else meta(64, 2, dtype=torch.int32),
            splits=Splits(num_splits),
            workspace=meta(1 << 28, dtype=torch.uint8),
            out=meta(64, 2, 64, 512),
            lse=meta(64, 2, 64, dtype=torch.float32),
        )

    return launch


def dense_decode(fmt, num_heads, query_len, num_splits, batch=64, pitch=576, page_size=64):
    def launch():
        dispatch.load("dense_decode", "sm90")(
            q=meta(batch, query_len, num_heads, pitch)[..., :576],
            cache=PagedCache.allocate(fmt, 512, page_size, device="meta"),
            page_table=meta(batch, 128, dtype=torch.int32),
            seq_lens=meta(batch, dtype=torch.int32),
            softmax_scale=0.1,
            splits=Splits(num_splits),
            workspace=meta(1 << 28, dtype=torch.uint8),
            out=meta(batch, query_len, num_heads, 512),
            lse=meta(batch, query_len, num_heads, dtype=torch.float32),
        )

    return launch


LAUNCHES = {
    "prefill d576": sparse_prefill(576),
    "prefill d512 h40 int64": sparse_prefill(512, 40, torch.int64),
    "prefill d512 extra": sparse_prefill(512, 64, extra=BF16_512),
    "prefill one token and key": sparse_prefill(576, 64, num_tokens=1, topk=1, context=1),
    "prefill h16 lists of 4": sparse_prefill(576, 16, list_tokens=4, token_mask=True),
    "prefill d512 h8 lists of 8": sparse_prefill(512, 8, list_tokens=8, token_mask=True),
    # Three tokens of the last list are a launch of their own.
    "prefill h40 lists int64": sparse_prefill(
        576, 40, torch.int64, num_tokens=4095, list_tokens=4, token_mask=True
    ),
    "prefill h16 whole lists": sparse_prefill(576, 16, list_tokens=4),
    "prefill FP8 MMA": sparse_prefill(576, allow_fp8_mma=True),
    "prefill FP8 MMA h40 int64": sparse_prefill(
        576, 40, torch.int64, apart=True, allow_fp8_mma=True
    ),
    "decode pages split": sparse_decode(BF16_576, 4, apart=True),
    "decode d512": sparse_decode(BF16_512),
    "dense": dense_decode(BF16_576, 128, 1, 1),
    "dense one row": dense_decode(BF16_576, 1, 1, 1, batch=1),
    "dense h16 s2 split": dense_decode(BF16_576, 16, 2, 4),
    "dense h64 s2 pages of 61": dense_decode(BF16_576, 64, 2, 1, page_size=61),
    # A copy of 16 bytes must be known to be aligned where a stride is a multiple of 8 elements.
    "dense strided h64": dense_decode(BF16_576, 64, 1, 1, pitch=584),
    "decode fp8_ds_mla": sparse_decode(FP8_DS_MLA),
    "decode fp8_ds_mla split": sparse_decode(FP8_DS_MLA, 4, apart=True),
    "decode fp8_nope": sparse_decode(FP8_NOPE),
    "decode fp8_584": sparse_decode(FP8_584),
    "decode fp8_584 extra": sparse_decode(FP8_584, extra=FP8_584),
    "decode fp8_584 topk 1 extra": sparse_decode(FP8_584, extra=FP8_584, topk=1),
    "decode e4m3": sparse_decode(e4m3_format()),
    "decode e4m3 scales of 64": sparse_decode(e4m3_format(scale_block=64)),
    "decode e4m3 scales of 64 split": sparse_decode(e4m3_format(scale_block=64), 4),
    "decode e4m3 scale of a row": sparse_decode(e4m3_format(scale_block=576)),
    "decode e4m3 d512 no scales": sparse_decode(e4m3_format(512, 512, 0)),
    "prefill fp8_ds_mla": sparse_prefill(576, 64, fmt=FP8_DS_MLA, apart=True),
    "prefill fp8_584 extra": sparse_prefill(512, 64, fmt=FP8_584, extra=FP8_584),
    "dense fp8_ds_mla split": dense_decode(FP8_DS_MLA, 64, 2, 4),
}

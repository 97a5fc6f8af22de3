"""Launches of the quantising kernels, for the compile check."""

import torch

from sparsemla import (
    BF16_576,
    FP4_288,
    FP8_528,
    FP8_584,
    FP8_DS_MLA,
    FP8_NOPE,
    INDEX_FP8,
    INDEX_MXFP4,
    PagedCache,
    bf16_format,
    dispatch,
    e4m3_format,
)

# Without an MMA, the PTX of sm_120 is that of sm_100; that of sm_89 is sm_90's, or without FP8
# sm_80's.
TARGETS = ("sm_80", "gfx942")
ONE_OF = ("sm_90", "sm_100")  # no MMA


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def ints(n):
    return meta(n, dtype=torch.int32)


def fused(
    fmt,
    interleaved=True,
    norm_dim=512,
    out_dtype=torch.bfloat16,
    with_rows=False,
    tokens=8192,
    query_norm=False,
):
    def launch():
        queries = meta(tokens, 128, fmt.head_dim if query_norm else 192)
        out = meta(tokens, 128, fmt.head_dim if query_norm else 576, dtype=out_dtype)
        dispatch.load("fused_rope_rmsnorm_quant", "triton")(
            q_rope=queries if query_norm else queries[..., 128:],
            kv=meta(tokens, fmt.head_dim),
            cos_sin_cache=meta(8192, 64, dtype=torch.float32),
            kv_norm_weight=meta(norm_dim),
            cache=PagedCache.allocate(fmt, 512, 64, device="meta"),
            positions=ints(tokens),
            slot_mapping=ints(tokens),
            interleaved=interleaved,
            out=out if query_norm else out[..., 512:],
            kv_out=meta(tokens, fmt.head_dim) if with_rows else None,
            query_norm=query_norm,
        )

    return launch


def rows_alone(fmt, norm_dim, tokens=8192):
    """Rows of tokens that have no queries: entries and index keys of DeepSeek-V4.1."""

    def launch():
        dispatch.load("fused_rope_rmsnorm_quant", "triton")(
            q_rope=meta(tokens, 0, 64),
            kv=meta(tokens, fmt.head_dim),
            cos_sin_cache=meta(8192, 64, dtype=torch.float32),
            kv_norm_weight=meta(norm_dim),
            cache=PagedCache.allocate(fmt, 512, 64, device="meta"),
            positions=ints(tokens),
            slot_mapping=ints(tokens),
            out=meta(tokens, 0, 64),
        )

    return launch


def index_keys(fmt, hadamard=False):
    def launch():
        dispatch.load("append_index_keys", "triton")(
            index_k=meta(8192, 128),
            norm_weight=meta(128),
            norm_bias=meta(128),
            cos_sin_cache=meta(8192, 64, dtype=torch.float32),
            cache=PagedCache.allocate(fmt, 512, 64, device="meta"),
            positions=ints(8192),
            slot_mapping=ints(8192),
            hadamard=hadamard,
        )

    return launch


def index_queries(fmt, num_heads=64, rope_dim=64, interleaved=False, hadamard=False):
    def launch():
        dispatch.load("prepare_index_queries", "triton")(
            index_q=meta(8192, num_heads, 128),
            weights=meta(8192, num_heads),
            cos_sin_cache=meta(8192, rope_dim, dtype=torch.float32),
            positions=ints(8192),
            format=fmt,
            interleaved=interleaved,
            hadamard=hadamard,
            out=meta(
                8192, num_heads, 128, dtype=torch.float8_e4m3fn if fmt.fp8_dim else torch.bfloat16
            ),
            weights_out=meta(8192, num_heads, dtype=torch.float32),
        )

    return launch


def index_step(fmt, num_heads=64, interleaved=False, tokens=8192, rope_first=True):
    def launch():
        dispatch.load("fused_indexer_rope_quant", "triton")(
            index_q=meta(tokens, num_heads, 128),
            weights=meta(tokens, num_heads + 128)[:, 128:],
            index_k=meta(tokens, num_heads + 128)[:, :128],
            norm_weight=meta(128),
            norm_bias=meta(128),
            cos_sin_cache=meta(8192, 64, dtype=torch.float32),
            cache=PagedCache.allocate(fmt, 512, 64, device="meta"),
            positions=ints(tokens),
            slot_mapping=ints(tokens),
            interleaved=interleaved,
            rope_first=rope_first,
            out=meta(tokens, num_heads, 128, dtype=fmt.query_dtype),
            weights_out=meta(tokens, num_heads, dtype=torch.float32),
        )

    return launch


LAUNCHES = {
    "fused fp8_ds_mla": fused(FP8_DS_MLA),
    "fused fp8_ds_mla, few tokens": fused(FP8_DS_MLA, tokens=128),
    "fused fp8_ds_mla, half-split": fused(FP8_DS_MLA, interleaved=False),
    "fused fp8_ds_mla, with rows": fused(FP8_DS_MLA, with_rows=True),
    "fused fp8_584": fused(FP8_584, norm_dim=512),
    "fused fp8_584, query norm": fused(FP8_584, query_norm=True),
    "fused fp8_528": fused(FP8_528),
    "fused fp4_288": fused(FP4_288),
    "fused bf16": fused(BF16_576),
    "fused e4m3": fused(e4m3_format(), out_dtype=torch.float8_e4m3fn),
    "fused e4m3, a scale a row": fused(e4m3_format(scale_block=576)),
    "index step": index_step(INDEX_FP8),
    "index step, few tokens": index_step(INDEX_FP8, tokens=128),
    "index step, interleaved, 32 heads": index_step(INDEX_FP8, 32, interleaved=True),
    "index step, mxfp4": index_step(INDEX_MXFP4),
    "index step, bf16": index_step(bf16_format(128)),
    "keys index_fp8": index_keys(INDEX_FP8),
    "keys index_fp8, hadamard": index_keys(INDEX_FP8, hadamard=True),
    "keys bf16": index_keys(bf16_format(128)),
    "queries index_fp8": index_queries(INDEX_FP8),
    "queries index_fp8, one head, one pair": index_queries(INDEX_FP8, 1, rope_dim=2),
    "queries index_fp8, interleaved": index_queries(INDEX_FP8, interleaved=True),
    "queries index_fp8, hadamard": index_queries(INDEX_FP8, hadamard=True),
    "queries bf16": index_queries(bf16_format(128)),
    "fused fp8_nope": fused(FP8_NOPE, norm_dim=512),
    "index step, last dims": index_step(INDEX_FP8, 16, interleaved=True, rope_first=False),
    "rows alone fp8_584": rows_alone(FP8_584, 512),
    "rows alone index_fp8": rows_alone(INDEX_FP8, 128),
}

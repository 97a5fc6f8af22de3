"""Launches of the indexer kernels, for the compile check."""

import functools

import torch

from sparsemla import INDEX_FP8, INDEX_MXFP4, PagedCache, bf16_format, dispatch, e4m3_format

# One for each kind of MMA. The other three have the same, and sm_80 no FP8.
TARGETS = ("sm_90", "sm_100", "gfx942")
IN_TURN = ("sm_80", "sm_89", "sm_80", "sm_120")
E4M3 = torch.float8_e4m3fn


def meta(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def ragged(heads, dim, dtype):
    dispatch.load("indexer_scores", "triton")(
        index_q=meta(4096, heads, dim, dtype=dtype),
        weights=meta(4096, heads, dtype=torch.float32),
        index_k=meta(32768, dim, dtype=dtype),
        index_k_scales=meta(32768, dtype=torch.float32) if dtype == E4M3 else None,
        row_starts=meta(4096),
        row_ends=meta(4096),
        out=meta(4096, 32768, dtype=torch.float32),
    )


def paged(heads, fmt, query_len, page_size=64, ratio=1):
    dispatch.load("indexer_scores_paged", "triton")(
        index_q=meta(128, query_len, heads, fmt.head_dim, dtype=fmt.query_dtype),
        weights=meta(128, query_len, heads, dtype=torch.float32),
        cache=PagedCache.allocate(fmt, 4096, page_size, device="meta"),
        page_table=meta(128, 512),
        seq_lens=meta(128),
        max_seq_len=32768,
        ratio=ratio,
        out=meta(128, query_len, 32768, dtype=torch.float32),
    )


def best(num_tokens):
    dispatch.load("indexer_topk", "triton")(
        index_q=meta(num_tokens, 64, 128, dtype=E4M3),
        weights=meta(num_tokens, 64, dtype=torch.bfloat16),
        cache=PagedCache.allocate(INDEX_FP8, 4096, 64, device="meta"),
        input_row_offsets=meta(5),
        seq_lens=meta(4),
        page_table=meta(4, 512),
        topk=2048,
        out=meta(num_tokens, 2048),
    )


def candidates(num_tokens):
    """DeepSeek-V4.1: keys of two tokens, 2048 blocks of 8."""
    return {
        "index_q": meta(num_tokens, 32, 128, dtype=E4M3),
        "weights": meta(num_tokens, 32, dtype=torch.bfloat16),
        "cache": PagedCache.allocate(INDEX_FP8, 4096, 64, device="meta"),
        "input_row_offsets": meta(5),
        "seq_lens": meta(4),
        "page_table": meta(4, 512),
        "topk": 512,
        "block_size": 8,
        "ratio": 2,
        "out": meta(num_tokens, 512),
    }


def blocks_of(num_tokens):
    blocks = meta(num_tokens, 2048)
    arguments = candidates(num_tokens) | {"topk_blocks": 2048, "blocks_out": blocks}
    dispatch.load("indexer_topk_blocks", "triton")(**arguments)


def best_of_blocks(num_tokens, fmt=INDEX_FP8, page_size=64, block_size=8):
    arguments = candidates(num_tokens) | {"blocks": meta(num_tokens, 2048)}
    cache = PagedCache.allocate(fmt, 4096, page_size, device="meta")
    index_q = meta(num_tokens, 32, fmt.head_dim, dtype=fmt.query_dtype)
    dispatch.load("indexer_topk_of_blocks", "triton")(
        **arguments | {"cache": cache, "index_q": index_q, "block_size": block_size}
    )


LAUNCHES = {
    "ragged 64 x 128": functools.partial(ragged, 64, 128, E4M3),
    "ragged 32 x 128, bf16": functools.partial(ragged, 32, 128, torch.bfloat16),
    "ragged 128 x 256, bf16": functools.partial(ragged, 128, 256, torch.bfloat16),
    "ragged 5 x 16": functools.partial(ragged, 5, 16, E4M3),
    "paged 64 x 128": functools.partial(paged, 64, INDEX_FP8, 1),
    "paged 64 x 128, 2 tokens": functools.partial(paged, 64, INDEX_FP8, 2),
    "paged 64 x 128, mxfp4": functools.partial(paged, 64, INDEX_MXFP4, 1),
    "paged 32 x 96, bf16, ratio 4": functools.partial(paged, 32, bf16_format(96), 3, 7, 4),
    "paged 128 x 256": functools.partial(paged, 128, e4m3_format(256, 256, 0), 1),
    "best of 4096": functools.partial(best, 4096),
    "best of 8": functools.partial(best, 8),
    "blocks of 8": functools.partial(blocks_of, 8),
    "best of blocks of 8": functools.partial(best_of_blocks, 8),
    "best of blocks of 8, mxfp4": functools.partial(best_of_blocks, 8, INDEX_MXFP4),
    "best of blocks of 8, bf16, odd": functools.partial(best_of_blocks, 8, bf16_format(96), 7, 5),
}

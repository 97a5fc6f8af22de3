"""Launches of the indexer kernel with Ampere's instructions, for the compile check."""

import functools

import torch

from sparsemla import INDEX_FP8, PagedCache, dispatch, e4m3_format

TARGETS = ("sm_80", "sm_89")
IN_TURN = ("sm_90", "sm_100", "sm_120")
E4M3 = torch.float8_e4m3fn


def meta(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def paged(heads, query_len, fmt=INDEX_FP8, page_size=64, own_lengths=False, ratio=1):
    dispatch.load("indexer_scores_paged", "sm80")(
        index_q=meta(128, query_len, heads, fmt.head_dim, dtype=E4M3),
        weights=meta(128, query_len, heads, dtype=torch.float32),
        cache=PagedCache.allocate(fmt, 4096, page_size, device="meta"),
        page_table=meta(128, 512),
        seq_lens=meta(128, query_len) if own_lengths else meta(128),
        max_seq_len=32768,
        ratio=ratio,
        out=meta(128, query_len, 32768, dtype=torch.float32),
    )


def best(num_tokens, num_requests):
    dispatch.load("indexer_topk", "sm80")(
        index_q=meta(num_tokens, 64, 128, dtype=E4M3),
        weights=meta(num_tokens, 64, dtype=torch.bfloat16),
        cache=PagedCache.allocate(INDEX_FP8, 4096, 64, device="meta"),
        input_row_offsets=meta(num_requests + 1),
        seq_lens=meta(num_requests),
        page_table=meta(num_requests, 512),
        topk=2048,
        as_slots=True,
        out=meta(num_tokens, 2048),
    )


LAUNCHES = {
    "paged 64": functools.partial(paged, 64, 1),
    "paged 64, 2 tokens, own lengths": functools.partial(paged, 64, 2, own_lengths=True),
    "paged 32 x 96, 5 tokens, pages of 128, ratio 4": functools.partial(
        paged, 32, 5, e4m3_format(96, 96, 0), 128, ratio=4
    ),
    "best of 4096": functools.partial(best, 4096, 1),
    "best of 8": functools.partial(best, 8, 4),
}

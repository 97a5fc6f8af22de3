"""Launches of the kernels for rows in fast memory, for the compile check."""

import torch

from sparsemla import (
    BF16_576,
    FP8_584,
    FP8_DS_MLA,
    ContextShard,
    PagedCache,
    RowTable,
    bf16_format,
    dispatch,
    e4m3_format,
)

# Without an MMA, the PTX of sm_120 is that of sm_100.
TARGETS = ("sm_80", "gfx942")
ONE_OF = ("sm_90", "sm_89", "sm_100")  # no MMA


def meta(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def resolve(per_seat, topk=2048, query_len=1, shard=None, dtype=torch.int32):
    def launch():
        tokens, parts = 16 * query_len, () if shard is None or shard.parts is None else (4,)
        dispatch.load("resolve_rows", "triton")(
            topk_indices=meta(tokens, topk, dtype=dtype),
            input_row_offsets=meta(17),
            seq_lens=meta(16),
            seats=meta(16),
            page_table=meta(16, 2048),
            table=RowTable.unchecked(*(meta(32, per_seat) for _ in range(3))),
            page_size=64,
            max_query_len=query_len,
            shard=shard,
            stats=meta(2, dtype=torch.int64),
            out=meta(tokens, *parts, topk),
            counts=meta(tokens, *parts),
            miss_slots=meta(tokens, topk),
            miss_rows=meta(tokens, topk),
            miss_counts=meta(tokens),
            new_counts=meta(tokens),
        )

    return launch


def fetch(fmt, topk=2048):
    def launch():
        dispatch.load("fetch_rows", "triton")(
            miss_slots=meta(16, topk),
            miss_rows=meta(16, topk),
            miss_counts=meta(16),
            source=PagedCache.allocate(fmt, 4096, 64, device="meta"),
            target=PagedCache.allocate(fmt, 1 << 16, 1, device="meta"),
        )

    return launch


def forget():
    dispatch.load("forget_seats", "triton")(
        seats=meta(8), table=RowTable.unchecked(*(meta(32, 4096) for _ in range(3)))
    )


LAUNCHES = {
    "resolve_rows of 4096": resolve(4096),
    "resolve_rows of 16384": resolve(16384),
    "resolve_rows of 8192, 3 tokens": resolve(8192, query_len=3),
    "resolve_rows of 4096, a rank of 4": resolve(4096, shard=ContextShard(1, 4, 64)),
    "resolve_rows of 4096, a rank with parts": resolve(4096, shard=ContextShard(1, 2, parts=8)),
    "resolve_rows of 100, int64": resolve(100, topk=40, dtype=torch.int64),
    **{
        f"fetch_rows {fmt.name}": fetch(fmt)
        for fmt in (FP8_DS_MLA, FP8_584, BF16_576, e4m3_format(), bf16_format(65))
    },
    "forget_seats": forget,
}

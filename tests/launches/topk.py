"""Launches of the top-k kernels, for the compile check."""

import functools

import torch

from sparsemla.kernels.topk.triton import select_topk


def select(num_rows, num_cols, topk, dtype=torch.float32, ranges=True):
    starts = torch.empty(num_rows, dtype=torch.int32, device="meta") if ranges else None
    select_topk(
        scores=torch.empty(num_rows, num_cols, dtype=dtype, device="meta"),
        topk=topk,
        row_starts=starts,
        row_ends=starts,
        out=torch.empty(num_rows, topk, dtype=torch.int32, device="meta"),
    )


LAUNCHES = {
    "one row": functools.partial(select, 1, 131072, 2048, ranges=False),
    "few rows": functools.partial(select, 64, 32768, 2048),
    "many rows": functools.partial(select, 4096, 131072, 2048),
    "short rows": functools.partial(select, 512, 4000, 512),
    "very long rows": functools.partial(select, 2, 1 << 20, 2048),
    "large k": functools.partial(select, 64, 65536, 6000),
    "bfloat16": functools.partial(select, 300, 8192, 1024, dtype=torch.bfloat16),
    "odd columns": functools.partial(select, 300, 8191, 1024),
}

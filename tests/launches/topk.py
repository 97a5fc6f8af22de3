"""Launches of the top-k kernels, for the compile check."""

import functools

import torch

from sparsemla import dispatch

# For these kernels sm_89 is like sm_80: it only adds FP8 conversions. Without an MMA, the PTX of
# sm_120 is that of sm_100.
TARGETS = ("gfx942",)
ONE_OF = ("sm_90", "sm_80", "sm_100", "sm_80")

INT32 = {"dtype": torch.int32, "device": "meta"}


def select(num_rows, num_cols, topk, dtype=torch.float32, ranges=True, page_size=None):
    starts = torch.empty(num_rows, dtype=torch.int32, device="meta") if ranges else None
    dispatch.load("select_topk", "triton")(
        scores=torch.empty(num_rows, num_cols, dtype=dtype, device="meta"),
        topk=topk,
        row_starts=starts,
        row_ends=starts,
        page_table=None if page_size is None else torch.empty(9, 99, **INT32),
        request_ids=None if page_size is None else torch.empty(num_rows, **INT32),
        page_size=page_size,
        out=torch.empty(num_rows, topk, dtype=torch.int32, device="meta"),
    )


def merge(num_parts, width, topk):
    dispatch.load("merge_topk", "triton")(
        values=torch.empty(num_parts, 9, width, device="meta"),
        indices=torch.empty(num_parts, 9, width, dtype=torch.int32, device="meta"),
        topk=topk,
        out=torch.empty(9, topk, dtype=torch.int32, device="meta"),
    )


LAUNCHES = {
    "one row": functools.partial(select, 1, 131072, 2048, ranges=False),
    "few rows": functools.partial(select, 64, 32768, 2048),
    "many rows": functools.partial(select, 4096, 131072, 2048),
    "short rows": functools.partial(select, 512, 4000, 512),
    "slots": functools.partial(select, 64, 32768, 2048, page_size=64),
    "very long rows": functools.partial(select, 2, 1 << 20, 2048),
    "two slices": functools.partial(select, 200, 65536, 3000),
    "large k": functools.partial(select, 64, 65536, 6000),
    "bfloat16": functools.partial(select, 300, 8192, 1024, dtype=torch.bfloat16),
    "odd columns": functools.partial(select, 300, 8191, 1024),
    "merge of 8 parts": functools.partial(merge, 8, 2048, 2048),
    "merge of 2 parts": functools.partial(merge, 2, 512, 512),
}

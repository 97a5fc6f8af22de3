"""Launches of the top-k kernels for Hopper, for the compile check."""

import functools

import torch

from sparsemla import dispatch

TARGETS = ("sm_90",)


def meta(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def select(num_rows, num_cols, topk, dtype=torch.float32, ranges=True, page_size=None):
    ends = meta(num_rows) if ranges else None
    dispatch.load("select_topk", "sm90")(
        scores=meta(num_rows, num_cols, dtype=dtype),
        topk=topk,
        row_ends=ends,
        page_table=None if page_size is None else meta(9, 99),
        request_ids=None if page_size is None else meta(num_rows),
        page_size=page_size,
        out=meta(num_rows, topk),
    )


def merge(num_parts, width, topk, dtype=torch.float32, index_dtype=torch.int32):
    dispatch.load("merge_topk", "sm90")(
        values=meta(num_parts, 9, width, dtype=dtype),
        indices=meta(num_parts, 9, width, dtype=index_dtype),
        topk=topk,
        out=meta(9, topk),
    )


LAUNCHES = {
    "a row held by eight": functools.partial(select, 1, 131072, 2048, ranges=False),
    "one very long row": functools.partial(select, 1, 1 << 20, 2048),
    "few rows": functools.partial(select, 64, 65536, 2048),
    "rows held by four": functools.partial(select, 16, 65536, 2048),
    "a row for each multiprocessor": functools.partial(select, 128, 131072, 2048),
    "many rows": functools.partial(select, 4096, 131072, 2048),
    "short rows": functools.partial(select, 512, 1000, 512),
    "slots": functools.partial(select, 64, 65536, 2048, page_size=61),
    "slots, rows held by two": functools.partial(select, 64, 32768, 2048, page_size=61),
    "slots, many rows": functools.partial(select, 500, 32768, 512, page_size=64),
    "large k": functools.partial(select, 300, 65536, 6000),
    "bfloat16": functools.partial(select, 300, 20000, 1024, dtype=torch.bfloat16),
    "one row held": functools.partial(select, 1, 4096, 2048, ranges=False),
    "rows held": functools.partial(select, 16, 16384, 2048),
    "rows held, bfloat16": functools.partial(select, 132, 8192, 512, dtype=torch.bfloat16),
    "rows held, slots": functools.partial(select, 9, 16384, 2048, page_size=64),
    "k of 1": functools.partial(select, 1, 1, 1),
    "merge of 8 parts": functools.partial(merge, 8, 2048, 2048),
    "merge of 64 parts": functools.partial(merge, 64, 2000, 2000, index_dtype=torch.int64),
    "merge of 2 parts": functools.partial(merge, 2, 40, 4096, dtype=torch.bfloat16),
}

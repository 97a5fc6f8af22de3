"""Launches of the exchange between ranks, for the compile check."""

import functools

import torch

from sparsemla import ContextShard
from sparsemla.kernels.exchange import ExchangeRows, Inboxes
from sparsemla.kernels.exchange.triton import exchange_rows

TARGETS = ("sm_80",)  # GPUs that write each other's memory
ONE_OF = ("sm_90", "sm_100")  # no MMA


def meta(*shape, dtype=torch.int32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def exchange(num_ranks, num_rows, topk, *, interleave=64, parts=None, page_size=None, whole=True):
    shard = ContextShard(num_ranks - 1, num_ranks, interleave, parts)
    inbox = meta(256, 2, num_ranks, topk, dtype=torch.int64)
    own = num_rows, len(shard.own_parts)
    exchange_rows(
        Inboxes(shard.rank, (inbox,) * num_ranks, meta(256)),
        ExchangeRows(
            meta(num_rows, 65536, dtype=torch.float32),
            meta(num_rows, topk),
            topk,
            shard,
            page_table=None if page_size is None else meta(num_rows, 99),
            request_ids=None if page_size is None else meta(num_rows),
            page_size=page_size,
            selected=meta(num_rows, topk) if whole else None,
            out=meta(*own, topk),
            counts=meta(*own),
        ),
    )


def select(num_ranks, num_rows, topk, dtype):
    inbox = meta(256, 2, num_ranks, topk, dtype=torch.int64)
    exchange_rows(
        Inboxes(0, (inbox,) * num_ranks, meta(256)),
        ExchangeRows(
            meta(num_rows, topk, dtype=torch.float32),
            meta(num_rows, topk, dtype=dtype),
            topk,
            selected=meta(num_rows, topk),
        ),
    )


def merge(num_ranks, num_rows, topk):
    """The selection of all ranks alone, from scores: vLLM's decodes."""
    inbox = meta(256, 2, num_ranks, topk, dtype=torch.int64)
    exchange_rows(
        Inboxes(0, (inbox,) * num_ranks, meta(256)),
        ExchangeRows(
            meta(num_rows, 65536, dtype=torch.float32),
            meta(num_rows, topk),
            topk,
            ContextShard(0, num_ranks, 64),
            selected=meta(num_rows, topk),
        ),
    )


LAUNCHES = {
    "rows of two ranks": functools.partial(exchange, 2, 128, 2048),
    "slots of four ranks": functools.partial(exchange, 4, 16, 2048, page_size=64, whole=False),
    "slots of eight ranks": functools.partial(exchange, 8, 1, 2048, page_size=64),
    "parts of two ranks": functools.partial(exchange, 2, 200, 512, interleave=1, parts=8),
    "a selection of three ranks": functools.partial(select, 3, 9, 1024, torch.int64),
    "a selection of two ranks, from scores": functools.partial(merge, 2, 128, 2048),
}

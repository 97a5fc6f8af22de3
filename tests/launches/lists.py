"""Launches of the kernels of lists, for the compile check."""

import torch

from sparsemla import ContextShard, dispatch
from sparsemla.kernels.common.pools import expand_pools

# Without an MMA, the PTX of sm_120 is that of sm_100.
TARGETS = ("sm_80", "gfx942")
ONE_OF = ("sm_90", "sm_89", "sm_100")  # no MMA


def meta(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def share_lists(list_tokens, dtype=torch.int32, topk=2048):
    def launch():
        lists = 4096 // list_tokens
        dispatch.load("share_lists", "triton")(
            topk_indices=meta(4096, topk, dtype=dtype),
            list_tokens=list_tokens,
            topk_lengths=meta(4096),
            out=meta(lists, topk * list_tokens, dtype=dtype),
            lengths=meta(lists),
            token_mask=meta(lists, topk * list_tokens, dtype=torch.uint8),
        )

    return launch


def own_positions(shard, dtype=torch.int32, topk=2048):
    def launch():
        parts = len(shard.own_parts)
        dispatch.load("own_positions", "triton")(
            topk_indices=meta(64, topk, dtype=dtype),
            shard=shard,
            out=meta(64, parts, topk),
            counts=meta(64, parts),
        )

    return launch


def pools(ratio, topk=2048, width=None, dtype=torch.int32, **given):
    def launch():
        expand_pools(
            meta(64, topk // ratio),
            meta(64, dtype=dtype),
            ratio,
            meta(64, width or topk + ratio - 1),
            lengths=meta(64, dtype=dtype),
            **given,
        )

    return launch


LAUNCHES = {
    "lists of 4": share_lists(4),
    "lists of 8 int64": share_lists(8, torch.int64),
    "lists of 2 of 100": share_lists(2, topk=100),
    "a rank of 4": own_positions(ContextShard(1, 4, 64)),
    "a rank of 2 with 4 of 8 parts": own_positions(ContextShard(1, 2, parts=8)),
    "a rank of 3, int64, of 100": own_positions(ContextShard(2, 3), torch.int64, topk=100),
    "tokens of pools of 4, slots": pools(4, table=meta(64, 131072), request_ids=meta(64)),
    "tokens of pools of 16, rows": pools(16, offsets=meta(64)),
    "tokens of pools of 4, int64, -1 behind": pools(4, width=2176, dtype=torch.int64),
}

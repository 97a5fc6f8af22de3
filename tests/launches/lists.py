"""Launches of the kernel that shares lists, for the compile check."""

import torch

from sparsemla import dispatch

# Without an MMA, the PTX of sm_120 is that of sm_100.
TARGETS = ("sm_80", "gfx942")
IN_TURN = ("sm_90", "sm_89", "sm_100")  # no MMA


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


LAUNCHES = {
    "lists of 4": share_lists(4),
    "lists of 8 int64": share_lists(8, torch.int64),
    "lists of 2 of 100": share_lists(2, topk=100),
}

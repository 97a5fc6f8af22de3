"""A cache of one slot, for the compile check: Triton makes a constant of an argument that is 1."""

import torch

from sparsemla import BF16_512, PagedCache, dispatch

TARGETS = ("sm_80",)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def sparse_prefill():
    dispatch.load("sparse_prefill", "triton")(
        q=meta(3, 16, 512),
        kv=PagedCache.allocate(BF16_512, 1, 1, device="meta"),
        topk_indices=meta(3, 64, dtype=torch.int32),
        softmax_scale=0.1,
        out=meta(3, 16, 512),
        lse=meta(3, 16, dtype=torch.float32),
    )


LAUNCHES = {"sparse prefill": sparse_prefill}

"""Launches of grouped projections of GPUs without native e4m3, for the compile check."""

import functools

import torch

from sparsemla import HeadWeight, dispatch

TARGETS = ("sm_80",)


def project_groups(tokens):
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    scale = meta(8, 8, 32, dtype=torch.float32)
    weight = HeadWeight(meta(8, 1024, 4096, dtype=torch.float8_e4m3fn), scale, (128, 128))
    dispatch.load("project_groups", "sm80")(
        x=meta(tokens, 64, 512),
        weight=weight,
        cos_sin_cache=meta(8192, 64, dtype=torch.float32),
        positions=meta(tokens, dtype=torch.int32),
        out=meta(tokens, 8, 1024),
    )


LAUNCHES = {
    f"groups, {tokens} tokens": functools.partial(project_groups, tokens) for tokens in (32, 64)
}

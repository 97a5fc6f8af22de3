"""Launches of the products per group for Hopper, for the compile check."""

import torch

from sparsemla import HeadWeight, dispatch

TARGETS = ("sm_90",)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def project(tokens, groups=8):
    def launch():
        data = meta(groups, 1024, 4096).to(torch.float8_e4m3fn)
        dispatch.load("project_groups", "sm90")(
            x=meta(tokens, 8 * groups, 512),
            weight=HeadWeight(data, meta(groups, 8, 32, dtype=torch.float32)),
            cos_sin_cache=meta(8192, 64, dtype=torch.float32),
            positions=meta(tokens, dtype=torch.int32),
            out=meta(tokens, groups, 1024),
        )

    return launch


LAUNCHES = {f"{tokens} tokens": project(tokens) for tokens in (1, 16, 64, 128, 256, 4096)} | {
    "16 tokens, 1 group": project(16, groups=1),
    "128 tokens, 1 group": project(128, groups=1),
}

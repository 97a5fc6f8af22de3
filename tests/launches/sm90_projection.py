"""Launches of the per-head products for Hopper, for the compile check."""

import torch

from sparsemla import HeadWeight, dispatch

TARGETS = ("sm_90",)


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def project(tokens, heads, outputs, inputs, parts=None):
    def launch():
        data = meta(heads, outputs, inputs).to(torch.float8_e4m3fn)
        scale = meta(heads, outputs // 128, inputs // 128, dtype=torch.float32)
        x, lses = meta(tokens, heads, 576)[..., :inputs], None
        if parts:
            x = meta(parts, tokens, heads, inputs, dtype=torch.float32)
            lses = meta(parts, tokens, heads, dtype=torch.float32)
        dispatch.load("project_heads", "sm90")(
            x=x,
            weight=HeadWeight(data, scale),
            lses=lses,
            out=meta(tokens, heads, 576)[..., :outputs],
        )

    return launch


LAUNCHES = {
    f"{tokens} tokens, {heads} x {outputs} x {inputs}": project(tokens, heads, outputs, inputs)
    for tokens, heads, outputs, inputs in (
        (64, 128, 512, 128),
        (64, 128, 128, 512),
        (4096, 16, 128, 512),
        (4096, 64, 256, 512),
        (4096, 3, 384, 128),
        (4096, 3, 128, 256),
    )
} | {"2 parts": project(128, 128, 128, 512, parts=2)}

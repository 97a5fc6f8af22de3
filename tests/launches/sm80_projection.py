"""Launches of the projections with Ampere's instructions, for the compile check."""

import functools

import torch

from sparsemla import HeadWeight, dispatch

TARGETS = ("sm_80", "sm_89")  # it is refused from sm_90 on
E4M3 = torch.float8_e4m3fn


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def head_weight(heads, outputs, inputs, fp8=True):
    if not fp8:
        return HeadWeight(meta(heads, outputs, inputs))
    scale = meta(heads, outputs // 128, inputs // 128, dtype=torch.float32)
    return HeadWeight(meta(heads, outputs, inputs, dtype=E4M3), scale, (128, 128))


def project(tokens, heads, outputs, inputs, fp8):
    dispatch.load("project_heads", "sm80")(
        x=meta(tokens, heads, 576)[..., :inputs],
        weight=head_weight(heads, outputs, inputs, fp8),
        out=meta(tokens, heads, outputs),
    )


def project_groups(tokens):
    dispatch.load("project_groups", "sm80")(
        x=meta(tokens, 64, 512),
        weight=head_weight(8, 1024, 4096),
        cos_sin_cache=meta(8192, 64, dtype=torch.float32),
        positions=meta(tokens, dtype=torch.int32),
        out=meta(tokens, 8, 1024),
    )


SHAPES = {"W_UK": (128, 512, 128), "W_UV": (128, 128, 512)}
LAUNCHES = {
    f"{name}, {tokens} tokens, {'e4m3' if fp8 else 'bf16'}": functools.partial(
        project, tokens, *shape, fp8
    )
    for name, shape in SHAPES.items()
    for fp8, counts in ((True, (1, 16, 32, 64)), (False, (1, 64)))
    for tokens in counts
} | {
    "W_UV of GLM-5, 1 token, bf16": functools.partial(project, 1, 64, 256, 512, False),
    "W_UV of GLM-5, 1 token, e4m3": functools.partial(project, 1, 64, 256, 512, True),
    "W_UK of 16 heads, 64 tokens, e4m3": functools.partial(project, 64, 16, 512, 128, True),
    **{f"groups, {tokens} tokens": functools.partial(project_groups, tokens) for tokens in (1, 16)},
}

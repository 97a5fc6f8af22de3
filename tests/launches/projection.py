"""Launches of the products per head and per group, for the compile check."""

import torch

from sparsemla import HeadWeight, dispatch

# One for each kind of MMA. The other three have the same, and sm_80 no FP8.
TARGETS = ("sm_90", "sm_100", "gfx942")
IN_TURN = ("sm_80", "sm_89", "sm_80", "sm_120")


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def project(tokens, heads, outputs, inputs, scale_block=None, parts=None, batch_invariant=False):
    def launch():
        data, scale = meta(heads, outputs, inputs), None
        if scale_block:
            n, k = scale_block
            data = data.to(torch.float8_e4m3fn)
            scale = meta(heads, -(-outputs // n), -(-inputs // k), dtype=torch.float32)
        x, lses, sink = meta(tokens, heads, 576)[..., :inputs], None, None
        if parts:
            x = meta(parts, tokens, heads, inputs, dtype=torch.float32)
            lses = meta(parts, tokens, heads, dtype=torch.float32)
            sink = meta(heads, dtype=torch.float32)
        dispatch.load("project_heads", "triton")(
            x=x,
            weight=HeadWeight(data, scale, scale_block or (128, 128)),
            lses=lses,
            attn_sink=sink,
            batch_invariant=batch_invariant,
            out=meta(tokens, heads, outputs),
        )

    return launch


def project_groups(tokens, scale_block=None, parts=None):
    def launch():
        data, scale = meta(8, 1024, 4096), None
        if scale_block:
            n, k = scale_block
            data = data.to(torch.float8_e4m3fn)
            scale = meta(8, 1024 // n, 4096 // k, dtype=torch.float32)
        x, lses = meta(tokens, 64, 512), None
        if parts:
            x = meta(parts, tokens, 64, 512, dtype=torch.float32)
            lses = meta(parts, tokens, 64, dtype=torch.float32)
        dispatch.load("project_groups", "triton")(
            x=x,
            weight=HeadWeight(data, scale, scale_block or (128, 128)),
            cos_sin_cache=meta(8192, 64, dtype=torch.float32),
            positions=meta(tokens, dtype=torch.int32),
            lses=lses,
            attn_sink=meta(64, dtype=torch.float32) if parts else None,
            out=meta(tokens, 8, 1024),
        )

    return launch


LAUNCHES = (
    {
        f"{tokens} tokens, {heads} x {outputs} x {inputs}, scales {block}": project(
            tokens, heads, outputs, inputs, block
        )
        for tokens in (1, 64, 4096)
        for heads, outputs, inputs, block in (
            (128, 512, 128, None),
            (128, 128, 512, None),
            (128, 512, 128, (128, 128)),
            (128, 128, 512, (128, 128)),
            (16, 512, 192, (128, 64)),
        )
    }
    | {"128 tokens, 128 x 512 x 128, scales None": project(128, 128, 512, 128)}
    | {
        f"{parts} parts, {tokens} tokens, scales {block}": project(
            tokens, 16, 128, 512, block, parts
        )
        for parts, tokens in ((16, 1), (2, 64))
        for block in (None, (128, 128))
    }
    | {
        f"batch invariant, {parts} parts, scales {block}": project(
            4096, 128, 128, 512, block, parts, batch_invariant=True
        )
        for parts in (None, 3)
        for block in (None, (128, 128))
    }
    | {
        "groups, 16 tokens, 4 parts": project_groups(16, parts=4),
        "groups, 4096 tokens, scales (128, 128)": project_groups(4096, (128, 128)),
    }
)

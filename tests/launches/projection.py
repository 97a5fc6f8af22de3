"""Launches of the per-head products, for the compile check."""

import torch

from sparsemla import HeadWeight, dispatch


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
)

"""Launches of ragged scores with Ampere's instructions, for the compile check."""

import functools

import torch

from sparsemla import dispatch

TARGETS = ("sm_89",)
IN_TURN = ("sm_90", "sm_100", "sm_120")
E4M3 = torch.float8_e4m3fn


def meta(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def ragged(heads, dim=128, num_tokens=4096, scales=True, weights=torch.float32):
    dispatch.load("indexer_scores", "sm80")(
        index_q=meta(num_tokens, heads, dim, dtype=E4M3),
        weights=meta(num_tokens, heads, dtype=weights),
        index_k=meta(32768, dim, dtype=E4M3),
        index_k_scales=meta(32768, dtype=torch.float32) if scales else None,
        row_starts=meta(num_tokens),
        row_ends=meta(num_tokens),
        out=meta(num_tokens, 32768, dtype=torch.float32),
    )


LAUNCHES = {
    "64": functools.partial(ragged, 64),
    "128, 1 token, bf16 weights": functools.partial(
        ragged, 128, num_tokens=1, weights=torch.bfloat16
    ),
    "3 x 32, no scales": functools.partial(ragged, 3, 32, scales=False),
}

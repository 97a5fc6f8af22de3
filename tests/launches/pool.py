"""Launches of pooled windows, for the compile check."""

import torch

from sparsemla import FP8_584, INDEX_FP8, PagedCache, Pooling, WindowState, dispatch

# Without an MMA, the PTX of sm_120 is that of sm_100.
TARGETS = ("sm_80", "gfx942")
ONE_OF = ("sm_90", "sm_89", "sm_100")  # no MMA


def meta(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def pool(
    fmt,
    pooling,
    *,
    dtype=torch.bfloat16,
    num_tokens=128,
    batch=128,
    with_rows=False,
    state_page=None,
    ring=None,
    bias=True,
):
    def launch():
        dim = fmt.head_dim
        width = pooling.width(dim)
        dispatch.load("pool_windows", "triton")(
            values=meta(num_tokens, 2 * width, dtype=dtype)[:, :width],
            gates=meta(num_tokens, 2 * width, dtype=dtype)[:, width:],
            norm_weight=meta(dim, dtype=torch.bfloat16),
            cos_sin_cache=meta(1 << 20, 64, dtype=torch.float32),
            state=WindowState(
                meta(256, state_page or ring or pooling.window, 2, width, dtype=torch.float32)
            ),
            cache=PagedCache.allocate(fmt, 512, 64, device="meta"),
            pooling=pooling,
            gate_bias=meta(pooling.ratio, width, dtype=torch.float32) if bias else None,
            positions=meta(num_tokens),
            request_ids=meta(num_tokens),
            input_row_offsets=meta(batch + 1),
            ring_ids=meta(batch) if state_page is None else meta(batch, 64),
            slot_mapping=meta(num_tokens),
            kv_out=meta(num_tokens, dim, dtype=torch.bfloat16) if with_rows else None,
        )

    return launch


CSA, HCA = Pooling(4, overlap=True), Pooling(128)

LAUNCHES = {
    "pool_windows ratio 4": pool(FP8_584, CSA),
    "pool_windows ratio 4, index keys": pool(INDEX_FP8, CSA, dtype=torch.float32),
    "pool_windows ratio 4, paged state": pool(FP8_584, CSA, dtype=torch.float32, state_page=4),
    "pool_windows ratio 128": pool(FP8_584, HCA),
    "pool_windows ratio 128, paged state": pool(FP8_584, HCA, dtype=torch.float32, state_page=8),
    "pool_windows ratio 128, prefill": pool(FP8_584, HCA, num_tokens=8192, batch=4, with_rows=True),
    "pool_windows ratio 4, long step": pool(
        FP8_584, CSA, dtype=torch.float32, num_tokens=8192, batch=4
    ),
    "pool_windows ratio 128, long step on pages": pool(
        FP8_584, HCA, dtype=torch.float32, num_tokens=8192, batch=4, state_page=8
    ),
    "pool_windows ratio 2, latents": pool(
        FP8_584, Pooling(2), dtype=torch.float32, ring=8, bias=False, with_rows=True
    ),
    "pool_windows ratio 2, long step": pool(
        FP8_584,
        Pooling(2),
        dtype=torch.float32,
        num_tokens=8192,
        batch=4,
        ring=8,
        bias=False,
        with_rows=True,
    ),
}

"""Launches of the gather kernels, for the compile check."""

import torch

from sparsemla import (
    BF16_576,
    FP4_288,
    FP8_528,
    FP8_584,
    FP8_DS_MLA,
    FP8_NOPE,
    PagedCache,
    dispatch,
    e4m3_format,
)

# Without an MMA, the PTX of sm_120 is that of sm_100.
TARGETS = ("sm_80", "gfx942")
ONE_OF = ("sm_90", "sm_89", "sm_100")  # no MMA


def meta(*shape, dtype=torch.int32):
    return torch.empty(shape, dtype=dtype, device="meta")


def to_slots(**kinds):
    def launch():
        dispatch.load("to_slots", "triton")(
            topk_indices=meta(4096, 2048),
            page_table=meta(32, 1024),
            request_ids=meta(4096),
            page_size=64,
            out=meta(4096, 2048),
            **kinds,
        )

    return launch


def entry_slots():
    dispatch.load("entry_slots", "triton")(
        positions=meta(4096, dtype=torch.int64),
        page_table=meta(32, 1024),
        request_ids=meta(4096),
        ratio=4,
        page_size=64,
        out=meta(4096),
    )


def visible_slots():
    dispatch.load("visible_slots", "triton")(
        positions=meta(4096, dtype=torch.int64),
        page_table=meta(32, 1024),
        request_ids=meta(4096),
        width=128,
        ratio=1,
        page_size=64,
        out=meta(4096, 128),
        lengths=meta(4096),
    )


def gather(fmt):
    def launch():
        dispatch.load("gather_dequant", "triton")(
            cache=PagedCache.allocate(fmt, 512, 64, device="meta"),
            page_table=meta(4, 512),
            seq_lens=meta(4),
            workspace_starts=meta(4),
            out=meta(32768, fmt.head_dim, dtype=torch.bfloat16),
        )

    return launch


LAUNCHES = {
    "to_slots": to_slots(),
    "to_slots, prefills": to_slots(workspace_starts=meta(32), prefill_request_ids=meta(4096)),
    "entry_slots": entry_slots,
    "visible_slots": visible_slots,
    **{
        f"gather_dequant {fmt.name}": gather(fmt)
        for fmt in (
            BF16_576,
            FP8_DS_MLA,
            FP8_584,
            FP8_528,
            FP4_288,
            e4m3_format(),
            e4m3_format(scale_block=576),
            FP8_NOPE,
        )
    },
}

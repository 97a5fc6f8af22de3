"""What the Hopper kernel of few heads takes, and how it divides shared memory; no GPU is needed."""

import pytest
import torch

pytest.importorskip("triton")

from sparsemla import BF16_512, BF16_576, FP8_584, FP8_DS_MLA, PagedCache, e4m3_format
from sparsemla.kernels.common import hopper_columns

FORMATS = (
    BF16_512,
    BF16_576,
    FP8_584,
    FP8_DS_MLA,
    e4m3_format(scale_block=0),
    e4m3_format(scale_block=64),
    e4m3_format(scale_block=128),
    e4m3_format(scale_block=576),
    e4m3_format(512, 512, 512),
)


def queries(fmt, num_heads=16, dtype=torch.bfloat16):
    return torch.empty(1, 1, num_heads, fmt.head_dim, dtype=dtype)


def cache_of(fmt):
    return PagedCache.allocate(fmt, 2, 64)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_chunks_cover_every_dim_once(fmt):
    chunks = range(hopper_columns.num_chunks(fmt.fp8_dim, fmt.head_dim))
    dims = []
    for chunk in chunks:
        start = hopper_columns.chunk_start(fmt.fp8_dim, chunk)
        dims += range(start, start + hopper_columns.chunk_width(fmt.fp8_dim, start))
    assert dims == list(range(fmt.head_dim))


@pytest.mark.parametrize("num_heads", [1, 16, 17, 32])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_the_ring_holds_a_tile_and_a_chunk(fmt, num_heads):
    shared = hopper_columns.plan_shared(num_heads, [cache_of(fmt)])
    if (fmt.scale_block, shared) == (64, None):
        return
    assert shared.heads >= num_heads
    if fmt.fp8_dim:
        assert shared.ring > hopper_columns.num_chunks(fmt.fp8_dim, fmt.head_dim)


@pytest.mark.parametrize("extra", [None, FP8_584, FP8_DS_MLA], ids=str)
def test_takes(extra):
    fmt = FP8_584 if extra is FP8_584 else FP8_DS_MLA
    extra = extra and cache_of(extra)
    assert hopper_columns.refuse(queries(fmt), cache_of(fmt), extra) is None


def test_takes_rows_of_one_layer_of_several():
    cache = PagedCache.allocate(FP8_DS_MLA, 2, 3, num_layers=2).layer(1)
    assert hopper_columns.refuse(queries(FP8_DS_MLA), cache) is None


def unaligned():
    return PagedCache(torch.empty(2, 64, 660, dtype=torch.uint8)[..., 4:], FP8_DS_MLA)


@pytest.mark.parametrize(
    ("q", "cache", "extra", "reason"),
    [
        (queries(FP8_DS_MLA, dtype=torch.float16), cache_of(FP8_DS_MLA), None, "float16"),
        (queries(FP8_DS_MLA, 33), cache_of(FP8_DS_MLA), None, "up to 32 heads, got 33"),
        (queries(FP8_DS_MLA), cache_of(FP8_DS_MLA), cache_of(BF16_576), "both quantised or both"),
        (queries(BF16_576), cache_of(e4m3_format(scale_block=32)), None, "multiples of 64"),
        (queries(BF16_576), cache_of(e4m3_format(192, 128)), None, "value_dim 512"),
        (queries(FP8_DS_MLA), unaligned(), None, "multiples of 16 bytes"),
        (queries(BF16_576, 32), cache_of(e4m3_format(scale_block=64)), None, "no room"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_refuses(q, cache, extra, reason):
    assert reason in hopper_columns.refuse(q, cache, extra)

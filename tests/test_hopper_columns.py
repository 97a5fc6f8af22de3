"""What the Hopper kernel of few heads takes, and how it divides shared memory; no GPU is needed."""

import pytest

pytest.importorskip("triton")

from sparsemla import BF16_512, BF16_576, FP8_584, FP8_DS_MLA, e4m3_format
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
    shared = hopper_columns.plan_shared(num_heads, fmt)
    if (fmt.scale_block, shared) == (64, None):
        return
    assert shared.heads >= num_heads
    if fmt.fp8_dim:
        assert shared.ring > hopper_columns.num_chunks(fmt.fp8_dim, fmt.head_dim)


def test_has_no_room():
    assert hopper_columns.plan_shared(33, FP8_DS_MLA) is None
    assert hopper_columns.plan_shared(32, e4m3_format(scale_block=64)) is None

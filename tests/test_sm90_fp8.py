"""Chunks of FP8 rows in the Hopper kernel; no GPU is needed."""

import pytest

pytest.importorskip("triton")

from sparsemla import FP8_584, FP8_DS_MLA, e4m3_format
from sparsemla.kernels.attention.sm90 import fp8
from sparsemla.kernels.attention.sm90.chunks import chunk_start, chunk_width, num_chunks

FORMATS = (
    FP8_584,
    FP8_DS_MLA,
    e4m3_format(scale_block=0),
    e4m3_format(scale_block=64),
    e4m3_format(512, 512, 512),
)


@pytest.mark.parametrize("fmt", FORMATS)
def test_every_chunk_is_copied_once(fmt):
    order = fp8.copy_order(fmt.fp8_dim, fmt.head_dim)
    assert sorted(order) == list(range(num_chunks(fmt.fp8_dim, fmt.head_dim)))


@pytest.mark.parametrize("fmt", FORMATS)
def test_each_pv_warpgroup_has_half_of_the_value_dims(fmt):
    for half in range(2):
        starts = [
            chunk_start(fmt.fp8_dim, chunk)
            for chunk in fp8.value_chunks(fmt.fp8_dim, fmt.head_dim, half)
        ]
        dims = [start + dim for start in starts for dim in range(chunk_width(fmt.fp8_dim, start))]
        assert dims == list(range(256 * half, 256 * half + 256))


@pytest.mark.parametrize("fmt", FORMATS)
def test_rope_dims_are_one_chunk_and_copied_last(fmt):
    count = fp8.num_value_chunks(fmt.fp8_dim, fmt.head_dim)
    assert num_chunks(fmt.fp8_dim, fmt.head_dim) - count == (fmt.head_dim > 512)
    if fmt.head_dim > 512:
        assert fp8.copy_order(fmt.fp8_dim, fmt.head_dim)[-1] == count

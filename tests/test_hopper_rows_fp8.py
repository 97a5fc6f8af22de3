"""How the Hopper kernel over quantised rows deals out their dims; no GPU is needed."""

import pytest

pytest.importorskip("triton")

from sparsemla import FP8_584, FP8_DS_MLA, e4m3_format
from sparsemla.kernels.common import hopper_rows_fp8 as kernel
from sparsemla.kernels.common.hopper_chunks import chunk_start, chunk_width, num_chunks

FORMATS = (
    FP8_584,
    FP8_DS_MLA,
    e4m3_format(scale_block=0),
    e4m3_format(scale_block=64),
    e4m3_format(512, 512, 512),
)


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_every_chunk_is_copied_once(fmt):
    order = kernel.chunk_order(fmt.fp8_dim, fmt.head_dim)
    assert sorted(order) == list(range(num_chunks(fmt.fp8_dim, fmt.head_dim)))
    turns = [kernel.turn_of(fmt.fp8_dim, fmt.head_dim, chunk) for chunk in order]
    assert turns == list(range(len(order)))


@pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
def test_each_warpgroup_has_half_of_the_value(fmt):
    converted = []
    for who in range(2):
        chunks = kernel.chunks_of(fmt.fp8_dim, fmt.head_dim, who)
        assert chunk_width(fmt.fp8_dim, chunk_start(fmt.fp8_dim, chunks[0])) == 128
        dims = [
            kernel.dim_of(fmt.fp8_dim, chunk, piece) + dim
            for chunk in chunks
            for piece in range(chunk_width(fmt.fp8_dim, chunk_start(fmt.fp8_dim, chunk)) // 64)
            for dim in range(64)
        ]
        assert [dim for dim in dims if dim < 512] == list(range(256 * who, 256 * who + 256))
        converted += dims
    ready = 64 if kernel.has_ready(fmt.fp8_dim, fmt.head_dim, 0) else 0
    assert sorted(converted) == list(range(fmt.head_dim - ready))
    assert not kernel.has_ready(fmt.fp8_dim, fmt.head_dim, 1)

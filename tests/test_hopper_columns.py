"""The Hopper kernel of few heads: what it takes, and how memory and heads are dealt out; no GPU."""

import pytest
import torch

pytest.importorskip("triton")

from sparsemla import BF16_512, BF16_576, FP8_584, FP8_DS_MLA, PagedCache, e4m3_format
from sparsemla.kernels.common import hopper_columns
from sparsemla.kernels.decode import sm90

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


def test_tiles_of_heads_are_put_back_in_their_places(monkeypatch):
    def attend(q, q_strides, cache, main, results, shape, softmax_scale, num_groups, **extra):
        assert (num_groups, shape) == (15, (16, 16, 5, 2))
        assert main.keys_token == 0
        assert (results.out_token, results.lse_token) == (16 * 512, 16)
        results.out.copy_(q[..., :512])
        results.lse.copy_(q[..., 0])

    def merge(outs, lses, attn_sink, out, lse):
        out.copy_(outs.mean(0))
        lse.copy_(lses.mean(0))

    monkeypatch.setattr(sm90, "attend_columns", attend)
    monkeypatch.setattr(sm90, "merge_splits", merge)
    q = torch.randn(80, 3, 1, 576, dtype=torch.bfloat16).permute(1, 2, 0, 3)
    out, lse = torch.empty(3, 1, 80, 512, dtype=q.dtype), torch.empty(3, 1, 80)
    sm90.sparse_decode(
        q=q,
        cache=PagedCache.allocate(FP8_DS_MLA, 2, 64),
        topk_indices=torch.zeros(3, 1, 256, dtype=torch.int32),
        softmax_scale=1.0,
        topk_lengths=None,
        attn_sink=None,
        extra_cache=None,
        extra_topk_indices=None,
        extra_topk_lengths=None,
        head_tile=16,
        num_splits=2,
        workspace=None,
        out=out,
        lse=lse,
    )
    assert torch.equal(out, q[..., :512])
    assert torch.equal(lse, q[..., 0].float())

"""Layouts and shared memory of the few-heads FP8 kernel for SM90; no GPU is needed."""

import pytest
import torch

pytest.importorskip("triton")

from sparsemla import FP8_584, FP8_DS_MLA, PagedCache, dispatch, e4m3_format
from sparsemla.kernels.attention import calls
from sparsemla.kernels.attention.arguments import Splits
from sparsemla.kernels.attention.sm90 import fp8_few_heads as kernel

FORMATS = (
    FP8_584,
    FP8_DS_MLA,
    e4m3_format(scale_block=0),
    e4m3_format(scale_block=64),
    e4m3_format(scale_block=128),
    e4m3_format(scale_block=576),
    e4m3_format(512, 512, 512),
)


def positions_of(layout, warp, lane):
    """Row and column of each register of a thread."""
    bases = (*layout.lane_bases, *layout.warp_bases)
    thread = [base for i, base in enumerate(bases) if (warp * 32 + lane) >> i & 1]
    for register in range(1 << len(layout.reg_bases)):
        own = [base for i, base in enumerate(layout.reg_bases) if register >> i & 1]
        yield tuple(sum(base[axis] for base in own + thread) for axis in range(2))


@pytest.mark.parametrize("layout", [kernel.k_layout(64), kernel.k_layout(128), kernel.v_layout()])
def test_each_code_is_read_by_one_thread(layout):
    threads = [(warp, lane) for warp in range(8) for lane in range(32)]
    read = [place for thread in threads for place in positions_of(layout, *thread)]
    keys, dims = layout.shape
    assert sorted(read) == [(key, dim) for key in range(keys) for dim in range(dims)]


def test_a_thread_holds_pairs_of_neighbouring_keys():
    first = list(positions_of(kernel.v_layout(), 1, 9))[:8]
    keys = [key for key, _ in first]
    dims = [dim for _, dim in first]
    assert keys == [keys[0]] * 4 + [keys[0] + 1] * 4
    assert dims == 2 * list(range(dims[0], dims[0] + 4))


@pytest.mark.parametrize("num_rows", [1, 16, 17, 32])
@pytest.mark.parametrize("fmt", FORMATS)
def test_query_rows_and_scales_fit(fmt, num_rows):
    heads, words = kernel.plan_shared(num_rows, fmt)
    assert heads >= num_rows
    assert 4 * words >= fmt.num_scales * (fmt.scale_dtype.itemsize if fmt.scale_block else 0)


@pytest.mark.parametrize(
    ("page", "row", "itemsize", "elements"),
    [(64 * 656, 656, 1, 16), (584, 576, 1, 8), (37376, 576, 1, 16), (292, 288, 2, 4)],
)
def test_alignment_of_rows(page, row, itemsize, elements):
    assert kernel.alignment(page, row, itemsize) == elements


def test_tiles_of_heads_are_merged_into_their_heads(monkeypatch):
    def launch(queries, cache, main, results, shape, softmax_scale, num_groups, **extra):
        q = queries.q
        assert (num_groups, shape) == (15, (16, 16, 5, 2))
        assert main.keys_token == 0
        assert (results.out_token, results.lse_token) == (16 * 512, 16)
        results.out.copy_(q[..., :512])
        results.lse.copy_(q[..., 0])

    def merge(outs, lses, attn_sink, out, lse):
        out.copy_(outs.mean(0))
        lse.copy_(lses.mean(0))

    monkeypatch.setattr(kernel, "launch", launch)
    monkeypatch.setattr(calls, "merge_splits", merge)
    q = torch.randn(80, 3, 1, 576, dtype=torch.bfloat16).permute(1, 2, 0, 3)
    out, lse = torch.empty(3, 1, 80, 512, dtype=q.dtype), torch.empty(3, 1, 80)
    dispatch.load("sparse_decode", "sm90")(
        q=q,
        cache=PagedCache.allocate(FP8_DS_MLA, 2, 64),
        topk_indices=torch.zeros(3, 1, 256, dtype=torch.int32),
        softmax_scale=1.0,
        splits=Splits(2, 16),
        out=out,
        lse=lse,
    )
    assert torch.equal(out, q[..., :512])
    assert torch.equal(lse, q[..., 0].float())

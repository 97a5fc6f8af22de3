"""Tiling of Hopper's indexer kernel and the problems that it takes; no GPU is needed."""

import dataclasses
import itertools

import pytest
import torch

pytest.importorskip("triton")

from sparsemla import INDEX_FP8, INDEX_MXFP4
from sparsemla.dispatch import Problem, explain
from sparsemla.kernels.indexer import sm90

SCORES = Problem(
    "indexer_scores_paged",
    "cuda",
    (9, 0),
    torch.float8_e4m3fn,
    INDEX_FP8.name,
    num_heads=64,
    head_dim=128,
    page_size=64,
)


@pytest.mark.parametrize("keys", [64, 128])
@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 16])
def test_partial_sums_of_a_score_are_in_one_thread(tokens, keys):
    """Each of the four is in exactly one thread, except for a spare bit."""
    layout = sm90.partials_layout(tokens, keys)
    places = []
    bases = [*layout.reg_bases, *layout.lane_bases, *layout.warp_bases]
    for bits in itertools.product((0, 1), repeat=len(bases)):
        place = (0, 0, 0)
        for bit, base in zip(bits, bases, strict=True):
            if bit:
                place = tuple(x ^ y for x, y in zip(place, base, strict=True))
        places.append(place)
    assert len(layout.lane_bases) == 5
    assert set(places) == set(itertools.product(range(keys), range(tokens), range(4)))
    assert len(places) == len(set(places)) * (2 if tokens == 1 else 1)
    assert layout.reg_bases[:2] == [[0, 0, 1], [0, 0, 2]]


@pytest.mark.parametrize("dim", [16, 32, 96, 128])
@pytest.mark.parametrize("heads", [1, 16, 17, 64, 100, 128, 256])
@pytest.mark.parametrize("query_len", [1, 2, 3, 4096])
def test_a_group_fits_an_mma(query_len, heads, dim):
    tokens, block_h, block_d = sm90.choose_groups(query_len, heads, dim)
    assert block_h >= heads
    assert block_d >= dim
    assert tokens * block_h <= sm90.MAX_HEADS
    assert tokens == 1 or tokens < 2 * query_len


@pytest.mark.parametrize("page_size", [0, 64, 192])
@pytest.mark.parametrize("heads", [1, 32, 64, 256])
@pytest.mark.parametrize("query_len", [1, 2, 4096])
def test_a_stage_belongs_to_one_consumer(query_len, heads, page_size):
    tiling = sm90.choose_tiling(
        sm90.choose_groups(query_len, heads, 128), heads, True, False, 1, page_size
    )
    assert tiling.stages % sm90.CONSUMERS.value == 0
    assert tiling.stages & (tiling.stages - 1) == 0
    assert tiling.keys % sm90.COPY_KEYS.value == 0
    # The accumulator of a tile fits the registers: at most 64 keys by 256 heads.
    assert tiling.keys * tiling.tokens * tiling.block_h <= 64 * sm90.MAX_HEADS


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.bfloat16}, "needs float8_e4m3fn queries, got torch.bfloat16"),
        ({"cache_format": INDEX_MXFP4.name}, "Hopper has no FP4 MMA, got index_mxfp4"),
        ({"num_heads": 257}, "up to 256 heads of up to 128 dims, got 257 of 128"),
        ({"head_dim": 256}, "got 64 of 256"),
        ({"page_size": 61}, "needs pages of a multiple of 64 keys, got 61"),
        ({"aligned": False}, "rows that start at multiples of 16 bytes"),
        ({"capability": (10, 0)}, "needs a Hopper GPU"),
    ],
    ids=["dtype", "keys", "heads", "dims", "pages", "alignment", "GPU"],
)
def test_problems_that_the_kernel_refuses(change, reason):
    explained = explain(dataclasses.replace(SCORES, **change))
    assert explained.chosen == "triton"
    assert reason in dict(explained.refusals)["sm90"]


@pytest.mark.parametrize("op", ["indexer_scores", "indexer_scores_paged", "indexer_topk"])
def test_problems_that_the_kernel_takes(op):
    assert explain(dataclasses.replace(SCORES, op=op)).chosen == "sm90"

"""Tiling of Hopper's indexer kernel and the calls that it takes; no GPU is needed."""

import itertools

import pytest
import torch

pytest.importorskip("triton")

import sparsemla
from sparsemla import (
    INDEX_FP8,
    INDEX_MXFP4,
    PagedCache,
    bf16_format,
    e4m3_format,
    indexer_scores,
    indexer_scores_paged,
    indexer_topk,
)
from sparsemla.kernels.indexer import sm90


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
    assert tiling.block_n % sm90.COPY_KEYS.value == 0
    # The accumulator of a tile fits the registers: at most 64 keys by 256 heads.
    assert tiling.block_n * tiling.tokens * tiling.block_h <= 64 * sm90.MAX_HEADS


def explained(op, heads=64, dim=128, dtype=torch.float8_e4m3fn, gpu="sm_90", shift=0, **cache):
    """The choice of a kernel for 3 tokens of one request with 128 keys."""
    with torch.device("meta"):
        q = torch.empty(3, heads, dim + shift, dtype=dtype)[..., :dim]
        weights, lengths = torch.empty(3, heads), torch.empty(1, dtype=torch.int32)
        paged = PagedCache.allocate(
            cache.get("fmt", INDEX_FP8 if dim == 128 else e4m3_format(dim, dim, 0)),
            num_pages=2,
            page_size=cache.get("page_size", 64),
        )
        if cache.get("pages_apart"):
            pages = torch.empty(2, paged.data[0].numel() + 8, dtype=torch.uint8)[:, :-8]
            paged = PagedCache(pages.unflatten(1, paged.data.shape[1:]), paged.format)
        table, offsets = torch.empty(1, 2, dtype=torch.int32), torch.empty(2, dtype=torch.int32)
        keys = torch.empty(128, dim + cache.get("key_shift", 0), dtype=dtype)[:, :dim]
        ranges = torch.empty(3, dtype=torch.int32)
    calls = {
        "indexer_scores": lambda: indexer_scores(
            q, weights, keys, None, row_starts=ranges, row_ends=ranges
        ),
        "indexer_scores_paged": lambda: indexer_scores_paged(
            q[None], weights[None], paged, table, lengths, max_seq_len=128
        ),
        "indexer_topk": lambda: indexer_topk(
            q,
            weights,
            paged,
            input_row_offsets=offsets,
            seq_lens=lengths,
            page_table=table,
            topk=8,
        ),
    }
    (choice,) = sparsemla.explain(calls[op], gpu=gpu).choices
    return choice


PAGED = ("indexer_scores_paged", "indexer_topk")
OPS = ("indexer_scores", *PAGED)


@pytest.mark.parametrize(
    ("ops", "change", "reason"),
    [
        (OPS[:1], {"dtype": torch.bfloat16}, "needs float8_e4m3fn queries, got torch.bfloat16"),
        (
            PAGED,
            {"dtype": torch.bfloat16, "fmt": bf16_format(128)},
            "needs float8_e4m3fn queries, got torch.bfloat16",
        ),
        (
            PAGED,
            {"dtype": torch.bfloat16, "fmt": INDEX_MXFP4},
            "needs e4m3 keys, got index_mxfp4",
        ),
        (OPS, {"heads": 257}, "up to 256 heads of up to 128 dims, got 257 of 128"),
        (OPS, {"dim": 256}, "got 64 of 256"),
        (PAGED, {"page_size": 61}, "needs pages of a multiple of 64 keys, got 61"),
        (OPS, {"shift": 8}, "rows that start at multiples of 16 bytes"),
        (OPS[:1], {"key_shift": 8}, "rows that start at multiples of 16 bytes"),
        (PAGED, {"pages_apart": True}, "rows that start at multiples of 16 bytes"),
        (OPS, {"gpu": "sm_100"}, "needs a Hopper GPU"),
    ],
    ids=[
        "dtype",
        "pages' dtype",
        "fp4",
        "heads",
        "dims",
        "pages",
        "queries",
        "keys",
        "cache",
        "GPU",
    ],
)
def test_calls_that_the_kernel_refuses(ops, change, reason):
    for op in ops:
        choice = explained(op, **change)
        assert choice.kernel != "sm90"
        assert reason in dict(choice.refusals)["sm90"]


@pytest.mark.parametrize("op", OPS)
def test_calls_that_the_kernel_takes(op):
    assert explained(op).kernel == "sm90"
    assert explained(op, heads=256, page_size=192).kernel == "sm90"

"""Contexts that the ranks of a group share."""

import itertools
import re

import pytest
import torch

from sparsemla import ContextShard
from sparsemla_lab.testing.compare import assert_equal

DTYPES = torch.int32, torch.int64, torch.uint32


@pytest.mark.parametrize(("interleave", "num_ranks"), [*itertools.product((1, 3, 64), (1, 2, 3))])
def test_ranks_share_all_positions_in_turns(interleave, num_ranks):
    shards = [ContextShard(rank, num_ranks, interleave) for rank in range(num_ranks)]
    for seq_len in range(400):
        owners = torch.arange(seq_len) // interleave % num_ranks
        for rank, shard in enumerate(shards):
            own = (owners == rank).nonzero().flatten()
            assert int(shard.lengths(torch.tensor(seq_len))) == len(own)
            assert_equal("positions", shard.positions(torch.arange(len(own))), own)
        assert shards[0].longest(seq_len) == (owners == 0).sum()
    rows = torch.tensor([-1, 0, -(2**31)], dtype=torch.int32)
    for rank, shard in enumerate(shards):
        assert shard.positions(rows).tolist() == [-1, rank * interleave, -1]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("interleave", "num_ranks"), [*itertools.product((1, 3, 64), (1, 2, 4))])
def test_a_position_has_a_row_on_one_rank(interleave, num_ranks, dtype):
    positions = torch.arange(1500).to(dtype)
    for rank in range(num_ranks):
        shard = ContextShard(rank, num_ranks, interleave)
        owner, rows = shard.owner(positions), shard.to_local(positions)
        assert_equal("owner", owner, positions.to(owner.dtype) // interleave % num_ranks)
        own = owner == rank
        assert (rows[~own] == -1).all()
        assert_equal("rows", rows[own], torch.arange(own.sum()).to(rows.dtype))
        assert_equal("positions", shard.positions(rows[own]), positions.to(rows.dtype)[own])


@pytest.mark.parametrize(("interleave", "num_ranks"), [*itertools.product((1, 64), (1, 2, 4, 8))])
def test_parts_depend_on_no_rank_and_move_no_row(interleave, num_ranks):
    positions, whole = torch.arange(1500), ContextShard(0, 1, interleave, parts=8)
    assert (whole.num_parts, whole.own_parts) == (8, range(8))
    for rank in range(num_ranks):
        shard = ContextShard(rank, num_ranks, interleave, parts=8)
        alone = ContextShard(rank, num_ranks, interleave)
        assert (alone.num_parts, [*alone.own_parts]) == (num_ranks, [rank])
        assert_equal("part", shard.part(positions), whole.part(positions))
        assert_equal("part", alone.part(positions), alone.owner(positions))
        assert_equal("row", shard.to_local(positions), alone.to_local(positions))
        own = torch.isin(shard.part(positions), torch.tensor([*shard.own_parts]))
        assert_equal("own", own, shard.owner(positions) == rank)


def test_negative_positions_are_no_ones():
    for dtype, least in ((torch.int32, -(2**31)), (torch.int64, -(2**63))):
        positions = torch.tensor([-1, least, 2**31 - 1], dtype=dtype)
        for rank, row in ((0, -1), (1, 2**30 - 1)):
            shard = ContextShard(rank, 2)
            assert shard.owner(positions).tolist() == [-1, -1, 1]
            assert shard.part(positions).tolist() == [-1, -1, 1]
            assert shard.to_local(positions).tolist() == [-1, -1, row]
    ends = torch.tensor([-1], dtype=torch.int32).view(torch.uint32)
    assert shard.owner(ends).tolist() == shard.to_local(ends).tolist() == [-1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((2, 2), "rank must be below 2, got 2"),
        ((-1, 2), "rank must be at least 0, got -1"),
        ((0, 0), "num_ranks must be at least 1, got 0"),
        ((0, 2, 0), "interleave must be at least 1, got 0"),
        ((0, 2, 2**28, 8), "interleave must be below 268435456, got 268435456"),
        ((0, 3, 1, 8), "parts must be a multiple of num_ranks = 3, got 8"),
        ((0, 4, 1, 2), "parts must be a multiple of num_ranks = 4, got 2"),
        ((0, 2, 1, 0), "parts must be at least 1, got 0"),
    ],
)
def test_shares_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        ContextShard(*arguments)


def test_the_largest_turn_is_computed_in_32_bits():
    last = torch.tensor([2**31 - 1], dtype=torch.int32)
    for shard in (ContextShard(7, 8, 2**28 - 1), ContextShard(0, 1, 2**31 - 1)):
        wide = last.long()
        assert int(shard.owner(last)) == int(shard.owner(wide))
        assert int(shard.to_local(last)) == int(shard.to_local(wide))
        assert int(shard.lengths(last)) == int(shard.lengths(wide))

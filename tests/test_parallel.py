"""Contexts that the ranks of a group share."""

import itertools
import math
import re

import pytest
import torch

import processes
from sparsemla import (
    FP8_DS_MLA,
    INDEX_FP8,
    ContextShard,
    PagedCache,
    exchange_states,
    exchange_topk,
    indexer_scores_paged,
    merge_states,
    own_positions,
    select_topk,
    sparse_decode,
    to_slots,
)
from sparsemla_lab.testing.cases import Draw, decode_queries, sinks
from sparsemla_lab.testing.compare import DECODE_LSE, assert_close, assert_equal

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


def scores_of(draw, num_tokens, num_keys):
    """Scores with ties, infinities and NaN."""
    scores = draw.integers(-9, 9, num_tokens, num_keys).float()
    scores[draw.integers(0, 12, num_tokens, num_keys) == 0] = math.nan
    scores[draw.integers(0, 12, num_tokens, num_keys) == 0] = -math.inf
    return scores


def selected_of(shard, scores, ends, topk, group, out=None):
    """A rank's selection from the scores of its own keys, and of all others'."""
    columns = shard.longest(scores.shape[1])
    own = shard.positions(torch.arange(columns))
    part = scores[:, own.clamp(max=scores.shape[1] - 1)]  # garbage behind the last of its own
    rows = select_topk(part, topk=min(topk, columns), row_ends=shard.lengths(ends))
    values = part.gather(1, rows.clamp(min=0).long())
    return exchange_topk(values, shard.positions(rows), topk, group=group, out=out)


@pytest.mark.parametrize(("num_ranks", "interleave"), [(1, 1), (2, 1), (3, 4), (4, 64)])
def test_every_rank_selects_as_one_alone(num_ranks, interleave):
    draw = Draw(70)
    scores, ends = scores_of(draw, 5, 150), draw.tensor([0, 1, 63, 149, 150])

    def select(rank, group):
        shard = ContextShard(rank, num_ranks, interleave)
        out = torch.full((5, 20), 7, dtype=torch.int32)
        assert selected_of(shard, scores, ends, 20, group, out) is out
        assert_equal("selection", selected_of(shard, scores, ends, 20, group), out)
        return out

    expected = select_topk(scores, topk=20, row_ends=ends)
    for selected in processes.on_threads(num_ranks, select):
        assert_equal("selection", selected, expected)


def states_of(draw, parts, tokens, heads, dtype):
    """Partial results; a part without a key is NaN."""
    outs, lses = (
        draw.normal(parts, tokens, heads, 24, dtype=dtype),
        draw.normal(parts, tokens, heads),
    )
    empty = draw.integers(0, 4, parts, tokens, heads) == 0
    empty[:, -1:] = True
    outs[empty], lses[empty] = math.nan, -math.inf
    return outs, lses


@pytest.mark.parametrize("scatter", ["heads", "tokens", None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("num_ranks", "parts"), [(1, 1), (1, 4), (2, 2), (3, 6), (4, 8)])
def test_states_of_all_parts_are_merged_in_their_order(num_ranks, parts, dtype, scatter):
    draw, tokens, heads = Draw(71), 2 * num_ranks, 3 * num_ranks
    outs, lses = states_of(draw, parts, tokens, heads, dtype)
    sink = sinks(draw, heads)
    expected = merge_states(outs, lses, attn_sink=sink)

    def share(tensor, rank, dim):
        return tensor.unflatten(dim, (num_ranks, -1)).select(dim, rank)

    def merge(rank, group):
        own = [*ContextShard(rank, num_ranks, parts=parts).own_parts]
        # States as attention leaves them: of a token all parts.
        states = [x[own].transpose(0, 1).contiguous().transpose(0, 1) for x in (outs, lses)]
        logits = share(sink, rank, 0) if scatter == "heads" else sink
        options = {"group": group, "scatter": scatter, "attn_sink": logits}
        results = exchange_states(*states, **options)
        out, lse = (torch.full_like(x, 7) for x in results)
        assert exchange_states(*states, **options, out=out, lse=lse) == (out, lse)
        for given, result in zip((out, lse), results, strict=True):
            assert_equal("out", given, result)
        return out, lse

    for rank, results in enumerate(processes.on_threads(num_ranks, merge)):
        for result, whole in zip(results, expected, strict=True):
            wanted = whole
            if scatter is not None:
                wanted = share(whole, rank, ("tokens", "heads").index(scatter))
            assert_equal("result", result, wanted.contiguous())
            assert not result.isnan().any()


@pytest.mark.parametrize("scatter", ["heads", "tokens", None])
def test_a_step_without_tokens_is_exchanged(scatter):
    def merge(rank, group):
        empty = torch.empty(2, 0, 4, 24), torch.empty(2, 0, 4)
        selected = exchange_topk(torch.empty(0, 5), torch.empty(0, 5).int(), 3, group=group)
        return selected, *exchange_states(*empty, group=group, scatter=scatter)

    heads = 2 if scatter == "heads" else 4
    for results in processes.on_threads(2, merge):
        assert [[*x.shape] for x in results] == [[0, 3], [0, heads, 24], [0, heads]]


def test_shares_that_are_not_even_are_refused():
    def merge(rank, group):
        states = torch.zeros(1, 3, 5, 8), torch.zeros(1, 3, 5)
        for scatter, got in (("heads", 5), ("tokens", 3)):
            wanted = f"exchange_states: outs must have a multiple of 2 {scatter}, .* got {got}"
            with pytest.raises(ValueError, match=wanted):
                exchange_states(*states, group=group, scatter=scatter)
        with pytest.raises(ValueError, match="scatter must be 'heads' or 'tokens', got 'parts'"):
            exchange_states(*states, group=group, scatter="parts")
        even = torch.zeros(1, 3, 4, 8), torch.zeros(1, 3, 4)
        with pytest.raises(ValueError, match=r"attn_sink must have shape \[H/R\] = \[2\], got"):
            exchange_states(*even, group=group, attn_sink=torch.zeros(4))
        with pytest.raises(ValueError, match=r"lse must have shape \[T, H/R\] = \[3, 2\], got"):
            exchange_states(*even, group=group, lse=torch.zeros(3, 4))

    processes.on_threads(2, merge)


PAGE_SIZE, TOPK, HEADS = 8, 40, 16


class Contexts:
    """Requests of one new token, with their keys, latent rows and queries."""

    def __init__(self, seq_lens):
        draw = Draw(72)
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        self.keys = draw.normal(sum(seq_lens), 128).split(seq_lens)
        self.rows = draw.normal(sum(seq_lens), 576).split(seq_lens)
        self.index_q = draw.normal(len(seq_lens), 4, 128).to(torch.float8_e4m3fn)
        self.weights = draw.normal(len(seq_lens), 4)
        self.q = decode_queries(draw, len(seq_lens), HEADS, 576)
        self.sink = sinks(draw, HEADS)

    def caches(self, shard):
        """A rank's keys and rows on random pages, with NaN around them, and its page table."""
        pages = -(-shard.longest(int(self.seq_lens.max())) // PAGE_SIZE)
        table = Draw(shard.rank + 100 * shard.num_ranks).permutation(len(self.seq_lens) * pages)
        table = table.view(len(self.seq_lens), pages).int()
        caches = []
        for fmt, contexts in ((INDEX_FP8, self.keys), (FP8_DS_MLA, self.rows)):
            cache = PagedCache.allocate(fmt, table.numel(), PAGE_SIZE)
            cache.data.view(torch.uint8).fill_(255)
            for request, values in enumerate(contexts):
                own = shard.positions(torch.arange(int(shard.lengths(self.seq_lens[request]))))
                rows = torch.arange(len(own))
                slots = table[request, rows // PAGE_SIZE].long() * PAGE_SIZE + rows % PAGE_SIZE
                cache.write(slots, values[own])
            caches.append(cache)
        return *caches, table

    def step(self, shard, group):
        """A rank's selection, and the attention of its heads."""
        keys, rows, table = self.caches(shard)
        lengths, columns = shard.lengths(self.seq_lens), table.shape[1] * PAGE_SIZE
        scores = indexer_scores_paged(
            self.index_q[:, None],
            self.weights[:, None],
            keys,
            table,
            lengths[:, None],
            max_seq_len=columns,
        )[:, 0]
        best = select_topk(scores, topk=min(TOPK, columns), row_ends=lengths)
        values = scores.gather(1, best.clamp(min=0).long())
        selected = exchange_topk(values, shard.positions(best), TOPK, group=group)

        # Each list of a token is a request of its own.
        positions, counts = own_positions(selected, shard=shard)
        tokens, parts, _ = positions.shape
        requests = torch.arange(tokens, dtype=torch.int32)
        slots = to_slots(positions.flatten(1), table, requests, page_size=PAGE_SIZE)
        outs, lses = sparse_decode(
            self.q.repeat_interleave(parts, 0)[:, None],
            rows,
            slots.view(tokens * parts, 1, TOPK),
            softmax_scale=0.07,
            topk_lengths=counts.flatten(),
            num_splits=1,
        )
        outs, lses = (x[:, 0].unflatten(0, (tokens, parts)).transpose(0, 1) for x in (outs, lses))
        share = HEADS // shard.num_ranks
        sink = self.sink[shard.rank * share :][:share]
        return selected, *exchange_states(outs, lses, group=group, attn_sink=sink)


def joined(ranks):
    """The selection, which all ranks have, and the out and lse of all heads."""
    selections, outs, lses = zip(*ranks, strict=True)
    for selected in selections:
        assert_equal("selection", selected, selections[0])
    return selections[0], torch.cat(outs, 1), torch.cat(lses, 1)


def rank_of(rank, contexts, num_ranks, interleave, group=None):
    return contexts.step(ContextShard(rank, num_ranks, interleave, parts=8), group)


RESULTS = "selection", "out", "lse"
SEQ_LENS = [1, 9, 37, 130, 300]


@pytest.mark.parametrize("interleave", [1, 3, PAGE_SIZE])
def test_results_of_8_parts_do_not_depend_on_the_number_of_ranks(interleave):
    contexts = Contexts(SEQ_LENS)

    def steps(num_ranks):
        return joined(
            processes.on_threads(
                num_ranks,
                lambda rank, group: rank_of(rank, contexts, num_ranks, interleave, group),
            )
        )

    expected = selected, out, lse = steps(1)
    for num_ranks in (2, 4, 8):
        for name, got, wanted in zip(RESULTS, steps(num_ranks), expected, strict=True):
            assert_equal(name, got, wanted)

    _, rows, table = contexts.caches(ContextShard(0, 1))
    requests = torch.arange(len(SEQ_LENS), dtype=torch.int32)
    slots = to_slots(selected, table, requests, page_size=PAGE_SIZE)
    one_out, one_lse = sparse_decode(
        contexts.q[:, None], rows, slots[:, None], softmax_scale=0.07, attn_sink=contexts.sink
    )
    assert (selected >= 0).sum(1).tolist() == [min(n, TOPK) for n in SEQ_LENS]
    assert_close("lse", lse, one_lse[:, 0], DECODE_LSE)
    # Parts are rounded to bfloat16, by at most 2^-9 of each element, and so is their sum.
    wanted = one_out[:, 0].float()
    assert (out.float() - wanted).norm() < 2**-8 * wanted.norm()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_processes_agree_with_one_rank(tmp_path, num_ranks):
    contexts = Contexts(SEQ_LENS)
    ranks = processes.on_ranks(num_ranks, tmp_path, "cpu", rank_of, contexts, num_ranks, 3)
    alone = processes.on_threads(1, lambda rank, group: rank_of(rank, contexts, 1, 3, group))
    for name, got, wanted in zip(RESULTS, joined(ranks), alone[0], strict=True):
        assert_equal(name, got, wanted)

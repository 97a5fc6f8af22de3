"""The selection for rows that ranks divide, without vLLM: it brings only the collective."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from sparsemla import INDEX_FP8, PagedCache, reference
from sparsemla.backends.vllm import divided
from sparsemla.backends.vllm.divided import DividedRows, Division, Rule
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import assert_equal
from test_exchange import Meeting

PAGE_SIZE, HEADS, TOPK = 4, 4, 6
RANKS = (1, 2, 3, 4, 8)

BATCHES = {
    "a prompt": ([40], [40], 0),
    "a later chunk": ([37], [90], 0),
    "ragged": ([9, 1, 30, 0, 3], [30, 60, 30, 7, 100], 0),
    "decodes first": ([1, 2, 0, 12, 9], [60, 3, 8, 41, 9], 3),
    "fewer rows than ranks": ([1, 2], [30, 17], 1),
    "one row": ([1], [9], 0),
}


@pytest.fixture(params=[1, 4, 64], ids=lambda rows: f"blocks of {rows}")
def blocks(request, monkeypatch):
    monkeypatch.setattr(divided, "BLOCK_ROWS", request.param)
    return request.param


def divisions(query_lens, first, num_ranks):
    offsets = [0, *itertools.accumulate(query_lens)]
    return [Division(rank, num_ranks, offsets, first) for rank in range(num_ranks)]


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", BATCHES)
def test_each_row_belongs_to_one_rank_and_comes_back(blocks, name, num_ranks):
    query_lens, _, first = BATCHES[name]
    ranks = divisions(query_lens, first, num_ranks)
    rows, offsets = ranks[0].rows, ranks[0].offsets
    assert (rows.start, rows.stop) == (sum(query_lens[:first]), sum(query_lens))
    found = []
    for rank in ranks:
        own = []
        for piece in rank.pieces():
            end = offsets[piece.request + 1] - piece.behind
            assert 0 < piece.rows <= min(blocks, end - offsets[piece.request])
            own += range(end - piece.rows, end)
        assert rank.tokens()[: len(own)].tolist() == own
        assert len(rank.tokens()) == len(ranks[0].tokens()) < len(own) + 2 * blocks + num_ranks
        if num_ranks > 1:
            assert len([*rank.pieces()]) <= Division.most_pieces(rank.num_rows, len(query_lens))
        found += own
    assert sorted(found) == [*range(rows.start, rows.stop)]
    lists = torch.cat([rank.tokens() for rank in ranks])[:, None].expand(-1, 3)
    out = torch.full((rows.stop - rows.start, 3), -9, dtype=torch.int32)
    ranks[0].restore(lists, out)
    assert_equal("rows", out, torch.arange(rows.start, rows.stop).int()[:, None].expand(-1, 3))


@pytest.mark.parametrize("context", [0, 8192, 122880])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_ranks_get_nearly_equal_numbers_of_keys(num_ranks, context):
    ranks = divisions([8192], 0, num_ranks)
    keys = [int((rank.tokens().long() + context + 1).sum()) for rank in ranks]
    assert max(keys) - min(keys) <= 1024 * 8 // num_ranks * 64 * (num_ranks - 1)
    assert max(keys) <= 1.06 * sum(keys) / num_ranks


def test_division_weighs_scores_against_the_exchange():
    usual = Rule.default_row_keys(2048, 64)
    assert usual == 3072
    assert Rule.default_row_keys(2048, 32) == 2 * usual
    assert Rule.default_row_keys(1, 128) == 1
    rule = Rule(usual)
    prompts = {8192: True, 4096: False, 131072: True}  # of one step each
    for tokens, divides in prompts.items():
        assert rule.divides(tokens, tokens * (tokens + 1) // 2) == divides
    assert rule.divides(512, 512 * 32768)
    assert not rule.divides(64, 64 * 32768)  # the exchange itself takes longer
    for rows in (1023, 1024):
        assert Rule(usual, 1024).divides(rows, rows) == (rows == 1024)


class Step:
    """A batch, its keys on random pages and NaN around them. Scores are small integers, so exact.

    Args:
        ratio: tokens of a key.
    """

    def __init__(self, draw, query_lens, seq_lens, ratio=1):
        self.query_lens, self.ratio = query_lens, ratio
        self.tokens = sum(query_lens)
        self.q = draw.integers(-2, 3, self.tokens + 2, HEADS, 128).to(torch.float8_e4m3fn)
        self.weights = draw.integers(-3, 4, self.tokens + 2, HEADS).float()
        self.seq_lens = torch.tensor(seq_lens, dtype=torch.int32)
        columns = -(-max(seq_lens) // (ratio * PAGE_SIZE))
        pages = draw.permutation(len(seq_lens) * columns).int()
        self.table = pages.view(len(seq_lens), columns)
        self.cache = PagedCache.allocate(INDEX_FP8, len(pages), PAGE_SIZE)
        self.cache.data.view(torch.uint8).fill_(255)
        for request, seq_len in enumerate(seq_lens):
            own = torch.arange(seq_len // ratio)
            slots = self.table[request, own // PAGE_SIZE].long() * PAGE_SIZE + own % PAGE_SIZE
            self.cache.write(slots, draw.integers(-3, 4, len(own), 128).float())

    def expected(self):
        return reference.indexer_topk(
            self.q,
            self.weights,
            self.cache,
            input_row_offsets=torch.tensor([0, *self.query_lens]).cumsum(0),
            seq_lens=self.seq_lens,
            page_table=self.table,
            topk=TOPK,
            ratio=self.ratio,
        )

    def select(self, division, all_gather, max_workspace_bytes):
        """What a rank selects; rows before the divided ones and padding stay as they are."""
        rows = DividedRows.of(division, self.seq_lens, self.table, all_gather)
        out = torch.full((len(self.q), TOPK), -9, dtype=torch.int32)
        rows.select_topk(
            self.q,
            self.weights,
            self.cache,
            TOPK,
            columns=self.table.shape[1],
            ratio=self.ratio,
            max_workspace_bytes=max_workspace_bytes,
            out=out,
        )
        return out


@pytest.mark.parametrize("ratio", [1, 4])
@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("name", BATCHES)
def test_every_rank_selects_as_one_rank_alone(blocks, name, num_ranks, ratio):
    query_lens, seq_lens, first = BATCHES[name]
    step = Step(Draw(0), query_lens, seq_lens, ratio)
    ranks = divisions(query_lens, first, num_ranks)
    expected = step.expected()
    rows = ranks[0].rows
    expected[: rows.start] = expected[rows.stop :] = -9
    for max_workspace_bytes in (1, 1 << 20):
        meeting = Meeting(num_ranks)
        with ThreadPoolExecutor(num_ranks) as pool:
            found = [
                pool.submit(step.select, rank, meeting.all_gather(rank.rank), max_workspace_bytes)
                for rank in ranks
            ]
            for each in found:
                assert_equal("selection", each.result(), expected)
        (sizes,) = {tuple(sizes) for sizes in meeting.sizes}
        assert sizes == (len(ranks[0].tokens()) * TOPK,)

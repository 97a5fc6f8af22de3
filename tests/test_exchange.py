"""The selection from index keys that ranks share, without vLLM: it brings only the collective."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import processes
from sparsemla import INDEX_FP8, ContextShard, PagedCache, reference
from sparsemla.backends.vllm.exchange import Run, ShardedRows
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import assert_equal

PAGE_SIZE, HEADS, TOPK = 4, 4, 6


@pytest.mark.parametrize(
    ("query_lens", "runs"),
    [
        ([], []),
        ([0, 0], []),
        ([1], [(0, 1, 0, 1)]),
        ([1, 1, 7, 0], [(0, 2, 0, 1), (2, 3, 2, 7)]),
        ([1, 1, 1, 0, 10], [(0, 3, 0, 1), (4, 5, 3, 10)]),
        ([0, 2, 0, 2, 2], [(1, 2, 0, 2), (3, 5, 2, 2)]),
        ([3, 3, 1], [(0, 2, 0, 3), (2, 3, 6, 1)]),
    ],
    ids=str,
)
def test_neighbours_with_equally_many_tokens_are_a_run(query_lens, runs):
    offsets = torch.tensor([0, *query_lens]).cumsum(0).int()
    found = [(*_ends(run.requests), run.first_token, run.query_len) for run in Run.all_of(offsets)]
    assert found == runs


def _ends(part):
    assert part.step is None
    return part.start, part.stop


@pytest.mark.parametrize(
    ("run", "at_once", "pieces"),
    [
        (Run(slice(0, 3), 0, 1), 2, [(0, 2, 0, 2), (2, 3, 2, 3)]),
        (Run(slice(0, 3), 0, 1), 9, [(0, 3, 0, 3)]),
        (Run(slice(4, 5), 3, 10), 4, [(4, 5, 3, 7), (4, 5, 7, 11), (4, 5, 11, 13)]),
        (Run(slice(2, 5), 7, 3), 6, [(2, 4, 7, 13), (4, 5, 13, 16)]),
        (Run(slice(2, 5), 7, 3), 5, [(2, 3, 7, 10), (3, 4, 10, 13), (4, 5, 13, 16)]),
        (Run(slice(2, 4), 7, 3), 2, [(2, 3, 7, 9), (2, 3, 9, 10), (3, 4, 10, 12), (3, 4, 12, 13)]),
        (Run(slice(2, 4), 7, 2), 1, [(2, 3, 7, 8), (2, 3, 8, 9), (3, 4, 9, 10), (3, 4, 10, 11)]),
    ],
    ids=str,
)
def test_a_run_is_cut_into_requests_or_into_tokens_of_one(run, at_once, pieces):
    found = [(*_ends(requests), *_ends(tokens)) for requests, tokens in run.pieces(at_once)]
    assert found == pieces
    assert all(stop - start <= at_once for *_, start, stop in found)


class Step:
    """A batch and its keys, whole and dealt out to ranks. Scores are small integers, so exact."""

    def __init__(self, draw, query_lens, seq_lens, num_ranks, interleave, ties=False):
        self.query_lens, self.seq_lens = query_lens, seq_lens
        self.shards = [ContextShard(rank, num_ranks, interleave) for rank in range(num_ranks)]
        self.tokens = sum(query_lens)
        self.rows = self.tokens + 2  # of a graph's padding
        self.offsets = torch.tensor([0, *query_lens]).cumsum(0).int()
        self.q = draw.integers(-2, 3, self.rows, HEADS, 128).to(torch.float8_e4m3fn)
        self.weights = draw.integers(-3, 4, self.rows, HEADS).float()
        keys = draw.integers(-3, 4, sum(seq_lens), 128).float()
        if ties:
            keys = keys[:3][draw.integers(0, 3, len(keys)).long()]
        self.keys = keys.split(seq_lens)
        ends = [s - q + 1 + i for q, s in zip(query_lens, seq_lens, strict=True) for i in range(q)]
        self.ends = torch.tensor([*ends, 0, 0], dtype=torch.int32)
        self.whole = self.cache(draw, ContextShard(0, 1, 1))
        self.parts = [self.cache(draw, shard) for shard in self.shards]

    def cache(self, draw, shard):
        """The keys of a rank on random pages, with NaN around them, and its page table."""
        columns = max(1, -(-shard.longest(max(self.seq_lens)) // PAGE_SIZE))
        pages = draw.permutation(len(self.seq_lens) * columns).int()
        table = pages.view(len(self.seq_lens), columns)
        cache = PagedCache.allocate(INDEX_FP8, len(pages), PAGE_SIZE)
        cache.data.view(torch.uint8).fill_(255)
        for request, keys in enumerate(self.keys):
            count = int(shard.lengths(torch.tensor(len(keys))))
            own = torch.arange(count)
            slots = table[request, own // PAGE_SIZE].long() * PAGE_SIZE + own % PAGE_SIZE
            cache.write(slots, keys[shard.positions(own)])
        return cache, table

    def expected(self):
        cache, table = self.whole
        return reference.indexer_topk(
            self.q,
            self.weights,
            cache,
            input_row_offsets=self.offsets,
            seq_lens=torch.tensor(self.seq_lens),
            page_table=table,
            topk=TOPK,
        )

    def select(self, rank, all_gather, max_workspace_bytes, workspace=None):
        """What a rank selects."""
        shard, (cache, table) = self.shards[rank], self.parts[rank]
        runs, lengths = Run.all_of(self.offsets), shard.lengths(self.ends)
        rows = ShardedRows(shard, runs, lengths, all_gather, workspace)
        out = torch.full((self.rows, TOPK), 2**31 - 1, dtype=torch.int32)
        rows.select_topk(
            self.q,
            self.weights,
            cache,
            table,
            TOPK,
            max_workspace_bytes=max_workspace_bytes,
            out=out,
        )
        return out


class Meeting:
    """An all-gather of threads, which counts and sizes its calls."""

    def __init__(self, num_ranks):
        self.offers = [None] * num_ranks
        self.barrier = threading.Barrier(num_ranks, timeout=60)
        self.sizes = [[] for _ in range(num_ranks)]

    def all_gather(self, rank):
        def gather(offer):
            self.sizes[rank].append(offer.numel())
            self.offers[rank] = offer
            self.barrier.wait()
            joined = torch.cat(self.offers)
            self.barrier.wait()
            return joined

        return gather


BATCHES = {
    "decodes": ([1, 1, 1], [1, 9, 60]),
    "speculative": ([3, 1, 2, 2], [20, 3, 131, 2]),
    "mixed": ([1, 1, 9, 5], [30, 8, 57, 5]),
    "padded": ([2, 0, 1, 0], [40, 0, 3, 0]),
    "one long prefill": ([13], [17]),
}


@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
@pytest.mark.parametrize(("num_ranks", "interleave"), [(1, 1), (2, 1), (2, PAGE_SIZE), (3, 3)])
@pytest.mark.parametrize("name", BATCHES)
def test_every_rank_selects_as_one_rank_alone(name, num_ranks, interleave, ties):
    step = Step(Draw(0), *BATCHES[name], num_ranks, interleave, ties)
    expected, calls = step.expected(), []
    columns = step.parts[0][1].shape[1] * PAGE_SIZE
    row_bytes = 4 * columns + 8 * min(TOPK, columns) * (2 + num_ranks)
    for at_once in (0, 1, 4, 1000):
        meeting = Meeting(num_ranks)
        with ThreadPoolExecutor(num_ranks) as pool:
            ranks = [
                pool.submit(step.select, rank, meeting.all_gather(rank), at_once * row_bytes)
                for rank in range(num_ranks)
            ]
            for rank in ranks:
                assert_equal("selection", rank.result(), expected)
        assert all(sizes == meeting.sizes[0] for sizes in meeting.sizes)
        assert max(meeting.sizes[0]) <= 2 * max(at_once, 1) * min(TOPK, columns)
        calls.append(len(meeting.sizes[0]))
    runs = len(Run.all_of(step.offsets))
    assert calls[0] == calls[1] == step.tokens
    assert calls[-1] == runs <= calls[2] <= calls[1]


def _select(rank, step):
    def all_gather(offer):
        offers = [torch.empty_like(offer) for _ in range(2)]
        torch.distributed.all_gather(offers, offer)
        return torch.cat(offers)

    return step.select(rank, all_gather, 4096)


def test_two_processes_select_as_one(tmp_path):
    step = Step(Draw(1), *BATCHES["mixed"], 2, 1, ties=True)
    for selected in processes.on_two_ranks(tmp_path, "cpu", _select, step):
        assert_equal("selection", selected, step.expected())


WITHOUT_VLLM = """
import sys
sys.modules["vllm"] = None  # an import of it fails
from sparsemla.backends import vllm
from sparsemla.backends.vllm import compressed, conversions, divided, exchange, settings, sharded
from sparsemla.backends.vllm import surface
for start in (lambda: vllm.SparseMLABackend, vllm.register, vllm.register_indexer):
    try:
        start()
    except ImportError as error:
        print(error)
"""


def test_a_plugin_without_vllm_says_so(run_python):
    done = run_python(WITHOUT_VLLM)
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.splitlines()
        == ["sparsemla.backends.vllm needs vLLM 0.33, but vLLM is not installed"] * 3
    )

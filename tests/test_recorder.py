"""The recorder of selections, beside an engine that is a list of steps."""

import threading
import zlib

import pytest
import torch

from sparsemla.backends.recorder import BLOCK, Recorder, Span, dtype_for, record_path
from sparsemla.backends.records import read_record

TOPK, LAYERS = 8, (1, 4)
BLOCK_BYTES = BLOCK * len(LAYERS) * TOPK * 2


def lists_of(request, begin, end, version=0):
    """What a request selects at some positions, int32 ``[end - begin, layers, TOPK]``."""
    found = torch.full((end - begin, len(LAYERS), TOPK), -1, dtype=torch.int32)
    for row, position in enumerate(range(begin, end)):
        for place, layer in enumerate(LAYERS):
            torch.manual_seed(zlib.crc32(repr((request, position, layer, version)).encode()))
            some = torch.randperm(position + 1)[:TOPK].sort()[0]
            found[row, place, : len(some)] = some
    return found


class Steps:
    """An engine that hands over its steps as the connector does."""

    def __init__(self, folder, limit=1 << 20, stage=(0, 1), dtype=torch.uint16, ready=lambda: None):
        self.warnings, self.dtype, self.ready, self.folder = [], dtype, ready, folder
        self.recorder = Recorder(
            folder,
            model="m",
            topk=TOPK,
            layers=LAYERS,
            dtype=dtype,
            limit=limit,
            stage=stage,
            warn=self.warnings.append,
        )

    def step(self, *requests, bound=0, version=0):
        """A step of ``(request, begin, end)``; lengths on the host are larger by ``bound``."""
        wanted = self.recorder.reserve([(r, b + bound, e + bound) for r, b, e in requests])
        spans, rows = [], []
        for (request, begin, end), each in zip(requests, wanted, strict=True):
            spans.append(Span(request, end - begin, len(rows) if each else None))
            rows += lists_of(request, begin, end, version) if each else []
        copied = torch.stack(rows) if rows else torch.empty(0, len(LAYERS), TOPK)
        lens = torch.tensor([end for _, _, end in requests])
        self.recorder.add(spans, copied.to(self.dtype), lens, self.ready)
        return wanted

    def read(self, request, num_tokens):
        self.recorder.finish(request, num_tokens)
        self.recorder.wait()
        return read_record(record_path(self.folder, request))


@pytest.fixture
def engine(tmp_path):
    made = []

    def make(**changes):
        made.append(Steps(tmp_path, **changes))
        return made[-1]

    yield make
    for each in made:
        each.recorder.close()


def check(record, request, first, until, version=0):
    assert (record.first_position, record.num_tokens) == (first, until - first)
    expected = lists_of(request, first, until, version)
    for place, layer in enumerate(LAYERS):
        width = record.selections[layer].shape[1]
        assert torch.equal(record.selections[layer], expected[:, place, :width])
        assert (expected[:, place, width:] == -1).all()


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int32])
def test_requests_in_steps(engine, dtype):
    made = engine(dtype=dtype)
    assert made.step(("a", 0, 5), ("b", 0, 30)) == [False, True]
    assert made.step(("b", 30, 31), ("a", 5, 40)) == [True, True]
    made.step(("a", 40, 41), ("b", 31, 32))
    made.step(("c", 0, 3))
    check(made.read("a", 42), "a", 0, 41)
    made.step(("b", 32, 33), ("d", 20, 60))
    check(made.read("b", 32), "b", 0, 31)  # the engine went on before it knew of the end
    check(made.read("c", 4), "c", 0, 3)
    check(made.read("d", 61), "d", 20, 60)  # 20 tokens were cached
    assert made.recorder.used == 0
    assert not made.warnings
    names = sorted(path.name for path in made.folder.iterdir())
    assert names == [f"{name}.0-of-1.selections" for name in "abcd"]


def test_rejected_drafts_are_replaced(engine):
    """Their number is known on the device only: the host's lengths are upper bounds."""
    made = engine()
    made.step(("a", 0, TOPK - 1))
    made.step(("a", TOPK - 1, TOPK + 2), version=1)
    made.step(("a", TOPK - 1, TOPK + 2), bound=3, version=1)
    for begin in range(TOPK - 1, 40, 2):
        made.step(("a", begin, begin + 3), bound=2)
    check(made.read("a", 42), "a", 0, 41)


def test_lists_stay_when_tokens_are_computed_again(engine):
    """Those by which the next token was sampled; drafts that were not yet accepted do not stay."""
    made = engine()
    made.step(("a", 0, 20))
    made.step(("a", 20, 24))  # a token and three drafts, of which one is accepted
    made.recorder.resume("a", 23)
    made.recorder.resume("other", 5)
    made.step(("a", 0, 10), version=1)
    made.step(("a", 10, 23), version=1)
    made.step(("a", 23, 30))
    record = made.read("a", 31)
    expected = lists_of("a", 0, 30)
    expected[22] = lists_of("a", 22, 23, version=1)[0]
    assert torch.equal(record.selections[4], expected[:, 1])


def test_cached_tokens_without_a_list_are_refused(engine):
    made = engine()
    made.step(("a", 0, 20))
    made.recorder.resume("a", 40)
    made.step(("a", 32, 40))
    made.step(("a", 40, 41))
    with pytest.raises(ValueError, match="positions 20 to 31 were taken from the prefix cache"):
        made.read("a", 42)
    assert made.recorder.used == 0
    assert len(made.warnings) == 1


def test_over_the_limit_one_request_has_no_record(engine):
    made = engine(limit=5 * BLOCK_BYTES - 1)
    made.step(("a", 0, 50), ("b", 0, 25))  # three blocks of 42 tokens, two of 17
    assert made.recorder.used == 3 * BLOCK_BYTES  # b does not fit
    reason = "no selections of request b are recorded: host_gib must be larger than 2.38"
    (warning,) = made.warnings
    assert warning.startswith(reason)
    assert made.step(("a", 50, 52), ("b", 25, 26)) == [True, False]
    check(made.read("a", 53), "a", 0, 52)
    with pytest.raises(ValueError, match=r"no record of .*b: host_gib must be larger than 2.38"):
        made.read("b", 27)
    made.step(("c", 0, 60))
    check(made.read("c", 61), "c", 0, 60)
    assert made.recorder.used == 0


def test_memory_is_counted_until_the_record_is_written(engine):
    """The engine never waits for a copy, and reserves no more than the limit meanwhile."""
    copied = threading.Event()
    made = engine(limit=3 * BLOCK_BYTES, ready=lambda: copied.wait(2))
    assert made.step(("a", 0, 40)) == [True]  # two blocks
    made.recorder.finish("a", 41)
    assert made.step(("b", 0, 40), ("c", 0, 20)) == [False, True]
    assert made.recorder.used == 3 * BLOCK_BYTES
    copied.set()
    made.recorder.wait()
    check(read_record(record_path(made.folder, "a")), "a", 0, 40)
    assert made.recorder.used == BLOCK_BYTES


def test_requests_that_end_early(engine):
    made = engine()
    made.recorder.finish("never ran", 10)
    made.step(("a", 0, 20))
    with pytest.raises(ValueError, match="tokens before position 20 have lists, of 29 tokens"):
        made.read("a", 30)
    made.step(("b", 0, 24))
    made.step(("b", 21, 22))  # two drafts were rejected
    with pytest.raises(ValueError, match="tokens before position 22 have lists, of 23 tokens"):
        made.read("b", 24)
    made.recorder.finish("a", 30)  # it is told twice
    made.recorder.wait()
    names = sorted(path.name for path in made.folder.iterdir())
    assert names == [f"{name}.0-of-1.refused" for name in "ab"]


def test_stages_write_their_layers(engine):
    stages = [engine(stage=(stage, 2)) for stage in range(2)]
    stages[1].recorder.layers = (7, 9)
    for made in stages:
        made.step(("a", 0, 20))
        made.recorder.finish("a", 21)
        made.recorder.wait()
    record = read_record(record_path(stages[0].folder, "a"))
    assert list(record.selections) == [1, 4, 7, 9]
    assert record.num_tokens == 20


@pytest.mark.parametrize("name", ["cmpl/1-0", "a b*", "ß.1", "../up"])
def test_names_of_requests_are_names_of_files(engine, name):
    made = engine()
    made.step((name, 0, 3))
    check(made.read(name, 4), name, 0, 3)
    assert {path.parent for path in made.folder.rglob("*")} == {made.folder}


def test_lists_that_do_not_ascend_are_refused(engine):
    made = engine()
    lists = lists_of("a", 0, 20).flip(2)
    made.recorder.reserve([("a", 0, 20)])
    made.recorder.add([Span("a", 20, 0)], lists.to(torch.uint16), torch.tensor([20]), made.ready)
    with pytest.raises(ValueError, match="the lists of layer 1 must ascend strictly from position"):
        made.read("a", 21)


def test_the_engine_learns_that_a_record_was_not_written(engine):
    made = engine()
    made.folder.rmdir()
    made.step(("a", 0, 20))
    made.recorder.finish("a", 21)
    with pytest.raises(RuntimeError, match="the recorder of selections failed") as caught:
        made.recorder.wait()
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    with pytest.raises(RuntimeError, match="the recorder of selections failed"):
        made.step(("b", 0, 20))


def test_lists_take_two_bytes_an_entry_in_short_contexts():
    assert [dtype_for(length) for length in (65535, 65536)] == [torch.uint16, torch.int32]

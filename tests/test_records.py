"""Records of selections: bytes and back, and what is refused."""

import re

import pytest
import torch

from sparsemla.backends.records import HEAD, SelectionRecord, part_path, read_record

TOPK = 40


def lists(tokens, first=0, width=TOPK, dtype=torch.int32):
    """Positions that each token sees: as many as fit, or fewer, or none."""
    found = torch.full((tokens, width), -1, dtype=dtype)
    for token in range(tokens):
        seen = first + token + 1
        num = min(seen, width) if token % 3 else int(torch.randint(min(seen, width) + 1, ()))
        found[token, :num] = torch.randperm(seen)[:num].sort()[0]
    return found


def record(selections, **changes):
    values = {"model": "m", "topk": TOPK, "score_dtype": "bfloat16", "selections": selections}
    return SelectionRecord(**values | changes)


@pytest.mark.parametrize("first", [0, 5, 70_000])
@pytest.mark.parametrize("tokens", [0, 1, 64, 200])
def test_bytes_and_back(tokens, first):
    given = {
        7: lists(tokens, first, dtype=torch.int64),
        0: lists(tokens, first).T.contiguous().T,
        3: lists(tokens, first, width=1),
    }
    written = record(given, first_position=first, score_dtype="float8_e4m3fn", model="a/ß")
    read = SelectionRecord.from_bytes(written.to_bytes())
    for name in ("model", "topk", "score_dtype", "first_position", "num_tokens"):
        assert getattr(read, name) == getattr(written, name)
    assert sorted(read.selections) == [0, 3, 7]
    for layer_idx, found in read.selections.items():
        torch.testing.assert_close(found, given[layer_idx].int(), rtol=0, atol=0)


def test_gaps_of_all_sizes():
    """Gaps about those that take more bytes, and the largest position."""
    gaps = torch.tensor([0, 1, 253, 254, 255, 256, 257, 65_535, 65_536])
    last = 2**31 - 1
    given = torch.cat([(gaps + 1).cumsum(0) - 1, torch.tensor([last])]).int()[None]
    read = SelectionRecord.from_bytes(record({0: given}, first_position=last).to_bytes())
    assert torch.equal(read.selections[0], given)


def test_size():
    """A byte for each entry and four for a list; four alone for a token that selects all."""
    head = len(record({0: lists(0)}).to_bytes())
    every = torch.arange(TOPK).expand(TOPK, -1)
    every = torch.where(every <= every.T, every, -1)
    assert len(record({0: every}).to_bytes()) - head == 4 * TOPK + 3  # digits in the header
    latest = torch.arange(TOPK, 100)[:, None] + torch.arange(1 - TOPK, 1)
    size = len(record({0: latest}, first_position=TOPK).to_bytes())
    assert size - head == 60 * (4 + TOPK) + 5


def test_records_of_parts():
    whole = lists(100)
    parts = [
        record({0: whole[:30, :20].where(whole[:30, :20] < 20, -1)}),
        record({0: whole[30:]}, first_position=30),
    ]
    joined = parts[0].then(parts[1])
    assert torch.equal(joined.selections[0][30:], whole[30:])
    assert torch.equal(joined.selections[0][:30, :20], parts[0].selections[0])
    assert (joined.selections[0][:30, 20:] == -1).all()
    assert joined.checked(model="m", topk=TOPK, num_tokens=100) is joined.selections
    later = parts[1].then(record({0: lists(5, 100)}, first_position=100))
    assert (later.first_position, later.num_tokens) == (30, 75)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "other"}, "later must have model='m', got 'other'"),
        ({"topk": TOPK + 1}, "later must have topk=40, got 41"),
        ({"score_dtype": "float8_e4m3fn"}, "later must have score_dtype='bfloat16', got 'float8"),
        ({"first_position": 9}, "later must have first_position=8, got 9"),
        ({"selections": {1: lists(1)}, "first_position": 8}, "have layers=[0], got [1]"),
    ],
)
def test_parts_of_others_are_refused(changes, message):
    later = record(**{"selections": {0: lists(1)}, "first_position": 8} | changes)
    with pytest.raises(ValueError, match=re.escape(message)):
        record({0: lists(8)}).then(later)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "other"}, "the record must have model='other', got 'm'"),
        ({"topk": 2048}, "the record must have topk=2048, got 40"),
        ({"num_tokens": 7}, "the record must have num_tokens=7, got 8"),
    ],
)
def test_records_of_others_are_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        record({0: lists(8)}).checked(**{"model": "m", "topk": TOPK, "num_tokens": 8} | changes)


def test_a_later_part_alone_is_refused():
    with pytest.raises(ValueError, match="must have first_position=0, got 3"):
        record({0: lists(8, 3)}, first_position=3).checked(model="m", topk=TOPK, num_tokens=8)


def test_a_record_continues_another_of_the_same_prompt():
    """Of 100 tokens, 30 were cached."""
    earlier, whole = record({0: lists(60)}), lists(100)
    later = record({0: whole[30:]}, first_position=30)
    joined = earlier.before(30).then(later)
    assert torch.equal(joined.selections[0][:30], earlier.selections[0][:30])
    assert torch.equal(joined.selections[0][30:], whole[30:])
    assert later.before(40).num_tokens == 10
    for position in (29, 101):
        with pytest.raises(ValueError, match=f"position must be from 30 to 100, .* got {position}"):
            later.before(position)


def test_layers_of_two_stages():
    both = record({2: lists(8), 5: lists(8)})
    first, last = (record({layer: both.selections[layer]}) for layer in (2, 5))
    assert last.beside(first).to_bytes() == both.to_bytes()
    with pytest.raises(ValueError, match=r"others must have other layers, got \[5\] in both"):
        last.beside(both)
    for changes in ({"model": "n"}, {"topk": 41}, {"score_dtype": "float8_e4m3fn"}):
        ((name, value),) = changes.items()
        with pytest.raises(ValueError, match=f"others must have {name}=.*, got {value!r}"):
            first.beside(record({5: lists(8)}, **changes))
    with pytest.raises(ValueError, match="others must have num_tokens=8, got 7"):
        first.beside(record({5: lists(7)}))
    with pytest.raises(ValueError, match="others must have first_position=0, got 1"):
        first.beside(record({5: lists(8, 1)}, first_position=1))


def test_files_of_stages(tmp_path):
    path = tmp_path / "answer[1]"
    with pytest.raises(FileNotFoundError, match=r"found no .*answer\[1\]"):
        read_record(path)
    both = record({2: lists(8), 5: lists(8)})
    for stage, layer in enumerate((2, 5)):
        with pytest.raises(FileNotFoundError):  # none, or that of the last stage is missing
            read_record(path)
        data = record({layer: both.selections[layer]}).to_bytes()
        part_path(path, stage, 2, "selections").write_bytes(data)
    (tmp_path / "answer[1]0.0-of-1.selections").write_bytes(b"of another request")
    assert read_record(path).to_bytes() == both.to_bytes()
    part_path(path, 1, 2, "refused").write_text("host_gib is too small")
    with pytest.raises(ValueError, match=r"has no record of .*: host_gib is too small"):
        read_record(path)


@pytest.mark.parametrize(
    ("selections", "message"),
    [
        ({}, "selections must have a layer, got none"),
        ({2: torch.zeros(3).int()}, "selections[2] must be int32 or int64 [tokens, K], got torch."),
        ({2: torch.zeros(3, 1)}, "selections[2] must be int32 or int64 [tokens, K], got torch.f"),
        ({2: lists(4, width=TOPK + 1)}, "selections[2] must have 4 tokens, as in other layers"),
        ({0: lists(4), 2: lists(5)}, "selections[2] must have 4 tokens, as in other layers, and"),
        ({2: torch.tensor([[0, -1], [1, 0]])}, "selections[2][1] must ascend strictly up to"),
        ({2: torch.tensor([[0, -1], [1, 1]])}, "the position of its token, 1, then be -1, got [1"),
        ({2: torch.tensor([[0, -1], [0, 2]])}, "selections[2][1] must ascend strictly up to"),
        ({2: torch.tensor([[1], [0]])}, "selections[2][0] must ascend strictly up to"),
        ({2: torch.tensor([[0, -1], [-1, 1]])}, "selections[2][1] must ascend strictly up to"),
        ({2: torch.tensor([[0, -2]])}, "selections[2][0] must ascend strictly up to"),
        ({2: torch.tensor([[-2, -1]])}, "selections[2][0] must ascend strictly up to"),
    ],
)
def test_other_lists_are_refused(selections, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        record(selections)


def test_other_settings_are_refused():
    with pytest.raises(ValueError, match=r"score_dtype must be one of .*, got 'float32'"):
        record({0: lists(1)}, score_dtype="float32")
    with pytest.raises(ValueError, match="first_position must be 0 or more, got -1"):
        record({0: lists(1)}, first_position=-1)


def test_other_bytes_are_refused():
    data = record({0: lists(70), 1: lists(70)}).to_bytes()
    for other in (b"", data[: HEAD.size - 1], b"\x80\x04" + data):
        with pytest.raises(ValueError, match="data must be a record of selections, got b'"):
            SelectionRecord.from_bytes(other)
    with pytest.raises(ValueError, match="data must be a record of version 1, got 2"):
        SelectionRecord.from_bytes(data[:7] + b"\x02" + data[8:])
    changed = (
        data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :] for place in (12, 20, -1)
    )
    for other in (*changed, data[:-1], data + b"\0"):
        with pytest.raises(ValueError, match=r"data must have the checksum .*, got .*: it was cut"):
            SelectionRecord.from_bytes(other)

"""Texts and recall to train small models with."""

from __future__ import annotations

import re

import pytest
import torch

from sparsemla_lab import corpus


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(0)


def text_of(batch: corpus.Bytes) -> list[bytes]:
    """Each row, with the byte after it."""
    rows = torch.cat([batch.tokens, batch.labels[:, -1:]], 1)
    return [bytes(row.tolist()) for row in rows]


def answers(batch: corpus.Bytes) -> list[bytes]:
    """The labels of each row that recall knows."""
    rows = zip(batch.labels, batch.kinds == corpus.ANSWER, strict=True)
    return [bytes(labels[asked].tolist()) for labels, asked in rows]


@pytest.mark.parametrize("letters", [1, 2])
def test_items_of_a_stream_that_come_again_are_known(letters, generator):
    batch = corpus.stream(5, 100, letters, generator)
    for row, known in zip(text_of(batch), answers(batch), strict=True):
        assert len(row) == 101
        items = re.findall(rb"<([a-z]+)([A-Z]+)>", row)
        assert {len(part) for item in items for part in item} == {letters}
        assert len(items) == 101 // corpus.item_length(letters)
        seen, expected = {}, b""
        for key, value in items:
            expected += value if key in seen else b""
            assert seen.setdefault(key, value) == value
        assert known == expected
    assert not (batch.kinds == corpus.TEXT).any()


@pytest.mark.parametrize("repeat", [1, 2])
def test_needles_are_asked_for_at_the_end(repeat, generator):
    background = torch.full((3, 241), ord("."), dtype=torch.uint8)
    batch = corpus.needles(background, 4, 2, generator, repeat)
    for row, known in zip(text_of(batch), answers(batch), strict=True):
        given, asked = row[:180], row[-24:]
        pairs = re.findall(rb"<(..)(..)>", given)
        assert len(pairs) == 4 * repeat
        assert sorted(re.findall(rb"<(..)(..)>", asked)) == sorted(set(pairs))
        assert known.endswith(b"".join(value for _, value in re.findall(rb"<(..)(..)>", asked)))
        assert len(known) == 8 * repeat
    is_text = batch.labels == ord(".")
    assert torch.equal(batch.kinds == corpus.TEXT, is_text)


def test_held_out_files_are_not_trained_on():
    held_out, trained = corpus.held_out_text(), corpus.training_text(torch_too=False)
    assert len(held_out) > 300_000
    assert len(trained) > 5_000_000
    part = (corpus.library() / "textwrap.py").read_bytes()
    assert part in held_out
    assert part not in trained
    assert (corpus.library() / "ast.py").read_bytes() in trained


def test_windows_are_pieces_of_the_text(generator):
    text = corpus.as_bytes(bytes(range(100)))
    even = corpus.windows(text, 3, 10, None)
    assert even[:, 0].tolist() == [0, 45, 90]
    drawn = corpus.windows(text, 50, 10, generator)
    assert (drawn.diff(dim=1) == 1).all()
    assert len(set(drawn[:, 0].tolist())) > 20

"""Bytes to train and to test a small model with: Python's sources, and recall.

Every machine that runs this package has the sources of Python's library and of torch. Files of
:data:`HELD_OUT` are never trained on. Recall is a text with items ``<abCD>``: a key of small
letters and a value of capitals. A key that comes again has the same value, however far back it was
given, so the bytes of that value are certain for who finds the earlier item, and random for others.
"""

from __future__ import annotations

import hashlib
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

HELD_OUT = (
    "argparse.py",
    "bdb.py",
    "calendar.py",
    "configparser.py",
    "difflib.py",
    "fractions.py",
    "heapq.py",
    "imaplib.py",
    "locale.py",
    "mailbox.py",
    "optparse.py",
    "shutil.py",
    "statistics.py",
    "tarfile.py",
    "textwrap.py",
    "zipfile.py",
)
"""Modules of Python's library that no model trains on, to measure a loss with."""

GENERATED = re.compile(rb"(?i)auto(matically)?[- ]?generated|@generated|do not edit")
"""Generated files say so in their first lines."""

LETTERS = 26
TEXT, ANSWER = 1, 2
"""What a byte is to a loss; 0 for bytes that nobody can know."""


def library() -> Path:
    """The folder of Python's library."""
    return Path(sysconfig.get_paths()["stdlib"])


def held_out_text() -> bytes:
    """The held-out modules that this Python has, one after the other."""
    files = (library() / name for name in HELD_OUT)
    return b"\n".join(path.read_bytes() for path in files if path.exists())


def training_text(*, torch_too: bool = True) -> bytes:
    """Python's library and torch's sources, without generated, repeated and held-out files.

    Args:
        torch_too: whether torch's sources are part of it.
    """
    roots = [library(), *([Path(torch.__file__).parent] if torch_too else [])]
    seen, texts = set(), []
    for root in roots:
        for path in sorted(root.rglob("*.py")):
            parts = path.relative_to(root).parts
            if "site-packages" in parts or "dist-packages" in parts or path.name in HELD_OUT:
                continue
            text = path.read_bytes()
            digest = hashlib.sha256(text).digest()
            if digest not in seen and not GENERATED.search(text[:400]):
                seen.add(digest)
                texts.append(text)
    return b"\n".join(texts)


def as_bytes(text: bytes) -> Tensor:
    """A text as uint8 ``[n]``."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@dataclass(frozen=True)
class Bytes:
    """Some rows of bytes, each to be predicted from those before it.

    Args:
        tokens: int64 ``[B, S]``, what a model reads.
        labels: int64 ``[B, S]``, the next byte.
        kinds: uint8 ``[B, S]``, what a label is: :data:`TEXT`, :data:`ANSWER` or 0.
    """

    tokens: Tensor
    labels: Tensor
    kinds: Tensor

    @classmethod
    def of(cls, rows: Tensor, kinds: Tensor) -> Bytes:
        """From rows ``[B, S + 1]`` and what each of their bytes is."""
        rows = rows.long()
        return cls(rows[:, :-1], rows[:, 1:], kinds[:, 1:])

    def to(self, device: torch.device | str) -> Bytes:
        """The same on a device."""
        return Bytes(*(x.to(device) for x in (self.tokens, self.labels, self.kinds)))

    def part(self, rank: int, num_ranks: int) -> Bytes:
        """Every ``num_ranks``-th row, from row ``rank`` on: all kinds of rows are in each part."""
        return Bytes(*(x[rank::num_ranks] for x in (self.tokens, self.labels, self.kinds)))


def windows(text: Tensor, count: int, length: int, generator: torch.Generator | None) -> Tensor:
    """Pieces ``[count, length]`` of a text: random ones, or without a generator evenly spaced."""
    last = len(text) - length
    if generator is None:
        starts = torch.arange(count) * last // max(count - 1, 1)
    else:
        starts = torch.randint(last + 1, (count,), generator=generator)
    return text[starts[:, None] + torch.arange(length)]


def stream(count: int, length: int, letters: int, generator: torch.Generator) -> Bytes:
    """Rows of items only: keys come again and again, in some rows few of them and in some many."""
    slots = (length + 1) // item_length(letters)
    most = max(2, min(slots // 4, LETTERS**letters))
    pairs = torch.randint(2, most + 1, (count, 1), generator=generator)
    chosen = (torch.rand(count, slots, generator=generator) * pairs).long()
    rows = torch.full((count, length + 1), ord("\n"), dtype=torch.uint8)
    return _with_items(rows, chosen, most, letters, generator)


def needles(
    background: Tensor, pairs: int, letters: int, generator: torch.Generator, repeat: int = 1
) -> Bytes:
    """Rows of text with items in their first three quarters, which the end asks for.

    Args:
        background: uint8 ``[B, S + 1]``.
        pairs: items, and questions.
        letters: letters of a key, and of a value.
        generator: draws places, keys and values.
        repeat: how often an item is given before the questions.
    """
    count, length = background.shape
    slots = length // item_length(letters)
    places = torch.rand(count, slots - pairs, generator=generator)
    places[:, 3 * slots // 4 :] = 2
    places = places.argsort(1)[:, : pairs * repeat]
    chosen = torch.full((count, slots), -1)
    chosen.scatter_(1, places, torch.arange(pairs).repeat(repeat).expand(count, -1))
    chosen[:, -pairs:] = torch.rand(count, pairs, generator=generator).argsort(1)
    return _with_items(background, chosen, pairs, letters, generator)


def item_length(letters: int) -> int:
    """Bytes of ``<abCD>``."""
    return 2 * letters + 2


def _with_items(
    rows: Tensor, chosen: Tensor, pairs: int, letters: int, generator: torch.Generator
) -> Bytes:
    """Write the pair ``chosen [B, slots]`` into each slot of rows from their end on; -1: none."""
    count, width, size = len(rows), chosen.shape[1], LETTERS**letters
    keys = torch.rand(count, size, generator=generator).argsort(1)[:, :pairs]
    values = torch.randint(size, (count, pairs), generator=generator)
    index = chosen.clamp_min(0)
    powers = LETTERS ** torch.arange(letters)
    key, value = (x.gather(1, index)[:, :, None] // powers % LETTERS for x in (keys, values))
    mark = torch.ones_like(key[:, :, :1])
    parts = [mark * ord("<"), key + ord("a"), value + ord("A"), mark * ord(">")]
    items = torch.cat(parts, 2).to(torch.uint8)

    length = width * item_length(letters)
    rows, kinds = rows.clone(), torch.full(rows.shape, TEXT, dtype=torch.uint8)
    there = (chosen >= 0)[:, :, None]
    old, old_kinds = (x[:, -length:].view(items.shape) for x in (rows, kinds))
    rows[:, -length:] = items.where(there, old).flatten(1)
    known = (chosen[:, :, None] == chosen[:, None, :]).tril(-1).any(2) & (chosen >= 0)
    new_kinds = torch.zeros_like(items)
    new_kinds[:, :, 1 + letters : 1 + 2 * letters] = ANSWER * known[:, :, None].to(torch.uint8)
    kinds[:, -length:] = new_kinds.where(there, old_kinds).flatten(1)
    if (chosen >= 0).all():
        kinds[:, :-length] = 0
    return Bytes.of(rows, kinds)

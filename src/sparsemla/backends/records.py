"""Records of selections: what an indexer selected for a sequence, as bytes to store or to send."""

from __future__ import annotations

import glob
import itertools
import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sparsemla.backends.selections import join_lists

MAGIC = b"SMLASEL"
VERSION = 1
SCORE_DTYPES = ("bfloat16", "float8_e4m3fn")
HEAD = struct.Struct("<7sBII")
"""Magic, version, bytes of the header, CRC-32 of all that follows."""

TOGETHER = 64
"""Tokens whose lists are encoded together, and stay in a CPU's cache."""

LARGE = 255
"""A gap from which on it is stored as an integer of its own."""


@dataclass(frozen=True, kw_only=True, eq=False)
class SelectionRecord:
    """The selections of one sequence, or of a part of it, in a rollout.

    As bytes (:meth:`to_bytes`) a list takes four bytes, and one for each entry: the gap to the one
    before it, or from 255 on five. A token that selects all that it sees takes four bytes in all.
    Bytes have a version and a checksum.

    Args:
        model: name of the model, by which the training knows that it is its own.
        topk: ``index_topk`` of the model.
        score_dtype: ``"bfloat16"`` or ``"float8_e4m3fn"``, of the index queries and keys that were
            multiplied.
        selections: for each layer with an indexer int32 or int64 ``[tokens, K]``: strictly
            ascending positions in the sequence, then -1. Layers count from 0.
        first_position: position of the first token. An engine with a prefix cache computes, and
            records, no list for a cached token.

    Raises:
        ValueError: lists of another form, or with an entry that its token cannot see.

    >>> lists = {0: torch.tensor([[0, -1], [0, 1], [0, 2]], dtype=torch.int32)}
    >>> record = SelectionRecord(model="m", topk=2, score_dtype="bfloat16", selections=lists)
    >>> read = SelectionRecord.from_bytes(record.to_bytes())
    >>> read.checked(model="m", topk=2, num_tokens=3)[0].tolist()
    [[0, -1], [0, 1], [0, 2]]
    """

    model: str
    topk: int
    score_dtype: str
    selections: Mapping[int, Tensor]
    first_position: int = 0

    def __post_init__(self) -> None:
        if self.score_dtype not in SCORE_DTYPES:
            raise ValueError(
                f"score_dtype must be one of {', '.join(SCORE_DTYPES)}, got {self.score_dtype!r}"
            )
        if self.first_position < 0:
            raise ValueError(f"first_position must be 0 or more, got {self.first_position}")
        if not self.selections:
            raise ValueError("selections must have a layer, got none")
        for layer_idx, lists in self.selections.items():
            name = f"selections[{layer_idx}]"
            if lists.dim() != 2 or lists.dtype not in (torch.int32, torch.int64):
                raise ValueError(
                    f"{name} must be int32 or int64 [tokens, K], "
                    f"got {lists.dtype} {list(lists.shape)}"
                )
            if len(lists) != self.num_tokens or lists.shape[1] > self.topk:
                raise ValueError(
                    f"{name} must have {self.num_tokens} tokens, as in other layers, and at most "
                    f"{self.topk} entries of each, got {list(lists.shape)}"
                )
            self._check_entries(name, lists)

    def _check_entries(self, name: str, lists: Tensor) -> None:
        parts = lists.split(TOGETHER), self._positions(lists.device).split(TOGETHER)
        right = torch.cat([_is_list(*each) for each in zip(*parts, strict=True)])
        if not right.all():
            token = int((~right).nonzero()[0, 0])
            raise ValueError(
                f"{name}[{token}] must ascend strictly up to the position of its token, "
                f"{self.first_position + token}, then be -1, got {lists[token].tolist()[:64]}"
            )

    def _positions(self, device: torch.device) -> Tensor:
        first = self.first_position
        return torch.arange(first, first + self.num_tokens, device=device)

    @property
    def num_tokens(self) -> int:
        """Tokens that have a list."""
        return len(next(iter(self.selections.values())))

    def checked(self, *, model: str, topk: int, num_tokens: int) -> Mapping[int, Tensor]:
        """The selections, if they are of this model and of a whole sequence.

        Args:
            model: name of the model that is trained.
            topk: its ``index_topk``.
            num_tokens: tokens that the training computes; the last one of an answer has no list.

        Raises:
            ValueError: the record is of another model, another top-k, or of other tokens.
        """
        for name, expected, got in (
            ("model", model, self.model),
            ("topk", topk, self.topk),
            ("first_position", 0, self.first_position),
            ("num_tokens", num_tokens, self.num_tokens),
        ):
            if expected != got:
                raise ValueError(f"the record must have {name}={expected!r}, got {got!r}")
        return self.selections

    def then(self, later: SelectionRecord) -> SelectionRecord:
        """The record of both parts of a sequence, of which ``later`` follows this one.

        Raises:
            ValueError: the parts do not follow each other, or differ in anything else.
        """
        for name, expected, got in (
            ("model", self.model, later.model),
            ("topk", self.topk, later.topk),
            ("score_dtype", self.score_dtype, later.score_dtype),
            ("first_position", self.first_position + self.num_tokens, later.first_position),
            ("layers", sorted(self.selections), sorted(later.selections)),
        ):
            if expected != got:
                raise ValueError(f"later must have {name}={expected!r}, got {got!r}")
        joined = {
            layer_idx: join_lists([lists, later.selections[layer_idx]])
            for layer_idx, lists in self.selections.items()
        }
        return replace(self, selections=joined)

    def before(self, position: int) -> SelectionRecord:
        """The record of the tokens before a position.

        Requests with one prompt compute it once in an engine with a prefix cache: a record that
        starts at ``position`` continues ``earlier.before(position)`` of another request.

        Raises:
            ValueError: the record does not reach from its first token to the position.
        """
        end = self.first_position + self.num_tokens
        if not self.first_position <= position <= end:
            raise ValueError(
                f"position must be from {self.first_position} to {end}, the tokens of the record, "
                f"got {position}"
            )
        tokens = position - self.first_position
        return replace(self, selections={k: lists[:tokens] for k, lists in self.selections.items()})

    def beside(self, others: SelectionRecord) -> SelectionRecord:
        """The record of the layers of both, which are those of two pipeline stages.

        Raises:
            ValueError: they have a layer in common, or differ in anything else.
        """
        for name in ("model", "topk", "score_dtype", "first_position", "num_tokens"):
            expected, got = getattr(self, name), getattr(others, name)
            if expected != got:
                raise ValueError(f"others must have {name}={expected!r}, got {got!r}")
        if common := sorted(self.selections.keys() & others.selections.keys()):
            raise ValueError(f"others must have other layers, got {common} in both")
        return replace(self, selections={**self.selections, **others.selections})

    def to_bytes(self) -> bytes:
        """The record as bytes, for :meth:`from_bytes`."""
        layers = {}
        for layer_idx, lists in self.selections.items():
            parts = (part.numpy() for part in lists.cpu().split(TOGETHER))
            data = encode_lists(zip(parts, itertools.count(self.first_position, TOGETHER)))
            layers[layer_idx] = lists.shape[1], data
        return record_bytes(
            model=self.model,
            topk=self.topk,
            score_dtype=self.score_dtype,
            first_position=self.first_position,
            num_tokens=self.num_tokens,
            layers=layers,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> SelectionRecord:
        """The record that :meth:`to_bytes` has written.

        Raises:
            ValueError: the bytes are no record, of another version, cut off or changed.
        """
        if len(data) < HEAD.size or not data.startswith(MAGIC):
            raise ValueError(f"data must be a record of selections, got {bytes(data[:8])!r}")
        _, version, header_bytes, checksum = HEAD.unpack_from(data)
        if version != VERSION:
            raise ValueError(f"data must be a record of version {VERSION}, got {version}")
        body = memoryview(data)[HEAD.size :]
        if zlib.crc32(body) != checksum:
            raise ValueError(
                f"data must have the checksum {checksum:08x} after its head, "
                f"got {zlib.crc32(body):08x}: it was cut off or changed"
            )
        header: dict[str, Any] = json.loads(bytes(body[:header_bytes]))
        first, num_tokens = header["first_position"], header["num_tokens"]
        positions = torch.arange(first, first + num_tokens)
        selections, begin = {}, header_bytes
        for layer_idx, width, size in header["layers"]:
            selections[layer_idx] = _decode(body[begin : begin + size], positions, width)
            begin += size
        return cls(
            model=header["model"],
            topk=header["topk"],
            score_dtype=header["score_dtype"],
            selections=selections,
            first_position=first,
        )


def _is_list(part: Tensor, positions: Tensor) -> Tensor:
    """Whether each row ascends strictly up to its position, then is -1."""
    before, after = part[:, :-1], part[:, 1:]
    ordered = ((after == -1) | ((after > before) & (before >= 0))).all(1)
    padded = torch.nn.functional.pad(part, (1, 0), value=-1)  # a row may have no entry
    return ordered & (padded.amax(1) <= positions) & (padded[:, 1:2] >= -1).all(1)


def record_bytes(
    *,
    model: str,
    topk: int,
    score_dtype: str,
    first_position: int,
    num_tokens: int,
    layers: Mapping[int, tuple[int, bytes]],
) -> bytes:
    """A record of layers that are encoded already; see :class:`SelectionRecord`.

    Args:
        model, topk, score_dtype, first_position: of the record.
        num_tokens: tokens that have a list.
        layers: for each layer the columns of its lists, and :func:`encode_lists` of them.
    """
    header = {
        "model": model,
        "topk": topk,
        "score_dtype": score_dtype,
        "first_position": first_position,
        "num_tokens": num_tokens,
        "layers": [
            [layer_idx, width, len(data)] for layer_idx, (width, data) in sorted(layers.items())
        ],
    }
    text = json.dumps(header, separators=(",", ":")).encode()
    checksum = zlib.crc32(text)
    for _, (_, data) in sorted(layers.items()):
        checksum = zlib.crc32(data, checksum)
    head = HEAD.pack(MAGIC, VERSION, len(text), checksum)
    return b"".join([head, text, *(data for _, (_, data) in sorted(layers.items()))])


def encode_lists(parts: Iterable[tuple[np.ndarray, int]], *, whole: range = range(0)) -> bytes:
    """Lists of consecutive tokens as bytes, by parts that stay in a CPU's cache.

    First come the numbers of entries, then the gaps before entries, then those that are large.

    Args:
        parts: int32 or int64 ``[n, K]``, strictly ascending positions, then -1, and the position of
            the first of these tokens.
        whole: positions of tokens before these that select all that they see.
    """
    counts, gaps, large = [np.arange(whole.start + 1, whole.stop + 1, dtype="<i4")], [], []
    for part, first in parts:
        valid = part >= 0
        counts.append(valid.sum(1, dtype="<i4"))
        # Others select all that they see.
        listed = counts[-1] <= np.arange(first, first + len(part))
        found = np.diff(part, axis=1, prepend=part.dtype.type(-1))
        found -= 1
        if not (listed.all() and valid[:, -1:].all()):
            found = found[valid & listed[:, None]]
        gaps.append(np.minimum(found, LARGE).astype(np.uint8))
        large.append(found[found >= LARGE].astype("<i4"))
    return b"".join(part.tobytes() for part in (*counts, *gaps, *large))


def _decode(data: memoryview, positions: Tensor, width: int) -> Tensor:
    """Lists int32 ``[tokens, width]`` of what :func:`encode_lists` has made of them."""
    counts = _integers(data[: 4 * len(positions)])
    listed = torch.where(counts > positions, 0, counts)
    gaps = torch.from_numpy(np.frombuffer(data, np.uint8)[4 * len(positions) :].astype(np.int32))
    sizes = [int(each.sum()) for each in listed.split(TOGETHER)]
    large = _integers(data[4 * len(positions) + sum(sizes) :])
    columns = torch.arange(width, dtype=torch.int32)
    lists = torch.empty(len(positions), width, dtype=torch.int32)
    for out, own, whole, count in zip(
        lists.split(TOGETHER),
        gaps[: sum(sizes)].split(sizes),
        (counts > positions).split(TOGETHER),
        counts.split(TOGETHER),
        strict=True,
    ):
        escaped = own == LARGE
        num_large = int(escaped.sum())
        own[escaped], large = large[:num_large], large[num_large:]
        valid = columns < count[:, None]
        steps = torch.ones(out.shape, dtype=torch.int32)
        steps[valid & ~whole[:, None]] = own + 1
        out.copy_(torch.where(valid, steps.cumsum(1, dtype=torch.int32) - 1, -1))
    return lists


def _integers(data: memoryview) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, "<i4").astype(np.int32))


def part_path(path: str | Path, stage: int, stages: int, suffix: str) -> Path:
    """The file of a pipeline stage's layers: its record, or why there is none.

    Args:
        path: of the record of all stages, without a suffix.
        stage, stages: of the engine.
        suffix: ``"selections"`` or ``"refused"``.
    """
    return Path(f"{path}.{stage}-of-{stages}.{suffix}")


def read_record(path: str | Path) -> SelectionRecord:
    """The record that an engine wrote of a request, with the layers of all its pipeline stages.

    Args:
        path: as the engine returned it with the answer.

    Raises:
        FileNotFoundError: a stage has not written its file.
        ValueError: the engine refused to record the request, with its reason, or a file is no
            record.
    """
    path = Path(path)
    found = sorted(path.parent.glob(f"{glob.escape(path.name)}.*-of-*"))
    if not found:
        raise FileNotFoundError(f"path must be a record of an engine, found no {path}.*")
    stages = int(found[0].suffixes[-2].rsplit("-", 1)[-1])
    record: SelectionRecord | None = None
    for stage in range(stages):
        refused = part_path(path, stage, stages, "refused")
        if refused.exists():
            raise ValueError(f"the engine has no record of {path}: {refused.read_text()}")
        data = part_path(path, stage, stages, "selections").read_bytes()
        part = SelectionRecord.from_bytes(data)
        record = part if record is None else record.beside(part)
    return cast(SelectionRecord, record)

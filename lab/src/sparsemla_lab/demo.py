"""The demo: what a trained model loses, finds and saves with sparse attention, on a CPU.

The model in the package is a small DeepSeek-V3.2 that ``benchmarks/train_dsa.py`` trained on Python
sources and on recall; its tokens are bytes. Everything that it reads here it has never seen. It
runs in transformers, with the same weights and five kinds of attention: transformers' own to all
rows, this package's to the rows that the indexer selects, over two caches, and transformers' own to
the last rows and to random ones. These two are the controls: a selection must matter to be worth
anything.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from sparsemla.backends.transformers import BatchCache, PagedAttention, enable
from sparsemla.cache import PagedCache
from sparsemla.formats import BF16_576, FP8_DS_MLA, INDEX_FP8
from sparsemla.ops.decode import sparse_decode
from sparsemla.ops.indexer import indexer_topk
from sparsemla_lab.corpus import (
    ANSWER,
    Bytes,
    as_bytes,
    held_out_text,
    item_length,
    needles,
    windows,
)
from sparsemla_lab.generate import ByteTokenizer, Checkpoint, generate_text, load_checkpoint
from sparsemla_lab.screen import Screen, Table

DENSE = "all rows, MLA bf16"
OURS = "selected, bf16 cache"
OURS_FP8 = "selected, FP8 cache"
LAST = "last rows"
RANDOM = "random rows"
MODES = (DENSE, OURS, OURS_FP8, LAST, RANDOM)

RECALLING = (DENSE, OURS_FP8, LAST, RANDOM)
"""Those that must recall: the two caches select the same rows, almost always."""

LETTERS = 2
"""Letters of a key of recall, and of a value."""

QUESTION_BYTES = 512
"""A row of recall has a question for so many of its bytes."""

TIMED = (1024, 2048, 4096, 8192, 16384)
"""Contexts at which attention is timed."""

PIECES = 9
"""Pieces of the held-out text, of which the second one has prose as well as code."""

PROMPT_BYTES, NEW_BYTES = 1024, 160
"""Bytes of the text that the model continues, and with how many."""


def shipped_model() -> Path:
    """The checkpoint in the package."""
    return Path(str(resources.files("sparsemla_lab").joinpath("data/model")))


@dataclass(frozen=True)
class Question:
    """The last question of a text with items, and what each layer selects to answer it.

    Args:
        text: the text up to the question's key, which is its end.
        item: where the item with the answer begins.
        selected: for each layer, int64 ``[k]``: positions that its last byte selected.
        scores: for each layer, float32 ``[n]``: the indexer's scores of all bytes.
        answer, found: the bytes of the value, and what the model says.
    """

    text: bytes
    item: int
    selected: list[Tensor]
    scores: list[Tensor]
    answer: str
    found: str


@dataclass
class Report:
    """The demo's results, as far as it got.

    Args:
        num_weights: of the model.
        topk: rows that a byte selects.
        asked: for each context, how many values a text asks for.
        recall: for each context and kind of attention, the share of recalled values.
        question: the last question of the longest text.
        loss_bytes: how many bytes the loss is over.
        loss: for each kind of attention, nats a byte of held-out text.
        row_bytes: for all rows and for the two caches, the bytes of a token's row in one layer and
            of its index key; ``head_bytes`` those of all heads' keys and values in bfloat16.
        prompt, continuation: the end of a text, and how the model goes on, over the FP8 cache.
        milliseconds: for each context, of one layer's attention of a decoded byte: selection and
            sparse attention over FP8 caches, and dense attention by torch.
    """

    num_weights: int
    topk: int
    asked: dict[int, int]
    loss_bytes: int
    head_bytes: int
    recall: dict[int, dict[str, float]] = field(default_factory=dict)
    question: Question | None = None
    loss: dict[str, float] = field(default_factory=dict)
    row_bytes: dict[str, tuple[float, float]] = field(default_factory=dict)
    prompt: str = ""
    continuation: str = ""
    milliseconds: dict[int, tuple[float, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Curve:
    """What a number of selected rows costs.

    Args:
        context: bytes of the text with recall.
        num_values: how many values it asks for.
        loss_bytes: how many bytes the loss is over.
        points: for each number of rows and kind of attention, recall and loss, in nats a byte.
    """

    context: int
    num_values: int
    loss_bytes: int
    points: dict[int, dict[str, tuple[float, float]]] = field(default_factory=dict)


class _Texts:
    """The model and what it reads.

    Args:
        directory: a DeepSeek-V3.2 checkpoint whose tokens are bytes.
        context: bytes of the longest text.
        seed: draws the items of recall.
    """

    def __init__(self, directory: Path, context: int, seed: int) -> None:
        checkpoint = load_checkpoint(directory, cache_format="bf16", dtype="float32")
        checkpoint.attention.disable()
        self.model, self.config = checkpoint.model, cast(Any, checkpoint.model.config)
        text = as_bytes(held_out_text())
        self.plain = windows(text, PIECES, context // 2 + 1, None)[1:2].long()
        self.items = {length: _recall(text, length, seed) for length in _contexts(context)}
        self.generator = torch.Generator().manual_seed(seed)

    @property
    def loss_bytes(self) -> int:
        return self.plain.shape[1] - 1

    def loss(self, mode: str, advance: Callable[[float], None]) -> tuple[float, BatchCache | None]:
        """Nats a byte of plain text, and the cache of this package's attention."""
        with (
            _attention(self.model, mode, self.generator) as handle,
            _inputs(self.model, advance),
        ):
            logits = _read(self.model, self.plain[:, :-1])
            cache = None if handle is None else cast(BatchCache, handle.cache)
            return functional.cross_entropy(logits, self.plain[0, 1:]).item(), cache

    def recall(
        self, length: int, mode: str, advance: Callable[[float], None]
    ) -> tuple[float, Question | None]:
        """The share of recalled values; and the last question, if this package selected rows."""
        batch = self.items[length]
        with (
            _attention(self.model, mode, self.generator) as handle,
            _inputs(self.model, advance) as inputs,
        ):
            logits = _read(self.model, batch.tokens)
            question = None
            if handle is not None:
                picked = handle.selections[-1]
                question = _question(self.model, batch, logits, picked, inputs)
        return _recalled(logits, batch), question


def run_demo(
    directory: Path,
    *,
    context: int,
    timed: tuple[int, ...] = TIMED,
    new_bytes: int = NEW_BYTES,
    seed: int = 0,
    screen: Screen,
    picture: Path,
    draw: Callable[[Path, Question], object],
) -> Report:
    """Read texts with each kind of attention, and show each result when it is there.

    Args:
        directory: a DeepSeek-V3.2 checkpoint whose tokens are bytes.
        context: bytes of the longest text with recall, beside a quarter and half of them; the text
            of the loss has half of them.
        timed: contexts at which attention is timed.
        new_bytes: bytes to continue a text with.
        seed: draws the items of recall.
        screen: shows the results.
        picture: file of the picture.
        draw: draws a question; called after each text, the longest last.

    Raises:
        CheckpointError: the checkpoint is unusable.
    """
    texts = _Texts(directory, context, seed)
    config = texts.config
    report = Report(
        num_weights=sum(p.numel() for p in texts.model.parameters()),
        topk=config.index_topk,
        asked={length: _num_values(batch) for length, batch in texts.items.items()},
        loss_bytes=texts.loss_bytes,
        head_bytes=2 * config.num_attention_heads * (config.qk_head_dim + config.v_head_dim),
    )
    costs: dict[str, float] = {}
    for length in texts.items:
        costs |= {_reading(length, mode): _cost(length) for mode in RECALLING}
        costs[_drawing(length)] = 1.5
    costs |= {_reading(texts.loss_bytes, mode, "loss"): _cost(texts.loss_bytes) for mode in MODES}
    costs[WRITING] = new_bytes / 80
    costs |= {_timing(length): length / 8192 for length in timed}
    screen.begin(costs)
    screen.print(
        f"A trained DeepSeek-V3.2 of {report.num_weights / 1e6:.1f} million weights, whose tokens "
        f"are bytes, reads texts that it has never seen. Each byte attends to all rows before it, "
        f"or to {report.topk} of them in each layer."
    )
    _show_recall(texts, report, screen, picture, draw)
    _show_loss(texts, report, screen)
    _show_writing(texts, report, screen, new_bytes)
    _show_times(texts, report, screen, timed)
    screen.print(f"\n{summary(report)}")
    return report


def _show_recall(
    texts: _Texts,
    report: Report,
    screen: Screen,
    picture: Path,
    draw: Callable[[Path, Question], object],
) -> None:
    screen.print("\n1. Does it find a row that it needs?", style="bold")
    screen.print(
        "Items <abCD> are hidden in Python sources. At its end a text gives each key ab again, and "
        "the model must say CD. Recall: the share of values with both letters right."
    )
    screen.line(f"What each layer selects for the last question: {picture}")
    names = _named(report.topk)
    heads = [names[mode].replace(", ", ",\n") for mode in RECALLING]
    table = Table(screen.line, ["bytes\nof text", "values\nasked", *heads])
    for length in texts.items:
        report.recall[length] = {}
        for mode in RECALLING:
            with screen.step(_reading(length, mode)) as advance:
                report.recall[length][mode], question = texts.recall(length, mode, advance)
                report.question = question or report.question
        shares = (f"{share:.0%}" for share in report.recall[length].values())
        table.row(length, report.asked[length], *shares)
        with screen.step(_drawing(length)):
            draw(picture, cast(Question, report.question))


def _show_loss(texts: _Texts, report: Report, screen: Screen) -> None:
    screen.print("\n2. What does it lose, and what does it keep?", style="bold")
    names = _named(report.topk)
    heads = [
        "each byte attends to",
        f"loss of {report.loss_bytes}\nbytes, nats/byte",
        "cache of a layer,\nB/token",
        "of these\nindex keys",
    ]
    table = Table(screen.line, heads, first=max(map(len, names.values())))
    for mode in MODES:
        with screen.step(_reading(report.loss_bytes, mode, "loss")) as advance:
            report.loss[mode], cache = texts.loss(mode, advance)
        if mode == DENSE:
            report.row_bytes[mode] = BF16_576.bytes_per_token, 0
        elif cache is not None:
            row = (BF16_576 if mode == OURS else FP8_DS_MLA).bytes_per_token
            report.row_bytes[mode] = row, cache.bytes_per_token / len(_layers(texts.model)) - row
        sizes = report.row_bytes.get(mode)
        cells = ["", ""] if sizes is None else [f"{sum(sizes):.0f}", f"{sizes[1]:.0f}"]
        table.row(names[mode], f"{report.loss[mode]:.3f}", *cells)
    screen.print(
        f"MLA makes the cache small ({report.head_bytes} bytes with all heads' keys and values), "
        "and so does FP8. The selection adds the index keys; it saves reads, not bytes."
    )


def _show_writing(texts: _Texts, report: Report, screen: Screen, new_bytes: int) -> None:
    screen.print("\n3. How does it go on? (after |)", style="bold")
    prompt = bytes(texts.plain[0, :-1].tolist())[-PROMPT_BYTES:]
    report.prompt = prompt.decode(errors="replace")
    with screen.step(WRITING) as advance:
        report.continuation = _continue(texts.model, prompt, new_bytes, advance)
    lines = 4 + report.continuation.count("\n")
    screen.print(shown(f"{report.prompt}|{report.continuation}", lines=lines))


def _show_times(texts: _Texts, report: Report, screen: Screen, timed: tuple[int, ...]) -> None:
    screen.print("\n4. What does a new byte cost?", style="bold")
    first = "attention of a layer,\nms, after bytes"
    table = Table(screen.line, [first, "selected,\nFP8 cache", "all rows,\ntorch's SDPA"])
    for length in timed:
        with screen.step(_timing(length)):
            report.milliseconds[length] = _time_attention(texts.config, length)
        table.row(length, *(f"{ms:.2f}" for ms in report.milliseconds[length]))


def run_topk(
    directory: Path,
    topks: Sequence[int],
    *,
    context: int,
    seed: int = 0,
    screen: Screen,
    picture: Path,
    draw: Callable[[Path, Curve], object],
) -> Curve:
    """Read with other numbers of selected rows, and with as many of the last ones.

    Args:
        directory: a DeepSeek-V3.2 checkpoint whose tokens are bytes.
        topks: numbers of rows.
        context: bytes of the text with recall; the text of the loss has half of them.
        seed: draws the items of recall.
        screen: shows the results.
        picture: file of the picture.
        draw: draws the curve; called after each number.

    Raises:
        CheckpointError: the checkpoint is unusable.
    """
    texts = _Texts(directory, context, seed)
    trained = texts.config.index_topk
    curve = Curve(context, _num_values(texts.items[context]), texts.loss_bytes)
    modes = OURS_FP8, LAST
    purposes = {"recall": context, "loss": texts.loss_bytes}
    screen.begin(
        {
            f"{topk} rows, {_reading(length, mode, purpose)}": _cost(length)
            for topk in topks
            for mode in modes
            for purpose, length in purposes.items()
        }
    )
    screen.print(
        f"How many rows does a byte need? The model was trained to select {trained}. Recall is the "
        f"share of {curve.num_values} values that a text of {context} bytes asks for, loss is over "
        f"{curve.loss_bytes} bytes of another one."
    )
    screen.line(f"The curve, drawn after each row: {picture}")
    heads = ["recall,\nselected", "recall,\nlast rows", "nats/byte,\nselected"]
    table = Table(screen.line, ["rows a byte\nattends to", *heads, "nats/byte,\nlast rows"])
    for topk in topks:
        for layer in _layers(texts.model):
            layer.self_attn.indexer.index_topk = topk
        found = {}
        for mode in modes:
            with screen.step(f"{topk} rows, {_reading(context, mode)}") as advance:
                share, _ = texts.recall(context, mode, advance)
            with screen.step(f"{topk} rows, {_reading(texts.loss_bytes, mode, 'loss')}") as advance:
                found[mode] = share, texts.loss(mode, advance)[0]
        curve.points[topk] = found
        recalls, losses = zip(*found.values(), strict=True)
        table.row(topk, *(f"{one:.0%}" for one in recalls), *(f"{one:.3f}" for one in losses))
        draw(picture, curve)
    return curve


def parse_topk(text: str) -> list[int]:
    """Numbers of rows, such as ``16,64,256``, the smallest first.

    >>> parse_topk("64,16")
    [16, 64]
    """
    numbers = text.replace(" ", "").split(",")
    if not all(re.fullmatch("[0-9]{1,6}", number) and int(number) for number in numbers):
        raise ValueError(f"--topk must be numbers of rows such as 16,64,256, got {text!r}")
    return sorted(set(map(int, numbers)))


WRITING = "writing"
"""The name of a step, as these functions give for others."""


def _reading(length: int, mode: str, purpose: str = "recall") -> str:
    return f"{purpose}, {length} bytes: {mode}"


def _drawing(length: int) -> str:
    return f"drawing the question after {length} bytes"


def _timing(length: int) -> str:
    return f"timing after {length} bytes"


def _cost(length: int) -> float:
    """About the seconds of a core to read so many bytes: layers, and attention."""
    return 0.3 * (length / 1024 + (length / 1024) ** 2)


def _named(topk: int) -> dict[str, str]:
    """The kinds of attention, with their numbers of rows."""
    return {
        DENSE: DENSE,
        OURS: f"{topk} {OURS}",
        OURS_FP8: f"{topk} {OURS_FP8}",
        LAST: f"{LAST.split()[0]} {topk} rows",
        RANDOM: f"{topk} {RANDOM}",
    }


def _num_values(batch: Bytes) -> int:
    return int((batch.kinds == ANSWER).sum()) // LETTERS


def _contexts(longest: int) -> list[int]:
    return [longest // 4, longest // 2, longest]


def _recall(text: Tensor, length: int, seed: int) -> Bytes:
    """A row of text with items, and questions about them at its end."""
    generator = torch.Generator().manual_seed(seed + length)
    pairs = max(2, length // QUESTION_BYTES * 6)
    pairs = min(pairs, length // item_length(LETTERS) // 4)
    return needles(windows(text, 1, length + 1, generator), pairs, LETTERS, generator)


@torch.no_grad()
def _read(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Logits ``[n, 256]`` of the bytes after each of a row's."""
    return cast(Any, model)(tokens).logits[0].float()


def _recalled(logits: Tensor, batch: Bytes) -> float:
    """The share of values of which all letters are right."""
    right = (logits.argmax(-1) == batch.labels[0])[batch.kinds[0] == ANSWER]
    return right.view(-1, LETTERS).all(1).float().mean().item()


def _layers(model: PreTrainedModel) -> list[Any]:
    return list(cast(Any, model.base_model).layers)


@contextlib.contextmanager
def _attention(
    model: PreTrainedModel, mode: str, generator: torch.Generator
) -> Iterator[PagedAttention | None]:
    """Let the model attend as ``mode`` says; gives the handle of this package's attention."""
    if mode in (OURS, OURS_FP8):
        cache_format = BF16_576 if mode == OURS else FP8_DS_MLA
        with enable(model, cache_format=cache_format, record_selections=True) as handle:
            yield handle
        return
    indexers = [layer.self_attn.indexer for layer in _layers(model)]
    topk = indexers[0].index_topk

    def choose(hidden_states: Tensor, *given: object, **named: object) -> Tensor:
        length = hidden_states.shape[1]
        if mode == DENSE:
            return torch.arange(length).expand(1, length, length)
        if mode == LAST:
            back = torch.arange(min(topk, length))
            return (torch.arange(length)[:, None] - back).clamp_min(0)[None].int()
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        draw = torch.rand(length, length, generator=generator).masked_fill_(later, 2)
        # What a byte must not see, transformers masks.
        return draw.topk(min(topk, length), largest=False).indices[None].int()

    try:
        for indexer in indexers:
            indexer.forward = choose
        yield None
    finally:
        for indexer in indexers:
            del indexer.forward


@contextlib.contextmanager
def _inputs(
    model: PreTrainedModel, advance: Callable[[float], None]
) -> Iterator[dict[int, Tensor]]:
    """What the attention of each layer read in the latest forward, ``[1, n, hidden]``.

    Args:
        model: the model.
        advance: takes the share of the layers that are done.
    """
    inputs: dict[int, Tensor] = {}
    layers = _layers(model)

    def record(layer_idx: int, module: object, given: object, out: Tensor) -> None:
        inputs[layer_idx] = out
        advance(layer_idx / len(layers))

    hooks = [
        layer.input_layernorm.register_forward_hook(functools.partial(record, layer_idx))
        for layer_idx, layer in enumerate(layers)
    ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _continue(
    model: PreTrainedModel, prompt: bytes, new_bytes: int, advance: Callable[[float], None]
) -> str:
    """What the model writes after a prompt, over the FP8 cache."""
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        advance(min(len(pieces) / new_bytes, 1))

    with enable(model, cache_format=FP8_DS_MLA) as handle:
        some = Checkpoint(model, handle, ByteTokenizer())
        generate_text(some, prompt, new_bytes, write=write)
    return "".join(pieces)


def _question(
    model: PreTrainedModel,
    batch: Bytes,
    logits: Tensor,
    selections: dict[int, Tensor],
    inputs: dict[int, Tensor],
) -> Question:
    """The last question of a row that the model has read, with ``logits`` as the result."""
    row = bytes(batch.tokens[0].tolist()) + bytes(batch.labels[0, -1:].tolist())
    end = len(row) - 1 - LETTERS  # the row ends with the value and >
    text, answer = row[:end], row[end : end + LETTERS]
    found = logits[end - 1 : end - 1 + LETTERS].argmax(-1)
    rows = [selections[layer_idx][end - 1].long() for layer_idx in inputs]
    return Question(
        text=text,
        item=text.find(text[-1 - LETTERS :] + answer),
        selected=[some[some >= 0] for some in rows],
        scores=[
            _scores(layer.self_attn, model, x[:, :end])
            for layer, x in zip(_layers(model), inputs.values(), strict=True)
        ],
        answer=answer.decode(errors="replace"),
        found=bytes(found.tolist()).decode(errors="replace"),
    )


@torch.no_grad()
def _scores(attention: Any, model: PreTrainedModel, x: Tensor) -> Tensor:  # noqa: ANN401
    """The indexer's scores ``[n]`` of all bytes for the last one, from attention's input."""
    indexer, rope = attention.indexer, attention.qk_rope_head_dim
    cos, sin = cast(Any, model.base_model).rotary_emb(x, torch.arange(x.shape[1])[None])
    cos, sin = cos[0, :, : rope // 2], sin[0, :, : rope // 2]

    def rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b, rest = heads.split([rope // 2, rope // 2, heads.shape[-1] - rope], -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    q_low = attention.q_a_layernorm(attention.q_a_proj(x[0, -1]))
    q = rotate(indexer.wq_b(q_low).view(indexer.n_heads, -1), cos[-1], sin[-1])
    k = rotate(indexer.k_norm(indexer.wk(x[0])), cos, sin)
    weights = indexer.weights_proj(x[0, -1]) * indexer.n_heads**-0.5
    return weights @ (q @ k.T * indexer.softmax_scale).relu()


def _time_attention(config: Any, length: int) -> tuple[float, float]:  # noqa: ANN401
    """Milliseconds of one layer's attention of a decoded byte: ours, and the fastest dense one.

    The caches hold random rows: time does not depend on them.
    """
    heads, topk = config.num_attention_heads, min(config.index_topk, length)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    pages = math.ceil(length / 64)
    slots = torch.arange(length)
    latents = PagedCache.allocate(FP8_DS_MLA, num_pages=pages, page_size=64)
    keys = PagedCache.allocate(INDEX_FP8, num_pages=pages, page_size=64)
    latents.write(slots, draw(length, 576))
    keys.write(slots, draw(length, 128))
    table = torch.arange(pages, dtype=torch.int32)[None]
    q, index_q = draw(1, 1, heads, 576).bfloat16(), draw(1, config.index_n_heads, 128)
    index_q, weights = index_q.to(torch.float8_e4m3fn), draw(1, config.index_n_heads)
    scale = config.qk_head_dim**-0.5

    def sparse() -> None:
        rows = indexer_topk(
            index_q,
            weights,
            keys,
            input_row_offsets=torch.tensor([0, 1]),
            seq_lens=torch.tensor([length]),
            page_table=table,
            topk=topk,
            as_slots=True,
        )
        sparse_decode(q, latents, rows[None], softmax_scale=scale)

    def dense(dtype: torch.dtype) -> Callable[[], object]:
        query, k = (draw(1, heads, n, config.qk_head_dim).to(dtype) for n in (1, length))
        v = draw(1, heads, length, config.v_head_dim).to(dtype)
        return lambda: functional.scaled_dot_product_attention(query, k, v, scale=scale)

    works = [sparse, dense(torch.float32), dense(torch.bfloat16)]
    ours, *theirs = median_times(works, torch.device("cpu"))
    return ours, min(theirs)


@torch.no_grad()
def median_times(works: list[Callable[[], object]], device: torch.device) -> list[float]:
    """Milliseconds of each function, from its call to the end of its work on a device."""
    seconds: list[list[float]] = [[] for _ in works]
    for _ in range(12):  # in turn, so that all meet the same load of the machine
        for work, times in zip(works, seconds, strict=True):
            began = time.perf_counter()
            work()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            times.append(time.perf_counter() - began)
    return [1000 * median(times[2:]) for times in seconds]


def summary(report: Report) -> str:
    """What was shown, in a few sentences."""
    longest = max(report.recall)
    recall, loss = report.recall[longest], report.loss
    times = [
        f"{ours:.1f} ms a layer after {context} bytes, "
        f"{'faster' if ours < dense else 'slower'} than all rows ({dense:.1f} ms)"
        for context, (ours, dense) in report.milliseconds.items()
        if context in (longest, max(report.milliseconds))
    ]
    return (
        f"With {report.topk} of up to {longest} rows, selected from an FP8 cache, the model "
        f"recalls {recall[OURS_FP8]:.0%} of {report.asked[longest]} values (all rows "
        f"{recall[DENSE]:.0%}, last {report.topk} {recall[LAST]:.0%}, random {recall[RANDOM]:.0%}) "
        f"and has a loss of {loss[OURS_FP8]:.3f} over {report.loss_bytes} bytes (all rows "
        f"{loss[DENSE]:.3f}). On this CPU, selection and attention take {', and '.join(times)}."
    )


def shown(text: str, *, lines: int, width: int = 76) -> str:
    """The last lines of a text, as much as fits."""
    rows = [re.sub(r"[^\x20-\x7e]", "?", line)[:width] for line in text.split("\n")]
    return "\n".join(rows[-lines:])

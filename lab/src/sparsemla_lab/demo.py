"""The demo: what a trained model loses, finds and saves with sparse attention, on a CPU.

The model in the package is a small DeepSeek-V3.2 that ``benchmarks/train_dsa.py`` trained on Python
sources and on recall; its tokens are bytes. Everything that it reads here it has never seen. It
runs in transformers, with the same weights and four kinds of attention: transformers' own to all
rows, this package's to the rows that the indexer selects, over two caches, and transformers' own to
random rows. The last one is the control: a selection must matter to be worth anything.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from rich import box
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from sparsemla.backends.transformers import PagedAttention, enable
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

DENSE = "all rows"
OURS = "selected, bf16 cache"
OURS_FP8 = "selected, FP8 cache"
RANDOM = "random rows"
MODES = (DENSE, OURS, OURS_FP8, RANDOM)

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


@dataclass(frozen=True)
class Report:
    """The demo's results.

    Args:
        num_weights: of the model.
        topk: rows that a byte selects.
        prompt, continuation: the end of a text, and how the model goes on, over the FP8 cache.
        loss: for each kind of attention, nats a byte of held-out text.
        recall: for each kind of attention but the bfloat16 cache, and each context, the share of
            recalled values.
        milliseconds: for each context, of one layer's attention of a decoded byte: selection and
            sparse attention over FP8 caches, and dense attention by torch.
        cache_bytes: bytes of a token in one layer: of all heads' keys and values in bfloat16, and
            of the two caches here.
        question: the last question of the longest text.
    """

    num_weights: int
    topk: int
    prompt: str
    continuation: str
    loss: dict[str, float]
    recall: dict[str, dict[int, float]]
    milliseconds: dict[int, tuple[float, float]]
    cache_bytes: dict[str, float]
    question: Question


def run_demo(
    directory: Path,
    *,
    context: int,
    timed: tuple[int, ...] = TIMED,
    new_bytes: int = NEW_BYTES,
    seed: int = 0,
    progress: Progress,
) -> Report:
    """Read texts with each kind of attention.

    Args:
        directory: a DeepSeek-V3.2 checkpoint whose tokens are bytes.
        context: bytes of the longest text with recall, beside a quarter and half of them; the text
            of the loss has half of them.
        timed: contexts at which attention is timed.
        new_bytes: bytes to continue a text with.
        seed: draws the items of recall.
        progress: shows the progress bars.

    Raises:
        CheckpointError: the checkpoint is unusable.
    """
    checkpoint = load_checkpoint(directory, cache_format="bf16", dtype="float32")
    checkpoint.attention.disable()
    model, config = checkpoint.model, cast(Any, checkpoint.model.config)
    text = as_bytes(held_out_text())
    plain = windows(text, PIECES, context // 2 + 1, None)[1:2].long()
    asked = {length: _recall(text, length, seed) for length in _contexts(context)}

    loss: dict[str, float] = {}
    recall: dict[str, dict[int, float]] = {}
    heads, dims = config.num_attention_heads, config.qk_head_dim + config.v_head_dim
    cache_bytes = {DENSE: 2.0 * heads * dims}
    questions = []
    numbers = torch.Generator().manual_seed(seed)
    task = progress.add_task("reading", total=len(MODES) + (len(MODES) - 1) * len(asked))
    for mode in MODES:
        with _attention(model, mode, numbers) as handle, _inputs(model) as inputs:
            logits = _read(model, plain[:, :-1])
            loss[mode] = functional.cross_entropy(logits, plain[0, 1:]).item()
            progress.advance(task)
            if handle is not None and handle.cache is not None:
                cache_bytes[mode] = handle.cache.bytes_per_token / len(_layers(model))
            if mode == OURS:
                continue
            recall[mode] = {}
            for length, batch in asked.items():
                logits = _read(model, batch.tokens)
                recall[mode][length] = _recalled(logits, batch)
                progress.advance(task)
            if handle is not None:
                picked = handle.selections[-1]
                questions.append(_question(model, asked[context], logits, picked, inputs))

    task = progress.add_task("writing", total=new_bytes)
    prompt = bytes(plain[0, :-1].tolist())[-PROMPT_BYTES:]
    continuation = _continue(model, prompt, new_bytes, lambda: progress.advance(task))

    milliseconds = {}
    task = progress.add_task("timing", total=len(timed))
    for length in timed:
        milliseconds[length] = _time_attention(config, length)
        progress.advance(task)
    return Report(
        num_weights=sum(p.numel() for p in model.parameters()),
        topk=config.index_topk,
        prompt=prompt.decode(errors="replace"),
        continuation=continuation,
        loss=loss,
        recall=recall,
        milliseconds=milliseconds,
        cache_bytes=cache_bytes,
        question=questions[0],
    )


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
def _inputs(model: PreTrainedModel) -> Iterator[dict[int, Tensor]]:
    """What the attention of each layer read in the latest forward, ``[1, n, hidden]``."""
    inputs: dict[int, Tensor] = {}

    def record(layer_idx: int, module: object, given: object, out: Tensor) -> None:
        inputs[layer_idx] = out

    hooks = [
        layer.input_layernorm.register_forward_hook(functools.partial(record, layer_idx))
        for layer_idx, layer in enumerate(_layers(model))
    ]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()


def _continue(
    model: PreTrainedModel, prompt: bytes, new_bytes: int, advance: Callable[[], None]
) -> str:
    """What the model writes after a prompt, over the FP8 cache."""
    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        advance()

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


def report_tables(report: Report) -> list[Table]:
    """Quality by kind of attention, and time by context."""
    quality = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    quality.add_column("each byte attends to", no_wrap=True)
    quality.add_column("loss,\nnats/byte", justify="right")
    for length in report.recall[DENSE]:
        quality.add_column(f"recall at\n{length} bytes", justify="right")
    quality.add_column("cache,\nB/token", justify="right")
    for mode in MODES:
        shares = [f"{share:.0%}" for share in report.recall.get(mode, {}).values()]
        shares += [""] * (len(report.recall[DENSE]) - len(shares))
        size = report.cache_bytes.get(mode)
        quality.add_row(
            mode, f"{report.loss[mode]:.3f}", *shares, "" if size is None else f"{size:.0f}"
        )

    times = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    times.add_column("attention of a decoded\nbyte, ms a layer, after", no_wrap=True)
    for length in report.milliseconds:
        times.add_column(f"{length}", justify="right")
    for index, name in enumerate((OURS_FP8, "all rows, torch's SDPA")):
        times.add_row(name, *(f"{pair[index]:.2f}" for pair in report.milliseconds.values()))
    return [quality, times]


def summary(report: Report) -> str:
    """What was shown, in one sentence."""
    longest = max(report.recall[DENSE])
    loss, recall = report.loss, {m: shares[longest] for m, shares in report.recall.items()}
    context, (ours, dense) = max(report.milliseconds.items())
    return (
        f"With {report.topk} of up to {longest} rows a byte, which its indexer selects from an FP8 "
        f"cache, this trained model of {report.num_weights / 1e6:.1f} million weights has a loss "
        f"of {loss[OURS_FP8]:.3f} against {loss[DENSE]:.3f} with all rows and recalls "
        f"{recall[OURS_FP8]:.0%} of the values against {recall[DENSE]:.0%} (random rows: "
        f"{recall[RANDOM]:.0%}), keeps {report.cache_bytes[OURS_FP8]:.0f} bytes a token and layer "
        f"instead of {report.cache_bytes[DENSE]:.0f}, and after {context} bytes attends for a new "
        f"one in {ours:.1f} ms a layer instead of {dense:.1f}."
    )


def shown(text: str, *, lines: int, width: int = 76) -> str:
    """The last lines of a text, as much as fits."""
    rows = [re.sub(r"[^\x20-\x7e]", "?", line)[:width] for line in text.split("\n")]
    return "\n".join(rows[-lines:])

"""The demo of DeepSeek-V4: what its layers keep and read.

There is no trained model here: the weights are built by :mod:`sparsemla_lab.testing.models_v4`.
Each token has four parts, and each of them comes from the past by a path of attention of its own.
So the demo shows that tokens are equal, which rows are read, bytes and time; it shows nothing of
quality.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from sparsemla.backends.transformers import PagedAttention, enable
from sparsemla.backends.transformers.deepseek_v4 import CSA, HCA, WINDOW, CompressedCache
from sparsemla.cache import PagedCache
from sparsemla.formats import BF16_512, FP8_584, FP8_DS_MLA, INDEX_FP8
from sparsemla.ops import indexer_topk, sparse_decode, visible_slots
from sparsemla_lab.demo import median_times
from sparsemla_lab.screen import Screen, Table
from sparsemla_lab.testing.models_v4 import (
    FIRST_COPIED,
    compressed_copying_model,
    copied_tokens,
    parts_of,
)

EAGER = "transformers, eager"
OURS = "sparsemla, bf16 cache"
OURS_FP8 = "sparsemla, FP8 cache"
RAW_ONLY = "eager, without entries"
MODES = (EAGER, OURS, OURS_FP8, RAW_ONLY)

PATHS = (
    "a raw row,\n37 back",
    "entries of\n4, 150 back",
    "entries\nof 128",
    "entries of\n4, 5 back",
)
"""Where the parts of a token come from."""

SIZES = {"head_dim": 512, "rope_dim": 64, "index_head_dim": 128}
"""The rows and index keys of the published models."""

PROMPT_TOKENS, NEW_TOKENS = 200, 128

TIMED = (1024, 4096, 16384, 65536)
"""Contexts at which attention is timed."""

HEADS, INDEX_HEADS, TOPK, SLIDING_WINDOW = 64, 64, 512, 128
"""Of the layers that are timed: V4-Flash's."""

DENSE = "dense"
"""A layer of MLA that attends to all rows."""

KINDS = {
    WINDOW: "window only",
    CSA: "entries of 4, selected",
    HCA: "entries of 128",
    DENSE: "plain MLA, all rows",
}
"""Kinds of layers, and their names in the tables."""

GENERATING = "generating, eager", "generating, sparsemla with an FP8 cache"
HEADS_OF_ROWS = "rows of\nwindow", "entries\nof 4", "index\nkeys", "entries\nof 128", "  all\nrows"
HEADS_OF_TIMES = "   ms:\nwindow", "  of 4", "of 128", "   all\nrows"
"""Of columns with numbers up to 65536 and 999.99."""


@dataclass(frozen=True)
class Report:
    """The demo's results.

    Args:
        device: it ran there.
        num_weights: of the model.
        num_new, num_equal: tokens that the model generates over the FP8 cache, and how many of them
            are those of transformers' eager attention.
        right: for each kind of attention, the share of each part that is right after the same text.
        apart: for each kind of attention, the largest difference of a logit from eager attention.
        margin: least distance of the two best logits of eager attention.
        kept: for each kind of layer, bytes of each token, and of a request of any length.
        rows: for each context and kind of layer, rows that a decoded token attends to.
        scored: for each context, index keys that the indexer of a layer scores.
        milliseconds: for each context and kind of layer, of a decoded token's attention.
    """

    device: str
    num_weights: int
    num_new: int
    num_equal: int
    right: dict[str, list[float]]
    apart: dict[str, float]
    margin: float
    kept: dict[str, tuple[float, int]]
    rows: dict[int, dict[str, int]]
    scored: dict[int, int]
    milliseconds: dict[int, dict[str, float]]


@torch.no_grad()
def run_demo(
    *,
    device: str = "cpu",
    timed: tuple[int, ...] = TIMED,
    new_tokens: int = NEW_TOKENS,
    seed: int = 0,
    screen: Screen,
) -> Report:
    """Generate with the built model, time layers of the published size, and show each result.

    Args:
        device: where it runs; a GPU's kernels are compiled first.
        timed: contexts at which attention is timed.
        new_tokens: tokens to generate.
        seed: draws the prompt.
        screen: shows the results.
    """
    screen.begin(
        dict.fromkeys((*GENERATING, *MODES), 1.0)
        | {_timing(length): 0.5 + length / 16384 for length in timed}
    )
    screen.print(
        "A DeepSeek-V4 that is built, not trained: each part of a token is copied by a path of its "
        "own.",
        style="bold",
    )
    model = compressed_copying_model(**cast(Any, SIZES)).to(cast(Any, device))
    config = cast(Any, model.config)
    generator = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, config.vocab_size, (1, PROMPT_TOKENS), generator=generator).to(device)

    def generate() -> Tensor:
        mask = torch.ones_like(prompt)
        return cast(Any, model).generate(
            prompt, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False
        )

    with screen.step(GENERATING[0]):
        text = generate()
    with screen.step(GENERATING[1]), _attention(model, OURS_FP8) as handle:
        num_equal = int((generate() == text)[:, PROMPT_TOKENS:].sum())
        kept = _kept(cast(Any, handle).cache)
    expected = parts_of(copied_tokens(text[:, :-1]))[:, PROMPT_TOKENS - 1 - FIRST_COPIED :]
    logits, right, apart = {}, {}, {}
    table = Table(
        screen.line,
        ["parts of tokens that\nare right, from", *PATHS, "logits\napart"],
        first=max(map(len, MODES)),
    )
    for mode in MODES:
        with screen.step(mode), _attention(model, mode):
            read = cast(Any, model)(text[:, :-1]).logits[:, PROMPT_TOKENS - 1 :].float()
        logits[mode] = read
        right[mode] = (parts_of(read.argmax(-1)) == expected).float().mean((0, 1)).tolist()
        apart[mode] = (read - logits[EAGER]).abs().max().item()
        shares = (f"{share:.0%}" for share in right[mode])
        table.row(mode, *shares, "" if mode == EAGER else f"{apart[mode]:.2f}")
    best = logits[EAGER].topk(2, -1).values
    screen.line("")
    names = max(map(len, KINDS.values()))
    table = Table(screen.line, ["a layer keeps", "bytes a\ntoken", "KiB a\nrequest"], first=names)
    for kind, name in KINDS.items():
        table.row(name, f"{kept[kind][0]:.1f}", f"{kept[kind][1] / 1024:.0f}")

    rows, scored, milliseconds = {}, {}, {}
    screen.line("")
    screen.line("For a new token a layer reads rows (and scores index keys), in milliseconds:")
    table = Table(screen.line, ["after\ntokens", *HEADS_OF_ROWS, *HEADS_OF_TIMES])
    for length in timed:
        with screen.step(_timing(length)):
            layers = _Layers(length, torch.device(device))
            rows[length], milliseconds[length] = layers.rows(), layers.times()
            scored[length] = length // 4
        window, of_4, of_128, dense = rows[length].values()
        times = (f"{ms:.2f}" for ms in milliseconds[length].values())
        table.row(length, window, of_4, scored[length], of_128, dense, *times)
    report = Report(
        device="the CPU" if device == "cpu" else torch.cuda.get_device_name(device),
        num_weights=sum(p.numel() for p in model.parameters()),
        num_new=new_tokens,
        num_equal=num_equal,
        right=right,
        apart=apart,
        margin=(best[..., 0] - best[..., 1]).min().item(),
        kept=kept,
        rows=rows,
        scored=scored,
        milliseconds=milliseconds,
    )
    screen.print(f"\n{summary(report)}")
    return report


def _timing(length: int) -> str:
    return f"timing attention after {length} tokens"


@contextlib.contextmanager
def _attention(model: PreTrainedModel, mode: str) -> Iterator[PagedAttention | None]:
    """Let the model attend as ``mode`` says; gives the handle of this package's attention."""
    if mode in (OURS, OURS_FP8):
        cache_format = BF16_512 if mode == OURS else FP8_584
        with enable(model, cache_format=cache_format) as handle:
            yield handle
        return
    modules = [layer.self_attn for layer in cast(Any, model.base_model).layers]
    compressors = [module.compressor for module in modules]
    try:
        if mode == RAW_ONLY:
            for module in modules:
                module.compressor = None
        yield None
    finally:
        for module, compressor in zip(modules, compressors, strict=True):
            module.compressor = compressor


def _kept(cache: CompressedCache) -> dict[str, tuple[float, int]]:
    """Bytes of a token and of a request in a layer of each kind, and in one of DeepSeek-V3.2."""
    kept = {}
    for kind, layer_idx in ((WINDOW, 0), (CSA, 1), (HCA, 2)):
        of_token = sum(
            pages.caches[layer_idx].format.bytes_per_token / pages.ratio
            for pages in (*cache.entries.values(), cache.index_keys)
            if layer_idx in pages.caches
        )
        ring = cache.rings.caches[layer_idx].format.bytes_per_token * cache.rings.page_size
        open_windows = sum(
            states.states[layer_idx].rows[0].nbytes
            for states in (cache.states, cache.index_states)
            if layer_idx in states.states
        )
        kept[kind] = of_token, ring + open_windows
    return kept | {DENSE: (FP8_DS_MLA.bytes_per_token, 0)}


class _Layers:
    """The attention of a decoded token in a layer of each kind, after ``length`` tokens.

    The caches hold random rows: time does not depend on them.
    """

    def __init__(self, length: int, device: torch.device) -> None:
        self.length, self.device = length, device
        self.window = min(length, SLIDING_WINDOW)
        self.generator = torch.Generator(device).manual_seed(0)
        self.raw = self._cache(FP8_584, self.window)
        self.csa = self._cache(FP8_584, length // 4)
        self.keys = self._cache(INDEX_FP8, length // 4)
        self.hca = self._cache(FP8_584, max(length // 128, 1))
        self.q = self._draw(1, 1, HEADS, 512).bfloat16()
        index_q = self._draw(1, INDEX_HEADS, 128).to(torch.float8_e4m3fn)
        self.index_q, self.index_weights = index_q, self._draw(1, INDEX_HEADS)
        self.sink = self._draw(HEADS)

    def _draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def _ints(self, *values: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _cache(self, fmt: Any, num_rows: int) -> PagedCache:  # noqa: ANN401
        cache = PagedCache.allocate(fmt, -(-num_rows // 64), 64, device=self.device)
        cache.write(torch.arange(num_rows, device=self.device), self._draw(num_rows, fmt.head_dim))
        return cache

    def _table(self, cache: PagedCache) -> Tensor:
        return torch.arange(cache.num_pages, dtype=torch.int32, device=self.device)[None]

    def _entries(self, kind: str) -> tuple[PagedCache | None, Tensor | None, Tensor | None]:
        """Entries of a layer, slots of those that the token attends to, and their number."""
        if kind == WINDOW:
            return None, None, None
        if kind == CSA:
            slots = indexer_topk(
                self.index_q,
                self.index_weights,
                self.keys,
                input_row_offsets=self._ints(0, 1),
                seq_lens=self._ints(self.length),
                page_table=self._table(self.keys),
                topk=TOPK,
                ratio=4,
                as_slots=True,
            )
            return self.csa, slots, None
        slots, lengths = visible_slots(
            self._ints(self.length - 1, dtype=torch.int64),
            self._table(self.hca),
            self._ints(0),
            width=max(self.length // 128, 1),
            ratio=128,
            page_size=64,
        )
        return self.hca, slots, lengths

    def _attend(self, kind: str) -> None:
        """One layer's attention, the selection included."""
        cache, slots, lengths = self._entries(kind)
        window = torch.arange(self.window, dtype=torch.int32, device=self.device)
        sparse_decode(
            self.q,
            self.raw,
            window[None, None],
            softmax_scale=512**-0.5,
            attn_sink=self.sink,
            extra_cache=cache,
            extra_topk_indices=None if slots is None else slots[:, None],
            extra_topk_lengths=lengths,
        )

    def rows(self) -> dict[str, int]:
        """Rows that the token attends to."""
        found = dict.fromkeys((WINDOW, CSA, HCA), self.window)
        for kind in (CSA, HCA):
            slots = cast(Tensor, self._entries(kind)[1])
            found[kind] += int((slots >= 0).sum())
        return found | {DENSE: self.length}

    def times(self) -> dict[str, float]:
        """Milliseconds of each kind of layer; of dense attention the fastest that torch has."""
        rows = self._draw(1, 1, self.length, 512)

        def dense(dtype: torch.dtype) -> Callable[[], object]:
            q, k = self.q.view(1, 1, HEADS, 512).to(dtype), rows.to(dtype)
            return lambda: functional.scaled_dot_product_attention(q, k, k, scale=512**-0.5)

        works = {kind: lambda kind=kind: self._attend(kind) for kind in (WINDOW, CSA, HCA)}
        dtypes = (torch.float32, torch.bfloat16)
        ours = median_times([*works.values(), *map(dense, dtypes)], self.device)
        return dict(zip(works, ours, strict=False)) | {DENSE: min(ours[len(works) :])}


def summary(report: Report) -> str:
    """What was shown, in one sentence."""
    context, ms = max(report.milliseconds.items())
    csa, hca, dense = (report.kept[kind][0] for kind in (CSA, HCA, DENSE))
    return (
        f"Over an FP8 cache, {report.num_equal} of {report.num_new} greedy tokens of this "
        f"DeepSeek-V4 of {report.num_weights / 1e6:.1f} million built, not trained, weights equal "
        f"those of transformers' eager attention, whose two best logits are at least "
        f"{report.margin:.0f} apart, and on {report.device} layers of V4-Flash's size with entries "
        f"of 4 and of 128 tokens keep {csa:.0f} and {hca:.1f} bytes a token instead of {dense:.0f} "
        f"and after {context} tokens attend for a new one in {ms[CSA]:.1f} and {ms[HCA]:.1f} ms "
        f"instead of {ms[DENSE]:.1f}."
    )

"""The demo: one small model reads a text with transformers' attention and with this package's.

The model is a DeepseekV32ForCausalLM with the attention geometry of DeepSeek-V3.2 (but 8 heads) and
seeded random weights, in float32. Tokens are bytes. Each pass prefills the start of the text and
then decodes the rest, one given byte at a time, so every pass sees the same tokens.

With purely random weights the top-1 byte is a coin toss, and agreement would only measure rounding.
The weights are therefore scaled as in a trained network: the residual stream starts with embeddings
of unit deviation, layers add modest updates, and the output embeddings are tied to the input's.
Each position then clearly prefers its own byte. Top-1 agreement over such logits says little by
itself, so the demo adds two controls, a pass without attention and transformers' own attention in
bfloat16, and more sensitive quantities: logits, each layer's attention output, and the selections.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import resources
from statistics import median
from typing import Any, cast

import torch
from rich import box
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from transformers import DeepseekV32Config, DeepseekV32ForCausalLM

from sparsemla.backends.transformers import enable
from sparsemla.formats import BF16_576, FP8_DS_MLA, CacheFormat

THEIRS = "transformers float32"
THEIRS_BF16 = "transformers bfloat16"
OURS = "sparsemla bf16"
OURS_FP8 = "sparsemla fp8_ds_mla"
NO_ATTENTION = "no attention"

NUM_LAYERS = 4
TOPK = 256
DECODE_TOKENS = 32


def shipped_text() -> bytes:
    """The text in the package."""
    return resources.files("sparsemla").joinpath("data/demo.txt").read_bytes()


def build_model(seed: int = 0) -> DeepseekV32ForCausalLM:
    """The demo's model; see the module's docstring for its weights."""
    config = DeepseekV32Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=NUM_LAYERS,
        first_k_dense_replace=NUM_LAYERS,
        num_attention_heads=8,
        num_key_value_heads=8,
        q_lora_rank=256,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
        index_n_heads=16,
        index_head_dim=128,
        index_topk=TOPK,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = DeepseekV32ForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                continue  # norms start as identities
            deviation = 1.0 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
            if "down_proj" in name:
                deviation *= 0.3
            parameter.normal_(0, deviation, generator=generator)
    return model


@dataclass(frozen=True)
class Trace:
    """The results of one pass over the text.

    Args:
        logits: float32 ``[n, 256]``.
        attention: ``[layers, n, hidden]``, the attention outputs.
        selections: for each layer, int32 ``[n, topk]``, positions and -1.
        prefill_seconds: time of the whole prompt.
        decode_seconds: median time per token.
        cache_bytes: measured bytes per token and layer. transformers 5.17 caches the keys and
            values of each head, 5.18 and newer cache the latents.
    """

    logits: Tensor
    attention: Tensor
    selections: list[Tensor]
    prefill_seconds: float
    decode_seconds: float
    cache_bytes: float


@dataclass(frozen=True)
class Comparison:
    """The distance of a pass from transformers' own.

    Args:
        top1: share of positions with the same most likely byte.
        max_difference, mean_difference: absolute differences of the logits.
        attention_errors: per layer, ``|ours - theirs| / |theirs|`` over all positions.
        prefill_overlap, decode_overlap: per layer, share of equal selected tokens over the
            positions that see more than top-k tokens; NaN without such positions.
    """

    top1: float
    max_difference: float
    mean_difference: float
    attention_errors: list[float]
    prefill_overlap: list[float]
    decode_overlap: list[float]


@dataclass(frozen=True)
class Report:
    """The demo's results.

    Args:
        num_prompt: tokens of the prefill.
        num_tokens: tokens of the prefill and of the decode steps.
        traces: transformers' own pass first, then the passes with this package's attention.
        comparisons: the other traces, and a pass without attention, against the first trace.
        smallest_margin: smallest gap between the two largest logits of a position.
    """

    num_prompt: int
    num_tokens: int
    traces: dict[str, Trace]
    comparisons: dict[str, Comparison]
    smallest_margin: float


def run_demo(text: bytes, *, seed: int, progress: Progress) -> Report:
    """Pass over ``text`` with each kind of attention.

    Args:
        text: at least two bytes; the last :data:`DECODE_TOKENS`, at most half, are decoded.
        seed: seed of the weights.
        progress: shows the progress bars.
    """
    ids = torch.tensor([list(text)])
    num_prompt = len(text) - min(DECODE_TOKENS, len(text) // 2)
    model = build_model(seed)
    passes = {
        THEIRS: functools.partial(_trace_transformers, model),
        THEIRS_BF16: functools.partial(_trace_transformers, copy.deepcopy(model).bfloat16()),
        OURS: functools.partial(_trace_ours, model, BF16_576),
        OURS_FP8: functools.partial(_trace_ours, model, FP8_DS_MLA),
    }
    traces = {}
    for name, trace in passes.items():
        task = progress.add_task(name, total=1 + len(text) - num_prompt)
        traces[name] = trace(ids, num_prompt, functools.partial(progress.advance, task))
    task = progress.add_task(NO_ATTENTION, total=1)
    control = _trace_without_attention(model, ids)
    progress.advance(task)

    theirs = traces[THEIRS]
    comparisons = {
        name: _compare(theirs, trace, num_prompt)
        for name, trace in {**traces, NO_ATTENTION: control}.items()
        if trace is not theirs
    }
    largest = theirs.logits.topk(2, -1).values
    margin = (largest[:, 0] - largest[:, 1]).min().item()
    return Report(num_prompt, len(text), traces, comparisons, margin)


@contextlib.contextmanager
def _hooks(handles: Iterable[RemovableHandle]) -> Iterator[None]:
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _layers(model: DeepseekV32ForCausalLM) -> list[Any]:
    return list(cast(Any, model.model.layers))


def _trace(
    model: DeepseekV32ForCausalLM, ids: Tensor, num_prompt: int, advance: Callable[[], None]
) -> tuple[Trace, Any]:
    """Prefill and decode; the trace, without selections, and the final cache."""
    outputs: list[list[Tensor]] = [[] for _ in _layers(model)]

    def record(layer_idx: int, module: object, inputs: object, output: tuple[Tensor, ...]) -> None:
        outputs[layer_idx].append(output[0][0].float())

    hooks = (
        layer.self_attn.register_forward_hook(functools.partial(record, layer_idx))
        for layer_idx, layer in enumerate(_layers(model))
    )
    logits, seconds, past = [], [], None
    with torch.no_grad(), _hooks(hooks):
        model(ids[:, :2])  # warm-up: loads the kernels
        for output in outputs:
            output.clear()
        for part in (ids[:, :num_prompt], *ids[:, num_prompt:].split(1, dim=1)):
            began = time.perf_counter()
            result = model(part, past_key_values=past, use_cache=True)
            seconds.append(time.perf_counter() - began)
            logits.append(result.logits[0].float())
            past = result.past_key_values
            advance()
    attention = torch.stack([torch.cat(output) for output in outputs])
    return Trace(torch.cat(logits), attention, [], seconds[0], median(seconds[1:]), 0.0), past


def _trace_ours(
    model: DeepseekV32ForCausalLM,
    cache_format: CacheFormat,
    ids: Tensor,
    num_prompt: int,
    advance: Callable[[], None],
) -> Trace:
    with enable(model, cache_format=cache_format, record_selections=True) as handle:
        trace, cache = _trace(model, ids, num_prompt, advance)
    steps = handle.selections[1:]  # the first one is the warm-up
    selections = [_stack([step[layer_idx] for step in steps]) for layer_idx in range(NUM_LAYERS)]
    return replace(trace, selections=selections, cache_bytes=cache.bytes_per_token / NUM_LAYERS)


def _trace_transformers(
    model: DeepseekV32ForCausalLM, ids: Tensor, num_prompt: int, advance: Callable[[], None]
) -> Trace:
    chosen: list[list[Tensor]] = [[] for _ in _layers(model)]

    def record(layer_idx: int, module: object, inputs: object, output: Tensor) -> None:
        chosen[layer_idx].append(output[0])

    hooks = (
        layer.self_attn.indexer.register_forward_hook(functools.partial(record, layer_idx))
        for layer_idx, layer in enumerate(_layers(model))
    )
    with _hooks(hooks):
        trace, cache = _trace(model, ids, num_prompt, advance)
    # A position with fewer than top-k past tokens lists future ones, which transformers masks.
    own = torch.arange(ids.shape[1])[:, None]
    selections = [_stack(steps[1:]) for steps in chosen]
    selections = [rows.where(rows <= own, -1) for rows in selections]
    stored = [
        tensor
        for layer in cache.layers
        for tensor in (layer.keys, layer.values, layer.indexer_keys)
    ]
    cache_bytes = sum(tensor.nbytes for tensor in stored) / (ids.shape[1] * NUM_LAYERS)
    return replace(trace, selections=selections, cache_bytes=cache_bytes)


def _trace_without_attention(model: DeepseekV32ForCausalLM, ids: Tensor) -> Trace:
    attentions = [layer.self_attn for layer in _layers(model)]
    try:
        for module in attentions:
            module.forward = lambda hidden_states, **_: (torch.zeros_like(hidden_states), None)
        with torch.no_grad():
            logits = model(ids, use_cache=False).logits[0]
    finally:
        for module in attentions:
            del module.forward
    attention = torch.zeros(NUM_LAYERS, ids.shape[1], model.config.hidden_size)
    nothing = torch.full((ids.shape[1], 1), -1)
    return Trace(logits, attention, [nothing] * NUM_LAYERS, 0.0, 0.0, 0.0)


def _stack(steps: list[Tensor]) -> Tensor:
    """Selections of several steps as rows of one width."""
    width = max(step.shape[1] for step in steps)
    pad = torch.nn.functional.pad
    return torch.cat([pad(step, (0, width - step.shape[1]), value=-1) for step in steps])


def _mask(selection: Tensor) -> Tensor:
    """Bool ``[n, n]`` of a selection ``[n, topk]``: True where a row selected a column."""
    size = selection.shape[0]
    mask = torch.zeros(size, size + 1, dtype=torch.bool)
    mask.scatter_(1, selection.long().where(selection >= 0, size), True)
    return mask[:, :size]


def selection_masks(report: Report) -> tuple[list[Tensor], list[Tensor]]:
    """Per layer a bool mask ``[n, n]``: transformers' selections, and this package's."""
    theirs, ours = (report.traces[name].selections for name in (THEIRS, OURS))
    return [_mask(selection) for selection in theirs], [_mask(selection) for selection in ours]


def _overlap(theirs: Tensor, ours: Tensor) -> float:
    """Share of common entries of two masks ``[m, n]`` with the same number of entries per row."""
    total = int(theirs.sum())
    return int((theirs & ours).sum()) / total if total else math.nan


def _compare(theirs: Trace, ours: Trace, num_prompt: int) -> Comparison:
    difference = (ours.logits - theirs.logits).abs()
    overlaps = []
    for mine, other in zip(ours.selections, theirs.selections, strict=True):
        masks = _mask(other), _mask(mine)
        choosing = slice(TOPK, num_prompt), slice(max(TOPK, num_prompt), None)
        overlaps.append([_overlap(masks[0][rows], masks[1][rows]) for rows in choosing])
    errors = (ours.attention - theirs.attention).norm(dim=(1, 2)) / theirs.attention.norm(
        dim=(1, 2)
    )
    return Comparison(
        top1=(ours.logits.argmax(-1) == theirs.logits.argmax(-1)).float().mean().item(),
        max_difference=difference.max().item(),
        mean_difference=difference.mean().item(),
        attention_errors=errors.tolist(),
        prefill_overlap=[prefill for prefill, _ in overlaps],
        decode_overlap=[decode for _, decode in overlaps],
    )


def report_table(report: Report) -> Table:
    """The report as a table: one column per pass, the pass without attention last."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    names = [*report.traces, NO_ATTENTION]
    for name in names:
        table.add_column(name.replace(" ", "\n"), justify="right", no_wrap=True)

    def add(label: str, cells: dict[str, str]) -> None:
        table.add_row(label, *(cells.get(name, "") for name in names))

    traces, compared = report.traces, dict(report.comparisons)
    add("prefill, seconds", {n: f"{t.prefill_seconds:.2f}" for n, t in traces.items()})
    add("decode, ms/token", {n: f"{1000 * t.decode_seconds:.1f}" for n, t in traces.items()})
    add("cache, B/token", {n: f"{t.cache_bytes:.0f}" for n, t in traces.items()})
    table.add_section()
    add("same top-1", {n: f"{c.top1:.2%}" for n, c in compared.items()})
    add("logit diff, max", {n: f"{c.max_difference:.3f}" for n, c in compared.items()})
    add("logit diff, mean", {n: f"{c.mean_difference:.4f}" for n, c in compared.items()})
    del compared[NO_ATTENTION]
    for label, attribute in (
        ("attention error", "attention_errors"),
        ("chosen, prefill", "prefill_overlap"),
        ("chosen, decode", "decode_overlap"),
    ):
        table.add_section()
        table.add_row(label)
        for layer_idx in range(NUM_LAYERS):
            values = {n: getattr(c, attribute)[layer_idx] for n, c in compared.items()}
            cells = {n: "-" if math.isnan(x) else f"{x:.2%}" for n, x in values.items()}
            add(f"  layer {layer_idx}", cells)
    return table

"""The workloads: shapes as data, and for each op its inputs, its work and its correctness gate.

A workload's ``flop`` counts the op's arithmetic and ``unique_bytes`` the bytes that it must move at
least: each selected input read once, even if several tokens select it, and each output written
once. Selections are ``random`` (drawn per token, unordered) or ``overlapping`` (runs of 64 tokens
share 7 of 8 positions, in ascending order, like selections of a trained indexer by
``select_topk``).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from sparsemla import ops, reference
from sparsemla.cache import PagedCache
from sparsemla.formats import (
    BF16_512,
    BF16_576,
    FP8_584,
    FP8_DS_MLA,
    FP8_NOPE,
    INDEX_FP8,
    CacheFormat,
    e4m3_format,
    to_fp8,
)
from sparsemla.ops.prefill import prefill_workspace_rows
from sparsemla.pooling import Pooling, WindowState
from sparsemla.rope import cos_sin_table, rope_frequencies
from sparsemla.weights import HeadWeight
from sparsemla_lab.bench.timing import Results
from sparsemla_lab.testing.cases import eighths
from sparsemla_lab.testing.compare import (
    ATTENTION_TARGET,
    BFLOAT16_ULP,
    DECODE_LSE,
    DENSE_DECODE_OUT,
    E4M3_STEP,
    FLOAT32_ULPS,
    FP8_MMA,
    FP8_PROJECTION,
    INDEX_LOSS,
    INDEXER_SCORES,
    KERNEL_TOLERANCES,
    SELECTED_SCORES,
    SPARSE_ATTENTION_GRADIENT,
    SPARSE_DECODE_OUT,
    SPARSE_PREFILL_LSE,
    SPARSE_PREFILL_OUT,
    TOLERANCES,
    Tolerance,
    assert_close,
    assert_equal,
    assert_result,
    assert_rows_close,
    fp8_limits,
    gradient_sizes,
    kernel_of,
    rounded,
    run_reference,
    score_sizes,
    sizes_of,
)

Inputs = dict[str, Any]
Selection = Literal["random", "overlapping"]
Decode = Literal["aligned", "spread"]

PAGE_SIZE = 64
INDEX_HEADS, INDEX_DIM = 64, 128
GLM53_ROWS = 2048 + 128
"""Width of the lists of GLM-5.3-Flash: tokens of the selected pools, and room for the open one."""
LATENT, NOPE, ROPE, VALUE = 512, 128, 64, 128
"""Dims of a latent row, and of a head's query without and with RoPE and of its value."""
RUN = 64
"""Number of consecutive tokens with overlapping selections."""
CHUNK_ROWS = 1 << 18
"""Cache rows that are made at a time."""
PER_REQUEST = ("q", "topk_", "extra_topk_")
"""Prefixes of the names of decode inputs with one row per request."""
CHUNK_DRAWS = 1 << 26
"""Random numbers that exist at a time while selections are drawn."""


@dataclass
class Side:
    """One implementation on the inputs of a workload.

    Args:
        name: name of the implementation.
        run: computes and returns the results.
        check: raises AssertionError if results are wrong.
        reset: restores inputs that a run overwrites; called before the run that is checked.
        note: a remark for the reader of the time.
    """

    name: str
    run: Callable[[], Results]
    check: Callable[[Results], None]
    reset: Callable[[], None] = lambda: None
    note: str = ""


@dataclass(frozen=True)
class Workload(ABC):
    """One row of the tables; subclasses add the shape as integer fields."""

    op: ClassVar[str]
    unit: ClassVar[Literal["bf16", "fp8"]] = "bf16"

    @property
    def label(self) -> str:
        """The kind of selection, or an empty string."""
        return ""

    @property
    def shape(self) -> dict[str, int]:
        return {
            field.name: getattr(self, field.name)
            for field in fields(self)
            if isinstance(getattr(self, field.name), int)
        }

    @property
    def variant(self) -> str:
        """Properties of the case other than its shape, in words; empty for the common case."""
        return ""

    @property
    def case(self) -> str:
        words = [f"{name} {value}" for name, value in self.shape.items()]
        return ", ".join([*words, self.variant] if self.variant else words)

    @property
    @abstractmethod
    def flop(self) -> float:
        """Floating-point operations; 0 for ops that only move bytes."""

    @abstractmethod
    def build(self, device: torch.device) -> Inputs:
        """Inputs, the same for every side."""

    @abstractmethod
    def unique_bytes(self, inputs: Inputs) -> int:
        """The fewest bytes that the op must move."""

    @abstractmethod
    def run(self, inputs: Inputs) -> Results:
        """This package's op."""

    @abstractmethod
    def check(self, inputs: Inputs, results: Results) -> None:
        """Compare results with the reference on some rows.

        Raises:
            AssertionError: the results differ.
        """

    def ours(self, inputs: Inputs) -> Side:
        """This package's side."""
        return Side("sparsemla", lambda: self.run(inputs), lambda got: self.check(inputs, got))


@dataclass(frozen=True)
class SparsePrefill(Workload):
    """Many tokens over bfloat16 rows."""

    tokens: int
    context: int
    heads: int
    head_dim: int
    topk: int
    selection: Selection = "random"
    op: ClassVar[str] = "sparse_prefill"

    @property
    def label(self) -> str:
        return self.selection

    @property
    def flop(self) -> float:
        return 2.0 * self.tokens * self.heads * self.topk * (self.head_dim + 512)

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)
        return {
            "q": _queries(draw, self.tokens, self.heads, self.head_dim),
            "kv": _rows(draw, self.context, self.head_dim),
            "topk_indices": _select(draw, self.tokens, self.context, self.topk, self.selection),
            "softmax_scale": self.scale,
        }

    @property
    def scale(self) -> float:
        """DeepSeek-V3's 192^-0.5 over 576 dims, DeepSeek-V4's 512^-0.5."""
        return 192**-0.5 if self.head_dim == 576 else self.head_dim**-0.5

    def unique_bytes(self, inputs: Inputs) -> int:
        rows = inputs["topk_indices"].unique().numel()
        per_token = 2 * self.heads * (self.head_dim + 512) + 4 * self.heads + 4 * self.topk
        return 2 * rows * self.head_dim + self.tokens * per_token

    def run(self, inputs: Inputs) -> Results:
        return ops.sparse_prefill(**inputs)

    def check(self, inputs: Inputs, results: Results) -> None:
        some = self.some(inputs)
        out, lse, _ = reference.sparse_prefill(**self.of(inputs, some))
        _check_attention(
            results, some, (out, lse), (SPARSE_PREFILL_OUT, SPARSE_PREFILL_LSE), self.op
        )

    def some(self, inputs: Inputs) -> Tensor:
        """The tokens that are checked."""
        return _some(self.tokens, 16, inputs["q"].device)

    @staticmethod
    def of(inputs: Inputs, some: Tensor) -> Inputs:
        """The inputs of some tokens."""
        return inputs | {name: inputs[name][some] for name in ("q", "topk_indices")}


@dataclass(frozen=True)
class PermittedPrefill(SparsePrefill):
    """A :class:`SparsePrefill` that permits FP8 MMAs.

    Sides with bfloat16 MMAs get the inputs and the check of :class:`SparsePrefill`.
    """

    unit: ClassVar[Literal["bf16", "fp8"]] = "fp8"

    @property
    def variant(self) -> str:
        return "precision fp8"

    def run(self, inputs: Inputs) -> Results:
        return ops.sparse_prefill(**inputs, allow_fp8_mma=True)

    def with_bf16(self, inputs: Inputs) -> Results:
        return ops.sparse_prefill(**inputs)

    def ours(self, inputs: Inputs) -> Side:
        bf16 = super().ours(inputs)
        kernel = kernel_of(self.op, inputs | {"allow_fp8_mma": True})
        if kernel != FP8_MMA:
            return replace(bf16, note="bfloat16 MMA")

        def check(got: Results) -> None:
            some = self.some(inputs)
            own = self.of(inputs, some)
            expected = reference.sparse_prefill(**rounded(own))[:2]
            _check_attention(
                got, some, expected, KERNEL_TOLERANCES[kernel], self.op, fp8_limits(own)
            )

        return replace(bf16, check=check)


@dataclass(frozen=True)
class SharedPrefill(SparsePrefill):
    """A :class:`SparsePrefill` whose neighbouring tokens share a list, which is made each time.

    The lists ascend, as the indexer gives them.
    """

    list_tokens: int = 4

    def build(self, device: torch.device) -> Inputs:
        inputs = super().build(device)
        return inputs | {"topk_indices": inputs["topk_indices"].sort().values}

    def run(self, inputs: Inputs) -> Results:
        shared = ops.share_lists(inputs["topk_indices"], list_tokens=self.list_tokens)
        lists = {"list_tokens": self.list_tokens, **shared._asdict()}
        return ops.sparse_prefill(**inputs | lists)

    def by_token(self, inputs: Inputs) -> Results:
        return ops.sparse_prefill(**inputs)


@dataclass(frozen=True)
class SparseBackward(Workload):
    """The gradients of :class:`SparsePrefill`.

    With as many tokens as rows, a sequence attends to itself: a token selects from the rows up to
    its own, and all of them where there are no more than ``topk``.
    """

    tokens: int
    context: int
    heads: int
    head_dim: int
    topk: int
    selection: Selection = "random"
    op: ClassVar[str] = "sparse_attention_backward"

    @property
    def label(self) -> str:
        return self.selection

    @property
    def causal(self) -> bool:
        return self.tokens == self.context

    @property
    def flop(self) -> float:
        causal, full = _causal_entries(self.tokens, self.topk), self.tokens * self.topk
        entries = causal if self.causal else full
        return 2.0 * entries * self.heads * (3 * self.head_dim + 2 * 512)

    def build(self, device: torch.device) -> Inputs:
        shape = self.tokens, self.context, self.heads, self.head_dim, self.topk
        inputs = SparsePrefill(*shape, self.selection).build(device)
        draw = _generator(device)
        if self.causal:
            lists = _select_causal(draw, self.tokens, self.topk, self.selection)
            inputs["topk_indices"] = lists
        out, lse = ops.sparse_prefill(**inputs)
        dout = torch.randn(out.shape, generator=draw, device=device, dtype=torch.bfloat16)
        return {"dout": dout, **inputs, "out": out, "lse": lse}

    def unique_bytes(self, inputs: Inputs) -> int:
        rows = inputs["topk_indices"].clamp_min(0).unique().numel()
        per_token = 2 * self.heads * (2 * self.head_dim + 2 * 512) + 4 * self.heads + 4 * self.topk
        return 2 * (rows + self.context) * self.head_dim + self.tokens * per_token

    def run(self, inputs: Inputs) -> Results:
        dq, dkv, _ = ops.sparse_attention_backward(**inputs | self.lists(inputs))
        return dq, dkv

    def lists(self, inputs: Inputs) -> Inputs:
        """The arguments of the op that have or describe the lists."""
        return {"topk_indices": inputs["topk_indices"]}

    def check(self, inputs: Inputs, results: Results) -> None:
        dkv = torch.zeros(inputs["kv"].shape, device=inputs["kv"].device)
        squares = torch.zeros_like(dkv)
        for first in range(0, self.tokens, 16):  # every token has a part in the gradient of rows
            some = slice(first, first + 16)
            names = ("dout", "q", "topk_indices", "out", "lse")
            arguments = inputs | {name: inputs[name][some] for name in names}
            arguments |= self.lists(arguments)
            dq, dkv, _ = reference.sparse_attention_backward(**arguments, accumulate=dkv)
            dq_sizes, sizes = gradient_sizes(arguments)
            squares += sizes.square()
            assert_close("dq", results[0][some], dq, SPARSE_ATTENTION_GRADIENT, dq_sizes)
        assert_close("dkv", results[1], dkv, SPARSE_ATTENTION_GRADIENT, squares.sqrt())


@dataclass(frozen=True)
class SharedBackward(SparseBackward):
    """A :class:`SparseBackward` whose neighbouring tokens share a list, which is made each time.

    The lists ascend, as the indexer gives them.
    """

    list_tokens: int = 4

    def build(self, device: torch.device) -> Inputs:
        inputs = super().build(device)
        return inputs | {"topk_indices": inputs["topk_indices"].sort().values}

    @property
    def by_token(self) -> SparseBackward:
        """The same gradients, with a list for each token."""
        shape = self.tokens, self.context, self.heads, self.head_dim, self.topk
        return SparseBackward(*shape, self.selection)

    def lists(self, inputs: Inputs) -> Inputs:
        shared = ops.share_lists(inputs["topk_indices"], list_tokens=self.list_tokens)
        return {"list_tokens": self.list_tokens, **shared._asdict()}


@dataclass(frozen=True)
class AttentionTarget(Workload):
    """What all heads of a :class:`SparsePrefill` attend to."""

    tokens: int
    context: int
    heads: int
    head_dim: int
    topk: int
    selection: Selection = "random"
    op: ClassVar[str] = "attention_target"

    @property
    def label(self) -> str:
        return self.selection

    @property
    def flop(self) -> float:
        return 2.0 * self.tokens * self.heads * self.topk * self.head_dim

    def build(self, device: torch.device) -> Inputs:
        shape = self.tokens, self.context, self.heads, self.head_dim, self.topk
        inputs = SparsePrefill(*shape, self.selection).build(device)
        _, lse = ops.sparse_prefill(**inputs)
        return inputs | {"lse": lse}

    def unique_bytes(self, inputs: Inputs) -> int:
        rows = inputs["topk_indices"].unique().numel()
        per_token = 2 * self.heads * self.head_dim + 4 * self.heads + 2 * 4 * self.topk
        return 2 * rows * self.head_dim + self.tokens * per_token

    def run(self, inputs: Inputs) -> Results:
        return (ops.attention_target(**inputs),)

    def check(self, inputs: Inputs, results: Results) -> None:
        some = _some(self.tokens, 16, inputs["q"].device)
        names = ("q", "topk_indices", "lse")
        expected = reference.attention_target(
            **inputs | {name: inputs[name][some] for name in names}
        )
        assert_close(self.op, results[0][some], expected, ATTENTION_TARGET)


@dataclass(frozen=True)
class SelectedScores(Workload):
    """Index scores of listed rows."""

    tokens: int
    context: int
    topk: int
    selection: Selection = "random"
    op: ClassVar[str] = "selected_scores"

    @property
    def label(self) -> str:
        return self.selection

    @property
    def flop(self) -> float:
        return 2.0 * self.tokens * INDEX_HEADS * self.topk * INDEX_DIM

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)
        return {
            **_indexer(draw, self.tokens, self.context),
            "topk_indices": _select(draw, self.tokens, self.context, self.topk, self.selection),
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        rows = inputs["topk_indices"].unique().numel()
        per_token = INDEX_HEADS * (2 * INDEX_DIM + 4) + 2 * 4 * self.topk
        return 2 * rows * INDEX_DIM + self.tokens * per_token

    def run(self, inputs: Inputs) -> Results:
        return (ops.selected_scores(**inputs),)

    def check(self, inputs: Inputs, results: Results) -> None:
        some = _some(self.tokens, 16, inputs["index_q"].device)
        names = ("index_q", "weights", "topk_indices")
        arguments = inputs | {name: inputs[name][some] for name in names}
        (expected,) = run_reference(self.op, arguments)
        sizes = score_sizes(self.op, arguments)
        assert_close(self.op, results[0][some], expected, SELECTED_SCORES, sizes)


@dataclass(frozen=True)
class SelectedScoresBackward(SelectedScores):
    """The gradients of :class:`SelectedScores`."""

    op: ClassVar[str] = "selected_scores_backward"

    @property
    def flop(self) -> float:
        return 3 * super().flop

    def build(self, device: torch.device) -> Inputs:
        inputs = super().build(device)
        shape = self.tokens, self.topk
        return inputs | {"dscores": torch.randn(shape, generator=_generator(device), device=device)}

    def unique_bytes(self, inputs: Inputs) -> int:
        rows = inputs["topk_indices"].unique().numel()
        per_token = 2 * INDEX_HEADS * (2 * INDEX_DIM + 4) + 2 * 4 * self.topk
        return 2 * (rows + self.context) * INDEX_DIM + self.tokens * per_token

    def run(self, inputs: Inputs) -> Results:
        return ops.selected_scores_backward(**inputs)

    def check(self, inputs: Inputs, results: Results) -> None:
        _check_index_gradients(self.op, inputs, results, 16)


@dataclass(frozen=True)
class DenseIndexLoss(Workload):
    """The indexer's loss over all rows of one causal sequence."""

    tokens: int
    heads: int
    head_dim: int = 192
    op: ClassVar[str] = "dense_index_loss"

    @property
    def pairs(self) -> int:
        """Pairs of a token and a row that it sees."""
        return self.tokens * (self.tokens + 1) // 2

    @property
    def flop(self) -> float:
        return 2.0 * self.pairs * (self.heads * self.head_dim + INDEX_HEADS * INDEX_DIM)

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)
        q, k = (_queries(draw, self.tokens, self.heads, self.head_dim) for _ in range(2))
        offsets = torch.tensor([0, self.tokens], dtype=torch.int32, device=device)
        scale = self.head_dim**-0.5
        _, lse = ops.dense_prefill(q, k, k, offsets, offsets, softmax_scale=scale)
        ends = torch.arange(1, self.tokens + 1, dtype=torch.int32, device=device)
        return {
            "q": q,
            "k": k,
            "lse": lse,
            **_indexer(draw, self.tokens, self.tokens),
            "softmax_scale": scale,
            "row_starts": torch.zeros_like(ends),
            "row_ends": ends,
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        names = "q", "k", "lse", "index_q", "weights", "index_k", "row_starts", "row_ends"
        return sum(inputs[name].nbytes for name in names)

    def run(self, inputs: Inputs) -> Results:
        return (ops.dense_index_loss(**inputs)[None],)

    @property
    def at_once(self) -> int:
        """Tokens whose scores of all heads the definition keeps at a time."""
        return max((1 << 27) // (self.heads * self.tokens), 1)

    def check(self, inputs: Inputs, results: Results) -> None:
        parts = _parts_of_tokens(inputs, self.at_once)
        loss = sum(reference.dense_index_loss(**arguments).double() for _, arguments in parts)
        assert_close(self.op, results[0][0], torch.as_tensor(loss), INDEX_LOSS)


@dataclass(frozen=True)
class DenseIndexGradients(DenseIndexLoss):
    """:class:`DenseIndexLoss` and its gradients."""

    op: ClassVar[str] = "dense_index_gradients"

    @property
    def flop(self) -> float:
        return super().flop + 2.0 * self.pairs * 2 * INDEX_HEADS * INDEX_DIM

    def unique_bytes(self, inputs: Inputs) -> int:
        results = sum(inputs[name].nbytes for name in ("index_q", "weights", "index_k"))
        return super().unique_bytes(inputs) + results

    def run(self, inputs: Inputs) -> Results:
        loss, *gradients = ops.dense_index_gradients(**inputs)
        return loss[None], *gradients

    def check(self, inputs: Inputs, results: Results) -> None:
        super().check(inputs, results)
        _check_index_gradients(self.op, inputs, results[1:], self.at_once)


@dataclass(frozen=True)
class CachedPrefill(Workload):
    """A chunk of one request's tokens over its paged cache, in place or converted first.

    This package follows :func:`prefill_workspace_rows`. One selection serves both variants.
    """

    tokens: int
    context: int
    heads: int
    topk: int
    format: CacheFormat = FP8_DS_MLA
    op: ClassVar[str] = "sparse_prefill"

    @property
    def label(self) -> str:
        return "random"

    @property
    def variant(self) -> str:
        return f"{self.format.name} cache"

    @property
    def flop(self) -> float:
        return 2.0 * self.tokens * self.heads * self.topk * (576 + 512)

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)
        cache, table = _paged(draw, self.format, 1, self.context)
        positions = _select(draw, self.tokens, self.context, self.topk, "random")
        requests = torch.zeros(self.tokens, dtype=torch.int32, device=device)
        return {
            "q": _queries(draw, self.tokens, self.heads, 576),
            "cache": cache,
            "slots": ops.to_slots(positions, table, requests, page_size=PAGE_SIZE),
            "positions": positions,
            "page_table": table,
            "seq_lens": torch.full((1,), self.context, dtype=torch.int32, device=device),
            "workspace_starts": torch.zeros(1, dtype=torch.int32, device=device),
            "workspace": torch.empty(self.context, 576, dtype=torch.bfloat16, device=device),
            "softmax_scale": 192**-0.5,
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        rows = inputs["slots"].unique().numel()
        per_token = 2 * self.heads * (576 + 512) + 4 * self.heads + 4 * self.topk
        return rows * self.format.bytes_per_token + self.tokens * per_token

    def converts(self, device: torch.device) -> bool:
        """Whether this package converts the context first."""
        rows = prefill_workspace_rows(
            [self.tokens],
            [self.context],
            cache_format=self.format,
            num_heads=self.heads,
            topk=self.topk,
            device=device,
        )
        return rows is not None

    def in_place(self, inputs: Inputs) -> Results:
        scale = inputs["softmax_scale"]
        return ops.sparse_prefill(
            inputs["q"], inputs["cache"], inputs["slots"], softmax_scale=scale
        )

    def converted(self, inputs: Inputs) -> Results:
        per_request = (inputs[name] for name in ("page_table", "seq_lens", "workspace_starts"))
        rows = ops.gather_dequant(inputs["cache"], *per_request, out=inputs["workspace"])
        scale = inputs["softmax_scale"]
        return ops.sparse_prefill(inputs["q"], rows, inputs["positions"], softmax_scale=scale)

    def run(self, inputs: Inputs) -> Results:
        converts = self.converts(inputs["q"].device)
        return self.converted(inputs) if converts else self.in_place(inputs)

    def check(self, inputs: Inputs, results: Results) -> None:
        some = _some(self.tokens, 16, inputs["q"].device)
        scale = inputs["softmax_scale"]
        out, lse, _ = reference.sparse_prefill(
            inputs["q"][some], inputs["cache"], inputs["slots"][some], softmax_scale=scale
        )
        _check_attention(
            results, some, (out, lse), (SPARSE_PREFILL_OUT, SPARSE_PREFILL_LSE), self.op
        )


@dataclass(frozen=True)
class WindowedPrefill(Workload):
    """DeepSeek-V4: a chunk of a request's tokens over a window of rows and a compressed cache.

    Both caches have 584 bytes per token. They are read in place, or converted into one workspace
    first: this package follows :func:`prefill_workspace_rows`.
    """

    tokens: int
    heads: int
    extra_context: int
    extra_topk: int
    topk: int = 128
    op: ClassVar[str] = "sparse_prefill"

    @property
    def label(self) -> str:
        return "random"

    @property
    def variant(self) -> str:
        return "fp8_584 caches, sink"

    @property
    def flop(self) -> float:
        return 2.0 * self.tokens * self.heads * (self.topk + self.extra_topk) * (512 + 512)

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)
        context = self.tokens + self.topk - 1
        cache, table = _paged(draw, FP8_584, 1, context)
        extra_cache, extra_table = _paged(draw, FP8_584, 1, self.extra_context)
        window = torch.arange(self.topk, dtype=torch.int32, device=device)
        window = window + torch.arange(self.tokens, dtype=torch.int32, device=device)[:, None]
        entries = _select(draw, self.tokens, self.extra_context, self.extra_topk, "random")
        requests = torch.zeros(self.tokens, dtype=torch.int32, device=device)
        lens = torch.tensor([context, self.extra_context], dtype=torch.int32, device=device)
        return {
            "q": _queries(draw, self.tokens, self.heads, 512),
            "kv": cache,
            "topk_indices": ops.to_slots(window, table, requests, page_size=PAGE_SIZE),
            "extra_cache": extra_cache,
            "extra_topk_indices": ops.to_slots(entries, extra_table, requests, page_size=PAGE_SIZE),
            "attn_sink": torch.randn(self.heads, generator=draw, device=device),
            "softmax_scale": 512**-0.5,
            "page_tables": (table, extra_table),
            "seq_lens": lens,
            "workspace_starts": lens.cumsum(0, dtype=torch.int32) - lens,
            "workspace": torch.empty(
                context + self.extra_context, 512, dtype=torch.bfloat16, device=device
            ),
            "workspace_rows": torch.cat([window, entries + context], 1),
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        width = self.topk + self.extra_topk
        rows = sum(inputs[f"{name}topk_indices"].unique().numel() for name in ("", "extra_"))
        per_token = 2 * self.heads * (512 + 512) + 4 * self.heads + 4 * width
        return rows * FP8_584.bytes_per_token + self.tokens * per_token

    def _arguments(self, inputs: Inputs) -> Inputs:
        names = "kv", "topk_indices", "extra_cache", "extra_topk_indices", "attn_sink"
        return {name: inputs[name] for name in ("q", *names, "softmax_scale")}

    def converts(self, device: torch.device) -> bool:
        """Whether this package converts both caches first."""
        rows = prefill_workspace_rows(
            [self.tokens],
            [self.tokens + self.topk - 1 + self.extra_context],
            cache_format=FP8_584,
            num_heads=self.heads,
            topk=self.topk + self.extra_topk,
            device=device,
        )
        return rows is not None

    def run(self, inputs: Inputs) -> Results:
        converts = self.converts(inputs["q"].device)
        return self.converted(inputs) if converts else self.in_place(inputs)

    def in_place(self, inputs: Inputs) -> Results:
        return ops.sparse_prefill(**self._arguments(inputs))

    def convert(self, inputs: Inputs) -> Tensor:
        """Both caches in the workspace, the window's rows first."""
        rows = inputs["workspace"]
        for i, name in enumerate(("kv", "extra_cache")):
            lens, starts = (inputs[part][i : i + 1] for part in ("seq_lens", "workspace_starts"))
            ops.gather_dequant(inputs[name], inputs["page_tables"][i], lens, starts, out=rows)
        return rows

    def converted(self, inputs: Inputs) -> Results:
        rows = self.convert(inputs)
        options = {name: inputs[name] for name in ("attn_sink", "softmax_scale")}
        return ops.sparse_prefill(inputs["q"], rows, inputs["workspace_rows"], **options)

    def check(self, inputs: Inputs, results: Results) -> None:
        some = _some(self.tokens, 16, inputs["q"].device)
        arguments = self._arguments(inputs)
        for name in ("q", "topk_indices", "extra_topk_indices"):
            arguments[name] = arguments[name][some]
        out, lse, _ = reference.sparse_prefill(**arguments)
        _check_attention(
            results, some, (out, lse), (SPARSE_PREFILL_OUT, SPARSE_PREFILL_LSE), self.op
        )


@dataclass(frozen=True)
class SparseDecode(Workload):
    """A few tokens per request over a cache, by default with 656 bytes per token."""

    batch: int
    query_len: int
    heads: int
    context: int
    topk: int
    selection: Selection = "random"
    format: CacheFormat = FP8_DS_MLA
    op: ClassVar[str] = "sparse_decode"

    @property
    def label(self) -> str:
        return self.selection

    @property
    def variant(self) -> str:
        return "" if self.format is FP8_DS_MLA else f"{self.format.name} cache"

    @property
    def flop(self) -> float:
        return self._flop(self.topk)

    def _flop(self, width: int) -> float:
        dims = self.format.head_dim + self.format.value_dim
        return 2.0 * self.batch * self.query_len * self.heads * width * dims

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)
        cache, slots = self._selected(draw, self.context, self.topk)
        head_dim = self.format.head_dim
        return {
            "q": _queries(draw, self.batch, self.query_len, self.heads, head_dim),
            "cache": cache,
            "topk_indices": slots,
            "softmax_scale": 192**-0.5 if head_dim == 576 else head_dim**-0.5,
        }

    def _selected(
        self, draw: torch.Generator, context: int, topk: int
    ) -> tuple[PagedCache, Tensor]:
        """A cache and the selected slots ``[B, S, topk]``."""
        cache, table = _paged(draw, self.format, self.batch, context)
        # Tokens of a request are neighbours; tokens of two requests share nothing.
        positions = _select(draw, self.batch * self.query_len, context, topk, self.selection)
        requests = torch.arange(self.batch, device=draw.device).repeat_interleave(self.query_len)
        slots = ops.to_slots(positions, table, requests, page_size=PAGE_SIZE)
        return cache, slots.view(self.batch, self.query_len, topk)

    def unique_bytes(self, inputs: Inputs) -> int:
        rows = inputs["topk_indices"].unique().numel()
        dims = self.format.head_dim + self.format.value_dim
        per_token = 2 * self.heads * dims + 4 * self.heads + 4 * self.topk
        num_tokens = self.batch * self.query_len
        return rows * self.format.bytes_per_token + num_tokens * per_token

    def run(self, inputs: Inputs) -> Results:
        return ops.sparse_decode(**inputs)

    def check(self, inputs: Inputs, results: Results) -> None:
        some = self.some(inputs)
        expected = reference.sparse_decode(**self.of(inputs, some))
        _check_attention(results, some, expected, (SPARSE_DECODE_OUT, DECODE_LSE), self.op)

    def some(self, inputs: Inputs) -> Tensor:
        """The requests that are checked."""
        return _some(self.batch, 8, inputs["q"].device)

    @staticmethod
    def of(inputs: Inputs, some: Tensor) -> Inputs:
        """The inputs of some requests."""
        per_request = [name for name in inputs if name.startswith(PER_REQUEST)]
        return inputs | {name: inputs[name][some] for name in per_request}


@dataclass(frozen=True)
class WindowedDecode(SparseDecode):
    """DeepSeek-V4: a window of ``context`` tokens, all selected, and a second, compressed cache.

    Both caches have 584 bytes per token; there is a sink per head, and a length per selection.
    """

    format: CacheFormat = FP8_584
    extra_context: int = 0
    extra_topk: int = 0

    @property
    def variant(self) -> str:
        return f"{self.format.name} caches, sink, lengths"

    @property
    def flop(self) -> float:
        return self._flop(self.topk + self.extra_topk)

    def build(self, device: torch.device) -> Inputs:
        inputs = super().build(device)
        draw = _generator(device)
        cache, slots = self._selected(draw, self.extra_context, self.extra_topk)
        full = torch.full((self.batch,), self.topk, dtype=torch.int32, device=device)
        return inputs | {
            "attn_sink": torch.randn(self.heads, generator=draw, device=device),
            "topk_lengths": full,
            "extra_cache": cache,
            "extra_topk_indices": slots,
            "extra_topk_lengths": torch.full_like(full, self.extra_topk),
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        rows = inputs["extra_topk_indices"].unique().numel()
        num_tokens = self.batch * self.query_len
        extra = rows * self.format.bytes_per_token + 4 * num_tokens * self.extra_topk
        return super().unique_bytes(inputs) + extra


@dataclass(frozen=True)
class DenseDecode(Workload):
    """A few tokens per request over all of their keys, by default in a bfloat16 cache."""

    batch: int
    query_len: int
    heads: int
    context: int
    format: CacheFormat = BF16_576
    op: ClassVar[str] = "dense_decode"

    @property
    def variant(self) -> str:
        return "" if self.format is BF16_576 else f"{self.format.name} cache"

    @property
    def flop(self) -> float:
        return 2.0 * self.batch * self.query_len * self.heads * self.context * (576 + 512)

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)
        cache, table = _paged(draw, self.format, self.batch, self.context)
        lens = torch.full((self.batch,), self.context, dtype=torch.int32, device=device)
        return {
            "q": _queries(draw, self.batch, self.query_len, self.heads, 576),
            "cache": cache,
            "page_table": table,
            "seq_lens": lens,
            "softmax_scale": 192**-0.5,
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        per_token = 2 * self.heads * (576 + 512) + 4 * self.heads
        return (
            self.batch * self.context * self.format.bytes_per_token
            + self.batch * self.query_len * per_token
        )

    def run(self, inputs: Inputs) -> Results:
        return ops.dense_decode(**inputs)

    def check(self, inputs: Inputs, results: Results) -> None:
        some = _some(self.batch, 2, inputs["q"].device)
        per_request = ("q", "page_table", "seq_lens")
        arguments = inputs | {name: inputs[name][some] for name in per_request}
        expected = reference.dense_decode(**arguments)
        _check_attention(results, some, expected, (DENSE_DECODE_OUT, DECODE_LSE), self.op)


@dataclass(frozen=True)
class IndexerScores(Workload):
    """Indexer scores of a causal prefill over contiguous keys."""

    tokens: int
    context: int
    op: ClassVar[str] = "indexer_scores"
    unit: ClassVar[Literal["bf16", "fp8"]] = "fp8"

    @property
    def _scores(self) -> int:
        """Pairs of a token and a key that it sees."""
        first = self.context - self.tokens + 1
        return self.tokens * (first + self.context) // 2

    @property
    def flop(self) -> float:
        return 2.0 * self._scores * INDEX_HEADS * INDEX_DIM

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)
        keys = torch.randn(self.context, INDEX_DIM, generator=draw, device=device)
        stored = INDEX_FP8.quantize(keys)
        ends = torch.arange(self.tokens, dtype=torch.int32, device=device)
        return {
            "index_q": _index_queries(draw, self.tokens),
            "weights": torch.randn(self.tokens, INDEX_HEADS, generator=draw, device=device),
            "index_k": stored.fp8,
            "index_k_scales": _present(stored.scales)[:, 0],
            "row_starts": torch.zeros_like(ends),
            "row_ends": ends + (self.context - self.tokens + 1),
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        per_token = INDEX_HEADS * (INDEX_DIM + 4)
        return self.tokens * per_token + self.context * (INDEX_DIM + 4) + 4 * self._scores

    def run(self, inputs: Inputs) -> Results:
        return (ops.indexer_scores(**inputs),)

    def check(self, inputs: Inputs, results: Results) -> None:
        some = _some(self.tokens, 8, inputs["index_q"].device)
        per_token = ("index_q", "weights", "row_starts", "row_ends")
        _check_scores(
            results, some, inputs | {name: inputs[name][some] for name in per_token}, self.op
        )


@dataclass(frozen=True)
class IndexerScoresPaged(Workload):
    """Indexer scores of a decode over paged keys."""

    batch: int
    query_len: int
    context: int
    op: ClassVar[str] = "indexer_scores_paged"
    unit: ClassVar[Literal["bf16", "fp8"]] = "fp8"

    @property
    def flop(self) -> float:
        return 2.0 * self.batch * self.query_len * self.context * INDEX_HEADS * INDEX_DIM

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)
        cache, table = _paged(draw, INDEX_FP8, self.batch, self.context)
        rows = self.batch, self.query_len
        return {
            "index_q": _index_queries(draw, self.batch * self.query_len).unflatten(0, rows),
            "weights": torch.randn(*rows, INDEX_HEADS, generator=draw, device=device),
            "cache": cache,
            "page_table": table,
            "seq_lens": torch.full(rows, self.context, dtype=torch.int32, device=device),
            "max_seq_len": self.context,
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        num_tokens = self.batch * self.query_len
        per_token = INDEX_HEADS * (INDEX_DIM + 4) + 4 * self.context
        return self.batch * self.context * INDEX_FP8.bytes_per_token + num_tokens * per_token

    def run(self, inputs: Inputs) -> Results:
        return (ops.indexer_scores_paged(**inputs),)

    def check(self, inputs: Inputs, results: Results) -> None:
        some = _some(self.batch, 2, inputs["index_q"].device)
        per_request = ("index_q", "weights", "page_table", "seq_lens")
        _check_scores(
            results, some, inputs | {name: inputs[name][some] for name in per_request}, self.op
        )


@dataclass(frozen=True)
class SelectTopk(Workload):
    """The best columns of rows of normal scores; each row is read in full."""

    batch: int
    context: int
    topk: int
    op: ClassVar[str] = "select_topk"

    @property
    def flop(self) -> float:
        return 0.0

    def build(self, device: torch.device) -> Inputs:
        scores = torch.randn(self.batch, self.context, generator=_generator(device), device=device)
        return {"scores": scores, "topk": self.topk}

    def unique_bytes(self, inputs: Inputs) -> int:
        return 4 * self.batch * (self.context + self.topk)

    def run(self, inputs: Inputs) -> Results:
        return (ops.select_topk(**inputs),)

    def check(self, inputs: Inputs, results: Results) -> None:
        """Compare values, not ids, because peers break ties differently."""
        some = _some(self.batch, 64, inputs["scores"].device)
        scores = inputs["scores"][some]
        ids = results[0][some].long().sort().values
        if not bool(((ids >= 0) & (ids < self.context)).all() and (ids.diff() > 0).all()):
            raise AssertionError(f"{self.op}: ids are out of range or occur twice")
        values = scores.gather(1, ids).sort(descending=True).values
        assert_equal(self.op, values, scores.topk(self.topk).values)


@dataclass(frozen=True)
class IndexerTopk(Workload):
    """Scores of a causal prefill or a decode over paged keys, and the best keys of each token.

    A key is pooled from ``ratio`` tokens. The row's note has the memory of a run without its inputs
    and its result.
    """

    batch: int
    query_len: int
    context: int
    topk: int
    ratio: int = 1
    heads: int = INDEX_HEADS
    op: ClassVar[str] = "indexer_topk"
    unit: ClassVar[Literal["bf16", "fp8"]] = "fp8"

    @property
    def shape(self) -> dict[str, int]:
        sizes = super().shape.items()
        return {name: size for name, size in sizes if name not in ("ratio", "heads")}

    @property
    def variant(self) -> str:
        keys = [f"keys of {self.ratio} tokens"] if self.ratio > 1 else []
        heads = [f"{self.heads} heads"] if self.heads != INDEX_HEADS else []
        return ", ".join(keys + heads)

    @property
    def keys(self) -> int:
        """Keys of a request."""
        return self.context // self.ratio

    def seen(self, place: int) -> int:
        """Keys that a query token of a request sees, by its place among them."""
        return (self.context - self.query_len + 1 + place) // self.ratio

    @property
    def _scores(self) -> int:
        """Pairs of a token and a key that it sees."""
        return self.batch * sum(self.seen(place) for place in range(self.query_len))

    @property
    def flop(self) -> float:
        return 2.0 * self._scores * self.heads * INDEX_DIM

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)
        cache, table = _paged(draw, INDEX_FP8, self.batch, self.keys)
        num_tokens = self.batch * self.query_len
        starts = torch.arange(self.batch + 1, dtype=torch.int32, device=device)
        return {
            "index_q": _index_queries(draw, num_tokens, self.heads),
            "weights": torch.randn(num_tokens, self.heads, generator=draw, device=device),
            "cache": cache,
            "input_row_offsets": starts * self.query_len,
            "seq_lens": torch.full_like(starts[1:], self.context),
            "page_table": table,
            "topk": self.topk,
            "ratio": self.ratio,
            "out": torch.empty(num_tokens, self.topk, dtype=torch.int32, device=device),
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        """Scores need not be stored."""
        num_tokens = self.batch * self.query_len
        per_token = self.heads * (INDEX_DIM + 4) + 4 * self.topk
        return self.batch * self.keys * INDEX_FP8.bytes_per_token + num_tokens * per_token

    def run(self, inputs: Inputs) -> Results:
        return (ops.indexer_topk(**inputs),)

    def check(self, inputs: Inputs, results: Results) -> None:
        for token, scores, size in self._scores_of_some(inputs):
            _check_best(self.op, results[0][token], scores, self.topk, size)

    def _scores_of_some(self, inputs: Inputs) -> Iterator[tuple[int, Tensor, Tensor]]:
        """A few tokens, the scores of the keys that they see, and the largest size of these."""
        some = _some(self.batch * self.query_len, 4, inputs["index_q"].device)
        for token in some.tolist():
            request, place = divmod(token, self.query_len)
            seen = self.seen(place)
            arguments = {
                "index_q": inputs["index_q"][token][None, None],
                "weights": inputs["weights"][token][None, None],
                "cache": inputs["cache"],
                "page_table": inputs["page_table"][request][None],
                "seq_lens": torch.tensor([[seen]], device=some.device),
                "max_seq_len": self.keys,
            }
            scores = reference.indexer_scores_paged(**arguments)[0, 0, :seen]
            yield token, scores, score_sizes("indexer_scores_paged", arguments).amax()

    def ours(self, inputs: Inputs) -> Side:
        side = super().ours(inputs)
        if inputs["index_q"].is_cuda:
            side.run()  # compiles, and allocates the memory that stays
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            side.run()
            side.note = f"{(torch.cuda.max_memory_allocated() - before) / 2**20:.1f} MiB of memory"
        return side


@dataclass(frozen=True)
class _InBlocks(IndexerTopk):
    """An :class:`IndexerTopk` over keys in blocks."""

    block_size: int = 8

    @property
    def shape(self) -> dict[str, int]:
        sizes = super().shape.items()
        return {name: size for name, size in sizes if name != "block_size"}

    @property
    def variant(self) -> str:
        blocks = f"blocks of {self.block_size} keys"
        return ", ".join(filter(None, [super().variant, blocks]))


@dataclass(frozen=True)
class IndexerTopkBlocks(_InBlocks):
    """An :class:`IndexerTopk` that also chooses blocks of keys, among which later layers select."""

    topk_blocks: int = 2048
    op: ClassVar[str] = "indexer_topk_blocks"

    def build(self, device: torch.device) -> Inputs:
        inputs, shape = super().build(device), (self.batch * self.query_len, self.topk_blocks)
        return inputs | {
            "topk_blocks": self.topk_blocks,
            "block_size": self.block_size,
            "blocks_out": torch.empty(shape, dtype=torch.int32, device=device),
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        return super().unique_bytes(inputs) + inputs["blocks_out"].nbytes

    def run(self, inputs: Inputs) -> Results:
        return ops.indexer_topk_blocks(**inputs)

    def check(self, inputs: Inputs, results: Results) -> None:
        super().check(inputs, results)
        for token, scores, size in self._scores_of_some(inputs):
            blocks = results[1][token]
            best = torch.stack([part.amax() for part in scores.split(self.block_size)])
            ids = blocks[blocks >= 0].long()
            if not bool((ids == len(best) - 1).any()):
                raise AssertionError(f"{self.op}: the block of the last key is missing")
            others = ids[ids != len(best) - 1]
            _check_best(self.op, others, best[:-1], self.topk_blocks - 1, size)


@dataclass(frozen=True)
class IndexerTopkOfBlocks(_InBlocks):
    """The best keys of each token among those of its blocks, which another layer has chosen.

    A token lists random blocks and that of its last key.
    """

    num_blocks: int = 2048
    op: ClassVar[str] = "indexer_topk_of_blocks"

    @property
    def flop(self) -> float:
        listed = self.batch * self.query_len * self.num_blocks * self.block_size
        return 2.0 * min(listed, self._scores) * self.heads * INDEX_DIM

    def build(self, device: torch.device) -> Inputs:
        inputs, draw = super().build(device), _generator(device)
        ends = [self.seen(place) for place in range(self.query_len)] * self.batch
        last = (torch.tensor(ends, device=device) - 1)[:, None] // self.block_size
        fewest = (min(ends) - 1) // self.block_size
        count = min(self.num_blocks - 1, fewest)
        chosen = _select(draw, len(ends), fewest, count, "random")
        listed = torch.cat([chosen.sort(1).values, last.int()], 1)
        missing = self.num_blocks - listed.shape[1]
        blocks = torch.nn.functional.pad(listed, (0, missing), value=-1)
        return inputs | {"blocks": blocks, "block_size": self.block_size}

    def unique_bytes(self, inputs: Inputs) -> int:
        """Keys of the blocks that a request's tokens list, each once."""
        size, blocks = self.block_size, inputs["blocks"].unflatten(0, (self.batch, -1))
        listed = sum(int((each.unique() >= 0).sum()) for each in blocks)
        keys = min(listed * size, self.batch * self.keys) * INDEX_FP8.bytes_per_token
        per_token = self.heads * (INDEX_DIM + 4) + 4 * self.topk
        return keys + self.batch * self.query_len * per_token + inputs["blocks"].nbytes

    def run(self, inputs: Inputs) -> Results:
        return (ops.indexer_topk_of_blocks(**inputs),)

    def check(self, inputs: Inputs, results: Results) -> None:
        inside = torch.arange(self.block_size, device=inputs["index_q"].device)
        for token, scores, size in self._scores_of_some(inputs):
            blocks = inputs["blocks"][token]
            keys = (blocks[blocks >= 0, None] * self.block_size + inside).flatten()
            keys = keys[keys < len(scores)].long()
            ids = results[0][token]
            ids = ids[ids >= 0].long()
            if not bool(torch.isin(ids, keys).all()):
                raise AssertionError(f"{self.op}: keys of other blocks are selected")
            _check_best(self.op, torch.searchsorted(keys, ids), scores[keys], self.topk, size)


@dataclass(frozen=True)
class CacheWrite(Workload):
    """Norm, RoPE, quantisation and write of new tokens, and RoPE of their queries."""

    tokens: int
    heads: int
    format: CacheFormat = FP8_DS_MLA
    op: ClassVar[str] = "fused_rope_rmsnorm_quant"

    NUM_PAGES: ClassVar[int] = 1024

    @property
    def variant(self) -> str:
        return "" if self.format is FP8_DS_MLA else f"{self.format.name} cache"

    @property
    def flop(self) -> float:
        return 0.0

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)
        num_slots = self.NUM_PAGES * PAGE_SIZE
        slots = torch.randperm(num_slots, generator=draw, device=device)[: self.tokens]
        q_rope = torch.randn(
            self.tokens, self.heads, 64, generator=draw, device=device, dtype=torch.bfloat16
        )
        return {
            "q_rope": q_rope,
            "kv": _rows(draw, self.tokens, 576) * 10,
            "cos_sin_cache": cos_sin_table(rope_frequencies(64, 1e4), num_slots).to(device),
            "kv_norm_weight": torch.rand(512, generator=draw, device=device).bfloat16() + 0.5,
            "cache": PagedCache.allocate(self.format, self.NUM_PAGES, PAGE_SIZE, device=device),
            "positions": torch.randint(num_slots, (self.tokens,), generator=draw, device=device),
            "slot_mapping": slots,
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        """Rows in and out, queries in and out, and a row of the RoPE table for each token."""
        per_token = 2 * 576 + self.format.bytes_per_token + 2 * 2 * self.heads * 64 + 4 * 64 + 16
        return self.tokens * per_token

    def run(self, inputs: Inputs) -> Results:
        return ops.fused_rope_rmsnorm_quant(**inputs), inputs["cache"].data

    def check(self, inputs: Inputs, results: Results) -> None:
        some = _some(self.tokens, 64, inputs["kv"].device)
        expected = PagedCache.allocate(self.format, 1, PAGE_SIZE, device=some.device)
        per_token = ("q_rope", "kv", "positions")
        rotated, _ = reference.fused_rope_rmsnorm_quant(
            **inputs
            | {name: inputs[name][some] for name in per_token}
            | {"cache": expected, "slot_mapping": torch.arange(len(some), device=some.device)}
        )
        assert_close(f"{self.op} queries", results[0][some], rotated.bfloat16(), BFLOAT16_ULP)
        written = PagedCache(results[1], self.format).gather(inputs["slot_mapping"][some])
        data, _ = self.format.pack(written, PAGE_SIZE)
        assert_rows_close(self.op, PagedCache(data, self.format), expected)


@dataclass(frozen=True)
class QueryNormWrite(CacheWrite):
    """DeepSeek-V4: norm and RoPE of whole queries; norm over all dims of the new rows."""

    format: CacheFormat = FP8_584

    @property
    def variant(self) -> str:
        return f"{self.format.name} cache, norm of queries"

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)
        dim = self.format.head_dim
        return super().build(device) | {
            "q_rope": _queries(draw, self.tokens, self.heads, dim),
            "kv": _rows(draw, self.tokens, dim) * 10,
            "kv_norm_weight": torch.rand(dim, generator=draw, device=device).bfloat16() + 0.5,
            "query_norm": True,
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        dim = self.format.head_dim
        per_token = 2 * dim + self.format.bytes_per_token + 2 * 2 * self.heads * dim + 4 * 64 + 16
        return self.tokens * per_token


@dataclass(frozen=True)
class PoolWindows(Workload):
    """DeepSeek-V4's compressors: entries of the windows that a step closes, and rows it keeps.

    A prefill begins at position 0. Decoding requests have earlier rows; in one step all of them
    close a window (``aligned``), or each is at another token of its window (``spread``).
    """

    batch: int
    query_len: int
    pooling: Pooling
    format: CacheFormat
    decode: Decode | None = None
    op: ClassVar[str] = "pool_windows"

    NUM_PAGES: ClassVar[int] = 1024
    DECODED: ClassVar[int] = 8192
    """Position at which the windows of decoding requests begin."""

    @property
    def variant(self) -> str:
        closing = {"aligned": "all close a window", "spread": "windows close in turn", None: ""}
        words = f"ratio {self.pooling.ratio}", f"{self.format.name} cache", closing[self.decode]
        return ", ".join(filter(None, words))

    @property
    def flop(self) -> float:
        return 0.0

    def build(self, device: torch.device) -> Inputs:
        ratio = self.pooling.ratio
        begins = torch.zeros(self.batch, dtype=torch.int64, device=device)
        if self.decode == "aligned":
            begins += self.DECODED + ratio - 1
        elif self.decode == "spread":
            begins += self.DECODED + torch.arange(self.batch, device=device) % ratio
        table = cos_sin_table(rope_frequencies(64, 1.6e5), int(begins.amax()) + self.query_len)
        return self.build_at(_generator(device), begins, table.to(device))

    def build_at(self, draw: torch.Generator, begins: Tensor, cos_sin_cache: Tensor) -> Inputs:
        """Inputs of requests whose steps begin at the positions ``begins [B]``."""
        pooling, dim, device = self.pooling, self.format.head_dim, draw.device
        ratio, width = pooling.ratio, pooling.width(dim)
        steps = torch.arange(self.query_len, device=device)
        positions = (begins[:, None] + steps).flatten()
        num_tokens = len(positions)
        # One GEMM gives values and gates.
        projected = torch.randn(num_tokens, 2 * width, generator=draw, device=device)
        state = WindowState.allocate(pooling, dim, num_rings=self.batch, device=device)
        state.rows.normal_(generator=draw)
        slots = torch.randperm(self.NUM_PAGES * PAGE_SIZE, generator=draw, device=device)
        slots = slots[:num_tokens].masked_fill((positions + 1) % ratio != 0, -1)
        requests = torch.arange(self.batch + 1, dtype=torch.int32, device=device)
        return {
            "values": projected[:, :width],
            "gates": projected[:, width:],
            "norm_weight": torch.rand(dim, generator=draw, device=device).bfloat16() + 0.5,
            "cos_sin_cache": cos_sin_cache,
            "state": state,
            "cache": PagedCache.allocate(self.format, self.NUM_PAGES, PAGE_SIZE, device=device),
            "pooling": pooling,
            "gate_bias": torch.randn(ratio, width, generator=draw, device=device),
            "positions": positions,
            "request_ids": requests[:-1].repeat_interleave(self.query_len),
            "input_row_offsets": requests * self.query_len,
            "ring_ids": torch.randperm(self.batch, generator=draw, device=device).int(),
            "slot_mapping": slots,
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        """The step's rows, earlier rows of its windows, the rows it keeps, and its entries."""
        dim, window = self.format.head_dim, self.pooling.window
        row = 2 * 4 * self.pooling.width(dim)  # values and gates
        kept = self.batch * min(self.query_len, inputs["state"].rows.shape[1])
        closing = inputs["slot_mapping"] >= 0
        num_closing = int(closing.sum())
        earlier = num_closing * (window - 1) if self.decode else 0  # one series of each
        return (
            (self.batch * self.query_len + kept) * row
            + earlier * 2 * 4 * dim
            + inputs["gate_bias"].nbytes
            + num_closing * (self.format.bytes_per_token + 4 * 64)
            + self.batch * self.query_len * (8 + 8 + 4)
        )

    def run(self, inputs: Inputs) -> Results:
        ops.pool_windows(**inputs)
        return (inputs["cache"].data,)

    def check(self, inputs: Inputs, results: Results) -> None:
        some, expected, state = self.expected(inputs)
        slots = inputs["slot_mapping"][some]
        slots = slots[slots >= 0]
        if len(slots):  # in some steps no request closes a window
            data, _ = self.format.pack(PagedCache(results[0], self.format).gather(slots), PAGE_SIZE)
            assert_rows_close(self.op, PagedCache(data, self.format), expected)
        is_last = (some + 1) % self.query_len == 0
        rings = inputs["ring_ids"][inputs["request_ids"][some[is_last]]]
        assert_equal(f"{self.op} state", inputs["state"].rows[rings], state.rows[is_last])

    def expected(self, inputs: Inputs) -> tuple[Tensor, PagedCache, WindowState]:
        """By the reference, for some tokens that close a window or are the last of a request.

        Returns:
            The tokens, the entries of those that close a window, and a ring after each token.
        """
        slots = inputs["slot_mapping"]
        tokens = torch.arange(len(slots), device=slots.device)
        found = tokens[(slots >= 0) | ((tokens + 1) % self.query_len == 0)]
        some = found[_some(len(found), 16, slots.device)]
        # Each of them is the last token of a request, which begins with its window.
        spans = [
            torch.arange(
                max(token - self.pooling.window + 1, token // self.query_len * self.query_len),
                token + 1,
                device=slots.device,
            )
            for token in some.tolist()
        ]
        lengths = torch.tensor([0, *map(len, spans)], device=slots.device)
        offsets, taken = lengths.cumsum(0), torch.cat(spans)
        closing = slots[some] >= 0
        targets = torch.full_like(taken, -1)
        targets[offsets[1:][closing] - 1] = torch.arange(int(closing.sum()), device=slots.device)
        expected = PagedCache.allocate(self.format, 1, PAGE_SIZE, device=slots.device)
        rings = torch.arange(len(some), device=slots.device)
        state = WindowState(inputs["state"].rows[inputs["ring_ids"][inputs["request_ids"][some]]])
        reference.pool_windows(
            **inputs
            | {name: inputs[name][taken] for name in ("values", "gates", "positions")}
            | {
                "state": state,
                "cache": expected,
                "request_ids": rings.repeat_interleave(lengths[1:]),
                "input_row_offsets": offsets,
                "ring_ids": rings,
                "slot_mapping": targets,
            }
        )
        return some, expected, state


@dataclass(frozen=True)
class IndexWrite(Workload):
    """Norm, RoPE, quantisation and write of new keys of the indexer, and its queries."""

    tokens: int
    heads: int
    op: ClassVar[str] = "fused_indexer_rope_quant"

    NUM_PAGES: ClassVar[int] = 1024

    @property
    def flop(self) -> float:
        return 0.0

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)
        num_slots = self.NUM_PAGES * PAGE_SIZE
        width = INDEX_DIM + self.heads  # one GEMM gives keys and head weights
        projected = torch.randn(
            self.tokens, width, generator=draw, device=device, dtype=torch.bfloat16
        )
        shape = self.tokens, self.heads, INDEX_DIM
        return {
            "index_q": torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16),
            "weights": projected[:, INDEX_DIM:],
            "index_k": projected[:, :INDEX_DIM],
            "norm_weight": torch.rand(INDEX_DIM, generator=draw, device=device) + 0.5,
            "norm_bias": torch.randn(INDEX_DIM, generator=draw, device=device) / 10,
            "cos_sin_cache": cos_sin_table(rope_frequencies(64, 1e4), num_slots).to(device),
            "cache": PagedCache.allocate(INDEX_FP8, self.NUM_PAGES, PAGE_SIZE, device=device),
            "positions": torch.randint(num_slots, (self.tokens,), generator=draw, device=device),
            "slot_mapping": torch.randperm(num_slots, generator=draw, device=device)[: self.tokens],
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        """Queries, weights and keys in and out, and a row of the RoPE table for each token."""
        per_head = 2 * INDEX_DIM + INDEX_DIM + 2 + 4
        per_key = 2 * INDEX_DIM + INDEX_FP8.bytes_per_token
        return self.tokens * (self.heads * per_head + per_key + 4 * 64 + 16)

    def run(self, inputs: Inputs) -> Results:
        return *ops.fused_indexer_rope_quant(**inputs), inputs["cache"].data

    def check(self, inputs: Inputs, results: Results) -> None:
        some = _some(self.tokens, 64, inputs["index_k"].device)
        expected = PagedCache.allocate(INDEX_FP8, 1, PAGE_SIZE, device=some.device)
        per_token = ("index_q", "weights", "index_k", "positions")
        q, weights = reference.fused_indexer_rope_quant(
            **inputs
            | {name: inputs[name][some] for name in per_token}
            | {"cache": expected, "slot_mapping": torch.arange(len(some), device=some.device)}
        )
        assert_close(f"{self.op} queries", results[0][some].float(), q.float(), E4M3_STEP)
        assert_close(f"{self.op} weights", results[1][some], weights, FLOAT32_ULPS)
        written = PagedCache(results[2], INDEX_FP8).gather(inputs["slot_mapping"][some])
        data, _ = INDEX_FP8.pack(written, PAGE_SIZE)
        assert_rows_close(self.op, PagedCache(data, INDEX_FP8), expected)


@dataclass(frozen=True)
class Gather(Workload):
    """Dequantisation of requests of the 656-byte cache into one bfloat16 workspace."""

    batch: int
    context: int
    op: ClassVar[str] = "gather_dequant"

    @property
    def flop(self) -> float:
        return 0.0

    def build(self, device: torch.device) -> Inputs:
        cache, table = _paged(_generator(device), FP8_DS_MLA, self.batch, self.context)
        starts = torch.arange(self.batch, dtype=torch.int32, device=device) * self.context
        return {
            "cache": cache,
            "page_table": table,
            "seq_lens": torch.full_like(starts, self.context),
            "workspace_starts": starts,
            "out": torch.empty(self.batch * self.context, 576, dtype=torch.bfloat16, device=device),
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        return self.batch * self.context * (FP8_DS_MLA.bytes_per_token + 2 * 576)

    def run(self, inputs: Inputs) -> Results:
        return (ops.gather_dequant(**inputs),)

    def check(self, inputs: Inputs, results: Results) -> None:
        expected = reference.gather_dequant(**inputs | {"out": torch.empty_like(inputs["out"])})
        assert_equal(self.op, results[0], expected)


@dataclass(frozen=True)
class HeadProducts(Workload):
    """Per-head GEMMs of e4m3 weights with bfloat16 vectors, for several layers in sequence.

    Each layer has its own weights, which are in no cache, and launches overlap as in a model. The
    layers share their vectors, which a model has just written, so these are in the cache.
    """

    tokens: int
    heads: int
    inputs: int
    outputs: int
    layers: int
    op: ClassVar[str] = "project_heads"
    unit: ClassVar[Literal["bf16", "fp8"]] = "fp8"

    @property
    def flop(self) -> float:
        return 2.0 * self.layers * self.tokens * self.heads * self.inputs * self.outputs

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)
        x = torch.randn(self.tokens, self.heads, self.inputs, generator=draw, device=device)
        sizes = self.heads, self.outputs, self.inputs
        return {
            "x": x.bfloat16(),
            "weights": [_head_weight(draw, *sizes) for _ in range(self.layers)],
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        vectors = 2 * self.tokens * self.heads * (self.inputs + self.layers * self.outputs)
        return vectors + sum(weight.data.nbytes for weight in inputs["weights"])

    def run(self, inputs: Inputs) -> Results:
        return tuple(ops.project_heads(inputs["x"], weight) for weight in inputs["weights"])

    def check(self, inputs: Inputs, results: Results) -> None:
        self.check_within(FP8_PROJECTION, inputs, results)

    def check_within(self, tolerance: Tolerance, inputs: Inputs, results: Results) -> None:
        some = _some(self.tokens, 4, inputs["x"].device)
        for weight, out in zip(inputs["weights"], results, strict=True):
            expected = reference.project_heads(inputs["x"][some], weight)
            assert_close(self.op, out[some], expected, tolerance)


@dataclass(frozen=True)
class ProjectGroups(Workload):
    """DeepSeek-V4: the inverse rotation of heads' outputs and one e4m3 GEMM per group of heads."""

    tokens: int
    heads: int
    groups: int
    op: ClassVar[str] = "project_groups"
    unit: ClassVar[Literal["bf16", "fp8"]] = "fp8"

    DIM: ClassVar[int] = 512
    OUTPUTS: ClassVar[int] = 1024
    MAX_POSITIONS: ClassVar[int] = 1 << 16

    @property
    def flop(self) -> float:
        return 2.0 * self.tokens * self.heads * self.DIM * self.OUTPUTS

    def build(self, device: torch.device) -> Inputs:
        draw = _generator(device)
        shape = self.tokens, self.heads, self.DIM
        inputs = self.heads // self.groups * self.DIM
        table = cos_sin_table(rope_frequencies(64, 1.6e5), self.MAX_POSITIONS)
        return {
            "x": torch.randn(shape, generator=draw, device=device, dtype=torch.bfloat16),
            "weight": _head_weight(draw, self.groups, self.OUTPUTS, inputs),
            "cos_sin_cache": table.to(device),
            "positions": torch.randint(
                self.MAX_POSITIONS, (self.tokens,), generator=draw, device=device
            ),
        }

    def unique_bytes(self, inputs: Inputs) -> int:
        weight = inputs["weight"]
        per_token = 2 * self.heads * self.DIM + 2 * self.groups * self.OUTPUTS + 4 * 64 + 8
        return self.tokens * per_token + weight.data.nbytes + weight.scale.nbytes

    def run(self, inputs: Inputs) -> Results:
        return (ops.project_groups(**inputs),)

    def check(self, inputs: Inputs, results: Results) -> None:
        self.check_within(FP8_PROJECTION, inputs, results)

    def check_within(self, tolerance: Tolerance, inputs: Inputs, results: Results) -> None:
        some = _some(self.tokens, 16, inputs["x"].device)
        per_token = {name: inputs[name][some] for name in ("x", "positions")}
        expected = reference.project_groups(**inputs | per_token)
        assert_close(self.op, results[0][some], expected, tolerance)


def all_workloads() -> list[Workload]:
    """Every row, op by op."""
    prefill = [
        (4096, 8192, 128, 576, 2048),
        (4096, 32768, 128, 576, 2048),
        (4096, 131072, 128, 576, 2048),
        (4096, 32768, 64, 576, 2048),
        (4096, 32768, 32, 576, 2048),
        (4096, 32768, 16, 576, 2048),
        (4096, 32768, 8, 576, 2048),
        (4096, 32768, 64, 512, 512),
        (4096, 32768, 128, 512, 1024),
    ]
    decode = [
        (1, 1, 128, 32768, 2048),
        (4, 1, 128, 32768, 2048),
        (16, 1, 128, 32768, 2048),
        (64, 1, 128, 32768, 2048),
        (128, 1, 128, 8192, 2048),
        (128, 1, 128, 32768, 2048),
        (128, 1, 128, 131072, 2048),
        (128, 2, 128, 32768, 2048),
        (256, 1, 128, 8192, 2048),
        (256, 1, 128, 32768, 2048),
        (128, 2, 64, 32768, 2048),
        (128, 1, 64, 32768, 2048),
        (128, 1, 32, 32768, 2048),
        (128, 1, 16, 32768, 2048),
        (128, 1, 8, 32768, 2048),
        (148, 2, 128, 32768, 16384),
    ]
    dense = [
        (128, 1, 128, 4096),
        (128, 1, 128, 8192),
        (128, 1, 128, 16384),
        (128, 2, 128, 8192),
        (32, 1, 128, 8192),
        (1, 1, 128, 32768),
        (128, 1, 64, 4096),
        (128, 1, 16, 8192),
    ]
    ragged = [(4096, 8192), (4096, 32768), (4096, 131072), (8192, 65536)]
    paged = [
        (128, 1, 8192),
        (128, 1, 32768),
        (128, 1, 131072),
        (128, 2, 32768),
        (256, 1, 65536),
        (64, 1, 65536),
        (8, 1, 131072),
        (1, 1, 131072),
    ]
    topk = [
        (1, 131072),
        (8, 131072),
        (64, 32768),
        (128, 32768),
        (128, 131072),
        (1024, 65536),
        (4096, 32768),
        (4096, 131072),
    ]
    indexer = [
        (1, 4096, 32768),
        (1, 4096, 131072),
        (1, 512, 1048576),
        (128, 1, 32768),
        (8, 1, 131072),
        (1, 1, 1048576),
    ]
    pooled = [
        (1, 4096, 32768),
        (1, 4096, 131072),
        (1, 4096, 1048576),
        *((batch, 1, context) for batch in (1, 16, 128) for context in (131072, 1048576)),
    ]
    compressors = [
        (Pooling(4, overlap=True), FP8_584),
        (Pooling(4, overlap=True), INDEX_FP8),
        (Pooling(128), FP8_584),
    ]
    return [
        *(SparsePrefill(*shape) for shape in prefill),
        *(SparsePrefill(*shape, "overlapping") for shape in prefill),
        *(
            PermittedPrefill(tokens, context, heads, 576, 2048)
            for tokens in (1024, 4096)
            for context in (8192, 32768, 131072)
            for heads in (64, 128)
        ),
        *(
            SharedPrefill(4096, 32768, heads, 576, 2048, selection, list_tokens=64 // heads)
            for heads in (8, 16, 32)
            for selection in ("overlapping", "random")
        ),
        *(
            SparseBackward(tokens, context, heads, 576, 2048, selection)
            for tokens, context in (
                (4096, 8192),
                (4096, 32768),
                (4096, 131072),
                (4096, 4096),
                (8192, 8192),
            )
            for heads in (64, 128)
            for selection in ("random", "overlapping")
        ),
        SparseBackward(4096, 32768, 16, 576, 2048),
        *(
            SharedBackward(4096, context, heads, 576, 2048, selection, size)
            for context in (8192, 32768, 131072)
            for heads, size in ((16, 4), (64, 2))
            for selection in ("random", "overlapping")
        ),
        *(
            AttentionTarget(4096, context, heads, 576, 2048, selection)
            for context in (8192, 32768, 131072)
            for heads in (64, 128)
            for selection in ("random", "overlapping")
        ),
        *(
            kind(4096, context, 2048, selection)
            for kind in (SelectedScores, SelectedScoresBackward)
            for context in (8192, 32768, 131072)
            for selection in ("random", "overlapping")
        ),
        *(
            kind(tokens, 128)
            for kind in (DenseIndexLoss, DenseIndexGradients)
            for tokens in (4096, 8192)
        ),
        *(
            CachedPrefill(tokens, context, 128, 2048)
            for tokens, context in ((4096, 32768), (4096, 131072), (256, 131072))
        ),
        *(CachedPrefill(4096, n, 128, 2048, e4m3_format()) for n in (32768, 131072)),
        *(WindowedPrefill(4096, heads, 8192, topk) for heads, topk in ((64, 512), (128, 1024))),
        *(SparseDecode(*shape) for shape in decode),
        # A single token of a request has no neighbours to overlap with.
        *(SparseDecode(*shape, "overlapping") for shape in decode if shape[1] > 1),
        *(SparseDecode(batch, 1, 64, 32768, 2048) for batch in (1, 16, 64, 256)),
        *(
            SparseDecode(batch, 1, heads, 32768, 2048, format=BF16_576)
            for batch in (1, 8, 32, 128)
            for heads in (8, 16, 32, 64, 128)
        ),
        *(SparseDecode(128, 1, heads, 32768, 2048, format=e4m3_format()) for heads in (128, 16)),
        *(
            SparseDecode(batch, 1, heads, 32768, GLM53_ROWS, format=fmt)
            for fmt in (BF16_512, FP8_NOPE)
            for batch in (1, 8, 64)
            for heads in (8, 64)
        ),
        *(
            WindowedDecode(batch, 1, heads, 128, 128, extra_context=32768, extra_topk=topk)
            for batch in (1, 4, 16, 64, 128)
            for heads in (128, 64)
            for topk in (512, 1024)
        ),
        *(DenseDecode(*shape) for shape in dense),
        *(DenseDecode(128, 1, heads, 8192, FP8_DS_MLA) for heads in (128, 16)),
        *(IndexerScores(*shape) for shape in ragged),
        *(IndexerScoresPaged(*shape) for shape in paged),
        *(SelectTopk(*shape, 2048) for shape in topk),
        *(IndexerTopk(*shape, 2048) for shape in indexer),
        *(IndexerTopk(*shape, topk, ratio=4) for shape in pooled for topk in (512, 1024)),
        *(
            IndexerTopk(batch, 1, 131072, 2048 // ratio, ratio, heads=16)
            for ratio in (4, 16)
            for batch in (1, 8, 64)
        ),
        *(
            kind(batch, query_len, context, 512, heads=32)
            for kind in (IndexerTopkBlocks, IndexerTopkOfBlocks)
            for batch, query_len, context in (
                *((batch, 1, 1048576) for batch in (1, 16, 64)),
                (1, 4096, 131072),
            )
        ),
        *(
            CacheWrite(tokens, heads, fmt)
            for fmt in (FP8_DS_MLA, BF16_576)
            for tokens in (128, 8192)
            for heads in (16, 128)
        ),
        *(QueryNormWrite(tokens, heads) for tokens in (1, 17, 128, 4096) for heads in (64, 128)),
        *(IndexWrite(tokens, heads) for tokens in (128, 8192) for heads in (32, 64)),
        *(
            PoolWindows(batch, 1, *compressor, decode)
            for compressor in compressors
            for batch in (1, 16, 128)
            for decode in ("aligned", "spread")
        ),
        *(
            PoolWindows(1, tokens, *compressor)
            for compressor in compressors
            for tokens in (4096, 32768)
        ),
        *(Gather(*shape) for shape in ((1, 32768), (4, 32768), (32, 4096))),
        *(
            HeadProducts(tokens, 128, *shape, layers=10 if tokens <= 256 else 1)
            for shape in ((128, 512), (512, 128))
            for tokens in (1, 16, 64, 128, 256, 4096)
        ),
        *(
            ProjectGroups(tokens, *model)
            for model in ((64, 8), (128, 16))
            for tokens in (1, 16, 128, 1024, 4096)
        ),
    ]


def topk_table() -> list[Workload]:
    """``select_topk`` over all supported sizes of rows, in ascending order.

    Peers that count scores in 32 bits may fault at the largest size, so it comes last.
    """
    shapes = [
        (batch, context)
        for context in (4096, 16384, 65536, 262144, 1048576)
        for batch in (1, 16, 256, 4096)
    ]
    shapes.sort(key=lambda shape: shape[0] * shape[1])
    return [SelectTopk(*shape, topk) for shape in shapes for topk in (512, 1024, 2048)]


def _generator(device: torch.device) -> torch.Generator:
    """A new generator: the default one is bound to the graph during a capture."""
    return torch.Generator(device).manual_seed(0)


def _queries(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw, device=draw.device, dtype=torch.bfloat16) / 10


def _rows(draw: torch.Generator, num_rows: int, dims: int) -> Tensor:
    rows = torch.randn(num_rows, dims, generator=draw, device=draw.device, dtype=torch.bfloat16)
    return rows / 10


def _head_weight(draw: torch.Generator, heads: int, outputs: int, inputs: int) -> HeadWeight:
    """Weights in e4m3, scaled for outputs of order 1."""
    shape = heads, outputs, inputs
    data = torch.randn(shape, generator=draw, device=draw.device).mul_(64).to(torch.float8_e4m3fn)
    blocks = -(-outputs // 128), -(-inputs // 128)
    scale = torch.full((heads, *blocks), inputs**-0.5 / 64, device=draw.device)
    return HeadWeight(data, scale, (128, 128))


def _indexer(draw: torch.Generator, num_tokens: int, num_rows: int) -> Inputs:
    """An indexer in bfloat16, with scores of order 1; its heads have exact ones."""
    queries = num_tokens, INDEX_HEADS, INDEX_DIM
    weights = torch.randn(queries[:2], generator=draw, device=draw.device)
    return {
        "index_q": eighths(_queries(draw, *queries) * 10),
        "weights": weights * (INDEX_HEADS * INDEX_DIM) ** -0.5,
        "index_k": eighths(_rows(draw, num_rows, INDEX_DIM) * 10),
    }


def _index_queries(draw: torch.Generator, num_tokens: int, heads: int = INDEX_HEADS) -> Tensor:
    shape = num_tokens, heads, INDEX_DIM
    return to_fp8(torch.randn(shape, generator=draw, device=draw.device))


def _paged(
    draw: torch.Generator, format: CacheFormat, batch: int, context: int
) -> tuple[PagedCache, Tensor]:
    """A cache full of random rows, and the shuffled pages of requests of ``context`` tokens."""
    width = -(-context // PAGE_SIZE)
    num_pages = batch * width
    cache = PagedCache.allocate(format, num_pages, PAGE_SIZE, device=draw.device)
    for start in range(0, cache.num_slots, CHUNK_ROWS):
        slots = torch.arange(start, min(start + CHUNK_ROWS, cache.num_slots), device=draw.device)
        cache.write(slots, _rows(draw, len(slots), format.head_dim))
    pages = torch.randperm(num_pages, generator=draw, device=draw.device, dtype=torch.int32)
    return cache, pages.view(batch, width)


def _select(
    draw: torch.Generator, num_tokens: int, context: int, topk: int, selection: Selection
) -> Tensor:
    """int32 ``[num_tokens, topk]``, distinct in each row."""
    if selection == "random":
        step = max(CHUNK_DRAWS // context, 1)
        parts = [
            _draw_distinct(draw, min(step, num_tokens - start), context, topk)
            for start in range(0, num_tokens, step)
        ]
        return torch.cat(parts).int()
    own = topk // 8 if context > topk else 0
    runs = []
    for start in range(0, num_tokens, RUN):
        order = torch.randperm(context, generator=draw, device=draw.device)
        shared, others = order[: topk - own], order[topk - own :]
        length = min(RUN, num_tokens - start)
        fresh = others[_draw_distinct(draw, length, len(others), own)]
        runs.append(torch.cat([shared.expand(length, -1), fresh], 1).sort().values)
    return torch.cat(runs).int()


def _select_causal(
    draw: torch.Generator, num_tokens: int, topk: int, selection: Selection
) -> Tensor:
    """int32 ``[num_tokens, topk]``: distinct rows up to the token's own, then -1.

    A token with no more than ``topk`` such rows selects all of them.
    """
    rows = torch.arange(num_tokens, device=draw.device)
    parts = []
    for start in range(0, num_tokens, RUN):
        tokens = rows[start : start + RUN]
        values = torch.rand(len(tokens), num_tokens, generator=draw, device=draw.device)
        if selection == "overlapping":
            shared = torch.rand(start + 1, generator=draw, device=draw.device)
            values[:, shared.topk(min(topk - topk // 8, start + 1)).indices] += 1
        best, ids = values.masked_fill_(rows > tokens[:, None], -1).topk(topk)
        parts.append(ids.masked_fill_(best < 0, num_tokens))
    lists = torch.cat(parts)
    if selection == "overlapping":
        lists = lists.sort().values
    return lists.masked_fill_(lists == num_tokens, -1).int()


def _causal_entries(num_tokens: int, topk: int) -> int:
    """The number of rows that :func:`_select_causal` selects."""
    few = min(num_tokens, topk)
    return few * (few + 1) // 2 + (num_tokens - few) * few


def _draw_distinct(draw: torch.Generator, num_rows: int, limit: int, count: int) -> Tensor:
    """``count`` different ids below ``limit`` for each row, in random order."""
    return torch.rand(num_rows, limit, generator=draw, device=draw.device).topk(count).indices


def _some(num_rows: int, count: int, device: torch.device) -> Tensor:
    """Up to ``count`` evenly spaced rows, from the first to the last."""
    steps = torch.linspace(0, num_rows - 1, min(count, num_rows), device=device)
    return steps.long()


def _present(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise ValueError("the format has no scales")
    return tensor


def _check_attention(
    results: Results,
    some: Tensor,
    expected: tuple[Tensor, Tensor],
    tolerances: tuple[Tolerance, Tolerance],
    name: str,
    sizes: tuple[Tensor | None, Tensor | None] = (None, None),
) -> None:
    """Check outputs, and lse if a side returns it; no output of any row may be NaN."""
    if not bool(results[0].isfinite().all()):
        raise AssertionError(f"{name}: an output is not finite")
    for label, result, wanted, tolerance, size in zip(
        ("out", "lse"), results, expected, tolerances, sizes, strict=False
    ):
        assert_close(f"{name} {label}", result[some], wanted, tolerance, size)


def _parts_of_tokens(inputs: Inputs, at_once: int) -> Iterator[tuple[slice, Inputs]]:
    """The inputs of a training op for some tokens at a time."""
    names = "dscores", "q", "lse", "index_q", "weights", "topk_indices", "row_starts", "row_ends"
    for first in range(0, len(inputs["index_q"]), at_once):
        some = slice(first, first + at_once)
        yield some, inputs | {name: inputs[name][some] for name in names if name in inputs}


def _check_index_gradients(
    op: str, inputs: Inputs, results: Results, at_once: int, sized: Inputs | None = None
) -> None:
    """Check dindex_q, dweights and dindex_k; every token has a part in the gradient of rows.

    Sizes of elements come from the inputs, or from others where these hide the terms of an error.
    """
    expected = torch.zeros(inputs["index_k"].shape, device=inputs["index_k"].device)
    squares = torch.zeros_like(expected)
    *tolerances, of_rows = TOLERANCES[op][-3:]
    parts = _parts_of_tokens(inputs, at_once), _parts_of_tokens(sized or inputs, at_once)
    for (some, arguments), (_, others) in zip(*parts, strict=True):
        *wanted, dindex_k = run_reference(op, arguments)[-3:]
        *sizes, row_sizes = sizes_of(op, others).values()
        for index, name in enumerate(("dindex_q", "dweights")):
            got = results[index][some]
            assert_result(f"{op} {name}", got, wanted[index], tolerances[index], sizes[index])
        expected += dindex_k
        squares += row_sizes.square()
    assert_result(f"{op} dindex_k", results[2], expected, of_rows, squares.sqrt())


def _check_best(op: str, ids: Tensor, scores: Tensor, topk: int, size: Tensor) -> None:
    """Check that a list has keys with the best of a token's scores, each key once.

    Scores are compared, because another order of additions changes ties.
    """
    ids = ids[ids >= 0].long().sort().values
    count = min(topk, len(scores))
    if len(ids) != count or not bool((ids < len(scores)).all() and (ids.diff() > 0).all()):
        raise AssertionError(f"{op}: ids are missing, out of range or occur twice")
    best = scores[ids].sort(descending=True).values
    assert_close(op, best, scores.topk(count).values, INDEXER_SCORES, size)


def _check_scores(results: Results, some: Tensor, inputs: Inputs, op: str) -> None:
    """Check the scores of visible keys; not every side writes the other columns."""
    (expected,) = run_reference(op, inputs)
    got = results[0][some].masked_fill(expected == -torch.inf, -torch.inf)
    assert_close(op, got, expected, INDEXER_SCORES, score_sizes(op, inputs))

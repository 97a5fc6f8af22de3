"""Which implementation a problem gets, and why each other one refused.

An op is one row of :data:`OPS`; a tier is one row of :data:`TIERS`, fastest first. An op's kernel
in a tier is the function ``sparsemla.kernels.<module>.<tier>:<op>``. It takes the arguments of the
public op and writes the ones named in ``outputs`` in place. The last tier, ``reference``, is the
definition itself (``sparsemla.reference.<module>:<op>``); it is slow and its memory is not bounded.
"""

from __future__ import annotations

import functools
import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from sparsemla.formats import get_format
from sparsemla.kinds import check_kind

Launch = Callable[..., object]


@dataclass(frozen=True)
class Op:
    """An op's place in the tree, what it writes, and the tiers that implement it.

    ``schedule`` names the arguments that say how to compute and not what, which the definition
    does not take. ``dtype`` is the usual one of the op's first tensor.
    """

    module: str
    outputs: tuple[str, ...]
    tiers: tuple[str, ...] = ("triton", "cpu", "reference")
    schedule: tuple[str, ...] = ()
    dtype: torch.dtype = torch.bfloat16


HOPPER = ("sm90", "triton", "cpu", "reference")

OPS: dict[str, Op] = {
    "fused_rope_rmsnorm_quant": Op("quant", ("out", "kv_out")),
    "append_index_keys": Op("quant", ()),
    "prepare_index_queries": Op("quant", ("out", "weights_out")),
    "fused_indexer_rope_quant": Op("quant", ("out", "weights_out")),
    "to_slots": Op("gather", ("out",)),
    "gather_dequant": Op("gather", ()),
    "indexer_scores": Op("indexer", ("out",), HOPPER, dtype=torch.float8_e4m3fn),
    "indexer_scores_paged": Op("indexer", ("out",), HOPPER, dtype=torch.float8_e4m3fn),
    "indexer_topk": Op("indexer", ("out",), HOPPER, dtype=torch.float8_e4m3fn),
    "select_topk": Op("topk", ("out",), HOPPER, dtype=torch.float32),
    "merge_topk": Op("topk", ("out",), HOPPER, dtype=torch.float32),
    "sparse_prefill": Op("prefill", ("out", "lse", "max_logits"), HOPPER),
    "dense_prefill": Op("prefill", ("out", "lse")),
    "sparse_decode": Op("decode", ("out", "lse"), HOPPER, ("head_tile", "num_splits", "workspace")),
    "dense_decode": Op("decode", ("out", "lse"), HOPPER, ("num_splits", "workspace")),
    "merge_states": Op("decode", ("out", "lse")),
    "project_heads": Op("projection", ("out",), HOPPER, ("batch_invariant", "workspace")),
}


@dataclass(frozen=True)
class Problem:
    """What dispatch looks at. It never looks at a tensor's values.

    Args:
        op: a key of :data:`OPS`.
        device: ``cpu`` or ``cuda``.
        capability: CUDA compute capability, None on a CPU.
        dtype: dtype of the op's first tensor.
        cache_format: name of the cache's format, or None where the op takes no cache.
        num_heads: query or indexer heads, 0 where there are none.
        topk: width of the selection, 0 where there is none.
        extra_format: name of the second cache's format, or None without one.
        aligned: whether queries and keys have rows, which start at multiples of 16 bytes.
        head_dim: dims of an indexer head, 0 for other ops.
        page_size: of the cache of an indexer's keys, 0 for other ops.
        out_dtype: dtype of the result, None for the only one that the op has.
    """

    op: str
    device: str
    capability: tuple[int, int] | None = None
    dtype: torch.dtype = torch.bfloat16
    cache_format: str | None = None
    num_heads: int = 0
    topk: int = 0
    extra_format: str | None = None
    aligned: bool = True
    head_dim: int = 0
    page_size: int = 0
    out_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Tier:
    """A family of implementations and the problems it takes."""

    name: str
    summary: str
    refuse: Callable[[Problem], str | None]


def _refuse_off_cpu(problem: Problem) -> str | None:
    return None if problem.device == "cpu" else f"needs CPU tensors, got {problem.device}"


def _refuse_off_gpu(problem: Problem) -> str | None:
    if problem.device != "cuda":
        return f"needs CUDA or ROCm tensors, got {problem.device}"
    if problem.capability is not None and problem.capability < (8, 0) and not torch.version.hip:
        return f"needs a GPU from sm_80 on, got {problem.capability}"
    return None


def _refuse_off_hopper(problem: Problem) -> str | None:
    if problem.capability != (9, 0) or torch.version.hip:
        return f"needs a Hopper GPU (sm_90), got {problem.capability or problem.device}"
    if OPS[problem.op].module in ("topk", "projection"):
        return None
    if OPS[problem.op].module == "indexer":
        return _refuse_index_keys(problem)
    if problem.dtype != torch.bfloat16:
        return f"needs bfloat16 queries, got {problem.dtype}"
    if problem.out_dtype not in (None, torch.bfloat16):
        return f"gives bfloat16 results, not {problem.out_dtype}"
    if not problem.aligned:
        return "needs queries and caches with rows that start at multiples of 16 bytes"
    if problem.cache_format is not None:
        fmt = get_format(problem.cache_format)
        if fmt.value_dim != 512 or fmt.head_dim not in (512, 576):
            return f"needs 512 or 576 dims with 512 of value, got {fmt.name}"
        if fmt.fp8_dim and fmt.scale_block not in (0, 64, 128, fmt.head_dim):
            return f"needs scales of 64 or 128 dims, or of a row, got {fmt.name}"
        if problem.extra_format not in (None, fmt.name) or (
            problem.extra_format and fmt.scales_in not in ("row", "page")
        ):
            return f"needs an extra cache of one format that keeps its scales, got {fmt.name}"
    return None


def _refuse_index_keys(problem: Problem) -> str | None:
    if problem.dtype != torch.float8_e4m3fn:
        return f"needs float8_e4m3fn queries, got {problem.dtype}"
    if problem.num_heads > 256 or problem.head_dim > 128:
        return (
            f"needs up to 256 heads of up to 128 dims, "
            f"got {problem.num_heads} of {problem.head_dim}"
        )
    if problem.page_size % 64:
        return f"needs pages of a multiple of 64 keys, got {problem.page_size}"
    if not problem.aligned:
        return "needs queries and keys with rows that start at multiples of 16 bytes"
    return None


def _refuse_nothing(problem: Problem) -> str | None:
    return None


TIERS: tuple[Tier, ...] = (
    Tier("sm90", "Gluon, for Hopper GPUs", _refuse_off_hopper),
    Tier("triton", "Triton, any GPU from sm_80 and gfx942", _refuse_off_gpu),
    Tier("cpu", "torch on the CPU, chunked, bounded memory", _refuse_off_cpu),
    Tier("reference", "the definition: float32 torch, any device, slow", _refuse_nothing),
)


WORTH_CONVERTING: dict[str, tuple[tuple[float, float], ...]] = {
    "sm90": ((64, 0.09), (math.inf, 0.25)),
}
"""By tier, and up to how many heads: the rows of a quantised cache that may be converted for each
key that is selected, so that :func:`sparsemla.sparse_prefill` over bfloat16 rows finishes first all
the same. Measured on an H200, see docs/kernels.md; other tiers were not measured."""

TILES_AT_ONCE = 132
"""Tiles of 64 heads of a token that the measured GPU works on; fewer take as long."""
LAUNCH_ROWS = 12288
"""Rows that are converted in the time of the conversion's launch."""


def converts_first(problem: Problem, num_tokens: int, num_keys: int, num_rows: int) -> bool:
    """Whether ``sparse_prefill`` is faster after its caller has upconverted the cache's rows.

    Args:
        problem: of ``sparse_prefill``.
        num_tokens: query tokens.
        num_keys: keys that are selected, of all tokens together.
        num_rows: rows that would be converted.

    >>> hopper = Problem("sparse_prefill", "cuda", (9, 0), cache_format="fp8_ds_mla", num_heads=128)
    >>> [converts_first(hopper, tokens, tokens * 2048, 131072) for tokens in (64, 512)]
    [False, True]
    """
    if problem.cache_format is None or not get_format(problem.cache_format).fp8_dim:
        return False
    limits = WORTH_CONVERTING.get(explain(problem).chosen or "", ())
    per_key = next((rows for heads, rows in limits if problem.num_heads <= heads), 0.0)
    at_once = max(TILES_AT_ONCE // max(-(-problem.num_heads // 64), 1), 1)
    counted = -(-num_tokens // at_once) * at_once
    work = (num_rows + LAUNCH_ROWS) * num_tokens
    return num_rows > 0 and work <= per_key * num_keys * counted


@dataclass(frozen=True)
class Explanation:
    """The tiers of an op in order of preference, each with its refusal or None."""

    problem: Problem
    refusals: tuple[tuple[str, str | None], ...] = field(default_factory=tuple)

    @property
    def chosen(self) -> str | None:
        """The first tier that does not refuse."""
        return next((tier for tier, reason in self.refusals if reason is None), None)

    def __str__(self) -> str:
        lines = [f"{self.problem.op}: {self.chosen or 'no implementation'}"]
        for tier, reason in self.refusals:
            state = "chosen" if tier == self.chosen else reason or "would do, slower"
            lines.append(f"  {tier}: {state}")
        return "\n".join(lines)


def op_named(name: str) -> Op:
    """The row of :data:`OPS`.

    Raises:
        ValueError: there is no such op.
    """
    if name not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}; got {name!r}")
    return OPS[name]


def explain(problem: Problem) -> Explanation:
    """Why ``problem`` gets the implementation it gets.

    >>> print(explain(Problem("sparse_decode", "cpu")))
    sparse_decode: cpu
      sm90: needs a Hopper GPU (sm_90), got cpu
      triton: needs CUDA or ROCm tensors, got cpu
      cpu: chosen
      reference: would do, slower

    Raises:
        ValueError: there is no such op.
    """
    check_kind("problem", problem, Problem)
    offered = op_named(problem.op).tiers
    return Explanation(
        problem,
        tuple(
            (tier.name, tier.refuse(problem) if tier.name in offered else "not implemented")
            for tier in TIERS
        ),
    )


@functools.cache
def select(problem: Problem) -> Launch:
    """The implementation that ``problem`` gets.

    Raises:
        ValueError: every tier refused; the message says why.
    """
    explanation = explain(problem)
    if explanation.chosen is None:
        raise ValueError(str(explanation))
    return load(problem.op, explanation.chosen)


def load(op: str, tier: str) -> Launch:
    """The function that implements ``op`` in ``tier``."""
    package = "reference" if tier == "reference" else "kernels"
    name = f"sparsemla.{package}.{OPS[op].module}" + ("" if tier == "reference" else f".{tier}")
    function = getattr(importlib.import_module(name), op)
    return _writing(function, OPS[op]) if tier == "reference" else function


def _writing(function: Launch, op: Op) -> Launch:
    """A reference function as one that writes its results into its output arguments."""

    @functools.wraps(function)
    def launch(**arguments: object) -> None:
        targets = [cast("Tensor | None", arguments.pop(name)) for name in op.outputs]
        for name in op.schedule:
            arguments.pop(name)
        results = function(**arguments)
        if targets:
            results = results if isinstance(results, tuple) else (results,)
            for target, result in zip(targets, results, strict=True):
                if target is not None and target.dim() > result.dim():
                    # Room for the parts of a split: one is the whole, the others are empty.
                    target[0].copy_(result)
                    target[1:] = -torch.inf
                elif target is not None:
                    target.copy_(result)

    return launch


def find(
    op: str,
    lead: Tensor,
    *,
    cache_format: str | None = None,
    num_heads: int = 0,
    topk: int = 0,
    extra_format: str | None = None,
    aligned: bool = True,
    head_dim: int = 0,
    page_size: int = 0,
    out_dtype: torch.dtype | None = None,
) -> Launch:
    """The implementation of ``op`` for tensors like ``lead``, the op's first."""
    return select(
        problem_of(
            op,
            lead.device,
            lead.dtype,
            cache_format,
            num_heads,
            topk,
            extra_format,
            aligned,
            head_dim,
            page_size,
            out_dtype,
        )
    )


@functools.cache
def problem_of(
    op: str,
    device: torch.device,
    dtype: torch.dtype,
    cache_format: str | None = None,
    num_heads: int = 0,
    topk: int = 0,
    extra_format: str | None = None,
    aligned: bool = True,
    head_dim: int = 0,
    page_size: int = 0,
    out_dtype: torch.dtype | None = None,
) -> Problem:
    """The problem on a device, whose capability is looked up."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return Problem(
        op,
        device.type,
        capability,
        dtype,
        cache_format,
        num_heads,
        topk,
        extra_format,
        aligned,
        head_dim,
        page_size,
        out_dtype,
    )

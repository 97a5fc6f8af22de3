"""Which implementation a problem gets, and why each other one refused.

An op is one row of :data:`OPS`; a tier is one row of :data:`TIERS`, fastest first. An op's kernel
in a tier is the function ``sparsemla.kernels.<module>.<tier>:<op>``. It takes the arguments of the
public op and writes the ones named in ``outputs`` in place. The last tier, ``reference``, is the
definition itself (``sparsemla.reference.<module>:<op>``); it is slow and its memory is not bounded.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

Launch = Callable[..., object]


@dataclass(frozen=True)
class Op:
    """An op's place in the tree, what it writes, and the tiers that implement it.

    ``schedule`` names the arguments that say how to compute and not what, which the definition
    does not take.
    """

    module: str
    outputs: tuple[str, ...]
    tiers: tuple[str, ...] = ("triton", "cpu", "reference")
    schedule: tuple[str, ...] = ()


OPS: dict[str, Op] = {
    "fused_rope_rmsnorm_quant": Op("quant", ("out",)),
    "append_index_keys": Op("quant", ()),
    "prepare_index_queries": Op("quant", ("out", "weights_out")),
    "to_slots": Op("gather", ("out",)),
    "gather_dequant": Op("gather", ()),
    "indexer_scores": Op("indexer", ("out",)),
    "indexer_scores_paged": Op("indexer", ("out",)),
    "indexer_topk": Op("indexer", ("out",)),
    "select_topk": Op("topk", ("out",)),
    "sparse_prefill": Op("prefill", ("out", "lse", "max_logits")),
    "dense_prefill": Op("prefill", ("out", "lse")),
    "sparse_decode": Op("decode", ("out", "lse"), schedule=("num_splits", "workspace")),
    "dense_decode": Op("decode", ("out", "lse"), schedule=("num_splits", "workspace")),
    "merge_states": Op("decode", ("out", "lse")),
    "project_heads": Op("projection", ("out",)),
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
    """

    op: str
    device: str
    capability: tuple[int, int] | None = None
    dtype: torch.dtype = torch.bfloat16
    cache_format: str | None = None
    num_heads: int = 0
    topk: int = 0


@dataclass(frozen=True)
class Tier:
    """A family of implementations and the problems it takes."""

    name: str
    summary: str
    refuse: Callable[[Problem], str | None]


def _refuse_off_cpu(problem: Problem) -> str | None:
    return None if problem.device == "cpu" else f"needs CPU tensors, got {problem.device}"


def _refuse_off_gpu(problem: Problem) -> str | None:
    return None if problem.device == "cuda" else f"needs CUDA or ROCm tensors, got {problem.device}"


def _refuse_nothing(problem: Problem) -> str | None:
    return None


TIERS: tuple[Tier, ...] = (
    Tier("triton", "Triton, any GPU from sm_80 and gfx942", _refuse_off_gpu),
    Tier("cpu", "torch on the CPU, chunked, bounded memory", _refuse_off_cpu),
    Tier("reference", "the definition: float32 torch, any device, slow", _refuse_nothing),
)


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


def explain(problem: Problem) -> Explanation:
    """Why ``problem`` gets the implementation it gets.

    >>> print(explain(Problem("sparse_decode", "cpu")))
    sparse_decode: cpu
      triton: needs CUDA or ROCm tensors, got cpu
      cpu: chosen
      reference: would do, slower

    Raises:
        ValueError: there is no such op.
    """
    if problem.op not in OPS:
        raise ValueError(f"op must be one of {', '.join(OPS)}; got {problem.op!r}")
    offered = OPS[problem.op].tiers
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
                if target is not None:
                    target.copy_(result)

    return launch


def find(
    op: str,
    lead: Tensor,
    *,
    cache_format: str | None = None,
    num_heads: int = 0,
    topk: int = 0,
) -> Launch:
    """The implementation of ``op`` for tensors like ``lead``, the op's first."""
    return select(_problem(op, lead.device, lead.dtype, cache_format, num_heads, topk))


@functools.cache
def _problem(
    op: str,
    device: torch.device,
    dtype: torch.dtype,
    cache_format: str | None,
    num_heads: int,
    topk: int,
) -> Problem:
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    return Problem(op, device.type, capability, dtype, cache_format, num_heads, topk)

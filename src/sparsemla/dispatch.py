"""The choice of a kernel for a problem, and why each other kernel refuses.

A family of kernels registers its ops in its package's ``OPS``; :data:`OPS` is all of them. A tier
is one row of :data:`TIERS`, fastest first. Every op also has the tier ``reference``, its definition
in :mod:`sparsemla.reference`, which is slow and does not bound its memory.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor

from sparsemla import reference
from sparsemla.cache import PagedCache
from sparsemla.formats import CacheFormat
from sparsemla.kernels import (
    attention,
    backward,
    gather,
    indexer,
    lists,
    losses,
    pool,
    projection,
    quant,
    topk,
)
from sparsemla.kernels.common.device import meant
from sparsemla.kernels.common.registry import (
    DecodeWork,
    Kernel,
    Launch,
    Op,
    Problem,
    Schedule,
    no_refusal,
)
from sparsemla.kinds import check_kind

LOGGER = logging.getLogger(__name__)

MAX_PROBLEMS = 4096
"""Problems whose kernel is remembered; widths of selections come from callers."""

FAMILIES = (quant, pool, gather, indexer, topk, lists, attention, backward, losses, projection)


def _with_definition(name: str, op: Op) -> Op:
    """An op with its definition as its last kernel."""
    definition = Kernel("reference", lambda: _writing(getattr(reference, name), op))
    return replace(op, kernels=(*op.kernels, definition))


OPS: dict[str, Op] = {
    name: _with_definition(name, op) for family in FAMILIES for name, op in family.OPS.items()
}


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
    return None


TIERS: tuple[Tier, ...] = (
    Tier("sm90", "Gluon, for Hopper GPUs", _refuse_off_hopper),
    Tier("triton", "Triton, any GPU from sm_80 and gfx942", _refuse_off_gpu),
    Tier("cpu", "torch on the CPU, chunked, bounded memory", _refuse_off_cpu),
    Tier("reference", "the definition: float32 torch, any device, slow", no_refusal),
)


def converts_first(problem: Problem, num_tokens: int, num_keys: int, num_rows: int) -> bool:
    """Whether ``sparse_prefill`` is faster after its caller has upconverted the cache's rows.

    Args:
        problem: a problem of ``sparse_prefill``.
        num_tokens: query tokens.
        num_keys: selected keys of all tokens together.
        num_rows: rows to convert.

    >>> hopper = Problem("sparse_prefill", "cuda", (9, 0), cache_format="fp8_ds_mla", num_heads=128)
    >>> [converts_first(hopper, tokens, tokens * 2048, 131072) for tokens in (64, 512)]
    [False, True]
    """
    kernel = kernel_of(problem)
    return kernel.converts_first(problem, num_tokens, num_keys, num_rows)


@dataclass(frozen=True)
class Explanation:
    """The tiers of an op in order of preference, each with its refusal or None."""

    problem: Problem
    refusals: tuple[tuple[str, str | None], ...] = field(default_factory=tuple)

    @property
    def chosen(self) -> str:
        """The first tier that does not refuse; the definition never does."""
        return next(tier for tier, reason in self.refusals if reason is None)

    def __str__(self) -> str:
        lines = [f"{self.problem.op}: {self.chosen}"]
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
    """The tier that ``problem`` gets, and the refusals of the others.

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
    op = op_named(problem.op)
    return Explanation(problem, tuple((tier.name, _refusal(tier, op, problem)) for tier in TIERS))


def _refusal(tier: Tier, op: Op, problem: Problem) -> str | None:
    """Why a tier refuses a problem: first by the device, then by the kernel."""
    kernel = op.kernel(tier.name)
    if kernel is None:
        return "not implemented"
    return tier.refuse(problem) or kernel.refuse(problem)


def kernel_of(problem: Problem) -> Kernel:
    """The kernel that ``problem`` gets.

    Raises:
        ValueError: there is no such op.
    """
    return _kernel(problem.op, explain(problem).chosen)


def _kernel(op: str, tier: str) -> Kernel:
    kernel = op_named(op).kernel(tier)
    if kernel is None:
        tiers = ", ".join(kernel.tier for kernel in OPS[op].kernels)
        raise ValueError(f"tier must be one of {tiers} for {op}; got {tier!r}")
    return kernel


@functools.lru_cache(MAX_PROBLEMS)
def select(problem: Problem) -> Launch:
    """The launcher of the kernel that ``problem`` gets; the choice is logged once, at INFO.

    Raises:
        ValueError: there is no such op.
    """
    explanation = explain(problem)
    LOGGER.info("%s", explanation)
    return _kernel(problem.op, explanation.chosen).load()


def load(op: str, tier: str) -> Launch:
    """The launcher of ``op`` in ``tier``.

    Raises:
        ValueError: there is no such op, or none in this tier.
    """
    return _kernel(op, tier).load()


def _writing(definition: Launch, op: Op) -> Launch:
    """A definition as a launcher, which writes its results into its output arguments."""

    @functools.wraps(definition)
    def launch(**arguments: object) -> None:
        targets = [cast("Tensor | None", arguments.pop(name)) for name in op.outputs]
        for name in op.only_kernels:
            arguments.pop(name)
        results = definition(**arguments)
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
    format: CacheFormat | None = None,
    num_heads: int = 0,
    topk: int = 0,
    extra_format: CacheFormat | None = None,
    aligned: bool = True,
    head_dim: int = 0,
    page_size: int = 0,
    out_dtype: torch.dtype | None = None,
    shared_lists: bool = False,
) -> Launch:
    """The launcher of ``op`` for tensors like ``lead``, the op's first."""
    return select(
        problem_of(
            op,
            lead.device,
            lead.dtype,
            None if format is None else format.name,
            num_heads,
            topk,
            None if extra_format is None else extra_format.name,
            aligned,
            head_dim,
            page_size,
            out_dtype,
            shared_lists,
        )
    )


def schedule(
    op: str,
    q: Tensor,
    cache: PagedCache,
    num_keys: int,
    num_splits: int | None,
    extra_cache: PagedCache | None,
) -> Schedule:
    """The schedule that the kernel of a decode chooses for queries ``[B, S, H, D]``.

    Args:
        op: ``sparse_decode`` or ``dense_decode``.
        q, cache, extra_cache, num_splits: the op's arguments.
        num_keys: most keys that a query token attends to.
    """
    work = DecodeWork.of(q, cache.format, num_keys, num_multiprocessors(q.device))
    extra_format = None if extra_cache is None else extra_cache.format.name
    sizes = op, q.device, q.dtype, cache.format.name, q.shape[2], 0, extra_format
    # Dynamo cannot call a function that has a cache.
    if torch.compiler.is_compiling():
        kernel = kernel_of(_problem(*sizes))
    else:
        kernel = _cached_kernel_of(problem_of(*sizes))
    return kernel.schedule(work, num_splits)


_cached_kernel_of = functools.lru_cache(MAX_PROBLEMS)(kernel_of)


def most_splits(num_tiles: int, device: torch.device) -> int:
    """The most splits that a kernel chooses for ``num_tiles`` tiles of 64 query rows."""
    return attention.schedule.most_splits(num_tiles, num_multiprocessors(device))


def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU, 0 of a CPU."""
    device = meant(device)
    if device.type != "cuda":
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def only_compiles(device: torch.device) -> bool:
    """Whether launches on tensors of this device compile and run nothing, as in a warm-up."""
    return meant(device) != device


def _problem(
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
    shared_lists: bool = False,
) -> Problem:
    """The problem on a device, with the device's compute capability."""
    device, capability = meant(device), None
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        capability = properties.major, properties.minor
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
        shared_lists,
    )


problem_of = functools.lru_cache(MAX_PROBLEMS)(_problem)

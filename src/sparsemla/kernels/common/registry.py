"""The registration of a family of kernels: its ops, their kernels, and each kernel's refusals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsemla.formats import CacheFormat

Launch = Callable[..., object]


@dataclass(frozen=True)
class Problem:
    """The properties of a call by which dispatch chooses; it never looks at a tensor's values.

    Args:
        op: the op's name.
        device: ``cpu`` or ``cuda``.
        capability: CUDA compute capability, None on a CPU.
        dtype: dtype of the op's first tensor.
        cache_format: name of the cache's format, or None if the op takes no cache.
        num_heads: query or indexer heads, 0 for ops without heads.
        topk: width of the selection, 0 without one.
        extra_format: name of the second cache's format, or None without one.
        aligned: whether rows of queries and keys start at multiples of 16 bytes.
        head_dim: dims of an indexer head, 0 for other ops.
        page_size: page size of the indexer cache, 0 for other ops.
        out_dtype: dtype of the result, None if the op has no choice.
        shared_lists: whether a list of rows has several query tokens, or members.
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
    shared_lists: bool = False


@dataclass(frozen=True)
class DecodeWork:
    """The sizes of a decode; a kernel chooses its schedule by them.

    Args:
        batch: requests.
        query_len: query tokens of a request.
        num_heads: query heads.
        num_keys: most keys that a query token attends to.
        format: the cache's format.
        multiprocessors: number of the GPU's multiprocessors, 0 on a CPU.
    """

    batch: int
    query_len: int
    num_heads: int
    num_keys: int
    format: CacheFormat
    multiprocessors: int

    @classmethod
    def of(cls, q: Tensor, format: CacheFormat, num_keys: int, multiprocessors: int) -> DecodeWork:
        """The work of queries ``[B, S, H, D]``."""
        return cls(q.shape[0], q.shape[1], q.shape[2], num_keys, format, multiprocessors)


Schedule = tuple[int, ...]
"""The number of splits, then values that only the kernel itself reads."""


def no_refusal(problem: Problem) -> str | None:
    """No refusal: for kernels that take every problem of their tier."""
    return None


def one_split(work: DecodeWork, num_splits: int | None) -> Schedule:
    """The schedule of kernels that never split keys."""
    return (1,)


def never_converts(problem: Problem, num_tokens: int, num_keys: int, num_rows: int) -> bool:
    """False: for kernels without a measurement over converted rows."""
    return False


@dataclass(frozen=True)
class Kernel:
    """One implementation of an op.

    Args:
        tier: a key of :data:`sparsemla.dispatch.TIERS`.
        load: returns the launcher, which takes the arguments of the op's operator by name and
            writes the outputs in place. Loading imports Triton, so it happens at the first call.
        refuse: why the kernel does not take a problem of its tier, or None.
        schedule: the schedule of a decode, given the caller's ``num_splits`` or None.
        converts_first: whether the kernel is faster after its caller has converted the rows of a
            quantised cache to bfloat16; see :func:`sparsemla.dispatch.converts_first`.
    """

    tier: str
    load: Callable[[], Launch]
    refuse: Callable[[Problem], str | None] = no_refusal
    schedule: Callable[[DecodeWork, int | None], Schedule] = one_split
    converts_first: Callable[[Problem, int, int, int], bool] = never_converts


@dataclass(frozen=True)
class Op:
    """An op, its outputs, and its kernels.

    Args:
        outputs: the arguments that the op writes.
        kernels: its implementations; the order of tiers decides between them.
        only_kernels: arguments of the kernels that the definition lacks, such as a workspace.
        dtype: usual dtype of the first tensor.
    """

    outputs: tuple[str, ...]
    kernels: Sequence[Kernel]
    only_kernels: tuple[str, ...] = ()
    dtype: torch.dtype = torch.bfloat16

    def kernel(self, tier: str) -> Kernel | None:
        """The kernel of a tier, if the tier has one."""
        return next((kernel for kernel in self.kernels if kernel.tier == tier), None)

"""Costs of the attention kernels, and the schedules with the lowest cost.

A decode has few query rows, so its keys are split over CTAs and the partial results are merged. A
kernel's time is counted in steps by the constants below, measured for each Hopper kernel; the
schedule has the smallest count. The unit is a step of 64 query rows over 64 keys of an e4m3 cache,
2.7 us on an H200. The portable kernels use the same counts, without measurements of their own.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import get_format
from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.registry import DecodeWork, Problem, Schedule

FEW_HEADS = 32
"""Most query rows of the few-heads kernels."""
MAX_SPLITS = 64
"""Most splits of a schedule, unless the caller gives a number."""


class Cost(NamedTuple):
    """The time of a CTA: ``start + step * ceil(num_keys / keys)``, for ``tile`` query rows."""

    tile: int
    keys: int
    start: float
    step: float


BF16 = Cost(64, 128, 3, 1)
FP8 = Cost(64, 64, 3, 1)
FEW = Cost(64, 128, 2, 1.35)
"""Both few-heads kernels; a tile has all rows of a group."""
FP8_16_HEADS = Cost(16, 128, 2, 1.1)
"""The FP8 few-heads kernel with a CTA for each tile of 16 heads."""


def most_splits(num_tiles: int, multiprocessors: int) -> int:
    """Splits that give every multiprocessor two CTAs."""
    if multiprocessors == 0 or num_tiles == 0:
        return 1
    return min(-(-2 * multiprocessors // num_tiles), MAX_SPLITS)


@functools.lru_cache(4096)
def _fastest(
    kernels: tuple[Cost, ...], num_groups: int, group_rows: int, num_keys: int, slots: int
) -> Schedule:
    """Splits and rows per tile with the smallest count of steps; ties go to fewer splits.

    A multiprocessor runs one CTA at a time. A merge costs one step, and one more for every 4096
    partial rows.
    """
    most = most_splits(num_groups * -(-group_rows // 64), slots)
    best, least = (1, 64), math.inf
    for kernel in kernels if slots else ():
        num_tiles = num_groups * -(-group_rows // kernel.tile)
        steps = max(-(-num_keys // kernel.keys), 1)
        for splits in range(1, min(most, steps) + 1):
            waves = -(-num_tiles * splits // slots)
            time = waves * (kernel.start + kernel.step * -(-steps // splits))
            if splits > 1:
                time += 1 + num_groups * group_rows * splits / 4096
            if time < least:
                best, least = (splits, kernel.tile), time
    return best


def _schedule(
    kernels: tuple[Cost, ...], num_groups: int, group_rows: int, num_keys: int, slots: int
) -> Schedule:
    """:func:`_fastest`, or in traced code one formula for all sizes.

    A search would make torch.compile trace a graph for each batch size.
    """
    sizes = num_groups, group_rows, num_keys
    if torch.compiler.is_compiling() or any(isinstance(size, torch.SymInt) for size in sizes):
        num_tiles = max(num_groups * -(-group_rows // 64), 1)
        return (max(min(slots // num_tiles, -(-num_keys // 64), MAX_SPLITS), 1),)
    return _fastest(kernels, num_groups, group_rows, num_keys, slots)


def given_or_chosen(
    given: Sequence[int] | None,
    choose: Callable[[DecodeWork, int | None], Schedule],
    q: Tensor,
    cache: PagedCache,
    num_keys: int,
) -> Sequence[int]:
    """The caller's schedule, or else the kernel's own choice."""
    if given is not None:
        return given
    multiprocessors = num_multiprocessors(q.device)
    return choose(DecodeWork.of(q, cache.format, num_keys, multiprocessors), None)


def sm90_sparse(work: DecodeWork, num_splits: int | None) -> Schedule:
    """Splits, and heads per tile: tiles of 16 go to the few-heads kernel."""
    tiles = work.query_len == 1 and work.num_heads % 16 == 0 and work.num_heads > FEW_HEADS
    if num_splits is None and tiles and work.format.fp8_dim:
        return _sparse(work, (FP8, FP8_16_HEADS))
    return sparse(work, num_splits)


def sparse(work: DecodeWork, num_splits: int | None) -> Schedule:
    """Splits of a sparse decode."""
    if num_splits is not None:
        return (num_splits,)
    if work.num_heads <= FEW_HEADS:
        return _sparse(work, (FEW,))
    return _sparse(work, (FP8,) if work.format.fp8_dim else (BF16,))


def _sparse(work: DecodeWork, kernels: tuple[Cost, ...]) -> Schedule:
    num_groups = work.batch * work.query_len
    return _schedule(kernels, num_groups, work.num_heads, work.num_keys, work.multiprocessors)


def dense(work: DecodeWork, num_splits: int | None) -> Schedule:
    """Splits of a dense decode: tokens and heads of a request share its keys."""
    if num_splits is not None:
        return (num_splits,)
    group_rows = work.query_len * work.num_heads
    kernel = BF16
    if work.format.fp8_dim:
        kernel = FP8 if group_rows > FEW_HEADS else FEW
    return _schedule((kernel,), work.batch, group_rows, work.num_keys, work.multiprocessors)


ROWS_PER_KEY = ((64, 0.09), (math.inf, 0.25))
"""For up to this many heads, the largest ratio of converted rows to selected keys at which prefill
over bfloat16 rows is faster, conversion included. Measured on an H200; see
docs/kernels/attention-fp8.md."""
TILES_AT_ONCE = 132
"""Tiles of 64 heads that an H200 runs at once, one per multiprocessor; fewer take as long."""
LAUNCH_ROWS = 12288
"""Number of rows converted in the time of the conversion's launch."""


def sm90_converts_first(problem: Problem, num_tokens: int, num_keys: int, num_rows: int) -> bool:
    """Whether prefill is faster once its caller has converted the rows of a quantised cache."""
    if problem.cache_format is None or not get_format(problem.cache_format).fp8_dim:
        return False
    per_key = next(rows for heads, rows in ROWS_PER_KEY if problem.num_heads <= heads)
    at_once = max(TILES_AT_ONCE // max(-(-problem.num_heads // 64), 1), 1)
    counted = -(-num_tokens // at_once) * at_once
    work = (num_rows + LAUNCH_ROWS) * num_tokens
    return num_rows > 0 and work <= per_key * num_keys * counted

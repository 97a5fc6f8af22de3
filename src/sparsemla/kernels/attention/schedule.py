"""Costs of the attention kernels, and the schedules with the lowest cost.

A decode has few query rows, so its keys are split over CTAs and the partial results are merged. A
kernel's time is counted in steps by the constants below, measured for each Hopper kernel; the
schedule has the smallest count. The unit is a step of 64 query rows over 64 keys of an e4m3 cache,
2.7 us on an H200. The kernels with Ampere's instructions were measured as sm_80 on an H100. The
portable kernels use Hopper's counts, without their own measurements.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from sparsemla.formats import BF16_576, CacheFormat
from sparsemla.kernels.attention.arguments import DenseDecode, SparseDecode, Splits
from sparsemla.kernels.common.device import ask_torch, describe
from sparsemla.kernels.common.table import TIERS

FEW_HEADS = 32
"""Most query rows of the few-heads kernels."""
MAX_SPLITS = 64
"""Most splits of a schedule, unless the caller gives a number."""


class Cost(NamedTuple):
    """The time of a CTA: ``start + step * ceil(num_keys / keys)``, for ``tile`` query rows.

    A multiprocessor runs up to ``resident`` CTAs at once. A step takes each of ``n`` CTAs
    ``n * shared`` at least. A CTA takes no more than ``most_steps``.
    """

    tile: int
    keys: int
    start: float
    step: float
    resident: int = 1
    shared: float = 0.0
    most_steps: float = math.inf

    def time(self, ctas: int, steps: int) -> float:
        """The time of a multiprocessor that runs so many CTAs of so many steps."""
        rounds, rest = divmod(ctas, self.resident)
        return rounds * self._round(self.resident, steps) + self._round(rest, steps)

    def _round(self, ctas: int, steps: int) -> float:
        return self.start + max(self.step, ctas * self.shared) * steps if ctas else 0.0


BF16 = Cost(64, 128, 3, 1)
FP8 = Cost(64, 64, 3, 1)
FEW = Cost(64, 128, 2, 1.35)
"""Both few-heads kernels; a tile has all rows of a group."""
FP8_16_HEADS = Cost(16, 128, 2, 1.1)
"""The FP8 few-heads kernel with a CTA for each tile of 16 heads."""
AMPERE = {
    (16, False): Cost(16, 64, 1.5, 0.90, resident=2, shared=0.78),
    (16, True): Cost(16, 64, 1.5, 1.84, resident=2, shared=1.16),
    (32, False): Cost(32, 64, 1.5, 1.48, resident=2, shared=1.12),
    (32, True): Cost(32, 64, 1.5, 2.20, resident=2, shared=1.52),
    (64, False): Cost(64, 64, 2, 1.82),
    (64, True): Cost(64, 64, 2, 2.56),
}
"""The kernel with Ampere's instructions, by query rows of a tile and whether rows are FP8."""

ONE_TILE = tuple(
    Cost(16, keys, 1, step, resident=2, shared=0.6 * step, most_steps=1)
    for keys, step in ((32, 0.5), (64, 0.8))
)
"""The kernel with Ampere's instructions for splits of one tile, over bfloat16 rows."""
ONE_TILE_KEYS = tuple(cost.keys for cost in ONE_TILE)


def most_splits(num_tiles: int, multiprocessors: int) -> int:
    """Splits that give every multiprocessor two CTAs."""
    if multiprocessors == 0 or num_tiles == 0:
        return 1
    return min(-(-2 * multiprocessors // num_tiles), MAX_SPLITS)


class DecodeWork(NamedTuple):
    """The sizes of a decode, by which its keys are split.

    Args:
        batch: requests.
        query_len: query tokens of a request.
        num_heads: query heads.
        num_keys: most keys that a query token attends to.
        format: the cache's format.
        multiprocessors: number of the GPU's multiprocessors, 0 on a CPU.
        extra: whether some of the keys are of a second cache.
    """

    batch: int
    query_len: int
    num_heads: int
    num_keys: int
    format: CacheFormat
    multiprocessors: int
    extra: bool = False

    @classmethod
    def of(cls, call: SparseDecode | DenseDecode) -> DecodeWork:
        """The sizes of a call on its device."""
        batch, query_len, num_heads = call.q.shape[:3]
        sizes = batch, query_len, num_heads, call.num_keys
        extra = isinstance(call, SparseDecode) and call.extra_cache is not None
        return cls(*sizes, call.cache.format, multiprocessors(call.q.device), extra)


def splits_of_sparse(call: SparseDecode) -> Splits:
    """The splits of a sparse decode: those of the call, or the fastest ones."""
    if call.splits is not None:
        return call.splits
    return sparse(DecodeWork.of(call), _tier(call.q.device))


def _tier(device: torch.device) -> str:
    """The tier whose costs count on a device."""
    if torch.compiler.is_compiling():
        return "triton"  # traced code has one formula for all
    found = describe(device)
    return next((tier for tier in ("sm90", "sm80") if TIERS[tier](found) is None), "triton")


def sparse(work: DecodeWork, tier: str) -> Splits:
    """The fastest splits of a sparse decode.

    Args:
        work: the sizes.
        tier: the tier of its kernel.
    """
    fp8 = work.format.fp8_dim > 0
    tiles = work.query_len == 1 and work.num_heads % 16 == 0 and work.num_heads > FEW_HEADS
    costs: tuple[Cost, ...] = (FP8,) if fp8 else (BF16,)
    if tier == "sm80":
        costs = (_ampere(work.num_heads, fp8),)
        one_tile = ONE_TILE if work.format == BF16_576 and not work.extra else ()
        if tiles:
            costs += (AMPERE[16, fp8], *one_tile)
        elif work.num_heads <= FEW_HEADS:
            costs += tuple(cost._replace(tile=64) for cost in one_tile)
    elif work.num_heads <= FEW_HEADS:
        costs = (FEW,)
    elif tier == "sm90" and tiles and fp8:
        costs = FP8, FP8_16_HEADS
    num_groups = work.batch * work.query_len
    return _splits(costs, num_groups, work.num_heads, work.num_keys, work.multiprocessors)


def _ampere(rows: int, fp8: bool) -> Cost:
    """The cost of the kernel with Ampere's instructions for so many rows that share keys."""
    if rows > FEW_HEADS:
        return AMPERE[64, fp8]
    return AMPERE[16 if rows <= 16 else 32, fp8]._replace(tile=64)


def splits_of_dense(call: DenseDecode) -> Splits:
    """The splits of a dense decode: those of the call, or the fastest ones."""
    if call.splits is not None:
        return call.splits
    return dense(DecodeWork.of(call), _tier(call.q.device))


def dense(work: DecodeWork, tier: str) -> Splits:
    """The fastest splits of a dense decode: a request's tokens and heads share its keys."""
    group_rows = work.query_len * work.num_heads
    cost = BF16
    if tier == "sm80":
        cost = _ampere(group_rows, work.format.fp8_dim > 0)
    elif work.format.fp8_dim:
        cost = FP8 if group_rows > FEW_HEADS else FEW
    return _splits((cost,), work.batch, group_rows, work.num_keys, work.multiprocessors)


def multiprocessors(device: torch.device) -> int:
    """Multiprocessors among which keys are split: 0 where no kernel splits them, as on a CPU."""
    found = ask_torch(device) if torch.compiler.is_compiling() else describe(device)
    return found.multiprocessors if TIERS["triton"](found) is None else 0


def _splits(
    costs: tuple[Cost, ...], num_groups: int, group_rows: int, num_keys: int, processors: int
) -> Splits:
    """:func:`_fastest`, or in traced code one formula for all sizes.

    A search would make torch.compile trace a graph for each batch size.
    """
    sizes = num_groups, group_rows, num_keys
    if torch.compiler.is_compiling() or any(isinstance(size, torch.SymInt) for size in sizes):
        num_tiles = max(num_groups * -(-group_rows // 64), 1)
        return Splits(max(min(processors // num_tiles, -(-num_keys // 64), MAX_SPLITS), 1))
    return _fastest(costs, num_groups, group_rows, num_keys, processors)


def has_large_tiles(device: torch.device) -> bool:
    """Whether a CTA of the kernels with Ampere's instructions may have 160 KiB of shared memory."""
    return describe(device).max_shared >= 160 * 1024


def refused_format(fmt: CacheFormat) -> str | None:
    """Why the kernels in Gluon refuse a format, or None."""
    if fmt.value_dim != 512 or fmt.head_dim not in (512, 576):
        return f"needs 512 or 576 dims with 512 of value, got {fmt.name}"
    if fmt.fp8_dim and fmt.scale_block not in (0, 64, 128, fmt.head_dim):
        return f"needs scales of 64 or 128 dims, or of a row, got {fmt.name}"
    return None


@functools.lru_cache(4096)
def _fastest(
    costs: tuple[Cost, ...], num_groups: int, group_rows: int, num_keys: int, processors: int
) -> Splits:
    """Splits and rows per tile with the smallest count of steps; ties go to fewer splits.

    A merge costs one step, and one more for every 4096 partial rows.
    """
    most = most_splits(num_groups * -(-group_rows // 64), processors)
    best, least = Splits(1), math.inf
    for cost in costs if processors else ():
        num_tiles = num_groups * -(-group_rows // cost.tile)
        steps = max(-(-num_keys // cost.keys), 1)
        for splits in range(1, min(most, steps) + 1):
            if -(-steps // splits) > cost.most_steps:
                continue
            time = cost.time(-(-num_tiles * splits // processors), -(-steps // splits))
            if splits > 1:
                time += 1 + num_groups * group_rows * splits / 4096
            if time < least:
                best, least = Splits(splits, cost.tile), time
    return best


ROWS_PER_KEY = {
    "sm90": ((64, 0.09), (math.inf, 0.25)),
    "sm80": ((32, 0.1), (64, 0.2), (math.inf, 0.4)),
}
"""For up to this many heads, the largest ratio of converted rows to selected keys at which prefill
over bfloat16 rows is faster, conversion included. Measured on an H200; see
docs/kernels/attention-fp8.md and docs/kernels/attention-ampere.md. Those of ``sm80``
are at most half of the measured ones, as other GPUs have less bandwidth for their MMAs."""
LAUNCH_ROWS = 12288
"""Number of rows converted in the time of the conversion's launch."""


def converts_first(
    format: CacheFormat,
    device: torch.device,
    num_heads: int,
    num_tokens: int,
    num_keys: int,
    num_rows: int,
) -> bool:
    """Whether sparse prefill is faster once its caller has converted a cache's rows to bfloat16.

    Args:
        format: the cache's format.
        device: device of the op.
        num_heads: query heads.
        num_tokens: query tokens.
        num_keys: selected keys of all tokens together.
        num_rows: rows to convert.

    >>> from sparsemla import FP8_DS_MLA
    >>> from sparsemla.kernels.common.device import GPUS, simulated
    >>> with simulated(GPUS["sm_90"]):
    ...     device = torch.device("cuda")
    ...     rows = {"num_rows": 131072, "num_heads": 128}
    ...     for num_tokens in (64, 512):
    ...         work = {"num_tokens": num_tokens, "num_keys": num_tokens * 2048}
    ...         print(converts_first(FP8_DS_MLA, device, **work, **rows))
    False
    True
    """
    found = describe(device)
    tier = next((tier for tier in ROWS_PER_KEY if TIERS[tier](found) is None), None)
    if tier is None or refused_format(format) or not format.fp8_dim or num_rows == 0:
        return False
    per_key = next(rows for heads, rows in ROWS_PER_KEY[tier] if num_heads <= heads)
    # Tiles of 64 heads run at once, one per multiprocessor; fewer take as long.
    at_once = max(found.multiprocessors // max(-(-num_heads // 64), 1), 1)
    counted = -(-num_tokens // at_once) * at_once
    return (num_rows + LAUNCH_ROWS) * num_tokens <= per_key * num_keys * counted

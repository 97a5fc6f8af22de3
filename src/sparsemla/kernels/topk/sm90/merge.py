"""Merge the best candidates of several parts, by a search in registers."""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsemla.kernels.common.gluon import barrier
from sparsemla.kernels.topk.arguments import MergeTopk
from sparsemla.kernels.topk.schedule import MERGE_BLOCK
from sparsemla.kernels.topk.sm90.keys import (
    ends_of,
    exclusive_sum,
    search_threshold,
    sum_all,
    sums_and_max,
)
from sparsemla.kernels.topk.triton import (
    DEAD_KEY,
    END_KEY,
    keys_of,
    ordered_bits,
    value_of_key,
)


@gluon.jit
def _kth_largest(values, keys, live, least, count, k, W: gl.constexpr):
    """The k-th largest of ``count > k`` live keys, and how many keys reach it and exceed it.

    ``least`` is the smallest live key. The first two keys to try assume an exponential
    distribution of the values above it.
    """
    low = value_of_key(least)
    excess = gl.where(live, values - low, 0.0)
    more = sum_all((keys > least).to(gl.int32), W)
    excess, _, top = sums_and_max(excess, excess, keys, W)
    number = count.to(gl.float32)
    step = gl.fdiv(excess, number) * gl.log(gl.fdiv(number, k * 1.0))
    a = gl.minimum(gl.maximum(ordered_bits(low + 0.95 * step), least + 1), top)
    b = gl.minimum(gl.maximum(ordered_bits(low + 1.2 * step), a), top)
    end = gl.where(more < k, least, top) + 1
    threshold, reached, above = search_threshold(keys, least, end, count, a, b, k, k, W)
    return threshold, reached, gl.where(more < k, more, above)


@gluon.jit
def _from_lane(x, step):
    """``x`` of the lane with the number ``lane ^ step``."""
    return gl.inline_asm_elementwise(
        "shfl.sync.bfly.b32 $0, $1, $2, 31, -1;",
        "=r,r,r",
        [x, step],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _ordered(x, other, i, step):
    """The smaller of two at positions without the bit ``step``, the larger at all others."""
    return gl.where((i & step) == 0, gl.minimum(x, other), gl.maximum(x, other))


@gluon.jit
def _sort(x, i):
    """Bitonic sort of ``x [N]``, ascending; ``i`` are the positions, neighbours in lanes."""
    size = 2
    while size <= x.shape[0]:
        # Every other run of a bitonic sort descends; its complement ascends.
        flip = gl.where((i & size) == 0, 0, -1)
        x = x ^ flip
        step = size // 2
        while step >= 32:
            x = _ordered(x, gl.gather(x, i ^ step, 0), i, step)
            step //= 2
        for bit in gl.static_range(5):
            if size > 16 >> bit:
                x = _ordered(x, _from_lane(x, i * 0 + (16 >> bit)), i, 16 >> bit)
        x = x ^ flip
        size *= 2
    return x


@gluon.jit(do_not_specialize=["num_parts", "k", "stride_group", "stride_out"])
def _merge_kernel(
    values,
    indices,
    out_values,
    out,
    num_parts,
    width,
    k,
    stride_part,
    stride_row,
    stride_part_indices,
    stride_row_indices,
    stride_group,
    stride_out,
    PARTS: gl.constexpr,
    WIDTH: gl.constexpr,
    SORTED: gl.constexpr,
    W: gl.constexpr,
):
    """Select the k best candidates of a row from a group of PARTS parts.

    With ``out_values``, the results are candidates of another merge; otherwise, sorted ids.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    N: gl.constexpr = PARTS * WIDTH // W
    row = gl.program_id(0).to(gl.int64)
    group = gl.program_id(1).to(gl.int64)
    warp = gl.arange(0, W, gl.SliceLayout(1, L))
    j = warp[:, None] * N + gl.arange(0, N, gl.SliceLayout(0, L))[None, :]
    part = group * PARTS + j // WIDTH
    inside = (part < num_parts) & (j % WIDTH < width)
    at = row * stride_row_indices + part * stride_part_indices + j % WIDTH
    ids = gl.load(indices + at, mask=inside, other=-1)
    at = row * stride_row + part * stride_part + j % WIDTH
    x = gl.load(values + at, mask=inside, other=0.0).to(gl.float32)
    live = ids >= 0
    ids = ids.to(gl.int32)
    keys = gl.where(live, keys_of(x), DEAD_KEY)
    one = live.to(gl.int32)
    count, _, least = sums_and_max(one, one, gl.where(live, -keys, -END_KEY), W)
    least = -least
    chosen = live
    if count > k:
        threshold, reached, above = _kth_largest(x, keys, live, least, count, k, W)
        chosen = keys >= threshold
        if reached > k:  # among equal values, the lowest ids
            equal = keys == threshold
            rank = gl.where(equal, -1 - ids, DEAD_KEY)
            klo, most = ends_of(rank, DEAD_KEY + 1, 0, W)
            khi = most + 1
            middle = klo + ((khi - klo).to(gl.uint32) // 2).to(gl.int32)
            left = k - above
            cut, _, _ = search_threshold(
                rank, klo, khi, reached - above, middle, middle, left, left, W
            )
            chosen = (keys > threshold) | (equal & (rank >= cut))
    place, total = exclusive_sum(chosen.to(gl.int32), W)
    total = gl.minimum(total, k)  # more are chosen only if ids are not distinct
    chosen = chosen & (place < k)
    out += group * stride_group + row * stride_out
    gl.store(out + place, ids, mask=chosen)
    i = gl.arange(0, SORTED, LINE)
    if out_values is not None:
        out_values += group * stride_group + row * stride_out
        gl.store(out_values + place, value_of_key(keys), mask=chosen)
        gl.store(out + i, -1, mask=(i >= total) & (i < k))
    else:
        barrier()  # the ids have been written
        line = gl.load(out + i, mask=i < total, other=0x7FFFFFFF)
        before = gl.load(out + i - 1, mask=(i > 0) & (i < total), other=-1)
        barrier()  # and read
        # Ids ascend already if the parts are consecutive and in order.
        if gl.max((before > line).to(gl.int32), 0) > 0:
            line = _sort(line, i)
        gl.store(out + i, gl.where(i < total, line, -1), mask=i < k)


def merge_topk(call: MergeTopk) -> None:
    """Merge parts of at most MERGE_BLOCK / 2 candidates; many parts are merged in groups first."""
    values, indices, topk, out = call
    num_parts, num_rows, width = values.shape
    if num_rows == 0:
        return
    padded = triton.next_power_of_2(max(1, width))
    parts = min(MERGE_BLOCK // padded, triton.next_power_of_2(max(1, num_parts)))
    groups = max(1, triton.cdiv(num_parts, parts))
    some, some_values = out[None], None
    if groups > 1:
        shape = groups, num_rows, min(topk, parts * width)
        some = torch.empty(shape, dtype=torch.int32, device=out.device)
        some_values = torch.empty(shape, dtype=torch.float32, device=out.device)
    parts = max(parts, 512 // padded)
    warps = min(16, max(4, parts * padded // 256))
    _merge_kernel[(num_rows, groups)](
        values,
        indices,
        some_values,
        some,
        num_parts,
        width,
        some.shape[2],
        values.stride(0),
        values.stride(1),
        indices.stride(0),
        indices.stride(1),
        some.stride(0),
        some.stride(1),
        PARTS=parts,
        WIDTH=padded,
        SORTED=max(32 * warps, triton.next_power_of_2(some.shape[2])),
        W=warps,
        num_warps=warps,
        maxnreg=min(255, 2048 // warps),
    )
    if some_values is not None:
        merge_topk(MergeTopk(some_values, some, topk, out))

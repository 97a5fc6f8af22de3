"""Pooled windows in Triton: three launches.

1. ``_pool_kernel``: a program pools some dims of the window that a token closes, or writes zeros.
2. The fused write of latent rows normalises, rotates, quantises and stores the entries.
3. ``_keep_kernel`` stores the step's last rows. It comes last: a long step overwrites rows of the
   ring that the pools of the same step read.

Shapes: T tokens, D dims of an entry.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.quant.triton import fused_rope_rmsnorm_quant
from sparsemla.pooling import Pooling, WindowState

POOL_DIMS = 128
"""Dims of a pooling program: a row of them is one 16-byte load for each thread of a warp."""

POOL_ROWS = 16
"""Tokens of a window that a program loads at a time."""

KEPT_VALUES = 1024
"""Values of a program that keeps rows."""


@triton.jit
def _request_of(positions, request_ids, input_row_offsets, num_requests):
    """The token, its position and request, and the first and end token of the request.

    The position is -1 if the token is not one of its request's or the number is out of range.
    """
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    request = tl.load(request_ids + token).to(tl.int64)
    known = (request >= 0) & (request < num_requests) & (position >= 0)
    first = tl.load(input_row_offsets + request, mask=known, other=0).to(tl.int64)
    end = tl.load(input_row_offsets + request + 1, mask=known, other=0).to(tl.int64)
    known = known & (token >= first) & (token < end)
    return token, tl.where(known, position, -1), request, first, end


@triton.jit
def _ring_of(ring_ids, num_rings, row, column, num_columns, live):
    """Numbers of rings or pages in a row of the table; -1 where there is none."""
    live = live & (column < num_columns)
    ring = tl.load(ring_ids + row + column, mask=live, other=-1).to(tl.int64)
    return tl.where((ring >= 0) & (ring < num_rings), ring, -1)


@triton.jit
def _biased(gates, at, gate_bias, place, bias_stride, column, live):
    """Gates in float32, with the bias of their places in the window."""
    gate = tl.load(gates + at, mask=live, other=0.0).to(tl.float32)
    if gate_bias is not None:
        gate += tl.load(gate_bias + place * bias_stride + column, mask=live, other=0.0)
    return gate


@triton.jit(do_not_specialize=["num_requests", "num_rings", "table_stride", "num_columns"])
def _pool_kernel(
    values,
    gates,
    gate_bias,
    state,
    positions,
    request_ids,
    input_row_offsets,
    ring_ids,
    slot_mapping,
    pooled,
    starts,
    slots,
    num_requests,
    num_rings,
    table_stride,
    num_columns,
    value_stride,
    gate_stride,
    bias_stride,
    ring_stride,
    row_stride,
    part_stride,
    RING: tl.constexpr,
    PAGED: tl.constexpr,
    RATIO: tl.constexpr,
    OVERLAP: tl.constexpr,
    D: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    token, position, request, first, _ = _request_of(
        positions, request_ids, input_row_offsets, num_requests
    )
    closes = (position >= 0) & ((position + 1) % RATIO == 0)
    if tl.program_id(1) == 0:
        slot = tl.load(slot_mapping + token)
        tl.store(slots + token, tl.where(closes, slot, -1))
        tl.store(starts + token, tl.where(closes, position + 1 - RATIO, 0))
    dim = tl.program_id(1) * DIMS + tl.arange(0, DIMS)
    target = pooled + token * D + dim
    if not closes:
        tl.store(target, tl.zeros([DIMS], tl.float32), mask=dim < D)
        return

    WINDOW: tl.constexpr = RATIO * (2 if OVERLAP else 1)
    table = request * table_stride
    if not PAGED:
        ring = _ring_of(ring_ids, num_rings, table, 0, num_columns, position >= 0)
    m = tl.full([DIMS], float("-inf"), tl.float32)
    l = tl.zeros([DIMS], tl.float32)
    acc = tl.zeros([DIMS], tl.float32)
    for start in range(0, WINDOW, ROWS):
        at = start + tl.arange(0, ROWS)  # oldest token first
        before = WINDOW - 1 - at
        place = position - before
        source = token - before
        real = (at < WINDOW) & (place >= 0)
        column = dim[None, :]
        if OVERLAP:  # the older window takes part with its first series
            column = column + tl.where(at < RATIO, 0, D)[:, None]
        else:
            column = tl.broadcast_to(column, [ROWS, DIMS])
        inside = real[:, None] & (dim < D)[None, :]
        in_step = inside & (source >= first)[:, None]
        before_step = real & (source < first)
        if PAGED:
            ring = _ring_of(ring_ids, num_rings, table, place // RING, num_columns, before_step)
            ring = ring[:, None]
        in_ring = inside & before_step[:, None] & (ring >= 0)
        source = source[:, None]
        value = tl.load(values + source * value_stride + column, mask=in_step, other=0.0)
        gate = _biased(
            gates,
            source * gate_stride + column,
            gate_bias,
            (place % RATIO)[:, None],
            bias_stride,
            column,
            in_step,
        )
        row = state + ring * ring_stride + (place % RING)[:, None] * row_stride + column
        value = tl.where(in_ring, tl.load(row, mask=in_ring, other=0.0), value.to(tl.float32))
        gate = tl.where(in_ring, tl.load(row + part_stride, mask=in_ring, other=0.0), gate)
        gate = tl.where(in_step | in_ring, gate, float("-inf"))
        largest = tl.maximum(m, tl.max(gate, 0))
        finite = tl.where(largest == float("-inf"), 0.0, largest)  # no token so far
        alpha = tl.exp(m - finite)
        p = tl.exp(gate - finite[None, :])
        l = l * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(p * value, 0)
        m = largest
    tl.store(target, acc / tl.where(dim < D, l, 1.0), mask=dim < D)


@triton.jit(do_not_specialize=["num_requests", "num_rings", "table_stride", "num_columns"])
def _keep_kernel(
    values,
    gates,
    gate_bias,
    state,
    positions,
    request_ids,
    input_row_offsets,
    ring_ids,
    num_requests,
    num_rings,
    table_stride,
    num_columns,
    value_stride,
    gate_stride,
    bias_stride,
    ring_stride,
    row_stride,
    part_stride,
    RING: tl.constexpr,
    PAGED: tl.constexpr,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, position, request, _, end = _request_of(
        positions, request_ids, input_row_offsets, num_requests
    )
    column = position // RING if PAGED else 0
    ring = _ring_of(ring_ids, num_rings, request * table_stride, column, num_columns, position >= 0)
    gone = False if PAGED else token + RING < end  # a later row of the step takes its place
    if (ring < 0) | gone:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < WIDTH
    value = tl.load(values + token * value_stride + column, mask=live, other=0.0)
    gate = _biased(
        gates,
        token * gate_stride + column,
        gate_bias,
        position % RATIO,
        bias_stride,
        column,
        live,
    )
    row = state + ring * ring_stride + position % RING * row_stride + column
    tl.store(row, value.to(tl.float32), mask=live)
    tl.store(row + part_stride, gate, mask=live)


def pool_windows(
    *,
    values: Tensor,
    gates: Tensor,
    norm_weight: Tensor,
    cos_sin_cache: Tensor,
    state: WindowState,
    cache: PagedCache,
    pooling: Pooling,
    gate_bias: Tensor | None,
    positions: Tensor,
    request_ids: Tensor,
    input_row_offsets: Tensor,
    ring_ids: Tensor,
    slot_mapping: Tensor,
    eps: float,
    interleaved: bool,
    scale_mode: str,
    kv_out: Tensor | None,
) -> None:
    num_tokens, width = values.shape
    if num_tokens == 0:
        return
    dim = norm_weight.shape[0]
    num_rings, ring = state.rows.shape[:2]
    paged = ring_ids.dim() == 2
    step = {
        "values": values,
        "gates": gates,
        "gate_bias": gate_bias,
        "state": state.rows,
        "positions": positions,
        "request_ids": request_ids,
        "input_row_offsets": input_row_offsets,
        "ring_ids": ring_ids,
        "num_requests": len(ring_ids),
        "num_rings": num_rings,
        "table_stride": ring_ids.stride(0),
        "num_columns": ring_ids.shape[1] if paged else 1,
        "value_stride": values.stride(0),
        "gate_stride": gates.stride(0),
        "bias_stride": 0 if gate_bias is None else gate_bias.stride(0),
        "ring_stride": state.rows.stride(0),
        "row_stride": state.rows.stride(1),
        "part_stride": state.rows.stride(2),
        "RING": ring,
        "PAGED": paged,
        "RATIO": pooling.ratio,
    }
    pooled = torch.empty(num_tokens, dim, dtype=torch.float32, device=values.device)
    starts, slots = torch.empty_like(positions), torch.empty_like(slot_mapping)
    dims = min(next_power_of_2(dim), POOL_DIMS)
    _pool_kernel[(num_tokens, cdiv(dim, dims))](
        **step,
        slot_mapping=slot_mapping,
        pooled=pooled,
        starts=starts,
        slots=slots,
        OVERLAP=pooling.overlap,
        D=dim,
        DIMS=dims,
        ROWS=min(next_power_of_2(pooling.window), POOL_ROWS),
        num_warps=1,
    )
    no_queries = pooled.new_empty(num_tokens, 0, cos_sin_cache.shape[1])
    fused_rope_rmsnorm_quant(
        q_rope=no_queries,
        kv=pooled,
        cos_sin_cache=cos_sin_cache,
        kv_norm_weight=norm_weight,
        cache=cache,
        positions=starts,
        slot_mapping=slots,
        eps=eps,
        interleaved=interleaved,
        scale_mode=scale_mode,
        out=no_queries,
        kv_out=kv_out,
    )
    block = min(next_power_of_2(width), KEPT_VALUES)
    _keep_kernel[(num_tokens, cdiv(width, block))](**step, WIDTH=width, BLOCK=block)

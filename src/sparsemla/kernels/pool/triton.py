"""Pooled windows in Triton: two launches.

1. ``_pool_kernel``: a program pools some dims of a window that the step closes, and keeps the same
   dims of the step's last rows.
2. The fused write of latent rows normalises, rotates, quantises and stores the entries. The norm
   needs all dims of an entry, so it cannot be part of programs that have some.

In a short step each token has its programs, which end soon unless it closes a window. In a long one
few tokens do, so programs belong to places of entries: as many neighbouring tokens as a window has,
of which at most one closes a window.

A row of a ring takes the place of the row one ring before. If a request has few tokens in the step,
no pool needs that row, and every program keeps its tokens. Else the request's first program pools
all windows that reach before the step, and keeps the rows afterwards: it alone reads and writes its
dims of the ring.

Shapes: T tokens, D dims of an entry.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemla.kernels.common.device import register_limit
from sparsemla.kernels.common.early import begins_early, let_next_begin, wait_for_inputs
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.pool.arguments import PoolWindows
from sparsemla.kernels.quant.triton import fused_rope_rmsnorm_quant

POOL_ROWS = 128
"""Most tokens of a window that a program loads at a time, without waits between them."""

KEPT_ROWS = tl.constexpr(8)
"""Tokens that a program of a long step keeps at a time."""

WARP_VALUES = 512
"""Values of a tile for each warp, and as many gates: four 16-byte loads of each per thread."""

POOL_REGISTERS = 80
"""Most registers of a thread, so that three programs of eight warps fit a multiprocessor."""


class Inputs(NamedTuple):
    """The step's rows, and the bias of gates."""

    value_rows: Tensor
    gate_rows: Tensor
    bias: Tensor | None
    value_stride: int
    gate_stride: int
    bias_stride: int


class Rings(NamedTuple):
    """A request's row of the table of rings or pages."""

    row: Tensor
    num_columns: int
    num_rings: int


class Kept(NamedTuple):
    """The rows of open windows, and strides of rings, of their rows, and of values and gates."""

    rows: Tensor
    ring_stride: int
    row_stride: int
    part_stride: int


class Windows(NamedTuple):
    """Constants: rows of a ring or page, tokens and series of a window, dims of an entry."""

    ring: int
    paged: bool
    ratio: int
    series: int
    dim: int


class Step(NamedTuple):
    """The tokens of the step and their requests."""

    positions: Tensor
    request_ids: Tensor
    input_row_offsets: Tensor
    num_tokens: int
    num_requests: int


@triton.jit
def _is_of(step, token, request, live):
    """Whether a token is the request's, as its number and its position say."""
    live = live & (tl.load(step.request_ids + token, mask=live, other=-1) == request)
    return live & (tl.load(step.positions + token, mask=live, other=-1).to(tl.int64) >= 0)


@triton.jit
def _tokens_of(step, request, known):
    """The request's tokens, of those that exist."""
    first = tl.load(step.input_row_offsets + request, mask=known, other=0).to(tl.int64)
    end = tl.load(step.input_row_offsets + request + 1, mask=known, other=0).to(tl.int64)
    return tl.maximum(first, 0), tl.minimum(end, step.num_tokens)


@triton.jit
def _one_token(step, token):
    """The token's request, the request's tokens, and an end that is 0 if the token is not one."""
    request = tl.load(step.request_ids + token).to(tl.int64)
    known = (request >= 0) & (request < step.num_requests)
    first, end = _tokens_of(step, request, known)
    known = known & (token >= first) & (token < end)
    return request, first, end, tl.where(known, token + 1, 0)


@triton.jit
def _tokens_of_entry(step, entry, RATIO: tl.constexpr):
    """The request with a place of an entry, the request's tokens, and the place's tokens.

    The entry that a token closes stands at ``token // RATIO + request``. Two of a request are
    ``RATIO`` tokens apart or more, and the places of a request follow those of the one before.
    """
    request = tl.zeros([], tl.int64)
    above = step.num_requests.to(tl.int64)
    while above - request > 1:
        middle = (request + above) // 2
        lowest = tl.load(step.input_row_offsets + middle).to(tl.int64) // RATIO + middle
        is_below = lowest <= entry
        request = tl.where(is_below, middle, request)
        above = tl.where(is_below, above, middle)
    first, end = _tokens_of(step, request, True)
    begin = (entry - request) * RATIO
    return request, first, end, tl.maximum(begin, first), tl.minimum(begin + RATIO, end)


@triton.jit
def _ring_of(rings, column, live):
    """Numbers of rings or pages in columns of a request's row; -1 where there is none."""
    live = live & (column < rings.num_columns)
    ring = tl.load(rings.row + column, mask=live, other=-1).to(tl.int64)
    return tl.where((ring >= 0) & (ring < rings.num_rings), ring, -1)


@triton.jit
def _load_inputs(inputs, token, place, column, live):
    """Values as they are, and gates in float32 with the bias of their places in the window."""
    value = tl.load(inputs.value_rows + token * inputs.value_stride + column, mask=live, other=0.0)
    gate = tl.load(inputs.gate_rows + token * inputs.gate_stride + column, mask=live, other=0.0)
    gate = gate.to(tl.float32)
    if inputs.bias is not None:
        gate += tl.load(inputs.bias + place * inputs.bias_stride + column, mask=live, other=0.0)
    return value.to(tl.float32), gate


@triton.jit
def _keep_rows(
    inputs, kept, begin, end, position, ring, rings, dim, W: tl.constexpr, ROWS: tl.constexpr
):
    """Keep ``dim [dims]`` of tokens from ``begin``, at ``position``, up to ``end``."""
    SERIES: tl.constexpr = W.series
    for start in range(begin, end, ROWS):
        token = start + tl.arange(0, ROWS)
        place = position + (token - begin)
        live = token < end
        own_ring = ring
        if W.paged:
            own_ring = _ring_of(rings, place // W.ring, live)[:, None]
        live = live[:, None] & (own_ring >= 0) & (dim < W.dim)[None, :]
        row = kept.rows + own_ring * kept.ring_stride + (place % W.ring * kept.row_stride)[:, None]
        for series in tl.static_range(SERIES):
            column = series * W.dim + dim[None, :]
            at = (place % W.ratio)[:, None]
            value, gate = _load_inputs(inputs, token[:, None], at, column, live)
            tl.store(row + column, value, mask=live)
            tl.store(row + kept.part_stride + column, gate, mask=live)


@triton.jit
def _pool_window(
    inputs, kept, token, position, first, ring, rings, dim, W: tl.constexpr, ROWS: tl.constexpr
):
    """``dim [dims]`` of the window that a token closes, in float32.

    The order of the sums depends on the tile only, never on where a row comes from.
    """
    WINDOW: tl.constexpr = W.ratio * W.series
    m = tl.full(dim.shape, float("-inf"), tl.float32)
    l = tl.zeros(dim.shape, tl.float32)
    acc = tl.zeros(dim.shape, tl.float32)
    for start in range(0, WINDOW, ROWS):
        at = start + tl.arange(0, ROWS)  # oldest token first
        place = position - (WINDOW - 1) + at
        source = token - (WINDOW - 1) + at
        real = (at < WINDOW) & (place >= 0)
        column = dim[None, :]
        if W.series == 2:  # the older window takes part with its first series
            column += tl.where(at < W.ratio, 0, W.dim)[:, None]
        inside = real[:, None] & (dim < W.dim)[None, :]
        in_step = inside & (source >= first)[:, None]
        before_step = real & (source < first)
        source_ring = ring
        if W.paged:
            source_ring = _ring_of(rings, place // W.ring, before_step)[:, None]
        in_ring = inside & before_step[:, None] & (source_ring >= 0)
        place = place[:, None]
        row = kept.rows + source_ring * kept.ring_stride + place % W.ring * kept.row_stride + column
        old_value = tl.load(row, mask=in_ring, other=0.0)
        old_gate = tl.load(row + kept.part_stride, mask=in_ring, other=0.0)
        value, gate = _load_inputs(inputs, source[:, None], place % W.ratio, column, in_step)
        value = tl.where(in_ring, old_value, value)
        gate = tl.where(in_ring, old_gate, tl.where(in_step, gate, float("-inf")))
        largest = tl.maximum(m, tl.max(gate, 0))
        finite = tl.where(largest == float("-inf"), 0.0, largest)  # no token so far
        alpha = tl.exp(m - finite)
        p = tl.exp(gate - finite[None, :])
        l = l * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(p * value, 0)
        m = largest
    return acc / tl.where(dim < W.dim, l, 1.0)


@triton.jit(
    do_not_specialize=["num_tokens", "num_requests", "num_rings", "table_stride", "num_columns"]
)
def _pool_kernel(
    inputs,
    kept,
    positions,
    request_ids,
    input_row_offsets,
    ring_ids,
    slot_mapping,
    pooled,
    starts,
    slots,
    num_tokens,
    num_requests,
    num_rings,
    table_stride,
    num_columns,
    W: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    LONG: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Pool and keep ``DIMS`` dims of a token or, in a long step, of the tokens of an entry."""
    let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    RATIO: tl.constexpr = W.ratio
    D: tl.constexpr = W.dim
    WINDOW: tl.constexpr = RATIO * W.series
    SLICES: tl.constexpr = (D + DIMS - 1) // DIMS
    at = (tl.program_id(0) // SLICES).to(tl.int64)
    dim = tl.program_id(0) % SLICES * DIMS + tl.arange(0, DIMS)
    step = Step(positions, request_ids, input_row_offsets, num_tokens, num_requests)
    if LONG:
        request, first, end, begin, stop = _tokens_of_entry(step, at, RATIO)
    else:
        begin = at
        request, first, end, stop = _one_token(step, at)
    known = _is_of(step, begin, request, begin < stop)
    position = tl.load(positions + begin, mask=known, other=0).to(tl.int64)
    position = tl.minimum(position, 1 << 62)  # those of later tokens do not overflow
    rings = Rings(ring_ids + request * table_stride, num_columns, num_rings)
    ring = _ring_of(rings, position // W.ring if W.paged else 0, known)
    closing = begin + (RATIO - 1 - position % RATIO)
    closes = known & (closing < stop)
    if LONG:
        closes = _is_of(step, closing, request, closes)
    start = position + closing - begin + 1 - RATIO
    if tl.program_id(0) % SLICES == 0:
        slot = tl.load(slot_mapping + closing, mask=closes, other=-1)
        tl.store(slots + at, slot)
        tl.store(starts + at, tl.where(closes, start, 0))
    target = pooled + at * D + dim

    # Rows on pages take no place of another one.
    is_short = known if W.paged else known & (end - first <= W.ring - WINDOW + 1)
    if is_short:
        _keep_rows(
            inputs, kept, begin, stop, position, ring, rings, dim, W, KEPT_ROWS if LONG else 1
        )
    FIRST: tl.constexpr = WINDOW - 1 if WINDOW > 1 else 1
    if closes & (is_short | (closing - first >= FIRST)):
        entry = _pool_window(
            inputs, kept, closing, position + closing - begin, first, ring, rings, dim, W, ROWS
        )
        tl.store(target, entry, mask=dim < D)
    if not LONG:
        tl.store(target, tl.zeros([DIMS], tl.float32), mask=(closes == 0) & (dim < D))
    if known & (is_short == 0) & (begin == first):
        while closing < tl.minimum(first + FIRST, end):
            entry = _pool_window(
                inputs, kept, closing, position + closing - first, first, ring, rings, dim, W, ROWS
            )
            place = closing // RATIO + request if LONG else closing
            tl.store(pooled + place * D + dim, entry, mask=dim < D)
            closing += RATIO
        tl.debug_barrier()  # other threads have read the rows that these overwrite
        last = tl.maximum(first, end - W.ring)
        _keep_rows(inputs, kept, last, end, position + last - first, ring, rings, dim, W, ROWS)


def pool_windows(call: PoolWindows) -> None:
    values, gates, gate_bias, ring_ids = call.values, call.gates, call.gate_bias, call.ring_ids
    pooling, state_rows = call.pooling, call.state.rows
    num_tokens = values.shape[0]
    if num_tokens == 0:
        return
    dim = call.norm_weight.shape[0]
    num_rings, ring = state_rows.shape[:2]
    num_requests = len(ring_ids)
    # In a long step both launches pass over few rows that are no entries. They belong to requests,
    # so there must be one.
    num_rows = (num_tokens - 1) // pooling.ratio + num_requests
    is_long = call.kv_out is None and num_requests > 0 and 2 * num_rows <= num_tokens
    if not is_long:
        num_rows = num_tokens
    pooled = torch.empty(num_rows, dim, dtype=torch.float32, device=values.device)
    starts = torch.empty(num_rows, dtype=torch.int64, device=values.device)
    slots = torch.empty_like(starts)
    # The tile is the same for any step, and so is the order of its sums.
    rows = min(next_power_of_2(pooling.window), POOL_ROWS)
    dims = min(next_power_of_2(dim), 128 if rows <= 8 else 32)
    warps = max(1, rows * dims // WARP_VALUES)
    programs = num_rows * cdiv(dim, dims)
    _pool_kernel[(programs,)](
        inputs=Inputs(
            values,
            gates,
            gate_bias,
            values.stride(0),
            gates.stride(0),
            0 if gate_bias is None else gate_bias.stride(0),
        ),
        kept=Kept(state_rows, *state_rows.stride()[:3]),
        positions=call.positions,
        request_ids=call.request_ids,
        input_row_offsets=call.input_row_offsets,
        ring_ids=ring_ids,
        slot_mapping=call.slot_mapping,
        pooled=pooled,
        starts=starts,
        slots=slots,
        num_tokens=num_tokens,
        num_requests=num_requests,
        num_rings=num_rings,
        table_stride=ring_ids.stride(0),
        num_columns=ring_ids.shape[1] if call.paged else 1,
        W=Windows(ring, call.paged, pooling.ratio, 1 + pooling.overlap, dim),
        DIMS=dims,
        ROWS=rows,
        LONG=is_long,
        num_warps=warps,
        enable_fp_fusion=False,  # equal sums give equal bits in every variant of the kernel
        **begins_early(values.device, programs * warps),
        **(register_limit(POOL_REGISTERS) if warps == 8 else {}),
    )
    fused_rope_rmsnorm_quant(call.write(pooled, starts, slots))

"""Pooled windows in Triton: two launches.

1. ``_pool_kernel``: a program pools some dims of the windows that a few tokens close, and keeps the
   same dims of the step's last rows.
2. The fused write of latent rows normalises, rotates, quantises and stores the entries. The norm
   needs all dims of an entry, so it cannot be part of programs that have some.

A row of a ring takes the place of the row one ring before it. While a step is short no pool needs
that row, so every token is kept by its own program. In a longer step the program of a request's
first token pools all windows that reach before the step, and keeps the rows afterwards: it alone
reads and writes its dims of the ring.

Shapes: T tokens, D dims of an entry.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.early import (
    RESIDENT,
    begins_early,
    let_next_begin,
    wait_for_inputs,
)
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.quant.triton import fused_rope_rmsnorm_quant
from sparsemla.pooling import Pooling, WindowState

POOL_ROWS = 128
"""Most tokens of a window that a program loads at a time."""

WARP_VALUES = 1024
"""Values of a tile for each warp, and as many gates: eight 16-byte loads of each per thread."""


class Inputs(NamedTuple):
    """The step's rows, and the bias of gates."""

    value_rows: Tensor
    gate_rows: Tensor
    bias: Tensor | None
    value_stride: int
    gate_stride: int
    bias_stride: int


class Kept(NamedTuple):
    """The rows of open windows, and strides of rings, of their rows, and of values and gates."""

    rows: Tensor
    ring_stride: int
    row_stride: int
    part_stride: int


@triton.jit
def _requests_of(token, num_tokens, positions, request_ids, input_row_offsets, num_requests):
    """Positions and requests of tokens, and the first and end token of each request.

    The position is -1 if the token is not one of its request's or the number is out of range.
    """
    live = token < num_tokens
    position = tl.load(positions + token, mask=live, other=0).to(tl.int64)
    request = tl.load(request_ids + token, mask=live, other=0).to(tl.int64)
    known = live & (request >= 0) & (request < num_requests) & (position >= 0)
    first = tl.load(input_row_offsets + request, mask=known, other=0).to(tl.int64)
    end = tl.load(input_row_offsets + request + 1, mask=known, other=0).to(tl.int64)
    known = known & (token >= first) & (token < end)
    return tl.where(known, position, -1), request, first, end


@triton.jit
def _ring_of(ring_ids, num_rings, row, column, num_columns, live):
    """Numbers of rings or pages in rows of the table; -1 where there is none."""
    live = live & (column < num_columns)
    ring = tl.load(ring_ids + row + column, mask=live, other=-1).to(tl.int64)
    return tl.where((ring >= 0) & (ring < num_rings), ring, -1)


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
    inputs,
    kept,
    token,
    position,
    ring,
    live,
    dim,
    RING: tl.constexpr,
    RATIO: tl.constexpr,
    SERIES: tl.constexpr,
    D: tl.constexpr,
):
    """Keep ``dim [1, dims]`` of each series of tokens ``[rows, 1]`` that are ``live``."""
    live = live & (ring >= 0) & (dim < D)
    row = kept.rows + ring * kept.ring_stride + position % RING * kept.row_stride
    for series in tl.static_range(SERIES):
        column = series * D + dim
        value, gate = _load_inputs(inputs, token, position % RATIO, column, live)
        tl.store(row + column, value, mask=live)
        tl.store(row + kept.part_stride + column, gate, mask=live)


@triton.jit
def _pool_window(
    inputs,
    kept,
    token,
    position,
    first,
    ring,
    ring_ids,
    num_rings,
    table,
    num_columns,
    dim,
    RING: tl.constexpr,
    PAGED: tl.constexpr,
    RATIO: tl.constexpr,
    SERIES: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """``dim [dims]`` of the window that a token closes, in float32.

    The order of the sums depends on the tile only, never on where a row comes from.
    """
    WINDOW: tl.constexpr = RATIO * SERIES
    m = tl.full(dim.shape, float("-inf"), tl.float32)
    l = tl.zeros(dim.shape, tl.float32)
    acc = tl.zeros(dim.shape, tl.float32)
    for start in range(0, WINDOW, ROWS):
        at = start + tl.arange(0, ROWS)  # oldest token first
        place = position - (WINDOW - 1) + at
        source = token - (WINDOW - 1) + at
        real = (at < WINDOW) & (place >= 0)
        column = tl.broadcast_to(dim[None, :], [ROWS, dim.shape[0]])
        if SERIES == 2:  # the older window takes part with its first series
            column += tl.where(at < RATIO, 0, D)[:, None]
        inside = real[:, None] & (dim < D)[None, :]
        in_step = inside & (source >= first)[:, None]
        before_step = real & (source < first)
        source_ring = ring
        if PAGED:
            page = _ring_of(ring_ids, num_rings, table, place // RING, num_columns, before_step)
            source_ring = page[:, None]
        in_ring = inside & before_step[:, None] & (source_ring >= 0)
        place = place[:, None]
        row = kept.rows + source_ring * kept.ring_stride + place % RING * kept.row_stride + column
        old_value = tl.load(row, mask=in_ring, other=0.0)
        old_gate = tl.load(row + kept.part_stride, mask=in_ring, other=0.0)
        value, gate = _load_inputs(inputs, source[:, None], place % RATIO, column, in_step)
        value = tl.where(in_ring, old_value, value)
        gate = tl.where(in_ring, old_gate, tl.where(in_step, gate, float("-inf")))
        largest = tl.maximum(m, tl.max(gate, 0))
        finite = tl.where(largest == float("-inf"), 0.0, largest)  # no token so far
        alpha = tl.exp(m - finite)
        p = tl.exp(gate - finite[None, :])
        l = l * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(p * value, 0)
        m = largest
    return acc / tl.where(dim < D, l, 1.0)


@triton.jit
def _place_of(token, request, RATIO: tl.constexpr, DENSE: tl.constexpr):
    """Row of the entry that a token closes.

    Two that one request closes are ``RATIO`` tokens apart or more, so no two have one place.
    """
    return token // RATIO + request if DENSE else token


@triton.jit
def _pick(numbers, chosen):
    """The number that is chosen."""
    return tl.sum(tl.where(chosen, numbers, 0), 0)


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
    RING: tl.constexpr,
    PAGED: tl.constexpr,
    RATIO: tl.constexpr,
    SERIES: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    DENSE: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Pool and keep ``DIMS`` dims of ``TOKENS`` tokens.

    If ``DENSE``, entries are stored at :func:`_place_of`, and else at their tokens, with zeros for
    tokens that close no window.
    """
    let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    WINDOW: tl.constexpr = RATIO * SERIES
    SLICES: tl.constexpr = (D + DIMS - 1) // DIMS
    stop = (tl.program_id(0) // SLICES + 1).to(tl.int64) * TOKENS
    token = stop - TOKENS + tl.arange(0, TOKENS)
    dim = tl.program_id(0) % SLICES * DIMS + tl.arange(0, DIMS)
    position, request, first, end = _requests_of(
        token, num_tokens, positions, request_ids, input_row_offsets, num_requests
    )
    known = position >= 0
    column = position // RING if PAGED else tl.zeros([TOKENS], tl.int64)
    ring = _ring_of(ring_ids, num_rings, request * table_stride, column, num_columns, known)
    closes = known & ((position + 1) % RATIO == 0)
    if tl.program_id(0) % SLICES == 0:
        live = token < num_tokens
        slot = tl.load(slot_mapping + token, mask=live)
        marked = closes if DENSE else live
        place = _place_of(token, request, RATIO, DENSE)
        tl.store(slots + place, tl.where(closes, slot, -1), mask=marked)
        tl.store(starts + place, tl.where(closes, position + 1 - RATIO, 0), mask=marked)
    if not DENSE:
        empty = ((token < num_tokens) & (closes == 0))[:, None] & (dim < D)[None, :]
        target = pooled + token[:, None] * D + dim[None, :]
        tl.store(target, tl.zeros([TOKENS, DIMS], tl.float32), mask=empty)

    if PAGED:  # no row takes the place of another one
        short = known
    else:
        short = known & (end - first <= RING - WINDOW + 1)
    _keep_rows(
        inputs,
        kept,
        token[:, None],
        position[:, None],
        ring[:, None],
        short[:, None],
        dim[None, :],
        RING,
        RATIO,
        SERIES,
        D,
    )
    # The first token of a long step also pools the windows that reach before it, one by one.
    FIRST: tl.constexpr = WINDOW - 1 if WINDOW > 1 else 1
    leads = known & (token == first) & (short == 0)
    works = leads | (closes & (short | (token - first >= FIRST)))
    chosen = tl.min(tl.where(works, token, stop), 0)
    while chosen < stop:
        here = token == chosen
        chosen_position, chosen_first = _pick(position, here), _pick(first, here)
        chosen_end, chosen_ring = _pick(end, here), _pick(ring, here)
        chosen_request = _pick(request, here)
        table = chosen_request * table_stride
        is_first = _pick(leads.to(tl.int32), here) > 0
        last = tl.where(is_first, tl.minimum(chosen + FIRST, chosen_end), chosen + 1)
        closing = chosen + (RATIO - 1 - chosen_position % RATIO)
        while closing < last:
            entry = _pool_window(
                inputs,
                kept,
                closing,
                chosen_position + closing - chosen,
                chosen_first,
                chosen_ring,
                ring_ids,
                num_rings,
                table,
                num_columns,
                dim,
                RING,
                PAGED,
                RATIO,
                SERIES,
                D,
                ROWS,
            )
            place = _place_of(closing, chosen_request, RATIO, DENSE)
            tl.store(pooled + place * D + dim, entry, mask=dim < D)
            closing += RATIO
        if is_first:
            tl.debug_barrier()  # other threads have read the rows that these overwrite
            for start in range(tl.maximum(chosen, chosen_end - RING), chosen_end, ROWS):
                source = start + tl.arange(0, ROWS)[:, None]
                _keep_rows(
                    inputs,
                    kept,
                    source,
                    chosen_position + source - chosen,
                    chosen_ring,
                    source < chosen_end,
                    dim[None, :],
                    RING,
                    RATIO,
                    SERIES,
                    D,
                )
        chosen = tl.min(tl.where(works & (token > chosen), token, stop), 0)


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
    num_tokens = values.shape[0]
    if num_tokens == 0:
        return
    dim = norm_weight.shape[0]
    num_rings, ring = state.rows.shape[:2]
    paged = ring_ids.dim() == 2
    num_requests = len(ring_ids)
    # In a long step the second launch passes over few rows that are no entries.
    num_rows = (num_tokens - 1) // pooling.ratio + num_requests
    dense = kv_out is None and 2 * num_rows <= num_tokens
    if not dense:
        num_rows = num_tokens
    pooled = torch.empty(num_rows, dim, dtype=torch.float32, device=values.device)
    marks = torch.empty(2, num_rows, dtype=torch.int64, device=values.device)
    starts, slots = marks[0], marks[1]
    if dense:
        marks.fill_(-1)
    # The tile is the same for any step, and so is the order of its sums.
    rows = min(next_power_of_2(pooling.window), POOL_ROWS)
    dims = min(next_power_of_2(dim), 128 if rows <= 8 else 64)
    warps = max(1, rows * dims // WARP_VALUES)
    slices, tokens = cdiv(dim, dims), 1
    # Tokens of a long step share a program if there are too many to run at once: one or two of
    # them close a window. In a short step all may, each for its own request.
    resident = RESIDENT * num_multiprocessors(values.device)
    while 4 * tokens * num_requests <= num_tokens and 4 * tokens <= pooling.ratio:
        if cdiv(num_tokens, tokens) * slices * warps <= resident:
            break
        tokens *= 4
    programs = cdiv(num_tokens, tokens) * slices
    _pool_kernel[(programs,)](
        inputs=Inputs(
            values,
            gates,
            gate_bias,
            values.stride(0),
            gates.stride(0),
            0 if gate_bias is None else gate_bias.stride(0),
        ),
        kept=Kept(state.rows, *state.rows.stride()[:3]),
        positions=positions,
        request_ids=request_ids,
        input_row_offsets=input_row_offsets,
        ring_ids=ring_ids,
        slot_mapping=slot_mapping,
        pooled=pooled,
        starts=starts,
        slots=slots,
        num_tokens=num_tokens,
        num_requests=num_requests,
        num_rings=num_rings,
        table_stride=ring_ids.stride(0),
        num_columns=ring_ids.shape[1] if paged else 1,
        RING=ring,
        PAGED=paged,
        RATIO=pooling.ratio,
        SERIES=1 + pooling.overlap,
        D=dim,
        TOKENS=tokens,
        DIMS=dims,
        ROWS=rows,
        DENSE=dense,
        num_warps=warps,
        enable_fp_fusion=False,  # equal sums give equal bits in every variant of the kernel
        **begins_early(values.device, programs * warps),
    )
    no_queries = pooled.new_empty(num_rows, 0, cos_sin_cache.shape[1])
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

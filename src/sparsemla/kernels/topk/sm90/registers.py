"""Selections from rows that fit the registers of a CTA, or of a cluster of up to eight CTAs.

A row is loaded once, and a radix search (:mod:`.radix`) ranks its best keys; there are no lists.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents

from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.topk.arguments import SelectTopk
from sparsemla.kernels.topk.schedule import schedule_registers
from sparsemla.kernels.topk.sm90.keys import store_short_row
from sparsemla.kernels.topk.sm90.radix import cluster_layout, cluster_line_layout, rank_best
from sparsemla.kernels.topk.triton import (
    DEAD_KEY,
    RUNTIME,
    Pages,
    as_output,
    keys_of,
    pages_of,
    row_range,
)


@gluon.jit(do_not_specialize=RUNTIME)
def _held_kernel(
    scores,
    out,
    row_starts,
    row_ends,
    num_cols,
    k,
    stride_scores,
    stride_out,
    table,
    request_ids,
    num_requests,
    width,
    stride,
    COLUMNS: gl.constexpr,
    WARPS: gl.constexpr,
    CTAS: gl.constexpr,
    FOURS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    EARLY: gl.constexpr,
):
    """Select the ids of a row of at most COLUMNS columns, with all columns in registers."""
    if EARLY:
        gdc_launch_dependents()
    L: gl.constexpr = cluster_layout(WARPS, CTAS)
    ALL: gl.constexpr = WARPS * CTAS
    pages = Pages(table, request_ids, num_requests, width, stride)
    row = gl.program_id(0).to(gl.int64)
    warp = gl.arange(0, ALL, gl.SliceLayout(1, L))
    lane = gl.arange(0, COLUMNS // ALL, gl.SliceLayout(0, L))
    column = warp[:, None] * (COLUMNS // ALL) + lane[None, :]
    # Loads start before the range of the row is known. Up to k columns are all chosen, unread.
    if FOURS:
        first = scores + gl.multiple_of(row * stride_scores, 4)
        within = column // 4 * 4 < num_cols
    else:
        first = scores + row * stride_scores
        within = column < num_cols
    values = gl.load(first + column, mask=within & (num_cols > k), other=0.0)
    start, end = row_range(row_starts, row_ends, row, num_cols)
    o = out + row * stride_out
    if end - start <= k:
        store_short_row(
            o, end - start, k, pages, row, PAGE_SIZE, ALL, cluster_line_layout(WARPS, CTAS)
        )
    else:
        live = (column >= start) & (column < end)
        keys = gl.where(live, keys_of(values.to(gl.float32)), DEAD_KEY)
        place = rank_best(keys, k, None, CTAS)
        ids = as_output(column - start, place >= 0, pages, row, PAGE_SIZE)
        gl.store(o + place, ids, mask=place >= 0)


def select_topk(call: SelectTopk) -> None:
    """Launch a cluster of CTAs for each row."""
    scores, topk, out = call.scores, call.topk, call.out
    num_rows, num_cols = scores.shape
    if num_rows == 0:
        return
    columns, ctas = schedule_registers(call)
    warps = min(32, columns // ctas // 256)
    _held_kernel[(num_rows,)](
        scores,
        out,
        call.row_starts,
        call.row_ends,
        num_cols,
        topk,
        scores.stride(0),
        out.stride(0),
        *pages_of(call.page_table, call.request_ids),
        COLUMNS=columns,
        WARPS=warps,
        CTAS=ctas,
        FOURS=num_cols % 4 == scores.stride(0) % 4 == 0,
        PAGE_SIZE=call.page_size or 0,
        # Only if all rows run at once; see kernels/common/early.py.
        EARLY=num_rows <= num_multiprocessors(scores.device),
        num_warps=warps,
        num_ctas=ctas,
        maxnreg=min(255, 2048 // warps),
    )

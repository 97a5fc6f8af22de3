"""Device code of all attention kernels: rows of any cache format as tiles, softmax, epilogue.

A key is cut in two tiles of power-of-two width: its *value* dims, which are loaded once and serve
both MMAs, and the *rest*, which only the QK MMA reads.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from sparsemla.kernels.common.device import describe
from sparsemla.kernels.common.fp4 import unpack_e2m1
from sparsemla.kernels.common.fp8 import decode_e4m3, decode_scale, dot
from sparsemla.kernels.common.paged import Layout
from sparsemla.kernels.common.slots import is_slot

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)
"""Initial m: finite, so that P of a masked key is 0 and not NaN."""


class Tile(NamedTuple):
    """Query rows and keys of a step, warps and stages; for ``branch`` see :func:`attend_tile`."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    branch: bool = False


FLOAT32_TILE = Tile(16, 16, 8, 1)
"""The tile for float32 keys, whose MMAs are FMAs; more stages take too much shared memory."""

SMALL_SHARED = 99 * 1024
"""Bytes of shared memory per program on every NVIDIA GPU since sm_80."""


def is_hopper(device: torch.device) -> bool:
    """Whether MMAs read both operands from shared memory (sm_90)."""
    return describe(device).is_hopper


def choose_tile(
    rows: int,
    layout: Layout,
    query_dtype: torch.dtype,
    device: torch.device,
    token_mask: bool = False,
    extra: Layout | None = None,
) -> Tile:
    """The tile for ``rows`` query rows that share keys. It does not depend on the batch size.

    With ``token_mask``, more loads are under way, which take a second tile of keys. ``extra``: the
    layout of a second stream's rows.
    """
    row_bytes = 2 * (layout.value_block + layout.rest_block)
    layouts = (layout,) if extra is None else (layout, extra)
    mixed = any(0 < x.fp8_dim < x.value_dim for x in layouts)
    if is_hopper(device) and rows > 16 and query_dtype == torch.bfloat16:
        # Warpgroup MMAs read 64 query rows, and keys, from shared memory: one tile of keys is
        # read while the next arrives. The remaining shared memory holds P and slots.
        block_n = 32 if mixed else 64  # joining both parts of a value takes registers
        if (64 + 2 * block_n) * row_bytes + 9728 <= describe(device).max_shared:
            return Tile(64, block_n, 8, 3, branch=True)
    if torch.version.hip:
        return Tile(16, 16, 8 if layout.fp8_dim else 4, 3)
    if all(x.fp8_dim == 0 for x in layouts) and query_dtype == torch.bfloat16 and not token_mask:
        # O of 32 rows takes 128 registers of a thread. Shared memory holds Q, keys and P; it is
        # better filled by one tile of 64 keys than by two of 32: 128 tokens of 128 heads take
        # 365 us, 474 with 32 keys, 660 with 16 rows (an H100 as sm_80).
        block_m = 32 if rows > 16 else 16
        wide = (block_m + 64) * row_bytes + 6144 <= describe(device).max_shared
        return Tile(block_m, 64 if wide else 32, 4, 2)
    # Joining both parts of a value takes shared memory, too. So do loads of rows of two kinds, and
    # a copy of queries that become bfloat16.
    one_kind = len({x.fp8_dim for x in layouts}) == 1
    plain = one_kind and query_dtype == torch.bfloat16
    if any(x.is_fp4 for x in layouts):
        # As sm_89 on Triton 3.6, tiles of 16 keys gave wrong results over FP4 rows.
        return Tile(16, 32, 4, 3 if plain else 1)
    room = describe(device).max_shared - 40960 if mixed or not plain else SMALL_SHARED - 16384
    block_n = 32 if 2 * 32 * row_bytes <= room else 16
    return Tile(16, block_n, 4, 3 if one_kind or query_dtype == torch.bfloat16 else 1)


@triton.jit
def locate(slots, L: tl.constexpr):
    """Page and row of slots, as int64; the page of a linear cache is 0."""
    slots = slots.to(tl.int32).to(tl.uint32)
    if L.linear:
        page = tl.zeros_like(slots)
        row = slots
    else:
        page = slots // L.page_size
        row = slots % L.page_size
    return page.to(tl.int64), row.to(tl.int64)


@triton.jit
def load_rows(
    rows,
    page,
    row,
    valid,
    L: tl.constexpr,
    START: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Dims ``START .. START + DIM`` of cache rows; invalid rows are 0 and not read.

    In bfloat16, or in the dtype of rows that are not quantised.
    """
    d = START + tl.arange(0, BLOCK)
    mask = valid[:, None]
    if DIM != BLOCK:
        mask = mask & (d < START + DIM)[None, :]
    if L.fp8_dim > START:
        at = page * L.fp8_strides[0] + row * L.fp8_strides[1]
        if L.is_fp4:
            pair = START // 2 + tl.arange(0, BLOCK // 2)
            real = valid[:, None] & (2 * pair < min(L.fp8_dim, START + DIM))[None, :]
            pairs = tl.load(rows.fp8 + at[:, None] + pair[None, :], mask=real, other=0)
            x = unpack_e2m1(pairs)
        else:
            quantised = mask
            if L.fp8_dim < START + DIM:
                quantised = mask & (d < L.fp8_dim)[None, :]
            codes = tl.load(rows.fp8 + at[:, None] + d[None, :], mask=quantised, other=0)
            x = decode_e4m3(codes, NATIVE)
        if L.scale_block > 0:
            x = scaled(x, rows, page, row, valid, L, START, BLOCK, NATIVE)
    if L.fp8_dim < START + DIM:
        at = page * L.bf16_strides[0] + row * L.bf16_strides[1]
        if L.fp8_dim <= START:
            x = tl.load(rows.bf16 + at[:, None] + (d - L.fp8_dim)[None, :], mask=mask, other=0)
        else:
            # The tile's last dims: loaded once, and repeated along the tile for the select.
            N: tl.constexpr = valid.shape[0]
            LAST: tl.constexpr = START + DIM - L.fp8_dim
            last = rows.bf16 + at[:, None] + tl.arange(0, LAST)[None, :]
            last = tl.load(last, mask=valid[:, None], other=0)
            last = tl.broadcast_to(last[:, None, :], [N, BLOCK // LAST, LAST])
            # Written as a shift; otherwise the compiler selects each value after its conversion.
            last = last.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
            last = last.to(tl.float32, bitcast=True).reshape(N, BLOCK)
            x = tl.where((d < L.fp8_dim)[None, :], x, last)
    if L.fp8_dim > 0:
        x = x.to(tl.bfloat16)
    return x


@triton.jit
def scaled(
    x,
    rows,
    page,
    row,
    valid,
    L: tl.constexpr,
    START: tl.constexpr,
    BLOCK: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantised dims times the scales of their blocks."""
    N: tl.constexpr = x.shape[0]
    GROUP: tl.constexpr = dims_of_a_scale(L.scale_block, START, BLOCK)
    NUM_GROUPS: tl.constexpr = BLOCK // GROUP
    first = START + tl.arange(0, NUM_GROUPS) * GROUP
    at = page * L.scales_strides[0] + row * L.scales_strides[1]
    scale = tl.load(
        rows.scales + at[:, None] + (first // L.scale_block)[None, :],
        mask=valid[:, None] & (first < L.fp8_dim)[None, :],
        other=0,
    )
    scale = decode_scale(scale, L.e4m3_scales, NATIVE)
    return (x.reshape(N, NUM_GROUPS, GROUP) * scale[:, :, None]).reshape(N, BLOCK)


@triton.constexpr_function
def dims_of_a_scale(scale_block, start, block):
    """Largest power of two that divides a tile into runs of dims with one scale each."""
    if start // scale_block == (start + block - 1) // scale_block:
        return block
    return min(scale_block & -scale_block, start & -start or block, block)


@triton.jit
def load_query(
    q,
    rows,
    mask,
    START: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Query dims as a tuple of tiles of the dtype of the keys that add up to them.

    One tile for queries of that dtype. Else the keys are bfloat16, and there are two tiles with 16
    bits of mantissa: float16 queries are exact.
    """
    d = START + tl.arange(0, BLOCK)
    mask = mask[:, None]
    if DIM != BLOCK:
        mask = mask & (d < START + DIM)[None, :]
    x = tl.load(q + rows[:, None] + d[None, :], mask=mask, other=0)
    if x.dtype == DTYPE:
        parts = (x,)
    else:
        high = x.to(tl.bfloat16)
        parts = (high, (x.to(tl.float32) - high.to(tl.float32)).to(tl.bfloat16))
    return parts


@triton.jit
def load_queries(
    q, rows, q_rope, rope_rows, mask, L: tl.constexpr, DTYPE: tl.constexpr = tl.bfloat16
):
    """Value dims and rest of query rows, each as :func:`load_query` gives them.

    The rest lies behind the value dims, or in the rows ``rope_rows`` of ``q_rope``.
    """
    REST: tl.constexpr = L.head_dim - L.value_dim
    value = load_query(q, rows, mask, 0, L.value_dim, L.value_block, DTYPE)
    if L.rest_block == 0:
        rest = ()
    elif q_rope is None:
        rest = load_query(q, rows, mask, L.value_dim, REST, L.rest_block, DTYPE)
    else:
        rest = load_query(q_rope, rope_rows, mask, 0, REST, L.rest_block, DTYPE)
    return value, rest


@triton.jit
def qk_product(q, keys, UPCAST: tl.constexpr):
    """``q @ keys^T``; ``q`` as :func:`load_query` gives it."""
    s = tl.zeros([q[0].shape[0], keys.shape[0]], tl.float32)
    for i in tl.static_range(len(q)):
        s = dot(q[i], tl.trans(keys), s, UPCAST)
    return s


@triton.jit
def softmax_step(q, keys, s, seen, scale_log2, m, l, UPCAST: tl.constexpr):
    """One step of online softmax: P, alpha, which rescales O, and the new m and l.

    ``s`` is the base-2 S of other dims of the same keys. P is in the keys' dtype, and 0 for a
    masked key.
    """
    # Scaled separately, the two MMAs are independent: neither waits for the other.
    s += qk_product(q, keys, UPCAST) * scale_log2
    s = tl.where(seen, s, float("-inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    alpha = tl.exp2(m - m_new)
    p = tl.exp2(s - m_new[:, None])
    return p.to(keys.dtype), alpha, m_new, l * alpha + tl.sum(p, 1)


@triton.jit
def attend_tile(
    q_value,
    q_rest,
    rows,
    page,
    row,
    valid,
    seen,
    some,
    scale_log2,
    m,
    l,
    acc,
    L: tl.constexpr,
    BRANCH: tl.constexpr,
    NATIVE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """One step of online softmax in base 2: the new m, l and O.

    ``valid [N]``: the rows to read. ``seen [M or 1, N]``: the keys that each query attends to.
    ``some`` is always true, but the compiler cannot know it.
    """
    value = load_rows(rows, page, row, valid, L, 0, L.value_dim, L.value_block, NATIVE)
    s = tl.zeros([acc.shape[0], value.shape[0]], tl.float32)
    if L.rest_block > 0:
        REST: tl.constexpr = L.head_dim - L.value_dim
        rest = load_rows(rows, page, row, valid, L, L.value_dim, REST, L.rest_block, NATIVE)
        s = qk_product(q_rest, rest, UPCAST) * scale_log2
    if BRANCH:
        # If one MMA feeds another, Triton lets every warpgroup compute all of the first. A branch,
        # which LLVM removes, hides the second MMA, so each warpgroup computes its own part of S.
        # Constants would take shared memory here.
        alpha = m * 0.0 + 1.0
        p = (tl.zeros_like(s) + (m * 0.0)[:, None]).to(value.dtype)
        if some:
            p, alpha, m, l = softmax_step(q_value, value, s, seen, scale_log2, m, l, UPCAST)
    else:
        p, alpha, m, l = softmax_step(q_value, value, s, seen, scale_log2, m, l, UPCAST)
    acc = dot(p, value, acc * alpha[:, None], UPCAST)
    return m, l, acc


@triton.jit
def attend_slots(
    q_value,
    q_rest,
    rows,
    topk_indices,
    begin,
    end,
    scale_log2,
    m,
    l,
    acc,
    L: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BRANCH: tl.constexpr,
    NATIVE: tl.constexpr,
    UPCAST: tl.constexpr,
    token_mask=None,
    bit=0,
):
    """:func:`attend_tile` over the entries ``begin .. end`` of a list of slots.

    With ``token_mask``, over those whose bit is set.
    """
    stop = end
    if BRANCH:
        # If the loop may be skipped, its accumulators have values from two paths, and the assembler
        # serialises the warpgroup MMAs. So at least one step is always taken.
        stop = tl.maximum(end, begin + 1)
    some = tl.zeros([BLOCK_N], tl.int32) + end > 0
    for start in range(begin, stop, BLOCK_N):
        at = start + tl.arange(0, BLOCK_N)
        # Clamp to a real entry: the pipeline would have to carry a mask along.
        nearest = tl.maximum(tl.minimum(at, end - 1), 0)
        slots = tl.load(topk_indices + nearest, mask=some, other=-1)
        valid = is_slot(slots, rows.num_slots) & (at < end)
        if token_mask is not None:
            byte = tl.load(token_mask + nearest, mask=some, other=0).to(tl.int32)
            valid = valid & ((byte >> bit) & 1 != 0)
        page, row = locate(slots, L)
        m, l, acc = attend_tile(
            q_value,
            q_rest,
            rows,
            page,
            row,
            valid,
            valid[None, :],
            start < stop,
            scale_log2,
            m,
            l,
            acc,
            L,
            BRANCH,
            NATIVE,
            UPCAST,
        )
    return m, l, acc


@triton.jit
def store_state(out, out_rows, lse, lse_rows, mask, sink, m, l, acc, V: tl.constexpr):
    """Normalise a query tile and store it. ``sink`` is the natural logit of each row, or None."""
    empty = l == 0
    tl.store(lse + lse_rows, (m + tl.log2(l)) * LN2, mask=mask)  # log2(0) is -inf
    if sink is not None:
        l += tl.exp2(sink * LOG2E - m)
    acc = tl.where(empty[:, None], 0.0, acc / tl.where(empty, 1.0, l)[:, None])
    d = tl.arange(0, acc.shape[1])
    tl.store(
        out + out_rows[:, None] + d[None, :],
        acc.to(out.dtype.element_ty),
        mask=mask[:, None] & (d < V)[None, :],
    )

"""The ops that write caches, in Triton: each is one launch that reads its inputs once.

A program is one warp, so that no warp waits for another: it writes the row of a token, or rotates
some of its heads. Independent loads come first, because a step of few tokens takes as long as its
chain of dependent loads.

Shapes: T tokens, H heads, D dims of a row, N normalised dims, R rotated dims.
"""

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from sparsemla.formats import E2M1_MAX, FLOAT32_TINY, FP8_MAX, CacheFormat
from sparsemla.kernels.common.early import begins_early, let_next_begin, wait_for_inputs
from sparsemla.kernels.common.fp4 import decode_e2m1, encode_e2m1, pack_e2m1
from sparsemla.kernels.common.fp8 import ceil_pow2, decode_e4m3, encode_e4m3, has_fp8
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.common.paged import Rows, cache_arguments
from sparsemla.kernels.quant.arguments import (
    AppendIndexKeys,
    FusedIndexerRopeQuant,
    FusedRopeRmsnormQuant,
    PrepareIndexQueries,
)

TINY = tl.constexpr(FLOAT32_TINY)
MAX = tl.constexpr(FP8_MAX)
INVERSE_MAX = tl.constexpr(1 / E2M1_MAX)

HEAD_DIMS = 1024
"""Query elements of a program: four 16-byte loads in flight per thread of its warp."""

LAUNCH = {"num_warps": 1, "enable_fp_fusion": False}
"""Without fused multiply-adds, as in the reference, so that equal rows give equal bytes."""


class Scaling(NamedTuple):
    """Lower bounds of a block's amax and scale; whether scales are powers of two, or e4m3.

    For e2m1 also the upper bound of a scale and the dims that share it, else 0 each.
    """

    min_amax: float
    min_scale: float
    pow2: bool
    e4m3: bool
    max_scale: float
    fp4_block: int


def scaling_of(fmt: CacheFormat, scale_mode: str) -> Scaling:
    """How kernels compute the scales of a format."""
    e4m3 = fmt.scale_dtype == torch.float8_e4m3fn
    fp4 = (fmt.max_scale, fmt.scale_block) if fmt.is_fp4 else (0.0, 0)
    return Scaling(fmt.min_amax, fmt.min_scale, scale_mode == "pow2" and not e4m3, e4m3, *fp4)


@triton.jit
def _row_offset(slot, L: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr):
    """Offset of the row of a slot, in elements."""
    return slot // L.page_size * PAGE + slot % L.page_size * ROW


@triton.jit
def load_cos_sin(table, position, num_positions, stride, pair, rotated, R: tl.constexpr):
    """Cosines and sines of ``pair``; 1 and 0 if not ``rotated`` or without a row in the table."""
    known = rotated & (position >= 0) & (position < num_positions)
    row = table + position * stride
    cos = tl.load(row + pair, mask=known, other=1.0).to(tl.float32)
    sin = tl.load(row + R // 2 + pair, mask=known, other=0.0).to(tl.float32)
    return cos, sin


@triton.constexpr_function
def _run(rope_dim, start):
    """Length of aligned runs of consecutive rotated dims, or of pairs of halves."""
    return math.gcd(rope_dim // 2, start, 16)


@triton.jit
def _partners(dim, START: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Partner, pair and sine's sign of ``dim [rows, dims]``; R dims from ``START`` on rotate."""
    r = dim - START
    if INTERLEAVED:
        is_first = r % 2 == 0
        partner = tl.where(is_first, dim + 1, dim - 1)
        pair = r // 2
    else:
        RUN: tl.constexpr = _run(R, START)
        is_first = r < R // 2
        partner = tl.where(is_first, dim + R // 2, dim - R // 2)
        partner = tl.max_contiguous(tl.multiple_of(partner, [1, RUN]), [1, RUN])
        pair = tl.where(is_first, r, r - R // 2)
        pair = tl.max_contiguous(tl.multiple_of(pair, [1, RUN]), [1, RUN])
    return partner, pair, tl.where(is_first, -1.0, 1.0)


@triton.jit
def _scale_of(amax, S: tl.constexpr, NATIVE: tl.constexpr):
    """The scale of blocks with the largest magnitude ``amax``, NaN ignored."""
    amax = tl.maximum(amax, S.min_amax)
    if S.fp4_block > 0:
        scale = tl.minimum(tl.maximum(amax * INVERSE_MAX, S.min_scale), S.max_scale)
    else:
        scale = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
    if S.pow2:
        scale = ceil_pow2(tl.maximum(scale, S.min_scale))
    elif S.e4m3:
        scale = decode_e4m3(encode_e4m3(scale, NATIVE), NATIVE)
    else:
        scale = tl.maximum(scale, TINY)
    return scale


@triton.jit
def _divide(x, scale, S: tl.constexpr):
    """``x [rows, dims]`` divided by ``scale [rows]``, correctly rounded."""
    if S.pow2:  # the reciprocal is exact
        return x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    return tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))


@triton.jit
def _store_codes(
    x,
    slot,
    kept,
    dim,
    real,
    rows,
    L: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    END_BLOCK: tl.constexpr,
    S: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantise ``x [blocks, dims]``, and store its ``real`` dims of blocks up to ``END_BLOCK``."""
    if rows.scales is not None:
        scale = _scale_of(tl.max(tl.abs(x), axis=1), S, NATIVE)
        x = _divide(x, scale, S)
        block = FIRST_BLOCK + tl.arange(0, x.shape[0])
        target = (
            rows.scales + _row_offset(slot, L, L.scales_strides[0], L.scales_strides[1]) + block
        )
        stored = kept & (block < END_BLOCK)
        if L.e4m3_scales:
            tl.store(target, encode_e4m3(scale, NATIVE), mask=stored)
        elif rows.scales.dtype.element_ty == tl.uint8:  # e8m0 is a float32 exponent
            tl.store(target, (scale.to(tl.uint32, bitcast=True) >> 23).to(tl.uint8), mask=stored)
        else:
            tl.store(target, scale, mask=stored)
    target = rows.fp8 + _row_offset(slot, L, L.fp8_strides[0], L.fp8_strides[1])
    if L.is_fp4:
        place = tl.where(real, dim, -1)  # both dims of a byte are real, or neither
        place, _ = tl.split(tl.reshape(place, [x.shape[0], x.shape[1] // 2, 2]))
        tl.store(target + place // 2, pack_e2m1(x), mask=kept & (place >= 0))
    else:
        tl.store(target + dim, encode_e4m3(x, NATIVE), mask=kept & real)


@triton.jit
def _round_to_fp4(x, S: tl.constexpr, NATIVE: tl.constexpr):
    """The values of ``x [rows, dims]`` after they are quantised to e2m1 and back, in float32."""
    blocks = tl.reshape(x, [x.numel // S.fp4_block, S.fp4_block])
    scale = _scale_of(tl.max(tl.abs(blocks), axis=1), S, NATIVE)
    blocks = decode_e2m1(encode_e2m1(_divide(blocks, scale, S))) * scale[:, None]
    return tl.reshape(blocks, x.shape)


@triton.jit
def _load_latent(row, norm_weight, dim, live, N: tl.constexpr):
    """Dims of a latent row, and their weights in RMSNorm, which covers the first ``N``."""
    x = tl.load(row + dim, mask=live, other=0.0).to(tl.float32)
    return x, tl.load(norm_weight + dim, mask=live & (dim < N), other=0.0).to(tl.float32)


@triton.jit
def _load_rotation(
    row,
    norm_weight,
    cos_sin,
    position,
    num_positions,
    table_stride,
    dim,
    pair,
    live,
    N: tl.constexpr,
    START: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ADJACENT: tl.constexpr,
):
    """Inputs of RoPE for dims of a latent row: cosines, sines, and the partners as loaded.

    ADJACENT partners come from the row itself, by ``pair [rows, dims / 2]``.
    """
    if ADJACENT:
        rotated = (pair >= 0) & (pair < R // 2)
        cos, sin = load_cos_sin(cos_sin, position, num_positions, table_stride, pair, rotated, R)
        partner, other, weight = dim, 0.0, 0.0
    else:
        partner, pair, sign = _partners(dim, START, R, INTERLEAVED)
        rotated = live & (dim >= START)
        cos, sin = load_cos_sin(cos_sin, position, num_positions, table_stride, pair, rotated, R)
        sin *= sign
        other, weight = _load_latent(row, norm_weight, partner, rotated, N)
    return rotated, cos, sin, partner, other, weight


@triton.jit
def _normed(x, weight, rstd, dim, N: tl.constexpr):
    """Dims of a latent row after RMSNorm."""
    return tl.where(dim < N, x * rstd * weight, x)


@triton.jit
def _rotated(x, rotation, rstd, N: tl.constexpr, ADJACENT: tl.constexpr):
    """RoPE of ``x``, normalised dims of a latent row."""
    rotated, cos, sin, partner, other, weight = rotation
    if ADJACENT:
        a, b = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        first = tl.where(rotated, a * cos - b * sin, a)
        second = tl.where(rotated, a * sin + b * cos, b)
        x = tl.reshape(tl.join(first, second), x.shape)
    else:
        other = _normed(other, weight, rstd, partner, N)
        x = tl.where(rotated, x * cos + other * sin, x)
    return x


@triton.jit
def _load_pairs(row, live, R: tl.constexpr, PAIRS: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both dims of each pair among R dims at ``row [rows, 1]``: float32 ``[rows, PAIRS]`` each."""
    if INTERLEAVED:
        dim = tl.arange(0, 2 * PAIRS)[None, :]
        x = tl.load(row + dim, mask=live & (dim < R), other=0.0)
        first, second = tl.split(tl.reshape(x, [row.shape[0], PAIRS, 2]))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        first = tl.load(row + pair, mask=live & (pair < R // 2), other=0.0)
        second = tl.load(row + R // 2 + pair, mask=live & (pair < R // 2), other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _rotate_pairs(first, second, table, position, num_positions, stride, R: tl.constexpr):
    """RoPE of pairs ``[rows, PAIRS]``."""
    # Without a barrier the compiler puts loads of heads after these, which wait for the position.
    tl.debug_barrier()
    # A table row for each row of pairs gives its loads the layout of the pairs.
    pair = tl.broadcast_to(tl.arange(0, first.shape[1])[None, :], first.shape)
    cos, sin = load_cos_sin(table, position, num_positions, stride, pair, pair < R // 2, R)
    return first * cos - second * sin, first * sin + second * cos


@triton.jit
def _store_pairs(
    row, first, second, live, R: tl.constexpr, INTERLEAVED: tl.constexpr, NATIVE: tl.constexpr
):
    """Store pairs ``[rows, PAIRS]`` at ``row [rows, 1]``, as e4m3 if it points to bytes."""
    PAIRS: tl.constexpr = first.shape[1]
    if INTERLEAVED:
        x = tl.reshape(tl.join(first, second), [first.shape[0], 2 * PAIRS])
        dim = tl.arange(0, 2 * PAIRS)[None, :]
        tl.store(row + dim, _as_stored(x, row, NATIVE), mask=live & (dim < R))
    else:
        pair = tl.arange(0, PAIRS)[None, :]
        real = live & (pair < R // 2)
        tl.store(row + pair, _as_stored(first, row, NATIVE), mask=real)
        tl.store(row + R // 2 + pair, _as_stored(second, row, NATIVE), mask=real)


@triton.jit
def _as_stored(x, target, NATIVE: tl.constexpr):
    """float32 ``x`` in the dtype that ``target`` points to; bytes mean e4m3."""
    if target.dtype.element_ty == tl.uint8:
        return encode_e4m3(x, NATIVE)
    return x.to(target.dtype.element_ty)


@triton.jit
def _heads_of(program, num_heads, HEADS: tl.constexpr):
    """The token and the heads of a program, and the mask of heads that exist."""
    programs = tl.cdiv(num_heads, HEADS)
    head = program % programs * HEADS + tl.arange(0, HEADS)
    return (program // programs).to(tl.int64), head.to(tl.int64), head < num_heads


@triton.jit
def _rotate_heads(
    q,
    out,
    cos_sin,
    positions,
    program,
    num_heads,
    num_positions,
    eps,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    table_stride,
    NATIVE: tl.constexpr,
    START: tl.constexpr,
    R: tl.constexpr,
    QUERY_NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PAIRS: tl.constexpr,
    REST_DIMS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """RoPE of ``HEADS`` heads of a token; with QUERY_NORM their RMSNorm first.

    A thread loads both dims of the pairs that it stores, and the norm needs all dims of a head, so
    ``out`` may be ``q``.
    """
    token, head, live = _heads_of(program, num_heads, HEADS)
    position = tl.load(positions + token).to(tl.int64)
    head, live = head[:, None], live[:, None]
    source = q + token * q_token_stride + head * q_head_stride
    target = out + token * out_token_stride + head * out_head_stride
    if QUERY_NORM:  # queries of START dims, then the rotated ones
        rest = tl.arange(0, REST_DIMS)[None, :]
        real = live & (rest < START)
        x = tl.load(source + rest, mask=real, other=0.0).to(tl.float32)
        first, second = _load_pairs(source + START, live, R, PAIRS, INTERLEAVED)
        square = tl.sum(x * x, axis=1) + tl.sum(first * first + second * second, axis=1)
        variance = tl.div_rn(square, tl.full(square.shape, START + R, tl.float32))
        rstd = tl.div_rn(tl.full(square.shape, 1.0, tl.float32), tl.sqrt_rn(variance + eps))
        rstd = rstd[:, None]
        tl.store(target + rest, _as_stored(x * rstd, target, NATIVE), mask=real)
        first, second = first * rstd, second * rstd
        target += START
    else:
        first, second = _load_pairs(source, live, R, PAIRS, INTERLEAVED)
    first, second = _rotate_pairs(first, second, cos_sin, position, num_positions, table_stride, R)
    _store_pairs(target, first, second, live, R, INTERLEAVED, NATIVE)


@triton.jit(do_not_specialize=["num_tokens"])
def _fused_kernel(
    q,
    out,
    kv,
    kv_out,
    cos_sin,
    norm_weight,
    positions,
    slot_mapping,
    rows,
    num_tokens,
    num_heads,
    num_positions,
    eps,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    kv_stride,
    kv_out_stride,
    table_stride,
    L: tl.constexpr,
    S: tl.constexpr,
    NATIVE: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    QUERY_NORM: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ADJACENT: tl.constexpr,
    FP8_DIM: tl.constexpr,
    FP8_BODY: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
    BODY: tl.constexpr,
    TAIL: tl.constexpr,
    TAIL_BLOCKS: tl.constexpr,
    TAIL_DIMS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST_DIMS: tl.constexpr,
    HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    START: tl.constexpr = D - R
    if tl.program_id(0) >= num_tokens:
        _rotate_heads(
            q,
            out,
            cos_sin,
            positions,
            tl.program_id(0) - num_tokens,
            num_heads,
            num_positions,
            eps,
            q_token_stride,
            q_head_stride,
            out_token_stride,
            out_head_stride,
            table_stride,
            NATIVE,
            START,
            R,
            QUERY_NORM,
            INTERLEAVED,
            PAIRS,
            REST_DIMS,
            HEADS,
        )
        return

    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    kept = (slot >= 0) & (slot < rows.num_slots)
    row = kv + token * kv_stride

    # The body, then the rotated tail; both in blocks that share a scale.
    in_block = tl.arange(0, BLOCK_DIMS)[None, :]
    dim = tl.arange(0, NUM_BLOCKS)[:, None] * SCALE_BLOCK + in_block
    real = (in_block < SCALE_BLOCK) & (dim < BODY)
    x, weight = _load_latent(row, norm_weight, dim, real, N)
    if TAIL > START:
        pair = tl.arange(0, NUM_BLOCKS)[:, None] * (SCALE_BLOCK // 2) - START // 2
        rotation = _load_rotation(
            row,
            norm_weight,
            cos_sin,
            position,
            num_positions,
            table_stride,
            dim,
            pair + tl.arange(0, BLOCK_DIMS // 2)[None, :],
            real,
            N,
            START,
            R,
            INTERLEAVED,
            ADJACENT,
        )
    if TAIL < D:
        tail_block = tl.arange(0, TAIL_BLOCKS)[:, None]
        tail = TAIL + tail_block * SCALE_BLOCK + tl.arange(0, TAIL_DIMS)[None, :]
        in_tail = (tl.arange(0, TAIL_DIMS)[None, :] < SCALE_BLOCK) & (tail < D)
        tail_pair = (TAIL - START) // 2 + tail_block * (SCALE_BLOCK // 2)
        y, tail_weight = _load_latent(row, norm_weight, tail, in_tail, N)
        tail_rotation = _load_rotation(
            row,
            norm_weight,
            cos_sin,
            position,
            num_positions,
            table_stride,
            tail,
            tail_pair + tl.arange(0, TAIL_DIMS // 2)[None, :],
            in_tail,
            N,
            START,
            R,
            INTERLEAVED,
            ADJACENT,
        )

    square = tl.sum(tl.sum(tl.where(dim < N, x * x, 0.0), axis=1), axis=0)
    variance = tl.div_rn(square, tl.full([], N, tl.float32))
    rstd = tl.div_rn(tl.full([], 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    x = _normed(x, weight, rstd, dim, N)
    if TAIL > START:
        x = _rotated(x, rotation, rstd, N, ADJACENT)
    if TAIL < D:
        y = _rotated(_normed(y, tail_weight, rstd, tail, N), tail_rotation, rstd, N, ADJACENT)

    if rows.fp8 is not None:
        _store_codes(
            x,
            slot,
            kept,
            dim,
            real & (dim < FP8_BODY),
            rows,
            L,
            0,
            (FP8_BODY + SCALE_BLOCK - 1) // SCALE_BLOCK,
            S,
            NATIVE,
        )
    if TAIL < FP8_DIM:
        _store_codes(
            y,
            slot,
            kept,
            tail,
            in_tail,
            rows,
            L,
            TAIL // SCALE_BLOCK,
            (D + SCALE_BLOCK - 1) // SCALE_BLOCK,
            S,
            NATIVE,
        )
    plain = real & (dim < TAIL)
    if FP8_DIM < TAIL:
        target = rows.bf16 + _row_offset(slot, L, L.bf16_strides[0], L.bf16_strides[1]) - FP8_DIM
        tl.store(target + dim, x.to(tl.bfloat16), mask=kept & plain & (dim >= FP8_DIM))
    if kv_out is not None:
        tl.store(kv_out + token * kv_out_stride + dim, x.to(tl.bfloat16), mask=plain)
    if TAIL < D:
        y = y.to(tl.bfloat16)
        if FP8_DIM <= TAIL:
            target = (
                rows.bf16 + _row_offset(slot, L, L.bf16_strides[0], L.bf16_strides[1]) - FP8_DIM
            )
            tl.store(target + tail, y, mask=kept & in_tail)
        if kv_out is not None:
            tl.store(kv_out + token * kv_out_stride + tail, y, mask=in_tail)


def fused_rope_rmsnorm_quant(call: FusedRopeRmsnormQuant) -> None:
    # The first programs write rows, the others rotate heads.
    q_rope, kv, kv_out, cos_sin_cache = call.q_rope, call.kv, call.kv_out, call.cos_sin_cache
    fmt = call.cache.format
    num_tokens, num_heads = q_rope.shape[:2]
    widths = _fused_widths(
        fmt,
        call.kv_norm_weight.shape[0],
        cos_sin_cache.shape[1],
        num_heads,
        call.query_norm,
        call.interleaved,
    )
    out = call.out
    if out.dtype == torch.float8_e4m3fn:
        out = out.view(torch.uint8)
    num_programs = num_tokens * (1 + cdiv(num_heads, widths["HEADS"]))
    rows, layout = cache_arguments(call.cache)
    _fused_kernel[(num_programs,)](
        q=q_rope,
        out=out,
        kv=kv,
        kv_out=kv_out,
        cos_sin=cos_sin_cache,
        norm_weight=call.kv_norm_weight,
        positions=call.positions,
        slot_mapping=call.slot_mapping,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_positions=cos_sin_cache.shape[0],
        eps=call.eps,
        q_token_stride=q_rope.stride(0),
        q_head_stride=q_rope.stride(1),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        kv_stride=kv.stride(0),
        kv_out_stride=0 if kv_out is None else kv_out.stride(0),
        table_stride=cos_sin_cache.stride(0),
        S=scaling_of(fmt, call.scale_mode),
        NATIVE=has_fp8(kv.device),
        rows=rows,
        L=layout,
        **widths,
        **LAUNCH,
        **begins_early(kv.device, num_programs),
    )


@functools.lru_cache(4096)
def _fused_widths(
    fmt: CacheFormat,
    norm_dim: int,
    rope_dim: int,
    num_heads: int,
    query_norm: bool,
    interleaved: bool,
) -> dict[str, int]:
    """Compile-time dims and tiles of the fused kernel."""
    start = fmt.head_dim - rope_dim
    block = fmt.scale_block or 128  # any width works without scales
    # Rotated quantised dims are a tail if they share no scale with other dims.
    own_blocks = fmt.fp8_dim == fmt.head_dim and start % block == 0
    tail = start if own_blocks else max(fmt.fp8_dim, start)
    body = max(tail, norm_dim)
    block_dims = next_power_of_2(block)
    pairs = max(next_power_of_2(rope_dim // 2), 1)
    query_dims = next_power_of_2(fmt.head_dim) if query_norm else 2 * pairs
    return {
        "D": fmt.head_dim,
        "N": norm_dim,
        "R": rope_dim,
        "FP8_DIM": fmt.fp8_dim,
        "FP8_BODY": min(fmt.fp8_dim, tail),
        "SCALE_BLOCK": block,
        "NUM_BLOCKS": next_power_of_2(cdiv(body, block)),
        "BLOCK_DIMS": block_dims,
        "BODY": body,
        "TAIL": tail,
        "TAIL_BLOCKS": next_power_of_2(cdiv(fmt.head_dim - tail, block)),
        "TAIL_DIMS": min(next_power_of_2(fmt.head_dim - tail), block_dims),
        "QUERY_NORM": query_norm,
        "INTERLEAVED": interleaved,
        "ADJACENT": interleaved and not any(n % 2 for n in (start, tail, block)),
        "PAIRS": pairs,
        "REST_DIMS": max(next_power_of_2(start), 1),
        "HEADS": max(1, min(HEAD_DIMS // query_dims, next_power_of_2(num_heads))),
    }


@triton.jit
def _hadamard(x, ROWS: tl.constexpr, DIMS: tl.constexpr, STAGES: tl.constexpr):
    """Orthogonal Walsh-Hadamard transform of ``x [ROWS, DIMS]``, ``DIMS = 2^STAGES``."""
    for stage in tl.static_range(STAGES):
        x = tl.reshape(x, [ROWS, DIMS // (2 * 2**stage), 2, 2**stage])
        a, b = tl.split(tl.permute(x, [0, 1, 3, 2]))
        x = tl.permute(tl.join(a + b, a - b), [0, 1, 3, 2])
        x = tl.reshape(x, [ROWS, DIMS])
    return x * DIMS**-0.5


@triton.jit
def _load_key(row, norm_weight, norm_bias, dim, live):
    """Dims of a key, and their weights and biases in LayerNorm."""
    x = tl.load(row + dim, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + dim, mask=live, other=0.0).to(tl.float32)
    return x, weight, tl.load(norm_bias + dim, mask=live, other=0.0).to(tl.float32)


@triton.jit
def _quantise_heads(
    q,
    weights,
    out,
    weights_out,
    cos_sin,
    positions,
    program,
    num_heads,
    num_positions,
    factor,
    q_token_stride,
    q_head_stride,
    weights_stride,
    out_token_stride,
    out_head_stride,
    weights_out_stride,
    table_stride,
    S: tl.constexpr,
    SCALED: tl.constexpr,
    NATIVE: tl.constexpr,
    D: tl.constexpr,
    START: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STAGES: tl.constexpr,
    DIMS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST_DIMS: tl.constexpr,
    HEADS: tl.constexpr,
):
    """RoPE, transform and quantisation of ``HEADS`` indexer heads of a token."""
    token, head, live = _heads_of(program, num_heads, HEADS)
    position = tl.load(positions + token).to(tl.int64)
    source = (q + token * q_token_stride + head * q_head_stride)[:, None]
    target = (out + token * out_token_stride + head * out_head_stride)[:, None]
    weight = tl.load(weights + token * weights_stride + head, mask=live, other=0.0).to(tl.float32)
    weight *= factor
    if STAGES > 0 or S.fp4_block > 0:
        dim = tl.arange(0, DIMS)[None, :]
        x = tl.load(source + dim, mask=live[:, None], other=0.0).to(tl.float32)
        rows = tl.broadcast_to(dim, [HEADS, DIMS])  # gives loads of the table the layout of x
        partner, pair, sign = _partners(rows, START, R, INTERLEAVED)
        rotated = (rows >= START) & (rows < START + R)
        cos, sin = load_cos_sin(cos_sin, position, num_positions, table_stride, pair, rotated, R)
        other = tl.load(source + partner, mask=live[:, None] & rotated, other=0.0).to(tl.float32)
        x = tl.where(rotated, x * cos + other * (sin * sign), x)
        if STAGES > 0:
            x = _hadamard(x, HEADS, DIMS, STAGES)
        if S.fp4_block > 0:
            x = _round_to_fp4(x, S, NATIVE)
        elif SCALED:
            scale = _scale_of(tl.max(tl.abs(x), axis=1), S, NATIVE)
            x = _divide(x, scale, S)
            weight *= scale
        tl.store(target + dim, _as_stored(x, target, NATIVE), mask=live[:, None])
    else:
        # Rotated dims in pairs, separate from the rest, so that no thread works on both.
        FIRST: tl.constexpr = R if START == 0 else 0
        rest = FIRST + tl.arange(0, REST_DIMS)[None, :]
        real = live[:, None] & (rest < FIRST + D - R)
        first, second = _load_pairs(source + START, live[:, None], R, PAIRS, INTERLEAVED)
        x = tl.load(source + rest, mask=real, other=0.0).to(tl.float32)
        first, second = _rotate_pairs(
            first, second, cos_sin, position, num_positions, table_stride, R
        )
        if SCALED:
            amax = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1)
            amax = tl.maximum(amax, tl.max(tl.abs(x), axis=1))
            scale = _scale_of(amax, S, NATIVE)
            first, second = _divide(first, scale, S), _divide(second, scale, S)
            x = _divide(x, scale, S)
            weight *= scale
        _store_pairs(target + START, first, second, live[:, None], R, INTERLEAVED, NATIVE)
        tl.store(target + rest, _as_stored(x, target, NATIVE), mask=real)
    tl.store(weights_out + token * weights_out_stride + head, weight, mask=live)


@triton.jit(do_not_specialize=["num_keys"])
def _index_kernel(
    q,
    weights,
    out,
    weights_out,
    k,
    norm_weight,
    norm_bias,
    cos_sin,
    positions,
    slot_mapping,
    rows,
    num_keys,
    num_heads,
    num_positions,
    factor,
    eps,
    q_token_stride,
    q_head_stride,
    weights_stride,
    out_token_stride,
    out_head_stride,
    weights_out_stride,
    k_stride,
    table_stride,
    L: tl.constexpr,
    S: tl.constexpr,
    SCALED: tl.constexpr,
    NATIVE: tl.constexpr,
    D: tl.constexpr,
    START: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STAGES: tl.constexpr,
    DIMS: tl.constexpr,
    PAIRS: tl.constexpr,
    REST_DIMS: tl.constexpr,
    HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    if tl.program_id(0) >= num_keys:
        if q is not None:
            _quantise_heads(
                q,
                weights,
                out,
                weights_out,
                cos_sin,
                positions,
                tl.program_id(0) - num_keys,
                num_heads,
                num_positions,
                factor,
                q_token_stride,
                q_head_stride,
                weights_stride,
                out_token_stride,
                out_head_stride,
                weights_out_stride,
                table_stride,
                S,
                SCALED,
                NATIVE,
                D,
                START,
                R,
                INTERLEAVED,
                STAGES,
                DIMS,
                PAIRS,
                REST_DIMS,
                HEADS,
            )
    elif k is not None:
        token = tl.program_id(0).to(tl.int64)
        position = tl.load(positions + token).to(tl.int64)
        slot = tl.load(slot_mapping + token).to(tl.int64)
        kept = (slot >= 0) & (slot < rows.num_slots)
        row = k + token * k_stride
        dim = tl.arange(0, DIMS)[None, :]
        real = dim < D
        partner, pair, sign = _partners(dim, START, R, INTERLEAVED)
        rotated = (dim >= START) & (dim < START + R)
        x, weight, bias = _load_key(row, norm_weight, norm_bias, dim, real)
        other, other_weight, other_bias = _load_key(
            row, norm_weight, norm_bias, partner, real & rotated
        )
        cos, sin = load_cos_sin(cos_sin, position, num_positions, table_stride, pair, rotated, R)

        count = tl.full([1], D, tl.float32)
        mean = tl.div_rn(tl.sum(x, axis=1), count)[:, None]
        deviation = tl.where(real, x - mean, 0.0)
        variance = tl.div_rn(tl.sum(deviation * deviation, axis=1), count)
        rstd = tl.div_rn(tl.full([1], 1.0, tl.float32), tl.sqrt_rn(variance + eps))[:, None]
        x = (x - mean) * rstd * weight + bias
        other = (other - mean) * rstd * other_weight + other_bias
        x = tl.where(rotated, x * cos + other * (sin * sign), x)
        x = tl.where(real, x, 0.0)
        if STAGES > 0:
            x = _hadamard(x, 1, DIMS, STAGES)
        if rows.fp8 is not None:
            BLOCK: tl.constexpr = S.fp4_block if S.fp4_block > 0 else DIMS
            dim = tl.reshape(dim, [DIMS // BLOCK, BLOCK])
            real = dim < D
            x = tl.reshape(x, [DIMS // BLOCK, BLOCK])
            _store_codes(
                x,
                slot,
                kept,
                dim,
                real,
                rows,
                L,
                0,
                DIMS // BLOCK,
                S,
                NATIVE,
            )
        else:
            target = rows.bf16 + _row_offset(slot, L, L.bf16_strides[0], L.bf16_strides[1]) + dim
            tl.store(target, x.to(tl.bfloat16), mask=kept & real)


NO_QUERIES: dict[str, Any] = {
    "q": None,
    "weights": None,
    "out": None,
    "weights_out": None,
    "num_heads": 0,
    "factor": 0.0,
    "q_token_stride": 0,
    "q_head_stride": 0,
    "weights_stride": 0,
    "out_token_stride": 0,
    "out_head_stride": 0,
    "weights_out_stride": 0,
    "HEADS": 1,
}
NO_KEYS: dict[str, Any] = {
    "k": None,
    "norm_weight": None,
    "norm_bias": None,
    "slot_mapping": None,
    "rows": Rows(None, None, None, 0),
    "L": None,
    "num_keys": 0,
    "eps": 0.0,
    "k_stride": 0,
}


def _query_arguments(call: PrepareIndexQueries | FusedIndexerRopeQuant) -> dict[str, Any]:
    q, weights, out, weights_out = call.index_q, call.weights, call.out, call.weights_out
    num_heads, dim = q.shape[1:]
    heads = max(1, HEAD_DIMS // next_power_of_2(dim))
    return {
        "q": q,
        "weights": weights,
        "out": out.view(torch.uint8) if out.dtype == torch.float8_e4m3fn else out,
        "weights_out": weights_out,
        "num_heads": num_heads,
        "factor": (num_heads * dim) ** -0.5,
        "q_token_stride": q.stride(0),
        "q_head_stride": q.stride(1),
        "weights_stride": weights.stride(0),
        "out_token_stride": out.stride(0),
        "out_head_stride": out.stride(1),
        "weights_out_stride": weights_out.stride(0),
        "HEADS": min(heads, next_power_of_2(num_heads)),
    }


def _key_arguments(call: AppendIndexKeys | FusedIndexerRopeQuant) -> dict[str, Any]:
    rows, layout = cache_arguments(call.cache)
    return {
        "k": call.index_k,
        "norm_weight": call.norm_weight,
        "norm_bias": call.norm_bias,
        "slot_mapping": call.slot_mapping,
        "num_keys": call.index_k.shape[0],
        "eps": call.eps,
        "k_stride": call.index_k.stride(0),
        "rows": rows,
        "L": layout,
    }


def _launch_index(
    call: AppendIndexKeys | PrepareIndexQueries | FusedIndexerRopeQuant,
    queries: dict[str, Any],
    keys: dict[str, Any],
) -> None:
    # The first programs write keys, the others quantise heads.
    fmt, cos_sin_cache, positions = call.format, call.cos_sin_cache, call.positions
    dim, rope_dim = fmt.head_dim, cos_sin_cache.shape[1]
    start = 0 if call.rope_first else dim - rope_dim
    dims = next_power_of_2(dim)
    num_programs = positions.shape[0] * cdiv(queries["num_heads"], queries["HEADS"])
    num_programs += keys["num_keys"]
    _index_kernel[(num_programs,)](
        cos_sin=cos_sin_cache,
        positions=positions,
        num_positions=cos_sin_cache.shape[0],
        table_stride=cos_sin_cache.stride(0),
        S=scaling_of(fmt, call.scale_mode),
        SCALED=fmt.num_scales > 0,
        NATIVE=has_fp8(positions.device),
        D=dim,
        START=start,
        R=rope_dim,
        INTERLEAVED=call.interleaved,
        STAGES=dims.bit_length() - 1 if call.hadamard else 0,
        DIMS=dims,
        PAIRS=max(next_power_of_2(rope_dim // 2), 1),
        REST_DIMS=max(next_power_of_2(dim - rope_dim), 1),
        **queries,
        **keys,
        **LAUNCH,
        **begins_early(positions.device, num_programs),
    )


def fused_indexer_rope_quant(call: FusedIndexerRopeQuant) -> None:
    _launch_index(call, _query_arguments(call), _key_arguments(call))


def append_index_keys(call: AppendIndexKeys) -> None:
    _launch_index(call, NO_QUERIES, _key_arguments(call))


def prepare_index_queries(call: PrepareIndexQueries) -> None:
    _launch_index(call, _query_arguments(call), NO_KEYS)

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
from torch import Tensor

from sparsemla.formats import E2M1_MAX, FLOAT32_TINY, FP8_MAX, CacheFormat
from sparsemla.kernels.common.early import begins_early, let_next_begin, wait_for_inputs
from sparsemla.kernels.common.fp4 import decode_e2m1, encode_e2m1, pack_e2m1
from sparsemla.kernels.common.fp8 import ceil_pow2, decode_e4m3, encode_e4m3, has_fp8
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.common.paged import cache_arguments
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

    For e2m1 also the upper bound of a scale and the dims that share it, else 0 each. ``native``:
    the GPU converts e4m3 itself.
    """

    min_amax: float
    min_scale: float
    pow2: bool
    e4m3: bool
    max_scale: float
    fp4_block: int
    native: bool


def scaling_of(fmt: CacheFormat, scale_mode: str, device: torch.device) -> Scaling:
    """How kernels compute the scales of a format."""
    e4m3 = fmt.scale_dtype == torch.float8_e4m3fn
    pow2 = scale_mode == "pow2" and not e4m3
    fp4 = (fmt.max_scale, fmt.scale_block) if fmt.is_fp4 else (0.0, 0)
    return Scaling(fmt.min_amax, fmt.min_scale, pow2, e4m3, *fp4, has_fp8(device))


class Table(NamedTuple):
    """Cosines and sines of positions."""

    rows: Tensor
    num_positions: int
    stride: int


class Widths(NamedTuple):
    """Constants of rows and heads: their dims, of which ``rope_dim`` rotate, from ``start`` on.

    A program has ``heads`` heads, in tiles of their rotated ``pairs`` and of ``rest_dims`` others.
    """

    dim: int
    start: int
    rope_dim: int
    interleaved: bool
    pairs: int
    rest_dims: int
    heads: int


class Latent(NamedTuple):
    """Constants of latent rows, whose first ``norm_dim`` dims RMSNorm covers.

    The ``body`` and the ``tail`` from that dim on are tiles of blocks of ``block`` dims, which
    share a scale. ``adjacent``: both dims of a rotated pair lie side by side in a tile.
    """

    norm_dim: int
    fp8_dim: int
    body: int
    tail: int
    block: int
    num_blocks: int
    block_dims: int
    tail_blocks: int
    tail_dims: int
    adjacent: bool


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
def _partners(dim, W: tl.constexpr):
    """Partner, pair and sine's sign of ``dim [rows, dims]``."""
    R: tl.constexpr = W.rope_dim
    r = dim - W.start
    if W.interleaved:
        is_first = r % 2 == 0
        partner = tl.where(is_first, dim + 1, dim - 1)
        pair = r // 2
    else:
        RUN: tl.constexpr = _run(R, W.start)
        is_first = r < R // 2
        partner = tl.where(is_first, dim + R // 2, dim - R // 2)
        partner = tl.max_contiguous(tl.multiple_of(partner, [1, RUN]), [1, RUN])
        pair = tl.where(is_first, r, r - R // 2)
        pair = tl.max_contiguous(tl.multiple_of(pair, [1, RUN]), [1, RUN])
    return partner, pair, tl.where(is_first, -1.0, 1.0)


@triton.jit
def _scale_of(amax, S: tl.constexpr):
    """The scale of blocks with the largest magnitude ``amax``, NaN ignored."""
    amax = tl.maximum(amax, S.min_amax)
    if S.fp4_block > 0:
        scale = tl.minimum(tl.maximum(amax * INVERSE_MAX, S.min_scale), S.max_scale)
    else:
        scale = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
    if S.pow2:
        scale = ceil_pow2(tl.maximum(scale, S.min_scale))
    elif S.e4m3:
        scale = decode_e4m3(encode_e4m3(scale, S.native), S.native)
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
    S: tl.constexpr,
    FIRST_BLOCK: tl.constexpr,
    END_BLOCK: tl.constexpr,
):
    """Quantise ``x [blocks, dims]``, and store its ``real`` dims of blocks up to ``END_BLOCK``."""
    if rows.scales is not None:
        scale = _scale_of(tl.max(tl.abs(x), axis=1), S)
        x = _divide(x, scale, S)
        block = FIRST_BLOCK + tl.arange(0, x.shape[0])
        target = (
            rows.scales + _row_offset(slot, L, L.scales_strides[0], L.scales_strides[1]) + block
        )
        stored = kept & (block < END_BLOCK)
        if L.e4m3_scales:
            tl.store(target, encode_e4m3(scale, S.native), mask=stored)
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
        tl.store(target + dim, encode_e4m3(x, S.native), mask=kept & real)


@triton.jit
def _round_to_fp4(x, S: tl.constexpr):
    """The values of ``x [rows, dims]`` after they are quantised to e2m1 and back, in float32."""
    blocks = tl.reshape(x, [x.numel // S.fp4_block, S.fp4_block])
    scale = _scale_of(tl.max(tl.abs(blocks), axis=1), S)
    blocks = decode_e2m1(encode_e2m1(_divide(blocks, scale, S))) * scale[:, None]
    return tl.reshape(blocks, x.shape)


@triton.jit
def _load_latent(row, norm_weight, dim, live, B: tl.constexpr):
    """Dims of a latent row, and their weights in RMSNorm."""
    x = tl.load(row + dim, mask=live, other=0.0).to(tl.float32)
    return x, tl.load(norm_weight + dim, mask=live & (dim < B.norm_dim), other=0.0).to(tl.float32)


@triton.jit
def _load_cos_sin(table, position, pair, rotated, W: tl.constexpr):
    return load_cos_sin(
        table.rows, position, table.num_positions, table.stride, pair, rotated, W.rope_dim
    )


@triton.jit
def _load_rotation(
    row, norm_weight, table, position, dim, pair, live, W: tl.constexpr, B: tl.constexpr
):
    """Inputs of RoPE for dims of a latent row: cosines, sines, and the partners as loaded.

    Adjacent partners come from the row itself, by ``pair [rows, dims / 2]``.
    """
    if B.adjacent:
        rotated = (pair >= 0) & (pair < W.rope_dim // 2)
        cos, sin = _load_cos_sin(table, position, pair, rotated, W)
        partner, other, weight = dim, 0.0, 0.0
    else:
        partner, pair, sign = _partners(dim, W)
        rotated = live & (dim >= W.start)
        cos, sin = _load_cos_sin(table, position, pair, rotated, W)
        sin *= sign
        other, weight = _load_latent(row, norm_weight, partner, rotated, B)
    return rotated, cos, sin, partner, other, weight


@triton.jit
def _normed(x, weight, rstd, dim, B: tl.constexpr):
    """Dims of a latent row after RMSNorm."""
    return tl.where(dim < B.norm_dim, x * rstd * weight, x)


@triton.jit
def _rotated(x, rotation, rstd, B: tl.constexpr):
    """RoPE of ``x``, normalised dims of a latent row."""
    rotated, cos, sin, partner, other, weight = rotation
    if B.adjacent:
        a, b = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
        first = tl.where(rotated, a * cos - b * sin, a)
        second = tl.where(rotated, a * sin + b * cos, b)
        x = tl.reshape(tl.join(first, second), x.shape)
    else:
        other = _normed(other, weight, rstd, partner, B)
        x = tl.where(rotated, x * cos + other * sin, x)
    return x


@triton.jit
def _load_pairs(row, live, W: tl.constexpr):
    """Both dims of each rotated pair at ``row [rows, 1]``: float32 ``[rows, pairs]`` each."""
    R: tl.constexpr = W.rope_dim
    if W.interleaved:
        dim = tl.arange(0, 2 * W.pairs)[None, :]
        x = tl.load(row + dim, mask=live & (dim < R), other=0.0)
        first, second = tl.split(tl.reshape(x, [row.shape[0], W.pairs, 2]))
    else:
        pair = tl.arange(0, W.pairs)[None, :]
        first = tl.load(row + pair, mask=live & (pair < R // 2), other=0.0)
        second = tl.load(row + R // 2 + pair, mask=live & (pair < R // 2), other=0.0)
    return first.to(tl.float32), second.to(tl.float32)


@triton.jit
def _rotate_pairs(first, second, table, position, W: tl.constexpr):
    """RoPE of pairs ``[rows, pairs]``."""
    # Without a barrier the compiler puts loads of heads after these, which wait for the position.
    tl.debug_barrier()
    # A table row for each row of pairs gives its loads the layout of the pairs.
    pair = tl.broadcast_to(tl.arange(0, first.shape[1])[None, :], first.shape)
    cos, sin = _load_cos_sin(table, position, pair, pair < W.rope_dim // 2, W)
    return first * cos - second * sin, first * sin + second * cos


@triton.jit
def _store_pairs(row, first, second, live, W: tl.constexpr, S: tl.constexpr):
    """Store pairs ``[rows, pairs]`` at ``row [rows, 1]``, as e4m3 if it points to bytes."""
    R: tl.constexpr = W.rope_dim
    if W.interleaved:
        x = tl.reshape(tl.join(first, second), [first.shape[0], 2 * W.pairs])
        dim = tl.arange(0, 2 * W.pairs)[None, :]
        tl.store(row + dim, _as_stored(x, row, S), mask=live & (dim < R))
    else:
        pair = tl.arange(0, W.pairs)[None, :]
        real = live & (pair < R // 2)
        tl.store(row + pair, _as_stored(first, row, S), mask=real)
        tl.store(row + R // 2 + pair, _as_stored(second, row, S), mask=real)


@triton.jit
def _as_stored(x, target, S: tl.constexpr):
    """float32 ``x`` in the dtype that ``target`` points to; bytes mean e4m3."""
    if target.dtype.element_ty == tl.uint8:
        return encode_e4m3(x, S.native)
    return x.to(target.dtype.element_ty)


@triton.jit
def _heads_of(program, num_heads, HEADS: tl.constexpr):
    """The token and the heads of a program, and the mask of heads that exist."""
    programs = tl.cdiv(num_heads, HEADS)
    head = program % programs * HEADS + tl.arange(0, HEADS)
    return (program // programs).to(tl.int64), head.to(tl.int64), head < num_heads


@triton.jit
def _rotate_heads(
    source,
    target,
    live,
    table,
    position,
    eps,
    QUERY_NORM: tl.constexpr,
    W: tl.constexpr,
    S: tl.constexpr,
):
    """RoPE of heads ``[heads, 1]`` of a token; with QUERY_NORM their RMSNorm first.

    A thread loads both dims of the pairs that it stores, and the norm needs all dims of a head, so
    the target may be the source.
    """
    if QUERY_NORM:  # queries of other dims, then the rotated ones
        rest = tl.arange(0, W.rest_dims)[None, :]
        real = live & (rest < W.start)
        x = tl.load(source + rest, mask=real, other=0.0).to(tl.float32)
        first, second = _load_pairs(source + W.start, live, W)
        square = tl.sum(x * x, axis=1) + tl.sum(first * first + second * second, axis=1)
        variance = tl.div_rn(square, tl.full(square.shape, W.dim, tl.float32))
        rstd = tl.div_rn(tl.full(square.shape, 1.0, tl.float32), tl.sqrt_rn(variance + eps))
        rstd = rstd[:, None]
        tl.store(target + rest, _as_stored(x * rstd, target, S), mask=real)
        first, second = first * rstd, second * rstd
        target += W.start
    else:
        first, second = _load_pairs(source, live, W)
    first, second = _rotate_pairs(first, second, table, position, W)
    _store_pairs(target, first, second, live, W, S)


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
    W: tl.constexpr,
    B: tl.constexpr,
    QUERY_NORM: tl.constexpr,
    EARLY: tl.constexpr,
):
    let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    table = Table(cos_sin, num_positions, table_stride)
    if tl.program_id(0) >= num_tokens:
        token, head, live = _heads_of(tl.program_id(0) - num_tokens, num_heads, W.heads)
        position = tl.load(positions + token).to(tl.int64)
        source = q + token * q_token_stride + head[:, None] * q_head_stride
        heads_out = out + token * out_token_stride + head[:, None] * out_head_stride
        _rotate_heads(source, heads_out, live[:, None], table, position, eps, QUERY_NORM, W, S)
        return

    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    kept = (slot >= 0) & (slot < rows.num_slots)
    row = kv + token * kv_stride

    # The body, then the rotated tail; both in blocks that share a scale.
    in_block = tl.arange(0, B.block_dims)[None, :]
    dim = tl.arange(0, B.num_blocks)[:, None] * B.block + in_block
    real = (in_block < B.block) & (dim < B.body)
    x, weight = _load_latent(row, norm_weight, dim, real, B)
    if B.tail > W.start:
        pair = tl.arange(0, B.num_blocks)[:, None] * (B.block // 2) - W.start // 2
        pair = pair + tl.arange(0, B.block_dims // 2)[None, :]
        rotation = _load_rotation(row, norm_weight, table, position, dim, pair, real, W, B)
    if B.tail < W.dim:
        block = tl.arange(0, B.tail_blocks)[:, None]
        tail = B.tail + block * B.block + tl.arange(0, B.tail_dims)[None, :]
        in_tail = (tl.arange(0, B.tail_dims)[None, :] < B.block) & (tail < W.dim)
        pair = (B.tail - W.start) // 2 + block * (B.block // 2)
        y, tail_weight = _load_latent(row, norm_weight, tail, in_tail, B)
        pair = pair + tl.arange(0, B.tail_dims // 2)[None, :]
        tail_rotation = _load_rotation(row, norm_weight, table, position, tail, pair, in_tail, W, B)

    square = tl.sum(tl.sum(tl.where(dim < B.norm_dim, x * x, 0.0), axis=1), axis=0)
    variance = tl.div_rn(square, tl.full([], B.norm_dim, tl.float32))
    rstd = tl.div_rn(tl.full([], 1.0, tl.float32), tl.sqrt_rn(variance + eps))
    x = _normed(x, weight, rstd, dim, B)
    if B.tail > W.start:
        x = _rotated(x, rotation, rstd, B)
    if B.tail < W.dim:
        y = _rotated(_normed(y, tail_weight, rstd, tail, B), tail_rotation, rstd, B)

    if rows.fp8 is not None:
        FP8_BODY: tl.constexpr = min(B.fp8_dim, B.tail)
        END: tl.constexpr = (FP8_BODY + B.block - 1) // B.block
        _store_codes(x, slot, kept, dim, real & (dim < FP8_BODY), rows, L, S, 0, END)
    if B.tail < B.fp8_dim:
        TAIL_END: tl.constexpr = (W.dim + B.block - 1) // B.block
        _store_codes(y, slot, kept, tail, in_tail, rows, L, S, B.tail // B.block, TAIL_END)
    plain = real & (dim < B.tail)
    if B.fp8_dim < B.tail:
        target = rows.bf16 + _row_offset(slot, L, L.bf16_strides[0], L.bf16_strides[1]) - B.fp8_dim
        tl.store(target + dim, x.to(tl.bfloat16), mask=kept & plain & (dim >= B.fp8_dim))
    if kv_out is not None:
        tl.store(kv_out + token * kv_out_stride + dim, x.to(tl.bfloat16), mask=plain)
    if B.tail < W.dim:
        y = y.to(tl.bfloat16)
        if B.fp8_dim <= B.tail:
            target = rows.bf16 + _row_offset(slot, L, L.bf16_strides[0], L.bf16_strides[1])
            tl.store(target - B.fp8_dim + tail, y, mask=kept & in_tail)
        if kv_out is not None:
            tl.store(kv_out + token * kv_out_stride + tail, y, mask=in_tail)


def fused_rope_rmsnorm_quant(call: FusedRopeRmsnormQuant) -> None:
    # The first programs write rows, the others rotate heads.
    q_rope, kv, kv_out, cos_sin_cache = call.q_rope, call.kv, call.kv_out, call.cos_sin_cache
    fmt, rope_dim = call.cache.format, cos_sin_cache.shape[1]
    num_tokens, num_heads = q_rope.shape[:2]
    widths = _widths(fmt.head_dim, rope_dim, False, call.interleaved, num_heads, call.query_norm)
    out = call.out
    if out.dtype == torch.float8_e4m3fn:
        out = out.view(torch.uint8)
    num_programs = num_tokens * (1 + cdiv(num_heads, widths.heads))
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
        S=scaling_of(fmt, call.scale_mode, kv.device),
        rows=rows,
        L=layout,
        W=widths,
        B=_latent(fmt, call.kv_norm_weight.shape[0], rope_dim, call.interleaved),
        QUERY_NORM=call.query_norm,
        **LAUNCH,
        **begins_early(kv.device, num_programs),
    )


@functools.lru_cache(4096)
def _widths(
    dim: int, rope_dim: int, rope_first: bool, interleaved: bool, num_heads: int, whole: bool
) -> Widths:
    """``whole``: a program has all dims of its heads, not the rotated ones only."""
    pairs = max(next_power_of_2(rope_dim // 2), 1)
    rest_dims = max(next_power_of_2(dim - rope_dim), 1)
    heads = HEAD_DIMS // (next_power_of_2(dim) if whole else 2 * pairs)
    heads = max(1, min(heads, next_power_of_2(num_heads)))
    start = 0 if rope_first else dim - rope_dim
    return Widths(dim, start, rope_dim, interleaved, pairs, rest_dims, heads)


@functools.lru_cache(4096)
def _latent(fmt: CacheFormat, norm_dim: int, rope_dim: int, interleaved: bool) -> Latent:
    start = fmt.head_dim - rope_dim
    block = fmt.scale_block or 128  # any width works without scales
    # Rotated quantised dims are a tail if they share no scale with other dims.
    own_blocks = fmt.fp8_dim == fmt.head_dim and start % block == 0
    tail = start if own_blocks else max(fmt.fp8_dim, start)
    body = max(tail, norm_dim)
    block_dims = next_power_of_2(block)
    return Latent(
        norm_dim,
        fmt.fp8_dim,
        body,
        tail,
        block,
        num_blocks=next_power_of_2(cdiv(body, block)),
        block_dims=block_dims,
        tail_blocks=next_power_of_2(cdiv(fmt.head_dim - tail, block)),
        tail_dims=min(next_power_of_2(fmt.head_dim - tail), block_dims),
        adjacent=interleaved and not any(n % 2 for n in (start, tail, block)),
    )


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
    source,
    target,
    live,
    table,
    position,
    weight,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
    DIMS: tl.constexpr,
    W: tl.constexpr,
    S: tl.constexpr,
):
    """RoPE, transform and quantisation of indexer heads ``[heads, 1]``; returns their weights."""
    if STAGES > 0 or S.fp4_block > 0:
        dim = tl.arange(0, DIMS)[None, :]
        x = tl.load(source + dim, mask=live, other=0.0).to(tl.float32)
        rows = tl.broadcast_to(dim, x.shape)  # gives loads of the table the layout of x
        partner, pair, sign = _partners(rows, W)
        rotated = (rows >= W.start) & (rows < W.start + W.rope_dim)
        cos, sin = _load_cos_sin(table, position, pair, rotated, W)
        other = tl.load(source + partner, mask=live & rotated, other=0.0).to(tl.float32)
        x = tl.where(rotated, x * cos + other * (sin * sign), x)
        if STAGES > 0:
            x = _hadamard(x, W.heads, DIMS, STAGES)
        if S.fp4_block > 0:
            x = _round_to_fp4(x, S)
        elif SCALED:
            scale = _scale_of(tl.max(tl.abs(x), axis=1), S)
            x = _divide(x, scale, S)
            weight *= scale
        tl.store(target + dim, _as_stored(x, target, S), mask=live)
    else:
        # Rotated dims in pairs, separate from the rest, so that no thread works on both.
        FIRST: tl.constexpr = W.rope_dim if W.start == 0 else 0
        rest = FIRST + tl.arange(0, W.rest_dims)[None, :]
        real = live & (rest < FIRST + W.dim - W.rope_dim)
        first, second = _load_pairs(source + W.start, live, W)
        x = tl.load(source + rest, mask=real, other=0.0).to(tl.float32)
        first, second = _rotate_pairs(first, second, table, position, W)
        if SCALED:
            amax = tl.max(tl.maximum(tl.abs(first), tl.abs(second)), axis=1)
            amax = tl.maximum(amax, tl.max(tl.abs(x), axis=1))
            scale = _scale_of(amax, S)
            first, second = _divide(first, scale, S), _divide(second, scale, S)
            x = _divide(x, scale, S)
            weight *= scale
        _store_pairs(target + W.start, first, second, live, W, S)
        tl.store(target + rest, _as_stored(x, target, S), mask=real)
    return weight


@triton.jit(do_not_specialize=["num_keys"])
def _index_kernel(
    cos_sin,
    positions,
    num_positions,
    table_stride,
    S: tl.constexpr,
    W: tl.constexpr,
    SCALED: tl.constexpr,
    STAGES: tl.constexpr,
    DIMS: tl.constexpr,
    EARLY: tl.constexpr,
    q=None,
    weights=None,
    out=None,
    weights_out=None,
    num_heads=0,
    factor=0.0,
    q_token_stride=0,
    q_head_stride=0,
    weights_stride=0,
    out_token_stride=0,
    out_head_stride=0,
    weights_out_stride=0,
    k=None,
    norm_weight=None,
    norm_bias=None,
    slot_mapping=None,
    num_keys=0,
    eps=0.0,
    k_stride=0,
    rows=None,
    L: tl.constexpr = None,
):
    """Write keys, then quantise heads; a launch may have only one of them."""
    let_next_begin(EARLY)
    wait_for_inputs(EARLY)
    table = Table(cos_sin, num_positions, table_stride)
    if tl.program_id(0) >= num_keys:
        if q is not None:
            token, head, live = _heads_of(tl.program_id(0) - num_keys, num_heads, W.heads)
            position = tl.load(positions + token).to(tl.int64)
            source = (q + token * q_token_stride + head * q_head_stride)[:, None]
            heads_out = (out + token * out_token_stride + head * out_head_stride)[:, None]
            factors = tl.load(weights + token * weights_stride + head, mask=live, other=0.0)
            factors = factors.to(tl.float32) * factor
            factors = _quantise_heads(
                source,
                heads_out,
                live[:, None],
                table,
                position,
                factors,
                SCALED,
                STAGES,
                DIMS,
                W,
                S,
            )
            tl.store(weights_out + token * weights_out_stride + head, factors, mask=live)
    elif k is not None:
        token = tl.program_id(0).to(tl.int64)
        position = tl.load(positions + token).to(tl.int64)
        slot = tl.load(slot_mapping + token).to(tl.int64)
        kept = (slot >= 0) & (slot < rows.num_slots)
        row = k + token * k_stride
        dim = tl.arange(0, DIMS)[None, :]
        real = dim < W.dim
        partner, pair, sign = _partners(dim, W)
        rotated = (dim >= W.start) & (dim < W.start + W.rope_dim)
        x, weight, bias = _load_key(row, norm_weight, norm_bias, dim, real)
        other, other_weight, other_bias = _load_key(
            row, norm_weight, norm_bias, partner, real & rotated
        )
        cos, sin = _load_cos_sin(table, position, pair, rotated, W)

        count = tl.full([1], W.dim, tl.float32)
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
            x = tl.reshape(x, [DIMS // BLOCK, BLOCK])
            _store_codes(x, slot, kept, dim, dim < W.dim, rows, L, S, 0, DIMS // BLOCK)
        else:
            target = rows.bf16 + _row_offset(slot, L, L.bf16_strides[0], L.bf16_strides[1]) + dim
            tl.store(target, x.to(tl.bfloat16), mask=kept & real)


def _query_arguments(call: PrepareIndexQueries | FusedIndexerRopeQuant) -> dict[str, Any]:
    q, weights, out, weights_out = call.index_q, call.weights, call.out, call.weights_out
    num_heads, dim = q.shape[1:]
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
    arguments: dict[str, Any],
) -> None:
    # The first programs write keys, the others quantise heads.
    fmt, cos_sin_cache, positions = call.format, call.cos_sin_cache, call.positions
    dim, num_heads = fmt.head_dim, arguments.get("num_heads", 0)
    rope_dim, dims = cos_sin_cache.shape[1], next_power_of_2(dim)
    widths = _widths(dim, rope_dim, call.rope_first, call.interleaved, num_heads, True)
    num_programs = positions.shape[0] * cdiv(num_heads, widths.heads)
    num_programs += arguments.get("num_keys", 0)
    _index_kernel[(num_programs,)](
        cos_sin=cos_sin_cache,
        positions=positions,
        num_positions=cos_sin_cache.shape[0],
        table_stride=cos_sin_cache.stride(0),
        S=scaling_of(fmt, call.scale_mode, positions.device),
        W=widths,
        SCALED=fmt.num_scales > 0,
        STAGES=dims.bit_length() - 1 if call.hadamard else 0,
        DIMS=dims,
        **arguments,
        **LAUNCH,
        **begins_early(positions.device, num_programs),
    )


def fused_indexer_rope_quant(call: FusedIndexerRopeQuant) -> None:
    _launch_index(call, _query_arguments(call) | _key_arguments(call))


def append_index_keys(call: AppendIndexKeys) -> None:
    _launch_index(call, _key_arguments(call))


def prepare_index_queries(call: PrepareIndexQueries) -> None:
    _launch_index(call, _query_arguments(call))

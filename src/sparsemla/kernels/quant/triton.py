"""The ops that write caches, in Triton: each is one launch that reads its inputs once.

Shapes: T tokens, H heads, D dims of a row, N normalised dims, R rotated dims.
"""

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.formats import FLOAT32_TINY, FP8_MAX, CacheFormat
from sparsemla.kernels.common.fp8 import ceil_pow2, encode_e4m3, has_fp8
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.common.paged import paged_arguments

TINY = tl.constexpr(FLOAT32_TINY)
MAX = tl.constexpr(FP8_MAX)

ROW_TOKENS = 4
"""Rows of a program that writes a cache: one for each warp, so that no sum crosses warps."""

HEAD_DIMS = 4096
"""Query elements of a program: four 16-byte loads in flight for each of 128 threads."""

EXACT = {"enable_fp_fusion": False}
"""Products and sums round separately, as in the reference: equal rows give equal bytes."""


@triton.jit
def _row_offset(slot, PAGE_SIZE: tl.constexpr, PAGE: tl.constexpr, ROW: tl.constexpr):
    """Offset of the row of a slot, in elements."""
    return slot // PAGE_SIZE * PAGE + slot % PAGE_SIZE * ROW


@triton.jit
def _rope_pairs(dim, START: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Of dims rotated from ``START`` on: the other dim of the pair, the pair, the sine's sign."""
    r = dim - START
    if INTERLEAVED:
        is_first = r % 2 == 0
        pair = r // 2
        partner = tl.where(is_first, dim + 1, dim - 1)
    else:
        is_first = r < R // 2
        pair = tl.where(is_first, r, r - R // 2)
        partner = tl.where(is_first, dim + R // 2, dim - R // 2)
    return partner, pair, tl.where(is_first, -1.0, 1.0)


@triton.jit
def _rotate(x, other, table, pair, sign, rotated, R: tl.constexpr):
    """RoPE of ``x`` where ``rotated``; ``other`` holds the other dim of each pair."""
    cos = tl.load(table + pair, mask=rotated, other=1.0).to(tl.float32)
    sin = tl.load(table + R // 2 + pair, mask=rotated, other=0.0).to(tl.float32)
    return tl.where(rotated, x * cos + other * (sin * sign), x)


@triton.jit
def _table_row(cos_sin, positions, token, live, num_positions, stride):
    """Pointers to the rows of ``cos_sin`` of live tokens, and which tokens have one."""
    position = tl.load(positions + token, mask=live, other=-1).to(tl.int64)
    return cos_sin + position * stride, (position >= 0) & (position < num_positions)


@triton.jit
def _block_scale(x, MIN_AMAX: tl.constexpr, MIN_SCALE: tl.constexpr, POW2: tl.constexpr):
    """The scale of each row of ``x [rows, dims]``, ``[rows]``."""
    amax = tl.maximum(tl.max(tl.abs(x), axis=1), MIN_AMAX)
    scale = tl.div_rn(amax, tl.full(amax.shape, MAX, tl.float32))
    if POW2:
        return ceil_pow2(tl.maximum(scale, MIN_SCALE))
    return tl.maximum(scale, TINY)


@triton.jit
def _divide(x, scale, POW2: tl.constexpr):
    """``x [rows, dims]`` divided by ``scale [rows]``, correctly rounded."""
    if POW2:  # the reciprocal is exact
        return x * tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)[:, None]
    return tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))


@triton.jit
def _store_fp8(
    x,
    slot,
    kept,
    dim,
    real,
    block,
    fp8,
    scales,
    PAGE_SIZE: tl.constexpr,
    FP8_PAGE: tl.constexpr,
    FP8_ROW: tl.constexpr,
    SCALES_PAGE: tl.constexpr,
    SCALES_ROW: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Quantise one scale block ``x [rows, dims]``, 0 where not ``real``, and store it."""
    if scales is not None:
        scale = _block_scale(x, MIN_AMAX, MIN_SCALE, POW2)
        x = _divide(x, scale, POW2)
        target = scales + _row_offset(slot, PAGE_SIZE, SCALES_PAGE, SCALES_ROW) + block
        if scales.dtype.element_ty == tl.uint8:  # e8m0 is a float32 exponent
            tl.store(target, (scale.to(tl.uint32, bitcast=True) >> 23).to(tl.uint8), mask=kept)
        else:
            tl.store(target, scale, mask=kept)
    target = fp8 + _row_offset(slot, PAGE_SIZE, FP8_PAGE, FP8_ROW)[:, None] + dim
    tl.store(target, encode_e4m3(x, NATIVE), mask=kept[:, None] & real)


@triton.jit
def _latent(row, norm_weight, rstd, dim, live, N: tl.constexpr):
    """Dims of latent rows after RMSNorm, which covers the first ``N``."""
    x = tl.load(row + dim, mask=live, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + dim, mask=live & (dim < N), other=0.0).to(tl.float32)
    return tl.where(dim < N, x * rstd * weight, x)


@triton.jit
def _rotated_latent(
    row,
    table,
    known,
    norm_weight,
    rstd,
    dim,
    live,
    N: tl.constexpr,
    START: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Dims of latent rows after RMSNorm and RoPE."""
    x = _latent(row, norm_weight, rstd, dim, live, N)
    partner, pair, sign = _rope_pairs(dim, START, R, INTERLEAVED)
    rotated = live & known & (dim >= START)
    other = _latent(row, norm_weight, rstd, partner, rotated, N)
    return _rotate(x, other, table, pair, sign, rotated, R)


@triton.jit
def _rotated_heads(
    row,
    table,
    known,
    live,
    D: tl.constexpr,
    START: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """float32 ``[ROWS, DIMS]`` of the query heads at ``row [ROWS, 1]`` after RoPE."""
    dim = tl.arange(0, DIMS)[None, :]
    real = live & (dim < D)
    x = tl.load(row + dim, mask=real, other=0.0).to(tl.float32)
    if INTERLEAVED and START % 2 == 0:
        a, b = tl.split(tl.reshape(x, [ROWS, DIMS // 2, 2]))
        pair = tl.arange(0, DIMS // 2)[None, :] - START // 2
        rotated = known & (pair >= 0) & (pair < R // 2)
        cos = tl.load(table + pair, mask=rotated, other=1.0).to(tl.float32)
        sin = tl.load(table + R // 2 + pair, mask=rotated, other=0.0).to(tl.float32)
        first = tl.where(rotated, a * cos - b * sin, a)
        second = tl.where(rotated, a * sin + b * cos, b)
        x = tl.reshape(tl.join(first, second), [ROWS, DIMS])
    else:
        partner, pair, sign = _rope_pairs(dim, START, R, INTERLEAVED)
        partner = tl.max_contiguous(tl.multiple_of(partner, [1, ALIGN]), [1, ALIGN])
        rotated = real & known & (dim >= START) & (dim < START + R)
        other = tl.load(row + partner, mask=rotated, other=0.0).to(tl.float32)
        tl.debug_barrier()  # every pair is loaded before a thread stores over the other dim
        x = _rotate(x, other, table, pair, sign, rotated, R)
    return x


@triton.jit
def _fused_kernel(
    q,
    out,
    kv,
    cos_sin,
    norm_weight,
    positions,
    slot_mapping,
    fp8,
    scales,
    bf16,
    num_tokens,
    num_heads,
    num_positions,
    num_slots,
    row_programs,
    eps,
    q_token_stride,
    q_head_stride,
    out_token_stride,
    out_head_stride,
    kv_stride,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    FP8_PAGE: tl.constexpr,
    FP8_ROW: tl.constexpr,
    SCALES_PAGE: tl.constexpr,
    SCALES_ROW: tl.constexpr,
    BF16_PAGE: tl.constexpr,
    BF16_ROW: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGN: tl.constexpr,
    FP8_DIM: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    ROPE_FIRST: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
    NORM_DIMS: tl.constexpr,
    PLAIN_DIMS: tl.constexpr,
    ROPE_DIMS: tl.constexpr,
    HEAD_DIMS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
):
    START: tl.constexpr = D - R
    if tl.program_id(0) >= row_programs:
        flat = (tl.program_id(0) - row_programs) * ROWS + tl.arange(0, ROWS)
        token = (flat // num_heads).to(tl.int64)
        head = (flat % num_heads).to(tl.int64)
        live = token < num_tokens
        table, known = _table_row(cos_sin, positions, token, live, num_positions, table_stride)
        x = _rotated_heads(
            (q + token * q_token_stride + head * q_head_stride)[:, None],
            table[:, None],
            known[:, None],
            live[:, None],
            R,
            0,
            R,
            INTERLEAVED,
            ALIGN,
            ROWS,
            HEAD_DIMS,
        )
        dim = tl.arange(0, HEAD_DIMS)[None, :]
        target = (out + token * out_token_stride + head * out_head_stride)[:, None] + dim
        if out.dtype.element_ty == tl.uint8:
            x = encode_e4m3(x, NATIVE)
        tl.store(target, x.to(out.dtype.element_ty), mask=live[:, None] & (dim < R))
        return

    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    live = token < num_tokens
    slot = tl.load(slot_mapping + token, mask=live, other=-1).to(tl.int64)
    live = (slot >= 0) & (slot < num_slots)
    table, known = _table_row(cos_sin, positions, token, live, num_positions, table_stride)
    row, table = (kv + token * kv_stride)[:, None], table[:, None]
    known, kept = known[:, None], live[:, None]

    dim = tl.arange(0, NORM_DIMS)[None, :]
    x = tl.load(row + dim, mask=kept & (dim < N), other=0.0).to(tl.float32)
    variance = tl.div_rn(tl.sum(x * x, axis=1), tl.full([TOKENS], N, tl.float32))
    rstd = tl.div_rn(tl.full([TOKENS], 1.0, tl.float32), tl.sqrt_rn(variance + eps))[:, None]

    for block in tl.static_range(NUM_BLOCKS):
        in_block = tl.arange(0, BLOCK_DIMS)[None, :]
        dim = block * SCALE_BLOCK + in_block
        real = (in_block < SCALE_BLOCK) & (dim < FP8_DIM)
        if block * SCALE_BLOCK + SCALE_BLOCK > START:
            x = _rotated_latent(
                row, table, known, norm_weight, rstd, dim, kept & real, N, START, R, INTERLEAVED
            )
        else:
            x = _latent(row, norm_weight, rstd, dim, kept & real, N)
        _store_fp8(
            x,
            slot,
            live,
            dim,
            real,
            block,
            fp8,
            scales,
            PAGE_SIZE,
            FP8_PAGE,
            FP8_ROW,
            SCALES_PAGE,
            SCALES_ROW,
            MIN_AMAX,
            MIN_SCALE,
            POW2,
            NATIVE,
        )
    target = _row_offset(slot, PAGE_SIZE, BF16_PAGE, BF16_ROW)[:, None] - FP8_DIM
    if PLAIN_DIMS > 0:
        dim = FP8_DIM + tl.arange(0, PLAIN_DIMS)[None, :]
        real = kept & (dim < START)
        x = _latent(row, norm_weight, rstd, dim, real, N)
        tl.store(bf16 + target + dim, x.to(tl.bfloat16), mask=real)
    if ROPE_DIMS > 0:
        dim = ROPE_FIRST + tl.arange(0, ROPE_DIMS)[None, :]
        real = kept & (dim < D)
        x = _rotated_latent(
            row, table, known, norm_weight, rstd, dim, real, N, START, R, INTERLEAVED
        )
        tl.store(bf16 + target + dim, x.to(tl.bfloat16), mask=real)


def fused_rope_rmsnorm_quant(
    *,
    q_rope: Tensor,
    kv: Tensor,
    cos_sin_cache: Tensor,
    kv_norm_weight: Tensor,
    cache: PagedCache,
    positions: Tensor,
    slot_mapping: Tensor,
    eps: float,
    interleaved: bool,
    scale_mode: str,
    out: Tensor,
) -> None:
    # The first programs write rows, the others rotate heads.
    fmt = cache.format
    num_tokens, num_heads, rope_dim = q_rope.shape
    widths = _fused_widths(fmt, kv_norm_weight.shape[0], rope_dim)
    row_programs = cdiv(num_tokens, ROW_TOKENS)
    if out.dtype == torch.float8_e4m3fn:
        out = out.view(torch.uint8)
    _fused_kernel[(row_programs + cdiv(num_tokens * num_heads, widths["ROWS"]),)](
        q=q_rope,
        out=out,
        kv=kv,
        cos_sin=cos_sin_cache,
        norm_weight=kv_norm_weight,
        positions=positions,
        slot_mapping=slot_mapping,
        num_tokens=num_tokens,
        num_heads=num_heads,
        num_positions=cos_sin_cache.shape[0],
        num_slots=cache.num_slots,
        row_programs=row_programs,
        eps=eps,
        q_token_stride=q_rope.stride(0),
        q_head_stride=q_rope.stride(1),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        kv_stride=kv.stride(0),
        table_stride=cos_sin_cache.stride(0),
        MIN_AMAX=fmt.min_amax,
        MIN_SCALE=fmt.min_scale,
        POW2=scale_mode == "pow2",
        NATIVE=has_fp8(kv.device),
        INTERLEAVED=interleaved,
        TOKENS=ROW_TOKENS,
        **widths,
        **paged_arguments(cache),
        **EXACT,
    )


@functools.cache
def _fused_widths(fmt: CacheFormat, norm_dim: int, rope_dim: int) -> dict[str, int]:
    """What the fused kernel is compiled for, of dims and tiles."""
    start = fmt.head_dim - rope_dim
    rope_first = max(fmt.fp8_dim, start)
    # Without scales any width will do; one that divides 512 wastes nothing.
    block = min(fmt.scale_block or 128, fmt.fp8_dim)
    head_dims = next_power_of_2(rope_dim)
    return {
        "D": fmt.head_dim,
        "N": norm_dim,
        "R": rope_dim,
        "ALIGN": math.gcd(rope_dim // 2, 16),
        "FP8_DIM": fmt.fp8_dim,
        "SCALE_BLOCK": block,
        "NUM_BLOCKS": cdiv(fmt.fp8_dim, block) if block else 0,
        "ROPE_FIRST": rope_first,
        "BLOCK_DIMS": next_power_of_2(block),
        "NORM_DIMS": next_power_of_2(norm_dim),
        "PLAIN_DIMS": next_power_of_2(max(start - fmt.fp8_dim, 0)),
        "ROPE_DIMS": next_power_of_2(fmt.head_dim - rope_first),
        "HEAD_DIMS": head_dims,
        "ROWS": max(1, HEAD_DIMS // head_dims),
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
def _centred(row, weight, bias, mean, rstd, dim, live):
    """Dims of rows after LayerNorm."""
    x = tl.load(row + dim, mask=live, other=0.0).to(tl.float32)
    scale = tl.load(weight + dim, mask=live, other=0.0).to(tl.float32)
    shift = tl.load(bias + dim, mask=live, other=0.0).to(tl.float32)
    return (x - mean) * rstd * scale + shift


@triton.jit
def _keys_kernel(
    k,
    weight,
    bias,
    cos_sin,
    positions,
    slot_mapping,
    fp8,
    scales,
    bf16,
    num_tokens,
    num_positions,
    num_slots,
    eps,
    k_stride,
    table_stride,
    PAGE_SIZE: tl.constexpr,
    FP8_PAGE: tl.constexpr,
    FP8_ROW: tl.constexpr,
    SCALES_PAGE: tl.constexpr,
    SCALES_ROW: tl.constexpr,
    BF16_PAGE: tl.constexpr,
    BF16_ROW: tl.constexpr,
    MIN_AMAX: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    D: tl.constexpr,
    START: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STAGES: tl.constexpr,
    DIMS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    slot = tl.load(slot_mapping + token, mask=token < num_tokens, other=-1).to(tl.int64)
    kept = (slot >= 0) & (slot < num_slots)
    table, known = _table_row(cos_sin, positions, token, kept, num_positions, table_stride)
    row = (k + token * k_stride)[:, None]
    dim = tl.arange(0, DIMS)[None, :]
    real = dim < D
    live = kept[:, None] & real

    count = tl.full([TOKENS], D, tl.float32)
    x = tl.load(row + dim, mask=live, other=0.0).to(tl.float32)
    mean = tl.div_rn(tl.sum(x, axis=1), count)[:, None]
    deviation = tl.where(real, x - mean, 0.0)
    variance = tl.div_rn(tl.sum(deviation * deviation, axis=1), count)
    rstd = tl.div_rn(tl.full([TOKENS], 1.0, tl.float32), tl.sqrt_rn(variance + eps))[:, None]

    x = _centred(row, weight, bias, mean, rstd, dim, live)
    partner, pair, sign = _rope_pairs(dim, START, R, INTERLEAVED)
    rotated = live & known[:, None] & (dim >= START) & (dim < START + R)
    other = _centred(row, weight, bias, mean, rstd, partner, rotated)
    x = _rotate(x, other, table[:, None], pair, sign, rotated, R)
    x = tl.where(live, x, 0.0)
    if STAGES > 0:
        x = _hadamard(x, TOKENS, DIMS, STAGES)
    if fp8 is not None:
        _store_fp8(
            x,
            slot,
            kept,
            dim,
            real,
            0,
            fp8,
            scales,
            PAGE_SIZE,
            FP8_PAGE,
            FP8_ROW,
            SCALES_PAGE,
            SCALES_ROW,
            MIN_AMAX,
            MIN_SCALE,
            POW2,
            NATIVE,
        )
    else:
        target = bf16 + _row_offset(slot, PAGE_SIZE, BF16_PAGE, BF16_ROW)[:, None] + dim
        tl.store(target, x.to(tl.bfloat16), mask=live)


def append_index_keys(
    *,
    k: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    cos_sin_cache: Tensor,
    cache: PagedCache,
    positions: Tensor,
    slot_mapping: Tensor,
    eps: float,
    interleaved: bool,
    rope_first: bool,
    hadamard: bool,
    scale_mode: str,
) -> None:
    fmt = cache.format
    num_tokens, dim = k.shape
    rope_dim = cos_sin_cache.shape[1]
    dims = next_power_of_2(dim)
    _keys_kernel[(cdiv(num_tokens, ROW_TOKENS),)](
        k=k,
        weight=norm_weight,
        bias=norm_bias,
        cos_sin=cos_sin_cache,
        positions=positions,
        slot_mapping=slot_mapping,
        num_tokens=num_tokens,
        num_positions=cos_sin_cache.shape[0],
        num_slots=cache.num_slots,
        eps=eps,
        k_stride=k.stride(0),
        table_stride=cos_sin_cache.stride(0),
        MIN_AMAX=fmt.min_amax,
        MIN_SCALE=fmt.min_scale,
        POW2=scale_mode == "pow2",
        NATIVE=has_fp8(k.device),
        D=dim,
        START=0 if rope_first else dim - rope_dim,
        R=rope_dim,
        INTERLEAVED=interleaved,
        STAGES=dims.bit_length() - 1 if hadamard else 0,
        DIMS=dims,
        TOKENS=ROW_TOKENS,
        **paged_arguments(cache),
        **EXACT,
    )


@triton.jit
def _queries_kernel(
    q,
    weights,
    cos_sin,
    positions,
    out,
    weights_out,
    num_rows,
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
    MIN_AMAX: tl.constexpr,
    MIN_SCALE: tl.constexpr,
    SCALED: tl.constexpr,
    POW2: tl.constexpr,
    NATIVE: tl.constexpr,
    D: tl.constexpr,
    START: tl.constexpr,
    R: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALIGN: tl.constexpr,
    STAGES: tl.constexpr,
    DIMS: tl.constexpr,
    ROWS: tl.constexpr,
):
    flat = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = flat < num_rows
    token = (flat // num_heads).to(tl.int64)
    head = (flat % num_heads).to(tl.int64)
    table, known = _table_row(cos_sin, positions, token, live, num_positions, table_stride)
    x = _rotated_heads(
        (q + token * q_token_stride + head * q_head_stride)[:, None],
        table[:, None],
        known[:, None],
        live[:, None],
        D,
        START,
        R,
        INTERLEAVED,
        ALIGN,
        ROWS,
        DIMS,
    )
    if STAGES > 0:
        x = _hadamard(x, ROWS, DIMS, STAGES)
    weight = tl.load(weights + token * weights_stride + head, mask=live, other=0.0).to(tl.float32)
    weight *= factor
    if SCALED:
        scale = _block_scale(x, MIN_AMAX, MIN_SCALE, POW2)
        x = _divide(x, scale, POW2)
        weight *= scale
    tl.store(weights_out + token * weights_out_stride + head, weight, mask=live)
    if out.dtype.element_ty == tl.uint8:
        x = encode_e4m3(x, NATIVE)
    dim = tl.arange(0, DIMS)[None, :]
    target = (out + token * out_token_stride + head * out_head_stride)[:, None] + dim
    tl.store(target, x.to(out.dtype.element_ty), mask=live[:, None] & (dim < D))


def prepare_index_queries(
    *,
    q: Tensor,
    weights: Tensor,
    cos_sin_cache: Tensor,
    positions: Tensor,
    format: CacheFormat,
    interleaved: bool,
    rope_first: bool,
    hadamard: bool,
    scale_mode: str,
    out: Tensor,
    weights_out: Tensor,
) -> None:
    num_tokens, num_heads, dim = q.shape
    rope_dim = cos_sin_cache.shape[1]
    start = 0 if rope_first else dim - rope_dim
    dims = next_power_of_2(dim)
    rows = max(1, HEAD_DIMS // dims)
    if format.fp8_dim:
        out = out.view(torch.uint8)
    _queries_kernel[(cdiv(num_tokens * num_heads, rows),)](
        q=q,
        weights=weights,
        cos_sin=cos_sin_cache,
        positions=positions,
        out=out,
        weights_out=weights_out,
        num_rows=num_tokens * num_heads,
        num_heads=num_heads,
        num_positions=cos_sin_cache.shape[0],
        factor=(num_heads * dim) ** -0.5,
        q_token_stride=q.stride(0),
        q_head_stride=q.stride(1),
        weights_stride=weights.stride(0),
        out_token_stride=out.stride(0),
        out_head_stride=out.stride(1),
        weights_out_stride=weights_out.stride(0),
        table_stride=cos_sin_cache.stride(0),
        MIN_AMAX=format.min_amax,
        MIN_SCALE=format.min_scale,
        SCALED=format.num_scales > 0,
        POW2=scale_mode == "pow2",
        NATIVE=has_fp8(q.device),
        D=dim,
        START=start,
        R=rope_dim,
        INTERLEAVED=interleaved,
        ALIGN=1 if interleaved else math.gcd(rope_dim // 2, start, 16),
        STAGES=dims.bit_length() - 1 if hadamard else 0,
        DIMS=dims,
        ROWS=rows,
        **EXACT,
    )

"""Reductions over a CTA, and the search for a threshold among keys of scores.

A reduction over a CTA costs one exchange between its warps. ``W`` is the number of warps, and row w
of ``[W, N]`` belongs to warp w.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsemla.kernels.topk.triton import DEAD_KEY, as_output

INTERPOLATIONS = gl.constexpr(6)
"""Iterations by interpolation; if they do not end the search, many keys are equal or close."""


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def to_all_threads(x, W: gl.constexpr):
    """One value per warp; every thread gets all values."""
    return gl.convert_layout(x, gl.BlockedLayout([W], [32], [W], [0]))


@gluon.jit
def sum_all(x, W: gl.constexpr):
    """Sum of ``x`` [W, N] over the CTA."""
    return gl.sum(to_all_threads(gl.sum(x, 1), W), 0)


@gluon.jit
def max_all(x, W: gl.constexpr):
    """Maximum of ``x`` [W, N] over the CTA."""
    return gl.max(to_all_threads(gl.max(x, 1), W), 0)


@gluon.jit
def exclusive_sum_of_warps(x, W: gl.constexpr):
    """Exclusive prefix sum of one value per warp, and the sum over the CTA."""
    GRID: gl.constexpr = gl.BlockedLayout([1, W], [1, 32], [W, 1], [1, 0])
    every = gl.convert_layout(x, gl.SliceLayout(0, GRID))
    row = gl.arange(0, W, gl.SliceLayout(1, GRID))
    column = gl.arange(0, W, gl.SliceLayout(0, GRID))
    earlier = gl.where(column[None, :] < row[:, None], every[None, :], 0)
    total = gl.sum(every, 0)
    return gl.convert_layout(gl.sum(earlier, 1), x.type.layout), total


@gluon.jit
def _reciprocal_root(x):
    """Approximate ``1 / sqrt(x)`` in one instruction."""
    return gl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def search_threshold(key, klo, khi, clo, a, b, low, up, W: gl.constexpr):
    """A key that ``low`` to ``up`` of ``key`` [W, N] reach, else the largest that ``low`` reach.

    ``clo >= low`` keys reach ``klo``, and fewer than ``low`` reach ``khi``. Each iteration counts
    the keys at ``a <= b`` in between: first at the arguments, then around an interpolated position,
    at last at one and two thirds of the interval. Returns the key, the number of keys that reach
    it, and the number that reach the next larger key tried. The last number counts the keys above
    the returned key if more than ``up`` keys reach the returned key, or if ``low == up``.
    """
    middle = 0.5 * (low + up)
    chi = clo * 0
    turn = clo * 0
    while (klo + 1 < khi) & (clo > up):
        turn += 1
        both = sum_all(gl.where(key >= b, 0x10001, gl.where(key >= a, 1, 0)), W)
        ca = both & 0xFFFF
        cb = both >> 16
        khi = gl.where(cb >= low, khi, gl.where(ca >= low, b, a))
        chi = gl.where(cb >= low, chi, gl.where(ca >= low, cb, ca))
        klo = gl.where(cb >= low, b, gl.where(ca >= low, a, klo))
        clo = gl.where(cb >= low, cb, gl.where(ca >= low, ca, clo))
        # Position of the key if the keys of the interval are uniformly distributed.
        width = (khi - klo).to(gl.uint32).to(gl.float32)
        number = gl.maximum(clo - chi, 1).to(gl.float32)
        root = _reciprocal_root(number)
        share = (clo - middle) * (root * root)
        error = 0.25 * root
        a = klo + gl.maximum(width * (share - error), 1.0).to(gl.uint32).to(gl.int32)
        b = klo + gl.maximum(width * (share + error), 1.0).to(gl.uint32).to(gl.int32)
        if turn >= INTERPOLATIONS:
            least, most = ends_of(key, klo, khi, W)
            klo = gl.maximum(klo, least)
            khi = gl.minimum(khi, most + 1)
            third = gl.maximum((khi - klo).to(gl.uint32) // 3, 1).to(gl.int32)
            a = klo + third
            b = a + third
        a = gl.maximum(gl.minimum(a, khi - 1), klo + 1)
        b = gl.maximum(gl.minimum(b, khi - 1), a)
    return klo, clo, chi


@gluon.jit
def _add_add_max(a, b, c, d, e, f):
    return a + d, b + e, gl.maximum(c, f)


@gluon.jit
def ends_of(key, klo, khi, W: gl.constexpr):
    """The smallest and the largest of the keys in ``[klo, khi)``."""
    inside = (key >= klo) & (key < khi)
    least = max_all(gl.where(inside, -key, DEAD_KEY), W)
    return -least, max_all(gl.where(inside, key, DEAD_KEY), W)


@gluon.jit
def sums_and_max(x, y, key, W: gl.constexpr):
    """Sums of ``x`` and ``y`` [W, N], and the largest key."""
    x, y, key = gl.reduce((x, y, key), 1, _add_add_max)
    return gl.reduce(
        (to_all_threads(x, W), to_all_threads(y, W), to_all_threads(key, W)), 0, _add_add_max
    )


@gluon.jit
def exclusive_sum(x, W: gl.constexpr):
    """Exclusive prefix sum of ``x`` [W, N] in row-major order, and the sum."""
    earlier, total = exclusive_sum_of_warps(gl.sum(x, 1), W)
    inclusive = gl.associative_scan(x, 1, add)
    return earlier[:, None] + (inclusive - x), total


@gluon.jit
def store_short_row(
    out, size, k, pages, row, PAGE_SIZE: gl.constexpr, W: gl.constexpr, LINE: gl.constexpr
):
    """Store all ids of a row of at most k columns, then -1."""
    for base in range(0, k, W * 32):
        ids = base + gl.arange(0, W * 32, LINE)
        named = as_output(ids, ids < size, pages, row, PAGE_SIZE)
        gl.store(out + ids, gl.where(ids < size, named, -1), mask=ids < k)

"""Exact, deterministic top-k for Hopper: one program takes a row from sample to result.

The algorithm is that of the portable kernel (:mod:`sparsemla.kernels.topk.triton`): a sample gives
a threshold of a value and a column, and one pass lists what reaches it. What Gluon adds is where
things lie: a thread takes eight neighbouring columns, so that their places follow from each other,
and then walks through the few that are hits; a warp has its own part of the row and of the list,
which lies in shared memory too, and a sum over the program costs one exchange between its warps.

What is listed then lies in registers. Counts in shared memory give the k-th largest key digit by
digit, and sums over lanes and warps the places of what is chosen. A row that the registers of one
program hold, or those of a cluster of up to eight, needs no list: it is loaded once, and its keys
are searched like those of a list. Candidates of several parts are searched by counting in
registers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsemla.kernels.common.device import num_multiprocessors
from sparsemla.kernels.common.gluon import barrier
from sparsemla.kernels.topk import triton as portable
from sparsemla.kernels.topk.triton import Pages

DEAD_KEY = gl.constexpr(-(1 << 31))
"""Key of a lane that holds no value."""
NAN_KEY = gl.constexpr(-(1 << 31) + 1)
MINUS_INF_KEY = gl.constexpr(-(1 << 31) + 0x7FFFFF)
END_KEY = gl.constexpr(0x7F800001)
"""One above the key of +inf."""
SIGMAS = gl.constexpr(4.5)
"""Standard deviations that a threshold keeps away from a list too short or too long."""
NEIGHBOURS = gl.constexpr(16)
"""Columns that a sample takes together: memory gives 64 bytes at once."""
AHEAD = gl.constexpr(4)
"""Tiles of each warp of a slice that the L2 cache gets while the threshold is sought."""
AHEAD_OF_MANY = gl.constexpr(2)
"""The same if there are rows for all multiprocessors: more of them would not stay there."""
PLANE = gl.constexpr(256)
"""Columns that a warp takes at once, eight a thread."""
PLANES = gl.constexpr(4)
TILE = gl.constexpr(1024)
"""Columns of a step of the pass over a row, for each warp: as many as PLANES have."""
FEW_TURNS = gl.constexpr(6)
"""Turns of a search, after which hardly a value is left, or one that many columns have."""


@gluon.jit
def _bits(x):
    bits = x.to(gl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@gluon.jit
def _keys(x):
    """int32 in the order of float32 ``x``; -0 equals +0, and NaN lies below -inf."""
    return gl.where(x != x, NAN_KEY, _bits(gl.where(x == 0.0, 0.0, x)))


@gluon.jit
def _value(key):
    """The float32 that has this key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(gl.float32, bitcast=True)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _to_all(x, W: gl.constexpr):
    """One value a warp, as all of them in every thread."""
    return gl.convert_layout(x, gl.BlockedLayout([W], [32], [W], [0]))


@gluon.jit
def _sum(x, W: gl.constexpr):
    """Sum of ``x`` [W, N], whose rows are the warps'."""
    return gl.sum(_to_all(gl.sum(x, 1), W), 0)


@gluon.jit
def _max(x, W: gl.constexpr):
    return gl.max(_to_all(gl.max(x, 1), W), 0)


@gluon.jit
def _count_of_earlier(x, W: gl.constexpr):
    """Exclusive prefix sum of one value a warp, and the sum of all."""
    GRID: gl.constexpr = gl.BlockedLayout([1, W], [1, 32], [W, 1], [1, 0])
    every = gl.convert_layout(x, gl.SliceLayout(0, GRID))
    row = gl.arange(0, W, gl.SliceLayout(1, GRID))
    column = gl.arange(0, W, gl.SliceLayout(0, GRID))
    earlier = gl.where(column[None, :] < row[:, None], every[None, :], 0)
    total = gl.sum(every, 0)
    return gl.convert_layout(gl.sum(earlier, 1), x.type.layout), total


@gluon.jit
def _reciprocal_root(x):
    """Roughly, and in one instruction."""
    return gl.inline_asm_elementwise(
        "rsqrt.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _search(key, klo, khi, clo, a, b, low, up, W: gl.constexpr):
    """A key that ``low`` to ``up`` of ``key`` [W, N] reach, or else the largest that low reach.

    ``clo >= low`` keys reach ``klo`` and fewer than ``low`` reach ``khi``; ``a <= b`` between them
    are tried first. Returns the key, how many keys reach it, and how many reach the smallest larger
    one that was counted: where more than ``up`` reach the key, or with ``low == up``, the number of
    those above it.
    """
    middle = 0.5 * (low + up)
    chi = clo * 0
    turn = clo * 0
    while (klo + 1 < khi) & (clo > up):
        turn += 1
        both = _sum(gl.where(key >= b, 0x10001, gl.where(key >= a, 1, 0)), W)
        ca = both & 0xFFFF
        cb = both >> 16
        khi = gl.where(cb >= low, khi, gl.where(ca >= low, b, a))
        chi = gl.where(cb >= low, chi, gl.where(ca >= low, cb, ca))
        klo = gl.where(cb >= low, b, gl.where(ca >= low, a, klo))
        clo = gl.where(cb >= low, cb, gl.where(ca >= low, ca, clo))
        # Where the key lies if the keys between the ends are evenly distributed.
        width = (khi - klo).to(gl.uint32).to(gl.float32)
        number = gl.maximum(clo - chi, 1).to(gl.float32)
        root = _reciprocal_root(number)
        share = (clo - middle) * (root * root)
        error = 0.25 * root
        a = klo + gl.maximum(width * (share - error), 1.0).to(gl.uint32).to(gl.int32)
        b = klo + gl.maximum(width * (share + error), 1.0).to(gl.uint32).to(gl.int32)
        if turn >= FEW_TURNS:
            least, most = _ends(key, klo, khi, W)
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
def _ends(key, klo, khi, W: gl.constexpr):
    """The smallest and the largest of the keys from ``klo`` on that are below ``khi``."""
    inside = (key >= klo) & (key < khi)
    least = _max(gl.where(inside, -key, DEAD_KEY), W)
    return -least, _max(gl.where(inside, key, DEAD_KEY), W)


@gluon.jit
def _sums_and_max(x, y, key, W: gl.constexpr):
    """Sums of ``x`` and ``y`` [W, N], and the largest key."""
    x, y, key = gl.reduce((x, y, key), 1, _add_add_max)
    return gl.reduce((_to_all(x, W), _to_all(y, W), _to_all(key, W)), 0, _add_add_max)


@gluon.jit
def _quantile(share):
    """Standard deviations above the mean that a small ``share`` of normal values exceeds, roughly.

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.2.22.
    """
    t = gl.sqrt(-2.0 * gl.log(gl.minimum(share, 0.5)))
    return t - gl.fdiv(2.30753 + 0.27061 * t, 1.0 + 0.99229 * t + 0.04481 * t * t)


@gluon.jit
def _sample(x, size, SAMPLE: gl.constexpr, W: gl.constexpr):
    """Columns of a row in ascending order, some of them outside it, and their values [W, N]."""
    L: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 256 // NEIGHBOURS, NEIGHBOURS // 8], [W, 1, 1], [2, 1, 0]
    )
    CHUNKS: gl.constexpr = SAMPLE // NEIGHBOURS
    # Neighbours that memory gives at once from each of CHUNKS equal parts of the row, at uneven
    # places: rows may have a period.
    INNER: gl.constexpr = gl.SliceLayout(2, L)
    warp = gl.arange(0, W, gl.SliceLayout(1, INNER))
    place = gl.arange(0, CHUNKS // W, gl.SliceLayout(0, INNER))
    chunk = warp[:, None] * (CHUNKS // W) + place[None, :]
    room = gl.minimum(gl.maximum(size // CHUNKS - NEIGHBOURS, 0), 0x7FFF)
    jitter = (chunk * 40503 & 0xFFFF) * room >> 16
    at = (chunk.to(gl.int64) * size // CHUNKS).to(gl.int32) + jitter
    SIZE: gl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    shift = (x.to(gl.int64) % (NEIGHBOURS * SIZE)).to(gl.int32) // SIZE
    near = gl.arange(0, NEIGHBOURS, gl.SliceLayout(0, gl.SliceLayout(1, L)))
    first = (at + shift) // NEIGHBOURS * NEIGHBOURS - shift
    ids = gl.expand_dims(first, 2) + gl.expand_dims(gl.expand_dims(near, 0), 1)
    x = gl.load(x + ids, mask=(ids >= 0) & (ids < size), other=0.0)
    return gl.reshape(ids, [W, SAMPLE // W]), gl.reshape(x, [W, SAMPLE // W])


@gluon.jit
def _guess(ids, x, size, k, factor, CAPACITY: gl.constexpr, W: gl.constexpr):
    """Threshold that at least k and at most CAPACITY columns reach, most likely: key and column.

    Args:
        ids, x: a sample of the row.
        factor: 1, or what the number of columns should change by since the first guess.
    """
    SAMPLE: gl.constexpr = W * x.shape[1]
    inside = (ids >= 0) & (ids < size)
    x = x.to(gl.float32)
    key = gl.where(inside, _keys(x), DEAD_KEY)
    ratio = gl.fdiv(SAMPLE * 1.0, size.to(gl.float32))
    most = k * ratio
    # Ranks in the sample that stay clear of k and of CAPACITY; in the middle if they cannot.
    low = most + gl.sqrt(most) * SIGMAS + 2.0
    root = (gl.sqrt(ratio * (4 * CAPACITY) + SIGMAS * SIGMAS) - SIGMAS) * 0.5
    low = gl.minimum(gl.minimum(low, 0.5 * (low + root * root)) * factor, SAMPLE * 1.0)
    slack = gl.sqrt(low) * 0.3
    up = gl.maximum(low + slack, gl.minimum(low * 1.2 + 4.0, root * root))
    low = gl.minimum(low, up - 2 * slack)
    up = up.to(gl.int32)
    low = gl.maximum(low, 1.0).to(gl.int32)
    # Where these ranks should be if the scores are normally distributed.
    small = gl.where(inside & (gl.abs(x) < 1e15), x, 0.0)
    mean, square, top = _sums_and_max(small, small * small, key, W)
    mean = mean * (1.0 / SAMPLE)
    deviation = gl.sqrt(gl.maximum(square * (1.0 / SAMPLE) - mean * mean, 0.0))
    share = (low + up).to(gl.float32) * (0.5 / SAMPLE)
    dead = size * 0 + DEAD_KEY
    a = gl.maximum(_bits(mean + _quantile(1.1 * share) * deviation), DEAD_KEY + 1)
    a = gl.minimum(a, top)
    b = gl.minimum(gl.maximum(_bits(mean + _quantile(0.92 * share) * deviation), a), top)
    threshold, reached, above = _search(key, dead, top + 1, dead * 0 + SAMPLE, a, b, low, up, W)
    column = size
    if reached > up:  # a plateau; the sample lies in the order of the columns
        equal = key == threshold
        before, _ = _rank(equal.to(gl.int32), W)
        cut = gl.where(equal & (before + 1 >= (low + up) // 2 - above), ids + 1, size)
        column = -_max(-cut, W)
    return gl.maximum(threshold, MINUS_INF_KEY), column


@gluon.jit
def _rank(x, W: gl.constexpr):
    """Exclusive prefix sum of ``x`` [W, N] in the order of its elements, and the sum."""
    earlier, total = _count_of_earlier(gl.sum(x, 1), W)
    inclusive = gl.associative_scan(x, 1, _add)
    return earlier[:, None] + (inclusive - x), total


@triton.constexpr_function
def _near_ptx(capacity):
    return f"{{ .shared .align 16 .b64 near[{capacity}]; mov.u32 $0, near; }}"


@gluon.jit
def _near(any, CAPACITY: gl.constexpr):
    """Where in shared memory there is room for so many entries."""
    return gl.inline_asm_elementwise(
        _near_ptx(CAPACITY), "=r,r", [any], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _append_near(at, end, x, ids, mask):
    """In shared memory, as far as there is room."""
    gl.inline_asm_elementwise(
        """{
        .reg .pred is;
        setp.ne.s32 is, $5, 0;
        setp.lt.and.u32 is, $1, $2, is;
        @is st.shared.v2.b32 [$1], {$3, $4};
        mov.b32 $0, 0;
        }""",
        "=r,r,r,r,f,r",
        [at, end, ids, x, mask.to(gl.int32)],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _near_entries(at):
    """Ids and values of entries in shared memory, of which each thread has four neighbours."""
    ids, bits = gl.inline_asm_elementwise(
        """
        ld.shared.v4.b32 {$0, $4, $1, $5}, [$8];
        ld.shared.v4.b32 {$2, $6, $3, $7}, [$8+16];
        """,
        "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r",
        [at],
        dtype=(gl.int32, gl.int32),
        is_pure=False,
        pack=4,
    )
    return ids, bits.to(gl.float32, bitcast=True)


@gluon.jit
def _halves(entry):
    """The id and the value of an entry."""
    return entry.to(gl.int32), (entry >> 32).to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def _entries(at, live):
    return _halves(gl.load(at, mask=live, other=0))


@gluon.jit
def _append(at, x, ids, mask):
    entry = gl.inline_asm_elementwise(
        "mov.b64 $0, {$1, $2};", "=l,r,f", [ids, x], dtype=gl.int64, is_pure=True, pack=1
    )
    gl.store(at, entry, mask=mask)


@gluon.jit
def _append_rest(
    x,
    lists,
    near,
    near_end,
    count,
    value,
    ids,
    mask,
    W: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    """Append what reaches ``value`` of ``ids``, one of a thread of some warp; the new lengths."""
    values = gl.load(x + ids, mask=mask, other=float("nan")).to(gl.float32)
    hits = (values >= value).to(gl.int32)
    before, added = _of_warp(hits, W)
    _append(lists + (count + before), values, ids, values >= value)
    if near is not None:
        _append_near(near + (count + before) * 8, near_end, values, ids, values >= value)
    _, added = _of_lists(added, W, TOGETHER)
    return count + added


@gluon.jit
def _of_warp(x, W: gl.constexpr):
    """Exclusive prefix sum within each warp of a value a thread, and each warp's sum."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    rows = gl.reshape(gl.convert_layout(x, LINE, assert_trivial=True), [W, 32])
    before = gl.associative_scan(rows, 1, _add) - rows
    total = rows * 0 + gl.sum(rows, 1)[:, None]
    before = gl.convert_layout(gl.reshape(before, [W * 32]), x.type.layout, assert_trivial=True)
    total = gl.convert_layout(gl.reshape(total, [W * 32]), x.type.layout, assert_trivial=True)
    return before, total


@gluon.jit
def _of_lists(added, W: gl.constexpr, TOGETHER: gl.constexpr):
    """What earlier warps of the same list add, and all of its warps, for what each warp adds."""
    earlier = added * 0
    if TOGETHER:
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
        line = gl.convert_layout(added, LINE, assert_trivial=True)
        rows = gl.reshape(line, [W, 32])
        before, total = _count_of_earlier(gl.max(rows, 1), W)
        earlier = gl.reshape(rows * 0 + before[:, None], [W * 32])
        earlier = gl.convert_layout(earlier, added.type.layout, assert_trivial=True)
        added = added * 0 + total
    return earlier, added


@gluon.jit
def _load_plane(x, group, stop):
    """Eight neighbours from ``x`` on for each thread; of a ``group`` from ``stop`` on, anything."""
    W: gl.constexpr = x.shape[0] // 32
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [W, 1], [1, 0])
    at = x[:, None] + gl.arange(0, 8, gl.SliceLayout(0, L))[None, :]
    return gl.load(at, mask=(group < stop)[:, None])


@gluon.jit
def _level(value, over, before_cut, left):
    """What a score must reach; nothing reaches a NaN."""
    return gl.where(left > 0, gl.where(before_cut > 0, value, over), float("nan"))


@gluon.jit
def _of(x, LAYOUT: gl.constexpr):
    """The same values of the same threads."""
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _hits(x, value):
    """A bit for each of a thread's eight neighbours that reach ``value``, the first the highest."""
    LAYOUT: gl.constexpr = value.type.layout
    even, odd = gl.split(gl.reshape(x.to(gl.float32), [x.shape[0], 2, 2, 2]))
    x04, x26 = gl.split(even)
    x15, x37 = gl.split(odd)
    x0, x4 = gl.split(x04)
    x1, x5 = gl.split(x15)
    x2, x6 = gl.split(x26)
    x3, x7 = gl.split(x37)
    return gl.inline_asm_elementwise(
        """{
        .reg .pred hit;
        mov.b32 $0, 0;
        setp.ge.f32 hit, $2, $1;
        @hit or.b32 $0, $0, 128;
        setp.ge.f32 hit, $3, $1;
        @hit or.b32 $0, $0, 64;
        setp.ge.f32 hit, $4, $1;
        @hit or.b32 $0, $0, 32;
        setp.ge.f32 hit, $5, $1;
        @hit or.b32 $0, $0, 16;
        setp.ge.f32 hit, $6, $1;
        @hit or.b32 $0, $0, 8;
        setp.ge.f32 hit, $7, $1;
        @hit or.b32 $0, $0, 4;
        setp.ge.f32 hit, $8, $1;
        @hit or.b32 $0, $0, 2;
        setp.ge.f32 hit, $9, $1;
        @hit or.b32 $0, $0, 1;
        }""",
        "=&r,f,f,f,f,f,f,f,f,f",
        [
            value,
            _of(x0, LAYOUT),
            _of(x1, LAYOUT),
            _of(x2, LAYOUT),
            _of(x3, LAYOUT),
            _of(x4, LAYOUT),
            _of(x5, LAYOUT),
            _of(x6, LAYOUT),
            _of(x7, LAYOUT),
        ],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@triton.constexpr_function
def _places_ptx():
    steps = "".join(
        f"""
        shfl.sync.up.b32 more|within, ab, {lanes}, 0, -1;
        @within add.u32 ab, ab, more;
        shfl.sync.up.b32 more|within, cd, {lanes}, 0, -1;
        @within add.u32 cd, cd, more;"""
        for lanes in (1, 2, 4, 8, 16)
    )
    return f"""{{
        .reg .pred within;
        .reg .b32 a, b, c, d, ab, cd, own_ab, own_cd, more, left;
        shr.u32 a, $3, 24;
        bfe.u32 b, $3, 16, 8;
        bfe.u32 c, $3, 8, 8;
        and.b32 d, $3, 255;
        popc.b32 a, a;
        popc.b32 b, b;
        popc.b32 c, c;
        popc.b32 d, d;
        mad.lo.u32 own_ab, b, 65536, a;
        mad.lo.u32 own_cd, d, 65536, c;
        mov.b32 ab, own_ab;
        mov.b32 cd, own_cd;{steps}
        sub.u32 own_ab, ab, own_ab;
        sub.u32 own_cd, cd, own_cd;
        shfl.sync.idx.b32 ab, ab, 31, 31, -1;
        shfl.sync.idx.b32 cd, cd, 31, 31, -1;
        and.b32 left, ab, 0xffff;
        sub.u32 more, left, a;
        mad.lo.u32 $0, more, 65536, own_ab;
        shr.u32 ab, ab, 16;
        add.u32 left, left, ab;
        sub.u32 more, left, a;
        sub.u32 more, more, b;
        mad.lo.u32 own_cd, more, 65537, own_cd;
        and.b32 ab, cd, 0xffff;
        sub.u32 more, ab, c;
        mad.lo.u32 $1, more, 65536, own_cd;
        shr.u32 cd, cd, 16;
        add.u32 left, left, ab;
        add.u32 $2, left, cd;
        }}"""


@gluon.jit
def _places(hits):
    """Where a warp's hits go: plane by plane, each in the order of its columns.

    ``hits`` are eight bits for each plane, the highest for the first column. Returns 16 bits for
    each plane, of the first two and of the others: where a thread's first hit in it goes, less the
    thread's hits in earlier planes; and the number of the warp's hits.
    """
    return gl.inline_asm_elementwise(
        _places_ptx(),
        "=&r,=&r,=&r,r",
        [hits],
        dtype=(gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@triton.constexpr_function
def _append_ptx(is_float32, near):
    if is_float32:
        size, load, widen = 4, "ld.global.b32", ""
    else:  # bfloat16, the upper half of a float32
        size, load, widen = 2, "ld.global.u16", "shl.b32 value{0}, value{0}, 16;"
    find = f"""
        clz.b32 column{{0}}, hits;
        shr.u32 bit, 0x7fffffff, column{{0}};
        and.b32 hits, hits, bit;
        shr.u32 plane{{0}}, column{{0}}, 3;
        mad.lo.u32 column{{0}}, plane{{0}}, 248, column{{0}};
        mul.wide.u32 from, column{{0}}, {size};
        add.s64 from, from, $2;
        @more{{0}} {load} value{{0}}, [from];
        {widen}"""
    store = """
        mad.lo.u32 place, plane{0}, 0x22, 0x10;
        prmt.b32 place, $5, $6, place;
        and.b32 place, place, 0xffff;
        add.u32 place, place, rank;
        add.u32 rank, rank, 1;
        mul.wide.u32 to, place, 8;
        add.s64 to, to, $1;
        add.u32 column{0}, column{0}, $4;
        @more{0} st.global.v2.b32 [to], {{column{0}, value{0}}};"""
    if near:
        store += """
        mad.lo.u32 slot, place, 8, $7;
        setp.lt.and.u32 fits, slot, $8, more{0};
        @fits st.shared.v2.b32 [slot], {{column{0}, value{0}}};"""
    return f"""{{
        .reg .pred more0, more1, fits;
        .reg .b32 hits, bit, rank, place, slot, plane0, plane1, column0, column1, value0, value1;
        .reg .b64 from, to;
        mov.b32 hits, $3;
        mov.b32 rank, 0;
        setp.ne.u32 more0, hits, 0;
        @!more0 bra DONE;
        NEXT:{find.format(0)}
        setp.ne.u32 more1, hits, 0;{find.format(1)}{store.format(0)}{store.format(1)}
        setp.ne.u32 more0, hits, 0;
        @more0 bra NEXT;
        DONE:
        mov.b32 $0, 0;
        }}"""


@gluon.jit
def _append_hits(lists, near, near_end, to, x, hits, first_id, ab, cd):
    """Append the columns of a tile that are hits; each thread walks through its own, by twos.

    Args:
        lists: where the hits of each thread's warp go.
        near, near_end: where in shared memory they go too, as far as there is room.
        x: each thread's first column, whose id is ``first_id``.
        hits, ab, cd: as in :func:`_places`.
    """
    if near is None:
        gl.inline_asm_elementwise(
            _append_ptx(x.dtype.element_ty == gl.float32, False),
            "=r,l,l,r,r,r,r",
            [lists.to(gl.int64), x.to(gl.int64), hits, first_id, ab, cd],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        gl.inline_asm_elementwise(
            _append_ptx(x.dtype.element_ty == gl.float32, True),
            "=r,l,l,r,r,r,r,r,r",
            [lists.to(gl.int64), x.to(gl.int64), hits, first_id, ab, cd, near + to * 8, near_end],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _divide(x, size, index, slices, W: gl.constexpr, TOGETHER: gl.constexpr):
    """The columns of a slice, divided among its warps.

    Returns (columns before the first that memory gives in groups of eight, those in such groups,
    columns of a part, first column of each thread's warp, from the first group).
    """
    SIZE: gl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    head = ((8 * SIZE - x.to(gl.int64) % (8 * SIZE)) % (8 * SIZE)).to(gl.int32) // SIZE
    head = gl.minimum(head, size)
    end = (size - head) // 8 * 8
    LISTS: gl.constexpr = 1 if TOGETHER else W
    STEP: gl.constexpr = W // LISTS * TILE
    share = gl.cdiv(end, slices * (LISTS * STEP)) * STEP
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [W, 1], [1, 0])
    warp = gl.arange(0, W * 32, gl.SliceLayout(1, L)) // 32
    begin = (index * LISTS + warp // (W // LISTS)) * share + warp % (W // LISTS) * TILE
    return head, end, share, begin


@gluon.jit
def _fetch(groups, column, mask):
    """Bring the TILE columns from ``column`` on into the L2 cache."""
    BYTES: gl.constexpr = groups.dtype.element_ty.primitive_bitwidth // 8 * TILE
    gl.inline_asm_elementwise(
        """{
        .reg .pred some;
        setp.ne.s32 some, $2, 0;
        @some cp.async.bulk.prefetch.L2.global [$1], $3;
        mov.b32 $0, 0;
        }""",
        "=r,l,r,r",
        [(groups + column).to(gl.int64), mask.to(gl.int32), column * 0 + BYTES],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _fetch_first(
    x, size, index, slices, TILES: gl.constexpr, W: gl.constexpr, TOGETHER: gl.constexpr
):
    """Start to read the first TILES tiles of each warp."""
    head, end, share, begin = _divide(x, size, index, slices, W, TOGETHER)
    STEP: gl.constexpr = W * TILE if TOGETHER else TILE
    tile = gl.arange(0, W * 32, begin.type.layout) % 32
    column = begin + tile * STEP
    mask = (tile < TILES) & (tile * STEP < share) & (column + TILE <= end)
    _fetch(x + head, column, mask)


@gluon.jit
def _collect(
    x,
    lists,
    near,
    counts,
    limit,
    size,
    key,
    column,
    index,
    slices,
    W: gl.constexpr,
    TOGETHER: gl.constexpr,
    SHARE: gl.constexpr,
):
    """List (value bits, id) of the columns of a slice that reach a threshold, ascending.

    Either each warp has a list of its own, for a part of the slice, so that warps do not wait for
    each other; or they fill one list TOGETHER. Stores how many there are for each list. They are in
    the list only if they are at most ``limit``; a tile behind it may be written too. If ``near`` is
    given, the first SHARE entries of each warp's list are also there.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [W, 1], [1, 0])
    THREAD: gl.constexpr = gl.SliceLayout(1, L)
    key = gl.maximum(key, MINUS_INF_KEY)  # what lies below has no such value
    value = _value(key)
    over = _value(key + 1)
    # Groups of eight that memory gives at once; a few columns before and behind them are left.
    head, end, share, begin = _divide(x, size, index, slices, W, TOGETHER)
    SIZE: gl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    groups = gl.multiple_of(x + head, 8 * SIZE)
    LISTS: gl.constexpr = 1 if TOGETHER else W
    STEP: gl.constexpr = W // LISTS * TILE
    thread = gl.arange(0, W * 32, THREAD)
    warp = thread // 32
    lane = thread % 32
    which = warp // (W // LISTS)
    group = begin + lane * 8
    # The part ends with its share or with the row.
    stop = gl.minimum(begin - warp % (W // LISTS) * TILE + share, end)
    source = groups + group
    begin += head
    lists += which * (limit + TILE)
    count = thread * 0
    near_end = None
    if near is not None:
        near += warp * (SHARE * 8)
        near_end = near + SHARE * 8
    if head > 0:
        first = (index * W + warp == 0) & (lane < head)
        count = _append_rest(x, lists, near, near_end, count, value, lane, first, W, TOGETHER)
    first_id = begin + lane * 8
    tile = ()
    for i in gl.static_range(PLANES):
        tile += (_load_plane(source + i * PLANE, group + i * PLANE, stop),)
    for _ in range(0, share, STEP):
        hits = thread * 0
        following = ()
        for i in gl.static_range(PLANES):
            on = i * PLANE
            level = _level(value, over, column - (begin + on), stop - (group + on))
            hits = hits << 8 | _hits(tile[i], level)
            # Its registers are free again.
            following += (_load_plane(source + (STEP + on), group + (STEP + on), stop),)
        ab, cd, added = _places(hits)
        earlier, added = _of_lists(added, W, TOGETHER)
        # A tile too much goes behind the list, where nobody looks.
        to = gl.where(count + added <= limit, count + earlier, limit)
        _append_hits(lists + to, near, near_end, to, source, hits, first_id, ab, cd)
        count += added
        tile = following
        group += STEP
        begin += STEP
        first_id += STEP
        source += STEP
    if head + end < size:
        last = (index * W + warp == slices * W - 1) & (head + end + lane < size)
        last_value = gl.where(column > head + end, value, over)
        to = gl.minimum(count, limit)
        ids = head + end + lane
        count += _append_rest(x, lists, near, near_end, to, last_value, ids, last, W, TOGETHER) - to
    gl.store(counts + which, count, mask=thread % (W // LISTS * 32) == 0)
    return count


@gluon.jit
def _settle(x, size, k, CAPACITY: gl.constexpr, W: gl.constexpr):
    """A threshold for a row of any content, by counting passes.

    Returns (key, columns that reach it, columns that reach the next key). The first count lies in
    [k, CAPACITY], or else the threshold is the k-th largest key.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    klo = size * 0 + NAN_KEY
    clo = size
    khi = size * 0 + END_KEY
    chi = size * 0
    N: gl.constexpr = 256
    warp = gl.arange(0, W, gl.SliceLayout(1, L))
    lane = warp[:, None] * N + gl.arange(0, N, gl.SliceLayout(0, L))[None, :]
    while (klo + 1 < khi) & (clo > CAPACITY):
        span = khi.to(gl.int64) - klo
        a = klo + 1  # a plateau of equal values at the threshold is known after one pass
        b = (klo + gl.maximum(span // 3, 1)).to(gl.int32)
        c = (klo + gl.maximum(2 * span // 3, 1)).to(gl.int32)
        counts_a = lane * 0
        counts_b = lane * 0
        counts_c = lane * 0
        for base in range(0, size, W * N):
            ids = base + lane
            values = gl.load(x + ids, mask=ids < size, other=0.0).to(gl.float32)
            keys = gl.where(ids < size, _keys(values), DEAD_KEY)
            counts_a += (keys >= a).to(gl.int32)
            counts_b += (keys >= b).to(gl.int32)
            counts_c += (keys >= c).to(gl.int32)
        ca = _sum(counts_a, W)
        cb = _sum(counts_b, W)
        cc = _sum(counts_c, W)
        # In descending order of keys: c, b, a.
        khi = gl.where(cc >= k, khi, gl.where(cb >= k, c, gl.where(ca >= k, b, a)))
        chi = gl.where(cc >= k, chi, gl.where(cb >= k, cc, gl.where(ca >= k, cb, ca)))
        klo = gl.where(cc >= k, c, gl.where(cb >= k, b, gl.where(ca >= k, a, klo)))
        clo = gl.where(cc >= k, cc, gl.where(cb >= k, cb, gl.where(ca >= k, ca, clo)))
    return klo, clo, chi


@gluon.jit
def _name(ids, mask, pages, row, PAGE_SIZE: gl.constexpr):
    """What stands in the result for positions: themselves, or their slots."""
    if PAGE_SIZE > 0:
        request = gl.load(pages.request_ids + row).to(gl.int64)
        width = gl.where((request >= 0) & (request < pages.num_requests), pages.width, 0)
        column = ids // PAGE_SIZE
        at = pages.table + request * pages.stride + column
        page = gl.load(at, mask=mask & (column < width), other=-1).to(gl.int64)
        slots = gl.where(page >= 0, page * PAGE_SIZE + ids % PAGE_SIZE, -1)
        ids = slots.to(gl.int32)
    return ids


@gluon.jit
def _place(
    out,
    ids,
    key,
    threshold,
    above,
    level,
    ties,
    pages,
    row,
    PAGE_SIZE: gl.constexpr,
    W: gl.constexpr,
):
    """Store the ids of keys above the threshold, and of the first ``ties`` that equal it.

    ``above`` and ``level``: how many of either kind earlier blocks had; returned with this block's.
    """
    over = key > threshold
    equal = key == threshold
    before, total = _rank(over.to(gl.int32) + (equal.to(gl.int32) << 16), W)
    equal_before = level + (before >> 16)
    place = above + (before & 0xFFFF) + gl.minimum(equal_before, ties)
    chosen = over | (equal & (equal_before < ties))
    gl.store(out + place, _name(ids, chosen, pages, row, PAGE_SIZE), mask=chosen)
    return above + (total & 0xFFFF), level + (total >> 16)


@gluon.jit
def _sources(counts, j, pitch, LISTS: gl.constexpr):
    """Where the entries ``j`` of all lists together lie."""
    source = j
    upto = pitch * 0
    for i in range(LISTS):
        length = gl.load(counts + i)
        upto += length
        source += gl.where(j >= upto, pitch - length, 0)
    return source


@gluon.jit
def _kth_largest(values, keys, live, least, count, k, W: gl.constexpr):
    """The k-th largest of ``count`` live keys, more than k; how many reach it and exceed it.

    No live key lies below ``least``. A search takes fewest turns where the number of larger values
    falls exponentially.
    """
    low = _value(least)
    excess = gl.where(live, values - low, 0.0)
    more = _sum((keys > least).to(gl.int32), W)
    excess, _, top = _sums_and_max(excess, excess, keys, W)
    number = count.to(gl.float32)
    step = gl.fdiv(excess, number) * gl.log(gl.fdiv(number, k * 1.0))
    a = gl.minimum(gl.maximum(_bits(low + 0.95 * step), least + 1), top)
    b = gl.minimum(gl.maximum(_bits(low + 1.2 * step), a), top)
    end = gl.where(more < k, least, top) + 1
    threshold, reached, above = _search(keys, least, end, count, a, b, k, k, W)
    return threshold, reached, gl.where(more < k, more, above)


@gluon.jit
def _row(
    x,
    out,
    lists,
    near,
    counts,
    limit,
    size,
    k,
    pages,
    row,
    FRESH: gl.constexpr,
    LISTS: gl.constexpr,
    CAPACITY: gl.constexpr,
    SAMPLE: gl.constexpr,
    W: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """Write the ids of a row of more than k columns.

    A row of more than CAPACITY columns comes with LISTS lists, whose lengths are ``counts``, unless
    it is FRESH. Lists with too many entries or too few are made again. If there is room for fresh
    lists ``near``, in shared memory, they are also there, each as far as its share goes.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [W, 1], [1, 0])
    EACH: gl.constexpr = gl.BlockedLayout([LISTS], [32], [W], [0])
    N: gl.constexpr = CAPACITY // W
    warp = gl.arange(0, W, gl.SliceLayout(1, L))
    lane = gl.arange(0, N, gl.SliceLayout(0, L))
    j = warp[:, None] * N + lane[None, :]
    each = gl.arange(0, LISTS, EACH)
    exact = size < 0  # false, as a value
    count = size
    above = size * 0
    longest = size * 0
    own = warp * 0  # entries of each warp's list
    key = size * 0 + NAN_KEY
    # Mostly each list fits its share of the registers.
    pitch = limit + TILE
    SHARE: gl.constexpr = CAPACITY // LISTS
    if not FRESH:
        entry = (j * 0).to(gl.int64)
        live = j < 0
    if size > CAPACITY:
        tries = size * 0
        count = size * 0
        if not FRESH:
            tries += 1
            lengths = gl.load(counts + each)
            # Some of the entries are none: waiting for the lengths takes longer.
            of_list = gl.load(counts + j // SHARE)
            entry = gl.load(lists + (j // SHARE * pitch + j % SHARE)).to(gl.int64)
            live = j % SHARE < of_list
            key = gl.load(lists + limit).to(gl.int32)
            count = gl.sum(lengths, 0)
            longest = gl.max(lengths, 0)
        while ((count < k) | (count > CAPACITY)) & (not exact):
            column = size
            if tries < 2:
                middle = 0.5 * (k + CAPACITY)
                ratio = gl.fdiv(middle, gl.maximum(count, 1).to(gl.float32))
                factor = gl.where(tries == 0, 1.0, ratio)
                at, values = _sample(x, size, SAMPLE, W)
                if FRESH and W < 16:  # sixteen warps alone have as much on its way without
                    _fetch_first(x, size, 0, 1, AHEAD_OF_MANY, W, False)
                key, column = _guess(at, values, size, k, factor, CAPACITY, W)
            else:
                key, reached, above = _settle(x, size, k, CAPACITY, W)
                exact = reached > CAPACITY
            tries += 1
            if not exact:
                barrier()  # the lengths have been read
                if not FRESH:
                    gl.store(counts + each, each * 0)
                    barrier()
                room = limit
                if not FRESH:
                    room = size * 0 + CAPACITY
                added = _collect(
                    x, lists, near, counts, room, size, key, column, 0, 1, W, not FRESH, SHARE
                )
                barrier()  # the lists and their lengths have been written
                added = _of(added, gl.BlockedLayout([1], [32], [W], [0]))
                of_warp = gl.max(gl.reshape(added, [W, 32]), 1)
                if FRESH:
                    own = _of(of_warp, gl.SliceLayout(1, L))
                    every = _to_all(of_warp, W)
                    count = gl.sum(every, 0)
                    longest = gl.max(every, 0)
                else:
                    count = gl.max(_to_all(of_warp, W), 0)
                    longest = size
        if exact:
            over = above * 0
            level = above * 0
            for base in range(0, size, CAPACITY):
                ids = base + j
                values = gl.load(x + ids, mask=ids < size, other=0.0).to(gl.float32)
                keys = gl.where(ids < size, _keys(values), DEAD_KEY)
                over, level = _place(
                    out, ids, keys, key, over, level, k - above, pages, row, PAGE_SIZE, W
                )
    if not exact:
        ids = j
        if size <= CAPACITY:
            values = gl.load(x + j, mask=j < size, other=0.0).to(gl.float32)
            live = j < size
        else:
            if FRESH:
                live = lane[None, :] < own[:, None]
                if longest > SHARE:
                    live = j < count
                    ids, values = _entries(lists + _sources(counts, j, pitch, LISTS), live)
                elif near is None:
                    ids, values = _entries(lists + (j // SHARE * pitch + j % SHARE), live)
                else:
                    ids, values = _near_entries(near + j * 8)
            elif longest > SHARE:
                live = j < count
                ids, values = _entries(lists + _sources(counts, j, pitch, LISTS), live)
            else:
                ids, values = _halves(entry)
        keys = gl.where(live, _keys(values), DEAD_KEY)
        place = _places_of_best(keys, k, key, 1)  # all that is listed reaches the threshold
        gl.store(out + place, _name(ids, place >= 0, pages, row, PAGE_SIZE), mask=place >= 0)


@gluon.jit
def _short_row(
    out, size, k, pages, row, PAGE_SIZE: gl.constexpr, W: gl.constexpr, LINE: gl.constexpr
):
    """All ids of a row of at most k columns, then -1."""
    for base in range(0, k, W * 32):
        ids = base + gl.arange(0, W * 32, LINE)
        named = _name(ids, ids < size, pages, row, PAGE_SIZE)
        gl.store(out + ids, gl.where(ids < size, named, -1), mask=ids < k)


@gluon.jit
def _row_range(row_starts, row_ends, row, num_cols):
    """The columns of a row; the end is never below the start."""
    start = num_cols * 0
    end = num_cols
    if row_starts is not None:
        start = gl.minimum(gl.maximum(gl.load(row_starts + row), 0), num_cols).to(gl.int32)
    if row_ends is not None:
        end = gl.minimum(gl.maximum(gl.load(row_ends + row), start), num_cols).to(gl.int32)
    return start, end


# Values that the compiler knows nothing of: one kernel serves all shapes.
RUNTIME = (
    "num_rows",
    "num_cols",
    "k",
    "limit",
    "slices",
    "stride_scores",
    "stride_out",
    *Pages._fields,
)


@gluon.jit(do_not_specialize=RUNTIME)
def _collect_kernel(
    scores,
    lists,
    counts,
    row_starts,
    row_ends,
    num_cols,
    k,
    limit,
    slices,
    stride_scores,
    CAPACITY: gl.constexpr,
    SAMPLE: gl.constexpr,
    WARPS: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    """The lists of one slice of a row, and their lengths."""
    gdc_launch_dependents()
    LISTS: gl.constexpr = 1 if TOGETHER else WARPS
    row = gl.program_id(0).to(gl.int64) // slices
    index = gl.program_id(0) % slices
    start, end = _row_range(row_starts, row_ends, row, num_cols)
    size = end - start
    if (size > k) & (size > CAPACITY):
        x = scores + row * stride_scores + start
        # Every slice of the row comes to the same threshold.
        ids, values = _sample(x, size, SAMPLE, WARPS)
        _fetch_first(x, size, index, slices, AHEAD, WARPS, TOGETHER)
        key, column = _guess(ids, values, size, k, 1.0, CAPACITY, WARPS)
        first = gl.program_id(0).to(gl.int64) * LISTS
        lists += first * (limit + TILE)
        counts += first
        gl.store(lists + limit, key.to(gl.int64))
        _collect(
            x, lists, None, counts, limit, size, key, column, index, slices, WARPS, TOGETHER, 0
        )


@gluon.jit(do_not_specialize=RUNTIME)
def _finish_kernel(
    scores,
    out,
    lists,
    counts,
    row_starts,
    row_ends,
    num_cols,
    k,
    limit,
    stride_scores,
    stride_out,
    table,
    request_ids,
    num_requests,
    width,
    stride,
    LISTS: gl.constexpr,
    CAPACITY: gl.constexpr,
    SAMPLE: gl.constexpr,
    WARPS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """The ids of one row, from the lists of its slices."""
    pages = Pages(table, request_ids, num_requests, width, stride)
    gdc_launch_dependents()
    gdc_wait()
    row = gl.program_id(0).to(gl.int64)
    start, end = _row_range(row_starts, row_ends, row, num_cols)
    size = end - start
    x = scores + row * stride_scores + start
    o = out + row * stride_out
    if size <= k:
        _short_row(o, size, k, pages, row, PAGE_SIZE, WARPS, _line_of_cluster(WARPS, 1))
    else:
        lists += row * LISTS * (limit + TILE)
        counts += row * LISTS
        _row(
            x,
            o,
            lists,
            None,
            counts,
            limit,
            size,
            k,
            pages,
            row,
            False,
            LISTS,
            CAPACITY,
            SAMPLE,
            WARPS,
            PAGE_SIZE,
        )


@gluon.jit(do_not_specialize=RUNTIME)
def _select_kernel(
    scores,
    out,
    lists,
    counts,
    row_starts,
    row_ends,
    num_rows,
    num_cols,
    k,
    limit,
    stride_scores,
    stride_out,
    table,
    request_ids,
    num_requests,
    width,
    stride,
    CAPACITY: gl.constexpr,
    SAMPLE: gl.constexpr,
    WARPS: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
):
    """The ids of whole rows, one after the other: their lists take the same place."""
    pages = Pages(table, request_ids, num_requests, width, stride)
    lists += gl.program_id(0).to(gl.int64) * WARPS * (limit + TILE)
    counts += gl.program_id(0) * WARPS
    near = None
    if CAPACITY <= 4096:
        near = _near(num_rows, CAPACITY)
    for index in range(gl.program_id(0), num_rows, gl.num_programs(0)):
        row = index.to(gl.int64)
        start, end = _row_range(row_starts, row_ends, row, num_cols)
        size = end - start
        x = scores + row * stride_scores + start
        o = out + row * stride_out
        if size <= k:
            _short_row(o, size, k, pages, row, PAGE_SIZE, WARPS, _line_of_cluster(WARPS, 1))
        else:
            _row(
                x,
                o,
                lists,
                near,
                counts,
                limit,
                size,
                k,
                pages,
                row,
                True,
                WARPS,
                CAPACITY,
                SAMPLE,
                WARPS,
                PAGE_SIZE,
            )
            barrier()  # the lists have been read


HELD = 16384
"""Columns that the registers of one program hold."""
CLUSTER = 8
"""Programs that may share a row."""
DIGITS = (11, 11, 10)
"""Bits of a key that it counts by at a time, from the highest."""


@triton.constexpr_function
def _best_ptx(each, warps, ctas, bounded):
    bins = 1 << DIGITS[0]
    own = bins // (32 * warps)  # bins of a thread
    wide = min(own, 4)
    suffix = f".v{wide}" if wide > 1 else ""
    keys, steps, words = range(each), range(len(DIGITS)), range((each + 15) // 16)
    room = bins + 4  # and one for the keys that none of them counts
    code = []

    def first_bin(step):
        return 0 if bounded else step * room

    def add(text):
        code.extend(line.strip() for line in text.strip().splitlines())

    def some(name, first):
        names = [f"{name}{i}" for i in range(first, first + wide)]
        return "{" + ", ".join(names) + "}" if wide > 1 else names[0]

    def meet():
        add("""
            barrier.cluster.arrive.release.aligned;
            barrier.cluster.wait.acquire.aligned;""")

    def sum_of_lanes():
        # What this lane and those before it have, for what it has.
        for lanes in (1, 2, 4, 8, 16):
            add(f"""
                shfl.sync.up.b32 more|is, upto, {lanes}, 0, -1;
                @is add.u32 upto, upto, more;""")

    def total_of_bins():
        add("mov.b32 mine, bin0;")
        for i in range(1, own):
            add(f"add.u32 mine, mine, bin{i};")
        add("mov.b32 upto, mine;")
        sum_of_lanes()

    def sum_of_earlier_warps(step, leader, mine):
        # What one lane of each has; ``more`` is left with what each warp has, a lane for each.
        add(f"""
            @{leader} st.shared.b32 [of_warp+{128 * step}], {mine};
            bar.sync 0;
            mov.b32 more, 0;
            @a_warp ld.shared.b32 more, [of_lane+{128 * step}];
            selp.b32 before, more, 0, earlier;
            redux.sync.add.s32 before, before, -1;""")

    def vote(step, compare):
        # A byte for each four neighbours of a thread: how many of them are so, and how many there
        # are in the lanes before. Then what all earlier warps have.
        for word in words:
            add(f"mov.b32 own{word}, 0;")
        for i in keys:
            add(f"""
                setp.{compare}.u32 is, ${i}, bound;
                @is add.u32 own{i // 16}, own{i // 16}, {1 << i // 4 % 4 * 8};""")
        add("mov.b32 mine, 0;")
        for word in words:
            add(f"mov.b32 upto, own{word};")
            sum_of_lanes()
            add(f"""
                sub.u32 own{word}, upto, own{word};
                shfl.sync.idx.b32 all{word}, upto, 31, 31, -1;
                dp4a.u32.u32 mine, all{word}, 0x01010101, mine;""")
        sum_of_earlier_warps(step, "first_lane", "mine")
        if ctas > 1:
            at = 128 * (step + len(DIGITS))
            add(f"""
                redux.sync.add.s32 mine, more, -1;
                min.u32 more, lane, {ctas - 1};
                mapa.shared::cluster.u32 there, of_cta, more;
                setp.lt.u32 is, lane, {ctas};
                setp.eq.and.u32 is, warp, 0, is;
                @is st.shared::cluster.b32 [there+{at}], mine;""")
            meet()
            add(f"""
                mov.b32 mine, 0;
                setp.lt.u32 is, lane, cta;
                @is ld.shared.b32 mine, [of_lane+{at}];
                redux.sync.add.s32 mine, mine, -1;
                add.u32 before, before, mine;""")

    def ranks(compare, use):
        # How many are so before each of them, in the order of columns.
        for i in keys:
            if i % 4 == 0:
                byte = f"{i // 16}, {i // 4 % 4 * 8}, 8"
                add(f"""
                    bfe.u32 rank, own{byte};
                    add.u32 rank, rank, before;
                    bfe.u32 more, all{byte};
                    add.u32 before, before, more;""")
            add(f"""
                setp.{compare}.u32 is, ${i}, bound;
                {use.format(i)}
                @is add.u32 rank, rank, 1;""")

    add(f"""
        .reg .pred is, drop, first_lane, last_lane, a_warp, earlier;
        .reg .b32 lane, warp, cta, of_warp, of_lane, of_cta, there, base, bins, group;
        .reg .b32 bin<{own}>, one<{own}>, own<{len(words)}>, all<{len(words)}>, zero<4>;
        .reg .b32 bound, start, digit, left, count, shift, width, best;
        .reg .b32 mine, upto, before, rank, more;
        .shared .align 16 .b32 counts[{room * (1 if bounded else len(DIGITS))}];
        .shared .align 16 .b32 sums[{32 * (len(DIGITS) + 5)}];
        .shared .align 16 .b32 found[{4 * len(DIGITS)}];
        mov.u32 lane, %laneid;
        mov.u32 more, %tid.x;
        shr.u32 warp, more, 5;
        mov.b32 zero0, 0;
        mov.b32 zero1, 0;
        mov.b32 zero2, 0;
        mov.b32 zero3, 0;
        mov.u32 base, counts;
        mad.lo.u32 bins, more, {4 * own}, base;
        mov.u32 more, sums;
        mad.lo.u32 of_warp, warp, 4, more;
        mad.lo.u32 of_lane, lane, 4, more;
        setp.eq.u32 first_lane, lane, 0;
        setp.eq.u32 last_lane, lane, 31;
        setp.lt.u32 earlier, lane, warp;
        setp.lt.u32 a_warp, lane, {warps};
        mov.b32 bound, 0;
        mov.b32 shift, 32;
        sub.u32 left, ${2 * each}, 1;""")
    if ctas > 1:
        add("""
            mov.u32 cta, %cluster_ctarank;
            mad.lo.u32 of_cta, cta, 4, more;""")
    for first in sorted({first_bin(step) for step in steps}):
        for i in range(0, own, wide):
            add(f"st.shared{suffix}.b32 [bins+{4 * (first + i)}], {some('zero', 0)};")
    for i in keys:  # as unsigned numbers, the best the smallest
        add(f"xor.b32 ${i}, ${i}, 0x7fffffff;")
    if bounded:  # from the best on, so that the first digit tells keys apart that are close
        add("mov.b32 best, -1;")
        for i in keys:
            add(f"min.u32 best, best, ${i};")
        add(f"""
            redux.sync.min.u32 best, best, -1;
            @first_lane st.shared.b32 [of_warp+{128 * (len(DIGITS) + 2)}], best;
            bar.sync 0;
            mov.b32 best, -1;
            @a_warp ld.shared.b32 best, [of_lane+{128 * (len(DIGITS) + 2)}];
            redux.sync.min.u32 best, best, -1;
            xor.b32 more, ${3 * each}, 0x7fffffff;
            sub.u32 more, more, best;
            clz.b32 more, more;
            sub.u32 shift, shift, more;""")
        for i in keys:
            add(f"sub.u32 ${i}, ${i}, best;")
    else:
        add("bar.sync 0;")
    for step, bits in enumerate(DIGITS):
        # Each bin counts the keys that begin with ``bound`` and have its number as next digit.
        if bounded and step > 0:
            for i in range(0, own, wide):
                add(f"st.shared{suffix}.b32 [bins+{4 * i}], {some('zero', 0)};")
            add("bar.sync 0;")
        if bounded:
            add(f"""
                min.u32 width, shift, {DIGITS[0]};
                sub.u32 shift, shift, width;
                shl.b32 start, bound, width;""")
            by, most = "shift", bins
        else:
            by, most = 32 - sum(DIGITS[: step + 1]), 1 << bits
            add(f"shl.b32 start, bound, {bits};")
        for i in keys:
            add(f"""
                shr.u32 digit, ${i}, {by};
                sub.u32 digit, digit, start;""")
            if bounded or step > 0:
                add(f"min.u32 digit, digit, {most};")
            add(f"""
                mad.lo.u32 digit, digit, 4, base;
                red.shared.add.u32 [digit+{4 * first_bin(step)}], 1;""")
        add("bar.sync 0;")
        for i in range(0, own, wide):
            add(f"ld.shared{suffix}.b32 {some('bin', i)}, [bins+{4 * (first_bin(step) + i)}];")
        # In the bins of which thread is the key that has ``left`` before it?
        if ctas == 1:
            total_of_bins()
            sum_of_earlier_warps(step, "last_lane", "upto")
            add("""
                sub.u32 upto, upto, mine;
                add.u32 before, before, upto;
                sub.u32 digit, bins, base;
                shr.u32 digit, digit, 2;""")
        else:
            for i in range(1, own):
                add(f"add.u32 bin0, bin0, bin{i};")
            add(f"""
                redux.sync.add.s32 mine, bin0, -1;
                @first_lane st.shared.b32 [of_warp+{128 * step}], mine;""")
            meet()
            # One warp of each program looks: in the bins of which warp, then of which of its lanes.
            add(f"""
                setp.ne.u32 is, warp, 0;
                @is bra.uni FOUND{step};
                mov.b32 mine, 0;""")
            for cta in range(ctas):
                add(f"""
                    mapa.shared::cluster.u32 there, of_lane, {cta};
                    @a_warp ld.shared::cluster.b32 more, [there+{128 * step}];
                    @a_warp add.u32 mine, mine, more;""")
            add("mov.b32 upto, mine;")
            sum_of_lanes()
            add(f"""
                sub.u32 before, upto, mine;
                sub.u32 rank, left, before;
                setp.lt.u32 is, rank, mine;
                vote.sync.ballot.b32 digit, is, -1;
                clz.b32 digit, digit;
                sub.u32 digit, 31, digit;
                shfl.sync.idx.b32 left, rank, digit, 31, -1;
                mul.lo.u32 digit, digit, {32 * own};
                mad.lo.u32 digit, lane, {own}, digit;
                mad.lo.u32 group, digit, 4, base;""")
            for cta in range(ctas):
                name = "one" if cta else "bin"
                add(f"mapa.shared::cluster.u32 there, group, {cta};")
                for i in range(0, own, wide):
                    at = 4 * (first_bin(step) + i)
                    add(f"ld.shared::cluster{suffix}.b32 {some(name, i)}, [there+{at}];")
                for i in range(own if cta else 0):
                    add(f"add.u32 bin{i}, bin{i}, one{i};")
            total_of_bins()
            add("sub.u32 before, upto, mine;")
        # In all other bins ``rank``, which may be negative and so a large unsigned number, is not
        # below the count.
        add("sub.u32 rank, left, before;")
        for i in range(own):
            add(f"""
                setp.lt.u32 is, rank, bin{i};
                @is st.shared.v4.b32 [found+{16 * step}], {{digit, rank, bin{i}, zero0}};
                sub.u32 rank, rank, bin{i};
                add.u32 digit, digit, 1;""")
        add(f"""
            FOUND{step}:
            bar.sync 0;
            ld.shared.v4.b32 {{digit, left, count, more}}, [found+{16 * step}];
            add.u32 start, start, digit;
            add.u32 bound, start, 1;
            shl.b32 bound, bound, {by};
            sub.u32 bound, bound, 1;
            add.u32 more, left, 1;
            setp.eq.u32 is, more, count;
            @is bra.uni CHOSEN;
            mov.b32 bound, start;""")
    # More keys equal the last than are wanted: those in later columns are dropped.
    vote(len(DIGITS), "eq")
    ranks("eq", "setp.gt.and.u32 drop, rank, left, is; @drop mov.b32 ${0}, -1;")
    add("CHOSEN:")
    vote(len(DIGITS) + 1, "le")
    ranks("le", "selp.b32 ${0}, rank, -1, is;")
    return "{\n" + "\n".join(code) + "\n}"


@triton.constexpr_function
def _best_constraints(each):
    return ",".join(["=r"] * each + [str(i) for i in range(each)] + ["r"] * (2 * each))


@triton.constexpr_function
def _of_cluster(warps, ctas):
    """Programs of a cluster have neighbouring parts of a row, and so have their warps."""
    programs = [[1 << i, 0] for i in range(ctas.bit_length() - 1)]
    return gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0], programs)


@triton.constexpr_function
def _line_of_cluster(warps, ctas):
    programs = [[1 << i] for i in range(ctas.bit_length() - 1)]
    return gl.BlockedLayout([1], [32], [warps], [0], programs)


@gluon.jit
def _places_of_best(keys, k, least, CTAS: gl.constexpr):
    """Where the k best of k or more keys [CTAS * W, N] go, and -1 for all others.

    Neighbours are in neighbouring lanes, and a warp's keys follow those of the warp before: what is
    chosen of them goes to neighbouring places. Counts in shared memory find the digits of the k-th
    largest key one after the other, until all keys that begin with them are wanted.

    Args:
        least: not above any key that counts; None if that is not known.
        CTAS: programs of a cluster that have the keys.
    """
    W: gl.constexpr = keys.shape[0] // CTAS
    EACH: gl.constexpr = keys.shape[1] // 32
    BOUNDED: gl.constexpr = least is not None
    bound = k
    if BOUNDED:
        bound = least
    return gl.inline_asm_elementwise(
        _best_ptx(EACH, W, CTAS, BOUNDED),
        _best_constraints(EACH),
        [keys, k, bound],
        dtype=gl.int32,
        is_pure=False,
        pack=EACH,
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
    """The ids of a row of at most COLUMNS columns, each of which lies in a register."""
    if EARLY:
        gdc_launch_dependents()
    L: gl.constexpr = _of_cluster(WARPS, CTAS)
    ALL: gl.constexpr = WARPS * CTAS
    pages = Pages(table, request_ids, num_requests, width, stride)
    row = gl.program_id(0).to(gl.int64)
    warp = gl.arange(0, ALL, gl.SliceLayout(1, L))
    lane = gl.arange(0, COLUMNS // ALL, gl.SliceLayout(0, L))
    column = warp[:, None] * (COLUMNS // ALL) + lane[None, :]
    # Before it is known where the row starts and ends; no column is needed if all are chosen.
    if FOURS:
        first = scores + gl.multiple_of(row * stride_scores, 4)
        within = column // 4 * 4 < num_cols
    else:
        first = scores + row * stride_scores
        within = column < num_cols
    values = gl.load(first + column, mask=within & (num_cols > k), other=0.0)
    start, end = _row_range(row_starts, row_ends, row, num_cols)
    o = out + row * stride_out
    if end - start <= k:
        _short_row(o, end - start, k, pages, row, PAGE_SIZE, ALL, _line_of_cluster(WARPS, CTAS))
    else:
        live = (column >= start) & (column < end)
        keys = gl.where(live, _keys(values.to(gl.float32)), DEAD_KEY)
        place = _places_of_best(keys, k, None, CTAS)
        ids = _name(column - start, place >= 0, pages, row, PAGE_SIZE)
        gl.store(o + place, ids, mask=place >= 0)


@dataclass(frozen=True)
class Plan(portable.Plan):
    """How a selection is spread over the device.

    Args:
        together: the warps of a slice fill one list.
    """

    together: bool = False

    @property
    def constants(self) -> dict[str, int]:
        return {"CAPACITY": self.capacity, "SAMPLE": self.sample}

    @property
    def collect_options(self) -> dict[str, Any]:
        return {"TOGETHER": self.together, "maxnreg": self.registers}

    @property
    def finish_options(self) -> dict[str, Any]:
        return {"maxnreg": 2048 // self.finish_warps, "launch_pdl": True}

    @property
    def tile(self) -> int:
        return TILE.value

    @property
    def num_lists(self) -> int:
        """Lists of a row."""
        return self.slices if self.together else self.slices * self.num_warps

    def limit(self, num_cols: int) -> int:
        """Entries that a list has room for: all that a row may have, or all columns of its part."""
        step = TILE.value * (self.num_warps if self.together else 1)
        part = triton.cdiv(num_cols, step * self.num_lists) * step + 16
        return min(self.capacity, part)


MAX_SAMPLE = 4096
"""More costs more time than rows whose list is made twice."""
FEW_SIGMAS = 3.2
"""Standard deviations that will do: of a thousand rows, one or two lists are made twice."""


def plan(num_rows: int, num_cols: int, topk: int, device: torch.device) -> Plan:
    """The plan for rows of this size; it depends on shapes only."""
    capacity, sample = _list_and_sample(max(1, num_cols), topk)
    processors = num_multiprocessors(device)
    slices = max(1, min(64, processors // max(num_rows, 1), num_cols // (8 * TILE.value)))
    slices = 1 << (slices.bit_length() - 1)
    if slices > 1:
        together = slices * 8 > 32
        how = Plan(slices, capacity, sample, num_rows, 8, 16, 128, together=together)
    elif num_rows <= processors:
        warps = 16 if num_cols > 1 << 16 or capacity > 4096 else 8
        how = Plan(1, capacity, sample, num_rows, warps, registers=2048 // warps)
    # Several programs for each multiprocessor: some wait for memory, others count in registers.
    elif num_cols >= 1 << 16 or capacity > 4096:
        how = Plan(1, capacity, sample, min(num_rows, 2 * processors), registers=128)
    else:
        how = Plan(1, capacity, sample, min(num_rows, 4 * processors), 4, registers=128)
    return portable.within_bound(how, num_cols)


def _list_and_sample(num_cols: int, topk: int) -> tuple[int, int]:
    """Capacity of a row's list and size of its sample, powers of two, that cost least together.

    A sample has ``m = topk * sample / num_cols`` of the best k, give or take sqrt(m). A threshold
    halfway, in standard deviations, between k and the capacity keeps
    ``sqrt(m) * (sqrt(capacity / topk) - 1)`` of them from both.
    """
    choices = []
    for capacity in (2048, 4096, 8192):
        room = max((capacity / topk) ** 0.5 - 1, 1e-3)
        wanted = triton.next_power_of_2(int(num_cols / topk * (SIGMAS.value / room) ** 2))
        sample = min(max(wanted, 1024), MAX_SAMPLE)
        if room * (topk * sample / num_cols) ** 0.5 >= FEW_SIGMAS:
            choices.append((sample + 2 * capacity, capacity, sample))
    _, capacity, sample = min(choices, default=(0, 8192, 2 * MAX_SAMPLE))
    return capacity, sample


def select_topk(
    *,
    scores: Tensor,
    topk: int,
    row_starts: Tensor | None,
    row_ends: Tensor | None,
    page_table: Tensor | None = None,
    request_ids: Tensor | None = None,
    page_size: int | None = None,
    out: Tensor,
) -> None:
    """Launcher; see :func:`sparsemla.ops.topk.select_topk`."""
    num_rows, num_cols = scores.shape
    ranges = (row_starts, row_ends)
    if num_rows == 0:
        return
    how = held(num_rows, num_cols, topk, num_multiprocessors(scores.device))
    if how is not None:
        pages = portable.POSITIONS
        if page_table is not None and request_ids is not None:
            pages = Pages(page_table, request_ids, *page_table.shape, page_table.stride(0))
        launch_held(scores, topk, ranges, out, pages, page_size or 0, *how)
    else:
        how = plan(num_rows, num_cols, topk, scores.device)
        portable.in_turns(
            launch, how, scores, topk, ranges, page_table, request_ids, page_size, out
        )


def held(num_rows: int, num_cols: int, topk: int, processors: int) -> tuple[int, int] | None:
    """Columns that programs hold a row of this size in, and how many do; None if lists are faster.

    Clusters of more than two programs do not fill all multiprocessors.
    """
    columns = max(2048, triton.next_power_of_2(num_cols))
    if num_rows > processors and num_cols > max(4096, 8 * topk):
        return None
    ctas = 1
    if columns > HELD:
        most = max(processors // (2 * num_rows), 2 if 2 * num_rows <= processors else 1)
        ctas = min(CLUSTER, columns // 8192, 1 << (most.bit_length() - 1))
    return (columns, ctas) if columns <= HELD * ctas else None


def launch_held(
    scores: Tensor,
    topk: int,
    ranges: tuple[Tensor | None, Tensor | None],
    out: Tensor,
    pages: Pages,
    page_size: int,
    columns: int,
    ctas: int,
) -> None:
    """A cluster of programs for each row, which hold it."""
    num_rows, num_cols = scores.shape
    warps = min(32, columns // ctas // 256)
    _held_kernel[(num_rows,)](
        scores,
        out,
        *ranges,
        num_cols,
        topk,
        scores.stride(0),
        out.stride(0),
        *pages,
        COLUMNS=columns,
        WARPS=warps,
        CTAS=ctas,
        FOURS=num_cols % 4 == scores.stride(0) % 4 == 0,
        PAGE_SIZE=page_size,
        # Where all run at once, see kernels/common/early.py.
        EARLY=num_rows <= num_multiprocessors(scores.device),
        num_warps=warps,
        num_ctas=ctas,
        maxnreg=min(255, 2048 // warps),
    )


launch = functools.partial(
    portable.launch, kernels=(_select_kernel, _collect_kernel, _finish_kernel)
)
"""Carry out a plan, for all rows at once."""


@gluon.jit
def _from_lane(x, step):
    """``x`` of the threads whose lanes differ by ``step`` in one bit."""
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
    """The smaller of two in the place without the bit ``step``, the larger in the one with it."""
    return gl.where((i & step) == 0, gl.minimum(x, other), gl.maximum(x, other))


@gluon.jit
def _sort(x, i):
    """``x [N]`` in ascending order; neighbours ``i`` lie in the lanes of a warp."""
    size = 2
    while size <= x.shape[0]:
        # A bitonic sort, every other run of which descends: as complements they ascend too.
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
    """The best candidates that a group of PARTS parts offers for a row.

    They are candidates again if ``out_values`` is given, otherwise the result, in order.
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
    keys = gl.where(live, _keys(x), DEAD_KEY)
    one = live.to(gl.int32)
    count, _, least = _sums_and_max(one, one, gl.where(live, -keys, -END_KEY), W)
    least = -least
    chosen = live
    if count > k:
        threshold, reached, above = _kth_largest(x, keys, live, least, count, k, W)
        chosen = keys >= threshold
        if reached > k:  # of equal values, those with the lowest ids
            equal = keys == threshold
            rank = gl.where(equal, -1 - ids, DEAD_KEY)
            klo, most = _ends(rank, DEAD_KEY + 1, 0, W)
            khi = most + 1
            middle = klo + ((khi - klo).to(gl.uint32) // 2).to(gl.int32)
            left = k - above
            cut, _, _ = _search(rank, klo, khi, reached - above, middle, middle, left, left, W)
            chosen = (keys > threshold) | (equal & (rank >= cut))
    place, total = _rank(chosen.to(gl.int32), W)
    total = gl.minimum(total, k)  # more are chosen only if ids are not distinct
    chosen = chosen & (place < k)
    out += group * stride_group + row * stride_out
    gl.store(out + place, ids, mask=chosen)
    i = gl.arange(0, SORTED, LINE)
    if out_values is not None:
        out_values += group * stride_group + row * stride_out
        gl.store(out_values + place, _value(keys), mask=chosen)
        gl.store(out + i, -1, mask=(i >= total) & (i < k))
    else:
        barrier()  # the ids have been written
        line = gl.load(out + i, mask=i < total, other=0x7FFFFFFF)
        before = gl.load(out + i - 1, mask=(i > 0) & (i < total), other=-1)
        barrier()  # and read
        # Parts that follow each other, with their candidates in order, need no sorting.
        if gl.max((before > line).to(gl.int32), 0) > 0:
            line = _sort(line, i)
        gl.store(out + i, gl.where(i < total, line, -1), mask=i < k)


MERGE_BLOCK = 16384
"""Candidates of a row that the registers of one program hold."""


def merge_topk(*, values: Tensor, indices: Tensor, topk: int, out: Tensor) -> None:
    """Launcher; see :func:`sparsemla.ops.topk.merge_topk`.

    Of more candidates than a program holds, groups of parts are merged first.
    """
    num_parts, num_rows, width = values.shape
    if topk > MERGE_BLOCK // 4 or width > MERGE_BLOCK // 2:
        portable.merge_topk(values=values, indices=indices, topk=topk, out=out)
        return
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
        merge_topk(values=some_values, indices=some, topk=topk, out=out)

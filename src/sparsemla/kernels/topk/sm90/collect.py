"""The pass over a row, or a slice of it, that lists the candidates that reach a threshold.

A thread compares eight neighbouring columns in each of four planes and then loops over its few
hits. Two packed prefix sums give the positions of a warp's hits in column order. Each warp has its
own part of the slice and its own list, unless all warps fill one list together. Where one CTA
handles the whole row, the beginning of each list is also in shared memory.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsemla.kernels.topk.sm90.keys import add, exclusive_sum_of_warps
from sparsemla.kernels.topk.triton import (
    MINUS_INF_KEY,
    value_of_key,
)

PREFETCHED = gl.constexpr(4)
"""Tiles of each warp of a slice, prefetched into L2 while the threshold is computed."""


PREFETCHED_BY_MANY = gl.constexpr(2)
"""The number of these tiles if rows occupy all multiprocessors: L2 would evict more."""


PLANE = gl.constexpr(256)
"""Columns of one load of a warp, eight per thread."""


PLANES = gl.constexpr(4)


TILE = gl.constexpr(1024)
"""Columns of one iteration of a warp: PLANES planes."""


@triton.constexpr_function
def _entries_ptx(capacity):
    return f"{{ .shared .align 16 .b64 near[{capacity}]; mov.u32 $0, near; }}"


@gluon.jit
def allocate_entries(any, CAPACITY: gl.constexpr):
    """Allocate entries in shared memory; returns their address. ``any`` is an arbitrary operand."""
    return gl.inline_asm_elementwise(
        _entries_ptx(CAPACITY), "=r,r", [any], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _append_shared(at, end, x, ids, mask):
    """Append entries in shared memory; drops entries from ``end`` on."""
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
def load_shared_entries(at):
    """Ids and values of entries in shared memory; a thread loads four neighbours."""
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
def unpack_entries(entry):
    """Ids and values of packed entries."""
    return entry.to(gl.int32), (entry >> 32).to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def load_entries(at, live):
    return unpack_entries(gl.load(at, mask=live, other=0))


@gluon.jit
def _append(at, x, ids, mask):
    entry = gl.inline_asm_elementwise(
        "mov.b64 $0, {$1, $2};", "=l,r,f", [ids, x], dtype=gl.int64, is_pure=True, pack=1
    )
    gl.store(at, entry, mask=mask)


@gluon.jit
def _append_edge(
    x,
    lists,
    shared,
    shared_end,
    count,
    value,
    ids,
    mask,
    W: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    """Append the columns ``ids``, one per thread, that reach ``value``; returns the new lengths."""
    values = gl.load(x + ids, mask=mask, other=float("nan")).to(gl.float32)
    hits = (values >= value).to(gl.int32)
    before, added = _scan_warps(hits, W)
    _append(lists + (count + before), values, ids, values >= value)
    if shared is not None:
        _append_shared(shared + (count + before) * 8, shared_end, values, ids, values >= value)
    _, added = _scan_lists(added, W, TOGETHER)
    return count + added


@gluon.jit
def _scan_warps(x, W: gl.constexpr):
    """Exclusive prefix sum of one value per thread across each warp, and the sum of the warp."""
    LINE: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
    rows = gl.reshape(gl.convert_layout(x, LINE, assert_trivial=True), [W, 32])
    before = gl.associative_scan(rows, 1, add) - rows
    total = rows * 0 + gl.sum(rows, 1)[:, None]
    before = gl.convert_layout(gl.reshape(before, [W * 32]), x.type.layout, assert_trivial=True)
    total = gl.convert_layout(gl.reshape(total, [W * 32]), x.type.layout, assert_trivial=True)
    return before, total


@gluon.jit
def _scan_lists(added, W: gl.constexpr, TOGETHER: gl.constexpr):
    """Numbers of entries that earlier warps, and all warps, add to the same list."""
    earlier = added * 0
    if TOGETHER:
        LINE: gl.constexpr = gl.BlockedLayout([1], [32], [W], [0])
        line = gl.convert_layout(added, LINE, assert_trivial=True)
        rows = gl.reshape(line, [W, 32])
        before, total = exclusive_sum_of_warps(gl.max(rows, 1), W)
        earlier = gl.reshape(rows * 0 + before[:, None], [W * 32])
        earlier = gl.convert_layout(earlier, added.type.layout, assert_trivial=True)
        added = added * 0 + total
    return earlier, added


@gluon.jit
def _load_plane(x, group, stop):
    """Eight neighbours per thread, from ``x`` on; undefined for groups from ``stop`` on."""
    W: gl.constexpr = x.shape[0] // 32
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [W, 1], [1, 0])
    at = x[:, None] + gl.arange(0, 8, gl.SliceLayout(0, L))[None, :]
    return gl.load(at, mask=(group < stop)[:, None])


@gluon.jit
def _threshold_of_plane(value, over, before_cut, left):
    """The threshold for eight columns; after the end NaN, which no score reaches."""
    return gl.where(left > 0, gl.where(before_cut > 0, value, over), float("nan"))


@gluon.jit
def in_layout(x, LAYOUT: gl.constexpr):
    """Change the layout but not the thread of any value."""
    return gl.convert_layout(x, LAYOUT, assert_trivial=True)


@gluon.jit
def _hits(x, value):
    """A bit for each of a thread's eight neighbours that reach ``value``, the first one highest."""
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
            in_layout(x0, LAYOUT),
            in_layout(x1, LAYOUT),
            in_layout(x2, LAYOUT),
            in_layout(x3, LAYOUT),
            in_layout(x4, LAYOUT),
            in_layout(x5, LAYOUT),
            in_layout(x6, LAYOUT),
            in_layout(x7, LAYOUT),
        ],
        dtype=gl.int32,
        is_pure=True,
        pack=1,
    )


@triton.constexpr_function
def _hit_positions_ptx():
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
def _hit_positions(hits):
    """Positions of a warp's hits in its list: plane by plane, in column order.

    ``hits`` has eight bits for each of four planes, the highest for the first column. Returns

    - ``ab`` and ``cd``, 16 bits for each of planes 0, 1 and 2, 3: the position of a thread's first
      hit in the plane, minus the thread's hits in earlier planes;
    - the number of hits of the warp.
    """
    return gl.inline_asm_elementwise(
        _hit_positions_ptx(),
        "=&r,=&r,=&r,r",
        [hits],
        dtype=(gl.int32, gl.int32, gl.int32),
        is_pure=False,
        pack=1,
    )


@triton.constexpr_function
def _append_ptx(is_float32, shared):
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
    if shared:
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
def _append_hits(lists, shared, shared_end, to, x, hits, first_id, ab, cd):
    """Append the hits of a tile; each thread loops over its own, two at a time.

    Args:
        lists: end of the list of each thread's warp.
        shared, shared_end: its copy in shared memory.
        to: length of the list.
        x: each thread's first column; its id is ``first_id``.
        hits, ab, cd: as in :func:`_hit_positions`.
    """
    if shared is None:
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
            [
                lists.to(gl.int64),
                x.to(gl.int64),
                hits,
                first_id,
                ab,
                cd,
                shared + to * 8,
                shared_end,
            ],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def _partition(x, size, index, slices, W: gl.constexpr, TOGETHER: gl.constexpr):
    """Partition the columns of a slice among its warps.

    Returns (columns before the first aligned group of eight, columns in such groups, columns of a
    part, first column of each thread's warp, counted from the first group).
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
def _prefetch(groups, column, mask):
    """Prefetch TILE columns from ``column`` on into L2."""
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
def prefetch_tiles(
    x, size, index, slices, TILES: gl.constexpr, W: gl.constexpr, TOGETHER: gl.constexpr
):
    """Prefetch the first TILES tiles of each warp into L2."""
    head, end, share, begin = _partition(x, size, index, slices, W, TOGETHER)
    STEP: gl.constexpr = W * TILE if TOGETHER else TILE
    tile = gl.arange(0, W * 32, begin.type.layout) % 32
    column = begin + tile * STEP
    mask = (tile < TILES) & (tile * STEP < share) & (column + TILE <= end)
    _prefetch(x + head, column, mask)


@gluon.jit
def collect(
    x,
    lists,
    shared,
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
    """Append (value bits, id) of the columns of a slice that reach a threshold, in column order.

    Each warp has its own part of the slice and its own list, so warps do not wait for each other;
    with TOGETHER, all warps fill one list. Stores the number of candidates per list in ``counts``.
    A list is complete only if it has at most ``limit`` entries; up to a tile after the limit may
    be overwritten. With ``shared``, its first SHARE entries are also stored in shared memory.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [W, 1], [1, 0])
    THREAD: gl.constexpr = gl.SliceLayout(1, L)
    key = gl.maximum(key, MINUS_INF_KEY)  # lower keys belong to NaN
    value = value_of_key(key)
    over = value_of_key(key + 1)
    # Aligned groups of eight; the few columns before and after them are handled separately.
    head, end, share, begin = _partition(x, size, index, slices, W, TOGETHER)
    SIZE: gl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    groups = gl.multiple_of(x + head, 8 * SIZE)
    LISTS: gl.constexpr = 1 if TOGETHER else W
    STEP: gl.constexpr = W // LISTS * TILE
    thread = gl.arange(0, W * 32, THREAD)
    warp = thread // 32
    lane = thread % 32
    which = warp // (W // LISTS)
    group = begin + lane * 8
    # The part ends after its share or at the end of the row.
    stop = gl.minimum(begin - warp % (W // LISTS) * TILE + share, end)
    source = groups + group
    begin += head
    lists += which * (limit + TILE)
    count = thread * 0
    shared_end = None
    if shared is not None:
        shared += warp * (SHARE * 8)
        shared_end = shared + SHARE * 8
    if head > 0:
        first = (index * W + warp == 0) & (lane < head)
        count = _append_edge(x, lists, shared, shared_end, count, value, lane, first, W, TOGETHER)
    first_id = begin + lane * 8
    tile = ()
    for i in gl.static_range(PLANES):
        tile += (_load_plane(source + i * PLANE, group + i * PLANE, stop),)
    for _ in range(0, share, STEP):
        hits = thread * 0
        following = ()
        for i in gl.static_range(PLANES):
            on = i * PLANE
            level = _threshold_of_plane(value, over, column - (begin + on), stop - (group + on))
            hits = hits << 8 | _hits(tile[i], level)
            # Load the next tile into the registers of the plane just compared.
            following += (_load_plane(source + (STEP + on), group + (STEP + on), stop),)
        ab, cd, added = _hit_positions(hits)
        earlier, added = _scan_lists(added, W, TOGETHER)
        # Once a list is full, tiles are written after its limit and never read.
        to = gl.where(count + added <= limit, count + earlier, limit)
        _append_hits(lists + to, shared, shared_end, to, source, hits, first_id, ab, cd)
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
        count += (
            _append_edge(x, lists, shared, shared_end, to, last_value, ids, last, W, TOGETHER) - to
        )
    gl.store(counts + which, count, mask=thread % (W // LISTS * 32) == 0)
    return count

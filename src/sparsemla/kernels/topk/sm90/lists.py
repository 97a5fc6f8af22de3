"""One pass over a row, or a slice of it, that lists what reaches a threshold.

A thread takes eight neighbouring columns, so that their places follow from each other, and then
walks through the few that are hits; a warp has its own part of the row and of the list, which lies
in shared memory too where one program takes the whole row.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparsemla.kernels.topk.sm90.keys import MINUS_INF_KEY, count_of_earlier, plus, value_of

AHEAD = gl.constexpr(4)
"""Tiles of each warp of a slice that the L2 cache gets while the threshold is sought."""


AHEAD_OF_MANY = gl.constexpr(2)
"""The same if there are rows for all multiprocessors: more of them would not stay there."""


PLANE = gl.constexpr(256)
"""Columns that a warp takes at once, eight a thread."""


PLANES = gl.constexpr(4)


TILE = gl.constexpr(1024)
"""Columns of a step of the pass over a row, for each warp: as many as PLANES have."""


@triton.constexpr_function
def _near_ptx(capacity):
    return f"{{ .shared .align 16 .b64 near[{capacity}]; mov.u32 $0, near; }}"


@gluon.jit
def room_near(any, CAPACITY: gl.constexpr):
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
def load_near(at):
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
def halves_of(entry):
    """The id and the value of an entry."""
    return entry.to(gl.int32), (entry >> 32).to(gl.int32).to(gl.float32, bitcast=True)


@gluon.jit
def load_entries(at, live):
    return halves_of(gl.load(at, mask=live, other=0))


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
    before = gl.associative_scan(rows, 1, plus) - rows
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
        before, total = count_of_earlier(gl.max(rows, 1), W)
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
def in_layout(x, LAYOUT: gl.constexpr):
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
def fetch_first(
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
def collect(
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
    value = value_of(key)
    over = value_of(key + 1)
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

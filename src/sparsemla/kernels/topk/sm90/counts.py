"""The best keys of a program, or of a cluster of programs, by counts in shared memory.

The keys lie in registers. Counts of 11, 11 and 10 bits give the k-th largest one digit by
digit, and sums over lanes and warps the places of what is chosen. The programs of a cluster read
each other's counts.
"""

from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

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
def of_cluster(warps, ctas):
    """Programs of a cluster have neighbouring parts of a row, and so have their warps."""
    programs = [[1 << i, 0] for i in range(ctas.bit_length() - 1)]
    return gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0], programs)


@triton.constexpr_function
def line_of_cluster(warps, ctas):
    programs = [[1 << i] for i in range(ctas.bit_length() - 1)]
    return gl.BlockedLayout([1], [32], [warps], [0], programs)


@gluon.jit
def places_of_best(keys, k, least, CTAS: gl.constexpr):
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

"""Exact selection of the k best of keys that lie in registers, by a radix search in shared memory.

The keys of a CTA, or of a cluster of CTAs, are searched digit by digit, from the highest: each step
builds a histogram of 2048 bins in shared memory, finds the bin of the k-th best key and keeps its
digit. Digits have 11, 11 and 10 bits, so three steps settle any key; the search stops early when
all keys of a bin are wanted. Prefix sums over lanes, warps and CTAs then give each chosen key its
position in the output, in the order of columns. CTAs of a cluster read each other's histograms and
sums through distributed shared memory.

The search is one block of PTX, for its atomics on shared memory and its loads from other CTAs. Each
phase below is a function that returns its text. They share these registers:

    $i      key i of a thread, flipped so that the best key is the smallest
    bound   digits found so far; from label CHOSEN on, the last key that is chosen
    start   bound, with a zero for the digit that is sought
    left    keys that still precede the k-th best, among keys that start with bound
    count   keys in the bin of the k-th best
    before  sum over earlier threads, warps or CTAs (exclusive)
    upto    sum over this and earlier lanes (inclusive)
    mine    this thread's, warp's or CTA's share of such a sum
    own     matches of a thread, then of earlier lanes: a byte for each four keys
    all     matches of the warp: a byte for each four keys

Each exchange between warps has its own row of 32 words in ``sums``, so that no exchange waits
until an earlier one has been read.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

DIGITS = (11, 11, 10)
"""Bits of the digits of a key, from the highest."""


@dataclass(frozen=True)
class Search:
    """Sizes of a search; Triton 3.6 would make a named tuple a plain one between these functions.

    Args:
        keys: of a thread.
        warps: of a CTA.
        ctas: of the cluster.
        bounded: a lower bound of the keys is known. Keys are then counted from the best key, and
            digits begin at the highest bit of the distance between best and bound: close keys fall
            into different bins from the first step on. One histogram serves all steps.
        bins: of a thread, out of the ``2 ** DIGITS[0]`` of a histogram.
        wide: bins per vector load or store.
        words: registers for a thread's counts of matches, a byte for each four keys.
    """

    keys: int
    warps: int
    ctas: int
    bounded: bool
    bins: int
    wide: int
    words: int


@triton.constexpr_function
def _search(keys, warps, ctas, bounded):
    bins = (1 << DIGITS[0]) // (32 * warps)
    return Search(keys, warps, ctas, bounded, bins, min(bins, 4), (keys + 15) // 16)


@triton.constexpr_function
def _histogram_words():
    """Words of a histogram: its bins, one word for keys outside of them, and padding."""
    return (1 << DIGITS[0]) + 4


@triton.constexpr_function
def _first_bin(search, step):
    """First word of the histogram of a step."""
    return 0 if search.bounded else step * _histogram_words()


@triton.constexpr_function
def _digit_shift(search, step):
    """Bits below the digit of a step: a register if they depend on the range of the keys."""
    return "shift" if search.bounded else 32 - sum(DIGITS[: step + 1])


@triton.constexpr_function
def _suffix(search):
    """The vector suffix of loads and stores of bins."""
    return f".v{search.wide}" if search.wide > 1 else ""


@triton.constexpr_function
def _registers(search, name, first):
    """Neighbouring registers as the operand of a vector load or store."""
    names = [f"{name}{i}" for i in range(first, first + search.wide)]
    return "{" + ", ".join(names) + "}" if search.wide > 1 else names[0]


@triton.constexpr_function
def _declare(search):
    """Registers and shared memory."""
    bins, words = search.bins, search.words
    histograms = 1 if search.bounded else len(DIGITS)
    return f"""
        .reg .pred is, drop, first_lane, last_lane, a_warp, earlier;
        .reg .b32 lane, warp, cta, of_warp, of_lane, of_cta, there, base, bins, group;
        .reg .b32 bin<{bins}>, one<{bins}>, own<{words}>, all<{words}>, zero<4>;
        .reg .b32 bound, start, digit, left, count, shift, width, best;
        .reg .b32 mine, upto, before, rank, more;
        .shared .align 16 .b32 counts[{_histogram_words() * histograms}];
        .shared .align 16 .b32 sums[{32 * (len(DIGITS) + 5)}];
        .shared .align 16 .b32 found[{4 * len(DIGITS)}];
        """


@triton.constexpr_function
def _set_up(search):
    """Addresses and predicates of the thread; at first, k - 1 keys precede the k-th best."""
    text = f"""
        mov.u32 lane, %laneid;
        mov.u32 more, %tid.x;
        shr.u32 warp, more, 5;
        mov.b32 zero0, 0;
        mov.b32 zero1, 0;
        mov.b32 zero2, 0;
        mov.b32 zero3, 0;
        mov.u32 base, counts;
        mad.lo.u32 bins, more, {4 * search.bins}, base;
        mov.u32 more, sums;
        mad.lo.u32 of_warp, warp, 4, more;
        mad.lo.u32 of_lane, lane, 4, more;
        setp.eq.u32 first_lane, lane, 0;
        setp.eq.u32 last_lane, lane, 31;
        setp.lt.u32 earlier, lane, warp;
        setp.lt.u32 a_warp, lane, {search.warps};
        mov.b32 bound, 0;
        mov.b32 shift, 32;
        sub.u32 left, ${2 * search.keys}, 1;
        """
    if search.ctas > 1:
        text += """
        mov.u32 cta, %cluster_ctarank;
        mad.lo.u32 of_cta, cta, 4, more;
        """
    return text


@triton.constexpr_function
def _clear_bins(search, step):
    """Zeros in the thread's bins of a histogram."""
    suffix, zeros, first = _suffix(search), _registers(search, "zero", 0), _first_bin(search, step)
    return "".join(
        f"st.shared{suffix}.b32 [bins+{4 * (first + i)}], {zeros};\n"
        for i in range(0, search.bins, search.wide)
    )


@triton.constexpr_function
def _load_bins(search, step, name, address, space):
    """The bins of a histogram at an address, into registers of this name."""
    suffix, first = _suffix(search), _first_bin(search, step)
    return "".join(
        f"ld.{space}{suffix}.b32 {_registers(search, name, i)}, [{address}+{4 * (first + i)}];\n"
        for i in range(0, search.bins, search.wide)
    )


@triton.constexpr_function
def _cluster_barrier():
    """Wait for all threads of the cluster, and for their accesses to shared memory."""
    return """
        barrier.cluster.arrive.release.aligned;
        barrier.cluster.wait.acquire.aligned;
        """


@triton.constexpr_function
def _scan_warp():
    """``upto``: inclusive prefix sum of ``upto`` across the warp."""
    return "".join(
        f"""
        shfl.sync.up.b32 more|is, upto, {lanes}, 0, -1;
        @is add.u32 upto, upto, more;
        """
        for lanes in (1, 2, 4, 8, 16)
    )


@triton.constexpr_function
def _scan_bins(search):
    """``mine``: sum of the thread's bins. ``upto``: inclusive prefix sum of it across the warp."""
    text = "mov.b32 mine, bin0;\n"
    text += "".join(f"add.u32 mine, mine, bin{i};\n" for i in range(1, search.bins))
    return text + "mov.b32 upto, mine;\n" + _scan_warp()


@triton.constexpr_function
def _exchange_in_cta(row, leader, value):
    """``before``: sum of ``value``, from lane ``leader`` of each warp, over earlier warps.

    Lane i of ``more`` is left with the value of warp i.
    """
    return f"""
        @{leader} st.shared.b32 [of_warp+{128 * row}], {value};
        bar.sync 0;
        mov.b32 more, 0;
        @a_warp ld.shared.b32 more, [of_lane+{128 * row}];
        selp.b32 before, more, 0, earlier;
        redux.sync.add.s32 before, before, -1;
        """


@triton.constexpr_function
def _exchange_in_cluster(search, row):
    """Add to ``before`` the sum over earlier CTAs; lane i of ``more`` has the sum of warp i.

    Lane i of the first warp sends the sum of its CTA to CTA i, so that each reads its own memory.
    """
    return (
        f"""
        redux.sync.add.s32 mine, more, -1;
        min.u32 more, lane, {search.ctas - 1};
        mapa.shared::cluster.u32 there, of_cta, more;
        setp.lt.u32 is, lane, {search.ctas};
        setp.eq.and.u32 is, warp, 0, is;
        @is st.shared::cluster.b32 [there+{128 * row}], mine;
        """
        + _cluster_barrier()
        + f"""
        mov.b32 mine, 0;
        setp.lt.u32 is, lane, cta;
        @is ld.shared.b32 mine, [of_lane+{128 * row}];
        redux.sync.add.s32 mine, mine, -1;
        add.u32 before, before, mine;
        """
    )


@triton.constexpr_function
def _flip_keys(search):
    """Turn keys into unsigned numbers; the best key is the smallest."""
    return "".join(f"xor.b32 ${i}, ${i}, 0x7fffffff;\n" for i in range(search.keys))


@triton.constexpr_function
def _count_from_best(search, row):
    """Subtract the best key of the CTA from all; ``shift``: bits of its distance to the bound."""
    least = "".join(f"min.u32 best, best, ${i};\n" for i in range(search.keys))
    subtract = "".join(f"sub.u32 ${i}, ${i}, best;\n" for i in range(search.keys))
    return f"""
        mov.b32 best, -1;
        {least}
        redux.sync.min.u32 best, best, -1;
        @first_lane st.shared.b32 [of_warp+{128 * row}], best;
        bar.sync 0;
        mov.b32 best, -1;
        @a_warp ld.shared.b32 best, [of_lane+{128 * row}];
        redux.sync.min.u32 best, best, -1;
        xor.b32 more, ${3 * search.keys}, 0x7fffffff;
        sub.u32 more, more, best;
        clz.b32 more, more;
        sub.u32 shift, shift, more;
        {subtract}
        """


@triton.constexpr_function
def _count_digits(search, step):
    """The histogram of the next digit over the keys that start with ``bound``.

    All other keys are counted in the word after the bins.
    """
    if search.bounded:
        text = f"""
        min.u32 width, shift, {DIGITS[0]};
        sub.u32 shift, shift, width;
        shl.b32 start, bound, width;
        """
    else:
        text = f"shl.b32 start, bound, {DIGITS[step]};\n"
    for i in range(search.keys):
        text += f"""
        shr.u32 digit, ${i}, {_digit_shift(search, step)};
        sub.u32 digit, digit, start;
        """
        if search.bounded or step > 0:
            outside = 1 << (DIGITS[0] if search.bounded else DIGITS[step])
            text += f"min.u32 digit, digit, {outside};\n"
        text += f"""
        mad.lo.u32 digit, digit, 4, base;
        red.shared.add.u32 [digit+{4 * _first_bin(search, step)}], 1;
        """
    return text + "bar.sync 0;\n"


@triton.constexpr_function
def _scan_cta(search, step):
    """``before``: keys in bins of earlier threads. ``digit``: the thread's first bin."""
    return (
        _load_bins(search, step, "bin", "bins", "shared")
        + _scan_bins(search)
        + _exchange_in_cta(step, "last_lane", "upto")
        + """
        sub.u32 upto, upto, mine;
        add.u32 before, before, upto;
        sub.u32 digit, bins, base;
        shr.u32 digit, digit, 2;
        """
    )


@triton.constexpr_function
def _scan_cluster(search, step):
    """:func:`_scan_cta` over the histograms of all CTAs; only the first warp of each CTA goes on.

    It adds up the counts of all warps of all CTAs, finds the warp with the k-th best key in its
    bins, and then spreads the bins of that warp over its own lanes.
    """
    text = _load_bins(search, step, "bin", "bins", "shared")
    text += "".join(f"add.u32 bin0, bin0, bin{i};\n" for i in range(1, search.bins))
    text += f"""
        redux.sync.add.s32 mine, bin0, -1;
        @first_lane st.shared.b32 [of_warp+{128 * step}], mine;
        """
    text += _cluster_barrier()
    text += f"""
        setp.ne.u32 is, warp, 0;
        @is bra.uni FOUND{step};
        mov.b32 mine, 0;
        """
    for cta in range(search.ctas):
        text += f"""
        mapa.shared::cluster.u32 there, of_lane, {cta};
        @a_warp ld.shared::cluster.b32 more, [there+{128 * step}];
        @a_warp add.u32 mine, mine, more;
        """
    text += "mov.b32 upto, mine;\n" + _scan_warp()
    text += f"""
        sub.u32 before, upto, mine;
        sub.u32 rank, left, before;
        setp.lt.u32 is, rank, mine;
        vote.sync.ballot.b32 digit, is, -1;
        clz.b32 digit, digit;
        sub.u32 digit, 31, digit;
        shfl.sync.idx.b32 left, rank, digit, 31, -1;
        mul.lo.u32 digit, digit, {32 * search.bins};
        mad.lo.u32 digit, lane, {search.bins}, digit;
        mad.lo.u32 group, digit, 4, base;
        """
    for cta in range(search.ctas):
        name = "one" if cta else "bin"
        text += f"mapa.shared::cluster.u32 there, group, {cta};\n"
        text += _load_bins(search, step, name, "there", "shared::cluster")
        for i in range(search.bins if cta else 0):
            text += f"add.u32 bin{i}, bin{i}, one{i};\n"
    return text + _scan_bins(search) + "sub.u32 before, upto, mine;\n"


@triton.constexpr_function
def _publish_bin(search, step):
    """The thread that has the bin of the k-th best key stores the bin for all threads.

    For all other bins, ``rank`` is at least the count: a negative rank is a large unsigned number.
    """
    text = "sub.u32 rank, left, before;\n"
    for i in range(search.bins):
        text += f"""
        setp.lt.u32 is, rank, bin{i};
        @is st.shared.v4.b32 [found+{16 * step}], {{digit, rank, bin{i}, zero0}};
        sub.u32 rank, rank, bin{i};
        add.u32 digit, digit, 1;
        """
    return text


@triton.constexpr_function
def _extend_bound(search, step):
    """Append the digit to ``bound``; leave the search if all keys of the bin are wanted."""
    return f"""
        FOUND{step}:
        bar.sync 0;
        ld.shared.v4.b32 {{digit, left, count, more}}, [found+{16 * step}];
        add.u32 start, start, digit;
        add.u32 bound, start, 1;
        shl.b32 bound, bound, {_digit_shift(search, step)};
        sub.u32 bound, bound, 1;
        add.u32 more, left, 1;
        setp.eq.u32 is, more, count;
        @is bra.uni CHOSEN;
        mov.b32 bound, start;
        """


@triton.constexpr_function
def _count_matches(search, compare, row):
    """Count the matches, keys for which ``compare`` with ``bound`` holds, in the order of columns.

    A thread's keys are groups of four neighbours, and each group is followed by a group of the next
    lane. So a byte for each group counts the matches of earlier lanes (``own``) and of the warp
    (``all``); ``before`` counts the matches of earlier warps and CTAs.
    """
    text = "".join(f"mov.b32 own{word}, 0;\n" for word in range(search.words))
    for i in range(search.keys):
        text += f"""
        setp.{compare}.u32 is, ${i}, bound;
        @is add.u32 own{i // 16}, own{i // 16}, {1 << i // 4 % 4 * 8};
        """
    text += "mov.b32 mine, 0;\n"
    for word in range(search.words):
        text += f"mov.b32 upto, own{word};\n" + _scan_warp()
        text += f"""
        sub.u32 own{word}, upto, own{word};
        shfl.sync.idx.b32 all{word}, upto, 31, 31, -1;
        dp4a.u32.u32 mine, all{word}, 0x01010101, mine;
        """
    text += _exchange_in_cta(row, "first_lane", "mine")
    if search.ctas > 1:
        text += _exchange_in_cluster(search, row + len(DIGITS))
    return text


@triton.constexpr_function
def _rank_matches(search, compare, use):
    """``rank``: matches before each key. ``use`` is the instruction for key ``${0}``."""
    text = ""
    for i in range(search.keys):
        if i % 4 == 0:
            byte = f"{i // 16}, {i // 4 % 4 * 8}, 8"
            text += f"""
        bfe.u32 rank, own{byte};
        add.u32 rank, rank, before;
        bfe.u32 more, all{byte};
        add.u32 before, before, more;
        """
        text += f"""
        setp.{compare}.u32 is, ${i}, bound;
        {use.format(i)}
        @is add.u32 rank, rank, 1;
        """
    return text


@triton.constexpr_function
def _find_bound(search):
    """Find the digits of the k-th best key, one after the other."""
    text = ""
    for step in range(len(DIGITS)):
        if search.bounded and step > 0:
            text += _clear_bins(search, step) + "bar.sync 0;\n"
        text += _count_digits(search, step)
        text += (_scan_cta if search.ctas == 1 else _scan_cluster)(search, step)
        text += _publish_bin(search, step) + _extend_bound(search, step)
    return text


@triton.constexpr_function
def _drop_late_ties(search, row):
    """With too many keys equal to the k-th best, turn the later ones into the worst key."""
    use = "setp.gt.and.u32 drop, rank, left, is; @drop mov.b32 ${0}, -1;"
    return _count_matches(search, "eq", row) + _rank_matches(search, "eq", use)


@triton.constexpr_function
def _store_ranks(search, row):
    """Replace each key by its position in the output, or by -1."""
    use = "selp.b32 ${0}, rank, -1, is;"
    return _count_matches(search, "le", row) + _rank_matches(search, "le", use)


@triton.constexpr_function
def _search_ptx(keys, warps, ctas, bounded):
    """The search as PTX; operands: the results, the keys in their registers, k and the bound."""
    search = _search(keys, warps, ctas, bounded)
    ties, chosen, best = range(len(DIGITS), len(DIGITS) + 3)  # rows of sums, after the digits'
    text = _declare(search) + _set_up(search)
    for step in range(1 if bounded else len(DIGITS)):
        text += _clear_bins(search, step)
    text += _flip_keys(search)
    text += _count_from_best(search, best) if bounded else "bar.sync 0;\n"
    text += _find_bound(search) + _drop_late_ties(search, ties)
    text += "CHOSEN:\n" + _store_ranks(search, chosen)
    lines = [line.strip() for line in text.splitlines()]
    return "{\n" + "\n".join(line for line in lines if line) + "\n}"


@triton.constexpr_function
def _constraints(keys):
    return ",".join(["=r"] * keys + [str(i) for i in range(keys)] + ["r"] * (2 * keys))


@triton.constexpr_function
def cluster_layout(warps, ctas):
    """Layout of keys ``[CTAs * warps, columns]``: one row for each warp of the cluster."""
    of_ctas = [[1 << i, 0] for i in range(ctas.bit_length() - 1)]
    return gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0], of_ctas)


@triton.constexpr_function
def cluster_line_layout(warps, ctas):
    """Layout of a vector over all threads of the cluster."""
    of_ctas = [[1 << i] for i in range(ctas.bit_length() - 1)]
    return gl.BlockedLayout([1], [32], [warps], [0], of_ctas)


@gluon.jit
def rank_best(keys, k, least, CTAS: gl.constexpr):
    """Output positions of the k best of at least k keys ``[CTAS * W, N]``; -1 for all other keys.

    Chosen keys keep the order of their columns, and ties go to the lower column.

    Args:
        least: a lower bound of the k best keys, or None.
        CTAS: CTAs of the cluster; each has a contiguous part of the columns.
    """
    W: gl.constexpr = keys.shape[0] // CTAS
    EACH: gl.constexpr = keys.shape[1] // 32
    BOUNDED: gl.constexpr = least is not None
    bound = k
    if BOUNDED:
        bound = least
    return gl.inline_asm_elementwise(
        _search_ptx(EACH, W, CTAS, BOUNDED),
        _constraints(EACH),
        [keys, k, bound],
        dtype=gl.int32,
        is_pure=False,
        pack=EACH,
    )

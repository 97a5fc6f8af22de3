"""Searches in ascending lists, in Triton."""

import triton
import triton.language as tl


@triton.jit
def smaller_entries(values, length, value, LAST: tl.constexpr):
    """The number of entries of an ascending list that are smaller than each ``value``.

    ``LAST`` is no smaller than any of these.
    """
    step = 1
    while 2 * step <= length:
        step *= 2
    smaller = tl.zeros_like(value).to(tl.int32)
    while step > 0:
        place = smaller + step
        found = tl.load(values + place - 1, mask=place <= length, other=LAST)
        smaller = tl.where(found < value, place, smaller)
        step = step // 2
    return smaller

"""Slots of page ids, in Triton."""

import triton
import triton.language as tl


@triton.jit
def slot_of(page, offset, PAGE_SIZE: tl.constexpr):
    """int32 slots of int64 page ids; -1 if an id is negative or its slot does not fit int32."""
    known = (page >= 0) & (page <= (1 << 31) // PAGE_SIZE)  # before a product that may wrap
    slot = tl.where(known, page, -1) * PAGE_SIZE + offset
    return tl.where((slot >= 0) & (slot < (1 << 31)), slot, -1).to(tl.int32)

"""Slots of page ids and of keys, in Triton."""

import triton
import triton.language as tl


@triton.jit
def is_slot(slots, num_slots):
    """``0 <= slots < num_slots`` in one comparison. A ``num_slots`` of 1 is a constant."""
    if slots.dtype == tl.int32:
        inside = slots.to(tl.uint32, bitcast=True) < tl.cast(num_slots, tl.uint32)
    else:
        inside = slots.to(tl.uint64, bitcast=True) < tl.cast(num_slots, tl.uint64)
    return inside


@triton.jit
def slot_of(page, offset, PAGE_SIZE: tl.constexpr):
    """int32 slots of int64 page ids; -1 if an id is negative or its slot does not fit int32."""
    known = (page >= 0) & (page <= (1 << 31) // PAGE_SIZE)  # before a product that may wrap
    slot = tl.where(known, page, -1) * PAGE_SIZE + offset
    return tl.where((slot >= 0) & (slot < (1 << 31)), slot, -1).to(tl.int32)


@triton.jit
def slots_of_keys(
    page_table,
    request,
    key,
    listed,
    num_requests,
    table_width,
    table_stride,
    PAGE_SIZE: tl.constexpr,
):
    """int32 slots of int64 keys of int64 requests; -1 if a key is not listed or has no page."""
    column = key // PAGE_SIZE
    found = listed & (request >= 0) & (request < num_requests) & (column < table_width)
    page = tl.load(page_table + request * table_stride + column, mask=found, other=-1)
    return slot_of(page.to(tl.int64), key % PAGE_SIZE, PAGE_SIZE)

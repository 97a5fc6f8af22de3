"""Device code that the Hopper attention kernels share: tiles of rows, blocks of keys."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparsemla.kernels.attention.rows import load_length, rows_of_tile
from sparsemla.kernels.attention.sm90.layouts import (
    BLOCK_M,
    BLOCK_N,
    LIST,
    S_ROWS,
)
from sparsemla.kernels.common.gluon import opaque_zero


class KeyBlocks(NamedTuple):
    """Blocks ``first .. last`` of a split: first of the main stream, then of the extra stream.

    ``main_end`` and ``extra_end``: ends of the split's part in each list of keys.
    """

    main_keys: object
    extra_keys: object
    main_end: object
    extra_end: object
    num_main: object
    first: object
    last: object


@gluon.jit
def allocate_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """An array of initialised barriers. A copying thread arrives when its copies land.

    Each purpose has an array: between accesses to the same one, the compiler puts a ``bar.sync``.
    """
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for b in gl.static_range(COUNT):
        mbarrier.init(barriers.index(b), count=ARRIVALS)
    return barriers


@gluon.jit
def locate_tile(tile, shape):
    """The first row of a tile, its split, its request and the first token of its group."""
    num_tiles = gl.cdiv(shape.num_rows, BLOCK_M)
    group = tile // num_tiles // shape.num_splits
    begin = tile % num_tiles * BLOCK_M
    split = tile // num_tiles % shape.num_splits
    request = (group // shape.group_tokens).to(gl.int64)
    return begin, split, request, (group % shape.group_tokens).to(gl.int64)


@gluon.jit
def to_bf16(x):
    """float32 to bfloat16 two at a time: the compiler converts values with two uses one by one."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def to_f16(x):
    """float32 to float16 two at a time."""
    return gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], dtype=gl.float16, is_pure=True, pack=2
    )


@gluon.jit
def store_key_limits(limits, stream, shape, begin, request, first, CAUSAL: gl.constexpr):
    """Store the number of keys that each row sees, and return the largest number."""
    length = stream.num_keys
    if stream.lengths is not None:
        length = load_length(stream, request, first).to(gl.int32)
    end = gl.maximum(gl.minimum(length, stream.num_keys), 0)
    if CAUSAL:
        token, _, real = rows_of_tile(begin, shape, BLOCK_M, S_ROWS)
        query_len = shape.num_rows // shape.num_heads
        limit = gl.minimum(end, length - query_len + 1 + token.to(gl.int32))
        limits.store(limit)
        end = gl.max(gl.where(real, limit, 0), 0)
    return end


@gluon.jit
def end_of_valid_slots(keys, first, last, num_slots, CHUNK: gl.constexpr):
    """One past the last valid slot in part of a list, so that an unused tail costs no block."""
    end = first
    for start in range(first, last, CHUNK):
        at = start + gl.arange(0, CHUNK, LIST)
        slots = gl.load(keys + at, mask=at < last, other=-1).to(gl.int64)
        valid = (slots >= 0) & (slots < num_slots)
        end = gl.maximum(end, gl.max(gl.where(valid, at + 1, 0), 0))
    return end


@gluon.jit
def load_slots(keys, at, end, num_slots, L: gl.constexpr, PAGED: gl.constexpr):
    """Load the slots of the keys ``at``, -1 for invalid ones."""
    real = at < end
    if PAGED:
        page = gl.load(keys + at // L.page_size, mask=real, other=-1).to(gl.int64)
        valid = (page >= 0) & (page < num_slots // L.page_size)
        slot = page * L.page_size + at % L.page_size
    else:
        slot = gl.load(keys + at, mask=real, other=-1).to(gl.int64)
        valid = (slot >= 0) & (slot < num_slots)
    return gl.where(valid, slot, -1).to(gl.int32)


@gluon.jit
def load_block_slots(
    blocks,
    block,
    main,
    extra,
    L: gl.constexpr,
    EXTRA: gl.constexpr,
    PAGED: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """Load the slots of a block of keys from the stream that the block belongs to."""
    at = block * BLOCK_N + gl.arange(0, BLOCK_N, LAYOUT)
    if EXTRA is None:
        slots = load_slots(blocks.main_keys, at, blocks.main_end, main.num_slots, L, PAGED)
    else:
        if block < blocks.num_main:
            slots = load_slots(blocks.main_keys, at, blocks.main_end, main.num_slots, L, PAGED)
        else:
            at -= blocks.num_main * BLOCK_N
            slots = load_slots(
                blocks.extra_keys, at, blocks.extra_end, extra.num_slots, EXTRA, PAGED
            )
    return slots


@gluon.jit
def find_key_blocks(tile, main, extra, shape, limits, EXTRA: gl.constexpr, CAUSAL: gl.constexpr):
    """Find the blocks of a tile's split, and store the number of keys that each row sees."""
    begin, split, request, token = locate_tile(tile, shape)
    keys = main.keys + request * main.keys_request + token * main.keys_token
    end = store_key_limits(limits, main, shape, begin, request, token, CAUSAL)
    num_blocks = gl.cdiv(end, BLOCK_N)
    if EXTRA is None:
        total = num_blocks
        extra_end = end
        extra_keys = keys
    else:
        extra_keys = extra.keys + request * extra.keys_request + token * extra.keys_token
        extra_end = store_key_limits(limits, extra, shape, begin, request, token, False)
        # Triton 3.6 fails if a list of one block is a constant, as for a width of 1.
        num_blocks += opaque_zero(split)
        total = num_blocks + gl.cdiv(extra_end, BLOCK_N)
    blocks = gl.cdiv(total, shape.num_splits)
    first = split * blocks
    last = gl.minimum(first + blocks, total)
    end = gl.minimum(last * BLOCK_N, end)
    extra_end = gl.minimum((last - num_blocks) * BLOCK_N, extra_end)
    return KeyBlocks(keys, extra_keys, end, extra_end, num_blocks, first, last)


@gluon.jit
def end_of_valid_blocks(blocks, main, extra, EXTRA: gl.constexpr, PAGED: gl.constexpr):
    """One past the last block of the split that has a valid key."""
    last = blocks.last
    if not PAGED:
        if EXTRA is None:
            end = end_of_valid_slots(
                blocks.main_keys, blocks.first * BLOCK_N, blocks.main_end, main.num_slots, 1024
            )
            last = gl.cdiv(end, BLOCK_N)
        else:
            begin = gl.maximum(blocks.first - blocks.num_main, 0) * BLOCK_N
            end = end_of_valid_slots(
                blocks.extra_keys, begin, blocks.extra_end, extra.num_slots, 1024
            )
            if end > begin:
                last = blocks.num_main + gl.cdiv(end, BLOCK_N)
            else:
                end = end_of_valid_slots(
                    blocks.main_keys, blocks.first * BLOCK_N, blocks.main_end, main.num_slots, 1024
                )
                last = gl.cdiv(end, BLOCK_N)
    return last


@gluon.jit
def group_of_program(shape):
    """The split of this CTA, its request and the first token of its group."""
    group = gl.program_id(0) // shape.num_splits
    split = (gl.program_id(0) % shape.num_splits).to(gl.int64)
    request = (group // shape.group_tokens).to(gl.int64)
    return split, request, (group % shape.group_tokens).to(gl.int64)


@gluon.jit
def rows_of_group(shape, N: gl.constexpr, LAYOUT: gl.constexpr):
    """Token in the group, head and validity of a group's rows."""
    row = gl.arange(0, N, LAYOUT)
    token = (row // shape.num_heads).to(gl.int64)
    return token, (row % shape.num_heads).to(gl.int64), row < shape.num_rows

"""Cache slots of selected, visible and new keys; cache rows in a bfloat16 workspace. In Triton.

Shapes: T tokens, K top-k, B requests, W pages of a request.
"""

import functools

import triton
import triton.language as tl

from sparsemla.formats import CacheFormat
from sparsemla.kernels.common.fp4 import unpack_e2m1
from sparsemla.kernels.common.fp8 import decode_e4m3, decode_scale, has_fp8
from sparsemla.kernels.common.integers import cdiv, next_power_of_2
from sparsemla.kernels.common.paged import cache_arguments
from sparsemla.kernels.common.slots import slot_of, slots_of_keys
from sparsemla.kernels.gather.arguments import EntrySlots, GatherDequant, ToSlots, VisibleSlots

SLOTS_BLOCK = 1024
"""Indices of a program: two 16-byte loads per thread, with 128 threads."""

ENTRIES_BLOCK = 128
"""Tokens of a program that finds their entries: one for each thread."""

GATHER_DIMS = 2048
"""Dims of a program: four 16-byte loads of e4m3 per thread of a warp, or eight of bfloat16."""

REQUEST_BLOCK = 32
"""Requests that a gather program compares its rows with at once."""


@triton.jit(do_not_specialize=["num_requests", "num_prefills"])
def _slots_kernel(
    indices,
    page_table,
    request_ids,
    workspace_starts,
    prefill_ids,
    out,
    topk,
    num_blocks,
    num_requests,
    num_prefills,
    table_width,
    indices_stride,
    table_stride,
    out_stride,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = (tl.program_id(0) // num_blocks).to(tl.int64)
    column = tl.program_id(0) % num_blocks * BLOCK + tl.arange(0, BLOCK)
    within = column < topk
    index = tl.load(indices + token * indices_stride + column, mask=within, other=-1)
    page_index = index // PAGE_SIZE

    # A request or prefill with a number out of range has no pages.
    request = tl.load(request_ids + token).to(tl.int64)
    cache_pages = tl.where((request >= 0) & (request < num_requests), table_width, 0)
    if prefill_ids is not None:
        prefill = tl.load(prefill_ids + token).to(tl.int64)
        workspace_pages = tl.where((prefill >= 0) & (prefill < num_prefills), table_width, 0)
        cache_pages = tl.where(prefill < 0, cache_pages, 0)
    entry = page_table + request * table_stride + page_index
    in_cache = (index >= 0) & (page_index < cache_pages)
    page = tl.load(entry, mask=in_cache, other=-1).to(tl.int64)
    result = slot_of(page, index % PAGE_SIZE, PAGE_SIZE)
    if prefill_ids is not None:
        start = tl.load(workspace_starts + prefill, mask=workspace_pages > 0, other=0).to(tl.int64)
        in_workspace = (index >= 0) & (page_index < workspace_pages)
        row = start + index
        row = tl.where((row >= 0) & (row < 1 << 31), row, -1).to(tl.int32)
        result = tl.where(in_workspace, row, result)
    tl.store(out + token * out_stride + column, result, mask=within)


def to_slots(call: ToSlots) -> None:
    topk_indices, page_table, out = call.topk_indices, call.page_table, call.out
    workspace_starts = call.workspace_starts
    num_tokens, topk = topk_indices.shape
    num_blocks = cdiv(topk, SLOTS_BLOCK)
    _slots_kernel[(num_tokens * num_blocks,)](
        topk_indices,
        page_table,
        call.request_ids,
        workspace_starts,
        call.prefill_request_ids,
        out,
        topk,
        num_blocks,
        page_table.shape[0],
        0 if workspace_starts is None else workspace_starts.shape[0],
        page_table.shape[1],
        topk_indices.stride(0),
        page_table.stride(0),
        out.stride(0),
        PAGE_SIZE=call.page_size,
        BLOCK=SLOTS_BLOCK,
    )


@triton.jit(do_not_specialize=["num_tokens", "num_requests"])
def _entry_slots_kernel(
    positions,
    page_table,
    request_ids,
    out,
    num_tokens,
    num_requests,
    table_width,
    table_stride,
    RATIO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    within = token < num_tokens
    position = tl.load(positions + token, mask=within, other=-1).to(tl.int64)
    request = tl.load(request_ids + token, mask=within, other=-1).to(tl.int64)
    completes = (position >= 0) & (position % RATIO == RATIO - 1)
    slot = slots_of_keys(
        page_table,
        request,
        position // RATIO,
        completes,
        num_requests,
        table_width,
        table_stride,
        PAGE_SIZE,
    )
    tl.store(out + token, slot, mask=within)


def entry_slots(call: EntrySlots) -> None:
    positions, page_table = call.positions, call.page_table
    num_tokens = positions.shape[0]
    _entry_slots_kernel[(cdiv(num_tokens, ENTRIES_BLOCK),)](
        positions,
        page_table,
        call.request_ids,
        call.out,
        num_tokens,
        page_table.shape[0],
        page_table.shape[1],
        page_table.stride(0),
        RATIO=call.ratio,
        PAGE_SIZE=call.page_size,
        BLOCK=ENTRIES_BLOCK,
    )


@triton.jit(do_not_specialize=["num_requests"])
def _visible_slots_kernel(
    positions,
    page_table,
    request_ids,
    out,
    lengths,
    width,
    num_blocks,
    num_requests,
    table_width,
    table_stride,
    out_stride,
    RATIO: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = (tl.program_id(0) // num_blocks).to(tl.int64)
    block = tl.program_id(0) % num_blocks
    column = block * BLOCK + tl.arange(0, BLOCK)
    position = tl.load(positions + token).to(tl.int64)
    request = tl.load(request_ids + token).to(tl.int64)
    known = (request >= 0) & (request < num_requests)
    seen = tl.where(known, tl.maximum(position + 1, 0) // RATIO, 0)
    length = tl.minimum(seen, width)
    slot = slots_of_keys(
        page_table,
        request,
        seen - length + column,
        column < length,
        num_requests,
        table_width,
        table_stride,
        PAGE_SIZE,
    )
    tl.store(out + token * out_stride + column, slot, mask=column < width)
    if block == 0:
        tl.store(lengths + token, length.to(tl.int32))


def visible_slots(call: VisibleSlots) -> None:
    positions, page_table, width, out = call.positions, call.page_table, call.width, call.out
    num_tokens = positions.shape[0]
    block = min(next_power_of_2(width), SLOTS_BLOCK)
    num_blocks = cdiv(width, block)
    _visible_slots_kernel[(num_tokens * num_blocks,)](
        positions,
        page_table,
        call.request_ids,
        out,
        call.lengths,
        width,
        num_blocks,
        page_table.shape[0],
        page_table.shape[1],
        page_table.stride(0),
        out.stride(0),
        RATIO=call.ratio,
        PAGE_SIZE=call.page_size,
        BLOCK=block,
    )


@triton.jit
def _owners(row, seq_lens, workspace_starts, num_requests, BLOCK: tl.constexpr):
    """The last request that owns each row of the workspace, or -1."""
    owner = tl.full(row.shape, -1, tl.int32)
    for first in range(0, num_requests, BLOCK):
        request = first + tl.arange(0, BLOCK)
        listed = request < num_requests
        start = tl.load(workspace_starts + request, mask=listed, other=0).to(tl.int64)
        length = tl.load(seq_lens + request, mask=listed, other=0).to(tl.int64)
        owned = (row[:, None] >= start[None, :]) & (row[:, None] < (start + length)[None, :])
        owner = tl.maximum(owner, tl.max(tl.where(owned, request[None, :], -1), axis=1))
    return owner


@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["num_requests"])
def _gather_kernel(
    rows,
    page_table,
    seq_lens,
    workspace_starts,
    seq_starts,
    out,
    num_rows,
    num_requests,
    table_width,
    table_stride,
    L: tl.constexpr,
    OUT_ROW: tl.constexpr,
    FP8_DIM: tl.constexpr,
    BF16_DIM: tl.constexpr,
    SCALE_BLOCK: tl.constexpr,
    BLOCK_DIMS: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
    BF16_DIMS: tl.constexpr,
    ROWS: tl.constexpr,
    REQUESTS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    request = _owners(row, seq_lens, workspace_starts, num_requests, REQUESTS)
    covered = (request >= 0) & (row < num_rows)
    if tl.max(covered.to(tl.int32)) == 0:
        return

    request = request.to(tl.int64)
    position = row - tl.load(workspace_starts + request, mask=covered, other=0)
    if seq_starts is not None:
        position += tl.load(seq_starts + request, mask=covered, other=0)
    page_index = position // L.page_size
    listed = covered & (position >= 0) & (page_index < table_width)
    page = tl.load(page_table + request * table_stride + page_index, mask=listed, other=-1)
    # A row of a request without a valid page becomes zero.
    found = (page >= 0) & (page < rows.num_slots // L.page_size)
    page = page.to(tl.int64)
    offset = position % L.page_size

    if FP8_DIM > 0:
        block = tl.arange(0, NUM_BLOCKS)[None, :, None]
        in_block = tl.arange(0, BLOCK_DIMS)[None, None, :]
        dim = block * SCALE_BLOCK + in_block
        real = (in_block < SCALE_BLOCK) & (dim < FP8_DIM)
        start = (page * L.fp8_strides[0] + offset * L.fp8_strides[1])[:, None, None]
        if L.is_fp4:
            pair = (block * SCALE_BLOCK // 2) + tl.arange(0, BLOCK_DIMS // 2)[None, None, :]
            stored = found[:, None, None] & (2 * pair < FP8_DIM)
            value = unpack_e2m1(tl.load(rows.fp8 + start + pair, mask=stored, other=0))
        else:
            code = tl.load(rows.fp8 + start + dim, mask=found[:, None, None] & real, other=0)
            value = decode_e4m3(code, NATIVE)  # [ROWS, NUM_BLOCKS, BLOCK_DIMS]
        if rows.scales is not None:
            start = (page * L.scales_strides[0] + offset * L.scales_strides[1])[:, None, None]
            source = rows.scales + start
            stored = found[:, None, None] & (block * SCALE_BLOCK < FP8_DIM)
            scale = tl.load(source + block, mask=stored, other=0)
            value *= decode_scale(scale, L.e4m3_scales, NATIVE)
        target = out + row[:, None, None] * OUT_ROW + dim
        tl.store(target, value.to(tl.bfloat16), mask=covered[:, None, None] & real)
    if BF16_DIM > 0:
        dim = tl.arange(0, BF16_DIMS)[None, :]
        start = (page * L.bf16_strides[0] + offset * L.bf16_strides[1])[:, None]
        source = rows.bf16 + start + dim
        value = tl.load(source, mask=found[:, None] & (dim < BF16_DIM), other=0.0)
        target = out + row[:, None] * OUT_ROW + FP8_DIM + dim
        tl.store(target, value, mask=covered[:, None] & (dim < BF16_DIM))


def gather_dequant(call: GatherDequant) -> None:
    page_table, out = call.page_table, call.out
    # One program per tile of the workspace, for any lengths: programs for tiles without a request
    # exit at once, and a captured graph stays correct when lengths change.
    widths = _gather_widths(call.cache.format)
    rows, layout = cache_arguments(call.cache)
    _gather_kernel[(cdiv(out.shape[0], widths["ROWS"]),)](
        page_table=page_table,
        seq_lens=call.seq_lens,
        workspace_starts=call.workspace_starts,
        seq_starts=call.seq_starts,
        out=out,
        num_rows=out.shape[0],
        num_requests=call.seq_lens.shape[0],
        table_width=page_table.shape[1],
        table_stride=page_table.stride(0),
        OUT_ROW=out.stride(0),
        REQUESTS=REQUEST_BLOCK,
        NATIVE=has_fp8(out.device),
        num_warps=1,
        rows=rows,
        L=layout,
        **widths,
    )


@functools.lru_cache(4096)
def _gather_widths(fmt: CacheFormat) -> dict[str, int]:
    """Compile-time dims and tiles of the gather kernel."""
    block = fmt.scale_block or fmt.fp8_dim
    block_dims = next_power_of_2(block)
    num_blocks = next_power_of_2(cdiv(fmt.fp8_dim, block)) if block else 0
    bf16_dims = next_power_of_2(fmt.bf16_dim)
    return {
        "FP8_DIM": fmt.fp8_dim,
        "BF16_DIM": fmt.bf16_dim,
        "SCALE_BLOCK": block,
        "BLOCK_DIMS": block_dims,
        "NUM_BLOCKS": num_blocks,
        "BF16_DIMS": bf16_dims,
        "ROWS": max(1, GATHER_DIMS // max(num_blocks * block_dims, bf16_dims)),
    }

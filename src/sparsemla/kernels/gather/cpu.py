"""Slots and cache gathering on the CPU."""

import torch

from sparsemla.cache import slots_of, to_int32
from sparsemla.kernels.common import cpu
from sparsemla.kernels.gather.arguments import EntrySlots, GatherDequant, ToSlots, VisibleSlots


def to_slots(call: ToSlots) -> None:
    page_table, page_size, out = call.page_table, call.page_size, call.out
    workspace_starts, prefill_request_ids = call.workspace_starts, call.prefill_request_ids
    for rows in cpu.blocks(out.shape[0], cpu.WORKSPACE_BYTES // (32 * max(out.shape[1], 1))):
        ids = call.topk_indices[rows]
        requests = call.request_ids[rows, None].expand_as(ids)
        slots = slots_of(page_table, requests, ids, page_size)
        if workspace_starts is not None and prefill_request_ids is not None:
            prefills = prefill_request_ids[rows].long()
            inside = (ids >= 0) & (ids < page_table.shape[1] * page_size)
            known = prefills < workspace_starts.shape[0]
            inside &= known[:, None]
            starts = workspace_starts[prefills.clamp_min(0).where(known, 0)].long()
            workspace = (starts[:, None] + ids).where(inside, -1)
            slots = workspace.where(prefills[:, None] >= 0, slots)
        out[rows] = to_int32(slots)


def entry_slots(call: EntrySlots) -> None:
    positions = call.positions.long()
    entries = (positions // call.ratio).where((positions + 1) % call.ratio == 0, -1)
    slots = slots_of(call.page_table, call.request_ids, entries, call.page_size)
    call.out.copy_(to_int32(slots))


def visible_slots(call: VisibleSlots) -> None:
    page_table, request_ids, width = call.page_table, call.request_ids, call.width
    out, lengths = call.out, call.lengths
    known = (request_ids >= 0) & (request_ids < page_table.shape[0])
    seen = ((call.positions.long() + 1).clamp_min(0) // call.ratio).where(known, 0)
    lengths.copy_(seen.clamp_max(width))
    columns = torch.arange(width)
    for rows in cpu.blocks(out.shape[0], cpu.WORKSPACE_BYTES // (64 * width)):
        keys = (seen - lengths)[rows, None] + columns
        requests = request_ids[rows, None].expand_as(keys)
        slots = slots_of(page_table, requests, keys, call.page_size)
        out[rows] = to_int32(slots.where(columns < lengths[rows, None], -1))


def gather_dequant(call: GatherDequant) -> None:
    cache, seq_lens, seq_starts, out = call.cache, call.seq_lens, call.seq_starts, call.out
    firsts = [0] * len(seq_lens) if seq_starts is None else seq_starts.tolist()
    for request, (first, length, start) in enumerate(
        zip(firsts, seq_lens.tolist(), call.workspace_starts.tolist(), strict=True)
    ):
        # Rows outside of the workspace are skipped.
        skipped, length = max(-start, 0), min(length, out.shape[0] - start)
        first, start = first + skipped, start + skipped
        for part in cpu.blocks(
            length - skipped, cpu.WORKSPACE_BYTES // (2 * cache.format.head_dim)
        ):
            positions = first + torch.arange(part.start, part.stop)
            requests = torch.full_like(positions, request)
            slots = slots_of(call.page_table, requests, positions, cache.page_size)
            valid = cpu.valid_slots(cache, slots[None], None)[0]
            rows = cpu.read_rows(cache, slots.where(valid, 0))
            out[start + part.start : start + part.stop] = rows.where(valid[:, None], 0)

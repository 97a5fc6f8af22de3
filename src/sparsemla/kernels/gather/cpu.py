"""Slots and cache gathering on the CPU."""

import torch
from torch import Tensor

from sparsemla.cache import PagedCache, slots_of, to_int32
from sparsemla.kernels.common import cpu


def to_slots(
    topk_indices: Tensor,
    page_table: Tensor,
    request_ids: Tensor,
    *,
    page_size: int,
    workspace_starts: Tensor | None,
    prefill_request_ids: Tensor | None,
    out: Tensor,
) -> None:
    for rows in cpu.blocks(out.shape[0], cpu.WORKSPACE_BYTES // (32 * max(out.shape[1], 1))):
        ids = topk_indices[rows]
        slots = slots_of(page_table, request_ids[rows, None].expand_as(ids), ids, page_size)
        if workspace_starts is not None and prefill_request_ids is not None:
            prefills = prefill_request_ids[rows].long()
            inside = (ids >= 0) & (ids < page_table.shape[1] * page_size)
            known = prefills < workspace_starts.shape[0]
            inside &= known[:, None]
            starts = workspace_starts[prefills.clamp_min(0).where(known, 0)].long()
            workspace = (starts[:, None] + ids).where(inside, -1)
            slots = workspace.where(prefills[:, None] >= 0, slots)
        out[rows] = to_int32(slots)


def entry_slots(
    *,
    positions: Tensor,
    page_table: Tensor,
    request_ids: Tensor,
    ratio: int,
    page_size: int,
    out: Tensor,
) -> None:
    positions = positions.long()
    entries = (positions // ratio).where((positions + 1) % ratio == 0, -1)
    out.copy_(to_int32(slots_of(page_table, request_ids, entries, page_size)))


def visible_slots(
    *,
    positions: Tensor,
    page_table: Tensor,
    request_ids: Tensor,
    width: int,
    ratio: int,
    page_size: int,
    out: Tensor,
    lengths: Tensor,
) -> None:
    known = (request_ids >= 0) & (request_ids < page_table.shape[0])
    seen = ((positions.long() + 1).clamp_min(0) // ratio).where(known, 0)
    lengths.copy_(seen.clamp_max(width))
    columns = torch.arange(width)
    for rows in cpu.blocks(out.shape[0], cpu.WORKSPACE_BYTES // (64 * width)):
        keys = (seen - lengths)[rows, None] + columns
        slots = slots_of(page_table, request_ids[rows, None].expand_as(keys), keys, page_size)
        out[rows] = to_int32(slots.where(columns < lengths[rows, None], -1))


def gather_dequant(
    cache: PagedCache,
    page_table: Tensor,
    seq_lens: Tensor,
    workspace_starts: Tensor,
    *,
    seq_starts: Tensor | None,
    out: Tensor,
) -> None:
    firsts = [0] * len(seq_lens) if seq_starts is None else seq_starts.tolist()
    for request, (first, length, start) in enumerate(
        zip(firsts, seq_lens.tolist(), workspace_starts.tolist(), strict=True)
    ):
        # Rows outside of the workspace are skipped.
        skipped, length = max(-start, 0), min(length, out.shape[0] - start)
        first, start = first + skipped, start + skipped
        for part in cpu.blocks(
            length - skipped, cpu.WORKSPACE_BYTES // (2 * cache.format.head_dim)
        ):
            positions = first + torch.arange(part.start, part.stop)
            requests = torch.full_like(positions, request)
            slots = slots_of(page_table, requests, positions, cache.page_size)
            valid = cpu.valid_slots(cache, slots[None], None)[0]
            rows = cpu.read_rows(cache, slots.where(valid, 0))
            out[start + part.start : start + part.stop] = rows.where(valid[:, None], 0)

"""Reference of slots and cache gathering. Shapes: T tokens, K top-k, B requests."""

import torch
from torch import Tensor

from sparsemla.cache import PagedCache, slots_of, to_int32


def to_slots(
    topk_indices: Tensor,
    page_table: Tensor,
    request_ids: Tensor,
    *,
    page_size: int,
    workspace_starts: Tensor | None = None,
    prefill_request_ids: Tensor | None = None,
) -> Tensor:
    """Slots of positions, or workspace rows for the tokens of prefills; -1 if invalid."""
    requests = request_ids[:, None].expand_as(topk_indices)  # [T, K]
    slots = slots_of(page_table, requests, topk_indices, page_size)  # [T, K]
    if workspace_starts is None or prefill_request_ids is None:
        return to_int32(slots)
    inside = (topk_indices >= 0) & (topk_indices // page_size < page_table.shape[1])  # [T, K]
    known = prefill_request_ids < workspace_starts.shape[0]  # [T]
    inside &= known[:, None]
    prefills = torch.where(known, prefill_request_ids.clamp_min(0), 0)
    starts = workspace_starts[prefills][:, None].long()  # [T, 1]
    rows = torch.where(inside, starts + topk_indices, -1)  # [T, K]
    return to_int32(torch.where(prefill_request_ids[:, None] >= 0, rows, slots))


def entry_slots(
    positions: Tensor,
    page_table: Tensor,
    request_ids: Tensor,
    *,
    ratio: int,
    page_size: int,
) -> Tensor:
    """Slots of the entries that tokens complete, -1 for other tokens."""
    completes = (positions.long() + 1) % ratio == 0  # [T]
    entries = torch.where(completes, positions // ratio, -1)  # [T]
    return to_int32(slots_of(page_table, request_ids, entries, page_size))


def visible_slots(
    positions: Tensor,
    page_table: Tensor,
    request_ids: Tensor,
    *,
    width: int,
    ratio: int = 1,
    page_size: int,
) -> tuple[Tensor, Tensor]:
    """Slots of the last ``width`` keys that tokens see, and how many these are."""
    seen = (positions.long() + 1).clamp_min(0) // ratio  # [T]
    seen[(request_ids < 0) | (request_ids >= page_table.shape[0])] = 0
    lengths = seen.clamp_max(width)  # [T]
    columns = torch.arange(width, device=positions.device)  # [width]
    keys = (seen - lengths)[:, None] + columns  # [T, width]
    slots = slots_of(page_table, request_ids[:, None].expand_as(keys), keys, page_size)
    return to_int32(torch.where(columns < lengths[:, None], slots, -1)), lengths.int()


def gather_dequant(
    cache: PagedCache,
    page_table: Tensor,
    seq_lens: Tensor,
    workspace_starts: Tensor,
    *,
    out: Tensor,
    seq_starts: Tensor | None = None,
) -> Tensor:
    """Copy each request's dequantised rows to ``out``, from ``workspace_starts`` on."""
    for request, length in enumerate(seq_lens.tolist()):
        first = 0 if seq_starts is None else int(seq_starts[request])
        positions = first + torch.arange(length, device=out.device)  # [n]
        slots = slots_of(
            page_table, torch.full_like(positions, request), positions, cache.page_size
        )
        valid = (slots >= 0) & (slots < cache.num_slots)  # [n]
        rows = cache.read(torch.where(valid, slots, 0))  # [n, D]
        row = int(workspace_starts[request]) + torch.arange(length, device=out.device)
        inside = (row >= 0) & (row < out.shape[0])  # [n]
        out[row[inside]] = torch.where(valid[:, None], rows, 0)[inside]
    return out

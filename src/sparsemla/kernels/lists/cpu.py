"""Lists of rows that query tokens share, and a rank's own rows of a list, on the CPU."""

import torch

from sparsemla.kernels.common import cpu
from sparsemla.kernels.lists.arguments import OwnPositions, ShareLists


def share_lists(call: ShareLists) -> None:
    topk_indices, list_tokens, topk_lengths = call.topk_indices, call.list_tokens, call.topk_lengths
    out, token_mask = call.out, call.token_mask
    num_tokens, topk = topk_indices.shape
    bits = 1 << torch.arange(list_tokens).repeat_interleave(topk)  # [G K]
    for lists in cpu.blocks(out.shape[0], cpu.WORKSPACE_BYTES // (64 * max(out.shape[1], 1))):
        tokens = slice(lists.start * list_tokens, min(lists.stop * list_tokens, num_tokens))
        rows = topk_indices[tokens].long().clamp_min(-1)
        if topk_lengths is not None:
            rows = rows.where(torch.arange(topk) < topk_lengths[tokens, None], -1)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % list_tokens), value=-1)
        ascends = (rows[:, 1:] < 0) | ((rows[:, :-1] >= 0) & (rows[:, 1:] > rows[:, :-1]))
        ascends = ascends.all(1).view(-1, list_tokens).all(1)  # [n]
        rows = rows.reshape(len(ascends), list_tokens * topk)
        # Entries that name nothing come first, and are written to a column that is dropped.
        sorted_rows, order = rows.sort(dim=1)
        first = sorted_rows >= 0
        first[:, 1:] &= sorted_rows[:, 1:] != sorted_rows[:, :-1]
        place = (first.cumsum(1) - 1).where(sorted_rows >= 0, out.shape[1])
        union = rows.new_full((len(rows), out.shape[1] + 1), -1).scatter_(1, place, sorted_rows)
        marks = torch.zeros_like(union).scatter_add_(1, place, bits[order])
        merged = ascends[:, None]
        out[lists] = union[:, :-1].where(merged, rows).to(out.dtype)
        token_mask[lists] = marks[:, :-1].where(merged, bits.where(rows >= 0, 0)).to(torch.uint8)
        call.lengths[lists] = first.sum(1).where(ascends, out.shape[1]).int()


def own_positions(call: OwnPositions) -> None:
    topk_indices, shard, out = call.topk_indices, call.shard, call.out
    num_tokens, topk = topk_indices.shape
    for tokens in cpu.blocks(num_tokens, cpu.WORKSPACE_BYTES // (64 * max(topk, 1))):
        positions = topk_indices[tokens].long()
        positions = positions.where(positions < 2**31, -1)
        part, rows = shard.part(positions), shard.to_local(positions)
        for i, each in enumerate(shard.own_parts):
            own = part == each
            # The other entries are written to a column that is dropped.
            place = (own.cumsum(1) - 1).where(own, topk)
            listed = rows.new_full((len(rows), topk + 1), -1).scatter_(1, place, rows)
            out[tokens, i] = listed[:, :-1].int()
            call.counts[tokens, i] = own.sum(1).int()

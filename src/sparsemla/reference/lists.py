"""Reference of lists of selected rows. Shapes: T tokens, G of a list, N lists, K top-k, P parts."""

import torch
from torch import Tensor

from sparsemla.shards import ContextShard


def share_lists(
    topk_indices: Tensor, *, list_tokens: int, topk_lengths: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The union of the lists of neighbouring tokens, or all of them one after another."""
    num_tokens, topk = topk_indices.shape
    num_lists = -(-num_tokens // list_tokens)
    out = topk_indices.new_full((num_lists, list_tokens * topk), -1)  # [N, G K]
    token_mask = torch.zeros_like(out, dtype=torch.uint8)  # [N, G K]
    lengths = out.new_zeros(num_lists, dtype=torch.int32)  # [N]
    used = topk_indices
    if topk_lengths is not None:
        inside = torch.arange(topk, device=used.device) < topk_lengths[:, None]  # [T, K]
        used = used.where(inside, -1)
    for n in range(num_lists):
        lists = used[n * list_tokens : (n + 1) * list_tokens]
        if all(_ascends(rows) for rows in lists):
            union = lists[lists >= 0].unique()  # [U], sorted
            lengths[n] = len(union)
            out[n, : len(union)] = union
            for i, rows in enumerate(lists):
                token_mask[n, : len(union)] |= torch.isin(union, rows).to(torch.uint8) << i
        else:
            lengths[n] = list_tokens * topk
            for i, rows in enumerate(lists):
                at = slice(i * topk, (i + 1) * topk)
                out[n, at] = rows.clamp_min(-1)
                token_mask[n, at] = (rows >= 0).to(torch.uint8) << i
    return out, lengths, token_mask


def _ascends(rows: Tensor) -> bool:
    """Whether the entries that are not negative come first and ascend strictly."""
    listed = rows[rows >= 0]
    return bool((rows[: len(listed)] == listed).all() and (listed[1:] > listed[:-1]).all())


def own_positions(topk_indices: Tensor, *, shard: ContextShard) -> tuple[Tensor, Tensor]:
    """The rows on a rank of the positions in each of its parts, in the order of the list."""
    num_tokens, topk = topk_indices.shape
    parts = shard.own_parts
    out = topk_indices.new_full((num_tokens, len(parts), topk), -1, dtype=torch.int32)  # [T, P, K]
    counts = topk_indices.new_zeros(num_tokens, len(parts), dtype=torch.int32)  # [T, P]
    for t, positions in enumerate(topk_indices):
        listed = positions[(positions >= 0) & (positions <= 2**31 - 1)]
        for i, part in enumerate(parts):
            rows = shard.to_local(listed[shard.part(listed) == part])
            out[t, i, : len(rows)] = rows
            counts[t, i] = len(rows)
    return out, counts


def lists_of_tokens(
    topk_indices: Tensor,
    topk_lengths: Tensor | None,
    num_tokens: int,
    list_tokens: int,
    token_mask: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Each token's own indices ``[T, K]`` and lengths ``[T]``: -1 where it is not a member."""
    tokens = torch.arange(num_tokens, device=topk_indices.device)  # [T]
    lists = tokens // list_tokens  # [T]
    indices = topk_indices[lists]  # [T, K]
    if token_mask is not None:
        bits = token_mask[lists] >> (tokens % list_tokens)[:, None] & 1  # [T, K]
        indices = indices.where(bits > 0, -1)
    return indices, None if topk_lengths is None else topk_lengths[lists]

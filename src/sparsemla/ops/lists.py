"""Lists of selected rows: the union of neighbouring tokens' selections, and a rank's own rows."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsemla.checks import INTEGERS, MAX_MASKED_TOKENS, Checker
from sparsemla.kernels import lists
from sparsemla.kernels.lists.arguments import OwnPositions, ShareLists
from sparsemla.kernels.repeat import repeated
from sparsemla.ops._library import operator
from sparsemla.shards import ContextShard


class SharedLists(NamedTuple):
    """One list for every ``list_tokens`` neighbouring query tokens, from :func:`share_lists`.

    Its fields are arguments of :func:`sparse_prefill`.
    """

    topk_indices: Tensor
    """``[N, list_tokens * K]``, rows or slots; -1 for none."""
    topk_lengths: Tensor
    """int32 ``[N]``, leading entries to use of each list."""
    token_mask: Tensor
    """uint8 ``[N, list_tokens * K]``: bit ``i`` is set if the ``i``-th token of the list attends to
    the entry."""


_share_lists = operator(lists.SHARE_LISTS)


@repeated
def share_lists(
    topk_indices: Tensor,
    *,
    list_tokens: int,
    topk_lengths: Tensor | None = None,
    out: Tensor | None = None,
    lengths: Tensor | None = None,
    token_mask: Tensor | None = None,
) -> SharedLists:
    """Merge the lists of every ``list_tokens`` neighbouring query tokens into one.

    Neighbouring tokens select mostly the same rows. :func:`sparse_prefill` reads a row of a shared
    list once for all of the list's tokens::

        shared = share_lists(topk_indices, list_tokens=4)
        out, lse = sparse_prefill(q, kv, softmax_scale=scale, list_tokens=4, **shared._asdict())

    Each token attends to exactly the entries of its own list, whatever they are: the first
    ``topk_lengths`` entries, of which negative ones name nothing. List ``n`` has the tokens
    ``n * list_tokens .. (n + 1) * list_tokens - 1`` of those that exist.

    =====================================================  =======================================
    the lists of the tokens                                the shared list
    =====================================================  =======================================
    in each, the entries that are not negative come first  their union: each row once, ascending
    and ascend strictly, as those of ``indexer_topk``
    otherwise                                              all lists, one after another, at
                                                           multiples of K
    =====================================================  =======================================

    The remaining entries are -1, with a mask of 0. Entries at or above the number of rows are kept,
    and attention ignores them.

    Args:
        topk_indices: int32, int64 or uint32 ``[T, K]``, rows or slots.
        list_tokens: tokens of a list, 1 to 8; the last list may have fewer.
        topk_lengths: ``[T]``, leading entries to use of each row; default all.
        out: ``[N, list_tokens * K]`` of the dtype of the indices (int64 for uint32), written; with
            ``N = ceil(T / list_tokens)``.
        lengths: int32 ``[N]``, written.
        token_mask: uint8 ``[N, list_tokens * K]``, written.

    Returns:
        The lists, their lengths (of the union, or ``list_tokens * K``), and who attends to each
        entry.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: this package.

    >>> share_lists(torch.tensor([[1, 5, 7], [1, 6, -1]]), list_tokens=2)
    SharedLists(topk_indices=tensor([[ 1,  5,  6,  7, -1, -1]]), \
topk_lengths=tensor([4], dtype=torch.int32), \
token_mask=tensor([[3, 1, 2, 1, 0, 0]], dtype=torch.uint8))
    """
    check = Checker("share_lists", gradients="all")
    topk_indices = check.tensor("topk_indices", topk_indices, "T K", INTEGERS)
    topk_lengths = check.optional("topk_lengths", topk_lengths, "T", INTEGERS)
    check.positive("list_tokens", list_tokens, MAX_MASKED_TOKENS + 1)
    num_tokens, topk = topk_indices.shape
    check.bind("N", -(-num_tokens // list_tokens))
    check.bind("list_tokens*K", list_tokens * topk)
    out = check.output("out", out, "N list_tokens*K", topk_indices.dtype)
    lengths = check.output("lengths", lengths, "N", torch.int32)
    token_mask = check.output("token_mask", token_mask, "N list_tokens*K", torch.uint8)
    _share_lists(ShareLists(topk_indices, list_tokens, topk_lengths, out, lengths, token_mask))
    return SharedLists(out, lengths, token_mask)


_own_positions = operator(lists.OWN_POSITIONS)


@repeated
def own_positions(
    topk_indices: Tensor,
    *,
    shard: ContextShard,
    out: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The entries of each selection that a rank keeps, as rows of this rank.

    List ``i`` of a token has the positions of the rank's part ``shard.own_parts[i]``, in the order
    of the selection: a selection that ascends gives lists that ascend. Without ``shard.parts`` a
    rank has one list. Negative entries and those from ``2^31`` on name nothing.

    The lists are positions of the rank's own requests, so :func:`to_slots` with the rank's page
    table makes slots of them::

        positions, counts = own_positions(topk_indices, shard=shard)
        slots = to_slots(positions.flatten(1), page_table, request_ids, page_size=64)

    Args:
        topk_indices: int32, int64 or uint32 ``[T, K]``, positions in the token's request.
        shard: the rank's share of every context, with P parts.
        out: int32 ``[T, P, K]``, written.
        counts: int32 ``[T, P]``, written.

    Returns:
        The rows, ``shard.to_local`` of the positions, -1 behind the last; and how many each list
        has.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.

    Source: this package.

    >>> shard = ContextShard(rank=1, num_ranks=2, interleave=2)
    >>> own_positions(torch.tensor([[1, 2, 3, 4, 7, -1]]), shard=shard)
    (tensor([[[ 0,  1,  3, -1, -1, -1]]], dtype=torch.int32), tensor([[3]], dtype=torch.int32))
    """
    check = Checker("own_positions")
    topk_indices = check.tensor("topk_indices", topk_indices, "T K", INTEGERS)
    check.kind("shard", shard, ContextShard)
    check.bind("P", len(shard.own_parts))
    out = check.output("out", out, "T P K", torch.int32)
    counts = check.output("counts", counts, "T P", torch.int32)
    _own_positions(OwnPositions(topk_indices, shard, out, counts))
    return out, counts

"""Selections and attention states of ranks that share contexts, exchanged over torch.distributed.

Each rank of a context-parallel group scores and attends to the positions that it keeps, its
:class:`sparsemla.ContextShard` of every context. :func:`exchange_topk` makes one selection of the
selections of all ranks, and :func:`exchange_states` one attention of their partial results. All
ranks must call both with equal shapes, because collectives of all ranks have to match.
torch sends no tensors of its ``meta`` device, so :func:`sparsemla.warm_up` runs steps that call
both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, distributed

from sparsemla.checks import FLOATS, Checker
from sparsemla.ops import merge_states, merge_topk

ALIGNMENT = 16
"""Bytes: kernels read states by vectors of so many."""


def exchange_topk(
    values: Tensor,
    positions: Tensor,
    topk: int,
    *,
    group: distributed.ProcessGroup | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The exact ``topk`` best of the candidates of all ranks, on every rank.

    Each rank offers the best of its own keys, with their scores and their positions in the whole
    context. The ranks gather all offers and merge them in the order of :func:`select_topk`, so each
    gets the selection that one rank with all keys would make::

        rows = select_topk(scores, topk=topk, row_ends=shard.lengths(seq_lens))
        values = scores.gather(1, rows.clamp(min=0).long())
        selected = exchange_topk(values, shard.positions(rows), topk, group=group)

    Args:
        values: float32 ``[T, N]``, scores of this rank's candidates; N is the same on all ranks.
        positions: int32, int64 or uint32 ``[T, N]``, their positions, below 2**31; a negative one
            marks an entry without a candidate.
        topk: k, any positive number.
        group: the ranks; default all.
        out: int32 ``[T, topk]``, written.

    Returns:
        int32 ``[T, topk]``: positions in ascending order, then -1 if the ranks have fewer than
        ``topk`` candidates.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.
    """
    check = Checker("exchange_topk", gradients="all")
    check.tensor("values", values, "T N", torch.float32)
    positions = check.signed("positions", positions, "T N")
    check.positive("topk", topk)
    check.bind("K", topk)
    _check_group(check, group)
    out = check.output("out", out, "T K", torch.int32)
    num_ranks = distributed.get_world_size(group)

    def all_gather(offer: Tensor) -> Tensor:
        offers = offer.new_empty(num_ranks * offer.shape[0], *offer.shape[1:])
        _all_gather(offers, offer, group)
        return offers

    return merge_offers(values, positions, topk, all_gather=all_gather, out=out)


def merge_offers(
    values: Tensor,
    positions: Tensor,
    topk: int,
    *,
    all_gather: Callable[[Tensor], Tensor],
    out: Tensor,
) -> Tensor:
    """:func:`exchange_topk` with the caller's collective.

    Args:
        values: float32 ``[T, N]``.
        positions: int32 or int64 ``[T, N]``.
        topk: k.
        all_gather: joins a tensor of each rank along their first dim, in the order of ranks.
        out: int32 ``[T, topk]``, written.
    """
    offer = torch.stack([values.view(torch.int32), positions.int()])
    offers = all_gather(offer).unflatten(0, (-1, 2))
    return merge_topk(offers[:, 0].view(torch.float32), offers[:, 1], topk=topk, out=out)


def exchange_states(
    outs: Tensor,
    lses: Tensor,
    *,
    group: distributed.ProcessGroup | None = None,
    scatter: Literal["heads", "tokens"] | None = "heads",
    attn_sink: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over the keys of all ranks, from each rank's attention over its own.

    All ranks have the same queries, and each attends to the keys of its P parts, the lists of
    :func:`own_positions`. One collective moves the states, the float32 lse beside the out as bytes.
    :func:`merge_states` joins the parts in the order of their numbers in the context,
    ``ContextShard.own_parts``: part ``i`` of rank ``r`` of R is number ``i * R + r``.

    Args:
        outs: ``[P, T, H, V]`` bfloat16, float16 or float32, partial outputs without the sink.
        lses: float32 ``[P, T, H]``, natural logarithms; -inf for a part without a key.
        group: the ranks; default all.
        scatter: ``"heads"`` gives a rank all tokens of its H/R heads, as a tensor-parallel output
            projection takes them; ``"tokens"`` all heads of its T/R tokens; None gives it all.
        attn_sink: float32 ``[H/R]``, or ``[H]`` unless heads are scattered: a logit of each head
            that the rank gets, applied to the merged output.
        out: ``[T, H/R, V]``, ``[T/R, H, V]`` or ``[T, H, V]`` of outs' dtype, written.
        lse: float32 of out's shape without V, written.

    Returns:
        out and lse, without the sink; 0 and -inf where every part is empty.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device, or heads or
            tokens that cannot be scattered evenly.
    """
    check = Checker("exchange_states")
    check.tensor("outs", outs, "P T H V", FLOATS)
    check.tensor("lses", lses, "P T H", torch.float32)
    _check_group(check, group)
    num_ranks = distributed.get_world_size(group)
    names, sizes = ["T", "H"], [*outs.shape]
    if scatter is not None:
        check.choice("scatter", scatter, ("heads", "tokens"))
        dim = 1 if scatter == "tokens" else 2
        if sizes[dim] % num_ranks:
            raise ValueError(
                f"exchange_states: outs must have a multiple of {num_ranks} {scatter}, the number "
                f"of ranks, got {sizes[dim]}"
            )
        sizes[dim] //= num_ranks
        names[dim - 1] += "/R"
        check.bind(names[dim - 1], sizes[dim])
        outs, lses = (x.unflatten(dim, (num_ranks, -1)).movedim(dim, 0) for x in (outs, lses))
    tokens, heads = names
    check.optional("attn_sink", attn_sink, heads, torch.float32)
    out = check.output("out", out, f"{tokens} {heads} V", outs.dtype)
    lse = check.output("lse", lse, f"{tokens} {heads}", torch.float32)

    sent, sent_outs, sent_lses = _packets(1 if scatter is None else num_ranks, sizes, outs)
    sent_outs.copy_(outs)
    sent_lses.copy_(lses)
    received, outs, lses = _packets(num_ranks, sizes, outs)
    if scatter is None:
        _all_gather(received, sent, group)
    else:
        distributed.all_to_all_single(received, sent, group=group)
    outs, lses = (states.transpose(0, 1).flatten(0, 1) for states in (outs, lses))
    return merge_states(outs, lses, attn_sink=attn_sink, out=out, lse=lse)


def _packets(count: int, sizes: Sequence[int], like: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Packets of states of these sizes, ``[P, T, H, V]``, and views of their outs and lses."""
    out_bytes, lse_bytes = like.itemsize * math.prod(sizes), 4 * math.prod(sizes[:-1])
    lse_start = _aligned(out_bytes)
    shape = count, lse_start + _aligned(lse_bytes)
    packets = torch.empty(shape, dtype=torch.uint8, device=like.device)
    outs = packets[:, :out_bytes].view(like.dtype).unflatten(1, sizes)
    lses = packets[:, lse_start : lse_start + lse_bytes].view(torch.float32)
    return packets, outs, lses.unflatten(1, sizes[:-1])


def _aligned(size: int) -> int:
    return max(-(-size // ALIGNMENT), 1) * ALIGNMENT


def _all_gather(gathered: Tensor, tensor: Tensor, group: distributed.ProcessGroup | None) -> None:
    # Its name from torch 2.13 on, and before.
    gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
    gather(gathered, tensor, group=group)


def _check_group(check: Checker, group: object) -> None:
    if group is not None:
        check.kind("group", group, distributed.ProcessGroup)

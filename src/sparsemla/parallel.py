"""Selections and attention states of ranks that share contexts, exchanged over torch.distributed.

Each rank of a context-parallel group scores and attends to the positions that it keeps, its
:class:`sparsemla.ContextShard` of every context. :func:`exchange_topk` makes one selection of the
selections of all ranks, and :func:`exchange_states` one attention of their partial results. All
ranks must call both with equal shapes, because collectives of all ranks have to match.
torch sends no tensors of its ``meta`` device, so :func:`sparsemla.warm_up` runs steps that call
both.

With an :class:`ExchangeWorkspace`, selections of ranks of one host are exchanged by one kernel, in
memory that all of them write: :func:`exchange_rows` does all from scores to a rank's own slots.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from sparsemla.checks import FLOATS, Checker
from sparsemla.kernels import exchange
from sparsemla.kernels.exchange import ExchangeRows, Inboxes
from sparsemla.kernels.exchange.arguments import MAX_CANDIDATES, SLOTS, inbox_width
from sparsemla.ops import merge_states, merge_topk, own_positions, to_slots
from sparsemla.shards import ContextShard
from sparsemla.validation import INTEGERS, check_device

ALIGNMENT = 64
"""Bytes: 16 elements of float32. Triton reads by vectors if strides are multiples of 16 elements;
otherwise it also adds the parts in another order, to other bits."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
"""A file that tells hosts apart, also where containers of one host have names of their own."""
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""PyTorch's variable, without which it refuses symmetric memory of ranks that share a GPU."""
Transport = Literal["symmetric", "collective"]


class ExchangeWorkspace:
    """Memory for the exchanges of a rank's selections, allocated once.

    With ``"symmetric"`` transport, each rank has *inboxes* in memory that the kernels of other
    ranks write, torch's symmetric memory. One launch sends a rank's candidates, waits for those of
    all ranks and merges. It needs NVIDIA GPUs of one host that reach each other's memory, and no
    more than 16384 candidates of a token over all ranks. With ``"collective"``, torch.distributed
    gathers the candidates, with any backend, into packets that are allocated here.

    All ranks of the group create a workspace together, with equal arguments, and exchange the same
    tokens in the same order. A call waits, on the GPU, for the matching call of every other rank;
    it starts no earlier than the rank's call before, so calls of one workspace belong on one stream
    at a time. As with NCCL, exchanges of several workspaces or groups must be launched in one order
    on all ranks. Calls in CUDA graphs and others mix freely: counters on the GPU number them.

    Args:
        max_tokens: most query tokens of a call.
        max_candidates: most candidates of a token on a rank.
        group: the ranks; default all.
        device: of the tensors; default torch's.
        transport: default symmetric memory where it is possible, otherwise collectives.

    Attributes:
        transport: how the ranks exchange.
        refusal: why not by symmetric memory, with transport None.

    Raises:
        TypeError, ValueError: an argument of the wrong kind or size, or a symmetric transport that
            is not possible, on all ranks.
    """

    def __init__(
        self,
        *,
        max_tokens: int,
        max_candidates: int,
        group: distributed.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        transport: Transport | None = None,
    ) -> None:
        check = Checker("ExchangeWorkspace")
        check.positive("max_tokens", max_tokens)
        check.positive("max_candidates", max_candidates)
        _check_group(check, group)
        if transport is not None:
            check.choice("transport", transport, ("symmetric", "collective"))
        ranks = distributed.group.WORLD if group is None else group
        if ranks is None:
            raise ValueError("ExchangeWorkspace: group must be given before init_process_group")
        self.max_tokens, self.max_candidates, self.group = max_tokens, max_candidates, ranks
        self.num_ranks, self.rank = ranks.size(), ranks.rank()
        check_device("ExchangeWorkspace: device", device)
        self.device = torch.empty(0, device=device).device
        self.refusal: str | None = None
        self.inboxes: Inboxes | None = None
        self._memory: object = None  # that of the peers is mapped while this lives
        if transport != "collective":
            self.inboxes, self.refusal = self._connect()
            if transport == "symmetric" and self.refusal is not None:
                raise ValueError(f"ExchangeWorkspace: transport: {self.refusal}")
        self.transport: Transport = "collective" if self.inboxes is None else "symmetric"
        words = 0 if self.inboxes else (1 + self.num_ranks) * 2 * max_tokens * max_candidates
        self._packets = torch.empty(words, dtype=torch.int32, device=self.device)

    def packets(self, num_tokens: int, num_candidates: int) -> tuple[Tensor, Tensor]:
        """Memory for the offers of one rank and of all, ``[2, T, N]`` and ``[2 R, T, N]``."""
        size = num_tokens * num_candidates
        count = 2 * (1 + self.num_ranks)
        used = self._packets[: count * size].view(count, num_tokens, num_candidates)
        return used[:2], used[2:]

    def _connect(self) -> tuple[Inboxes | None, str | None]:
        """The inboxes of all ranks, or on every rank why there are none."""
        width = inbox_width(self.max_candidates)
        if self.device.type != "cuda" or torch.version.hip:
            return None, f"symmetric memory needs NVIDIA GPUs, got {self.device.type}"
        if width * self.num_ranks > MAX_CANDIDATES:
            most = MAX_CANDIDATES // self.num_ranks
            return None, (
                f"{self.num_ranks} ranks exchange up to {most} candidates each through symmetric "
                f"memory, and max_candidates {self.max_candidates} takes room for {width}"
            )
        gpu = str(torch.cuda.get_device_properties(self.device).uuid)
        overlapping = os.environ.get(OVERLAPPING) == "1"
        places = self._gather((BOOT_ID.read_text(encoding="ascii"), gpu, overlapping))
        if len({host for host, *_ in places}) > 1:
            return None, "symmetric memory needs GPUs of one host, and the ranks have several"
        gpus = {gpu for _, gpu, _ in places}
        if len(gpus) < self.num_ranks and not all(allowed for *_, allowed in places):
            return None, (
                "symmetric memory needs a GPU for each rank, and ranks share one; "
                f"{OVERLAPPING}=1 lets them"
            )
        shape = self.max_tokens, SLOTS, self.num_ranks, width
        peers, problem = None, None
        try:
            self._memory, peers = _symmetric_tensors(shape, self.group, self.device)
        except RuntimeError as error:  # of drivers that do not map the memory of peers
            problem = f"torch's symmetric memory: {str(error).splitlines()[0]}"
        problems = [*filter(None, self._gather(problem))]
        if peers is None or problems:
            return None, problems[0]
        # Each rank marks its inbox: they must be mapped in the order of ranks.
        own = peers[self.rank]
        own.fill_(self.rank)
        self._gather(None)
        found = [int(peer[-1, -1, -1, -1]) for peer in peers]
        wrong = [*filter(None, self._gather(found != [*range(self.num_ranks)]))]
        own.zero_()
        torch.cuda.synchronize(self.device)
        self._gather(None)
        if wrong:
            return None, "torch's symmetric memory maps other tensors than those of the ranks"
        others = (*peers[self.rank + 1 :], *peers[: self.rank + 1])
        epochs = torch.zeros(self.max_tokens, dtype=torch.int32, device=self.device)
        return Inboxes(self.rank, others, epochs), None

    def _gather(self, mine: object) -> list[Any]:
        """An object of each rank, when the GPUs of all have done their work."""
        torch.cuda.synchronize(self.device)
        everyones: list[Any] = [None] * self.num_ranks
        distributed.all_gather_object(everyones, mine, group=self.group)
        return everyones


def _symmetric_tensors(
    shape: tuple[int, ...], group: distributed.ProcessGroup, device: torch.device
) -> tuple[object, list[Tensor]]:
    """int64 tensors of all ranks, which each rank can write, and the owner of their mappings."""
    from torch.distributed import _symmetric_memory as symmetric  # imports much

    own = symmetric.empty(*shape, dtype=torch.int64, device=device)
    handle = symmetric.rendezvous(own, group)
    tensors = [
        own if rank == handle.rank else handle.get_buffer(rank, shape, torch.int64)
        for rank in range(handle.world_size)
    ]
    return handle, tensors


def exchange_topk(
    values: Tensor,
    positions: Tensor,
    topk: int,
    *,
    shard: ContextShard | None = None,
    group: distributed.ProcessGroup | None = None,
    workspace: ExchangeWorkspace | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The exact ``topk`` best of the candidates of all ranks, on every rank.

    Each rank offers the best of its own keys, with their scores and their positions in the whole
    context. The ranks gather all offers and merge them in the order of :func:`select_topk`, so each
    gets the selection that one rank with all keys would make::

        rows = select_topk(scores, topk=topk, row_ends=shard.lengths(seq_lens))
        selected = exchange_topk(scores, rows, topk, shard=shard, group=group)

    Args:
        values: float32 ``[T, N]``, scores of this rank's candidates; N is the same on all ranks.
            With a shard ``[T, C]``, scores of the rank's own keys.
        positions: int32, int64 or uint32 ``[T, N]``, the candidates' positions, below 2**31; a
            negative one marks an entry without a candidate. With a shard, columns of ``values`` as
            :func:`select_topk` returns them.
        topk: k, any positive number; up to 16384 with a symmetric workspace.
        shard: the rank's share of every context, of which ``values`` and ``positions`` are; a
            symmetric workspace then allocates nothing. Without it, candidates come with positions.
        group: the ranks; default the workspace's, or all.
        workspace: memory for the exchange; without it, packets are allocated and gathered.
        out: int32 ``[T, topk]``, written.

    Returns:
        int32 ``[T, topk]``: positions in ascending order, then -1 if the ranks have fewer than
        ``topk`` candidates.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.
    """
    check = Checker("exchange_topk", gradients="all")
    check.tensor("values", values, "T N" if shard is None else "T C", torch.float32)
    positions = check.signed("positions", positions, "T N")
    check.positive("topk", topk)
    check.bind("K", topk)
    if shard is not None:
        check.kind("shard", shard, ContextShard)
    _check_group(check, group)
    out = check.output("out", out, "T K", torch.int32)
    if workspace is not None:
        _check_workspace(check, workspace, topk)
        if group is not None and group is not workspace.group:
            raise ValueError("exchange_topk: group must be the workspace's, got another one")
        if shard is not None:
            _check_shard(check, shard, workspace)
        if workspace.inboxes is not None:
            call = ExchangeRows(values, positions, topk, shard, selected=out)
            _launch(workspace.inboxes, call)
            return out
        group = workspace.group
    if shard is not None:
        values = values.gather(1, positions.clamp(min=0).long())
        positions = shard.positions(positions)
    if workspace is not None:
        offer, offers = workspace.packets(*values.shape)
        offer[0].copy_(values.view(torch.int32))
        offer[1].copy_(positions)
        _all_gather(offers, offer, group)
        return _merge_gathered(offers, topk, out)
    num_ranks = distributed.get_world_size(group)

    def all_gather(offer: Tensor) -> Tensor:
        offers = offer.new_empty(num_ranks * offer.shape[0], *offer.shape[1:])
        _all_gather(offers, offer, group)
        return offers

    return merge_offers(values, positions, topk, all_gather=all_gather, out=out)


def exchange_rows(
    scores: Tensor,
    rows: Tensor,
    topk: int,
    *,
    shard: ContextShard,
    workspace: ExchangeWorkspace,
    page_table: Tensor | None = None,
    request_ids: Tensor | None = None,
    page_size: int | None = None,
    selected: Tensor | None = None,
    out: Tensor | None = None,
    counts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A rank's entries of the selection of all ranks, from the rank's scores.

    The results are those of these calls, and with a symmetric workspace one launch::

        selected = exchange_topk(scores, rows, topk, shard=shard, workspace=workspace)
        out, counts = own_positions(selected, shard=shard)
        out = to_slots(out.flatten(1), page_table, request_ids, page_size=page_size).view_as(out)

    Args:
        scores: float32 ``[T, C]``, of the rank's own keys.
        rows: int32, int64 or uint32 ``[T, N]``, the columns of its best, as :func:`select_topk`
            returns them: they ascend, and negative ones behind them are none.
        topk: k, up to 16384.
        shard: the rank's share of every context, with P parts.
        workspace: of the ranks of ``shard``.
        page_table: int32, int64 or uint32 ``[B, W]``, the rank's; with it, ``out`` are slots.
        request_ids: int32, int64 or uint32 ``[T]``, the request of each token; with a page table.
        page_size: tokens of a page; with a page table.
        selected: int32 ``[T, topk]``, written: the selection of all ranks. Without it, a symmetric
            exchange is faster.
        out: int32 ``[T, P, topk]``, written.
        counts: int32 ``[T, P]``, written.

    Returns:
        The rows or slots, -1 behind the last, and how many each list has.

    Raises:
        TypeError, ValueError: an argument of the wrong kind, dtype, shape or device.
    """
    check = Checker("exchange_rows", gradients="all")
    check.tensor("scores", scores, "T C", torch.float32)
    rows = check.signed("rows", rows, "T N")
    check.positive("topk", topk)
    check.bind("K", topk)
    check.kind("shard", shard, ContextShard)
    _check_workspace(check, workspace, topk)
    _check_shard(check, shard, workspace)
    if page_table is None:
        check.absent("request_ids", request_ids, "without page_table")
        check.absent("page_size", page_size, "without page_table")
    else:
        page_table = check.tensor("page_table", page_table, "B W", INTEGERS)
        request_ids = check.tensor("request_ids", request_ids, "T", INTEGERS)
        check.positive("page_size", page_size)
    check.bind("P", len(shard.own_parts))
    if selected is not None:
        check.written("selected", selected, "T K", torch.int32)
    out = check.output("out", out, "T P K", torch.int32)
    counts = check.output("counts", counts, "T P", torch.int32)
    if workspace.inboxes is not None:
        pages = page_table, request_ids, page_size
        call = ExchangeRows(scores, rows, topk, shard, *pages, selected, out, counts)
        _launch(workspace.inboxes, call)
        return out, counts
    selected = exchange_topk(scores, rows, topk, shard=shard, workspace=workspace, out=selected)
    own_positions(selected, shard=shard, out=out, counts=counts)
    if page_table is not None and request_ids is not None and page_size is not None:
        for part in out.unbind(1):
            to_slots(part, page_table, request_ids, page_size=page_size, out=part)
    return out, counts


def _launch(inboxes: Inboxes, call: ExchangeRows) -> None:
    """Launch an exchange on the GPU of its tensors."""
    device = call.values.device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            exchange.triton.exchange_rows(inboxes, call)
    else:
        exchange.triton.exchange_rows(inboxes, call)


def _check_workspace(check: Checker, workspace: ExchangeWorkspace, topk: int) -> None:
    """Check that a workspace has room for the T tokens and N candidates of a call."""
    check.kind("workspace", workspace, ExchangeWorkspace)
    tokens, candidates = check.dims["T"], check.dims["N"]
    if tokens > workspace.max_tokens or candidates > workspace.max_candidates:
        raise ValueError(
            f"{check.op}: workspace must have room for {tokens} tokens with {candidates} "
            f"candidates, got max_tokens {workspace.max_tokens} and max_candidates "
            f"{workspace.max_candidates}"
        )
    if workspace.device != check.device:
        raise ValueError(f"{check.op}: workspace must be on {check.device}, got {workspace.device}")
    if workspace.inboxes is not None:
        check.positive("topk", topk, MAX_CANDIDATES + 1)


def _check_shard(check: Checker, shard: ContextShard, workspace: ExchangeWorkspace) -> None:
    if (shard.rank, shard.num_ranks) != (workspace.rank, workspace.num_ranks):
        raise ValueError(
            f"{check.op}: shard must be that of rank {workspace.rank} of {workspace.num_ranks}, "
            f"the workspace's, got rank {shard.rank} of {shard.num_ranks}"
        )


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
    return _merge_gathered(all_gather(offer), topk, out)


def _merge_gathered(offers: Tensor, topk: int, out: Tensor) -> Tensor:
    """The best of the offers of all ranks, ``[2 R, T, N]``: scores and positions in turn."""
    offers = offers.unflatten(0, (-1, 2))
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

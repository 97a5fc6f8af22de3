"""Attention of query rows over their own selection of cache rows, on the CPU."""

from typing import NamedTuple

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.kernels.common import cpu

FLASH_KEYS = 512
"""Keys that torch's flash kernel takes at a time."""

FLASH_HEADS = 32
"""Heads of a row, at most, that the flash kernel does not share out to several threads."""

HEAD_STEP, DIM_STEP = 16, 32
"""Heads and dims come in multiples of this: then all buffers begin at multiples of 64 bytes."""


class Stream(NamedTuple):
    """A cache and each query row's selection from it: slots ``[R, K]``, lengths ``[R]``."""

    cache: PagedCache
    slots: Tensor
    lengths: Tensor | None


def sparse_attention(
    q: Tensor,
    streams: list[Stream],
    softmax_scale: float,
    attn_sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor | None = None,
) -> None:
    """Attend ``q [R, H, D]`` to the union of the streams; write ``out [R, H, V]`` and the rest.

    Rows of a quantised cache are dequantised once for a block of query rows, however many of them
    selected it; then each row's keys are gathered once for all its heads.
    """
    dtype = torch.bfloat16 if q.dtype == out.dtype == torch.bfloat16 else torch.float32
    width = sum(stream.slots.shape[1] for stream in streams)
    row_bytes = 2 * q.shape[2] * max(width, 1)
    at_once = max(torch.get_num_threads() * cpu.KEY_BYTES // row_bytes, 1)
    for rows in cpu.blocks(q.shape[0], max(cpu.WORKSPACE_BYTES // row_bytes, at_once)):
        sources = [_Source.of(stream, rows) for stream in streams]
        for inner in cpu.blocks(rows.stop - rows.start, at_once):
            keys, valid = _gather(sources, inner)
            at = slice(rows.start + inner.start, rows.start + inner.stop)
            if keys.shape[1] == 0:
                out[at], lse[at] = 0, -torch.inf
                if max_logits is not None:
                    max_logits[at] = -torch.inf
                continue
            queries, keys = q[at].to(dtype), keys.to(dtype)
            part, lse[at] = _attend(queries, keys, valid, softmax_scale)
            out[at] = cpu.finish(part[..., : out.shape[2]], lse[at], attn_sink)
            if max_logits is not None:
                max_logits[at] = _largest(queries, keys, valid, softmax_scale)


def _attend(
    q: Tensor, keys: Tensor, valid: Tensor | None, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """:func:`cpu.attend` with bits that do not depend on how many rows there are.

    Products of matrices cut their sums by where their operands begin and by how many threads they
    get. So rows, and the flash kernel's buffers of each thread, are padded to multiples of 64
    bytes. And no row is computed alone: the kernel gives a thread to each of several rows, but a
    single one runs on the caller's thread, where its products take all.
    """
    (num_rows, num_heads, head_dim), pad = q.shape, torch.nn.functional.pad
    if head_dim % DIM_STEP:
        keys = pad(keys, (0, -head_dim % DIM_STEP))
    if head_dim % DIM_STEP or num_heads % HEAD_STEP:
        q = pad(q, (0, -head_dim % DIM_STEP, 0, -num_heads % HEAD_STEP))
    if num_rows == 1 and q.shape[1] <= FLASH_HEADS:
        q, keys = q.expand(2, -1, -1), keys.expand(2, -1, -1)
        valid = None if valid is None else valid.expand(2, -1)
    out, lse = cpu.attend(q, keys, keys, valid, softmax_scale)
    return out[:num_rows, :num_heads], lse[:num_rows, :num_heads]


class _Source(NamedTuple):
    """bfloat16 rows, and where in them each entry of a selection stands.

    ``valid`` is None if every entry counts. ``buffer`` holds the gathered keys: memory that is
    touched for the first time costs as much as the gathering.
    """

    rows: Tensor
    where: Tensor
    valid: Tensor | None
    buffer: Tensor

    @staticmethod
    def of(stream: Stream, rows: slice) -> "_Source":
        slots = stream.slots[rows].long()
        lengths = None if stream.lengths is None else stream.lengths[rows]
        valid = cpu.valid_slots(stream.cache, slots, lengths)
        buffer = torch.empty(0, dtype=torch.bfloat16)
        flat = cpu.flat_rows(stream.cache)
        if flat is not None:
            where = slots if valid.all() else slots.where(valid, 0)
            return _Source(flat, where, None if valid.all() else valid, buffer)
        used, inverse = slots[valid].unique(return_inverse=True)
        where = torch.zeros_like(slots)
        where[valid] = inverse
        if used.numel() == 0:
            used = torch.zeros(1, dtype=torch.long)  # every entry is masked
        read = cpu.read_rows(stream.cache, used)
        return _Source(read, where, None if valid.all() else valid, buffer)

    def gather(self, rows: slice, *, cut_tail: bool) -> tuple[Tensor, Tensor]:
        """Keys ``[R, K, D]`` and which are valid ``[R, K]``, without a tail that is dead in all.

        The width that is left is a multiple of the flash kernel's block of keys, so that a row's
        result does not depend on the rows beside it.
        """
        where, valid = self.where[rows], torch.ones(1, dtype=torch.bool)
        if self.valid is not None:
            valid = self.valid[rows]
            if cut_tail:
                live = valid.any(0).nonzero()
                blocks = -(-(int(live[-1]) + 1) // FLASH_KEYS) if live.numel() else 0
                where, valid = where[:, : blocks * FLASH_KEYS], valid[:, : blocks * FLASH_KEYS]
        shape = (*where.shape, self.rows.shape[1])
        picked = self.buffer.resize_(where.numel(), shape[2])
        torch.index_select(self.rows, 0, where.reshape(-1), out=picked)
        picked = picked.view(shape)
        if not valid.all():  # masked rows must be finite too
            picked.masked_fill_(~valid[..., None], 0)
        return picked, valid.expand(shape[:2])


def _gather(sources: list[_Source], rows: slice) -> tuple[Tensor, Tensor | None]:
    """Keys ``[R, K, D]`` of all sources and which are valid ``[R, K]``, None if all are."""
    # With another stream behind it, a tail stays: rows behind the tail must not move.
    last = sources[-1]
    gathered = [source.gather(rows, cut_tail=source is last) for source in sources]
    keys, valids = zip(*gathered, strict=True)
    if len(sources) == 1:
        return keys[0], None if valids[0].all() else valids[0]
    valid = torch.cat(valids, dim=1)
    return torch.cat(keys, dim=1), None if valid.all() else valid


def _largest(q: Tensor, keys: Tensor, valid: Tensor | None, softmax_scale: float) -> Tensor:
    """float32 ``[R, H]``, the largest score of each head."""
    logits = torch.bmm(q.float(), keys.float().transpose(1, 2)) * softmax_scale  # [R, H, K]
    if valid is not None:
        logits.masked_fill_(~valid[:, None], -torch.inf)
    return logits.amax(-1)

"""Attention of query rows over their selections of cache rows, on the CPU."""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from sparsemla.cache import PagedCache
from sparsemla.kernels.common import cpu

FLASH_KEYS = 512
"""Keys that torch's flash kernel takes at a time."""

FLASH_HEADS = 32
"""Most heads of a row that the flash kernel computes on a single thread."""

HEAD_STEP, DIM_STEP = 16, 32
"""Heads and dims are padded to multiples of this, so that buffers are aligned to 64 bytes."""


class Stream(NamedTuple):
    """A cache and the selections from it: slots ``[N, K]``, lengths ``[N]``, token_mask ``[N, K]``.

    Selection ``n`` is that of the query rows ``n * list_tokens .. (n + 1) * list_tokens - 1``, or
    of those whose bit is set in ``token_mask``.
    """

    cache: PagedCache
    slots: Tensor
    lengths: Tensor | None
    list_tokens: int = 1
    token_mask: Tensor | None = None

    def of_rows(self, rows: slice) -> tuple[Tensor, Tensor | None]:
        """Slots ``[R, K]``, -1 for those of other rows only, and lengths ``[R]``."""
        lists: slice | Tensor = rows
        if self.list_tokens > 1:
            lists = torch.arange(rows.start, rows.stop) // self.list_tokens
        slots = self.slots[lists].long()
        if self.token_mask is not None:
            tokens = torch.arange(rows.start, rows.stop) % self.list_tokens
            slots = slots.where(self.token_mask[lists] >> tokens[:, None] & 1 > 0, -1)
        return slots, None if self.lengths is None else self.lengths[lists]


def attend_streams(
    q: Tensor,
    streams: list[Stream],
    softmax_scale: float,
    attn_sink: Tensor | None,
    out: Tensor,
    lse: Tensor,
    max_logits: Tensor | None = None,
) -> None:
    """Attend ``q [R, H, D]`` to the union of the streams; write ``out [R, H, V]``, LSE and maximum.

    Rows of a quantised cache are dequantised once per block of query rows, even if several of them
    select the same row; then each query row's keys are gathered once for all its heads.
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
            unrounded = None
            if dtype == torch.bfloat16:
                unrounded = functools.partial(_unrounded, queries, keys, valid, softmax_scale)
            out[at] = cpu.finish(part[..., : out.shape[2]], lse[at], attn_sink, unrounded)
            if max_logits is not None:
                max_logits[at] = _largest(queries, keys, valid, softmax_scale)


def _attend(
    q: Tensor, keys: Tensor, valid: Tensor | None, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """:func:`cpu.attend` with bits that do not depend on the number of rows.

    The order of additions in a GEMM depends on the alignment of its operands and on its number of
    threads. So rows, and the flash kernel's buffers per thread, are padded to multiples of 64
    bytes. And no row is computed alone: the kernel gives each of several rows one thread, but a
    single row runs on the caller's thread, where GEMMs use all threads.
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


def _unrounded(q: Tensor, keys: Tensor, valid: Tensor | None, softmax_scale: float) -> Tensor:
    """The out of :func:`_attend` in float32."""
    return _attend(q.float(), keys.float(), valid, softmax_scale)[0]


class _Source(NamedTuple):
    """bfloat16 rows, and the index of each entry of a selection among them.

    ``valid`` is None if every entry is valid. ``buffer`` holds the gathered keys and is reused,
    because the first touch of new memory costs as much as the gathering.
    """

    rows: Tensor
    where: Tensor
    valid: Tensor | None
    buffer: Tensor

    @staticmethod
    def of(stream: Stream, rows: slice) -> "_Source":
        slots, lengths = stream.of_rows(rows)
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
        """Keys ``[R, K, D]`` and their validity ``[R, K]``, without a tail invalid in all rows.

        The remaining width is a multiple of the flash kernel's block of keys, so that a row's
        result does not depend on its neighbours.
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
    """Keys ``[R, K, D]`` of all sources and their validity ``[R, K]``, None if all are valid."""
    # A tail before another stream stays, so that the other stream's keys do not move.
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

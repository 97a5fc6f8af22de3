"""Operands of attention kernels: query rows, keys and results, with their strides."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsemla.cache import PagedCache


class Queries(NamedTuple):
    """Query rows, with the strides of a request, a token and a head."""

    q: Tensor
    request_stride: int
    token_stride: int
    head_stride: int
    rope: Tensor | None = None
    """The RoPE dims, unless they are the last dims of ``q``."""
    rope_request_stride: int | None = None
    rope_token_stride: int | None = None
    rope_head_stride: int | None = None

    @classmethod
    def of(cls, q: Tensor, q_rope: Tensor | None = None) -> Queries:
        """Queries ``[B, S, H, D]``, and their RoPE dims if they lie apart."""
        rope = (None, None, None) if q_rope is None else q_rope.stride()[:3]
        return cls._make((q, *q.stride()[:3], q_rope, *rope))

    def in_units(self, elements: int) -> Queries:
        """The same rows, with strides that count so many elements."""
        return Queries._make(x // elements if isinstance(x, int) else x for x in self)


class QueryRows(NamedTuple):
    """The numbering of query rows. The rows of a *group* share their keys.

    With selected keys, a group is the heads of one token, and a request has ``group_tokens``
    groups. In dense attention, the tokens and heads of a request are one group, and so are the
    tokens and heads of a list that several tokens share.
    """

    num_heads: int
    num_rows: int
    """Rows of a group."""
    group_tokens: int
    num_splits: int


class KeyList(NamedTuple):
    """The keys of each group: slots of a cache, or a page table. Strides are in elements."""

    keys: Tensor
    """Slots ``[request, token, key]``, or pages ``[request, page]``."""
    keys_request: int
    keys_token: int
    num_keys: int
    lengths: Tensor | None
    """Number of valid keys of each request or token, or None for all."""
    num_slots: int
    shift: int = 0
    """Distance of a second cache from the first, in words; see :mod:`.fp8`."""
    lengths_request: int = 1
    lengths_token: int | None = None
    """None if the tokens of a request have one length."""
    token_mask: Tensor | None = None
    """``[request, key]``: a bit for each token of a group, set if it attends to the key; or None if
    all do."""
    token_mask_request: int | None = None

    @classmethod
    def of(cls, cache: PagedCache, slots: Tensor, lengths: Tensor | None) -> KeyList:
        """Slots ``[B, S, K]`` of a cache; lengths ``[B]`` or ``[B, S]``."""
        request_stride, token_stride = 1, None
        if lengths is not None and lengths.dim() == 2:
            request_stride = lengths.stride(0)
            token_stride = 1 if lengths.shape[1] > 1 else None
        return cls(
            slots,
            slots.stride(0),
            slots.stride(1),
            slots.shape[2],
            lengths,
            cache.num_slots,
            lengths_request=request_stride,
            lengths_token=token_stride,
        )


class Results(NamedTuple):
    """Outputs, and the sinks that the kernel applies. Strides are in elements."""

    out: Tensor
    out_split: int
    out_request: int
    out_token: int
    out_head: int
    lse: Tensor
    lse_split: int
    lse_request: int
    lse_token: int
    max_logits: Tensor | None
    max_logits_request: int
    attn_sink: Tensor | None
    max_logits_token: int | None = None
    """None if a group has one token."""
    sink_token: int | None = None
    """Stride of ``attn_sink`` between tokens; None if all tokens have the same sinks."""

    @classmethod
    def of_splits(
        cls, outs: Tensor, lses: Tensor, attn_sink: Tensor | None, sink_token: int | None = None
    ) -> Results:
        """Outputs ``[N, B, S, H, V]`` of splits; the merge of several applies the sink."""
        sink = attn_sink if outs.shape[0] == 1 else None
        placed = outs, *outs.stride()[:4], lses, *lses.stride()[:3]
        return cls._make((*placed, None, 0, sink, None, sink_token))

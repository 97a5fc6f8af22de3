"""What every Hopper attention kernel takes: a numbering of query rows, lists of keys, results."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Shape(NamedTuple):
    """How the query rows are numbered.

    The rows of a group share keys: the heads of a token for selected keys, ``group_tokens`` groups
    a request; all tokens and heads of a request, one group, where it attends to all of its keys.
    """

    num_heads: int
    num_rows: int
    group_tokens: int
    num_splits: int


class Stream(NamedTuple):
    """A list of keys: slots of a cache; or a page table, if all keys of a request are meant.

    ``lengths``: keys of a request that count. ``shift``: :mod:`.fp8`.
    """

    keys: Tensor
    keys_request: int
    keys_token: int
    num_keys: int
    lengths: Tensor | None
    num_slots: int
    shift: int = 0


class Results(NamedTuple):
    """What is written, and the sinks, which are part of it. Strides are in elements."""

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

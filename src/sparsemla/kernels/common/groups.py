"""Groups of neighbouring tokens that share a list: to a kernel, one token with all their heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor


class Chunk(NamedTuple):
    """Some lists, their tokens, and the tokens of each list."""

    lists: slice
    tokens: slice
    size: int


def chunks(num_tokens: int, list_tokens: int, num_lists: int) -> Iterator[Chunk]:
    """Chunks of at most ``num_lists`` lists; the last list, if it has fewer tokens, is alone.

    >>> [(chunk.tokens.start, chunk.tokens.stop, chunk.size) for chunk in chunks(7, 2, 2)]
    [(0, 4, 2), (4, 6, 2), (6, 7, 1)]
    """
    full = num_tokens // list_tokens
    for first in range(0, full, num_lists):
        last = min(first + num_lists, full)
        yield Chunk(slice(first, last), slice(first * list_tokens, last * list_tokens), list_tokens)
    if num_tokens % list_tokens:
        rest = slice(full * list_tokens, num_tokens)
        yield Chunk(slice(full, full + 1), rest, num_tokens % list_tokens)


class Heads(NamedTuple):
    """Heads of tokens ``[T, H, D]`` and their strides, as kernels take them."""

    rows: Tensor
    token_stride: int
    head_stride: int

    @classmethod
    def of(cls, x: Tensor) -> Heads:
        """The heads of a tensor with adjacent dims."""
        return cls(x, *x.stride()[:2])


def grouped(x: Tensor, size: int) -> Tensor:
    """Heads of tokens ``[n * size, H, ...]`` as those of lists ``[n, size * H, ...]``.

    A view, if a token's heads begin where those of the token before end; otherwise a copy.
    """
    return x.unflatten(0, (x.shape[0] // size, size)).flatten(1, 2)


def attended(
    topk_indices: Tensor, token_mask: Tensor | None, num_tokens: int, list_tokens: int
) -> Tensor:
    """The lists ``[N, K]``, with -1 for entries to which none of their tokens attends.

    Such a row is never read, so it may be NaN.
    """
    if token_mask is None:
        return topk_indices
    seen = token_mask & ((1 << list_tokens) - 1)
    if num_tokens % list_tokens:
        seen[-1] &= (1 << num_tokens % list_tokens) - 1
    return topk_indices.where(seen != 0, -1)

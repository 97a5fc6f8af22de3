"""The cache of an enabled model between steps: pages of latent rows and of indexer keys."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import Cache

from sparsemla.cache import PagedCache

Result = TypeVar("Result")


def _ordinary_tensors(method: Callable[..., Result]) -> Callable[..., Result]:
    """Run a method outside of inference mode: later calls write the tensors that it allocates."""

    @functools.wraps(method)
    def run(*args: object, **kwargs: object) -> Result:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run


class LatentCache(Cache):
    """The model's cache between steps: pages of latent rows and of indexer keys.

    Row ``b`` of the batch owns the pages ``page_table[b]`` of every layer. Padding takes no slot:
    the n-th real token of a row is at position n of the row's slots, independent of its column.

    Args:
        latents: one cache per layer, on the layer's device.
        index_keys: one cache per layer with an indexer, keyed by the layer's index.
        batch_size: B.
        max_length: capacity in columns. All pages are allocated now, and their addresses never
            change. None for pages that grow.

    Attributes:
        page_table: int32 ``[B, W]`` on the first layer's device, as the other attributes; W doubles
            when the pages are full.
        real: bool ``[B, W * page_size]``, True for columns that are not padding.
        lengths: int32 ``[B]``, real columns of each row.
        rows: int32 ``[B + 1]``, 0 to B.
        columns: number of columns so far, padding included: an int, or with ``max_length`` an int64
            tensor, so that compiled code does not depend on its value.
    """

    @_ordinary_tensors
    def __init__(
        self,
        latents: Sequence[PagedCache],
        index_keys: Mapping[int, PagedCache],
        batch_size: int,
        max_length: int | None = None,
    ) -> None:
        super().__init__(layers=[])
        self.latents = list(latents)
        self.index_keys = dict(index_keys)
        self.max_length = max_length
        self._clear(batch_size)
        self.columns: int | Tensor = 0
        if max_length is not None:
            self.reserve(max_length)
            self.columns = self.lengths.new_zeros((), dtype=torch.int64)
            for tensor in self._tensors():
                # Otherwise the CUDA graphs of compiled code copy the cache in and out.
                torch._dynamo.mark_static_address(tensor, guard=False)

    def _clear(self, batch_size: int) -> None:
        """Reset the tables to ``batch_size`` rows without pages."""
        device = self.latents[0].data.device
        self.page_table = torch.empty(batch_size, 0, dtype=torch.int32, device=device)
        self.real = torch.zeros(batch_size, 0, dtype=torch.bool, device=device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=device)
        self.rows = torch.arange(batch_size + 1, dtype=torch.int32, device=device)

    def _tensors(self) -> Iterator[Tensor]:
        yield from (self.page_table, self.real, self.lengths, self.rows)
        if isinstance(self.columns, Tensor):
            yield self.columns
        for cache in (*self.latents, *self.index_keys.values()):
            yield from (part for part in (cache.data, cache.scales) if part is not None)

    @property
    def batch_size(self) -> int:
        return self.page_table.shape[0]

    @property
    def page_size(self) -> int:
        return self.latents[0].page_size

    @property
    def capacity(self) -> int:
        """Tokens that fit into the pages of a row."""
        return self.page_table.shape[1] * self.page_size

    @property
    def formats(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the formats of latents and of indexer keys, layer by layer."""
        keys = self.index_keys.values()
        return tuple(c.format.name for c in self.latents), tuple(c.format.name for c in keys)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in all layers."""
        caches = (*self.latents, *self.index_keys.values())
        return sum(cache.format.bytes_per_token for cache in caches)

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, free slots included."""
        return self.page_table.numel() * self.page_size * self.bytes_per_token

    @property
    def is_compileable(self) -> bool:
        """Whether shapes and addresses are fixed, so that ``generate`` may compile decode steps."""
        return self.max_length is not None

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Columns so far, padding included."""
        return cast(int, self.columns)  # or a tensor, as in transformers' StaticCache

    def get_max_length(self, layer_idx: int | None = None) -> int:
        """Capacity in columns; -1 if pages grow."""
        return -1 if self.max_length is None else self.max_length

    def reset(self) -> None:
        """Forget all columns but keep the pages."""
        self.real.zero_()
        self.lengths.zero_()
        self.columns *= 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` columns."""
        # generate() passes a tensor, and the columns of a static cache are a tensor, too.
        columns, tokens_to_remove = int(self.columns), int(tokens_to_remove)
        if not -columns <= tokens_to_remove <= 0:
            raise ValueError(
                f"tokens_to_remove must lie in [-{columns}, 0], got {tokens_to_remove}"
            )
        removed = self.real[:, columns + tokens_to_remove : columns]
        self.lengths -= removed.sum(1)
        removed.zero_()
        self.columns += tokens_to_remove

    def advance(self, new: Tensor) -> None:
        """Count the columns ``new [B, S]`` of a step, True where they are not padding."""
        at = torch.arange(new.shape[1], device=new.device) + self.columns
        self.real.index_copy_(1, at, new)
        self.lengths += new.sum(1, dtype=torch.int32)
        self.columns += new.shape[1]

    def hide(self, past: Tensor) -> None:
        """Forget the last columns of rows where ``past [B, columns]`` is False.

        Raises:
            ValueError: past marks padding as real, or hides a column that real columns follow.
        """
        seen = self.real[:, : past.shape[1]]
        if torch.equal(seen, past):
            return
        hidden = seen & ~past
        if (past & (~seen | (hidden.cumsum(1) > 0))).any():
            raise ValueError(
                "attention_mask must mark past columns as in the steps before, or hide the latest "
                "of a row"
            )
        seen.copy_(past)
        self.lengths.copy_(past.sum(1))

    @_ordinary_tensors
    def __deepcopy__(self, memo: dict[int, object]) -> LatentCache:
        copied = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            setattr(copied, name, copy.deepcopy(value, memo))
        return copied

    @_ordinary_tensors
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row ``b`` a copy of row ``beam_idx[b]``."""
        rows = beam_idx.to(self.page_table.device)
        real, lengths, pages = self.real[rows], self.lengths[rows], self.page_table[rows].flatten()
        if rows.shape[0] == self.batch_size:  # in place: the addresses are kept
            self.real.copy_(real)
            self.lengths.copy_(lengths)
            own = self.page_table.flatten().long()
            for cache in (*self.latents, *self.index_keys.values()):
                for part in (cache.data, cache.scales):
                    if part is not None:
                        part[own.to(part.device)] = part[pages.long().to(part.device)]
        else:
            width = self.page_table.shape[1]
            self._clear(rows.shape[0])
            self._copy_pages(pages.long(), pages.numel())
            self.page_table = torch.arange(
                pages.numel(), dtype=torch.int32, device=pages.device
            ).view(rows.shape[0], width)
            self.real, self.lengths = real, lengths

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.reorder_cache(torch.arange(self.batch_size).repeat_interleave(repeats))

    def update(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: transformers' own attention cannot read latent rows."""
        raise ValueError(
            "past_key_values must be a cache of transformers for a model without sparsemla's "
            "attention, got a LatentCache"
        )

    def update_indexer(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse, as :meth:`update` does."""
        self.update()

    @_ordinary_tensors
    def reserve(self, num_columns: int) -> None:
        """Allocate pages until each row has room for ``num_columns``.

        Raises:
            ValueError: the cache does not grow.
        """
        batch_size, width = self.page_table.shape
        needed = -(-num_columns // self.page_size)
        if needed <= width:
            return
        if self.max_length is not None and width:
            raise ValueError(
                f"past_key_values must have room for {num_columns} columns, "
                f"got max_length {self.max_length}"
            )
        added = max(needed, 2 * width) - width
        first, last = batch_size * width, batch_size * (width + added)
        device = self.page_table.device
        pages = torch.arange(first, last, dtype=torch.int32, device=device)
        self._copy_pages(slice(None), last)
        self.page_table = torch.cat([self.page_table, pages.view(batch_size, added)], dim=1)
        self.real = nn.functional.pad(self.real, (0, added * self.page_size))

    def _copy_pages(self, pages: Tensor | slice, num_pages: int) -> None:
        """Move every layer to ``num_pages`` new pages; the first ones are copies of ``pages``."""
        self.latents = [_with_pages(cache, pages, num_pages) for cache in self.latents]
        self.index_keys = {
            layer_idx: _with_pages(cache, pages, num_pages)
            for layer_idx, cache in self.index_keys.items()
        }


def _with_pages(cache: PagedCache, pages: Tensor | slice, num_pages: int) -> PagedCache:
    device = cache.data.device
    moved = PagedCache.allocate(cache.format, num_pages, cache.page_size, device=device)
    if isinstance(pages, Tensor):
        pages = pages.to(device)
    for new, old in ((moved.data, cache.data), (moved.scales, cache.scales)):
        if new is not None and old is not None:
            kept = old[pages]
            new[: kept.shape[0]] = kept
    return moved

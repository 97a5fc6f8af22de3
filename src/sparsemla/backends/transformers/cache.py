"""The cache of an enabled model between steps: pages of rows, and which columns they hold."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar, NoReturn, Protocol, TypeVar, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import Cache

from sparsemla.cache import PagedCache

Result = TypeVar("Result")

VERSION = tuple(map(int, transformers.__version__.split(".")[:2]))
CACHE = "cache" if VERSION >= (5, 24) else "past_key_values"
"""The argument of a model's forward that is its cache, as this version of transformers calls it."""


def one_cache(past_key_values: Cache | None, cache: Cache | None) -> Cache | None:
    """The cache of a call, under either name."""
    if past_key_values is not None and cache is not None:
        raise ValueError("cache must be left out where past_key_values is given, got both")
    return past_key_values if cache is None else cache


def ordinary_tensors(method: Callable[..., Result]) -> Callable[..., Result]:
    """Run a method outside of inference mode: later calls write the tensors that it allocates."""

    @functools.wraps(method)
    def run(*args: object, **kwargs: object) -> Result:
        with torch.inference_mode(False), torch.no_grad():
            return method(*args, **kwargs)

    return run


class Store(Protocol):
    """What the layers of a model keep for each row of a batch."""

    @property
    def formats(self) -> tuple[str, ...]:
        """Names of the formats, layer by layer."""

    @property
    def nbytes(self) -> int:
        """Bytes for all rows of the batch, free slots included."""

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, tables included."""

    def clear(self, batch_size: int) -> None:
        """Start again with ``batch_size`` rows that keep nothing."""

    def reserve(self, num_tokens: int) -> None:
        """Allocate memory until each row has room for ``num_tokens``."""

    def fit(self, lengths: Sequence[int]) -> None:
        """Allocate memory for ``lengths[b]`` tokens of row ``b``, of an empty store."""

    def select(self, rows: Tensor) -> None:
        """Make row ``b`` a copy of row ``rows[b]``; in place if their number stays the same."""


class Pages:
    """Caches of several layers in which row ``b`` of a batch owns the pages ``table[b]``.

    Args:
        caches: keyed by the layer's index, each on its layer's device; pages are allocated here.
        device: device of the table.
        page_size: rows of a page.
        ratio: tokens for which a cache keeps one row.

    Attributes:
        table: int32 ``[B, W]``.
    """

    def __init__(
        self,
        caches: Mapping[int, PagedCache],
        device: torch.device,
        *,
        page_size: int,
        ratio: int = 1,
    ) -> None:
        self.caches = dict(caches)
        self.page_size = page_size
        self.ratio = ratio
        self.table = torch.empty(0, 0, dtype=torch.int32, device=device)

    @property
    def formats(self) -> tuple[str, ...]:
        return tuple(cache.format.name for cache in self.caches.values())

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in all caches."""
        return sum(cache.format.bytes_per_token for cache in self.caches.values())

    @property
    def nbytes(self) -> int:
        return self.table.numel() * self.page_size * self.row_bytes

    def tensors(self) -> Iterator[Tensor]:
        yield self.table
        for cache in self.caches.values():
            yield from (part for part in (cache.data, cache.scales) if part is not None)

    def clear(self, batch_size: int) -> None:
        self.table = self.table.new_empty(batch_size, 0)

    def reserve(self, num_tokens: int) -> None:
        batch_size, width = self.table.shape
        added = -(-num_tokens // (self.ratio * self.page_size)) - width
        if added <= 0:
            return
        first, last = batch_size * width, batch_size * (width + added)
        self._move(slice(None), last)
        new = torch.arange(first, last, dtype=torch.int32, device=self.table.device)
        self.table = torch.cat([self.table, new.view(batch_size, added)], dim=1)

    def fit(self, lengths: Sequence[int]) -> None:
        counts = [-(-length // (self.ratio * self.page_size)) for length in lengths]
        self._move(slice(None), sum(counts))
        table = torch.full((len(counts), max(counts)), -1, dtype=torch.int32, device="cpu")
        pages = torch.arange(sum(counts), dtype=torch.int32, device="cpu").split(counts)
        for row, own in zip(table, pages, strict=True):
            row[: len(own)] = own
        self.table = table.to(self.table.device)

    def select(self, rows: Tensor) -> None:
        pages = self.table[rows].flatten()
        if rows.shape[0] == self.table.shape[0]:
            own = self.table.flatten().long()
            _, *parts = self.tensors()
            for part in parts:
                part[own.to(part.device)] = part[pages.long().to(part.device)]
            return
        self._move(pages.long(), pages.numel())
        self.table = torch.arange(pages.numel(), dtype=torch.int32, device=pages.device).view(
            rows.shape[0], self.table.shape[1]
        )

    def _move(self, pages: Tensor | slice, num_pages: int) -> None:
        """Move every cache to ``num_pages`` new pages; the first ones are copies of ``pages``."""
        self.caches = {
            layer_idx: _with_pages(cache, pages, num_pages)
            for layer_idx, cache in self.caches.items()
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


class BatchCache(Cache):
    """The model's cache between steps: the columns that each row of the batch has seen, and pages.

    Padding takes no slot: the n-th real token of a row is at position n of the row, independent of
    its column.

    Args:
        stores: what the layers keep, for example pages that share a table.
        device: device of the attributes.
        page_size: the capacity grows by multiples of it.
        batch_size: B.
        max_length: capacity in columns. All pages are allocated now, and their addresses never
            change. None for pages that grow.

    Attributes:
        real: bool ``[B, capacity]``, True for columns that are not padding.
        lengths: int32 ``[B]``, real columns of each row.
        rows: int32 ``[B + 1]``, 0 to B.
        columns: number of columns so far, padding included: an int, or with ``max_length`` an int64
            tensor, so that compiled code does not depend on its value.
        counted: columns that the host knows of: those of compiled steps and of replayed CUDA graphs
            are missing until :meth:`count`.
    """

    _per_row: ClassVar[tuple[str, ...]] = ("real", "lengths")

    @ordinary_tensors
    def __init__(
        self,
        stores: Sequence[Store],
        device: torch.device,
        *,
        page_size: int,
        batch_size: int,
        max_length: int | None,
    ) -> None:
        super().__init__(layers=[])
        self.stores = list(stores)
        self.device = device
        self.page_size = page_size
        self.max_length = max_length
        self._clear(batch_size)
        self.columns: int | Tensor = 0
        self.counted = 0
        if max_length is not None:
            self.reserve(max_length)
            self.columns = self.lengths.new_zeros((), dtype=torch.int64)
            for tensor in self._tensors():
                # Otherwise the CUDA graphs of compiled code copy the cache in and out.
                torch._dynamo.mark_static_address(tensor, guard=False)

    @property
    def is_linear(self) -> list[bool]:
        """Not all layers are linear, as transformers 5.24 takes a cache without layers to be."""
        return [False]

    def _clear(self, batch_size: int) -> None:
        """Reset to ``batch_size`` rows without pages."""
        for store in self.stores:
            store.clear(batch_size)
        self.real = torch.zeros(batch_size, 0, dtype=torch.bool, device=self.device)
        self.lengths = torch.zeros(batch_size, dtype=torch.int32, device=self.device)
        self.rows = torch.arange(batch_size + 1, dtype=torch.int32, device=self.device)

    def _tensors(self) -> Iterator[Tensor]:
        yield from (getattr(self, name) for name in (*self._per_row, "rows"))
        if isinstance(self.columns, Tensor):
            yield self.columns
        for store in self.stores:
            yield from store.tensors()

    @property
    def batch_size(self) -> int:
        return self.lengths.shape[0]

    @property
    def capacity(self) -> int:
        """Tokens that fit into the pages of a row."""
        return self.real.shape[1]

    @property
    def formats(self) -> tuple[tuple[str, ...], ...]:
        """Names of the formats in each store, layer by layer."""
        return tuple(store.formats for store in self.stores)

    @property
    def bytes_per_token(self) -> float:
        """Bytes by which all layers grow with a token."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes of all pages, free slots included."""
        return sum(store.nbytes for store in self.stores)

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

    def count(self) -> int:
        """Columns so far, read from their device."""
        self.counted = int(self.columns)
        return self.counted

    def reset(self) -> None:
        """Forget all columns but keep the pages."""
        self.real.zero_()
        self.lengths.zero_()
        self.columns *= 0
        self.counted = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last ``-tokens_to_remove`` columns."""
        # generate() passes a tensor, and the columns of a static cache are a tensor, too.
        columns, tokens_to_remove = self.count(), int(tokens_to_remove)
        if not -columns <= tokens_to_remove <= 0:
            raise ValueError(
                f"tokens_to_remove must lie in [-{columns}, 0], got {tokens_to_remove}"
            )
        removed = self.real[:, columns + tokens_to_remove : columns]
        self._shorten(self.lengths - removed.sum(1, dtype=torch.int32))
        removed.zero_()
        self.columns += tokens_to_remove
        self.counted += tokens_to_remove

    def advance(self, new: Tensor) -> None:
        """Count the columns ``new [B, S]`` of a step, True where they are not padding."""
        at = torch.arange(new.shape[1], device=new.device) + self.columns
        self.real.index_copy_(1, at, new)
        self.lengths += new.sum(1, dtype=torch.int32)
        self.columns += new.shape[1]
        captures = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if not captures and not torch.compiler.is_compiling():
            self.counted += new.shape[1]

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
        self._shorten(past.sum(1, dtype=torch.int32))
        seen.copy_(past)

    def _shorten(self, lengths: Tensor) -> None:
        """Forget the last tokens of rows: ``lengths [B]`` are left."""
        self.lengths.copy_(lengths)

    @ordinary_tensors
    def __deepcopy__(self, memo: dict[int, object]) -> BatchCache:
        copied = memo[id(self)] = type(self).__new__(type(self))
        for name, value in vars(self).items():
            setattr(copied, name, copy.deepcopy(value, memo))
        return copied

    @ordinary_tensors
    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Make row ``b`` a copy of row ``beam_idx[b]``."""
        rows = beam_idx.to(self.device)
        in_place = rows.shape[0] == self.batch_size  # the addresses are kept
        for name in self._per_row:
            tensor = getattr(self, name)
            if in_place:
                tensor.copy_(tensor[rows])
            else:
                setattr(self, name, tensor[rows])
        if not in_place:
            self.rows = torch.arange(rows.shape[0] + 1, dtype=torch.int32, device=self.device)
        for store in self.stores:
            store.select(rows)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices``."""
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row."""
        self.reorder_cache(
            torch.arange(self.batch_size, device=self.device).repeat_interleave(repeats)
        )

    def update(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: transformers' own attention cannot read these rows."""
        raise ValueError(
            f"{CACHE} must be a cache of transformers for a model without sparsemla's attention, "
            f"got a {type(self).__name__}"
        )

    def update_indexer(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse, as :meth:`update` does."""
        self.update()

    def reserve(self, num_columns: int) -> None:
        """Allocate pages until each row has room for ``num_columns``.

        Raises:
            ValueError: the cache does not grow.
        """
        if num_columns > self.capacity:
            self._grow(num_columns)

    @ordinary_tensors
    def _grow(self, num_columns: int) -> None:
        if self.max_length is not None and self.capacity:
            raise ValueError(
                f"{CACHE} must have room for {num_columns} columns, "
                f"got max_length {self.max_length}"
            )
        capacity = max(-(-num_columns // self.page_size) * self.page_size, 2 * self.capacity)
        for store in self.stores:
            store.reserve(capacity)
        self.real = nn.functional.pad(self.real, (0, capacity - self.capacity))

    @ordinary_tensors
    def fit(self, lengths: Sequence[int]) -> None:
        """Allocate pages for ``lengths[b]`` columns of row ``b``, of an empty cache that grows."""
        for store in self.stores:
            store.fit(lengths)
        self.real = nn.functional.pad(self.real, (0, max(lengths)))

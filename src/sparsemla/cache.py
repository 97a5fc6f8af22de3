"""Paged caches of any format, and the arithmetic of slots.

A *slot* is the index of a row in one layer of a cache, ``page * page_size + offset``. A negative
slot means "no row": writes skip it and attention masks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsemla.formats import (
    LATENT_DIM,
    CacheFormat,
    RowFields,
    ScaleMode,
    as_format,
    bf16_format,
    is_named,
    scatter_rows,
)
from sparsemla.validation import check_integer, check_integers, check_kind


@dataclass(frozen=True, eq=False)
class PagedCache:
    """Pages of latent rows or of indexer keys.

    Args:
        data: ``[num_pages, page_size, row_width]`` of ``format.storage_dtype`` (any one-byte dtype
            for quantised formats), or ``[num_pages, num_layers, page_size, row_width]`` if each
            page holds several layers. Pages, layers and rows may have any stride that the format
            allows.
        format: the format of a row, or its name. It is never inferred from a size.
        scales: ``[num_pages, (num_layers,) page_size, num_scales]`` float32, for formats with
            ``scales_in == "tensor"``; otherwise None.

    Raises:
        TypeError: data or scales have a dtype that the format does not allow.
        ValueError: rank, width, strides or scales do not match the format, or
            :func:`sparsemla.get_format` does not know the format.

    >>> from sparsemla import FP8_DS_MLA
    >>> cache = PagedCache.allocate(FP8_DS_MLA, num_pages=8, page_size=64)
    >>> cache.write(torch.tensor([3, 64]), torch.randn(2, 576))
    >>> cache.read(torch.tensor([64])).shape
    torch.Size([1, 576])
    >>> cache
    PagedCache(fp8_ds_mla, 8 pages of 64 rows on cpu)
    """

    data: Tensor
    format: CacheFormat
    scales: Tensor | None = None

    if TYPE_CHECKING:  # a name is taken too, and read as its format

        def __init__(
            self, data: Tensor, format: CacheFormat | str, scales: Tensor | None = None
        ) -> None: ...

    def __post_init__(self) -> None:
        check_kind("data", self.data, Tensor)
        fmt = as_format("format", self.format)
        object.__setattr__(self, "format", fmt)
        # Custom operators receive a format by its name. Dynamo warns about the functools.cache in
        # get_format; in compiled code the operator raises instead.
        if not torch.compiler.is_compiling() and not is_named(fmt):
            raise ValueError(
                "format must be a constant of sparsemla, or made by bf16_format or e4m3_format, "
                f"got {fmt}"
            )
        self.check_layout()

    def __repr__(self) -> str:
        """Format and sizes; no values, for which a GPU would be waited for."""
        num_pages, *layers, page_size, _ = self.data.shape
        of_layers = f" in each of {layers[0]} layers" if layers else ""
        where = f"{num_pages} pages of {page_size} rows{of_layers} on {self.data.device}"
        return f"PagedCache({self.format.name}, {where})"

    def check_layout(self) -> None:
        """Check data and scales against the format, whether :func:`get_format` knows it or not."""
        fmt, data, scales = self.format, self.data, self.scales
        if data.dtype != fmt.storage_dtype and not (fmt.fp8_dim and data.dtype.itemsize == 1):
            raise TypeError(
                f"data must have dtype {fmt.storage_dtype} for format {fmt.name}, got {data.dtype}"
            )
        if data.dim() not in (3, 4) or data.shape[-1] != fmt.row_width:
            raise ValueError(
                f"data must have shape [num_pages, (num_layers,) page_size, {fmt.row_width}] for "
                f"format {fmt.name}, got {list(data.shape)}"
            )
        if data.shape[-2] < 1:
            raise ValueError(f"data must have a page size of at least 1, got {list(data.shape)}")
        if data.numel():  # an empty tensor may have any strides
            self._check_strides()
        if (scales is not None) != (fmt.scales_in == "tensor"):
            expected = "a float32 tensor" if fmt.scales_in == "tensor" else "None"
            raise ValueError(f"scales must be {expected} for format {fmt.name}")
        if scales is not None:
            check_kind("scales", scales, Tensor)
            shape = (*data.shape[:-1], fmt.num_scales)
            if scales.dtype != fmt.scale_dtype:
                raise TypeError(f"scales must have dtype {fmt.scale_dtype}, got {scales.dtype}")
            if tuple(scales.shape) != shape or scales.device != data.device:
                raise ValueError(
                    f"scales must have shape {list(shape)} on {data.device}, "
                    f"got {list(scales.shape)} on {scales.device}"
                )
            if fmt.num_scales > 1 and scales.stride(-1) != 1:
                raise ValueError(
                    f"scales must be contiguous in their last dimension, got {scales.stride()}"
                )

    def _check_strides(self) -> None:
        fmt, data = self.format, self.data
        if data.stride(-1) != 1:
            raise ValueError(f"data must be contiguous in its last dimension, got {data.stride()}")
        page_stride = data.stride(0)
        if fmt.scales_in == "page":
            needed = data.shape[-2] * fmt.row_width  # the padding after a page may be missing
            if data.shape[0] > 1 and page_stride < needed:
                raise ValueError(
                    f"data must have a page stride of at least {needed} bytes for format "
                    f"{fmt.name} and page size {data.shape[-2]}, got {page_stride}"
                )
            # Within a page the format fixes the layout; only pages and layers may have any stride.
            if data.shape[-2] > 1 and data.stride(-2) != fmt.row_width:
                raise ValueError(
                    f"data must have a row stride of {fmt.row_width} bytes for format "
                    f"{fmt.name}, got {data.stride(-2)}"
                )
        # A typed view of bytes needs strides that are multiples of the widest field.
        if fmt.storage_dtype == torch.uint8:
            unit = (
                fmt.scale_dtype.itemsize if fmt.bf16_dim == 0 else max(2, fmt.scale_dtype.itemsize)
            )
            strides = data.stride()[:-2] if fmt.scales_in == "page" else data.stride()[:-1]
            # Dynamo cannot trace storage_offset(); in compiled code the views themselves raise.
            offset = 0 if torch.compiler.is_compiling() else data.storage_offset()
            if any(s % unit for s in (*strides, offset)):
                raise ValueError(
                    f"data must have strides and an offset that are multiples of {unit} bytes for "
                    f"format {fmt.name}, got {data.stride()} at {offset}"
                )

    @classmethod
    def allocate(
        cls,
        format: CacheFormat | str,
        num_pages: int,
        page_size: int,
        *,
        num_layers: int | None = None,
        device: torch.device | str | None = None,
    ) -> PagedCache:
        """Allocate a zeroed cache.

        Args:
            format: the format of a row.
            num_pages: number of pages.
            page_size: tokens per page.
            num_layers: layers in each page; None for a cache of a single layer.
            device: device of the cache; default torch's default device.

        Raises:
            TypeError, ValueError: an argument of the wrong kind, or a size out of range.

        >>> from sparsemla import BF16_512
        >>> PagedCache.allocate(BF16_512, 3, 16, num_layers=2).data.shape
        torch.Size([3, 2, 16, 512])
        """
        format = as_format("format", format)
        data, scales = format.allocate(num_pages, page_size, num_layers=num_layers, device=device)
        return cls(data, format, scales)

    @classmethod
    def unchecked(cls, data: Tensor, format: CacheFormat, scales: Tensor | None) -> PagedCache:
        """A cache of views into a checked cache; skips all checks."""
        cache = object.__new__(cls)
        # Dynamo of torch 2.11 does not trace vars(cache).update.
        object.__setattr__(cache, "data", data)
        object.__setattr__(cache, "format", format)
        object.__setattr__(cache, "scales", scales)
        return cache

    @classmethod
    def from_rows(cls, rows: Tensor, value_dim: int = LATENT_DIM) -> PagedCache:
        """View ``rows [S, head_dim]``, bfloat16, as a cache of page size 1, with slot == row.

        ``value_dim`` is clamped to ``head_dim``.

        Raises:
            TypeError: rows are not a bfloat16 tensor, or value_dim is not an integer.
            ValueError: rows do not have two dimensions, or value_dim is below 1.

        >>> from sparsemla import BF16_576
        >>> cache = PagedCache.from_rows(torch.zeros(10, 576, dtype=torch.bfloat16))
        >>> cache.num_slots, cache.format == BF16_576
        (10, True)
        """
        check_kind("rows", rows, Tensor)
        if rows.dim() != 2:
            raise ValueError(f"rows must have shape [S, head_dim], got {list(rows.shape)}")
        if rows.dtype != torch.bfloat16:
            raise TypeError(f"rows must have dtype bfloat16, got {rows.dtype}")
        check_integer("value_dim", value_dim, 1)
        return cls(rows.unsqueeze(1), bf16_format(rows.shape[-1], min(value_dim, rows.shape[-1])))

    @property
    def num_pages(self) -> int:
        """Number of pages."""
        return self.data.shape[0]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.data.shape[-2]

    @property
    def num_slots(self) -> int:
        """Rows of one layer, ``num_pages * page_size``."""
        return self.num_pages * self.page_size

    @property
    def num_layers(self) -> int | None:
        """Layers in each page, or None for a cache of a single layer."""
        return self.data.shape[1] if self.data.dim() == 4 else None

    @property
    def aligned(self) -> bool:
        """Whether the cache is not empty and every row starts at a multiple of 16 bytes."""
        fmt, data = self.format, self.data
        strides = data.stride()[:-1]
        if fmt.scales_in == "page":  # within a page the format fixes the row stride
            strides = (*data.stride()[:-2], fmt.code_bytes + 2 * fmt.bf16_dim)
        starts = (misalignment(data), *(stride * data.itemsize for stride in strides))
        return data.numel() > 0 and all(start % 16 == 0 for start in starts)

    def layer(self, layer_idx: int) -> PagedCache:
        """One layer of a cache with several layers per page; a view.

        Raises:
            TypeError: layer_idx is not an integer.
            ValueError: the cache has a single layer, or layer_idx is out of range.

        >>> from sparsemla import BF16_512
        >>> cache = PagedCache.allocate(BF16_512, 3, 16, num_layers=2)
        >>> cache.layer(1).data.shape
        torch.Size([3, 16, 512])
        """
        if self.num_layers is None:
            raise ValueError("layer_idx given, but the cache holds a single layer")
        check_kind("layer_idx", layer_idx, Integral)
        if not 0 <= layer_idx < self.num_layers:
            raise ValueError(f"layer_idx must lie in [0, {self.num_layers}), got {layer_idx}")
        scales = None if self.scales is None else self.scales[:, layer_idx]
        return PagedCache.unchecked(self.data[:, layer_idx], self.format, scales)

    def fields(self) -> RowFields:
        """Typed views ``[num_pages, (num_layers,) page_size, n]`` of the row's fields."""
        return self.format.fields(self.data, self.scales)

    def stored(self) -> RowFields:
        """:meth:`fields` for kernels: codes and scales of one byte as uint8."""
        return self.format.stored(self.data, self.scales)

    def stored_bytes(self) -> tuple[Tensor, ...]:
        """All bytes of the rows, uint8 ``[num_pages, (num_layers,) page_size, n]``.

        Scales that the format keeps apart are a second view.
        """
        return self.format.stored_bytes(self.data, self.scales)

    def gather(self, slots: Tensor) -> RowFields:
        """The fields ``[..., n]`` of the rows ``slots [...]``.

        This call reads the slots and so synchronises with the device.

        Args:
            slots: int32, int64 or uint32 of any shape.

        Raises:
            TypeError: slots are not integers.
            ValueError: the cache has several layers, or a slot is not in it.
        """
        slots = self._check_slots(slots)
        outside = (slots < 0) | (slots >= self.num_slots)
        if outside.any():
            raise ValueError(
                f"slots must lie in [0, {self.num_slots}), got {int(slots[outside][0])}"
            )
        pages = torch.div(slots, self.page_size, rounding_mode="floor")
        offsets = slots - pages * self.page_size
        parts = (None if view is None else view[pages, offsets] for view in self.fields())
        return RowFields(*parts)

    def read(self, slots: Tensor) -> Tensor:
        """Dequantised rows ``[..., head_dim]``, bfloat16, of ``slots [...]``.

        ``bfloat16(float32(code) * scale)`` for the quantised dims; the others are copied. Like
        :meth:`gather`, this call synchronises with the device.

        Args:
            slots: int32, int64 or uint32 of any shape.

        Raises:
            TypeError: slots are not integers.
            ValueError: the cache has several layers, or a slot is not in it.
        """
        return self.format.dequantize(self.gather(slots))

    def write(self, slots: Tensor, rows: Tensor, *, scale_mode: ScaleMode = "pow2") -> None:
        """Quantise rows and store them in the cache.

        This call reads the slots and so synchronises with the device. The ops that write caches do
        not. The formula is in :meth:`sparsemla.CacheFormat.quantize`.

        Args:
            slots: ``[N]`` int32, int64 or uint32; rows of negative slots are skipped.
            rows: ``[N, head_dim]`` of any floating dtype.
            scale_mode: ``pow2`` or ``exact`` (float32 scales only).

        Raises:
            TypeError: slots are not integers, or rows are not floats.
            ValueError: the cache has several layers, rows have another shape or device or require a
                gradient, a slot is out of range, or the format lacks the scale mode. The cache is
                then unchanged.
        """
        slots = self._check_slots(slots)
        check_kind("rows", rows, Tensor)
        if slots.dim() != 1:
            raise ValueError(f"slots must have shape [N], got {list(slots.shape)}")
        if not rows.is_floating_point():
            raise TypeError(f"rows must have a float dtype, got {rows.dtype}")
        if torch.is_grad_enabled() and rows.requires_grad:
            raise ValueError(
                "rows must not require a gradient, which a cache drops; write them under "
                "torch.no_grad(), or rows.detach()"
            )
        shape = [*slots.shape, self.format.head_dim]
        if list(rows.shape) != shape or rows.device != self.data.device:
            raise ValueError(
                f"rows must have shape {shape} on {self.data.device} for format "
                f"{self.format.name}, got {list(rows.shape)} on {rows.device}"
            )
        if (slots >= self.num_slots).any():
            raise ValueError(f"slots must be below {self.num_slots}, got {int(slots.max())}")
        valid = slots >= 0
        fields = self.format.quantize(rows[valid], scale_mode=scale_mode)
        for view, field in zip(self.fields(), fields, strict=True):
            if view is not None and field is not None:
                scatter_rows(view, slots[valid], field)

    def _check_slots(self, slots: Tensor) -> Tensor:
        """Slots as int64."""
        if self.num_layers is not None:
            raise ValueError(
                f"slots need a single layer; this cache holds {self.num_layers}, pick one with "
                "layer(layer_idx)"
            )
        check_integers("slots", slots)
        return slots.long()


class HostLayer(PagedCache):
    """A layer of rows in host memory, which a GPU reads over its link.

    :meth:`sparsemla.HostCache.layer` makes them. Ops that write caches, ``gather_dequant`` and
    ``fetch_rows`` take them. Attention, which would wait for the link row by row, refuses them.
    """


def misalignment(tensor: Tensor) -> int:
    """The address of a tensor modulo 16, which repeated calls share; other bits they do not."""
    with torch._C.DisableTorchFunction():
        return tensor.data_ptr() % 16


def aligned(*rows: Tensor | PagedCache | None) -> bool:
    """Whether rows of queries and caches start at multiples of 16 bytes."""
    return all(x.aligned if isinstance(x, PagedCache) else _aligned(x) for x in rows)


def _aligned(rows: Tensor | None) -> bool:
    return rows is None or (
        misalignment(rows) == 0
        and all(stride * rows.itemsize % 16 == 0 for stride in rows.stride()[:-1])
    )


def slots_of(page_table: Tensor, request_ids: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Slots of token positions.

    ``page_table[request, pos // page_size] * page_size + pos % page_size``. All integers may be
    int32, int64 or uint32.

    Args:
        page_table: ``[B, W]``, page ids of each request.
        request_ids: ``[...]``, a row of the page table for each position.
        positions: ``[...]``, positions in the request, in tokens.
        page_size: tokens per page.

    Returns:
        ``[...]`` int64; -1 where the request or the position is outside the table, or where the
        page id is negative or too large for an int64 slot.

    Raises:
        TypeError: a tensor that does not hold integers, or a page_size that is not an integer.
        ValueError: a page_table without two dimensions, or a page_size below 1.

    >>> table = torch.tensor([[7, 2, -1]])
    >>> slots_of(table, torch.zeros(4, dtype=int), torch.tensor([0, 5, 9, 99]), 4)
    tensor([28,  9, -1, -1])
    """
    check_integers("page_table", page_table)
    check_integers("request_ids", request_ids)
    check_integers("positions", positions)
    check_integer("page_size", page_size, 1)
    if page_table.dim() != 2:
        raise ValueError(f"page_table must have shape [B, W], got {list(page_table.shape)}")
    positions, request_ids = positions.long(), request_ids.long()
    if page_table.dtype == torch.uint32:  # torch does not index uint32 tensors
        page_table = page_table.long()
    if page_table.numel() == 0:
        shape = torch.broadcast_shapes(request_ids.shape, positions.shape)
        return positions.new_full(shape, -1)
    logical = torch.div(positions, page_size, rounding_mode="floor")
    rows = request_ids.clamp(0, page_table.shape[0] - 1)
    inside = (positions >= 0) & (logical < page_table.shape[1]) & (rows == request_ids)
    pages = page_table[rows, torch.where(inside, logical, 0)].long()
    inside &= (pages >= 0) & (pages <= (2**63 - page_size) // page_size)
    slots = pages * page_size + (positions - logical * page_size)
    return torch.where(inside, slots, -1)


def to_int32(slots: Tensor) -> Tensor:
    """int64 slots, or workspace rows, as int32; -1 where they do not fit.

    >>> to_int32(torch.tensor([5, -1, 2**31, 2**32 + 5]))
    tensor([ 5, -1, -1, -1], dtype=torch.int32)
    """
    return slots.where((slots >= 0) & (slots < 2**31), -1).int()

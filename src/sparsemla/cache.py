"""Paged caches: typed views over pages of any format, and slot arithmetic.

A *slot* is ``page * page_size + offset``: it names one row of one layer. A negative slot means
"no row": writes skip it, attention masks it.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

import torch
from torch import Tensor

from sparsemla.formats import (
    CacheFormat,
    RowFields,
    ScaleMode,
    bf16_format,
    is_named,
    scatter_rows,
)
from sparsemla.kinds import check_integer, check_integers, check_kind


@dataclass(frozen=True, eq=False)
class PagedCache:
    """Pages of latent rows, or of indexer keys.

    Args:
        data: ``[num_pages, page_size, row_width]`` of ``format.storage_dtype`` (any one-byte dtype
            for the quantised formats), or ``[num_pages, num_layers, page_size, row_width]`` for a
            cache that keeps several layers in a page. Page, layer and row strides are read from
            the tensor.
        format: the rows' format. It is never guessed from a size.
        scales: ``[num_pages, (num_layers,) page_size, num_scales]`` float32, only for the formats
            with ``scales_in == "tensor"``.

    Raises:
        TypeError: a dtype that the format does not have.
        ValueError: a format that :func:`sparsemla.get_format` does not give by its name; a rank,
            width, stride or scale tensor that does not match the format.

    >>> from sparsemla.formats import FP8_DS_MLA
    >>> cache = PagedCache.allocate(FP8_DS_MLA, num_pages=8, page_size=64)
    >>> cache.write(torch.tensor([3, 64]), torch.randn(2, 576))
    >>> cache.read(torch.tensor([64])).shape
    torch.Size([1, 576])
    """

    data: Tensor
    format: CacheFormat
    scales: Tensor | None = None

    def __post_init__(self) -> None:
        fmt = self.format
        check_kind("data", self.data, Tensor)
        check_kind("format", fmt, CacheFormat)
        # Operators know a format by its name. Dynamo warns of the kept answers; the operator looks.
        if not torch.compiler.is_compiling() and not is_named(fmt):
            raise ValueError(
                "format must be one that ops read, a constant of sparsemla or made by bf16_format "
                f"or e4m3_format, got {fmt}"
            )
        self.check_layout()

    def check_layout(self) -> None:
        """Check data and scales against the format, which no op has to know."""
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
        if data.numel():  # strides of nothing may be any
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
            needed = data.shape[-2] * fmt.row_width  # padding behind a page is never looked at
            if data.shape[0] > 1 and page_stride < needed:
                raise ValueError(
                    f"data must have a page stride of at least {needed} bytes for format "
                    f"{fmt.name} and page size {data.shape[-2]}, got {page_stride}"
                )
            # The tensor says where pages start and no more: their inside is the format's.
            if data.shape[-2] > 1 and data.stride(-2) != fmt.row_width:
                raise ValueError(
                    f"data must have rows that stand {fmt.row_width} bytes apart for format "
                    f"{fmt.name}, got {data.stride(-2)}"
                )
        # Typed views of a byte tensor need every stride to be a multiple of the widest field.
        if fmt.storage_dtype == torch.uint8:
            unit = (
                fmt.scale_dtype.itemsize if fmt.bf16_dim == 0 else max(2, fmt.scale_dtype.itemsize)
            )
            strides = data.stride()[:-2] if fmt.scales_in == "page" else data.stride()[:-1]
            # Dynamo cannot ask for an offset; in compiled code the views themselves refuse it.
            offset = 0 if torch.compiler.is_compiling() else data.storage_offset()
            if any(s % unit for s in (*strides, offset)):
                raise ValueError(
                    f"data must have strides and an offset that are multiples of {unit} bytes for "
                    f"format {fmt.name}, got {data.stride()} at {offset}"
                )

    @classmethod
    def allocate(
        cls,
        format: CacheFormat,
        num_pages: int,
        page_size: int,
        *,
        num_layers: int | None = None,
        device: torch.device | str | None = None,
    ) -> PagedCache:
        """A zeroed cache with the format's own strides."""
        check_kind("format", format, CacheFormat)
        data, scales = format.allocate(num_pages, page_size, num_layers=num_layers, device=device)
        return cls(data, format, scales)

    @classmethod
    def unchecked(cls, data: Tensor, format: CacheFormat, scales: Tensor | None) -> PagedCache:
        """The cache of parts that come from another one, and fit each other as they did there."""
        cache = object.__new__(cls)
        vars(cache).update(data=data, format=format, scales=scales)
        return cache

    @classmethod
    def from_rows(cls, rows: Tensor, value_dim: int = 512) -> PagedCache:
        """bfloat16 ``rows [S, head_dim]`` as a cache of page size 1, so that slot == row."""
        check_kind("rows", rows, Tensor)
        if rows.dim() != 2:
            raise ValueError(f"rows must have shape [S, head_dim], got {list(rows.shape)}")
        if rows.dtype != torch.bfloat16:
            raise TypeError(f"rows must have dtype bfloat16, got {rows.dtype}")
        check_integer("value_dim", value_dim, 1)
        return cls(rows.unsqueeze(1), bf16_format(rows.shape[-1], min(value_dim, rows.shape[-1])))

    @property
    def num_pages(self) -> int:
        return self.data.shape[0]

    @property
    def page_size(self) -> int:
        return self.data.shape[-2]

    @property
    def num_slots(self) -> int:
        """Rows of one layer."""
        return self.num_pages * self.page_size

    @property
    def num_layers(self) -> int | None:
        """Layers kept in each page, or None for the cache of one layer."""
        return self.data.shape[1] if self.data.dim() == 4 else None

    @property
    def aligned(self) -> bool:
        """Whether there are rows, and all start at multiples of 16 bytes: what wide copies need."""
        fmt, data = self.format, self.data
        apart = data.stride()[:-1]
        if fmt.scales_in == "page":  # whose rows lie as the format says
            apart = (*data.stride()[:-2], fmt.fp8_dim + 2 * fmt.bf16_dim)
        starts = (data.data_ptr(), *(n * data.itemsize for n in apart))
        return data.numel() > 0 and all(start % 16 == 0 for start in starts)

    def layer(self, layer_idx: int) -> PagedCache:
        """One layer of a cache that keeps several in a page; a view.

        Raises:
            ValueError: the cache has one layer only, or no such layer.
        """
        if self.num_layers is None:
            raise ValueError("layer_idx given, but the cache holds a single layer")
        check_kind("layer_idx", layer_idx, Integral)
        if not 0 <= layer_idx < self.num_layers:
            raise ValueError(f"layer_idx must lie in [0, {self.num_layers}), got {layer_idx}")
        scales = None if self.scales is None else self.scales[:, layer_idx]
        return PagedCache.unchecked(self.data[:, layer_idx], self.format, scales)

    def fields(self) -> RowFields:
        """Typed views ``[num_pages, (num_layers,) page_size, n]`` of the stored parts."""
        return self.format.fields(self.data, self.scales)

    def stored(self) -> RowFields:
        """:meth:`fields` with e4m3 and e8m0 as the bytes they are, which is what kernels take."""
        return self.format.stored(self.data, self.scales)

    def gather(self, slots: Tensor) -> RowFields:
        """The stored parts ``[..., n]`` of ``slots [...]``, all of them valid."""
        check_integers("slots", slots)
        slots = slots.long()
        pages = torch.div(slots, self.page_size, rounding_mode="floor")
        offsets = slots - pages * self.page_size
        parts = (None if view is None else view[pages, offsets] for view in self.fields())
        return RowFields(*parts)

    def read(self, slots: Tensor) -> Tensor:
        """Dequantised bfloat16 rows ``[..., head_dim]`` of ``slots [...]``, all of them valid."""
        return self.format.dequantize(self.gather(slots))

    @torch.no_grad()
    def write(self, slots: Tensor, rows: Tensor, *, scale_mode: ScaleMode = "pow2") -> None:
        """Quantise ``rows [N, head_dim]`` and store them at ``slots [N]``; negative slots skip.

        Reads the slots, so it waits for the device; the ops that write caches do not.

        Raises:
            TypeError: slots that are not int32, int64 or uint32, or rows that are no floats.
            ValueError: a cache of several layers, rows of another shape or device, or a slot
                behind the last; the cache is untouched then.
        """
        if self.num_layers is not None:
            raise ValueError(
                f"a cache of one layer is written; this one holds {self.num_layers}, pick one with "
                "layer(layer_idx)"
            )
        check_integers("slots", slots)
        check_kind("rows", rows, Tensor)
        if slots.dim() != 1:
            raise ValueError(f"slots must have shape [N], got {list(slots.shape)}")
        slots = slots.long()
        if not rows.is_floating_point():
            raise TypeError(f"rows must have a float dtype, got {rows.dtype}")
        shape = [*slots.shape, self.format.head_dim]
        if list(rows.shape) != shape or rows.device != self.data.device:
            raise ValueError(
                f"rows must have shape {shape} on {self.data.device} for format "
                f"{self.format.name}, got {list(rows.shape)} on {rows.device}"
            )
        if (slots >= self.num_slots).any():
            raise ValueError(f"slots must be below {self.num_slots}, got {int(slots.max())}")
        keep = slots >= 0
        stored = self.format.quantize(rows[keep], scale_mode=scale_mode)
        for view, part in zip(self.fields(), stored, strict=True):
            if view is not None and part is not None:
                scatter_rows(view, slots[keep], part)


def slots_of(page_table: Tensor, request_ids: Tensor, positions: Tensor, page_size: int) -> Tensor:
    """Slots of token positions: ``page_table[request, pos // page_size] * page_size + offset``.

    Args:
        page_table: ``[B, W]`` integer, page ids of each request.
        request_ids: ``[...]`` integer, row of the page table.
        positions: ``[...]`` integer, positions in the request.
        page_size: tokens of a page.

    Returns:
        int64 ``[...]``; -1 where the request or the position is negative or outside the table, or
        where the table holds a page id that is negative or has no slots below 2**63.

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
    positions = positions.long()
    if page_table.dtype == torch.uint32:  # torch does not look into such a tensor
        page_table = page_table.long()
    if page_table.numel() == 0:  # no entry to look into
        shape = torch.broadcast_shapes(request_ids.shape, positions.shape)
        return positions.new_full(shape, -1)
    logical = torch.div(positions, page_size, rounding_mode="floor")
    rows = request_ids.long().clamp(0, page_table.shape[0] - 1)
    inside = (positions >= 0) & (logical < page_table.shape[1]) & (rows == request_ids)
    pages = page_table[rows, torch.where(inside, logical, 0)].long()
    inside &= (pages >= 0) & (pages <= (2**63 - page_size) // page_size)
    slots = pages * page_size + (positions - logical * page_size)
    return torch.where(inside, slots, -1)


def to_int32(slots: Tensor) -> Tensor:
    """int64 slots, or rows of a workspace, as int32; -1 where they do not fit.

    >>> to_int32(torch.tensor([5, -1, 2**31, 2**32 + 5]))
    tensor([ 5, -1, -1, -1], dtype=torch.int32)
    """
    return slots.where((slots >= 0) & (slots < 2**31), -1).int()

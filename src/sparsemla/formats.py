"""Cache formats: what a row of a latent cache is, byte for byte.

Every byte offset of the package stands in this file. Everything else sees a cache through
:meth:`CacheFormat.fields`, which turns the raw pages into three typed, strided views:

========  ==========================  ====================================================
view      dtype                       holds
========  ==========================  ====================================================
fp8       float8_e4m3fn               the leading ``fp8_dim`` dims of each row, quantised
scales    float32 or float8_e8m0fnu   one factor for each ``scale_block`` of those dims
bf16      bfloat16                    the remaining dims, unquantised
========  ==========================  ====================================================

A row is worth ``concat(bfloat16(float32(fp8) * scale), bf16)``.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from sparsemla.kinds import check_device, check_integer, check_kind

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""

FLOAT32_TINY = torch.finfo(torch.float32).tiny

ScaleMode = Literal["pow2", "exact"]
"""``pow2`` rounds each scale up to a power of two; ``exact`` keeps ``amax / 448``."""


class RowFields(NamedTuple):
    """The parts of cache rows, each ``[..., dims of that part]``; a part a format lacks is None."""

    fp8: Tensor | None
    scales: Tensor | None
    bf16: Tensor | None


def ceil_pow2(x: Tensor) -> Tensor:
    """Smallest power of two that is not below ``x``, read off the bits of a positive float32.

    >>> ceil_pow2(torch.tensor([1.0, 1.5, 2.0]))
    tensor([1., 2., 2.])
    """
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent.to(torch.int32) << 23).view(torch.float32)


def fp8_scales(amax: Tensor) -> Tensor:
    """``amax / 448``, correctly rounded: torch divides a GPU tensor by a number inexactly."""
    return amax / torch.full_like(amax, FP8_MAX)


def to_fp8(x: Tensor) -> Tensor:
    """Round float32 to e4m3 (nearest even), saturating at +-448."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


@dataclass(frozen=True)
class CacheFormat:
    """How one token is stored in a cache.

    Args:
        name: the format's name, which :func:`get_format` turns back into the format.
        head_dim: dims of a row (the key).
        value_dim: leading dims of the row that are also its value.
        fp8_dim: leading dims stored as e4m3; the others are bfloat16.
        scale_block: dims that share one scale; 0 means every scale is 1 and none is stored.
        scale_dtype: dtype of a stored scale; any value of it can be read back.
        scales_in: where the scales live: ``row`` (behind the row's e4m3 values), ``page`` (a region
            behind the page's rows), ``tensor`` (a tensor of their own) or ``none``.
        scale_row_bytes: bytes a row takes in the page's scale region, padding included.
        page_alignment: a page's bytes are rounded up to a multiple of this.
        min_amax: the quantiser raises ``amax`` to at least this before dividing by 448.
        min_scale: the power-of-two quantiser raises ``amax / 448`` to at least this.
    """

    name: str
    head_dim: int
    value_dim: int
    fp8_dim: int = 0
    scale_block: int = 0
    scale_dtype: torch.dtype = torch.float32
    scales_in: Literal["none", "row", "page", "tensor"] = "none"
    scale_row_bytes: int = 0
    page_alignment: int = 1
    min_amax: float = 0.0
    min_scale: float = FLOAT32_TINY

    def __hash__(self) -> int:
        return hash(self.name)  # every call of an op asks for it, and names differ

    @property
    def num_scales(self) -> int:
        """Scales stored for each row."""
        return -(-self.fp8_dim // self.scale_block) if self.scale_block else 0

    @property
    def bf16_dim(self) -> int:
        """Dims stored unquantised."""
        return self.head_dim - self.fp8_dim

    @property
    def storage_dtype(self) -> torch.dtype:
        """Dtype of the page tensor: bfloat16, float8_e4m3fn, or uint8 where fields are mixed."""
        if self.fp8_dim == 0:
            return torch.bfloat16
        return torch.uint8 if self.scales_in in ("row", "page") else torch.float8_e4m3fn

    @property
    def _inline_scale_bytes(self) -> int:
        return self.num_scales * self.scale_dtype.itemsize if self.scales_in == "row" else 0

    @property
    def _row_bytes(self) -> int:
        """Bytes of a row where rows lie one behind the other, scale region apart."""
        return self.fp8_dim + self._inline_scale_bytes + 2 * self.bf16_dim

    @property
    def row_width(self) -> int:
        """Last dimension of the page tensor, in elements of ``storage_dtype``."""
        return (self._row_bytes + self.scale_row_bytes) // self.storage_dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token takes, page padding apart."""
        separate = self.num_scales * self.scale_dtype.itemsize if self.scales_in == "tensor" else 0
        return self._row_bytes + self.scale_row_bytes + separate

    def page_bytes(self, page_size: int) -> int:
        """Bytes from one page to the next in a cache that holds nothing else.

        >>> FP8_584.page_bytes(64)
        37440
        """
        page = page_size * (self._row_bytes + self.scale_row_bytes)
        return -(-page // self.page_alignment) * self.page_alignment

    def allocate(
        self,
        num_pages: int,
        page_size: int,
        *,
        num_layers: int | None = None,
        device: torch.device | str | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Zeroed pages, and the scale tensor of the formats that keep one.

        Returns:
            data ``[num_pages, (num_layers,) page_size, row_width]`` of ``storage_dtype``, and
            scales ``[num_pages, (num_layers,) page_size, num_scales]`` float32 or None.
        """
        check_integer("num_pages", num_pages)
        check_integer("page_size", page_size, 1)
        check_integer("num_layers", 1 if num_layers is None else num_layers, 1)
        check_device("device", device)
        lead = (num_pages,) if num_layers is None else (num_pages, num_layers)
        width = self.page_bytes(page_size) // self.storage_dtype.itemsize
        pages = torch.zeros(*lead, width, dtype=self.storage_dtype, device=device)
        data = pages[..., : page_size * self.row_width].unflatten(-1, (page_size, self.row_width))
        scales = None
        if self.scales_in == "tensor":
            shape = (*lead, page_size, self.num_scales)
            scales = torch.zeros(shape, dtype=self.scale_dtype, device=device)
        return data, scales

    def fields(self, data: Tensor, scales: Tensor | None = None) -> RowFields:
        """Typed views of the rows in ``data [..., page_size, row_width]``; nothing is copied.

        Strides are taken from the tensor, so pages may lie apart and, where a format keeps its
        whole row together, rows may too.
        """
        fp8, scales, bf16 = self.stored(data, scales)
        return RowFields(
            None if fp8 is None else fp8[..., : self.fp8_dim].view(torch.float8_e4m3fn),
            None if scales is None else scales.view(self.scale_dtype),
            bf16,
        )

    def stored(self, data: Tensor, scales: Tensor | None = None) -> RowFields:
        """:meth:`fields` as kernels take them: e4m3 and e8m0 as the bytes they are.

        A row of ``fp8`` may go on behind its e4m3 values: to a kernel that makes no difference.
        """
        if self.fp8_dim == 0:
            return RowFields(None, None, _viewed(data, torch.bfloat16))
        data = _viewed(data, torch.uint8)
        scale_dtype = torch.uint8 if self.scale_dtype.itemsize == 1 else self.scale_dtype
        if self.scales_in == "tensor" or self.scales_in == "none":
            return RowFields(data, None if scales is None else _viewed(scales, scale_dtype), None)
        scale_bytes, bf16_bytes = self.num_scales * self.scale_dtype.itemsize, 2 * self.bf16_dim
        bf16 = None
        if self.scales_in == "page":
            # The tensor is only a carrier: the page holds all data rows, then all scale rows.
            row = self.fp8_dim + bf16_bytes
            fp8 = _region(data, 0, row, self.fp8_dim)
            tail = _region(data, row * data.shape[-2], self.scale_row_bytes, scale_bytes)
            if bf16_bytes:
                bf16 = _region(data, self.fp8_dim, row, bf16_bytes).view(torch.bfloat16)
        else:
            fp8, bf16_at = data, self.fp8_dim + scale_bytes
            tail = data[..., self.fp8_dim : bf16_at]
            if bf16_bytes:
                bf16 = data[..., bf16_at : bf16_at + bf16_bytes].view(torch.bfloat16)
        return RowFields(fp8, _viewed(tail, scale_dtype), bf16)

    def quantize(self, rows: Tensor, *, scale_mode: ScaleMode = "pow2") -> RowFields:
        """Rows as they are stored.

        For each block of ``scale_block`` dims, ``scale = max(max(amax, min_amax) / 448, floor)``,
        rounded up to a power of two unless ``scale_mode`` is ``exact``, and
        ``fp8 = e4m3(clamp(x / scale, +-448))``. The other dims are cast to bfloat16. NaN does not
        count in ``amax`` and stays NaN: the block's other values keep their scale.

        Args:
            rows: ``[..., head_dim]``, any float dtype.
            scale_mode: ``pow2`` or ``exact`` (float32 scales only).
        """
        if self.fp8_dim == 0:
            return RowFields(None, None, rows.to(torch.bfloat16))
        x = rows[..., : self.fp8_dim].float()
        rest = rows[..., self.fp8_dim :].to(torch.bfloat16) if self.bf16_dim else None
        if self.scale_block == 0:
            return RowFields(to_fp8(x), None, rest)
        scales = self._block_scales(x, scale_mode)
        return RowFields(to_fp8(x / self._spread(scales)), scales.to(self.scale_dtype), rest)

    def dequantize(self, fields: RowFields) -> Tensor:
        """bfloat16 rows ``[..., head_dim]`` of stored ones: ``bfloat16(float32(fp8) * scale)``."""
        if fields.fp8 is None:
            return cast(Tensor, fields.bf16)
        x = fields.fp8.float()
        if fields.scales is not None:
            x = x * self._spread(fields.scales.float())
        x = x.to(torch.bfloat16)
        return x if fields.bf16 is None else torch.cat([x, fields.bf16], dim=-1)

    def pack(self, fields: RowFields, page_size: int) -> tuple[Tensor, Tensor | None]:
        """Pages that hold rows ``[num_rows, ...]`` one after the other; the last is zero-padded.

        >>> rows = FP8_DS_MLA.quantize(torch.randn(5, 576))
        >>> data, _ = FP8_DS_MLA.pack(rows, page_size=4)
        >>> data.shape, data.dtype
        (torch.Size([2, 4, 656]), torch.uint8)
        >>> torch.equal(FP8_DS_MLA.unpack(data).scales[:5], rows.scales)
        True
        """
        num_rows = next(part.shape[0] for part in fields if part is not None)
        device = next(part.device for part in fields if part is not None)
        slots = torch.arange(num_rows, device=device)
        data, scales = self.allocate(-(-num_rows // page_size), page_size, device=device)
        for view, part in zip(self.fields(data, scales), fields, strict=True):
            if view is not None and part is not None:
                scatter_rows(view, slots, part)
        return data, scales

    def unpack(self, data: Tensor, scales: Tensor | None = None) -> RowFields:
        """All rows of ``data [num_pages, page_size, row_width]`` in slot order, bit for bit."""
        views = self.fields(data, scales)
        return RowFields(*(None if view is None else view.flatten(0, 1) for view in views))

    def _block_scales(self, x: Tensor, scale_mode: ScaleMode) -> Tensor:
        pad = self.num_scales * self.scale_block - self.fp8_dim
        blocks = torch.nn.functional.pad(x, (0, pad)).unflatten(-1, (self.num_scales, -1))
        magnitudes = blocks.abs().where(~blocks.isnan(), 0.0)
        scales = fp8_scales(magnitudes.amax(dim=-1).clamp_min(self.min_amax))
        if scale_mode == "exact":
            if self.scale_dtype != torch.float32:
                raise ValueError(f"scale_mode must be 'pow2' for format {self.name}, got 'exact'")
            return scales.clamp_min(FLOAT32_TINY)
        if scale_mode != "pow2":
            raise ValueError(f"scale_mode must be 'pow2' or 'exact', got {scale_mode!r}")
        return ceil_pow2(scales.clamp_min(self.min_scale))

    def _spread(self, scales: Tensor) -> Tensor:
        """One scale for each quantised dim."""
        return scales.repeat_interleave(self.scale_block, dim=-1)[..., : self.fp8_dim]


def _viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` as ``dtype``: a view that changes nothing takes torch as long as one that does."""
    return x if x.dtype == dtype else x.view(dtype)


def _region(data: Tensor, offset: int, row_stride: int, row_bytes: int) -> Tensor:
    """Bytes ``[..., page_size, row_bytes]`` that start ``offset`` bytes into each page."""
    strides = (*data.stride()[:-2], row_stride, 1)
    shape = (*data.shape[:-1], row_bytes)
    return data.as_strided(shape, strides, data.storage_offset() + offset)


def scatter_rows(view: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write ``rows [N, n]`` to ``slots [N]`` of ``view [num_pages, page_size, n]``, bit for bit."""
    page_size = view.shape[1]
    # index_put_ is missing for float8_e8m0fnu; bytes of a one-byte dtype move as uint8.
    if view.dtype.itemsize == 1:
        view, rows = view.view(torch.uint8), rows.view(torch.uint8)
    pages = torch.div(slots, page_size, rounding_mode="floor")
    view[pages, slots - pages * page_size] = rows


def bf16_format(head_dim: int, value_dim: int | None = None) -> CacheFormat:
    """Unquantised rows of ``head_dim`` bfloat16; the first ``value_dim`` (or all) are the value."""
    value_dim = head_dim if value_dim is None else value_dim
    _check_dims(head_dim, value_dim)
    return CacheFormat(f"bf16_{head_dim}v{value_dim}", head_dim, value_dim)


def e4m3_format(head_dim: int = 576, value_dim: int = 512, scale_block: int = 128) -> CacheFormat:
    """Rows of ``head_dim`` e4m3 (RoPE dims too) with float32 scales in a tensor of their own.

    ``scale_block`` 0 stores no scales (each is 1), ``head_dim`` one for each row.
    """
    _check_dims(head_dim, value_dim)
    check_integer("scale_block", scale_block)
    if scale_block > head_dim:
        raise ValueError(f"scale_block must lie in [0, head_dim {head_dim}], got {scale_block}")
    return CacheFormat(
        f"e4m3_{head_dim}v{value_dim}b{scale_block}",
        head_dim,
        value_dim,
        fp8_dim=head_dim,
        scale_block=scale_block,
        scales_in="tensor" if scale_block else "none",
    )


def _check_dims(head_dim: int, value_dim: int) -> None:
    check_integer("head_dim", head_dim, 1)
    check_integer("value_dim", value_dim, 1)
    if not 0 < value_dim <= head_dim:
        raise ValueError(f"value_dim must lie in [1, head_dim {head_dim}], got {value_dim}")


BF16_576 = bf16_format(576, 512)
"""Latent 512 and RoPE 64, unquantised: 1152 bytes a token."""

BF16_512 = bf16_format(512)
"""One 512-dim vector that is key and value: 1024 bytes a token."""

FP8_DS_MLA = CacheFormat("fp8_ds_mla", 576, 512, 512, 128, scales_in="row", min_scale=1e-4)
"""DeepSeek-V3.2's 656 bytes: 512 e4m3, 4 float32 scales, 64 bfloat16."""

FP8_584 = CacheFormat(
    "fp8_584",
    512,
    512,
    fp8_dim=448,
    scale_block=64,
    scale_dtype=torch.float8_e8m0fnu,
    scales_in="page",
    scale_row_bytes=8,
    page_alignment=576,
    min_amax=1e-4,
)
"""DeepSeek-V4's 584 bytes: 448 e4m3 and 64 bfloat16; 7 exponent scales behind the page's rows."""

INDEX_FP8 = CacheFormat(
    "index_fp8", 128, 128, 128, 128, scales_in="page", scale_row_bytes=4, min_amax=1e-4
)
"""Indexer keys, 132 bytes: 128 e4m3; one float32 scale behind the page's rows."""

_FIXED = {fmt.name: fmt for fmt in (FP8_DS_MLA, FP8_584, INDEX_FP8)}


def get_format(name: str) -> CacheFormat:
    """The format called ``name``.

    >>> get_format("bf16_576v512") == BF16_576
    True

    Raises:
        TypeError: the name is no string.
        ValueError: no format has this name.
    """
    check_kind("format name", name, str)
    return _named(name)


@functools.cache
def _named(name: str) -> CacheFormat:
    if name in _FIXED:
        return _FIXED[name]
    if match := re.fullmatch(r"bf16_(\d+)v(\d+)", name):
        return bf16_format(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"e4m3_(\d+)v(\d+)b(\d+)", name):
        return e4m3_format(int(match[1]), int(match[2]), int(match[3]))
    known = [*_FIXED, "bf16_<head_dim>v<value_dim>", "e4m3_<head_dim>v<value_dim>b<scale_block>"]
    raise ValueError(f"format name must be one of {', '.join(known)}; got {name!r}")


def is_named(fmt: CacheFormat) -> bool:
    """Whether the format is the one that :func:`get_format` gives by its name."""
    try:
        return get_format(fmt.name) == fmt
    except ValueError:
        return False

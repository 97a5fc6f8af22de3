"""Cache formats: the bytes of a cache row.

This file has every byte offset of the package. All other code sees a cache through
:meth:`CacheFormat.fields`, which turns the raw pages into three typed, strided views:

========  ==========================  ====================================================
view      dtype                       contents
========  ==========================  ====================================================
fp8       float8_e4m3fn, or uint8     codes of the leading ``fp8_dim`` dims of each row
scales    float32, float8_e8m0fnu     one scale per ``scale_block`` quantised dims
          or float8_e4m3fn
bf16      bfloat16                    the remaining dims, unquantised
========  ==========================  ====================================================

Codes are e4m3, or e2m1 (FP4) with two dims in a byte, the even one in the low bits. The value of a
row is ``concat(bfloat16(float32(code) * scale), bf16)``.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor

from sparsemla.state import Table, outside_autocast
from sparsemla.validation import check_device, check_integer, check_kind, not_one_of

FP8_MAX = 448.0
"""Largest finite float8_e4m3fn."""

FLOAT32_MAX = torch.finfo(torch.float32).max
"""Largest finite float32."""

E2M1_MAX = 6.0
"""Largest e2m1."""

E2M1_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Halfway between neighbours of e2m1's magnitudes 0, 0.5, 1, 1.5, 2, 3, 4 and 6."""

LATENT_DIM = 512
"""Leading dims of an unquantised row that are its value; all dims of a shorter row."""

FLOAT32_TINY = torch.finfo(torch.float32).tiny

ScaleMode = Literal["pow2", "exact"]
"""``pow2`` rounds each scale up to a power of two; ``exact`` keeps ``amax / 448``."""


class RowFields(NamedTuple):
    """The fields of cache rows; None for a field that the format lacks.

    Attributes:
        fp8: ``[..., fp8_dim]`` float8_e4m3fn; e2m1 codes are uint8 ``[..., fp8_dim / 2]``.
        scales: ``[..., num_scales]`` of the format's ``scale_dtype``.
        bf16: ``[..., bf16_dim]`` bfloat16.

    >>> fields = FP8_DS_MLA.quantize(torch.ones(5, 576))
    >>> fields.fp8.shape, fields.scales.shape, fields.bf16.shape
    (torch.Size([5, 512]), torch.Size([5, 4]), torch.Size([5, 64]))
    """

    fp8: Tensor | None
    scales: Tensor | None
    bf16: Tensor | None


def ceil_pow2(x: Tensor) -> Tensor:
    """The smallest power of two at or above ``x``, for positive float32 ``x``.

    >>> ceil_pow2(torch.tensor([1.0, 1.5, 2.0]))
    tensor([1., 2., 2.])
    """
    bits = x.view(torch.int32)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0)
    return (exponent.to(torch.int32) << 23).view(torch.float32)


def fp8_scales(amax: Tensor) -> Tensor:
    """``amax / 448``, correctly rounded.

    Dividing by a tensor matters: on a GPU torch turns division by a Python number into
    multiplication by its reciprocal.
    """
    return amax / torch.full_like(amax, FP8_MAX)


def to_fp8(x: Tensor) -> Tensor:
    """Round float32 to e4m3, to nearest even, saturating at ±448."""
    return x.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)


def to_e2m1(x: Tensor) -> Tensor:
    """Round float32 ``x [..., n]`` to e2m1, to nearest even, saturating at ±6; NaN becomes 6.

    Returns:
        uint8 ``[..., n / 2]``: two codes a byte, the even dim in the low bits.

    >>> to_e2m1(torch.tensor([0.25, 0.75, -5.0, 1e9]))
    tensor([ 32, 126], dtype=torch.uint8)
    """
    magnitude = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for below, middle in enumerate(E2M1_MIDDLES):  # ties go to the even code
        code += magnitude >= middle if below % 2 else magnitude > middle
    code = (code + 8 * x.signbit().to(torch.uint8)).where(~x.isnan(), 7)
    return code[..., 0::2] | code[..., 1::2] << 4


def from_e2m1(pairs: Tensor) -> Tensor:
    """bfloat16 ``[..., 2 n]`` of the e2m1 codes in ``pairs [..., n]``, exact.

    >>> from_e2m1(torch.tensor([32, 126], dtype=torch.uint8))
    tensor([ 0.,  1., -4.,  6.], dtype=torch.bfloat16)
    """
    return _e2m1_pairs(pairs.device)[pairs.int()].view(torch.bfloat16)


@Table
def _e2m1_pairs(device: torch.device) -> Tensor:
    """int32 ``[256]``: two e2m1 codes to their two bfloat16 values, low bits first."""
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.bfloat16, device=device)
    values = torch.cat([values, -values])
    codes = torch.arange(256, device=device)
    return torch.stack([values[codes & 15], values[codes >> 4]], -1).view(torch.int32).squeeze(-1)


@dataclass(frozen=True)
class CacheFormat:
    """The storage of one token in a cache.

    Use the constants of the package, :func:`bf16_format` or :func:`e4m3_format`; ops take no other
    formats.

    Args:
        name: name of the format; :func:`get_format` returns the format for this name.
        head_dim: dims of a row; the row is the key.
        value_dim: leading dims of the row that are also the value.
        fp8_dim: leading dims that are quantised; the others are bfloat16.
        scale_block: dims per scale; 0 stores no scales, and each scale is 1.
        scale_dtype: dtype of a stored scale: float32, or e8m0, a power of two, or e4m3.
        scales_in: place of the scales: ``row`` (after the row's e4m3 values), ``page`` (after all
            rows of the page), ``tensor`` (in a second tensor) or ``none``.
        scale_row_bytes: bytes per row in the page's scale region, including padding.
        page_alignment: the bytes of a page are rounded up to a multiple of this.
        min_amax: lower bound of ``amax`` in the quantiser.
        min_scale: lower bound of a scale in the quantiser, unless ``scale_mode`` is ``exact``.
        max_scale: upper bound of a scale in the quantiser.
        code_dtype: dtype of quantised dims, float8_e4m3fn or float4_e2m1fn_x2.

    >>> FP8_DS_MLA.bytes_per_token, FP8_DS_MLA.num_scales, FP8_DS_MLA.storage_dtype
    (656, 4, torch.uint8)
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
    max_scale: float = float("inf")
    code_dtype: torch.dtype = torch.float8_e4m3fn

    def __hash__(self) -> int:
        return hash(self.name)  # cheap, since each op call hashes the format

    @property
    def num_scales(self) -> int:
        """Scales per row."""
        return -(-self.fp8_dim // self.scale_block) if self.scale_block else 0

    @property
    def bf16_dim(self) -> int:
        """Unquantised dims."""
        return self.head_dim - self.fp8_dim

    @property
    def is_fp4(self) -> bool:
        """Whether quantised dims are e2m1, two in a byte."""
        return self.code_dtype == torch.float4_e2m1fn_x2

    @property
    def code_max(self) -> float:
        """Largest value of a quantised dim before it is scaled."""
        return E2M1_MAX if self.is_fp4 else FP8_MAX

    @property
    def code_bytes(self) -> int:
        """Bytes of the quantised dims of a row."""
        return self.fp8_dim // 2 if self.is_fp4 else self.fp8_dim

    @property
    def holds_index_keys(self) -> bool:
        """Whether the indexer scores rows: of one dtype, and one scale a row or MXFP4."""
        mxfp4 = self.is_fp4 and self.scale_dtype == torch.float8_e8m0fnu
        return self.fp8_dim in (0, self.head_dim) and (self.num_scales <= 1 or mxfp4)

    @property
    def query_dtype(self) -> torch.dtype:
        """Dtype of indexer queries for keys of this format."""
        return torch.float8_e4m3fn if self.fp8_dim and not self.is_fp4 else torch.bfloat16

    @property
    def storage_dtype(self) -> torch.dtype:
        """Dtype of the page tensor: bfloat16, float8_e4m3fn, or uint8 for mixed fields."""
        if self.fp8_dim == 0:
            return torch.bfloat16
        return torch.uint8 if self.scales_in in ("row", "page") else torch.float8_e4m3fn

    @property
    def _inline_scale_bytes(self) -> int:
        return self.num_scales * self.scale_dtype.itemsize if self.scales_in == "row" else 0

    @property
    def _row_bytes(self) -> int:
        """Bytes of a row without its part of the page's scale region."""
        return self.code_bytes + self._inline_scale_bytes + 2 * self.bf16_dim

    @property
    def row_width(self) -> int:
        """Last dimension of the page tensor, in elements of ``storage_dtype``."""
        return (self._row_bytes + self.scale_row_bytes) // self.storage_dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        """Bytes per token, including scales, without page padding."""
        separate = self.num_scales * self.scale_dtype.itemsize if self.scales_in == "tensor" else 0
        return self._row_bytes + self.scale_row_bytes + separate

    def page_bytes(self, page_size: int) -> int:
        """Bytes of a page of ``page_size`` tokens, including padding.

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
        """Allocate zeroed pages, and the scale tensor if the format has one.

        Args:
            num_pages: number of pages.
            page_size: tokens per page.
            num_layers: layers in each page; None for a single layer.
            device: device of the tensors; default torch's default device.

        Returns:
            data ``[num_pages, (num_layers,) page_size, row_width]`` of ``storage_dtype``, and
            scales ``[num_pages, (num_layers,) page_size, num_scales]`` float32 or None.

        Raises:
            TypeError, ValueError: a size that is not an integer or out of range, or a bad device.

        >>> data, scales = INDEX_FP8.allocate(2, 64)
        >>> data.shape, data.dtype, scales
        (torch.Size([2, 64, 132]), torch.uint8, None)
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
        """Typed views of the rows in ``data [..., page_size, row_width]``, without a copy.

        Pages may have any stride. Rows may too, unless the format has scales in the page.

        Args:
            data: pages of ``storage_dtype``, or of any one-byte dtype for quantised formats.
            scales: ``[..., page_size, num_scales]`` for formats with ``scales_in == "tensor"``.

        Returns:
            Views ``[..., page_size, n]``.

        >>> data, _ = FP8_584.allocate(2, 64)
        >>> [tuple(view.shape) for view in FP8_584.fields(data)]
        [(2, 64, 448), (2, 64, 7), (2, 64, 64)]
        """
        fp8, scales, bf16 = self.stored(data, scales)
        # torch does not index float4_e2m1fn_x2 tensors.
        dtype = torch.uint8 if self.is_fp4 else self.code_dtype
        return RowFields(
            None if fp8 is None else fp8[..., : self.code_bytes].view(dtype),
            None if scales is None else scales.view(self.scale_dtype),
            bf16,
        )

    def stored(self, data: Tensor, scales: Tensor | None = None) -> RowFields:
        """:meth:`fields` for kernels: codes and scales of one byte as uint8.

        The last dimension of ``fp8`` may be larger than ``code_bytes``, which saves a slice per
        call; kernels read the first ``code_bytes``.
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
            # The page holds all data rows, then all scale rows; row_width counts both.
            row = self.code_bytes + bf16_bytes
            fp8 = _region(data, 0, row, self.code_bytes)
            tail = _region(data, row * data.shape[-2], self.scale_row_bytes, scale_bytes)
            if bf16_bytes:
                bf16 = _region(data, self.code_bytes, row, bf16_bytes).view(torch.bfloat16)
        else:
            fp8, bf16_at = data, self.code_bytes + scale_bytes
            tail = data[..., self.code_bytes : bf16_at]
            if bf16_bytes:
                bf16 = data[..., bf16_at : bf16_at + bf16_bytes].view(torch.bfloat16)
        return RowFields(fp8, _viewed(tail, scale_dtype), bf16)

    def stored_bytes(self, data: Tensor, scales: Tensor | None = None) -> tuple[Tensor, ...]:
        """All bytes of the rows, padding included, as one view, or with scales kept apart as two.

        Args:
            data: pages, as for :meth:`fields`.
            scales: for formats with ``scales_in == "tensor"``.

        Returns:
            uint8 views ``[..., page_size, n]``, of the row and of its scales.

        >>> data, _ = FP8_584.allocate(2, 64)
        >>> [tuple(view.shape) for view in FP8_584.stored_bytes(data)]
        [(2, 64, 576), (2, 64, 8)]
        """
        data = _viewed(data, torch.uint8)
        if self.scales_in == "page":
            row, tail = self._row_bytes, self.scale_row_bytes
            return (
                _region(data, 0, row, row),
                _region(data, row * data.shape[-2], tail, tail),
            )
        return (data,) if scales is None else (data, _viewed(scales, torch.uint8))

    def quantize(self, rows: Tensor, *, scale_mode: ScaleMode = "pow2") -> RowFields:
        """Quantise rows to the stored fields.

        For each block of ``scale_block`` dims::

            s = max(amax, min_amax) / code_max           times the float32 1 / 6 for e2m1
            pow2:   scale = ceil_pow2(clamp(s, min_scale, max_scale))
            e4m3:   scale = e4m3(clamp(s, min_scale, max_scale))
            exact:  scale = max(s, smallest normal float32)
            code = round(clamp(x / scale, -code_max, code_max))

        ``amax`` is the largest magnitude of the block, ignoring NaN, and rounding is to nearest
        even. Formats with e4m3 scales have the second rule, with e8m0 scales the first. NaNs do not
        change the scale of other values; as e4m3 they stay NaN, as e2m1 they become 6. The
        unquantised dims are cast to bfloat16.

        Args:
            rows: ``[..., head_dim]`` of any floating dtype.
            scale_mode: ``pow2`` or, for float32 scales, ``exact``.

        Raises:
            ValueError: the format lacks the scale mode.

        >>> fields = FP8_DS_MLA.quantize(torch.full((1, 576), 3.0))
        >>> fields.scales[0, 0].item(), fields.fp8[0, 0].item()
        (0.0078125, 384.0)
        """
        if self.fp8_dim == 0:
            return RowFields(None, None, rows.to(torch.bfloat16))
        x = rows[..., : self.fp8_dim].float()
        rest = rows[..., self.fp8_dim :].to(torch.bfloat16) if self.bf16_dim else None
        if self.scale_block == 0:
            return RowFields(to_fp8(x), None, rest)
        scales = self._block_scales(x, scale_mode)
        x = x / self._spread(scales)
        codes = to_e2m1(x) if self.is_fp4 else to_fp8(x)
        return RowFields(codes, scales.to(self.scale_dtype), rest)

    @outside_autocast
    def dequantize(self, fields: RowFields) -> Tensor:
        """bfloat16 rows ``[..., head_dim]``: ``concat(bfloat16(float32(code) * scale), bf16)``.

        >>> rows = torch.full((1, 576), 3.0)
        >>> FP8_DS_MLA.dequantize(FP8_DS_MLA.quantize(rows))[0, :2]
        tensor([3., 3.], dtype=torch.bfloat16)
        """
        if fields.fp8 is None:
            return cast(Tensor, fields.bf16)
        x = (from_e2m1(fields.fp8) if self.is_fp4 else fields.fp8).float()
        if fields.scales is not None:
            x = x * self._spread(fields.scales.float())
        x = x.to(torch.bfloat16)
        return x if fields.bf16 is None else torch.cat([x, fields.bf16], dim=-1)

    def pack(self, fields: RowFields, page_size: int) -> tuple[Tensor, Tensor | None]:
        """Pages, and scales or None, with the rows in slot order; the last page is zero-padded.

        Args:
            fields: ``[num_rows, n]`` each.
            page_size: tokens per page.

        >>> rows = FP8_DS_MLA.quantize(torch.randn(5, 576))
        >>> data, _ = FP8_DS_MLA.pack(rows, page_size=4)
        >>> data.shape, data.dtype
        (torch.Size([2, 4, 656]), torch.uint8)
        >>> torch.equal(FP8_DS_MLA.unpack(data).scales[:5], rows.scales)
        True
        """
        num_rows = next(field.shape[0] for field in fields if field is not None)
        device = next(field.device for field in fields if field is not None)
        slots = torch.arange(num_rows, device=device)
        data, scales = self.allocate(-(-num_rows // page_size), page_size, device=device)
        for view, field in zip(self.fields(data, scales), fields, strict=True):
            if view is not None and field is not None:
                scatter_rows(view, slots, field)
        return data, scales

    def unpack(self, data: Tensor, scales: Tensor | None = None) -> RowFields:
        """The fields ``[num_slots, n]`` of all rows of a cache, in slot order, bit for bit."""
        views = self.fields(data, scales)
        return RowFields(*(None if view is None else view.flatten(0, 1) for view in views))

    def _block_scales(self, x: Tensor, scale_mode: ScaleMode) -> Tensor:
        pad = self.num_scales * self.scale_block - self.fp8_dim
        blocks = torch.nn.functional.pad(x, (0, pad)).unflatten(-1, (self.num_scales, -1))
        magnitudes = blocks.abs().where(~blocks.isnan(), 0.0)
        amax = magnitudes.amax(dim=-1).clamp_min(self.min_amax)
        scales = amax * (1 / E2M1_MAX) if self.is_fp4 else fp8_scales(amax)
        if scale_mode == "exact":
            if self.scale_dtype != torch.float32:
                raise ValueError(f"scale_mode must be 'pow2' for format {self.name}, got 'exact'")
            return scales.clamp_min(FLOAT32_TINY)
        if scale_mode != "pow2":
            raise ValueError(f"scale_mode must be 'pow2' or 'exact', got {scale_mode!r}")
        scales = scales.clamp(self.min_scale, self.max_scale)
        if self.scale_dtype == torch.float8_e4m3fn:
            return scales.to(torch.float8_e4m3fn).float()
        return ceil_pow2(scales)

    def _spread(self, scales: Tensor) -> Tensor:
        """Repeat each scale for the dims of its block."""
        return scales.repeat_interleave(self.scale_block, dim=-1)[..., : self.fp8_dim]


def _viewed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x.view(dtype)``, without the cost of a view if ``x`` has the dtype."""
    return x if x.dtype == dtype else x.view(dtype)


def _region(data: Tensor, offset: int, row_stride: int, row_bytes: int) -> Tensor:
    """Views ``[..., page_size, row_bytes]`` of the bytes from ``offset`` on in each page."""
    strides = (*data.stride()[:-2], row_stride, 1)
    shape = (*data.shape[:-1], row_bytes)
    return data.as_strided(shape, strides, data.storage_offset() + offset)


def scatter_rows(view: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write ``rows [N, n]`` to ``slots [N]`` of ``view [num_pages, page_size, n]``, bit for bit."""
    page_size = view.shape[1]
    # index_put_ does not support float8_e8m0fnu, so one-byte dtypes are written as uint8.
    if view.dtype.itemsize == 1:
        view, rows = view.view(torch.uint8), rows.view(torch.uint8)
    pages = torch.div(slots, page_size, rounding_mode="floor")
    view[pages, slots - pages * page_size] = rows


def bf16_format(head_dim: int, value_dim: int | None = None) -> CacheFormat:
    """The format of unquantised bfloat16 rows.

    Args:
        head_dim: dims of a row.
        value_dim: leading dims that are the value; default all.

    Raises:
        TypeError, ValueError: dims that are not integers, or out of range.

    >>> bf16_format(576, 512).bytes_per_token
    1152
    """
    value_dim = head_dim if value_dim is None else value_dim
    _check_dims(head_dim, value_dim)
    return CacheFormat(f"bf16_{head_dim}v{value_dim}", head_dim, value_dim)


def e4m3_format(head_dim: int = 576, value_dim: int = 512, scale_block: int = 128) -> CacheFormat:
    """The format of e4m3 rows, RoPE dims included, with float32 scales in a second tensor.

    Args:
        head_dim: dims of a row.
        value_dim: leading dims that are the value.
        scale_block: dims per scale, up to ``head_dim`` (one scale per row); 0 stores no scales, and
            each scale is 1.

    Raises:
        TypeError, ValueError: dims that are not integers, or out of range.

    >>> e4m3_format().num_scales, e4m3_format(scale_block=0).scales_in
    (5, 'none')
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
"""512 latent and 64 RoPE dims, unquantised: 1152 bytes per token."""

BF16_512 = bf16_format(512)
"""Rows of 512 dims, unquantised, with key equal to value: 1024 bytes per token."""

FP8_DS_MLA = CacheFormat("fp8_ds_mla", 576, 512, 512, 128, scales_in="row", min_scale=1e-4)
"""DeepSeek-V3.2's 656 bytes per token: 512 e4m3, 4 float32 scales, 64 bfloat16."""

FP8_NOPE = CacheFormat("fp8_nope", 512, 512, 512, 128, scales_in="row", min_scale=1e-4)
"""``FP8_DS_MLA`` without RoPE dims, 528 bytes per token: 512 e4m3, 4 float32 scales."""

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
"""DeepSeek-V4's 584 bytes per token: 448 e4m3 and 64 bfloat16; after the page's rows, 7 e8m0 scales
and a padding byte per token."""

FP8_528 = CacheFormat(
    "fp8_528",
    512,
    512,
    fp8_dim=512,
    scale_block=32,
    scale_dtype=torch.float8_e8m0fnu,
    scales_in="row",
    page_alignment=512,
    min_amax=1e-4,
)
"""DeepSeek-V4.1's 528 bytes per token: 512 e4m3, RoPE dims included, and 16 e8m0 scales."""

FP4_288 = CacheFormat(
    "fp4_288",
    512,
    512,
    fp8_dim=512,
    scale_block=16,
    scale_dtype=torch.float8_e4m3fn,
    scales_in="row",
    page_alignment=512,
    min_scale=2**-9,  # the smallest e4m3
    max_scale=FP8_MAX,
    code_dtype=torch.float4_e2m1fn_x2,
)
"""DeepSeek-V4.1's 288 bytes per pooled row: 512 e2m1, RoPE dims included, and 32 e4m3 scales."""

INDEX_FP8 = CacheFormat(
    "index_fp8", 128, 128, 128, 128, scales_in="page", scale_row_bytes=4, min_amax=1e-4
)
"""Indexer keys, 132 bytes per token: 128 e4m3; after the page's rows, a float32 scale per token."""

INDEX_MXFP4 = CacheFormat(
    "index_mxfp4",
    128,
    128,
    fp8_dim=128,
    scale_block=32,
    scale_dtype=torch.float8_e8m0fnu,
    scales_in="page",
    scale_row_bytes=4,
    min_amax=6 * 2**-126,
    max_scale=2.0**127,
    code_dtype=torch.float4_e2m1fn_x2,
)
"""Indexer keys, 68 bytes per token: 128 e2m1; after the page's rows, 4 e8m0 scales per token."""

_LATENTS = (FP8_DS_MLA, FP8_NOPE, FP8_584, FP8_528, FP4_288)
_FIXED = {fmt.name: fmt for fmt in (*_LATENTS, INDEX_FP8, INDEX_MXFP4)}


def get_format(name: str) -> CacheFormat:
    """The format with this name.

    Args:
        name: ``fp8_ds_mla``, ``fp8_nope``, ``fp8_584``, ``fp8_528``, ``fp4_288``, ``index_fp8``,
            ``index_mxfp4``, ``bf16_<head_dim>v<value_dim>`` or
            ``e4m3_<head_dim>v<value_dim>b<scale_block>``.

    Raises:
        TypeError: the name is not a string.
        ValueError: no format has this name.

    >>> get_format("bf16_576v512") == BF16_576
    True
    """
    check_kind("format name", name, str)
    return _named(name)


@functools.lru_cache(4096)
def _named(name: str) -> CacheFormat:
    if name in _FIXED:
        return _FIXED[name]
    if match := re.fullmatch(r"bf16_(\d+)v(\d+)", name):
        return bf16_format(int(match[1]), int(match[2]))
    if match := re.fullmatch(r"e4m3_(\d+)v(\d+)b(\d+)", name):
        return e4m3_format(int(match[1]), int(match[2]), int(match[3]))
    known = [*_FIXED, "bf16_<head_dim>v<value_dim>", "e4m3_<head_dim>v<value_dim>b<scale_block>"]
    raise not_one_of("format name", known, name)


def as_format(argument: str, value: CacheFormat | str) -> CacheFormat:
    """The format that an argument gives, or names.

    Raises:
        TypeError: the argument is neither a format nor a string.
        ValueError: no format has this name.
    """
    if isinstance(value, str):
        try:
            return get_format(value)
        except ValueError as error:
            raise ValueError(f"{argument}: {error}") from None
    check_kind(argument, value, CacheFormat)
    return value


def is_named(fmt: CacheFormat) -> bool:
    """Whether :func:`get_format` returns this format for its name."""
    try:
        return get_format(fmt.name) == fmt
    except ValueError:
        return False

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import sparsemla
from sparsemla import (
    BF16_512,
    BF16_576,
    FP4_288,
    FP8_528,
    FP8_584,
    FP8_DS_MLA,
    FP8_NOPE,
    INDEX_FP8,
    INDEX_MXFP4,
    PagedCache,
    RowFields,
    bf16_format,
    e4m3_format,
    get_format,
)
from sparsemla.formats import ceil_pow2, from_e2m1, to_fp8
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import assert_equal
from sparsemla_lab.testing.shapes import INDEX_FORMATS, LATENT_FORMATS

FORMATS = [*LATENT_FORMATS, *INDEX_FORMATS, e4m3_format(100, 60, 33)]
by_format = pytest.mark.parametrize("fmt", FORMATS)
with_scales = pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt.num_scales])


def random_fields(fmt, num_rows, seed=0):
    """Arbitrary bits: every code, including NaN, and scales that no quantiser makes."""
    draw = Draw(seed)
    fp8 = scales = bf16 = None
    if fmt.fp8_dim:
        fp8 = draw.integers(0, 256, num_rows, fmt.code_bytes, dtype=torch.uint8)
        fp8 = fp8 if fmt.is_fp4 else fp8.view(torch.float8_e4m3fn)
    if fmt.num_scales and fmt.scale_dtype == torch.float32:
        scales = draw.normal(num_rows, fmt.num_scales) * 1e3
        scales[0] = torch.tensor([0.0, 1e-40, torch.inf, torch.nan] * 5)[: fmt.num_scales]
    elif fmt.num_scales:
        codes = draw.integers(0, 256, num_rows, fmt.num_scales, dtype=torch.uint8)
        scales = codes.view(fmt.scale_dtype)
    if fmt.bf16_dim:
        bits = draw.integers(-(2**15), 2**15, num_rows, fmt.bf16_dim, dtype=torch.int16)
        bf16 = bits.view(torch.bfloat16)
    return RowFields(fp8, scales, bf16)


def assert_same_fields(actual, expected):
    for name, got, wanted in zip(RowFields._fields, actual, expected, strict=True):
        assert (got is None) == (wanted is None), name
        if got is not None:
            assert_equal(name, got, wanted)


@by_format
@given(page_size=st.integers(1, 70), num_rows=st.integers(1, 150), seed=st.integers(0, 9))
def test_pack_and_unpack_keep_all_bits(fmt, page_size, num_rows, seed):
    fields = random_fields(fmt, num_rows, seed)
    data, scales = fmt.pack(fields, page_size)
    num_pages = -(-num_rows // page_size)
    assert data.shape == (num_pages, page_size, fmt.row_width)
    assert data.dtype == fmt.storage_dtype
    stored = fmt.unpack(data, scales)
    firsts = RowFields(*(None if part is None else part[:num_rows] for part in stored))
    assert_same_fields(firsts, fields)
    for part in stored:
        if part is not None and part.dtype != torch.float8_e8m0fnu:
            assert (part[num_rows:].float() == 0).all()


@pytest.mark.parametrize(
    ("fmt", "size"),
    [
        (BF16_576, 1152),
        (BF16_512, 1024),
        (FP8_DS_MLA, 656),
        (FP8_NOPE, 528),
        (FP8_584, 584),
        (FP8_528, 528),
        (FP4_288, 288),
        (INDEX_FP8, 132),
        (INDEX_MXFP4, 68),
        (e4m3_format(), 576 + 5 * 4),
        (e4m3_format(576, 512, 0), 576),
        (e4m3_format(576, 512, 32), 576 + 18 * 4),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_bytes_per_token(fmt, size):
    assert fmt.bytes_per_token == size


def test_the_656_bytes_of_a_row():
    fields = random_fields(FP8_DS_MLA, 7)
    data, _ = FP8_DS_MLA.pack(fields, page_size=3)
    flat = data.reshape(-1)
    for row in range(7):
        record = flat[656 * row : 656 * (row + 1)]
        assert record[:512].tolist() == fields.fp8[row].view(torch.uint8).tolist()
        assert bytes(record[512:528]) == struct.pack("<4f", *fields.scales[row].tolist())
        assert bytes(record[528:]) == bytes(fields.bf16[row].view(torch.uint8))


def test_a_row_without_rope_has_the_first_528_bytes_of_a_row_with_it():
    rows = torch.randn(40, 576)
    rows[3] = 0
    caches = [PagedCache.allocate(fmt, 5, 8) for fmt in (FP8_DS_MLA, FP8_NOPE)]
    for cache in caches:
        cache.write(torch.arange(40), rows[:, : cache.format.head_dim])
    assert_equal("bytes", caches[1].data, caches[0].data[..., :528])


@pytest.mark.parametrize(
    ("page_size", "stride"), [(1, 1152), (2, 1728), (64, 37440), (256, 149760)]
)
def test_the_584_byte_format_keeps_scales_behind_all_rows_of_a_page(page_size, stride):
    assert stride == 576 * -(-584 * page_size // 576)
    assert FP8_584.page_bytes(page_size) == stride
    num_rows = 2 * page_size
    fields = random_fields(FP8_584, num_rows)
    data, _ = FP8_584.pack(fields, page_size)
    assert data.stride() == (stride, 584, 1)
    flat = torch.as_strided(data, (2 * stride,), (1,))
    for row in range(num_rows):
        page, j = divmod(row, page_size)
        record = flat[page * stride + 576 * j :][:576]
        tail = flat[page * stride + 576 * page_size + 8 * j :][:8]
        assert record[:448].tolist() == fields.fp8[row].view(torch.uint8).tolist()
        assert bytes(record[448:]) == bytes(fields.bf16[row].view(torch.uint8))
        assert tail.tolist() == [*fields.scales[row].view(torch.uint8).tolist(), 0]


@pytest.mark.parametrize(("page_size", "stride"), [(1, 1024), (2, 1536), (64, 33792)])
def test_the_528_bytes_of_a_row(page_size, stride):
    fields = random_fields(FP8_528, 2 * page_size)
    data, _ = FP8_528.pack(fields, page_size)
    assert data.stride() == (stride, 528, 1)
    for row in range(2 * page_size):
        record = data[row // page_size, row % page_size]
        assert record[:512].tolist() == fields.fp8[row].view(torch.uint8).tolist()
        assert record[512:].tolist() == fields.scales[row].view(torch.uint8).tolist()


@pytest.mark.parametrize(("page_size", "stride"), [(1, 512), (2, 1024), (64, 18432)])
def test_the_288_bytes_of_a_row(page_size, stride):
    fields = random_fields(FP4_288, 2 * page_size)
    data, _ = FP4_288.pack(fields, page_size)
    assert data.stride() == (stride, 288, 1)
    for row in range(2 * page_size):
        record = data[row // page_size, row % page_size]
        assert record[:256].tolist() == fields.fp8[row].tolist()
        assert record[256:].tolist() == fields.scales[row].view(torch.uint8).tolist()


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_the_68_byte_format_keeps_scales_behind_all_rows_of_a_page(page_size):
    fields = random_fields(INDEX_MXFP4, 2 * page_size)
    data, _ = INDEX_MXFP4.pack(fields, page_size)
    assert data.stride(0) == 68 * page_size
    for row in range(2 * page_size):
        page, j = divmod(row, page_size)
        flat = data[page].reshape(-1)
        assert flat[64 * j :][:64].tolist() == fields.fp8[row].tolist()
        scales = flat[64 * page_size + 4 * j :][:4]
        assert scales.tolist() == fields.scales[row].view(torch.uint8).tolist()


E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
E4M3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist()


def nearest(x, values):
    """Index of the nearest of ascending values, the even one of two."""
    return min(range(len(values)), key=lambda code: (abs(x - values[code]), code % 2))


def record_by_hand(fmt, row):
    """Codes and scales of a row of an FP4 format, as lists of bytes."""
    codes, scales = [], []
    for first in range(0, fmt.head_dim, fmt.scale_block):
        block = row[first : first + fmt.scale_block]
        amax = max([abs(x) for x in block if not math.isnan(x)], default=0.0)
        if fmt == INDEX_MXFP4:  # the least power of two from 2^-126 on that covers amax with 6
            code = next(e for e in range(1, 255) if e == 254 or amax <= 6 * 2.0 ** (e - 127))
            scale = 2.0 ** (code - 127)
        else:
            code = nearest(min(max(amax / 6, 2**-9), 448), E4M3)
            scale = E4M3[code]
        scales.append(code)
        for x in block:
            sign = 8 if math.copysign(1, x) < 0 else 0
            finite = min(abs(x) / scale, 6.0)
            codes.append(7 if math.isnan(x) else sign + nearest(finite, E2M1))
    return [low + 16 * high for low, high in zip(codes[0::2], codes[1::2], strict=True)], scales


@pytest.mark.parametrize("fmt", [FP4_288, INDEX_MXFP4], ids=lambda fmt: fmt.name)
def test_fp4_rows_are_those_of_the_description(fmt):
    draw = Draw(0)
    sizes = 2.0 ** draw.integers(-9, 9, 8, fmt.num_scales)
    rows = draw.normal(8, fmt.head_dim) * sizes.repeat_interleave(fmt.scale_block, 1)
    rows[0] = draw.integers(-24, 25, fmt.head_dim) / 4  # ties, with scale 1 in each block
    rows[0, :: fmt.scale_block] = 6
    rows[1] = draw.integers(-8, 9, fmt.head_dim) * 0.375  # ties of e4m3 scales
    rows[2] *= 1e-38
    rows[3] *= 1e33
    rows[4, :40] = 0
    rows[4, 4] = -0.0
    rows[5, 7], rows[5, 99], rows[5, 100] = math.nan, math.inf, -math.inf
    rows[6, :64] = math.nan
    rows = rows.bfloat16().float()
    stored = fmt.quantize(rows)
    for row, codes, scales in zip(rows, stored.fp8, stored.scales.view(torch.uint8), strict=True):
        expected_codes, expected_scales = record_by_hand(fmt, row.tolist())
        assert scales.tolist() == expected_scales
        assert codes.tolist() == expected_codes
    if fmt == INDEX_MXFP4:  # 6 times the largest scale is an infinity again
        assert_equal("infinities", fmt.dequantize(stored)[5, 99:101].float(), rows[5, 99:101])


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_the_132_byte_format_keeps_scales_behind_all_rows_of_a_page(page_size):
    fields = random_fields(INDEX_FP8, 2 * page_size)
    data, _ = INDEX_FP8.pack(fields, page_size)
    assert data.stride(0) == 132 * page_size
    for row in range(2 * page_size):
        page, j = divmod(row, page_size)
        flat = data[page].reshape(-1)
        assert flat[128 * j :][:128].tolist() == fields.fp8[row].view(torch.uint8).tolist()
        scale = struct.pack("<f", fields.scales[row].item())
        assert bytes(flat[128 * page_size + 4 * j :][:4]) == scale


def test_an_e4m3_row_is_codes_and_its_scales_are_a_tensor():
    fmt = e4m3_format(576, 512, 128)
    fields = random_fields(fmt, 6)
    data, scales = fmt.pack(fields, page_size=4)
    assert data.dtype == torch.float8_e4m3fn
    assert scales.shape == (2, 4, 5)
    assert_equal("data", data[1, 1], fields.fp8[5])
    assert_equal("scales", scales[1, 1], fields.scales[5])


# amax -> exponent of the scale; columns: clamp after the division by 448, clamp before it.
SCALE_TABLE = [
    (0.0, -13, -22),
    (1e-4, -13, -22),
    (0.0447, -13, -13),
    (1.0, -8, -8),
    (2.5, -7, -7),
    (448.0, 0, 0),
    (449.0, 1, 1),
]


@pytest.mark.parametrize(("amax", "after", "before"), SCALE_TABLE)
def test_power_of_two_scales(amax, after, before):
    for fmt, exponent in ((FP8_DS_MLA, after), (FP8_584, before), (INDEX_FP8, before)):
        rows = torch.zeros(1, fmt.head_dim)
        rows[:, 3] = -amax
        scales = fmt.quantize(rows).scales
        assert scales[0, 0].float().item() == 2.0**exponent, fmt.name


@pytest.mark.parametrize("exponent", range(-12, 8))
def test_amax_of_448_times_a_power_of_two_fills_the_range(exponent):
    rows = torch.zeros(2, 576)
    rows[0, :512] = 448 * 2.0**exponent
    rows[1, :512] = torch.nextafter(rows[0, :512], torch.tensor(torch.inf))
    stored = FP8_DS_MLA.quantize(rows)
    assert (stored.scales[0] == 2.0**exponent).all()
    assert (stored.scales[1] == 2.0 ** (exponent + 1)).all()
    assert (stored.fp8[0].float() == 448).all()


@with_scales
def test_zero_rows_stay_zero(fmt):
    stored = fmt.quantize(torch.zeros(2, fmt.head_dim))
    assert stored.scales.float().isfinite().all()
    assert (stored.scales.float() > 0).all()
    assert (fmt.dequantize(stored) == 0).all()


@with_scales
def test_nan_does_not_change_the_scale(fmt):
    rows = Draw(4).normal(3, fmt.head_dim)
    expected = fmt.quantize(rows.index_fill(1, torch.tensor([1]), 0.0))
    stored = fmt.quantize(rows.index_fill(1, torch.tensor([1]), math.nan))
    assert_equal("scales", stored.scales.float(), expected.scales.float())
    values, others = fmt.dequantize(stored), fmt.dequantize(expected)
    assert (values[:, 1] > 0).all() if fmt.is_fp4 else values[:, 1].isnan().all()
    assert_equal("others", values[:, 2:], others[:, 2:])


@with_scales
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e4])
def test_quantisation_error_is_half_a_step(fmt, size):
    rows = Draw(1).normal(50, fmt.head_dim) * size
    # e4m3 has 4 significant bits. Values below 2^-6 of a scale share the absolute step 2^-9. e2m1
    # has 2, and the step 1/2 below 1.
    stored = fmt.quantize(rows)
    scales = stored.scales.float().repeat_interleave(fmt.scale_block, 1)[:, : fmt.fp8_dim]
    largest = min(fmt.code_max * fmt.max_scale, 1e9)
    x = rows[:, : fmt.fp8_dim].clamp(-largest, largest)
    relative, absolute = (2**-2, 2**-2) if fmt.is_fp4 else (2**-4, 2**-10)
    step = torch.maximum(x.abs() * relative, scales * absolute)
    exact = (from_e2m1(stored.fp8) if fmt.is_fp4 else stored.fp8).float() * scales
    assert ((exact - x).abs() <= step * 1.0001).all()


@with_scales
def test_quantising_twice_changes_nothing(fmt):
    once = fmt.dequantize(fmt.quantize(Draw(2).normal(20, fmt.head_dim)))
    assert_equal("rows", fmt.dequantize(fmt.quantize(once)), once)


@pytest.mark.parametrize(
    "fmt", [fmt for fmt in FORMATS if fmt.num_scales and fmt.scale_dtype == torch.float32]
)
def test_exact_scales_map_the_largest_value_to_448(fmt):
    rows = Draw(2).normal(20, fmt.head_dim)
    stored = fmt.quantize(rows, scale_mode="exact")
    first = slice(0, min(fmt.scale_block, fmt.fp8_dim))
    assert_equal("scale", stored.scales[:, 0], rows[:, first].abs().amax(1) / 448)
    assert (stored.fp8[:, first].float().abs().amax(1) == 448).all()


@pytest.mark.parametrize(
    "fmt", [fmt for fmt in FORMATS if fmt.num_scales and fmt.scale_dtype != torch.float8_e4m3fn]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_each_block_has_its_own_scale(fmt, dtype):
    rows = torch.full((1, fmt.head_dim), 2.0**-8)
    for block in range(fmt.num_scales):
        rows[0, block * fmt.scale_block : fmt.fp8_dim][: fmt.scale_block] *= 2.0 ** (2 * block % 9)
    restored = fmt.dequantize(fmt.quantize(rows.to(dtype)))
    assert_equal("rows", restored, rows.bfloat16())


def test_unquantised_dims_are_rounded_to_bfloat16_once():
    rows = Draw(3).normal(9, 576)
    assert_equal("rope", FP8_DS_MLA.quantize(rows).bf16, rows[:, 512:].bfloat16())
    assert_equal("rope", FP8_584.quantize(rows[:, :512]).bf16, rows[:, 448:512].bfloat16())


def test_odd_scales_are_multiplied_in_float32():
    fields = random_fields(FP8_DS_MLA, 40)
    fields.scales[0] = 1.0
    spread = fields.scales.repeat_interleave(128, 1)
    expected = (fields.fp8.float() * spread).bfloat16()
    got = FP8_DS_MLA.dequantize(fields)
    torch.testing.assert_close(got[:, :512], expected, rtol=0, atol=0, equal_nan=True)
    assert_equal("rope", got[:, 512:], fields.bf16)


def test_values_beyond_the_range_saturate():
    codes = to_fp8(torch.tensor([1e9, -1e9, 448.0, 464.0, torch.nan])).float()
    assert codes[:4].tolist() == [448, -448, 448, 448]
    assert codes[4].isnan()
    e4m3 = e4m3_format(16, 16, 0)
    assert (e4m3.dequantize(e4m3.quantize(torch.full((1, 16), 1e5))) == 448).all()


@given(st.floats(2.0**-120, 2.0**120, width=32))
def test_ceil_pow2_is_the_least_power_above(value):
    power = ceil_pow2(torch.tensor(value)).item()
    assert power / 2 < value <= power
    assert ceil_pow2(torch.tensor(power)).item() == power


@by_format
def test_formats_are_found_by_name(fmt):
    assert get_format(fmt.name) == fmt
    assert hash(get_format(fmt.name)) == hash(fmt)


@pytest.mark.parametrize(
    "name", ["", "bf16", "bf16_576", "e4m3_576v512", "FP8_DS_MLA", "bf16_4v4 "]
)
def test_unknown_names_are_refused(name):
    with pytest.raises(ValueError, match="format name must be one of"):
        get_format(name)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: bf16_format(64, 65), "value_dim"),
        (lambda: bf16_format(64, 0), "value_dim"),
        (lambda: e4m3_format(64, 64, 65), "scale_block"),
        (lambda: e4m3_format(64, 64, -1), "scale_block"),
        (lambda: e4m3_format(64, 80), "value_dim"),
        (lambda: FP8_584.quantize(torch.ones(1, 512), scale_mode="exact"), "scale_mode"),
        (lambda: FP4_288.quantize(torch.ones(1, 512), scale_mode="exact"), "scale_mode"),
        (lambda: FP8_DS_MLA.quantize(torch.ones(1, 576), scale_mode="up"), "scale_mode"),
    ],
)
def test_impossible_formats_and_modes_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


NAMED = {
    "PagedCache": lambda fmt: PagedCache(torch.zeros(2, 4, 656, dtype=torch.uint8), fmt).format,
    "PagedCache.allocate": lambda fmt: PagedCache.allocate(fmt, 2, 4).format,
    "Serving": lambda fmt: sparsemla.Serving(fmt).cache_format,
    "prefill_workspace_rows": lambda fmt: sparsemla.prefill_workspace_rows(
        [4096], [32768], cache_format=fmt, num_heads=128, topk=2048
    ),
}


@pytest.mark.parametrize("call", NAMED.values(), ids=NAMED)
def test_formats_are_given_by_name(call):
    assert call("fp8_ds_mla") == call(FP8_DS_MLA)
    with pytest.raises(ValueError, match=r"format name must be one of fp8_ds_mla, .*; got 'fp7'"):
        call("fp7")
    with pytest.raises(TypeError, match="ormat must be a CacheFormat, got int"):
        call(656)


def test_index_queries_have_a_format_by_name():
    q, weights, table = torch.randn(3, 2, 128), torch.randn(3, 2), torch.zeros(8, 64)
    positions = torch.arange(3)
    for fmt in (sparsemla.INDEX_FP8, sparsemla.INDEX_MXFP4):
        for one, other in zip(
            *(
                sparsemla.prepare_index_queries(q, weights, table, positions=positions, format=each)
                for each in (fmt, fmt.name)
            ),
            strict=True,
        ):
            assert torch.equal(one.float(), other.float())

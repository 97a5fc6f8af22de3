import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsemla import (
    BF16_512,
    BF16_576,
    FP8_584,
    FP8_DS_MLA,
    INDEX_FP8,
    CacheFormat,
    PagedCache,
    bf16_format,
    e4m3_format,
    slots_of,
)
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import assert_equal

FORMATS = [
    BF16_512,
    BF16_576,
    FP8_DS_MLA,
    FP8_584,
    INDEX_FP8,
    e4m3_format(),
    e4m3_format(128, 64, 0),
]
by_format = pytest.mark.parametrize("fmt", FORMATS)


def restored(fmt, rows):
    """Rows after one trip through the format."""
    return fmt.dequantize(fmt.quantize(rows))


@by_format
@given(page_size=st.integers(1, 70), num_pages=st.integers(1, 5), seed=st.integers(0, 9))
def test_written_rows_are_read_back(fmt, page_size, num_pages, seed):
    draw = Draw(seed)
    cache = PagedCache.allocate(fmt, num_pages, page_size)
    slots = draw.permutation(cache.num_slots)
    rows = draw.normal(len(slots), fmt.head_dim)
    cache.write(slots, rows)
    assert_equal("rows", cache.read(slots), restored(fmt, rows))
    shaped = slots.view(1, -1, 1)
    assert cache.read(shaped).shape == (1, len(slots), 1, fmt.head_dim)


@by_format
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_writes_change_only_their_slots(fmt, dtype):
    draw = Draw(1)
    cache = PagedCache.allocate(fmt, 3, 5)
    everywhere = torch.arange(15)
    before = draw.normal(15, fmt.head_dim)
    cache.write(everywhere, before)
    slots = torch.tensor([14, -1, 0, -(2**31), 7], dtype=dtype)
    rows = draw.normal(5, fmt.head_dim)
    cache.write(slots, rows)
    expected = restored(fmt, before)
    expected[[14, 0, 7]] = restored(fmt, rows[[0, 2, 4]])
    assert_equal("rows", cache.read(everywhere), expected)


@by_format
def test_write_of_no_rows(fmt):
    cache = PagedCache.allocate(fmt, 2, 4)
    cache.write(torch.empty(0, dtype=torch.int64), torch.empty(0, fmt.head_dim))
    cache.write(torch.tensor([-1, -7]), torch.ones(2, fmt.head_dim))
    assert (cache.data.view(torch.uint8) == 0).all()


def test_a_cache_prints_sizes_and_no_values():
    cache = PagedCache.allocate(FP8_DS_MLA, 3, 7)
    assert repr(cache) == "PagedCache(fp8_ds_mla, 3 pages of 7 rows on cpu)"
    data, _ = FP8_DS_MLA.allocate(3, 7, num_layers=2, device="meta")
    shared = PagedCache(data, FP8_DS_MLA)
    assert repr(shared) == "PagedCache(fp8_ds_mla, 3 pages of 7 rows in each of 2 layers on meta)"


@by_format
@pytest.mark.parametrize("page_size", [1, 2, 61, 64])
def test_layers_share_pages_but_no_rows(fmt, page_size):
    draw = Draw(2)
    whole = PagedCache.allocate(fmt, 3, page_size, num_layers=4)
    assert whole.num_layers == 4
    slots = torch.arange(whole.num_slots)
    rows = [draw.normal(len(slots), fmt.head_dim) for _ in range(4)]
    for layer in (2, 0, 3, 1):
        whole.layer(layer).write(slots, rows[layer])
    for layer in range(4):
        view = whole.layer(layer)
        assert view.num_layers is None
        assert (view.num_pages, view.page_size) == (3, page_size)
        assert_equal(f"layer {layer}", view.read(slots), restored(fmt, rows[layer]))


def test_pages_may_have_gaps():
    draw = Draw(3)
    for fmt in (FP8_DS_MLA, FP8_584, INDEX_FP8):
        stride = fmt.page_bytes(6) + 1152
        memory = torch.full((4 * stride,), 0xFF, dtype=torch.uint8)
        data = memory.as_strided((4, 6, fmt.row_width), (stride, fmt.row_width, 1))
        cache = PagedCache(data, fmt)
        rows = draw.normal(24, fmt.head_dim)
        cache.write(torch.arange(24), rows)
        assert_equal(fmt.name, cache.read(torch.arange(24)), restored(fmt, rows))
        between = memory.view(4, stride)[:, fmt.page_bytes(6) :]
        assert (between == 0xFF).all()


def test_pages_need_no_padding():
    memory = torch.zeros(4, 6, FP8_584.row_width, dtype=torch.uint8)
    cache = PagedCache(memory, FP8_584)
    rows = Draw(3).normal(24, FP8_584.head_dim)
    cache.write(torch.arange(24), rows)
    assert_equal("rows", cache.read(torch.arange(24)), restored(FP8_584, rows))


def test_rows_of_a_contiguous_format_may_have_gaps():
    memory = torch.zeros(3, 4, 800, dtype=torch.uint8)
    cache = PagedCache(memory[..., :656], FP8_DS_MLA)
    rows = Draw(4).normal(12, 576)
    cache.write(torch.arange(12), rows)
    assert_equal("rows", cache.read(torch.arange(12)), restored(FP8_DS_MLA, rows))
    assert (memory[..., 656:] == 0).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("fmt", [FP8_DS_MLA, e4m3_format(128, 64, 0)])
def test_any_dtype_of_one_byte_carries_a_quantised_format(fmt, dtype):
    rows = Draw(5).normal(3, fmt.head_dim)
    data = torch.zeros(2, 4, fmt.row_width, dtype=torch.uint8).view(dtype)
    cache = PagedCache(data, fmt)
    cache.write(torch.arange(3), rows)
    assert_equal("rows", cache.read(torch.arange(3)), restored(fmt, rows))


def test_rows_become_a_cache_of_page_size_1():
    rows = Draw(6).normal(9, 576).bfloat16()
    cache = PagedCache.from_rows(rows)
    assert (cache.num_slots, cache.page_size, cache.format) == (9, 1, BF16_576)
    assert cache.data.data_ptr() == rows.data_ptr()
    assert_equal("rows", cache.read(torch.tensor([8, 0])), rows[[8, 0]])
    assert PagedCache.from_rows(rows[:, :128]).format.value_dim == 128


@pytest.mark.parametrize("fmt", [BF16_576, FP8_DS_MLA, FP8_584, INDEX_FP8])
def test_pages_more_than_2_gib_apart(fmt):
    # The memory between the pages is reserved and never touched.
    page_size, apart = 3, 1152 * (2**31 // 1152 + 1)
    memory = torch.empty(2 * apart + fmt.page_bytes(page_size), dtype=torch.uint8)
    memory = memory.view(fmt.storage_dtype)
    stride = apart // fmt.storage_dtype.itemsize
    data = memory.as_strided((3, page_size, fmt.row_width), (stride, fmt.row_width, 1))
    cache = PagedCache(data, fmt)
    slots = torch.tensor([8, 0, 5, 6])
    rows = Draw(7).normal(4, fmt.head_dim)
    cache.write(slots, rows)
    assert_equal("rows", cache.read(slots), restored(fmt, rows))


def test_byte_offsets_beyond_2_gib():
    num_pages = 2**31 // (656 * 64) + 2
    cache = PagedCache(torch.empty(num_pages, 64, 656, dtype=torch.uint8), FP8_DS_MLA)
    slots = torch.tensor([cache.num_slots - 1, 0, cache.num_slots - 70], dtype=torch.int32)
    rows = Draw(8).normal(3, 576)
    cache.write(slots, rows)
    assert_equal("rows", cache.read(slots), restored(FP8_DS_MLA, rows))


def test_nan_rows_stay_nan():
    for fmt in FORMATS:
        cache = PagedCache.allocate(fmt, 1, 2)
        cache.write(torch.tensor([1]), torch.full((1, fmt.head_dim), math.nan))
        assert cache.read(torch.tensor([1])).isnan().all(), fmt.name


@given(page_size=st.integers(1, 9), data=st.data())
def test_slots_of_positions(page_size, data):
    table = torch.tensor([[5, 0, -1], [3, 7, 2]], dtype=torch.int32)
    position = data.draw(st.integers(-5, 40))
    request = data.draw(st.integers(0, 1))
    slot = slots_of(table, torch.tensor([request]), torch.tensor([position]), page_size).item()
    page, offset = divmod(position, page_size)
    if position < 0 or page >= 3 or table[request, page] < 0:
        assert slot == -1
    else:
        assert slot == int(table[request, page]) * page_size + offset


def test_negative_page_ids_have_no_slots():
    table = torch.tensor([[5, -1, -(2**31), -7]])
    positions = torch.arange(-1, 17)
    slots = slots_of(table, torch.zeros(18, dtype=torch.int64), positions, 4)
    assert slots.tolist() == [-1, 20, 21, 22, 23] + [-1] * 13


def test_page_table_without_pages_gives_no_slots():
    table = torch.empty(2, 0, dtype=torch.int32)
    slots = slots_of(table, torch.tensor([[0], [1]]), torch.arange(-1, 2), 4)
    assert slots.dtype == torch.int64
    assert slots.tolist() == [[-1] * 3] * 2


def test_slots_of_huge_page_ids_do_not_wrap():
    table = torch.tensor([[2**31 - 1]], dtype=torch.int32)
    assert slots_of(table, torch.tensor([0]), torch.tensor([3]), 64).item() == (2**31 - 1) * 64 + 3


def bytes_of(*shape):
    return torch.zeros(shape, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("slots", "rows", "error", "message"),
    [
        (torch.arange(2), torch.ones(2, 640), ValueError, "rows must have shape"),
        (torch.arange(2), torch.ones(2, 448), ValueError, "rows must have shape"),
        (torch.arange(2), torch.ones(1, 576), ValueError, "rows must have shape"),
        (torch.arange(2), torch.ones(3, 576), ValueError, "rows must have shape"),
        (torch.arange(2), torch.ones(2, 576, device="meta"), ValueError, "on cpu"),
        (torch.tensor([0, 12]), torch.ones(2, 576), ValueError, "slots must be below 12, got 12"),
        (torch.tensor([0.0, 1.5]), torch.ones(2, 576), TypeError, "slots must have dtype"),
        (torch.arange(2), torch.ones(2, 576).int(), TypeError, "rows must have a float dtype"),
    ],
)
@pytest.mark.parametrize("fmt", [FP8_DS_MLA, BF16_576])
def test_refused_writes_do_not_change_the_cache(fmt, slots, rows, error, message):
    cache = PagedCache.allocate(fmt, 3, 4)
    cache.write(torch.arange(12), torch.randn(12, 576))
    before = cache.data.clone()
    with pytest.raises(error, match=message):
        cache.write(slots, rows)
    assert torch.equal(cache.data.view(torch.uint8), before.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("wrong", [-1, 12, -12, 2**31 - 1])
@pytest.mark.parametrize("method", ["read", "gather"])
def test_slots_that_are_not_in_the_cache_are_not_read(method, wrong, dtype):
    cache = PagedCache.allocate(FP8_DS_MLA, 3, 4)
    slots = torch.tensor([[0, 11], [wrong, 5]], dtype=dtype)
    with pytest.raises(ValueError, match=rf"slots must lie in \[0, 12\), got {wrong}$"):
        getattr(cache, method)(slots)
    with pytest.raises(ValueError, match=r"slots must lie in \[0, 0\), got 11$"):
        getattr(PagedCache.allocate(FP8_DS_MLA, 0, 4), method)(torch.tensor([11]))


@pytest.mark.parametrize("method", ["read", "gather", "write"])
def test_slots_are_of_a_single_layer(method):
    whole = PagedCache.allocate(BF16_576, 3, 4, num_layers=2)
    rows = [torch.ones(2, 576)] if method == "write" else []
    with pytest.raises(ValueError, match="slots need a single layer"):
        getattr(whole, method)(torch.arange(2), *rows)


@pytest.mark.parametrize("head_dim", [64, 256])
def test_index_keys_of_other_dims_are_not_cut_to_fit(head_dim):
    cache = PagedCache.allocate(INDEX_FP8, 3, 4)
    with pytest.raises(ValueError, match="rows must have shape"):
        cache.write(torch.arange(2), torch.ones(2, head_dim))


def test_writes_do_not_drop_gradients():
    cache, rows = PagedCache.allocate(BF16_576, 3, 4), torch.ones(2, 576, requires_grad=True)
    with pytest.raises(ValueError, match="rows must not require a gradient"):
        cache.write(torch.arange(2), rows)
    assert not cache.data.any()
    with torch.no_grad():
        cache.write(torch.arange(2), rows)
    assert_equal("rows", cache.read(torch.arange(2)), rows.detach().bfloat16())
    assert not cache.data.requires_grad


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: PagedCache(bytes_of(2, 4, 656), 656), TypeError, "format must be a"),
        (lambda: PagedCache([1], FP8_DS_MLA), TypeError, "data must be a Tensor, got list"),
        (
            lambda: PagedCache(bytes_of(2, 4, 576), e4m3_format(), [1.0]),
            TypeError,
            "scales must be a Tensor",
        ),
        (lambda: PagedCache.allocate(656, 2, 4), TypeError, "format must be a"),
        (lambda: PagedCache.from_rows(torch.ones(2, 3, 4)), ValueError, "rows must have shape"),
        (
            lambda: PagedCache.allocate(BF16_512, 2, 4, num_layers=2).write(
                torch.arange(2), torch.ones(2, 512)
            ),
            ValueError,
            "holds 2, pick one with layer",
        ),
        (lambda: PagedCache(bytes_of(2, 4, 655), FP8_DS_MLA), ValueError, "data must have shape"),
        (lambda: PagedCache(bytes_of(2, 656), FP8_DS_MLA), ValueError, "data must have shape"),
        (lambda: PagedCache(bytes_of(2, 0, 656), FP8_DS_MLA), ValueError, "page size"),
        (lambda: PagedCache(torch.zeros(2, 4, 656), FP8_DS_MLA), TypeError, "data must have dtype"),
        (lambda: PagedCache(bytes_of(2, 4, 576), BF16_576), TypeError, "data must have dtype"),
        (
            lambda: PagedCache(bytes_of(2, 4, 1312)[..., ::2], FP8_DS_MLA),
            ValueError,
            "contiguous in its last",
        ),
        (
            lambda: PagedCache(
                bytes_of(2 * 65 * 576).view(-1, 576).as_strided((2, 64, 584), (37375, 584, 1)),
                FP8_584,
            ),
            ValueError,
            "page stride of at least 37376 bytes",
        ),
        (
            lambda: PagedCache(bytes_of(2, 64, 640)[..., :584], FP8_584),
            ValueError,
            "a row stride of 584 bytes for format fp8_584, got 640",
        ),
        (
            lambda: PagedCache(bytes_of(64, 4, 132).transpose(0, 1)[:1], INDEX_FP8),
            ValueError,
            "a row stride of 132 bytes",
        ),
        (
            lambda: PagedCache(bytes_of(2, 4, 658)[..., :656], FP8_DS_MLA),
            ValueError,
            "multiples of 4 bytes",
        ),
        (
            lambda: PagedCache(bytes_of(2 * 528 + 1)[1:].view(2, 4, 132), INDEX_FP8),
            ValueError,
            "multiples of 4 bytes",
        ),
        (
            lambda: PagedCache(bytes_of(2, 4, 656), FP8_DS_MLA, torch.zeros(2, 4, 4)),
            ValueError,
            "scales must be None",
        ),
        (
            lambda: PagedCache(bytes_of(2, 4, 576), e4m3_format()),
            ValueError,
            "scales must be a float32 tensor",
        ),
        (
            lambda: PagedCache(bytes_of(2, 4, 576), e4m3_format(), torch.zeros(2, 4, 4)),
            ValueError,
            "scales must have shape",
        ),
        (
            lambda: PagedCache(bytes_of(2, 4, 576), e4m3_format(), torch.zeros(2, 4, 5).half()),
            TypeError,
            "scales must have dtype",
        ),
        (
            lambda: PagedCache(
                bytes_of(2, 4, 576), e4m3_format(), torch.zeros(2, 4, 5, device="meta")
            ),
            ValueError,
            "scales must have shape",
        ),
        (
            lambda: PagedCache(
                bytes_of(2, 4, 576), e4m3_format(), torch.zeros(2, 5, 4).transpose(1, 2)
            ),
            ValueError,
            "scales must be contiguous in their last dimension",
        ),
        (lambda: PagedCache.allocate(BF16_512, 2, 4).layer(0), ValueError, "single layer"),
        (
            lambda: PagedCache.allocate(BF16_512, 2, 4, num_layers=3).layer(3),
            ValueError,
            "layer_idx must lie in",
        ),
        (
            lambda: PagedCache.allocate(BF16_512, 2, 4, num_layers=3).layer(-1),
            ValueError,
            "layer_idx must lie in",
        ),
    ],
)
def test_caches_that_do_not_match_their_format_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_caches_compare_by_identity():
    caches = [PagedCache.allocate(BF16_576, 2, 4) for _ in range(2)]
    assert caches.index(caches[1]) == 1
    assert len({*caches, caches[0]}) == 2


UNKNOWN = {
    "640 bytes": CacheFormat("rows_640", 576, 512, fp8_dim=512),
    "a known name": CacheFormat(
        "fp8_ds_mla", 576, 512, fp8_dim=512, scales_in="row", scale_block=64
    ),
    "a name that is no format": CacheFormat("bf16_0v0", 576, 512),
    "scales of another dtype": dataclasses.replace(e4m3_format(), scale_dtype=torch.float8_e8m0fnu),
}


@pytest.mark.parametrize("fmt", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_unregistered_formats_are_refused(fmt):
    with pytest.raises(
        ValueError, match=r"format must be a constant of sparsemla, .* got CacheFormat\(name="
    ):
        PagedCache.allocate(fmt, num_pages=2, page_size=4)


@pytest.mark.parametrize("fmt", [*FORMATS, bf16_format(7, 3), e4m3_format(200, 100, 48)])
def test_equal_format_objects_are_accepted(fmt):
    again = dataclasses.replace(fmt)
    assert again is not fmt
    assert PagedCache.allocate(again, num_pages=2, page_size=4).format == fmt


@pytest.mark.parametrize("argument", ["page_table", "request_ids", "positions"])
def test_slots_of_takes_uint32(argument):
    arguments = {
        "page_table": torch.tensor([[7, 2, 3], [1, 5, 6]]),
        "request_ids": torch.tensor([0, 1, 1, 2]),
        "positions": torch.tensor([0, 5, 12, 3]),
    }
    expected = slots_of(**arguments, page_size=4)
    assert expected.tolist() == [28, 21, -1, -1]
    arguments[argument] = arguments[argument].to(torch.uint32)
    assert torch.equal(slots_of(**arguments, page_size=4), expected)

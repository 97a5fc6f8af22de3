"""The portable quantising kernels against the reference, byte for byte where rows are equal.

Inputs are small integers, so that sums are the same in any order and the float32 rows are equal.
"""

import math

import pytest
import torch

from sparsemla import (
    BF16_512,
    BF16_576,
    FP4_288,
    FP8_528,
    FP8_584,
    FP8_DS_MLA,
    INDEX_FP8,
    INDEX_MXFP4,
    PagedCache,
    bf16_format,
    cos_sin_table,
    dispatch,
    e4m3_format,
    reference,
    rope_frequencies,
)

pytest.importorskip("triton")

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MAX_POSITIONS = 50


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def integers(*shape, high=9, dtype=torch.bfloat16):
    return torch.randint(-high, high + 1, shape).to(dtype)


def table(rope_dim, dtype=torch.float32):
    return cos_sin_table(rope_frequencies(rope_dim, 1e4), MAX_POSITIONS).to(dtype)


def marked_cache(fmt, page_size, num_pages=4):
    """One layer of a cache filled with bytes 0xAB."""
    layers = PagedCache.allocate(fmt, num_pages, page_size, num_layers=2)
    whole_bytes(layers.data).fill_(0xAB)
    if layers.scales is not None:
        layers.scales.fill_(-1.0)
    return layers.layer(1)


def whole_bytes(data):
    """Every byte of the buffer that ``data`` is a view of."""
    return torch.empty(0, dtype=torch.uint8, device=data.device).set_(data.untyped_storage())


def copy_of(cache, device):
    """The cache with its padding bytes on another device."""
    storage = whole_bytes(cache.data).clone().to(device)
    data = storage.view(cache.data.dtype)
    data = data.as_strided(cache.data.shape, cache.data.stride(), cache.data.storage_offset())
    scales = None if cache.scales is None else cache.scales.clone().to(device)
    return PagedCache(data, cache.format, scales)


def run(op, cache=None, **arguments):
    """Run the kernel; returns the cache it wrote and its outputs, on the CPU."""
    if cache is not None:
        arguments["cache"] = copy_of(cache, DEVICE)
    arguments = {
        name: value.to(DEVICE) if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }
    dispatch.load(op, "triton")(**arguments)
    outputs = [arguments[name].cpu() for name in dispatch.OPS[op].outputs if name in arguments]
    return (copy_of(arguments["cache"], "cpu") if cache is not None else None), *outputs


def assert_same_bytes(one, other):
    assert torch.equal(whole_bytes(one.data), whole_bytes(other.data))
    if one.scales is not None:
        assert torch.equal(one.scales, other.scales)


def slots_for(num_tokens, cache):
    """A slot for each token: some negative, none twice."""
    slots = torch.randperm(cache.num_slots)[:num_tokens]
    slots[1], slots[num_tokens - 2] = -1, INT_MIN
    return slots


LATENTS = [
    pytest.param(BF16_576, 512, 64, id="bf16_576"),
    pytest.param(BF16_512, 512, 64, id="bf16_512"),
    pytest.param(bf16_format(100, 60), 70, 30, id="bf16_100"),
    pytest.param(FP8_DS_MLA, 512, 64, id="fp8_ds_mla"),
    pytest.param(FP8_DS_MLA, 576, 128, id="fp8_ds_mla, rotation of quantised dims"),
    pytest.param(FP8_DS_MLA, 384, 192, id="fp8_ds_mla, rotation of a whole block"),
    pytest.param(FP8_584, 512, 64, id="fp8_584"),
    pytest.param(FP8_584, 448, 64, id="fp8_584, plain rope dims"),
    pytest.param(FP8_528, 512, 64, id="fp8_528"),
    pytest.param(FP4_288, 512, 64, id="fp4_288"),
    pytest.param(e4m3_format(), 512, 64, id="e4m3 blocks"),
    pytest.param(e4m3_format(scale_block=32), 512, 64, id="e4m3 blocks of 32"),
    pytest.param(e4m3_format(), 576, 160, id="e4m3 blocks, rotation of a block in part"),
    pytest.param(e4m3_format(scale_block=576), 512, 64, id="e4m3 rows"),
    pytest.param(e4m3_format(scale_block=0), 512, 64, id="e4m3 unit"),
    pytest.param(e4m3_format(200, 100, 48), 200, 26, id="e4m3 odd blocks"),
]


@pytest.mark.parametrize(("interleaved", "with_rows"), [(True, False), (False, True)])
@pytest.mark.parametrize(("fmt", "norm_dim", "rope_dim"), LATENTS)
def test_latent_rows_are_written_byte_for_byte(fmt, norm_dim, rope_dim, interleaved, with_rows):
    cache = marked_cache(fmt, page_size=5)
    num_tokens = 7
    arguments = {
        "q_rope": integers(num_tokens, 3, rope_dim + 5)[..., 2:-3],
        "kv": integers(num_tokens, fmt.head_dim + 8)[:, 8:],
        "cos_sin_cache": table(rope_dim),
        "kv_norm_weight": integers(norm_dim),
        "positions": torch.randint(0, MAX_POSITIONS, (num_tokens,)),
        "slot_mapping": slots_for(num_tokens, cache),
        "eps": 1e-6,
        "interleaved": interleaved,
        "scale_mode": "pow2",
    }
    wide = torch.full((num_tokens, fmt.head_dim + 8), 7.0, device=DEVICE).bfloat16()
    rows = wide[:, : fmt.head_dim]
    written, out, *_ = run(
        "fused_rope_rmsnorm_quant",
        cache,
        out=torch.full((num_tokens, 3, rope_dim), 7.0, dtype=torch.bfloat16),
        **({"kv_out": rows} if with_rows else {}),
        **arguments,
    )
    expected, before = reference.fused_rope_rmsnorm_quant(cache=cache, **arguments)
    assert torch.equal(out, expected.to(out.dtype))
    assert_same_bytes(written, cache)
    if with_rows:
        assert torch.equal(rows.cpu(), before.bfloat16())
        assert (wide[:, fmt.head_dim :] == 7).all()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn])
def test_queries_go_into_a_slice_of_any_dtype(dtype, interleaved):
    arguments = {
        "q_rope": torch.randn(70, 5, 64),
        "kv": torch.zeros(70, 512),
        "cos_sin_cache": table(64),
        "kv_norm_weight": torch.ones(512),
        "positions": torch.randint(0, MAX_POSITIONS, (70,)),
        "slot_mapping": torch.full((70,), -1),
        "eps": 1e-6,
        "interleaved": interleaved,
        "scale_mode": "pow2",
    }
    cache = marked_cache(BF16_512, page_size=1)
    wide = torch.zeros(70, 5, 576, device=DEVICE).to(dtype)
    written, _ = run("fused_rope_rmsnorm_quant", cache, out=wide[..., 512:], **arguments)
    assert_same_bytes(written, cache)
    expected, _ = reference.fused_rope_rmsnorm_quant(cache=cache, **arguments)
    assert torch.equal(wide[..., 512:].cpu().float(), expected.to(dtype).float())
    assert (wide[..., :512].float() == 0).all()


@pytest.mark.parametrize("interleaved", [True, False])
def test_queries_are_rotated_in_place(interleaved):
    heads = torch.randn(9, 16, 192, device=DEVICE).bfloat16()
    q_rope = heads[..., 128:]
    cache = marked_cache(BF16_512, page_size=1)
    arguments = {
        "kv": torch.zeros(9, 512),
        "cos_sin_cache": table(64),
        "kv_norm_weight": torch.ones(512),
        "positions": torch.randint(0, MAX_POSITIONS, (9,)),
        "slot_mapping": torch.full((9,), -1),
        "eps": 1e-6,
        "interleaved": interleaved,
        "scale_mode": "pow2",
    }
    expected, _ = reference.fused_rope_rmsnorm_quant(q_rope.cpu(), cache=cache, **arguments)
    run("fused_rope_rmsnorm_quant", cache, q_rope=q_rope, out=q_rope, **arguments)
    assert torch.equal(q_rope.cpu(), expected.bfloat16())


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("fmt", "num_heads", "rope_dim"),
    [
        pytest.param(FP8_584, 5, 64, id="fp8_584"),
        pytest.param(bf16_format(100), 3, 30, id="bf16_100"),
        pytest.param(bf16_format(96), 1, 96, id="every dim rotated"),
    ],
)
def test_whole_queries_are_normalised_in_place(fmt, num_heads, rope_dim, interleaved):
    cache = marked_cache(fmt, page_size=5)
    wide = integers(7, num_heads, fmt.head_dim + 8).to(DEVICE)
    wide[4] = 0
    queries = wide[..., 4:-4]
    arguments = {
        "kv": integers(7, fmt.head_dim),
        "cos_sin_cache": table(rope_dim),
        "kv_norm_weight": integers(fmt.head_dim),
        "positions": torch.randint(0, MAX_POSITIONS, (7,)),
        "slot_mapping": slots_for(7, cache),
        "eps": 1e-6,
        "query_norm": True,
        "interleaved": interleaved,
        "scale_mode": "pow2",
    }
    wanted = copy_of(cache, "cpu")
    expected, _ = reference.fused_rope_rmsnorm_quant(queries.cpu(), cache=wanted, **arguments)
    outside = wide[..., [*range(4), *range(-4, 0)]].clone()
    written, _ = run("fused_rope_rmsnorm_quant", cache, q_rope=queries, out=queries, **arguments)
    assert torch.equal(queries.cpu(), expected.bfloat16())
    assert torch.equal(wide[..., [*range(4), *range(-4, 0)]], outside)
    assert_same_bytes(written, wanted)


@pytest.mark.parametrize("fmt", [FP8_DS_MLA, FP8_584, INDEX_FP8, FP4_288, INDEX_MXFP4])
def test_nan_large_values_and_ties(fmt):
    cache = marked_cache(fmt, page_size=5)
    arguments = {
        "q_rope": torch.ones(2, 1, 64),
        "kv": integers(2, fmt.head_dim, dtype=torch.float32),
        "cos_sin_cache": table(64),
        "kv_norm_weight": torch.ones(64),
        "positions": torch.zeros(2, dtype=torch.int64),
        "slot_mapping": torch.arange(2),
        "eps": 1e-6,
        "interleaved": True,
        "scale_mode": "pow2",
    }
    arguments["kv"][0, 64:] *= 1e3  # beyond the largest scale of fp4_288
    arguments["kv"][0, 70] = math.nan  # not among the dims that are normalised
    arguments["kv"][1, 64:] = (torch.arange(fmt.head_dim - 64) % 49 - 24) / 4  # ties of e2m1
    arguments["kv"][1, 64::16] = 6
    written, _ = run("fused_rope_rmsnorm_quant", cache, out=torch.zeros(2, 1, 64), **arguments)
    reference.fused_rope_rmsnorm_quant(cache=cache, **arguments)
    ours, expected = (one.gather(torch.arange(2)) for one in (written, cache))
    assert torch.equal(ours.scales.float(), expected.scales.float())
    row = fmt.dequantize(ours)[0]
    assert row[70] > 0 if fmt.is_fp4 else row[70].isnan()
    torch.testing.assert_close(ours.fp8.float(), expected.fp8.float(), equal_nan=True)


def test_slots_and_positions_out_of_range_are_ignored():
    cache = marked_cache(FP8_DS_MLA, page_size=4)
    written, out = run(
        "fused_rope_rmsnorm_quant",
        cache,
        q_rope=torch.ones(4, 1, 64),
        kv=torch.ones(4, 576),
        cos_sin_cache=table(64),
        kv_norm_weight=torch.ones(512),
        positions=torch.tensor([INT_MIN, -1, MAX_POSITIONS, INT_MAX]),
        slot_mapping=torch.tensor([16, INT_MAX, INT_MIN, 2**40]),
        eps=1e-6,
        interleaved=True,
        scale_mode="pow2",
        out=torch.zeros(4, 1, 64),
    )
    assert_same_bytes(written, cache)
    assert (out == 1).all()


ODD = [(e4m3_format(64, 64, 0), 64), (bf16_format(75), 26)]
"""Formats and RoPE dims that no case of verify has."""


def index_formats(*cases):
    return pytest.mark.parametrize(
        ("fmt", "rope_dim"), cases, ids=lambda value: getattr(value, "name", value)
    )


TRANSFORM = pytest.mark.parametrize(
    ("rope_first", "hadamard"),
    [(True, False), (False, False), (True, True)],
    ids=["rope first", "rope last", "hadamard"],
)


def index_arguments(fmt, rope_dim, interleaved, rope_first, hadamard):
    if hadamard and fmt.head_dim & (fmt.head_dim - 1):
        pytest.skip("no Hadamard matrix of this size")
    return {
        "cos_sin_cache": table(rope_dim),
        "positions": torch.randint(0, MAX_POSITIONS, (6,), dtype=torch.int32),
        "interleaved": interleaved,
        "rope_first": rope_first,
        "hadamard": hadamard,
        "scale_mode": "pow2",
    }


def assert_close_codes(rows, wanted):
    """Check equality up to neighbouring codes, which another order of additions may give."""
    rows, wanted = rows.float(), wanted.float()
    torch.testing.assert_close(rows, wanted, rtol=0.13, atol=0.01 * wanted.abs().max().item())
    assert (rows != wanted).float().mean() < 0.02


@pytest.mark.parametrize("interleaved", [False, True])
@TRANSFORM
@index_formats(*ODD)
def test_index_keys(fmt, rope_dim, interleaved, rope_first, hadamard):
    cache = marked_cache(fmt, page_size=3)
    arguments = {
        "index_k": integers(6, fmt.head_dim + 3)[:, 3:],
        "norm_weight": integers(fmt.head_dim),
        "norm_bias": integers(fmt.head_dim, dtype=torch.float32),
        "slot_mapping": slots_for(6, cache).int(),
        "eps": 1e-6,
        **index_arguments(fmt, rope_dim, interleaved, rope_first, hadamard),
    }
    (written,) = run("append_index_keys", cache, **arguments)
    reference.append_index_keys(cache=cache, **arguments)
    kept = arguments["slot_mapping"]
    kept = kept[kept >= 0]
    assert_close_codes(written.read(kept), cache.read(kept))
    for one in (written, cache):
        one.write(kept, torch.zeros(len(kept), fmt.head_dim))
    assert_same_bytes(written, cache)


@pytest.mark.parametrize("interleaved", [False, True])
@TRANSFORM
@index_formats(*ODD)
def test_index_queries(fmt, rope_dim, interleaved, rope_first, hadamard):
    arguments = {
        "index_q": integers(6, 11, fmt.head_dim + 4)[..., 3:-1],
        "weights": torch.randn(6, 13).bfloat16()[:, 1:12],
        "format": fmt,
        **index_arguments(fmt, rope_dim, interleaved, rope_first, hadamard),
    }
    expected, weights = reference.prepare_index_queries(**arguments)
    _, out, weights_out = run(
        "prepare_index_queries",
        out=torch.zeros(6, 11, fmt.head_dim + 16).to(expected.dtype)[..., : fmt.head_dim],
        weights_out=torch.full((6, 11), 7.0),
        **arguments,
    )
    if hadamard:
        assert_close_codes(out, expected)
        torch.testing.assert_close(weights_out, weights)
    else:
        assert torch.equal(out.float(), expected.float())
        assert torch.equal(weights_out, weights)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_scales_of_infinities_are_the_largest():
    """2^127 in MXFP4: its codes are coarser than those of 2^126, and of infinity there are none."""
    q = integers(2, 3, 128)
    q[0, :, 70], q[1, :, 71] = math.inf, -math.inf
    q[:, :, 72] = 0.75 * 2.0**127
    arguments = {
        "index_q": q,
        "weights": torch.ones(2, 3),
        "format": INDEX_MXFP4,
        **index_arguments(INDEX_MXFP4, 64, interleaved=True, rope_first=True, hadamard=False),
    }
    arguments["positions"] = arguments["positions"][:2]
    expected, _ = reference.prepare_index_queries(**arguments)
    outputs = {"out": torch.zeros_like(expected), "weights_out": torch.zeros(2, 3)}
    _, out, _ = run("prepare_index_queries", **arguments, **outputs)
    assert torch.equal(out, expected)
    assert out[0, 0, [70, 72]].tolist() == [math.inf, 2.0**127]
    assert out[1, 0, 71] == -math.inf


@pytest.mark.parametrize("interleaved", [False, True])
@TRANSFORM
@index_formats((INDEX_FP8, 64), *ODD)
def test_index_keys_and_queries_in_one_launch(fmt, rope_dim, interleaved, rope_first, hadamard):
    shared = index_arguments(fmt, rope_dim, interleaved, rope_first, hadamard)
    cache = marked_cache(fmt, page_size=3)
    keys = {
        "index_k": integers(6, fmt.head_dim + 3)[:, 3:],
        "norm_weight": integers(fmt.head_dim),
        "norm_bias": integers(fmt.head_dim, dtype=torch.float32),
        "slot_mapping": slots_for(6, cache).int(),
        "eps": 1e-6,
    }
    queries = {"index_q": integers(6, 11, fmt.head_dim), "weights": torch.randn(6, 11)}
    dtype = torch.float8_e4m3fn if fmt.fp8_dim else torch.bfloat16

    def outputs():
        out = torch.zeros(6, 11, fmt.head_dim).to(dtype)
        return {"out": out, "weights_out": torch.full((6, 11), 7.0)}

    written, *results = run(
        "fused_indexer_rope_quant", cache, **shared, **keys, **queries, **outputs()
    )
    (expected,) = run("append_index_keys", cache, **shared, **keys)
    _, *alone = run("prepare_index_queries", format=fmt, **shared, **queries, **outputs())
    assert_same_bytes(written, expected)
    for got, want in zip(results, alone, strict=True):
        assert torch.equal(got.float(), want.float())


@pytest.mark.parametrize("scale_mode", ["pow2", "exact"])
def test_index_queries_of_random_values(scale_mode):
    arguments = {
        "index_q": torch.randn(33, 7, 128) * torch.randn(33, 7, 1).exp2(),
        "weights": torch.randn(33, 7),
        "format": INDEX_FP8,
        "cos_sin_cache": table(64),
        "positions": torch.randint(0, MAX_POSITIONS, (33,)),
        "interleaved": False,
        "rope_first": True,
        "hadamard": False,
        "scale_mode": scale_mode,
    }
    arguments["index_q"][5] = 0.0
    expected, weights = reference.prepare_index_queries(**arguments)
    _, out, weights_out = run(
        "prepare_index_queries",
        out=torch.empty_like(expected),
        weights_out=torch.empty_like(weights),
        **arguments,
    )
    assert torch.equal(out.view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(weights_out, weights)

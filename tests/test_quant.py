import math

import pytest
import torch

import sparsemla
from sparsemla import (
    BF16_512,
    BF16_576,
    FP8_584,
    FP8_DS_MLA,
    INDEX_FP8,
    bf16_format,
    e4m3_format,
    reference,
    rope_frequencies,
)
from sparsemla_lab.testing.cases import (
    Draw,
    append_index_keys_case,
    fused_indexer_rope_quant_case,
    fused_rope_rmsnorm_quant_case,
    prepare_index_queries_case,
)
from sparsemla_lab.testing.compare import (
    BFLOAT16_ULP,
    E4M3_STEP,
    FLOAT32_ULPS,
    Tolerance,
    assert_close,
    assert_equal,
    assert_few_differ,
    assert_rows_close,
    run_reference,
)
from sparsemla_lab.testing.poison import poisoned_empty
from sparsemla_lab.testing.shapes import CONVENTIONS, FLOATS, INDEX_FORMATS, LATENT_FORMATS


def ids(value):
    return getattr(value, "name", None) or str(value).removeprefix("torch.")


def check_write(op, make, tolerances=()):
    """Run an op that writes a cache, and its reference on a second cache; compare both."""
    actual, expected = make(), make()
    before = actual["cache"].fields()
    before = [None if part is None else part.clone() for part in before]
    with poisoned_empty():
        result = getattr(sparsemla, op)(**actual)
    wanted = run_reference(op, expected)
    assert_rows_close("cache", actual["cache"], expected["cache"])
    untouched = torch.ones(actual["cache"].num_slots, dtype=torch.bool)
    untouched[[slot for slot in actual["slot_mapping"].tolist() if slot >= 0]] = False
    for was, part in zip(before, actual["cache"].fields(), strict=True):
        if part is not None:
            kept = untouched.to(part.device)
            assert_equal("other rows", part.flatten(0, 1)[kept], was.flatten(0, 1)[kept])
    results = result if isinstance(result, tuple) else (result,)
    for got, want, tolerance in zip(results, wanted, tolerances, strict=False):
        assert_close("result", got.float(), want.float(), tolerance)
    return result, actual["cache"]


def test_rope_dims_at_an_odd_address(device):
    # Odd dims before the RoPE dims, of the row and of the query.
    fmt = e4m3_format(193, 128, 0)
    options = {"num_tokens": 1, "num_heads": 1, "norm_dim": 129, "dtype": torch.float32}

    def make():
        case = fused_rope_rmsnorm_quant_case(Draw(0, device), fmt, **options)
        return case | {"q_rope": Draw(1, device).normal(1, 1, 193)[..., 129:]}

    check_write("fused_rope_rmsnorm_quant", make)


@pytest.mark.parametrize("fmt", [FP8_DS_MLA, e4m3_format(), INDEX_FP8])
def test_exact_scales(device, fmt):
    check_write(
        "fused_rope_rmsnorm_quant",
        lambda: fused_rope_rmsnorm_quant_case(Draw(0, device), fmt, scale_mode="exact"),
    )


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "num_tokens": 4},
        {"rope_dim": 32, "norm_dim": 100},
        {"norm_dim": 576},
        {"eps": 0.1},
    ],
    ids=lambda options: " ".join(f"{name}={ids(value)}" for name, value in options.items()),
)
@pytest.mark.parametrize("fmt", [BF16_576, FP8_DS_MLA])
def test_latent_rows_of_many_shapes(device, fmt, options):
    check_write(
        "fused_rope_rmsnorm_quant",
        lambda: fused_rope_rmsnorm_quant_case(Draw(0, device), fmt, **options),
    )


@pytest.mark.parametrize("dtype", FLOATS)
def test_latent_rows_of_every_input_dtype(device, dtype):
    tolerance = BFLOAT16_ULP if dtype != torch.float32 else FLOAT32_ULPS
    check_write(
        "fused_rope_rmsnorm_quant",
        lambda: fused_rope_rmsnorm_quant_case(Draw(0, device), FP8_584, dtype=dtype),
        [tolerance],
    )


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e4m3fn])
def test_rotated_queries_of_every_output_dtype(device, dtype):
    case = fused_rope_rmsnorm_quant_case(Draw(0, device), BF16_576, dtype=torch.float32)
    wide = torch.zeros(6, 3, 100, dtype=torch.float32, device=device).to(dtype)
    out = wide[..., 36:]
    assert sparsemla.fused_rope_rmsnorm_quant(**case, out=out) is out
    expected, _ = reference.fused_rope_rmsnorm_quant(**case)
    tolerance = E4M3_STEP if dtype == torch.float8_e4m3fn else BFLOAT16_ULP
    assert_close("out", out.float(), expected.to(dtype).float(), tolerance)
    assert (wide[..., :36].float() == 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_queries_may_be_rotated_in_place(device, dtype):
    case = fused_rope_rmsnorm_quant_case(Draw(0, device), FP8_DS_MLA, dtype=dtype)
    expected = sparsemla.fused_rope_rmsnorm_quant(**case)
    case = fused_rope_rmsnorm_quant_case(Draw(0, device), FP8_DS_MLA, dtype=dtype)
    sparsemla.fused_rope_rmsnorm_quant(**case, out=case["q_rope"])
    assert_equal("out", case["q_rope"], expected)


@pytest.mark.parametrize("fmt", LATENT_FORMATS)
def test_rows_are_also_returned_before_quantisation(device, fmt):
    case = fused_rope_rmsnorm_quant_case(Draw(0, device), fmt)
    rows = torch.zeros(6, fmt.head_dim + 8, dtype=torch.bfloat16, device=device)
    sparsemla.fused_rope_rmsnorm_quant(**case, kv_out=rows[:, : fmt.head_dim])
    _, expected = run_reference("fused_rope_rmsnorm_quant", case)
    assert (case["slot_mapping"] < 0).any()  # rows without a slot are returned too
    assert_close("kv_out", rows[:, : fmt.head_dim].contiguous(), expected, BFLOAT16_ULP)
    assert (rows[:, fmt.head_dim :] == 0).all()


def test_e4m3_queries_are_rounded_once(device):
    case = fused_rope_rmsnorm_quant_case(Draw(0, device), BF16_576, num_tokens=40)
    out = torch.empty(40, 3, 64, dtype=torch.float8_e4m3fn, device=device)
    sparsemla.fused_rope_rmsnorm_quant(**case, out=out)
    expected, _ = reference.fused_rope_rmsnorm_quant(**case)
    assert (expected.to(out.dtype).float() != expected.bfloat16().to(out.dtype).float()).any()
    assert_few_differ("out", out, expected.to(out.dtype))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"interleaved": False, "strided": True},
        {"num_heads": 0},
        {"num_tokens": 1, "num_heads": 128, "eps": 0.1},
        {"rope_dim": 512, "index_dtype": torch.int32, "table_dtype": torch.bfloat16},
        {"rope_dim": 0},
    ],
    ids=lambda options: " ".join(f"{name}={ids(value)}" for name, value in options.items()),
)
def test_whole_queries_are_normalised_and_rotated(device, options):
    def make():
        return fused_rope_rmsnorm_quant_case(Draw(0, device), FP8_584, query_norm=True, **options)

    out, _ = check_write("fused_rope_rmsnorm_quant", make, [BFLOAT16_ULP])
    case = make()
    sparsemla.fused_rope_rmsnorm_quant(**case, out=case["q_rope"])
    assert_equal("in place", case["q_rope"].contiguous(), out)


def test_prepared_queries_match_the_formula(device):
    make = fused_rope_rmsnorm_quant_case
    case = make(Draw(0, device), BF16_512, query_norm=True, dtype=torch.float32)
    case["q_rope"][2] *= 1e-4  # so that eps counts
    out = sparsemla.fused_rope_rmsnorm_quant(**case)
    q = case["q_rope"].double().cpu()
    q = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    angles = case["positions"].cpu()[:, None] * rope_frequencies(64, 1e4).double()
    turned = torch.view_as_complex(q[..., 448:].unflatten(-1, (32, 2)).contiguous())
    turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None]
    expected = torch.cat([q[..., :448], torch.view_as_real(turned).flatten(-2)], dim=-1)
    assert_close("out", out.cpu(), expected, Tolerance(1e-6, 1e-5))


@pytest.mark.parametrize("fmt", [FP8_DS_MLA, FP8_584, e4m3_format(), BF16_576])
def test_nan_stays_in_its_row(device, fmt):
    make = lambda: fused_rope_rmsnorm_quant_case(Draw(0, device), fmt)  # noqa: E731
    case, clean = make(), make()
    case["kv"][0, 3] = math.nan
    sparsemla.fused_rope_rmsnorm_quant(**case)
    sparsemla.fused_rope_rmsnorm_quant(**clean)
    slots = case["slot_mapping"][case["slot_mapping"] >= 0]
    rows, expected = case["cache"].read(slots), clean["cache"].read(slots)
    norm_dim = case["kv_norm_weight"].shape[0]
    assert rows[0, :norm_dim].isnan().all()  # as the norm makes it
    assert_equal("RoPE dims without norm", rows[0, norm_dim:], expected[0, norm_dim:])
    assert_equal("other rows", rows[1:], expected[1:])


def test_no_tokens(device):
    case = fused_rope_rmsnorm_quant_case(Draw(0, device), FP8_DS_MLA, num_tokens=0)
    assert sparsemla.fused_rope_rmsnorm_quant(**case).shape == (0, 3, 64)
    case = append_index_keys_case(Draw(1, device), INDEX_FP8, num_tokens=0)
    sparsemla.append_index_keys(**case)
    case = fused_indexer_rope_quant_case(Draw(1, device), INDEX_FP8, num_tokens=0)
    assert sparsemla.fused_indexer_rope_quant(**case)[0].shape == (0, 5, 128)
    case = prepare_index_queries_case(Draw(2, device), INDEX_FP8, num_tokens=0)
    assert sparsemla.prepare_index_queries(**case)[0].shape == (0, 5, 128)


def test_rows_match_the_formula(device):
    case = fused_rope_rmsnorm_quant_case(
        Draw(0, device), BF16_576, num_tokens=2, dtype=torch.float32
    )
    sparsemla.fused_rope_rmsnorm_quant(**case)
    slot, position = int(case["slot_mapping"][0]), int(case["positions"][0])
    x = case["kv"][0].double().cpu()
    latent = x[:512] / (x[:512].square().mean() + 1e-6).sqrt() * case["kv_norm_weight"].cpu()
    angles = position * rope_frequencies(64, 1e4).double()
    rope = torch.complex(x[512::2], x[513::2]) * torch.polar(torch.ones(32).double(), angles)
    expected = torch.cat([latent, torch.view_as_real(rope).flatten()])
    row = case["cache"].read(torch.tensor([slot], device=device))[0]
    assert_close("row", row.cpu(), expected.bfloat16(), BFLOAT16_ULP)


@pytest.mark.parametrize("amax", [0.0, 1e-4, 0.0447, 1.0, 2.5, 448.0, 449.0])
@pytest.mark.parametrize("fmt", [FP8_DS_MLA, FP8_584, e4m3_format()])
def test_scales_match_the_format(device, fmt, amax):
    case = fused_rope_rmsnorm_quant_case(Draw(0, device), fmt, dtype=torch.float32, num_tokens=3)
    # RMSNorm undone: a row of +-1 has mean square 1, and the weight sets its size.
    case["kv"] = torch.where(case["kv"] > 0, 1.0, -1.0)
    case["kv_norm_weight"] = torch.full_like(case["kv_norm_weight"], amax)
    case["eps"] = 0.0
    case["positions"].zero_()
    sparsemla.fused_rope_rmsnorm_quant(**case)
    stored = case["cache"].gather(case["slot_mapping"][:1])
    rows = torch.full((1, fmt.head_dim), amax, device=device)
    expected = fmt.quantize(rows).scales[:, : 512 // fmt.scale_block - 1]
    assert_equal("scales", stored.scales[:, : expected.shape[1]], expected)


by_convention = pytest.mark.parametrize("convention", CONVENTIONS.values(), ids=CONVENTIONS)


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1, "num_tokens": 4},
        {"index_dtype": torch.int32},
        {"table_dtype": torch.bfloat16},
        {"rope_dim": 128},
        {"dtype": torch.float16},
        {"eps": 0.5},
    ],
    ids=lambda options: " ".join(f"{name}={ids(value)}" for name, value in options.items()),
)
def test_index_keys_of_many_shapes(device, options):
    check_write(
        "append_index_keys", lambda: append_index_keys_case(Draw(1, device), INDEX_FP8, **options)
    )


@by_convention
@pytest.mark.parametrize("fmt", INDEX_FORMATS)
def test_keys_and_queries_in_one_launch(device, fmt, convention):
    case, alone = (
        fused_indexer_rope_quant_case(Draw(3, device), fmt, **convention) for _ in range(2)
    )
    with poisoned_empty():
        q, weights = sparsemla.fused_indexer_rope_quant(**case)
    queries = {name: alone.pop(name) for name in ("index_q", "weights")}
    sparsemla.append_index_keys(**alone)
    shared = {name: alone[name] for name in ("cos_sin_cache", "positions")}
    expected = sparsemla.prepare_index_queries(**queries, **shared, format=fmt, **convention)
    assert_equal("q", q, expected[0])
    assert_equal("weights", weights, expected[1])
    assert_rows_close("cache", case["cache"], alone["cache"])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mode", ["pow2", "exact"])
def test_head_weights_include_every_factor(device, dtype, mode):
    case = prepare_index_queries_case(
        Draw(2, device), INDEX_FP8, num_heads=64, dtype=dtype, scale_mode=mode
    )
    case["positions"].zero_()
    q, weights = sparsemla.prepare_index_queries(**case)
    scales = weights / (case["weights"].float() * 0.0110485435)
    restored = q.float() * scales[..., None]
    # Position 0 is not rotated, so the codes times their scales are the queries again.
    torch.testing.assert_close(restored, case["index_q"].float(), rtol=2**-4, atol=2e-2)
    if mode == "pow2":
        assert_close("scales", scales.log2(), scales.log2().round(), Tolerance(1e-3, 1e-3))


def test_hadamard_preserves_dot_products(device):
    scores = []
    for hadamard in (False, True):
        case = append_index_keys_case(
            Draw(1, device), bf16_format(128), hadamard=hadamard, num_tokens=5
        )
        sparsemla.append_index_keys(**case)
        keys = case["cache"].read(case["slot_mapping"][:4]).double()
        case = prepare_index_queries_case(Draw(2, device), bf16_format(128), hadamard=hadamard)
        q, _ = sparsemla.prepare_index_queries(**case)
        scores.append(torch.einsum("thd,nd->thn", q.double(), keys))
    size = scores[0].abs().max()
    torch.testing.assert_close(scores[1] / size, scores[0] / size, rtol=0, atol=5e-3)


def test_hadamard_is_in_sylvester_order():
    rows = torch.eye(8)
    signs = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(8)] for i in range(8)])
    assert_close("matrix", reference.quant.hadamard(rows), signs / math.sqrt(8), FLOAT32_ULPS)


def test_results_go_into_given_outputs(device):
    case = prepare_index_queries_case(Draw(2, device), INDEX_FP8)
    expected = sparsemla.prepare_index_queries(**case)
    out = torch.empty(4, 5, 200, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    weights_out = torch.empty(4, 9, device=device)
    got = sparsemla.prepare_index_queries(
        **case, out=out[..., :128], weights_out=weights_out[:, :5]
    )
    assert got[0].data_ptr() == out.data_ptr()
    assert_equal("out", got[0].contiguous(), expected[0])
    assert_equal("weights_out", got[1].contiguous(), expected[1])

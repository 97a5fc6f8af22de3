"""The portable per-head GEMMs against the reference, where test_tiers.py has no case."""

import pytest
import torch

from sparsemla import HeadWeight, dispatch, merge_workspace_size, reference
from sparsemla.formats import to_fp8
from sparsemla_lab.testing.cases import Draw, project_groups_case, project_heads_case
from sparsemla_lab.testing.compare import (
    assert_close,
    assert_equal,
    projection_tolerances,
    sizes_of,
)
from sparsemla_lab.verify.matrix import Case, build
from test_tiers import DEVICE
from test_tiers import check as check_case

pytest.importorskip("triton")
import triton
import triton.language as tl

from sparsemla.kernels.common.fp8 import round_to_e4m3
from sparsemla.kernels.projection import triton as projection

# The merge of parts uses log2(0) = -inf; numpy, in the interpreter, warns about it.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def head_weight(heads, outputs, inputs, scale_block=None):
    data = torch.randn(heads, outputs, inputs)
    if scale_block is None:
        return HeadWeight(data.bfloat16().to(DEVICE))
    n, k = scale_block
    scale = torch.rand(heads, -(-outputs // n), -(-inputs // k)) + 0.5
    codes = (data * 50).to(torch.float8_e4m3fn)
    return HeadWeight(codes.to(DEVICE), scale.to(DEVICE), scale_block)


def check(x, weight, out=None):
    if out is None:
        out = torch.empty(*x.shape[:2], weight.data.shape[1], dtype=torch.bfloat16, device=DEVICE)
    out.fill_(float("nan"))
    dispatch.load("project_heads", "triton")(x=x, weight=weight, out=out)
    expected = reference.project_heads(x, weight)
    error = (out.float() - expected).abs().max() / expected.abs().max()
    assert error < 0.01


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.mark.parametrize(
    ("heads", "outputs", "inputs", "scale_block"),
    [(1, 16, 5, None), (3, 40, 100, (16, 32)), (1, 70, 96, (64, 48))],
)
def test_weights_and_blocks_of_odd_sizes(heads, outputs, inputs, scale_block):
    x = torch.randn(17, heads, inputs, device=DEVICE).bfloat16()
    check(x, head_weight(heads, outputs, inputs, scale_block))


@pytest.mark.parametrize("scale_block", [None, (128, 64)])
def test_slices_and_expanded_heads(scale_block):
    weight = head_weight(3, 64, 128, scale_block)
    wide = torch.full((5, 3, 200), float("nan"), device=DEVICE).bfloat16()
    wide[..., 8:136] = torch.randn(5, 3, 128)
    buffer = torch.full((5, 3, 80), 7.0, device=DEVICE).bfloat16()
    check(wide[..., 8:136], weight, out=buffer[..., :64])
    assert (buffer[..., 64:] == 7.0).all()
    check(torch.randn(5, 1, 128, device=DEVICE).bfloat16().expand(5, 3, 128), weight)


def test_rows_of_zeros_and_of_huge_numbers_are_independent():
    weight = head_weight(1, 64, 128, (128, 128))
    x = torch.randn(4, 1, 128, device=DEVICE).bfloat16()
    x[1], x[2] = 0.0, x[2] * 1e30
    out = torch.empty(4, 1, 64, dtype=torch.bfloat16, device=DEVICE)
    dispatch.load("project_heads", "triton")(x=x, weight=weight, out=out)
    expected = reference.project_heads(x, weight)
    assert (out[1] == 0).all()
    for row in (0, 2, 3):
        torch.testing.assert_close(
            out[row].float(), expected[row], rtol=0.02, atol=float(expected[row].abs().max()) / 100
        )


def fma(a, b, c):
    """A fused multiply-add: float64 represents it before its rounding."""
    return (a.double() * b.double() + c.double()).float()


@pytest.mark.parametrize("ulps", [-2, -1, 0, 1, 2])
def test_codes_equal_correctly_rounded_division(ulps):
    """Codes of ``_quantise``, which divides with an error of up to 2 ulp."""
    values = torch.arange(1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    values = values[values.isfinite()]
    top = torch.cat([values[values > 1e-4], torch.tensor([1e-4])])
    parts = projection.INVERSE.value, projection.INVERSE_REST.value
    inverse, rest = (torch.tensor(part) for part in parts)
    assert torch.equal(fma(top, inverse, top * rest), top / 448)

    # Every mantissa of the largest value, and other values small enough to round to 0 at any scale.
    top = torch.cat([top[(top >= 1) & (top < 2)], top[-1:]])
    assert len(top) == 129
    for largest, scale in zip(top, top / 448, strict=True):
        x = values[(values <= largest) & (values >= largest * 2.0**-24)]
        inverse = ((1 / scale).view(torch.int32) + ulps).view(torch.float32)
        rest = fma(-scale, inverse, torch.ones(())) * inverse
        assert torch.equal(fma(x, inverse, x * rest), x / scale)


@pytest.mark.parametrize("ulps", [-2, -1, 0, 1, 2])
def test_codes_of_float32_values_equal_correctly_rounded_division(ulps):
    generator = torch.Generator().manual_seed(0)
    amax = torch.rand(1000, generator=generator) + 1
    parts = projection.INVERSE.value, projection.INVERSE_REST.value
    inverse, rest = (torch.tensor(part) for part in parts)
    scale = fma(amax, inverse, amax * rest)
    assert torch.equal(scale, amax / 448)

    # Any values, and those next to middles of neighbouring codes.
    codes = torch.arange(0x7E, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = ((codes[1:] + codes[:-1]) / 2 * scale[:, None]).view(torch.int32)
    values = torch.rand(1000, 1000, generator=generator) * amax[:, None]
    x = torch.cat([values, *((ties + near).view(torch.float32) for near in (-1, 0, 1))], dim=1)
    scale = scale[:, None]
    inverse = ((1 / scale).view(torch.int32) + ulps).view(torch.float32)
    rest = fma(-scale, inverse, torch.ones(())) * inverse
    quotients = fma(x, inverse, x * rest)
    assert (quotients != x / scale).float().mean() < 1e-4
    assert torch.equal(to_fp8(quotients).view(torch.uint8), to_fp8(x / scale).view(torch.uint8))


@triton.jit
def _round(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(out + at, round_to_e4m3(tl.load(x + at)))


def test_operands_are_rounded_to_e4m3():
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = ((codes[1:] + codes[:-1]) / 2).view(torch.int32)
    x = torch.cat([codes, *((ties + near).view(torch.float32) for near in (-1, 0, 1))])
    x = torch.cat([x, -x, torch.rand(900) / 64, torch.full((138,), torch.nan)]).to(DEVICE)
    out = torch.empty_like(x)
    _round[(1,)](x, out, N=2048)
    assert torch.equal(out.nan_to_num(7.0), x.to(torch.float8_e4m3fn).float().nan_to_num(7.0))


@pytest.mark.parametrize("num_parts", [None, 3])
@pytest.mark.parametrize("scale_block", [None, (128, 64)])
def test_token_gets_the_same_bits_alone_and_in_a_batch(scale_block, num_parts):
    case = project_heads_case(
        Draw(1, DEVICE), num_tokens=70, rows=80, cols=192, block=scale_block, num_parts=num_parts
    )
    launch = dispatch.load("project_heads", "triton")
    out = torch.empty(70, 3, 80, dtype=torch.bfloat16, device=DEVICE)
    launch(**case, batch_invariant=True, out=out)
    (tolerance,) = projection_tolerances(scale_block, merged=num_parts is not None)
    sizes = sizes_of("project_heads", case).get(0)
    assert_close("out", out, reference.project_heads(**case), tolerance, sizes)
    for token in (0, 17, 69):
        own = {"x": case["x"][..., token : token + 1, :, :]}
        if num_parts:
            own["lses"] = case["lses"][:, token : token + 1]
        alone = torch.empty(1, 3, 80, dtype=torch.bfloat16, device=DEVICE)
        launch(**case | own, batch_invariant=True, out=alone)
        assert_equal(f"token {token}", alone, out[token : token + 1])


def test_parts_are_merged_in_a_workspace():
    case = project_heads_case(
        Draw(2, DEVICE), num_tokens=projection.FEW_TOKENS + 6, rows=80, cols=192, num_parts=3
    )
    results = []
    size = merge_workspace_size(projection.FEW_TOKENS + 6, 3, 192)
    memory = torch.full((size + 16,), 77, dtype=torch.uint8, device=DEVICE)
    for workspace in (None, memory[:size]):
        out = torch.empty(projection.FEW_TOKENS + 6, 3, 80, dtype=torch.bfloat16, device=DEVICE)
        dispatch.load("project_heads", "triton")(**case, workspace=workspace, out=out)
        results.append(out)
    assert_equal("out", *results)
    assert (memory[size:] == 77).all()
    if not torch.cuda.is_available():  # on Hopper so few heads are still merged on the way
        assert not (memory[:size] == 77).all()


@pytest.mark.parametrize("block", [None, (128, 64), (48, 20)])
@pytest.mark.parametrize(
    "options",
    [
        {"num_heads": 4, "num_groups": 2, "dim": 192, "rope_dim": 80},
        {"num_parts": 3, "with_sink": True, "table_dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_groups(block, options):
    tolerances = projection_tolerances(block, merged="num_parts" in options)
    make = build(project_groups_case, **{"dim": 64, "block": block} | options)
    check_case("triton", DEVICE, "project_groups", Case("", make, tolerances))

"""Projections of groups of heads, with their rotation undone."""

import pytest
import torch

import sparsemla
from sparsemla import (
    BF16_512,
    HeadWeight,
    PagedCache,
    cos_sin_table,
    group_o_a_proj,
    group_workspace_size,
    rope_frequencies,
)
from sparsemla.formats import fp8_scales, to_fp8
from sparsemla.reference.quant import rotate_last
from sparsemla_lab.testing.cases import Draw, embed, project_groups_case
from sparsemla_lab.testing.compare import (
    FP8_PROJECTION,
    MERGED_FP8_PROJECTION,
    UNQUANTIZED_PROJECTION,
    Tolerance,
    assert_close,
    assert_equal,
    check_op,
    projection_tolerances,
    sizes_of,
)

BLOCKS = {"bf16": None, "128x128": (128, 128)}
by_block = pytest.mark.parametrize("block", BLOCKS.values(), ids=BLOCKS)


@by_block
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_tokens": 0},
        {"num_tokens": 1, "num_heads": 64, "num_groups": 8, "dim": 64},
        {"num_heads": 5, "num_groups": 5, "rows": 200},
        {"num_heads": 3, "num_groups": 1, "dim": 100, "rope_dim": 30, "rows": 17},
        {"dim": 65, "rope_dim": 64},
        {"rope_dim": None},
        {"rope_dim": None, "strided": True},
        {"rope_dim": 0},
        {"strided": True, "table_dtype": torch.bfloat16, "index_dtype": torch.int64},
        {"num_tokens": 70, "rows": 130},
    ],
    ids=str,
)
def test_products(device, block, options):
    case = project_groups_case(Draw(0, device), block=block, **options)
    check_op("project_groups", case, projection_tolerances(block))


@pytest.mark.parametrize("num_parts", [None, 2])
def test_scale_blocks_that_cross_heads(device, num_parts):
    case = project_groups_case(Draw(0, device), block=(48, 20), num_parts=num_parts)
    check_op("project_groups", case, (MERGED_FP8_PROJECTION if num_parts else FP8_PROJECTION,))


def test_a_group_of_deepseek_v4(device):
    case = project_groups_case(
        Draw(1, device),
        num_tokens=5,
        num_heads=8,
        num_groups=1,
        dim=512,
        rows=1024,
        block=(128, 128),
    )
    check_op("project_groups", case, (FP8_PROJECTION,))


@by_block
@pytest.mark.parametrize("num_parts", [1, 3])
def test_parts_of_a_split_attention(device, block, num_parts):
    case = project_groups_case(
        Draw(2, device), block=block, num_parts=num_parts, with_sink=num_parts > 1
    )
    check_op("project_groups", case, projection_tolerances(block, merged=True))
    parts = {name: case.pop(name) for name in ("x", "lses", "attn_sink")}
    merged, _ = sparsemla.merge_states(parts["x"], parts["lses"], attn_sink=parts["attn_sink"])
    out = sparsemla.project_groups(**case, x=merged.bfloat16())
    again = sparsemla.project_groups(**case, **parts)
    (tolerance,) = projection_tolerances(block, merged=True)
    sizes = sizes_of("project_groups", parts | case).get(0)
    assert_close("merged first", again, out.float(), tolerance, sizes)


@by_block
def test_heads_without_rotation_are_projected_as_one(device, block):
    case = project_groups_case(Draw(3, device), block=block, rope_dim=None)
    grouped = case["x"].reshape(7, 2, 3 * 128)
    expected = sparsemla.project_heads(grouped, case["weight"])
    assert_close("out", sparsemla.project_groups(**case), expected, *projection_tolerances(block))


def by_definition(case):
    """float64 outputs of bfloat16 weights, without a rounding of the inputs."""
    x = case["x"].double().cpu()
    pairs = torch.view_as_complex(x[..., 64:].unflatten(-1, (32, 2)).contiguous())
    angles = case["positions"].cpu()[:, None] * rope_frequencies(64, 1e4).double()
    turned = pairs * torch.polar(torch.ones_like(angles), -angles)[:, None]
    x = torch.cat([x[..., :64], torch.view_as_real(turned).flatten(-2)], dim=-1)
    weight = case["weight"].dequantize().double().cpu()
    groups = [x[:, :3].flatten(1) @ weight[0].T, x[:, 3:].flatten(1) @ weight[1].T]  # [T, N]
    return torch.stack(groups, dim=1)


# Rounding the 64 rotated of 128 inputs to bfloat16 has a standard deviation of 2^-9.8 * 2^-0.5 of
# the size; the limit is more than five of these, beside the rounding of the result.
ROTATED = Tolerance(rel=1.01 / 128, cos=1e-5, size=2**-7)


def test_outputs_match_the_formula(device):
    case = project_groups_case(Draw(4, device))
    assert_close("out", sparsemla.project_groups(**case).cpu(), by_definition(case), ROTATED)


def with_negative_sines(table):
    cos, sin = table.chunk(2, dim=-1)
    return torch.cat([cos, -sin], dim=-1)


def changed(name, change):
    return lambda case: case | {name: change(case[name])}


WRONG = {
    "rotated forward": changed("cos_sin_cache", with_negative_sines),
    "another position": changed("positions", lambda positions: positions + 1),
    "not rotated": changed("positions", torch.zeros_like),
    "groups swapped": changed("weight", lambda weight: HeadWeight(weight.data.flip(0))),
    "groups of every other head": changed(
        "x", lambda x: x.unflatten(1, (3, 2)).transpose(1, 2).flatten(1, 2)
    ),
    "heads of a group swapped": changed("x", lambda x: x[:, [1, 0, 2, 3, 4, 5]]),
}


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_wrong_rotations_and_groups_differ(wrong):
    case = project_groups_case(Draw(4))
    out = sparsemla.project_groups(**wrong(case))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_close("out", out, by_definition(case), ROTATED)


def test_forward_rotation_is_undone(device):
    draw = Draw(5, device)
    q, positions = draw.normal(6, 4, 512), torch.arange(100, 106, device=device)
    table = cos_sin_table(rope_frequencies(64, 1.6e5), 200).to(device)
    rotated = sparsemla.fused_rope_rmsnorm_quant(
        q[..., 448:],
        draw.normal(6, 512),
        table,
        torch.ones(512, device=device),
        PagedCache.allocate(BF16_512, 1, 8, device=device),
        positions=positions,
        slot_mapping=positions - 100,
    )
    x = torch.cat([q[..., :448], rotated], dim=-1).bfloat16()
    identity = torch.eye(1024, device=device).bfloat16().expand(2, -1, -1)
    out = sparsemla.project_groups(
        x, HeadWeight(identity), cos_sin_cache=table, positions=positions
    )
    # Rounded to bfloat16 after each rotation; a pair's error is up to 2^-9 of its length.
    size = q.abs().max() * 2**-7
    torch.testing.assert_close(out.view(6, 4, 512).float(), q, rtol=2**-8, atol=float(size))
    plain = sparsemla.project_groups(x, HeadWeight(identity))
    assert_equal("other dims", out.view(6, 4, 512)[..., :448], plain.view(6, 4, 512)[..., :448])


def test_inputs_are_rounded_once_to_e4m3(device):
    # The product with an identity shows the quantised inputs.
    case = project_groups_case(Draw(6, device), num_tokens=40)
    identity = torch.eye(384, device=device).expand(2, -1, -1)
    weight = HeadWeight(to_fp8(identity), torch.ones(2, 3, 3, device=device))
    out = sparsemla.project_groups(**case | {"weight": weight}).view(40, 6, 128)
    table = with_negative_sines(case["cos_sin_cache"])[case["positions"].long()]
    x = rotate_last(case["x"].float(), table[:, None], interleaved=True)
    scales = fp8_scales(x.abs().amax(-1, keepdim=True).clamp_min(1e-4))
    expected = (to_fp8(x / scales).float() * scales).bfloat16()
    twice = (to_fp8(x.bfloat16().float() / scales).float() * scales).bfloat16()
    assert (expected != twice).any()
    assert torch.equal(out, expected)  # but for signs of zeros


def test_e4m3_results_are_close_to_unquantised_ones(device):
    case = project_groups_case(Draw(7, device), num_tokens=20, rows=256)
    full = case["weight"].dequantize()
    out = sparsemla.project_groups(**case | {"weight": HeadWeight.quantize(full)})
    expected = sparsemla.reference.project_groups(**case)
    assert_close("out", out, expected, UNQUANTIZED_PROJECTION)


@by_block
def test_padded_heads_and_slices(device, block):
    case = project_groups_case(Draw(8, device), block=block)
    expected = sparsemla.project_groups(**case)
    padded = torch.full((7, 64, 128), torch.nan, device=device).bfloat16()
    padded[:, :6] = case["x"]
    wide = torch.zeros(7, 3, 100, device=device).bfloat16()
    out = wide[:, :2, :64]
    for x in (padded[:, :6], embed(case["x"])):
        assert sparsemla.project_groups(**case | {"x": x}, out=out.fill_(7)) is out
        assert_equal("out", out.contiguous(), expected)
    assert (wide[:, 2] == 0).all()
    assert (wide[..., 64:] == 0).all()


@by_block
def test_workspace_may_hold_anything(device, block):
    case = project_groups_case(Draw(9, device), block=block, num_parts=2)
    expected = sparsemla.project_groups(**case)
    size = group_workspace_size(7, case["weight"])
    memory = torch.full((size + 16,), 255, dtype=torch.uint8, device=device)
    assert_equal("out", sparsemla.project_groups(**case, workspace=memory[:size]), expected)
    assert (memory[size:] == 255).all()
    with pytest.raises(ValueError, match="workspace must hold"):
        sparsemla.project_groups(**case, workspace=memory[: size - 1])


@pytest.mark.parametrize(
    ("scale_dtype", "rows"), [(torch.float8_e8m0fnu, 256), (torch.float32, 192), (None, 100)]
)
def test_checkpoint_weights_keep_their_values(device, scale_dtype, rows):
    draw = Draw(10, device)
    whole, scale = draw.normal(2 * rows, 256), None
    if scale_dtype is not None:
        whole = to_fp8(whole * 30)
        scale = torch.exp2(draw.integers(-9, 3, -(-2 * rows // 128), 2).float()).to(scale_dtype)
    weight = group_o_a_proj(whole, scale, num_groups=2)
    assert weight.scale_block == (torch.gcd(torch.tensor(128), torch.tensor(rows)).item(), 128)
    exact = whole.bfloat16().float()
    if scale is not None:
        assert weight.data.dtype == torch.float8_e4m3fn
        spread = scale.float().repeat_interleave(128, 0).repeat_interleave(128, 1)
        exact = whole.float() * spread[: 2 * rows]
    assert_equal("weight", weight.dequantize(), exact.view(2, rows, 256))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": None}, "positions must be a tensor"),
        ({"cos_sin_cache": None}, "positions must be None without cos_sin_cache"),
        ({"attn_sink": torch.zeros(6)}, "attn_sink must be None without lses"),
        ({"x": torch.zeros(7, 5, 128).bfloat16()}, "divisor G of H = 5"),
        ({"x": torch.zeros(7, 3, 256).bfloat16()}, "divisor G of H = 3"),
        ({"x": torch.zeros(7, 0, 128).bfloat16()}, "divisor G of H = 0"),
        ({"cos_sin_cache": torch.zeros(300, 130)}, "cos_sin_cache must have an even last"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_fit_is_refused(change, message):
    case = project_groups_case(Draw(11))
    with pytest.raises((TypeError, ValueError), match=message):
        sparsemla.project_groups(**case | change)

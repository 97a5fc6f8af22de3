import pytest
import torch

import sparsemla
from sparsemla import HeadWeight, absorb_kv_b_proj
from sparsemla.formats import to_fp8
from sparsemla_lab.testing.cases import Draw, embed, head_weight, project_heads_case
from sparsemla_lab.testing.compare import (
    FP8_PROJECTION,
    MERGED_FP8_PROJECTION,
    PROJECTION,
    UNQUANTIZED_PROJECTION,
    assert_close,
    assert_equal,
    check_op,
    projection_tolerances,
)
from sparsemla_lab.testing.shapes import PROJECTION_SHAPES, SCALE_BLOCKS

by_block = pytest.mark.parametrize("block", SCALE_BLOCKS.values(), ids=SCALE_BLOCKS)


@by_block
def test_no_tokens(device, block):
    case = project_heads_case(Draw(1, device), num_tokens=0, block=block)
    assert sparsemla.project_heads(**case).shape == (0, 3, 512)


@by_block
@pytest.mark.parametrize("num_parts", [None, 2])
def test_no_heads(device, num_parts, block):
    case = project_heads_case(Draw(10, device), block=block, num_parts=num_parts)
    weight = case["weight"]
    scale = None if block is None else weight.scale[:0]
    case["weight"] = HeadWeight(weight.data[:0], scale, weight.scale_block)
    case["x"] = case["x"][..., :0, :]
    if num_parts is not None:
        case["lses"] = case["lses"][..., :0]
    assert sparsemla.project_heads(**case).shape == (7, 0, 512)


@pytest.mark.parametrize("shape", [(512, 128), (128, 512), (256, 512), (384, 256)])
@pytest.mark.parametrize(("num_tokens", "num_heads"), [(4100, 1), (1400, 3)])
def test_many_tokens(device, shape, num_tokens, num_heads):
    rows, cols = shape
    case = project_heads_case(
        Draw(8, device),
        num_tokens=num_tokens,
        num_heads=num_heads,
        rows=rows,
        cols=cols,
        block=(128, 128),
    )
    case["x"][5] = 0
    case["x"][7] *= 1e4
    (expected,) = check_op("project_heads", case, (FP8_PROJECTION,))
    buffer = torch.zeros(num_tokens, num_heads, rows + 72, dtype=torch.bfloat16, device=device)
    sparsemla.project_heads(embed(case["x"]), case["weight"], out=buffer[..., :rows])
    assert_equal("out", buffer[..., :rows].contiguous(), expected)
    assert (buffer[..., rows:] == 0).all()


def test_parts_of_many_tokens(device):
    case = project_heads_case(
        Draw(9, device),
        num_tokens=2800,
        rows=128,
        cols=512,
        block=(128, 128),
        num_parts=2,
        with_sink=True,
    )
    check_op("project_heads", case, (MERGED_FP8_PROJECTION,))


@by_block
def test_slices_of_wider_buffers(device, block):
    draw = Draw(2, device)
    weight = head_weight(draw, 3, 64, 128, block)
    x = draw.normal(5, 3, 128).bfloat16()
    tolerances = projection_tolerances(block)
    (expected,) = check_op("project_heads", {"x": x, "weight": weight}, tolerances)
    wide = torch.zeros(5, 3, 100, dtype=torch.bfloat16, device=device)
    out = wide[..., 36:]
    assert sparsemla.project_heads(embed(x), weight, out=out) is out
    assert_equal("out", out.contiguous(), expected)
    assert (wide[..., :36] == 0).all()
    one_latent = x[:, :1].expand(-1, 3, -1)  # the same input for every head, with stride 0
    check_op("project_heads", {"x": one_latent, "weight": weight}, tolerances)


@by_block
def test_inputs_of_very_different_magnitudes(device, block):
    draw = Draw(3, device)
    weight = head_weight(draw, 2, 64, 256, block)
    x = draw.normal(6, 2, 256)
    x[1] = 0
    x[2] *= 1e-6
    x[3] *= 1e4
    x[4, :, ::128] = 300
    check_op("project_heads", {"x": x.bfloat16(), "weight": weight}, projection_tolerances(block))


def test_fp8_projection_is_close_to_unquantised(device):
    draw = Draw(4, device)
    for rows, cols in PROJECTION_SHAPES.values():
        full = draw.normal(4, rows, cols) * cols**-0.5
        x = draw.normal(20, 4, cols).bfloat16()
        weight = head_weight(Draw(5, device), 4, rows, cols, (128, 128))
        scale = weight.scale
        spread = scale.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :rows, :cols]
        quantised = HeadWeight(to_fp8(full / spread), scale)
        out = sparsemla.project_heads(x, quantised)
        expected = torch.einsum("thk,hnk->thn", x.float(), full)
        assert_close("out", out, expected, UNQUANTIZED_PROJECTION)


def test_absorbed_weights_equal_the_unsplit_projection(device):
    heads, nope, value, latent = 3, 192, 256, 512
    draw = Draw(6, device)
    weight = draw.normal(heads * (nope + value), latent) * latent**-0.5
    w_uk, w_uv = absorb_kv_b_proj(weight, num_heads=heads, qk_nope_head_dim=nope, v_head_dim=value)
    whole = weight.bfloat16().float().view(heads, nope + value, latent)
    q = draw.normal(4, heads, nope).bfloat16()
    expected = torch.einsum("thp,hpl->thl", q.float(), whole[:, :nope])
    assert_close("w_uk", sparsemla.project_heads(q, w_uk), expected, PROJECTION)
    x = draw.normal(4, heads, latent).bfloat16()
    expected = torch.einsum("thl,hvl->thv", x.float(), whole[:, nope:])
    assert_close("w_uv", sparsemla.project_heads(x, w_uv), expected, PROJECTION)

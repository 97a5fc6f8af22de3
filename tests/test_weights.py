import pytest
import torch

from sparsemla import (
    HeadWeight,
    absorb_kv_b_proj,
    dequantize_blocks,
    project_heads,
    projection_weight,
    reference,
)
from sparsemla.formats import to_fp8
from sparsemla_lab.testing.cases import Draw, mla_layer
from sparsemla_lab.testing.compare import (
    FP8_PROJECTION,
    UNQUANTIZED_PROJECTION,
    assert_close,
    assert_equal,
)

SHAPES = {
    "deepseek-v3": (4, 128, 128, 512),
    "glm-5": (5, 192, 256, 512),
    "uneven latent": (3, 64, 96, 200),
    "odd heads": (3, 40, 56, 128),
}
by_shape = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())


def fp8_matrix(rows, cols, block=128):
    draw = Draw(0)
    weight = to_fp8(draw.normal(rows, cols) * 30)
    return weight, draw.normal(-(-rows // block), -(-cols // block)).abs() + 0.01


def dequantized_by_hand(weight, scale, block=128):
    out = weight.float()
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            out[i * block : (i + 1) * block, j * block : (j + 1) * block] *= scale[i, j]
    return out


@by_shape
def test_fp8_blocks_that_straddle_heads_keep_their_values(shape):
    heads, nope, value, latent = shape
    weight, scale = fp8_matrix(heads * (nope + value), latent)
    whole = dequantized_by_hand(weight, scale)
    assert_equal("weight", dequantize_blocks(weight, scale), whole)
    w_uk, w_uv = absorb_kv_b_proj(
        weight, scale, num_heads=heads, qk_nope_head_dim=nope, v_head_dim=value
    )
    assert w_uk.data.shape == (heads, latent, nope)
    assert w_uv.data.shape == (heads, value, latent)
    assert w_uk.data.dtype == w_uv.data.dtype == torch.float8_e4m3fn
    per_head = whole.view(heads, nope + value, latent)
    assert_equal("w_uk", w_uk.dequantize(), per_head[:, :nope].transpose(1, 2).contiguous())
    assert_equal("w_uv", w_uv.dequantize(), per_head[:, nope:].contiguous())
    # Kernels are compiled for aligned parts.
    assert all(part.is_contiguous() for part in (w_uk.data, w_uk.scale, w_uv.data, w_uv.scale))


def test_scale_blocks_are_as_coarse_as_possible():
    for shape, fine in ((SHAPES["deepseek-v3"], 128), (SHAPES["glm-5"], 64)):
        heads, nope, value, latent = shape
        weight, scale = fp8_matrix(heads * (nope + value), latent)
        w_uk, w_uv = absorb_kv_b_proj(
            weight, scale, num_heads=heads, qk_nope_head_dim=nope, v_head_dim=value
        )
        assert w_uk.scale_block == (128, fine)
        assert w_uv.scale_block == (fine, 128)


@by_shape
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unquantised_weights_are_split(shape, dtype):
    heads, nope, value, latent = shape
    weight = Draw(1).normal(heads * (nope + value), latent).to(dtype)
    w_uk, w_uv = absorb_kv_b_proj(weight, num_heads=heads, qk_nope_head_dim=nope, v_head_dim=value)
    for head in range(heads):
        rows = weight[head * (nope + value) :][: nope + value].bfloat16()
        assert_equal("w_uk", w_uk.data[head], rows[:nope].T.contiguous())
        assert_equal("w_uv", w_uv.data[head], rows[nope:].contiguous())
    assert w_uk.data.is_contiguous()
    assert w_uv.data.is_contiguous()


@pytest.mark.parametrize("block", [None, (128, 64), (128, 128), (48, 100)])
def test_transposed_weights_have_the_same_values(block):
    draw = Draw(2)
    data = draw.normal(3, 200, 130)
    scale = None
    if block is not None:
        data = to_fp8(data)
        scale = draw.normal(3, -(-200 // block[0]), -(-130 // block[1]))
    weight = HeadWeight(data if block else data.bfloat16(), scale, block or (128, 128))
    turned = weight.transpose()
    assert_equal("weight", turned.dequantize().transpose(1, 2).contiguous(), weight.dequantize())
    assert_equal("back", turned.transpose().data, weight.data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("block", [(128, 128), (64, 128), (48, 100), None], ids=str)
def test_quantised_weights_are_close_to_the_originals(block, dtype):
    data = (Draw(4).normal(3, 200, 130) * 7).to(dtype)
    data[1, :128, :100] = 0
    weight = HeadWeight.quantize(data, block)
    n, k = weight.scale_block
    assert weight.scale.shape == (3, -(-200 // n), -(-130 // k))
    for head in range(3):
        for row in range(0, 200, n):
            for col in range(0, 130, k):
                part = data[head, row : row + n, col : col + k].float()
                top = data.float().abs().max() if block is None else part.abs().max()
                scale = weight.scale[head, row // n, col // k]
                assert scale == max(top / 448, torch.finfo(torch.float32).tiny)
    step = weight.dequantize().abs() / 16 + data.float().abs().max() / 448 / 2**9  # half a step
    assert ((weight.dequantize() - data.float()).abs() <= step * 1.0001).all()
    assert HeadWeight.quantize(data[:0], block).data.shape == (0, 200, 130)


def test_single_scale_is_amax_over_448():
    data = Draw(5).normal(2, 128, 256).bfloat16()
    amax = data.abs().amax()
    codes = (data.float() * (448 / amax.float())).clamp(-448, 448).to(torch.float8_e4m3fn)
    weight = HeadWeight.quantize(data, None)
    assert (weight.scale == amax.float() / 448).all()
    assert (weight.data.view(torch.uint8) == codes.view(torch.uint8)).float().mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e8m0fnu], ids=str)
def test_scales_of_other_dtypes_are_converted_to_float32(dtype):
    heads, nope, value, latent = SHAPES["glm-5"]
    codes, scale = fp8_matrix(heads * (nope + value), latent)
    scale = scale.to(dtype)
    split = {"num_heads": heads, "qk_nope_head_dim": nope, "v_head_dim": value}
    for given, wanted in zip(
        absorb_kv_b_proj(codes, scale, **split),
        absorb_kv_b_proj(codes, scale.float(), **split),
        strict=True,
    ):
        own = HeadWeight(wanted.data, wanted.scale.to(dtype), wanted.scale_block)
        x = Draw(6).normal(3, heads, wanted.data.shape[2]).bfloat16()
        for weight in (given, own):
            assert weight.scale.dtype == torch.float32
            assert_equal("dequantised", weight.dequantize(), wanted.dequantize())
            assert_equal("product", project_heads(x, weight), project_heads(x, wanted))


QUANTISED = {
    "e4m3, one scale": (torch.float8_e4m3fn, ()),
    "e4m3, one scale in a list": (torch.float8_e4m3fn, (1,)),
    "e4m3, a scale a row": (torch.float8_e4m3fn, ("rows", 1)),
    "e5m2, one scale": (torch.float8_e5m2, ()),
    "int8, one scale": (torch.int8, ()),
    "int8, a scale a row": (torch.int8, ("rows",)),
    "int8, scales of blocks": (torch.int8, None),
    "int8, scales of rows and groups": (torch.int8, ("rows", "groups")),
    "e4m3, scales of rows and groups": (torch.float8_e4m3fn, ("rows", "groups")),
}


@by_shape
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", QUANTISED.values(), ids=QUANTISED.keys())
def test_codes_of_every_quantisation(shape, kind, scale_dtype):
    heads, nope, value, latent = shape
    dtype, scale_shape = kind
    rows, draw = heads * (nope + value), Draw(7)
    codes = (draw.normal(rows, latent) * 30).clamp(-127, 127).to(dtype)
    if scale_shape is None:
        scale = draw.normal(-(-rows // 128), -(-latent // 128)).abs().to(scale_dtype)
        spread = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :latent]
    else:
        sizes = {"rows": rows, "groups": -(-latent // 128)}
        scale = draw.normal(*[sizes.get(size, size) for size in scale_shape])
        scale = (scale.abs() + 0.01).to(scale_dtype)
        spread = scale.view(-1, scale.shape[-1] if scale.dim() == 2 else 1)
        spread = spread.repeat_interleave(128 if spread.shape[1] > 1 else latent, 1)[:, :latent]
    exact = (codes.float() * spread.float()).view(heads, nope + value, latent)
    w_uk, w_uv = absorb_kv_b_proj(
        codes, scale, num_heads=heads, qk_nope_head_dim=nope, v_head_dim=value
    )
    parts = exact[:, :nope].transpose(1, 2).contiguous(), exact[:, nope:].contiguous()
    kept = dtype == torch.float8_e4m3fn and scale.numel() == 1
    for weight, wanted in zip((w_uk, w_uv), parts, strict=True):
        assert weight.data.dtype == (torch.float8_e4m3fn if kept else torch.bfloat16)
        wanted = wanted if kept else wanted.bfloat16().float()
        assert_equal("weight", weight.dequantize(), wanted)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("block", [(128, 128), (200, 130)], ids=str)
def test_one_scale_of_all_matrices(shape, block):
    codes = to_fp8(Draw(9).normal(3, 200, 130))
    weight = HeadWeight(codes, torch.full(shape, 0.5), block)
    counts = -(-200 // block[0]), -(-130 // block[1])
    wanted = HeadWeight(codes, torch.full((3, *counts), 0.5), block)
    assert weight.scale.is_contiguous()
    assert_equal("scale", weight.scale, wanted.scale)
    assert_equal("dequantised", weight.dequantize(), codes.float() / 2)
    x = Draw(6).normal(3, 3, 130).bfloat16()
    assert_equal("product", project_heads(x, weight), project_heads(x, wanted))


def test_projection_weight_of_linear_layers():
    codes = torch.randint(-127, 128, (2 * 256, 512), dtype=torch.int8)
    scale, zero = torch.rand(2 * 256, 1) + 0.5, torch.randint(-9, 9, (2 * 256, 1))

    def project(x):
        return x @ ((codes.int() - zero) * scale).to(x.dtype).T

    weight = projection_weight(project, 512)
    assert_equal("weight", weight.contiguous(), ((codes.int() - zero) * scale).bfloat16())
    w_uk, w_uv = absorb_kv_b_proj(weight, **SPLIT)
    assert_equal("w_uk", w_uk.data[1], weight[256:384].T.contiguous())
    assert_equal("w_uv", w_uv.data[0], weight[128:256].contiguous())


@pytest.mark.parametrize("block", [(128, 128), None], ids=str)
def test_products_with_quantised_weights(device, block):
    draw = Draw(8, device)
    data, x = draw.normal(3, 256, 192) * 192**-0.5, draw.normal(5, 3, 192).bfloat16()
    weight = HeadWeight.quantize(data, block)
    out = project_heads(x, weight)
    assert_close("out", out, reference.project_heads(x, weight), FP8_PROJECTION)
    assert_close("out", out, torch.einsum("hnk,thk->thn", data, x.float()), UNQUANTIZED_PROJECTION)


def test_layer_dims_come_from_its_tensors():
    layer = mla_layer(Draw(3), num_heads=3, latent=96, nope=40, rope=16, value=24)
    dims = layer.num_heads, layer.kv_lora_rank, layer.qk_nope_head_dim
    assert dims == (3, 96, 40)
    assert (layer.qk_rope_head_dim, layer.v_head_dim) == (16, 24)


WEIGHT, SCALE = fp8_matrix(2 * 256, 512)
SPLIT = {"num_heads": 2, "qk_nope_head_dim": 128, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: absorb_kv_b_proj(WEIGHT, **SPLIT), ValueError, "weight_scale_inv"),
        (lambda: absorb_kv_b_proj(WEIGHT.float(), SCALE, **SPLIT), ValueError, "weight_scale_inv"),
        (
            lambda: absorb_kv_b_proj(WEIGHT[:-1], SCALE, **SPLIT),
            ValueError,
            "weight must have shape",
        ),
        (lambda: absorb_kv_b_proj(WEIGHT[None], SCALE, **SPLIT), ValueError, "weight must have"),
        (
            lambda: absorb_kv_b_proj(WEIGHT, SCALE[:-1], **SPLIT),
            ValueError,
            r"weight_scale_inv must have shape \[4, 4\], \[512, 4\], \[512\] or \[\], "
            r"got \[3, 4\]; projection_weight",
        ),
        (lambda: absorb_kv_b_proj([[1.0]], **SPLIT), TypeError, "weight must be a Tensor"),
        (
            lambda: absorb_kv_b_proj(WEIGHT, SCALE.tolist(), **SPLIT),
            TypeError,
            "weight_scale_inv must be a Tensor",
        ),
        (
            lambda: absorb_kv_b_proj(WEIGHT.view(torch.int8), **SPLIT),
            ValueError,
            "weight_scale_inv must be given",
        ),
        (
            lambda: absorb_kv_b_proj(WEIGHT.view(torch.uint8), SCALE, **SPLIT),
            TypeError,
            "weight must have a float dtype or int8, got torch.uint8; projection_weight",
        ),
        (
            lambda: absorb_kv_b_proj(WEIGHT, SCALE.int(), **SPLIT),
            TypeError,
            "weight_scale_inv must have a float dtype, got torch.int32",
        ),
        (lambda: HeadWeight.quantize([[[1.0]]]), TypeError, "quantize: data must be a Tensor"),
        (lambda: HeadWeight.quantize(torch.ones(2, 3)), ValueError, "data must have shape"),
        (
            lambda: HeadWeight.quantize(to_fp8(torch.ones(2, 3, 4))),
            TypeError,
            "data must be bfloat16, float16 or float32",
        ),
        (
            lambda: HeadWeight.quantize(torch.ones(2, 3, 4), (0, 4)),
            ValueError,
            r"scale_block\[0\] must be at least 1, got 0",
        ),
        (
            lambda: projection_weight(lambda x: (x, None), 4),
            TypeError,
            "project must return a tensor, got tuple",
        ),
        (
            lambda: projection_weight(lambda x: x[:2], 4),
            ValueError,
            r"project must return \[4, N\], got \[2, 4\]",
        ),
        (lambda: HeadWeight([[[1.0]]]), TypeError, "HeadWeight: data must be a Tensor"),
        (
            lambda: HeadWeight(to_fp8(torch.ones(2, 3, 4)), [[[1.0]]]),
            TypeError,
            "HeadWeight: scale must be a Tensor",
        ),
        (lambda: HeadWeight(torch.ones(2, 3).bfloat16()), ValueError, "data must have shape"),
        (lambda: HeadWeight(torch.ones(2, 3, 4)), TypeError, "data must be"),
        (lambda: HeadWeight(to_fp8(torch.ones(2, 3, 4))), ValueError, "scale must be given"),
        (
            lambda: HeadWeight(torch.ones(2, 3, 4).bfloat16(), torch.ones(2, 1, 1)),
            ValueError,
            "scale must be given",
        ),
        (
            lambda: HeadWeight(to_fp8(torch.ones(2, 3, 4)), torch.ones(2, 1, 1).double()),
            TypeError,
            "scale must be float32",
        ),
        (
            lambda: HeadWeight(to_fp8(torch.ones(2, 300, 4)), torch.ones(2, 2, 1)),
            ValueError,
            "scale must have shape",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()

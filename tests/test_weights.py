import pytest
import torch

from sparsemla import HeadWeight, absorb_kv_b_proj, dequantize_blocks
from sparsemla.formats import to_fp8
from sparsemla.testing.cases import Draw, mla_layer
from sparsemla.testing.compare import assert_equal

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


def test_scale_blocks_are_as_coarse_as_the_borders_allow():
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


def test_dims_of_a_layer_are_those_of_its_tensors():
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
            "weight_scale_inv must",
        ),
        (lambda: absorb_kv_b_proj([[1.0]], **SPLIT), TypeError, "weight must be a Tensor"),
        (
            lambda: absorb_kv_b_proj(WEIGHT, SCALE.tolist(), **SPLIT),
            TypeError,
            "weight_scale_inv must be a Tensor",
        ),
        (
            lambda: absorb_kv_b_proj(WEIGHT.view(torch.int8), **SPLIT),
            TypeError,
            "weight must have a float dtype",
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

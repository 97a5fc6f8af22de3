"""Calls that Hopper's projection takes, and the order of its outputs; no GPU is needed."""

import pytest
import torch

import sparsemla
from sparsemla import HeadWeight, project_heads


def weight(outputs, inputs, scale_block=(128, 128)):
    scale = torch.ones(2, -(-outputs // scale_block[0]), -(-inputs // scale_block[1]))
    return HeadWeight(torch.zeros(2, outputs, inputs).to(torch.float8_e4m3fn), scale, scale_block)


def wide(inputs, tokens=2049, heads=2):
    return torch.zeros(tokens, heads, 576, dtype=torch.bfloat16)[..., :inputs]


def parts(tokens):
    x = torch.zeros(2, tokens, 2, 128)
    return {"x": x, "weight": weight(512, 128), "lses": torch.zeros(2, tokens, 2)}


def explained(x, weight, **options):
    (choice,) = sparsemla.explain(project_heads, x, weight, gpu="sm_90", **options).choices
    return choice


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(512, 128), (128, 512), (256, 512), (128, 256), (384, 128)]
)
def test_calls_that_the_kernel_takes(outputs, inputs):
    assert explained(wide(inputs), weight(outputs, inputs)).kernel == "sm90.blocks"
    one = wide(inputs)[:, :1].expand(-1, 2, -1)
    assert explained(one, weight(outputs, inputs, (256, 128))).kernel == "sm90.blocks"


def test_many_parts_are_merged_for_the_kernel():
    assert explained(**parts(4097)).kernel == "sm90.blocks"
    # The kernel reads merged vectors, whose strides are not those of the parts.
    case = parts(4097)
    case["x"] = torch.zeros(2, 4097, 2, 129)[..., :128]
    assert explained(**case).kernel == "sm90.blocks"


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ({"x": wide(128, 2048)}, "takes more than 4096 tokens times heads, got 4096"),
        (parts(4096), "takes more than 8192 tokens times heads, got 8192"),
        ({"batch_invariant": True}, "needs batch_invariant=False"),
        ({"weight": weight(512, 128, (64, 128))}, "got blocks of 64 x 128"),
        ({"weight": weight(512, 128, (128, 64))}, "got blocks of 128 x 64"),
        (
            {"weight": HeadWeight(torch.zeros(2, 512, 128, dtype=torch.bfloat16))},
            "needs e4m3 weights, got torch.bfloat16",
        ),
        ({"x": wide(192), "weight": weight(512, 192)}, "outputs and inputs, got 512 and 192"),
        ({"x": wide(512), "weight": weight(100, 512)}, "outputs and inputs, got 100 and 512"),
        ({"weight": weight(0, 128)}, "outputs and inputs, got 0 and 128"),
        (
            {"x": torch.zeros(2049, 2, 640).bfloat16(), "weight": weight(128, 640)},
            "takes up to 512 inputs, which fit shared memory, got 640",
        ),
        ({"x": torch.zeros(2049, 2, 516).bfloat16()[..., :128]}, "multiples of 16 bytes"),
        ({"x": torch.zeros(2049, 2, 576).bfloat16()[..., 4:132]}, "multiples of 16 bytes"),
        (
            {"weight": HeadWeight(weight(512, 136).data[..., :128], torch.ones(2, 4, 1))},
            "multiples of 16 bytes",
        ),
    ],
    ids=[
        "few",
        "few parts",
        "invariant",
        "rows",
        "block",
        "bfloat16",
        "inputs",
        "outputs",
        "empty",
        "large",
        "stride",
        "start",
        "weight",
    ],
)
def test_calls_that_the_kernel_refuses(case, reason):
    choice = explained(**{"x": wide(128), "weight": weight(512, 128)} | case)
    assert choice.kernel == "triton"
    assert reason in dict(choice.refusals)["sm90.blocks"]


def test_outputs_are_stored_in_order():
    """``_store`` undoes the permutation of the weights' rows."""
    row = torch.arange(128)
    row = (row & 0x61) | ((row & 0x18) >> 2) | ((row & 0x06) << 2)
    stored = row.reshape(4, 4, 4, 2).permute(0, 2, 1, 3).reshape(128)
    assert torch.equal(stored, torch.arange(128))

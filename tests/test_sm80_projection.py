"""Calls that the projections with Ampere's instructions take; no GPU is needed."""

import pytest
import torch

import sparsemla
from sparsemla import HeadWeight, project_groups, project_heads
from test_sm90_projection import weight, wide


def values(outputs, inputs):
    return HeadWeight(torch.zeros(2, outputs, inputs, dtype=torch.bfloat16))


def explained(op, x, weight, gpu="sm_80", **options):
    (choice,) = sparsemla.explain(op, x, weight, gpu=gpu, **options).choices
    return choice


@pytest.mark.parametrize("gpu", ["sm_80", "sm_86", "sm_89"])
@pytest.mark.parametrize("tokens", [1, 4096])
@pytest.mark.parametrize("make", [weight, values])
@pytest.mark.parametrize(("outputs", "inputs"), [(512, 128), (128, 512), (256, 256)])
def test_calls_that_the_kernel_takes(outputs, inputs, make, tokens, gpu):
    choice = explained(project_heads, wide(inputs, tokens), make(outputs, inputs), gpu)
    assert choice.kernel == "sm80"


def test_many_tokens_stay_where_results_are_invariant_or_codes_are_converted():
    x = wide(512, 4097)
    assert explained(project_heads, x, weight(128, 512), batch_invariant=True).kernel == "sm80"
    assert explained(project_heads, wide(128, 4097), weight(512, 128)).kernel == "sm80"


@pytest.mark.parametrize(
    ("x", "weight", "gpu", "reason"),
    [
        (wide(512, 4097), weight(128, 512), "sm_80", "takes up to 8192 tokens times heads"),
        (wide(128, 4097), weight(512, 128), "sm_89", "takes up to 8192 tokens times heads"),
        (wide(128, 4097), values(512, 128), "sm_80", "takes up to 8192 tokens times heads"),
        (wide(128, 1), weight(512, 128), "sm_120", "needs a GPU before sm_90"),
        (wide(96, 1), values(512, 96), "sm_80", "outputs and 64 inputs, got 512 and 96"),
        (wide(96, 1), weight(512, 96), "sm_80", "outputs and inputs, got 512 and 96"),
        (wide(128, 1)[..., 4:], values(512, 64), "sm_80", "multiples of 16 bytes"),
        (torch.zeros(1, 2, 640).bfloat16(), values(128, 640), "sm_80", "up to 512 inputs, got 640"),
    ],
    ids=["many", "native", "bfloat16", "overlap", "width", "step", "address", "inputs"],
)
def test_calls_that_the_kernel_refuses(x, weight, gpu, reason):
    x = x[..., : weight.data.shape[2]]
    choice = explained(project_heads, x, weight, gpu)
    assert choice.kernel == "triton"
    assert reason in dict(choice.refusals)["sm80"]


@pytest.mark.parametrize(
    ("tokens", "gpu", "kernel"),
    [
        (16, "sm_89", "sm80"),
        (17, "sm_89", "triton"),
        (17, "sm_80", "sm80"),
        (1, "sm_120", "triton"),
    ],
)
def test_groups(tokens, gpu, kernel):
    assert explained(project_groups, wide(512, tokens), weight(128, 512), gpu).kernel == kernel


@pytest.mark.parametrize("make", [weight, values])
def test_invariant_results_add_steps_in_one_order(make):
    sm80 = pytest.importorskip("sparsemla.kernels.projection.sm80")
    orders = {
        (tiling.step, tiling.split)
        for tokens in (1, 8, 9, 33, 4096)
        for tiling in [sm80.tiling_of_heads(tokens, make(128, 512), True, 108)]
    }
    assert len(orders) == 1

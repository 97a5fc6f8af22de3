"""Problems that Hopper's projection of groups takes; no GPU is needed."""

import pytest
import torch

pytest.importorskip("triton")

from sparsemla import HeadWeight
from sparsemla.kernels.projection import sm90_groups


def weight(outputs, inputs, scale_block=(128, 128)):
    scale = torch.ones(2, -(-outputs // scale_block[0]), -(-inputs // scale_block[1]))
    return HeadWeight(torch.zeros(2, outputs, inputs).to(torch.float8_e4m3fn), scale, scale_block)


def sliced(outputs, rows, inputs, columns):
    whole = weight(rows, columns).data
    scale = torch.ones(2, outputs // 128, inputs // 128)
    return HeadWeight(whole[:, :outputs, :inputs], scale)


@pytest.mark.parametrize(
    "weight",
    [
        weight(1024, 4096),
        weight(128, 128),
        weight(256, 384, (256, 128)),
        sliced(128, 128, 256, 384),
    ],
    ids=["DeepSeek-V4", "one step", "block", "columns"],
)
def test_problems_that_the_kernel_takes(weight):
    assert sm90_groups._supports(weight)


@pytest.mark.parametrize(
    "weight",
    [
        HeadWeight(torch.zeros(2, 128, 256, dtype=torch.bfloat16)),
        weight(128, 256, (64, 128)),
        weight(128, 256, (128, 64)),
        weight(192, 256),
        weight(128, 192),
        sliced(128, 256, 256, 256),
        sliced(128, 128, 256, 264),
    ],
    ids=["bfloat16", "rows", "block", "outputs", "inputs", "groups apart", "stride"],
)
def test_problems_that_the_kernel_refuses(weight):
    assert not sm90_groups._supports(weight)

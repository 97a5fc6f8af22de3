"""Problems that Hopper's projection takes, and the order of its outputs; no GPU is needed."""

import pytest
import torch

pytest.importorskip("triton")

from sparsemla import HeadWeight
from sparsemla.kernels.projection import sm90


def weight(outputs, inputs, scale_block=(128, 128)):
    scale = torch.ones(2, -(-outputs // scale_block[0]), -(-inputs // scale_block[1]))
    return HeadWeight(torch.zeros(2, outputs, inputs).to(torch.float8_e4m3fn), scale, scale_block)


def wide(inputs):
    return torch.zeros(5, 2, 576, dtype=torch.bfloat16)[..., :inputs]


@pytest.mark.parametrize(
    ("outputs", "inputs"), [(512, 128), (128, 512), (256, 512), (128, 256), (384, 128)]
)
def test_problems_that_the_kernel_takes(outputs, inputs):
    assert sm90._supports(wide(inputs), weight(outputs, inputs))
    one = wide(inputs)[:, :1].expand(-1, 2, -1)
    assert sm90._supports(one, weight(outputs, inputs, (256, 128)))


@pytest.mark.parametrize(
    ("x", "weight"),
    [
        (wide(128), weight(512, 128, (64, 128))),
        (wide(128), weight(512, 128, (128, 64))),
        (wide(128), HeadWeight(torch.zeros(2, 512, 128, dtype=torch.bfloat16))),
        (wide(192), weight(512, 192)),
        (wide(512), weight(100, 512)),
        (torch.zeros(5, 2, 640, dtype=torch.bfloat16), weight(128, 640)),
        (torch.zeros(5, 2, 516, dtype=torch.bfloat16)[..., :512], weight(128, 512)),
        (torch.zeros(5, 2, 576, dtype=torch.bfloat16)[..., 4:516], weight(128, 512)),
    ],
    ids=["rows", "block", "bfloat16", "inputs", "outputs", "large", "stride", "start"],
)
def test_problems_that_the_kernel_refuses(x, weight):
    assert not sm90._supports(x, weight)


def test_outputs_are_stored_in_order():
    """``_store`` undoes the permutation of the weights' rows."""
    row = torch.arange(128)
    row = (row & 0x61) | ((row & 0x18) >> 2) | ((row & 0x06) << 2)
    stored = row.reshape(4, 4, 4, 2).permute(0, 2, 1, 3).reshape(128)
    assert torch.equal(stored, torch.arange(128))

"""Calls and tiles of Hopper's projection of groups; no GPU is needed."""

import pytest
import torch

pytest.importorskip("triton")

import sparsemla
from sparsemla import HeadWeight, reference
from sparsemla.kernels.projection import sm90_groups
from sparsemla_lab.testing.cases import Draw, project_groups_case
from sparsemla_lab.testing.compare import FP8_PROJECTION, assert_close, assert_equal
from sparsemla_lab.testing.interpreter import acting_as


def weight(outputs, inputs, scale_block=(128, 128)):
    scale = torch.ones(2, -(-outputs // scale_block[0]), -(-inputs // scale_block[1]))
    return HeadWeight(torch.zeros(2, outputs, inputs).to(torch.float8_e4m3fn), scale, scale_block)


def sliced(outputs, rows, inputs, columns):
    whole = weight(rows, columns).data
    scale = torch.ones(2, outputs // 128, inputs // 128)
    return HeadWeight(whole[:, :outputs, :inputs], scale)


def explained(weight):
    x = torch.zeros(5, 2, weight.data.shape[2], dtype=torch.bfloat16)
    (choice,) = sparsemla.explain(sparsemla.project_groups, x, weight, gpu="sm_90").choices
    return choice


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
def test_calls_that_the_kernel_takes(weight):
    assert explained(weight).kernel == "sm90"


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (HeadWeight(torch.zeros(2, 128, 256, dtype=torch.bfloat16)), "needs e4m3 weights"),
        (weight(128, 256, (64, 128)), "got blocks of 64 x 128"),
        (weight(128, 256, (128, 64)), "got blocks of 128 x 64"),
        (weight(192, 256), "outputs and inputs, got 192 and 256"),
        (weight(128, 192), "outputs and inputs, got 128 and 192"),
        (sliced(128, 256, 256, 256), "at the distance of a matrix"),
        (sliced(128, 128, 256, 264), "multiples of 16 bytes"),
    ],
    ids=["bfloat16", "rows", "block", "outputs", "inputs", "groups apart", "stride"],
)
def test_calls_that_the_kernel_refuses(weight, reason):
    choice = explained(weight)
    assert choice.kernel == "triton"
    assert reason in dict(choice.refusals)["sm90"]


@pytest.mark.parametrize(
    ("num_tokens", "num_groups", "tiles"),
    [
        (1, 8, (64, 8)),
        (33, 8, (64, 64)),
        (65, 8, (64, 128)),
        (128, 8, (64, 128)),
        (128, 16, (128, 128)),
        (256, 8, (128, 128)),
        (512, 8, (128, 256)),
        (1024, 1, (64, 128)),
        (4096, 8, (128, 256)),
    ],
)
def test_tiles_keep_multiprocessors_of_an_h200_busy(num_tokens, num_groups, tiles):
    assert sm90_groups._tiles_of(num_tokens, num_groups, 1024, 132) == tiles


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_results_do_not_depend_on_tiles(monkeypatch):
    case = project_groups_case(
        Draw(0), num_tokens=140, num_heads=2, num_groups=1, dim=256, rows=128, block=(128, 128)
    )
    results = []
    for tiles in ((64, 128), (128, 128), (128, 256)):
        monkeypatch.setattr(sm90_groups, "_tiles_of", lambda *_, t=tiles: sm90_groups.Tiles(*t))
        with acting_as("sm_90"):
            results.append(sparsemla.project_groups(**case))
    assert_close("out", results[0], reference.project_groups(**case), FP8_PROJECTION)
    for result in results[1:]:
        assert_equal("out", result, results[0])


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_multiprocessors_share_the_steps_of_few_tiles(monkeypatch):
    monkeypatch.setattr(sm90_groups, "num_multiprocessors", lambda _: 16)
    case = project_groups_case(
        Draw(1), num_tokens=70, num_heads=4, num_groups=1, dim=256, rows=128, block=(128, 128)
    )
    with acting_as("sm_90"):
        out = sparsemla.project_groups(**case)
    assert_close("out", out, reference.project_groups(**case), FP8_PROJECTION)

"""The portable decode kernels, where test_tiers.py has no case."""

import copy

import pytest
import torch

from sparsemla import (
    BF16_576,
    FP8_DS_MLA,
    branch_workspace_size,
    decode_branch,
    decode_workspace_size,
    dispatch,
    reference,
)
from sparsemla_lab.testing.cases import (
    Draw,
    branch_case,
    dense_decode_case,
    mla_layer,
    sparse_decode_case,
)
from sparsemla_lab.testing.compare import TOLERANCES, assert_close
from sparsemla_lab.testing.poison import poisoned_empty
from sparsemla_lab.verify.matrix import Case, build
from test_tiers import DEVICE, check

pytest.importorskip("triton")
from sparsemla.kernels.attention import schedule
from sparsemla.kernels.attention.arguments import Splits
from sparsemla.kernels.attention.triton import decode
from sparsemla.kernels.attention.triton.tiles import Tile

# In the interpreter numpy warns of log2(0) and of exp2 overflowing, which mean -inf and inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize(
    ("op", "make"),
    [
        (
            "sparse_decode",
            build(
                sparse_decode_case,
                format=FP8_DS_MLA,
                num_heads=2,
                topk=100,
                with_lengths=True,
                extra=(BF16_576, 90, 40, 2),
                num_splits=3,
            ),
        ),
        (
            "dense_decode",
            build(
                dense_decode_case,
                format=FP8_DS_MLA,
                seq_lens=(70, 0, 3),
                query_len=2,
                num_heads=3,
                num_splits=3,
            ),
        ),
    ],
    ids=["sparse_decode", "dense_decode"],
)
def test_tile_of_warpgroup_products(op, make, monkeypatch):
    monkeypatch.setattr(decode, "choose_tile", lambda *_, **__: Tile(64, 32, 8, 3, branch=True))
    check("triton", DEVICE, op, Case("", make))


@pytest.mark.parametrize("topk", [None, 20], ids=["dense", "sparse"])
@pytest.mark.parametrize("own_workspace", [False, True])
def test_branch_merges_splits_in_the_projection(monkeypatch, topk, own_workspace):
    draw = Draw(24, DEVICE)
    layer = mla_layer(draw, num_heads=3, with_sink=True)
    case = branch_case(draw, layer, query_lens=[1, 2], seq_lens=[90, 70], topk=topk)
    expected = reference.decode_branch(**copy.deepcopy(case))
    monkeypatch.setattr(schedule, "multiprocessors", lambda device: 1)
    workspace = None
    if own_workspace:
        columns = case["plan"].page_table.shape[1]
        size = branch_workspace_size(3, 3, num_splits=3, max_pages_per_request=columns)
        workspace = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    with poisoned_empty(), dispatch.only("triton"):
        out = decode_branch(**case, num_splits=3, workspace=workspace)
    assert_close("out", out, expected, TOLERANCES["decode_branch"][0])


def test_a_workspace_too_small_for_the_chosen_splits_is_refused():
    case = sparse_decode_case(Draw(25, DEVICE), format=FP8_DS_MLA, num_heads=3)
    q = case["q"]
    size = decode_workspace_size(*q.shape[:3], num_splits=3)
    workspace = torch.empty(size - 16, dtype=torch.uint8, device=DEVICE)
    out, lse = q.new_empty(*q.shape[:3], 512), q.new_empty(q.shape[:3], dtype=torch.float32)
    launch = dispatch.load("sparse_decode", "triton")
    with pytest.raises(ValueError, match=f"workspace must have at least {size} bytes for 3 splits"):
        launch(**case, splits=Splits(3), workspace=workspace, out=out, lse=lse)

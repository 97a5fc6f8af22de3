"""The portable prefill kernel with a tile that no GPU here has; test_tiers.py has the rest."""

import pytest
import torch

from sparsemla_lab.testing.cases import prefill_rows, sparse_prefill_case
from sparsemla_lab.verify.matrix import Case
from test_tiers import DEVICE, check

pytest.importorskip("triton")
from sparsemla.kernels.attention.triton import prefill
from sparsemla.kernels.attention.triton.tiles import Tile

# In the interpreter numpy warns of log2(0) and of exp2 overflowing, which mean -inf and inf.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.mark.parametrize("topk", [0, 33])
@pytest.mark.parametrize("extra_topk", [0, 20])
def test_tile_of_warpgroup_products_in_streams_that_may_be_empty(topk, extra_topk, monkeypatch):
    """It takes a step in each stream, even in an empty one."""
    monkeypatch.setattr(prefill, "choose_tile", lambda *_, **__: Tile(64, 32, 8, 3, branch=True))

    def make(draw):
        case = sparse_prefill_case(draw, num_tokens=2, num_heads=2, topk=topk, with_sink=True)
        return case | {
            "extra_cache": prefill_rows(draw, 40, 576),
            "extra_topk_indices": draw.integers(-2, 42, 2, extra_topk),
            "extra_topk_lengths": torch.tensor([0, 17], device=DEVICE),
        }

    check("triton", DEVICE, "sparse_prefill", Case("", make))

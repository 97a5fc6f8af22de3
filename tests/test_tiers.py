"""Every case of ``sparsemla verify`` on the CPU, and with the portable kernels.

These run in Triton's interpreter where there is no GPU. The kernels for Hopper run in
test_interpreter.py.
"""

import pytest
import torch

from sparsemla import dispatch
from sparsemla_lab.verify import run
from sparsemla_lab.verify.matrix import MATRIX

# In the interpreter numpy warns of log2(0), of exp2 overflowing and of maxima of NaN.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

SLOW = (  # in torch as well: thousands of tiles
    ("pool_windows", "128 requests"),
    ("indexer_scores", "5000 tokens"),
    ("indexer_scores_paged", "300 requests"),
    ("sparse_decode", "maxima that climb"),
    ("sparse_decode", "140 requests"),
    ("dense_decode", "maxima that climb"),
)
SLOW_TO_INTERPRET = (
    ("fused_rope_rmsnorm_quant", "128 heads, 70 tokens"),
    ("fused_indexer_rope_quant", "70 tokens"),
    ("prepare_index_queries", "70 tokens"),
    ("pool_windows", "a long step"),  # test_triton_pool.py has shorter ones
    ("pool_windows", "rows on pages"),  # the same
    ("pool_windows", "ratio 128, with rows"),
    ("visible_slots", "a long step"),
    ("indexer_topk", "ratio 4, a prefill"),
    ("merge_topk", "8 parts"),
    ("sparse_prefill", "exact scales, 64 heads"),
    ("sparse_prefill", "exact scales, 128 heads"),
    ("sparse_attention_backward", "a little workspace"),
    ("sparse_attention_backward", "topk 2048"),
    *(("sparse_attention_backward", f"{heads} heads") for heads in (1, 16, 17, 32, 64, 96, 128)),
    ("sparse_attention_backward", "float32, 576 dims"),
    ("sparse_decode", "lengths of each token"),
    ("sparse_decode", "heads, float32"),
    ("sparse_decode", "a few requests of 128 heads"),
    ("sparse_decode", "74 requests"),
    ("dense_decode", "heads, float32"),
    *(("project_heads", part) for part in ("64 parts", "70 tokens", "300 tokens", "GLM-5")),
    ("decode_branch", "mixed"),
    ("prefill_branch", "dense, "),
    ("dense_index_loss", "64 heads of 64"),
    ("dense_index_gradients", "64 heads of 64"),
)


def cases_without(slow):
    return [
        pytest.param(op, case, id=f"{op}-{case.name}")
        for op in MATRIX
        for case in run.chosen_cases(op, "cpu", quick=False)
        if not any(op == slow_op and part in case.name for slow_op, part in slow)
    ]


def check(tier, device, op, case):
    """Right on poisoned memory, the same bits in every run, and in a batch as alone."""
    interpreted = tier == "triton" and device == "cpu"  # one program after the other
    with dispatch.only(tier):
        outcome = run._run_case(op, case, device, reruns=0 if interpreted else 1)
    assert outcome.failures == ()
    if op != "index_loss":  # plain torch
        assert outcome.tiers == (tier,)


@pytest.mark.parametrize(("op", "case"), cases_without(SLOW))
def test_cpu(op, case):
    check("cpu", "cpu", op, case)


@pytest.mark.parametrize(("op", "case"), cases_without(SLOW + SLOW_TO_INTERPRET))
def test_portable_kernels(op, case):
    pytest.importorskip("triton")
    check("triton", DEVICE, op, case)

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

SLOW = (  # take several seconds on one of the two
    ("fused_rope_rmsnorm_quant", "128 heads, 70 tokens"),
    ("fused_indexer_rope_quant", "70 tokens"),
    ("prepare_index_queries", "70 tokens"),
    ("pool_windows", "128 requests"),
    ("pool_windows", "a long step"),  # test_triton_pool.py has shorter ones
    ("pool_windows", "rows on pages"),  # the same
    ("visible_slots", "a long step"),
    ("indexer_scores", "5000 tokens"),
    ("indexer_scores_paged", "300 requests"),
    ("indexer_topk", "ratio 4, a prefill"),
    ("merge_topk", "8 parts of 2048"),
    ("sparse_attention_backward", "a little workspace"),
    ("sparse_decode", "maxima that climb"),
    ("sparse_decode", "140 requests"),
    ("dense_decode", "maxima that climb"),
)

CASES = [
    pytest.param(op, case, id=f"{op}-{case.name}")
    for op in MATRIX
    for case in run.chosen_cases(op, "cpu", quick=False)
    if not any(op == slow and part in case.name for slow, part in SLOW)
]


def check(tier, device, op, case):
    """Right on poisoned memory, the same bits in every run, and in a batch as alone."""
    with dispatch.only(tier):
        outcome = run._run_case(op, case, device, reruns=1)
    assert outcome.failures == ()
    if op != "index_loss":  # plain torch
        assert outcome.tiers == (tier,)


@pytest.mark.parametrize(("op", "case"), CASES)
def test_cpu(op, case):
    check("cpu", "cpu", op, case)


@pytest.mark.parametrize(("op", "case"), CASES)
def test_portable_kernels(op, case):
    pytest.importorskip("triton")
    check("triton", DEVICE, op, case)

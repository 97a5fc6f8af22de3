"""The portable kernels of training, in the interpreter where there is no GPU."""

import math

import pytest
import torch

from sparsemla import dispatch, reference
from sparsemla_lab.testing.cases import Draw, sparse_attention_backward_case
from sparsemla_lab.testing.compare import (
    FLOAT32_GRADIENT,
    SPARSE_ATTENTION_GRADIENT,
    SPARSE_ATTENTION_SINK_GRADIENT,
    assert_close,
    assert_equal,
    gradient_sizes,
)
from sparsemla_lab.testing.poison import poisoned_empty

pytest.importorskip("triton")

import sparsemla.kernels.backward.triton as backward

# In the interpreter numpy warns of 0 times inf, where an entry is masked afterwards.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = {"num_tokens": 2, "num_heads": 3, "topk": 12, "num_rows": 20, "head_dim": 40}
ALL = {"num_tokens": 3, "num_heads": 3, "topk": 20, "num_rows": 30}
ALL = {"with_sink": True, "with_lengths": True, "share": 0.6}


def run(case, **options):
    """The kernel's gradients, on poisoned memory."""
    q, kv, sink = case["q"], case["kv"], case["attn_sink"]
    results = {
        "dq": torch.full(q.shape, math.nan, dtype=q.dtype, device=q.device),
        "dkv": torch.full(kv.shape, math.nan, dtype=kv.dtype, device=kv.device),
        "d_sink": q.new_empty(0) if sink is None else torch.full_like(sink, math.nan),
    }
    with poisoned_empty():
        dispatch.load("sparse_attention_backward", "triton")(**case, **options, **results)
    return results


def check(case, **options):
    """Compare with the definition."""
    got = run(case, **options)
    dq, dkv, d_sink = reference.sparse_attention_backward(**case)
    exact = case["q"].dtype == torch.float32
    tolerance = FLOAT32_GRADIENT if exact else SPARSE_ATTENTION_GRADIENT
    for name, wanted, sizes in zip(("dq", "dkv"), (dq, dkv), gradient_sizes(case), strict=True):
        assert_close(name, got[name], wanted, tolerance, sizes)
    if case["attn_sink"] is not None:
        assert_close("d_sink", got["d_sink"], d_sink, SPARSE_ATTENTION_SINK_GRADIENT)
    return got


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU takes its own tiles")
def test_tiles_of_hopper(monkeypatch):
    monkeypatch.setattr(backward, "is_hopper", lambda device: True)
    options = {"num_tokens": 1, "num_heads": 65, "topk": 130, "num_rows": 150}
    check(sparse_attention_backward_case(Draw(2, DEVICE), **SMALL | options))


def test_bits_do_not_depend_on_the_workspace():
    options = {"num_tokens": 5, "num_heads": 2, "topk": 6, "num_rows": 7, "head_dim": 20}
    case = sparse_attention_backward_case(Draw(3, DEVICE), **options)
    first = run(case)
    token = 6 * (2 * 2 * 2 + 20 * 2 + backward.ENTRY_BYTES)
    for limit in (2 * token, 1):
        for name, result in run(case | {"max_workspace_bytes": limit}).items():
            assert_equal(f"{name}, {limit} bytes", result, first[name])


def test_bits_of_shared_lists_do_not_depend_on_the_workspace():
    # In float32: few sums of bfloat16 terms depend on their order.
    options = {"num_tokens": 9, "num_heads": 2, "topk": 6, "num_rows": 7, "head_dim": 20}
    options |= {"list_tokens": 2, "dtype": torch.float32}
    case = sparse_attention_backward_case(Draw(8, DEVICE), **options)
    first = run(case)
    for name, result in run(case | {"max_workspace_bytes": 1}).items():
        assert_equal(name, result, first[name])


def test_terms_are_added_in_the_order_of_tokens_and_entries():
    """As float32 sums of the gradients of single entries, one after the other."""
    case = sparse_attention_backward_case(
        Draw(5, DEVICE), dtype=torch.float32, **SMALL | {"num_rows": 3, "topk": 8}
    )
    case["kv"].nan_to_num_(0.5)
    lists, total = case["topk_indices"], torch.zeros(3, 40, device=DEVICE)
    for token, entry in ((lists >= 0) & (lists < 3)).nonzero().tolist():
        index = lists[token, entry]
        alone = torch.full_like(lists, -1)
        alone[token, entry] = index
        total[index] += run(case | {"topk_indices": alone})["dkv"][index]
    assert_equal("dkv", run(case)["dkv"], total)

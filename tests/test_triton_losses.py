"""The portable kernels of the indexer's training against the reference."""

import pytest
import torch

from sparsemla import dispatch
from sparsemla_lab.testing import cases
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import (
    FLOAT32_INDEX_GRADIENT,
    INDEX_LOSS,
    TOLERANCES,
    assert_equal,
    assert_result,
    run_reference,
    sizes_of,
)
from sparsemla_lab.testing.poison import poisoned_empty

pytest.importorskip("triton")

import sparsemla.kernels.losses.triton as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT32 = {"dtype": torch.float32}
PRECISE = {
    "selected_scores_backward": (FLOAT32_INDEX_GRADIENT,) * 3,
    "dense_index_gradients": (INDEX_LOSS, *(FLOAT32_INDEX_GRADIENT,) * 3),
}


def shapes(op, case):
    """The results of an op, uninitialised."""
    if op in ("selected_scores", "attention_target"):
        lists = case["topk_indices"].shape
        return {"out": torch.empty(lists, device=DEVICE)}
    grads = {f"d{name}": torch.empty_like(case[name]) for name in ("index_q", "weights", "index_k")}
    grads = {name: x.contiguous() for name, x in grads.items()}
    if op == "selected_scores_backward":
        return grads
    return {"loss": torch.empty((), device=DEVICE)} | (grads if "gradients" in op else {})


def run(op, case):
    with poisoned_empty():
        results = shapes(op, case)
        dispatch.load(op, "triton")(**case, **results)
    return results


def check_kernel(op, case):
    """Run the kernels and the reference; returns the results."""
    results = run(op, case)
    tolerances = TOLERANCES[op]
    if case["index_q" if "index_q" in case else "q"].dtype == torch.float32:
        tolerances = PRECISE.get(op, tolerances)
    expected, sizes = run_reference(op, case), sizes_of(op, case)
    for index, (name, got) in enumerate(results.items()):
        assert_result(f"{op}, {name}", got, expected[index], tolerances[index], sizes.get(index))
    return results


LISTS = [
    {"with_lengths": True, "num_tokens": 2},
    {"num_heads": 70, "head_dim": 40, "num_tokens": 1, "strided": True},
    {"num_heads": 3, "dtype": torch.float32, "num_tokens": 2, "index_dtype": torch.int64},
    {"num_heads": 3, "dtype": torch.float16, "num_tokens": 2, "topk": 20},
    {"num_rows": 1, "topk": 3, "head_dim": 16},
    {"share": 0.0, "num_tokens": 2, "topk": 5},
    {"weight_dtype": torch.bfloat16, "num_tokens": 1, "head_dim": 16},
]


@pytest.mark.parametrize("options", LISTS, ids=str)
def test_selected_scores(options):
    check_kernel("selected_scores", cases.selected_scores_case(Draw(0, DEVICE), **options))


@pytest.mark.parametrize("options", LISTS[:-1], ids=str)
def test_selected_scores_backward(options):
    case = cases.selected_scores_backward_case(Draw(1, DEVICE), **options)
    results = check_kernel("selected_scores_backward", case)
    for name, got in run("selected_scores_backward", case).items():
        assert_equal(f"{name} again", got, results[name])


def test_shares_of_a_row_are_added_in_one_order(monkeypatch):
    """The bits of the sums do not depend on the workspace."""
    case = cases.selected_scores_backward_case(
        Draw(2, DEVICE), num_rows=9, num_tokens=3, topk=9, head_dim=16
    )
    whole = run("selected_scores_backward", case)
    monkeypatch.setattr(kernels, "LIST_BYTES", 1)
    for name, got in run("selected_scores_backward", case).items():
        assert_equal(name, got, whole[name])


@pytest.mark.parametrize(
    "options",
    [
        {"with_lengths": True, "num_tokens": 3, "with_sink": True, "num_heads": 20},
        {"num_heads": 70, "head_dim": 40, "num_tokens": 2, "normalize": False},
        {"num_heads": 3, "dtype": torch.float32, "num_tokens": 2, "strided": True},
        {"num_heads": 3, "dtype": torch.float16, "num_tokens": 2, "share": 0.0},
        {"num_heads": 0, "num_tokens": 2},
    ],
    ids=str,
)
def test_attention_target(options):
    check_kernel("attention_target", cases.attention_target_case(Draw(3, DEVICE), **options))


DENSE = [
    {"ranges": "causal", "num_tokens": 20, "num_rows": 80, "with_row_weights": True},
    {"num_heads": 2, "shared_keys": True, "head_dim": 72, "strided": True},
    {"num_heads": 2, "head_dim": 24, "num_tokens": 3, "num_rows": 20, "dtype": torch.float32},
    {"num_heads": 2, "head_dim": 24, "num_tokens": 3, "num_rows": 20, "dtype": torch.float16},
    {"num_heads": 1, "head_dim": 16, "num_tokens": 1, "num_rows": 1, "ranges": "causal"},
]


@pytest.mark.parametrize("options", DENSE, ids=str)
def test_dense_losses(options):
    case = cases.dense_index_loss_case(Draw(4, DEVICE), **options)
    results = check_kernel("dense_index_gradients", case)
    alone = run("dense_index_loss", case)
    assert_equal("the loss alone", alone["loss"], results["loss"])


def test_the_workspace_does_not_change_a_bit():
    options = {"num_tokens": 70, "num_rows": 70, "num_heads": 1, "head_dim": 16}
    case = cases.dense_index_loss_case(Draw(5, DEVICE), num_index_heads=2, **options)
    whole = run("dense_index_gradients", case)
    for name, got in run("dense_index_gradients", case | {"max_workspace_bytes": 1}).items():
        assert_equal(name, got, whole[name])

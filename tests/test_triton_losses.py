"""The portable kernels of the indexer's training, where test_tiers.py has no case."""

import pytest
import torch

from sparsemla import dispatch
from sparsemla_lab.testing import cases
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import (
    assert_equal,
)
from sparsemla_lab.testing.poison import poisoned_empty
from sparsemla_lab.verify.matrix import Case, build
from test_tiers import DEVICE, check

pytest.importorskip("triton")

import sparsemla.kernels.losses.triton as kernels


def shapes(op, case):
    """The results of an op, uninitialised."""
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


@pytest.mark.parametrize("op", ["selected_scores", "selected_scores_backward", "attention_target"])
def test_more_heads_than_a_block(op):
    options = {"num_heads": 70, "head_dim": 40, "num_tokens": 1, "strided": True}
    check("triton", DEVICE, op, Case("", build(getattr(cases, f"{op}_case"), **options)))


def test_weights_in_bfloat16():
    options = {"weight_dtype": torch.bfloat16, "num_tokens": 1, "head_dim": 16}
    make = build(cases.selected_scores_case, **options)
    check("triton", DEVICE, "selected_scores", Case("", make))


def test_a_target_of_no_heads():
    make = build(cases.attention_target_case, num_heads=0, num_tokens=2)
    check("triton", DEVICE, "attention_target", Case("", make))


@pytest.mark.parametrize(
    "options",
    [
        {"ranges": "causal", "num_tokens": 20, "num_rows": 80, "with_row_weights": True},
        {"num_heads": 2, "head_dim": 24, "num_tokens": 3, "num_rows": 20, "dtype": torch.float16},
    ],
    ids=str,
)
def test_the_loss_alone_has_the_same_bits(options):
    make = build(cases.dense_index_loss_case, **options)
    check("triton", DEVICE, "dense_index_gradients", Case("", make))
    case = make(Draw(4, DEVICE))
    both, alone = run("dense_index_gradients", case), run("dense_index_loss", case)
    assert_equal("the loss alone", alone["loss"], both["loss"])


def test_shares_of_a_row_are_added_in_one_order(monkeypatch):
    """The bits of the sums do not depend on the workspace."""
    case = cases.selected_scores_backward_case(
        Draw(2, DEVICE), num_rows=9, num_tokens=3, topk=9, head_dim=16
    )
    whole = run("selected_scores_backward", case)
    monkeypatch.setattr(kernels, "LIST_BYTES", 1)
    for name, got in run("selected_scores_backward", case).items():
        assert_equal(name, got, whole[name])


def test_the_workspace_does_not_change_a_bit():
    options = {"num_tokens": 70, "num_rows": 70, "num_heads": 1, "head_dim": 16}
    case = cases.dense_index_loss_case(Draw(5, DEVICE), num_index_heads=2, **options)
    whole = run("dense_index_gradients", case)
    for name, got in run("dense_index_gradients", case | {"max_workspace_bytes": 1}).items():
        assert_equal(name, got, whole[name])

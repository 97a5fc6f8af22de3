"""What trains the indexer, on the CPU and on a GPU, against definitions and other formulas."""

import math
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import sparsemla
from sparsemla import dispatch, reference
from sparsemla.kernels.losses import DENSE_INDEX_GRADIENTS
from sparsemla.kernels.losses.arguments import DenseIndexGradients
from sparsemla.ops import losses
from sparsemla.reference.losses import dense_distributions
from sparsemla_lab.testing import cases
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import (
    FLOAT32_INDEX_GRADIENT,
    INDEX_LOSS,
    TOLERANCES,
    assert_close,
    assert_equal,
    check_op,
    run_reference,
    sizes_of,
)

FLOAT32 = {"dtype": torch.float32}


@pytest.mark.parametrize("options", [{"num_tokens": 0}, {"topk": 0}], ids=str)
@pytest.mark.parametrize("op", ["selected_scores", "selected_scores_backward", "attention_target"])
def test_no_entries(device, op, options):
    check_op(op, getattr(cases, f"{op}_case")(Draw(0, device), **options))


def test_a_target_of_no_heads(device):
    check_op("attention_target", cases.attention_target_case(Draw(2, device), num_heads=0))


@pytest.mark.parametrize(
    "options",
    [
        {"num_index_heads": 20, "index_dim": 128},
        {"ranges": "causal", "num_tokens": 140, "num_rows": 270, "index_dim": 128},
        {"num_tokens": 0},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_dense_losses(device, options):
    case = cases.dense_index_loss_case(Draw(3, device), **options)
    (loss,) = check_op("dense_index_loss", case)
    assert_equal("loss", check_op("dense_index_gradients", case)[0], loss)


def test_a_token_whose_attention_has_no_mass_has_no_loss(device):
    case = cases.dense_index_loss_case(Draw(3, device))
    case["lse"][2] = torch.inf  # it and token 4 see rows
    (loss,) = check_op("dense_index_loss", case)
    found, dindex_q, dweights, _ = check_op("dense_index_gradients", case)
    assert_equal("loss", found, loss)
    assert not dindex_q[2].any()
    assert not dweights[2].any()
    assert dindex_q[4].any()


def rounded(x, bits):
    mantissa, exponent = torch.frexp(x)
    return torch.ldexp((mantissa * 2**bits).round(), exponent - bits)


def check_rounded(case, *, terms, sums):
    """Check gradients in bfloat16 with so many bits of their terms, and of a sum at any time."""
    names = (
        "q",
        "k",
        "lse",
        "index_q",
        "weights",
        "index_k",
        "softmax_scale",
        "row_starts",
        "row_ends",
    )
    scores, target = dense_distributions(**{name: case[name] for name in names})
    given = scores.softmax(-1).nan_to_num() - target
    index_q, index_k = case["index_q"].float(), case["index_k"].float().nan_to_num()
    positive = torch.einsum("thd,sd->ths", index_q, index_k) > 0
    b = rounded(given[:, None] * case["weights"][..., None] * positive, terms)
    dindex_q, dindex_k = torch.zeros_like(index_q), torch.zeros_like(index_k)
    for row in range(len(index_k)):
        dindex_q = rounded(dindex_q + b[..., row, None] * index_k[row], sums)
    for share, query in zip(b.flatten(0, 1), index_q.flatten(0, 1), strict=True):
        dindex_k = rounded(dindex_k + share[:, None] * query, sums)
    expected = run_reference("dense_index_gradients", case)
    sizes = sizes_of("dense_index_gradients", case)
    for index, got in ((1, dindex_q), (3, dindex_k)):
        tolerance = TOLERANCES["dense_index_gradients"][index]
        assert_close("gradient", got.bfloat16(), expected[index], tolerance, sizes[index])


@pytest.mark.parametrize("seed", range(3, 11))
def test_terms_may_be_bfloat16_and_sums_may_not(seed):
    check_rounded(cases.dense_index_loss_case(Draw(seed)), terms=8, sums=24)
    case = cases.dense_index_loss_case(Draw(seed), num_index_heads=8, index_dim=128)
    check_rounded(case, terms=8, sums=24)
    for wrong in ({"terms": 6, "sums": 24}, {"terms": 8, "sums": 8}):
        with pytest.raises(AssertionError, match="gradient"):
            check_rounded(case, **wrong)


@pytest.mark.parametrize("ranges", ["causal", "segments", "ragged"])
@pytest.mark.parametrize("max_workspace_bytes", [1, 2000, 1 << 20])
def test_rows_are_selected_globally(device, ranges, max_workspace_bytes):
    options = {"num_tokens": 20, "ranges": ranges, "max_workspace_bytes": max_workspace_bytes}
    check_op("select_rows", cases.select_rows_case(Draw(4, device), **options))


def test_packed_sequences_select_their_own_rows(device):
    """Selections of two sequences in one row are those of each sequence, moved to its place."""
    draw = Draw(5, device)
    index_q, index_k = (draw.normal(*shape).bfloat16() for shape in ((9, 4, 32), (9, 32)))
    weights, begin = draw.normal(9, 4), draw.tensor([0, 0, 0, 0, 4, 4, 4, 4, 4])
    ends = draw.tensor(range(1, 10))
    packed = sparsemla.select_rows(
        index_q, weights, index_k, topk=3, row_starts=begin, row_ends=ends
    )
    for part in (slice(0, 4), slice(4, 9)):
        starts = torch.zeros_like(begin[part])
        alone = sparsemla.select_rows(
            index_q[part],
            weights[part],
            index_k[part],
            topk=3,
            row_starts=starts,
            row_ends=ends[part] - part.start,
        )
        assert_equal("rows", packed[part], alone.where(alone < 0, alone + part.start))


def in_float64(case):
    """The case with its floating-point tensors in float64."""
    return {
        name: value.double()
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in case.items()
    }


def indexer(case):
    return [case[name].requires_grad_() for name in ("index_q", "weights", "index_k")]


def dense_loss(case, lists, p):
    """The loss by masked softmax over all rows and slots, without gathers: independent code."""
    index_q, weights, index_k = indexer(case)
    every = torch.einsum(
        "th,ths->ts", weights, torch.einsum("thd,sd->ths", index_q, index_k).relu()
    )
    total = 0
    for row, entries in enumerate(lists):
        some = [entry for entry in entries if entry is not None]
        if some:
            logs = torch.stack([every[row, entry] for entry in some]).log_softmax(0)
            mine = torch.stack([p[row, i] for i, e in enumerate(entries) if e is not None])
            total = total + torch.nn.functional.kl_div(logs, mine, reduction="sum")
    return total


def small_lists(**options):
    case = cases.selected_scores_case(
        Draw(6), num_heads=3, head_dim=5, num_rows=9, topk=8, dtype=torch.float32, **options
    )
    case["index_k"].nan_to_num_(0.25)
    valid = (case["topk_indices"] >= 0) & (case["topk_indices"] < 9)
    p = Draw(7).normal(*valid.shape).exp() * valid
    p[0, 2:] = 0
    p = p / p.sum(-1, keepdim=True).clamp_min(1e-9)
    lists = [
        [int(j) if ok else None for j, ok in zip(row, good, strict=True)]
        for row, good in zip(case["topk_indices"], valid, strict=True)
    ]
    case = in_float64(case)
    indexer(case)
    return case, lists, p.double()


def test_definitions_have_the_gradients_of_a_masked_softmax():
    case, lists, p = small_lists()
    loss = reference.index_loss(reference.selected_scores(**case), p)
    expected = dense_loss(case, lists, p)
    assert abs(loss - expected) < 1e-13
    inputs = indexer(case)
    found = torch.autograd.grad(loss, inputs)
    for got, wanted in zip(found, torch.autograd.grad(expected, inputs), strict=True):
        assert (got - wanted).abs().max() < 1e-13


def test_definitions_have_correct_gradients():
    case, _, p = small_lists(num_tokens=2)

    def loss(index_q, weights, index_k):
        changed = case | {"index_q": index_q, "weights": weights, "index_k": index_k}
        return reference.index_loss(reference.selected_scores(**changed), p)

    assert torch.autograd.gradcheck(loss, indexer(case))
    options = {"num_tokens": 3, "num_rows": 6, "num_heads": 2, "head_dim": 4, "index_dim": 5}
    dense = cases.dense_index_loss_case(Draw(8), dtype=torch.float32, **options)
    dense["k"].nan_to_num_(0.5), dense["index_k"].nan_to_num_(0.5)
    dense = in_float64(dense)

    def dense_loss(index_q, weights, index_k):
        return reference.dense_index_loss(
            **dense | {"index_q": index_q, "weights": weights, "index_k": index_k}
        )

    assert torch.autograd.gradcheck(dense_loss, indexer(dense))


def test_the_backward_definition_is_the_gradient():
    case, _, _ = small_lists()
    scores = reference.selected_scores(**case)
    given = Draw(9).normal(*scores.shape).double()
    expected = torch.autograd.grad(scores, indexer(case), given)
    found = reference.selected_scores_backward(given, **case)
    for got, wanted in zip(found, expected, strict=True):
        assert (got - wanted).abs().max() < 1e-13


def test_autograd_takes_the_backward_op(device):
    case = cases.selected_scores_backward_case(Draw(10, device), **FLOAT32)
    expected = sparsemla.selected_scores_backward(**case)
    given = case.pop("dscores")
    scores = sparsemla.selected_scores(**case | dict(zip(NAMES, indexer(case), strict=True)))
    for dscores in (given, given.T.contiguous().T):
        found = torch.autograd.grad(scores, indexer(case), dscores, retain_graph=True)
        for got, wanted in zip(found, expected, strict=True):
            assert_equal("gradient", got, wanted)


NAMES = ("index_q", "weights", "index_k")


def test_losses_of_lists(device):
    """The whole chain, in float32, against the definitions."""
    draw = Draw(11, device)
    attention = cases.attention_target_case(draw, dtype=torch.float32, with_sink=True)
    case = cases.selected_scores_case(draw, dtype=torch.float32)
    case["index_k"].nan_to_num_(1.0)
    case["weights"] *= 128**-0.5
    case["topk_indices"] = attention["topk_indices"]
    weights = draw.normal(5).abs()
    losses, grads = [], []
    for tier in (sparsemla, reference):
        scores = tier.selected_scores(**case | dict(zip(NAMES, indexer(case), strict=True)))
        target = tier.attention_target(**attention)
        losses.append(tier.index_loss(scores, target, row_weights=weights))
        grads.append(torch.autograd.grad(losses[-1], indexer(case)))
    assert_close("loss", *(loss.detach() for loss in losses), INDEX_LOSS)
    for got, wanted in zip(*grads, strict=True):
        assert_close("gradient", got, wanted, FLOAT32_INDEX_GRADIENT)


@pytest.mark.parametrize("with_row_weights", [False, True])
def test_index_loss(device, with_row_weights):
    case = cases.index_loss_case(Draw(12, device), with_row_weights=with_row_weights)
    check_op("index_loss", case)
    scores = case["scores"].requires_grad_()
    (got,) = torch.autograd.grad(sparsemla.index_loss(**case), [scores])
    (wanted,) = torch.autograd.grad(reference.index_loss(**in_float64(case)), [scores])
    assert_close("dscores", got, wanted, FLOAT32_INDEX_GRADIENT)
    assert got.sum(-1).abs().max() < 1e-6  # both are distributions, or 0
    assert (got[:2] == 0).all()  # no entry; no mass
    assert (got[case["scores"].isneginf()] == 0).all()


def test_index_loss_is_the_divergence():
    scores, target = Draw(13).normal(4, 9), Draw(14).normal(4, 9).softmax(-1)
    expected = torch.nn.functional.kl_div(scores.log_softmax(-1), target, reduction="sum")
    torch.testing.assert_close(sparsemla.index_loss(scores, target), expected)
    assert abs(sparsemla.index_loss(target.log(), target)) < 1e-6


@pytest.mark.parametrize("size", [1e4, -1e4, 1e30])
def test_index_loss_of_huge_scores(size):
    scores = torch.tensor([[0.0, size, -size, -math.inf]], requires_grad=True)
    target = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    loss = sparsemla.index_loss(scores, target)
    expected = abs(size) / 2 if size > 0 else -1.5 * size
    assert loss.item() == pytest.approx(expected + math.log(0.5), rel=1e-6)
    (grad,) = torch.autograd.grad(loss, [scores])
    best = int(size < 0) + 1
    expected = -target.clone()
    expected[0, best] += 1
    assert_equal("dscores", grad, expected + 0.0)


def test_tokens_with_one_key_have_no_loss(device):
    case = cases.dense_index_loss_case(
        Draw(15, device), num_tokens=1, num_rows=1, ranges="causal", dtype=torch.float32
    )
    for result in sparsemla.dense_index_gradients(**case):
        assert result.abs().max() < 1e-6


def test_dense_equals_sparse_over_all_rows(device):
    case = cases.dense_index_loss_case(
        Draw(16, device), num_tokens=12, num_rows=12, ranges="causal", shared_keys=True, **FLOAT32
    )
    rows = torch.arange(12, dtype=torch.int32, device=device).repeat(12, 1)
    lists = {"topk_indices": rows, "topk_lengths": case["row_ends"]}
    dense = sparsemla.dense_index_loss(**case | dict(zip(NAMES, indexer(case), strict=True)))
    target = sparsemla.attention_target(
        case["q"], case["k"], lse=case["lse"], softmax_scale=case["softmax_scale"], **lists
    )
    sparse = sparsemla.index_loss(sparsemla.selected_scores(*indexer(case), **lists), target)
    assert_close("loss", dense.detach(), sparse.detach(), INDEX_LOSS)
    grads = [torch.autograd.grad(3 * loss, indexer(case)) for loss in (dense, sparse)]
    for got, wanted in zip(*grads, strict=True):
        assert_close("gradient", got, wanted, FLOAT32_INDEX_GRADIENT)


def test_gradients_come_with_the_loss(device):
    """One pass gives the loss and its gradients, scaled by what comes from above."""
    case = cases.dense_index_loss_case(Draw(17, device), with_row_weights=True)
    loss, *expected = sparsemla.dense_index_gradients(**case)
    assert_equal("loss without gradients", sparsemla.dense_index_loss(**case), loss)
    found = sparsemla.dense_index_loss(**case | dict(zip(NAMES, indexer(case), strict=True)))
    assert_equal("loss", found.detach(), loss)
    for got, wanted in zip(torch.autograd.grad(-2 * found, indexer(case)), expected, strict=True):
        assert_equal("gradient", got, -2 * wanted)


def test_heads_of_several_ranks_add_up(device):
    case = cases.attention_target_case(Draw(18, device), num_heads=6, with_sink=True, **FLOAT32)
    whole = sparsemla.attention_target(**case)
    parts = [
        sparsemla.attention_target(
            **case
            | {"q": case["q"][:, heads], "lse": case["lse"][:, heads], "normalize": False}
            | {"attn_sink": case["attn_sink"][heads]}
        )
        for heads in (slice(0, 2), slice(2, 6))
    ]
    total = parts[0] + parts[1]
    mass = total.sum(-1, keepdim=True)
    assert_close(
        "target", total / mass.where(mass != 0, 1), whole, TOLERANCES["attention_target"][0]
    )


def test_a_sink_is_part_of_the_lse(device):
    case = cases.attention_target_case(Draw(19, device), with_sink=True)
    sink = case.pop("attn_sink").clamp(-9, 9)
    with_sink = sparsemla.attention_target(**case, attn_sink=sink)
    folded = sparsemla.attention_target(**case | {"lse": torch.logaddexp(case["lse"], sink)})
    assert_close("target", folded, with_sink, TOLERANCES["attention_target"][0])


def test_a_row_of_nan_reaches_its_users_only(device):
    case = cases.selected_scores_backward_case(Draw(20, device), num_rows=12, topk=5, **FLOAT32)
    named = int(case["topk_indices"][2].clamp(0, 11)[0])
    users = (case["topk_indices"] == named).any(1)
    assert users.any()
    assert not users.all()
    case["index_k"].nan_to_num_(0.5)[named] = math.nan
    dindex_q, _, dindex_k = sparsemla.selected_scores_backward(**case)
    assert_equal("tokens", dindex_q.isnan().any(-1).any(-1), users)
    assert dindex_k.isfinite().all()  # a score that is NaN has no slope
    del case["dscores"]
    listed = case["topk_indices"] == named
    assert_equal("scores", sparsemla.selected_scores(**case).isnan(), listed)


@pytest.mark.usefixtures("tier")
@pytest.mark.parametrize("num_heads", [3, 32])
def test_a_token_without_entries_may_be_nan(device, num_heads):
    case = cases.selected_scores_backward_case(Draw(30, device), num_heads=num_heads, head_dim=128)
    case["topk_indices"][1] = -1
    _, _, expected = sparsemla.selected_scores_backward(**case)
    for name in ("dscores", "index_q", "weights"):
        case[name][1] = math.nan
    assert_equal("dindex_k", sparsemla.selected_scores_backward(**case)[2], expected)


def test_attention_gets_no_gradient(device):
    lists = cases.attention_target_case(Draw(21, device), **FLOAT32)
    lists |= {name: lists[name].requires_grad_() for name in ("q", "kv", "lse")}
    assert not sparsemla.attention_target(**lists).requires_grad
    case = cases.dense_index_loss_case(Draw(22, device), with_row_weights=True)
    attention = [case[name].requires_grad_() for name in ("q", "k", "lse", "row_weights")]
    assert not sparsemla.dense_index_loss(**case).requires_grad
    sparsemla.dense_index_loss(**case | dict(zip(NAMES, indexer(case), strict=True))).backward()
    assert [x.grad for x in attention] == [None] * 4
    scores, target = (torch.zeros(1, 2, requires_grad=True) for _ in range(2))
    row_weights = torch.ones(1, requires_grad=True)
    sparsemla.index_loss(scores, target, row_weights=row_weights).backward()
    assert target.grad is None
    assert row_weights.grad is None
    assert_equal("no mass", scores.grad, torch.zeros(1, 2))


def test_kernels_get_gradients_without_strides(device):
    case = cases.selected_scores_case(Draw(23, device))
    case |= dict(zip(NAMES, indexer(case), strict=True))
    backward = losses._selected_scores_backward
    with mock.patch.object(losses, "_selected_scores_backward", wraps=backward) as call:
        scores = sparsemla.selected_scores(**case)
        dscores = torch.ones(scores.shape[::-1], device=device).T
        torch.autograd.grad(scores, indexer(case), dscores)
    (given,) = (each.args[0].dscores for each in call.call_args_list)
    assert_equal("dscores", given, dscores)
    assert (given.is_contiguous(), dscores.is_contiguous()) == (True, False)


def test_a_weight_of_zero_gives_zeros(device):
    """DDP waits for the gradient of every parameter, so it must not be None."""
    case = cases.dense_index_loss_case(Draw(27, device), with_row_weights=True)
    case["row_weights"] *= 0
    sparsemla.dense_index_loss(**case | dict(zip(NAMES, indexer(case), strict=True))).backward()
    assert [float(x.grad.abs().max()) for x in indexer(case)] == [0, 0, 0]
    scores = torch.zeros(2, 3, device=device, requires_grad=True)
    weights = torch.zeros(2, device=device)
    sparsemla.index_loss(scores, scores.detach() + 1 / 3, row_weights=weights).backward()
    assert_equal("dscores", scores.grad, torch.zeros_like(scores))


@pytest.fixture(params=["fastest", "triton"])
def tier(request):
    """Lets ops run on the fastest tier, or on Triton's, for which a CPU has the interpreter."""
    if request.param == "fastest":
        yield
        return
    pytest.importorskip("triton")
    with dispatch.only(request.param):
        yield


@pytest.mark.usefixtures("tier")
@pytest.mark.parametrize("index_dim", [32, 128])
def test_tokens_of_weight_zero_may_be_nan(device, index_dim):
    case = cases.dense_index_loss_case(Draw(28, device), index_dim=index_dim, ranges="causal")
    tokens = len(case["q"])
    weights = torch.linspace(0.5, 2, tokens, device=device)
    out = torch.tensor([0, 3], device=device)
    case["row_weights"] = weights.index_fill(0, out, 0)
    expected = sparsemla.dense_index_gradients(**case)
    by_token = ("q", "lse", "index_q", "weights", "row_starts", "row_ends", "row_weights")
    kept = {name: case[name][case["row_weights"] != 0] for name in by_token}
    alone = sparsemla.dense_index_gradients(**case | kept)
    assert_close("loss", expected[0], alone[0], TOLERANCES["dense_index_loss"][0])
    poisoned = {
        name: case[name].index_fill(0, out, math.nan) for name in ("q", "lse", "index_q", "weights")
    }
    results = sparsemla.dense_index_gradients(**case | poisoned)
    for name, got, wanted in zip(
        ("loss", "dindex_q", "dweights", "dindex_k"), results, expected, strict=True
    ):
        assert_equal(name, got, wanted)
    assert not results[1][out].any()
    assert not results[2][out].any()
    assert_equal("loss", sparsemla.dense_index_loss(**case | poisoned), expected[0])
    defined = [reference.dense_index_gradients(**one) for one in (case, case | poisoned)]
    for got, wanted in zip(*defined, strict=True):
        assert_equal("definition", got, wanted)


def test_scores_of_weight_zero_may_be_nan(device):
    case = cases.index_loss_case(Draw(19, device), with_row_weights=True)
    case["row_weights"][3] = 0
    kept = {name: value[case["row_weights"] != 0] for name, value in case.items()}
    for name in ("scores", "target"):
        case[name][3] = math.nan
    for op in (sparsemla.index_loss, reference.index_loss):
        scores = case["scores"].clone().requires_grad_()
        loss = op(**case | {"scores": scores})
        (grad,) = torch.autograd.grad(loss, scores)
        assert_close("loss", loss.detach(), op(**kept), INDEX_LOSS)
        assert not grad[case["row_weights"] == 0].any()
        assert grad.isfinite().all()
    case["row_weights"][3] = 1
    assert sparsemla.index_loss(**case).isnan()


@pytest.mark.usefixtures("tier")
def test_float16_gradients_are_multiplied_before_they_are_rounded(device):
    """As torch.amp.GradScaler does: a factor makes small gradients large enough for float16."""
    options = {"num_tokens": 20, "weight_dtype": torch.float16, "ranges": "causal"}
    case = cases.dense_index_loss_case(Draw(29, device), dtype=torch.float16, **options)
    case["row_weights"] = torch.full((20,), 1e-7, device=device)
    wide = case | {name: case[name].float() for name in ("q", "k", *NAMES)}
    expected = torch.autograd.grad(
        sparsemla.dense_index_loss(**wide | dict(zip(NAMES, indexer(wide), strict=True))),
        indexer(wide),
    )
    for scale in (2.0**16, 2.0**24):  # GradScaler's first scale is 2^16, infinite in float16
        loss = scale * sparsemla.dense_index_loss(
            **case | dict(zip(NAMES, indexer(case), strict=True))
        )
        grads = torch.autograd.grad(loss, indexer(case))
        for name, got, wanted in zip(NAMES, grads, expected, strict=True):
            assert got.dtype == torch.float16
            wanted = scale * wanted
            error = (got.float() - wanted).abs()
            assert (error <= 2**-9 * wanted.abs() + 2**-24 + 1e-2 * wanted.abs().mean()).all(), name


def test_second_derivatives_are_refused(device):
    case = cases.selected_scores_case(Draw(23, device), **FLOAT32)
    scores = sparsemla.selected_scores(**case | dict(zip(NAMES, indexer(case), strict=True)))
    finite = scores[~scores.isneginf()].square().sum()
    (dindex_q,) = torch.autograd.grad(finite, [case["index_q"]], create_graph=True)
    with pytest.raises(RuntimeError, match="selected_scores has no second derivative"):
        dindex_q.sum().backward()


class Dropped(torch.autograd.Function):
    """The identity, whose input gets no gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


@pytest.mark.parametrize("op", ["selected_scores", "dense_index_loss"])
def test_a_result_without_a_gradient_gives_zeros(device, op):
    case = getattr(cases, f"{op}_case")(Draw(31, device))
    result = getattr(sparsemla, op)(**case | dict(zip(NAMES, indexer(case), strict=True)))
    for grad in torch.autograd.grad(Dropped.apply(result).sum(), indexer(case)):
        assert not grad.any()


@pytest.mark.parametrize("op", ["selected_scores", "dense_index_loss"])
def test_a_graph_keeps_what_gradients_need(device, op):
    case = getattr(cases, f"{op}_case")(Draw(32, device))
    case |= dict(zip(NAMES, indexer(case), strict=True))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        result = getattr(sparsemla, op)(**case)
    assert result.requires_grad
    kept = {x.data_ptr() for x in kept}
    needed = {case[name].data_ptr() for name in NAMES}
    if op == "selected_scores":
        assert kept == needed | {case["topk_indices"].data_ptr()}
    else:
        assert needed < kept
        assert len(kept) == 6  # and its gradients, of the loss alone
        others = "q", "k", "lse", "row_starts", "row_ends"
        assert not kept & {case[name].data_ptr() for name in others}


def test_gradients_beside_the_loss_are_constants(device):
    case = cases.dense_index_loss_case(Draw(32, device))
    case |= dict(zip(NAMES, indexer(case), strict=True))
    loss, *grads = losses._dense_index_gradients(DenseIndexGradients(**case))
    assert loss.requires_grad
    assert not any(grad.requires_grad for grad in grads)


def shifted(rows):
    """The same rows, two bytes beyond a multiple of 16."""
    wide = torch.nn.functional.pad(rows, (1, 7))
    return wide[..., 1:-7]


def hopper_choice(op, case):
    """The choice of a kernel on a Hopper GPU."""
    (choice,) = sparsemla.explain(getattr(sparsemla, op), **case, gpu="sm_90").choices
    return choice


LISTED = {"num_heads": 64, "head_dim": 128}
TARGETED = {"num_heads": 16, "head_dim": 576}
DENSE = {"num_index_heads": 2, "index_dim": 128, "head_dim": 64}


@pytest.mark.parametrize(
    ("op", "options"),
    [
        ("selected_scores", LISTED),
        ("selected_scores", LISTED | {"num_heads": 17}),
        ("selected_scores_backward", LISTED),
        ("attention_target", TARGETED | {"num_heads": 128}),
        ("attention_target", TARGETED | {"head_dim": 512}),
        ("dense_index_loss", DENSE),
        ("dense_index_loss", DENSE | {"head_dim": 192, "shared_keys": True}),
        ("dense_index_gradients", DENSE),
    ],
    ids=str,
)
def test_calls_that_hopper_takes(op, options):
    case = getattr(cases, f"{op.replace('gradients', 'loss')}_case")(Draw(33), **options)
    assert hopper_choice(op, case).kernel == "sm90"


FLOAT16, ROWS = {"dtype": torch.float16}, "rows that start at multiples of 16 bytes"


@pytest.mark.parametrize(
    ("op", "options", "change", "reason"),
    [
        ("selected_scores", LISTED | FLOAT16, {}, "bfloat16 index queries, got torch.float16"),
        ("selected_scores", LISTED | {"num_heads": 16}, {}, "17 to 64 index heads of 128 dims"),
        ("selected_scores", LISTED | {"num_heads": 65}, {}, "got 65 of 128"),
        ("selected_scores", LISTED | {"head_dim": 64}, {}, "got 64 of 64"),
        ("selected_scores", LISTED, {"index_q": shifted}, f"index queries and keys with {ROWS}"),
        ("selected_scores", LISTED, {"index_k": shifted}, f"index queries and keys with {ROWS}"),
        ("selected_scores_backward", LISTED | FLOAT16, {}, "bfloat16 index queries"),
        ("attention_target", TARGETED | {"num_heads": 129}, {}, "at most 128 heads, got 129"),
        ("attention_target", TARGETED | FLOAT16, {}, "needs bfloat16 queries, got torch.float16"),
        ("attention_target", TARGETED | {"head_dim": 192}, {}, "512 or 576 dims with 512 of value"),
        ("attention_target", TARGETED, {"q": shifted}, f"queries and caches with {ROWS}"),
        ("attention_target", TARGETED, {"kv": shifted}, f"queries and caches with {ROWS}"),
        ("dense_index_loss", DENSE | FLOAT16, {}, "needs bfloat16 queries and index queries"),
        ("dense_index_loss", DENSE | {"index_dim": 64}, {}, "index heads of 128 dims, got 64"),
        ("dense_index_loss", DENSE | {"head_dim": 96}, {}, "a multiple of 64 dims, got 96"),
        ("dense_index_loss", DENSE | {"num_tokens": 0}, {}, "needs query tokens, rows, heads"),
        ("dense_index_loss", DENSE | {"num_heads": 0}, {}, "needs query tokens, rows, heads"),
        ("dense_index_loss", DENSE, {"q": shifted}, f"queries and keys with {ROWS}"),
        ("dense_index_loss", DENSE, {"k": shifted}, f"queries and keys with {ROWS}"),
        ("dense_index_loss", DENSE, {"index_q": shifted}, f"queries and keys with {ROWS}"),
        ("dense_index_loss", DENSE, {"index_k": shifted}, f"queries and keys with {ROWS}"),
        ("dense_index_gradients", DENSE | {"head_dim": 96}, {}, "a multiple of 64 dims, got 96"),
    ],
)
def test_calls_that_hopper_refuses(op, options, change, reason):
    case = getattr(cases, f"{op.replace('gradients', 'loss')}_case")(Draw(33), **options)
    choice = hopper_choice(op, case | {name: new(case[name]) for name, new in change.items()})
    assert choice.kernel == "triton"
    assert reason in dict(choice.refusals)["sm90"]


@pytest.mark.parametrize(
    ("wide", "got"),
    [
        (("index_q", "index_k"), "got torch.bfloat16 and torch.float32"),
        (("q", "k"), "got torch.float32 and torch.bfloat16"),
    ],
)
def test_mixed_dtypes_of_the_dense_loss_are_refused_by_hopper(wide, got):
    case = cases.dense_index_loss_case(Draw(33), **DENSE)
    choice = hopper_choice("dense_index_loss", case | {name: case[name].float() for name in wide})
    assert choice.kernel == "triton"
    assert f"needs bfloat16 queries and index queries, {got}" in str(choice)


class Largest(TorchDispatchMode):
    """Records the bytes of the largest tensor that a function returns."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        results = function(*args, **(kwargs or {}))
        for result in results if isinstance(results, (tuple, list)) else (results,):
            if isinstance(result, torch.Tensor):
                self.bytes = max(self.bytes, result.numel() * result.itemsize)
        return results


def test_the_dense_loss_is_bounded(device):
    """No tensor has the size of tokens times rows."""
    options = {"num_tokens": 512, "num_rows": 1024, "ranges": "causal", "num_heads": 2}
    case = cases.dense_index_loss_case(Draw(24, device), head_dim=16, **options)
    bound = 64 * 1024 * 8 * 2  # 64 tokens are always processed
    results = dict(
        zip(
            ("loss", "dindex_q", "dweights", "dindex_k"),
            sparsemla.dense_index_gradients(**case),
            strict=True,
        )
    )
    case["max_workspace_bytes"] = bound
    with Largest() as largest:
        dispatch.launch(DENSE_INDEX_GRADIENTS, DenseIndexGradients(**case, **results))
    assert largest.bytes <= bound < 512 * 1024 * 4


@pytest.mark.parametrize("index_dim", [32, 128])
def test_the_workspace_does_not_change_the_loss(device, index_dim):
    options = {"num_tokens": 200, "num_rows": 300, "num_index_heads": 2, "index_dim": index_dim}
    case = cases.dense_index_loss_case(Draw(25, device), **options)
    whole = sparsemla.dense_index_gradients(**case)
    parts = sparsemla.dense_index_gradients(**case | {"max_workspace_bytes": 1})
    tolerances = TOLERANCES["dense_index_gradients"]
    for got, wanted, tolerance in zip(parts, whole, tolerances, strict=True):
        if device == "cuda":
            assert_equal("result", got, wanted)
        else:
            assert_close("result", got, wanted, tolerance)


def test_selective_checkpoints_select_once(device, monkeypatch):
    from sparsemla.ops import losses

    calls = []
    scores_of = losses.indexer_scores
    monkeypatch.setattr(
        losses, "indexer_scores", lambda *args, **kw: calls.append(1) or scores_of(*args, **kw)
    )
    case = cases.select_rows_case(Draw(26, device), max_workspace_bytes=1 << 20)
    weights = case["weights"].requires_grad_()

    def layer(index_q, weights, index_k):
        rows = sparsemla.select_rows(**case | {"weights": weights})
        scores = sparsemla.selected_scores(index_q, weights, index_k, rows)
        return scores.where(rows >= 0, 0).sum()

    def keep(ctx, function, *args, **kwargs):
        saved = function == torch.ops.sparsemla.select_rows.default
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    arguments = case["index_q"], weights, case["index_k"]
    (expected,) = torch.autograd.grad(layer(*arguments), [weights])
    calls.clear()
    loss = checkpoint(
        layer,
        *arguments,
        use_reentrant=False,
        context_fn=lambda: create_selective_checkpoint_contexts(keep),
    )
    (found,) = torch.autograd.grad(loss, [weights])
    assert_equal("dweights", found, expected)
    assert len(calls) == 1

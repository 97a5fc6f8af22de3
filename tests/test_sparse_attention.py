"""Differentiable attention: its gradients, on the CPU and on a GPU, against dense attention."""

import importlib
import math
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from sparsemla import (
    dispatch,
    explain,
    reference,
    share_lists,
    sparse_attention,
    sparse_attention_backward,
    sparse_prefill,
)
from sparsemla_lab.testing import cases
from sparsemla_lab.testing.cases import Draw, sparse_attention_backward_case, sparse_attention_case
from sparsemla_lab.testing.compare import (
    FLOAT32_GRADIENT,
    SPARSE_ATTENTION_GRADIENT,
    SPARSE_ATTENTION_SINK_GRADIENT,
    assert_close,
    assert_equal,
    gradient_sizes,
)
from sparsemla_lab.testing.poison import poisoned_empty

SMALL = {"num_tokens": 4, "num_heads": 3, "topk": 20, "num_rows": 30}
TOLERANCE = {torch.float32: FLOAT32_GRADIENT}
FORWARD = ("q", "kv", "topk_indices", "softmax_scale", "topk_lengths", "attn_sink")
LISTS = ("topk_lengths", "list_tokens", "token_mask")
SHARED = {
    "lists of 2 tokens": {"list_tokens": 2, "with_sink": True},
    "lists of 4 tokens, shuffled": {"list_tokens": 4, "kind": "shuffled", "with_lengths": True},
    "lists of 8 tokens, few": {"list_tokens": 8, "share": 0.3, "with_sink": True},
    "lists of 9 tokens, whole": {"list_tokens": 9, "kind": "whole"},
}
SHARED = {name: {"num_tokens": 11} | options for name, options in SHARED.items()}
"""None divides the number of tokens."""


def in_float64(case):
    """The case in float64, without NaN: rows that nobody selects are large instead."""
    return {
        name: value.double().nan_to_num(1e3)
        if isinstance(value, torch.Tensor) and value.is_floating_point()
        else value
        for name, value in case.items()
    }


def dense_attention(q, kv, topk_indices, softmax_scale, topk_lengths=None, attn_sink=None):
    """Attention over all rows, each with its number of valid entries as a factor of its weight.

    It gathers and scatters nothing; a sink is one more column. Gradients come from torch.
    """
    entries = topk_indices.long()
    valid = (entries >= 0) & (entries < len(kv))
    if topk_lengths is not None:
        valid &= torch.arange(entries.shape[1]) < topk_lengths[:, None]
    rows = torch.arange(len(kv))
    counts = ((entries[..., None] == rows) & valid[..., None]).sum(1).double()  # [T, S]
    some = valid.any(1)
    logits = torch.einsum("thd,sd->ths", q, kv) * softmax_scale + counts.log()[:, None]
    logits = logits.where(some[:, None, None], 0)  # no NaN in the derivative of an empty row
    lse = logits.logsumexp(-1)
    values = kv[:, :512]
    if attn_sink is not None:
        sink = attn_sink.expand_as(lse)[..., None]
        logits = torch.cat([logits, sink], -1)
        values = torch.cat([values, torch.zeros_like(values[:1])])
    out = torch.einsum("ths,sv->thv", logits.softmax(-1), values)
    return out.where(some[:, None, None], 0), lse.where(some[:, None], -math.inf)


FEATURES = {
    "plain": {},
    "lengths": {"with_lengths": True},
    "sink": {"with_sink": True},
    "few valid entries": {"share": 0.3},
    "sink, lengths, few": {"with_sink": True, "with_lengths": True, "share": 0.6},
}


def finite_sinks(case):
    """The case with 600 for a sink of +inf, which a column of a softmax cannot be."""
    sink = case["attn_sink"]
    return case if sink is None else case | {"attn_sink": sink.clamp_max(600)}


def empty_first_row(case):
    case["topk_indices"][0] = -1
    return case


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("with_dlse", [False, True])
def test_the_definition_has_the_gradients_of_dense_attention(features, with_dlse):
    options = SMALL | FEATURES[features]
    case = in_float64(empty_first_row(sparse_attention_case(Draw(0), **options)))
    case = finite_sinks(case | {"softmax_scale": 0.05})
    leaves = [case[name] for name in ("q", "kv", "attn_sink") if case[name] is not None]
    for leaf in leaves:
        leaf.requires_grad_()
    out, lse = dense_attention(**case)
    draw = Draw(1)
    dout, dlse = draw.normal(*out.shape).double(), draw.normal(*lse.shape).double()
    terms = (out * dout).sum() + ((lse[1:] * dlse[1:]).sum() if with_dlse else 0)
    wanted = torch.autograd.grad(terms, leaves)
    with torch.no_grad():
        own_out, own_lse = reference.sparse_attention(**case)
        got = reference.sparse_attention_backward(
            dout, out=own_out, lse=own_lse, dlse=dlse if with_dlse else None, **case
        )
    assert own_out.dtype == own_lse.dtype == torch.float64
    torch.testing.assert_close(own_out, out, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(own_lse, lse, atol=1e-12, rtol=1e-12)
    for actual, expected in zip(got, wanted, strict=False):
        assert actual.dtype == torch.float64
        torch.testing.assert_close(actual, expected, atol=1e-11, rtol=1e-11)


class Definition(torch.autograd.Function):
    """The definition of the op and of its gradient as one function of torch's."""

    @staticmethod
    def forward(ctx, q, kv, attn_sink, topk_indices, lists):
        rest = {"softmax_scale": 0.3, "attn_sink": attn_sink} | lists
        out, lse = reference.sparse_attention(q, kv, topk_indices, **rest)
        ctx.save_for_backward(q, kv, topk_indices, out, lse)
        ctx.rest = rest
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        grads = reference.sparse_attention_backward(dout, *ctx.saved_tensors, dlse=dlse, **ctx.rest)
        return *grads, None, None


@pytest.mark.parametrize("features", [*FEATURES, *SHARED])
def test_gradients_are_those_of_finite_differences(features):
    options = SMALL | {"head_dim": 514} | (FEATURES | SHARED)[features]
    case = in_float64(sparse_attention_case(Draw(2), **options))
    leaves = [case["q"], case["kv"].clamp(-1, 1), case["attn_sink"]]
    leaves = [None if leaf is None else leaf.requires_grad_() for leaf in leaves]
    lists = {name: case[name] for name in LISTS if name in case}
    rest = case["topk_indices"], lists

    def attend(*x):
        out, lse = Definition.apply(*x, *rest)
        return (out, lse) if features == "plain" else out  # elsewhere an LSE may be -inf

    assert torch.autograd.gradcheck(attend, leaves, fast_mode=True)


def own_and_shared(case, list_tokens):
    """A case with a list for each token, and the same with lists that tokens share."""
    lists = share_lists(
        case["topk_indices"], list_tokens=list_tokens, topk_lengths=case["topk_lengths"]
    )
    return case, case | {"list_tokens": list_tokens, **lists._asdict()}


@pytest.mark.parametrize("list_tokens", [1, 2, 3, 8])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("ascending", [False, True])
def test_shared_lists_have_the_gradients_of_own_lists(device, features, list_tokens, ascending):
    options = SMALL | {"num_tokens": 10, "with_dlse": True} | FEATURES[features]
    case = sparse_attention_backward_case(Draw(23, device), **options)
    if ascending:
        if case["topk_lengths"] is not None:
            places = torch.arange(20, device=device)
            kept = places < case["topk_lengths"][:, None]
            case["topk_indices"] = case["topk_indices"].where(kept, -1)
            case["topk_lengths"] = None
        case["topk_indices"] = cases.ascending(case["topk_indices"])
        out, case["lse"] = reference.sparse_attention(**{name: case[name] for name in FORWARD})
        case["out"] = out.bfloat16()
    own, shared = own_and_shared(case, list_tokens)
    if ascending and list_tokens > 1:
        assert (shared["topk_lengths"] < list_tokens * 20).all()  # merged
    wanted = reference.sparse_attention_backward(**in_float64(own))
    exact = reference.sparse_attention_backward(**in_float64(shared))
    got = check_backward(shared)
    for name, actual, one, other in zip(("dq", "dkv", "d_sink"), got, wanted, exact, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, atol=1e-11, rtol=1e-11)
            assert actual.shape == one.shape, name


def check_backward(case):
    """Run the op on poisoned memory; compare with the definition in float64."""
    with poisoned_empty():
        got = sparse_attention_backward(**case)
    wanted = reference.sparse_attention_backward(**in_float64(case))
    dtype = case["q"].dtype
    tolerance = TOLERANCE.get(dtype, SPARSE_ATTENTION_GRADIENT)
    assert got[0].dtype == got[1].dtype == dtype
    for name, actual, expected, sizes in zip(
        ("dq", "dkv"), got, wanted, gradient_sizes(in_float64(case)), strict=False
    ):
        assert_close(name, actual, expected, tolerance, sizes)
    if case["attn_sink"] is None:
        assert got[2] is None
    else:
        assert_close("d_sink", got[2], wanted[2], SPARSE_ATTENTION_SINK_GRADIENT)
    return got


@pytest.mark.parametrize("num_heads", [3, 64])
@pytest.mark.parametrize("head_dim", [576, 512])
@pytest.mark.parametrize("shared", [{}, {"list_tokens": 2, "num_tokens": 5}], ids=str)
def test_results_are_those_of_prefill_bit_for_bit(device, num_heads, head_dim, shared):
    options = SMALL | FEATURES["sink, lengths, few"] | shared
    options |= {"num_heads": num_heads, "head_dim": head_dim}
    case = sparse_attention_case(Draw(7, device), **options)
    for name, got, wanted in zip(
        ("out", "lse"), sparse_attention(**case), sparse_prefill(**case), strict=True
    ):
        assert_equal(name, got, wanted)


def with_gradients(case):
    """Copies of the tensors that take gradients, as leaves of a graph."""
    leaves = {
        name: case[name].detach().clone().requires_grad_()
        for name in ("q", "kv", "attn_sink")
        if case[name] is not None
    }
    return case | leaves, list(leaves.values())


@pytest.mark.parametrize("shared", [{}, {"list_tokens": 3, "num_tokens": 5}], ids=str)
def test_autograd_calls_the_backward_op(device, shared):
    options = SMALL | FEATURES["sink, lengths, few"] | shared
    case = sparse_attention_case(Draw(8, device), **options)
    case, leaves = with_gradients(case)
    out, lse = sparse_attention(**case)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    got = torch.autograd.grad((out, lse), leaves, (dout, dlse))
    wanted = sparse_attention_backward(dout, out=out, lse=lse, dlse=dlse, **case)
    for name, actual, expected in zip(("dq", "dkv", "d_sink"), got, wanted, strict=True):
        assert_equal(name, actual, expected)


def test_the_backward_op_gets_gradients_without_strides(device):
    case, leaves = with_gradients(sparse_attention_case(Draw(8, device), **SMALL))
    out, lse = sparse_attention(**case)
    strided = [torch.randn_like(x.transpose(0, 1).contiguous()).transpose(0, 1) for x in (out, lse)]
    module = importlib.import_module("sparsemla.ops.sparse_attention")
    backward = module._sparse_attention_backward
    with mock.patch.object(module, "_sparse_attention_backward", wraps=backward) as call:
        torch.autograd.grad((out, lse), leaves, strided)
    (given,) = (each.args[0] for each in call.call_args_list)
    assert_equal("dout", given.dout, strided[0])
    assert_equal("dlse", given.dlse, strided[1])
    assert [x.is_contiguous() for x in (*strided, given.dout, given.dlse)] == [
        *(False, False),
        *(True, True),
    ]


@pytest.mark.parametrize("used", ["out", "lse"])
def test_a_result_without_a_gradient_counts_as_zero(device, used):
    case, leaves = with_gradients(sparse_attention_case(Draw(8, device), **SMALL, with_sink=True))
    out, lse = sparse_attention(**case)
    loss = out.float().square().sum() if used == "out" else lse[lse.isfinite()].sum()
    got = torch.autograd.grad(loss, leaves)
    dout = 2 * out if used == "out" else torch.zeros_like(out)
    dlse = lse.isfinite().float() if used == "lse" else None
    wanted = sparse_attention_backward(dout, out=out, lse=lse, dlse=dlse, **case)
    for name, actual, expected in zip(("dq", "dkv", "d_sink"), got, wanted, strict=True):
        assert_equal(name, actual, expected)


def test_directional_derivatives(device):
    options = SMALL | {"with_sink": True, "dtype": torch.float32}
    case, leaves = with_gradients(sparse_attention_case(Draw(9, device), **options))
    case["kv"].data.nan_to_num_(0)
    case["attn_sink"].data.clamp_(-1, 1)

    def loss():
        out, lse = sparse_attention(**case)
        return (out.double() * weights).sum() + lse.double().sum()

    weights = torch.randn(4, 3, 512, device=device, dtype=torch.float64)
    grads = torch.autograd.grad(loss(), leaves)
    for leaf, grad in zip(leaves, grads, strict=True):
        # Sinks are few: their slope must stand out from the rounding of the float32 outputs.
        step = (2e-2 if leaf.dim() == 1 else 2e-3) * torch.randn_like(leaf)
        with torch.no_grad():
            leaf += step
            above = loss()
            leaf -= 2 * step
            below = loss()
            leaf += step
        slope = 2 * (grad.double() * step).sum()
        assert abs(above - below - slope) < 1e-3 * grad.norm() * step.norm()


@pytest.mark.parametrize("shared", [{}, {"list_tokens": 3}], ids=str)
def test_the_gradient_of_rows_is_added_to_a_sum(device, shared):
    case = sparse_attention_backward_case(Draw(10, device), **SMALL | shared)
    before = torch.randn(30, 576, device=device)
    total = before.clone()
    dq, dkv, _ = sparse_attention_backward(**case, accumulate=total)
    assert dkv is total
    wanted = reference.sparse_attention_backward(**in_float64(case))[1]
    assert_close("dkv", total - before, wanted, SPARSE_ATTENTION_GRADIENT)
    assert_equal("dq", dq, sparse_attention_backward(**case)[0])


def test_nan_stays_with_the_tokens_that_select_it(device):
    case = sparse_attention_case(Draw(11, device), num_tokens=3, topk=4, num_rows=12, num_heads=2)
    case["topk_indices"] = torch.arange(12, device=device, dtype=torch.int32).view(3, 4)
    case["kv"] = torch.randn(12, 576, device=device).bfloat16()
    case["kv"][5] = math.nan
    case, leaves = with_gradients(case)
    out, _ = sparse_attention(**case)
    dq, dkv = torch.autograd.grad(out.float().sum(), leaves)
    clean = torch.tensor([True, False, True], device=device)
    assert dq[clean].isfinite().all()
    assert dq[1].isnan().all()
    assert dkv[clean.repeat_interleave(4)].isfinite().all()
    assert dkv[4:8].isnan().all()


@pytest.mark.parametrize("num_tokens", [8, 7])
def test_nan_in_rows_that_nobody_attends_to_stays_there(device, num_tokens):
    """Whether a list names them without a member, or with one that does not exist."""
    options = {"num_heads": 2, "topk": 6, "num_rows": 12, "list_tokens": 4}
    case = sparse_attention_case(Draw(11, device), num_tokens=num_tokens, **options)
    case["topk_indices"] = torch.arange(12, device=device, dtype=torch.int32).view(2, 6)
    case["topk_lengths"] = None
    case["token_mask"] = torch.full((2, 6), 0b0111, dtype=torch.uint8, device=device)
    case["token_mask"][:, 3] = 0
    case["token_mask"][1, 2] = 0b1000  # with 7 tokens, of none
    case["kv"] = torch.randn(12, 576, device=device).bfloat16()
    nan = [3, 9] if num_tokens == 8 else [3, 8, 9]
    case["kv"][nan] = math.nan
    case, leaves = with_gradients(case)
    out, lse = sparse_attention(**case)
    dq, dkv = torch.autograd.grad(out.float().sum() + lse[lse.isfinite()].sum(), leaves)
    assert out.isfinite().all()
    assert dq.isfinite().all()
    assert dkv.isfinite().all()
    assert (dkv[nan] == 0).all()


def test_tokens_without_rows_get_no_gradient(device):
    case = sparse_attention_backward_case(Draw(12, device), **SMALL, with_sink=True)
    case["topk_indices"][1] = -1
    case["topk_lengths"] = torch.tensor([20, 20, 0, 3], device=device)
    forward = {name: case[name] for name in FORWARD}
    case["out"], case["lse"] = sparse_attention(**forward)
    case["dout"][1], case["dlse"] = math.nan, torch.full_like(case["lse"], math.nan)
    case["dlse"][[0, 3]] = 1.0
    dq, dkv, d_sink = sparse_attention_backward(**case)
    assert (dq[1:3] == 0).all()
    assert dkv.isfinite().all()
    assert d_sink.isfinite().all()


def test_a_sink_that_takes_all_leaves_the_gradient_of_the_lse(device):
    case = sparse_attention_backward_case(Draw(13, device), **SMALL, with_sink=True)
    case["attn_sink"][:] = math.inf
    case["out"].zero_()
    dq, dkv, d_sink = sparse_attention_backward(**case)
    assert (dq == 0).all()
    assert (dkv == 0).all()
    assert (d_sink == 0).all()
    check_backward(case | {"dlse": torch.ones_like(case["lse"])})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shared", [{}, {"list_tokens": 4}], ids=str)
def test_bits_do_not_depend_on_the_run_or_the_workspace(device, dtype, shared):
    options = {"num_tokens": 50, "num_heads": 6, "topk": 40, "num_rows": 64, "with_sink": True}
    options |= shared
    case = sparse_attention_backward_case(Draw(15, device), dtype=dtype, **options)
    first = sparse_attention_backward(**case)
    for limit in (2 << 30, 2 << 30, 1 << 20, 200_000, 1):
        again = sparse_attention_backward(**case | {"max_workspace_bytes": limit})
        for name, got, wanted in zip(("dq", "dkv", "d_sink"), again, first, strict=True):
            assert_equal(f"{name}, {limit} bytes", got, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and 25 GB")
def test_rows_beyond_2_31_elements():
    case = sparse_attention_backward_case(Draw(16, "cuda"), **SMALL)
    case["kv"].nan_to_num_(0.5)
    few = sparse_attention_backward(**case)
    first = 2**31 // 576 + 1
    kv = torch.empty(first + 30, 576, dtype=torch.bfloat16, device="cuda")
    kv[first:] = case["kv"]
    ids = case["topk_indices"].long()
    ids = torch.where((ids >= 0) & (ids < 30), ids + first, -1)
    many = sparse_attention_backward(**case | {"kv": kv, "topk_indices": ids})
    assert_equal("dq", many[0], few[0])
    assert_equal("dkv", many[1][first:], few[1])
    assert not many[1][:first].any()


def test_latents_of_groups_of_heads_are_a_view(device):
    """G latent rows per position, each for H / G heads: more tokens with fewer heads."""
    tokens, rows, groups, heads = 3, 20, 2, 4
    draw = Draw(17, device)
    q, kv = draw.normal(tokens, groups, heads, 576), draw.normal(rows, groups, 576)
    ids = draw.integers(-1, rows, tokens, groups, 8)
    own = torch.arange(groups, device=device)[:, None]
    merged = torch.where(ids >= 0, ids * groups + own, -1)
    q, kv = q.requires_grad_(), kv.requires_grad_()
    out, _ = sparse_attention(
        q.flatten(0, 1), kv.flatten(0, 1), merged.flatten(0, 1).int(), softmax_scale=0.05
    )
    weights = torch.randn_like(out)
    got = torch.autograd.grad((out * weights).sum(), (q, kv))
    for group in range(groups):
        part = weights.view(tokens, groups, heads, 512)[:, group]
        alone, _ = sparse_attention(
            q[:, group], kv[:, group], ids[:, group].contiguous(), softmax_scale=0.05
        )
        wanted = torch.autograd.grad((alone * part).sum(), (q, kv))
        for grad, expected in zip(got, wanted, strict=True):
            assert_close("group", grad[:, group], expected[:, group], FLOAT32_GRADIENT)


def test_the_definition_runs_without_a_sink(device):
    case = sparse_attention_backward_case(Draw(16, device), **SMALL, with_dlse=True)
    with dispatch.only("reference"):
        dq, dkv, d_sink = sparse_attention_backward(**case)
    expected = reference.sparse_attention_backward(**case)
    assert_equal("dq", dq, expected[0].bfloat16())
    assert_equal("dkv", dkv, expected[1].bfloat16())
    assert d_sink is None


def shifted(rows):
    """The same rows, two bytes beyond a multiple of 16."""
    wide = torch.nn.functional.pad(rows, (1, 7))
    return wide[..., 1:-7]


NO_TOKEN = dict.fromkeys(("dout", "q", "topk_indices", "out", "lse"), lambda x: x[:0])


def hopper_choice(**case):
    """The choice of a kernel on a Hopper GPU."""
    (choice,) = explain(sparse_attention_backward, **case, gpu="sm_90").choices
    return choice


@pytest.mark.parametrize(
    ("options", "kernel"),
    [
        ({}, "sm90.one_pass"),
        ({"list_tokens": 4, "num_heads": 16}, "sm90.one_pass"),
        ({"num_heads": 65}, "sm90"),
        ({"num_heads": 128, "head_dim": 512}, "sm90"),
        ({"list_tokens": 4, "num_heads": 32}, "sm90"),
    ],
    ids=str,
)
def test_gradients_that_hopper_takes(options, kernel):
    case = sparse_attention_backward_case(Draw(24), **SMALL | options)
    assert hopper_choice(**case).kernel == kernel


def test_gradients_in_any_order_that_hopper_takes():
    case = sparse_attention_backward_case(Draw(24), **SMALL)
    assert hopper_choice(**case, deterministic=False).kernel == "sm90.one_pass"


@pytest.mark.parametrize(
    ("options", "change", "reason"),
    [
        ({"num_heads": 129}, {}, "takes at most 128 heads of the tokens of a list, got 129"),
        ({"num_heads": 33, "list_tokens": 4}, {}, "heads of the tokens of a list, got 132"),
        ({}, NO_TOKEN, "needs query tokens, heads and entries of lists"),
        ({"num_heads": 0}, {}, "needs query tokens, heads and entries of lists"),
        ({"topk": 0}, {}, "needs query tokens, heads and entries of lists"),
        ({"dtype": torch.float16}, {}, "needs bfloat16 queries, got torch.float16"),
        ({"head_dim": 192}, {}, "needs 512 or 576 dims with 512 of value, got bf16_192v192"),
        ({}, {"dout": shifted}, "needs gradients of out with rows that start at multiples of 16"),
        ({}, {"q": shifted}, "needs queries and caches with rows that start at multiples of 16"),
        ({}, {"kv": shifted}, "needs queries and caches with rows that start at multiples of 16"),
    ],
)
def test_gradients_that_hopper_refuses(options, change, reason):
    case = sparse_attention_backward_case(Draw(24), **SMALL | options)
    change = {name: new(case[name]) if callable(new) else new for name, new in change.items()}
    choice = hopper_choice(**case | change)
    assert choice.kernel == "triton"
    assert reason in dict(choice.refusals)["sm90"]


@pytest.mark.parametrize("empty", ["tokens", "heads", "entries"])
def test_empty_shapes(device, empty):
    sizes = {"tokens": (0, 3, 5), "heads": (4, 0, 5), "entries": (4, 3, 0)}[empty]
    tokens, heads, topk = sizes
    q = torch.randn(tokens, heads, 576, device=device).bfloat16().requires_grad_()
    kv = torch.randn(9, 576, device=device).bfloat16().requires_grad_()
    sink = torch.zeros(heads, device=device, requires_grad=True)
    ids = torch.zeros(tokens, topk, dtype=torch.int32, device=device)
    for dtype in (torch.bfloat16, torch.float32):
        with poisoned_empty():
            out, lse = sparse_attention(
                q.to(dtype), kv.to(dtype), ids, softmax_scale=1.0, attn_sink=sink
            )
            grads = torch.autograd.grad(out.float().sum() + lse.sum(), (q, kv, sink))
        assert out.shape == (tokens, heads, 512)
        assert (out == 0).all()
        assert (lse == -math.inf).all()
        for grad, leaf in zip(grads, (q, kv, sink), strict=True):
            assert grad.shape == leaf.shape
            assert (grad == 0).all()


def test_second_derivatives_are_refused(device):
    case, leaves = with_gradients(sparse_attention_case(Draw(18, device), **SMALL))
    out, _ = sparse_attention(**case)
    (dq, _) = torch.autograd.grad(out.float().sum(), leaves, create_graph=True)
    with pytest.raises(RuntimeError, match="sparse_attention has no second derivative"):
        dq.float().sum().backward()


def step(q, kv, topk_indices, attn_sink):
    out, lse = sparse_attention(q, kv, topk_indices, softmax_scale=0.05, attn_sink=attn_sink)
    return out.float().square().sum() + lse[lse.isfinite()].sum()


def test_forward_and_backward_compile_to_one_graph_for_all_numbers_of_tokens(device):
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, kv, ids, sink: (
            sparse_attention(q, kv, ids, softmax_scale=0.05, attn_sink=sink)[0].square().sum()
        ),
        fullgraph=True,
        backend=counter,
        dynamic=True,
    )
    for num_tokens in (5, 8, 13):
        case = sparse_attention_case(
            Draw(19, device), **SMALL | {"num_tokens": num_tokens, "with_sink": True}
        )
        case, leaves = with_gradients(case)
        q, kv, sink = leaves
        ids = case["topk_indices"]
        got = torch.autograd.grad(compiled(q, kv, ids, sink), leaves)
        out, _ = sparse_attention(q, kv, ids, softmax_scale=0.05, attn_sink=sink)
        wanted = torch.autograd.grad(out.square().sum(), leaves)
        for actual, expected in zip(got, wanted, strict=True):
            assert_equal("gradient", actual, expected)
    assert counter.frame_count == 1


def test_selective_checkpointing_keeps_the_results(device):
    op = torch.ops.sparsemla.sparse_attention.default

    def policy(ctx, function, *args, **kwargs):
        saved = function == op
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    case, leaves = with_gradients(sparse_attention_case(Draw(20, device), **SMALL, with_sink=True))
    arguments = case["q"], case["kv"], case["topk_indices"], case["attn_sink"]
    wanted = torch.autograd.grad(step(*arguments), leaves)
    launched = []
    launch = dispatch.launch

    def counting(op, call):
        launched.append(op.name)
        launch(op, call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "launch", counting)
        for context, forwards in (
            ({"context_fn": lambda: create_selective_checkpoint_contexts(policy)}, 1),
            ({}, 2),
        ):
            launched.clear()
            loss = checkpoint(step, *arguments, use_reentrant=False, **context)
            for got, expected in zip(torch.autograd.grad(loss, leaves), wanted, strict=True):
                assert_equal("gradient", got, expected)
            assert launched.count("sparse_attention") == forwards
            assert launched.count("sparse_attention_backward") == 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"kv": torch.zeros(0, 576).bfloat16()}, ValueError, "kv must have at least one row"),
        ({"kv": torch.zeros(9, 576)}, TypeError, "kv must have dtype bfloat16, got float32"),
        ({"deterministic": 1}, TypeError, "deterministic must be a bool, got int"),
        ({"list_tokens": 0}, ValueError, "list_tokens must be at least 1, got 0"),
        ({"list_tokens": 2.0}, TypeError, "list_tokens must be an integer, got float"),
        ({"list_tokens": 3}, ValueError, r"topk_indices must have shape \[N, K\] = \[2, 20\]"),
        (
            {"list_tokens": 9, "token_mask": torch.zeros(1, 20, dtype=torch.uint8)},
            ValueError,
            "list_tokens must be below 9, got 9",
        ),
        (
            {"token_mask": torch.zeros(4, 19, dtype=torch.uint8)},
            ValueError,
            r"token_mask must have shape \[T, K\] = \[4, 20\], got \[4, 19\]",
        ),
        (
            {"token_mask": torch.zeros(4, 20, dtype=torch.int32)},
            TypeError,
            "token_mask must have dtype uint8, got int32",
        ),
    ],
)
def test_arguments_that_do_not_fit(change, error, message):
    case = sparse_attention_case(Draw(21), **SMALL)
    with pytest.raises(error, match=f"sparse_attention: {message}"):
        sparse_attention(**case | change)
    backward = sparse_attention_backward_case(Draw(21), **SMALL)
    with pytest.raises(error, match=f"sparse_attention_backward: {message}"):
        sparse_attention_backward(**backward | change)


def test_an_out_of_another_width_is_refused():
    case = sparse_attention_backward_case(Draw(22), **SMALL)
    with pytest.raises(ValueError, match="dout must have shape"):
        sparse_attention_backward(**case | {"dout": torch.zeros(4, 3, 576).bfloat16()})

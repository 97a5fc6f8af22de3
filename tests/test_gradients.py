"""No op drops a gradient or a tangent in silence: it computes it, or refuses it by name."""

import pytest
import torch
from torch.autograd import forward_ad

import sparsemla
from sparsemla import DecodeRunner, HeadWeight, MLALayer
from sparsemla_lab.testing.compare import assert_equal
from test_errors import CALLS
from test_global_state import snapshot

DIFFERENTIABLE = {
    "sparse_attention": ("q", "kv", "attn_sink"),
    "selected_scores": ("index_q", "weights", "index_k"),
    "index_loss": ("scores",),
    "dense_index_loss": ("index_q", "weights", "index_k"),
}
"""Ops with gradients, and the arguments that get one; the others are constants."""

CONSTANTS = {
    "to_slots",
    "entry_slots",
    "visible_slots",
    "share_lists",
    "own_positions",
    "resolve_rows",
    "forget_seats",
    "select_topk",
    "select_rows",
    "merge_topk",
    "indexer_topk",
    "indexer_topk_blocks",
    "indexer_topk_of_blocks",
    "attention_target",
    "index_loss",
    "dense_index_loss",
}
"""Ops with results, or losses with targets, that are constants by their documentation."""

GRADIENTS = {"selected_scores_backward", "sparse_attention_backward", "dense_index_gradients"}
"""Ops whose results are gradients; a derivative of these is refused when it is asked for."""

INSTEAD = {
    "sparse_prefill": "sparse_attention",
    "sparse_decode": "sparse_attention",
    "dense_prefill": "sparse_attention",
    "dense_decode": "sparse_attention",
    "decode_branch": "sparse_attention",
    "prefill_branch": "sparse_attention",
    "indexer_scores": "selected_scores",
    "indexer_scores_paged": "selected_scores",
}


def is_float(value):
    return isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float32)


def is_output(op, name):
    """Whether a call writes an argument; a backward op reads the results of the forward."""
    if op.endswith("_backward"):
        return name == "accumulate"
    return "out" in name.split("_") or name == "max_logits" or (name == "lse" and "index" not in op)


def inputs_of(op):
    """The arguments of a call that could require a gradient, parts of weights included."""
    for name, value in CALLS[op]().items():
        if is_float(value) and not is_output(op, name):
            yield name
        elif isinstance(value, HeadWeight) and is_float(value.data):
            yield f"{name}.data"
        elif isinstance(value, MLALayer):
            yield from (f"{name}.w_uk", f"{name}.w_uv", f"{name}.kv_norm_weight")


def changed(case, path, change):
    """The case with one tensor changed."""
    name, *parts = path.split(".")
    value = case[name]
    if not parts:
        return case | {name: change(value)}
    fields = dict(vars(value))
    inner = fields[parts[0]]
    new = HeadWeight(change(inner.data)) if isinstance(inner, HeadWeight) else change(inner)
    return case | {name: type(value)(**fields | {parts[0]: new})}


def wanting(tensor):
    return tensor.detach().clone().requires_grad_()


INPUTS = [(op, name) for op in sorted(CALLS) for name in inputs_of(op)]
REFUSING = [
    (op, name)
    for op, name in INPUTS
    if op not in DIFFERENTIABLE and op not in CONSTANTS and op not in GRADIENTS
]


def test_every_op_is_in_one_table():
    refusing = {op for op, _ in REFUSING} | {"gather_dequant", "fetch_rows"}  # of bytes
    assert set(CALLS) == refusing | {*DIFFERENTIABLE} | CONSTANTS | GRADIENTS
    assert not refusing & ({*DIFFERENTIABLE} | CONSTANTS | GRADIENTS)


@pytest.mark.parametrize(("op", "name"), REFUSING, ids=str)
def test_ops_without_gradients_refuse_inputs_that_need_one(op, name):
    call, case = getattr(sparsemla, op), changed(CALLS[op](), name, wanting)
    before = snapshot(case)
    with pytest.raises(ValueError, match=f"{op}: .*must not require a gradient") as caught:
        call(**case)
    assert INSTEAD.get(op, "detach()") in str(caught.value)
    assert name.split(".")[0] in str(caught.value)
    assert snapshot(case) == before, "a refused call wrote"
    wanted = CALLS[op]()
    wanted = snapshot((call(**wanted), wanted))
    for without in (torch.no_grad, torch.inference_mode):
        case = changed(CALLS[op](), name, wanting)
        with without():
            assert snapshot((call(**case), case)) == wanted


@pytest.mark.parametrize(
    ("op", "name"),
    [(op, name) for op, name in INPUTS if op in CONSTANTS | GRADIENTS],
    ids=str,
)
def test_constants_keep_their_bits(op, name):
    call = getattr(sparsemla, op)
    wanted = snapshot(call(**CALLS[op]()))
    got = call(**changed(CALLS[op](), name, wanting))
    assert snapshot(got) == wanted
    results = got if isinstance(got, tuple) else (got,)
    wanting_results = [one for one in results if one is not None and one.requires_grad]
    indexer = name in DIFFERENTIABLE["dense_index_loss"]
    if op in GRADIENTS and (indexer or op != "dense_index_gradients"):
        assert len(wanting_results) == 3  # not the loss beside its gradients
        with pytest.raises(RuntimeError, match="has no second derivative"):
            wanting_results[-1].sum().backward()
    elif name not in DIFFERENTIABLE.get(op, ()):
        assert wanting_results == []


@pytest.mark.parametrize(
    ("op", "name"), [(op, name) for op, names in DIFFERENTIABLE.items() for name in names]
)
def test_second_derivatives_are_computed_or_refused(op, name):
    case = CALLS[op]() | {name: wanting(CALLS[op]()[name])}
    results = getattr(sparsemla, op)(**case)
    result = results[0] if isinstance(results, tuple) else results
    value = result.where(result.isfinite(), 0).float().square().sum()
    (grad,) = torch.autograd.grad(value, case[name], create_graph=True)
    penalty = grad.float().square().sum()
    if op == "index_loss":  # of torch's own functions
        assert torch.autograd.grad(penalty, case[name])[0].any()
        return
    with pytest.raises(RuntimeError, match=f"{op} has no second derivative"):
        penalty.backward()


# torch compiles its decompositions for the first tangent of a process.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(("op", "name"), INPUTS, ids=str)
def test_tangents_are_propagated_or_refused(op, name):
    def with_tangent(tensor):
        return forward_ad.make_dual(tensor, torch.ones_like(tensor))

    with forward_ad.dual_level():
        case = changed(CALLS[op](), name, with_tangent)
        if op in CONSTANTS - {"attention_target", "dense_index_loss", "select_rows"}:
            result = getattr(sparsemla, op)(**case)
            for each in result if isinstance(result, tuple) else (result,):
                tangent = forward_ad.unpack_dual(each).tangent
                assert (tangent is not None) == (name in DIFFERENTIABLE.get(op, ()))
            return
        with pytest.raises(ValueError, match=f"{op}: .*must not have a tangent"):
            getattr(sparsemla, op)(**case)
    getattr(sparsemla, op)(**CALLS[op]())


def test_a_decode_step_of_a_model_with_parameters_runs_without_gradients():
    """A runner serves; its steps record nothing."""
    weight = torch.nn.Parameter(torch.ones(2, 32, 64).bfloat16())

    def step(plan, x):
        return sparsemla.project_heads(x, HeadWeight(weight))

    runner = DecodeRunner(
        step,
        {"x": torch.zeros(1, 2, 64).bfloat16()},
        batch_sizes=(1,),
        max_pages_per_request=1,
        page_size=8,
    )
    table = torch.zeros(1, 1, dtype=torch.int32)
    out = runner.run([1], table, x=torch.ones(1, 2, 64).bfloat16())
    assert_equal("out", out, torch.full((1, 2, 32), 64.0).bfloat16())

"""Nothing to do: every op in every tier without tokens, requests, keys or heads, and on padding.

Each size of each op is 0 in turn: sizes are the letters of the op's own checks, so that a new
argument needs no line here. The results are those of the definition, or the op refuses the call.
Triton's interpreter and ours refuse an access outside of a tensor, and here each tensor has memory
of its own.
"""

import contextlib
import copy
import dataclasses
import warnings
from unittest import mock

import pytest
import torch

import sparsemla
from sparsemla import dispatch
from sparsemla.checks import Checker
from sparsemla.kernels.repeat import unrepeated
from sparsemla_lab.testing.compare import run_op, run_reference, tolerances_of
from sparsemla_lab.verify.properties import against_reference
from test_errors import CALLS, OUTPUTS

NOTHING = {"topk_indices": -1}
NO_KEYS = {"seq_lens": 0}
PADDING = {
    "fused_rope_rmsnorm_quant": [{"slot_mapping": -1}],
    "append_index_keys": [{"slot_mapping": -1}],
    "fused_indexer_rope_quant": [{"slot_mapping": -1}],
    "prepare_index_queries": [{"positions": 0}],
    "pool_windows": [
        {"request_ids": -1},
        {"positions": -1},
        {"input_row_offsets": 0},
        {"ring_ids": -1, "slot_mapping": -1},
        {"slot_mapping": -1, "state": None},
    ],
    "to_slots": [NOTHING, {"request_ids": -1}, {"page_table": -1, "prefill_request_ids": -1}],
    "entry_slots": [{"request_ids": -1}, {"positions": -1}, {"page_table": -1}],
    "visible_slots": [{"request_ids": -1}, {"positions": -1}, {"page_table": -1}],
    "share_lists": [NOTHING, {"topk_lengths": 0}],
    "own_positions": [NOTHING],
    "resolve_rows": [
        NOTHING,
        NO_KEYS,
        {"seats": -1},
        {"page_table": -1},
        {"input_row_offsets": 0},
    ],
    "fetch_rows": [{"miss_counts": 0}, {"miss_slots": -1}, {"miss_rows": -1}],
    "forget_seats": [{"seats": -1}],
    "gather_dequant": [NO_KEYS, {"page_table": -1}],
    "merge_states": [{"lses": float("-inf")}],
    "select_topk": [{"row_ends": 0}, {"request_ids": -1}, {"page_table": -1}],
    "merge_topk": [{"indices": -1}],
    "indexer_scores": [{"row_ends": 0}],
    "indexer_scores_paged": [NO_KEYS, {"page_table": -1}],
    "indexer_topk": [NO_KEYS, {"page_table": -1}, {"input_row_offsets": 0}],
    "indexer_topk_blocks": [NO_KEYS, {"page_table": -1}, {"input_row_offsets": 0}],
    "indexer_topk_of_blocks": [
        NO_KEYS,
        {"page_table": -1},
        {"blocks": -1},
        {"input_row_offsets": 0},
    ],
    "sparse_prefill": [NOTHING, {"topk_lengths": 0}, NOTHING | {"extra_topk_indices": -1}],
    "sparse_attention": [NOTHING, {"topk_lengths": 0}],
    "sparse_attention_backward": [NOTHING],
    "sparse_decode": [NOTHING, {"topk_lengths": 0}, NOTHING | {"extra_topk_indices": -1}],
    "dense_decode": [NO_KEYS, {"page_table": -1}],
    "dense_prefill": [{"kv_row_offsets": 0}, {"input_row_offsets": 0, "kv_row_offsets": 0}],
    "project_heads": [{"lses": float("-inf")}],
    "project_groups": [{"lses": float("-inf")}],
    "decode_branch": [NOTHING | {"extra_topk_indices": -1}, {"topk_lengths": 0}],
    "prefill_branch": [NOTHING, {"topk_lengths": 0}],
    "select_rows": [{"row_ends": 0}],
    "selected_scores": [NOTHING, {"topk_lengths": 0}],
    "selected_scores_backward": [NOTHING, {"topk_lengths": 0}],
    "attention_target": [NOTHING, {"topk_lengths": 0}],
    "index_loss": [{"row_weights": 0}, {"target": 0}],
    "dense_index_loss": [{"row_ends": 0}, {"row_weights": 0}],
    "dense_index_gradients": [{"row_ends": 0}, {"row_weights": 0}],
}
"""Values of whole tensors, a step without work in each row."""

OFFSETS = ("input_row_offsets", "kv_row_offsets")
WITHOUT_REQUESTS = ("B", "B+1")
INTEGERS = (torch.int32, torch.int64)
FAR = -(2**31), 2**31 - 1, -1


def tiers_of(op):
    """The tiers of an op that run here."""
    kernels = dispatch.OPS[op].kernels if op in dispatch.OPS else ()
    tiers = dict.fromkeys(kernel.tier for kernel in kernels) or ["cpu"]
    interpreted = not torch.cuda.is_available() and TRITON
    return [tier for tier in tiers if tier == "cpu" or (interpreted and tier != "reference")]


try:
    from sparsemla_lab.testing.interpreter import acting_as
except ImportError:
    TRITON = False
else:
    TRITON = True
GLUON = {"sm90": "sm_90", "sm80": "sm_80"}
"""A GPU for each tier that the interpreter of Gluon runs."""
EVERYWHERE = [(op, tier) for op in CALLS for tier in tiers_of(op)]


@contextlib.contextmanager
def tier_only(tier):
    """Let ops run in one tier."""
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, which interprets
        stack.enter_context(unrepeated())
        if tier in GLUON:
            stack.enter_context(acting_as(GLUON[tier]))
        else:
            stack.enter_context(dispatch.only(tier))
        yield


def arguments_of(op):
    """A call without its optional outputs."""
    needed = ("gather_dequant", "out"), ("pool_windows", "kv_out")
    return {
        name: value
        for name, value in CALLS[op]().items()
        if (op, name) not in OUTPUTS or (op, name) in needed
    }


def letters_of(op):
    """The dims of arguments that have each letter of the op's checks."""
    case, found, check = arguments_of(op), {}, Checker.tensor

    def record(self, name, tensor, shape, dtypes):
        if isinstance(case.get(name), torch.Tensor):
            for dim, letter in enumerate(shape.split()):
                if not letter.isdigit():
                    found.setdefault(letter, set()).add((name, dim))
        return check(self, name, tensor, shape, dtypes)

    with unrepeated(), mock.patch.object(Checker, "tensor", record):
        getattr(sparsemla, op)(**case)
    return found


def empty_cases(op):
    """Calls in which a size is 0, by its letter."""
    for letter, dims in letters_of(op).items():
        case = arguments_of(op)
        for name, dim in dims:
            case[name] = case[name].narrow(dim, 0, 0)
        if letter in WITHOUT_REQUESTS:
            case |= {name: arguments_of(op)[name][:1] for name in OFFSETS if name in case}
        if letter == "K" and "dout" in case:  # as the forward pass leaves them
            case |= {"out": case["out"] * 0, "lse": torch.full_like(case["lse"], float("-inf"))}
        if letter == "W":  # requests without pages have no keys
            case |= {name: torch.zeros_like(case[name]) for name in NO_KEYS if name in case}
        yield f"{letter} = 0", case
        if "kv_out" in case:  # a long step, which has no rows of entries for all tokens
            yield f"{letter} = 0 in a long step", case | {"kv_out": None}


def padding_cases(op):
    for values in PADDING[op]:
        case = arguments_of(op)
        for name, value in values.items():
            if value is None:
                case[name] = dataclasses.replace(case[name], rows=case[name].rows[:0])
            else:
                case[name] = torch.full_like(case[name], value)
        yield str(values), case


def far_cases(op):
    """Calls with integers far outside of the range, of an index, a length or an offset."""
    for name, value in arguments_of(op).items():
        if isinstance(value, torch.Tensor) and value.dtype in INTEGERS:
            far = value.clone().flatten()
            for place, number in enumerate(FAR):
                far[place * (len(far) - 1) // 2] = number
            yield f"far {name}", arguments_of(op) | {name: far.view_as(value)}


def is_defined(op, case):
    """Whether the definition, which takes good arguments only, has results."""
    try:
        run_reference(op, copy.deepcopy(case))
    except (IndexError, RuntimeError, ValueError, ZeroDivisionError):
        return False
    return True


def check(op, tier, case, compares):
    """Check a call in a tier: it is refused by name, or its results are those of the definition."""
    case = {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in case.items()
    }
    compares = compares and is_defined(op, case)
    refusal, measured = None, []
    with tier_only(tier):
        try:
            if compares:
                measured, _ = against_reference(op, case, tolerances_of(op, case))
            else:
                run_op(op, case)
        except (TypeError, ValueError) as error:
            refusal = str(error)
    assert refusal is None or refusal.startswith(f"{op}: "), refusal
    assert [one.failure for one in measured if one.failure] == []


def test_every_op_has_a_row():
    assert set(PADDING) == set(CALLS) >= set(dispatch.OPS)


KINDS = {"size": empty_cases, "padding": padding_cases}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("op", "tier"), EVERYWHERE)
def test_nothing_to_do(op, tier, kind):
    failures = {}
    for name, case in KINDS[kind](op):
        try:
            check(op, tier, case, compares=True)
        except Exception as error:  # all of an op's at once
            failures[name] = repr(error)
    assert failures == {}


@pytest.mark.parametrize(
    ("op", "tier"),
    [
        pytest.param(op, tier, marks=[pytest.mark.slow] if tier in GLUON else [])
        for op, tier in EVERYWHERE
        if tier != "cpu"
    ],
)
def test_integers_far_outside_of_their_range(op, tier):
    for _, case in far_cases(op):
        check(op, tier, case, compares=False)

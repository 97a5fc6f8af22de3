"""What holds for the arguments of a case: near the definition, repeatable, replayable, batchable.

Results are named tensors: what the op returns, and the parts of the rows of a cache that it writes.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, cast
from unittest import mock

import torch
from torch import Tensor

from sparsemla import dispatch
from sparsemla.cache import PagedCache
from sparsemla.plan import Plan, plan_batch
from sparsemla.testing.cases import Arguments
from sparsemla.testing.compare import (
    ROW_TOLERANCES,
    Tolerance,
    assert_equal,
    assert_result,
    largest_difference,
    run_op,
    run_reference,
    sizes_of,
    worst_share,
)
from sparsemla.testing.poison import poisoned_empty

Results = dict[str, Tensor]

CACHE_WRITERS = (
    "fused_rope_rmsnorm_quant",
    "append_index_keys",
    "fused_indexer_rope_quant",
    "decode_branch",
    "prefill_branch",
)

OVERWRITING = (*CACHE_WRITERS, "gather_dequant")
"""Ops that write into their arguments; every run needs a copy."""

PER_REQUEST = {
    "sparse_decode": (
        "q",
        "topk_indices",
        "topk_lengths",
        "extra_topk_indices",
        "extra_topk_lengths",
    ),
    "dense_decode": ("q", "page_table", "seq_lens"),
    "decode_branch": ("q", "kv", "topk_indices", "topk_lengths"),
}
"""Ops whose requests do not depend on each other, and the arguments that have one row for each.

Of an op with a plan they have one for each token.
"""

READ_AHEAD = {"project_heads": "weight", "decode_branch": "layer", "prefill_branch": "layer"}
"""The argument of an op that it may read before the kernel in front of it has ended."""

THREADS = 1, 2
"""Counts of a CPU's threads with which a request alone must give the bits it gives in a batch."""

NUM_SPLITS = 3
"""The fixed count of splits with which a request alone must give the bits it gives in a batch."""


@dataclass(frozen=True)
class Measured:
    """How far a result lies from the definition's.

    Args:
        result: its name.
        difference: the largest one of an element, among finite elements.
        share: the largest share of what an element may differ by.
        tolerance: what may differ; None if every bit must agree.
        failure: what is wrong, or None.
    """

    result: str
    difference: float
    share: float
    tolerance: Tolerance | None
    failure: str | None


def against_reference(
    op: str, arguments: Arguments, tolerances: tuple[Tolerance | None, ...]
) -> tuple[list[Measured], Results]:
    """Run an op on poisoned memory, then its definition; compare all results.

    Returns:
        A measurement of each result, and the results.
    """
    ours, theirs = fresh(op, arguments), fresh(op, arguments)
    with poisoned_empty():
        results = _name(op, ours, run_op(op, ours))
    expected = _name(op, theirs, run_reference(op, theirs))
    allowed = [*tolerances, *ROW_TOLERANCES.values()]
    names = [*_result_names(op)[: len(tolerances)], *(f"cache.{part}" for part in ROW_TOLERANCES)]
    sizes = sizes_of(op, arguments)
    measured = []
    for name, tolerance in zip(names, allowed, strict=True):
        if name in results:
            measured.append(_measure(name, results[name], expected[name], tolerance, sizes))
    if op in CACHE_WRITERS:
        measured.append(_other_rows(_cache(ours), _cache(arguments), _slots(arguments)))
    return measured, results


def check_reruns(op: str, arguments: Arguments, expected: Results, reruns: int) -> None:
    """Every run gives the bits of the first.

    Raises:
        AssertionError: a run gave others.
    """
    for rerun in range(reruns):
        _assert_same(f"rerun {rerun + 1}", run_named(op, fresh(op, arguments)), expected)


def check_alone(op: str, arguments: Arguments) -> None:
    """Each request alone gives the bits that it gives in the batch, for a fixed count of splits.

    Raises:
        AssertionError: a request gave others.
    """
    arguments = arguments | {"num_splits": NUM_SPLITS}
    for threads in _thread_counts(cast("Tensor", arguments["q"]).device):
        together = run_named(op, fresh(op, arguments))
        for request, (rows, own) in enumerate(_requests(op, arguments)):
            alone = run_named(op, fresh(op, own))
            expected = {name: result[rows] for name, result in together.items()}
            if op in CACHE_WRITERS:  # a request alone writes its own rows only
                slots = _slots(own)
                for name in _cache(own).fields()._asdict():
                    if (part := f"cache.{name}") in alone:
                        alone[part] = alone[part].flatten(0, 1)[slots]
                        expected[part] = together[part].flatten(0, 1)[slots]
            _assert_same(f"request {request} alone{threads}", alone, expected)


def _requests(op: str, arguments: Arguments) -> Iterator[tuple[slice, Arguments]]:
    """For each request its rows, and the arguments of a call that serves no other."""
    names = [name for name in PER_REQUEST[op] if arguments.get(name) is not None]
    plan = cast("Plan | None", arguments.get("plan"))
    count = len(cast("Tensor", arguments["q"]))
    offsets = range(count + 1) if plan is None else plan.input_row_offsets.tolist()
    for request, (first, last) in enumerate(itertools.pairwise(offsets)):
        own = {name: cast("Tensor", arguments[name])[first:last] for name in names}
        planned = {} if plan is None else {"plan": _plan_of(plan, request)}
        yield slice(first, last), arguments | own | planned


def _plan_of(plan: Plan, request: int) -> Plan:
    """The plan of a request alone."""
    return plan_batch(
        plan.input_row_offsets.diff()[request : request + 1].cpu(),
        plan.seq_lens[request : request + 1].cpu(),
        plan.page_table[request : request + 1],
        page_size=plan.page_size,
        workspace_rows=None,
        require_uniform=False,
    )


def _thread_counts(device: torch.device) -> Iterator[str]:
    """Set each count of threads in turn, where they compute; what a failure says about it."""
    if device.type != "cpu":
        yield ""
        return
    before = torch.get_num_threads()
    try:
        for count in THREADS:
            torch.set_num_threads(count)
            yield f", {count} threads"
    finally:
        torch.set_num_threads(before)


def check_replay(op: str, arguments: Arguments, others: Arguments) -> None:
    """A CUDA graph, captured over ``arguments`` and replayed over ``others``, gives the eager bits.

    Raises:
        AssertionError: the graph gave other bits.
        ValueError: the two have different shapes.
    """
    expected = run_named(op, fresh(op, others))
    graph = torch.cuda.CUDAGraph()
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    # Leaving this block restores the current stream even if the capture fails.
    with torch.cuda.stream(warm_up):
        run_named(op, arguments)
        warm_up.synchronize()
        with torch.cuda.graph(graph):
            results = run_named(op, arguments)
    for replay in range(2):
        overwrite(arguments, others)
        graph.replay()
        torch.cuda.synchronize()
        _assert_same(f"replay {replay + 1}", results, expected)


def check_late_inputs(op: str, arguments: Arguments, expected: Results) -> None:
    """What the kernel in front writes is not read before that has ended.

    Raises:
        AssertionError: the op gave other bits when its inputs came late.
    """
    from sparsemla.testing.late import bytes_of, copy_late  # needs Triton

    arguments = copy.deepcopy(arguments)
    late = {name: value for name, value in arguments.items() if name != READ_AHEAD.get(op)}
    tensors = [leaf for leaf in _leaves(late) if isinstance(leaf, Tensor) and leaf.is_cuda]
    stored = {tensor.untyped_storage().data_ptr(): bytes_of(tensor) for tensor in tensors}
    copies = [(target, target.clone()) for target in stored.values() if len(target)]
    if not copies:
        return
    for target, _ in copies:
        target.zero_()
    torch.cuda.synchronize()
    copy_late(copies, copies[0][0].device)
    _assert_same("inputs that come late", run_named(op, arguments), expected)


def overwrite(target: object, source: object) -> None:
    """Copy the memory of all tensors in ``source`` over that of those in ``target``.

    Raises:
        ValueError: they differ in a shape, a stride, or a value that is no tensor.
    """
    for old, new in zip(_leaves(target), _leaves(source), strict=True):
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            if (old.shape, old.stride(), old.dtype) != (new.shape, new.stride(), new.dtype):
                raise ValueError(
                    f"two draws of a case differ: {old.dtype} {list(old.shape)} and "
                    f"{new.dtype} {list(new.shape)}"
                )
            # Pages may hold scales behind the rows that the tensor shows.
            old.untyped_storage().copy_(new.untyped_storage())
        elif old != new:
            raise ValueError(f"two draws of a case differ: {old!r} and {new!r}")


@contextmanager
def recorded_tiers() -> Iterator[list[str]]:
    """The tiers that dispatch chooses in the block, in order and each once."""
    tiers: list[str] = []
    select = dispatch.select

    def recording(problem: dispatch.Problem) -> dispatch.Launch:
        chosen = dispatch.explain(problem).chosen
        if chosen is not None and chosen not in tiers:
            tiers.append(chosen)
        return select(problem)

    with mock.patch.object(dispatch, "select", recording):
        yield tiers


def _leaves(value: object) -> Iterator[object]:
    if is_dataclass(value) and not isinstance(value, type):
        for part in fields(value):
            yield from _leaves(getattr(value, part.name))
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _leaves(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def fresh(op: str, arguments: Arguments) -> Arguments:
    """Arguments of which the op may overwrite what it does overwrite."""
    return copy.deepcopy(arguments) if op in OVERWRITING else arguments


def run_named(op: str, arguments: Arguments) -> Results:
    """The results of an op by their names."""
    return _name(op, arguments, run_op(op, arguments))


def _result_names(op: str) -> tuple[str, ...]:
    return (op in dispatch.OPS and dispatch.OPS[op].outputs) or ("out",)


def _name(op: str, arguments: Arguments, results: tuple[Tensor, ...]) -> Results:
    named = dict(zip(_result_names(op), results, strict=False))
    if op in CACHE_WRITERS:
        for part, rows in _cache(arguments).fields()._asdict().items():
            if rows is not None:
                named[f"cache.{part}"] = rows
    return named


def _cache(arguments: Arguments) -> PagedCache:
    return cast("PagedCache", arguments["cache"])


def _slots(arguments: Mapping[str, Any]) -> Tensor:
    """Slots that an op with a cache may write."""
    slots = arguments["plan"].slot_mapping if "plan" in arguments else arguments["slot_mapping"]
    return slots[slots >= 0].long()


def _measure(
    name: str,
    actual: Tensor,
    expected: Tensor,
    tolerance: Tolerance | None,
    sizes: Tensor | None,
) -> Measured:
    failure, share = None, 0.0
    try:
        assert_result(name, actual, expected, tolerance, sizes)
    except AssertionError as error:
        failure = str(error)
    same_shape = actual.shape == expected.shape
    difference = largest_difference(actual, expected) if same_shape else 0.0
    if tolerance is not None and same_shape:
        share = worst_share(actual, expected, tolerance, sizes)
    return Measured(name, difference, share, tolerance, failure)


def _other_rows(written: PagedCache, before: PagedCache, slots: Tensor) -> Measured:
    """Rows that no slot names keep every bit."""
    others = torch.ones(written.num_slots, dtype=torch.bool, device=slots.device)
    others[slots] = False
    name, failure, difference = "cache, other rows", None, 0.0
    for got, was in zip(written.fields(), before.fields(), strict=True):
        if got is not None and was is not None:
            got, was = got.flatten(0, 1)[others], was.flatten(0, 1)[others]
            difference = max(difference, largest_difference(got, was))
            try:
                assert_equal(name, got, was)
            except AssertionError as error:
                failure = str(error)
    return Measured(name, difference, 0.0, None, failure)


def _assert_same(when: str, results: Results, expected: Results) -> None:
    for name, result in results.items():
        assert_equal(f"{when}, {name}", result, expected[name])

"""The checks of a case: accuracy, empty rows, repeatability, CUDA graph replay, batch invariance.

Results are named tensors: the op's return values, and the fields of a cache that the op writes.
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
from sparsemla.kernels.common.table import Kernel, Op
from sparsemla.kernels.repeat import unrepeated
from sparsemla.plan import Plan, plan_batch
from sparsemla.pooling import WindowState
from sparsemla.residency import RowTable
from sparsemla_lab.testing.cases import Arguments
from sparsemla_lab.testing.compare import (
    FLOAT32_ULPS,
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
from sparsemla_lab.testing.poison import poisoned_empty

Results = dict[str, Tensor]

CACHE_WRITERS = (
    "fused_rope_rmsnorm_quant",
    "append_index_keys",
    "fused_indexer_rope_quant",
    "pool_windows",
    "decode_branch",
    "prefill_branch",
)

OVERWRITING = (*CACHE_WRITERS, "gather_dequant", "resolve_rows", "fetch_rows", "forget_seats")
"""Ops that overwrite arguments; each run gets copies of its arguments."""

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
"""Batch-invariant ops, and their arguments with one row per request.

The arguments of ops with a plan have one row per token.
"""

READ_AHEAD = {
    "project_heads": "weight",
    "project_groups": "weight",
    "decode_branch": "layer",
    "prefill_branch": "layer",
}
"""Arguments that an op may read before the previous kernel ends."""

THREADS = 1, 2
"""Numbers of CPU threads to check batch invariance with."""

NUM_SPLITS = 3
"""Number of splits to check batch invariance with."""


@dataclass(frozen=True)
class Measured:
    """The difference of a result from the reference.

    Args:
        result: name of the result.
        difference: largest absolute difference of a finite element.
        share: largest ratio of an element's difference to its limit.
        tolerance: limits of the difference; None if every bit must agree.
        failure: error message, or None.
    """

    result: str
    difference: float
    share: float
    tolerance: Tolerance | None
    failure: str | None


def against_reference(
    op: str, arguments: Arguments, tolerances: tuple[Tolerance | None, ...]
) -> tuple[list[Measured], Results]:
    """Run an op on poisoned memory, then its reference, and compare all results.

    Returns:
        The difference of each result, and the op's results.
    """
    op_arguments, reference_arguments = fresh(op, arguments), fresh(op, arguments)
    with poisoned_empty():
        results = _name(op, op_arguments, run_op(op, op_arguments))
    expected = _name(op, reference_arguments, run_reference(op, reference_arguments))
    limits = [*tolerances, *ROW_TOLERANCES.values(), FLOAT32_ULPS]
    names = [*_result_names(op)[: len(tolerances)], *(f"cache.{field}" for field in ROW_TOLERANCES)]
    names += ["state"]
    sizes = sizes_of(op, arguments)
    measured = []
    for index, (name, tolerance) in enumerate(zip(names, limits, strict=True)):
        if name in results:
            got, wanted = results[name], expected[name]
            measured.append(_measure(name, got, wanted, tolerance, sizes.get(index)))
    measured += [
        _measure(name, results[name], expected[name], None, None)
        for name in results
        if name.startswith(("table.", "target.", "stats"))
    ]
    if op in CACHE_WRITERS:
        measured.append(_other_rows(_cache(op_arguments), _cache(arguments), _slots(arguments)))
    return measured, results


def check_reruns(op: str, arguments: Arguments, expected: Results, reruns: int) -> None:
    """Check that every rerun gives the same bits as the first run.

    Raises:
        AssertionError: a rerun differs.
    """
    for rerun in range(reruns):
        _assert_same(f"rerun {rerun + 1}", run_named(op, fresh(op, arguments)), expected)


def check_alone(op: str, arguments: Arguments) -> None:
    """Check that each request alone gives the same bits as in the batch, with given splits.

    Raises:
        AssertionError: a request differs.
    """
    arguments = {"num_splits": NUM_SPLITS} | arguments
    for threads in _thread_counts(cast("Tensor", arguments["q"]).device):
        batch = run_named(op, fresh(op, arguments))
        for request, (rows, single) in enumerate(_requests(op, arguments)):
            alone = run_named(op, fresh(op, single))
            expected = {name: result[rows] for name, result in batch.items()}
            if op in CACHE_WRITERS:  # compare the rows of this request only
                slots = _slots(single)
                for field in _cache(single).fields()._asdict():
                    if (name := f"cache.{field}") in alone:
                        alone[name] = alone[name].flatten(0, 1)[slots]
                        expected[name] = batch[name].flatten(0, 1)[slots]
            _assert_same(f"request {request} alone{threads}", alone, expected)


def check_empty_rows(results: Results) -> None:
    """Check that a row without a valid key, whose LSE is -inf, is exactly 0.

    Raises:
        AssertionError: an element of such a row is not 0.
    """
    rows = results["out"][results["lse"].isneginf()]
    assert_equal("rows without a key", rows + 0.0, torch.zeros_like(rows))  # -0.0 is 0, too


def check_permission(op: str, arguments: Arguments, expected: Results) -> None:
    """Check that a kernel without FP8 MMAs gives the same bits whether they are permitted or not.

    Raises:
        AssertionError: a result differs.
    """
    arguments = arguments | {"allow_fp8_mma": False}
    _assert_same("without FP8 MMA", run_named(op, fresh(op, arguments)), expected)


def _requests(op: str, arguments: Arguments) -> Iterator[tuple[slice, Arguments]]:
    """For each request its rows in the batch, and the arguments of a call for it alone."""
    names = [name for name in PER_REQUEST[op] if arguments.get(name) is not None]
    plan = cast("Plan | None", arguments.get("plan"))
    count = len(cast("Tensor", arguments["q"]))
    offsets = range(count + 1) if plan is None else plan.input_row_offsets.tolist()
    for request, (first, last) in enumerate(itertools.pairwise(offsets)):
        single: Arguments = {name: cast("Tensor", arguments[name])[first:last] for name in names}
        if plan is not None:
            single["plan"] = _plan_of(plan, request)
        yield slice(first, last), arguments | single


def _plan_of(plan: Plan, request: int) -> Plan:
    """The plan of a batch with this request alone."""
    return plan_batch(
        plan.input_row_offsets.diff()[request : request + 1].cpu(),
        plan.seq_lens[request : request + 1].cpu(),
        plan.page_table[request : request + 1],
        page_size=plan.page_size,
        workspace_rows=None,
        require_uniform=False,
    )


def _thread_counts(device: torch.device) -> Iterator[str]:
    """Set each number of CPU threads in turn; yields a suffix for error messages."""
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
    """Check that a CUDA graph captured with ``arguments`` and replayed with ``others`` is exact.

    Raises:
        AssertionError: the replay differs from an eager run with ``others`` in any bit.
        ValueError: the two sets of arguments have different shapes.
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
    """Check that the op waits for the previous kernel before it reads inputs written by it.

    Raises:
        AssertionError: delayed inputs changed a result.
    """
    from sparsemla_lab.testing.late import bytes_of, copy_late  # needs Triton

    arguments = copy.deepcopy(arguments)
    late = {name: value for name, value in arguments.items() if name != READ_AHEAD.get(op)}
    tensors = [leaf for leaf in _leaves(late) if isinstance(leaf, Tensor) and leaf.is_cuda]
    storages = {tensor.untyped_storage().data_ptr(): bytes_of(tensor) for tensor in tensors}
    copies = [(target, target.clone()) for target in storages.values() if len(target)]
    if not copies:
        return
    for target, _ in copies:
        target.zero_()
    torch.cuda.synchronize()
    copy_late(copies, copies[0][0].device)
    _assert_same("delayed inputs", run_named(op, arguments), expected)


def overwrite(target: object, source: object) -> None:
    """Copy the storage of each tensor in ``source`` to its counterpart in ``target``.

    Raises:
        ValueError: the two differ in a shape, a stride, a dtype or another value.
    """
    for old, new in zip(_leaves(target), _leaves(source), strict=True):
        if isinstance(old, Tensor) and isinstance(new, Tensor):
            if (old.shape, old.stride(), old.dtype) != (new.shape, new.stride(), new.dtype):
                raise ValueError(
                    f"two draws of a case differ: {old.dtype} {list(old.shape)} and "
                    f"{new.dtype} {list(new.shape)}"
                )
            # Copy whole storages: pages may have scales after the rows that the tensor covers.
            old.untyped_storage().copy_(new.untyped_storage())
        elif old != new:
            raise ValueError(f"two draws of a case differ: {old!r} and {new!r}")


@contextmanager
def recorded_tiers() -> Iterator[list[str]]:
    """The distinct tiers that dispatch chooses inside the block, in order."""
    tiers: list[str] = []
    choose = dispatch.choose

    def recording(op: Op[Any], call: tuple[Any, ...]) -> Kernel[Any]:
        kernel = choose(op, call)
        if kernel.tier not in tiers:
            tiers.append(kernel.tier)
        return kernel

    with unrepeated(), mock.patch.object(dispatch, "choose", recording):
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
    """The arguments, copied if the op overwrites some of them."""
    return copy.deepcopy(arguments) if op in OVERWRITING else arguments


def run_named(op: str, arguments: Arguments) -> Results:
    """Run an op; returns its results by name."""
    return _name(op, arguments, run_op(op, arguments))


def _result_names(op: str) -> tuple[str, ...]:
    return (op in dispatch.OPS and dispatch.OPS[op].outputs) or ("out",)


def _name(op: str, arguments: Arguments, results: tuple[Tensor, ...]) -> Results:
    named = dict(zip(_result_names(op), results, strict=False))
    if op in CACHE_WRITERS:
        for field, rows in _cache(arguments).fields()._asdict().items():
            if rows is not None:
                named[f"cache.{field}"] = rows
    if isinstance(state := arguments.get("state"), WindowState):
        named["state"] = state.rows
    if isinstance(table := arguments.get("table"), RowTable):
        named |= {"table.keys": table.keys, "table.rows": table.rows, "table.order": table.order}
    if isinstance(stats := arguments.get("stats"), Tensor):
        named["stats"] = stats
    if isinstance(target := arguments.get("target"), PagedCache):
        for kind, rows in zip(("rows", "scales"), target.stored_bytes(), strict=False):
            named[f"target.{kind}"] = rows
    return named


def _cache(arguments: Arguments) -> PagedCache:
    return cast("PagedCache", arguments["cache"])


def _slots(arguments: Mapping[str, Any]) -> Tensor:
    """The slots that an op writes."""
    slots = arguments["plan"].slot_mapping if "plan" in arguments else arguments["slot_mapping"]
    written = slots >= 0
    if "pooling" in arguments:  # only tokens that close a window
        written &= (arguments["positions"] + 1) % arguments["pooling"].ratio == 0
    return slots[written].long()


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
    """Compare the rows that the op must not write with their bits before the call."""
    others = torch.ones(written.num_slots, dtype=torch.bool, device=slots.device)
    others[slots] = False
    name, failure, difference = "cache, other rows", None, 0.0
    for got, expected in zip(written.fields(), before.fields(), strict=True):
        if got is not None and expected is not None:
            got, expected = got.flatten(0, 1)[others], expected.flatten(0, 1)[others]
            difference = max(difference, largest_difference(got, expected))
            try:
                assert_equal(name, got, expected)
            except AssertionError as error:
                failure = str(error)
    return Measured(name, difference, 0.0, None, failure)


def _assert_same(when: str, results: Results, expected: Results) -> None:
    for name, result in results.items():
        assert_equal(f"{when}, {name}", result, expected[name])

"""Comparison of an implementation with the reference, element by element and as a whole.

Two tiers, as in DeepGEMM's tests: tight against the reference on the same, dequantised inputs;
loose against unquantised inputs, which checks the format and not the implementation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsemla import ops, reference
from sparsemla.cache import PagedCache
from sparsemla.testing.poison import poisoned_empty

SHOWN = 5
"""Differing elements that an error message lists."""


@dataclass(frozen=True)
class Tolerance:
    """What may differ.

    Args:
        abs: an element passes if ``|actual - expected| < abs`` ...
        rel: ... or ``|actual - expected| / (|expected| + 1e-6) < rel``.
        cos: limit of :func:`cosine_difference` of the whole tensors.
    """

    abs: float = math.inf
    rel: float = math.inf
    cos: float = 1e-7


# FlashMLA's tolerances: bfloat16 outputs of float32 accumulation, where the rounding of the
# probabilities and of the result to 8 bits allows a few times 2^-8 an element.
SPARSE_PREFILL_OUT = Tolerance(8e-4, 3.01 / 128, 7e-6)
SPARSE_PREFILL_LSE = Tolerance(1e-6, 2.01 / 65536)
SPARSE_PREFILL_MAX_LOGITS = Tolerance(1e-6, 2.01 / 65536)
SPARSE_DECODE_OUT = Tolerance(1e-3, 2.01 / 128, 5e-6)
DENSE_DECODE_OUT = Tolerance(8e-4, 2.01 / 128, 5e-6)
DECODE_LSE = Tolerance(1e-6, 8.01 / 65536)
DENSE_PREFILL_OUT = Tolerance(1e-3, 8.01 / 128, 7e-6)
DENSE_PREFILL_LSE = Tolerance(1e-6, 2.01 / 65536)

# Sums that every order computes alike; zeros may differ in sign.
EXACT = Tolerance(1e-30, 1e-30, 0)

# DeepGEMM's tolerances of indexer scores, float32 sums in another order, and FP8 against no FP8.
INDEXER_SCORES = Tolerance(cos=5e-6)
UNQUANTIZED_SCORES = Tolerance(cos=1e-3)

# One rounding to bfloat16 of a float32 sum of the same products.
PROJECTION = Tolerance(1e-3, 1.01 / 128, 5e-6)
# Hopper's FP8 unit keeps 14 bits of a sum (DeepSeek-V3, section 3.3.2): some 2^-13 of a partial sum
# of up to 4, for each of up to 4 blocks, where terms cancel.
FP8_PROJECTION = Tolerance(2e-3, 1.01 / 128, 5e-6)
# DeepGEMM's FP8 products against products of the unquantised operands.
UNQUANTIZED_PROJECTION = Tolerance(cos=1e-3)

# Absorbed query, probabilities, attended latent and output are each rounded to bfloat16. Outputs
# are of order 1, so that an element's error is a few 2^-8 of its vector and not of itself.
BRANCH_OUT = Tolerance(2e-2, 4.01 / 128, 2e-5)
# An input that lies between two e4m3 codes may round the other way in FP8 projections.
BRANCH_FP8_OUT = Tolerance(cos=1e-3)

# Rotation and norm in float32 and one rounding, which a last bit may tip over.
BFLOAT16_ULP = Tolerance(1e-6, 1.01 / 128, 1e-6)
FLOAT32_ULPS = Tolerance(1e-6, 8.01 / 2**23)
E4M3_STEP = Tolerance(1.01 * 2**-9, 1.01 / 8, 1e-4)


TOLERANCES: dict[str, tuple[Tolerance | None, ...]] = {
    "fused_rope_rmsnorm_quant": (BFLOAT16_ULP, BFLOAT16_ULP),
    "fused_indexer_rope_quant": (E4M3_STEP, FLOAT32_ULPS),
    "append_index_keys": (),
    "prepare_index_queries": (E4M3_STEP, FLOAT32_ULPS),
    "gather_dequant": (None,),
    "to_slots": (None,),
    "select_topk": (None,),
    "merge_topk": (None,),
    "indexer_topk": (None,),
    "indexer_scores": (INDEXER_SCORES,),
    "indexer_scores_paged": (INDEXER_SCORES,),
    "sparse_prefill": (SPARSE_PREFILL_OUT, SPARSE_PREFILL_LSE, SPARSE_PREFILL_MAX_LOGITS),
    "sparse_decode": (SPARSE_DECODE_OUT, DECODE_LSE),
    "dense_decode": (DENSE_DECODE_OUT, DECODE_LSE),
    "dense_prefill": (DENSE_PREFILL_OUT, DENSE_PREFILL_LSE),
    "merge_states": (SPARSE_DECODE_OUT, DECODE_LSE),
    "project_heads": (PROJECTION,),
    "decode_branch": (BRANCH_OUT,),
    "prefill_branch": (BRANCH_OUT,),
}
"""For each result of an op its tolerance; None where every bit must agree."""

ROW_TOLERANCES = {"scales": FLOAT32_ULPS, "bf16": BFLOAT16_ULP, "fp8": E4M3_STEP}
"""For each part of a written cache row its tolerance."""


def check_op(
    op: str, arguments: Mapping[str, object], tolerances: tuple[Tolerance | None, ...] | None = None
) -> tuple[Tensor, ...]:
    """Run a public op, then its reference, on the same arguments, and compare the results.

    The op runs first, on memory that :func:`poisoned_empty` has filled, so that nothing the
    reference leaves behind can help it.

    Args:
        op: name of the op.
        arguments: all arguments that the op and its reference share.
        tolerances: one for each result, instead of the op's in :data:`TOLERANCES`.

    Returns:
        The op's results.

    Raises:
        AssertionError: a result differs; the message names it.
    """
    with poisoned_empty():
        results = run_op(op, arguments)
    expected = run_reference(op, arguments)
    for index, (got, wanted, tolerance) in enumerate(
        zip(results, expected, tolerances or TOLERANCES[op], strict=True)
    ):
        name = f"{op}[{index}]"
        if tolerance is None:
            assert_equal(name, got, wanted)
        else:
            assert_close(name, got, wanted, tolerance)
    return results


def run_op(op: str, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """All results of a public op, the one that it computes only if asked to among them.

    ``out_dtype`` among the arguments is that of the ``out`` which ``sparse_prefill`` is given.
    """
    if op != "sparse_prefill":
        results = _as_tuple(getattr(ops, op)(**arguments))
        kv_out = arguments.get("kv_out")
        return results if kv_out is None else (*results, kv_out)
    q = arguments["q"]
    max_logits = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    arguments = {"max_logits": max_logits} | dict(arguments)
    if dtype := arguments.pop("out_dtype", None):
        kv = arguments["kv"]
        fmt = (kv if isinstance(kv, PagedCache) else PagedCache.from_rows(kv)).format
        shape = *q.shape[:2], fmt.value_dim
        arguments["out"] = torch.empty(shape, dtype=dtype, device=q.device)
    return *ops.sparse_prefill(**arguments), max_logits


def run_reference(op: str, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """All results of an op's definition."""
    arguments = {name: value for name, value in arguments.items() if name != "out_dtype"}
    if op != "fused_rope_rmsnorm_quant":
        return _as_tuple(getattr(reference, op)(**arguments))
    # Its tolerances are for results that are rounded as the op's are.
    arguments = {name: value for name, value in arguments.items() if name != "kv_out"}
    queries, rows = reference.fused_rope_rmsnorm_quant(**arguments)
    return queries.to(arguments["q_rope"].dtype), rows.bfloat16()


def _as_tuple(results: Tensor | tuple[Tensor, ...] | None) -> tuple[Tensor, ...]:
    if results is None:
        return ()
    return results if isinstance(results, tuple) else (results,)


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """``max |actual - expected|`` over the elements that are finite in both, 0 if none is.

    >>> largest_difference(torch.tensor([1.0, math.inf]), torch.tensor([1.5, 0.0]))
    0.5
    """
    a, b = actual.double(), expected.double()
    difference = (a - b).abs()[a.isfinite() & b.isfinite()]
    return float(difference.max()) if difference.numel() else 0.0


def cosine_difference(actual: Tensor, expected: Tensor) -> float:
    """``1 - 2 <a, b> / (<a, a> + <b, b>)`` in float64, 0 where both are (nearly) zero.

    >>> cosine_difference(torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0]))
    1.0
    """
    a, b = actual.double(), expected.double()
    norms = float((a * a).sum() + (b * b).sum())
    return 0.0 if norms < 1e-12 else 1 - 2 * float((a * b).sum()) / norms


def assert_close(name: str, actual: Tensor, expected: Tensor, tolerance: Tolerance) -> None:
    """Check a tensor against its reference.

    Shapes are equal; NaN, +inf and -inf stand at the same places; each element is near in absolute
    or relative terms; and so are the tensors as a whole.

    Raises:
        AssertionError: naming the tensor, the coordinates and both values.
    """
    _check_shapes(name, actual, expected)
    a, b = actual.double(), expected.double()
    for kind, same in (
        ("NaN", a.isnan() == b.isnan()),
        ("+inf", a.isposinf() == b.isposinf()),
        ("-inf", a.isneginf() == b.isneginf()),
    ):
        if not bool(same.all()):
            raise AssertionError(f"{name}: {kind} elsewhere\n{_show(~same, actual, expected)}")
    finite = a.isfinite()
    a, b = a.where(finite, 0), b.where(finite, 0)
    difference = (a - b).abs()
    near = (difference < tolerance.abs) | (difference / (b.abs() + 1e-6) < tolerance.rel)
    if not bool(near.all()):
        raise AssertionError(
            f"{name}: {int((~near).sum())} of {near.numel()} elements differ by more than "
            f"{tolerance}\n{_show(~near, actual, expected)}"
        )
    cos = cosine_difference(a, b)
    if abs(cos) > tolerance.cos:
        raise AssertionError(f"{name}: cosine difference {cos:.3e} is above {tolerance.cos:.3e}")


def assert_equal(name: str, actual: Tensor, expected: Tensor) -> None:
    """Check that dtype, shape and every bit agree, NaN's payload and the sign of zero included.

    Raises:
        AssertionError: naming the tensor, the coordinates and both values.
    """
    if actual.dtype != expected.dtype:
        raise AssertionError(f"{name}: dtype {actual.dtype}, expected {expected.dtype}")
    _check_shapes(name, actual, expected)
    differ = _bits(actual) != _bits(expected)
    if bool(differ.any()):
        raise AssertionError(
            f"{name}: {int(differ.sum())} of {differ.numel()} elements differ\n"
            f"{_show(differ, actual, expected)}"
        )


def assert_selection(
    name: str, actual: Tensor, scores: Tensor, topk: int, tolerance: float = 1e-5
) -> None:
    """Check a top-k selection whose scores were summed in another order than ``scores``.

    Ids ascend, then -1; there are ``min(topk, columns above -inf)`` of them or more; and no score
    left out exceeds a chosen one by more than ``tolerance``, relative to the row's largest.

    Args:
        name: what an error message calls the selection.
        actual: int32 ``[R, topk]``.
        scores: float32 ``[R, N]``, -inf where a row may not choose.
        topk: k.
        tolerance: how far two scores may lie apart and count as tied.
    """
    for row, (ids, values) in enumerate(zip(actual.tolist(), scores, strict=True)):
        chosen = [i for i in ids if i >= 0]
        size = min(topk, int((values > -torch.inf).sum()))
        if chosen != sorted(set(chosen)) or ids != chosen + [-1] * (topk - len(chosen)):
            raise AssertionError(f"{name}: row {row} does not ascend and end in -1: {ids}")
        if len(chosen) < size:
            raise AssertionError(f"{name}: row {row} has {len(chosen)} ids, expected {size}")
        left_out = values.clone()
        left_out[chosen] = -torch.inf
        if not chosen or len(chosen) == values.numel():
            continue
        slack = tolerance * float(values[values.isfinite()].abs().max())
        worst, best = values[chosen].min(), left_out.max()
        if best > worst + slack:
            raise AssertionError(
                f"{name}: row {row} left out id {int(left_out.argmax())} with score {best} "
                f"and chose one with score {worst}"
            )


def assert_rows_close(name: str, actual: PagedCache, expected: PagedCache) -> None:
    """Check two caches, one written by an implementation, one by the reference.

    Scales and bytes of what was not written agree bit for bit. A value that a last float32 bit
    tipped over a rounding border may be one step off; no more than 1% of the codes are.
    """
    got, wanted = actual.fields()._asdict(), expected.fields()._asdict()
    for part, tolerance in ROW_TOLERANCES.items():
        if got[part] is None or wanted[part] is None:
            continue
        assert_close(f"{name}.{part}", got[part].float(), wanted[part].float(), tolerance)
        if part == "fp8":
            assert_few_differ(f"{name}.fp8", got[part], wanted[part])


def assert_few_differ(name: str, actual: Tensor, expected: Tensor, share: float = 0.01) -> None:
    """Check that no more than ``share`` of the elements differ in any bit.

    Raises:
        AssertionError: naming the tensor, the coordinates and both values.
    """
    _check_shapes(name, actual, expected)
    differ = _bits(actual) != _bits(expected)
    if int(differ.sum()) > share * differ.numel():
        raise AssertionError(
            f"{name}: {int(differ.sum())} of {differ.numel()} elements differ, more than "
            f"{share:.0%}\n{_show(differ, actual, expected)}"
        )


def _check_shapes(name: str, actual: Tensor, expected: Tensor) -> None:
    if actual.shape != expected.shape:
        raise AssertionError(f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}")


def _bits(tensor: Tensor) -> Tensor:
    widths = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.contiguous().view(widths[tensor.dtype.itemsize])


def _show(wrong: Tensor, actual: Tensor, expected: Tensor) -> str:
    """The first wrong elements: coordinates, value, expected value."""
    lines = []
    for at in wrong.nonzero()[:SHOWN].tolist():
        index = tuple(at)
        got, wanted = actual[index].double().item(), expected[index].double().item()
        lines.append(f"  at {at}: got {got:.9g}, expected {wanted:.9g}")
    return "\n".join(lines)

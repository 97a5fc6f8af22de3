"""Comparison of an implementation with the reference, element by element and as a whole.

Two tiers, as in DeepGEMM's tests: tight against the reference on the same, dequantised inputs;
loose against unquantised inputs, which checks the format and not the implementation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsemla import ops, reference
from sparsemla.cache import PagedCache
from sparsemla.formats import bf16_format
from sparsemla.testing.poison import poisoned_empty

SHOWN = 5
"""Differing elements that an error message lists."""


@dataclass(frozen=True)
class Tolerance:
    """What may differ: an element passes by ``abs``, ``rel`` or ``size``.

    Args:
        abs: ``|actual - expected| <= abs``.
        rel: ``|actual - expected| <= rel * |expected|``.
        cos: limit of :func:`cosine_difference` of the whole tensors.
        size: ``|actual - expected| <= size * sizes``, for elements whose terms cancel out. Each
            size is by default the root mean square of the element's vector along the last dim.
    """

    abs: float = 0
    rel: float = 0
    cos: float = 1e-7
    size: float = 0


# Attention in bfloat16. Rounding of the probabilities, and of keys with scales that are no powers
# of two, moves each term by at most 2^-9 of itself, to either side: that is at most 2^-9.8 (its
# deviation) of a vector's root mean square, of which 2^-7 is seven. Rounding of the result moves
# an element by up to 2^-8 of itself. Twice the larger of both is more than their sum. Numbers of
# float16 are never closer than 2^-24.
_ATTENTION_OUT = Tolerance(2**-24, rel=2.01 / 128, cos=5e-6, size=2**-6)
# Logarithms of sums of float32 exponentials. One key more or less among 2048 is 2^-11.
_ATTENTION_LSE = Tolerance(1e-6, 2.01 / 65536)

SPARSE_PREFILL_OUT = _ATTENTION_OUT
SPARSE_PREFILL_LSE = _ATTENTION_LSE
SPARSE_PREFILL_MAX_LOGITS = _ATTENTION_LSE
SPARSE_DECODE_OUT = _ATTENTION_OUT
DENSE_DECODE_OUT = _ATTENTION_OUT
DECODE_LSE = _ATTENTION_LSE
DENSE_PREFILL_OUT = _ATTENTION_OUT
DENSE_PREFILL_LSE = _ATTENTION_LSE

# Sums that every order computes alike; zeros may differ in sign.
EXACT = Tolerance(cos=0)

# Sizes are those of score_sizes: a score if its products had random signs. Hopper's FP8 unit aligns
# the 32 products of an instruction, and the sum so far, to the largest of them and keeps 14 bits
# (DeepSeek-V3, section 3.3.2). Products of e4m3 have 8 bits, so that only those 2^-6 times as large
# or less lose some: a few times 2^-14 of the largest, which is about the size of the whole, in each
# of four steps for 128 dims: a deviation of 2^-13 or so. Over 10^9 scores the worst is six
# deviations off, and 2^-9 is sixteen. Where products agree in sign, partial sums are larger than
# sizes, and so is the score.
INDEXER_SCORES = Tolerance(rel=2**-9, cos=1e-6, size=2**-9)
# Rounding to e4m3 moves queries and keys by 2^-5.2 of themselves (its deviation), products by
# 2^-4.7: five deviations, and the deviation squared for the whole.
UNQUANTIZED_SCORES = Tolerance(cos=1e-3, size=0.2)

# One rounding to bfloat16 of a float32 sum of the same products.
PROJECTION = Tolerance(rel=1.01 / 128, cos=5e-6, size=2**-10)
# As for scores, but with a sum of its own for each block of 128 inputs.
FP8_PROJECTION = Tolerance(rel=1.01 / 128, cos=5e-6, size=2**-9)
# As for scores that are not quantised: both factors of each product are rounded to e4m3.
UNQUANTIZED_PROJECTION = Tolerance(cos=1e-3, size=0.2)

# Absorbed query, probabilities, attended latent and output are each rounded to bfloat16. A query's
# error of 2^-9.8 (its deviation) is that of its scores' products, of size 4 mostly and of size 9 in
# one of 10^4 vectors, and hence 2^-6.6 of that one's probabilities (the others' roundings were
# measured at 2^-9 of it): four and a half such deviations of the vector.
BRANCH_OUT = Tolerance(rel=2.01 / 128, cos=2e-5, size=3 * 2**-6)
# Latents that differ by 2^-8.5 round to other e4m3 codes, which are 2^-3.5 apart, in one place of
# 32: a deviation of 2^-6 of the vector, and half its square of the whole. Eight deviations.
BRANCH_FP8_OUT = Tolerance(rel=2.01 / 128, cos=4e-4, size=2**-3)
# Latents that were merged from parts differ by float32 roundings. Few round to another bfloat16,
# few of those to another e4m3 code: two that do, each three times as large as the mean.
MERGED_FP8_PROJECTION = Tolerance(rel=2.01 / 128, cos=5e-6, size=2**-5)

# Rotation and norm in float32 and one rounding, which a last bit may tip over.
BFLOAT16_ULP = Tolerance(1e-6, 1.01 / 128, 1e-6)
FLOAT32_ULPS = Tolerance(rel=8.01 / 2**23, size=8.01 / 2**23)
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
        assert_result(f"{op}[{index}]", got, wanted, tolerance, sizes_of(op, arguments))
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


def sizes_of(op: str, arguments: Mapping[str, Any]) -> Tensor | None:
    """:func:`score_sizes` for ops that return scores."""
    return score_sizes(op, arguments) if op.startswith("indexer_scores") else None


def score_sizes(op: str, arguments: Mapping[str, Any]) -> Tensor:
    """The size of each score, of which its error is a part.

    ``key_scales[n] * sqrt(sum_hd (weights[m, h] * q[m, h, d] * keys[n, d])^2)``, which is the
    score's definition over squares.
    """
    squares = dict(arguments)
    for name in ("q", "weights", "keys", "key_scales"):
        if arguments.get(name) is not None:
            squares[name] = arguments[name].float().square()
    if op == "indexer_scores_paged":
        cache = arguments["cache"]
        slots = torch.arange(cache.num_slots, device=arguments["q"].device)
        squares["cache"] = PagedCache.allocate(
            bf16_format(cache.format.head_dim),
            cache.num_pages,
            cache.page_size,
            device=slots.device,
        )
        squares["cache"].write(slots, cache.read(slots).float().square())
    (sizes,) = run_reference(op, squares)
    return sizes.where(sizes.isfinite(), 0).sqrt()


def worst_share(
    actual: Tensor, expected: Tensor, tolerance: Tolerance, sizes: Tensor | None = None
) -> float:
    """The largest difference of an element as a share of what it may be, 1 if it just passes.

    >>> worst_share(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0]), Tolerance(abs=1))
    0.5
    """
    a, b = actual.double(), expected.double()
    finite = a.isfinite() & b.isfinite()
    difference = (a - b).abs()[finite]
    # An op that is exact may differ by nothing, and JSON has no infinity.
    shares = difference / _limits(expected, tolerance, sizes)[finite].clamp_min(1e-30)
    return float(shares.max()) if shares.numel() else 0.0


def _limits(expected: Tensor, tolerance: Tolerance, sizes: Tensor | None) -> Tensor:
    """How far each element may be off; any number where ``expected`` is not finite."""
    b = expected.double()
    b = b.where(b.isfinite(), 0)
    if sizes is None:
        sizes = b.square().mean(-1, keepdim=True).sqrt() if b.dim() else b.abs()
    limits = torch.maximum(tolerance.rel * b.abs(), tolerance.size * sizes.double())
    return limits.clamp_min(tolerance.abs)


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """``max |actual - expected|`` over the elements that are finite in both, 0 if none is.

    >>> largest_difference(torch.tensor([1.0, torch.inf]), torch.tensor([1.5, 0.0]))
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


def assert_close(
    name: str,
    actual: Tensor,
    expected: Tensor,
    tolerance: Tolerance,
    sizes: Tensor | None = None,
) -> None:
    """Check a tensor against its reference.

    Shapes are equal; NaN, +inf and -inf stand at the same places; each element is near; and so are
    the tensors as a whole.

    Args:
        name: what an error message calls the tensor.
        actual: what is checked.
        expected: the reference.
        tolerance: what may differ.
        sizes: those of the tolerance, one for each element.

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
    near = (a - b).abs() <= _limits(b, tolerance, sizes)
    if not bool(near.all()):
        raise AssertionError(
            f"{name}: {int((~near).sum())} of {near.numel()} elements differ by more than "
            f"{tolerance}\n{_show(~near, actual, expected)}"
        )
    cos = cosine_difference(a, b)
    if abs(cos) > tolerance.cos:
        raise AssertionError(f"{name}: cosine difference {cos:.3e} is above {tolerance.cos:.3e}")


def assert_result(
    name: str,
    actual: Tensor,
    expected: Tensor,
    tolerance: Tolerance | None,
    sizes: Tensor | None = None,
) -> None:
    """Check a result of an op: every bit without a tolerance, few codes off by a step in one byte.

    Raises:
        AssertionError: naming the tensor, the coordinates and both values.
    """
    if tolerance is None:
        assert_equal(name, actual, expected)
        return
    assert_close(name, actual, expected, tolerance, sizes)
    if actual.dtype.itemsize == 1:
        assert_few_differ(name, actual, expected)


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

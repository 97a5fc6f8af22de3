"""Comparison of results with the reference, per element and for the whole tensor.

As in DeepGEMM's tests, there are two sets of tolerances: tight ones against the reference on the
same, dequantised inputs, and loose ones against unquantised inputs. The loose ones check the format
and not the implementation.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsemla import explain, ops, reference
from sparsemla.cache import PagedCache
from sparsemla.formats import bf16_format, ceil_pow2, fp8_scales, from_e2m1
from sparsemla.reference.attention import attend, value_share
from sparsemla.reference.lists import lists_of_tokens
from sparsemla.reference.losses import dense_distributions, listed_rows
from sparsemla.reference.prefill import round_rows
from sparsemla.reference.sparse_attention import weights_of_entries
from sparsemla_lab.testing.poison import poisoned_empty

SHOWN = 5
"""Number of differing elements in an error message."""


@dataclass(frozen=True)
class Tolerance:
    """Limits of a difference. An element passes if ``abs``, ``rel`` or ``size`` allows it.

    ``|actual - expected| <= max(abs, rel * |expected|, size * sizes)``

    Args:
        abs: absolute limit.
        rel: limit relative to the expected value.
        cos: limit of :func:`cosine_difference` of the whole tensors.
        size: limit relative to the size of an element's terms, which may cancel out. By default
            the size is the root mean square of the element's vector along the last dim.
    """

    abs: float = 0
    rel: float = 0
    cos: float = 1e-7
    size: float = 0


# Attention in bfloat16. Rounding P, and keys with scales that are not powers of two, changes each
# term by at most a factor 1 ± 2^-8. The error of a vector then has a standard deviation of at most
# 2^-8.8 of its root mean square, and 2^-6 is seven standard deviations. Rounding the result changes
# an element by at most 2^-8 of itself, a quarter of its limit. An element passes by the larger of
# both limits. The spacing of float16 is at least 2^-24.
_ATTENTION_OUT = Tolerance(2**-24, rel=2.01 / 128, cos=5e-6, size=2**-6)
# Logarithms of sums of float32 exponentials. One key more or less among 2048 changes them by 2^-11.
_ATTENTION_LSE = Tolerance(1e-6, 2.01 / 65536)

SPARSE_PREFILL_OUT = _ATTENTION_OUT
SPARSE_PREFILL_LSE = _ATTENTION_LSE
SPARSE_PREFILL_MAX_LOGITS = _ATTENTION_LSE
SPARSE_DECODE_OUT = _ATTENTION_OUT
DENSE_DECODE_OUT = _ATTENTION_OUT
DECODE_LSE = _ATTENTION_LSE
DENSE_PREFILL_OUT = _ATTENTION_OUT
DENSE_PREFILL_LSE = _ATTENTION_LSE

# P and dS are rounded to bfloat16, like P above, and so is each term of the gradient of kv. Sizes
# come from gradient_sizes: the error of an element has a standard deviation of at most 2^-8.8 of
# its size, and 2^-6 is seven of them. The cosine allows twice the 4e-6 that these roundings give.
# If terms cancel, float32 sums of V products leave about 2^-22. The gradient of the sink has
# float32 terms only.
SPARSE_ATTENTION_GRADIENT = Tolerance(2**-20, rel=3.01 / 128, cos=1e-5, size=2**-6)
SPARSE_ATTENTION_SINK_GRADIENT = Tolerance(1e-6, rel=2**-14, cos=1e-7, size=2**-14)
# float32 throughout: scores of up to 16 have an error of 2^-20, and so has P.
FLOAT32_GRADIENT = Tolerance(1e-6, rel=2**-15, cos=1e-9, size=2**-15)
# Sums of exact products in float32; sizes come from score_sizes. 10^4 terms in any order have an
# error with a standard deviation of 2^-18 of their size.
SELECTED_SCORES = Tolerance(rel=2**-13, cos=1e-8, size=2**-13)
# As in the gradients of attention, each term is rounded to bfloat16 up to twice, and the result
# once. Sizes come from selected_gradient_sizes and dense_gradient_sizes, and 2^-6 is seven standard
# deviations of a sum. Three roundings of at most 2^-8.8 change the cosine by at most 7.5e-6 on
# average; where few terms make up a tensor, their errors are not average.
INDEX_GRADIENT = Tolerance(2**-24, rel=2.01 / 128, cos=1e-5, size=2**-6)
# float32 throughout: an error of each term of some 2^-20.
FLOAT32_INDEX_GRADIENT = Tolerance(2**-30, rel=2**-15, cos=1e-9, size=2**-15)
# Sums of float32 terms, as those of scores.
HEAD_WEIGHT_GRADIENT = Tolerance(2**-24, rel=2**-13, cos=1e-7, size=2**-13)
# A score of attention up to 16 has an error of 2^-20, and so has the logarithm of P.
ATTENTION_TARGET = Tolerance(2**-30, rel=2**-13, cos=1e-8)
INDEX_LOSS = Tolerance(1e-6, rel=2**-14)

# Attention with FP8 MMAs; the sizes of fp8_limits are limits of each element. Rounding a weight
# to e4m3 has a relative standard deviation of 2^-5.2, and half of its square is the mean cosine
# difference, 3.7e-4.
FP8_MMA_OUT = Tolerance(2**-24, cos=5e-4, size=1)
FP8_MMA_LSE = Tolerance(1e-6, size=1)

# Sums that are exact in any order; only the sign of zero may differ.
EXACT = Tolerance(cos=0)

# Sizes come from score_sizes: the typical score if the signs of its terms were random. Hopper's FP8
# MMA aligns the 32 products of an instruction and the accumulator to the largest of them and keeps
# 14 bits (DeepSeek-V3, section 3.3.2). Products of e4m3 have 8 bits, so only products below 2^-6 of
# the largest lose bits: a few times 2^-14 of the largest, which is about the size of the score, in
# each of four MMAs for 128 dims. The standard deviation is about 2^-13. The worst of 10^9 scores is
# six standard deviations off; 2^-9 is sixteen. If most terms have the same sign, the accumulator is
# larger than the size, but so is the score.
INDEXER_SCORES = Tolerance(rel=2**-9, cos=1e-6, size=2**-9)
# Rounding to e4m3 changes queries and keys by 2^-5.2 (standard deviation, relative) and their
# products by 2^-4.7. The limit is five standard deviations per score, and the variance as a whole.
UNQUANTIZED_SCORES = Tolerance(cos=1e-3, size=0.2)

# One rounding to bfloat16 of a float32 sum of the same terms.
PROJECTION = Tolerance(rel=1.01 / 128, cos=5e-6, size=2**-10)
# Like INDEXER_SCORES, with a separate accumulator per block of 128 inputs.
FP8_PROJECTION = Tolerance(rel=1.01 / 128, cos=5e-6, size=2**-9)
# Like UNQUANTIZED_SCORES: both factors of each product are rounded to e4m3.
UNQUANTIZED_PROJECTION = Tolerance(cos=1e-3, size=0.2)

# The absorbed query, P, the attended latent and the output are each rounded to bfloat16. Rounding
# the query has a relative standard deviation of 2^-9.8. It multiplies logits of size 4 typically
# and 9 in one of 10^4 vectors, so P of this vector has an error of 2^-6.6; the other roundings were
# measured at 2^-9. The limit is four and a half such standard deviations.
BRANCH_OUT = Tolerance(rel=2.01 / 128, cos=2e-5, size=3 * 2**-6)
# Of latents that differ by 2^-8.5, one element in 32 rounds to another e4m3 code, 2^-3.5 away. The
# standard deviation is 2^-6 of the vector, and half its square for the whole tensor. The limit is
# eight standard deviations.
BRANCH_FP8_OUT = Tolerance(rel=2.01 / 128, cos=4e-4, size=2**-3)
# Latents merged from splits differ by float32 roundings. Few elements round to another bfloat16 and
# few of these to another e4m3 code, up to 2^-3 away. Sizes come from largest_products: the limit
# allows one such code, of the largest element and beside the largest weight.
MERGED_FP8_PROJECTION = Tolerance(rel=2.01 / 128, cos=5e-6, size=2**-3)

# RoPE and norm in float32, then one rounding; a difference in the last float32 bit may change it.
BFLOAT16_ULP = Tolerance(1e-6, 1.01 / 128, 1e-6)
FLOAT32_ULPS = Tolerance(rel=8.01 / 2**23, size=8.01 / 2**23)
E4M3_STEP = Tolerance(1.01 * 2**-9, 1.01 / 8, 1e-4)
# The neighbours of an e2m1 code are up to half of it away, and those of 0 and 1/2 half a scale. A
# scale of queries, a power of two, is at most a third of the largest of 32 values, and that three
# times their root mean square.
E2M1_STEP = Tolerance(0.51, 1.01 / 2, 1e-3)
FP4_QUERIES = Tolerance(rel=1.01 / 2, cos=1e-4, size=0.5)


TOLERANCES: dict[str, tuple[Tolerance | None, ...]] = {
    "fused_rope_rmsnorm_quant": (BFLOAT16_ULP, BFLOAT16_ULP),
    "fused_indexer_rope_quant": (E4M3_STEP, FLOAT32_ULPS),
    "append_index_keys": (),
    "prepare_index_queries": (E4M3_STEP, FLOAT32_ULPS),
    "pool_windows": (BFLOAT16_ULP,),
    "gather_dequant": (None,),
    "to_slots": (None,),
    "entry_slots": (None,),
    "visible_slots": (None, None),
    "share_lists": (None, None, None),
    "own_positions": (None, None),
    "resolve_rows": (None, None, None, None, None, None),
    "fetch_rows": (),
    "forget_seats": (),
    "select_topk": (None,),
    "merge_topk": (None,),
    "indexer_topk": (None,),
    "indexer_topk_blocks": (None, None),
    "indexer_topk_of_blocks": (None,),
    "indexer_scores": (INDEXER_SCORES,),
    "indexer_scores_paged": (INDEXER_SCORES,),
    "sparse_prefill": (SPARSE_PREFILL_OUT, SPARSE_PREFILL_LSE, SPARSE_PREFILL_MAX_LOGITS),
    "sparse_attention": (SPARSE_PREFILL_OUT, SPARSE_PREFILL_LSE),
    "sparse_attention_backward": (
        SPARSE_ATTENTION_GRADIENT,
        SPARSE_ATTENTION_GRADIENT,
        SPARSE_ATTENTION_SINK_GRADIENT,
    ),
    "sparse_decode": (SPARSE_DECODE_OUT, DECODE_LSE),
    "select_rows": (None,),
    "selected_scores": (SELECTED_SCORES,),
    "selected_scores_backward": (INDEX_GRADIENT, HEAD_WEIGHT_GRADIENT, INDEX_GRADIENT),
    "attention_target": (ATTENTION_TARGET,),
    "index_loss": (INDEX_LOSS,),
    "dense_index_loss": (INDEX_LOSS,),
    "dense_index_gradients": (INDEX_LOSS, INDEX_GRADIENT, HEAD_WEIGHT_GRADIENT, INDEX_GRADIENT),
    "dense_decode": (DENSE_DECODE_OUT, DECODE_LSE),
    "dense_prefill": (DENSE_PREFILL_OUT, DENSE_PREFILL_LSE),
    "merge_states": (SPARSE_DECODE_OUT, DECODE_LSE),
    "project_heads": (PROJECTION,),
    "project_groups": (PROJECTION,),
    "decode_branch": (BRANCH_OUT,),
    "prefill_branch": (BRANCH_OUT,),
}
"""Tolerance of each result of an op; None if every bit must agree."""

FP8_MMA = "sm90.fp8_mma"
KERNEL_TOLERANCES = {FP8_MMA: (FP8_MMA_OUT, FP8_MMA_LSE)}
"""The same of kernels that round more than the others of their op, by the kernel's name."""

ROW_TOLERANCES = {"scales": FLOAT32_ULPS, "bf16": BFLOAT16_ULP, "fp8": E4M3_STEP}
"""Tolerance of each field of a written cache row."""


def projection_tolerances(
    block: tuple[int, int] | None, *, merged: bool = False
) -> tuple[Tolerance, ...]:
    """Tolerances of ``project_heads`` and ``project_groups``.

    Args:
        block: what a scale of the weights covers; None for bfloat16.
        merged: whether the inputs are parts to be merged.

    >>> projection_tolerances(None) == TOLERANCES["project_heads"]
    True
    """
    if merged:
        return (BRANCH_OUT if block is None else MERGED_FP8_PROJECTION,)
    return (PROJECTION if block is None else FP8_PROJECTION,)


def check_op(
    op: str, arguments: Mapping[str, object], tolerances: tuple[Tolerance | None, ...] | None = None
) -> tuple[Tensor, ...]:
    """Run an op, then its reference, on the same arguments, and compare the results.

    The op runs first, on memory filled by :func:`poisoned_empty`, so that freed memory of the
    reference cannot hide a missing write.

    Args:
        op: name of the op.
        arguments: arguments for the op and its reference alike.
        tolerances: one per result; default :func:`tolerances_of`.

    Returns:
        The op's results.

    Raises:
        AssertionError: a result differs; the message names it.

    >>> lses = torch.zeros(2, 5, 3)
    >>> out, lse = check_op("merge_states", {"outs": torch.ones(2, 5, 3, 8), "lses": lses})
    >>> out.shape
    torch.Size([5, 3, 8])
    """
    with poisoned_empty():
        results = run_op(op, arguments)
    expected = run_reference(op, arguments)
    limits, sizes = tolerances or tolerances_of(op, arguments), sizes_of(op, arguments)
    for index, (got, wanted) in enumerate(zip(results, expected, strict=True)):
        assert_result(f"{op}[{index}]", got, wanted, limits[index], sizes.get(index))
    return results


def tolerances_of(op: str, arguments: Mapping[str, Any]) -> tuple[Tolerance | None, ...]:
    """The tolerance of each result of a call: of the kernel that takes it, if it has its own."""
    return KERNEL_TOLERANCES.get(kernel_of(op, arguments), TOLERANCES[op])


def kernel_of(op: str, arguments: Mapping[str, Any]) -> str:
    """The name of the kernel that takes a call that may have FP8 MMAs; empty for others."""
    if "allow_fp8_mma" not in arguments:
        return ""
    return explain(getattr(ops, op), **arguments).kernels[op]


def run_op(op: str, arguments: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """All results of an op, including optional ones.

    For ``sparse_prefill``, ``out_dtype`` among the arguments chooses the dtype of ``out``, and with
    ``allow_fp8_mma`` there are no largest logits, which the kernel with FP8 MMAs does not compute.
    """
    if op != "sparse_prefill" or "allow_fp8_mma" in arguments:
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
    """All results of an op's reference, as many as :func:`run_op` has.

    A call with FP8 MMAs has the queries and rows of :func:`round_rows`.
    """
    if kernel_of(op, arguments) == FP8_MMA:
        arguments = rounded(arguments)
    without = "out_dtype", "num_splits"
    arguments = {name: value for name, value in arguments.items() if name not in without}
    if op == "sparse_prefill" and "allow_fp8_mma" in arguments:
        return reference.sparse_prefill(**arguments)[:2]
    if op not in ("fused_rope_rmsnorm_quant", "pool_windows"):
        return _as_tuple(getattr(reference, op)(**arguments))
    # The tolerances of these ops expect results rounded to the op's dtypes.
    arguments = {name: value for name, value in arguments.items() if name != "kv_out"}
    if op == "pool_windows":
        return (reference.pool_windows(**arguments).bfloat16(),)
    queries, rows = reference.fused_rope_rmsnorm_quant(**arguments)
    return queries.to(arguments["q_rope"].dtype), rows.bfloat16()


def _as_tuple(results: Tensor | tuple[Tensor | None, ...] | None) -> tuple[Tensor, ...]:
    """The results, without the gradient of a sink that the call lacks."""
    results = results if isinstance(results, tuple) else (results,)
    return tuple(result for result in results if result is not None)


def sizes_of(op: str, arguments: Mapping[str, Any]) -> dict[int, Tensor]:
    """The sizes of results, by their index, where the result itself does not show them."""
    if op.startswith("indexer_scores") or op == "selected_scores":
        return {0: score_sizes(op, arguments)}
    if op == "sparse_attention_backward":
        return dict(enumerate(gradient_sizes(arguments)))
    if kernel_of(op, arguments) == FP8_MMA:
        return dict(enumerate(fp8_limits(arguments)))
    if op == "selected_scores_backward":
        return dict(enumerate(selected_gradient_sizes(arguments)))
    if op == "dense_index_gradients":
        return dict(enumerate(dense_gradient_sizes(arguments), 1))
    if op in ("project_heads", "project_groups") and arguments.get("lses") is not None:
        scaled = arguments["weight"].scale is not None
        return {0: largest_products(arguments)} if scaled else {}
    return {}


def rounded(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A prefill's arguments, with queries and rows as FP8 MMAs have them."""
    kv = arguments["kv"]
    rows = kv.data[:, 0] if isinstance(kv, PagedCache) else kv
    queries = round_rows(arguments["q"])
    return {**arguments, "q": queries, "kv": round_rows(rows).bfloat16()}


class Selected(NamedTuple):
    """Queries and selected keys of T tokens, in one stream."""

    queries: Tensor  # [T, H, D] float32
    keys: Tensor  # [T, K, D] float32, 0 where invalid
    valid: Tensor  # [T, K]
    scales: Tensor  # [T, K] float32, of the first 512 dims


def selected(arguments: Mapping[str, Any]) -> Selected:
    """The queries and keys of a prefill whose queries and rows are rounded."""
    q, slots, lengths = arguments["q"], arguments["topk_indices"], arguments.get("topk_lengths")
    if arguments.get("q_rope") is not None:
        q = torch.cat([q, arguments["q_rope"].float()], dim=-1)
    valid = (slots >= 0) & (slots < len(arguments["kv"]))
    if lengths is not None:
        valid &= torch.arange(slots.shape[1], device=slots.device) < lengths[:, None]
    keys = arguments["kv"][slots.where(valid, 0).long()].float()
    # Rounded dims may have half of the scale that they were rounded with.
    scales = ceil_pow2(fp8_scales(keys[..., :512].abs().amax(-1)))
    keys = keys.where(valid[..., None], 0)
    return Selected(q.float(), keys, valid, scales.clamp_min(2.0**-40))


def fp8_limits(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The largest errors of a prefill with FP8 MMAs against the reference on rounded inputs.

    Products of codes are exact, and their sums are not: an MMA aligns its 32 products and the
    accumulator to the largest of them and keeps 14 bits, see INDEXER_SCORES. Each adds an error of
    up to a few times 2^-14 of the sum ``S_pj`` that it ends with, so the logit and the lse, a mean
    of their errors, are off by at most ``d = 2^-12 softmax_scale max_j sum_p |S_pj|``, and by what
    float32 exponentials allow.

    A weight ``w_j = exp(z_j - lse)`` is off by a factor up to exp(2 d) then. The kernel multiplies
    it by the scale ``s_j`` of its row and rounds to e4m3, which adds a factor 1 ± 2^-4, or where
    codes are subnormal, below 2^-6, at most 2^-10. The largest code of a query is 8 or more, so
    that is 2^-13 of the largest ``w_k s_k``. Sums of 2048 products with values take 64 MMAs, which
    lose up to 2^-13 of the accumulator each, 2^-7 together; fewer keys need fewer. Rounding out to
    bfloat16 adds 2^-9 of out::

        (2^-4 + 2^-7 + exp(2 d) - 1) sum_j w_j |v_j| + 2^-9 |out|
            + 2^-13 max_k w_k s_k sum_j |v_j| / s_j

    Args:
        arguments: of a ``sparse_prefill`` over rows, with one stream and a list for each token.

    Returns:
        Limits of the differences of out and lse, of their shapes, float32.
    """
    queries, keys, valid, scales = selected(rounded(arguments))
    scale, sink = arguments["softmax_scale"], arguments.get("attn_sink")
    values = keys[..., :512]
    partial = torch.zeros(*queries.shape[:2], keys.shape[1], device=queries.device)  # [T, H, K]
    sums = torch.zeros_like(partial)
    for first in range(0, 512, 32):
        dims = slice(first, first + 32)
        partial += torch.einsum("thd,tkd->thk", queries[..., dims], keys[..., dims])
        sums += partial.abs()
    sums = torch.nn.functional.pad(sums, (0, 1))  # K may be 0
    error = 2**-12 * abs(scale) * sums.amax(-1)  # [T, H]
    out, lse, _ = attend(queries, keys, values, valid, scale, sink)
    terms, _, _ = attend(queries, keys, values.abs(), valid, scale, sink)
    logits = torch.einsum("thd,tkd->thk", queries, keys) * scale
    weights = (logits - lse[..., None]).exp() * scales[:, None]
    weights = torch.nn.functional.pad(weights.where(valid[:, None], 0), (0, 1))
    largest = weights.amax(-1, keepdim=True)  # [T, H, 1]
    if sink is not None:
        largest = largest * value_share(lse, sink)[..., None]
    codes = values.abs() / scales[..., None]
    limit = (2**-4 + 2**-7 + (2 * error[..., None]).expm1()) * terms + 2**-9 * out.abs()
    limit += 2**-13 * largest * codes.sum(1)[:, None]
    exact = SPARSE_PREFILL_LSE
    error += exact.rel * lse.abs().nan_to_num(posinf=0) + exact.abs
    return limit, error


def largest_products(arguments: Mapping[str, Any]) -> Tensor:
    """The largest merged input of each token and matrix times the largest weight of each output."""
    weight, sink = arguments["weight"].dequantize(), arguments.get("attn_sink")
    merged, _ = reference.merge_states(arguments["x"], arguments["lses"], attn_sink=sink)
    inputs = merged.reshape(len(merged), weight.shape[0], -1).abs().amax(-1)
    return inputs[..., None] * weight.abs().amax(-1)


def gradient_sizes(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """The size of each element of dq and dkv: the root of the sum of squares of its rounded terms.

    Entries of a token that name the same row have the same errors, which add up. For dkv, terms are
    the products of each token and head, and the sum of them over the tokens that share a list.
    """
    size, lengths = arguments.get("list_tokens", 1), arguments.get("topk_lengths")
    own, lengths = lists_of_tokens(
        arguments["topk_indices"],
        lengths,
        len(arguments["q"]),
        size,
        arguments.get("token_mask"),
    )
    names = inspect.signature(weights_of_entries).parameters
    given = {name: value for name, value in arguments.items() if name in names}
    given |= {"topk_indices": own, "topk_lengths": lengths}
    keys, valid, probs, dlogits = (x.double() for x in weights_of_entries(**given))
    dout, q = arguments["dout"].double(), arguments["q"].double()
    ids, chosen = own.long(), valid.bool()
    named = ids.where(chosen, -1)
    same = named[:, :, None] == named[:, None]
    alike = same.sum(-1)[..., None]
    dq = torch.einsum("thk,tkd->thd", dlogits.square(), keys.square() * alike)
    terms = torch.einsum("thk,thd->tkd", dlogits, q)
    squares = torch.einsum("thk,thd->tkd", dlogits.square(), q.square())
    terms[..., : dout.shape[-1]] += torch.einsum("thk,thv->tkv", probs, dout)
    squares[..., : dout.shape[-1]] += torch.einsum("thk,thv->tkv", probs.square(), dout.square())
    dkv = torch.zeros(arguments["kv"].shape, dtype=squares.dtype, device=squares.device)
    dkv.index_add_(0, ids[chosen], (squares * alike)[chosen])
    for part in range(0, len(ids), size):
        some = slice(part, part + size)
        sums = terms[some].sum(0).square() * same[some].all(0).sum(-1)[:, None]
        row, named_by = ids[some].where(chosen[some], -1).amax(0), chosen[some].any(0)
        dkv.index_add_(0, row[named_by], sums[named_by])
    return dq.nan_to_num().sqrt(), dkv.nan_to_num().sqrt()


def selected_gradient_sizes(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The sizes of the gradients over lists, as :func:`gradient_sizes` has them.

    Terms of dindex_k are those of each token and head, and each entry's sum of them.
    """
    indices, lengths = arguments["topk_indices"], arguments.get("topk_lengths")
    keys, valid = listed_rows(arguments["index_k"], indices, lengths)
    given = arguments["dscores"].where(valid, 0)
    index_q, weights = arguments["index_q"].float(), arguments["weights"].float()
    logits = torch.einsum("thd,tkd->thk", index_q, keys)
    dweights = torch.einsum("tk,thk->th", given.square(), logits.relu().square())
    dlogits = given[:, None] * weights[..., None] * (logits > 0)
    dindex_q = torch.einsum("thk,tkd->thd", dlogits.square(), keys.square())
    shares = torch.einsum("thk,thd->tkd", dlogits, index_q).square()
    shares += torch.einsum("thk,thd->tkd", dlogits.square(), index_q.square())
    dindex_k = torch.zeros_like(arguments["index_k"], dtype=torch.float32)
    dindex_k.index_add_(0, indices[valid].long(), shares[valid])
    return (
        dindex_q.nan_to_num().sqrt(),
        dweights.nan_to_num().sqrt(),
        dindex_k.nan_to_num().sqrt(),
    )


def dense_gradient_sizes(arguments: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """The sizes of dindex_q, dweights and dindex_k over all rows.

    The gradient of a score is a difference of two shares and keeps their float32 errors. Beside
    terms in bfloat16, whose tolerance is 2^9 times as large, these count as much less.
    """
    names = inspect.signature(dense_distributions).parameters
    scores, target = dense_distributions(**{name: arguments[name] for name in names})
    share = scores.softmax(-1).nan_to_num()
    factors = arguments.get("row_weights")
    factors = scores.new_ones(()) if factors is None else factors[:, None]
    kept, given = (share + target) * factors, (share - target).abs() * factors
    given = kept if arguments["index_q"].dtype == torch.float32 else given + 2**-9 * kept
    index_q, weights = arguments["index_q"].float(), arguments["weights"].float()
    keys = arguments["index_k"].float().where((kept != 0).any(0)[:, None], 0)
    logits = torch.einsum("thd,sd->ths", index_q, keys)
    dweights = torch.einsum("ts,ths->th", kept.square(), logits.relu().square())
    squares = (given[:, None] * weights[..., None] * (logits > 0)).square()
    dindex_q = torch.einsum("ths,sd->thd", squares, keys.square())
    dindex_k = torch.einsum("ths,thd->sd", squares, index_q.square())
    return dindex_q.sqrt(), dweights.sqrt(), dindex_k.sqrt()


def score_sizes(op: str, arguments: Mapping[str, Any]) -> Tensor:
    """The size of each score, to which its error is relative.

    ``index_k_scales[n] * sqrt(sum_hd (weights[m, h] * index_q[m, h, d] * index_k[n, d])^2)``,
    computed as the square root of the score of the squared inputs.
    """
    squares = dict(arguments)
    for name in ("index_q", "weights", "index_k", "index_k_scales"):
        if arguments.get(name) is not None:
            squares[name] = arguments[name].float().square()
    if op == "indexer_scores_paged":
        cache = arguments["cache"]
        slots = torch.arange(cache.num_slots, device=arguments["index_q"].device)
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
    """The largest ratio of an element's difference to its limit; at most 1 if all pass.

    >>> worst_share(torch.tensor([1.0, 2.0]), torch.tensor([1.5, 2.0]), Tolerance(abs=1))
    0.5
    """
    a, b = actual.double(), expected.double()
    finite = a.isfinite() & b.isfinite()
    difference = (a - b).abs()[finite]
    # Limits of 0 would give infinite ratios, which JSON cannot represent.
    ratios = difference / _limits(expected, tolerance, sizes)[finite].clamp_min(1e-30)
    return float(ratios.max()) if ratios.numel() else 0.0


def _limits(expected: Tensor, tolerance: Tolerance, sizes: Tensor | None) -> Tensor:
    """The limit of each element's difference; meaningless where ``expected`` is not finite."""
    b = expected.double()
    b = b.where(b.isfinite(), 0)
    if sizes is None:
        sizes = b.square().mean(-1, keepdim=True).sqrt() if b.dim() else b.abs()
    limits = torch.maximum(tolerance.rel * b.abs(), tolerance.size * sizes.double())
    return limits.clamp_min(tolerance.abs)


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """``max |actual - expected|`` over elements that are finite in both, 0 without any.

    >>> largest_difference(torch.tensor([1.0, torch.inf]), torch.tensor([1.5, 0.0]))
    0.5
    """
    a, b = actual.double(), expected.double()
    difference = (a - b).abs()[a.isfinite() & b.isfinite()]
    return float(difference.max()) if difference.numel() else 0.0


def cosine_difference(actual: Tensor, expected: Tensor) -> float:
    """``1 - 2 <a, b> / (<a, a> + <b, b>)`` in float64, or 0 if both are (nearly) zero.

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

    The tensors must have equal shapes and the same positions of NaN, +inf and -inf. Every element
    and :func:`cosine_difference` must be within the tolerance.

    Args:
        name: name of the tensor in error messages.
        actual: the tensor to check.
        expected: the reference.
        tolerance: limits of the difference.
        sizes: size of each element's terms, see :class:`Tolerance`.

    Raises:
        AssertionError: the message has the name, the coordinates and both values.

    >>> assert_close("out", torch.tensor([1.0]), torch.tensor([2.0]), Tolerance(abs=0.5))
    Traceback (most recent call last):
    AssertionError: out: 1 of 1 elements differ by more than Tolerance(abs=0.5, rel=0, cos=1e-07...
      at [0]: got 1, expected 2
    """
    _check_shapes(name, actual, expected)
    a, b = actual.double(), expected.double()
    for kind, same in (
        ("NaN", a.isnan() == b.isnan()),
        ("+inf", a.isposinf() == b.isposinf()),
        ("-inf", a.isneginf() == b.isneginf()),
    ):
        if not bool(same.all()):
            raise AssertionError(
                f"{name}: {kind} at other positions\n{_show(~same, actual, expected)}"
            )
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
    """Check a result of an op: bit for bit if ``tolerance`` is None, else by :func:`assert_close`.

    One-byte results must also pass :func:`assert_few_differ`.

    Raises:
        AssertionError: the message has the name, the coordinates and both values.
    """
    if tolerance is None:
        assert_equal(name, actual, expected)
        return
    assert_close(name, actual, expected, tolerance, sizes)
    if actual.dtype.itemsize == 1:
        assert_few_differ(name, actual, expected)


def assert_equal(name: str, actual: Tensor, expected: Tensor) -> None:
    """Check that dtype, shape and every bit agree, including NaN payloads and signs of zero.

    Raises:
        AssertionError: the message has the name, the coordinates and both values.
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
    """Check a top-k selection if the selected scores may differ from ``scores`` by rounding.

    Each row has ascending ids, then -1. It has at least ``min(topk, columns above -inf)`` ids, and
    no other score exceeds a selected one by more than ``tolerance`` times the row's largest
    magnitude.

    Args:
        name: name of the selection in error messages.
        actual: int32 ``[R, topk]``.
        scores: float32 ``[R, N]``, -inf for columns that a row must not select.
        topk: k.
        tolerance: relative difference up to which scores count as tied.

    Raises:
        AssertionError: the message has the name, the row and the wrong ids or scores.
    """
    for row, (ids, values) in enumerate(zip(actual.tolist(), scores, strict=True)):
        selected = [i for i in ids if i >= 0]
        size = min(topk, int((values > -torch.inf).sum()))
        if selected != sorted(set(selected)) or ids != selected + [-1] * (topk - len(selected)):
            raise AssertionError(f"{name}: row {row} does not ascend and end in -1: {ids}")
        if len(selected) < size:
            raise AssertionError(f"{name}: row {row} has {len(selected)} ids, expected {size}")
        others = values.clone()
        others[selected] = -torch.inf
        if not selected or len(selected) == values.numel():
            continue
        slack = tolerance * float(values[values.isfinite()].abs().max())
        worst, best = values[selected].min(), others.max()
        if best > worst + slack:
            raise AssertionError(
                f"{name}: row {row} left out id {int(others.argmax())} with score {best} "
                f"but selected one with score {worst}"
            )


def assert_rows_close(name: str, actual: PagedCache, expected: PagedCache) -> None:
    """Check a cache written by an op against a cache written by its reference.

    Each field must be within its tolerance in :data:`ROW_TOLERANCES`: the last float32 bit may
    change a rounding. At most 1% of the bytes of quantised values may differ.

    Raises:
        AssertionError: the message has the name, the field, the coordinates and both values.
    """
    got, wanted = actual.fields()._asdict(), expected.fields()._asdict()
    for field, tolerance in ROW_TOLERANCES.items():
        if got[field] is None or wanted[field] is None:
            continue
        parts = got[field], wanted[field]
        if field == "fp8":
            assert_few_differ(f"{name}.fp8", *parts)
        if field == "fp8" and actual.format.is_fp4:
            parts, tolerance = (from_e2m1(parts[0]), from_e2m1(parts[1])), E2M1_STEP
        assert_close(f"{name}.{field}", parts[0].float(), parts[1].float(), tolerance)


def assert_few_differ(name: str, actual: Tensor, expected: Tensor, share: float = 0.01) -> None:
    """Check that at most a fraction ``share`` of the elements differ in any bit.

    Raises:
        AssertionError: the message has the name, the coordinates and both values.
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
    """Coordinates, actual and expected values of the first wrong elements."""
    lines = []
    for at in wrong.nonzero()[:SHOWN].tolist():
        index = tuple(at)
        got, wanted = actual[index].double().item(), expected[index].double().item()
        lines.append(f"  at {at}: got {got:.9g}, expected {wanted:.9g}")
    return "\n".join(lines)

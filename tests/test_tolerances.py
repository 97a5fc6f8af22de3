"""Wrong results are refused: the tolerances of every op, as tests and ``verify`` use them."""

import copy
import math

import pytest
import torch

from sparsemla.weights import HeadWeight
from sparsemla_lab.testing.cases import Draw
from sparsemla_lab.testing.compare import (
    ATTENTION_TARGET,
    BFLOAT16_ULP,
    BRANCH_FP8_OUT,
    BRANCH_OUT,
    DECODE_LSE,
    E4M3_STEP,
    EXACT,
    FLOAT32_GRADIENT,
    FLOAT32_INDEX_GRADIENT,
    FLOAT32_ULPS,
    FP4_QUERIES,
    FP8_PROJECTION,
    HEAD_WEIGHT_GRADIENT,
    INDEX_GRADIENT,
    INDEX_LOSS,
    INDEXER_SCORES,
    MERGED_FP8_PROJECTION,
    PROJECTION,
    ROW_TOLERANCES,
    SELECTED_SCORES,
    SPARSE_ATTENTION_GRADIENT,
    SPARSE_ATTENTION_SINK_GRADIENT,
    SPARSE_DECODE_OUT,
    SPARSE_PREFILL_LSE,
    TOLERANCES,
    assert_result,
    run_reference,
    sizes_of,
)
from sparsemla_lab.verify.matrix import MATRIX
from sparsemla_lab.verify.properties import CACHE_WRITERS, OVERWRITING

# Smallest errors that each tolerance must refuse: one element off by this part of its size, or
# all elements off by this factor.
REFUSED = {
    SPARSE_DECODE_OUT: (0.05, 1.01),
    INDEXER_SCORES: (0.05, 1.003),
    PROJECTION: (0.05, 1.01),
    FP8_PROJECTION: (0.05, 1.01),
    MERGED_FP8_PROJECTION: (0.2, 1.01),
    BRANCH_OUT: (0.1, 1.02),
    BRANCH_FP8_OUT: (0.25, 1.04),
    EXACT: (1e-4, 1 + 1e-6),
    SPARSE_ATTENTION_GRADIENT: (0.05, 1.01),
    SPARSE_ATTENTION_SINK_GRADIENT: (0.001, 1.001),
    FLOAT32_GRADIENT: (0.001, 1.0001),
    BFLOAT16_ULP: (0.05, 1.01),
    FLOAT32_ULPS: (1e-5, 1 + 1e-5),
    DECODE_LSE: (2**-11, 1 + 2**-11),
    SPARSE_PREFILL_LSE: (2**-11, 1 + 2**-11),
    E4M3_STEP: (0.5, 1.1),
    FP4_QUERIES: (0.6, 1.03),
    SELECTED_SCORES: (2**-10, 1 + 2**-10),
    INDEX_GRADIENT: (0.05, 1.01),
    FLOAT32_INDEX_GRADIENT: (2**-12, 1 + 2**-12),
    HEAD_WEIGHT_GRADIENT: (2**-9, 1 + 2**-9),
    ATTENTION_TARGET: (2**-9, 1 + 2**-11),
    INDEX_LOSS: (2**-11, 1 + 2**-12),
    None: (0.05, 1.01),
}


def variants():
    """For each op and each choice of tolerances one case: (op, case)."""
    for op, all_cases in MATRIX.items():
        seen = set()
        for case in sorted(all_cases, key=lambda case: (case.large, not case.quick)):
            kinds = case.tolerances or TOLERANCES[op]
            if kinds not in seen:
                seen.add(kinds)
                yield op, case


def results_of(op, arguments, tolerances):
    """The definition's results by name, each with tolerance and sizes."""
    arguments = copy.deepcopy(arguments) if op in OVERWRITING else arguments
    sizes = sizes_of(op, arguments)
    results = run_reference(op, arguments)
    found = {}
    for index, (result, tolerance) in enumerate(zip(results, tolerances, strict=False)):
        result = result[:, None] if result.dim() == 1 else result
        found[f"{op}[{index}]"] = result, tolerance, sizes.get(index)
    if op in CACHE_WRITERS:
        for part, rows in arguments["cache"].fields()._asdict().items():
            if rows is not None:
                rows = rows.float() if part == "scales" else rows.contiguous()  # of e8m0 too
                found[f"cache.{part}"] = rows, ROW_TOLERANCES[part], None
    return found


def smallest_vector(x):
    """Index of the smallest vector above 2^-20 along the last dim, and of a typical element."""
    flat = finite(x).reshape(-1, x.shape[-1])
    means = flat.square().mean(-1).sqrt()
    row = int(means.where(means > 2**-20, math.inf).argmin())
    sizes = flat[row].abs()
    column = int((sizes - means[row]).abs().where(sizes > 0, math.inf).argmin())
    return row, column


def finite(x):
    return x.double().where(x.double().isfinite(), 0)


def element(x, amount, sizes):
    """A typical element of the smallest vector, closer to 0 by a share of its size."""
    row, column = smallest_vector(x)
    flat = x.reshape(-1, x.shape[-1])
    if sizes is None:
        size = finite(flat[row]).square().mean().sqrt()
    else:
        size = sizes.reshape(flat.shape)[row, column]
    old = flat[row, column].double()
    flat[row, column] = (old - (amount * size if old > 0 else -amount * size)).to(x.dtype)


def row(x):
    """One vector of zeros."""
    flat = x.reshape(-1, x.shape[-1])
    at = smallest_vector(x)[0]
    flat[at] = flat[at].where(flat[at].double().isinf(), 0)


def head(x):
    """One head of zeros in every token; heads are the last but one dim."""
    x[..., smallest_vector(x)[0] % x.shape[-2], :] = 0


def tile(x):
    """The last tile of at most 64 columns repeats the columns before it."""
    width = min(64, x.shape[-1] // 2)
    x[..., -width:] = x[..., -2 * width : -width].clone()


def last_rows(x):
    """The last non-zero tokens become zeros."""
    flat = x.flatten(1)
    live = (finite(flat) != 0).any(1).nonzero()
    x[int(live[-1]) :] = 0


def swapped(x):
    """The smallest non-zero vector and the next different vector are swapped."""
    flat = x.reshape(-1, x.shape[-1])
    at = smallest_vector(x)[0]
    differ = (finite(flat) != finite(flat[at])).any(-1).roll(-at)
    other = (at + int(differ.nonzero()[0])) % len(flat)
    flat[[at, other]] = flat[[other, at]]


def nan(x):
    row, column = smallest_vector(x)
    x.reshape(-1, x.shape[-1])[row, column] = math.nan


def corruptions(x, tolerance, sizes):
    """Wrong copies of a result by name."""
    amount, factor = REFUSED[tolerance]
    floats = x.is_floating_point()
    changes = {"one element": lambda y: element(y, amount, sizes)} if floats else {}
    if floats:
        changes |= {
            "all larger": lambda y: y.copy_(y.double() * factor),
            "all smaller": lambda y: y.copy_(y.double() / factor),
            "NaN": nan,
        }
    if x.dim() == 0:
        changes = {name: changes[name] for name in ("all larger", "all smaller")}
        changes["NaN"] = lambda y: y.fill_(math.nan)
        return wrong_copies(x, changes)
    changes |= {"one row": row, "last rows": last_rows, "two rows swapped": swapped}
    if x.dim() > 2:
        changes["one head"] = head
    if x.shape[-1] > 1:
        changes["one tile"] = tile
    return wrong_copies(x, changes)


def wrong_copies(x, changes):
    for name, change in changes.items():
        wrong = x.clone(memory_format=torch.contiguous_format)
        change(wrong)
        yield name, wrong


VARIANTS = {f"{op}, {case.name}": (op, case) for op, case in variants()}


@pytest.mark.parametrize("name", VARIANTS)
def test_corrupted_results_are_refused(name):
    op, case = VARIANTS[name]
    right = results_of(op, case.build(Draw(2)), case.tolerances or TOLERANCES[op])
    for result, (expected, tolerance, sizes) in right.items():
        assert_result(result, expected, expected, tolerance, sizes)
        for what, wrong in corruptions(expected, tolerance, sizes):
            assert not torch.equal(finite(wrong), finite(expected)) or what == "NaN"
            with pytest.raises(AssertionError):
                assert_result(f"{result}, {what}", wrong, expected, tolerance, sizes)


def changed(**changes):
    """A change of arguments: each named one is replaced by a function of itself."""

    def change(arguments):
        return arguments | {name: how(arguments[name]) for name, how in changes.items()}

    return change


def doubled_scale(cache, slot=None):
    """One scale of one row, by default of the row with the largest scale, is doubled."""
    cache = copy.deepcopy(cache)
    scales = cache.fields().scales
    values = scales.float()
    values = values.where(values.isfinite(), 0)
    if slot is not None:
        only = torch.zeros_like(values)
        only[divmod(slot, cache.page_size)] = 1
        values = values * only
    place = torch.unravel_index(values.argmax(), values.shape)
    scales[place] = (values[place] * 2).to(scales.dtype)
    return cache


def doubled_scale_of_a_selected_row(arguments):
    lengths = arguments["topk_lengths"]
    request = int(lengths.argmax())
    ids = arguments["topk_indices"][request, 0, : int(lengths[request])].tolist()
    slot = next(i for i in ids if 0 <= i < arguments["cache"].num_slots)
    return arguments | {"cache": doubled_scale(arguments["cache"], slot)}


def doubled_weight_scale(weight):
    """One block of one head."""
    scale = weight.scale.clone()
    scale[1, 0, 0] *= 2
    return HeadWeight(weight.data, scale, weight.scale_block)


def without(_):
    return None


def one_more(lengths):
    return lengths + 1


def one_less(lengths):
    return (lengths - 1).clamp_min(0)


def first_two_swapped(tensor):
    return tensor[[1, 0, *range(2, len(tensor))]]


def one_key_as_another(keys):
    keys = keys.clone()
    keys[..., 1] = keys[..., 0]
    return keys


CASES = {f"{op}, {case.name}": (op, case) for op, all_cases in MATRIX.items() for case in all_cases}
SPARSE = "sparse_decode, fp8_ds_mla"
DENSE = "dense_decode, fp8_ds_mla"
PREFILL = "sparse_prefill, 512 dims, 16 heads"
GRADIENT = "sparse_attention_backward, 576 dims, 17 heads"
SCORES = "indexer_scores, ragged, fp8"
PAGED = "indexer_scores_paged, 2 queries"

# Slightly wrong ops, each imitated by the reference on changed arguments.
SLIPS = {
    "sink left out": [
        (name, changed(attn_sink=without)) for name in (SPARSE, DENSE, PREFILL, GRADIENT)
    ],
    "gradient of the LSE left out": [
        ("sparse_attention_backward, gradient of the LSE", changed(dlse=without))
    ],
    "one key too many": [
        (SPARSE, changed(topk_lengths=one_more)),
        (PREFILL, changed(topk_lengths=one_more)),
        (DENSE, changed(seq_lens=one_more)),
        (SCORES, changed(row_ends=one_more)),
        (PAGED, changed(seq_lens=one_more)),
    ],
    "one key too few": [
        (SPARSE, changed(topk_lengths=one_less)),
        (PREFILL, changed(topk_lengths=one_less)),
        (GRADIENT, changed(topk_lengths=one_less)),
        (DENSE, changed(seq_lens=one_less)),
        (SCORES, changed(row_starts=one_more)),
        (PAGED, changed(seq_lens=one_less)),
    ],
    "one key twice": [
        (SPARSE, changed(topk_indices=one_key_as_another)),
        (PREFILL, changed(topk_indices=one_key_as_another)),
    ],
    "not causal": [
        (DENSE, changed(causal=lambda _: False)),
        ("dense_prefill, 192 and 128 dims, 16 heads", changed(causal=lambda _: False)),
    ],
    "softmax scale": [
        (name, changed(softmax_scale=lambda scale: scale * 1.01))
        for name in (SPARSE, DENSE, PREFILL, GRADIENT, "dense_prefill, 192 and 128 dims, 16 heads")
    ],
    "a scale one step off": [
        (SPARSE, doubled_scale_of_a_selected_row),
        (DENSE, changed(cache=doubled_scale)),
        (PAGED, changed(cache=doubled_scale)),
        ("project_heads, W_UK of DeepSeek-V3, 128x128", changed(weight=doubled_weight_scale)),
        ("project_heads, 5 parts, 4 tokens, 128x128", changed(weight=doubled_weight_scale)),
        ("project_groups, 5 parts, 128x128", changed(weight=doubled_weight_scale)),
    ],
    "another request's pages": [
        (DENSE, changed(page_table=first_two_swapped)),
        (PAGED, changed(page_table=first_two_swapped)),
    ],
    "a part weighted as another": [
        ("merge_states, 2 parts, float32", changed(lses=first_two_swapped)),
        ("project_heads, 5 parts, 4 tokens, bf16", changed(lses=first_two_swapped)),
        ("project_heads, 5 parts, 4 tokens, 128x128", changed(lses=first_two_swapped)),
    ],
    "another token's heads": [
        (SCORES, changed(weights=first_two_swapped)),
        (PAGED, changed(weights=first_two_swapped)),
    ],
    "another position": [
        ("fused_rope_rmsnorm_quant, fp8_ds_mla", changed(positions=first_two_swapped)),
        ("append_index_keys, DeepSeek-V3.2", changed(positions=first_two_swapped)),
        ("fused_indexer_rope_quant, DeepSeek-V3.2", changed(positions=first_two_swapped)),
        ("prepare_index_queries, DeepSeek-V3.2", changed(positions=first_two_swapped)),
        ("project_groups, 5 parts, bf16", changed(positions=first_two_swapped)),
        ("project_groups, 5 parts, 128x128", changed(positions=first_two_swapped)),
    ],
    "another token's list": [
        (f"{op}, 8 heads", changed(topk_indices=first_two_swapped))
        for op in ("selected_scores", "selected_scores_backward", "attention_target")
    ],
    "one row more": [
        ("select_rows, ragged", changed(row_ends=one_more)),
        ("dense_index_loss, ragged", changed(row_ends=one_more)),
        ("dense_index_gradients, ragged", changed(row_ends=one_more)),
    ],
    "another scale of the target": [
        ("attention_target, 8 heads", changed(softmax_scale=lambda scale: scale * 1.01)),
        ("dense_index_loss, ragged", changed(softmax_scale=lambda scale: scale * 1.01)),
        ("dense_index_gradients, ragged", changed(softmax_scale=lambda scale: scale * 1.01)),
    ],
    "another token's index heads": [
        ("selected_scores, 8 heads", changed(weights=first_two_swapped)),
        ("selected_scores_backward, 8 heads", changed(weights=first_two_swapped)),
        ("dense_index_loss, ragged", changed(weights=first_two_swapped)),
        ("dense_index_gradients, ragged", changed(weights=first_two_swapped)),
    ],
    "sinks left out": [("attention_target, sinks", changed(attn_sink=without))],
    "norm weights left out": [
        ("fused_rope_rmsnorm_quant, fp8_ds_mla", changed(kv_norm_weight=torch.ones_like)),
        ("append_index_keys, DeepSeek-V3.2", changed(norm_bias=torch.zeros_like)),
    ],
}


@pytest.mark.parametrize(
    ("name", "change"),
    [pytest.param(*slip, id=f"{what}, {slip[0]}") for what, all_ in SLIPS.items() for slip in all_],
)
def test_slightly_wrong_ops_are_refused(name, change):
    op, case = CASES[name]
    tolerances = case.tolerances or TOLERANCES[op]
    arguments = case.build(Draw(2))
    right, wrong = (
        results_of(op, some, tolerances) for some in (arguments, change(copy.deepcopy(arguments)))
    )
    with pytest.raises(AssertionError):
        assert_results(wrong, right)


def assert_results(actual, right):
    for result, (expected, tolerance, sizes) in right.items():
        assert_result(result, actual[result][0], expected, tolerance, sizes)

"""Every op against its definition in float64, on unusual arguments.

``python -m pytest tests/fuzz`` runs fixed examples, the same each time. By hand,
``--hypothesis-profile=long`` runs new examples for an hour; ``--hypothesis-seed`` selects them.
On a machine with a GPU, ``-m gpu`` runs on the GPU; elsewhere the portable kernels run in the
interpreter.

Bounds come from the roundings of the dtypes, relative to the magnitudes of the terms of a sum.
Results without rounding are compared exactly: indices, bytes and masks. So are two results of an
op that must not depend on a difference between two calls, such as other pages.
"""

from __future__ import annotations

import contextlib
import warnings
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings

import definitions
import sparsemla
import strategies
from definitions import FLOAT32, INF, SUM, TINY, Near, f64, half_step, ints, rounded
from sparsemla import PlanBuffers, dispatch, plan_batch
from sparsemla.kernels.repeat import unrepeated
from sparsemla_lab.testing.poison import poisoned_empty
from strategies import E4M3, Draw


class Backend(NamedTuple):
    """A device, and the tier unless dispatch chooses it."""

    name: str
    device: str
    tier: str | None = None
    slow: bool = False

    @contextlib.contextmanager
    def active(self):
        if self.tier is None:
            yield
            return

        with unrepeated(), dispatch.only(self.tier), warnings.catch_warnings():
            # numpy, which interprets, warns of log2(0) and of exp2 overflowing.
            warnings.simplefilter("ignore", RuntimeWarning)
            yield


CPU = Backend("cpu", "cpu")
BACKENDS = [CPU]
if torch.cuda.is_available():
    BACKENDS.append(pytest.param(Backend("cuda", "cuda"), marks=pytest.mark.gpu))
else:
    with contextlib.suppress(ImportError):
        import triton  # noqa: F401

        BACKENDS.append(Backend("interpreted", "cpu", "triton", slow=True))


@pytest.fixture(scope="module", params=BACKENDS, ids=lambda backend: backend.name)
def backend(request):
    return request.param


# Shrinking an example takes minutes, so only runs by hand do it.
PHASES = [p for p in Phase if p is not Phase.shrink or not settings.default.derandomize]

SLOWER = 10
"""Slow backends run this many times fewer examples."""

SMALL = {"batch": 2, "num_heads": 5, "num_splits": 2, "query_len": 2, "topk": 129}
"""The largest sizes of slow backends."""


def small(shape):
    limited = {name: shape[name] for name in SMALL if shape.get(name) is not None}
    return shape | {name: min(size, SMALL[name]) for name, size in limited.items()}


def fuzz(shapes, times=1):
    """A test of drawn shapes on each backend; ``times`` multiplies the number of quick examples."""

    def decorate(test):
        def run(backend):
            examples, drawn = times * settings.default.max_examples, shapes
            if backend.slow:
                examples, drawn = settings.default.max_examples // SLOWER, shapes.map(small)
            each = settings(phases=PHASES, max_examples=examples)(given(shape=drawn)(test))
            with backend.active():
                each(backend=backend)

        return run

    return decorate


def draw_of(backend, shape):
    return Draw(shape["seed"], backend.device, shape.get("strided", False))


# --- comparison ----------------------------------------------------------------------------------


def check_near(name, got, wanted, bound):
    """Check that elements are within the bound, with NaN and infinities at the same places."""
    got, wanted = f64(got) if isinstance(got, torch.Tensor) else got, np.asarray(wanted)
    assert got.shape == wanted.shape, f"{name}: shape {got.shape}, expected {wanted.shape}"
    special = ~np.isfinite(wanted)
    same = (got == wanted) | (np.isnan(got) & np.isnan(wanted))
    with np.errstate(invalid="ignore"):
        near = np.where(special, same, abs(got - wanted) <= bound)
    if not near.all():
        at = tuple(np.argwhere(~near)[0])
        limit = np.broadcast_to(bound, near.shape)[at]
        raise AssertionError(
            f"{name}: {(~near).sum()} of {near.size} elements, the first at {at}: "
            f"got {got[at]:.9g}, expected {wanted[at]:.9g} within {limit:.3g}"
        )


def check_equal(name, got, wanted):
    """Check that integers are equal."""
    got, wanted = np.asarray(ints(got), np.int64), np.asarray(wanted)
    assert got.shape == wanted.shape, f"{name}: shape {got.shape}, expected {wanted.shape}"
    if not (got == wanted).all():
        at = tuple(np.argwhere(got != wanted)[0])
        raise AssertionError(f"{name}: at {at} got {got[at]}, expected {wanted[at]}")


def bits(tensor):
    return tensor.detach().contiguous().view(torch.uint8).cpu()


def check_bits(name, got, wanted):
    assert got.shape == wanted.shape, name
    assert torch.equal(bits(got), bits(wanted)), f"{name}: {got} is not {wanted}"


def called(op, arguments, outputs):
    """Call an op with new outputs and with given output slices; check that both are equal.

    ``outputs``: names of the output arguments.
    """
    function = getattr(sparsemla, op)
    with poisoned_empty():
        results = function(**arguments)
    results = results if isinstance(results, tuple) else (results,)
    targets = {}
    for name, result in zip(outputs, results, strict=True):
        targets[name] = strategies.embedded(
            torch.empty_like(result).view(torch.uint8).fill_(0xFF).view(result.dtype)
        )
    before = {name: outside_of(target) for name, target in targets.items()}
    again = function(**arguments, **targets)
    again = again if isinstance(again, tuple) else (again,)
    for name, target, result, first in zip(outputs, targets.values(), again, results, strict=True):
        assert result is target, f"{op}: {name} is not returned"
        check_bits(f"{op} into the {name} given", target, first)
        assert torch.equal(outside_of(target), before[name]), f"{op} writes beside {name}"
    return results


def outside_of(view):
    """The bytes of the storage outside of a view."""
    whole = torch.empty(0, dtype=view.dtype, device=view.device).set_(view.untyped_storage())
    inside = torch.zeros(whole.shape, dtype=torch.bool, device=view.device)
    inside.as_strided(view.shape, view.stride(), view.storage_offset()).fill_(True)
    raw = whole.view(torch.uint8).view(len(inside), view.element_size())
    return raw[~inside].cpu()


@contextlib.contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# --- attention -----------------------------------------------------------------------------------


def product_rounding(backend, dtype):
    """Rounding of a score, relative to its terms' magnitudes: on a GPU queries have 16 bits."""
    return SUM if backend is CPU or dtype == torch.bfloat16 else SUM + 2.0**-17


def weight_rounding(backend, dtype):
    """Rounding of P: to bfloat16, except for other dtypes on the CPU."""
    return 2.0**-20 if backend is CPU and dtype != torch.bfloat16 else 1.02 * 2.0**-8


def exp_rounding(backend, dtype):
    """Common error of P in a row: torch's CPU kernel for bfloat16 has a short exp."""
    return 2.0**-14 if backend is CPU and dtype == torch.bfloat16 else 2.0**-19


def loose_query(backend, q):
    """A query, with the rounding of its products as an error of the query."""
    value = f64(q)
    return Near(value, product_rounding(backend, q.dtype) * abs(value))


def finite_or_0(x):
    return np.where(np.isfinite(x), abs(x), 0)


def check_attention(backend, q, results, expected, *, sink=None, weight=None, max_logits=None):
    out, lse = results
    weight = weight_rounding(backend, q.dtype) if weight is None else weight
    bound = weight * expected.terms + expected.shaken
    finite = finite_or_0(expected.lse)
    if sink is not None:  # the exponential of a difference
        bound += (4 * FLOAT32 * (finite + finite_or_0(f64(sink))))[..., None] * expected.terms
    bound += 2.1 * half_step(abs(expected.out) + bound, q.dtype)
    check_near("out", out, expected.out, bound)
    loose = exp_rounding(backend, q.dtype) + 4 * FLOAT32 * finite
    check_near("lse", lse, expected.lse, expected.sway + loose)
    if max_logits is not None:
        check_near("max_logits", max_logits, expected.largest, expected.most + 1e-30)


def sparse_decode_definition(backend, arguments):
    q, size = arguments["q"], arguments["q"].shape[1]

    def stream(prefix):
        lengths = arguments.get(f"{prefix}topk_lengths")
        if lengths is not None:
            lengths = np.repeat(ints(lengths), size) if lengths.dim() == 1 else ints(lengths)
        return definitions.Stream(
            arguments[f"{prefix}cache"],
            ints(arguments[f"{prefix}topk_indices"].flatten(0, 1)),
            None if lengths is None else lengths.flatten(),
        )

    streams = [stream("")]
    if arguments.get("extra_cache") is not None:
        streams.append(stream("extra_"))
    return definitions.sparse_attention(
        loose_query(backend, q.flatten(0, 1)),
        streams,
        arguments["softmax_scale"],
        arguments["attn_sink"],
    )


@fuzz(strategies.SPARSE_DECODE)
def test_sparse_decode(backend, shape):
    arguments = strategies.sparse_decode(draw_of(backend, shape), shape)
    out, lse = called("sparse_decode", arguments, ("out", "lse"))
    results = out.flatten(0, 1), lse.flatten(0, 1)
    check_attention(
        backend,
        arguments["q"],
        results,
        sparse_decode_definition(backend, arguments),
        sink=arguments["attn_sink"],
    )
    if shape["num_splits"] is not None and shape["batch"] > 1:
        check_alone(sparsemla.sparse_decode, arguments, (out, lse))


BATCHED = ("q", "topk_indices", "topk_lengths", "extra_topk_indices", "extra_topk_lengths")


def check_alone(op, arguments, results, batched=BATCHED):
    """With given splits, a request has the same bits alone and in the batch."""
    with threads(2):
        results = op(**arguments)
        for b in range(len(results[0])):
            request = {
                name: value[b : b + 1] if name in batched and value is not None else value
                for name, value in arguments.items()
            }
            for name, alone, batch in zip(("out", "lse"), op(**request), results, strict=True):
                check_bits(f"{name} of request {b} alone", alone, batch[b : b + 1])


@fuzz(strategies.DENSE_DECODE)
def test_dense_decode(backend, shape):
    draw = draw_of(backend, shape)
    arguments = strategies.dense_decode(draw, shape)
    splits = arguments.pop("num_splits")
    q = loose_query(backend, arguments["q"])
    expected = definitions.dense_decode(**{**arguments, "q": q})
    arguments["num_splits"] = splits
    out, lse = called("dense_decode", arguments, ("out", "lse"))
    check_attention(backend, arguments["q"], (out, lse), expected, sink=arguments["attn_sink"])
    cache, table = strategies.repaged(draw, arguments["cache"], arguments["page_table"])
    moved = sparsemla.dense_decode(**{**arguments, "cache": cache, "page_table": table})
    check_bits("out on other pages", moved[0], out)
    check_bits("lse on other pages", moved[1], lse)
    if splits is not None and len(shape["seq_lens"]) > 1:
        batched = ("q", "page_table", "seq_lens")
        check_alone(sparsemla.dense_decode, arguments, (out, lse), batched)


@fuzz(strategies.SPARSE_PREFILL)
def test_sparse_prefill(backend, shape):
    arguments, caches = strategies.sparse_prefill(draw_of(backend, shape), shape)
    results = called("sparse_prefill", arguments, ("out", "lse"))
    max_logits = results[1].new_full(results[1].shape, torch.nan)
    sparsemla.sparse_prefill(**arguments, max_logits=max_logits)
    streams = []
    for prefix in ("", "extra_")[: len(caches)]:
        lengths = arguments[f"{prefix}topk_lengths"]
        indices = ints(arguments[f"{prefix}topk_indices"])
        lengths = None if lengths is None else ints(lengths)
        cache = caches["extra_cache" if prefix else "kv"]
        streams.append(definitions.Stream(cache, indices, lengths))
    expected = definitions.sparse_attention(
        loose_query(backend, arguments["q"]),
        streams,
        arguments["softmax_scale"],
        arguments["attn_sink"],
    )
    check_attention(
        backend,
        arguments["q"],
        results,
        expected,
        sink=arguments["attn_sink"],
        max_logits=max_logits,
    )


@fuzz(strategies.SHARED_PREFILL)
def test_sparse_prefill_over_shared_lists(backend, shape):
    arguments, cache = strategies.shared_prefill(draw_of(backend, shape), shape)
    results = called("sparse_prefill", arguments, ("out", "lse"))
    names = ("topk_indices", "topk_lengths", "token_mask")
    lists = [arguments.get(name) for name in names]
    own = definitions.own_lists(*lists, len(arguments["q"]), arguments["list_tokens"])
    width = max(map(len, own), default=0)
    padded = np.array([rows + [-1] * (width - len(rows)) for rows in own], object)
    expected = definitions.sparse_attention(
        loose_query(backend, arguments["q"]),
        [definitions.Stream(cache, padded.reshape(len(own), width), None)],
        arguments["softmax_scale"],
        arguments["attn_sink"],
    )
    check_attention(backend, arguments["q"], results, expected, sink=arguments["attn_sink"])


@fuzz(strategies.SHARE_LISTS, times=3)
def test_share_lists(backend, shape):
    arguments = strategies.share_lists(draw_of(backend, shape), shape)
    results = called("share_lists", arguments, ("out", "lengths", "token_mask"))
    wanted = definitions.share_lists(**arguments)
    for name, result, expected in zip(
        ("out", "lengths", "token_mask"), results, wanted, strict=True
    ):
        check_equal(name, result, expected)


@fuzz(strategies.OWN_POSITIONS, times=3)
def test_own_positions(backend, shape):
    arguments = strategies.own_positions(draw_of(backend, shape), shape)
    results = called("own_positions", arguments, ("out", "counts"))
    wanted = definitions.own_positions(arguments["topk_indices"], **vars(arguments["shard"]))
    for name, result, expected in zip(("out", "counts"), results, wanted, strict=True):
        check_equal(name, result, expected)


@fuzz(strategies.RESOLVE_ROWS, times=3)
def test_resolve_rows(backend, shape):
    arguments = strategies.resolve_rows(draw_of(backend, shape), shape)
    table, shard = arguments["table"], arguments["shard"]
    wanted = definitions.resolve_rows(
        **arguments
        | {
            "table": [part.clone() for part in vars(table).values()],
            "shard": None if shard is None else (*vars(shard).values(),),
        }
    )
    with poisoned_empty():
        results = sparsemla.resolve_rows(**arguments)
    results = (*results, *vars(table).values(), arguments["stats"])
    names = (*sparsemla.Resolved._fields, *vars(table), "stats")
    for name, result, expected in zip(names, results, wanted, strict=True):
        check_equal(name, result, expected)


@fuzz(strategies.FETCH_ROWS, times=3)
def test_fetch_rows(backend, shape):
    arguments = strategies.fetch_rows(draw_of(backend, shape), shape)
    wanted, target = definitions.fetch_rows(**arguments), arguments["target"]
    around = outside_of(target.data)
    sparsemla.fetch_rows(**arguments)
    for got, expected in zip(target.stored_bytes(), wanted, strict=True):
        check_equal("rows", got.flatten(0, 1).int(), expected)
    assert torch.equal(outside_of(target.data), around)


@fuzz(strategies.DENSE_PREFILL, times=3)
def test_dense_prefill(backend, shape):
    arguments = strategies.dense_prefill(draw_of(backend, shape), shape)
    results = called("dense_prefill", arguments, ("out", "lse"))
    q = arguments["q"]
    pairs = {name: Near(f64(arguments[name]), None) for name in ("k", "v")}
    expected = definitions.dense_prefill(
        **{**arguments, **pairs, "q": Near(f64(q), SUM * abs(f64(q)))}
    )
    weight = 2.0**-20
    if backend is not CPU or q.dtype == torch.bfloat16:
        weight += 1.02 * 2.0 ** -(definitions.MANTISSA[q.dtype] + 1)
    check_attention(backend, q, results, expected, weight=weight)


@fuzz(strategies.MERGE_STATES, times=3)
def test_merge_states(backend, shape):
    arguments = strategies.merge_states(draw_of(backend, shape), shape)
    out, lse = called("merge_states", arguments, ("out", "lse"))
    check_merged(arguments, out, lse, arguments["outs"].dtype)


def check_merged(arguments, out, lse, dtype):
    value, log, terms = definitions.merge_states(**arguments)
    top = np.max(finite_or_0(f64(arguments["lses"])), axis=0, initial=0)
    if arguments["attn_sink"] is not None:
        top = top + finite_or_0(f64(arguments["attn_sink"]))
    loose = 16 * FLOAT32 * (1 + top)  # of a difference of two logarithms, and of its exponential
    bound = loose[..., None] * terms + TINY
    check_near("out", out, value, bound + 1.01 * half_step(abs(value) + bound, dtype))
    check_near("lse", lse, log, loose)


# --- indexer and selection -----------------------------------------------------------------------


def score_rounding(backend, dtype):
    """Rounding of scores: Hopper's FP8 MMA keeps 14 bits of a sum."""
    return 2.0**-12 if backend.name == "cuda" and dtype == E4M3 else SUM


def check_scores(backend, arguments, scores, expected):
    bound = score_rounding(backend, arguments["index_q"].dtype) * expected.error + TINY
    check_near("scores", scores, expected.value, bound)


@fuzz(strategies.INDEXER_SCORES, times=4)
def test_indexer_scores(backend, shape):
    arguments = strategies.indexer_scores(draw_of(backend, shape), shape)
    (scores,) = called("indexer_scores", arguments, ("out",))
    check_scores(backend, arguments, scores, definitions.indexer_scores(**arguments))
    if shape["equal"]:
        check_equal_keys(scores)


def check_equal_keys(scores):
    """Check that keys with equal bytes have the same score at any position."""
    for row in f64(scores.flatten(0, -2)):
        seen = row[row > -INF]
        assert len(set(seen.tolist())) <= 1, f"equal keys have scores {sorted(set(seen.tolist()))}"


@fuzz(strategies.INDEXER_SCORES_PAGED, times=3)
def test_indexer_scores_paged(backend, shape):
    draw = draw_of(backend, shape)
    arguments = strategies.indexer_scores_paged(draw, shape)
    (scores,) = called("indexer_scores_paged", arguments, ("out",))
    q, weights, width = f64(arguments["index_q"]), f64(arguments["weights"]), shape["max_seq_len"]
    table, lengths = ints(arguments["page_table"]), ints(arguments["seq_lens"])
    expected = Near(np.full(scores.shape, -INF), np.zeros(scores.shape))
    for b in range(q.shape[0]):
        for j in range(q.shape[1]):
            length = lengths[b, j] if shape["per_row"] else lengths[b] - q.shape[1] + 1 + j
            length = min(max(int(length), 0), width)
            at = b, j, slice(length)
            expected.value[at], expected.error[at] = definitions.paged_scores(
                q[b, j], weights[b, j], arguments["cache"], table[b], length
            )
    check_scores(backend, arguments, scores, expected)
    if shape["equal"]:
        check_equal_keys(scores)
    cache, moved = strategies.repaged(draw, arguments["cache"], arguments["page_table"])
    again = sparsemla.indexer_scores_paged(**{**arguments, "cache": cache, "page_table": moved})
    check_bits("scores on other pages", again, scores)


@fuzz(strategies.INDEXER_TOPK)
def test_indexer_topk(backend, shape):
    draw = draw_of(backend, shape)
    arguments = strategies.indexer_topk(draw, shape)
    (chosen,) = called("indexer_topk", arguments, ("out",))
    check_equal(
        "with room for all scores",
        sparsemla.indexer_topk(**{**arguments, "max_workspace_bytes": 1 << 28}),
        ints(chosen),
    )
    check_topk(backend, shape, arguments, ints(chosen))
    check_requests_alone("indexer_topk", arguments, (chosen,))
    if not shape["as_slots"]:
        cache, moved = strategies.repaged(draw, arguments["cache"], arguments["page_table"])
        again = sparsemla.indexer_topk(**{**arguments, "cache": cache, "page_table": moved})
        check_equal("on other pages", again, ints(chosen))


@fuzz(strategies.INDEXER_TOPK_BLOCKS, times=2)
def test_indexer_topk_blocks(backend, shape):
    arguments = strategies.indexer_topk_blocks(draw_of(backend, shape), shape)
    results = called("indexer_topk_blocks", arguments, ("out", "blocks_out"))
    chosen, blocks = (ints(each) for each in results)
    again = sparsemla.indexer_topk_blocks(**{**arguments, "max_workspace_bytes": 1 << 28})
    for each, wanted in zip(again, (chosen, blocks), strict=True):
        check_equal("with room for all scores", each, wanted)
    slack = slack_of(backend, shape, arguments)
    for t, scores in scores_of_tokens(shape, arguments, (chosen, blocks)):
        check_selection(scores, chosen[t], arguments["topk"], slack)
        of_blocks = definitions.block_scores(scores, arguments["block_size"])
        check_selection(of_blocks, blocks[t], arguments["topk_blocks"], slack)
    check_requests_alone("indexer_topk_blocks", arguments, results)


@fuzz(strategies.INDEXER_TOPK_OF_BLOCKS, times=3)
def test_indexer_topk_of_blocks(backend, shape):
    arguments = strategies.indexer_topk_of_blocks(draw_of(backend, shape), shape)
    (chosen,) = results = called("indexer_topk_of_blocks", arguments, ("out",))
    chosen = ints(chosen)
    again = sparsemla.indexer_topk_of_blocks(**{**arguments, "max_workspace_bytes": 1 << 28})
    check_equal("with room for all scores", again, chosen)
    blocks, slack = ints(arguments["blocks"]), slack_of(backend, shape, arguments)
    for t, scores in scores_of_tokens(shape, arguments, (chosen,)):
        keys = definitions.keys_in(blocks[t], arguments["block_size"], len(scores.value))
        places = {n: i for i, n in enumerate(keys)} | {-1: -1}
        assert set(chosen[t]) <= set(places), f"keys {chosen[t]} are not in blocks {blocks[t]}"
        listed = Near(*(part[np.array(keys, int)] for part in scores))
        check_selection(listed, [places[n] for n in chosen[t]], arguments["topk"], slack)
    check_requests_alone("indexer_topk_of_blocks", arguments, results)


def slack_of(backend, shape, arguments):
    """How much of its terms a score may be off; nothing where sums are exact."""
    exact = shape["whole"] or shape["equal"]
    return 0.0 if exact else score_rounding(backend, arguments["index_q"].dtype)


def scores_of_tokens(shape, arguments, results):
    """Each token and the float64 scores of its visible keys; tokens of no request select none."""
    q, weights = f64(arguments["index_q"]), f64(arguments["weights"])
    table = ints(arguments["page_table"])
    starts, lengths = ints(arguments["input_row_offsets"]), ints(arguments["seq_lens"])
    if not shape["requests"]:
        starts = np.zeros(1, int)
    for result in results:
        padding = result[starts[-1] :].astype(np.int64)
        check_equal("padding", torch.from_numpy(padding), -1 + 0 * padding)
    for b, length in enumerate(lengths):
        first, last = starts[b], starts[b + 1]
        for t in range(first, last):
            visible = (
                int(length) - (last - first) + 1 + t - first if shape["causal"] else int(length)
            )
            visible //= arguments["ratio"]
            cache = arguments["cache"]
            yield t, definitions.paged_scores(q[t], weights[t], cache, table[b], visible)


def check_topk(backend, shape, arguments, chosen):
    """Check each token's selection against the float64 scores of its visible keys."""
    table, starts = ints(arguments["page_table"]), ints(arguments["input_row_offsets"])
    page_size, topk = arguments["cache"].page_size, arguments["topk"]
    slack = slack_of(backend, shape, arguments)
    for t, scores in scores_of_tokens(shape, arguments, (chosen,)):
        positions = chosen[t]
        if shape["as_slots"]:
            row = table[np.searchsorted(starts, t, "right") - 1]
            positions = positions_of(chosen[t], row, page_size, len(scores.value), topk)
        check_selection(scores, positions, topk, slack)


def positions_of(slots, table_row, page_size, visible, topk):
    """Positions of the slots of a selection; ids without a slot are left out."""
    places = {definitions.slot_of(table_row, i, page_size): i for i in range(visible)}
    if visible <= topk:  # all keys are selected, in order, with -1 for ids without a slot
        wanted = [definitions.slot_of(table_row, i, page_size) for i in range(visible)]
        assert list(slots) == wanted + [-1] * (topk - visible)
        return list(range(visible)) + [-1] * (topk - visible)
    return [places[s] if s >= 0 else -1 for s in slots]


def check_selection(scores, positions, topk, slack):
    """Check that positions ascend, then -1, and that no better key is missing."""
    ids = [i for i in positions if i >= 0]
    assert ids == sorted(set(ids)), f"positions do not ascend: {positions}"
    live = int((scores.value > -INF).sum())
    assert min(live, topk) <= len(ids) <= min(len(scores.value), topk), "too few, or too many"
    if not ids or len(ids) == len(scores.value):
        return
    value, bound = scores.value, slack * scores.error
    left_out = [i for i in range(len(value)) if i not in set(ids)]
    worst = min(ids, key=lambda i: value[i] + bound[i])
    best = max(left_out, key=lambda i: value[i] - bound[i])
    assert value[best] - bound[best] <= value[worst] + bound[worst], (
        f"{best} with {value[best]} is left out, {worst} with {value[worst]} is chosen"
    )
    if slack == 0.0:  # ties go to the lower position
        least = min(value[i] for i in ids)
        equals = [i for i in range(len(value)) if value[i] == least]
        kept = [i for i in equals if i in set(ids)]
        assert kept == equals[: len(kept)], f"of the ties {equals}, later ones {kept} are selected"


def check_requests_alone(op, arguments, results):
    """Check that a request selects the same keys alone and in the batch."""
    starts = ints(arguments["input_row_offsets"])
    for b in range(len(starts) - 1):
        at = slice(int(starts[b]), int(starts[b + 1]))
        tokens = {
            name: arguments[name][at]
            for name in ("index_q", "weights", "blocks")
            if name in arguments
        }
        alone = {
            **arguments,
            **tokens,
            "input_row_offsets": arguments["input_row_offsets"][:2] * 0
            + torch.tensor([0, at.stop - at.start], device=arguments["index_q"].device),
            "seq_lens": arguments["seq_lens"][b : b + 1],
            "page_table": arguments["page_table"][b : b + 1],
        }
        again = getattr(sparsemla, op)(**alone)
        again = again if isinstance(again, tuple) else (again,)
        for each, result in zip(again, results, strict=True):
            check_equal(f"request {b} alone", each, ints(result[at]))


@fuzz(strategies.SELECT_TOPK, times=10)
def test_select_topk(backend, shape):
    arguments = strategies.select_topk(draw_of(backend, shape), shape)
    (chosen,) = called("select_topk", arguments, ("out",))
    names = ("scores", "topk", "row_starts", "row_ends")
    wanted = definitions.select_topk(*(arguments[name] for name in names))
    if shape["page_size"] is not None:
        table, requests = arguments["page_table"], arguments["request_ids"]
        rows = torch.from_numpy(wanted)
        wanted = definitions.to_slots(rows, table, requests, shape["page_size"], None, None)
    check_equal("selection", chosen, wanted)


@fuzz(strategies.MERGE_TOPK, times=10)
def test_merge_topk(backend, shape):
    arguments = strategies.merge_topk(draw_of(backend, shape), shape)
    (chosen,) = called("merge_topk", arguments, ("out",))
    check_equal("selection", chosen, definitions.merge_topk(**arguments))


@fuzz(strategies.TO_SLOTS, times=10)
def test_to_slots(backend, shape):
    arguments = strategies.to_slots(draw_of(backend, shape), shape)
    (slots,) = called("to_slots", arguments, ("out",))
    prefills, starts = (arguments.get(n) for n in ("prefill_request_ids", "workspace_starts"))
    wanted = definitions.to_slots(
        arguments["topk_indices"],
        arguments["page_table"],
        arguments["request_ids"],
        arguments["page_size"],
        None if starts is None else ints(starts),
        None if prefills is None else ints(prefills),
    )
    check_equal("slots", slots, wanted)


@fuzz(strategies.KEY_SLOTS, times=3)
def test_slots_of_keys(backend, shape):
    arguments = strategies.key_slots(draw_of(backend, shape), shape)
    (entries,) = called("entry_slots", arguments, ("out",))
    check_equal("entries", entries, definitions.entry_slots(**arguments))
    arguments["width"] = shape["width"]
    results = called("visible_slots", arguments, ("out", "lengths"))
    wanted = definitions.visible_slots(**arguments)
    for name, result, expected in zip(("slots", "lengths"), results, wanted, strict=True):
        check_equal(name, result, expected)


@fuzz(strategies.GATHER_DEQUANT)
def test_gather_dequant(backend, shape):
    draw = draw_of(backend, shape)
    arguments = strategies.gather_dequant(draw, shape)
    wanted = definitions.gather_dequant(**arguments)
    moved = strategies.repaged(draw, arguments["cache"], arguments["page_table"])
    other = arguments["out"].clone()
    around = outside_of(arguments["out"])
    assert sparsemla.gather_dequant(**arguments) is arguments["out"]
    check_near("rows", arguments["out"], wanted, 0.0)
    assert torch.equal(outside_of(arguments["out"]), around)
    sparsemla.gather_dequant(
        **{**arguments, "cache": moved[0], "page_table": moved[1], "out": other}
    )
    check_bits("rows on other pages", other, arguments["out"])


# --- cache writers -------------------------------------------------------------------------------


def check_rounded(name, got, near, dtype):
    """Check that each value is the rounding of a number within the error."""
    low, high = (rounded(near.value + sign * near.error, dtype) for sign in (-1, 1))
    nan = np.isnan(near.value)
    assert (np.isnan(got) == nan).all(), f"{name}: NaN elsewhere"
    right = nan | ((low <= got) & (got <= high))
    if not right.all():
        at = tuple(np.argwhere(~right)[0])
        raise AssertionError(
            f"{name}: {(~right).sum()} of {right.size} elements, the first at {at}: got {got[at]}, "
            f"expected {near.value[at]} within {near.error[at]:.3g}, so {low[at]} to {high[at]}"
        )


def scale_bounds(fmt, near, mode):
    """Smallest and largest scale ``[..., blocks]`` that float32 may give; NaN is ignored."""
    bounds = []
    for sign in (-1, 1):
        blocks = fmt.blocks(np.maximum(abs(near.value) + sign * near.error, 0))
        amax = np.stack([np.max(np.where(np.isnan(b), 0, b), axis=-1) for b in blocks], axis=-1)
        slack = 1 + sign * 4 * FLOAT32 if mode == "exact" else 1 + sign * FLOAT32
        moved = bool(np.any(near.error > 0))
        bounds.append(fmt.scale(amax * slack if moved else amax, mode))
    return bounds


def check_records(cache, slots, near, mode, before):
    """Check that the slots hold the quantised rows and that no other byte has changed."""
    fmt = definitions.format_of(cache.format.name)
    kept = [i for i, slot in enumerate(slots) if slot >= 0]
    slots, near = [slots[i] for i in kept], Near(near.value[kept], near.error[kept])
    stored = definitions.records(cache, slots)
    fp8 = near.at((..., slice(0, fmt.fp8_dim)))
    if fmt.block:
        low, high = scale_bounds(fmt, fp8, mode)
        assert (low <= stored.scales).all(), f"scales {stored.scales} are below {low}"
        assert (stored.scales <= high).all(), f"scales {stored.scales} are above {high}"
        spread = fmt.spread(stored.scales)
        loose = fp8.error + 2 * FLOAT32 * abs(fp8.value) if mode == "exact" else fp8.error
        fp8 = Near(fp8.value / spread, loose / spread)
    check_rounded("codes", stored.fp8, fp8, E4M3)
    rest = near.at((..., slice(fmt.fp8_dim, None)))
    check_rounded("bfloat16 dims", stored.bf16, rest, torch.bfloat16)
    at = definitions.places(cache, slots)
    named = [np.concatenate([at.fp8, at.bf16] + ([] if at.separate else [at.scales]), axis=1)]
    named += [at.scales] if at.separate else []
    after = definitions.memory(cache)
    for old, new, where in zip(before, after, [*named, named[0]], strict=False):
        untouched = np.ones(len(old), bool)
        untouched[where.reshape(-1)] = False
        assert (old[untouched] == new[untouched]).all(), "bytes of other records changed"


@fuzz(strategies.FUSED_ROPE, times=2)
def test_fused_rope_rmsnorm_quant(backend, shape):
    draw = draw_of(backend, shape)
    arguments = strategies.fused_rope_rmsnorm_quant(draw, shape)
    cache, q = arguments["cache"], arguments["q_rope"]
    given = {}
    if shape["kv_out"]:
        given["kv_out"] = torch.full_like(arguments["kv"], torch.nan, dtype=torch.bfloat16)
    if shape["out_dtype"] is not None:
        given["out"] = strategies.embedded(
            torch.ones(q.shape, device=q.device).to(shape["out_dtype"])
        )
    before = definitions.memory(cache)
    with poisoned_empty():
        out = sparsemla.fused_rope_rmsnorm_quant(**arguments, **given)
    assert out is given.get("out", out)
    assert out.dtype == (shape["out_dtype"] or q.dtype)
    names = ("cos_sin_cache", "positions", "interleaved")
    rope = {name: arguments[name] for name in names}
    check_rounded("queries", f64(out), definitions.rope_queries(q, **rope), out.dtype)
    weight, eps = arguments["kv_norm_weight"], arguments["eps"]
    rows = definitions.latent_rows(arguments["kv"], weight=weight, eps=eps, **rope)
    if shape["kv_out"]:
        check_rounded("kv_out", f64(given["kv_out"]), rows, torch.bfloat16)
    slots = ints(arguments["slot_mapping"]).tolist()
    check_records(cache, slots, rows, arguments["scale_mode"], before)


def index_rotation(arguments):
    names = ("cos_sin_cache", "positions", "interleaved", "rope_first")
    return {**{name: arguments[name] for name in names}, "transform": arguments["hadamard"]}


def check_index_keys(arguments, before):
    rows = definitions.index_keys(
        arguments["index_k"],
        arguments["norm_weight"],
        arguments["norm_bias"],
        eps=1e-6,
        **index_rotation(arguments),
    )
    slots = ints(arguments["slot_mapping"]).tolist()
    check_records(arguments["cache"], slots, rows, arguments["scale_mode"], before)


def check_index_queries(arguments, fmt, queries, weights):
    """Check the rotated, quantised queries; their scale is a factor of the head weights."""
    fmt, mode = definitions.format_of(fmt.name), arguments["scale_mode"]
    near = definitions.index_queries(arguments["index_q"], **index_rotation(arguments))
    factors = f64(arguments["weights"]) * (near.value.shape[1] * near.value.shape[2]) ** -0.5
    if not fmt.block:
        dtype = E4M3 if fmt.fp8_dim else torch.bfloat16
        check_rounded("queries", f64(queries), near, dtype)
        check_near("weights", weights, factors, 4 * FLOAT32 * abs(factors))
        return
    low, high = (bound[..., 0] for bound in scale_bounds(fmt, near, mode))
    got = f64(weights)
    right = np.zeros(got.shape, bool)
    for scale in (low, high):
        value = factors * scale
        slack = 4 * FLOAT32 * abs(value) + (abs(factors) * (high - low) if mode == "exact" else 0)
        loose = Near(
            near.value / scale[..., None],
            (
                near.error + (4 * FLOAT32 + (high / low - 1)[..., None]) * abs(near.value)
                if mode == "exact"
                else near.error
            )
            / scale[..., None],
        )
        codes = f64(queries)
        ends = [rounded(loose.value + sign * loose.error, E4M3) for sign in (-1, 1)]
        fits = np.isnan(loose.value) & np.isnan(codes) | (ends[0] <= codes) & (codes <= ends[1])
        right |= (abs(got - value) <= slack) & fits.all(axis=-1)
    assert right.all(), f"queries or weights at {np.argwhere(~right)[0]}"


@fuzz(strategies.APPEND_INDEX_KEYS, times=2)
def test_append_index_keys(backend, shape):
    arguments = strategies.append_index_keys(draw_of(backend, shape), shape)
    before = definitions.memory(arguments["cache"])
    sparsemla.append_index_keys(**arguments)
    check_index_keys(arguments, before)


@fuzz(strategies.FUSED_INDEXER)
def test_prepare_index_queries(backend, shape):
    arguments = strategies.prepare_index_queries(draw_of(backend, shape), shape)
    results = called("prepare_index_queries", arguments, ("out", "weights_out"))
    check_index_queries(arguments, arguments["format"], *results)


@fuzz(strategies.FUSED_INDEXER)
def test_fused_indexer_rope_quant(backend, shape):
    arguments = strategies.fused_indexer_rope_quant(draw_of(backend, shape), shape)
    before = definitions.memory(arguments["cache"])
    results = called("fused_indexer_rope_quant", arguments, ("out", "weights_out"))
    check_index_keys(arguments, before)
    check_index_queries(arguments, arguments["cache"].format, *results)


@settings(phases=PHASES)
@given(shape=strategies.CACHE_WRITE)
def test_cache_write_and_read(shape):
    draw = Draw(shape["seed"], "cpu", shape["strided"])
    cache, slots, rows = strategies.cache_write(draw, shape)
    mode, before = strategies.scale_mode(shape), definitions.memory(cache)
    cache.write(slots, rows, scale_mode=mode)
    kept = [i for i, slot in enumerate(slots.tolist()) if slot >= 0]
    wanted = definitions.quantized(
        definitions.format_of(cache.format.name), rows.float().numpy()[kept], mode
    )
    named = slots[kept]
    at = named.tolist()
    stored = definitions.records(cache, at)
    for name, got, value in zip(stored._fields, stored, wanted, strict=True):
        check_near(name, got, value, 0.0)
    near = Near(f64(rows), np.zeros(rows.shape))
    check_records(cache, slots.tolist(), near, mode, before)
    gathered = cache.gather(named)
    for name, value in zip(stored._fields, stored, strict=True):
        view = getattr(gathered, name)
        if view is not None:
            check_near(f"gathered {name}", view.float(), value, 0.0)
    check_near("read", cache.read(named), definitions.dequantized(cache, at), 0.0)


# --- products, branches, plans -------------------------------------------------------------------


def weights_of(weight):
    return definitions.head_weights(weight.data, weight.scale, weight.scale_block)


def block_of(weight):
    return None if weight.scale is None else weight.scale_block[1]


def fp8_unit(backend, near, weight):
    """Rounding of Hopper's FP8 MMA, which keeps 14 bits of a sum; 0 on other devices."""
    if backend.name != "cuda" or weight.scale is None:
        return 0.0
    zero = Near(abs(near.value), np.zeros_like(near.value))
    return 2.0**-12 * definitions.project_heads(zero, abs(weights_of(weight)), None).value


def projected(backend, near, weight):
    """A projection rounded to bfloat16, and its error."""
    value, error = definitions.project_heads(near, weights_of(weight), block_of(weight))
    error = error + fp8_unit(backend, near, weight)
    return Near(value, error + 1.01 * half_step(abs(value) + error, torch.bfloat16))


@fuzz(strategies.PROJECT_HEADS)
def test_project_heads(backend, shape):
    arguments = strategies.project_heads(draw_of(backend, shape), shape)
    (out,) = called("project_heads", arguments, ("out",))
    near = definitions.exactly(f64(arguments["x"]))
    if shape["num_parts"] is not None:
        names = ("lses", "attn_sink")
        value, _, terms = definitions.merge_states(
            arguments["x"], *(arguments[name] for name in names)
        )
        bound = 64 * FLOAT32 * terms
        near = Near(value, bound + 1.01 * half_step(abs(value) + bound, torch.bfloat16))
    check_near("out", out, *projected(backend, near, arguments["weight"]))


@fuzz(strategies.PROJECT_GROUPS)
def test_project_groups(backend, shape):
    arguments = strategies.project_groups(draw_of(backend, shape), shape)
    (out,) = called("project_groups", arguments, ("out",))
    x, weight = arguments["x"], arguments["weight"]
    near = definitions.exactly(f64(x))
    if "positions" in arguments:
        near = definitions.unrotated(x, arguments["cos_sin_cache"], arguments["positions"])
        if weight.scale is None:
            turned = slice(x.shape[2] - 2 * shape["rope_half"], None)
            value, error = abs(near.value[..., turned]), near.error[..., turned]
            near.error[..., turned] += 1.01 * half_step(value + error, torch.bfloat16)
    groups = len(x), shape["num_groups"], weight.data.shape[2]
    near = Near(near.value.reshape(groups), near.error.reshape(groups))
    check_near("out", out, *projected(backend, near, weight))


@fuzz(strategies.SELECTED_SCORES)
def test_selected_scores(backend, shape):
    draw = draw_of(backend, shape)
    arguments = strategies.selected_scores(draw, shape)
    scores = sparsemla.selected_scores(**arguments)
    check_near("scores", scores, definitions.selected_scores(**arguments), 0)
    dscores = draw.give(strategies.whole_numbers(draw, *scores.shape).float())
    grads = sparsemla.selected_scores_backward(dscores, **arguments)
    wanted = definitions.selected_scores_backward(dscores, **arguments)
    for name, got, expected in zip(("index_q", "weights", "index_k"), grads, wanted, strict=True):
        check_near(f"d{name}", got, expected, 1.01 * half_step(abs(expected), got.dtype))


def shared_lists(arguments, list_tokens):
    """The arguments of attention that neighbouring tokens share, if they share lists."""
    if list_tokens is None:
        return {}
    own = {name: arguments[name] for name in ("topk_indices", "topk_lengths")}
    lists = sparsemla.share_lists(**own, list_tokens=list_tokens)
    return {"list_tokens": list_tokens, **lists._asdict()}


@fuzz(strategies.SPARSE_ATTENTION)
def test_sparse_attention(backend, shape):
    draw = draw_of(backend, shape)
    arguments = strategies.sparse_attention(draw, shape)
    q, sink = arguments["q"], arguments["attn_sink"]
    lists = shared_lists(arguments, shape["list_tokens"])
    out, lse = sparsemla.sparse_attention(**arguments | lists)
    expected = definitions.listed_attention(**{**arguments, "q": loose_query(backend, q)})
    check_attention(backend, q, (out, lse), expected, sink=sink)

    inputs = (*(arguments.pop(name) for name in ("q", "kv", "topk_indices")), out, lse)
    dlse = draw.normal(*lse.shape) if shape["dlse"] else None
    dout = draw.normal(*out.shape, dtype=q.dtype)
    options = {**arguments, "dlse": dlse}
    grads = sparsemla.sparse_attention_backward(
        dout,
        *inputs[:2],
        out=out,
        lse=lse,
        deterministic=shape["deterministic"],
        **{"topk_indices": inputs[2]} | options | lists,
    )
    wanted = definitions.listed_gradients(dout, *inputs, **options)
    unit = 2.0**-15 if q.dtype == torch.float32 else 3.1 * 2.0**-8
    for name, got, near in zip(("dq", "dkv", "d_sink"), grads, wanted, strict=True):
        if got is None:
            continue
        bound = unit * near.error if name != "d_sink" else 2.0**-13 * near.error
        bound = bound + 1.01 * half_step(abs(near.value) + bound, got.dtype)
        check_near(name, got, near.value, bound)

    options = {**arguments, "normalize": shape["normalize"]}
    target = sparsemla.attention_target(*inputs[:3], lse, **options)
    wanted = definitions.attention_target(*inputs[:3], lse, **options)
    check_near("target", target, wanted, 2.0**-12 * wanted + 2.0**-30)


@fuzz(strategies.DENSE_INDEX)
def test_dense_index_loss(backend, shape):
    arguments = strategies.dense_index(draw_of(backend, shape), shape)
    loss, *grads = sparsemla.dense_index_gradients(**arguments)
    del arguments["max_workspace_bytes"]
    near, wanted = definitions.dense_index_gradients(**arguments)
    check_near("loss", loss, near.value, 2.0**-13 * near.error)
    unit = 2.0**-14 if arguments["q"].dtype == torch.float32 else 3.1 * 2.0**-8
    for name, got, grad in zip(("dindex_q", "dweights", "dindex_k"), grads, wanted, strict=True):
        bound = unit * grad.error
        bound = bound + 1.01 * half_step(abs(grad.value) + bound, got.dtype)
        check_near(name, got, grad.value, bound)


def branch_query(backend, arguments):
    """The rotated RoPE dims and the latent dims of the queries, both bfloat16."""
    layer, plan = arguments["layer"], arguments["plan"]
    nope = layer.qk_nope_head_dim
    rope = definitions.rope_queries(
        arguments["q"][..., nope:], layer.cos_sin_cache, plan.positions, layer.interleaved
    )
    rope = Near(rope.value, rope.error + 1.01 * half_step(rope.value, torch.bfloat16))
    return definitions.exactly(f64(arguments["q"][..., :nope])), rope


def check_branch_rows(arguments, before):
    """Check that the cache has the step's rows and no other changes."""
    layer, plan = arguments["layer"], arguments["plan"]
    rows = definitions.latent_rows(
        arguments["kv"],
        layer.cos_sin_cache,
        layer.kv_norm_weight,
        plan.positions,
        layer.norm_eps,
        layer.interleaved,
    )
    slots = ints(plan.slot_mapping).tolist()
    check_records(arguments["cache"], slots, rows, "pow2", before)


def absorbed(backend, arguments):
    """The branch in the absorbed form, over the rows that the op has stored."""
    layer, plan, cache = (arguments[name] for name in ("layer", "plan", "cache"))
    nope, rope = branch_query(backend, arguments)
    query = definitions.joined([projected(backend, nope, layer.w_uk), rope])
    query = Near(query.value, query.error + SUM * abs(query.value))
    constants = layer.softmax_scale, layer.attn_sink
    if "topk_indices" in arguments:
        streams = []
        for prefix in ("", "extra_"):
            if (stored := arguments.get(f"{prefix}cache")) is not None:
                lengths = arguments[f"{prefix}topk_lengths"]
                indices = ints(arguments[f"{prefix}topk_indices"])
                lengths = None if lengths is None else ints(lengths)
                streams.append(definitions.Stream(stored, indices, lengths))
        state = definitions.sparse_attention(query, streams, *constants)
    else:
        table, lengths = plan.page_table[plan.request_ids], ints(plan.positions) + 1
        state = definitions.dense_decode(
            query.at((slice(None), None)), cache, table, lengths, constants[0], True, constants[1]
        )
        state = definitions.Attention(*(field[:, 0] for field in state))
    bound = 1.02 * 2.0**-8 * state.terms + state.shaken
    bound += 2.1 * half_step(abs(state.out) + bound, torch.bfloat16)
    return projected(backend, Near(state.out, bound), layer.w_uv)


def expanded(backend, arguments, num_merges):
    """The dense branch with keys and values per head, from the rows that the op has stored."""
    layer, plan, cache = (arguments[name] for name in ("layer", "plan", "cache"))
    query = definitions.joined(branch_query(backend, arguments))
    query = Near(query.value, query.error + SUM * abs(query.value))
    table, lengths = ints(plan.page_table), ints(plan.seq_lens)
    slots = [definitions.keys_of_request(cache, table[b], int(n)) for b, n in enumerate(lengths)]
    rows = definitions.dequantized(cache, np.concatenate(slots))[:, None]
    latent, rope = np.split(rows, [layer.kv_lora_rank], axis=-1)
    latent = definitions.exactly(latent)
    rope = definitions.exactly(np.repeat(rope, layer.num_heads, axis=1))
    keys = definitions.joined([projected(backend, latent, layer.w_uk.transpose()), rope])
    values = projected(backend, latent, layer.w_uv)
    ends = np.concatenate([[0], np.cumsum([len(s) for s in slots])])
    scale = layer.softmax_scale
    state = definitions.dense_prefill(
        query, keys, values, ints(plan.input_row_offsets), ends, scale, True
    )
    # Each merged piece of context rounds the output again.
    rounding = 1.02 * 2.0**-8 * (2.1 + 2.1 * num_merges)
    return Near(state.out, rounding * state.terms + state.shaken)


def check_branch(op, arguments, expected, options, real):
    """Check a branch: the step's rows in the cache, and the outputs of tokens except padding."""
    before = definitions.memory(arguments["cache"])
    (out,) = called(op, {**arguments, **options}, ("out",))
    check_branch_rows(arguments, before)
    value, error = expected(arguments)
    check_near("out", out[:real], value[:real], error[:real])


@fuzz(strategies.BRANCH)
def test_decode_branch(backend, shape):
    draw = draw_of(backend, shape)
    arguments = strategies.branch(draw, shape)
    if shape["sparse"] and shape["extra"]:
        plan = arguments["plan"]
        arguments.update(strategies.extra_stream(draw, shape, arguments["cache"], plan.num_tokens))
    real = sum(m for m, _ in shape["requests"])
    check_branch("decode_branch", arguments, lambda case: absorbed(backend, case), {}, real)


@fuzz(strategies.BRANCH)
def test_prefill_branch(backend, shape):
    if not shape["sparse"]:
        shape = {**shape, "sink": False}
    arguments = strategies.branch(draw_of(backend, shape), shape)
    plan, options = arguments["plan"], {"workspace_rows": shape["workspace_rows"]}
    real = sum(m for m, _ in shape["requests"])
    share = max(shape["workspace_rows"] // plan.num_requests, 1)

    def definition(case):
        if shape["sparse"]:
            return absorbed(backend, case)
        return expanded(backend, case, -(-plan.max_context_len // share))

    check_branch("prefill_branch", arguments, definition, options, real)


@settings(phases=PHASES, max_examples=10 * settings.default.max_examples)
@given(shape=strategies.PLANS)
def test_plan_batch(shape):
    queries, lengths, table, shard = strategies.plan_arguments(Draw(shape["seed"]), shape)
    padded = None if shape["padding"] is None else sum(queries) + shape["padding"]
    wanted = definitions.plan(
        queries,
        lengths,
        ints(table),
        shape["page_size"],
        shape["decode_threshold"],
        shape["require_uniform"],
        shape["workspace_rows"],
        padded,
        (0, 1, 1) if shard is None else (shard.rank, shard.num_ranks, shard.interleave),
    )
    buffers = PlanBuffers(6, 40, table.shape[1] + 1, "cpu") if shape["buffered"] else None

    def planned():
        return plan_batch(
            queries,
            lengths,
            table,
            page_size=shape["page_size"],
            workspace_rows=shape["workspace_rows"],
            decode_threshold=shape["decode_threshold"],
            require_uniform=shape["require_uniform"],
            num_padded_tokens=padded,
            shard=shard,
            buffers=buffers,
        )

    if wanted is None:
        with pytest.raises(ValueError, match=r"query_lens|num_padded_tokens|workspace_rows"):
            planned()
        return
    plan, chunks = planned(), wanted.pop("chunks")
    for name, value in wanted.items():
        got = getattr(plan, name)
        assert (got.tolist() if isinstance(got, torch.Tensor) else got) == value, name
    assert torch.equal(plan.page_table[:, : table.shape[1]], table)
    assert len(plan.prefill_chunks) == len(chunks)
    for chunk, (requests, tokens, rows, lens) in zip(plan.prefill_chunks, chunks, strict=True):
        assert (chunk.requests, chunk.tokens, chunk.num_workspace_rows) == (requests, tokens, rows)
        assert torch.equal(chunk.page_table, plan.page_table[requests])
        assert chunk.seq_lens.tolist() == lens
        starts = slice(requests.start - plan.num_decodes, requests.stop - plan.num_decodes)
        assert torch.equal(chunk.workspace_starts, plan.workspace_starts[starts])

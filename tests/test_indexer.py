"""Properties of the indexer, and its memory; test_tiers.py has the values."""

import math
from contextlib import contextmanager

import pytest
import torch

import sparsemla
from sparsemla import (
    INDEX_FP8,
    PagedCache,
    Pooling,
    WindowState,
    bf16_format,
    plan_batch,
    reference,
)
from sparsemla.formats import to_fp8
from sparsemla_lab.testing.cases import (
    Draw,
    indexer_scores_case,
    indexer_scores_paged_case,
    indexer_topk_blocks_case,
    indexer_topk_case,
)
from sparsemla_lab.testing.compare import (
    UNQUANTIZED_SCORES,
    assert_close,
    assert_equal,
    assert_selection,
    run_reference,
    score_sizes,
)
from sparsemla_lab.testing.shapes import INDEX_FORMATS

by_format = pytest.mark.parametrize("fmt", INDEX_FORMATS)
by_dtype = pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bf16"])


def test_scores_match_the_formula(device):
    case = indexer_scores_case(Draw(3, device), num_tokens=3, num_keys=7, num_heads=2, exact=True)
    got = sparsemla.indexer_scores(**case)
    for m in range(3):
        for n in range(7):
            inside = case["row_starts"][m] <= n < case["row_ends"][m]
            dots = case["index_q"][m].double() @ case["index_k"][n].double()
            score = (case["weights"][m].double() * dots.clamp_min(0)).sum()
            expected = score * case["index_k_scales"][n].double() if inside else -torch.inf
            assert float(got[m, n]) == float(expected)


def test_fp8_scores_are_close_to_unquantised_scores(device):
    draw = Draw(9, device)
    q, keys = draw.normal(20, 64, 128), draw.normal(200, 128)
    weights = draw.normal(20, 64)
    full = torch.zeros(20, dtype=torch.int32, device=device)
    stored = INDEX_FP8.quantize(keys)
    case = {"weights": weights, "row_starts": full, "row_ends": full + 200}
    got = sparsemla.indexer_scores(
        index_q=to_fp8(q), index_k=stored.fp8, index_k_scales=stored.scales[:, 0], **case
    )
    case |= {"index_q": q, "index_k": keys, "index_k_scales": None}
    (expected,) = run_reference("indexer_scores", case)
    sizes = score_sizes("indexer_scores", case)
    assert_close("scores", got, expected, UNQUANTIZED_SCORES, sizes)


def test_paged_scores_equal_ragged_scores(device):
    case = indexer_scores_paged_case(Draw(12, device), seq_lens=[130], exact=True)
    paged = sparsemla.indexer_scores_paged(**case)
    positions = torch.arange(130, device=device)
    slots = sparsemla.slots_of(case["page_table"], positions * 0, positions, 64)
    stored = case["cache"].gather(slots)
    ragged = sparsemla.indexer_scores(
        case["index_q"][0],
        case["weights"][0],
        stored.fp8,
        stored.scales[:, 0],
        row_starts=torch.tensor([0], device=device),
        row_ends=torch.tensor([130], device=device),
    )
    assert_equal("scores", paged[0, :, :130].contiguous(), ragged)
    assert (paged[0, :, 130:] == -torch.inf).all()


@pytest.mark.parametrize("ratio", [4, 128])
def test_selections_of_pooled_keys_do_not_depend_on_the_chunks(device, ratio):
    """Whole, in chunks, and as requests of one token that bring their own number of keys."""
    case = indexer_topk_case(
        Draw(42, device),
        query_lens=[300],
        seq_lens=[300],
        topk=16,
        ratio=ratio,
        page_size=2,
        exact=False,
    )
    whole = sparsemla.indexer_topk(**case)

    def select(first, last, offsets, seq_lens, **options):
        some = {name: case[name][first:last] for name in ("index_q", "weights")}
        some["input_row_offsets"] = torch.tensor(offsets, device=device)
        some["seq_lens"] = torch.tensor(seq_lens, device=device)
        return sparsemla.indexer_topk(**case | some | options)

    for size in (3, 127, 128, 129):
        for first in range(0, 300, size):
            last = min(first + size, 300)
            chosen = select(first, last, [0, last - first], [last])
            assert_equal(f"chunks of {size}", chosen, whole[first:last])
    for limit in (1, 5000):
        chosen = sparsemla.indexer_topk(**case, max_workspace_bytes=limit)
        assert_equal(f"in {limit} bytes", chosen, whole)
    counts = [(position + 1) // ratio for position in range(300)]
    alone = {"ratio": 1, "causal": False, "page_table": case["page_table"].expand(300, -1)}
    assert_equal("alone", select(0, 300, list(range(301)), counts, **alone), whole)


@pytest.mark.parametrize("page_size", [1, 61, 64])
def test_blocks_divide_the_keys_of_a_selection(device, page_size):
    """Among all blocks the selection is that of all keys, among others that of their keys alone."""
    sizes = {"query_lens": [5, 1], "seq_lens": [200, 90], "topk": 16, "page_size": page_size}
    case = indexer_topk_blocks_case(Draw(46, device), **sizes, topk_blocks=4)
    chosen, blocks = sparsemla.indexer_topk_blocks(**case)
    request = {name: value for name, value in case.items() if name != "topk_blocks"}
    all_blocks = torch.arange(25, device=device).expand(6, 25)
    within = sparsemla.indexer_topk_of_blocks(**request, blocks=all_blocks)
    assert_equal("among all blocks", within, chosen)
    best = sparsemla.indexer_topk_of_blocks(**request | {"topk": 1}, blocks=blocks)
    alone = sparsemla.indexer_topk_blocks(**case | {"topk": 1})[0]
    assert_equal("the best key is in the best blocks", best, alone)
    within = sparsemla.indexer_topk_of_blocks(**request, blocks=blocks)
    last = torch.tensor([195, 196, 197, 198, 199, 89], device=device) // 8
    for token in range(6):
        kept = blocks[token].tolist()
        assert int(last[token]) in kept
        assert kept == sorted(set(kept))
        assert set((within[token] // 8).tolist()) <= set(kept)
    for limit in (1, 5000):
        options = {"max_workspace_bytes": limit}
        for name, got, wanted in zip(
            ("keys", "blocks"),
            sparsemla.indexer_topk_blocks(**case, **options),
            (chosen, blocks),
            strict=True,
        ):
            assert_equal(f"{name} in {limit} bytes", got, wanted)
        got = sparsemla.indexer_topk_of_blocks(**request, blocks=blocks, **options)
        assert_equal(f"among blocks in {limit} bytes", got, within)


@pytest.mark.parametrize(("step", "rejected"), [(3, True), (7, False), (129, False)])
def test_selections_from_pools_do_not_depend_on_the_steps(device, step, rejected):
    """Keys are pooled and selected from in steps, behind padding, after drafts that were wrong.

    The keys of later tokens of a step are in the cache already, and so are those of wrong drafts.
    """
    total, pooling, draw = 150, Pooling(4, overlap=True), Draw(45, device)
    q, weights = draw.normal(total, 4, 128, dtype=torch.float8_e4m3fn), draw.normal(total, 4)
    values, gates = draw.normal(2, total, 256).unbind()
    norm_weight, table = torch.ones(128, device=device), torch.ones(total, 64, device=device)
    tokens, keys = draw.permutation(5)[None].int(), draw.permutation(10)[None].int()

    def serve(step, rejected):
        state = WindowState.allocate(pooling, 128, num_rings=1, max_drafts=step, device=device)
        state.rows.fill_(math.nan)
        cache = PagedCache.allocate(INDEX_FP8, 10, 4, device=device)
        chosen = []
        for first in range(0, total, step):
            some = slice(first, min(first + step, total))
            padded = some.stop - first + 2
            plan = plan_batch(
                [some.stop - first],
                [some.stop],
                tokens,
                page_size=32,
                workspace_rows=None,
                decode_threshold=0,
                num_padded_tokens=padded,
            )
            entries = plan.entries(keys, ratio=4, page_size=4)
            for wrong in [3.0, 0.0] if rejected else [0.0]:
                step_values = torch.full((padded, 256), math.nan, device=device)
                step_values[:-2] = values[some] + wrong
                sparsemla.pool_windows(
                    step_values,
                    torch.nn.functional.pad(gates[some], (0, 0, 0, 2)),
                    norm_weight,
                    table,
                    state,
                    cache,
                    pooling=pooling,
                    positions=plan.positions,
                    request_ids=plan.request_ids,
                    input_row_offsets=plan.input_row_offsets,
                    ring_ids=torch.zeros(1, dtype=torch.int32, device=device),
                    slot_mapping=entries.slot_mapping,
                )
            queries = torch.cat([q[some], q[:2]]), torch.cat([weights[some], weights[:2]])
            slots = sparsemla.indexer_topk(
                *queries,
                cache,
                input_row_offsets=plan.input_row_offsets,
                seq_lens=plan.seq_lens,
                page_table=entries.page_table,
                topk=9,
                ratio=entries.ratio,
                as_slots=True,
            )
            assert (slots[-2:] == -1).all()
            chosen.append(slots[:-2])
        return torch.cat(chosen)

    whole = serve(total, False)
    assert ((whole >= 0).sum(1).cpu() == ((torch.arange(total) + 1) // 4).clamp_max(9)).all()
    assert_equal("slots", serve(step, rejected), whole)


def test_lengths_of_pooled_keys_are_validated(device):
    case = indexer_topk_case(Draw(44, device), query_lens=[1], seq_lens=[256], ratio=4, page_size=4)
    case["page_table"] = case["page_table"][:, :16] * 0  # room for 64 keys
    for length, fits in ((259, True), (260, False), (-1, False)):
        case["seq_lens"] = torch.tensor([length], device=device)
        if fits:
            sparsemla.indexer_topk(**case, validate=True)
        else:
            with pytest.raises(ValueError, match=r"seq_lens must lie in \[0, 260\), got"):
                sparsemla.indexer_topk(**case, validate=True)


def test_selections_of_random_values_are_the_best_ones(device):
    case = indexer_topk_case(
        Draw(18, device), query_lens=[30, 4], seq_lens=[200, 90], topk=64, exact=False
    )
    ids = sparsemla.indexer_topk(**case)
    row = 0
    for request, (queries, length) in enumerate(((30, 200), (4, 90))):
        scores = reference.indexer_scores_paged(
            case["index_q"][None, row : row + queries],
            case["weights"][None, row : row + queries],
            case["cache"],
            case["page_table"][request : request + 1],
            torch.tensor([length], device=device),
            max_seq_len=length,
        )
        assert_selection("ids", ids[row : row + queries], scores[0], 64)
        row += queries


@contextmanager
def num_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def peak_bytes(function):
    """Peak memory that a call allocates on the CPU, bytes."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        function()
    changes = [
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    ]
    assert changes
    allocated = peak = 0
    for _, change in sorted(changes):
        allocated += change
        peak = max(peak, allocated)
    return peak


def test_peak_bytes_includes_temporaries():
    assert peak_bytes(lambda: torch.zeros(2**20).exp().sum()) == pytest.approx(8 << 20, rel=0.01)


def test_selections_fit_their_workspace():
    # Narrow keys and one head: scores dominate the memory.
    case = indexer_topk_case(
        Draw(23),
        query_lens=[1000, 1],
        seq_lens=[4096, 1500],
        num_heads=1,
        format=bf16_format(16),
        topk=64,
    )
    expected = sparsemla.indexer_topk(**case)
    all_scores, limit = 1000 * 4096 * 4, 1 << 20
    results = []
    peak = peak_bytes(
        lambda: results.append(sparsemla.indexer_topk(**case, max_workspace_bytes=limit))
    )
    assert_equal("ids", results[0], expected)
    # The products of the head and the keys, masks and indices of the selection come on top.
    assert peak < 8 * limit + (1 << 20) < all_scores


def test_one_row_of_scores_may_exceed_the_workspace():
    case = indexer_topk_case(
        Draw(26), query_lens=[2], seq_lens=[60000], num_heads=1, format=bf16_format(16), topk=100
    )
    expected = sparsemla.indexer_topk(**case)
    limit = 16 << 10
    results = []
    peak = peak_bytes(
        lambda: results.append(sparsemla.indexer_topk(**case, max_workspace_bytes=limit))
    )
    assert_equal("ids", results[0], expected)
    assert peak < 60000 * 16 * 2 / 2  # half of the keys alone


@pytest.mark.parametrize("limit", [3_999_999, 4_000_000])
def test_memory_does_not_grow_with_the_context(limit):
    # Below four bytes for each key, the best of several pieces are merged.
    case = indexer_topk_case(Draw(27), query_lens=[1], seq_lens=[300], num_heads=4, topk=64)
    case["page_table"] = case["page_table"][:, :1].expand(1, 15625).contiguous()
    case["seq_lens"] = torch.tensor([1_000_000])
    peak = peak_bytes(lambda: sparsemla.indexer_topk(**case, max_workspace_bytes=limit))
    assert peak < limit + (40 << 20)


def duplicated_keys(draw, *, num_keys, fmt=INDEX_FP8, query_lens=(7,), distinct=40):
    """One request for each query length; its keys repeat a few rows in random order."""
    lens = [num_keys] * len(query_lens)
    case = indexer_topk_case(
        draw, query_lens=list(query_lens), seq_lens=lens, format=fmt, num_heads=5, exact=False
    )
    cache, table = case["cache"], case["page_table"].long()
    positions = draw.integers(0, num_keys, len(query_lens) * num_keys).long()
    requests = torch.arange(len(lens), device=draw.device).repeat_interleave(num_keys)
    slots = sparsemla.slots_of(table, requests, positions, cache.page_size)
    few = slots[draw.integers(0, distinct, len(slots)).long()]
    everywhere = torch.arange(len(slots), device=draw.device) % num_keys
    targets = sparsemla.slots_of(table, requests, everywhere, cache.page_size)
    for part in cache.stored():  # torch does not write e8m0 by index
        if part is not None:
            rows = part[few // cache.page_size, few % cache.page_size].clone()
            part[targets // cache.page_size, targets % cache.page_size] = rows
    return case


@by_dtype
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (1, 64), (3, 5), (70, 8)])
def test_equal_keys_get_equal_scores(device, tokens, heads, threads, fp8):
    # 4097 keys: blocks of any size have a last one of another.
    case = indexer_scores_case(
        Draw(28, device), num_tokens=tokens, num_keys=4097, num_heads=heads, fp8=fp8
    )
    case["index_k"][:] = case["index_k"][:1].clone()
    case["row_starts"].zero_()
    case["row_ends"].fill_(4097)
    if case["index_k_scales"] is not None:
        case["index_k_scales"].fill_(0.37)
    with num_threads(threads):
        scores = sparsemla.indexer_scores(**case)
        alone = sparsemla.indexer_scores(
            **{
                name: value if name in ("index_k", "index_k_scales") or value is None else value[:1]
                for name, value in case.items()
            }
        )
    assert (scores == scores[:, :1]).all()
    assert_equal("the first token alone", alone, scores[:1])


@by_format
def test_selections_from_equal_keys_are_deterministic(device, fmt):
    for seed, num_keys in enumerate((517, 2049, 4100)):
        draw = Draw(29 + seed, device)
        case = duplicated_keys(draw, num_keys=num_keys, fmt=fmt, query_lens=(5, 1, 9))
        expected = sparsemla.indexer_topk(**case)
        for limit in (1, 4 * num_keys - 1, 3 * 4 * num_keys):
            got = sparsemla.indexer_topk(**case, max_workspace_bytes=limit)
            assert_equal(f"seed {seed}, limit {limit}", got, expected)
        for request, at in enumerate((slice(0, 5), slice(5, 6), slice(6, 15))):
            own = {name: case[name][request : request + 1] for name in ("seq_lens", "page_table")}
            own |= {name: case[name][at] for name in ("index_q", "weights")}
            own["input_row_offsets"] = torch.tensor([0, at.stop - at.start], device=device)
            got = sparsemla.indexer_topk(**case | own)
            assert_equal(f"seed {seed}, request {request} alone", got, expected[at])


@by_format
def test_ties_go_to_the_lower_position(device, fmt):
    for seed, num_keys in enumerate((500, 2049, 4097)):
        draw = Draw(39 + seed, device)
        case = duplicated_keys(draw, num_keys=num_keys, fmt=fmt) | {"causal": False, "topk": 300}
        ids = sparsemla.indexer_topk(**case).long()
        positions = torch.arange(num_keys, device=device)
        slots = sparsemla.slots_of(case["page_table"], 0 * positions, positions, 64)
        rows = case["cache"].read(slots)
        _, kinds = rows.unique(dim=0, return_inverse=True)
        for row in ids:
            chosen = torch.zeros(num_keys, dtype=torch.bool, device=device)
            chosen[row] = True
            for kind in kinds.unique():
                of_kind = chosen[kinds == kind]
                assert of_kind[: int(of_kind.sum())].all(), "a later one of equal keys was taken"

"""Pooled windows, on the CPU and on a GPU, against the reference."""

import math
from dataclasses import replace

import pytest
import torch

import sparsemla
from sparsemla import (
    PagedCache,
    Pooling,
    WindowState,
    bf16_format,
    reference,
)
from sparsemla_lab.testing.cases import Draw, pool_windows_case
from sparsemla_lab.testing.compare import (
    BFLOAT16_ULP,
    FLOAT32_ULPS,
    assert_close,
    assert_equal,
    assert_rows_close,
    run_reference,
)
from sparsemla_lab.testing.poison import poisoned_empty

CSA, HCA = Pooling(4, overlap=True), Pooling(128)
SMALL = bf16_format(96)


def check_pool(make):
    """Run the op and its reference on the same draws; compare entries, rings and other rows."""
    actual, expected = make(), make()
    before = [part if part is None else part.clone() for part in actual["cache"].fields()]
    with poisoned_empty():
        sparsemla.pool_windows(**actual)
    (rows,) = run_reference("pool_windows", expected)
    assert_rows_close("cache", actual["cache"], expected["cache"])
    assert_close("state", actual["state"].rows, expected["state"].rows, FLOAT32_ULPS)
    closing = (actual["positions"] + 1) % actual["pooling"].ratio == 0
    written = actual["slot_mapping"][closing]
    untouched = torch.ones(actual["cache"].num_slots, dtype=torch.bool)
    untouched[written[written >= 0].cpu().long()] = False
    for was, part in zip(before, actual["cache"].fields(), strict=True):
        if part is not None:
            kept = untouched.to(part.device)
            assert_equal("other rows", part.flatten(0, 1)[kept], was.flatten(0, 1)[kept])
    if "kv_out" in actual:
        assert_close("kv_out", actual["kv_out"].float(), rows.float(), BFLOAT16_ULP)
    return actual


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": torch.float16, "table_dtype": torch.bfloat16},
        {"state_page": 4},
        {"state_page": 40, "max_drafts": 2, "with_rows": True},
        {"rope_dim": 0},
        {"steps": [(0, 300)]},
        {"steps": [(17, 1)]},
        {"steps": [(7, 2), (7, 2), (300 - 40, 40)], "page_size": 64},
    ],
    ids=str,
)
@pytest.mark.parametrize("pooling", [CSA, HCA])
def test_windows_with_options(device, pooling, options):
    check_pool(lambda: pool_windows_case(Draw(1, device), SMALL, pooling, **options))


def serve(device, pooling, chunks, *, max_drafts=0, rejected=(), state_page=None):
    """Entries and ring of one request of 300 tokens, served in chunks; NaN where nothing was kept.

    ``rejected`` chunks are served with other values before the real ones. With ``state_page`` rows
    of the ring are kept on pages of so many.
    """
    draw = Draw(5, device)
    total, dim = 300, SMALL.head_dim
    values, gates = draw.normal(2, total, pooling.width(dim)).unbind()
    fixed = {
        "norm_weight": draw.normal(dim),
        "cos_sin_cache": pool_windows_case(Draw(0, device), SMALL, pooling)["cos_sin_cache"],
        "gate_bias": draw.normal(pooling.ratio, pooling.width(dim)),
        "pooling": pooling,
        "state": WindowState.allocate(
            pooling, dim, num_rings=2, max_drafts=max_drafts, device=device
        ),
        "cache": PagedCache.allocate(SMALL, 40, 8, device=device),
        "ring_ids": draw.tensor([1]),
    }
    if state_page is not None:
        num_pages = -(-total // state_page)
        rows = torch.empty(num_pages + 1, state_page, 2, pooling.width(dim), device=device)
        fixed["state"] = WindowState(rows)
        fixed["ring_ids"] = draw.permutation(num_pages)[None].int()
    fixed["state"].rows.fill_(math.nan)
    first = 0
    for number, count in enumerate(chunks):
        positions = torch.arange(first, first + count, device=device)
        for wrong in ([True] if number in rejected else []) + [False]:
            part = values[first : first + count], gates[first : first + count]
            step = [x + 3 for x in part] if wrong else part
            sparsemla.pool_windows(
                *step,
                positions=positions,
                request_ids=torch.zeros_like(positions),
                input_row_offsets=draw.tensor([0, count]),
                slot_mapping=positions // pooling.ratio,
                **fixed,
            )
        first += count
    assert first == total
    return fixed["cache"].data, fixed["state"].rows


@pytest.mark.parametrize("pooling", [CSA, HCA])
@pytest.mark.parametrize(
    "chunks",
    [[1] * 300, [3] * 100, [4] * 75, [5] * 60, [127, 128, 45], [129, 1, 1, 169], [7, 293]],
    ids=lambda chunks: f"{chunks[0]}-{len(chunks)}",
)
def test_entries_do_not_depend_on_the_chunks(device, pooling, chunks):
    whole, _ = serve(device, pooling, [300])
    parts, _ = serve(device, pooling, chunks)
    assert whole.isfinite().all()
    assert_equal("entries", parts, whole)


@pytest.mark.parametrize("state_page", [None, 4, 8])
@pytest.mark.parametrize("pooling", [CSA, HCA])
def test_rejected_drafts_leave_no_trace(device, pooling, state_page):
    whole, _ = serve(device, pooling, [300])
    rejected = range(1, 50, 2)
    drafts, rows = serve(
        device, pooling, [6] * 50, max_drafts=6, rejected=rejected, state_page=state_page
    )
    assert_equal("entries", drafts, whole)
    if state_page is not None:  # every row is kept, so that any prefix can be continued
        assert rows[:-1].flatten(0, 1).isfinite().all(-1).all(-1).sum() == 300


@pytest.mark.parametrize("value", [-1, 1 << 20])
def test_rows_without_a_page_take_no_part(device, value):
    def make():
        case = pool_windows_case(Draw(6, device), SMALL, HCA, steps=[(127, 1)], state_page=8)
        case["ring_ids"][0, 3:5] = value
        return case

    check_pool(make)
    shorter = make()
    shorter["ring_ids"] = shorter["ring_ids"][:, :12].contiguous()  # the token's own page is absent
    check_pool(lambda: shorter | {"cache": make()["cache"], "state": make()["state"]})


def test_a_batch_gives_each_request_its_own_entries(device):
    case = pool_windows_case(Draw(2, device), SMALL, CSA)
    sparsemla.pool_windows(**case)
    alone = pool_windows_case(Draw(2, device), SMALL, CSA)
    offsets = alone["input_row_offsets"].tolist()
    for request in range(len(alone["ring_ids"])):
        rows = slice(offsets[request], offsets[request + 1])
        per_token = ("values", "gates", "positions", "slot_mapping")
        single = alone | {name: alone[name][rows] for name in per_token}
        single["request_ids"] = torch.zeros_like(single["positions"])
        count = offsets[request + 1] - offsets[request]
        single["input_row_offsets"] = Draw(0, device).tensor([0, count])
        single["ring_ids"] = alone["ring_ids"][request : request + 1]
        sparsemla.pool_windows(**single)
    assert_equal("entries", alone["cache"].data, case["cache"].data)
    assert_equal("state", alone["state"].rows, case["state"].rows)


def test_against_the_formula_in_float64():
    pooling, fmt = CSA, bf16_format(96)
    case = pool_windows_case(
        Draw(3), fmt, pooling, steps=[(0, 8)], rope_dim=32, dtype=torch.float32, bias=False
    )
    case["slot_mapping"] = torch.arange(11, dtype=torch.int32)
    sparsemla.pool_windows(**case)
    values, gates = case["values"].double(), case["gates"].double()
    old, own = values[:, :96], values[:, 96:]
    old_gates, own_gates = gates[:, :96], gates[:, 96:]
    for token, window, weights in (
        (3, own[:4], own_gates[:4]),
        (7, torch.cat([old[:4], own[4:8]]), torch.cat([old_gates[:4], own_gates[4:8]])),
    ):
        x = (weights.softmax(0) * window).sum(0)
        x = x * (x.square().mean() + 1e-6).rsqrt() * case["norm_weight"].double()
        cos, sin = case["cos_sin_cache"][token - 3].double().chunk(2)
        a, b = x[64::2].clone(), x[65::2].clone()
        x[64::2], x[65::2] = a * cos - b * sin, a * sin + b * cos
        got = case["cache"].read(torch.tensor([token]))[0]
        assert_close("entry", got.float(), x.bfloat16().float(), BFLOAT16_ULP)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_gates_that_are_no_numbers_stay_in_their_dim(device, value):
    case = pool_windows_case(Draw(4, device), SMALL, HCA, steps=[(0, 128)], dtype=torch.float32)
    expected = pool_windows_case(Draw(4, device), SMALL, HCA, steps=[(0, 128)], dtype=torch.float32)
    for each in (case, expected):
        each["gates"][100, 5] = value
    sparsemla.pool_windows(**case)
    reference.pool_windows(**expected)
    got, wanted = case["cache"].data.float(), expected["cache"].data.float()
    assert_equal("finite", got.isfinite().float(), wanted.isfinite().float())


@pytest.mark.parametrize(("name", "value"), [("slot_mapping", 10**6), ("positions", 10**6)])
def test_errors_of_the_cpu_name_the_op_before_it_writes(name, value):
    case = pool_windows_case(Draw(0), SMALL, CSA, steps=[(0, 12)])
    case[name] = case[name].clone()
    case[name][11] = value if name == "slot_mapping" else value + 3
    before = case["cache"].data.clone(), case["state"].rows.clone()
    with pytest.raises(ValueError, match=f"^pool_windows: {name} must .* got {case[name][11]}"):
        sparsemla.pool_windows(**case)
    assert_equal("cache", case["cache"].data, before[0])
    assert_equal("state", case["state"].rows, before[1])


def test_rings_are_copied():
    state = WindowState.allocate(CSA, 8, num_rings=4)
    state.rows.copy_(torch.randn_like(state.rows))
    before = state.rows.clone()
    state.copy(torch.tensor([0, 1]), torch.tensor([1, 3]))
    assert_equal("rows", state.rows, before[[0, 0, 2, 1]])


@pytest.mark.parametrize("wrong", [-1, 4, 2**40])
@pytest.mark.parametrize("name", ["sources", "targets"])
def test_rings_that_do_not_exist_are_not_copied(name, wrong):
    state = WindowState(torch.randn(4, 8, 2, 8))
    before = state.rows.clone()
    rings = {"sources": torch.tensor([0, 1]), "targets": torch.tensor([1, 3])}
    rings[name] = torch.tensor([2, wrong])
    with pytest.raises(ValueError, match=rf"^{name} must lie in \[0, 4\), got {wrong}$"):
        state.copy(**rings)
    assert_equal("rows", state.rows, before)


def test_no_tokens_and_no_rings(device):
    case = pool_windows_case(Draw(0, device), SMALL, CSA)
    before = case["cache"].data.clone(), case["state"].rows.clone()
    for name in ("values", "gates", "positions", "slot_mapping", "request_ids"):
        case[name] = case[name][:0]
    case["input_row_offsets"] = torch.zeros_like(case["input_row_offsets"])
    sparsemla.pool_windows(**case)
    assert_equal("cache", case["cache"].data, before[0])
    assert_equal("state", case["state"].rows, before[1])
    check_pool(
        lambda: (
            pool_windows_case(Draw(0, device), SMALL, CSA, steps=[(0, 9), (0, 5)])
            | {"state": WindowState(torch.empty(0, 8, 2, 192, device=device))}
        )
    )


def wrong(**changes):
    return lambda case: case | changes


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (wrong(pooling=4), TypeError, "pool_windows: pooling must be a Pooling, got int"),
        (wrong(state=None), TypeError, "pool_windows: state must be a WindowState, got NoneType"),
        (
            lambda case: case | {"values": case["values"][:, 1:]},
            ValueError,
            r"pool_windows: values must have shape \[T, W\] = \[31, 192\], got \[31, 191\]",
        ),
        (
            lambda case: case | {"state": WindowState(case["state"].rows[:, :7])},
            ValueError,
            "pool_windows: state must have rings of at least 8 rows, got 7",
        ),
        (
            lambda case: (
                case
                | {"state": WindowState(case["state"].rows[:, :0])}
                | {"ring_ids": case["ring_ids"][:, None]}
            ),
            ValueError,
            "pool_windows: state must have pages of at least 1 rows, got 0",
        ),
        (
            lambda case: case | {"ring_ids": case["ring_ids"][None, None]},
            ValueError,
            r"pool_windows: ring_ids must have shape \[B\], got \[1, 1, 6\]",
        ),
        (
            lambda case: case | {"gate_bias": case["gate_bias"][1:]},
            ValueError,
            r"pool_windows: gate_bias must have shape \[ratio, W\] = \[4, 192\], got \[3, 192\]",
        ),
        (
            lambda case: case | {"input_row_offsets": case["input_row_offsets"][1:]},
            ValueError,
            "pool_windows: input_row_offsets must have 7 elements, one more than ring_ids, got 6",
        ),
        (
            lambda case: case | {"ring_ids": case["ring_ids"] + 7, "validate": True},
            ValueError,
            r"pool_windows: ring_ids must lie in \[-1, 7\)",
        ),
        (
            lambda case: (
                case | {"input_row_offsets": case["input_row_offsets"].flip(0), "validate": True}
            ),
            ValueError,
            "pool_windows: input_row_offsets must ascend from 0",
        ),
    ],
)
def test_arguments_that_do_not_fit(change, error, message):
    case = pool_windows_case(Draw(0), SMALL, CSA)
    before = case["cache"].data.clone(), case["state"].rows.clone()
    with pytest.raises(error, match=message):
        sparsemla.pool_windows(**change(case))
    assert_equal("cache", case["cache"].data, before[0])
    assert_equal("state", case["state"].rows, before[1])


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Pooling(0), ValueError, "ratio must be at least 1, got 0"),
        (lambda: Pooling(4, overlap=1), TypeError, "overlap must be a bool, got int"),
        (lambda: WindowState([]), TypeError, "rows must be a Tensor, got list"),
        (
            lambda: WindowState(torch.zeros(1, 8, 2, 4).half()),
            TypeError,
            "rows must have dtype float32, got torch.float16",
        ),
        (
            lambda: WindowState(torch.zeros(1, 8, 3, 4)),
            ValueError,
            r"rows must have shape \[num_rings, ring, 2, width\], got \[1, 8, 3, 4\]",
        ),
        (
            lambda: WindowState(torch.zeros(1, 8, 4, 2).transpose(2, 3)),
            ValueError,
            "rows must be contiguous in the last dimension",
        ),
    ],
)
def test_descriptions_that_do_not_fit(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_pooling_is_a_value():
    assert replace(CSA, ratio=2) == Pooling(2, overlap=True)

"""The portable indexer against the reference, with poison where nothing may be read."""

import pytest
import torch

from sparsemla import (
    INDEX_FP8,
    INDEX_MXFP4,
    PagedCache,
    bf16_format,
    dispatch,
    e4m3_format,
    reference,
)

pytest.importorskip("triton")

from sparsemla.kernels.indexer import sm90
from sparsemla.kernels.indexer import triton as kernels
from sparsemla.kernels.indexer.arguments import IndexerTopk
from sparsemla.kernels.topk import triton as topk_kernels
from sparsemla.kernels.topk.sm90 import candidates

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
INF, NAN = float("inf"), float("nan")
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def on_device():
    with torch.device(DEVICE):
        torch.manual_seed(0)
        yield


def check_scores(out, expected):
    """Same -inf; elsewhere within the bound that DeepGEMM keeps."""
    assert torch.equal(out == -INF, expected == -INF)
    assert torch.equal(out.isnan(), expected.isnan())
    x, y = (t.where(t.isfinite(), 0).double() for t in (out, expected))
    energy = (x * x + y * y).sum()
    assert energy == 0 or 1 - 2 * (x * y).sum() / energy < 5e-6


@pytest.mark.parametrize(
    ("heads", "dim", "dtype", "weight_dtype"),
    [
        (5, 16, E4M3, torch.float32),
        (48, 96, torch.bfloat16, torch.bfloat16),
        (128, 256, torch.bfloat16, torch.float32),
        (1, 200, E4M3, torch.float16),
    ],
)
def test_ragged(heads, dim, dtype, weight_dtype):
    num_tokens, num_keys = 9, 150
    storage = torch.randn(num_tokens, heads + 2, dim).to(dtype)
    q = storage[:, 1:-1]
    keys = torch.randn(num_keys, dim).to(dtype)
    # Keys that no row sees.
    keys.view(torch.uint8)[:3] = 0xFF
    keys.view(torch.uint8)[140:] = 0xFF
    scales = torch.rand(num_keys) + 0.5 if dtype == E4M3 else None
    if scales is not None:
        scales[:3] = NAN
    weights = torch.randn(num_tokens, heads + 1).to(weight_dtype)[:, :heads]
    starts = torch.tensor([3, 3, 7, 64, 100, 90, 20, 139, 3])
    ends = torch.tensor([140, 4, 7, 130, 50, INT_MIN, 21, 140, 66])
    out = torch.full((num_tokens, num_keys + 9), 7.0)
    dispatch.load("indexer_scores", "triton")(
        index_q=q,
        weights=weights,
        index_k=keys,
        index_k_scales=scales,
        row_starts=starts,
        row_ends=ends,
        out=out[:, :num_keys],
    )
    expected = reference.indexer_scores(q, weights, keys, scales, row_starts=starts, row_ends=ends)
    check_scores(out[:, :num_keys], expected)
    assert (out[:, num_keys:] == 7).all()


def test_ragged_rows_at_the_ends_of_the_keys():
    q, keys = torch.randn(3, 4, 32).bfloat16(), torch.randn(70, 32).bfloat16()
    starts = torch.tensor([INT_MIN, 0, 69], dtype=torch.int32)
    ends = torch.tensor([INT_MAX, 70, INT_MAX], dtype=torch.int32)
    weights, out = torch.randn(3, 4), torch.empty(3, 70)
    tensors = {"index_q": q, "weights": weights, "index_k": keys, "index_k_scales": None}
    dispatch.load("indexer_scores", "triton")(**tensors, row_starts=starts, row_ends=ends, out=out)
    check_scores(out, reference.indexer_scores(**tensors, row_starts=starts, row_ends=ends))


FORMATS = [INDEX_FP8, INDEX_MXFP4, bf16_format(40), e4m3_format(64, 64, 64), e4m3_format(96, 96, 0)]


def paged_inputs(fmt, lens, page_size, width):
    """A cache full of NaN but for the keys below `lens`, with pages in random places."""
    num_pages = len(lens) * width + 3
    cache = PagedCache.allocate(fmt, num_pages, page_size)
    fields = cache.fields()
    for part in fields:
        if part is not None:
            part.copy_(torch.full(part.shape, NAN).to(part.dtype))
    table = torch.randperm(num_pages)[: len(lens) * width].view(len(lens), width)
    for request, length in enumerate(lens):
        positions = torch.arange(max(0, min(length, width * page_size)))
        slots = table[request, positions // page_size] * page_size + positions % page_size
        cache.write(slots, torch.randn(len(slots), fmt.head_dim))
        table[request, -(-len(slots) // page_size) :] = INT_MAX
    return cache, table.int()


@pytest.mark.parametrize("fmt", FORMATS)
def test_paged(fmt):
    lens, page_size, query_len = [130, 0, 1, 64], 7, 3
    cache, table = paged_inputs(fmt, lens, page_size, -(-130 // page_size))
    table[0, 2] = -1
    table[3, 0] = cache.num_pages
    q = torch.randn(query_len, 4, 6, fmt.head_dim).to(fmt.query_dtype).transpose(0, 1)
    arguments = {
        "index_q": q,
        "weights": torch.randn(4, query_len, 6, dtype=torch.bfloat16),
        "cache": cache,
        "page_table": table,
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
    }
    out = torch.full((4, query_len + 1, 140), 7.0)
    run = dispatch.load("indexer_scores_paged", "triton")
    for columns in (100, 140):
        view = out[:, :query_len, :columns]
        run(**arguments, max_seq_len=columns, out=view)
        check_scores(view, reference.indexer_scores_paged(**arguments, max_seq_len=columns))
    assert (out[:, query_len] == 7).all()
    # A length of each row.
    arguments["seq_lens"] = torch.randint(0, 65, (4, query_len))
    arguments["seq_lens"][1:3] = 0
    run(**arguments, max_seq_len=100, out=out[:, :query_len, :100])
    expected = reference.indexer_scores_paged(**arguments, max_seq_len=100)
    check_scores(out[:, :query_len, :100], expected)


def best(inputs, topk, max_workspace_bytes, **options):
    out = torch.full((inputs["index_q"].shape[0], topk), -7, dtype=torch.int32)
    run = dispatch.load("indexer_topk", "triton")
    run(**inputs, topk=topk, max_workspace_bytes=max_workspace_bytes, **options, out=out)
    return out


def best_inputs(fmt, query_lens, lens, page_size=16, heads=5):
    """Small integers, so that scores are exact, with many ties; as they are also in MXFP4."""
    cache, table = paged_inputs(fmt, lens, page_size, -(-max(lens) // page_size))
    for part in cache.fields():
        if part is not None and not fmt.is_fp4:
            values = torch.randint(-1, 2, part.shape).float()
            keep = part.float().isnan()
            values = torch.where(keep, NAN, values.abs() + 1 if part is cache.scales else values)
            part.copy_(values.to(part.dtype))
    num_tokens = sum(query_lens)
    return {
        "index_q": torch.randint(-1, 2, (num_tokens, heads, fmt.head_dim)).to(fmt.query_dtype),
        "weights": torch.randint(-2, 3, (num_tokens, heads)).float(),
        "cache": cache,
        "input_row_offsets": torch.tensor([0, *torch.tensor(query_lens).cumsum(0).tolist()]),
        "seq_lens": torch.tensor(lens, dtype=torch.int32),
        "page_table": table,
    }


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("max_workspace_bytes", [1, 3000])
def test_best(max_workspace_bytes, causal):
    """Prefill, speculative decode, empty request and decode in one batch, at any bound."""
    inputs = best_inputs(e4m3_format(32, 32, 32), [9, 0, 2, 1], [75, 30, 2, 41])
    inputs["page_table"][0, 1] = -1
    inputs["page_table"][3, 0] = INT_MAX
    for topk in (1, 20, 100):
        out = best(inputs, topk, max_workspace_bytes, causal=causal)
        assert torch.equal(out, reference.indexer_topk(**inputs, topk=topk, causal=causal))


@pytest.mark.parametrize(
    ("fmt", "ratio", "topk", "causal", "as_slots"),
    [
        (bf16_format(16), 4, 5, True, False),
        (INDEX_MXFP4, 4, 9, False, True),
        (bf16_format(16), 128, 5, True, True),
    ],
)
def test_best_of_pooled_keys(fmt, ratio, topk, causal, as_slots):
    """A prefill, drafts with own lengths, a decode, an empty request, more queries than tokens."""
    lens = [ratio * 40 + 2, ratio * 9, 0, ratio * 30 - 1, 2]
    inputs = best_inputs(fmt, [6, 4, 0, 1, 3], [n // ratio for n in lens])
    inputs["seq_lens"] = torch.tensor(lens, dtype=torch.int32)
    inputs["page_table"][0, 1] = -1
    options = {"causal": causal, "ratio": ratio, "as_slots": as_slots}
    out = best(inputs, topk, 3000, **options)
    assert torch.equal(out, reference.indexer_topk(**inputs, topk=topk, **options))


def test_best_as_slots():
    inputs = best_inputs(bf16_format(16), [9, 0, 1], [75, 30, 41])
    inputs["page_table"][0, 1] = -1
    for topk in (7, 90):
        out = best(inputs, topk, 1, as_slots=True)
        assert torch.equal(out, reference.indexer_topk(**inputs, topk=topk, as_slots=True))


def test_best_of_many_requests():
    """More requests than one step of the search for a token's request covers."""
    inputs = best_inputs(bf16_format(16), [0] * 129 + [1], [3] * 130, page_size=2, heads=2)
    assert torch.equal(best(inputs, 2, 1 << 20), reference.indexer_topk(**inputs, topk=2))


def test_tokens_outside_of_all_requests_get_no_keys():
    """A batch padded for a captured graph: offsets end before the tokens do."""
    inputs = best_inputs(bf16_format(16), [3, 2], [40, 20])
    expected = reference.indexer_topk(**inputs, topk=8)
    for name in ("index_q", "weights"):
        inputs[name] = torch.cat([inputs[name], inputs[name][:3]])
    for max_workspace_bytes in (1, 1 << 20):
        out = best(inputs, 8, max_workspace_bytes)
        assert torch.equal(out[:5], expected)
        assert (out[5:] == -1).all()


def test_lengths_past_the_page_table_are_clamped():
    inputs = best_inputs(bf16_format(16), [2], [32])
    inputs["seq_lens"][0] = INT_MAX
    out = best(inputs, 40, 1 << 20, causal=False)
    assert torch.equal(out[0].sort().values[-32:], torch.arange(32, dtype=torch.int32))


@pytest.mark.parametrize(
    ("selection", "scheduler"),
    [(kernels.SELECTION, topk_kernels), (sm90.SELECTION, candidates)],
    ids=["triton", "sm90"],
)
@pytest.mark.parametrize("num_keys", [64, 4096, 131072, 1 << 20])
@pytest.mark.parametrize("num_tokens", [1, 7, 64, 177, 500, 8192])
@pytest.mark.parametrize("megabytes", [1, 16, 32, 256])
@pytest.mark.parametrize("topk", [512, 2048])
def test_workspace_stays_below_its_bound(
    topk, megabytes, num_tokens, num_keys, selection, scheduler, monkeypatch
):
    """For all chunks, on a GPU with 132 multiprocessors."""
    monkeypatch.setattr(scheduler, "num_multiprocessors", lambda device: 132)
    chunks = []

    bound = megabytes << 20
    with torch.device("meta"):
        out = torch.empty(num_tokens, topk, dtype=torch.int32)
        call = IndexerTopk(
            index_q=torch.empty(num_tokens, 64, 128),
            weights=torch.empty(num_tokens, 64),
            cache=PagedCache.allocate(INDEX_FP8, 1, 64),
            input_row_offsets=torch.empty(10),
            seq_lens=torch.empty(9),
            page_table=torch.empty(9, num_keys // 64, dtype=torch.int32),
            topk=topk,
            max_workspace_bytes=bound,
            out=out,
        )
    select = selection._replace(select_topk=lambda part: chunks.append(part.scores.shape[0]))
    kernels.select_in_chunks(call, lambda *_: None, select)
    schedules = [selection.schedule_lists(n, num_keys, topk, out.device) for n in set(chunks)]
    lists = max(schedule.list_bytes(num_keys) for schedule in schedules)
    assert sum(chunks) == num_tokens
    assert max(chunks) == 1 or lists + max(chunks) * (4 * num_keys + 8) <= bound
    assert max(chunks) > 1 or lists < 18e6

import itertools
import math
from functools import partial

import pytest
import torch

import sparsemla
from sparsemla import (
    BF16_576,
    FP8_584,
    FP8_DS_MLA,
    PagedCache,
    e4m3_format,
)
from sparsemla.kernels.attention import schedule
from sparsemla.kernels.attention.arguments import SparseDecode, Splits
from sparsemla.kernels.attention.schedule import DecodeWork, dense, sparse
from sparsemla.kernels.common.device import GPUS, simulated
from sparsemla.ops import decode
from sparsemla_lab.testing.cases import (
    GARBAGE_PAGE,
    Draw,
    dense_decode_case,
    distant_pages,
    embed,
    merge_states_case,
    sinks,
    sparse_decode_case,
    split_queries,
    varied_lengths,
)
from sparsemla_lab.testing.compare import (
    DECODE_LSE,
    SPARSE_DECODE_OUT,
    assert_close,
    assert_equal,
    check_op,
)
from sparsemla_lab.testing.shapes import (
    DECODE_SIZES,
    EXTRA_STREAMS,
    FLOATS,
    HEAD_COUNTS,
    LATENT_FORMATS,
    PAGE_SIZES,
)
from sparsemla_lab.verify.properties import check_alone

by_format = pytest.mark.parametrize("fmt", LATENT_FORMATS)


def check(op, case):
    out, lse = check_op(op, case)
    assert out.isfinite().all()
    assert (out[lse == -math.inf] == 0).all()
    return out, lse


@by_format
@pytest.mark.parametrize("features", ["plain", "sink", "lengths", "sink lengths"])
def test_sparse_decode_of_every_format(device, fmt, features):
    case = sparse_decode_case(
        Draw(0, device),
        format=fmt,
        query_len=2,
        with_sink="sink" in features,
        with_lengths="lengths" in features,
    )
    check("sparse_decode", case)


@pytest.mark.parametrize("fmt", [FP8_DS_MLA, FP8_584])
@pytest.mark.parametrize("num_heads", HEAD_COUNTS)
def test_sparse_decode_of_every_head_count(device, num_heads, fmt):
    case = sparse_decode_case(Draw(1, device), format=fmt, num_heads=num_heads, with_sink=True)
    check("sparse_decode", case)


@pytest.mark.parametrize("fmt", [BF16_576, FP8_DS_MLA, FP8_584])
@pytest.mark.parametrize(("seq_len", "topk", "page_size"), DECODE_SIZES)
def test_sparse_decode_of_every_size(device, seq_len, topk, page_size, fmt):
    case = sparse_decode_case(
        Draw(2, device),
        format=fmt,
        seq_len=seq_len,
        topk=topk,
        page_size=page_size,
        num_heads=3,
        with_lengths=True,
    )
    check("sparse_decode", case)


@pytest.mark.parametrize("batch", [1, 4, 74])
@pytest.mark.parametrize("query_len", [1, 3])
def test_sparse_decode_of_every_batch(device, batch, query_len):
    case = sparse_decode_case(
        Draw(3, device), format=FP8_DS_MLA, batch=batch, query_len=query_len, num_heads=4
    )
    check("sparse_decode", case)


@pytest.mark.parametrize("extra", EXTRA_STREAMS.values(), ids=EXTRA_STREAMS)
@pytest.mark.parametrize("with_lengths", [False, True], ids=["all", "lengths"])
@pytest.mark.parametrize("with_extra_lengths", [False, True], ids=["all extra", "extra lengths"])
@pytest.mark.parametrize("with_sink", [False, True], ids=["plain", "sink"])
def test_sparse_decode_with_an_extra_stream(
    device, extra, with_lengths, with_extra_lengths, with_sink
):
    case = sparse_decode_case(
        Draw(4, device),
        format=FP8_584,
        query_len=2,
        page_size=256,
        with_lengths=with_lengths,
        with_extra_lengths=with_extra_lengths,
        with_sink=with_sink,
        extra=extra,
    )
    check("sparse_decode", case)


@pytest.mark.parametrize("num_heads", [8, 64])
@pytest.mark.parametrize(
    ("fmt", "extra"), [(BF16_576, None), (FP8_584, EXTRA_STREAMS["of pages of 2"])]
)
def test_tokens_of_a_request_with_lengths_of_their_own(device, fmt, extra, num_heads):
    lengths = {"with_lengths": True, "with_extra_lengths": True, "own_lengths": True}
    case = sparse_decode_case(
        Draw(33, device), format=fmt, query_len=3, num_heads=num_heads, extra=extra, **lengths
    )
    out, lse = check("sparse_decode", case)
    names = [name for name in ("topk_lengths", "extra_topk_lengths") if name in case]
    wide = {name: embed(case[name]) for name in names}
    assert wide["topk_lengths"].stride(0) > 3
    strided = check("sparse_decode", case | wide)
    assert_equal("lse", strided[1], lse)
    # Tokens as requests, whose lengths are [B] or [B, 1].
    flat = {name: case[name].flatten(0, 1)[:, None] for name in ("q", "topk_indices")}
    if extra is not None:
        flat["extra_topk_indices"] = case["extra_topk_indices"].flatten(0, 1)[:, None]
    for shape in ((9,), (9, 1)):
        lengths = {name: case[name].reshape(shape) for name in names}
        alone = check("sparse_decode", case | flat | lengths)
        assert_close("lse", alone[1].view(3, 3, -1), lse, DECODE_LSE)
        assert_close("out", alone[0].view(out.shape), out.float(), SPARSE_DECODE_OUT)


@pytest.mark.parametrize("empty", ["first", "second", "both"])
@pytest.mark.parametrize("with_sink", [False, True], ids=["plain", "sink"])
def test_streams_without_valid_slots(device, empty, with_sink):
    case = sparse_decode_case(
        Draw(5, device),
        format=FP8_584,
        extra=EXTRA_STREAMS["of the same format"],
        with_sink=with_sink,
    )
    if empty != "second":
        case["topk_indices"].fill_(-1)
    if empty != "first":
        case["extra_topk_lengths"] = torch.zeros(3, dtype=torch.int32, device=device)
    _, lse = check("sparse_decode", case)
    assert (lse == -math.inf).all() == (empty == "both")


def test_an_extra_stream_is_more_keys(device):
    case = sparse_decode_case(Draw(6, device), format=FP8_584, topk=64)
    whole = check("sparse_decode", case)
    indices = case["topk_indices"]
    split = case | {
        "topk_indices": indices[..., :20].contiguous(),
        "extra_cache": case["cache"],
        "extra_topk_indices": indices[..., 20:].contiguous(),
    }
    parts = check("sparse_decode", split)
    assert_close("out", parts[0], whole[0].float(), SPARSE_DECODE_OUT)
    assert_close("lse", parts[1], whole[1], DECODE_LSE)


@pytest.mark.parametrize("page_size", [53, 61])
@pytest.mark.parametrize("with_sink", [False, True], ids=["plain", "sink"])
def test_requests_without_valid_slots(device, page_size, with_sink):
    case = sparse_decode_case(
        Draw(7, device), format=FP8_DS_MLA, batch=4, page_size=page_size, with_sink=with_sink
    )
    case["topk_indices"][1] = -1
    case["topk_lengths"] = torch.tensor([64, 64, 0, 1], dtype=torch.int32, device=device)
    _, lse = check("sparse_decode", case)
    assert (lse[1:3] == -math.inf).all()
    assert (lse[0] > -math.inf).all()


def test_lengths_beyond_the_selection_use_all_entries(device):
    case = sparse_decode_case(Draw(8, device), format=FP8_DS_MLA)
    expected = check("sparse_decode", case)
    lengths = torch.tensor([64, 65, 2**31 - 1], dtype=torch.int32, device=device)
    got = check("sparse_decode", case | {"topk_lengths": lengths})
    assert_close("out", got[0], expected[0].float(), SPARSE_DECODE_OUT)


def test_negative_lengths_select_no_keys(device):
    case = sparse_decode_case(
        Draw(8, device), format=FP8_584, topk=200, seq_len=300, extra=(FP8_584, 300, 200, 64)
    )
    lengths = torch.tensor([-1, -127, -1000], dtype=torch.int32, device=device)
    extra = torch.tensor([200, 130, -(2**31)], dtype=torch.int32, device=device)
    case |= {"topk_lengths": lengths, "extra_topk_lengths": extra}
    _, lse = check("sparse_decode", case)
    assert (lse[2] == -math.inf).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_sparse_decode_of_every_dtype(device, dtype, index_dtype):
    case = sparse_decode_case(Draw(9, device), format=FP8_DS_MLA, dtype=dtype, with_lengths=True)
    case["topk_indices"] = case["topk_indices"].to(index_dtype)
    case["topk_lengths"] = case["topk_lengths"].to(index_dtype)
    assert check("sparse_decode", case)[0].dtype == dtype


@by_format
def test_one_layer_of_several(device, fmt):
    check("sparse_decode", sparse_decode_case(Draw(10, device), format=fmt, num_layers=3))
    check("dense_decode", dense_decode_case(Draw(10, device), format=fmt, num_layers=3))


@pytest.mark.parametrize("num_heads", [3, 16, 64])
@pytest.mark.parametrize("fmt", [BF16_576, FP8_DS_MLA, e4m3_format()], ids=lambda fmt: fmt.name)
def test_queries_in_two_tensors(device, fmt, num_heads):
    case = sparse_decode_case(Draw(4, device), format=fmt, num_heads=num_heads, query_len=2)
    results = check_op("sparse_decode", split_queries(case))
    for apart, whole in zip(results, check_op("sparse_decode", case), strict=True):
        assert_equal("results", apart, whole)


def test_strided_inputs_and_outputs(device):
    case = sparse_decode_case(Draw(11, device), format=FP8_DS_MLA, query_len=2, strided=True)
    out, lse = check("sparse_decode", case)
    buffers = {"out": embed(torch.zeros_like(out)), "lse": embed(torch.zeros_like(lse))}
    returned = sparsemla.sparse_decode(**case, **buffers)
    assert returned[0] is buffers["out"]
    assert_equal("out", buffers["out"].contiguous(), out)
    assert_equal("lse", buffers["lse"].contiguous(), lse)


def test_duplicate_slots_count_twice(device):
    case = sparse_decode_case(Draw(12, device), format=FP8_DS_MLA, share=1.0)
    case["topk_indices"] = case["topk_indices"][..., :1].repeat(1, 1, 7)
    out, lse = check("sparse_decode", case)
    once = check("sparse_decode", case | {"topk_indices": case["topk_indices"][..., :1]})
    assert_close("lse", lse, once[1] + math.log(7), DECODE_LSE)
    assert_close("out", out, once[0].float(), SPARSE_DECODE_OUT)


def test_scales_that_are_no_powers_of_two(device):
    for fmt in (FP8_DS_MLA, e4m3_format()):
        case = sparse_decode_case(Draw(13, device), format=fmt)
        scales = case["cache"].fields().scales
        factor = 1 + Draw(14, device).normal(*scales.shape).abs()
        scales.mul_(factor)
        check("sparse_decode", case)


@pytest.mark.parametrize("num_heads", [16, 32, 64])
@pytest.mark.parametrize("fmt", [FP8_DS_MLA, e4m3_format(), e4m3_format(scale_block=576)])
def test_exact_scales(device, fmt, num_heads):
    """With a single key the LSE is its score, which shows how the key was rounded."""
    options = {"format": fmt, "num_heads": num_heads, "scale_mode": "exact"}
    for topk in (1, 64):
        case = sparse_decode_case(Draw(13, device), topk=topk, share=1.0, **options)
        check("sparse_decode", case)
    check("dense_decode", dense_decode_case(Draw(14, device), seq_lens=(1, 0, 140), **options))


def test_one_exact_scale_among_powers_of_two(device):
    case = dense_decode_case(Draw(15, device), format=FP8_DS_MLA, seq_lens=(300, 2), num_heads=16)
    pages = case["page_table"][:, 0].long()
    case["cache"].fields().scales[pages, 0, 2] *= 1.3
    check("dense_decode", case)


def test_keys_of_zeros(device):
    case = sparse_decode_case(Draw(15, device), format=FP8_DS_MLA)
    slots = torch.arange(case["cache"].num_slots, device=device)
    case["cache"].write(slots, torch.zeros(len(slots), 576, device=device))
    out, lse = check("sparse_decode", case)
    assert (out == 0).all()
    valid = (case["topk_indices"] >= 0) & (case["topk_indices"] < len(slots))
    assert_close("lse", lse, valid.sum(-1, keepdim=True).log().expand_as(lse), DECODE_LSE)


def test_no_heads(device):
    case = sparse_decode_case(Draw(31, device), format=FP8_DS_MLA)
    case["q"] = case["q"][:, :, :0]
    assert check("sparse_decode", case)[0].shape == (3, 1, 0, 512)


@pytest.mark.parametrize("shape", [(0, 1, 4), (2, 0, 4), (2, 1, 0)], ids=str)
def test_empty_selections(device, shape):
    case = sparse_decode_case(Draw(16, device), format=FP8_DS_MLA)
    case["q"] = case["q"][: shape[0], : shape[1]]
    case["topk_indices"] = case["topk_indices"][: shape[0], : shape[1], : shape[2]]
    out, _ = check("sparse_decode", case)
    assert out.shape == (*shape[:2], 8, 512)


@pytest.mark.parametrize("fmt", [BF16_576, FP8_DS_MLA, FP8_584])
def test_caches_beyond_2_gib(device, fmt):
    draw = Draw(17, device)
    cache = distant_pages(draw, fmt)
    case = sparse_decode_case(draw, format=fmt, batch=1, seq_len=64, page_size=64)
    check("sparse_decode", case | {"cache": cache})
    dense = {
        "q": case["q"],
        "cache": cache,
        "page_table": torch.tensor([[1, 0]], device=device),
        "seq_lens": torch.tensor([100], device=device),
        "softmax_scale": 0.05,
    }
    check("dense_decode", dense)


@pytest.mark.parametrize(
    ("batch", "topk", "splits"),
    [(1, 2048, (16, 16)), (2, 2048, (8, 16)), (4, 2048, (4, 16)), (8, 2048, (8, 64)),
     (16, 2048, (4, 64)), (64, 2048, (1, 64)), (128, 2048, (1, 64)), (4, 512, (4, 16)),
     (16, 512, (1, 16)), (16, 1024, (4, 64)), (1, 64, (1, 16))],
    ids=str,
)  # fmt: skip
def test_splits_of_128_heads_on_132_multiprocessors(batch, topk, splits):
    assert sparse(DecodeWork(batch, 1, 128, topk, FP8_DS_MLA, 132), tiles_heads=True) == splits


def test_given_splits_are_those_of_a_call():
    call = SparseDecode(
        q=torch.empty(1, 1, 128, 576, dtype=torch.bfloat16),
        cache=PagedCache.allocate(FP8_DS_MLA, 2, 64),
        topk_indices=torch.zeros(1, 1, 2048, dtype=torch.int32),
        softmax_scale=1.0,
    )
    with simulated(GPUS["sm_90"]):
        assert schedule.splits_of_sparse(call) == (16, 16)
        assert schedule.splits_of_sparse(call._replace(splits=Splits(3))) == (3, 64)
    with simulated(GPUS["sm_100"]):
        assert schedule.splits_of_sparse(call).head_tile == 64
    assert schedule.splits_of_sparse(call) == (1, 64)


def test_a_workspace_serves_smaller_batches_too(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with simulated(GPUS["sm_90"]):
        sizes = [
            sparsemla.decode_workspace_size(batch, 1, 128, device="cuda") for batch in range(257)
        ]
    assert sizes[1] > 0
    assert sizes == sorted(sizes)


def test_schedules_fit_the_workspace(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tiled, portable = partial(sparse, tiles_heads=True), partial(sparse, tiles_heads=False)
    for batch, num_heads, topk in itertools.product((1, 3, 17, 200), (1, 48, 128), (1, 700, 9000)):
        with simulated(GPUS["sm_90"]):
            size = sparsemla.decode_workspace_size(batch, 1, num_heads, device="cuda")
        for fmt, choose in itertools.product((BF16_576, FP8_DS_MLA), (tiled, portable, dense)):
            for compiling in (False, True):
                with monkeypatch.context() as patch:
                    patch.setattr(torch.compiler, "is_compiling", lambda said=compiling: said)
                    splits, _ = choose(DecodeWork(batch, 1, num_heads, topk, fmt, 132))
                assert decode._workspace_bytes(batch * num_heads, splits, 512) <= size


def test_reruns_are_equal(device):
    case = sparse_decode_case(Draw(18, device), format=FP8_DS_MLA, num_heads=16, with_sink=True)
    first = sparsemla.sparse_decode(**case)
    for _ in range(20):
        got = sparsemla.sparse_decode(**case)
        assert_equal("out", got[0], first[0])
        assert_equal("lse", got[1], first[1])


@by_format
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("query_len", [1, 2, 4])
def test_dense_decode_of_every_format(device, fmt, query_len, causal):
    case = dense_decode_case(
        Draw(19, device),
        format=fmt,
        query_len=query_len,
        causal=causal,
        with_sink=True,
        seq_lens=[20, 140, 0, 63, 64, 65, 1],
        num_heads=4,
    )
    check("dense_decode", case)


@pytest.mark.parametrize("num_heads", [*HEAD_COUNTS, 9, 126])
def test_dense_decode_of_every_head_count(device, num_heads):
    case = dense_decode_case(Draw(20, device), format=FP8_DS_MLA, num_heads=num_heads, query_len=2)
    check("dense_decode", case)


@pytest.mark.parametrize("page_size", [*PAGE_SIZES, 69])
@pytest.mark.parametrize("fmt", [BF16_576, FP8_DS_MLA, FP8_584])
def test_dense_decode_of_every_page_size(device, page_size, fmt):
    draw = Draw(21, device)
    lengths = varied_lengths(draw, 5, 150, at_least=2)
    case = dense_decode_case(
        draw, format=fmt, page_size=page_size, seq_lens=lengths, query_len=2, num_heads=3
    )
    check("dense_decode", case)


def test_requests_shorter_than_their_queries(device):
    case = dense_decode_case(
        Draw(22, device), format=BF16_576, query_len=4, seq_lens=[0, 1, 3, 4], with_sink=True
    )
    _, lse = check("dense_decode", case)
    empty = (lse == -math.inf).all(-1)
    assert empty.tolist() == [
        [True, True, True, True],
        [True, True, True, False],
        [True, False, False, False],
        [False, False, False, False],
    ]


def test_one_query_ignores_the_causal_flag(device):
    case = dense_decode_case(Draw(23, device), format=FP8_DS_MLA)
    causal = check("dense_decode", case)
    full = check("dense_decode", case | {"causal": False})
    assert_close("out", causal[0], full[0].float(), SPARSE_DECODE_OUT)


@pytest.mark.parametrize("page", [-1, -(2**31), GARBAGE_PAGE, 2**31 - 1])
def test_keys_on_missing_pages_are_masked(device, page):
    case = dense_decode_case(Draw(24, device), format=FP8_DS_MLA, seq_lens=[140, 30])
    case["page_table"][0, 1] = page
    case["page_table"][1, 0] = page
    _, lse = check("dense_decode", case)
    assert (lse[1] == -math.inf).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_dense_decode_of_every_dtype(device, dtype):
    case = dense_decode_case(Draw(25, device), format=FP8_DS_MLA, dtype=dtype, query_len=2)
    for name in ("page_table", "seq_lens"):
        case[name] = case[name].long()
    assert check("dense_decode", case)[0].dtype == dtype


@pytest.mark.parametrize("fmt", [BF16_576, FP8_DS_MLA])
def test_dense_decode_keeps_nan_from_earlier_tokens(fmt):
    case = dense_decode_case(
        Draw(29), format=fmt, seq_lens=(70, 64, 3), query_len=3, later_nan=True
    )
    _, lse = check_op("dense_decode", case)
    assert lse.isnan().all(2).tolist() == [
        [False, False, True],
        [False, True, True],
        [False, False, True],
    ]


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("query_len", [1, 3])
def test_dense_decode_of_queries_that_are_not_finite(query_len, value):
    case = dense_decode_case(Draw(32), format=FP8_DS_MLA, query_len=query_len)
    case["q"][1, 0, 3, 5] = value
    out, _ = check_op("dense_decode", case)
    assert out.isnan().all(3).nonzero().tolist() == [[1, 0, 3]]


def test_dense_decode_of_strided_tensors(device):
    case = dense_decode_case(Draw(26, device), format=FP8_584, query_len=2)
    expected = check("dense_decode", case)
    case["q"], case["page_table"] = embed(case["q"]), embed(case["page_table"])
    buffers = {
        "out": embed(torch.zeros_like(expected[0])),
        "lse": embed(torch.zeros_like(expected[1])),
    }
    sparsemla.dense_decode(**case, **buffers)
    assert_equal("out", buffers["out"].contiguous(), expected[0])
    assert_equal("lse", buffers["lse"].contiguous(), expected[1])


@pytest.mark.parametrize(("query_len", "num_heads"), [(0, 8), (1, 0)])
def test_dense_decode_of_no_queries(device, query_len, num_heads):
    case = dense_decode_case(Draw(29, device), format=FP8_DS_MLA)
    case["q"] = case["q"][:, :query_len, :num_heads]
    out, lse = sparsemla.dense_decode(**case)
    assert out.shape == (3, query_len, num_heads, 512)
    assert lse.shape == out.shape[:3]


def test_requests_without_pages(device):
    case = dense_decode_case(Draw(30, device), format=FP8_DS_MLA)
    case["page_table"] = case["page_table"][:, :0]
    out, lse = check("dense_decode", case)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_no_requests(device):
    case = dense_decode_case(Draw(27, device), format=FP8_DS_MLA)
    for name in ("q", "page_table", "seq_lens"):
        case[name] = case[name][:0]
    assert check("dense_decode", case)[0].shape == (0, 1, 8, 512)


def test_dense_is_sparse_over_every_key(device):
    case = dense_decode_case(Draw(28, device), format=FP8_DS_MLA, seq_lens=[140])
    positions = torch.arange(140, device=device)
    slots = sparsemla.slots_of(case["page_table"], positions * 0, positions, 64)
    dense = check("dense_decode", case)
    sparse = sparsemla.sparse_decode(
        case["q"], case["cache"], slots[None, None], softmax_scale=case["softmax_scale"]
    )
    assert_close("out", sparse[0], dense[0].float(), SPARSE_DECODE_OUT)
    assert_close("lse", sparse[1], dense[1], DECODE_LSE)


def test_a_long_context(device):
    case = dense_decode_case(
        Draw(29, device), format=BF16_576, seq_lens=[4096, 9000], num_heads=2, query_len=2
    )
    check("dense_decode", case)


@pytest.mark.parametrize("num_parts", [1, 2, 7])
@pytest.mark.parametrize("with_sink", [False, True], ids=["plain", "sink"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_merged_states(device, num_parts, with_sink, dtype):
    case = merge_states_case(Draw(30, device), num_parts, dtype=dtype, with_sink=with_sink)
    out, lse = check("merge_states", case)
    assert (lse[1] == -math.inf).all()
    assert out.dtype == dtype


def test_merge_of_no_parts_is_empty(device):
    case = merge_states_case(Draw(31, device), 2)
    case["outs"], case["lses"] = case["outs"][:0], case["lses"][:0]
    _, lse = check("merge_states", case)
    assert (lse == -math.inf).all()


def test_merge_of_states_with_distant_lses(device):
    lses = torch.tensor([[[3e4, -3e4]], [[-3e4, 3e4]]], device=device)
    outs = torch.stack([torch.full((1, 2, 16), 1.0), torch.full((1, 2, 16), 2.0)]).to(device)
    out, _ = check("merge_states", {"outs": outs, "lses": lses})
    assert out[0, :, 0].tolist() == pytest.approx([1.0, 2.0], rel=1e-6)


def test_merged_parts_equal_attention_over_all_keys(device):
    case = sparse_decode_case(Draw(32, device), format=FP8_DS_MLA, dtype=torch.float32)
    sink = sinks(Draw(33, device), 8)
    expected = sparsemla.sparse_decode(**case | {"attn_sink": sink})
    indices = case["topk_indices"]
    parts = [
        sparsemla.sparse_decode(**case | {"topk_indices": indices[..., columns].contiguous()})
        for columns in (slice(0, 1), slice(1, 40), slice(40, 64))
    ]
    outs, lses = (torch.stack(tensors)[:, :, 0] for tensors in zip(*parts, strict=True))
    out, lse = sparsemla.merge_states(outs, lses, attn_sink=sink)
    assert_close("out", out, expected[0][:, 0], SPARSE_DECODE_OUT)
    assert_close("lse", lse, expected[1][:, 0], DECODE_LSE)


@pytest.mark.parametrize("num_splits", [1, 3])
def test_decode_in_a_given_workspace(device, num_splits):
    sparse = sparse_decode_case(Draw(20, device), format=FP8_DS_MLA)
    dense = dense_decode_case(Draw(21, device), format=FP8_DS_MLA)
    for op, case in (("sparse_decode", sparse), ("dense_decode", dense)):
        size = sparsemla.decode_workspace_size(*case["q"].shape[:3], num_splits=num_splits)
        workspace = torch.empty(size, dtype=torch.uint8, device=device)
        plain = check(op, case)
        split = getattr(sparsemla, op)(**case, num_splits=num_splits, workspace=workspace)
        for name, got, wanted, tolerance in zip(
            ("out", "lse"), split, plain, (SPARSE_DECODE_OUT, DECODE_LSE), strict=True
        ):
            assert_close(name, got, wanted, tolerance)


def test_decode_refuses_a_small_workspace_and_no_splits(device):
    case = sparse_decode_case(Draw(22, device), format=FP8_DS_MLA)
    workspace = torch.empty(100, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="workspace must hold 98496 bytes"):
        sparsemla.sparse_decode(**case, num_splits=2, workspace=workspace)
    with pytest.raises(ValueError, match="num_splits must be at least 1, got 0"):
        sparsemla.sparse_decode(**case, num_splits=0)


def test_merge_of_no_tokens(device):
    outs, lses = torch.zeros(2, 0, 3, 8, device=device), torch.zeros(2, 0, 3, device=device)
    out, lse = sparsemla.merge_states(outs, lses)
    assert out.shape == (0, 3, 8)
    assert lse.shape == (0, 3)


@pytest.mark.parametrize("num_heads", [1, 3, 8, 32, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_request_gets_the_same_bits_alone_and_in_a_batch(device, dtype, num_heads):
    for seed, topk in enumerate((40, 200, 700)):
        both = {"with_sink": True, "with_lengths": True}
        check_alone(
            "sparse_decode",
            sparse_decode_case(
                Draw(40 + seed, device),
                format=BF16_576,
                batch=7,
                topk=topk,
                num_heads=num_heads,
                dtype=dtype,
                **both,
            ),
        )
    lens = [0, 3, 64, 200, 700]
    case = dense_decode_case(
        Draw(43, device), format=BF16_576, seq_lens=lens, num_heads=num_heads, dtype=dtype
    )
    check_alone("dense_decode", case)


def test_lengths_beyond_the_page_table_end_with_it(device):
    """The CPU tier took a second for every million keys that do not exist."""
    case = dense_decode_case(Draw(34, device), format=FP8_DS_MLA)
    capacity = case["page_table"].shape[1] * case["cache"].page_size
    states = [
        sparsemla.dense_decode(**case | {"seq_lens": torch.full_like(case["seq_lens"], length)})
        for length in (capacity, 2**31 - 1)
    ]
    for name, got, wanted in zip(("out", "lse"), *states[::-1], strict=True):
        assert_equal(name, got, wanted)

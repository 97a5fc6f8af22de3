"""Public ops check_refused bad arguments, name the argument and leave the cache alone."""

import dataclasses
import inspect
import math
import re

import numpy as np
import pytest
import torch

import sparsemla
from sparsemla import (
    BF16_512,
    BF16_576,
    FP8_584,
    FP8_DS_MLA,
    INDEX_FP8,
    ContextShard,
    HeadWeight,
    PagedCache,
    Pooling,
    RowTable,
    bf16_format,
    cos_sin_table,
    e4m3_format,
    rope_frequencies,
)
from sparsemla_lab.testing.cases import (
    Draw,
    attention_target_case,
    branch_case,
    dense_decode_case,
    dense_index_loss_case,
    dense_prefill_case,
    entry_slots_case,
    head_weight,
    index_loss_case,
    indexer_scores_case,
    indexer_scores_paged_case,
    indexer_topk_blocks_case,
    indexer_topk_case,
    indexer_topk_of_blocks_case,
    merge_topk_case,
    mla_layer,
    own_positions_case,
    paged_requests,
    pool_windows_case,
    prefill_rows,
    project_groups_case,
    project_heads_case,
    resolve_rows_case,
    select_rows_case,
    selected_scores_backward_case,
    selected_scores_case,
    share_lists_case,
    shared_prefill_case,
    sinks,
    sparse_attention_backward_case,
    sparse_attention_case,
    sparse_decode_case,
    sparse_prefill_case,
)
from sparsemla_lab.testing.compare import assert_equal

TABLE = cos_sin_table(rope_frequencies(64, 1e4), 100)


def latent_write_arguments():
    draw = Draw(0)
    return {
        "q_rope": draw.normal(4, 3, 64),
        "kv": draw.normal(4, 576),
        "cos_sin_cache": TABLE,
        "kv_norm_weight": draw.normal(512),
        "cache": PagedCache.allocate(FP8_DS_MLA, 3, 8),
        "positions": torch.arange(4),
        "slot_mapping": torch.arange(4),
        "out": torch.empty(4, 3, 64),
        "kv_out": torch.empty(4, 576).bfloat16(),
    }


def key_write_arguments():
    draw = Draw(1)
    return {
        "index_k": draw.normal(4, 128),
        "norm_weight": draw.normal(128),
        "norm_bias": draw.normal(128),
        "cos_sin_cache": TABLE,
        "cache": PagedCache.allocate(INDEX_FP8, 3, 8),
        "positions": torch.arange(4),
        "slot_mapping": torch.arange(4),
    }


def query_arguments():
    draw = Draw(2)
    return {
        "index_q": draw.normal(4, 3, 128),
        "weights": draw.normal(4, 3),
        "cos_sin_cache": TABLE,
        "positions": torch.arange(4),
        "out": torch.empty(4, 3, 128).to(torch.float8_e4m3fn),
        "weights_out": torch.empty(4, 3),
    }


def index_step_arguments():
    queries, keys = query_arguments(), key_write_arguments()
    return {name: queries.pop(name) for name in ("index_q", "weights")} | keys | queries


def to_slots_arguments():
    draw = Draw(3)
    return {
        "topk_indices": draw.integers(0, 10, 4, 6),
        "page_table": draw.integers(0, 9, 2, 5),
        "request_ids": draw.integers(0, 2, 4),
        "page_size": 4,
        "workspace_starts": draw.tensor([0, 100, 200]),
        "prefill_request_ids": draw.integers(-1, 3, 4),
        "out": torch.empty(4, 6, dtype=torch.int32),
    }


def key_slots_arguments():
    """The arguments that entry_slots and visible_slots share."""
    case = entry_slots_case(Draw(3), requests=[(2, 3), (7, 2)])
    # Without the tokens that have no request or no position.
    return case | {name: case[name][:5] for name in ("positions", "request_ids")}


def resolve_arguments():
    """A call whose values are all in range."""
    case = resolve_rows_case(
        Draw(3),
        contexts=(30, 9),
        query_lens=(1, 2),
        topk=6,
        shard=ContextShard(1, 2, parts=4),
    )
    case["topk_indices"][0] = torch.arange(6)
    return case | {
        "out": torch.empty(7, 2, 6, dtype=torch.int32),
        "counts": torch.empty(7, 2, dtype=torch.int32),
        **{name: torch.empty(7, 6, dtype=torch.int32) for name in ("miss_slots", "miss_rows")},
        **{name: torch.empty(7, dtype=torch.int32) for name in ("miss_counts", "new_counts")},
    }


def fetch_arguments():
    return {
        "source": PagedCache.allocate(FP8_DS_MLA, 3, 8),
        "target": PagedCache.allocate(FP8_DS_MLA, 12, 1),
        "miss_slots": torch.tensor([[3, 23], [7, -1]]),
        "miss_rows": torch.tensor([[0, 11], [4, -1]]),
        "miss_counts": torch.tensor([2, 1]),
    }


def pool_arguments():
    pooling = Pooling(4, overlap=True)
    steps = [(0, 4), (3, 5)]
    return pool_windows_case(Draw(3), BF16_576, pooling, steps=steps, with_rows=True)


def gather_arguments():
    draw = Draw(4)
    cache, table = paged_requests(draw, FP8_DS_MLA, [9, 20], 8)
    return {
        "cache": cache,
        "page_table": table,
        "seq_lens": draw.tensor([9, 20]),
        "workspace_starts": draw.tensor([0, 9]),
        "out": torch.empty(29, 576, dtype=torch.bfloat16),
        "seq_starts": draw.tensor([0, 0]),
    }


def merge_arguments():
    draw = Draw(5)
    return {
        "outs": draw.normal(2, 4, 3, 16),
        "lses": draw.normal(2, 4, 3),
        "attn_sink": sinks(draw, 3),
        "out": torch.empty(4, 3, 16),
        "lse": torch.empty(4, 3),
    }


def branch_arguments(**more):
    draw = Draw(6)
    layer = mla_layer(draw, with_sink=True)
    case = branch_case(
        draw, layer, query_lens=[1, 3], seq_lens=[9, 5], topk=8, format=FP8_DS_MLA, page_size=8
    )
    lengths = draw.tensor([8] * 4)
    out = torch.empty(4, 4, 128, dtype=torch.bfloat16)
    return case | {"topk_lengths": lengths, "out": out} | more


def decode_branch_arguments():
    extra = sparse_decode_case(Draw(7), format=BF16_576, batch=4, topk=5, with_lengths=True)
    return branch_arguments(
        extra_cache=extra["cache"],
        extra_topk_indices=extra["topk_indices"][:, 0],
        extra_topk_lengths=extra["topk_lengths"],
    )


def extra_prefill_arguments():
    draw = Draw(11)
    return {
        "extra_cache": prefill_rows(draw, 40, 512),
        "extra_topk_indices": draw.integers(-1, 40, 5, 9),
        "extra_topk_lengths": draw.integers(0, 10, 5),
    }


def attention_outputs(case, *shape, value_dim=512):
    out = torch.empty(*shape, value_dim, dtype=torch.bfloat16)
    return case | {"out": out, "lse": torch.empty(shape)}


CALLS = {
    "fused_rope_rmsnorm_quant": latent_write_arguments,
    "append_index_keys": key_write_arguments,
    "prepare_index_queries": query_arguments,
    "fused_indexer_rope_quant": index_step_arguments,
    "pool_windows": pool_arguments,
    "to_slots": to_slots_arguments,
    "entry_slots": lambda: key_slots_arguments() | {"out": torch.empty(5, dtype=torch.int32)},
    "visible_slots": lambda: (
        key_slots_arguments()
        | {
            "width": 6,
            "out": torch.empty(5, 6, dtype=torch.int32),
            "lengths": torch.empty(5, dtype=torch.int32),
        }
    ),
    "share_lists": lambda: (
        share_lists_case(Draw(3), with_lengths=True)
        | {
            "out": torch.empty(3, 80, dtype=torch.int32),
            "lengths": torch.empty(3, dtype=torch.int32),
            "token_mask": torch.empty(3, 80, dtype=torch.uint8),
        }
    ),
    "own_positions": lambda: (
        own_positions_case(Draw(3), shard=ContextShard(1, 2, parts=4))
        | {
            "out": torch.empty(9, 2, 20, dtype=torch.int32),
            "counts": torch.empty(9, 2, dtype=torch.int32),
        }
    ),
    "resolve_rows": resolve_arguments,
    "fetch_rows": fetch_arguments,
    "forget_seats": lambda: {"table": RowTable.allocate(3, 8), "seats": torch.tensor([2, -1])},
    "gather_dequant": gather_arguments,
    "merge_states": merge_arguments,
    "select_topk": lambda: {
        "scores": torch.zeros(3, 9),
        "topk": 4,
        "row_starts": torch.zeros(3, dtype=torch.int32),
        "row_ends": torch.ones(3, dtype=torch.int32),
        "page_table": torch.zeros(2, 3, dtype=torch.int32),
        "request_ids": torch.zeros(3, dtype=torch.int32),
        "page_size": 4,
        "out": torch.empty(3, 4, dtype=torch.int32),
    },
    "merge_topk": lambda: merge_topk_case(Draw(0)) | {"out": torch.empty(5, 64, dtype=torch.int32)},
    "indexer_scores": lambda: indexer_scores_case(Draw(8)) | {"out": torch.empty(6, 100)},
    "indexer_scores_paged": lambda: (
        indexer_scores_paged_case(Draw(9), own_lengths=True) | {"out": torch.empty(4, 1, 133)}
    ),
    "indexer_topk": lambda: (
        indexer_topk_case(Draw(10)) | {"out": torch.empty(11, 16, dtype=torch.int32)}
    ),
    "indexer_topk_blocks": lambda: (
        indexer_topk_blocks_case(Draw(10))
        | {
            "out": torch.empty(11, 16, dtype=torch.int32),
            "blocks_out": torch.empty(11, 3, dtype=torch.int32),
        }
    ),
    "indexer_topk_of_blocks": lambda: (
        indexer_topk_of_blocks_case(Draw(10)) | {"out": torch.empty(11, 16, dtype=torch.int32)}
    ),
    "sparse_prefill": lambda: (
        attention_outputs(
            sparse_prefill_case(Draw(11), head_dim=512, with_sink=True, with_lengths=True), 5, 8
        )
        | {"max_logits": torch.empty(5, 8)}
        | extra_prefill_arguments()
    ),
    "sparse_attention": lambda: sparse_attention_case(Draw(11), with_sink=True, with_lengths=True),
    "sparse_attention_backward": lambda: (
        sparse_attention_backward_case(
            Draw(11), with_sink=True, with_lengths=True, with_dlse=True, num_rows=100
        )
        | {"accumulate": torch.zeros(100, 576)}
    ),
    "sparse_decode": lambda: attention_outputs(
        sparse_decode_case(
            Draw(12),
            format=FP8_584,
            with_sink=True,
            with_lengths=True,
            extra=(FP8_584, 50, 16, 2),
            with_extra_lengths=True,
        ),
        3,
        1,
        8,
    ),
    "dense_decode": lambda: attention_outputs(
        dense_decode_case(Draw(13), format=FP8_DS_MLA, with_sink=True), 3, 1, 8
    ),
    "dense_prefill": lambda: attention_outputs(dense_prefill_case(Draw(14)), 14, 4, value_dim=128),
    "project_heads": lambda: (
        project_heads_case(Draw(15), rows=32, cols=64, num_parts=2, with_sink=True)
        | {"out": torch.empty(7, 3, 32).bfloat16()}
    ),
    "project_groups": lambda: (
        project_groups_case(Draw(16), rope_dim=32, num_parts=2, with_sink=True)
        | {"out": torch.empty(7, 2, 64).bfloat16()}
    ),
    "decode_branch": decode_branch_arguments,
    "prefill_branch": branch_arguments,
    "select_rows": lambda: select_rows_case(Draw(16)),
    "selected_scores": lambda: selected_scores_case(Draw(17), with_lengths=True),
    "selected_scores_backward": lambda: selected_scores_backward_case(Draw(17), with_lengths=True),
    "attention_target": lambda: attention_target_case(Draw(18), with_lengths=True, with_sink=True),
    "index_loss": lambda: index_loss_case(Draw(19), with_row_weights=True),
    "dense_index_loss": lambda: dense_index_loss_case(Draw(20), with_row_weights=True),
    "dense_index_gradients": lambda: dense_index_loss_case(Draw(20), with_row_weights=True),
}
WRITERS = [
    "fused_rope_rmsnorm_quant",
    "append_index_keys",
    "fused_indexer_rope_quant",
    "decode_branch",
    "prefill_branch",
]


def another_dtype(tensor):
    if tensor.dtype in (torch.int32, torch.int64):
        return tensor.to(torch.int16)
    return torch.zeros_like(tensor, dtype=torch.float64)


def with_column_stride(tensor):
    return tensor.new_zeros(*tensor.shape, 2).to(tensor.dtype)[..., 0]


MUTATIONS = {
    "another dtype": another_dtype,
    "one dimension more": lambda tensor: tensor[None],
    "another device": lambda tensor: tensor.to("meta"),
    "columns apart": with_column_stride,
    "not a tensor": lambda tensor: [1, 2, 3],
}
TENSORS = [
    (op, name)
    for op, make in CALLS.items()
    for name, value in make().items()
    if isinstance(value, torch.Tensor)
]


def cache_bytes(case):
    """Bytes of every cache of a call."""
    caches = [value for value in case.values() if isinstance(value, PagedCache)]
    return [
        cache.data.view(torch.uint8).clone() for cache in caches if cache.data.device.type != "meta"
    ]


def check_refused(op, case, *named, error=(TypeError, ValueError)):
    """Check that a call is refused with a message that names the bad argument."""
    before = cache_bytes(case)
    with pytest.raises(error) as caught:
        getattr(sparsemla, op)(**case)
    assert type(caught.value) in (TypeError, ValueError)
    said = str(caught.value)
    for name in named:
        assert name in said
    assert not re.search(r"(\[[^]]*\]) = \1|\b(\w+) or \2\b", said), f"says one thing twice: {said}"
    for was, now in zip(before, cache_bytes(case), strict=True):
        assert torch.equal(was, now), "a refused call wrote to the cache"


@pytest.mark.parametrize("op", CALLS)
def test_unchanged_calls_are_accepted(op):
    getattr(sparsemla, op)(**CALLS[op]())


def test_every_public_op_has_a_call():
    assert set(CALLS) == set(sparsemla.ops.__all__)


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize(("op", "name"), TENSORS, ids=lambda value: value)
def test_wrong_tensors_are_refused(op, name, mutation):
    case = CALLS[op]()
    tensor = case[name]
    if mutation == "columns apart" and tensor.shape[-1] < 2:
        pytest.skip("one column is always contiguous")
    if name == "seq_lens" and mutation == "one dimension more" and op == "indexer_scores_paged":
        case["seq_lens"] = tensor[:, 0]
    case[name] = MUTATIONS[mutation](case[name])
    first = next(iter(case)) == name
    # The device of the first tensor is the call's: the message names the next one.
    check_refused(op, case, op, *[] if mutation == "another device" and first else [name])


# Sizes that are independent of all other sizes.
FREE = {
    ("fused_rope_rmsnorm_quant", "cos_sin_cache", 0),
    ("fused_rope_rmsnorm_quant", "kv_norm_weight", 0),
    ("append_index_keys", "cos_sin_cache", 0),
    ("prepare_index_queries", "cos_sin_cache", 0),
    ("fused_indexer_rope_quant", "cos_sin_cache", 0),
    ("pool_windows", "cos_sin_cache", 0),
    ("project_groups", "cos_sin_cache", 0),
    ("to_slots", "page_table", 0),
    ("to_slots", "page_table", 1),
    ("to_slots", "workspace_starts", 0),
    ("entry_slots", "page_table", 0),
    ("entry_slots", "page_table", 1),
    ("visible_slots", "page_table", 0),
    ("visible_slots", "page_table", 1),
    ("resolve_rows", "page_table", 1),
    ("forget_seats", "seats", 0),
    ("gather_dequant", "page_table", 1),
    ("gather_dequant", "out", 0),
    ("select_topk", "scores", 1),
    ("select_topk", "page_table", 0),
    ("select_topk", "page_table", 1),
    ("indexer_scores_paged", "page_table", 1),
    ("indexer_topk", "page_table", 1),
    ("indexer_topk_blocks", "page_table", 1),
    ("indexer_topk_of_blocks", "page_table", 1),
    ("indexer_topk_of_blocks", "blocks", 1),
    ("dense_decode", "page_table", 1),
    ("sparse_prefill", "kv", 0),
    ("sparse_prefill", "topk_indices", 1),
    ("sparse_prefill", "extra_cache", 0),
    ("sparse_prefill", "extra_topk_indices", 1),
    ("sparse_attention", "kv", 0),
    ("sparse_attention", "topk_indices", 1),
    ("sparse_attention_backward", "topk_indices", 1),
    ("sparse_decode", "topk_indices", 2),
    ("sparse_decode", "extra_topk_indices", 2),
    ("decode_branch", "topk_indices", 1),
    ("decode_branch", "extra_topk_indices", 1),
    ("prefill_branch", "topk_indices", 1),
    ("select_rows", "index_k", 0),
    ("selected_scores", "index_k", 0),
    ("selected_scores", "topk_indices", 1),
    ("selected_scores_backward", "index_k", 0),
    ("attention_target", "kv", 0),
    ("attention_target", "topk_indices", 1),
}
SIZES = [(op, name, dim) for op, name in TENSORS for dim in range(CALLS[op]()[name].dim())]


@pytest.mark.parametrize(("op", "name", "dim"), sorted({*SIZES} - FREE), ids=str)
def test_mismatched_sizes_are_refused(op, name, dim):
    case = CALLS[op]()
    tensor = case[name]
    # One of two tensors is wrong; the op cannot know which one, so the message may name either.
    case[name] = torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim=dim)
    check_refused(op, case, op, error=ValueError)


@pytest.mark.parametrize(("op", "name", "dim"), sorted(FREE), ids=str)
def test_independent_sizes_are_accepted(op, name, dim):
    case = CALLS[op]()
    tensor = case[name]
    case[name] = torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim=dim)
    getattr(sparsemla, op)(**case)


CACHES = [
    (op, name)
    for op, make in CALLS.items()
    for name, value in make().items()
    if isinstance(value, PagedCache)
]


def another_format(cache):
    dims = cache.format.head_dim + 64
    return PagedCache.allocate(bf16_format(dims), cache.num_pages, cache.page_size)


BAD_CACHES = {
    "not a cache": (lambda cache: cache.data, TypeError),
    "several layers": (
        lambda cache: PagedCache.allocate(cache.format, 2, cache.page_size, num_layers=2),
        ValueError,
    ),
    "no pages": (
        lambda cache: PagedCache.allocate(cache.format, 0, cache.page_size),
        ValueError,
    ),
    "another device": (
        lambda cache: PagedCache.allocate(cache.format, 2, cache.page_size, device="meta"),
        ValueError,
    ),
    "another row": (another_format, ValueError),
}


@pytest.mark.parametrize("bad", BAD_CACHES)
@pytest.mark.parametrize(("op", "name"), CACHES, ids=lambda value: value)
def test_wrong_caches_are_refused(op, name, bad):
    case = CALLS[op]()
    make, error = BAD_CACHES[bad]
    case[name] = make(case[name])
    check_refused(op, case, op, error=(error, TypeError) if bad == "another row" else error)


def with_value(name, at, value):
    def change(case):
        case[name] = case[name].clone()
        case[name][at] = value

    return change


def with_arguments(**values):
    return lambda case: case.update(values)


VALUES = [
    ("fused_rope_rmsnorm_quant", "positions", with_value("positions", 2, 100)),
    ("fused_rope_rmsnorm_quant", "positions", with_value("positions", 2, -1)),
    ("fused_rope_rmsnorm_quant", "slot_mapping", with_value("slot_mapping", 1, 24)),
    ("append_index_keys", "positions", with_value("positions", 2, 100)),
    ("append_index_keys", "slot_mapping", with_value("slot_mapping", 1, 24)),
    ("pool_windows", "positions", with_value("positions", 2, 300)),
    ("pool_windows", "slot_mapping", with_value("slot_mapping", 1, 10**6)),
    ("pool_windows", "ring_ids", with_value("ring_ids", 1, 3)),
    ("pool_windows", "input_row_offsets", with_value("input_row_offsets", 0, 1)),
    ("pool_windows", "input_row_offsets", with_value("input_row_offsets", 1, 10)),
    ("to_slots", "request_ids", with_value("request_ids", 0, 2)),
    ("to_slots", "request_ids", with_value("request_ids", 0, -1)),
    *(
        (op, name, with_value(name, 0, value))
        for op in ("entry_slots", "visible_slots")
        for name, value in (("positions", -1), ("positions", 35), ("request_ids", 2))
    ),
    ("resolve_rows", "seats", with_value("seats", 0, 4)),
    ("resolve_rows", "seats", lambda case: case.update(seats=torch.ones_like(case["seats"]))),
    ("resolve_rows", "seq_lens", with_value("seq_lens", 0, 10**6)),
    ("resolve_rows", "seq_lens", with_value("seq_lens", 1, 1)),
    ("resolve_rows", "seq_lens", with_value("seq_lens", 1, -1)),
    ("resolve_rows", "input_row_offsets", with_value("input_row_offsets", 0, 1)),
    ("resolve_rows", "input_row_offsets", with_value("input_row_offsets", 1, 4)),
    ("resolve_rows", "the tokens of a request", with_value("input_row_offsets", 1, 0)),
    ("resolve_rows", "topk_indices", with_value("topk_indices", (0, 2), 1)),
    ("resolve_rows", "topk_indices", with_value("topk_indices", (0, 2), -1)),
    ("fetch_rows", "miss_slots", with_value("miss_slots", (0, 1), 24)),
    ("fetch_rows", "miss_slots", with_value("miss_slots", (1, 0), -1)),
    ("fetch_rows", "miss_rows", with_value("miss_rows", (0, 1), 12)),
    ("fetch_rows", "miss_counts", with_value("miss_counts", 0, 3)),
    ("gather_dequant", "seq_lens", with_value("seq_lens", 0, 41)),
    ("gather_dequant", "seq_lens", with_value("seq_lens", 0, -1)),
    ("gather_dequant", "page_table", with_value("page_table", (1, 2), 10**6)),
    ("gather_dequant", "page_table", with_value("page_table", (1, 2), -1)),
    ("gather_dequant", "workspace_starts", with_value("workspace_starts", 1, 10)),
    ("gather_dequant", "workspace_starts", with_value("workspace_starts", 0, -1)),
    ("gather_dequant", "seq_lens", with_value("seq_lens", 1, -1)),
    ("gather_dequant", "seq_starts", with_value("seq_starts", 0, 40)),
    ("gather_dequant", "seq_starts", with_value("seq_starts", 0, -1)),
    ("dense_decode", "seq_lens", with_value("seq_lens", 1, 10**6)),
    ("dense_decode", "page_table", with_value("page_table", (1, 1), 10**6)),
    ("dense_prefill", "input_row_offsets", with_value("input_row_offsets", 0, 1)),
    ("dense_prefill", "input_row_offsets", with_value("input_row_offsets", -1, 13)),
    ("dense_prefill", "kv_row_offsets", with_value("kv_row_offsets", 1, 10)),
    ("indexer_scores_paged", "seq_lens", with_value("seq_lens", (0, 0), 10**6)),
    ("indexer_scores_paged", "page_table", with_value("page_table", (0, 1), -5)),
    ("indexer_topk", "seq_lens", with_value("seq_lens", 0, 10**6)),
    ("indexer_topk", "page_table", with_value("page_table", (0, 1), 10**6)),
    ("indexer_topk", "input_row_offsets", with_value("input_row_offsets", -1, 10)),
    ("indexer_topk_blocks", "seq_lens", with_value("seq_lens", 0, 10**6)),
    ("indexer_topk_of_blocks", "page_table", with_value("page_table", (0, 1), 10**6)),
    (
        "indexer_topk_of_blocks",
        "blocks must ascend in each row, and negative ones come last, got [7, 7, 9, -1, -1] for",
        with_value("blocks", 2, torch.tensor([7, 7, 9, -1, -1])),
    ),
    ("indexer_topk_of_blocks", "blocks", with_value("blocks", 0, torch.tensor([1, -1, 2, 3, 4]))),
]


@pytest.mark.parametrize(
    ("op", "name", "change"), VALUES, ids=[f"{op}-{name}" for op, name, _ in VALUES]
)
def test_values_out_of_range_are_refused_if_validated(op, name, change):
    case = CALLS[op]()
    getattr(sparsemla, op)(**case, validate=True)
    case = CALLS[op]()
    change(case)
    check_refused(op, case | {"validate": True}, op, name, error=ValueError)


OTHERS = [
    ("fused_rope_rmsnorm_quant", "scale_mode", with_arguments(scale_mode="up")),
    ("fused_rope_rmsnorm_quant", "kv_norm_weight", with_arguments(kv_norm_weight=torch.ones(577))),
    ("append_index_keys", "scale_mode", with_arguments(scale_mode="up")),
    ("append_index_keys", "cos_sin_cache", with_arguments(cos_sin_cache=torch.ones(100, 63))),
    ("append_index_keys", "cos_sin_cache", with_arguments(cos_sin_cache=torch.ones(100, 130))),
    ("prepare_index_queries", "scale_mode", with_arguments(scale_mode="up")),
    ("prepare_index_queries", "format", with_arguments(format=FP8_DS_MLA)),
    ("prepare_index_queries", "format", with_arguments(format=e4m3_format(128, 128, 32))),
    ("prepare_index_queries", "format", with_arguments(format="index_fp7")),
    ("prepare_index_queries", "out", with_arguments(format=bf16_format(128))),
    ("to_slots", "page_size", with_arguments(page_size=0)),
    ("to_slots", "page_size", with_arguments(page_size=2.0)),
    ("entry_slots", "ratio", with_arguments(ratio=0)),
    ("visible_slots", "ratio", with_arguments(ratio=2.0)),
    ("visible_slots", "width", with_arguments(width=0)),
    ("visible_slots", "page_size", with_arguments(page_size=0)),
    ("to_slots", "prefill_request_ids", with_arguments(workspace_starts=None)),
    ("to_slots", "prefill_request_ids", with_arguments(prefill_request_ids=None)),
    ("select_topk", "topk", with_arguments(topk=0)),
    ("select_topk", "scores", with_arguments(scores=torch.zeros(1, 1).expand(3, 2**30 + 1))),
    ("select_topk", "request_ids", with_arguments(page_table=None)),
    ("select_topk", "request_ids", with_arguments(request_ids=None)),
    ("select_topk", "page_size", with_arguments(page_size=None)),
    ("select_topk", "page_size", with_arguments(page_size=0)),
    ("select_topk", "topk", with_arguments(topk=-3)),
    ("select_topk", "scores", with_arguments(scores=torch.zeros(3, 9).half())),
    ("merge_topk", "topk", with_arguments(topk=0)),
    ("merge_topk", "values", with_arguments(values=torch.zeros(4, 5, 40).half())),
    (
        "dense_prefill",
        "input_row_offsets",
        with_arguments(input_row_offsets=torch.empty(0).int(), kv_row_offsets=torch.empty(0).int()),
    ),
    ("indexer_scores", "index_k", with_arguments(index_k=torch.zeros(100, 128).bfloat16())),
    ("indexer_scores_paged", "max_seq_len", with_arguments(max_seq_len=0)),
    ("indexer_scores_paged", "ratio", with_arguments(ratio=0)),
    ("indexer_topk", "topk", with_arguments(topk=0)),
    ("indexer_topk", "ratio", with_arguments(ratio=0)),
    ("indexer_topk", "max_workspace_bytes", with_arguments(max_workspace_bytes=0)),
    ("indexer_topk", "index_q", with_arguments(index_q=torch.zeros(11, 32, 128).bfloat16())),
    ("indexer_topk_blocks", "topk", with_arguments(topk=0)),
    ("indexer_topk_blocks", "topk_blocks", with_arguments(topk_blocks=0)),
    ("indexer_topk_blocks", "block_size", with_arguments(block_size=0)),
    ("indexer_topk_blocks", "block_size", with_arguments(block_size=1025)),
    ("indexer_topk_of_blocks", "topk", with_arguments(topk=0)),
    ("indexer_topk_of_blocks", "block_size", with_arguments(block_size=0)),
    ("indexer_topk_of_blocks", "blocks", with_arguments(blocks=torch.zeros(11, 5))),
    ("indexer_topk_of_blocks", "blocks", with_arguments(blocks=torch.zeros(10, 5).int())),
    ("sparse_prefill", "q_rope", with_arguments(q_rope=torch.zeros(5, 8, 64).bfloat16())),
    ("sparse_prefill", "q_rope", with_arguments(q_rope=torch.zeros(5, 8, 0))),
    (
        "sparse_decode",
        "q",
        with_arguments(
            q=torch.zeros(3, 1, 8, 448).bfloat16(), q_rope=torch.zeros(3, 1, 8, 64).bfloat16()
        ),
    ),
    ("decode_branch", "scale_mode must be 'pow2' or 'exact'", with_arguments(scale_mode="fp8")),
    ("prefill_branch", "scale_mode must be 'pow2' or 'exact'", with_arguments(scale_mode="fp8")),
    ("sparse_prefill", "extra_topk_indices", with_arguments(extra_cache=None)),
    ("sparse_prefill", "extra_topk_indices", with_arguments(extra_topk_indices=None)),
    (
        "sparse_prefill",
        "extra_topk_lengths",
        with_arguments(extra_cache=None, extra_topk_indices=None),
    ),
    (
        "sparse_prefill",
        "token_mask",
        with_arguments(token_mask=torch.zeros(5, 128, dtype=torch.uint8)),
    ),
    (
        "sparse_prefill",
        "list_tokens must be 1 beside extra_cache",
        lambda case: case.update(
            list_tokens=2,
            topk_indices=case["topk_indices"][:3],
            topk_lengths=case["topk_lengths"][:3],
        ),
    ),
    ("sparse_prefill", "allow_fp8_mma must be a bool, got str", with_arguments(allow_fp8_mma="")),
    ("sparse_prefill", "list_tokens", with_arguments(list_tokens=0)),
    ("sparse_prefill", "list_tokens", with_arguments(list_tokens=2.0)),
    ("share_lists", "list_tokens", with_arguments(list_tokens=0)),
    ("share_lists", "list_tokens", with_arguments(list_tokens=9)),
    ("share_lists", "list_tokens", with_arguments(list_tokens=torch.tensor(4))),
    ("share_lists", "out", with_arguments(out=torch.empty(3, 80, dtype=torch.int64))),
    ("own_positions", "shard", with_arguments(shard=(1, 2))),
    ("own_positions", "out", with_arguments(shard=ContextShard(1, 2))),
    ("own_positions", "counts", with_arguments(counts=torch.empty(9, 3, dtype=torch.int32))),
    ("resolve_rows", "table", with_arguments(table=None)),
    ("resolve_rows", "rows_per_seat", with_arguments(max_query_len=4)),
    ("resolve_rows", "rows_per_seat", with_arguments(table=RowTable.allocate(4, 11))),
    ("resolve_rows", "page_size", with_arguments(page_size=0)),
    ("resolve_rows", "max_query_len", with_arguments(max_query_len=0)),
    ("resolve_rows", "shard", with_arguments(shard=(1, 2))),
    ("resolve_rows", "out", with_arguments(shard=ContextShard(1, 2))),
    ("resolve_rows", "stats", with_arguments(stats=torch.zeros(2, dtype=torch.int32))),
    ("resolve_rows", "stats", with_arguments(stats=torch.zeros(1, 2, dtype=torch.int64))),
    ("resolve_rows", "workspace", with_arguments(workspace=torch.empty(2911, dtype=torch.uint8))),
    ("fetch_rows", "page_size", with_arguments(target=PagedCache.allocate(FP8_DS_MLA, 6, 2))),
    ("fetch_rows", "format", with_arguments(target=PagedCache.allocate(BF16_576, 12, 1))),
    ("forget_seats", "table", with_arguments(table=torch.zeros(3, 8))),
    ("sparse_decode", "topk_lengths", with_arguments(topk_lengths=torch.zeros(3, 2).int())),
    ("sparse_decode", "topk_lengths", with_arguments(topk_lengths=torch.zeros(2, 1).int())),
    ("sparse_decode", "extra_topk_indices", with_arguments(extra_cache=None)),
    ("sparse_decode", "extra_topk_indices", with_arguments(extra_topk_indices=None)),
    ("decode_branch", "extra_topk_indices", with_arguments(extra_cache=None)),
    ("decode_branch", "topk_lengths", with_arguments(topk_indices=None, extra_cache=None)),
    ("prefill_branch", "attn_sink", with_arguments(topk_indices=None, topk_lengths=None)),
    ("prefill_branch", "workspace_rows", with_arguments(workspace_rows=0)),
    ("project_heads", "weight", with_arguments(weight=torch.ones(2, 32, 64).bfloat16())),
    ("decode_branch", "layer", with_arguments(layer=None)),
    ("decode_branch", "plan", with_arguments(plan=None)),
    (
        "decode_branch",
        "plan",
        lambda case: case.update(plan=dataclasses.replace(case["plan"], ratio=4)),
    ),
    ("prefill_branch", "layer", with_arguments(layer=None)),
    ("prefill_branch", "plan", with_arguments(plan=None)),
]


def with_plan_value(case, name, value):
    """A branch's arguments with ``value`` in all of one tensor of the plan."""
    tensor = torch.full_like(getattr(case["plan"], name), value)
    return case | {"plan": dataclasses.replace(case["plan"], **{name: tensor})}


@pytest.mark.parametrize("branch", ["decode_branch", "prefill_branch"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("positions", -1),
        ("positions", 512),
        ("slot_mapping", 10**6),
        ("page_table", -1),
        ("page_table", 10**6),
    ],
)
def test_plans_out_of_range_are_refused_if_validated(branch, name, value):
    draw = Draw(6)
    case = branch_case(draw, mla_layer(draw), query_lens=[1, 3], seq_lens=[9, 5], format=FP8_DS_MLA)
    check_refused(branch, with_plan_value(case, name, value) | {"validate": True}, branch, name)
    getattr(sparsemla, branch)(**case, validate=True)


TABLE_READERS = [
    "fused_rope_rmsnorm_quant",
    "append_index_keys",
    "prepare_index_queries",
    "fused_indexer_rope_quant",
    "project_groups",
    "decode_branch",
    "prefill_branch",
]


@pytest.mark.parametrize("position", [-1, 512, 10**6])
@pytest.mark.parametrize("op", TABLE_READERS)
def test_cpu_refuses_positions_outside_the_rope_table(op, position):
    case = CALLS[op]()
    if "plan" in case:
        case = with_plan_value(case, "positions", position)
    else:
        with_value("positions", 2, position)(case)
    check_refused(op, case, "positions", "cos_sin_cache", error=ValueError)


SLOT_WRITERS = ["fused_rope_rmsnorm_quant", "append_index_keys", "fused_indexer_rope_quant"]


@pytest.mark.parametrize("op", SLOT_WRITERS)
def test_cpu_refuses_slots_out_of_range_before_it_writes(op):
    # More tokens than are written at a time, and the last one is wrong.
    case, count = CALLS[op](), 1500
    case["cache"] = PagedCache.allocate(case["cache"].format, 200, 8)
    for name, value in case.items():
        if isinstance(value, torch.Tensor) and value.shape[0] == 4:
            case[name] = value[:1].expand(count, *value.shape[1:]).clone()
    case["slot_mapping"] = torch.arange(count)
    case["slot_mapping"][-1] = 1600
    names = ("out", "kv_out", "weights_out")
    outputs = {name: case[name].clone() for name in names if name in case}
    check_refused(op, case, op, "slot_mapping", "1600", error=ValueError)
    for name, before in outputs.items():
        assert_equal(name, case[name], before)


def test_gather_skips_rows_outside_of_the_workspace():
    case = gather_arguments() | {"out": torch.full((20, 576), 7.0).bfloat16()}
    case["workspace_starts"] = torch.tensor([-4, 9])
    sparsemla.gather_dequant(**case)
    whole = gather_arguments()
    sparsemla.gather_dequant(**whole)
    assert_equal("the end of the first", case["out"][:5], whole["out"][4:9])
    assert_equal("between", case["out"][5:9], torch.full((4, 576), 7.0).bfloat16())
    assert_equal("the start of the second", case["out"][9:], whole["out"][9:20])
    again = case | {"out": torch.full((20, 576), 7.0).bfloat16()}
    sparsemla.reference.gather_dequant(**again)
    assert_equal("by definition", again["out"], case["out"])


@pytest.mark.parametrize("wrong", [-1, 2, 2**40, -(2**63)])
def test_request_ids_out_of_range_have_no_slots(wrong):
    for tier in (sparsemla, sparsemla.reference):
        case = to_slots_arguments()
        case["prefill_request_ids"].fill_(-1)
        case["request_ids"] = torch.tensor([0, wrong, 1, wrong])
        del case["out"]
        slots = tier.to_slots(**case)
        assert (slots[1::2] == -1).all()
        assert (slots[::2] >= 0).any()
        case["prefill_request_ids"] = torch.tensor([0, 3, 2**40, 1])
        rows = tier.to_slots(**case)
        assert (rows[1:3] == -1).all()
        assert (rows[::3] >= 0).any()


EMPTY = {
    "sparse_decode": ("q", "topk_indices", "topk_lengths", "extra_topk_indices", "out", "lse"),
    "sparse_prefill": (
        "q",
        "topk_indices",
        "topk_lengths",
        "extra_topk_indices",
        "max_logits",
        "out",
        "lse",
    ),
    "dense_decode": ("q", "page_table", "seq_lens", "out", "lse"),
    "to_slots": ("topk_indices", "request_ids", "prefill_request_ids", "out"),
    "visible_slots": ("positions", "request_ids", "out", "lengths"),
    "own_positions": ("topk_indices", "out", "counts"),
    "resolve_rows": (
        "topk_indices",
        "out",
        "counts",
        "miss_slots",
        "miss_rows",
        "miss_counts",
        "new_counts",
    ),
    "fetch_rows": ("miss_slots", "miss_rows", "miss_counts"),
    "forget_seats": ("seats",),
    "select_topk": ("scores", "row_starts", "row_ends", "request_ids", "out"),
    "indexer_scores_paged": ("index_q", "weights", "page_table", "seq_lens", "out"),
    "append_index_keys": ("index_k", "positions", "slot_mapping"),
}


@pytest.mark.parametrize("op", EMPTY)
def test_empty_tensors_may_have_any_strides(op):
    """numpy gives tensors without elements strides of 0."""
    case = CALLS[op]()
    names = (*EMPTY[op], "extra_topk_lengths")
    for name in names:
        if name in case:
            empty = case[name][:0]
            case[name] = empty.as_strided(empty.shape, [0] * empty.dim())
    results = getattr(sparsemla, op)(**case)
    for result in results if isinstance(results, tuple) else (results,):
        assert result is None or result.numel() == 0


@pytest.mark.parametrize(
    ("op", "name", "change"), OTHERS, ids=[f"{op}-{name}" for op, name, _ in OTHERS]
)
def test_other_wrong_arguments_are_refused(op, name, change):
    case = CALLS[op]()
    change(case)
    check_refused(op, case, op, name)


SCALARS = {
    "softmax_scale": [None, "0.1", torch.tensor(0.1)],
    "eps": [None, torch.tensor(1e-6)],
    "causal": [None, "yes", torch.tensor(True)],
    "interleaved": [None, "neox"],
    "query_norm": [None, 1],
    "rope_first": [None],
    "hadamard": [None, torch.eye(128)],
    "as_slots": [None],
    "allow_fp8_mma": [None, "fp8", torch.float8_e4m3fn],
}
NUMBERS = ["softmax_scale", "eps"]
NOT_FINITE = [math.nan, math.inf, -math.inf, 1e39, 10**400, np.float64("nan")]
OPTIONS = [
    (op, name, parameter.annotation)
    for op in CALLS
    for name, parameter in inspect.signature(getattr(sparsemla, op)).parameters.items()
]


def test_numbers_are_finite():
    taken = {(op, name) for op, name, kind in OPTIONS if "float" in str(kind)}
    assert {name for _, name in taken} == {*NUMBERS}
    for op, name in sorted(taken):
        for value in NOT_FINITE:
            case = CALLS[op]() | {name: value}
            check_refused(op, case, f"{op}: {name} must be finite in float32", error=ValueError)
        check_refused(op, CALLS[op]() | {name: True}, op, name, "bool", error=TypeError)
    for op, name in sorted(taken):
        if name == "eps":
            case = CALLS[op]() | {name: -1e-6}
            check_refused(op, case, f"{op}: eps must be at least 0", error=ValueError)
            getattr(sparsemla, op)(**CALLS[op]() | {name: 0})


def test_integers_are_neither_flags_nor_floats():
    taken = [
        (op, name) for op, name, kind in OPTIONS if str(kind).startswith(("<class 'int'", "int"))
    ]
    assert {"topk", "num_splits", "page_size", "ratio", "list_tokens"} <= {
        name for _, name in taken
    }
    for op, name in taken:
        for value in (True, False, 2.0, 2.5, np.float64(2), np.True_, "2", b"2"):
            case = CALLS[op]() | {name: value}
            check_refused(op, case, f"{op}: {name} must be an integer", error=TypeError)


def test_flags_and_words_are_of_their_class():
    flags = [(op, name, "bool") for op, name, kind in OPTIONS if "bool" in str(kind)]
    words = [
        (op, name, "str") for op, name, kind in OPTIONS if "Literal" in str(kind) or kind is str
    ]
    assert {name for _, name, _ in words} == {"scale_mode"}
    wrong = {"bool": (1, 0, "yes", np.True_), "str": (b"pow2", 1, True, ["bf16"])}
    for op, name, kind in flags + words:
        for value in wrong[kind]:
            case = CALLS[op]() | {name: value}
            check_refused(op, case, f"{op}: {name} must be a {kind}", error=TypeError)


TAKEN = [
    (op, name)
    for op in CALLS
    for name in SCALARS
    if name in inspect.signature(getattr(sparsemla, op)).parameters
]


@pytest.mark.parametrize(("op", "name"), TAKEN)
def test_scalars_of_a_wrong_kind_are_refused(op, name):
    for value in SCALARS[name]:
        check_refused(op, CALLS[op]() | {name: value}, op, name, error=TypeError)


@pytest.mark.parametrize("mutation", MUTATIONS)
@pytest.mark.parametrize("name", ["topk_indices", "topk_lengths", "token_mask"])
def test_wrong_shared_lists_are_refused(name, mutation):
    case = shared_prefill_case(Draw(11), with_lengths=True)
    sparsemla.sparse_prefill(**case)
    if name == "topk_lengths" and mutation == "columns apart":
        case[name] = case[name].repeat(2)[::2]
    changed = MUTATIONS[mutation](case[name])
    if name == "token_mask" and mutation == "another dtype":
        changed = case[name].int()
    check_refused("sparse_prefill", case | {name: changed}, "sparse_prefill", name)


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("name", ["topk_indices", "topk_lengths", "token_mask"])
def test_shared_lists_of_other_sizes_are_refused(name, dim):
    case = shared_prefill_case(Draw(11), with_lengths=True)
    tensor = case[name]
    if dim < tensor.dim():
        case[name] = torch.cat([tensor, tensor.narrow(dim, 0, 1)], dim=dim)
        check_refused("sparse_prefill", case, "sparse_prefill", error=ValueError)


def test_shared_lists_with_members_have_up_to_eight_tokens():
    case = shared_prefill_case(Draw(11))
    check_refused("sparse_prefill", case | {"list_tokens": 9}, "list_tokens", error=ValueError)
    whole = case | {"list_tokens": 9, "token_mask": None}
    whole |= {name: case[name][:2] for name in ("topk_indices", "topk_lengths")}
    sparsemla.sparse_prefill(**whole)


def test_numpy_scalars_are_accepted():
    case = CALLS["sparse_prefill"]()
    case["softmax_scale"] = np.float32(case["softmax_scale"])
    sparsemla.sparse_prefill(**case)
    counts = {
        "to_slots": ["page_size"],
        "entry_slots": ["ratio", "page_size"],
        "visible_slots": ["width", "ratio", "page_size"],
        "share_lists": ["list_tokens"],
        "resolve_rows": ["page_size", "max_query_len"],
        "sparse_prefill": ["list_tokens"],
        "select_topk": ["topk", "page_size"],
        "merge_topk": ["topk"],
        "indexer_topk": ["topk", "ratio", "max_workspace_bytes"],
        "indexer_topk_blocks": ["topk", "topk_blocks", "block_size"],
        "indexer_topk_of_blocks": ["topk", "block_size"],
        "indexer_scores_paged": ["max_seq_len", "ratio"],
        "sparse_attention": ["list_tokens"],
        "sparse_attention_backward": ["list_tokens", "max_workspace_bytes"],
        "sparse_decode": ["num_splits"],
    }
    for op, names in counts.items():
        case = CALLS[op]()
        plain = {"max_workspace_bytes": 1 << 20, "num_splits": 2, "list_tokens": 1} | case
        getattr(sparsemla, op)(**case | {name: np.int64(plain[name]) for name in names})


READ_LSE = {
    "attention_target",
    "dense_index_loss",
    "dense_index_gradients",
    "sparse_attention_backward",
}
"""Ops that read the results of a forward pass."""
RESULTS = {"out", "lse", "max_logits", "kv_out", "weights_out", "lengths", "counts", "token_mask"}
RESULTS |= {"blocks_out"}
MISSES = {"miss_slots", "miss_rows", "miss_counts", "new_counts"}
OUTPUTS = [
    (op, name)
    for op, name in TENSORS
    if (name in RESULTS and op not in READ_LSE) or (op == "resolve_rows" and name in MISSES)
]


@pytest.mark.parametrize(("op", "name"), OUTPUTS)
def test_self_overlapping_outputs_are_refused(op, name):
    case = CALLS[op]()
    shape = case[name].shape
    for dim in range(len(shape) - 1):
        case[name] = case[name].narrow(dim, 0, 1).expand(shape)
        if shape[dim] > 1:
            check_refused(op, case, op, name, error=ValueError)


INDEX_QUERIES = {  # the dim of the heads, in the queries and their weights
    "prepare_index_queries": 1,
    "fused_indexer_rope_quant": 1,
    "indexer_scores": 1,
    "indexer_scores_paged": 2,
    "indexer_topk": 1,
    "indexer_topk_blocks": 1,
    "indexer_topk_of_blocks": 1,
}


@pytest.mark.parametrize("op", INDEX_QUERIES)
def test_index_queries_without_heads_are_refused(op):
    case = CALLS[op]()
    for name in ("index_q", "weights", "out", "weights_out"):
        if name in ("index_q", "weights") or "weights_out" in case:
            case[name] = case[name].narrow(INDEX_QUERIES[op], 0, 0)
    check_refused(op, case, op, "index_q must have at least one head", error=ValueError)


@pytest.mark.parametrize(
    "op", [op for op in CALLS if "index_q" in CALLS[op]() and op not in INDEX_QUERIES]
)
def test_trained_queries_without_heads_are_refused(op):
    case = CALLS[op]()
    for name in ("index_q", "weights"):
        case[name] = case[name].narrow(1, 0, 0)
    check_refused(op, case, op, "index_q must have at least one head", error=ValueError)


def test_e8m0_scales_refuse_exact_mode():
    case = latent_write_arguments()
    case["cache"] = PagedCache.allocate(FP8_584, 3, 8)
    case["kv"] = torch.ones(4, 512)
    check_refused(
        "fused_rope_rmsnorm_quant", case | {"scale_mode": "exact"}, "scale_mode", "fp8_584"
    )


def test_hadamard_needs_a_power_of_two():
    fmt = bf16_format(96)
    case = key_write_arguments() | {"cache": PagedCache.allocate(fmt, 3, 8), "hadamard": True}
    for name in ("index_k", "norm_weight", "norm_bias"):
        case[name] = case[name][..., :96].contiguous()
    check_refused("append_index_keys", case, "hadamard", error=ValueError)
    case = query_arguments() | {"format": fmt, "hadamard": True, "out": None}
    case["index_q"] = case["index_q"][..., :96].contiguous()
    check_refused("prepare_index_queries", case, "hadamard", error=ValueError)


@pytest.mark.parametrize("op", ["sparse_decode", "sparse_prefill", "dense_decode"])
def test_query_dims_must_match_the_cache(op):
    case = CALLS[op]()
    cache = PagedCache.allocate(BF16_512 if op == "dense_decode" else BF16_576, 4, 64)
    case["kv" if op == "sparse_prefill" else "cache"] = cache
    check_refused(op, case, op, "q", error=ValueError)


@pytest.mark.parametrize(
    ("op", "name"), [("sparse_decode", "extra_cache"), ("sparse_prefill", "extra_cache")]
)
def test_extra_cache_must_have_the_same_value_dim(op, name):
    case = CALLS[op]()
    case[name] = PagedCache.allocate(bf16_format(512, 448), 4, 64)
    check_refused(op, case, name, error=ValueError)


@pytest.mark.parametrize("op", ["decode_branch", "prefill_branch"])
def test_branches_refuse_caches_with_another_value_dim(op):
    case = branch_arguments(cache=PagedCache.allocate(bf16_format(576), 8, 8))
    check_refused(op, case, "cache", error=ValueError)


@pytest.mark.parametrize("op", ["decode_branch", "prefill_branch"])
def test_branches_refuse_another_page_size_than_the_plan(op):
    # Twice as many rows per page, and as many slots: every slot exists, but in another place.
    cache = PagedCache.allocate(FP8_DS_MLA, branch_arguments()["cache"].num_pages // 2, 16)
    check_refused(op, branch_arguments(cache=cache), "cache", "pages of 8 tokens", error=ValueError)


@pytest.mark.parametrize("op", ["decode_branch", "prefill_branch"])
def test_branches_refuse_plans_of_a_rank(op):
    case = branch_arguments()
    shard = sparsemla.ContextShard(0, 2)
    case |= {"plan": dataclasses.replace(case["plan"], shard=shard)}
    check_refused(op, case, "plan", "no shard, got ContextShard", error=ValueError)


def test_branches_refuse_extra_caches_of_other_dims():
    for fmt in (BF16_512, bf16_format(576)):
        case = decode_branch_arguments() | {"extra_cache": PagedCache.allocate(fmt, 4, 64)}
        check_refused("decode_branch", case, "extra_cache", error=ValueError)


def with_transposed_strides(weight):
    return HeadWeight(weight.data.transpose(1, 2).contiguous().transpose(1, 2))


LAYER_CHANGES = {
    "w_uv": [
        (head_weight(Draw(0), 4, 128, 500), ValueError),
        (with_transposed_strides(head_weight(Draw(0), 4, 128, 512)), ValueError),
        (HeadWeight(torch.empty(4, 128, 512, device="meta").bfloat16()), ValueError),
    ],
    "kv_norm_weight": [(torch.ones(500), ValueError), (torch.ones(512).int(), TypeError)],
    "cos_sin_cache": [(torch.ones(100), ValueError), (torch.ones(100, 64).double(), TypeError)],
    "attn_sink": [
        (torch.zeros(3), ValueError),
        (torch.zeros(4, 2)[:, 0], ValueError),
        (torch.zeros(4, device="meta"), ValueError),
        (torch.zeros(4).bfloat16(), TypeError),
        ([0.0] * 4, TypeError),
    ],
    "softmax_scale": [(None, TypeError), ("0.1", TypeError)],
    "norm_eps": [(None, TypeError)],
    "interleaved": [(None, TypeError)],
}


@pytest.mark.parametrize("name", LAYER_CHANGES)
def test_layers_with_mismatched_tensors_are_refused(name):
    layer = mla_layer(Draw(0))
    for value, error in LAYER_CHANGES[name]:
        with pytest.raises(error, match=name):
            dataclasses.replace(layer, **{name: value})


def test_layer_weights_of_a_wrong_kind_are_refused():
    layer = mla_layer(Draw(0))
    for name in ("w_uk", "w_uv"):
        with pytest.raises(TypeError, match=name):
            dataclasses.replace(layer, **{name: torch.ones(4, 512, 128)})
    with pytest.raises(ValueError, match="w_uv"):
        dataclasses.replace(layer, w_uv=HeadWeight(torch.ones(3, 128, 512).bfloat16()))


UNSIGNED = [
    (op, name)
    for op, name in TENSORS
    if name not in ("out", "lengths", "counts", "stats")
    and (op, name) not in OUTPUTS
    and (op, name) != ("share_lists", "topk_indices")  # gives int64: see tests/test_lists.py
    and CALLS[op]()[name].dtype in (torch.int32, torch.int64)
]


@pytest.mark.parametrize(("op", "name"), UNSIGNED)
def test_uint32_equals_int32(op, name):
    signed, unsigned = CALLS[op](), CALLS[op]()
    unsigned[name] = unsigned[name].int().view(torch.uint32)
    getattr(sparsemla, op)(**signed)
    getattr(sparsemla, op)(**unsigned)
    for key in (
        "out",
        "lse",
        "max_logits",
        "weights_out",
        "blocks_out",
        "lengths",
        *sorted(MISSES),
    ):
        if key in signed and key != name:
            assert_equal(key, unsigned[key], signed[key])
    for was, now in zip(cache_bytes(signed), cache_bytes(unsigned), strict=True):
        assert_equal("cache", now, was)


@pytest.mark.parametrize("op", [op for op, name in TENSORS if name == "topk_lengths"])
def test_uint32_lengths_beyond_int32_select_all_entries(op):
    case = CALLS[op]()
    most = torch.full_like(case["topk_lengths"], -1).int().view(torch.uint32)  # 2^32 - 1
    out = getattr(sparsemla, op)(**CALLS[op]() | {"topk_lengths": most})
    everything = getattr(sparsemla, op)(**CALLS[op]() | {"topk_lengths": None})
    out, everything = (x[0] if isinstance(x, tuple) else x for x in (out, everything))
    assert_equal("out", out, everything)


@pytest.mark.parametrize(
    ("op", "name"),
    [
        (op, name)
        for op, name in TENSORS
        if name in ("slot_mapping", "ring_ids", "prefill_request_ids")
    ],
)
def test_uint32_slots_and_ids_of_all_ones_are_minus_one(op, name):
    signed, unsigned = CALLS[op](), CALLS[op]()
    signed[name][1:] = -1
    unsigned[name] = signed[name].int().view(torch.uint32)
    getattr(sparsemla, op)(**signed)
    getattr(sparsemla, op)(**unsigned)
    for was, now in zip(cache_bytes(signed), cache_bytes(unsigned), strict=True):
        assert_equal("cache", now, was)
    if "out" in signed:
        assert_equal("out", unsigned["out"], signed["out"])


@pytest.mark.parametrize("op", [op for op, name in TENSORS if name == "slot_mapping"])
def test_uint32_slots_are_refused_where_int32_is_too_narrow(op):
    case = CALLS[op]()
    cache = case["cache"]
    pages = cache.data[:1].expand(2**31 // cache.page_size + 1, *cache.data.shape[1:])
    case["cache"] = PagedCache.unchecked(pages, cache.format, None)
    case["slot_mapping"] = case["slot_mapping"].int().view(torch.uint32)
    with pytest.raises(ValueError, match=f"{op}: slot_mapping must be int64 for"):
        getattr(sparsemla, op)(**case)


@pytest.mark.parametrize(
    ("topk", "error", "message"),
    [
        (2.0, TypeError, "select_topk: topk must be an integer, got float"),
        (0, ValueError, "select_topk: topk must be at least 1, got 0"),
        (2**31, ValueError, "select_topk: topk must be below 2147483648, got 2147483648"),
    ],
)
def test_ops_and_plans_have_the_same_integer_errors(topk, error, message):
    with pytest.raises(error, match=message):
        sparsemla.select_topk(torch.zeros(1, 4), topk=topk)
    page_table = torch.zeros(1, 1, dtype=torch.int32)
    plan = sparsemla.plan_batch([1], [1], page_table, page_size=8, workspace_rows=None)
    with pytest.raises(error, match=message.replace("select_topk", "clamp_topk")):
        plan.clamp_topk(topk)

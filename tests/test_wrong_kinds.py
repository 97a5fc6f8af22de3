"""Every public callable refuses wrong kinds by a TypeError or ValueError that names the argument.

Arguments come from the signatures, so that new callables and arguments are tried automatically.
"""

import inspect
import math

import pytest
import torch

import processes
import sparsemla
from sparsemla import (
    BF16_576,
    FP8_DS_MLA,
    ContextShard,
    DecodeRunner,
    HeadWeight,
    HostCache,
    HostContext,
    HotRows,
    MLALayer,
    PagedCache,
    Pooling,
    RowTable,
    Serving,
    WindowState,
    Yarn,
    plan_batch,
)
from sparsemla.compat import deep_gemm, flash_mla
from sparsemla_lab.testing.cases import Draw, mla_layer
from test_errors import CALLS

E4M3 = torch.float8_e4m3fn


def paged_cache():
    return PagedCache.allocate(FP8_DS_MLA, 4, 8)


def layered_cache():
    return PagedCache.allocate(BF16_576, 2, 8, num_layers=3)


def host_arguments():
    return {
        "format": FP8_DS_MLA,
        "num_pages": 2,
        "page_size": 8,
        "num_layers": 2,
        "device": "cpu",
    }


def hot_sizes():
    return {"seats": 2, "rows_per_seat": 8, "topk": 4, "query_len": 1, "leaders": (0, 1)}


def hot_rows():
    return HotRows(HostCache.allocate(**host_arguments()), **hot_sizes())


def plan_of_host(query_len):
    table = torch.zeros(1, 1, dtype=torch.int32)
    return plan_batch([query_len], [4], table, page_size=8, workspace_rows=8)


def host_context():
    return HostContext(HostCache.allocate(**host_arguments()), max_rows=8)


def started():
    context = host_context()
    context.start(plan_of_host(2))
    return context


def fields_of(instance, names):
    return {name: getattr(instance, name) for name in names}


def e4m3_weight():
    return HeadWeight(torch.zeros(2, 32, 64).to(E4M3), torch.ones(2, 1, 2), (32, 32))


def runner():
    def step(plan, x):
        return x * 2

    return DecodeRunner(
        step, {"x": torch.zeros(1, 3)}, batch_sizes=(1, 2), max_pages_per_request=2, page_size=8
    )


def runner_arguments():
    return {
        "step": lambda plan, x: x * 2,
        "inputs": {"x": torch.zeros(1, 3)},
        "batch_sizes": (1, 2),
        "max_pages_per_request": 2,
        "page_size": 8,
        "query_len": 1,
    }


def plan_arguments():
    return {
        "query_lens": [1, 10],
        "seq_lens": [9, 10],
        "page_table": torch.arange(4, dtype=torch.int32).view(2, 2),
        "page_size": 16,
        "workspace_rows": 30,
        "decode_threshold": 1,
        "require_uniform": True,
        "num_padded_tokens": None,
        "shard": ContextShard(1, 2),
        "buffers": None,
    }


def quantised_kv_b_proj():
    return {
        "weight": torch.zeros(2 * 64, 64).to(E4M3),
        "weight_scale_inv": torch.ones(4, 2),
        "num_heads": 2,
        "qk_nope_head_dim": 32,
        "v_head_dim": 32,
        "block": 32,
    }


def flash_decode_arguments():
    return {
        "q": torch.zeros(2, 1, 4, 576).bfloat16(),
        "k_cache": torch.zeros(4, 8, 1, 576).bfloat16(),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "cache_seqlens": torch.ones(2, dtype=torch.int32),
        "head_dim_v": 512,
        "tile_scheduler_metadata": None,
    }


def flash_sparse_arguments():
    return {
        "q": torch.zeros(3, 4, 576).bfloat16(),
        "kv": torch.zeros(9, 1, 576).bfloat16(),
        "indices": torch.zeros(3, 1, 5, dtype=torch.int32),
        "sm_scale": 0.1,
    }


def mqa_arguments():
    return {
        "q": torch.zeros(3, 4, 128).to(E4M3),
        "kv": (torch.zeros(9, 128).to(E4M3), torch.ones(9)),
        "weights": torch.ones(3, 4),
        "cu_seq_len_k_start": torch.zeros(3, dtype=torch.int32),
        "cu_seq_len_k_end": torch.ones(3, dtype=torch.int32),
    }


def paged_mqa_arguments():
    return {
        "q": torch.zeros(2, 1, 4, 128).to(E4M3),
        "kv_cache": torch.zeros(4, 64, 1, 132, dtype=torch.uint8),
        "weights": torch.ones(2, 4),
        "context_lens": torch.ones(2, dtype=torch.int32),
        "block_table": torch.zeros(2, 2, dtype=torch.int32),
        "schedule_meta": torch.zeros(2, 2, dtype=torch.int32),
        "max_context_len": 128,
    }


def exchange_sizes():
    return {"max_tokens": 3, "max_candidates": 4, "group": one_rank(), "device": "cpu"}


def one_rank():
    (group,) = processes.on_threads(1, lambda rank, group: group)
    return group


LENGTHS = {"query_lens": [3, 4], "seq_lens": [9, 9]}
VALID = {
    **{f"sparsemla.{op}": make for op, make in CALLS.items()},
    "sparsemla.PagedCache": lambda: fields_of(paged_cache(), ("data", "format", "scales")),
    "sparsemla.PagedCache.allocate": lambda: {
        "format": FP8_DS_MLA,
        "num_pages": 2,
        "page_size": 8,
        "num_layers": None,
        "device": None,
    },
    "sparsemla.PagedCache.from_rows": lambda: {
        "rows": torch.zeros(5, 576).bfloat16(),
        "value_dim": 512,
    },
    "sparsemla.PagedCache.layer": lambda: {"self": layered_cache(), "layer_idx": 1},
    "sparsemla.PagedCache.gather": lambda: {"self": paged_cache(), "slots": torch.arange(3)},
    "sparsemla.PagedCache.read": lambda: {"self": paged_cache(), "slots": torch.arange(3)},
    "sparsemla.PagedCache.write": lambda: {
        "self": paged_cache(),
        "slots": torch.arange(3),
        "rows": torch.zeros(3, 576),
        "scale_mode": "pow2",
    },
    "sparsemla.HostCache": host_arguments,
    "sparsemla.HostCache.allocate": lambda: host_arguments() | {"group": None},
    "sparsemla.HostCache.layer": lambda: {
        "self": HostCache.allocate(**host_arguments()),
        "layer_idx": 1,
    },
    "sparsemla.HotRows": lambda: (
        {"host": HostCache.allocate(**host_arguments()), "shard": None, "stream": None}
        | hot_sizes()
    ),
    "sparsemla.HotRows.size": lambda: {"format": FP8_DS_MLA, "num_layers": 2} | hot_sizes(),
    "sparsemla.HotRows.attach": lambda: {
        "self": HotRows(None, format=FP8_DS_MLA, num_layers=2, device="cpu", **hot_sizes()),
        "host": HostCache.allocate(**host_arguments()),
    },
    "sparsemla.HotRows.resolve": lambda: {
        "self": hot_rows(),
        "layer_idx": 0,
        "topk_indices": torch.zeros(1, 4, dtype=torch.int32),
        "plan": plan_of_host(1),
        "seats": torch.zeros(1, dtype=torch.int32),
        "validate": False,
    },
    "sparsemla.HotRows.layer": lambda: {"self": hot_rows(), "layer_idx": 0},
    "sparsemla.HotRows.forget": lambda: {"self": hot_rows(), "seats": [0]},
    "sparsemla.HotRows.truncate": lambda: {"self": hot_rows(), "seats": [0], "lengths": [3]},
    "sparsemla.HostContext": lambda: {
        "host": HostCache.allocate(**host_arguments()),
        "max_rows": 8,
        "ahead": 1,
        "shard": None,
        "stream": None,
    },
    "sparsemla.HostContext.start": lambda: {
        "self": host_context(),
        "plan": plan_of_host(2),
        "layer_idx": 0,
    },
    "sparsemla.HostContext.size": lambda: {"format": FP8_DS_MLA, "max_rows": 8, "ahead": 1},
    "sparsemla.HostContext.continues": lambda: {
        "self": host_context(),
        "plan": plan_of_host(2),
        "layer_idx": 0,
    },
    "sparsemla.HostContext.selects": lambda: {
        "self": host_context(),
        "plan": plan_of_host(2),
        "topk": 4,
    },
    "sparsemla.HostContext.selected": lambda: {
        "self": host_context(),
        "layer_idx": 0,
        "topk_indices": torch.zeros(2, 4, dtype=torch.int32),
        "plan": plan_of_host(2),
    },
    "sparsemla.HostContext.rows": lambda: {"self": started(), "layer_idx": 0, "chunk": 0},
    "sparsemla.exchange_topk": lambda: {
        "values": torch.zeros(3, 4),
        "positions": torch.arange(12).view(3, 4),
        "topk": 2,
        "shard": None,
        "group": one_rank(),
        "workspace": None,
        "out": torch.empty(3, 2, dtype=torch.int32),
    },
    "sparsemla.exchange_rows": lambda: {
        "scores": torch.zeros(3, 4),
        "rows": torch.arange(4).int().expand(3, 4),
        "topk": 2,
        "shard": sparsemla.ContextShard(0, 1),
        "workspace": sparsemla.ExchangeWorkspace(**exchange_sizes()),
        "page_table": torch.zeros(3, 2, dtype=torch.int32),
        "request_ids": torch.arange(3),
        "page_size": 2,
        "selected": torch.empty(3, 2, dtype=torch.int32),
        "out": torch.empty(3, 1, 2, dtype=torch.int32),
        "counts": torch.empty(3, 1, dtype=torch.int32),
    },
    "sparsemla.ExchangeWorkspace": lambda: exchange_sizes() | {"transport": "collective"},
    "sparsemla.exchange_states": lambda: {
        "outs": torch.zeros(2, 3, 4, 8).bfloat16(),
        "lses": torch.zeros(2, 3, 4),
        "group": one_rank(),
        "scatter": "tokens",
        "attn_sink": torch.zeros(4),
        "out": torch.empty(3, 4, 8).bfloat16(),
        "lse": torch.empty(3, 4),
    },
    "sparsemla.slots_of": lambda: {
        "page_table": torch.zeros(2, 2, dtype=torch.int32),
        "request_ids": torch.zeros(3, dtype=torch.long),
        "positions": torch.arange(3),
        "page_size": 4,
    },
    "sparsemla.explain": lambda: {"op": dict, "gpu": "sm_90"},
    "sparsemla.bf16_format": lambda: {"head_dim": 64, "value_dim": 32},
    "sparsemla.e4m3_format": lambda: {"head_dim": 64, "value_dim": 32, "scale_block": 32},
    "sparsemla.get_format": lambda: {"name": "bf16_64v64"},
    "sparsemla.cos_sin_table": lambda: {
        "frequencies": torch.ones(4),
        "max_positions": 5,
        "factor": 1.0,
    },
    "sparsemla.rope_frequencies": lambda: {"dim": 64, "theta": 1e4, "yarn": Yarn(40, 4096)},
    "sparsemla.Yarn": lambda: {
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1,
        "mscale_all_dim": 1,
    },
    "sparsemla.yarn_mscale": lambda: {"factor": 40.0, "mscale": 1.0},
    "sparsemla.mla_softmax_scale": lambda: {"qk_head_dim": 192, "yarn": Yarn(40, 4096)},
    "sparsemla.from_freqs_cis": lambda: {"freqs_cis": torch.ones(5, 8)},
    "sparsemla.HeadWeight": lambda: fields_of(e4m3_weight(), ("data", "scale", "scale_block")),
    "sparsemla.MLALayer": lambda: fields_of(
        mla_layer(Draw(0), with_sink=True), MLALayer.__dataclass_fields__
    ),
    "sparsemla.absorb_kv_b_proj": quantised_kv_b_proj,
    "sparsemla.group_o_a_proj": lambda: {
        "weight": torch.zeros(64, 64).to(E4M3),
        "weight_scale_inv": torch.ones(2, 2),
        "num_groups": 2,
        "block": 32,
    },
    "sparsemla.dequantize_blocks": lambda: {
        "weight": torch.zeros(64, 64).to(E4M3),
        "scale": torch.ones(2, 2),
        "block": 32,
    },
    "sparsemla.Pooling": lambda: {"ratio": 4, "overlap": True},
    "sparsemla.ContextShard": lambda: {
        "rank": 1,
        "num_ranks": 4,
        "interleave": 64,
        "parts": 8,
    },
    "sparsemla.ContextShard.lengths": lambda: {
        "self": ContextShard(1, 2),
        "seq_lens": torch.tensor([0, 5]),
    },
    "sparsemla.ContextShard.longest": lambda: {"self": ContextShard(1, 2), "seq_len": 5},
    "sparsemla.ContextShard.longest_context": lambda: {"self": ContextShard(1, 2), "num_rows": 5},
    "sparsemla.ContextShard.positions": lambda: {
        "self": ContextShard(1, 2),
        "rows": torch.tensor([0, 5, -1]),
    },
    **{
        f"sparsemla.ContextShard.{method}": lambda: {
            "self": ContextShard(1, 2),
            "positions": torch.tensor([0, 5, -1]),
        }
        for method in ("owner", "part", "to_local")
    },
    "sparsemla.RowTable": lambda: {
        name: torch.zeros(2, 8, dtype=torch.int32) for name in ("keys", "rows", "order")
    },
    "sparsemla.RowTable.allocate": lambda: {"seats": 2, "rows_per_seat": 8, "device": None},
    "sparsemla.WindowState": lambda: {"rows": torch.zeros(1, 8, 2, 64)},
    "sparsemla.WindowState.allocate": lambda: {
        "pooling": Pooling(4),
        "head_dim": 64,
        "num_rings": 2,
        "max_drafts": 1,
        "device": None,
    },
    "sparsemla.WindowState.copy": lambda: {
        "self": WindowState(torch.zeros(3, 8, 2, 64)),
        "sources": torch.tensor([0, 1]),
        "targets": torch.tensor([1, 2]),
    },
    "sparsemla.Serving": lambda: (
        fields_of(Serving(FP8_DS_MLA), Serving.__dataclass_fields__)
        | {"table_width": 2560, "num_pages": 9, "page_stride": 64 * 656, "index_page_stride": 8448}
        | {"shard": ContextShard(1, 2)}
    ),
    "sparsemla.plan_batch": plan_arguments,
    "sparsemla.plan_on_device": lambda: {
        "query_lens": torch.tensor([1, 10]),
        "seq_lens": torch.tensor([9, 10]),
        "page_table": torch.arange(4, dtype=torch.int32).view(2, 2),
        "page_size": 16,
        "num_tokens": 11,
        "max_query_len": 10,
        "max_seq_len": 10,
        "num_decodes": 1,
        "decode_query_len": 1,
        "shard": ContextShard(1, 2),
        "validate": False,
        "buffers": None,
    },
    "sparsemla.projection_weight": lambda: {
        "project": torch.nn.Linear(4, 6, bias=False),
        "in_features": 4,
        "dtype": torch.float32,
        "device": "cpu",
    },
    "sparsemla.split_decodes_and_prefills": lambda: {
        "query_lens": [1, 3],
        "decode_threshold": 1,
        "require_uniform": True,
    },
    "sparsemla.split_prefill_chunks": lambda: {"seq_lens": [3, 4], "workspace_rows": 9},
    "sparsemla.PlanBuffers": lambda: {
        "max_requests": 2,
        "max_tokens": 3,
        "max_pages_per_request": 2,
        "device": "cpu",
    },
    "sparsemla.decode_workspace_size": lambda: {
        "batch": 2,
        "query_len": 1,
        "num_heads": 4,
        "num_splits": 2,
        "value_dim": 512,
        "device": "cpu",
    },
    "sparsemla.branch_workspace_size": lambda: {
        "max_tokens": 2,
        "num_heads": 4,
        "num_splits": 2,
        "max_pages_per_request": 1,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "device": "cpu",
    },
    "sparsemla.resolve_workspace_size": lambda: {
        "num_requests": 2,
        "topk": 8,
        "rows_per_seat": 16,
        "max_query_len": 2,
    },
    "sparsemla.group_workspace_size": lambda: {"num_tokens": 2, "weight": e4m3_weight()},
    "sparsemla.merge_workspace_size": lambda: {"num_tokens": 2, "num_heads": 4, "dim": 512},
    "sparsemla.prefill_workspace_rows": lambda: (
        LENGTHS
        | {
            "cache_format": FP8_DS_MLA,
            "num_heads": 4,
            "topk": 9,
            "max_rows": 100,
            "device": "cpu",
        }
    ),
    "sparsemla.DecodeRunner": runner_arguments,
    "sparsemla.DecodeRunner.run": lambda: {
        "self": runner(),
        "seq_lens": [3],
        "page_table": torch.zeros(1, 2, dtype=torch.int32),
        "x": torch.ones(1, 3),
    },
    "flash_mla.flash_mla_with_kvcache": flash_decode_arguments,
    "flash_mla.flash_mla_sparse_fwd": flash_sparse_arguments,
    "flash_mla.flash_mla_sparse_prefill": flash_sparse_arguments,
    "flash_mla.get_mla_metadata": dict,
    "flash_mla.FlashMLASchedMeta": dict,
    "deep_gemm.fp8_mqa_logits": mqa_arguments,
    "deep_gemm.fp8_fp4_mqa_logits": lambda: mqa_arguments() | {"q": (mqa_arguments()["q"], None)},
    "deep_gemm.fp8_paged_mqa_logits": paged_mqa_arguments,
    "deep_gemm.fp8_fp4_paged_mqa_logits": lambda: (
        paged_mqa_arguments() | {"q": (paged_mqa_arguments()["q"], None)}
    ),
    "deep_gemm.get_paged_mqa_logits_metadata": lambda: {
        "context_lens": torch.ones(2, dtype=torch.int32),
        "block_kv": 64,
        "num_sms": 4,
    },
    "deep_gemm.get_num_sms": dict,
}

RECORDS = {
    "CacheFormat",
    "Explanation",
    "HotSelection",
    "HotStats",
    "NumaNodes",
    "Plan",
    "PrefillChunk",
    "RowFields",
    "Resolved",
    "SharedLists",
    "WarmUp",
}
"""Classes that the package constructs and unpacks without checks."""

NEEDS_A_GPU = {"warm_up"}
"""Tried in a test module of its own, as no arguments are right without a GPU."""

WRONG = {
    "None": None,
    "text": "text",
    "list": [[1, 2], [3]],
    "float": 1.5,
    "NaN": math.nan,
    "negative": -1,
    "zero": 0,
    "huge": 2**70,
    "object": object(),
    "dict": {"a": 1},
    "scalar tensor": torch.tensor(1.5),
    "text tensor": torch.zeros(2, 2, dtype=torch.complex64),
    "meta": torch.zeros(1, device="meta"),
    "deep": torch.zeros(1, 1, 1, 1, 1, 1),
}


def callables():
    """Names of all public functions, constructors and methods."""
    for module, names in (
        (sparsemla, sparsemla.__all__),
        (flash_mla, flash_mla.__all__),
        (deep_gemm, deep_gemm.__all__),
    ):
        for name in names:
            if callable(getattr(module, name)) and name not in RECORDS | NEEDS_A_GPU:
                yield f"{module.__name__.split('.')[-1]}.{name}"
    for owner in (
        PagedCache,
        RowTable,
        HostCache,
        HotRows,
        HostContext,
        WindowState,
        ContextShard,
        DecodeRunner,
    ):
        for name, value in vars(owner).items():
            method = value.__func__ if isinstance(value, classmethod) else value
            takes = inspect.isfunction(method) and len(inspect.signature(method).parameters) > 1
            if takes and not name.startswith("_") and name != "unchecked":
                yield f"sparsemla.{owner.__name__}.{name}"


def find(name):
    found = {"sparsemla": sparsemla, "flash_mla": flash_mla, "deep_gemm": deep_gemm}
    first, *rest = name.split(".")
    target = found[first]
    for part in rest:
        target = getattr(target, part)
    return target


def parameters(name):
    """The parameters to try: from the signature, and further arguments of the call."""
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    listed = inspect.signature(find(name)).parameters.items()
    names = {one for one, parameter in listed if parameter.kind not in kinds}
    return sorted((names | set(VALID[name]())) - {"self"}) if name in VALID else []


def call(name, arguments):
    instance = [arguments.pop("self")] if "self" in arguments else []
    return find(name)(*instance, **arguments)


def test_every_public_callable_is_tried():
    assert set(callables()) == set(VALID)


@pytest.mark.parametrize("name", sorted(VALID))
def test_correct_arguments_are_accepted(name):
    call(name, VALID[name]())


@pytest.mark.parametrize(
    ("name", "parameter"), [(n, p) for n in sorted(VALID) for p in parameters(n)]
)
def test_wrong_kinds_are_refused_by_name(name, parameter):
    signature = inspect.signature(find(name)).parameters
    optional = parameter in signature and signature[parameter].default is None
    for kind, value in WRONG.items():
        if value is None and optional:  # legal, but other arguments may depend on it
            continue
        error = error_of(name, VALID[name]() | {parameter: value})
        if error is not None:
            said = f"{kind}: {type(error).__name__}: {error}"
            assert type(error) in (TypeError, ValueError), said
            assert parameter in str(error), said


def error_of(name, arguments):
    try:
        call(name, arguments)
    except Exception as error:
        return error
    return None

"""The table of cases: typical and extreme arguments of each op.

Shapes come from the tests of FlashMLA, DeepGEMM and MAX, and from models. Most inputs are poisoned,
see :mod:`sparsemla_lab.testing.cases`. Two draws of a case have the same shapes but different
values, lengths and pages, so a CUDA graph captured with one draw can be replayed with the other.

Triton compiles a kernel for each combination of format, block of heads and kind of argument. To
limit compilation, the cases of an op vary one of these at a time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from sparsemla import reference
from sparsemla.cache import slots_of
from sparsemla.formats import (
    BF16_512,
    BF16_576,
    FP4_288,
    FP8_528,
    FP8_584,
    FP8_DS_MLA,
    INDEX_FP8,
    INDEX_MXFP4,
    CacheFormat,
    bf16_format,
    e4m3_format,
)
from sparsemla.pooling import Pooling
from sparsemla.shards import ContextShard
from sparsemla_lab.testing import cases
from sparsemla_lab.testing.cases import Arguments, Draw, embed, mla_layer
from sparsemla_lab.testing.compare import (
    BFLOAT16_ULP,
    BRANCH_FP8_OUT,
    EXACT,
    FLOAT32_GRADIENT,
    FLOAT32_INDEX_GRADIENT,
    FLOAT32_ULPS,
    FP4_QUERIES,
    FP8_PROJECTION,
    INDEX_LOSS,
    MERGED_FP8_PROJECTION,
    SPARSE_ATTENTION_SINK_GRADIENT,
    SPARSE_PREFILL_LSE,
    SPARSE_PREFILL_OUT,
    Tolerance,
    projection_tolerances,
)
from sparsemla_lab.testing.shapes import (
    CONVENTIONS,
    DECODE_SIZES,
    DENSE_PREFILL_DIMS,
    EXTRA_STREAMS,
    HEAD_COUNTS,
    INDEX_FORMATS,
    LATENT_FORMATS,
    ODD_FORMATS,
    ODD_INDEX_FORMATS,
    PAGE_SIZES,
    PREFILL_SIZES,
    PROJECTION_SHAPES,
    SCALE_BLOCKS,
)

Build = Callable[[Draw], Arguments]


@dataclass(frozen=True)
class Case:
    """A case of an op.

    Args:
        name: name of the case in reports.
        build: draws the arguments.
        tolerances: one per result; default the op's tolerances.
        quick: include the case in quick runs.
        large: skip the case on a CPU, where it would be too slow or too large.
        alone: check batch invariance, if the op has it.
        replayed: check replay of a CUDA graph.
    """

    name: str
    build: Build
    tolerances: tuple[Tolerance | None, ...] | None = None
    quick: bool = False
    large: bool = False
    alone: bool = False
    replayed: bool = True


@dataclass(frozen=True)
class Shuffled:
    """An option of a case with one value per request, in random order for each draw.

    Args:
        values: the values; with ``names``, tuples with one value per name.
        names: the options to set; default the option that this object is given for.
    """

    values: Sequence[Any]
    names: tuple[str, ...] = ()


def build(make: Callable[..., Arguments], *args: object, **options: object) -> Build:
    """A function that calls ``make`` with these arguments, shuffled anew for each draw."""

    def built(draw: Draw) -> Arguments:
        drawn: dict[str, object] = {}
        for name, value in options.items():
            if not isinstance(value, Shuffled):
                drawn[name] = value
            elif value.names:
                parts = zip(*draw.shuffled(value.values), strict=True)
                drawn |= {part: list(one) for part, one in zip(value.names, parts, strict=True)}
            else:
                drawn[name] = draw.shuffled(value.values)
        return make(draw, *args, **drawn)

    return built


QUICK_FORMATS = (FP8_DS_MLA, FP8_584, INDEX_FP8)
"""Formats in quick runs: the formats of the models."""

EDGES = (1, 3, 4, 5, 8, 9, 127, 128, 129, 130, 256, 257, 258)
"""Lengths around the ends of windows of 4 and of 128 tokens."""

STEPS = ((0, 9), (127, 3), (253, 5), (40, 1), (3, 1))
"""First positions and numbers of tokens of requests, around the same ends."""

QUICK_CONVENTIONS = ("DeepSeek-V3.2", "DeepSeek-V4", "hadamard")


def _latent_writes() -> list[Case]:
    make = cases.fused_rope_rmsnorm_quant_case
    options: dict[str, dict[str, Any]] = {
        "half-split": {"interleaved": False},
        "exact scales": {"scale_mode": "exact"},
        "128 heads, 70 tokens": {"num_tokens": 70, "num_heads": 128, "page_size": 64},
        "one layer of three": {"num_layers": 3},
        "pages of 61": {"page_size": 61},
        "strided": {"strided": True},
        "int32 slots, bfloat16 table": {
            "index_dtype": torch.int32,
            "table_dtype": torch.bfloat16,
        },
        "one token": {"num_tokens": 1},
        "with rows": {"with_rows": True},
        "with rows, half-split": {"with_rows": True, "interleaved": False},
        "no heads": {"num_heads": 0},
    }
    whole: dict[str, dict[str, Any]] = {
        "whole queries": {},
        "whole queries, half-split, strided": {"interleaved": False, "strided": True},
        "whole queries, 128 heads, 70 tokens": {"num_tokens": 70, "num_heads": 128},
    }
    return [
        *(Case(fmt.name, build(make, fmt), quick=fmt in QUICK_FORMATS) for fmt in LATENT_FORMATS),
        *(
            Case(name, build(make, FP8_584, query_norm=True, **some))
            for name, some in whole.items()
        ),
        *(
            Case(f"{fmt.name} with rows", build(make, fmt, with_rows=True))
            for fmt in (BF16_576, FP8_584, e4m3_format())
        ),
        *(Case(name, build(make, FP8_DS_MLA, **some)) for name, some in options.items()),
        Case("float32", build(make, FP8_584, dtype=torch.float32), (FLOAT32_ULPS,)),
    ]


def _index_writes() -> list[Case]:
    make = cases.append_index_keys_case
    options: dict[str, dict[str, Any]] = {
        "70 tokens, pages of 64": {"num_tokens": 70, "page_size": 64},
        "exact scales": {"scale_mode": "exact"},
        "strided": {"strided": True},
        "float32": {"dtype": torch.float32},
        "no rotation": {"rope_dim": 0},
    }
    return [
        *(Case(fmt.name, build(make, fmt)) for fmt in INDEX_FORMATS[1:]),
        *(
            Case(name, build(make, INDEX_FP8, **some), quick=name in QUICK_CONVENTIONS)
            for name, some in CONVENTIONS.items()
        ),
        *(Case(name, build(make, INDEX_FP8, **some)) for name, some in options.items()),
    ]


def _index_steps() -> list[Case]:
    make = cases.fused_indexer_rope_quant_case
    return [
        *(
            Case(name, build(make, INDEX_FP8, **some), quick=name in QUICK_CONVENTIONS)
            for name, some in CONVENTIONS.items()
        ),
        *(Case(fmt.name, build(make, fmt)) for fmt in INDEX_FORMATS[3:]),
        Case("bf16", build(make, bf16_format(128)), (BFLOAT16_ULP, FLOAT32_ULPS)),
        Case("mxfp4", build(make, INDEX_MXFP4), (FP4_QUERIES, FLOAT32_ULPS)),
        Case(
            "mxfp4, DeepSeek-V4, hadamard",
            build(make, INDEX_MXFP4, interleaved=True, rope_first=False, hadamard=True),
            (FP4_QUERIES, FLOAT32_ULPS),
        ),
        Case("64 heads, 70 tokens", build(make, INDEX_FP8, num_tokens=70, num_heads=64)),
        Case("32 heads, one token", build(make, INDEX_FP8, num_tokens=1, num_heads=32)),
        Case("exact scales", build(make, INDEX_FP8, scale_mode="exact")),
    ]


def _index_queries() -> list[Case]:
    make = cases.prepare_index_queries_case
    return [
        *(
            Case(name, build(make, INDEX_FP8, **some), quick=name in QUICK_CONVENTIONS)
            for name, some in CONVENTIONS.items()
        ),
        *(Case(fmt.name, build(make, fmt)) for fmt in INDEX_FORMATS[3:]),
        Case("bf16", build(make, bf16_format(128)), (BFLOAT16_ULP, FLOAT32_ULPS)),
        Case("mxfp4", build(make, INDEX_MXFP4), (FP4_QUERIES, FLOAT32_ULPS)),
        Case(
            "mxfp4, DeepSeek-V4, hadamard",
            build(make, INDEX_MXFP4, interleaved=True, rope_first=False, hadamard=True),
            (FP4_QUERIES, FLOAT32_ULPS),
        ),
        Case("64 heads, 70 tokens", build(make, INDEX_FP8, num_tokens=70, num_heads=64)),
        Case("exact scales", build(make, INDEX_FP8, scale_mode="exact")),
    ]


def _pool_windows() -> list[Case]:
    make = cases.pool_windows_case
    csa, hca = Pooling(4, overlap=True), Pooling(128)
    options: dict[str, dict[str, Any]] = {
        "with rows, strided": {"with_rows": True, "strided": True},
        "no bias, float32": {"bias": False, "dtype": torch.float32},
        "int64, bfloat16 table": {"index_dtype": torch.int64, "table_dtype": torch.bfloat16},
        "half-split": {"interleaved": False},
        "drafts": {"max_drafts": 7, "steps": [(127, 4), (3, 4), (0, 4), (130, 4)]},
        "128 requests, one token": {
            "steps": [(1 + 2 * i, 1) for i in range(128)],
            "page_size": 64,
        },
        "a long step": {"steps": [(0, 290), (9, 291)], "page_size": 64},
        "rows on pages": {"state_page": 4, "steps": [(0, 290), (9, 130), (126, 3), (7, 1)]},
    }
    return [
        *(
            Case(f"{name}, {fmt.name}", build(make, fmt, pooling), quick=fmt is FP8_584)
            for name, pooling in (("ratio 4, overlap", csa), ("ratio 128", hca))
            for fmt in (FP8_584, BF16_512, INDEX_FP8, INDEX_MXFP4)
        ),
        Case("ratio 2", build(make, FP8_584, Pooling(2))),
        Case("ratio 1", build(make, FP8_584, Pooling(1), bias=False)),
        Case("ratio 2, fp4_288", build(make, FP4_288, Pooling(2), bias=False)),
        Case("ratio 3, overlap, 100 dims", build(make, bf16_format(100), Pooling(3, overlap=True))),
        *(
            Case(f"{kind}, {name}", build(make, FP8_584, pooling, **some))
            for kind, pooling in (("ratio 4, overlap", csa), ("ratio 128", hca))
            for name, some in options.items()
        ),
    ]


def _to_slots() -> list[Case]:
    make = cases.to_slots_case
    return [
        *(
            Case(f"pages of {size}", build(make, page_size=size), quick=size == 64)
            for size in PAGE_SIZES
        ),
        Case("with a workspace", build(make, page_size=64, with_workspace=True), quick=True),
        Case("int64", build(make, page_size=64, dtype=torch.int64, with_workspace=True)),
        Case("topk 2048", build(make, page_size=64, num_tokens=62, topk=2048), quick=True),
    ]


def _entry_slots() -> list[Case]:
    make, tokens = cases.entry_slots_case, Shuffled(STEPS)
    return [
        *(
            Case(
                f"ratio {ratio}, pages of {size}",
                build(make, requests=tokens, ratio=ratio, page_size=size),
            )
            for ratio in (1, 3, 128)
            for size in (1, 64)
        ),
        Case("ratio 4", build(make, requests=tokens), quick=True),
        Case("int64", build(make, requests=tokens, dtype=torch.int64)),
        Case("a long step", build(make, requests=Shuffled(((0, 3000), *STEPS))), quick=True),
    ]


def _visible_slots() -> list[Case]:
    make, tokens = cases.visible_slots_case, Shuffled(STEPS)
    options: dict[str, dict[str, Any]] = {
        "128 tokens": {"ratio": 1, "width": 128, "page_size": 64},
        "entries of 128 tokens": {"ratio": 128, "page_size": 2},
        "20 of ratio 4": {},
        "one of ratio 4": {"width": 1},
        "64 of ratio 4": {"width": 64},
        "more columns than a block": {"ratio": 1, "width": 2500, "page_size": 1},
        "int64": {"dtype": torch.int64},
        "a long step": {"ratio": 1, "width": 128, "requests": Shuffled(((0, 3000), *STEPS))},
    }
    return [
        Case(name, build(make, **{"requests": tokens} | some), quick=name.endswith("tokens"))
        for name, some in options.items()
    ]


def _gather() -> list[Case]:
    make = cases.gather_dequant_case
    lens = Shuffled((70, 0, 1, 128))
    return [
        *(
            Case(fmt.name, build(make, fmt, seq_lens=lens), quick=fmt in QUICK_FORMATS)
            for fmt in LATENT_FORMATS
        ),
        *(
            Case(f"pages of {size}", build(make, FP8_DS_MLA, seq_lens=lens, page_size=size))
            for size in (1, 2, 61)
        ),
        Case(
            "pieces",
            build(
                make,
                FP8_DS_MLA,
                page_size=8,
                pieces=Shuffled(((5, 60), (33, 0), (0, 9)), ("seq_lens", "seq_starts")),
            ),
        ),
        Case("one layer of three", build(make, FP8_DS_MLA, seq_lens=lens, num_layers=3)),
        Case("missing pages", build(_gather_of_missing_pages)),
        Case("4096 rows", build(make, FP8_DS_MLA, seq_lens=Shuffled((4096, 0, 999))), large=True),
    ]


def _gather_of_missing_pages(draw: Draw) -> Arguments:
    arguments = cases.gather_dequant_case(draw, FP8_DS_MLA, seq_lens=[10, 9], page_size=4)
    table = cast("Tensor", arguments["page_table"])
    table[0, 1], table[1, 0], table[1, 2] = -1, cases.GARBAGE_PAGE, -(2**31)
    return arguments


def _indexer_scores() -> list[Case]:
    make = cases.indexer_scores_case
    return [
        *(
            Case(
                f"{ranges}, {'fp8' if fp8 else 'bf16'}",
                build(make, num_tokens=65, num_keys=130, ranges=ranges, fp8=fp8),
                quick=fp8,
            )
            for ranges in ("causal", "segments", "ragged")
            for fp8 in (True, False)
        ),
        *(
            Case(f"{heads} heads of {dim}", build(make, num_heads=heads, head_dim=dim))
            for heads, dim in (
                (64, 128),
                (64, 64),
                (32, 32),
                (1, 128),
                (3, 128),
                (128, 96),
                (200, 128),
                (1, 200),
                (128, 256),
            )
        ),
        Case("5 heads of 16, strided", build(_strided_scores, num_heads=5, head_dim=16)),
        *(
            Case(f"{str(dtype)[6:]} weights", build(_scores_with_weights, dtype))
            for dtype in (torch.bfloat16, torch.float16)
        ),
        Case("negative weights, zero keys", build(_scores_of_zero_keys)),
        Case("ranges to both ends of int32", build(_widest_ranges)),
        Case("NaN keys outside of all ranges", build(_scores_beside_nan)),
        Case("5000 tokens", build(make, num_tokens=5000, num_keys=200, ranges="ragged")),
        *(
            Case(
                f"exact{'' if fp8 else ', bf16'}",
                build(make, num_tokens=20, ranges="ragged", exact=True, fp8=fp8),
                (EXACT,),
                quick=fp8,
            )
            for fp8 in (True, False)
        ),
        Case("one token", build(make, num_tokens=1, num_keys=1)),
        Case(
            "2048 tokens, 8192 keys",
            build(make, num_tokens=2048, num_keys=8192, num_heads=64),
            large=True,
        ),
    ]


def _strided_scores(draw: Draw, **options: object) -> Arguments:
    arguments = cases.indexer_scores_case(draw, ranges="ragged", **cast("dict[str, Any]", options))
    names = "index_q", "weights", "index_k"
    return arguments | {name: embed(cast("Tensor", arguments[name])) for name in names}


def _scores_with_weights(draw: Draw, dtype: torch.dtype) -> Arguments:
    arguments = cases.indexer_scores_case(draw)
    return arguments | {"weights": cast("Tensor", arguments["weights"]).to(dtype)}


def _scores_of_zero_keys(draw: Draw) -> Arguments:
    arguments = cases.indexer_scores_case(draw)
    keys = cast("Tensor", arguments["index_k"])
    keys[::2] = torch.zeros_like(keys[::2])
    return arguments | {"weights": -cast("Tensor", arguments["weights"]).abs()}


def _widest_ranges(draw: Draw) -> Arguments:
    arguments = cases.indexer_scores_case(draw, num_tokens=4, num_keys=70, num_heads=4)
    return arguments | {
        "row_starts": draw.tensor([-(2**31), 0, 69, 30]),
        "row_ends": draw.tensor([2**31 - 1, 70, 2**31 - 1, -(2**31)]),
    }


def _scores_beside_nan(draw: Draw) -> Arguments:
    arguments = cases.indexer_scores_case(draw, ranges="ragged")
    keys, scales = (cast("Tensor", arguments[name]) for name in ("index_k", "index_k_scales"))
    first, last = draw.tensor([3]), draw.tensor([50])
    for part in (slice(0, 3), slice(50, None)):
        keys[part] = torch.full_like(keys[part].float(), math.nan).to(keys.dtype)
        scales[part] = math.nan
    starts, ends = (cast("Tensor", arguments[name]) for name in ("row_starts", "row_ends"))
    return arguments | {"row_starts": starts.maximum(first), "row_ends": ends.minimum(last)}


def _indexer_scores_paged() -> list[Case]:
    make = cases.indexer_scores_paged_case
    lens = Shuffled((130, 64, 1, 0))
    return [
        *(
            Case(fmt.name, build(make, seq_lens=lens, format=fmt), quick=fmt in QUICK_FORMATS)
            for fmt in (*INDEX_FORMATS, *ODD_INDEX_FORMATS)
        ),
        *(
            Case(f"pages of {size}", build(make, seq_lens=lens, page_size=size))
            for size in (1, 61, 128, 192)
        ),
        Case("strided, pages of 7", build(_strided_paged_scores)),
        Case("fewer columns than keys", build(_scores_of_few_columns)),
        Case("2 queries", build(make, seq_lens=lens, query_len=2), quick=True),
        Case("5 queries, 64 heads", build(make, seq_lens=lens, query_len=5, num_heads=64)),
        Case("300 requests", build(make, seq_lens=Shuffled(tuple(range(300))))),
        Case("missing pages", build(_scores_of_missing_pages), quick=True),
        Case("negative lengths", build(_scores_of_negative_lengths)),
        Case("columns past the keys", build(_scores_far_past_the_keys)),
        Case("own lengths", build(make, seq_lens=lens, query_len=2, own_lengths=True), quick=True),
        *(
            Case(
                f"{name}, ratio {ratio}",
                build(make, seq_lens=Shuffled(EDGES), query_len=3, own_lengths=own, ratio=ratio),
                quick=ratio == 4,
            )
            for ratio in (4, 128)
            for name, own in (("lengths of requests", False), ("own lengths", True))
        ),
        Case("64 heads, exact", build(make, seq_lens=lens, num_heads=64, exact=True), (EXACT,)),
        Case("3 heads, exact", build(make, seq_lens=lens, num_heads=3, exact=True), (EXACT,)),
        Case(
            "long",
            build(make, seq_lens=Shuffled((8192, 6001, 0, 10000)), num_heads=64, query_len=2),
            large=True,
        ),
    ]


def _strided_paged_scores(draw: Draw) -> Arguments:
    """Queries with the tokens in front of the requests, and bfloat16 weights."""
    arguments = cases.indexer_scores_paged_case(draw, query_len=3, num_heads=6, page_size=7)
    q, weights = (cast("Tensor", arguments[name]) for name in ("index_q", "weights"))
    turned = q.transpose(0, 1).contiguous().transpose(0, 1)
    return arguments | {"index_q": turned, "weights": weights.bfloat16()}


def _scores_of_few_columns(draw: Draw) -> Arguments:
    return cases.indexer_scores_paged_case(draw) | {"max_seq_len": 50}


def _scores_of_missing_pages(draw: Draw) -> Arguments:
    arguments = cases.indexer_scores_paged_case(draw, seq_lens=[300, 200, 5])
    table = cast("Tensor", arguments["page_table"])
    table[0, 1], table[1, 0], table[1, 2] = -1, cases.GARBAGE_PAGE, -(2**31)
    return arguments


def _scores_of_negative_lengths(draw: Draw) -> Arguments:
    arguments = cases.indexer_scores_paged_case(draw, seq_lens=[300, 70, 5], query_len=3)
    cast("Tensor", arguments["seq_lens"])[:2] = draw.tensor([-70, 2])
    return arguments


def _scores_far_past_the_keys(draw: Draw) -> Arguments:
    arguments = cases.indexer_scores_paged_case(draw, query_len=3)
    return arguments | {"max_seq_len": 9001}


def _batches(*batch: tuple[int, int]) -> Shuffled:
    """A batch of (query length, sequence length), shuffled for each draw."""
    return Shuffled(batch, ("query_lens", "seq_lens"))


def _indexer_topk() -> list[Case]:
    make = cases.indexer_topk_case
    mixed = _batches((1, 130), (7, 64), (0, 0), (3, 3))
    return [
        *(
            Case(fmt.name, build(make, batch=mixed, format=fmt), quick=fmt in QUICK_FORMATS)
            for fmt in (*INDEX_FORMATS, *ODD_INDEX_FORMATS)
        ),
        *(
            Case(f"topk {topk}", build(make, batch=mixed, topk=topk), quick=topk == 64)
            for topk in (1, 63, 64, 65, 300)
        ),
        *(Case(f"{heads} heads", build(make, batch=mixed, num_heads=heads)) for heads in (3, 64)),
        *(Case(f"pages of {size}", build(make, batch=mixed, page_size=size)) for size in (1, 61)),
        Case("not causal", build(make, batch=mixed, causal=False), quick=True),
        Case("slots", build(make, batch=mixed, as_slots=True), quick=True),
        Case("slots, one request", build(make, batch=_batches((9, 200)), as_slots=True)),
        Case("a few tokens at a time", build(_best_in_little_memory)),
        *(
            Case(
                f"{limit} bytes{'' if causal else ', not causal'}{', slots' if as_slots else ''}",
                build(_best_of_missing_pages, limit, causal=causal, as_slots=as_slots),
            )
            for limit, causal, as_slots in (
                (1, True, False),
                (1, False, True),
                (3000, True, True),
                (3000, False, False),
            )
        ),
        Case("3000 bytes, ratio 4", build(_best_of_missing_pages, 3000, ratio=4)),
        Case("130 requests", build(_best_of_many_requests)),
        Case("tokens behind the last request", build(_best_of_padding)),
        *(
            Case(f"all scores equal, ratio {ratio}", build(_best_of_equals, ratio=ratio))
            for ratio in (1, 4)
        ),
        Case("NaN keys", build(_best_beside_nan)),
        Case("int64", build(_best_of_int64)),
        Case("more queries than keys", build(make, batch=_batches((5, 2), (3, 0), (1, 9)))),
        Case("one layer of three", build(make, batch=mixed, num_layers=3)),
        *(
            Case(
                f"ratio {ratio}, {name}",
                build(make, batch=batch, ratio=ratio, topk=20, **options),
                quick=ratio == 4,
            )
            for ratio in (4, 128)
            for name, batch, options in (
                ("decodes", _batches(*((1, n) for n in EDGES)), {}),
                ("drafts", _batches(*((5, n + 5) for n in EDGES)), {"as_slots": True}),
                ("a prefill", _batches((300, 1100), (4, 3), (130, 130)), {}),
                ("not causal", _batches((9, 258), (1, 127), (0, 0)), {"causal": False}),
            )
        ),
        Case(
            "decode, topk 2048",
            build(
                make,
                batch=_batches((1, 9000), (1, 2047), (1, 2049), (1, 1)),
                topk=2048,
                num_heads=64,
            ),
            large=True,
        ),
        Case(
            "prefill, topk 2048",
            build(make, batch=_batches((300, 4000), (70, 70)), topk=2048, num_heads=64),
            large=True,
        ),
        Case(
            "prefill, topk 512, ratio 4",
            build(make, batch=_batches((300, 9001), (70, 70)), topk=512, num_heads=64, ratio=4),
            large=True,
        ),
    ]


def _indexer_topk_blocks() -> list[Case]:
    make = cases.indexer_topk_blocks_case
    mixed = _batches((1, 130), (7, 64), (0, 0), (3, 3))
    return [
        *(
            Case(fmt.name, build(make, batch=mixed, format=fmt), quick=fmt in QUICK_FORMATS)
            for fmt in (*INDEX_FORMATS, *ODD_INDEX_FORMATS)
        ),
        *(
            Case(
                f"blocks of {size}, {count} of them",
                build(make, batch=mixed, block_size=size, topk_blocks=count, topk=topk),
                quick=size == 8,
            )
            for size, count, topk in ((1, 9, 16), (8, 1, 64), (7, 4, 3), (100, 2, 16), (1024, 1, 9))
        ),
        *(Case(f"pages of {size}", build(make, batch=mixed, page_size=size)) for size in (1, 61)),
        Case("not causal", build(make, batch=mixed, causal=False), quick=True),
        *(
            Case(
                f"{limit} bytes, ratio {ratio}", build(_blocks_of_missing_pages, limit, ratio=ratio)
            )
            for limit, ratio in ((1, 1), (4000, 1), (4000, 4))
        ),
        Case("tokens behind the last request", build(_blocks_of_padding)),
        Case("NaN keys", build(_blocks_beside_nan)),
        Case("infinite scores", build(_blocks_of_infinities)),
        Case("ratio 2", build(make, batch=_batches(*((5, n + 5) for n in EDGES)), ratio=2)),
        Case(
            "2048 blocks of 8",
            build(
                make,
                batch=_batches((1, 40000), (2, 16385), (1, 16384), (3, 100)),
                topk=512,
                topk_blocks=2048,
                num_heads=32,
            ),
            large=True,
        ),
    ]


def _blocks_of_missing_pages(draw: Draw, limit: int, ratio: int) -> Arguments:
    arguments = _best_of_missing_pages(draw, limit, ratio=ratio)
    del arguments["as_slots"]
    return arguments | {"topk_blocks": 3, "block_size": 4}


def _blocks_of_padding(draw: Draw) -> Arguments:
    arguments = cases.indexer_topk_blocks_case(draw, query_lens=[3, 4], seq_lens=[50, 60])
    return arguments | {"input_row_offsets": draw.tensor([0, 3, 5])}


def _blocks_beside_nan(draw: Draw) -> Arguments:
    """A block whose keys are NaN is chosen last, one with a single NaN by its other keys."""
    arguments = _best_beside_nan(draw)
    del arguments["as_slots"]
    return arguments | {"topk_blocks": 4, "block_size": 4}


def _blocks_of_infinities(draw: Draw) -> Arguments:
    """Scores that overflow do not keep the last block out."""
    arguments = cases.indexer_topk_blocks_case(
        draw, query_lens=[2], seq_lens=[90], format=bf16_format(128), topk_blocks=1
    )
    return arguments | {"weights": torch.full_like(cast("Tensor", arguments["weights"]), 3e38)}


def _indexer_topk_of_blocks() -> list[Case]:
    make = cases.indexer_topk_of_blocks_case
    mixed = _batches((1, 130), (7, 64), (0, 0), (3, 3))
    return [
        *(
            Case(fmt.name, build(make, batch=mixed, format=fmt), quick=fmt in QUICK_FORMATS)
            for fmt in (*INDEX_FORMATS, *ODD_INDEX_FORMATS)
        ),
        *(
            Case(
                f"{count} blocks of {size}, topk {topk}",
                build(make, batch=mixed, block_size=size, num_blocks=count, topk=topk),
                quick=size == 8,
            )
            for size, count, topk in (
                (1, 40, 16),
                (8, 9, 1),
                (8, 3, 64),
                (7, 5, 20),
                (100, 2, 16),
                (1024, 1, 9),
            )
        ),
        *(Case(f"{heads} heads", build(make, batch=mixed, num_heads=heads)) for heads in (3, 64)),
        *(Case(f"pages of {size}", build(make, batch=mixed, page_size=size)) for size in (1, 61)),
        Case("not causal", build(make, batch=mixed, causal=False), quick=True),
        *(
            Case(
                f"{limit} bytes, ratio {ratio}",
                build(_best_of_some_missing_pages, limit, ratio=ratio),
            )
            for limit, ratio in ((1, 1), (1000, 1), (1000, 4))
        ),
        Case("tokens behind the last request", build(_best_of_listed_padding)),
        Case("130 requests", build(_best_of_listed_requests)),
        Case("int64", build(_best_of_listed_int64)),
        Case("one layer of three", build(make, batch=mixed, num_layers=3)),
        Case("ratio 2", build(make, batch=_batches(*((5, n + 5) for n in EDGES)), ratio=2)),
        Case(
            "2048 blocks of 8",
            build(
                make,
                batch=_batches((1, 40000), (2, 16385), (1, 16384), (3, 100)),
                topk=512,
                num_blocks=2048,
                num_heads=32,
            ),
            large=True,
        ),
    ]


def _listed(draw: Draw, arguments: Arguments, size: int, count: int) -> Arguments:
    """A call with the first blocks of each token, every second one."""
    del arguments["as_slots"]
    tokens = len(cast("Tensor", arguments["index_q"]))
    blocks = draw.tensor(range(0, 2 * count, 2)).expand(tokens, count)
    return arguments | {"blocks": blocks, "block_size": size}


def _best_of_some_missing_pages(draw: Draw, limit: int, ratio: int) -> Arguments:
    return _listed(draw, _best_of_missing_pages(draw, limit, ratio=ratio), 4, 6)


def _best_of_listed_padding(draw: Draw) -> Arguments:
    return _listed(draw, _best_of_padding(draw), 8, 4)


def _best_of_listed_requests(draw: Draw) -> Arguments:
    return _listed(draw, _best_of_many_requests(draw), 2, 2)


def _best_of_listed_int64(draw: Draw) -> Arguments:
    arguments = _listed(draw, _best_of_int64(draw), 8, 5)
    return arguments | {"blocks": cast("Tensor", arguments["blocks"]).long()}


def _best_of_missing_pages(draw: Draw, limit: int, **options: object) -> Arguments:
    """A prefill, drafts, an empty request and a decode, in a workspace of any size."""
    arguments = cases.indexer_topk_case(
        draw,
        query_lens=[9, 0, 2, 1],
        seq_lens=[75, 30, 2, 41],
        num_heads=5,
        page_size=7,
        topk=20,
        **cast("dict[str, Any]", options),
    )
    table = cast("Tensor", arguments["page_table"])
    table[0, 1], table[3, 0] = -1, 2**31 - 1
    return arguments | {"max_workspace_bytes": limit}


def _best_of_many_requests(draw: Draw) -> Arguments:
    """More requests than one step of the search for a token's request covers."""
    return cases.indexer_topk_case(
        draw, query_lens=[0] * 129 + [1], seq_lens=[3] * 130, num_heads=2, page_size=2, topk=2
    )


def _best_of_padding(draw: Draw) -> Arguments:
    """A batch padded for a captured graph: offsets end before the tokens do."""
    arguments = cases.indexer_topk_case(draw, query_lens=[3, 4], seq_lens=[50, 60])
    return arguments | {"input_row_offsets": draw.tensor([0, 3, 5])}


def _best_of_equals(draw: Draw, ratio: int) -> Arguments:
    """No product is positive, so every score is 0, which happens in trained models."""
    arguments = cases.indexer_topk_case(
        draw, query_lens=[2, 3], seq_lens=[150, 90], topk=20, ratio=ratio, format=bf16_format(128)
    )
    cast("Any", arguments["cache"]).fields().bf16.abs_()
    return arguments | {"index_q": -cast("Tensor", arguments["index_q"]).abs()}


def _best_beside_nan(draw: Draw) -> Arguments:
    """NaN ranks behind every number: the first keys are chosen last."""
    arguments = cases.indexer_topk_case(
        draw, query_lens=[1], seq_lens=[20], format=bf16_format(128), topk=17
    )
    first = draw.tensor(range(5))
    slots = slots_of(cast("Tensor", arguments["page_table"]), 0 * first, first, 64)
    cast("Any", arguments["cache"]).write(slots, torch.full((5, 128), math.nan, device=draw.device))
    return arguments


def _best_of_int64(draw: Draw) -> Arguments:
    arguments = cases.indexer_topk_case(draw)
    names = "input_row_offsets", "seq_lens", "page_table"
    return arguments | {name: cast("Tensor", arguments[name]).long() for name in names}


def _best_in_little_memory(draw: Draw) -> Arguments:
    """A workspace so small that chunks begin and end inside requests."""
    arguments = cases.indexer_topk_case(draw, query_lens=[1, 50, 0, 20], seq_lens=[90, 300, 0, 20])
    return arguments | {"max_workspace_bytes": 13 * (4 * 448)}


def _select_topk() -> list[Case]:
    make = cases.select_topk_case
    return [
        *(
            Case(
                f"{cols} columns, topk {topk}",
                build(make, num_cols=cols, topk=topk),
                quick=cols == 2500,
            )
            for cols, topk in ((1, 1), (64, 65), (2500, 64), (2500, 2048), (2047, 2048))
        ),
        Case("ragged", build(make, num_rows=40, ragged=True), quick=True),
        Case(
            "ragged, 2050 rows",
            build(make, num_rows=2050, num_cols=20000, topk=2048, ragged=True),
            large=True,
        ),
        Case("adversarial, topk 64", build(_adversarial_rows, 700, 64), quick=True),
        Case("adversarial, topk 2048", build(_adversarial_rows, 5000, 2048)),
        *(
            Case(
                f"adversarial, {rows} rows of {cols}",
                build(_adversarial_rows, cols, 2048, rows),
                large=True,
            )
            # First line: a row takes many programs, a few, one, or part of one. Second line: a row
            # fits the registers of one, two, four and eight programs.
            for rows, cols in (
                *((16, 200000), (25, 200000), (100, 70000), (180, 70000), (180, 30000)),
                *((180, 9000), (60, 20000), (16, 65536), (7, 131072)),
            )
        ),
        Case("no columns", build(make, num_cols=0), quick=True),
        Case("one long row", build(make, num_rows=1, num_cols=131072, topk=2048)),
        Case("a few long rows", build(make, num_rows=9, num_cols=70000, topk=512, ragged=True)),
        Case("long and short rows", build(_long_and_short_rows), quick=True),
        *(
            Case(
                f"{rows} short rows of a wide table, topk {topk}",
                build(_short_rows_of_a_wide_table, rows, topk),
                large=True,
            )
            for rows, topk in ((16, 2048), (16, 512), (100, 2048), (300, 2048), (600, 512))
        ),
        Case("bfloat16", build(make, num_cols=3000, topk=512, dtype=torch.bfloat16)),
        Case("strided", build(make, strided=True)),
        Case("slots", build(make, num_rows=40, ragged=True, page_size=61), quick=True),
        Case("slots, long rows", build(make, num_cols=9000, page_size=64)),
        Case("300000 columns", build(make, num_rows=32, num_cols=300000, topk=3000), large=True),
    ]


def _long_and_short_rows(draw: Draw) -> Arguments:
    """Rows of about k columns among rows that several programs share."""
    arguments = cases.select_topk_case(draw, num_rows=9, num_cols=70000, topk=512, ragged=True)
    sizes = draw.tensor(draw.shuffled((0, 1, 511, 512, 513)))
    starts, ends = (cast("Tensor", arguments[name]) for name in ("row_starts", "row_ends"))
    ends[::2] = (starts[::2] + sizes).clamp_max(70000).to(ends.dtype)
    return arguments


def _short_rows_of_a_wide_table(draw: Draw, num_rows: int, topk: int) -> Arguments:
    """Rows of up to 20000 columns among 131072; the others are NaN."""
    arguments = cases.select_topk_case(
        draw, num_rows=num_rows, num_cols=131072, topk=topk, ragged=True
    )
    scores = cast("Tensor", arguments["scores"])
    edges = (topk, topk + 1, 2048, 4095, 4096, 4097, 8191, 8192, 8193, 16384, 16385)
    ends = draw.integers(0, 20000, num_rows)
    ends[: len(edges)] = draw.tensor(edges)
    starts = torch.zeros_like(ends)
    starts[1::2] = draw.integers(0, 99, len(starts[1::2]))
    columns = torch.arange(131072, device=scores.device)
    inside = (columns >= starts[:, None]) & (columns < (starts + ends)[:, None])
    scores.masked_fill_(~inside, math.nan)
    return arguments | {"row_starts": starts, "row_ends": starts + ends}


def _merge_topk() -> list[Case]:
    make = cases.merge_topk_case
    return [
        *(
            Case(
                f"{parts} parts of {width}, topk {topk}",
                build(make, num_parts=parts, width=width, topk=topk),
                quick=parts == 8,
            )
            for parts, width, topk in ((1, 5, 9), (2, 1, 1), (8, 512, 512), (8, 2048, 2048))
        ),
        Case("more than a program holds", build(make, num_parts=16, width=2048, topk=2048)),
        Case(
            "more than a few programs hold, one row",
            build(make, num_parts=128, num_rows=1, width=2048, topk=4096),
            large=True,
        ),
        Case("lists made twice", build(_candidates_in_clusters), large=True),
        Case("int64 ids", build(make, index_dtype=torch.int64)),
        Case("bfloat16", build(make, dtype=torch.bfloat16)),
    ]


def _adversarial_rows(
    draw: Draw, num_cols: int, topk: int, num_rows: int | None = None
) -> Arguments:
    kinds = list(cases.adversarial_scores(draw, num_cols, topk).values())
    num_rows = num_rows or len(kinds)
    rows = itertools.islice(itertools.cycle(draw.shuffled(kinds)), num_rows)
    return {"scores": torch.stack(list(rows)), "topk": topk}


def _candidates_in_clusters(draw: Draw) -> Arguments:
    """More candidates than one program holds, in clusters of equal values, so samples mislead."""
    parts, rows, width = 8, 200, 4096
    values = draw.normal(parts, rows, width // 16).repeat_interleave(16, dim=2)
    starts = torch.arange(0, parts * width, width, dtype=torch.int32, device=draw.device)
    ids = starts[:, None, None] + torch.arange(width, dtype=torch.int32, device=draw.device)
    return {"values": values, "indices": ids.expand_as(values).contiguous(), "topk": 4096}


def _share_lists() -> list[Case]:
    make = cases.share_lists_case
    options: dict[str, dict[str, Any]] = {
        "4 tokens of a list": {},
        "8 tokens, with lengths": {"list_tokens": 8, "with_lengths": True},
        "one token": {"list_tokens": 1},
        "3 tokens, more entries than a step": {"list_tokens": 3, "topk": 2500, "num_rows": 4000},
        "shuffled": {"kind": "shuffled"},
        "some shuffled, with lengths": {"kind": "mixed", "num_tokens": 33, "with_lengths": True},
        "int64, strided": {"dtype": torch.int64, "strided": True},
        "one entry": {"topk": 1},
    }
    large = {"num_tokens": 1001, "topk": 2048, "num_rows": 4096}
    return [
        *(
            Case(name, build(make, **some), quick="lengths" in name)
            for name, some in options.items()
        ),
        Case("2048 of 4096 rows", build(make, **large), large=True),
    ]


def _own_positions() -> list[Case]:
    make = cases.own_positions_case
    options: dict[str, dict[str, Any]] = {
        "3 ranks": {},
        "one rank": {"shard": ContextShard(0, 1)},
        "8 parts on 2 ranks": {"shard": ContextShard(1, 2, 2, parts=8)},
        "8 parts on one rank": {"shard": ContextShard(0, 1, 64, parts=8), "num_positions": 900},
        "more entries than a step": {"topk": 2500, "num_positions": 4000, "num_tokens": 5},
        "shuffled": {"kind": "shuffled", "shard": ContextShard(3, 4)},
        "int64, strided": {"dtype": torch.int64, "strided": True, "kind": "shuffled"},
        "one entry": {"topk": 1},
    }
    large = {"num_tokens": 1001, "topk": 2048, "num_positions": 1 << 17}
    return [
        *(
            Case(name, build(make, **some), quick="2 ranks" in name)
            for name, some in options.items()
        ),
        Case("4 ranks", build(make, shard=ContextShard(2, 4, 64), **large), large=True),
    ]


def _resolve_rows() -> list[Case]:
    make = cases.resolve_rows_case
    options: dict[str, dict[str, Any]] = {
        "several tokens": {},
        "a token each": {"query_lens": (1, 1, 1, 1, 1)},
        "empty seats": {"held": 0.0},
        "full seats": {"held": 1.0, "contexts": (900, 700, 1000, 5, 800)},
        "no spare rows": {"spare": 0, "contexts": (900, 700, 1000, 5, 800), "held": 1.0},
        "int64, strided": {"dtype": torch.int64, "strided": True},
        "a rank of 3": {"shard": ContextShard(1, 3, 2)},
        "a rank of 2 with 3 of 6 parts": {"shard": ContextShard(1, 2, parts=6)},
        "8 parts on one rank": {"shard": ContextShard(0, 1, 4, parts=8)},
        "one entry": {"topk": 1, "spare": 0},
        "pages of one row": {"page_size": 1},
    }
    large = {"topk": 2048, "contexts": [30000] * 24, "page_size": 64}
    return [
        *(
            Case(name, build(make, **some), quick=name in ("several tokens", "a rank of 3"))
            for name, some in options.items()
        ),
        Case(
            "more than a block",
            build(make, topk=6000, spare=2000, contexts=(7000, 9000), query_lens=(1, 1)),
        ),
        Case("24 requests", build(make, query_lens=[1] * 24, spare=2048, **large), large=True),
        Case(
            "24 requests with drafts",
            build(make, query_lens=[3] * 24, spare=9, **large),
            large=True,
        ),
        Case(
            "24 requests, a rank of 4",
            build(
                make,
                query_lens=[2] * 24,
                spare=9,
                shard=ContextShard(2, 4, 64),
                **(large | {"contexts": [120000] * 24}),
            ),
            large=True,
        ),
    ]


def _fetch_rows() -> list[Case]:
    make = cases.fetch_rows_case
    return [
        *(
            Case(fmt.name, build(make, fmt), quick=fmt in (FP8_DS_MLA, FP8_584))
            for fmt in (*LATENT_FORMATS, *INDEX_FORMATS, bf16_format(65))
        ),
        *(Case(f"pages of {size}", build(make, FP8_DS_MLA, page_size=size)) for size in PAGE_SIZES),
        Case("one of several layers", build(make, FP8_DS_MLA, num_layers=3)),
        Case("int64, strided", build(make, FP8_DS_MLA, dtype=torch.int64, strided=True)),
        Case("300 tokens", build(make, FP8_528, num_tokens=300, topk=3)),
        Case("4096 of 2048 rows", build(make, FP8_DS_MLA, num_tokens=2, topk=2048), large=True),
    ]


def _forget_seats() -> list[Case]:
    make = cases.forget_seats_case
    return [
        Case("50 rows", build(make), quick=True),
        Case("2000 rows, int64", build(make, rows_per_seat=2000, dtype=torch.int64)),
    ]


def _shared_prefill() -> list[Case]:
    """Cases of sparse prefill with lists for several tokens."""
    make = cases.shared_prefill_case
    both = {"with_sink": True, "with_lengths": True}
    options: dict[str, dict[str, Any]] = {
        "4 tokens of 16 heads": {"num_heads": 16, **both},
        "8 tokens of 8 heads, shuffled": {"list_tokens": 8, "kind": "shuffled", "topk": 33, **both},
        "3 tokens of 40 heads": {"list_tokens": 3, "num_heads": 40, "topk": 65, **both},
        "one token of 3 heads": {"list_tokens": 1, "num_heads": 3, **both},
        "8 tokens of one head": {"list_tokens": 8, "num_heads": 1},
        "no valid entry": {"share": 0.0, **both},
        "one entry": {"topk": 1},
        "int64": {"index_dtype": torch.int64},
        "strided": {"strided": True, "num_heads": 16, **both},
        "4 tokens attend to all": {"kind": "whole", "num_heads": 16, **both},
        "9 tokens attend to all": {"kind": "whole", "list_tokens": 9, **both},
    }
    large = {"num_tokens": 62, "num_heads": 16, "topk": 2048, "num_rows": 4000}
    return [
        *(
            Case(
                f"shared lists, {name}",
                build(make, **some),
                quick=name.startswith(("4 tokens", "8 tokens of 8")),
            )
            for name, some in options.items()
        ),
        Case("shared lists, 512 dims", build(make, head_dim=512, **both)),
        Case("shared lists, float32", build(make, dtype=torch.float32, **both)),
        Case(
            "shared lists, RoPE dims in another tensor",
            build(_split_queries, make, num_heads=16, **both),
        ),
        Case("shared lists, 2048 of 4000 rows", build(make, **large), large=True),
    ]


def _fp8_mma(make: Callable[..., Arguments]) -> list[Case]:
    """Cases that permit FP8 MMAs; on Hopper, most get them."""
    both = {"with_sink": True, "with_lengths": True}
    options: dict[str, dict[str, Any]] = {
        "64 heads": {"num_heads": 64, **both},
        "96 heads": {"num_heads": 96, "num_rows": 300, "topk": 200, **both},
        "128 heads": {"num_heads": 128, "num_rows": 500, "topk": 300, **both},
        "40 heads": {"num_heads": 40, "topk": 70},
        "one key": {"num_heads": 64, "topk": 1},
        "one row": {"num_heads": 64, "num_rows": 1, "topk": 65},
        "no valid index": {"num_heads": 64, "share": 0.0, **both},
        "few valid indices": {"num_heads": 64, "share": 0.1, "topk": 640, **both},
        "strided": {"num_heads": 64, "strided": True, **both},
        "32 heads": {"num_heads": 32, **both},
        "512 dims": {"num_heads": 64, "head_dim": 512, **both},
        "float16": {"num_heads": 64, "dtype": torch.float16, **both},
    }
    return [
        *(
            Case(
                f"FP8 MMA, {name}",
                build(_permitting, make, **some),
                quick=name in ("64 heads", "few valid indices"),
            )
            for name, some in options.items()
        ),
        Case(
            "FP8 MMA, RoPE dims in another tensor",
            build(_permitting, make, split=True, num_heads=64, **both),
        ),
        Case(
            "FP8 MMA, rows of many sizes",
            build(_permitting, make, sizes=True, num_heads=64, num_rows=600, topk=400, **both),
        ),
        Case(
            "FP8 MMA, rows that grow along a list",
            build(_growing_rows, make, num_heads=64, num_rows=600, topk=400, with_sink=True),
            quick=True,
        ),
        Case(
            "FP8 MMA, large logits",
            build(_permitting, make, softmax_scale=16.0, num_heads=64, topk=400, **both),
        ),
        Case(
            "FP8 MMA, cache",
            build(_permitting, _prefill_from_cache, format=BF16_576, num_heads=64),
        ),
        Case(
            "FP8 MMA, more tiles than run at once",
            build(_permitting, make, num_tokens=300, num_heads=64, num_rows=700, topk=640, **both),
            large=True,
        ),
        Case(
            "FP8 MMA, DeepSeek-V3.2",
            build(
                _permitting, make, num_tokens=70, num_heads=128, num_rows=8192, topk=2048, **both
            ),
            large=True,
        ),
    ]


def _permitting(
    draw: Draw,
    make: Callable[..., Arguments],
    split: bool = False,
    sizes: bool = False,
    softmax_scale: float | None = None,
    **options: object,
) -> Arguments:
    """A prefill that permits FP8 MMAs; with ``sizes``, rows differ by powers of two."""
    arguments = make(draw, **options) | {"allow_fp8_mma": True}
    if softmax_scale is not None:
        arguments["softmax_scale"] = softmax_scale
    if sizes:
        rows = cast("Tensor", arguments["kv"])
        arguments["kv"] = rows * draw.integers(-9, 3, len(rows))[:, None].exp2().bfloat16()
    return cases.split_queries(arguments) if split else arguments


def _growing_rows(draw: Draw, make: Callable[..., Arguments], **options: object) -> Arguments:
    """Later entries of a list name larger rows, so that the largest logit and scale rise."""
    arguments = _permitting(draw, make, **cast("dict[str, Any]", options))
    rows = cast("Tensor", arguments["kv"])
    powers = torch.arange(len(rows), device=rows.device) * 16 // len(rows) - 10
    arguments["kv"] = rows * powers[:, None].exp2().bfloat16()
    return arguments | {"topk_indices": cast("Tensor", arguments["topk_indices"]).sort(1).values}


def _sparse_prefill() -> list[Case]:
    make = cases.sparse_prefill_case
    both = {"with_sink": True, "with_lengths": True}
    return [
        *_fp8_mma(make),
        *(
            Case(
                f"{dim} dims, {heads} heads",
                build(make, head_dim=dim, num_heads=heads, **both),
                quick=dim == 576 and heads in (3, 128),
            )
            for dim in (512, 576)
            for heads in HEAD_COUNTS
        ),
        *(
            Case(
                f"{rows} rows, topk {topk}",
                build(make, num_tokens=62, num_heads=64, num_rows=rows, topk=topk, **both),
                large=True,
            )
            for rows, topk in PREFILL_SIZES
        ),
        *(
            Case(f"topk {topk}", build(make, num_rows=200, topk=topk, **both))
            for topk in (1, 63, 65)
        ),
        Case("tiny cache, topk 2048", build(make, num_rows=32, topk=2048, **both)),
        Case(
            "more tiles than run at once",
            build(make, num_tokens=300, num_heads=64, num_rows=700, topk=640, **both),
            large=True,
        ),
        Case("tiny cache, topk 8192", build(make, num_rows=64, topk=8192, **both), large=True),
        Case("topk 2049", build(make, num_rows=3000, topk=2049, num_tokens=9, **both), large=True),
        Case("plain", build(make), quick=True),
        Case("sink", build(make, with_sink=True)),
        Case("few valid indices", build(make, num_heads=16, share=0.1, **both)),
        Case("no valid index", build(make, share=0.0, **both), quick=True),
        Case("no valid index among 4096", build(make, topk=4096, share=0.0, **both)),
        Case("strided", build(make, strided=True, **both)),
        *(
            Case(
                f"heads {8 + dim} apart, {heads}",
                build(_apart, make, head_dim=dim, num_heads=heads),
            )
            for dim, heads in ((576, 64), (576, 16), (512, 63))
        ),
        *(
            Case(
                f"RoPE dims of {heads} heads in another tensor",
                build(_split_queries, make, num_heads=heads, **both),
                quick=heads == 64,
            )
            for heads in (16, 64)
        ),
        Case("float16", build(make, dtype=torch.float16, **both)),
        Case("float32", build(make, dtype=torch.float32, **both)),
        Case("128 dims", build(make, head_dim=128, **both)),
        Case("int64", build(_wide_rows)),
        *(Case(f"logits of {size:g}", build(_scaled_logits, size)) for size in (1e-3, 30.0, 1e4)),
        *(
            Case(f"{str(dtype)[6:]} results", build(_with_out_dtype, dtype, **both))
            for dtype in (torch.float16, torch.float32)
        ),
        *(
            Case(
                f"{str(dtype)[6:]} results of float32 queries",
                build(_with_out_dtype, dtype, dtype=torch.float32, **both),
            )
            for dtype in (torch.float16, torch.bfloat16)
        ),
        Case("duplicates", build(_duplicates)),
        *(
            Case(f"cache of {fmt.name}", build(_prefill_from_cache, fmt), quick=fmt == FP8_DS_MLA)
            for fmt in (*LATENT_FORMATS[1:], *ODD_FORMATS, bf16_format(100, 60))
        ),
        *(
            Case(
                f"extra stream {name}",
                build(
                    cases.paged_prefill_case,
                    format=FP8_584,
                    batch=9,
                    page_size=256,
                    extra=extra,
                    with_extra_lengths=True,
                    **both,
                ),
                quick=name == "of pages of 2",
            )
            for name, extra in EXTRA_STREAMS.items()
        ),
        *(
            Case(
                f"extra stream, {heads} heads, {fmt.name}",
                build(
                    _uneven_streams,
                    format=fmt,
                    batch=150,  # more tiles than run at once
                    num_heads=heads,
                    seq_len=20,
                    topk=129,
                    extra=(fmt, 15, 200, 64),
                    **both,
                ),
                quick=heads in (16, 64),
                large=True,
            )
            for fmt in (FP8_584, BF16_512)
            for heads in (16, 32, 64, 128)
        ),
        *(
            Case(
                f"{topk} entries, {extra_topk} of the extra stream, {heads} heads",
                build(_extra_rows, topk=topk, extra_topk=extra_topk, num_heads=heads),
            )
            for topk, extra_topk, heads in ((0, 5, 3), (64, 0, 16), (1, 63, 3), (65, 129, 16))
        ),
        *(
            Case(f"no valid index of the {empty}", build(_empty_prefill_streams, empty))
            for empty in ("first stream", "second stream", "streams")
        ),
        Case("extra stream without lengths", build(_extra_without_lengths)),
        Case("lengths beyond the selection", build(_long_prefill_lengths)),
        Case("extra stream, rows", build(_extra_rows, num_heads=64)),
        *(
            Case(
                f"extra stream, {heads} heads, {str(dtype)[6:]}",
                build(
                    cases.paged_prefill_case,
                    format=BF16_512,
                    num_heads=heads,
                    extra=(FP8_584, 300, 64, 7),
                    dtype=dtype,
                    **both,
                ),
            )
            for heads, dtype in ((4, torch.float32), (64, torch.bfloat16))
        ),
        *_exact_scales(_prefill_from_cache, batch=9, topk=200, with_lengths=True),
        Case("exact scales, one key", build(_one_key, _prefill_from_cache)),
        Case("70000 tokens", build(_many_tokens), large=True),
        *_shared_prefill(),
    ]


def _sparse_attention(make: Callable[..., Arguments], float32: tuple[Tolerance, ...]) -> list[Case]:
    """Cases of differentiable attention or its gradient, with the tolerances for float32."""
    both = {"with_sink": True, "with_lengths": True}
    return [
        *(
            Case(
                f"{dim} dims, {heads} heads",
                build(make, head_dim=dim, num_heads=heads, **both),
                quick=heads in (3, 128),
            )
            for dim, heads in ((576, 1), (576, 3), (576, 17), (576, 96), (512, 128), (100, 8))
        ),
        *(
            Case(
                f"{str(dtype)[6:]}, {dim} dims",
                build(make, dtype=dtype, head_dim=dim, **both),
                float32 if dtype == torch.float32 else None,
            )
            for dtype in (torch.float16, torch.float32)
            for dim in (576, 100)
        ),
        Case("plain", build(make), quick=True),
        Case("topk 65", build(make, topk=65, **both)),
        Case("tiny rows, topk 2048", build(make, num_rows=32, topk=2048, **both)),
        Case("no valid index", build(make, share=0.0, **both)),
        Case("strided", build(make, strided=True, **both)),
        *(
            Case(
                f"lists of {size} tokens, {heads} heads",
                build(make, list_tokens=size, num_tokens=2 * size + 1, num_heads=heads, **options),
                float32 if "dtype" in options else None,
                quick=size == 4,
            )
            for size, heads, options in (
                (4, 16, {"with_sink": True, "topk": 65, "share": 0.9}),
                (4, 32, {"with_lengths": True, "kind": "shuffled", "topk": 33}),
                (2, 64, {"with_sink": True, "strided": True}),
                (3, 5, {"kind": "whole", "num_rows": 40}),
                (8, 1, {"dtype": torch.float32}),
                (8, 17, both),  # too many heads for Hopper's gradients
            )
        ),
        Case(
            "62 tokens, topk 2048",
            build(make, num_tokens=62, num_heads=64, num_rows=4000, topk=2048, **both),
            large=True,
        ),
    ]


def _sparse_attention_backward() -> list[Case]:
    make = cases.sparse_attention_backward_case
    float32 = FLOAT32_GRADIENT, FLOAT32_GRADIENT, SPARSE_ATTENTION_SINK_GRADIENT
    return [
        *_sparse_attention(make, float32),
        *_short_gradients(float32),
        Case("gradient of the LSE", build(make, with_dlse=True, with_sink=True), quick=True),
        Case("a little workspace", build(make, num_tokens=50, max_workspace_bytes=1 << 20)),
        Case(
            "lists of 4 tokens, a little workspace",
            build(make, list_tokens=4, num_tokens=50, with_dlse=True, max_workspace_bytes=1 << 20),
        ),
    ]


def _short_gradients(float32: tuple[Tolerance, ...]) -> list[Case]:
    """Few tokens, heads and dims, which an interpreter takes in a second."""
    make = cases.sparse_attention_backward_case
    small = {"num_tokens": 2, "num_heads": 3, "topk": 12, "num_rows": 20, "head_dim": 40}
    few = {"with_sink": True, "with_lengths": True, "share": 0.6}
    options: dict[str, dict[str, Any]] = {
        **{
            f"520 dims, {str(dtype)[6:]}": {
                "head_dim": 520,
                "with_dlse": True,
                "dtype": dtype,
                **few,
            }
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
        },
        "one entry": {"num_tokens": 1, "num_heads": 1, "topk": 1, "num_rows": 1, "with_dlse": True},
        "70 heads": {"num_tokens": 1, "num_heads": 70, "topk": 65, "num_rows": 90},
        "600 dims": {"head_dim": 600},
        "200 dims, strided": {"head_dim": 200, "strided": True, "with_dlse": True, **few},
        "no valid index": {"share": 0.0, "with_sink": True},
        "lists of 2 tokens": {"list_tokens": 2, "num_tokens": 5, "with_dlse": True, **few},
        "lists of 8 tokens": {
            "list_tokens": 8,
            "num_tokens": 17,
            "num_heads": 1,
            "dtype": torch.float32,
        },
        "lists of 3 tokens, strided": {
            "list_tokens": 3,
            "num_tokens": 4,
            "num_heads": 40,
            "topk": 70,
            "strided": True,
        },
        "lists of 4 tokens, whole": {
            "list_tokens": 4,
            "num_tokens": 3,
            "kind": "whole",
            "dtype": torch.float16,
            **few,
        },
        "lists of 4 tokens, shuffled": {
            "list_tokens": 4,
            "num_tokens": 11,
            "kind": "shuffled",
            "with_lengths": True,
            "with_dlse": True,
        },
    }
    return [
        *(
            Case(
                f"short, {name}",
                build(make, **small | some),
                float32 if some.get("dtype") == torch.float32 else None,
            )
            for name, some in options.items()
        ),
        *(
            Case(f"short, in any order{name}", build(_in_any_order, **small | some))
            for name, some in (("", few), (", lists", {"list_tokens": 2, "num_tokens": 5}))
        ),
        *(
            Case(
                f"short, {name}",
                build(_gradients_of_few_rows, column=column, **small | {"num_tokens": 40}),
            )
            for name, column in (
                ("all tokens choose the same rows", False),
                ("one row K times", True),
            )
        ),
        Case("short, peaked softmax", build(_peaked_gradients, **small)),
    ]


def _in_any_order(draw: Draw, **options: object) -> Arguments:
    arguments = cases.sparse_attention_backward_case(draw, **cast("dict[str, Any]", options))
    return arguments | {"deterministic": False}


def _recomputed(arguments: Arguments) -> Arguments:
    """A gradient's arguments with the results of the forward pass of changed arguments."""
    names = "q", "kv", "topk_indices", "softmax_scale", "topk_lengths", "attn_sink"
    forward = cast("dict[str, Any]", {name: arguments[name] for name in names})
    out, lse = reference.sparse_attention(**forward)
    return arguments | {"out": out.to(forward["q"].dtype), "lse": lse}


def _gradients_of_few_rows(draw: Draw, column: bool, **options: object) -> Arguments:
    """All lists are that of the first token, or its first entry K times."""
    arguments = cases.sparse_attention_backward_case(
        draw, share=1.0, **cast("dict[str, Any]", options)
    )
    lists = cast("Tensor", arguments["topk_indices"])
    lists[:] = lists[:1, :1] if column else lists[:1].clone()
    return _recomputed(arguments)


def _peaked_gradients(draw: Draw, **options: object) -> Arguments:
    arguments = cases.sparse_attention_backward_case(
        draw, with_sink=True, **cast("dict[str, Any]", options)
    )
    return _recomputed(arguments | {"softmax_scale": 20.0})


def _apart(draw: Draw, make: Callable[..., Arguments], **options: object) -> Arguments:
    """Queries with a padding of 8 NaNs, 16 bytes, after each head."""
    arguments = make(draw, **options)
    q = cast("Tensor", arguments["q"])
    padded = torch.nn.functional.pad(q, (0, 8), value=math.nan)
    return arguments | {"q": padded[..., : q.shape[-1]]}


def _split_queries(draw: Draw, make: Callable[..., Arguments], **options: object) -> Arguments:
    """RoPE dims of the queries in a separate tensor, as engines compute them."""
    return cases.split_queries(make(draw, **options))


def _duplicates(draw: Draw) -> Arguments:
    arguments = cases.sparse_prefill_case(draw, with_sink=True)
    indices = cast("Tensor", arguments["topk_indices"])
    indices[:, 1::2] = indices[:, :1]
    return arguments


def _exact_scales(make: Callable[..., Arguments], **options: object) -> list[Case]:
    """Caches with ``exact`` scales, for several head counts and scale blocks."""
    named = [(FP8_DS_MLA, heads) for heads in (3, 16, 32, 64, 128)]
    named += [(e4m3_format(scale_block=block), 16) for block in (32, 64, 128, 576)]
    return [
        Case(
            f"exact scales, {heads} heads, {fmt.name}",
            build(make, format=fmt, num_heads=heads, scale_mode="exact", **options),
        )
        for fmt, heads in named
    ]


def _prefill_from_cache(
    draw: Draw, format: CacheFormat, num_heads: int = 8, **options: object
) -> Arguments:
    options |= {"format": format, "num_heads": num_heads, "page_size": 61, "num_layers": 2}
    arguments = cases.paged_prefill_case(draw, **options)
    return arguments | {"attn_sink": cases.sinks(draw, num_heads)}


def _uneven_streams(draw: Draw, **options: object) -> Arguments:
    """Two streams: both with keys, or one of them without, or none; some lengths are negative."""
    arguments = cases.paged_prefill_case(draw, **options)
    indices = cast("Tensor", arguments["topk_indices"])
    extra = cast("Tensor", arguments["extra_topk_indices"])
    indices[::3] = -1
    extra[::4, 70:] = 2**31 - 1
    lengths = draw.integers(-5, extra.shape[1] + 5, len(extra))
    return arguments | {"extra_topk_lengths": lengths}


def _empty_prefill_streams(draw: Draw, empty: str) -> Arguments:
    return cases.as_prefill(_empty_streams(draw, empty))


def _extra_without_lengths(draw: Draw) -> Arguments:
    extra = EXTRA_STREAMS["of pages of 2"]
    return cases.paged_prefill_case(draw, format=FP8_584, extra=extra, with_lengths=True)


def _wide_rows(draw: Draw) -> Arguments:
    """int64 ids and lengths; an id is beyond int32, and its lowest bits name a row."""
    arguments = cases.sparse_prefill_case(draw, with_lengths=True)
    indices = cast("Tensor", arguments["topk_indices"]).long()
    for column, beyond in enumerate((2**32, 2**32 + 1, -(2**32), 2**63 - 1, -(2**63))):
        indices[:, column] = beyond
    lengths = cast("Tensor", arguments["topk_lengths"]).long()
    return arguments | {"topk_indices": indices, "topk_lengths": lengths}


def _scaled_logits(draw: Draw, size: float) -> Arguments:
    return cases.sparse_prefill_case(draw, with_sink=True) | {"softmax_scale": size}


def _extra_rows(draw: Draw, *, num_heads: int, topk: int = 128, extra_topk: int = 65) -> Arguments:
    """Rows of both streams instead of caches."""
    arguments = cases.sparse_prefill_case(
        draw, num_heads=num_heads, topk=topk, head_dim=512, with_sink=True
    )
    more = cases.sparse_prefill_case(
        draw, num_rows=70, topk=extra_topk, head_dim=512, with_lengths=True
    )
    return arguments | {
        "extra_cache": more["kv"],
        "extra_topk_indices": more["topk_indices"],
        "extra_topk_lengths": more["topk_lengths"],
    }


def _many_tokens(draw: Draw) -> Arguments:
    """More rows than the largest second or third grid dimension of a GPU, 65535."""
    return {
        "q": cases.prefill_rows(draw, 70000, 1, 64),
        "kv": cases.prefill_rows(draw, 16, 64),
        "topk_indices": draw.integers(-1, 16, 70000, 2),
        "softmax_scale": 0.5,
    }


def _dense_prefill() -> list[Case]:
    make = cases.dense_prefill_case

    def lens(*batch: tuple[int, int]) -> Shuffled:
        return Shuffled(batch, ("query_lens", "kv_lens"))

    ragged = lens((5, 5), (0, 3), (9, 20))
    return [
        *(
            Case(
                f"{dim} and {value} dims, {heads} heads",
                build(make, batch=ragged, head_dim=dim, value_dim=value, num_heads=heads),
                quick=value == 128,
            )
            for (dim, value), heads in zip(DENSE_PREFILL_DIMS, (16, 3, 1, 8), strict=True)
        ),
        Case("full", build(make, batch=ragged, causal=False), quick=True),
        Case("context", build(make, batch=lens((70, 200), (0, 0), (1, 129)))),
        Case("fewer keys than queries", build(make, batch=lens((6, 2), (3, 0), (2, 2)))),
        Case("no queries", build(make, batch=lens((0, 0)))),
        Case("NaN in later keys", build(make, batch=lens((70, 200), (9, 20)), nan_in="k")),
        Case("rows behind the last request", build(_padded_rows)),
        Case("float16", build(make, batch=ragged, dtype=torch.float16)),
        Case("float32", build(make, batch=ragged, dtype=torch.float32)),
        Case("strided", build(make, batch=ragged, strided=True)),
        Case("long", build(make, batch=lens((900, 4000), (0, 9), (65, 65))), large=True),
    ]


def _padded_rows(draw: Draw) -> Arguments:
    """Padding: rows of queries, and NaN rows of keys and values, belong to no request."""
    arguments = cases.dense_prefill_case(draw, query_lens=[3, 4], kv_lens=[10, 4])
    for name in ("k", "v"):
        cast("Tensor", arguments[name])[12:] = math.nan
    return arguments | {
        "input_row_offsets": draw.tensor([0, 3, 5]),
        "kv_row_offsets": draw.tensor([0, 10, 12]),
    }


def _sparse_decode() -> list[Case]:
    make = _sparse_decode_case
    both = {"with_sink": True, "with_lengths": True}
    return [
        *(
            Case(
                fmt.name,
                build(make, format=fmt, query_len=2, **both),
                quick=fmt in QUICK_FORMATS,
                alone=fmt == FP8_DS_MLA,
            )
            for fmt in (*LATENT_FORMATS, *ODD_FORMATS)
        ),
        *(
            Case(
                f"{heads} heads",
                build(make, format=FP8_DS_MLA, num_heads=heads, **both),
                quick=heads == 128,
            )
            for heads in HEAD_COUNTS
        ),
        *(
            Case(
                f"32 heads, {fmt.name}",
                build(make, format=fmt, num_heads=32, seq_len=300, topk=200, **both),
            )
            for fmt in (FP8_584, e4m3_format(scale_block=64))
        ),
        Case(
            "fp8_528 and fp4_288",
            build(make, format=FP8_528, num_heads=64, extra=(FP4_288, 300, 200, 64), **both),
        ),
        *(
            Case(
                f"{length} keys, topk {topk}, pages of {page}",
                build(make, format=FP8_DS_MLA, seq_len=length, topk=topk, page_size=page, **both),
            )
            for length, topk, page in DECODE_SIZES
        ),
        *(
            Case(
                f"extra stream {name}",
                build(
                    make,
                    format=FP8_584,
                    page_size=256,
                    extra=extra,
                    with_extra_lengths=True,
                    **both,
                ),
                quick=name == "of pages of 2",
                alone=name == "of pages of 2",
            )
            for name, extra in EXTRA_STREAMS.items()
        ),
        *(
            Case(
                f"lengths of each token, {heads} heads, {fmt.name}",
                build(
                    make,
                    format=fmt,
                    batch=5,
                    query_len=3,
                    num_heads=heads,
                    topk=200,
                    seq_len=300,
                    extra=(fmt, 50, 70, 2),
                    with_extra_lengths=True,
                    own_lengths=True,
                    **both,
                ),
                quick=heads == 64,
                large=heads > 16,
                alone=fmt == FP8_584,
            )
            for fmt in (FP8_584, BF16_512)
            for heads in (16, 32, 64, 128)
        ),
        Case("plain", build(make, format=FP8_DS_MLA), alone=True),
        *(
            Case(
                f"{batch} requests, {heads} heads, float32",
                build(
                    make,
                    format=BF16_576,
                    batch=batch,
                    num_heads=heads,
                    topk=200,
                    dtype=torch.float32,
                    **both,
                ),
                quick=heads == 3,
                alone=True,
            )
            for batch, heads in ((13, 1), (12, 3), (7, 8), (5, 33))
        ),
        *(
            Case(
                f"maxima that climb, {heads} heads, {fmt.name}",
                build(
                    _climbing, make, format=fmt, batch=140, num_heads=heads, seq_len=300, topk=300
                ),
                quick=fmt == FP8_DS_MLA and heads == 64,
            )
            for fmt in (FP8_DS_MLA, BF16_576)
            for heads in (64, 16)
        ),
        Case("lengths", build(make, format=FP8_DS_MLA, with_lengths=True)),
        Case("sink", build(make, format=FP8_DS_MLA, with_sink=True)),
        Case("lengths beyond the selection", build(_long_lengths)),
        Case("lengths of requests of one token", build(_lengths_in_a_column)),
        Case("int64", build(_wide_selections, make)),
        Case("duplicates", build(_decode_duplicates)),
        Case("no valid slot", build(make, format=FP8_DS_MLA, share=0.0, **both), quick=True),
        *(
            Case(f"no valid slot of the {empty}", build(_empty_streams, empty))
            for empty in ("first stream", "second stream", "streams")
        ),
        *_decode_in_splits(),
        Case("74 requests", build(make, format=FP8_DS_MLA, batch=74, query_len=3, **both)),
        Case(  # enough tokens for each program to process many tiles of keys
            "140 requests of 64 heads",
            build(make, format=FP8_DS_MLA, batch=140, num_heads=64, seq_len=300, topk=300, **both),
            quick=True,
        ),
        *(
            Case(
                f"one layer of three, {fmt.name}",
                build(make, format=fmt, num_layers=3, **both),
            )
            for fmt in (FP8_DS_MLA, FP8_584)
        ),
        Case("strided", build(make, format=FP8_DS_MLA, query_len=2, strided=True, **both)),
        *(
            Case(
                f"heads {8 + fmt.head_dim} apart, {heads} heads, {fmt.name}",
                build(_apart, make, format=fmt, num_heads=heads, query_len=2, **both),
            )
            for fmt in (BF16_576, FP8_DS_MLA)
            for heads in (16, 64)
        ),
        *(
            Case(
                f"RoPE dims of {heads} heads in another tensor, {fmt.name}",
                build(_split_queries, make, format=fmt, num_heads=heads, query_len=2, **both),
                quick=heads == 64,
            )
            for fmt in (BF16_576, FP8_DS_MLA, e4m3_format())
            for heads in (16, 64)
        ),
        Case("float16", build(make, format=FP8_DS_MLA, dtype=torch.float16, **both)),
        Case("float32, FP4 rows", build(make, format=FP4_288, dtype=torch.float32, **both)),
        Case("scales of any value", build(_odd_scales)),
        *_exact_scales(make, seq_len=300, topk=200, **both),
        Case("exact scales, one key", build(_one_key, make)),
        Case("zero keys", build(_zero_keys)),
        *(
            Case(
                f"a few requests of {heads} heads, {fmt.name}{', extra stream' if extra else ''}",
                build(
                    make,
                    format=fmt,
                    batch=2,
                    num_heads=heads,
                    seq_len=700,
                    topk=600,
                    extra=extra,
                    **both,
                ),
                quick=heads == 128,
                alone=heads == 128,
            )
            for fmt, heads, extra in (
                (FP8_DS_MLA, 128, None),
                (FP8_DS_MLA, 48, None),
                (FP8_584, 64, (FP8_584, 300, 300, 64)),
                (BF16_576, 128, None),
            )
        ),
        Case(
            "tiles of heads",
            build(
                make,
                format=FP8_DS_MLA,
                batch=1,
                num_heads=64,
                seq_len=60,
                topk=40,
                with_sink=True,
            ),
            quick=True,
        ),
        *(
            Case(f"negative lengths, {heads} heads", build(_negative_lengths, heads))
            for heads in (16, 64)
        ),
        *(
            Case(
                f"2 GiB apart, {fmt.name}",
                build(_distant_decode, fmt),
                large=True,
                replayed=False,
            )
            for fmt in (BF16_576, FP8_DS_MLA)
        ),
        Case(
            "DeepSeek-V3.2",
            build(
                make,
                format=FP8_DS_MLA,
                batch=8,
                query_len=2,
                num_heads=128,
                seq_len=8192,
                topk=2048,
                **both,
            ),
            large=True,
            alone=True,
        ),
    ]


def _decode_in_splits() -> list[Case]:
    """Given numbers of splits, several on a CPU, too; some splits have no keys."""
    make = _sparse_decode_case
    both = {"with_sink": True, "with_lengths": True}
    tiles = {"batch": 2, "num_heads": 2, "topk": 200, "seq_len": 300}
    return [
        # 3 tiles of 16 keys a split: a loop that takes two at a time must not see the next split's.
        Case(
            "2 splits of 48 keys, 24 heads",
            build(
                make,
                format=FP8_DS_MLA,
                batch=2,
                num_heads=24,
                topk=96,
                seq_len=300,
                num_splits=2,
            ),
            quick=True,
        ),
        *(
            Case(
                f"3 splits, strided, {fmt.name}",
                build(make, format=fmt, query_len=2, strided=True, num_splits=3, **tiles, **both),
                quick=fmt == FP8_584,
                alone=fmt == FP8_584,
            )
            for fmt in (FP8_DS_MLA, FP8_584, BF16_576)
        ),
        *(
            Case(
                f"5 splits, extra stream of {fmt.name}, "
                f"{'no' if not used else ' and '.join(used)} lengths",
                build(
                    make,
                    format=FP8_584,
                    batch=2,
                    num_heads=2,
                    topk=70,
                    extra=(fmt, 90, 50, 2),
                    with_sink=True,
                    with_lengths="first" in used,
                    with_extra_lengths="second" in used,
                    num_splits=5,
                ),
            )
            for fmt, used in (
                (FP8_584, ()),
                (BF16_512, ("first",)),
                (FP8_584, ("second",)),
                (BF16_512, ("first", "second")),
            )
        ),
        Case(
            "rows of bfloat16, extra stream of FP8, 40 heads",
            build(make, format=BF16_512, num_heads=40, topk=70, extra=(FP8_584, 90, 50, 2), **both),
        ),
        *(
            Case(
                f"2 splits, each token's lengths{', extra stream' if extra else ''}",
                build(
                    make,
                    format=FP8_584,
                    batch=2,
                    query_len=2,
                    num_heads=2,
                    extra=extra,
                    with_extra_lengths=extra is not None,
                    own_lengths=True,
                    num_splits=2,
                    **both,
                ),
            )
            for extra in (None, (FP8_584, 90, 50, 2))
        ),
        Case("2 splits, 40 heads", build(make, format=FP8_DS_MLA, num_heads=40, num_splits=2)),
        Case(
            "2 splits, float32, one layer of three",
            build(
                make,
                format=FP8_DS_MLA,
                num_heads=2,
                dtype=torch.float32,
                num_layers=3,
                num_splits=2,
            ),
        ),
        *(
            Case(f"{splits} splits, requests without valid slots", build(_empty_requests, splits))
            for splits in (1, 4)
        ),
        Case("3 splits, negative lengths", build(_negative_lengths, 2, num_splits=3), quick=True),
        # With Ampere's instructions, bfloat16 rows of one tile of 32 or 64 keys have their kernel.
        *(
            Case(
                f"{splits} splits of {keys} keys, 20 heads",
                build(
                    make,
                    format=BF16_576,
                    batch=2,
                    num_heads=20,
                    topk=splits * keys,
                    num_splits=splits,
                    **both,
                ),
                quick=True,
            )
            for splits, keys in ((4, 30), (2, 64))
        ),
    ]


def _sparse_decode_case(draw: Draw, **options: object) -> Arguments:
    """``sparse_decode_case``; with lengths, one request has length 0."""
    arguments = cases.sparse_decode_case(draw, **cast("dict[str, Any]", options))
    lengths = cast("Tensor | None", arguments["topk_lengths"])
    if lengths is not None:
        lengths[int(draw.integers(0, len(lengths), 1))] = 0
    return arguments


def _climbing(draw: Draw, make: Callable[..., Arguments], **options: object) -> Arguments:
    """Logits so far apart that later tiles raise the running maximum by powers of two."""
    return make(draw, **options) | {"softmax_scale": 16.0}


def _one_key(draw: Draw, make: Callable[..., Arguments]) -> Arguments:
    """Rows with a single key: the LSE is its logit, so errors of the key cannot cancel out."""
    return make(
        draw, format=FP8_DS_MLA, batch=9, num_heads=16, topk=1, share=1.0, scale_mode="exact"
    )


def _odd_scales(draw: Draw) -> Arguments:
    arguments = cases.sparse_decode_case(draw, format=FP8_DS_MLA, with_sink=True)
    scales = cast("Any", arguments["cache"]).fields().scales
    scales.mul_(1 + draw.normal(*scales.shape).abs())
    return arguments


def _zero_keys(draw: Draw) -> Arguments:
    arguments = cases.sparse_decode_case(draw, format=FP8_DS_MLA, with_sink=True)
    cache = cast("Any", arguments["cache"])
    slots = torch.arange(cache.num_slots, device=draw.device)
    cache.write(slots, torch.zeros(len(slots), 576, device=draw.device))
    return arguments


def _long_lengths(draw: Draw) -> Arguments:
    """Lengths of both streams that exceed the selection, which has 64 entries."""
    extra = EXTRA_STREAMS["of the same format"]
    arguments = cases.sparse_decode_case(draw, format=FP8_584, extra=extra)
    lengths = draw.tensor([65, 64, 2**31 - 1])
    return arguments | {"topk_lengths": lengths, "extra_topk_lengths": lengths.flip(0)}


def _long_prefill_lengths(draw: Draw) -> Arguments:
    return cases.as_prefill(_long_lengths(draw))


def _lengths_in_a_column(draw: Draw) -> Arguments:
    """Lengths ``[B, 1]``, a column of a wider tensor; those of the extra stream are ``[B]``."""
    options = {"format": FP8_584, "extra": EXTRA_STREAMS["of pages of 2"], "own_lengths": True}
    arguments = cases.sparse_decode_case(
        draw, with_lengths=True, with_extra_lengths=True, **cast("dict[str, Any]", options)
    )
    lengths, extra = (
        cast("Tensor", arguments[name]) for name in ("topk_lengths", "extra_topk_lengths")
    )
    return arguments | {"topk_lengths": embed(lengths), "extra_topk_lengths": extra.flatten()}


def _wide_selections(draw: Draw, make: Callable[..., Arguments]) -> Arguments:
    """int64 slots and lengths; no slot is beyond int32, and its lowest bits are none."""
    arguments = make(draw, format=FP8_DS_MLA, with_lengths=True)
    indices = cast("Tensor", arguments["topk_indices"]).long()
    indices[..., 0] = 2**32
    lengths = cast("Tensor", arguments["topk_lengths"]).long()
    return arguments | {"topk_indices": indices, "topk_lengths": lengths}


def _decode_duplicates(draw: Draw) -> Arguments:
    arguments = cases.sparse_decode_case(draw, format=FP8_DS_MLA, share=1.0, with_sink=True)
    indices = cast("Tensor", arguments["topk_indices"])
    indices[..., 1::2] = indices[..., :1]
    return arguments


def _empty_streams(draw: Draw, empty: str) -> Arguments:
    """Two streams, of which one or both have no valid slot."""
    arguments = cases.sparse_decode_case(
        draw, format=FP8_584, extra=EXTRA_STREAMS["of the same format"], with_sink=True
    )
    if empty != "second stream":
        cast("Tensor", arguments["topk_indices"]).fill_(-1)
    if empty != "first stream":
        arguments["extra_topk_lengths"] = draw.tensor([0, 0, 0])
    return arguments


def _empty_requests(draw: Draw, num_splits: int) -> Arguments:
    """One request of four has no valid slot, one has only its first, and one has length 0."""
    arguments = cases.sparse_decode_case(
        draw,
        format=BF16_576,
        batch=4,
        num_heads=2,
        page_size=53,
        with_sink=True,
        share=1.0,
        num_splits=num_splits,
    )
    indices = cast("Tensor", arguments["topk_indices"])
    indices[0], indices[1, :, 1:] = -1, -(2**31)
    return arguments | {"topk_lengths": draw.tensor([64, 64, 0, 1])}


def _negative_lengths(draw: Draw, num_heads: int, num_splits: int | None = None) -> Arguments:
    arguments = cases.sparse_decode_case(
        draw,
        format=FP8_584,
        num_heads=num_heads,
        topk=200,
        seq_len=300,
        with_lengths=True,
        extra=(FP8_584, 300, 200, 64),
        with_extra_lengths=True,
        num_splits=num_splits,
    )
    arguments["topk_lengths"] = draw.tensor([-1, -127, -1000])
    arguments["extra_topk_lengths"] = draw.tensor([200, 130, -(2**31)])
    return arguments


def _distant_decode(draw: Draw, format: CacheFormat) -> Arguments:
    arguments = cases.sparse_decode_case(draw, format=format, batch=1, seq_len=64, page_size=64)
    return arguments | {"cache": cases.distant_pages(draw, format)}


def _dense_decode() -> list[Case]:
    make = cases.dense_decode_case
    lens = Shuffled((20, 140, 0, 63, 64, 65, 1))
    few = Shuffled((20, 140, 0))
    return [
        *(
            Case(
                fmt.name,
                build(make, format=fmt, seq_lens=lens, query_len=2, num_heads=4, with_sink=True),
                quick=fmt in QUICK_FORMATS,
                alone=fmt == FP8_DS_MLA,
            )
            for fmt in (*LATENT_FORMATS, *ODD_FORMATS)
        ),
        *(
            Case(
                f"3 splits, {'' if causal else 'not '}causal, {fmt.name}",
                build(
                    make,
                    format=fmt,
                    seq_lens=Shuffled((40, 0, 2)),
                    query_len=3,
                    num_heads=6,
                    page_size=5,
                    causal=causal,
                    with_sink=True,
                    num_layers=2,
                    num_splits=3,
                ),
                quick=causal and fmt == FP8_584,
            )
            for fmt in (BF16_576, FP8_584)
            for causal in (True, False)
        ),
        *(
            Case(
                f"{splits} splits, {heads} heads, {tokens} tokens of a request",
                build(
                    make,
                    format=BF16_576,
                    seq_lens=Shuffled((64, 3)),
                    query_len=tokens,
                    num_heads=heads,
                    dtype=dtype,
                    num_splits=splits,
                ),
            )
            for splits, tokens, heads, dtype in (
                (1, 4, 16, torch.bfloat16),
                (2, 4, 16, torch.bfloat16),
                (2, 1, 40, torch.bfloat16),
                (2, 2, 9, torch.float16),
                (2, 5, 3, torch.bfloat16),
            )
        ),
        *(
            Case(
                f"{heads} heads",
                build(make, format=FP8_DS_MLA, seq_lens=few, num_heads=heads, with_sink=True),
                quick=heads == 128,
            )
            for heads in (*HEAD_COUNTS, 9, 126)
        ),
        *(
            Case(
                f"pages of {size}",
                build(make, format=FP8_DS_MLA, seq_lens=few, page_size=size, with_sink=True),
            )
            for size in (1, 2, 61, 69)
        ),
        Case("plain", build(make, format=FP8_DS_MLA, seq_lens=few), alone=True),
        *(
            Case(
                f"12 requests, {heads} heads, float32",
                build(
                    make,
                    format=BF16_576,
                    seq_lens=Shuffled((*range(0, 700, 70), 3, 1300)),
                    num_heads=heads,
                    dtype=torch.float32,
                ),
                quick=heads == 3,
                alone=True,
            )
            for heads in (1, 3, 8)
        ),
        Case(
            "more tiles than run at once",
            build(make, format=BF16_576, seq_lens=Shuffled(range(0, 640, 4)), num_heads=128),
            large=True,
        ),
        Case(
            "not causal",
            build(make, format=FP8_DS_MLA, seq_lens=few, query_len=4, causal=False),
            quick=True,
        ),
        *(
            Case(
                f"maxima that climb, {heads} heads, {fmt.name}",
                build(
                    _climbing,
                    make,
                    format=fmt,
                    seq_lens=Shuffled([300 + i % 7 for i in range(140)]),
                    num_heads=heads,
                ),
            )
            for fmt in (FP8_DS_MLA, BF16_576)
            for heads in (64, 16)
        ),
        Case(
            "fewer keys than queries",
            build(make, format=FP8_DS_MLA, seq_lens=Shuffled((0, 1, 3, 4)), query_len=4),
        ),
        Case("float16", build(make, format=FP8_DS_MLA, seq_lens=few, dtype=torch.float16)),
        Case("strided, int64", build(_strided_decode)),
        Case("one exact scale", build(_one_exact_scale)),
        *(
            Case(
                f"heads 584 apart, {heads} heads",
                build(_apart, make, format=BF16_576, seq_lens=few, num_heads=heads, query_len=2),
            )
            for heads in (3, 64)
        ),
        *(
            Case(
                f"bfloat16, pages of {size}",
                build(
                    make,
                    format=BF16_576,
                    seq_lens=Shuffled((20, 700, 0, 513)),
                    query_len=2,
                    num_heads=heads,
                    page_size=size,
                ),
                quick=size > 61,
            )
            for size, heads in ((61, 64), (192, 128), (512, 32))
        ),
        *(
            Case(
                f"one layer of three, {fmt.name}",
                build(make, format=fmt, seq_lens=lens, num_layers=3),
            )
            for fmt in (BF16_576, FP8_DS_MLA)
        ),
        *_exact_scales(make, seq_lens=Shuffled((1, 300, 2, 0))),
        *(
            Case(f"missing pages, {fmt.name}", build(_decode_of_missing_pages, fmt))
            for fmt in (BF16_576, FP8_DS_MLA)
        ),
        Case("2 splits, missing pages", build(_decode_of_missing_pages, FP8_DS_MLA, num_splits=2)),
        *(
            Case(
                f"NaN in later tokens, {fmt.name}",
                build(
                    make,
                    format=fmt,
                    seq_lens=Shuffled((200, 64, 65, 3, 130)),
                    query_len=3,
                    num_heads=64,
                    later_nan=True,
                ),
            )
            for fmt in (BF16_576, FP8_DS_MLA)
        ),
        Case(
            "long",
            build(
                make,
                format=FP8_DS_MLA,
                seq_lens=Shuffled((4096, 9000, 0, 33)),
                num_heads=128,
                query_len=2,
                with_sink=True,
            ),
            large=True,
            alone=True,
        ),
        Case(
            "128 requests",
            build(
                make,
                format=FP8_DS_MLA,
                seq_lens=Shuffled([7 * (i % 40) for i in range(128)]),
                num_heads=64,
            ),
            large=True,
        ),
    ]


def _decode_of_missing_pages(
    draw: Draw, format: CacheFormat, num_splits: int | None = None
) -> Arguments:
    """Page ids from both ends of the range, and one beyond int32; a request has no page at all."""
    arguments = cases.dense_decode_case(
        draw, format=format, seq_lens=[140, 30, 200], page_size=32, num_splits=num_splits
    )
    table = cast("Tensor", arguments["page_table"]).long()
    table[0, 1], table[1, 0] = -1, cases.GARBAGE_PAGE
    table[2, :4] = draw.tensor([-(2**31), 2**31 - 1, -5, 2**31 - 1])
    table[2, 5] = 2**33
    return arguments | {"page_table": table}


def _strided_decode(draw: Draw) -> Arguments:
    arguments = cases.dense_decode_case(draw, format=FP8_584, query_len=2)
    table, lengths = (cast("Tensor", arguments[name]) for name in ("page_table", "seq_lens"))
    return arguments | {
        "q": embed(cast("Tensor", arguments["q"])),
        "page_table": embed(table.long()),
        "seq_lens": lengths.long(),
    }


def _one_exact_scale(draw: Draw) -> Arguments:
    """One scale of a row is no power of two; all others are."""
    arguments = cases.dense_decode_case(draw, format=FP8_DS_MLA, seq_lens=(300, 2), num_heads=16)
    pages = cast("Tensor", arguments["page_table"])[:, 0].long()
    cast("Any", arguments["cache"]).fields().scales[pages, 0, 2] *= 1.3
    return arguments


def _merge_states() -> list[Case]:
    make = cases.merge_states_case
    return [
        *(
            Case(
                f"{parts} parts, {str(dtype).removeprefix('torch.')}",
                build(make, parts, dtype=dtype, with_sink=True),
                quick=parts == 2,
            )
            for parts, dtype in (
                (1, torch.float32),
                (2, torch.bfloat16),
                (2, torch.float32),
                (7, torch.float16),
            )
        ),
        # More states than one iteration of the kernel merges, so the accumulator is rescaled.
        Case("100 parts", build(make, 100, with_sink=True), quick=True),
        Case("512 dims", build(make, 3, value_dim=512, dtype=torch.bfloat16, with_sink=True)),
        Case("without a sink", build(make, 3)),
        Case("3 dims, strided", build(_strided_states, 7, value_dim=3)),
        Case("80 dims, strided", build(_strided_states, 2, value_dim=80, dtype=torch.bfloat16)),
        Case("no parts", build(_nothing_to_merge)),
        Case("LSEs far apart", build(_distant_states)),
    ]


def _strided_states(draw: Draw, num_parts: int, **options: object) -> Arguments:
    parts = cases.merge_states_case(draw, num_parts, **cast("dict[str, Any]", options))
    return parts | {name: embed(cast("Tensor", parts[name])) for name in ("outs", "lses")}


def _distant_states(draw: Draw) -> Arguments:
    """The exponential of each LSE overflows or is 0."""
    arguments = cases.merge_states_case(draw, 2)
    return arguments | {"lses": cast("Tensor", arguments["lses"]) * 1e4}


def _nothing_to_merge(draw: Draw) -> Arguments:
    parts = cases.merge_states_case(draw, 1, with_sink=True)
    return parts | {name: cast("Tensor", parts[name])[:0] for name in ("outs", "lses")}


def _project_heads() -> list[Case]:
    make = cases.project_heads_case
    return [
        *(
            Case(
                f"{name}, {kind}",
                build(make, rows=rows, cols=cols, block=block, num_heads=16),
                tolerances=projection_tolerances(block),
                quick="V3" in name and kind in ("bf16", "128x128"),
            )
            for name, (rows, cols) in PROJECTION_SHAPES.items()
            for kind, block in SCALE_BLOCKS.items()
        ),
        *(
            Case(
                f"{tokens} tokens, {kind}",
                build(make, num_tokens=tokens, rows=128, cols=256, block=SCALE_BLOCKS[kind]),
                tolerances=projection_tolerances(SCALE_BLOCKS[kind]),
            )
            for tokens in (1, 65, 500)
            for kind in ("bf16", "128x128")
        ),
        *(
            Case(
                f"{parts} parts, {tokens} tokens, {kind}",
                build(
                    make,
                    num_tokens=tokens,
                    num_heads=16,
                    rows=128,
                    cols=512,
                    block=SCALE_BLOCKS[kind],
                    num_parts=parts,
                    with_sink=parts > 1,
                ),
                tolerances=projection_tolerances(SCALE_BLOCKS[kind], merged=True),
                quick=tokens == 4,
            )
            for parts, tokens in ((1, 4), (2, 70), (5, 4), (64, 17))
            for kind in ("bf16", "128x128")
        ),
        *(
            Case(
                f"300 tokens of 16 heads, {rows} x {cols}",
                build(make, num_tokens=300, rows=rows, cols=cols, block=(128, 128), num_heads=16),
                tolerances=(FP8_PROJECTION,),
                quick=True,
            )
            for rows, cols in ((512, 128), (128, 512))
        ),
        *(
            Case(
                f"{tokens} tokens of 2 heads, {rows} x {cols}, {kind}",
                build(
                    make,
                    num_tokens=tokens,
                    rows=rows,
                    cols=cols,
                    block=SCALE_BLOCKS[kind],
                    num_heads=2,
                ),
                tolerances=projection_tolerances(SCALE_BLOCKS[kind]),
                quick=True,
            )
            for rows, cols in ((512, 128), (128, 512))
            for tokens, kind in ((12, "128x128"), (40, "128x128"), (40, "bf16"))
        ),
        Case("strided", build(_strided_projection)),
    ]


def _project_groups() -> list[Case]:
    make = cases.project_groups_case
    kinds = ("bf16", "128x128")
    flash = {"num_heads": 64, "num_groups": 8, "dim": 512, "rows": 1024}
    one_group = {"num_heads": 8, "num_groups": 1}
    options: dict[str, dict[str, Any]] = {
        "one token": {"num_tokens": 1},
        "no rotation, strided": {"rope_dim": None, "strided": True},
        "65 dims, bfloat16 table, int64": {
            "dim": 65,
            "table_dtype": torch.bfloat16,
            "index_dtype": torch.int64,
        },
        "5 heads, 5 groups, strided": {
            "num_heads": 5,
            "num_groups": 5,
            "rows": 200,
            "strided": True,
        },
        "one group, 300 tokens": {"num_groups": 1, "num_tokens": 300, "rows": 130},
        "128 rows": {"rows": 128},
        "128 rows, 140 tokens": {"rows": 128, "num_tokens": 140},
    }
    return [
        *(
            Case(
                f"{name}, {kind}",
                build(make, block=SCALE_BLOCKS[kind], **some),
                tolerances=projection_tolerances(SCALE_BLOCKS[kind]),
                quick=name in ("one token", "128 rows", "128 rows, 140 tokens"),
            )
            for name, some in options.items()
            for kind in kinds
        ),
        *(
            Case(
                f"{parts} parts, {kind}",
                build(make, block=SCALE_BLOCKS[kind], num_parts=parts, with_sink=parts > 1),
                tolerances=projection_tolerances(SCALE_BLOCKS[kind], merged=True),
                quick=parts == 5,
            )
            for parts in (1, 5)
            for kind in kinds
        ),
        Case("blocks of 48 x 20", build(make, block=(48, 20)), tolerances=(FP8_PROJECTION,)),
        *(
            Case(
                f"DeepSeek-V4-Flash, {tokens} tokens, {kind}",
                build(make, num_tokens=tokens, block=SCALE_BLOCKS[kind], **flash),
                tolerances=projection_tolerances(SCALE_BLOCKS[kind]),
                quick=tokens in (17, 1000),
                large=True,
            )
            for tokens in (1, 17, 128, 1000)
            for kind in kinds
        ),
        *(
            Case(
                f"one group of DeepSeek-V4, {tokens} tokens, {kind}",
                build(make, num_tokens=tokens, block=SCALE_BLOCKS[kind], **flash | one_group),
                tolerances=projection_tolerances(SCALE_BLOCKS[kind]),
                quick=tokens == 9,
                large=True,
            )
            for tokens in (9, 64, 65)
            for kind in kinds
        ),
        Case(
            "one group of DeepSeek-V4, 5 parts, 128x128",
            build(
                make,
                num_parts=5,
                with_sink=True,
                block=SCALE_BLOCKS["128x128"],
                **flash | one_group,
            ),
            tolerances=(MERGED_FP8_PROJECTION,),
            large=True,
        ),
    ]


def _strided_projection(draw: Draw) -> Arguments:
    arguments = cases.project_heads_case(draw, block=(128, 128))
    return arguments | {"x": embed(cast("Tensor", arguments["x"]))}


def _with_out_dtype(draw: Draw, out_dtype: torch.dtype, **options: object) -> Arguments:
    """Sparse prefill with an output of another dtype than the queries."""
    arguments = cases.sparse_prefill_case(draw, **cast("dict[str, Any]", options))
    return arguments | {"out_dtype": out_dtype}


def _branch_case(
    draw: Draw,
    *,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    layer: dict[str, Any],
    causal: bool = True,
    **options: object,
) -> Arguments:
    arguments = cases.branch_case(
        draw,
        mla_layer(draw, **layer),
        query_lens=query_lens,
        seq_lens=seq_lens,
        **cast("dict[str, Any]", options),
    )
    return arguments | {"causal": causal}


def _branch(op: str) -> list[Case]:
    decode = op == "decode_branch"
    uniform = _batches((1, 1), (1, 70), (1, 129)) if decode else _batches((20, 150), (20, 20))
    mixed = {"query_lens": [1, 1, 9, 30], "seq_lens": [65, 1, 9, 100]}
    # More tokens than the projection kernel for few tokens supports.
    many = {"query_lens": [1] * 70, "seq_lens": list(range(1, 71))}
    empty = {"query_lens": [2, 0, 0], "seq_lens": [70, 0, 0]}
    list_of: list[Case] = []
    for topk, kind in ((16, "sparse"), (None, "dense")):
        layer = {"with_sink": topk is not None}
        heads = {"num_heads": 128, "with_sink": topk is not None}
        options: dict[str, Any] = {"topk": topk, "format": FP8_DS_MLA}
        list_of += [
            Case(
                kind,
                build(_branch_case, batch=uniform, layer=layer, **options),
                quick=True,
                alone=decode,
            ),
            Case(
                f"{kind}, bf16",
                build(_branch_case, batch=uniform, layer=layer, topk=topk, format=BF16_576),
            ),
            Case(
                f"{kind}, mixed",
                build(_branch_case, layer=layer, **mixed, **options),
                alone=decode,
            ),
            Case(f"{kind}, empty requests", build(_branch_case, layer=layer, **empty, **options)),
            Case(
                f"{kind}, FP8 weights",
                build(_branch_case, batch=uniform, layer={"block": (128, 128)}, **options),
                (BRANCH_FP8_OUT,),
            ),
            Case(
                f"{kind}, 128 heads",
                build(_branch_case, batch=uniform, layer=heads, **options),
                large=True,
            ),
            Case(
                f"{kind}, GLM-5",
                build(_branch_case, batch=uniform, layer={"nope": 192, "value": 256}, **options),
            ),
            *(
                Case(
                    f"{kind}, {'bf16' if block is None else 'FP8'} weights, many requests",
                    build(_branch_case, layer=heads | {"block": block}, **many, **options),
                    None if block is None else (BRANCH_FP8_OUT,),
                    large=True,
                    alone=True,
                    replayed=False,
                )
                for block in (None, (128, 128))
                if decode
            ),
        ]
        if topk is None:
            list_of += [
                Case(
                    "dense, not causal",
                    build(_branch_case, layer=layer, causal=False, **mixed, **options),
                )
            ]
    return list_of


def _select_rows() -> list[Case]:
    make = cases.select_rows_case
    return [
        *(
            Case(
                ranges,
                build(make, num_tokens=65, num_keys=130, ranges=ranges),
                quick=ranges == "ragged",
            )
            for ranges in ("causal", "segments", "ragged")
        ),
        Case("one workspace", build(make, num_tokens=65, max_workspace_bytes=1 << 20)),
        Case("2048 rows", build(make, num_keys=3000, topk=2048)),
        Case("more than all rows", build(make, num_keys=10, topk=64)),
    ]


LISTS: dict[str, dict[str, Any]] = {
    "64 heads, with lengths": {"num_heads": 64, "topk": 200, "num_rows": 300, "with_lengths": True},
    "3 heads, strided": {"num_heads": 3, "strided": True},
    "one list of one entry": {"num_tokens": 1, "topk": 1},
    "float16": {"dtype": torch.float16},
}
"""Options of ops over lists of rows."""


def _selected_scores(op: str) -> list[Case]:
    make = getattr(cases, f"{op}_case")
    options = LISTS | {
        "40 dims": {"head_dim": 40},
        "one row, listed by all": {"num_rows": 1, "topk": 40},
        "int64": {"index_dtype": torch.int64},
        "no valid entry": {"share": 0.0},
    }
    large = {"num_tokens": 1024, "num_rows": 8192, "topk": 2048, "num_heads": 64}
    exact = {"dtype": torch.float32}
    precise = (FLOAT32_INDEX_GRADIENT,) * 3 if op == "selected_scores_backward" else None
    return [
        Case("8 heads", build(make), quick=True),
        *(Case(name, build(make, **some), quick=len(some) > 3) for name, some in options.items()),
        Case("float32", build(make, **exact), precise, quick=True),
        Case("2048 of 8192 rows", build(make, **large), large=True),
    ]


def _attention_target() -> list[Case]:
    make = cases.attention_target_case
    options = LISTS | {
        "512 dims": {"head_dim": 512},
        "40 dims": {"head_dim": 40},
        "float32": {"dtype": torch.float32},
        "128 heads, not normalised": {"num_heads": 128, "normalize": False},
        "sinks": {"with_sink": True, "num_heads": 20},
        "no valid entry": {"share": 0.0},
    }
    large = {"num_tokens": 256, "num_rows": 8192, "topk": 2048, "num_heads": 64}
    return [
        Case("8 heads", build(make), quick=True),
        *(Case(name, build(make, **some), quick=len(some) > 3) for name, some in options.items()),
        Case("2048 of 8192 rows", build(make, **large), large=True),
    ]


def _index_loss() -> list[Case]:
    make = cases.index_loss_case
    return [
        Case("sum", build(make), quick=True),
        Case("weighted", build(make, with_row_weights=True)),
        Case("2048 entries", build(make, num_tokens=100, topk=2048)),
    ]


def _dense_index(op: str) -> list[Case]:
    make = cases.dense_index_loss_case
    tiles = {"num_tokens": 150, "num_rows": 300, "index_dim": 128, "num_index_heads": 9}
    options: dict[str, dict[str, Any]] = {
        "causal, 70 tokens": {"ranges": "causal", "num_tokens": 70, "num_rows": 150},
        "weighted, strided": {"with_row_weights": True, "strided": True},
        "shared keys of 576 dims": {"shared_keys": True, "head_dim": 576, "num_heads": 16},
        "64 index heads of 128": {"num_index_heads": 64, "index_dim": 128},
        "in parts": {"num_tokens": 150, "num_rows": 300, "max_workspace_bytes": 1},
        "in parts, index heads of 128": {"max_workspace_bytes": 1} | tiles,
        "causal, 64 heads of 64": {"ranges": "causal", "head_dim": 64, "num_heads": 64} | tiles,
        "one token": {"num_tokens": 1, "num_rows": 1},
    }
    large = {"ranges": "causal", "num_tokens": 4096, "num_rows": 4096, "num_index_heads": 16}
    precise = (
        (INDEX_LOSS, *(FLOAT32_INDEX_GRADIENT,) * 3) if op == "dense_index_gradients" else None
    )
    return [
        Case("ragged", build(make), quick=True),
        *(
            Case(name, build(make, **some), quick="index_dim" in some)
            for name, some in options.items()
        ),
        Case("float32", build(make, dtype=torch.float32), precise, quick=True),
        Case("4096 tokens", build(make, index_dim=64, **large), large=True),
    ]


MATRIX: dict[str, tuple[Case, ...]] = {
    "fused_rope_rmsnorm_quant": tuple(_latent_writes()),
    "append_index_keys": tuple(_index_writes()),
    "fused_indexer_rope_quant": tuple(_index_steps()),
    "prepare_index_queries": tuple(_index_queries()),
    "pool_windows": tuple(_pool_windows()),
    "to_slots": tuple(_to_slots()),
    "entry_slots": tuple(_entry_slots()),
    "visible_slots": tuple(_visible_slots()),
    "share_lists": tuple(_share_lists()),
    "own_positions": tuple(_own_positions()),
    "resolve_rows": tuple(_resolve_rows()),
    "fetch_rows": tuple(_fetch_rows()),
    "forget_seats": tuple(_forget_seats()),
    "gather_dequant": tuple(_gather()),
    "indexer_scores": tuple(_indexer_scores()),
    "indexer_scores_paged": tuple(_indexer_scores_paged()),
    "indexer_topk": tuple(_indexer_topk()),
    "indexer_topk_blocks": tuple(_indexer_topk_blocks()),
    "indexer_topk_of_blocks": tuple(_indexer_topk_of_blocks()),
    "select_topk": tuple(_select_topk()),
    "merge_topk": tuple(_merge_topk()),
    "sparse_prefill": tuple(_sparse_prefill()),
    "sparse_attention": tuple(
        _sparse_attention(cases.sparse_attention_case, (SPARSE_PREFILL_OUT, SPARSE_PREFILL_LSE))
    ),
    "sparse_attention_backward": tuple(_sparse_attention_backward()),
    "dense_prefill": tuple(_dense_prefill()),
    "sparse_decode": tuple(_sparse_decode()),
    "dense_decode": tuple(_dense_decode()),
    "merge_states": tuple(_merge_states()),
    "project_heads": tuple(_project_heads()),
    "project_groups": tuple(_project_groups()),
    "decode_branch": tuple(_branch("decode_branch")),
    "prefill_branch": tuple(_branch("prefill_branch")),
    "select_rows": tuple(_select_rows()),
    "selected_scores": tuple(_selected_scores("selected_scores")),
    "selected_scores_backward": tuple(_selected_scores("selected_scores_backward")),
    "attention_target": tuple(_attention_target()),
    "index_loss": tuple(_index_loss()),
    "dense_index_loss": tuple(_dense_index("dense_index_loss")),
    "dense_index_gradients": tuple(_dense_index("dense_index_gradients")),
}
"""The cases of each op."""

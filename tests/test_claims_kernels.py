"""Speeds beside peers in the pages of the kernels, the decode step and the goals.

A page of a kernel also has figures of its development, of versions that lost, and of counters.
They are in no committed file, and no test reads them.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections.abc import Callable

import pytest

import test_claims
from sparsemla_lab.bench import report
from sparsemla_lab.bench.workloads import GLM53_ROWS
from test_claims import (
    DATA,
    FP8,
    all_selections,
    check_claim,
    ends,
    page,
    ratios,
    rows,
    table_after,
)

MARKS = (FP8, "extra_context", "fp8_ds_mla", "bf16_576v512", "e4m3_576v512b128", "list_tokens")
BF16 = "sparsemla bf16 products"
"""The peer of a workload that permits FP8 MMAs: the same call without the permission."""
COUNTS = (
    "none",
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
)
GROUPS_PEER = "vLLM fused_inv_rope_fp8_quant, DeepGEMM fp8_einsum"
CONTEXTS = (8192, 32768, 131072)


def found(
    device: str, op: str, peer: str | None, *marks: str, lists: str = "random", **shape: int
) -> list[report.Row]:
    """Rows of these marks and no other, with this shape, in the order of the file."""
    return [
        row
        for row in rows(device)
        if (row.op, row.peer) == (op, peer)
        and row.selection in ("", lists)
        and all((mark in row.case) == (mark in marks) for mark in MARKS)
        and all(row.shape.get(name) == value for name, value in shape.items())
    ]


def one(
    device: str, op: str, peer: str | None, *marks: str, lists: str = "random", **shape: int
) -> report.Row:
    (row,) = found(device, op, peer, *marks, lists=lists, **shape)
    return row


def listed(found: list[report.Row], digits: int = 2) -> str:
    return ", ".join(f"{row.ratio:.{digits}f}" for row in found)


def joined(figures: list[str]) -> str:
    *first, last = figures
    return f"{', '.join(first)} and {last}"


def span(found: list[report.Row]) -> str:
    return ends([row.ratio for row in found])


def share(row: report.Row) -> str:
    return f"{row.percent_of_floor:.0f}"


def shares(found: list[report.Row]) -> str:
    low, high = (end(row.percent_of_floor for row in found) for end in (min, max))
    return f"{low:.0f} to {high:.0f}%"


def prefill(lists: str) -> str:
    return listed(
        [
            one("h200", "sparse_prefill", "FlashMLA", lists=lists, heads=128, head_dim=576, **shape)
            for shape in ({"context": context} for context in CONTEXTS)
        ]
    )


def both_lists(**shape: int) -> list[report.Row]:
    return [
        row
        for lists in ("random", "overlapping")
        for row in found("h200", "sparse_prefill", "FlashMLA", lists=lists, **shape)
    ]


def shared_lists() -> str:
    peer = "FlashMLA"
    return listed(
        found("h100", "sparse_prefill", peer, "list_tokens", lists="overlapping"), digits=1
    )


def fp8_prefill() -> str:
    flash, q8 = (
        found("h100", "sparse_prefill", peer, FP8) for peer in ("FlashMLA", "SGLang Q8KV8")
    )
    fast, faster = sum(row.ratio >= 1.5 for row in flash), sum(row.ratio >= 1.1 for row in q8)
    return (
        f"{span(flash)} and {span(q8)}, with the rounding of rows; {COUNTS[fast]} of "
        f"{COUNTS[len(flash)]} sizes reaches 1.5, {COUNTS[faster]} reach 1.1;"
    )


def fp8_decode(peer: str, batches: tuple[int, ...] = (64, 128, 256)) -> list[report.Row]:
    return [one("h100", "sparse_decode", peer, FP8, heads=128, batch=batch) for batch in batches]


def fp8_decodes() -> str:
    lines = zip((64, 128, 256), fp8_decode(BF16), strict=True)
    return " ".join(f"| {n} | {row.ours_us:.1f} | {row.peer_us:.1f} |" for n, row in lines)


def beside_sgl(heads: int) -> str:
    """A size that was measured with FP8 MMAs alone is served with bfloat16 ones, too."""
    both = []
    for batch in (16, 64, 128, 256):
        shape = {"heads": heads, "batch": batch, "query_len": 1}
        for context in (32768, 8192):
            both += found("h100", "sparse_decode", "sgl_flash_mla", context=context, **shape)
        both += found("h100", "sparse_decode", "sgl_flash_mla", FP8, **shape)
    first = {row.shape["batch"]: row for row in reversed(both)}
    return listed([first[batch] for batch in sorted(first)])


def two_caches(device: str, peer: str, heads: int, batch: int | None = None) -> list[report.Row]:
    shape = {"heads": heads} if batch is None else {"heads": heads, "batch": batch}
    return found(device, "sparse_decode", peer, "extra_context", **shape)


def beside_fa3(device: str = "h100", **shape: int) -> list[report.Row]:
    return found(device, "sparse_decode", "FA3", "bf16_576v512", **shape)


def glm_decodes(cache: str) -> str:
    """Ratios to FA3 with 64 and with 8 heads, of GLM-5.3-Flash's lists."""
    chosen = [
        row
        for row in rows("h200")
        if row.op == "sparse_decode"
        and row.shape["topk"] == GLM53_ROWS
        and row.peer == "FA3"
        and cache in row.case
    ]
    return " and ".join(
        listed(sorted((r for r in chosen if r.shape["heads"] == heads), key=batch_of))
        for heads in (64, 8)
    )


def batch_of(row: report.Row) -> int:
    return row.shape["batch"]


def glm_selections(pool: int) -> str:
    """Ratios to the fastest selection of others, of 1, 8 and 64 requests."""
    fastest: dict[int, float] = {}
    for row in rows("h200"):
        if row.op == "indexer_topk" and f"keys of {pool} tokens, 16 heads" in row.case:
            batch = batch_of(row)
            fastest[batch] = min(row.ratio, fastest.get(batch, row.ratio))
    return ", ".join(f"{fastest[batch]:.2f}" for batch in sorted(fastest))


def converted_prefill(*tokens: int) -> list[report.Row]:
    return [
        row
        for row in rows("h200")
        if row.op == "sparse_prefill"
        and (row.peer or "").startswith("FlashMLA after")
        and row.shape["tokens"] in tokens
        and "extra_context" not in row.shape
    ]


def decode_of(batch: int, heads: int, peer: str = "FlashMLA") -> list[report.Row]:
    return found("h200", "sparse_decode", peer, batch=batch, heads=heads, topk=2048)


def decodes_beside_sgl(heads: int, *batches: int) -> list[report.Row]:
    return [row for batch in batches for row in decode_of(batch, heads, "sgl_flash_mla")]


def floors(many: report.Row, few: report.Row) -> str:
    return f"{share(many)} and {share(few)}%"


def of_mark(mark: str, heads: int, peer: str | None = None) -> report.Row:
    return one("h200", "sparse_decode", peer, mark, heads=heads, batch=128)


def matmul(row: report.Row) -> str:
    """The TFLOP/s of a matmul in the run of a row that MMAs bind."""
    return f"{row.tflops * row.ours_us / row.floor_us:.0f}"


def of_bfloat16() -> str:
    """The row of 128 heads is bound by MMAs; the other one by bytes, in an earlier run."""
    many = of_mark("bf16_576v512", 128, "FA3")
    return (
        f"{floors(many, of_mark('bf16_576v512', 16))} ({share(many)}: {many.tflops:.0f} TFLOP/s, "
        f"where a matmul reached {matmul(many)})"
    )


def matmul_and_commit(context: int) -> str:
    shape = {"heads": 128, "head_dim": 576, "context": context}
    row = one("h200", "sparse_prefill", "FlashMLA", **shape)
    return f"{matmul(row)} TFLOP/s at {row.commit[:7]}"


def dense_decode() -> str:
    all_ = found("h200", "dense_decode", "FlashMLA")
    (long,) = (row for row in all_ if row.shape["context"] == 16384)
    (single,) = (row for row in all_ if row.shape["batch"] == 1)
    (few,) = (row for row in all_ if row.shape["heads"] == 16)
    rest = [row for row in all_ if row not in (long, single)]
    return (
        f"{span(rest)}, 128 x 16384 {listed([long])}, batch 1 {listed([single])}; "
        f"{share(few)}% of the copy"
    )


def pages(device: str) -> str:
    scored = found(device, "indexer_scores_paged", "DeepGEMM")
    if device == "h200":
        at = {
            row.shape["context"]: row for row in scored if row.workload[1].startswith("batch 128,")
        }
        return f"{span(scored)}; {share(at[131072])}% at 128K, {share(at[8192])}% at 8K"
    (long,) = (row for row in scored if (row.shape["batch"], row.shape["context"]) == (128, 131072))
    return f"{span(scored)}, {share(long)}% at 128K"


EIGHT = {
    *((batch, 131072) for batch in (1, 8, 128, 4096)),
    *((batch, 32768) for batch in (64, 128, 4096)),
    (1024, 65536),
}


def eight_selections() -> str:
    chosen = ratios(
        "select_topk",
        lambda row: (
            row.peer != "TileLang"
            and row.shape["topk"] == 2048
            and (row.shape["batch"], row.shape["context"]) in EIGHT
        ),
        "h200",
    )
    assert len(chosen) == len(EIGHT)
    return f"{statistics.geometric_mean(chosen):.2f}"


def slow_selections(device: str) -> str:
    return ends([ratio for ratio in all_selections(device) if ratio < 1])


def indexed(device: str, batch: int, context: int | None = None) -> list[float]:
    return ratios(
        "indexer_topk",
        lambda row: (
            row.shape["batch"] == batch
            and "keys of" not in row.case
            and row.shape["topk"] == 2048
            and (row.shape["query_len"] == 1) == (context is not None)
            and context in (None, row.shape["context"])
        ),
        device,
    )


def decoded_topk(device: str) -> list[str]:
    sizes = ((128, 32768), (8, 131072), (1, 1048576))
    return [f"{ratio:.2f}" for size in sizes for ratio in indexed(device, *size)]


def beside_persistent() -> str:
    """8 decodes over 131072 keys, beside the fastest selection but one."""
    (row,) = (
        row
        for row in rows("h200")
        if row.case == "batch 8, query_len 1, context 131072, topk 2048"
        and row.peer == "DeepGEMM + persistent_topk"
    )
    return f"{row.ratio:.2f}"


def sizes_of_decoded_topk() -> str:
    many, few, single = decoded_topk("h200")
    return (
        f"{many} at 128 x 32K, {few} at 8 x 128K ({beside_persistent()} without "
        f"`cooperative_topk`), {single} at 1 x 1M"
    )


def whole_keys(device: str) -> dict[tuple[int, int, int], report.Row]:
    """Rows of `indexer_topk` with 2048 keys, not pooled, beside the fastest of others."""
    fastest: dict[tuple[int, int, int], report.Row] = {}
    for row in rows(device):
        if row.op == "indexer_topk" and row.shape["topk"] == 2048 and "keys of" not in row.case:
            size = tuple(row.shape[name] for name in ("batch", "query_len", "context"))
            fastest[size] = min(fastest.get(size, row), row, key=lambda each: each.peer_us)
    return fastest


def mebibyte(row: report.Row) -> float:
    return float(row.note.removesuffix(" MiB of memory"))


def mebibytes(device: str, *, decode: bool) -> list[float]:
    found = whole_keys(device).items()
    return [mebibyte(row) for (_, tokens, _), row in found if (tokens == 1) == decode]


def recorded(device: str, context: int) -> float:
    """Of a prefill of 4096 tokens whose call was recorded."""
    return mebibyte(whole_keys(device)[1, 4096, context])


def table_of_topk() -> list[str]:
    sizes = {
        "4096, a prefill | 32768": (1, 4096, 32768),
        "4096, a prefill | 131072": (1, 4096, 131072),
        "128 decodes | 32768": (128, 1, 32768),
        "8 decodes | 131072": (8, 1, 131072),
        "one decode | a million": (1, 1, 1 << 20),
    }
    fastest = whole_keys("h200")
    assert {size for size, row in fastest.items() if row.commit[:7] == "a0a447d"} == {
        (1, 4096, 131072),
        (1, 512, 1 << 20),
    }
    return [
        f"| {name} | {fastest[size].ours_us:.0f} | {fastest[size].ratio:.2f} |"
        for name, size in sizes.items()
    ]


def spanned(found: list[float]) -> str:
    return f"{min(found):.0f} to {max(found):.0f}"


def writes(tokens: int) -> list[report.Row]:
    return [
        row
        for row in rows("h200")
        if row.op in ("fused_rope_rmsnorm_quant", "fused_indexer_rope_quant")
        and row.shape["tokens"] == tokens
        and "norm of queries" not in row.case
    ]


def beyond_an_empty_kernel() -> str:
    empty = report.load(DATA / "h200.json").ceilings.launch_us
    times = [row.ours_us - empty for row in writes(128)]
    return f"{min(times):.1f} to {max(times):.1f}"


def projections(inputs: int, *, many: bool) -> list[report.Row]:
    return [
        row
        for row in found("h200", "project_heads", "torch.bmm", inputs=inputs)
        if (row.shape["tokens"] == 4096) == many
    ]


def compressed_steps() -> str:
    return span([row for row in rows("h200") if row.op == "compressed_decode_step" and row.ratio])


def is_remeasured(row: report.Row) -> bool:
    """Whether a row is of DeepSeek-V4's ops in the run with SGLang's kernels."""
    marks = "extra_context", "keys of 4 tokens"
    return row.commit[:7] == "bd61e79" and any(mark in row.case for mark in marks)


def compressed_ops() -> str:
    """Beside the fastest peer of each size that vLLM takes, or that SGLang has."""
    fastest: dict[tuple[str, str, str], report.Row] = {}
    for row in rows("h200"):
        if (
            (row.commit[:7] == "8900f77" or is_remeasured(row))
            and row.op != "compressed_decode_step"
            and row.peer is not None
            and not row.peer.startswith("sparsemla")
            and not row.note.startswith("vLLM takes its CuTe DSL kernel")
        ):
            fastest[row.workload] = min(
                fastest.get(row.workload, row), row, key=lambda each: each.peer_us
            )
    return span([*fastest.values()])


def host(device: str = "h200") -> list[dict[str, float]]:
    return json.loads((DATA / f"host-{device}.json").read_text(encoding="utf-8"))["rows"]


def host_of(name: str, device: str = "h200") -> str:
    document = json.loads((DATA / f"host-{device}.json").read_text(encoding="utf-8"))
    return f"{document[name]:.1f}"


def host_span(name: str, kernels: int | None = None) -> str:
    times = [row[name] for row in host() if kernels in (None, row["kernels"])]
    return f"{min(times):.0f} to {max(times):.0f}"


def commits(device: str, op: str, peer: str | None = None, mark: str = "") -> str:
    (commit,) = {
        row.commit[:7]
        for row in rows(device)
        if row.op == op and row.peer is not None and peer in (None, row.peer) and mark in row.case
    }
    return commit


def slow_decodes() -> str:
    slow = [
        row
        for row in rows("h100")
        if row.op == "sparse_decode"
        and row.peer is not None
        and not row.peer.startswith("sparsemla")
        and FP8 not in row.case
        and row.ratio < 1
    ]
    assert {(row.peer, row.shape["heads"]) for row in slow} == {("sgl_flash_mla", 128)}
    few = {
        (row.shape["batch"], row.shape["query_len"], row.shape["topk"]): row
        for row in slow
        if "extra_context" not in row.shape
    }
    caches = two_caches("h100", "sgl_flash_mla", 128)
    below = [row for row in caches if row.ratio < 1]
    assert few.keys() == {(4, 1, 2048), (148, 2, 16384)}
    return (
        f"{few[4, 1, 2048].ratio:.2f} with 4 requests of 2048 rows, "
        f"{few[148, 2, 16384].ratio:.2f} with 296 query tokens of 16384 rows, and {span(below)} in "
        f"{COUNTS[len(below)]} of {COUNTS[len(caches)]} sizes of two 584-byte caches"
    )


def step(heads: int, batch: int) -> report.Row:
    (row,) = (
        row
        for row in rows("h200")
        if row.op == "decode_step"
        and (row.shape["heads"], row.shape["batch"]) == (heads, batch)
        and (row.shape["context"], row.shape["indexer"]) == (32768, 0)
    )
    return row


def steps_that_met_older_goals() -> str:
    timed = [row for row in rows("h200") if row.op == "decode_step" and row.ratio]
    met = sum(row.ratio >= (1.5 if row.shape["batch"] <= 16 else 1.3) for row in timed)
    return f"{met} of {len(timed)}"


def untimed_step() -> str:
    (row,) = (row for row in rows("h200") if row.op == "decode_step" and row.peer is None)
    return f"{row.ours_us:.1f}"


def groups_of_flash() -> str:
    timed = found("h200", "project_groups", GROUPS_PEER, heads=64)
    assert [row.shape["tokens"] for row in timed] == [1, 16, 128, 1024, 4096]
    return joined([f"{row.ours_us:.{int(row.ours_us < 100)}f}" for row in timed])


def pools(time: str) -> str:
    """128 requests whose windows close all, and in turn, and 4096 tokens of one."""
    timed = [
        row
        for row in found("h100", "pool_windows", "vLLM CuTe DSL compressor")
        if "ratio 128," in row.case
    ]
    chosen = [
        next(row for row in timed if words in row.case and row.shape["batch"] == batch)
        for words, batch in (("all close", 128), ("in turn", 128), ("query_len 4096", 1))
    ]
    return joined([f"{getattr(row, time):.1f}" for row in chosen])


def of_two_caches(topk: int) -> str:
    rows_ = [
        one("h100", "sparse_decode", "sgl_flash_mla", "extra_context", heads=128, **shape)
        for shape in ({"batch": b, "extra_topk": topk} for b in (1, 4, 16, 64, 128))
    ]
    return " | ".join(f"{row.ratio:.2f}" for row in rows_)


GOALS = "docs/performance-goals.md"
FEW_KEYS = "docs/kernels/attention-fp8.md"


def beside_ascending() -> list[float]:
    """cuDNN's ratios for 64 heads of 576 dims over ascending lists, from the least to the best."""
    found = json.loads((DATA / "gradients-h200.json").read_text(encoding="utf-8"))["gradients"]
    return sorted(
        row["ratio_to_ours"]
        for row in found
        if row["side"] == "cuDNN" and row["case"].startswith("64 heads, ")
        if "512 dims" not in row["case"]
    )


def beside_cudnn(lists: str) -> list[float]:
    """Ratios of gradients of 64 heads by context."""
    names = "h200", "sparse_attention_backward", "cuDNN"
    return [one(*names, lists=lists, heads=64, context=each).ratio for each in CONTEXTS]


# Figures in place of {}: the text of a page, and functions that read them.
CLAIMS: list[tuple[str, str, list[Callable[[], str]]]] = [
    (
        GOALS,
        "1.05, 1.08, 1.12 | {} (overlapping selections {}) | |",
        [lambda: prefill("random"), lambda: prefill("overlapping")],
    ),
    (
        GOALS,
        "16 heads 1.5 | random and overlapping selections {}; {}; {} of FlashMLA with heads padded "
        "to 64",
        [
            lambda: listed(both_lists(heads=64, head_dim=576)),
            lambda: span(both_lists(head_dim=512)),
            lambda: listed(both_lists(heads=16)),
        ],
    ),
    (GOALS, "share: 2 of FlashMLA with padded heads | | {} |", [shared_lists]),
    (GOALS, "at no larger error | | {} [errors]", [fp8_prefill]),
    (
        GOALS,
        "| | with 128 heads {}, and {} of our bfloat16 kernel;",
        [
            lambda: listed(fp8_decode("sgl_flash_mla")),
            lambda: listed(fp8_decode(BF16)),
        ],
    ),
    (
        "docs/kernels/attention-fp8-mma.md",
        "| requests | FP8 MMAs, us | bfloat16 MMAs, us | |---|---|---| {} It was dropped",
        [fp8_decodes],
    ),
    (
        GOALS,
        "256 requests: 1.25 | 16 and 128 requests: {} with 64 heads; {} with 128; one request "
        "{} and {} | {} with 64 heads; {} with 128 |",
        [
            *(
                lambda heads=heads: listed(decodes_beside_sgl(heads, 16, 128))
                for heads in (64, 128)
            ),
            *(lambda heads=heads: listed(decodes_beside_sgl(heads, 1)) for heads in (64, 128)),
            lambda: beside_sgl(64),
            lambda: beside_sgl(128),
        ],
    ),
    (
        GOALS,
        "1 to 128 requests: 1.2 | {} | {} |",
        [lambda: span(beside_fa3("h200")), lambda: span(beside_fa3())],
    ),
    (
        GOALS,
        "prefill from an FP8 cache: 1.05; 256 tokens 1.3 | {}; {} |",
        [lambda: span(converted_prefill(4096)), lambda: listed(converted_prefill(256))],
    ),
    (
        GOALS,
        "batch 128: 1.35; 64 heads 1.5; 16 and 32 heads 2 | {}; {}; {} and {} (16 heads {} of "
        "sgl_flash_mla) |",
        [
            lambda: span(decode_of(128, 128)),
            lambda: span(decode_of(128, 64)),
            lambda: listed(decode_of(128, 16)),
            lambda: listed(decode_of(128, 32)),
            lambda: listed(decodes_beside_sgl(16, 128)),
        ],
    ),
    (
        GOALS,
        "batch 1, 4, 16: 1.2 | {} |",
        [lambda: listed([row for batch in (1, 4, 16) for row in decode_of(batch, 128)])],
    ),
    (
        GOALS,
        "a second stream: 1.2 of FlashMLA | {}; 64 heads {}; beside sgl_flash_mla {}, 64 heads {} "
        "| beside sgl_flash_mla {}, 64 heads {} |",
        [
            lambda: listed(two_caches("h200", "FlashMLA", 128, 128)),
            lambda: listed(two_caches("h200", "FlashMLA", 64, 128)),
            *(
                lambda device=device, heads=heads: span(two_caches(device, "sgl_flash_mla", heads))
                for device in ("h200", "h100")
                for heads in (128, 64)
            ),
        ],
    ),
    (
        GOALS,
        "separate scales: 60% of the floor | {}; {} |",
        [
            of_bfloat16,
            lambda: floors(*(of_mark("e4m3_576v512b128", heads) for heads in (128, 16))),
        ],
    ),
    (GOALS, "16 heads 3900 GB/s | {} |", [dense_decode]),
    (
        GOALS,
        "16 heads: 1.5 of bfloat16 | {} |",
        [
            lambda: listed(
                found("h200", "dense_decode", "sparsemla bfloat16", "fp8_ds_mla", heads=16)
            )
        ],
    ),
    (
        GOALS,
        "indexer scores, contiguous: 1.05 | {} |",
        [lambda: span(found("h200", "indexer_scores", "DeepGEMM"))],
    ),
    (
        GOALS,
        "or 95% of the copy | {} | {} |",
        [lambda: pages("h200"), lambda: pages("h100")],
    ),
    (
        GOALS,
        "top-k: 1.5, none slower | {} for eight sizes from 1 x 131072 to 4096 x 131072,",
        [eight_selections],
    ),
    (
        GOALS,
        "; three {}: 256 rows of 262144 (k 2048) and of 1048576 (k 512 and 1024) |",
        [lambda: slow_selections("h200")],
    ),
    (GOALS, "four {} |", [lambda: slow_selections("h100")]),
    (
        GOALS,
        "256 MiB | {}; {}; decodes {} MiB, a first prefill {}, recorded prefills hold all chunks' "
        "memory at once: {} at 32K, on an H100 {} at 128K | {} |",
        [
            lambda: ends(indexed("h200", 1)),
            sizes_of_decoded_topk,
            lambda: spanned(mebibytes("h200", decode=True)),
            lambda: spanned(
                [n for n in mebibytes("h200", decode=False) if n != recorded("h200", 32768)]
            ),
            lambda: f"{recorded('h200', 32768):.0f}",
            lambda: f"{recorded('h100', 131072):.0f}",
            lambda: joined(decoded_topk("h100")),
        ],
    ),
    (
        GOALS,
        "128 tokens 4 us | {}; {} us beyond an empty kernel |",
        [lambda: shares(writes(8192)), beyond_an_empty_kernel],
    ),
    (
        GOALS,
        "| W_UK {}, W_UV {} (ten layers",
        [
            lambda: shares(projections(128, many=False)),
            lambda: shares(projections(512, many=False)),
        ],
    ),
    (
        GOALS,
        "4096 tokens {} and {}% of the copy's rate",
        [
            lambda: share(*projections(128, many=True)),
            lambda: share(*projections(512, many=True)),
        ],
    ),
    (
        GOALS,
        "| [step {}, ops {}](deepseek-v4-evidence.md#speed)",
        [compressed_steps, compressed_ops],
    ),
    (
        GOALS,
        "eager call: 12 us | {} | | [bare launches of two kernels take {}]",
        [lambda: host_span("us"), lambda: host_span("launch_us", 2)],
    ),
    (
        GOALS,
        "`torch.empty` took {} us there, the sum of two small tensors {}.",
        [lambda: host_of("empty_us"), lambda: host_of("add_us")],
    ),
    (
        GOALS,
        "bound beforehand, take {} us in Triton's launcher and the driver, and of one kernel {}.",
        [lambda: host_span("launch_us", 2), lambda: host_span("launch_us", 1)],
    ),
    (
        GOALS,
        "`torch.empty` takes {} us and a repeated `sparse_decode` with 16 heads {}, of which its "
        "bare launches are {}.",
        [
            lambda: host_of("empty_us", "h100"),
            lambda: f"{host('h100')[0]['us']:.0f}",
            lambda: f"{host('h100')[0]['launch_us']:.0f}",
        ],
    ),
    (
        GOALS,
        "| gradients | {} |",
        [lambda: commits("h200", "sparse_attention_backward")],
    ),
    (
        GOALS,
        "| gradients, 64 heads: 1.0 of cuDNN over overlapping rows, 1.3 elsewhere; in any order "
        "1.15 | {}; over 8K, 32K, 128K random rows {}; with [ascending lists]("
        "kernels/attention-backward.md#measured-story) {}, over 128K random rows {} |",
        [
            lambda: ends(beside_cudnn("overlapping")),
            lambda: ", ".join(f"{ratio:.2f}" for ratio in beside_cudnn("random")),
            lambda: ends(beside_ascending()[:-1]),
            lambda: f"{beside_ascending()[-1]:.2f}",
        ],
    ),
    (
        GOALS,
        "with 64 and with 8 heads | bfloat16 rows {}; 528 bytes {} |",
        [lambda: glm_decodes("bf16_512v512"), lambda: glm_decodes("fp8_nope")],
    ),
    (
        GOALS,
        "the fastest top-k: 1.3 | pools of 4: {}; of 16: {} |",
        [lambda: glm_selections(4), lambda: glm_selections(16)],
    ),
    (
        GOALS,
        "| beside TileLang | {} |",
        [lambda: commits("h200", "select_topk", "TileLang")],
    ),
    (
        GOALS,
        "| GLM-5.3-Flash, after 983 cases | {} |",
        [lambda: commits("h200", "sparse_decode", "FA3", "bf16_512v512")],
    ),
    (
        GOALS,
        "| {} workloads of the first two lines, some of them beside sgl_flash_mla, FA3 and "
        "SGLang's Triton | {} |",
        [
            lambda: str(len({r.workload for r in rows("h200") if r.commit[:7] == "bd61e79"})),
            lambda: commits("h200", "sparse_decode", "FA3", "bf16_576v512"),
        ],
    ),
    (
        GOALS,
        "`pool_windows` is of {}, and gradients beside TileLang are of {}.",
        [
            lambda: commits("h100", "pool_windows"),
            lambda: commits("h100", "sparse_attention_backward", "TileLang"),
        ],
    ),
    (GOALS, "with 128 heads | {}", [slow_decodes]),
    (
        GOALS,
        "| selections | {} of {}, {}: 256 rows",
        [
            lambda: COUNTS[sum(ratio < 1 for ratio in all_selections("h100"))],
            lambda: str(len(all_selections("h100"))),
            lambda: slow_selections("h100"),
        ],
    ),
    ("docs/decode-branch-evidence.md", "{} sizes meet them.", [steps_that_met_older_goals]),
    ("docs/decode-branch-evidence.md", "sparsemla takes {} us.", [untimed_step]),
    (
        "docs/decode-branch-evidence.md",
        "and takes {} at {} (peers {}, seven launches)",
        [
            lambda: f"{step(128, 1).ours_us:.1f}",
            lambda: step(128, 1).commit[:7],
            lambda: f"{step(128, 1).peer_us:.1f}",
        ],
    ),
    (
        "docs/kernels/attention-bf16.md",
        "(H100, {}): {} in the mean of {} sizes, {}; the goal",
        [
            lambda: commits("h100", "sparse_decode", "FA3"),
            lambda: f"{statistics.geometric_mean(row.ratio for row in beside_fa3()):.2f}",
            lambda: str(len(beside_fa3())),
            lambda: span(beside_fa3()),
        ],
    ),
    (
        "docs/performance-method.md",
        "on the H200 a bfloat16 matmul reached {} and {}.",
        [lambda: matmul_and_commit(8192), lambda: matmul_and_commit(32768)],
    ),
    (
        "docs/kernels/attention-bf16.md",
        "On an H200 ({}) the ratios of {} sizes are {}, with 32 requests {}.",
        [
            lambda: commits("h200", "sparse_decode", "FA3", "bf16_576v512"),
            lambda: str(len(beside_fa3("h200"))),
            lambda: span(beside_fa3("h200")),
            lambda: span(beside_fa3("h200", batch=32)),
        ],
    ),
    (
        FEW_KEYS,
        "On an H200 they have {}, over 656 bytes {} ({}; two caches",
        [
            lambda: span(two_caches("h200", "sgl_flash_mla", 128)),
            lambda: span(decodes_beside_sgl(128, 1, 16, 128)),
            lambda: decodes_beside_sgl(128, 1)[0].commit[:7],
        ],
    ),
    (
        "docs/kernels/indexer.md",
        "(bd61e79; 131072 keys of a prefill a0a447d): | tokens | keys | us | ratio | "
        "|---|---|---|---| {} The fastest selection of 8 decodes is `cooperative_topk`; beside "
        "`persistent_topk` they have {}.",
        [lambda: " ".join(table_of_topk()), beside_persistent],
    ),
    (
        "docs/kernels/attention-bf16.md",
        "bound by memory ({}% of a copy's rate with up to 64 heads)",
        [
            lambda: share(
                min(
                    (r for r in beside_fa3() if r.shape["batch"] == 128 and r.shape["heads"] <= 64),
                    key=lambda row: row.percent_of_floor,
                )
            )
        ],
    ),
    (
        FEW_KEYS,
        "| 128 + 512 | {} | | 128 + 1024 | {} |",
        [lambda: of_two_caches(512), lambda: of_two_caches(1024)],
    ),
    (
        "docs/kernels/cache-writes.md",
        "On an H100 ({}), both launches of either side in one run take {}, vLLM's CuTe DSL kernels "
        "{}.",
        [
            lambda: commits("h100", "pool_windows"),
            lambda: pools("ours_us"),
            lambda: pools("peer_us"),
        ],
    ),
    (
        "docs/kernels/projection.md",
        "[{} us](../deepseek-v4-evidence.md#single-ops) for 1, 16, 128, 1024 and 4096 tokens ({}).",
        [
            groups_of_flash,
            lambda: commits("h200", "project_groups"),
        ],
    ),
    (
        "docs/kernels/topk.md",
        "The geometric mean is {}, also over all",
        [lambda: f"{statistics.geometric_mean(all_selections('h200')):.2f}"],
    ),
    (
        "docs/kernels/topk.md",
        "for all 68 sizes, {}. The same three sizes and 4096 rows of 262144 columns take {} to {}% "
        "longer than vLLM's kernel.",
        [
            lambda: ends(all_selections("h100")),
            lambda: f"{100 * (1 / max(r for r in all_selections('h100') if r < 1) - 1):.0f}",
            lambda: f"{100 * (1 / min(all_selections('h100')) - 1):.0f}",
        ],
    ),
]


@pytest.mark.parametrize(
    ("name", "words", "figures"), CLAIMS, ids=[f"{name}-{words[:40]}" for name, words, _ in CLAIMS]
)
def test_figures_are_those_of_the_files(
    name: str, words: str, figures: list[Callable[[], str]]
) -> None:
    check_claim(name, words, figures)


def test_every_goal_is_tied_to_a_file() -> None:
    said = [
        words.format(*(figure() for figure in figures))
        for name, words, figures in [*test_claims.CLAIMS, *CLAIMS]
        if name == GOALS
    ]
    lines = table_after(page(GOALS), "| goal, as a ratio to the fastest peer | H200 |")
    untied = [line for line in lines if not any(claim in line for claim in said)]
    # It has no kernel: its figures are of designs that lost.
    assert [line.split(":")[0] for line in untied] == ["| the same prefill without written scores"]


def test_prefill_is_slower_only_where_shared_lists_do_not_overlap() -> None:
    slow = [
        row for row in rows("h100") if row.op == "sparse_prefill" and row.peer and row.ratio < 1
    ]
    foreign = [row for row in slow if not row.peer.startswith("sparsemla") and FP8 not in row.case]
    assert foreign
    assert {(row.selection, "list_tokens" in row.case) for row in foreign} == {("random", True)}


def test_prefill_with_fp8_mma() -> None:
    peers = (BF16, "FlashMLA", "SGLang Q8KV8")
    lines = []
    for tokens in (1024, 4096):
        for heads in (64, 128):
            for context in CONTEXTS:
                shape = {"tokens": tokens, "heads": heads, "context": context}
                beside = [one("h100", "sparse_prefill", peer, FP8, **shape) for peer in peers]
                size = f"{tokens}, {heads}, {context >> 10}K"
                cells = [f"{row.peer_us:.0f}, {row.ratio:.2f}" for row in beside]
                lines.append(" | ".join(["| " + size, f"{beside[0].ours_us:.0f}", *cells]) + " |")
    text = page("docs/kernels/attention-fp8-mma.md")
    assert table_after(text, "| tokens, heads, context | FP8 MMA |") == lines


def test_the_loss_with_fp8_mma() -> None:
    file = json.loads((DATA / "fp8-loss.json").read_text(encoding="utf-8"))
    losses, errors = file["nats_per_byte"], file["error_of_out"]
    lines = []
    for cache, label in (
        ("bfloat16", "bfloat16"),
        ("656-byte cache", "656-byte cache, scales powers of two"),
        ("656-byte cache, exact scales", "656-byte cache, exact scales"),
    ):
        rounded = f"{cache}, FP8 MMA"
        means = [statistics.mean(losses[name]) for name in (cache, rounded)]
        cells = [*(f"{mean:.4f}" for mean in means), f"{errors[rounded]:.1e}".replace("e-0", "e-")]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    text = page("docs/kernels/attention-fp8-mma.md")
    assert table_after(text, "| rows | bfloat16 MMA | FP8 MMA | error of out |") == lines
    assert f"{COUNTS[len(losses['bfloat16'])]} held-out texts of {file['bytes']} bytes" in text


def test_gradients_beside_cudnn() -> None:
    lines = []
    for heads in (64, 128):
        for context in CONTEXTS:
            random, overlapping = (
                one(
                    "h200",
                    "sparse_attention_backward",
                    "cuDNN",
                    lists=lists,
                    heads=heads,
                    context=context,
                )
                for lists in ("random", "overlapping")
            )
            lines.append(
                f"| {heads}, {context} | {random.ours_us / 1e3:.1f} | {random.tflops:.0f} "
                f"| {random.peer_us / 1e3:.1f} | {random.ratio:.2f} "
                f"| {overlapping.ours_us / 1e3:.1f} | {overlapping.peer_us / 1e3:.1f} "
                f"| {overlapping.ratio:.2f} |"
            )
    text = page("docs/kernels/attention-backward.md")
    assert table_after(text, "| heads, rows | random: ours |") == lines


def test_gradients_with_lists_that_tokens_share() -> None:
    """The column of predictions is of no file."""
    text = page("docs/kernels/attention-backward.md")
    for line in table_after(text, "| heads, tokens of a list | rows | own lists |"):
        size, context, own, shared, _, ratio, both = (
            cell.strip() for cell in line.strip("|").split("|")
        )
        heads, tokens = (int(number) for number in size.split(", "))
        random, overlapping = (
            one(
                "h100",
                "sparse_attention_backward",
                "sparsemla by token",
                "list_tokens",
                lists=lists,
                heads=heads,
                list_tokens=tokens,
                context=int(context),
            )
            for lists in ("random", "overlapping")
        )
        assert (own, shared, ratio, both) == (
            f"{overlapping.peer_us / 1e3:.1f}",
            f"{overlapping.ours_us / 1e3:.1f}",
            f"{overlapping.ratio:.1f}",
            f"{random.peer_us / 1e3:.1f}, {random.ours_us / 1e3:.1f}",
        )


def test_the_losses_of_an_h200() -> None:
    ops: list[tuple[str, dict[str, int]]] = [
        ("attention_target", {"heads": 128}),
        ("attention_target", {"heads": 64}),
        ("selected_scores", {}),
        ("selected_scores_backward", {}),
        ("dense_index_loss", {}),
        ("dense_index_gradients", {}),
    ]
    text = page("docs/kernels/losses.md")
    shown = [
        [cell.strip() for cell in line.strip("|").split("|")][2:]
        for line in table_after(text, "| op | size | ms | TFLOP/s | of the ceiling |")
    ]
    for (op, shape), (ms, rate, part) in zip(ops, shown, strict=True):
        timed = found("h200", op, None, **shape)
        assert {row.commit[:7] for row in timed} == {"8900f77"}
        assert ms == ", ".join(f"{row.ours_us / 1e3:.2f}" for row in timed)
        assert rate == ", ".join(f"{row.tflops:.0f}" for row in timed)
        assert part == ", ".join(f"{share(row)}%" for row in timed)


@pytest.mark.parametrize(
    ("side", "header", "launches"),
    [
        ("sparsemla", "| sparsemla | batch 1, us |", (1, 2, 3, 5, 6, 7)),
        ("vLLM, DeepGEMM, FlashMLA", "| peers | batch 1, us |", (5, 6, 8, 13, 15, 16)),
    ],
)
def test_the_time_line_of_the_decode_step(
    side: str, header: str, launches: tuple[int, ...]
) -> None:
    """Ours until a launch is done, as launches overlap; the peers' until the next begins."""
    steps = json.loads((DATA / "launches-h200.json").read_text(encoding="utf-8"))
    columns = []
    for step in (each for each in steps if each["side"] == side):
        ended = [each["start_us"] + each["us"] for each in step["launches"]]
        started = [each["start_us"] for each in step["launches"][1:]] + [ended[-1]]
        until = ended if side == "sparsemla" else started
        marks = [0.0, *(until[last - 1] for last in launches)]
        column = [after - before for before, after in itertools.pairwise(marks)]
        columns.append([f"{us:.1f}" for us in (*column, ended[-1])])
    shown = [
        [cell.strip() for cell in line.strip("|").split("|")][1:]
        for line in table_after(page("docs/decode-branch-evidence.md"), header)
    ]
    assert shown == [list(line) for line in zip(*columns, strict=True)]

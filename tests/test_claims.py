"""Figures of the README and the docs are those of the committed files.

``tests/test_docs.py`` compares whole tables and drawings that commands write.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sparsemla import FP8_DS_MLA, INDEX_FP8
from sparsemla_lab.bench import report

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "benchmarks"
FP8 = "precision fp8"


@cache
def rows(device: str) -> list[report.Row]:
    return report.load(DATA / f"{device}.json").rows


@cache
def verified(name: str) -> str:
    """``passed of all`` of a report of ``sparsemla verify``."""
    ops = json.loads((DATA / f"verify-nvidia-{name}.json").read_text(encoding="utf-8"))["ops"]
    cases, failed = (sum(op[key] for op in ops) for key in ("cases", "failed"))
    return f"{cases - failed} of {cases}"


def commit_of(name: str) -> str:
    document = json.loads((DATA / f"verify-nvidia-{name}.json").read_text(encoding="utf-8"))
    return document["commit"][:7]


def ratios(
    op: str, keep: Callable[[report.Row], bool] = lambda row: True, device: str = "h100"
) -> list[float]:
    """The ratio to the fastest foreign peer of each size."""
    fastest: dict[Any, report.Row] = {}
    for row in rows(device):
        if row.op != op or row.peer is None or row.peer.startswith("sparsemla") or not keep(row):
            continue
        if row.workload not in fastest or row.peer_us < fastest[row.workload].peer_us:
            fastest[row.workload] = row
    return [row.ratio for row in fastest.values()]


def ends(found: list[float]) -> str:
    return f"{min(found):.2f} to {max(found):.2f}"


def of_batch(batch: int) -> Callable[[report.Row], bool]:
    return lambda row: row.shape["batch"] == batch


def step_us(context: int, indexer: int = 0) -> str:
    case = f"batch 1, heads 128, context {context}, indexer {indexer}"
    (us,) = {row.ours_us for row in rows("h200") if (row.op, row.case) == ("decode_step", case)}
    return f"{us:.1f}"


def backward(heads: int) -> str:
    """Without a digit that the two kinds of lists do not share."""
    found = [
        row.ratio
        for row in rows("h100")
        if (row.op, row.peer) == ("sparse_attention_backward", "TileLang")
        and row.shape["heads"] == heads
    ]
    return f"{min(found):.1f}"


def step_goal(device: str) -> str:
    reached = sum(ratio >= 1.3 for ratio in ratios("decode_step", device=device))
    one, many = (ratios("decode_step", of_batch(batch), device) for batch in (1, 128))
    of = " of 71" if device == "h200" else ""
    return f"{reached}{of} reach 1.3, batch 1 {ends(one)}, batch 128 {ends(many)}"


def branch_on_an_h100() -> str:
    reached = sum(ratio >= 1.3 for ratio in ratios("decode_step"))
    batches = {batch: ratios("decode_step", of_batch(batch)) for batch in (1, 16, 64, 128)}
    spans = " ".join(f"| {batch} | {ends(found)} |" for batch, found in batches.items())
    fast, many = sum(x >= 2.2 for x in batches[1]), sum(x >= 1.4 for x in batches[128])
    (sizes,) = {len(batches[batch]) for batch in (1, 128)}
    return (
        f"{reached} of 71 sizes reach 1.3: | batch | ratio | |---|---| {spans} "
        f"Of {sizes} sizes each, {fast} reach 2.2 with "
        f"batch 1, and {many} reach 1.4 with batch 128."
    )


def all_selections(device: str) -> list[float]:
    """Sizes of ``select_topk`` beside vLLM's kernels and torch."""
    return ratios("select_topk", lambda row: row.peer != "TileLang", device)


OLDER = {f"h200-triton-{version}" for version in ("3.7", "3.8", "3.9")}


def older() -> str:
    """The same count on three versions of Triton."""
    (count,) = {verified(name) for name in OLDER}
    return count


def older_gpus() -> list[Callable[[], str]]:
    return [lambda name=name: verified(f"h200-as-{name}") for name in ("sm_80", "sm_89")]


# Figures in place of {}: the text of a page, and functions that read them.
CLAIMS: list[tuple[str, str, list[Callable[[], str]]]] = [
    (
        "README.md",
        "On an H200, one layer's decode step is {} to {} times as fast as vLLM 0.33 with DeepGEMM "
        "and FlashMLA.",
        [
            lambda: f"{min(ratios('decode_step', device='h200')):.1f}",
            lambda: f"{max(ratios('decode_step', device='h200')):.1f}",
        ],
    ),
    (
        "docs/decode-branch-evidence.md",
        "On an H100 (ba24770, [results-h100.md](results-h100.md)) {}",
        [branch_on_an_h100],
    ),
    (
        "docs/kernels/topk.md",
        "The geometric mean is 1.39, also over all {} sizes of",
        [lambda: str(len(all_selections("h200")))],
    ),
    (
        "docs/performance-goals.md",
        "{} for all 68; 65 sizes {};",
        [
            lambda: f"{statistics.geometric_mean(all_selections('h200')):.2f}",
            lambda: ends([ratio for ratio in all_selections("h200") if ratio >= 1]),
        ],
    ),
    *(
        (name, words, [lambda: f"{statistics.geometric_mean(all_selections('h100')):.2f}"])
        for name, words in (
            ("docs/performance-goals.md", "| {} for 68, four"),
            ("docs/kernels/topk.md", "three quarters of that rate: {} for all 68 sizes,"),
        )
    ),
    (
        "README.md",
        "| 8K | {} µs | {} µs | | 128K | {} µs | {} µs |",
        [lambda i=i, n=n: step_us(n, i) for n in (8192, 131072) for i in (0, 1)],
    ),
    (
        "docs/dsa.md",
        "takes {} us with the indexer at 8K of context and {} at 128K.",
        [lambda: step_us(8192, 1), lambda: step_us(131072, 1)],
    ),
    (
        "README.md",
        "The decode step covers {} sizes",
        [lambda: str(len(ratios("decode_step", device="h200")))],
    ),
    (
        "README.md",
        "`sparsemla verify`: {} cases on Triton 3.6, {} older ones on 3.7, 3.8 and 3.9",
        [lambda: verified("h200"), older],
    ),
    (
        "README.md",
        "`sparsemla verify`: {} cases on Triton 3.6; gets the H200's code",
        [lambda: verified("h100")],
    ),
    (
        "README.md",
        "their code run on an H200 | {} cases as sm_80, {} as sm_89, Triton 3.6",
        older_gpus(),
    ),
    (
        "docs/gpus.md",
        "| H200, 3.6 | {} | {} |",
        [lambda: verified("h200"), lambda: commit_of("h200")],
    ),
    (
        "docs/gpus.md",
        "| H200, 3.7, 3.8 and 3.9 | {}; the ops of DeepSeek-V4 and of training are younger, and "
        "these versions only compiled them | {} |",
        [older, lambda: commit_of("h200-triton-3.9")],
    ),
    (
        "docs/gpus.md",
        "| H100, 3.6 | {} | {} |",
        [lambda: verified("h100"), lambda: commit_of("h100")],
    ),
    (
        "docs/gpus.md",
        "| H100 as sm_80, 3.6 | {} | {} |",
        [lambda: verified("h100-as-sm_80"), lambda: commit_of("h100-as-sm_80")],
    ),
    (
        "docs/gpus.md",
        "| H100 as sm_89, 3.6 | {} | {} |",
        [lambda: verified("h100-as-sm_89"), lambda: commit_of("h100-as-sm_89")],
    ),
    (
        "docs/gpus.md",
        "| H200 as sm_80, 3.6 | {} | {} |",
        [lambda: verified("h200-as-sm_80"), lambda: commit_of("h200-as-sm_80")],
    ),
    (
        "docs/gpus.md",
        "| H200 as sm_89, 3.6 | {} | {} |",
        [lambda: verified("h200-as-sm_89"), lambda: commit_of("h200-as-sm_89")],
    ),
    *(
        (
            "docs/gpus.md",
            f"`sparsemla verify --as {name}` on an H200: {{}} cases on Triton 3.6.",
            [count],
        )
        for name, count in zip(("sm_80", "sm_89"), older_gpus(), strict=True)
    ),
    (
        "docs/performance-goals.md",
        "gradients: 2.5 of TileLang, deterministic | | {} with 64 heads, {} with 128 |",
        [lambda: backward(64), lambda: backward(128)],
    ),
    (
        "docs/performance-goals.md",
        "[every size](decode-branch-evidence.md#every-size): {} | {} |",
        [lambda: step_goal("h200"), lambda: step_goal("h100")],
    ),
]

# Rows of the times as older GPUs: the words of the page, the op and the case.
DECODE = "query_len 1, heads {}, context 32768, topk 2048"
AS_OLDER: list[tuple[str, str, str]] = [
    *(
        (
            f"prefill, 2048 tokens of {heads} heads, bfloat16 rows",
            "sparse_prefill",
            f"tokens 2048, context 32768, heads {heads}, head_dim 576, topk 2048",
        )
        for heads in (128, 16)
    ),
    *(
        (
            f"decode, {batch} x {heads} heads, 656-byte rows",
            "sparse_decode",
            f"batch {batch}, {DECODE.format(heads)}",
        )
        for batch, heads in ((1, 128), (128, 128), (128, 16))
    ),
    *(
        (
            f"decode, 128 x {heads} heads, bfloat16 rows",
            "sparse_decode",
            f"batch 128, {DECODE.format(heads)}, bf16_576v512 cache",
        )
        for heads in (128, 16)
    ),
    (
        "DeepSeek-V4's decode, 128 x 64 heads, 584-byte rows",
        "sparse_decode",
        "batch 128, query_len 1, heads 64, context 128, topk 128, extra_context 32768, "
        "extra_topk 512, fp8_584 caches, sink, lengths",
    ),
    *(
        (
            f"dense decode, 128 x {heads} heads, 8192 keys",
            "dense_decode",
            f"batch 128, query_len 1, heads {heads}, context 8192",
        )
        for heads in (128, 16)
    ),
    ("indexer scores, 4096 x 32768", "indexer_scores", "tokens 4096, context 32768"),
    (
        "indexer scores over pages, 128 x 32768",
        "indexer_scores_paged",
        "batch 128, query_len 1, context 32768",
    ),
    (
        "indexer and top-k, 4096 x 32768",
        "indexer_topk",
        "batch 1, query_len 4096, context 32768, topk 2048",
    ),
    (
        "W_UK of one token, 128 heads, ten layers",
        "project_heads",
        "tokens 1, heads 128, inputs 128, outputs 512, layers 10",
    ),
    *(
        (
            f"decode step with indexer, {batch} x 128 heads",
            "decode_step",
            f"batch {batch}, heads 128, context 32768, indexer 1",
        )
        for batch in (1, 128)
    ),
]


def as_older_gpus() -> list[str]:
    """The table of times, line by line."""
    lines = ["| work | as sm_80 | as sm_89 |", "|---|---|---|"]
    for words, op, case in AS_OLDER:
        times = []
        for target in ("sm_80", "sm_89"):
            row = next(
                row
                for row in rows(f"h200-as-{target}")
                if (row.op, row.case) == (op, case) and row.selection in ("", "random")
            )
            times.append(f"{row.ours_us:.{int(row.ours_us < 100)}f} ({row.percent_of_floor:.0f}%)")
        lines.append(f"| {words} | {times[0]} | {times[1]} |")
    return lines


# Rows of the means on an H100, and what they are of.
MEANS: list[tuple[str, str, Callable[[report.Row], bool]]] = [
    ("`decode_step`", "decode_step", lambda row: True),
    ("`sparse_decode`", "sparse_decode", lambda row: FP8 not in row.case),
    ("`dense_decode`", "dense_decode", lambda row: True),
    ("`sparse_prefill`", "sparse_prefill", lambda row: FP8 not in row.case),
    (
        "`sparse_prefill`, FP8 MMA, beside Q8KV8",
        "sparse_prefill",
        lambda row: row.peer == "SGLang Q8KV8",
    ),
    ("`indexer_topk`", "indexer_topk", lambda row: True),
    ("`select_topk`", "select_topk", lambda row: True),
    ("`indexer_scores`, contiguous", "indexer_scores", lambda row: True),
    ("`indexer_scores_paged`", "indexer_scores_paged", lambda row: True),
    ("`project_groups`", "project_groups", lambda row: True),
    ("`project_heads`", "project_heads", lambda row: True),
    ("`fused_indexer_rope_quant`", "fused_indexer_rope_quant", lambda row: True),
    ("`pool_windows`", "pool_windows", lambda row: True),
    (
        "`sparse_attention_backward`, beside TileLang",
        "sparse_attention_backward",
        lambda row: row.peer == "TileLang",
    ),
]


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def table_after(text: str, header: str) -> list[str]:
    """The rows of the table with this header."""
    lines = text[text.index(header) :].splitlines()[2:]
    return lines[: next(i for i, line in enumerate(lines) if not line.startswith("|"))]


def check_claim(name: str, words: str, figures: list[Callable[[], str]]) -> None:
    """Check that a page has the words with the figures of the files."""
    claim = words.format(*(figure() for figure in figures))
    assert claim in " ".join(page(name).split())


@pytest.mark.parametrize(
    ("name", "words", "figures"), CLAIMS, ids=[f"{name}-{words[:40]}" for name, words, _ in CLAIMS]
)
def test_figures_are_those_of_the_files(
    name: str, words: str, figures: list[Callable[[], str]]
) -> None:
    check_claim(name, words, figures)


def test_the_means_on_an_h100() -> None:
    lines = []
    for label, op, keep in MEANS:
        found = ratios(op, keep)
        mean = statistics.geometric_mean(found)
        lines.append(
            f"| {label} | {len(found)} | {mean:.2f} | {min(found):.2f} | {max(found):.2f} |"
        )
    assert (
        table_after(page("docs/performance-goals.md"), "| op | sizes | mean | from | to |") == lines
    )


def test_every_size_of_the_decode_step() -> None:
    text = page("docs/decode-branch-evidence.md")
    lines = table_after(
        text, "| heads | batch | 8K | 32K | 128K | with an indexer: 8K | 32K | 128K"
    )
    shown = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {
        tuple(row.shape[name] for name in ("heads", "batch", "indexer", "context")): row.ratio
        for row in rows("h200")
        if row.op == "decode_step" and row.ratio is not None
    }
    newer = {
        tuple(row.shape[name] for name in ("heads", "batch", "indexer", "context"))
        for row in rows("h200")
        if row.op == "decode_step" and row.commit[:7] == "bd61e79"
    }
    assert newer == {*((128, n, 1, 32768) for n in (1, 16, 128)), (16, 128, 1, 32768)}
    heads, used = 0, set()
    for named, batch, *figures in shown:
        heads = int(named or heads)
        sizes = [(heads, int(batch), i, c << 10) for i in (0, 1) for c in (8, 32, 128)]
        assert figures == [f"{found[each]:.2f}" if each in found else "wrong" for each in sizes]
        used |= {*sizes}
    assert used >= found.keys()


def test_gradients_beside_tilelang() -> None:
    lines = table_after(
        page("docs/kernels/attention-backward.md"), "| heads | lists | ours | TFLOP/s | TileLang |"
    )
    assert lines == [
        f"| {row.shape['heads']} | {row.selection} | {row.ours_us / 1e3:.1f} | {row.tflops:.0f} "
        f"| {row.peer_us / 1e3:.1f} | {row.ratio:.2f} |"
        for row in rows("h100")
        if (row.op, row.peer) == ("sparse_attention_backward", "TileLang")
    ]


def test_the_host_times_of_an_h200() -> None:
    measured = json.loads((DATA / "host-h200.json").read_text(encoding="utf-8"))["rows"]
    lines = table_after(page("docs/performance-goals.md"), "| op | kernels | first call, us |")
    named = re.findall(r"^\| `(\w+)`", "\n".join(lines), re.MULTILINE)
    assert [row["op"] for row in measured if row["op"] in named]
    shown = [[cell.strip() for cell in line.strip("|").split("|")][1:] for line in lines]
    assert shown == [
        [
            str(row["kernels"]),
            f"{row['first_us']:.0f}",
            f"{row['us']:.0f}",
            f"{row['launch_us']:.1f}",
        ]
        for row in measured
    ]


FIGURE = re.compile(r"[\d.]+ (?:µs|us\b|of \d+|sizes|GB/s|TFLOP/s|times)")


def test_the_readme_has_no_other_figure_of_speed_or_count() -> None:
    text = " ".join(page("README.md").split())
    for name, words, figures in CLAIMS:
        if name == "README.md":
            text = text.replace(words.format(*(figure() for figure in figures)), "")
    assert FIGURE.findall(text) == []


def test_times_as_older_gpus_are_those_of_the_files():
    assert "\n".join(as_older_gpus()) in (ROOT / "docs/gpus.md").read_text(encoding="utf-8")


CARDS = {
    "H200, 141 GB": 141,
    "H100, A100, 80 GB": 80,
    "A6000, L40S, 48 GB": 48,
    "A100, 40 GB": 40,
    "RTX 5090, 32 GB": 32,
    "RTX 3090, RTX 4090, 24 GB": 24,
}
"""GB of memory of a card."""
W4A16 = (4 + 16 / 128) / 8
MODELS = {
    "DeepSeek-V3.2, FP8": (671, 61),
    "DeepSeek-V3.2, W4A16": (671 * W4A16, 61),
    "GLM-5, W4A16": (744 * W4A16, 78),
    "DeepSeek-V4-Flash": (160, None),
}
"""GB of weights, and layers with a row and an index key for each token."""


def fitting() -> list[str]:
    """The table of the tokens that fit."""
    row = FP8_DS_MLA.bytes_per_token + INDEX_FP8.bytes_per_token
    lines = [f"| card | {' | '.join(MODELS)} |", "|---" * (len(MODELS) + 1) + "|"]
    for card, memory in CARDS.items():
        cells = []
        for weights, layers in MODELS.values():
            room = 0.92 * memory - weights / 8 - 6
            tokens = 1e3 * room / (3850 if layers is None else row * layers)
            digits = 2 if layers else 1
            cells.append("no" if room < 0 else f"{tokens:.{digits}f}")
        lines.append(f"| {card} | {' | '.join(cells)} |")
    return lines


def test_the_tokens_that_fit_are_those_of_the_arithmetic():
    text = page("docs/gpus.md")
    assert "\n".join(fitting()) in text
    for figure in ("346 GB (4.125 bits", "W4A16 384 GB", "788 a layer", "165 GB in W4A16"):
        assert figure in text
    assert [round(each * W4A16) for each in (671, 744, 320)] == [346, 384, 165]
    assert "| bytes per token | 3850 |" in page("docs/deepseek-v4.md")


def older(target: str, op: str, case: str, peer: str | None = None) -> report.Row:
    """The row of a workload as an older GPU."""
    return next(
        row
        for row in rows(f"h200-as-{target}")
        if (row.op, row.case) == (op, case)
        if row.selection in ("", "random") and peer in (None, row.peer)
    )


def of_older(figures: Callable[[str], Iterable[float]]) -> str:
    """The lowest and the highest figure as sm_80, and as sm_89."""
    both = (sorted({f"{x:.2f}" for x in figures(target)}) for target in ("sm_80", "sm_89"))
    return "; ".join(f"{each[0]} to {each[-1]}" if len(each) > 1 else each[0] for each in both)


def older_decode(target: str, batch: int, heads: int, rest: str = "") -> report.Row:
    case = f"batch {batch}, query_len 1, heads {heads}, context 32768, topk 2048{rest}"
    return older(target, "sparse_decode", case)


def above_floor(target: str, op: str, *cases: str) -> list[float]:
    """Times of workloads as multiples of their floors."""
    return [100 / older(target, op, case).percent_of_floor for case in cases]


def older_goals() -> list[str]:
    """The table of goals, line by line."""
    bf16 = ", bf16_576v512 cache"
    peer = "SGLang triton_sparse_mla_decode"

    def beside(target: str, *batches: int) -> list[float]:
        found = [older_decode(target, b, h, bf16) for b in batches for h in (8, 16, 64, 128)]
        assert {row.peer for row in found} == {peer}
        return [row.ratio for row in found]

    def prefills(target: str) -> list[float]:
        case = "tokens 2048, context 32768, heads {}, head_dim 576, topk 2048"
        return [
            older(target, "sparse_prefill", case.format(h), "SGLang triton_sparse_mla_fwd").ratio
            for h in (8, 16, 64)
        ]

    def of_bf16(target: str, *heads: int) -> list[float]:
        return [
            older_decode(target, b, h).ours_us / older_decode(target, b, h, bf16).ours_us
            for b in (1, 16, 128)
            for h in heads
        ]

    def attention(target: str) -> list[float]:
        tokens = "tokens 2048, context 32768, heads {}, head_dim 576, topk 2048"
        floors = [100 / older_decode(target, 128, h, bf16).percent_of_floor for h in (64, 128)]
        return floors + above_floor(
            target, "sparse_prefill", *(tokens.format(h) for h in (64, 128))
        )

    def projections(target: str) -> list[float]:
        case = "tokens {}, heads 128, inputs {}, outputs {}, layers 10"
        sizes = [(n, i, 640 - i) for n in (1, 16, 128) for i in (128, 512)]
        return above_floor(target, "project_heads", *(case.format(*size) for size in sizes))

    def steps(target: str) -> list[float]:
        first = {"sm_80": (212, 640, 3970), "sm_89": (125, 292, 1687)}[target]
        case = "batch {}, heads 128, context 32768, indexer 1"
        return [
            us / older(target, "decode_step", case.format(batch)).ours_us
            for batch, us in zip((1, 16, 128), first, strict=True)
        ]

    paged = "batch 128, query_len 1, context 32768"
    return [
        "| goal | as sm_80; as sm_89 | why not everywhere |",
        "|---|---|---|",
        f"| bfloat16 decodes of one request beside SGLang's Triton: 1.2 | "
        f"{of_older(lambda t: beside(t, 1))} | [a launch's start, and the merge]"
        "(kernels/attention-ampere.md#one-tile-a-split) |",
        f"| of 16 and 128 requests: 1.2 | {of_older(lambda t: beside(t, 16, 128))} | as sm_89 16 "
        "requests of 8 and 16 heads: the same |",
        f"| prefills of 8, 16 and 64 heads: 1.2 | {of_older(prefills)} | [rows come from the L2 "
        "cache](kernels/attention-ampere.md#measured-story) |",
        f"| 656-byte rows at most 1.15 of bfloat16 rows, 64 and 128 heads | "
        f"{of_older(lambda t: of_bf16(t, 64, 128))} | [conversion of codes]"
        "(kernels/attention-ampere.md#rejected-variants): eight designs |",
        f"| not slower with 16 heads | {of_older(lambda t: of_bf16(t, 16))} | the same; bfloat16 "
        "rows have a kernel for one tile |",
        f"| attention of 64 and 128 heads at most 1.6 floors: 128 requests, prefill | "
        f"{of_older(attention)} | [shared memory](kernels/attention-ampere.md#bottleneck) |",
        f"| indexer scores at most 1.7 floors | "
        f"{of_older(lambda t: above_floor(t, 'indexer_scores', 'tokens 4096, context 32768'))} | |",
        f"| over pages at most 1.3 of a copy | "
        f"{of_older(lambda t: above_floor(t, 'indexer_scores_paged', paged))} | as sm_80 codes "
        "become float16 by their bits |",
        f"| projections of 1 to 128 tokens at most 2 floors | {of_older(projections)} | "
        "[3 us of each launch, conversion](kernels/projection.md#with-amperes-instructions) |",
        f"| decode step of 128 heads, 4 and 2.5 times as fast as at first (on an H100) "
        f"| {of_older(steps)} | one request: dependent launches; else scores and attention above |",
    ]


def test_goals_of_older_gpus_are_those_of_the_files() -> None:
    assert "\n".join(older_goals()) in page("docs/results-older-gpus.md")

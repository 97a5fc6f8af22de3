"""Figures of the pages about models, engines and training are those of files or of code."""

from __future__ import annotations

import itertools
import json
import math
import re
import statistics
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import pytest

import mutants
from sparsemla import FP8_584, FP8_DS_MLA, INDEX_FP8, INDEX_MXFP4, Pooling
from sparsemla.backends.vllm.divided import Rule
from sparsemla.formats import BF16_512, BF16_576, bf16_format
from sparsemla.kernels.common.lists import ENTRY_BYTES
from sparsemla.ops.sparse_attention import MAX_WORKSPACE_BYTES
from sparsemla_lab.bench import report
from sparsemla_lab.bench.training import TrainingAttention, crossing_lines
from sparsemla_lab.bench.workloads import ProjectGroups, SparseBackward, SparsePrefill
from sparsemla_lab.verify.matrix import MATRIX
from sparsemla_lab.verify.run import RERUNS
from test_claims import DATA, check_claim, commit_of, page, rows, table_after

V4 = "docs/deepseek-v4.md"
V4_TIMES = "docs/deepseek-v4-evidence.md"
TRAINING = "docs/training.md"
TRAINING_OPS = "docs/training-ops.md"
TRAINED = "docs/training-evidence.md"
INDEX_BF16 = bf16_format(128)
Figures = list[Callable[[], str]]


@cache
def file(name: str) -> Any:
    """A committed file of measurements; of a log, the list of its lines."""
    text = (DATA / name).read_text(encoding="utf-8")
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    return json.loads(text)


def us(value: float | None) -> str:
    """Microseconds as the pages show them."""
    assert value is not None
    return f"{value:.{int(value < 100)}f}"


def joined(values: Iterable[str]) -> str:
    return ", ".join(values)


def span(values: Iterable[float], digits: int = 2) -> str:
    found = [*values]
    return f"{min(found):.{digits}f} to {max(found):.{digits}f}"


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def measured(op: str, case: str, peer: str | None, device: str = "h200") -> report.Row:
    """The row of this case; several peers whose names begin so: the fastest of them."""
    found = [
        row
        for row in rows(device)
        if (row.op, row.case) == (op, case)
        and (row.peer is None if peer is None else (row.peer or "").startswith(peer))
    ]
    return min(found, key=lambda row: row.peer_us or 0)


# DeepSeek-V4: single ops. How the line of the table begins, the op, cases, vLLM's kernel, device.
DECODE_V4 = (
    "batch {}, query_len 1, heads {}, context 128, topk 128, extra_context 32768, extra_topk {}, "
    "fp8_584 caches, sink, lengths"
)
PREFILL_V4 = (
    "tokens 4096, heads {}, extra_context 8192, extra_topk {}, topk 128, fp8_584 caches, sink"
)
BATCHES = 1, 16, 128
IN_TURN, ALL_CLOSE = "windows close in turn", "all close a window"
CUTE, COMPRESSORS = "vLLM CuTe DSL compressor", "vLLM"


def decodes(heads: int, topk: int) -> list[str]:
    return [DECODE_V4.format(batch, heads, topk) for batch in BATCHES]


def pools(format: str, *closing: str, ratio: int = 4) -> list[str]:
    return [
        f"batch {batch}, query_len 1, ratio {ratio}, {format} cache, {how}"
        for batch, how in zip(BATCHES, closing, strict=True)
    ]


def selection(batch: int, context: int, topk: int, query_len: int = 1) -> str:
    return f"batch {batch}, query_len {query_len}, context {context}, topk {topk}, keys of 4 tokens"


def pooled_prefill(tokens: int, format: str = "fp8_584", ratio: int = 4) -> str:
    return f"batch 1, query_len {tokens}, ratio {ratio}, {format} cache"


def groups(heads: int, *tokens: int) -> list[str]:
    return [f"tokens {each}, heads {heads}, groups {heads // 8}" for each in tokens]


SINGLE: list[tuple[str, str, list[str], str, str]] = [
    (
        "| `sparse_decode`, window and entries, sink | 1, 16, 128 requests",
        "sparse_decode",
        decodes(64, 512),
        "FlashMLA",
        "h200",
    ),
    ("| | 128 heads | 0.4", "sparse_decode", decodes(128, 1024), "FlashMLA", "h200"),
    (
        "| `sparse_prefill` over converted rows | 4096 tokens, 8192 entries",
        "sparse_prefill",
        [PREFILL_V4.format(64, 512)],
        "FlashMLA",
        "h200",
    ),
    (
        "| | 128 heads | 1697",
        "sparse_prefill",
        [PREFILL_V4.format(128, 1024)],
        "FlashMLA",
        "h200",
    ),
    (
        "| `indexer_topk`, 128K tokens | 1, 16, 128 requests",
        "indexer_topk",
        [selection(batch, 1 << 17, 512) for batch in BATCHES],
        "DeepGEMM",
        "h200",
    ),
    (
        "| | 1 request, 1M tokens, 1024 entries",
        "indexer_topk",
        [selection(1, 1 << 20, 1024)],
        "DeepGEMM",
        "h200",
    ),
    (
        "| | 4096 tokens of a prefill",
        "indexer_topk",
        [selection(1, 1 << 17, 512, 4096)],
        "DeepGEMM",
        "h200",
    ),
    (
        "| `pool_windows`, 4 tokens | 1, 16, 128 requests",
        "pool_windows",
        pools("fp8_584", ALL_CLOSE, IN_TURN, IN_TURN),
        CUTE,
        "h200",
    ),
    (
        "| | index keys",
        "pool_windows",
        pools("index_fp8", ALL_CLOSE, IN_TURN, IN_TURN),
        COMPRESSORS,
        "h200",
    ),
    (
        "| | 4096 tokens; index keys",
        "pool_windows",
        [pooled_prefill(4096), pooled_prefill(4096, "index_fp8")],
        COMPRESSORS,
        "h200",
    ),
    (
        "| `pool_windows`, 128 tokens, on an H100 (7005c76) | 1, 16, 128 requests, all close",
        "pool_windows",
        pools("fp8_584", *[ALL_CLOSE] * 3, ratio=128),
        CUTE,
        "h100",
    ),
    (
        "| | 1, 16, 128 requests, windows close in turn",
        "pool_windows",
        pools("fp8_584", *[IN_TURN] * 3, ratio=128),
        CUTE,
        "h100",
    ),
    (
        "| | 4096, 32768 tokens",
        "pool_windows",
        [pooled_prefill(tokens, ratio=128) for tokens in (4096, 32768)],
        CUTE,
        "h100",
    ),
    (
        "| `project_groups` | 1, 16, 128 tokens",
        "project_groups",
        groups(64, 1, 16, 128),
        "",
        "h200",
    ),
    ("| | 1024, 4096 tokens", "project_groups", groups(64, 1024, 4096), "", "h200"),
    (
        "| | 128 heads: 1, 16, 128, 1024, 4096 tokens",
        "project_groups",
        groups(128, 1, 16, 128, 1024, 4096),
        "",
        "h200",
    ),
]

STEPS = {
    "window only": "no entries",
    "4 tokens, 512 selected": "512 selected entries of 4 tokens",
    "4 tokens, 1024 selected": "1024 selected entries of 4 tokens",
    "128 tokens": "all entries of 128 tokens",
}


def step(layer: str, heads: int, batch: int, context: int = 1 << 17) -> report.Row:
    case = f"batch {batch}, heads {heads}, context {context}, {STEPS[layer]}"
    return measured("compressed_decode_step", case, "vLLM's layer")


def long_step(layer: str, heads: int) -> Figures:
    return [
        lambda: us(step(layer, heads, 1, 1 << 20).ours_us),
        lambda: us(step(layer, heads, 1, 1 << 20).peer_us),
    ]


def beside_sglang(heads: int, topk: int) -> list[str]:
    ratios = [
        measured("sparse_decode", case, "sgl_flash_mla").ratio for case in decodes(heads, topk)
    ]
    return [f"{ratio:.2f}" for ratio in ratios]


def prefill(heads: int, topk: int, peer: str) -> report.Row:
    return measured("sparse_prefill", PREFILL_V4.format(heads, topk), peer)


def of_floor(op: str, case: str, peer: str) -> str:
    return f"{measured(op, case, peer).percent_of_floor:.0f}%"


def ring_bytes(row_bytes: int, pooled_dims: tuple[int, ...] = (), ratio: int = 0) -> int:
    """Bytes of a request in a layer: the ring of raw rows, and those of open windows."""
    module = pytest.importorskip("sparsemla.backends.transformers.deepseek_v4")
    return (128 + module.REWIND) * row_bytes + open_bytes(pooled_dims, ratio)


def open_bytes(dims: tuple[int, ...], ratio: int) -> int:
    """Bytes of the float32 values and gates of open windows, for entries of these dims."""
    module = pytest.importorskip("sparsemla.backends.transformers.deepseek_v4")
    pooling = Pooling(max(ratio, 1), overlap=ratio == 4)
    return sum((pooling.window + module.REWIND) * 2 * pooling.width(dim) * 4 for dim in dims)


def exchange(context: int, name: str) -> dict[int, float]:
    """Microseconds of a decode's selection on two GPUs, for each number of requests."""
    return {
        row["batch"]: row[name]
        for row in file("exchange-two-h100.json")
        if row["context"] == context
    }


CONTEXTS = {"32K": 1 << 15, "128K": 1 << 17, "1M": 1 << 20}


def added(batch: int) -> list[float]:
    """What the exchange adds to a rank's own selection, at each context."""
    return [
        exchange(context, "selection")[batch] - exchange(context, "local")[batch]
        for context in CONTEXTS.values()
    ]


def gathered(batch: int) -> str:
    return f"{statistics.median(exchange(c, 'gather')[batch] for c in CONTEXTS.values()):.0f}"


def fewest(context: int) -> str:
    """The fewest requests whose selection two ranks make faster than one."""
    both, alone = exchange(context, "selection"), exchange(context, "alone")
    return str(min(batch for batch in both if both[batch] < alone[batch]))


@cache
def engine() -> list[Any]:
    """The sizes of vLLM's engine, both sides."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DATA)
        import engine as module
    return module.load()


def parts(cached: str) -> str:
    return span(pair.part_ratio for pair in engine() if pair.cache == cached)


def attention(cached: str, kind: str, heads: tuple[int, ...] = (16, 128), digits: int = 2) -> str:
    return span(
        (
            pair.theirs["attention_ms"] / pair.ours["attention_ms"]
            for pair in engine()
            if (pair.cache, pair.size[0]) == (cached, kind) and pair.size[1] in heads
        ),
        digits,
    )


def long_decodes() -> list[Any]:
    """Decodes of 128 requests of 128K."""
    size = "decode", 128, 1 << 17
    return [pair for pair in engine() if (pair.size[0], *pair.size[2:]) == size]


def scores_ms() -> str:
    """Of a layer, the same for both sides and in all four engines."""
    ours = {pair.ours["kernels"]["score"] for pair in long_decodes()}
    theirs = {pair.theirs["kernels"]["sm90_fp8_paged_mqa_logits"] for pair in long_decodes()}
    (ms,) = {f"{each / 3:.2f}" for each in ours | theirs}
    return ms


def indexer_ms() -> str:
    (ms,) = {f"{pair.ours['indexer_ms'] / 3:.2f}" for pair in long_decodes()}
    return ms


def behind_us(*batches: int) -> str:
    """How much faster vLLM's selection is in a layer, with contexts of 8K."""
    return span(
        (
            (pair.ours["indexer_ms"] - pair.theirs["indexer_ms"]) / 3 * 1e3
            for pair in engine()
            if (pair.size[0], pair.size[3]) == ("decode", 8192) and pair.size[2] in batches
        ),
        0,
    )


def key_ps() -> str:
    """Of the indexer for a row and a key, in a layer's prefill of 128K with 16 heads."""
    size = "prefill", 16, 1, 1 << 17
    found = {
        pair.ours["indexer_ms"] / 3 / (1 << 33) * 1e9 for pair in engine() if pair.size == size
    }
    return f"{min(found):.1f}"


def first_divided(chunk: int) -> str:
    """The context in K from which chunks of a prompt are divided."""
    rule = Rule(Rule.default_row_keys(2048, 64))
    steps = (1024 * k for k in itertools.count())
    context = next(n for n in steps if rule.divides(chunk, chunk * n + chunk * (chunk + 1) // 2))
    return f"{context >> 10}K"


def index_bytes() -> int:
    return 128 * CONTEXTS["128K"] * INDEX_FP8.bytes_per_token


def copy_ms() -> str:
    rate = report.load(DATA / "h200.json").ceilings.copy_gbps
    return f"{index_bytes() / rate / 1e6:.2f}"


def hooks(method: str, **values: object) -> list[dict[str, Any]]:
    found = [row for row in file("sglang-h200.json")["rows"] if row["method"] == method]
    return [row for row in found if all(row[name] == value for name, value in values.items())]


def slower(method: str, **values: object) -> list[float]:
    """Ratios below 1."""
    ratios = [
        row["theirs_us"] / row["ours_us"] for row in hooks(method, **values) if row["ours_us"]
    ]
    return [ratio for ratio in ratios if ratio < 1]


def lengths(heads: int, indexer: int = 0) -> dict[int, report.Row]:
    """Training attention on an H100 beside torch's kernel with cuDNN, for each length."""
    return {
        row.shape["tokens"]: row
        for row in rows("h100")
        if (row.op, row.peer) == ("training_attention", "torch SDPA, cuDNN")
        and (row.shape["heads"], row.shape["indexer"]) == (heads, indexer)
    }


def crosses(heads: int) -> str:
    """The length, in thousands, from which sparse attention is faster."""
    lines = crossing_lines([*lengths(heads).values()])
    (line,) = (line for line in lines if line.startswith("sparse is faster"))
    (tokens,) = re.findall(r"from (\d+) tokens on", line)
    return f"{int(tokens) / 1e3:.0f}K"


LONG = 16384, 32768


def cudnn_rates(heads: int) -> list[float]:
    chosen = [lengths(heads)[tokens] for tokens in LONG]
    return [TrainingAttention(**row.shape).dense_flop / row.peer_us / 1e6 for row in chosen]


def equal_flop(heads: int, indexer: int) -> str:
    """The length at which one layer's sparse and dense attention have as many FLOP."""
    low, high = 2048, 1 << 16
    while high - low > 1:
        middle = (low + high) // 2
        workload = TrainingAttention(middle, heads, 2048, indexer)
        low, high = (low, middle) if workload.dense_flop > workload.flop else (middle, high)
    return f"{round(high, -2)}"


def backward_flop() -> int:
    """Of a query token, head and selected row."""
    return int(SparseBackward(1, 9, 1, 576, 1).flop)


def dense_backward_flop() -> int:
    """Of a visible token and a head: three products of 192 dims and two of 128."""
    forward = 2 * (192 + 128)
    return int(TrainingAttention(1, 1, 1).dense_flop) - forward


def mean_context() -> float:
    return 2048 * backward_flop() / dense_backward_flop()


def last(stage: str) -> dict[str, Any]:
    """The log's last line of a stage; its seconds are a mean over the stage."""
    return [line for line in file("train-dsa-h200.jsonl") if line.get("stage") == stage][-1]


def minutes() -> str:
    stages = "dense", "warm-up", "sparse", "control"
    seconds = sum((last(stage)["step"] + 1) * last(stage)["seconds"] for stage in stages)
    return f"{seconds / 60:.0f}"


def found_by(check: str) -> list[str]:
    """The numbers of a check of the trained model."""
    lines = [line for line in file("train-dsa-h200.jsonl") if line.get("check") == check]
    return re.findall(r"\d\.\d+", lines[-1]["found"])


def divergence(check: str) -> Figures:
    return [lambda at=at: f"{float(found_by(check)[at]):.2f}" for at in (0, 1)]


def trained() -> Any:
    import train_dsa

    return train_dsa.SIZES["h200"]


def bytes_of(*formats: Any) -> Figures:
    return [lambda format=format: str(format.bytes_per_token) for format in formats]


def workspace(context: int) -> str:
    """MiB of the rows that a prefill of DeepSeek-V4 converts."""
    return f"{(8192 + context // 4) * BF16_512.bytes_per_token / 2**20:.0f}"


def rewind() -> str:
    module = pytest.importorskip("sparsemla.backends.transformers.deepseek_v4")
    return str(module.REWIND)


# Figures in place of {}: the text of a page, and functions that read them.
CLAIMS: list[tuple[str, str, Figures]] = [
    (V4, "A row takes {} bytes in FP8 or {} in bfloat16.", bytes_of(FP8_584, BF16_512)),
    (V4, "at most {} in a context of 1M tokens.", [lambda: str((1 << 20) // 128)]),
    (
        V4,
        "takes {} KiB for each query token at a context of 1M, 4 bytes for every 128 tokens.",
        [lambda: str((1 << 20) // 128 * 4 >> 10)],
    ),
    (
        V4,
        "keeps index keys in MXFP4, {} bytes instead of {}.",
        bytes_of(INDEX_MXFP4, INDEX_FP8),
    ),
    (
        V4_TIMES,
        "| window only | {} | {} | | entries of 128 tokens | {} | {} | "
        "| 1024 selected entries, 128 heads | {} | {} |",
        [
            *long_step("window only", 64),
            *long_step("128 tokens", 64),
            *long_step("4 tokens, 1024 selected", 128),
        ],
    ),
    (
        V4_TIMES,
        "the floor of the whole step is {} us, and {} of these are the {} MB of the output "
        "projection.",
        [
            lambda: f"{step('4 tokens, 512 selected', 64, 1).floor_us:.0f}",
            lambda: f"{measured('project_groups', groups(64, 1)[0], '').floor_us:.0f}",
            lambda: f"{ProjectGroups(1, 64, 8).flop / 2 / 1e6:.1f}",
        ],
    ),
    (
        V4_TIMES,
        "beside it the three ratios with 128 heads are {} to {}, and with 64 heads {} to {}.",
        [
            lambda heads=heads, topk=topk, end=end: end(beside_sglang(heads, topk))
            for heads, topk in ((128, 1024), (64, 512))
            for end in (min, max)
        ],
    ),
    (
        V4_TIMES,
        "Reading both caches in place takes {} and {} us instead of {} and {}.",
        [
            *(
                lambda size=size: us(prefill(*size, "sparsemla in place").peer_us)
                for size in ((64, 512), (128, 1024))
            ),
            *(
                lambda size=size: us(prefill(*size, "FlashMLA").ours_us)
                for size in ((64, 512), (128, 1024))
            ),
        ],
    ),
    (
        V4_TIMES,
        "| {} of the MMA's rate |",
        [lambda: of_floor("sparse_prefill", PREFILL_V4.format(64, 512), "FlashMLA")],
    ),
    (
        V4_TIMES,
        "| {} of it |",
        [lambda: of_floor("sparse_prefill", PREFILL_V4.format(128, 1024), "FlashMLA")],
    ),
    (
        V4_TIMES,
        "| {} of the FP8 MMA's rate |",
        [lambda: of_floor("indexer_topk", selection(1, 1 << 17, 512, 4096), "DeepGEMM")],
    ),
    *(
        (name, words, [rewind])
        for name, words in (
            (V4, "Rings have {} rows more than attention reads,"),
            (V4, "if a row would lose more than {} of its tokens but not all:"),
            ("docs/transformers.md", "can be wound back by {} tokens only,"),
        )
    ),
    (
        V4,
        "its rings have pages of {} rows,",
        [lambda: str(ring_bytes(1))],
    ),
    (
        V4,
        "Most of the bytes per request, {} MiB and {} MiB, are the float32 rows of open windows.",
        [
            lambda csa=csa, hca=hca: (
                f"{(csa * open_bytes((512, 128), 4) + hca * open_bytes((512,), 128)) / 2**20:.1f}"
            )
            for csa, hca in ((21, 20), (30, 31))
        ],
    ),
    (
        "docs/vllm.md",
        "`fp8_ds_mla` ({} bytes a token; `fp8` means the same) or `auto`, `bfloat16` ({} bytes).",
        bytes_of(FP8_DS_MLA, BF16_576),
    ),
    (
        "docs/vllm.md",
        "in a workspace of `--max-model-len` rows of {} bytes",
        bytes_of(BF16_576),
    ),
    ("docs/vllm.md", "Records are vLLM's {} and {} bytes.", bytes_of(FP8_584, INDEX_FP8)),
    (
        "docs/vllm.md",
        "entries, of {} bytes each. With",
        bytes_of(BF16_512),
    ),
    (
        "docs/vllm.md",
        "With 8192 tokens that is {} MiB for contexts of 128K and {} MiB for contexts of 1M.",
        [lambda context=context: workspace(context) for context in (1 << 17, 1 << 20)],
    ),
    (
        "docs/vllm-ranks.md",
        "With {} keys the first 8192 tokens of a prompt are divided, and chunks of 512 tokens from "
        "contexts of {} on.",
        [
            lambda: str(Rule.default_row_keys(2048, 64)),
            lambda: {"0K": first_divided(512)}[first_divided(8192)],
        ],
    ),
    (
        "docs/vllm-ranks.md",
        "A key takes {} ps on an H200,",
        [key_ps],
    ),
    (
        "docs/vllm-evidence.md",
        "no step takes longer on the GPU (ratios {}). Indexer and attention together are {} times "
        "as fast with an FP8 cache and {} times in bfloat16. The goal of 1.3 is reached at {} of "
        "{} sizes:",
        [
            lambda: span(pair.model_ratio for pair in engine()),
            lambda: parts("fp8"),
            lambda: parts("bf16"),
            lambda: str(sum(pair.part_ratio >= 1.3 for pair in engine())),
            lambda: str(len(engine())),
        ],
    ),
    (
        "docs/vllm-evidence.md",
        "128 decodes of 128K read {} GB of them in each layer, {} ms at the rate of a copy. The "
        "scores take {} ms on both sides, of {} for the whole indexer.",
        [
            lambda: f"{index_bytes() / 1e9:.1f}",
            copy_ms,
            scores_ms,
            indexer_ms,
        ],
    ),
    (
        "docs/vllm-evidence.md",
        "of decodes is {} times as fast as FlashMLA over FP8 rows, and {} times as FA3 in "
        "bfloat16. Prefills of 16 heads gain most, {} in FP8:",
        [
            lambda: attention("fp8", "decode"),
            lambda: attention("bf16", "decode"),
            lambda: attention("fp8", "prefill", (16,), 1),
        ],
    ),
    (
        "docs/vllm-evidence.md",
        "is ahead by {} us a layer with 16 and 64 requests, and by {} with 128,",
        [lambda: behind_us(16, 64), lambda: behind_us(128)],
    ),
    (
        "docs/vllm-evidence.md",
        "The exchange adds {} us for one request and {} for 128, of which the all-gather takes {} "
        "and {}.",
        [
            lambda: f"{statistics.median(added(1)):.0f}",
            lambda: span(added(128), 0),
            lambda: gathered(1),
            lambda: gathered(128),
        ],
    ),
    (
        "docs/vllm-evidence.md",
        "two ranks select faster than one with {} requests of 32K tokens, {} of 128K, or {} of 1M;",
        [lambda context=context: fewest(context) for context in CONTEXTS.values()],
    ),
    (
        "docs/sglang.md",
        "`fp8_e4m3` ({} bytes a token) and `bfloat16` ({} bytes).",
        bytes_of(FP8_DS_MLA, BF16_576),
    ),
    (
        "docs/sglang-evidence.md",
        "were within {} of the tolerance, and all selections were exact.",
        [lambda: f"{max(row['ours_error'] or 0 for row in file('sglang-h200.json')['rows']):.1f}"],
    ),
    (
        "docs/sglang-evidence.md",
        "FlashMLA over an FP8 cache is {} tolerances from the reference,",
        [
            lambda: span(
                (row["theirs_error"] for row in hooks("_forward_flashmla_kv", cache="fp8")), 1
            )
        ],
    ),
    (
        "docs/sglang-evidence.md",
        "Slower than SGLang's are selections of FP8 prefills ({} at 8K, where most rows have few "
        "keys in a wide table, and {} at 32K), {} rows of `flashmla_sparse` with 128 heads ({}), "
        "and a prefill of 128 heads with `fa3` ({}).",
        [
            *(
                lambda context=context: f"{slower('topk_transform', context=context)[0]:.2f}"
                for context in (8192, 32768)
            ),
            lambda: str(len(slower("_forward_flashmla_sparse"))),
            lambda: span(slower("_forward_flashmla_sparse", heads=128)),
            lambda: joined(f"{ratio:.2f}" for ratio in slower("_forward_fa3", heads=128)),
        ],
    ),
    (
        TRAINING_OPS,
        "cases of `sparsemla verify` for both pass on an H200 ({}), as did",
        [lambda: commit_of("h200")],
    ),
    (
        TRAINING_OPS,
        "`max_workspace_bytes`, {} GiB by default,",
        [lambda: str(MAX_WORKSPACE_BYTES >> 30)],
    ),
    (
        TRAINING_OPS,
        "`K (4 H + 2 D + {})` bytes in bfloat16: {} MB with 128 heads, 576 dims and 2048 entries.",
        [
            lambda: str(ENTRY_BYTES),
            lambda: f"{2048 * (4 * 128 + 2 * 576 + ENTRY_BYTES) / 1e6:.1f}",
        ],
    ),
    (
        "docs/dsa.md",
        "- {} MB of index keys and {} MB of selected rows with DSA, - {} MB of rows with dense",
        [
            lambda: f"{CONTEXTS['128K'] * INDEX_FP8.bytes_per_token / 1e6:.1f}",
            lambda: f"{2048 * FP8_DS_MLA.bytes_per_token / 1e6:.1f}",
            lambda: f"{CONTEXTS['128K'] * FP8_DS_MLA.bytes_per_token / 1e6:.1f}",
        ],
    ),
    (
        "docs/dsa.md",
        "a token costs {} bytes instead of {}.",
        [
            lambda: str(FP8_DS_MLA.bytes_per_token + INDEX_FP8.bytes_per_token),
            *bytes_of(FP8_DS_MLA),
        ],
    ),
    (
        "docs/dsa.md",
        "the selection holds at least {} of the attention",
        [lambda: found_by("lists hold 0.95 of what the best could")[0]],
    ),
    (
        TRAINING,
        "A list takes {} KiB per token and layer with an indexer, for a top-k of 2048.",
        [lambda: str(4 * 2048 >> 10)],
    ),
    (
        TRAINED,
        "trains a DeepSeek-V3.2 of {} million weights ({} layers, {} heads, 512 + 64 latent dims, "
        "{} index heads of 128 dims)",
        [
            lambda: f"{sum(file('train-dsa-h200.jsonl')[0]['parameters']) / 1e6:.1f}",
            lambda: str(trained().config.num_hidden_layers),
            lambda: str(trained().config.num_attention_heads),
            lambda: str(trained().config.index_n_heads),
        ],
    ),
    (
        TRAINED,
        "then the whole model with {} selected rows of up to {}.",
        [
            lambda: str(trained().config.index_topk),
            lambda: str(trained().phases[-1].length),
        ],
    ),
    (
        TRAINED,
        "all stages took {} minutes: | stage | steps | ms a step | |---|---|---| "
        "| dense | {} | {} | | warm-up | {} | {} | | sparse | {} | {} | | control | {} | {} |",
        [
            minutes,
            *(
                figure
                for stage in ("dense", "warm-up", "sparse", "control")
                for figure in (
                    lambda stage=stage: str(last(stage)["step"] + 1),
                    lambda stage=stage: f"{last(stage)['seconds'] * 1e3:.0f}",
                )
            ),
        ],
    ),
    (
        TRAINED,
        "A step of the sparse stage has {} bytes, one of the dense stage between {} and {}.",
        [
            lambda: f"{trained().phases[-1].tokens:,}",
            lambda: f"{min(phase.tokens for phase in trained().phases):,}",
            lambda: f"{max(phase.tokens for phase in trained().phases):,}",
        ],
    ),
    (
        TRAINED,
        "over {} rows of {} bytes from files that no stage has read;",
        [lambda: str(trained().eval_rows), lambda: str(trained().phases[-1].length)],
    ),
    (
        TRAINED,
        "The selected rows hold at least {} of the attention",
        [lambda: found_by("lists hold 0.95 of what the best could")[0]],
    ),
    (
        TRAINED,
        "The warm-up lowers the divergence of the indexer from {} to {}, the sparse stage from {} "
        "to {}.",
        [
            *divergence("warm-up lowers KL below 0.3"),
            *divergence("KL does not rise afterwards"),
        ],
    ),
    (
        TRAINED,
        "the forward pass takes {} FLOP and the backward pass {}, at 576 dims.",
        [
            lambda: str(int(SparsePrefill(1, 9, 1, 576, 1).flop)),
            lambda: str(backward_flop()),
        ],
    ),
    (
        TRAINED,
        "(192 and 128 dims) takes {} for each visible token.",
        [lambda: str(dense_backward_flop())],
    ),
    (
        TRAINED,
        "fewer FLOP from a mean context of {} tokens, a causal sequence of {}.",
        [
            lambda: f"{round(mean_context() / 100) * 100}",
            lambda: f"{round(2 * mean_context() / 100) * 100}",
        ],
    ),
    (
        TRAINED,
        "the FLOP of one layer are equal at {} tokens. With the indexer's scores, target and "
        "gradients on the sparse side, they are at {} for 128 heads and at {} for 64.",
        [
            lambda: equal_flop(128, 0),
            lambda: equal_flop(128, 1),
            lambda: equal_flop(64, 1),
        ],
    ),
    *(
        (name, words, [lambda: crosses(128), lambda: crosses(64)])
        for name, words in (
            (TRAINED, "The times cross at {} tokens with 128 heads and at {} with 64,"),
            (TRAINING, "up to a sequence of {} tokens with 128 heads and {} with 64,"),
        )
    ),
    (
        TRAINED,
        "with 32K tokens sparse attention is {} and {} times as fast.",
        [lambda heads=heads: f"{lengths(heads)[32768].ratio:.1f}" for heads in (128, 64)],
    ),
    (
        TRAINED,
        "with 16K and 32K tokens cuDNN's dense kernels reach {} TFLOP/s, ours {} with 64 heads "
        "and {} with 128,",
        [
            lambda: span((rate for heads in (64, 128) for rate in cudnn_rates(heads)), 0),
            *(
                lambda heads=heads: span((lengths(heads)[each].tflops for each in LONG), 0)
                for heads in (64, 128)
            ),
        ],
    ),
    (
        TRAINED,
        "ms of forward and backward (a3b6499, 128 heads of 2K tokens {}, 32K tokens {});",
        [
            lambda: lengths(128)[2048].commit[:7],
            lambda: lengths(128)[32768].commit[:7],
        ],
    ),
    (
        "docs/transformers.md",
        "# 2 layers of {} bytes and of {} for the indexer",
        bytes_of(BF16_576, INDEX_BF16),
    ),
    (
        "docs/transformers.md",
        '`cache_format="fp8_ds_mla"` stores {} bytes per token and layer instead of {}.',
        bytes_of(FP8_DS_MLA, BF16_576),
    ),
    (
        "docs/quickstart/transformers.md",
        "# layers, formats, 2 x ({} + {}) =",
        bytes_of(FP8_DS_MLA, INDEX_FP8),
    ),
    (
        "docs/quickstart/transformers.md",
        "one latent row per token and layer in pages, {} bytes in FP8 or {} in bfloat16,",
        bytes_of(FP8_DS_MLA, BF16_576),
    ),
    (
        "docs/quickstart/other-gpus.md",
        "# about {} cases",
        [lambda: str(round(sum(map(len, MATRIX.values())), -1))],
    ),
    (
        "docs/verification.md",
        "- {} reruns give the same bits;",
        [lambda: {20: "twenty"}[RERUNS]],
    ),
    (
        "docs/verification.md",
        "Tests on a CPU find {} mutants, and CI runs them in six turns, one a commit. "
        "Of Hopper's kernels there are {}:",
        [lambda: str(len(mutants.CPU_MUTANTS)), lambda: str(len(mutants.GPU_MUTANTS))],
    ),
    (
        "docs/verification.md",
        "instructions (`tests/mutants.py --ampere`) there are {}, which quick cases find on a CPU.",
        [lambda: str(len(mutants.AMPERE_MUTANTS))],
    ),
    (
        "docs/verification.md",
        "Of layers in vLLM (`--vllm`) there are {}, which tests of vLLM find",
        [lambda: str(len(mutants.VLLM_MUTANTS))],
    ),
]


@pytest.mark.parametrize(
    ("name", "words", "figures"), CLAIMS, ids=[f"{name}-{words[:40]}" for name, words, _ in CLAIMS]
)
def test_figures_are_those_of_the_files(name: str, words: str, figures: Figures) -> None:
    check_claim(name, words, figures)


@pytest.mark.parametrize(
    ("label", "op", "cases", "peer", "device"), SINGLE, ids=[label for label, *_ in SINGLE]
)
def test_single_ops_of_deepseek_v4(
    label: str, op: str, cases: list[str], peer: str, device: str
) -> None:
    lines = table_after(page(V4_TIMES), "| op | size | floor | ours | vLLM | ratio | reason |")
    (line,) = (line for line in lines if line.startswith(label))
    found = [measured(op, case, peer, device) for case in cases]
    newer = {*decodes(64, 512), selection(16, 1 << 17, 512)}
    for row in found:
        commit = "bd61e79" if row.case in newer else "8900f77"
        assert row.commit[:7] == (commit if device == "h200" else "7005c76")
    floors = joined(us(row.floor_us) for row in found)
    if " to " in cells(line)[2]:
        floors = f"{us(found[0].floor_us)} to {us(found[-1].floor_us)}"
    assert cells(line)[2:6] == [
        floors,
        joined(us(row.ours_us) for row in found),
        joined(us(row.peer_us) for row in found),
        joined(f"{row.ratio:.2f}" for row in found),
    ]


def test_the_single_ops_are_all_read() -> None:
    lines = table_after(page(V4_TIMES), "| op | size | floor | ours | vLLM | ratio | reason |")
    assert len(lines) == len(SINGLE)


def test_decode_steps_of_deepseek_v4() -> None:
    """But for the times before, of a commit without a file."""
    lines = table_after(
        page(V4_TIMES), "| layer | heads | requests | floor | before | now | vLLM | ratio |"
    )
    layer, seen = "", set()
    for named, heads, batch, floor, _, *figures in map(cells, lines):
        layer = named or layer
        row = step(layer, int(heads), int(batch))
        assert row.commit[:7] == ("59c84e0" if layer == "128 tokens" else "8900f77")
        times = [us(row.ours_us), us(row.peer_us), f"{row.ratio:.2f}"]
        assert [floor, *figures] == [us(row.floor_us), *times]
        seen.add(row.case)
    contexts = [row for row in rows("h200") if row.op == "compressed_decode_step"]
    assert seen == {row.case for row in contexts if row.shape["context"] == 1 << 17}


def test_memory_of_deepseek_v4() -> None:
    header = "| | V4-Flash, FP8 | V4-Flash, bf16 | V4-Pro, FP8 | V4-Pro, bf16 |"
    kinds, *lines = map(cells, table_after(page(V4), header))
    shown = {name: values for name, *values in lines}
    formats = ((FP8_584, INDEX_FP8), (BF16_512, INDEX_BF16)) * 2
    for at, (rows_in, keys_in) in enumerate(formats):
        window, csa, hca = map(int, kinds[1 + at].split(", "))
        row, key = rows_in.bytes_per_token, keys_in.bytes_per_token
        token = csa * (row + key) / 4 + hca * row / 128
        request = (
            window * ring_bytes(row)
            + csa * ring_bytes(row, (512, 128), 4)
            + hca * ring_bytes(row, (512,), 128)
        )
        medium, long = (request + token * CONTEXTS[name] for name in ("128K", "1M"))
        medium_mib = medium / 2**20
        assert [values[at] for values in shown.values()] == [
            f"{token:.0f}",
            f"{request / 2**20:.1f} MiB",
            f"{round(medium_mib, -1) if medium_mib >= 1000 else medium_mib:.0f} MiB",
            f"{long / 2**30:.1f} GiB",
        ]


def test_what_a_layer_of_deepseek_v4_keeps_and_reads() -> None:
    """The table of the demo, from the sizes of rows, entries and rings."""
    row, key = FP8_584.bytes_per_token, INDEX_FP8.bytes_per_token
    lengths = [1 << 10, 1 << 12, 1 << 14, 1 << 16]
    expected = [
        ["window only", 0, ring_bytes(row), *(128 for _ in lengths)],
        [
            "CSA",
            (row + key) / 4,
            ring_bytes(row, (512, 128), 4),
            *(128 + min(512, length // 4) for length in lengths),
        ],
        ["its index keys, scored", None, None, *(length // 4 for length in lengths)],
        [
            "HCA",
            row / 128,
            ring_bytes(row, (512,), 128),
            *(128 + length // 128 for length in lengths),
        ],
        ["DeepSeek-V3.2's rows, all of them", FP8_DS_MLA.bytes_per_token, 0, *lengths],
    ]
    header = (
        "| layer | bytes of a token | KiB of a request | rows after 1K | 4K | 16K | 64K tokens |"
    )
    shown = [cells(line) for line in table_after(page(V4), header)]
    assert shown == [
        [
            name,
            "" if token is None else f"{token:.1f}".removesuffix(".0"),
            "" if request is None else f"{request / 1024:.0f}",
            *map(str, counts),
        ]
        for name, token, request, *counts in expected
    ]


def test_the_exchange_of_two_gpus() -> None:
    header = (
        "| context | requests | scores and top-k of a part | with the exchange "
        "| one GPU, whole contexts |"
    )
    shown = [cells(line) for line in table_after(page("docs/vllm-evidence.md"), header)]
    assert shown == [
        [
            name,
            joined(map(str, exchange(context, "local"))),
            *(
                joined(f"{time:.0f}" for time in exchange(context, part).values())
                for part in ("local", "selection", "alone")
            ),
        ]
        for name, context in CONTEXTS.items()
    ]


def test_selections_beside_sglang_are_exact() -> None:
    found = hooks("topk_transform")
    assert found
    assert all(row["rows"] == row["equal"] == row["ours_exact"] for row in found)


def test_the_table_of_the_trained_model() -> None:
    names = [
        "dense control",
        "sparse",
        "sparse, FP8 cache",
        "exported weights, FP8 cache",
        "sparse, 128 rows",
        "warmed-up indexer only",
        "last rows",
        "random rows",
        "untrained indexer",
    ]
    found = [file("train-dsa-h200.json")[name] for name in names]
    lines = table_after(page(TRAINED), "| each byte attends to | loss | last quarter | recall |")
    assert [cells(line.replace("**", ""))[1:] for line in lines] == [
        [
            f"{row['loss']:.4f}",
            f"{row['by_quarter'][-1]:.4f}",
            f"{100 * row['recall']['4096']:.1f}%".replace(".0%", "%"),
        ]
        for row in found
    ]
    # Shares of 768 values.
    (values,) = re.findall(r"of (\d+) at 4096 bytes", page(TRAINED))
    for row in found:
        values_found = row["recall"]["4096"] * int(values)
        assert math.isclose(values_found, round(values_found), abs_tol=1e-3)


def test_times_of_training_attention() -> None:
    header = "| tokens | dense, 64 heads | sparse | dense, 128 heads | sparse | with the indexer |"
    few, many, indexed = lengths(64), lengths(128), lengths(128, indexer=1)
    assert table_after(page(TRAINED), header) == [
        f"| {tokens} | {few[tokens].peer_us / 1e3:.1f} | {few[tokens].ours_us / 1e3:.1f} "
        f"| {many[tokens].peer_us / 1e3:.1f} | {many[tokens].ours_us / 1e3:.1f} "
        f"| {f'{indexed[tokens].ours_us / 1e3:.1f}' if tokens in indexed else 'not measured'} |"
        for tokens in sorted(few)
    ]
    commits = {
        (heads, tokens): row.commit[:7]
        for heads, found in ((64, few), (128, many), (128, indexed))
        for tokens, row in found.items()
    }
    others = {size for size, commit in commits.items() if commit != "a3b6499"}
    assert others == {(128, 2048), (64, 32768), (128, 32768)}


def test_counts_of_the_batching_example(capsys: pytest.CaptureFixture[str]) -> None:
    """But for the times, which are those of a machine."""
    import batching

    batching.main()
    printed = capsys.readouterr().out
    shown = page("docs/batching.md")

    def counts(text: str) -> list[object]:
        totals = r"(together|one by one): (\d+) steps, (\d+) tokens computed, (\d+) generated"
        requests = re.findall(r"^ +(\d+ +\d+ +\d+ +\d+ +\d+ +\d+) ", text, re.MULTILINE)
        equal = re.findall(r"same tokens together as alone: .*", text)
        return [[each.split() for each in requests], re.findall(totals, text), equal]

    assert counts(shown) == counts(printed)
    assert all(counts(shown))


def test_the_loss_of_rows_of_368_bytes() -> None:
    file = json.loads((DATA / "row-loss.json").read_text(encoding="utf-8"))
    lines = [
        f"| {row['rows']} | {row['bytes']} | {row['loss']:.4f} "
        f"| {row['more']:.4f} ± {row['standard_error']:.4f} | {row['recall']:.1%} |"
        for row in file["rows"]
    ]
    text = page("docs/formats.md")
    assert table_after(text, "| rows | bytes | nats a byte |") == lines
    _, fp8, fp4 = file["rows"]
    text = " ".join(text.split())
    assert f"{fp4['more'] / fp8['more']:.1f} times what rows of 656 bytes cost" in text
    assert f"{fp8['bytes'] / fp4['bytes']:.2f} times the tokens of 656" in text
    assert f"The loss is over {file['texts']} held-out texts of {file['length']} bytes" in text
    assert f"recall is of {fp4['values']} hidden values" in text


MODELS = "docs/models.md"
RAN_ON_H200 = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa", "deepseek_v4", "glm5_next")
"""Types whose tests ran on a GPU, as the pages say that the table links."""


def model_rows(header: str) -> list[list[str]]:
    found = [cells(line) for line in table_after(page(MODELS), header)]
    return [[cell.strip("`") for cell in row] for row in found]


def test_the_models_of_transformers() -> None:
    """The table has every type, since the version that has it, with the tests that run it."""
    transformers = pytest.importorskip("transformers")
    from sparsemla.backends.transformers.attention import LAYERS, NOT_SERVED
    from sparsemla_lab.testing.models import CLASSES
    from test_transformers_models import MODELS as SMALL

    proofs = {
        "tests/test_transformers_models.py": SMALL,
        "tests/test_transformers.py": CLASSES,
        "tests/test_transformers_glm5.py": ["glm5_next"],
        "tests/test_transformers_v4.py": ["deepseek_v4"],
    }
    names = {each if each in SMALL else each.removesuffix("_text") for each in LAYERS}
    table = model_rows("| models | `model_type` |")
    assert sorted(row[1] for row in table) == sorted(names | {"kimi_k25"})
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    for _, model_type, since, _, where, proof in table:
        oldest = tuple(map(int, since.split(".")))
        assert (model_type in transformers.CONFIG_MAPPING) == (version >= oldest), model_type
        assert model_type in proofs[proof], model_type
        ran = model_type in RAN_ON_H200
        assert where == "CPU" or (ran and where.startswith("CPU, [H200](")), model_type
    assert {row[1] for row in table[:-2]} == SMALL.keys()
    refused = {row[0]: row[2] for row in model_rows("| model | where |") if row[1] != "vLLM"}
    assert refused.items() >= NOT_SERVED.items()


def test_the_models_of_engines() -> None:
    """The tables have the architectures that the plugins register, and the refused ones."""
    from sparsemla.backends.vllm import NVIDIA_MODELS, V4_MODELS
    from sparsemla.backends.vllm.settings import GLM5_NEXT, HY_V4, OWN_ATTENTION

    def base(architectures: Iterable[str]) -> set[str]:
        """Without models that draft, which come with another one."""
        return {each for each in architectures if not re.search("MTP|Draft", each)}

    table = model_rows("| models | architecture |")
    served = {row[2]: {other[1] for other in table if other[2] == row[2]} for row in table}
    assert served == {
        "vLLM 0.33": base(NVIDIA_MODELS) | base(V4_MODELS) | base(GLM5_NEXT[1:]) | base(HY_V4),
        "SGLang 0.5.23": base(NVIDIA_MODELS) | base(GLM5_NEXT[1:]) | base(HY_V4),
    }
    for _, architecture, _, command, _, proof in table:
        words, link = re.fullmatch(r"\[`(.+)`\]\((.+?)(?:#.+)?\)", command).groups()
        assert words in page(f"docs/{link}"), architecture
        assert architecture in page(proof), architecture
    table = model_rows("| model | where |")
    refused = {row[0]: row[2] for row in table if row[1] == "vLLM"}
    for architecture in base(OWN_ATTENTION):
        assert refused[architecture] == OWN_ATTENTION[architecture]
    refused = {row[0]: row[2] for row in table if row[1] == "SGLang"}
    assert refused["Dots3NoteForCausalLM"] in page("src/sparsemla/backends/sglang/settings.py")


def test_rows_on_the_host() -> None:
    found, text = file("host-rows-h200.json"), page("docs/long-contexts-evidence.md")
    of = {(row["context"], row["process"], row["batch"]): row for row in found["rows"]}
    for name, process in (("of a trained model", "trace"), ("random walk, 85% kept", "walk 0.85")):
        for batch in (1, 8, 16):
            row = of[131072, process, batch]
            times = f"{row['resident_us']:.0f} | {row['host_us']:.0f}"
            ratio = row["host_us"] / row["resident_us"]
            line = f"| {name} | {batch} | {row['misses']:.0%} | {times} | {ratio:.1f} |"
            assert line in text
    one, eight = (of[1 << 20, "walk 0.85", batch] for batch in (1, 8))
    assert (
        f"one request takes {one['host_us']:.0f} us for {one['resident_us']:.0f}, eight take "
        f"{eight['host_us']:.0f} for {eight['resident_us']:.0f}."
    ) in text
    for context, name in ((131072, "128K"), (1 << 20, "1M")):
        both = [
            f"{row['resident_ms']:.1f} | {row['host_ms']:.1f} | "
            f"{row['resident_ms'] / row['host_ms']:.2f}"
            for row in sorted(found["prefills"], key=lambda row: row["selects"])
            if row["context"] == context
        ]
        assert f"| {name} | {' | '.join(both)} |" in text


def test_steps_of_an_engine_by_where_rows_are() -> None:
    text = page("docs/vllm-host.md")
    names = {
        "gpu": "on the GPU",
        "host": "**`HostRowsConnector`**",
        "hisparse": "HiSparse, both plugins",
        "stock": "HiSparse, vLLM alone",
    }
    rates: dict[tuple[str, int], float] = {}
    for row in file("places-h200.json"):
        place, batch = row["place"], row["batch"]
        if "refused" in row:
            assert (batch, place in ("hisparse", "stock")) == (16, True)
            assert row["refused"].startswith("16 requests must run at once, got 8,")
            continue
        rates[place, batch] = row["tokens_per_s"]
        times = f"{row['wall_ms']:.2f} | {row['gpu_ms']:.2f} | {row['tokens_per_s']:.0f}"
        assert f"| {names[place]} | {batch} | {times} |" in text
    ratios = span((rates["host", n] / rates["hisparse", n] for n in (1, 8)), 1)
    assert f"decodes {ratios} times as many tokens per second as HiSparse" in text
    shares = rates["host", 16] / rates["gpu", 16], rates["host", 8] / rates["hisparse", 8]
    evidence = page("docs/long-contexts-evidence.md")
    assert (
        f"decoded 16 requests of 32K tokens at {shares[0]:.2f} of the rate of resident" in evidence
    )
    assert f"was {shares[1]:.1f} times as fast as vLLM's HiSparse" in evidence
    missed = [row["missed_rows"] for row in file("places-h200.json") if row["place"] == "host"]
    assert f"misses {span(missed, 0)} in a step" in text


def test_gradients_and_steps_beside_other_kernels() -> None:
    found = file("gradients-h200.json")
    text = page("docs/kernels/attention-backward.md")
    cases: dict[str, dict[str, float]] = {}
    for row in found["gradients"]:
        cases.setdefault(row["case"], {})[row["side"]] = row["us"] / 1e3
    for case, ms in cases.items():
        ours, two, gym = (ms.get(side) for side in ("ours", "ours, lists of 2", "attention-gym"))
        assert ours is not None
        assert abs(ms["ours, any order"] / ours - 1) < 0.01
        assert gym is None or 94 <= round(gym) <= 98
        cells = [f"{ours:.1f}", f"{two:.1f}" if two else ""]
        for side in ("cuDNN", "TileLang"):
            cells += [f"{ms[side]:.1f}", f"{ms[side] / ours:.2f}"] if side in ms else ["", ""]
        line = " | ".join([case, *cells])
        assert f"| {line} |".replace("|  ", "| ").replace("|  ", "| ") in text
    text = page(TRAINED)
    steps = {(row["case"], row["side"]): row for row in found["steps"] if "ms" in row}
    for (case, side), row in steps.items():
        if side != "ours":
            continue
        heads, _, tokens = (int(part) for part in re.findall(r"(\d+) ", case))
        other = steps[case, "cuDNN"]
        both = (f"{one['ms']:.1f} | {one['peak_gib']:.1f}" for one in (row, other))
        ratio = f"{other['ms'] / row['ms']:.2f}"
        parts = ", ".join(f"{ms:.1f}" for ms in row["parts_ms"].values())
        line = " | ".join([f"{heads}, {tokens // 1024}K", *both, ratio, parts])
        assert f"| {line} |" in text

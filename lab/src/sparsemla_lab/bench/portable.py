"""The workloads that compare portable kernels, on the GPU at hand or acting as an older one."""

from __future__ import annotations

from dataclasses import replace

from sparsemla.formats import BF16_576, FP8_DS_MLA
from sparsemla_lab.bench import report
from sparsemla_lab.bench.step import DecodeStep
from sparsemla_lab.bench.workloads import (
    CachedPrefill,
    DenseDecode,
    HeadProducts,
    IndexerScores,
    IndexerScoresPaged,
    IndexerTopk,
    SparseDecode,
    SparsePrefill,
    WindowedDecode,
    WindowedPrefill,
    Workload,
)

BATCHES = 1, 16, 128
CONTEXT = 32768


def portable_workloads() -> list[Workload]:
    """Few enough for one run of some minutes, with the sizes at which portable kernels differ."""
    few = 8, 16, 64, 128
    return [
        *(
            SparseDecode(batch, 1, heads, CONTEXT, 2048, format=BF16_576)
            for batch in BATCHES
            for heads in few
        ),
        *(SparsePrefill(2048, CONTEXT, heads, 576, 2048) for heads in few),
        *(SparsePrefill(2048, CONTEXT, heads, 512, 512) for heads in few[1:3]),
        *(SparseDecode(batch, 1, heads, CONTEXT, 2048) for batch in BATCHES for heads in few[1:]),
        *(CachedPrefill(2048, CONTEXT, heads, 2048) for heads in few[1:]),
        *(
            WindowedDecode(batch, 1, heads, 128, 128, extra_context=CONTEXT, extra_topk=512)
            for batch in BATCHES
            for heads in few[1:]
        ),
        *(WindowedPrefill(2048, heads, 8192, 512) for heads in few[1:]),
        *(
            DenseDecode(128, 1, heads, 8192, format)
            for format in (BF16_576, FP8_DS_MLA)
            for heads in (16, 128)
        ),
        IndexerScores(4096, CONTEXT),
        IndexerScoresPaged(128, 1, CONTEXT),
        IndexerScoresPaged(1, 1, 131072),
        IndexerTopk(1, 4096, CONTEXT, 2048),
        IndexerTopk(1, 8192, 8192, 2048),
        IndexerTopk(128, 1, CONTEXT, 2048),
        *(
            HeadProducts(tokens, 128, *sizes, layers=10)
            for sizes in ((128, 512), (512, 128))
            for tokens in BATCHES
        ),
        *(DecodeStep(batch, heads, CONTEXT, 1) for heads in (128, 16) for batch in BATCHES),
    ]


def portable_table(found: report.Report) -> str:
    """Of each workload of the set a row with the fastest peer, if another package has one."""
    measured: dict[tuple[str, str, str], list[report.Row]] = {}
    for row in found.rows:
        measured.setdefault(row.workload, []).append(row)
    workloads = [(each.op, each.case, each.label) for each in portable_workloads()]
    rows = [_fastest(measured[workload]) for workload in workloads if workload in measured]
    runs = dict.fromkeys(f"{row.date} at commit {row.commit}" for row in rows)
    lines = [
        f"{report.ceiling_line(found)} Measured {', '.join(runs)}.",
        "",
        "| op | case | us | % of floor | fastest peer | peer us | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        op, case, us, _, *rest = report.cells(row)
        lines.append(f"| {' | '.join((f'`{op}`', case, us, *rest))} |")
    return "\n".join(lines)


def _fastest(rows: list[report.Row]) -> report.Row:
    """The row of the newest run with the fastest peer that is not a variant of this package."""
    first = rows[0]  # rows of earlier runs follow those of the newest
    others = [
        row
        for row in rows
        if (row.commit, row.date) == (first.commit, first.date)
        and row.peer_us is not None
        and not str(row.peer).startswith("sparsemla")
    ]
    alone = replace(
        first, peer=None, peer_us=None, peer_spread_us=None, peer_timed=None, ratio=None
    )
    return min(others, key=lambda row: row.peer_us or 0.0, default=alone)

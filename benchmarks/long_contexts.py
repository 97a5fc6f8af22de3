"""Predict decode steps over long contexts on 1 to 8 GPUs of a host, and on several hosts.

Nothing is measured here. Bytes come from the calculator of capacity. Times of a layer are sums of
the terms below; each constant says where it is from. Every rank of a context-parallel group has a
share of the index keys on its GPU and of the latent rows in its host's memory, and hot rows of
twice ``index_topk``.

Also predicted: what ``torchrun benchmarks/host_rows.py`` measures, a layer over host rows beside
the same over resident rows, where ranks share contexts.

Run ``python benchmarks/long_contexts.py`` for both tables of docs/long-contexts-evidence.md.
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import astuple, dataclass

from sparsemla_lab.capacity import capacity

TOPK, HOT, CONTEXT = 2048, 4096, 1 << 20
FORMATS = {"cache_format": "fp8_ds_mla", "index_format": "index_fp8"}
LAYERS = 61
"""DeepSeek-V3.2, all of which select."""
GPU_GIB, GPUS_OF_HOST = 40, 8
"""Free memory of a GPU beside the weights, and GPUs of a host: assumed."""

HBM = 4.0e6
"""Bytes a microsecond at which an indexer reads keys: measured, H200."""
LINK, LINK_US = 40e3, 25
"""Bytes a microsecond of a PCIe 5 link to host memory that a kernel reads rows at, and the time
until the first ones: measured, four H100s at once."""
SOCKET, SOCKETS = 250e3, 2
"""Bytes a microsecond of the memory of a socket, and sockets of a host: assumed."""
MISSES = {1: 0.417, 2: 0.156, 4: 0.054, 8: 0.019, 16: 0.019}
"""Rows that the slowest rank fetches, of those that a token selects: exact LRU over selections of
the shipped model, replayed on the CPU. That of 16 ranks is that of 8, an upper bound."""
OFFERS_US, OFFERS_REQUEST_US = 57, 0.41
"""Exchange of selections in a host, and for each request: measured, four H100s, 1 to 128."""
NCCL_US, NVLINK = 30, 387e3
"""A collective of queries or states in a host: assumed; bytes a microsecond: measured."""
NETWORK_US, NETWORK = 25, 45e3
"""The same between hosts: assumed."""
ATTENTION_US, ATTENTION_REQUEST_US = 37, 5.9
"""Attention of 128 heads over 2048 rows: measured for 1 and 16 requests, H200."""
RESOLVE_US = 7
"""The search among hot rows: predicted."""
QUERY_BYTES, STATE_BYTES = 128 * 576 * 2, 128 * 512 * 2


ALONE_US = {1: 47, 8: 65, 16: 75}
"""A layer of one GPU over resident rows, projections included: measured, H200, by requests."""
ALONE_MISSES = 0.47
"""Rows that one GPU fetches, of those that a token selects: measured, H200, the shipped model."""
PROJECTION_US = 128 * (1536 * 192 + 128 * 512) * 2 / HBM
"""The queries' projections of 128 heads: the bytes of their weights."""
HIDDEN_US = 10
"""Of a fetch, behind the queries' projections: measured, H200; it takes so much longer alone."""
START_US = 15
"""Attention's time without rows: assumed."""
LINKS = 42e3, 50e3
"""Bytes a microsecond of a link: the slowest and the fastest measured, H200."""


@dataclass(frozen=True)
class Ratio:
    """A layer over host rows beside resident ones, where ranks share contexts of 128K tokens.

    Args:
        ranks: of one host.
        requests: of a step.
        resident_us: projections, attention, and collectives of queries and partial results.
        slow_us, fast_us: a fetch, with the misses of one GPU divided and the slower link, or with
            the replayed misses and the faster link.
        slow, fast: the layer's ratio to resident rows with each.
    """

    ranks: int
    requests: int
    resident_us: float
    slow_us: float
    fast_us: float
    slow: float
    fast: float


def predict_ratio(ranks: int, requests: int) -> Ratio:
    """A fetch is hidden behind the queries: their projection, and their collective."""
    sent = requests * (ranks - 1) / ranks / NVLINK
    projections, gather = PROJECTION_US / ranks, NCCL_US + sent * QUERY_BYTES
    attention = START_US + (ALONE_US[requests] - PROJECTION_US - START_US) / ranks
    resident = projections + gather + attention + NCCL_US + sent * STATE_BYTES
    hidden = min(HIDDEN_US, projections) + gather
    missed = ALONE_MISSES / ranks, MISSES[ranks]
    fetches = [
        LINK_US + requests * TOPK * share * 656 / link
        for share, link in zip(missed, LINKS, strict=True)
    ]
    ratios = (1 + max(fetch - hidden, 0) / resident for fetch in fetches)
    return Ratio(ranks, requests, resident, *fetches, *ratios)


def ratios() -> list[str]:
    """The lines of the table of ratios."""
    lines = []
    for ranks, requests in itertools.product((2, 4), ALONE_US):
        found = predict_ratio(ranks, requests)
        times = (f"{us:.0f}" for us in (found.resident_us, found.slow_us, found.fast_us))
        both = f"{found.slow:.2f}", f"{found.fast:.2f}"
        lines.append("| " + " | ".join([str(ranks), str(requests), *times, *both]) + " |")
    return lines


@dataclass(frozen=True)
class Step:
    """A decode step of as many requests of 1M tokens as fit.

    Args:
        gpus, hosts: of one context-parallel group.
        host_gib: free memory of a host.
        requests: that fit at a time.
        wall: the memory that is full first.
        indexer_ms, attention_ms: of all layers.
        link_ms: searches among hot rows and fetches.
        exchange_ms: of selections, queries and partial results.
    """

    gpus: int
    hosts: int
    host_gib: int
    requests: int
    wall: str
    indexer_ms: float
    attention_ms: float
    link_ms: float
    exchange_ms: float

    @property
    def step_ms(self) -> float:
        """Attention layers without the rest of the model; nothing is overlapped."""
        return self.indexer_ms + self.attention_ms + self.link_ms + self.exchange_ms


def fitting(gpus: int, host_gib: float) -> int:
    """Requests that fit."""
    return capacity(
        "DeepSeek-V3.2",
        **FORMATS,
        context=CONTEXT,
        gpus=gpus,
        memory_gib=GPU_GIB,
        weights_gib=0,
        used_percent=100,
        share="context",
        host_gib=host_gib,
        rows_per_seat=HOT,
    ).requests


def predict(gpus: int, host_gib: int = 2000) -> Step:
    """A step of one group of GPUs, eight on each host."""
    hosts = -(-gpus // GPUS_OF_HOST)
    on_host, on_gpus = fitting(gpus, hosts * host_gib), fitting(gpus, 1e9)
    requests = min(on_host, on_gpus)
    ranks_of_host = gpus // hosts
    indexer = requests * CONTEXT / gpus * 132 / HBM
    attention = ATTENTION_US + ATTENTION_REQUEST_US * requests / gpus
    # All links of a socket share its memory.
    link = min(LINK, SOCKET * SOCKETS / ranks_of_host)
    fetch = RESOLVE_US + LINK_US + requests * TOPK * MISSES[gpus] * 656 / link
    moved = requests * (QUERY_BYTES + STATE_BYTES) * (gpus - 1) / gpus
    if hosts > 1:
        offers = NETWORK_US + requests * TOPK * 8 * (gpus - 1) / NETWORK
        exchange = offers + 2 * NETWORK_US + moved / NETWORK
    elif gpus > 1:
        exchange = OFFERS_US + OFFERS_REQUEST_US * requests + 2 * NCCL_US + moved / NVLINK
    else:
        exchange = 0.0
    wall = "host memory" if on_host < on_gpus else "GPU memory"
    times = (LAYERS * each / 1e3 for each in (indexer, attention, fetch, exchange))
    return Step(gpus, hosts, host_gib, requests, wall, *times)


def rows() -> list[str]:
    """The lines of the table."""
    lines = []
    for gpus, host_gib in ((1, 2000), (2, 2000), (4, 2000), (8, 2000), (8, 560), (16, 2000)):
        step = predict(gpus, host_gib)
        numbers = [
            f"{each:.1f}" if isinstance(each, float) else str(each) for each in astuple(step)
        ]
        lines.append("| " + " | ".join([*numbers, f"{step.step_ms:.1f}"]) + " |")
    return lines


if __name__ == "__main__":
    sys.stdout.write("\n".join([*rows(), "", *ratios()]) + "\n")

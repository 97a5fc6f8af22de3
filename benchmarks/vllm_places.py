"""Decode steps of vLLM's engine by where latent rows are, and with recorded selections.

The model is that of ``benchmarks/vllm_bench.py``, in vLLM's portable class: true dims, five dense
layers, random weights, 656-byte rows. Prompts are computed; then steps of decodes are timed, from
CUDA graphs.

``host`` keeps rows by this package's connector, ``hisparse`` by vLLM's, both with this package's
attention and indexer; ``stock`` is vLLM's connector with vLLM's own. These three have the same
memory on the GPU, :data:`CACHES`, in which the rows of the longest batch do not fit: ``host``
spends on hot rows what index keys leave, and vLLM's keeps pages in what its hot rows leave.
``gpu`` is the reference: all rows are on the GPU, in as much memory as they need.

All engines start at once. They are timed one after the other, once the last one is ready.

Needs vLLM 0.33 and a Hopper GPU. Run ``python benchmarks/vllm_places.py --json FILE``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import vllm_bench
import vllm_engine

CACHES = 704 << 20
"""Bytes of caches on the GPU, where rows are on the host."""
RESIDENT = 3 << 30
"""Bytes of caches on the GPU, where rows are there."""
BATCHES = (1, 8, 16)
SETTLE, TIMED, REPEATS, PROFILED = 8, 20, 3, 4
"""Decode steps until all requests decode, to time at once, how often, and to profile."""
LAYERS = 5
"""Of the model: vLLM's pool has blocks of one size, which keys of five layers and rows of one fill.

With three layers 40% of the memory of its index keys would be empty; with 61 layers 2% are.
"""
PAGE, KEY, ROW = 64, 132, 656
"""Tokens of a page, bytes of an index key and of a row."""
SPARE = 1024
"""Tokens of a request beside its prompt."""

PLACES: dict[str, dict[str, Any]] = {
    "gpu": {},
    "host": {
        "kv_connector": "HostRowsConnector",
        "kv_connector_module_path": "sparsemla.backends.vllm.host",
        "kv_connector_extra_config": {"host_gib": 8},
    },
    "hisparse": {
        "kv_connector": "HiSparseConnector",
        "kv_connector_extra_config": {"host_pool_gib": 8},
    },
    "stock": {
        "kv_connector": "HiSparseConnector",
        "kv_connector_extra_config": {"host_pool_gib": 8},
    },
    "records": {
        "kv_connector": "RecordsConnector",
        "kv_connector_module_path": "sparsemla.backends.vllm.recording",
        "kv_connector_extra_config": {"model": "deepseek_v32", "host_gib": 8},
    },
}
"""Connectors of vLLM: where rows are, or what is recorded."""


def shares(longest: int, seats: int) -> tuple[int, int]:
    """Blocks of index keys for so many requests, and the hot rows of each in what is left.

    >>> blocks, rows = shares(32768 + SPARE, 16)
    >>> blocks * PAGE * KEY * LAYERS + 16 * rows * ROW * LAYERS <= CACHES
    True
    """
    blocks = seats * -(-longest // PAGE) + 2 * seats
    left = CACHES - blocks * PAGE * KEY * LAYERS
    return blocks, left // (seats * ROW * LAYERS) // PAGE * PAGE


def model_config(heads: int, longest: int) -> dict[str, Any]:
    """The configuration of the model, for transformers: dense layers."""
    config = vllm_bench.model_config(heads, 0, longest)
    return config | {"num_hidden_layers": LAYERS, "first_k_dense_replace": LAYERS}


class Engine(vllm_bench.Engine):
    """vLLM's engine with one of these connectors.

    Args:
        place: of :data:`PLACES`.
        heads: of the model.
        longest: most tokens of a request.
        folder: for the model's configuration and for records.
    """

    def __init__(self, place: str, heads: int, longest: int, folder: Path) -> None:
        from vllm import LLM

        vllm_engine.serve_portable_class()
        model = folder / f"model-{heads}"
        model.mkdir(parents=True, exist_ok=True)
        (model / "config.json").write_text(json.dumps(model_config(heads, longest)))
        connector = PLACES[place] | {"kv_role": "kv_both"} if PLACES[place] else None
        blocks = None
        if connector is not None:
            more = dict(connector["kv_connector_extra_config"])
            if place == "records":
                more["folder"] = str(folder / "records")
            if place == "host":
                blocks, more["rows_per_seat"] = shares(longest, max(BATCHES))
            connector["kv_connector_extra_config"] = more
        llm = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            kv_cache_dtype="fp8_ds_mla",
            attention_config={
                "backend": "FLASHMLA_SPARSE" if place == "stock" else "CUSTOM",
                "sparse_mla_force_mqa": True,
            },
            max_model_len=longest,
            max_num_batched_tokens=vllm_bench.CHUNK,
            max_num_seqs=max(BATCHES),
            block_size=64,
            kv_cache_memory_bytes=RESIDENT if place in ("gpu", "records") else CACHES,
            gpu_memory_utilization=0.15,  # of each engine; vLLM asks whether so much is free
            enable_prefix_caching=False,
            kernel_config={"enable_jit_warmup": False},  # each size runs before it is timed
            compilation_config={
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": list(BATCHES),
            },
            kv_transfer_config=connector,
            num_gpu_blocks_override=blocks,
        )
        self.engine, self.count, self.place = llm.llm_engine, 0, place
        self.blocks = self.engine.vllm_config.cache_config.num_gpu_blocks

    def measure(self, batch: int, context: int) -> dict[str, Any]:
        """Steps of so many requests, whose prompts have been computed.

        Raises:
            RuntimeError: not all requests run at once.
        """
        prefills = 2 * batch * -(-context // vllm_bench.CHUNK) + 8  # at most
        steps = SETTLE + REPEATS * TIMED + PROFILED
        names = [self.add("computed", context, steps + prefills) for _ in range(batch)]
        began = time.perf_counter()
        for _ in range(prefills):
            if all(one.num_computed_tokens >= context for one in self.requests()):
                break
            self.engine.step()
        prefill = time.perf_counter() - began
        self.all_run(batch)
        self.steps(SETTLE)
        before = self.fetched()
        times = [self.steps(TIMED) for _ in range(REPEATS)]
        missed = (self.fetched() - before) / (REPEATS * TIMED * batch * LAYERS)
        launches = self.profile(lambda: self.steps(PROFILED))
        self.all_run(batch)
        self.engine.abort_request(names, internal=True)
        self.finish()
        wall = statistics.median(times)
        return {
            "batch": batch,
            "context": context,
            "prefill_s": prefill,
            "wall_ms": wall,
            "times_ms": times,
            "gpu_ms": vllm_bench.busy(launches) / PROFILED,
            "tokens_per_s": batch * 1e3 / wall,
            "missed_rows": missed,
        }

    def all_run(self, batch: int) -> None:
        """Raise an error unless so many requests decode in each step."""
        scheduler = self.engine.engine_core.engine_core.scheduler
        waiting, running = len(scheduler.waiting), len(scheduler.running)
        preempted = sum(one.num_preemptions for one in self.requests())
        if (running, waiting, preempted) != (batch, 0, 0):
            raise RuntimeError(
                f"{batch} requests must run at once, got {running}, {waiting} that wait, and "
                f"{preempted} preemptions"
            )

    def fetched(self) -> int:
        """Rows that this package's connector has fetched for decodes, in all layers; else 0."""
        if self.place != "host":
            return 0
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return int(get_kv_transfer_group().hot.stats().misses)

    def requests(self) -> list[Any]:
        """Those that vLLM's scheduler knows."""
        core = self.engine.engine_core.engine_core
        return list(core.scheduler.requests.values())


def measure(place: str, heads: int, contexts: list[int], folder: Path, lines: Path) -> None:
    """All rows of a place, once it is this one's turn."""
    os.environ |= {
        "VLLM_PLUGINS": "sparsemla" if place == "stock" else vllm_bench.BOTH,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
    }
    engine = Engine(place, heads, max(contexts) + SPARE, folder)
    (folder / f"{place}.ready").touch()
    while not (folder / f"{place}.turn").exists():
        time.sleep(0.1)
    for context in contexts:
        for batch in BATCHES:
            row = {"place": place, "heads": heads, "blocks": engine.blocks}
            row |= {"batch": batch, "context": context}
            try:
                row |= engine.measure(batch, context)
            except RuntimeError as error:
                row["refused"] = str(error)
            with lines.open("a") as out:
                out.write(json.dumps(vllm_bench.rounded(row)) + "\n")
            if "refused" in row:
                break


def tell(row: dict[str, Any]) -> str:
    """A row in words."""
    text = f"{row['place']}, {row['batch']} x {row['context']}: "
    if "refused" in row:
        return text + row["refused"]
    text += f"{row['wall_ms']:.2f} ms a step, {row['gpu_ms']:.2f} on the GPU, "
    text += f"{row['tokens_per_s']:.0f} tokens a second; prompts {row['prefill_s']:.1f} s"
    if row["missed_rows"]:
        text += f"; {row['missed_rows']:.0f} of 2048 rows of a list fetched"
    return text


def main() -> int:
    """Measure every place in a process of its own; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--folder", type=Path, default=Path("vllm-places"), help="logs and rows")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--contexts", nargs="+", type=int, default=[32768])
    parser.add_argument("--limit", type=float, default=400, help="seconds for all")
    parser.add_argument("--measure", choices=PLACES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / "rows.jsonl"
    if arguments.measure:
        measure(arguments.measure, arguments.heads, arguments.contexts, folder, lines)
        return 0
    lines.unlink(missing_ok=True)
    command = [sys.executable, __file__, "--folder", str(folder), "--heads", str(arguments.heads)]
    command += ["--contexts", *map(str, arguments.contexts)]
    good = take_turns(command, arguments.places, folder, lines, arguments.limit)
    if arguments.json:
        rows = vllm_bench.read_lines(lines)
        arguments.json.write_text(
            "[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n"
        )
    return int(not good)


def take_turns(
    command: list[str], places: list[str], folder: Path, lines: Path, limit: float
) -> bool:
    """Start all places, give each its turn when all are ready, and tell what comes.

    Nothing else is on the GPU during a turn but the caches of engines that wait. A place that has
    not started after two thirds of the time does not get a turn.

    Returns:
        Whether all had a turn and ended well.
    """
    began, seen, bad = time.monotonic(), 0, set[str]()
    running = {}
    for place in places:
        for suffix in ("ready", "turn"):
            (folder / f"{place}.{suffix}").unlink(missing_ok=True)
        with (folder / f"{place}.log").open("w") as log:
            running[place] = subprocess.Popen(
                [*command, "--measure", place], stdout=log, stderr=log
            )

    def passed() -> float:
        return time.monotonic() - began

    def say(text: str) -> None:
        sys.stdout.write(f"{passed():.0f} s: {text}\n")
        sys.stdout.flush()

    def lost(place: str, why: str) -> None:
        running[place].kill()
        running[place].wait()
        bad.add(place)
        text = (folder / f"{place}.log").read_text(errors="replace").splitlines()
        errors = [line for line in text if "Error" in line][-4:]
        last = "\n".join(line[:300] for line in [*errors, "...", *text[-6:]])
        say(f"{place}: {why}; of {folder / place}.log:\n{last}")

    ready: list[str] = []
    while len(ready) + len(bad) < len(places):
        time.sleep(0.2)
        for place in places:
            if place in ready or place in bad:
                continue
            if (folder / f"{place}.ready").exists():
                ready.append(place)
                say(f"{place} is ready")
            elif (code := running[place].poll()) is not None:
                lost(place, f"ended with code {code}")
            elif passed() > limit * 2 / 3:
                lost(place, f"was not ready after {passed():.0f} s")
    for place in (place for place in places if place in ready):
        (folder / f"{place}.turn").touch()
        code = None
        while code is None and passed() < limit:
            time.sleep(0.2)
            code = running[place].poll()
            rows = vllm_bench.read_lines(lines)
            for row in rows[seen:]:
                say(tell(row))
                if "refused" in row:
                    bad.add(place)
            seen = len(rows)
        if code != 0:
            lost(place, f"ended with code {code}" if code is not None else "had no time left")
    return not bad


if __name__ == "__main__":
    sys.exit(main())

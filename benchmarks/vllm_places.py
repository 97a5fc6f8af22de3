"""Decode steps of vLLM's engine by where latent rows are, and with recorded selections.

The model is that of ``benchmarks/vllm_bench.py``, in vLLM's portable class, with both plugins: true
dims, three dense layers, random weights, 656-byte rows. Prompts are computed; then steps of decodes
are timed, from CUDA graphs. ``host`` and ``hisparse`` give each request 4096 rows on the GPU. All
places have the same memory for caches on the GPU.

Needs vLLM 0.33 and a Hopper GPU. Run ``python benchmarks/vllm_places.py --json FILE``.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import vllm_bench

CACHES = 2 << 30
"""Bytes of the caches on the GPU."""
BATCHES = (1, 8, 16)
SETTLE, TIMED, PROFILED = 8, 40, 4
"""Decode steps until all requests decode, to time, and to profile."""

PLACES: dict[str, dict[str, Any]] = {
    "gpu": {},
    "host": {
        "kv_connector": "HostRowsConnector",
        "kv_connector_module_path": "sparsemla.backends.vllm.host",
        "kv_connector_extra_config": {"host_gib": 8, "rows_per_seat": 4096},
    },
    "hisparse": {
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
        from vllm.model_executor.models.registry import ModelRegistry
        from vllm.plugins import load_general_plugins

        from sparsemla.backends.vllm import GENERIC_MODELS

        load_general_plugins()
        for architecture, name in GENERIC_MODELS.items():
            ModelRegistry.register_model(architecture, name)
        model = folder / f"model-{heads}"
        model.mkdir(parents=True, exist_ok=True)
        config = vllm_bench.model_config(heads, 0, longest)
        (model / "config.json").write_text(json.dumps(config))
        connector = PLACES[place] | {"kv_role": "kv_both"} if PLACES[place] else None
        if place == "records" and connector is not None:
            connector["kv_connector_extra_config"] |= {"folder": str(folder / "records")}
        llm = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            kv_cache_dtype="fp8_ds_mla",
            attention_config={"backend": "CUSTOM", "sparse_mla_force_mqa": True},
            max_model_len=longest,
            max_num_batched_tokens=vllm_bench.CHUNK,
            max_num_seqs=max(BATCHES),
            block_size=64,
            kv_cache_memory_bytes=CACHES,
            enable_prefix_caching=False,
            kernel_config={"enable_jit_warmup": False},  # each size runs before it is timed
            compilation_config={
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": list(BATCHES),
            },
            kv_transfer_config=connector,
            num_gpu_blocks_override=4 << 30 >> 17 if place == "host" else None,
        )
        self.engine, self.count = llm.llm_engine, 0
        self.blocks = self.engine.vllm_config.cache_config.num_gpu_blocks

    def measure(self, batch: int, context: int) -> dict[str, Any]:
        """Steps of so many requests, whose prompts have been computed."""
        new = SETTLE + TIMED + PROFILED + batch * -(-context // vllm_bench.CHUNK) + 8
        names = [self.add("computed", context, new) for _ in range(batch)]
        prefills = 0
        while any(one.num_computed_tokens < context for one in self.requests()):
            self.engine.step()
            prefills += 1
        self.steps(SETTLE)
        wall = self.steps(TIMED)
        launches = self.profile(lambda: self.steps(PROFILED))
        self.engine.abort_request(names, internal=True)
        self.finish()
        return {
            "batch": batch,
            "context": context,
            "wall_ms": wall,
            "gpu_ms": vllm_bench.busy(launches) / PROFILED,
            "tokens_per_s": batch * 1e3 / wall,
        }

    def requests(self) -> list[Any]:
        """Those that vLLM's scheduler knows."""
        core = self.engine.engine_core.engine_core
        return list(core.scheduler.requests.values())


def measure(place: str, heads: int, contexts: list[int], folder: Path, lines: Path) -> None:
    """All rows of a place; nothing else is timed meanwhile."""
    os.environ |= {
        "VLLM_PLUGINS": vllm_bench.BOTH,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
    }
    engine = Engine(place, heads, max(contexts) + 1024, folder)
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)  # held until this process ends
    for context in contexts:
        for batch in BATCHES:
            row = {"place": place, "heads": heads, "blocks": engine.blocks}
            row |= engine.measure(batch, context)
            with lines.open("a") as out:
                out.write(json.dumps(vllm_bench.rounded(row)) + "\n")
            sys.stdout.write(f"{row}\n")
            sys.stdout.flush()


def main() -> int:
    """Measure every place in a process of its own; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--folder", type=Path, default=Path("vllm-places"), help="logs and rows")
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--contexts", nargs="+", type=int, default=[32768])
    parser.add_argument("--limit", type=float, default=400, help="seconds for a place")
    parser.add_argument("--measure", choices=PLACES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / "rows.jsonl"
    if arguments.measure:
        measure(arguments.measure, arguments.heads, arguments.contexts, folder, lines)
        return 0
    lines.unlink(missing_ok=True)

    def run(place: str) -> bool:
        path = folder / f"{place}.log"
        command = [sys.executable, __file__, "--measure", place, "--folder", str(folder)]
        command += ["--heads", str(arguments.heads), "--contexts", *map(str, arguments.contexts)]
        with path.open("w") as log:
            try:
                done = subprocess.run(
                    command, stdout=log, stderr=log, check=False, timeout=arguments.limit
                ).returncode
            except subprocess.TimeoutExpired:
                done = -1
        if done:
            last = "\n".join(path.read_text(errors="replace").splitlines()[-20:])
            sys.stdout.write(f"{place}: failed, the end of {path}:\n{last}\n")
        return done == 0

    with ThreadPoolExecutor(len(arguments.places)) as pool:  # they start together
        results = list(pool.map(run, arguments.places))
    rows = vllm_bench.read_lines(lines)
    for row in rows:
        sys.stdout.write(
            f"{row['place']}, {row['batch']} x {row['context']}: {row['wall_ms']:.2f} ms a step, "
            f"{row['gpu_ms']:.2f} on the GPU, {row['tokens_per_s']:.0f} tokens a second\n"
        )
    if arguments.json:
        arguments.json.write_text(
            "[\n" + ",\n".join(f" {json.dumps(row)}" for row in rows) + "\n]\n"
        )
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())

"""vLLM's first requests after its start: what they wait for, with and without the warm-up.

The model is that of ``vllm_engine.py``. Each run has an empty cache of compiled kernels and a
process of its own. It sends a prompt, then a batch of other prompts, and does both again; it counts
the kernels that Triton compiles meanwhile.

Needs vLLM 0.33 and an sm_90 GPU. Run ``python benchmarks/vllm_first_request.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from vllm_engine import BOTH, LENGTHS, VOCABULARY, make_model

RUNS = {"with the warm-up": True, "without": False}


def serve(warm_up: bool, model: Path, result: Path) -> None:
    """Serve the prompts; write times, and numbers of compiled kernels: this package's, and all."""
    os.environ |= {"VLLM_PLUGINS": BOTH, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    from triton import knobs
    from vllm import LLM, SamplingParams

    compiled: list[bool] = []

    def listen(*, src: Any, cache_hit: bool, **_: Any) -> None:  # noqa: ANN401
        if not cache_hit:
            compiled.append(src.fn.__module__.startswith("sparsemla."))

    knobs.compilation.listener = listen
    rows = []

    def measure(name: str, run: Any) -> Any:  # noqa: ANN401
        compiled.clear()
        began = time.perf_counter()
        answer = run()
        seconds = time.perf_counter() - began
        rows.append([name, seconds, sum(compiled), len(compiled)])
        return answer

    llm = measure(
        "start",
        lambda: LLM(
            model=str(model),
            skip_tokenizer_init=True,
            kv_cache_dtype="fp8_ds_mla",
            attention_config={"backend": "CUSTOM", "sparse_mla_force_mqa": True},
            kernel_config={"enable_jit_warmup": warm_up},
            max_model_len=4096,
            max_num_batched_tokens=1024,
            max_num_seqs=8,
            block_size=64,
            gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=1 << 30,
            enable_prefix_caching=False,
        ),
    )
    params = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
    draw = np.random.default_rng(0)
    for name in ("first", "second"):
        prompts = [{"prompt_token_ids": draw.integers(2, VOCABULARY, n).tolist()} for n in LENGTHS]
        measure(f"{name} request", lambda: llm.generate(prompts[-1:], params))  # noqa: B023
        measure(f"{name} batch", lambda: llm.generate(prompts, params))  # noqa: B023
    result.write_text(json.dumps(rows))


def main() -> int:
    """Serve with and without the warm-up; 1 if a kernel was compiled after a warm start."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("vllm-first-request"), help="for files")
    parser.add_argument("--serve", choices=RUNS, help="one run only, in this process")
    arguments = parser.parse_args()
    folder, model = arguments.folder, arguments.folder / "model"
    if arguments.serve:
        serve(RUNS[arguments.serve], model, folder / f"{arguments.serve}.json")
        return 0
    make_model(model)
    late = 0
    for name, warm_up in RUNS.items():
        cache = (folder / f"kernels {name}").resolve()
        command = [sys.executable, __file__, "--folder", str(folder), "--serve", name]
        with (folder / f"{name}.log").open("w") as log:
            subprocess.run(
                command,
                stdout=log,
                stderr=log,
                check=True,
                env=os.environ | {"TRITON_CACHE_DIR": str(cache)},
            )
        for what, seconds, ours, count in json.loads((folder / f"{name}.json").read_text()):
            sys.stdout.write(
                f"{name}, {what}: {seconds:.2f} s, {ours} of our kernels compiled, {count} in all\n"
            )
            late += ours if warm_up and what != "start" else 0
    return int(late > 0)


if __name__ == "__main__":
    sys.exit(main())

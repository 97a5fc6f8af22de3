"""Time of a step in vLLM's engine: this package beside vLLM's own backends for Hopper.

The model is a DeepSeek-V3.2 of few layers with the true dims of attention and indexer, small
experts and random weights. Each side serves it in a process of its own. Contexts of decodes are not
computed: vLLM's ``DecodeBenchConnector`` takes them as given, and the caches hold random rows.

With ``--rank`` the model is what one GPU of eight computes of DeepSeek-V3.2: all 61 layers with
their true dims, a part of heads, experts and vocabulary, FP8 weights. It leaves out what GPUs say
to each other, two all-reduces a layer, and has the whole shared expert, of which a rank has an
eighth. The memory is that of a GPU of eight, so the sizes that fit are those that fit there.

With ``--gpus`` above 1, tensor parallelism, it measures only the time to the first token of long
prompts, once for each ``--min-rows``: the setting ``indexer_tp_shard_min_rows`` of both sides, with
which vLLM divides the indexer's rows between GPUs, or 0 for the default of each.

Needs vLLM 0.33 and a Hopper GPU. Run ``python benchmarks/vllm_bench.py``; rows are written as they
come. ``python benchmarks/engine.py`` makes the table and the figure of the docs of them. On four
GPUs run ``python benchmarks/vllm_bench.py --gpus 4 --heads 32 --out engine-tp4.json``.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

BATCHES = (1, 16, 64, 128)
CONTEXTS = (8192, 32768, 131072)
CHUNK = 8192
"""Tokens of a step of a prefill."""
LAYERS = 3
VOCABULARY = 4096
RANK_LAYERS = 61
RANK_BATCHES = {8192: (1, 16, 64), 32768: (1, 16), 131072: (1, 4)}
"""Requests of a context that eight GPUs of 141 GB hold, beside the weights."""
RANK_CONFIG = {
    "vocab_size": 129280 // 8,
    "num_hidden_layers": RANK_LAYERS,
    "intermediate_size": 18432 // 8,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256 // 8,
    "num_experts_per_tok": 1,  # of the 8 of a token; each of the 8 ranks has one on average
    "first_k_dense_replace": 3,
    "quantization_config": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
"""What differs of one GPU of eight."""
PROMPTS = (32768, 131072, 262144)
"""Tokens of prompts, on several GPUs."""
REPEATS = 3
"""Prompts of a length that are timed, on several GPUs."""
SETTLE, TIMED, PROFILED = 4, 20, 3
"""Decode steps until the batch is complete and captured, to time, and to profile."""

BOTH = "sparsemla,sparsemla_indexer"
SIDES = {
    "sparsemla, fp8": (BOTH, "CUSTOM", "fp8_ds_mla"),
    "FLASHMLA_SPARSE, fp8": ("", "FLASHMLA_SPARSE", "fp8_ds_mla"),
    "sparsemla, bf16": (BOTH, "CUSTOM", "bfloat16"),
    "FLASH_ATTN_MLA_SPARSE, bf16": ("", "FLASH_ATTN_MLA_SPARSE", "bfloat16"),
}
"""Plugins, attention backend and cache of each side."""

SEVERAL_GPUS = {
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
}
"""No NVLink multicast, which shared hosts and virtual machines may not allow."""

SELECTION = re.compile("top_?k|_(held|select|collect|finish|merge)_kernel|radix", re.IGNORECASE)
"""Kernels that select keys: the last one of a layer ends its indexer."""
PRODUCT = re.compile("gemm|gemv|nvjet|^Kernel2$", re.IGNORECASE)
"""Kernels of cuBLAS."""


@dataclass(frozen=True)
class Row:
    """One side and one size.

    Args:
        side: of :data:`SIDES`.
        kind: ``decode``, a step, or ``prefill``, a whole prompt.
        heads, batch, context: the size.
        layers: of the model.
        wall_ms: time of it, the host's work included.
        gpu_ms: time in which its kernels run.
        indexer_ms, attention_ms: time of scores and top-k, and of attention, in it.
        kernels: the sixteen that take longest, in milliseconds.
    """

    side: str
    kind: str
    heads: int
    batch: int
    context: int
    layers: int
    wall_ms: float
    gpu_ms: float
    indexer_ms: float
    attention_ms: float
    kernels: dict[str, float]


@dataclass(frozen=True)
class FirstToken:
    """One side and one prompt on several GPUs.

    Args:
        side: of :data:`SIDES`.
        gpus: that share the heads.
        heads: of a GPU.
        context: tokens of the prompt.
        min_rows: vLLM's ``indexer_tp_shard_min_rows``; 0 if it is not set.
        layers: of the model.
        wall_ms: median time to the first token.
        times_ms: the times of all prompts but the first.
    """

    side: str
    gpus: int
    heads: int
    context: int
    min_rows: int
    layers: int
    wall_ms: float
    times_ms: list[float]


class Launch(NamedTuple):
    """A kernel's name, and its beginning and end in milliseconds."""

    name: str
    begin: float
    end: float


def split(launches: Sequence[Launch]) -> tuple[float, float]:
    """Times of indexer and attention among the launches of whole steps, in their order.

    In each layer they lie between vLLM's ``_fused_q_kernel`` and the product with the values' part
    of ``kv_b_proj``. The last kernel of a selection is the border between them. Times are spans:
    kernels may begin before the previous one ends, and there are gaps between them.

    >>> names = "_fused_q_kernel", "logits", "topk", "mla", "gemm"
    >>> ends = 9.0, 10.0, 12.0, 16.0, 24.0
    >>> split([Launch(name, end - 1, end) for name, end in zip(names, ends)])
    (3.0, 4.0)
    """
    indexer = attention = 0.0
    layer: list[Launch] | None = None
    for launch in launches:
        if launch.name == "_fused_q_kernel":
            layer = [launch]
        elif layer is not None and PRODUCT.search(launch.name):
            chosen = [one.end for one in layer if SELECTION.search(one.name)]
            border = max(chosen, default=layer[0].end)
            indexer += border - layer[0].end
            attention += max(one.end for one in layer) - border
            layer = None
        elif layer is not None:
            layer.append(launch)
    return indexer, attention


def busy(launches: Sequence[Launch]) -> float:
    """Milliseconds in which a kernel runs.

    >>> busy([Launch("first", 0.0, 2.0), Launch("during the first", 1.0, 3.0)])
    3.0
    """
    total, end = 0.0, -math.inf
    for launch in launches:
        total += max(launch.end - max(launch.begin, end), 0.0)
        end = max(end, launch.end)
    return total


def short(name: str) -> str:
    """A kernel's name without namespaces, template arguments and parameters.

    >>> short("void deep_gemm::sm90_fp8_paged_mqa_logits<2u, 64u>(unsigned int)")
    'sm90_fp8_paged_mqa_logits'
    """
    plain = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return re.split("[<(]", plain)[0].split("::")[-1]


def model_config(heads: int, experts: int, max_length: int, rank: bool = False) -> dict[str, Any]:
    """The configuration of the model, for transformers."""
    config = {
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "vocab_size": VOCABULARY,
        "hidden_size": 7168,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "n_routed_experts": max(experts, 8),
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1 if experts else LAYERS,
        "moe_layer_freq": 1,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "max_position_embeddings": max(163840, max_length),
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "index_topk": 2048,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    return config | RANK_CONFIG if rank else config


def fill(cache: Any) -> None:  # noqa: ANN401 - a tensor; torch is imported by children only
    """Random rows in all blocks of a cache of vLLM; they repeat only after a long context."""
    import torch

    num_blocks, page_size, width = cache.shape
    count = min(num_blocks, 2 * max(CONTEXTS) // page_size)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=cache.device, dtype=torch.bfloat16)

    def bytes_of(values: torch.Tensor) -> torch.Tensor:
        return values.contiguous().view(torch.uint8)

    if cache.dtype != torch.uint8:
        rows = normal(count, page_size, width).to(cache.dtype)
    elif width == 132:  # the index cache has a page's scales behind its keys
        keys = bytes_of(normal(count, page_size * 128).to(torch.float8_e4m3fn))
        scales = bytes_of(2.0 ** torch.randint(-3, 3, (count, page_size), device=cache.device))
        rows = torch.cat([keys, scales], dim=1).view(count, page_size, width)
    else:  # fp8_ds_mla: 512 values, 4 scales, 64 rotated dims
        values = bytes_of(normal(count, page_size, 512).to(torch.float8_e4m3fn))
        scales = bytes_of(torch.rand(count, page_size, 4, device=cache.device) / 16)
        rows = torch.cat([values, scales, bytes_of(normal(count, page_size, 64))], dim=2)
    for first in range(0, num_blocks, count):
        part = cache[first : first + count]
        part.copy_(rows[: part.shape[0]])


@functools.cache
def prompt_of(length: int) -> list[int]:
    """Tokens of a prompt, the same for all requests."""
    return [2 + at * 31 % (VOCABULARY - 2) for at in range(length)]


class Engine:
    """vLLM's engine of one side in this process, with workers in others for several GPUs."""

    def __init__(
        self,
        side: str,
        heads: int,
        experts: int,
        folder: Path,
        gpus: int = 1,
        min_rows: int = 0,
        rank: bool = False,
    ) -> None:
        from vllm import LLM
        from vllm.distributed.kv_transfer.kv_connector.v1 import decode_bench_connector

        scheduler = decode_bench_connector.DecodeBenchConnectorScheduler
        matched = scheduler.get_num_new_matched_tokens

        def only_contexts_of_decodes(self: Any, request: Any, computed: int) -> Any:  # noqa: ANN401
            given = request.request_id.startswith("decode")
            return matched(self, request, computed) if given else (0, False)

        scheduler.get_num_new_matched_tokens = only_contexts_of_decodes
        longest = max(CONTEXTS if gpus == 1 else PROMPTS) + 1024
        self.layers = RANK_LAYERS if rank else LAYERS
        self.batches = RANK_BATCHES if rank else dict.fromkeys(CONTEXTS, BATCHES)
        sizes = sorted({batch for batches in self.batches.values() for batch in batches})
        model = folder / f"model-{gpus * heads}-{experts}-{longest}-{self.layers}"
        model.mkdir(parents=True, exist_ok=True)
        config_of_model = model_config(gpus * heads, experts, longest, rank)
        (model / "config.json").write_text(json.dumps(config_of_model))
        _, backend, cache = SIDES[side]
        self.side, self.heads, self.count = side, heads, 0
        self.gpus, self.min_rows = gpus, min_rows
        rows = {"indexer_tp_shard_min_rows": min_rows} if min_rows else {}
        connector = {
            "kv_connector": "DecodeBenchConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"startup_fill": True},
        }
        llm = LLM(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            kv_cache_dtype=cache,
            tensor_parallel_size=gpus,
            attention_config={"backend": backend, **rows},
            max_model_len=longest,
            max_num_batched_tokens=CHUNK,
            max_num_seqs=sizes[-1] if gpus == 1 else 1,
            block_size=64,
            gpu_memory_utilization=0.92,
            enable_prefix_caching=False,
            kernel_config={"enable_jit_warmup": False},  # each size runs before it is timed
            compilation_config={
                "cudagraph_mode": "FULL_DECODE_ONLY",  # steps of prefills are too long for a graph
                "cudagraph_capture_sizes": sizes if gpus == 1 else [1],
            },
            kv_transfer_config=connector if gpus == 1 else None,
        )
        self.engine = llm.llm_engine
        config = self.engine.vllm_config
        self.tokens = config.cache_config.num_gpu_blocks * 64
        for layer in config.compilation_config.static_forward_context.values():
            if getattr(layer, "kv_cache", None) is not None and layer.kv_cache.ndim == 3:
                fill(layer.kv_cache)

    def add(self, kind: str, length: int, new: int) -> str:
        """A request with a prompt of that length; its name in the engine."""
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input

        self.count += 1
        params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        prompt = tokens_input(prompt_of(length))
        return self.engine.add_request(f"{kind}-{self.count}", prompt, params)

    def steps(self, count: int) -> float:
        """Run so many steps; milliseconds for each."""
        import torch

        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(count):
            self.engine.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) * 1e3 / count

    def finish(self) -> int:
        """Run until all requests are answered; the number of steps."""
        count = 0
        while self.engine.has_unfinished_requests():
            self.engine.step()
            count += 1
        return count

    def decode(self, batch: int, context: int) -> Row:
        """Steps of a batch of requests with that context."""
        names = [self.add("decode", context, 1000) for _ in range(batch)]
        self.steps(SETTLE)
        wall = self.steps(TIMED)
        launches = self.profile(lambda: self.steps(PROFILED))
        self.engine.abort_request(names, internal=True)
        self.finish()
        return self.row("decode", batch, context, wall, launches, PROFILED)

    def prefill(self, length: int) -> Row:
        """A prompt of that length, by itself, after one that compiled what it needs."""
        import torch

        self.add("prefill", length, 1)
        self.finish()
        self.add("prefill", length, 1)
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.finish()
        torch.cuda.synchronize()
        wall = (time.perf_counter() - began) * 1e3
        self.add("prefill", length, 1)
        return self.row("prefill", 1, length, wall, self.profile(self.finish), 1)

    def first_token(self, length: int) -> FirstToken:
        """Prompts of that length, one after the other; the first compiles what they need."""
        times = []
        for _ in range(1 + REPEATS):
            self.add("prefill", length, 1)
            began = time.perf_counter()
            self.finish()
            times.append((time.perf_counter() - began) * 1e3)
        return FirstToken(
            self.side,
            self.gpus,
            self.heads,
            length,
            self.min_rows,
            self.layers,
            statistics.median(times[1:]),
            times[1:],
        )

    def profile(self, run: Any) -> list[Launch]:  # noqa: ANN401
        """Kernels in the order of their beginnings."""
        import torch

        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run()
            torch.cuda.synchronize()
        events = [
            event
            for event in profile.profiler.kineto_results.events()
            if event.device_type() == torch.autograd.DeviceType.CUDA
        ]
        events.sort(key=lambda event: event.start_ns())
        return [
            Launch(short(event.name()), begin / 1e6, (begin + event.duration_ns()) / 1e6)
            for event in events
            for begin in [event.start_ns() - events[0].start_ns()]
        ]

    def row(
        self,
        kind: str,
        batch: int,
        context: int,
        wall: float,
        launches: list[Launch],
        repeats: int,
    ) -> Row:
        """The row of a size that was profiled ``repeats`` times."""
        totals: dict[str, float] = {}
        for name, begin, end in launches:
            totals[name] = totals.get(name, 0.0) + (end - begin) / repeats
        longest = sorted(totals, key=lambda name: -totals[name])[:16]
        indexer, attention = split(launches)
        return Row(
            self.side,
            kind,
            self.heads,
            batch,
            context,
            self.layers,
            wall,
            busy(launches) / repeats,
            indexer / repeats,
            attention / repeats,
            {name: totals[name] for name in longest},
        )


def measure(
    side: str,
    heads: int,
    experts: int,
    folder: Path,
    lines: Path,
    gpus: int,
    min_rows: int,
    rank: bool,
) -> None:
    """All rows of a side, a line of JSON each; nothing else uses the GPU meanwhile."""
    os.environ |= {
        "VLLM_PLUGINS": SIDES[side][0],
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_DEEP_GEMM_WARMUP": "skip",  # each size runs before it is timed
    }
    if gpus > 1:
        os.environ |= SEVERAL_GPUS
    import vllm  # before the lock, as this takes seconds

    # Held until this process ends, which frees the GPU's memory.
    lock = os.open(folder / "lock", os.O_CREAT | os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with lines.open("a") as out:

        def write(values: dict[str, Any]) -> None:
            out.write(json.dumps(values) + "\n")
            out.flush()

        began = time.perf_counter()
        engine = Engine(side, heads, experts, folder, gpus, min_rows, rank)
        import torch
        import triton

        versions = {
            "vllm": vllm.__version__,
            "torch": torch.__version__,
            "triton": triton.__version__,
            "device": torch.cuda.get_device_name(),
        }
        seconds = time.perf_counter() - began
        write({"side": side, "heads": heads, "start_s": seconds, "versions": versions})
        if gpus > 1:
            for length in PROMPTS:
                write(asdict(engine.first_token(length)))
            return
        for context, batches in engine.batches.items():
            for batch in batches:
                if batch * (context + 1024) <= engine.tokens:
                    write(asdict(engine.decode(batch, context)))
                else:
                    write({"side": side, "heads": heads, "batch": batch, "context": context,
                           "refused": f"the cache has {engine.tokens} tokens"})  # fmt: skip
        for length in engine.batches:
            write(asdict(engine.prefill(length)))


def main() -> int:
    """Measure every side in a process of its own; 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/engine-h200.json"))
    parser.add_argument("--folder", type=Path, default=Path("vllm-bench"), help="logs and configs")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--experts", type=int, default=8, help="of a layer; 0: dense layers")
    parser.add_argument(
        "--rank", action="store_true", help="one GPU of eight; with --heads 16 and --sides"
    )
    parser.add_argument("--gpus", type=int, default=1, help="that share the heads")
    parser.add_argument("--min-rows", nargs="+", type=int, default=[0, 1024], help="for --gpus")
    parser.add_argument("--seconds", type=float, default=480, help="after which nothing is started")
    parser.add_argument("--measure", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder, out = arguments.folder, arguments.out
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / "rows.jsonl"
    if arguments.measure:
        (heads,), (rows,) = arguments.heads, arguments.min_rows
        model = arguments.gpus, rows, arguments.rank
        measure(arguments.measure, heads, arguments.experts, folder, lines, *model)
        return 0
    lines.unlink(missing_ok=True)
    began = time.monotonic()

    def run(job: tuple[str, int, int]) -> bool:
        side, heads, rows = job
        name = f"{side}, {heads} heads"
        if arguments.gpus > 1:
            name += f", {arguments.gpus} GPUs, rows {rows}"
        left = arguments.seconds - (time.monotonic() - began)
        command = [sys.executable, __file__, "--measure", side, "--heads", str(heads)]
        command += ["--experts", str(arguments.experts), "--folder", str(folder)]
        command += ["--gpus", str(arguments.gpus), "--min-rows", str(rows)]
        command += ["--rank"] if arguments.rank else []
        with (folder / f"{name}.log").open("w") as log:
            try:
                done = subprocess.run(
                    command, stdout=log, stderr=log, check=False, timeout=max(left, 1)
                )
            except subprocess.TimeoutExpired:
                sys.stdout.write(f"{name}: out of time\n")
                return False
        write_report(out, read_lines(lines))
        failed = f"failed, see {log.name}" if done.returncode else "done"
        sys.stdout.write(f"{name}: {failed}, {time.monotonic() - began:.0f} s\n")
        sys.stdout.flush()
        return done.returncode == 0

    settings = arguments.min_rows if arguments.gpus > 1 else [0]
    jobs = [
        (side, heads, rows)
        for heads in arguments.heads
        for rows in settings
        for side in arguments.sides
    ]
    with ThreadPoolExecutor(2) as pool:  # one imports vLLM while the other measures
        results = list(pool.map(run, jobs))
    write_report(out, read_lines(lines))
    return int(not all(results))


def read_lines(lines: Path) -> list[dict[str, Any]]:
    """What the children have written so far."""
    return [json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else []


def write_report(out: Path, values: list[dict[str, Any]]) -> None:
    """The JSON file: starts, rows and refusals, a line each."""
    parts = {
        "starts": [each for each in values if "start_s" in each],
        "rows": [each for each in values if "wall_ms" in each],
        "refused": [each for each in values if "refused" in each],
    }
    body = ",\n".join(
        f' "{name}": [\n' + ",\n".join(f"  {json.dumps(rounded(one))}" for one in each) + "\n ]"
        for name, each in parts.items()
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(f"{{\n{body}\n}}\n")


def rounded(value: Any) -> Any:  # noqa: ANN401
    """Numbers with four digits."""
    if isinstance(value, dict):
        return {name: rounded(each) for name, each in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    sys.exit(main())

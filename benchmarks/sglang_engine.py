"""SGLang's engine on a small model: the tokens with this package's plugin and without.

The model is the DeepSeek-V3.2 of ``benchmarks/vllm_engine.py``, which copies from its context and
is sure of it, with an MTP layer that copies, too. With ``--model glm5_next`` it is the
GLM-5.3-Flash of that program, with ``--model hy_v4`` its Hunyuan V4: the plugin serves them, and
transformers' class of the same weights. Every mode serves the model in an engine of its own, with
prompts that are longer than a selection, chunked prefills, and batches of prefills and decodes.
Then it asks again, and SGLang must find the prompts in its radix cache. Tokens and
log-probabilities are compared. For each mode a line says which functions of both sides computed
attention, scores and selections, and which Triton kernels were compiled once it was ready.

``graphs`` captures decodes, ``eagle`` lets the MTP layer draft three tokens, which a decode of four
tokens of a request verifies.

Needs SGLang 0.5.23, one GPU of compute capability 9.0, DeepGEMM, and FlashMLA for SGLang's own
modes. ``sgl_kernel`` may be the stand-in of ``examples/sglang_without_sgl_kernel``. Run ``python
benchmarks/sglang_engine.py``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vllm_engine
from sglang_hooks import complete_deep_gemm
from vllm_engine import NUM_NEW, SERVED, compare, glm_model, make_hy_model, make_model, serve_apart

STEP = 1024
"""Most tokens of a chunk."""
REPORT = "SPARSEMLA_ENGINE_REPORT"
"""Variable that tells SGLang's scheduler where to write what ran in it."""


@dataclass(frozen=True)
class Mode:
    """One way to serve the model.

    Args:
        ours: whether SGLang loads the plugin.
        cache: the cache's dtype.
        prefill, decode: SGLang's names of methods.
        graphs: whether decodes are captured.
        model: type of the model.
        transformers: transformers' class serves the model, one prompt after the other.
        more: other arguments of SGLang's engine.
    """

    ours: bool
    cache: str = "fp8_e4m3"
    prefill: str = "flashmla_kv"
    decode: str = "flashmla_kv"
    graphs: bool = False
    model: str = "deepseek_v32"
    transformers: bool = False
    more: Mapping[str, Any] = field(default_factory=dict)


BF16: dict[str, Any] = {
    "cache": "bfloat16",
    "prefill": "flashmla_sparse",
    "decode": "flashmla_sparse",
}
FA3: dict[str, Any] = BF16 | {"decode": "fa3"}
GLM: dict[str, Any] = {"model": "glm5_next"}
HY: dict[str, Any] = {"model": "hy_v4"}
EAGLE: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": 4,
}
MODES = {
    "sglang": Mode(False),
    "sglang, graphs": Mode(False, graphs=True),
    "ours": Mode(True),
    "ours, graphs": Mode(True, graphs=True),
    "ours, converted rows": Mode(True, prefill="flashmla_sparse", graphs=True),
    "sglang, bf16": Mode(False, **BF16),
    "ours, bf16": Mode(True, **BF16),
    "ours, bf16, graphs": Mode(True, graphs=True, **FA3),
    "sglang, eagle": Mode(False, graphs=True, more=EAGLE),
    "ours, eagle": Mode(True, graphs=True, more=EAGLE),
    "ours, bf16, eagle": Mode(True, graphs=True, more=EAGLE, **FA3),
    "glm, transformers": Mode(False, transformers=True, **GLM),
    "glm": Mode(True, **GLM),
    "glm, graphs": Mode(True, graphs=True, **GLM),
    "glm, bf16": Mode(True, **GLM, **BF16),
    "glm, bf16, graphs": Mode(True, graphs=True, **GLM, **FA3),
    "hy, transformers": Mode(False, transformers=True, **HY),
    "hy, bf16": Mode(True, **HY, **BF16),
    "hy, bf16, graphs": Mode(True, graphs=True, **HY, **BF16),
}
PAIRS = (
    ("sglang, graphs", "sglang"),
    ("ours", "sglang"),
    ("ours, graphs", "sglang, graphs"),
    ("ours, converted rows", "sglang, graphs"),
    ("ours, bf16", "sglang, bf16"),
    ("ours, bf16, graphs", "sglang, bf16"),
    ("sglang, eagle", "sglang, graphs"),
    ("ours, eagle", "ours, graphs"),
    ("ours, eagle", "sglang, eagle"),
    ("ours, bf16, eagle", "ours, bf16, graphs"),
    ("glm", "glm, transformers"),
    ("glm, graphs", "glm, transformers"),
    ("glm, bf16", "glm, transformers"),
    ("glm, bf16, graphs", "glm, transformers"),
    ("hy, bf16", "hy, transformers"),
    ("hy, bf16, graphs", "hy, transformers"),
)
OURS = {
    "sparsemla.backends.sglang.attention": ("sparse_decode", "sparse_prefill"),
    "sparsemla.backends.sglang.topk": ("select_topk",),
}
THEIRS = {
    "sglang.kernels.ops.attention.flash_mla_interface": (
        "flash_mla_with_kvcache",
        "flash_mla_sparse_fwd",
    ),
}
SCORES = {"deep_gemm": ("fp8_mqa_logits", "fp8_paged_mqa_logits")}
"""Functions that are counted, by their modules: of the plugin, instead of these, and both sides'.

Both sides' scores are DeepGEMM's from compute capability 9.0 on.
"""


def make_drafting_model(folder: Path) -> None:
    """Write the model of ``vllm_engine.py`` and an MTP layer, which has experts in SGLang."""
    from safetensors.torch import load_file, save_file

    from sparsemla_lab.testing.checkpoints import add_mtp_layer

    make_model(folder)
    add_mtp_layer(folder, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 128,
        "moe_layer_freq": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    path.write_text(json.dumps(config, indent=2))
    layer = f"model.layers.{config['num_hidden_layers']}"
    weights = {
        name: weight
        for name, weight in load_file(folder / "model.safetensors").items()
        if not name.startswith(f"{layer}.mlp.")
    }
    generator = torch.Generator().manual_seed(1)
    hidden, width = config["hidden_size"], config["moe_intermediate_size"]

    def random(*shape: int) -> torch.Tensor:
        x = torch.randn(shape, generator=generator) * 0.3 * shape[-1] ** -0.5
        return x.to(torch.bfloat16)

    experts = [f"experts.{expert}" for expert in range(config["n_routed_experts"])]
    for expert in [*experts, "shared_experts"]:
        weights[f"{layer}.mlp.{expert}.gate_proj.weight"] = random(width, hidden)
        weights[f"{layer}.mlp.{expert}.up_proj.weight"] = random(width, hidden)
        weights[f"{layer}.mlp.{expert}.down_proj.weight"] = random(hidden, width)
    weights[f"{layer}.mlp.gate.weight"] = random(len(experts), hidden)
    weights[f"{layer}.mlp.gate.e_score_correction_bias"] = torch.zeros(len(experts))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def make_glm_model(folder: Path) -> None:
    """Write the GLM-5.3-Flash of ``vllm_engine.py`` whole, as SGLang's class reads it."""
    glm_model().save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    # SGLang's class reads these, transformers' has no fields for them.
    config["text_config"] |= {"mhc": False, "index_kpool_compress": True}
    path.write_text(json.dumps(config))


@dataclass(frozen=True)
class Model:
    """A model, and what it asks of SGLang's engine.

    Args:
        make: writes it into a folder.
        page: tokens of a page.
        more: other arguments of the engine.
    """

    make: Callable[[Path], None]
    page: int = 64
    more: Mapping[str, Any] = field(default_factory=dict)


MODELS = {
    "deepseek_v32": Model(make_drafting_model),
    "glm5_next": Model(
        make_glm_model,
        256,  # 64 index keys, each of a pool of four tokens
        # Without a tokenizer there is no processor of images. States of linear attention are many
        # more than requests and prefixes need, but not all that the memory holds.
        {"enable_multimodal": False, "max_mamba_cache_size": 256},
    ),
    "hy_v4": Model(make_hy_model),
}


def engine_arguments(mode: Mode, model: Path) -> dict[str, Any]:
    """Arguments of SGLang's engine."""
    asked = MODELS[mode.model]
    return {
        "model_path": str(model),
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "kv_cache_dtype": mode.cache,
        "attention_backend": "dsa",
        "dsa_prefill_backend": mode.prefill,
        "dsa_decode_backend": mode.decode,
        "page_size": asked.page,
        "chunked_prefill_size": STEP,
        "max_running_requests": 8,
        "max_total_tokens": 1 << 15,  # a fixed cache, so that several can serve at once
        "mem_fraction_static": 0.1,
        "cuda_graph_max_bs_decode": 8,
        "disable_cuda_graph": not mode.graphs,
        "disable_prefill_cuda_graph": True,
        "sampling_backend": "pytorch",
        "moe_runner_backend": "triton",
        "disable_custom_all_reduce": True,
        "random_seed": 0,
        "log_level": "info",
        **asked.more,
        **mode.more,
    }


def count_calls(places: Mapping[str, tuple[str, ...]], calls: Counter[str]) -> None:
    """Count the calls of functions in the modules that can be imported."""

    def counted(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - of any function
            calls[name] += 1
            return function(*args, **options)

        return call

    for place, names in places.items():
        try:
            module = importlib.import_module(place)
        except ImportError:
            continue
        for name in names:
            setattr(module, name, counted(getattr(module, name), f"{place}.{name}"))


def tune_nothing() -> None:
    """Let Triton take the first of the configurations that it would measure.

    The kernels of linear attention have a hundred, each compiled in a second or two, for which a
    comparison of tokens need not wait.
    """
    from triton.runtime.autotuner import Autotuner

    run = Autotuner.run

    @wraps(run)
    def run_first(self: Autotuner, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - of Triton
        self.configs = self.configs[:1]
        return run(self, *args, **options)

    Autotuner.run = run_first


def run_scheduler(*args: Any, **options: Any) -> None:  # noqa: ANN401 - of SGLang
    """SGLang's scheduler, with a method that writes what ran in its process.

    SGLang starts it in a process of its own.
    """
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process
    from sglang.srt.plugins import load_plugins

    from sparsemla.kernels.common.compiling import count_compilations

    load_plugins()
    complete_deep_gemm()
    tune_nothing()
    calls: Counter[str] = Counter()
    ours = "sparsemla" in os.environ.get("SGLANG_PLUGINS", "")
    count_calls((OURS if ours else {}) | THEIRS | SCORES, calls)
    counting = count_compilations()
    started, ready = Scheduler.get_init_info, []

    def get_init_info(self: Scheduler) -> Any:  # noqa: ANN401 - of SGLang
        ready.append(counting.__enter__())
        return started(self)

    def write_report(self: Scheduler) -> None:
        runner = self.tp_worker.model_runner
        report = {
            "classes": [
                f"{type(each).__module__}.{type(each).__qualname__}"
                for each in (runner.model, runner.attn_backend, runner.token_to_kv_pool)
            ],
            "calls": calls,
            "compiled": ready[0].compiled,
            "loaded": ready[0].loaded,
        }
        Path(os.environ[REPORT]).write_text(json.dumps(report))

    Scheduler.get_init_info = get_init_info
    Scheduler.write_report = write_report
    run_scheduler_process(*args, **options)


def serve(mode: Mode, model: Path, result: Path) -> None:
    """Serve the model and write what came of each prompt.

    Raises:
        RuntimeError: other functions ran than the mode asks for, or the MTP layer's drafts were not
            accepted.
    """
    if mode.transformers:
        theirs = vllm_engine.Mode("", None, model=mode.model, transformers=True)
        vllm_engine.serve(theirs, model, result)
        return
    os.environ.pop("SGLANG_PLUGINS", None)
    if mode.ours:
        os.environ["SGLANG_PLUGINS"] = "sparsemla"
    report_path = result.with_suffix(".report")
    os.environ |= {
        REPORT: str(report_path),
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD": "0",  # no dense prefills
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",  # for scores only, not for matrix products
    }
    began = time.perf_counter()
    from sglang.srt.entrypoints.engine import Engine

    class WatchedEngine(Engine):
        run_scheduler_process_func = staticmethod(run_scheduler)

    engine = WatchedEngine(**engine_arguments(mode, model))
    ready = time.perf_counter()
    prompts = SERVED[mode.model].prompts()
    params = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}
    answers = engine.generate(
        input_ids=prompts,
        sampling_params=params,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
    )
    # Again, from cached prefixes: SGLang reads none of prompts whose log-probabilities it gives.
    again = engine.generate(input_ids=prompts, sampling_params=params)
    answered = time.perf_counter()
    engine.collective_rpc("write_report")
    report = json.loads(report_path.read_text())
    found = []
    for answer, later in zip(answers, again, strict=True):
        meta = answer["meta_info"]
        best = [sorted(each[0] for each in step) for step in meta["output_top_logprobs"]]
        found.append(
            {
                "prompt": [each[0] for each in meta["input_token_logprobs"][1:]],
                "tokens": answer["output_ids"],
                "again": later["output_ids"],
                "cached": later["meta_info"]["cached_tokens"],
                "margin": min(each[-1] - each[-2] for each in best),
            }
        )
    calls = report["calls"]
    ran = [any(name.startswith(tuple(side)) for name in calls) for side in (OURS, THEIRS)]
    if ran != [mode.ours, not mode.ours]:
        raise RuntimeError(f"{mode} needs other functions than those that ran: {calls}")
    accepted = [later["meta_info"].get("spec_accept_length", 1.0) for later in again]
    if mode.more and max(accepted) < 2:
        raise RuntimeError(f"drafts must be accepted, got tokens of a step: {accepted}")
    report |= {
        "answers": found,
        "seconds": [ready - began, answered - ready],
        "accepted": accepted,
    }
    result.write_text(json.dumps(report))
    engine.shutdown()


def describe(name: str, folder: Path) -> bool:
    """Tell what served in a mode; whether it gave the same tokens again, from cached prefixes."""
    if MODES[name].transformers:
        vllm_engine.describe(name, folder)
        return True
    report = json.loads((folder / f"{name}.json").read_text())
    start, rest = report["seconds"]
    calls = ", ".join(f"{count} x {each}" for each, count in sorted(report["calls"].items()))
    answers = report["answers"]
    other = [i for i, each in enumerate(answers) if each["tokens"] != each["again"]]
    page = MODELS[MODES[name].model].page
    # The prompt's first token has no log-probability.
    read = [i for i, x in enumerate(answers) if len(x["prompt"]) >= page and not x["cached"]]
    sys.stdout.write(
        f"{name}: ready after {start:.0f} s, answered in {rest:.1f} s; compiled while serving: "
        f"{report['compiled'] or 'nothing'}, loaded: {report['loaded'] or 'nothing'}; "
        f"{', '.join(report['classes'])}; called: {calls}; "
        f"{len(answers) - len(other)} of {len(answers)} answers are the same again, from cached "
        f"prefixes; tokens of a step: {np.mean(report['accepted']):.2f}\n"
    )
    if other:
        sys.stdout.write(f"{name}: FAILED, answers {other} are not the same again\n")
    if read:
        sys.stdout.write(f"{name}: FAILED, no prefix of prompts {read} was found in the cache\n")
    return not other and not read


def main() -> int:
    """Serve the model by every mode; 1 if tokens differ."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="deepseek_v32", help="type of the model")
    parser.add_argument("--folder", type=Path, default=Path("sglang-engine"), help="for all files")
    parser.add_argument("--serve", choices=MODES, help="one mode only, in this process")
    parser.add_argument("--only", nargs="+", choices=MODES, help="these modes, and their bases")
    parser.add_argument("--at-once", type=int, default=1, help="modes that are served at once")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a mode")
    arguments = parser.parse_args()
    folder, model = arguments.folder, arguments.folder / "model"
    if arguments.serve:
        serve(MODES[arguments.serve], model, folder / f"{arguments.serve}.json")
        return 0
    own = {name for name, mode in MODES.items() if mode.model == arguments.model}
    modes = set(arguments.only or own)
    modes |= {base for name, base in PAIRS if name in modes}
    if modes - own:
        parser.error(f"--only must name modes of {arguments.model}, got {', '.join(modes - own)}")
    MODELS[arguments.model].make(model)
    served = serve_apart(
        [sys.executable, __file__],
        [name for name in MODES if name in modes],
        folder,
        arguments.at_once,
        arguments.limit,
        tell=None,
    )
    same = [describe(name, folder) for name in MODES if name in served]
    equal = [compare(name, base, folder) for name, base in PAIRS if {name, base} <= served]
    return int(served != modes or not all(same) or not all(equal))


if __name__ == "__main__":
    sys.exit(main())

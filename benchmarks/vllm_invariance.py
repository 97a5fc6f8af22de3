"""vLLM's engine in its batch-invariant mode: the bits of a request do not depend on the others.

The model and the prompts are those of ``vllm_engine.py``. Every run serves them in a process of its
own: one request at a time, all at once, in reverse order, and in smaller chunks. Of each token in
each layer it keeps digests of the queries, the selection, and the attention output with its lse.
Runs of the default mode are the control: their bits differ.

Needs vLLM 0.33 and an sm_90 GPU. Run ``python benchmarks/vllm_invariance.py``. With ``--ranks`` so
many GPUs share the heads in every run, and digests are those of each rank; ``--share-gpu`` lets all
ranks use the first GPU, as in ``vllm_engine.py``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from vllm_engine import (
    BOTH,
    LENGTHS,
    NO_MULTICAST,
    NUM_NEW,
    SHARED_GPU,
    VOCABULARY,
    check_sharing,
    make_model,
    serve_apart,
    serve_portable_class,
    sharing_a_gpu,
)

PARTS = "queries", "selection", "attention"


@dataclass(frozen=True)
class Run:
    """One way to serve the requests.

    Args:
        invariant: whether vLLM runs in its batch-invariant mode.
        cache: the cache's dtype.
        order: ``"alone"``, one request at a time; ``"together"``; or ``"reversed"``.
        chunk: most tokens of a step.
        graphs: whether steps are captured; then only logits are compared.
        ranks: GPUs that share the heads.
        shares_gpu: all ranks use the first GPU.
        portable: vLLM's portable class serves.
        new_tokens: of each answer.
    """

    invariant: bool = True
    cache: str = "fp8_ds_mla"
    order: str = "together"
    chunk: int = 1024
    graphs: bool = False
    ranks: int = 1
    shares_gpu: bool = False
    portable: bool = False
    new_tokens: int = NUM_NEW


RUNS = {
    "fp8, alone": Run(order="alone"),
    "fp8, together": Run(),
    "fp8, reversed": Run(order="reversed"),
    "fp8, chunks of 200": Run(chunk=200),
    "fp8, graphs": Run(graphs=True),
    "bf16, alone": Run(cache="bfloat16", order="alone"),
    "bf16, together": Run(cache="bfloat16"),
    "bf16, chunks of 200": Run(cache="bfloat16", chunk=200),
    "default, alone": Run(invariant=False, order="alone"),
    "default, together": Run(invariant=False),
}
CONTROL = "default"


def watch(worker: Any) -> None:  # noqa: ANN401 - of vLLM
    """Count digests of what each token's attention reads and returns, in every layer of a rank."""
    import torch

    from sparsemla.backends.vllm.attention import SparseMLAImpl

    attend = SparseMLAImpl.forward_mqa
    digests: dict[str, Counter[str]] = {part: Counter() for part in PARTS}
    worker.digests = digests

    def rows_of(values: torch.Tensor, count: int) -> np.ndarray:
        rows = values[:count].reshape(count, -1).contiguous()
        return rows.view(torch.uint8).cpu().numpy()

    def watched(self: Any, q: Any, cache: Any, metadata: Any, layer: Any) -> Any:  # noqa: ANN401
        out, lse = attend(self, q, cache, metadata, layer)
        count = metadata.num_actual_tokens
        queries = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        ends, lens = metadata.query_start_loc[1:].tolist(), metadata.seq_lens.tolist()
        requests = metadata.req_id_per_token[:count].tolist()
        positions = [lens[request] - ends[request] + at for at, request in enumerate(requests)]
        attention = np.concatenate([rows_of(out, count), rows_of(lse, count)], axis=1)
        parts = rows_of(queries, count), rows_of(self.topk_indices_buffer, count), attention
        for part, rows in zip(PARTS, parts, strict=True):
            digests[part].update(
                f"{layer.layer_name} {position} {hashlib.blake2b(row, digest_size=8).hexdigest()}"
                for position, row in zip(positions, rows, strict=True)
            )
        return out, lse

    SparseMLAImpl.forward_mqa = watched


def watched_by(worker: Any) -> dict[str, dict[str, int]]:  # noqa: ANN401 - of vLLM
    """What :func:`watch` has counted in a rank."""
    return {part: dict(counts) for part, counts in worker.digests.items()}


def serve(run: Run, model: Path, result: Path) -> None:
    """Serve the requests; write their tokens and log-probabilities, and the digests."""
    os.environ |= {
        "VLLM_PLUGINS": BOTH,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_BATCH_INVARIANT": str(int(run.invariant)),
        **NO_MULTICAST,
    }
    shares = run.shares_gpu and run.ranks > 1
    if shares:
        os.environ |= SHARED_GPU | os.environ  # what is set stays
    with sharing_a_gpu(run.ranks) if shares else nullcontext():
        result.write_text(json.dumps(_serve(run, model)))


def _serve(run: Run, model: Path) -> dict[str, Any]:
    """The tokens and log-probabilities, and of each rank the digests."""
    from vllm import LLM, SamplingParams

    if run.portable:
        serve_portable_class()
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        kv_cache_dtype=run.cache,
        enforce_eager=not run.graphs,
        attention_config={"backend": "CUSTOM"},
        max_model_len=4096,
        max_num_batched_tokens=run.chunk,
        max_num_seqs=8,
        block_size=64,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        tensor_parallel_size=run.ranks,
        disable_custom_all_reduce=True,
        distributed_executor_backend="mp" if run.ranks > 1 else None,
    )
    if not run.graphs:
        llm.collective_rpc(watch)
    draw = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": draw.integers(2, VOCABULARY, n).tolist()} for n in LENGTHS]
    params = SamplingParams(
        temperature=0, max_tokens=run.new_tokens, ignore_eos=True, logprobs=1, detokenize=False
    )
    if run.order == "alone":
        answers = [llm.generate([prompt], params)[0] for prompt in prompts]
    elif run.order == "reversed":
        answers = llm.generate(prompts[::-1], params)[::-1]
    else:
        answers = llm.generate(prompts, params)
    tokens = [
        (token, step[token].logprob)
        for answer in answers
        for one in answer.outputs
        for token, step in zip(one.token_ids, one.logprobs, strict=True)
    ]
    return {
        "tokens": tokens,
        "digests": [] if run.graphs else llm.collective_rpc(watched_by),
    }


def counted(ranks: Sequence[dict[str, dict[str, int]]], part: str) -> Counter[str]:
    """Digests of a part, each behind its rank."""
    return Counter(
        {
            f"{rank} {digest}": count
            for rank, parts in enumerate(ranks)
            for digest, count in parts[part].items()
        }
    )


def compare(name: str, base: str, folder: Path) -> bool:
    """Tell how many tokens have equal bits in two runs, and whether all have."""
    ours, theirs = (json.loads((folder / f"{each}.json").read_text()) for each in (name, base))
    answers = [one == other for one, other in zip(ours["tokens"], theirs["tokens"], strict=True)]
    said, equal = [f"{sum(answers)} of {len(answers)} log-probabilities"], all(answers)
    for part in PARTS:
        one, other = (counted(each["digests"], part) for each in (ours, theirs))
        if one:  # not captured
            same = (one & other).total()
            said.append(f"{part} {same} of {other.total()}")
            equal &= one == other
    sys.stdout.write(f"{name} and {base}, equal bits: {', '.join(said)}\n")
    return equal


def main() -> int:
    """Serve every run; 1 if bits differ, or if those of the control do not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("vllm-invariance"), help="for files")
    parser.add_argument("--serve", choices=RUNS, help="one run only, in this process")
    parser.add_argument("--at-once", type=int, default=1, help="runs that are served at once")
    parser.add_argument("--limit", type=float, default=600, help="seconds for a run")
    parser.add_argument("--only", nargs="+", choices=RUNS, default=[*RUNS], help="these runs")
    parser.add_argument("--ranks", type=int, default=1, help="GPUs that share the heads")
    parser.add_argument("--share-gpu", action="store_true", help="all ranks use the first GPU")
    parser.add_argument("--portable", action="store_true", help="serve vLLM's portable class")
    parser.add_argument("--new-tokens", type=int, default=NUM_NEW, help="of each answer")
    arguments = parser.parse_args()
    folder, model = arguments.folder, arguments.folder / "model"
    if arguments.share_gpu:
        check_sharing()
    if arguments.serve:
        run = replace(
            RUNS[arguments.serve],
            ranks=arguments.ranks,
            shares_gpu=arguments.share_gpu,
            portable=arguments.portable,
            new_tokens=arguments.new_tokens,
        )
        serve(run, model, folder / f"{arguments.serve}.json")
        return 0
    make_model(model)
    command = [sys.executable, __file__, "--ranks", str(arguments.ranks)]
    command += ["--new-tokens", str(arguments.new_tokens)]
    command += ["--share-gpu"] if arguments.share_gpu else []
    command += ["--portable"] if arguments.portable else []
    limits = arguments.at_once, arguments.limit
    served = serve_apart(command, arguments.only, folder, *limits, tell=None)
    right = []
    for name in arguments.only:
        kind = name.split(",")[0]
        base = f"{kind}, alone"
        if name == base:
            continue
        if not {name, base} <= served:
            right.append(False)
            continue
        right.append(compare(name, base, folder) == (kind != CONTROL))
    return int(not all(right))


if __name__ == "__main__":
    sys.exit(main())

"""vLLM's KV connectors and data parallelism with expert parallelism: the tokens of one engine.

The model and the prompts are those of DeepSeek-V3.2 in ``benchmarks/vllm_engine.py``, in eager
steps and with both plugins. All engines share one GPU; each is a process.

``offload`` and ``simple`` move pages to host memory, by vLLM's ``OffloadingConnector`` and its
``SimpleCPUOffloadConnector``: prompts are answered, the GPU's cached prefixes are dropped, and the
prompts are answered again, from the host's pages. ``storage`` computes prompts in one engine, which
writes their pages to files, and answers them in another engine, which reads the files. ``nixl``
does the same through ``NixlConnector``, from GPU memory to GPU memory; it needs ``nixl``.

``dp`` serves a model with experts on ``--ranks`` ranks of data parallelism, which divide the
experts between them (``--enable-expert-parallel``, all-gather and reduce-scatter). The prompts are
divided, so that ranks run dummy steps, too. All ranks use device 0, so NCCL must allow several
ranks on a GPU: 2.30.7, named by ``VLLM_NCCL_SO_PATH``, with ``NCCL_MULTI_RANK_GPU_ENABLE=1``.

Needs vLLM 0.33. Run ``python benchmarks/vllm_connectors.py``, with ``--only`` for some of them.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import vllm_engine
from vllm_engine import BOTH, NO_MULTICAST, NUM_NEW, SERVED, Mode

EXPERTS: dict[str, Any] = {
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 256,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
}
"""Fields of a model with experts in all layers but the first."""

GIB = 1 << 30
PORTS = {"nixl prefill": 15600, "nixl decode": 15700}
"""Ports at which NIXL's agents meet."""
MASTER = 15800
"""Port at which ranks of data parallelism meet."""

SHORT = [7, 8, 9]
"""A prompt without a whole page: its steps let a connector finish what it has begun."""


def connector(name: str, role: str = "kv_both", **extra: object) -> dict[str, Any]:
    """An engine's arguments for one of vLLM's connectors."""
    transfer = {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}
    return {"kv_transfer_config": transfer, "enable_prefix_caching": name != "NixlConnector"}


def files(folder: Path) -> dict[str, Any]:
    """An engine's arguments for pages in files, which engines share."""
    return connector(
        "OffloadingConnector",
        spec_name="TieringOffloadingSpec",
        cpu_bytes_to_use=GIB,
        secondary_tiers=[{"type": "fs", "root_dir": str(folder / "pages")}],
    )


def wait_for(path: Path) -> str:
    """The text of a file that another engine writes at once."""
    while not path.exists():
        time.sleep(0.2)
    return path.read_text()


def write(path: Path, value: object) -> None:
    """Write JSON that appears complete."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value))
    part.replace(path)


def engine(folder: Path, weights: str = "model", **more: object) -> Any:  # noqa: ANN401 - of vLLM
    """An engine in this process, with both plugins.

    Raises:
        RuntimeError: other classes serve.
    """
    os.environ |= {
        "VLLM_PLUGINS": BOTH,
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_DEEP_GEMM_WARMUP": "skip",
        **NO_MULTICAST,
    }
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    vllm_engine.serve_portable_class()
    mode = Mode(BOTH, "CUSTOM", portable=True, more=more)
    llm = LLM(**vllm_engine.engine_arguments(mode, folder / weights))
    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
        classes = llm.apply_model(vllm_engine.attention_classes)[0]
        if not any(name.startswith("sparsemla.") for name in classes):
            raise RuntimeError(f"this package's classes must serve, got {classes}")
    told("ready")
    return llm


def told(text: str) -> None:
    """Tell the process that started this one."""
    sys.stdout.write(f"== {text}\n")
    sys.stdout.flush()


def ask(
    llm: Any,  # noqa: ANN401 - of vLLM
    prompts: Sequence[list[int]],
    count: int = NUM_NEW,
    transfers: Sequence[Mapping[str, Any]] | None = None,
) -> list[Any]:
    """Answers of the engine, by greedy decoding.

    Args:
        llm: the engine.
        prompts: token ids.
        count: tokens of an answer.
        transfers: for each prompt, what a connector gets to know.
    """
    from vllm import SamplingParams

    def params(number: int) -> Any:  # noqa: ANN401 - of vLLM
        extra = {"extra_args": {"kv_transfer_params": transfers[number]}} if transfers else {}
        return SamplingParams(
            temperature=0, max_tokens=count, ignore_eos=True, logprobs=2, detokenize=False, **extra
        )

    found = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts],
        [params(number) for number in range(len(prompts))],
        use_tqdm=False,
    )
    return list(found)


def report(answers: Sequence[Any]) -> list[dict[str, Any]]:
    """What is compared, and how many tokens of each prompt were not computed."""
    rows = []
    for answer in answers:
        steps = answer.outputs[0].logprobs
        best = [sorted(each.logprob for each in step.values()) for step in steps]
        rows.append(
            {
                "tokens": list(answer.outputs[0].token_ids),
                "margin": min(each[-1] - each[-2] for each in best),
                "prompt": len(answer.prompt_token_ids),
                "cached": answer.num_cached_tokens or 0,
            }
        )
    return rows


def all_prompts() -> list[list[int]]:
    """Those of ``benchmarks/vllm_engine.py``."""
    return SERVED["deepseek_v32"].prompts()


def alone(folder: Path, result: Path, weights: str = "model") -> None:
    """One engine without a connector."""
    write(result, report(ask(engine(folder, weights), all_prompts())))


def offloaded(name: str, folder: Path, result: Path) -> None:
    """Answer again after the GPU has dropped all pages.

    Raises:
        RuntimeError: the GPU kept some.
    """
    llm = engine(folder, **connector(name, cpu_bytes_to_use=GIB))
    ask(llm, all_prompts())
    settle(llm)
    if not llm.reset_prefix_cache():
        raise RuntimeError("the GPU's cached prefixes must be dropped")
    told("answered once, pages of the GPU dropped")
    write(result, report(ask(llm, all_prompts())))


def settle(llm: Any, steps: int = 6) -> None:  # noqa: ANN401 - of vLLM
    """Some steps and time in which a connector finishes what it has begun."""
    for _ in range(steps):
        ask(llm, [SHORT], 2)
        time.sleep(0.25)


def storage_prefill(folder: Path, result: Path) -> None:
    """Compute prompts and write their pages to files.

    Raises:
        RuntimeError: there are no files.
    """
    llm = engine(folder, **files(folder))
    ask(llm, all_prompts(), 1)
    settle(llm)
    found = [path for path in (folder / "pages").rglob("*.bin") if path.stat().st_size]
    told(f"{len(found)} files of {found[0].stat().st_size if found else 0} bytes")
    if not found:
        raise RuntimeError("pages must be in files, found none")
    write(result, len(found))


def storage_decode(folder: Path, result: Path) -> None:
    """Answer prompts whose pages are in files."""
    llm = engine(folder, **files(folder))
    wait_for(result.with_name("storage prefill.json"))
    write(result, report(ask(llm, all_prompts())))


def meet(role: str) -> None:
    """Let this process's NIXL agents be found."""
    os.environ |= {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(PORTS[role]),
    }


def nixl_prefill(folder: Path, result: Path) -> None:
    """Compute prompts and keep their pages until the other engine has read them."""
    meet("nixl prefill")
    llm = engine(folder, **connector("NixlConnector", "kv_producer"))
    asked = {"do_remote_decode": True, "do_remote_prefill": False}
    answers = ask(llm, all_prompts(), 1, [asked] * len(all_prompts()))
    told("computed the prompts")
    write(result, [each.kv_transfer_params for each in answers])
    wait_for(result.with_name("nixl decode.json"))


def nixl_decode(folder: Path, result: Path) -> None:
    """Answer prompts whose pages are in the other engine."""
    meet("nixl decode")
    llm = engine(folder, **connector("NixlConnector", "kv_consumer"))
    params = json.loads(wait_for(result.with_name("nixl prefill.json")))
    for each in params:
        (each or {}).pop("remote_prefill_cached_tokens", None)  # else vLLM reports these as cached
    told(f"reads {sum(bool(each) for each in params)} prompts from the other engine")
    write(result, report(ask(llm, all_prompts(), transfers=[each or {} for each in params])))


def dp_rank(rank: int, ranks: int, folder: Path, result: Path) -> None:
    """One rank of data parallelism; it answers every ``ranks``-th prompt."""
    os.environ |= {
        "VLLM_DP_RANK": str(rank),
        "VLLM_DP_RANK_LOCAL": "0",  # which names the device
        "VLLM_DP_SIZE": str(ranks),
        "VLLM_DP_MASTER_IP": "127.0.0.1",
        "VLLM_DP_MASTER_PORT": str(MASTER),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",  # engines of idle ranks run dummy steps
    }
    llm = engine(
        folder,
        "experts",
        enable_expert_parallel=True,
        all2all_backend="allgather_reducescatter",
    )
    mine = all_prompts()[rank::ranks] or [SHORT]
    write(result, report(ask(llm, mine)))
    told("answered")
    for other in range(ranks):  # an engine that ends would stop the others
        wait_for(result.with_name(f"dp {other}.json"))
    time.sleep(1)


@dataclass(frozen=True)
class Job:
    """Engines that run together, and how their answers are checked.

    Args:
        roles: what each process does with the folder and its result.
        base: of :data:`jobs`, whose answers must be equal.
        answers: the roles whose answers are compared, in the order of :func:`all_prompts`.
        reads: prompts of at least a page must be read, not computed.
        shared_gpu: the engines are ranks of one group on one GPU.
    """

    roles: Mapping[str, Callable[[Path, Path], None]]
    base: str | None = None
    answers: Sequence[str] = field(default_factory=list)
    reads: bool = False
    shared_gpu: bool = False


def jobs(ranks: int) -> dict[str, Job]:
    """All jobs, by name; those that others are compared with come first."""
    dp: dict[str, Callable[[Path, Path], None]] = {
        f"dp {rank}": partial(dp_rank, rank, ranks) for rank in range(ranks)
    }
    return {
        "one": Job({"one": alone}),
        "experts": Job({"experts": partial(alone, weights="experts")}),
        "offload": Job(
            {"offload": partial(offloaded, "OffloadingConnector")}, "one", ["offload"], True
        ),
        "simple": Job(
            {"simple": partial(offloaded, "SimpleCPUOffloadConnector")}, "one", ["simple"], True
        ),
        "storage": Job(
            {"storage prefill": storage_prefill, "storage decode": storage_decode},
            "one",
            ["storage decode"],
            True,
        ),
        "nixl": Job(
            {"nixl prefill": nixl_prefill, "nixl decode": nixl_decode},
            "one",
            ["nixl decode"],
            True,
        ),
        "dp": Job(dp, "experts", [f"dp {rank}" for rank in range(ranks)], shared_gpu=True),
    }


def in_order(parts: Sequence[list[dict[str, Any]]], count: int) -> list[dict[str, Any]]:
    """Answers of ranks in the order of the prompts; ranks without one answered another.

    >>> in_order([[{"a": 0}, {"a": 2}], [{"a": 1}]], 3)
    [{'a': 0}, {'a': 1}, {'a': 2}]
    """
    return [parts[number % len(parts)][number // len(parts)] for number in range(count)]


def compare(name: str, job: Job, folder: Path) -> bool:
    """Tell how many answers are equal to those of the job's base, and how many tokens were read."""
    lists = [json.loads((folder / f"{role}.json").read_text()) for role in job.answers]
    base = json.loads((folder / f"{job.base}.json").read_text())
    found = in_order(lists, len(base))
    equal = sum(a["tokens"] == b["tokens"] for a, b in zip(found, base, strict=True))
    margin = min(each["margin"] for each in found)
    text = f"{name} and {job.base}: {equal} of {len(base)} answers of {NUM_NEW} tokens are equal"
    text += f", with margins of at least {margin:.2f}"
    missing = 0
    if job.reads:
        page = SERVED["deepseek_v32"].block_size or 1
        pages = [each for each in found if each["prompt"] > page]
        missing = sum(each["cached"] < page for each in pages)
        text += f"; {sum(each['cached'] for each in found)} of {sum(e['prompt'] for e in found)} "
        text += f"tokens of prompts were read, {missing} of {len(pages)} long prompts computed"
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
    return equal == len(base) and not missing


def run_job(name: str, job: Job, command: Sequence[str], folder: Path, limit: float) -> bool:
    """Run the engines of a job; False, with the ends of their logs, if one fails."""
    began = time.monotonic()
    environment = dict(os.environ)
    nccl = environment.pop("VLLM_NCCL_SO_PATH", None)
    if job.shared_gpu and nccl is not None:
        environment |= {"VLLM_NCCL_SO_PATH": nccl, "LD_PRELOAD": nccl}  # vLLM's and PyTorch's calls
    running = {}
    for role in job.roles:
        (folder / f"{role}.json").unlink(missing_ok=True)
        whole = [*command, "--limit", f"{limit:g}", "--role", role]
        with (folder / f"{role}.log").open("w") as log:
            running[role] = subprocess.Popen(
                whole, stdout=log, stderr=log, env=environment, start_new_session=True
            )
    failed: dict[str, str] = {}
    waiting = set(running)
    while waiting and not failed:
        time.sleep(0.2)
        for role in sorted(waiting):
            if (code := running[role].poll()) is not None:
                waiting.discard(role)
                if code:
                    failed[role] = f"ended with code {code}"
        if time.monotonic() - began > limit:
            failed |= dict.fromkeys(waiting, f"did not end in {limit:.0f} s")
    for process in running.values():  # with their children
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    for role, what in failed.items():
        lines = (folder / f"{role}.log").read_text(errors="replace").splitlines()
        errors = [line[:300] for line in lines if "Error" in line][-4:]
        last = "\n".join([*errors, "...", *(line[:300] for line in lines[-6:])])
        sys.stdout.write(f"{name}: {role} {what}; of {folder / role}.log:\n{last}\n")
    if not failed:
        seconds = time.monotonic() - began
        said = [
            f"{role}: {line[3:]}"
            for role in job.roles
            for line in (folder / f"{role}.log").read_text(errors="replace").splitlines()
            if line.startswith("== ") and line != "== ready"
        ]
        sys.stdout.write(f"{name}: done in {seconds:.0f} s{''.join('; ' + s for s in said)}\n")
    sys.stdout.flush()
    return not failed


def main() -> int:
    """Run jobs, those that others are compared with first; 1 if tokens differ or one fails."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=jobs(2), help="these jobs, and their bases")
    parser.add_argument("--ranks", type=int, default=2, help="of data parallelism")
    parser.add_argument("--folder", type=Path, default=Path("vllm-connectors"), help="for files")
    parser.add_argument("--at-once", type=int, default=4, help="jobs at once")
    parser.add_argument("--limit", type=float, default=240, help="seconds for all")
    parser.add_argument("--role", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    folder, known = arguments.folder.absolute(), jobs(arguments.ranks)
    if arguments.role:
        faulthandler.dump_traceback_later(0.93 * arguments.limit)
        (role,) = [
            job.roles[arguments.role] for job in known.values() if arguments.role in job.roles
        ]
        role(folder, folder / f"{arguments.role}.json")
        sys.stdout.flush()
        os._exit(0)  # an engine may wait for others that have ended
    chosen = {name: known[name] for name in arguments.only or known}
    bases = {str(job.base): known[str(job.base)] for job in chosen.values() if job.base}
    end = time.monotonic() + arguments.limit
    vllm_engine.make_model(folder / "model")
    if "experts" in chosen | bases:
        vllm_engine.make_model(folder / "experts", **EXPERTS)
    command = [sys.executable, __file__, "--folder", str(folder), "--ranks", str(arguments.ranks)]
    good = set[str]()

    def run(name: str) -> bool:
        left = end - time.monotonic()
        if left < 20:
            sys.stdout.write(f"{name}: left out, {max(left, 0):.0f} s are left\n")
            return False
        return run_job(name, known[name], command, folder, left)

    def compared(name: str) -> bool:
        job = chosen[name]
        if not run(name):
            return False
        if str(job.base) not in good:
            sys.stdout.write(f"{name}: not compared, as {job.base} failed\n")
            return False
        return compare(name, job, folder)

    first = list(dict.fromkeys([*bases, *(name for name, job in chosen.items() if not job.base)]))
    rest = [name for name in chosen if name not in first]
    with ThreadPoolExecutor(arguments.at_once) as pool:
        ran = list(pool.map(run, first))
        good |= {name for name, fine in zip(first, ran, strict=True) if fine}
        results = [*ran, *pool.map(compared, rest)]
    return int(not all(results))


if __name__ == "__main__":
    sys.exit(main())

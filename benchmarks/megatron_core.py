"""Times an attention core of GLM-5's sizes in Megatron-core: its own path, and this package's.

A core is the selection, the attention and the loss of the indexer, forward and backward. Outputs,
gradients and losses are compared before anything is timed. Megatron runs without its kernels, whose
packages it would have to find; torch's linear layers stand for TransformerEngine's.

Run on a GPU, with Megatron-core 0.19 installed as docs/megatron.md says::

    PYTHONPATH=/tmp/megatron:tests python benchmarks/megatron_core.py

Ranks share the heads, or with ``--context`` the tokens; each compares both paths on its share::

    PYTHONPATH=/tmp/megatron:tests torchrun --nproc-per-node 2 benchmarks/megatron_core.py

Times are of the slowest rank. Where ranks share a GPU, as ``NCCL_MULTI_RANK_GPU_ENABLE=1`` lets
them, there are none.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.transformer.experimental_attention_variant import dsa
from torch import Tensor, distributed, nn

import test_megatron as layers
from sparsemla_lab.testing.ranks import gpu_of, shared

GLM5 = {
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 256,
    "dsa_indexer_n_heads": 32,
    "dsa_indexer_head_dim": 128,
    "dsa_indexer_topk": 2048,
}
TOLERANCE = 2**-5
"""Relative L2 error of bfloat16 gradients over many products."""


def make_core(config: Any, spec: Any, device: str) -> nn.Module:  # noqa: ANN401 - Megatron's
    """The attention core of a layer, with the same weights each time."""
    torch.manual_seed(0)
    return layers.build_module(
        spec.submodules.core_attention,
        config=config,
        layer_number=1,
        attn_mask_type=layers.AttnMaskType.causal,
        attention_type="self",
        cp_comm_type=config.cp_comm_type,
        softmax_scale=256**-0.5,
        pg_collection=layers.group(),
    ).to(device)


def inputs(tokens: int, sizes: dict[str, int], device: str) -> dict[str, Any]:
    """Arguments of a core: absorbed queries ``[tokens, 1, heads, dims]``, rows, hidden states."""
    generator = torch.Generator(device).manual_seed(1)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.bfloat16)

    heads, latent = sizes["num_attention_heads"], sizes["kv_lora_rank"]
    dims = latent + sizes["qk_pos_emb_head_dim"]
    return {
        "query": rand(tokens, 1, heads, dims).requires_grad_(),
        "key": rand(tokens, 1, 1, dims).requires_grad_(),
        "value": None,
        "attention_mask": None,
        "x": rand(tokens, 1, sizes["hidden_size"]),
        "qr": rand(tokens, 1, sizes["q_lora_rank"]),
        "attn_mask_type": layers.AttnMaskType.causal,
        "up_v_weight": 0.05 * rand(heads, sizes["v_head_dim"], latent),
    }


def share(arguments: dict[str, Any], config: Any) -> dict[str, Any]:  # noqa: ANN401 - Megatron's
    """This rank's part of the arguments: heads and, of hidden states, tokens; or tokens."""
    tp, cp = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_context_parallel_rank(),
    )
    own = dict(arguments)
    if (num_ranks := config.tensor_model_parallel_size) > 1:
        own["query"] = own["query"].chunk(num_ranks, 2)[tp]
        own["up_v_weight"] = own["up_v_weight"].chunk(num_ranks)[tp]
        own |= {name: own[name].chunk(num_ranks)[tp] for name in ("x", "qr")}
    if (num_ranks := config.context_parallel_size) > 1:
        tokens, device = len(own["query"]), own["query"].device
        places = layers.dsa_layout.build_zigzag_cp_local_positions(tokens, num_ranks, cp, device)
        own |= {name: own[name][places] for name in ("query", "key", "x", "qr")}
    for name in ("query", "key"):
        own[name] = own[name].detach().clone().requires_grad_()
    return own


def slowest(value: float, device: str) -> float:
    """The largest value of all ranks."""
    largest = torch.tensor(value, dtype=torch.float64, device=device)
    distributed.all_reduce(largest, distributed.ReduceOp.MAX)
    return float(largest)


def step(core: nn.Module, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """Forward and backward: the output, all gradients, the losses."""
    query, key = arguments["query"], arguments["key"]
    tracker = dsa.DSAIndexerLossLoggingHelper.tracker
    tracker["values"] = torch.zeros(layers.LAYERS, device=query.device)
    parameters = dict(core.named_parameters())
    for leaf in (query, key, *parameters.values()):
        leaf.grad = None
    out = core(**arguments)
    out.float().square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in parameters.items()}
    return {
        "out": out,
        "query": query.grad,
        "key": key.grad,
        **gradients,
        "loss": tracker["values"],
    }


def timed(core: nn.Module, arguments: dict[str, Any], repeats: int) -> tuple[float, float]:
    """Median milliseconds of a step, and the most GiB that it takes."""
    on_gpu, times = arguments["query"].is_cuda, []
    for _ in range(2):
        step(core, arguments)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
    for _ in range(repeats):
        began = time.perf_counter()
        step(core, arguments)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - began))
    memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
    device = str(arguments["query"].device)
    return slowest(sorted(times)[repeats // 2], device), slowest(memory, device)


def measure(
    tokens: int,
    sizes: dict[str, int],
    device: str,
    parallel: dict[str, Any],
    *,
    beside: bool,
    sparse: bool,
) -> str:
    """A line about one number of tokens.

    Args:
        tokens: of the sequence.
        sizes: of the core.
        device: of the work.
        parallel: settings of Megatron for several ranks.
        beside: compare with Megatron's own path, and time it.
        sparse: the loss is over the selection, not over all keys.

    Raises:
        RuntimeError: results differ from Megatron's, or between two runs.
    """
    untimed = device != "cpu" and shared(distributed.get_world_size())
    config = layers.make_config(
        dsa_indexer_use_sparse_loss=sparse,
        params_dtype=torch.bfloat16,
        bf16=True,
        **sizes,
        **parallel,
    )
    spec = layers.layer_spec(config)
    core, arguments = (
        make_core(config, layers.with_sparsemla(spec), device),
        share(inputs(tokens, sizes, device), config),
    )
    found = {name: value.clone() for name, value in step(core, arguments).items()}
    again = step(core, arguments)
    if slowest(any(not torch.equal(x, again[name]) for name, x in found.items()), device):
        raise RuntimeError(f"{tokens} tokens: two runs have different bits")
    line = f"{tokens:6d} tokens, loss over {'the selection' if sparse else 'all keys'}: "
    if beside:
        theirs = make_core(config, spec, device)
        theirs.load_state_dict(core.state_dict())
        wanted = {name: value.float() for name, value in step(theirs, arguments).items()}
        errors = [
            ((found[name].float() - value).norm() / value.norm()).item()
            for name, value in wanted.items()
        ]
        error = slowest(max(errors) if all(map(math.isfinite, errors)) else math.inf, device)
        if not error <= TOLERANCE:
            raise RuntimeError(f"{tokens} tokens: relative error {error:.1e}, beyond {TOLERANCE}")
        line += f"error {error:.1e}, "
        if not untimed:
            ms, gib = timed(theirs, arguments, 3)
            line += f"Megatron {ms:.1f} ms {gib:.1f} GiB, "
    if untimed:
        return line + "the same bits twice"
    ms, gib = timed(core, arguments, 5)
    return line + f"sparsemla {ms:.1f} ms {gib:.1f} GiB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with small sizes")
    parser.add_argument("--context", action="store_true", help="ranks share tokens, not heads")
    given = parser.parse_args(arguments)
    device, rank, num_ranks = given.device, 0, 1
    layers.on_this_device(setattr, device)
    meeting = f"file://{tempfile.mkdtemp()}/ranks"
    if distributed.is_torchelastic_launched():
        rank, num_ranks, meeting = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), "env://"
    if device == "cuda":
        torch.cuda.set_device(gpu_of(rank, num_ranks))
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=meeting,
        rank=rank,
        world_size=num_ranks,
    )
    parallel: dict[str, Any] = {}
    if num_ranks > 1 and given.context:
        parallel = {"context_parallel_size": num_ranks, "cp_comm_type": "all_gather"}
    elif num_ranks > 1:
        parallel = {"tensor_model_parallel_size": num_ranks, "sequence_parallel": True}
    parallel_state.initialize_model_parallel(
        parallel.get("tensor_model_parallel_size", 1),
        context_parallel_size=parallel.get("context_parallel_size", 1),
    )
    sizes, scale = GLM5, 1
    if device == "cpu":
        sizes, scale = {name: size // 16 for name, size in GLM5.items()}, 64
    for tokens, sparse in ((2048, True), (4096, True), (8192, True), (32768, True), (8192, False)):
        beside = tokens <= 4096
        line = measure(tokens // scale, sizes, device, parallel, beside=beside, sparse=sparse)
        if rank == 0:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

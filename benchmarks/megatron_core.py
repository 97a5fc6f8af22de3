"""Times an attention core of GLM-5's sizes in Megatron-core: its own path, and this package's.

A core is the selection, the attention and the loss of the indexer, forward and backward. Outputs,
gradients and losses are compared before anything is timed. Megatron runs without its kernels, whose
packages it would have to find; torch's linear layers stand for TransformerEngine's.

Run on a GPU, with Megatron-core 0.19 installed as docs/megatron.md says::

    PYTHONPATH=/tmp/megatron:tests python benchmarks/megatron_core.py
"""

from __future__ import annotations

import argparse
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
    return sorted(times)[repeats // 2], memory


def measure(tokens: int, sizes: dict[str, int], device: str, *, beside: bool, sparse: bool) -> str:
    """A line about one number of tokens.

    Args:
        tokens: of the sequence.
        sizes: of the core.
        device: of the work.
        beside: compare with Megatron's own path, and time it.
        sparse: the loss is over the selection, not over all keys.

    Raises:
        RuntimeError: results differ from Megatron's, or between two runs.
    """
    config = layers.make_config(
        dsa_indexer_use_sparse_loss=sparse, params_dtype=torch.bfloat16, bf16=True, **sizes
    )
    spec = layers.layer_spec(config)
    core, arguments = (
        make_core(config, layers.with_sparsemla(spec), device),
        inputs(tokens, sizes, device),
    )
    found = {name: value.clone() for name, value in step(core, arguments).items()}
    again = step(core, arguments)
    if any(not torch.equal(value, again[name]) for name, value in found.items()):
        raise RuntimeError(f"{tokens} tokens: two runs have different bits")
    line = f"{tokens:6d} tokens, loss over {'the selection' if sparse else 'all keys'}: "
    if beside:
        theirs = make_core(config, spec, device)
        theirs.load_state_dict(core.state_dict())
        wanted = {name: value.float() for name, value in step(theirs, arguments).items()}
        error = max(
            ((found[name].float() - value).norm() / value.norm()).item()
            for name, value in wanted.items()
        )
        if not error <= TOLERANCE:
            raise RuntimeError(f"{tokens} tokens: relative error {error:.1e}, beyond {TOLERANCE}")
        ms, gib = timed(theirs, arguments, 3)
        line += f"Megatron {ms:.1f} ms {gib:.1f} GiB, error {error:.1e}, "
    ms, gib = timed(core, arguments, 5)
    return line + f"sparsemla {ms:.1f} ms {gib:.1f} GiB"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each size."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with small sizes")
    device = parser.parse_args(arguments).device
    layers.on_this_device(setattr, device)
    distributed.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        init_method=f"file://{tempfile.mkdtemp()}/ranks",
        rank=0,
        world_size=1,
    )
    parallel_state.initialize_model_parallel()
    sizes, scale = GLM5, 1
    if device == "cpu":
        sizes, scale = {name: size // 16 for name, size in GLM5.items()}, 64
    for tokens in (2048, 4096, 8192, 32768):
        line = measure(tokens // scale, sizes, device, beside=tokens <= 4096, sparse=True)
        sys.stdout.write(line + "\n")
        sys.stdout.flush()
    sys.stdout.write(measure(8192 // scale, sizes, device, beside=False, sparse=False) + "\n")
    distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

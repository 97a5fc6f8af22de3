"""SGLang's sparse attention in Triton: over bfloat16 rows, and over DeepSeek-V4's caches.

Its files are loaded without SGLang; stand-ins take the place of the few names that they import.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from sparsemla.formats import BF16_576
from sparsemla_lab.bench.peers.base import Peer, Unavailable, module_from, side, stand_ins
from sparsemla_lab.bench.timing import Results
from sparsemla_lab.bench.workloads import (
    Inputs,
    Side,
    SparseDecode,
    SparsePrefill,
    WindowedDecode,
    Workload,
)


class SGLangSparseMLA(Peer):
    """Its default on AMD: a prefill that tunes itself, and a decode that splits the selection."""

    name = "SGLang triton_sparse_mla"
    portable = True
    FOLDER: ClassVar[str] = "sglang.kernels.ops.attention.dsa"
    HEADS: ClassVar[int] = 64
    """Most heads of a prefill that are measured."""

    def __init__(self, directories: list[Path]) -> None:
        path = self.FOLDER.replace(".", "/")
        for root in directories:
            if (root / path / "triton_sparse_mla_decode.py").is_file():
                with stand_ins("sglang", _names(root / path)):
                    prefill = importlib.import_module(f"{self.FOLDER}.triton_sparse_mla")
                    decode = importlib.import_module(f"{self.FOLDER}.triton_sparse_mla_decode")
                self.prefill = prefill.triton_sparse_mla_fwd
                self.decode = decode.triton_sparse_mla_decode_splitk
                return
        raise Unavailable(f"{path}/triton_sparse_mla_decode.py is not there")

    def supports(self, workload: Workload) -> str | None:
        if isinstance(workload, SparsePrefill):
            return None if workload.head_dim == 576 else "takes rows of 512 and 64 dims"
        if not isinstance(workload, SparseDecode) or isinstance(workload, WindowedDecode):
            return "has no such op"
        if workload.format is not BF16_576:
            return "takes a bfloat16 cache"
        return None if workload.query_len == 1 else "takes one token a request"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        scale = inputs["softmax_scale"]
        if isinstance(workload, SparsePrefill):
            if workload.heads > self.HEADS:
                raise Unavailable(
                    f"a program takes all heads: for more than {self.HEADS} its tuner's 27 "
                    "candidates spill and compile for minutes"
                )
            q, rows, ids = inputs["q"], inputs["kv"][:, None], inputs["topk_indices"][:, None]

            def prefill() -> Results:
                return (self.prefill(q[..., :512], q[..., 512:], rows, ids, scale)[0],)

            return [side(f"{self.name}_fwd", workload, inputs, prefill)]
        q, slots = inputs["q"][:, 0], inputs["topk_indices"]
        rows = inputs["cache"].data.view(-1, 1, 576)
        room: list[tuple[Tensor, Tensor]] = []  # its partial results, from the first call on

        def decode() -> Results:
            nope, rope = q[..., :512], q[..., 512:]
            return (self.decode(nope, rope, rows, slots, scale, workspace=room)[0][:, None],)

        return [side(f"{self.name}_decode", workload, inputs, decode)]


class SGLangTritonV4(Peer):
    """Its decode of DeepSeek-V4 for sm_120: a program takes a token's head, without MMAs."""

    name = "SGLang flash_mla_sm120_triton"
    portable = True
    FILE: ClassVar[str] = "sglang/kernels/ops/attention/flash_mla_sm120_triton.py"

    def __init__(self, directories: list[Path]) -> None:
        for root in directories:
            if (root / self.FILE).is_file():
                self.decode = module_from(root / self.FILE).flash_mla_sparse_decode_triton
                return
        raise Unavailable(f"{self.FILE} is not there")

    def supports(self, workload: Workload) -> str | None:
        return None if isinstance(workload, WindowedDecode) else "has no such op"

    def prepare(self, workload: Workload, inputs: Inputs) -> list[Side]:
        caches = [inputs[name].data.unsqueeze(2) for name in ("cache", "extra_cache")]

        def run() -> Results:
            out, _ = self.decode(
                inputs["q"],
                caches[0],
                inputs["topk_indices"],
                inputs["topk_lengths"],
                inputs["attn_sink"],
                512,
                inputs["softmax_scale"],
                caches[1],
                inputs["extra_topk_indices"],
                inputs["extra_topk_lengths"],
            )
            return (out,)

        return [side(self.name, workload, inputs, run)]


def _names(folder: Path) -> dict[str, dict[str, object]]:
    """The names of SGLang that its sparse attention imports, as on a GPU of NVIDIA."""
    return {
        SGLangSparseMLA.FOLDER: {"__path__": [str(folder)]},
        "sglang.kernels.ops.attention.metadata": {"q8kv8_topk_length_from_indices": None},
        "sglang.kernels.ops.quantization.fp8_kernel": {"is_fp8_fnuz": lambda: False},
        "sglang.srt.utils": {
            "get_device_core_count": _multiprocessors,
            "is_gfx95_supported": lambda: False,
        },
    }


def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
